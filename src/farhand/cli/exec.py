"""`farhand exec`: a program of cells in a box, without a model."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from farhand import registry
from farhand.cli.exits import INTERRUPTED, on_stop
from farhand.cli.progress import Progress
from farhand.cli.terminal import Output
from farhand.cli.toolfile import load_tools
from farhand.errors import UsageError
from farhand.exec import CellEvent, ProgramResult, run_cells, split_cells
from farhand.home import farhand_home
from farhand.limits import MIB, Limits
from farhand.sandbox.environment import DEFAULT, build
from farhand.sandbox.imports import allowed
from farhand.sandbox.port import Sandbox
from farhand.tool import Tool


@dataclass(frozen=True, slots=True)
class Program:
    """The command line of `farhand exec`."""

    file: str
    sandbox: str = "local"
    tools: str | None = None
    timeout_s: float | None = None
    memory_mb: int | None = None


def execute(program: Program) -> int:
    home = farhand_home()
    source = read_source(program.file)
    tools = load_tools(program.tools)
    sandbox = registry.sandbox(program.sandbox, home)
    # Built here because it takes a minute the first time, and a person wants to see why.
    with Progress() as progress:
        build(DEFAULT, home, progress)
    return asyncio.run(_run(sandbox, source, tools, limits_of(program)))


def read_source(name: str) -> str:
    """The program's text. UsageError says what is wrong with the file."""
    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        source = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{name}: it is not UTF-8 text: {error.reason} at byte {error.start}") from error
    except OSError as error:
        raise UsageError(f"{name}: {error.strerror}") from error
    except ValueError as error:  # a null byte in the name
        raise UsageError(f"{name!r}: {error}") from error
    if not split_cells(source):
        raise UsageError(f"{name}: there is nothing to run in it")
    return source


def limits_of(program: Program) -> Limits:
    limits = Limits()
    if program.timeout_s is not None:
        # Threads use more processor time than passes on the clock: the clock is the limit that was asked for.
        limits = replace(limits, wall_s=program.timeout_s, cpu_s=max(limits.cpu_s, program.timeout_s))
    if program.memory_mb is not None:
        limits = replace(limits, memory_bytes=program.memory_mb * MIB)
    return limits


async def _run(sandbox: Sandbox, source: str, tools: Sequence[Tool], limits: Limits) -> int:
    screen = Screen()
    main = asyncio.current_task()
    assert main is not None
    on_stop(main.cancel)
    try:
        result = await run_cells(
            sandbox,
            source,
            tools=tools,
            limits=limits,
            environment=DEFAULT,
            imports=allowed(DEFAULT),
            on_event=screen.event,
        )
    except asyncio.CancelledError:
        screen.stop()
        return INTERRUPTED
    finally:
        await sandbox.close()
    screen.end(result)
    return result.exit_code


class Screen:
    """Standard output carries what the cells print, `=> ` values and FINAL lines; standard error the rest."""

    def __init__(self) -> None:
        self._out, self._err = Output(sys.stdout), Output(sys.stderr)

    def event(self, event: CellEvent) -> None:
        match event.kind:
            case "out":
                (self._err if event.stream == "stderr" else self._out).write(event.text)
            case "value":
                self._out.line(f"=> {event.text or _kinds(event)}")
            case "display":
                self._err.line(f"[{_kinds(event)}] {event.text}".rstrip())
            case "error":
                self._error(event)
            case _:
                self._err.line(f"farhand: cell {event.cell}: {event.text}")

    def _error(self, event: CellEvent) -> None:
        error = event.error or {}
        if error.get("kind") == "exit":
            # As in a script: a number says nothing, a text is printed.
            message = error.get("message") or ""
            if message != str(error.get("exit")) and error.get("exit") != 0:
                self._err.line(str(message))
            return
        if error.get("traceback"):
            self._err.line(event.text)
        if error.get("kind") == "limit":
            name, message = str(error.get("limit")), str(error.get("message"))
            told = message if name in message else f"the limit {name} was reached: {message}"
            self._err.line(f"farhand: cell {event.cell}: {told}")
        elif not error.get("traceback"):
            self._err.line(f"farhand: cell {event.cell}: {event.text}")
        if error.get("hint") and str(error["hint"]) not in event.text:
            self._err.line(f"  {error['hint']}")

    def stop(self) -> None:
        self._out.finish()
        self._err.line("farhand: stopped")

    def end(self, result: ProgramResult) -> None:
        self._out.finish()
        self._err.finish()
        for final in result.finals:
            self._out.line(f"FINAL {final}")


def _kinds(event: CellEvent) -> str:
    return ", ".join(kind for kind in event.bundle if kind != "text/plain")
