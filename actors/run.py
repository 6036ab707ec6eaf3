"""The loop of a run as three verbs over its processes. No rollout passes through here.

async with launch(config, task=task, loss=DIS(), advantage=group_norm) as run:
    async for batch in run.batches():
        run.publish(await run.train(batch))
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

from actors import payload
from actors.checkpoint import BUFFER, Checkpoints
from actors.config import RunConfig
from actors.evaluation import evaluate, figures
from actors.generator import Stats
from actors.metrics import RunLog
from actors.samples import choose, samples
from actors.sync import WeightSync
from actors.timeline import Span, Spans
from actors.tokenizer import Tokenizer
from actors.types import Probe, StepReport, Taken

log = logging.getLogger(__name__)

FLAT_STEPS = 5
"""Steps without different rewards before a warning."""
STOP_SECONDS = 5.0
"""After a signal, how long the step in progress may take to end."""


class Stopped(Exception):
    """A signal ended the run in the middle of something; what was saved before stands."""

    def __init__(self, number: signal.Signals, where: str) -> None:
        super().__init__(f"stopped by {number.name} {where}")
        self.signal = number


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
    writers: Any
    """The `CheckpointWriter` beside each rank of the trainer."""
    sync: WeightSync


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where a run begins: at nothing, or at a checkpoint of an earlier process."""

    version: int = 0
    trained: int = 0
    """Tickets that ended trained before."""
    begun: tuple[int, ...] = ()
    """Open tickets that a step has trained before."""


