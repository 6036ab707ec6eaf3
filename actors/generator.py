"""A generator replica: a mesh of ranks around one engine. Rank 0 decides each step, the others follow."""

from __future__ import annotations

import asyncio
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from monarch.actor import Actor, concurrent_endpoint, current_rank

from actors.config import GeneratorConfig, NativeEngine, VllmEngine
from actors.engines.base import EMPTY, Engine
from actors.timeline import Span, Spans
from actors.types import Completion, CompletionBatch, Request, RequestBatch, RequestId

if TYPE_CHECKING:
    from actors.weights import Box


@dataclass(kw_only=True, slots=True)
class Tick:
    """What every rank of a replica does next, in this order: load, abort, add, step. A tick that loads ends there, so
    that the new version is known at once."""

    index: int
    load: int | None = None
    """Version to take from staging."""
    abort: list[RequestId] = field(default_factory=list)
    add: list[Request] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stats:
    """A replica's work since its start."""

    busy: float
    """Seconds inside the engine."""
    alive: float
    """Seconds since `run` began."""
    tokens: int
    """Tokens generated."""
    spans: tuple[Span, ...]
    """What it did since the last reading."""


def build_engine(config: GeneratorConfig, model: str, group_size: int, device: str) -> Engine:
    """The configured engine, its library imported only now."""
    if isinstance(config.engine, NativeEngine):
        from actors.engines.native import Native

        return Native(config.engine, model, replicas=config.replicas, group_size=group_size, device=device)
    if isinstance(config.engine, VllmEngine):
        from actors.engines.vllm import Vllm

        return Vllm(config.engine, model, device=device)
    from actors.engines.simulated import Simulated

    return Simulated(config.engine)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Result:
    """What a tick did on one rank."""

    finished: list[tuple[RequestId, Completion]]
    refused: list[tuple[RequestId, ValueError]]
    stall: float
    seconds: float
    digest: int


def digest_of(finished: list[tuple[RequestId, Completion]]) -> int:
    """32-bit digest of finished requests, to compare ranks that must agree."""
    digest = 0
    for id, completion in finished:
        digest = zlib.crc32(np.array(id, np.int64).tobytes() + completion.tokens.tobytes(), digest)
    return digest


class _Call:
    """One `generate` call: its requests finish one by one, its answer goes out once."""

    def __init__(self, requests: list[Request]) -> None:
        self.order = {request.id: i for i, request in enumerate(requests)}
        self.completions: list[Completion | None] = [None] * len(requests)
        self.left = len(requests)
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def finish(self, id: RequestId, completion: Completion) -> None:
        self.completions[self.order[id]] = completion
        self.left -= 1
        if not self.left and not self.done.done():
            self.done.set_result(None)

    def fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)


