"""The columns of a finished group, in a file of the run's shared-memory folder: messages carry the handle only."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from actors.types import Group, Kept, PayloadHandle, Rollout, Sampling, Turn


def write(group: Group, folder: str) -> PayloadHandle:
    """Store a group; `free` ends it. Raises OSError when the folder's mount is full."""
    path = os.path.join(folder, f"group-{group.ticket}-{group.attempt}.safetensors")
    rollouts = group.rollouts
    columns = {
        "tokens": np.concatenate([r.tokens for r in rollouts]),
        "mask": np.concatenate([r.mask for r in rollouts]),
        "logprobs": np.concatenate([r.logprobs for r in rollouts]),
        "versions": np.concatenate([r.versions for r in rollouts]),
    }
    if any(r.kept is not None for r in rollouts):
        kept = Kept.join([r.kept or Kept.all_of(len(r.tokens)) for r in rollouts])
        columns |= {"kept_ids": kept.ids, "kept_counts": kept.counts}
    samplings = list(dict.fromkeys(r.sampling for r in rollouts))
    rest = {
        "ticket": group.ticket,
        "attempt": group.attempt,
        "row": group.row,
        "samplings": [asdict(s) for s in samplings],
        "rollouts": [
            [
                len(r.tokens),
                [[t.start, t.end, t.kind, t.finish, t.reward] for t in r.turns],
                r.reward,
                samplings.index(r.sampling),
                r.policy,
                r.parts,
                r.kept is not None,
            ]
            for r in rollouts
        ],
    }
    save_file(columns, path, metadata={"group": json.dumps(rest)})
    return PayloadHandle(host=socket.gethostname(), path=path, nbytes=os.path.getsize(path))


def read(handle: PayloadHandle) -> Group:
    """The stored group, copied out.

    Raises:
        RuntimeError: the payload lies on another host.
        FileNotFoundError: it was freed.
    """
    if handle.host != socket.gethostname():
        raise RuntimeError(f"payload {handle.path} lies on host {handle.host}, this is {socket.gethostname()}")
    with safe_open(handle.path, framework="np") as file:
        rest = json.loads(file.metadata()["group"])
        columns = {name: file.get_tensor(name) for name in ("tokens", "mask", "logprobs", "versions")}
        lengths, said = [r[0] for r in rest["rollouts"]], [r[-1] for r in rest["rollouts"]]
        kept: list[Kept | None] = [None] * len(lengths)
        if any(said):
            sets = Kept(ids=file.get_tensor("kept_ids"), counts=file.get_tensor("kept_counts")).split(lengths)
            kept = [own if says else None for own, says in zip(sets, said, strict=True)]
    samplings = [Sampling(**{**s, "stop": tuple(s["stop"])}) for s in rest["samplings"]]
    rollouts, start = [], 0
    for (length, turns, reward, sampling, policy, parts, _), own in zip(rest["rollouts"], kept, strict=True):
        part = {name: column[start : start + length] for name, column in columns.items()}
        start += length
        rollouts.append(
            Rollout(
                **part,
                turns=tuple(
                    Turn(start=a, end=b, kind=kind, finish=finish, reward=gain) for a, b, kind, finish, gain in turns
                ),
                reward=reward,
                sampling=samplings[sampling],
                policy=policy,
                parts=parts,
                kept=own,
            )
        )
    return Group(ticket=rest["ticket"], attempt=rest["attempt"], row=rest["row"], rollouts=tuple(rollouts))


def free(handle: PayloadHandle) -> None:
    """Give the memory back. Freeing twice is harmless: a ticket may end while its group is being replaced."""
    try:
        os.unlink(handle.path)
    except FileNotFoundError:
        return
