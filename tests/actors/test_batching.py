"""The plan of a step, the shift by one, shared prompts, and masks."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.batching import Member, Sizes, advantages, load, pack, plan, share
from actors.types import GroupMeta, PayloadHandle, Rollout, Sampling, Taken
from losses import group_mean
from tests.actors.training_data import one_prompt, rollout, store


def batch_of(lengths: list[list[int]], prompts: list[int] | None = None) -> Taken:
    """Metadata of one-turn groups whose rollouts have these lengths, prompts included; nothing is stored."""
    metas = []
    for i, (members, prompt) in enumerate(zip(lengths, prompts or [1] * len(lengths), strict=True)):
        n, zero = len(members), np.zeros(len(members), np.int32)
        handle = PayloadHandle(host="nowhere", path=f"/nowhere/{i}", nbytes=0)
        metas.append(
            GroupMeta(
                ticket=i,
                attempt=0,
                row=i,
                rewards=np.zeros(n, np.float32),
                lengths=np.array(members, np.int32),
                actions=np.array(members, np.int32) - prompt,
                oldest=zero,
                newest=zero,
                truncated=np.zeros(n, bool),
                handle=handle,
            )
        )
    return Taken(step=0, groups=tuple(metas), max_staleness=None, metrics={}, last=False)


def computed(batch: Batch, members: Iterable[Member]) -> int:
    """Tokens of a microbatch, counted one by one: (group, position) in the prompt, (rollout, position) after it."""
    return len(
        {
            (m.group, None if t < batch[m.group][0] else m.member, t)
            for m in members
            for t in range(batch[m.group][0] + batch[m.group][1][m.member] - 1)
        }
    )


Batch = list[tuple[int, list[int]]]
"""(prompt, generated tokens of each member) of each group."""
batches = st.lists(st.tuples(st.integers(1, 30), st.lists(st.integers(1, 40), min_size=1, max_size=6)), max_size=8)


def taken_of(batch: Batch) -> Taken:
    return batch_of([[prompt + n for n in actions] for prompt, actions in batch], [prompt for prompt, _ in batch])


@settings(max_examples=150, deadline=None)
@given(batches, st.integers(1, 5), st.integers(1, 4), st.integers(1, 80))
def test_plan_deals_every_rollout_once_and_keeps_ranks_in_step(
    batch: Batch, ranks: int, updates: int, limit: int
) -> None:
    planned = plan(taken_of(batch), ranks=ranks, updates=updates, microbatch_tokens=limit)
    dealt = [m for update in planned for rank in update for piece in rank for m in piece]
    assert sorted(dealt) == [Member(g, m) for g, (_, actions) in enumerate(batch) for m in range(len(actions))]
    assert len(planned) == max(1, min(updates, len(batch)))
    update_of: dict[int, int] = {}
    for number, update in enumerate(planned):
        assert len(update) == ranks
        assert len({len(rank) for rank in update}) == 1 and len(update[0]) >= 1
        for rank in update:
            for piece in rank:
                assert (
                    computed(batch, piece) <= limit
                    or len(piece) == 1
                    or computed(batch, piece[:1]) == computed(batch, piece)
                )
                for m in piece:
                    assert update_of.setdefault(m.group, number) == number, "a group was split over updates"
            for piece, following in itertools.pairwise(rank):
                assert not following or computed(batch, [*piece, following[0]]) > limit, "a piece was cut too early"
    per_update = [len({m.group for rank in update for piece in rank for m in piece}) for update in planned]
    assert max(per_update) - min(per_update) <= 1


@settings(max_examples=80, deadline=None)
@given(batches.filter(bool), st.integers(1, 5))
def test_share_is_balanced(batch: Batch, ranks: int) -> None:
    shares = share(Sizes(taken_of(batch).groups), ranks, range(len(batch)))
    assert all(members == sorted(members) for members in shares), "groups must stay together for microbatches"
    loads = [computed(batch, members) for members in shares]
    lengths = [prompt + n - 1 for prompt, actions in batch for n in actions]
    # Dealt rollout by rollout, whoever got the last one was the lightest then, at most an even part of all unshared.
    assert max(loads) <= sum(lengths) / ranks + max(lengths)


def test_share_by_hand() -> None:
    """Prompts of 1; own tokens 8, 4 | 6, 5, 2. Whole groups: 14 to rank 0, 13 to rank 1.

    Rollout by rollout: 9 -> 0; 7 -> 1; then 6 (5 and the prompt, if it is not there) -> 1, 12 in all; 5 (4) -> 0, 13
    in all; 3 (2) -> 1, 14 in all. Both have 14 at most, so groups stay whole.
    """
    sizes = Sizes(batch_of([[10, 6], [8, 7, 4]]).groups)
    assert share(sizes, 2, [0, 1]) == [
        [Member(1, 0), Member(1, 1), Member(1, 2)],
        [Member(0, 0), Member(0, 1)],
    ]


def test_one_group_is_split_over_ranks() -> None:
    """A prompt of 10, own tokens 9, 8, 2, 1: 19 -> 0, 18 -> 1, 2 -> 1, 1 -> 0: twice 20 against 30 in one place."""
    sizes = Sizes(batch_of([[20, 19, 13, 12]], [10]).groups)
    assert share(sizes, 2, [0]) == [[Member(0, 0), Member(0, 3)], [Member(0, 1), Member(0, 2)]]


def test_sizes_of_rollouts_that_may_share_less() -> None:
    """Nobody generated 4 and 6 of the members' tokens: there were observations, so no prompt is taken for granted."""
    taken = batch_of([[10, 12], [9, 7]], [4, 3])
    uneven = replace(taken.groups[0], actions=np.array([6, 6], np.int32))
    sizes = Sizes([uneven, taken.groups[1]])
    assert sizes.total([Member(0, 0), Member(0, 1)]) == 9 + 11
    assert sizes.total([Member(1, 0), Member(1, 1)]) == 3 + 5 + 3
    assert sizes.added([Member(1, 1)], {0}) == 6 and sizes.added([Member(1, 1)], {1}) == 3


