"""Driving a box from a test: open it, run code, gather what it said."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from farhand import value
from farhand.limits import MIB, Limits
from farhand.sandbox.environment import BARE, Environment
from farhand.sandbox.hand import Hand
from farhand.sandbox.port import Frame, Sandbox
from farhand.tool import Tool

SMALL = Limits(wall_s=20, memory_bytes=512 * MIB)
PATIENCE_S = 30.0
_ids = itertools.count(1)


@dataclass
class Outcome:
    """What an action said, frame by frame."""

    frames: list[Frame] = field(default_factory=list)

    def of(self, kind: str) -> list[Frame]:
        return [frame for frame in self.frames if frame["t"] == kind]

    @property
    def done(self) -> Frame:
        return self.frames[-1]

    @property
    def ok(self) -> bool:
        return bool(self.done["ok"])

    @property
    def out(self) -> str:
        return "".join(frame["text"] for frame in self.of("out") if frame["stream"] == "stdout")

    @property
    def err(self) -> str:
        return "".join(frame["text"] for frame in self.of("out") if frame["stream"] == "stderr")

    @property
    def text(self) -> str | None:
        shown = self.done["value"]
        return shown["text/plain"] if shown else None

    @property
    def error(self) -> dict[str, Any]:
        found: dict[str, Any] | None = self.done["error"]
        assert found is not None, f"the action ended well: {self.done}"
        return found


@asynccontextmanager
async def opened(
    sandbox: Sandbox,
    *,
    limits: Limits = SMALL,
    tools: Sequence[Tool] = (),
    imports: Sequence[str] | None = None,
    environment: Environment = BARE,
    generation: int = 1,
) -> AsyncIterator[Hand]:
    """A hand on a new box, which is destroyed at the end."""
    box = await sandbox.create(environment, limits, {"session": f"ses_{next(_ids)}", "generation": str(generation)})
    try:
        hand = await Hand.open(
            box, generation=generation, limits=limits, tools=[tool.stub() for tool in tools], imports=imports
        )
        try:
            yield hand
        finally:
            await hand.close()
    finally:
        await box.destroy()


async def act(
    hand: Hand,
    code: str,
    *,
    answers: Mapping[str, Callable[..., Any]] | None = None,
    title: str = "<action 1>",
    action: str | None = None,
    on_frame: Callable[[Frame], Any] = lambda frame: None,
) -> Outcome:
    """Run code to its `done`; each call is answered by the function of its name. Every frame is acknowledged."""
    outcome = Outcome()

    async def follow() -> None:
        await hand.run(action or f"act_{next(_ids)}", code, title)
        async for frame in hand.frames():
            outcome.frames.append(frame)
            if frame["t"] == "call":
                await answer(hand, frame, answers or {})
            on_frame(frame)
            await hand.ack(frame["n"])

    await asyncio.wait_for(follow(), PATIENCE_S)
    return outcome


async def answer(hand: Hand, frame: Frame, answers: Mapping[str, Callable[..., Any]]) -> None:
    function = answers.get(frame["tool"])
    if function is None:
        return
    args = [value.decode(each) for each in frame["args"]]
    kwargs = {name: value.decode(each) for name, each in frame["kwargs"].items()}
    try:
        tree = value.encode(function(*args, **kwargs))
    except Exception as error:
        await hand.reply_error(frame["call"], type(error).__name__, str(error))
        return
    await hand.reply(frame["call"], tree)


async def still_works(hand: Hand) -> None:
    """The next action gives its value."""
    outcome = await act(hand, "1 + 1")
    assert outcome.text == "2", outcome.done


def changed(limits: Limits, **fields: Any) -> Limits:
    return Limits(**{**asdict(limits), **fields})


def running(pid: int) -> bool:
    """Whether a process is there and not merely waiting to be reaped."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"
