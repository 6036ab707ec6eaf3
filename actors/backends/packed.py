"""Attention over documents packed one after another, some of which continue a shared prompt.

A document is a distinct prompt, or what follows one in a rollout: its queries are its own tokens, its keys those of
the prompt before them too. Time is proportional to sum of L^2, for any transformers model.

Axis legend: `_S` packed tokens, H heads, K key/value heads, D head size, F = K D or H D. `_Q` and `_P` are query and
key places: tokens again, with padding, document by document in classes of similar length. Attention within a class is
one call; a place after the end of its document repeats the last token and is dropped, so documents do not see each
other or their padding at all.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import embedding_bag, scaled_dot_product_attention

WASTE = 1.5
"""Documents share a class while the longest has at most this many times the tokens of the shortest."""


class Repeats(NamedTuple):
    """Rows that are copied, some to several places, and which places give a gradient back."""

    row_P: Tensor
    """int64: row at each place."""
    place_N: Tensor
    """int64: the places whose gradient counts, row by row."""
    bounds_S: Tensor
    """int64: where each row's places begin in `place_N`."""

    @classmethod
    def of(cls, row_P: Tensor, rows: int, real_P: Tensor | None = None) -> Repeats:
        """Copies of `rows` rows; the gradient of places that are not real is dropped."""
        place_N = row_P.argsort(stable=True)
        if real_P is not None:
            place_N = place_N[real_P[place_N]]
        return cls(row_P, place_N, torch.searchsorted(row_P[place_N], torch.arange(rows, device=row_P.device)))


class Class(NamedTuple):
    """Documents computed in one call."""

    documents: int
    queries: int
    """Query places of each document: its last key places."""
    keys: int
    mask: Tensor | None
    """bool [queries, keys]: keys that a query sees; None where both are as many and attention is plainly causal."""


class Padded(NamedTuple):
    """Documents in classes."""

    classes: tuple[Class, ...]
    queries: Repeats
    """Every token has one real place."""
    keys: Repeats
    real_Q: Tensor
    """float32 [Q, 1]: 0 at query places whose output is dropped."""


class Flat(NamedTuple):
    """Documents one after another; queries are the packed tokens as they are."""

    query_bounds: Tensor
    """int32 [documents + 1]: where each document's queries begin, and their number."""
    keys: Repeats
    key_bounds: Tensor
    """int32 [documents + 1], likewise."""


class Documents:
    """How S packed tokens fall into documents, laid out when first used.

    Args:
        prompts: lengths of the prompts, whose tokens come first.
        continuations: (number of the prompt, length) of what follows one, in the order of the tokens.
        device: of the tokens. No length is 0.
    """

    def __init__(self, prompts: Sequence[int], continuations: Sequence[tuple[int, int]], device: torch.device) -> None:
        self.device = device
        lengths = np.array([*prompts, *(length for _, length in continuations)])
        parents = np.array([number for number, _ in continuations], dtype=np.int64)
        none = np.zeros(len(prompts), dtype=np.int64)
        self._bounds = np.concatenate([[0], np.cumsum(lengths)])
        self._shared = np.concatenate([none, lengths[parents]])
        """Tokens of the prompt that each document continues."""
        self._shared_start = np.concatenate([none, self._bounds[parents]])
        self._keys = self._shared + lengths
        self._masked = 2 * self._shared >= self._keys
        """Documents without queries for their prompt: that takes a mask, which forbids skipping blocks of keys."""
        self.longest = int(self._keys.max())
        """Most keys of a document."""

    @functools.cached_property
    def padded(self) -> Padded:
        """For attention over rectangles."""
        classes: list[Class] = []
        query_rows, query_real, key_rows, key_real = [], [], [], []
        for members in self._alike():
            width, skip = int(self._keys[members[0]]), 0
            if self._masked[members[0]]:
                skip = int(self._shared[members].min())
            mask = torch.ones(width - skip, width, dtype=torch.bool, device=self.device).tril(skip) if skip else None
            classes.append(Class(len(members), width - skip, width, mask))
            rows, place = self._rows(members, width), np.arange(width)
            inside, own = place < self._keys[members, None], place >= self._shared[members, None]
            key_rows.append(rows.ravel())
            key_real.append(inside.ravel())
            query_rows.append(rows[:, skip:].ravel())
            query_real.append((inside & own)[:, skip:].ravel())
        real_Q = self._tensor(np.concatenate(query_real))
        tokens = int(self._bounds[-1])
        return Padded(
            classes=tuple(classes),
            queries=Repeats.of(self._tensor(np.concatenate(query_rows)), tokens, real_Q),
            keys=Repeats.of(self._tensor(np.concatenate(key_rows)), tokens, self._tensor(np.concatenate(key_real))),
            real_Q=real_Q.float()[:, None],
        )

    @functools.cached_property
    def flat(self) -> Flat:
        """For attention that takes documents of any length."""
        rows = self._rows(np.arange(len(self._keys)), self.longest)
        inside = np.arange(self.longest) < self._keys[:, None]
        ends = np.concatenate([[0], np.cumsum(self._keys)])
        return Flat(
            query_bounds=self._tensor(self._bounds.astype(np.int32)),
            keys=Repeats.of(self._tensor(rows[inside]), int(self._bounds[-1])),
            key_bounds=self._tensor(ends.astype(np.int32)),
        )

    def _alike(self) -> Iterator[np.ndarray]:
        """The documents by class, longest first."""
        for masked in (False, True):
            members = np.flatnonzero(self._masked == masked)
            members = members[np.argsort(-self._keys[members], kind="stable")]
            while len(members):
                count = int((self._keys[members] * WASTE >= self._keys[members[0]]).sum())
                yield members[:count]
                members = members[count:]

    def _rows(self, members: np.ndarray, width: int) -> np.ndarray:
        """[members, width]: the tokens of these documents, prompt first; the last one again after the end."""
        place = np.minimum(np.arange(width), self._keys[members, None] - 1)
        shared = self._shared[members, None]
        own = self._bounds[members, None] + place - shared
        return np.where(place < shared, self._shared_start[members, None] + place, own)

    def _tensor(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self.device)


