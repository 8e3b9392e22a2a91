"""Exit codes, and what is said when a command ends in an error."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from typing import Final

from farhand.cli.advice import for_command_line
from farhand.cli.terminal import is_terminal, sanitise
from farhand.errors import FarhandError, Interrupted, LimitReached, UsageError

OK: Final = 0
FAILED: Final = 1
USAGE: Final = 2
LIMIT: Final = 3
INTERRUPTED: Final = 130


_STOPS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C, a polite kill, the terminal that was closed: none of them may leave a box behind."""


def on_stop(stop: Callable[[], object]) -> None:
    """In the running loop: the first of these signals calls `stop`, the next one leaves at once."""
    stopping = False

    def handle() -> None:
        nonlocal stopping
        if stopping:
            os._exit(INTERRUPTED)
        stopping = True
        stop()

    for number in _STOPS:
        asyncio.get_running_loop().add_signal_handler(number, handle)


def code_of(error: BaseException) -> int:
    match error:
        case UsageError():
            return USAGE
        case LimitReached():
            return LIMIT
        case Interrupted() | KeyboardInterrupt():
            return INTERRUPTED
        case _:
            return FAILED


def say(text: str) -> None:
    """A message on standard error; guests' words in it do no harm there."""
    print(sanitise(text) if is_terminal(sys.stderr) else text, file=sys.stderr, flush=True)


def report(error: BaseException) -> int:
    """Say what went wrong, give the exit code. An error that is none of ours is a defect and keeps its traceback."""
    if isinstance(error, BrokenPipeError):
        return leave_quietly()
    if isinstance(error, FarhandError):
        hint = for_command_line(error.hint)
        say(f"farhand: {error.message}" + (f"\n  {hint}" if hint else ""))
    elif not isinstance(error, KeyboardInterrupt):
        raise error
    return code_of(error)


def leave_quietly() -> int:
    """The reader of our output has gone: nothing more is written, not even at the interpreter's end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
    return FAILED
