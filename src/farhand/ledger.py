"""The ledger of effects: how one is named, what an exception says about it, what an interrupted one becomes. Pure."""

from __future__ import annotations

import hashlib

from farhand.errors import ToolFailed
from farhand.state import Effect, State

DONE, FAILED, UNKNOWN, NEVER = "done", "failed", "unknown", "never_started"
REPEATABLE = frozenset({"pure", "idempotent", "keyed"})

_RECEIPTS = (ToolFailed, ValueError, TypeError, LookupError, FileNotFoundError, PermissionError)
"""Exceptions that say: nothing happened. Any other is no receipt."""


def effect_id(session_id: str, action: str, tool: str, digest: str, n: int) -> str:
    """Stable over re-runs: the n-th call of this tool with these bound arguments in this action of this session."""
    text = "\0".join((session_id, action, tool, digest, str(n)))
    return "eff_" + hashlib.sha256(text.encode()).hexdigest()[:24]


def outcome_of(error: BaseException, effect_class: str) -> str:
    """What is known of an effect whose tool raised `error`."""
    if isinstance(error, _RECEIPTS) or effect_class in REPEATABLE:
        return FAILED
    return UNKNOWN


def blocked_by(state: State, effect: Effect) -> Effect | None:
    """The effect in doubt that forbids starting this one: same tool, same bound arguments, opaque."""
    if effect.effect_class in REPEATABLE:
        return None
    other = state.unknown(effect.tool, effect.digest)
    return other if other is not None and other.id != effect.id else None


def may_run_again(effect: Effect) -> bool:
    """Whether an interrupted effect, intended and not settled, may be started again."""
    return effect.effect_class in REPEATABLE
