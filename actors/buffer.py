"""The replay buffer's actor: an index of leases behind a mailbox, with callers that wait for it to change."""

from __future__ import annotations

import asyncio
import logging
import math
from dataclasses import dataclass

import numpy as np
from monarch.actor import Actor, concurrent_endpoint

from actors import payload
from actors.config import BufferConfig
from actors.ledger import Ledger, Suspect
from actors.types import GroupMeta, Lease, Taken

log = logging.getLogger(__name__)

PATIENCE = 60.0
"""Seconds without any change before a waiting step says what it waits for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseReply:
    """Answer to a worker that asked for work."""

    leases: tuple[Lease, ...]
    suspects: tuple[Suspect, ...]
    """Groups to give up if they are too old."""
    done: bool
    """The run needs nothing more."""


class ReplayBuffer(Actor):
    """The ledger behind a mailbox. Callers wait on a condition; every change wakes them to look again."""

    def __init__(
        self,
        config: BufferConfig,
        steps: int,
        rows: int | None = None,
        epochs: int | None = None,
        seed: int = 0,
        timeout: float = math.inf,
        group_size: int = 1,
        quarantine: float = math.inf,
    ) -> None:
        """`timeout`: seconds in which a worker ends each group, one way or another; `Ledger` has the others."""
        self._timeout = timeout
        self._ledger = Ledger(
            config,
            steps=steps,
            rows=rows,
            epochs=epochs,
            seed=seed,
            free=lambda meta: payload.free(meta.handle),
            group_size=group_size,
            quarantine=quarantine,
        )
        self._changed = asyncio.Condition()

    async def _wake(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    @concurrent_endpoint
    async def lease(self, worker: int, most: int) -> LeaseReply:
        """Wait for work for this worker: leases, suspects, or the end."""
        ledger = self._ledger
        async with self._changed:
            while True:
                reply = LeaseReply(
                    leases=tuple(ledger.lease(worker, most)),
                    suspects=tuple(ledger.suspects(worker)),
                    done=ledger.exhausted,
                )
                if reply.leases or reply.suspects or reply.done:
                    return reply
                await self._changed.wait()

    @concurrent_endpoint
    async def put(self, meta: GroupMeta, failure: str = "") -> bool:
        """Record a finished group; False if its attempt is not the current one, and its payload is freed. Raises as
        `Ledger.put` does."""
        accepted = self._ledger.put(meta, failure)
        await self._wake()
        return accepted

    @concurrent_endpoint
    async def stale(self, ticket: int, attempt: int, oldest: int, actions: np.ndarray) -> None:
        """Record that a suspect was too old and given up; see `Ledger.stale`."""
        self._ledger.stale(ticket, attempt, oldest, actions)
        await self._wake()

    @concurrent_endpoint
    async def failed(self, ticket: int, attempt: int, reason: str, quarantined: int = 0) -> None:
        """Record a failed attempt; raises as `Ledger.failed` does."""
        self._ledger.failed(ticket, attempt, reason, quarantined)
        await self._wake()

    @concurrent_endpoint
    async def ready(self, step: int) -> Taken:
        """Wait until the batch of `step` is complete and take it; staleness is fixed by this.

        Raises:
            RuntimeError: a worker hangs, since a group neither ended nor failed in its time; or as `Ledger.take`.
        """
        idle = 0.0
        async with self._changed:
            while (taken := self._ledger.take(step)) is None:
                # Evictions and filters in a failed attempt give slots back.
                self._changed.notify_all()
                try:
                    async with asyncio.timeout(PATIENCE):
                        await self._changed.wait()
                    idle = 0.0
                except TimeoutError:
                    idle += PATIENCE
                    waiting = self._ledger.waiting_for(step)
                    if self._ledger.flying and idle > self._timeout + PATIENCE:
                        raise RuntimeError(
                            f"a rollout worker hangs, perhaps in a reward that never returns: no group ended in "
                            f"{idle:.0f} s and each has {self._timeout:.0f} s; {waiting}"
                        ) from None
                    log.warning("no progress for %.0f s: %s", idle, waiting)
            self._changed.notify_all()
            return taken

    @concurrent_endpoint
    async def announce(self, version: int) -> None:
        """All generators hold `version`."""
        self._ledger.announce(version)
        await self._wake()

    @concurrent_endpoint
    async def counts(self) -> dict[str, int]:
        """Tickets issued, trained, dropped (by reason), open, and ignored results."""
        return self._ledger.counts()
