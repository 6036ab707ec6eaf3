"""Kept sets of truncated sampling on their way from the engine's draw to the trainer's softmax."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from actors import payload
from actors.backends.hf import HfModel
from actors.batching import Microbatch, pack
from actors.config import NativeEngine, TrainerConfig
from actors.engines.native import Native
from actors.engines.sampling import draw, uniforms
from actors.environment import Outcome
from actors.episode import Stream, read_only
from actors.training import Training
from actors.types import Completion, CompletionBatch, Group, Kept, Request, RequestId, Rollout, Sampling, derive_seed
from losses import DIS, group_mean
from losses.ops import KeptSets, logprobs_and_entropy
from tests.actors.models import save_tiny
from tests.actors.training_data import Kept as Staged
from tests.actors.training_data import one_prompt, rollout, store, with_kept

CPU = torch.device("cpu")
CUTS = [{"top_p": 0.8}, {"top_k": 5}, {"top_p": 0.9, "top_k": 8}, {"top_p": 0.9, "temperature": 0.6}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("model"), "qwen3_tied")


@pytest.fixture(scope="module")
def backend(model: str) -> HfModel:
    return HfModel(model, "float32", CPU)


def sets_of(kept: Kept) -> list[list[int]]:
    return [one.ids.tolist() for one in kept.split([1] * len(kept.counts))]


# The record


ragged = st.lists(st.lists(st.integers(0, 99), max_size=4, unique=True), max_size=8)


@given(st.lists(ragged, min_size=1, max_size=4))
def test_split_undoes_join(parts: list[list[list[int]]]) -> None:
    each = [Kept.of([np.array(own, np.int32) for own in part]) for part in parts]
    whole = Kept.join(each)
    assert sets_of(whole) == [own for part in parts for own in part]
    assert [sets_of(kept) for kept in whole.split([len(part) for part in parts])] == parts
    assert whole.ids.dtype == whole.counts.dtype == np.int32


def test_counts_and_ids_must_agree() -> None:
    with pytest.raises(ValueError, match="of 3 tokens in all come with 2"):
        Kept(ids=np.zeros(2, np.int32), counts=np.array([1, 2], np.int32))


def completion(sets: list[list[int]] | None, tokens: int) -> Completion:
    column = np.zeros(tokens, np.int32)
    kept = None if sets is None else Kept.of([np.array(own, np.int32) for own in sets])
    return Completion(tokens=column, logprobs=np.zeros(tokens, np.float32), versions=column, finish="stop", kept=kept)


def test_a_message_says_what_was_kept_only_if_all_do() -> None:
    """One that was given up before its first token has nothing to say."""
    said = [completion([[1, 2], []], 2), completion(None, 0), completion([[4]], 1)]
    back = CompletionBatch.of(said, load=0).unpack()
    assert [sets_of(c.kept) for c in back if c.kept is not None] == [[[1, 2], []], [], [[4]]]
    for unsaid in ([*said, completion(None, 1)], [completion(None, 2)], [completion(None, 0)]):
        assert all(c.kept is None for c in CompletionBatch.of(unsaid, load=0).unpack())


def played(sets: Sequence[list[list[int]] | None], sampling: Sampling) -> Rollout:
    """A prompt of two tokens, then one action for each entry, with an observation of one token after each."""
    stream = Stream(read_only(np.array([7, 8], np.int32)), sampling)
    for own in sets:
        stream.act(completion(own, 2), Outcome(), "stop")
        stream.observe(np.array([9], np.int32))
    return stream.finish()


def test_turns_that_the_policy_reads_have_no_sets() -> None:
    sampling = Sampling(top_k=3)
    both = played([[[0, 1], [0, 2]], [[0], []]], sampling)
    assert both.kept is not None and sets_of(both.kept) == [[], [], [0, 1], [0, 2], [], [0], [], []]
    half = played([[[0, 1], [0, 2]], None], sampling)
    assert half.kept is None and half.biased and not both.biased
    assert not played([None], Sampling()).biased and not played([None], Sampling(temperature=0, top_p=0.5)).biased
    assert not played([], sampling).biased, "nothing was drawn"


def test_payloads_keep_what_each_rollout_says(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    plain = rollout(rng, 6, 2, 0)
    rollouts = (
        with_kept(rng, rollout(rng, 9, 3, 0)),
        plain,
        replace(plain, kept=Kept.all_of(6)),
        with_kept(rng, plain),
    )
    handle = payload.write(Group(ticket=1, attempt=0, row=0, rollouts=rollouts), str(tmp_path))
    back = payload.read(handle).rollouts
    for before, after in zip(rollouts, back, strict=True):
        if before.kept is None:
            assert after.kept is None
        else:
            assert after.kept is not None and sets_of(after.kept) == sets_of(before.kept)
            assert after.kept.ids.dtype == after.kept.counts.dtype == np.int32
        assert after.tokens.tolist() == before.tokens.tolist()
    without = payload.write(Group(ticket=2, attempt=0, row=0, rollouts=(plain,)), str(tmp_path))
    assert payload.read(without).rollouts[0].kept is None
    assert (
        without.nbytes < payload.write(Group(ticket=3, attempt=0, row=0, rollouts=rollouts[2:3]), str(tmp_path)).nbytes
    )


# Packing


def test_the_shift_by_hand() -> None:
    """Two rollouts share the prompt 5 6. The first draws 7 from 7 and 9, 8 from all; then reads 4 and draws 3 from 3.
    The second, which was not cut, draws 2."""
    first = Rollout(
        tokens=np.array([5, 6, 7, 8, 4, 3], np.int32),
        mask=np.array([False, False, True, True, False, True]),
        logprobs=np.array([0, 0, -0.5, -0.25, 0, 0], np.float32),
        versions=np.array([-1, -1, 0, 0, -1, 0], np.int32),
        turns=(),
        reward=0.0,
        sampling=Sampling(top_p=0.9),
        kept=Kept.of([np.array(own, np.int32) for own in ([], [], [7, 9], [], [], [3])]),
    )
    second = Rollout(
        tokens=np.array([5, 6, 2], np.int32),
        mask=np.array([False, False, True]),
        logprobs=np.array([0, 0, -1], np.float32),
        versions=np.array([-1, -1, 0], np.int32),
        turns=(),
        reward=0.0,
        sampling=Sampling(),
    )
    m = pack([second, first], tickets=[1, 1], advantages=[0.0, 0.0], step=0)
    assert m.targets_T.tolist() == [2, 7, 8, 4, 3]
    assert m.kept is not None and m.kept.ids_K.tolist() == [7, 9, 3] and m.kept.counts_T.tolist() == [0, 2, 0, 0, 1]
    assert m.biased == 0
    assert pack([second], tickets=[1], advantages=[0.0], step=0).kept is None
    assert pack([replace(second, kept=Kept.all_of(3))], tickets=[1], advantages=[0.0], step=0).kept is None
    unsaid = pack([second, replace(first, kept=None)], tickets=[1, 1], advantages=[0.0, 0.0], step=0)
    assert unsaid.kept is None and unsaid.biased == 1


def test_wrong_sets_are_one_line() -> None:
    r = with_kept(np.random.default_rng(0), rollout(np.random.default_rng(0), 6, 2, 0), whole=0.0)
    assert r.kept is not None
    own = sets_of(r.kept)
    own[4] = [token for token in own[4] if token != r.tokens[4]]
    other = Kept.of([np.array(one, np.int32) for one in own])
    with pytest.raises(ValueError, match=rf"ticket 8: token {r.tokens[4]} at 4 of a rollout is not in the kept set"):
        pack([r, replace(r, kept=other)], tickets=[7, 8], advantages=[0.0] * 2, step=0)
    with pytest.raises(ValueError, match="ticket 7: a rollout of 6 tokens comes with kept sets of 5"):
        pack([replace(r, kept=r.kept.split([5, 1])[0])], tickets=[7], advantages=[0.0], step=0)


def packed(rollouts: Sequence[Rollout]) -> Microbatch:
    return pack(rollouts, tickets=[0] * len(rollouts), advantages=[0.0] * len(rollouts), step=0)


def test_values_and_gradients_equal_a_float64_model_whatever_the_packing(backend: HfModel, model: str) -> None:
    """A softmax over each set alone, one rollout at a time, with transformers' own attention."""
    rng = np.random.default_rng(4)
    shared = one_prompt([rollout(rng, n, 5, 0, temperature=0.7) for n in (12, 7, 9)])
    rollouts = [with_kept(rng, r) for r in shared] + [rollout(rng, 11, 4, 0), with_kept(rng, rollout(rng, 8, 2, 0))]
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64, attn_implementation="eager")
    want, total = [], torch.zeros((), dtype=torch.float64)
    for r in rollouts:
        ids = torch.from_numpy(r.tokens.astype(np.int64))
        logits = reference(ids[None]).logits[0, :-1] / r.sampling.temperature
        sets = [[]] * len(ids) if r.kept is None else sets_of(r.kept)
        for t in np.flatnonzero(r.mask).tolist():
            own = sets[t] or list(range(64))
            log = logits[t - 1, own].log_softmax(0)
            score = torch.stack([log[own.index(int(ids[t]))], -(log.exp() * log).sum()])
            total = total + score[0] * (t % 3 - 1) + 0.3 * score[1]
            want.append(score.detach())
    total.backward()
    expected = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
    for pieces in ([rollouts], [[r] for r in rollouts], [rollouts[:2], rollouts[2:]]):
        for p in backend.parameters().values():
            p.grad = None
        scores = []
        for piece in pieces:
            m = packed(piece)
            logprobs_T, entropy_T = backend.forward(m)
            place = np.concatenate([np.flatnonzero(r.mask) for r in piece]) % 3 - 1
            (logprobs_T * torch.from_numpy(place) + 0.3 * entropy_T).sum().backward()
            scores.append(torch.stack([logprobs_T, entropy_T], 1).detach())
        torch.testing.assert_close(torch.cat(scores).double(), torch.stack(want), rtol=1e-4, atol=2e-5)
        for name, p in backend.parameters().items():
            norm = float(expected[name].norm())
            torch.testing.assert_close(p.grad.double(), expected[name], rtol=1e-3, atol=1e-5 * norm, msg=name)


