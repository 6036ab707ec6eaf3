"""Whole runs of the recipe on real processes."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from monarch.actor import ActorError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from actors.config import BufferConfig, NativeEngine, Sampling, SyncConfig, TrainerConfig
from actors.mesh import cause
from recipes.grpo_async import Config, of_task, train
from recipes.tasks.addition import Addition
from recipes.tasks.modmix import Modmix
from tests.golden.reference import Reference
from tests.recipes.tasks import SlowAddition

SMALL = Config(
    steps=8,
    group_size=8,
    buffer=BufferConfig(groups_per_step=4, max_staleness=0),
    generator=replace(Config().generator, engine=NativeEngine(max_length=32, slots=128)),
    trainer=TrainerConfig(microbatch_tokens=300),
    sampling=Sampling(max_tokens=22),
)
METRICS = """
    step reward/mean reward/trained rollout/length rollout/truncated staleness/mean staleness/max staleness/dropped
    staleness/dropped_length_ratio buffer/open policy/loss policy/grad_norm policy/entropy policy/masked policy/lag_kl
    policy/engine_gap_mean policy/engine_gap_max time/step time/wait_batch time/train sync/seconds sync/bytes
    sync/trainer_blocked sync/stall perf/generated_tokens perf/trained_tokens idle/generator idle/trainer
"""
ROOT = Path(__file__).parents[2]


def metrics_of(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def check(folder: Path, config: Config) -> dict[str, float]:
    """What every finished run must show; returns its summary."""
    rows, summary = metrics_of(folder), json.loads((folder / "summary.json").read_text())
    assert [row["step"] for row in rows] == list(range(config.steps))
    assert summary["versions_published"] == config.steps
    assert summary["issued"] == summary["trained"] + summary["dropped"] and summary["open"] == 0
    assert summary["trained"] == config.steps * config.buffer.groups_per_step
    bound = config.buffer.max_staleness
    assert max(row["staleness/max"] for row in rows) <= bound
    # On a busy machine swaps may come so fast that a version's probe has nothing to compare.
    gaps = [row for row in rows if row["policy/engine_gap_mean"] is not None]
    assert len(gaps) == len(rows) if bound == 0 else len(gaps) > len(rows) / 3
    assert max(row["policy/engine_gap_mean"] for row in gaps) <= 5e-6
    assert max(row["policy/engine_gap_max"] for row in gaps) <= 1e-4
    assert set(METRICS.split()) <= set(rows[0]) and all(row.keys() == rows[0].keys() for row in rows)
    assert json.loads((folder / "config.json").read_text())["steps"] == config.steps
    return summary


def run(config: Config, folder: Path) -> list[dict[str, float]]:
    config = replace(config, output_dir=folder)
    asyncio.run(train(config))
    check(folder, config)
    return metrics_of(folder)


def steady(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    """Without what depends on the clock."""
    timed = ("time", "idle", "sync")
    return [
        {k: v for k, v in row.items() if k.split("/")[0] not in timed and k != "perf/generated_tokens"} for row in rows
    ]


@pytest.fixture(scope="module")
def synchronous(tmp_path_factory):
    """Two synchronous runs that differ only in the workers' delays."""
    base = tmp_path_factory.mktemp("synchronous")
    out = []
    for salt in (1, 2):
        task = SlowAddition(record=str(base / f"{salt}.jsonl"), salt=salt)
        rows = run(replace(SMALL, task=task), base / f"run{salt}")
        record = [tuple(json.loads(line)) for line in Path(task.record).read_text().splitlines()]
        out.append((rows, sorted(record), load_file(base / f"run{salt}" / "model" / "model.safetensors")))
    return out


@pytest.mark.slow
def test_synchronous_runs_repeat_to_the_bit_whatever_the_delays(synchronous):
    (rows, record, weights), (rows2, record2, weights2) = synchronous
    assert record == record2
    assert steady(rows) == steady(rows2)
    assert all(torch.equal(weights[name], weights2[name]) for name in weights)
    assert any(row["policy/grad_norm"] > 0 for row in rows)


