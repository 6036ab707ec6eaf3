"""The rollout worker against stub actors: streams, turns, failures, cancellation."""

from __future__ import annotations

import asyncio
import itertools
import math
import sys

import numpy as np
import pytest
import tokenizers

from actors import payload
from actors.buffer import LeaseReply
from actors.environment import Outcome, SingleTurn
from actors.player import Play
from actors.rollout import RolloutWorker
from actors.router import Router
from actors.tickets import Suspect
from actors.types import Completion, CompletionBatch, Lease, Sampling, derive_seed


class Endpoint:
    """Stands in for an actor's endpoint."""

    def __init__(self, function):
        self.call_one = function


class Replica:
    """Answers each request with the tokens that `answers` gives for its turn; versions count up over the calls."""

    def __init__(self, answers, gate=None):
        self.requests, self.aborted, self.answers, self.gate = [], [], answers, gate
        self.versions, self.asked = itertools.count(), asyncio.Event()
        self.generate, self.abort = Endpoint(self._generate), Endpoint(self._abort)

    async def _generate(self, batch):
        requests = batch.unpack()
        self.requests += requests
        self.asked.set()
        if self.gate is not None:
            await self.gate.wait()
        version = next(self.versions)
        out = []
        for request in requests:
            tokens = np.array(self.answers[request.id.turn], np.int32)
            n = len(tokens)
            out.append(
                Completion(
                    tokens=tokens,
                    logprobs=np.full(n, -0.5, np.float32),
                    versions=np.full(n, version, np.int32),
                    finish="abort" if self.aborted else "stop",
                )
            )
        return CompletionBatch.of(out, load=0)

    async def _abort(self, *which):
        self.aborted.append(which)
        if self.gate is not None:
            self.gate.set()


class Buffer:
    """Gives each lease in turn and records what comes back."""

    def __init__(self, replies):
        self.replies, self.metas, self.failures, self.given_up = list(replies), [], [], []
        self.reasons = []
        self.stale = Endpoint(self._stale)
        self.filtered, self.filtered_groups = Endpoint(self._filtered), []
        self.lease, self.put, self.failed = Endpoint(self._lease), Endpoint(self._put), Endpoint(self._failed)
        self.changed = asyncio.Event()

    async def _lease(self, worker, most):
        reply = self.replies.pop(0)
        if asyncio.iscoroutinefunction(reply):
            reply = await reply(self)
        return reply

    async def _put(self, meta, failure=""):
        self.metas.append(meta)
        self.changed.set()

    async def _filtered(self, group, failure=""):
        self.filtered_groups.append(group)
        self.reasons.append(failure)
        self.changed.set()

    async def _stale(self, ticket, attempt, oldest, actions):
        self.given_up.append((ticket, attempt, oldest, actions.tolist()))
        self.changed.set()

    async def _failed(self, ticket, attempt, reason, quarantined=0):
        self.failures.append((ticket, attempt))
        self.reasons.append(reason)
        self.changed.set()


async def done(buffer):
    await buffer.changed.wait()
    return LeaseReply(leases=(), suspects=(), done=True)


def leases(*ids):
    return LeaseReply(
        leases=tuple(Lease(ticket=t, attempt=a, row=t + 100, version=0) for t, a in ids), suspects=(), done=False
    )


@pytest.fixture
def model(tmp_path):
    """A tokenizer that merges: text "ab" is one token (3), though the policy may generate 1 and 2."""
    tk = tokenizers.Tokenizer(
        tokenizers.models.BPE({"<unk>": 0, "a": 1, "b": 2, "ab": 3, "?": 4}, [("a", "b")], unk_token="<unk>")
    )
    tk.decoder = tokenizers.decoders.Fuse()
    tk.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


class TwoTurns:
    def __init__(self):
        self.seen = []

    async def reset(self, row):
        return "ab"

    async def step(self, action, finish):
        self.seen.append(action)
        return Outcome(reward=0.25, observation="?ab") if len(self.seen) == 1 else Outcome(reward=1.0)

    async def close(self):
        return


class Task:
    rows = None

    def __init__(self, environment):
        self.environment = environment

    def row(self, i):
        return {"prompt": "ab", "i": i}


