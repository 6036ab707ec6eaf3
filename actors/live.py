"""What a run shows on a terminal: how far it is, how well it learns, who waits."""

from __future__ import annotations

import math
import os
import secrets
import select
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import IO

from rich.console import Console, ConsoleDimensions, Group, RenderableType
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

PER_SECOND = 2
"""Frames drawn."""
CURVE = 60
"""Most characters of a curve."""
STILL = 0.1
"""Of the distance between a run's values and 0, how much a curve spans at least: less movement is noise."""
SPEED_SECONDS = 3600
"""Steps younger than this give the remaining time."""
DRAIN_SECONDS = 2.0
"""Longest wait, at the end, for lines on their way to the terminal."""
CHUNK = 1 << 16
"""Bytes read at once: what a pipe holds."""
BARS = "".join(map(chr, range(0x2581, 0x2589)))
"""Eight blocks from low to high."""

LINES = (
    ("reward", "reward/mean", (("reward/mean", "{:.3f}"),)),
    ("length", "rollout/length", (("rollout/length", "{:.1f}"), ("rollout/truncated", "cut {:.0%}"))),
    (
        "staleness",
        None,
        (("staleness/mean", "mean {:.1f}"), ("staleness/max", "max {:.0f}"), ("staleness/dropped", "dropped {:.0f}")),
    ),
    ("idle", None, (("idle/trainer", "trainer {:.0%}"), ("idle/generator", "generators {:.0%}"))),
    ("queue", None, (("buffer/ready", "{:.0f} ready"), ("buffer/in_flight", "{:.0f} in flight"))),
    (
        "policy",
        None,
        (
            ("policy/loss", "loss {:+.4f}"),
            ("policy/grad_norm", "grad {:.2f}"),
            ("policy/engine_gap_max", "gap {:.0e}"),
        ),
    ),
)
"""Label, the metric whose curve ends the line, and the numbers before it."""


def terminal() -> bool:
    """Whether stdout is a terminal that can move its cursor."""
    return sys.stdout.isatty() and not Console().is_dumb_terminal


