"""Groups of random rollouts, stored as payloads, and a staging that keeps versions in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch

from actors import payload
from actors.backends.base import Backend
from actors.types import Group, GroupMeta, Rollout, Sampling, Taken
from actors.types import Kept as KeptSets


def rollout(rng: np.random.Generator, length: int, prompt: int, version: int, temperature: float = 1.0) -> Rollout:
    """Random tokens below 60; the versions of the actions rise from version - 1 to version halfway."""
    actions = np.arange(length) >= prompt
    half = np.arange(length) >= (length + prompt) // 2
    versions = np.where(actions, np.where(half, version, max(version - 1, 0)), -1)
    return Rollout(
        tokens=rng.integers(3, 60, length).astype(np.int32),
        mask=actions,
        logprobs=np.where(actions, -4 - rng.random(length), 0).astype(np.float32),
        versions=versions.astype(np.int32),
        turns=(),
        reward=float(rng.integers(3)),
        sampling=Sampling(temperature=temperature),
    )


def one_prompt(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """The same rollouts with the first one's tokens before its first action, which must come at the same place."""
    start = int(rollouts[0].mask.argmax())
    prompt = rollouts[0].tokens[:start]
    return [replace(r, tokens=np.concatenate([prompt, r.tokens[start:]])) for r in rollouts]


def with_kept(rng: np.random.Generator, r: Rollout, whole: float = 0.2) -> Rollout:
    """The same as if truncated sampling had drawn each action from a random set of tokens below 60; a share `whole` of
    the actions from all tokens."""

    def one(token: int, acts: bool) -> np.ndarray:
        if not acts or rng.random() < whole:
            return np.zeros(0, np.int32)
        others = rng.choice(np.arange(3, 60), int(rng.integers(1, 12)), replace=False)
        return np.union1d(others, [token]).astype(np.int32)

    sets = [one(token, acts) for token, acts in zip(r.tokens.tolist(), r.mask.tolist(), strict=True)]
    return replace(r, sampling=replace(r.sampling, top_p=0.9), kept=KeptSets.of(sets))


def store(groups: Sequence[Sequence[Rollout]], folder: str, step: int = 0, max_staleness: int | None = None) -> Taken:
    """Write groups of rollouts and give the batch of `step` that names them; tickets are 100, 101, ..."""
    metas = []
    for i, rollouts in enumerate(groups):
        group = Group(ticket=100 + i, attempt=0, row=i, rollouts=tuple(rollouts))
        metas.append(
            GroupMeta(
                ticket=group.ticket,
                attempt=0,
                row=i,
                rewards=np.array([r.reward for r in rollouts], np.float32),
                lengths=np.array([len(r.tokens) for r in rollouts], np.int32),
                actions=np.array([r.mask.sum() for r in rollouts], np.int32),
                oldest=np.array([r.oldest for r in rollouts], np.int32),
                newest=np.array([r.newest for r in rollouts], np.int32),
                truncated=np.zeros(len(rollouts), bool),
                handle=payload.write(group, folder),
            )
        )
    return Taken(step=step, groups=tuple(metas), max_staleness=max_staleness, metrics={}, last=False)


class Kept:
    """Staging without files: whole copies of what the backend holds."""

    def __init__(self, backend: Backend, dtype: torch.dtype = torch.float32) -> None:
        self.backend, self.dtype = backend, dtype
        self.versions: dict[int, list[torch.Tensor]] = {}

    def stage(self, version: int) -> float:
        self.versions[version] = [shard.tensor.to(self.dtype, copy=True) for shard in self.backend.shards()]
        return 0.0

    @property
    def exact(self) -> bool:
        return self.dtype == torch.float32

    @contextmanager
    def weights_of(self, version: int) -> Iterator[None]:
        live = [shard.tensor for shard in self.backend.shards()]
        saved = [tensor.clone() for tensor in live]
        for tensor, old in zip(live, self.versions[version], strict=True):
            tensor.copy_(old)
        yield
        for tensor, old in zip(live, saved, strict=True):
            tensor.copy_(old)
