"""Boxes against real DTensors, plans against numpy slicing."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor import Shard as Split
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from actors.weights import (
    ALIGN,
    Assembly,
    Box,
    Part,
    Shard,
    WeightIndex,
    _box,
    box_of,
    first_replica,
    layout,
    plan,
)


def ranks_of(mesh):
    return list(np.ndindex(*mesh))


def chunked(whole, mesh, placements, order):
    """Every rank's local data by cutting with torch.chunk along the mesh axes in `order`."""
    found = {}
    for coordinate in ranks_of(mesh):
        local = whole
        for axis in order:
            if isinstance(placements[axis], Replicate):
                continue
            dim, pieces = placements[axis].dim, mesh[axis]
            cut = list(local.chunk(pieces, dim))
            cut += [local.narrow(dim, 0, 0)] * (pieces - len(cut))
            local = cut[coordinate[axis]]
        found[coordinate] = local
    return found


def cut_of(whole, box):
    return whole[tuple(slice(o, o + n) for o, n in zip(box.offset, box.size, strict=True))]


@st.composite
def layouts(draw):
    """A shape, a mesh and placements as FSDP, TP, EP, HSDP make them, uneven and empty shards included."""
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    placement = st.one_of(st.builds(Replicate), st.builds(Split, st.integers(0, len(shape) - 1)))
    placements = [draw(placement) for _ in mesh]
    return shape, mesh, placements


@given(layouts())
@settings(max_examples=150, deadline=None)
def test_plain_placements_cut_as_torch_does(case):
    shape, mesh, placements = case
    whole = torch.arange(math.prod(shape)).view(shape)
    locals_ = chunked(whole, mesh, placements, range(len(mesh)))
    for coordinate, local in locals_.items():
        box = _box(shape, mesh, coordinate, placements)
        assert box.size == tuple(local.shape)
        assert torch.equal(cut_of(whole, box), local)


@given(st.integers(1, 20), st.integers(1, 4), st.integers(1, 4))
@example(7, 3, 2)  # left to right says that rank (2, 0) holds row 6, which (2, 1) does
@settings(max_examples=80, deadline=None)
def test_fsdp_over_sharded_experts_cuts_what_they_left(rows, fsdp, ep):
    placements = [_StridedShard(0, split_factor=ep), Split(0)]
    whole = torch.arange(rows * 2).view(rows, 2)
    locals_ = chunked(whole, (fsdp, ep), placements, (1, 0))
    for coordinate, local in locals_.items():
        box = _box((rows, 2), (fsdp, ep), coordinate, placements)
        assert box.size == tuple(local.shape)
        assert torch.equal(cut_of(whole, box), local)


def test_what_is_not_one_box_is_refused():
    with pytest.raises(ValueError, match="several boxes"):
        _box((8, 2), (2, 2), (0, 0), [_StridedShard(0, split_factor=2), Replicate()])
    with pytest.raises(ValueError, match="holds no box"):
        _box((8, 2), (2,), (0,), [Partial()])


@pytest.fixture
def mesh_of_rank():
    """Makes the device mesh as one of its ranks sees it, without other processes."""
    made = []

    def make(rank, shape):
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=math.prod(shape))
        made.append(rank)
        return init_device_mesh("cpu", shape)

    yield make
    if made:
        torch.distributed.destroy_process_group()


def test_box_of_a_dtensor_is_its_local_data(mesh_of_rank):
    mesh = mesh_of_rank(5, (3, 2))  # coordinate (2, 1)
    local = torch.zeros(1, 2)
    sharded = DTensor.from_local(
        local, mesh, [_StridedShard(0, split_factor=2), Split(0)], shape=torch.Size((7, 2)), stride=(2, 1)
    )
    box, data = box_of(sharded)
    assert box == Box((6, 0), (1, 2))
    assert data.data_ptr() == local.data_ptr()
    wrong = DTensor.from_local(
        torch.zeros(2, 2), mesh, [Split(0), Replicate()], shape=torch.Size((7, 2)), stride=(2, 1)
    )
    with pytest.raises(ValueError, match=r"local shard \(2, 2\)"):
        box_of(wrong)
    assert box_of(torch.zeros(3, 4))[0] == Box((0, 0), (3, 4))


