import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM

from actors.config import NativeEngine
from actors.engines.native import Native
from actors.pretrained import load_model
from actors.types import Completion, Request, RequestId, Sampling, derive_seed
from actors.weights import Box
from tests.actors.models import char_tokenizer, save_tiny

FAMILIES = ("qwen3_tied", "qwen3", "llama")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    base = tmp_path_factory.mktemp("models")
    return {family: save_tiny(base / family, family) for family in FAMILIES}


@pytest.fixture(scope="module")
def folder(folders: dict[str, str]) -> str:
    return folders["qwen3_tied"]


def request(ticket: int, prompt, member: int = 0, min_version: int = 0, **sampling) -> Request:
    return Request(
        id=RequestId(ticket, 0, member, 0),
        prompt=np.asarray(prompt, np.int32),
        sampling=Sampling(**{"max_tokens": 20, **sampling}),
        seed=derive_seed(0, ticket, member, 0),
        min_version=min_version,
    )


def some(count: int, seed: int = 0, longest: int = 12, **sampling) -> list[Request]:
    """Requests with random prompts."""
    generator = np.random.default_rng(seed)
    return [
        request(t, generator.integers(3, 50, generator.integers(1, longest + 1)), **sampling) for t in range(count)
    ]


def run(engine: Native, requests: list[Request]) -> dict[RequestId, Completion]:
    for r in requests:
        engine.add(r)
    out: dict[RequestId, Completion] = {}
    while engine.unfinished:
        out |= dict(engine.step())
    return out


def same(a: Completion, b: Completion) -> bool:
    """Bit for bit."""
    return all(getattr(a, c).tobytes() == getattr(b, c).tobytes() for c in ("tokens", "logprobs", "versions"))


def reference(model: nn.Module, r: Request, c: Completion) -> np.ndarray:
    """Log distribution of every completion token, from one full forward of the unchanged model: [n, vocabulary]."""
    ids = torch.from_numpy(np.concatenate([r.prompt, c.tokens])).long()[None]
    with torch.no_grad():
        return torch.log_softmax(model(ids).logits[0].double(), -1)[len(r.prompt) - 1 : -1].numpy()


def gap(model: nn.Module, r: Request, c: Completion) -> np.ndarray:
    """How far each token's logprob is from the full forward's."""
    return np.abs(reference(model, r, c)[np.arange(len(c.tokens)), c.tokens] - c.logprobs)


def changed(model: nn.Module, version: int) -> dict[str, torch.Tensor]:
    """Other weights for the model, and the model set to them."""
    torch.manual_seed(version)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return {name: p.data for name, p in model.named_parameters()}


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_equal_the_full_forward(folders, family):
    engine, model = (
        Native(NativeEngine(slots=9, max_length=140), folders[family]),
        load_model(folders[family], "float32"),
    )
    requests = some(24, longest=60, max_tokens=80)
    classes = set()
    for r in requests:
        engine.add(r)
    out: dict[RequestId, Completion] = {}
    while engine.unfinished:
        out |= dict(engine.step())
        classes.add(len(engine.segments))
        for start, end, length in engine.segments:
            attended = engine.rows["length"][start:end] + 1
            assert attended.max() == length
            assert len(set(np.ceil(np.log2(np.maximum(attended, 32))))) == 1
    assert max(classes) >= 3, "no step with several length classes: the test lost its point"
    gaps = np.concatenate([gap(model, r, out[r.id]) for r in requests])
    assert len(gaps) > 500
    assert gaps.mean() <= 5e-6
    assert gaps.max() <= 1e-4


def test_truncated_logprobs_equal_a_float64_reference(folder):
    engine, model = Native(NativeEngine(slots=8, max_length=64), folder), load_model(folder, "float32")
    requests = some(8, temperature=0.7, top_p=0.8, top_k=10)
    out = run(engine, requests)
    for r in requests:
        c, sets = out[r.id], []
        for token, logprob, logs in zip(c.tokens, c.logprobs, reference(model, r, c), strict=True):
            p = np.exp(logs / 0.7)
            best = np.argsort(-p)[:10]
            p = p[best] / p[best].sum()
            kept = int(np.searchsorted(p.cumsum(), 0.8)) + 1
            place = best[:kept].tolist().index(token)  # a token outside of the kept set fails here
            assert logprob == pytest.approx(np.log(p[place] / p[:kept].sum()), abs=1e-5)
            sets.append(sorted(best[:kept].tolist()))
        assert [own.ids.tolist() for own in c.kept.split([1] * len(c.tokens))] == sets


