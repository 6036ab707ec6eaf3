"""Weights from the trainer into the generators while both work.

The trainer's only wait is the copy into a slot. A publisher in its process sums and offers the slot, a receiver in the
generator's process fetches, checks and joins, and the engine copies between two forwards. Two slots take turns, so
version v is staged only when nobody reads v - 2 any more: the lease.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from monarch.actor import Actor, concurrent_endpoint
from xxhash import xxh3_64_digest, xxh3_64_intdigest

from actors import shm
from actors.config import Dtype, SyncConfig
from actors.timeline import Spans
from actors.transports.base import Transport
from actors.transports.shm import slot_path
from actors.weights import Assembly, Box, Part, Shard, WeightIndex, layout, torch_dtype

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

SUM_BLOCK = 32 << 20
"""Bytes that one thread sums at a time."""
GRACE = 5.0
"""Seconds that the controller waits beyond an actor's own time limit, whose error is the more precise one."""

# Sibling actors of a process meet here: a trainer rank and its publisher, a receiver and its generator.
_slots: dict[str, Slots] = {}
_staged: dict[int, dict[str, Tensor]] = {}


def staged(version: int) -> dict[str, Tensor]:
    """The tensors that this process's receiver fetched for `version`, handed over once. May be read-only maps.

    Raises:
        RuntimeError: another version is staged here, or none.
    """
    if version not in _staged:
        raise RuntimeError(f"weights of version {version} are not staged here, {sorted(_staged)} are: pull them first")
    return _staged.pop(version)


class Slots:
    """A trainer rank's two staging slots: files of the run's folder, one bucket each, filled in turn."""

    def __init__(self, rank: int, parts: list[Part], buckets: list[Tensor], locals_: list[Tensor]) -> None:
        self.rank = rank
        self.parts = parts
        self.nbytes = len(buckets[0])
        self._buckets = buckets
        self._locals = locals_
        # Addresses never change, so the views are made once: walking a state dict costs more than the copy.
        self._views = [[_view(bucket, part) for part in parts] for bucket in buckets]
        self._held: list[int | None] = [None, None]
        self._seconds = [0.0, 0.0]

    @classmethod
    def create(cls, run_dir: str, rank: int, shards: Iterable[Shard], dtype: Dtype) -> Slots:
        """Lay the shards out and make the slots, their pages touched; the publisher of this process finds them.

        Raises:
            OSError: the folder has no room for them.
            ValueError: a shard is not of a floating type.
        """
        import torch

        found = list(shards)
        parts, nbytes = layout(found, rank, dtype)
        locals_ = [shard.tensor.detach() for shard in found if shard.tensor.numel()]
        buckets = []
        for turn in (0, 1):
            bucket = torch.from_numpy(shm.map_new(slot_path(run_dir, rank, turn), nbytes))
            buckets.append(bucket.zero_())
        _slots[run_dir] = slots = cls(rank, parts, buckets, locals_)
        return slots

    def stage(self, version: int) -> float:
        """Copy the live weights into the slot of `version`, cast to the send type; returns seconds.

        Only after `WeightSync.lease(version)`: readers of version - 2 would see the bytes change.
        """
        begin = time.perf_counter()
        turn = version % 2
        self._held[turn] = None  # a publisher that reads meanwhile must notice
        for view, local in zip(self._views[turn], self._locals, strict=True):
            view.copy_(local)
        self._held[turn] = version
        self._seconds[turn] = time.perf_counter() - begin
        return self._seconds[turn]

    def bucket(self, version: int) -> tuple[Tensor, float]:
        """The slot that holds `version`, and the seconds that staging it took.

        Raises:
            RuntimeError: the slot holds another version.
        """
        held = self._held[version % 2]
        if held != version:
            raise RuntimeError(f"rank {self.rank}: the slot of version {version} holds {held}: it was lapped")
        return self._buckets[version % 2], self._seconds[version % 2]

    @property
    def exact(self) -> bool:
        """Whether what is sent is bitwise what the trainer holds: no cast on the way."""
        return all(view.dtype == local.dtype for view, local in zip(self._views[0], self._locals, strict=True))

    @contextmanager
    def weights_of(self, version: int) -> Iterator[None]:
        """Let the live weights be those of `version` (as sent), then restore them bitwise.

        A module that keeps gathered copies between forwards (FSDP's root does without a backward) must be resharded
        after entering and before leaving.

        Raises:
            RuntimeError: no slot holds `version`.
        """
        self.bucket(version)
        live = [local.clone() for local in self._locals]
        try:
            for view, local in zip(self._views[version % 2], self._locals, strict=True):
                local.copy_(view)
            yield
        finally:
            for local, kept in zip(self._locals, live, strict=True):
                local.copy_(kept)