@pytest.mark.parametrize(("rank", "sends"), [(0, True), (1, True), (2, False), (3, False)])
def test_one_replica_sends(mesh_of_rank, rank, sends):
    mesh = mesh_of_rank(rank, (2, 2))
    tensor = DTensor.from_local(torch.zeros(2, 2), mesh, [Replicate(), Split(0)], run_check=False)
    assert first_replica(tensor) is sends
    assert first_replica(torch.zeros(1))


@st.composite
def tensors(draw):
    """Several tensors laid out over one mesh, and a box wanted of each."""
    mesh = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=2)))
    found = []
    for number in range(draw(st.integers(1, 3))):
        shape = tuple(draw(st.lists(st.integers(1, 6), min_size=0, max_size=3)))
        dims = st.builds(Split, st.integers(0, len(shape) - 1)) if shape else st.builds(Replicate)
        placements = [draw(st.one_of(st.builds(Replicate), dims)) for _ in mesh]
        if shape and len(mesh) == 2 and draw(st.booleans()):
            placements = [_StridedShard(0, split_factor=mesh[1]), Split(0)]
        offset = tuple(draw(st.integers(0, n)) for n in shape)
        size = tuple(draw(st.integers(0, n - o)) for n, o in zip(shape, offset, strict=True))
        found.append((f"t{number}", shape, placements, Box(offset, size)))
    return mesh, found


def sent(mesh, found, dtype="float32"):
    """The full tensors, and the index and buckets of ranks that each send what they hold first."""
    full = {name: torch.randn(shape) for name, shape, _, _ in found}
    parts, buckets, sizes = [], {}, {}
    for rank, coordinate in enumerate(ranks_of(mesh)):
        shards = []
        for name, shape, placements, _ in found:
            if all(c == 0 for c, p in zip(coordinate, placements, strict=True) if isinstance(p, Replicate)):
                box = _box(shape, mesh, coordinate, placements)
                shards.append(Shard(name, shape, box, cut_of(full[name], box) if shape else full[name]))
        mine, sizes[rank] = layout(shards, rank, dtype)
        bucket = torch.full((sizes[rank],), 0xAB, dtype=torch.uint8)
        by_name = {shard.name: shard.tensor for shard in shards}
        for part in mine:
            raw = by_name[part.name].contiguous().view(-1).view(torch.uint8)
            bucket[part.at : part.at + part.nbytes] = raw
        parts += mine
        buckets[rank] = bucket
    return full, WeightIndex(tuple(parts), sizes), buckets


@given(tensors())
@settings(max_examples=200, deadline=None)
def test_a_plan_fills_any_wanted_box_once(case):
    mesh, found = case
    full, index, buckets = sent(mesh, found)
    wanted = {name: box for name, _, _, box in found}
    covered = {name: np.zeros(math.prod(box.size) * 4, dtype=int) for name, box in wanted.items()}
    made = {name: np.zeros(math.prod(box.size) * 4, dtype=np.uint8) for name, box in wanted.items()}
    for piece in plan(index, wanted):
        for run in range(piece.runs):
            to, at = piece.to + run * piece.to_step, piece.at + run * piece.at_step
            covered[piece.name][to : to + piece.nbytes] += 1
            made[piece.name][to : to + piece.nbytes] = buckets[piece.rank].numpy()[at : at + piece.nbytes]
    tensors_ = Assembly(index, wanted)(buckets)
    for name, box in wanted.items():
        expected = np.ascontiguousarray(cut_of(full[name].numpy(), box) if box.size else full[name].numpy())
        assert (covered[name] == 1).all()
        assert made[name].tobytes() == expected.tobytes()
        assert tensors_[name].shape == box.size
        assert tensors_[name].numpy().tobytes() == expected.tobytes()


