"""How much waiting asynchrony removes: simulated engines and trainer on 16 virtual devices, real actors between.

Buffer, rollout workers, generator loops and the run's loop are the real ones; a forward and a training step
only take the time that the latency model says. Synchronous training is colocated: all 16 devices generate, then all 16
train. Asynchronous training gives 12 to generators and 4 to the trainer; the cost of a trained token is chosen so that
the two halves have equal work. Only trained tokens count on either side.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from monarch.actor import Actor, concurrent_endpoint

from actors.buffer import ReplayBuffer
from actors.config import BufferConfig, GeneratorConfig, LogConfig, RunConfig, Sampling, SimulatedEngine
from actors.environment import Environment, Row, SingleTurn
from actors.generator import Generator
from actors.mesh import Meshes
from actors.metrics import RunLog
from actors.placement import Spot
from actors.player import Play
from actors.rollout import RolloutWorker
from actors.run import Roles, Run, wait
from actors.shm import RunFolder
from actors.timeline import Spans
from actors.tokenizer import Tokenizer
from actors.types import Probe, StepReport, Taken
from recipes.bench import Result, paired
from recipes.tasks.addition import Addition

DEVICES, GENERATORS = 16, 12
GROUPS, MEMBERS = 32, 8
"""As many rollouts a step as all devices together have slots: the synchronous baseline runs full."""
STALENESS = 8
LONGEST = 256
TAILED = SimulatedEngine(slots=16, base=0.02, per_request=0.0004, median_length=32, sigma=0.99)
"""p99 of the lengths is 10 x their median, cut at LONGEST."""
EVEN = replace(TAILED, median_length=50, sigma=0.0)


@dataclass(frozen=True, kw_only=True)
class Nothing:
    """A task of empty rows and rewards."""

    rows: None = None

    def row(self, i: int) -> Row:
        return {"prompt": "0"}

    def environment(self) -> Environment:
        return SingleTurn(reward=_zero)


def _zero(prompt: str, completion: str, **row: Any) -> float:
    return 0.0


class SimulatedTrainer(Actor):
    """Takes `seconds_per_token` for each trained token."""

    def __init__(self, seconds_per_token: float) -> None:
        self._cost = seconds_per_token

    @concurrent_endpoint
    async def step(self, taken: Taken, probe: Probe | None) -> StepReport:
        """Let the time of the step pass."""
        tokens = int(sum(group.actions.sum() for group in taken.groups))
        await asyncio.sleep(tokens * self._cost)
        return StepReport(
            step=taken.step,
            rollouts=sum(len(group.actions) for group in taken.groups),
            tokens=tokens,
            tickets=tuple(group.ticket for group in taken.groups),
            metrics={"perf/trained_tokens": float(tokens)},
        )


class DirectSync:
    """`WeightSync` without weights: a version is a number that every replica swaps to."""

    def __init__(self, generators: list[Any], tasks: asyncio.TaskGroup) -> None:
        self._generators, self._tasks, self.spans = generators, tasks, Spans("sync")

    async def lease(self, version: int) -> float:
        """Nothing to overwrite."""
        return 0.0

    def publish(self, version: int, replicas: int) -> asyncio.Task[dict[str, float]]:
        """Swap all replicas."""
        return self._tasks.create_task(self._swap(version))

    async def _swap(self, version: int) -> dict[str, float]:
        await asyncio.gather(*(wait(generator.swap.call_one(version)) for generator in self._generators))
        return {}


def seconds_per_token(engine: SimulatedEngine) -> float:
    """Of one device with all slots busy."""
    return (engine.base + engine.per_request * engine.slots) / engine.slots


async def measure(engine: SimulatedEngine, *, asynchronous: bool, steps: int) -> tuple[float, float, float]:
    """Seconds, trained tokens and dropped share of a run."""
    replicas = GENERATORS if asynchronous else DEVICES
    trainers = DEVICES - GENERATORS if asynchronous else DEVICES
    # Equal work on both sides of the asynchronous split.
    cost = seconds_per_token(engine) * (DEVICES - GENERATORS) / GENERATORS / trainers
    config = RunConfig(
        steps=steps,
        group_size=MEMBERS,
        probe=0,
        log=LogConfig(rollouts=0),
        sampling=Sampling(max_tokens=LONGEST),
        buffer=BufferConfig(groups_per_step=GROUPS, max_staleness=STALENESS if asynchronous else 0),
        generator=GeneratorConfig(replicas=replicas, engine=engine),
    )
    model = str(Addition.checkpoint)
    async with contextlib.AsyncExitStack() as stack:
        folder = RunFolder.create(64 << 20)
        stack.callback(folder.close)
        output = stack.enter_context(tempfile.TemporaryDirectory())
        log = RunLog(Path(output) / "run", config, steps, quiet=True)
        meshes = await stack.enter_async_context(Meshes())
        spot = Spot(name="buffer", hosts=(0,), ranks_per_host=1, threads=1)
        buffer = meshes.spawn(spot).spawn("buffer", ReplayBuffer, config.buffer, steps)
        procs = [meshes.spawn(replace(spot, name=f"generators{i}")) for i in range(2)]
        generators = [
            procs[i % 2].spawn(f"generator{i}", Generator, config.generator, model, MEMBERS).slice(ranks=0)
            for i in range(replicas)
        ]
        play = Play(
            task=Nothing(),
            model=model,
            sampling=config.sampling,
            group_size=MEMBERS,
            seed=0,
            folder=folder.path,
            timeout=600.0,
            most=GROUPS,
            fixed_routes=not asynchronous,
        )
        workers = meshes.spawn(replace(spot, name="rollout")).spawn("worker", RolloutWorker, play, buffer, generators)
        trainer = meshes.spawn(replace(spot, name="trainer")).spawn("trainer", SimulatedTrainer, cost)
        await asyncio.gather(*(wait(generator.setup.call_one()) for generator in generators))
        async with asyncio.TaskGroup() as tasks:
            watch = tasks.create_task(meshes.watch())
            for generator in generators:
                tasks.create_task(wait(generator.run.call_one([])))
            tasks.create_task(wait(workers.run.call()))
            sync: Any = DirectSync(generators, tasks)
            roles = Roles(
                buffer=buffer,
                workers=workers,
                generators=generators,
                evaluator=None,
                trainer=trainer,
                writers=None,
                sync=sync,
            )
            tokenizer = Tokenizer.load(model)
            run = Run(config, log, roles, tasks, asyncio.get_running_loop().create_future(), tokenizer)
            async for batch in run.batches():
                await run.publish(await run.train(batch))
            await run.finish()
            await asyncio.gather(*(wait(generator.close.call_one()) for generator in generators))
            watch.cancel()
    summary = run.summary
    seconds = summary["loop_seconds"]
    return seconds, summary["trained_tokens_per_second"] * seconds, summary["dropped"] / summary["issued"]


def results() -> list[Result]:
    """The rows of `python -m recipes.bench overlap`."""
    out = []
    for name, engine, steps in (("tail", TAILED, 80), ("no_tail", EVEN, 40)):
        wall, tokens, dropped = asyncio.run(measure(engine, asynchronous=True, steps=steps))
        # Generation and training have the same work, so either is the floor.
        floor = tokens * seconds_per_token(engine) / GENERATORS
        sync_wall, sync_tokens, _ = asyncio.run(measure(engine, asynchronous=False, steps=6))
        note = (
            f"S {STALENESS}, {GENERATORS} + {DEVICES - GENERATORS} devices of {engine.slots} slots, lengths: median "
            f"{engine.median_length}, sigma {engine.sigma}, at most {LONGEST}; dropped {dropped:.1%}"
        )
        bar = 1.10 if name == "tail" else None
        out.append(paired(f"overlap/{name}/wall", [wall], [floor], bar, note=note))
        speeds = [tokens / wall], [sync_tokens / sync_wall]
        out.append(paired(f"overlap/{name}/async_over_sync", *speeds, None, unit="trained tokens/s", note=note))
    return out
