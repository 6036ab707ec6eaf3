"""What a finished group gives to training: which rollouts stay, and with which rewards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from actors.config import FilterConfig
from actors.types import Rollout
from losses.filters import overlong_penalty, resample_on_correct


def survivors(
    rollouts: Sequence[Rollout], config: FilterConfig, *, group_size: int, solved: float, seed: int
) -> tuple[Rollout, ...]:
    """The rollouts of a group that are trained, in their order; `reward` is what each is trained with.

    Truncated ones are counted first, as `on_truncated` says. Of more than `group_size` drawn so many stay: by these
    rewards those of at least `solved` are right. Last comes the penalty for length, so that a long answer stays right.

    The result is empty if a filter left fewer than two, or none of a group of one: there is nothing to compare.
    """
    kept = _counted(rollouts, config.on_truncated)
    if config.oversample > 1:
        kept = _resampled(kept, group_size, solved, seed)
    if len(kept) < min(len(rollouts), 2, group_size):
        return ()
    return tuple(_shortened(r, config.overlong_cache) for r in kept) if config.overlong_cache else kept


def _counted(rollouts: Sequence[Rollout], on_truncated: str) -> tuple[Rollout, ...]:
    """Truncated ones with the reward that they count as, or without them."""
    whole = [r.reward for r in rollouts if not r.truncated]
    if on_truncated == "reward" or len(whole) == len(rollouts):
        return tuple(rollouts)
    if on_truncated == "drop" or (on_truncated == "bootstrap" and not whole):
        return tuple(r for r in rollouts if not r.truncated)
    # The group's mean reward: compared with it such a rollout is neither better nor worse.
    stand_in = math.fsum(whole) / len(whole) if on_truncated == "bootstrap" else 0.0
    return tuple(replace(r, reward=stand_in) if r.truncated else r for r in rollouts)


def _resampled(rollouts: tuple[Rollout, ...], group_size: int, solved: float, seed: int) -> tuple[Rollout, ...]:
    """Right and wrong ones in proportion; none if there are not both."""
    if len(rollouts) < 2:
        return ()
    chosen = resample_on_correct(
        [r.reward >= solved for r in rollouts],
        [_penalty(r) for r in rollouts],
        keep=min(group_size, len(rollouts)),
        seed=seed,
    )
    return tuple(rollouts[i] for i in chosen)


def _penalty(rollout: Rollout) -> float:
    """The part `penalty`, whichever reward function gave it: of several its name comes after theirs and a dot."""
    return math.fsum(value for name, value in rollout.parts.items() if name.rpartition(".")[2] == "penalty")


def _shortened(rollout: Rollout, cache: int) -> Rollout:
    """With the penalty for the length of its last action."""
    last = rollout.turns[-1]
    penalty = overlong_penalty(last.end - last.start, max_length=rollout.sampling.max_tokens, cache=cache)
    return replace(rollout, reward=rollout.reward + penalty) if penalty else rollout
