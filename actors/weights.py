"""Where each rank's part of each tensor lies, and which byte ranges a reader needs: pure functions, no transport."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class Box(NamedTuple):
    """A row-major block of a tensor."""

    offset: tuple[int, ...]
    size: tuple[int, ...]


class Shard(NamedTuple):
    """This rank's part of one tensor, under its Hugging Face name."""

    name: str
    shape: tuple[int, ...]
    """Global shape."""
    box: Box
    """What of it this rank holds."""
    tensor: Tensor
    """The local data, aliasing the live weights, shape `box.size`."""
