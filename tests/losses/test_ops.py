"""Chunked logprobs."""

from __future__ import annotations

import math

import pytest
import torch

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
