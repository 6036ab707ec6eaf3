"""Weights from two FSDP ranks into a reader's process, version after version, and every way in which that can fail."""

from __future__ import annotations

import asyncio
import importlib
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace

os.environ.setdefault("HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY", "1s")
os.environ.setdefault("HYPERACTOR_MESH_GET_ACTOR_STATE_MAX_IDLE", "3s")
os.environ.setdefault("HYPERACTOR_MESH_GET_PROC_STATE_MAX_IDLE", "3s")

import numpy as np
import pytest
import torch
from monarch.actor import Actor, concurrent_endpoint, current_rank, endpoint
from monarch.spmd import setup_torch_elastic_env_async

from actors import shm, sync
from actors.config import SyncConfig
from actors.mesh import Meshes
from actors.placement import Spot
from actors.sync import Publication, Replica, Slots, WeightPublisher, WeightReceiver, WeightSync, sum_of
from actors.transports.shm import ShmReceiver, ShmTransport, slot_path
from actors.weights import Box, Shard, box_of, first_replica

# Slots, sums and the lease, without processes.


def whole(name, tensor):
    return Shard(name, tuple(tensor.shape), Box((0,) * tensor.dim(), tuple(tensor.shape)), tensor)


@pytest.fixture
def folder(tmp_path):
    run = shm.RunFolder.create(1 << 20, (str(tmp_path),))
    yield run.path
    run.close()


def read(folder, rank, version, nbytes):
    return bytes(shm.map_existing(slot_path(folder, rank, version), nbytes))


def test_stage_fills_the_slot_of_its_version_only(folder):
    live = torch.nn.Parameter(torch.arange(5.0))
    slots = Slots.create(folder, 3, [whole("w", live), whole("none", torch.zeros(0, 2))], "float32")
    assert slots.nbytes == 64
    first = read(folder, 3, 0, 64)
    assert first == bytes(64)
    assert slots.stage(1) > 0
    with torch.no_grad():
        live.mul_(2)
    slots.stage(2)
    assert read(folder, 3, 1, 20) == np.arange(5, dtype=np.float32).tobytes()
    assert read(folder, 3, 2, 20) == (2 * np.arange(5, dtype=np.float32)).tobytes()


def test_stage_casts_to_the_send_type(folder):
    live = torch.tensor([1.0, 1 / 3, -7.7])
    Slots.create(folder, 0, [whole("w", live)], "bfloat16").stage(0)
    sent = torch.frombuffer(bytearray(read(folder, 0, 0, 6)), dtype=torch.bfloat16)
    assert torch.equal(sent, live.to(torch.bfloat16))


def test_weights_of_a_version_are_lent_and_restored_bitwise(folder):
    live = torch.randn(6, 3)
    slots = Slots.create(folder, 0, [whole("a", live[:4]), whole("b", live[4:])], "float32")
    slots.stage(4)
    at_4 = live.clone()
    live.mul_(1.1)
    live[0, 0] = float("nan")
    now, address = live.clone(), live.data_ptr()

    def body():
        with slots.weights_of(4):
            assert torch.equal(live, at_4)
            raise KeyError("in the body")

    with pytest.raises(KeyError):
        body()
    assert live.numpy().tobytes() == now.numpy().tobytes()
    assert live.data_ptr() == address
    with pytest.raises(RuntimeError, match=r"rank 0: the slot of version 2 holds 4"), slots.weights_of(2):
        pass


def test_a_publisher_notices_a_lap_between_sum_and_put(folder):
    slots = Slots.create(folder, 0, [whole("a", torch.randn(4))], "float32")
    slots.stage(1)
    slots.bucket(1)
    halfway = []

    def copy(_):
        with pytest.raises(RuntimeError, match="slot of version 1 holds None") as caught:
            slots.bucket(1)
        halfway.append(caught)

    slots._views[1] = [SimpleNamespace(copy_=copy)]
    slots.stage(3)
    assert len(halfway) == 1
    with pytest.raises(RuntimeError, match="slot of version 1 holds 3: it was lapped"):
        slots.bucket(1)


