"""An objective with corrections for where its data came from and a penalty to a reference."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from losses.cispo import CISPO
from losses.corrections import Corrections
from losses.dis import DIS
from losses.dppo import DPPO
from losses.gspo import GSPO
from losses.inputs import Composite, Objective, Terms, WeighsBehaviour, WholeGroups, reads
from losses.kimi import Kimi15
from losses.kl import KLPenalty
from losses.policy_gradient import PolicyGradient
from losses.ppo import PPOClip
from losses.ratios import weights
from losses.topr import TOPR

if TYPE_CHECKING:
    from losses.inputs import LossInputs


@dataclass(frozen=True, kw_only=True)
class Corrected(Composite):
    """loss_t = weight_t base_t + kl_t.

    A weight by rho = old / behaviour needs a base whose own ratio is against old, so that the product is
    pi / behaviour and nothing is corrected twice. With one update a step old is the current pass itself, and the
    base's ratio is 1. Under rejections alone the base keeps its own ratio. The penalty is not weighed, and acts on
    rejected tokens too.
    """

    base: PPOClip | DIS | CISPO | GSPO | PolicyGradient | DPPO | TOPR | Kimi15 = field(default_factory=PPOClip)
    """Objective."""
    corrections: Corrections = field(default_factory=Corrections)
    """Weights and rejections."""
    kl: KLPenalty = field(default_factory=KLPenalty)
    """Penalty to a reference policy."""

    def __post_init__(self) -> None:
        name = type(self.base).__name__
        if self.corrections.weighs and reads(self.base, WeighsBehaviour):
            raise ValueError(
                f"Corrected: {name} weighs by trainer / behaviour itself: use rejections with it, or another base"
            )
        if self.corrections.active and reads(self.base, WholeGroups):
            raise ValueError(f"Corrected: {name} is no sum over tokens, so their weights mean nothing to it")

    def parts(self) -> tuple[Objective, ...]:
        return (self.base, self.kl) if self.kl.coefficient else (self.base,)

    def __call__(self, inputs: LossInputs) -> Terms:
        weight_T, diagnostics = self.corrections(inputs)
        own = inputs
        if self.corrections.weighs and inputs.old_T is None:
            own = replace(inputs, old_T=inputs.logprobs_T.detach())
        base = self.base(own)
        zero_T = weight_T == 0
        diagnostics |= {"rejected": zero_T.to(weight_T.dtype), "masked": zero_T.to(weight_T.dtype)}
        for name, value_T in base.diagnostics_T.items():
            diagnostics[name] = value_T.maximum(diagnostics[name]) if name in diagnostics else value_T
        diagnostics |= weights(weight_T * base.diagnostics_T.get("weight", 1.0))
        loss_T = weight_T * base.loss_T
        if self.kl.coefficient:
            kl = self.kl(inputs)
            loss_T, diagnostics = loss_T + kl.loss_T, diagnostics | kl.diagnostics_T
        return Terms(
            loss_T=loss_T,
            diagnostics_T=diagnostics,
            kept_T=~zero_T if base.kept_T is None else base.kept_T & ~zero_T,
        )
