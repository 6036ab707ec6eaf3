"""Packed attention against one rollout at a time; rollouts that share prompts against rollouts that repeat them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.attention.varlen as varlen
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from actors.backends.hf import HfModel
from actors.backends.packed import WASTE, Documents, Repeats, _flash, packed_attention, repeat
from actors.batching import pack
from actors.types import Rollout
from losses import DIS, LossInputs
from losses.ops import neutral, reduce_terms
from tests.actors.training_data import one_prompt, rollout

CPU = torch.device("cpu")


@st.composite
def packings(draw: st.DrawFn) -> tuple[list[int], list[tuple[int, int]]]:
    """Prompts, long and short beside what follows them, and continuations."""
    prompts = draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    return prompts, draw(st.lists(st.tuples(st.integers(0, len(prompts) - 1), st.integers(1, 30)), max_size=8))


def one_rollout_at_a_time(
    tensors: Sequence[Tensor], prompts: list[int], continuations: list[tuple[int, int]]
) -> Tensor:
    """Softmax attention written down, [1, S, H, D]: each rollout whole, of which the continuation is kept."""
    query, key, value = tensors
    starts = np.cumsum([0, *prompts]).tolist()
    rollouts = [list(range(a, a + n)) for a, n in zip(starts, prompts, strict=False)]
    at, repeats = starts[-1], query.shape[1] // key.shape[1]
    for number, length in continuations:
        rollouts.append([*rollouts[number], *range(at, at + length)])
        at += length
    outputs: dict[int, Tensor] = {}
    for tokens in rollouts:
        q, k, v = (x[0][:, tokens] for x in (query, key, value))
        k, v = k.repeat_interleave(repeats, 0), v.repeat_interleave(repeats, 0)
        scores = q @ k.transpose(1, 2) * 0.3
        scores = scores.masked_fill(torch.ones(len(tokens), len(tokens), dtype=torch.bool).triu(1), -torch.inf)
        for token, row in zip(tokens, (scores.softmax(-1) @ v).transpose(0, 1), strict=True):
            outputs.setdefault(token, row)
    return torch.stack([outputs[token] for token in range(at)])[None]


def random_attention(tokens: int, seed: int) -> tuple[list[Tensor], Tensor]:
    """Query, key and value, and a weight for the output."""
    source = torch.Generator().manual_seed(seed)
    shapes = [(1, 4, tokens, 8), (1, 2, tokens, 8), (1, 2, tokens, 8)]
    tensors = [torch.randn(s, generator=source, dtype=torch.float64).requires_grad_() for s in shapes]
    return tensors, torch.randn(1, tokens, 4, 8, generator=source, dtype=torch.float64)


def compare(got: Tensor, want: Tensor, tensors: list[Tensor], weight: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
    got_grad = torch.autograd.grad((got * weight).sum(), tensors)
    want_grad = torch.autograd.grad((want * weight).sum(), tensors)
    torch.testing.assert_close(got_grad, want_grad, rtol=1e-9, atol=1e-11)


@settings(max_examples=60, deadline=None)
@given(packings(), st.integers(0, 2**16))
def test_packed_attention_equals_one_rollout_at_a_time(
    packing: tuple[list[int], list[tuple[int, int]]], seed: int
) -> None:
    prompts, continuations = packing
    tensors, weight = random_attention(sum(prompts) + sum(n for _, n in continuations), seed)
    layout = Documents(prompts, continuations, CPU)
    query, key, value = tensors
    got, _ = packed_attention(torch.nn.Module(), query, key, value, None, documents=layout, scaling=0.3)
    compare(got, one_rollout_at_a_time(tensors, prompts, continuations), tensors, weight)


def bottom_right(
    query: Tensor, key: Tensor, value: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, **options: Any
) -> Tensor:
    """What flash attention computes of documents of unequal queries and keys: the last query sees all keys."""
    assert options["window_size"] == (-1, 0) and options["enable_gqa"] and max_q >= int(cu_q.diff().max())
    outputs = []
    for q0, q1, k0, k1 in zip(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:], strict=True):
        q, k, v = (x.transpose(0, 1) for x in (query[q0:q1], key[k0:k1], value[k0:k1]))
        k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
        scores = q @ k.transpose(1, 2) * options["scale"]
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1 + int((k1 - k0) - (q1 - q0)))
        outputs.append((scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v).transpose(0, 1))
    return torch.cat(outputs)


def test_what_flash_attention_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, continuations = [5, 2, 9], [(1, 4), (0, 3), (0, 1), (2, 6)]
    tensors, weight = random_attention(30, 0)
    monkeypatch.setattr(varlen, "varlen_attn", bottom_right)
    columns = [x[0].transpose(0, 1) for x in tensors]
    got = _flash(columns[0], columns[1], columns[2], Documents(prompts, continuations, CPU), 0.3, True)
    compare(got, one_rollout_at_a_time(tensors, prompts, continuations), tensors, weight)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 200), min_size=1, max_size=64), st.integers(1, 400))
def test_padding_stays_within_the_waste(lengths: list[int], prompt: int) -> None:
    alone = Documents(lengths, [], CPU).padded
    assert len(alone.keys.row_P) == len(alone.queries.row_P) <= WASTE * sum(lengths)
    shared = Documents([prompt], [(0, n) for n in lengths], CPU).padded
    assert len(shared.keys.row_P) == sum(c.documents * c.keys for c in shared.classes)
    assert len(shared.queries.row_P) == sum(c.documents * c.queries for c in shared.classes)
    assert len(shared.keys.row_P) <= WASTE * (prompt + sum(prompt + n for n in lengths))
    assert sum(c.documents for c in shared.classes) == len(lengths) + 1


def test_a_long_prompt_has_its_queries_once() -> None:
    """After 100 tokens, 16 continuations of 10: the queries are 100 and 160; after 9, whole rollouts are cheaper."""
    assert len(Documents([100], [(0, 10)] * 16, CPU).padded.queries.row_P) == 100 + 16 * 10
    assert len(Documents([9], [(0, 10)] * 16, CPU).padded.queries.row_P) == 9 + 16 * 19


def test_repeat_by_hand() -> None:
    """Row 2 is copied three times, the last of which is not real; row 1 never."""
    rows = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], requires_grad=True)
    places = torch.tensor([2, 0, 2, 2])
    copied = repeat(rows, Repeats.of(places, 3, torch.tensor([True, True, True, False])))
    assert copied.tolist() == [[5, 6], [1, 2], [5, 6], [5, 6]]
    copied.backward(torch.tensor([[1.0, 10.0], [2.0, 20.0], [3.0, 30.0], [4.0, 40.0]]))
    assert rows.grad is not None and rows.grad.tolist() == [[2, 20], [0, 0], [4, 40]]


def test_what_is_not_computed_is_refused() -> None:
    layout = Documents([2], [(0, 2)], CPU)
    x = torch.zeros(1, 1, 4, 8)
    with pytest.raises(ValueError, match="soft-capping"):
        packed_attention(torch.nn.Module(), x, x, x, None, documents=layout, softcap=30.0)
    with pytest.raises(ValueError, match="4 tokens is beyond the model's window of 3"):
        packed_attention(torch.nn.Module(), x, x, x, None, documents=layout, sliding_window=3)
    with pytest.raises(ValueError, match="dropout"):
        packed_attention(torch.nn.Module(), x, x, x, None, documents=layout, dropout=0.1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> HfModel:
    """In float64 throughout: GPT-NeoX normalises in the type of its input."""
    folder = tmp_path_factory.mktemp("neox")
    config = GPTNeoXConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        max_position_embeddings=128,
    )
    torch.manual_seed(0)
    GPTNeoXForCausalLM(config).save_pretrained(folder)
    backend = HfModel(str(folder), "float32", CPU)
    backend.scored.double()
    with torch.no_grad():
        for parameter in backend.parameters().values():
            parameter.normal_(0, parameter.shape[-1] ** -0.5)
    return backend


def turns(rng: np.random.Generator, r: Rollout) -> Rollout:
    """The same with an observation of two tokens amid its actions."""
    mask = r.mask.copy()
    at = int(mask.argmax()) + 1 + int(rng.integers(2))
    mask[at : at + 2] = False
    return replace(r, mask=mask, logprobs=np.where(mask, r.logprobs, 0), versions=np.where(mask, r.versions, -1))


def awkward_groups(seed: int) -> list[list[Rollout]]:
    """One prompt; one prompt and a member with another; multi-turn; one-token completions; a long prompt; alone."""
    rng = np.random.default_rng(seed)

    def members(prompt: int, *actions: int) -> list[Rollout]:
        return one_prompt([rollout(rng, prompt + n, prompt, 1, temperature=0.8) for n in actions])

    return [
        members(5, 9, 3, 14, 1),
        [*members(4, 6, 2), rollout(rng, 9, 4, 1), rollout(rng, 8, 3, 1)],
        [turns(rng, r) for r in members(6, 12, 7, 9)],
        members(3, 1, 1),
        members(40, 4, 7, 2),
        members(7, 5),
    ]


def gradients(backend: HfModel, pieces: list[list[tuple[int, Rollout]]]) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Of microbatches of (ticket, rollout): summed gradients, and per rollout the targets' logprobs and entropies."""
    scores: list[Tensor] = []
    for p in backend.parameters().values():
        p.grad = None
    for piece in pieces:
        advantage = [float(r.tokens[-1]) - 30 for _, r in piece]
        m = pack([r for _, r in piece], tickets=[t for t, _ in piece], advantages=advantage, step=1)
        logprobs_T, entropy_T = backend.forward(m)
        inputs: LossInputs = neutral(m.loss_inputs(logprobs_T, entropy_T))
        terms = reduce_terms(DIS(low=0.0, high=1e9)(inputs), inputs)
        (terms.loss + 0.1 * entropy_T[m.mask_T].sum()).backward()
        both = torch.stack([logprobs_T, entropy_T]).detach()
        scores += [both[:, m.segment_T == number] for number in range(len(piece))]
    return {name: p.grad for name, p in backend.parameters().items() if p.grad is not None}, scores


