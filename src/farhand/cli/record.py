"""Sessions as they stand in the record, for the commands that only read it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from farhand import registry
from farhand.errors import SessionNotFound
from farhand.event import Event
from farhand.home import farhand_home
from farhand.limits import READ_PAGE_EVENTS
from farhand.session import unpack
from farhand.store.port import Blobs, SessionRow, Store

LAST = "last"
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


async def rows(limit: int) -> list[SessionRow]:
    async with opened() as (store, _):
        return await store.sessions(limit)


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


async def events(store: Store, blobs: Blobs, session_id: str) -> AsyncIterator[Event]:
    """The whole log in order, large fields read back."""
    seq = 0
    while page := await store.read(session_id, seq, READ_PAGE_EVENTS):
        for event in page:
            yield await unpack(blobs, event)
        seq = page[-1].seq
