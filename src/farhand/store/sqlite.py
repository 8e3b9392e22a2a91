"""The record in one SQLite file: WAL, synchronous=FULL, one writing thread a process, any number of processes.

What `append` acknowledged survives `kill -9` and the loss of power, as far as the disk keeps what it says it has
flushed. The folder needs a local disk: the log's index is shared memory. A store must not be used in a forked child.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from farhand.errors import Conflict, Held, SessionNotFound, StoreError
from farhand.event import SESSION_CLAIMED, SESSION_RELEASED, Event, NewEvent
from farhand.limits import READ_CONNECTIONS, READ_PAGE_EVENTS, SQLITE_BUSY_S, WAIT_POLL_S
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
    is_session_id,
    new_session_id,
    renewed,
)
from farhand.store.connection import Connection, explained
from farhand.store.derived import (
    EffectChange,
    EffectClosed,
    EffectUnknown,
    change_effects,
    effect_change,
    session_after,
)
from farhand.store.port import EffectRow, SessionRow
from farhand.store.waiters import Waiters
from farhand.store.writer import Transaction, Writer

T = TypeVar("T")

_SESSION_FIELDS = tuple(field.name for field in fields(SessionRow))
_EFFECT_FIELDS = tuple(field.name for field in fields(EffectRow))
_LEASE_FIELDS = tuple(field.name for field in fields(Lease))
_EVERYTHING = -1


class SqliteStore:
    """See `store/port.py`. The file is made or opened by the first call. `clock` and `new_id` are given by tests."""

    def __init__(
        self,
        path: Path | str,
        *,
        clock: Callable[[], float] = time.time,
        new_id: Callable[[], str] = new_session_id,
        busy_s: float = SQLITE_BUSY_S,
    ) -> None:
        self.path = Path(path).absolute()
        self._clock, self._new_id = clock, new_id
        self._waiters = Waiters()
        self._writer = Writer(self.path, clock, busy_s, self._waiters.grown)
        self._readers = _Readers(self.path, busy_s)
        self._watch = _Watch(self.path, busy_s, self._waiters)

    @property
    def commits(self) -> int:
        """Transactions that this store has committed."""
        return self._writer.commits

    async def __aenter__(self) -> SqliteStore:
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

        def work(transaction: Transaction) -> str:
            if transaction.db.one("session", session_id=chosen) is not None:
                raise Conflict(f"{chosen} exists already")
            self._extend(transaction, chosen, None, [first])
            return chosen

        return await self._writer.submit(work, size_bytes=len(first.text))

    async def append(
        self, session_id: str, after_seq: int | None, generation: int | None, events: Sequence[NewEvent]
    ) -> list[Event]:
        ready = drafts(after_seq, generation, events)

        def work(transaction: Transaction) -> list[Event]:
            row = _row(transaction.db, session_id)
            check_append(row, after_seq, generation)
            return self._extend(transaction, session_id, row, ready)

        return await self._writer.submit(work, len(ready), sum(len(one.text) for one in ready))

    async def read(self, session_id: str, after_seq: int = 0, limit: int | None = None) -> list[Event]:
        def work(db: Connection) -> list[Event]:
            events = _events(db, session_id, max(after_seq, 0), limit)
            if not events:
                _row(db, session_id)  # nothing that new, or no such session
            return events

        return await self._read(work)

    async def wait(self, session_id: str, after_seq: int, timeout_s: float) -> bool:
        waiter = self._waiters.add(session_id, after_seq)
        try:
            if (await self._read(lambda db: _row(db, session_id))).last_seq > after_seq:
                return True
            self._watch.start()
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
        gone_generation = 0
        while True:
            attempt = partial(
                self._claim,
                session_id=session_id,
                owner=owner,
                lease_s=lease_s,
                claimed=claimed,
                gone_generation=gone_generation,
            )
            outcome = await self._writer.submit(attempt)
            if isinstance(outcome, int):
                return outcome
            held, generation = outcome
            # Asked outside the transaction. The answer is about one claim; if that is no longer the newest, ask again.
            if generation == gone_generation or not await asyncio.to_thread(gone, held.owner):
                raise held
            gone_generation = generation

    def _claim(
        self,
        transaction: Transaction,
        *,
        session_id: str,
        owner: str,
        lease_s: float,
        claimed: Draft,
        gone_generation: int,
    ) -> int | tuple[Held, int]:
        row, lease, now = _row(transaction.db, session_id), _lease(transaction.db, session_id), self._clock()
        if lease is not None and lease != bounded(lease, now):
            lease = bounded(lease, now)
            _put_lease(transaction.db, session_id, lease)
        try:
            check_claim(row, lease, now, gone_generation)
        except Held as held:
            return held, row.generation
        (event,) = self._extend(transaction, session_id, row, [claimed])
        _put_lease(transaction.db, session_id, Lease(event.seq, owner, lease_s, now + lease_s))
        return event.seq

    async def renew(self, session_id: str, generation: int, lease_s: float) -> None:
        check_lease_s(lease_s)

        def work(transaction: Transaction) -> None:
            row, lease = _row(transaction.db, session_id), _lease(transaction.db, session_id)
            _put_lease(transaction.db, session_id, renewed(row, lease, generation, self._clock(), lease_s))

        await self._writer.submit(work)

    async def release(self, session_id: str, generation: int, reason: str) -> None:
        released = draft(NewEvent(SESSION_RELEASED, {"reason": reason}))

        def work(transaction: Transaction) -> None:
            row = _row(transaction.db, session_id)
            check_generation(row, generation)
            self._extend(transaction, session_id, row, [released])
            transaction.db.do("drop_lease", {"session_id": session_id})

        await self._writer.submit(work)

    async def sessions(self, limit: int = 100, status: str | None = None) -> list[SessionRow]:
        name = "sessions" if status is None else "sessions_by_status"
        values: dict[str, Any] = {"limit": max(limit, 0)} | ({} if status is None else {"status": status})
        return await self._read(lambda db: [SessionRow(*row) for row in db.all(name, **values)])

    async def open_effects(self, session_id: str) -> list[EffectRow]:
        def work(db: Connection) -> list[EffectRow]:
            _row(db, session_id)
            return [EffectRow(*row) for row in db.all("effects", session_id=session_id)]

        return await self._read(work)

    async def rebuild(self) -> None:
        """One transaction a session, so that others are kept waiting for no longer than the longest log takes."""
        for (session_id,) in await self._read(lambda db: db.all("logs")):
            await self._writer.submit(partial(_rebuild, session_id=session_id))

    async def pragmas(self) -> dict[str, object]:
        """What the writing connection runs with, as SQLite says it itself."""
        names = ("journal_mode", "synchronous", "foreign_keys", "wal_autocheckpoint", "busy_timeout")
        return await self._writer.submit(lambda transaction: {name: transaction.db.pragma(name) for name in names})

    async def close(self) -> None:
        self._waiters.fail(StoreError("the store was closed"))
        await asyncio.to_thread(self._close)
        self._waiters.fail(StoreError("the store was closed"))  # who came while it closed

    def _close(self) -> None:
        self._watch.close()
        self._readers.close()
        self._writer.close()

    async def _read(self, work: Callable[[Connection], T]) -> T:
        self._writer.check_process()
        try:
            return await self._readers.run(work)
        except _NotMade:
            await self._writer.submit(lambda transaction: None)  # makes the file and its tables
            return await self._readers.run(work)

    def _extend(
        self, transaction: Transaction, session_id: str, row: SessionRow | None, ready: Sequence[Draft]
    ) -> list[Event]:
        """Write the events and what they change in the derived rows."""
        db, now, last = transaction.db, self._clock(), 0 if row is None else row.last_seq
        events = [one.at(session_id, last + number, now) for number, one in enumerate(ready, 1)]
        if not events:
            return events
        db.do_many("put_event", [_stored(event, one) for event, one in zip(events, ready, strict=True)])
        for event in events:
            row = session_after(row, event)
        if row is not None:
            db.do("put_session", {name: getattr(row, name) for name in _SESSION_FIELDS})
        for event in events:
            _change_effects(db, session_id, effect_change(event))
        transaction.grown[session_id] = events[-1].seq
        return events


def _stored(event: Event, ready: Draft) -> dict[str, Any]:
    return {
        "session_id": event.session_id,
        "seq": event.seq,
        "type": event.type,
        "version": event.version,
        "time": event.time,
        "data": ready.text,
    }


def _row(db: Connection, session_id: str) -> SessionRow:
    found = db.one("session", session_id=session_id) if is_session_id(session_id) else None
    if found is None:
        raise SessionNotFound(f"there is no session {session_id!r:.100}")
    return SessionRow(*found)


def _lease(db: Connection, session_id: str) -> Lease | None:
    found = db.one("lease", session_id=session_id)
    return None if found is None else Lease(*found)


def _put_lease(db: Connection, session_id: str, lease: Lease) -> None:
    db.do("put_lease", {"session_id": session_id} | {name: getattr(lease, name) for name in _LEASE_FIELDS})


def _change_effects(db: Connection, session_id: str, change: EffectChange | None) -> None:
    if isinstance(change, EffectRow):
        db.do("put_effect", {name: getattr(change, name) for name in _EFFECT_FIELDS})
    elif isinstance(change, EffectUnknown):
        db.do("mark_effect", {"session_id": session_id, "effect_id": change.effect_id})
    elif isinstance(change, EffectClosed):
        db.do("drop_effect", {"session_id": session_id, "effect_id": change.effect_id})


def _events(db: Connection, session_id: str, after_seq: int, limit: int | None) -> list[Event]:
    most = _EVERYTHING if limit is None else max(limit, 0)
    if not is_session_id(session_id):
        return []
    found = db.all("events", session_id=session_id, after_seq=after_seq, limit=most)
    return [
        Event(session_id, seq, type_, version, time_, json.loads(data)) for seq, type_, version, time_, data in found
    ]


def _rebuild(transaction: Transaction, session_id: str) -> None:
    db = transaction.db
    row: SessionRow | None = None
    effects: dict[str, EffectRow] = {}
    while page := _events(db, session_id, 0 if row is None else row.last_seq, READ_PAGE_EVENTS):
        for event in page:
            row, effects = session_after(row, event), change_effects(effects, effect_change(event))
    db.do("drop_effects", {"session_id": session_id})
    if row is None:
        db.do("drop_lease", {"session_id": session_id})
        db.do("drop_session", {"session_id": session_id})
        return
    db.do("put_session", {name: getattr(row, name) for name in _SESSION_FIELDS})
    for effect in effects.values():
        _change_effects(db, session_id, effect)


class _NotMade(Exception):
    """The file is not there, or its schema is not up to date. The writer sees to that."""


class _Readers:
    """A few threads, each with a connection of its own while it reads."""

    def __init__(self, path: Path, busy_s: float) -> None:
        self._path, self._busy_s = path, busy_s
        self._pool = ThreadPoolExecutor(READ_CONNECTIONS, thread_name_prefix="farhand-reader")
        self._idle: deque[Connection] = deque()

    async def run(self, work: Callable[[Connection], T]) -> T:
        try:
            waiting = asyncio.get_running_loop().run_in_executor(self._pool, self._call, work)
        except RuntimeError as error:  # the pool is shut down
            raise StoreError("the store is closed") from error
        return await waiting

    def _call(self, work: Callable[[Connection], T]) -> T:
        try:
            try:
                connection = self._idle.pop()
            except IndexError:
                connection = self._connection()
            try:
                return work(connection)
            finally:
                self._idle.append(connection)
        except sqlite3.Error as error:
            raise explained(error, self._path) from error

    def _connection(self) -> Connection:
        if not self._path.exists():
            raise _NotMade
        connection = Connection(self._path, self._busy_s)
        if not connection.complete:
            connection.close()
            raise _NotMade
        return connection

    def close(self) -> None:
        self._pool.shutdown(wait=True)
        while self._idle:
            self._idle.pop().close()


class _Watch:
    """A thread that looks for what other processes appended, while somebody waits; else it sleeps."""

    def __init__(self, path: Path, busy_s: float, waiters: Waiters) -> None:
        self._path, self._busy_s, self._waiters = path, busy_s, waiters
        self._thread: threading.Thread | None = None
        self._closed = False

    def start(self) -> None:
        with self._waiters.changed:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="farhand-watch", daemon=True)
                self._thread.start()

    def close(self) -> None:
        with self._waiters.changed:
            self._closed = True
            self._waiters.changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        connection: Connection | None = None
        while not self._closed:
            try:
                connection = connection or Connection(self._path, self._busy_s)
                self._look(connection)
            except (sqlite3.Error, StoreError, OSError) as error:
                if connection is not None:
                    connection.close()
                connection = None
                self._waiters.fail(error if isinstance(error, StoreError) else explained(error, self._path))
            with self._waiters.changed:
                while not self._waiters and not self._closed:
                    self._waiters.changed.wait()
        if connection is not None:
            connection.close()

    def _look(self, connection: Connection) -> None:
        """Until nobody waits. `data_version` changes with every commit of another connection, and asking is cheap."""
        seen: Any = None
        while self._waiters and not self._closed:
            version = connection.pragma("data_version")
            if version != seen:
                seen = version
                self._waiters.grown(self._lengths(connection))
            with self._waiters.changed:
                self._waiters.changed.wait(WAIT_POLL_S)

    def _lengths(self, connection: Connection) -> dict[str, int]:
        found = {name: connection.one("last_seq", session_id=name) for name in self._waiters.sessions()}
        return {name: row[0] for name, row in found.items() if row is not None}
