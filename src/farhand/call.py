"""Tool calls: what a `call` frame intends, and running a tool under the ledger.

`effect.intended` is committed before the tool starts, `effect.settled` when it ended; then the value is delivered to
the box.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

from farhand import event as ev
from farhand import ledger, value
from farhand.decide import CallTool, Settle, limits_of
from farhand.errors import FarhandError, Fenced, ToolArgumentError, ToolTimedOut
from farhand.event import NewEvent
from farhand.limits import TOOL_CANCEL_S, TOOL_THREAD_IDLE_S, TOOL_TIMEOUT_S
from farhand.sandbox.port import Frame
from farhand.session import Session, is_inline
from farhand.state import Action, Effect, State
from farhand.tool import BoundArguments, Tool, ToolContext

ERROR_CHARS = 8_000
RECEIPT_S = 5.0
"""How long a cancelled task still waits for its receipt to be written."""


def intention(state: State, action: Action, tools: dict[str, Tool], frame: Frame, box: str) -> list[NewEvent]:
    """The events of a `call` frame: intended; and settled as never started when it cannot be a call of a tool at all.

    The frame is guest-controlled: names and values are checked, nothing of it is executed.
    """
    name = ascii(frame["tool"][:200])[1:-1]
    tool = tools.get(name)
    error: dict[str, Any] | None = None
    arguments: Any = {"args": frame["args"], "kwargs": frame["kwargs"]}
    digest = "refused:" + ascii(frame["call"][:60])
    try:
        if tool is None:
            raise ToolArgumentError(f"there is no tool {name!r}", hint=f"Tools: {', '.join(sorted(tools)) or 'none'}.")
        bound = bind(tool, arguments)
        arguments = value.encode(dict(bound.arguments))
        digest = value.digest(dict(bound.arguments))
    except (value.ValueProblem, FarhandError, TypeError) as problem:
        error = error_of(problem)
    n = action.same(name, digest) + 1
    identity = ledger.effect_id(state.session_id, action.id, name, digest, n)
    intended = {
        "effect": identity,
        "action": action.id,
        "call": frame["call"],
        "frame": frame["n"],
        "box": box,
        "tool": name,
        "class": tool.effect if tool is not None else "opaque",
        "arguments": arguments,
        "digest": digest,
        "n": n,
        "key": identity,
        "attempt": 1,
    }
    events = [NewEvent(ev.EFFECT_INTENDED, intended)]
    if error is not None:
        events.append(_settled(identity, frame["call"], ledger.NEVER, error=error))
    return events


def bind(tool: Tool, arguments: dict[str, Any]) -> BoundArguments:
    """The arguments of a call frame, decoded and bound to the tool's signature."""
    args = [value.decode(tree) for tree in arguments["args"]]
    kwargs = {str(name): value.decode(tree) for name, tree in arguments["kwargs"].items()}
    return tool.bind(args, kwargs)


def error_of(error: BaseException, redact: Callable[[str], str] = lambda text: text) -> dict[str, Any]:
    """An exception as the model's code sees it: its type, a bounded message, a hint. Secrets are masked first."""
    try:
        message = redact(error.message if isinstance(error, FarhandError) else str(error))
        hint = redact(error.hint if isinstance(error, FarhandError) else "")
    except Exception:
        message, hint = "(this exception cannot be shown as text)", ""
    if len(message) > ERROR_CHARS:
        message = f"{message[:ERROR_CHARS]} [… {len(message) - ERROR_CHARS:,} characters cut]"
    return {"type": type(error).__name__, "message": message, "hint": hint[:ERROR_CHARS]}


def _settled(
    effect: str,
    call: str,
    outcome: str,
    *,
    tree: Any = None,
    error: dict[str, Any] | None = None,
    seconds: float = 0.0,
) -> NewEvent:
    data = {"effect": effect, "call": call, "outcome": outcome, "value": tree, "error": error}
    return NewEvent(ev.EFFECT_SETTLED, {**data, "seconds": round(seconds, 6)})


