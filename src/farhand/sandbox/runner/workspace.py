"""The files of a box's workspace, reached past links, FIFOs and renames."""

from __future__ import annotations

import errno
import itertools
import os
import stat
from collections.abc import Generator, Iterator, Sequence
from typing import Any, Callable, NamedTuple, Protocol

from farhand.sandbox.runner.bounds import FILES_LISTED, FOLDER_DEPTH
from farhand.sandbox.runner.frame import FrameError


class Batch(NamedTuple):
    """A stretch of a listing: entries as in a `files` frame, and what is not listed with the reason."""

    entries: list[dict[str, Any]]
    left_out: list[dict[str, str]]


class Files(Protocol):
    """Access to a box's /workspace. Every method returns soon; OSError or FrameError says why something cannot be."""

    def walk(self) -> Generator[Batch, None, None]: ...

    def read(self, path: str, offset: int, size: int) -> tuple[bytes, bool]: ...

    def write(self, path: str, offset: int, data: bytes, mode: int, last: bool) -> None: ...


class _NoGuard:
    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


_KINDS = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "folder",
    stat.S_IFLNK: "link",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
}
_OPEN = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY


class DirectoryFiles:
    """`Files` below an open folder that somebody hostile may be changing.

    Every component of a path is opened by itself, relative to the one before, without following links and without
    waiting; `..` is refused. So nothing outside is reached, whatever is renamed meanwhile, and a FIFO stops nobody.
    `guard` makes a context around the system calls (a host that is root takes on the box's user there).
    """

    def __init__(self, root_fd: int, guard: Callable[[], Any] = _NoGuard) -> None:
        self._root = root_fd
        self._guard = guard

    def _folder(self, parts: Sequence[str], make: bool = False) -> int:
        """An open descriptor of the folder; the caller closes it."""
        fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._root)
        for part in parts:
            try:
                if make:
                    try:
                        os.mkdir(part, 0o755, dir_fd=fd)
                    except FileExistsError:
                        pass
                inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | _OPEN, dir_fd=fd)
            finally:
                os.close(fd)
            fd = inner
        return fd

    def walk(self) -> Generator[Batch, None, None]:
        """All files and folders, in batches. Links, FIFOs and sockets are left out, and so is what lies too deep."""
        waiting: list[tuple[str, ...]] = [()]
        count = 0
        while waiting:
            parts = waiting.pop()
            try:
                with self._guard():
                    fd = self._folder(parts)
            except OSError as error:
                yield Batch([], [{"path": _shown("/".join(parts)), "reason": error.strerror or "cannot be opened"}])
                continue
            try:
                for batch in self._listed(fd, parts, waiting):
                    count += len(batch.entries)
                    if count > FILES_LISTED:
                        reason = f"more than {FILES_LISTED:,} files"
                        yield Batch([], [{"path": _shown("/".join(parts)), "reason": reason}])
                        return
                    yield batch
            finally:
                os.close(fd)

    def _listed(self, fd: int, parts: tuple[str, ...], waiting: list[tuple[str, ...]]) -> Iterator[Batch]:
        with self._guard():
            names = os.scandir(fd)
        with names:
            while True:
                batch = Batch([], [])
                with self._guard():
                    some = list(itertools.islice(names, 256))
                    for found in some:
                        self._add(found, parts, batch, waiting)
                if not some:
                    return
                yield batch

    def _add(
        self, found: os.DirEntry[str], parts: tuple[str, ...], batch: Batch, waiting: list[tuple[str, ...]]
    ) -> None:
        path = "/".join((*parts, found.name))
        try:
            path.encode("utf-8")
            status = found.stat(follow_symlinks=False)
        except UnicodeEncodeError:
            batch.left_out.append({"path": _shown(path), "reason": "its name is not UTF-8"})
            return
        except OSError:
            return  # it is gone again
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "other")
        if kind not in ("file", "folder"):
            reason = {"link": "a symbolic link", "fifo": "a FIFO", "socket": "a socket"}.get(kind, "no regular file")
            batch.left_out.append({"path": path, "reason": reason})
            return
        if kind == "folder":
            if len(parts) >= FOLDER_DEPTH:
                batch.left_out.append({"path": path, "reason": f"deeper than {FOLDER_DEPTH} folders"})
                return
            waiting.append((*parts, found.name))
        batch.entries.append(
            {
                "path": path,
                "kind": kind,
                "size": status.st_size,
                "mtime_ns": status.st_mtime_ns,
                "ctime_ns": status.st_ctime_ns,
                "ino": status.st_ino,
                "mode": stat.S_IMODE(status.st_mode) & 0o777,
            }
        )

    def read(self, path: str, offset: int, size: int) -> tuple[bytes, bool]:
        """At most `size` bytes from `offset`, and whether the file ends there."""
        *parts, name = _parts(path)
        with self._guard():
            folder = self._folder(parts)
            try:
                fd = _open_regular(name, os.O_RDONLY, folder)
            finally:
                os.close(folder)
            try:
                data = os.pread(fd, size, offset)
                return data, len(data) < size and not os.pread(fd, 1, offset + len(data))
            finally:
                os.close(fd)

    def write(self, path: str, offset: int, data: bytes, mode: int, last: bool) -> None:
        """A chunk of a file, in order from 0. The file appears under its name with the last chunk."""
        *parts, name = _parts(path)
        partial = _partial(name)
        with self._guard():
            folder = self._folder(parts, make=True)
            try:
                if offset == 0:
                    self._remove(partial, folder)
                    fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _OPEN, 0o600, dir_fd=folder)
                else:
                    fd = _open_regular(partial, os.O_WRONLY, folder)
                try:
                    _write_all(fd, data, offset)
                    if last:
                        os.fchmod(fd, mode & 0o777)
                finally:
                    os.close(fd)
                if last:
                    os.rename(partial, name, src_dir_fd=folder, dst_dir_fd=folder)
            finally:
                os.close(folder)

    def discard(self, path: str) -> None:
        """Remove the chunks of a file whose last one did not come."""
        *parts, name = _parts(path)
        self.remove("/".join((*parts, _partial(name))))

    def make_folder(self, path: str) -> None:
        with self._guard():
            os.close(self._folder(_parts(path), make=True))

    def remove(self, path: str) -> None:
        """Remove a file, link or empty folder; one that is not there is no error."""
        *parts, name = _parts(path)
        with self._guard():
            try:
                folder = self._folder(parts)
            except (FileNotFoundError, NotADirectoryError):
                return
            try:
                self._remove(name, folder)
            finally:
                os.close(folder)

    @staticmethod
    def _remove(name: str, folder: int) -> None:
        try:
            os.unlink(name, dir_fd=folder)
        except FileNotFoundError:
            pass
        except (IsADirectoryError, PermissionError):
            os.rmdir(name, dir_fd=folder)


def _parts(path: str) -> list[str]:
    """The components of a relative path. FrameError for one that is absolute, empty or climbs."""
    parts = path.split("/")
    if not path or len(path) > 4096 or len(parts) > FOLDER_DEPTH + 1:
        raise FrameError("a path that is empty or too long")
    if "\0" in path or any(part in ("", ".", "..") for part in parts):
        raise FrameError(f"{_shown(path)[:200]!r} is no path below the workspace")
    return parts


def _partial(name: str) -> str:
    return f".{name[:50]}.partial"


def _open_regular(name: str, flags: int, folder: int) -> int:
    fd = os.open(name, flags | _OPEN, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "no regular file")
    return fd


def _write_all(fd: int, data: bytes, offset: int) -> None:
    rest = memoryview(data)
    while rest:
        written = os.pwrite(fd, rest, offset)
        rest, offset = rest[written:], offset + written


def _shown(name: str) -> str:
    return name.encode("utf-8", "backslashreplace").decode("utf-8")
