"""What moves a rank's bucket of bytes to the readers."""

from __future__ import annotations

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
        """Bytes of `rank`'s bucket at `version`: uint8 [nbytes], valid until the next get of the same slot; read-only."""
        ...
