"""Objectives against hand-made tables, gradcheck and identities."""

from __future__ import annotations

import math
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from losses import (
    CISPO,
    DIS,
    DPPO,
    GSPO,
    TOPR,
    Corrected,
    Corrections,
    Distill,
    DistillForward,
    Kimi15,
    KLPenalty,
    Objective,
    OnlineDPO,
    PolicyGradient,
    PPOClip,
    ReadsOld,
    ReadsReference,
    ReadsTeacher,
    Terms,
    WholeGroups,
    reads,
)
from losses.ops import neutral, reduce_terms
from tests.losses.tables import (
    ADVANTAGES,
    ALL_CORRECTIONS,
    BASES,
    BEHAVIOUR,
    INF,
    KLS,
    LOGPROBS,
    NAN,
    OBJECTIVES,
    SEGMENTS,
    inputs_of,
    label,
    log_of,
    loss_and_gradient,
)


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


def test_ppo_dual_clip_table() -> None:
    """Dual clip 1.6, all A = -1: r = 1.5 keeps its gradient, r = 2 is bounded at 1.6, r = 0.5 clips at 0.8.

    loss = 1.5 + 1.6 + 0.8 = 3.9; with r exactly 2 = c the gradient is whole, not half.
    """
    behaviour, ratios = [0.0, 0.0, 0.0], [1.5, 2.0, 0.5]
    logprobs = [math.log(r) for r in ratios]
    loss, gradient = loss_and_gradient(PPOClip(dual_clip=1.6), inputs_of(logprobs, behaviour, [-1.0] * 3))
    assert loss == pytest.approx(3.9, abs=1e-12)
    assert gradient == pytest.approx([1.5, 0.0, 0.0], abs=1e-12)
    assert loss_and_gradient(PPOClip(dual_clip=2.0), inputs_of(logprobs, behaviour, [-1.0] * 3))[1][1] == 2.0
    positive = loss_and_gradient(PPOClip(clip_high=2.0, dual_clip=1.6), inputs_of(logprobs, behaviour, [1.0] * 3))[1]
    assert positive == pytest.approx([-1.5, -2.0, -0.5], abs=1e-12)


def test_gspo_table() -> None:
    """Rollouts (1, 1.2) and (1.5, 0.5, 0.9); clip to [0.95, 1.05].

    s = sqrt(1.2) = 1.0954451150 and 0.675^(1/3) = 0.8772053215
    A =  1     min(1.0954, 1.05)          =  1.05           clipped
    A = -2     -2 * 1.0954451150          = -2.1908902300
    A =  0.5   min(0.4386, 0.475)         =  0.4386026607
    A = -1     min(-0.8772, -0.95)        = -0.95           clipped
    A =  2     2 * 0.8772053215           =  1.7544106429
    loss = -(1.05 - 2.1908902300 + 0.4386026607 - 0.95 + 1.7544106429) = -0.1021230736
    through the mean: -s/2 * -2 = 1.0954451150 twice; -s/3 * (0.5 + 2) = -0.7310044346 three times
    token form: each token its own -s A where not clipped
    """
    inputs = inputs_of(LOGPROBS, BEHAVIOUR, ADVANTAGES, segments=SEGMENTS)
    loss, gradient = loss_and_gradient(GSPO(clip_low=0.05, clip_high=0.05), inputs)
    assert loss == pytest.approx(-0.1021230736, abs=1e-9)
    assert gradient == pytest.approx([1.0954451150] * 2 + [-0.7310044346] * 3, abs=1e-9)
    loss, gradient = loss_and_gradient(GSPO(clip_low=0.05, clip_high=0.05, level="token"), inputs)
    assert loss == pytest.approx(-0.1021230736, abs=1e-9)
    assert gradient == pytest.approx([0.0, 2.1908902300, -0.4386026607, 0.0, -1.7544106429], abs=1e-9)


def test_dis_one_sided_table() -> None:
    """Band (0.8, 1.28); r = 1.5 with A < 0 and r = 0.5 with A > 0 stay, so the gradient is -rA throughout.

    With the signs of `ADVANTAGES` both would be pushed further out and are dropped, as in the two-sided band.
    """
    restoring = [1.0, -2.0, -0.5, 1.0, 2.0]
    gradient = loss_and_gradient(DIS(one_sided=True), inputs_of(LOGPROBS, BEHAVIOUR, restoring))[1]
    assert gradient == pytest.approx([-1.0, 2.4, 0.75, -0.5, -1.8], abs=1e-12)
    gradient = loss_and_gradient(DIS(one_sided=True), inputs_of(LOGPROBS, BEHAVIOUR, ADVANTAGES))[1]
    assert gradient == pytest.approx([-1.0, 2.4, 0.0, 0.0, -1.8], abs=1e-12)


