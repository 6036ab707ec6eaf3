"""One member of a group: the token stream that policy and environment write, and what its failure costs."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np

from actors.environment import Environment, Outcome
from actors.types import (
    Completion,
    Finish,
    Group,
    GroupMeta,
    Kept,
    PayloadHandle,
    Rollout,
    Sampling,
    Turn,
    joined,
)

LARGEST = float(np.finfo(np.float32).max)
"""Rewards are kept as float32."""
TAKEN = frozenset({"mean", "trained", "zero_variance"})
"""Names after `reward/` that the buffer logs itself."""

Part = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, Kept | None]
"""Tokens, mask, logprobs, versions and kept sets of one turn."""


def read_only(tokens: np.ndarray) -> Part:
    """The part of a turn that the policy only reads."""
    n = len(tokens)
    return tokens, np.zeros(n, bool), np.zeros(n, np.float32), np.full(n, -1, np.int32), Kept.all_of(n)


class Stream:
    """A rollout under construction. Generated tokens are appended as they came and never tokenised again."""

    def __init__(self, prompt: Part, sampling: Sampling) -> None:
        """`prompt` is the part that `read_only` makes of the prompt's tokens; members of a group may share it."""
        self._sampling = sampling
        self._parts: list[Part] = []
        self._turns: list[Turn] = []
        self._measured: dict[str, float] = {}
        self._append(prompt, kind="prompt")

    def __len__(self) -> int:
        return self._turns[-1].end

    @property
    def tokens(self) -> np.ndarray:
        """int32 [n], everything so far: the prompt of the next request."""
        return np.concatenate([tokens for tokens, *_ in self._parts]) if len(self._parts) > 1 else self._parts[0][0]

    @property
    def reward(self) -> float:
        """Sum of the turns so far."""
        return sum(t.reward for t in self._turns)

    def act(self, completion: Completion, outcome: Outcome, finish: Finish) -> None:
        """Append what the policy generated, how it counts as ended, and what the environment gave for it.

        Raises:
            ValueError: the reward, or a part, makes a sum that is not finite in float32; or a part has a name that the
                buffer logs itself.
        """
        c = completion
        for name, value in outcome.parts.items():
            self._measured[name] = self._measured.get(name, 0.0) + value
            if name in TAKEN:
                raise ValueError(f"a part of the reward may not be called {name!r}: the metrics have a reward/{name}")
        self._append(
            (c.tokens, np.ones(len(c.tokens), bool), c.logprobs, c.versions, c.kept),
            kind="action",
            finish=finish,
            reward=outcome.reward,
        )
        for name, value in {"reward": self.reward, **self._measured}.items():
            if not abs(value) <= LARGEST:
                raise ValueError(f"the {name} is {value}: it must be finite")

    def observe(self, tokens: np.ndarray) -> None:
        """Append what the environment said."""
        self._append(read_only(tokens), kind="observation")

    def _append(self, part: Part, **turn: Any) -> None:
        start = self._turns[-1].end if self._turns else 0
        self._turns.append(Turn(start=start, end=start + len(part[0]), **turn))
        self._parts.append(part)

    def finish(self) -> Rollout:
        """The finished rollout."""
        *columns, kept = zip(*self._parts, strict=True)
        tokens, mask, logprobs, versions = (np.concatenate(column) for column in columns)
        return Rollout(
            tokens=tokens,
            mask=mask,
            logprobs=logprobs,
            versions=versions,
            turns=tuple(self._turns),
            reward=self.reward,
            sampling=self._sampling,
            parts=self._measured,
            kept=joined([(len(part[0]), own) for part, own in zip(self._parts, kept, strict=True)]),
        )


class EpisodeError(Exception):
    """An environment or its reward raised, hung or gave no number: this costs the rollout, not the run its life."""


@dataclass(kw_only=True)
class Member:
    """A member of a group while it is played."""

    index: int
    name: str
    """For messages."""
    environment: Environment | None = None
    stream: Stream | None = None
    failure: str | None = None
    """The first error of its environment with its traceback; such a member is left out."""

    def fail(self, error: EpisodeError) -> None:
        """Leave the group."""
        if self.failure is None:
            cause = error.__cause__
            trace = "" if cause is None else "".join(["\n", *traceback.format_exception(cause)]).rstrip()
            self.failure = f"{self.name}, {error}{trace}"


@asynccontextmanager
async def episode_errors(where: str, deadline: float) -> AsyncIterator[None]:
    """Make an EpisodeError of what the environment's own code raises inside, or does not finish by `deadline` (in the
    event loop's time)."""
    task = asyncio.current_task()
    assert task is not None
    try:
        async with asyncio.timeout_at(deadline) as limit:
            yield
    except asyncio.CancelledError as error:
        if task.cancelling():
            raise
        raise EpisodeError(f"environment {where} cancelled itself") from error
    except (Exception, SystemExit, KeyboardInterrupt) as error:  # the last two would end the actor's event loop
        text = "not done when the group's time (--rollout.timeout) was up" if limit.expired() else repr(error)
        raise EpisodeError(f"environment {where}: {text}") from error


def meta_of(group: Group, handle: PayloadHandle, quarantined: int, scored: Sequence[Rollout]) -> GroupMeta:
    """What the buffer needs to know of a group: `quarantined` members failed, `scored` got rewards, and the group
    holds what filters left of them."""
    rollouts = group.rollouts
    lengths = np.array([len(r.tokens) for r in rollouts], np.int32)
    starts = np.cumsum(lengths) - lengths
    mask = np.concatenate([r.mask for r in rollouts])
    versions = np.concatenate([r.versions for r in rollouts])
    actions = np.add.reduceat(mask, starts, dtype=np.int32)
    oldest = np.minimum.reduceat(np.where(mask, versions, np.iinfo(np.int32).max), starts)
    return GroupMeta(
        ticket=group.ticket,
        attempt=group.attempt,
        row=group.row,
        rewards=rewards_of(rollouts),
        lengths=lengths,
        actions=actions,
        oldest=np.where(actions, oldest, -1).astype(np.int32),
        newest=np.maximum.reduceat(versions, starts),
        truncated=np.array([r.truncated for r in scored], bool),
        handle=handle,
        parts=parts_of(scored),
        judged=None if all(a is b for a, b in zip_longest(rollouts, scored)) else rewards_of(scored),
        quarantined=quarantined,
    )


def rewards_of(rollouts: Sequence[Rollout]) -> np.ndarray:
    """float32 [rollouts]."""
    return np.array([r.reward for r in rollouts], np.float32)


def parts_of(rollouts: Sequence[Rollout]) -> dict[str, np.ndarray]:
    """The rollouts' `parts` as columns, float32, nan where one lacks a name."""
    names = dict.fromkeys(name for r in rollouts for name in r.parts)
    return {name: np.array([r.parts.get(name, np.nan) for r in rollouts], np.float32) for name in names}