def test_first_tokens_follow_the_model_over_many_seeds(folder):
    n = 4000
    engine, model = Native(NativeEngine(slots=512, max_length=8), folder), load_model(folder, "float32")
    requests = [request(t, [5, 9, 20], max_tokens=1, temperature=0.8) for t in range(n)]
    out = run(engine, requests)
    counts = np.bincount([c.tokens[0] for c in out.values()], minlength=64)
    p = np.exp(reference(model, requests[0], out[requests[0].id])[0] / 0.8)
    expected = n * p / p.sum()
    big = expected >= 5
    chi = ((counts - expected)[big] ** 2 / expected[big]).sum()
    freedom = big.sum() - 1
    assert freedom >= 5
    assert chi < freedom + 4 * (2 * freedom) ** 0.5
    assert counts[~big].sum() <= expected[~big].sum() + 4 * expected[~big].sum() ** 0.5 + 1


def test_greedy_is_the_argmax_with_logprobs_at_temperature_1(folder):
    engine, model = Native(NativeEngine(slots=4, max_length=64), folder), load_model(folder, "float32")
    requests = some(4, temperature=0, top_p=0.3)
    out = run(engine, requests)
    for r in requests:
        logs = reference(model, r, out[r.id])
        assert out[r.id].tokens.tolist() == logs.argmax(1).tolist()
        assert out[r.id].logprobs == pytest.approx(logs.max(1), abs=1e-5)


def test_a_request_draws_the_same_alone_in_company_and_elsewhere(folder):
    requests = some(30, max_tokens=50)
    small, large = (
        Native(NativeEngine(slots=7, max_length=64), folder),
        Native(NativeEngine(slots=64, max_length=80), folder),
    )
    crowded, together = run(small, requests), run(large, requests[::-1])
    for r in requests[:4]:
        alone = run(large, [r])[r.id]
        assert crowded[r.id].tokens.tolist() == together[r.id].tokens.tolist() == alone.tokens.tolist()
        assert crowded[r.id].logprobs == pytest.approx(alone.logprobs, abs=1e-5)


@pytest.mark.parametrize(("deterministic", "expected"), [(False, [(2, 6), (1, 2)]), (True, [(1, 6), (1, 6), (1, 2)])])
def test_members_of_a_group_share_one_prefill(folder, deterministic, expected):
    engine = Native(NativeEngine(slots=16, max_length=64, deterministic=deterministic), folder, group_size=4)
    shapes = []
    forward = engine._forward
    engine._forward = lambda ids, *rest: shapes.append(ids.shape) or forward(ids, *rest)
    for r in [request(t, [5 + t] * 6, member) for t in (0, 1) for member in range(4)] + [request(2, [9, 9])]:
        engine.add(r)
    engine.step()
    assert shapes == expected


DETERMINISTIC = NativeEngine(slots=8, max_length=48, deterministic=True)


def mixed_work(seed: int) -> list[Request]:
    """The same requests, slots shared and settings mixed, in another order for each seed."""
    generator = np.random.default_rng(0)
    settings = {-1: {}, 0: {"temperature": 0.7}, 2: {"top_p": 0.8}, 4: {}, 6: {"temperature": 0.0}, 8: {"top_k": 5}}
    work = []
    for ticket, sampling in settings.items():
        prompt = generator.integers(3, 50, generator.integers(1, 9))
        work += [request(ticket, prompt, member, max_tokens=12, **sampling) for member in range(2)]
    return [work[i] for i in np.random.default_rng(seed).permutation(len(work))]


@pytest.fixture(scope="module")
def fixed(folder: str) -> Native:
    """A deterministic engine that has served others before."""
    return Native(DETERMINISTIC, folder, replicas=2, group_size=2)


@pytest.fixture(scope="module")
def alone(folder: str) -> dict[RequestId, Completion]:
    """What each request of the mixed work gets with nothing else running."""
    engine = Native(DETERMINISTIC, folder, replicas=2, group_size=2)
    return {r.id: run(engine, [r])[r.id] for r in mixed_work(0)}


