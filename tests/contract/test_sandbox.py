"""What `sandbox/port.py` promises, held against every provider this machine can run."""

from __future__ import annotations

import asyncio
import os

import pytest

from driving import PATIENCE_S, SMALL, act, opened, running, still_works
from farhand.errors import Fenced, SandboxLost
from farhand.sandbox.environment import BARE
from farhand.sandbox.hand import AlreadyRun, Hand
from farhand.sandbox.port import REATTACH, SUSPEND, Sandbox

pytestmark = pytest.mark.anyio


async def test_boxes_are_found_by_their_labels(sandbox: Sandbox) -> None:
    one = await sandbox.create(BARE, SMALL, {"session": "ses_a", "generation": "1"})
    two = await sandbox.create(BARE, SMALL, {"session": "ses_b", "generation": "1"})
    try:
        assert [box.id for box in await sandbox.list({"session": "ses_a"})] == [one.id]
        assert {box.id for box in await sandbox.list({"generation": "1"})} == {one.id, two.id}
        assert await sandbox.list({"session": "ses_a", "generation": "2"}) == []
        assert (await sandbox.connect(two.id)).labels["session"] == "ses_b"
    finally:
        await one.destroy()
        await two.destroy()
    assert await sandbox.list({}) == []


async def test_a_box_that_is_not_there_is_lost(sandbox: Sandbox) -> None:
    with pytest.raises(SandboxLost):
        await sandbox.connect("sbx_nothing")
    box = await sandbox.create(BARE, SMALL, {})
    await box.destroy()
    await box.destroy()
    with pytest.raises(SandboxLost):
        await sandbox.connect(box.id)
    with pytest.raises(SandboxLost):
        await box.channel(0, 1)


async def test_frames_sent_while_nobody_was_attached_follow_once_and_in_order(sandbox: Sandbox) -> None:
    if REATTACH not in sandbox.capabilities:
        pytest.skip("this provider's boxes end with their channel")
    async with opened(sandbox) as hand:
        await hand.run("act_a", "for i in range(5):\n    print(i, flush=True)\n41 + 1", "<action 1>")
        first = await asyncio.wait_for(hand.next_frame(), PATIENCE_S)
        await hand.close()
        again = await Hand.open(await sandbox.connect(hand.box_id), generation=2, after=first["n"], limits=SMALL)
        seen = [first]
        async for frame in again.frames():
            seen.append(frame)
        assert [frame["n"] for frame in seen] == list(range(1, len(seen) + 1))
        assert "".join(frame.get("text", "") for frame in seen) == "0\n1\n2\n3\n4\n"
        assert seen[-1]["value"] == {"text/plain": "42"}
        with pytest.raises(AlreadyRun):
            await act(again, "1", action="act_a")
        await again.close()


async def test_a_newer_generation_takes_the_channel_over(sandbox: Sandbox) -> None:
    async with opened(sandbox, generation=5) as hand:
        await act(hand, "x = 1")
        newer = await Hand.open(hand.box, generation=6, after=1, limits=SMALL)
        with pytest.raises((SandboxLost, Fenced)):
            await act(hand, "x")
        with pytest.raises(Fenced):
            await hand.box.channel(1, 5)
        assert (await act(newer, "x")).text == "1"
        await newer.close()


async def test_suspend_stops_every_process(sandbox: Sandbox) -> None:
    if SUSPEND not in sandbox.capabilities:
        pytest.skip("this provider cannot suspend")
    code = """
        import subprocess, sys, time
        child = subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"])
        print("up", flush=True)
        while True:
            time.sleep(0.01)
            print(".", end="", flush=True)
    """
    async with opened(sandbox) as hand:
        await hand.run("act_s", "\n".join(line[8:] for line in code.splitlines()), "<action 1>")
        while "." not in (await asyncio.wait_for(hand.next_frame(), PATIENCE_S)).get("text", ""):
            pass
        await hand.box.suspend()
        with pytest.raises(TimeoutError):
            while True:  # what was under way arrives, then nothing
                await asyncio.wait_for(hand.next_frame(), 0.3)
        await hand.box.resume()
        await asyncio.wait_for(hand.next_frame(), PATIENCE_S)
        await hand.interrupt("act_s", "interrupt", 0.2)
        async for frame in hand.frames():
            done = frame
        assert done["error"]["kind"] == "interrupted"


async def test_destroy_ends_every_process_and_frees_the_disk(sandbox: Sandbox) -> None:
    async with opened(sandbox) as hand:
        started = await act(
            hand,
            "import os, subprocess, sys\n"
            "open('data', 'wb').write(b'x' * 100_000)\n"
            "child = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(600)'])\n"
            "print(os.getcwd(), child.pid)",
        )
        folder, pid = started.out.split()
        await hand.box.destroy()
        if sandbox.name == "subprocess":
            assert not os.path.exists(folder)
            assert running(int(pid)) is False


async def test_an_ended_box_is_kept_until_it_is_destroyed(sandbox: Sandbox) -> None:
    async with opened(sandbox) as hand:
        ended = await act(hand, "open('kept.txt', 'w').write('here')\nimport os\nos._exit(3)")
        assert ended.done["alive"] is False
        again = await Hand.open(await sandbox.connect(hand.box_id), generation=2, after=ended.done["n"], limits=SMALL)
        assert again.attached.ended
        got: list[bytes] = []
        await again.read_file("kept.txt", got.append)
        assert b"".join(got) == b"here"
        await again.close()


async def test_two_boxes_do_not_share_variables(sandbox: Sandbox) -> None:
    async with opened(sandbox) as one, opened(sandbox) as two:
        await act(one, "x = 1")
        assert (await act(two, "x")).error["type"] == "NameError"
        await still_works(one)
