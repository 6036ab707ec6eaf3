"""Advantage estimators: plain functions of the rewards of one step, each compared within its group.

Axis legend: `_N` is the rollouts of a step. Computed in float64, so equal rewards give exactly 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def group_mean(rewards_N: Tensor, groups_N: Tensor) -> Tensor:
    """Reward minus the mean of its group (Dr.GRPO, arXiv 2503.20783): same shape and dtype; a group of one gets 0.

    `groups_N` holds any int64 that names the group.
    """
    centred_N, _, _ = _centred(rewards_N, groups_N)
    return centred_N.to(rewards_N.dtype)


def group_norm(rewards_N: Tensor, groups_N: Tensor) -> Tensor:
    """`group_mean` over the group's unbiased standard deviation + 1e-6 (GRPO, arXiv 2402.03300, section 4.1.2)."""
    centred_N, member_N, size_G = _centred(rewards_N, groups_N)
    squares_G = centred_N.new_zeros(len(size_G)).index_add(0, member_N, centred_N.square())
    std_G = (squares_G / (size_G - 1).clamp(min=1)).sqrt()
    return (centred_N / (std_G[member_N] + 1e-6)).to(rewards_N.dtype)


def _centred(rewards_N: Tensor, groups_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards minus group mean (float64), index of each rollout's group, and size of each group (float64)."""
    _, member_N, size_G = groups_N.unique(return_inverse=True, return_counts=True)
    rewards_N, size_G = rewards_N.double(), size_G.double()
    mean_G = rewards_N.new_zeros(len(size_G)).index_add(0, member_N, rewards_N) / size_G
    return rewards_N - mean_G[member_N], member_N, size_G
