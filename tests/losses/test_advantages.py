"""Advantage estimators, generalised advantage estimation and filters, by hand and against plain Python."""

from __future__ import annotations

import json
import math
import pickle
import random
import statistics
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from losses import (
    RunningMean,
    adaptive_lambda,
    gae,
    group_mean,
    group_mean_whitened,
    group_norm,
    leave_one_out,
    overlong_penalty,
    resample_on_correct,
    tool_penalty,
    whitened,
)

groups = st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.0, 0.1, 1.0, -2.5])), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(groups)
def test_advantages_equal_the_statistics_module(rows: list[tuple[int, float]]) -> None:
    ids, rewards = [10 * g for g, _ in rows], torch.tensor([r for _, r in rows])
    members = {g: [r for i, r in zip(ids, rewards.tolist(), strict=True) if i == g] for g in set(ids)}
    mean = [r - statistics.fmean(members[g]) for g, r in zip(ids, rewards.tolist(), strict=True)]
    spread = {g: statistics.stdev(m) if len(m) > 1 else 0.0 for g, m in members.items()}
    norm = [m / (spread[g] + 1e-6) for g, m in zip(ids, mean, strict=True)]
    assert group_mean(rewards, torch.tensor(ids)).tolist() == pytest.approx(mean, rel=1e-6, abs=1e-7)
    assert group_norm(rewards, torch.tensor(ids)).tolist() == pytest.approx(norm, rel=1e-6, abs=1e-7)


def test_group_norm_by_hand() -> None:
    """Group 7: rewards 1, 0, 0: mean 1/3, variance (4/9 + 1/9 + 1/9) / 2 = 1/3. Group 2 is alone, group 3 equal."""
    rewards = torch.tensor([1.0, 5.0, 0.0, 0.1, 0.0, 0.1, 0.1])
    ids = torch.tensor([7, 2, 7, 3, 7, 3, 3])
    s = math.sqrt(1 / 3) + 1e-6
    got = group_norm(rewards, ids)
    assert got.tolist() == pytest.approx([2 / 3 / s, 0, -1 / 3 / s, 0, -1 / 3 / s, 0, 0], abs=1e-7)
    assert got[ids != 7].eq(0).all(), "equal rewards must give exactly 0"
    assert group_mean(rewards, ids)[ids != 7].eq(0).all()


@settings(max_examples=60, deadline=None)
@given(groups)
def test_leave_one_out_is_the_mean_of_the_others(rows: list[tuple[int, float]]) -> None:
    ids, rewards = torch.tensor([g for g, _ in rows]), torch.tensor([r for _, r in rows])
    expected, scaled = [], []
    for i, (g, _) in enumerate(rows):
        reward = rewards[i].item()
        others = [rewards[j].item() for j, (h, _) in enumerate(rows) if h == g and j != i]
        expected.append(reward - statistics.fmean(others) if others else 0.0)
        size = len(others) + 1
        scaled.append(group_mean(rewards, ids)[i].item() * size / max(1, size - 1))
    got = leave_one_out(rewards, ids)
    assert got.dtype == rewards.dtype
    assert got.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert got.tolist() == pytest.approx(scaled, rel=1e-6, abs=1e-6)


@settings(max_examples=60, deadline=None)
@given(groups)
def test_whitened_equals_the_statistics_module(rows: list[tuple[int, float]]) -> None:
    ids, rewards = torch.tensor([g for g, _ in rows]), torch.tensor([r for _, r in rows])
    for estimate, values in (
        (whitened, rewards.double().tolist()),
        (group_mean_whitened, group_mean(rewards.double(), ids).tolist()),
    ):
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        expected = [(v - statistics.fmean(values)) / (spread + 1e-6) for v in values]
        assert estimate(rewards, ids).tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_whitened_by_hand() -> None:
    """Rewards 1, 0, 0, 1 with mean 1/2 and variance 4 * 1/4 / 3 = 1/3.

    By group first, (2, 0) and (1, 1) become 1, -1, 0, 0 with mean 0 and variance 2/3. Equal rewards are exactly 0.
    """
    ids = torch.tensor([0, 0, 1, 1])
    s = math.sqrt(1 / 3) + 1e-6
    assert whitened(torch.tensor([1.0, 0, 0, 1]), ids).tolist() == pytest.approx(
        [0.5 / s, -0.5 / s, -0.5 / s, 0.5 / s]
    )
    s = math.sqrt(2 / 3) + 1e-6
    assert group_mean_whitened(torch.tensor([2.0, 0, 1, 1]), ids).tolist() == pytest.approx([1 / s, -1 / s, 0, 0])
    assert whitened(torch.full((7,), 0.1), torch.zeros(7)).eq(0).all()
    assert whitened(torch.tensor([3.0]), torch.tensor([0])).tolist() == [0.0]


