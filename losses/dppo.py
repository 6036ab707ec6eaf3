"""Masks by how far a token's probability moved, not by the ratio."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from losses.inputs import Terms, WeighsBehaviour
from losses.ratios import log_ratio, masked

if TYPE_CHECKING:
    from losses.inputs import LossInputs


@dataclass(frozen=True, kw_only=True)
class DPPO(WeighsBehaviour):
    """loss_t = -[kept] A_t r + square (log r)^2, r = pi / pi_behaviour (arXiv 2602.04879).

    A token is dropped where its probability moved by more than a threshold, d = pi - pi_behaviour. The square has no
    factor 1/2 and acts on dropped tokens too; beyond |log r| = 20 neither term has a gradient.
    """

    mask: Literal["tv", "ipo"] = "tv"
    """tv drops what would move further: A > 0 and d > threshold, or A < 0 and d < -threshold. ipo drops any
    |d| > threshold."""
    threshold: float | None = None
    """Default: 0.2 for tv, 0.1 for ipo."""
    square: float = 1e-3
    """Weight of (log r)^2."""

    def __post_init__(self) -> None:
        if not (self.square >= 0 and (self.threshold is None or self.threshold >= 0)):
            raise ValueError(f"DPPO: threshold ({self.threshold}) and square ({self.square}) must be at least 0")

    def __call__(self, inputs: LossInputs) -> Terms:
        log_T, advantages_T = log_ratio(inputs.logprobs_T, inputs.behaviour_T), inputs.advantages_T
        threshold = {"tv": 0.2, "ipo": 0.1}[self.mask] if self.threshold is None else self.threshold
        moved_T = inputs.logprobs_T.detach().exp() - inputs.behaviour_T.exp()
        below_T, above_T = moved_T < -threshold, moved_T > threshold
        if self.mask == "tv":
            below_T, above_T = below_T & (advantages_T < 0), above_T & (advantages_T > 0)
        kept_T, ratio_T = ~(below_T | above_T), log_T.exp()
        return Terms(
            loss_T=-(ratio_T * advantages_T).where(kept_T, 0.0) + self.square * log_T.square(),
            diagnostics_T={"ratio": ratio_T.detach()} | masked(below_T, above_T, advantages_T),
            kept_T=kept_T,
        )
