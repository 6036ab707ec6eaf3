"""Tapered off-policy REINFORCE."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from losses.inputs import Terms, WeighsBehaviour
from losses.ratios import limited, log_ratio, rollout_sum, weights

if TYPE_CHECKING:
    from losses.inputs import LossInputs


@dataclass(frozen=True, kw_only=True)
class TOPR(WeighsBehaviour):
    """loss_t = -sg(w) A_t log pi(t): w = 1 for positive advantages, min(r, 1) for negative ones (arXiv 2503.14286).

    r = pi / pi_behaviour. What is already unlikely is not pushed down further, and good rollouts count in full however
    old. The sign is the advantage's; the paper's is the reward's, the same without a baseline.
    """

    level: Literal["token", "sequence"] = "token"
    """Whose ratio: the token's, or the product over its rollout as in the paper."""

    def __call__(self, inputs: LossInputs) -> Terms:
        log_T = log_ratio(inputs.logprobs_T.detach(), inputs.behaviour_T)
        ratio_T = log_T.exp()
        if self.level == "sequence":
            log_T = limited(rollout_sum(log_T, inputs))
        weight_T = log_T.exp().clamp(max=1.0).where(inputs.advantages_T < 0, 1.0)
        return Terms(
            loss_T=-(weight_T * inputs.advantages_T) * inputs.logprobs_T,
            diagnostics_T={"ratio": ratio_T} | weights(weight_T),
        )
