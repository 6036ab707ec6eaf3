"""Double-sided importance sampling."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from losses.inputs import LOG_RATIO_LIMIT, Terms, log_ratio

if TYPE_CHECKING:
    from losses.inputs import LossInputs


@dataclass(frozen=True, kw_only=True)
class DIS:
    """Policy gradient weighted by trainer / behaviour, and no gradient outside a band of that ratio.

    loss_t = -sg(f(r_t)) A_t log pi(t), r = pi / pi_behaviour, f(r) = r if low < r < high else 0, whatever the sign of
    the advantage (SAO, arXiv 2607.07508, DIS objective). Needs no pass of an old policy. Dropped tokens stay in the
    denominator.
    """

    low: float = 0.8
    """Ratios at or below this lose their gradient; 0 or less: no lower bound."""
    high: float = 1.28
    """Ratios at or above this lose their gradient; inf: no upper bound."""

    def __post_init__(self) -> None:
        if math.isnan(self.low) or not self.low < self.high:
            raise ValueError(f"DIS: low ({self.low}) must be below high ({self.high})")

    def __call__(self, inputs: LossInputs) -> Terms:
        log_T = log_ratio(inputs.logprobs_T.detach(), inputs.behaviour_T)
        ratio_T = log_T.exp()
        kept_T = (ratio_T > self.low) & (ratio_T < self.high) & (log_T.abs() < LOG_RATIO_LIMIT)
        weight_T = ratio_T.where(kept_T, 0.0) * inputs.advantages_T
        return Terms(
            loss_T=-weight_T * inputs.logprobs_T,
            diagnostics_T={"ratio": ratio_T, "masked": (~kept_T).to(ratio_T.dtype)},
        )
