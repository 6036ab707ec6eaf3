"""Preferences within a group.

Axis legend: `_C` is the tokens that count, `_N` the rollouts that have any; `_NN` is chosen by rejected rollout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from losses.inputs import ReadsReference, Terms, WholeGroups, required
from losses.ratios import log_ratio, rollout_sum

if TYPE_CHECKING:
    from losses.inputs import LossInputs


@dataclass(frozen=True, kw_only=True)
class OnlineDPO(ReadsReference, WholeGroups):
    """Direct preference optimisation over the pairs of a group with unequal advantages (arXiv 2402.04792, eq. 2).

    A pair's loss is -log sigmoid(beta (h(chosen) - h(rejected))), h = sum over a rollout's tokens that count of
    log(pi / pi_reference), chosen the one with the larger advantage. A group's loss is the mean over its pairs, 0
    without any. Half of a pair's share is spread evenly over the tokens of either rollout, so summed over the tokens
    of a step this is the sum over groups: divide by groups, or by rollouts, which is the same up to the group's size.
    A mean over tokens would weigh groups by their length.
    """

    beta: float = 0.1
    """How sharply a log ratio counts: larger keeps the policy nearer to the reference."""

    def __post_init__(self) -> None:
        if not self.beta > 0:
            raise ValueError(f"OnlineDPO: beta must be above 0, got {self.beta}")

    def __call__(self, inputs: LossInputs) -> Terms:
        log_T = log_ratio(inputs.logprobs_T, required(inputs.ref_T, "ref_T", self))
        counted_C = inputs.mask_T.nonzero().squeeze(1)
        segment_N, number_C, count_N = inputs.segment_T[counted_C].unique(return_inverse=True, return_counts=True)
        some_N = counted_C.new_zeros(len(segment_N)).index_copy(0, number_C, counted_C)
        h_N, advantages_N, group_N = (
            c[some_N] for c in (rollout_sum(log_T, inputs), inputs.advantages_T, inputs.group_T)
        )
        same_NN = group_N[:, None] == group_N
        pair_NN = same_NN & (advantages_N[:, None] > advantages_N)
        margin_NN = self.beta * (h_N[:, None] - h_N)
        loss_NN = margin_NN.new_zeros(()).logaddexp(-margin_NN).where(pair_NN, 0.0)
        pairs_N = (same_NN * pair_NN.sum(1)).sum(1).clamp(min=1)
        share_N = (loss_NN.sum(0) + loss_NN.sum(1)) / 2 / pairs_N / count_N
        ratio_T = log_ratio(inputs.logprobs_T.detach(), inputs.behaviour_T).exp()
        return Terms(
            loss_T=log_T.new_zeros(len(log_T)).index_put((counted_C,), share_N[number_C]),
            diagnostics_T={"ratio": ratio_T},
        )
