"""Trackers: a run's numbers at wandb, TensorBoard and trackio, each through its own library."""

from __future__ import annotations

import contextlib
import contextvars
import io
import json
import logging
import queue
import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from actors.config import LogConfig

log = logging.getLogger(__name__)

WAITING = 1000
"""Most records that wait for a slow tracker; more are lost and counted."""
CLOSE_SECONDS = 30.0
"""Longest wait for a tracker at the end of a run."""


class Tracker(Protocol):
    """One library. Its methods run in a thread of its own and may raise anything."""

    link: str

    def step(self, row: Mapping[str, float]) -> None: ...

    def rollouts(self, records: Sequence[Mapping[str, Any]]) -> None: ...

    def finish(self, summary: Mapping[str, Any]) -> None: ...


class Wandb:
    """A wandb run; offline with `WANDB_MODE=offline`. The x axis is the metric `step`, not wandb's count of calls, so
    that evaluations may come late and a resumed run may repeat steps, which then stand there twice."""

    def __init__(
        self, folder: Path, project: str, id: str, config: Mapping[str, Any], resume_step: int | None
    ) -> None:
        import wandb

        self._wandb = wandb
        self._run = wandb.init(
            project=project,
            id=id,
            name=folder.resolve().name,
            dir=str(folder),
            config=dict(config),
            # Offline there is nothing to resume: the id joins the parts when they are uploaded.
            resume=None if wandb.setup().settings.mode == "offline" else "allow",
            # The terminal is ours; a run's text is in its files.
            settings=wandb.Settings(console="off", silent=True),
        )
        self._run.define_metric("*", step_metric="step")
        self.link = f"wandb sync {Path(self._run.dir).parent}" if self._run.offline else f"wandb {self._run.url}"

    def step(self, row: Mapping[str, float]) -> None:
        self._run.log(dict(row))

    def rollouts(self, records: Sequence[Mapping[str, Any]]) -> None:
        data = [[r["step"], r["ticket"], r["rank"], r["reward"], "".join(r["pieces"])] for r in records]
        table = self._wandb.Table(columns=["step", "ticket", "rank", "reward", "text"], data=data)
        self._run.log({"rollouts": table, "step": records[0]["step"]})

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._run.summary.update({f"summary/{name}": value for name, value in summary.items()})
        self._run.finish(exit_code=1 if summary.get("status") == "failed" else 0)


class TensorBoard:
    """Event files in `tensorboard/`, by TensorBoard's own writer: torch's would load torch. A resumed run tells
    TensorBoard to forget the steps that it repeats."""

    def __init__(
        self, folder: Path, project: str, id: str, config: Mapping[str, Any], resume_step: int | None
    ) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.plugins.text.metadata import create_summary_metadata
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
        from tensorboard.util.tensor_util import make_tensor_proto

        self._event, self._value, self._summary = event_pb2.Event, summary_pb2.Summary.Value, summary_pb2.Summary
        self._tensor, self._text = make_tensor_proto, create_summary_metadata("", "")
        self._writer = EventFileWriter(str(folder / "tensorboard"), flush_secs=5)
        if resume_step is not None:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._writer.add_event(self._event(wall_time=time.time(), step=resume_step, session_log=start))
        self._add(resume_step or 0, [self._note("config", f"```json\n{json.dumps(config, indent=2)}\n```")])
        self.link = f"tensorboard --logdir {folder / 'tensorboard'}"

    def _add(self, step: int, values: list[Any]) -> None:
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))

    def _note(self, tag: str, markdown: str) -> Any:
        return self._value(tag=tag, metadata=self._text, tensor=self._tensor([markdown.encode()]))

    def step(self, row: Mapping[str, float]) -> None:
        values = [self._value(tag=name, simple_value=value) for name, value in row.items() if name != "step"]
        self._add(int(row["step"]), values)

    def rollouts(self, records: Sequence[Mapping[str, Any]]) -> None:
        for record in records:
            # Indented text is code in Markdown: nothing that a model wrote is markup.
            body = "".join(f"\n    {line}" for line in "".join(record["pieces"]).splitlines())
            head = f"ticket {record['ticket']}, reward {record['reward']:.3f}\n"
            self._add(record["step"], [self._note(f"rollouts/{record['rank']}", head + body)])

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._writer.close()