def test_staged_hands_over_once(monkeypatch):
    monkeypatch.setattr(sync, "_staged", {5: {"w": torch.ones(1)}})
    with pytest.raises(RuntimeError, match=r"version 4 are not staged here, \[5\] are"):
        sync.staged(4)
    assert sync.staged(5)["w"].item() == 1
    with pytest.raises(RuntimeError, match="version 5 are not staged"):
        sync.staged(5)


@pytest.mark.parametrize("block", [64, 100, 1 << 20])
def test_a_sum_knows_every_bit_and_every_place(monkeypatch, block):
    monkeypatch.setattr(sync, "SUM_BLOCK", block)
    data = torch.from_numpy(np.random.default_rng(0).integers(0, 256, 1000, dtype=np.uint8))

    def total(bucket):
        return asyncio.run(sum_of(bucket))

    right = total(data)
    assert total(data.clone()) == right
    for place in (0, 63, 64, 500, 999):
        flipped = data.clone()
        flipped[place] ^= 1
        assert total(flipped) != right
    exchanged = data.clone()
    exchanged[0:64], exchanged[64:128] = data[64:128], data[0:64]
    assert total(exchanged) != right


def fake(**endpoints):
    """A mesh of one actor whose endpoints are these coroutine functions."""
    actor = SimpleNamespace(**{name: SimpleNamespace(call_one=f) for name, f in endpoints.items()})
    mesh = SimpleNamespace(sizes={"rank": 1}, slice=lambda rank: actor)
    return SimpleNamespace(flatten=lambda name: mesh)


class Scene:
    """A trainer rank and a replica whose pulls end when the test says so; keeps the order of events."""

    def __init__(self, monkeypatch):
        monkeypatch.setattr(sync, "GRACE", 0.1)
        self.events = []
        self.gates = {v: asyncio.Event() for v in range(10)}

    async def _index(self):
        return [], 64

    async def _publish(self, v):
        self.events.append(f"publish {v}")
        return Publication(rank=0, version=v, sum=0, nbytes=64, seconds=0.5, stage_seconds=0.25)

    async def _free(self, v):
        self.events.append(f"free {v}")

    async def _wanted(self):
        return None

    async def _setup(self, *_):
        return None

    async def _pull(self, v, publications):
        assert [p.version for p in publications] == [v]
        self.events.append(f"pull {v}")
        await self.gates[v].wait()
        return sync.Pulled(nbytes=64, seconds=0.75)

    async def _swap(self, v):
        self.events.append(f"swap {v}")
        return 0.125

    def sync(self, tasks, timeout=5.0):
        replica = Replica(
            receivers=fake(setup=self._setup, pull=self._pull), generators=fake(wanted=self._wanted, swap=self._swap)
        )
        publishers = fake(index=self._index, publish=self._publish, free=self._free)
        return WeightSync(SyncConfig(timeout=timeout), ShmTransport("none"), publishers, [replica], tasks)


async def idle():
    """Let everything that can run do so."""
    for _ in range(50):
        await asyncio.sleep(0)


def test_the_lease_of_a_version_is_the_swap_of_the_one_before_last(monkeypatch):
    async def main():
        scene = Scene(monkeypatch)
        async with asyncio.TaskGroup() as tasks:
            syncing = scene.sync(tasks)
            await syncing.setup()
            await syncing.lease(1)
            one = syncing.publish(1)
            await syncing.lease(2)  # version 0 was never pushed: nothing to wait for
            two = syncing.publish(2)
            three = tasks.create_task(syncing.lease(3))
            await idle()
            # 2 is published while 1 is pulled, but pulled only after 1 is in: swaps keep their order.
            assert scene.events == ["publish 1", "publish 2", "pull 1"]
            assert not three.done()
            scene.gates[2].set()
            await idle()
            assert not three.done()
            scene.gates[1].set()
            await idle()
            assert three.done()
            assert scene.events[3:] == ["swap 1", "free 1", "pull 2", "swap 2", "free 2"]
            assert set(one.result()) == {
                "sync/seconds",
                "sync/push",
                "sync/pull",
                "sync/bytes",
                "sync/stall",
                "sync/lease_wait",
                "sync/trainer_blocked",
            }
            metrics = one.result()
            assert (metrics["sync/bytes"], metrics["sync/stall"], metrics["sync/pull"]) == (64, 0.125, 0.75)
            assert metrics["sync/trainer_blocked"] == metrics["sync/lease_wait"] + 0.25
            await two
            await syncing.close()

    asyncio.run(main())


