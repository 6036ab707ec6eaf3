"""Double-sided importance sampling."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from losses.inputs import Terms, WeighsBehaviour
from losses.ratios import LOG_RATIO_LIMIT, log_ratio, masked, weights

if TYPE_CHECKING:
    from losses.inputs import LossInputs


@dataclass(frozen=True, kw_only=True)
class DIS(WeighsBehaviour):
    """Policy gradient weighted by trainer / behaviour, and no gradient outside a band of that ratio.

    loss_t = -sg(f(r_t)) A_t log pi(t), r = pi / pi_behaviour, f(r) = r if low < r < high else 0, whatever the sign of
    the advantage (SAO, arXiv 2607.07508, DIS objective). Needs no pass of an old policy. The paper's bands are
    `MATH` for mathematics with tools and `CODING`. Whether dropped tokens stay in the denominator is the trainer's
    choice: they are not among `Terms.kept_T`.
    """

    MATH: ClassVar[tuple[float, float]] = (0.7, 6.0)
    CODING: ClassVar[tuple[float, float]] = (0.2, 4.0)

    low: float = 0.8
    """Ratios at or below this lose their gradient; 0 or less: no lower bound."""
    high: float = 1.28
    """Ratios at or above this lose their gradient; inf: no upper bound."""
    one_sided: bool = False
    """Drop a token only where its gradient would push it further out: at or above `high` with a positive advantage, at
    or below `low` with a negative one. The weight of what is kept beyond `high` has no bound."""
    detach: bool = True
    """The weight is a constant. Else the gradient goes through it too: -f(r) A (1 + log pi)."""

    def __post_init__(self) -> None:
        if math.isnan(self.low) or not self.low < self.high:
            raise ValueError(f"DIS: low ({self.low}) must be below high ({self.high})")

    def __call__(self, inputs: LossInputs) -> Terms:
        logprobs_T, advantages_T = inputs.logprobs_T, inputs.advantages_T
        log_T = log_ratio(logprobs_T.detach() if self.detach else logprobs_T, inputs.behaviour_T)
        ratio_T = log_T.exp()
        below_T, above_T = ratio_T <= self.low, ratio_T >= self.high
        if self.one_sided:
            below_T, above_T = below_T & (advantages_T < 0), above_T & (advantages_T > 0)
        below_T, above_T = below_T | (log_T <= -LOG_RATIO_LIMIT), above_T | (log_T >= LOG_RATIO_LIMIT)
        kept_T = ~(below_T | above_T)
        weight_T = ratio_T.where(kept_T, 0.0)
        return Terms(
            loss_T=-(weight_T * advantages_T) * logprobs_T,
            diagnostics_T={"ratio": ratio_T} | weights(weight_T) | masked(below_T, above_T, advantages_T),
            kept_T=kept_T,
        )
