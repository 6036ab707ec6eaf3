"""Ways to move weights; each library is imported only when its transport is chosen."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from actors.transports.base import Transport


def make_transport(name: Literal["shm", "torchstore"], folder: str) -> Transport:
    """The transport of that name for a run with this shared folder. Call it before the first process is spawned:
    torchstore sets a message size limit that processes inherit.

    Raises:
        ImportError: torchstore is missing or of another version.
    """
    if name == "shm":
        from actors.transports.shm import ShmTransport

        return ShmTransport(folder)
    from actors.transports.torchstore import TorchstoreTransport

    return TorchstoreTransport(f"weights-{os.getpid()}")
