"""One contract, every engine that holds a model: parity with the Hugging Face model, swaps, aborts, endings, seeds."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import nn
from transformers import DynamicCache

from actors.checks import check, check_engine
from actors.config import GeneratorConfig, NativeEngine, RunConfig, VllmEngine
from actors.engines.base import Engine
from actors.generator import build_engine
from actors.pretrained import load_model
from actors.types import Completion, Request, RequestId
from actors.weights import Box
from recipes.tasks.addition import Addition
from tests.actors.models import save_tiny
from tests.actors.test_native import changed, gap, reference, request, run, some

HAVE_VLLM = importlib.util.find_spec("vllm") is not None
needs_vllm = pytest.mark.skipif(not HAVE_VLLM, reason="vLLM is not installed: make install-all")
CLOSE = 2e-5
"""Largest difference of a float32 logprob from the model's."""
SLOTS, MAX_LENGTH = 8, 200
BLOCKS = 10
"""Of vLLM's cache, 128 tokens each: fewer than two for every slot, so that long requests must be put off."""
ENGINES = {
    "native": NativeEngine(slots=SLOTS, max_length=MAX_LENGTH),
    # Two layers, keys and values, two heads of 32 floats.
    "vllm": VllmEngine(slots=SLOTS, max_length=MAX_LENGTH, kv_gib=BLOCKS * 128 * 2 * 2 * 2 * 32 * 4 / 2**30),
}
LOADS = [("native", "qwen3_tied"), ("native", "llama"), ("vllm", "qwen3_tied"), ("vllm", "llama")]


@dataclass
class Rig:
    """An engine and the model whose weights it has."""

    engine: Engine
    folder: str
    model: nn.Module
    first: dict[str, torch.Tensor]

    def swap(self, version: int) -> None:
        """Other weights for both."""
        self.engine.load(changed(self.model, version), version)


