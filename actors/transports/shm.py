"""Weights within one host: readers map the trainer's slot files, no byte moves."""

from __future__ import annotations

import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from actors import shm

if TYPE_CHECKING:
    from torch import Tensor


def slot_path(folder: str, rank: int, version: int) -> str:
    """File of the slot in which `rank` stages `version`: two take turns."""
    return f"{folder}/slot-{rank}-{version % 2}"


@dataclass(frozen=True)
class ShmTransport:
    """Slots lie in `folder` (see `actors.shm.RunFolder`), where their readers find them."""

    folder: str

    @asynccontextmanager
    async def running(self, ranks: int) -> AsyncIterator[None]:
        """Nothing runs: the folder is enough."""
        yield

    def sender(self, rank: int) -> ShmSender:
        return ShmSender()

    def receiver(self) -> ShmReceiver:
        return ShmReceiver(self.folder)


class ShmSender:
    """A staged slot is readable as it is."""

    async def put(self, version: int, bucket: Tensor) -> None:
        """Nothing to do: `bucket` is the mapped file."""

    async def free(self, version: int) -> None:
        """Nothing to do: the slot is written over when its turn comes."""


class ShmReceiver:
    """Maps each slot file once and keeps the map: the first touch of a page costs more than its copy."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._maps: dict[str, Tensor] = {}

    async def get(self, rank: int, version: int, nbytes: int) -> Tensor:
        """The slot itself: what the trainer writes into it later shows here.

        Raises:
            FileNotFoundError: that rank has no slots in the folder.
            ValueError: its slots are smaller than `nbytes`.
        """
        import torch

        path = slot_path(self._folder, rank, version)
        if path not in self._maps:
            view = shm.map_existing(path, nbytes)
            with warnings.catch_warnings():
                # torch warns once that it cannot mark the tensor read-only.
                warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
                self._maps[path] = torch.from_numpy(view)
        return self._maps[path]
