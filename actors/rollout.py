"""Rollout workers: lease a ticket, play its episodes against the generators, hand the group to the buffer."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from functools import partial
from typing import Any

from monarch.actor import Actor, concurrent_endpoint, current_rank

from actors import payload
from actors.environment import HeldOut, HeldOutRows, Outcome
from actors.episode import Member, meta_of, parts_of, rewards_of
from actors.filters import survivors
from actors.player import PROBE_TICKET, GivenUp, Play, Player
from actors.tickets import Suspect
from actors.timeline import Span, Spans
from actors.types import Completion, Filtered, Group, Judged, Lease, Probe, Rollout, Sampling, derive_seed

log = logging.getLogger(__name__)

ABREAST = 64
"""Held-out rows that one worker plays at a time."""


class RolloutWorker(Actor):
    """Plays leased groups until the buffer says that the run needs no more.

    With fewer than half of a group's members left the attempt fails, and the ticket is tried again.
    """

    def __init__(self, play: Play, buffer: Any, replicas: list[Any]) -> None:
        """`buffer` and `replicas` are the actors to call: one `ReplayBuffer` and the rank 0 of each `Generator`."""
        self._play, self._buffer, self._replicas = play, buffer, replicas
        self._index = current_rank().rank
        self._spans = Spans(f"worker{self._index}")
        self._player = Player(play, replicas, self._spans)
        self._groups: dict[tuple[int, int], asyncio.Task[None]] = {}

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
        group, deadline = self._player.members(lease, members), self._player.deadline()
        try:
            async with self._player.begun(lease, group, replica, deadline) as begun:
                rollouts = tuple(self._unjudged(*pair) for pair in begun)
        except TimeoutError as error:
            log.warning("no probe of version %d: %s", version, error)
            return None
        if not rollouts:
            log.warning("no probe of version %d: %s", version, group[0].failure)
            return None
        probed = Group(ticket=PROBE_TICKET, attempt=version, row=row, rollouts=rollouts)
        return Probe(version=version, handle=payload.write(probed, self._play.folder))

    @concurrent_endpoint
    async def evaluate(
        self, generator: Any, rows: list[int], version: int, samples: int, sampling: Sampling
    ) -> list[Judged]:
        """Play held-out rows, `samples` times each, on a generator (rank 0) that holds `version` and keeps it.

        Raises:
            ValueError: the task keeps no rows from training.
            TimeoutError: the generator did not answer in a row's time.
        """
        task = self._play.task
        if not isinstance(task, HeldOut):
            raise ValueError(f"{type(task).__name__} has no held_out_row to evaluate on")
        play = replace(self._play, task=HeldOutRows(task), sampling=sampling, fixed_routes=False)
        player, gate = Player(play, [generator], self._spans), asyncio.Semaphore(ABREAST)

        async def one(row: int) -> Judged:
            lease = Lease(ticket=row, attempt=version, row=row, version=version)
            members = player.members(lease, samples)
            async with gate:
                await player.play(lease, members, 0)
            return Judged(
                row=row,
                rollouts=tuple(m.stream.finish() for m in members if m.stream is not None and m.failure is None),
                failures=tuple(m.failure for m in members if m.failure is not None),
            )

        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(one(row)) for row in rows]
        return [task.result() for task in running]

    @staticmethod
    def _unjudged(member: Member, completion: Completion) -> Rollout:
        assert member.stream is not None
        member.stream.act(completion, Outcome(), completion.finish)
        return member.stream.finish()

    async def _question(self, suspect: Suspect) -> None:
        """Stop a group's open requests if one of them began too early; the group then gives itself up."""
        key = (suspect.ticket, suspect.attempt)
        await self._replicas[self._player.router.pick(suspect.ticket, key)].abort.call_one(*key, suspect.oldest)

    async def _lead(self, lease: Lease) -> None:
        """One group from lease to buffer."""
        replica = self._player.router.pick(lease.ticket, (lease.ticket, lease.attempt))
        members = self._player.members(lease, self._play.group_size * self._play.filter.oversample)
        abort = partial(self._replicas[replica].abort.call_one, lease.ticket, lease.attempt)
        try:
            await self._player.play(lease, members, replica)
        except GivenUp as gone:
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
            self._player.router.forget((lease.ticket, lease.attempt))
            del self._groups[lease.ticket, lease.attempt]

    async def _hand_over(self, lease: Lease, members: list[Member]) -> None:
        """Give the buffer what filters keep of the members that are left. With too few left the attempt failed, with
        too few kept the buffer hears only what they got."""
        play = self._play
        scored = tuple(m.stream.finish() for m in members if m.stream is not None and m.failure is None)
        if 2 * len(scored) < len(members):
            await self._fail(lease, members, f"only {len(scored)} of {len(members)} members are left")
            return
        failed, failure = len(members) - len(scored), next((m.failure for m in members if m.failure), "")
        kept = survivors(
            scored,
            play.filter,
            group_size=play.group_size,
            solved=play.solved,
            seed=derive_seed(play.seed, lease.ticket, -1, 0),
        )
        if not kept:
            cut, right = sum(r.truncated for r in scored), sum(r.reward >= play.solved for r in scored)
            seen = f"{cut} of {len(scored)} rollouts truncated, {right} right"
            filtered = Filtered(
                ticket=lease.ticket,
                attempt=lease.attempt,
                judged=rewards_of(scored),
                parts=parts_of(scored),
                seen=seen,
                quarantined=failed,
            )
            await self._buffer.filtered.call_one(filtered, failure)
            return
        group = Group(ticket=lease.ticket, attempt=lease.attempt, row=lease.row, rollouts=kept)
        meta = meta_of(group, payload.write(group, play.folder), failed, scored)
        await self._buffer.put.call_one(meta, failure)

    async def _fail(self, lease: Lease, members: list[Member], reason: str) -> None:
        log.warning("ticket %d (row %d) attempt %d failed: %s", lease.ticket, lease.row, lease.attempt, reason)
        failures = [m.failure for m in members if m.failure]
        await self._buffer.failed.call_one(
            lease.ticket, lease.attempt, failures[0] if failures else reason, len(failures)
        )
