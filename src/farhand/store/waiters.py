"""Who waits for a log to grow. Any thread may announce growth; a waiter is woken in its own event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(eq=False, slots=True)
class Waiter:
    """One call of `wait`. Its future is resolved in the loop that made it."""

    session_id: str
    after_seq: int
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[None] = field(init=False)

    def __post_init__(self) -> None:
        self.future = self.loop.create_future()

    def finish(self, error: Exception | None) -> None:
        """From any thread. A loop that is closed has nobody left to wake."""
        try:
            self.loop.call_soon_threadsafe(self._settle, error)
        except RuntimeError:
            pass

    def _settle(self, error: Exception | None) -> None:
        if self.future.done():
            return
        if error is None:
            self.future.set_result(None)
        else:
            self.future.set_exception(error)


class Waiters:
    """The waiters of one store."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._waiting: dict[str, list[Waiter]] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, session_id: str, after_seq: int) -> Waiter:
        waiter = Waiter(session_id, after_seq, asyncio.get_running_loop())
        with self.changed:
            self._waiting.setdefault(session_id, []).append(waiter)
            self.changed.notify_all()
        return waiter

    def remove(self, waiter: Waiter) -> None:
        with self.changed:
            self._drop(waiter)

    def sessions(self) -> list[str]:
        with self.changed:
            return list(self._waiting)

    def grown(self, last_seqs: Mapping[str, int]) -> None:
        """The logs named reach that far, durably."""
        if not self._waiting:
            return
        with self.changed:
            ready = [waiter for session_id, seq in last_seqs.items() for waiter in self._passed(session_id, seq)]
            for waiter in ready:
                self._drop(waiter)
        for waiter in ready:
            waiter.finish(None)

    def _passed(self, session_id: str, last_seq: int) -> list[Waiter]:
        return [waiter for waiter in self._waiting.get(session_id, ()) if waiter.after_seq < last_seq]

    def _drop(self, waiter: Waiter) -> None:
        waiters = self._waiting.get(waiter.session_id, [])
        if waiter in waiters:
            waiters.remove(waiter)
        if not waiters:
            self._waiting.pop(waiter.session_id, None)

    def fail(self, error: Exception) -> None:
        """Nothing will be announced any more."""
        with self.changed:
            everybody = [waiter for waiters in self._waiting.values() for waiter in waiters]
            self._waiting.clear()
            self.changed.notify_all()
        for waiter in everybody:
            waiter.finish(error)
