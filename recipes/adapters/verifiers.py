"""Tasksets of verifiers (0.4) as tasks: their prompts, and their rewards, metrics and judges over a trace.

verifiers drives more than one turn by a program that asks an HTTP endpoint, with tools in servers of their own: no
loop outside can take those turns. So an episode is one turn here, and tasks that need more are refused.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from actors.environment import Environment, Outcome, Prompt, Row
from actors.types import Finish, require

if TYPE_CHECKING:
    import verifiers.v1 as vf

Option = int | float | bool | str


@dataclass(frozen=True, kw_only=True)
class Verifiers:
    """A taskset of verifiers by its name: a module that can be imported and exports one. Its system prompt and prompt
    become chat messages.

    Raises:
        ValueError: verifiers or the taskset is not installed, or its tasks need more than one answer to judge.
    """

    name: str
    """Taskset: an installed module, or one on PYTHONPATH."""
    options: dict[str, Option] = field(default_factory=dict)
    """The taskset's own settings, as `difficulty 2`."""
    held_out: int = 0
    """First rows, kept from training for evaluation."""

    def __post_init__(self) -> None:
        require("task", 0, held_out=self.held_out)
        tasks = self._tasks()
        _check(self.name, tasks.taskset, tasks[0])
        if self.rows is not None and self.rows < 1:
            raise ValueError(f"--task.held-out {self.held_out} leaves no row of {self.name} to train on")

    @property
    def rows(self) -> int | None:
        """Tasks to train on; None is endless."""
        count = self._tasks().count()
        return None if count is None else count - self.held_out

    @property
    def held_out_rows(self) -> int:
        """Tasks for evaluation."""
        return self.held_out

    def row(self, i: int) -> Row:
        """Row i: the prompt as chat messages, and where the task stands in its set."""
        return self._row(self.held_out + i)

    def held_out_row(self, i: int) -> Row:
        """Held-out row i."""
        return self._row(i)

    def environment(self) -> Environment:
        """An episode of one answer."""
        return OneTurn(self._tasks())

    def _row(self, i: int) -> Row:
        return {"prompt": _messages(self._tasks()[i]), "index": i}

    def _tasks(self) -> Tasks:
        return _open(self.name, tuple(sorted(self.options.items())))


class Tasks:
    """The tasks of a set, read as far as they were asked for."""

    def __init__(self, taskset: vf.Taskset) -> None:
        self.taskset = taskset
        self._read: list[vf.Task] = []
        self._rest: Iterator[vf.Task] = iter(taskset)

    def __getitem__(self, i: int) -> vf.Task:
        self._read += itertools.islice(self._rest, max(0, i + 1 - len(self._read)))
        return self._read[i]

    def count(self) -> int | None:
        """All tasks; None is endless."""
        if not self.taskset.bounded:
            return None
        self._read += self._rest
        return len(self._read)


class OneTurn:
    """Judges one answer as verifiers does: a trace of the conversation, scored by its task."""

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks

    async def reset(self, row: Row) -> Prompt:
        self._task = self._tasks[row["index"]]
        prompt: Prompt = row["prompt"]
        return prompt

    async def step(self, action: str, finish: Finish) -> Outcome:
        trace = _trace(self._task, action, finish)
        await self._task.score(trace)
        rewards = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
        metrics = {name: value for name, value in trace.metrics.items() if value is not None}
        return Outcome(reward=trace.reward, parts={**metrics, **rewards})

    async def close(self) -> None:
        return


@functools.cache
def _open(name: str, options: tuple[tuple[str, Option], ...]) -> Tasks:
    try:
        import verifiers.v1 as vf
    except ImportError as error:
        raise ValueError("verifiers is not installed: pip install -e '.[tasks]'") from error
    try:
        config = vf.taskset_config_type(name).model_validate({"id": name, **dict(options)})
        return Tasks(vf.load_taskset(config))
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"verifiers refuses --task.name {name}: {' '.join(str(error).split())}") from error


def _check(name: str, taskset: vf.Taskset, task: vf.Task) -> None:
    """Refuse tasks that one answer does not settle."""
    import verifiers.v1 as vf

    kind = type(task)
    needs = [
        *(["a container"] if kind.NEEDS_CONTAINER else []),
        *(["tools"] if kind.toolsets(task.config) or taskset.toolsets(taskset.config) else []),
        *(["its setup"] if kind.setup is not vf.Task.setup else []),
        *(["its finalize"] if kind.finalize is not vf.Task.finalize else []),
        *(["a user who begins"] if task.data.prompt is None else []),
        *(f"a runtime for {f.__name__}" for f in (*task.hooks("reward"), *task.hooks("metric")) if _asks_runtime(f)),
    ]
    if needs:
        raise ValueError(f"{name}: a task of verifiers is played in one turn here, and this one needs {needs[0]}")


def _asks_runtime(function: Any) -> bool:
    parameter = inspect.signature(function).parameters.get("runtime")
    return parameter is not None and parameter.default is inspect.Parameter.empty


def _messages(task: vf.Task) -> list[dict[str, str]]:
    from verifiers.v1.types import content_text

    system, prompt = task.data.system_prompt, task.data.prompt
    messages = [] if system is None else [{"role": "system", "content": system}]
    if isinstance(prompt, str):
        return [*messages, {"role": "user", "content": prompt}]
    return messages + [{"role": m.role, "content": content_text(m.content or "")} for m in prompt or []]


def _trace(task: vf.Task, answer: str, finish: Finish) -> vf.Trace:
    """The conversation of one answer, as verifiers keeps it."""
    import verifiers.v1 as vf
    from pydantic import TypeAdapter
    from verifiers.v1.state import state_cls

    asked = [TypeAdapter(vf.Message).validate_python(message) for message in _messages(task)]
    said = [*asked, vf.AssistantMessage(content=answer)]
    nodes = [
        vf.MessageNode(parent=i - 1 if i else None, message=message, sampled=i == len(asked))
        for i, message in enumerate(said)
    ]
    return vf.Trace(
        task=vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
        agent=vf.AgentInfo(config=vf.AgentConfig(runtime=vf.SubprocessConfig())),
        state=state_cls(type(task))(),
        nodes=nodes,
        calls=[vf.ModelCall(node=len(asked), finish_reason="stop" if finish == "stop" else "length")],
        is_completed=True,
    )
