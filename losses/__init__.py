"""Objectives and advantage estimators. Importing them needs no torch; what sums and chunks lies in `losses.ops`."""

from losses.advantages import group_mean, group_norm
from losses.dis import DIS
from losses.inputs import LossInputs, Objective, ReadsOld, Terms
from losses.policy_gradient import PolicyGradient
from losses.ppo import PPOClip

__all__ = [
    "DIS",
    "LossInputs",
    "Objective",
    "PPOClip",
    "PolicyGradient",
    "ReadsOld",
    "Terms",
    "group_mean",
    "group_norm",
]
