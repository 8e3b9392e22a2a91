"""What a user holds: an agent that solves tasks by writing Python.

agent = CodeAgent(tools=[search], model="openai:gpt-5")
agent.run("…").answer                      # synchronous
(await agent.run_async("…")).answer        # inside an event loop
async for event in agent.stream("…"): …    # everything as it happens
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import threading
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from farhand import event as ev
from farhand import registry, value
from farhand.errors import (
    FarhandError,
    Interrupted,
    LimitReached,
    NestedLoopError,
    SandboxError,
    StoreError,
    TurnFailed,
    UsageError,
)
from farhand.event import Event, NewEvent
from farhand.files import copy
from farhand.home import farhand_home
from farhand.limits import LEASE_S, Limits
from farhand.loop import Delta, Driver, Equipment, Lease
from farhand.model.port import Model
from farhand.sandbox import imports
from farhand.sandbox.environment import DEFAULT, Environment, with_imports
from farhand.sandbox.port import Sandbox
from farhand.secret import redactor
from farhand.session import Session, pack
from farhand.state import Turn
from farhand.store.port import Blobs, Store
from farhand.tool import Tool, collect

T = TypeVar("T")
Streamed: TypeAlias = Event | Delta

BOXES_KEPT = 4
"""Boxes an agent keeps alive between turns, so that variables live on; the oldest is destroyed."""
CLOSE_S = 10.0
"""How long a stream that is closed early waits for its turn to end."""
SENDER = "user:local"
TITLE_CHARS = 120


@dataclass(frozen=True, slots=True)
class Usage:
    """What a turn cost. Seconds are wall time from the message to the end."""

    input_tokens: int = 0
    output_tokens: int = 0
    steps: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class RunResult:
    """One turn. `answer` is the value given to final_answer, decoded; `files` are the session's files on this
    machine."""

    answer: Any
    events: tuple[Event, ...] = field(repr=False)
    usage: Usage
    files: tuple[Path, ...]
    session_id: str


class CodeAgent:
    """An agent whose actions are Python, run in a box.

    `tools` are `Tool`s or functions; `model` is a Model or a name (`provider:name`; None: from the environment, see
    `registry.choose_model`); `sandbox` a name or a Sandbox; `additional_authorized_imports` are import names beyond the
    default environment, whose distributions are installed once into a cached environment. `home` is where the
    record, files and
    environments live (`$FARHAND_HOME`). One agent may run many turns, one after another or at once.
    """

    def __init__(
        self,
        tools: Iterable[Tool | Callable[..., Any]] = (),
        model: Model | str | None = None,
        sandbox: Sandbox | str = "local",
        additional_authorized_imports: Sequence[str] = (),
        instructions: str = "",
        limits: Limits | None = None,
        *,
        environment: Environment = DEFAULT,
        home: str | os.PathLike[str] | None = None,
        store: Store | None = None,
        blobs: Blobs | None = None,
        lease_s: float = LEASE_S,
        boxes_kept: int = BOXES_KEPT,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        _check_arguments(tools, model, sandbox, additional_authorized_imports, limits)
        self.tools = _by_name(tools)
        self.limits = limits or Limits()
        self.instructions = instructions
        self.environment = with_imports(environment, additional_authorized_imports)
        self._additional = tuple(additional_authorized_imports)
        self.home = Path(home) if home is not None else farhand_home()
        self._model, self._sandbox = model, sandbox
        self._store, self._blobs = store, blobs
        self._lease_s, self._boxes_kept = lease_s, boxes_kept
        self._progress = progress or _say
        self._running: set[_Turn] = set()
        self._turns: dict[str, asyncio.Lock] = {}
        """Sessions this agent has a turn of: the next one waits for it."""
        self._kept: OrderedDict[str, copy.Manifest] = OrderedDict()
        """Sessions whose box is kept alive, and what it said of its files."""

    # --- running ---

    def run(self, task: str, *, session: str | None = None, files: Sequence[str | os.PathLike[str]] = ()) -> RunResult:
        """Solve one task. Raises TurnFailed, LimitReached or Interrupted, each with `.result`, when it is not answered.

        `session` goes on with an earlier one. `files` are copied into /workspace under their own names.
        """
        if _in_a_loop():
            raise NestedLoopError(
                "run() was called inside a running event loop",
                hint="Use `await agent.run_async(…)` or `agent.stream(…)`.",
            )
        return _on_own_loop(self.run_async(task, session=session, files=files), self.interrupt)

    async def run_async(
        self, task: str, *, session: str | None = None, files: Sequence[str | os.PathLike[str]] = ()
    ) -> RunResult:
        """`run` for code inside an event loop."""
        collected: list[Event] = []
        turn = _Turn(self, task, session, files)
        async with aclosing(turn.stream()) as source:
            async for item in source:
                if isinstance(item, Event):
                    collected.append(item)
        return turn.result(collected)

    async def stream(
        self, task: str, *, session: str | None = None, files: Sequence[str | os.PathLike[str]] = ()
    ) -> AsyncGenerator[Streamed, None]:
        """Events as they are committed, and the model's deltas as they come. Closing the stream early stops the turn.

        How the turn ended its last event says, `turn.answered`, `turn.failed` or `turn.cancelled`; nothing is raised.
        """
        turn = _Turn(self, task, session, files)
        async with aclosing(turn.stream()) as source:
            async for item in source:
                yield item

    def interrupt(self, reason: str = "interrupted by the user") -> None:
        """Stop what this agent runs now, from any thread. The sessions go on with the next message."""
        for turn in list(self._running):
            turn.interrupt(reason)

    async def aclose(self) -> None:
        """Stop what still runs, destroy the boxes kept between turns, let go of connections."""
        await asyncio.gather(*[turn.close("the agent was closed") for turn in list(self._running)])
        while self._kept:
            await self._let_go(next(iter(self._kept)))
        if not isinstance(self._sandbox, str):
            await self._sandbox.close()
        if self._model is not None and not isinstance(self._model, str):
            await self._model.close()
        if self._store is not None:
            await self._store.close()

    def close(self) -> None:
        """`aclose` for synchronous code."""
        _on_own_loop(self.aclose(), lambda: None)

    def __enter__(self) -> CodeAgent:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    async def __aenter__(self) -> CodeAgent:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    # --- parts, made when they are first needed ---

    @property
    def model(self) -> Model:
        if self._model is None:
            self._model = registry.choose_model(None, os.environ, self.home)
        if isinstance(self._model, str):
            self._model = registry.model(self._model, self.home)
        return self._model

    @property
    def sandbox(self) -> Sandbox:
        if isinstance(self._sandbox, str):
            self._sandbox = registry.sandbox(self._sandbox, self.home, self._progress)
        return self._sandbox

    @property
    def store(self) -> Store:
        if self._store is None:
            self._store = registry.store(self.home)
        return self._store

    @property
    def blobs(self) -> Blobs:
        if self._blobs is None:
            self._blobs = registry.blobs(self.home)
        return self._blobs

    def files_of(self, session_id: str) -> Path:
        """Where the session's files are kept on this machine."""
        return self.home / "sessions" / session_id / "files"

    def reference(self) -> str:
        """`module:name`, or `FILE.py:NAME` for `__main__`, of a module-level name that holds this agent; else ''."""
        for name, module in list(sys.modules.items()):
            for attribute, held in list(vars(module).items()) if module is not None else ():
                if held is self:
                    where = getattr(module, "__file__", None) if name == "__main__" else name
                    return f"{where}:{attribute}" if where else ""
        return ""

    def equipment(self, session_id: str) -> Equipment:
        if self.model.prompting.examples and (self.tools or self.instructions):
            raise UsageError(
                f"the model {self.model.name} is too small for tools and instructions: it would not be told of them",
                hint=registry.MODEL_WAYS,
            )
        allowed = imports.allowed(self.environment, self._additional)
        return Equipment(
            model=self.model,
            tools=self.tools,
            sandbox=self.sandbox,
            environment=self.environment,
            imports=allowed,
            imports_text=imports.describe(self.environment, self._additional),
            instructions=self.instructions,
            files=self.files_of(session_id),
            redact=redactor(os.environ),
        )

    async def create_session(self, task: str) -> str:
        """A new session of this agent, without a message."""
        created = {
            "agent": self.reference(),
            "tools": [_declared(tool) for tool in self.tools.values()],
            "limits": asdict(self.limits),
            "environment": {"packages": list(self.environment.packages), "hash": self.environment.hash},
            "sandbox": self.sandbox.name,
            "model": self.model.name,
            "title": " ".join(task.split())[:TITLE_CHARS],
            "instructions": self.instructions,
        }
        return await self.store.create(await pack(self.blobs, NewEvent(ev.SESSION_CREATED, created)))

    def driver(self, session_id: str) -> Driver:
        """A driver of this agent for the session."""
        session = Session(self.store, self.blobs, session_id)
        owner, gone = registry.owner(self.home)
        lease = Lease(self._lease_s, self._lease_s / 3)
        driver = Driver(session, self.equipment(session_id), owner=owner, gone=gone, lease=lease)
        driver.actor.manifest = self._kept.pop(session_id, {})
        return driver

    async def keep(self, driver: Driver) -> None:
        """Let go of a session's box but keep it alive for the next turn; the oldest of too many is destroyed."""
        await driver.close()
        self._kept[driver.session.id] = driver.actor.manifest
        while len(self._kept) > self._boxes_kept:
            await self._let_go(next(iter(self._kept)))

    async def _let_go(self, session_id: str) -> None:
        """Destroy a kept box. One that cannot be reached is left to the provider's sweep; no turn fails for it."""
        try:
            await self.driver(session_id).discard()
        except (SandboxError, StoreError):
            pass


