"""Two drivers, drivers that stop, drivers that die: who may go on, and what is done once."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from farhand import event as ev
from farhand.errors import Fenced, Held
from farhand.event import Event, NewEvent
from farhand.sandbox.port import Sandbox
from farhand.session import Session
from harness_program import make_agent

pytestmark = [pytest.mark.anyio]
PROGRAM = Path(__file__).with_name("harness_program.py")
PATIENCE_S = 30.0


class Harness:
    """`harness_program.py` at work on a session."""

    def __init__(self, folder: Path, source: str, sandbox: str, lease_s: float = 15.0) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), str(folder), sandbox, source, str(lease_s)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.session_id = self.process.stdout.readline().strip()
        assert self.session_id.startswith("ses_")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.kill()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def harnesses(sandbox: Sandbox, tmp_path: Path) -> Iterator[Callable[..., Harness]]:
    made: list[Harness] = []

    def make(source: str, **options: Any) -> Harness:
        made.append(Harness(tmp_path, source, sandbox=sandbox.name, **options))
        return made[-1]

    yield make
    (tmp_path / "go").touch()
    for harness in made:
        harness.close()


def notes(home: Path) -> list[str]:
    path = home / "notes"
    return path.read_text().splitlines() if path.exists() else []


async def until(there: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not there():
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.01)


async def log_of(session: Session) -> list[Event]:
    """The log of a session that nobody has folded yet, with its blobs."""
    events: list[Event] = []
    other = Session(session.store, session.blobs, session.id)
    other.listen(events.append)
    await other.catch_up()
    return events


async def logged(session: Session, kind: str, count: int = 1) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while sum(event.type == kind for event in await log_of(session)) < count:
        assert time.monotonic() < deadline, f"no {kind} in time"
        await asyncio.sleep(0.01)


def written(events: list[Event]) -> str:
    return "".join(text for event in events if event.type == ev.ACTION_WROTE for _, text in event.data["chunks"])


async def test_one_of_two_drivers_drives_and_the_other_is_refused(
    harnesses: Any, sandbox: Sandbox, tmp_path: Path
) -> None:
    harness = harnesses("note('wait')\nfinal_answer(1)")
    await until(lambda: notes(tmp_path))
    agent = make_agent(tmp_path, sandbox.name, "final_answer(2)")
    with pytest.raises(Held, match="own_"):
        await agent.driver(harness.session_id).drive()
    (tmp_path / "go").touch()
    assert harness.process.wait(PATIENCE_S) == 0
    assert notes(tmp_path) == ["wait"]
    await agent.aclose()


async def test_a_message_while_a_tool_runs_loses_no_receipt(harnesses: Any, sandbox: Sandbox, tmp_path: Path) -> None:
    harness = harnesses("note('wait')\nfinal_answer(1)")
    await until(lambda: notes(tmp_path))
    agent = make_agent(tmp_path, sandbox.name, "")
    session = agent.driver(harness.session_id).session
    for n in range(20):
        await session.post(NewEvent(ev.MESSAGE_RECEIVED, {"role": "user", "text": f"more {n}", "sender": "user:local"}))
    (tmp_path / "go").touch()
    await logged(session, ev.TURN_ANSWERED)
    assert harness.process.wait(PATIENCE_S) == 0
    events = await log_of(session)
    settled = [event for event in events if event.type == ev.EFFECT_SETTLED]
    assert [event.data["outcome"] for event in settled] == ["done"]
    assert sum(event.type == ev.MESSAGE_RECEIVED for event in events) == 21
    await agent.aclose()


async def test_a_driver_stopped_past_its_lease_is_fenced_when_it_wakes(
    harnesses: Any, sandbox: Sandbox, tmp_path: Path
) -> None:
    harness = harnesses("note('wait a')\nnote('b')\nfinal_answer(1)", lease_s=1.0)
    await until(lambda: notes(tmp_path))
    os.kill(harness.process.pid, signal.SIGSTOP)
    agent = make_agent(tmp_path, sandbox.name, "note('c')\nfinal_answer('other')", lease_s=1.0)
    driver = agent.driver(harness.session_id)
    await until_free(driver)
    await agent.keep(driver)
    (tmp_path / "go").touch()
    os.kill(harness.process.pid, signal.SIGCONT)
    assert harness.process.wait(PATIENCE_S) == 7
    events = await log_of(driver.session)
    outcomes = [event.data["outcome"] for event in events if event.type == ev.EFFECT_SETTLED]
    assert outcomes[0] == "unknown"  # the one that was under way: nobody may guess
    assert notes(tmp_path).count("wait a") == 1
    assert notes(tmp_path).count("b") <= 1
    assert events[-1].type in (ev.SESSION_RELEASED, ev.SANDBOX_DESTROYED)
    await agent.aclose()


async def until_free(driver: Any) -> None:
    """Drive as soon as the lease of the one that was stopped has run out."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            await driver.drive()
        except Held:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)
        else:
            return


