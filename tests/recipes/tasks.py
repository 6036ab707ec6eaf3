"""Tasks for runs of whole recipes; importable by the workers' processes."""

from __future__ import annotations

import asyncio
import json
import os
import random
from dataclasses import dataclass

from actors.environment import Environment, Outcome, Prompt, Row
from actors.types import Finish
from recipes.tasks.addition import Addition


@dataclass(frozen=True, kw_only=True)
class SlowAddition(Addition):
    """Addition whose answers arrive after random delays; every completion is written down."""

    record: str
    """File to append to."""
    salt: int = 0
    """Of the delays."""

    def environment(self) -> Environment:
        return SlowEpisode(self)


class SlowEpisode:
    def __init__(self, task: SlowAddition) -> None:
        self.task = task

    async def reset(self, row: Row) -> Prompt:
        self.row = dict(row)
        self.random = random.Random(f"{self.task.salt}/{row['prompt']}")
        await asyncio.sleep(self.random.uniform(0, 0.02))
        return row["prompt"]

    async def step(self, action: str, finish: Finish) -> Outcome:
        await asyncio.sleep(self.random.uniform(0, 0.05))
        with open(self.task.record, "a") as file:
            file.write(json.dumps([self.row["prompt"], action, finish]) + "\n")
        prompt, answer = self.row["prompt"], self.row["answer"]
        return Outcome(reward=self.task.reward(prompt, action, finish=finish, answer=answer))

    async def close(self) -> None:
        return


@dataclass(frozen=True, kw_only=True)
class Deadly(Addition):
    """Addition whose first episode takes its process down."""

    def environment(self) -> Environment:
        os._exit(3)
