"""Objectives against hand-made tables, a scalar float64 reference, gradcheck and identities."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from losses import DIS, LossInputs, Objective, PolicyGradient, PPOClip, Terms
from losses.ops import neutral, reduce_terms

NAN, INF = math.nan, math.inf


def inputs_of(
    logprobs: list[float],
    behaviour: list[float],
    advantages: list[float],
    mask: list[bool] | None = None,
    old: list[float] | None = None,
) -> LossInputs:
    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64)

    n = len(logprobs)
    return LossInputs(
        logprobs_T=column(logprobs).requires_grad_(),
        entropy_T=torch.zeros(n, dtype=torch.float64),
        behaviour_T=column(behaviour),
        advantages_T=column(advantages),
        mask_T=torch.tensor(mask if mask is not None else [True] * n),
        staleness_T=torch.zeros(n, dtype=torch.int32),
        segment_T=torch.zeros(n, dtype=torch.int64),
        group_T=torch.zeros(n, dtype=torch.int64),
        temperature_T=torch.ones(n),
        old_T=None if old is None else column(old),
    )


def loss_and_gradient(objective: Objective, inputs: LossInputs) -> tuple[float, list[float]]:
    used = neutral(inputs)
    sums = reduce_terms(objective(used), used)
    (gradient,) = torch.autograd.grad(sums.loss, inputs.logprobs_T)
    return sums.loss.item(), gradient.tolist()


def log_of(ratio: float, base: float) -> float:
    return base + math.log(ratio)


# Five tokens: (ratio, advantage, behaviour logprob). Trainer logprob = behaviour + log ratio.
RATIOS = [1.0, 1.2, 1.5, 0.5, 0.9]
ADVANTAGES = [1.0, -2.0, 0.5, -1.0, 2.0]
BEHAVIOUR = [-1.0, -2.0, -0.7, -0.3, -1.5]
LOGPROBS = [log_of(r, b) for r, b in zip(RATIOS, BEHAVIOUR, strict=True)]


def test_dis_table() -> None:
    """Band (0.8, 1.28): tokens 2 (1.5) and 3 (0.5) lose everything.

    weights r A:   1*1 = 1,  1.2*-2 = -2.4,  0,  0,  0.9*2 = 1.8
    logprobs:      -1,  -2 + ln 1.2 = -1.8176784432,  .,  .,  -1.5 + ln 0.9 = -1.6053605157
    loss = -(1*-1 + -2.4*-1.8176784432 + 1.8*-1.6053605157) = 1 - 4.3624282637 + 2.8896489282 = -0.4727793355
    gradient = -weight
    """
    loss, gradient = loss_and_gradient(DIS(low=0.8, high=1.28), inputs_of(LOGPROBS, BEHAVIOUR, ADVANTAGES))
    assert loss == pytest.approx(-0.4727793355, abs=1e-9)
    assert gradient == pytest.approx([-1.0, 2.4, 0.0, 0.0, -1.8], abs=1e-12)


def test_ppo_table() -> None:
    """Clip to [0.8, 1.28].

    r = 1.0, A = 1     min(1, 1) = 1                       gradient -rA = -1
    r = 1.2, A = -2    inside: -2.4                         2.4
    r = 1.5, A = 0.5   min(0.75, 0.64) = 0.64               0, clipped
    r = 0.5, A = -1    min(-0.5, -0.8) = -0.8               0, clipped
    r = 0.9, A = 2     1.8                                  -1.8
    loss = -(1 - 2.4 + 0.64 - 0.8 + 1.8) = -0.24
    """
    loss, gradient = loss_and_gradient(PPOClip(), inputs_of(LOGPROBS, BEHAVIOUR, ADVANTAGES))
    assert loss == pytest.approx(-0.24, abs=1e-9)
    assert gradient == pytest.approx([-1.0, 2.4, 0.0, 0.0, -1.8], abs=1e-12)


def test_ppo_keeps_the_restoring_gradient() -> None:
    """r = 1.5 with A < 0 and r = 0.5 with A > 0 are not clipped: loss 1.5*2 - 0.5*3 = 1.5, gradient -rA."""
    behaviour = [-1.0, -1.0]
    logprobs = [log_of(1.5, -1.0), log_of(0.5, -1.0)]
    loss, gradient = loss_and_gradient(PPOClip(), inputs_of(logprobs, behaviour, [-2.0, 3.0]))
    assert loss == pytest.approx(1.5, abs=1e-12)
    assert gradient == pytest.approx([3.0, -1.5], abs=1e-12)


def test_policy_gradient_table() -> None:
    """loss = -sum A logp = 1*1 - 2*1.8176784432 + 0.5*(0.7 - ln 1.5) - (0.3 + ln 2) + 2*1.6053605157

    = 1 - 3.6353568864 + 0.1472674459 - 0.9931471806 + 3.2107210313 = -0.2705155897; gradient -A.
    """
    loss, gradient = loss_and_gradient(PolicyGradient(), inputs_of(LOGPROBS, BEHAVIOUR, ADVANTAGES))
    assert loss == pytest.approx(-0.2705155897, abs=1e-9)
    assert gradient == pytest.approx([-a for a in ADVANTAGES], abs=1e-12)


def scalar_reference(objective: Objective, logprob: float, behaviour: float, advantage: float) -> tuple[float, float]:
    """Loss and its derivative of one token, in plain Python."""
    log = max(-20.0, min(20.0, logprob - behaviour))
    saturated = abs(logprob - behaviour) > 20.0
    ratio = math.exp(log)
    match objective:
        case DIS(low=low, high=high):
            weight = ratio * advantage if low < ratio < high and not saturated else 0.0
            return -weight * logprob, -weight
        case PPOClip(clip_low=low, clip_high=high):
            bounded = max(1 - low, min(1 + high, ratio))
            if ratio * advantage <= bounded * advantage:
                return -ratio * advantage, 0.0 if saturated else -ratio * advantage
            return -bounded * advantage, 0.0
    return -advantage * logprob, -advantage


numbers = st.floats(-3, 3)
token = st.tuples(st.floats(-30, 0), st.floats(-30, 0) | st.floats(-2, 0), numbers)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(token, min_size=1, max_size=6),
    st.sampled_from([DIS(), DIS(low=0.2, high=INF), PPOClip(), PolicyGradient()]),
)
def test_gradient_equals_a_scalar_reference(tokens: list[tuple[float, float, float]], objective: Objective) -> None:
    logprobs, behaviour, advantages = (list(column) for column in zip(*tokens, strict=True))
    loss, gradient = loss_and_gradient(objective, inputs_of(logprobs, behaviour, advantages))
    expected = [scalar_reference(objective, *t) for t in tokens]
    assert loss == pytest.approx(math.fsum(value for value, _ in expected), rel=1e-9, abs=1e-9)
    assert gradient == pytest.approx([derivative for _, derivative in expected], rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("objective", [PPOClip(), PolicyGradient()])
def test_gradcheck(objective: Objective) -> None:
    inputs = inputs_of(LOGPROBS, BEHAVIOUR, ADVANTAGES)

    def loss(logprobs_T: Tensor) -> Tensor:
        return objective(replace(inputs, logprobs_T=logprobs_T)).loss_T

    assert torch.autograd.gradcheck(loss, inputs.logprobs_T)


def test_gradcheck_dis_with_its_weight_as_a_constant() -> None:
    inputs = inputs_of(LOGPROBS, BEHAVIOUR, ADVANTAGES)
    loss_T = DIS()(inputs).loss_T
    (gradient,) = torch.autograd.grad(loss_T.sum(), inputs.logprobs_T)
    weight_T = (loss_T / inputs.logprobs_T).detach()
    assert torch.autograd.gradcheck(lambda logprobs_T: weight_T * logprobs_T, inputs.logprobs_T)
    torch.testing.assert_close(gradient, weight_T, rtol=1e-12, atol=0)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("ratio", [0.5, 2.0])
def test_dis_bounds_are_open_for_both_signs(ratio: float, advantage: float) -> None:
    """exp(log 2) and exp(-log 2) are exact in float64, so the ratio is the bound itself."""
    inputs = inputs_of([math.log(ratio)], [0.0], [advantage])
    terms = DIS(low=0.5, high=2.0)(inputs)
    assert terms.diagnostics_T["ratio"].item() == ratio
    assert terms.diagnostics_T["masked"].item() == 1.0
    assert loss_and_gradient(DIS(low=0.5, high=2.0), inputs)[1] == [0.0]
    inside = inputs_of([math.log(ratio) * (1 - 1e-9)], [0.0], [advantage])
    assert loss_and_gradient(DIS(low=0.5, high=2.0), inside)[1] != [0.0]


@pytest.mark.parametrize("objective", [DIS(), PPOClip(), DIS(low=0.0, high=INF)])
def test_on_policy_equals_reinforce(objective: Objective) -> None:
    inputs = inputs_of(BEHAVIOUR, BEHAVIOUR, ADVANTAGES)
    assert loss_and_gradient(objective, inputs)[1] == loss_and_gradient(PolicyGradient(), inputs)[1]


def test_dis_without_bounds_is_plain_importance_sampling() -> None:
    """Gradient of -sum A exp(logp - behaviour), written down directly."""
    inputs = inputs_of(LOGPROBS, BEHAVIOUR, ADVANTAGES)
    plain = -(inputs.advantages_T * (inputs.logprobs_T - inputs.behaviour_T).exp()).sum()
    (expected,) = torch.autograd.grad(plain, inputs.logprobs_T)
    _, gradient = loss_and_gradient(DIS(low=-1.0, high=INF), inputs)
    assert gradient == pytest.approx(expected.tolist(), rel=1e-12)


def test_ppo_prefers_the_old_pass() -> None:
    """old = logprobs: ratio 1 whatever behaviour says, so nothing is clipped and the gradient is -A."""
    inputs = inputs_of(LOGPROBS, BEHAVIOUR, ADVANTAGES, old=LOGPROBS)
    assert loss_and_gradient(PPOClip(), inputs)[1] == pytest.approx([-a for a in ADVANTAGES], rel=1e-12)


OBJECTIVES = [DIS(), DIS(low=0.0, high=INF), PPOClip(), PolicyGradient()]


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("advantage", [1.0, INF])
def test_masked_and_non_finite_tokens_have_zero_gradient(objective: Objective, bad: float, advantage: float) -> None:
    """Token 1 is masked (and bad), token 2 has a bad behaviour logprob: the rest is as if they were not there."""
    whole = inputs_of(
        [-1.0, -1.0, -1.0, -0.5], [-1.1, bad, bad, -0.4], [1.0, advantage, 2.0, -1.0], [True, False, True, True]
    )
    alone = inputs_of([-1.0, -0.5], [-1.1, -0.4], [1.0, -1.0])
    loss, gradient = loss_and_gradient(objective, whole)
    expected_loss, expected = loss_and_gradient(objective, alone)
    assert gradient == [expected[0], 0.0, 0.0, expected[1]]
    assert loss == expected_loss
    used = neutral(whole)
    sums, rest = reduce_terms(objective(used), used), reduce_terms(objective(alone), alone)
    assert sums.tokens.item() == 2
    assert {n: v.item() for n, v in sums.diagnostics.items()} == {n: v.item() for n, v in rest.diagnostics.items()}


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_all_masked_is_finite_and_zero(objective: Objective) -> None:
    inputs = inputs_of([-1.0, -2.0], [NAN, 0.0], [INF, 1.0], [False, False])
    loss, gradient = loss_and_gradient(objective, inputs)
    assert loss == 0.0 and gradient == [0.0, 0.0]
    assert reduce_terms(objective(neutral(inputs)), neutral(inputs)).tokens.item() == 0


@pytest.mark.parametrize("objective", [DIS(low=0.0, high=INF), PPOClip()])
def test_huge_log_ratio_has_no_gradient(objective: Objective) -> None:
    """A log ratio of 30 with A < 0, which no PPO clip bounds: finite value, zero gradient."""
    loss, gradient = loss_and_gradient(objective, inputs_of([-1.0], [-31.0], [-1.0]))
    assert math.isfinite(loss) and gradient == [0.0]


def test_diagnostics_are_summed_over_counted_tokens() -> None:
    """Ratios 1, 1.2, 1.5, 0.5, 0.9 without token 3: sum 4.6; outside (0.8, 1.28): only 1.5, one token."""
    used = neutral(inputs_of(LOGPROBS, BEHAVIOUR, ADVANTAGES, [True, True, True, False, True]))
    sums = reduce_terms(DIS()(used), used)
    assert sums.tokens.item() == 4
    assert sums.diagnostics["ratio"].item() == pytest.approx(4.6, abs=1e-12)
    assert sums.diagnostics["masked"].item() == 1.0


@pytest.mark.parametrize("make", [lambda: DIS(low=1.3), lambda: DIS(low=NAN), lambda: PPOClip(clip_low=1.5)])
def test_impossible_bounds_are_refused(make: object) -> None:
    with pytest.raises(ValueError, match=r"must be below|need 0"):
        make()  # type: ignore[operator]


def test_importing_losses_needs_no_torch() -> None:
    code = "import sys, losses; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", ["loss_T", "mean ratio"])
def test_an_objective_that_averages_by_itself_is_refused(name: str) -> None:
    inputs = inputs_of([0.0, 0.0], [0.0, 0.0], [1.0, 1.0])
    good, scalar = inputs.logprobs_T, inputs.logprobs_T.mean()
    terms = Terms(loss_T=scalar) if name == "loss_T" else Terms(loss_T=good, diagnostics_T={name: scalar})
    with pytest.raises(ValueError, match=rf"{name} of shape \(\) for 2 tokens: return one value per token"):
        reduce_terms(terms, inputs)
