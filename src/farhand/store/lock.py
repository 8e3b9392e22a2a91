"""Who drives: a lock file held for the life of the process, so that another one can prove this one gone.

The kernel drops the lock when the process ends, however it ends. Only a process of the same boot of the same kernel may
conclude anything from a free lock: on a network file system locks of other machines may not be seen.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import socket
import time
import weakref
from pathlib import Path
from types import TracebackType
from typing import ClassVar

from farhand.errors import StoreError
from farhand.limits import LOCK_FILE_KEPT_S

_OWNER = re.compile(
    r"own_(?P<host>[a-z0-9-]{1,32})\.(?P<boot>[0-9a-f]{12})\.(?P<pid>\d+)\.(?P<start>\d+)\.[0-9a-f]{12}"
)
_FREE = b"free\n"


class LockFile:
    """An open file that can be locked against every other opening of it, in this process or another.

    Not inherited by programs this process starts (close-on-exec). A child made by a bare fork shares the lock, and
    would keep it after its parent's death: it closes its copy first thing, which leaves the parent's lock as it is.
    """

    _open: ClassVar[weakref.WeakSet[LockFile]] = weakref.WeakSet()

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self._open.add(self)

    def try_lock(self) -> bool:
        """Lock it if it is free. OSError where the file system has no locks, or in a forked child."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def unlock(self) -> None:
        if self._fd >= 0:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    @classmethod
    def close_in_child(cls) -> None:
        for lock in list(cls._open):
            lock.close()


os.register_at_fork(after_in_child=LockFile.close_in_child)


class Owner:
    """This process as a driver. `id` goes into its claims; the lock file `<folder>/<id>.lock` says that it lives.

    `id` is `own_HOST.BOOT.PID.START.RANDOM`: a person can read it, and nobody has had it before.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        host = re.sub(r"[^a-z0-9-]", "-", socket.gethostname().lower())[:32] or "host"
        try:
            self.id = f"own_{host}.{_boot()}.{os.getpid()}.{_started()}.{secrets.token_hex(6)}"
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            sweep(folder)
            self._lock = self._locked()
        except OSError as error:
            raise StoreError(
                f"no lock file can be held in {folder}: {error.strerror}",
                hint="FARHAND_HOME must be a folder on a local disk that this user may write.",
            ) from error

    def _locked(self) -> LockFile:
        # Locked under another name first: whoever sees the right name sees it locked.
        start = self.folder / f".{self.id}"
        lock = LockFile(start)
        if not lock.try_lock():
            raise BlockingIOError(0, "a new lock file is already locked")
        os.rename(start, self._path(self.id))
        return lock

    def _path(self, owner: str) -> Path:
        return self.folder / f"{owner}.lock"

    def gone(self, owner: str) -> bool:
        """True only when it is proven that the process named has ended or has closed its `Owner`.

        The proof is its lock file: written under this kernel's boot, there, and free. A missing file proves nothing.
        """
        named = _OWNER.fullmatch(owner)
        if named is None or named["boot"] != _boot():
            return False
        return is_free(self._path(owner))

    def close(self) -> None:
        """From here on others find this owner gone. The file stays for them to see; a later `sweep` removes it."""
        self._lock.close()

    def __enter__(self) -> Owner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def is_free(path: Path) -> bool:
    """The file is there and nobody holds its lock. Two that ask at once do not disturb each other."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def sweep(folder: Path, kept_s: float = LOCK_FILE_KEPT_S) -> None:
    """Remove lock files that were first seen free more than `kept_s` ago.

    Not at first sight: until its leases have run out, the free file is what lets others go on at once.
    """
    for path in folder.glob("own_*.lock"):
        if is_free(path):
            _sweep_one(path, kept_s)
    for path in folder.glob(".own_*"):  # its maker was killed before it gave the file its name
        if _age_s(path) > kept_s:
            path.unlink(missing_ok=True)


def _sweep_one(path: Path, kept_s: float) -> None:
    try:
        if not path.stat().st_size:
            path.write_bytes(_FREE)
        elif _age_s(path) > kept_s:
            path.unlink()
    except OSError:  # another process was faster, or the file is not ours to remove
        pass


def _age_s(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return 0.0


def _boot() -> str:
    """This boot of this kernel, 12 hexadecimal digits."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().replace("-", "")[:12]


def _started() -> int:
    """When this process started, in ticks since boot: with the pid, a name that is not given again."""
    stat = Path("/proc/self/stat").read_text()
    return int(stat.rpartition(")")[2].split()[19])