@pytest.mark.parametrize("with_old", [False, True])
def test_dis_one_sided_has_the_gradient_of_ppo_against_behaviour(with_old: bool) -> None:
    """-rA where neither drops the token, to the bit, whether or not there was a pass at the start of the step."""
    inputs = inputs_of(LOGPROBS, BEHAVIOUR, ADVANTAGES)
    swapped = replace(inputs, advantages_T=-inputs.advantages_T)
    old_T = inputs.logprobs_T.detach() if with_old else None
    for some in (inputs, swapped):
        wanted = loss_and_gradient(PPOClip(clip_low=0.2, clip_high=0.28), some)[1]
        one_sided = DIS(low=0.8, high=1.28, one_sided=True)
        assert loss_and_gradient(one_sided, replace(some, old_T=old_T))[1] == wanted


def test_dis_not_detached_table() -> None:
    """Gradient -rA (1 + log pi) where the detached one is -rA.

    -1 * (1 - 1) = 0;  2.4 * (1 - 1.8176784432) = -1.9624282637;  0;  0;  -1.8 * (1 - 1.6053605157) = 1.0896489282
    """
    inputs = inputs_of(LOGPROBS, BEHAVIOUR, ADVANTAGES)
    loss, gradient = loss_and_gradient(DIS(detach=False), inputs)
    assert loss == pytest.approx(-0.4727793355, abs=1e-9)
    assert gradient == pytest.approx([0.0, -1.9624282637, 0.0, 0.0, 1.0896489282], abs=1e-9)


def test_dis_bands_of_the_paper() -> None:
    """Mathematics with tools 1 - 0.3 to 1 + 5, coding 1 - 0.8 to 1 + 3."""
    assert (DIS.MATH, DIS.CODING) == ((0.7, 6.0), (0.2, 4.0))


def test_cispo_table() -> None:
    """Cap 1.28: weights 1, 1.2, 1.28, 0.5, 0.9, times A: 1, -2.4, 0.64, -0.5, 1.8; gradient the negative.

    loss = 1 - 2.4*1.8176784432 + 0.64*0.2945348919 - 0.5*0.9931471806 + 1.8*1.6053605157
         = 1 - 4.3624282637 + 0.1885023308 - 0.4965735903 + 2.8896489282 = -0.7808505950
    With the lower bound 0.8 the fourth weight is 0.8.
    """
    inputs = inputs_of(LOGPROBS, BEHAVIOUR, ADVANTAGES)
    loss, gradient = loss_and_gradient(CISPO(high=1.28), inputs)
    assert loss == pytest.approx(-0.7808505950, abs=1e-9)
    assert gradient == pytest.approx([-1.0, 2.4, -0.64, 0.5, -1.8], abs=1e-12)
    assert loss_and_gradient(CISPO(high=1.28, low=0.8), inputs)[1] == pytest.approx([-1.0, 2.4, -0.64, 0.8, -1.8])
    with_old = inputs_of(LOGPROBS, [-9.0] * 5, ADVANTAGES, old=BEHAVIOUR)
    assert loss_and_gradient(CISPO(high=1.28), with_old) == (loss, gradient)


def test_topr_table() -> None:
    """Positive advantages weigh 1. Negative ones: min(1.2, 1) = 1 and min(0.5, 1) = 0.5.

    By rollout: products 1 * 1.2 = 1.2 and 1.5 * 0.5 * 0.9 = 0.675, so 1 and 0.675.
    """
    inputs = inputs_of(LOGPROBS, BEHAVIOUR, ADVANTAGES, segments=SEGMENTS)
    assert loss_and_gradient(TOPR(), inputs)[1] == pytest.approx([-1.0, 2.0, -0.5, 0.5, -2.0], abs=1e-12)
    assert loss_and_gradient(TOPR(level="sequence"), inputs)[1] == pytest.approx(
        [-1.0, 2.0, -0.5, 0.675, -2.0], abs=1e-12
    )


