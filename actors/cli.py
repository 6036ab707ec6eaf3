"""The command line of a recipe: settings from flags, errors as one line, an exit status that tells."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import signal
import sys
import traceback
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import tyro
from monarch.actor import ActorError

from actors.config import RunConfig
from actors.mesh import TRACEBACK, cause, first_of
from actors.metrics import print_summary
from actors.run import Stopped
from actors.settings import restore

C = TypeVar("C")


def command_line(
    config: type[C],
    train: Callable[[C], Coroutine[Any, Any, dict[str, Any]]],
    show: Callable[[dict[str, Any]], None] = print_summary,
    default: C | None = None,
) -> None:
    """Parse flags into `config`, or onto `default`, run `train` to its end and show what it returns.

    With `--resume`, what no flag says is as `config.json` of the output folder has it. Bad settings exit with 1 or 2
    and one line; a failed run with its cause in one line, then the traceback; a run that a signal ended with 128 + its
    number, after checkpoint and summary.
    """
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", force=True)
    program = Path(sys.argv[0]).stem
    try:
        default = earlier(config, sys.argv[1:]) or default
        known: dict[str, Any] = {} if default is None else {"default": default}  # to tyro, None is a default
        settings = tyro.cli(config, prog=typed(), config=(tyro.conf.CascadeSubcommandArgs,), **known)
        summary = asyncio.run(train(settings))
    except (ValueError, OSError) as error:
        sys.exit(f"{program}: {error}")
    except (KeyboardInterrupt, asyncio.CancelledError):
        print(f"{program}: ended at once by a second signal", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    except Exception as error:
        _, first = first_of(error)
        if isinstance(first, Stopped):
            print(f"{program}: {first}", file=sys.stderr)
            sys.exit(128 + first.signal)
        line = f"{program}: {cause(error)}"
        print(line, trace(error), line, sep="\n", file=sys.stderr)  # the traceback may scroll the first one away
        sys.exit(1)
    show(summary)
    if summary.get("status") == "stopped":
        sys.exit(128 + signal.Signals[summary["reason"].split()[0]])


def typed() -> str:
    """How this program was started, as a user would type it again."""
    spec = sys.modules["__main__"].__spec__
    return f"python {sys.argv[0]}" if spec is None else f"python -m {spec.name}"


def trace(error: BaseException) -> str:
    """The traceback of the first error of a group. One that crossed processes carries those of all of them."""
    _, first = first_of(error)
    if TRACEBACK in str(first):
        return str(first)
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) if isinstance(error, ActorError) else "".join(traceback.format_exception(error))


def earlier(config: type[C], arguments: Sequence[str]) -> C | None:
    """The settings of the run that `--resume` goes on with; None without that flag.

    Raises:
        ValueError: the folder holds no settings, or those of another recipe.
        OSError: they cannot be read.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--output-dir", "--output_dir", type=Path)
    known, _ = parser.parse_known_args(list(arguments))
    if not known.resume or known.output_dir is None:
        return None
    path = known.output_dir / "config.json"
    if not path.is_file():
        raise ValueError(f"no run to resume in {known.output_dir}: it has no config.json")
    try:
        before = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    settings = restore(config, before)
    assert isinstance(settings, RunConfig)
    return replace(settings, resume=True, overwrite=False)
