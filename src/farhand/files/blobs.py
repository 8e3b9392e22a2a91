"""Content by hash, in a folder of this machine or in this process (`store.port.Blobs`)."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import hashlib
import os
import re
import secrets
import threading
import time
from collections import OrderedDict
from pathlib import Path

from farhand.errors import BlobMissing, StoreError, UsageError
from farhand.limits import BLOB_BYTES, BLOB_TEMP_S, BLOBS_REMEMBERED

_NAME = re.compile(r"[0-9a-f]{64}")
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW


def fsync(fd: int) -> None:
    """Every flush of a blob or its folders goes through here."""
    os.fsync(fd)


def blob_name(data: bytes) -> str:
    """The SHA-256 of the bytes in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def _check_size(size_bytes: int, most: int) -> None:
    if size_bytes > most:
        raise UsageError(f"a blob holds at most {most} bytes, not {size_bytes}")


class MemoryBlobs:
    """Blobs that live in this process and die with it."""

    def __init__(self, *, most_bytes: int = BLOB_BYTES) -> None:
        self._kept: dict[str, bytes] = {}
        self._most_bytes = most_bytes

    async def put(self, data: bytes) -> str:
        _check_size(len(data), self._most_bytes)
        name = blob_name(data)
        self._kept[name] = bytes(data)
        return name

    async def get(self, name: str) -> bytes:
        try:
            return self._kept[name]
        except KeyError:
            raise BlobMissing(f"there is no blob {name!r:.100}") from None

    async def has(self, name: str) -> bool:
        return name in self._kept


class DirectoryBlobs:
    """Blobs as files `ROOT/ab/abcd…`, each written aside, flushed and renamed, then its folders flushed.

    `put` returns only when the content *and every folder entry that leads to it* are on the disk. A file that is there
    already proves neither: whoever wrote it may not have come to flush its folder. So content that this process did not
    see through itself is compared and flushed again, which costs a read and some calls that find nothing to do; content
    that it did is only looked for. A damaged file is replaced. Any number of processes may use one folder.
    """

    def __init__(self, root: Path | str, *, most_bytes: int = BLOB_BYTES) -> None:
        self.root = Path(root).absolute()
        self._most_bytes = most_bytes
        self._durable: OrderedDict[str, None] = OrderedDict()
        self._durable_folders: set[Path] = set()
        self._lock = threading.Lock()
        self._begun = False

    async def put(self, data: bytes) -> str:
        _check_size(len(data), self._most_bytes)
        return await asyncio.to_thread(self._put, data)

    async def get(self, name: str) -> bytes:
        return await asyncio.to_thread(self._get, name)

    async def has(self, name: str) -> bool:
        return _is_name(name) and await asyncio.to_thread(self._path(name).is_file)

    def _path(self, name: str) -> Path:
        # One level of folders: each level more is one flush more for almost every new blob.
        return self.root / name[:2] / name

    def _put(self, data: bytes) -> str:
        name = blob_name(data)
        path = self._path(name)
        try:
            if self._knows(name) and path.is_file():
                return name
            self._begin()
            if not _flush_same(path, data):
                self._write(path, data)
            self._flush_folders(path.parent)
        except OSError as error:
            raise _explained(error, self.root) from error
        self._remember(name)
        return name

    def _write(self, path: Path, data: bytes) -> None:
        if not path.parent.is_dir():
            self._durable_folders.discard(path.parent)
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = self._temporary_folder() / f"{path.name}.{secrets.token_hex(8)}"
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)  # while it is held, no sweep takes the file away
            _write_all(fd, data)
            fsync(fd)
            os.rename(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)

    def _begin(self) -> None:
        """Once a process: make the root, flush what leads to it, remove what a killed process left."""
        if self._begun:
            return
        missing = [folder for folder in self.root.parents if not folder.exists()]
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        for folder in (self.root, *missing):
            _flush_folder(folder.parent)
        self.sweep()
        self._begun = True

    def _flush_folders(self, folder: Path) -> None:
        """The folder, and the root, which holds its entry, unless this process has flushed that one already."""
        _flush_folder(folder)
        if folder not in self._durable_folders:
            _flush_folder(self.root)
            self._durable_folders.add(folder)

    def _get(self, name: str) -> bytes:
        if not _is_name(name):
            raise BlobMissing(f"{name!r:.100} is no blob's name")
        try:
            with open(os.open(self._path(name), _READ), "rb") as file:
                data = file.read(self._most_bytes + 1)
        except FileNotFoundError:
            raise BlobMissing(f"there is no blob {name}", hint=f"It was removed from {self.root}.") from None
        except OSError as error:
            raise _explained(error, self.root) from error
        if blob_name(data) != name:
            raise BlobMissing(f"blob {name} is damaged", hint="Its file no longer has the content that was stored.")
        return data

    def _knows(self, name: str) -> bool:
        with self._lock:
            return name in self._durable

    def _remember(self, name: str) -> None:
        with self._lock:
            self._durable[name] = None
            if len(self._durable) > BLOBS_REMEMBERED:
                self._durable.popitem(last=False)

    def _temporary_folder(self) -> Path:
        folder = self.root / "tmp"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder

    def sweep(self) -> None:
        """Remove temporary files that nobody writes any more. The first `put` of a process does it."""
        for path in self._temporary_folder().iterdir():
            try:
                _sweep_one(path)
            except OSError:
                continue  # another process was faster, or it is not ours


def _is_name(name: object) -> bool:
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def _write_all(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]


def _flush_same(path: Path, data: bytes) -> bool:
    """The file is there with exactly this content, which is flushed. False when it is missing or differs."""
    try:
        fd = os.open(path, _READ)
    except OSError:
        return False
    with open(fd, "rb") as file:
        if os.fstat(fd).st_size != len(data) or file.read() != data:
            return False
        fsync(fd)
    return True


def _flush_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fsync(fd)
    finally:
        os.close(fd)


def _sweep_one(path: Path) -> None:
    fd = os.open(path, _READ)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if time.time() - os.fstat(fd).st_mtime > BLOB_TEMP_S:
            path.unlink()
    finally:
        os.close(fd)


_HINTS = {
    errno.ENOSPC: "Free some space on that disk and try again.",
    errno.EDQUOT: "This user's quota is used up: free some space and try again.",
    errno.EROFS: "The file system is read-only: set FARHAND_HOME to a folder that can be written.",
    errno.EACCES: "Give this user access to the folder, or set FARHAND_HOME.",
    errno.EPERM: "Give this user access to the folder, or set FARHAND_HOME.",
}


def _explained(error: OSError, root: Path) -> StoreError:
    return StoreError(f"{root}: {error.strerror or error}", hint=_HINTS.get(error.errno or 0, ""))
