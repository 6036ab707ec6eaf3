"""The replay buffer's rules as a plain object: when a ticket is issued, taken and dropped, free of time and tasks.

It knows no token. `actors.books` holds where each ticket stands, `actors.tickets` the bound and the orders,
`actors.tallies` the numbers; `actors.buffer` is the actor around it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np

from actors.books import Books
from actors.config import BufferConfig
from actors.tallies import zero_variance
from actors.tickets import Entry, RowOrder, Suspect, admission, takeable
from actors.types import Filtered, GroupMeta, Lease, Taken

HOPELESS = 100
"""Attempts that fail, groups that are filtered, or groups of equal rewards, in a row before the run ends."""


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
        any more; `quarantine` is the share of a step's rollouts (groups_per_step * group_size) that may fail, where
        `group_size` counts all that are drawn."""
        self.config = config
        self.capacity = admission(config)
        self.in_flight = config.in_flight or self.capacity or 4 * config.groups_per_step
        self._rollouts, self._tolerated = config.groups_per_step * group_size, quarantine
        self._steps = steps
        self._tickets = None if rows is None or epochs is None else rows * epochs
        self._row = RowOrder(rows, seed)
        self._free = free
        self._books = Books()
        self._suspects: dict[int, list[Suspect]] = defaultdict(list)
        self._failures = 0
        """Attempts that failed since a group was finished."""
        self._filtered = 0
        """Groups that were filtered since then."""
        self._ended = False

    # Issue

    def _wants_more(self) -> bool:
        books = self._books
        if self._tickets is not None and books.issued >= self._tickets:
            return False
        if self.capacity is not None and self.open >= self.capacity:
            return False
        if books.unfinished >= self.in_flight:
            return False
        steps_left = self._steps - books.next_step
        usable = [self.config.reuse - t.uses for t in books.open.values() if t.uses < self.config.reuse]
        needed = steps_left * self.config.groups_per_step
        if self.config.zero_variance == "filter":
            needed -= books.flat
        return sum(usable) < needed or (steps_left > 0 and len(usable) < self.config.groups_per_step)

    def lease(self, worker: int, most: int) -> list[Lease]:
        """Up to `most` leases for this worker: groups to try again first, then new tickets."""
        out: list[Lease] = []
        while len(out) < most:
            if self._books.again:
                out.append(self._books.reissue(worker))
            elif self._wants_more():
                out.append(self._books.issue(worker, self._row))
            else:
                break
        return out

    def suspects(self, worker: int) -> list[Suspect]:
        """Groups that this worker should give up if they began too early; each is told once per step."""
        return self._suspects.pop(worker, [])

    @property
    def exhausted(self) -> bool:
        """The last batch was taken: no lease will be given again."""
        return self._ended

    # Finish

    def put(self, meta: GroupMeta, failure: str = "") -> bool:
        """Record a finished group; False (and the payload freed) if its attempt is not the current one.

        Args:
            failure: of a group with quarantined members, the first one's error with its traceback.

        Raises:
            RuntimeError: too many rollouts failed since the last take.
        """
        self._quarantine(meta.quarantined, failure)
        entry = self._books.current(meta.ticket, meta.attempt)
        if entry is None:
            self._free(meta)
            return False
        self._failures = self._filtered = 0
        self._books.finish(entry, meta)
        return True

    def filtered(self, group: Filtered, failure: str = "") -> bool:
        """Record a group that a worker's filters left too little of: it is dropped, and its slot returns for another
        ticket. False if its attempt is not the current one.

        Args:
            failure: as of `put`.

        Raises:
            RuntimeError: too many rollouts failed since the last take; or `HOPELESS` groups were filtered in a row: no
                step would ever be full.
        """
        self._quarantine(group.quarantined, failure)
        entry = self._books.current(group.ticket, group.attempt)
        if entry is None:
            return False
        self._books.tally.since.note(group.judged, group.parts)
        self._drop(entry, "filtered")
        self._filtered += 1
        if self._filtered >= HOPELESS:
            raise RuntimeError(
                f"{self._filtered} groups in a row were filtered and none was finished; the last had {group.seen}: "
                "raise --sampling.max-tokens if answers are cut, or train them with --filter.on-truncated reward; use "
                "--filter.oversample 1 if all or none are right"
            )
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
        entry = self._books.current(ticket, attempt)
        if entry is None:
            return False
        self._failures += 1
        if self._failures >= HOPELESS:
            raise RuntimeError(f"{self._failures} groups failed in a row and none was finished; the last: {reason}")
        if attempt + 1 >= self.config.attempts:
            self._drop(entry, "failed")
        else:
            self._books.retry(entry)
        return True

    def _quarantine(self, count: int, failure: str) -> None:
        """Count rollouts that failed; end the run when they are too many for one step."""
        if not count:
            return
        self._books.tally.quarantine(count, failure)
        since = self._books.tally.since
        if since.quarantined > self._tolerated * self._rollouts:
            raise RuntimeError(
                f"the environment failed in {since.quarantined} rollouts on the way to step {self._books.next_step}, "
                f"of {self._rollouts} that a step has: more than --rollout.quarantine {self._tolerated:g} allows; the "
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
        books = self._books
        if step != books.next_step:
            raise ValueError(f"buffer: step {step} taken out of order, next is {books.next_step}")
        self._evict(step)
        p, zero = self.config.groups_per_step, self.config.zero_variance
        most = p * self.config.refill_cap if zero == "refill" else p
        chosen: list[Entry] = []
        for entry in takeable(books.untaken, self.config):
            if len(chosen) == p or (chosen and books.flat + len(chosen) >= most):
                break
            if zero != "keep" and zero_variance(entry.group):
                self._drop(entry, "zero_variance")
                books.flat += 1
            else:
                chosen.append(entry)
        if not chosen and books.flat >= max(most, HOPELESS):
            raise RuntimeError(
                f"step {step}: the rewards within each of {books.flat} groups were equal and no other came; raise "
                "--sampling.temperature or --group-size, or train them with --buffer.zero-variance keep"
            )
        full = len(chosen) == p or (chosen and books.flat + len(chosen) >= most)
        if not full and not self._drained():
            return None
        return self._close_take(sorted(chosen, key=lambda t: t.lease.ticket))

    def _close_take(self, chosen: list[Entry]) -> Taken:
        books, metas = self._books, [t.group for t in chosen]
        step, there = books.next_step, [t.group for t in books.untaken if t.meta is not None]
        books.take(chosen)
        self._ended = books.next_step >= self._steps or (self._drained() and not books.untaken)
        if self._ended:
            self._cut()
        untaken, bound = books.untaken, self.config.max_staleness
        gauges = {
            "buffer/open": float(self.open),
            "buffer/ready": float(sum(t.meta is not None for t in untaken)),
            "buffer/in_flight": float(sum(t.meta is None for t in untaken)),
            "buffer/groups": float(len(metas)),
        }
        return Taken(
            step=step,
            groups=tuple(metas),
            max_staleness=bound if self.config.stale == "mask" and bound >= 0 else None,
            metrics=books.tally.take(step, metas, there) | gauges,
            last=self._ended,
        )

    def _drained(self) -> bool:
        """The data ended and every group that can still come is here."""
        books, reuse = self._books, self.config.reuse
        return (
            self._tickets is not None
            and books.issued >= self._tickets
            and all(t.meta is not None if t.taken is None else t.uses >= reuse for t in books.open.values())
        )

    # Staleness

    def _evict(self, step: int) -> None:
        """End what can no longer be trained within the bound at `step` or later.

        Of a group in flight only the version at issue is known, and it may have waited for an engine since: its
        worker is asked. With `mask` its later tokens may still count.
        """
        bound = self.config.max_staleness
        if bound == -1:
            return
        for entry in self._books.untaken:
            if entry.meta is not None:
                rule = entry.meta.oldest.min if self.config.stale == "drop" else entry.meta.newest.max
                if step - int(rule()) > bound:
                    self._drop_stale(entry, int(entry.meta.newest.max() - entry.meta.oldest.min()), entry.meta.actions)
            elif self.config.stale == "drop" and entry.asked < step - bound > entry.lease.version:
                entry.asked = step - bound
                if entry not in self._books.again:
                    lease = entry.lease
                    suspect = Suspect(ticket=lease.ticket, attempt=lease.attempt, oldest=step - bound)
                    self._suspects[entry.worker].append(suspect)

    def stale(self, ticket: int, attempt: int, oldest: int, actions: np.ndarray) -> bool:
        """Record that a worker gave a suspect up: the version of its oldest token and what its members had generated.
        False if the attempt is not current."""
        entry = self._books.current(ticket, attempt)
        if entry is None:
            return False
        self._drop_stale(entry, self._books.version - oldest, actions)
        return True

    def _drop_stale(self, entry: Entry, span: int, actions: np.ndarray) -> None:
        """`span` is how many versions the group's own generation crossed."""
        if not entry.uses:
            self._books.tally.stale(entry.lease.ticket, actions, span=span, bound=self.config.max_staleness)
        self._drop(entry, "stale")

    # End

    def announce(self, version: int) -> None:
        """The generators hold `version`: close the tickets that were trained on the way to it."""
        self._free_payloads(self._books.announce(version, reuse=self.config.reuse, steps=self._steps))

    def _cut(self) -> None:
        """No step is left: end what none took."""
        self._free_payloads(self._books.cut())

    def _drop(self, entry: Entry, reason: str) -> None:
        if entry.meta is not None:
            self._books.tally.look(entry.meta)
        self._books.end(entry, reason)
        self._free_payloads([entry])

    def _free_payloads(self, ended: list[Entry]) -> None:
        for entry in ended:
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
        books = self._books.snapshot(version, reuse=self.config.reuse, steps=self._steps)
        return {**books, "rows": self._row.rows, "seed": self._row.seed}

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
        self._books = Books.restore(books, self._row)
        if self._books.next_step >= self._steps:
            self._ended = True
            self._cut()

    # Accounts

    @property
    def open(self) -> int:
        """Tickets issued and not ended."""
        return len(self._books.open)

    @property
    def trained(self) -> int:
        """Tickets that ended trained."""
        return self._books.trained

    @property
    def begun(self) -> tuple[int, ...]:
        """Open tickets that a step has trained."""
        return tuple(ticket for ticket, entry in self._books.open.items() if entry.uses)

    @property
    def flying(self) -> int:
        """Groups that workers have."""
        return self._books.unfinished - len(self._books.again)

    def counts(self) -> dict[str, int]:
        """issued = trained + dropped + open, and what was ignored."""
        books = self._books
        return {
            "issued": books.issued,
            "trained": books.trained,
            "dropped": sum(books.dropped.values()),
            "open": self.open,
            "ignored": books.ignored,
            "quarantined": books.tally.quarantined,
            **{f"dropped_{reason}": n for reason, n in books.dropped.items()},
        }

    def waiting_for(self, step: int) -> str:
        """One line on why `step` has no batch yet."""
        books = self._books
        untaken = books.untaken
        flying = [t.lease.ticket for t in untaken if t.meta is None]
        return (
            f"step {step} has {len(untaken) - len(flying)} finished groups of {self.config.groups_per_step}; "
            f"{len(flying)} are in flight (oldest ticket {min(flying, default=None)}), {len(books.again)} wait to be "
            f"tried again, {self.open} of {self.capacity} slots are open, the generators hold version {books.version}"
        )
