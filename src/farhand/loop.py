"""The loop: claim the session, do what `decide` says, append what happened, until nothing is due.

`Driver.drive` performs the commands that are not under way, each as a task. After a crash another driver claims,
folds and
decides again. What touches a box is in `act.py`, what runs a tool in `call.py`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from farhand import event as ev
from farhand.act import Actor, limit_reached
from farhand.call import Caller
from farhand.decide import Act, AskModel, CallTool, Command, EndTurn, Settle, Stop, deadline, decide
from farhand.errors import FarhandError, Fenced, Held, ModelError, ModelProtocolError, StoreError
from farhand.event import NewEvent
from farhand.limits import LEASE_RENEW_S, LEASE_S, MODEL_REPLY_BYTES, MODEL_RETRY_S, STOP_AGAIN_S, WAIT_POLL_S
from farhand.model.port import TOOLS, Finished, Model, ModelRequest, ReasoningDelta, TextDelta, ToolCallDelta, Usage
from farhand.sandbox.environment import Environment
from farhand.sandbox.port import Sandbox
from farhand.session import Session
from farhand.state import FENCED, TOOL
from farhand.tool import Tool
from farhand.transcript import request, system_prompt

Delta: TypeAlias = TextDelta | ReasoningDelta


@dataclass(frozen=True, slots=True)
class Equipment:
    """What a driver needs of its agent. `imports` None means no restriction; `files` is where the session's files
    are kept."""

    model: Model
    tools: dict[str, Tool]
    sandbox: Sandbox
    environment: Environment
    imports: tuple[str, ...] | None
    imports_text: str
    instructions: str
    files: Path
    redact: Callable[[str], str] = field(default=lambda text: text)

    @property
    def dialect(self) -> str:
        return TOOL if TOOLS in self.model.capabilities else FENCED


@dataclass(slots=True)
class Lease:
    """One claim's lease on this process's monotonic clock."""

    length_s: float = LEASE_S
    renew_s: float = LEASE_RENEW_S
    until: float = 0.0

    def holds(self) -> bool:
        return time.monotonic() < self.until


class Driver:
    """Drives one session, claim by claim, until it is idle. Held, Fenced and other store errors are raised."""

    def __init__(
        self,
        session: Session,
        equipment: Equipment,
        *,
        owner: str,
        gone: Callable[[str], bool] = lambda owner: False,
        on_delta: Callable[[Delta], None] = lambda delta: None,
        lease: Lease | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.session, self.equipment = session, equipment
        self._owner, self._gone, self._clock = owner, gone, clock
        self.on_delta = on_delta
        self.lease = lease or Lease()
        self._under_way: dict[str, asyncio.Task[None]] = {}
        self._wake = asyncio.Event()
        self._until: float | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._fatal: BaseException | None = None
        self._failure: FarhandError | None = None
        session.listen(lambda event: self._wake.set())
        self.actor = Actor(session, equipment)
        self.caller = Caller(
            session, equipment.tools, equipment.redact, self.lease.holds, self._renew, self.actor.deliver
        )

    async def drive(self) -> None:
        """Claim, work until idle, release. The session's box lives on: `close` or `discard` decides about it."""
        await self.session.catch_up()
        while self.session.state.turn is not None:
            await self._under_claim(self._loop)
            await self.session.catch_up()  # a message may have come between the last look and the release

    async def discard(self) -> None:
        """Destroy the session's box, unless somebody else drives it now."""
        await self.session.catch_up()
        if self.session.state.box is None:
            await self.actor.close()
            return
        try:
            await self._under_claim(self.actor.discard)
        except (Held, Fenced):
            await self.actor.close()

    async def close(self) -> None:
        """Let go of the box; it lives on."""
        await self.actor.close()

    async def _under_claim(self, work: Callable[[], Awaitable[None]]) -> None:
        self._fatal = self._failure = None
        claimed, helpers = False, []
        try:
            before = time.monotonic()
            self.session.generation = await self.session.store.claim(
                self.session.id, self._owner, self.lease.length_s, self._gone
            )
            claimed = True
            self.lease.until = before + self.lease.length_s
            await self.session.catch_up()
            helpers = [asyncio.create_task(self._keep_lease()), asyncio.create_task(self._follow())]
            await work()
        except Fenced:
            claimed = False
            raise
        finally:
            self._until = None
            self._set_alarm(None)
            await self._cancel_all(helpers)
            if claimed:
                await self._release()

    async def _cancel_all(self, helpers: list[asyncio.Task[None]]) -> None:
        for helper in helpers:
            helper.cancel()
        await asyncio.gather(*helpers, return_exceptions=True)
        if self._under_way:
            self._stop_tools()
            await self._cancel_others()

    async def _release(self) -> None:
        self.lease.until = 0.0
        try:
            await self.session.store.release(self.session.id, self.session.generation or 0, "idle")
        except Fenced:
            return

    async def _loop(self) -> None:
        while True:
            self._wake.clear()
            self._check_claim()
            if self._failure is not None:
                await self._fail_turn(self._failure)
            due = decide(self.session.state, self._clock())
            if not due and not self._under_way:
                return
            for command in due:
                if command.id not in self._under_way:
                    self._start(command)
            await self._sleep()

    def _check_claim(self) -> None:
        if self._fatal is not None:
            raise self._fatal
        if self.session.state.generation != self.session.generation:
            raise Fenced("a newer claim stands: another driver has this session")

    async def _sleep(self) -> None:
        """Until something happened or the turn's time is over."""
        until = deadline(self.session.state)
        if until != self._until or (until is not None and until <= self._clock()):
            self._until = until
            self._set_alarm(until)
        await self._wake.wait()

    def _set_alarm(self, until: float | None) -> None:
        """Wake at that time. When it is over already, what was decided is under way: look again in a moment."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if until is not None:
            left = until - self._clock()
            self._alarm = asyncio.get_running_loop().call_later(left if left > 0 else STOP_AGAIN_S, self._wake.set)

    def _start(self, command: Command) -> None:
        task = asyncio.create_task(self._perform(command), name=command.id)
        self._under_way[command.id] = task
        task.add_done_callback(lambda done: self._ended(command, done))

    def _ended(self, command: Command, task: asyncio.Task[None]) -> None:
        self._under_way.pop(command.id, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fatal = self._fatal or error
        self._wake.set()

    async def _perform(self, command: Command) -> None:
        try:
            match command:
                case AskModel():
                    await self._ask(command)
                case Act():
                    await self.actor.act(command)
                case CallTool():
                    await self.caller.call(command)
                case Settle():
                    await self.caller.settle_interrupted(command)
                case Stop():
                    await self._stop(command)
                case EndTurn():
                    await self._end(command)
        except StoreError:
            raise
        except FarhandError as error:
            self._failure = self._failure or error
            self._wake.set()

    async def _fail_turn(self, error: FarhandError) -> None:
        """End the turn for a reason that is not the model's: no box, no environment, no model."""
        self._failure = None
        self._stop_tools()
        await self._cancel_others()
        await self.actor.abandon(error)
        turn = self.session.state.turn
        if turn is not None:
            await self.session.append(NewEvent(ev.TURN_FAILED, {"turn": turn.id, "error": self._told(error)}))

    def _told(self, error: FarhandError) -> dict[str, Any]:
        redact = self.equipment.redact
        told = {"code": error.code, "message": redact(error.message), "hint": redact(error.hint)}
        return {**told, "retryable": error.retryable}

    async def _ask(self, command: AskModel) -> None:
        equipment, state = self.equipment, self.session.state
        if command.attempt > 1:
            await asyncio.sleep(MODEL_RETRY_S * 2 ** (command.attempt - 2))
        asked = {
            "step": command.step,
            "attempt": command.attempt,
            "model": equipment.model.name,
            "dialect": equipment.dialect,
            "seen": state.seq,
        }
        tools = list(equipment.tools.values())
        system = system_prompt(tools, equipment.imports_text, equipment.instructions, equipment.dialect)
        wanted = request(state, system=system, dialect=equipment.dialect, prompting=equipment.model.prompting)
        await self.session.append(NewEvent(ev.MODEL_REQUESTED, asked))
        try:
            reply = {"step": command.step, **await self._reply(wanted), "model": equipment.model.name}
            event = NewEvent(ev.MODEL_REPLIED, reply)
        except ModelError as error:
            failed = {"step": command.step, "attempt": command.attempt, "error": self._told(error)}
            event = NewEvent(ev.MODEL_FAILED, failed)
        await self.session.append(event)

    async def _reply(self, wanted: ModelRequest) -> dict[str, Any]:
        """The whole reply. An adapter's own cancellation, or any exception out of it, is a failure like others."""
        builder = _ReplyBuilder(self.on_delta)
        stream = self.equipment.model.stream(wanted)
        try:
            async for delta in stream:
                builder.add(delta)
        except ModelError:
            raise
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise ModelProtocolError("the model's stream was cancelled from inside") from None
        except Exception as error:
            text = f"the model's adapter failed: {type(error).__name__}: {error}"
            raise ModelError(text) from error
        finally:
            if isinstance(stream, AsyncGenerator):
                await stream.aclose()
        return builder.done()

    async def _stop(self, command: Stop) -> None:
        """Tools and code are stopped side by side; under way until the action is finished."""
        self._stop_tools()
        await self.actor.stop(command)
        if any(name.startswith("call:") for name in self._under_way):
            await asyncio.sleep(STOP_AGAIN_S)  # its tools are ending: `decide` looks again when they have

    def _stop_tools(self) -> None:
        if self.session.state.turns:
            self.caller.stop(self.session.state.turns[-1].id)

    async def _end(self, command: EndTurn) -> None:
        await self._cancel_others()
        turn = self.session.state.turn
        if turn is None:
            return
        events = []
        if command.error and command.error.get("limit"):
            error = command.error
            events.append(limit_reached(error["limit"], error["allowed"], None, error["message"]))
        data: dict[str, Any] = {"turn": turn.id}
        if command.status == "answered":
            events.append(NewEvent(ev.TURN_ANSWERED, {**data, "answer": command.answer}))
        elif command.status == "failed":
            events.append(NewEvent(ev.TURN_FAILED, {**data, "error": command.error}))
        else:
            error = command.error or {}
            lost = error.get("lost") or []
            events.append(NewEvent(ev.TURN_CANCELLED, {**data, "reason": error.get("message", ""), "lost": lost}))
        await self.session.append(*events)

    async def _cancel_others(self) -> None:
        mine = asyncio.current_task()
        others = [task for task in self._under_way.values() if task is not mine]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _renew(self) -> None:
        before = time.monotonic()
        await self.session.store.renew(self.session.id, self.session.generation or 0, self.lease.length_s)
        self.lease.until = before + self.lease.length_s

    async def _keep_lease(self) -> None:
        try:
            while True:
                await asyncio.sleep(self.lease.renew_s)
                await self._renew()
        except Exception as error:
            self._fatal = self._fatal or error
            self._wake.set()

    async def _follow(self) -> None:
        """Fold in what other processes append: messages, cancel requests, a newer claim."""
        try:
            while True:
                seq = self.session.state.seq
                grown = await self.session.store.wait(self.session.id, seq, 1.0)
                # Most of what wakes this are our own appends. To look after each costs more than the append.
                if grown and not await self.session.catch_up(beyond=seq):
                    await asyncio.sleep(WAIT_POLL_S)
        except Exception as error:
            self._fatal = self._fatal or error
            self._wake.set()


