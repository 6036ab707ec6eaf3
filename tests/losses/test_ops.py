"""Chunked logprobs and advantage estimators."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from losses import group_mean, group_norm
from losses.ops import logprobs_and_entropy

T, D, V = 23, 5, 11


def problem(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(0)
    hidden = torch.randn(T, D, generator=source, dtype=dtype).requires_grad_()
    weight = torch.randn(V, D, generator=source, dtype=dtype).requires_grad_()
    targets = torch.randint(V, (T,), generator=source)
    return hidden, weight, targets, torch.rand(T, generator=source) + 0.5


@pytest.mark.parametrize("chunk", [1, 7, 22, T, 100])
def test_chunked_equals_full(chunk: int) -> None:
    hidden, weight, targets, temperature = problem()
    logits = (hidden @ weight.T) / temperature.double()[:, None]
    full = torch.stack([logits[t, targets[t]] - logits[t].logsumexp(0) for t in range(T)])
    distribution = torch.distributions.Categorical(logits=logits)
    logprobs, entropy = logprobs_and_entropy(hidden, weight, targets, temperature, chunk)
    torch.testing.assert_close(logprobs, full, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(entropy, distribution.entropy(), rtol=1e-12, atol=1e-12)
    factors = torch.linspace(-1, 1, T, dtype=torch.float64)
    got = torch.autograd.grad((factors * logprobs).sum() + 0.3 * entropy.sum(), (hidden, weight))
    want = torch.autograd.grad((factors * full).sum() + 0.3 * distribution.entropy().sum(), (hidden, weight))
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


def test_temperature_by_hand() -> None:
    """Logits (ln 1, ln 2, ln 4) at temperature 0.5 are squared odds 1 : 4 : 16, so p = 1/21, 4/21, 16/21."""
    weight = torch.tensor([[0.0], [math.log(2)], [math.log(4)]])
    logprobs, entropy = logprobs_and_entropy(torch.ones(3, 1), weight, torch.arange(3), torch.full((3,), 0.5), 8)
    p = [1 / 21, 4 / 21, 16 / 21]
    assert logprobs.tolist() == pytest.approx([math.log(x) for x in p], abs=1e-6)
    assert entropy.tolist() == pytest.approx([-sum(x * math.log(x) for x in p)] * 3, abs=1e-6)


def test_low_precision_hidden_gives_float32() -> None:
    hidden, weight, targets, temperature = problem(torch.bfloat16)
    logprobs, entropy = logprobs_and_entropy(hidden, weight, targets, temperature, 6)
    assert logprobs.dtype == entropy.dtype == torch.float32
    logits = (hidden @ weight.T).float() / temperature[:, None]
    torch.testing.assert_close(
        logprobs, logits.log_softmax(-1).gather(1, targets[:, None])[:, 0], rtol=1e-6, atol=1e-6
    )


def test_no_full_logits_are_kept_for_backward() -> None:
    """All that autograd saves together is smaller than one [T, V] matrix, and backward recomputes by chunks."""
    rows, vocabulary, chunk = 64, 512, 8
    hidden = torch.randn(rows, 4, requires_grad=True)
    weight = torch.randn(vocabulary, 4, requires_grad=True)
    largest = 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal largest
        largest = max(largest, tensor.numel())
        return tensor

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple) else (out,):
                if isinstance(tensor, torch.Tensor):
                    Largest.size = max(Largest.size, tensor.numel())
            return out

    with Largest(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logprobs, _ = logprobs_and_entropy(
            hidden, weight, torch.zeros(rows, dtype=torch.long), torch.ones(rows), chunk
        )
        logprobs.sum().backward()
    assert largest <= chunk * vocabulary
    assert Largest.size <= chunk * vocabulary < rows * vocabulary


groups = st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.0, 0.1, 1.0, -2.5])), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(groups)
def test_advantages_equal_the_statistics_module(rows: list[tuple[int, float]]) -> None:
    ids, rewards = [10 * g for g, _ in rows], torch.tensor([r for _, r in rows])
    members = {g: [r for i, r in zip(ids, rewards.tolist(), strict=True) if i == g] for g in set(ids)}
    mean = [r - statistics.fmean(members[g]) for g, r in zip(ids, rewards.tolist(), strict=True)]
    spread = {g: statistics.stdev(m) if len(m) > 1 else 0.0 for g, m in members.items()}
    norm = [m / (spread[g] + 1e-6) for g, m in zip(ids, mean, strict=True)]
    assert group_mean(rewards, torch.tensor(ids)).tolist() == pytest.approx(mean, rel=1e-6, abs=1e-7)
    assert group_norm(rewards, torch.tensor(ids)).tolist() == pytest.approx(norm, rel=1e-6, abs=1e-7)


def test_group_norm_by_hand() -> None:
    """Group 7: rewards 1, 0, 0: mean 1/3, variance (4/9 + 1/9 + 1/9) / 2 = 1/3. Group 2 is alone, group 3 equal."""
    rewards = torch.tensor([1.0, 5.0, 0.0, 0.1, 0.0, 0.1, 0.1])
    ids = torch.tensor([7, 2, 7, 3, 7, 3, 3])
    s = math.sqrt(1 / 3) + 1e-6
    got = group_norm(rewards, ids)
    assert got.tolist() == pytest.approx([2 / 3 / s, 0, -1 / 3 / s, 0, -1 / 3 / s, 0, 0], abs=1e-7)
    assert got[ids != 7].eq(0).all(), "equal rewards must give exactly 0"
    assert group_mean(rewards, ids)[ids != 7].eq(0).all()
