"""What a run leaves: `config.json`, `metrics.jsonl` (one flat object a step), `summary.json`, and a console line."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from datetime import datetime
from pathlib import Path
from typing import IO, Any

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


class RunLog:
    """The output folder of one run. Metric names are `<area>/<name>`, values flat floats."""

    def __init__(self, folder: Path, config: Any, steps: int, *, quiet: bool = False) -> None:
        """Create the folder and write the resolved settings; `quiet` prints nothing.

        Raises:
            FileExistsError: the folder holds something already.
            OSError: it cannot be made or written.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
            full = any(folder.iterdir())
            if not full:
                (folder / "config.json").write_text(json.dumps(plain(config), indent=2) + "\n")
        except OSError as error:
            raise OSError(f"cannot write {error.filename}: {error.strerror}; choose another --output-dir") from error
        if full:
            raise FileExistsError(f"{folder} exists and is not empty: choose another --output-dir or remove it")
        self.folder, self._steps, self._quiet = folder, steps, quiet
        self.rows: list[dict[str, float]] = []
        self._began = time.perf_counter()
        self._file: IO[str] = (folder / "metrics.jsonl").open("w")
        if not quiet:
            print(f"writing to {folder}", flush=True)

    def step(self, row: Mapping[str, float]) -> None:
        """Record one step: a line of JSON, flushed, and one of text."""
        flat = {name: float(value) for name, value in row.items()}
        flat["step"] = int(row["step"])
        self.rows.append(flat)
        self._file.write(json.dumps({k: v if math.isfinite(v) else None for k, v in flat.items()}) + "\n")
        self._file.flush()
        if self._quiet:
            return
        shown = "  ".join(text.format(flat[name]) for name, text in CONSOLE if math.isfinite(flat.get(name, math.nan)))
        print(f"step {flat['step'] + 1:4d}/{self._steps}  {shown}", flush=True)

    def mean(self, name: str, rows: slice = slice(None)) -> float:
        """Mean of a metric over some steps; nan if it was never there."""
        values = [row[name] for row in self.rows[rows] if name in row]
        return sum(values) / len(values) if values else math.nan

    def total(self, name: str) -> float:
        """Sum of a metric over all steps."""
        return sum(row.get(name, 0.0) for row in self.rows)

    def finish(self, loop_seconds: float, counts: Mapping[str, int], **rest: float) -> dict[str, float]:
        """Write and return the summary."""
        summary = {
            "reward_first5": self.mean("reward/mean", slice(0, 5)),
            "reward_last10": self.mean("reward/mean", slice(-10, None)),
            "length_first5": self.mean("rollout/length", slice(0, 5)),
            "length_last10": self.mean("rollout/length", slice(-10, None)),
            "steps": len(self.rows),
            "wall_seconds": time.perf_counter() - self._began,
            "loop_seconds": loop_seconds,
            "generated_tokens_per_second": self.total("perf/generated_tokens") / loop_seconds,
            "trained_tokens_per_second": self.total("perf/trained_tokens") / loop_seconds,
            **rest,
            **counts,
        }
        self._file.close()
        text = {k: v if math.isfinite(v) else None for k, v in summary.items()}
        (self.folder / "summary.json").write_text(json.dumps(text, indent=2) + "\n")
        return summary


def default_folder(recipe: str) -> Path:
    """`outputs/<recipe>-<date>-<time>`."""
    return Path("outputs") / f"{recipe}-{datetime.now():%Y%m%d-%H%M%S}"


def plain(value: Any) -> Any:
    """Settings as JSON: dataclasses become objects that name their class, so that a union member is known."""
    if is_dataclass(value) and not isinstance(value, type):
        return {"type": type(value).__name__} | {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return [plain(v) for v in value]
    if isinstance(value, str | int | float | bool | None):
        return value
    return str(value)