class Run:
    """Counts steps, publishes versions, logs.

    Args:
        config: settings of all roles.
        log: the output folder.
        roles: the actors, set up and working.
        tasks: where everything beside the loop runs: an error there ends the run.
        stop: gets the signal that ends the loop after the step in progress.
        tokenizer: for the sample rollouts.
        held_out: rows that the task keeps for evaluation.
        start: where this process goes on.
    """

    def __init__(
        self,
        config: RunConfig,
        log: RunLog,
        roles: Roles,
        tasks: asyncio.TaskGroup,
        stop: asyncio.Future[signal.Signals],
        tokenizer: Tokenizer,
        *,
        held_out: int = 0,
        start: Start | None = None,
    ) -> None:
        self.config, self.log = config, log
        self.summary: dict[str, Any] = {}
        """What `summary.json` holds, after the end."""
        self._roles, self._tasks, self._stop = roles, tasks, stop
        self._tokenizer, self._held_out, self._start = tokenizer, held_out, start or Start()
        self._checkpoints = Checkpoints(log.folder / "checkpoints", config.save.keep)
        self._version = self._saved = self._start.version
        self._tickets = set(self._start.begun)
        """Tickets that the ranks trained, of those that were open at the start or issued later."""
        self._publishing: dict[int, asyncio.Task[None]] = {}
        self._probing: dict[int, asyncio.Task[Probe | None]] = {}
        self._sampling: dict[int, asyncio.Task[list[dict[str, Any]]]] = {}
        self._evaluating: asyncio.Task[None] | None = None
        self._saving: asyncio.Task[None] | None = None
        self._spans, self._evaluations = Spans("trainer"), Spans("evaluator")
        self._stats: list[Stats] = []
        self._wait = 0.0
        """Seconds that the trainer waited for the present batch."""
        self._flat = 0
        """Steps in a row whose groups all had equal rewards."""

    # The loop's verbs

    async def batches(self) -> AsyncIterator[Taken]:
        """Each step's groups, until the last step, the end of the data, or a signal.

        Raises:
            RuntimeError: a batch was not trained.
        """
        self._began = self._ended = time.perf_counter()
        self._stats = await self._read_stats()
        self._ready = self._tasks.create_task(wait(self._roles.buffer.ready.call_one(self._version)))
        self._start_probe(self._version)
        if self.config.eval.every and not self._version:
            self._evaluating = self._tasks.create_task(self._evaluate(0))
        for step in range(self._version, self.config.steps):
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
        self._sampling[step] = self._tasks.create_task(asyncio.to_thread(self._samples, taken))
        probe = await self._probe_for(step)
        with self._spans("train", step):
            reports: list[StepReport] = list((await self._unless_stopped(taken, probe)).values())
        seconds, self._ended = time.perf_counter() - self._ended, time.perf_counter()
        self._account(taken, reports)
        self._version = step + 1
        return {
            "step": step,
            **taken.metrics,
            **reports[0].metrics,
            "time/step": seconds,
            "time/wait_batch": self._wait,
            "idle/trainer": self._wait / seconds,
        }

    async def publish(self, row: dict[str, float]) -> None:
        """Push the weights of the step that gave `row` to all generators, and log it, while the loop goes on.

        Where a checkpoint is due this waits for the one before and for a copy in memory.
        """
        version = int(row["step"]) + 1
        evaluates = self._due(version, self.config.eval.every)
        if evaluates and self._evaluating is not None and not self._evaluating.done():
            log.warning("version %d is not evaluated: the evaluation before is still going on", version)
            evaluates = False
        self._publishing[version] = self._tasks.create_task(self._publish(version, row, evaluates))
        if evaluates:  # from now on it is going on: no later version may reach the evaluator
            self._evaluating = self._tasks.create_task(self._evaluate(version, self._publishing[version]))
        if evaluates or self._due(version, self.config.save.every):
            await self._save()

    # What goes on beside it

    async def _unless_stopped(self, taken: Taken, probe: Probe | None) -> Any:
        """The step's reports."""
        step = asyncio.ensure_future(wait(self._roles.trainer.step.call(taken, probe)))
        await asyncio.wait({step, self._stop}, return_when=asyncio.FIRST_COMPLETED)
        if not step.done():
            await asyncio.wait({step}, timeout=STOP_SECONDS)
        if not step.done():
            step.cancel()
            where = f"in step {taken.step}, which did not end within {STOP_SECONDS:.0f} s"
            raise Stopped(self._stop.result(), where)
        return step.result()

    def _due(self, version: int, every: int) -> bool:
        """Whether something done `every` so many versions, and at the end, is to be done at this one."""
        return every > 0 and (version % every == 0 or version == self.config.steps)

    async def _publish(self, version: int, row: dict[str, float], evaluates: bool) -> None:
        """Push `version`, open new tickets, log the step that made it."""
        row |= await self._roles.sync.publish(version, None if evaluates else len(self._roles.generators))
        if version - 1 in self._publishing:
            await asyncio.shield(self._publishing.pop(version - 1))
        self.log.rollouts(await self._sampling.pop(version - 1))
        await self._roles.buffer.announce.call_one(version)
        self._start_probe(version)
        stats, old = await self._read_stats(), self._stats
        self._stats = stats
        row["perf/generated_tokens"] = sum(new.tokens - last.tokens for new, last in zip(stats, old, strict=True))
        row["idle/generator"] = 1 - _busy(stats, old)
        self._look(row)
        self.log.step(row)
        self.log.spans([span for spans in await self._read_spans() for span in spans])

    def _look(self, row: dict[str, float]) -> None:
        """Say so when the rewards give nothing to learn from."""
        flat = row["reward/zero_variance"] == 1 and self.config.group_size > 1
        self._flat = self._flat + 1 if flat else 0
        if self._flat == FLAT_STEPS:
            log.warning(
                "in the last %d steps no group had different rewards, so nothing is learnt: look at the rollouts with "
                "recipes.view, at the reward, at --sampling.temperature and --group-size",
                FLAT_STEPS,
            )

    async def _save(self) -> None:
        """Begin a checkpoint of the version that the trainer holds."""
        if self._saving is not None:
            await asyncio.shield(self._saving)
        version, hidden = self._version, self._checkpoints.begin(self._version)
        books = wait(self._roles.buffer.checkpoint.call_one(str(hidden / BUFFER), version))
        with self._spans("checkpoint", version):
            await self._roles.trainer.checkpoint.call()
        self._saving = self._tasks.create_task(self._write(version, str(hidden), books))

    async def _write(self, version: int, hidden: str, books: Coroutine[Any, Any, None]) -> None:
        """Write a checkpoint; it is there when buffer, trainer and the log of its step are."""
        await asyncio.gather(books, wait(self._roles.writers.write.call(hidden)))
        if version in self._publishing:
            await asyncio.shield(self._publishing[version])
        await asyncio.to_thread(self._checkpoints.commit, version, {})
        self._saved = version

    def _samples(self, taken: Taken) -> list[dict[str, Any]]:
        """Records of a few rollouts of a step."""
        chosen = choose(taken, self.config.log.rollouts)
        return [record for number in chosen for record in samples(taken, number, self._tokenizer)]

    async def _evaluate(self, version: int, published: asyncio.Task[None] | None = None) -> None:
        """Play held-out rows at one version, once it is published; the evaluator keeps it until the next one."""
        settings = self.config.eval
        if published is not None:
            await asyncio.shield(published)
        with self._evaluations("evaluate", version):
            judged = await evaluate(
                self._roles.workers,
                [self._roles.evaluator],
                rows=min(settings.rows, self._held_out),
                version=version,
                samples=settings.samples,
                sampling=replace(self.config.sampling, temperature=settings.temperature),
            )
        found = figures(judged, settings.samples, settings.solved)
        self.log.evaluation(version, found)
        best = self._checkpoints.best()
        if version and (best is None or found["eval/reward"] > best.value):
            await asyncio.to_thread(self._checkpoints.mark_best, version, found["eval/reward"])

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

    async def _read_spans(self) -> list[Sequence[Span]]:
        """What every role did since the last reading."""
        evaluator, workers = self._roles.evaluator, self._roles.workers
        out: list[Sequence[Span]] = [self._spans.take(), self._roles.sync.spans.take()]
        out += [stats.spans for stats in self._stats]
        if evaluator is not None:
            out += [self._evaluations.take(), (await wait(evaluator.stats.call_one())).spans]
        return out + list((await wait(workers.spans.call())).values())

    async def finish(self) -> None:
        """Wait for what is under way, compare the books of buffer and trainer, write checkpoint and summary."""
        await asyncio.gather(*self._publishing.values())
        loop_seconds = time.perf_counter() - self._began
        aside = [*self._probing.values(), *([self._evaluating] if self._evaluating else [])]
        if self._stop.done():
            for task in (self._ready, *aside):
                task.cancel()
        else:
            await asyncio.gather(*aside)
        if self._saving is not None:
            await self._saving
        if self._saved != self._version and (self._stop.done() or self.config.save.every):
            await self._save()
            assert self._saving is not None
            await self._saving
        counts: dict[str, int] = await self._roles.buffer.counts.call_one()
        self._balance(counts)
        stopped = self._stop.result().name if self._stop.done() else ""
        self.summary = self.log.finish(
            loop_seconds,
            counts,
            status="stopped" if stopped else "done",
            reason=f"{stopped} after step {self._version}" if stopped else "",
            versions_published=self._version,
        )

    def _balance(self, counts: dict[str, int]) -> None:
        """Raises RuntimeError when tickets were lost, or buffer and ranks disagree."""
        if counts["issued"] != counts["trained"] + counts["dropped"] + counts["open"]:
            raise RuntimeError(f"the buffer's books do not balance: {counts}")
        ranks = self._start.trained + len(self._tickets)
        if counts["trained"] != ranks:
            raise RuntimeError(f"the buffer counts {counts['trained']} trained tickets, the ranks {ranks}")


def _busy(new: list[Stats], old: list[Stats]) -> float:
    """Share of the time between two readings that the engines worked."""
    pairs = list(zip(new, old, strict=True))
    return sum(n.busy - o.busy for n, o in pairs) / max(sum(n.alive - o.alive for n, o in pairs), 1e-9)


async def wait(answer: Any) -> Any:
    """An actor's answer as a coroutine, for a task."""
    return await answer