def worker(model, task, buffer, replicas, group_size=2, **play) -> RolloutWorker:
    return RolloutWorker(
        Play(
            task=task,
            model=str(model),
            group_size=group_size,
            folder=str(model),
            **{"seed": 5, "sampling": Sampling(max_tokens=4), "timeout": 30.0, "most": 8, **play},
        ),
        buffer,
        replicas,
    )


def call(endpoint, actor, *args):
    """Runs an endpoint's own coroutine, without Monarch."""
    return asyncio.run(endpoint._method.__wrapped__(actor, *args))


def run(actor: RolloutWorker) -> None:
    call(RolloutWorker.run, actor)


def test_two_turns_keep_generated_tokens_masks_versions_and_turns(model):
    # The policy generates "a", "b" as two tokens; tokenised again they would merge into one.
    replica = Replica({0: [1, 2], 1: [2]})
    buffer = Buffer([leases((0, 0)), done])
    run(worker(model, Task(TwoTurns), buffer, [replica], group_size=1))
    (rollout,) = payload.read(buffer.metas[0].handle).rollouts
    #                                 prompt  action  observation  action
    assert rollout.tokens.tolist() == [3, 1, 2, 4, 3, 2]
    assert rollout.mask.tolist() == [False, True, True, False, False, True]
    assert rollout.versions.tolist() == [-1, 0, 0, -1, -1, 1]
    assert rollout.logprobs.tolist() == [0, -0.5, -0.5, 0, 0, -0.5]
    assert [(t.start, t.end, t.kind, t.reward) for t in rollout.turns] == [
        (0, 1, "prompt", 0.0),
        (1, 3, "action", 0.25),
        (3, 5, "observation", 0.0),
        (5, 6, "action", 1.0),
    ]
    assert rollout.reward == 1.25
    assert replica.requests[1].prompt.tolist() == [3, 1, 2, 4, 3]
    meta = buffer.metas[0]
    assert (meta.oldest.tolist(), meta.newest.tolist(), meta.actions.tolist()) == ([0], [1], [3])
    assert meta.row == 100 and meta.lengths.tolist() == [6]


def test_seeds_name_ticket_member_and_turn(model):
    replica = Replica({0: [1], 1: [2]})
    buffer = Buffer([leases((7, 2)), done])
    run(worker(model, Task(TwoTurns), buffer, [replica]))
    assert {(r.id, r.seed) for r in replica.requests} == {
        ((7, 2, member, turn), derive_seed(5, 7, member, turn)) for member in (0, 1) for turn in (0, 1)
    }
    assert len({r.seed for r in replica.requests}) == 4


def test_an_environment_error_costs_one_attempt_and_is_shown_once(model, caplog):
    def broken(prompt, completion, *, finish, i):
        raise ZeroDivisionError("no reward")

    replica = Replica({0: [1]})
    buffer = Buffer([leases((0, 0), (1, 0)), done])

    async def both(buffer):
        while len(buffer.failures) < 2:
            buffer.changed.clear()
            await buffer.changed.wait()
        return LeaseReply(leases=(), suspects=(), done=True)

    buffer.replies[1] = both
    run(worker(model, Task(lambda: SingleTurn(reward=broken)), buffer, [replica]))
    assert sorted(buffer.failures) == [(0, 0), (1, 0)] and not buffer.metas
    assert caplog.text.count("Traceback") == 1 and "no reward" in caplog.text


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_costs_an_attempt(model, reward):
    buffer = Buffer([leases((0, 0)), done])
    run(worker(model, Task(lambda: SingleTurn(reward=lambda *a, **k: reward)), buffer, [Replica({0: [1]})]))
    assert buffer.failures == [(0, 0)] and not buffer.metas
    assert f"the reward is {reward}: it must be finite" in buffer.reasons[0]


def test_a_reward_that_exits_costs_an_attempt(model):
    buffer = Buffer([leases((0, 0)), done])
    run(worker(model, Task(lambda: SingleTurn(reward=lambda *a, **k: sys.exit(3))), buffer, [Replica({0: [1]})]))
    assert buffer.failures == [(0, 0)] and "SystemExit(3)" in buffer.reasons[0] and not buffer.metas


def test_a_group_that_takes_too_long_fails_and_is_aborted(model):
    gate = asyncio.Event()
    replica = Replica({0: [1]}, gate)
    buffer = Buffer([leases((0, 0)), done])
    run(worker(model, Task(TwoTurns), buffer, [replica], timeout=0.01))
    assert buffer.failures == [(0, 0)] and replica.aborted == [(0, 0)]


