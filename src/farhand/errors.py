"""Every error Farhand raises, in one tree.

    FarhandError
    ├── UsageError                  the caller asked for something that cannot be
    │   ├── ToolDeclarationError    a function that cannot be a tool
    │   └── NestedLoopError         a synchronous call inside a running event loop
    ├── StoreError
    │   ├── Conflict                events came in between: read on, append again
    │   ├── Fenced                  a newer claim stands: stop
    │   ├── Held                    somebody else drives the session
    │   ├── SessionNotFound
    │   └── BlobMissing
    ├── ModelError
    │   ├── ModelUnavailable        no connection, 5xx, overloaded
    │   ├── ModelRateLimited
    │   ├── ModelRefused            key, permission, content or request refused
    │   └── ModelProtocolError      the reply breaks the wire's rules
    ├── SandboxError
    │   ├── SandboxUnavailable      no wall of the kind asked for can stand here
    │   ├── SandboxLost             the box is gone
    │   ├── EnvironmentFailed       packages could not be installed
    │   └── ProtocolViolation       a frame that breaks the protocol
    ├── ToolError
    │   ├── ToolFailed              a tool's own word that nothing happened
    │   ├── ToolArgumentError       (also TypeError) wrong arguments
    │   ├── ToolTimedOut
    │   └── OutcomeUnknown          an earlier call may or may not have happened
    ├── LimitReached                a named bound of `limits.Limits`
    ├── TurnFailed                  the agent gave no answer; `.result` holds what there is
    └── Interrupted                 stopped by a person

`code` is stable and goes on the wire, `hint` says what the person can do, `retryable` whether the same call may work
later.
"""

from __future__ import annotations

from typing import ClassVar


class FarhandError(Exception):
    """Something Farhand could not do."""

    code: ClassVar[str] = "error"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  {self.hint}" if self.hint else self.message


class UsageError(FarhandError):
    """The call itself is wrong."""

    code = "usage"


class ToolDeclarationError(UsageError):
    """The function cannot be a tool."""

    code = "tool_declaration"


class NestedLoopError(UsageError):
    """A synchronous method was called inside a running event loop."""

    code = "nested_loop"


class StoreError(FarhandError):
    """The record refused or failed."""

    code = "store"


class Conflict(StoreError):
    """Other events came in between: read on and append again."""

    code = "conflict"
    retryable = True


class Fenced(StoreError):
    """A newer claim stands in the log: this driver must stop."""

    code = "fenced"


class Held(StoreError):
    """Another process drives this session: `owner`, whose lease ends in `left_s` seconds."""

    code = "held"
    retryable = True

    def __init__(self, message: str, *, owner: str = "", left_s: float = 0.0, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.owner = owner
        self.left_s = left_s


class SessionNotFound(StoreError):
    """No session has this id."""

    code = "session_not_found"


class BlobMissing(StoreError):
    """An event names a blob that is not stored."""

    code = "blob_missing"


class ModelError(FarhandError):
    """The model gave no usable reply."""

    code = "model"


class ModelUnavailable(ModelError):
    """The model's server cannot be reached or is overloaded."""

    code = "model_unavailable"
    retryable = True


class ModelRateLimited(ModelError):
    """The model's server asks to slow down."""

    code = "model_rate_limited"
    retryable = True


class ModelRefused(ModelError):
    """The model's server refused the request."""

    code = "model_refused"


class ModelProtocolError(ModelError):
    """The reply breaks the rules of the wire."""

    code = "model_protocol"
    retryable = True


class SandboxError(FarhandError):
    """A box could not do what was asked."""

    code = "sandbox"


class SandboxUnavailable(SandboxError):
    """No wall of the kind asked for can stand on this machine."""

    code = "sandbox_unavailable"


class SandboxLost(SandboxError):
    """The box is gone."""

    code = "sandbox_lost"
    retryable = True


class EnvironmentFailed(SandboxError):
    """The packages of an environment could not be installed."""

    code = "environment_failed"


class ProtocolViolation(SandboxError):
    """A frame that breaks the protocol."""

    code = "protocol_violation"


class ToolError(FarhandError):
    """A tool call did not give a value."""

    code = "tool"


class ToolFailed(ToolError):
    """The tool's own word that it failed and nothing happened."""

    code = "tool_failed"


class ToolArgumentError(ToolError, TypeError):
    """The arguments do not fit the tool's signature."""

    code = "tool_arguments"


class ToolTimedOut(ToolError):
    """The tool gave no value in its time."""

    code = "tool_timed_out"


class OutcomeUnknown(ToolError):
    """An earlier call with these arguments may or may not have taken effect."""

    code = "outcome_unknown"


class LimitReached(FarhandError):
    """A named bound was reached; `limit` is its name in `Limits`."""

    code = "limit"

    def __init__(self, message: str, *, limit: str, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.limit = limit


class TurnFailed(FarhandError):
    """The turn ended without an answer."""

    code = "turn_failed"

    def __init__(self, message: str, *, hint: str = "", reason: str = "") -> None:
        super().__init__(message, hint=hint)
        self.reason = reason


class Interrupted(FarhandError):
    """A person stopped it."""

    code = "interrupted"
