"""`python -m recipes.stability [--json]`: a grid of corrections, lags, rates and seeds on the tiny addition task.

`--output cells.jsonl` keeps each cell as it is finished; started again, the grid goes on with the others.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import platform
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import tyro
from pebble import ProcessExpired, ProcessPool
from rich.console import Console
from rich.table import Table

from actors.config import GeneratorConfig, LogConfig, RunConfig
from actors.output import append_lines, read_lines, write_whole
from actors.settings import plain
from actors.shm import RunFolder
from actors.types import require
from losses import group_norm
from recipes.bench.__main__ import only_ours
from recipes.stability import CORRECTIONS, GROUPS, MEMBERS, SAMPLING, TASK, UPDATES, Cell, Curves, figures
from recipes.stability.worker import begin, measure

Record = dict[str, Any]
ROOM = 2**28
"""Bytes of shared files that the processes may need."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Which corrections hold up against stale data. The whole grid unless told otherwise."""

    corrections: tuple[str, ...] = tuple(CORRECTIONS)
    """Rows of the table."""
    lags: tuple[int, ...] = (0, 8, 32)
    """How many versions old a token is, from that step on."""
    lrs: tuple[float, ...] = (1e-4, 3e-4)
    """Learning rates, constant after the warm-up."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Of the data order and of every completion."""
    steps: int = 60
    """Training steps of a cell."""
    processes: int = 2
    """Cells at a time, one thread each."""
    through_actors: bool = False
    """Run each cell through the actors of a run as well, for comparison."""
    output: Path | None = None
    """File for finished cells, one JSON object a line. What it has already is not run again."""
    json: bool = False
    """Print one JSON object and nothing else."""

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.corrections) - CORRECTIONS.keys()):
            raise ValueError(f"--corrections {unknown[0]} is none of {', '.join(CORRECTIONS)}")
        if not (self.corrections and self.lags and self.lrs and self.seeds):
            raise ValueError("corrections, lags, lrs and seeds need one value each at least")
        require("stability", 1, steps=self.steps, processes=self.processes)
        for lag, lr in product(self.lags, self.lrs):
            require("stability", 0, lags=lag, lrs=lr)

    def cells(self) -> list[Cell]:
        """The grid; whole tables of corrections come first."""
        return [
            Cell(correction=correction, lag=lag, lr=lr, seed=seed, steps=self.steps)
            for seed, lr, lag, correction in product(self.seeds, self.lrs, self.lags, self.corrections)
        ]


def collect(
    cells: Sequence[Cell], output: Path | None, work: Callable[[list[Cell]], Iterable[Record]]
) -> list[Record]:
    """Records of these cells in their order: those in the file, and what `work` gives, which is appended.

    Raises:
        ValueError: the file is damaged, or holds something else.
        OSError: it cannot be read or written.
    """
    records = [] if output is None or not output.exists() else _finished(output)
    missing = [cell for cell in cells if _find(cell, records) is None]
    for number, record in enumerate(work(missing) if missing else (), 1):
        records.append(record)
        if output is not None:
            append_lines(output, [record])
        cell = "{correction} lag {lag} lr {lr:g} seed {seed} through {through}".format_map(record)
        print(f"{number}/{len(missing)} {cell}: {record['reward_last']:.3f}", file=sys.stderr)
    return [found for cell in cells if (found := _find(cell, records)) is not None]


def _finished(output: Path) -> list[Record]:
    """The records of a file; a torn last line is cut off."""
    lines = list(read_lines(output))
    of_cells = [isinstance(record, dict) and {"correction", "reward_last"} <= record.keys() for _, record in lines]
    if not all(of_cells) or (not lines and output.stat().st_size):
        raise ValueError(f"{output} holds something else than cells: give --output another file")
    write_whole(output, b"".join(line for line, _ in lines))
    return [record for _, record in lines]


def _find(cell: Cell, records: Sequence[Record]) -> Record | None:
    return next((record for record in records if cell.name.items() <= record.items()), None)


def in_processes(cells: Sequence[Cell], processes: int) -> Iterator[Record]:
    """Records of cells as they are finished, each process with one thread."""
    folder = RunFolder.create(ROOM)
    context = multiprocessing.get_context("spawn")
    pool = ProcessPool(
        max_workers=min(processes, len(cells)), context=context, initializer=begin, initargs=(folder.path,)
    )
    try:
        for future in as_completed([pool.schedule(measure, args=(cell,)) for cell in cells]):
            yield future.result()
    finally:
        pool.stop()
        pool.join()
        folder.close()


