"""`farhand run`: one task, one agent, one answer."""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from farhand import event as ev
from farhand import registry
from farhand.agent import CodeAgent
from farhand.cli.exits import FAILED, INTERRUPTED, LIMIT, OK, leave_quietly, on_stop, say
from farhand.cli.lines import print_event
from farhand.cli.progress import Progress
from farhand.cli.tally import Tally
from farhand.cli.terminal import is_terminal
from farhand.cli.toolfile import load_tools
from farhand.errors import FarhandError, UsageError
from farhand.event import Event
from farhand.home import farhand_home
from farhand.limits import Limits
from farhand.model.port import ReasoningDelta, TextDelta
from farhand.sandbox.environment import build
from farhand.session import unpack

TASK_CHARS = 1_000_000


@dataclass(frozen=True, slots=True)
class Order:
    """The command line of `farhand run`."""

    task: str
    model: str | None = None
    sandbox: str = "local"
    as_json: bool = False
    max_steps: int | None = None
    timeout_s: float | None = None
    imports: tuple[str, ...] = ()
    tools: str | None = None


class _BuiltIn(CodeAgent):
    """The agent of `farhand run`. The session names it by the flags that make it again."""

    def __init__(self, order: Order, **parts: Any) -> None:
        super().__init__(**parts)
        self._order = order

    def reference(self) -> str:
        order = self._order
        flags = ["--model", order.model] if order.model else []
        flags += ["--sandbox", order.sandbox]
        for name in order.imports:
            flags += ["--import", name]
        if order.tools:
            flags += ["--tools", os.path.abspath(order.tools)]
        if order.max_steps is not None:
            flags += ["--max-steps", str(order.max_steps)]
        if order.timeout_s is not None:
            flags += ["--timeout", f"{order.timeout_s:g}"]
        return shlex.join(["farhand", "run", *flags])


class View(Protocol):
    """Where a turn is shown."""

    def note(self, text: str) -> None: ...

    def delta(self, delta: TextDelta | ReasoningDelta) -> None: ...

    def event(self, event: Event) -> None: ...

    def end(self) -> None: ...


class JsonView:
    """The events, one a line."""

    def note(self, text: str) -> None:
        return

    def delta(self, delta: TextDelta | ReasoningDelta) -> None:
        return

    def event(self, event: Event) -> None:
        print_event(event, sys.stdout)

    def end(self) -> None:
        return


class AnswerView:
    """The answer alone, for a pipe."""

    def __init__(self) -> None:
        self._tally = Tally()

    def note(self, text: str) -> None:
        return

    def delta(self, delta: TextDelta | ReasoningDelta) -> None:
        return

    def event(self, event: Event) -> None:
        self._tally.event(event)

    def end(self) -> None:
        if self._tally.answer is not None:
            print(self._tally.answer, flush=True)


class PersonView:
    """The whole course of it, for a person; the answer as well where standard output is the terminal."""

    def __init__(self, home: Path) -> None:
        from farhand.cli.page import Page, console_on
        from farhand.cli.render import Renderer

        self._home = home
        self._whole = is_terminal(sys.stdout)
        self._page = Page(console_on(sys.stdout if self._whole else sys.stderr))
        self._renderer = Renderer(self._page, answered=self._whole, keep=self._keep)
        self._tally = Tally()

    def _keep(self, suffix: str, number: int, data: bytes) -> Path | None:
        from farhand.cli.display import Displays

        return Displays(self._home / "sessions" / self._tally.session_id / "displays").keep(suffix, number, data)

    def note(self, text: str) -> None:
        self._renderer.note(text)

    def delta(self, delta: TextDelta | ReasoningDelta) -> None:
        if isinstance(delta, TextDelta):
            self._renderer.text(delta.text)
        else:
            self._renderer.reasoning(delta.text)

    def event(self, event: Event) -> None:
        self._tally.event(event)
        self._renderer.event(event)

    def end(self) -> None:
        from farhand.cli.delivery import deliver
        from farhand.cli.summary import write_summary

        self._renderer.finish()
        delivered = []
        if self._whole and self._tally.files:
            files = self._home / "sessions" / self._tally.session_id / "files"
            delivered = deliver(self._tally.files, files, Path.cwd())
        write_summary(self._page, self._tally, self._home, delivered)
        if not self._whole and self._tally.answer is not None:
            print(self._tally.answer, flush=True)


