"""The host: at most one for a home folder, started when it is needed, gone when it is not, and what its end means."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from driving import PATIENCE_S, SMALL, act, opened, running, still_works
from farhand.errors import Fenced, SandboxError, SandboxLost
from farhand.limits import Limits
from farhand.sandbox.environment import BARE
from farhand.sandbox.hand import Hand
from farhand.sandbox.local import lifecycle, pool, request
from farhand.sandbox.local.hosted import HostedBox
from farhand.sandbox.local.lifecycle import Options
from farhand.sandbox.local.request import Outfit
from farhand.sandbox.local.sandbox import LocalSandbox
from farhand.sandbox.local.zygote import BoxSpec
from farhand.sandbox.runner.reactor import Reactor
from leftovers import hosts

from .conftest import NewLocal

pytestmark = [pytest.mark.anyio, pytest.mark.jail]

ONE = {"session": "ses_one", "generation": "1"}


async def eventually(holds: Callable[[], Awaitable[bool]], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not await holds():
        assert time.monotonic() < deadline, f"not within {PATIENCE_S} s: {what}"
        await asyncio.sleep(0.01)


async def status(sandbox: LocalSandbox) -> dict[str, Any]:
    found = await sandbox.status()
    assert found is not None, "no host runs"
    return found


def raw(sandbox: LocalSandbox) -> socket.socket:
    sock = lifecycle.find(sandbox.home)
    assert sock is not None, "no host runs"
    sock.setblocking(True)
    sock.settimeout(PATIENCE_S)
    return sock


# -- starting --


async def test_nothing_but_create_starts_a_host(new_local: NewLocal) -> None:
    sandbox = new_local()
    assert await sandbox.list({}) == []
    assert await sandbox.status() is None
    assert await sandbox.stop() is False
    with pytest.raises(SandboxLost):
        await sandbox.connect("sbx_1")
    assert hosts(sandbox.home) == []


async def test_many_callers_at_once_start_one_host(new_local: NewLocal) -> None:
    sandbox = new_local()
    others = [LocalSandbox(sandbox.home) for _ in range(5)]
    boxes = await asyncio.gather(*(other.create(BARE, SMALL, {}) for other in others))
    assert len({box.id for box in await sandbox.list({})}) == 5
    assert len(hosts(sandbox.home)) == 1
    for box in boxes:
        await box.destroy()


_HARNESS = """
import asyncio, sys
from pathlib import Path
from farhand.limits import Limits
from farhand.sandbox.environment import BARE
from farhand.sandbox.local.sandbox import LocalSandbox
async def main():
    sandbox = LocalSandbox(Path(sys.argv[1]))
    box = await sandbox.create(BARE, Limits(), {})
    print((await sandbox.status())["pid"], flush=True)
    sys.stdin.read()
    await box.destroy()
