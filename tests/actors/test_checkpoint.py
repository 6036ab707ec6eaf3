"""A checkpoint is complete or invisible: at any kill, with a full disk, and while others are pruned."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from monarch.actor import this_host

from actors import payload
from actors.buffer import BOOKS, ReplayBuffer, Restored, _load, _pin, _save
from actors.checkpoint import Best, Checkpoints, plain, restored
from actors.config import BufferConfig
from actors.episode import meta_of
from actors.ledger import Ledger
from actors.types import Group, GroupMeta, Lease, Taken
from tests.actors.training_data import rollout


def save(checkpoints: Checkpoints, step: int) -> Path:
    folder = checkpoints.begin(step)
    (folder / "part").mkdir()
    (folder / "part" / "data").write_bytes(bytes([step % 256]) * 5000)
    return checkpoints.commit(step, {"value": step / 2})


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_checkpoint_appears_when_it_is_committed(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    assert checkpoints.newest() is None
    hidden = checkpoints.begin(10)
    (hidden / "weights").write_text("w")
    assert checkpoints.newest() is None
    done = checkpoints.commit(10, {"tickets": [1, 2]})
    assert checkpoints.newest() == done == tmp_path / "checkpoints" / "step-000010"
    assert Checkpoints.read(done) == {"tickets": [1, 2], "step": 10} and (done / "weights").read_text() == "w"
    assert names(tmp_path / "checkpoints") == ["step-000010"]
    with pytest.raises(FileExistsError, match="step-000010 exists"):
        checkpoints.begin(10)


def test_what_a_dead_run_left_is_removed(tmp_path: Path) -> None:
    save(Checkpoints(tmp_path, keep=2), 1)
    (Checkpoints(tmp_path, keep=2).begin(2) / "half").write_text("")
    again = Checkpoints(tmp_path, keep=2)
    assert again.newest() == tmp_path / "step-000001"
    assert names(again.begin(3)) == []
    assert names(tmp_path) == [".step-000003", "step-000001"]


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.best() is None
    for step in range(1, 4):
        save(checkpoints, step)
    checkpoints.mark_best(2, 0.5)
    for step in range(4, 8):
        save(checkpoints, step)
    assert checkpoints.steps() == [2, 6, 7]
    checkpoints.mark_best(9, 0.75)  # before it is there
    for step in range(8, 12):
        save(checkpoints, step)
    assert checkpoints.steps() == [9, 10, 11] and Checkpoints(tmp_path, keep=1).best() == Best(9, 0.75)
    save(checkpoints, 1_000_000)
    assert checkpoints.newest() == tmp_path / "step-1000000"


def test_a_best_that_never_came_is_forgotten_on_a_resume(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.rewind(0)
    save(checkpoints, 5)
    checkpoints.mark_best(5, 0.5)
    checkpoints.rewind(5)
    assert checkpoints.best() == Best(5, 0.5)
    checkpoints.mark_best(6, 0.75)
    checkpoints.rewind(5)
    assert checkpoints.best() is None


def test_folders_that_are_no_checkpoints_are_left_alone(tmp_path: Path) -> None:
    for name in ("step-000099", "step-abc", "model"):
        (tmp_path / name).mkdir()
    checkpoints = Checkpoints(tmp_path, keep=1)
    for step in (1, 2):
        save(checkpoints, step)
    assert checkpoints.newest() == tmp_path / "step-000002"
    assert names(tmp_path) == ["model", "step-000002", "step-000099", "step-abc"]


@pytest.mark.parametrize("text", ["", '{"step": 1', "[1]", "\x00\xff"])
def test_a_damaged_state_is_named_in_one_line(tmp_path: Path, text: str) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    path = save(checkpoints, 1)
    (path / "run.json").write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=r"step-000001/run.json .*remove .*step-000001 to go on") as caught:
        Checkpoints.read(path)
    assert "\n" not in str(caught.value)


def test_arrays_survive_json_exactly() -> None:
    value = {
        "rewards": np.array([0.1, np.nan, -np.inf, 1e-45], np.float32),
        "truncated": np.array([True, False]),
        "parts": {"format": np.zeros(0, np.int32)},
        "ticket": 3,
    }
    back = restored(json.loads(json.dumps(plain(value))))
    np.testing.assert_array_equal(back["rewards"].view(np.int32), value["rewards"].view(np.int32))
    assert back["rewards"].dtype == np.float32 and back["ticket"] == 3
    assert back["truncated"].tolist() == [True, False] and back["truncated"].dtype == bool
    assert back["parts"]["format"].dtype == np.int32 and back["parts"]["format"].shape == (0,)


# Kills and full disks

SAVER = """
import sys
from pathlib import Path
from actors.checkpoint import Checkpoints

