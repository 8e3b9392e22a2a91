"""`farhand run`: one task, one agent, one answer."""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from farhand import event as ev
from farhand import registry
from farhand.agent import CodeAgent
from farhand.cli import display, record
from farhand.cli.advice import for_command_line
from farhand.cli.aside import Aside, standard_output
from farhand.cli.delivery import Delivered, deliver
from farhand.cli.display import Displays
from farhand.cli.exits import FAILED, INTERRUPTED, LIMIT, OK, leave_quietly, on_stop, say
from farhand.cli.lines import print_event
from farhand.cli.out import OutFolder, told
from farhand.cli.progress import Progress
from farhand.cli.tally import Tally
from farhand.cli.terminal import is_terminal
from farhand.cli.toolfile import load_tools
from farhand.errors import FarhandError, UsageError
from farhand.event import Event
from farhand.exec import check_files
from farhand.home import farhand_home
from farhand.limits import Limits
from farhand.model.port import ReasoningDelta, TextDelta
from farhand.sandbox.environment import build

if TYPE_CHECKING:
    from farhand.cli.render import Renderer

TASK_CHARS = 1_000_000
TICK_S = 0.5
"""How often a person is told how long the model has been silent."""


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
    session: str | None = None
    files: tuple[str, ...] = ()
    out: str | None = None


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


class View:
    """Where a turn is shown. This one shows nothing: it counts, and keeps figures in files."""

    speaks = False
    """Whether it says how a turn ended that was not answered, and what tools print."""

    def __init__(self, stream: TextIO, home: Path, out: OutFolder | None = None) -> None:
        self.stream, self.out = stream, out
        self.tally = Tally()
        self._home, self._shown = home, 0

    def begin(self, session_id: str) -> None:
        """Called with the id before the first event."""
        self.tally.session_id = session_id
        self._displays = Displays(self._home / "sessions" / session_id / "displays")

    def past(self, event: Event) -> None:
        """An event of an earlier turn of the session."""
        self._shown += len(display.shown(event))

    def note(self, text: str) -> None:
        say(text)

    def delta(self, delta: TextDelta | ReasoningDelta) -> None:
        return

    def event(self, event: Event) -> None:
        self.tally.event(event)
        for bundle in display.shown(event):
            self._shown += 1
            found = display.figure(bundle)
            if found is not None:
                self._displays.keep(found[1], self._shown, found[2])
        if event.type == ev.TURN_ANSWERED:
            path = self._displays.keep_answer(event)
            self.tally.answer = self.tally.answer if path is None else str(path)

    def tick(self) -> None:
        return

    def tool_said(self, text: str) -> None:
        """What one of the person's tools printed; only a view that `speaks` is told."""

    def end(self) -> None:
        if self.out is not None and self.tally.session_id:
            for line in told(_taken(self.out, self.tally, self._files, self._displays)):
                say(f"farhand: {line}")

    @property
    def _files(self) -> Path:
        return self._home / "sessions" / self.tally.session_id / "files"


class JsonView(View):
    """The events, one a line."""

    def event(self, event: Event) -> None:
        super().event(event)
        print_event(event, self.stream)


class AnswerView(View):
    """The answer alone, for a pipe; on standard error where the files are."""

    def end(self) -> None:
        if self.tally.answer is not None:
            print(self.tally.answer, file=self.stream, flush=True)
        super().end()
        places = [("files", self._files)] if self.tally.files else []
        if self.tally.session_id and self._displays.kept:
            places.append(("figures", self._displays.folder))
        if places and self.out is None:
            say(f"session {self.tally.session_id} " + " ".join(f"{what} {path}" for what, path in places))


