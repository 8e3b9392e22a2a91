"""A program run in a box cell by cell, without a model and without a log: what `farhand exec` does."""

from __future__ import annotations

import asyncio
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from farhand import value
from farhand.action import bound_names
from farhand.call import error_of, start_tool
from farhand.errors import Fenced, SandboxError, SandboxLost, ToolTimedOut, UsageError
from farhand.files import copy
from farhand.limits import EXEC_ACK_BYTES, FILE_CHUNK_BYTES, TOOL_TIMEOUT_S, Limits
from farhand.sandbox.environment import BARE, Environment
from farhand.sandbox.hand import Hand, safe_path
from farhand.sandbox.port import Box, Frame, Sandbox
from farhand.secret import redactor
from farhand.tool import Tool, ToolContext

MARK = "#%%"


@dataclass(frozen=True, slots=True)
class CellEvent:
    """Something a running program shows. `kind` is "out" (with `stream`), "value", "display", "error" or "note"."""

    kind: str
    cell: int
    text: str
    stream: str = ""
    bundle: dict[str, str] = field(default_factory=dict)
    """Of a value or a display: MIME type → text or base64."""
    error: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class CellResult:
    """How one cell ended. `error` is the `error` of its `done` frame (docs/protocol.md), or of kind "lost"."""

    cell: int
    value: dict[str, str] | None
    error: dict[str, Any] | None
    usage: dict[str, Any]
    output: dict[str, Any]
    alive: bool
    lost: tuple[str, ...]

    @property
    def ok(self) -> bool:
        error = self.error
        return error is None or (error.get("kind") == "exit" and error.get("exit") == 0)

    @property
    def limit(self) -> str | None:
        return self.error.get("limit") if self.error and self.error.get("kind") == "limit" else None


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """`finals` are the reprs of what `final_answer` was given, in order; `files` are the paths in the workspace that
    the program made or changed, `left_out` pairs those of them that could not be copied out with the reason."""

    cells: tuple[CellResult, ...]
    finals: tuple[str, ...]
    files: tuple[str, ...] = ()
    left_out: tuple[tuple[str, str], ...] = ()

    @property
    def exit_code(self) -> int:
        """0 when every cell ended well, 3 when a limit was reached, else 1."""
        if any(cell.limit for cell in self.cells):
            return 3
        return 0 if all(cell.ok for cell in self.cells) else 1


def split_cells(source: str) -> list[str]:
    """The cells of a program: what stands between lines that begin with `#%%`. Empty ones are left out."""
    cells: list[list[str]] = [[]]
    for line in source.splitlines(keepends=True):
        if line.startswith(MARK):
            cells.append([])
        else:
            cells[-1].append(line)
    return [text for text in map("".join, cells) if text.strip()]


async def run_cells(
    sandbox: Sandbox,
    source: str,
    *,
    tools: Sequence[Tool] = (),
    limits: Limits | None = None,
    environment: Environment = BARE,
    imports: Sequence[str] | None = None,
    on_event: Callable[[CellEvent], None] = lambda event: None,
    files: Sequence[Path] = (),
    keep: Path | None = None,
) -> ProgramResult:
    """Run the cells one after another in one namespace. The limits are each cell's own.

    An error ends its cell; the later ones run, in a new box with the same files when the old one died. `files` are in
    the workspace, under their own names, when the first cell starts; what is in it at the end is copied to the folder
    `keep`.
    """
    limits = limits or Limits()
    check_files(files, limits)
    program = _Program(sandbox, tools, limits, environment, imports, on_event)
    try:
        await program.give(files)
        for index, code in enumerate(split_cells(source), 1):
            await program.cell(index, code)
        made, left_out = await program.take(keep)
    finally:
        await program.close()
    return ProgramResult(tuple(program.results), tuple(program.finals), made, left_out)


def check_files(files: Sequence[Path], limits: Limits) -> None:
    """UsageError unless these are files that fit into a box together."""
    size = 0
    for path in files:
        if not path.is_file():
            reason = "it is a folder" if path.is_dir() else "there is no such file"
            raise UsageError(f"{path}: {reason}", hint="Folders are not taken: name their files.")
        if not os.access(path, os.R_OK) or not safe_path(path.name):
            raise UsageError(
                f"{path}: it cannot be read" if safe_path(path.name) else f"{path}: its name cannot be kept"
            )
        size += path.stat().st_size
    if len({path.name for path in files}) < len(files):
        raise UsageError("two of the files have the same name")
    if size > limits.disk_bytes:
        raise UsageError(f"the files have {size:,} bytes; the limit `disk_bytes` allows {limits.disk_bytes:,}")


