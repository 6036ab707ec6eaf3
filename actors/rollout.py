"""Rollout workers: lease a ticket, play its episodes against the generators, hand the group to the buffer."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import traceback
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from monarch.actor import Actor, concurrent_endpoint, current_rank

from actors import payload
from actors.environment import Environment, Prompt, Task
from actors.ledger import Suspect
from actors.router import Router
from actors.tokenizer import Tokenizer
from actors.types import (
    Completion,
    CompletionBatch,
    Group,
    GroupMeta,
    Lease,
    PayloadHandle,
    Probe,
    Request,
    RequestBatch,
    RequestId,
    Rollout,
    Sampling,
    Turn,
    derive_seed,
)

log = logging.getLogger(__name__)

PROBE_TICKET = -1
"""Ticket of requests that belong to no group; engines keep room for them."""
PROBE_TOKENS = 8
"""Most tokens of a probe's completion: it is to be done before the next swap."""


_Begun = tuple[list[Environment], list["Stream"], list[Completion]]
"""Of each member of a group that has begun."""
Part = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""Tokens, mask, logprobs and versions of one turn."""


def read_only(tokens: np.ndarray) -> Part:
    """The part of a turn that the policy only reads."""
    n = len(tokens)
    return tokens, np.zeros(n, bool), np.zeros(n, np.float32), np.full(n, -1, np.int32)


class Stream:
    """A rollout under construction. Generated tokens are appended as they came and never tokenised again."""

    def __init__(self, prompt: Part, sampling: Sampling) -> None:
        """`prompt` is the part that `read_only` makes of the prompt's tokens; members of a group may share it."""
        self._sampling = sampling
        self._parts: list[Part] = []
        self._turns: list[Turn] = []
        self._append(prompt, kind="prompt")

    @property
    def tokens(self) -> np.ndarray:
        """int32 [n], everything so far: the prompt of the next request."""
        return np.concatenate([tokens for tokens, *_ in self._parts]) if len(self._parts) > 1 else self._parts[0][0]

    def act(self, completion: Completion, reward: float) -> None:
        """Append what the policy generated and what the environment gave for it."""
        c = completion
        self._append(
            (c.tokens, np.ones(len(c.tokens), bool), c.logprobs, c.versions),
            kind="action",
            finish=c.finish,
            reward=reward,
        )

    def observe(self, tokens: np.ndarray) -> None:
        """Append what the environment said."""
        self._append(read_only(tokens), kind="observation")

    def _append(self, part: Part, **turn: Any) -> None:
        start = self._turns[-1].end if self._turns else 0
        self._turns.append(Turn(start=start, end=start + len(part[0]), **turn))
        self._parts.append(part)

    def finish(self) -> Rollout:
        """The finished rollout."""
        tokens, mask, logprobs, versions = (np.concatenate(column) for column in zip(*self._parts, strict=True))
        return Rollout(
            tokens=tokens,
            mask=mask,
            logprobs=logprobs,
            versions=versions,
            turns=tuple(self._turns),
            reward=sum(t.reward for t in self._turns),
            sampling=self._sampling,
        )


def meta_of(group: Group, handle: PayloadHandle) -> GroupMeta:
    """What the buffer needs to know of a group."""
    rollouts = group.rollouts
    lengths = np.array([len(r.tokens) for r in rollouts], np.int32)
    starts = np.cumsum(lengths) - lengths
    mask = np.concatenate([r.mask for r in rollouts])
    versions = np.concatenate([r.versions for r in rollouts])
    actions = np.add.reduceat(mask, starts, dtype=np.int32)
    oldest = np.minimum.reduceat(np.where(mask, versions, np.iinfo(np.int32).max), starts)
    return GroupMeta(
        ticket=group.ticket,
        attempt=group.attempt,
        row=group.row,
        rewards=np.array([r.reward for r in rollouts], np.float32),
        lengths=lengths,
        actions=actions,
        oldest=np.where(actions, oldest, -1).astype(np.int32),
        newest=np.maximum.reduceat(versions, starts),
        truncated=np.array([r.truncated for r in rollouts], bool),
        handle=handle,
    )


@dataclass(frozen=True, kw_only=True)
class Play:
    """What every worker plays: the same for all of them."""

    task: Task
    model: str
    """Folder with the tokenizer."""
    sampling: Sampling
    group_size: int
    seed: int
    folder: str
    """Where payloads go."""
    fixed_routes: bool = False
    """One schedule only: see `Router`."""
    timeout: float
    """Seconds before a group is given up and issued again."""
    most: int
    """Leases that one worker takes at once, so that the others get some."""


