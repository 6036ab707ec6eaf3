"""What objectives compare with: an old pass, a reference, a teacher, a whole group, earlier rollouts of a row."""

from __future__ import annotations

import functools
import json
import math
import shutil
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from actors.backends.hf import HfModel
from actors.batching import Sizes, plan
from actors.checks import check_objective
from actors.config import BufferConfig, RunConfig, TrainerConfig
from actors.saving import Saver, load, load_memory
from actors.training import Training
from actors.types import Rollout
from losses import (
    DIS,
    GSPO,
    Corrected,
    Corrections,
    Distill,
    KLPenalty,
    OnlineDPO,
    PolicyGradient,
    PPOClip,
    RunningMean,
    group_mean,
)
from losses.inputs import Objective, ReadsOld
from recipes.tasks.addition import Addition
from tests.actors.models import save_tiny
from tests.actors.test_batching import Batch, batches, taken_of
from tests.actors.test_training import captured, random_groups
from tests.actors.training_data import Kept, one_prompt, rollout, store

CPU = torch.device("cpu")
TIS = Corrected(base=PolicyGradient(), corrections=Corrections(token_cap=2.0))
ICEPOP = Corrected(base=PolicyGradient(), corrections=Corrections(token_band=(0.5, 5.0)))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("other"), "qwen3", seed=7)


def trainer(model: str, objective: Objective, advantage: Any = group_mean, version: int = 0, **given: Any) -> Training:
    backend = HfModel(model, "float32", CPU)
    models = {
        name: HfModel(given.pop(name), "float32", CPU, frozen=True)
        for name in ("reference", "teacher")
        if name in given
    }
    config = TrainerConfig(**{"warmup_steps": 1, "lr": 1e-3, "clip_norm": 1e9, **given})
    return Training(config, backend, objective, advantage, Kept(backend), total_steps=10, version=version, **models)


@functools.cache
def precise(folder: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)


def logprobs(folder: str, r: Rollout) -> Tensor:
    """Of the actions, in float64."""
    ids = torch.from_numpy(r.tokens.astype(np.int64))
    weights = precise(folder)
    return (
        weights(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0][torch.from_numpy(r.mask[1:])]
    )


def test_penalty_and_teacher_are_those_of_the_other_models_whatever_the_updates(
    model: str, other: str, tmp_path: Path
) -> None:
    """k3 to the reference and the teacher's gap, in the first of two updates (rate 0, so the second has them too)."""
    groups = random_groups()
    taken = store(groups, str(tmp_path))
    here, there = (
        torch.cat([logprobs(folder, r) for group in groups for r in group]).detach() for folder in (model, other)
    )
    gap = there - here
    settings = {"lr": 0.0, "updates_per_step": 2, "microbatch_tokens": 60}
    penalised = Corrected(base=DIS(), kl=KLPenalty(coefficient=0.1))
    report = trainer(model, penalised, reference=other, **settings).step(taken)
    assert report.metrics["policy/ref_kl"] == pytest.approx(float((gap.expm1() - gap).mean()), rel=1e-4)
    same = trainer(model, penalised, reference=model, **settings).step(taken)
    assert same.metrics["policy/ref_kl"] == pytest.approx(0, abs=1e-9)
    taught = trainer(model, Distill(base=PolicyGradient()), teacher=other, **settings).step(taken)
    assert taught.metrics["policy/teacher_kl"] == pytest.approx(-float(gap.mean()), rel=1e-4)


def dpo(folder: str, reference: str, groups: list[list[Rollout]], beta: float) -> float:
    """Mean over groups of the mean over pairs, over all rollouts: the objective by its formula."""
    total = 0.0
    for group in groups:
        h = [float((logprobs(folder, r) - logprobs(reference, r)).detach().sum()) for r in group]
        pairs = [
            math.log1p(math.exp(-beta * (h[i] - h[j])))
            for i, won in enumerate(group)
            for j, lost in enumerate(group)
            if won.reward > lost.reward
        ]
        total += sum(pairs) / len(pairs) if pairs else 0.0
    return total / sum(map(len, groups))


