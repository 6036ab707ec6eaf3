"""Who did what when: spans of work that each role notes and the controller collects."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

JOIN = 0.005
"""Spans of one name that are at most so many seconds apart become one."""
MOST = 10_000
"""Spans kept until the next `take`; the oldest go first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Something that a role did from `begin` to `end`, in Unix seconds."""

    role: str
    name: str
    begin: float
    end: float
    version: int | None = None


class Spans:
    """A role's recorder."""

    def __init__(self, role: str) -> None:
        self.role = role
        self._spans: list[Span] = []

    def add(self, name: str, begin: float, end: float, version: int | None = None) -> None:
        """Note a span; one that follows its like at once is joined with it."""
        last = self._spans[-1] if self._spans else None
        if last is not None and (last.name, last.version) == (name, version) and begin - last.end <= JOIN:
            self._spans[-1] = Span(role=self.role, name=name, begin=last.begin, end=end, version=version)
        else:
            self._spans.append(Span(role=self.role, name=name, begin=begin, end=end, version=version))
            del self._spans[:-MOST]

    @contextmanager
    def __call__(self, name: str, version: int | None = None) -> Iterator[None]:
        """Note the time spent inside."""
        begin = time.time()
        try:
            yield
        finally:
            self.add(name, begin, time.time(), version)

    def take(self) -> list[Span]:
        """All spans so far, handed over once."""
        spans, self._spans = self._spans, []
        return spans
