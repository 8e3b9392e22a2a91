"""New files of a session or a program, copied into the folder the person works in or names.

Paths and contents come from a box. So: nothing that exists is touched, no symbolic link is followed, no path leaves the
folder, hidden names (`.git/hooks`, `.bashrc`) and names with control characters stay behind, and no copy is executable.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from farhand.cli.terminal import sanitise

FILES_MOST = 100
"""More new files than this are left where they are: that is no result a person wants strewn around."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Delivered:
    """`target` is None when the file stays in the session's folder, for `reason`."""

    path: str
    target: str | None
    reason: str = ""

    def text(self) -> str:
        return f"→ {self.target}" if self.target else f"not copied: {self.reason}"


def deliver(
    paths: Iterable[str], source: Path, folder: Path, *, shown: str = ".", most: int | None = FILES_MOST
) -> list[Delivered]:
    """Copy the files named by `paths` from the folder `source` into `folder`, which is `shown` by this name."""
    paths = list(paths)
    if most is not None and len(paths) > most:
        return [Delivered(path, None, f"more than {most} files") for path in paths]
    return [_deliver_one(path, source, folder, shown) for path in paths]


def _deliver_one(path: str, source: Path, folder: Path, shown: str) -> Delivered:
    reason = _unfit(path)
    if reason:
        return Delivered(path, None, reason)
    *parents, name = PurePosixPath(path).parts
    try:
        _copy(source, folder, parents, name)
    except FileExistsError:
        return Delivered(path, None, "a file of this name is here already")
    except OSError as error:
        return Delivered(path, None, error.strerror or "it cannot be written")
    return Delivered(path, os.path.join(shown, *parents, name))


def _unfit(path: str) -> str:
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or "\0" in path:
        return "its path leaves the folder"
    if any(part.startswith(".") for part in parts):
        return "its name is hidden"
    if sanitise(path) != path or "\n" in path or "\t" in path:
        return "its name has control characters"
    return ""


def _copy(source: Path, folder: Path, parents: list[str], name: str) -> None:
    origin = _walk(source, parents, make=False)
    try:
        target = _walk(folder, parents, make=True)
        try:
            _copy_file(origin, target, name)
        finally:
            os.close(target)
    finally:
        os.close(origin)


def _walk(start: Path, parents: list[str], *, make: bool) -> int:
    """A descriptor of the folder, reached through real folders only."""
    here = os.open(start, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    for part in parents:
        try:
            if make:
                try:
                    os.mkdir(part, dir_fd=here)
                except FileExistsError:
                    pass
            below = os.open(part, _FOLDER, dir_fd=here)
        finally:
            os.close(here)
        here = below
    return here


def _copy_file(origin: int, target: int, name: str) -> None:
    read = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=origin)
    with open(read, "rb") as file:
        if not stat.S_ISREG(os.fstat(read).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        written = os.open(name, flags, 0o666, dir_fd=target)
        try:
            with open(written, "wb") as copy:
                shutil.copyfileobj(file, copy)
        except BaseException:
            os.unlink(name, dir_fd=target)
            raise
