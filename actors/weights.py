"""Where each rank's part of each tensor lies, and which byte ranges a reader needs: pure functions, no transport.

A rank's parts lie one after another in one run of bytes, its bucket. A tensor travels as boxes (row-major blocks),
each sent by exactly one rank; a reader wants boxes too, cut in any other way.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from actors.config import Dtype

ALIGN = 64
"""Bytes: every part starts on a cache line of its bucket."""
ITEMSIZE: dict[Dtype, int] = {"float32": 4, "bfloat16": 2}


def torch_dtype(dtype: Dtype) -> torch.dtype:
    """torch's name for a setting's type; here so that settings stay torch-free."""
    import torch

    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]


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


class Part(NamedTuple):
    """Where a shard lies once it is sent."""

    name: str
    shape: tuple[int, ...]
    """Global shape."""
    dtype: Dtype
    """As sent."""
    rank: int
    box: Box
    at: int
    """First byte in the rank's bucket."""
    nbytes: int


class Range(NamedTuple):
    """Bytes of a bucket that a target needs: `runs` runs of `nbytes`, evenly spaced on both sides."""

    name: str
    rank: int
    at: int
    """First byte in the rank's bucket."""
    to: int
    """First byte in the target."""
    nbytes: int
    runs: int = 1
    at_step: int = 0
    """Bytes from run to run in the bucket."""
    to_step: int = 0
    """Bytes from run to run in the target."""


def box_of(tensor: Tensor) -> tuple[Box, Tensor]:
    """What this rank holds of a DTensor, and its local data; a plain tensor is held whole.

    Raises:
        ValueError: the local shard is not one box (a placement other than Shard and Replicate, or a strided shard
            whose inner shards are missing), or torch holds another shape than its placements say.
    """
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return Box((0,) * tensor.dim(), tuple(tensor.shape)), tensor
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        raise ValueError("this rank is outside the tensor's device mesh: take shards on the mesh's ranks only")
    box = _box(tuple(tensor.shape), tuple(tensor.device_mesh.shape), coordinate, tensor.placements)
    local = tensor.to_local()
    if tuple(local.shape) != box.size:
        raise ValueError(f"local shard {tuple(local.shape)} of {tuple(tensor.shape)} {tensor.placements} is not {box}")
    return box, local


def first_replica(tensor: Tensor) -> bool:
    """Whether this rank is the one that sends its box: the first along every replicated mesh dimension."""
    from torch.distributed.tensor import DTensor, Replicate

    if not isinstance(tensor, DTensor):
        return True
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return False
    pairs = zip(coordinate, tensor.placements, strict=True)
    return all(c == 0 for c, placement in pairs if isinstance(placement, Replicate))


