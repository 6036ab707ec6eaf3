import subprocess
import sys

import numpy as np
import pytest

from actors.config import SimulatedEngine
from actors.engines.simulated import Simulated
from actors.types import Completion, Request, RequestId, Sampling, derive_seed


class Clock:
    """Time that passes only when slept, plus what the test adds."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def read(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def request(ticket: int, *, max_tokens: int = 10_000, prompt: int = 3, min_version: int = 0) -> Request:
    return Request(
        id=RequestId(ticket, 0, 0, 0),
        prompt=np.arange(prompt, dtype=np.int32),
        sampling=Sampling(max_tokens=max_tokens),
        seed=derive_seed(0, ticket, 0, 0),
        min_version=min_version,
    )


def drain(engine: Simulated) -> dict[RequestId, Completion]:
    out: dict[RequestId, Completion] = {}
    while engine.unfinished:
        out |= dict(engine.step())
    return out


def test_a_forward_takes_base_plus_per_request():
    clock = Clock()
    engine = Simulated(
        SimulatedEngine(base=1.0, per_request=0.25, median_length=3, sigma=0, slots=2),
        clock=clock.read,
        sleep=clock.sleep,
    )
    for ticket in range(3):
        engine.add(request(ticket))
    assert len(drain(engine)) == 3
    # Two run for three steps, then the queued one alone for three.
    assert clock.slept == [1.5] * 3 + [1.25] * 3


def test_only_the_remaining_time_is_slept():
    ticks = iter([10.0, 10.4, 20.0, 23.0])
    slept: list[float] = []
    engine = Simulated(
        SimulatedEngine(base=1.0, per_request=0, median_length=2, sigma=0),
        clock=lambda: next(ticks),
        sleep=slept.append,
    )
    engine.add(request(0))
    drain(engine)
    assert slept == [pytest.approx(0.6), 0.0]


def test_an_idle_step_takes_no_time():
    clock = Clock()
    assert Simulated(SimulatedEngine(), clock=clock.read, sleep=clock.sleep).step() == []
    assert clock.slept == []


def test_lengths_are_lognormal_and_fixed_by_the_seed():
    config = SimulatedEngine(median_length=200, sigma=0.99)
    lengths = np.array([Simulated(config).length(request(t)) for t in range(4000)])
    assert np.median(lengths) == pytest.approx(200, rel=0.06)
    assert np.log(lengths).std() == pytest.approx(0.99, rel=0.05)
    assert np.quantile(lengths, 0.99) == pytest.approx(2000, rel=0.2)  # exp(0.99 * 2.326) = 10.0
    again = Simulated(SimulatedEngine(median_length=200, sigma=0.99, slots=3))
    assert [again.length(request(t)) for t in range(50)] == lengths[:50].tolist()


def test_completions_have_the_length_and_max_tokens_caps_it():
    clock = Clock()
    engine = Simulated(SimulatedEngine(median_length=5, sigma=0), clock=clock.read, sleep=clock.sleep)
    for ticket, cap in enumerate((4, 5, 6)):
        engine.add(request(ticket, max_tokens=cap))
    out = drain(engine)
    found = [(len(out[i].tokens), out[i].finish) for i in sorted(out)]
    assert found == [(4, "length"), (5, "stop"), (5, "stop")]
    assert all(len(c.logprobs) == len(c.versions) == len(c.tokens) and not c.logprobs.any() for c in out.values())


def test_versions_change_where_the_load_was():
    clock = Clock()
    engine = Simulated(SimulatedEngine(median_length=5, sigma=0, slots=1), clock=clock.read, sleep=clock.sleep)
    engine.add(request(0))
    engine.step()
    engine.step()
    engine.load({}, 4)
    engine.step()
    engine.load({}, 7)
    assert drain(engine)[request(0).id].versions.tolist() == [0, 0, 4, 7, 7]
    assert engine.wanted() is None


def test_abort_returns_the_partial_and_frees_the_slot():
    clock = Clock()
    engine = Simulated(SimulatedEngine(median_length=4, sigma=0, slots=1), clock=clock.read, sleep=clock.sleep)
    for ticket in range(3):
        engine.add(request(ticket))
    engine.step()
    engine.step()
    out = dict(engine.abort([request(0).id, request(2).id, request(9).id]))
    assert {i.ticket: (len(c.tokens), c.finish) for i, c in out.items()} == {0: (2, "abort"), 2: (0, "abort")}
    assert engine.unfinished == 1
    assert [i.ticket for i in drain(engine)] == [1]


def test_bad_requests_are_refused():
    engine = Simulated(SimulatedEngine())
    with pytest.raises(ValueError, match="empty prompt"):
        engine.add(request(0, prompt=0))
    with pytest.raises(ValueError, match="wants version 2, the engine holds 0"):
        engine.add(request(0, min_version=2))
    assert engine.unfinished == 0


def test_imports_no_torch():
    code = "import sys, actors.engines.simulated; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
