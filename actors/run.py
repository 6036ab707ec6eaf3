"""The loop of a run as three verbs over its processes. No rollout passes through here.

async with launch(config, task=task, loss=DIS(), advantage=group_norm) as run:
    async for batch in run.batches():
        run.publish(await run.train(batch))
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from actors import payload
from actors.config import RunConfig
from actors.generator import Stats
from actors.metrics import RunLog
from actors.sync import WeightSync
from actors.timeline import Spans
from actors.types import Probe, StepReport, Taken

STOP_SECONDS = 5.0
"""After a signal, how long the step in progress may take to end."""


class Stopped(Exception):
    """A signal ended the run in the middle of something; what was saved before stands."""


@dataclass(frozen=True, kw_only=True)
class Roles:
    """Handles of the actors of a run."""

    buffer: Any
    workers: Any
    generators: list[Any]
    """Rank 0 of each replica that serves training."""
    evaluator: Any | None
    """Rank 0 of the replica that serves evaluation."""
    trainer: Any
    sync: WeightSync


class Run:
    """Counts steps, publishes versions, logs.

    Args:
        config: settings of all roles.
        log: the output folder.
        roles: the actors, set up and working.
        tasks: where everything beside the loop runs: an error there ends the run.
        stop: gets the signal that ends the loop after the step in progress.
    """

    def __init__(
        self,
        config: RunConfig,
        log: RunLog,
        roles: Roles,
        tasks: asyncio.TaskGroup,
        stop: asyncio.Future[signal.Signals],
    ) -> None:
        self.config, self.log = config, log
        self.summary: dict[str, Any] = {}
        """What `summary.json` holds, after the end."""
        self._roles, self._tasks, self._stop = roles, tasks, stop
        self._publishing: dict[int, asyncio.Task[None]] = {}
        self._probing: dict[int, asyncio.Task[Probe | None]] = {}
        self._spans = Spans("trainer")
        self._stats: list[Stats] = []
        self._waited = 0.0
        """Seconds that the trainer waited for batches."""
        self._wait = 0.0
        """Seconds of them before the present step."""
        self._published = 0
        self._tickets: set[int] = set()

    # The loop's verbs

    async def batches(self) -> AsyncIterator[Taken]:
        """Each step's groups, until the last step, the end of the data, or a signal.

        Raises:
            RuntimeError: a batch was not trained.
        """
        self._began = self._ended = time.perf_counter()
        self._stats = await self._read_stats()
        self._ready = self._tasks.create_task(wait(self._roles.buffer.ready.call_one(0)))
        self._start_probe(0)
        for step in range(self.config.steps):
            with self._spans("wait", step):
                await asyncio.wait({self._ready, self._stop}, return_when=asyncio.FIRST_COMPLETED)
            if self._stop.done():
                return
            taken: Taken = self._ready.result()
            if taken.step != step:
                raise RuntimeError(f"the batch of step {taken.step} was not trained: await run.train(batch) for each")
            if not taken.groups:
                return
            self._wait = time.perf_counter() - self._ended
            yield taken
            if taken.last:
                return

    async def train(self, taken: Taken) -> dict[str, float]:
        """One step on all ranks: the weights of the next version, and the metrics of the step.

        Raises:
            RuntimeError: the ranks did not train what the buffer gave.
            Stopped: a signal came and the step did not end in time.
        """
        step = taken.step
        await self._roles.sync.lease(step + 1)
        if not taken.last:
            self._ready = self._tasks.create_task(wait(self._roles.buffer.ready.call_one(step + 1)))
        probe = await self._probe_for(step)
        with self._spans("train", step):
            reports: list[StepReport] = list((await self._unless_stopped(taken, probe)).values())
        seconds, self._ended = time.perf_counter() - self._ended, time.perf_counter()
        self._account(taken, reports)
        self._waited += self._wait
        return {
            "step": step,
            **taken.metrics,
            **reports[0].metrics,
            "time/step": seconds,
            "time/wait_batch": self._wait,
            "idle/trainer": self._wait / seconds,
        }

    def publish(self, row: dict[str, float]) -> None:
        """Push the weights of the step that gave `row` to all generators, and log it, while the loop goes on."""
        version = int(row["step"]) + 1
        self._publishing[version] = self._tasks.create_task(self._publish(version, row))

    # What goes on beside it

    async def _unless_stopped(self, taken: Taken, probe: Probe | None) -> Any:
        """The step's reports."""
        step = asyncio.ensure_future(wait(self._roles.trainer.step.call(taken, probe)))
        await asyncio.wait({step, self._stop}, return_when=asyncio.FIRST_COMPLETED)
        if not step.done():
            await asyncio.wait({step}, timeout=STOP_SECONDS)
        if not step.done():
            step.cancel()
            raise Stopped(f"{self._stop.result().name}: step {taken.step} did not end within {STOP_SECONDS:.0f} s")
        return step.result()

    async def _publish(self, version: int, row: dict[str, float]) -> None:
        """Push `version`, open new tickets, log the step that made it."""
        row |= await self._roles.sync.publish(version, len(self._roles.generators))
        if version - 1 in self._publishing:
            await asyncio.shield(self._publishing.pop(version - 1))
        self._published += 1
        await self._roles.buffer.announce.call_one(version)
        self._start_probe(version)
        stats, old = await self._read_stats(), self._stats
        self._stats = stats
        row["perf/generated_tokens"] = sum(new.tokens - last.tokens for new, last in zip(stats, old, strict=True))
        row["idle/generator"] = 1 - _busy(stats, old)
        self.log.step(row)

    def _start_probe(self, version: int) -> None:
        """Short rollouts at one version, for the trainer to compare logprobs; the replicas take turns."""
        if self.config.probe:
            replica = version % self.config.generator.replicas
            sampled = self._roles.workers.slice(ranks=0).probe.call_one(version, replica, self.config.probe)
            self._probing[version] = self._tasks.create_task(wait(sampled))

    async def _probe_for(self, step: int) -> Probe | None:
        """The newest probe that the trainer can still compare: of the version that it holds or of the one before.

        Synchronous steps wait for that of their own version. Others may have to wait for the one before, whose weights
        the generators have held for a step.
        """
        if not self.config.probe:
            return None
        oldest = max(min(self._probing), step if self.config.buffer.max_staleness == 0 else step - 1)
        if oldest in self._publishing:
            await asyncio.shield(self._publishing[oldest])
        await self._probing[oldest]
        newest = max(version for version, task in self._probing.items() if task.done())
        for version in [v for v in self._probing if v < newest]:
            if (probe := self._probing.pop(version).result()) is not None:
                payload.free(probe.handle)
        return self._probing[newest].result()

    def _account(self, taken: Taken, reports: list[StepReport]) -> None:
        """Compare what the ranks trained with what the buffer gave them."""
        given, trained = sum(len(group.rewards) for group in taken.groups), sum(r.rollouts for r in reports)
        if given != trained:
            raise RuntimeError(f"step {taken.step}: the buffer gave {given} rollouts, the ranks trained {trained}")
        self._tickets.update(ticket for report in reports for ticket in report.tickets)

    async def _read_stats(self) -> list[Stats]:
        return list(await asyncio.gather(*(wait(g.stats.call_one()) for g in self._roles.generators)))

    async def finish(self) -> None:
        """Wait for what is under way, compare the books of buffer and trainer, write the summary."""
        await asyncio.gather(*self._publishing.values())
        if self._stop.done():
            for task in (self._ready, *self._probing.values()):
                task.cancel()
        else:
            await asyncio.gather(*self._probing.values())
        loop_seconds, training_seconds = time.perf_counter() - self._began, self._ended - self._began
        counts: dict[str, int] = await self._roles.buffer.counts.call_one()
        if counts["issued"] != counts["trained"] + counts["dropped"] + counts["open"]:
            raise RuntimeError(f"the buffer's books do not balance: {counts}")
        ranks = len(self._tickets)
        if counts["trained"] != ranks:
            raise RuntimeError(f"the buffer counts {counts['trained']} trained tickets, the ranks {ranks}")
        stats = await self._read_stats()
        self.summary = self.log.finish(
            loop_seconds,
            counts,
            idle_generator=1 - sum(s.busy for s in stats) / sum(s.alive for s in stats),
            idle_trainer=self._waited / training_seconds if training_seconds else 0.0,
            versions_published=self._published,
        )


def _busy(new: list[Stats], old: list[Stats]) -> float:
    """Share of the time between two readings that the engines worked."""
    pairs = list(zip(new, old, strict=True))
    return sum(n.busy - o.busy for n, o in pairs) / max(sum(n.alive - o.alive for n, o in pairs), 1e-9)


async def wait(answer: Any) -> Any:
    """An actor's answer as a coroutine, for a task."""
    return await answer
