"""From settings to a run: start and set up every process, end them all."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from monarch.spmd import setup_torch_elastic_env_async

from actors.buffer import BOOKS, ReplayBuffer, Restored
from actors.checkpoint import BUFFER, MODEL, TRAINER, Checkpoints
from actors.checks import check, check_objective, context_of, held_out, resolve
from actors.config import NativeEngine, RunConfig
from actors.environment import Task
from actors.generator import Generator
from actors.mesh import Meshes, cause
from actors.metrics import RunLog
from actors.output import default_folder
from actors.placement import Placement, Spot
from actors.player import Play
from actors.rollout import RolloutWorker
from actors.run import Roles, Run, Start, Stopped, wait
from actors.saving import CheckpointWriter
from actors.shm import RunFolder
from actors.sync import Replica, WeightPublisher, WeightReceiver, WeightSync
from actors.tokenizer import Tokenizer
from actors.trainer import Trainer
from actors.transports import make_transport

if TYPE_CHECKING:
    from actors.batching import Advantage
    from losses.inputs import Objective

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end a run in order: Ctrl-C, a scheduler, a terminal that was closed."""


@asynccontextmanager
async def launch(config: RunConfig, *, task: Task, loss: Objective, advantage: Advantage) -> AsyncIterator[Run]:
    """Start all processes of a run and give its loop; on leaving, finish the run and end them.

    An error, of a process or of the body, ends the run with it; `summary.json` says so. SIGINT or SIGTERM ends the
    loop after the step in progress; a second one ends everything at once.

    Args:
        config: settings of all roles.
        task: where rows come from and how they are played; picklable.
        loss: gives one value per token; picklable.
        advantage: from rewards [N] and group ids [N] of a step to advantages [N]; picklable.

    Raises:
        ValueError, OSError: settings that contradict each other or do not fit the machine; nothing was started.
        RuntimeError: a process died, or the books do not balance.
        Stopped: a signal came before the loop began, or while it waited for something that did not end.
    """
    config = resolve(config)
    placement, room = check(config, task)
    check_objective(config, loss)
    output = config.output_dir or default_folder(Path(sys.argv[0]).stem)
    async with AsyncExitStack() as stack:
        stack.enter_context(held(output))
        origin = find_checkpoint(output, config, task) if config.resume else None
        stop = stack.enter_context(signals())
        folder = RunFolder.create(room)
        stack.callback(folder.close)
        log = RunLog(
            output,
            config,
            config.steps,
            config.log,
            resume_step=None if origin is None else origin.version,
            overwrite=config.overwrite,
        )
        stack.enter_context(log)
        stack.enter_context(noted(log, stop))
        log.note("starting")
        meshes = await stack.enter_async_context(Meshes())
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        watch = tasks.create_task(meshes.watch())
        starting = tasks.create_task(
            spawn(
                config,
                placement,
                folder.path,
                meshes,
                stack,
                tasks,
                task=task,
                loss=loss,
                advantage=advantage,
                origin=origin,
            )
        )
        first: set[asyncio.Future[Any]] = {starting, stop}
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            raise Stopped(stop.result(), "before the first step")
        roles, start, end = starting.result()
        assert config.model is not None
        run = Run(config, log, roles, tasks, stop, Tokenizer.load(config.model), held_out=held_out(task), start=start)
        log.note("")
        yield run
        log.note("ending")
        if not stop.done():
            await roles.trainer.save.call(str(log.folder / MODEL))
        await run.finish()
        await end()
        watch.cancel()


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The checkpoint that a run goes on from."""

    path: Path
    version: int


def find_checkpoint(output: Path, config: RunConfig, task: Task) -> Origin:
    """The newest checkpoint of an earlier run; what was best after it is forgotten.

    Raises:
        ValueError: there is none, it is damaged, has all steps already, or is of other data.
    """
    checkpoints = Checkpoints(output / "checkpoints", config.save.keep)
    path = checkpoints.newest()
    if path is None:
        raise ValueError(f"{output} has no complete checkpoint to resume: start anew with --overwrite")
    remedy = f"remove {path} to go on from the checkpoint before it"
    for part in (TRAINER, BUFFER, MODEL):
        if not (path / part).is_dir():
            raise ValueError(f"{path} lacks its folder {part}: {remedy}")
    try:
        version = int(checkpoints.read(path)["step"])
        books = json.loads((path / BUFFER / BOOKS).read_text())
        rows, seed = books["rows"], books["seed"]
    except (KeyError, TypeError, OSError) as error:
        raise ValueError(f"{path} is damaged ({error!r}): {remedy}") from error
    if version >= config.steps:
        raise ValueError(f"{path} has all {config.steps} steps already: raise --steps to go on")
    if (rows, seed) != (task.rows, config.seed):
        raise ValueError(
            f"{path} is of a run over {rows} rows with seed {seed}, this one has {task.rows} rows and seed "
            f"{config.seed}: its tickets would name other rows"
        )
    checkpoints.rewind(version)
    return Origin(path=path, version=version)


@contextmanager
def held(output: Path) -> Iterator[None]:
    """Make the folder if it is not there, and let no other run use it meanwhile.

    Raises:
        OSError: it cannot be made, or another run holds it.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(output, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise OSError(f"cannot write {output}: {error.strerror}; choose another --output-dir") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OSError(f"another run is writing to {output}: end it or choose another --output-dir") from None
        yield
    finally:
        os.close(descriptor)


@contextmanager
def noted(log: RunLog, stop: asyncio.Future[signal.Signals]) -> Iterator[None]:
    """Leave a summary of a run that ends in the middle."""
    try:
        yield
    except BaseException as error:
        log.fail(cause(error), "stopped" if stop.done() else "failed")
        raise


@contextmanager
def signals() -> Iterator[asyncio.Future[signal.Signals]]:
    """Give the first of these signals as a future; the second one cancels the present task."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    stop: asyncio.Future[signal.Signals] = loop.create_future()

    def caught(number: signal.Signals) -> None:
        if stop.done():
            task.cancel()
        else:
            stop.set_result(number)

    for number in ENDING:
        loop.add_signal_handler(number, caught, number)
    try:
        yield stop
    finally:
        for number in ENDING:
            loop.remove_signal_handler(number)


async def spawn(
    config: RunConfig,
    placement: Placement,
    folder: str,
    meshes: Meshes,
    stack: AsyncExitStack,
    tasks: asyncio.TaskGroup,
    *,
    task: Task,
    loss: Objective,
    advantage: Advantage,
    origin: Origin | None,
) -> tuple[Roles, Start, Callable[[], Awaitable[None]]]:
    """Spawn and set up every role; generators and workers run from then on as `tasks`, until the last result is
    called."""
    assert config.model is not None
    model, version = (config.model, 0) if origin is None else (str(origin.path / MODEL), origin.version)
    transport = make_transport(config.sync.transport, folder)
    engine = config.generator.engine
    buffer = meshes.spawn(placement.buffer).spawn(
        "buffer",
        ReplayBuffer,
        config.buffer,
        config.steps,
        task.rows,
        config.epochs,
        config.seed,
        config.rollout.timeout,
        config.drawn,
        config.rollout.quarantine,
    )

    def generator(spot: Spot) -> tuple[Any, Any]:
        settings = config.generator
        if spot is placement.evaluator and isinstance(engine, NativeEngine):
            settings = replace(settings, engine=replace(engine, deterministic=False))
        procs = meshes.spawn(spot)
        arguments = (settings, model, config.drawn, spot.device)
        return procs, procs.spawn(spot.name, Generator, *arguments, label=spot.name, version=version)

    spots = [*placement.generators, *([placement.evaluator] if placement.evaluator else [])]
    replicas = [generator(spot) for spot in spots]
    leads = [actors.slice(ranks=0) for _, actors in replicas]
    serving = leads[: len(placement.generators)]
    play = Play(
        task=task,
        model=config.model,
        sampling=config.sampling,
        group_size=config.group_size,
        filter=config.filter,
        solved=config.eval.solved,
        seed=config.seed,
        folder=folder,
        fixed_routes=config.buffer.max_staleness == 0,
        timeout=config.rollout.timeout,
        context=context_of(config.generator),
        most=max(1, config.buffer.groups_per_step // config.rollout.workers),
    )
    workers = meshes.spawn(placement.workers).spawn("worker", RolloutWorker, play, buffer, serving)
    trainer_procs = meshes.spawn(placement.trainer)
    if config.trainer.ranks > 1:
        await setup_torch_elastic_env_async(trainer_procs)
    trainer = trainer_procs.spawn("trainer", Trainer, config.trainer, config.sync, folder, placement.trainer.device)
    setup = [actors.setup.call() for _, actors in replicas]
    state = None if origin is None else str(origin.path / TRAINER)
    # The files beside the weights come from the first folder: a checkpoint may be pruned before the run ends.
    setup.append(trainer.setup.call(config.model, loss, advantage, config.steps, version, state))
    await asyncio.gather(*setup)
    start = Start()
    if origin is not None:
        before: Restored = await buffer.restore.call_one(str(origin.path / BUFFER), folder)
        start = Start(version=version, trained=before.trained, begun=before.begun)
    sync = WeightSync(
        config.sync,
        transport,
        trainer_procs.spawn("publisher", WeightPublisher, folder, transport, config.sync.timeout),
        [
            Replica(receivers=procs.spawn(f"receiver{i}", WeightReceiver), generators=actors)
            for i, (procs, actors) in enumerate(replicas)
        ],
        tasks,
    )
    stack.push_async_callback(sync.close)
    await sync.setup()
    for (_, actors), lead in zip(replicas, leads, strict=True):
        followers = [actors.slice(ranks=rank) for rank in range(1, config.generator.tp)]
        tasks.create_task(wait(lead.run.call_one(followers)))
    if origin is not None and config.sync.dtype != "float32":
        # The generators have the checkpoint's weights, and should have them as they were sent.
        await sync.lease(version)
        await sync.publish(version)
    work = tasks.create_task(wait(workers.run.call()))

    async def end() -> None:
        work.cancel()
        await asyncio.gather(*(wait(actors.close.call()) for _, actors in replicas))
        await trainer.close.call()

    roles = Roles(
        buffer=buffer,
        workers=workers,
        generators=serving,
        evaluator=leads[-1] if placement.evaluator else None,
        trainer=trainer,
        writers=trainer_procs.spawn("writer", CheckpointWriter, folder),
        sync=sync,
    )
    return roles, start, end
