"""Two FSDP2 ranks over gloo against one rank, and the actor in real Monarch processes."""

from __future__ import annotations

import asyncio
import json
import math
import os
import subprocess
import sys
import threading
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from monarch.actor import this_host
from monarch.spmd import setup_torch_elastic_env_async
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

from actors.batching import plan
from actors.config import SyncConfig, TrainerConfig
from actors.saving import CheckpointWriter, Saver, load
from actors.trainer import Trainer
from actors.training import Training
from actors.types import Probe, Rollout, StepReport, Taken
from actors.weights import Part, WeightIndex, layout
from losses import DIS, PPOClip, group_mean
from losses.inputs import Objective
from tests.actors.models import save_tiny
from tests.actors.training_data import Kept, one_prompt, rollout, store, with_kept

WIDE = DIS(low=0.0, high=math.inf)


def uneven(seed: int = 0) -> list[list[Rollout]]:
    rng = np.random.default_rng(seed)
    lengths = [[40, 5, 7], [12, 9], [30, 4, 6, 8], [22, 23], [5, 6]]
    return [one_prompt([rollout(rng, n, 3, 0) for n in members]) for members in lengths]


def one_dead_rank() -> list[list[Rollout]]:
    """The longest rollout goes alone to rank 0, and none of its tokens counts."""
    rng = np.random.default_rng(1)
    dead = rollout(rng, 30, 3, 0)
    dead = replace(dead, logprobs=np.where(dead.mask, np.nan, 0).astype(np.float32))
    return [[dead, rollout(rng, 8, 3, 0), rollout(rng, 9, 3, 0)]]


def one_rollout() -> list[list[Rollout]]:
    """Rank 1 has padding only; the second group's advantage is what its rollouts differ by."""
    rng = np.random.default_rng(2)
    return [[rollout(rng, 2, 2, 0), replace(rollout(rng, 20, 3, 0), reward=5.0)]]


def some_kept() -> list[list[Rollout]]:
    """Every other group has kept sets."""
    rng = np.random.default_rng(3)
    return [[with_kept(rng, r) for r in group] if i % 2 else group for i, group in enumerate(uneven(4))]


# Microbatches of 26 entries: the ranks of `uneven` need different numbers of them.
CASES: dict[str, tuple[list[list[Rollout]], Objective, dict[str, Any]]] = {
    "uneven": (uneven(), DIS(), {"microbatch_tokens": 26}),
    "old pass": (uneven(3), PPOClip(), {"updates_per_step": 2}),
    "dead rank": (one_dead_rank(), WIDE, {}),
    "one rollout": (one_rollout(), WIDE, {"denominator": "sequences"}),
    "kept sets": (some_kept(), WIDE, {"microbatch_tokens": 26}),
}
STEPS = 3


def train(folder: str, case: str, ranks: int, rank: int, mesh: Any) -> None:
    """Three steps with a probe of version 0 in each; leaves reports, saved weights and index parts in the folder."""
    from actors.backends.hf import HfModel

    _, objective, settings = CASES[case]
    config = TrainerConfig(**{"ranks": ranks, "lr": 1e-3, "warmup_steps": 1, **settings})
    backend = HfModel(f"{folder}/model", config.dtype, torch.device("cpu"), mesh)
    training = Training(config, backend, objective, group_mean, Kept(backend), total_steps=10, rank=rank)
    with open(f"{folder}/{case}.taken", "rb") as file:
        taken: Taken = torch.load(file, weights_only=False)  # our own file, written by the parent
    probe = Probe(version=0, handle=taken.groups[0].handle)
    reports = [training.step(replace(taken, step=step), probe) for step in range(STEPS)]
    parts, _ = layout(backend.shards(), rank, "float32")
    out = f"{folder}/{case}-{ranks}-{rank}"
    Path(f"{out}.json").write_text(json.dumps([asdict(r) for r in reports]))
    torch.save(parts, f"{out}.parts")
    training.backend.save(f"{folder}/{case}-{ranks}")


def training_of(folder: str, ranks: int, rank: int, mesh: Any, version: int = 0) -> tuple[Training, Taken]:
    """For checkpoints: the case with two updates a step."""
    from actors.backends.hf import HfModel

    config = TrainerConfig(ranks=ranks, lr=1e-3, warmup_steps=1, updates_per_step=2)
    backend = HfModel(f"{folder}/model", config.dtype, torch.device("cpu"), mesh)
    with open(f"{folder}/old pass.taken", "rb") as file:
        taken: Taken = torch.load(file, weights_only=False)  # our own file, written by the parent
    kept = Kept(backend)
    return Training(config, backend, PPOClip(), group_mean, kept, total_steps=10, version=version, rank=rank), taken


def whole(training: Training) -> dict[str, torch.Tensor]:
    """All of the state but the random one, gathered from all ranks."""
    return {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()
        for name, tensor in training.state().items()
        if not name.startswith("rng/")
    }


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    assert one.keys() == other.keys()
    return all(tensor.equal(other[name]) for name, tensor in one.items())


