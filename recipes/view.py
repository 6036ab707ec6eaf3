"""Read a run's sample rollouts in the terminal, token by token.

`python -m recipes.view outputs/x` pages through `rollouts.jsonl`; in a pipe it prints them all as plain text.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console, Group
from rich.segment import Segment, Segments
from rich.text import Text

from recipes.folder import Rollout, RunFiles, finite, visible

COLOURS = ("cyan", "yellow", "magenta", "green", "blue", "red")
"""Of the versions that drew a rollout's tokens, oldest first; used again from the start if there are more."""
UNLIKELY = math.log(0.1)
"""Tokens below this logprob are underlined."""
KEYS = "n next  p previous  b best only  w worst only  a all  space further down  q quit"

SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|O.)?|.", re.DOTALL)
"""What one key sends: a character, or an escape sequence."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Read a run's sample rollouts: by keys in a terminal, as plain text in a pipe."""

    folder: tyro.conf.Positional[Path]
    """Output folder of a run."""
    step: int | None = None
    """Show only rollouts trained at this step."""
    worst: bool = False
    """Show only the worst rollout of each group."""


def shown(rollout: Rollout, *, styled: bool = True) -> Group:
    """A rollout as text: header, versions that drew it, then its turns. Nothing of it can control a terminal.

    Where the text will not be `styled` the meaning of styles is left out.
    """
    colours = {version: COLOURS[i % len(COLOURS)] for i, version in enumerate(rollout.by_version())}
    return Group(_header(rollout), _versions(rollout, colours, styled), *_turns(rollout, colours))


def _header(rollout: Rollout) -> Text:
    parts = [f"{visible(name)} {_short(value)}" for name, value in rollout.parts.items()]
    words = [
        f"step {rollout.step}",
        f"ticket {rollout.ticket}",
        f"row {rollout.row}",
        visible(rollout.rank),
        f"reward {_short(rollout.reward)}" + (f" ({', '.join(parts)})" if parts else ""),
        f"{rollout.drawn} of {len(rollout.pieces)} tokens drawn",
    ]
    return Text("  ".join(words), style="bold")


def _short(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"


def _versions(rollout: Rollout, colours: dict[int, str], styled: bool) -> Text:
    line = Text("versions")
    for version, count in rollout.by_version().items():
        line.append("  ").append(f"{version}: {count} tokens", colours[version])
    if not colours:
        return line.append("  none")
    return line.append("  ").append("probability below 0.1", "underline") if styled else line


def _turns(rollout: Rollout, colours: dict[int, str]) -> Iterator[Text]:
    for turn in rollout.turns:
        title = Text(visible(turn["kind"]), style="bold dim")
        if turn["kind"] == "action":
            title.append(f" ({visible(str(turn.get('finish')))}, reward {_short(turn.get('reward'))})")
        yield title
        body = Text()
        for t in range(turn["start"], turn["end"]):
            style = "dim"
            if rollout.mask[t]:
                logprob = finite(rollout.logprobs[t])
                style = colours[rollout.versions[t]]
                style += " underline" if logprob is not None and logprob < UNLIKELY else ""
            body.append(visible(rollout.pieces[t], keep="\n\t"), style)
        yield body


class Pager:
    """Which rollout the reader looks at, and how far down."""

    def __init__(self, rollouts: list[Rollout], *, rank: str | None = None) -> None:
        self._all, self._rank = rollouts, rank
        self._at = self._top = 0

    @property
    def chosen(self) -> list[Rollout]:
        """The rollouts that the reader goes through."""
        return [rollout for rollout in self._all if self._rank in (None, rollout.rank)]

    def press(self, key: str) -> bool:
        """Take a key; False ends the reading. Keys without a meaning do nothing."""
        if key in ("n", "p"):
            self._at = min(max(0, self._at + (1 if key == "n" else -1)), max(0, len(self.chosen) - 1))
            self._top = 0
        elif key in ("b", "w", "a"):
            here = self.chosen[self._at].step if self.chosen else 0
            self._rank = {"b": "best", "w": "worst", "a": None}[key]
            self._at = next((i for i, rollout in enumerate(self.chosen) if rollout.step >= here), 0)
            self._top = 0
        elif key == " ":
            self._top += 1
        return key not in ("q", "\x03", "\x04")

    def screen(self, console: Console) -> Segments:
        """What fits the terminal of a rollout, and a last line that says where it stands and what keys do."""
        chosen, height = self.chosen, max(1, console.height - 2)
        body = (
            shown(chosen[self._at], styled=console.color_system is not None)
            if chosen
            else Group(Text("no such rollout"))
        )
        lines = console.render_lines(body, pad=False)
        pages = -(-len(lines) // height)
        self._top %= pages
        where = f"[{self._at + 1 if chosen else 0}/{len(chosen)}, page {self._top + 1}/{pages}] {KEYS}"
        part = lines[self._top * height :][:height]
        foot = console.render_lines(Text(where, style="reverse"), pad=False)[0]
        return Segments(segment for line in [*part, foot] for segment in [*line, Segment.line()])


@contextmanager
def pressed_keys() -> Iterator[Iterator[str]]:
    """Keys as they are pressed; the sequence of an arrow or function key is one key. Ends at the end of the input."""
    import termios
    import tty

    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    tty.setcbreak(terminal, termios.TCSADRAIN)
    try:
        yield _keys(terminal)
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def _keys(terminal: int) -> Iterator[str]:
    while pressed := os.read(terminal, 16):
        yield from SEQUENCE.findall(pressed.decode(errors="replace"))


def browse(pager: Pager, console: Console) -> None:
    """Show rollouts until the reader quits."""
    with pressed_keys() as keys, console.screen():
        while True:
            console.clear()
            console.print(pager.screen(console), end="")
            if not pager.press(next(keys, "q")):
                return


def main() -> None:
    """Entry point of `python -m recipes.view`."""
    options = tyro.cli(Options)
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=not sys.stdout.isatty())
    try:
        files = RunFiles(options.folder)
        rollouts = (r for r in files.rollouts() if options.step in (None, r.step))
        if sys.stdout.isatty() and sys.stdin.isatty():
            browse(Pager(list(rollouts), rank="worst" if options.worst else None), console)
        else:
            for rollout in rollouts:
                if not options.worst or rollout.rank == "worst":
                    console.print(shown(rollout, styled=console.color_system is not None), Text(), sep="\n")
    except (ValueError, OSError) as error:
        sys.exit(f"view: {error}")
    for note in files.notes:
        print(f"view: {note}", file=sys.stderr)


if __name__ == "__main__":
    main()
