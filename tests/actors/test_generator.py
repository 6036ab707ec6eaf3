"""The generator's loop around a hand-cranked engine: gating, swaps, aborts, death, followers."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

from actors import generator as module
from actors.config import GeneratorConfig
from actors.generator import Generator
from actors.types import Completion, Request, RequestBatch, RequestId, Sampling


class Engine:
    """Two slots; a request takes `max_tokens` steps; each step waits for a turn of the crank."""

    def __init__(self, shift=0):
        self.version, self.running, self.crank, self.loaded = 0, {}, threading.Semaphore(0), []
        self.shift, self.broken = shift, None

    unfinished = property(lambda self: len(self.running))
    free = property(lambda self: 2 - len(self.running))

    def add(self, request):
        if not len(request.prompt):
            raise ValueError("empty prompt")
        self.running[request.id] = (request.sampling.max_tokens, [])

    def step(self):
        assert self.crank.acquire(timeout=10)
        if self.broken:
            raise self.broken
        done = []
        for id, (left, versions) in list(self.running.items()):
            versions.append(self.version)
            if left == len(versions):
                done.append(self._end(id, "stop"))
        return done

    def _end(self, id, finish):
        _, versions = self.running.pop(id)
        n = len(versions)
        return id, Completion(
            tokens=np.arange(n, dtype=np.int32) + self.shift,
            logprobs=np.zeros(n, np.float32),
            versions=np.array(versions, np.int32),
            finish=finish,
        )

    def abort(self, ids):
        return [self._end(id, "abort") for id in ids if id in self.running]

    def load(self, tensors, version):
        self.version = version
        self.loaded.append(version)

    def wanted(self):
        return None

    def close(self):
        return


def call(endpoint, actor, *args):
    return endpoint._method.__wrapped__(actor, *args)


def batch(ticket, lengths=(2,), min_version=0, prompt=(1,)):
    return RequestBatch.of(
        [
            Request(
                id=RequestId(ticket, 0, member, 0),
                prompt=np.array(prompt, np.int32),
                sampling=Sampling(max_tokens=n),
                seed=0,
                min_version=min_version,
            )
            for member, n in enumerate(lengths)
        ]
    )


class Rig:
    """A generator whose engine is ours, running in the test's loop."""

    def __init__(self, engine, followers=()):
        self.engine, self.followers = engine, list(followers)

    async def __aenter__(self):
        self.actor = Generator(GeneratorConfig(), "", 1)
        self.actor._engine = self.engine
        self.run = asyncio.create_task(call(Generator.run, self.actor, self.followers))
        return self

    async def __aexit__(self, *_):
        self.engine.crank.release(1000)
        if not self.run.done():
            await call(Generator.close, self.actor)
            await self.run

    def ask(self, batch):
        return asyncio.create_task(self._ask(batch))

    async def _ask(self, batch):
        return (await call(Generator.generate, self.actor, batch)).unpack()

    async def until(self, condition):
        """Let the loop run until the actor is where the test wants it."""
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(0)


async def versions_of(task):
    return [c.versions.tolist() for c in await task]


def drive(test):
    return lambda: asyncio.run(test())


def test_a_request_waits_for_its_version_and_for_a_free_slot():
    async def body():
        async with Rig(Engine()) as rig:
            late = rig.ask(batch(0, min_version=1))
            now = rig.ask(batch(1, (1, 1, 1)))
            await rig.until(lambda: len(rig.engine.running) == 2)
            rig.engine.crank.release(2)
            assert await versions_of(now) == [[0], [0], [0]]
            assert not late.done()
            swap = asyncio.create_task(call(Generator.swap, rig.actor, 1))
            rig.engine.crank.release(2)
            assert await versions_of(late) == [[1, 1]]
            assert await swap >= 0
            stats = await call(Generator.stats, rig.actor)
            assert stats.tokens == 5

    drive(body)()


def test_a_running_request_goes_on_through_swaps_with_the_version_of_each_forward():
    async def body():
        async with Rig(Engine()) as rig:
            task = rig.ask(batch(0, (9,)))
            await rig.until(lambda: rig.engine.running)
            for version in (1, 2):
                swap = asyncio.create_task(call(Generator.swap, rig.actor, version))
                await rig.until(lambda: rig.actor._swap is not None)
                # The forward in progress ends with the old weights.
                rig.engine.crank.release(1)
                await swap
            rig.engine.crank.release(9)
            (versions,) = await versions_of(task)
            assert versions == sorted(versions) and set(versions) == {0, 1, 2} and len(versions) == 9

    drive(body)()