# Importance ratios


def test_the_importance_identity_by_hand() -> None:
    """mu = (.05, .5, .15, .3) cut to its two likeliest, pi uniform. Over the set both are distributions: E[pi / mu] is
    1/2 + 1/2. Over all tokens pi gives the set 1/4 + 1/4, so that the mean ratio is 0.5."""
    weight = torch.zeros(4, 1, dtype=torch.float64)
    mu = {1: 0.625, 3: 0.375}
    cut = logits_kept(torch.tensor([0.05, 0.5, 0.15, 0.3]).log(), temperature=1.0, top_p=1.0, top_k=2)
    assert cut == list(mu)
    for kept, expected in ((cut, 1.0), (None, 0.5)):
        pi = trainer_probabilities(weight[:, 0], cut, 1.0, kept)
        assert sum(mu[x] * p / mu[x] for x, p in zip(cut, pi, strict=True)) == pytest.approx(expected, abs=1e-12)


def logits_kept(logits: torch.Tensor, *, temperature: float, top_p: float, top_k: int) -> list[int]:
    """The set that the engine's draw keeps."""
    drawn = draw(logits[None], np.array([0.5]), *(np.array([value]) for value in (temperature, top_p, top_k)))
    return list(range(len(logits))) if drawn.kept is None else drawn.kept[0].nonzero()[:, 0].tolist()


