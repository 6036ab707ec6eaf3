"""What a run leaves in its output folder, and what it shows meanwhile.

`config.json` (all settings), `metrics.jsonl` (one flat object a step), `evals.jsonl`, `rollouts.jsonl`,
`timeline.jsonl`, and at the end, however it comes, `summary.json`. `actors.output` writes the files. Metric names are
`<area>/<name>`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from actors.config import LogConfig
from actors.live import LiveView, terminal
from actors.output import append_lines, make_ready, rewind, write_json
from actors.settings import plain
from actors.timeline import Span
from actors.trackers import Trackers

CONSOLE = (
    ("reward/mean", "reward {:.3f}"),
    ("rollout/length", "length {:5.1f}"),
    ("rollout/truncated", "cut {:.0%}"),
    ("staleness/mean", "stale {:.1f}"),
    ("policy/loss", "loss {:+.4f}"),
    ("policy/grad_norm", "grad {:.2f}"),
    ("policy/engine_gap_max", "gap {:.0e}"),
    ("time/step", "step {:.3f}s"),
    ("time/wait_batch", "wait {:.3f}s"),
    ("perf/generated_tokens", "generated {:.0f}"),
)
"""What the console line shows, in this order."""

Status = Literal["done", "stopped", "failed"]


class RunLog:
    """The output folder of one run. Its files are written from the constructor on; as a context it also shows a live
    view, if stdout is a terminal, and feeds the trackers. Enter it before processes are started: the view takes over
    the terminal that they inherit."""

    def __init__(
        self,
        folder: Path,
        config: Any,
        steps: int,
        log: LogConfig | None = None,
        *,
        resume_step: int | None = None,
        overwrite: bool = False,
        quiet: bool = False,
    ) -> None:
        """Make the folder ready and write the settings.

        Args:
            config: a dataclass; its `output_dir`, if it has one, is written as `folder`.
            steps: how many the run will have, for the display.
            log: trackers; none unless given.
            resume_step: go on in the folder of an earlier run at this step. What that wrote about later steps and
                versions is removed, what it wrote before counts in the summary.
            overwrite: remove what an earlier run left, and nothing else.
            quiet: print nothing.

        Raises:
            FileExistsError: the folder holds something already.
            ValueError: a tracker's package is missing, there is nothing to resume, or a file of the run is damaged.
            OSError: the folder cannot be made or written.
        """
        self.folder, self._steps, self._quiet = folder, steps, quiet
        self.rows: list[dict[str, float]] = []
        log = log or LogConfig()
        self._settings = plain(config)
        if "output_dir" in self._settings:
            self._settings["output_dir"] = str(folder)
        self._trackers = Trackers(folder, log, self._settings, resume_step=resume_step)
        self._view: LiveView | None = None
        self._stack = ExitStack()
        try:
            if resume_step is None:
                make_ready(folder, overwrite)
            else:
                self.rows = rewind(folder, resume_step)
            (folder / "metrics.jsonl").touch()
            write_json(folder / "config.json", self._settings)
        except OSError as error:
            if error.strerror is None:
                raise
            raise OSError(f"cannot write {error.filename}: {error.strerror}; choose another --output-dir") from error
        self._earlier_wall = self.rows[-1].get("time/wall", 0.0) if self.rows else 0.0
        self._earlier_loop = self.total("time/step")
        self._began = time.perf_counter()
        self._say(f"writing to {folder}")

    def __enter__(self) -> RunLog:
        """Start the trackers and the view.

        Raises:
            ValueError: a tracker does not start.
        """
        with ExitStack() as stack:
            stack.enter_context(self._trackers)
            for link in self._trackers.links:
                self._say(link)
            if not self._quiet and terminal():
                self._view = LiveView(str(self.folder), self._steps, self.rows, self._trackers.links)
                stack.enter_context(self._view)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give the terminal back and wait, not for long, for the trackers to send the rest."""
        self._stack.__exit__(kind, error, trace)
        self._view = None

    def step(self, row: Mapping[str, float]) -> None:
        """Record one step; adds `time/wall`, seconds since the run began, without those between its processes.

        Raises:
            OSError: the file cannot be written, as on a full disk.
        """
        flat = {name: float(value) for name, value in row.items()}
        flat["step"] = int(row["step"])
        flat["time/wall"] = self.wall_seconds
        self.rows.append(flat)
        append_lines(self.folder / "metrics.jsonl", [flat])
        self._trackers.step(flat)
        shown = "  ".join(text.format(flat[name]) for name, text in CONSOLE if math.isfinite(flat.get(name, math.nan)))
        self._say(f"step {flat['step'] + 1:4d}/{self._steps}  {shown}")
        if self._view:
            self._view.step(flat)

    def evaluation(self, version: int, row: Mapping[str, float]) -> None:
        """Record an evaluation of one version of the weights. Raises OSError as `step` does."""
        append_lines(self.folder / "evals.jsonl", [{"version": version, **row}])
        self._trackers.step({"step": version, **row})
        values = "  ".join(f"{name.removeprefix('eval/')} {value:.3f}" for name, value in row.items())
        self._say(f"evaluation of version {version}  {values}")
        if self._view:
            self._view.evaluation = f"version {version}  {values}"

    def rollouts(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Record sample rollouts, from `actors.samples`. Raises OSError as `step` does."""
        if records:
            append_lines(self.folder / "rollouts.jsonl", records)
            self._trackers.rollouts(records)

    def spans(self, spans: Iterable[Span]) -> None:
        """Record who worked when. Raises OSError as `step` does."""
        append_lines(self.folder / "timeline.jsonl", [asdict(span) for span in spans])

    def note(self, text: str) -> None:
        """Say what goes on when no step does, such as starting or saving: in the live view only."""
        if self._view:
            self._view.note = text

    @property
    def wall_seconds(self) -> float:
        """Seconds of the run, all its processes together."""
        return self._earlier_wall + time.perf_counter() - self._began

    def mean(self, name: str, rows: slice = slice(None)) -> float:
        """Mean of a metric over some steps; nan if it was never there."""
        values = [row[name] for row in self.rows[rows] if name in row]
        return sum(values) / len(values) if values else math.nan

    def total(self, name: str) -> float:
        """Sum of a metric over all steps."""
        return sum(row.get(name, 0.0) for row in self.rows)

    def finish(
        self,
        loop_seconds: float,
        counts: Mapping[str, int],
        *,
        status: Status = "done",
        reason: str = "",
        **rest: float,
    ) -> dict[str, Any]:
        """Write and return the summary of the whole run, earlier processes included.

        Args:
            loop_seconds: of this process's loop; those of earlier ones are the sum of their steps.
            reason: why it was stopped or failed, one line.
            rest: further numbers; they replace those of the same name that are taken from the rows.
        """
        busy, loop = self.total("time/step"), self._earlier_loop + loop_seconds
        idle = sum(row.get("idle/generator", 0.0) * row.get("time/step", 0.0) for row in self.rows)
        summary: dict[str, Any] = {
            "status": status,
            "reason": reason,
            "reward_first5": self.mean("reward/mean", slice(0, 5)),
            "reward_last10": self.mean("reward/mean", slice(-10, None)),
            "length_first5": self.mean("rollout/length", slice(0, 5)),
            "length_last10": self.mean("rollout/length", slice(-10, None)),
            "steps": len(self.rows),
            "wall_seconds": self.wall_seconds,
            "loop_seconds": loop,
            "generated_tokens_per_second": self.total("perf/generated_tokens") / loop if loop else math.nan,
            "trained_tokens_per_second": self.total("perf/trained_tokens") / loop if loop else math.nan,
            "idle_trainer": self.total("time/wait_batch") / busy if busy else math.nan,
            "idle_generator": idle / busy if busy else math.nan,
            "tracker_errors": self._trackers.errors,
            **rest,
            **counts,
        }
        write_json(self.folder / "summary.json", summary)
        self._trackers.summary(summary)
        self.note(status)
        return summary

    def fail(self, reason: str, status: Status = "failed") -> dict[str, Any]:
        """`finish` for a run that ends in the middle: its loop's time is that of its steps."""
        return self.finish(self.total("time/step") - self._earlier_loop, {}, status=status, reason=reason)

    def _say(self, text: str) -> None:
        if not self._quiet and self._view is None:
            print(text, flush=True)


SHOWN = (
    ("reward", "{:.3f}", "reward_first5", "reward_last10"),
    ("length", "{:.1f}", "length_first5", "length_last10"),
    ("steps", "{:.0f}", "steps"),
    ("seconds", "{:.1f}", "loop_seconds"),
    ("generated tokens/s", "{:.0f}", "generated_tokens_per_second"),
    ("trained tokens/s", "{:.0f}", "trained_tokens_per_second"),
    ("trainer idle", "{:.0%}", "idle_trainer"),
    ("generators idle", "{:.0%}", "idle_generator"),
    ("tickets trained", "{:.0f}", "trained"),
    ("tickets dropped", "{:.0f}", "dropped"),
    ("quarantined rollouts", "{:.0f}", "quarantined"),
    ("tracker errors", "{:.0f}", "tracker_errors"),
)
"""Lines of the printed summary: two names are the first and the last steps' means."""


def print_summary(summary: Mapping[str, Any], console: Console | None = None) -> None:
    """What `finish` returned, as a table without frame; numbers that are not there have no line."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row(summary["status"], Text(summary["reason"]))
    for label, text, *names in SHOWN:
        values = [summary[name] for name in names if math.isfinite(summary.get(name, math.nan))]
        if len(values) == len(names) and not (label.startswith(("quarantined", "tracker")) and not any(values)):
            table.add_row(label, " -> ".join(text.format(value) for value in values))
    (console or Console(highlight=False)).print(table)