@pytest.fixture(
    scope="module",
    params=[pytest.param(p, marks=needs_vllm if p[0] == "vllm" else ()) for p in LOADS],
    ids="-".join,
)
def started(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    kind, family = request.param
    before = dict(os.environ)
    folder = save_tiny(tmp_path_factory.mktemp("models") / family, family)
    engine = build_engine(GeneratorConfig(engine=ENGINES[kind]), folder, 1, "cpu")
    model = load_model(folder, "float32")
    yield Rig(engine, folder, model, {name: p.detach().clone() for name, p in model.named_parameters()})
    engine.close()
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def rig(started: Rig) -> Rig:
    """The engine idle, with its first weights and no cached prefix."""
    started.engine.abort(named(20_000))
    assert started.engine.unfinished == 0
    with torch.no_grad():
        for name, parameter in started.model.named_parameters():
            parameter.copy_(started.first[name])
    started.engine.load(started.first, 0)
    started.engine.reset_cache()
    return started


def named(tickets: int) -> Iterable[RequestId]:
    return (RequestId(ticket, 0, 0, 0) for ticket in range(tickets))


def gaps(rig: Rig, requests: list[Request], out: dict[RequestId, Completion]) -> np.ndarray:
    return np.concatenate([gap(rig.model, r, out[r.id]) for r in requests])


def drain(engine: Engine) -> dict[RequestId, Completion]:
    out: dict[RequestId, Completion] = {}
    while engine.unfinished:
        out |= dict(engine.step())
    return out


def test_logprobs_equal_the_full_forward(rig):
    requests = some(24, longest=120, max_tokens=80)
    out = run(rig.engine, requests)
    found = gaps(rig, requests, out)
    assert len(found) > 500
    assert found.mean() <= 5e-6 and found.max() <= CLOSE
    assert {c.finish for c in out.values()} == {"stop", "length"}
    for c in out.values():
        assert (c.tokens.dtype, c.logprobs.dtype, c.versions.dtype) == (np.int32, np.float32, np.int32)
        assert len(c.tokens) == len(c.logprobs) == len(c.versions)
        assert (c.tokens[:-1] != 2).all(), "an end token in the middle"
        assert (c.tokens[-1] == 2) == (c.finish == "stop")
        assert len(c.tokens) == 80 or c.finish == "stop"


@pytest.mark.parametrize("mixed", [False, True])
def test_logprobs_are_of_the_distribution_drawn_from(rig, mixed):
    """Temperature 0.7, then the 10 likeliest, then 0.8 of the probability; also beside requests that truncate
    nothing or are greedy."""
    requests = some(8, temperature=0.7, top_p=0.8, top_k=10)
    others = [replace(r, id=RequestId(100 + i, 0, 0, 0)) for i, r in enumerate(some(4) + some(4, temperature=0))]
    out = run(rig.engine, requests + others if mixed else requests)
    for r in requests:
        c = out[r.id]
        for token, logprob, logs in zip(c.tokens, c.logprobs, reference(rig.model, r, c), strict=True):
            p = np.exp(logs / 0.7)
            best = np.argsort(-p)[:10]
            p = p[best] / p[best].sum()
            kept = int(np.searchsorted(p.cumsum(), 0.8)) + 1
            place = best[:kept].tolist().index(token)  # a token outside of the kept set fails here
            assert logprob == pytest.approx(np.log(p[place] / p[:kept].sum()), abs=CLOSE)
    if mixed:
        assert gaps(rig, others, out).max() <= CLOSE


def test_greedy_is_the_argmax_with_logprobs_at_temperature_1(rig):
    requests = some(4, temperature=0, top_p=0.3, top_k=2)
    out = run(rig.engine, requests)
    for r in requests:
        logs = reference(rig.model, r, out[r.id])
        assert out[r.id].tokens.tolist() == logs.argmax(1).tolist()
        assert out[r.id].logprobs == pytest.approx(logs.max(1), abs=CLOSE)


def test_first_tokens_follow_the_model_over_many_seeds(rig):
    n = 3000
    requests = [request(t, [5, 9, 20], max_tokens=1, temperature=0.8) for t in range(n)]
    out = run(rig.engine, requests)
    counts = np.bincount([c.tokens[0] for c in out.values()], minlength=64)
    p = np.exp(reference(rig.model, requests[0], out[requests[0].id])[0] / 0.8)
    expected = n * p / p.sum()
    big = expected >= 5
    chi = ((counts - expected)[big] ** 2 / expected[big]).sum()
    freedom = big.sum() - 1
    assert freedom >= 5
    assert chi < freedom + 4 * (2 * freedom) ** 0.5


def test_a_request_draws_the_same_alone_and_in_company(rig):
    requests = some(20, longest=120, max_tokens=75)
    crowded = run(rig.engine, requests)
    reverse = run(rig.engine, requests[::-1])
    for r in requests[:3]:
        alone = run(rig.engine, [r])[r.id]
        for c in (crowded[r.id], reverse[r.id]):
            assert c.tokens.tolist() == alone.tokens.tolist()
            assert c.logprobs == pytest.approx(alone.logprobs, abs=CLOSE)
    other = run(rig.engine, [replace(requests[0], seed=requests[0].seed + 1)])[requests[0].id]
    assert other.tokens.tolist() != crowded[requests[0].id].tokens.tolist()


def test_swap_keeps_the_cache_and_stamps_each_token(rig):
    """Replayed token by token: each with the weights that its stamp names, on the keys and values of those before."""
    models = {0: rig.model} | {v: load_model(rig.folder, "float32") for v in (3, 4, 9)}
    swaps = {4: 3, 7: 4, 12: 9}
    weights = {v: changed(models[v], v) for v in swaps.values()}
    requests = some(12, max_tokens=24)
    for r in requests:
        rig.engine.add(r)
    out: dict[RequestId, Completion] = {}
    for step in range(1000):
        if not rig.engine.unfinished:
            break
        if step in swaps:
            rig.engine.load(weights[swaps[step]], swaps[step])
            assert rig.engine.version == swaps[step]
        out |= dict(rig.engine.step())
    stamps = [0] * 4 + [3] * 3 + [4] * 5 + [9] * 12
    first = [out[r.id].versions.tolist() for r in requests[:SLOTS]]
    assert stamps in first, "no request ran through all swaps: the test lost its point"
    assert all(versions == stamps[: len(versions)] for versions in first)
    for r in requests:
        c = out[r.id]
        assert (np.diff(c.versions) >= 0).all()
        cache, fed, replayed = DynamicCache(), torch.from_numpy(r.prompt).long()[None], []
        for token, version in zip(c.tokens.tolist(), c.versions.tolist(), strict=True):
            with torch.no_grad():
                logits = models[version](fed, past_key_values=cache, use_cache=True).logits[0, -1]
            replayed.append(torch.log_softmax(logits, -1)[token].item())
            fed = torch.tensor([[token]])
        assert c.logprobs == pytest.approx(replayed, abs=CLOSE)
    assert {v for c in out.values() for v in c.versions.tolist()} == {0, 3, 4, 9}


def test_after_every_swap_the_engine_is_the_new_model(rig):
    requests = some(8, max_tokens=30)
    before = run(rig.engine, requests)
    for version in (1, 2, 7):
        rig.swap(version)
        assert max(gap(rig.model, r, before[r.id]).max() for r in requests) > 0.01, "the weights hardly changed"
        out = run(rig.engine, requests)
        found = gaps(rig, requests, out)
        assert found.mean() <= 5e-6 and found.max() <= CLOSE
        assert {v for c in out.values() for v in c.versions.tolist()} == {version}
        before = out


def test_every_tensor_that_is_wanted_arrives(rig):
    """One tensor changed at a time: each of them moves the logprobs, and the engine follows."""
    r = request(0, [5, 6, 7, 8], max_tokens=6)
    for version, (name, parameter) in enumerate(rig.model.named_parameters(), start=1):
        before = run(rig.engine, [r])[r.id]
        with torch.no_grad():
            parameter += 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(version))
        rig.engine.load({n: p.detach() for n, p in rig.model.named_parameters()}, version)
        assert gap(rig.model, r, before).max() > 1e-4, f"{name} has no effect"
        assert gap(rig.model, r, run(rig.engine, [r])[r.id]).max() <= CLOSE, f"{name} did not arrive"