class PersonView(View):
    """The whole course of it, for a person; the answer as well where standard output is the terminal."""

    speaks = True

    def __init__(self, stream: TextIO, home: Path, out: OutFolder | None = None) -> None:
        from farhand.cli.page import Page, console_on

        super().__init__(stream, home, out)
        self._whole = is_terminal(stream)
        self._page = Page(console_on(stream if self._whole else sys.stderr))

    @cached_property
    def _renderer(self) -> Renderer:
        """Made when the session and what it has shown before are known."""
        from farhand.cli.render import Renderer

        return Renderer(
            self._page,
            answered=self._whole,
            keep=self._displays.keep,
            displays=self._shown,
            answer_file=self._displays.keep_answer,
        )

    def note(self, text: str) -> None:
        self._page.prose(text, "yellow")
        self._page.end_line()

    def delta(self, delta: TextDelta | ReasoningDelta) -> None:
        if isinstance(delta, TextDelta):
            self._renderer.text(delta.text)
        else:
            self._renderer.reasoning(delta.text)

    def event(self, event: Event) -> None:
        self.tally.event(event)
        self._renderer.event(event)
        if event.type == ev.MODEL_REQUESTED:
            self._renderer.waits(str(event.data.get("model") or "the model"), time.monotonic())
        if event.type == ev.TURN_ANSWERED and display.answer_picture(event) is not None and self._displays.kept:
            self.tally.answer = str(self._displays.kept[-1])

    def tick(self) -> None:
        if self.tally.session_id:
            self._renderer.tick(time.monotonic())

    def tool_said(self, text: str) -> None:
        if self.tally.session_id:
            self._renderer.tool_said(text)

    def end(self) -> None:
        from farhand.cli.summary import write_summary

        if not self.tally.session_id:
            return
        self._renderer.finish()
        delivered = []
        if self.out is not None:
            delivered = _taken(self.out, self.tally, self._files, self._displays)
        elif self._whole and self.tally.files:
            delivered = deliver(self.tally.files, self._files, Path.cwd())
        write_summary(self._page, self.tally, self._home, delivered)
        if not self._whole and self.tally.answer is not None:
            print(self.tally.answer, file=self.stream, flush=True)


def _taken(out: OutFolder, tally: Tally, files: Path, displays: Displays) -> list[Delivered]:
    """New files and figures of the turn, copied to where the person wants them."""
    return out.files(tally.files, files) + [out.copy_figure(path) for path in displays.kept]


def view_for(as_json: bool, stream: TextIO, home: Path, out: OutFolder | None = None) -> View:
    if as_json:
        return JsonView(stream, home, out)
    if is_terminal(stream) or is_terminal(sys.stderr):
        return PersonView(stream, home, out)
    return AnswerView(stream, home, out)


def run(order: Order) -> int:
    home = farhand_home()
    task = _task(order.task)
    chosen = registry.choose_model(order.model, os.environ, home)
    registry.check_model(chosen)
    session = asyncio.run(_session(order.session)) if order.session is not None else None
    check_files([Path(name) for name in order.files], _limits(order))
    out = OutFolder(order.out) if order.out is not None else None
    with standard_output() as (stream, aside):
        view = view_for(order.as_json, stream, home, out)
        model = registry.model(chosen, home)
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
        return asyncio.run(Turn(agent, task, view, session, order.files).run(aside))


async def _session(name: str) -> str:
    async with record.opened() as (store, _):
        return await record.find(store, name)


def _task(given: str) -> str:
    task = given
    if given == "-":
        try:
            task = sys.stdin.buffer.read(4 * TASK_CHARS + 4).decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise UsageError(f"the task is not UTF-8 text: {error.reason} at byte {error.start}") from error
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

    def __init__(
        self, agent: CodeAgent, task: str, view: View, session: str | None = None, files: Sequence[str] = ()
    ) -> None:
        self._agent, self._task, self._view = agent, task, view
        self._session, self._files = session, files
        self._main: asyncio.Task[object] | None = None
        self._begun = self._stopping = False
        self._end: Event | None = None

    async def run(self, aside: Aside) -> int:
        self._main = asyncio.current_task()
        on_stop(self._interrupt)
        ticking = asyncio.create_task(self._tick())
        loop = asyncio.get_running_loop()
        if self._view.speaks:
            aside.show = lambda text: loop.call_soon_threadsafe(self._view.tool_said, text)
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
            aside.show = None
            ticking.cancel()
            await self._agent.aclose()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._view.tick()

    async def _follow(self) -> None:
        async with aclosing(self._agent.stream(self._task, session=self._session, files=self._files)) as stream:
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
        """The events before the message: that a session was created is part of what is shown, its earlier turns not."""
        self._view.begin(first.session_id)
        async for event in record.events(self._agent.store, self._agent.blobs, first.session_id, until=first.seq):
            if self._session is None:
                self._view.event(event)
            else:
                self._view.past(event)

    def _outcome(self) -> int:
        if self._end is None:
            say("farhand: the turn did not end; farhand show last has what there is")
            return INTERRUPTED if self._stopping else FAILED
        if self._end.type == ev.TURN_ANSWERED:
            return OK
        error = self._end.data.get("error") or {}
        if not self._view.speaks:
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
    hint = f"\n  {for_command_line(str(error['hint']))}" if error.get("hint") else ""
    return f"farhand: no answer: {error.get('message') or 'the turn failed'}{hint}"