class LiveView:
    """A few lines at the bottom of the terminal, redrawn in place by a thread.

    While it is shown, stdout and stderr of this process and of all that it starts then are a pipe whose lines are
    printed above the view: a warning from any process leaves it whole. stderr stays as it is if it is no terminal.
    """

    def __init__(self, title: str, steps: int, rows: Sequence[Mapping[str, float]], links: Sequence[str]) -> None:
        """`rows` are the steps of earlier processes of the run."""
        self.note, self.evaluation = "starting", ""
        self._title, self._links = title, links
        self._last: Mapping[str, float] = rows[-1] if rows else {}
        self._curves = {curve: [row.get(curve, math.nan) for row in rows] for _, curve, _ in LINES if curve}
        self._steps, self._done = steps, int(rows[-1]["step"]) + 1 if rows else 0
        self._mark = secrets.token_hex(16).encode()
        self._ended = threading.Event()
        self._stack = ExitStack()

    def __enter__(self) -> LiveView:
        with ExitStack() as stack:
            self._terminal = os.dup(1)
            stack.callback(os.close, self._terminal)
            # Not closed with the view: processes that outlive it still write to the pipe.
            out = open(os.dup(1), "w", encoding=sys.stdout.encoding, errors="replace")
            self._console = Console(file=out, force_terminal=True, highlight=False, markup=False)
            self._progress = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=None),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=self._console,
                auto_refresh=False,
                expand=True,
                speed_estimate_period=SPEED_SECONDS,
            )
            self._task = self._progress.add_task("", total=self._steps, completed=self._done)
            reader = self._redirect(stack)
            threading.Thread(target=self._draw, args=(reader,), name="terminal", daemon=True).start()
            stack.callback(self._drain)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def step(self, row: Mapping[str, float]) -> None:
        """Show a step that ended."""
        self._last = row
        for curve, values in self._curves.items():
            values.append(row.get(curve, math.nan))
        self.note = ""
        self._progress.update(self._task, completed=row["step"] + 1)

    def frame(self) -> RenderableType:
        """The lines as they are now; runs in the view's thread."""
        self._measure()
        width = self._console.width
        grid = Table.grid(padding=(0, 1))
        grid.add_column(style="dim", width=10)
        grid.add_column()
        last = self._last
        for label, curve, numbers in LINES:
            text = "  ".join(
                form.format(last[name]) for name, form in numbers if math.isfinite(last.get(name, math.nan))
            )
            if curve and text:
                text += f"  {sparkline(self._curves[curve], min(CURVE, max(1, width - 13 - len(text))))}"
            if text:
                grid.add_row(label, Text(text, no_wrap=True, overflow="ellipsis"))
        for label, text in (
            ("evaluation", self.evaluation),
            ("now", self.note),
            *(("log", link) for link in self._links),
        ):
            if text:
                grid.add_row(label, Text(text, no_wrap=True, overflow="ellipsis"))
        return Group(Text(self._title, no_wrap=True, overflow="ellipsis"), self._progress, grid)

    def _measure(self) -> None:
        """rich would look at the standard streams, which may be no terminal now."""
        size = os.get_terminal_size(self._terminal)
        self._console.size = ConsoleDimensions(size.columns or 80, size.lines or 25)

    def _redirect(self, stack: ExitStack) -> int:
        """Lay a pipe where the terminal is; returns its end to read from."""
        reader, self._pipe = os.pipe()
        stack.callback(os.close, self._pipe)
        for stream, fd in ((sys.stdout, 1), (sys.stderr, 2)):
            if os.isatty(fd):
                stream.flush()
                saved = os.dup(fd)
                stack.callback(os.close, saved)
                stack.callback(os.dup2, saved, fd)
                stack.callback(stream.flush)
                os.dup2(self._pipe, fd)
        return reader

    def _draw(self, reader: int) -> None:
        """The view's thread, the only one that writes to the terminal meanwhile: draws, and prints what comes through
        the pipe, until its last writer is gone."""
        with open(reader, "rb", buffering=0) as pipe:
            try:
                with Live(
                    get_renderable=self.frame,
                    console=self._console,
                    auto_refresh=False,
                    redirect_stdout=False,
                    redirect_stderr=False,
                ) as live:
                    rest = self._forward(pipe, live)
                self._ended.set()
                while data := pipe.read(CHUNK):
                    rest = self._print(rest + data)
            except OSError:  # the terminal is gone, and whoever writes must not wait for it
                self._ended.set()
                while pipe.read(CHUNK):
                    pass

    def _forward(self, pipe: IO[bytes], live: Live) -> bytes:
        """Until the mark comes; returns what came after it."""
        rest, drawn = b"", 0.0
        while True:
            wait = max(0.0, drawn + 1 / PER_SECOND - time.monotonic())
            if select.select([pipe], [], [], wait)[0]:
                before, mark, after = (rest + pipe.read(CHUNK)).partition(self._mark)
                rest = self._print(before + b"\n" * (mark != b"" and before[-1:] not in (b"", b"\n")))
                if mark:
                    return after
            if time.monotonic() >= drawn + 1 / PER_SECOND:
                live.refresh()
                drawn = time.monotonic()

    def _print(self, data: bytes) -> bytes:
        """Print the whole lines above the view; returns the rest."""
        *lines, rest = data.split(b"\n")
        if lines:
            # A progress bar of some library overwrites its line: its last state is enough.
            texts = (line.decode(errors="replace").rstrip("\r").rsplit("\r", 1)[-1] for line in lines)
            self._console.print(Text("\n").join(map(Text.from_ansi, texts)), soft_wrap=True)
        return rest

    def _drain(self) -> None:
        """Wait until all that was written so far is on the terminal, and the view's last state below it."""
        sys.stdout.flush()
        sys.stderr.flush()
        os.write(self._pipe, self._mark)
        self._ended.wait(DRAIN_SECONDS)


def sparkline(values: Sequence[float], width: int) -> str:
    """All values in at most `width` characters, from the lowest shown to the highest; a blank for nan.

    More values than that are shown as means of equal stretches. Values that lie close together, measured by `STILL`,
    are shown around the middle.
    """
    bars = min(width, len(values))
    shown = [_mean(values[i * len(values) // bars : (i + 1) * len(values) // bars]) for i in range(bars)]
    finite = [value for value in shown if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    span = max(high - low, STILL * (max(high, 0.0) - min(low, 0.0)))
    bottom, scale = (low + high - span) / 2, (len(BARS) - 1) / span if span else 0.0
    return "".join(BARS[round((value - bottom) * scale)] if math.isfinite(value) else " " for value in shown)


def _mean(values: Sequence[float]) -> float:
    """Of those that are finite; nan if none is."""
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan
