"""How long a version takes from the trainer to the engine, beside what the memory of this machine allows.

Every floor is measured in the same process, between the
repeats of what it bounds: on a shared machine only ratios mean something.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from monarch.actor import Actor, concurrent_endpoint, endpoint

from actors import shm, sync
from actors.config import SyncConfig
from actors.mesh import Meshes
from actors.placement import Spot
from actors.sync import Replica, Slots, WeightPublisher, WeightReceiver, WeightSync
from actors.transports.base import Transport
from actors.transports.shm import ShmTransport
from actors.transports.torchstore import CHUNK, TorchstoreTransport
from actors.weights import Box, Shard
from recipes.bench import Result, paired

TENSORS, ROWS, COLUMNS = 100, 1250, 1000
"""100 float32 tensors of 5 MB."""
REPEATS = 9


class BenchTrainer(Actor):
    """Holds the tensors; its step is a loop of matrix products."""

    @endpoint
    def setup(self, folder: str) -> None:
        torch.set_num_threads(1)
        self.tensors = [torch.randn(ROWS, COLUMNS) for _ in range(TENSORS)]
        box = Box((0, 0), (ROWS, COLUMNS))
        shards = [Shard(f"t{i}", (ROWS, COLUMNS), box, tensor) for i, tensor in enumerate(self.tensors)]
        self.slots = Slots.create(folder, 0, shards, "float32")
        self.copy = [torch.ones(ROWS, COLUMNS) for _ in range(TENSORS)]
        self.left = torch.randn(512, 512)

    @endpoint
    def stage(self, version: int) -> float:
        return self.slots.stage(version)

    @endpoint
    def memcpy(self) -> tuple[float, float]:
        """One copy of all tensors into warm memory, tensor by tensor: seconds by the clock and of CPU."""
        begin, cpu = time.perf_counter(), time.thread_time()
        for target, source in zip(self.copy, self.tensors, strict=True):
            target.copy_(source)
        return time.perf_counter() - begin, time.thread_time() - cpu

    @endpoint
    def step(self, products: int, version: int | None = None) -> float:
        """A training step, staged if it has a version; CPU seconds of the trainer's thread."""
        begin = time.thread_time()
        for _ in range(products):
            self.left @ self.left
        if version is not None:
            self.slots.stage(version)
        return time.thread_time() - begin


class BenchGenerator(Actor):
    """Copies what is staged into tensors of its own, as an engine does."""

    @concurrent_endpoint
    async def setup(self) -> None:
        torch.set_num_threads(1)
        self.tensors = {f"t{i}": torch.ones(ROWS, COLUMNS) for i in range(TENSORS)}

    @concurrent_endpoint
    async def wanted(self) -> dict[str, Box]:
        return {name: Box((0, 0), (ROWS, COLUMNS)) for name in self.tensors}

    @concurrent_endpoint
    async def swap(self, version: int) -> float:
        begin = time.perf_counter()
        await asyncio.to_thread(self._load, sync.staged(version))
        return time.perf_counter() - begin

    def _load(self, tensors: dict[str, torch.Tensor]) -> None:
        for name, target in self.tensors.items():
            target.copy_(tensors[name])


class RawStore(Actor):
    """torchstore without this library around it: the same bytes under keys of the same size."""

    def __init__(self, name: str) -> None:
        self._name = name

    @concurrent_endpoint
    async def put(self, folder: str, version: int) -> None:
        import torchstore

        array = sync._slots[folder].bucket(version)[0].numpy()
        for number, start in enumerate(range(0, len(array), CHUNK)):
            piece = torch.from_numpy(array[start : start + CHUNK])
            await torchstore.put(f"raw{version}-{number}", piece, store_name=self._name)

    @concurrent_endpoint
    async def get(self, nbytes: int, version: int) -> None:
        import torchstore

        for number in range(-(-nbytes // CHUNK)):
            await torchstore.get(f"raw{version}-{number}", store_name=self._name)

    @concurrent_endpoint
    async def delete(self, nbytes: int, version: int) -> None:
        import torchstore

        for number in range(-(-nbytes // CHUNK)):
            await torchstore.delete(f"raw{version}-{number}", store_name=self._name)


class Bench:
    """One trainer rank, one generator rank, and the sync between them."""

    def __init__(self, meshes: Meshes, folder: str) -> None:
        self.folder = folder
        self.trainers = meshes.spawn(Spot(name="bench-trainer", hosts=(0,), ranks_per_host=1, threads=1))
        self.generators = meshes.spawn(Spot(name="bench-generator", hosts=(0,), ranks_per_host=1, threads=1))
        self.trainer = self.trainers.spawn("trainer", BenchTrainer)
        self.generator = self.generators.spawn("generator", BenchGenerator)
        self.version = 0

    async def setup(self) -> None:
        await self.trainer.setup.call_one(self.folder)
        await self.generator.setup.call_one()

    async def sync(self, transport: Transport, tasks: asyncio.TaskGroup, name: str) -> WeightSync:
        publishers = self.trainers.spawn(f"publisher-{name}", WeightPublisher, self.folder, transport, 60.0)
        receivers = self.generators.spawn(f"receiver-{name}", WeightReceiver)
        replica = Replica(receivers=receivers, generators=self.generator)
        syncing = WeightSync(SyncConfig(timeout=60.0), transport, publishers, [replica], tasks)
        await syncing.setup()
        return syncing

    async def push(self, syncing: WeightSync) -> tuple[float, float, dict[str, float]]:
        """Seconds from the start of staging until the engine holds the version, seconds of staging, metrics."""
        self.version += 1
        await syncing.lease(self.version)
        begin = time.perf_counter()
        staged = await self.trainer.stage.call_one(self.version)
        metrics = await syncing.publish(self.version)
        return time.perf_counter() - begin, staged, metrics


def write_and_read() -> Callable[[], float]:
    """Seconds of a single-threaded memcpy of every tensor into warm shared memory and out into warm memory.

    Tensor by tensor, as any engine has to take them: 5 MB at a time goes at half the speed of one copy of 500 MB,
    which the C library does past the caches.
    """
    size = ROWS * COLUMNS * 4
    folder = shm.RunFolder.create(TENSORS * size)
    shared = shm.map_new(f"{folder.path}/floor", TENSORS * size).reshape(TENSORS, size)
    folder.close()
    sources, targets = ([np.ones(size, np.uint8) for _ in range(TENSORS)] for _ in range(2))

    def measure() -> float:
        begin = time.perf_counter()
        for slot, source in zip(shared, sources, strict=True):
            np.copyto(slot, source)
        for target, slot in zip(targets, shared, strict=True):
            np.copyto(target, slot)
        return time.perf_counter() - begin

    measure()
    return measure


async def shm_rows(bench: Bench, syncing: WeightSync) -> list[Result]:
    floor = write_and_read()
    for _ in range(3):  # first touch of both slots and maps
        await bench.push(syncing)
    totals, blocked, floors, copies, parts = [], [], [], [], []
    for _ in range(REPEATS):
        floors.append(floor())
        copies.append((await bench.trainer.memcpy.call_one())[0])
        total, staged, metrics = await bench.push(syncing)
        totals.append(total)
        blocked.append(staged)
        parts.append(metrics)
    keys = ("sync/push", "sync/pull", "sync/stall")
    note = "500 MB in 100 tensors: " + ", ".join(f"{k} {statistics.median(p[k] for p in parts):.3f} s" for k in keys)
    return [
        paired("sync/shm/total", totals, floors, 2.0, note=note),
        paired("sync/shm/trainer_blocked", blocked, copies, 1.2),
    ]


async def step_rows(bench: Bench, syncing: WeightSync) -> list[Result]:
    """A step of about a second with a push after each, against the step alone plus one copy.

    By the clock, which needs two free cores, and by the CPU time of the trainer's thread, which shows on a busy
    machine too what the push costs it (caches, memory, the interpreter's lock).
    """
    products = round(100 / await bench.trainer.step.call_one(100))

    async def timed(*args: int) -> tuple[float, float]:
        begin = time.perf_counter()
        cpu = await bench.trainer.step.call_one(products, *args)
        return time.perf_counter() - begin, cpu

    async def with_push() -> tuple[float, float]:
        bench.version += 1
        begin = time.perf_counter()
        await syncing.lease(bench.version)
        leased = time.perf_counter() - begin
        wall, cpu = await timed(bench.version)
        syncing.publish(bench.version)
        return leased + wall, cpu

    alone, pushed = [], []
    for _ in range(REPEATS // 2 + 1):
        wall, cpu = await timed()
        copy_wall, copy_cpu = await bench.trainer.memcpy.call_one()
        alone.append((wall + copy_wall, cpu + copy_cpu))
        await with_push()
        pushed.append(await with_push())  # while the version before is on its way
        for version in (bench.version + 1, bench.version + 2):
            await syncing.lease(version)
    names = ("sync/shm/step", "sync/shm/step_cpu")
    return [paired(name, [p[i] for p in pushed], [a[i] for a in alone], 1.1) for i, name in enumerate(names)]


async def torchstore_row(bench: Bench, syncing: WeightSync, store: str) -> Result:
    writer = bench.trainers.spawn("raw-writer", RawStore, store)
    reader = bench.generators.spawn("raw-reader", RawStore, store)
    nbytes = TENSORS * ROWS * COLUMNS * 4
    totals, floors = [], []
    for repeat in range(6):
        total, _, _ = await bench.push(syncing)
        begin = time.perf_counter()
        await writer.put.call_one(bench.folder, bench.version)
        await reader.get.call_one(nbytes, bench.version)
        raw = time.perf_counter() - begin
        await writer.delete.call_one(nbytes, bench.version)
        if repeat:  # the first touches new pages everywhere
            totals.append(total)
            floors.append(raw)
    return paired("sync/torchstore/total", totals, floors, 1.15)


async def measure() -> list[Result]:
    """All rows, on processes of their own."""
    folder = shm.RunFolder.create(3 * TENSORS * ROWS * COLUMNS * 4)
    store = "bench_store"
    try:
        async with Meshes() as meshes, asyncio.TaskGroup() as tasks:
            bench = Bench(meshes, folder.path)
            await bench.setup()
            shared = await bench.sync(ShmTransport(folder.path), tasks, "shm")
            found = await shm_rows(bench, shared)
            found += await step_rows(bench, shared)
            await shared.close()
            stored = await bench.sync(TorchstoreTransport(store), tasks, "torchstore")
            found.append(await torchstore_row(bench, stored, store))
            await stored.close()
    finally:
        folder.close()
    return found


def results() -> list[Result]:
    """The rows of `python -m recipes.bench sync`."""
    return asyncio.run(measure())
