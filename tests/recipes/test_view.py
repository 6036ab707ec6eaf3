"""Rollouts in the terminal: what is shown, which ones, and that none of it can control the terminal."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import termios
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from recipes import view
from recipes.folder import RunFiles, visible
from recipes.view import Pager, shown
from tests.recipes.sample_run import EVIL, lines, make_run

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(tmp_path) -> Path:
    return make_run(tmp_path / "run", steps=4)


def printed(monkeypatch, capsys, *arguments: object) -> str:
    monkeypatch.setattr(sys, "argv", ["view", *map(str, arguments)])
    view.main()
    return capsys.readouterr().out


def text_of(pager: Pager, height: int = 40) -> str:
    console = Console(width=100, height=height, force_terminal=True, color_system=None)
    with console.capture() as captured:
        console.print(pager.screen(console), end="")
    return captured.get()


def test_in_a_pipe_everything_is_plain_text(run, monkeypatch, capsys):
    text = printed(monkeypatch, capsys, run)
    assert [line.split("  ")[0] for line in text.splitlines() if line.startswith("step ")] == [
        f"step {step}" for step in (0, 0, 1, 1, 2, 2, 3, 3)
    ]
    assert EVIL in text and r"\x1b[2J\x07\u202e" in text
    assert not {unicodedata.category(char) for char in text.replace("\n", "")} & {"Cc", "Cf"}


def test_a_rollout_line_by_line(run, monkeypatch, capsys):
    row = json.loads((run / "rollouts.jsonl").read_text().splitlines()[5])
    row["pieces"] = ["2", "+", "3", "=", " ", "so", "5", "is", "the", "sum", *["."] * 24]
    row["turns"][1]["reward"], row["turns"][3]["reward"] = -0.0017000000000000001, None
    lines(run / "rollouts.jsonl", [row])
    assert printed(monkeypatch, capsys, run).splitlines() == [
        f"step 2  ticket 35  row {row['row']}  worst  reward 0 (correct 0, format 0.5)  24 of 34 tokens drawn",
        "versions  1: 10 tokens  2: 14 tokens",
        "prompt",
        "2+3= so",
        "action (length, reward -0.0017)",
        "5isthesum" + "." * 10,
        "observation",
        "." * 4,
        "action (length, reward none)",
        "." * 10,
        "",
    ]


def test_step_and_worst_choose(run, monkeypatch, capsys):
    text = printed(monkeypatch, capsys, run, "--step", "2", "--worst")
    headers = [line for line in text.splitlines() if line.startswith("step ")]
    assert len(headers) == 1 and headers[0].startswith("step 2  ticket 35") and "  worst  " in headers[0]


def test_colours_follow_versions_and_underlines_follow_probability(run):
    rollout = list(RunFiles(run).rollouts())[5]
    _, legend, *_, body, _, _, _, second = shown(rollout).renderables
    assert legend.plain == "versions  1: 10 tokens  2: 14 tokens  probability below 0.1"
    styles = [span.style for span in body.spans] + [span.style for span in second.spans]
    drawn = [t for t, mask in enumerate(rollout.mask) if mask]
    expected = [
        {1: "cyan", 2: "yellow"}[rollout.versions[t]] + (" underline" if rollout.logprobs[t] < -2.302585 else "")
        for t in drawn
    ]
    assert styles == expected and {"cyan", "yellow", "cyan underline"} <= set(styles)


def test_keys_move_through_the_rollouts(run):
    pager = Pager(list(RunFiles(run).rollouts()))

    def after(keys: str) -> tuple[str, str]:
        for key in keys:
            assert pager.press(key)
        first, *_, foot = text_of(pager).splitlines()
        return " ".join(first.replace("  ", " ").split(" ")[:2]) + first[first.index("row") :].split("  ")[1], foot[:5]

    assert after("") == ("step 0best", "[1/8,")
    assert after("p") == ("step 0best", "[1/8,")
    assert after("nnn") == ("step 1worst", "[4/8,")
    assert after("b") == ("step 1best", "[2/4,")
    assert after("n") == ("step 2best", "[3/4,")
    assert after("w") == ("step 2worst", "[3/4,")
    assert after("nnnnnn") == ("step 3worst", "[4/4,")
    assert after("ax?") == ("step 3best", "[7/8,")
    assert not pager.press("q")


def test_a_long_rollout_is_read_page_by_page(run):
    row = json.loads((run / "rollouts.jsonl").read_text().splitlines()[5])
    row["pieces"] = [f"line {t}\n" for t in range(34)]
    lines(run / "rollouts.jsonl", [row])
    pager = Pager(list(RunFiles(run).rollouts()))
    seen = []
    for page in (1, 2, 3, 4, 5, 1):  # 44 lines in windows of 10, then from the start again
        text = text_of(pager, height=12)
        assert f"[1/1, page {page}/5]" in text and len(text.splitlines()) <= 12
        seen += [line.strip() for line in text.splitlines() if line.startswith("line ")]
        pager.press(" ")
    assert seen[:34] == [f"line {t}" for t in range(34)] and seen[34] == "line 0"


def test_nothing_to_show_is_said(run):
    pager = Pager([], rank="worst")
    assert "no such rollout" in text_of(pager)
    assert pager.press("n") and pager.press("b") and "[0/0" in text_of(pager)


def test_not_an_output_folder_is_one_line(monkeypatch, capsys, tmp_path):
    with pytest.raises(SystemExit) as ended:
        printed(monkeypatch, capsys, tmp_path)
    assert ended.value.code == f"view: {tmp_path} is not an output folder: give one that a run wrote"


def test_a_run_without_rollouts_says_so(run, monkeypatch, capsys):
    (run / "rollouts.jsonl").unlink()
    monkeypatch.setattr(sys, "argv", ["view", str(run)])
    view.main()
    assert capsys.readouterr().err == "view: There is no rollouts.jsonl, so no sample rollouts.\n"


@given(st.text())
def test_visible_text_controls_nothing(text):
    assert not {unicodedata.category(char) for char in visible(text)} & {"Cc", "Cf", "Cs", "Zl", "Zp"}


@pytest.mark.slow
def test_in_a_terminal_it_is_read_by_keys(run):
    """On a terminal of its own: next, an arrow key, which means nothing, quit. The terminal is given back."""
    controller, terminal = pty.openpty()
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40"}
    before = termios.tcgetattr(terminal)
    command = [sys.executable, "-m", "recipes.view", str(run)]
    reader = subprocess.Popen(command, cwd=ROOT, stdin=terminal, stdout=terminal, stderr=terminal, env=environment)
    text = b""

    def until(mark: bytes) -> None:
        nonlocal text
        while mark not in text:
            text += os.read(controller, 4096)

    until(b"[1/8, page 1/1]")
    os.write(controller, b"n")
    until(b"[2/8, page 1/1]")
    assert rb"\x1b[2J\x07\u202e" in text and b"\x07" not in text and "\u202e".encode() not in text
    os.write(controller, b"\x1b[Cq")
    until(b"\x1b[?1049l")
    assert reader.wait(10) == 0
    assert termios.tcgetattr(terminal) == before
    os.close(terminal)
    os.close(controller)
