"""Rollout workers: lease a ticket, play its episodes against the generators, hand the group to the buffer."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from monarch.actor import Actor, concurrent_endpoint, current_rank

from actors import payload
from actors.environment import Outcome, Prompt, Row, Task
from actors.episode import EpisodeError, Member, Part, Stream, episode_errors, meta_of, read_only
from actors.ledger import Suspect
from actors.router import Router
from actors.timeline import Span, Spans
from actors.tokenizer import Tokenizer
from actors.types import (
    Completion,
    CompletionBatch,
    Group,
    Lease,
    Probe,
    Request,
    RequestBatch,
    RequestId,
    Rollout,
    Sampling,
    derive_seed,
)

log = logging.getLogger(__name__)

PROBE_TICKET = -1
"""Ticket of requests that belong to no group; engines keep room for them."""
PROBE_TOKENS = 8
"""Most tokens of a probe's completion: it is to be done before the next swap."""
CLOSING = 10.0
"""Seconds beyond a group's time in which its environments may close."""


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
    """Seconds that a group has. Members whose environment is not done by then are left out; a group that waits for its
    generator is issued again."""
    context: int | None = None
    """Most tokens of one rollout, as far as the engine has room; None is no bound."""
    most: int
    """Leases that one worker takes at once, so that the others get some."""


class _GivenUp(Exception):
    """The buffer no longer wants the group: it began too early."""

    def __init__(self, completions: list[Completion]) -> None:
        self.actions = np.array([len(c.tokens) for c in completions], np.int32)
        self.oldest = min((int(c.versions[0]) for c in completions if len(c.tokens)), default=0)


