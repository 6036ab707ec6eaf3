"""What a rollout worker drives: an environment of one or many turns. A plain reward function is one of one turn.

The protocol of an episode: `reset` gives the first prompt, then each generated text goes to `step` with the reason
why it ended, and each answer either ends the episode or adds an observation for the policy to read:

    class Guess:  # find a number; `observation` is read before the next action, None ends the episode
        async def reset(self, row):
            self.number, self.left = row["number"], 5
            return row["prompt"]

        async def step(self, action, finish):
            self.left -= 1
            if action.strip() == str(self.number):
                return Outcome(reward=1.0, parts={"guesses": 5 - self.left})
            return Outcome(reward=-0.1, observation="\\nNo. Again: " if self.left else None)

        async def close(self):
            return

The rollout is one stream of tokens: prompt, action, observation, action and so on. What was generated stays as it
came, observations are tokenised as they are (with a chat template's marks, if the model wants them), and only actions
are trained. Its reward is the sum over the turns. Where an observation leaves no room in the engine's context, the
episode ends like an action that ran into its limit of tokens, with the reward so far.

Whatever the environment raises, and a reward that is not finite, costs that rollout alone: it leaves its group and is
counted. So does a step that is not done when the group's time (`--rollout.timeout`) is up, if it waits by `await`.
Code that blocks inside `async def` stops all episodes of its worker and cannot be interrupted: hand it to a thread or
a process (`asyncio.to_thread`). The buffer ends a run whose worker hangs so.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from actors.types import Finish

Row = Mapping[str, Any]
Prompt = str | Sequence[Mapping[str, Any]]
"""Plain text, or chat messages for the tokenizer's chat template."""
Score = float | Mapping[str, float]
"""A reward, or a mapping that holds it as `reward` among parts that are logged."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What an environment answers to an action."""

    reward: float = 0.0
    observation: str | None = None
    """Text that the policy reads before its next action; None ends the episode."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Measurements by name, summed over the turns and logged as `reward/<name>`; never trained."""


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


@runtime_checkable
class Checked(Protocol):
    """What a task has besides, if it can tell before anything starts that it will not work."""

    def check(self, model: str, room: int | None) -> None:
        """Raise ValueError or OSError with one line if rows or rewards cannot work with the model of this folder, or
        a prompt has more than `room` tokens (None is no bound)."""
        ...


@runtime_checkable
class HeldOut(Protocol):
    """What a task has besides, if it keeps rows from training for evaluation."""

    @property
    def held_out_rows(self) -> int:
        """Rows that are never trained; 0 if there are none."""
        ...

    def held_out_row(self, i: int) -> Row:
        """Held-out row i, the same on every call."""
        ...

    def environment(self) -> Environment:
        """A new episode."""
        ...


@dataclass(frozen=True)
class HeldOutRows:
    """The held-out rows of a task as a task."""

    task: HeldOut

    @property
    def rows(self) -> int:
        return self.task.held_out_rows

    def row(self, i: int) -> Row:
        return self.task.held_out_row(i)

    def environment(self) -> Environment:
        return self.task.environment()


@dataclass(kw_only=True)
class SingleTurn:
    """An episode of one action, judged by `reward(prompt, completion, finish=..., **row without prompt)`.

    The function may be async. It returns the reward, or a mapping that holds it as `reward`; the other entries are
    `Outcome.parts`.
    """

    reward: Callable[..., Score | Awaitable[Score]]

    async def reset(self, row: Row) -> Prompt:
        self._row = dict(row)
        prompt: Prompt = self._row.pop("prompt")
        self._prompt = prompt
        return prompt

    async def step(self, action: str, finish: Finish) -> Outcome:
        score = self.reward(self._prompt, action, finish=finish, **self._row)
        return outcome_of(await score if inspect.isawaitable(score) else score)

    async def close(self) -> None:
        return


def outcome_of(score: Score) -> Outcome:
    """The end of an episode with this score.

    Raises:
        ValueError: a mapping has no `reward`.
    """
    if not isinstance(score, Mapping):
        return Outcome(reward=float(score))
    if "reward" not in score:
        raise ValueError(f"the reward function returned a mapping without 'reward': it has {sorted(score)}")
    parts = {name: float(value) for name, value in score.items()}
    return Outcome(reward=parts.pop("reward"), parts=parts)