def save_and_resume(folder: str, rank: int, mesh: Any) -> None:
    """Two ranks: a checkpoint written while training goes on, resumed to the same bits; and one of a single rank."""
    group = torch.distributed.new_group(backend="gloo")
    training, taken = training_of(folder, 2, rank, mesh)
    for step in range(2):
        training.step(replace(taken, step=step))
    saver = Saver(folder, training, group)
    saver.copy()
    second = whole(training)
    writing = threading.Thread(target=saver.write, args=(Path(f"{folder}/two"),))
    writing.start()
    for step in range(2, 4):
        training.step(replace(taken, step=step))
    writing.join()
    fourth = whole(training)
    torch.distributed.barrier(group)

    again, _ = training_of(folder, 2, rank, mesh, version=2)
    state = again.state()
    load(state, Path(f"{folder}/two/trainer"), group)
    again.load_state(state)
    assert same(whole(again), second) and not same(second, fourth)
    for step in range(2, 4):
        again.step(replace(taken, step=step))
    assert same(whole(again), fourth)

    from_one, _ = training_of(folder, 2, rank, mesh, version=1)
    state = from_one.state()
    load(state, Path(f"{folder}/one/trainer"), group)
    from_one.load_state(state)
    found = whole(from_one)
    if rank == 0:
        assert same(found, load_file(f"{folder}/one.state"))
        save_file({name: tensor.contiguous() for name, tensor in second.items()}, f"{folder}/two.state")