def _view(bucket: Tensor, part: Part) -> Tensor:
    return bucket[part.at : part.at + part.nbytes].view(torch_dtype(part.dtype)).view(part.box.size)


@dataclass(frozen=True, kw_only=True, slots=True)
class Publication:
    """One rank's part of a version is whole and can be read."""

    rank: int
    version: int
    sum: int
    """`sum_of` the bucket."""
    nbytes: int
    seconds: float
    """Summing and offering, in the background."""
    stage_seconds: float
    """What the trainer waited for the copy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pulled:
    """A receiver staged a version."""

    nbytes: int
    """Of the buckets that it fetched."""
    seconds: float


async def sum_of(bucket: Tensor) -> int:
    """64-bit sum of all bytes and their places: XXH3 over the XXH3 of 32 MiB blocks, summed in threads.

    XXH3 runs at memory speed and holds no interpreter lock, so the actor's loop and its neighbours go on.
    """
    data = bucket.numpy().data
    blocks = [data[start : start + SUM_BLOCK] for start in range(0, len(data), SUM_BLOCK)]
    digests = await asyncio.gather(*(asyncio.to_thread(xxh3_64_digest, block) for block in blocks))
    return xxh3_64_intdigest(b"".join(digests))


class _Clock:
    """One time limit over the phases of an operation; the error of a late one names it."""

    def __init__(self, seconds: float, version: int) -> None:
        self._seconds, self._version = seconds, version
        self._deadline = asyncio.get_running_loop().time() + seconds

    @asynccontextmanager
    async def phase(self, name: str, what: str) -> AsyncIterator[None]:
        limit = asyncio.timeout_at(self._deadline)
        try:
            async with limit:
                yield
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise TimeoutError(
                f"sync of version {self._version}: no end of {name} ({what}) within {self._seconds:g} s; "
                "raise --sync.timeout if it is only slow"
            ) from error


class WeightPublisher(Actor):
    """Beside a trainer rank, in its process: sums and offers what the rank staged while the rank trains on."""

    def __init__(self, run_dir: str, transport: Transport, timeout: float) -> None:
        self._run_dir, self._transport, self._timeout = run_dir, transport, timeout

    @concurrent_endpoint
    async def index(self) -> tuple[list[Part], int]:
        """This rank's parts and the bytes of its bucket. The rank must have made its `Slots`."""
        if self._run_dir not in _slots:
            raise RuntimeError(f"no slots for {self._run_dir} in this process: set the trainer up before the sync")
        self._own = _slots[self._run_dir]
        self._sender = self._transport.sender(self._own.rank)
        return self._own.parts, self._own.nbytes

    @concurrent_endpoint
    async def publish(self, version: int) -> Publication:
        """Sum the staged slot and offer it.

        Raises:
            RuntimeError: the slot holds another version, before or after.
            TimeoutError: it took too long; names rank and phase.
        """
        begin = time.perf_counter()
        clock = _Clock(self._timeout, version)
        rank = self._own.rank
        bucket, stage_seconds = self._own.bucket(version)
        async with clock.phase("put", f"bucket of rank {rank}"):
            total, _ = await asyncio.gather(sum_of(bucket), self._sender.put(version, bucket))
        self._own.bucket(version)
        return Publication(
            rank=rank,
            version=version,
            sum=total,
            nbytes=len(bucket),
            seconds=time.perf_counter() - begin,
            stage_seconds=stage_seconds,
        )

    @concurrent_endpoint
    async def free(self, version: int) -> None:
        """No reader needs `version` any more."""
        async with _Clock(self._timeout, version).phase("free", f"bucket of rank {self._own.rank}"):
            await self._sender.free(version)


