"""The controller's hold on its processes: spawn them by role, hear of a death, stop them all."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import platform
import signal
from functools import partial
from typing import Any

import monarch.actor
from monarch.actor import ActorError, this_host

from actors.placement import Spot

log = logging.getLogger(__name__)

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""mallopt's option numbers, from glibc's malloc.h."""
NAME_SECONDS = 3.0
"""How long a death waits for the report that names one of our actors; each mesh is asked once a second or so."""
TRACEBACK = "Traceback (most recent call last)"
"""Begins a traceback in an error's text."""
STOP_SECONDS = 20.0
"""Longest wait for one mesh to stop; eight processes need about eight seconds."""


def _bootstrap(environment: dict[str, str]) -> None:
    """Runs in each process before its actors, so before torch is imported."""
    os.environ.update(environment)
    # A terminal sends Ctrl-C to every process of the group; the controller alone decides how the run ends. This is not
    # the main thread, to which Python's own function is limited.
    ctypes.CDLL(None).signal(signal.SIGINT, ctypes.c_void_p(signal.SIG_IGN))
    if platform.libc_ver()[0] == "glibc":
        # Keep freed memory instead of giving it back: tensors of a step would fault their pages in anew each time,
        # which costs a tenth of a small model's training step.
        libc = ctypes.CDLL(None)
        for option, value in ((M_MMAP_THRESHOLD, 1 << 30), (M_TRIM_THRESHOLD, 2**31 - 1)):
            libc.mallopt(option, value)


class Meshes:
    """All process meshes of a run, as an async context: leaving it stops them, newest first.

    Monarch calls one module-level hook for a death that no actor handles; the default one does not wake an idle
    controller, but interrupts whatever its main thread does later. Here the hook ends `watch` with the cause. It stays
    in place after the context: Monarch may report a death late, and that must not end a program that went on.
    """

    async def __aenter__(self) -> Meshes:
        self._meshes: dict[str, Any] = {}
        self._stopping = False
        self._fault: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        monarch.actor.unhandled_fault_hook = partial(self._died, asyncio.get_running_loop())
        return self

    def _died(self, loop: asyncio.AbstractEventLoop, failure: Any) -> None:
        # Called on Monarch's thread, once per actor of the dead process.
        if self._stopping:
            log.debug("a process of a run that is over died: %s", failure)
        else:
            # Monarch's own actors in the process are reported too, under names that do not say which process it was.
            report: str = failure.report()
            ours = "monarch._src." not in report and not failure.mesh_name.startswith("logger-")
            loop.call_soon_threadsafe(loop.call_later, 0 if ours else NAME_SECONDS, self._record, report)

    def _record(self, failure: str) -> None:
        if not self._fault.done():
            self._fault.set_result(failure)

    async def watch(self) -> None:
        """Wait for ever; raises RuntimeError when a process of the run dies."""
        failure = await asyncio.shield(self._fault)
        raise RuntimeError(f"a process of the run died: {failure}")

    def spawn(self, spot: Spot) -> Any:
        """Start a mesh with dimension `ranks` and its own thread count and devices; returns at once.

        Raises:
            ValueError: the spot is on another host than this one.
        """
        if spot.hosts != (0,):
            raise ValueError(f"{spot.name} is placed on hosts {spot.hosts}: this launcher starts one host")
        environment = {"OMP_NUM_THREADS": str(spot.threads), "MKL_NUM_THREADS": str(spot.threads)}
        if spot.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(str(gpu) for gpu in spot.gpus)
        mesh = this_host().spawn_procs(
            per_host={"ranks": spot.ranks_per_host}, name=spot.name, bootstrap=partial(_bootstrap, environment)
        )
        self._meshes[spot.name] = mesh
        return mesh

    async def __aexit__(self, *_: object) -> None:
        self._stopping = True
        await asyncio.gather(*(self._stop(name, mesh) for name, mesh in reversed(self._meshes.items())))

    async def _stop(self, name: str, mesh: Any) -> None:
        try:
            await asyncio.wait_for(mesh.stop(), STOP_SECONDS)
        except TimeoutError:
            log.warning("the processes of %s did not stop within %.0f s", name, STOP_SECONDS)
        except RuntimeError as error:
            # A mesh that lost a process cannot stop cleanly; what is left of it ends with this process.
            log.debug("stopping %s: %s", name, error)


def cause(error: BaseException) -> str:
    """One line on the first error of a group: its text up to a traceback in it; of an actor's error also the call."""
    calls, error = first_of(error)
    text = str(error).partition(TRACEBACK)[0]
    return f"{calls}{type(error).__name__}: {' '.join(text.split())[:400]}"


def first_of(error: BaseException) -> tuple[str, BaseException]:
    """The first error of a group that is none itself, and the calls of actors that led to it."""
    calls = ""
    while isinstance(error, BaseExceptionGroup | ActorError):
        if isinstance(error, ActorError):
            calls += f"{error.message.rstrip('.')}: "
            error = error.exception
        else:
            error = error.exceptions[0]
    return calls, error
