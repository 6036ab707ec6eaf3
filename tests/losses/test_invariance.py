"""What holds for every objective: tokens that do not count, huge ratios and packing change nothing."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from losses import Objective, WholeGroups, reads
from losses.inputs import LossInputs
from losses.ops import neutral, reduce_terms
from tests.losses.tables import INF, NAN, OBJECTIVES, inputs_of, label, loss_and_gradient


class Rollout(NamedTuple):
    group: int
    columns: dict[str, list[float]]


NAMES = ("logprobs", "behaviour", "advantages", "old", "ref", "teacher", "staleness", "mask")


def microbatch(rollouts: list[Rollout], with_old: bool) -> LossInputs:
    columns = {name: list(itertools.chain(*(r.columns[name] for r in rollouts))) for name in NAMES}
    mask, staleness = [bool(x) for x in columns.pop("mask")], [int(x) for x in columns.pop("staleness")]
    if not with_old:
        del columns["old"]
    sizes = [len(r.columns["mask"]) for r in rollouts]
    segments = [i for i, size in enumerate(sizes) for _ in range(size)]
    groups = [r.group for r, size in zip(rollouts, sizes, strict=True) for _ in range(size)]
    return inputs_of(**columns, mask=mask, staleness=staleness, segments=segments, groups=groups)


logprob = st.floats(-2, 0) | st.floats(-30, 0)
given_logprob = logprob | st.sampled_from([NAN, INF, -INF])


@st.composite
def steps(draw: st.DrawFn) -> list[Rollout]:
    rollouts = []
    for group in draw(st.lists(st.integers(0, 2), min_size=2, max_size=6)):
        size, advantage = draw(st.integers(1, 4)), draw(st.sampled_from([-1.5, 0.0, 0.5, 2.0]))
        columns = {name: [draw(logprob) for _ in range(size)] for name in ("logprobs", "old", "ref", "teacher")}
        columns["behaviour"] = [draw(given_logprob) for _ in range(size)]
        columns["advantages"] = [advantage] * size
        columns["staleness"] = [draw(st.integers(0, 4)) for _ in range(size)]
        columns["mask"] = [draw(st.sampled_from([True, True, True, False])) for _ in range(size)]
        rollouts.append(Rollout(group, columns))
    return rollouts


def outcome(
    objective: Objective, pieces: list[list[int]], rollouts: list[Rollout], with_old: bool, means: bool
) -> tuple[dict[int, list[float]], dict[int, list[float]], Counter[str], list[int]]:
    """Loss per token and gradient of each rollout, sums of everything else, over microbatches."""
    values, gradients, sums, counts = {}, {}, Counter[str](), [0, 0]
    for piece in pieces:
        inputs = microbatch([rollouts[i] for i in piece], with_old)
        used = neutral(inputs)
        terms = objective(used)
        total = reduce_terms(terms, used, rollout_means=means)
        (gradient,) = torch.autograd.grad(total.loss, inputs.logprobs_T)
        start = 0
        loss_T = terms.loss_T.where(used.mask_T, 0.0)
        for i in piece:
            end = start + len(rollouts[i].columns["mask"])
            values[i], gradients[i] = loss_T[start:end].tolist(), gradient[start:end].tolist()
            start = end
        sums.update({name: value.item() for name, value in total.diagnostics.items()} | {"loss": total.loss.item()})
        counts = [a + b.item() for a, b in zip(counts, (total.tokens, total.survivors), strict=True)]
    return values, gradients, sums, counts


@pytest.mark.parametrize("objective", OBJECTIVES, ids=label)
@settings(max_examples=8, deadline=None)
@given(rollouts=steps(), with_old=st.booleans(), means=st.booleans(), data=st.data())
def test_packing_changes_nothing(
    objective: Objective, rollouts: list[Rollout], with_old: bool, means: bool, data: st.DataObject
) -> None:
    """All rollouts in one microbatch, and permuted over several: each token has the same loss and gradient to the bit,
    all sums are the same to rounding."""
    order = data.draw(st.permutations(range(len(rollouts))))
    pieces: dict[int, list[int]] = defaultdict(list)
    where = data.draw(st.lists(st.integers(0, 2), min_size=len(rollouts), max_size=len(rollouts)))
    for i in order:
        pieces[rollouts[i].group if reads(objective, WholeGroups) else where[i]].append(i)
    whole = outcome(objective, [list(range(len(rollouts)))], rollouts, with_old, means)
    split = outcome(objective, list(pieces.values()), rollouts, with_old, means)
    if reads(objective, WholeGroups):  # pairs are summed over in another order
        for a, b in zip(whole[:2], split[:2], strict=True):
            assert all(a[i] == pytest.approx(b[i], rel=1e-12, abs=1e-15) for i in a)
    else:
        assert whole[:2] == split[:2]
    assert dict(whole[2]) == pytest.approx(dict(split[2]), rel=1e-12, abs=1e-12)
    assert whole[3] == split[3]


@pytest.mark.parametrize("objective", OBJECTIVES, ids=label)
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("advantage", [1.0, INF])
def test_tokens_that_do_not_count_have_zero_gradient(objective: Objective, bad: float, advantage: float) -> None:
    """Token 1 is masked and bad in every column, token 2 has a bad behaviour, 3 a bad reference, 4 a bad teacher
    logprob: the rest is as if they were not there."""
    whole = inputs_of(
        [-1.0, bad, -1.0, -1.0, -1.0, -0.5],
        [-1.1, bad, bad, -1.0, -1.0, -0.4],
        [1.0, advantage, 2.0, 2.0, 2.0, -1.0],
        [True, False, True, True, True, True],
        old=[-1.2, bad, -1.0, -1.0, -1.0, -0.6],
        ref=[-1.3, bad, -1.0, bad, -1.0, -0.7],
        teacher=[-0.9, bad, -1.0, -1.0, bad, -0.7],
        segments=[0, 0, 0, 1, 1, 1],
    )
    alone = inputs_of(
        [-1.0, -0.5],
        [-1.1, -0.4],
        [1.0, -1.0],
        old=[-1.2, -0.6],
        ref=[-1.3, -0.7],
        teacher=[-0.9, -0.7],
        segments=[0, 1],
    )
    loss, gradient = loss_and_gradient(objective, whole)
    expected_loss, expected = loss_and_gradient(objective, alone)
    assert gradient == [expected[0], 0.0, 0.0, 0.0, 0.0, expected[1]]
    assert loss == expected_loss
    used = neutral(whole)
    sums, rest = reduce_terms(objective(used), used), reduce_terms(objective(alone), alone)
    assert sums.tokens.item() == 2
    assert sums.survivors == rest.survivors
    assert {n: v.item() for n, v in sums.diagnostics.items()} == {n: v.item() for n, v in rest.diagnostics.items()}


@pytest.mark.parametrize("objective", OBJECTIVES, ids=label)
@pytest.mark.parametrize("means", [False, True])
def test_all_masked_is_finite_and_zero(objective: Objective, means: bool) -> None:
    columns = {name: [NAN, -1.0] for name in ("old", "ref", "teacher")}
    inputs = inputs_of([-1.0, -2.0], [NAN, 0.0], [INF, 1.0], [False, False], **columns)
    used = neutral(inputs)
    sums = reduce_terms(objective(used), used, rollout_means=means)
    assert sums.loss.item() == 0.0 and sums.tokens.item() == 0 and sums.survivors.item() == 0
    assert all(value.item() == 0.0 for value in sums.diagnostics.values())
    assert torch.autograd.grad(sums.loss, inputs.logprobs_T)[0].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("objective", OBJECTIVES, ids=label)
@pytest.mark.parametrize("advantage", [2.0, -2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("with_old", [False, True])
def test_huge_log_ratios_are_finite(
    objective: Objective, advantage: float, dtype: torch.dtype, with_old: bool
) -> None:
    """Log ratios of +-30 to every other policy and to each other, and infinite behaviour, in one rollout and two."""
    inputs = inputs_of(
        [-1.0, -31.0, -1.0, -0.5, -31.0],
        [-31.0, -1.0, -INF, INF, -61.0],
        [advantage] * 5,
        old=[-31.0, -1.0, -1.0, -1.0, -1.0] if with_old else None,
        ref=[-31.0, -1.0, -1.0, -1.0, -1.0],
        teacher=[-31.0, -1.0, -1.0, -1.0, -1.0],
        segments=[0, 0, 0, 1, 1],
    )
    floats = {n: v.detach().to(dtype) for n, v in vars(inputs).items() if v is not None and v.dtype == torch.float64}
    inputs = replace(inputs, **floats)
    inputs.logprobs_T.requires_grad_()
    used = neutral(inputs)
    sums = reduce_terms(objective(used), used)
    (gradient,) = torch.autograd.grad(sums.loss, inputs.logprobs_T)
    assert sums.tokens.item() == 3 and math.isfinite(sums.loss.item())
    assert gradient.isfinite().all() and gradient[2:4].tolist() == [0.0, 0.0]
    assert all(math.isfinite(value.item()) for value in sums.diagnostics.values())
    assert gradient.abs().max() < 1e3, "nothing beyond the limit may push with e^20"
