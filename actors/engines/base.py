"""What the Generator asks of an inference engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from actors.types import Completion, Request, RequestId
    from actors.weights import Box


class Engine(Protocol):
    """Continuous batching of requests over one set of weights, driven one forward at a time.

    Not thread-safe: the Generator calls it from one thread and swaps weights only between two `step` calls, so every
    forward uses one version in all layers.
    """

    version: int
    """Version of the weights that the next forward uses."""

    @property
    def unfinished(self) -> int:
        """Requests added and not yet returned."""
        ...

    @property
    def free(self) -> int:
        """Requests that could join now: whoever waits for longer than that waits outside, with fresher weights."""
        ...

    def add(self, request: Request) -> None:
        """Queue a request; it joins between two steps.

        Raises:
            ValueError: empty prompt, or prompt + max_tokens beyond the engine's context.
        """
        ...

    def step(self) -> list[tuple[RequestId, Completion]]:
        """Admit what fits, run one forward, return the requests that it finished."""
        ...

    def abort(self, ids: Iterable[RequestId]) -> list[tuple[RequestId, Completion]]:
        """Stop these requests and return what they have so far, finish `abort`. Unknown ids are ignored."""
        ...

    def wanted(self) -> dict[str, Box] | None:
        """The part of each tensor that this rank loads, by Hugging Face name; None for an engine without weights."""
        ...

    def load(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Copy new weights in place (sources may be read-only maps) and stamp later tokens with `version`."""
        ...

    def reset_cache(self) -> None:
        """Forget cached prefixes of finished requests; those in flight keep theirs."""
        ...

    def close(self) -> None:
        """Free what the engine holds."""
        ...


def check(request: Request, version: int) -> None:
    """What every engine refuses in `add` while it holds `version`.

    Raises:
        ValueError: empty prompt, no token wanted, or weights older than `min_version`.
    """
    name = f"request {tuple(request.id)}"
    if len(request.prompt) == 0:
        raise ValueError(f"{name} has an empty prompt: give at least one token")
    if request.sampling.max_tokens < 1:
        raise ValueError(f"{name} asks for {request.sampling.max_tokens} tokens: give sampling.max_tokens")
    if request.min_version > version:
        raise ValueError(f"{name} wants version {request.min_version}, the engine holds {version}: load it first")
