"""Time to learn: the asynchronous recipe on its processes against the plain loop of one process with two threads.

Both have the same model, task, loss, optimizer and schedule, and the same two cores. Runs from a checkout: the plain
loop is the reference of the tests.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from recipes.bench import Result, paired

REPEATS = 3
WINDOW, TARGET = 5, 0.85
"""Learnt: the mean reward over this many steps reaches the target."""
SKIP = 3
"""First steps that step times leave out: pipelines fill, caches warm."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Reward and seconds of every step, and where the time went."""

    rewards: list[float]
    seconds: list[float]
    note: str

    def to_target(self) -> float:
        """Seconds until the window's mean reward reaches the target; inf if it never does."""
        for end in range(WINDOW, len(self.rewards) + 1):
            if sum(self.rewards[end - WINDOW : end]) / WINDOW >= TARGET:
                return sum(self.seconds[:end])
        return float("inf")

    def step(self) -> float:
        """Mean seconds of a step."""
        return statistics.mean(self.seconds[SKIP:])


def asynchronous(task: str, steps: int, seed: int, *flags: str) -> Curve:
    """The recipe, as a user runs it."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "recipes.grpo_async", f"task:{task}"]
        command += ["--steps", str(steps), "--seed", str(seed), "--output-dir", str(run), *flags]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    mean = {
        k: statistics.mean(row[k] for row in rows[SKIP:]) for k in ("time/train", "time/wait_batch", "idle/generator")
    }
    note = (
        f"a step trains {mean['time/train']:.3f} s and waits {mean['time/wait_batch']:.3f} s; generators idle "
        f"{mean['idle/generator']:.0%}"
    )
    return Curve(rewards=[row["reward/mean"] for row in rows], seconds=[row["time/step"] for row in rows], note=note)


def plain_loop(task: str, steps: int, seed: int) -> Curve:
    """The reference in a process of its own, with two threads."""
    command = [sys.executable, "-c", REFERENCE, task, str(steps), str(seed)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    sampled, trained, rewards = json.loads(done.stdout.splitlines()[-1])
    note = f"a step samples {statistics.mean(sampled[SKIP:]):.3f} s and trains {statistics.mean(trained[SKIP:]):.3f} s"
    return Curve(rewards=rewards, seconds=[a + b for a, b in zip(sampled, trained, strict=True)], note=note)


REFERENCE = """
import json, sys
import torch
from actors.config import Sampling, TrainerConfig
from recipes.tasks.addition import Addition
from recipes.tasks.modmix import Modmix
from tests.golden.reference import Reference

task, steps, seed = {"addition": Addition, "modmix": Modmix}[sys.argv[1]](), int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(2)
loop = Reference(
    str(task.checkpoint), task, Sampling(max_tokens=task.max_tokens), TrainerConfig(), steps=steps, seed=seed
)
done = [loop.step() for _ in range(steps)]
print(json.dumps([[s.sampled for s in done], [s.trained for s in done], [float(s.rewards.mean()) for s in done]]))
"""


PLACEMENT = ("--generator.replicas", "1", "--buffer.max-staleness", "1", "--probe", "0")
"""Two cores: a process that trains, one that generates, little lag to make up for; no probes, as in the plain loop."""


def results() -> list[Result]:
    """The rows of `python -m recipes.bench learn`."""
    # Slots for one step's rollouts: the first batch is then done before the second begins.
    short = ("generator.engine:native", "--generator.engine.slots", "256", *PLACEMENT)
    pairs = [(asynchronous("addition", 60, seed, *short), plain_loop("addition", 60, seed)) for seed in range(REPEATS)]
    out = [
        paired("learn/addition/to_0.85", [a.to_target() for a, _ in pairs], [b.to_target() for _, b in pairs], 1.0),
        paired(
            "learn/addition/step", [a.step() for a, _ in pairs], [b.step() for _, b in pairs], None, note=_notes(pairs)
        ),
    ]
    long = ("--sampling.max-tokens", "200", *PLACEMENT)
    pairs = [(asynchronous("modmix", 20, seed, *long), plain_loop("modmix", 12, seed)) for seed in range(REPEATS)]
    out.append(
        paired(
            "learn/modmix/step", [a.step() for a, _ in pairs], [b.step() for _, b in pairs], 0.8, note=_notes(pairs)
        )
    )
    return out


def _notes(pairs: list[tuple[Curve, Curve]]) -> str:
    ours, theirs = pairs[-1]
    return f"{ours.note}. Plain loop: {theirs.note}"
