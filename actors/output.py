"""The files of a run's output folder: the folder made ready, lines appended, other files replaced whole.

A process may die at any moment: lines are whole or the last one is torn, and readers skip that one.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

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


def make_ready(folder: Path, overwrite: bool) -> None:
    """Make the folder of a new run.

    Args:
        overwrite: remove what an earlier run left, and nothing else.

    Raises:
        FileExistsError: it holds something already.
        OSError: it cannot be made or emptied.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not any(folder.iterdir()):
        return
    if not is_run(folder):
        raise FileExistsError(f"{folder} is not empty and not the folder of a run: choose another --output-dir")
    if not overwrite:
        raise FileExistsError(
            f"{folder} holds a run: go on with --resume, start anew with --overwrite, or choose another --output-dir"
        )
    for name in LEFT:
        _remove(folder / name)


def rewind(folder: Path, step: int) -> list[dict[str, float]]:
    """Take back what a run wrote about `step` and later ones; returns its metrics of the earlier ones.

    Raises:
        ValueError: it is not the folder of a run, or a file is damaged.
        OSError: a file cannot be read or written.
    """
    if not is_run(folder):
        raise ValueError(f"{folder} is not the folder of a run, so there is nothing to resume")
    keep: dict[str, Callable[[dict[str, Any]], bool]] = {
        "metrics.jsonl": lambda row: row["step"] < step,
        "rollouts.jsonl": lambda row: row["step"] < step,
        "evals.jsonl": lambda row: row["version"] <= step,
        "timeline.jsonl": lambda row: True,
    }
    for name, wanted in keep.items():
        path = folder / name
        if path.exists():
            try:
                kept = b"".join(line for line, row in read_lines(path) if wanted(row))
            except (KeyError, TypeError) as error:
                raise ValueError(f"{path} has a line without {error}: mend it or remove the line") from error
            write_whole(path, kept)
    _remove(folder / "summary.json")
    rows: list[dict[str, float | None]] = [row for _, row in read_lines(folder / "metrics.jsonl")]
    return [{name: math.nan if value is None else value for name, value in row.items()} for row in rows]


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


def append_lines(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Append one object a line.

    Raises:
        OSError: the file cannot be written, as on a full disk.
    """
    text = memoryview("".join(json.dumps(_strict(row), separators=(",", ":")) + "\n" for row in records).encode())
    try:
        with path.open("ab", buffering=0) as file:
            while text:
                text = text[file.write(text) :]
    except OSError as error:
        raise OSError(f"cannot write {path}: {error.strerror}; the run ends here") from error


def write_json(path: Path, value: Any) -> None:
    """Replace a file by one object, for people to read too. Raises OSError as `write_whole` does."""
    write_whole(path, (json.dumps(_strict(value), indent=2) + "\n").encode())


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


def _strict(value: Any) -> Any:
    """JSON has no number for nan and infinity: null stands for them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    return value
