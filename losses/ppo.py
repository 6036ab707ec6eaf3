"""Proximal policy optimisation with separate lower and upper clip."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from losses.inputs import ReadsOld, Terms
from losses.ratios import anchor, log_ratio, masked

if TYPE_CHECKING:
    from torch import Tensor

    from losses.inputs import LossInputs


@dataclass(frozen=True, kw_only=True)
class PPOClip(ReadsOld):
    """Clipped surrogate: loss_t = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A).

    PPO (arXiv 1707.06347, eq. 7) with the two bounds of DAPO (arXiv 2503.14476, eq. 8). The ratio is against the
    trainer's own pass at the start of the step when there is one (several updates a step), else against behaviour.
    `DIS(one_sided=True)` with the same bounds has the gradient of the ratio against behaviour in either case.
    """

    clip_low: float = 0.2
    """With a negative advantage, ratios below 1 - clip_low lose their gradient."""
    clip_high: float = 0.28
    """With a positive advantage, ratios above 1 + clip_high lose their gradient."""
    dual_clip: float | None = None
    """With a negative advantage, ratios above this lose their gradient too (arXiv 1912.09729). Off: no bound."""

    def __post_init__(self) -> None:
        check_clips(self, self.clip_low, self.clip_high)
        if self.dual_clip is not None and not self.dual_clip > 1:
            raise ValueError(f"PPOClip: dual_clip must be above 1, got {self.dual_clip}")

    def __call__(self, inputs: LossInputs) -> Terms:
        ratio_T = log_ratio(inputs.logprobs_T, anchor(inputs)).exp()
        return clipped(ratio_T, inputs.advantages_T, 1 - self.clip_low, 1 + self.clip_high, self.dual_clip)


def check_clips(objective: object, low: float, high: float) -> None:
    """Raise a ValueError that names the objective if the two do not enclose 1."""
    if not (0 <= low <= 1 and high >= 0):
        name = type(objective).__name__
        raise ValueError(f"{name}: need 0 <= clip_low <= 1 and clip_high >= 0, got {low}, {high}")


def clipped(ratio_T: Tensor, advantages_T: Tensor, low: float, high: float, dual: float | None = None) -> Terms:
    """-min(r A, clip(r, low, high) A), and where A < 0 at most -dual A. A ratio on a bound keeps its gradient."""
    now_T = ratio_T.detach()
    negative_T = advantages_T < 0
    below_T, above_T = negative_T & (now_T < low), (advantages_T > 0) & (now_T > high)
    bound_T = now_T.clamp(low, high)
    if dual is not None:
        far_T = negative_T & (now_T > dual)
        above_T, bound_T = above_T | far_T, bound_T.where(~far_T, dual)
    bounded_T = bound_T.where(below_T | above_T, ratio_T)
    return Terms(
        loss_T=-bounded_T * advantages_T,
        diagnostics_T={"ratio": now_T} | masked(below_T, above_T, advantages_T),
    )
