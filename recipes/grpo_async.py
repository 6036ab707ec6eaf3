"""Asynchronous GRPO: generators, rollout workers, replay buffer and trainer as actors, one loop for every mode.

`python -m recipes.grpo_async` learns two-digit addition on two CPU cores in a minute. The loop below is the
controller: it owns the processes, counts steps and publishes versions; no rollout passes through it. Synchronous
training is `--buffer.max-staleness 0`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import tyro
from monarch.actor import ActorError
from monarch.spmd import setup_torch_elastic_env_async

from actors import payload
from actors.buffer import ReplayBuffer
from actors.config import (
    BufferConfig,
    GeneratorConfig,
    NativeEngine,
    RolloutConfig,
    Sampling,
    SyncConfig,
    TrainerConfig,
)
from actors.generator import Generator, Stats
from actors.ledger import admission
from actors.mesh import Meshes
from actors.metrics import RunLog, default_folder
from actors.placement import plan
from actors.rollout import Play, RolloutWorker
from actors.shm import RunFolder
from actors.sync import Replica, WeightPublisher, WeightReceiver, WeightSync
from actors.tokenizer import Tokenizer
from actors.trainer import Trainer
from actors.transports import make_transport
from actors.types import Probe, StepReport, Taken, require
from losses import DIS, PolicyGradient, PPOClip, group_mean, group_norm
from recipes.tasks.addition import Addition
from recipes.tasks.modmix import Modmix


@dataclass(frozen=True, kw_only=True)
class Config:
    """Train a language model by asynchronous reinforcement learning."""

    model: str | None = None
    """Hugging Face folder to start from. Default: the task's tiny checkpoint."""
    task: Addition | Modmix = field(default_factory=Addition)
    """What to learn."""
    steps: int = 60
    """Training steps; the version of the weights counts them."""
    seed: int = 0
    """Of the data order and of every completion."""
    output_dir: Path | None = None
    """Folder for metrics, summary and the final model; must be new. Default: outputs/grpo_async-<date>-<time>."""
    group_size: int = 16
    """Rollouts per prompt, compared with each other."""
    epochs: int | None = None
    """Passes over the task's rows before the data ends. Default: until all steps are done."""
    probe: int = 8
    """Rollouts per version of a few tokens whose logprobs the trainer recomputes: `policy/engine_gap_*`; 0 is none."""
    loss: DIS | PPOClip | PolicyGradient = field(default_factory=DIS)
    """Objective."""
    advantage: Literal["group_norm", "group_mean"] = "group_norm"
    """How rewards become advantages."""
    sampling: Sampling = field(default_factory=lambda: Sampling(max_tokens=22))
    """How completions are drawn."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    buffer: BufferConfig = field(default_factory=BufferConfig)
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)

    def __post_init__(self) -> None:
        require("config", 1, steps=self.steps, group_size=self.group_size)
        require("config", 0, probe=self.probe)
        for name, count in (("epochs", self.epochs), ("task.rows", self.task.rows)):
            if count is not None:
                require("config", 1, **{name: count})


ADVANTAGES = {"group_norm": group_norm, "group_mean": group_mean}


def resolve(config: Config) -> Config:
    """Fill in what other settings decide.

    Synchronous training (`max_staleness` 0) runs the engine deterministically, with one slot per member of a step, so
    that it repeats to the bit.
    """
    config = replace(config, model=config.model or str(config.task.checkpoint))
    engine, p = config.generator.engine, config.buffer.groups_per_step
    if config.buffer.max_staleness == 0 and isinstance(engine, NativeEngine):
        per_replica = -(-p // config.generator.replicas) * config.group_size
        engine = replace(engine, deterministic=True, slots=per_replica)
    return replace(config, generator=replace(config.generator, engine=engine))


def room_for(config: Config) -> int:
    """Bytes of shared files that the run needs: two slots of weights, and payloads of all open tickets."""
    assert config.model is not None
    files = list(Path(config.model).glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"no *.safetensors in {config.model!r}: give --model a Hugging Face folder")
    tickets = admission(config.buffer) or 16 * config.buffer.groups_per_step
    return 4 * sum(f.stat().st_size for f in files) + tickets * config.group_size * config.sampling.max_tokens * 64


async def train(config: Config) -> dict[str, float]:
    """Start every role, run all steps, leave the output folder; returns the summary.

    Raises:
        RuntimeError: a process died, or the books do not balance.
        ValueError, OSError: settings that contradict each other or do not fit the machine, before anything starts.
    """
    config = resolve(config)
    assert config.model is not None
    placement = plan(config.generator, config.trainer, config.rollout)
    room = room_for(config)
    if not (Tokenizer.load(config.model).eos_ids or config.sampling.stop):
        raise ValueError(
            f"{config.model!r} names no end token, so no completion would stop: give its "
            "generation_config.json an eos_token_id, or give --sampling.stop"
        )
    async with contextlib.AsyncExitStack() as stack:
        folder = RunFolder.create(room)
        stack.callback(folder.close)
        log = RunLog(config.output_dir or default_folder("grpo_async"), config, config.steps)
        transport = make_transport(config.sync.transport, folder.path)
        meshes = await stack.enter_async_context(Meshes())
        buffer = meshes.spawn(placement.buffer).spawn(
            "buffer",
            ReplayBuffer,
            config.buffer,
            config.steps,
            config.task.rows,
            config.epochs,
            config.seed,
            config.rollout.timeout,
        )
        generator_procs = [meshes.spawn(spot) for spot in placement.generators]
        generators = [
            procs.spawn(spot.name, Generator, config.generator, config.model, config.group_size, spot.device)
            for procs, spot in zip(generator_procs, placement.generators, strict=True)
        ]
        leads = [generator.slice(ranks=0) for generator in generators]
        play = Play(
            task=config.task,
            model=config.model,
            sampling=config.sampling,
            group_size=config.group_size,
            seed=config.seed,
            folder=folder.path,
            fixed_routes=config.buffer.max_staleness == 0,
            timeout=config.rollout.timeout,
            most=max(1, config.buffer.groups_per_step // config.rollout.workers),
        )
        workers = meshes.spawn(placement.workers).spawn("worker", RolloutWorker, play, buffer, leads)
        trainer_procs = meshes.spawn(placement.trainer)
        if config.trainer.ranks > 1:
            await setup_torch_elastic_env_async(trainer_procs)
        trainer = trainer_procs.spawn(
            "trainer", Trainer, config.trainer, config.sync, folder.path, placement.trainer.device
        )
        async with asyncio.TaskGroup() as tasks:
            watch = tasks.create_task(meshes.watch())
            await asyncio.gather(
                *(generator.setup.call() for generator in generators),
                trainer.setup.call(config.model, config.loss, ADVANTAGES[config.advantage], config.steps),
            )
            sync = WeightSync(
                config.sync,
                transport,
                trainer_procs.spawn("publisher", WeightPublisher, folder.path, transport, config.sync.timeout),
                [
                    Replica(receivers=procs.spawn(f"receiver{i}", WeightReceiver), generators=generator)
                    for i, (procs, generator) in enumerate(zip(generator_procs, generators, strict=True))
                ],
                tasks,
            )
            stack.push_async_callback(sync.close)
            await sync.setup()
            for generator, lead in zip(generators, leads, strict=True):
                followers = [generator.slice(ranks=rank) for rank in range(1, config.generator.tp)]
                tasks.create_task(wait(lead.run.call_one(followers)))
            tasks.create_task(wait(workers.run.call()))
            summary = await Controller(config, log, buffer, workers, leads, trainer, sync).loop(tasks)
            await asyncio.gather(*(generator.close.call() for generator in generators))
            await trainer.save.call(str(log.folder / "model"))
            await trainer.close.call()
            watch.cancel()
    return summary


async def train_until_signal(config: Config) -> dict[str, float]:
    """`train`; SIGTERM ends it in order by a CancelledError, as Ctrl-C does."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await train(config)


