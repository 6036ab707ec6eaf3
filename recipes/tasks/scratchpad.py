"""What the tiny tasks share: the answer stands after the first `;`, and what comes before it is scratch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from actors.environment import Environment, SingleTurn
from actors.types import Finish


@dataclass(frozen=True, kw_only=True)
class Scratchpad:
    """Rows with a prompt and an answer; a subclass makes them."""

    max_tokens: ClassVar[int]
    """Of the longest honest completion, its end included, or some more."""
    checkpoint: ClassVar[Path]
    """Folder of the tiny model that begins on this task."""

    rows: int = 10_000
    """Rows of one epoch."""
    seed: int = 0
    """Row i depends on this and i only."""

    held_out_rows: ClassVar[int] = 1000

    def held_out_row(self, i: int) -> dict[str, str]:
        """A row after those of training. There are few different ones, so most occur in training too."""
        return self.row(self.rows + i)

    def row(self, i: int) -> dict[str, str]:
        """Row i: the prompt and the answer."""
        raise NotImplementedError

    def environment(self) -> Environment:
        """An episode of one answer."""
        return SingleTurn(reward=self.reward)

    def reward(self, prompt: str, completion: str, *, finish: Finish, answer: str) -> float:
        """1 if the text after the first `;` is the answer and the completion ended by itself, else 0.

        Args:
            prompt: the row's prompt.
            completion: the generated text without special tokens.
            finish: how it ended; only `stop` can score.
            answer: the row's answer.
        """
        return float(finish == "stop" and completion.partition(";")[2] == answer)