class _ReplyBuilder:
    """A reply from its deltas, bounded."""

    def __init__(self, on_delta: Callable[[Delta], None]) -> None:
        self.on_delta = on_delta
        self._text: list[str] = []
        self._calls: dict[int, dict[str, str]] = {}
        self._usage = Usage()
        self._finish: str | None = None
        self._size = 0

    def add(self, delta: Any) -> None:
        match delta:
            case TextDelta(text):
                self._text.append(text)
                self._grow(len(text))
                self.on_delta(delta)
            case ReasoningDelta():
                self.on_delta(delta)
            case ToolCallDelta(index, identity, name, arguments):
                call = self._calls.setdefault(index, {"id": "", "name": "", "arguments": ""})
                call["id"], call["name"] = call["id"] or identity, call["name"] or name
                call["arguments"] += arguments
                self._grow(len(arguments))
            case Usage():
                self._usage = delta
            case Finished(reason):
                self._finish = reason

    def _grow(self, size: int) -> None:
        self._size += size
        if self._size > MODEL_REPLY_BYTES:
            raise ModelProtocolError(f"the model's reply is longer than {MODEL_REPLY_BYTES:,} characters")

    def done(self) -> dict[str, Any]:
        if self._finish is None:
            raise ModelProtocolError("the model's stream ended in the middle")
        usage = {"input_tokens": self._usage.input_tokens, "output_tokens": self._usage.output_tokens}
        calls = [self._calls[index] for index in sorted(self._calls)]
        return {"text": "".join(self._text), "calls": calls, "finish": self._finish, "usage": usage}