@pytest.mark.parametrize("seed", range(3))
def test_sharing_changes_nothing_but_the_work(model: HfModel, seed: int) -> None:
    flat = [(number, r) for number, group in enumerate(awkward_groups(seed)) for r in group]
    want_grad, want = gradients(model, [[one] for one in flat])
    for pieces in ([flat], [flat[:3], flat[3:10], flat[10:]]):
        got_grad, got = gradients(model, pieces)
        assert got_grad.keys() == want_grad.keys() == model.parameters().keys()
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
        for name in want_grad:
            torch.testing.assert_close(got_grad[name], want_grad[name], rtol=1e-9, atol=1e-10, msg=name)


def test_the_model_computes_each_prompt_once(model: HfModel) -> None:
    """A prompt of 20 and 8 times 3 generated tokens, the last of which predicts nothing: 20 + 8 * 2, not 8 * 22."""
    rng = np.random.default_rng(0)
    group = one_prompt([rollout(rng, 23, 20, 1) for _ in range(8)])
    rows: list[int] = []
    hook = model.scored.base.register_forward_hook(lambda _, args, out: rows.append(out.last_hidden_state.shape[1]))
    gradients(model, [[(0, r) for r in group]])
    hook.remove()
    assert rows == [36]


def test_the_naive_model_agrees(model: HfModel, tmp_path: Path) -> None:
    """Logprobs of transformers' own attention on one rollout at a time."""
    model.save(str(tmp_path))
    naive = GPTNeoXForCausalLM.from_pretrained(tmp_path, dtype=torch.float64, attn_implementation="eager")
    flat = [(number, r) for number, group in enumerate(awkward_groups(7)) for r in group]
    _, scores = gradients(model, [flat])
    for (_, r), both in zip(flat, scores, strict=True):
        ids = torch.from_numpy(r.tokens.astype(np.int64))
        log = (naive(ids[None]).logits[0, :-1] / r.sampling.temperature).log_softmax(-1)
        want = log.gather(1, ids[1:, None])[:, 0].detach()[int(r.mask.argmax()) - 1 :]
        torch.testing.assert_close(both[0], want, rtol=1e-6, atol=1e-6)
