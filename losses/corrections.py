"""Detached weights per token for data that another policy, or another engine, made."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from losses.ratios import LOG_RATIO_LIMIT, capped_ratio, limited, log_ratio, masked, rollout_mean, rollout_sum

if TYPE_CHECKING:
    from torch import Tensor

    from losses.inputs import LossInputs

Band = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Corrections:
    """Importance weights and rejections on rho = pi_old / pi_behaviour; None switches one off, the rest multiply.

    Where the step has no pass of its own at the start, rho = sg(pi) / pi_behaviour. Products and means are over a
    rollout's tokens that count. At most one of `token_cap`, `token_band` and `sequence_cap`, which all weigh by rho.
    """

    token_cap: float | None = None
    """Weigh each token by min(rho, cap): truncated importance sampling. 2 is common, 5 in the decoupled PPO of AReaL
    (arXiv 2505.24298)."""
    token_band: Band | None = None
    """Weigh each token by rho within this closed band, by 0 outside: IcePop. 0.5 5 is common, GLM-5 has 0.5 2."""
    sequence_cap: float | None = None
    """Weigh each token by min(product of rho over its rollout, cap)."""
    sequence_reject: float | None = None
    """Drop rollouts whose product of rho is above this."""
    geometric_band: Band | None = None
    """Drop rollouts whose geometric mean of rho is outside this closed band, such as 0.999 1.001."""
    k3_reject: float | None = None
    """Drop rollouts whose mean of rho - 1 - log rho is above this, such as 0.005."""
    opsm: float | None = None
    """Drop tokens with a negative advantage in rollouts whose mean of log(pi_behaviour / pi) is above this, say 1e-4:
    off-policy sequence masking (DeepSeek-V3.2, arXiv 2512.02556). Always the current pi."""
    max_staleness: int | None = None
    """Drop tokens more versions old than this."""

    def __post_init__(self) -> None:
        weighing = [name for name in ("token_cap", "token_band", "sequence_cap") if name in self.active]
        if len(weighing) > 1:
            raise ValueError(f"Corrections: {' and '.join(weighing)} would weigh by the same ratio twice: choose one")
        for name in self.active:
            value = vars(self)[name]
            if isinstance(value, tuple):
                if not 0 <= value[0] < value[1]:
                    raise ValueError(f"Corrections: {name} needs 0 <= low < high, got {value}")
            elif not (value >= 0 if name in ("k3_reject", "opsm", "max_staleness") else value > 0):
                raise ValueError(f"Corrections: {name} is out of range: {value}")

    @property
    def active(self) -> tuple[str, ...]:
        """Names of those that are on."""
        return tuple(f.name for f in fields(self) if vars(self)[f.name] is not None)

    @property
    def weighs(self) -> bool:
        """Whether kept tokens are weighed by rho."""
        return self.token_cap is not None or self.token_band is not None or self.sequence_cap is not None

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """The weight [T] >= 0 of each token, without a gradient, and diagnostics [T]: the share that each rejection
        dropped, and on which side of the token band."""
        here_T = inputs.logprobs_T.detach()
        log_T = log_ratio(here_T if inputs.old_T is None else inputs.old_T, inputs.behaviour_T)
        weight_T, diagnostics = self._weights(log_T, inputs)
        for name, dropped_T in self._dropped(log_T, log_ratio(inputs.behaviour_T, here_T), inputs).items():
            weight_T = weight_T.where(~dropped_T, 0.0)
            diagnostics[f"rejected_{name}"] = dropped_T.to(weight_T.dtype)
        return weight_T, diagnostics

    def _weights(self, log_T: Tensor, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        if self.token_cap is not None:
            return capped_ratio(log_T, self.token_cap), {}
        if self.sequence_cap is not None:
            return capped_ratio(limited(rollout_sum(log_T, inputs)), self.sequence_cap), {}
        if self.token_band is not None:
            low, high = self.token_band
            ratio_T = log_T.exp()
            below_T, above_T = ratio_T < low, (ratio_T > high) | (log_T >= LOG_RATIO_LIMIT)
            return ratio_T.where(~(below_T | above_T), 0.0), masked(below_T, above_T, inputs.advantages_T)
        return log_T.new_ones(len(log_T)), {}

    def _dropped(self, log_T: Tensor, drift_T: Tensor, inputs: LossInputs) -> dict[str, Tensor]:
        dropped: dict[str, Tensor] = {}
        if self.sequence_reject is not None:
            dropped["sequence"] = rollout_sum(log_T, inputs) > math.log(self.sequence_reject)
        if self.geometric_band is not None:
            low, high = self.geometric_band
            mean_T = rollout_mean(log_T, inputs).exp()
            dropped["geometric"] = (mean_T < low) | (mean_T > high)
        if self.k3_reject is not None:
            dropped["k3"] = rollout_mean(log_T.expm1() - log_T, inputs) > self.k3_reject
        if self.opsm is not None:
            dropped["opsm"] = (inputs.advantages_T < 0) & (rollout_mean(drift_T, inputs) > self.opsm)
        if self.max_staleness is not None:
            dropped["stale"] = inputs.staleness_T > self.max_staleness
        return dropped
