"""The processes of a run and what they own: generators, rollout workers, the replay buffer, the trainer.

Importing this package starts nothing and loads no model library.
"""

import os

# Monarch reads these when it is first imported. Its defaults notice a killed process after 8 to 30 s; so it is about
# one. The idle limits say how long a busy process may take to answer before it counts as dead.
os.environ.setdefault("HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY", "1s")
os.environ.setdefault("HYPERACTOR_MESH_GET_ACTOR_STATE_MAX_IDLE", "10s")
os.environ.setdefault("HYPERACTOR_MESH_GET_PROC_STATE_MAX_IDLE", "10s")

from actors.cli import command_line
from actors.config import RunConfig
from actors.environment import Environment, Outcome, SingleTurn, Task
from actors.launch import launch
from actors.rewards import Rewards
from actors.scorer import batched
from actors.types import Sampling

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
