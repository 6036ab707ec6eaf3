"""The procedural datasets of reasoning-gym as tasks, judged by their own scorers."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from actors.environment import Environment, Prompt, Row, SingleTurn
from actors.types import Finish, require

if TYPE_CHECKING:
    from reasoning_gym.dataset import ProceduralDataset

Option = int | float | bool | str


@dataclass(frozen=True, kw_only=True)
class ReasoningGym:
    """A dataset of reasoning-gym by its name. The answer is what stands in the last `<answer>` tags of the completion,
    or all of it if there are none; the dataset scores it, mostly with 0 or 1.

    Raises:
        ValueError: reasoning-gym is not installed, or has no such dataset or option.
    """

    name: str = "chain_sum"
    """Dataset, such as `chain_sum`, `countdown` or `mini_sudoku`."""
    rows: int = 10_000
    """Rows of one epoch."""
    seed: int = 0
    """Row i depends on this and i only."""
    options: dict[str, Option] = field(default_factory=dict)
    """The dataset's own settings, as `max_terms 3 max_digits 2`."""
    chat: bool = False
    """Make the question a user's message, laid out by the model's chat template. Otherwise the model continues it."""
    system: str | None = None
    """System message before the question; implies `--task.chat`."""

    held_out_rows: ClassVar[int] = 1000

    def __post_init__(self) -> None:
        require("task", 1, rows=self.rows)
        self._dataset()

    def row(self, i: int) -> dict[str, Any]:
        """Row i: the prompt, and the dataset's entry for its scorer."""
        entry = self._dataset()[i]
        question: str = entry["question"]
        prompt: Prompt = question
        if self.chat or self.system is not None:
            system = [] if self.system is None else [{"role": "system", "content": self.system}]
            prompt = [*system, {"role": "user", "content": question}]
        return {"prompt": prompt, "entry": entry}

    def held_out_row(self, i: int) -> Row:
        """A row after those of training."""
        return self.row(self.rows + i)

    def environment(self) -> Environment:
        """An episode of one answer."""
        return SingleTurn(reward=self.reward)

    def reward(self, prompt: Prompt, completion: str, *, finish: Finish, entry: dict[str, Any]) -> float:
        """The dataset's score of the answer; 0 if the completion was cut."""
        from reasoning_gym.utils import extract_answer

        tagged = extract_answer(completion)
        answer = completion.strip() if tagged is None else tagged
        return float(self._dataset().score_answer(answer, entry)) if finish == "stop" else 0.0

    def _dataset(self) -> ProceduralDataset:
        options = tuple(sorted(self.options.items()))
        return _dataset(self.name, self.rows + self.held_out_rows, self.seed, options)


@functools.cache
def _dataset(name: str, size: int, seed: int, options: tuple[tuple[str, Option], ...]) -> ProceduralDataset:
    try:
        import reasoning_gym
    except ImportError as error:
        raise ValueError("reasoning-gym is not installed: pip install -e '.[tasks]'") from error
    try:
        return reasoning_gym.create_dataset(name, size=size, seed=seed, **dict(options))
    except (ValueError, TypeError, AssertionError) as error:
        raise ValueError(f"reasoning-gym refuses --task.name {name} with {dict(options)}: {error}") from error
