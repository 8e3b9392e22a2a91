"""Frames on their way to the worker."""

from __future__ import annotations

import socket
from collections import deque

from farhand.sandbox.runner.bounds import DOWN_BYTES, DOWN_LIMIT_BYTES


class Outbox:
    """Lines that the worker has not read yet. False when there are none."""

    def __init__(self) -> None:
        self._lines: deque[memoryview] = deque()
        self._size = 0

    def __bool__(self) -> bool:
        return bool(self._lines)

    @property
    def long(self) -> bool:
        """So much is unread that no more of the worker's frames are taken."""
        return self._size > DOWN_BYTES

    @property
    def congested(self) -> bool:
        """So much is unread that no more of the harness's frames are taken."""
        return self._size > DOWN_LIMIT_BYTES

    def add(self, line: bytes) -> None:
        self._lines.append(memoryview(line))
        self._size += len(line)

    def flush(self, sock: socket.socket) -> bool:
        """Send what can be sent; whether anything was."""
        moved = False
        try:
            while self._lines:
                sent = sock.send(self._lines[0])
                moved = True
                self._size -= sent
                if sent == len(self._lines[0]):
                    self._lines.popleft()
                else:
                    self._lines[0] = self._lines[0][sent:]
        except BlockingIOError:
            pass
        except OSError:
            self.clear()  # the worker is gone: its end follows
        return moved

    def clear(self) -> None:
        self._lines.clear()
        self._size = 0