checkpoints, step = Checkpoints(Path(sys.argv[1]), keep=2), int(sys.argv[2])
while True:
    step += 1
    folder = checkpoints.begin(step)
    for part in range(4):
        (folder / str(part)).mkdir()
        (folder / str(part) / "data").write_bytes(step.to_bytes(8, "little") * 20_000)
    checkpoints.commit(step, {"value": step})
    if step % 3 == 0:
        checkpoints.mark_best(step, step)
    print(step, flush=True)
"""


@pytest.mark.slow
def test_a_kill_at_any_moment_leaves_one_of_the_last_two(tmp_path: Path) -> None:
    folder, rng, begun = tmp_path / "checkpoints", random.Random(0), 0
    for _ in range(6):
        with subprocess.Popen(
            [sys.executable, "-c", SAVER, str(folder), str(begun)], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            told = begun
            for _ in range(rng.randrange(1, 4)):
                told = int(process.stdout.readline())
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(rng.random() * 0.05)  # the moment is what varies
            process.kill()
            rest = process.stdout.read().split()
            told = int(rest[-1]) if rest else told
        checkpoints = Checkpoints(folder, keep=2)
        newest = checkpoints.newest()
        assert newest is not None
        step = Checkpoints.read(newest)["value"]
        assert newest.name == f"step-{step:06d}" and step in (told, told + 1)
        best = checkpoints.best()
        for number in checkpoints.steps():
            for part in range(4):
                data = (folder / f"step-{number:06d}" / str(part) / "data").read_bytes()
                assert data == number.to_bytes(8, "little") * 20_000
        # One more may stay for a moment, as the oldest is removed after the newest has come.
        assert len(checkpoints.steps()) <= 4 and (step < 6 or (best is not None and best.step in checkpoints.steps()))
        begun = step


def test_a_full_disk_leaves_the_checkpoint_before_and_no_files(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    save(checkpoints, 1)
    checkpoints.begin(2)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(OSError, match=f"checkpoint of step 2 in {tmp_path}: File too large"):
            checkpoints.commit(2, {"value": "x" * 100_000})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path) == ["step-000001"]
    assert Checkpoints.read(tmp_path / "step-000001") == {"value": 0.5, "step": 1}


def test_names_and_bytes_are_on_the_disk_before_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything in the folder is flushed, then renamed, then the name is flushed."""
    events: list[str] = []
    real_sync, real_rename = os.fsync, os.rename

    def fsync(descriptor: int) -> None:
        events.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        real_sync(descriptor)

    def rename(old: Any, new: Any) -> None:
        events.append(f"{old} -> {new}")
        real_rename(old, new)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    save(Checkpoints(tmp_path, keep=1), 1)
    hidden = f"{tmp_path}/.step-000001"
    assert sorted(events[:-2]) == [hidden, f"{hidden}/part", f"{hidden}/part/data", f"{hidden}/run.json"]
    assert events.index(f"{hidden}/part/data") < events.index(f"{hidden}/part") < events.index(hidden)
    assert events[-2:] == [f"{hidden} -> {tmp_path}/step-000001", str(tmp_path)]


# The buffer's actor


def finished(lease: Lease, folder: Path) -> GroupMeta:
    rng = np.random.default_rng(lease.ticket)
    group = Group(
        ticket=lease.ticket,
        attempt=lease.attempt,
        row=lease.row,
        rollouts=tuple(rollout(rng, 9, 3, lease.version) for _ in range(2)),
    )
    return meta_of(group, payload.write(group, str(folder)), quarantined=0, scored=group.rollouts)