def test_the_first_weights_can_have_any_version(rig):
    """A run that goes on from a checkpoint counts on from there."""
    rig.engine.version = 41
    r = request(0, [5, 6], min_version=41)
    assert set(run(rig.engine, [r])[r.id].versions.tolist()) == {41}


def test_wanted_names_every_parameter_once(rig):
    wanted = rig.engine.wanted()
    assert wanted == {n: Box((0,) * p.ndim, tuple(p.shape)) for n, p in rig.model.named_parameters()}
    assert ("lm_head.weight" in wanted) == ("llama" in rig.folder)


@pytest.mark.parametrize("fault", ["missing", "misshaped"])
def test_a_bad_load_changes_nothing(rig, fault):
    tensors = {name: p + 1 for name, p in rig.first.items()}
    if fault == "missing":
        del tensors["model.norm.weight"]
    else:
        tensors["model.norm.weight"] = torch.zeros(65)
    with pytest.raises(ValueError, match=r"version 5 .*model\.norm\.weight"):
        rig.engine.load(tensors, 5)
    assert rig.engine.version == 0
    r = request(0, [5, 6, 7])
    c = run(rig.engine, [r])[r.id]
    assert gap(rig.model, r, c).max() <= CLOSE and set(c.versions.tolist()) == {0}


