"""REINFORCE."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from losses.inputs import Terms
from losses.ratios import log_ratio

if TYPE_CHECKING:
    from losses.inputs import LossInputs


@dataclass(frozen=True, kw_only=True)
class PolicyGradient:
    """loss_t = -A_t log pi(t): no importance sampling, so it is right on fresh data only (Williams 1992, eq. 4).

    With a cap on the token weight (`Corrections`) it is AIPO (LlamaRL, arXiv 2505.24034).
    """

    def __call__(self, inputs: LossInputs) -> Terms:
        ratio_T = log_ratio(inputs.logprobs_T.detach(), inputs.behaviour_T).exp()
        return Terms(loss_T=-inputs.advantages_T * inputs.logprobs_T, diagnostics_T={"ratio": ratio_T})
