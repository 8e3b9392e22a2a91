"""A session as this process sees it: its log read and folded, and appends that survive other people's.

Fields of an event larger than INLINE_BYTES are kept as blobs: the stored event names them in `$refs` and holds {sha256,
bytes} in their place. Everything handed out by a Session has them resolved.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from farhand.errors import Conflict
from farhand.event import Event, NewEvent
from farhand.limits import EVENT_BYTES, INLINE_BYTES, READ_PAGE_EVENTS
from farhand.state import State, apply
from farhand.store.port import Blobs, Store

REFS = "$refs"


def _dump(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")


def is_inline(event: NewEvent) -> bool:
    """Whether the event is stored as it is, without blobs."""
    return len(_dump(dict(event.data))) <= INLINE_BYTES


async def pack(blobs: Blobs, event: NewEvent) -> NewEvent:
    """The event with its large fields stored as blobs (fsynced when this returns)."""
    whole = _dump(dict(event.data))
    if len(whole) <= INLINE_BYTES:
        return event
    sizes = {name: _dump(value) for name, value in event.data.items()}
    data, refs, total = dict(event.data), [], len(whole)
    for name in sorted(sizes, key=lambda name: -len(sizes[name])):
        if len(sizes[name]) <= INLINE_BYTES and total <= EVENT_BYTES - 1024:
            break
        data[name] = {"sha256": await blobs.put(sizes[name]), "bytes": len(sizes[name])}
        total -= len(sizes[name])
        refs.append(name)
    return NewEvent(event.type, {**data, REFS: refs}) if refs else event


async def unpack(blobs: Blobs, event: Event) -> Event:
    """The event with its blobs read back. BlobMissing when one is not there."""
    refs = event.data.get(REFS)
    if not refs:
        return event
    data = {name: value for name, value in event.data.items() if name != REFS}
    for name in refs:
        data[name] = json.loads(await blobs.get(str(data[name]["sha256"])))
    return replace(event, data=data)


class Session:
    """One session's log. Not safe for threads; any number of tasks of one loop may append."""

    def __init__(self, store: Store, blobs: Blobs, session_id: str) -> None:
        self.store, self.blobs, self.id = store, blobs, session_id
        self.state = State(session_id)
        self.generation: int | None = None
        self._lock = asyncio.Lock()
        self._listeners: list[Callable[[Event], None]] = []

    def listen(self, listener: Callable[[Event], None]) -> Callable[[], None]:
        """`listener` is called with every event from here on, in order, right after it is folded. Returns what ends
        that."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    async def catch_up(self, beyond: int | None = None) -> bool:
        """Read and fold what came since. With `beyond`, only if nothing after that seq has been folded by the time that
        appends under way are; False if it was."""
        async with self._lock:
            if beyond is not None and self.state.seq > beyond:
                return False
            await self._read_on()
            return True

    async def _read_on(self) -> None:
        while True:
            events = await self.store.read(self.id, self.state.seq, READ_PAGE_EVENTS)
            await self._take(events)
            if len(events) < READ_PAGE_EVENTS:
                return

    async def _take(self, events: Sequence[Event]) -> list[Event]:
        taken = []
        for event in events:
            whole = await unpack(self.blobs, event)
            apply(self.state, whole)
            taken.append(whole)
            for listener in list(self._listeners):
                listener(whole)
        return taken

    @property
    def appending(self) -> bool:
        """Whether somebody's append is under way: the next one waits for it."""
        return self._lock.locked()

    async def append(self, *events: NewEvent) -> list[Event]:
        """Append under this driver's claim, all or none. Fenced when a newer claim stands."""
        packed = [await pack(self.blobs, event) for event in events]
        async with self._lock:
            while True:
                try:
                    stored = await self.store.append(self.id, self.state.seq, self.generation, packed)
                except Conflict:
                    await self._read_on()
                    continue
                whole = [replace(event, data=given.data) for event, given in zip(stored, events, strict=True)]
                return await self._take(whole)

    async def post(self, *events: NewEvent) -> list[Event]:
        """Append events that anybody may append, at the end."""
        packed = [await pack(self.blobs, event) for event in events]
        stored = await self.store.append(self.id, None, None, packed)
        if self.state.seq:  # who follows this log shall not wait for the next look at it
            await self.catch_up()
        return stored