class RolloutWorker(Actor):
    """Plays leased groups until the buffer says that the run needs no more.

    An environment that fails costs its group one member: the others are compared without it, nothing is set to zero.
    With fewer than half of the members left the attempt fails, and the ticket is tried again.
    """

    def __init__(self, play: Play, buffer: Any, replicas: list[Any]) -> None:
        """`buffer` and `replicas` are the actors to call: one `ReplayBuffer` and the rank 0 of each `Generator`."""
        self._play, self._buffer, self._replicas = play, buffer, replicas
        self._index = current_rank().rank
        self._tokenizer = Tokenizer.load(play.model)
        self._router = Router(len(replicas), fixed=play.fixed_routes)
        self._groups: dict[tuple[int, int], asyncio.Task[None]] = {}
        self._spans = Spans(f"worker{self._index}")
        self._explained = False

    @concurrent_endpoint
    async def run(self) -> None:
        """Lease and play until the end. Raises what a generator or the buffer raised, such as too many failures."""
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
    async def spans(self) -> list[Span]:
        """Time spent in environments since the last call."""
        return self._spans.take()

    @concurrent_endpoint
    async def probe(self, version: int, replica: int, members: int) -> Probe | None:
        """Sample short completions on one replica, begun at `version`, whose logprobs the trainer compares with its
        own; None if no environment began. Nobody judges them.

        Tokens before a swap are wholly of that version, so a swap on the way leaves fewer to compare.
        """
        row = version % (self._play.task.rows or version + 1)
        lease = Lease(ticket=PROBE_TICKET, attempt=version, row=row, version=version)
        group, deadline = self._members(lease, members), self._deadline()
        try:
            async with self._begun(lease, group, replica, deadline) as begun:
                rollouts = tuple(self._unjudged(*pair) for pair in begun)
        except TimeoutError as error:
            log.warning("no probe of version %d: %s", version, error)
            return None
        if not rollouts:
            log.warning("no probe of version %d: %s", version, group[0].failure)
            return None
        probed = Group(ticket=PROBE_TICKET, attempt=version, row=row, rollouts=rollouts)
        return Probe(version=version, handle=payload.write(probed, self._play.folder))

    @staticmethod
    def _unjudged(member: Member, completion: Completion) -> Rollout:
        assert member.stream is not None
        member.stream.act(completion, Outcome(), completion.finish)
        return member.stream.finish()

    async def _question(self, suspect: Suspect) -> None:
        """Stop a group's open requests if one of them began too early; the group then gives itself up."""
        key = (suspect.ticket, suspect.attempt)
        await self._replicas[self._router.pick(suspect.ticket, key)].abort.call_one(*key, suspect.oldest)

    def _deadline(self) -> float:
        """When a group that begins now is to end, in the event loop's time."""
        return asyncio.get_running_loop().time() + self._play.timeout

    async def _lead(self, lease: Lease) -> None:
        """One group from lease to buffer."""
        replica = self._router.pick(lease.ticket, (lease.ticket, lease.attempt))
        members = self._members(lease, self._play.group_size)
        abort = partial(self._replicas[replica].abort.call_one, lease.ticket, lease.attempt)
        try:
            await self._play_group(lease, members, replica)
        except _GivenUp as gone:
            await abort()
            await self._buffer.stale.call_one(lease.ticket, lease.attempt, gone.oldest, gone.actions)
        except asyncio.CancelledError:
            await abort()
            raise
        except TimeoutError as error:
            await abort()
            await self._fail(lease, members, str(error))
        else:
            await self._hand_over(lease, members)
        finally:
            self._router.forget((lease.ticket, lease.attempt))
            del self._groups[lease.ticket, lease.attempt]

    async def _hand_over(self, lease: Lease, members: list[Member]) -> None:
        """Give the buffer the members that are left, or the failed attempt if they are too few."""
        rollouts = tuple(m.stream.finish() for m in members if m.stream is not None and m.failure is None)
        if 2 * len(rollouts) < len(members):
            await self._fail(lease, members, f"only {len(rollouts)} of {len(members)} members are left")
            return
        group = Group(ticket=lease.ticket, attempt=lease.attempt, row=lease.row, rollouts=rollouts)
        meta = meta_of(group, payload.write(group, self._play.folder), len(members) - len(rollouts))
        await self._buffer.put.call_one(meta, next((m.failure for m in members if m.failure), ""))

    async def _fail(self, lease: Lease, members: list[Member], reason: str) -> None:
        log.warning("ticket %d (row %d) attempt %d failed: %s", lease.ticket, lease.row, lease.attempt, reason)
        failures = [m.failure for m in members if m.failure]
        await self._buffer.failed.call_one(
            lease.ticket, lease.attempt, failures[0] if failures else reason, len(failures)
        )

    def _members(self, lease: Lease, count: int) -> list[Member]:
        where = f"ticket {lease.ticket} (row {lease.row}) attempt {lease.attempt}"
        return [Member(index=i, name=f"{where} member {i}") for i in range(count)]

    async def _each(self, members: Iterable[Member], play: Callable[[Member], Awaitable[None]]) -> None:
        """Play all these members at once; an EpisodeError fails its member alone, any other error all of them."""

        async def one(member: Member) -> None:
            try:
                await play(member)
            except EpisodeError as error:
                member.fail(error)
                if not self._explained:
                    self._explained = True
                    log.warning("a rollout failed for the first time: %s", member.failure)

        try:
            async with asyncio.TaskGroup() as tasks:
                for member in members:
                    tasks.create_task(one(member))
        except BaseExceptionGroup as errors:
            # The first error ended the group; the others are its consequence.
            first = errors.exceptions[0]
            raise first from first.__cause__

    @asynccontextmanager
    async def _begun(
        self, lease: Lease, members: list[Member], replica: int, deadline: float
    ) -> AsyncIterator[list[tuple[Member, Completion]]]:
        """The members whose environment began, with their first completions, which are drawn in one call."""
        row, seen = self._play.task.row(lease.row), list[tuple[Prompt, Part]]()
        try:
            await self._each(members, partial(self._reset, lease, row, seen, deadline))
            begun = [member for member in members if member.failure is None]
            first = [self._request(lease, member, 0) for member in begun]
            drawn = await self._generate(replica, first, deadline) if first else []
            yield list(zip(begun, drawn, strict=True))
        finally:
            late = asyncio.get_running_loop().time() + CLOSING
            await self._each(members, partial(self._close, max(deadline, late)))

    async def _reset(
        self, lease: Lease, row: Row, seen: list[tuple[Prompt, Part]], deadline: float, member: Member
    ) -> None:
        """Begin an episode. `seen` are the group's prompts so far: equal ones are encoded once."""
        async with episode_errors("reset", deadline):
            member.environment = self._play.task.environment()
            prompt = await member.environment.reset(row)
            if not seen or seen[-1][0] != prompt:
                seen.append((prompt, read_only(self._encode(prompt))))
            member.stream = Stream(seen[-1][1], self._play.sampling)
        length, context, new = len(member.stream), self._play.context, self._play.sampling.max_tokens
        if not length:
            raise EpisodeError(f"the prompt of row {lease.row} has no token")
        if context is not None and length + new > context:
            raise EpisodeError(
                f"the prompt of row {lease.row} has {length} tokens, which with --sampling.max-tokens {new} exceed "
                f"the engine's context of {context}: raise --generator.engine.max-length or leave the row out"
            )

    async def _close(self, deadline: float, member: Member) -> None:
        if member.environment is not None:
            async with episode_errors("close", deadline):
                await member.environment.close()

    async def _play_group(self, lease: Lease, members: list[Member], replica: int) -> None:
        """The members' first actions together, then each episode at its own pace."""
        deadline = self._deadline()
        async with self._begun(lease, members, replica, deadline) as begun:
            first = {member.index: completion for member, completion in begun}
            await self._each(
                [member for member, _ in begun],
                lambda member: self._episode(lease, replica, deadline, member, first[member.index]),
            )

    async def _episode(
        self, lease: Lease, replica: int, deadline: float, member: Member, completion: Completion
    ) -> None:
        """One episode from its first action to its end."""
        environment, stream = member.environment, member.stream
        assert environment is not None and stream is not None
        for turn in itertools.count(1):
            async with episode_errors("step", deadline):
                with self._spans("score"):
                    outcome = await environment.step(self._tokenizer.decode(completion.tokens), completion.finish)
                observation = None if outcome.observation is None else self._tokenizer.encode(outcome.observation)
                full = observation is not None and self._full(len(stream) + len(completion.tokens) + len(observation))
                stream.act(completion, outcome, "length" if full else completion.finish)
            if observation is None or full:
                return
            stream.observe(observation)
            (completion,) = await self._generate(replica, [self._request(lease, member, turn)], deadline)

    def _full(self, length: int) -> bool:
        """Whether a stream of so many tokens leaves no room to act."""
        return self._play.context is not None and length >= self._play.context

    def _request(self, lease: Lease, member: Member, turn: int) -> Request:
        """The next action of a member, of at most as many tokens as the context has room for."""
        assert member.stream is not None
        seed = derive_seed(self._play.seed, lease.ticket, member.index, turn)
        sampling, most = self._play.sampling, self._play.sampling.max_tokens
        if lease.ticket == PROBE_TICKET:
            # Probes of different versions draw differently.
            seed = derive_seed(seed, lease.version, member.index, turn)
            most = min(PROBE_TOKENS, most)
        if self._play.context is not None:
            most = min(most, self._play.context - len(member.stream))
        return Request(
            id=RequestId(lease.ticket, lease.attempt, member.index, turn),
            prompt=member.stream.tokens,
            sampling=sampling if most == sampling.max_tokens else replace(sampling, max_tokens=most),
            seed=seed,
            min_version=lease.version,
        )

    async def _generate(self, replica: int, requests: list[Request], deadline: float) -> list[Completion]:
        self._router.sent(replica, len(requests))
        try:
            async with asyncio.timeout_at(deadline):
                batch: CompletionBatch = await self._replicas[replica].generate.call_one(RequestBatch.of(requests))
        except TimeoutError:
            raise TimeoutError(f"no answer of a generator within --rollout.timeout {self._play.timeout:g}") from None
        self._router.answered(replica, len(requests), batch.load)
        completions = batch.unpack()
        if "abort" in batch.finishes:
            raise _GivenUp(completions)
        return completions

    def _encode(self, prompt: Prompt) -> np.ndarray:
        if isinstance(prompt, str):
            return self._tokenizer.encode(prompt, specials=True)
        return self._tokenizer.chat(prompt)
