"""A store that lives in this process and dies with it: for tests, and to try things without a folder."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType

from farhand.errors import Conflict, Held, SessionNotFound, StoreError
from farhand.event import SESSION_CLAIMED, SESSION_RELEASED, Event, NewEvent
from farhand.store.admission import (
    Draft,
    Lease,
    bounded,
    check_append,
    check_claim,
    check_created,
    check_generation,
    check_lease,
    check_lease_s,
    check_session_id,
    draft,
    drafts,
    new_session_id,
    renewed,
)
from farhand.store.derived import change_effects, effect_change, session_after
from farhand.store.port import EffectRow, SessionRow
from farhand.store.waiters import Waiters


@dataclass(slots=True)
class _Log:
    """One session: its events and their data as text, its derived rows, its lease."""

    events: list[Event] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    row: SessionRow | None = None
    effects: dict[str, EffectRow] = field(default_factory=dict)
    lease: Lease | None = None

    def derive(self, event: Event) -> None:
        self.row = session_after(self.row, event)
        self.effects = change_effects(self.effects, effect_change(event))


class MemoryStore:
    """See `store/port.py`. `clock` and `new_id` are given by tests. Safe for threads and for several event loops."""

    def __init__(self, *, clock: Callable[[], float] = time.time, new_id: Callable[[], str] = new_session_id) -> None:
        self._clock, self._new_id = clock, new_id
        self._logs: dict[str, _Log] = {}
        self._waiters = Waiters()
        self._lock = threading.RLock()
        self._closed = False

    async def __aenter__(self) -> MemoryStore:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def create(self, event: NewEvent, session_id: str | None = None) -> str:
        check_created(event)
        first = draft(event)
        chosen = self._new_id() if session_id is None else session_id
        check_session_id(chosen)
        with self._lock:
            self._check_open()
            if chosen in self._logs:
                raise Conflict(f"{chosen} exists already")
            self._logs[chosen] = _Log()
            self._extend(chosen, [first])
        return chosen

    async def append(
        self, session_id: str, after_seq: int | None, generation: int | None, events: Sequence[NewEvent]
    ) -> list[Event]:
        ready = drafts(after_seq, generation, events)
        with self._lock:
            check_append(self._row(session_id), after_seq, generation)
            return self._extend(session_id, ready)

    async def read(self, session_id: str, after_seq: int = 0, limit: int | None = None) -> list[Event]:
        with self._lock:
            log, first = self._log(session_id), max(after_seq, 0)
            last = len(log.events) if limit is None else first + max(limit, 0)
            # Read from the text, so that no reader can change the log through the data it was given.
            stored = zip(log.events[first:last], log.texts[first:last], strict=True)
            return [replace(event, data=json.loads(text)) for event, text in stored]

    async def wait(self, session_id: str, after_seq: int, timeout_s: float) -> bool:
        waiter = self._waiters.add(session_id, after_seq)
        try:
            with self._lock:
                if self._row(session_id).last_seq > after_seq:
                    return True
            async with asyncio.timeout(timeout_s):
                await waiter.future
            return True
        except TimeoutError:
            return False
        finally:
            self._waiters.remove(waiter)

    async def claim(
        self, session_id: str, owner: str, lease_s: float, gone: Callable[[str], bool] = lambda owner: False
    ) -> int:
        check_lease(owner, lease_s)
        claimed = draft(NewEvent(SESSION_CLAIMED, {"owner": owner, "lease_s": lease_s}))
        with self._lock:
            row, log, now = self._row(session_id), self._log(session_id), self._clock()
            if log.lease is not None:
                log.lease = bounded(log.lease, now)
            try:
                check_claim(row, log.lease, now, 0)
            except Held as held:
                if not gone(held.owner):
                    raise
            (event,) = self._extend(session_id, [claimed])
            log.lease = Lease(event.seq, owner, lease_s, now + lease_s)
            return event.seq

    async def renew(self, session_id: str, generation: int, lease_s: float) -> None:
        check_lease_s(lease_s)
        with self._lock:
            row, log = self._row(session_id), self._log(session_id)
            log.lease = renewed(row, log.lease, generation, self._clock(), lease_s)

    async def release(self, session_id: str, generation: int, reason: str) -> None:
        released = draft(NewEvent(SESSION_RELEASED, {"reason": reason}))
        with self._lock:
            check_generation(self._row(session_id), generation)
            self._extend(session_id, [released])
            self._log(session_id).lease = None

    async def sessions(self, limit: int = 100, status: str | None = None) -> list[SessionRow]:
        with self._lock:
            self._check_open()
            rows = [log.row for log in self._logs.values() if log.row is not None]
        if status is not None:
            rows = [row for row in rows if row.status == status]
        return sorted(rows, key=lambda row: (row.updated_at, row.session_id), reverse=True)[: max(limit, 0)]

    async def open_effects(self, session_id: str) -> list[EffectRow]:
        with self._lock:
            return sorted(self._log(session_id).effects.values(), key=lambda effect: (effect.seq, effect.effect_id))

    async def rebuild(self) -> None:
        with self._lock:
            self._check_open()
            for log in self._logs.values():
                log.row, log.effects = None, {}
                for event in log.events:
                    log.derive(event)

    async def close(self) -> None:
        self._closed = True
        self._waiters.fail(StoreError("the store was closed"))

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError("the store is closed")

    def _log(self, session_id: str) -> _Log:
        self._check_open()
        log = self._logs.get(session_id)
        if log is None:
            raise SessionNotFound(f"there is no session {session_id!r:.100}")
        return log

    def _row(self, session_id: str) -> SessionRow:
        row = self._log(session_id).row
        if row is None:
            raise SessionNotFound(f"session {session_id!r:.100} has no events")
        return row

    def _extend(self, session_id: str, ready: Sequence[Draft]) -> list[Event]:
        log, now = self._logs[session_id], self._clock()
        events = [one.at(session_id, len(log.events) + number, now) for number, one in enumerate(ready, 1)]
        for event in events:
            log.derive(event)
        log.events.extend(events)
        log.texts.extend(one.text for one in ready)
        self._waiters.grown({session_id: len(log.events)})
        return events
