"""Clipping of whole rollouts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from losses.inputs import ReadsOld
from losses.ppo import check_clips, clipped
from losses.ratios import anchor, log_ratio, rollout_mean

if TYPE_CHECKING:
    from losses.inputs import LossInputs, Terms


@dataclass(frozen=True, kw_only=True)
class GSPO(ReadsOld):
    """PPO's clip on the geometric mean s of a rollout's token ratios (arXiv 2507.18071, eq. 5 to 7).

    loss_t = -min(s A_t, clip(s, 1 - clip_low, 1 + clip_high) A_t) for each of the rollout's tokens, so the mean over
    its tokens is the rollout's loss: the paper then averages over rollouts. The ratios are against the pass at the
    start of the step, else behaviour.
    """

    clip_low: float = 3e-4
    """With a negative advantage, rollouts whose s is below 1 - clip_low lose their gradient."""
    clip_high: float = 4e-4
    """With a positive advantage, rollouts whose s is above 1 + clip_high lose their gradient."""
    level: Literal["sequence", "token"] = "sequence"
    """Where the gradient goes: through the mean to all tokens alike, or sg(s) pi / sg(pi), to each with its own
    advantage. The two agree where a rollout has one advantage."""

    def __post_init__(self) -> None:
        check_clips(self, self.clip_low, self.clip_high)

    def __call__(self, inputs: LossInputs) -> Terms:
        log_T = log_ratio(inputs.logprobs_T, anchor(inputs))
        mean_T = rollout_mean(log_T, inputs)
        if self.level == "token":
            mean_T = mean_T.detach() + log_T - log_T.detach()
        return clipped(mean_T.exp(), inputs.advantages_T, 1 - self.clip_low, 1 + self.clip_high)
