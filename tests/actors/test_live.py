"""The live view on a real pseudo-terminal, as a terminal emulator shows it."""

from __future__ import annotations

import fcntl
import math
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import textwrap
from pathlib import Path

import pyte
import pytest

from actors.live import sparkline

ROOT = Path(__file__).parents[2]
START = """
import asyncio, logging, os, subprocess, sys
from pathlib import Path
from actors.config import RunConfig
from actors.metrics import RunLog, print_summary

def row(step):
    return {
        "step": step, "reward/mean": step / 4, "rollout/length": 10.0 + step, "rollout/truncated": 0.02,
        "staleness/mean": 1.1, "staleness/max": 2.0, "staleness/dropped": 0.0, "idle/trainer": 0.1,
        "idle/generator": 0.25, "buffer/ready": 3.0, "buffer/in_flight": 9.0, "policy/loss": 0.001,
        "policy/grad_norm": 0.3, "policy/engine_gap_max": 1e-6, "time/step": 2.0, "time/wait_batch": 0.5,
    }

folder = Path(sys.argv[1])
"""


class Terminal:
    """A process on a pseudo-terminal, and what its screen shows."""

    def __init__(self, folder: Path, body: str, columns: int, stderr: int | None = None) -> None:
        master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
        self.modes = termios.tcgetattr(slave)
        self.process = subprocess.Popen(
            [sys.executable, "-c", START + textwrap.dedent(body), "run"],
            stdin=slave,
            stdout=slave,
            stderr=slave if stderr is None else stderr,
            cwd=folder,
            env=os.environ | {"TERM": "xterm-256color", "PYTHONPATH": str(ROOT)},
        )
        self._master, self._slave = master, slave
        self.screen = pyte.HistoryScreen(columns, 30, history=1000)
        self._stream = pyte.ByteStream(self.screen)

    def until(self, text: str) -> None:
        """Read until the screen shows `text`."""
        while not any(text in line for line in self.lines):
            self._stream.feed(os.read(self._master, 1 << 16))

    def end(self) -> tuple[str, ...]:
        """Read until the process ends; all lines that were shown, those scrolled away first."""
        modes = termios.tcgetattr(self._slave)
        os.close(self._slave)
        try:
            while data := os.read(self._master, 1 << 16):
                self._stream.feed(data)
        except OSError:  # how Linux says that nobody holds the other end any more
            pass
        os.close(self._master)
        assert self.process.wait() == 0, self.lines
        assert not self.screen.cursor.hidden
        assert modes == self.modes
        scrolled = [
            "".join(line[x].data for x in range(self.screen.columns)).rstrip() for line in self.screen.history.top
        ]
        return tuple(line for line in (*scrolled, *self.lines) if line)

    @property
    def lines(self) -> list[str]:
        return [line.rstrip() for line in self.screen.display]


THREE_STEPS = """
    with RunLog(folder, RunConfig(), 5) as log:
        for step in range(3):
            log.step(row(step))
            logging.warning("own warning %d", step)
            print("printed", step)
            child = "import sys; print('child', 1 + int(sys.argv[1])); print('\\x1b[31mred\\x1b[0m', file=sys.stderr)"
            subprocess.run([sys.executable, "-c", child, str(step)], check=True)
        log.evaluation(2, {"eval/reward": 0.5})
        summary = log.finish(6.0, {"issued": 4, "trained": 3, "dropped": 1}, status="stopped", reason="SIGTERM")
    print("terminal again:", os.isatty(1), os.isatty(2))
    print_summary(summary)
"""