@pytest.mark.slow
def test_a_synchronous_run_equals_one_process_with_a_plain_loop(synchronous):
    (rows, record, weights), _ = synchronous
    torch.set_num_threads(1)
    c = SMALL
    reference = Reference(
        str(Addition.checkpoint),
        Addition(),
        c.sampling,
        c.trainer,
        steps=c.steps,
        seed=c.seed,
        groups=c.buffer.groups_per_step,
        members=c.group_size,
    )
    expected = []
    for number, row in enumerate(rows):
        prompts = [Addition().row(reference.order(4 * number + i))["prompt"] for i in range(4)]
        step = reference.step()
        for i, tokens in enumerate(step.completions):
            finish = "stop" if tokens[-1] in reference.tokenizer.eos_ids else "length"
            expected.append((prompts[i // c.group_size], reference.tokenizer.decode(tokens), finish))
        assert row["reward/mean"] == step.rewards.mean()
        assert row["rollout/length"] == np.mean([len(t) for t in step.completions])
        assert row["policy/grad_norm"] == pytest.approx(step.grad_norm, rel=1e-4)
    assert Counter(expected) == Counter(record)
    start = load_file(Addition.checkpoint / "model.safetensors")
    trained = reference.model.state_dict()
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, trained[name], rtol=0, atol=1e-6)
    assert max((weights[n] - start[n]).abs().max() for n in weights) > 1e-3, "something must have been learnt"


@pytest.mark.slow
def test_without_a_learning_rate_nothing_moves_and_engine_and_trainer_agree(tmp_path):
    config = replace(SMALL, trainer=replace(SMALL.trainer, lr=0.0), probe=220)
    rows = run(config, tmp_path / "run")
    start = load_file(Addition.checkpoint / "model.safetensors")
    end = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert set(start) == set(end) and all(torch.equal(start[name], end[name]) for name in start)
    assert sum(row["policy/engine_gap_tokens"] for row in rows) >= 10_000
    assert max(row["policy/lag_kl"] for row in rows) < 1e-9 and all(row["policy/masked"] == 0 for row in rows)


@pytest.mark.slow
def test_two_ranks_and_torchstore_learn_the_same_first_steps(tmp_path):
    """Two FSDP2 ranks and the other transport: the same synchronous run to rounding, weights included."""
    one = run(SMALL, tmp_path / "one")
    two = run(
        replace(SMALL, trainer=replace(SMALL.trainer, ranks=2), sync=SyncConfig(transport="torchstore")),
        tmp_path / "two",
    )
    for a, b in zip(one, two, strict=True):
        assert a["reward/mean"] == b["reward/mean"]
        assert a["policy/loss"] == pytest.approx(b["policy/loss"], abs=1e-6)
        assert a["policy/grad_norm"] == pytest.approx(b["policy/grad_norm"], rel=1e-4)
        assert a["perf/trained_tokens"] == b["perf/trained_tokens"]
    weights = [load_file(tmp_path / name / "model" / "model.safetensors") for name in ("one", "two")]
    for name, tensor in weights[0].items():
        torch.testing.assert_close(tensor, weights[1][name], rtol=0, atol=2e-6)


@pytest.mark.slow
def test_the_end_of_the_data_is_trained_and_nothing_waits(tmp_path):
    """10 rows, 4 groups a step: two full batches and one of two groups, then the end. Without probes."""
    config = replace(
        SMALL,
        steps=50,
        epochs=1,
        probe=0,
        task=Addition(rows=10),
        buffer=replace(SMALL.buffer, max_staleness=2),
        output_dir=tmp_path / "run",
    )
    summary = asyncio.run(train(config))
    rows = metrics_of(tmp_path / "run")
    assert [row["buffer/groups"] for row in rows] == [4, 4, 2]
    assert rows[0]["policy/engine_gap_mean"] is None
    assert summary["issued"] == summary["trained"] == 10 and summary["open"] == 0


def start_cli(*flags: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "recipes.grpo_async", *flags],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )


def left_folders() -> set[Path]:
    """Shared folders whose run is over: nobody holds their lock."""
    left = set()
    for lock in Path(f"/dev/shm/meshrl-{os.getuid()}").glob("*/lock"):
        with lock.open("r+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            left.add(lock.parent)
    return left


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_demo_learns(tmp_path):
    """The command of the README: no flags but the place of its output."""
    before = left_folders()
    process = start_cli("--output-dir", str(tmp_path / "demo"))
    text, _ = process.communicate()
    assert process.returncode == 0, text
    summary = check(tmp_path / "demo", Config())
    assert summary["reward_first5"] <= 0.4 and summary["reward_last10"] >= 0.8
    assert summary["length_first5"] < 12 and summary["length_last10"] > 15
    assert summary["dropped"] <= 0.25 * summary["issued"]
    assert len([line for line in text.splitlines() if line.startswith("step ")]) == Config().steps
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "demo" / "model")
    assert sum(p.numel() for p in model.parameters()) > 100_000
    assert left_folders() <= before


@pytest.mark.slow
def test_a_killed_process_ends_the_run_with_its_name_and_leaves_nothing(tmp_path):
    before = left_folders()
    process = start_cli("--steps", "100000", "--output-dir", str(tmp_path / "run"))
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("step "):
            break
    children = psutil.Process(process.pid).children(recursive=True)
    victim = max(children, key=lambda p: p.memory_info().rss)
    victim.send_signal(signal.SIGKILL)
    began = time.monotonic()
    rest, _ = process.communicate(timeout=60)
    assert time.monotonic() - began < 45
    assert process.returncode not in (0, None), rest
    line, last = (line for line in rest.splitlines() if line.startswith("grpo_async: "))
    assert line == last == rest.rstrip().splitlines()[-1]
    assert "Killed(sig=9)" in line, line
    assert re.search(
        r"Trainer trainer|WeightPublisher publisher|Generator generator\d|WeightReceiver receiver\d", line
    ), line
    assert not [p for p in children if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    assert left_folders() <= before


def test_settings_that_cannot_work_are_one_line_and_no_output(tmp_path):
    endless = tmp_path / "endless"
    shutil.copytree(Addition.checkpoint, endless)
    (endless / "generation_config.json").write_text("{}")
    for name in ("config.json", "tokenizer_config.json"):
        kept = {k: v for k, v in json.loads((endless / name).read_text()).items() if not k.startswith("eos_token")}
        (endless / name).write_text(json.dumps(kept))
    for flags, text in (
        (["--buffer.order", "window", "--buffer.window", "400"], "window 400 can delay a group"),
        (["--model", str(tmp_path)], "no *.safetensors in"),
        (["--generator.replicas", "0"], "generator.replicas must be at least 1, not 0"),
        (["--steps", "0"], "config.steps must be at least 1, not 0"),
        (["task:addition", "--task.rows", "0"], "the task has 0 rows to train on"),
        (["--model", str(endless)], "names no end token"),
        (["--output-dir", str(endless / "config.json")], "choose another --output-dir"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "recipes.grpo_async", "--output-dir", str(tmp_path / "out"), *flags],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert done.returncode in (1, 2) and text in done.stderr and "Traceback" not in done.stderr
        assert not (tmp_path / "out").exists()


def test_the_cause_is_the_first_error_with_the_call_that_raised_it():
    text = "line one\nline two\nTraceback (most recent call last):\n  more"
    error = ActorError(ValueError(text), "Actor call trainer.setup failed.")
    group = ExceptionGroup("outer", [ExceptionGroup("inner", [error]), RuntimeError("later")])
    assert cause(group) == "Actor call trainer.setup failed: ValueError: line one line two"


def test_a_tiny_task_says_how_long_an_answer_may_be_unless_a_flag_does():
    assert of_task(Addition(), None, Sampling())[1].max_tokens == 22
    assert of_task(Modmix(), None, Sampling())[1].max_tokens == 200
    assert of_task(Modmix(), "x", Sampling(max_tokens=9)) == ("x", Sampling(max_tokens=9))
