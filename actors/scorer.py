"""Inside a scorer process: load reward functions once, then call one at a time; answers are plain numbers or text."""

from __future__ import annotations

import asyncio
import ctypes
import functools
import importlib.util
import inspect
import math
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, SupportsFloat

PR_SET_PDEATHSIG = 1
"""prctl's option number, from Linux's sys/prctl.h."""
LONGEST = 20_000
"""Characters of an error's text; of a longer one the middle is left out."""


@dataclass(frozen=True, kw_only=True)
class FromFile:
    """A function in a Python file, which only scorers run."""

    path: str
    """The file; what lies beside it can be imported in it."""
    function: str
    """A top-level name in it."""

    @classmethod
    def parse(cls, text: str) -> FromFile:
        """From `file.py:function`.

        Raises:
            ValueError: it is not of that form.
        """
        path, _, function = text.rpartition(":")
        if not path.endswith(".py") or not function.isidentifier():
            raise ValueError(f"{text!r} names no reward function: write file.py:function")
        return cls(path=str(Path(path).absolute()), function=function)

    def load(self) -> Callable[..., Any] | batched:
        """Run the file and return the function.

        Raises:
            ValueError: the file or the function is missing.
            Exception: whatever the file raises.
        """
        path = Path(self.path)
        spec = importlib.util.spec_from_file_location(f"reward_{path.stem}", path)
        if not path.is_file() or spec is None or spec.loader is None:
            raise ValueError(f"there is no file {self.path}")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        sys.path.append(str(path.parent))
        spec.loader.exec_module(module)
        function = vars(module).get(self.function)
        if not callable(function) and not isinstance(function, batched):
            raise ValueError(f"{self.path} has no function {self.function!r}")
        loaded: Callable[..., Any] | batched = function
        return loaded


@dataclass(frozen=True)
class batched:
    """Adapts TRL's reward functions, `f(prompts, completions, **columns) -> list[float | None]`, sync or async.

    `f` gets lists of one. With a prompt of chat messages its completion is `[{"role": "assistant", "content": text}]`,
    as in TRL. None says that the function does not apply to this row: it adds nothing to the reward and is left out of
    the function's own mean. What TRL's trainer knows beyond text and columns (`completion_ids`, `trainer_state`,
    `log_metric`) is not there.
    """

    function: Callable[..., Any]

    def lists(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of one call as lists of one."""
        prompt, completion = arguments["prompt"], arguments["completion"]
        if not isinstance(prompt, str):
            completion = [{"role": "assistant", "content": completion}]
        rest = {name: [value] for name, value in arguments.items() if name not in ("prompt", "completion")}
        return {**rest, "prompts": [prompt], "completions": [completion]}


Function = Callable[..., Any] | FromFile | batched


def name_of(function: Function) -> str:
    """What a function is called in metrics and errors; one called `reward` goes by its file's name."""
    if isinstance(function, batched):
        return name_of(function.function)
    if isinstance(function, FromFile):
        name, home = function.function, Path(function.path).stem
    else:
        named = function if inspect.isroutine(function) else type(function)
        name, home = named.__name__, named.__module__.rpartition(".")[2]
    return home if name == "reward" else name


class _Loaded:
    """A function and the names that it takes."""

    def __init__(self, function: Function) -> None:
        function = function.load() if isinstance(function, FromFile) else function
        self.lists = function.lists if isinstance(function, batched) else None
        self.function = function.function if isinstance(function, batched) else function
        parameters = inspect.signature(self.function).parameters.values()
        if positional := [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]:
            raise ValueError(f"its parameter {positional[0]!r} is positional only, but arguments go by keyword")
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self.takes = {p.name for p in named}
        self.needs = {p.name for p in named if p.default is p.empty}
        self.takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)

    def missing(self, names: Set[str]) -> str | None:
        """Why it cannot be called with arguments of these names."""
        absent = sorted(self.needs - names)
        if plural := [name for name in absent if name in ("prompts", "completions") and not self.lists]:
            return f"it takes {plural[0]!r}, lists as TRL's functions do: wrap it, f = actors.batched(f)"
        if absent:
            return f"it takes {absent[0]!r}, which is not there: there are {', '.join(sorted(names))}"
        return None

    def __call__(self, arguments: dict[str, Any]) -> Any:
        if not self.takes_all:
            arguments = {name: value for name, value in arguments.items() if name in self.takes}
        value = self.function(**arguments)
        return _runner().run(_wait(value)) if inspect.isawaitable(value) else value


_loaded: list[_Loaded | str] = []
"""This scorer's functions; a text says why one cannot be used."""


