"""Rows of a file or a Hugging Face dataset: by index, or as a stream that is only read forwards."""

from __future__ import annotations

import itertools
import json
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

LINES, TABLES = (".jsonl", ".ndjson"), {".parquet": "parquet", ".csv": "csv"}
"""Endings of files with a JSON object a line, and of those that the datasets library reads, with its names."""
WINDOW = 1024
"""Rows of a stream that stay in memory after they were passed."""

Stored = dict[str, Any]
"""A row as it was stored: column to value."""


class Rows(Protocol):
    """Rows by index."""

    def row(self, i: int) -> Stored:
        """Row i.

        Raises:
            ValueError: it cannot be read.
        """
        ...

    def where(self, i: int) -> str:
        """Where row i is stored, for errors."""
        ...


class JsonLines:
    """A file with one JSON object a line. Only the lines' offsets are in memory; blank lines do not count."""

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, path.open("rb")
        self._offsets = array("Q")
        offset = 0
        for line in self._file:
            if line.strip():
                self._offsets.append(offset)
            offset += len(line)

    def __len__(self) -> int:
        return len(self._offsets)

    def row(self, i: int) -> Stored:
        self._file.seek(self._offsets[i])
        line = self._file.readline()
        try:
            return parse_object(line)
        except ValueError as error:
            raise ValueError(f"{self.where(i)}: {error}") from None

    def where(self, i: int) -> str:
        """The file's line; lines are counted only here."""
        self._file.seek(0)
        lines = iter(self._file.readline, b"")
        before = itertools.takewhile(lambda _: self._file.tell() <= self._offsets[i], lines)
        return f"{self._path}, line {sum(1 for _ in before) + 1}"


class Table:
    """Rows of anything with a length and an index."""

    def __init__(self, name: str, rows: Any) -> None:
        self._name, self._rows = name, rows

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, i: int) -> Stored:
        try:
            stored: Stored = self._rows[i]
        except (OSError, ValueError) as error:  # a damaged file that is only read now
            raise ValueError(f"{self.where(i)}: cannot be read: {_first(error)}") from None
        return stored

    def where(self, i: int) -> str:
        return f"{self._name}, row {i}"


class Picked:
    """Some rows of others, by their indices."""

    def __init__(self, rows: Rows, indices: np.ndarray) -> None:
        self._rows, self._indices = rows, indices

    def __len__(self) -> int:
        return len(self._indices)

    def row(self, i: int) -> Stored:
        return self._rows.row(int(self._indices[i]))

    def where(self, i: int) -> str:
        return self._rows.where(int(self._indices[i]))


def part(rows: int, held_out: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices (int64) of the rows to train on, in order, and of those held out, in random order.

    Each index has a random number, splitmix64 (Steele, Lea and Flood 2014) of the index and the seed. A share below 1
    holds out the indices whose number is below it, so a row's fate does not depend on how many there are; from 1 on
    that many indices with the smallest numbers are held out.
    """
    numbers = _splitmix64(np.arange(rows, dtype=np.uint64) + _splitmix64(np.array([seed % 2**64], np.uint64)))
    order = np.argsort(numbers, kind="stable")
    count = int((numbers / 2.0**64 < held_out).sum()) if held_out < 1 else min(int(held_out), rows)
    return np.sort(order[count:]), order[:count]


def _splitmix64(x: np.ndarray) -> np.ndarray:
    """The mixing function of that generator, on uint64 that wrap."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = x ^ (x >> np.uint64(31))
    return mixed


Start = Callable[[], Iterator[tuple[str, Stored]]]
"""Begins a pass over a stream: where each row is stored, and the row."""


class Stream:
    """Row i of passes over a stream, one after another: read forwards, with a window of the rows just passed.

    A second reader serves rows before that window, so that they do not throw the first one back.
    """

    def __init__(self, start: Start, empty: str = "the stream has no rows") -> None:
        """`empty` is the error's text if a pass has no rows."""
        self._front, self._back = _Reader(start, empty), _Reader(start, empty)

    def row(self, i: int) -> Stored:
        return self._reader(i).find(i)[1]

    def where(self, i: int) -> str:
        return self._reader(i).find(i)[0]

    def _reader(self, i: int) -> _Reader:
        return self._front if i >= self._front.oldest else self._back


class _Reader:
    """A place in a stream, which begins again for a row before its window."""

    def __init__(self, start: Start, empty: str) -> None:
        self._start, self._rows, self._empty = start, start(), empty
        self._window: deque[tuple[str, Stored]] = deque(maxlen=WINDOW)
        self._next = 0
        self._length: int | None = None
        """Rows of a pass, once one has ended."""

    @property
    def oldest(self) -> int:
        """First row of the window."""
        return self._next - len(self._window)

    def find(self, i: int) -> tuple[str, Stored]:
        if i < self.oldest:
            self._rows, self._next = self._start(), i - i % self._length if self._length else 0
            self._window.clear()
        while i >= self._next:
            self._advance()
        return self._window[i - self.oldest]

    def _advance(self) -> None:
        found = next(self._rows, None)
        if found is None:
            self._length = self._length or self._next
            self._rows = self._start()
            found = next(self._rows, None)
            if found is None:
                raise ValueError(self._empty)
        self._window.append(found)
        self._next += 1


def parse_object(line: bytes) -> Stored:
    """A line of JSON as a row.

    Raises:
        ValueError: it is not JSON, or not an object.
    """
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"a JSON object was expected, not a {type(value).__name__}")
    return value