def test_preferences_see_whole_groups_however_small_the_microbatches(
    model: str, other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = random_groups(2)
    taken = store(groups, str(tmp_path))
    settings = {"denominator": "sequences", "reference": other}
    wide, first = captured(trainer(model, OnlineDPO(beta=0.05), **settings), taken, monkeypatch)
    narrow, second = captured(
        trainer(model, OnlineDPO(beta=0.05), microbatch_tokens=1, **settings), taken, monkeypatch
    )
    want = dpo(model, other, groups, 0.05)
    assert want > 0.1
    assert first.metrics["policy/loss"] == pytest.approx(want, rel=1e-4)
    assert second.metrics["policy/loss"] == pytest.approx(want, rel=1e-4)
    for name in wide:
        torch.testing.assert_close(narrow[name], wide[name], rtol=1e-3, atol=1e-6, msg=name)


@settings(max_examples=60, deadline=None)
@given(batches, st.integers(1, 4), st.integers(1, 3), st.integers(1, 120))
def test_whole_groups_are_never_split(batch: Batch, ranks: int, updates: int, limit: int) -> None:
    taken = taken_of(batch)
    sizes = Sizes(taken.groups)
    plans = plan(taken, ranks=ranks, updates=updates, microbatch_tokens=limit, whole_groups=True)
    pieces = [piece for update in plans for rank in update for piece in rank if piece]
    where = {
        group: {i for i, piece in enumerate(pieces) for m in piece if m.group == group} for group in range(len(batch))
    }
    assert all(len(places) == 1 for places in where.values())
    assert sorted(m for piece in pieces for m in piece) == sorted(
        (group, member) for group, (_, actions) in enumerate(batch) for member in range(len(actions))
    )
    for piece in pieces:
        assert sizes.total(piece) <= limit or len({m.group for m in piece}) == 1


def test_the_constant_denominator_counts_what_could_have_been_drawn(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Limits of 40 and 10 tokens; one of the 6 rollouts has no token that counts: 3 x 40 + 2 x 10 = 140."""
    rng = np.random.default_rng(4)
    groups = [one_prompt([rollout(rng, n, 3, 0) for n in lengths]) for lengths in ([9, 5, 12], [8, 7, 6])]
    groups = [
        [replace(r, sampling=replace(r.sampling, max_tokens=limit)) for r in group]
        for group, limit in zip(groups, (40, 10), strict=True)
    ]
    silent = replace(groups[1][2], logprobs=np.where(groups[1][2].mask, np.nan, 0).astype(np.float32))
    groups[1][2] = silent
    taken = store(groups, str(tmp_path))
    objective = PPOClip(clip_high=0.2)
    by_tokens, report = captured(trainer(model, objective), taken, monkeypatch)
    constant, _ = captured(
        trainer(model, objective, denominator="max_tokens", microbatch_tokens=20), taken, monkeypatch
    )
    for name in by_tokens:
        torch.testing.assert_close(
            constant[name] * 140, by_tokens[name] * report.tokens, rtol=1e-3, atol=1e-4, msg=name
        )


class Counted(HfModel):
    """Counts forwards, and asks for each whether it is part of a graph."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder, "float32", CPU)
        self.graphs: list[bool] = []

    def forward(self, microbatch: Any) -> tuple[Tensor, Tensor]:
        self.graphs.append(torch.is_grad_enabled())
        return super().forward(microbatch)


class Memory(TorchDispatchMode):
    """Bytes of the tensors made within that are alive at once, at most."""

    def __init__(self) -> None:
        super().__init__()
        self.alive, self.most, self._seen = 0, 0, set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                address, size = storage.data_ptr(), storage.nbytes()
                if size and address not in self._seen:
                    self._seen.add(address)
                    self.alive += size
                    self.most = max(self.most, self.alive)
                    weakref.finalize(storage, self._gone, address, size)
        return out

    def _gone(self, address: int, size: int) -> None:
        self._seen.discard(address)
        self.alive -= size


@pytest.mark.parametrize(
    ("objective", "passes"),
    [(DIS(), 0), (TIS, 0), (ICEPOP, 0), (PPOClip(), 1), (GSPO(), 1), (Corrected(base=PPOClip()), 1)],
)
def test_corrections_on_the_rollout_ratio_need_no_old_pass(
    model: str, tmp_path: Path, objective: Objective, passes: int
) -> None:
    """Four updates of one microbatch each: one forward each with a graph, and what the objective asks for without."""
    backend = Counted(model)
    config = TrainerConfig(updates_per_step=4, lr=1e-3)
    training = Training(config, backend, objective, group_mean, Kept(backend), total_steps=10)
    training.step(store(random_groups(), str(tmp_path)))
    assert backend.graphs == [False] * 4 * passes + [True] * 4


def test_an_old_pass_costs_a_column_to_the_end_of_the_step(model: str, tmp_path: Path) -> None:
    """4 bytes for each target: between DIS and the same that asks for a pass which it does not read."""

    class Asking(DIS, ReadsOld):
        pass

    groups = random_groups()
    taken = store(groups, str(tmp_path))
    most = []
    for objective in (DIS(), Asking()):
        training = trainer(model, objective, updates_per_step=4)
        training.step(taken)  # the optimizer's moments are there from now on
        with Memory() as memory:
            training.step(replace(taken, step=1))
        most.append(memory.most)
    targets = sum(len(r.tokens) - int(r.mask.argmax()) for group in groups for r in group)
    assert 4 * targets <= most[1] - most[0] < 6 * targets


def test_the_running_mean_compares_by_row_and_goes_on_after_a_checkpoint(model: str, tmp_path: Path) -> None:
    """Single rollouts. Rows 0 and 1 got 2 and 0; then 1 each: advantages -1 and 1, and the same after a resume."""

    def single(rewards: tuple[float, ...], folder: str) -> Any:
        rng = np.random.default_rng(0)
        (tmp_path / folder).mkdir()
        rollouts = [[replace(rollout(rng, 9, 3, 0), reward=reward)] for reward in rewards]
        return store(rollouts, str(tmp_path / folder))

    first, second = single((2.0, 0.0), "first"), replace(single((1.0, 1.0), "second"), step=1)
    seen: list[list[float]] = []

    class Watched(PolicyGradient):
        def __call__(self, inputs: Any) -> Any:
            seen.append(sorted(set(inputs.advantages_T[inputs.mask_T].tolist())))
            return super().__call__(inputs)

    training = trainer(model, Watched(), RunningMean())
    training.step(first)
    saver = Saver("rows", training, None)
    saver.copy()
    training.step(second)
    saver.write(tmp_path / "saved")
    again = trainer(model, Watched(), RunningMean(), version=1)
    state = again.state()
    load(state, tmp_path / "saved" / "trainer", None)
    again.load_state(state, load_memory(tmp_path / "saved" / "trainer"))
    again.step(second)
    assert seen == [[-1.0, 1.0], [-1.0, 1.0], [-1.0, 1.0]]
    assert isinstance(again.advantage, RunningMean) and again.advantage.recent == {0: [2.0, 1.0], 1: [0.0, 1.0]}
    weights = [t.weights() for t in (training.backend, again.backend)]
    assert all(tensor.equal(weights[1][name]) for name, tensor in weights[0].items())


def test_a_baseline_that_the_checkpoint_lacks_begins_anew_and_says_so(
    model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saver = Saver("none", trainer(model, PolicyGradient()), None)
    saver.copy()
    saver.write(tmp_path)
    assert load_memory(tmp_path / "trainer") is None
    training = trainer(model, PolicyGradient(), RunningMean())
    training.load_state(training.state(), None)
    assert "begins anew" in caplog.text
    (tmp_path / "trainer" / "advantage.json").write_text("[[0, ")
    with pytest.raises(ValueError, match=r"cannot load .*advantage\.json"):
        load_memory(tmp_path / "trainer")


def test_settings_that_contradict_the_objective_are_refused(model: str, tmp_path: Path) -> None:
    tiny, cut = str(Addition.checkpoint), tmp_path / "cut"
    shutil.copytree(tiny, cut)
    (cut / "config.json").write_text(json.dumps(json.loads((cut / "config.json").read_text()) | {"vocab_size": 20}))
    base = RunConfig(model=tiny)

    def refused(config: RunConfig, loss: Objective, match: str) -> None:
        with pytest.raises((ValueError, OSError), match=match) as caught:
            check_objective(config, loss)
        assert "\n" not in str(caught.value)

    def of(**settings: Any) -> RunConfig:
        return replace(base, trainer=TrainerConfig(**settings))

    for config, loss in (
        (base, DIS()),
        (base, Corrected(kl=KLPenalty(coefficient=0.1))),
        (of(reference=tiny), Corrected(kl=KLPenalty(coefficient=0.1))),
        (of(teacher=tiny), Distill()),
        (of(denominator="sequences"), OnlineDPO()),
        (replace(base, group_size=1), DIS()),
    ):
        check_objective(config, loss)
    refused(of(reference=tiny), DIS(), r"--trainer\.reference is given, but the objective compares with no reference")
    refused(of(reference=tiny), Corrected(), "compares with no reference")
    refused(base, Distill(), r"give its folder as --trainer\.teacher")
    refused(of(teacher=model), Distill(), "has another vocabulary than --model")
    refused(of(teacher="/nowhere"), Distill(), r"no folder '/nowhere': --trainer\.teacher takes")
    refused(
        of(teacher=str(cut)), Distill(), r"--trainer\.teacher .*cut knows 20 tokens, and its tokenizer gives up to"
    )
    refused(base, OnlineDPO(), "use sequences")
    one = replace(base, group_size=1)
    refused(replace(one, buffer=BufferConfig(zero_variance="filter")), DIS(), "would drop all: use keep")
    refused(replace(of(denominator="sequences"), group_size=1), OnlineDPO(), "nothing to compare within a group")