@pytest.mark.parametrize("columns", [80, 40])
def test_the_view_stays_below_what_any_process_prints(tmp_path, columns):
    lines = list(Terminal(tmp_path, THREE_STEPS, columns).end())
    at = next(i for i, line in enumerate(lines) if line.startswith("step"))
    above, view, below = lines[: at - 1], lines[at - 1 : at + 8], lines[at + 8 :]
    printed = ["writing to run"]
    for step in range(3):
        printed += [f"WARNING:root:own warning {step}", f"printed {step}", f"child {step + 1}", "red"]
    assert above == printed
    assert view[0] == "run"
    bar, left = view[1].split("3/5")[1].split(" left ")
    assert set(bar.split()[0]) <= set("\u2501\u2578\u257a")
    assert left.startswith(("0:", "-:"))
    low_to_high = "\u2581\u2585\u2588"  # half way is 3.5 of 7 steps up, which rounds to the even 4
    expected = [
        f"reward     0.500  {low_to_high}",
        f"length     12.0  cut 2%  {low_to_high}",
        "staleness  mean 1.1  max 2  dropped 0",
        "idle       trainer 10%  generators 25%",
        "queue      3 ready  9 in flight",
        "policy     loss +0.0010  grad 0.30  gap 1e-06",
        "evaluation version 2  reward 0.500",
    ]
    assert view[2:] == [line if len(line) <= columns else line[: columns - 1] + "\u2026" for line in expected]
    assert below[:3] == ["now        stopped", "terminal again: True True", "stopped             SIGTERM"]
    assert "reward              0.250 -> 0.250" in below
    assert "trainer idle        25%" in below
    assert "tickets dropped     1" in below


def test_an_interrupt_gives_the_terminal_back(tmp_path):
    terminal = Terminal(
        tmp_path,
        """
        async def run():
            with RunLog(folder, RunConfig(), 5) as log:
                log.step(row(0))
                await asyncio.Event().wait()
        try:
            asyncio.run(run())
        except KeyboardInterrupt:
            print("interrupted", os.isatty(1), os.isatty(2))
        """,
        60,
    )
    terminal.until("queue      3 ready")
    assert terminal.screen.cursor.hidden
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.end()[-1] == "interrupted True True"


def test_an_error_comes_below_the_view(tmp_path):
    terminal = Terminal(
        tmp_path,
        """
        try:
            with RunLog(folder, RunConfig(), 5) as log:
                log.step(row(0))
                print("last words", end="")
                raise RuntimeError("boom")
        except RuntimeError as error:
            print("error:", error, file=sys.stderr)
        """,
        60,
    )
    lines = terminal.end()
    assert lines[-1] == "error: boom"
    assert "last words" in lines
    assert lines.index("last words") < lines.index("queue      3 ready  9 in flight") < len(lines) - 1


def test_stderr_that_is_a_file_stays_one(tmp_path):
    with (tmp_path / "errors").open("wb") as errors:
        body = """
            with RunLog(folder, RunConfig(), 5) as log:
                print("to the file", file=sys.stderr)
                print("to the screen")
        """
        lines = Terminal(tmp_path, body, 60, errors.fileno()).end()
    assert (tmp_path / "errors").read_text() == "to the file\n"
    assert "to the screen" in lines
    assert "to the file" not in lines


def test_a_sparkline_goes_from_the_lowest_to_the_highest():
    # Of -2..5 value v lies at (v + 2) of 7 steps up: block number v + 2.
    assert sparkline([-2.0, 5.0, math.nan, 0.0, 1.0], 60) == "\u2581\u2588 \u2583\u2584"
    assert sparkline([0.0, 0.0], 60) == "\u2581\u2581"
    assert sparkline([], 60) == ""
    assert sparkline([math.nan], 60) == " "


def test_a_narrow_sparkline_still_shows_the_whole_run():
    # Stretches of 10, 10 and 11 steps with means 0, 3.5 (nan counts for nothing) and 7.
    values = [0.0] * 10 + [3.0, 4.0] * 4 + [math.nan] * 2 + [7.0] * 11
    assert sparkline(values, 3) == "\u2581\u2585\u2588"
    # Converged after a tenth of the run: each later character is at the top, whatever the width.
    values = [0.1] * 10 + [0.98, 1.0] * 45
    for width in (10, 20, 50):
        assert sparkline(values, width) == "\u2581" * (width // 10) + "\u2588" * (width - width // 10)


def test_a_curve_without_movement_is_flat():
    # 0.98..1.0 spans 0.02, shown as 0.1 around 0.99, which is 0.94..1.04: 2.8 and 4.2 of 7 steps up.
    assert sparkline([0.98, 1.0, 0.98], 60) == "\u2584\u2585\u2584"
    # Around 0 any movement counts.
    assert sparkline([-0.001, 0.001], 60) == "\u2581\u2588"
