"""One output pipe of the worker."""

from __future__ import annotations

import codecs
import fcntl
import os
import sys
import termios
from typing import Callable

from farhand.sandbox.runner.bounds import PIPE_REST_S, READ_BYTES
from farhand.sandbox.runner.reactor import READ, Reactor, Timer


class Pipe:
    """The read end of one of the worker's two output pipes. `relay` is called when there is something to read, `wrote`
    with what was read."""

    def __init__(
        self,
        reactor: Reactor,
        fd: int,
        stream: str,
        relay: Callable[[Pipe], None],
        wrote: Callable[[Pipe, bytes], None],
    ) -> None:
        os.set_blocking(fd, False)
        self.stream = stream
        self.decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        self._reactor = reactor
        self._fd = fd
        self._ready: Callable[[int], None] = lambda mask: relay(self)
        self._wrote = wrote
        self._held: Timer | None = None

    @property
    def closed(self) -> bool:
        return self._fd < 0

    def watch(self, hold: bool) -> None:
        """Read when there is something; with `hold` leave it in the pipe. One that rests is left resting."""
        if self._fd >= 0 and self._held is None:
            self._reactor.watch(self._fd, 0 if hold else READ, self._ready)

    def rest(self, over: Callable[[], None]) -> None:
        """Read nothing for a moment; then `over` is called."""

        def release() -> None:
            self._held = None
            over()

        self._reactor.watch(self._fd, 0, self._ready)
        self._held = self._reactor.call_later(PIPE_REST_S, release)

    def read(self, most: int) -> int:
        """Read once and hand it on; its size. At its end the pipe is closed."""
        try:
            data = os.read(self._fd, most)
        except BlockingIOError:
            return 0
        except OSError:
            data = b""
        if not data:
            self._close()
            return 0
        self._wrote(self, data)
        return len(data)

    def drain(self) -> None:
        """Read what the pipe holds at this moment."""
        if self._fd < 0:
            return
        held = bytearray(4)
        fcntl.ioctl(self._fd, termios.FIONREAD, held)
        waiting = int.from_bytes(held, sys.byteorder)
        while waiting > 0 and self._fd >= 0:
            size = self.read(min(waiting, READ_BYTES))
            if not size:
                break
            waiting -= size

    def close(self) -> None:
        if self._held is not None:
            self._held.cancel()
            self._held = None
        self._close()

    def _close(self) -> None:
        if self._fd >= 0:
            self._reactor.watch(self._fd, 0, self._ready)
            os.close(self._fd)
            self._fd = -1
