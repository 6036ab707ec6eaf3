"""What a failing environment costs against stub actors, rewards with parts, and rollouts that fill the context."""

from __future__ import annotations

import asyncio
import math
import sys

import numpy as np
import pytest

from actors import payload
from actors.environment import Outcome, SingleTurn
from actors.episode import Stream, read_only
from actors.rollout import RolloutWorker
from actors.types import Completion, Sampling
from tests.actors.test_rollout import Buffer, Endpoint, Replica, Task, TwoTurns, call, done, leases, model, run, worker

__all__ = ["model"]


class Books(Buffer):
    """Keeps what came with each group and attempt."""

    def __init__(self, replies):
        super().__init__(replies)
        self.put, self.failed = Endpoint(self._put_with), Endpoint(self._failed_with)
        self.reports = []

    async def _put_with(self, meta, failure=""):
        self.metas.append(meta)
        self.reports.append(failure)
        self.changed.set()

    async def _failed_with(self, ticket, attempt, reason, quarantined=0):
        self.failures.append((ticket, attempt, quarantined))
        self.reports.append(reason)
        self.changed.set()


class Numbered:
    """Makes environments of one turn, each with its number."""

    def __init__(self, judge, reset=None, close=None):
        self.judge, self.made, self.closed = judge, 0, 0
        self._reset, self._close = reset, close

    def __call__(self):
        number, self.made = self.made, self.made + 1
        outer = self

        class Episode:
            async def reset(self, row):
                if outer._reset is not None:
                    await outer._reset(number)
                return "ab"

            async def step(self, action, finish):
                return await outer.judge(number)

            async def close(self):
                outer.closed += 1
                if outer._close is not None:
                    outer._close(number)

        return Episode()


def play(model, environment, *, size=4, replies=None, answers=None, **settings):
    """One group; the buffer's books and the replica."""
    books, replica = Books(replies or [leases((0, 0)), done]), Replica(answers or {0: [1]})
    run(worker(model, Task(environment), books, [replica], group_size=size, **settings))
    return books, replica


async def broken(number):
    """Member 1 fails, others get their number."""
    if number == 1:
        raise ZeroDivisionError(f"no reward for {number}")
    return Outcome(reward=float(number))


def test_a_failure_costs_its_rollout_and_brings_the_users_line(model, caplog):
    books, _ = play(model, Numbered(broken))
    (meta,), (report,) = books.metas, books.reports
    assert meta.rewards.tolist() == [0.0, 2.0, 3.0] and meta.quarantined == 1 and not books.failures
    assert len(payload.read(meta.handle).rollouts) == 3 and meta.lengths.tolist() == [2, 2, 2]
    first, *_, last = report.splitlines()
    assert first == "ticket 0 (row 100) attempt 0 member 1, environment step: ZeroDivisionError('no reward for 1')"
    assert last == "ZeroDivisionError: no reward for 1"
    assert 'raise ZeroDivisionError(f"no reward for {number}")' in report
    assert caplog.text.count("Traceback") == 1 and report in caplog.text


def failing_first(count):
    async def judge(number):
        if number < count:
            raise RuntimeError("no")
        return Outcome(reward=1.0)

    return judge


@pytest.mark.parametrize(("size", "failing", "survive"), [(4, 2, True), (4, 3, False), (5, 3, False), (1, 1, False)])
def test_half_of_the_members_must_survive(model, size, failing, survive):
    books, _ = play(model, Numbered(failing_first(failing)), size=size)
    if survive:
        assert books.metas[0].quarantined == failing and len(books.metas[0].rewards) == size - failing
    else:
        assert books.failures == [(0, 0, failing)] and not books.metas and "RuntimeError: no" in books.reports[0]


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf, 1e39])
def test_a_reward_that_is_no_number_of_float32_costs_its_rollout(model, reward):
    async def judge(number):
        return Outcome(reward=reward if number == 0 else 1.0)

    books, _ = play(model, Numbered(judge))
    assert books.metas[0].rewards.tolist() == [1.0, 1.0, 1.0]
    assert f"the reward is {reward}: it must be finite" in books.reports[0]


def test_an_exit_a_wrong_answer_and_a_cancellation_cost_one_rollout_each(model):
    async def judge(number):
        if number == 0:
            sys.exit(3)
        if number == 1:
            return 1.0
        if number == 2:
            raise asyncio.CancelledError
        return Outcome(reward=1.0)

    books, _ = play(model, Numbered(judge), size=8)
    assert books.metas[0].quarantined == 3 and books.metas[0].rewards.tolist() == [1.0] * 5
    assert "SystemExit(3)" in books.reports[0]


def test_a_hanging_step_costs_its_rollout_when_the_time_is_up(model):
    async def judge(number):
        if number == 2:
            await asyncio.Event().wait()  # hangs here
        return Outcome(reward=1.0)

    environment = Numbered(judge)
    books, _ = play(model, environment, timeout=0.05)
    assert books.metas[0].quarantined == 1 and environment.closed == 4
    assert "member 2, environment step: not done when the group's time (--rollout.timeout) was up" in books.reports[0]
    assert "await asyncio.Event().wait()  # hangs here" in books.reports[0]


def test_a_failing_reset_leaves_the_others_and_close_counts_too(model):
    async def reset(number):
        if number == 0:
            raise OSError("no simulator")

    def close(number):
        if number == 1:
            raise OSError("cannot close")

    async def judge(number):
        return Outcome(reward=float(number))

    environment = Numbered(judge, reset, close)
    books, replica = play(model, environment)
    assert books.metas[0].rewards.tolist() == [2.0, 3.0] and books.metas[0].quarantined == 2
    assert {r.id.member for r in replica.requests} == {1, 2, 3} and environment.closed == 4
    assert "environment reset: OSError('no simulator')" in books.reports[0]


