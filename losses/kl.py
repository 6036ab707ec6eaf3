"""A penalty on the distance to a reference policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from losses.inputs import ReadsReference, Terms, required
from losses.ratios import anchor, log_ratio

if TYPE_CHECKING:
    from losses.inputs import LossInputs

KL_LIMIT = 10.0
"""Largest k3 of a token in a loss."""


@dataclass(frozen=True, kw_only=True)
class KLPenalty(ReadsReference):
    """coefficient times an estimate of KL(pi || pi_ref) on the tokens drawn, x = log pi_ref - log pi limited to +-20.

    k1 = -x; k2 = x^2 / 2; k3 = e^x - x - 1 (Schulman 2020, "Approximating KL divergence"), at most 10 with zero
    gradient beyond; unbiased = r k3 with the gradient through r too (DeepSeek-V3.2, arXiv 2512.02556), r against
    the pass at the start of the step, else behaviour. As a loss k1's gradient is zero on average; k2's is the KL's on
    fresh data; k3's is biased; unbiased's is right on the tokens r is against.
    """

    coefficient: float = 0.0
    """0 is off, and then no reference is needed."""
    kind: Literal["k1", "k2", "k3", "unbiased"] = "k3"
    """Estimator."""

    def __post_init__(self) -> None:
        if not self.coefficient >= 0:
            raise ValueError(f"KLPenalty: coefficient must be at least 0, got {self.coefficient}")

    def __call__(self, inputs: LossInputs) -> Terms:
        x_T = log_ratio(required(inputs.ref_T, "ref_T", self), inputs.logprobs_T)
        k3_T = x_T.expm1() - x_T
        if self.kind == "k1":
            kl_T = -x_T
        elif self.kind == "k2":
            kl_T = x_T.square() / 2
        else:
            kl_T = k3_T.clamp(max=KL_LIMIT)
        if self.kind == "unbiased":
            kl_T = log_ratio(inputs.logprobs_T, anchor(inputs)).exp() * kl_T
        return Terms(loss_T=self.coefficient * kl_T, diagnostics_T={"ref_kl": k3_T.detach()})
