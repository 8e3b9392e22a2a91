"""One connected harness."""

from __future__ import annotations

import socket
from collections import deque
from typing import Any, Protocol

from farhand.sandbox.runner.bounds import ANSWERS_BYTES, ATTACH_S, LINES_PER_STEP, MESSAGE_CHARS, READ_BYTES
from farhand.sandbox.runner.field import only
from farhand.sandbox.runner.frame import FrameError, Lines, dump_frame, parse_frame
from farhand.sandbox.runner.reactor import READ, WRITE, Reactor, Timer
from farhand.sandbox.runner.spool import Spool


class Owner(Protocol):
    """What a connection belongs to: the supervisor of its box."""

    reactor: Reactor
    spool: Spool

    @property
    def congested(self) -> bool:
        """Whether the worker leaves so much unread that no frames of harnesses are taken."""
        ...

    def take(self, connection: Connection, frame: dict[str, Any]) -> None: ...

    def disconnected(self, connection: Connection) -> None: ...


class Connection:
    """One connected harness. It belongs to the supervisor once it has attached."""

    def __init__(self, supervisor: Owner, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._supervisor = supervisor
        self._reactor = supervisor.reactor
        self._sock = sock
        self._lines = Lines()
        self._out = memoryview(b"")
        self._answers: deque[bytes] = deque()
        self._answers_size = 0
        self._busy = False
        self.generation: int | None = None
        self.sent = 0
        self.closed = self._closing = False
        self._patience: Timer | None = self._reactor.call_later(ATTACH_S, self.close)
        self._mask()

    def begin(self, data: bytes) -> None:
        """Handle what was read from it before it came here."""
        self._lines.feed(data)
        self._take()

    def attach(self, generation: int, after: int) -> None:
        self.generation, self.sent = generation, after
        if self._patience is not None:
            self._patience.cancel()

    def answer(self, frame: dict[str, Any]) -> None:
        if not self.closed:
            line = dump_frame(frame)
            self._answers.append(line)
            self._answers_size += len(line)
            self.flush()

    def flush(self) -> None:
        """Send what can be sent: answers first, then spooled frames."""
        try:
            while not self.closed and (self._out or self._refill()):
                self._out = self._out[self._sock.send(self._out) :]
        except BlockingIOError:
            pass
        except OSError:
            self.close()
        if self._closing and not self._out and not self._answers:
            self.close()
        self._mask()

    def _refill(self) -> bool:
        if self._answers:
            line = self._answers.popleft()
            self._answers_size -= len(line)
            self._out = memoryview(line)
        elif self.generation is not None and not self._closing:
            lines, self.sent = self._supervisor.spool.batch(self.sent)
            self._out = memoryview(lines)
        return bool(self._out)

    def _mask(self) -> None:
        if self.closed:
            return
        slow = self._answers_size > ANSWERS_BYTES or self._closing or self._busy or self._supervisor.congested
        self._reactor.watch(self._sock.fileno(), (0 if slow else READ) | (WRITE if self._out else 0), self._ready)

    def _ready(self, mask: int) -> None:
        if mask & WRITE:
            self.flush()
        if mask & READ and not self.closed:
            self._receive()

    def _receive(self) -> None:
        try:
            data = self._sock.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            return
        self._lines.feed(data)
        self._take()

    def _take(self) -> None:
        """Handle whole lines, as many as fit one step; the rest waits for the next, and nothing is read till then."""
        self._busy = False
        for _ in range(LINES_PER_STEP):
            if self.closed or self._closing:
                return
            try:
                line = self._lines.take()
                if line is None:
                    break
                self._supervisor.take(self, parse_frame(line))
            except (FrameError, TypeError, ValueError, KeyError) as error:
                self.refuse("malformed", str(error)[:MESSAGE_CHARS], {})
        else:
            self._busy = True
            self._reactor.call_soon(self._take)
        self._mask()

    def take_rest(self) -> None:
        """Look again whether frames may be read: the worker has taken some of what waited for it."""
        self._mask()

    def refuse(self, code: str, message: str, frame: dict[str, Any]) -> None:
        told = only(frame, "id", "action", "call")
        self.answer({"t": "refused", "code": code, "message": message, "re": frame.get("t"), **told})
        if code in ("fenced", "malformed"):
            self._closing = True
            self.flush()

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        if self._patience is not None:
            self._patience.cancel()
        self._reactor.watch(self._sock.fileno(), 0, self._ready)
        self._sock.close()
        self._supervisor.disconnected(self)