def _say(line: str) -> None:
    """Building an environment takes a minute: a person at a terminal is told."""
    if sys.stderr is not None and sys.stderr.isatty():
        print(line, file=sys.stderr)


def _declared(tool: Tool) -> dict[str, Any]:
    return {"name": tool.name, "signature": tool.signature_text(), "effect": tool.effect}


def _by_name(tools: Iterable[Tool | Callable[..., Any]]) -> dict[str, Tool]:
    return {tool.name: tool for tool in collect(list(tools))}


class _Turn:
    """One message to a session of an agent, driven to its end."""

    def __init__(
        self, agent: CodeAgent, task: str, session_id: str | None, files: Sequence[str | os.PathLike[str]]
    ) -> None:
        if not isinstance(task, str) or not task.strip():
            raise UsageError("the task is empty, or no text")
        self._agent, self._task, self._session_id = agent, task, session_id
        self._files = _given(files, agent.limits.disk_bytes)
        self._queue: asyncio.Queue[Streamed | None] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._stop: str | None = None
        self._posted = False
        self._work: asyncio.Task[None] | None = None
        self._driver: Driver | None = None
        self.session: Session | None = None

    def interrupt(self, reason: str) -> None:
        """From any thread: cancel the turn, or see to it that it is cancelled as soon as it has begun."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._interrupt, reason)

    def _interrupt(self, reason: str) -> None:
        self._stop = self._stop or reason
        if self._posted:
            self._cancelling = asyncio.ensure_future(self._cancel(self._stop))

    async def _cancel(self, reason: str) -> None:
        if self.session is not None and self.session.state.turn is not None:
            cancel = {"reason": reason, "sender": SENDER, "turn": self.session.state.turn.id}
            await self.session.post(NewEvent(ev.CANCEL_REQUESTED, cancel))

    async def stream(self) -> AsyncGenerator[Streamed, None]:
        agent = self._agent
        agent._running.add(self)
        try:
            session_id = self._session_id or await agent.create_session(self._task)
            lock = agent._turns.setdefault(session_id, asyncio.Lock())
            async with lock, aclosing(self._drive(session_id)) as source:
                async for item in source:
                    yield item
            if not lock.locked():
                agent._turns.pop(session_id, None)
        finally:
            agent._running.discard(self)

    async def _drive(self, session_id: str) -> AsyncGenerator[Streamed, None]:
        self._driver = driver = self._agent.driver(session_id)
        self.session = session = driver.session
        await session.catch_up()
        stop_listening = session.listen(self._queue.put_nowait)
        driver.on_delta = self._queue.put_nowait
        driver.actor.brought = self._bring(session_id)
        try:
            await session.post(NewEvent(ev.MESSAGE_RECEIVED, {"role": "user", "text": self._task, "sender": SENDER}))
            await session.catch_up()
            self._posted = True
            if self._stop is not None:
                await self._cancel(self._stop)
            self._work = work = asyncio.create_task(driver.drive())
            work.add_done_callback(lambda done: self._queue.put_nowait(None))
            while (item := await self._queue.get()) is not None:
                yield item
            await work
        finally:
            stop_listening()
            await self.close("the stream was closed")

    def _bring(self, session_id: str) -> list[str]:
        """Copy the given files to the session's own; their names."""
        folder = self._agent.files_of(session_id)
        for path in self._files:
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, folder / path.name)
        return [path.name for path in self._files]

    async def close(self, reason: str) -> None:
        """Stop the turn if it still runs, and keep its box for the next one. Twice does no harm."""
        work, driver = self._work, self._driver
        self._work = self._driver = None
        if driver is None:
            return
        if work is not None and not work.done():
            await self._cancel(reason)
            await asyncio.wait([work], timeout=CLOSE_S)
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
        await self._agent.keep(driver)

    def result(self, events: list[Event]) -> RunResult:
        """What the turn came to; its error is raised with `.result`."""
        assert self.session is not None
        turn = self.session.state.turns[-1]
        answer = value.decode(turn.answer["value"], rich=True) if turn.answer is not None else None
        usage = Usage(turn.input_tokens, turn.output_tokens, len(turn.steps), _seconds(events))
        folder = self._agent.files_of(self.session.id)
        files = tuple(folder / path for path in sorted(self.session.state.files))
        result = RunResult(answer, tuple(events), usage, files, self.session.id)
        if turn.status != "answered":
            error = failure(turn)
            error.result = result  # type: ignore[attr-defined]
            raise error
        return result


