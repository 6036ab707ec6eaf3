"""The run's folder: private, swept only when dead, and errors instead of SIGBUS."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys

import numpy as np
import pytest

from actors import shm


@pytest.fixture
def place(tmp_path):
    return str(tmp_path)


def test_folder_is_private_and_removed(place):
    folder = shm.RunFolder.create(1000, (place,))
    parent = os.path.dirname(folder.path)
    assert os.path.dirname(parent) == place
    assert os.path.basename(parent) == f"meshrl-{os.getuid()}"
    assert [stat.S_IMODE(os.stat(path).st_mode) for path in (parent, folder.path)] == [0o700, 0o700]
    view = shm.map_new(f"{folder.path}/slot", 10)
    assert stat.S_IMODE(os.stat(f"{folder.path}/slot").st_mode) == 0o600
    view[:] = 7
    folder.close()
    assert os.listdir(parent) == []
    assert view.tolist() == [7] * 10  # a map outlives its file


def test_a_live_run_is_never_swept_and_a_closed_one_leaves_nothing(place):
    first = shm.RunFolder.create(1000, (place,))
    second = shm.RunFolder.create(1000, (place,))
    assert shm.sweep(place) == []
    assert os.path.isdir(first.path)
    assert os.path.isdir(second.path)
    first.close()
    assert os.listdir(os.path.dirname(second.path)) == [os.path.basename(second.path)]
    second.close()


def test_a_killed_run_is_swept(place):
    code = (
        "import sys; from actors import shm; f = shm.RunFolder.create(1000, (sys.argv[1],)); "
        "shm.map_new(f.path + '/slot', 4096); print(f.path, flush=True); sys.stdin.read()"
    )
    run = subprocess.Popen(
        [sys.executable, "-c", code, place], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    )
    path = run.stdout.readline().strip()
    assert shm.sweep(place) == []  # alive
    reader = shm.map_existing(f"{path}/slot", 4096)
    run.send_signal(signal.SIGKILL)
    run.wait()
    run.stdout.close()
    run.stdin.close()
    assert os.path.isdir(path)
    mine = shm.RunFolder.create(1000, (place,))
    assert not os.path.exists(path)
    assert not reader.any()
    mine.close()


def test_a_folder_without_lock_is_dead(place):
    os.makedirs(f"{place}/meshrl-{os.getuid()}/cut-short", mode=0o700)
    os.chmod(f"{place}/meshrl-{os.getuid()}", 0o700)
    assert shm.sweep(place) == [f"{place}/meshrl-{os.getuid()}/cut-short"]


def test_the_first_place_with_room_is_taken(place, monkeypatch):
    small, large = f"{place}/small", f"{place}/large"
    os.mkdir(small)
    os.mkdir(large)
    monkeypatch.setattr(shm, "free_bytes", {small: 5_000_000, large: 9_000_000}.__getitem__)
    places = (small, large)
    for need, expected in ((5_000_000, small), (5_000_001, large)):
        folder = shm.RunFolder.create(need, places)
        assert folder.path.startswith(expected + "/")
        folder.close()
    with pytest.raises(OSError, match=r"needs 9\.5 MB .*small has 5\.0 MB, .*large has 9\.0 MB"):
        shm.RunFolder.create(9_500_000, places)


def test_another_users_or_an_open_parent_is_refused(place):
    parent = f"{place}/meshrl-{os.getuid()}"
    os.mkdir(parent)
    os.chmod(parent, 0o755)
    with pytest.raises(PermissionError, match="not a private directory"):
        shm.RunFolder.create(1000, (place,))


def test_maps_share_bytes_and_readers_cannot_write(place):
    path = f"{place}/slot"
    written = shm.map_new(path, 4097)
    assert not written.any()
    read = shm.map_existing(path, 4097)
    written[:] = np.arange(4097) % 251
    assert (read == np.arange(4097) % 251).all()
    with pytest.raises(ValueError, match="read-only"):
        read[0] = 1


def test_a_file_is_never_taken_over(place):
    shm.map_new(f"{place}/slot", 10)
    with pytest.raises(FileExistsError):
        shm.map_new(f"{place}/slot", 10)


def test_a_full_mount_raises_and_leaves_no_file(place):
    room = shm.free_bytes("/dev/shm")
    path = f"/dev/shm/meshrl-test-{os.getpid()}"
    with pytest.raises(OSError, match=r"no [\d,.]+ MB for /dev/shm/meshrl-test"):
        shm.map_new(path, room * 1000)
    assert not os.path.exists(path)


def test_a_short_file_is_refused(place):
    shm.map_new(f"{place}/slot", 10)
    with pytest.raises(ValueError, match="has 10 bytes, 11 are needed"):
        shm.map_existing(f"{place}/slot", 11)