def test_abort_returns_the_partial_and_spares_what_began_late_enough():
    async def body():
        async with Rig(Engine()) as rig:
            old = rig.ask(batch(0, (9, 9)))
            waiting = rig.ask(batch(1, (1,)))
            await rig.until(lambda: len(rig.engine.running) == 2)
            await call(Generator.abort, rig.actor, 0, 0, 0)  # began at 0, may be as old as 0
            await call(Generator.abort, rig.actor, 1, 0, 5)  # has not begun
            rig.engine.crank.release(1)
            await rig.until(lambda: all(len(v) == 1 for _, v in rig.engine.running.values()))
            assert not old.done()
            await call(Generator.abort, rig.actor, 0, 0, 1)
            rig.engine.crank.release(1)
            done = await old
            assert [c.finish for c in done] == ["abort", "abort"]
            assert all(1 <= len(c.tokens) <= 2 for c in done), "the forward in progress may have been the second"
            rig.engine.crank.release(1)
            assert [c.finish for c in await waiting] == ["stop"]

    drive(body)()


def test_abort_of_a_queued_group_is_empty():
    async def body():
        async with Rig(Engine()) as rig:
            rig.ask(batch(0, (9, 9)))
            queued = rig.ask(batch(1, (3,)))
            await rig.until(lambda: len(rig.engine.running) == 2)
            await call(Generator.abort, rig.actor, 1, 0)
            (completion,) = await queued
            assert completion.finish == "abort" and len(completion.tokens) == 0
            await call(Generator.abort, rig.actor, 0, 0)

    drive(body)()


def test_a_refused_request_fails_its_call_only():
    async def body():
        async with Rig(Engine()) as rig:
            good = rig.ask(batch(0, (1,)))
            rig.engine.crank.release(3)
            with pytest.raises(ValueError, match="empty prompt"):
                await rig.ask(batch(1, prompt=()))
            assert await versions_of(good) == [[0]]

    drive(body)()


def test_a_dead_engine_is_an_error_for_every_open_request_and_swap():
    async def body():
        async with Rig(Engine()) as rig:
            calls = [rig.ask(batch(0, (9, 9))), rig.ask(batch(1)), rig.ask(batch(2, min_version=7))]
            await rig.until(lambda: len(rig.engine.running) == 2)
            swap = asyncio.create_task(call(Generator.swap, rig.actor, 1))
            await rig.until(lambda: rig.actor._swap is not None)
            rig.engine.broken = MemoryError("out of slots")
            rig.engine.crank.release(1)
            for task in [*calls, swap]:
                with pytest.raises(RuntimeError, match=r"the engine has stopped: out of slots"):
                    await task
            with pytest.raises(MemoryError):
                await rig.run
            with pytest.raises(RuntimeError, match="out of slots"):
                await rig.ask(batch(3))

    drive(body)()


def test_a_second_swap_is_refused_while_one_is_pending():
    async def body():
        async with Rig(Engine()) as rig:
            rig.ask(batch(0, (3,)))
            await rig.until(lambda: rig.engine.running)
            first = asyncio.create_task(call(Generator.swap, rig.actor, 1))
            await rig.until(lambda: rig.actor._swap is not None)
            with pytest.raises(RuntimeError, match="another one is pending"):
                await call(Generator.swap, rig.actor, 2)
            rig.engine.crank.release(9)
            await first
            assert rig.engine.loaded == [1]

    drive(body)()


class Follower:
    """Rank 1 of the replica, in the same process."""

    def __init__(self, engine):
        self.actor = Generator(GeneratorConfig(tp=2), "", 1)
        self.actor._engine = engine
        self.ticks = []
        self.follow = self

    async def call_one(self, tick):
        self.ticks.append(tick)
        return await call(Generator.follow, self.actor, tick)


@pytest.mark.parametrize("shift", [0, 1])
def test_followers_do_the_same_or_are_found_out(shift):
    async def body():
        engines = Engine(), Engine(shift)
        follower = Follower(engines[1])
        async with Rig(engines[0], [follower]) as rig:
            for engine in engines:
                engine.crank.release(1000)
            task = rig.ask(batch(0, (3, 3)))
            if shift:
                with pytest.raises(RuntimeError, match="engine has stopped: rank 1 diverged"):
                    await task
                with pytest.raises(RuntimeError, match="restart the replica"):
                    await rig.run
            else:
                await call(Generator.swap, rig.actor, 1)
                assert [len(v) for v in await versions_of(task)] == [3, 3]
                assert engines[1].loaded == [1] and not engines[1].running
            assert [tick.index for tick in follower.ticks] == list(range(1, len(follower.ticks) + 1))

    drive(body)()


def test_engines_are_chosen_by_their_settings():
    from actors.config import SimulatedEngine

    engine = module.build_engine(GeneratorConfig(engine=SimulatedEngine(slots=3)), "", 1, "cpu")
    assert engine.free == 3 and engine.wanted() is None
