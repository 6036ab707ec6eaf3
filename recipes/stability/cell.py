"""One cell in one process: the buffer's rules, the native engine and the trainer, one after another."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from actors import payload
from actors.backends.hf import HfModel
from actors.config import NativeEngine
from actors.engines.native import Native
from actors.environment import Outcome
from actors.episode import Stream, meta_of, read_only
from actors.ledger import Ledger
from actors.training import Training
from actors.types import Completion, Group, GroupMeta, Lease, Request, RequestId, Rollout, derive_seed
from losses import group_norm
from recipes.stability import CORRECTIONS, GROUPS, MEMBERS, SAMPLING, TASK, Cell, Curves


class Lab:
    """Model and engine, kept from cell to cell, and the groups of version 0, which all cells of a seed share.

    Groups are drawn `GROUPS` at a time, whatever the lag, so that a cell repeats to the bit. As the trainer's
    `Staging` it hands each version over to the engine at once.
    """

    exact = True

    def __init__(self, folder: str) -> None:
        """`folder` is where payloads go."""
        self.folder = folder
        self.backend = HfModel(str(TASK.checkpoint), "float32", torch.device("cpu"))
        self.engine = Native(NativeEngine(slots=GROUPS * MEMBERS, max_length=32), str(TASK.checkpoint))
        self._start = {name: tensor.clone() for name, tensor in self.backend.weights().items()}
        self._first: dict[tuple[int, int], list[GroupMeta]] = {}
        """By seed and lowest ticket."""

    def stage(self, version: int) -> float:
        """Load the live weights into the engine; the seconds that took."""
        begin = time.perf_counter()
        self.engine.load(self.backend.weights(), version)
        return time.perf_counter() - begin

    def weights_of(self, version: int) -> AbstractContextManager[None]:
        """Raises ValueError unless `version` is the live one: no other is kept."""
        if version != self.engine.version:
            raise ValueError(f"version {version} is gone, the engine holds {self.engine.version}")
        return nullcontext()

    def run(self, cell: Cell) -> Curves:
        """Train a cell from the shipped checkpoint."""
        for name, tensor in self.backend.weights().items():
            tensor.copy_(self._start[name])
        objective = CORRECTIONS[cell.correction].objective
        training = Training(cell.trainer, self.backend, objective, group_norm, self, total_steps=cell.steps)
        # As if more steps came: the last version then draws groups too.
        steps = cell.steps + cell.lag + 1
        ledger = Ledger(cell.buffer, steps=steps, rows=TASK.rows, seed=cell.seed)
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            rewards, rows = [_mean_reward(self._fill(ledger, cell.seed, folder)[:GROUPS])], []
            for step in range(cell.steps):
                taken = ledger.take(step)
                if taken is None:
                    raise RuntimeError(f"{cell}: {ledger.waiting_for(step)}")
                rows.append(training.step(taken).metrics)
                ledger.announce(training.version)
                rewards.append(_mean_reward(self._fill(ledger, cell.seed, folder)))
        return Curves(rewards, rows)

    def _fill(self, ledger: Ledger, seed: int, folder: str) -> list[GroupMeta]:
        """Finish every group that the buffer wants at this version."""
        metas: list[GroupMeta] = []
        while leases := ledger.lease(0, GROUPS):
            drawn = self._draw(leases, seed, folder) if leases[0].version else self._draw_first(leases, seed)
            for meta in drawn:
                ledger.put(meta)
            metas += drawn
        return metas

    def _draw_first(self, leases: Sequence[Lease], seed: int) -> list[GroupMeta]:
        """Groups of version 0."""
        key = (seed, leases[0].ticket)
        if key not in self._first:
            folder = Path(self.folder) / f"first-{seed}"
            folder.mkdir(exist_ok=True)
            self._first[key] = self._draw(leases, seed, str(folder))
        return self._first[key]

    def _draw(self, leases: Sequence[Lease], seed: int, folder: str) -> list[GroupMeta]:
        """Groups by the engine's present weights, judged and stored."""
        rows = [TASK.row(lease.row) for lease in leases]
        prompts = [self.engine.tokenizer.encode(row["prompt"], specials=True) for row in rows]
        ids = [[RequestId(lease.ticket, lease.attempt, member, 0) for member in range(MEMBERS)] for lease in leases]
        for lease, prompt, group in zip(leases, prompts, ids, strict=True):
            for id in group:
                seed_of = derive_seed(seed, id.ticket, id.member, id.turn)
                request = Request(id=id, prompt=prompt, sampling=SAMPLING, seed=seed_of, min_version=lease.version)
                self.engine.add(request)
        done: dict[RequestId, Completion] = {}
        while self.engine.unfinished:
            done.update(self.engine.step())
        metas = []
        for lease, row, prompt, group in zip(leases, rows, prompts, ids, strict=True):
            rollouts = tuple(self._judged(row, prompt, done[id]) for id in group)
            drawn = Group(ticket=lease.ticket, attempt=lease.attempt, row=lease.row, rollouts=rollouts)
            metas.append(meta_of(drawn, payload.write(drawn, folder), 0, rollouts))
        return metas

    def _judged(self, row: dict[str, str], prompt: Any, completion: Completion) -> Rollout:
        text = self.engine.tokenizer.decode(completion.tokens)
        reward = TASK.reward(row["prompt"], text, finish=completion.finish, answer=row["answer"])
        stream = Stream(read_only(prompt), SAMPLING)
        stream.act(completion, Outcome(reward=reward), completion.finish)
        return stream.finish()


def _mean_reward(metas: Sequence[GroupMeta]) -> float:
    return statistics.fmean(reward for meta in metas for reward in meta.rewards.tolist())