class EpisodeError(Exception):
    """An environment or its reward raised: this costs the group an attempt, not the run its life."""


class _GivenUp(Exception):
    """The buffer no longer wants the group: it began too early."""

    def __init__(self, completions: list[Completion]) -> None:
        self.actions = np.array([len(c.tokens) for c in completions], np.int32)
        self.oldest = min((int(c.versions[0]) for c in completions if len(c.tokens)), default=0)


@contextmanager
def _episode_errors(where: str) -> Iterator[None]:
    try:
        yield
    except (Exception, SystemExit) as error:  # a SystemExit would end the actor's event loop without a word
        raise EpisodeError(f"environment {where}: {error!r}") from error


class RolloutWorker(Actor):
    """Plays leased groups until the buffer says that the run needs no more."""

    def __init__(self, play: Play, buffer: Any, replicas: list[Any]) -> None:
        """`buffer` and `replicas` are the actors to call: one `ReplayBuffer` and the rank 0 of each `Generator`."""
        self._play, self._buffer, self._replicas = play, buffer, replicas
        self._index = current_rank().rank
        self._tokenizer = Tokenizer.load(play.model)
        self._router = Router(len(replicas), fixed=play.fixed_routes)
        self._groups: dict[tuple[int, int], asyncio.Task[None]] = {}
        self._explained = False

    @concurrent_endpoint
    async def run(self) -> None:
        """Lease and play until the end. Raises what a generator or the buffer raised; an environment's own error
        costs its group one attempt."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                reply = await self._buffer.lease.call_one(self._index, self._play.most)
                for suspect in reply.suspects:
                    if (suspect.ticket, suspect.attempt) in self._groups:
                        tasks.create_task(self._question(suspect))
                if reply.done:
                    for task in self._groups.values():
                        task.cancel()
                    return
                for lease in reply.leases:
                    key = (lease.ticket, lease.attempt)
                    self._groups[key] = tasks.create_task(self._lead(lease))

    @concurrent_endpoint
    async def probe(self, version: int, replica: int, members: int) -> Probe | None:
        """Sample short completions on one replica, begun at `version`, whose logprobs the trainer compares with its
        own; None if the environments did not begin. Nobody judges them.

        Tokens before a swap are wholly of that version, so a swap on the way leaves fewer to compare.
        """
        row = version % (self._play.task.rows or version + 1)
        lease = Lease(ticket=PROBE_TICKET, attempt=version, row=row, version=version)
        try:
            async with (
                asyncio.timeout(self._play.timeout),
                self._begun(lease, replica, members) as (_, streams, drawn),
            ):
                for stream, completion in zip(streams, drawn, strict=True):
                    stream.act(completion, 0.0)
        except (EpisodeError, TimeoutError) as error:
            log.warning("no probe of version %d: %r", version, error)
            return None
        group = Group(ticket=PROBE_TICKET, attempt=version, row=row, rollouts=tuple(s.finish() for s in streams))
        return Probe(version=version, handle=payload.write(group, self._play.folder))

    async def _question(self, suspect: Suspect) -> None:
        """Stop a group's open requests if one of them began too early; the group then gives itself up."""
        key = (suspect.ticket, suspect.attempt)
        await self._replicas[self._router.pick(suspect.ticket, key)].abort.call_one(*key, suspect.oldest)

    async def _lead(self, lease: Lease) -> None:
        """One group from lease to buffer."""
        replica = self._router.pick(lease.ticket, (lease.ticket, lease.attempt))
        try:
            async with asyncio.timeout(self._play.timeout):
                group = await self._play_group(lease, replica)
            handle = payload.write(group, self._play.folder)
        except _GivenUp as gone:
            await self._replicas[replica].abort.call_one(lease.ticket, lease.attempt)
            await self._buffer.stale.call_one(lease.ticket, lease.attempt, gone.oldest, gone.actions)
        except asyncio.CancelledError:
            await self._replicas[replica].abort.call_one(lease.ticket, lease.attempt)
            raise
        except (EpisodeError, TimeoutError) as error:
            if not self._explained:
                self._explained = True
                log.warning("an episode failed for the first time:\n%s", traceback.format_exc())
            log.warning("ticket %d (row %d) attempt %d failed: %r", lease.ticket, lease.row, lease.attempt, error)
            await self._replicas[replica].abort.call_one(lease.ticket, lease.attempt)
            await self._buffer.failed.call_one(lease.ticket, lease.attempt, repr(error))
        else:
            await self._buffer.put.call_one(meta_of(group, handle))
        finally:
            self._router.forget((lease.ticket, lease.attempt))
            del self._groups[lease.ticket, lease.attempt]

    @asynccontextmanager
    async def _begun(self, lease: Lease, replica: int, members: int) -> AsyncIterator[_Begun]:
        """The members' environments, streams and first completions, which are drawn in one call."""
        row = self._play.task.row(lease.row)
        environments: list[Environment] = []
        try:
            with _episode_errors("reset"):
                for _ in range(members):
                    environments.append(self._play.task.environment())
                prompts = [await environment.reset(row) for environment in environments]
            streams = [Stream(part, self._play.sampling) for part in self._encode(prompts)]
            first = [self._request(lease, member, 0, stream) for member, stream in enumerate(streams)]
            yield environments, streams, await self._generate(replica, first)
        finally:
            with _episode_errors("close"):
                for environment in environments:
                    await environment.close()

    async def _play_group(self, lease: Lease, replica: int) -> Group:
        """All members of a group: the first actions together, then each episode at its own pace."""
        try:
            async with self._begun(lease, replica, self._play.group_size) as begun, asyncio.TaskGroup() as tasks:
                streams = begun[1]
                for member, (environment, stream, completion) in enumerate(zip(*begun, strict=True)):
                    tasks.create_task(self._episode(lease, replica, member, environment, stream, completion))
        except BaseExceptionGroup as errors:
            # The first error ended the group; the others are its consequence.
            raise errors.exceptions[0] from None
        rollouts = tuple(stream.finish() for stream in streams)
        return Group(ticket=lease.ticket, attempt=lease.attempt, row=lease.row, rollouts=rollouts)

    async def _episode(
        self,
        lease: Lease,
        replica: int,
        member: int,
        environment: Environment,
        stream: Stream,
        completion: Completion,
    ) -> None:
        """One episode from its first action to its end."""
        for turn in itertools.count(1):
            with _episode_errors("step"):
                outcome = await environment.step(self._tokenizer.decode(completion.tokens), completion.finish)
                if not math.isfinite(outcome.reward):
                    raise ValueError(f"the reward is {outcome.reward}: it must be finite")
            stream.act(completion, outcome.reward)
            if outcome.observation is None:
                return
            stream.observe(self._tokenizer.encode(outcome.observation))
            (completion,) = await self._generate(replica, [self._request(lease, member, turn, stream)])

    def _request(self, lease: Lease, member: int, turn: int, stream: Stream) -> Request:
        seed = derive_seed(self._play.seed, lease.ticket, member, turn)
        sampling = self._play.sampling
        if lease.ticket == PROBE_TICKET:
            # Probes of different versions draw differently.
            seed = derive_seed(seed, lease.version, member, turn)
            sampling = replace(sampling, max_tokens=min(PROBE_TOKENS, sampling.max_tokens))
        return Request(
            id=RequestId(lease.ticket, lease.attempt, member, turn),
            prompt=stream.tokens,
            sampling=sampling,
            seed=seed,
            min_version=lease.version,
        )

    async def _generate(self, replica: int, requests: list[Request]) -> list[Completion]:
        self._router.sent(replica, len(requests))
        batch: CompletionBatch = await self._replicas[replica].generate.call_one(RequestBatch.of(requests))
        self._router.answered(replica, len(requests), batch.load)
        completions = batch.unpack()
        if "abort" in batch.finishes:
            raise _GivenUp(completions)
        return completions

    def _encode(self, prompts: list[Prompt]) -> list[Part]:
        """Each prompt's part of the stream; equal ones, as the members of a group mostly have, are encoded once."""
        out = [read_only(self._tokens_of(prompts[0]))]
        for last, prompt in pairwise(prompts):
            out.append(out[-1] if prompt == last else read_only(self._tokens_of(prompt)))
        return out

    def _tokens_of(self, prompt: Prompt) -> np.ndarray:
        if isinstance(prompt, str):
            return self._tokenizer.encode(prompt, specials=True)
        return self._tokenizer.chat(prompt)
