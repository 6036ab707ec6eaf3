"""Reading what a run left in its output folder, also while it goes on or after it died.

JSON only, nothing is unpickled. What cannot be read is left out and said in a note, never guessed.
"""

from __future__ import annotations

import json
import math
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from actors.output import is_run

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """One line of `rollouts.jsonl`: a rollout token by token."""

    step: int
    ticket: int
    row: int
    rank: str
    """best or worst of its group."""
    reward: float | None
    parts: dict[str, float | None]
    """The reward's parts by name."""
    turns: list[Row]
    """Objects of kind, start, end, finish and reward; start and end count tokens."""
    pieces: list[str]
    """Text of each token."""
    tokens: list[int]
    mask: list[bool]
    """Whether the model drew the token."""
    logprobs: list[float | None]
    versions: list[int]
    """Version of the weights that drew each token; -1 outside the mask."""

    def __post_init__(self) -> None:
        if not isinstance(self.step, int) or not isinstance(self.parts, dict):
            raise TypeError("step must be a whole number and parts an object")
        if not all(isinstance(piece, str) for piece in self.pieces):
            raise TypeError("pieces must be texts")
        columns = (self.tokens, self.mask, self.logprobs, self.versions)
        if {len(column) for column in columns} != {len(self.pieces)}:
            raise ValueError("the columns of tokens differ in length")
        for turn in self.turns:
            if not 0 <= turn["start"] <= turn["end"] <= len(self.pieces):
                raise ValueError("a turn lies outside the tokens")

    @property
    def drawn(self) -> int:
        """Tokens that the model drew."""
        return sum(self.mask)

    def by_version(self) -> dict[int, int]:
        """How many tokens each version drew, oldest first."""
        drawn = [version for version, mask in zip(self.versions, self.mask, strict=True) if mask]
        return {version: drawn.count(version) for version in sorted(set(drawn))}


@dataclass
class RunFiles:
    """An output folder; `notes` gathers one line on each thing that is missing or cannot be read."""

    folder: Path
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not is_run(self.folder):
            raise FileNotFoundError(f"{self.folder} is not an output folder: give one that a run wrote")

    def object(self, name: str) -> Row | None:
        """A file that holds one JSON object; None where it is missing (without a note) or broken."""
        path = self.folder / name
        if not path.exists():
            return None
        try:
            value = json.loads(path.read_text(errors="replace"))
        except ValueError as error:
            self._note(f"{name} is not JSON ({error}) and was left out.")
            return None
        if not isinstance(value, dict):
            self._note(f"{name} holds no object and was left out.")
            return None
        return value

    def lines(self, name: str, what: str) -> Iterator[Row]:
        """Objects of a JSON-lines file, one a line, without a torn last line; other broken ones are noted."""
        path = self.folder / name
        if not path.exists():
            self._note(f"There is no {name}, so no {what}.")
            return
        whole = broken = 0
        with path.open(errors="replace", newline="\n") as file:
            for line in file:
                if not line.endswith("\n"):
                    break
                row = _parsed(line)
                if isinstance(row, dict):
                    whole += 1
                    yield row
                else:
                    broken += 1
        if broken:
            self._note(f"{name}: {broken} lines are no JSON objects and were left out.")
        if not whole:
            self._note(f"{name} holds no complete line, so there are no {what}.")

    def rollouts(self) -> Iterator[Rollout]:
        """Every whole rollout of `rollouts.jsonl`, in the order of the file; others are counted in a note."""
        broken = 0
        for row in self.lines("rollouts.jsonl", "sample rollouts"):
            try:
                rollout = Rollout(**{name.name: row[name.name] for name in fields(Rollout)})
            except (TypeError, ValueError, KeyError):
                broken += 1
            else:
                yield rollout
        if broken:
            self._note(f"rollouts.jsonl: {broken} rollouts lack known columns or contradict themselves: left out.")

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)


def _parsed(line: str) -> Any:
    """The value that a line of JSON holds; None if it holds none."""
    try:
        return json.loads(line)
    except ValueError:
        return None


def finite(value: Any) -> float | None:
    """A number that can be drawn, else None."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def visible(text: str, *, keep: str = "") -> str:
    r"""Text whose control, format and separator characters are written as escapes (`\x1b`, `\u202e`), except `keep`.

    What a model writes may move a terminal's cursor or turn the direction of a line; shown so it cannot.
    """
    return "".join(
        char if char in keep or unicodedata.category(char) not in ("Cc", "Cf", "Cs", "Zl", "Zp") else _escape(char)
        for char in text
    )


def _escape(char: str) -> str:
    short = {"\n": r"\n", "\t": r"\t", "\r": r"\r"}
    code = ord(char)
    return short.get(char) or (
        f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
    )
