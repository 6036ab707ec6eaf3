"""Weights and rejections against a hand-made table, and what they do to the objective below them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from losses import DIS, Corrected, Corrections, KLPenalty, PolicyGradient, PPOClip
from losses.ops import neutral, reduce_terms
from losses.ratios import rollout_mean, rollout_sum
from tests.losses.tables import (
    ADVANTAGES,
    BEHAVIOUR,
    INF,
    LOGPROBS,
    RATIOS,
    SEGMENTS,
    inputs_of,
    log_of,
    loss_and_gradient,
)

# Two rollouts of ratios 1, 1.2 and 1.5, 0.5, 0.9. Products 1.2 and 0.675; geometric means 1.2^(1/2) = 1.0954 and
# 0.675^(1/3) = 0.8772; mean log(behaviour / pi) -0.0912 and 0.1310. rho - 1 - log rho: 0, 0.0177 | 0.0945, 0.1931,
# 0.0054, means 0.0088 and 0.0977.
TABLE = [
    (Corrections(), [1, 1, 1, 1, 1]),
    (Corrections(token_cap=1.28), [1, 1.2, 1.28, 0.5, 0.9]),
    (Corrections(token_band=(0.6, 1.3)), [1, 1.2, 0, 0, 0.9]),
    (Corrections(sequence_cap=1.1), [1.1, 1.1, 0.675, 0.675, 0.675]),
    (Corrections(sequence_reject=1.1), [0, 0, 1, 1, 1]),
    (Corrections(geometric_band=(0.9, 1.2)), [1, 1, 0, 0, 0]),
    (Corrections(geometric_band=(0.8, 1.05)), [0, 0, 1, 1, 1]),
    (Corrections(k3_reject=0.05), [1, 1, 0, 0, 0]),
    (Corrections(k3_reject=0.008), [0, 0, 0, 0, 0]),
    (Corrections(opsm=0.1), [1, 1, 1, 0, 1]),
    (Corrections(opsm=0.14), [1, 1, 1, 1, 1]),
    (Corrections(max_staleness=1), [1, 1, 0, 1, 0]),
    (Corrections(max_staleness=2), [1, 1, 1, 1, 0]),
    (Corrections(token_cap=1.1, sequence_reject=1.3, opsm=0.1, max_staleness=2), [1, 1.1, 1.1, 0, 0]),
]
STALENESS = [0, 1, 2, 1, 3]


@pytest.mark.parametrize(("corrections", "expected"), TABLE)
@pytest.mark.parametrize("with_old", [False, True])
def test_weights(corrections: Corrections, expected: list[float], with_old: bool) -> None:
    """The same table whether rho is the current pass over behaviour or, with one, old over behaviour."""
    inputs = inputs_of(LOGPROBS, BEHAVIOUR, ADVANTAGES, segments=SEGMENTS, staleness=STALENESS)
    if with_old:
        drift = 0.0 if corrections.opsm is not None else 0.7  # off-policy masking looks at the current pi
        inputs = replace(inputs, old_T=inputs.logprobs_T.detach(), logprobs_T=inputs.logprobs_T + drift)
    weight_T, _ = corrections(inputs)
    assert weight_T.tolist() == pytest.approx(expected, abs=1e-12)
    assert not weight_T.requires_grad


def test_opsm_looks_at_the_current_policy() -> None:
    """Old agrees with behaviour, the current pass has fallen by 0.2: above 0.1, so A < 0 is dropped and A > 0 not."""
    inputs = inputs_of([-1.2, -2.2], [-1.0, -2.0], [-1.0, -1.0], old=[-1.0, -2.0])
    opsm = Corrected(base=PPOClip(clip_low=0.5), corrections=Corrections(opsm=0.1))
    assert loss_and_gradient(opsm, inputs)[1] == [0.0, 0.0]
    positive = replace(inputs, advantages_T=-inputs.advantages_T)
    assert loss_and_gradient(opsm, positive) == loss_and_gradient(PPOClip(clip_low=0.5), positive)


@pytest.mark.parametrize(
    ("corrections", "kept"),
    [
        (Corrections(sequence_reject=2.0), True),
        (Corrections(geometric_band=(0.5, 2.0)), True),
        (Corrections(max_staleness=3), True),
        (Corrections(sequence_reject=2.0 * (1 - 1e-12)), False),
        (Corrections(geometric_band=(0.5, 2.0 * (1 - 1e-12))), False),
        (Corrections(geometric_band=(2.0 * (1 + 1e-12), 3.0)), False),
        (Corrections(k3_reject=1 - math.log(2) + 1e-12), True),
        (Corrections(k3_reject=1 - math.log(2) - 1e-12), False),
    ],
)
def test_a_value_on_the_bound_is_kept(corrections: Corrections, kept: bool) -> None:
    """One token with rho exactly 2 = exp(log 2), staleness 3, k3 = 2 - 1 - log 2."""
    inputs = inputs_of([math.log(2.0)], [0.0], [1.0], staleness=[3])
    assert corrections(inputs)[0].tolist() == [float(kept)]


def test_opsm_bound_is_strict() -> None:
    """Mean of log(behaviour / pi) exactly 0.25: dropped only above."""
    inputs = inputs_of([-1.25, -1.25], [-1.0, -1.0], [-1.0, -1.0])
    assert Corrections(opsm=0.25)(inputs)[0].tolist() == [1.0, 1.0]
    assert Corrections(opsm=0.2499)(inputs)[0].tolist() == [0.0, 0.0]


def test_long_products_do_not_overflow() -> None:
    """100 tokens of log ratio 10: the product e^1000 is above any finite bound; capped it is the cap."""
    inputs = inputs_of([-1.0] * 100, [-11.0] * 100, [1.0] * 100)
    assert Corrections(sequence_reject=1e300)(inputs)[0].eq(0).all()
    assert Corrections(sequence_cap=7.0)(inputs)[0].eq(7.0).all()
    assert Corrections(sequence_cap=INF)(inputs)[0].eq(0).all(), "at the limit without a cap: no weight"


def test_rollouts_are_summed_in_float64() -> None:
    """2^24 + 1 - 2^24 is 0 in float32, the mean of the three 1/3; the other rollout and the masked token stay out."""
    inputs = inputs_of([0.0] * 5, [0.0] * 5, [0.0] * 5, [True, True, True, False, True], segments=[0, 0, 1, 0, 0])
    values_T = torch.tensor([2.0**24, 1.0, 5.0, 9.0, -(2.0**24)])
    assert rollout_sum(values_T, inputs).tolist() == [1.0, 1.0, 5.0, 1.0, 1.0]
    assert rollout_mean(values_T, inputs).tolist() == pytest.approx([1 / 3, 1 / 3, 5.0, 1 / 3, 1 / 3], rel=1e-7)
    assert rollout_sum(values_T, inputs).dtype == torch.float32


def test_a_weight_anchors_the_base_at_old() -> None:
    """One update a step: the weight is pi / behaviour = 1.5, and PPO's own ratio is then 1, not 1.5 again.

    -1.5 * A = 1.5 with A = -1; under a rejection alone PPO's ratio is 1.5 as ever.
    """
    inputs = inputs_of([log_of(1.5, -1.0)], [-1.0], [-1.0])
    for corrections in (Corrections(token_cap=2.0), Corrections(token_band=(0.5, 2.0)), Corrections(sequence_cap=2.0)):
        assert loss_and_gradient(Corrected(base=PPOClip(), corrections=corrections), inputs) == (
            pytest.approx(1.5),
            pytest.approx([1.5]),
        )
    rejecting = Corrected(base=PPOClip(), corrections=Corrections(sequence_reject=2.0))
    assert loss_and_gradient(rejecting, inputs) == loss_and_gradient(PPOClip(), inputs)
    assert loss_and_gradient(rejecting, inputs)[1] == pytest.approx([1.5])


def test_the_penalty_is_neither_weighed_nor_rejected() -> None:
    """k2 with x = -0.5: gradient 0.5 of the penalty alone where the token is rejected, -A + 0.5 where it is not."""
    inputs = inputs_of([-1.0, -1.0], [-1.0, -1.0], [2.0, 2.0], ref=[-1.5, -1.5], staleness=[0, 5])
    both = Corrected(
        base=PolicyGradient(), corrections=Corrections(max_staleness=1), kl=KLPenalty(coefficient=1.0, kind="k2")
    )
    assert loss_and_gradient(both, inputs)[1] == pytest.approx([-1.5, 0.5], abs=1e-12)


def test_the_unbiased_penalty_keeps_its_own_ratio_beside_a_weight() -> None:
    """With one update its ratio stays pi / behaviour = 1.5 though the base's is 1: gradient -1.5 A + 1.5 * 0.5."""
    inputs = inputs_of([-1.0], [log_of(1 / 1.5, -1.0)], [2.0], ref=[-1.5])
    both = Corrected(
        base=PPOClip(), corrections=Corrections(token_cap=3.0), kl=KLPenalty(coefficient=1.0, kind="unbiased")
    )
    assert loss_and_gradient(both, inputs)[1] == pytest.approx([-3.0 + 0.75], abs=1e-12)


