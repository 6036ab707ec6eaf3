"""Generalised advantage estimation over the actions of rollouts.

Axis legend: `_T` is tokens, in order within each rollout; `_N` is rollouts; `_A` is action tokens, rollout by rollout;
`_LN` is the same by place in the rollout.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def adaptive_lambda(lengths_N: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """lambda = 1 - 1 / (alpha l) by the rollout's length in actions (VAPO, arXiv 2504.05118), limited to [0, 1].

    Returns lambda [N] in float64 and the share that was limited: below l = 1 / alpha the formula is negative.
    """
    raw_N = 1 - 1 / (alpha * lengths_N.double())
    return raw_N.clamp(0, 1), ((raw_N < 0) | (raw_N > 1)).double().mean()


def gae(
    rewards_T: Tensor,
    values_T: Tensor,
    action_T: Tensor,
    segment_T: Tensor,
    lambda_N: Tensor,
    *,
    gamma: float = 1.0,
    bootstrap_N: Tensor | None = None,
) -> Tensor:
    """Advantages [T] of action tokens, 0 elsewhere (arXiv 1506.02438, eq. 16), in float64 within.

    The token after the last of an action is the first of the next action: tokens of prompt and observations have
    neither value nor advantage (SAO, arXiv 2607.07508, skip-observation GAE). With lambda 1, advantage + value is the
    return that a critic learns.

    Args:
        rewards_T: on action tokens; an outcome stands on the rollout's last one.
        values_T: of the state before each action token; read nowhere else.
        action_T: bool: tokens that the policy drew.
        segment_T: int64: number of the token's rollout, below N.
        lambda_N: trace decay of each rollout.
        bootstrap_N: value after the last action: 0 for episodes that ended, the critic's for cut ones. Default 0.

    Raises:
        ValueError: a token that is no action has a reward, which would be lost.
    """
    if (rewards_T[~action_T] != 0).any():
        raise ValueError("gae: a token that is no action has a reward: put it on the last token of its action")
    position_A = action_T.nonzero().squeeze(1)
    position_A = position_A[segment_T[position_A].argsort(stable=True)]
    rollout_A = segment_T[position_A]
    count_N = rollout_A.bincount(minlength=len(lambda_N))
    place_A = rollout_A.new_ones(len(rollout_A)).cumsum(0) - 1 - (count_N.cumsum(0) - count_N)[rollout_A]
    longest = int(count_N.max()) if len(position_A) else 0
    empty_LN = values_T.new_zeros(longest + 1, len(lambda_N)).double()
    rewards_LN = empty_LN.index_put((place_A, rollout_A), rewards_T[position_A].double())
    values_LN = empty_LN.index_put((place_A, rollout_A), values_T[position_A].double())
    if bootstrap_N is not None:
        ended_N = count_N.gt(0).nonzero().squeeze(1)
        values_LN = values_LN.index_put((count_N[ended_N], ended_N), bootstrap_N[ended_N].double())
    advantages_LN, decay_N = empty_LN.clone(), gamma * lambda_N.double()
    for place in range(longest - 1, -1, -1):
        delta_N = rewards_LN[place] + gamma * values_LN[place + 1] - values_LN[place]
        traced_N = delta_N + decay_N * advantages_LN[place + 1]
        advantages_LN[place] = traced_N.where(place < count_N, 0.0)
    of_actions_A = advantages_LN[place_A, rollout_A].to(values_T.dtype)
    return values_T.new_zeros(len(values_T)).index_put((position_A,), of_actions_A)
