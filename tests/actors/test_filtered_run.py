"""Filters between real processes: a generator, a worker and the buffer, up to the first batch."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass

import numpy as np
import pytest

from actors import payload
from actors.buffer import ReplayBuffer
from actors.config import BufferConfig, FilterConfig, GeneratorConfig, SimulatedEngine
from actors.engines.simulated import Simulated
from actors.environment import SingleTurn
from actors.generator import Generator
from actors.mesh import Meshes
from actors.placement import Spot
from actors.player import Play
from actors.rollout import RolloutWorker
from actors.run import wait
from actors.types import Request, RequestId, Sampling, derive_seed
from recipes.tasks.addition import Addition

ENGINE = SimulatedEngine(base=0.0, per_request=0.0, median_length=12, sigma=0.5)
MOST, MEMBERS, GROUPS, SEED = 9, 3, 6, 4


def graded(prompt, completion, *, finish):
    """What it is judged by shows whether the filter or the environment counted it."""
    return {"reward": 0.75 if finish == "length" else 0.5, "whole": float(finish == "stop")}


@dataclass(frozen=True)
class Graded:
    """Prompts without a question."""

    rows: None = None

    def row(self, i):
        return {"prompt": "0"}

    def environment(self):
        return SingleTurn(reward=graded)


def lengths(ticket: int) -> list[int]:
    """Tokens that the engine draws for each member before the limit."""
    engine, out = Simulated(ENGINE), []
    for member in range(MEMBERS):
        request = Request(
            id=RequestId(ticket, 0, member, 0),
            prompt=np.ones(1, np.int32),
            sampling=Sampling(),
            seed=derive_seed(SEED, ticket, member, 0),
        )
        out.append(engine.length(request))
    return out


def payload_rewards(group) -> list[float]:
    return [rollout.reward for rollout in payload.read(group.handle).rollouts]


async def first_batch(folder: str):
    """The batch of step 0 and the buffer's counts."""
    spot = Spot(name="filtered", hosts=(0,), ranks_per_host=1, threads=1)
    config = GeneratorConfig(replicas=1, engine=ENGINE)
    async with Meshes() as meshes:
        procs = meshes.spawn(spot)
        buffer = procs.spawn("buffer", ReplayBuffer, BufferConfig(groups_per_step=GROUPS, max_staleness=0), 3)
        generator = procs.spawn("generator", Generator, config, "", MEMBERS).slice(ranks=0)
        play = Play(
            task=Graded(),
            model=str(Addition.checkpoint),
            sampling=Sampling(max_tokens=MOST),
            group_size=MEMBERS,
            filter=FilterConfig(on_truncated="drop"),
            seed=SEED,
            folder=folder,
            timeout=60.0,
            most=GROUPS,
        )
        workers = procs.spawn("worker", RolloutWorker, play, buffer, [generator])
        await generator.setup.call_one()
        async with asyncio.TaskGroup() as tasks:
            generating = tasks.create_task(wait(generator.run.call_one([])))
            working = tasks.create_task(wait(workers.run.call()))
            taken = await buffer.ready.call_one(0)
            counts = await buffer.counts.call_one()
            working.cancel()
            await generator.close.call_one()
            await generating
    return taken, counts


def test_the_first_batch_has_the_first_groups_that_filters_leave(tmp_path):
    taken, counts = asyncio.run(first_batch(str(tmp_path)))
    whole = {ticket: [n for n in lengths(ticket) if n <= MOST] for ticket in range(100)}
    expected = [ticket for ticket in whole if len(whole[ticket]) >= 2][:GROUPS]
    looked = range(expected[-1] + 1)
    assert [group.ticket for group in taken.groups] == expected and len(looked) > GROUPS + 3
    for group in taken.groups:
        assert group.actions.tolist() == whole[group.ticket], "survivors, in the order of the members"
        assert group.rewards.tolist() == [0.5] * len(whole[group.ticket]) == payload_rewards(group)
    # As judged, over all members of every ticket that is closed.
    ends = [n <= MOST for ticket in looked for n in lengths(ticket)]
    assert taken.metrics["reward/mean"] == pytest.approx(0.75 - 0.25 * np.mean(ends))
    assert taken.metrics["reward/whole"] == pytest.approx(np.mean(ends)) and taken.metrics["reward/trained"] == 0.5
    gone = len(looked) - GROUPS
    assert taken.metrics["buffer/dropped_filtered"] == counts["dropped_filtered"] == counts["dropped"] == gone
    assert counts["issued"] == counts["open"] + gone == len(looked)
    assert sorted(os.listdir(tmp_path)) == sorted(os.path.basename(group.handle.path) for group in taken.groups)