def test_diagnostics() -> None:
    """Band 0.6 to 1.3 drops 1.5 (A > 0) and 0.5 (A < 0); staleness over 2 drops the last.

    weights 1, 1.2, 0, 0, 0: sum 2.2, squares 2.44, effective share of five tokens 2.2^2 / (5 * 2.44) = 0.3967213115.
    """
    objective = Corrected(base=PPOClip(), corrections=Corrections(token_band=(0.6, 1.3), max_staleness=2))
    used = neutral(inputs_of(LOGPROBS, BEHAVIOUR, ADVANTAGES, segments=SEGMENTS, staleness=STALENESS))
    terms = objective(used)
    assert terms.diagnostics_T["weight"].tolist() == pytest.approx([1, 1.2, 0, 0, 0], abs=1e-12)
    for name in ("rejected", "masked"):
        assert terms.diagnostics_T[name].tolist() == [0, 0, 1, 1, 1]
    assert terms.diagnostics_T["rejected_stale"].tolist() == [0, 0, 0, 0, 1]
    assert terms.diagnostics_T["masked_high_positive"].tolist() == [0, 0, 1, 0, 0]
    assert terms.diagnostics_T["masked_low_negative"].tolist() == [0, 0, 0, 1, 0]
    sums = reduce_terms(terms, used)
    w, w2 = (sums.diagnostics[name].item() / sums.tokens.item() for name in ("weight", "weight_squared"))
    assert w**2 / w2 == pytest.approx(0.3967213115, abs=1e-9)
    assert (sums.tokens.item(), sums.survivors.item()) == (5, 2)


