"""What an objective gets and what it returns, and the marks by which it says what it needs.

Axis legend: `_T` is the packed token axis of one microbatch: the target tokens of its rollouts, one after another.
Entry t holds the values of target token t, already shifted: `logprobs_T[t]` is log pi_theta(token t | tokens before).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """Tensors of one packed microbatch, all of shape [T]; float32 unless said otherwise.

    The last three are there only for an objective that says by its base class that it reads them.
    """

    logprobs_T: Tensor
    """Trainer's logprobs at the sampling temperature, over the tokens that truncated sampling kept where its sets are
    known; the only column with a gradient besides `entropy_T`."""
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
    """int64: number of the token's rollout within the microbatch, from 0. A rollout is never split over two."""
    group_T: Tensor
    """int64: ticket of the token's group."""
    temperature_T: Tensor
    """Sampling temperature of the token's rollout."""
    old_T: Tensor | None = None
    """Logprobs of the trainer's own pass at the start of the step."""
    ref_T: Tensor | None = None
    """Logprobs under the reference policy, at the sampling temperature."""
    teacher_T: Tensor | None = None
    """Logprobs under the teacher, at the sampling temperature."""


@dataclass(frozen=True, kw_only=True)
class Terms:
    """An objective's value per token and named diagnostics per token.

    None is masked, summed or divided here: `losses.ops.reduce_terms` does that once for all objectives.
    """

    loss_T: Tensor
    """[T], minimised. Its plain mean over tokens is the objective's token mean."""
    diagnostics_T: dict[str, Tensor] = field(default_factory=dict)
    """[T] each, logged as a mean over the tokens that count, as `policy/<name>`. `masked`, 1 where the gradient was
    dropped, is logged by age too; `weight` and `weight_squared` give the effective sample size."""
    kept_T: Tensor | None = None
    """bool [T]: tokens that the objective did not drop, for a denominator of survivors. None: all of them."""


class Objective(Protocol):
    """A loss: any picklable callable of this signature. No registration."""

    def __call__(self, inputs: LossInputs) -> Terms: ...


class ReadsOld:
    """Base of an objective that reads `old_T`: with several updates a step the trainer makes the extra pass for it."""


class ReadsReference:
    """Base of an objective that reads `ref_T`."""


class ReadsTeacher:
    """Base of an objective that reads `teacher_T`."""


class WholeGroups:
    """Base of an objective that compares rollouts of a group: all of them must lie in one microbatch."""


class WeighsBehaviour:
    """Base of an objective that itself weighs tokens by trainer / behaviour: to do it again would be wrong."""


class Composite(ABC):
    """Base of an objective made of others."""

    @abstractmethod
    def parts(self) -> tuple[object, ...]:
        """What it calls; a part that is switched off is left out."""


def reads(objective: object, mark: type) -> bool:
    """Whether the objective, or a part of it, has this mark: `reads(objective, ReadsOld)`."""
    parts = objective.parts() if isinstance(objective, Composite) else ()
    return isinstance(objective, mark) or any(reads(part, mark) for part in parts)


def required(column_T: Tensor | None, name: str, objective: object) -> Tensor:
    """The optional column that the objective cannot do without.

    Raises:
        ValueError: it is not there.
    """
    if column_T is None:
        raise ValueError(f"{type(objective).__name__} reads {name}, which the trainer did not compute")
    return column_T