@pytest.mark.parametrize("seed", range(6))
def test_deterministic_bits_do_not_depend_on_the_schedule(fixed, alone, seed):
    arrivals = np.random.default_rng(seed)
    pending, out = mixed_work(seed), {}
    while pending or fixed.unfinished:
        for _ in range(min(len(pending), arrivals.integers(0, 5))):
            fixed.add(pending.pop())
        out |= dict(fixed.step())
    assert out.keys() == alone.keys()
    assert [i for i in out if not same(out[i], alone[i])] == []


def test_deterministic_request_waits_for_its_own_slot(fixed):
    # Of two replicas, tickets 0 and 8 have the slots 0 // 2 * 2 and 8 // 2 * 2, equal modulo 8; ticket 2 another.
    for ticket in (0, 8, 2):
        fixed.add(request(ticket, [5], max_tokens=3))
    ended = []
    while fixed.unfinished:
        ended.append({i.ticket for i, _ in fixed.step()})
    assert ended == [set(), set(), {0, 2}, set(), set(), {8}]


def test_deterministic_slots_hold_a_share_of_the_tickets_and_a_probe(fixed):
    for ticket in (0, 2, 4, 6, -1):
        for member in range(2):
            fixed.add(request(ticket, [5], member, max_tokens=2))
    assert fixed.step() == []
    assert len(fixed.step()) == 10


@pytest.mark.parametrize("family", ["qwen3_tied", "llama"])
def test_swap_keeps_the_cache_and_stamps_each_token(folders, family):
    engine = Native(NativeEngine(slots=5, max_length=64), folders[family])
    models = {v: load_model(folders[family], "float32") for v in (0, 3, 4, 9)}
    swaps = {4: 3, 7: 4, 12: 9}
    weights = {v: changed(models[v], v) for v in swaps.values()}
    requests = some(12, max_tokens=24)
    for r in requests:
        engine.add(r)
    out: dict[RequestId, Completion] = {}
    for step in range(1000):
        if not engine.unfinished:
            break
        if step in swaps:
            engine.load(weights[swaps[step]], swaps[step])
        out |= dict(engine.step())
    assert out[requests[0].id].versions.tolist() == [0] * 4 + [3] * 3 + [4] * 5 + [9] * 12
    for r in requests:
        c = out[r.id]
        assert (np.diff(c.versions) >= 0).all()
        cache, fed, replayed = DynamicCache(), torch.from_numpy(r.prompt).long()[None], []
        for token, version in zip(c.tokens.tolist(), c.versions.tolist(), strict=True):
            with torch.no_grad():
                logits = models[version](fed, past_key_values=cache, use_cache=True).logits[0, -1]
            replayed.append(torch.log_softmax(logits, -1)[token].item())
            fed = torch.tensor([[token]])
        assert c.logprobs == pytest.approx(replayed, abs=1e-4)
    assert {v for c in out.values() for v in c.versions.tolist()} == {0, 3, 4, 9}


def test_a_prompt_is_not_reused_across_versions(folder):
    engine, model = Native(NativeEngine(slots=4, max_length=64), folder), load_model(folder, "float32")
    early, late = request(0, [5, 6, 7], 0), request(0, [5, 6, 7], 1)
    engine.add(early)
    engine.step()
    engine.load(changed(model, 1), 1)
    out = run(engine, [late])
    c = out[late.id]
    assert set(c.versions.tolist()) == {1}
    assert gap(model, late, c).max() < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_wanted_names_every_parameter_once(folders, family):
    wanted = Native(NativeEngine(slots=1, max_length=8), folders[family]).wanted()
    assert wanted["model.embed_tokens.weight"] == Box((0, 0), (64, 64))
    assert wanted["model.norm.weight"] == Box((0,), (64,))
    assert ("lm_head.weight" in wanted) == (family != "qwen3_tied")
    assert sum(int(np.prod(b.size)) for b in wanted.values()) == sum(
        p.numel() for p in load_model(folders[family], "float32").parameters()
    )