def trainer_probabilities(
    logits: torch.Tensor, targets: list[int], temperature: float, kept: list[int] | None
) -> list[float]:
    """What the trainer's softmax, over `kept` or all tokens, gives each target."""
    n = len(targets)
    sets = None if kept is None else KeptSets(torch.tensor(kept * n), torch.full((n,), len(kept)))
    logprobs, _ = logprobs_and_entropy(
        torch.ones(n, 1, dtype=torch.float64),
        logits.double()[:, None],
        torch.tensor(targets),
        torch.full((n,), temperature, dtype=torch.float64),
        3,
        sets,
    )
    return logprobs.exp().tolist()


@settings(max_examples=60, deadline=None)
@given(
    st.integers(2, 9),
    st.integers(0, 2**16),
    st.sampled_from([0.6, 1.0, 1.5]),
    st.floats(0.05, 1.0),
    st.integers(0, 6),
)
def test_the_mean_ratio_is_1_over_the_kept_set_and_its_mass_over_all_tokens(
    size: int, seed: int, temperature: float, top_p: float, top_k: int
) -> None:
    """All outcomes of a draw are summed, in float64; without the sets the mean misses 1 by pi's mass outside of it."""
    source = torch.Generator().manual_seed(seed)
    engine, trainer = 2 * torch.randn(2, size, generator=source)
    kept = logits_kept(engine, temperature=temperature, top_p=top_p, top_k=top_k)
    scaled = engine.double()[kept] / temperature
    mu = scaled.softmax(0).tolist()
    mass = float((trainer.double() / temperature).softmax(0)[kept].sum())
    for sets, expected in ((kept, 1.0), (None, mass)):
        pi = trainer_probabilities(trainer, kept, temperature, sets)
        mean = sum(m * (p / m) for p, m in zip(pi, mu, strict=True))
        assert mean == pytest.approx(expected, abs=1e-12)


