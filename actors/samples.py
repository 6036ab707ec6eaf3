"""A few rollouts of a step as people read them: the records of `rollouts.jsonl`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from actors import payload
from actors.tokenizer import Tokenizer
from actors.types import Rollout, Taken

GOLDEN = (5**0.5 - 1) / 2
"""Multiples of it, without their whole parts, spread over 0..1 however many there are."""
PENDING = 4
"""Most tokens that wait for the rest of a character: UTF-8 has no longer ones."""
UNKNOWN = "\ufffd"
"""What decoders write for bytes that are no character."""


def choose(taken: Taken, count: int) -> list[int]:
    """Which of a step's groups to look at: numbers in `taken.groups`, ascending.

    Groups whose members got different rewards come first, as they carry the gradient. Among those the chosen ones are
    spread evenly from the hardest (lowest mean reward) to the easiest, and the spread starts elsewhere at each step.
    """
    rewards = [group.rewards for group in taken.groups]
    mixed = [i for i, values in enumerate(rewards) if len(values) and values.min() < values.max()]
    equal = [i for i, values in enumerate(rewards) if len(values) and values.min() == values.max()]
    chosen: list[int] = []
    for numbers in (mixed, equal):
        by_reward = sorted(numbers, key=lambda i: (float(rewards[i].mean()), i))
        wanted = min(count - len(chosen), len(by_reward))
        start = (taken.step + 1) * GOLDEN % 1.0
        chosen += [by_reward[int((k + start) * len(by_reward) / wanted)] for k in range(wanted)]
    return sorted(chosen)


def samples(taken: Taken, group_number: int, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The best and the worst rollout of one taken group; of equal ones the first and the last, of a single one that.

    Reads the group's payload, so it must run before the buffer frees it, which is when the next version is announced.

    Raises:
        FileNotFoundError: the payload was freed.
    """
    group = payload.read(taken.groups[group_number].handle)
    rewards = np.array([rollout.reward for rollout in group.rollouts])
    picked = {"best": int(rewards.argmax()), "worst": len(rewards) - 1 - int(rewards[::-1].argmin())}
    if len(rewards) == 1:
        del picked["worst"]
    head = {"step": taken.step, "ticket": group.ticket, "row": group.row}
    return [{**head, "rank": rank, **_record(group.rollouts[i], tokenizer)} for rank, i in picked.items()]


def _record(rollout: Rollout, tokenizer: Tokenizer) -> dict[str, Any]:
    tokens: list[int] = rollout.tokens.tolist()
    return {
        "reward": rollout.reward,
        "parts": rollout.parts,
        "turns": [
            {"kind": t.kind, "start": t.start, "end": t.end, "finish": t.finish, "reward": t.reward}
            for t in rollout.turns
        ],
        "pieces": pieces(tokens, tokenizer),
        "tokens": tokens,
        "mask": rollout.mask.tolist(),
        "logprobs": [round(value, 4) for value in rollout.logprobs.tolist()],
        "versions": rollout.versions.tolist(),
    }


def pieces(tokens: Sequence[int], tokenizer: Tokenizer) -> list[str]:
    """The text that each token adds, special ones included: joined they are the decoded text.

    A token that ends inside a character adds nothing; the one that completes it adds the character. What a token adds
    is seen by decoding it after the tokens of the piece before, since a token alone may lose its blank.
    """

    def decode(ids: Sequence[int]) -> str:
        return tokenizer.inner.decode(list(ids), skip_special_tokens=False)

    text = decode(tokens)
    out, begin, read, at = [], 0, 0, 0
    for end in range(1, len(tokens) + 1):
        known = len(decode(tokens[begin:read]))
        seen = decode(tokens[begin:end])
        to = at
        if not seen.endswith(UNKNOWN) or end - read >= PENDING or end == len(tokens):
            to = len(text) if end == len(tokens) else min(at + max(0, len(seen) - known), len(text))
            begin, read = read, end
        out.append(text[at:to])
        at = to
    return out
