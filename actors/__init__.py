"""The processes of a run and what they own: generators, rollout workers, the replay buffer, the trainer.

Importing this package starts nothing and loads no model library.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

# Monarch reads these when it is first imported. Its defaults notice a killed process after 8 to 30 s; so it is about
# one. The idle limits say how long a busy process may take to answer before it counts as dead.
os.environ.setdefault("HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY", "1s")
os.environ.setdefault("HYPERACTOR_MESH_GET_ACTOR_STATE_MAX_IDLE", "10s")
os.environ.setdefault("HYPERACTOR_MESH_GET_PROC_STATE_MAX_IDLE", "10s")

if TYPE_CHECKING:
    from actors.cli import command_line
    from actors.config import RunConfig
    from actors.environment import Environment, Outcome, SingleTurn, Task
    from actors.launcher import launch
    from actors.rewards import Rewards
    from actors.scorer import batched
    from actors.types import Sampling

_HOMES = {
    "command_line": "cli",
    "RunConfig": "config",
    "Environment": "environment",
    "Outcome": "environment",
    "SingleTurn": "environment",
    "Task": "environment",
    "launch": "launcher",
    "Rewards": "rewards",
    "batched": "scorer",
    "Sampling": "types",
}
"""Modules of what recipes import from here, loaded when first asked for: every process imports this package."""

__all__ = [
    "Environment",
    "Outcome",
    "Rewards",
    "RunConfig",
    "Sampling",
    "SingleTurn",
    "Task",
    "batched",
    "command_line",
    "launch",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'actors' has no attribute {name!r}")
    return vars(importlib.import_module(f"actors.{_HOMES[name]}"))[name]
