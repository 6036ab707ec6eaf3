"""Reward functions of the user's own, in processes of their own: one that hangs or crashes costs its call alone.

    def correct(completion, answer):              # in my_rewards.py; takes what it names
        return float(completion.strip() == answer)

    rewards = Rewards(functions=(FromFile.parse("my_rewards.py:correct"),))
    SingleTurn(reward=rewards)                    # or: await rewards(prompt, completion, finish="stop", answer="4")

A function gets by keyword what it names out of `prompt`, `completion`, `finish` (`stop` or `length`) and the row's
other columns, or all of it if it has `**row`. It may be async. It returns a number, or a mapping that holds it as
`reward` among parts that are logged.
"""

from __future__ import annotations

import asyncio
import math
import os
import pickle
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import cloudpickle
from pebble import ProcessExpired, ProcessPool

from actors import scorer
from actors.scorer import FromFile, Function, batched, name_of
from actors.types import require

LOAD_SECONDS = 120.0
"""Longest time that `check` gives the reward functions to be imported."""


class RewardError(Exception):
    """A reward function raised, hung, died or returned no number; the text names it and holds its traceback."""


@dataclass(frozen=True, kw_only=True)
class Rewards:
    """The weighted sum of several reward functions, each called in a scorer process with a deadline.

    Picklable: each process that calls it starts scorers of its own, on the first call, and they end with it. Scorers
    are fresh Python processes: what a function keeps in a global stays in its scorer, and is lost when that is killed.
    """

    functions: tuple[Function, ...]
    weights: tuple[float, ...] = ()
    """One per function; all 1 if there are none."""
    deadline: float = 10.0
    """Seconds of one call of one function, counted from its start; then its process is killed."""
    scorers: int = 1
    """Processes, each of which runs one call at a time."""

    def __post_init__(self) -> None:
        require("rewards", 1e-3, deadline=self.deadline)
        require("rewards", 1, scorers=self.scorers)
        if not self.functions:
            raise ValueError("rewards.functions is empty: give at least one reward function")
        if self.weights and len(self.weights) != len(self.functions):
            raise ValueError(
                f"rewards.weights has {len(self.weights)} numbers for {len(self.functions)} functions: give one each"
            )
        if not all(math.isfinite(weight) for weight in self.weights):
            raise ValueError(f"rewards.weights must be finite, not {self.weights}")
        if unclear := {name for name in self.names if self.names.count(name) > 1 or name == "reward"}:
            raise ValueError(f"rewards.functions: {min(unclear)!r} does not tell a function from others, rename it")

    @property
    def names(self) -> tuple[str, ...]:
        """What the functions are called in metrics and errors."""
        return tuple(name_of(function) for function in self.functions)

    async def __call__(self, prompt: Any, completion: str, /, *, finish: str, **row: Any) -> dict[str, float]:
        """Score one completion.

        Args:
            prompt: plain text or chat messages.
            completion: generated text without special tokens.
            finish: why it ended.
            row: the dataset row's other columns.

        Returns:
            The weighted sum as `reward`, each function's value under its name and its parts as `<name>.<part>`.

        Raises:
            RewardError: a function failed; its traceback is in the text.
        """
        try:
            sent = pickle.dumps({**row, "prompt": prompt, "completion": completion, "finish": finish})
        except Exception as error:  # whatever the objects of a row raise
            why = f"{type(error).__name__}: {error}"
            raise RewardError(f"rewards {', '.join(self.names)}: the row cannot be sent to a scorer: {why}") from None
        futures = [self._schedule(i, sent) for i in range(len(self.functions))]
        scores, total = {}, 0.0
        try:
            for name, weight, future in zip(self.names, self.weights or (1.0,) * len(futures), futures, strict=True):
                parts = await self._answer(name, future)
                if "reward" in parts:
                    scores[name] = parts.pop("reward")
                    total += weight * scores[name]
                scores |= {f"{name}.{part}": value for part, value in parts.items()}
        finally:
            for future in futures:
                future.cancel()
        return {"reward": total, **scores}

    def _schedule(self, index: int, row: bytes) -> Future[dict[str, float] | str]:
        pool = _pools.get(self)
        if pool is None or not pool.active:
            self.close()  # a pool breaks when a scorer dies outside a call
            pool = _pools[self] = _start(self.functions, self.scorers)
        return pool.schedule(scorer.score, (index, row), timeout=self.deadline)

    async def _answer(self, name: str, future: Future[dict[str, float] | str]) -> dict[str, float]:
        """What a function gave, or why it gave nothing."""
        try:
            answer = await asyncio.wrap_future(future)
        except TimeoutError:
            why = f"no answer within its deadline of {self.deadline:g} s, so its process was killed"
            raise RewardError(f"reward {name}: {why}") from None
        except ProcessExpired as error:
            raise RewardError(f"reward {name}: its process died with exit code {error.exitcode}") from None
        except BrokenProcessPool as error:
            raise RewardError(f"reward {name}: a scorer died outside a call ({error})") from None
        except Exception as error:
            raise RewardError(f"reward {name}: its scorer failed: {type(error).__name__}: {error}") from error
        if isinstance(answer, str):
            raise RewardError(f"reward {name}: {answer}")
        return answer

    def check(self, columns: tuple[str, ...] | None = None) -> None:
        """Load all functions in a scorer, to fail before a run starts.

        Args:
            columns: the row's names; functions that need others are refused. None does not look.

        Raises:
            ValueError: one line on the functions that cannot be loaded or called.
        """
        pool = _start(self.functions, 1)
        try:
            found = pool.schedule(scorer.problems, (columns,)).result(LOAD_SECONDS)
        except TimeoutError:
            raise ValueError(f"rewards {', '.join(self.names)}: not imported within {LOAD_SECONDS:g} s") from None
        except BrokenProcessPool:
            raise ValueError(f"rewards {', '.join(self.names)}: importing them ended the process") from None
        finally:
            pool.stop()
            pool.join()
        if problems := [f"reward {name}: {why}" for name, why in zip(self.names, found, strict=True) if why]:
            raise ValueError("; ".join(problems))

    def close(self) -> None:
        """End this process's scorers, whatever they do; a later call starts new ones. Open calls get no answer."""
        pool = _pools.pop(self, None)
        if pool is not None:
            pool.stop()
            pool.join()


_pools: dict[Rewards, ProcessPool] = {}
"""This process's scorers."""


def _start(functions: tuple[Function, ...], scorers: int) -> ProcessPool:
    """Fresh interpreters, not forks: the caller runs threads."""
    # By value where a module cannot be imported elsewhere, such as the script that was started.
    arguments = (cloudpickle.dumps(functions), len(functions), os.getpid())
    return ProcessPool(scorers, initializer=scorer.begin, initargs=arguments, context=get_context("spawn"))


__all__ = ["FromFile", "RewardError", "Rewards", "batched"]
