"""Where every ticket stands: the state that a checkpoint keeps, and the moves that keep it consistent."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from actors.checkpoint import plain, restored
from actors.tallies import DROP_REASONS, Since, Tally
from actors.tickets import Entry
from actors.types import GroupMeta, Lease, PayloadHandle


@dataclass
class Before:
    """What the last take changed for good, so that a snapshot can undo it."""

    flat: int = 0
    since: Since = field(default_factory=Since)
    cut: list[Lease] = field(default_factory=list)
    """Tickets dropped because no step was left."""


@dataclass
class Books:
    """All tickets and what is counted of them; issued = trained + dropped + open after every move.

    The payloads of tickets that end are the caller's to free.
    """

    version: int = 0
    """Newest one that was announced."""
    next_step: int = 0
    issued: int = 0
    trained: int = 0
    dropped: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(DROP_REASONS, 0)))
    ignored: int = 0
    """Results of stale attempts: duplicates and late answers."""
    finished: int = 0
    flat: int = 0
    """Zero-variance groups dropped on the way to the next batch."""
    open: dict[int, Entry] = field(default_factory=dict)
    """By ticket, in the order of issue."""
    again: list[Entry] = field(default_factory=list)
    """Open ones that no worker has: they wait to be leased for their next attempt."""
    tally: Tally = field(default_factory=Tally)
    before: Before = field(default_factory=Before)

    @property
    def untaken(self) -> list[Entry]:
        """Open ones that no step holds."""
        return [t for t in self.open.values() if t.taken is None]

    @property
    def unfinished(self) -> int:
        """Open ones that workers have or will have again."""
        return sum(t.meta is None for t in self.open.values())

    def issue(self, worker: int, row: Callable[[int], int]) -> Lease:
        """Lease a new ticket; `row` tells which dataset row it names."""
        ticket = self.issued
        self.issued += 1
        lease = Lease(ticket=ticket, attempt=0, row=row(ticket), version=self.version)
        self.open[ticket] = Entry(lease, worker=worker)
        return lease

    def reissue(self, worker: int) -> Lease:
        """Lease the first of `again`."""
        entry = self.again.pop(0)
        entry.worker = worker
        entry.lease = replace(entry.lease, version=self.version)
        return entry.lease

    def current(self, ticket: int, attempt: int) -> Entry | None:
        """The entry whose attempt a worker answers; None, and counted, if nobody waits for that answer."""
        entry = self.open.get(ticket)
        if entry is None or entry.lease.attempt != attempt or entry.meta is not None or entry in self.again:
            self.ignored += 1
            return None
        return entry

    def finish(self, entry: Entry, meta: GroupMeta) -> None:
        """A worker's answer came."""
        entry.meta = meta
        entry.finished_as = self.finished
        self.finished += 1

    def retry(self, entry: Entry) -> None:
        """An attempt failed: the next one waits to be leased."""
        entry.lease = replace(entry.lease, attempt=entry.lease.attempt + 1)
        self.again.append(entry)

    def end(self, entry: Entry, reason: str) -> None:
        """Close a ticket: dropped with a reason, or trained if a step ever took it, whatever the reason is now."""
        del self.open[entry.lease.ticket]
        if entry in self.again:
            self.again.remove(entry)
        if entry.uses:
            self.trained += 1
        else:
            self.dropped[reason] += 1
            self.tally.drop(reason, entry.meta)

    def take(self, chosen: list[Entry]) -> None:
        """The next step takes these."""
        self.before = Before(flat=self.flat, since=copy.deepcopy(self.tally.since))
        self.flat = 0
        for entry in chosen:
            entry.taken = self.next_step
            entry.uses += 1
        self.next_step += 1

    def cut(self) -> list[Entry]:
        """No step is left: end what none holds; returns it."""
        cut = self.untaken
        for entry in cut:
            if not entry.uses:
                self.before.cut.append(entry.lease)
            self.end(entry, "end")
        return cut

    def announce(self, version: int, *, reuse: int, steps: int) -> list[Entry]:
        """The generators hold `version`: end what was trained on the way to it, and return it, but for what may be
        used again."""
        self.version = max(self.version, version)
        closed = []
        for entry in list(self.open.values()):
            if entry.taken is None or entry.taken >= version:
                continue
            if entry.uses < reuse and self.next_step < steps:
                entry.taken = None
            else:
                self.end(entry, "trained")
                closed.append(entry)
        return closed

    def snapshot(self, version: int, *, reuse: int, steps: int) -> dict[str, Any]:
        """The books as they are when `version` is announced and no step has taken from it; plain JSON.

        Raises:
            RuntimeError: too early or too late: the books of that moment are gone.
        """
        if not version <= self.next_step <= version + 1 or self.version > version:
            raise RuntimeError(
                f"no snapshot of version {version}: version {self.version} is announced and step {self.next_step} "
                "is the next to be taken"
            )
        then = copy.deepcopy(self)
        if then.next_step > version:
            then._untake()
        for lease in then.before.cut:
            then.open[lease.ticket] = Entry(lease, worker=-1)
            then.dropped["end"] -= 1
        then.announce(version, reuse=reuse, steps=steps)
        return {
            "version": version,
            "issued": then.issued,
            "trained": then.trained,
            "dropped": dict(then.dropped),
            "ignored": then.ignored,
            "quarantined": then.tally.quarantined,
            "finished": then.finished,
            "flat": then.flat,
            "since": {**vars(then.tally.since), "dropped": dict(then.tally.since.dropped)},
            "lengths": then.tally.lengths,
            "warned": sorted(then.tally.warned),
            "open": [
                {
                    "ticket": ticket,
                    "attempt": entry.lease.attempt + (entry.meta is None and entry not in then.again),
                    "finished_as": entry.finished_as,
                    "uses": entry.uses,
                    "meta": None if entry.meta is None else plain(asdict(entry.meta)),
                }
                for ticket, entry in sorted(then.open.items())
            ],
        }

    def _untake(self) -> None:
        """Undo the last take, but for what it dropped."""
        self.next_step -= 1
        taken = [entry for entry in self.open.values() if entry.taken == self.next_step]
        for entry in taken:
            entry.taken = None
            entry.uses -= 1
        self.flat += self.before.flat
        self.tally.untake([entry.group for entry in taken], self.before.since)

    @classmethod
    def restore(cls, saved: dict[str, Any], row: Callable[[int], int]) -> Books:
        """The books of a snapshot; what a worker had waits to be leased for its next attempt."""
        saved = copy.deepcopy(saved)
        books = cls(
            version=saved["version"],
            next_step=saved["version"],
            issued=saved["issued"],
            trained=saved["trained"],
            ignored=saved["ignored"],
            finished=saved["finished"],
            flat=saved["flat"],
            tally=Tally(
                since=Since(**{**saved["since"], "dropped": Counter(saved["since"]["dropped"])}),
                quarantined=saved["quarantined"],
                lengths=saved["lengths"],
                warned=set(saved["warned"]),
            ),
        )
        books.dropped.update(saved["dropped"])
        for kept in saved["open"]:
            ticket = kept["ticket"]
            lease = Lease(ticket=ticket, attempt=kept["attempt"], row=row(ticket), version=books.version)
            entry = Entry(lease, worker=-1, finished_as=kept["finished_as"], uses=kept["uses"])
            books.open[ticket] = entry
            if kept["meta"] is None:
                books.again.append(entry)
            else:
                meta = restored(kept["meta"])
                entry.meta = GroupMeta(**{**meta, "handle": PayloadHandle(**meta["handle"])})
        return books
