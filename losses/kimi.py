"""Online mirror descent with a squared log ratio."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from losses.inputs import ReadsOld, Terms
from losses.ratios import anchor, log_ratio

if TYPE_CHECKING:
    from losses.inputs import LossInputs


@dataclass(frozen=True, kw_only=True)
class Kimi15(ReadsOld):
    """loss_t = -A_t log pi(t) + tau / 2 (log r)^2 (Kimi k1.5, arXiv 2501.12599, eq. 3, per token).

    The ratio is against the trainer's own pass at the start of the step when there is one, else against behaviour;
    beyond |log r| = 20 the square has no gradient.
    """

    tau: float = 0.1
    """Weight of the square."""

    def __post_init__(self) -> None:
        if not self.tau >= 0:
            raise ValueError(f"Kimi15: tau must be at least 0, got {self.tau}")

    def __call__(self, inputs: LossInputs) -> Terms:
        log_T = log_ratio(inputs.logprobs_T, anchor(inputs))
        return Terms(
            loss_T=-inputs.advantages_T * inputs.logprobs_T + self.tau / 2 * log_T.square(),
            diagnostics_T={"ratio": log_T.detach().exp()},
        )