def test_kimi_table() -> None:
    """tau 0.1: the policy gradient's -0.2705155897 + 0.05 * sum of squared logs.

    logs 0, 0.1823215568, 0.4054651081, -0.6931471806, -0.1053605157; squares 0, 0.0332411501, 0.1644019539,
    0.4804530139, 0.0111008383, sum 0.6891969562, times 0.05 = 0.0344598478; loss -0.2360557419.
    gradient -A + 0.1 log r
    """
    loss, gradient = loss_and_gradient(Kimi15(tau=0.1), inputs_of(LOGPROBS, BEHAVIOUR, ADVANTAGES))
    assert loss == pytest.approx(-0.2360557419, abs=1e-9)
    assert gradient == pytest.approx([-1.0, 2.0182321557, -0.4594534892, 0.9306852819, -2.0105360516], abs=1e-9)


def test_dppo_table() -> None:
    """Probabilities, from behaviour: .3679 -> .3679, .1353 -> .1624, .4966 -> .7449, .7408 -> .3704, .2231 -> .2008.

    d = 0, +.0271, +.2483, -.3704, -.0223. tv 0.2 drops token 2 (A > 0, d > 0.2) and 3 (A < 0, d < -0.2):
    loss = -(1 - 2.4 + 1.8) + 0.001 * 0.6891969562 = -0.3993108030, gradient -rA [kept] + 0.002 log r.
    With their signs turned both stay: -rA = 0.75 and -0.5. ipo 0.02 drops 1, 2, 3 and 4 whatever the sign.
    """
    square = [0.0, 0.0003646431, 0.0008109302, -0.0013862944, -0.0002107210]
    loss, gradient = loss_and_gradient(DPPO(), inputs_of(LOGPROBS, BEHAVIOUR, ADVANTAGES))
    assert loss == pytest.approx(-0.3993108030, abs=1e-9)
    assert gradient == pytest.approx([a + b for a, b in zip([-1, 2.4, 0, 0, -1.8], square, strict=True)], abs=1e-9)
    turned = inputs_of(LOGPROBS, BEHAVIOUR, [1.0, -2.0, -0.5, 1.0, 2.0])
    expected = [a + b for a, b in zip([-1, 2.4, 0.75, -0.5, -1.8], square, strict=True)]
    assert loss_and_gradient(DPPO(), turned)[1] == pytest.approx(expected, abs=1e-9)
    expected = [a + b for a, b in zip([-1, 2.4, 0, 0, -1.8], square, strict=True)]
    assert loss_and_gradient(DPPO(mask="ipo"), turned)[1] == pytest.approx(expected, abs=1e-9)
    expected = [a + b for a, b in zip([-1, 0, 0, 0, 0], square, strict=True)]
    assert loss_and_gradient(DPPO(mask="ipo", threshold=0.02), turned)[1] == pytest.approx(expected, abs=1e-9)


def test_online_dpo_table() -> None:
    """Group 7: rollouts a (two tokens), b, c; d alone in group 8. beta 0.5.

    h(a) = 0.4 + 0.2 = 0.6 with A = 1; h(b) = -0.2, h(c) = 0.2 with A = 0: pairs (a, b) and (a, c), b and c tie.
    margins 0.5 * 0.8 = 0.4 and 0.5 * 0.4 = 0.2; losses log(1 + e^-0.4) = 0.5130152524, log(1 + e^-0.2) = 0.5981388694
    their mean 0.5555770609 is the sum over tokens. Half of each pair's half goes to a, spread over two tokens:
    (0.5130152524 + 0.5981388694) / 2 / 2 / 2 = 0.1388942652; b has 0.5130152524 / 4 = 0.1282538131, c 0.1495347173.
    gradient: sigmoid(-0.4) = 0.4013123399, sigmoid(-0.2) = 0.4501660027; of h(b) 0.5 * 0.4013123399 / 2 =
    0.1003280850, of h(c) 0.1125415007, of h(a) minus both = -0.2128695857, at each of its tokens.
    """
    ref = [-1.0, -2.0, -0.7, -0.3, -1.5]
    logprobs = [-0.6, -1.8, -0.9, -0.1, -1.1]
    inputs = inputs_of(
        logprobs, ref, [1.0, 1.0, 0.0, 0.0, 2.0], ref=ref, segments=[0, 0, 1, 2, 3], groups=[7, 7, 7, 7, 8]
    )
    terms = OnlineDPO(beta=0.5)(inputs)
    assert terms.loss_T.tolist() == pytest.approx([0.1388942652] * 2 + [0.1282538131, 0.1495347173, 0.0], abs=1e-9)
    loss, gradient = loss_and_gradient(OnlineDPO(beta=0.5), inputs)
    assert loss == pytest.approx(0.5555770609, abs=1e-9)
    assert gradient == pytest.approx([-0.2128695857] * 2 + [0.1003280850, 0.1125415007, 0.0], abs=1e-9)


