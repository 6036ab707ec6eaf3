"""Products of two-digit numbers, too hard to guess, with a calculator that the policy may call: several turns."""

from __future__ import annotations

import operator
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from actors.environment import Outcome, Prompt, Row
from actors.types import Finish
from losses import tool_penalty

CALL = re.compile(r"\?(\d{1,6})([+*-])(\d{1,6})")
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


@dataclass(frozen=True, kw_only=True)
class Calculator:
    """Products such as `34*58=`. An action is a call, `?34*58`, which the calculator answers with `[1972]`, or the
    answer, `;1972`, which ends the episode; the end token ends either.

    A right answer gives 1, a call takes `cost`, one that cannot be read twice as much. The shipped checkpoint mostly
    guesses and calls once in eight times; that calling pays is for training to find out.
    """

    rows: int = 10_000
    """Rows of one epoch."""
    seed: int = 0
    """Row i depends on this and i only."""
    calls: int = 2
    """Calls that one episode may make; the next one ends it."""
    cost: float = 0.05
    """Reward that a call takes."""

    max_tokens: ClassVar[int] = 9
    """Of one action; the longest honest one is 7 tokens, its end included."""
    checkpoint: ClassVar[Path] = Path(__file__).parents[1] / "assets" / "tiny" / "calculator"
    """Made by `python -m recipes.make_tiny calculator`."""
    held_out_rows: ClassVar[int] = 1000

    def row(self, i: int) -> dict[str, str]:
        """Row i: the prompt and the answer, four digits."""
        r = random.Random(f"{self.seed}/{i}")
        a, b = r.randrange(10, 100), r.randrange(10, 100)
        return {"prompt": f"{a}*{b}=", "answer": f"{a * b:04d}"}

    def held_out_row(self, i: int) -> dict[str, str]:
        """A row after those of training."""
        return self.row(self.rows + i)

    def environment(self) -> CalculatorEpisode:
        """An episode of calls and one answer."""
        return CalculatorEpisode(self)


class CalculatorEpisode:
    """Answers calls and judges the answer. Parts: `calls`, `malformed` (of them), `right`, and at the end `penalty`,
    the share of malformed calls, a half without a call."""

    def __init__(self, task: Calculator) -> None:
        self._task, self._calls, self._malformed = task, 0, 0

    async def reset(self, row: Row) -> Prompt:
        self._answer: str = row["answer"]
        prompt: str = row["prompt"]
        return prompt

    async def step(self, action: str, finish: Finish) -> Outcome:
        if action.startswith(";") or finish != "stop":
            right = float(finish == "stop" and action == f";{self._answer}")
            return Outcome(reward=right, parts={"right": right, "calls": 0.0, "malformed": 0.0, **self._penalty()})
        self._calls += 1
        call = CALL.fullmatch(action)
        self._malformed += call is None
        said = "[error]" if call is None else f"[{OPERATORS[call[2]](int(call[1]), int(call[3])):04d}]"
        ends = self._calls > self._task.calls
        return Outcome(
            reward=-self._task.cost * (1 if call else 2),
            observation=None if ends else said,
            parts={"right": 0.0, "calls": 1.0, "malformed": float(call is None), **(self._penalty() if ends else {})},
        )

    def _penalty(self) -> dict[str, float]:
        return {"penalty": tool_penalty(self._calls, self._malformed)}

    async def close(self) -> None:
        return