def begin(functions: bytes, count: int, parent: int) -> None:
    """Prepare this process: die with the parent, even while code holds the interpreter, and load the functions.

    Args:
        functions: the pickle of a tuple of `Function`, made by the parent.
        count: its length.
        parent: the parent's process id.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # it died before the call above
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # pebble's handler waits for code that holds the interpreter
    try:
        given: tuple[Function, ...] = pickle.loads(functions)
    except BaseException as error:
        _loaded.extend([f"not loaded: {_line(error)}"] * count)
        return
    for function in given:
        try:
            _loaded.append(_Loaded(function))
        except BaseException as error:
            _loaded.append(_line(error, function.path if isinstance(function, FromFile) else None))


def problems(columns: tuple[str, ...] | None) -> list[str | None]:
    """Why each function cannot be used on rows of these columns (None: not known), or None."""
    found: list[str | None] = []
    for loaded in _loaded:
        if isinstance(loaded, str) or columns is None:
            found.append(loaded if isinstance(loaded, str) else None)
        else:
            arguments = dict.fromkeys([*columns, "prompt", "completion", "finish"], "")
            found.append(loaded.missing((loaded.lists(arguments) if loaded.lists else arguments).keys()))
    return found


def score(index: int, row: bytes) -> dict[str, float] | str:
    """Call function `index`; its numbers by name, empty if it does not apply, or a text that says why there are none.

    Nothing is raised, not even KeyboardInterrupt: the classes of exceptions may be unknown outside.

    Args:
        index: in the functions that `begin` loaded.
        row: the pickle of a call's arguments by name.
    """
    loaded = _loaded[index]
    if isinstance(loaded, str):
        return loaded
    try:
        arguments = pickle.loads(row)
    except BaseException as error:
        return f"the row cannot be read in a scorer: {_line(error)}"
    if loaded.lists:
        arguments = loaded.lists(arguments)
    if why := loaded.missing(arguments.keys()):
        return why
    try:
        value = loaded(arguments)
    except BaseException as error:
        return _cut(f"{_line(error)}\n{_trace(error)}")
    try:
        return _cut(_only(value) if loaded.lists else _numbers(value))
    except BaseException as error:
        return _cut(f"what it returned, a {type(value).__name__}, cannot be read: {_line(error)}\n{_trace(error)}")


def _only(values: Any) -> dict[str, float] | str:
    """The numbers of a list of one."""
    if not isinstance(values, list | tuple) or len(values) != 1:
        return f"it returned {_shown(values)}: a list with one reward was expected"
    return {} if values[0] is None else _numbers(values[0])


def _numbers(value: Any) -> dict[str, float] | str:
    """A function's value as numbers by name, or what is wrong with it."""
    given = value if isinstance(value, Mapping) else {"reward": value}
    if "reward" not in given:
        return f"it returned a mapping without 'reward': it has {', '.join(sorted(map(str, given)))}"
    parts = {}
    for key, number in given.items():
        name = "".join([str(key)])  # str gives back subclasses, which may be unknown outside
        if not isinstance(number, SupportsFloat):
            return f"its {name} is {_shown(number)}, a {type(number).__name__}: a number was expected"
        try:
            parts[name] = float(number)
        except Exception as error:
            return f"its {name} is {_shown(number)}, a {type(number).__name__}, which is no number: {_line(error)}"
        if not math.isfinite(parts[name]):
            return f"its {name} is {parts[name]}: it must be finite"
    return parts


def _shown(value: Any) -> str:
    """The beginning of an object's repr, which may fail: it is the user's code."""
    try:
        return f"{value!r:.80}"
    except Exception:
        return "an object without repr"


def _cut(answer: Any) -> Any:
    """A text without its middle if it is too long, anything else as it is."""
    if not isinstance(answer, str) or len(answer) <= LONGEST:
        return answer
    half = LONGEST // 2
    return f"{answer[:half]}\n[... {len(answer) - 2 * half} characters ...]\n{answer[-half:]}"


def _line(error: BaseException, file: str | None = None) -> str:
    """One line on an error, with the last line of `file` that took part in it."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
    where = f"{file}:{frames[-1].lineno}: " if frames else ""
    try:
        text = " ".join(str(error).split())[:400]
    except Exception:
        text = "an exception without str"
    return f"{where}{type(error).__name__}: {text}"


def _trace(error: BaseException) -> str:
    """The traceback from the function's own first frame on."""
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename == __file__:
        frame = frame.tb_next
    return "".join(traceback.format_exception(type(error), error, frame)).rstrip()


@functools.cache
def _runner() -> asyncio.Runner:
    return asyncio.Runner()


async def _wait(value: Any) -> Any:
    return await value
