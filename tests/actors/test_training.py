"""The trainer's step on one rank: gradients against a naive float64 model, invariances, metrics, staging, saving."""

from __future__ import annotations

import logging
import math
import os
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma2Config, Gemma2ForCausalLM

from actors.backends.hf import HfModel
from actors.config import TrainerConfig
from actors.saving import Saver, load
from actors.training import Training, learning_rate
from actors.types import Probe, Rollout, Taken
from losses import DIS, Corrected, Corrections, LossInputs, PolicyGradient, PPOClip, Terms, group_mean, group_norm
from losses.inputs import Objective
from tests.actors.models import save_tiny
from tests.actors.training_data import Kept, one_prompt, rollout, store

CPU = torch.device("cpu")
WIDE = DIS(low=0.0, high=math.inf)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def trainer(
    model: str, objective: Objective = WIDE, advantage: Any = group_mean, version: int = 0, **settings: Any
) -> Training:
    backend = HfModel(model, "float32", CPU)
    config = TrainerConfig(**{"warmup_steps": 1, "lr": 1e-3, **settings})
    return Training(config, backend, objective, advantage, Kept(backend), total_steps=10, version=version)


def random_groups(seed: int = 0, version: int = 0, temperature: float = 1.0) -> list[list[Rollout]]:
    """The members of two groups share their prompt; those of the other two have one each."""
    rng = np.random.default_rng(seed)
    groups = [
        [rollout(rng, int(rng.integers(4, 30)), 3, version, temperature) for _ in range(int(rng.integers(2, 5)))]
        for _ in range(4)
    ]
    return [one_prompt(group) for group in groups[:2]] + groups[2:]


def captured(training: Training, taken: Taken, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Tensor], Any]:
    """Gradients as the optimizer would see them, and the report."""
    seen: dict[str, Tensor] = {}

    def keep() -> None:
        seen.update({n: p.grad.clone() for n, p in training.parameters.items() if p.grad is not None})

    monkeypatch.setattr(training.optimizer, "step", keep)
    return seen, training.step(taken)


def naive(folder: str, taken_groups: list[list[Rollout]], denominator: str) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients in float64 with transformers' own attention, one rollout at a time; IS, mean baseline."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    total, tokens = torch.zeros((), dtype=torch.float64), 0
    for group in taken_groups:
        mean = sum(r.reward for r in group) / len(group)
        for r in group:
            ids = torch.from_numpy(r.tokens.astype(np.int64))
            logits = model(ids[None]).logits[0, :-1] / r.sampling.temperature
            places = [t for t in range(1, len(ids)) if r.mask[t]]
            share = len(places) if denominator == "rollout_means" else 1
            for t in places:
                ratio = (logits[t - 1].log_softmax(-1)[ids[t]] - float(r.logprobs[t])).exp()
                total = total - ratio.detach() * (r.reward - mean) * logits[t - 1].log_softmax(-1)[ids[t]] / share
                tokens += 1
    loss = total / (tokens if denominator == "tokens" else sum(len(g) for g in taken_groups))
    loss.backward()
    return loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("denominator", ["tokens", "sequences", "rollout_means"])
