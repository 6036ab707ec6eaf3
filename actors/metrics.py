"""What a run leaves in its output folder, and what it shows meanwhile.

`config.json` (all settings), `metrics.jsonl` (one flat object a step), `evals.jsonl`, `rollouts.jsonl`,
`timeline.jsonl`, and at the end, however it comes, `summary.json`. Lines are whole or the last one is torn: readers
skip that one. Metric names are `<area>/<name>`.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from actors.config import LogConfig
from actors.live import LiveView, terminal
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

LEFT = (
    "rollouts.jsonl",
    "timeline.jsonl",
    "evals.jsonl",
    "summary.json",
    "trackers.json",
    "report.html",
    "model",
    "checkpoints",
    "wandb",
    "tensorboard",
    "metrics.jsonl",
    "config.json",
)
"""All that a run leaves in its folder, in the order in which `--overwrite` removes it: what shows that it is a run's
folder goes last, so that an interrupted removal can be repeated."""

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
            self._prepare(resume_step, overwrite)
        except OSError as error:
            if error.strerror is None:
                raise
            raise OSError(f"cannot write {error.filename}: {error.strerror}; choose another --output-dir") from error
        self._earlier_wall = self.rows[-1].get("time/wall", 0.0) if self.rows else 0.0
        self._earlier_loop = self.total("time/step")
        self._began = time.perf_counter()
        self._say(f"writing to {folder}")

    def _prepare(self, resume_step: int | None, overwrite: bool) -> None:
        folder = self.folder
        folder.mkdir(parents=True, exist_ok=True)
        ours = is_run(folder)
        if resume_step is not None:
            if not ours:
                raise ValueError(f"{folder} is not the folder of a run, so there is nothing to resume")
            self._rewind(resume_step)
        elif any(folder.iterdir()):
            if not ours:
                raise FileExistsError(
                    f"{folder} is not empty and not the folder of a run: choose another --output-dir"
                )
            if not overwrite:
                raise FileExistsError(
                    f"{folder} holds a run: go on with --resume, start anew with --overwrite, "
                    "or choose another --output-dir"
                )
            for name in LEFT:
                _remove(folder / name)
        (folder / "metrics.jsonl").touch()
        write_whole(folder / "config.json", _document(self._settings))

    def _rewind(self, step: int) -> None:
        """Take back what was written about `step` and later ones."""
        keep: dict[str, Callable[[dict[str, Any]], bool]] = {
            "metrics.jsonl": lambda row: row["step"] < step,
            "rollouts.jsonl": lambda row: row["step"] < step,
            "evals.jsonl": lambda row: row["version"] <= step,
            "timeline.jsonl": lambda row: True,
        }
        for name, wanted in keep.items():
            path = self.folder / name
            if not path.exists():
                continue
            kept = [line for line, row in read_lines(path) if wanted(row)]
            write_whole(path, b"".join(kept))
            if name == "metrics.jsonl":
                rows: list[dict[str, float | None]] = [json.loads(line) for line in kept]
                self.rows = [{k: math.nan if v is None else v for k, v in row.items()} for row in rows]
        _remove(self.folder / "summary.json")

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
        self._append("metrics.jsonl", [flat])
        self._trackers.step(flat)
        shown = "  ".join(text.format(flat[name]) for name, text in CONSOLE if math.isfinite(flat.get(name, math.nan)))
        self._say(f"step {flat['step'] + 1:4d}/{self._steps}  {shown}")
        if self._view:
            self._view.step(flat)

    def evaluation(self, version: int, row: Mapping[str, float]) -> None:
        """Record an evaluation of one version of the weights. Raises OSError as `step` does."""
        self._append("evals.jsonl", [{"version": version, **row}])
        self._trackers.step({"step": version, **row})
        values = "  ".join(f"{name.removeprefix('eval/')} {value:.3f}" for name, value in row.items())
        self._say(f"evaluation of version {version}  {values}")
        if self._view:
            self._view.evaluation = f"version {version}  {values}"

    def rollouts(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Record sample rollouts, from `actors.samples`. Raises OSError as `step` does."""
        if records:
            self._append("rollouts.jsonl", records)
            self._trackers.rollouts(records)

    def spans(self, spans: Iterable[Span]) -> None:
        """Record who worked when. Raises OSError as `step` does."""
        self._append("timeline.jsonl", [asdict(span) for span in spans])

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
        write_whole(self.folder / "summary.json", _document(summary))
        self._trackers.summary(summary)
        self.note(status)
        return summary

    def fail(self, reason: str, status: Status = "failed") -> dict[str, Any]:
        """`finish` for a run that ends in the middle: its loop's time is that of its steps."""
        return self.finish(self.total("time/step") - self._earlier_loop, {}, status=status, reason=reason)

    def _append(self, name: str, records: Sequence[Mapping[str, Any]]) -> None:
        path, text = self.folder / name, memoryview("".join(map(_line, records)).encode())
        try:
            with path.open("ab", buffering=0) as file:
                while text:
                    text = text[file.write(text) :]
        except OSError as error:
            raise OSError(f"cannot write {path}: {error.strerror}; the run ends here") from error

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


def default_folder(recipe: str) -> Path:
    """`outputs/<recipe>-<date>-<time>`."""
    return Path("outputs") / f"{recipe}-{datetime.now():%Y%m%d-%H%M%S}"


def is_run(folder: Path) -> bool:
    """Whether a run wrote this folder: it holds metrics and settings that name their class. A model's folder, which
    has a `config.json` too, is none."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and isinstance(config.get("type"), str) and (folder / "metrics.jsonl").is_file()


def read_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """The lines of a file that a run wrote, each with its object; a torn last line is left out.

    Raises:
        ValueError: another line is damaged; names it.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                yield line, json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path} line {number} is not JSON: {error}; mend it or remove it") from error


def write_whole(path: Path, data: bytes) -> None:
    """Replace a file in one move, on disk before it is seen: a reader finds the old content or the new one."""
    part = path.with_name(f".{path.name}.part")
    try:
        with part.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise OSError(f"cannot write {path}: {error.strerror}") from error


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _document(value: Any) -> bytes:
    return (json.dumps(_strict(value), indent=2) + "\n").encode()


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(_strict(row), separators=(",", ":")) + "\n"


def _strict(value: Any) -> Any:
    """JSON has no number for nan and infinity: null stands for them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    return value
