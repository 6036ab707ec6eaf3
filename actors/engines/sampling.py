"""Drawing tokens: counter-based randomness per request, truncation, and logprobs of what was really sampled from."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix(values: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014, figure 17): a bijection of uint64 that spreads bits."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def uniforms(seeds: np.ndarray, counters: np.ndarray) -> np.ndarray:
    """One number in [0, 1) per row, a function of (seed, counter) alone: uint64 [n] and integers [n] to float64 [n].

    52 bits, so that a cumulated total times the number stays below the total in float64.
    """
    bits = mix(mix(seeds) + counters.astype(np.uint64) * _GOLDEN)
    return (bits >> np.uint64(12)) * 2.0**-52


class Drawn(NamedTuple):
    """One token of each row."""

    tokens: Tensor
    """int64 [n]."""
    logprobs: Tensor
    """float32 [n], after temperature and truncation; at temperature 0 the model's own, at temperature 1. Not finite if
    the logits are not."""
    kept: Tensor | None
    """bool [n, vocabulary]: what truncation left, the drawn token among it; None if no row has any truncation."""


def draw(logits: Tensor, uniform: np.ndarray, temperature: np.ndarray, top_p: np.ndarray, top_k: np.ndarray) -> Drawn:
    """One token per row by the inverse of the cumulated distribution, in order of token id.

    Args:
        logits: [n, vocabulary].
        uniform: float64 [n] in [0, 1).
        temperature: [n]; 0 takes the likeliest token and ignores truncation.
        top_p: [n]; the smallest set of likeliest tokens that reaches it is kept, after top_k.
        top_k: [n]; 0 keeps all.
    """

    def column(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(logits.device).unsqueeze(1)

    logits = logits.float()
    greedy = temperature == 0
    if ((temperature != 1) & ~greedy).any():
        logits = logits / column(np.where(greedy, 1, temperature).astype(np.float32))
    kept = None
    if (~greedy & ((top_p < 1) | (top_k > 0))).any():
        kept = _kept(logits, column(np.where(greedy, 1, top_p)), column(np.where(greedy, 0, top_k)))
        logits = logits.masked_fill(~kept, -torch.inf)
    logprobs = torch.log_softmax(logits, -1)
    cumulated = logprobs.exp().cumsum(-1, dtype=torch.float64)
    tokens = torch.searchsorted(cumulated, column(uniform) * cumulated[:, -1:], right=True)
    if greedy.any():
        tokens = torch.where(column(greedy), logits.argmax(-1, keepdim=True), tokens)
    tokens.clamp_(max=logits.shape[-1] - 1)  # reached by rows that are not finite only
    return Drawn(tokens.squeeze(1), logprobs.gather(1, tokens).squeeze(1), kept)


def _kept(logits: Tensor, top_p: Tensor, top_k: Tensor) -> Tensor:
    """Which tokens survive: bool [n, vocabulary]. Of equal logits the lower id counts as likelier."""
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    inside = (top_k == 0) | (rank < top_k)
    probability = ordered.masked_fill(~inside, -torch.inf).softmax(-1, dtype=torch.float64)
    inside &= (top_p >= 1) | (rank == 0) | (probability.cumsum(-1) - probability < top_p)
    return torch.zeros_like(inside).scatter(-1, order, inside)