def rank_main(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    for case in CASES:
        train(folder, case, 2, rank, mesh)
    save_and_resume(folder, rank, mesh)
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    save_tiny(folder / "model", "qwen3_tied")
    for case, (groups, _, _) in CASES.items():
        (folder / f"{case} payloads").mkdir()
        torch.save(store(groups, str(folder / f"{case} payloads")), folder / f"{case}.taken")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    training, taken = training_of(str(folder), 1, 0, None)
    training.step(taken)
    saver = Saver(str(folder), training, None)
    saver.copy()
    saver.write(folder / "one")
    save_file(whole(training), folder / "one.state")
    torch.multiprocessing.spawn(rank_main, (str(folder),), nprocs=2)
    for case in CASES:
        train(str(folder), case, 1, 0, None)
    torch.set_num_threads(threads)
    return folder


def reports_of(folder: Path, case: str, ranks: int, rank: int) -> list[dict[str, Any]]:
    loaded: list[dict[str, Any]] = json.loads((folder / f"{case}-{ranks}-{rank}.json").read_text())
    return loaded


GLOBAL = [
    "loss",
    "grad_norm",
    "entropy",
    "lag_kl",
    "ratio",
    "masked",
    "ratio_max",
    "engine_gap_mean",
    "engine_gap_max",
]


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_equal_one(trained: Path, case: str) -> None:
    (one,) = (reports_of(trained, case, 1, 0),)
    two = [reports_of(trained, case, 2, rank) for rank in (0, 1)]
    names = [f"policy/{n}" for n in GLOBAL] + ["staleness/mean", "staleness/max", "perf/trained_tokens"]
    for step in range(STEPS):
        alone, first, second = (r[step]["metrics"] for r in (one, *two))
        for name in names:
            assert first[name] == second[name], f"{name} differs between ranks"
            assert first[name] == pytest.approx(alone[name], rel=1e-4, abs=1e-6), f"{name} at step {step}"
        assert one[step]["tokens"] == two[0][step]["tokens"] + two[1][step]["tokens"] == alone["perf/trained_tokens"]
        assert one[step]["rollouts"] == two[0][step]["rollouts"] + two[1][step]["rollouts"]
        assert sorted(two[0][step]["tickets"] + two[1][step]["tickets"]) == one[step]["tickets"]


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_end_with_the_weights_of_one(trained: Path, case: str) -> None:
    """To rounding: AdamW divides by the gradient's own size, so rounding of tiny gradients shows as parts of 1e-3."""
    start = load_file(trained / "model" / "model.safetensors")
    one, two = (load_file(trained / f"{case}-{ranks}" / "model.safetensors") for ranks in (1, 2))
    assert one.keys() == two.keys() == start.keys()
    for name in one:
        moved = (one[name] - start[name]).abs().max()
        apart = (one[name] - two[name]).abs()
        assert moved > 1e-4, name
        assert apart.max() < 0.05 * moved and apart.mean() < 1e-4 * moved, f"{name}: {apart.max()} of {moved}"


def test_the_cases_are_what_they_say(trained: Path) -> None:
    taken = torch.load(trained / "uneven.taken", weights_only=False)
    (update,) = plan(taken, ranks=2, updates=1, microbatch_tokens=26)
    counts = [sum(bool(piece) for piece in pieces) for pieces in update]
    assert counts[0] != counts[1], "the ranks must need different numbers of microbatches"
    assert all(len({m.group for piece in pieces for m in piece}) > 1 for pieces in update), "the batch must be split"
    assert [reports_of(trained, "dead rank", 2, rank)[0]["tokens"] for rank in (0, 1)] == [0, 11]
    assert reports_of(trained, "one rollout", 2, 0)[0]["rollouts"] == 1


def test_shards_of_both_ranks_tile_every_tensor(trained: Path) -> None:
    parts: list[Part] = []
    for rank in (0, 1):
        parts += torch.load(trained / f"uneven-2-{rank}.parts", weights_only=False)
    index = WeightIndex(tuple(parts), {0: 0, 1: 0})  # raises on holes and overlaps
    assert index.by_name().keys() == load_file(trained / "model" / "model.safetensors").keys()


def test_one_rank_reads_what_two_wrote_and_so_does_transformers(trained: Path) -> None:
    """The ranks themselves have compared what they resumed from with what they went on to."""
    training, _ = training_of(str(trained), 1, 0, None, version=2)
    state = training.state()
    load(state, trained / "two" / "trainer", None)
    training.load_state(state)
    want = load_file(trained / "two.state")
    assert same(whole(training), want)
    exported = load_file(trained / "two" / "model" / "model.safetensors")
    assert same(exported, {n.removeprefix("weight/"): t for n, t in want.items() if n.startswith("weight/")})


def test_a_missing_file_of_a_rank_is_no_hole(trained: Path, tmp_path: Path) -> None:
    files = sorted((trained / "two" / "trainer").iterdir())
    assert len(files) == 2
    for file in files:
        os.link(file, tmp_path / file.name)
    for file in files:
        os.unlink(tmp_path / file.name)
        with pytest.raises(ValueError, match=r"a rank's file is missing|Size mismatch|Missing key"):
            load(training_of(str(trained), 1, 0, None, version=2)[0].state(), tmp_path, None)
        os.link(file, tmp_path / file.name)


def test_the_actor_is_spawned_without_torch() -> None:
    """A controller that only spawns trainers and their writers imports neither torch nor transformers."""
    code = (
        "import sys, actors.saving, actors.trainer; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.slow
def test_the_actor_trains_in_two_processes(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With real staging slots, against one rank without the actor; the probe at step 1 reads the slot of version 0."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    groups, objective, settings = CASES["uneven"]
    taken = store(groups, str(tmp_path))
    config = TrainerConfig(**{"ranks": 2, "lr": 1e-3, "warmup_steps": 1, **settings})

    async def run() -> list[list[StepReport]]:
        procs = this_host().spawn_procs(per_host={"ranks": 2})
        try:
            await setup_torch_elastic_env_async(procs)
            trainer = procs.spawn("trainer", Trainer, config, SyncConfig(), str(tmp_path))
            await trainer.setup.call(str(trained / "model"), objective, group_mean, 10)
            probe = Probe(version=0, handle=taken.groups[0].handle)
            writer = procs.spawn("writer", CheckpointWriter, str(tmp_path))
            steps = [await trainer.step.call(replace(taken, step=step), probe) for step in range(2)]
            await trainer.checkpoint.call()
            (tmp_path / "step").mkdir()
            writing = writer.write.call(str(tmp_path / "step"))
            third = await trainer.step.call(replace(taken, step=2))
            await writing
            await trainer.save.call(str(tmp_path / "saved"))
            # One rank goes on from what two wrote.
            (tmp_path / "again").mkdir()
            alone = replace(config, ranks=1)
            again = procs.slice(ranks=0).spawn("again", Trainer, alone, SyncConfig(), str(tmp_path / "again"))
            folder = str(tmp_path / "step" / "trainer")
            await again.setup.call(str(trained / "model"), objective, group_mean, 10, 2, folder)
            await again.save.call(str(tmp_path / "saved again"))
            resumed = await again.step.call_one(replace(taken, step=2))
            for report in third.values():
                for name in ("policy/loss", "policy/grad_norm", "policy/lr"):
                    assert report.metrics[name] == pytest.approx(resumed.metrics[name], rel=1e-4, abs=1e-6), name
            await trainer.close.call()
            return [list(reports.values()) for reports in steps]
        finally:
            await procs.stop()

    for step, (first, second) in enumerate(asyncio.run(run())):
        one = reports_of(trained, "uneven", 1, 0)[step]
        for name in ("policy/loss", "policy/grad_norm", "policy/engine_gap_mean"):
            assert first.metrics[name] == second.metrics[name], name
            assert first.metrics[name] == pytest.approx(one["metrics"][name], rel=1e-4, abs=1e-6), name
        assert first.tokens + second.tokens == one["tokens"] and min(first.tokens, second.tokens) > 0
    start = load_file(trained / "model" / "model.safetensors")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert saved.keys() == start.keys() and all((saved[n] - start[n]).abs().max() > 1e-4 for n in start)
    exported = load_file(tmp_path / "step" / "model" / "model.safetensors")
    assert same(load_file(tmp_path / "saved again" / "model.safetensors"), exported)
    assert exported.keys() == saved.keys() and not same(exported, saved)
