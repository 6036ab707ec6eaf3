"""An engine without a model: it takes time and returns tokens of a known length, to study scheduling alone."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from actors.config import SimulatedEngine
from actors.engines.base import check
from actors.types import Completion, Finish, Request, RequestId

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(slots=True)
class _Running:
    request: Request
    length: int
    """Tokens after which it would stop by itself."""
    versions: list[int] = field(default_factory=list)
    """Of the tokens so far."""

    def finish(self) -> Finish | None:
        made = len(self.versions)
        if made >= self.length:
            return "stop"
        return "length" if made >= self.request.sampling.max_tokens else None

    def completion(self, finish: Finish) -> tuple[RequestId, Completion]:
        made = len(self.versions)
        return self.request.id, Completion(
            tokens=np.zeros(made, np.int32),
            logprobs=np.zeros(made, np.float32),
            versions=np.array(self.versions, np.int32),
            finish=finish,
        )


class Simulated:
    """`actors.engines.base.Engine` whose forward lasts `base + per_request * running` seconds.

    All tokens are 0 with logprob 0. Prompts cost nothing; the first token comes from the step that admits the request.
    """

    def __init__(
        self,
        config: SimulatedEngine,
        *,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.version = 0
        self.config = config
        self.clock, self.sleep = clock, sleep
        self.queue: deque[Request] = deque()
        self.running: list[_Running] = []

    @property
    def unfinished(self) -> int:
        """Requests added and not yet returned."""
        return len(self.queue) + len(self.running)

    @property
    def free(self) -> int:
        """Slots that no request runs in or waits for."""
        return max(0, self.config.slots - self.unfinished)

    def add(self, request: Request) -> None:
        """Queue a request, first come first served.

        Raises:
            ValueError: empty prompt, no token to make, or a version older than `min_version`.
        """
        check(request, self.version)
        self.queue.append(request)

    def step(self) -> list[tuple[RequestId, Completion]]:
        """Admit what fits, let a forward's time pass, return the requests that it finished."""
        start = self.clock()
        while self.queue and len(self.running) < self.config.slots:
            request = self.queue.popleft()
            self.running.append(_Running(request, self.length(request)))
        if not self.running:
            return []
        duration = self.config.base + self.config.per_request * len(self.running)
        finished, still = [], []
        for item in self.running:
            item.versions.append(self.version)
            finish = item.finish()
            if finish is None:
                still.append(item)
            else:
                finished.append(item.completion(finish))
        self.running = still
        self.sleep(max(0.0, start + duration - self.clock()))
        return finished

    def length(self, request: Request) -> int:
        """Tokens after which the request stops unless `max_tokens` comes first: lognormal, fixed by its seed."""
        normal = np.random.default_rng(request.seed).standard_normal()
        return max(1, round(self.config.median_length * math.exp(self.config.sigma * normal)))

    def abort(self, ids: Iterable[RequestId]) -> list[tuple[RequestId, Completion]]:
        """Stop these requests and return what they have so far, finish `abort`. Unknown ids are ignored."""
        unwanted = set(ids)
        stopped = [_Running(r, 0) for r in self.queue if r.id in unwanted]
        stopped += [item for item in self.running if item.request.id in unwanted]
        self.queue = deque(r for r in self.queue if r.id not in unwanted)
        self.running = [item for item in self.running if item.request.id not in unwanted]
        return [item.completion("abort") for item in stopped]

    def wanted(self) -> None:
        """There are no weights."""
        return None

    def load(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Stamp later tokens with `version`."""
        self.version = version

    def reset_cache(self) -> None:
        """There is no cache."""

    def close(self) -> None:
        """Nothing to free."""
