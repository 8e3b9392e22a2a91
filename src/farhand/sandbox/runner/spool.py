"""Numbered frames that the harness has not acknowledged."""

from __future__ import annotations

from typing import Any

from farhand.sandbox.runner.bounds import READ_BYTES, SPOOL_BYTES
from farhand.sandbox.runner.frame import dump_frame


class Spool:
    """Numbered frames that are not acknowledged yet."""

    def __init__(self) -> None:
        self.first, self.last, self.size = 1, 0, 0
        self._lines: dict[int, bytes] = {}

    @property
    def room(self) -> bool:
        return self.size < SPOOL_BYTES

    def add(self, frame: dict[str, Any]) -> None:
        line = dump_frame({**frame, "n": self.last + 1})
        self.last += 1
        self._lines[self.last] = line
        self.size += len(line)

    def drop(self, through: int) -> None:
        for n in range(self.first, min(through, self.last) + 1):
            self.size -= len(self._lines.pop(n))
            self.first = n + 1

    def batch(self, after: int) -> tuple[bytes, int]:
        """Lines from `after` on, about READ_BYTES of them, and the last one's number."""
        lines: list[bytes] = []
        size = 0
        while after < self.last and size < READ_BYTES:
            after += 1
            lines.append(self._lines[after])
            size += len(lines[-1])
        return b"".join(lines), after