def test_a_run_of_a_bucket_is_a_view_and_the_rest_is_joined_in_place():
    split = [("whole", (4, 3, 2), [Replicate()], None), ("cut", (4, 3), [Split(0)], None)]
    full, index, buckets = sent((2,), split)
    wanted = {"whole": Box((1, 0, 0), (2, 3, 2)), "cut": Box((0, 0), (4, 3))}
    assembly = Assembly(index, wanted)
    assert assembly.ranks == [0, 1]
    assert assembly.nbytes == (12 + 12) * 4
    first = assembly(buckets)
    assert first["whole"].data_ptr() == buckets[0].data_ptr() + 6 * 4
    assert torch.equal(first["whole"], full["whole"][1:3])
    buckets[1] += 1
    second = assembly(buckets)
    assert second["cut"].data_ptr() == first["cut"].data_ptr()
    assert not torch.equal(second["cut"], full["cut"])


def test_columns_are_one_spaced_range_per_rank():
    _, index, _ = sent((2,), [("w", (5, 8), [Split(1)], None)])
    assert [tuple(r) for r in plan(index, {"w": Box((1, 2), (3, 6))})] == [
        # rank 0 holds columns 0-3 of 5 rows (16-byte rows), the target is 3 rows of 24 bytes
        ("w", 0, 1 * 16 + 2 * 4, 0, 2 * 4, 3, 16, 24),
        ("w", 1, 1 * 16, 2 * 4, 4 * 4, 3, 16, 24),
    ]


def test_only_the_needed_ranks_are_read():
    _, index, _ = sent((4,), [("w", (8, 2), [Split(0)], None)])
    assert Assembly(index, {"w": Box((2, 0), (3, 2))}).ranks == [1, 2]
    assert Assembly(index, {}).ranks == []


def test_layout_aligns_casts_and_leaves_empty_shards_out():
    shards = [
        Shard("a", (3,), Box((0,), (3,)), torch.zeros(3)),
        Shard("none", (1,), Box((1,), (0,)), torch.zeros(0)),
        Shard("b", (40,), Box((0,), (40,)), torch.zeros(40, dtype=torch.float64)),
    ]
    assert layout(shards, 3, "bfloat16") == (
        [
            Part("a", (3,), "bfloat16", 3, Box((0,), (3,)), 0, 6),
            Part("b", (40,), "bfloat16", 3, Box((0,), (40,)), 64, 80),
        ],
        64 + 128,
    )
    assert layout([], 0, "float32") == ([], ALIGN)
    with pytest.raises(ValueError, match=r"step is torch.int64 on rank 0"):
        layout([Shard("step", (), Box((), ()), torch.zeros((), dtype=torch.int64))], 0, "float32")


def part(rank, offset, size, shape=(4, 4), dtype="float32"):
    return Part("w", shape, dtype, rank, Box(offset, size), 0, math.prod(size) * 4)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ((part(0, (0, 0), (2, 4)), part(1, (2, 0), (1, 4))), "w: the ranks send 12 of 16 elements"),
        # 16 elements in all: the overlap makes up for the hole
        ((part(0, (0, 0), (2, 4)), part(1, (1, 0), (2, 4))), "ranks 0 and 1 both send"),
        ((part(0, (0, 0), (4, 4)), part(1, (0, 0), (4, 4))), "ranks 0 and 1 both send"),
        ((part(0, (0, 0), (2, 4)), part(1, (2, 1), (2, 4))), "of rank 1 sticks out of"),
        ((part(0, (0, 0), (2, 4)), part(1, (2, 0), (2, 4), dtype="bfloat16")), "another"),
        ((part(0, (0, 0), (2, 4)), part(1, (2, 0), (2, 4), shape=(5, 4))), "another"),
    ],
)
def test_parts_that_do_not_tile_are_refused(parts, message):
    with pytest.raises(ValueError, match=message):
        WeightIndex(parts, {0: 64, 1: 64})


def test_wanting_what_nobody_sends_is_refused():
    index = WeightIndex((part(0, (0, 0), (4, 4)),), {0: 64})
    with pytest.raises(ValueError, match="no trainer rank sends v"):
        plan(index, {"v": Box((0, 0), (1, 1))})
    with pytest.raises(ValueError, match="sticks out"):
        plan(index, {"w": Box((0, 0), (5, 1))})
    with pytest.raises(ValueError, match="sticks out"):
        plan(index, {"w": Box((0,), (4,))})
