"""What a rollout worker drives: an environment of one or many turns. A plain reward function is one of one turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from actors.types import Finish

Row = Mapping[str, Any]
Prompt = str | Sequence[Mapping[str, Any]]
"""Plain text, or chat messages for the tokenizer's chat template."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What an environment answers to an action."""

    reward: float = 0.0
    observation: str | None = None
    """Text that the policy reads before its next action; None ends the episode."""


class Environment(Protocol):
    """One episode. Each member of a group gets its own."""

    async def reset(self, row: Row) -> Prompt:
        """Begin with a dataset row; returns the first prompt."""
        ...

    async def step(self, action: str, finish: Finish) -> Outcome:
        """Judge an action (generated text without special tokens) and go on or end."""
        ...

    async def close(self) -> None:
        """Free what the episode holds; called once, also after a failure."""
        ...


class Task(Protocol):
    """Where rows come from and how an episode over one is played. Picklable: it is sent to the workers."""

    @property
    def rows(self) -> int | None:
        """Rows of one epoch; None is endless."""
        ...

    def row(self, i: int) -> Row:
        """Row i, the same on every call; its `prompt` is what the policy sees first."""
        ...

    def environment(self) -> Environment:
        """A new episode."""
        ...


@dataclass(kw_only=True)
class SingleTurn:
    """An episode of one action, judged by `reward(prompt, completion, finish=..., **row without prompt)`."""

    reward: Callable[..., float]

    async def reset(self, row: Row) -> Prompt:
        self._row = dict(row)
        prompt: Prompt = self._row.pop("prompt")
        self._prompt = prompt
        return prompt

    async def step(self, action: str, finish: Finish) -> Outcome:
        return Outcome(reward=float(self.reward(self._prompt, action, finish=finish, **self._row)))

    async def close(self) -> None:
        return
