"""Sessions as they stand in the record, for the commands that only read it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from farhand import event as ev
from farhand import registry
from farhand.errors import SessionNotFound
from farhand.event import Event
from farhand.home import farhand_home
from farhand.limits import READ_PAGE_EVENTS
from farhand.session import unpack
from farhand.store.port import Blobs, SessionRow, Store

LAST = "last"
LOOKED_BACK = 20
"""Events at the end of a log among which a turn's end is looked for."""
NAMED_MOST = 100_000
"""Sessions among which an id's beginning is looked for."""


@asynccontextmanager
async def opened() -> AsyncIterator[tuple[Store, Blobs]]:
    home = farhand_home()
    store = registry.store(home)
    try:
        yield store, registry.blobs(home)
    finally:
        await store.close()


async def rows(limit: int) -> list[tuple[SessionRow, str]]:
    """The newest sessions, and how the last turn of each stands."""
    async with opened() as (store, _):
        return [(row, await last_turn(store, row)) for row in await store.sessions(limit)]


async def find(store: Store, name: str) -> str:
    """The id that `name` means: an id, the beginning of exactly one, or `last`."""
    if name == LAST:
        newest = await store.sessions(1)
        if not newest:
            raise SessionNotFound("there is no session yet", hint="farhand run TASK makes one.")
        return newest[0].session_id
    return _only(name, [row.session_id for row in await store.sessions(NAMED_MOST)])


def _only(name: str, ids: Sequence[str]) -> str:
    if name in ids:
        return name
    found = [one for one in ids if name and (one.startswith(name) or one.removeprefix("ses_").startswith(name))]
    if len(found) == 1:
        return found[0]
    if not found:
        raise SessionNotFound(f"no session is called {name!r}", hint="farhand sessions lists them.")
    several = ", ".join(found[:5]) + (", …" if len(found) > 5 else "")
    raise SessionNotFound(f"{name!r} begins {len(found)} sessions: {several}", hint="Give more of the id.")


async def events(store: Store, blobs: Blobs, session_id: str, until: int | None = None) -> AsyncIterator[Event]:
    """The log in order, large fields read back; up to the event before `until`."""
    seq = 0
    while page := await store.read(session_id, seq, READ_PAGE_EVENTS):
        for event in page:
            if until is not None and event.seq >= until:
                return
            yield await unpack(blobs, event)
        seq = page[-1].seq


async def last_turn(store: Store, row: SessionRow) -> str:
    """How the session stands: `answered`, `failed` with the code, or its row's status where no turn has ended."""
    if row.status not in ("idle", "failed"):
        return row.status
    for event in reversed(await store.read(row.session_id, max(row.last_seq - LOOKED_BACK, 0), LOOKED_BACK)):
        if event.type == ev.TURN_ANSWERED:
            return "answered"
        if event.type == ev.TURN_FAILED:
            error = event.data.get("error")
            code = (error.get("limit") or error.get("code")) if isinstance(error, Mapping) else None
            return f"failed {code}" if code else "failed"
    return row.status
