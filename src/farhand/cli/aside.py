"""Standard output while code of the person's own runs here: what a tool prints is no part of the answer."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import BinaryIO, TextIO

from farhand.cli.terminal import Output


class Aside(io.TextIOBase):
    """Takes the place of `sys.stdout`: what is printed goes to `output`, standard error, or to `show` once that is set.

    `show` is called on the thread that prints.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream, self.output = stream, Output(stream)
        self.show: Callable[[str], object] | None = None

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    @property
    def buffer(self) -> BinaryIO:
        return self._stream.buffer

    def write(self, text: str) -> int:
        if self.show is not None:
            self.show(text)
        else:
            self.output.write(text)
        return len(text)

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()


@contextmanager
def standard_output() -> Iterator[tuple[TextIO, Aside]]:
    """Standard output for the answer alone; `print`, and programs that are started, write to standard error.

    The descriptor is moved too: a tool may start a program, whose output is no part of the answer either.
    """
    shown = sys.stdout
    shown.flush()
    aside = Aside(sys.stderr)
    own = _moved(shown)
    sys.stdout = aside
    try:
        yield own or shown, aside
    finally:
        sys.stdout = shown
        if own is not None:
            os.dup2(own.fileno(), 1)
            # Every line was flushed when it was written: nothing is lost when the reader has gone.
            with suppress(BrokenPipeError):
                own.close()


def _moved(shown: TextIO) -> TextIO | None:
    """A stream to where descriptor 1 leads, which leads to standard error from now on; None when it is no file."""
    try:
        if shown.fileno() != 1:
            return None
        own = open(os.dup(1), "w", encoding=shown.encoding, errors="backslashreplace", newline="")  # noqa: SIM115
        os.dup2(2, 1)
    except (OSError, ValueError):
        return None
    return own
