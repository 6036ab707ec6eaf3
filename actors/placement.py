"""Which role runs where: a pure function of the configuration and the machines."""

from __future__ import annotations

from dataclasses import dataclass

from actors.config import GeneratorConfig, RolloutConfig, TrainerConfig
from actors.types import require


@dataclass(frozen=True, kw_only=True, slots=True)
class Spot:
    """Where one mesh runs: one process per rank, all with the same threads."""

    name: str
    hosts: tuple[int, ...]
    ranks_per_host: int
    threads: int
    gpus: tuple[int, ...] = ()
    """Device numbers visible to the mesh on each of its hosts, one per rank; empty on CPU."""

    @property
    def device(self) -> str:
        """What the mesh's tensors live on."""
        return "cuda" if self.gpus else "cpu"


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """All meshes of a run."""

    buffer: Spot
    workers: Spot
    trainer: Spot
    generators: tuple[Spot, ...]
    evaluator: Spot | None
    """A generator that serves evaluation only."""


def plan(
    generator: GeneratorConfig,
    trainer: TrainerConfig,
    rollout: RolloutConfig,
    *,
    evaluator: bool = False,
    hosts: int = 1,
    gpus: int = 0,
) -> Placement:
    """Place every role on `hosts` machines of `gpus` devices each, no device twice; `gpus` 0 runs all on CPU.

    The trainer comes first and takes whole hosts when it needs more than one; a replica lies within one host.
    `evaluator` asks for one more replica, apart from the others.

    Raises:
        ValueError: it does not fit, with the numbers.
    """
    require("placement", 1, hosts=hosts)
    require("placement", 0, gpus=gpus)
    workers = Spot(name="rollout", hosts=(0,), ranks_per_host=rollout.workers, threads=1)
    buffer = Spot(name="buffer", hosts=(0,), ranks_per_host=1, threads=1)
    free = {host: list(range(gpus)) for host in range(hosts)}

    def take(name: str, ranks: int, threads: int) -> Spot:
        if gpus == 0:
            return Spot(name=name, hosts=(0,), ranks_per_host=ranks, threads=threads)
        for host, devices in free.items():
            if len(devices) >= ranks:
                mine, free[host] = devices[:ranks], devices[ranks:]
                return Spot(name=name, hosts=(host,), ranks_per_host=ranks, threads=threads, gpus=tuple(mine))
        whole = [host for host, devices in free.items() if len(devices) == gpus]
        if name == "trainer" and ranks % gpus == 0 and len(whole) >= ranks // gpus:
            mine = whole[: ranks // gpus]
            for host in mine:
                free[host] = []
            return Spot(name=name, hosts=tuple(mine), ranks_per_host=gpus, threads=threads, gpus=tuple(range(gpus)))
        left = ", ".join(f"host {host}: {len(devices)}" for host, devices in free.items())
        rule = f"a multiple of {gpus} over whole hosts" if name == "trainer" else "one host's devices"
        raise ValueError(f"{name} needs {ranks} GPUs ({rule}), free are {left}: lower its ranks or add hosts")

    return Placement(
        buffer=buffer,
        workers=workers,
        trainer=take("trainer", trainer.ranks, trainer.threads),
        generators=tuple(take(f"generator{i}", generator.tp, generator.threads) for i in range(generator.replicas)),
        evaluator=take("evaluator", generator.tp, generator.threads) if evaluator else None,
    )