def layout(shards: Iterable[Shard], rank: int, dtype: Dtype) -> tuple[list[Part], int]:
    """Place a rank's shards in its bucket, in order, and the bucket's size in bytes (never 0, so it can be mapped).

    Empty shards have no part.

    Raises:
        ValueError: a tensor is not of a floating type: sending it as `dtype` would not keep its values.
    """
    parts, at = [], 0
    for shard in shards:
        if not shard.tensor.is_floating_point():
            raise ValueError(f"{shard.name} is {shard.tensor.dtype} on rank {rank}: only floating types are sent")
        nbytes = math.prod(shard.box.size) * ITEMSIZE[dtype]
        if nbytes:
            parts.append(Part(shard.name, shard.shape, dtype, rank, shard.box, at, nbytes))
            at += -(-nbytes // ALIGN) * ALIGN
    return parts, max(at, ALIGN)


@dataclass(frozen=True)
class WeightIndex:
    """All ranks' parts. It never changes within a run, so it goes out once; only versions and sums follow.

    Raises:
        ValueError: the parts of a tensor disagree on shape or dtype, leave a hole, overlap, or stick out.
    """

    parts: tuple[Part, ...]
    buckets: dict[int, int]
    """Bytes of each rank's bucket."""

    def __post_init__(self) -> None:
        for name, parts in self.by_name().items():
            _check_tiling(name, parts)

    def by_name(self) -> dict[str, list[Part]]:
        """Parts of each tensor."""
        grouped: dict[str, list[Part]] = defaultdict(list)
        for part in self.parts:
            grouped[part.name].append(part)
        return grouped


def plan(index: WeightIndex, wanted: Mapping[str, Box]) -> list[Range]:
    """The byte ranges that fill every wanted box, each byte once. A target is contiguous, of shape `box.size`.

    Raises:
        ValueError: nobody sends a wanted tensor, or a box sticks out of it.
    """
    grouped = index.by_name()
    ranges = []
    for name, box in wanted.items():
        if name not in grouped:
            raise ValueError(
                f"no trainer rank sends {name}; it sends {len(grouped)} others, e.g. {next(iter(grouped), None)}"
            )
        if not _inside(box, grouped[name][0].shape):
            raise ValueError(f"{name}: wanted {box} sticks out of {grouped[name][0].shape}")
        for part in grouped[name]:
            width = ITEMSIZE[part.dtype]
            for at, to, length, count, at_step, to_step in _overlap(part.box, box):
                spaced = (length * width, count, at_step * width, to_step * width)
                ranges.append(Range(name, part.rank, part.at + at * width, to * width, *spaced))
    return ranges


class Assembly:
    """Turns buckets into the wanted tensors, again and again for one plan.

    A wanted tensor that is one run of a bucket is a view of it, no copy; the others are joined in memory of the
    assembly's own, which the next call overwrites.
    """

    def __init__(self, index: WeightIndex, wanted: Mapping[str, Box]) -> None:
        import torch

        dtypes = {part.name: part.dtype for part in index.parts}
        grouped: dict[str, list[Range]] = {name: [] for name in wanted}
        for piece in plan(index, wanted):
            grouped[piece.name].append(piece)
        self.ranks = sorted({piece.rank for pieces in grouped.values() for piece in pieces})
        """Whose buckets are needed."""
        self.nbytes = sum(piece.nbytes * piece.runs for pieces in grouped.values() for piece in pieces)
        """Bytes of all wanted tensors."""
        self._views: list[tuple[str, Box, torch.dtype, Range]] = []
        self._joined: dict[str, Tensor] = {}
        self._copies: list[tuple[Tensor, Range]] = []
        for name, box in wanted.items():
            dtype = torch_dtype(dtypes[name])
            pieces = grouped[name]
            if len(pieces) == 1 and pieces[0].runs == 1:
                self._views.append((name, box, dtype, pieces[0]))
                continue
            target = torch.full(box.size, 0.0, dtype=dtype)  # written to, so that its pages are there
            self._joined[name] = target
            flat = target.view(-1)
            for piece in pieces:
                self._copies.append((_runs(flat, piece.to, piece.to_step, piece), piece))

    def __call__(self, buckets: Mapping[int, Tensor]) -> dict[str, Tensor]:
        """The wanted tensors from uint8 buckets by rank. Sources may be read-only maps: do not write to the result."""
        for target, piece in self._copies:
            source = buckets[piece.rank].view(target.dtype)
            target.copy_(_runs(source, piece.at, piece.at_step, piece))
        tensors = dict(self._joined)
        for name, box, dtype, piece in self._views:
            run = buckets[piece.rank][piece.at : piece.at + piece.nbytes]
            tensors[name] = run.view(dtype).view(box.size)
        return tensors


def _runs(flat: Tensor, start: int, step: int, piece: Range) -> Tensor:
    """A piece's runs of a flat tensor, as rows; start, step and the piece's nbytes are in bytes."""
    width = flat.element_size()
    size = (piece.runs, piece.nbytes // width)
    return flat.as_strided(size, (step // width, 1), flat.storage_offset() + start // width)


def _box(
    shape: tuple[int, ...], mesh: tuple[int, ...], coordinate: Iterable[int], placements: Iterable[object]
) -> Box:
    """The box of one rank, cutting in the order in which the shards were made.

    Plain shards were made from left to right. A strided shard (FSDP over a dimension that TP or EP had cut already)
    stands to the left of those but was made after them: it cuts what they left. Reading all placements from left to
    right gives other boxes when a cut is uneven.
    """
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor import Shard as ShardPlacement
    from torch.distributed.tensor.placement_types import _StridedShard

    where, placed = tuple(coordinate), tuple(placements)
    plain, strided = [], []
    for axis, placement in enumerate(placed):
        if isinstance(placement, _StridedShard):
            inner = [
                size
                for size, other in zip(mesh[axis + 1 :], placed[axis + 1 :], strict=True)
                if isinstance(other, ShardPlacement | _StridedShard) and other.dim == placement.dim
            ]
            if math.prod(inner) != placement.split_factor:
                raise ValueError(f"{placed} on mesh {mesh}: a local shard is several boxes; shard the inner axis too")
            strided.append((axis, placement.dim))
        elif isinstance(placement, ShardPlacement):
            plain.append((axis, placement.dim))
        elif not isinstance(placement, Replicate):
            raise ValueError(f"a tensor placed {placed} holds no box: reduce or redistribute it before it is sent")
    offset, size = [0] * len(shape), list(shape)
    for axis, dim in plain + strided[::-1]:
        start, length = _chunk(size[dim], mesh[axis], where[axis])
        offset[dim] += start
        size[dim] = length
    return Box(tuple(offset), tuple(size))


def _chunk(length: int, pieces: int, number: int) -> tuple[int, int]:
    """Start and length of a piece as `torch.chunk` cuts: equal pieces rounded up, the last ones short or empty."""
    step = -(-length // pieces)
    start = min(length, step * number)
    return start, min(length, start + step) - start


def _meet(a: Box, b: Box) -> Box | None:
    """The box that two boxes share; None if they share no element."""
    low = tuple(max(p, q) for p, q in zip(a.offset, b.offset, strict=True))
    ends = zip(a.offset, a.size, b.offset, b.size, strict=True)
    size = tuple(min(p + n, q + m) - start for start, (p, n, q, m) in zip(low, ends, strict=True))
    return Box(low, size) if all(n > 0 for n in size) else None


def _inside(box: Box, shape: tuple[int, ...]) -> bool:
    if not len(shape) == len(box.offset) == len(box.size):
        return False
    return all(start >= 0 and start + n <= whole for start, n, whole in zip(box.offset, box.size, shape, strict=True))


def _check_tiling(name: str, parts: list[Part]) -> None:
    shape, dtype = parts[0].shape, parts[0].dtype
    for part in parts:
        if (part.shape, part.dtype) != (shape, dtype):
            raise ValueError(f"{name}: rank {part.rank} sends {part.shape} {part.dtype}, another {shape} {dtype}")
        if not _inside(part.box, shape):
            raise ValueError(f"{name}: {part.box} of rank {part.rank} sticks out of {shape}")
    for a, b in itertools.combinations(parts, 2):
        if _meet(a.box, b.box):
            raise ValueError(f"{name}: ranks {a.rank} and {b.rank} both send {_meet(a.box, b.box)}")
    held = sum(math.prod(part.box.size) for part in parts)
    if held != math.prod(shape):
        raise ValueError(f"{name}: the ranks send {held} of {math.prod(shape)} elements")


def _overlap(source: Box, target: Box) -> Iterator[tuple[int, int, int, int, int, int]]:
    """Runs of elements that both boxes hold: (start in source, start in target, length, count, two steps).

    Trailing dimensions that are whole in both fold into one run; the dimension before gives the evenly spaced count.
    """
    shared = _meet(source, target)
    if shared is None:
        return
    if not shared.size:  # a scalar
        yield 0, 0, 1, 1, 0, 0
        return
    last = len(shared.size) - 1
    while last > 0 and shared.size[last] == source.size[last] == target.size[last]:
        last -= 1
    length = math.prod(shared.size[last:])
    count = shared.size[last - 1] if last else 1
    steps = (math.prod(source.size[last:]), math.prod(target.size[last:])) if last else (0, 0)
    lead = max(last - 1, 0)
    outer = [range(start, start + n) for start, n in zip(shared.offset[:lead], shared.size[:lead], strict=True)]
    for point in itertools.product(*outer):
        corner = point + shared.offset[len(point) :]
        yield _flat(corner, source), _flat(corner, target), length, count, *steps


def _flat(point: tuple[int, ...], box: Box) -> int:
    """Element number of a point in a box's own row-major order."""
    number = 0
    for coordinate, start, size in zip(point, box.offset, box.size, strict=True):
        number = number * size + coordinate - start
    return number