# Engine and trainer


def trainer(backend: HfModel) -> Training:
    return Training(TrainerConfig(lr=0.0), backend, DIS(), group_mean, Staged(backend), total_steps=2)


def rows_of(engine: Native, cut: dict[str, float], count: int) -> list[Rollout]:
    """Rollouts of one or two turns as the engine draws them, more than it has slots; some are uncut or greedy."""
    rng = np.random.default_rng(0)
    samplings = [Sampling(**own) for own in (cut, cut, {}, {"temperature": 0.0, "top_p": 0.5})]
    streams = {
        RequestId(i, 0, 0, 0): Stream(read_only(rng.integers(3, 50, 1 + i % 7).astype(np.int32)), samplings[i % 4])
        for i in range(count)
    }
    for turn in range(2):
        for id, stream in streams.items():
            n = 4 + id.ticket % 20
            engine.add(
                Request(
                    id=id._replace(turn=turn),
                    prompt=stream.tokens,
                    sampling=replace(samplings[id.ticket % 4], max_tokens=n),
                    seed=derive_seed(0, id.ticket, 0, turn),
                )
            )
        while engine.unfinished:
            for id, c in engine.step():
                assert (c.kept is not None) == samplings[id.ticket % 4].cuts
                stream = streams[id._replace(turn=0)]
                stream.act(c, Outcome(), c.finish)
                if turn == 0:
                    stream.observe(np.array([11, 12, 13], np.int32))
    assert not engine.kept, "sets of requests that left"
    return [stream.finish() for stream in streams.values()]


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_the_trainer_scores_what_the_engine_drew(
    backend: HfModel, model: str, tmp_path: Path, cut: dict[str, float]
) -> None:
    rollouts = rows_of(Native(NativeEngine(slots=7, max_length=96), model), cut, 16)
    taken = store([rollouts], str(tmp_path))
    back = list(payload.read(taken.groups[0].handle).rollouts)
    with torch.no_grad():
        m, blind = packed(back), packed([replace(r, kept=None) for r in back])
        gap, without = ((backend.forward(each)[0] - each.behaviour_T)[each.mask_T].abs() for each in (m, blind))
    assert len(gap) > 200 and gap.max() <= 2e-5
    assert m.kept is not None and m.kept.counts_T.max() < 64 and blind.biased == 8
    cut_T = torch.from_numpy(np.isin(m.segment_T.numpy() % 4, (0, 1)))[m.mask_T]
    assert without[cut_T].mean() > 0.05 and without[~cut_T].max() <= 2e-5
    metrics = trainer(backend).step(taken).metrics
    assert metrics["policy/ratio"] == pytest.approx(1, abs=1e-5) and metrics["policy/ratio_max"] <= 1 + 2e-5
    assert metrics["policy/lag_kl"] <= 1e-9 and metrics["policy/masked"] == 0


