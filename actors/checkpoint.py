"""The folder of a run's checkpoints: each is complete or invisible, whenever the process dies.

A checkpoint grows in a hidden folder beside the others, is flushed to disk file by file, and gets its name by one
rename. It loses the name the same way before anything in it is removed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

TRAINER, BUFFER, MODEL = "trainer", "buffer", "model"
"""Folders of a checkpoint; the last is a Hugging Face folder."""
STATE = "run.json"
BEST = "best.json"
HIDDEN = ".step-"
"""Begins the name of a folder that is no checkpoint: not yet, or no longer."""


class Best(NamedTuple):
    """The best checkpoint so far and what it was judged by."""

    step: int
    value: float


class Checkpoints:
    """Checkpoints of one run; one is made at a time.

    A step's own files lie in `step-<step>`, with the controller's state in `run.json`.

    Args:
        folder: made when first needed.
        keep: newest checkpoints that stay; the best one stays too.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self._keep = folder, keep

    def begin(self, step: int) -> Path:
        """An empty hidden folder for the files of `step`. Removes what dead runs, or a failed attempt, left.

        Raises:
            OSError: there is a checkpoint of that step, or no room.
        """
        if self._named(step).exists():
            raise FileExistsError(f"checkpoint {self._named(step)} exists already: resume from it or remove it")
        self.folder.mkdir(parents=True, exist_ok=True)
        self.sweep()
        hidden = self._hidden(step)
        hidden.mkdir()
        return hidden

    def commit(self, step: int, state: dict[str, Any]) -> Path:
        """Make what lies in the folder of `begin` the checkpoint of `step`; `state` becomes its run.json.

        Blocks until everything is on the disk: call it in a thread. An error leaves no checkpoint and no files.

        Raises:
            OSError: no room.
        """
        hidden, named = self._hidden(step), self._named(step)
        try:
            _write(hidden / STATE, {**state, "step": step})
            for path in _bottom_up(hidden):
                _flush(path)
            os.rename(hidden, named)
        except OSError as error:
            self.sweep()
            raise OSError(error.errno, f"checkpoint of step {step} in {self.folder}: {error.strerror}") from error
        _flush(self.folder)
        self._prune()
        return named

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, ascending."""
        if not self.folder.is_dir():
            return []
        found = [(re.fullmatch(r"step-(\d{6,})", path.name), path) for path in self.folder.iterdir()]
        return sorted(int(match[1]) for match, path in found if match and (path / STATE).is_file())

    def newest(self) -> Path | None:
        """The newest complete checkpoint."""
        steps = self.steps()
        return self._named(steps[-1]) if steps else None

    @staticmethod
    def read(path: Path) -> dict[str, Any]:
        """The controller's state of a checkpoint.

        Raises:
            ValueError: run.json is damaged.
            OSError: it cannot be read.
        """
        return _read(path / STATE, f"remove {path} to go on from the checkpoint before it")

    def mark_best(self, step: int, value: float) -> None:
        """Let `step`, in the place of the last best, never be removed; it may be committed later."""
        self.folder.mkdir(parents=True, exist_ok=True)
        fresh = self.folder / f".{BEST}"
        _write(fresh, {"step": step, "value": value})
        _flush(fresh)
        os.rename(fresh, self.folder / BEST)
        _flush(self.folder)

    def best(self) -> Best | None:
        """What `mark_best` was told last, by this run or the one that it goes on from.

        Raises:
            ValueError: best.json is damaged.
        """
        path = self.folder / BEST
        if not path.is_file():
            return None
        remedy = "remove it to choose the best anew"
        told = _read(path, remedy)
        try:
            return Best(int(told["step"]), float(told["value"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is damaged ({error!r}): {remedy}") from error

    def rewind(self, step: int) -> None:
        """Go on from the checkpoint of `step`: what a run that ended judged best after it may never come again."""
        best = self.best()
        if best is not None and best.step > step:
            (self.folder / BEST).unlink()

    def sweep(self) -> None:
        """Remove hidden folders: no run may be writing here."""
        for path in self.folder.glob(f"{HIDDEN}*"):
            shutil.rmtree(path)

    def _prune(self) -> None:
        best = self.best()
        for step in self.steps()[: -self._keep]:
            if best is None or step != best.step:
                os.rename(self._named(step), self._hidden(step))
                shutil.rmtree(self._hidden(step))

    def _named(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}"

    def _hidden(self, step: int) -> Path:
        return self.folder / f"{HIDDEN}{step:06d}"


def plain(value: Any) -> Any:
    """JSON's view of what dicts of numpy arrays hold; `restored` undoes it exactly."""
    if isinstance(value, np.ndarray):
        return {"dtype": value.dtype.name, "values": value.tolist()}
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    return value


def restored(value: Any) -> Any:
    """What `plain` was given."""
    if isinstance(value, dict):
        if value.keys() == {"dtype", "values"}:
            return np.array(value["values"], value["dtype"])
        return {name: restored(item) for name, item in value.items()}
    return value


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value))


def _read(path: Path, remedy: str) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}): {remedy}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds no JSON object: {remedy}")
    return value


def _bottom_up(folder: Path) -> Iterator[Path]:
    """All files below a folder and all folders, each after what lies in it."""
    for place, _, files in os.walk(folder, topdown=False):
        yield from (Path(place) / name for name in files)
        yield Path(place)


def _flush(path: Path) -> None:
    """Wait until a file's bytes, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