class Caller:
    """Runs tools. `deliver` hands a settled effect to the box; `renew` extends the lease or raises Fenced."""

    def __init__(
        self,
        session: Session,
        tools: dict[str, Tool],
        redact: Callable[[str], str],
        lease_holds: Callable[[], bool],
        renew: Callable[[], Awaitable[None]],
        deliver: Callable[[Effect], Awaitable[None]],
    ) -> None:
        self._session, self._tools, self._redact = session, tools, redact
        self._lease_holds, self._renew, self._deliver = lease_holds, renew, deliver
        self._running: set[asyncio.Future[None]] = set()
        """For each running tool a future that tells it to stop."""
        self._stopped: str | None = None

    def stop(self, turn: str) -> None:
        """Cancel the turn's running tools and start no more of it."""
        self._stopped = turn
        for told in self._running:
            if not told.done():
                told.set_result(None)

    async def settle_interrupted(self, command: Settle) -> None:
        effect = self._session.state.effects[command.effect]
        error = {"type": "OutcomeUnknown", "message": command.message, "hint": ""}
        await self._settle(effect, _settled(effect.id, effect.call, command.outcome, error=error))

    async def call(self, command: CallTool) -> None:
        effect = self._session.state.effects[command.effect]
        if command.again:  # becomes an effect of this generation, whose call `decide` asks for next
            await self._intend_again(effect)
            return
        refused = self._refusal(effect)
        if refused is not None:
            await self._settle(effect, _settled(effect.id, effect.call, ledger.NEVER, error=refused))
        else:
            await self._settle(effect, await self._run(effect))

    async def _settle(self, effect: Effect, event: NewEvent) -> None:
        """Write the receipt down whatever happens to this task, then deliver."""
        if not self._session.appending and is_inline(event):
            await self._session.append(event)  # handed to the store before anything can cancel it
        else:
            writing = asyncio.ensure_future(self._session.append(event))
            try:
                await asyncio.shield(writing)
            except asyncio.CancelledError:
                await asyncio.wait([writing], timeout=RECEIPT_S)
                raise
        await self._deliver(effect)

    async def _intend_again(self, effect: Effect) -> None:
        again = {
            "effect": effect.id,
            "action": effect.action,
            "call": effect.call,
            "box": effect.box,
            "tool": effect.tool,
            "class": effect.effect_class,
            "arguments": effect.arguments,
            "digest": effect.digest,
            "n": effect.n,
            "key": effect.key,
            "attempt": effect.attempt + 1,
        }
        await self._session.append(NewEvent(ev.EFFECT_INTENDED, again))

    def _refusal(self, effect: Effect) -> dict[str, Any] | None:
        """Why the tool is not started, if it is not."""
        state = self._session.state
        if state.turn is None or state.turn.cancel is not None or self._stopped == state.turn.id:
            return {"type": "ToolError", "message": "the turn was stopped before this call began", "hint": ""}
        first = ledger.blocked_by(state, effect)
        if first is not None:
            message = (
                f"{effect.tool} was called with these arguments before ({first.id}) and its outcome is unknown: "
                "it may have happened, so it is not started again"
            )
            hint = "Find out by other means whether it took effect, or tell the user; do not repeat it."
            return {"type": "OutcomeUnknown", "message": message, "hint": hint}
        limits = limits_of(state)
        action = state.turn.step.action if state.turn.step is not None else None
        made = len(action.effects) if action is not None and action.id == effect.action else 0
        if made > limits.tool_calls:
            message = f"the limit `tool_calls` was reached: {limits.tool_calls} calls in one action"
            return {"type": "LimitReached", "message": message, "hint": "Do the rest in another action."}
        return None

    async def _run(self, effect: Effect) -> NewEvent:
        tool = self._tools.get(effect.tool)
        if tool is None:
            error = {"type": "ToolError", "message": f"the tool {effect.tool!r} is not here any more", "hint": ""}
            return _settled(effect.id, effect.call, ledger.NEVER, error=error)
        try:
            bound = tool.rebind(value.decode(effect.arguments))
        except (value.ValueProblem, FarhandError, TypeError) as problem:
            return _settled(effect.id, effect.call, ledger.NEVER, error=error_of(problem))
        if not self._lease_holds():
            await self._renew()
        started = time.monotonic()
        try:
            result = await self._dispatch(tool, effect, bound)
        except _LeaseOver:
            raise Fenced("the lease ran out before the tool could be started") from None
        except asyncio.CancelledError:
            outcome = ledger.outcome_of(asyncio.CancelledError(), effect.effect_class)
            error = {"type": "Interrupted", "message": f"{effect.tool} was stopped while it ran", "hint": ""}
            return _settled(effect.id, effect.call, outcome, error=error, seconds=time.monotonic() - started)
        except Exception as problem:
            outcome = ledger.outcome_of(problem, effect.effect_class)
            what = error_of(problem, self._redact)
            return _settled(effect.id, effect.call, outcome, error=what, seconds=time.monotonic() - started)
        return self._done(effect, result, time.monotonic() - started)

    def _done(self, effect: Effect, result: Any, seconds: float) -> NewEvent:
        """A tool that returned is done, also when its value cannot travel: that the code is told."""
        try:
            tree = value.encode(
                result, max_bytes=min(limits_of(self._session.state).result_bytes, value.MAX_VALUE_BYTES)
            )
        except value.ValueProblem as problem:
            error = error_of(problem)
            error["message"] = f"{effect.tool} ran, but its result cannot be brought into the box: {error['message']}"
            return _settled(effect.id, effect.call, ledger.DONE, error=error, seconds=seconds)
        return _settled(effect.id, effect.call, ledger.DONE, tree=tree, seconds=seconds)

    async def _dispatch(self, tool: Tool, effect: Effect, bound: BoundArguments) -> Any:
        """The tool's result, or its exception, within its time. One that does not end when cancelled is left."""
        timeout_s = tool.timeout_s or TOOL_TIMEOUT_S
        context = ToolContext(
            idempotency_key=effect.key, session_id=self._session.id, deadline=time.monotonic() + timeout_s
        )
        args, kwargs = tool.call_arguments(bound, context)
        work = start_tool(tool, args, kwargs, self._permit)
        told: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._running.add(told)
        try:
            await asyncio.wait([work, told], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await _abandon(work)
            raise
        finally:
            self._running.discard(told)
        if work.done():
            return work.result()
        await _abandon(work)
        if told.done():
            raise asyncio.CancelledError
        raise ToolTimedOut(f"{tool.name} gave no result within {timeout_s:g} s")

    def _permit(self) -> None:
        """Read right before a tool starts: no call begins later than the lease."""
        if not self._lease_holds():
            raise _LeaseOver


class _LeaseOver(Exception):
    """The lease ran out between the last check and the start of the tool."""


async def _abandon(work: asyncio.Future[Any]) -> None:
    work.cancel()
    await asyncio.wait([work], timeout=TOOL_CANCEL_S)
    work.add_done_callback(lambda done: done.cancelled() or done.exception())


def start_tool(
    tool: Tool, args: tuple[Any, ...], kwargs: dict[str, Any], permit: Callable[[], None] = lambda: None
) -> asyncio.Future[Any]:
    """An async tool on this loop; any other on a thread that has no other, which a time-out or a cancel leaves behind.

    `permit` is called right before the tool. SystemExit and the like become RuntimeError: a tool ends itself, not the
    harness.
    """
    if tool.is_async:
        return asyncio.ensure_future(_awaited(tool, args, kwargs, permit))
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def work() -> None:
        try:
            permit()
            outcome: tuple[Any, Exception | None] = (tool.function(*args, **kwargs), None)
        except StopIteration as problem:  # cannot be raised into a future
            outcome = (None, _as_error(problem))
        except Exception as problem:
            outcome = (None, problem)
        except BaseException as problem:
            outcome = (None, _as_error(problem))
        try:
            loop.call_soon_threadsafe(_finish, future, *outcome)
        except RuntimeError:
            return  # the loop is closed: nobody waits

    _threads.run(work)
    return future


async def _awaited(tool: Tool, args: tuple[Any, ...], kwargs: dict[str, Any], permit: Callable[[], None]) -> Any:
    try:
        permit()
        return await tool.function(*args, **kwargs)
    except (Exception, asyncio.CancelledError):
        raise
    except BaseException as problem:
        raise _as_error(problem) from problem


def _as_error(problem: BaseException) -> RuntimeError:
    return RuntimeError(f"the tool raised {type(problem).__name__}: {problem}")


class _Threads:
    """Threads that run one tool at a time and then the next one: to start one takes as long as a commit. One whose tool
    does not come back is left behind, and was never waited for."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """In a forked child none of them runs."""
        self._lock = threading.Lock()
        self._idle: list[queue.SimpleQueue[Callable[[], None]]] = []

    def run(self, work: Callable[[], None]) -> None:
        with self._lock:
            jobs = self._idle.pop() if self._idle else None
        if jobs is not None:
            jobs.put(work)
            return
        jobs = queue.SimpleQueue()
        jobs.put(work)
        threading.Thread(target=self._serve, args=(jobs,), name="farhand-tool", daemon=True).start()

    def _serve(self, jobs: queue.SimpleQueue[Callable[[], None]]) -> None:
        while True:
            try:
                work = jobs.get(timeout=TOOL_THREAD_IDLE_S)
            except queue.Empty:
                with self._lock:
                    if jobs in self._idle:
                        self._idle.remove(jobs)
                        return
                continue  # it is being given something in this moment
            work()
            del work
            with self._lock:
                self._idle.append(jobs)


_threads = _Threads()
os.register_at_fork(after_in_child=_threads.forget)


def _finish(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