def repeat(rows_SF: Tensor, repeats: Repeats) -> Tensor:
    """[S, F] -> [P, F]; the gradient of a row is the sum over its places, in a fixed order."""
    out_PF: Tensor = _Repeat.apply(rows_SF, repeats)
    return out_PF


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
    """Causal attention of each document to itself and its prompt.

    query [1, H, S, D], key and value [1, K, S, D] -> [1, S, H, D].

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
    heads, grouped, size = query.shape[1], key.shape[1] != query.shape[1], query.shape[-1]
    query_SHD, key_SKD, value_SKD = (x[0].transpose(0, 1) for x in (query, key, value))
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        return _flash(query_SHD, key_SKD, value_SKD, documents, scaling, grouped), None
    padded = documents.padded
    query_QF = repeat(query_SHD.reshape(len(query_SHD), -1), padded.queries)
    key_PF, value_PF = (repeat(x.reshape(len(x), -1), padded.keys) for x in (key_SKD, value_SKD))
    queries = query_QF.split([c.documents * c.queries for c in padded.classes])
    keys, values = (x.split([c.documents * c.keys for c in padded.classes]) for x in (key_PF, value_PF))
    outputs = []
    for c, *columns in zip(padded.classes, queries, keys, values, strict=True):
        q, k, v = (x.view(c.documents, -1, x.shape[-1] // size, size).transpose(1, 2) for x in columns)
        out = scaled_dot_product_attention(
            q, k, v, attn_mask=c.mask, is_causal=c.mask is None, scale=scaling, enable_gqa=grouped
        )
        outputs.append(out.transpose(1, 2).reshape(c.documents * c.queries, -1))
    out_SF = _Collect.apply(torch.cat(outputs) if len(outputs) > 1 else outputs[0], padded)
    return out_SF.view(1, len(out_SF), heads, -1), None


def _flash(
    query_SHD: Tensor, key_SKD: Tensor, value_SKD: Tensor, documents: Documents, scaling: float | None, grouped: bool
) -> Tensor:
    """The same by torch's variable-length flash attention, which takes half precision on CUDA only.

    Its causal mask aligns the last query of a document with the last key.
    """
    from torch.nn.attention.varlen import varlen_attn

    flat = documents.flat
    key_PF, value_PF = (repeat(x.reshape(len(x), -1), flat.keys) for x in (key_SKD, value_SKD))
    out_SHD = varlen_attn(
        query_SHD.contiguous(),
        key_PF.view(len(key_PF), *key_SKD.shape[1:]),
        value_PF.view(len(value_PF), *value_SKD.shape[1:]),
        flat.query_bounds,
        flat.key_bounds,
        documents.longest,
        documents.longest,
        scale=scaling,
        window_size=(-1, 0),
        enable_gqa=grouped,
    )
    assert isinstance(out_SHD, Tensor)
    return out_SHD[None]


class _Repeat(torch.autograd.Function):
    """Backward is a sum over bags of places, several times faster than `index_add` and deterministic everywhere."""

    @staticmethod
    def forward(ctx: Any, rows_SF: Tensor, repeats: Repeats) -> Tensor:
        ctx.repeats = repeats
        return rows_SF.index_select(0, repeats.row_P)

    @staticmethod
    def backward(ctx: Any, gradient_PF: Tensor) -> tuple[Tensor, None]:
        repeats = ctx.repeats
        return embedding_bag(repeats.place_N, gradient_PF.contiguous(), repeats.bounds_S, mode="sum"), None


class _Collect(torch.autograd.Function):
    """[Q, F] -> [S, F]: each token's own place; the gradient of all other places is 0."""

    @staticmethod
    def forward(ctx: Any, places_QF: Tensor, padded: Padded) -> Tensor:
        ctx.padded = padded
        return places_QF.index_select(0, padded.queries.place_N)

    @staticmethod
    def backward(ctx: Any, gradient_SF: Tensor) -> tuple[Tensor, None]:
        gradient_QF = gradient_SF.index_select(0, ctx.padded.queries.row_P)
        return gradient_QF.mul_(ctx.padded.real_Q.to(gradient_QF.dtype)), None
