"""From the groups of a step to packed microbatches: who trains what, from metadata alone, then the columns.

Axis legend: `_T` is the packed axis of one microbatch: for every rollout of n tokens its n - 1 targets, one rollout
after another. The shift by one happens here and only here: entry t holds input token t, target token t + 1 and every
other column of that target. `_N` is the rollouts of the whole step.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from actors import payload
from actors.types import Group, GroupMeta, Rollout, Taken
from losses.inputs import LossInputs

Advantage = Callable[[Tensor, Tensor], Tensor]
"""(rewards [N] float32, group ids [N] int64) -> advantages [N]; see `losses.advantages`."""
T = TypeVar("T")


class Member(NamedTuple):
    """One rollout of a step."""

    group: int
    """Index into `Taken.groups`."""
    member: int


Pieces = tuple[tuple[Member, ...], ...]
"""The microbatches of one rank in one update."""


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """Rollouts packed one after another; all tensors are [T]."""

    inputs_T: Tensor
    """int64 input tokens."""
    positions_T: Tensor
    """int64, from 0 in every rollout."""
    lengths: tuple[int, ...]
    """Entries of each rollout; they sum to T."""
    targets_T: Tensor
    """int64: the token after each input."""
    mask_T: Tensor
    """bool: targets that count: acted, fresh enough, with a finite behaviour logprob."""
    behaviour_T: Tensor
    """float32; 0 outside the mask."""
    versions_T: Tensor
    """int32; -1 outside actions."""
    staleness_T: Tensor
    """int32: version trained from minus the target's version; 0 outside the mask."""
    advantages_T: Tensor
    """float32."""
    segment_T: Tensor
    """int64: number of the rollout within the microbatch."""
    group_T: Tensor
    """int64: ticket."""
    temperature_T: Tensor
    """float32, never 0."""
    sequences: int
    """Rollouts with at least one target that counts."""

    def to(self, device: torch.device) -> Microbatch:
        """The same on a device."""
        moved: dict[str, Any] = {n: v.to(device) for n, v in vars(self).items() if isinstance(v, Tensor)}
        return replace(self, **moved)

    def loss_inputs(self, logprobs_T: Tensor, entropy_T: Tensor, old_T: Tensor | None = None) -> LossInputs:
        """What the objective gets."""
        return LossInputs(
            logprobs_T=logprobs_T,
            entropy_T=entropy_T,
            behaviour_T=self.behaviour_T,
            advantages_T=self.advantages_T,
            mask_T=self.mask_T,
            staleness_T=self.staleness_T,
            segment_T=self.segment_T,
            group_T=self.group_T,
            temperature_T=self.temperature_T,
            old_T=old_T,
        )


def plan(taken: Taken, *, ranks: int, updates: int, microbatch_tokens: int) -> list[tuple[Pieces, ...]]:
    """For every optimizer update of a step, each rank's microbatches: `plan[update][rank][microbatch]`.

    A pure function of the metadata, so every rank computes the same and reads only the payloads that it needs.
    Updates are runs of whole groups, as even as they go: at least one, and fewer than asked for when there are fewer
    groups. In one update all ranks have equally many microbatches, at least one: missing ones are empty and stand for
    `padding()`, since ranks must run the same number of forwards and backwards.
    """
    plans = []
    for groups in _runs(range(len(taken.groups)), max(1, min(updates, len(taken.groups)))):
        per_rank = [
            _pieces(members, taken.groups, microbatch_tokens) for members in share(taken.groups, ranks, groups)
        ]
        most = max(1, *(len(pieces) for pieces in per_rank))
        plans.append(tuple(pieces + ((),) * (most - len(pieces)) for pieces in per_rank))
    return plans


def share(groups: Sequence[GroupMeta], ranks: int, chosen: Sequence[int]) -> list[list[Member]]:
    """Give every rollout of the chosen groups to one rank, balanced by tokens: longest first, to the lightest rank.

    Greedy longest-first keeps the heaviest rank within 4/3 of the best split (Graham 1969). Each rank's rollouts come
    longest first.
    """
    rollouts = [Member(group, member) for group in chosen for member in range(len(groups[group].lengths))]
    rollouts.sort(key=lambda m: (-_entries(groups, m), m))
    load = [(0, rank) for rank in range(ranks)]
    shares: list[list[Member]] = [[] for _ in range(ranks)]
    for member in rollouts:
        tokens, rank = load[0]
        shares[rank].append(member)
        heapq.heapreplace(load, (tokens + _entries(groups, member), rank))
    return shares


def _entries(groups: Sequence[GroupMeta], member: Member) -> int:
    return int(groups[member.group].lengths[member.member]) - 1


def _pieces(members: Sequence[Member], groups: Sequence[GroupMeta], limit: int) -> Pieces:
    """Cut a rank's rollouts, longest first, into microbatches of at most `limit` entries."""
    pieces: list[tuple[Member, ...]] = []
    current: list[Member] = []
    tokens = 0
    for member in members:
        entries = _entries(groups, member)
        if current and tokens + entries > limit:
            pieces.append(tuple(current))
            current, tokens = [], 0
        current.append(member)
        tokens += entries
    return tuple(pieces) + ((tuple(current),) if current else ())


