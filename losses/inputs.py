"""What an objective gets and what it returns.

Axis legend: `_T` is the packed token axis of one microbatch: the target tokens of its rollouts, one after another.
Entry t holds the values of target token t, already shifted: `logprobs_T[t]` is log pi_theta(token t | tokens before).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Largest |log ratio| that is told apart: e^20 is far outside every band and still finite in float32."""


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """Tensors of one packed microbatch, all of shape [T]; float32 unless said otherwise."""

    logprobs_T: Tensor
    """Trainer's logprobs at the sampling temperature; the only column with a gradient besides `entropy_T`."""
    entropy_T: Tensor
    """Entropy in nats of the distribution that the token was scored under."""
    behaviour_T: Tensor
    """Logprobs under the distribution that the engine sampled from."""
    advantages_T: Tensor
    mask_T: Tensor
    """bool: tokens that count. Objectives need not read it: the reduction drops all others."""
    staleness_T: Tensor
    """int32: version trained from minus the token's version; 0 outside the mask."""
    segment_T: Tensor
    """int64: which rollout of the microbatch the token belongs to."""
    group_T: Tensor
    """int64: ticket of the token's group."""
    temperature_T: Tensor
    """Sampling temperature of the token's rollout."""
    old_T: Tensor | None = None
    """Logprobs of the trainer's own pass at the start of the step, where the objective asks for one."""


@dataclass(frozen=True, kw_only=True)
class Terms:
    """An objective's value per token and named diagnostics per token.

    Neither is masked, summed or divided here: `losses.ops.reduce_terms` does that once for all objectives.
    """

    loss_T: Tensor
    """[T], minimised."""
    diagnostics_T: dict[str, Tensor] = field(default_factory=dict)
    """[T] each, logged as a mean over the tokens that count, as `policy/<name>`."""


class Objective(Protocol):
    """A loss: any picklable callable of this signature. No registration."""

    def __call__(self, inputs: LossInputs) -> Terms: ...


class ReadsOld:
    """Base of an objective that reads `old_T`: with several updates a step the trainer makes the extra pass for it."""


def log_ratio(logprobs_T: Tensor, reference_T: Tensor) -> Tensor:
    """log(pi / pi_reference) [T], limited to +-20 with zero gradient beyond."""
    return (logprobs_T - reference_T).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
