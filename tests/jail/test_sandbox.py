"""Boxes of the local provider: what ends an action is named, what is bounded holds, a box outlives its harness."""

from __future__ import annotations

import ast
import asyncio
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from driving import PATIENCE_S, SMALL, Outcome, act, changed, opened, still_works
from farhand.errors import EnvironmentFailed, SandboxError, SandboxUnavailable
from farhand.limits import MIB, Limits
from farhand.sandbox.environment import BARE, DEFAULT, Environment
from farhand.sandbox.hand import Hand
from farhand.sandbox.local.sandbox import LocalSandbox
from farhand.sandbox.port import WALL

from .conftest import NewLocal

pytestmark = [pytest.mark.anyio, pytest.mark.jail]

ONE = {"session": "ses_one", "generation": "1"}


def limit_of(outcome: Outcome) -> Any:
    assert outcome.error["kind"] == "limit", outcome.error
    return outcome.error["limit"]


# -- a box outlives its harness --

_HARNESS = """
import asyncio, sys
from pathlib import Path
from farhand.limits import Limits
from farhand.sandbox.environment import BARE
from farhand.sandbox.hand import Hand
from farhand.sandbox.local.sandbox import LocalSandbox
CODE = '''
import time, os
for number in range(200):
    print(number, flush=True)
    time.sleep(0.005)
    while number == 100 and not os.path.exists("/workspace/go"):
        time.sleep(0.005)
"the end"
'''
async def main():
    sandbox = LocalSandbox(Path(sys.argv[1]))
    box = await sandbox.create(BARE, Limits(), {"session": "ses_k", "generation": "1"})
    hand = await Hand.open(box, generation=1, limits=Limits())
    await hand.run("act_k", CODE, "<1>")
    async for frame in hand.frames():
        print(frame["n"], frame.get("text", "").replace(chr(10), " "), flush=True)
asyncio.run(main())
"""


async def test_a_killed_harness_finds_every_frame_once(new_local: NewLocal) -> None:
    sandbox = new_local()
    harness = subprocess.Popen([sys.executable, "-c", _HARNESS, str(sandbox.home)], stdout=subprocess.PIPE, text=True)
    assert harness.stdout is not None
    last, text = 0, ""
    for _ in range(5):
        number, _, some = harness.stdout.readline().partition(" ")
        last, text = int(number), text + some.strip() + " "
    harness.kill()
    harness.communicate()
    [box] = await sandbox.list({"session": "ses_k"})
    hand = await Hand.open(box, generation=2, after=last, limits=Limits())
    assert hand.attached.running == "act_k"
    await hand.write_file("go", b"")
    numbers = []
    async for frame in hand.frames():
        numbers.append(frame["n"])
        text += frame.get("text", "").replace("\n", " ")
    assert numbers == list(range(last + 1, last + 1 + len(numbers)))
    assert text.split() == [str(number) for number in range(200)]
    assert frame["value"] == {"text/plain": "'the end'"}
    await hand.close()
    await box.destroy()


def test_a_box_is_used_from_several_event_loops(new_local: NewLocal) -> None:
    sandbox = new_local()
    box = asyncio.run(sandbox.create(BARE, SMALL, ONE))
    hands = []

    async def use(after: int, code: str) -> Outcome:
        hand = await Hand.open(box, generation=1, after=after, limits=SMALL)
        hands.append(hand)
        outcome = await act(hand, code)
        await hand.close()
        return outcome

    first = asyncio.run(use(0, "x = 41"))
    assert asyncio.run(use(first.done["n"], "x + 1")).text == "42"
    asyncio.run(box.destroy())


async def test_destroy_during_an_action(new_local: NewLocal) -> None:
    sandbox = new_local()
    async with opened(sandbox) as hand:
        await hand.run("act_1", "import os\nprint(os.getpid(), flush=True)\nwhile True: pass", "<1>")
        await asyncio.wait_for(hand.next_frame(), PATIENCE_S)
        began = time.monotonic()
        await asyncio.gather(hand.box.destroy(), hand.box.destroy())
        assert time.monotonic() - began < 5
        with pytest.raises(SandboxError):
            while True:
                await asyncio.wait_for(hand.next_frame(), PATIENCE_S)
        assert await sandbox.list({}) == []