class Generator(Actor):
    """One rank of a replica.

    A token's version is that of the weights that computed its logits: weights change between two forwards only, on
    every rank at the same tick. Requests wait for the version that they ask for, so work is born fresh.
    """

    def __init__(
        self,
        config: GeneratorConfig,
        model: str,
        group_size: int,
        device: str = "cpu",
        *,
        label: str = "generator0",
        version: int = 0,
    ) -> None:
        """`version` is that of the weights in the folder `model`; `label` stands for the replica in the timeline."""
        self._config, self._model, self._group_size, self._device = config, model, group_size, device
        self._version = version
        self._rank = current_rank().rank
        self._spans = Spans(label)
        # The engine runs in a thread of its own, so that this actor answers while it computes.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._wake = asyncio.Event()
        self._queue: list[Request] = []
        self._abort: list[RequestId] = []
        self._calls: dict[RequestId, _Call] = {}
        self._began_at: dict[RequestId, int] = {}
        """Version at which each request in the engine joined it."""
        self._swap: tuple[int, asyncio.Future[float]] | None = None
        self._closing = False
        self._error: Exception | None = None
        self._ticks = 0
        self._began = time.perf_counter()
        self._busy = 0.0
        self._tokens = 0

    @concurrent_endpoint
    async def setup(self) -> None:
        """Build the engine and load the folder's weights."""
        loop = asyncio.get_running_loop()
        self._engine = await loop.run_in_executor(
            self._thread, build_engine, self._config, self._model, self._group_size, self._device
        )
        self._engine.version = self._version

    @concurrent_endpoint
    async def wanted(self) -> dict[str, Box] | None:
        """The part of each tensor that this rank loads, by Hugging Face name; None for an engine without weights."""
        return self._engine.wanted()

    @concurrent_endpoint
    async def run(self, followers: list[Any]) -> None:
        """Decode until `close`; rank 0 only. `followers` are the replica's other ranks. Raises what the engine raised,
        after telling every open request."""
        loop = asyncio.get_running_loop()
        self._began = time.perf_counter()
        try:
            while not self._closing:
                tick = self._next_tick()
                if tick is None:
                    self._wake.clear()
                    await self._wake.wait()
                    continue
                following = [follower.follow.call_one(tick) for follower in followers]
                result = await loop.run_in_executor(self._thread, self._apply, tick)
                for rank, digest in enumerate([await answer for answer in following], start=1):
                    if digest != result.digest:
                        raise RuntimeError(
                            f"rank {rank} diverged from rank 0 at tick {tick.index}: restart the replica"
                        )
                self._settle(tick, result)
        except Exception as error:
            self._error = error
            raise
        finally:
            stopped = RuntimeError(f"the engine has stopped: {self._error or 'the replica was closed'}")
            for call in set(self._calls.values()):
                call.fail(stopped)
            if self._swap is not None:
                self._swap[1].set_exception(stopped)

    def _next_tick(self) -> Tick | None:
        """Everything that waits for the next pause between forwards; None if there is nothing to do."""
        load = self._swap[0] if self._swap is not None else None
        version = self._engine.version if load is None else load
        add = [r for r in self._queue if r.min_version <= version][: self._engine.free]
        if load is None and not add and not self._abort and not self._engine.unfinished:
            return None
        joining = {r.id for r in add}
        self._queue = [r for r in self._queue if r.id not in joining]
        self._began_at.update(dict.fromkeys(joining, version))
        abort, self._abort = self._abort, []
        self._ticks += 1
        return Tick(index=self._ticks, load=load, abort=abort, add=add)

    def _apply(self, tick: Tick) -> _Result:
        """Carry out a tick; the same on every rank. Runs in the engine's thread."""
        begin = time.perf_counter()
        stall = 0.0
        if tick.load is not None:
            self._load(tick.load)
            stall = time.perf_counter() - begin
        finished = self._engine.abort(tick.abort) if tick.abort else []
        refused: list[tuple[RequestId, ValueError]] = []
        for request in tick.add:
            try:
                self._engine.add(request)
            except ValueError as error:
                refused.append((request.id, error))
        if tick.load is None and self._engine.unfinished:
            finished += self._engine.step()
        return _Result(
            finished=finished,
            refused=refused,
            stall=stall,
            seconds=time.perf_counter() - begin,
            digest=digest_of(finished),
        )

    def _load(self, version: int) -> None:
        tensors = {}
        if self._engine.wanted() is not None:
            from actors.sync import staged

            tensors = staged(version)
        self._engine.load(tensors, version)

    def _settle(self, tick: Tick, result: _Result) -> None:
        """Answer the callers whose requests a tick ended."""
        self._busy += result.seconds
        end = time.time()
        self._spans.add("decode" if tick.load is None else "swap", end - result.seconds, end, self._engine.version)
        if tick.load is not None and self._swap is not None:
            self._swap[1].set_result(result.stall)
            self._swap = None
        for id, error in result.refused:
            del self._began_at[id]
            if (call := self._calls.pop(id, None)) is not None:
                call.fail(error)
        for id, completion in result.finished:
            self._tokens += len(completion.tokens)
            del self._began_at[id]
            if (call := self._calls.pop(id, None)) is not None:
                call.finish(id, completion)

    @concurrent_endpoint
    async def follow(self, tick: Tick) -> int:
        """Carry out rank 0's tick on another rank; returns a digest of what it finished."""
        result = await asyncio.get_running_loop().run_in_executor(self._thread, self._apply, tick)
        return result.digest

    @concurrent_endpoint
    async def generate(self, batch: RequestBatch) -> CompletionBatch:
        """Complete all requests; they share one answer.

        Raises:
            ValueError: the engine refuses a request (empty prompt, no room).
            RuntimeError: the engine died.
        """
        if self._error is not None or self._closing:
            raise RuntimeError(f"the engine has stopped: {self._error or 'the replica was closed'}")
        requests = batch.unpack()
        call = _Call(requests)
        self._calls.update(dict.fromkeys(call.order, call))
        if requests[0].id.ticket < 0:
            self._queue = requests + self._queue  # probes are short and measure the present version
        else:
            self._queue += requests
        self._wake.set()
        await call.done
        return CompletionBatch.of([c for c in call.completions if c is not None], load=len(self._calls))

    @concurrent_endpoint
    async def abort(self, ticket: int, attempt: int, oldest: int | None = None) -> None:
        """Stop a group's requests; their callers get the tokens so far, finish `abort`.

        With `oldest`, only if one of them has begun with weights older than that version.
        """
        mine = [id for id in self._calls if (id.ticket, id.attempt) == (ticket, attempt)]
        if oldest is not None and all(self._began_at.get(id, oldest) >= oldest for id in mine):
            return
        queued = {r.id for r in self._queue}.intersection(mine)
        self._queue = [r for r in self._queue if r.id not in queued]
        self._abort += [id for id in mine if id not in queued]
        for id in queued:
            self._calls.pop(id).finish(id, EMPTY)
        self._wake.set()

    @concurrent_endpoint
    async def swap(self, version: int) -> float:
        """Take the staged weights of `version` between two forwards; seconds that decoding waited.

        Raises:
            RuntimeError: another swap is pending, or the engine died.
        """
        if self._error is not None or self._closing or self._swap is not None:
            raise RuntimeError(f"no swap to version {version}: {self._error or 'another one is pending'}")
        done: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._swap = (version, done)
        self._wake.set()
        return await done

    @concurrent_endpoint
    async def stats(self) -> Stats:
        """This replica's work so far."""
        alive = time.perf_counter() - self._began
        return Stats(busy=self._busy, alive=alive, tokens=self._tokens, spans=tuple(self._spans.take()))

    @concurrent_endpoint
    async def close(self) -> None:
        """End `run` after the forward in progress and free the engine."""
        self._closing = True
        self._wake.set()
        await asyncio.get_running_loop().run_in_executor(self._thread, self._engine.close)
