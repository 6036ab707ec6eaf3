"""Which replica serves a request. A library inside each rollout worker: nothing on the data path can be lost."""

from __future__ import annotations

import random
from collections.abc import Hashable


class Router:
    """Sticky by episode, so that later turns find their prefix; else the lighter of two drawn replicas.

    A replica's load is what it said in its latest reply plus what this worker sent since.
    """

    def __init__(self, replicas: int, *, fixed: bool = False, seed: int = 0) -> None:
        """`fixed` sends ticket t to replica t % replicas: a run with one schedule only."""
        self._replicas, self._fixed = replicas, fixed
        self._load = [0] * replicas
        self._homes: dict[Hashable, int] = {}
        self._random = random.Random(seed)

    def pick(self, ticket: int, episode: Hashable) -> int:
        """The replica for the next request of `episode`."""
        if self._fixed or self._replicas == 1:
            return ticket % self._replicas
        home = self._homes.get(episode)
        if home is None:
            a, b = self._random.sample(range(self._replicas), 2)
            home = self._homes[episode] = a if self._load[a] <= self._load[b] else b
        return home

    def sent(self, replica: int, requests: int) -> None:
        """Count requests on their way."""
        self._load[replica] += requests

    def heard(self, replica: int, load: int) -> None:
        """Take the load that a reply carried."""
        self._load[replica] = load

    def forget(self, episode: Hashable) -> None:
        """The episode ended."""
        self._homes.pop(episode, None)
