"""Which replica serves a request. A library inside each rollout worker: nothing on the data path can be lost."""

from __future__ import annotations

from collections.abc import Hashable


class Router:
    """Sticky by episode, so that later turns find their prefix; else the replica with the fewest requests of this
    worker, and of those the lighter one by the load that its latest reply carried.

    A worker knows exactly what it has out; with several workers each spreads its own requests evenly, so none of them
    rushes to the same replica for having heard the same old load.
    """

    def __init__(self, replicas: int, *, fixed: bool = False) -> None:
        """`fixed` sends ticket t to replica t % replicas: a run with one schedule only."""
        self._replicas, self._fixed = replicas, fixed
        self._out, self._load = [0] * replicas, [0] * replicas
        self._homes: dict[Hashable, int] = {}

    def pick(self, ticket: int, episode: Hashable) -> int:
        """The replica for the next request of `episode`."""
        if self._fixed:
            return ticket % self._replicas
        if episode not in self._homes:
            self._homes[episode] = min(range(self._replicas), key=lambda i: (self._out[i], self._load[i], i))
        return self._homes[episode]

    def sent(self, replica: int, requests: int) -> None:
        """Count requests on their way."""
        self._out[replica] += requests

    def answered(self, replica: int, requests: int, load: int) -> None:
        """Count answers, and take the replica's load that came with them."""
        self._out[replica] -= requests
        self._load[replica] = load

    def forget(self, episode: Hashable) -> None:
        """The episode ended."""
        self._homes.pop(episode, None)