TEACHER = [-0.5, -2.0, -1.7, -0.3, -40.0]


def test_distill_table() -> None:
    """log teacher - log pi: -0.5+1 = 0.5; -2+1.8176784432 = -0.1823215568; -1.7+0.2945348919 = -1.4054651081;
    -0.3+0.9931471806 = 0.6931471806; -40+1.6053605157 limited to -20.

    Policy gradient with twice that plus half the advantage: 1.5, -1.3646431136, -2.5609302162, 0.8862943611, -39.
    """
    inputs = inputs_of(LOGPROBS, BEHAVIOUR, ADVANTAGES, teacher=TEACHER)
    terms = Distill(base=PolicyGradient(), teacher=2.0, reward=0.5)(inputs)
    gap = [0.5, -0.1823215568, -1.4054651081, 0.6931471806, -20.0]
    assert terms.diagnostics_T["teacher_kl"].tolist() == pytest.approx([-x for x in gap], abs=1e-9)
    gradient = loss_and_gradient(Distill(base=PolicyGradient(), teacher=2.0, reward=0.5), inputs)[1]
    assert gradient == pytest.approx([-1.5, 1.3646431136, 2.5609302162, -0.8862943611, 39.0], abs=1e-9)


def test_distill_forward_table() -> None:
    """Weights teacher / behaviour: e^0.5 = 1.6487212707 capped at 1.5, 1, e^-1 = 0.3678794412, 1, e^-20.

    loss = 1.5*0.5 - 0.1823215568 - 0.3678794412*1.4054651081 + 0.6931471806 - 20 e^-20 = 0.7437838055; gradient -w,
    0 for the last, whose log ratio is limited.
    """
    inputs = inputs_of(LOGPROBS, BEHAVIOUR, ADVANTAGES, teacher=TEACHER)
    loss, gradient = loss_and_gradient(DistillForward(cap=1.5), inputs)
    assert loss == pytest.approx(0.7437838055, abs=1e-7)
    assert gradient == pytest.approx([-1.5, -1.0, -0.3678794412, -1.0, 0.0], abs=1e-9)


REF = [-1.5, -1.8176784432, 1.7054651081, -0.9931471806, -0.1053605157]


@pytest.mark.parametrize(
    ("kind", "values", "gradient"),
    [
        ("k1", [0.5, 0.0, -2.0, 0.0, -1.5], [1.0, 1.0, 1.0, 1.0, 1.0]),
        ("k2", [0.125, 0.0, 2.0, 0.0, 1.125], [0.5, 0.0, -2.0, 0.0, -1.5]),
        (
            "k3",
            [0.1065306597, 0.0, 4.3890560989, 0.0, 1.9816890703],
            [0.3934693403, 0.0, -6.3890560989, 0.0, -3.4816890703],
        ),
        (
            "unbiased",
            [0.1065306597, 0.0, 6.5835841484, 0.0, 1.7835201633],
            [0.5, 0.0, -3.0, 0.0, -1.35],
        ),
    ],
)
def test_kl_table(kind: str, values: list[float], gradient: list[float]) -> None:
    """x = log ref - log pi = -0.5, 0, 2, 0, 1.5.

    k1 = -x, gradient 1. k2 = x^2/2, gradient -x. k3 = e^x - x - 1 with e^-0.5 = 0.6065306597, e^2 = 7.3890560989,
    e^1.5 = 4.4816890703, gradient 1 - e^x. unbiased = r k3 with r = 1, 1.2, 1.5, 0.5, 0.9, gradient r k3 + r (1 - e^x)
    = r (-x): 0.5, 0, 1.5 * -2 = -3, 0, 0.9 * -1.5 = -1.35.
    """
    logprobs = [*LOGPROBS[:2], -0.2945348919, *LOGPROBS[3:]]
    inputs = inputs_of(logprobs, BEHAVIOUR, ADVANTAGES, ref=REF)
    penalty = KLPenalty(coefficient=2.0, kind=kind)  # type: ignore[arg-type]
    assert penalty(inputs).loss_T.tolist() == pytest.approx([2 * v for v in values], abs=1e-8)
    assert loss_and_gradient(penalty, inputs)[1] == pytest.approx([2 * g for g in gradient], abs=1e-8)


def test_k3_in_a_loss_is_at_most_10() -> None:
    """x = 3: e^3 - 4 = 16.09, limited, no gradient; as a metric it is what it is."""
    inputs = inputs_of([-3.0], [-3.0], [1.0], ref=[0.0])
    assert loss_and_gradient(KLPenalty(coefficient=0.5), inputs) == (5.0, [0.0])
    ref_kl = KLPenalty(coefficient=0.5)(inputs).diagnostics_T["ref_kl"]
    assert ref_kl.item() == pytest.approx(math.exp(3) - 4, rel=1e-12)