@pytest.mark.slow
def test_the_buffer_goes_on_in_another_run_with_its_payloads(tmp_path: Path) -> None:
    config = BufferConfig(groups_per_step=1, max_staleness=3)
    old, new, saved = tmp_path / "old", tmp_path / "new", tmp_path / "buffer"
    old.mkdir()
    new.mkdir()

    async def run() -> tuple[Taken, Taken, Restored, dict[str, int]]:
        procs = this_host().spawn_procs(per_host={"ranks": 1})
        try:
            buffer = procs.spawn("buffer", ReplayBuffer, config, 10, 50)
            leases = (await buffer.lease.call_one(0, 4)).leases
            for lease in leases[:3]:
                await buffer.put.call_one(finished(lease, old))
            await buffer.ready.call_one(0)
            early = await buffer.ready.call_one(1)
            # The checkpoint of version 1 is asked for first; its payload must outlive the announcement of version 2.
            saving = buffer.checkpoint.call_one(str(saved), 1)
            await buffer.announce.call_one(1)
            await buffer.announce.call_one(2)
            await saving
            assert names(old) == ["group-2-0.safetensors"], "pins are gone, and what was trained is freed"
            other = procs.spawn("other", ReplayBuffer, config, 10, 50)
            back = await other.restore.call_one(str(saved), str(new))
            again = await other.ready.call_one(1)
            return early, again, back, await other.counts.call_one()
        finally:
            await procs.stop()

    early, again, back, counts = asyncio.run(run())
    assert [g.ticket for g in early.groups] == [g.ticket for g in again.groups] == [1]
    assert again.groups[0].handle.path == str(new / "group-1-0.safetensors")
    group = payload.read(again.groups[0].handle)
    want = [rollout(np.random.default_rng(1), 9, 3, 0)]
    np.testing.assert_array_equal(group.rollouts[0].tokens, want[0].tokens)
    assert names(new) == ["group-1-0.safetensors", "group-2-0.safetensors"]
    assert back == Restored(trained=1, begun=())
    assert (counts["issued"], counts["trained"], counts["open"]) == (4, 1, 3)


def test_a_pinned_payload_outlives_its_group(tmp_path: Path) -> None:
    book = Ledger(BufferConfig(groups_per_step=1, max_staleness=1), steps=5)
    book.put(finished(book.lease(0, 1)[0], tmp_path))
    books = book.snapshot(0)
    with contextlib.ExitStack() as pins:
        (source,) = [_pin(kept["meta"]["handle"], pins) for kept in books["open"]]
        (tmp_path / "group-0-0.safetensors").unlink()
        _save(tmp_path / "buffer", books, [source])
    assert names(tmp_path) == ["buffer"]
    assert names(tmp_path / "buffer") == ["books.json", "group-0-0.safetensors"]


@pytest.mark.parametrize("damage", ["books", "short", "missing"])
def test_a_damaged_buffer_is_refused(tmp_path: Path, damage: str) -> None:
    book = Ledger(BufferConfig(groups_per_step=1, max_staleness=1), steps=5)
    (lease,) = book.lease(0, 1)
    book.put(finished(lease, tmp_path))
    saved, new = tmp_path / "buffer", tmp_path / "new"
    new.mkdir()
    _save(saved, book.snapshot(0), [str(tmp_path / "group-0-0.safetensors")])
    assert len(_load(saved, str(new))["open"]) == 1
    if damage == "books":
        (saved / BOOKS).write_text("{}")
    elif damage == "short":
        os.truncate(saved / "group-0-0.safetensors", 10)
    else:
        (saved / "group-0-0.safetensors").unlink()
    with pytest.raises((ValueError, FileNotFoundError), match="group-0-0" if damage != "books" else "damaged"):
        _load(saved, str(new))


def test_a_best_that_says_nothing_is_named(tmp_path):
    (tmp_path / "best.json").write_text("{}")
    with pytest.raises(ValueError, match=r"best\.json is damaged .*remove it"):
        Checkpoints(tmp_path, keep=1).best()