LINES = 60


async def test_a_harness_killed_mid_action_re_attaches_and_gets_every_frame_once(
    harnesses: Any, sandbox: str, tmp_path: Path
) -> None:
    source = f"""
import time
for n in range({LINES}):
    print("line", n, flush=True)
    time.sleep(0.02)
note("after")
final_answer(n)
"""
    harness = harnesses(source)
    agent = make_agent(tmp_path, sandbox.name, "")
    driver = agent.driver(harness.session_id)
    await logged(driver.session, ev.ACTION_WROTE)
    harness.kill()
    await driver.drive()  # at once: its lock file is free
    await agent.keep(driver)
    events = await log_of(driver.session)
    assert written(events) == "".join(f"line {n}\n" for n in range(LINES))
    frames = [event.data["frame"] for event in events if event.data.get("frame")]
    assert frames == sorted(frames)
    assert notes(tmp_path) == ["after"]
    assert [event.data["answer"]["value"] for event in events if event.type == ev.TURN_ANSWERED] == [LINES - 1]
    assert sum(event.type == ev.SANDBOX_CREATED for event in events) == 1
    await agent.aclose()


async def test_a_harness_killed_in_an_opaque_call_never_calls_again(
    harnesses: Any, sandbox: Sandbox, tmp_path: Path
) -> None:
    source = "try:\n    note('wait')\nexcept OutcomeUnknown as error:\n    final_answer('unknown')"
    harness = harnesses(source)
    await until(lambda: notes(tmp_path))
    harness.kill()
    agent = make_agent(tmp_path, sandbox.name, "")
    driver = agent.driver(harness.session_id)
    await driver.drive()
    await agent.keep(driver)
    events = await log_of(driver.session)
    assert [event.data["answer"]["value"] for event in events if event.type == ev.TURN_ANSWERED] == ["unknown"]
    assert notes(tmp_path) == ["wait"]
    await agent.aclose()


async def test_a_box_lost_with_its_harness_ends_the_action_as_lost(
    harnesses: Any, sandbox: Sandbox, tmp_path: Path
) -> None:
    harness = harnesses("note('wait')\nfinal_answer(1)")
    await until(lambda: notes(tmp_path))
    harness.kill()
    agent = make_agent(tmp_path, sandbox.name, "", more=())
    for box in await agent.sandbox.list({"session": harness.session_id}):
        await box.destroy()
    driver = agent.driver(harness.session_id)
    await driver.drive()  # the script is empty: the turn fails, but nothing hangs and nothing is repeated
    await agent.keep(driver)
    events = await log_of(driver.session)
    finished = [event.data["error"]["kind"] for event in events if event.type == ev.ACTION_FINISHED]
    assert finished[0] == "lost"
    assert notes(tmp_path) == ["wait"]
    await agent.aclose()


async def test_a_claim_that_is_taken_over_stops_the_old_driver(sandbox: Sandbox, tmp_path: Path) -> None:
    agent = make_agent(tmp_path, sandbox.name, "import time\ntime.sleep(30)\nfinal_answer(1)")
    session_id = await agent.create_session("Go.")
    driver = agent.driver(session_id)
    await driver.session.post(NewEvent(ev.MESSAGE_RECEIVED, {"role": "user", "text": "Go.", "sender": "user:local"}))
    work = asyncio.create_task(driver.drive())
    await logged(driver.session, ev.ACTION_STARTED)
    await driver.session.store.claim(session_id, "own_other", 15.0, lambda owner: True)
    with pytest.raises(Fenced):
        await work
    await driver.close()
    await agent.aclose()
    for box in await agent.sandbox.list({"session": session_id}):
        await box.destroy()