def test_a_slow_generator_costs_an_attempt_and_no_rollout(model):
    books, gate = Books([leases((0, 0)), done]), asyncio.Event()
    replica = Replica({0: [1]}, gate)
    run(worker(model, Task(TwoTurns), books, [replica], timeout=0.01))
    assert books.failures == [(0, 0, 0)] and replica.aborted == [(0, 0)]
    assert books.reports == ["no answer of a generator within --rollout.timeout 0.01"]


def test_an_engines_error_ends_the_worker_whatever_the_environment_does(model):
    async def dead(batch):
        raise RuntimeError("the engine has stopped")

    replica = Replica({0: [1]})
    replica.generate = Endpoint(dead)

    async def never(buffer):
        await asyncio.Event().wait()

    with pytest.raises(ExceptionGroup) as error:
        run(worker(model, Task(TwoTurns), Books([leases((0, 0)), never]), [replica]))
    assert "the engine has stopped" in repr(error.value.exceptions[0])


def test_a_reward_may_be_async_and_have_parts(model):
    async def reward(prompt, completion, *, finish, i):
        await asyncio.sleep(0)
        return {"reward": 0.5, "length": len(completion), "right": finish == "stop"}

    books, _ = play(model, lambda: SingleTurn(reward=reward), size=2)
    (meta,) = books.metas
    assert meta.rewards.tolist() == [0.5, 0.5]
    assert meta.parts.keys() == {"length", "right"} and meta.parts["length"].dtype == np.float32
    assert meta.parts["length"].tolist() == meta.parts["right"].tolist() == [1.0, 1.0]
    assert payload.read(meta.handle).rollouts[1].parts == {"length": 1.0, "right": 1.0}


def test_a_score_without_reward_or_with_a_name_of_ours_costs_its_rollout(model):
    bad = [{"right": 1.0}, {"reward": 1.0, "mean": 1.0}, {"reward": 1.0, "x": math.nan}]
    scores = iter([*bad, *[{"reward": 1.0}] * 5])
    books, _ = play(model, lambda: SingleTurn(reward=lambda *a, **k: next(scores)), size=8)
    assert books.metas[0].quarantined == 3 and books.metas[0].rewards.tolist() == [1.0] * 5
    assert "a mapping without 'reward': it has ['right']" in books.reports[0]


def test_parts_add_up_over_turns_and_are_nan_where_a_member_lacks_them(model):
    async def judge(number):
        if number == 0:
            return Outcome(reward=1.0, parts={"a": 1.0, "b": 5.0})
        return Outcome(reward=1.0, parts={"a": 2.0})

    books, _ = play(model, Numbered(judge), size=2)
    assert books.metas[0].parts["a"].tolist() == [1.0, 2.0]
    np.testing.assert_array_equal(books.metas[0].parts["b"], [5.0, math.nan])

    stream = Stream(read_only(np.array([7], np.int32)), Sampling())
    completion = Completion(
        tokens=np.array([1], np.int32),
        logprobs=np.zeros(1, np.float32),
        versions=np.zeros(1, np.int32),
        finish="stop",
    )
    stream.act(completion, Outcome(reward=0.25, parts={"a": 1.0}), "stop")
    stream.act(completion, Outcome(reward=0.5, parts={"a": 2.0, "b": 4.0}), "stop")
    rollout = stream.finish()
    assert rollout.reward == 0.75 and rollout.parts == {"a": 3.0, "b": 4.0}


def test_an_observation_that_leaves_no_room_ends_the_episode_as_truncated(model):
    # prompt 1 + action 2 + observation 2 = 5 tokens: no room in 5, room for one in 6.
    answers = {0: [1, 2], 1: [2]}
    books, replica = play(model, TwoTurns, size=1, answers=answers, context=5)
    (rollout,) = payload.read(books.metas[0].handle).rollouts
    assert rollout.tokens.tolist() == [3, 1, 2] and rollout.reward == 0.25 and rollout.truncated
    assert books.metas[0].truncated.tolist() == [True] and len(replica.requests) == 1

    books, replica = play(model, TwoTurns, size=1, answers=answers, context=6)
    assert [r.sampling.max_tokens for r in replica.requests] == [4, 1]
    assert books.metas[0].rewards.tolist() == [1.25] and books.metas[0].truncated.tolist() == [False]


def test_a_first_prompt_without_room_costs_rollouts_and_says_what_to_change(model):
    books, replica = play(model, TwoTurns, context=4)
    assert books.failures == [(0, 0, 4)] and not replica.requests
    assert books.reports == [
        "ticket 0 (row 100) attempt 0 member 0, the prompt of row 100 has 1 tokens, which with --sampling.max-tokens "
        "4 exceed the engine's context of 4: raise --generator.engine.max-length or leave the row out"
    ]
    books, _ = play(model, lambda: SingleTurn(reward=lambda *a, **k: 1.0), context=5)
    assert books.metas[0].quarantined == 0


def test_the_time_in_environments_is_noted_once_for_what_happens_together(model):
    actor = worker(model, Task(TwoTurns), Books([leases((0, 0)), done]), [Replica({0: [1], 1: [2]})])
    run(actor)
    spans = call(RolloutWorker.spans, actor)
    assert {(s.role, s.name) for s in spans} == {("worker0", "score")} and 1 <= len(spans) <= 4
    assert all(s.begin <= s.end for s in spans) and call(RolloutWorker.spans, actor) == []
