"""The one thread that writes a SQLite record. What waits while one transaction is committed goes into the next."""

from __future__ import annotations

import asyncio
import os
import queue
import sqlite3
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from farhand.errors import FarhandError, StoreError
from farhand.limits import GROUP_COMMIT_EVENTS, WAL_PAGES, WRITES_WAITING
from farhand.store.connection import Connection, Turn, explained, open_for_writing

T = TypeVar("T")

_JOB_PAGES = 4
"""Pages of the log that one small job writes, about: its session's events, its row, the roots above."""
_PAGE_BYTES = 4096


class Transaction:
    """What a job sees: the connection inside the group's transaction, and a place to say which logs it made longer."""

    def __init__(self, connection: Connection) -> None:
        self.db = connection
        self.grown: dict[str, int] = {}


@dataclass(eq=False, slots=True)
class Job:
    """One call that waits. `work` runs in the writer's thread; its result counts only after the commit."""

    work: Callable[[Transaction], Any]
    events: int
    size_bytes: int
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]
    result: Any = None
    error: Exception | None = None


class Writer:
    """Takes jobs from any event loop of this process. `commits` counts the transactions that wrote something."""

    def __init__(
        self, path: Path, clock: Callable[[], float], busy_s: float, grown: Callable[[Mapping[str, int]], None]
    ) -> None:
        self.commits = 0
        self._path, self._clock, self._busy_s, self._grown = path, clock, busy_s, grown
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._turn = Turn(path, busy_s)
        self._connection: Connection | None = None
        self._thread: threading.Thread | None = None
        self._gate = threading.Lock()
        self._closed = False
        self._pid = os.getpid()
        self._wal_pages = 0

    async def submit(self, work: Callable[[Transaction], T], events: int = 1, size_bytes: int = 0) -> T:
        """The result of `work`, once it is durable. A call cancelled while it waits is committed nevertheless."""
        loop = asyncio.get_running_loop()
        job = Job(work, events, size_bytes, loop, loop.create_future())
        self.check_process()
        with self._gate:
            self._check_usable()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="farhand-writer", daemon=True)
                self._thread.start()
            self._queue.put(job)
        result: T = await job.future
        return result

    def check_process(self) -> None:
        """StoreError in a forked child: neither threads nor connections survive a fork."""
        if os.getpid() != self._pid:
            raise StoreError("the store was opened before a fork", hint="Open the store in the process that uses it.")

    def _check_usable(self) -> None:
        if self._closed:
            raise StoreError("the store is closed")
        if self._queue.qsize() >= WRITES_WAITING:
            raise StoreError(f"{WRITES_WAITING} writes wait for the disk already", hint="Try again later.")

    def close(self) -> None:
        """Returns when everything submitted before is committed and the file is closed. Twice is no error."""
        with self._gate:
            first, self._closed = not self._closed, True
            if first:
                self._queue.put(None)
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        going = True
        while going:
            jobs, going = self._next_group()
            if not jobs:
                continue
            grown = self._commit(jobs)
            _settle_all(jobs)
            self._grown(grown)
            del jobs
            self._checkpoint()
        self._end()

    def _next_group(self) -> tuple[list[Job], bool]:
        """The job that came first and those that came meanwhile; False after the last one."""
        job = self._queue.get()
        jobs: list[Job] = []
        events = 0
        while job is not None:
            jobs.append(job)
            events += job.events
            if events >= GROUP_COMMIT_EVENTS:
                return jobs, True
            try:
                job = self._queue.get_nowait()
            except queue.Empty:
                return jobs, True
        return jobs, False

    def _commit(self, jobs: list[Job]) -> dict[str, int]:
        """Do the jobs in one transaction and fill in their outcome; gives the logs that are longer now."""
        try:
            with self._turn:
                try:
                    return self._transact(jobs)
                except BaseException:
                    self._drop()  # a connection that failed is not used again
                    raise
        except BaseException as error:
            # Nothing of this group stands, whatever kind of failure it was; the thread goes on.
            for job in jobs:
                job.error = _as_store_error(error, self._path)
            return {}

    def _transact(self, jobs: list[Job]) -> dict[str, int]:
        db = self._opened()
        before = db.raw.total_changes
        db.raw.execute("BEGIN IMMEDIATE")
        grown: dict[str, int] = {}
        for job in jobs:
            grown.update(_perform(db, job))
        if db.raw.total_changes == before:
            db.raw.execute("ROLLBACK")
            return {}
        db.check_place()
        db.raw.execute("COMMIT")
        self.commits += 1
        self._wal_pages += sum(_JOB_PAGES + job.size_bytes // _PAGE_BYTES for job in jobs)
        return grown

    def _opened(self) -> Connection:
        if self._connection is None:
            self._connection = open_for_writing(self._path, self._busy_s, self._clock())
            wal = self._path.with_name(self._path.name + "-wal")
            self._wal_pages = wal.stat().st_size // _PAGE_BYTES if wal.exists() else 0
        return self._connection

    def _checkpoint(self) -> None:
        # After the callers have their answer, and rather when nobody waits.
        due = self._wal_pages >= (WAL_PAGES if self._queue.empty() else 4 * WAL_PAGES)
        if not due or self._connection is None:
            return
        self._wal_pages = 0
        try:
            with self._turn:
                self._connection.checkpoint()
        except (sqlite3.Error, StoreError, OSError):
            pass  # the log keeps what was not copied, and a disk that fails shows in the next commit

    def _end(self) -> None:
        try:
            with self._turn:
                self._drop()
        except (StoreError, OSError):
            self._drop()  # somebody keeps the turn: leave without
        self._turn.close()

    def _drop(self) -> None:
        """Close the connection. The last one of all processes copies the write-ahead log into the file."""
        connection, self._connection = self._connection, None
        if connection is not None:
            try:
                connection.close()
            except sqlite3.Error:
                pass  # what was committed stands in the write-ahead log


def _perform(db: Connection, job: Job) -> dict[str, int]:
    """One job, all or nothing: a savepoint of its own keeps its failure from the others."""
    transaction = Transaction(db)
    db.raw.execute("SAVEPOINT job")
    try:
        job.result = job.work(transaction)
    except sqlite3.IntegrityError as error:
        job.error = explained(error, db.path)
        job.error.hint = "The rows derived from the log do not fit it: rebuild them (`store.rebuild()`)."
    except (sqlite3.DataError, sqlite3.InterfaceError, sqlite3.ProgrammingError) as error:
        job.error = explained(error, db.path)
    except sqlite3.Error:
        raise  # the file or the disk: the whole group fails
    except Exception as error:
        job.error = error
    if job.error is None:
        db.raw.execute("RELEASE job")
        return transaction.grown
    db.raw.execute("ROLLBACK TO job")
    db.raw.execute("RELEASE job")
    return {}


def _as_store_error(error: BaseException, path: Path) -> Exception:
    if isinstance(error, FarhandError):
        return type(error)(error.message, hint=error.hint)
    shown = explained(error if isinstance(error, Exception) else RuntimeError(repr(error)), path)
    shown.__cause__ = error
    return shown


def _settle_all(jobs: list[Job]) -> None:
    """One call into each event loop, whatever number of its tasks wait."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Job]] = {}
    for job in jobs:
        by_loop.setdefault(job.loop, []).append(job)
    for loop, theirs in by_loop.items():
        try:
            loop.call_soon_threadsafe(_settle, theirs)
        except RuntimeError:
            pass  # that loop is closed: nobody waits any more


def _settle(jobs: list[Job]) -> None:
    for job in jobs:
        if job.future.done():
            continue
        if job.error is None:
            job.future.set_result(job.result)
        else:
            job.future.set_exception(job.error)
