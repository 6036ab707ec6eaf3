"""Attention over documents packed one after another, in time proportional to sum of L^2, for any transformers model.

Axis legend: `_T` packed tokens, H heads, K key/value heads, D head size, `_P` places: the tokens again, with padding,
document by document in classes of similar length. Causal attention within a class is one call; a place after the end
of its document repeats the last token and is dropped, so documents do not see each other or their padding at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

WASTE = 1.5
"""Documents share a class while the longest has at most this many times the tokens of the shortest."""


class Documents(NamedTuple):
    """How T packed tokens fall into documents and places."""

    classes: tuple[tuple[int, int], ...]
    """(documents, places of each) of every length class."""
    place_token_P: Tensor
    """int64: token at each place."""
    real_P: Tensor
    """float32 [P, 1]: 0 at places after the end of their document."""
    token_place_T: Tensor
    """int64: place of each token."""
    bounds: Tensor
    """int32 [documents + 1]: first token of each document, and T."""
    longest: int


def documents(lengths: Sequence[int], device: torch.device) -> Documents:
    """Lay documents of these lengths (all at least 1) out in classes."""
    ends = np.cumsum(lengths)
    starts = ends - lengths
    order = np.argsort(-np.asarray(lengths), kind="stable")
    classes: list[tuple[int, int]] = []
    tokens, real = [], []
    at = 0
    while at < len(order):
        width = lengths[order[at]]
        stop = at
        while stop < len(order) and lengths[order[stop]] * WASTE >= width:
            stop += 1
        members = order[at:stop]
        place = starts[members, None] + np.arange(width)
        tokens.append(np.minimum(place, ends[members, None] - 1).ravel())
        real.append((place < ends[members, None]).ravel())
        classes.append((stop - at, width))
        at = stop
    place_token, is_real = np.concatenate(tokens), np.concatenate(real)
    token_place = np.empty(int(ends[-1]), dtype=np.int64)
    token_place[place_token[is_real]] = np.flatnonzero(is_real)
    return Documents(
        classes=tuple(classes),
        place_token_P=torch.from_numpy(place_token).to(device),
        real_P=torch.from_numpy(is_real.astype(np.float32)[:, None]).to(device),
        token_place_T=torch.from_numpy(token_place).to(device),
        bounds=torch.tensor([0, *ends.tolist()], dtype=torch.int32, device=device),
        longest=max(lengths),
    )


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    documents: Documents,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each document: query [1, H, T, D], key and value [1, K, T, D] -> [1, T, H, D].

    Raises:
        ValueError: the model asks for something that is not computed here.
    """
    asked = {"attention mask": attention_mask, "soft-capping": softcap, "attention sinks": s_aux}
    if refused := [name for name, value in asked.items() if value is not None]:
        raise ValueError(f"packed attention has no {', '.join(refused)}, which this model uses: choose another model")
    if dropout:
        raise ValueError(f"packed attention has no dropout, got {dropout}: set attention_dropout to 0 in config.json")
    if sliding_window is not None and documents.longest > sliding_window:
        raise ValueError(f"a rollout of {documents.longest} tokens is beyond the model's window of {sliding_window}")
    heads, grouped = query.shape[1], key.shape[1] != query.shape[1]
    query_THD, key_TKD, value_TKD = (x[0].transpose(0, 1) for x in (query, key, value))
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        return _flash(query_THD, key_TKD, value_TKD, documents, scaling, grouped), None
    spread = [_Spread.apply(x.reshape(len(x), -1), documents) for x in (query_THD, key_TKD, value_TKD)]
    outputs, at = [], 0
    for rows, width in documents.classes:
        stop = at + rows * width
        q, k, v = (x[at:stop].view(rows, width, -1, query.shape[-1]).transpose(1, 2) for x in spread)
        out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=grouped)
        outputs.append(out.transpose(1, 2).reshape(rows * width, -1))
        at = stop
    out_TF = _Collect.apply(torch.cat(outputs) if len(outputs) > 1 else outputs[0], documents)
    return out_TF.view(1, len(out_TF), heads, -1), None


def _flash(
    query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, documents: Documents, scaling: float | None, grouped: bool
) -> Tensor:
    """The same by torch's variable-length flash attention, which takes half precision on CUDA only."""
    from torch.nn.attention.varlen import varlen_attn

    bounds, longest = documents.bounds, documents.longest
    out_THD = varlen_attn(
        query_THD.contiguous(),
        key_TKD.contiguous(),
        value_TKD.contiguous(),
        bounds,
        bounds,
        longest,
        longest,
        scale=scaling,
        window_size=(-1, 0),
        enable_gqa=grouped,
    )
    assert isinstance(out_THD, Tensor)
    return out_THD[None]


class _Spread(torch.autograd.Function):
    """[T, F] -> [P, F]. Padding gets no gradient from causal attention, so backward only picks the tokens' places."""

    @staticmethod
    def forward(ctx: Any, tokens_TF: Tensor, documents: Documents) -> Tensor:
        ctx.documents = documents
        return tokens_TF.index_select(0, documents.place_token_P)

    @staticmethod
    def backward(ctx: Any, gradient_PF: Tensor) -> tuple[Tensor, None]:
        return gradient_PF.index_select(0, ctx.documents.token_place_T), None


class _Collect(torch.autograd.Function):
    """[P, F] -> [T, F], dropping padding, whose gradient is 0."""

    @staticmethod
    def forward(ctx: Any, places_PF: Tensor, documents: Documents) -> Tensor:
        ctx.documents = documents
        return places_PF.index_select(0, documents.token_place_T)

    @staticmethod
    def backward(ctx: Any, gradient_TF: Tensor) -> tuple[Tensor, None]:
        gradient_PF = gradient_TF.index_select(0, ctx.documents.place_token_P)
        return gradient_PF.mul_(ctx.documents.real_P.to(gradient_PF.dtype)), None