DIFFERENTIABLE = [
    PolicyGradient(),
    PPOClip(),
    PPOClip(dual_clip=1.4),
    GSPO(clip_low=0.05, clip_high=0.05),
    DIS(detach=False),
    Kimi15(),
    DPPO(),
    OnlineDPO(beta=0.5),
    DistillForward(),
    *KLS,
    Corrected(base=PPOClip(), kl=KLS[3]),
]


@pytest.mark.parametrize("objective", DIFFERENTIABLE, ids=label)
def test_gradcheck(objective: Objective) -> None:
    """Where no stop-gradient of the logprobs enters, autograd agrees with differences of the values."""
    inputs = inputs_of(
        LOGPROBS,
        BEHAVIOUR,
        [1.0, 1.0, -0.5, -0.5, -0.5],
        ref=[-1.1, -1.9, -0.4, -0.8, -1.2],
        teacher=[-1.1, -1.9, -0.4, -0.8, -1.2],
        segments=SEGMENTS,
    )

    def loss(logprobs_T: Tensor) -> Tensor:
        return objective(replace(inputs, logprobs_T=logprobs_T)).loss_T

    assert torch.autograd.gradcheck(loss, inputs.logprobs_T)


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
    outwards = (ratio > 1) == (advantage > 0)
    assert (loss_and_gradient(DIS(low=0.5, high=2.0, one_sided=True), inputs)[1] == [0.0]) == outwards


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("ratio", [0.5, 2.0])
def test_icepop_bounds_are_closed_for_both_signs(ratio: float, advantage: float) -> None:
    """The bound itself is kept with its weight; the next double outside is not."""
    icepop = Corrected(base=PPOClip(), corrections=Corrections(token_band=(0.5, 2.0)))
    assert loss_and_gradient(icepop, inputs_of([math.log(ratio)], [0.0], [advantage]))[1] == [-ratio * advantage]
    outside = inputs_of([math.log(ratio) * (1 + 1e-9)], [0.0], [advantage])
    assert loss_and_gradient(icepop, outside)[1] == [0.0]


ON_POLICY = [
    *(base for base in BASES if base != DIS(detach=False)),
    *(Corrected(base=PPOClip(), corrections=corrections) for corrections in ALL_CORRECTIONS),
    *(Corrected(base=GSPO(), corrections=corrections) for corrections in ALL_CORRECTIONS),
]


@pytest.mark.parametrize("objective", ON_POLICY, ids=label)
@pytest.mark.parametrize("with_old", [False, True])
def test_all_agree_on_policy(objective: Objective, with_old: bool) -> None:
    """At pi = old = behaviour every objective's gradient is -A; per-rollout ones with one advantage per rollout."""
    advantages = [-2.0, -2.0, 0.5, 0.5, 0.5]
    old = BEHAVIOUR if with_old else None
    inputs = inputs_of(BEHAVIOUR, BEHAVIOUR, advantages, old=old, segments=SEGMENTS)
    assert loss_and_gradient(objective, inputs)[1] == pytest.approx([-a for a in advantages], rel=1e-12)


@pytest.mark.parametrize("one_sided", [False, True])
def test_dis_without_bounds_is_plain_importance_sampling(one_sided: bool) -> None:
    """Gradient of -sum A exp(logp - behaviour), written down directly."""
    inputs = inputs_of(LOGPROBS, BEHAVIOUR, ADVANTAGES)
    plain = -(inputs.advantages_T * (inputs.logprobs_T - inputs.behaviour_T).exp()).sum()
    (expected,) = torch.autograd.grad(plain, inputs.logprobs_T)
    _, gradient = loss_and_gradient(DIS(low=-1.0, high=INF, one_sided=one_sided), inputs)
    assert gradient == pytest.approx(expected.tolist(), rel=1e-12)
    for base in (PolicyGradient(), PPOClip(), CISPO(), Kimi15()):
        tis = Corrected(base=base, corrections=Corrections(token_cap=INF))
        assert loss_and_gradient(tis, inputs)[1] == pytest.approx(expected.tolist(), rel=1e-12)


