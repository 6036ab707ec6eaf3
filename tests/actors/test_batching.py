"""The plan of a step, the shift by one, masks, and packed attention against one document at a time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from actors.backends.packed import WASTE, documents, packed_attention
from actors.batching import Member, advantages, load, pack, plan, share
from actors.types import GroupMeta, PayloadHandle, Rollout, Sampling, Taken
from losses import group_mean
from tests.actors.training_data import rollout, store


def batch_of(lengths: list[list[int]]) -> Taken:
    """Metadata of groups whose rollouts have these lengths; nothing is stored."""
    metas = []
    for i, members in enumerate(lengths):
        n, zero = len(members), np.zeros(len(members), np.int32)
        handle = PayloadHandle(host="nowhere", path=f"/nowhere/{i}", nbytes=0)
        metas.append(
            GroupMeta(
                ticket=i,
                attempt=0,
                row=i,
                rewards=np.zeros(n, np.float32),
                lengths=np.array(members, np.int32),
                actions=zero,
                oldest=zero,
                newest=zero,
                truncated=np.zeros(n, bool),
                handle=handle,
            )
        )
    return Taken(step=0, groups=tuple(metas), max_staleness=None, metrics={}, last=False)


groups_of_lengths = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=6), min_size=0, max_size=8)


@settings(max_examples=150, deadline=None)
@given(groups_of_lengths, st.integers(1, 5), st.integers(1, 4), st.integers(1, 80))
def test_plan_deals_every_rollout_once_and_keeps_ranks_in_step(
    lengths: list[list[int]], ranks: int, updates: int, limit: int
) -> None:
    taken = batch_of(lengths)
    planned = plan(taken, ranks=ranks, updates=updates, microbatch_tokens=limit)
    dealt = [m for update in planned for rank in update for piece in rank for m in piece]
    assert sorted(dealt) == [Member(g, m) for g, group in enumerate(lengths) for m in range(len(group))]
    assert len(planned) == max(1, min(updates, len(lengths)))
    update_of = {}
    for number, update in enumerate(planned):
        assert len(update) == ranks
        assert len({len(rank) for rank in update}) == 1 and len(update[0]) >= 1
        for rank in update:
            for piece in rank:
                tokens = [lengths[m.group][m.member] - 1 for m in piece]
                assert sum(tokens) <= limit or sum(t > 0 for t in tokens) == 1
                for m in piece:
                    assert update_of.setdefault(m.group, number) == number, "a group was split over updates"
    per_update = [len({m.group for rank in update for piece in rank for m in piece}) for update in planned]
    assert max(per_update) - min(per_update) <= 1


@settings(max_examples=80, deadline=None)
@given(groups_of_lengths.filter(bool), st.integers(1, 5))
def test_share_is_balanced(lengths: list[list[int]], ranks: int) -> None:
    taken = batch_of(lengths)
    loads = [
        sum(lengths[m.group][m.member] - 1 for m in members)
        for members in share(taken.groups, ranks, range(len(lengths)))
    ]
    longest = max(length - 1 for group in lengths for length in group)
    # Whoever got the last rollout was the lightest then, so no two ranks differ by more than the longest rollout.
    assert max(loads) - min(loads) <= longest


def test_share_by_hand() -> None:
    """Entries 9, 7, 6, 5, 3 longest first: 9 -> 0; 7 -> 1; 6 -> 1 (7 < 9); 5 -> 0 (9 < 13); 3 -> 1 (13 < 14)."""
    taken = batch_of([[10, 6], [8, 7, 4]])
    assert share(taken.groups, 2, [0, 1]) == [
        [Member(0, 0), Member(0, 1)],
        [Member(1, 0), Member(1, 1), Member(1, 2)],
    ]


def test_the_shift_by_hand() -> None:
    """Entry t holds input t and everything about target t + 1."""
    first = Rollout(
        tokens=np.array([5, 6, 7, 8], np.int32),
        mask=np.array([False, False, True, True]),
        logprobs=np.array([0, 0, -0.5, -0.25], np.float32),
        versions=np.array([-1, -1, 3, 4], np.int32),
        turns=(),
        reward=1.0,
        sampling=Sampling(temperature=0.7),
    )
    second = replace(
        first,
        tokens=np.array([9, 10, 11], np.int32),
        mask=np.array([False, True, False]),
        logprobs=np.array([0, -2, 0], np.float32),
        versions=np.array([-1, 5, -1], np.int32),
        sampling=Sampling(temperature=0.0),
    )
    m = pack([first, second], tickets=[40, 41], advantages=[1.5, -2.0], step=5)
    assert m.inputs_T.tolist() == [5, 6, 7, 9, 10]
    assert m.targets_T.tolist() == [6, 7, 8, 10, 11]
    assert m.positions_T.tolist() == [0, 1, 2, 0, 1]
    assert m.lengths == (3, 2)
    assert m.mask_T.tolist() == [False, True, True, True, False]
    assert m.behaviour_T.tolist() == [0, -0.5, -0.25, -2, 0]
    assert m.staleness_T.tolist() == [0, 2, 1, 0, 0]
    assert m.versions_T.tolist() == [-1, 3, 4, 5, -1]
    assert m.advantages_T.tolist() == [1.5, 1.5, 1.5, -2, -2]
    assert m.segment_T.tolist() == [0, 0, 0, 1, 1]
    assert m.group_T.tolist() == [40, 40, 40, 41, 41]
    assert m.temperature_T.tolist() == pytest.approx([0.7, 0.7, 0.7, 1, 1])
    assert m.sequences == 2


def test_too_old_and_non_finite_tokens_leave_the_mask() -> None:
    """At step 5 with bound 1: version 3 is 2 behind, version 4 is 1 behind; a nan logprob cannot be weighted."""
    r = Rollout(
        tokens=np.arange(6, dtype=np.int32),
        mask=np.array([False, True, True, True, True, True]),
        logprobs=np.array([0, -1, -1, np.nan, -np.inf, -1], np.float32),
        versions=np.array([-1, 3, 4, 4, 5, 5], np.int32),
        turns=(),
        reward=0.0,
        sampling=Sampling(),
    )
    m = pack([r], tickets=[0], advantages=[1.0], step=5, max_staleness=1)
    assert m.mask_T.tolist() == [False, True, False, False, True]
    assert m.staleness_T.tolist() == [0, 1, 0, 0, 0]
    assert m.behaviour_T.isfinite().all()
    assert pack([r], tickets=[0], advantages=[1.0], step=9, max_staleness=1).sequences == 0


def test_a_rollout_of_one_token_leaves_no_trace() -> None:
    rng = np.random.default_rng(0)
    m = pack(
        [rollout(rng, 4, 1, 0), rollout(rng, 1, 1, 0), rollout(rng, 3, 1, 0)],
        tickets=[7, 8, 9],
        advantages=[1.0, 2.0, 3.0],
        step=0,
    )
    assert m.lengths == (3, 2) and m.group_T.tolist() == [7, 7, 7, 9, 9]


def test_advantages_are_those_of_the_whole_step(tmp_path: Path) -> None:
    """Rewards (1, 0) and (2, 0, 1): minus the means 0.5 and 1. The packed tokens carry their rollout's."""
    rng = np.random.default_rng(0)
    rewards = [[1.0, 0.0], [2.0, 0.0, 1.0]]
    groups = [[replace(rollout(rng, 4 + i, 2, 0), reward=r) for i, r in enumerate(group)] for group in rewards]
    taken = store(groups, str(tmp_path))
    estimated = advantages(taken, group_mean)
    assert [a.tolist() for a in estimated] == [[0.5, -0.5], [1.0, -1.0, 0.0]]
    (m,) = load(taken, ((Member(1, 1), Member(0, 0)),), estimated)
    assert m.advantages_T.tolist() == [-1.0] * 4 + [0.5] * 3
    assert m.group_T.tolist() == [101] * 4 + [100] * 3
    assert m.inputs_T[:4].tolist() == groups[1][1].tokens[:-1].tolist()


