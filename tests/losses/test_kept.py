"""The softmax over kept sets: by hand, against float64 references, chunked."""

from __future__ import annotations

import math

import pytest
import torch

from losses.ops import KeptSets, logprobs_and_entropy

T, D, V = 23, 5, 11


def problem(seed: int = 0) -> tuple[tuple[torch.Tensor, ...], list[list[int]]]:
    """Hidden states, weight, targets and temperatures in float64, and a set for each target: that of every third, and
    of targets 7 to 15, is empty and stands for the whole vocabulary."""
    source = torch.Generator().manual_seed(seed)
    hidden = torch.randn(T, D, generator=source, dtype=torch.float64).requires_grad_()
    weight = torch.randn(V, D, generator=source, dtype=torch.float64).requires_grad_()
    targets = torch.randint(V, (T,), generator=source)
    sets = []
    for t, target in enumerate(targets.tolist()):
        others = torch.randperm(V, generator=source)[: t % 5].tolist()
        sets.append([] if t % 3 == 0 or 7 <= t < 16 else sorted({target, *others}))
    return (hidden, weight, targets, torch.rand(T, generator=source) + 0.5), sets


def ragged(sets: list[list[int]]) -> KeptSets:
    flat = [token for own in sets for token in own]
    return KeptSets(torch.tensor(flat, dtype=torch.int64), torch.tensor([len(own) for own in sets]))


def test_the_softmax_by_hand() -> None:
    """Odds 1 : 2 : 4 : 1 and targets 2. Over tokens 0 and 2 p = 4/5, over 2 alone 1, over all 4/8."""
    weight = torch.tensor([0.0, math.log(2), math.log(4), 0.0])[:, None]
    kept = ragged([[0, 2], [2], []])
    logprobs, entropy = logprobs_and_entropy(
        torch.ones(3, 1), weight, torch.full((3,), 2), torch.ones(3), chunk=8, kept=kept
    )
    assert logprobs.tolist() == pytest.approx([math.log(0.8), 0.0, math.log(0.5)], abs=1e-6)
    all_of_them = -(0.5 * math.log(0.5) + 0.25 * math.log(0.25) + 2 * 0.125 * math.log(0.125))
    assert entropy.tolist() == pytest.approx([-(0.8 * math.log(0.8) + 0.2 * math.log(0.2)), 0, all_of_them], abs=1e-6)


@pytest.mark.parametrize("chunk", [1, 7, 8, 22, T, 100])
def test_values_and_gradients_equal_a_softmax_over_each_set_alone(chunk: int) -> None:
    (hidden, weight, targets, temperature), sets = problem()
    logprobs, entropy = logprobs_and_entropy(hidden, weight, targets, temperature, chunk, ragged(sets))
    logits = (hidden @ weight.T) / temperature.double()[:, None]
    alone = [logits[t, own or list(range(V))].log_softmax(0) for t, own in enumerate(sets)]
    places = [own.index(token) if own else token for own, token in zip(sets, targets.tolist(), strict=True)]
    want = torch.stack([log[place] for log, place in zip(alone, places, strict=True)])
    entropies = torch.stack([-(log.exp() * log).sum() for log in alone])
    torch.testing.assert_close(logprobs, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(entropy, entropies, rtol=1e-12, atol=1e-12)
    factors = torch.linspace(-1, 1, T, dtype=torch.float64)
    got_grad = torch.autograd.grad((factors * logprobs).sum() + 0.3 * entropy.sum(), (hidden, weight))
    want_grad = torch.autograd.grad((factors * want).sum() + 0.3 * entropies.sum(), (hidden, weight))
    torch.testing.assert_close(got_grad, want_grad, rtol=1e-10, atol=1e-12)


def test_sets_of_everything_change_no_bit() -> None:
    (hidden, weight, targets, temperature), _ = problem()
    for chunk in (7, T):
        plain = logprobs_and_entropy(hidden.float(), weight.float(), targets, temperature, chunk)
        empty = logprobs_and_entropy(hidden.float(), weight.float(), targets, temperature, chunk, ragged([[]] * T))
        full = ragged([list(range(V))] * T)
        every = logprobs_and_entropy(hidden.float(), weight.float(), targets, temperature, chunk, full)
        for other in (empty, every):
            assert all(a.equal(b) for a, b in zip(plain, other, strict=True))


def test_a_mask_is_built_only_for_chunks_that_have_a_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Targets 7 to 13 are the second of four chunks and have none; without any set there is no mask at all."""
    (hidden, weight, targets, temperature), sets = problem()
    built: list[int] = []

    def counted(self: KeptSets, vocabulary: int) -> torch.Tensor:
        built.append(len(self.counts_T))
        return original(self, vocabulary)

    original = KeptSets.outside
    monkeypatch.setattr(KeptSets, "outside", counted)
    with torch.no_grad():
        logprobs_and_entropy(hidden, weight, targets, temperature, 7, ragged(sets))
        assert built == [7, 7, 2]
        logprobs_and_entropy(hidden, weight, targets, temperature, 7)
        logprobs_and_entropy(hidden, weight, targets, temperature, T)
        assert built == [7, 7, 2]
