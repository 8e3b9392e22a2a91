"""Output of one action on its way into the log: gathered for 250 ms or 64 KiB, 256 KiB kept, head and tail, the rest
counted."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from farhand import event as ev
from farhand.errors import SandboxLost
from farhand.event import NewEvent
from farhand.limits import WROTE_BYTES, WROTE_INTERVAL_S, WROTE_KEPT_BYTES
from farhand.sandbox.hand import Hand
from farhand.sandbox.port import Frame
from farhand.session import Session

TAIL_BYTES = 32 * 1024
HEAD_BYTES = WROTE_KEPT_BYTES // 2


class Recorder:
    """Turns `out`, `display` and `answer` frames of an action into `action.wrote` events, and acknowledges them.

    Beyond HEAD_BYTES only the newest TAIL_BYTES are held back, unacknowledged; what falls out of them is counted.
    The tail is written when a frame of another kind follows it, while WROTE_KEPT_BYTES allow, and at the end always.
    """

    def __init__(self, session: Session, action: str, hand: Hand, answered: bool = False) -> None:
        self._session, self._action, self._hand = session, action, hand
        self._answered = answered
        self._chunks: list[list[str]] = []
        self._displays: list[Any] = []
        self._answers: list[dict[str, Any]] = []
        self._tail: deque[tuple[int, str, str]] = deque()
        self._size = self._kept = self._tail_size = self._cut = self._gap = self._frame = self._told = 0
        self._error: Exception | None = None
        self._lock = asyncio.Lock()
        self._timer: asyncio.Task[None] | None = None

    async def add(self, frame: Frame) -> None:
        if frame["t"] == "out":
            self._out(frame["n"], frame["stream"], frame["text"])
        else:
            self._settle_tail(last=False)
            self._frame = frame["n"]
            if frame["t"] == "display":
                self._displays.append(frame["bundle"])
                self._size += sum(len(str(data)) for data in frame["bundle"].values())
            else:
                self._answer(frame)
        if self._size >= WROTE_BYTES:
            await self.flush()
        elif self._timer is None:
            self._timer = asyncio.create_task(self._later())

    def _answer(self, frame: Frame) -> None:
        """The first one counts, so only its value is kept: as lists it can be twenty times as large as its frame."""
        given = None if self._answered else frame.get("value")
        self._answered = True
        self._answers.append({"value": given, "repr": frame["repr"], "problem": frame.get("problem")})
        self._size += len(frame["repr"])

    def _out(self, number: int, stream: str, text: str) -> None:
        if self._kept + len(text) <= HEAD_BYTES and not self._tail:
            self._write(number, stream, text)
            return
        self._tail.append((number, stream, text))
        self._tail_size += len(text)
        while self._tail_size > TAIL_BYTES and len(self._tail) > 1:
            self._drop_oldest()

    def _write(self, number: int, stream: str, text: str) -> None:
        if self._chunks and self._chunks[-1][0] == stream:
            self._chunks[-1][1] += text
        else:
            self._chunks.append([stream, text])
        self._kept += len(text)
        self._size += len(text)
        self._frame = number

    def _drop_oldest(self) -> None:
        self._frame, _, old = self._tail.popleft()
        self._tail_size -= len(old)
        self._cut += len(old)
        self._gap += len(old)

    def _settle_tail(self, last: bool) -> None:
        """Write the tail, the cut before it announced; or count it too when it is not the last and there is no room."""
        if not last and self._kept + self._tail_size > WROTE_KEPT_BYTES - TAIL_BYTES:
            while self._tail:
                self._drop_oldest()
        if self._gap and self._tail:
            self._write(self._frame, "stdout", f"\n[… {self._gap:,} characters of output cut …]\n")
            self._gap = 0
        for number, stream, text in self._tail:
            self._write(number, stream, text)
        self._tail.clear()
        self._tail_size = 0

    async def _later(self) -> None:
        await asyncio.sleep(WROTE_INTERVAL_S)
        self._timer = None
        try:
            await self.flush()
        except Exception as error:  # raised again by the next flush
            self._error = error

    async def before_call(self) -> None:
        """Everything before a call's frame must be in the log, written or counted, when the call is."""
        self._settle_tail(last=False)
        await self.flush()

    async def logged(self, number: int) -> None:
        """The frame of a call is in the log."""
        self._frame = self._told = number
        await self._acknowledge()

    async def finish(self) -> None:
        """Write all there is."""
        self._settle_tail(last=True)
        await self.flush()

    async def flush(self) -> None:
        """Write down and acknowledge what is not held back. That the box is gone its reader finds out, not this."""
        if self._error is not None:
            raise self._error
        async with self._lock:
            if self._frame > self._told or self._chunks or self._answers or self._displays:
                await self._write_down()
                await self._acknowledge()

    async def _write_down(self) -> None:
        data = {
            "action": self._action,
            "box": self._hand.box_id,
            "frame": self._frame,
            "chunks": self._chunks,
            "cut_bytes": self._cut,
            "displays": self._displays,
            "answers": self._answers,
        }
        self._chunks, self._displays, self._answers = [], [], []
        self._size = self._cut = 0
        told = self._frame
        await self._session.append(NewEvent(ev.ACTION_WROTE, data))
        self._told = max(self._told, told)

    async def _acknowledge(self) -> None:
        try:
            await self._hand.ack(self._told)
        except SandboxLost:
            return

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            await asyncio.gather(self._timer, return_exceptions=True)
            self._timer = None