def test_icepop_is_dis_at_the_first_update() -> None:
    """At pi = old and equal bands the gradients are equal, whether old is given or the one update's own pass."""
    band = (0.8, 1.28)
    icepop = Corrected(base=PPOClip(), corrections=Corrections(token_band=band))
    expected = loss_and_gradient(DIS(low=band[0], high=band[1]), inputs_of(LOGPROBS, BEHAVIOUR, ADVANTAGES))[1]
    for old in (LOGPROBS, None):
        inputs = inputs_of(LOGPROBS, BEHAVIOUR, ADVANTAGES, old=old)
        assert loss_and_gradient(icepop, inputs)[1] == pytest.approx(expected, rel=1e-12)


def test_icepop_is_ppo_where_the_engine_agrees() -> None:
    """At old = behaviour IcePop is plain PPO, while DIS masks r = 1.5 with A < 0, where PPO still has a gradient."""
    inputs = inputs_of([log_of(1.5, -1.0)], [-1.0], [-2.0], old=[-1.0])
    icepop = Corrected(base=PPOClip(), corrections=Corrections(token_band=(0.8, 1.28)))
    assert loss_and_gradient(icepop, inputs) == loss_and_gradient(PPOClip(), inputs)
    assert loss_and_gradient(icepop, inputs)[1] == pytest.approx([3.0])
    assert loss_and_gradient(DIS(), inputs)[1] == [0.0]


def test_gspo_of_one_token_is_ppo() -> None:
    inputs = inputs_of(LOGPROBS, BEHAVIOUR, ADVANTAGES, segments=[0, 1, 2, 3, 4])
    loss, gradient = loss_and_gradient(PPOClip(), inputs)
    for level in ("sequence", "token"):
        got = loss_and_gradient(GSPO(clip_low=0.2, clip_high=0.28, level=level), inputs)
        assert got[0] == pytest.approx(loss, rel=1e-12) and got[1] == pytest.approx(gradient, rel=1e-12)


def test_gspo_forms_agree_with_one_advantage_per_rollout() -> None:
    inputs = inputs_of(LOGPROBS, BEHAVIOUR, [1.0, 1.0, -0.5, -0.5, -0.5], segments=SEGMENTS)
    gradients = [loss_and_gradient(GSPO(clip_high=0.2, level=level), inputs)[1] for level in ("sequence", "token")]
    assert gradients[0] == pytest.approx(gradients[1], rel=1e-12)


def test_aipo_is_cispo_against_behaviour() -> None:
    """A capped weight on the policy gradient: CISPO's formula with pi / behaviour."""
    inputs = inputs_of(LOGPROBS, BEHAVIOUR, ADVANTAGES)
    aipo = Corrected(base=PolicyGradient(), corrections=Corrections(token_cap=1.28))
    assert loss_and_gradient(aipo, inputs) == loss_and_gradient(CISPO(high=1.28), inputs)


def test_decoupled_ppo_table() -> None:
    """old / behaviour = 8 capped at 5, 0.5; pi / old = 1.5 and 0.9; A = -1, 2: 5 * -1.5 = -7.5, 0.5 * 1.8 = 0.9.

    loss = 7.5 - 0.9 = 6.6, gradient 7.5 and -0.9.
    """
    behaviour = [-3.0, -1.0]
    old = [log_of(8.0, -3.0), log_of(0.5, -1.0)]
    logprobs = [log_of(1.5, old[0]), log_of(0.9, old[1])]
    areal = Corrected(base=PPOClip(), corrections=Corrections(token_cap=5.0))
    loss, gradient = loss_and_gradient(areal, inputs_of(logprobs, behaviour, [-1.0, 2.0], old=old))
    assert loss == pytest.approx(6.6, abs=1e-12)
    assert gradient == pytest.approx([7.5, -0.9], abs=1e-12)


def test_distill_pulls_towards_the_teacher_like_reverse_kl() -> None:
    """Three actions, exact expectation: sum_a pi(a) gradient_a is the gradient of KL(pi || teacher) in the logits."""
    logits = torch.tensor([0.3, -0.2, 1.0], dtype=torch.float64, requires_grad=True)
    teacher_T = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64).log()
    log_T = logits.log_softmax(0)
    pi_T = log_T.detach().exp()
    inputs = replace(inputs_of([0.0] * 3, [0.0] * 3, [9.0] * 3), behaviour_T=log_T.detach(), teacher_T=teacher_T)
    expected = torch.autograd.grad((log_T.exp() * (log_T - teacher_T)).sum(), logits, retain_graph=True)[0]
    loss_T = Distill(base=PolicyGradient())(replace(inputs, logprobs_T=log_T)).loss_T
    got = torch.autograd.grad((pi_T * loss_T).sum(), logits, retain_graph=True)[0]
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-14)
    forward = torch.autograd.grad((teacher_T.exp() * (teacher_T - log_T)).sum(), logits, retain_graph=True)[0]
    loss_T = DistillForward(cap=INF)(replace(inputs, logprobs_T=log_T)).loss_T
    got = torch.autograd.grad((pi_T * loss_T).sum(), logits)[0]
    torch.testing.assert_close(got, forward, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("kind", "exact"), [("unbiased", True), ("k2", False), ("k3", False)])
