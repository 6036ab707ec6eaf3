"""On-policy distillation from a teacher that scores the tokens of the student's rollouts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from losses.cispo import CISPO
from losses.corrected import Corrected
from losses.dis import DIS
from losses.dppo import DPPO
from losses.inputs import Composite, Objective, ReadsTeacher, Terms, WeighsBehaviour, required
from losses.policy_gradient import PolicyGradient
from losses.ppo import PPOClip
from losses.ratios import capped_ratio, log_ratio, weights

if TYPE_CHECKING:
    from losses.inputs import LossInputs


@dataclass(frozen=True, kw_only=True)
class Distill(ReadsTeacher, Composite):
    """Reverse KL to the teacher, as an advantage for any objective.

    A' = reward A + teacher sg(log pi_teacher - log pi).
    Each token is its own episode (discount 0), so the expected gradient is that of KL(pi || teacher) at the places
    that were visited (GLM-5, arXiv 2602.15763, cross-stage distillation). The log ratio is limited to +-20.
    """

    base: DIS | PPOClip | CISPO | DPPO | PolicyGradient | Corrected = field(default_factory=DIS)
    """What the advantage is trained with."""
    teacher: float = 1.0
    """Weight of the teacher's part."""
    reward: float = 0.0
    """Weight of the advantage from rewards."""

    def parts(self) -> tuple[Objective, ...]:
        return (self.base,)

    def __call__(self, inputs: LossInputs) -> Terms:
        gap_T = log_ratio(required(inputs.teacher_T, "teacher_T", self), inputs.logprobs_T.detach())
        terms = self.base(replace(inputs, advantages_T=self.reward * inputs.advantages_T + self.teacher * gap_T))
        return replace(terms, diagnostics_T=terms.diagnostics_T | {"teacher_kl": -gap_T})


@dataclass(frozen=True, kw_only=True)
class DistillForward(ReadsTeacher, WeighsBehaviour):
    """Forward KL to the teacher, estimated on the student's tokens: loss_t = sg(w) (log pi_teacher - log pi).

    w = min(pi_teacher / pi_behaviour, cap); without a cap its mean is the per-token KL(teacher || pi), and on the
    teacher's own tokens it is supervised training. The log ratios are limited to +-20.
    """

    cap: float = 5.0
    """Largest weight of a token."""

    def __post_init__(self) -> None:
        if not self.cap > 0:
            raise ValueError(f"DistillForward: cap must be above 0, got {self.cap}")

    def __call__(self, inputs: LossInputs) -> Terms:
        teacher_T = required(inputs.teacher_T, "teacher_T", self)
        weight_T = capped_ratio(log_ratio(teacher_T, inputs.behaviour_T), self.cap)
        gap_T = log_ratio(teacher_T, inputs.logprobs_T)
        ratio_T = log_ratio(inputs.logprobs_T.detach(), inputs.behaviour_T).exp()
        return Terms(
            loss_T=weight_T * gap_T,
            diagnostics_T={"ratio": ratio_T, "teacher_kl": -gap_T.detach()} | weights(weight_T),
        )