class WeightReceiver(Actor):
    """Beside a generator rank, in its process: has the next weights ready while the engine decodes."""

    @concurrent_endpoint
    async def setup(self, index: WeightIndex, wanted: Mapping[str, Box], transport: Transport, timeout: float) -> None:
        """Plan once. `wanted` is what this rank's engine loads; raises ValueError if the trainer does not send it."""
        self._assembly = await asyncio.to_thread(Assembly, index, wanted)
        self._receiver = transport.receiver()
        self._timeout = timeout

    @concurrent_endpoint
    async def pull(self, version: int, publications: list[Publication]) -> Pulled:
        """Fetch, check and join the weights of `version`, for `staged` to hand over. One at a time.

        Raises:
            RuntimeError: a bucket's bytes are not those that its rank summed.
            TimeoutError: it took too long; names phase and bucket.
        """
        begin = time.perf_counter()
        clock = _Clock(self._timeout, version)
        by_rank = {publication.rank: publication for publication in publications}
        buckets = {}
        for rank in self._assembly.ranks:
            sent = by_rank[rank]
            async with clock.phase("get", f"bucket of rank {rank}, {sent.nbytes} bytes"):
                buckets[rank] = await self._receiver.get(rank, version, sent.nbytes)
            async with clock.phase("verify", f"bucket of rank {rank}"):
                total = await sum_of(buckets[rank])
            if total != sent.sum:
                raise RuntimeError(
                    f"sync of version {version}: the bucket of rank {rank} arrived with sum {total:016x}, not "
                    f"{sent.sum:016x}: its slot was lapped or the bytes were damaged"
                )
        async with clock.phase("stage", f"{len(buckets)} buckets"):
            tensors = await asyncio.to_thread(self._assembly, buckets)
        _staged.clear()
        _staged[version] = tensors
        nbytes = sum(by_rank[rank].nbytes for rank in buckets)
        return Pulled(nbytes=nbytes, seconds=time.perf_counter() - begin)


@dataclass(frozen=True, kw_only=True)
class Replica:
    """One generator replica as the sync sees it: two actor meshes over the same processes, a pair per tp rank."""

    receivers: Any
    """`WeightReceiver` mesh."""
    generators: Any
    """Mesh with endpoints `wanted() -> dict[str, Box] | None` and, on rank 0, `swap(version) -> float` (seconds of
    stall), which takes the tensors from `staged` on every rank."""


