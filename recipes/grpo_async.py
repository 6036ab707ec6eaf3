"""Asynchronous GRPO: generators, rollout workers, replay buffer and trainer as actors, one loop for every mode.

`python -m recipes.grpo_async` learns two-digit addition on two CPU cores in a minute. Synchronous training is
`--buffer.max-staleness 0`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from actors import RunConfig, Sampling, command_line, launch
from losses import (
    CISPO,
    DIS,
    DPPO,
    GSPO,
    TOPR,
    Corrected,
    Distill,
    DistillForward,
    Kimi15,
    OnlineDPO,
    PolicyGradient,
    PPOClip,
    RunningMean,
    group_mean,
    group_mean_whitened,
    group_norm,
    leave_one_out,
    whitened,
)
from recipes.adapters.reasoning_gym import ReasoningGym
from recipes.adapters.verifiers import Verifiers
from recipes.tasks.addition import Addition
from recipes.tasks.calculator import Calculator
from recipes.tasks.dataset import Dataset
from recipes.tasks.modmix import Modmix
from recipes.tasks.scratchpad import Scratchpad

Tasks = Addition | Modmix | Calculator | Dataset | ReasoningGym | Verifiers
Losses = (
    DIS
    | PPOClip
    | PolicyGradient
    | CISPO
    | GSPO
    | TOPR
    | Kimi15
    | DPPO
    | Corrected
    | OnlineDPO
    | Distill
    | DistillForward
)
Estimator = Literal["group_norm", "group_mean", "leave_one_out", "whitened", "group_mean_whitened", "running_mean"]
ADVANTAGES: dict[Estimator, Callable[..., Any]] = {
    "group_norm": group_norm,
    "group_mean": group_mean,
    "leave_one_out": leave_one_out,
    "whitened": whitened,
    "group_mean_whitened": group_mean_whitened,
    "running_mean": RunningMean(),
}
WITHOUT_GROUPS = ("whitened", "running_mean")
"""What gives single rollouts an advantage."""


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    """Train a language model by asynchronous reinforcement learning."""

    task: Tasks = field(default_factory=Addition)
    """What to learn."""
    loss: Losses = field(default_factory=DIS)
    """Objective."""
    advantage: Estimator = "group_norm"
    """How rewards become advantages: within groups; over the whole step (whitened); or against the mean of the last 8
    rewards of the same row (running_mean)."""


def of_task(task: Tasks, model: str | None, sampling: Sampling) -> tuple[str | None, Sampling]:
    """Model and sampling where no flag says them: the tiny tasks bring a checkpoint and know how long an answer may
    be."""
    if not isinstance(task, Scratchpad | Calculator):
        return model, sampling
    return model or str(task.checkpoint), replace(sampling, max_tokens=sampling.max_tokens or task.max_tokens)


async def train(config: Config) -> dict[str, Any]:
    """Start every role, run all steps, leave the output folder; returns the summary."""
    model, sampling = of_task(config.task, config.model, config.sampling)
    config = replace(config, model=model, sampling=sampling)
    if config.group_size == 1 and config.advantage not in WITHOUT_GROUPS:
        raise ValueError(
            f"--group-size 1 makes every advantage 0 with --advantage {config.advantage}: use "
            f"{' or '.join(WITHOUT_GROUPS)}"
        )
    if config.advantage == "running_mean" and config.buffer.reuse > 1:
        raise ValueError("--advantage running_mean would compare a reused rollout with itself: use --buffer.reuse 1")
    advantage = ADVANTAGES[config.advantage]
    async with launch(config, task=config.task, loss=config.loss, advantage=advantage) as run:
        async for batch in run.batches():
            await run.publish(await run.train(batch))
    return run.summary


if __name__ == "__main__":
    command_line(Config, train)
