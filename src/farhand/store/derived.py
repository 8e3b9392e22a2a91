"""The rows derived from a log: what one event changes in them. Pure; adapters apply it in the event's transaction.

A log's fields are read with care: whatever is missing or of the wrong kind leaves the row as it was.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from farhand import event as kind
from farhand.event import Event
from farhand.limits import NAME_CHARS, TITLE_CHARS
from farhand.store.port import EffectRow, SessionRow

IDLE = "idle"
WAITING = "waiting"
RUNNING = "running"
FAILED = "failed"
CANCELLED = "cancelled"

_TURN_ENDS = {kind.TURN_ANSWERED: IDLE, kind.TURN_FAILED: FAILED, kind.TURN_CANCELLED: CANCELLED}
_MOST = 2**53
_NOT_SHOWN = frozenset({"Cc", "Cf", "Cs"})
"""Control, format and lone surrogate characters: a database or a terminal would take them for something else."""
_LOOK_AHEAD = 20
"""How many times its bound is looked at of a text whose blanks are joined."""


@dataclass(frozen=True, slots=True)
class EffectUnknown:
    """The effect, if it is open, stays open: nobody knows its outcome."""

    effect_id: str


@dataclass(frozen=True, slots=True)
class EffectClosed:
    """The effect has an outcome."""

    effect_id: str


EffectChange: TypeAlias = EffectRow | EffectUnknown | EffectClosed


def session_after(row: SessionRow | None, event: Event) -> SessionRow:
    """The session's row after `event`; `row` is None before the first."""
    if row is None:
        row = SessionRow(event.session_id, event.time, event.time, 0, IDLE, "", "", 0, 0, 0)
    row = replace(row, updated_at=event.time, last_seq=event.seq)
    if event.type == kind.SESSION_CREATED:
        return replace(row, agent=_line(event.data.get("agent"), NAME_CHARS), title=_title(event.data.get("title")))
    if event.type == kind.MESSAGE_RECEIVED:
        status = RUNNING if row.generation else WAITING
        return replace(row, status=status, title=row.title or _title(event.data.get("text")))
    if event.type == kind.SESSION_CLAIMED:
        return replace(row, generation=event.seq, status=RUNNING if row.status == WAITING else row.status)
    if event.type == kind.SESSION_RELEASED:
        return replace(row, generation=0, status=WAITING if row.status == RUNNING else row.status)
    if event.type == kind.MODEL_REPLIED:
        usage = event.data.get("usage")
        return replace(
            row,
            input_tokens=min(row.input_tokens + _count(usage, "input_tokens"), _MOST),
            output_tokens=min(row.output_tokens + _count(usage, "output_tokens"), _MOST),
        )
    return replace(row, status=_TURN_ENDS.get(event.type, row.status))


def effect_change(event: Event) -> EffectChange | None:
    """What `event` does to the open effects."""
    if event.type not in (kind.EFFECT_INTENDED, kind.EFFECT_SETTLED, kind.EFFECT_RECONCILED):
        return None
    effect_id = _line(event.data.get("effect"), NAME_CHARS)
    if not effect_id:
        return None
    if event.type == kind.EFFECT_INTENDED:
        tool, digest = (_line(event.data.get(name), NAME_CHARS) for name in ("tool", "digest"))
        return EffectRow(event.session_id, effect_id, tool, digest, "intended", event.seq)
    return EffectUnknown(effect_id) if event.data.get("outcome") == "unknown" else EffectClosed(effect_id)


def change_effects(effects: Mapping[str, EffectRow], change: EffectChange | None) -> dict[str, EffectRow]:
    """The open effects of one session, by id, after `change`."""
    after = dict(effects)
    if isinstance(change, EffectRow):
        after[change.effect_id] = change
    elif isinstance(change, EffectUnknown) and change.effect_id in after:
        after[change.effect_id] = replace(after[change.effect_id], outcome="unknown")
    elif isinstance(change, EffectClosed):
        after.pop(change.effect_id, None)
    return after


def _count(usage: Any, name: str) -> int:
    value = usage.get(name) if isinstance(usage, dict) else None
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST else 0


def _title(value: Any) -> str:
    return _line(value, TITLE_CHARS)


def _line(value: Any, most: int) -> str:
    """One line of at most `most` characters that any database and terminal takes; a cut ends in an ellipsis."""
    if not isinstance(value, str):
        return ""
    shown = "".join(" " if unicodedata.category(c) in _NOT_SHOWN else c for c in value[: most * _LOOK_AHEAD])
    line = " ".join(shown.split())
    return line if len(line) <= most else line[: most - 1] + "…"