asyncio.run(main())
"""


async def test_harnesses_in_several_processes_start_one_host(new_local: NewLocal) -> None:
    sandbox = new_local()
    command = [sys.executable, "-c", _HARNESS, str(sandbox.home)]
    harnesses = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    pids = set()
    for harness in harnesses:
        assert harness.stdout is not None
        pids.add(harness.stdout.readline())
    assert len(pids) == 1
    assert len(hosts(sandbox.home)) == 1
    for harness in harnesses:
        harness.communicate("", timeout=PATIENCE_S)


async def test_what_a_dead_host_left_is_no_hindrance(new_local: NewLocal) -> None:
    sandbox = new_local()
    folder = lifecycle.run_folder(sandbox.home)
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(folder / "host-v1.sock"))
    stale.close()
    told = {"v": 1, "pid": 4_000_000, "socket": str(folder / "host-v1.sock")}
    lifecycle.lock_file(sandbox.home).write_text(json.dumps(told))
    async with opened(sandbox) as hand:
        await still_works(hand)
    await sandbox.stop()
    lifecycle.lock_file(sandbox.home).write_text("{ nonsense")
    async with opened(sandbox) as hand:
        await still_works(hand)


async def test_a_home_whose_path_is_too_long_for_a_socket(new_local: NewLocal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    sandbox = new_local(below="x" * 100)
    async with opened(sandbox) as hand:
        await still_works(hand)
        place = Path(json.loads(lifecycle.lock_file(sandbox.home).read_text())["socket"])
        assert place.is_relative_to("/tmp")
        assert not place.is_relative_to(sandbox.home)
        assert place.parent.stat().st_mode & 0o777 == 0o700
        assert place.stat().st_mode & 0o777 == 0o600
    await sandbox.stop()
    assert not place.parent.exists()


async def test_a_home_that_takes_no_socket(new_local: NewLocal, monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox = new_local()
    runtime = sandbox.home / "runtime"
    runtime.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    (lifecycle.run_folder(sandbox.home) / "host-v1.sock").mkdir()  # binding fails, as on some file systems
    async with opened(sandbox) as hand:
        await still_works(hand)
        assert Path(str(lifecycle.place(sandbox.home))).is_relative_to(runtime)
        monkeypatch.delenv("XDG_RUNTIME_DIR")
        assert len(await LocalSandbox(sandbox.home).list({})) == 1
    await sandbox.stop()
    (sandbox.home / "run" / "host-v1.sock").rmdir()
    assert list(runtime.iterdir()) == []


async def test_a_folder_of_somebody_else_is_not_used(new_local: NewLocal, tmp_path: Path) -> None:
    sandbox = new_local()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (sandbox.home / "run").symlink_to(elsewhere)
    with pytest.raises(SandboxError, match="no folder of this user"):
        await sandbox.create(BARE, SMALL, {})
    (sandbox.home / "run").unlink()


async def test_the_host_sees_nothing_of_the_harness(new_local: NewLocal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-marker-of-this-test")
    sandbox = new_local()
    async with opened(sandbox):
        told = await status(sandbox)
        for pid in (told["pid"], told["environments"][0]["zygote"]):
            assert "marker-of-this-test" not in Path(f"/proc/{pid}/environ").read_text()
            assert os.readlink(f"/proc/{pid}/cwd") == "/"
            assert os.readlink(f"/proc/{pid}/fd/0") == "/dev/null"
        assert os.getsid(told["pid"]) != os.getsid(0)


# -- who may ask, and what --


async def test_another_user_is_turned_away_even_if_the_socket_is_open(new_local: NewLocal) -> None:
    if os.geteuid() != 0:
        return  # only root can be somebody else
    sandbox = new_local()
    code = (
        "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); s.settimeout(10)\n"
        'try: s.sendall(b\'{"v": 1, "op": "status"}\\n\'); print(s.recv(100))\n'
        "except ConnectionError: print(b'')"
    )
    async with opened(sandbox):
        path = Path(json.loads(lifecycle.lock_file(sandbox.home).read_text())["socket"])
        for part in (sandbox.home, path.parent):
            part.chmod(0o711)
        path.chmod(0o666)
        other = ["setpriv", "--reuid", "1001", "--regid", "1001", "--clear-groups", "/usr/bin/python3", "-I", "-c"]
        done = subprocess.run([*other, code, str(path)], capture_output=True, text=True, timeout=PATIENCE_S)
        assert (done.stdout, done.stderr) == ("b''\n", "")
        assert (await status(sandbox))["boxes"] == 1


GARBAGE = [
    b"\n",
    b"nonsense\n",
    b"[]\n",
    b"\xff\xfe\n",
    b"[" * 100_000 + b"\n",
    b'{"v": 1}\n',
    b'{"v": 2, "op": "status"}\n',
    b'{"v": 1, "op": "format"}\n',
    b'{"v": 1, "op": []}\n',
    b'{"v": 1, "op": "destroy"}\n',
    b'{"v": 1, "op": "destroy", "box": 5}\n',
    b'{"v": 1, "op": "channel", "box": "x", "generation": -1}\n',
    b'{"v": 1, "op": "list", "labels": {"a": 1}}\n',
    b'{"v": 1, "op": "create", "labels": {}, "limits": {}, "environment": {}}\n',
    b'{"v": 1, "op": "create", "labels": {}, "environment": {"python": "../x"}, "limits": {"memory_bytes": 1e999}}\n',
    b"x" * (request.REQUEST_BYTES + 100),
]


async def test_garbage_gets_a_typed_answer_and_the_host_lives(new_local: NewLocal) -> None:
    sandbox = new_local()
    async with opened(sandbox) as hand:
        before = await status(sandbox)
        for line in GARBAGE:
            with raw(sandbox) as sock:
                sock.sendall(line)
                answer = json.loads(sock.makefile().readline())
                assert answer["ok"] is False
                assert answer["error"]["code"] == "protocol_violation", line[:80]
                assert sock.recv(10) == b""
        assert (await status(sandbox))["pid"] == before["pid"]
        await still_works(hand)


async def test_one_connection_may_ask_several_times(new_local: NewLocal) -> None:
    sandbox = new_local()
    async with opened(sandbox):
        with raw(sandbox) as sock:
            asked = b'{"v": 1, "op": "status"}\n{"v": 1, "op": "destroy", "box": "x"}\n'
            asked += b'{"v": 1, "op": "channel", "box": "y"}\n'
            for part in (asked[:30], asked[30:50], asked[50:]):
                sock.sendall(part)
            lines = sock.makefile()
            answers = [json.loads(lines.readline()) for _ in range(3)]
        assert [answer["ok"] for answer in answers] == [True, True, False]
        assert answers[2]["error"]["code"] == "sandbox_lost"


async def test_older_claims_are_refused(new_local: NewLocal) -> None:
    old, new = new_local(), LocalSandbox(new_local.home)
    box = await old.create(BARE, SMALL, {"session": "ses_f", "generation": "3"})
    [found] = await new.list({"session": "ses_f"})
    frames = await found.channel(0, 4)
    for refused in (box.suspend, box.resume, box.destroy):
        with pytest.raises(Fenced):
            await refused()
    with pytest.raises(Fenced):
        await box.channel(0, 3)
    with pytest.raises(Fenced):
        await old.create(BARE, SMALL, {"session": "ses_f", "generation": "3"})
    await frames.close()
    await found.destroy()
    with pytest.raises(Fenced):
        await old.create(BARE, SMALL, {"session": "ses_f", "generation": "3"})
    again = await new.create(BARE, SMALL, {"session": "ses_f", "generation": "4"})
    await again.destroy()
    await box.destroy()


async def test_a_host_with_boxes_stops_only_by_force(new_local: NewLocal) -> None:
    sandbox = new_local()
    async with opened(sandbox) as hand:
        with pytest.raises(SandboxError, match="1 boxes are alive"):
            await sandbox.stop()
        await still_works(hand)
        assert await sandbox.stop(force=True) is True
        with pytest.raises(SandboxLost):
            await act(hand, "1")
        assert hosts(sandbox.home) == []


# -- ends --


async def test_an_idle_host_ends(new_local: NewLocal) -> None:
    sandbox = new_local(Options(idle_s=0.2))
    async with opened(sandbox):
        pass

    async def gone() -> bool:
        return hosts(sandbox.home) == []

    await eventually(gone, "the host is gone")
    assert lifecycle.lock_file(sandbox.home).read_text() == ""
    async with opened(sandbox) as hand:
        await still_works(hand)


async def test_a_box_that_nobody_is_attached_to_is_swept(new_local: NewLocal) -> None:
    sandbox = new_local(Options(sweep_s=0.4))
    async with opened(sandbox) as attached:
        box = await sandbox.create(BARE, SMALL, ONE)
        hand = await Hand.open(box, generation=1, limits=SMALL)
        await hand.close()

        async def swept() -> bool:
            return [each.id for each in await sandbox.list({})] == [attached.box_id]

        await eventually(swept, "the box is swept")
        with pytest.raises(SandboxLost):
            await box.channel(0, 2)
        await still_works(attached)


async def test_the_end_of_the_host_is_noticed_at_once_and_is_the_end_of_its_boxes(new_local: NewLocal) -> None:
    sandbox = new_local()
    box = await sandbox.create(BARE, SMALL, ONE)
    hand = await Hand.open(box, generation=1, limits=SMALL)
    await hand.run("act_1", "import subprocess, sys\nsubprocess.Popen(['sleep', '1000'])\nwhile True: pass", "<1>")
    told = await status(sandbox)
    zygote = told["environments"][0]["zygote"]
    inside = descendants(told["pid"])
    assert len(inside) >= 4
    killed = time.monotonic()
    os.kill(told["pid"], signal.SIGKILL)
    with pytest.raises(SandboxLost):
        await asyncio.wait_for(hand.next_frame(), PATIENCE_S)
    assert time.monotonic() - killed < 2.0

    async def gone() -> bool:
        return not any(running(pid) for pid in [zygote, *inside])

    await eventually(gone, "every process of the host is gone")
    assert await sandbox.list({}) == []
    await box.destroy()
    await hand.close()
    async with opened(sandbox) as hand:
        await still_works(hand)


def descendants(pid: int) -> list[int]:
    found, waiting = [], [pid]
    while waiting:
        parent = waiting.pop()
        for task in os.listdir(f"/proc/{parent}/task"):
            children = [int(word) for word in Path(f"/proc/{parent}/task/{task}/children").read_text().split()]
            found += children
            waiting += children
    return found


async def test_the_end_of_a_zygote_ends_its_boxes_with_a_word(new_local: NewLocal) -> None:
    sandbox = new_local()
    async with opened(sandbox) as hand:
        await hand.run("act_1", "import time\nprint('up', flush=True)\ntime.sleep(1000)", "<1>")
        await asyncio.wait_for(hand.next_frame(), PATIENCE_S)
        told = await status(sandbox)
        os.kill(told["environments"][0]["zygote"], signal.SIGKILL)
        done = await asyncio.wait_for(hand.next_frame(), PATIENCE_S)
        assert (done["t"], done["alive"], done["error"]["kind"]) == ("done", False, "ended")
        assert done["error"]["exit"] == -9
        async with opened(sandbox) as other:
            await still_works(other)
            again = await status(sandbox)
            assert again["pid"] == told["pid"]
            assert again["environments"][0]["zygote"] != told["environments"][0]["zygote"]


async def test_a_harness_that_gives_up_while_a_box_is_made_leaves_none(new_local: NewLocal) -> None:
    sandbox = new_local()
    creating = asyncio.ensure_future(sandbox.create(BARE, SMALL, ONE))

    async def started() -> bool:
        return bool(hosts(sandbox.home))

    await eventually(started, "the host is there")
    creating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await creating

    async def none() -> bool:
        return (await sandbox.status() is None) or await sandbox.list({}) == []

    await eventually(none, "no box is left")


# -- many, and ahead of time --


async def test_fifty_boxes_at_once(new_local: NewLocal) -> None:
    sandbox = new_local()

    async def one(number: int) -> str | None:
        async with opened(sandbox) as hand:
            await act(hand, f"x = {number}")
            return (await act(hand, "x * 2")).text

    assert await asyncio.gather(*(one(number) for number in range(50))) == [str(2 * n) for n in range(50)]
    assert await sandbox.list({}) == []


async def filled(sandbox: LocalSandbox, count: int) -> None:
    async def ready() -> bool:
        return (await status(sandbox))["environments"][0]["ready"] == count

    await eventually(ready, f"{count} boxes wait")


async def test_boxes_are_made_ahead_and_come_with_nothing_of_another_session(new_local: NewLocal) -> None:
    sandbox = new_local()
    default = Limits()
    async with opened(sandbox, limits=default) as hand:
        await act(hand, "secret = 'of the first'\nopen('/workspace/f', 'w').write('x')\nopen('/tmp/f', 'w').write('x')")
        await filled(sandbox, 2)
    code = "import os\nprint('secret' in globals(), os.listdir('/workspace'), os.path.exists('/tmp/f'), os.getpid())"
    for _ in range(3):
        async with opened(sandbox, limits=default) as hand:
            assert (await act(hand, code)).out == "False [] False 2\n"
    await filled(sandbox, 2)
    box = await sandbox.create(BARE, default, ONE)
    assert (await status(sandbox))["environments"][0]["ready"] == 1
    other = await sandbox.create(BARE, replace(default, memory_bytes=100 << 20), ONE)
    await filled(sandbox, 2)
    await box.destroy()
    await other.destroy()


async def test_the_pool_may_be_empty(new_local: NewLocal) -> None:
    sandbox = new_local(Options(pool=0))
    for _ in range(2):
        async with opened(sandbox, limits=Limits()) as hand:
            await still_works(hand)
    assert (await status(sandbox))["environments"][0]["ready"] == 0


@pytest.fixture
def reactor() -> Iterator[Reactor]:
    reactor = Reactor()
    yield reactor
    reactor.close()


async def test_a_zygote_is_replaced_after_many_boxes(reactor: Reactor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "FORKS", 2)
    made: list[HostedBox] = []
    own = lifecycle_python()
    boxes = pool.Pool(reactor, pool.Starter(reactor), own, None, 0, lambda: False, lambda what, error: None)
    zygotes = []
    for count in range(1, 5):
        boxes.take(BoxSpec(), lambda box: made.append(box))  # type: ignore[arg-type]
        step_until(reactor, lambda count=count: len(made) == count)  # type: ignore[misc]
        zygotes.append(boxes.describe()["zygote"])
    assert zygotes[0] == zygotes[1] != zygotes[2] == zygotes[3]
    first = int(str(zygotes[0]))
    assert running(first)
    for box in made[:2]:
        box.destroy()
    step_until(reactor, lambda: not running(first))
    assert running(int(str(zygotes[2])))
    for box in made[2:]:
        box.destroy()
    step_until(reactor, lambda: not boxes.holds)
    boxes.close()


def lifecycle_python() -> Outfit:
    from farhand.sandbox.local import root

    python, prefix, version = root.own_prefix()
    return Outfit(str(python), str(prefix), version, sys.version.split()[0])


def step_until(reactor: Reactor, holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline
        reactor.step(0.05)
