"""An agent with a tool: the policy learns to call a calculator instead of guessing, over several turns.

`python -m recipes.agent_async` takes about a minute on two CPU cores. The loop is that of `recipes.grpo_async`; what
an episode is, and how to write another one, stands in `actors/environment.py` and `recipes/tasks/calculator.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from actors import RunConfig, command_line, launch
from losses import DIS, group_norm
from recipes.grpo_async import of_task
from recipes.tasks.calculator import Calculator


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    """Train a language model to use a calculator."""

    steps: int = 40
    """Training steps; the version of the weights counts them."""
    task: Calculator = field(default_factory=Calculator)
    """What to learn."""
    loss: DIS = field(default_factory=DIS)
    """Objective."""


async def train(config: Config) -> dict[str, Any]:
    """Start every role, run all steps, leave the output folder; returns the summary."""
    model, sampling = of_task(config.task, config.model, config.sampling)
    config = replace(config, model=model, sampling=sampling)
    async with launch(config, task=config.task, loss=config.loss, advantage=group_norm) as run:
        async for batch in run.batches():
            await run.publish(await run.train(batch))
    return run.summary


if __name__ == "__main__":
    command_line(Config, train)