def test_a_broken_estimator_is_named(tmp_path: Path) -> None:
    taken = batch_of([[3, 3]])
    with pytest.raises(ValueError, match="2 of them not finite"):
        advantages(taken, lambda rewards, groups: rewards / 0)


def one_document_at_a_time(query: Tensor, key: Tensor, value: Tensor, lengths: list[int]) -> Tensor:
    """Softmax attention written down, [1, T, H, D]."""
    outputs, start = [], 0
    repeats = query.shape[1] // key.shape[1]
    for n in lengths:
        q, k, v = (x[0, :, start : start + n] for x in (query, key, value))
        k, v = k.repeat_interleave(repeats, 0), v.repeat_interleave(repeats, 0)
        scores = q @ k.transpose(1, 2) * 0.3
        scores = scores.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf)
        outputs.append((scores.softmax(-1) @ v).transpose(0, 1))
        start += n
    return torch.cat(outputs)[None]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(0, 2**16))
def test_packed_attention_equals_one_document_at_a_time(lengths: list[int], seed: int) -> None:
    source = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    shapes = [(1, 4, total, 8), (1, 2, total, 8), (1, 2, total, 8)]
    tensors = [torch.randn(s, generator=source, dtype=torch.float64).requires_grad_() for s in shapes]
    weight = torch.randn(1, total, 4, 8, generator=source, dtype=torch.float64)
    layout = documents(lengths, torch.device("cpu"))
    got, _ = packed_attention(torch.nn.Module(), *tensors, None, documents=layout, scaling=0.3)
    want = one_document_at_a_time(*tensors, lengths)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
    got_grad = torch.autograd.grad((got * weight).sum(), tensors)
    want_grad = torch.autograd.grad((want * weight).sum(), tensors)
    torch.testing.assert_close(got_grad, want_grad, rtol=1e-9, atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 200), min_size=1, max_size=64))
def test_padding_stays_within_the_waste(lengths: list[int]) -> None:
    layout = documents(lengths, torch.device("cpu"))
    places = sum(rows * width for rows, width in layout.classes)
    assert places == len(layout.place_token_P) <= WASTE * sum(lengths)
    assert sum(rows for rows, _ in layout.classes) == len(lengths)


def test_what_is_not_computed_is_refused() -> None:
    layout = documents([4], torch.device("cpu"))
    x = torch.zeros(1, 1, 4, 8)
    with pytest.raises(ValueError, match="soft-capping"):
        packed_attention(torch.nn.Module(), x, x, x, None, documents=layout, softcap=30.0)
    with pytest.raises(ValueError, match="window of 3"):
        packed_attention(torch.nn.Module(), x, x, x, None, documents=layout, sliding_window=3)
    with pytest.raises(ValueError, match="dropout"):
        packed_attention(torch.nn.Module(), x, x, x, None, documents=layout, dropout=0.1)
