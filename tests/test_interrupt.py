"""An interrupt is heard at once, whatever the code does. Alone on the machine: marked `timing`."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from farhand import event as ev
from farhand.agent import CodeAgent
from farhand.errors import Interrupted
from farhand.event import Event
from farhand.sandbox.environment import BARE
from farhand.sandbox.port import Sandbox
from farhand.testing import ScriptedModel, code
from farhand.tool import tool

pytestmark = [pytest.mark.anyio, pytest.mark.timing]
PROMISED_S = 0.25
HEARTBEAT_S = 0.005

RUNNING = {
    "a loop": "while True: pass",
    "a sleep": "import time\ntime.sleep(60)",
    "a regular expression": "import re\nre.match(r'(a+)+$', 'a' * 40 + 'b')",
    "a loop that swallows everything": (
        "while True:\n    try:\n        while True: pass\n    except BaseException: pass"
    ),
    "a child process": "import subprocess\nsubprocess.run(['sleep', '60'])",
    "a tool": "await forever()",
    "threads": (
        "import threading, time\n"
        "for _ in range(8): threading.Thread(target=lambda: time.sleep(60)).start()\ntime.sleep(60)"
    ),
}


@tool
async def forever() -> None:
    """Never returns."""
    await asyncio.sleep(3600)


@tool
def begun() -> None:
    """Says that the code runs."""


async def lateness(stop: asyncio.Event) -> float:
    """How late this event loop was at most, by a heartbeat of its own: the control."""
    worst = 0.0
    while not stop.is_set():
        before = time.monotonic()
        await asyncio.sleep(HEARTBEAT_S)
        worst = max(worst, time.monotonic() - before - HEARTBEAT_S)
    return worst


@pytest.mark.parametrize("name", RUNNING)
async def test_an_interrupt_ends_the_action_within_250_ms(sandbox: Sandbox, home: Path, name: str) -> None:
    script = [code(f"kept = 1\nbegun()\n{RUNNING[name]}"), code("final_answer('kept' in globals())")]
    agent = CodeAgent([begun, forever], ScriptedModel(script), sandbox.name, environment=BARE, home=home)
    asked = ended = 0.0
    finished: dict[str, Any] = {}
    stop = asyncio.Event()
    control = asyncio.create_task(lateness(stop))
    async for item in agent.stream("Go."):
        if not isinstance(item, Event):
            continue
        if item.type == ev.EFFECT_SETTLED and not asked:
            await asyncio.sleep(0.1)  # into the code behind the call
            asked = time.monotonic()
            agent.interrupt()
        if item.type == ev.ACTION_FINISHED:
            ended, finished = time.monotonic(), dict(item.data)
    stop.set()
    late = await control
    assert ended - asked - late <= PROMISED_S
    assert finished["error"]["kind"] == "interrupted"
    killed = bool(finished["lost"])
    assert ("kept" in finished["lost"]) == killed
    again = await agent.run_async("And now?", session=item.session_id)
    assert again.answer is not killed
    await agent.aclose()


async def test_an_interrupt_while_the_model_is_asked_ends_the_turn_at_once(sandbox: Sandbox, home: Path) -> None:
    async def hold(index: int) -> None:
        if index == 0:
            agent.interrupt()
            await asyncio.sleep(60)

    agent = CodeAgent([], ScriptedModel([code("1"), code("final_answer(1)")], hold=hold), sandbox.name,
                      environment=BARE, home=home)  # fmt: skip
    before = time.monotonic()
    with pytest.raises(Interrupted) as caught:
        await agent.run_async("Go.")
    assert time.monotonic() - before < 5
    result: Any = caught.value.result  # type: ignore[attr-defined]
    assert (await agent.run_async("And now?", session=result.session_id)).answer == 1
    await agent.aclose()
