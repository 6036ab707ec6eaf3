"""What every objective shares: logprobs without the full logits, and the one reduction of terms to sums."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear, nll_loss
from torch.utils.checkpoint import checkpoint

from losses.inputs import LossInputs, Terms
from losses.ratios import rollout_sum


class Sums(NamedTuple):
    """Plain sums over the tokens that count; whoever knows the global count divides."""

    loss: Tensor
    """Scalar with a gradient."""
    diagnostics: dict[str, Tensor]
    """Detached float64 scalars."""
    tokens: Tensor
    """int64 scalar: tokens that count."""
    survivors: Tensor
    """int64 scalar: those of them that the objective did not drop."""


class KeptSets(NamedTuple):
    """Which tokens each target was drawn from, ragged: axis `_K` is one target's set after another."""

    ids_K: Tensor
    """int64 tokens."""
    counts_T: Tensor
    """int64: tokens in each target's set; 0 stands for the whole vocabulary."""

    def split(self, chunk: int) -> list[KeptSets | None]:
        """Those of runs of `chunk` targets; None where none of them has a set."""
        counts = self.counts_T.split(chunk)
        sizes = torch.stack([counts_T.sum() for counts_T in counts]).tolist()
        return [
            KeptSets(ids_K, counts_T) if len(ids_K) else None
            for ids_K, counts_T in zip(self.ids_K.split(sizes), counts, strict=True)
        ]

    def outside(self, vocabulary: int) -> Tensor:
        """bool [T, vocabulary]: what the target was not drawn from."""
        outside_TV = (self.counts_T > 0)[:, None].repeat(1, vocabulary)
        numbers_T = torch.arange(len(self.counts_T), device=self.counts_T.device)
        outside_TV[numbers_T.repeat_interleave(self.counts_T, output_size=len(self.ids_K)), self.ids_K] = False
        return outside_TV


def logprobs_and_entropy(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    temperature_T: Tensor,
    chunk: int,
    kept: KeptSets | None = None,
) -> tuple[Tensor, Tensor]:
    """log softmax(hidden @ weight.T / temperature) at the targets, and that distribution's entropy in nats.

    With `kept` the softmax of a target is over its set alone, which must hold it: that is the distribution which
    truncated sampling drew from, if the set is the one it kept then. Both [T] in float32 (float64 for float64 inputs).
    At most `chunk` rows of logits exist at a time, forward and backward: with more than one chunk each is recomputed
    in backward.
    """
    if len(hidden_TD) <= chunk:
        return _logprobs_and_entropy(weight_VD, hidden_TD, targets_T, temperature_T, kept)
    columns = [column.split(chunk) for column in (hidden_TD, targets_T, temperature_T)]
    parts = zip(*columns, [None] * len(columns[0]) if kept is None else kept.split(chunk), strict=True)
    chunks = [checkpoint(_logprobs_and_entropy, weight_VD, *part, use_reentrant=False) for part in parts]
    return torch.cat([logprobs for logprobs, _ in chunks]), torch.cat([entropy for _, entropy in chunks])


def _logprobs_and_entropy(
    weight_VD: Tensor, hidden_TD: Tensor, targets_T: Tensor, temperature_T: Tensor, kept: KeptSets | None
) -> tuple[Tensor, Tensor]:
    logits_TV = linear(hidden_TD, weight_VD)
    precise = torch.promote_types(logits_TV.dtype, torch.float32)
    scaled_TV = logits_TV.to(precise) / temperature_T.to(precise)[:, None]
    if kept is None:
        log_TV = finite_TV = scaled_TV.log_softmax(-1)
    else:
        outside_TV = kept.outside(len(weight_VD))
        log_TV = scaled_TV.masked_fill_(outside_TV, -torch.inf).log_softmax(-1)
        finite_TV = log_TV.masked_fill(outside_TV, 0.0)  # exp(0) * 0 is 0, and no gradient goes through
    return -nll_loss(log_TV, targets_T, reduction="none"), -(finite_TV.exp() * finite_TV).sum(-1)


def neutral(inputs: LossInputs) -> LossInputs:
    """The same inputs with tokens that do not count made harmless, so that no 0 * inf or 0 * nan can arise.

    Masked tokens and those whose behaviour, reference or teacher logprob is not finite leave the mask: their advantage
    and every logprob become 0. The trainer's own logprobs are left to fail loudly where they count.
    """
    counts_T = inputs.mask_T & inputs.behaviour_T.isfinite()
    for column_T in (inputs.ref_T, inputs.teacher_T):
        if column_T is not None:
            counts_T = counts_T & column_T.isfinite()

    def harmless(column_T: Tensor) -> Tensor:
        return column_T.where(counts_T, 0.0)

    return replace(
        inputs,
        mask_T=counts_T,
        logprobs_T=harmless(inputs.logprobs_T),
        entropy_T=harmless(inputs.entropy_T),
        behaviour_T=harmless(inputs.behaviour_T),
        advantages_T=harmless(inputs.advantages_T),
        old_T=None if inputs.old_T is None else harmless(inputs.old_T),
        ref_T=None if inputs.ref_T is None else harmless(inputs.ref_T),
        teacher_T=None if inputs.teacher_T is None else harmless(inputs.teacher_T),
    )


def reduce_terms(terms: Terms, inputs: LossInputs, *, rollout_means: bool = False) -> Sums:
    """Sum the loss and each diagnostic over the tokens that count; `inputs` are those the objective got, `neutral`.

    Tokens outside the mask have exactly zero gradient and enter no sum. With `rollout_means` a token's loss is divided
    by the tokens of its rollout that count, so that the loss is a sum of means over rollouts: divide by their number.

    Raises:
        ValueError: the objective summed by itself, or gave values of another shape.
    """
    mask_T = inputs.mask_T
    kept_T = mask_T if terms.kept_T is None else terms.kept_T
    for name, values_T in {"loss_T": terms.loss_T, "kept_T": kept_T, **terms.diagnostics_T}.items():
        if values_T.shape != mask_T.shape:
            raise ValueError(
                f"the objective gave {name} of shape {tuple(values_T.shape)} for {len(mask_T)} tokens: return one "
                "value per token and neither sum nor average"
            )

    def total(values_T: Tensor) -> Tensor:
        return values_T.where(mask_T, 0.0).sum()

    loss_T = terms.loss_T
    if rollout_means:
        loss_T = loss_T / rollout_sum(torch.ones_like(inputs.advantages_T), inputs).clamp(min=1)
    return Sums(
        loss=total(loss_T),
        diagnostics={name: total(values_T.detach().double()) for name, values_T in terms.diagnostics_T.items()},
        tokens=mask_T.sum(),
        survivors=(mask_T & kept_T).sum(),
    )