def test_running_mean_by_hand() -> None:
    """Window 2. Row 5 gets 1, 0, then 4 (mean 1/2 before), then 4 again (mean of 0 and 4 = 2). Row 9 is new in the
    second call, whose rewards average (4 + 1) / 2 = 2.5. Two rollouts of one row in a call share their baseline."""
    baseline = RunningMean(window=2)
    assert baseline(torch.tensor([1.0, 0.0]), torch.tensor([5, 5])).tolist() == [0.5, -0.5]
    assert baseline(torch.tensor([4.0, 1.0]), torch.tensor([5, 9])).tolist() == [3.5, -1.5]
    other: RunningMean = pickle.loads(pickle.dumps(baseline))
    restored = RunningMean(window=2)
    restored.load_state(json.loads(json.dumps(baseline.state())))
    for same in (baseline, other, restored):
        assert same(torch.tensor([4.0, 0.0]), torch.tensor([5, 5])).tolist() == [2.0, -2.0]
    assert baseline.recent == {5: [4.0, 0.0], 9: [1.0]}
    for damaged in (
        {"a": 3},
        [[5]],
        [[5, None]],
        7,
        [["x", [1.0]]],
        [[math.inf, [1.0]]],
        [[1, [math.nan]]],
        {"12": [1]},
        [[1, "12"]],
    ):
        with pytest.raises(ValueError, match="no list of"):
            restored.load_state(damaged)
    assert restored.recent == baseline.recent


def test_running_mean_remembers_8() -> None:
    baseline = RunningMean()
    for reward in range(10):
        baseline(torch.tensor([float(reward)]), torch.tensor([3]))
    assert baseline.recent[3] == [2, 3, 4, 5, 6, 7, 8, 9]
    with pytest.raises(ValueError, match="window must be at least 1"):
        RunningMean(window=0)


def test_gae_table() -> None:
    """gamma 0.9, lambda 0.5, so traces decay by 0.45. Rollout 0: actions of two tokens and one around an observation,
    ended; rollout 1: one action of two tokens, cut off, and the critic says 2 after it.

    rollout 0, V = 1, 2, (observation), 3, reward 4 on the last:
        A2 = 4 - 3 = 1
        A1 = 0.9 * 3 - 2 + 0.45 * 1 = 1.15      from the last token of the first action to the first of the next
        A0 = 0.9 * 2 - 1 + 0.45 * 1.15 = 1.3175
    rollout 1, V = 1, 1, reward 0:
        A1 = 0.9 * 2 - 1 = 0.8;  A0 = 0.9 * 1 - 1 + 0.45 * 0.8 = 0.26
    """
    rewards = torch.tensor([0, 0, 0, 4.0, 0, 0, 0])
    values = torch.tensor([1, 2, math.nan, 3, 1, 1, math.nan])
    action = torch.tensor([True, True, False, True, True, True, False])
    got = gae(
        rewards,
        values,
        action,
        torch.tensor([0, 0, 0, 0, 1, 1, 2]),
        torch.tensor([0.5, 0.5, 0.5]),
        gamma=0.9,
        bootstrap_N=torch.tensor([0.0, 2.0, 7.0]),
    )
    assert got.dtype == values.dtype
    assert got.tolist() == pytest.approx([1.3175, 1.15, 0, 1, 0.26, 0.8, 0], abs=1e-6)


rollouts = st.lists(
    st.lists(st.tuples(st.booleans(), st.floats(-2, 2), st.floats(-2, 2)), max_size=6), min_size=1, max_size=4
)


@settings(max_examples=60, deadline=None)
@given(rollouts, st.floats(0, 1), st.floats(0, 1), st.randoms(use_true_random=False))
def test_gae_equals_a_loop(
    sample: list[list[tuple[bool, float, float]]], gamma: float, decay: float, rng: random.Random
) -> None:
    """Rollouts may be interleaved: only the order within each matters. Lambda 1 gives the discounted return."""
    lambdas = [decay * (i + 1) / len(sample) for i in range(len(sample))]
    boots = [float(i) for i in range(len(sample))]
    expected: list[list[float]] = []
    for i, tokens in enumerate(sample):
        out, following, trace = [0.0] * len(tokens), boots[i], 0.0
        for t in reversed(range(len(tokens))):
            action, value, reward = tokens[t]
            if action:
                trace = reward + gamma * following - value + gamma * lambdas[i] * trace
                out[t], following = trace, value
        expected.append(out)
    order = [i for i, tokens in enumerate(sample) for _ in tokens]
    rng.shuffle(order)
    places = [iter(range(len(tokens))) for tokens in sample]
    flat = [(i, next(places[i])) for i in order]
    got = gae(
        torch.tensor([sample[i][t][2] * sample[i][t][0] for i, t in flat], dtype=torch.float64),
        torch.tensor([sample[i][t][1] for i, t in flat], dtype=torch.float64),
        torch.tensor([sample[i][t][0] for i, t in flat], dtype=torch.bool),
        torch.tensor([i for i, _ in flat], dtype=torch.int64),
        torch.tensor(lambdas, dtype=torch.float64),
        gamma=gamma,
        bootstrap_N=torch.tensor(boots, dtype=torch.float64),
    )
    assert got.tolist() == pytest.approx([expected[i][t] for i, t in flat], rel=1e-9, abs=1e-12)


