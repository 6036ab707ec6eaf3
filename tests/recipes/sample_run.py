"""A run's output folder made by a seeded script: what a run of a few dozen steps leaves behind."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

PIECES = ["<think>", " carry", " the", " 1", ",", " so", "\n", "12", "+", "34", "=", "46", " é", "日本", "</s>"]
EVIL = "</script><script>window.pwned = 1</script><img src=x onerror='window.pwned = 2'>"
CONTROL = "\x1b[2J\x07\u202e"


def metrics(steps: int, random: Random) -> list[dict[str, Any]]:
    rows = []
    for step in range(steps):
        share = step / steps
        wait = 0.4 * random.random() * (1 - share)
        rows.append(
            {
                "step": step,
                "reward/mean": 0.25 + 0.7 * share + random.gauss(0, 0.03),
                "reward/trained": 0.22 + 0.7 * share + random.gauss(0, 0.03),
                "reward/correct": 0.2 + 0.75 * share,
                "reward/format": min(1.0, 0.5 + share),
                "reward/zero_variance": 0.1 + 0.3 * share,
                "rollout/length": 8 + 10 * share + random.gauss(0, 0.3),
                "rollout/length_max": 22.0,
                "rollout/truncated": 0.1 * (1 - share),
                "staleness/mean": min(step, 1.5 + 0.4 * random.random()),
                "staleness/max": float(min(step, 2)),
                "policy/engine_gap_mean": None if step % 7 == 3 else 3e-7 * (1 + random.random()),
                "policy/engine_gap_max": None if step % 7 == 3 else 2e-6 * (1 + random.random()),
                "policy/lag_kl": 0.004 * random.random(),
                "policy/ratio_p01": 0.9 - 0.1 * random.random(),
                "policy/ratio_p50": 1.0,
                "policy/ratio_p99": 1.1 + 0.1 * random.random(),
                "policy/masked_age_0": 0.01,
                "policy/masked_age_1": 0.05 * random.random(),
                "staleness/age": min(step, 1.2 + 0.4 * random.random()),
                "staleness/age_positive": min(step, 1.4 + 0.4 * random.random()),
                "staleness/age_negative": min(step, 1.1 + 0.4 * random.random()),
                "buffer/age": min(step, 0.8 + 0.4 * random.random()),
                "policy/masked": 0.05 * random.random(),
                "policy/loss": -0.2 + 0.05 * random.random(),
                "policy/grad_norm": 0.3 + 0.3 * random.random(),
                "policy/entropy": 0.8 - 0.5 * share,
                "perf/trained_tokens": 2500.0,
                "perf/generated_tokens": 2000 + 1000 * random.random(),
                "time/step": 0.3 + wait,
                "time/wait_batch": wait,
                "time/train": 0.28,
                "sync/seconds": 0.02 + 0.01 * random.random(),
                "idle/trainer": wait / (0.3 + wait),
                "idle/generator": 0.2 + 0.2 * random.random(),
            }
        )
    return rows


def timeline(steps: int, random: Random, start: float = 1.8e9) -> list[dict[str, Any]]:
    spans: list[dict[str, Any]] = []

    def add(role: str, name: str, begin: float, end: float, version: int | None) -> None:
        spans.append({"role": role, "name": name, "begin": begin, "end": end, "version": version})

    now = start
    for step in range(steps):
        wait = 0.2 * random.random()
        add("trainer", "wait", now, now + wait, None)
        add("trainer", "stage", now + wait, now + wait + 0.01, step)
        add("trainer", "train", now + wait + 0.01, now + wait + 0.3, step)
        done = now + wait + 0.3
        add("sync", "push", done, done + 0.015, step + 1)
        for replica in range(2):
            pulled = done + 0.015 + 0.01 * random.random()
            add(f"generator{replica}", "decode", now + 0.05 * random.random(), pulled - 0.001, step)
            add("sync", "pull", done + 0.015, pulled, step + 1)
            add(f"generator{replica}", "swap", pulled, pulled + 0.002, step + 1)
            begin = now + 0.3 * random.random()
            add(f"worker{replica}", "score", begin, begin + 0.05 * random.random(), None)
        if step % 10 == 9:
            add("trainer", "checkpoint", done, done + 0.2, step + 1)
            add("evaluator", "evaluate", done + 0.05, done + 0.9, step + 1)
            done += 0.2
        now = done
    return spans


def rollout(step: int, rank: str, random: Random) -> dict[str, Any]:
    prompt, first, seen, second = 6, 14, 4, 10
    lengths = [("prompt", prompt), ("action", first), ("observation", seen), ("action", second)]
    turns, mask, at = [], [], 0
    for kind, length in lengths:
        acted = kind == "action"
        finish = ("stop" if rank == "best" else "length") if acted else None
        turns.append({"kind": kind, "start": at, "end": at + length, "finish": finish, "reward": 0.5 * acted})
        mask += [acted] * length
        at += length
    pieces = [random.choice(PIECES) for _ in mask]
    versions = [(max(0, step - 1 + (i > 15))) if drawn else -1 for i, drawn in enumerate(mask)]
    return {
        "step": step,
        "ticket": 16 * step + 3,
        "row": random.randrange(10000),
        "rank": rank,
        "reward": 1.0 if rank == "best" else 0.0,
        "parts": {"correct": 1.0 if rank == "best" else 0.0, "format": 0.5},
        "turns": turns,
        "pieces": pieces,
        "tokens": [PIECES.index(piece) for piece in pieces],
        "mask": mask,
        "logprobs": [-3.5 * random.random() if drawn else 0.0 for drawn in mask],
        "versions": versions,
    }


def lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def config(steps: int) -> dict[str, Any]:
    return {
        "type": "Config",
        "model": "model-folder",
        "steps": steps,
        "seed": 0,
        "group_size": 16,
        "loss": {"type": "DIS", "low": 0.8, "high": 1.28},
        "buffer": {"type": "BufferConfig", "groups_per_step": 16, "max_staleness": 5, "order": "oldest"},
        "generator": {"type": "GeneratorConfig", "replicas": 2, "engine": {"type": "NativeEngine", "slots": 64}},
        "trainer": {"type": "TrainerConfig", "lr": 0.0005, "backend": {"type": "HfBackend"}},
    }


def make_run(folder: Path, *, steps: int = 40, seed: int = 0) -> Path:
    """A finished run with every file. Two of its rollouts try to take over a page and a terminal."""
    random = Random(seed)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config(steps)))
    lines(folder / "metrics.jsonl", metrics(steps, random))
    lines(folder / "timeline.jsonl", timeline(steps, random))
    rollouts = [rollout(step, rank, random) for step in range(steps) for rank in ("best", "worst")]
    rollouts[0]["pieces"][8], rollouts[1]["pieces"][8] = EVIL, CONTROL
    rollouts[0]["parts"] = {EVIL: 1.0}
    lines(folder / "rollouts.jsonl", rollouts)
    evals = [
        {"version": v, "eval/reward": 0.3 + 0.6 * v / steps, "eval/pass@1": 0.2 + 0.7 * v / steps, "eval/rows": 64.0}
        for v in range(0, steps + 1, 10)
    ]
    lines(folder / "evals.jsonl", evals)
    summary = {
        "status": "done",
        "reason": "",
        "reward_first5": 0.28,
        "reward_last10": 0.93,
        "steps": steps,
        "wall_seconds": 24.0,
    }
    summary |= {"loop_seconds": 16.1, "idle_trainer": 0.12, "idle_generator": 0.3, "dropped": 3}
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder
