"""Tickets: how many may be open, which row each names, what is known of one, in which order they are taken."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass

from actors.config import BufferConfig
from actors.types import GroupMeta, Lease


def admission(config: BufferConfig) -> int | None:
    """Most open tickets, (A + 1) * P; None is no bound.

    A is how many steps of work may be open ahead of the trainer. Born fresh and taken within A steps, a group is at
    most A versions old; with `window` a group may wait ceil((W - 1) / P) steps longer, which A gives up in advance.

    Raises:
        ValueError: the settings contradict each other.
    """
    c = config
    allowed = None if c.max_staleness == -1 else c.max_staleness
    if c.order == "window":
        wait = -(-(c.window - 1) // c.groups_per_step)
        if allowed is not None:
            allowed -= wait
            if allowed < 0:
                raise ValueError(
                    f"buffer: window {c.window} can delay a group by {wait} steps, more than max_staleness "
                    f"{c.max_staleness}; use a window of at most {c.max_staleness * c.groups_per_step + 1}"
                )
        if allowed is not None and c.depth is not None and not 0 <= c.depth <= allowed:
            raise ValueError(f"buffer: order window never drops, so depth must lie in 0..{allowed}, not {c.depth}")
    if c.depth is not None:
        allowed = None if c.depth == -1 else c.depth
    return None if allowed is None else (allowed + 1) * c.groups_per_step


class RowOrder:
    """Which dataset row a ticket names: a seeded shuffle per epoch, so the data position is the ticket number."""

    def __init__(self, rows: int | None, seed: int) -> None:
        """`rows` None is an endless dataset: ticket i names row i."""
        self.rows, self.seed = rows, seed
        self._epoch, self._shuffle = -1, list[int]()

    def __call__(self, ticket: int) -> int:
        if self.rows is None:
            return ticket
        epoch, at = divmod(ticket, self.rows)
        if epoch != self._epoch:
            self._shuffle = list(range(self.rows))
            random.Random(f"{self.seed}/epoch/{epoch}").shuffle(self._shuffle)
            self._epoch = epoch
        return self._shuffle[at]


@dataclass(eq=False)
class Entry:
    """What is known of a ticket between issue and end."""

    lease: Lease
    worker: int
    meta: GroupMeta | None = None
    finished_as: int = -1
    """Place in completion order."""
    uses: int = 0
    """Steps that took it."""
    taken: int | None = None
    """The step that holds it now."""
    asked: int = -1
    """Oldest version that its worker was last asked about."""

    @property
    def group(self) -> GroupMeta:
        """`meta` of a finished one."""
        assert self.meta is not None
        return self.meta


@dataclass(frozen=True, kw_only=True, slots=True)
class Suspect:
    """A group in flight that may be too old."""

    ticket: int
    attempt: int
    oldest: int
    """It is, if any of its tokens is of an older version than this."""


def takeable(untaken: Iterable[Entry], config: BufferConfig) -> list[Entry]:
    """The finished ones in the order in which a step may take them."""
    entries = sorted(untaken, key=lambda t: t.lease.ticket)
    finished = [t for t in entries if t.meta is not None]
    match config.order:
        case "oldest":
            return finished
        case "finish":
            return sorted(finished, key=lambda t: t.finished_as)
        case "freshest":
            return sorted(finished, key=lambda t: (-t.group.oldest.min(), t.lease.ticket))
        case "fifo":
            return _within_window(entries, 1)
        case "window":
            return _within_window(entries, config.window)


def _within_window(entries: list[Entry], reach: int) -> list[Entry]:
    """Finished ones that may be taken one after another, each within `reach` of the then oldest untaken ticket.

    Entries ascend by ticket; reach 1 is strict order.
    """
    left, out, at = list(entries), [], 0
    while at < len(left):
        if left[at].lease.ticket >= left[0].lease.ticket + reach:
            break
        if left[at].meta is not None:
            out.append(left.pop(at))
        else:
            at += 1
    return out