def test_a_prompt_is_not_reused_across_versions(rig):
    """A prompt longer than a block of the cache, when the weights change: finished, running, put off for want of room,
    waiting for a slot, not yet asked for."""
    generator = np.random.default_rng(0)
    prompt, *others = (generator.integers(3, 50, 140) for _ in range(5))
    run(rig.engine, [request(0, prompt, max_tokens=1)])
    crossing = request(1, prompt, max_tokens=40)
    rig.engine.add(crossing)
    rig.engine.step()
    # Two blocks each: with the four others, vLLM's cache is full before its last three slots are.
    work = [request(2 + i, p) for i, p in enumerate([*others, *[prompt] * 6])]
    for r in work:
        rig.engine.add(r)
    rig.engine.step()
    rig.swap(1)
    late = request(90, prompt)
    rig.engine.add(late)
    out = drain(rig.engine)
    assert set(out[crossing.id].versions.tolist()) == {0, 1}
    begun_later = [r for r in [*work, late] if out[r.id].versions[0] == 1]
    assert len(begun_later) >= 4
    for r in begun_later:
        assert gap(rig.model, r, out[r.id]).max() <= CLOSE


def test_stop_strings_end_where_they_are_completed(rig):
    requests = some(12, seed=1, max_tokens=60)
    whole = run(rig.engine, requests)
    decode = rig.engine.tokenizer.decode
    stopped = 0
    for r in requests:
        text = decode(whole[r.id].tokens)
        if len(text) < 6 or stopped == 6:
            continue
        stops = (text[4:6], "never produced, for its length is beyond")
        tokens = whole[r.id].tokens
        end = next(n for n in range(1, len(tokens) + 1) if stops[0] in decode(tokens[:n]))
        # The limit falls on the token that completes the string: the string counts.
        stopping, limited = (replace(r.sampling, stop=stops, max_tokens=n) for n in (60, end))
        asked = [replace(r, sampling=stopping), replace(r, id=RequestId(98, 0, 0, 0), sampling=limited)]
        bystander = replace(r, id=RequestId(99, 0, 0, 0))
        out = run(rig.engine, [*asked, bystander])
        for c in (out[asked[0].id], out[asked[1].id]):
            assert c.tokens.tolist() == tokens[:end].tolist() and c.finish == "stop"
        assert out[bystander.id].tokens.tolist() == tokens.tolist()
        stopped += 1
    assert stopped == 6


def test_abort_returns_the_partial_and_leaves_the_others_alone(rig):
    requests = some(11, max_tokens=40)
    expected = run(rig.engine, requests)
    for r in requests:
        rig.engine.add(r)
    assert (rig.engine.unfinished, rig.engine.free) == (11, 0)
    out: dict[RequestId, Completion] = {}
    for _ in range(5):
        out |= dict(rig.engine.step())
    running = next(r for r in requests if r.id not in out)
    queued = requests[10]
    assert running.id != queued.id
    aborted = dict(rig.engine.abort([running.id, queued.id, RequestId(77, 0, 0, 0)]))
    assert aborted.keys() == {running.id, queued.id}
    assert {c.finish for c in aborted.values()} == {"abort"}
    partial, whole = aborted[running.id], expected[running.id]
    assert partial.tokens.tolist() == whole.tokens[:5].tolist() and set(partial.versions.tolist()) == {0}
    assert partial.logprobs == pytest.approx(whole.logprobs[:5], abs=CLOSE)
    assert len(aborted[queued.id].tokens) == 0
    out |= drain(rig.engine)
    assert len(out) == 9
    assert all(c.tokens.tolist() == expected[i].tokens.tolist() for i, c in out.items())
    assert rig.engine.step() == [] and rig.engine.free == SLOTS
    # The same name again: a group's next attempt may reach the engine at once.
    assert run(rig.engine, [running])[running.id].tokens.tolist() == whole.tokens.tolist()


