"""Pure functions that shape rewards by length and choose among too many rollouts. No torch."""

from __future__ import annotations

import random
from collections.abc import Sequence


def overlong_penalty(length: int, *, max_length: int, cache: int) -> float:
    """What to add to a reward for a long completion: from 0 at max_length - cache tokens evenly down to -1 at
    max_length, and -1 beyond (DAPO, arXiv 2503.14476, eq. 13)."""
    if not 0 < cache <= max_length:
        raise ValueError(f"overlong_penalty: need 0 < cache <= max_length, got {cache} and {max_length}")
    return -min(1.0, max(0.0, (length - (max_length - cache)) / cache))


def tool_penalty(calls: int, errors: int) -> float:
    """Share of tool calls that failed; 0.5 without a call (GRPO-RoC, arXiv 2508.20722)."""
    return errors / calls if calls else 0.5


def resample_on_correct(
    positive: Sequence[bool], penalties: Sequence[float], *, keep: int, seed: int, minimum: int = 1
) -> tuple[int, ...]:
    """Which `keep` rollouts of an oversampled group to train, in ascending order (GRPO-RoC, arXiv 2508.20722).

    Positives and negatives keep their proportion, rounded to the nearest and to even between, with at least `minimum`
    of each where there are as many. Of the positives those with the lowest penalty stay, ties broken at random; of the
    negatives any. A group of one kind alone teaches nothing: the result is then empty.

    Raises:
        ValueError: fewer rollouts than `keep`, or `keep` below twice `minimum`.
    """
    if not 2 * minimum <= keep <= len(positive):
        raise ValueError(
            f"resample_on_correct: cannot keep {keep} of {len(positive)} rollouts, {minimum} of each kind"
        )
    rng = random.Random(seed)
    good = [i for i, is_good in enumerate(positive) if is_good]
    bad = [i for i, is_good in enumerate(positive) if not is_good]
    if not good or not bad:
        return ()
    rng.shuffle(good)
    good.sort(key=lambda i: penalties[i])
    least, most = max(min(minimum, len(good)), keep - len(bad)), min(len(good), keep - min(minimum, len(bad)))
    chosen = min(max(round(keep * len(good) / len(positive)), least), most)
    return tuple(sorted(good[:chosen] + rng.sample(bad, keep - chosen)))