async def wait(answer: Any) -> Any:
    """An actor's answer as a coroutine, for a task."""
    return await answer


class Controller:
    """Counts steps and publishes versions. No rollout passes through it."""

    def __init__(
        self,
        config: Config,
        log: RunLog,
        buffer: Any,
        workers: Any,
        generators: list[Any],
        trainer: Any,
        sync: WeightSync,
    ) -> None:
        self.config, self.log = config, log
        self.buffer, self.workers, self.generators = buffer, workers, generators
        self.trainer, self.sync = trainer, sync
        self.publishing: dict[int, asyncio.Task[None]] = {}
        self.probing: dict[int, asyncio.Task[Probe | None]] = {}
        self.stats: list[Stats] = []
        self.waited = self.published = 0.0
        self.tickets: set[int] = set()

    async def loop(self, tasks: asyncio.TaskGroup) -> dict[str, float]:
        """All steps: take a batch, train on it, publish the new weights while the next step runs."""
        began = ended = time.perf_counter()
        self.stats = await self._stats()
        ready = tasks.create_task(wait(self.buffer.ready.call_one(0)))
        self._start_probe(0, tasks)
        for step in range(self.config.steps):
            taken: Taken = await ready
            waited = time.perf_counter() - ended
            if not taken.groups:
                break
            await self.sync.lease(step + 1)
            if not taken.last:
                ready = tasks.create_task(wait(self.buffer.ready.call_one(step + 1)))
            probe = await self._probe_for(step)
            reports: list[StepReport] = list((await self.trainer.step.call(taken, probe)).values())
            seconds, ended = time.perf_counter() - ended, time.perf_counter()
            self._account(taken, reports)
            self.waited += waited
            row = {"step": step, **taken.metrics, **reports[0].metrics}
            row |= {"time/step": seconds, "time/wait_batch": waited, "idle/trainer": waited / seconds}
            self.publishing[step + 1] = tasks.create_task(self._publish(step + 1, row, tasks))
            if taken.last:
                break
        await asyncio.gather(*self.publishing.values())
        await asyncio.gather(*self.probing.values())
        return await self._finish(time.perf_counter() - began, ended - began)

    async def _publish(self, version: int, row: dict[str, float], tasks: asyncio.TaskGroup) -> None:
        """Push `version` to all generators, open new tickets, log the step that made it."""
        row |= await self.sync.publish(version)
        if version > 1:
            await asyncio.shield(self.publishing.pop(version - 1))
        self.published += 1
        await self.buffer.announce.call_one(version)
        self._start_probe(version, tasks)
        stats, old = await self._stats(), self.stats
        self.stats = stats
        row["perf/generated_tokens"] = sum(new.tokens - last.tokens for new, last in zip(stats, old, strict=True))
        row["idle/generator"] = 1 - _busy(stats, old)
        self.log.step(row)

    def _start_probe(self, version: int, tasks: asyncio.TaskGroup) -> None:
        """Short rollouts at one version, for the trainer to compare logprobs; the replicas take turns."""
        if self.config.probe:
            replica = version % self.config.generator.replicas
            sampled = self.workers.slice(ranks=0).probe.call_one(version, replica, self.config.probe)
            self.probing[version] = tasks.create_task(wait(sampled))

    async def _probe_for(self, step: int) -> Probe | None:
        """The newest probe that the trainer can still compare: of the version that it holds or of the one before.

        Synchronous steps wait for that of their own version. Others may have to wait for the one before, whose weights
        the generators have held for a step.
        """
        if not self.config.probe:
            return None
        oldest = step if self.config.buffer.max_staleness == 0 else max(0, step - 1)
        if oldest in self.publishing:
            await asyncio.shield(self.publishing[oldest])
        await self.probing[oldest]
        newest = max(version for version, task in self.probing.items() if task.done())
        for version in [v for v in self.probing if v < newest]:
            if (probe := self.probing.pop(version).result()) is not None:
                payload.free(probe.handle)
        return self.probing[newest].result()

    def _account(self, taken: Taken, reports: list[StepReport]) -> None:
        """Compare what the ranks trained with what the buffer gave them."""
        given, trained = sum(len(group.rewards) for group in taken.groups), sum(r.rollouts for r in reports)
        if given != trained:
            raise RuntimeError(f"step {taken.step}: the buffer gave {given} rollouts, the ranks trained {trained}")
        self.tickets.update(ticket for report in reports for ticket in report.tickets)

    async def _stats(self) -> list[Stats]:
        return list(await asyncio.gather(*(wait(generator.stats.call_one()) for generator in self.generators)))

    async def _finish(self, loop_seconds: float, training_seconds: float) -> dict[str, float]:
        """Compare the books of buffer and trainer, write the summary."""
        counts: dict[str, int] = await self.buffer.counts.call_one()
        if counts["issued"] != counts["trained"] + counts["dropped"] + counts["open"]:
            raise RuntimeError(f"the buffer's books do not balance: {counts}")
        if counts["trained"] != len(self.tickets):
            raise RuntimeError(f"the buffer counts {counts['trained']} trained tickets, the ranks {len(self.tickets)}")
        stats = await self._stats()
        return self.log.finish(
            loop_seconds,
            counts,
            idle_generator=1 - sum(s.busy for s in stats) / sum(s.alive for s in stats),
            idle_trainer=self.waited / training_seconds if training_seconds else 0.0,
            versions_published=self.published,
        )