def test_gae_refuses_a_reward_that_no_action_got() -> None:
    with pytest.raises(ValueError, match="a token that is no action has a reward"):
        gae(torch.ones(1), torch.ones(1), torch.tensor([False]), torch.tensor([0]), torch.ones(1))


def test_adaptive_lambda_by_hand() -> None:
    """alpha 0.05: l = 10 gives 1 - 2 = -1, limited to 0; 20 gives 0; 40 gives 1 - 1/2; 0 is -inf, limited too.
    alpha 1.5, l = 2: 1 - 1/3."""
    decay, share = adaptive_lambda(torch.tensor([10, 20, 40, 0]), 0.05)
    assert decay.tolist() == pytest.approx([0, 0, 0.5, 0], abs=1e-12) and share.item() == 0.5
    assert adaptive_lambda(torch.tensor([2]), 1.5)[0].item() == pytest.approx(2 / 3)


def test_overlong_penalty_by_hand() -> None:
    """100 and 20: 0 up to 80, -0.05 a token, -1 from 100 on."""
    got = [overlong_penalty(n, max_length=100, cache=20) for n in (0, 80, 81, 90, 100, 101, 500)]
    assert got == pytest.approx([0, 0, -0.05, -0.5, -1, -1, -1])
    with pytest.raises(ValueError, match="need 0 < cache <= max_length"):
        overlong_penalty(1, max_length=10, cache=0)


def test_tool_penalty() -> None:
    assert [tool_penalty(4, 1), tool_penalty(2, 0), tool_penalty(0, 0)] == [0.25, 0.0, 0.5]


def test_resample_on_correct_by_hand() -> None:
    """Six positives and two negatives, keep four: 4 * 6/8 = 3 positives with the lowest penalties and one negative."""
    positive = [True, False, True, True, True, False, True, True]
    penalties = [0.9, 0.0, 0.1, 0.5, 0.3, 0.0, 0.2, 0.7]
    chosen = {resample_on_correct(positive, penalties, keep=4, seed=seed) for seed in range(30)}
    assert chosen == {(1, 2, 4, 6), (2, 4, 5, 6)}
    assert resample_on_correct([True] * 4, [0.0] * 4, keep=2, seed=0) == ()
    assert resample_on_correct([False] * 4, [0.0] * 4, keep=2, seed=0) == ()
    with pytest.raises(ValueError, match="cannot keep 5 of 4 rollouts"):
        resample_on_correct([True] * 4, [0.0] * 4, keep=5, seed=0)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.booleans(), st.sampled_from([0.0, 0.5, 1.0])), min_size=4, max_size=16), st.integers(0, 99)
)
def test_resample_on_correct_properties(rows: list[tuple[bool, float]], seed: int) -> None:
    positive, penalties = [p for p, _ in rows], [x for _, x in rows]
    keep = len(rows) // 2
    chosen = resample_on_correct(positive, penalties, keep=keep, seed=seed)
    assert chosen == resample_on_correct(positive, penalties, keep=keep, seed=seed)
    if len(set(positive)) < 2:
        assert chosen == ()
        return
    assert len(set(chosen)) == len(chosen) == keep and list(chosen) == sorted(chosen)
    good = [i for i in chosen if positive[i]]
    assert 0 < len(good) < keep
    assert abs(len(good) - keep * sum(positive) / len(rows)) <= 1
    left = [penalties[i] for i in range(len(rows)) if positive[i] and i not in chosen]
    assert max(penalties[i] for i in good) <= min(left, default=math.inf)


def test_resample_on_correct_breaks_ties_at_random() -> None:
    """Equal penalties: each of four positives is kept about half of the time, and so is each negative."""
    rows = [True, True, True, True, False, False, False, False]
    counts = Counter(i for seed in range(400) for i in resample_on_correct(rows, [0.5] * 8, keep=4, seed=seed))
    assert all(150 < counts[i] < 250 for i in range(8))