def failure(turn: Turn) -> FarhandError:
    """The error a turn without an answer is raised as."""
    what = turn.error or {}
    hint = str(what.get("hint", ""))
    if turn.status == "cancelled":
        lost = turn.lost
        text = turn.cancel or "interrupted"
        return Interrupted(text + (f"; these names were lost: {', '.join(lost)}" if lost else ""), hint=hint)
    message = str(what.get("message") or "the turn failed")
    if what.get("limit"):
        return LimitReached(message, limit=str(what["limit"]), hint=hint)
    return TurnFailed(message, hint=hint, reason=str(what.get("code", "")))


def _seconds(events: list[Event]) -> float:
    return events[-1].time - events[0].time if events else 0.0


class _OwnLoop:
    """One event loop on a thread of its own, for synchronous callers: models and connections outlive a single call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def get(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None or self._thread is None or not self._thread.is_alive():
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name="farhand loop", daemon=True)
                self._thread.start()
            return self._loop


_own_loop = _OwnLoop()


def _on_own_loop(work: Coroutine[Any, Any, T], interrupt: Callable[[], None]) -> T:
    """Run to the end on the own loop. A Ctrl-C stops the turn and waits for its end; a second one leaves at once."""
    future = asyncio.run_coroutine_threadsafe(work, _own_loop.get())
    try:
        return future.result()
    except KeyboardInterrupt:
        interrupt()
    return future.result()


def _in_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _given(files: Sequence[str | os.PathLike[str]], most_bytes: int) -> list[Path]:
    """The files a turn is given, checked before anything begins."""
    if isinstance(files, str | os.PathLike):
        raise UsageError("files is a list of paths, not one path")
    paths = [Path(path) for path in files]
    for path in paths:
        if not path.is_file():
            raise UsageError(f"{path} is no file that can be read", hint="Folders are not taken: name their files.")
    if len({path.name for path in paths}) < len(paths):
        raise UsageError("two of the files have the same name")
    size = sum(path.stat().st_size for path in paths)
    if size > most_bytes:
        raise UsageError(f"the files have {size:,} bytes; Limits.disk_bytes allows {most_bytes:,}")
    return paths


def _check_arguments(tools: Any, model: Any, sandbox: Any, additional: Any, limits: Any) -> None:
    """What is wrong with an agent's arguments is said when it is made, not when it runs."""
    if isinstance(tools, str) or not isinstance(tools, Iterable):
        raise UsageError("tools is a list of functions")
    if isinstance(additional, str):
        raise UsageError("additional_authorized_imports is a list of names, not one text")
    if limits is not None and not isinstance(limits, Limits):
        raise UsageError(f"limits is a Limits(…), not {type(limits).__name__}")
    if isinstance(sandbox, str):
        registry.check_sandbox(sandbox)
    if isinstance(model, str):
        registry.check_model(model)