def test_a_dead_generator_ends_the_worker(model):
    replica = Replica({0: [1]})

    async def dead(requests):
        raise RuntimeError("the engine has stopped")

    replica.generate = Endpoint(dead)

    async def never(buffer):
        await asyncio.Event().wait()

    with pytest.raises(ExceptionGroup) as error:
        run(worker(model, Task(TwoTurns), Buffer([leases((0, 0)), never]), [replica]))
    assert "the engine has stopped" in repr(error.value.exceptions[0])


def test_a_suspect_that_the_generator_stops_is_given_up_as_stale(model):
    replica = Replica({0: [1]}, asyncio.Event())
    buffer = Buffer([leases((0, 0))])

    async def ask(buffer):
        await replica.asked.wait()
        return LeaseReply(leases=(), suspects=(Suspect(ticket=0, attempt=0, oldest=3),), done=False)

    buffer.replies += [ask, done]
    run(worker(model, Task(TwoTurns), buffer, [replica]))
    assert replica.aborted[0] == (0, 0, 3)
    assert buffer.given_up == [(0, 0, 0, [1, 1])] and not buffer.metas and not buffer.failures


def test_a_probe_is_short_and_of_no_ticket(model):
    replica = Replica({0: [1, 2]})
    task = Task(lambda: SingleTurn(reward=lambda *a, **k: 0.0))
    actor = worker(model, task, None, [replica], most=1, sampling=Sampling(max_tokens=100))
    probes = [call(RolloutWorker.probe, actor, version, 0, 3) for version in (0, 1)]
    assert [p.version for p in probes] == [0, 1] and len(payload.read(probes[0].handle).rollouts) == 3
    assert {r.id.ticket for r in replica.requests} == {-1}
    assert {r.sampling.max_tokens for r in replica.requests} == {8}
    assert len({r.seed for r in replica.requests}) == 6 and {r.min_version for r in replica.requests} == {0, 1}


def test_a_probe_asks_no_reward_keeps_to_the_rows_and_misses_out_when_an_environment_fails(model, caplog):
    class Data(Task):
        rows = 3

        def row(self, i):
            return {"prompt": ["ab", "a", "b"][i]}

    def forbidden(*args, **kwargs):
        raise AssertionError("a probe is not judged")

    replica = Replica({0: [1, 2]})
    actor = worker(model, Data(lambda: SingleTurn(reward=forbidden)), None, [replica])
    probe = call(RolloutWorker.probe, actor, 4, 0, 2)
    assert payload.read(probe.handle).rollouts[1].tokens.tolist() == [1, 1, 2]

    class Broken(TwoTurns):
        async def reset(self, row):
            raise OSError("no simulator")

    assert call(RolloutWorker.probe, worker(model, Data(Broken), None, [replica]), 5, 0, 2) is None
    assert "no probe of version 5" in caplog.text


def test_an_environment_that_cannot_be_made_or_closed_costs_an_attempt(model):
    class Unclosable(TwoTurns):
        async def close(self):
            raise OSError("cannot close")

    def unmade():
        raise OSError("cannot be made")

    for environment, text in ((Unclosable, "environment close"), (unmade, "environment reset")):
        buffer = Buffer([leases((0, 0)), done])
        run(worker(model, Task(environment), buffer, [Replica({0: [1, 2], 1: [2]})]))
        assert buffer.failures == [(0, 0)] and text in buffer.reasons[0] and not buffer.metas


def test_router_is_sticky_prefers_the_light_and_can_be_fixed():
    router = Router(3)
    homes = []
    for episode in "abc":
        homes.append(router.pick(0, episode))
        router.sent(homes[-1], 16)
    assert sorted(homes) == [0, 1, 2] and [router.pick(9, e) for e in "abc"] == homes
    router.answered(homes[1], 16, load=5)
    assert router.pick(3, "d") == homes[1], "it has nothing of ours"
    router.answered(homes[2], 16, load=2)
    assert router.pick(4, "e") == homes[2], "neither has, and this one said that it is lighter"
    router.forget("a")
    router.sent(homes[2], 16)
    assert router.pick(5, "a") == homes[1]
    assert [Router(3, fixed=True).pick(t, "same") for t in (0, 1, 2, 3)] == [0, 1, 2, 0]
