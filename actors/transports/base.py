"""What moves a rank's bucket of bytes to the readers."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Sender(Protocol):
    """On a trainer rank: makes the bytes of a slot readable under a version."""

    async def put(self, version: int, bucket: Tensor) -> None:
        """Offer `bucket` (uint8 [nbytes], one of the rank's slots) as `version`; returns when readers can have it."""
        ...

    async def free(self, version: int) -> None:
        """No reader needs `version` any more."""
        ...


class Receiver(Protocol):
    """On a generator: fetches one rank's bucket."""

    async def get(self, rank: int, version: int, nbytes: int) -> Tensor:
        """`rank`'s bucket at `version`: uint8 [nbytes], read-only, valid until the next get of the same slot."""
        ...


class Transport(Protocol):
    """One way to move bytes. Picklable: the controller makes it and both ends get a copy."""

    def running(self, ranks: int) -> AbstractAsyncContextManager[None]:
        """In the controller: whatever must run between `ranks` senders and their readers."""
        ...

    def sender(self, rank: int) -> Sender:
        """On the trainer rank of that number."""
        ...

    def receiver(self) -> Receiver:
        """On a generator rank."""
        ...
