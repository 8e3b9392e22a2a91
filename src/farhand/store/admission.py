"""What may enter a log: the rules of append and claim, without any storage. Both adapters ask here.

A rule raises or returns nothing. Each is a function of its own, so that a test can turn one off and see the suite fail.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from farhand.errors import Conflict, Fenced, Held, StoreError, UsageError
from farhand.event import ANYONE, SESSION_CLAIMED, SESSION_CREATED, SESSION_RELEASED, VERSION, Event, NewEvent
from farhand.limits import APPEND_EVENTS, EVENT_BYTES, NAME_CHARS
from farhand.store.port import SessionRow

_SESSION_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_TYPE = re.compile(r"[a-z][a-z0-9_.]{0,63}")
_OWNER = re.compile(rf"[!-~]{{1,{NAME_CHARS}}}")
_OWN_VERB = {SESSION_CREATED: "create", SESSION_CLAIMED: "claim", SESSION_RELEASED: "release"}
_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"


@dataclass(frozen=True, slots=True)
class Draft:
    """An event that may be stored: `text` is its JSON in ASCII, `data` what reading that text gives."""

    type: str
    text: str
    data: dict[str, Any]

    def at(self, session_id: str, seq: int, now: float) -> Event:
        return Event(session_id, seq, self.type, VERSION, now, self.data)


@dataclass(frozen=True, slots=True)
class Lease:
    """The row beside the log: until when, by the store's clock, the claim `generation` keeps others out."""

    generation: int
    owner: str
    lease_s: float
    ends_at: float


def new_session_id() -> str:
    """`ses_` and 20 characters: 50 bits of time in milliseconds, so that newer ids sort later, and 50 random ones."""
    number = (int(time.time() * 1000) & (1 << 50) - 1) << 50 | secrets.randbits(50)
    return "ses_" + "".join(_ALPHABET[number >> shift & 31] for shift in range(95, -1, -5))


def _named(pattern: re.Pattern[str], value: object) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None


def draft(event: NewEvent) -> Draft:
    """The event as text. UsageError when it is no JSON, larger than EVENT_BYTES, or its type is no dotted name."""
    if not _named(_TYPE, event.type):
        raise UsageError(
            f"{event.type!r:.100} is no event type", hint="A type is a dotted name such as message.received."
        )
    try:
        text = json.dumps(dict(event.data), separators=(",", ":"), allow_nan=False)
        data: dict[str, Any] = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"the data of {event.type} is not JSON: {error}") from error
    check_size(event.type, len(text))
    return Draft(event.type, text, data)


def check_size(type_: str, size_bytes: int) -> None:
    if size_bytes > EVENT_BYTES:
        raise UsageError(
            f"{type_} has {size_bytes} bytes of data; an event holds at most {EVENT_BYTES}",
            hint="Store the large field as a blob and name it in the event.",
        )


def drafts(after_seq: int | None, generation: int | None, events: Sequence[NewEvent]) -> list[Draft]:
    """The events of one append as text, after the checks that need no log."""
    if (after_seq is None) != (generation is None):
        raise UsageError("after_seq and generation are given together, or neither")
    if len(events) > APPEND_EVENTS:
        raise UsageError(f"one append holds at most {APPEND_EVENTS} events, not {len(events)}")
    for event in events:
        if event.type in _OWN_VERB:
            raise UsageError(f"{event.type} is written by {_OWN_VERB[event.type]}, not by append")
        if generation is None:
            check_anyone(event.type)
    return [draft(event) for event in events]


def check_anyone(type_: str) -> None:
    if type_ not in ANYONE:
        raise UsageError(f"{type_} needs a claim", hint="Claim the session and append with after_seq and generation.")


def check_append(row: SessionRow, after_seq: int | None, generation: int | None) -> None:
    """Fenced before Conflict: a driver that lost its claim must stop, however far it has read."""
    if after_seq is None or generation is None:
        return
    check_generation(row, generation)
    check_position(row, after_seq)


def check_generation(row: SessionRow, generation: int) -> None:
    if generation < 1 or generation != row.generation:
        standing = f"claim {row.generation} stands" if row.generation else "no claim stands"
        raise Fenced(f"{row.session_id}: claim {generation} is no longer the newest: {standing}")


def check_position(row: SessionRow, after_seq: int) -> None:
    if after_seq < row.last_seq:
        raise Conflict(f"{row.session_id}: events {after_seq + 1} to {row.last_seq} came in between")
    if after_seq > row.last_seq:
        raise StoreError(
            f"{row.session_id}: the log ends at {row.last_seq}, but the caller has read up to {after_seq}",
            hint="The record is older than this process: was it restored from a copy?",
        )


def check_claim(row: SessionRow, lease: Lease | None, now: float, gone_generation: int) -> None:
    """Held while a claim stands and its lease runs, unless the caller found the owner of just that claim gone."""
    if row.generation == 0 or row.generation == gone_generation:
        return
    if lease is not None and lease.generation == row.generation and now < lease.ends_at:
        left_s = lease.ends_at - now
        raise Held(
            f"{row.session_id} is driven by {lease.owner}, whose lease ends in {left_s:.1f} s",
            owner=lease.owner,
            left_s=left_s,
            hint="A message sent to it is in its log, and that process takes it up; or wait until it has ended.",
        )


def bounded(lease: Lease, now: float) -> Lease:
    """The lease with no more than its own length left. More is left only when the clock went back; without this bound
    a dead driver would keep its session closed for as long as the clock was set back."""
    return replace(lease, ends_at=min(lease.ends_at, now + lease.lease_s))


def renewed(row: SessionRow, lease: Lease | None, generation: int, now: float, lease_s: float) -> Lease:
    """The lease of claim `generation`, from now on. One that ran out is renewed too, as long as nobody else claimed."""
    check_generation(row, generation)
    if lease is None or lease.generation != generation:
        raise Fenced(f"{row.session_id}: claim {generation} has no lease")
    return Lease(generation, lease.owner, lease_s, now + lease_s)


def is_session_id(session_id: object) -> bool:
    return _named(_SESSION_ID, session_id)


def check_session_id(session_id: str) -> None:
    """A session's id is also the name of its folder."""
    if not is_session_id(session_id):
        raise UsageError(f"{session_id!r:.100} is no session id: letters, digits, - and _ only, at most 64")


def check_created(event: NewEvent) -> None:
    if event.type != SESSION_CREATED:
        raise UsageError(f"a log begins with {SESSION_CREATED}, not with {event.type!r:.100}")


def check_lease(owner: str, lease_s: float) -> None:
    if not _named(_OWNER, owner):
        raise UsageError(f"{owner!r:.100} is no owner: printable ASCII without blanks, at most {NAME_CHARS} characters")
    check_lease_s(lease_s)


def check_lease_s(lease_s: float) -> None:
    if not 0 < lease_s < float("inf"):
        raise UsageError(f"a lease lasts more than 0 seconds, not {lease_s}")
