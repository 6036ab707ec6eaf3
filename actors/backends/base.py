"""What the Trainer asks of a training backend."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Parameter

    from actors.batching import Microbatch
    from actors.weights import Shard


class Backend(Protocol):
    """A model laid out over the trainer's ranks. Every rank calls the methods that communicate in one order."""

    def parameters(self) -> dict[str, Parameter]:
        """Trainable parameters by Hugging Face name (DTensors where sharded), as the optimizer wants them."""
        ...

    def forward(self, microbatch: Microbatch) -> tuple[Tensor, Tensor]:
        """Logprobs [T] and entropy [T] (float32) of the microbatch's target tokens; full logits are never held."""
        ...

    def shards(self) -> Iterator[Shard]:
        """This rank's part of every tensor under its Hugging Face name; a replica that another rank sends is left out.

        The tensors alias the live weights and keep their address for the backend's life.
        """
        ...

    def weights(self) -> dict[str, Tensor]:
        """Every distinct weight by Hugging Face name, alias of the live one: DTensors where sharded."""
        ...

    def export(self, path: str, weights: dict[str, Tensor]) -> None:
        """Write a Hugging Face folder of these whole weights. Any one rank, any thread, at any time."""
        ...

    def save(self, path: str) -> None:
        """Write a Hugging Face folder that `AutoModelForCausalLM` loads; rank 0 writes, all ranks take part."""
        ...
