"""From the groups of a step to packed microbatches: who trains what, from metadata alone, then the columns.

A rollout's prompt is what comes before its first action. Within a microbatch rollouts with the same prompt share it:
it is computed once, and what follows attends to it and to itself. Attention is causal: only the work changes.

Axis legend: `_S` is the computed tokens of one microbatch: its distinct prompts one after another, then what follows
in each rollout, without the rollout's last token, which predicts nothing. `_T` is its targets: every token of a
rollout from the first action on, one rollout after another; prompts are no targets. The shift by one happens here and
only here, in `source_T`: entry t of every `_T` column is about target token t, which the computed token `source_T[t]`
predicts. First targets after the same prompt have one source, the prompt's last token. `_N` is the rollouts of the
whole step.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from actors import payload
from actors.types import Group, GroupMeta, Kept, Rollout, Taken
from losses.advantages import ByRow
from losses.inputs import LossInputs
from losses.ops import KeptSets

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
    """Rollouts packed one after another; tensors are [S] or [T]."""

    inputs_S: Tensor
    """int64 tokens."""
    positions_S: Tensor
    """int64, of the token in its rollout."""
    prompts: tuple[int, ...]
    """Tokens of each distinct prompt."""
    continuations: tuple[tuple[int, int], ...]
    """(number of its prompt, computed tokens) of each rollout that has computed tokens of its own."""
    source_T: Tensor
    """int64: the computed token that predicts the target."""
    targets_T: Tensor
    """int64 tokens."""
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
    budget: int
    """Sum of their `sampling.max_tokens`."""
    kept: KeptSets | None = None
    """What each target was drawn from; None if that is all tokens for every one."""
    biased: int = 0
    """Rollouts that were drawn from sets which nobody told."""

    def to(self, device: torch.device) -> Microbatch:
        """The same on a device."""
        moved: dict[str, Any] = {n: v.to(device) for n, v in vars(self).items() if isinstance(v, Tensor)}
        if self.kept is not None:
            moved["kept"] = KeptSets(*(column.to(device) for column in self.kept))
        return replace(self, **moved)

    def loss_inputs(
        self,
        logprobs_T: Tensor,
        entropy_T: Tensor,
        old_T: Tensor | None = None,
        ref_T: Tensor | None = None,
        teacher_T: Tensor | None = None,
    ) -> LossInputs:
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
            ref_T=ref_T,
            teacher_T=teacher_T,
        )


def plan(
    taken: Taken, *, ranks: int, updates: int, microbatch_tokens: int, whole_groups: bool = False
) -> list[tuple[Pieces, ...]]:
    """For every optimizer update of a step, each rank's microbatches: `plan[update][rank][microbatch]`.

    A pure function of the metadata, so every rank computes the same and reads only the payloads that it needs.
    Updates are runs of whole groups, as even as they go: at least one, and fewer than asked for when there are fewer
    groups. In one update all ranks have equally many microbatches, at least one: missing ones are empty and stand for
    `padding()`, since ranks must run the same number of forwards and backwards. With `whole_groups` the members of a
    group lie in one microbatch, however large.
    """
    plans, sizes = [], Sizes(taken.groups)
    for groups in _runs(range(len(taken.groups)), max(1, min(updates, len(taken.groups)))):
        shares = share(sizes, ranks, groups, whole_groups=whole_groups)
        per_rank = [_pieces(members, sizes, microbatch_tokens, whole_groups) for members in shares]
        most = max(1, *(len(pieces) for pieces in per_rank))
        plans.append(tuple(pieces + ((),) * (most - len(pieces)) for pieces in per_rank))
    return plans


class Sizes:
    """Tokens that the rollouts of a step are expected to cost, from metadata.

    Where all members of a group have equally many tokens that nobody generated, those are taken for a prompt that they
    share: exact for one-turn rollouts of one prompt. Otherwise nothing is taken as shared, which is never too little.
    """

    def __init__(self, groups: Sequence[GroupMeta]) -> None:
        self.prompts: list[int] = []
        """Of each group."""
        self.own: list[list[int]] = []
        """Of each group's members, beyond the prompt."""
        for group in groups:
            given = group.lengths - group.actions
            prompt = int(given[0]) if (given == given[0]).all() else 0
            self.prompts.append(prompt)
            self.own.append(np.maximum(group.lengths - 1 - prompt, 0).tolist())

    def added(self, members: Sequence[Member], computed: Collection[int]) -> int:
        """Tokens of these rollouts of one group where the prompts of groups `computed` are there already."""
        shared = self.prompts[members[0].group] if members[0].group in computed else 0
        return self.total(members) - shared

    def total(self, members: Sequence[Member]) -> int:
        """Tokens of rollouts computed together."""
        return sum(self.own[m.group][m.member] for m in members) + sum(
            self.prompts[group] for group in {m.group for m in members}
        )


