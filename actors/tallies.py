"""What ended, in numbers: since the last take, for the metrics of a step, and since the run began."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from actors.types import GroupMeta

log = logging.getLogger(__name__)

DROP_REASONS = ("stale", "zero_variance", "filtered", "failed", "end")


@dataclass
class Since:
    """What ended since the last take."""

    rewards: list[float] = field(default_factory=list)
    """As judged, of all scored rollouts."""
    oldest: list[int] = field(default_factory=list)
    """Version of the oldest token of each finished group that a look for the next batch dropped."""
    dropped: Counter[str] = field(default_factory=Counter)
    parts: dict[str, list[float]] = field(default_factory=dict)
    """For every name that was seen in the run."""
    quarantined: int = 0
    failure: str = ""
    """The first rollout's that failed, with its traceback."""

    def note(self, judged: np.ndarray, parts: Mapping[str, np.ndarray]) -> None:
        """Add what a group's scored rollouts got."""
        self.rewards.extend(judged.tolist())
        for name, values in parts.items():
            self.parts.setdefault(name, []).extend(values[~np.isnan(values)].tolist())

    def prepend(self, before: Since) -> None:
        """Add what ended before."""
        self.rewards = before.rewards + self.rewards
        self.oldest = before.oldest + self.oldest
        self.dropped += before.dropped
        self.parts = {name: before.parts.get(name, []) + values for name, values in self.parts.items()}
        self.quarantined += before.quarantined
        self.failure = before.failure or self.failure


@dataclass
class Tally:
    """Counts groups and rollouts as they end; warns, once a run, of drops by age that harm the training."""

    since: Since = field(default_factory=Since)
    quarantined: int = 0
    """Rollouts whose environment failed, in the run."""
    lengths: dict[str, list[int]] = field(default_factory=lambda: {"dropped": [0, 0], "trained": [0, 0]})
    """Generated tokens and rollouts in the run: of groups dropped as stale and of trained ones."""
    warned: set[str] = field(default_factory=set)

    def quarantine(self, count: int, failure: str) -> None:
        """Count rollouts that failed; `failure` is the first one's error with its traceback."""
        self.quarantined += count
        self.since.quarantined += count
        self.since.failure = self.since.failure or failure

    def drop(self, reason: str, meta: GroupMeta | None) -> None:
        """Count a group that ended untrained; `meta` if it was finished."""
        self.since.dropped[reason] += 1
        if meta is not None:
            self.since.note(_judged(meta), meta.parts)

    def look(self, meta: GroupMeta) -> None:
        """Count the age of a finished group that is there when a batch is looked for, and is dropped then."""
        self.since.oldest.append(int(meta.oldest.min()))

    def stale(self, ticket: int, actions: np.ndarray, *, span: int, bound: int) -> None:
        """Count the lengths of a group that is dropped as stale; its own generation crossed `span` versions."""
        if span > bound and "slow" not in self.warned:
            self.warned.add("slow")
            log.warning(
                "ticket %d needed more than max_staleness = %d versions to generate, so it can never be trained; "
                "--buffer.order window waits for such groups, or raise --buffer.max-staleness",
                ticket,
                bound,
            )
        self.lengths["dropped"][0] += int(actions.sum())
        self.lengths["dropped"][1] += len(actions)

    def take(self, step: int, metas: list[GroupMeta], there: list[GroupMeta]) -> dict[str, float]:
        """Count the groups that a step takes, out of the finished ones that are `there`, and return its metrics; what
        ends from now on is the next step's.

        A group's age is the version to train from minus that of its oldest token. `staleness/age` is of the groups
        taken, `buffer/age` of all finished ones that were there, before any was dropped.
        """
        for meta in metas:
            self.since.note(_judged(meta), meta.parts)
        oldest = self.since.oldest + [int(m.oldest.min()) for m in there]
        actions = [n for m in metas for n in m.actions.tolist()]
        self.lengths["trained"][0] += sum(actions)
        self.lengths["trained"][1] += len(actions)
        since, self.since = self.since, Since(parts={name: [] for name in self.since.parts})
        return {
            "reward/mean": _mean(since.rewards),
            "reward/trained": _mean(r for m in metas for r in m.rewards.tolist()),
            "reward/zero_variance": _mean(float(zero_variance(m)) for m in metas),
            "rollout/length": _mean(actions),
            "rollout/length_max": float(max(actions, default=0)),
            "rollout/truncated": _mean(float(t) for m in metas for t in m.truncated.tolist()),
            "rollout/quarantined": float(since.quarantined),
            "staleness/age": _mean(step - int(m.oldest.min()) for m in metas),
            "staleness/dropped": float(since.dropped["stale"]),
            "staleness/dropped_length_ratio": self._length_ratio(),
            "buffer/age": _mean(step - version for version in oldest),
            **{f"buffer/dropped_{reason}": float(since.dropped[reason]) for reason in DROP_REASONS},
            **{f"reward/{name}": _mean(values) if values else math.nan for name, values in since.parts.items()},
        }

    def untake(self, metas: list[GroupMeta], before: Since) -> None:
        """Undo `take`; `before` is what had ended then."""
        for meta in metas:
            self.lengths["trained"][0] -= int(meta.actions.sum())
            self.lengths["trained"][1] -= len(meta.actions)
        self.since.prepend(before)

    def _length_ratio(self) -> float:
        """Mean length of stale groups over mean length of trained ones, since the start; 0 with none dropped."""
        (dropped, n), (trained, m) = self.lengths["dropped"], self.lengths["trained"]
        if not n or not trained:
            return 0.0
        ratio = (dropped / n) / (trained / m)
        if ratio > 1.5 and "length" not in self.warned:
            self.warned.add("length")
            log.warning(
                "stale groups are %.1f x longer than trained ones: dropping them biases training to short answers; "
                "raise --buffer.max-staleness or use --buffer.order window",
                ratio,
            )
        return ratio


def zero_variance(meta: GroupMeta) -> bool:
    """Whether all members got the same reward."""
    return bool(meta.rewards.min() == meta.rewards.max())


def _judged(meta: GroupMeta) -> np.ndarray:
    return meta.rewards if meta.judged is None else meta.judged


def _mean(values: Iterable[float]) -> float:
    """Summed exactly, so that the order in which groups ended leaves no trace."""
    listed = list(values)
    return math.fsum(listed) / len(listed) if listed else 0.0