def test_publishing_out_of_turn_is_refused(monkeypatch):
    async def main():
        scene = Scene(monkeypatch)
        async with asyncio.TaskGroup() as tasks:
            syncing = scene.sync(tasks)
            with pytest.raises(RuntimeError, match=r"without its lease: await lease\(1\)"):
                syncing.publish(1)
            scene.gates[1].set()
            await syncing.lease(1)
            await syncing.publish(1)
            await syncing.lease(3)
            with pytest.raises(RuntimeError, match="version 3 was published after 1"):
                syncing.publish(3)

    asyncio.run(main())


def test_a_failed_push_ends_the_run_and_its_lease(monkeypatch):
    async def main():
        scene = Scene(monkeypatch)

        async def broken(v):
            raise RuntimeError(f"no swap to {v}")

        scene._swap = broken
        async with asyncio.TaskGroup() as tasks:
            syncing = scene.sync(tasks)
            await syncing.lease(1)
            syncing.publish(1)
            scene.gates[1].set()
            await asyncio.Event().wait()  # the controller waits for something else

    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(main())
    assert [str(e) for e in caught.value.exceptions] == ["no swap to 1"]


def test_a_hanging_swap_is_named(monkeypatch):
    async def main():
        scene = Scene(monkeypatch)

        async def stuck(v):
            await asyncio.Event().wait()

        scene._swap = stuck
        scene.gates[1].set()
        async with asyncio.TaskGroup() as tasks:
            syncing = scene.sync(tasks, timeout=0.1)
            await syncing.lease(1)
            syncing.publish(1)

    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(main())
    assert "no answer to swap to version 1 of replica 0 within 0.2 s" in str(caught.value.exceptions[0])


# torchstore's edges.


def test_a_missing_torchstore_is_named_with_its_install_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchstore", None)
    monkeypatch.delitem(sys.modules, "actors.transports.torchstore", raising=False)
    with pytest.raises(ImportError, match=r"needs torchstore: pip install --no-deps torchstore==0\.1\.2"):
        importlib.import_module("actors.transports.torchstore")


def test_another_torchstore_is_refused():
    from actors.transports.torchstore import check_version

    check_version("0.1.2")
    with pytest.raises(ImportError, match=r"torchstore 0\.2\.0 is installed"):
        check_version("0.2.0")


def test_buckets_travel_in_chunks_that_carry_only_their_bytes(monkeypatch):
    from actors.transports import torchstore as module

    stored = {}

    async def put(key, value, store_name):
        assert key not in stored
        stored[key] = pickle.dumps(value)

    async def get(key, store_name):
        return pickle.loads(stored[key])

    async def delete(key, store_name):
        del stored[key]

    monkeypatch.setattr(module, "CHUNK", 100_000)
    monkeypatch.setattr(module, "torchstore", SimpleNamespace(put=put, get=get, delete=delete))
    bucket = torch.from_numpy(np.random.default_rng(0).integers(0, 256, 250_000, dtype=np.uint8))

    async def main():
        transport = module.TorchstoreTransport("store")
        sender, receiver = transport.sender(1), transport.receiver()
        await sender.put(1, bucket)
        await sender.put(2, 255 - bucket)
        assert len(stored) == 6
        assert max(len(data) for data in stored.values()) < 110_000
        first = (await receiver.get(1, 1, 250_000)).clone()
        second = await receiver.get(1, 2, 250_000)
        assert torch.equal(first, bucket)
        assert torch.equal(second, 255 - bucket)
        await sender.free(1)
        assert len(stored) == 3
        await sender.free(2)
        assert not stored

    asyncio.run(main())


def test_the_sync_module_is_torch_free():
    code = "import sys, actors.sync, actors.transports.shm; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# Real processes: two FSDP ranks, one reader.