def test_masks_of_base_and_weights_add_up() -> None:
    """PPO against old clips token 0 (r = 1.5, A > 0), the band drops token 1 (rho = 3, A < 0): both are masked."""
    behaviour = [-1.0, log_of(1 / 3, -1.0)]
    inputs = inputs_of([log_of(1.5, -1.0), -1.0], behaviour, [1.0, -1.0], old=[-1.0, -1.0])
    shown = Corrected(base=PPOClip(), corrections=Corrections(token_band=(0.5, 2.0)))(inputs).diagnostics_T
    assert shown["masked"].tolist() == [1, 1] and shown["rejected"].tolist() == [0, 1]
    assert shown["masked_high_positive"].tolist() == [1, 0] and shown["masked_high_negative"].tolist() == [0, 1]


def test_the_weight_of_a_weighing_base_is_part_of_the_effective_sample() -> None:
    inputs = inputs_of(LOGPROBS, BEHAVIOUR, ADVANTAGES, staleness=STALENESS)
    shown = Corrected(base=DIS(low=0.0, high=INF), corrections=Corrections(max_staleness=2))(inputs).diagnostics_T
    assert shown["weight"].tolist() == pytest.approx([*RATIOS[:4], 0.0], rel=1e-12)


def test_weights_are_constants() -> None:
    """The gradient through rho would add to -w A: it is exactly -w A."""
    inputs = inputs_of(LOGPROBS, BEHAVIOUR, ADVANTAGES, segments=SEGMENTS)
    for corrections, weights in TABLE[:5]:
        gradient = loss_and_gradient(Corrected(base=PolicyGradient(), corrections=corrections), inputs)[1]
        expected = -torch.tensor(weights, dtype=torch.float64) * inputs.advantages_T
        assert gradient == pytest.approx(expected.tolist(), abs=1e-12)
