"""Who worked and who waited when: spans that every role records and the controller writes to `timeline.jsonl`.

Torch-free. Times are Unix seconds, so that spans of several processes of one host lie on one axis.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

JOIN = 0.005
"""Seconds between two spans of one name and version up to which they count as one."""
LIMIT = 10_000
"""Most spans that wait to be taken; then the oldest go."""
LOST = "lost"
"""Name of the span that covers those that went."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """One stretch of time in which a role did one thing; `dataclasses.asdict` of it is a line of `timeline.jsonl`."""

    role: str
    """trainer, generator0.., worker0.., sync, buffer or evaluator."""
    name: str
    """wait, train, stage, decode, swap, score, push, pull, checkpoint or evaluate."""
    begin: float
    """Unix seconds."""
    end: float
    """Unix seconds, not before begin."""
    version: int | None
    """Of the weights it was about."""


class Spans:
    """Spans of one role, recorded in one thread: `with spans("train", version=3): ...`.

    Spans of one name and version that overlap or follow each other within `JOIN` seconds become one, so a generator's
    thousand decode ticks a second are one span for each burst. Memory is bounded by `LIMIT` spans between two takes.
    """

    def __init__(self, role: str) -> None:
        self.role = role
        self._spans: deque[_Open] = deque()
        self._newest: dict[str, _Open] = {}
        self._lost: _Open | None = None

    @contextmanager
    def __call__(self, name: str, version: int | None = None) -> Iterator[None]:
        """Record how long the block takes, also when it raises. Until then the span is in no `take`."""
        begin, clock = time.time(), time.perf_counter()
        try:
            yield
        finally:
            self.add(name, begin, begin + time.perf_counter() - clock, version)

    def add(self, name: str, begin: float, end: float, version: int | None = None) -> None:
        """Record a span measured elsewhere; one that ends before it begins (the clock was set back) has no length."""
        end = max(begin, end)
        newest = self._newest.get(name)
        if newest and newest.version == version and begin <= newest.end + JOIN and newest.begin <= end + JOIN:
            newest.begin, newest.end = min(newest.begin, begin), max(newest.end, end)
            return
        if len(self._spans) == LIMIT:
            self._lose(self._spans.popleft())
        self._newest[name] = _Open(name, begin, end, version)
        self._spans.append(self._newest[name])

    def _lose(self, span: _Open) -> None:
        if self._newest[span.name] is span:
            del self._newest[span.name]
        lost = self._lost or _Open(LOST, span.begin, span.end, None)
        lost.begin, lost.end = min(lost.begin, span.begin), max(lost.end, span.end)
        self._lost = lost

    def take(self) -> list[Span]:
        """Hand over what was recorded since the last call, ordered by when it was first recorded."""
        spans = [self._lost, *self._spans] if self._lost else list(self._spans)
        self._spans.clear()
        self._newest.clear()
        self._lost = None
        return [Span(role=self.role, name=s.name, begin=s.begin, end=s.end, version=s.version) for s in spans]


@dataclass(slots=True)
class _Open:
    """A span that may still grow."""

    name: str
    begin: float
    end: float
    version: int | None


def chrome_trace(spans: Iterable[Span]) -> dict[str, Any]:
    """Spans as Chrome's trace-event JSON, which https://ui.perfetto.dev and chrome://tracing load.

    A role is a process, a name one of its threads, and times are microseconds since the first span began. A thread's
    events must nest there, so spans of one name that overlap go to further threads of that name.
    """
    ordered = sorted(spans, key=lambda span: (span.begin, -span.end))
    start = ordered[0].begin if ordered else 0.0
    processes = {role: index for index, role in enumerate(sorted({span.role for span in ordered}), 1)}
    threads: dict[tuple[str, str], list[tuple[int, float]]] = {}
    number = 0
    events: list[dict[str, Any]] = [_named("process_name", pid, 0, role) for role, pid in processes.items()]
    for span in ordered:
        pid = processes[span.role]
        lanes = threads.setdefault((span.role, span.name), [])
        lane = next((i for i, (_, end) in enumerate(lanes) if end <= span.begin), len(lanes))
        if lane == len(lanes):
            number += 1
            lanes.append((number, span.end))
            events.append(_named("thread_name", pid, number, span.name if lane == 0 else f"{span.name} {lane + 1}"))
        thread = lanes[lane][0]
        lanes[lane] = (thread, span.end)
        event = {"ph": "X", "name": span.name, "cat": span.role, "pid": pid, "tid": thread}
        event |= {"ts": (span.begin - start) * 1e6, "dur": (span.end - span.begin) * 1e6}
        events.append(event if span.version is None else event | {"args": {"version": span.version}})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}