def _runs(items: Sequence[T], count: int) -> list[Sequence[T]]:
    """Cut into `count` runs whose sizes differ by at most one."""
    cuts = [len(items) * i // count for i in range(count + 1)]
    return [items[a:b] for a, b in itertools.pairwise(cuts)]


def advantages(taken: Taken, estimate: Advantage) -> list[np.ndarray]:
    """Each group's advantages [members], estimated once over the rewards of the whole step.

    Raises:
        ValueError: the estimator gave another shape, or a value that is not finite.
    """
    if not taken.groups:
        return []
    sizes = [len(group.rewards) for group in taken.groups]
    rewards_N = torch.from_numpy(np.concatenate([group.rewards for group in taken.groups]))
    groups_N = torch.from_numpy(np.repeat(np.array([group.ticket for group in taken.groups], dtype=np.int64), sizes))
    estimated_N = estimate(rewards_N, groups_N)
    if estimated_N.shape != rewards_N.shape or not estimated_N.isfinite().all():
        raise ValueError(
            f"step {taken.step}: {estimate} gave {tuple(estimated_N.shape)} advantages for {len(rewards_N)} rewards, "
            f"{int((~estimated_N.isfinite()).sum())} of them not finite"
        )
    return np.split(estimated_N.to(torch.float32).numpy(), np.cumsum(sizes)[:-1])


def load(taken: Taken, pieces: Pieces, advantage: Sequence[np.ndarray]) -> list[Microbatch]:
    """Read the payloads that these microbatches need, each once, and pack them."""
    needed = {member.group for piece in pieces for member in piece}
    read: dict[int, Group] = {group: payload.read(taken.groups[group].handle) for group in sorted(needed)}
    return [
        pack(
            [read[m.group].rollouts[m.member] for m in piece],
            tickets=[taken.groups[m.group].ticket for m in piece],
            advantages=[float(advantage[m.group][m.member]) for m in piece],
            step=taken.step,
            max_staleness=taken.max_staleness,
        )
        if sum(_entries(taken.groups, m) for m in piece)
        else padding()
        for piece in pieces
    ]


def pack(
    rollouts: Sequence[Rollout],
    *,
    tickets: Sequence[int],
    advantages: Sequence[float],
    step: int,
    max_staleness: int | None = None,
) -> Microbatch:
    """Pack rollouts; `step` is the version trained from. A rollout of one token has no target and leaves no trace."""
    counts = np.array([len(rollout.tokens) - 1 for rollout in rollouts])

    def targets(columns: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate([column[1:] for column in columns])

    def spread(values: Sequence[float] | np.ndarray, dtype: type) -> Tensor:
        return torch.from_numpy(np.repeat(np.asarray(values, dtype=dtype), counts))

    behaviour = targets([rollout.logprobs for rollout in rollouts])
    versions = targets([rollout.versions for rollout in rollouts])
    staleness = step - versions
    mask = targets([rollout.mask for rollout in rollouts]) & np.isfinite(behaviour)
    if max_staleness is not None:
        mask &= staleness <= max_staleness
    segment = np.repeat(np.arange(len(rollouts)), counts)
    return Microbatch(
        inputs_T=torch.from_numpy(np.concatenate([r.tokens[:-1] for r in rollouts]).astype(np.int64)),
        positions_T=torch.from_numpy(np.concatenate([np.arange(count) for count in counts])),
        lengths=tuple(counts[counts > 0].tolist()),
        targets_T=torch.from_numpy(targets([r.tokens for r in rollouts]).astype(np.int64)),
        mask_T=torch.from_numpy(mask),
        behaviour_T=torch.from_numpy(np.where(mask, behaviour, 0).astype(np.float32)),
        versions_T=torch.from_numpy(versions.astype(np.int32)),
        staleness_T=torch.from_numpy(np.where(mask, staleness, 0).astype(np.int32)),
        advantages_T=spread(advantages, np.float32),
        segment_T=torch.from_numpy(segment),
        group_T=spread(tickets, np.int64),
        temperature_T=spread([r.sampling.temperature or 1.0 for r in rollouts], np.float32),
        sequences=len(np.unique(segment[mask])),
    )


def padding() -> Microbatch:
    """One entry that counts for nothing: a rank with nothing left to do still joins forward and backward."""
    none, number = torch.zeros(1, dtype=torch.int64), torch.zeros(1)
    return Microbatch(
        inputs_T=none,
        positions_T=none,
        lengths=(1,),
        targets_T=none,
        mask_T=torch.zeros(1, dtype=torch.bool),
        behaviour_T=number,
        versions_T=torch.full((1,), -1, dtype=torch.int32),
        staleness_T=torch.zeros(1, dtype=torch.int32),
        advantages_T=number,
        segment_T=none,
        group_T=none,
        temperature_T=torch.ones(1),
        sequences=0,
    )
