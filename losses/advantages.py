"""Advantage estimators: plain functions of the rewards of one step and of what they are compared within.

GRPO is `group_norm`, Dr.GRPO `group_mean`, RLOO `leave_one_out`, REINFORCE++ `whitened` or `group_mean_whitened`.

Axis legend: `_N` is the rollouts of a step, `_G` its groups. Computed in float64, so equal rewards give exactly 0.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

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


def leave_one_out(rewards_N: Tensor, groups_N: Tensor) -> Tensor:
    """Reward minus the mean of the others in its group (RLOO, arXiv 2402.14740, eq. 8), which is `group_mean` times
    G / (G - 1); a group of one gets 0."""
    centred_N, member_N, size_G = _centred(rewards_N, groups_N)
    return (centred_N * (size_G / (size_G - 1).clamp(min=1))[member_N]).to(rewards_N.dtype)


def whitened(rewards_N: Tensor, groups_N: Tensor) -> Tensor:
    """Reward minus the mean over all rollouts, over their unbiased standard deviation + 1e-6 (REINFORCE++, arXiv
    2501.03262), whatever the groups. Every rollout counts once, however long."""
    return _whitened(rewards_N.double()).to(rewards_N.dtype)


def group_mean_whitened(rewards_N: Tensor, groups_N: Tensor) -> Tensor:
    """`group_mean`, then `whitened` (REINFORCE++ with baseline, arXiv 2501.03262)."""
    return _whitened(_centred(rewards_N, groups_N)[0]).to(rewards_N.dtype)


class ByRow(ABC):
    """Base of an estimator that compares a rollout with earlier ones of its dataset row.

    It is called once a step, with the number of each rollout's row in place of its group, and remembers. Every trainer
    rank holds its own and sees the same calls; checkpoints keep what it remembers.
    """

    @abstractmethod
    def __call__(self, rewards_N: Tensor, rows_N: Tensor) -> Tensor: ...

    @abstractmethod
    def state(self) -> Any:
        """What another object needs to go on, as plain JSON."""

    @abstractmethod
    def load_state(self, state: Any) -> None:
        """Go on from another's state.

        Raises:
            ValueError: it is no such state.
        """


class RunningMean(ByRow):
    """Reward minus the mean of the last `window` rewards that the same dataset row got before this call.

    For one rollout per row, where there is no group (SAO, arXiv 2607.07508, ablation of the critic). A row not seen
    before is compared to the mean of all rewards of the call.

    Args:
        window: rewards remembered of each row.
    """

    def __init__(self, window: int = 8) -> None:
        if window < 1:
            raise ValueError(f"RunningMean: window must be at least 1, got {window}")
        self.window = window
        self.recent: dict[int, list[float]] = {}
        """By row, oldest first."""

    def state(self) -> list[list[Any]]:
        return [[row, list(rewards)] for row, rewards in self.recent.items()]

    def load_state(self, state: list[list[Any]]) -> None:
        try:
            recent = {row: [math.fsum([reward]) for reward in rewards] for row, rewards in state}
        except (TypeError, ValueError) as error:
            raise ValueError(f"RunningMean: its state is no list of [row, rewards]: {error}") from error
        rewards_of_all = [reward for rewards in recent.values() for reward in rewards]
        if not all(isinstance(row, int) for row in recent) or not all(map(math.isfinite, rewards_of_all)):
            raise ValueError("RunningMean: its state is no list of [row, rewards]: rows are integers, rewards finite")
        self.recent = {row: rewards[-self.window :] for row, rewards in recent.items()}

    def __call__(self, rewards_N: Tensor, rows_N: Tensor) -> Tensor:
        rows, rewards = rows_N.tolist(), rewards_N.tolist()
        start = math.fsum(rewards) / max(1, len(rewards))
        baseline = [math.fsum(known) / len(known) if (known := self.recent.get(row)) else start for row in rows]
        for row, reward in zip(rows, rewards, strict=True):
            self.recent[row] = [*self.recent.get(row, []), reward][-self.window :]
        return (rewards_N.double() - rewards_N.double().new_tensor(baseline)).to(rewards_N.dtype)


def _whitened(values_N: Tensor) -> Tensor:
    centred_N = values_N - values_N.sum() / max(1, len(values_N))
    return centred_N / ((centred_N.square().sum() / max(1, len(values_N) - 1)).sqrt() + 1e-6)


def _centred(rewards_N: Tensor, groups_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards minus group mean (float64), index of each rollout's group, and size of each group (float64)."""
    _, member_N, size_G = groups_N.unique(return_inverse=True, return_counts=True)
    rewards_N, size_G = rewards_N.double(), size_G.double()
    mean_G = rewards_N.new_zeros(len(size_G)).index_add(0, member_N, rewards_N) / size_G
    return rewards_N - mean_G[member_N], member_N, size_G