def test_gradient_equals_a_naive_float64_model(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, denominator: Any
) -> None:
    groups = random_groups(temperature=0.8)
    training = trainer(model, denominator=denominator, microbatch_tokens=60, clip_norm=1e9)
    got, report = captured(training, store(groups, str(tmp_path)), monkeypatch)
    loss, want = naive(model, groups, denominator)
    norm = math.sqrt(sum(float(g.square().sum()) for g in want.values()))
    assert report.metrics["policy/loss"] == pytest.approx(loss, rel=2e-5)
    assert report.metrics["policy/grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert got.keys() == want.keys()
    for name in want:
        torch.testing.assert_close(got[name].double(), want[name], rtol=1e-3, atol=1e-6 * norm, msg=name)


def test_survivors_leave_dropped_tokens_out_of_the_denominator_and_weights_give_their_effective_sample_size(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = random_groups(temperature=0.8)
    taken = store(groups, str(tmp_path))
    narrow = Corrected(base=PolicyGradient(), corrections=Corrections(token_band=(0.9, 1.1)))
    (all_of_them, first), (survivors, second) = (
        captured(trainer(model, narrow, denominator=name, clip_norm=1e9), taken, monkeypatch)
        for name in ("tokens", "survivors")
    )
    kept = 1 - first.metrics["policy/masked"]
    assert 0.01 < kept < 0.99
    for name in all_of_them:
        torch.testing.assert_close(survivors[name], all_of_them[name] / kept, rtol=1e-4, atol=1e-7, msg=name)
    mean, square = second.metrics["policy/weight"], second.metrics["policy/weight_squared"]
    # Weights within 0.9..1.1 on the kept tokens, 0 on the others: about as many tokens as were kept.
    assert second.metrics["policy/ess"] == pytest.approx(mean**2 / square) == pytest.approx(kept, rel=0.01)


def test_microbatches_order_and_packing_change_nothing(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = random_groups(1)
    turned = [group[::-1] for group in groups[::-1]]
    runs = []
    for name, batch, limit in (("a", groups, 8192), ("b", groups, 1), ("c", turned, 50)):
        (tmp_path / name).mkdir()
        training = trainer(model, DIS(), microbatch_tokens=limit)
        runs.append(captured(training, store(batch, str(tmp_path / name)), monkeypatch))
    (want, first), *others = runs
    for got, report in others:
        for key in ("policy/loss", "policy/grad_norm", "policy/entropy", "policy/masked", "policy/lag_kl"):
            assert report.metrics[key] == pytest.approx(first.metrics[key], rel=1e-5), key
        for name in want:
            torch.testing.assert_close(got[name], want[name], rtol=1e-4, atol=1e-7, msg=name)


def test_the_global_norm_is_clipped(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = trainer(model, clip_norm=0.01)
    got, report = captured(training, store(random_groups(), str(tmp_path)), monkeypatch)
    assert report.metrics["policy/grad_norm"] > 0.02
    assert math.sqrt(sum(float(g.double().square().sum()) for g in got.values())) == pytest.approx(0.01, rel=1e-5)


def test_masked_targets_have_no_influence(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A non-finite behaviour logprob at the last token: the same gradient as with that token outside the mask."""
    groups = random_groups(2)
    last = groups[0][0]
    spoiled = np.array([*last.logprobs[:-1], np.nan], np.float32)
    unmasked = replace(last, mask=np.array([*last.mask[:-1], False]))
    runs = []
    for name, r in (("nan", replace(last, logprobs=spoiled)), ("out", unmasked)):
        (tmp_path / name).mkdir()
        taken = store([[r, *groups[0][1:]], *groups[1:]], str(tmp_path / name))
        runs.append(captured(trainer(model), taken, monkeypatch))
    assert runs[0][1].tokens == runs[1][1].tokens == sum(int(r.mask.sum()) for g in groups for r in g) - 1
    for name, gradient in runs[0][0].items():
        assert gradient.equal(runs[1][0][name]), name


def test_two_runs_are_bitwise_equal_and_the_weights_move(model: str, tmp_path: Path) -> None:
    taken = store(random_groups(), str(tmp_path))
    ends = []
    for _ in range(2):
        training = trainer(model, DIS(), group_norm, microbatch_tokens=50)
        start = {n: p.detach().clone() for n, p in training.parameters.items()}
        for step in range(2):
            training.step(replace(taken, step=step))
        ends.append({n: p.detach().clone() for n, p in training.parameters.items()})
        assert all(not start[n].equal(p) for n, p in ends[-1].items())
    assert all(ends[0][n].equal(ends[1][n]) for n in ends[0])


def test_learning_rate_zero_keeps_the_weights_bitwise(model: str, tmp_path: Path) -> None:
    training = trainer(model, lr=0.0)
    start = {n: p.detach().clone() for n, p in training.parameters.items()}
    training.step(store(random_groups(), str(tmp_path)))
    assert all(start[n].equal(p) for n, p in training.parameters.items())


def test_learning_rate_by_hand() -> None:
    """Peak 1, two warm-up updates, ten in all, last at 0.3: 0.5, 1, then from 1 at number 2 to 0.3 at number 9."""
    config = TrainerConfig(lr=1.0, warmup_steps=2, final_lr=0.3)
    rates = [learning_rate(config, update, 10) for update in range(11)]
    assert rates == pytest.approx([0.5, 1.0, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.3])


def test_updates_follow_adamw_with_the_schedule(model: str, tmp_path: Path) -> None:
    """Three steps against AdamW's formula (Loshchilov and Hutter 2019, algorithm 2) on the trainer's own gradients."""
    settings = {"lr": 1e-2, "warmup_steps": 2, "weight_decay": 0.1, "beta1": 0.8, "beta2": 0.9}
    training = trainer(model, **settings)
    name = "model.layers.1.mlp.up_proj.weight"
    value = training.parameters[name].detach().double().clone()
    first, second = torch.zeros_like(value), torch.zeros_like(value)
    original, seen = training.optimizer.step, []

    def watched() -> None:
        seen.append(training.parameters[name].grad.double().clone())  # type: ignore[union-attr]
        original()

    training.optimizer.step = watched  # type: ignore[method-assign, assignment]
    taken = store(random_groups(), str(tmp_path))
    for step in range(3):
        report = training.step(replace(taken, step=step))
        rate = learning_rate(training.config, step, 10)
        assert report.metrics["policy/lr"] == rate
        first = 0.8 * first + 0.2 * seen[-1]
        second = 0.9 * second + 0.1 * seen[-1].square()
        ahead = first / (1 - 0.8 ** (step + 1)) / ((second / (1 - 0.9 ** (step + 1))).sqrt() + 1e-8)
        value = value * (1 - rate * 0.1) - rate * ahead
        torch.testing.assert_close(training.parameters[name].detach().double(), value, rtol=0, atol=2e-6)


def test_an_update_without_a_token_leaves_everything(
    model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    training = trainer(model, weight_decay=0.5)
    start = {n: p.detach().clone() for n, p in training.parameters.items()}
    groups = [[replace(r, logprobs=r.logprobs * np.float32(np.nan)) for r in group] for group in random_groups()]
    with caplog.at_level(logging.WARNING):
        report = training.step(store(groups, str(tmp_path)))
        empty = training.step(replace(store([], str(tmp_path)), step=1))
    assert [r.message for r in caplog.records if "no token of update 0 counts" in r.message] != []
    of_nothing = ("policy/engine_gap", "policy/ratio_p", "policy/masked_age", "policy/lag_pearson", "staleness/")
    for metrics in (report.metrics, empty.metrics):
        assert all(math.isfinite(v) for name, v in metrics.items() if not name.startswith(of_nothing))
    assert report.tokens == empty.tokens == empty.rollouts == 0 and report.rollouts == sum(map(len, groups))
    assert all(start[n].equal(p) for n, p in training.parameters.items())
    assert not training.optimizer.state


def test_a_gradient_that_is_not_finite_names_step_and_tensor(model: str, tmp_path: Path) -> None:
    training = trainer(model)
    start = {n: p.detach().clone() for n, p in training.parameters.items()}
    training.parameters["model.layers.1.self_attn.v_proj.weight"].register_hook(lambda g: g * math.nan)
    with pytest.raises(RuntimeError, match=r"step 0: .*first in model.layers.1.self_attn.v_proj.weight"):
        training.step(store(random_groups(), str(tmp_path)))
    assert all(start[n].equal(p) for n, p in training.parameters.items())


def test_a_batch_for_another_version_is_refused(model: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds version 0, the batch is step 3"):
        trainer(model).step(store(random_groups(), str(tmp_path), step=3))


class Constant:
    """Weights every token alike and reports what it saw."""

    def __call__(self, inputs: LossInputs) -> Terms:
        return Terms(
            loss_T=-inputs.logprobs_T, diagnostics_T={"old": inputs.logprobs_T * 0 + (inputs.old_T is not None)}
        )


class ConstantWithOld(PPOClip, Constant):
    __call__ = Constant.__call__


@pytest.mark.parametrize(
    ("objective", "updates", "old"), [(Constant(), 2, 0), (ConstantWithOld(), 1, 0), (ConstantWithOld(), 2, 1)]
)
def test_old_pass_only_where_it_is_read(
    model: str, tmp_path: Path, objective: Objective, updates: int, old: int
) -> None:
    training = trainer(model, objective, updates_per_step=updates)
    report = training.step(store(random_groups(), str(tmp_path)))
    assert report.metrics["policy/old"] == old


def test_old_logprobs_are_those_of_the_start_of_the_step(model: str, tmp_path: Path) -> None:
    """PPO's ratio against the old pass is 1 in the first update, whatever behaviour says, and moves in the second.

    Half of the ratios stay 1; with a large rate the others move, and the mean ratio with them.
    """
    taken = store(random_groups(), str(tmp_path))
    still = trainer(model, PPOClip(), updates_per_step=2, lr=0.0).step(taken)
    assert still.metrics["policy/ratio"] == pytest.approx(1.0, abs=1e-6)
    assert still.metrics["policy/ratio_max"] > 2
    moved = trainer(model, PPOClip(), updates_per_step=2, lr=1e-2).step(taken)
    assert abs(moved.metrics["policy/ratio"] - 1) > 1e-3
    assert moved.metrics["policy/lag_kl"] == pytest.approx(still.metrics["policy/lag_kl"], rel=1e-6)


def test_metrics_and_accounting_by_hand(model: str, tmp_path: Path) -> None:
    """Versions v - 1 and v in each rollout: staleness 1 for the first half of the actions, 0 for the rest."""
    groups = random_groups(3, version=1)
    training = trainer(model, PolicyGradient())
    training.version = 1
    report = training.step(store(groups, str(tmp_path), step=1))
    rollouts = [r for g in groups for r in g]
    tokens = sum(int(r.mask.sum()) for r in rollouts)
    stale = sum(int((r.versions[r.mask] == 0).sum()) for r in rollouts)
    assert report.tokens == report.metrics["perf/trained_tokens"] == tokens
    assert report.rollouts == len(rollouts)
    assert report.tickets == (100, 101, 102, 103)
    assert report.metrics["staleness/mean"] == pytest.approx(stale / tokens)
    assert report.metrics["staleness/max"] == 1.0
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    ratios, entropies = [], []
    for r in rollouts:
        ids = torch.from_numpy(r.tokens.astype(np.int64))
        log = reference(ids[None]).logits[0, :-1].log_softmax(-1).detach()
        entropies += (-(log.exp() * log).sum(-1))[r.mask[1:]].tolist()
        ratios += (log.gather(1, ids[1:, None])[:, 0] - torch.from_numpy(r.logprobs[1:]))[r.mask[1:]].exp().tolist()
    assert report.metrics["policy/entropy"] == pytest.approx(np.mean(entropies), rel=1e-5)
    assert report.metrics["policy/lag_kl"] == pytest.approx(np.mean([x - 1 - math.log(x) for x in ratios]), rel=1e-4)
    assert report.metrics["policy/ratio_max"] == pytest.approx(max(ratios), rel=1e-4)
    assert report.metrics["policy/ratio"] == pytest.approx(np.mean(ratios), rel=1e-4)


def engine_like(model: str, r: Rollout, version: int, error: float) -> Rollout:
    """The rollout as an exact engine at these weights would give it, plus `error` on every action."""
    weights = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    ids = torch.from_numpy(r.tokens.astype(np.int64))
    log = weights(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0].detach().numpy()
    logprobs = np.where(r.mask, np.concatenate([[0], log]) + error, 0).astype(np.float32)
    return replace(r, logprobs=logprobs, versions=np.where(r.mask, version, -1).astype(np.int32))


def test_the_probe_compares_at_its_own_version(model: str, tmp_path: Path) -> None:
    """Engine off by 0.25 at version 0: the gap is 0.25 on the live weights, and on the staged ones after a step."""
    rng = np.random.default_rng(5)
    probed = [engine_like(model, rollout(rng, n, 2, 0), 0, 0.25) for n in (9, 6)]
    (tmp_path / "probe").mkdir()
    probe = Probe(version=0, handle=store([probed], str(tmp_path / "probe")).groups[0].handle)
    training = trainer(model, lr=1e-2)
    taken = store(random_groups(), str(tmp_path))
    live = training.step(taken, probe).metrics
    before = {n: p.detach().clone() for n, p in training.parameters.items()}
    training.config = replace(training.config, lr=0.0)
    staged = training.step(replace(taken, step=1), probe).metrics
    assert all(before[n].equal(p) for n, p in training.parameters.items()), "the live weights must come back"
    for metrics in (live, staged):
        assert metrics["policy/engine_gap_mean"] == pytest.approx(0.25, abs=1e-5)
        assert metrics["policy/engine_gap_max"] == pytest.approx(0.25, abs=2e-5)
        assert metrics["policy/engine_gap_tokens"] == 7 + 4
    wrong = replace(probe, version=1)
    for nothing, step in ((wrong, 2), (None, 3)):
        metrics = training.step(replace(taken, step=step), nothing).metrics
        assert metrics["policy/engine_gap_tokens"] == 0
        assert math.isnan(metrics["policy/engine_gap_mean"]) and math.isnan(metrics["policy/engine_gap_max"])


def test_the_probe_compares_with_the_weights_that_were_sent(model: str, tmp_path: Path) -> None:
    """An engine that got weights rounded to bfloat16 must be compared with those, at the live version too."""
    rng = np.random.default_rng(5)
    probed = [engine_like(model, rollout(rng, n, 2, 0), 0, 0.0) for n in (9, 6)]
    (tmp_path / "probe").mkdir()
    probe = Probe(version=0, handle=store([probed], str(tmp_path / "probe")).groups[0].handle)
    backend, gaps = HfModel(model, "float32", CPU), []
    for dtype in (torch.float32, torch.bfloat16):
        kept = Kept(backend, dtype)
        training = Training(TrainerConfig(lr=0.0), backend, WIDE, group_mean, kept, total_steps=10)
        gaps.append(training.step(store(random_groups(), str(tmp_path)), probe).metrics["policy/engine_gap_max"])
    assert gaps[0] < 1e-5 and gaps[1] > 1e-4


def test_each_version_is_staged_after_its_step(model: str, tmp_path: Path) -> None:
    training = trainer(model, updates_per_step=2)
    assert isinstance(training.staging, Kept)
    taken = store(random_groups(), str(tmp_path))
    for step in range(2):
        assert sorted(training.staging.versions) == list(range(step + 1))
        report = training.step(replace(taken, step=step))
        rates = [learning_rate(training.config, 2 * step + update, 20) for update in (0, 1)]
        assert report.metrics["policy/lr"] == pytest.approx(sum(rates) / 2)
        for shard, staged in zip(training.backend.shards(), training.staging.versions[step + 1], strict=True):
            assert shard.tensor.equal(staged), shard.name


@pytest.mark.parametrize("family", ["qwen3", "qwen3_tied", "llama"])
def test_saved_folder_loads_with_identical_logits(family: Any, tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "source", family)
    training = trainer(source)
    (tmp_path / "run").mkdir()
    training.step(store(random_groups(), str(tmp_path / "run")))
    training.backend.save(str(tmp_path / "saved"))
    reloaded, report = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert isinstance(training.backend, HfModel)
    for name, tensor in training.backend.model.state_dict().items():
        assert reloaded.state_dict()[name].equal(tensor), name
    ids = torch.arange(3, 20)[None]
    training.backend.model.set_attn_implementation("sdpa")
    assert reloaded(ids).logits.equal(training.backend.model(ids).logits)
    before = AutoModelForCausalLM.from_pretrained(source)(ids).logits
    assert (reloaded(ids).logits - before).abs().max() > 1e-4, "the step must show in what was saved"
    text = "12+34="
    tokenizers = [AutoTokenizer.from_pretrained(folder) for folder in (source, tmp_path / "saved")]
    assert tokenizers[0](text)["input_ids"] == tokenizers[1](text)["input_ids"]


# Checkpoints


def everything(training: Training) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in training.state().items()}


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype and tensor.equal(other[name]), name


def resumed(model: str, folder: Path, version: int, **settings: Any) -> Training:
    training = trainer(model, PPOClip(), group_norm, version=version, **settings)
    state = training.state()
    load(state, folder / "trainer", None)
    training.load_state(state)
    return training


def test_a_resumed_run_ends_with_the_same_bits(model: str, tmp_path: Path) -> None:
    """Six steps against three, a new process's worth of objects, and three more; the copy is of step 3 though more
    steps follow before it is written."""
    settings: dict[str, Any] = {"updates_per_step": 2, "weight_decay": 0.01, "microbatch_tokens": 60}
    taken = store(random_groups(), str(tmp_path))
    training = trainer(model, PPOClip(), group_norm, **settings)
    saver = Saver("same bits", training, None)
    for step in range(6):
        if step == 3:
            saver.copy()
            torch.manual_seed(8)
            third = everything(training)
        training.step(replace(taken, step=step))
    saver.write(tmp_path)
    again = resumed(model, tmp_path, 3, **settings)
    state = everything(again)
    assert float(state["step/model.norm.weight"]) == 6 and state["exp_avg/model.norm.weight"].abs().max() > 0
    assert not state["rng/0"].equal(third.pop("rng/0")), "the generator was seeded after the copy"
    assert_equal({n: t for n, t in state.items() if n != "rng/0"}, third)
    assert isinstance(again.staging, Kept)
    for shard, staged in zip(again.backend.shards(), again.staging.versions[3], strict=True):
        assert shard.tensor.equal(staged), shard.name
    reports = [again.step(replace(taken, step=step)) for step in range(3, 6)]
    torch.set_rng_state(training.state()["rng/0"])
    assert_equal(everything(again), everything(training))
    assert reports[-1].metrics["policy/lr"] == pytest.approx(
        sum(learning_rate(again.config, update, 20) for update in (10, 11)) / 2
    )


def test_the_random_state_is_that_of_the_copy(model: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    saver = Saver("random", trainer(model), None)
    saver.copy()
    want = torch.rand(4)
    saver.write(tmp_path)
    resumed(model, tmp_path, 0)
    assert torch.rand(4).equal(want)


def test_a_checkpoint_before_the_first_update_changes_nothing(model: str, tmp_path: Path) -> None:
    taken = store(random_groups(), str(tmp_path))
    plain, copied = trainer(model, PPOClip(), group_norm), trainer(model, PPOClip(), group_norm)
    saver = Saver("first", copied, None)
    saver.copy()
    saver.write(tmp_path)
    ends = [plain, copied, resumed(model, tmp_path, 0)]
    for training in ends:
        training.step(taken)
    for training in ends[1:]:
        assert_equal(everything(training), everything(plain))


def test_the_exported_folder_is_the_one_that_save_writes(tmp_path: Path) -> None:
    """Of a model with tied weights; the checkpoint's folder is read by name, not by number of ranks."""
    source = save_tiny(tmp_path / "source", "qwen3_tied")
    training = trainer(source)
    (tmp_path / "run").mkdir()
    training.step(store(random_groups(), str(tmp_path / "run")))
    training.backend.save(str(tmp_path / "saved"))
    saver = Saver("export", training, None)
    saver.copy()
    saver.write(tmp_path / "checkpoint")
    one, two = tmp_path / "saved", tmp_path / "checkpoint" / "model"
    assert {f.name for f in one.iterdir()} == {f.name for f in two.iterdir()} >= {"tokenizer.json", "config.json"}
    for file in one.iterdir():
        assert file.read_bytes() == (two / file.name).read_bytes(), file.name
    suffixes = {file.suffix for file in (tmp_path / "checkpoint" / "trainer").iterdir()}
    assert suffixes == {".safetensors"}, "no pickle may lie there"


def test_what_is_no_whole_checkpoint_of_the_version_is_refused(model: str, tmp_path: Path) -> None:
    saver = Saver("damage", trainer(model), None)
    saver.copy()
    saver.write(tmp_path)
    with pytest.raises(RuntimeError, match="copied nothing since"):
        saver.write(tmp_path / "again")
    with pytest.raises(ValueError, match="of version 0, not 2"):
        resumed(model, tmp_path, 2)
    with pytest.raises(FileNotFoundError, match="no trainer state in"):
        resumed(model, tmp_path / "nowhere", 0)
    other = save_tiny(tmp_path / "other", "qwen3", layers=3)
    with pytest.raises(ValueError, match=r"trainer: rank 0: .*Missing key .*layers.2") as caught:
        resumed(other, tmp_path, 0)
    assert "\n" not in str(caught.value)
    (file,) = (tmp_path / "trainer").iterdir()
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(ValueError, match=f"cannot load the trainer's state from {tmp_path}/trainer"):
        resumed(model, tmp_path, 0)


def test_a_full_disk_is_one_line(model: str, tmp_path: Path) -> None:
    saver = Saver("full", trainer(model), None)
    saver.copy()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(OSError, match=f"cannot write {tmp_path}: rank 0: .*File too large") as caught:
            saver.write(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "\n" not in str(caught.value)


def test_shards_alias_the_live_weights_under_their_names(tmp_path: Path) -> None:
    backend = HfModel(save_tiny(tmp_path, "qwen3_tied"), "float32", CPU)
    shards = {shard.name: shard for shard in backend.shards()}
    assert shards.keys() == backend.parameters().keys() and "lm_head.weight" not in shards
    for name, parameter in backend.parameters().items():
        assert shards[name].tensor.data_ptr() == parameter.data_ptr()
        assert shards[name].shape == shards[name].box.size == tuple(parameter.shape)


def test_a_capped_head_is_refused_by_name(tmp_path: Path) -> None:
    config = Gemma2Config(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=32,
        attn_logit_softcapping=None,
        final_logit_softcapping=5.0,
    )
    Gemma2ForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"Gemma2ForCausalLM .* logits differ"):
        HfModel(str(tmp_path), "float32", CPU)


def test_bfloat16_forward_keeps_float32_weights_and_gradients(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = store(random_groups(), str(tmp_path))
    want, exact = captured(trainer(model), taken, monkeypatch)
    backend = HfModel(model, "bfloat16", CPU)
    training = Training(
        TrainerConfig(dtype="bfloat16", warmup_steps=1), backend, WIDE, group_mean, Kept(backend), total_steps=10
    )
    got, rounded = captured(training, taken, monkeypatch)
    assert all(g.dtype == torch.float32 for g in got.values())
    assert rounded.metrics["policy/grad_norm"] == pytest.approx(exact.metrics["policy/grad_norm"], rel=0.05)
    assert rounded.metrics["policy/grad_norm"] != exact.metrics["policy/grad_norm"]
    name = "model.layers.0.mlp.down_proj.weight"
    assert torch.cosine_similarity(got[name].ravel(), want[name].ravel(), dim=0) > 0.99