class _Program:
    """One run: its box, and what came of the cells so far."""

    def __init__(
        self,
        sandbox: Sandbox,
        tools: Sequence[Tool],
        limits: Limits,
        environment: Environment,
        imports: Sequence[str] | None,
        on_event: Callable[[CellEvent], None],
    ) -> None:
        self._sandbox, self._limits, self._environment, self._imports = sandbox, limits, environment, imports
        self._tools = {tool.name: tool for tool in tools}
        self._redact = redactor(os.environ)
        self._tell = on_event
        self._name = f"exec_{secrets.token_hex(6)}"
        self._box: Box | None = None
        self._hand: Hand | None = None
        self._unacked = self._calls = 0
        self._running: set[asyncio.Task[None]] = set()
        self._given: copy.Manifest = {}
        """What the box said of the files it was given, when they were given."""
        self.results: list[CellResult] = []
        self.finals: list[str] = []

    async def give(self, files: Sequence[Path]) -> None:
        """Put files of this machine into the box."""
        for path in files:
            await _put(await self._ready(), path)
        if files:
            self._given = {entry.path: entry for entry in (await (await self._ready()).listing()).entries}

    async def take(self, keep: Path | None) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
        """The files that were made or changed, copied to `keep` if it is given; and what was left out, and why."""
        if self._hand is None:
            return (), ()
        try:
            if keep is None:
                listed = await self._hand.listing()
                found = {entry.path: entry for entry in listed.entries}
                left_out = listed.left_out
            else:
                taken = await copy.collect(self._hand, keep, {}, self._limits)
                found, left_out = taken.manifest, tuple(taken.left_out)
        except SandboxError as problem:
            self._tell(
                CellEvent("note", len(self.results), f"the files of the box could not be read: {problem.message}")
            )
            return (), ()
        made = [path for path, entry in found.items() if entry.kind == "file" and self._given.get(path) != entry]
        return tuple(sorted(made)), left_out

    async def cell(self, index: int, code: str) -> None:
        hand = await self._ready()
        self._calls = 0
        try:
            await hand.run(f"cell_{index}", code, f"<cell {index}>")
            async for frame in hand.frames():
                await self._frame(index, hand, frame)
        except SandboxLost as problem:
            self._lost(index, str(problem))
        finally:
            self._stop_tools()
        result = self.results[-1]
        if result.error is not None:
            self._tell(CellEvent("error", index, _told(result.error), error=result.error))
        if not result.alive:
            await self._replace(index, tuple(dict.fromkeys([*result.lost, *bound_names(code)])))

    async def _frame(self, index: int, hand: Hand, frame: Frame) -> None:
        kind = frame["t"]
        if kind == "out":
            self._tell(CellEvent("out", index, frame["text"], stream=frame["stream"]))
        elif kind == "display":
            self._tell(CellEvent("display", index, _plain(frame["bundle"]), bundle=frame["bundle"]))
        elif kind == "answer":
            self.finals.append(frame["repr"])
        elif kind == "call":
            task = asyncio.create_task(self._call(hand, frame))
            self._running.add(task)
            task.add_done_callback(self._running.discard)
        else:
            self._done(index, frame)
        self._unacked += 200 + len(frame.get("text", ""))
        if self._unacked > EXEC_ACK_BYTES or kind in ("display", "call", "done"):
            self._unacked = 0
            await hand.ack(frame["n"])

    def _done(self, index: int, frame: Frame) -> None:
        shown, error = frame.get("value"), frame.get("error")
        bundle = shown if isinstance(shown, dict) else None
        if bundle is not None:
            self._tell(CellEvent("value", index, _plain(bundle), bundle=bundle))
        output, lost = frame["output"], frame.get("lost")
        self._tell_cuts(index, output)
        names = tuple(str(name) for name in lost) if isinstance(lost, list) else ()
        error = error if isinstance(error, dict) else None if frame["ok"] else {"kind": "ended", "message": "no reason"}
        self.results.append(CellResult(index, bundle, error, frame["usage"], output, frame["alive"], names))

    def _tell_cuts(self, index: int, output: dict[str, Any]) -> None:
        for name, what in (("cut_bytes", "bytes of output"), ("displays_cut", "displays"), ("answers_cut", "answers")):
            cut = output.get(name)
            if isinstance(cut, int) and cut > 0:
                self._tell(CellEvent("note", index, f"{cut:,} {what} were cut"))

    def _lost(self, index: int, why: str) -> None:
        error = {"kind": "lost", "type": "SandboxLost", "message": f"the box was lost: {why}"}
        self.results.append(CellResult(index, None, error, {}, {}, False, ()))

    # --- tools ---

    async def _call(self, hand: Hand, frame: Frame) -> None:
        """Run one tool on this side and answer; whatever it raises goes to the code that called it."""
        call = frame["call"]
        self._calls += 1
        try:
            if self._calls > self._limits.tool_calls:
                text = f"the limit `tool_calls` was reached: {self._limits.tool_calls} calls in one cell"
                await hand.reply_error(call, "LimitReached", text)
                return
            try:
                tree = await self._result(frame)
            except Exception as problem:
                error = error_of(problem, self._redact)
                await hand.reply_error(call, error["type"], error["message"], error["hint"])
                return
            await hand.reply(call, tree)
        except (SandboxError, Fenced):
            return  # whoever reads the frames sees it too

    async def _result(self, frame: Frame) -> Any:
        tool = self._tools[frame["tool"]]
        args = [value.decode(tree) for tree in frame["args"]]
        kwargs = {name: value.decode(tree) for name, tree in frame["kwargs"].items()}
        timeout_s = tool.timeout_s or TOOL_TIMEOUT_S
        context = ToolContext(f"{self._name}:{frame['call']}", self._name, time.monotonic() + timeout_s)
        called, named = tool.call_arguments(tool.bind(args, kwargs), context)
        try:
            result = await asyncio.wait_for(start_tool(tool, called, named), timeout_s)
        except TimeoutError as error:
            if time.monotonic() < context.deadline:
                raise
            raise ToolTimedOut(f"{tool.name} gave no result within {timeout_s:g} s") from error
        return value.encode(result, name=f"the result of {tool.name}()", max_bytes=self._limits.result_bytes)

    def _stop_tools(self) -> None:
        for task in self._running:
            task.cancel()

    # --- the box ---

    async def _ready(self) -> Hand:
        if self._hand is None:
            labels = {"session": self._name, "generation": "1"}
            self._box = await self._sandbox.create(self._environment, self._limits, labels)
            self._hand = await self._open(self._box)
        return self._hand

    async def _open(self, box: Box) -> Hand:
        stubs = [tool.stub() for tool in self._tools.values()]
        return await Hand.open(
            box, generation=1, limits=self._limits, tools=stubs, imports=self._imports, session=self._name
        )

    async def _replace(self, index: int, lost: tuple[str, ...]) -> None:
        """The next cell gets a new box, with the files of the old one if they can still be read."""
        with tempfile.TemporaryDirectory(prefix="farhand-exec-") as folder:
            saved = await self._save_files(Path(folder))
            await self._drop()
            names = f"; lost names: {', '.join(lost[:20])}{' …' if len(lost) > 20 else ''}" if lost else ""
            files = "its files are kept" if saved is not None else "its files are lost too"
            text = f"the box died with its variables; a new one takes over, {files}{names}"
            self._tell(CellEvent("note", index, text))
            if saved:
                untouched = {path for path, entry in self._given.items() if saved.get(path) == entry}
                restored = await copy.restore(await self._ready(), Path(folder))
                self._given = {path: restored[path] for path in untouched & restored.keys()}

    async def _save_files(self, folder: Path) -> copy.Manifest | None:
        """What could be copied; None when the box does not answer any more."""
        if self._hand is None:
            return None
        try:
            return (await copy.collect(self._hand, folder, {}, self._limits)).manifest
        except (SandboxError, OSError):
            return None

    async def _drop(self) -> None:
        hand, box = self._hand, self._box
        self._hand = self._box = None
        if hand is not None:
            await hand.close()
        if box is not None:
            await box.destroy()

    async def close(self) -> None:
        self._stop_tools()
        await self._drop()


async def _put(hand: Hand, path: Path) -> None:
    """In chunks: a file may be larger than what is wise to hold in memory."""
    with path.open("rb") as file:
        offset, chunk = 0, file.read(FILE_CHUNK_BYTES)
        while True:
            following = file.read(FILE_CHUNK_BYTES)
            await hand.write_chunk(path.name, offset, chunk, 0o644, not following)
            if not following:
                return
            offset, chunk = offset + len(chunk), following


def _plain(bundle: dict[str, str]) -> str:
    return bundle.get("text/plain", "")


def _told(error: dict[str, Any]) -> str:
    """What a person reads: the traceback where there is one, else the message."""
    text = error.get("traceback") or error.get("message") or error.get("kind") or ""
    return str(text).rstrip("\n")
