"""From the settings as typed to settings that can work: what others decide is filled in, the rest is refused."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from actors.config import GeneratorConfig, NativeEngine, RunConfig, Sampling, VllmEngine
from actors.environment import Checked, HeldOut, Task
from actors.placement import Placement, plan
from actors.tickets import admission
from actors.tokenizer import Tokenizer
from losses.inputs import ReadsReference, ReadsTeacher, WholeGroups, reads

if TYPE_CHECKING:
    from losses.inputs import Objective

DEFAULT_TOKENS = 256
"""Most tokens of a completion where neither a setting, nor the task, nor the engine's context says it."""


def resolve(config: RunConfig) -> RunConfig:
    """Fill in what other settings decide.

    Synchronous training (`max_staleness` 0) runs the engine deterministically, with one slot per member of a step, so
    that it repeats to the bit.
    """
    sampling = resolve_sampling(config.sampling, config.generator)
    config = replace(config, sampling=sampling)
    engine, p = config.generator.engine, config.buffer.groups_per_step
    if config.buffer.max_staleness == 0 and isinstance(engine, NativeEngine):
        per_replica = -(-p // config.generator.replicas) * config.drawn
        engine = replace(engine, deterministic=True, slots=per_replica)
    return replace(config, generator=replace(config.generator, engine=engine))


def context_of(generator: GeneratorConfig) -> int | None:
    """Most tokens of one rollout that the engine has room for; None is no bound."""
    return generator.engine.max_length if isinstance(generator.engine, NativeEngine | VllmEngine) else None


def resolve_sampling(sampling: Sampling, generator: GeneratorConfig) -> Sampling:
    """Without a limit from flag or task a completion gets half of the engine's context.

    Raises:
        ValueError: no prompt would fit beside it.
    """
    context = context_of(generator)
    tokens = sampling.max_tokens or (DEFAULT_TOKENS if context is None else context // 2)
    if context is not None and tokens >= context:
        raise ValueError(
            f"--sampling.max-tokens {tokens} leaves no room for a prompt in the engine's context of {context}: raise "
            "--generator.engine.max-length"
        )
    return replace(sampling, max_tokens=tokens)


def check_task(task: Task, model: str, sampling: Sampling, generator: GeneratorConfig) -> None:
    """Let the task look for what would fail later; raises as `Checked.check`."""
    if isinstance(task, Checked):
        context = context_of(generator)
        task.check(model, None if context is None else context - sampling.max_tokens)


def check_model(model: str | None, sampling: Sampling, flag: str = "--model") -> list[Path]:
    """Refuse a folder, given as `flag`, that cannot be used; returns its files of weights.

    Raises:
        ValueError, OSError: there is no such folder, or it lacks weights, a tokenizer, an end token.
    """
    if model is None:
        raise ValueError("this task has no model of its own: give --model, a local Hugging Face folder")
    if not Path(model).is_dir():
        raise FileNotFoundError(f"no folder {model!r}: {flag} takes a local Hugging Face folder, not a hub's name")
    files = list(Path(model).glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"no *.safetensors in {model!r}: give {flag} a Hugging Face folder")
    if not (Tokenizer.load(model).eos_ids or sampling.stop):
        raise ValueError(
            f"{model!r} names no end token, so no completion would stop: give its generation_config.json an "
            "eos_token_id, or give --sampling.stop"
        )
    return files


def check_filter(config: RunConfig) -> None:
    """Raises ValueError if a filter cannot work with the other settings."""
    chosen, most = config.filter, config.sampling.max_tokens
    if config.group_size == 1 and chosen.on_truncated == "bootstrap":
        raise ValueError("--filter.on-truncated bootstrap needs other rollouts of the prompt: raise --group-size")
    if config.group_size == 1 and chosen.oversample > 1:
        raise ValueError("--filter.oversample keeps right and wrong rollouts of a prompt: raise --group-size")
    if chosen.overlong_cache > most:
        raise ValueError(
            f"--filter.overlong-cache {chosen.overlong_cache} is more than --sampling.max-tokens {most}: lower it"
        )


def check_engine(generator: GeneratorConfig) -> None:
    """Refuse an engine whose library is not there.

    Raises:
        ValueError: it is not installed.
    """
    if isinstance(generator.engine, VllmEngine) and importlib.util.find_spec("vllm") is None:
        raise ValueError(
            "generator.engine:vllm needs vLLM: pip install -e '.[vllm]' for GPUs, make install-all for CPU, or use "
            "generator.engine:native"
        )


def check(config: RunConfig, task: Task) -> tuple[Placement, int]:
    """Refuse what cannot work before anything starts; returns the placement and the bytes of shared files needed.

    Raises:
        ValueError, OSError: settings contradict each other, do not fit the machine, or name files that are not there.
    """
    files = check_model(config.model, config.sampling)
    assert config.model is not None
    check_engine(config.generator)
    if config.buffer.max_staleness == 0 and isinstance(config.generator.engine, VllmEngine):
        raise ValueError(
            "--buffer.max-staleness 0 repeats to the bit and generator.engine:vllm does not: use "
            "generator.engine:native, or --buffer.max-staleness 1"
        )
    check_task(task, config.model, config.sampling, config.generator)
    if task.rows is not None and task.rows < 1:
        raise ValueError(f"the task has {task.rows} rows to train on: give it at least one")
    if config.epochs is not None and task.rows is None:
        raise ValueError("--epochs needs rows that can be counted, and this task is an endless stream: leave it out")
    if config.eval.every and held_out(task) < 1:
        raise ValueError(
            "--eval.every needs held-out rows and this task keeps none: give it some (--task.held-out), or the class "
            "held_out_rows and held_out_row(i)"
        )
    check_filter(config)
    needed = config.trainer.ranks + (config.generator.replicas + (config.eval.every > 0)) * config.generator.tp
    if 0 < config.gpus < needed:
        raise ValueError(f"--gpus {config.gpus}: trainer and generators need {needed} devices in all")
    placement = plan(
        config.generator, config.trainer, config.rollout, evaluator=config.eval.every > 0, gpus=config.gpus
    )
    tickets = admission(config.buffer) or 16 * config.buffer.groups_per_step
    room = 4 * sum(f.stat().st_size for f in files) + tickets * config.group_size * config.sampling.max_tokens * 64
    return placement, room


def check_objective(config: RunConfig, loss: Objective) -> None:
    """Refuse settings that the objective contradicts.

    Raises:
        ValueError, OSError: a model to compare with is missing, or given for nothing; the denominator does not fit;
            single rollouts would be compared with nothing.
    """
    trainer = config.trainer
    for name, mark in (("reference", ReadsReference), ("teacher", ReadsTeacher)):
        folder = vars(trainer)[name]
        if not reads(loss, mark):
            if folder is not None:
                raise ValueError(f"--trainer.{name} is given, but the objective compares with no {name}: leave it out")
        elif folder is None and mark is ReadsTeacher:
            raise ValueError("the objective learns from a teacher: give its folder as --trainer.teacher")
        elif folder is not None:
            check_model(folder, config.sampling, f"--trainer.{name}")
            assert config.model is not None
            vocabulary = Tokenizer.load(config.model).inner.get_vocab()
            if Tokenizer.load(folder).inner.get_vocab() != vocabulary:
                raise ValueError(f"--trainer.{name} {folder} has another vocabulary than --model {config.model}")
            rows, most = (
                json.loads((Path(folder) / "config.json").read_text()).get("vocab_size"),
                max(vocabulary.values()),
            )
            if rows is not None and rows <= most:
                raise ValueError(
                    f"--trainer.{name} {folder} knows {rows} tokens, and its tokenizer gives up to {most}"
                )
    if reads(loss, WholeGroups) and trainer.denominator != "sequences":
        raise ValueError(
            f"--trainer.denominator {trainer.denominator} would weigh pairs by length: this objective compares whole "
            "rollouts, use sequences"
        )
    if config.group_size == 1:
        if config.buffer.zero_variance != "keep":
            raise ValueError(
                "--group-size 1 leaves no variance in a group, and --buffer.zero-variance "
                f"{config.buffer.zero_variance} would drop all: use keep"
            )
        if reads(loss, WholeGroups):
            raise ValueError("--group-size 1 leaves nothing to compare within a group, as this objective does")


def held_out(task: Task) -> int:
    """Rows that a task keeps for evaluation."""
    return task.held_out_rows if isinstance(task, HeldOut) else 0
