"""The records that travel between actors: frozen, keyword-only, numpy columns.

Entry t of every per-token column describes token t. Prompt and observation tokens have mask False, logprob 0 and
version -1. Nothing is shifted here: the shift by one (logits at t-1 predict token t) happens once, at packing.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

Finish = Literal["stop", "length", "abort", "error", "timeout"]
TurnKind = Literal["prompt", "action", "observation"]


def require(section: str, low: float, high: float = sys.float_info.max, /, **values: float) -> None:
    """Refuse settings outside [low, high]; NaN lies in no range, infinity only in one that ends with it.

    Raises:
        ValueError: names the first of `values` that does not fit, as `section.name`.
    """
    for name, value in values.items():
        if not low <= value <= high:
            bounds = f"at least {low:g}" if high >= sys.float_info.max else f"in {low:g}..{high:g}"
            raise ValueError(f"{section}.{name} must be {bounds}, not {value}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How a completion is drawn. The seed is not part of it: each request carries its own."""

    temperature: float = 1.0
    """Divides the logits; 0 is greedy, whose reported logprobs are those at temperature 1."""
    top_p: float = 1.0
    """Keeps the smallest set of tokens whose probability reaches this; 1 keeps all. The trainer scores each token over
    the set it was drawn from, if the engine returns that, as `native` does; else ratios are biased, with a warning."""
    top_k: int = 0
    """Keeps the k likeliest tokens; 0 keeps all. The trainer scores as with top_p."""
    max_tokens: int = 0
    """Most tokens of one completion; reaching it finishes with `length`. 0 is what the task asks for,
    else half of the engine's context."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion; the token that completes one is kept and the finish is `stop`."""

    def __post_init__(self) -> None:
        require("sampling", 0, temperature=self.temperature, top_k=self.top_k)
        require("sampling", 1e-6, 1, top_p=self.top_p)
        require("sampling", 0, max_tokens=self.max_tokens)
        if "" in self.stop:
            raise ValueError("sampling.stop has an empty string, which every completion contains: leave it out")

    @property
    def cuts(self) -> bool:
        """Whether draws may leave tokens out. At temperature 0 nothing is drawn."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0)


class RequestId(NamedTuple):
    """Names one completion for the whole run, whatever replica serves it."""

    ticket: int
    attempt: int
    member: int
    turn: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One completion to draw: tokens in, tokens out."""

    id: RequestId
    prompt: np.ndarray
    """int32 [n], at least one token."""
    sampling: Sampling
    seed: int
    """From `derive_seed`: the same request gives the same draw on any replica and in any batch."""
    min_version: int = 0
    """The replica must hold at least this version before it starts: work is born fresh."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """What top_p and top_k left to draw from: for each of n tokens a set of token ids, the drawn one among them."""

    ids: np.ndarray
    """int32 [sum of counts], one token's set after another's."""
    counts: np.ndarray
    """int32 [n]; 0 stands for the whole vocabulary, and for tokens that nobody drew."""

    def __post_init__(self) -> None:
        if self.counts.sum() != len(self.ids):
            raise ValueError(f"kept sets of {self.counts.sum()} tokens in all come with {len(self.ids)} token ids")

    @classmethod
    def of(cls, sets: Sequence[np.ndarray]) -> Kept:
        """One set for each token."""
        return cls(
            ids=np.concatenate([np.zeros(0, np.int32), *sets]), counts=np.array([len(s) for s in sets], np.int32)
        )

    @classmethod
    def all_of(cls, tokens: int) -> Kept:
        """Of so many tokens that were drawn from the whole vocabulary, or by nobody."""
        return cls(ids=np.zeros(0, np.int32), counts=np.zeros(tokens, np.int32))

    @classmethod
    def join(cls, parts: Sequence[Kept]) -> Kept:
        """Those of one stretch of tokens after another."""
        return cls(ids=np.concatenate([p.ids for p in parts]), counts=np.concatenate([p.counts for p in parts]))

    def split(self, lengths: Sequence[int]) -> list[Kept]:
        """Undo `join`: `lengths` are tokens and add up to n. Views of the columns."""
        ends = np.cumsum([0, *lengths])
        starts_of_ids = np.concatenate([[0], np.cumsum(self.counts)])[ends]
        return [
            Kept(ids=self.ids[i:j], counts=self.counts[a:b])
            for (a, b), (i, j) in zip(pairwise(ends), pairwise(starts_of_ids), strict=True)
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """What an engine returns for a request."""

    tokens: np.ndarray
    """int32 [n], the stop token included."""
    logprobs: np.ndarray
    """float32 [n], under the distribution really sampled from (after temperature and truncation)."""
    versions: np.ndarray
    """int32 [n], the version of the weights whose forward gave the token's logits; never decreases."""
    finish: Finish
    kept: Kept | None = None
    """Of n tokens; None if the sampling does not cut, or the engine does not say what was kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestBatch:
    """Requests of one call as columns: a message of few arrays costs a tenth of one of many."""

    ids: np.ndarray
    """int64 [n, 4]."""
    prompts: np.ndarray
    """int32, one after another; a prompt that equals the one before is not repeated."""
    lengths: np.ndarray
    """int32 [n]; 0 repeats the prompt before."""
    seeds: np.ndarray
    """int64 [n]."""
    sampling: Sampling
    min_version: int

    @classmethod
    def of(cls, requests: Sequence[Request]) -> RequestBatch:
        """Pack requests that share sampling and version.

        Raises:
            ValueError: they do not.
        """
        if len({(request.sampling, request.min_version) for request in requests}) != 1:
            raise ValueError("the requests of one call must share sampling and min_version: make several calls")
        prompts: list[np.ndarray] = []
        lengths: list[int] = []
        last = np.zeros(0, np.int32)
        for request in requests:
            same = bool(prompts) and np.array_equal(request.prompt, last)
            if not same:
                prompts.append(request.prompt)
            lengths.append(0 if same else len(request.prompt))
            last = request.prompt
        return cls(
            ids=np.array([request.id for request in requests], np.int64),
            prompts=np.concatenate(prompts),
            lengths=np.array(lengths, np.int32),
            seeds=np.array([request.seed for request in requests], np.int64),
            sampling=requests[0].sampling,
            min_version=requests[0].min_version,
        )

    def unpack(self) -> list[Request]:
        """The requests again; equal prompts are one array."""
        out, end, prompt = [], 0, self.prompts[:0]
        for id, length, seed in zip(self.ids.tolist(), self.lengths.tolist(), self.seeds.tolist(), strict=True):
            if length:
                prompt, end = self.prompts[end : end + length], end + length
            out.append(
                Request(
                    id=RequestId(*id), prompt=prompt, sampling=self.sampling, seed=seed, min_version=self.min_version
                )
            )
        return out


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionBatch:
    """Completions of one call as columns, and what the replica still has to do."""

    lengths: np.ndarray
    """int32 [n]."""
    tokens: np.ndarray
    """int32, one after another, as `logprobs` (float32) and `versions` (int32)."""
    logprobs: np.ndarray
    versions: np.ndarray
    finishes: tuple[Finish, ...]
    load: int
    """Requests that the replica has open."""
    kept: Kept | None = None
    """Of all tokens; None unless every completion with a token says it."""

    @classmethod
    def of(cls, completions: Sequence[Completion], load: int) -> CompletionBatch:
        """Pack completions."""
        return cls(
            lengths=np.array([len(c.tokens) for c in completions], np.int32),
            tokens=np.concatenate([c.tokens for c in completions]),
            logprobs=np.concatenate([c.logprobs for c in completions]),
            versions=np.concatenate([c.versions for c in completions]),
            finishes=tuple(c.finish for c in completions),
            load=load,
            kept=joined([(len(c.tokens), c.kept) for c in completions]),
        )

    def unpack(self) -> list[Completion]:
        """The completions again, views of the columns."""
        ends = np.cumsum(self.lengths).tolist()
        kept = [None] * len(ends) if self.kept is None else self.kept.split(self.lengths.tolist())
        return [
            Completion(
                tokens=self.tokens[a:b],
                logprobs=self.logprobs[a:b],
                versions=self.versions[a:b],
                finish=finish,
                kept=own,
            )
            for a, b, finish, own in zip([0, *ends[:-1]], ends, self.finishes, kept, strict=True)
        ]


def joined(parts: Sequence[tuple[int, Kept | None]]) -> Kept | None:
    """Of (tokens drawn, what was kept) one after another; None if any that has tokens does not say."""
    if any(length and kept is None for length, kept in parts):
        return None
    said = [kept for _, kept in parts if kept is not None]
    return Kept.join(said) if said else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """A span [start, end) of a rollout's tokens. Adjacent actions cannot be told apart by the mask alone."""

    start: int
    end: int
    kind: TurnKind
    finish: Finish | None = None
    reward: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """One flat token stream of one agent."""

    tokens: np.ndarray
    """int32 [n]."""
    mask: np.ndarray
    """bool [n], True where the policy acted."""
    logprobs: np.ndarray
    """float32 [n], behaviour logprobs; 0 outside the mask."""
    versions: np.ndarray
    """int32 [n]; -1 outside the mask."""
    turns: tuple[Turn, ...]
    reward: float
    """Sum of the turns' rewards; in a group that is trained, what `actors.filters` made of it."""
    sampling: Sampling
    policy: str = "policy"
    """Which weights acted."""
    parts: dict[str, float] = field(default_factory=dict)
    """What else the environment measured, by name, summed over the turns: logged, not trained."""
    kept: Kept | None = None
    """Of n tokens, count 0 outside the mask; None if the sampling does not cut, or an engine did not say."""

    @property
    def oldest(self) -> int:
        """Version of the oldest generated token; -1 if there is none."""
        return int(self.versions[self.mask].min()) if self.mask.any() else -1

    @property
    def newest(self) -> int:
        """Version of the newest generated token; -1 if there is none."""
        return int(self.versions[self.mask].max()) if self.mask.any() else -1

    @property
    def truncated(self) -> bool:
        """Whether the last action ran into `max_tokens`."""
        return any(t.kind == "action" and t.finish == "length" for t in self.turns[-1:])

    @property
    def biased(self) -> bool:
        """Whether tokens were drawn from sets that nobody told, so that the trainer scores them over others."""
        return self.sampling.cuts and self.kept is None and bool(self.mask.any())


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """All rollouts of one ticket: the members share the prompt and are compared with each other."""

    ticket: int
    attempt: int
    row: int
    rollouts: tuple[Rollout, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """A held-out row as it was played for evaluation."""

    row: int
    rollouts: tuple[Rollout, ...]
    failures: tuple[str, ...]
    """Members without a reward: what their environment raised, with its traceback."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PayloadHandle:
    """Where a group's columns lie. Read with `actors.payload.read`."""

    host: str
    path: str
    nbytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupMeta:
    """What the buffer knows of a finished group: everything but its tokens.

    Arrays are [members], those that are trained, or [scored]: the ones before them that filters left out, too.
    """

    ticket: int
    attempt: int
    row: int
    rewards: np.ndarray
    """float32, what is trained."""
    lengths: np.ndarray
    """int32, all tokens of the rollout, prompt included."""
    actions: np.ndarray
    """int32, generated tokens: those that can be trained."""
    oldest: np.ndarray
    """int32, version of the oldest generated token."""
    newest: np.ndarray
    """int32, version of the newest generated token."""
    truncated: np.ndarray
    """bool [scored], the last action hit `max_tokens`."""
    handle: PayloadHandle
    parts: dict[str, np.ndarray] = field(default_factory=dict)
    """float32 [scored] each, the rollouts' `parts`; nan where one lacks it."""
    judged: np.ndarray | None = None
    """float32 [scored], the rewards before any filter; None where nothing was filtered: they are `rewards`."""
    quarantined: int = 0
    """Members that were left out because their environment failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Filtered:
    """A group of which filters left too little to train: what its rollouts got. Arrays are [scored]."""

    ticket: int
    attempt: int
    judged: np.ndarray
    """float32, the rewards before any filter."""
    parts: dict[str, np.ndarray]
    """As `GroupMeta.parts`."""
    seen: str
    """What the rollouts were like, in a few words."""
    quarantined: int = 0
    """Members that were left out because their environment failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """Leave to produce one group: ticket i names dataset row `row`."""

    ticket: int
    attempt: int
    row: int
    version: int
    """Newest announced version at issue: the group's first token is at least this new."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Taken:
    """One training step's groups as fixed by the buffer; every rank gets the same one and reads its own share."""

    step: int
    """The version to train from: the step produces step + 1."""
    groups: tuple[GroupMeta, ...]
    max_staleness: int | None
    """Tokens older than this lose their gradient (`mask`); None if whole groups were dropped instead."""
    metrics: dict[str, float]
    """`reward/*`, `staleness/*`, `buffer/*`, `rollout/*` of this step."""
    last: bool
    """No batch follows: the data ended."""


def derive_seed(run_seed: int, ticket: int, member: int, turn: int) -> int:
    """63-bit seed of one request: a hash of what names it, so neither replica nor time enters."""
    text = f"{run_seed}/{ticket}/{member}/{turn}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """A few short rollouts begun at one version: up to the next swap the engine's logprobs must be the trainer's."""

    version: int
    handle: PayloadHandle


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """What one trainer rank did in a step."""

    step: int
    rollouts: int
    """Rollouts of this rank's share that entered the loss."""
    tokens: int
    """Their trainable tokens."""
    tickets: tuple[int, ...]
    """Tickets whose first member this rank trained: over all ranks each trained ticket appears once."""
    metrics: dict[str, float]
    """`policy/*` and `time/*`; the same on every rank where they are global."""
