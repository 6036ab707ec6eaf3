from __future__ import annotations

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors import timeline
from actors.timeline import JOIN, Span, Spans, chrome_trace


def span(role: str, name: str, begin: float, end: float, version: int | None = None) -> Span:
    return Span(role=role, name=name, begin=begin, end=end, version=version)


def test_ticks_of_a_burst_are_one_span_and_bursts_stay_apart():
    spans = Spans("generator0")
    for burst in (100.0, 101.0):
        for tick in range(50):
            spans.add("decode", burst + tick * 0.004, burst + tick * 0.004 + 0.003, 7)
    first, second = spans.take()
    assert (first.role, first.name, first.version) == ("generator0", "decode", 7)
    assert (first.begin, first.end) == pytest.approx((100.0, 100.199), abs=1e-9)
    assert (second.begin, second.end) == pytest.approx((101.0, 101.199), abs=1e-9)


def test_only_one_name_and_one_version_is_joined():
    spans = Spans("generator0")
    spans.add("decode", 1.0, 2.0, 3)
    spans.add("swap", 2.0, 2.001, 4)
    spans.add("decode", 2.001, 3.0, 4)
    spans.add("decode", 3.001, 4.0, 4)
    spans.add("decode", 4.0 + JOIN * 1.01, 5.0, 4)
    assert [(s.name, s.begin, s.end, s.version) for s in spans.take()] == [
        ("decode", 1.0, 2.0, 3),
        ("swap", 2.0, 2.001, 4),
        ("decode", 2.001, 4.0, 4),
        ("decode", 4.0 + JOIN * 1.01, 5.0, 4),
    ]


def test_overlapping_spans_are_joined_in_any_order_of_their_ends():
    spans = Spans("worker0")
    spans.add("score", 10.0, 11.0)
    spans.add("score", 9.0, 12.0)
    spans.add("score", 1.0, 2.0)
    assert [(s.begin, s.end) for s in spans.take()] == [(9.0, 12.0), (1.0, 2.0)]


def test_take_clears_and_an_open_span_stays():
    spans = Spans("trainer")
    before = time.time()
    with spans("train", version=3):
        spans.add("wait", 1.0, 2.0)
        assert [s.name for s in spans.take()] == ["wait"]
        assert spans.take() == []
    (train,) = spans.take()
    assert (train.name, train.version) == ("train", 3)
    assert before - 1 <= train.begin <= time.time() + 1


def test_a_block_lasts_as_long_as_the_steady_clock_says(monkeypatch):
    clock = iter((20.0, 22.5))
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    spans = Spans("trainer")
    with spans("train"):
        pass
    (train,) = spans.take()
    assert train.end - train.begin == pytest.approx(2.5)


def test_a_burst_goes_on_after_a_take():
    spans = Spans("generator0")
    spans.add("decode", 1.0, 1.002)
    spans.take()
    spans.add("decode", 1.003, 1.005)
    assert [(s.begin, s.end) for s in spans.take()] == [(1.003, 1.005)]


def test_a_block_that_raises_is_recorded():
    spans = Spans("trainer")
    with pytest.raises(ZeroDivisionError), spans("train"):
        raise ZeroDivisionError
    assert [(s.name, s.version) for s in spans.take()] == [("train", None)]


def test_a_clock_that_was_set_back_gives_no_negative_length():
    spans = Spans("trainer")
    spans.add("train", 5.0, 4.0)
    assert [(s.begin, s.end) for s in spans.take()] == [(5.0, 5.0)]


def test_memory_is_bounded_and_what_went_is_said(monkeypatch):
    monkeypatch.setattr(timeline, "LIMIT", 3)
    spans = Spans("worker0")
    for i in range(5):
        spans.add("score", float(i), i + 0.5)
    assert [(s.name, s.begin, s.end) for s in spans.take()] == [
        ("lost", 0.0, 1.5),
        ("score", 2.0, 2.5),
        ("score", 3.0, 3.5),
        ("score", 4.0, 4.5),
    ]
    assert spans.take() == []


def test_a_span_that_went_is_not_joined_to(monkeypatch):
    monkeypatch.setattr(timeline, "LIMIT", 1)
    spans = Spans("trainer")
    spans.add("train", 0.0, 1.0)
    spans.add("wait", 1.0, 1.001)
    spans.add("train", 1.001, 2.0)
    assert [(s.name, s.begin, s.end) for s in spans.take()] == [("lost", 0.0, 1.001), ("train", 1.001, 2.0)]


times = st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 300)), max_size=60)


@given(times)
def test_joining_covers_what_was_recorded_and_adds_only_short_gaps(stretches):
    """On a grid of milliseconds: each recorded one is covered; any other that is covered lies in a gap of JOIN."""
    spans = Spans("worker0")
    recorded: set[int] = set()
    for begin, length in stretches:
        spans.add("score", begin / 1000, (begin + length) / 1000)
        recorded |= set(range(begin, begin + length + 1))
    covered = {t for s in spans.take() for t in range(round(s.begin * 1000), round(s.end * 1000) + 1)}
    assert recorded <= covered
    reach = round(JOIN * 1000)
    for t in covered - recorded:
        assert any(t - i in recorded for i in range(1, reach)) and any(t + i in recorded for i in range(1, reach))


def test_chrome_trace_of_two_roles():
    trace = chrome_trace(
        [
            span("sync", "push", 12.0, 12.5, 4),
            span("trainer", "train", 10.0, 11.5),
            span("sync", "push", 12.25, 13.0, 5),
        ]
    )
    assert json.loads(json.dumps(trace)) == trace
    complete = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert [(e["name"], e["cat"], e["ts"], e["dur"], e.get("args")) for e in complete] == [
        ("train", "trainer", 0.0, 1.5e6, None),
        ("push", "sync", 2.0e6, 0.5e6, {"version": 4}),
        ("push", "sync", 2.25e6, 0.75e6, {"version": 5}),
    ]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert [names[e["pid"], e["tid"]] for e in complete] == ["train", "push", "push 2"]
    roles = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert [roles[e["pid"]] for e in complete] == ["trainer", "sync", "sync"]


@given(times)
def test_no_two_events_of_a_thread_overlap(stretches):
    trace = chrome_trace([span("worker0", "score", float(b), float(b + n)) for b, n in stretches])
    ends: dict[int, float] = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            assert ends.get(event["tid"], 0.0) <= event["ts"]
            ends[event["tid"]] = event["ts"] + event["dur"]
    assert sum(e["ph"] == "X" for e in trace["traceEvents"]) == len(stretches)


def test_no_spans_give_an_empty_trace():
    assert chrome_trace([])["traceEvents"] == []
