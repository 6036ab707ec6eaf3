"""One trainer rank's work: probe, plan, backward on plain sums, one global denominator, update, staging.

Nothing here knows Monarch; `actors.trainer` is the actor around it. With several ranks every method is called by all
of them in the same order.
"""

from __future__ import annotations

import logging
import math
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from actors import payload
from actors.backends.base import Backend
from actors.batching import Advantage, Microbatch, advantages, load, pack, plan
from actors.config import TrainerConfig
from actors.measures import measure, policy_metrics, spread
from actors.types import Probe, StepReport, Taken
from actors.weights import box_of
from losses.advantages import ByRow
from losses.inputs import Objective, ReadsOld, WholeGroups, reads
from losses.ops import neutral, reduce_terms

log = logging.getLogger(__name__)


class Scored(NamedTuple):
    """A microbatch, and its logprobs [T] under policies that stand still during the step, where they are read."""

    microbatch: Microbatch
    old_T: Tensor | None
    ref_T: Tensor | None
    teacher_T: Tensor | None


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
        reference, teacher: models that an objective compares with, laid out as `backend`; they stand still.
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
        reference: Backend | None = None,
        teacher: Backend | None = None,
        total_steps: int,
        version: int = 0,
        rank: int = 0,
        device: torch.device | None = None,
    ) -> None:
        self.config, self.backend, self.objective, self.advantage = config, backend, objective, advantage
        self.staging, self.version, self.rank = staging, version, rank
        self.reference, self.teacher = reference, teacher
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
                whole_groups=reads(self.objective, WholeGroups),
            )
        ]
        old = self.backend if reads(self.objective, ReadsOld) and len(pieces) > 1 else None
        still = (old, self.reference, self.teacher)
        updates = [
            [Scored(m, *(self._score(m, model) for model in still)) for m in microbatches]
            for microbatches in ([m.to(self.device) for m in load(taken, piece, advantage)] for piece in pieces)
        ]
        sums: dict[str, Tensor] = {}
        peaks = torch.zeros(2, dtype=torch.float64, device=self.device)
        for number, scored in enumerate(updates):
            sums = _added(sums, self._update(number, scored, peaks))
        peaks = self._over_ranks(peaks, "max")
        self.version += 1
        staged = self.staging.stage(self.version)
        members = [member for piece in pieces for microbatch in piece for member in microbatch]
        return StepReport(
            step=taken.step,
            rollouts=len(members),
            tokens=sum(int(scored.microbatch.mask_T.sum()) for update in updates for scored in update),
            tickets=tuple(sorted(taken.groups[m.group].ticket for m in members if m.member == 0)),
            metrics=metrics
            | policy_metrics(sums)
            | spread(taken, advantage)
            | {
                **{f"policy/{name}": sums[name].item() / len(updates) for name in ("loss", "grad_norm", "lr")},
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

    def memory(self) -> Any:
        """What the advantage estimator remembers of earlier steps, as plain JSON; None of one that does not."""
        return self.advantage.state() if isinstance(self.advantage, ByRow) else None

    def load_state(self, state: dict[str, Tensor], memory: Any = None) -> None:
        """Go on from `state`'s tensors, filled in place since: take over what is not aliased and stage the weights.
        `memory` is what `memory()` gave with it.

        Raises:
            ValueError: the state is of another version than the one held.
        """
        if (version := int(state["version"])) != self.version:
            raise ValueError(f"trainer rank {self.rank}: the checkpoint is of version {version}, not {self.version}")
        torch.set_rng_state(state[f"rng/{self.rank}"])
        if isinstance(self.advantage, ByRow):
            if memory is None:
                log.warning("version %d was made without such an advantage estimator: it begins anew", self.version)
            else:
                self.advantage.load_state(memory)
        self.staging.stage(self.version)

    def _update(self, number: int, scored: list[Scored], peaks: Tensor) -> dict[str, Tensor]:
        """One optimizer update. Returns sums over all ranks; `peaks` (ratio, staleness) grows to this rank's."""
        sums: dict[str, Tensor] = {}
        for microbatch, old_T, ref_T, teacher_T in scored:
            logprobs_T, entropy_T = self.backend.forward(microbatch)
            inputs = neutral(microbatch.loss_inputs(logprobs_T, entropy_T, old_T, ref_T, teacher_T))
            terms = self.objective(inputs)
            part = reduce_terms(terms, inputs, rollout_means=self.config.denominator == "rollout_means")
            part.loss.backward()
            start_T = logprobs_T if number == 0 else old_T
            counts = {
                "sequences": microbatch.sequences,
                "max_tokens": microbatch.budget,
                "biased": microbatch.biased,
            }
            of_rollouts = {name: torch.tensor(count, device=self.device) for name, count in counts.items()}
            sums = _added(sums, measure(inputs, terms, part, start_T) | of_rollouts)
            ratio_C = (inputs.logprobs_T.detach() - inputs.behaviour_T)[inputs.mask_T].double().exp()
            peaks[0] = torch.cat([peaks[:1], ratio_C]).amax()
            peaks[1] = torch.cat([peaks[1:], inputs.staleness_T[inputs.mask_T].double()]).amax()
        flat = self._over_ranks(torch.cat([value.flatten() for value in sums.values()]), "sum")
        parts = flat.split([value.numel() for value in sums.values()])
        sums = {name: part.view_as(value) for (name, value), part in zip(sums.items(), parts, strict=True)}
        self._warn(sums["biased"].item())
        chosen = self.config.denominator
        weight = sums["sequences" if chosen == "rollout_means" else chosen].item()
        rate = learning_rate(self.config, self.version * self.config.updates_per_step + number, self.total_updates)
        norm = self._apply(weight, rate) if weight else 0.0
        if not weight:
            log.warning("step %d: no token of update %d counts, so the weights stay as they are", self.version, number)
        self.optimizer.zero_grad()
        of_update = {"loss": sums["loss"].item() / max(weight, 1.0), "grad_norm": norm, "lr": rate}
        return sums | {name: torch.tensor(value, dtype=torch.float64) for name, value in of_update.items()}

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

    def _score(self, microbatch: Microbatch, model: Backend | None) -> Tensor | None:
        """Logprobs [T] under a model's present weights, without a graph."""
        if model is None:
            return None
        with torch.no_grad():
            return model.forward(microbatch)[0]

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
            logprobs_T = self._score(microbatch, self.backend)
        assert logprobs_T is not None
        counts_T = microbatch.mask_T & (microbatch.versions_T == probe.version)
        return (logprobs_T - microbatch.behaviour_T)[counts_T].abs().double()

    def _over_ranks(self, values: Tensor, operation: Literal["sum", "max"]) -> Tensor:
        """Reduce in place over all ranks."""
        if self.config.ranks > 1:
            reduce = torch.distributed.ReduceOp
            torch.distributed.all_reduce(values, op={"sum": reduce.SUM, "max": reduce.MAX}[operation])
        return values


def _added(sums: dict[str, Tensor], more: dict[str, Tensor]) -> dict[str, Tensor]:
    """Sums by name, in float64."""
    return {name: value.double() + sums.get(name, 0.0) for name, value in more.items()}
