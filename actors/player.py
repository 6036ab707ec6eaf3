"""Plays groups of episodes against generators: environments on one side, token streams on the other."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from actors.config import EvalConfig, FilterConfig
from actors.environment import Prompt, Row, Task
from actors.episode import EpisodeError, Member, Part, Stream, episode_errors, read_only
from actors.router import Router
from actors.timeline import Spans
from actors.tokenizer import Tokenizer
from actors.types import Completion, CompletionBatch, Lease, Request, RequestBatch, RequestId, Sampling, derive_seed

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
    """Rollouts of a prompt that are trained, where there is no failure."""
    filter: FilterConfig = field(default_factory=FilterConfig)
    """Which ones, and with which rewards."""
    solved: float = EvalConfig.solved
    """Reward from which on a rollout is right."""
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


class GivenUp(Exception):
    """The buffer no longer wants the group: it began too early."""

    def __init__(self, completions: list[Completion]) -> None:
        self.actions = np.array([len(c.tokens) for c in completions], np.int32)
        self.oldest = min((int(c.versions[0]) for c in completions if len(c.tokens)), default=0)


class Player:
    """Plays the groups of one process.

    An environment that fails costs its group one member: the others are compared without it, nothing is set to zero.
    """

    def __init__(self, play: Play, replicas: list[Any], spans: Spans) -> None:
        """`replicas` are rank 0 of each `Generator` to ask; `spans` notes the time spent in environments."""
        self.config, self._replicas, self._spans = play, replicas, spans
        self._tokenizer = Tokenizer.load(play.model)
        self.router = Router(len(replicas), fixed=play.fixed_routes)
        self._explained = False

    def deadline(self) -> float:
        """When a group that begins now is to end, in the event loop's time."""
        return asyncio.get_running_loop().time() + self.config.timeout

    def members(self, lease: Lease, count: int) -> list[Member]:
        """The members of a group to be, by index."""
        where = f"ticket {lease.ticket} (row {lease.row}) attempt {lease.attempt}"
        return [Member(index=i, name=f"{where} member {i}") for i in range(count)]

    async def _each(self, members: Iterable[Member], act: Callable[[Member], Awaitable[None]]) -> None:
        """Play all these members at once; an EpisodeError fails its member alone, any other error all of them."""

        async def one(member: Member) -> None:
            try:
                await act(member)
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
    async def begun(
        self, lease: Lease, members: list[Member], replica: int, deadline: float
    ) -> AsyncIterator[list[tuple[Member, Completion]]]:
        """The members whose environment began, with their first completions, which are drawn in one call."""
        row, seen = self.config.task.row(lease.row), list[tuple[Prompt, Part]]()
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
            member.environment = self.config.task.environment()
            prompt = await member.environment.reset(row)
            if not seen or seen[-1][0] != prompt:
                seen.append((prompt, read_only(self._encode(prompt))))
            member.stream = Stream(seen[-1][1], self.config.sampling)
        length, context, new = len(member.stream), self.config.context, self.config.sampling.max_tokens
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

    async def play(self, lease: Lease, members: list[Member], replica: int) -> None:
        """The members' first actions together, then each episode at its own pace."""
        deadline = self.deadline()
        async with self.begun(lease, members, replica, deadline) as begun:
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
                observation = None
                if outcome.observation is not None:  # in a thread: a long one would keep the worker from answering
                    observation = await asyncio.to_thread(self._tokenizer.encode, outcome.observation)
                full = observation is not None and self._full(len(stream) + len(completion.tokens) + len(observation))
                stream.act(completion, outcome, "length" if full else completion.finish)
            if observation is None or full:
                return
            stream.observe(observation)
            (completion,) = await self._generate(replica, [self._request(lease, member, turn)], deadline)

    def _full(self, length: int) -> bool:
        """Whether a stream of so many tokens leaves no room to act."""
        return self.config.context is not None and length >= self.config.context

    def _request(self, lease: Lease, member: Member, turn: int) -> Request:
        """The next action of a member, of at most as many tokens as the context has room for."""
        assert member.stream is not None
        seed = derive_seed(self.config.seed, lease.ticket, member.index, turn)
        sampling, most = self.config.sampling, self.config.sampling.max_tokens
        if lease.ticket == PROBE_TICKET:
            # Probes of different versions draw differently.
            seed = derive_seed(seed, lease.version, member.index, turn)
            most = min(PROBE_TOKENS, most)
        if self.config.context is not None:
            most = min(most, self.config.context - len(member.stream))
        return Request(
            id=RequestId(lease.ticket, lease.attempt, member.index, turn),
            prompt=member.stream.tokens,
            sampling=sampling if most == sampling.max_tokens else replace(sampling, max_tokens=most),
            seed=seed,
            min_version=lease.version,
        )

    async def _generate(self, replica: int, requests: list[Request], deadline: float) -> list[Completion]:
        self.router.sent(replica, len(requests))
        try:
            async with asyncio.timeout_at(deadline):
                batch: CompletionBatch = await self._replicas[replica].generate.call_one(RequestBatch.of(requests))
        except TimeoutError:
            raise TimeoutError(f"no answer of a generator within --rollout.timeout {self.config.timeout:g}") from None
        self.router.answered(replica, len(requests), batch.load)
        completions = batch.unpack()
        if "abort" in batch.finishes:
            raise GivenUp(completions)
        return completions

    def _encode(self, prompt: Prompt) -> np.ndarray:
        if isinstance(prompt, str):
            return self._tokenizer.encode(prompt, specials=True)
        return self._tokenizer.chat(prompt)
