"""A run's report: one HTML file with curves, a timeline of every role and sample rollouts, which needs no network.

`python -m recipes.report outputs/x` reads the output folder, also of a run that goes on or died. What runs in the page
is `recipes/assets/report`; what the run wrote gets there as data only.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import sys
from dataclasses import MISSING, dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import Any, get_args

import tyro

from actors.config import (
    BufferConfig,
    EvalConfig,
    FilterConfig,
    GeneratorConfig,
    HfBackend,
    LogConfig,
    NativeEngine,
    RolloutConfig,
    RunConfig,
    Sampling,
    SaveConfig,
    SimulatedEngine,
    SyncConfig,
    TrainerConfig,
    VllmEngine,
)
from actors.metrics import SHOWN
from actors.output import write_whole
from actors.settings import plain
from actors.timeline import Span, chrome_trace
from losses import Corrections, KLPenalty
from recipes.figures import CHARTS, EVALUATIONS, by, curves, samples, spans_of, timeline, with_throughput
from recipes.folder import Row, RunFiles, finite, visible
from recipes.grpo_async import Losses, Tasks

ASSETS = Path(__file__).parent / "assets" / "report"
SCRIPTS = ("base.js", "charts.js", "timeline.js", "rollouts.js", "main.js")
SETTINGS = (
    *(RunConfig, BufferConfig, EvalConfig, FilterConfig, GeneratorConfig, HfBackend, LogConfig, NativeEngine),
    *(RolloutConfig, Sampling, SaveConfig, SimulatedEngine, SyncConfig, TrainerConfig, VllmEngine),
    *(Corrections, KLPenalty, *get_args(Tasks), *get_args(Losses)),
)
"""Classes whose defaults are known."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Write a run's report: one HTML file, to be opened in a browser."""

    folder: tyro.conf.Positional[Path]
    """Output folder of a run, finished or not."""
    out: Path | None = None
    """File to write. The folder's report.html unless given."""
    trace: Path | None = None
    """Also write all spans as Chrome trace-event JSON, which https://ui.perfetto.dev opens."""


def settings(config: Row) -> list[list[str]]:
    """Name, value and default of the settings that differ from their class's default or whose class is not known."""
    defaults = {kind.__name__: _defaults(kind) for kind in SETTINGS}
    return _differing(config, defaults.get(str(config.get("type")), defaults["RunConfig"]), defaults, "")


def _defaults(kind: type[Any]) -> Row:
    """What `plain` makes of a dataclass's defaults; fields that every user must give are left out."""
    usual = {
        entry.name: entry.default if entry.default_factory is MISSING else entry.default_factory()
        for entry in fields(kind)
        if entry.default is not MISSING or entry.default_factory is not MISSING
    }
    return {"type": kind.__name__} | {name: plain(value) for name, value in usual.items()}


def _differing(value: Row, default: Row, defaults: dict[str, Row], path: str) -> list[list[str]]:
    rows = []
    for name, entry in value.items():
        usual = default.get(name)
        if isinstance(entry, dict) and "type" in entry:
            if not isinstance(usual, dict) or usual["type"] != entry["type"]:
                rows.append([path + name, str(entry["type"]), usual["type"] if isinstance(usual, dict) else ""])
            rows += _differing(entry, defaults.get(str(entry["type"]), {}), defaults, f"{path}{name}.")
        elif name != "type" and (name not in default or entry != usual):
            rows.append([path + name, _text(entry), _text(usual) if name in default else ""])
    return [[visible(cell) for cell in row] for row in rows]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def overview(files: RunFiles, rows: list[Row], config: Row) -> Row:
    """What stands at the top: how the run ended, its numbers, its settings."""
    summary = files.object("summary.json")
    written = datetime.fromtimestamp((files.folder / "metrics.jsonl").stat().st_mtime)
    if summary is None:
        state, reason = (
            "no summary",
            f"It goes on, or it was killed. Last step written on {written:%Y-%m-%d at %H:%M:%S}.",
        )
        summary = _so_far(rows)
    else:
        state, reason = str(summary.get("status")), str(summary.get("reason", ""))
    numbers = []
    for label, text, *names in SHOWN:
        values = [finite(summary.get(name)) for name in names]
        if None not in values:
            numbers.append([label, " → ".join(text.format(value) for value in values)])
    return {
        "name": visible(files.folder.resolve().name),
        "state": visible(state),
        "reason": visible(reason),
        "steps": [len(rows), finite(config.get("steps"))],
        "numbers": numbers,
        "summary": [[visible(name), visible(_text(value))] for name, value in summary.items()],
        "changed": settings(config),
        "config": visible(json.dumps(config, indent=2, ensure_ascii=False), keep="\n"),
        "written": f"{datetime.now():%Y-%m-%d %H:%M}",
    }


def _so_far(rows: list[Row]) -> Row:
    """The part of a summary that the rows of an unfinished run give."""

    def mean(name: str, part: list[Row]) -> float | None:
        values = [value for row in part if (value := finite(row.get(name))) is not None]
        return sum(values) / len(values) if values else None

    means = {
        f"{short}_{place}": mean(name, part)
        for short, name in (("reward", "reward/mean"), ("length", "rollout/length"))
        for place, part in (("first5", rows[:5]), ("last10", rows[-10:]))
    }
    return means | {"steps": len(rows)}


def collect(files: RunFiles, spans: list[Span]) -> Row:
    """All that the page shows."""
    rows = [with_throughput(row) for row in by("step", files.lines("metrics.jsonl", "curves"))]
    evals = by("version", files.lines("evals.jsonl", "evaluations")) if (files.folder / "evals.jsonl").exists() else []
    config = files.object("config.json") or {}
    data = {
        "overview": overview(files, rows, config),
        "charts": curves(rows, CHARTS, "step") + curves(evals, EVALUATIONS, "version"),
        "timeline": timeline(spans),
        "rollouts": samples(files),
    }
    return data | {"notes": files.notes}


def page(data: Row) -> str:
    """The HTML file. Only the page's own script may run in it: its hash is in the content security policy."""
    script = "\n".join((ASSETS / name).read_text() for name in SCRIPTS)
    style = (ASSETS / "style.css").read_text()
    embedded = json.dumps(data, separators=(",", ":"), allow_nan=False)
    parts = {
        "title": html.escape(data["overview"]["name"]),
        "style": style,
        "script": script,
        "style_hash": _hash(style),
        "script_hash": _hash(script),
        "data": embedded.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], (ASSETS / "page.html").read_text())


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def main() -> None:
    """Entry point of `python -m recipes.report`."""
    options = tyro.cli(Options)
    try:
        files = RunFiles(options.folder)
        spans = spans_of(files)
        out = options.out or options.folder / "report.html"
        write_whole(out, page(collect(files, spans)).encode())
        print(f"wrote {out}")
        if options.trace:
            write_whole(options.trace, json.dumps(chrome_trace(spans)).encode())
            print(f"wrote {options.trace}")
    except (ValueError, OSError) as error:
        sys.exit(f"report: {error}")


if __name__ == "__main__":
    main()
