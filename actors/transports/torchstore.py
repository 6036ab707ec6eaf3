"""Weights through torchstore 0.1.2: RDMA where there is a NIC, else messages; works across hosts.

Slow without RDMA (about 0.3 GB/s): on one host use shared memory.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch
from monarch.actor import current_rank, endpoint, get_or_spawn_controller, this_host

VERSION = "0.1.2"
INSTALL = f"pip install --no-deps torchstore=={VERSION}"
try:
    import torchstore
    from torchstore.controller import Controller
    from torchstore.strategy import TorchStoreStrategy
except ImportError as error:
    raise ImportError(f"--sync.transport torchstore needs torchstore: {INSTALL}") from error

CHUNK = 64 << 20
"""Bytes of one key. Measured: below 16 MiB the cost per key dominates, above 256 MiB messages slow down tenfold."""


@dataclass(frozen=True)
class TorchstoreTransport:
    """A store of its own under `name`, one storage process per sending rank."""

    name: str

    @asynccontextmanager
    async def running(self, ranks: int) -> AsyncIterator[None]:
        """Start the store from the controller; stops its processes at the end."""
        volumes = this_host().spawn_procs(per_host={"volumes": ranks}, name=f"{self.name}_volumes")
        try:
            await get_or_spawn_controller(self.name, AsyncController)
            await torchstore.initialize(ranks, strategy=VolumePerRank(), store_name=self.name, mesh=volumes)
            yield
        finally:
            await volumes.stop()

    def sender(self, rank: int) -> TorchstoreSender:
        return TorchstoreSender(self.name, rank)

    def receiver(self) -> TorchstoreReceiver:
        return TorchstoreReceiver(self.name)


class TorchstoreSender:
    """Copies buckets into the store, one key per chunk. Keys carry the version: a live key is never overwritten."""

    def __init__(self, name: str, rank: int) -> None:
        self._name, self._rank = name, rank
        self._keys: dict[int, list[str]] = {}

    async def put(self, version: int, bucket: torch.Tensor) -> None:
        """Store all chunks of the bucket."""
        array = bucket.numpy()
        self._keys[version] = keys = []
        for number, piece in enumerate(_chunks(len(array))):
            keys.append(_key(self._rank, version, number))
            # A tensor over a numpy slice: pickling a slice of a tensor sends all of its storage.
            await torchstore.put(keys[-1], torch.from_numpy(array[piece]), store_name=self._name)

    async def free(self, version: int) -> None:
        """Delete the version's keys: the store never does by itself."""
        for key in self._keys.pop(version):
            await torchstore.delete(key, store_name=self._name)


class TorchstoreReceiver:
    """Fetches a bucket chunk by chunk into memory of its own, reused per rank."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._buckets: dict[int, torch.Tensor] = {}

    async def get(self, rank: int, version: int, nbytes: int) -> torch.Tensor:
        """The bucket, valid until the next get of this rank's.

        Raises:
            ExceptionGroup: of torchstore's KeyError, that version was never stored, or is deleted.
        """
        if rank not in self._buckets:
            self._buckets[rank] = torch.full((nbytes,), 0, dtype=torch.uint8)
        bucket = self._buckets[rank]
        async with asyncio.TaskGroup() as copies:  # each while the next chunk is fetched
            for number, piece in enumerate(_chunks(nbytes)):
                chunk = await torchstore.get(_key(rank, version, number), store_name=self._name)
                copies.create_task(asyncio.to_thread(bucket[piece].copy_, chunk))
        return bucket


def _key(rank: int, version: int, number: int) -> str:
    return f"v{version:010d}-rank{rank}-chunk{number}"


def _chunks(nbytes: int) -> Iterator[slice]:
    for start in range(0, nbytes, CHUNK):
        yield slice(start, min(start + CHUNK, nbytes))


def check_version(found: str) -> None:
    """Refuse a torchstore whose controller the adapter below was not made for."""
    if found != VERSION:
        raise ImportError(f"torchstore {found} is installed, its controller is adapted for {VERSION} only: {INSTALL}")


def _as_async(method: Callable[..., Any]) -> Callable[..., Any]:
    async def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return method(self, *args, **kwargs)

    call.__name__ = method.__name__
    return call


class AsyncController(Controller):
    """torchstore's controller with async endpoints only.

    0.1.2 mixes sync and async endpoints in one class, which Monarch has refused since 0.2. The controller is looked up
    by name before it is spawned, so spawning this one first under the store's name is all that it takes.
    """


check_version(metadata.version("torchstore"))
for _name, _member in vars(Controller).items():
    if isinstance(_member, type(Controller.keys)) and not inspect.iscoroutinefunction(_member._method):
        setattr(AsyncController, _name, endpoint(_as_async(_member._method)))


class VolumePerRank(TorchStoreStrategy):
    """What the actor of rank i puts goes to volume i."""

    @classmethod
    def get_volume_id(cls) -> str:
        return str(current_rank().rank)

    @classmethod
    def get_client_id(cls) -> str:
        return str(current_rank().rank)