def open_rows(path: str, subset: str | None, split: str) -> JsonLines | Table:
    """A whole dataset by index: a file, a folder of `save_to_disk`, else a name on the Hugging Face hub.

    Raises:
        OSError, ValueError: it is not there or cannot be read; one line.
    """
    file = Path(path)
    if file.suffix in LINES or (file.suffix == ".json" and not _is_list(file)):
        return JsonLines(_existing(file))
    if file.suffix == ".json":
        try:
            rows = json.loads(file.read_bytes())
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is not valid JSON: {error}") from None
        for i, row in enumerate(rows):
            if not isinstance(row, dict):
                raise ValueError(f"{path}, row {i}: a JSON object was expected, not a {type(row).__name__}")
        return Table(path, rows)
    return Table(path, _datasets(path, subset, split, streaming=False))


def open_stream(path: str, subset: str | None, split: str) -> Start:
    """The same dataset to be read forwards, from its beginning on each call.

    Raises:
        OSError, ValueError: it is not there or cannot be read; one line.
    """
    file = Path(path)
    if file.suffix in (*LINES, ".json"):
        if file.suffix == ".json" and _is_list(file):
            raise ValueError(f"{path} is one JSON array, which cannot be streamed: write an object a line")
        return lambda: _lines(_existing(file))
    rows = _datasets(path, subset, split, streaming=True)
    return lambda: _passed(path, rows)


def _passed(path: str, rows: Any) -> Iterator[tuple[str, Stored]]:
    try:
        for i, row in enumerate(rows):
            yield f"{path}, row {i}", row
    except (OSError, ValueError) as error:  # a damaged file that is only read now
        raise ValueError(f"{path} cannot be read: {_first(error)}") from None


def _lines(path: Path) -> Iterator[tuple[str, Stored]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                yield where, parse_object(line)
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from None


def _existing(file: Path) -> Path:
    if not file.is_file():
        raise FileNotFoundError(f"there is no file {str(file)!r}")
    return file


def _is_list(file: Path) -> bool:
    """Whether a .json file begins as an array; else it holds an object a line."""
    with _existing(file).open("rb") as opened:
        return opened.read(4096).lstrip().startswith(b"[")


def _datasets(path: str, subset: str | None, split: str, *, streaming: bool) -> Any:
    """What the datasets library reads: parquet, CSV, its own folders, names on the hub."""
    file = Path(path)
    if file.suffix in TABLES:
        _existing(file)
    elif file.is_file():
        known = ", ".join((*LINES, ".json", *TABLES))
        raise ValueError(f"{path} is of a kind that is not read: {known} files are, and folders of save_to_disk")
    elif not file.is_dir() and (path.startswith((".", "/", "~")) or path.count("/") > 1):
        raise FileNotFoundError(f"there is no file or folder {path!r}")
    import datasets

    datasets.disable_progress_bars()
    try:
        if file.suffix in TABLES:
            kind, files = TABLES[file.suffix], {split: path}
            options = {"features": _as_text(path), "keep_default_na": False} if kind == "csv" else {}
            return datasets.load_dataset(kind, data_files=files, split=split, streaming=streaming, **options)
        if (file / "state.json").is_file() or (file / "dataset_dict.json").is_file():
            return _from_disk(file, split, streaming=streaming)
        return datasets.load_dataset(path, subset, split=split, streaming=streaming)
    except ConnectionError as error:
        raise ValueError(
            f"dataset {path!r} is not on this machine and the Hugging Face hub cannot be reached ({_first(error)}): "
            "give the path of a file, or load it once where there is a network"
        ) from None
    except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
        raise ValueError(f"cannot read dataset {path!r}: {_first(error.__cause__ or error)}") from None


def _as_text(path: str) -> Any:
    """Columns of a CSV file, all as text: guessed types turn 069 into 69 and `None` into nothing."""
    import datasets
    import pandas  # type: ignore[import-untyped]

    return datasets.Features({name: datasets.Value("string") for name in pandas.read_csv(path, nrows=0).columns})


def _from_disk(folder: Path, split: str, *, streaming: bool) -> Any:
    import datasets

    try:
        found = datasets.load_from_disk(str(folder))
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"the folder is damaged ({type(error).__name__}: {_first(error)})") from None
    if isinstance(found, datasets.DatasetDict):
        if split not in found:
            raise ValueError(f"it has no split {split!r}, there are {', '.join(found)}")
        found = found[split]
    return found.to_iterable_dataset() if streaming else found


def _first(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
