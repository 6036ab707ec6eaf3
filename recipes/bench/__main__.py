"""`python -m recipes.bench sync|overlap|learn [--json]`: measure a subject; exit 1 if a bar is missed."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.table import Table

from recipes.bench import Result


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Measure this library against floors and peers of the same run."""

    subject: Annotated[Literal["sync", "overlap", "learn"], tyro.conf.Positional]
    """sync: weights from trainer to engine, against memory copies. overlap: asynchronous against synchronous schedule
    on 16 simulated devices. learn: time to learn, against one process with a plain loop."""
    json: bool = False
    """Print a JSON list of rows and nothing else."""


def measure(subject: Literal["sync", "overlap", "learn"]) -> list[Result]:
    """All rows of a subject; its libraries are imported only now."""
    match subject:
        case "sync":
            from recipes.bench.sync import results
        case "overlap":
            from recipes.bench.overlap import results
        case _:
            from recipes.bench.learn import results
    return results()


def show(results: list[Result]) -> None:
    """A table for people."""
    table = Table("name", "value", "floor", "ratio", "bar", "", "note")
    for r in results:
        bar = "" if r.bar is None else f"{r.bar:g}"
        verdict = "" if r.bar is None else "ok" if r.ok else "MISSED"
        table.add_row(r.name, f"{r.value:.4g} {r.unit}", f"{r.floor:.4g}", f"{r.ratio:.3f}", bar, verdict, r.note)
    Console(width=180).print(table)


@contextmanager
def only_ours() -> Iterator[None]:
    """Standard output goes to standard error meanwhile: what libraries and processes print is no row."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)


if __name__ == "__main__":
    bench = tyro.cli(Bench)
    with only_ours():
        found = measure(bench.subject)
    if bench.json:
        print(json.dumps([asdict(result) | {"ok": result.ok} for result in found], indent=2))
    else:
        show(found)
    sys.exit(not all(result.ok for result in found))
