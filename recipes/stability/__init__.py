"""Which corrections hold up against stale data: one small model under a lag that is forced, not waited for.

A step consumes `GROUPS` prompts of `MEMBERS` rollouts in `UPDATES` optimizer updates. The buffer keeps order `fifo`
with max_staleness = depth = lag: it leases (lag + 1) * GROUPS groups at version 0 and GROUPS more with each version,
so every token of step s is exactly min(s, lag) versions old.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

from actors.config import BufferConfig, TrainerConfig
from actors.types import Sampling
from losses import DIS, Corrected, Corrections, Objective, PolicyGradient, PPOClip
from recipes.tasks.addition import Addition

TASK = Addition()
SAMPLING = Sampling(max_tokens=TASK.max_tokens)
GROUPS, MEMBERS, UPDATES = 10, 8, 4
WINDOW, LAST = 5, 10
"""Steps of a smoothed point, and steps at the end that are averaged."""


class Correction(NamedTuple):
    """An objective and what its ratios are."""

    objective: Objective
    ratio: str
    """pi is the policy of the update, old that of the start of the step, mu the one that drew the token."""


def _dis(low: float, high: float, *, one_sided: bool = False) -> Correction:
    how = "one-sided" if one_sided else "two-sided"
    return Correction(DIS(low=low, high=high, one_sided=one_sided), f"pi/mu in ({low}, {high}) {how}")


# PPOClip takes its ratio from the pass at the start of the step where there are several updates. Against mu it has the
# gradient of a one-sided DIS at its bounds, so that is what ppo_rollout is.
CORRECTIONS = {
    "none": Correction(PolicyGradient(), "none"),
    "ppo_old": Correction(PPOClip(), "pi/old clipped"),
    "ppo_rollout": _dis(0.8, 1.28, one_sided=True),
    "tis": Correction(Corrected(base=PolicyGradient(), corrections=Corrections(token_cap=2.0)), "min(pi/mu, 2)"),
    "icepop": Correction(
        Corrected(base=PPOClip(), corrections=Corrections(token_band=(0.5, 5.0))),
        "old/mu in [0.5, 5], pi/old clipped",
    ),
    "dis_0.8_1.28": _dis(0.8, 1.28),
    "dis_0.7_6": _dis(*DIS.MATH),
    "dis_0.2_4": _dis(*DIS.CODING),
    "one_sided_0.7_6": _dis(*DIS.MATH, one_sided=True),
    "one_sided_0.2_4": _dis(*DIS.CODING, one_sided=True),
    "decoupled": Correction(
        Corrected(base=PPOClip(), corrections=Corrections(token_cap=5.0)), "min(old/mu, 5), pi/old clipped"
    ),
    "opsm": Correction(
        Corrected(base=PPOClip(), corrections=Corrections(opsm=1e-4)), "rollouts by mu/pi, pi/old clipped"
    ),
}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run of the grid."""

    correction: str
    lag: int
    lr: float
    seed: int
    steps: int
    through: Literal["process", "actors"] = "process"
    """One process, or the actors of a run, where a token may be younger than the lag."""

    @property
    def name(self) -> dict[str, Any]:
        """What its record begins with: records that agree in this are of the same cell."""
        return asdict(self) | {"groups": GROUPS, "members": MEMBERS, "updates": UPDATES}

    @property
    def buffer(self) -> BufferConfig:
        """Settings that force the lag."""
        return BufferConfig(groups_per_step=GROUPS, max_staleness=self.lag, depth=self.lag, order="fifo")

    @property
    def trainer(self) -> TrainerConfig:
        """A constant rate after the warm-up, and several updates a step."""
        return TrainerConfig(lr=self.lr, final_lr=1.0, updates_per_step=UPDATES)


class Curves(NamedTuple):
    """What a cell did."""

    rewards: list[float]
    """Mean reward that each version drew, from version 0 to the last: one more than there are steps. Of a stale batch
    it would lag as well."""
    steps: list[dict[str, float]]
    """The trainer's metrics of each step."""


def means(values: Sequence[float]) -> list[float]:
    """Of each run of `WINDOW` values; of all of them where there are fewer."""
    window = min(WINDOW, len(values))
    return [statistics.fmean(values[end - window : end]) for end in range(window, len(values) + 1)]


def collapse(rewards: Sequence[float]) -> int | None:
    """The version from which on the mean over the last `WINDOW` stays below half of the best such mean before; None
    if it does not, or comes back."""
    best, since = 0.0, None
    for version, mean in enumerate(means(rewards), start=min(WINDOW, len(rewards)) - 1):
        best = max(best, mean)
        if mean >= best / 2:
            since = None
        elif since is None:
            since = version
    return since


def figures(curves: Curves) -> dict[str, float | int | None]:
    """A cell in numbers."""

    def column(name: str) -> list[float]:
        return [row[name] for row in curves.steps]

    masked, kl, ess = (column(f"policy/{name}") for name in ("masked", "lag_kl", "ess"))
    return {
        "reward_last": statistics.fmean(curves.rewards[-LAST:]),
        "reward_best": max(means(curves.rewards)),
        "collapse": collapse(curves.rewards),
        "masked_last": statistics.fmean(masked[-LAST:]),
        "masked_peak": max(means(masked)),
        "ess_last": statistics.fmean(ess[-LAST:]),
        "ess_lowest": min(means(ess)),
        "lag_kl_last": statistics.fmean(kl[-LAST:]),
        "lag_kl_peak": max(means(kl)),
        "staleness": statistics.fmean(column("staleness/mean")),
    }
