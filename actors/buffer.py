"""The replay buffer's actor: an index of leases behind a mailbox, with callers that wait for it to change."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from monarch.actor import Actor, concurrent_endpoint

from actors import payload
from actors.config import BufferConfig
from actors.ledger import Ledger
from actors.tickets import Suspect
from actors.types import Filtered, GroupMeta, Lease, Taken

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


BOOKS = "books.json"
"""File of a checkpoint's buffer folder; the finished groups' payloads lie beside it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Restored:
    """What a trainer's accounts must know of the run before."""

    trained: int
    """Tickets that ended trained."""
    begun: tuple[int, ...]
    """Open tickets that a step has trained: they will end trained too."""


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
    async def filtered(self, group: Filtered, failure: str = "") -> None:
        """Record a group that filters left too little of; raises as `Ledger.filtered` does."""
        self._ledger.filtered(group, failure)
        await self._wake()

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

    @concurrent_endpoint
    async def checkpoint(self, folder: str, version: int) -> None:
        """Save the books and the finished groups to a new folder, as `Ledger.snapshot` sees them.

        The books are those of the moment when this arrives: call it after the step that made `version` and before
        step `version` + 1 is asked for. Copying goes on while groups end.

        Raises:
            RuntimeError: too early or too late for the version.
            OSError: no room.
        """
        books = self._ledger.snapshot(version)
        with contextlib.ExitStack() as pins:
            sources = [_pin(handle, pins) for handle in _handles(books)]
            await asyncio.to_thread(_save, Path(folder), books, sources)

    @concurrent_endpoint
    async def restore(self, folder: str, run_folder: str) -> Restored:
        """Go on from a checkpoint's buffer folder; payloads go to the run's folder. Only before the first lease.

        Raises:
            ValueError: the folder is damaged, or as `Ledger.restore`.
            OSError: it cannot be read, or there is no room.
        """
        books = await asyncio.to_thread(_load, Path(folder), run_folder)
        try:
            self._ledger.restore(books)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"the buffer's checkpoint {folder} is damaged: {error!r}") from error
        return Restored(trained=self._ledger.trained, begun=self._ledger.begun)


def _handles(books: dict[str, Any]) -> list[dict[str, Any]]:
    """Where the payloads of the finished groups lie, to be read and changed."""
    return [kept["meta"]["handle"] for kept in books["open"] if kept["meta"] is not None]


def _pin(handle: dict[str, Any], pins: contextlib.ExitStack) -> str:
    """Another name of a payload, so that its bytes stay while `pins` is open even if the group ends."""
    pin = f"{handle['path']}.pin"
    os.link(handle["path"], pin)
    pins.callback(os.unlink, pin)
    return pin


def _save(folder: Path, books: dict[str, Any], sources: list[str]) -> None:
    folder.mkdir()
    for handle, source in zip(_handles(books), sources, strict=True):
        handle["path"] = os.path.basename(handle["path"])
        shutil.copyfile(source, folder / handle["path"])
    (folder / BOOKS).write_text(json.dumps(books))


def _load(folder: Path, run_folder: str) -> dict[str, Any]:
    try:
        books: dict[str, Any] = json.loads((folder / BOOKS).read_text())
        for handle in _handles(books):
            name = os.path.basename(handle["path"])
            handle["path"] = os.path.join(run_folder, name)
            handle["host"] = socket.gethostname()
            shutil.copyfile(folder / name, handle["path"])
            if os.path.getsize(handle["path"]) != handle["nbytes"]:
                raise ValueError(f"{name} has not the {handle['nbytes']} bytes of its group")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"the buffer's checkpoint {folder} is damaged: {error!r}") from error
    return books
