"""The trainer's actor: one per rank, sync endpoints, so that collectives block this actor's thread only.

Torch is imported at setup, so a controller that only spawns it stays light.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from monarch.actor import Actor, current_rank, endpoint

from actors.config import SyncConfig, TrainerConfig
from actors.types import Probe, StepReport, Taken

if TYPE_CHECKING:
    from actors.batching import Advantage
    from losses.inputs import Objective


class Trainer(Actor):
    """One rank. With several, `RANK`, `WORLD_SIZE` and the master's address must be in the environment.

    Call every endpoint on the whole mesh: ranks meet in collectives.
    """

    def __init__(self, config: TrainerConfig, sync: SyncConfig, run_dir: str, device: str = "cpu") -> None:
        self._config, self._sync, self._run_dir, self._device = config, sync, run_dir, device
        self._rank = current_rank().rank

    @endpoint
    def setup(
        self,
        model: str,
        objective: Objective,
        advantage: Advantage,
        total_steps: int,
        version: int = 0,
        checkpoint: str | None = None,
    ) -> None:
        """Load and shard the model of a local folder as `version`, make the staging slots and stage it.

        With `checkpoint`, the trainer's folder of the checkpoint of `version`, weights, optimizer and random state
        are those; `model` still gives the architecture and the tokenizer's files.
        """
        import torch
        from torch.distributed.device_mesh import init_device_mesh

        from actors.backends.hf import HfModel
        from actors.saving import Saver, load, load_memory
        from actors.sync import Slots
        from actors.training import Training
        from losses.inputs import ReadsReference, ReadsTeacher, reads

        torch.set_num_threads(self._config.threads)
        device = torch.device(self._device)
        if device.type == "cuda":
            device = torch.device("cuda", self._rank % torch.cuda.device_count())
            torch.cuda.set_device(device)
        mesh = group = None
        if self._config.ranks > 1:
            torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
            mesh = init_device_mesh(device.type, (self._config.ranks,))
            group = torch.distributed.new_group(backend="gloo")

        def compared(mark: type, folder: str | None) -> HfModel | None:
            """A second model, if the objective reads what it says."""
            if not reads(objective, mark):
                return None
            return HfModel(folder or model, self._config.dtype, device, mesh, frozen=True)

        backend = HfModel(model, self._config.dtype, device, mesh)
        self._training = Training(
            self._config,
            backend,
            objective,
            advantage,
            Slots.create(self._run_dir, self._rank, backend.shards(), self._sync.dtype),
            reference=compared(ReadsReference, self._config.reference),
            teacher=compared(ReadsTeacher, self._config.teacher),
            total_steps=total_steps,
            version=version,
            rank=self._rank,
            device=device,
        )
        if checkpoint is not None:
            state = self._training.state()
            load(state, Path(checkpoint), group)
            self._training.load_state(state, load_memory(Path(checkpoint)))
        self._saver = Saver(self._run_dir, self._training, group)

    @endpoint
    def step(self, taken: Taken, probe: Probe | None = None) -> StepReport:
        """Train a batch from version `taken.step` and stage the next version."""
        return self._training.step(taken, probe)

    @endpoint
    def checkpoint(self) -> float:
        """Copy the rank's state for the `CheckpointWriter` beside it; returns seconds."""
        return self._saver.copy()

    @endpoint
    def save(self, path: str) -> None:
        """Write a Hugging Face folder of the live weights; rank 0 writes."""
        self._training.backend.save(path)

    @endpoint
    def close(self) -> None:
        """Leave the process group; nothing works after it."""
        if self._config.ranks > 1:
            import torch

            torch.distributed.destroy_process_group()
