"""A SQLite file, opened the one way that keeps the record's promises, and its errors in our words."""

from __future__ import annotations

import errno
import os
import sqlite3
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from farhand.errors import StoreError
from farhand.store.lock import LockFile
from farhand.store.schema import migrate, migrations, pending, queries

_PAUSE_S = 0.0005
"""Between two tries for something another process holds."""

_FREE_SPACE = "Free some space on that disk and try again; what was recorded before is intact."
_HINTS = {
    "SQLITE_FULL": ("the disk is full", _FREE_SPACE),
    "SQLITE_READONLY": ("the file or its folder is read-only", "Give this user write access, or set FARHAND_HOME."),
    "SQLITE_CANTOPEN": ("the file or its folder cannot be opened", "Give this user access, or set FARHAND_HOME."),
    "SQLITE_PERM": ("access was refused", "Give this user access, or set FARHAND_HOME."),
    "SQLITE_NOTADB": (
        "the file is no SQLite database",
        "It is damaged, or another program's. Move it away; restore a copy.",
    ),
    "SQLITE_CORRUPT": (
        "the file is damaged",
        "Move it and its -wal file away and restore a copy, or try `sqlite3 FILE .recover`.",
    ),
    "SQLITE_BUSY": (
        "another process keeps the file locked",
        "End the process that holds it (`fuser FILE`) and try again.",
    ),
    "SQLITE_LOCKED": ("another process keeps the file locked", "End the process that holds it and try again."),
    "SQLITE_IOERR": (
        "the disk failed",
        "See the kernel's log. Whether the last events stand shows when they are read again.",
    ),
}


_SAME_AS = {
    errno.ENOSPC: "SQLITE_FULL",
    errno.EDQUOT: "SQLITE_FULL",
    errno.EROFS: "SQLITE_READONLY",
    errno.EACCES: "SQLITE_CANTOPEN",
    errno.EPERM: "SQLITE_PERM",
    errno.EIO: "SQLITE_IOERR",
}


def explained(error: Exception, path: Path) -> StoreError:
    """The error in our words, with what to do."""
    name = getattr(error, "sqlite_errorname", None) or type(error).__name__
    said = str(error)
    if isinstance(error, OSError):
        name, said = _SAME_AS.get(error.errno or 0, name), error.strerror or said
    what, hint = next((known for prefix, known in _HINTS.items() if name.startswith(prefix)), (said, ""))
    return StoreError(f"{path}: {what} ({name})", hint=hint)


class Connection:
    """One connection to a file that is there, and the named statements. Used by one thread at a time.

    `complete` says whether the file has the newest schema.
    """

    def __init__(self, path: Path, busy_s: float) -> None:
        self.path = path
        self._queries = queries()
        place = f"file:{quote(str(path))}?mode=rw"
        self.raw = sqlite3.connect(place, uri=True, timeout=busy_s, isolation_level=None, check_same_thread=False)
        try:
            self._set_up(busy_s)
        except BaseException:
            self.raw.close()
            raise

    def _set_up(self, busy_s: float) -> None:
        # Only reads come before the file is known to be ours: one that is not stays as it is.
        self.complete = not pending(self.raw, migrations("sqlite"))
        self._use_wal(busy_s)
        for pragma in ("synchronous = FULL", "foreign_keys = ON", "trusted_schema = OFF", "wal_autocheckpoint = 0"):
            self.raw.execute(f"PRAGMA {pragma}")
        if self.pragma("synchronous") != 2 or self.pragma("foreign_keys") != 1:
            raise StoreError(f"{self.path}: this SQLite does not take synchronous=FULL and foreign_keys=ON")
        status = os.stat(self.path)
        self._place = status.st_dev, status.st_ino

    def _use_wal(self, busy_s: float) -> None:
        # The change to WAL does not wait for other openers as statements do.
        ends_at = time.monotonic() + busy_s
        while True:
            try:
                mode = self.pragma("journal_mode = WAL")
                break
            except sqlite3.OperationalError as error:
                if not error.sqlite_errorname.startswith("SQLITE_BUSY") or time.monotonic() > ends_at:
                    raise
                time.sleep(_PAUSE_S)
        if mode != "wal":
            raise StoreError(f"{self.path}: no write-ahead log is possible here", hint="Use a folder on a local disk.")

    def pragma(self, text: str) -> Any:
        row = self.raw.execute(f"PRAGMA {text}").fetchone()
        return row[0] if row else None

    def all(self, name: str, **values: Any) -> list[Any]:
        return self.raw.execute(self._queries[name], values).fetchall()

    def one(self, name: str, **values: Any) -> Any:
        return self.raw.execute(self._queries[name], values).fetchone()

    def do(self, name: str, values: Mapping[str, Any]) -> None:
        self.raw.execute(self._queries[name], values)

    def do_many(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        self.raw.executemany(self._queries[name], rows)

    def check_place(self) -> None:
        """StoreError when the path no longer names the file that is open: what is written now would be lost."""
        try:
            status = os.stat(self.path)
        except FileNotFoundError:
            status = None
        if status is None or (status.st_dev, status.st_ino) != self._place:
            raise StoreError(
                f"{self.path} was moved or removed while it was open",
                hint="Put it back, with its -wal file, and start again.",
            )

    def checkpoint(self) -> None:
        """Copy what stands in the write-ahead log into the database file, as far as no reader needs it."""
        self.raw.execute("PRAGMA wal_checkpoint(PASSIVE)")

    def close(self) -> None:
        self.raw.close()


def open_for_writing(path: Path, busy_s: float, now: float) -> Connection:
    """The connection of the writer: makes the file if there is none, and brings its schema up to date."""
    _make_file(path)
    connection = Connection(path, busy_s)
    try:
        migrate(connection.raw, migrations("sqlite"), now)
    except BaseException:
        connection.close()
        raise
    return connection


def _make_file(path: Path) -> None:
    """An empty file that only this user reads, durable by name. An existing one is not even opened: closing any
    descriptor of a SQLite file drops the locks that this process holds on it."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        return
    _fsync_folder(path.parent)


def _make_folder(folder: Path) -> None:
    """The folder and those above it, durable by name."""
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for made in missing:
        _fsync_folder(made.parent)


def _fsync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class Turn:
    """Writers of all processes, one after another: a lock file beside the database, `<name>-turn`.

    SQLite orders writers itself, but up to 3.51.2 a checkpoint that overlaps another connection's commit may, very
    rarely, lose committed pages when that commit restarts the write-ahead log. Commits and checkpoints of ours
    therefore never overlap. The lock ends with the process that holds it.
    """

    def __init__(self, path: Path, busy_s: float) -> None:
        self._path, self._busy_s = path.with_name(path.name + "-turn"), busy_s
        self._lock: LockFile | None = None

    def __enter__(self) -> None:
        if self._lock is None:
            _make_folder(self._path.parent)
            self._lock = LockFile(self._path)
        ends_at = 0.0
        while not self._lock.try_lock():
            now = time.monotonic()
            ends_at = ends_at or now + self._busy_s
            if now > ends_at:
                raise StoreError(
                    f"{self._path}: another process has kept the record locked for {self._busy_s:g} s",
                    hint="Is one of them stopped? `fuser` with that file names it.",
                )
            time.sleep(_PAUSE_S)

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            self._lock.unlock()

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None
