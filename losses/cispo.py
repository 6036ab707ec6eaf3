"""Clipped importance weights without masks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from losses.inputs import ReadsOld, Terms
from losses.ratios import anchor, capped_ratio, log_ratio, weights

if TYPE_CHECKING:
    from losses.inputs import LossInputs


@dataclass(frozen=True, kw_only=True)
class CISPO(ReadsOld):
    """loss_t = -sg(clip(r, low, high)) A_t log pi(t): no token loses its gradient (arXiv 2506.13585, eq. 4 and 5).

    The ratio is against the trainer's own pass at the start of the step when there is one, else against behaviour.
    """

    high: float = 5.0
    """Largest weight of a token: the cap itself, not its distance from 1."""
    low: float | None = None
    """Smallest weight of a token. Off: no lower bound, as in the paper's runs."""

    def __post_init__(self) -> None:
        if not self.high > 0 or not (self.low or 0.0) < self.high:
            raise ValueError(f"CISPO: need 0 < high and low < high, got low {self.low}, high {self.high}")

    def __call__(self, inputs: LossInputs) -> Terms:
        log_T = log_ratio(inputs.logprobs_T.detach(), anchor(inputs))
        ratio_T, weight_T = log_T.exp(), capped_ratio(log_T, self.high)
        if self.low is not None:
            weight_T = weight_T.clamp(min=self.low)
        return Terms(
            loss_T=-(weight_T * inputs.advantages_T) * inputs.logprobs_T,
            diagnostics_T={"ratio": ratio_T, "capped": (ratio_T > self.high).to(ratio_T.dtype)} | weights(weight_T),
        )
