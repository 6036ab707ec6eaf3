"""Small batches, and every objective in the forms that the properties are checked for."""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass

import torch
from torch import Tensor

from losses import (
    CISPO,
    DIS,
    DPPO,
    GSPO,
    TOPR,
    Corrected,
    Corrections,
    Distill,
    DistillForward,
    Kimi15,
    KLPenalty,
    LossInputs,
    Objective,
    OnlineDPO,
    PolicyGradient,
    PPOClip,
)
from losses.ops import neutral, reduce_terms

NAN, INF = math.nan, math.inf


def inputs_of(
    logprobs: list[float],
    behaviour: list[float],
    advantages: list[float],
    mask: list[bool] | None = None,
    old: list[float] | None = None,
    ref: list[float] | None = None,
    teacher: list[float] | None = None,
    segments: list[int] | None = None,
    groups: list[int] | None = None,
    staleness: list[int] | None = None,
) -> LossInputs:
    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64)

    n = len(logprobs)
    return LossInputs(
        logprobs_T=column(logprobs).requires_grad_(),
        entropy_T=torch.zeros(n, dtype=torch.float64),
        behaviour_T=column(behaviour),
        advantages_T=column(advantages),
        mask_T=torch.tensor(mask if mask is not None else [True] * n, dtype=torch.bool),
        staleness_T=torch.tensor(staleness or [0] * n, dtype=torch.int32),
        segment_T=torch.tensor(segments or [0] * n, dtype=torch.int64),
        group_T=torch.tensor(groups or [0] * n, dtype=torch.int64),
        temperature_T=torch.ones(n),
        old_T=None if old is None else column(old),
        ref_T=None if ref is None else column(ref),
        teacher_T=None if teacher is None else column(teacher),
    )


def label(objective: object) -> str:
    """Short name of an objective in a test's id: its class and what differs from the default."""
    if not is_dataclass(objective) or isinstance(objective, type):
        return str(objective)
    default = type(objective)()
    changed = {f.name: getattr(objective, f.name) for f in fields(objective)}
    changed = {name: value for name, value in changed.items() if value != getattr(default, name)}
    return f"{type(objective).__name__}({', '.join(f'{name}={label(value)}' for name, value in changed.items())})"


def loss_and_gradient(objective: Objective, inputs: LossInputs) -> tuple[float, list[float]]:
    used = neutral(inputs)
    sums = reduce_terms(objective(used), used)
    (gradient,) = torch.autograd.grad(sums.loss, inputs.logprobs_T)
    return sums.loss.item(), gradient.tolist()


def log_of(ratio: float, base: float) -> float:
    return base + math.log(ratio)


# Five tokens: (ratio, advantage, behaviour logprob). Trainer logprob = behaviour + log ratio.
RATIOS = [1.0, 1.2, 1.5, 0.5, 0.9]
ADVANTAGES = [1.0, -2.0, 0.5, -1.0, 2.0]
BEHAVIOUR = [-1.0, -2.0, -0.7, -0.3, -1.5]
LOGPROBS = [log_of(r, b) for r, b in zip(RATIOS, BEHAVIOUR, strict=True)]
SEGMENTS = [0, 0, 1, 1, 1]

ALL_CORRECTIONS = [
    Corrections(),
    Corrections(token_cap=1.3),
    Corrections(token_cap=INF),
    Corrections(token_band=(0.5, 2.0)),
    Corrections(token_band=(0.2, INF)),
    Corrections(sequence_cap=1.5),
    Corrections(sequence_reject=1.5),
    Corrections(geometric_band=(0.7, 1.4)),
    Corrections(k3_reject=0.3),
    Corrections(opsm=0.1),
    Corrections(max_staleness=2),
    Corrections(token_band=(0.2, 5.0), sequence_reject=4.0, geometric_band=(0.5, 2.0), opsm=0.0, max_staleness=3),
]
KLS = [
    KLPenalty(coefficient=0.3, kind="k1"),
    KLPenalty(coefficient=0.3, kind="k2"),
    KLPenalty(coefficient=0.3, kind="k3"),
    KLPenalty(coefficient=0.3, kind="unbiased"),
]
BASES: list[Objective] = [
    PolicyGradient(),
    PPOClip(),
    PPOClip(dual_clip=3.0),
    GSPO(clip_low=0.2, clip_high=0.3),
    GSPO(clip_low=0.2, clip_high=0.3, level="token"),
    DIS(),
    DIS(low=0.2, high=INF),
    DIS(one_sided=True),
    DIS(detach=False),
    CISPO(),
    CISPO(high=1.3, low=0.6),
    TOPR(),
    TOPR(level="sequence"),
    Kimi15(),
    DPPO(),
    DPPO(mask="ipo"),
]
OBJECTIVES: list[Objective] = [
    *BASES,
    *(Corrected(base=PPOClip(), corrections=corrections) for corrections in ALL_CORRECTIONS),
    *(Corrected(base=PPOClip(), kl=kl) for kl in KLS),
    *KLS,
    Corrected(base=GSPO(clip_low=0.2, clip_high=0.3), corrections=Corrections(token_band=(0.5, 2.0)), kl=KLS[3]),
    Corrected(base=PolicyGradient(), corrections=Corrections(token_cap=2.0, opsm=0.05)),
    Corrected(base=DIS(), corrections=Corrections(sequence_reject=2.0, max_staleness=1)),
    OnlineDPO(beta=0.4),
    Distill(base=DIS(), teacher=0.7, reward=0.5),
    Distill(base=Corrected(base=PPOClip(), corrections=Corrections(token_cap=2.0, opsm=0.05))),
    DistillForward(cap=3.0),
]
