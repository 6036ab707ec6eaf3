"""One trainer rank's work: probe, plan, backward on plain sums, one global denominator, update, staging.

Nothing here knows Monarch; `actors.trainer` is the actor around it. With several ranks every method is called by all
of them in the same order.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from actors import payload
from actors.backends.base import Backend
from actors.batching import Advantage, Microbatch, advantages, load, pack, plan
from actors.config import TrainerConfig
from actors.types import Probe, StepReport, Taken
from actors.weights import box_of
from losses.inputs import LossInputs, Objective, ReadsOld, reads
from losses.ops import neutral, reduce_terms

log = logging.getLogger(__name__)


class Staging(Protocol):
    """Where weights wait for the generators; `actors.sync.Slots` in a run."""

    def stage(self, version: int) -> float:
        """Copy the live weights out as `version`; the seconds that took."""
        ...

    @property
    def exact(self) -> bool:
        """Whether what is staged is bitwise the live weights."""
        ...

    def weights_of(self, version: int) -> AbstractContextManager[None]:
        """Within it the live tensors hold what was staged as `version`."""
        ...


def learning_rate(config: TrainerConfig, update: int, total: int) -> float:
    """Rate of optimizer update number `update` (from 0) of `total`: linear warm-up, then linear decay to the last."""
    if update < config.warmup_steps:
        return config.lr * (update + 1) / config.warmup_steps
    done = min(1.0, (update - config.warmup_steps) / max(1, total - 1 - config.warmup_steps))
    return config.lr * (1 - done * (1 - config.final_lr))


class Training:
    """One rank of the trainer.

    The gradient of an update is that of sum(loss) / N over all ranks' tokens that count, whatever the ranks,
    microbatches and packing; see `TrainerConfig.denominator` for N.

    Args:
        backend: the model, laid out over the ranks.
        objective: gives one loss value per token.
        advantage: from the rewards of a step to one advantage per rollout.
        staging: where each new version is copied for the generators.
        total_steps: of the run; the learning rate's decay ends with the last one.
        version: of the weights that the backend holds.
    """

    def __init__(
        self,
        config: TrainerConfig,
        backend: Backend,
        objective: Objective,
        advantage: Advantage,
        staging: Staging,
        *,
        total_steps: int,
        version: int = 0,
        rank: int = 0,
        device: torch.device | None = None,
    ) -> None:
        self.config, self.backend, self.objective, self.advantage = config, backend, objective, advantage
        self.staging, self.version, self.rank = staging, version, rank
        self.device = device or torch.device("cpu")
        self.warned = False
        """Whether somebody was told of biased ratios."""
        self.total_updates = total_steps * config.updates_per_step
        self.parameters = backend.parameters()
        self.optimizer = torch.optim.AdamW(
            self.parameters.values(),
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            weight_decay=config.weight_decay,
            fused=True,
        )
        staging.stage(version)

    def step(self, taken: Taken, probe: Probe | None = None) -> StepReport:
        """Train one batch: version `taken.step` becomes `taken.step` + 1, staged on return.

        Raises:
            ValueError: the batch is for another version than the one held.
            RuntimeError: a gradient is not finite.
        """
        begin = time.perf_counter()
        if taken.step != self.version:
            raise ValueError(f"trainer rank {self.rank} holds version {self.version}, the batch is step {taken.step}")
        metrics = self._compare(probe)
        advantage = advantages(taken, self.advantage)
        pieces = [
            ranks[self.rank]
            for ranks in plan(
                taken,
                ranks=self.config.ranks,
                updates=self.config.updates_per_step,
                microbatch_tokens=self.config.microbatch_tokens,
            )
        ]
        updates = [[m.to(self.device) for m in load(taken, piece, advantage)] for piece in pieces]
        reads_old = reads(self.objective, ReadsOld) and len(updates) > 1
        old = [[self._score(m) if reads_old else None for m in microbatches] for microbatches in updates]
        sums: Counter[str] = Counter()
        peaks = torch.zeros(2, dtype=torch.float64, device=self.device)
        for number, (microbatches, old_T) in enumerate(zip(updates, old, strict=True)):
            sums.update(self._update(number, microbatches, old_T, peaks))
        peaks = self._over_ranks(peaks, "max")
        self.version += 1
        staged = self.staging.stage(self.version)
        members = [member for piece in pieces for microbatch in piece for member in microbatch]
        return StepReport(
            step=taken.step,
            rollouts=len(members),
            tokens=sum(int(m.mask_T.sum()) for microbatches in updates for m in microbatches),
            tickets=tuple(sorted(taken.groups[m.group].ticket for m in members if m.member == 0)),
            metrics=metrics
            | _means(sums, len(updates))
            | {
                "policy/ratio_max": peaks[0].item(),
                "staleness/max": peaks[1].item(),
                "time/stage": staged,
                "time/train": time.perf_counter() - begin,
            },
        )

    def state(self) -> dict[str, Tensor]:
        """What another process needs to go on to the bit: weights, moments and update counts by parameter name, the
        version, and this rank's random state. The first three alias the live tensors; DTensors where sharded."""
        state = {f"weight/{name}": tensor for name, tensor in self.backend.weights().items()}
        for name, parameter in self.parameters.items():
            moments = self.optimizer.state[parameter]
            if not moments:  # no update came yet: what AdamW itself begins with
                moments["step"] = torch.zeros((), device=self.device)
                moments["exp_avg"] = torch.zeros_like(parameter, requires_grad=False)
                moments["exp_avg_sq"] = torch.zeros_like(parameter, requires_grad=False)
            state |= {f"{kind}/{name}": tensor for kind, tensor in moments.items()}
        return state | {"version": torch.tensor(self.version), f"rng/{self.rank}": torch.get_rng_state()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Go on from `state`'s tensors, filled in place since: take over what is not aliased and stage the weights.

        Raises:
            ValueError: the state is of another version than the one held.
        """
        if (version := int(state["version"])) != self.version:
            raise ValueError(f"trainer rank {self.rank}: the checkpoint is of version {version}, not {self.version}")
        torch.set_rng_state(state[f"rng/{self.rank}"])
        self.staging.stage(self.version)

    def _update(
        self, number: int, microbatches: list[Microbatch], old: list[Tensor | None], peaks: Tensor
    ) -> dict[str, float]:
        """One optimizer update. Returns sums over all ranks; `peaks` (ratio, staleness) grows to this rank's."""
        sums: dict[str, Tensor] = {}
        for microbatch, old_T in zip(microbatches, old, strict=True):
            logprobs_T, entropy_T = self.backend.forward(microbatch)
            inputs = neutral(microbatch.loss_inputs(logprobs_T, entropy_T, old_T))
            means = self.config.denominator == "rollout_means"
            terms = reduce_terms(self.objective(inputs), inputs, rollout_means=means)
            terms.loss.backward()
            log_ratio, start_T = _counted(logprobs_T, inputs), logprobs_T if old_T is None else old_T
            lag, at_start = _counted(start_T, inputs), number == 0 or old_T is not None
            staleness = inputs.staleness_T[inputs.mask_T].double()
            peaks[0] = torch.cat([peaks[:1], log_ratio.exp()]).amax()
            peaks[1] = torch.cat([peaks[1:], staleness]).amax()
            part = {
                "tokens": terms.tokens,
                "survivors": terms.survivors,
                "sequences": torch.tensor(microbatch.sequences, device=self.device),
                "biased": torch.tensor(microbatch.biased, device=self.device),
                "loss": terms.loss.detach(),
                "entropy": entropy_T.detach()[inputs.mask_T].double().sum(),
                "staleness": staleness.sum(),
                "lag_kl": (lag.expm1() - lag).sum() if at_start else lag.new_zeros(()),
                "lag_tokens": terms.tokens if at_start else terms.tokens * 0,
                **{f"policy/{name}": value for name, value in terms.diagnostics.items()},
            }
            sums = {name: value.double() + sums.get(name, 0.0) for name, value in part.items()}
        summed = dict(zip(sums, self._over_ranks(torch.stack(list(sums.values())), "sum").tolist(), strict=True))
        self._warn(summed["biased"])
        weight = summed["sequences" if self.config.denominator == "rollout_means" else self.config.denominator]
        rate = learning_rate(self.config, self.version * self.config.updates_per_step + number, self.total_updates)
        norm = self._apply(weight, rate) if weight else 0.0
        if not weight:
            log.warning("step %d: no token of update %d counts, so the weights stay as they are", self.version, number)
        self.optimizer.zero_grad()
        return summed | {"mean_loss": summed["loss"] / max(weight, 1.0), "norm": norm, "rate": rate}

    def _warn(self, biased: float) -> None:
        """Say once a run, on one rank, that rollouts over all ranks were drawn from sets which nobody told."""
        if biased and not self.warned and self.rank == 0:
            log.warning(
                "step %d: %d rollouts were drawn with top_p or top_k by an engine that does not say what was kept; "
                "the trainer scores over all tokens, so ratios to the behaviour policy are biased, mostly too small: "
                "use --sampling.top-p 1 --sampling.top-k 0, or generator.engine:native, which returns the kept sets",
                self.version,
                biased,
            )
            self.warned = True

    def _apply(self, weight: float, rate: float) -> float:
        """Divide the summed gradients by `weight`, clip, update; returns the global norm before the clip."""
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        total = get_total_norm(gradients)
        norm = (total.full_tensor() if isinstance(total, DTensor) else total).item() / weight
        if not math.isfinite(norm):
            raise RuntimeError(f"step {self.version}: gradient norm is {norm}, {self._first_bad()}")
        factor = min(1.0, self.config.clip_norm / norm) / weight if norm else 1.0
        for gradient in gradients:
            gradient.mul_(factor)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        return norm

    def _first_bad(self) -> str:
        """Names the first tensor whose gradient is not finite on any rank."""
        names = list(self.parameters)
        bad = [
            i
            for i, p in enumerate(self.parameters.values())
            if p.grad is not None and not box_of(p.grad)[1].isfinite().all()
        ]
        first = -int(self._over_ranks(torch.tensor(-min(bad, default=len(names)), device=self.device), "max").item())
        if first == len(names):
            return "though every gradient is finite: their squares overflow; lower the rewards' scale"
        return f"first in {names[first]}; check logprobs and advantages of the batch, or lower --trainer.lr"

    def _score(self, microbatch: Microbatch) -> Tensor:
        """Logprobs [T] under the live weights, without a graph."""
        with torch.no_grad():
            return self.backend.forward(microbatch)[0]

    def _compare(self, probe: Probe | None) -> dict[str, float]:
        """|trainer - engine| of the probe's logprobs, both at its version; nan if there is nothing to compare. Every
        rank scores the whole probe."""
        gap = torch.zeros(0, dtype=torch.float64) if probe is None else self._gap(probe)
        return {
            "policy/engine_gap_mean": gap.mean().item(),
            "policy/engine_gap_max": gap.max().item() if len(gap) else math.nan,
            "policy/engine_gap_tokens": float(len(gap)),
        }

    def _gap(self, probe: Probe) -> Tensor:
        rollouts = payload.read(probe.handle).rollouts
        microbatch = pack(
            rollouts, tickets=[-1] * len(rollouts), advantages=[0.0] * len(rollouts), step=probe.version
        ).to(self.device)
        live = probe.version == self.version and self.staging.exact
        with nullcontext() if live else self.staging.weights_of(probe.version):
            logprobs_T = self._score(microbatch)
        counts_T = microbatch.mask_T & (microbatch.versions_T == probe.version)
        return (logprobs_T - microbatch.behaviour_T)[counts_T].abs().double()

    def _over_ranks(self, values: Tensor, operation: Literal["sum", "max"]) -> Tensor:
        """Reduce in place over all ranks."""
        if self.config.ranks > 1:
            reduce = torch.distributed.ReduceOp
            torch.distributed.all_reduce(values, op={"sum": reduce.SUM, "max": reduce.MAX}[operation])
        return values


def _counted(logprobs_T: Tensor, inputs: LossInputs) -> Tensor:
    """Log ratios to behaviour of the tokens that count, in float64."""
    return (logprobs_T.detach() - inputs.behaviour_T)[inputs.mask_T].double()


def _means(sums: Counter[str], updates: int) -> dict[str, float]:
    """A step's metrics from its sums over updates and ranks."""
    tokens = max(sums["tokens"], 1.0)
    weights = {}
    if "policy/weight" in sums:
        # Kish's effective sample size over the tokens, as a share: (sum w)^2 / (n sum w^2).
        weights["policy/ess"] = sums["policy/weight"] ** 2 / max(tokens * sums["policy/weight_squared"], 1e-30)
    return {
        "policy/loss": sums["mean_loss"] / updates,
        "policy/grad_norm": sums["norm"] / updates,
        "policy/lr": sums["rate"] / updates,
        "policy/entropy": sums["entropy"] / tokens,
        "policy/lag_kl": sums["lag_kl"] / max(sums["lag_tokens"], 1.0),
        "policy/masked": 0.0,  # an objective that masks says so itself
        **{name: value / tokens for name, value in sums.items() if name.startswith("policy/")},
        **weights,
        "staleness/mean": sums["staleness"] / tokens,
        "perf/trained_tokens": sums["tokens"],
    }