async def test_a_suspended_box_is_not_timed(new_local: NewLocal) -> None:
    sandbox = new_local()
    async with opened(sandbox, limits=changed(SMALL, wall_s=1.0)) as hand:
        await hand.run("act_1", "import time\nprint('up', flush=True)\ntime.sleep(0.5)\n'done'", "<1>")
        await asyncio.wait_for(hand.next_frame(), PATIENCE_S)
        await hand.box.suspend()
        await hand.box.suspend()
        [found] = (await sandbox.ask({"op": "list", "labels": {}}))["boxes"]
        assert found["suspended"] is True
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(hand.next_frame(), 1.5)
        await hand.box.resume()
        done = await asyncio.wait_for(hand.next_frame(), PATIENCE_S)
        assert done["value"] == {"text/plain": "'done'"}
        assert done["usage"]["wall_s"] < 1.0
        await hand.box.suspend()
    assert await sandbox.list({}) == []


# -- limits --


async def test_time_limits_are_told_apart(new_local: NewLocal) -> None:
    limits = changed(SMALL, wall_s=0.5, cpu_s=10)
    async with opened(new_local(), limits=limits) as hand:
        began = time.monotonic()
        assert limit_of(await act(hand, "import time\ntime.sleep(60)")) == "wall_s"
        assert time.monotonic() - began < 3
        await still_works(hand)
    async with opened(new_local(), limits=changed(SMALL, wall_s=20, cpu_s=0.3)) as hand:
        assert limit_of(await act(hand, "while True: pass")) == "cpu_s"
        await still_works(hand)
        children = "import subprocess, sys\nsubprocess.run([sys.executable, '-S', '-c', 'while True: pass'])"
        assert limit_of(await act(hand, children)) == "cpu_s"


STUBBORN = """
import signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
print("up", flush=True)
while True:
    pass
"""


async def test_code_that_ignores_an_interrupt_is_killed_and_its_names_are_told(new_local: NewLocal) -> None:
    async with opened(new_local()) as hand:
        await act(hand, "kept = 1")
        await hand.run("act_1", STUBBORN, "<1>")
        await asyncio.wait_for(hand.next_frame(), PATIENCE_S)
        began = time.monotonic()
        await hand.interrupt("act_1", "interrupt", 0.12)
        done = await asyncio.wait_for(hand.next_frame(), PATIENCE_S)
        assert time.monotonic() - began < 2
        assert (done["error"]["kind"], done["alive"], done["lost"]) == ("interrupted", False, ["kept"])