def _busy(new: list[Stats], old: list[Stats]) -> float:
    """Share of the time between two readings that the engines worked."""
    pairs = list(zip(new, old, strict=True))
    return sum(n.busy - o.busy for n, o in pairs) / max(sum(n.alive - o.alive for n, o in pairs), 1e-9)


def cause(error: BaseException) -> str:
    """One line on the first error of a group; of an actor's error the call and what was raised in it."""
    where = ""
    while isinstance(error, BaseExceptionGroup | ActorError):
        if isinstance(error, ActorError):
            where += f"{error.message.rstrip('.')}: "
            error = error.exception
        else:
            error = error.exceptions[0]
    return f"{where}{type(error).__name__}: {' '.join(str(error).split())[:400]}"


SHOWN = (
    "reward_first5",
    "reward_last10",
    "loop_seconds",
    "generated_tokens_per_second",
    "idle_generator",
    "idle_trainer",
)


def main() -> None:
    """Entry point of `python -m recipes.grpo_async`."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", force=True)
    config = tyro.cli(Config, config=(tyro.conf.CascadeSubcommandArgs,))
    try:
        summary = asyncio.run(train_until_signal(config))
    except (ValueError, OSError) as error:
        sys.exit(f"grpo_async: {error}")
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.exit("grpo_async: ended by a signal before its last step")
    except Exception as error:
        print(f"grpo_async: {cause(error)}", file=sys.stderr)
        raise
    print("  ".join(f"{name} {summary[name]:.3g}" for name in SHOWN if name in summary))


if __name__ == "__main__":
    main()
