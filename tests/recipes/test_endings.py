"""How runs end and go on: signals, kills, resume, evaluation. Real processes, the command line as its user has it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from recipes.tasks.addition import Addition
from tests.recipes.test_grpo_async import ROOT, left_folders, metrics_of, steady

SYNCHRONOUS = (
    *("--steps", "24", "--group-size", "8", "--buffer.groups-per-step", "4", "--buffer.max-staleness", "0"),
    *("--generator.engine.max-length", "32", "--log.rollouts", "4"),
)
STOP_SECONDS = 20.0
"""Ten on a quiet machine; this one may be busy."""


def start(folder: Path, *flags: str) -> subprocess.Popen[str]:
    """The recipe as a terminal starts it: in a process group of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "recipes.grpo_async", "--output-dir", str(folder), *flags],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )


def until_step(process: subprocess.Popen[str], step: int) -> list[psutil.Process]:
    """Wait for a step's line; returns all processes of the run."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith(f"step {step:4d}/"):
            return psutil.Process(process.pid).children(recursive=True)
    raise AssertionError("".join(lines))


def end(process: subprocess.Popen[str], children: list[psutil.Process]) -> str:
    """The rest of the output; nothing of the run may be left then."""
    text, _ = process.communicate(timeout=60)
    psutil.wait_procs(children, timeout=10)
    assert not [p for p in children if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    return text


def finish(folder: Path, *flags: str) -> str:
    process = start(folder, *flags)
    text, _ = process.communicate(timeout=200)
    assert process.returncode == 0, text
    return text


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model" / "model.safetensors")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A synchronous run that nothing disturbed, evaluated on the way."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    finish(folder, *SYNCHRONOUS, "--eval.every", "9", "--eval.rows", "20", "--save.keep", "1")
    return folder


def stop(folder: Path, process: subprocess.Popen[str], children: list[psutil.Process], number: signal.Signals) -> int:
    """Send a signal to the whole group, as a terminal does; returns the steps that were done."""
    began = time.monotonic()
    os.killpg(process.pid, number)
    text = end(process, children)
    assert time.monotonic() - began < STOP_SECONDS
    assert process.returncode == 128 + number and "Traceback" not in text
    summary = json.loads((folder / "summary.json").read_text())
    steps: int = summary["steps"]
    assert summary["status"] == "stopped" and summary["reason"] == f"{number.name} after step {steps}"
    assert (folder / "checkpoints" / f"step-{steps:06d}").is_dir()
    return steps


@pytest.mark.slow
def test_a_signal_and_a_kill_later_a_synchronous_run_ends_as_if_neither_had_been(whole, tmp_path):
    before, run = left_folders(), tmp_path / "run"
    process = start(run, *SYNCHRONOUS, "--save.every", "3", "--save.keep", "5")
    stop(run, process, until_step(process, 4), signal.SIGINT)
    assert left_folders() <= before
    process = start(run, "--resume")  # all other settings are those of the first command
    children = until_step(process, 14)
    process.kill()
    end(process, children)
    assert (run / "checkpoints" / "step-000012").is_dir()
    text = finish(run, "--resume")
    assert "step   13/24" in text or ("step   16/24" in text and "step   12/24" not in text)
    assert steady(metrics_of(run)) == steady(metrics_of(whole))
    assert (run / "rollouts.jsonl").read_text() == (whole / "rollouts.jsonl").read_text()
    a, b = weights(run), weights(whole)
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "done" and summary["steps"] == 24 and summary["trained"] == 96


@pytest.mark.slow
def test_with_staleness_each_row_of_an_epoch_is_trained_once_through_a_signal_and_a_kill(tmp_path):
    flags = ("--steps", "100", "--epochs", "1", "--group-size", "4", "--buffer.groups-per-step", "4")
    flags += ("--save.every", "2", "--log.rollouts", "4", "task:addition", "--task.rows", "82")
    run = tmp_path / "run"
    process = start(run, *flags)
    stop(run, process, until_step(process, 3), signal.SIGTERM)
    process = start(run, "--resume")
    children = until_step(process, 12)
    process.kill()
    end(process, children)
    finish(run, "--resume")
    summary = json.loads((run / "summary.json").read_text())
    assert summary["issued"] == 82 == summary["trained"] + summary["dropped"] and summary["open"] == 0
    records = [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()]
    trained = {(record["step"], record["ticket"], record["row"]) for record in records}
    assert len(trained) == summary["trained"]
    assert max(Counter(ticket for _, ticket, _ in trained).values()) == 1
    assert max(Counter(row for _, _, row in trained).values()) == 1


@pytest.mark.slow
def test_evaluations_are_of_one_version_and_the_best_checkpoint_stays(whole):
    evals = [json.loads(line) for line in (whole / "evals.jsonl").read_text().splitlines()]
    assert [row["version"] for row in evals] == [0, 9, 18, 24]
    assert all(row["eval/rows"] == 20 and row["eval/failed"] == 0 for row in evals)
    assert len({row["eval/reward"] for row in evals}) > 1
    best = json.loads((whole / "checkpoints" / "best.json").read_text())
    top = max(evals[1:], key=lambda row: row["eval/reward"])
    assert (best["step"], best["value"]) == (top["version"], top["eval/reward"])
    kept = sorted(p.name for p in (whole / "checkpoints").iterdir() if p.is_dir())
    assert kept == sorted({f"step-{best['step']:06d}", "step-000024"})


def refused(*flags: str) -> str:
    """One line, no traceback, a status that is not 0."""
    done = subprocess.run(
        [sys.executable, "-m", "recipes.grpo_async", *flags], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert done.returncode in (1, 2) and "Traceback" not in done.stderr, done.stderr
    return done.stderr


@pytest.mark.slow
def test_a_folder_that_exists_is_refused_unless_told(whole, tmp_path):
    before = (whole / "metrics.jsonl").read_bytes()
    assert "go on with --resume, start anew with --overwrite" in refused("--output-dir", str(whole))
    assert "raise --steps to go on" in refused("--output-dir", str(whole), "--resume")
    assert "give one of them" in refused("--output-dir", str(whole), "--resume", "--overwrite")
    assert "has no config.json" in refused("--output-dir", str(tmp_path), "--resume")
    assert "give --output-dir" in refused("--resume")
    (tmp_path / "mine.txt").write_text("precious")
    assert "not the folder of a run" in refused("--output-dir", str(tmp_path), "--overwrite")
    assert (tmp_path / "mine.txt").read_text() == "precious" and (whole / "metrics.jsonl").read_bytes() == before


@pytest.mark.slow
def test_a_role_that_dies_at_once_ends_the_run_with_its_name(tmp_path):
    code = """
import asyncio, sys
from pathlib import Path
from actors import command_line
from recipes.grpo_async import Config, train
from tests.recipes.tasks import Deadly
from dataclasses import replace
command_line(Config, lambda config: train(replace(config, task=Deadly())))
"""
    flags = ["--output-dir", str(tmp_path / "run"), "--steps", "4"]
    done = subprocess.run([sys.executable, "-c", code, *flags], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    first, *_, last = [line for line in done.stderr.splitlines() if line.startswith("-c: ")]
    line = done.stderr.rstrip().splitlines()[-1]
    assert first == last == line
    assert "RolloutWorker worker" in line and "exited with non-zero code 3" in line
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "failed" and "RolloutWorker worker" in summary["reason"]


@pytest.mark.slow
def test_a_broken_model_is_named_before_the_traceback(tmp_path):
    shutil.copytree(Addition.checkpoint, tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "recipes.grpo_async",
            "--model",
            str(tmp_path / "model"),
            "--output-dir",
            str(tmp_path / "run"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    line = next(line for line in done.stderr.splitlines() if line.startswith("grpo_async: "))
    assert f"cannot load the model in {str(tmp_path / 'model')!r}" in line
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"
