"""The record: append-only logs of sessions, their claims, and rows derived from them.

The contract, which `tests/contract/test_store.py` holds against every adapter:

*Append.* `append(session_id, after_seq, generation, events)` is atomic and durable: when it returns, all events stand
in the log with consecutive numbers, and survive the loss of power; when it raises, none does. Concurrent calls are
ordered. With `after_seq=None, generation=None` events of `event.ANYONE` go to the end; any other type raises
UsageError. Otherwise `generation` must be the seq of the newest `session.claimed` (else Fenced; also Fenced when it
was released), and nothing may stand after `after_seq` (else Conflict). Fenced goes before Conflict. An event whose
JSON is larger than EVENT_BYTES, or is no JSON, raises UsageError; so do more than APPEND_EVENTS events, one of the
two numbers without the other, and the three types that have a verb of their own. A call that is cancelled while it
waits may still be committed. The one case in which a call that raised may stand all the same is a disk that failed in
the commit (StoreError); the next `read` shows it. `create` writes the first event, `session.created`, under a new id;
under an id that exists it raises Conflict. Events carry the time of the store's clock as it was; `seq` is the order,
also when the clock went back.

*Claim.* `claim` appends `session.claimed` and returns its generation if no claim stands, or the last one was
released, or its lease has run out by the store's clock, or `gone(owner)` says its process is provably gone; else
Held, which names the owner and the seconds left. `renew` extends the lease row (no event) and raises Fenced when a
newer claim stands. `release` appends `session.released` and raises Fenced when a newer claim stands. Both raise
Fenced for a claim that was released. A lease that ran out is renewed, and appends under it go on, as long as nobody
else claimed. A lease never has more than its own length left when another process asks, wherever the clock was set.

*Read.* `read` gives events in order, from any process, including those other processes appended. `wait` returns as
soon as the log is longer than `after_seq`, at once for appends of this process and within 50 ms for those of others;
False after the timeout. What can be read is durable. A session that does not exist raises SessionNotFound, in every
verb.

*Derived rows.* `sessions()`, newest change first and of one status only if asked, and `open_effects()`, in the order
of the log, read rows written in the transaction of the events; `rebuild()` makes them again from the logs and gives
the same. Status: a message makes the session waiting, or running while a claim stands; a claim makes waiting running
and a release makes running waiting; the end of a turn makes it idle, failed or cancelled. A running session whose
driver died stays running until somebody claims it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from farhand.event import Event, NewEvent


@dataclass(frozen=True, slots=True)
class SessionRow:
    """What scans read. `status` is idle, waiting (a message nobody drives yet), running, failed or cancelled."""

    session_id: str
    created_at: float
    updated_at: float
    last_seq: int
    status: str
    title: str
    agent: str
    input_tokens: int
    output_tokens: int
    generation: int
    """Seq of the standing claim; 0 when there is none or it was released."""


@dataclass(frozen=True, slots=True)
class EffectRow:
    """An effect that is not settled, or settled as unknown and not reconciled. `outcome` is intended or unknown."""

    session_id: str
    effect_id: str
    tool: str
    digest: str
    outcome: str
    seq: int


class Store(Protocol):
    """See the module's text for the contract."""

    async def create(self, event: NewEvent, session_id: str | None = None) -> str: ...

    async def append(
        self, session_id: str, after_seq: int | None, generation: int | None, events: Sequence[NewEvent]
    ) -> list[Event]: ...

    async def read(self, session_id: str, after_seq: int = 0, limit: int | None = None) -> list[Event]: ...

    async def wait(self, session_id: str, after_seq: int, timeout_s: float) -> bool: ...

    async def claim(
        self, session_id: str, owner: str, lease_s: float, gone: Callable[[str], bool] = lambda owner: False
    ) -> int: ...

    async def renew(self, session_id: str, generation: int, lease_s: float) -> None: ...

    async def release(self, session_id: str, generation: int, reason: str) -> None: ...

    async def sessions(self, limit: int = 100, status: str | None = None) -> list[SessionRow]: ...

    async def open_effects(self, session_id: str) -> list[EffectRow]: ...

    async def rebuild(self) -> None: ...

    async def close(self) -> None: ...


class Blobs(Protocol):
    """Content by hash. `put` returns only when the bytes are fsynced; the name is the SHA-256 in hexadecimal."""

    async def put(self, data: bytes) -> str: ...

    async def get(self, name: str) -> bytes:
        """The bytes, verified against their name; BlobMissing otherwise."""
        ...

    async def has(self, name: str) -> bool: ...
