"""The replay buffer's books as a plain object: tickets, orders, bounds and accounting, free of time and tasks.

It holds what is known of each group and never a token. `actors.buffer` is the actor around it.
"""

from __future__ import annotations

import copy
import math
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from actors.checkpoint import plain, restored
from actors.config import BufferConfig
from actors.tallies import DROP_REASONS, Since, Tally, zero_variance
from actors.tickets import Entry, RowOrder, Suspect, admission, takeable
from actors.types import GroupMeta, Lease, PayloadHandle, Taken

HOPELESS = 100
"""Attempts that fail, or groups of equal rewards, in a row before the run ends."""


@dataclass
class _Before:
    """What the last take changed for good, so that a snapshot can undo it."""

    flat: int = 0
    since: Since = field(default_factory=Since)
    cut: list[Lease] = field(default_factory=list)
    """Tickets dropped because no step was left."""


class Ledger:
    """Tickets, their attempts and their ends.

    A ticket is issued once per attempt, finished by `put`, taken by a step and closed when the generators hold the
    weights that the step produced; or dropped with a reason. Its slot returns in every case, and
    issued = trained + dropped + open at any moment.
    """

    def __init__(
        self,
        config: BufferConfig,
        *,
        steps: int,
        rows: int | None = None,
        epochs: int | None = None,
        seed: int = 0,
        free: Callable[[GroupMeta], None] = lambda meta: None,
        group_size: int = 1,
        quarantine: float = math.inf,
    ) -> None:
        """`rows` and `epochs` bound the data (None: endless); `free` is called once per payload that is not needed
        any more; `quarantine` is the share of a step's rollouts (groups_per_step * group_size) that may fail."""
        self.config = config
        self.capacity = admission(config)
        self.in_flight = config.in_flight or self.capacity or 4 * config.groups_per_step
        self.version = 0
        self.issued = 0
        self.trained = 0
        self.dropped: Counter[str] = Counter(dict.fromkeys(DROP_REASONS, 0))
        self.ignored = 0
        """Results of stale attempts: duplicates and late answers."""
        self._rollouts, self._tolerated = config.groups_per_step * group_size, quarantine
        self._steps, self._next_step = steps, 0
        self._tickets = None if rows is None or epochs is None else rows * epochs
        self._row = RowOrder(rows, seed)
        self._free = free
        self._open: dict[int, Entry] = {}
        self._again: list[Entry] = []
        self._suspects: dict[int, list[Suspect]] = defaultdict(list)
        self._finished = 0
        self._flat = 0
        """Zero-variance groups dropped on the way to the next batch."""
        self._failures = 0
        """Attempts that failed since a group was finished."""
        self._ended = False
        self._tally = Tally()
        self._before = _Before()

    # Issue

    @property
    def open(self) -> int:
        """Tickets issued and not ended."""
        return len(self._open)

    @property
    def flying(self) -> int:
        """Groups that workers have."""
        return sum(t.meta is None and t not in self._again for t in self._open.values())

    def _untaken(self) -> list[Entry]:
        return [t for t in self._open.values() if t.taken is None]

    def _wants_more(self) -> bool:
        if self._tickets is not None and self.issued >= self._tickets:
            return False
        if self.capacity is not None and self.open >= self.capacity:
            return False
        if sum(t.meta is None for t in self._open.values()) >= self.in_flight:
            return False
        steps_left = self._steps - self._next_step
        usable = [self.config.reuse - t.uses for t in self._open.values() if t.uses < self.config.reuse]
        needed = steps_left * self.config.groups_per_step
        if self.config.zero_variance == "filter":
            needed -= self._flat
        return sum(usable) < needed or (steps_left > 0 and len(usable) < self.config.groups_per_step)

    def lease(self, worker: int, most: int) -> list[Lease]:
        """Up to `most` leases for this worker: groups to try again first, then new tickets."""
        out: list[Lease] = []
        while len(out) < most:
            if self._again:
                entry = self._again.pop(0)
                entry.worker = worker
                entry.lease = replace(entry.lease, version=self.version)
            elif self._wants_more():
                ticket = self.issued
                self.issued += 1
                entry = Entry(
                    Lease(ticket=ticket, attempt=0, row=self._row(ticket), version=self.version), worker=worker
                )
                self._open[ticket] = entry
            else:
                break
            out.append(entry.lease)
        return out

    def suspects(self, worker: int) -> list[Suspect]:
        """Groups that this worker should give up if they began too early; each is told once per step."""
        return self._suspects.pop(worker, [])

    @property
    def exhausted(self) -> bool:
        """The last batch was taken: no lease will be given again."""
        return self._ended

    # Finish

    def _current(self, ticket: int, attempt: int) -> Entry | None:
        entry = self._open.get(ticket)
        if entry is None or entry.lease.attempt != attempt or entry.meta is not None or entry in self._again:
            self.ignored += 1
            return None
        return entry

    def put(self, meta: GroupMeta, failure: str = "") -> bool:
        """Record a finished group; False (and the payload freed) if its attempt is not the current one.

        Args:
            failure: of a group with quarantined members, the first one's error with its traceback.

        Raises:
            RuntimeError: too many rollouts failed since the last take.
        """
        self._quarantine(meta.quarantined, failure)
        entry = self._current(meta.ticket, meta.attempt)
        if entry is None:
            self._free(meta)
            return False
        self._failures = 0
        entry.meta = meta
        entry.finished_as = self._finished
        self._finished += 1
        return True

    def failed(self, ticket: int, attempt: int, reason: str, quarantined: int = 0) -> bool:
        """Record a failed attempt; the ticket is tried again or dropped. False if the attempt is not current.

        Args:
            reason: why, with the traceback if an environment failed.
            quarantined: members whose environment failed.

        Raises:
            RuntimeError: too many rollouts failed since the last take; or `HOPELESS` attempts failed in a row: the
                task is broken, and no step would ever be full.
        """
        self._quarantine(quarantined, reason)
        entry = self._current(ticket, attempt)
        if entry is None:
            return False
        self._failures += 1
        if self._failures >= HOPELESS:
            raise RuntimeError(f"{self._failures} groups failed in a row and none was finished; the last: {reason}")
        if attempt + 1 >= self.config.attempts:
            self._again.append(entry)
            self._drop(entry, "failed")
        else:
            entry.lease = replace(entry.lease, attempt=attempt + 1)
            self._again.append(entry)
        return True

    def _quarantine(self, count: int, failure: str) -> None:
        """Count rollouts that failed; end the run when they are too many for one step."""
        if not count:
            return
        self._tally.quarantine(count, failure)
        since = self._tally.since
        if since.quarantined > self._tolerated * self._rollouts:
            raise RuntimeError(
                f"the environment failed in {since.quarantined} rollouts on the way to step {self._next_step}, of "
                f"{self._rollouts} that a step has: more than --rollout.quarantine {self._tolerated:g} allows; the "
                f"first: {since.failure}"
            )

    # Take

    def take(self, step: int) -> Taken | None:
        """The groups of `step`, or None while they are not there yet.

        Too old groups are ended first, so that every group returned keeps the bound. A batch is short when the data
        ended, when `filter` removed groups, or when `refill` reached its cap; it is empty only at the end of the data.

        Raises:
            RuntimeError: the rewards of `HOPELESS` groups or more were equal and no other came: nothing can be learnt.
        """
        if step != self._next_step:
            raise ValueError(f"buffer: step {step} taken out of order, next is {self._next_step}")
        self._evict(step)
        p, zero = self.config.groups_per_step, self.config.zero_variance
        most = p * self.config.refill_cap if zero == "refill" else p
        chosen: list[Entry] = []
        for entry in takeable(self._untaken(), self.config):
            if len(chosen) == p or (chosen and self._flat + len(chosen) >= most):
                break
            if zero != "keep" and zero_variance(entry.group):
                self._drop(entry, "zero_variance")
                self._flat += 1
            else:
                chosen.append(entry)
        if not chosen and self._flat >= max(most, HOPELESS):
            raise RuntimeError(
                f"step {step}: the rewards within each of {self._flat} groups were equal and no other came; raise "
                "--sampling.temperature or --group-size, or train them with --buffer.zero-variance keep"
            )
        full = len(chosen) == p or (chosen and self._flat + len(chosen) >= most)
        if not full and not self._drained():
            return None
        self._before = _Before(flat=self._flat, since=copy.deepcopy(self._tally.since))
        self._flat = 0
        return self._close_take(step, sorted(chosen, key=lambda t: t.lease.ticket))

    def _drained(self) -> bool:
        """The data ended and every group that can still come is here."""
        return (
            self._tickets is not None
            and self.issued >= self._tickets
            and all(
                t.meta is not None if t.taken is None else t.uses >= self.config.reuse for t in self._open.values()
            )
        )

    def _evict(self, step: int) -> None:
        """End what can no longer be trained within the bound at `step` or later.

        Of a group in flight only the version at issue is known, and it may have waited for an engine since: its
        worker is asked. With `mask` its later tokens may still count.
        """
        bound = self.config.max_staleness
        if bound == -1:
            return
        for entry in self._untaken():
            if entry.meta is not None:
                rule = entry.meta.oldest.min if self.config.stale == "drop" else entry.meta.newest.max
                if step - int(rule()) > bound:
                    self._drop_stale(entry, int(entry.meta.newest.max() - entry.meta.oldest.min()), entry.meta.actions)
            elif self.config.stale == "drop" and entry.asked < step - bound > entry.lease.version:
                entry.asked = step - bound
                if entry not in self._again:
                    lease = entry.lease
                    suspect = Suspect(ticket=lease.ticket, attempt=lease.attempt, oldest=step - bound)
                    self._suspects[entry.worker].append(suspect)

    def stale(self, ticket: int, attempt: int, oldest: int, actions: np.ndarray) -> bool:
        """Record that a worker gave a suspect up: the version of its oldest token and what its members had generated.
        False if the attempt is not current."""
        entry = self._current(ticket, attempt)
        if entry is None:
            return False
        self._drop_stale(entry, self.version - oldest, actions)
        return True

    def _drop_stale(self, entry: Entry, span: int, actions: np.ndarray) -> None:
        """`span` is how many versions the group's own generation crossed."""
        if not entry.uses:
            self._tally.stale(entry.lease.ticket, actions, span=span, bound=self.config.max_staleness)
        self._drop(entry, "stale")

    def _close_take(self, step: int, chosen: list[Entry]) -> Taken:
        metas = [t.group for t in chosen]
        for entry in chosen:
            entry.taken = step
            entry.uses += 1
        self._next_step = step + 1
        self._ended = self._next_step >= self._steps or (self._drained() and not self._untaken())
        if self._ended:
            self._cut()
        return Taken(
            step=step,
            groups=tuple(metas),
            max_staleness=self.config.max_staleness
            if self.config.stale == "mask" and self.config.max_staleness >= 0
            else None,
            metrics=self._tally.take(metas) | self._gauges() | {"buffer/groups": float(len(metas))},
            last=self._ended,
        )

    def _cut(self) -> None:
        """No step is left: end what none took."""
        for entry in self._untaken():
            if not entry.uses:
                self._before.cut.append(entry.lease)
            self._drop(entry, "end")

    # End

    def announce(self, version: int) -> None:
        """The generators hold `version`: close the tickets that were trained on the way to it."""
        self.version = max(self.version, version)
        for entry in list(self._open.values()):
            if entry.taken is None or entry.taken >= version:
                continue
            if entry.uses < self.config.reuse and self._next_step < self._steps:
                entry.taken = None
            else:
                self._drop(entry, "trained")

    def _drop(self, entry: Entry, reason: str) -> None:
        del self._open[entry.lease.ticket]
        if entry in self._again:
            self._again.remove(entry)
        if entry.uses:
            # It was trained at least once: an end by age or by the end of the run does not undo that.
            reason = "trained"
        if reason == "trained":
            self.trained += 1
        else:
            self.dropped[reason] += 1
            self._tally.drop(reason, entry.meta)
        if entry.meta is not None:
            self._free(entry.meta)

    # Checkpoints

    def snapshot(self, version: int) -> dict[str, Any]:
        """The books as they are when `version` is published and no step has taken from it; plain JSON.

        The steps before have ended. A batch of step `version` that is taken already goes back, and what was cut
        because no step was left is open again. What a worker holds is as good as lost: `restore` leases it anew, as
        its next attempt.

        Raises:
            RuntimeError: too early or too late: the books of that moment are gone.
        """
        if not version <= self._next_step <= version + 1 or self.version > version:
            raise RuntimeError(
                f"no snapshot of version {version}: version {self.version} is announced and step {self._next_step} "
                "is the next to be taken"
            )
        book = copy.deepcopy(self, {id(self._free): _keep})
        if book._next_step > version:
            book._untake(version)
        for lease in book._before.cut:
            book._open[lease.ticket] = Entry(lease, worker=-1)
            book.dropped["end"] -= 1
        book.announce(version)
        return {
            "version": version,
            "rows": self._row.rows,
            "seed": self._row.seed,
            "issued": book.issued,
            "trained": book.trained,
            "dropped": dict(book.dropped),
            "ignored": book.ignored,
            "quarantined": book._tally.quarantined,
            "finished": book._finished,
            "flat": book._flat,
            "since": {**vars(book._tally.since), "dropped": dict(book._tally.since.dropped)},
            "lengths": book._tally.lengths,
            "warned": sorted(book._tally.warned),
            "open": [
                {
                    "ticket": ticket,
                    "attempt": entry.lease.attempt + (entry.meta is None and entry not in book._again),
                    "finished_as": entry.finished_as,
                    "uses": entry.uses,
                    "meta": None if entry.meta is None else plain(asdict(entry.meta)),
                }
                for ticket, entry in sorted(book._open.items())
            ],
        }

    def _untake(self, step: int) -> None:
        """Undo the last take, of `step`, but for what it dropped."""
        taken = [entry for entry in self._open.values() if entry.taken == step]
        for entry in taken:
            entry.taken = None
            entry.uses -= 1
        self._next_step = step
        self._flat += self._before.flat
        self._tally.untake([entry.group for entry in taken], self._before.since)

    def restore(self, books: dict[str, Any]) -> None:
        """Go on from a snapshot, in a ledger that has issued nothing. Steps, epochs and all settings may be others.

        Raises:
            ValueError: rows or seed are, so that tickets would name other rows.
        """
        if (books["rows"], books["seed"]) != (self._row.rows, self._row.seed):
            raise ValueError(
                f"the checkpoint is of a run over {books['rows']} rows with seed {books['seed']}, this one has "
                f"{self._row.rows} rows and seed {self._row.seed}: its tickets would name other rows"
            )
        books = copy.deepcopy(books)
        self.version = self._next_step = books["version"]
        self.issued, self.trained, self.ignored = books["issued"], books["trained"], books["ignored"]
        self.dropped.update(books["dropped"])
        self._finished, self._flat = books["finished"], books["flat"]
        self._tally = Tally(
            since=Since(**{**books["since"], "dropped": Counter(books["since"]["dropped"])}),
            quarantined=books["quarantined"],
            lengths=books["lengths"],
            warned=set(books["warned"]),
        )
        for kept in books["open"]:
            ticket = kept["ticket"]
            lease = Lease(ticket=ticket, attempt=kept["attempt"], row=self._row(ticket), version=self.version)
            entry = Entry(lease, worker=-1, finished_as=kept["finished_as"], uses=kept["uses"])
            self._open[ticket] = entry
            if kept["meta"] is None:
                self._again.append(entry)
            else:
                meta = restored(kept["meta"])
                entry.meta = GroupMeta(**{**meta, "handle": PayloadHandle(**meta["handle"])})
        if self._next_step >= self._steps:
            self._ended = True
            self._cut()

    @property
    def begun(self) -> tuple[int, ...]:
        """Open tickets that a step has trained."""
        return tuple(ticket for ticket, entry in self._open.items() if entry.uses)

    def counts(self) -> dict[str, int]:
        """issued = trained + dropped + open, and what was ignored."""
        return {
            "issued": self.issued,
            "trained": self.trained,
            "dropped": sum(self.dropped.values()),
            "open": self.open,
            "ignored": self.ignored,
            "quarantined": self._tally.quarantined,
            **{f"dropped_{reason}": n for reason, n in self.dropped.items()},
        }

    def waiting_for(self, step: int) -> str:
        """One line on why `step` has no batch yet."""
        untaken = self._untaken()
        flying = [t.lease.ticket for t in untaken if t.meta is None]
        return (
            f"step {step} has {len(untaken) - len(flying)} finished groups of {self.config.groups_per_step}; "
            f"{len(flying)} are in flight (oldest ticket {min(flying, default=None)}), {len(self._again)} wait to be "
            f"tried again, {self.open} of {self.capacity} slots are open, the generators hold version {self.version}"
        )

    def _gauges(self) -> dict[str, float]:
        untaken = self._untaken()
        return {
            "buffer/open": float(self.open),
            "buffer/ready": float(sum(t.meta is not None for t in untaken)),
            "buffer/in_flight": float(sum(t.meta is None for t in untaken)),
        }


def _keep(meta: GroupMeta) -> None:
    """Frees nothing: for books that are a copy."""
