"""The command line of a recipe: settings from flags, errors as one line, an exit status that tells."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import tyro

from actors.config import RunConfig
from actors.mesh import cause, first_of
from actors.metrics import print_summary
from actors.run import Stopped
from actors.settings import restore

C = TypeVar("C")


def command_line(
    config: type[C],
    train: Callable[[C], Coroutine[Any, Any, dict[str, Any]]],
    show: Callable[[dict[str, Any]], None] = print_summary,
) -> None:
    """Parse flags into `config`, run `train` to its end and show what it returns.

    With `--resume`, what no flag says is as `config.json` of the output folder has it. Bad settings exit with 1 or 2
    and one line; a failed run with its cause in one line, then the traceback; a run that a signal ended with 128 + its
    number, after checkpoint and summary.
    """
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", force=True)
    program = Path(sys.argv[0]).stem
    try:
        default = earlier(config, sys.argv[1:])
        flags = (tyro.conf.CascadeSubcommandArgs,)
        # tyro tells no default from None.
        settings = (
            tyro.cli(config, config=flags) if default is None else tyro.cli(config, config=flags, default=default)
        )
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
        print(f"{program}: {cause(error)}", file=sys.stderr)
        raise
    show(summary)
    if summary.get("status") == "stopped":
        sys.exit(128 + signal.Signals[summary["reason"].split()[0]])


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
