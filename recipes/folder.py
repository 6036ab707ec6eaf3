"""Reading what a run left in its output folder, also while it goes on or after it died.

JSON only, nothing is unpickled. What cannot be read is left out and said in a note, never guessed.
"""

from __future__ import annotations

import json
import sys
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeGuard

from actors.output import is_run

Row = dict[str, Any]

NOTED = 5
"""Most broken lines of a file that a note names."""


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
        """Takes nothing on trust: what reads a rollout may rely on the types above.

        Raises:
            ValueError: says what is wrong.
        """
        _check(all(map(whole, (self.step, self.ticket, self.row))), "step, ticket and row must be whole numbers")
        _check(isinstance(self.rank, str), "rank must be text")
        _check(_number(self.reward), "reward must be a number or null")
        named = isinstance(self.parts, dict) and all(map(_number, self.parts.values()))
        _check(named, "parts must be an object of numbers and nulls")
        columns = (self.pieces, self.tokens, self.mask, self.logprobs, self.versions)
        _check(all(isinstance(column, list) for column in columns), "the columns of tokens must be arrays")
        _check(len({len(column) for column in columns}) == 1, "the columns of tokens differ in length")
        _check(all(isinstance(piece, str) for piece in self.pieces), "pieces must be texts")
        _check(all(map(whole, (*self.tokens, *self.versions))), "tokens and versions must be whole numbers")
        _check(all(isinstance(drawn, bool) for drawn in self.mask), "mask must be true or false")
        _check(all(map(_number, self.logprobs)), "logprobs must be numbers or null")
        _check(
            isinstance(self.turns, list) and all(map(self._turn, self.turns)),
            "turns must be objects with kind, start and end",
        )

    def _turn(self, turn: Any) -> bool:
        """Whether it is a turn, within the tokens."""
        if not isinstance(turn, dict) or not isinstance(turn.get("kind"), str) or not _number(turn.get("reward")):
            return False
        start, end = turn.get("start"), turn.get("end")
        return whole(start) and whole(end) and 0 <= start <= end <= len(self.pieces)

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
        except (ValueError, RecursionError) as error:
            self._note(f"{name} is not JSON ({error}) and was left out.")
            return None
        if not isinstance(value, dict):
            self._note(f"{name} holds no object and was left out.")
            return None
        return value

    def lines(self, name: str, what: str) -> Iterator[Row]:
        """Objects of a JSON-lines file, one a line, without a torn last line; other broken ones are noted."""
        return (row for _, row in self._numbered(name, what))

    def rollouts(self) -> Iterator[Rollout]:
        """Every whole rollout of `rollouts.jsonl`, in the order of the file; a note names the lines of others."""
        broken: list[tuple[int, str]] = []
        names = [column.name for column in fields(Rollout)]
        for number, row in self._numbered("rollouts.jsonl", "sample rollouts"):
            try:
                _check(row.keys() >= set(names), "columns are missing")
                rollout = Rollout(**{name: row[name] for name in names})
            except ValueError as error:
                broken.append((number, str(error)))
            else:
                yield rollout
        self._left_out("rollouts.jsonl", broken)

    def _numbered(self, name: str, what: str) -> Iterator[tuple[int, Row]]:
        """The objects of a JSON-lines file with the numbers of their lines, from 1."""
        path = self.folder / name
        if not path.exists():
            self._note(f"There is no {name}, so no {what}.")
            return
        whole, broken = 0, []
        with path.open(errors="replace", newline="\n") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith("\n"):
                    break
                row = _parsed(line)
                if isinstance(row, dict):
                    whole += 1
                    yield number, row
                else:
                    broken.append((number, "no JSON object"))
        self._left_out(name, broken)
        if not whole:
            self._note(f"{name} holds no complete line, so there are no {what}.")

    def _left_out(self, name: str, broken: list[tuple[int, str]]) -> None:
        """Note lines and what is wrong with each; beyond `NOTED` only how many."""
        if broken:
            lines = [f"line {number} ({wrong})" for number, wrong in broken[:NOTED]]
            more = [f"{len(broken) - NOTED} more"] if len(broken) > NOTED else []
            self._note(f"{name}: left out {', '.join(lines + more)}.")

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)


def _parsed(line: str) -> Any:
    """The value that a line of JSON holds; None if it holds none."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _check(holds: bool, wrong: str) -> None:
    if not holds:
        raise ValueError(wrong)


def whole(value: Any) -> TypeGuard[int]:
    """Whether it is a whole number that a page's script also holds exactly."""
    return type(value) is int and abs(value) <= 2**53


def _number(value: Any) -> bool:
    """Whether it is a number, also nan or infinite, or null."""
    return value is None or isinstance(value, float) or whole(value)


def finite(value: Any) -> float | None:
    """A number that can be drawn, else None."""
    return float(value) if isinstance(value, int | float) and abs(value) <= sys.float_info.max else None


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
