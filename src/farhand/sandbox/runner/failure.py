"""Why an action failed: its traceback without our frames, the limit that was met, a hint."""

from __future__ import annotations

import errno
import os
import socket
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

from farhand import value
from farhand.sandbox.runner.bounds import MESSAGE_CHARS, TRACEBACK_CHARS
from farhand.sandbox.runner.field import error_fields
from farhand.sandbox.runner.text import clean, middle_cut
from farhand.sandbox.runner.tools import LimitReached

_OURS = (value.encode.__code__.co_filename, __file__[: __file__.rindex("/") + 1])
"""How the names of our own files begin."""
_NO_NETWORK = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN)


def _chain(problem: BaseException | None) -> Iterator[BaseException]:
    """An exception, its causes and contexts, and those that wrappers of connections carry in attributes."""
    waiting: list[Any] = [problem]
    seen: set[int] = set()
    while waiting and len(seen) < 50:
        found = waiting.pop()
        if not isinstance(found, BaseException) or id(found) in seen:
            continue
        seen.add(id(found))
        yield found
        waiting += [found.__cause__, found.__context__, getattr(found, "reason", None), *found.args[:3]]


def network_missing(problem: BaseException) -> bool:
    """Whether the failure is that of a connection, made in the box."""
    for found in _chain(problem):
        if getattr(found, "_farhand_tool", False):
            return False
        if isinstance(found, (socket.gaierror, ConnectionError)):
            return not isinstance(found, BrokenPipeError)
        if isinstance(found, OSError) and found.errno in _NO_NETWORK:
            return True
    return False


def _trimmed(report: Any) -> None:
    """Take our own frames out of a TracebackException and of all it is chained to."""
    waiting: list[Any] = [report]
    seen: set[int] = set()
    while waiting:
        found = waiting.pop()
        if found is None or id(found) in seen:
            continue
        seen.add(id(found))
        found.stack[:] = [frame for frame in found.stack if not frame.filename.startswith(_OURS)]
        waiting += [found.__cause__, found.__context__, *(getattr(found, "exceptions", None) or ())]


def traceback_of(problem: BaseException) -> str:
    """The traceback as Python prints it, without our frames, bounded."""
    try:
        report = traceback.TracebackException(type(problem), problem, problem.__traceback__)
        _trimmed(report)
        text = "".join(report.format())
    except Exception:
        text = f"{type(problem).__name__}: (its traceback cannot be shown)\n"
    return clean(middle_cut(text, TRACEBACK_CHARS))


def _message(problem: BaseException) -> str:
    try:
        return clean(middle_cut(str(problem), MESSAGE_CHARS - 200))
    except Exception:
        return "(its text cannot be shown)"


def error_of(problem: BaseException, tools: Sequence[str]) -> dict[str, Any]:
    """Why an action failed, as `done` says it."""
    error = error_fields("exception", _message(problem), type=type(problem).__name__[:200])
    if isinstance(problem, SystemExit):
        code = problem.code
        error["kind"], error["exit"] = "exit", code if isinstance(code, int) else 0 if code is None else 1
        return error
    error["traceback"] = traceback_of(problem)
    if isinstance(problem, KeyboardInterrupt):
        error["kind"] = "interrupted"
    elif getattr(problem, "_farhand_tool", False):
        if isinstance(problem, LimitReached) and "`tool_calls`" in error["message"]:
            error.update(kind="limit", limit="tool_calls")
    elif isinstance(problem, MemoryError):
        _limit_met(error, "memory_bytes", "Work on less at a time; the variables are still there.")
    elif isinstance(problem, OSError) and problem.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        _limit_met(error, _full_disk(), "Remove files that are not needed any more.")
    elif _too_many(problem, error["message"], error["traceback"]):
        _limit_met(error, "processes", "Start fewer processes and threads at a time.")
    elif network_missing(problem):
        error["hint"] = _network_hint(tools)
    if error["hint"]:
        error["traceback"] += f"Hint: {error['hint']}\n"
    return error


def _too_many(problem: BaseException, message: str, trace: str) -> bool:
    """Whether a process or thread could not be started because there are as many as there may be."""
    if isinstance(problem, BlockingIOError):
        return problem.errno == errno.EAGAIN and "fork" in trace
    return isinstance(problem, RuntimeError) and message == "can't start new thread"


def _limit_met(error: dict[str, Any], limit: str, hint: str) -> None:
    error["message"] = f"the limit `{limit}` was reached: {error['message'] or error['type']}"
    error.update(kind="limit", limit=limit, hint=hint)


def _full_disk() -> str:
    try:
        return "disk_files" if os.statvfs(".").f_favail == 0 else "disk_bytes"
    except OSError:
        return "disk_bytes"


def _network_hint(tools: Sequence[str]) -> str:
    listed = ", ".join(sorted(tools)[:30])
    instead = f"Call a tool instead: {listed}." if listed else "No tool is available that could reach it."
    return f"There is no network in this box. {instead}"