class WeightSync:
    """The controller's side: pushes versions in the background, keeps the lease, and lets every error out.

    Its tasks live in the caller's TaskGroup, so an error ends the run even when nobody awaits the push.
    """

    def __init__(
        self,
        config: SyncConfig,
        transport: Transport,
        publishers: Any,
        replicas: list[Replica],
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._config, self._transport, self._tasks = config, transport, tasks
        self._publishers = _ranks(publishers)
        self._replicas = [(_ranks(r.receivers), _ranks(r.generators)) for r in replicas]
        self._pushes: dict[int, asyncio.Task[dict[str, float]]] = {}
        self._lease_wait: dict[int, float] = {}
        self.spans = Spans("sync")
        self._stack = AsyncExitStack()

    async def setup(self) -> WeightIndex:
        """Start the transport and give every receiver its plan; the trainer and the engines must be set up.

        Raises:
            ValueError: the ranks' parts do not tile the tensors, or an engine wants what they do not send.
        """
        await self._stack.enter_async_context(self._transport.running(len(self._publishers)))
        answers = await _all(self._call(p.index, f"index of trainer rank {i}") for i, p in enumerate(self._publishers))
        index = WeightIndex(
            tuple(part for parts, _ in answers for part in parts), {i: n for i, (_, n) in enumerate(answers)}
        )
        await _all(
            self._plan(index, receiver, generator, f"replica {number} rank {rank}")
            for number, (receivers, generators) in enumerate(self._replicas)
            for rank, (receiver, generator) in enumerate(zip(receivers, generators, strict=True))
        )
        return index

    async def _plan(self, index: WeightIndex, receiver: Any, generator: Any, where: str) -> None:
        wanted = await self._call(generator.wanted, f"wanted of {where}")
        await self._call(
            receiver.setup, f"setup of {where}", index, wanted or {}, self._transport, self._config.timeout
        )

    async def lease(self, version: int) -> float:
        """Wait until `version` may be staged: all have swapped, or failed on, version - 2. Returns seconds waited."""
        begin = time.perf_counter()
        if (push := self._pushes.get(version - 2)) is not None:
            await asyncio.wait({push})
            push.result()
        self._lease_wait[version] = time.perf_counter() - begin
        return self._lease_wait[version]

    def publish(self, version: int, replicas: int | None = None) -> asyncio.Task[dict[str, float]]:
        """Push the version that every rank has staged to the first `replicas` (None: to all). The task ends with
        `sync/*` when these hold it.

        Raises:
            RuntimeError: versions do not follow each other, or the lease of this one was not awaited.
        """
        if self._pushes and version != max(self._pushes) + 1:
            raise RuntimeError(f"version {version} was published after {max(self._pushes)}: they must follow")
        if version not in self._lease_wait:
            raise RuntimeError(f"version {version} was published without its lease: await lease({version}) first")
        self._pushes = {v: push for v, push in self._pushes.items() if v >= version - 1}
        self._pushes[version] = self._tasks.create_task(
            self._push(version, self._replicas[:replicas]), name=f"sync of version {version}"
        )
        return self._pushes[version]

    async def _push(self, version: int, replicas: list[tuple[list[Any], list[Any]]]) -> dict[str, float]:
        begin, started = time.perf_counter(), time.time()
        publications = await _all(
            self._call(p.publish, f"publish of version {version} by trainer rank {i}", version)
            for i, p in enumerate(self._publishers)
        )
        pushed = time.perf_counter()
        self.spans.add("push", started, time.time(), version)
        if (before := self._pushes.get(version - 1)) is not None:
            await asyncio.wait({before})  # one swap at a time, in order
            before.result()
        started = time.time()
        taken = await _all(self._into(i, version, publications, *replica) for i, replica in enumerate(replicas))
        self.spans.add("pull", started, time.time(), version)
        done = time.perf_counter()
        await _all(
            self._call(p.free, f"free of version {version} by trainer rank {i}", version)
            for i, p in enumerate(self._publishers)
        )
        waited = self._lease_wait.pop(version)
        return {
            "sync/seconds": done - begin,
            "sync/push": pushed - begin,
            "sync/pull": max(pull for pull, _ in taken),
            "sync/bytes": float(sum(p.nbytes for p in publications)),
            "sync/stall": max(stall for _, stall in taken),
            "sync/lease_wait": waited,
            "sync/trainer_blocked": waited + max(p.stage_seconds for p in publications),
        }

    async def _into(
        self, number: int, version: int, publications: list[Publication], receivers: list[Any], generators: list[Any]
    ) -> tuple[float, float]:
        """Pull on all ranks of a replica, then swap: seconds of the slowest pull and of the stall."""
        pulled = await _all(
            self._call(r.pull, f"get of version {version} by replica {number} rank {i}", version, publications)
            for i, r in enumerate(receivers)
        )
        stall = await self._call(generators[0].swap, f"swap to version {version} of replica {number}", version)
        return max(p.seconds for p in pulled), stall

    async def _call(self, endpoint: Any, what: str, *args: Any) -> Any:
        limit = self._config.timeout + GRACE
        try:
            async with asyncio.timeout(limit) as timer:
                return await endpoint.call_one(*args)
        except TimeoutError as error:
            if not timer.expired():
                raise
            raise TimeoutError(f"no answer to {what} within {limit:g} s: is its process stuck?") from error

    async def close(self) -> None:
        """Stop what the transport runs; await the last push before."""
        await self._stack.aclose()


async def _all(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All results in order; the first error cancels the rest and is raised as it is, several at once as a group."""
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(item) for item in work]
    except BaseExceptionGroup as group:
        if len(group.exceptions) == 1:
            raise group.exceptions[0] from None
        raise
    return [task.result() for task in running]


def _ranks(mesh: Any) -> list[Any]:
    """The actors of a mesh, one by one, in rank order: an answer or a death is then that of a known rank."""
    flat = mesh.flatten("rank")
    return [flat.slice(rank=i) for i in range(flat.sizes["rank"])]