def test_the_shift_by_hand() -> None:
    """Two rollouts share the prompt 5 6; the third has none in common and acts at once after 9, then observes 11."""
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
        tokens=np.array([5, 6, 3], np.int32),
        mask=np.array([False, False, True]),
        logprobs=np.array([0, 0, -1], np.float32),
        versions=np.array([-1, -1, 4], np.int32),
    )
    third = replace(
        first,
        tokens=np.array([9, 10, 11, 12], np.int32),
        mask=np.array([False, True, False, True]),
        logprobs=np.array([0, -2, 0, -3], np.float32),
        versions=np.array([-1, 5, -1, 5], np.int32),
        sampling=Sampling(temperature=0.0),
    )
    m = pack([first, third, second], tickets=[40, 41, 40], advantages=[1.5, -2.0, 0.5], step=5)
    assert m.inputs_S.tolist() == [5, 6, 9, 7, 10, 11]
    assert m.positions_S.tolist() == [0, 1, 0, 2, 1, 2]
    assert m.prompts == (2, 1) and m.continuations == ((0, 1), (1, 2))
    assert m.targets_T.tolist() == [7, 8, 10, 11, 12, 3]
    assert m.source_T.tolist() == [1, 3, 2, 4, 5, 1]
    assert m.mask_T.tolist() == [True, True, True, False, True, True]
    assert m.behaviour_T.tolist() == [-0.5, -0.25, -2, 0, -3, -1]
    assert m.staleness_T.tolist() == [2, 1, 0, 0, 0, 1]
    assert m.versions_T.tolist() == [3, 4, 5, -1, 5, 4]
    assert m.advantages_T.tolist() == [1.5, 1.5, -2, -2, -2, 0.5]
    assert m.segment_T.tolist() == [0, 0, 1, 1, 1, 2]
    assert m.group_T.tolist() == [40, 40, 41, 41, 41, 40]
    assert m.temperature_T.tolist() == pytest.approx([0.7, 0.7, 1, 1, 1, 0.7])
    assert m.sequences == 3