def test_a_request_can_fill_the_context_to_its_last_token(rig):
    requests = [request(t, [5 + t] * 150, max_tokens=50) for t in range(8)]
    out = run(rig.engine, requests)
    full = [r for r in requests if len(out[r.id].tokens) == 50]
    assert full
    assert gaps(rig, full, out).max() <= CLOSE


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"prompt": []}, "empty prompt"),
        ({"prompt": [5] * 191, "max_tokens": 10}, r"prompt of 191 \+ max_tokens 10 .* 200 .*--generator.engine.max-l"),
        ({"prompt": [5, 64], "max_tokens": 5}, "prompt token that is not among the model's 64"),
        ({"prompt": [-1], "max_tokens": 5}, "prompt token that is not among the model's 64"),
        ({"prompt": [5], "max_tokens": 5, "min_version": 2}, "wants version 2, the engine holds 0"),
    ],
)
def test_bad_requests_are_refused(rig, bad, message):
    with pytest.raises(ValueError, match=message) as caught:
        rig.engine.add(request(0, **bad))
    assert "\n" not in str(caught.value)
    assert rig.engine.unfinished == 0
    assert len(run(rig.engine, [request(0, [5], max_tokens=1)])) == 1


def test_weights_that_are_not_finite_are_an_error(rig):
    tensors = {name: p.clone() for name, p in rig.first.items()}
    tensors["model.norm.weight"][3] = torch.nan
    rig.engine.load(tensors, 8)
    rig.engine.add(request(4, [5]))
    with pytest.raises(FloatingPointError, match=r"request \(4, 0, 0, 0\) at version 8"):
        rig.engine.step()


@needs_vllm
class TestVllm:
    """What only this engine refuses."""

    CONFIG = RunConfig(model=str(Addition().checkpoint), generator=GeneratorConfig(engine=VllmEngine()))

    def start(self, **settings: object) -> None:
        engine = VllmEngine(**{"kv_gib": 0.01, **settings})
        build_engine(GeneratorConfig(engine=engine), str(Addition().checkpoint), 1, "cpu")

    def test_another_version_of_the_library_is_refused(self, monkeypatch):
        import vllm

        monkeypatch.setattr(vllm, "__version__", "0.33.0+cpu")
        with pytest.raises(RuntimeError, match=r"^vllm 0\.33\.0\+cpu is installed, .* written for 0\.32\.0$"):
            self.start()

    def test_a_library_without_the_inner_name_is_refused(self, monkeypatch):
        from vllm.model_executor.layers import utils

        monkeypatch.delattr(utils, "dispatch_cpu_unquantized_gemm")
        with pytest.raises(RuntimeError, match="has no dispatch_cpu_unquantized_gemm"):
            self.start()

    def test_compiling_on_cpu_is_refused(self):
        with pytest.raises(ValueError, match=r"--generator\.engine\.no-eager needs a GPU"):
            self.start(eager=False)

    def test_a_gpu_that_the_library_was_not_built_for_is_refused(self):
        with pytest.raises(ValueError, match="vLLM is installed for cpu, and the generator is on cuda"):
            build_engine(GeneratorConfig(engine=VllmEngine()), str(Addition().checkpoint), 1, "cuda")

    def test_synchronous_training_is_refused(self):
        check(self.CONFIG, Addition())
        with pytest.raises(ValueError, match=r"--buffer\.max-staleness 0 repeats to the bit and .*:vllm does not"):
            check(replace(self.CONFIG, buffer=replace(self.CONFIG.buffer, max_staleness=0)), Addition())


def test_what_the_vllm_engine_lacks_is_refused_where_it_is_asked_for():
    with pytest.raises(ValueError, match=r"generator\.tp must be 1 with generator\.engine:vllm, not 2"):
        GeneratorConfig(tp=2, engine=VllmEngine())
    with pytest.raises(ValueError, match=r"generator\.engine\.dtype bfloat16 is not offered by the vllm engine"):
        VllmEngine(dtype="bfloat16")


def test_an_engine_that_is_not_installed_is_refused(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    check_engine(GeneratorConfig())
    with pytest.raises(ValueError, match="needs vLLM: pip install"):
        check_engine(GeneratorConfig(engine=VllmEngine()))