def test_an_aborted_request_leaves_with_its_sets(model: str) -> None:
    engine = Native(NativeEngine(slots=2, max_length=64), model)
    for i in range(3):
        id, prompt = RequestId(i, 0, 0, 0), np.array([5, 6], np.int32)
        engine.add(Request(id=id, prompt=prompt, sampling=Sampling(top_k=3, max_tokens=20), seed=i))
    engine.step(), engine.step()
    returned = dict(engine.abort([RequestId(0, 0, 0, 0), RequestId(2, 0, 0, 0)]))
    running, queued = (returned[RequestId(i, 0, 0, 0)].kept for i in (0, 2))
    assert running is not None and running.counts.tolist() == [3, 3] and queued is None
    assert list(engine.kept) == [RequestId(1, 0, 0, 0)]


def test_a_cut_that_leaves_everything_says_so(model: str) -> None:
    """Of 64 tokens the 64 likeliest: sets are known and empty, which nobody need warn of."""
    engine = Native(NativeEngine(slots=2, max_length=64), model)
    sampling = Sampling(top_k=64, max_tokens=5)
    engine.add(Request(id=RequestId(0, 0, 0, 0), prompt=np.array([5], np.int32), sampling=sampling, seed=1))
    done: list[tuple[RequestId, Completion]] = []
    while engine.unfinished:
        done += engine.step()
    kept = done[0][1].kept
    assert kept is not None and not kept.counts.any() and len(kept.counts) == len(done[0][1].tokens)


@given(st.integers(0, 2**16), st.floats(0.05, 1.0), st.integers(0, 6))
@settings(max_examples=30, deadline=None)
def test_what_is_drawn_was_kept(seed: int, top_p: float, top_k: int) -> None:
    logits = torch.randn(12, 9, generator=torch.Generator().manual_seed(seed))
    numbers = uniforms(np.arange(12).astype(np.uint64), np.full(12, seed))
    temperature = np.where(np.arange(12) % 3, 1.0, 0.0)
    drawn = draw(logits, numbers, temperature, np.full(12, top_p), np.full(12, top_k))
    if top_p == 1 and top_k == 0:
        assert drawn.kept is None
    else:
        assert drawn.kept is not None and drawn.kept.gather(1, drawn.tokens[:, None]).all()
        assert drawn.kept[::3].all(), "greedy rows are not cut"


# The warning


@pytest.mark.parametrize(
    ("sampling", "says", "warns"),
    [
        (Sampling(top_p=0.9), False, True),
        (Sampling(top_k=4), False, True),
        (Sampling(top_p=0.9), True, False),
        (Sampling(top_p=0.9, top_k=4, temperature=0.0), False, False),
        (Sampling(temperature=0.7), False, False),
    ],
)
def test_unknown_sets_are_warned_of_once(
    backend: HfModel, tmp_path: Path, caplog: pytest.LogCaptureFixture, sampling: Sampling, says: bool, warns: bool
) -> None:
    rng = np.random.default_rng(0)
    group = [replace(rollout(rng, 6, 2, 0), sampling=sampling) for _ in range(3)]
    taken = store([[replace(r, kept=Kept.all_of(6)) if says else r for r in group]], str(tmp_path))
    training = trainer(backend)
    for step in range(2):
        training.step(replace(taken, step=step))
    told = [r.message for r in caplog.records if "does not say what was kept" in r.message]
    assert len(told) == warns and all("step 0: 3 rollouts" in line for line in told)