class FakeTrainer(Actor):
    """A rank of a small uneven FSDP2 model whose weights change with every version."""

    @endpoint
    def setup(self, folder: str) -> None:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        if not dist.is_initialized():
            dist.init_process_group("gloo")
            torch.manual_seed(0)
            self.model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 1), torch.nn.Linear(64, 33))
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            for layer in self.model:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        shards = []
        for name, tensor in self.model.state_dict().items():
            if first_replica(tensor):
                shards.append(Shard(name, tuple(tensor.shape), *box_of(tensor)))
        self.slots = Slots.create(folder, current_rank().rank, shards, "float32")

    @endpoint
    def step(self, version: int) -> dict[str, np.ndarray]:
        """Change and stage the weights; returns them gathered by torch."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(1.5).add_(version)
        self.slots.stage(version)
        return {name: t.full_tensor().numpy().copy() for name, t in self.model.state_dict().items()}

    @endpoint
    def pid(self) -> int:
        return os.getpid()


WANTED = {
    "0.weight": Box((0, 0), (7, 5)),
    "0.bias": Box((3,), (4,)),
    "1.weight": Box((0, 0), (1, 7)),
    "1.bias": Box((0,), (1,)),
    "2.weight": Box((0, 16), (33, 16)),
}


class FakeGenerator(Actor):
    """Takes what is staged into a dict."""

    @concurrent_endpoint
    async def wanted(self) -> dict[str, Box]:
        return WANTED

    @concurrent_endpoint
    async def swap(self, version: int) -> float:
        self.held = {name: t.clone() for name, t in sync.staged(version).items()}
        return 0.001

    @concurrent_endpoint
    async def weights(self) -> dict[str, np.ndarray]:
        return {name: t.numpy() for name, t in self.held.items()}


@dataclass(frozen=True)
class StuckTransport:
    """Shared memory whose `where` never returns."""

    folder: str
    where: str

    @asynccontextmanager
    async def running(self, ranks: int) -> AsyncIterator[None]:
        yield

    def sender(self, rank: int) -> StuckTransport:
        return self

    def receiver(self) -> StuckTransport:
        return self

    async def put(self, version, bucket):
        if self.where == "put":
            await asyncio.Event().wait()

    async def get(self, rank, version, nbytes):
        await asyncio.Event().wait()


class World:
    """The processes, and a fresh set of sync actors in them for each test."""

    async def start(self):
        self.count = 0
        self.meshes = await Meshes().__aenter__()
        self.trainers = self.meshes.spawn(Spot(name="trainers", hosts=(0,), ranks_per_host=2, threads=1))
        self.generators = self.meshes.spawn(Spot(name="generators", hosts=(0,), ranks_per_host=1, threads=1))
        await setup_torch_elastic_env_async(self.trainers)
        self.trainer = self.trainers.spawn("trainer", FakeTrainer)
        self.generator = self.generators.spawn("generator", FakeGenerator)

    async def actors(self, folder, transport, timeout=20.0):
        self.count += 1
        await self.trainer.setup.call(folder)
        publishers = self.trainers.spawn(f"publisher{self.count}", WeightPublisher, folder, transport, timeout)
        receivers = self.generators.spawn(f"receiver{self.count}", WeightReceiver)
        return publishers, receivers

    async def sync(self, folder, transport, tasks, timeout=20.0):
        publishers, receivers = await self.actors(folder, transport, timeout)
        replica = Replica(receivers=receivers, generators=self.generator)
        syncing = WeightSync(SyncConfig(timeout=timeout), transport, publishers, [replica], tasks)
        await syncing.setup()
        return syncing

    async def step(self, version):
        answers = list((await self.trainer.step.call(version)).values())
        return answers[0]


@pytest.fixture(scope="module")
def loop():
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def world(loop):
    made = World()
    loop.run(made.start())
    yield made
    loop.run(made.meshes.__aexit__())


def transport_of(name, folder):
    if name == "shm":
        return ShmTransport(folder)
    from actors.transports.torchstore import TorchstoreTransport

    return TorchstoreTransport("test_sync_store")


@pytest.mark.parametrize("name", ["shm", "torchstore"])
def test_every_version_arrives_bitwise(loop, world, folder, name):
    async def main():
        transport = transport_of(name, folder)
        seen = []
        async with asyncio.TaskGroup() as tasks:
            syncing = await world.sync(folder, transport, tasks)
            for version in range(1, 5):
                await syncing.lease(version)
                full = await world.step(version)
                metrics = await syncing.publish(version)
                assert metrics["sync/bytes"] >= sum(t.nbytes for t in full.values())
                got = await world.generator.weights.call_one()
                assert set(got) == set(WANTED)
                for key, (offset, size) in WANTED.items():
                    cut = full[key][tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))]
                    assert got[key].tobytes() == np.ascontiguousarray(cut).tobytes(), (version, key)
                seen.append(full["2.weight"])
            if name == "torchstore":
                import torchstore

                store = await torchstore.client("test_sync_store")
                assert await store.keys() == []
            await syncing.close()
        assert not any((a == b).any() for a, b in pairwise(seen))

    loop.run(main())


async def published(world, folder, version):
    """Receivers that are set up, and what the ranks published."""
    publishers, receivers = await world.actors(folder, ShmTransport(folder))
    answers = list((await publishers.index.call()).values())
    index = sync.WeightIndex(
        tuple(p for parts, _ in answers for p in parts), {i: n for i, (_, n) in enumerate(answers)}
    )
    await receivers.setup.call(index, WANTED, ShmTransport(folder), 20.0)
    await world.step(version)
    return publishers, receivers, list((await publishers.publish.call(version)).values())


def test_a_lapped_slot_is_detected(loop, world, folder):
    async def main():
        publishers, receivers, publications = await published(world, folder, 1)
        await receivers.pull.call(1, publications)
        await world.step(2)
        await receivers.pull.call(1, publications)  # still there
        await world.step(3)
        with pytest.raises(Exception, match=r"sync of version 1: the bucket of rank 0 .* lapped"):
            await receivers.pull.call(1, publications)
        with pytest.raises(Exception, match=r"rank \d: the slot of version 1 holds 3"):
            await publishers.publish.call(1)

    loop.run(main())


def test_a_flipped_bit_is_detected(loop, world, folder):
    async def main():
        _, receivers, publications = await published(world, folder, 1)
        path = slot_path(folder, 1, 1)
        with open(path, "r+b") as file:
            file.seek(77)
            byte = file.read(1)[0]
            file.seek(77)
            file.write(bytes([byte ^ 4]))
        with pytest.raises(Exception, match="sync of version 1: the bucket of rank 1 arrived with sum"):
            await receivers.pull.call(1, publications)
        with open(path, "r+b") as file:
            file.seek(77)
            file.write(bytes([byte]))
        await receivers.pull.call(1, publications)

    loop.run(main())


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("put", r"sync of version 1: no end of put \(bucket of rank [01]\) within 1 s"),
        ("get", r"sync of version 1: no end of get \(bucket of rank 0, \d+ bytes\) within 1 s"),
    ],
)
def test_a_stuck_transport_is_named(loop, world, folder, where, message):
    async def main():
        async with asyncio.TaskGroup() as tasks:
            syncing = await world.sync(folder, StuckTransport(folder, where), tasks, timeout=1.0)
            await syncing.lease(1)
            await world.step(1)
            await syncing.publish(1)

    with pytest.raises(ExceptionGroup) as caught:
        loop.run(main())
    assert caught.group_contains(Exception, match=message)


def test_a_reader_maps_a_slot_once(folder):
    Slots.create(folder, 0, [whole("w", torch.ones(4))], "float32").stage(0)
    receiver = ShmReceiver(folder)
    first = asyncio.run(receiver.get(0, 0, 64))
    assert asyncio.run(receiver.get(0, 2, 64)).data_ptr() == first.data_ptr()
    assert first.view(torch.float32)[:4].tolist() == [1] * 4


def test_a_killed_trainer_rank_ends_the_push_in_time(loop, world, folder):
    """Last: the trainer's mesh is gone afterwards."""

    async def main():
        async with asyncio.TaskGroup() as tasks:
            syncing = await world.sync(folder, StuckTransport(folder, "put"), tasks, timeout=60.0)
            await syncing.lease(1)
            await world.step(1)
            pids = list((await world.trainer.pid.call()).values())
            syncing.publish(1)
            os.kill(pids[1], signal.SIGKILL)
            killed.append(time.monotonic())
            await asyncio.Event().wait()

    killed = []
    with pytest.raises(ExceptionGroup) as caught:
        loop.run(main())
    assert time.monotonic() - killed[0] < 20
    assert caught.group_contains(Exception, match=r"(?i)killed|sig=9")
