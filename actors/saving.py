"""A trainer rank's state on the disk, through torch.distributed.checkpoint in its safetensors format.

Nothing is pickled, so a checkpoint may come from anywhere, and any number of ranks reads what any other number wrote.
The trainer waits for a copy in memory only; an actor beside it writes the copy while it trains on.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from monarch.actor import Actor, concurrent_endpoint

from actors.checkpoint import MODEL, TRAINER

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    from actors.training import Training

MEMORY = "advantage.json"
"""File beside the tensors: what the advantage estimator remembers."""

# Sibling actors of a process meet here: a trainer rank and its writer.
_savers: dict[str, Saver] = {}


class Saver:
    """One rank's checkpoints: `copy` on the trainer's thread, then `write` on another one, by all ranks.

    Args:
        run_dir: names the run in this process; `CheckpointWriter` finds the saver by it.
        group: gloo group of all ranks that nothing else uses, as it works beside the training; None for a single rank.
    """

    def __init__(self, run_dir: str, training: Training, group: ProcessGroup | None) -> None:
        from actors.dcp import SafetensorsWriter  # now: importing torch's part of it later would stop a step

        self._writer = SafetensorsWriter
        self._training, self._group = training, group
        self._copy: dict[str, Tensor] | None = None
        self._memory: Any = None
        _savers[run_dir] = self

    def copy(self) -> float:
        """Copy the rank's state to host memory, in place of an earlier copy; returns seconds."""
        begin = time.perf_counter()
        self._copy = {name: tensor.to("cpu", copy=True) for name, tensor in self._training.state().items()}
        self._memory = self._training.memory()
        return time.perf_counter() - begin

    def write(self, folder: Path) -> float:
        """Write the copy into a checkpoint's folder and let go of it; rank 0 then writes the Hugging Face folder from
        what all ranks wrote. Returns seconds.

        Raises:
            OSError: no room, on any rank.
            RuntimeError: nothing was copied since the last write.
        """
        from torch.distributed.checkpoint.state_dict_saver import save

        begin = time.perf_counter()
        state, self._copy = self._copy, None
        if state is None:
            raise RuntimeError(f"nothing to write to {folder}: the trainer has copied nothing since the last write")
        target = folder / TRAINER
        with _one_line(OSError, f"cannot write {folder}"):
            save(state, storage_writer=self._writer(target), process_group=self._group, no_dist=self._group is None)
            del state
            if self._training.rank == 0:
                if self._memory is not None:
                    (target / MEMORY).write_text(json.dumps(self._memory))
                self._training.backend.export(str(folder / MODEL), read_weights(target))
        return time.perf_counter() - begin


def load(state: dict[str, Tensor], folder: Path, group: ProcessGroup | None) -> None:
    """Fill the tensors of `Training.state` in place; together on all ranks of `group`. A rank that the checkpoint has
    no random state of keeps its own.

    Raises:
        ValueError: the files do not hold the state whole, or another shape of it.
    """
    from torch.distributed.checkpoint import state_dict_loader
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    if not folder.is_dir():
        raise FileNotFoundError(f"no trainer state in {folder}: give a complete checkpoint")
    with _one_line(ValueError, f"cannot load the trainer's state from {folder}"):
        reader = HuggingFaceStorageReader(str(folder))
        found = _sizes(reader)
        wanted = {name: tensor for name, tensor in state.items() if name in found or not name.startswith("rng/")}
        state_dict_loader.load(wanted, storage_reader=reader, process_group=group, no_dist=group is None)


def load_memory(folder: Path) -> Any:
    """What the advantage estimator remembered; None of one that does not.

    Raises:
        ValueError: the file is damaged.
    """
    try:
        return json.loads((folder / MEMORY).read_text())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"cannot load {folder / MEMORY}: {error}") from error


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The whole weights in what all ranks wrote, by Hugging Face name. One process alone reads them.

    Raises:
        ValueError: as `load`.
    """
    import torch
    from torch.distributed.checkpoint import state_dict_loader
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    with _one_line(ValueError, f"cannot load the weights from {folder}"):
        reader = HuggingFaceStorageReader(str(folder))
        weights = {name: torch.empty(size) for name, size in _sizes(reader).items() if name.startswith("weight/")}
        state_dict_loader.load(weights, storage_reader=reader, no_dist=True)
    return {name.removeprefix("weight/"): tensor for name, tensor in weights.items()}


def _sizes(reader: HuggingFaceStorageReader) -> dict[str, tuple[int, ...]]:
    """Shape of each stored tensor. Torch reads over a hole without a word, so this looks for holes."""
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    sizes = {}
    for name, stored in reader.read_metadata().state_dict_metadata.items():
        assert isinstance(stored, TensorStorageMetadata)
        held = sum(math.prod(chunk.sizes) for chunk in stored.chunks)
        if held != math.prod(stored.size):
            elements = f"{held} of {math.prod(stored.size)} elements"
            raise ValueError(f"{reader.path} has {elements} of {name}: a rank's file is missing or there twice")
        sizes[name] = tuple(stored.size)
    return sizes


@contextmanager
def _one_line(kind: type[Exception], what: str) -> Iterator[None]:
    """Torch's error here is no `Exception` and brings every rank's stack: raise the first rank's reason instead."""
    from safetensors import SafetensorError
    from torch.distributed.checkpoint.api import CheckpointException

    warnings.filterwarnings("ignore", "torch.distributed is disabled")  # a single rank means it
    try:
        yield
    except CheckpointException as error:
        rank, (reason, _) = next(iter(error.failures.items()))
        raise kind(f"{what}: rank {rank}: {reason!r}") from error
    except SafetensorError as error:
        raise kind(f"{what}: {error}") from error


class CheckpointWriter(Actor):
    """Beside a trainer rank, in its process: writes what the rank has copied while the rank trains on."""

    def __init__(self, run_dir: str) -> None:
        self._run_dir = run_dir

    @concurrent_endpoint
    async def write(self, folder: str) -> float:
        """`Saver.write`; call it on all ranks, one checkpoint at a time."""
        if self._run_dir not in _savers:
            raise RuntimeError(f"no saver for {self._run_dir} in this process: set the trainer up before")
        return await asyncio.to_thread(_savers[self._run_dir].write, Path(folder))
