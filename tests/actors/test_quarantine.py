"""The ledger's count of rollouts that failed, and what it logs of rewards with parts."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from actors.config import BufferConfig
from actors.ledger import Ledger
from tests.actors.test_ledger import ledger, meta


def strict() -> Ledger:
    """Two groups of ten a step, of whose rollouts a tenth may fail."""
    return Ledger(BufferConfig(groups_per_step=2, max_staleness=5), steps=100, group_size=10, quarantine=0.1)


def test_failures_are_counted_from_take_to_take_and_end_the_run_beyond_the_limit():
    book = strict()
    leases = book.lease(0, 6)
    book.put(replace(meta(leases[0]), quarantined=1), "the first")
    book.put(replace(meta(leases[1]), quarantined=1), "the second")
    metrics = book.take(0).metrics
    assert metrics["rollout/quarantined"] == 2.0 and book.counts()["quarantined"] == 2
    book.put(replace(meta(leases[2]), quarantined=2), "line one\nline two")
    with pytest.raises(RuntimeError) as error:
        book.failed(leases[3].ticket, 0, "another", quarantined=10)
    assert str(error.value).splitlines() == [
        "the environment failed in 12 rollouts on the way to step 1, of 20 that a step has: more than "
        "--rollout.quarantine 0.1 allows; the first: line one",
        "line two",
    ]
    assert book.counts()["quarantined"] == 14


def test_a_failed_attempt_below_the_limit_is_tried_again_and_a_timeout_is_no_failure():
    book = strict()
    (lease,) = book.lease(0, 1)
    assert book.failed(lease.ticket, 0, "two members", quarantined=2)
    (again,) = book.lease(0, 1)
    assert again.attempt == 1
    assert book.failed(again.ticket, 1, "no answer of a generator")
    assert book.counts()["quarantined"] == 2


def test_failures_of_attempts_that_nobody_wants_any_more_count_too():
    book = strict()
    (lease,) = book.lease(0, 1)
    assert book.put(meta(lease))
    assert not book.put(replace(meta(lease), quarantined=2), "late")
    assert not book.failed(lease.ticket, 0, "late", quarantined=0)
    assert book.counts()["quarantined"] == 2


def right(*values: float) -> dict[str, np.ndarray]:
    return {"right": np.array(values, np.float32)}


def test_parts_are_averaged_over_all_scored_rollouts_of_closed_tickets():
    book = ledger(groups_per_step=1, max_staleness=5, zero_variance="filter")
    flat, good, plain, late = book.lease(0, 4)
    book.put(replace(meta(flat, rewards=(1.0, 1.0)), parts=right(1.0, 0.5)))
    book.put(replace(meta(good), parts=right(0.0, np.nan)))
    # (1 + 0.5 + 0) / 3: the dropped group counts as in reward/mean, a member without the part does not.
    metrics = book.take(0).metrics
    assert metrics["reward/mean"] == 0.75 and metrics["reward/right"] == 0.5
    book.put(meta(plain))
    assert np.isnan(book.take(1).metrics["reward/right"])
    book.put(replace(meta(late), parts=right(1.0, 1.0)))
    assert book.take(2).metrics["reward/right"] == 1.0


def test_a_snapshot_carries_what_failed_and_the_parts_of_what_ended():
    book = ledger(groups_per_step=1, max_staleness=5, zero_variance="filter")
    flat, good = book.lease(0, 2)
    book.put(replace(meta(flat, rewards=(1.0, 1.0)), parts=right(1.0, 0.5)))
    book.put(replace(meta(good), parts=right(0.0, np.nan), quarantined=1), "why")
    metrics = book.take(0).metrics
    other = ledger(groups_per_step=1, max_staleness=5, zero_variance="filter")
    other.restore(json.loads(json.dumps(book.snapshot(0))))
    assert other.counts()["quarantined"] == 1
    again = other.take(0).metrics
    for name in ("reward/right", "reward/mean", "rollout/quarantined"):
        assert again[name] == metrics[name]
