"""The command line of a recipe: settings from flags, errors as one line, an exit status that tells."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import tyro
from monarch.actor import ActorError

from actors.config import RunConfig
from actors.run import Stopped

C = TypeVar("C", bound=RunConfig)


def command_line(config: type[C], train: Callable[[C], Coroutine[Any, Any, dict[str, Any]]]) -> None:
    """Parse flags into `config` and run `train` to its end.

    Bad settings exit with 1 or 2 and one line; a failed run with its cause in one line, then the traceback; a run that
    a signal ended with 128 + its number, after its checkpoint and summary.
    """
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", force=True)
    program = Path(sys.argv[0]).stem
    settings = tyro.cli(config, config=(tyro.conf.CascadeSubcommandArgs,))
    try:
        summary = asyncio.run(train(settings))
    except (ValueError, OSError) as error:
        sys.exit(f"{program}: {error}")
    except Stopped as stop:
        print(f"{program}: {stop}", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    except (KeyboardInterrupt, asyncio.CancelledError):
        print(f"{program}: ended by a signal before it began or while it ended", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    except Exception as error:
        print(f"{program}: {cause(error)}", file=sys.stderr)
        raise


def cause(error: BaseException) -> str:
    """One line on the first error of a group; of an actor's error the call and what was raised in it."""
    where = ""
    while isinstance(error, BaseExceptionGroup | ActorError):
        if isinstance(error, ActorError):
            where += f"{error.message.rstrip('.')}: "
            error = error.exception
        else:
            error = error.exceptions[0]
    return f"{where}{type(error).__name__}: {' '.join(str(error).split())[:400]}"