class Trackio:
    """A run in trackio's local database, or where `TRACKIO_SPACE_ID` says. A resumed run repeats steps."""

    def __init__(
        self, folder: Path, project: str, id: str, config: Mapping[str, Any], resume_step: int | None
    ) -> None:
        import trackio

        self._trackio = trackio
        init = partial(trackio.init, project, name=id, config=dict(config), resume="allow", embed=False)
        # In a context of its own, as trackio otherwise ends the run once more at exit; its hints are those of `link`.
        with contextlib.redirect_stdout(io.StringIO()):
            self._run = contextvars.copy_context().run(init)
        self.link = f"trackio show --project {project}"

    def step(self, row: Mapping[str, float]) -> None:
        metrics = {name: value for name, value in row.items() if name != "step"}
        self._run.log(metrics, step=int(row["step"]))

    def rollouts(self, records: Sequence[Mapping[str, Any]]) -> None:
        data = [[r["ticket"], r["rank"], r["reward"], "".join(r["pieces"])] for r in records]
        table = self._trackio.Table(columns=["ticket", "rank", "reward", "text"], data=data)
        self._run.log({"rollouts": table}, step=records[0]["step"])

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._run.finish()


KINDS: dict[str, Callable[..., Tracker]] = {"wandb": Wandb, "tensorboard": TensorBoard, "trackio": Trackio}


class Courier:
    """A tracker's thread. What the tracker raises is counted, its first error is a warning, and training goes on."""

    def __init__(self, name: str, tracker: Tracker) -> None:
        self.tracker, self.errors, self._name = tracker, 0, name
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue(WAITING)
        self._thread = threading.Thread(target=self._run, name=f"{name} tracker", daemon=True)
        self._thread.start()

    def send(self, call: Callable[[], None]) -> None:
        """Hand over a call; never waits."""
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._failed(f"{WAITING} records wait for it")

    def close(self, summary: Mapping[str, Any]) -> None:
        """Finish after the calls before; waits for them, but not for ever."""
        end = time.monotonic() + CLOSE_SECONDS
        with contextlib.suppress(queue.Full):  # then the thread is alive below
            for call in (partial(self.tracker.finish, summary), None):
                self._calls.put(call, timeout=max(0.0, end - time.monotonic()))
        self._thread.join(max(0.0, end - time.monotonic()))
        if self._thread.is_alive():
            log.warning("%s did not finish in %.0f s: its last records may be missing", self._name, CLOSE_SECONDS)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except Exception as error:  # whatever a tracker raises must not end the training
                self._failed(f"{type(error).__name__}: {error}")

    def _failed(self, reason: str) -> None:
        self.errors += 1
        if self.errors == 1:
            log.warning("%s fails, the run goes on without: %s", self._name, reason)


class Trackers:
    """The trackers of a run, as a context. Entering starts them, and a resumed run goes on with the same ones: their
    id is in `trackers.json`. Later their errors are counted and do not end the run."""

    def __init__(self, folder: Path, log: LogConfig, config: Mapping[str, Any], resume_step: int | None) -> None:
        """Check that the libraries are there.

        Raises:
            ValueError: one is not; says how to install it.
        """
        for name in log.to:
            try:
                version(name)
            except PackageNotFoundError:
                raise ValueError(f"--log.to {name}: {name} is not installed: pip install -e '.[log]'") from None
        self._folder, self._log, self._config, self._resume_step = folder, log, config, resume_step
        self._couriers: list[Courier] = []
        self._summary: Mapping[str, Any] = {"status": "failed"}

    def __enter__(self) -> Trackers:
        """Start them, one after another.

        Raises:
            ValueError: one cannot start, as without login or network.
        """
        for name in self._log.to:
            try:
                tracker = KINDS[name](self._folder, self._log.project, self._id(), self._config, self._resume_step)
            except Exception as error:  # a library's own errors become one line, as before a run all are the user's
                self.__exit__(type(error), error, error.__traceback__)
                raise ValueError(f"--log.to {name} does not start: {' '.join(str(error).split())}") from error
            self._couriers.append(Courier(name, tracker))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Send the rest and end them."""
        for courier in self._couriers:
            courier.close(self._summary)

    @property
    def links(self) -> list[str]:
        """Where to look, one line each."""
        return [courier.tracker.link for courier in self._couriers]

    @property
    def errors(self) -> int:
        """Records that were lost so far."""
        return sum(courier.errors for courier in self._couriers)

    def step(self, row: Mapping[str, float]) -> None:
        """Numbers of one step, which `row` names."""
        for courier in self._couriers:
            courier.send(partial(courier.tracker.step, row))

    def rollouts(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Sample rollouts of one step, at least one."""
        for courier in self._couriers:
            courier.send(partial(courier.tracker.rollouts, records))

    def summary(self, summary: Mapping[str, Any]) -> None:
        """What the run ends with."""
        self._summary = summary

    def _id(self) -> str:
        """Names the run at the trackers for good."""
        path = self._folder / "trackers.json"
        if not path.exists():
            name = re.sub(r"[^A-Za-z0-9_.-]", "-", self._folder.resolve().name)
            path.write_text(json.dumps({"id": f"{name}-{secrets.token_hex(4)}"}) + "\n")
        id: str = json.loads(path.read_text())["id"]
        return id
