"""The worker's two output streams."""

from __future__ import annotations

import fcntl
import io
import os
import sys


def flush_output() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:
            pass


class Output:
    """The two output streams, put back before and after each action whatever the guest did to them."""

    def __init__(self) -> None:
        self.spare = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 100) for fd in (1, 2)]
        self._same = [self._identity(fd) for fd in (1, 2)]
        self._streams = [self._stream(fd) for fd in (1, 2)]
        self.restore()

    @staticmethod
    def _identity(fd: int) -> tuple[int, int] | None:
        try:
            status = os.fstat(fd)
            return status.st_dev, status.st_ino
        except OSError:
            return None

    @staticmethod
    def _stream(fd: int) -> io.TextIOWrapper:
        raw = io.FileIO(fd, "wb", closefd=False)
        name = "<stdout>" if fd == 1 else "<stderr>"
        raw.name = name
        return io.TextIOWrapper(io.BufferedWriter(raw), "utf-8", errors="backslashreplace", line_buffering=True)

    def restore(self) -> None:
        for index, fd in enumerate((1, 2)):
            if self._identity(fd) != self._same[index]:
                os.dup2(self.spare[index], fd)
            stream = self._streams[index]
            if stream.closed or stream.__dict__:  # an attribute that was set hides a method
                stream = self._streams[index] = self._stream(fd)
            if index == 0:
                sys.stdout = sys.__stdout__ = stream  # type: ignore[misc]
            else:
                sys.stderr = sys.__stderr__ = stream  # type: ignore[misc]
        if getattr(sys.stdin, "closed", True):
            sys.stdin = sys.__stdin__ = os.fdopen(os.open(os.devnull, os.O_RDONLY), encoding="utf-8")  # type: ignore[misc]
