"""The facts a session's log is made of, version 1.

An event is a type, a version, a time and at most 16 KiB of JSON. A field that would be larger is a `Ref` to a blob,
stored
before the event. Unknown types are kept and ignored. Later versions add types and fields; they change none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

Json: TypeAlias = "bool | int | float | str | list[Any] | dict[str, Any] | None"
Data: TypeAlias = Mapping[str, Any]

VERSION: Final = 1

SESSION_CREATED: Final = "session.created"
"""agent (reference), tools [{name, signature, effect}], limits {…}, environment {…}, sandbox, model, title,
instructions."""
SESSION_CLAIMED: Final = "session.claimed"
"""owner, lease_s. Its seq is the generation."""
SESSION_RELEASED: Final = "session.released"
"""reason."""
SESSION_FORKED: Final = "session.forked"
SESSION_REWOUND: Final = "session.rewound"
SESSION_SPAWNED: Final = "session.spawned"
MESSAGE_RECEIVED: Final = "message.received"
"""role ("user"), text, sender (principal). Starts a turn when none is open."""
CANCEL_REQUESTED: Final = "cancel.requested"
"""reason, sender, turn|None (none: whatever turn is open)."""
MODEL_REQUESTED: Final = "model.requested"
"""step, attempt, model, dialect ("fenced" | "tool"), seen (seq the request was derived from)."""
MODEL_REPLIED: Final = "model.replied"
"""step, text, calls [{id, name, arguments}], finish, usage {input_tokens, output_tokens}, model."""
MODEL_FAILED: Final = "model.failed"
"""step, attempt, error {code, message, hint, retryable}."""
ACTION_STARTED: Final = "action.started"
"""action, step, code, box. Committed before the box is told to run it."""
ACTION_WROTE: Final = "action.wrote"
"""action, box, frame, chunks [[stream, text]…], cut_bytes, displays [{mime: data}…],
answers [{value, repr, problem}…]. Output of one stretch of an action."""
ACTION_FINISHED: Final = "action.finished"
"""action, box, frame, ok, value {mime: text}|None, answer {value, text}|None,
error {kind, type, message, traceback, hint, limit, exit}|None, usage {wall_s, cpu_s, peak_memory_bytes},
output {bytes, cut_bytes, displays_cut}, lost [names], files [{path, size, sha256} | {path, removed}],
left_out [[path, reason]…]."""
EFFECT_INTENDED: Final = "effect.intended"
"""effect, action, call, frame, box, tool, class, arguments, digest, n, key, attempt. Committed before the tool
starts."""
EFFECT_SETTLED: Final = "effect.settled"
"""effect, call, outcome ("done" | "failed" | "unknown" | "never_started"), value|None, error|None, seconds."""
EFFECT_RECONCILED: Final = "effect.reconciled"
"""effect, outcome, value|None, by."""
APPROVAL_REQUESTED: Final = "approval.requested"
APPROVAL_GIVEN: Final = "approval.given"
APPROVAL_REFUSED: Final = "approval.refused"
APPROVAL_EXPIRED: Final = "approval.expired"
SANDBOX_REQUESTED: Final = "sandbox.requested"
"""request, provider, environment."""
SANDBOX_CREATED: Final = "sandbox.created"
"""box, request, provider. Appended when the session's files are in the box."""
SANDBOX_SUSPENDED: Final = "sandbox.suspended"
SANDBOX_RESUMED: Final = "sandbox.resumed"
SANDBOX_LOST: Final = "sandbox.lost"
"""box, reason ("ended" by its own action | "outside"), lost [names]."""
SANDBOX_DESTROYED: Final = "sandbox.destroyed"
"""box."""
WORKSPACE_SAVED: Final = "workspace.saved"
VARIABLES_SAVED: Final = "variables.saved"
MEMORY_WRITTEN: Final = "memory.written"
LIMIT_REACHED: Final = "limit.reached"
"""limit (a field of Limits), allowed, action|None, message."""
TURN_ANSWERED: Final = "turn.answered"
"""turn, answer {value (tagged), text}."""
TURN_FAILED: Final = "turn.failed"
"""turn, error {code, message, hint}."""
TURN_CANCELLED: Final = "turn.cancelled"
"""turn, reason, lost [names]."""

TYPES: Final = frozenset(v for k, v in list(globals().items()) if k.isupper() and isinstance(v, str) and "." in v)

ANYONE: Final = frozenset(
    {
        MESSAGE_RECEIVED,
        CANCEL_REQUESTED,
        EFFECT_RECONCILED,
        APPROVAL_REQUESTED,
        APPROVAL_GIVEN,
        APPROVAL_REFUSED,
        APPROVAL_EXPIRED,
    }
)
"""Types that need no claim: appended with `after_seq=None, generation=None`, at the end."""


@dataclass(frozen=True, slots=True)
class NewEvent:
    """A fact not yet in the log."""

    type: str
    data: Data


@dataclass(frozen=True, slots=True)
class Event:
    """A fact in the log of `session_id`, numbered from 1 without gaps. `time` is seconds since the epoch, by the
    store's clock."""

    session_id: str
    seq: int
    type: str
    version: int
    time: float
    data: Data

    def to_json(self) -> dict[str, Any]:
        """The form that `--json` prints and the wire carries."""
        return {
            "session": self.session_id,
            "seq": self.seq,
            "type": self.type,
            "version": self.version,
            "time": self.time,
            "data": dict(self.data),
        }
