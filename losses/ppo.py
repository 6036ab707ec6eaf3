"""Proximal policy optimisation with separate lower and upper clip."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from losses.inputs import ReadsOld, Terms, log_ratio

if TYPE_CHECKING:
    from losses.inputs import LossInputs


@dataclass(frozen=True, kw_only=True)
class PPOClip(ReadsOld):
    """Clipped surrogate: loss_t = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A).

    PPO (arXiv 1707.06347, eq. 7) with the two bounds of DAPO (arXiv 2503.14476, eq. 8). The ratio is against the
    trainer's own pass at the start of the step when there is one (several updates a step), else against behaviour.
    """

    clip_low: float = 0.2
    """With a negative advantage, ratios below 1 - clip_low lose their gradient."""
    clip_high: float = 0.28
    """With a positive advantage, ratios above 1 + clip_high lose their gradient."""

    def __post_init__(self) -> None:
        if not (0 <= self.clip_low <= 1 and self.clip_high >= 0):
            raise ValueError(
                f"PPOClip: need 0 <= clip_low <= 1 and clip_high >= 0, got {self.clip_low}, {self.clip_high}"
            )

    def __call__(self, inputs: LossInputs) -> Terms:
        reference_T = inputs.behaviour_T if inputs.old_T is None else inputs.old_T
        ratio_T = log_ratio(inputs.logprobs_T, reference_T).exp()
        low, high, advantages_T = 1 - self.clip_low, 1 + self.clip_high, inputs.advantages_T
        clipped_T = ((advantages_T > 0) & (ratio_T > high)) | ((advantages_T < 0) & (ratio_T < low))
        bounded_T = ratio_T.detach().clamp(low, high).where(clipped_T, ratio_T)
        return Terms(
            loss_T=-bounded_T * advantages_T,
            diagnostics_T={"ratio": ratio_T.detach(), "masked": clipped_T.to(ratio_T.dtype)},
        )