def share(sizes: Sizes, ranks: int, chosen: Sequence[int], *, whole_groups: bool = False) -> list[list[Member]]:
    """Give every rollout of the chosen groups to one rank, so that the heaviest has least to compute.

    Dealt as whole groups, whose prompts are then computed once, or rollout by rollout if that balances better and
    `whole_groups` does not forbid it. Each rank's rollouts come group by group.
    """
    groups = [[Member(group, member) for member in range(len(sizes.own[group]))] for group in chosen]
    rollouts = [[member] for group in groups for member in group]
    dealt = [_deal(units, sizes, ranks) for units in ((groups,) if whole_groups else (groups, rollouts))]
    best = min(dealt, key=lambda shares: max(map(sizes.total, shares)))
    return [sorted(members) for members in best]


def _deal(units: Sequence[Sequence[Member]], sizes: Sizes, ranks: int) -> list[list[Member]]:
    """Largest unit first, to the lightest rank: within 4/3 of the best split (Graham 1969) where nothing is shared."""
    load = [(0, rank) for rank in range(ranks)]
    shares: list[list[Member]] = [[] for _ in range(ranks)]
    computed: list[set[int]] = [set() for _ in range(ranks)]
    for unit in sorted(units, key=lambda unit: (-sizes.total(unit), unit)):
        tokens, rank = load[0]
        shares[rank] += unit
        heapq.heapreplace(load, (tokens + sizes.added(unit, computed[rank]), rank))
        computed[rank].add(unit[0].group)
    return shares


def _pieces(members: Sequence[Member], sizes: Sizes, limit: int, whole_groups: bool) -> Pieces:
    """Cut a rank's rollouts into microbatches of at most `limit` tokens; one rollout or group may have more."""
    pieces: list[tuple[Member, ...]] = []
    current: list[Member] = []
    tokens, computed = 0, set[int]()
    for _, unit in itertools.groupby(members, key=lambda member: member.group if whole_groups else member):
        added = list(unit)
        if tokens and tokens + sizes.added(added, computed) > limit:
            pieces.append(tuple(current))
            current, tokens, computed = [], 0, set()
        tokens += sizes.added(added, computed)
        current += added
        computed.add(added[0].group)
    return tuple(pieces) + ((tuple(current),) if current else ())


def _runs(items: Sequence[T], count: int) -> list[Sequence[T]]:
    """Cut into `count` runs whose sizes differ by at most one."""
    cuts = [len(items) * i // count for i in range(count + 1)]
    return [items[a:b] for a, b in itertools.pairwise(cuts)]


def advantages(taken: Taken, estimate: Advantage) -> list[np.ndarray]:
    """Each group's advantages [members], estimated once over the rewards of the whole step. Groups are named by their
    ticket, or by their dataset row to an estimator that asks for it.

    Raises:
        ValueError: the estimator gave another shape, or a value that is not finite.
    """
    if not taken.groups:
        return []
    sizes = [len(group.rewards) for group in taken.groups]
    rewards_N = torch.from_numpy(np.concatenate([group.rewards for group in taken.groups]))
    names = [group.row if isinstance(estimate, ByRow) else group.ticket for group in taken.groups]
    groups_N = torch.from_numpy(np.repeat(np.array(names, dtype=np.int64), sizes))
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
    """Pack rollouts; `step` is the version trained from. One without a target leaves no trace.

    Without any target the microbatch is `padding()`.
    """
    entries = [
        (rollout, start, ticket, advantage)
        for rollout, ticket, advantage in zip(rollouts, tickets, advantages, strict=True)
        if (start := _first_target(rollout)) < len(rollout.tokens)
    ]
    if not entries:
        return padding()
    rollouts, starts, tickets, advantages = (list(column) for column in zip(*entries, strict=True))
    counts = np.array([len(rollout.tokens) - start for rollout, start in zip(rollouts, starts, strict=True)])
    prompts: dict[bytes, np.ndarray] = {}
    for rollout, start in zip(rollouts, starts, strict=True):
        prompts.setdefault(rollout.tokens[:start].tobytes(), rollout.tokens[:start])
    numbers = {key: number for number, key in enumerate(prompts)}
    prompt_of = [numbers[rollout.tokens[:start].tobytes()] for rollout, start in zip(rollouts, starts, strict=True)]

    def targets(columns: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate([column[start:] for column, start in zip(columns, starts, strict=True)])

    def spread(values: Sequence[float], dtype: type) -> Tensor:
        return torch.from_numpy(np.repeat(np.asarray(values, dtype=dtype), counts))

    lengths = np.array([len(prompt) for prompt in prompts.values()])
    first = np.cumsum(counts) - counts
    source = lengths.sum() - 1 + np.arange(counts.sum()) - np.repeat(np.arange(len(counts)), counts)
    source[first] = (np.cumsum(lengths) - 1)[prompt_of]
    behaviour = targets([rollout.logprobs for rollout in rollouts])
    versions = targets([rollout.versions for rollout in rollouts])
    staleness = step - versions
    mask = targets([rollout.mask for rollout in rollouts]) & np.isfinite(behaviour)
    if max_staleness is not None:
        mask &= staleness <= max_staleness
    segment = np.repeat(np.arange(len(rollouts)), counts)
    kept = _kept(rollouts, starts, tickets)
    own = [rollout.tokens[start:-1] for rollout, start in zip(rollouts, starts, strict=True)]
    positions = [np.arange(n) for n in lengths]
    positions += [np.arange(start, start + len(tokens)) for start, tokens in zip(starts, own, strict=True)]
    return Microbatch(
        inputs_S=torch.from_numpy(np.concatenate([*prompts.values(), *own]).astype(np.int64)),
        positions_S=torch.from_numpy(np.concatenate(positions)),
        prompts=tuple(lengths.tolist()),
        continuations=tuple((n, len(tokens)) for n, tokens in zip(prompt_of, own, strict=True) if len(tokens)),
        source_T=torch.from_numpy(source),
        targets_T=torch.from_numpy(targets([r.tokens for r in rollouts]).astype(np.int64)),
        mask_T=torch.from_numpy(mask),
        behaviour_T=torch.from_numpy(np.where(mask, behaviour, 0).astype(np.float32)),
        versions_T=torch.from_numpy(versions.astype(np.int32)),
        staleness_T=torch.from_numpy(np.where(mask, staleness, 0).astype(np.int32)),
        advantages_T=spread(advantages, np.float32),
        segment_T=torch.from_numpy(segment),
        group_T=spread(tickets, np.int64),
        temperature_T=spread([r.sampling.temperature or 1.0 for r in rollouts], np.float32),
        sequences=len(counted := np.unique(segment[mask])),
        budget=sum(rollouts[i].sampling.max_tokens for i in counted.tolist()),
        kept=kept,
        biased=sum(rollout.biased for rollout in rollouts),
    )


def _kept(rollouts: Sequence[Rollout], starts: Sequence[int], tickets: Sequence[int]) -> KeptSets | None:
    """The sets of the targets; None if no target has one.

    Raises:
        ValueError: they are not of as many tokens as the rollout has, or do not hold the token itself.
    """
    if all(rollout.kept is None for rollout in rollouts):
        return None
    parts = []
    for rollout, start, ticket in zip(rollouts, starts, tickets, strict=True):
        n = len(rollout.tokens)
        kept = Kept.all_of(n) if rollout.kept is None else rollout.kept
        if len(kept.counts) != n:
            raise ValueError(f"ticket {ticket}: a rollout of {n} tokens comes with kept sets of {len(kept.counts)}")
        holds, owner = kept.counts == 0, np.repeat(np.arange(n), kept.counts)
        holds[owner[kept.ids == rollout.tokens[owner]]] = True
        if not holds.all():
            at = int(holds.argmin())
            raise ValueError(
                f"ticket {ticket}: token {rollout.tokens[at]} at {at} of a rollout is not in the kept set that it was "
                "drawn from: its engine returned sets of other tokens"
            )
        parts.append(kept.split([start, n - start])[1])
    kept = Kept.join(parts)
    if not len(kept.ids):
        return None
    return KeptSets(torch.from_numpy(kept.ids.astype(np.int64)), torch.from_numpy(kept.counts.astype(np.int64)))


def _first_target(rollout: Rollout) -> int:
    """The first action, or the end without one. Token 0 is never a target: nothing predicts it."""
    return max(1, int(rollout.mask.argmax())) if rollout.mask.any() else len(rollout.tokens)


def padding() -> Microbatch:
    """One token and target that count for nothing: a rank with nothing left to do still joins forward and backward."""
    none, number = torch.zeros(1, dtype=torch.int64), torch.zeros(1)
    return Microbatch(
        inputs_S=none,
        positions_S=none,
        prompts=(1,),
        continuations=(),
        source_T=none,
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
        budget=0,
    )
