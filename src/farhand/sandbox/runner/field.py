"""Fields of frames: read, each of the type and size that it has to have, or made. FrameError says what is wrong."""

from __future__ import annotations

import re
from typing import Any

from farhand.sandbox.runner.bounds import BUNDLE_TYPES, FRAME_BYTES, MESSAGE_CHARS, NAME_CHARS, TRACEBACK_CHARS
from farhand.sandbox.runner.frame import FrameError


def text_field(frame: dict[str, Any], name: str, most: int = FRAME_BYTES) -> str:
    found = frame.get(name)
    if not isinstance(found, str) or len(found) > most:
        raise FrameError(f"a {frame['t']} frame whose {name!r} is no text of at most {most:,} characters")
    return found


def whole_field(frame: dict[str, Any], name: str) -> int:
    found = frame.get(name)
    if type(found) is not int or not 0 <= found < 1 << 53:
        raise FrameError(f"a {frame['t']} frame whose {name!r} is no number")
    return found


def bundle_field(frame: dict[str, Any], name: str) -> dict[str, str]:
    found = frame.get(name)
    if not isinstance(found, dict) or len(found) > BUNDLE_TYPES:
        raise FrameError(f"a {frame['t']} frame whose {name!r} is no bundle")
    for kind, text in found.items():
        if not isinstance(text, str) or len(kind) > NAME_CHARS:
            raise FrameError(f"a {frame['t']} frame whose {name!r} holds what is no text")
    return found


_CALL = re.compile(r"c[1-9][0-9]{0,14}\Z")


def call_number(call: str) -> int:
    """The number in a call's id; 0 when it is none."""
    return int(call[1:]) if _CALL.match(call) else 0


def only(found: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: found[name] for name in names if name in found}


def reason_of(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) and error.strerror else str(error))[:500]


def error_fields(kind: str, message: str, **more: Any) -> dict[str, Any]:
    empty = {"kind": kind, "type": "", "message": message, "traceback": "", "hint": "", "limit": None, "exit": None}
    return {**empty, **more}


_WORKER_KINDS = frozenset(("exception", "exit", "syntax", "limit", "interrupted"))
_BOX_LIMITS = frozenset(("memory_bytes", "processes", "disk_bytes", "disk_files", "tool_calls"))


def checked_error(found: Any) -> dict[str, Any]:
    """A worker's word on why an action failed, with every field of its type and size."""
    if not isinstance(found, dict) or found.get("kind") not in _WORKER_KINDS:
        raise FrameError("the end of an action without a known kind of error")
    error = error_fields(found["kind"], "")
    for name, most in (("type", 200), ("message", MESSAGE_CHARS), ("traceback", 2 * TRACEBACK_CHARS), ("hint", 2000)):
        text = found.get(name)
        if isinstance(text, str):
            error[name] = text[:most]
    if error["kind"] == "limit":
        if found.get("limit") not in _BOX_LIMITS:
            raise FrameError("a limit that no worker can meet")
        error["limit"] = found["limit"]
    if error["kind"] == "exit":
        code = found.get("exit")
        error["exit"] = code if type(code) is int and abs(code) < 1 << 31 else 1
    return error
