"""The key-value cache of the native engine as the model's attention layers see it during one forward.

A cache is one tensor [layers, 2, slots, kv_heads, max_length, head_dim]: keys and values of every request's slot.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn


class Slots(Protocol):
    """What the model's attention layers see of the cache during one forward."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Store key and value [batch, kv_heads, length, head_dim]; attend with query [batch, heads, length, head_dim].

        Returns [batch, length, heads * head_dim].
        """
        ...


class Probe:
    """Learns the cache's shape from a forward."""

    def __init__(self) -> None:
        self.layers = self.kv_heads = self.head_dim = 0

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        self.layers, self.kv_heads, self.head_dim = layer + 1, key.shape[1], key.shape[3]
        return query.transpose(1, 2).flatten(2)


class Prefill(NamedTuple):
    """Whole prompts into empty slots: row `rows[i]` gets the prompt `sources[i]` of the batch."""

    kv: Tensor
    rows: Tensor
    sources: Tensor

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        length = key.shape[2]
        self.kv[layer, 0][self.rows, :, :length] = key[self.sources]
        self.kv[layer, 1][self.rows, :, :length] = value[self.sources]
        out = nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
        )
        return out.transpose(1, 2).flatten(2)


class Decode(NamedTuple):
    """One token for each of the first rows."""

    kv: Tensor
    where: Tensor
    """int64 [rows * kv_heads]: each token's place in a layer's cache seen as [-1, head_dim]."""
    spans: list[tuple[int, int, int, Tensor]]
    """Start and end in rows * kv_heads, length, and what is added to the scores: 0 up to the token, -inf beyond."""

    @classmethod
    def at(cls, kv: Tensor, segments: list[tuple[int, int, int]], positions: np.ndarray) -> Decode:
        kv_heads, longest = kv.shape[3:5]
        last = torch.from_numpy(np.repeat(positions[:, 0], kv_heads)).to(kv.device)
        place = torch.arange(longest, device=kv.device)
        spans = []
        for start, end, length in segments:
            start, end = start * kv_heads, end * kv_heads
            beyond = torch.zeros((end - start, 1, length), dtype=kv.dtype, device=kv.device)
            beyond.masked_fill_(place[:length] > last[start:end, None, None], -torch.inf)
            spans.append((start, end, length, beyond))
        return cls(kv, torch.arange(len(last), device=kv.device) * longest + last, spans)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        batch, kv_heads, _, head_dim = key.shape
        keys, values = self.kv[layer, 0].flatten(0, 1), self.kv[layer, 1].flatten(0, 1)
        for cache, new in ((keys, key), (values, value)):
            cache.view(-1, head_dim).index_copy_(0, self.where, new.reshape(-1, head_dim))
        # Heads that share a key are the rows of one small product: plain matrix products beat the fused kernel on CPU.
        query = query.reshape(batch * kv_heads, -1, head_dim)
        parts = []
        for start, end, length, beyond in self.spans:
            scores = torch.baddbmm(beyond, query[start:end], keys[start:end, :length].transpose(1, 2), alpha=scaling)
            weights = torch.softmax(scores, -1, dtype=torch.float32).to(scores.dtype)
            parts.append(torch.bmm(weights, values[start:end, :length]))
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(batch, 1, -1)


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    slots: Slots,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """The plug-in for `pretrained.register_attention`."""
    for name, feature in (("sliding_window", sliding_window), ("softcap", softcap), ("s_aux", s_aux)):
        if feature is not None:
            raise NotImplementedError(f"the native engine's attention has no {name}, which this model's layers use")
    return slots.attend(module.layer_idx, query, key, value, scaling), None
