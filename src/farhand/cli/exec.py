"""`farhand exec`: a program of cells in a box, without a model."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

from farhand import registry
from farhand.cli.advice import for_command_line
from farhand.cli.aside import standard_output
from farhand.cli.display import figure, picture
from farhand.cli.exits import INTERRUPTED, on_stop, say
from farhand.cli.out import OutFolder, not_kept, told
from farhand.cli.progress import Progress
from farhand.cli.tally import hidden
from farhand.cli.terminal import Output, one_line
from farhand.cli.toolfile import load_tools
from farhand.errors import UsageError
from farhand.exec import CellEvent, ProgramResult, check_files, run_cells, split_cells
from farhand.home import farhand_home
from farhand.limits import MIB, Limits
from farhand.sandbox.environment import DEFAULT, Environment, build, with_imports
from farhand.sandbox.imports import allowed
from farhand.sandbox.port import Sandbox
from farhand.tool import Tool

MEMORY_MB = 32
"""The least that is useful: Python with numpy in a box that does not share them with others takes as much."""


@dataclass(frozen=True, slots=True)
class Program:
    """The command line of `farhand exec`."""

    file: str
    sandbox: str = "local"
    tools: str | None = None
    timeout_s: float | None = None
    memory_mb: int | None = None
    imports: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    out: str | None = None


@dataclass(frozen=True, slots=True)
class Parts:
    """What a program runs with, made of its command line."""

    sandbox: Sandbox
    source: str
    tools: Sequence[Tool]
    limits: Limits
    environment: Environment
    imports: Sequence[str]
    files: Sequence[Path]
    out: OutFolder | None


def execute(program: Program) -> int:
    home = farhand_home()
    source = read_source(program.file)
    limits = limits_of(program)
    with standard_output() as (stream, aside):
        parts = Parts(
            registry.sandbox(program.sandbox, home),
            source,
            load_tools(program.tools),
            limits,
            with_imports(DEFAULT, program.imports),
            program.imports,
            [Path(name) for name in program.files],
            OutFolder(program.out) if program.out is not None else None,
        )
        check_files(parts.files, limits)
        # Built here because it takes a minute the first time, and a person wants to see why.
        with Progress() as progress:
            build(parts.environment, home, progress)
        screen = Screen(stream, parts.out)
        aside.output = screen.errors
        return asyncio.run(_run(parts, screen))


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
        _check_memory(program.memory_mb)
        limits = replace(limits, memory_bytes=program.memory_mb * MIB)
    return limits


def _check_memory(asked_mb: int) -> None:
    if asked_mb < MEMORY_MB:
        raise UsageError(f"--memory {asked_mb}: a box needs at least {MEMORY_MB} MB")
    there_mb = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // MIB
    if asked_mb > there_mb:
        say(f"farhand: --memory {asked_mb} is more than this machine has, {there_mb:,} MB")


async def _run(parts: Parts, screen: Screen) -> int:
    main = asyncio.current_task()
    assert main is not None
    on_stop(main.cancel)
    try:
        with tempfile.TemporaryDirectory(prefix="farhand-out-") as folder:
            kept = Path(folder) if parts.out is not None else None
            result = await run_cells(
                parts.sandbox,
                parts.source,
                tools=parts.tools,
                limits=parts.limits,
                environment=parts.environment,
                imports=allowed(parts.environment, parts.imports),
                on_event=screen.event,
                files=parts.files,
                keep=kept,
            )
            screen.end(result, kept)
    except asyncio.CancelledError:
        screen.stop()
        return INTERRUPTED
    finally:
        await parts.sandbox.close()
    return result.exit_code


class Screen:
    """Standard output carries what the cells print, `=> ` values and FINAL lines; standard error the rest."""

    def __init__(self, stream: TextIO, out: OutFolder | None = None) -> None:
        self._out = Output(stream)
        self._err = Output(sys.stderr, self._out)
        self._folder = out
        self._figures = 0

    @property
    def errors(self) -> Output:
        return self._err

    def event(self, event: CellEvent) -> None:
        match event.kind:
            case "out":
                (self._err if event.stream == "stderr" else self._out).write(event.text)
            case "value":
                self._out.line(f"=> {event.text or _kinds(event)}")
                if picture(event.bundle):
                    self._figure(event)
            case "display":
                if not self._figure(event):
                    self._err.line(f"[{_kinds(event)}] {event.text}".rstrip() if _kinds(event) else event.text)
            case "error":
                self._error(event)
            case _:
                self._err.line(f"farhand: cell {event.cell}: {event.text}")

    def _figure(self, event: CellEvent) -> bool:
        """Keep a figure and say where, or count it; whether a line of its own was said."""
        found = figure(event.bundle)
        if found is None:
            return False
        kind, suffix, content = found
        if self._folder is None:
            self._figures += 1
            return False
        one = self._folder.figure(suffix, content)
        self._err.line(f"[{one_line(kind, 40)}] {one.target or told([one])[0]}")
        return True

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
            self._err.line(f"  {for_command_line(str(error['hint']))}")

    def stop(self) -> None:
        self._out.finish()
        self._err.line("farhand: stopped")

    def end(self, result: ProgramResult, kept: Path | None) -> None:
        self._out.finish()
        self._err.finish()
        for final in result.finals:
            self._out.line(f"FINAL {final}")
        if self._folder is not None and kept is not None:
            for line in told(self._folder.files(result.files, kept)):
                self._err.line(f"farhand: {line}")
            for path, reason in result.left_out[:10]:
                self._err.line(f"farhand: not kept: {path}: {reason}")
        else:
            line = not_kept(self._figures, sum(not hidden(path) for path in result.files))
            if line:
                self._err.line(f"farhand: {line}")


def _kinds(event: CellEvent) -> str:
    return ", ".join(kind for kind in event.bundle if kind != "text/plain")
