"""Probability ratios of tokens and rollouts, limited so that nothing overflows, and how they are reported.

Per-rollout values are summed in float64 over the tokens that count, so they do not depend on the other rollouts of the
microbatch or on their order.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from losses.inputs import LossInputs

LOG_RATIO_LIMIT = 20.0
"""Largest |log ratio| that is told apart: e^20 is far outside every band and still finite in float32."""


def limited(log_T: Tensor) -> Tensor:
    """Within +-20, with zero gradient beyond."""
    return log_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def log_ratio(logprobs_T: Tensor, reference_T: Tensor) -> Tensor:
    """log(pi / pi_reference) [T], limited to +-20 with zero gradient beyond."""
    return limited(logprobs_T - reference_T)


def anchor(inputs: LossInputs) -> Tensor:
    """What the policy's ratio is against: the pass at the start of the step where there is one, else behaviour."""
    return inputs.behaviour_T if inputs.old_T is None else inputs.old_T


def capped_ratio(log_T: Tensor, cap: float) -> Tensor:
    """exp(log_T), at most `cap`; where that leaves a ratio at the limit of +20 unbounded, 0."""
    if math.log(cap) < LOG_RATIO_LIMIT:
        return log_T.exp().clamp(max=cap)
    return log_T.exp().where(log_T < LOG_RATIO_LIMIT, 0.0)


def rollout_sum(values_T: Tensor, inputs: LossInputs) -> Tensor:
    """[T]: for each token the sum of the values of its rollout's tokens that count."""
    total_N = _rollout_sums(values_T, inputs)
    return total_N[inputs.segment_T].to(values_T.dtype)


def rollout_mean(values_T: Tensor, inputs: LossInputs) -> Tensor:
    """[T]: for each token the mean of the values of its rollout's tokens that count; 0 where none counts."""
    count_N = _rollout_sums(values_T.detach().new_ones(len(values_T)), inputs).clamp(min=1)
    return (_rollout_sums(values_T, inputs) / count_N)[inputs.segment_T].to(values_T.dtype)


def _rollout_sums(values_T: Tensor, inputs: LossInputs) -> Tensor:
    """By number of the rollout, float64, as many as there are tokens: rollouts are never more, and T is known."""
    precise_T = values_T.double().where(inputs.mask_T, 0.0)
    return precise_T.new_zeros(len(precise_T)).index_add(0, inputs.segment_T, precise_T)


def masked(below_T: Tensor, above_T: Tensor, advantages_T: Tensor) -> dict[str, Tensor]:
    """Diagnostics of tokens that lost their gradient below or above a bound: together, and by sign of the advantage.

    Those with advantage 0 count in `masked` alone.
    """
    positive_T, negative_T = advantages_T > 0, advantages_T < 0
    shares = {
        "masked": below_T | above_T,
        "masked_low_positive": below_T & positive_T,
        "masked_low_negative": below_T & negative_T,
        "masked_high_positive": above_T & positive_T,
        "masked_high_negative": above_T & negative_T,
    }
    return {name: share_T.to(advantages_T.dtype) for name, share_T in shares.items()}


def weights(weight_T: Tensor) -> dict[str, Tensor]:
    """Diagnostics of importance weights: of their means, weight^2 / weight_squared is the effective sample share."""
    return {"weight": weight_T, "weight_squared": weight_T.square()}
