"""Evaluate a model on a task's held-out rows, greedy and sampled, on any engine.

`python -m recipes.evaluate outputs/x` takes model, task and sampling from a run; `--model some/folder task:addition`
names them. Prints pass@k and leaves `eval.json` and every completion in `completions.jsonl`.
"""

from __future__ import annotations

import asyncio
import json
import math
import sys
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from actors import Sampling, command_line
from actors.checkpoint import MODEL, Checkpoints
from actors.checks import check_engine, check_model, check_task, context_of, held_out, resolve_sampling
from actors.config import GeneratorConfig, RolloutConfig, TrainerConfig
from actors.evaluation import evaluate, figures
from actors.generator import Generator
from actors.mesh import Meshes
from actors.output import default_folder
from actors.placement import plan
from actors.player import Play
from actors.rollout import RolloutWorker
from actors.run import wait
from actors.settings import plain, restore
from actors.tokenizer import Tokenizer
from actors.types import Judged, require
from recipes.grpo_async import Tasks, of_task
from recipes.tasks.addition import Addition


@dataclass(frozen=True, kw_only=True)
class Config:
    """Evaluate a model on held-out rows. The folder of a run as the first argument gives the defaults."""

    model: str | None = None
    """Local Hugging Face folder, such as the `model` that a run left. A tiny task has its own."""
    task: Tasks = field(default_factory=Addition)
    """Whose held-out rows."""
    rows: int = 200
    """Held-out rows, the first ones."""
    samples: int = 8
    """Sampled completions per row, at --sampling.temperature; 0 is none."""
    greedy: bool = True
    """One greedy completion per row as well."""
    seed: int = 0
    """Of every completion."""
    output_dir: Path | None = None
    """Folder for `eval.json` and `completions.jsonl`. A new one under outputs/ unless given."""
    solved: float = 0.5
    """Reward from which on a completion counts as right in pass@k."""
    gpus: int = 0
    """Devices of this host; 0 runs on CPU."""
    sampling: Sampling = field(default_factory=Sampling)
    """How completions are drawn."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)

    def __post_init__(self) -> None:
        require("config", 1, rows=self.rows)
        require("config", 0, samples=self.samples, gpus=self.gpus)


async def run(config: Config) -> dict[str, Any]:
    """Start generators and workers, judge every row, leave the output folder; returns the figures."""
    model, sampling = of_task(config.task, config.model, config.sampling)
    sampling = resolve_sampling(sampling, config.generator)
    check_model(model, sampling)
    check_engine(config.generator)
    assert model is not None
    check_task(config.task, model, sampling, config.generator)
    rows, output = min(config.rows, held_out(config.task)), config.output_dir or default_folder("evaluate")
    if not rows:
        raise ValueError("the task keeps no rows from training: give it some (--task.held-out)")
    if output.exists() and any(output.iterdir()):
        raise FileExistsError(f"{output} is not empty: choose another --output-dir")
    placement = plan(config.generator, TrainerConfig(), config.rollout, gpus=config.gpus)
    play = Play(
        task=config.task,
        model=model,
        sampling=sampling,
        group_size=1,
        seed=config.seed,
        folder="",
        timeout=config.rollout.timeout,
        context=context_of(config.generator),
        most=1,
    )
    passes = [("greedy", 1, replace(sampling, temperature=0.0))] if config.greedy else []
    passes += [("sampled", config.samples, sampling)] if config.samples else []
    judged: dict[str, list[Judged]] = {}
    async with AsyncExitStack() as stack:
        meshes = await stack.enter_async_context(Meshes())
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        watch = tasks.create_task(meshes.watch())
        generators = [
            meshes.spawn(spot).spawn(spot.name, Generator, config.generator, model, 1, spot.device)
            for spot in placement.generators
        ]
        leads = [generator.slice(ranks=0) for generator in generators]
        workers = meshes.spawn(placement.workers).spawn("worker", RolloutWorker, play, None, leads)
        await asyncio.gather(*(wait(generator.setup.call()) for generator in generators))
        for generator, lead in zip(generators, leads, strict=True):
            followers = [generator.slice(ranks=rank) for rank in range(1, config.generator.tp)]
            tasks.create_task(wait(lead.run.call_one(followers)))
        for name, samples, how in passes:
            judged[name] = await evaluate(workers, leads, rows=rows, version=0, samples=samples, sampling=how)
        await asyncio.gather(*(wait(generator.close.call()) for generator in generators))
        watch.cancel()
    failures = [failure for rows in judged.values() for row in rows for failure in row.failures]
    if not any(row.rollouts for rows in judged.values() for row in rows):
        raise RuntimeError(f"none of {len(failures)} rollouts got a reward; the first: {failures[0]}")
    found = {
        name: {
            figure: value
            for figure, value in figures(judged[name], samples, config.solved).items()
            if math.isfinite(value)
        }
        for name, samples, _ in passes
    }
    output.mkdir(parents=True, exist_ok=True)
    (output / "eval.json").write_text(json.dumps({"settings": plain(config), **found}, indent=2) + "\n")
    with (output / "completions.jsonl").open("w") as file:
        for line in completions(judged, Tokenizer.load(model)):
            file.write(json.dumps(line) + "\n")
    return {"output": str(output), **found}


def completions(judged: dict[str, list[Judged]], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """One record for each rollout: the texts of its turns and what it got."""
    return [
        {
            "pass": name,
            "row": row.row,
            "turns": [
                {"kind": turn.kind, "text": tokenizer.decode(rollout.tokens[turn.start : turn.end])}
                for turn in rollout.turns
            ],
            "reward": rollout.reward,
            "parts": dict(rollout.parts),
        }
        for name, rows in judged.items()
        for row in rows
        for rollout in row.rollouts
    ]


def show(found: dict[str, Any]) -> None:
    """The figures as a table."""
    passes = [name for name in ("greedy", "sampled") if name in found]
    table = Table("", *passes, title=f"written to {found['output']}", title_style="")
    for name in dict.fromkeys(name for one in passes for name in found[one]):
        values = [found[one].get(name) for one in passes]
        table.add_row(name.removeprefix("eval/"), *("" if value is None else f"{value:.3f}" for value in values))
    Console(highlight=False).print(table)


def of_run(folder: Path) -> Config:
    """Defaults from what a run left: its last model, or the newest checkpoint's, its task and how it sampled.

    Raises:
        ValueError, OSError: it is not the folder of a run of a task that is known here, or has no model yet.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder} is not the folder of a run: it has no config.json")
    settings = json.loads(path.read_text())
    newest = Checkpoints(folder / "checkpoints", keep=1).newest()
    ended = newest is None or any((folder / MODEL).glob("*.safetensors"))
    model = folder / MODEL if ended or newest is None else newest / MODEL
    parts: dict[str, Any] = {
        "task": Tasks,
        "sampling": Sampling,
        "generator": GeneratorConfig,
        "rollout": RolloutConfig,
    }
    return Config(model=str(model), **{name: restore(hint, settings.get(name)) for name, hint in parts.items()})


def main() -> None:
    """Entry point of `python -m recipes.evaluate`."""
    default = None
    if len(sys.argv) > 1 and not sys.argv[1].startswith("-") and ":" not in sys.argv[1]:
        try:
            default = of_run(Path(sys.argv.pop(1)))
        except (ValueError, OSError) as error:
            sys.exit(f"evaluate: {error}")
    command_line(Config, run, show, default=default)


if __name__ == "__main__":
    main()