def in_actors(cells: Sequence[Cell]) -> Iterator[Record]:
    """Records of cells that run one after another on the processes of a run."""
    for cell in cells:
        start = time.perf_counter()
        rows = asyncio.run(_launched(cell))
        # The batch of step s is of version s - lag; all up to step lag are of version 0.
        rewards = [rows[0]["reward/mean"], *(row["reward/mean"] for row in rows[cell.lag + 1 :])]
        curves = Curves(rewards, rows[: cell.steps])
        yield cell.name | figures(curves) | {"wall_s": time.perf_counter() - start, "cpu_s": None, "rewards": rewards}


async def _launched(cell: Cell) -> list[dict[str, float]]:
    """The metrics of a run's steps, until the groups that the last version of the cell drew are trained."""
    from actors.launcher import launch  # it loads Monarch

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        config = RunConfig(
            model=str(TASK.checkpoint),
            steps=cell.steps + cell.lag + 1,
            seed=cell.seed,
            output_dir=Path(folder) / "run",
            group_size=MEMBERS,
            probe=0,
            sampling=SAMPLING,
            buffer=cell.buffer,
            trainer=cell.trainer,
            generator=GeneratorConfig(replicas=1),
            log=LogConfig(rollouts=0),
        )
        objective = CORRECTIONS[cell.correction].objective
        async with launch(config, task=TASK, loss=objective, advantage=group_norm) as run:
            async for batch in run.batches():
                rows.append(await run.train(batch))
                await run.publish(rows[-1])
    return rows


def run(config: Config) -> list[Record]:
    """All records of the grid, in its order."""
    records = collect(config.cells(), config.output, lambda cells: in_processes(cells, config.processes))
    if config.through_actors:
        cells = [replace(cell, through="actors") for cell in config.cells()]
        records += collect(cells, config.output, in_actors)
    return records


def machine() -> Record:
    """Where it ran."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": version("torch"),
    }


def show(records: Sequence[Record]) -> None:
    """Medians over seeds. A collapse is shown as how many seeds had one, and when."""
    table = Table(title="Medians over seeds; last: mean of the last 10 steps, peak and low: of 5-step means")
    for title in ("lr", "lag", "correction", "ratio", "through", "last", "best", "collapsed", "masked", "peak"):
        table.add_column(title)
    for title in ("ESS", "low", "lag KL", "peak", "stale", "wall s", "CPU s"):
        table.add_column(title)
    rows: dict[tuple[Any, ...], list[Record]] = {}
    for r in records:
        rows.setdefault((r["lr"], r["lag"], r["correction"], r["through"]), []).append(r)
    for (lr, lag, correction, through), seeds in rows.items():
        ends = [r["collapse"] for r in seeds if r["collapse"] is not None]
        table.add_row(
            f"{lr:g}",
            str(lag),
            correction,
            CORRECTIONS[correction].ratio,
            through,
            *(_median(seeds, column, ".3f") for column in ("reward_last", "reward_best")),
            f"{len(ends)}/{len(seeds)} at {statistics.median(ends):g}" if ends else f"0/{len(seeds)}",
            *(_median(seeds, column, ".3f") for column in ("masked_last", "masked_peak", "ess_last", "ess_lowest")),
            *(_median(seeds, column, ".4f") for column in ("lag_kl_last", "lag_kl_peak")),
            *(_median(seeds, column, ".1f") for column in ("staleness", "wall_s", "cpu_s")),
        )
    Console(width=200).print(table)


def _median(records: Sequence[Record], column: str, how: str) -> str:
    """Empty where the way it ran has no such value."""
    values = [record[column] for record in records if record[column] is not None]
    return format(statistics.median(values), how) if values else ""


def main() -> None:
    """Errors of settings and files are one line, and so is an interrupt."""
    try:
        config = tyro.cli(Config)
        with only_ours():
            records = run(config)
    except BrokenProcessPool as error:
        sys.exit(f"stability: no process of a cell came up: {error}; try --processes 1")
    except ProcessExpired as error:
        sys.exit(
            f"stability: a process of a cell died with code {error.exitcode}, perhaps for want of memory: try "
            "--processes 1; with the same --output it goes on after the cells there"
        )
    except (ValueError, OSError) as error:
        sys.exit(f"stability: {error}")
    except KeyboardInterrupt:
        print("stability: interrupted; cells in a file given as --output are not run again", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    if config.json:
        settings = plain(config) | {"groups": GROUPS, "members": MEMBERS, "updates": UPDATES}
        print(json.dumps({"settings": settings, "machine": machine(), "cells": records}, indent=2))
    else:
        show(records)


if __name__ == "__main__":
    main()
