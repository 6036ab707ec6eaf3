"""What a step reports of its tokens: sums over microbatches, updates and ranks, and the metrics that they give.

Every sum is over tokens that count, so any number of ranks adds up to the same. Quantiles come from a histogram: a log
ratio is known to a few percent of itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from actors.types import Taken
from losses.inputs import LossInputs, Terms
from losses.ops import Sums
from losses.ratios import LOG_RATIO_LIMIT, limited

AGES = {"0": 0, "1": 1, "2": 2, "3_4": 4, "5_8": 8, "9_16": 16}
"""Classes of staleness by name, and the last version of each; beyond is `17_up`."""
QUANTILES = {"ratio_p01": 0.01, "ratio_p50": 0.5, "ratio_p99": 0.99}
SMALLEST, CLASSES = 1e-4, 240
"""Least |log ratio| that the histogram tells from 0, and its classes of each sign."""
WIDTH = math.log(LOG_RATIO_LIMIT / SMALLEST) / CLASSES
"""Of a class in log |log ratio|: 5 %."""


def measure(inputs: LossInputs, terms: Terms, sums: Sums, start_T: Tensor | None) -> dict[str, Tensor]:
    """Sums of one microbatch by name, in float64, without a gradient.

    Args:
        inputs: what the objective got, `neutral`.
        terms: what it gave.
        sums: what these are in sum.
        start_T: logprobs under the weights at the start of the step; None where these are gone.
    """
    mask_T = inputs.mask_T
    log_C = limited(inputs.logprobs_T.detach() - inputs.behaviour_T)[mask_T].double()
    staleness_C = inputs.staleness_T[mask_T]
    age_C = torch.bucketize(staleness_C, torch.tensor(list(AGES.values()), device=staleness_C.device))
    masked_T = terms.diagnostics_T.get("masked", torch.zeros_like(inputs.behaviour_T))
    out = {
        "tokens": sums.tokens,
        "survivors": sums.survivors,
        "loss": sums.loss.detach(),
        "entropy": inputs.entropy_T.detach()[mask_T].double().sum(),
        "staleness": staleness_C.sum(),
        "ratios": _histogram(log_C),
        "weights": torch.stack([log_C.exp().sum(), (2 * log_C).exp().sum()]),
        "ages": age_C.bincount(minlength=len(AGES) + 1),
        "masked_ages": age_C.bincount(masked_T.detach()[mask_T].double(), minlength=len(AGES) + 1),
        "moments": torch.zeros(6, device=mask_T.device),
        "lag": torch.zeros(2, device=mask_T.device),
        **{f"policy/{name}": value for name, value in sums.diagnostics.items()},
    }
    if start_T is not None:
        now_C, then_C = start_T.detach()[mask_T].double(), inputs.behaviour_T[mask_T].double()
        lag_C = now_C - then_C
        out["lag"] = torch.stack([-lag_C.sum(), (lag_C.expm1() - lag_C).sum()])
        moments = [now_C * 0 + 1, now_C, then_C, now_C.square(), then_C.square(), now_C * then_C]
        out["moments"] = torch.stack(moments).sum(1)
    return {name: value.double() for name, value in out.items()}


def policy_metrics(sums: dict[str, Tensor]) -> dict[str, float]:
    """Metrics of a step from the sums of `measure` over its microbatches, updates and ranks."""
    tokens = max(sums["tokens"].item(), 1.0)
    counted, *_ = moments = sums["moments"].tolist()
    lag_k1, lag_k3 = (sums["lag"] / max(counted, 1.0)).tolist()
    weight, squared = sums["weights"].tolist()
    if "policy/weight" in sums:  # the objective's own instead of the plain ratio
        weight, squared = sums["policy/weight"].item(), sums["policy/weight_squared"].item()
    shares = (sums["masked_ages"] / sums["ages"]).tolist()
    return {
        "policy/entropy": sums["entropy"].item() / tokens,
        "policy/lag_kl": lag_k3,
        "policy/lag_kl_k1": lag_k1,
        "policy/lag_pearson": _pearson(moments),
        "policy/masked": 0.0,  # an objective that masks says so itself
        **{name: value.item() / tokens for name, value in sums.items() if name.startswith("policy/")},
        # Kish's effective sample size over the tokens, as a share: (sum w)^2 / (n sum w^2).
        "policy/ess": weight**2 / max(tokens * squared, 1e-30),
        **{f"policy/{name}": _quantile(sums["ratios"], share) for name, share in QUANTILES.items()},
        **{f"policy/masked_age_{name}": share for name, share in zip([*AGES, "17_up"], shares, strict=True)},
        "staleness/mean": sums["staleness"].item() / tokens,
        "perf/trained_tokens": sums["tokens"].item(),
    }


def spread(taken: Taken, advantage: Sequence[np.ndarray]) -> dict[str, float]:
    """How many versions the rollouts of a step span, oldest token to newest: all of them, and those with positive and
    with negative advantage, and the mean age of these by their oldest token. nan where there is none."""
    oldest, newest, gains = (
        np.concatenate(columns) if columns else np.zeros(0)
        for columns in ([g.oldest for g in taken.groups], [g.newest for g in taken.groups], advantage)
    )
    out = {}
    for name, chosen in (("", oldest >= 0), ("_positive", gains > 0), ("_negative", gains < 0)):
        chosen = chosen & (oldest >= 0)
        some = chosen.any()
        out[f"staleness/spread{name}"] = float(newest[chosen].max() - oldest[chosen].min()) if some else math.nan
        if name:
            out[f"staleness/age{name}"] = float((taken.step - oldest[chosen]).mean()) if some else math.nan
    return out


def _histogram(log_C: Tensor) -> Tensor:
    """Counts [2 CLASSES + 1] of log ratios: negative ones, largest first; those near 0; positive ones."""
    size_C = ((log_C.abs() / SMALLEST).log() / WIDTH).nan_to_num(neginf=-1.0).floor().clamp(-1, CLASSES - 1) + 1
    place_C = (CLASSES + log_C.sign() * size_C).long()
    return place_C.bincount(minlength=2 * CLASSES + 1)


def _quantile(counts: Tensor, share: float) -> float:
    """The ratio below which `share` of the counted ones lie: the middle of its class; nan of none."""
    cumulated = counts.cumsum(0)
    if not cumulated[-1]:
        return math.nan
    place = int(torch.searchsorted(cumulated, share * cumulated[-1])) - CLASSES
    size = SMALLEST * math.exp(WIDTH * (abs(place) - 0.5)) if place else 0.0
    return math.exp(math.copysign(size, place))


def _pearson(moments: list[float]) -> float:
    """Correlation from count, sums, sums of squares and sum of products; nan where one side does not vary."""
    n, x, y, xx, yy, xy = moments
    scale = (n * xx - x * x) * (n * yy - y * y)
    return (n * xy - x * y) / math.sqrt(scale) if scale > 0 else math.nan
