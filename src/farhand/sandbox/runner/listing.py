"""A listing of the workspace, given out in parts."""

from __future__ import annotations

from collections import deque
from typing import Any

from farhand.sandbox.runner.bounds import LEFT_OUT_NAMED, LISTING_BYTES, LISTING_ENTRIES
from farhand.sandbox.runner.field import reason_of
from farhand.sandbox.runner.frame import FrameError
from farhand.sandbox.runner.link import Connection
from farhand.sandbox.runner.reactor import Reactor
from farhand.sandbox.runner.workspace import Batch, Files


class Listing:
    """A walk over the workspace, given out in parts that fit a frame; each step of the reactor takes one batch."""

    def __init__(self, reactor: Reactor, files: Files) -> None:
        self._reactor = reactor
        self._walk = files.walk()
        self._entries: deque[dict[str, Any]] = deque()
        self._left_out: list[dict[str, str]] = []
        self._left_count = 0
        self._over = False
        self._connection: Connection | None = None
        self.asked: Any = None
        self.given = 0
        self.cancelled = False

    def ask(self, connection: Connection, asked: Any) -> None:
        self._connection, self.asked = connection, asked if asked is not None else ""
        self._step()

    def _step(self) -> None:
        connection = self._connection
        if self.cancelled or connection is None or connection.closed:
            self._walk.close()
            return
        try:
            if not self._over and len(self._entries) < LISTING_ENTRIES:
                self._add(next(self._walk))
                self._reactor.call_soon(self._step)
                return
        except StopIteration:
            self._over = True
        except (OSError, FrameError) as error:
            connection.answer({"t": "files", "id": self.asked, "ok": False, "error": reason_of(error)})
            self.asked, self.cancelled = None, True
            return
        self._give(connection)

    def _add(self, batch: Batch) -> None:
        self._entries.extend(batch.entries)
        for left in batch.left_out:
            self._left_count += 1
            if self._left_count <= LEFT_OUT_NAMED:
                self._left_out.append(left)

    def _give(self, connection: Connection) -> None:
        part: list[dict[str, Any]] = []
        size = 0
        while self._entries and len(part) < LISTING_ENTRIES and size < LISTING_BYTES:
            part.append(self._entries.popleft())
            size += 200 + 6 * len(part[-1]["path"])
        self.given += len(part)
        more = self.given if self._entries or not self._over else None
        left_out, self._left_out = self._left_out, []
        if more is None and self._left_count > LEFT_OUT_NAMED:
            left_out.append({"path": "", "reason": f"{self._left_count - LEFT_OUT_NAMED:,} more are not named"})
        reply = {"t": "files", "id": self.asked, "ok": True, "entries": part, "more": more, "left_out": left_out}
        self.asked = None
        connection.answer(reply)
