"""Metrics of a step from hand-made tokens; quantiles against numpy; any split adds up to the same."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from actors.measures import measure, policy_metrics, spread
from actors.types import GroupMeta, PayloadHandle, Taken
from losses import DIS, LossInputs, PolicyGradient
from losses.inputs import Objective
from losses.ops import neutral, reduce_terms


def inputs(logprobs: list[float], behaviour: list[float], staleness: list[int], **columns: Any) -> LossInputs:
    n = len(logprobs)
    defaults: dict[str, Tensor] = {
        "entropy_T": torch.ones(n),
        "advantages_T": torch.ones(n),
        "mask_T": torch.ones(n, dtype=torch.bool),
        "segment_T": torch.zeros(n, dtype=torch.int64),
        "group_T": torch.zeros(n, dtype=torch.int64),
        "temperature_T": torch.ones(n),
    }
    return neutral(
        LossInputs(
            logprobs_T=torch.tensor(logprobs, dtype=torch.float64),
            behaviour_T=torch.tensor(behaviour, dtype=torch.float64),
            staleness_T=torch.tensor(staleness, dtype=torch.int32),
            **{**defaults, **columns},
        )
    )


def sums_of(given: LossInputs, objective: Objective, start_T: Tensor | None) -> dict[str, Tensor]:
    terms = objective(given)
    return measure(given, terms, reduce_terms(terms, given), start_T)


def test_lag_masked_shares_and_correlation_by_hand() -> None:
    """Log ratios log 2, 0, -log 2, log 1.1 and one masked token. Band (0.8, 1.28): the first and third are dropped.

    k1 = -mean log ratio = -(log 1.1) / 4; k3 = mean(ratio - 1 - log ratio) = (1 - log 2 + 0 - 1/2 + log 2 + 0.1 -
    log 1.1) / 4. Staleness 0, 0, 3, 20: masked share 1/2 of age 0, 1 of ages 3..4, 0 beyond 17.
    """
    half = math.log(2)
    given = inputs(
        [-1 + half, -2, -3 - half, -4 + math.log(1.1), -9],
        [-1, -2, -3, -4, -1],
        [0, 0, 3, 20, 0],
        mask_T=torch.tensor([True, True, True, True, False]),
    )
    metrics = policy_metrics(sums_of(given, DIS(), given.logprobs_T))
    assert metrics["policy/lag_kl_k1"] == pytest.approx(-math.log(1.1) / 4)
    assert metrics["policy/lag_kl"] == pytest.approx((0.6 - math.log(1.1)) / 4)
    assert metrics["policy/masked"] == 0.5
    ages = {name.removeprefix("policy/masked_age_"): v for name, v in metrics.items() if "masked_age" in name}
    assert {name: value for name, value in ages.items() if not math.isnan(value)} == {"0": 0.5, "3_4": 1, "17_up": 0}
    assert ages.keys() == {"0", "1", "2", "3_4", "5_8", "9_16", "17_up"}
    # DIS weighs the kept tokens by their ratio: 1 and 1.1 of four; the plain gradient has none, so 2, 1, 0.5 and 1.1.
    assert metrics["policy/ess"] == pytest.approx(2.1**2 / (4 * 2.21))
    plain = policy_metrics(sums_of(given, PolicyGradient(), given.logprobs_T))
    assert plain["policy/ess"] == pytest.approx(4.6**2 / (4 * (4 + 1 + 0.25 + 1.21)))
    now, then = given.logprobs_T[:4].numpy(), given.behaviour_T[:4].numpy()
    assert metrics["policy/lag_pearson"] == pytest.approx(np.corrcoef(now, then)[0, 1])
    assert metrics["staleness/mean"] == 23 / 4 and metrics["perf/trained_tokens"] == 4


def test_later_updates_count_in_the_ratios_but_not_in_the_lag() -> None:
    first = inputs([-1.0, -2.0], [-1.5, -2.0], [0, 0])
    later = inputs([-1.0, -1.0], [-4.0, -4.0], [0, 0])
    one = sums_of(first, PolicyGradient(), first.logprobs_T)
    both = {name: value + one[name] for name, value in sums_of(later, PolicyGradient(), None).items()}
    for name in ("policy/lag_kl", "policy/lag_kl_k1", "policy/lag_pearson"):
        assert policy_metrics(both)[name] == policy_metrics(one)[name]
    assert policy_metrics(both)["policy/ratio_p99"] == pytest.approx(math.exp(3), rel=0.1)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-25, 25), min_size=1, max_size=50), st.integers(0, 50))
def test_quantiles_are_those_of_the_sorted_ratios_however_the_tokens_are_split(logs: list[float], cut: int) -> None:
    """To the width of a class, 5.2 % of the log ratio; below 1e-4 it counts as 0, beyond 20 as 20."""
    parts = [part for part in (logs[:cut], logs[cut:]) if part]
    sums: dict[str, Tensor] = {}
    for part in parts:
        given = inputs(part, [0.0] * len(part), [0] * len(part))
        more = sums_of(given, PolicyGradient(), given.logprobs_T)
        sums = {name: value + sums.get(name, 0) for name, value in more.items()}
    ordered, found = sorted(logs), policy_metrics(sums)
    for name, share in (("ratio_p01", 0.01), ("ratio_p50", 0.5), ("ratio_p99", 0.99)):
        want = ordered[max(0, math.ceil(share * len(logs) - 1e-9) - 1)]
        want = max(-20.0, min(20.0, want))
        assert math.log(found[f"policy/{name}"]) == pytest.approx(want, rel=0.053, abs=1.1e-4)


def test_a_logprob_that_is_no_number_does_not_hide_behind_an_error_of_the_metrics() -> None:
    given = inputs([math.nan, -1.0], [-1.0, -1.0], [0, 0])
    sums = sums_of(given, PolicyGradient(), given.logprobs_T)
    assert sums["ratios"].sum() == 2 and math.isnan(policy_metrics(sums)["policy/lag_kl"])


def test_age_and_spread_by_hand() -> None:
    """Step 9. Group one: versions 5..6 with advantage 1, 8..8 with -1; group two: 7..9 with 0, and one without an
    action. Ages 4 and 1 of those with an advantage; versions from 5 to 9."""
    metas = [
        GroupMeta(
            ticket=i,
            attempt=0,
            row=i,
            rewards=np.zeros(2, np.float32),
            lengths=np.ones(2, np.int32),
            actions=np.ones(2, np.int32),
            oldest=np.array(oldest, np.int32),
            newest=np.array(newest, np.int32),
            truncated=np.zeros(2, bool),
            handle=PayloadHandle(host="", path="", nbytes=0),
        )
        for i, (oldest, newest) in enumerate([([5, 8], [6, 8]), ([7, -1], [9, -1])])
    ]
    taken = Taken(step=9, groups=tuple(metas), max_staleness=None, metrics={}, last=False)
    assert spread(taken, [np.array([1.0, -1.0]), np.array([0.0, 0.0])]) == {
        "staleness/spread": 4,
        "staleness/age_positive": 4,
        "staleness/spread_positive": 1,
        "staleness/age_negative": 1,
        "staleness/spread_negative": 0,
    }
    nothing = spread(Taken(step=9, groups=(), max_staleness=None, metrics={}, last=True), [])
    assert len(nothing) == 5 and all(math.isnan(value) for value in nothing.values())
