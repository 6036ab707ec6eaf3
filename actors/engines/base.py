"""What the Generator asks of an inference engine."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from actors.types import Completion

if TYPE_CHECKING:
    from torch import Tensor

    from actors.tokenizer import Tokenizer
    from actors.types import Request, RequestId
    from actors.weights import Box

EMPTY = Completion(
    tokens=np.zeros(0, np.int32), logprobs=np.zeros(0, np.float32), versions=np.zeros(0, np.int32), finish="abort"
)
"""Of a request that was stopped before its first token."""


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


def check_room(request: Request, vocabulary: int, max_length: int) -> None:
    """What an engine with a model refuses besides.

    Raises:
        ValueError: a prompt token that the model lacks, or prompt + max_tokens beyond `max_length`.
    """
    name = f"request {tuple(request.id)}"
    if not 0 <= request.prompt.min() <= request.prompt.max() < vocabulary:
        raise ValueError(f"{name} has a prompt token that is not among the model's {vocabulary}")
    length, new = len(request.prompt), request.sampling.max_tokens
    if length + new > max_length:
        raise ValueError(
            f"{name}: prompt of {length} + max_tokens {new} exceeds the slots' {max_length} tokens: raise "
            "--generator.engine.max-length or ask for fewer"
        )


def check_ends(ends: Collection[int], vocabulary: int, folder: str) -> None:
    """Raises ValueError if the folder's end tokens are not among its model's."""
    if unknown := [id for id in ends if not 0 <= id < vocabulary]:
        raise ValueError(
            f"the end tokens {unknown} of {folder!r} are not among its model's {vocabulary}: "
            "correct eos_token_id in its generation_config.json or config.json"
        )


def check_weights(tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], version: int) -> None:
    """What an engine refuses to load, before it changes anything.

    Raises:
        ValueError: a tensor of the model is missing or has another shape.
    """
    for name, shape in shapes.items():
        if name not in tensors:
            raise ValueError(f"version {version} lacks {name}: no weight was changed")
        if tuple(tensors[name].shape) != shape:
            raise ValueError(
                f"version {version} has {name} of shape {tuple(tensors[name].shape)}, the model {shape}: no weight "
                "was changed"
            )


def hits_stop(tokenizer: Tokenizer, tokens: Sequence[int] | np.ndarray, stop: tuple[str, ...]) -> bool:
    """Whether the last of a completion's tokens completed a stop string.

    A token is taken to hold at least a byte of text, but for a few special ones, so the string lies in as many tokens
    as it has bytes and a few.
    """
    reach = max(len(s.encode()) for s in stop) + 8
    text = tokenizer.decode(np.asarray(tokens[-reach:]))
    return any(s in text for s in stop)
