"""The loop's verbs against stub roles."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from actors.config import EvalConfig, RunConfig
from actors.metrics import RunLog
from actors.run import Roles, Run
from actors.tokenizer import Tokenizer


class SlowSync:
    """Pushes that do not end; notes which replicas each was for."""

    def __init__(self) -> None:
        self.pushed: list[tuple[int, int | None]] = []

    async def publish(self, version: int, replicas: int | None) -> dict[str, float]:
        self.pushed.append((version, replicas))
        await asyncio.Event().wait()
        raise AssertionError


async def versions_pushed(tmp_path: Any) -> list[tuple[int, int | None]]:
    sync = SlowSync()
    roles = Roles(
        buffer=None,
        workers=None,
        generators=[None, None],
        evaluator=None,
        trainer=None,
        writers=None,
        sync=cast(Any, sync),
    )
    config = RunConfig(steps=9, eval=EvalConfig(every=1))
    log = RunLog(tmp_path / "run", config, 9, quiet=True)
    stop: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    with pytest.raises(ExceptionGroup):
        async with asyncio.TaskGroup() as tasks:
            run = Run(config, log, roles, tasks, stop, cast(Tokenizer, None), held_out=4)

            async def no_checkpoint() -> None:
                await asyncio.sleep(0)

            run._save = no_checkpoint  # type: ignore[method-assign]
            for step in (0, 1):
                await run.publish({"step": step})
            await asyncio.sleep(0)
            raise RuntimeError("enough")
    return sync.pushed


def test_a_version_does_not_reach_the_evaluator_while_the_one_before_is_still_on_its_way(tmp_path):
    # None is every replica, the evaluator too; 2 are those that train.
    assert asyncio.run(versions_pushed(tmp_path)) == [(1, None), (2, 2)]