def test_unbiased_kl_off_policy(kind: str, exact: bool) -> None:
    """Expected gradient over actions drawn from another policy: that of KL(pi || ref) with the ratio, not without."""
    logits = torch.tensor([0.3, -0.2, 1.0], dtype=torch.float64, requires_grad=True)
    log_T = logits.log_softmax(0)
    behaviour_T = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64).log()
    ref_T = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64).log()
    inputs = replace(
        inputs_of([0.0] * 3, [0.0] * 3, [0.0] * 3), logprobs_T=log_T, behaviour_T=behaviour_T, ref_T=ref_T
    )
    expected = torch.autograd.grad((log_T.exp() * (log_T - ref_T)).sum(), logits, retain_graph=True)[0]
    loss_T = KLPenalty(coefficient=1.0, kind=kind)(inputs).loss_T  # type: ignore[arg-type]
    got = torch.autograd.grad((behaviour_T.exp() * loss_T).sum(), logits)[0]
    assert torch.allclose(got, expected, rtol=1e-10) is exact


def test_marks_show_through_what_is_composed() -> None:
    assert reads(PPOClip(), ReadsOld) and not reads(DIS(), ReadsOld)
    assert reads(Corrected(base=GSPO()), ReadsOld) and not reads(Corrected(base=DIS()), ReadsOld)
    assert reads(Corrected(base=DIS(), kl=KLS[2]), ReadsReference) and not reads(Corrected(), ReadsReference)
    assert reads(Distill(base=Corrected(base=PPOClip(), kl=KLS[0])), ReadsReference)
    assert reads(Distill(), ReadsTeacher) and reads(DistillForward(), ReadsTeacher)
    assert reads(OnlineDPO(), WholeGroups) and reads(OnlineDPO(), ReadsReference)


@pytest.mark.parametrize("objective", OBJECTIVES, ids=label)
def test_objectives_are_picklable_values(objective: Objective) -> None:
    assert pickle.loads(pickle.dumps(objective)) == objective
    assert hash(objective) == hash(pickle.loads(pickle.dumps(objective)))


@pytest.mark.parametrize(
    ("objective", "column"),
    [(KLS[0], "ref_T"), (OnlineDPO(), "ref_T"), (Distill(), "teacher_T"), (DistillForward(), "teacher_T")],
)
def test_a_missing_column_is_named(objective: Objective, column: str) -> None:
    with pytest.raises(ValueError, match=rf"^{type(objective).__name__} reads {column}, which the trainer did not"):
        objective(inputs_of([0.0], [0.0], [1.0]))


def test_masked_by_side_and_sign() -> None:
    """DIS (0.8, 1.28) on r = 1, 1.2, 1.5 (A > 0), 0.5 (A < 0), 0.9: one high positive, one low negative."""
    shown = DIS()(inputs_of(LOGPROBS, BEHAVIOUR, ADVANTAGES)).diagnostics_T
    names = ["masked", "masked_low_positive", "masked_low_negative", "masked_high_positive", "masked_high_negative"]
    assert [shown[name].tolist() for name in names] == [
        [0, 0, 1, 1, 0],
        [0, 0, 0, 0, 0],
        [0, 0, 0, 1, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 0, 0, 0],
    ]
    turned = DIS()(inputs_of(LOGPROBS, BEHAVIOUR, [-a for a in ADVANTAGES])).diagnostics_T
    assert turned["masked_low_positive"].tolist() == [0, 0, 0, 1, 0]
    assert turned["masked_high_negative"].tolist() == [0, 0, 1, 0, 0]


def test_survivors_are_counted() -> None:
    """Of five tokens one is masked and DIS drops 1.5 and 0.5: four count, two survive. PPO drops none.

    A rejection of the last, too stale, leaves one of DIS's two.
    """
    used = neutral(inputs_of(LOGPROBS, BEHAVIOUR, ADVANTAGES, [False, True, True, True, True]))
    sums = reduce_terms(DIS()(used), used)
    assert (sums.tokens.item(), sums.survivors.item()) == (4, 2)
    sums = reduce_terms(PPOClip()(used), used)
    assert (sums.tokens.item(), sums.survivors.item()) == (4, 4)
    stale = replace(used, staleness_T=torch.tensor([0, 0, 0, 0, 9]))
    rejecting = Corrected(base=DIS(), corrections=Corrections(max_staleness=8))
    assert reduce_terms(rejecting(stale), stale).survivors.item() == 1


