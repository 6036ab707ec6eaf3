"""A process that measures cells. Importing this needs no torch, so the process that hands them out stays light."""

from __future__ import annotations

import tempfile
import time
from typing import TYPE_CHECKING, Any

from recipes.stability import Cell, figures

if TYPE_CHECKING:
    from recipes.stability.cell import Lab

_labs: list[Lab] = []
"""The one of this process."""


def begin(folder: str) -> None:
    """Prepare this process; `folder` is where payloads go."""
    import torch

    from recipes.stability.cell import Lab

    torch.set_num_threads(1)
    _labs.append(Lab(tempfile.mkdtemp(dir=folder)))


def measure(cell: Cell) -> dict[str, Any]:
    """The record of a cell.

    Raises:
        ValueError: its training broke down.
    """
    wall, cpu = time.perf_counter(), time.process_time()
    try:
        curves = _labs[0].run(cell)
    except RuntimeError as error:
        what = f"{cell.correction} with --lags {cell.lag} --lrs {cell.lr:g} --seeds {cell.seed}"
        raise ValueError(f"{what} broke down: {error}") from error
    seconds = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
    return cell.name | figures(curves) | seconds | {"rewards": curves.rewards}
