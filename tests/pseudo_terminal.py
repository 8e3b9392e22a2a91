"""Programs under a pseudo-terminal, for tests of what a person sees."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

_SEQUENCE = re.compile(r"\x1b\[[0-9;]*m")
WAIT_S = 30.0
_TAKE_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execvp(sys.argv[1], sys.argv[1:])
"""


class PseudoTerminal:
    """A running program whose terminal this is. `output` piles up what it wrote, decoded."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        columns: int = 80,
        environ: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stdout: int | None = None,
    ) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
        unset = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "COLORTERM")
        base = {name: value for name, value in os.environ.items() if name not in unset}
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _TAKE_TERMINAL, *command],
            stdin=slave,
            stdout=slave if stdout is None else stdout,
            stderr=slave,
            env={**base, "TERM": "xterm-256color", **(environ or {})},
            cwd=cwd,
            start_new_session=True,
        )
        os.close(slave)
        self._bytes = b""

    @property
    def output(self) -> str:
        return self._bytes.decode("utf-8", "replace").replace("\r\n", "\n")

    @property
    def text(self) -> str:
        """The output without colours."""
        return _SEQUENCE.sub("", self.output)

    def _read(self, deadline: float) -> bool:
        """Some more output; False at its end."""
        ready, _, _ = select.select([self._master], [], [], max(deadline - time.monotonic(), 0))
        if not ready:
            raise TimeoutError(f"nothing more came within {WAIT_S} s after: {self.output[-2000:]}")
        try:
            piece = os.read(self._master, 65536)
        except OSError:  # EIO: the last one who had it open has gone
            return False
        self._bytes += piece
        return bool(piece)

    def wait_for(self, text: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while text not in self.text:
            if not self._read(deadline):
                raise AssertionError(f"{text!r} never came: {self.output[-2000:]}")

    def press_ctrl_c(self) -> None:
        os.write(self._master, b"\x03")

    def finish(self) -> int:
        """The exit code, after everything was read."""
        deadline = time.monotonic() + WAIT_S
        while self._read(deadline):
            pass
        return self.process.wait(WAIT_S)

    def __enter__(self) -> PseudoTerminal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(WAIT_S)
        os.close(self._master)