def test_rollout_means() -> None:
    """Policy gradient by rollout: (1*1 - 2*1.8176784432) / 2 and, without the masked token, (0.5*0.2945348919
    + 2*1.6053605157) / 2: -1.3176784432 + 1.6789942387 = 0.3613157955; gradient -A/2."""
    used = inputs_of(LOGPROBS, BEHAVIOUR, ADVANTAGES, [True, True, True, False, True], segments=SEGMENTS)
    used = neutral(used)
    logprobs = used.logprobs_T.detach().requires_grad_()
    used = replace(used, logprobs_T=logprobs)
    sums = reduce_terms(PolicyGradient()(used), used, rollout_means=True)
    assert sums.loss.item() == pytest.approx(0.3613157955, abs=1e-9)
    assert torch.autograd.grad(sums.loss, logprobs)[0].tolist() == [-0.5, 1.0, -0.25, 0.0, -1.0]
    none = replace(used, mask_T=torch.tensor([True, True, False, False, False]))  # of the second rollout
    sums = reduce_terms(PolicyGradient()(none), none, rollout_means=True)
    assert torch.autograd.grad(sums.loss, logprobs)[0].tolist() == [-0.5, 1.0, 0.0, 0.0, 0.0]


def test_ppo_prefers_the_old_pass() -> None:
    """old = logprobs: ratio 1 whatever behaviour says, so nothing is clipped and the gradient is -A."""
    inputs = inputs_of(LOGPROBS, BEHAVIOUR, ADVANTAGES, old=LOGPROBS)
    assert loss_and_gradient(PPOClip(), inputs)[1] == pytest.approx([-a for a in ADVANTAGES], rel=1e-12)


def test_diagnostics_are_summed_over_counted_tokens() -> None:
    """Ratios 1, 1.2, 1.5, 0.5, 0.9 without token 3: sum 4.6; outside (0.8, 1.28): only 1.5, one token."""
    used = neutral(inputs_of(LOGPROBS, BEHAVIOUR, ADVANTAGES, [True, True, True, False, True]))
    sums = reduce_terms(DIS()(used), used)
    assert sums.tokens.item() == 4
    assert sums.diagnostics["ratio"].item() == pytest.approx(4.6, abs=1e-12)
    assert sums.diagnostics["masked"].item() == 1.0


IMPOSSIBLE = [
    (lambda: DIS(low=1.3), r"low \(1.3\) must be below high"),
    (lambda: DIS(low=NAN), "must be below high"),
    (lambda: PPOClip(clip_low=1.5), "PPOClip: need 0 <= clip_low"),
    (lambda: GSPO(clip_high=-1.0), "GSPO: need 0 <= clip_low"),
    (lambda: PPOClip(dual_clip=1.0), "dual_clip must be above 1"),
    (lambda: CISPO(high=0.0), "CISPO: need 0 < high"),
    (lambda: CISPO(high=1.0, low=2.0), "low < high"),
    (lambda: Kimi15(tau=-1.0), "tau must be at least 0"),
    (lambda: DPPO(threshold=-0.1), "threshold"),
    (lambda: OnlineDPO(beta=0.0), "beta must be above 0"),
    (lambda: DistillForward(cap=0.0), "cap must be above 0"),
    (lambda: KLPenalty(coefficient=NAN), "coefficient must be at least 0"),
    (lambda: Corrections(token_cap=0.0), "token_cap is out of range: 0.0"),
    (lambda: Corrections(opsm=-1.0), "opsm is out of range"),
    (lambda: Corrections(geometric_band=(2.0, 1.0)), "geometric_band needs 0 <= low < high"),
    (lambda: Corrections(token_cap=2.0, token_band=(0.5, 2.0)), "token_cap and token_band would weigh"),
    (lambda: Corrected(base=DIS(), corrections=Corrections(token_cap=2.0)), "DIS weighs by trainer / behaviour"),
    (lambda: Corrected(base=OnlineDPO(), corrections=Corrections(opsm=0.0)), "OnlineDPO is no sum"),
]


@pytest.mark.parametrize(("make", "message"), IMPOSSIBLE)
def test_impossible_settings_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


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