def missing(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.norm.weight"]


def misshaped(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = torch.zeros(65)


@pytest.mark.parametrize("spoil", [missing, misshaped])
def test_a_bad_load_changes_nothing(folder, spoil: Callable[[dict[str, torch.Tensor]], None]):
    engine = Native(NativeEngine(slots=1, max_length=8), folder)
    before = {name: p.clone() for name, p in engine.model.named_parameters()}
    tensors = {name: p + 1 for name, p in before.items()}
    spoil(tensors)
    with pytest.raises(ValueError, match=r"version 5 .*model\.norm\.weight"):
        engine.load(tensors, 5)
    assert engine.version == 0
    assert all(torch.equal(p, before[name]) for name, p in engine.model.named_parameters())


def test_finish_by_eos_and_by_length(folder):
    engine = Native(NativeEngine(slots=16, max_length=64), folder)
    out = run(engine, some(40, max_tokens=30))
    ends = {c.finish for c in out.values()}
    assert ends == {"stop", "length"}
    for c in out.values():
        assert (c.tokens[:-1] != 2).all()
        assert (c.tokens[-1] == 2) == (c.finish == "stop")
        assert (len(c.tokens) == 30) or c.finish == "stop"


def test_stop_strings_end_where_they_are_completed(folder):
    engine = Native(NativeEngine(slots=16, max_length=80), folder)
    requests = some(12, seed=1, max_tokens=60)
    whole = run(engine, requests)
    decode = engine.tokenizer.decode
    stopped = 0
    for r in requests:
        text = decode(whole[r.id].tokens)
        if len(text) < 6:
            continue
        stops = (text[4:6], "never produced, for its length is beyond")
        bystander = request(99, r.prompt)
        out = run(engine, [request(r.id.ticket, r.prompt, max_tokens=60, stop=stops), bystander])
        tokens = whole[r.id].tokens
        end = next(n for n in range(1, len(tokens) + 1) if stops[0] in decode(tokens[:n]))
        assert out[r.id].tokens.tolist() == tokens[:end].tolist()
        assert out[r.id].finish == "stop"
        assert len(out[bystander.id].tokens) == 20 or out[bystander.id].tokens[-1] == 2
        stopped += 1
    assert stopped >= 6


def test_abort_returns_the_partial_and_leaves_the_others_alone(folder):
    requests = some(7, max_tokens=40)
    expected = run(Native(NativeEngine(slots=7, max_length=64), folder), requests)
    engine = Native(NativeEngine(slots=4, max_length=64), folder)
    for r in requests:
        engine.add(r)
    out: dict[RequestId, Completion] = {}
    for _ in range(5):
        out |= dict(engine.step())
    running = next(r for r in requests if r.id not in out)
    queued = requests[6]
    aborted = dict(engine.abort([running.id, queued.id, RequestId(77, 0, 0, 0)]))
    assert aborted.keys() == {running.id, queued.id}
    assert {c.finish for c in aborted.values()} == {"abort"}
    assert aborted[running.id].tokens.tolist() == expected[running.id].tokens[:5].tolist()
    assert len(aborted[queued.id].tokens) == 0
    while engine.unfinished:
        out |= dict(engine.step())
    assert len(out) == 5
    assert all(c.tokens.tolist() == expected[i].tokens.tolist() for i, c in out.items())
    assert engine.step() == []


def test_requests_beyond_the_slots_wait_in_order(folder):
    engine = Native(NativeEngine(slots=4, max_length=64), folder)
    for r in some(10, max_tokens=1):
        engine.add(r)
    assert engine.unfinished == 10
    assert [{i.ticket for i, _ in engine.step()} for _ in range(3)] == [{0, 1, 2, 3}, {4, 5, 6, 7}, {8, 9}]


def test_an_end_token_that_the_model_lacks_is_refused(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "generation_config.json").write_text('{"eos_token_id": [2, 64]}')
    with pytest.raises(ValueError, match=r"end tokens \[64\] .* are not among its model's 64"):
        Native(NativeEngine(slots=2, max_length=16), str(copy))


def test_bfloat16_stays_near_float32(folder):
    engine, model = (
        Native(NativeEngine(slots=8, max_length=64, dtype="bfloat16"), folder),
        load_model(folder, "float32"),
    )
    requests = some(16, max_tokens=30)
    out = run(engine, requests)
    gaps = [
        reference(model, r, c)[np.arange(len(c.tokens)), c.tokens] - c.logprobs for r in requests for c in [out[r.id]]
    ]
    assert 1e-4 < np.abs(np.concatenate(gaps)).mean() < 0.05


def test_attention_that_the_cache_cannot_serve_is_refused(tmp_path: Path):
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=32,
        intermediate_size=32,
        use_sliding_window=True,
        sliding_window=8,
        max_window_layers=0,
        eos_token_id=2,
    )
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    char_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(NotImplementedError, match="sliding_window"):
        Native(NativeEngine(slots=1, max_length=16), str(tmp_path))
