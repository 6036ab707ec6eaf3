"""Objectives and advantage estimators. Importing them needs no torch; what sums and chunks lies in `losses.ops`.

Names of the field that are combinations, and so have no class:

| name | objective | advantage | denominator |
|---|---|---|---|
| GRPO | `PPOClip(clip_high=0.2)` | `group_norm` | mean over rollouts of token means |
| Dr.GRPO | `PPOClip(clip_high=0.2)` | `group_mean` | a constant |
| DAPO | `PPOClip()`, `overlong_penalty` | `group_norm`, zero-variance groups refilled | tokens |
| RLOO, REINFORCE++ | `PolicyGradient()`, `PPOClip()` | `leave_one_out`; `whitened`, `group_mean_whitened` | tokens |
| TIS | `Corrected` with `token_cap` or `sequence_cap` | any | tokens |
| AIPO | `Corrected(base=PolicyGradient(), ...)` with `token_cap` | any | tokens |
| IcePop | `Corrected(base=PPOClip(), ...)` with `token_band` | any | tokens |
| MIS, Geo-RS, k3 | `Corrected` with `sequence_reject`, `geometric_band`, `k3_reject` | any | tokens or survivors |
| decoupled PPO (AReaL) | `Corrected(base=PPOClip(), ...)` with `token_cap=5` | any | tokens |
"""

from losses.advantages import ByRow, RunningMean, group_mean, group_mean_whitened, group_norm, leave_one_out, whitened
from losses.cispo import CISPO
from losses.corrected import Corrected
from losses.corrections import Corrections
from losses.dis import DIS
from losses.distill import Distill, DistillForward
from losses.dppo import DPPO
from losses.filters import overlong_penalty, resample_on_correct, tool_penalty
from losses.gae import adaptive_lambda, gae
from losses.gspo import GSPO
from losses.inputs import (
    Composite,
    LossInputs,
    Objective,
    ReadsOld,
    ReadsReference,
    ReadsTeacher,
    Terms,
    WeighsBehaviour,
    WholeGroups,
    reads,
)
from losses.kimi import Kimi15
from losses.kl import KLPenalty
from losses.online_dpo import OnlineDPO
from losses.policy_gradient import PolicyGradient
from losses.ppo import PPOClip
from losses.topr import TOPR

__all__ = [
    "CISPO",
    "DIS",
    "DPPO",
    "GSPO",
    "TOPR",
    "ByRow",
    "Composite",
    "Corrected",
    "Corrections",
    "Distill",
    "DistillForward",
    "KLPenalty",
    "Kimi15",
    "LossInputs",
    "Objective",
    "OnlineDPO",
    "PPOClip",
    "PolicyGradient",
    "ReadsOld",
    "ReadsReference",
    "ReadsTeacher",
    "RunningMean",
    "Terms",
    "WeighsBehaviour",
    "WholeGroups",
    "adaptive_lambda",
    "gae",
    "group_mean",
    "group_mean_whitened",
    "group_norm",
    "leave_one_out",
    "overlong_penalty",
    "reads",
    "resample_on_correct",
    "tool_penalty",
    "whitened",
]