@settings(max_examples=60, deadline=None)
@given(batches.filter(bool), st.integers(0, 2**16))
def test_every_target_is_predicted_by_what_came_before_it(batch: Batch, seed: int) -> None:
    """Follow each target to its source and on through its document: the rollout's tokens and positions come out."""
    rng = np.random.default_rng(seed)
    groups = [one_prompt([rollout(rng, prompt + n, prompt, 0) for n in actions]) for prompt, actions in batch]
    flat = [(group, r) for group, rollouts in enumerate(groups) for r in rollouts]
    m = pack([r for _, r in flat], tickets=[g for g, _ in flat], advantages=[0.0] * len(flat), step=0)
    prompts = {r.tokens[: -int(r.mask.sum())].tobytes() for _, r in flat}
    own = sum(int(r.mask.sum()) - 1 for _, r in flat)
    assert len(m.inputs_S) == sum(len(key) // 4 for key in prompts) + own
    members = [Member(g, i) for g, rollouts in enumerate(groups) for i in range(len(rollouts))]
    if len(prompts) == len(groups):
        assert len(m.inputs_S) == computed(batch, members) == Sizes(taken_of(batch).groups).total(members)
    source, target = m.source_T.numpy(), m.targets_T.numpy()
    for number, (_, r) in enumerate(flat):
        at = np.flatnonzero(m.segment_T.numpy() == number)
        n = len(r.tokens) - len(at)
        before = np.concatenate([source[at[0]] + np.arange(1 - n, 1), source[at[1:]]])
        assert m.inputs_S[before].tolist() == r.tokens[:-1].tolist()
        assert m.positions_S[before].tolist() == list(range(len(r.tokens) - 1))
        assert target[at].tolist() == r.tokens[n:].tolist()


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
    assert m.group_T.tolist() == [7, 7, 7, 9, 9] and m.prompts == (1, 1) and m.continuations == ((0, 2), (1, 1))
    nothing = pack([rollout(rng, 1, 1, 0), rollout(rng, 5, 5, 0)], tickets=[1, 2], advantages=[1.0, 1.0], step=0)
    assert len(nothing.inputs_S) == 1 and nothing.sequences == 0 and not nothing.mask_T.any()


def test_the_first_token_is_never_a_target() -> None:
    """A rollout that acts from its first token on: nothing predicts that one."""
    acts = rollout(np.random.default_rng(0), 4, 0, 0)
    m = pack([acts], tickets=[1], advantages=[1.0], step=0)
    assert m.prompts == (1,) and m.targets_T.tolist() == acts.tokens[1:].tolist() and m.source_T.tolist() == [0, 1, 2]


def test_advantages_are_those_of_the_whole_step(tmp_path: Path) -> None:
    """Rewards (1, 0) and (2, 0, 1): minus the means 0.5 and 1. The packed tokens carry their rollout's."""
    rng = np.random.default_rng(0)
    rewards = [[1.0, 0.0], [2.0, 0.0, 1.0]]
    groups = [[replace(rollout(rng, 4 + i, 2, 0), reward=r) for i, r in enumerate(group)] for group in rewards]
    taken = store(groups, str(tmp_path))
    estimated = advantages(taken, group_mean)
    assert [a.tolist() for a in estimated] == [[0.5, -0.5], [1.0, -1.0, 0.0]]
    (m,) = load(taken, ((Member(1, 1), Member(0, 0)),), estimated)
    assert m.advantages_T.tolist() == [-1.0] * 3 + [0.5] * 2
    assert m.group_T.tolist() == [101] * 3 + [100] * 2
    assert m.targets_T[:3].tolist() == groups[1][1].tokens[2:].tolist()


def test_a_broken_estimator_is_named(tmp_path: Path) -> None:
    taken = batch_of([[3, 3]])
    with pytest.raises(ValueError, match="2 of them not finite"):
        advantages(taken, lambda rewards, groups: rewards / 0)