def view_for(as_json: bool, home: Path) -> View:
    if as_json:
        return JsonView()
    if is_terminal(sys.stdout) or is_terminal(sys.stderr):
        return PersonView(home)
    return AnswerView()


def run(order: Order) -> int:
    home = farhand_home()
    task = _task(order.task)
    model = registry.model(registry.choose_model(order.model, os.environ, home), home)
    view = view_for(order.as_json, home)
    agent = _BuiltIn(
        order,
        tools=load_tools(order.tools),
        model=model,
        sandbox=registry.sandbox(order.sandbox, home),
        additional_authorized_imports=order.imports,
        limits=_limits(order),
        home=home,
    )
    if model.prompting.note:
        view.note(model.prompting.note)
    # Built here because it takes a minute the first time, and a person wants to see why.
    with Progress() as progress:
        build(agent.environment, home, progress)
    return asyncio.run(Turn(agent, task, view).run())


def _task(given: str) -> str:
    task = given
    if given == "-":
        task = sys.stdin.buffer.read(TASK_CHARS + 1).decode("utf-8", "replace")
    if not task.strip():
        raise UsageError("the task is empty")
    if len(task) > TASK_CHARS:
        raise UsageError(f"the task is longer than {TASK_CHARS:,} characters", hint="Put long material into a file.")
    return task


def _limits(order: Order) -> Limits:
    limits = Limits()
    if order.max_steps is not None:
        limits = replace(limits, steps=order.max_steps)
    if order.timeout_s is not None:
        limits = replace(limits, turn_s=order.timeout_s)
    return limits


class Turn:
    """One turn, shown as it goes. The first Ctrl-C stops it cleanly, the second one leaves at once."""

    def __init__(self, agent: CodeAgent, task: str, view: View) -> None:
        self._agent, self._task, self._view = agent, task, view
        self._main: asyncio.Task[object] | None = None
        self._begun = self._stopping = False
        self._end: Event | None = None

    async def run(self) -> int:
        self._main = asyncio.current_task()
        on_stop(self._interrupt)
        try:
            await self._follow()
            self._view.end()
            return self._outcome()
        except asyncio.CancelledError:
            return INTERRUPTED
        except FarhandError:
            self._view.end()
            raise
        except BrokenPipeError:
            return leave_quietly()
        finally:
            await self._agent.aclose()

    async def _follow(self) -> None:
        async with aclosing(self._agent.stream(self._task)) as stream:
            async for item in stream:
                if isinstance(item, Event):
                    if not self._begun:
                        await self._beginning(item)
                    self._begun = True
                    if item.type in _ENDS:
                        self._end = item
                    self._view.event(item)
                else:
                    self._view.delta(item)

    async def _beginning(self, first: Event) -> None:
        """The events before the message: that the session was created is part of what is shown."""
        for event in await self._agent.store.read(first.session_id, 0, first.seq - 1) if first.seq > 1 else ():
            self._view.event(await unpack(self._agent.blobs, event))

    def _outcome(self) -> int:
        if self._end is None:
            say("farhand: the turn did not end; farhand show last has what there is")
            return INTERRUPTED if self._stopping else FAILED
        if self._end.type == ev.TURN_ANSWERED:
            return OK
        error = self._end.data.get("error") or {}
        if not isinstance(self._view, PersonView):
            say(_told(error) if self._end.type == ev.TURN_FAILED else "farhand: stopped")
        if self._end.type == ev.TURN_CANCELLED:
            return INTERRUPTED
        return LIMIT if error.get("limit") else FAILED

    def _interrupt(self) -> None:
        self._stopping = True
        if self._begun:
            self._agent.interrupt()
        elif self._main is not None:
            self._main.cancel()


_ENDS = (ev.TURN_ANSWERED, ev.TURN_FAILED, ev.TURN_CANCELLED)


def _told(error: Mapping[str, object]) -> str:
    hint = f"\n  {error['hint']}" if error.get("hint") else ""
    return f"farhand: no answer: {error.get('message') or 'the turn failed'}{hint}"
