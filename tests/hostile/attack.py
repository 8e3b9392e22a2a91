"""Attacks on a session: hostile code is what the model wrote, and the session must go on after it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from driving import SMALL, changed
from farhand import event as ev
from farhand.agent import CodeAgent, RunResult
from farhand.event import Event
from farhand.sandbox.environment import BARE, Environment
from farhand.sandbox.port import Sandbox
from farhand.testing import ScriptedModel
from farhand.testing.models import Scripted, code
from farhand.tool import Tool

PRELUDE = """
import json, os, signal, socket, stat, sys, threading, time
def frame_fd():
    for fd in range(3, 1000):
        try:
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                return fd
        except OSError:
            pass
def this_action():
    frame = sys._getframe()
    while frame is not None:
        told = frame.f_locals.get("frame")
        if isinstance(told, dict) and "action" in told:
            return told["action"]
        frame = frame.f_back
fd = frame_fd()
channel = socket.socket(fileno=os.dup(fd))
def send(*frames):
    for frame in frames:
        channel.sendall(frame if isinstance(frame, bytes) else json.dumps(frame).encode() + b"\\n")
"""
"""What guest code needs to speak in the worker's name."""

FOREVER = "\ntime.sleep(60)"


@dataclass
class Fallout:
    """What an attack did to its session. `first` is how its action ended."""

    result: RunResult
    first: dict[str, Any]

    @property
    def events(self) -> tuple[Event, ...]:
        return self.result.events

    @property
    def kind(self) -> str:
        """Of the error, or "ok"."""
        return "ok" if self.first["ok"] else str(self.first["error"]["kind"])

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = self.first["error"]
        return error

    @property
    def text(self) -> str | None:
        shown = self.first["value"]
        return shown["text/plain"] if shown else None

    @property
    def output(self) -> str:
        wrote = [event for event in self.events if event.type == ev.ACTION_WROTE]
        return "".join(text for event in wrote for _, text in event.data["chunks"])

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [dict(event.data) for event in self.events if event.type == kind]


class Attacker:
    """Runs attacks as sessions of agents over one provider."""

    def __init__(self, sandbox: Sandbox, home: Path) -> None:
        self.sandbox, self.home = sandbox, home

    def agent(self, *sources: str | Scripted, tools: Sequence[Any] = (), **limits: Any) -> CodeAgent:
        replies = [code(source) if isinstance(source, str) else source for source in sources]
        environment: Environment = limits.pop("environment", BARE)
        return CodeAgent(
            tools=tools,
            model=ScriptedModel(replies),
            sandbox=self.sandbox,
            home=self.home,
            environment=environment,
            limits=changed(SMALL, **limits),
        )

    async def __call__(
        self,
        attack: str,
        *more: str,
        tools: Sequence[Tool | Callable[..., Any]] = (),
        prelude: str = PRELUDE,
        **limits: Any,
    ) -> Fallout:
        """Run the attack and what comes `more`; the action after them has to work, in the same session."""
        limits = {"wall_s": 2.0, **limits}
        agent = self.agent(prelude + attack, *more, "final_answer(1 + 1)", tools=tools, **limits)
        try:
            result = await agent.run_async("attack")
        finally:
            await agent.aclose()
        assert result.answer == 2
        finished = [dict(event.data) for event in result.events if event.type == ev.ACTION_FINISHED]
        assert len(finished) == 2 + len(more)
        return Fallout(result, finished[0])


@contextmanager
def memory_grows_at_most(size_bytes: int) -> Iterator[None]:
    """The peak of this process's memory, over what it has now."""
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    yield
    assert _status("VmHWM") - before <= size_bytes


def resident_bytes(pid: int) -> int:
    return _status("VmRSS", pid)


def _status(name: str, pid: int | None = None) -> int:
    text = Path(f"/proc/{pid or os.getpid()}/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith(name + ":"))
