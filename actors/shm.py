"""The run's folder of shared files: weight slots and payloads of one host lie here, mapped by whoever reads them.

Plain files and `mmap`, not `multiprocessing.shared_memory`: its resource tracker unlinks segments that other processes
still use. A map is never closed explicitly (a tensor over a closed map is a crash, not an error): drop the arrays.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
import shutil
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

LOCK = "lock"


@dataclass(frozen=True, slots=True)
class RunFolder:
    """`<place>/meshrl-<uid>/<run id>/`, mode 0700, alive as long as its creator holds the lock on its `lock` file.

    The kernel gives that lock back however the creator ends, so a later run may remove exactly the folders whose lock
    it gets.
    """

    path: str
    lock: int
    """Descriptor that holds the lock. Not inherited by an exec'd child; a bare fork would keep the lock."""

    @classmethod
    def create(cls, need_bytes: int, places: tuple[str, ...] | None = None) -> RunFolder:
        """Make the folder in the first place with `need_bytes` free, after removing what dead runs left.

        Places are /dev/shm, then the temporary directory (a mapped file there is as fast once warm).

        Raises:
            OSError: ENOSPC, no place has the room; the message has the numbers.
            PermissionError: another user made our folder's parent.
        """
        places = tuple(p for p in places or ("/dev/shm", tempfile.gettempdir()) if os.path.isdir(p))
        for place in places:
            sweep(place)
        for place in places:
            if free_bytes(place) >= need_bytes:
                return cls._make(place)
        rooms = ", ".join(f"{place} has {_megabytes(free_bytes(place))}" for place in places)
        raise OSError(errno.ENOSPC, f"the run needs {_megabytes(need_bytes)} of shared files and {rooms}: free some")

    @classmethod
    def _make(cls, place: str) -> RunFolder:
        parent = _parent(place)
        gate = _locked(parent)
        try:
            path = parent / secrets.token_hex(6)
            path.mkdir(mode=0o700)
            lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(gate)
        return cls(path=str(path), lock=lock)

    def close(self) -> None:
        """Remove the folder and release its lock; maps that are open stay readable. Call once."""
        shutil.rmtree(self.path)
        os.close(self.lock)


def sweep(place: str) -> list[str]:
    """Remove the folders of this user's dead runs in `place`: those whose lock can be taken. Returns their paths."""
    parent = _parent(place)
    gate = _locked(parent)  # nobody is between making a folder and locking it
    swept = []
    try:
        for folder in sorted(p for p in parent.iterdir() if p.is_dir() and not p.is_symlink()):
            if _dead(folder / LOCK):
                shutil.rmtree(folder)
                swept.append(str(folder))
    finally:
        os.close(gate)
    return swept


def free_bytes(place: str) -> int:
    """Bytes that the mount of `place` can still take."""
    room = os.statvfs(place)
    return room.f_bavail * room.f_frsize


def map_new(path: str, nbytes: int) -> np.ndarray:
    """A new file of `nbytes`, mapped for reading and writing: uint8 [nbytes], zeros, its pages already there.

    Raises:
        FileExistsError: a file of that name is never taken over.
        OSError: the mount is full. Raised here, where writing later would be a SIGBUS.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.posix_fallocate(fd, 0, nbytes)
        view = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    except OSError as error:
        os.unlink(path)
        room = _megabytes(free_bytes(os.path.dirname(path)))
        raise OSError(error.errno, f"no {_megabytes(nbytes)} for {path}, {room} free: {error.strerror}") from error
    finally:
        os.close(fd)
    return np.frombuffer(view, dtype=np.uint8)


def map_existing(path: str, nbytes: int) -> np.ndarray:
    """The file's first `nbytes`, mapped read-only: uint8 [nbytes]. Readable even after the file is unlinked.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the file is shorter, so reading would be a SIGBUS.
    """
    fd = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(fd).st_size
        if size < nbytes:
            raise ValueError(f"{path} has {size} bytes, {nbytes} are needed")
        view = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=mmap.PROT_READ)
    finally:
        os.close(fd)
    return np.frombuffer(view, dtype=np.uint8)


def _parent(place: str) -> Path:
    """`<place>/meshrl-<uid>`, made if absent; it must be a directory of ours, as `place` may be open to all users."""
    parent = Path(place) / f"meshrl-{os.getuid()}"
    parent.mkdir(mode=0o700, exist_ok=True)
    found = parent.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{parent} is not a private directory of user {os.getuid()}: remove it")
    return parent


def _locked(directory: Path) -> int:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    return fd


def _dead(lock: Path) -> bool:
    try:
        fd = os.open(lock, os.O_RDWR)
    except FileNotFoundError:
        return True  # its creator ended between making the folder and the lock
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


def _megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.1f} MB"