@pytest.mark.parametrize(
    ("code", "exit"), [("import os; os._exit(3)", 3), ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", -11)]
)
async def test_a_worker_that_ends_by_itself(new_local: NewLocal, code: str, exit: int) -> None:
    async with opened(new_local()) as hand:
        outcome = await act(hand, "open('kept', 'w').write('x')\n" + code)
        assert (outcome.error["kind"], outcome.error["exit"], outcome.done["alive"]) == ("ended", exit, False)
        got: list[bytes] = []
        await hand.read_file("kept", got.append)
        assert got == [b"x"]
        with pytest.raises(SandboxError):
            await act(hand, "1")


async def test_one_large_allocation_is_an_error_that_code_can_catch(new_local: NewLocal) -> None:
    limits = changed(SMALL, memory_bytes=256 * MIB)
    async with opened(new_local(), limits=limits) as hand:
        caught = await act(hand, "try:\n    x = bytearray(400 << 20)\nexcept MemoryError:\n    print('caught')")
        assert caught.out == "caught\n"
        assert limit_of(await act(hand, "x = bytearray(400 << 20)")) == "memory_bytes"
        await still_works(hand)


BOMB = """
import os, time
children = []
for _ in range(31):
    pid = os.fork()
    if pid == 0:
        kept = []
        for _ in range(200):
            kept.append(b"x" * (1 << 20))
        time.sleep(600)
        os._exit(0)
    children.append(pid)
for pid in children:
    os.waitpid(pid, 0)
"""


async def test_many_children_together_are_stopped_at_the_boxs_memory(new_local: NewLocal, record_property: Any) -> None:
    limits = replace(Limits(), memory_bytes=1024 * MIB, wall_s=60)
    sandbox = new_local()
    async with opened(sandbox, limits=limits) as hand:
        outcome = await act(hand, BOMB)
        assert limit_of(outcome) == "memory_bytes"
        assert outcome.done["alive"] is False
        overshoot = outcome.done["usage"]["peak_memory_bytes"] - limits.memory_bytes
        record_property("overshoot_mib", overshoot // MIB)
        print(f"overshoot: {overshoot // MIB} MiB over {limits.memory_bytes // MIB}")
        # A group holds memory and disk together, so an empty disk is room; without one the host looks every 20 ms.
        assert overshoot < limits.disk_bytes + 32 * MIB
    async with opened(sandbox) as hand:
        await still_works(hand)


async def test_threads_and_processes_are_bounded_together(new_local: NewLocal) -> None:
    sandbox = new_local()
    limits = changed(SMALL, memory_bytes=256 * MIB, processes=40)
    threads = """
        import threading
        barrier = threading.Barrier(33)
        started = [threading.Thread(target=barrier.wait) for _ in range(32)]
        for thread in started: thread.start()
        barrier.wait()
        for thread in started: thread.join()
        len(started)
    """
    async with opened(sandbox, limits=limits) as hand, opened(sandbox) as neighbour:
        assert (await act(hand, "\n".join(line[8:] for line in threads.splitlines()))).text == "32"
        bomb = await act(hand, "import os, time\nwhile True:\n    if os.fork() == 0:\n        time.sleep(600)")
        assert limit_of(bomb) == "processes"
        await still_works(neighbour)
    # Every process forks: the whole box is at the bound, and nobody else notices.
    async with opened(sandbox, limits=changed(limits, wall_s=1)) as hand, opened(sandbox) as neighbour:
        outcome = await act(hand, "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass")
        assert limit_of(outcome) in ("wall_s", "processes")
        await still_works(neighbour)


IMAGES = """
from PIL import Image
import os
number = 0
while True:
    Image.frombytes("RGB", (500, 500), os.urandom(750_000)).save(f"/workspace/{number}.png")
    number += 1
"""


@pytest.mark.slow
async def test_images_without_end_meet_the_disks_limit(new_local: NewLocal) -> None:
    sandbox = new_local()
    limits = changed(SMALL, disk_bytes=64 * MIB, wall_s=60)
    async with opened(sandbox, limits=limits, environment=DEFAULT) as hand:
        before = written(sandbox)
        outcome = await act(hand, IMAGES)
        assert limit_of(outcome) == "disk_bytes"
        assert "disk_bytes" in outcome.error["message"]
        assert outcome.done["alive"] is True
        assert written(sandbox) == before
        await still_works(hand)
        freed = "import glob, os\nfor name in glob.glob('/workspace/*.png'): os.unlink(name)\nopen('a', 'w').write('x')"
        assert (await act(hand, freed)).ok


def written(sandbox: LocalSandbox) -> dict[str, int]:
    """Files of the harness's home, without the environments."""
    return {
        str(path): path.stat().st_size
        for path in sandbox.home.rglob("*")
        if "environments" not in path.parts and path.is_file()
    }


async def test_the_number_of_files_and_the_size_of_one_are_bounded(new_local: NewLocal) -> None:
    limits = changed(SMALL, disk_bytes=16 * MIB, disk_files=100)
    async with opened(new_local(), limits=limits) as hand:
        many = "for number in range(1000):\n    open(f'/tmp/{number}', 'w').close()"
        assert limit_of(await act(hand, many)) == "disk_files"
        assert (await act(hand, "import glob, os\nfor name in glob.glob('/tmp/[0-9]*'): os.unlink(name)")).ok
        assert limit_of(await act(hand, "open('one', 'wb').write(b'x' * (17 << 20))")) == "disk_bytes"
        await still_works(hand)


# -- files --


async def test_files_go_in_and_out_and_no_link_leads_out(new_local: NewLocal, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("of the machine")
    async with opened(new_local()) as hand:
        data = os.urandom(700_000)
        await hand.write_file("deep/er/in.bin", data, 0o600)
        code = (
            "import os, stat\nkept = open('deep/er/in.bin', 'rb').read()\nopen('out.bin', 'wb').write(kept[::-1])\n"
            f"os.symlink({str(secret)!r}, 'link')\nos.symlink('/etc', 'folder')\nos.mkfifo('fifo')\n"
            "os.chmod('deep/er/in.bin', 0)\n"
            "os.stat('deep/er/in.bin').st_uid, os.getuid(), len(kept)"
        )
        assert (await act(hand, code)).text == "(1000, 1000, 700000)"
        got: list[bytes] = []
        await hand.read_file("out.bin", got.append)
        assert b"".join(got) == data[::-1]
        for path in ("link", "folder/passwd", "fifo", "../etc/passwd", "deep/er/in.bin"):
            with pytest.raises(SandboxError):
                await hand.read_file(path, got.append)
        listing = await hand.listing()
        assert {entry.path for entry in listing.entries if entry.kind == "file"} == {"deep/er/in.bin", "out.bin"}
        assert {path for path, reason in listing.left_out} == {"link", "folder", "fifo"}
        assert secret.read_text() == "of the machine"


# -- environments --


async def test_the_default_environment_is_there_with_its_versions(new_local: NewLocal) -> None:
    sandbox = new_local()
    assert WALL in sandbox.capabilities
    async with opened(sandbox, environment=DEFAULT) as hand:
        packages = (await hand.ping() or hand.ready)["packages"]
        assert packages["numpy"] == "2.4.6"
        assert packages["pillow"] == "13.0.0"
        code = "import numpy, pandas, matplotlib.pyplot as plt\nplt.plot([1, 2])\nint(pandas.Series([1, 2]).sum())"
        outcome = await act(hand, code)
        assert outcome.text == "3"
        assert "image/png" in outcome.of("display")[0]["bundle"]


@pytest.mark.skipif(not Path("/usr/bin/python3").exists(), reason="there is no /usr/bin/python3")
async def test_another_python(new_local: NewLocal) -> None:
    sandbox = new_local()
    version = subprocess.run(
        ["/usr/bin/python3", "-c", "import sys; print(sys.version.split()[0])"], capture_output=True, text=True
    ).stdout.strip()
    async with opened(sandbox, environment=Environment(python="/usr/bin/python3")) as hand:
        assert (await hand.ping() or hand.ready)["python"] == version
        code = (
            "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'print(6 * 7)'], capture_output=True).stdout"
        )
        assert (await act(hand, code)).text == "b'42\\n'"


async def test_environments_that_cannot_be(tmp_path: Path) -> None:
    sandbox = LocalSandbox(tmp_path)
    for python in ("/nonexistent/python3", "/bin/false", "/etc/passwd"):
        with pytest.raises(EnvironmentFailed, match="cannot be the Python of a box"):
            await sandbox.create(Environment(python=python), SMALL, {})
    with pytest.raises(SandboxUnavailable, match="network"):
        await sandbox.create(Environment(network=True), SMALL, {})
    with pytest.raises(EnvironmentFailed):
        await sandbox.create(Environment(packages=("no such! requirement",)), SMALL, {})
    assert await sandbox.status() is None


async def test_a_zygote_that_cannot_start_says_which_step_failed(new_local: NewLocal) -> None:
    sandbox = new_local()
    outfit = sandbox._prepare(BARE)
    sandbox._outfits[BARE] = replace(outfit, python="/usr/bin/env", prefix="/usr")
    with pytest.raises(SandboxUnavailable, match="zygote"):
        await sandbox.create(BARE, SMALL, {})
    sandbox._outfits.clear()
    async with opened(sandbox) as hand:
        await still_works(hand)


async def test_boxes_of_one_zygote_share_no_luck_and_show_nothing_of_its_rehearsals(new_local: NewLocal) -> None:
    sandbox = new_local()
    code = (
        "import builtins, linecache, random, numpy, sys\n"
        "shown = [name for name in globals() if not name.startswith('__')]\n"
        "traces = [name for name in (*dir(builtins), *linecache.cache, *shown) if 'rehears' in name or name == 'x']\n"
        "(random.random(), float(numpy.random.random())), traces, sys.argv, [type(each).__name__ for each in sys.path]"
    )
    values = []
    for _ in range(3):
        async with opened(sandbox, environment=DEFAULT) as hand:
            text = (await act(hand, code)).text
            assert text is not None
            drawn, traces, argv, kinds = ast.literal_eval(text)
            assert (traces, argv, set(kinds)) == ([], [""], {"str"})
            values.append(drawn)
    assert len({value for pair in values for value in pair}) == 6
