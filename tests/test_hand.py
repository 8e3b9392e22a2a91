"""The harness's end of a box: refusals as errors, who reads for whom, files, and boxes that lie or die."""

from __future__ import annotations

import asyncio
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import farhand
from driving import PATIENCE_S, SMALL, Outcome, act, changed, opened, still_works
from farhand.errors import Fenced, ProtocolViolation, SandboxError, SandboxLost
from farhand.limits import FRAME_BYTES, FRAMES_UNREAD_BYTES
from farhand.sandbox.environment import BARE
from farhand.sandbox.hand import AlreadyRun, BoxEnded, Hand, safe_path
from farhand.sandbox.port import Attached, Frame, Sandbox
from farhand.sandbox.protocol import channel_over
from farhand.sandbox.subprocess import SubprocessBox, SubprocessSandbox

pytestmark = pytest.mark.anyio


@pytest.fixture
async def hand(sandbox: Sandbox) -> AsyncIterator[Hand]:
    async with opened(sandbox) as hand:
        yield hand


# --- the conversation ---


async def test_refusals_are_errors(hand: Hand) -> None:
    await act(hand, "1", action="act_1")
    with pytest.raises(AlreadyRun):
        await act(hand, "1", action="act_1")
    await act(hand, "import os\nos._exit(1)")
    with pytest.raises(BoxEnded):
        await act(hand, "1", action="act_3")
    with pytest.raises(BoxEnded):
        await hand.hello(SMALL, [], None, "")
    with pytest.raises(SandboxError, match="no_such_call"):
        await hand.reply("c99", 1)
        await hand.next_frame()


async def test_a_ping_is_answered_while_code_runs(hand: Hand) -> None:
    await hand.run("act_1", "while True: pass", "<action 1>")
    for _ in range(3):
        await asyncio.wait_for(hand.ping(), 5)
    await hand.interrupt("act_1", "interrupt", 1.0)
    assert (await hand.next_frame())["error"]["kind"] == "interrupted"


async def test_several_wait_at_once(hand: Hand) -> None:
    async def follow() -> list[Frame]:
        await hand.run("act_1", "for i in range(200): print(i, flush=True)", "<action 1>")
        return [frame async for frame in hand.frames()]

    frames, *_ = await asyncio.gather(follow(), *[hand.ping() for _ in range(20)], *[hand.listing() for _ in range(5)])
    assert "".join(frame.get("text", "") for frame in frames) == "".join(f"{i}\n" for i in range(200))


async def test_a_reader_that_is_cancelled_loses_no_frame(hand: Hand) -> None:
    await hand.run("act_1", "import time\nfor i in range(30):\n    print(i, flush=True)\n    time.sleep(0.003)", "<a>")
    seen: list[Frame] = []
    while not seen or seen[-1]["t"] != "done":
        try:
            seen.append(await asyncio.wait_for(hand.next_frame(), 0.002))
        except TimeoutError:
            continue
    assert [frame["n"] for frame in seen] == list(range(1, len(seen) + 1))


async def test_hello_again_changes_the_tools(hand: Hand) -> None:
    assert (await act(hand, "extra")).error["type"] == "NameError"
    stub = {"name": "extra", "doc": "", "is_async": False, "params": [], "returns": None}
    await hand.hello(SMALL, [stub], None, "")
    assert (await act(hand, "extra()", answers={"extra": lambda: 5})).text == "5"
    await hand.hello(SMALL, [], None, "")
    assert (await act(hand, "extra")).error["type"] == "NameError"


class LyingFrames:
    """A channel whose box sends whatever the test wants."""

    attached = Attached(None, 0, (), (), True, False)

    def __init__(self, frames: list[Frame]) -> None:
        self._frames = frames

    async def send(self, frame: Frame) -> None:
        return

    async def receive(self) -> Frame:
        if not self._frames:
            raise SandboxLost("no more")
        return self._frames.pop(0)

    async def close(self) -> None:
        return


def lied_to(*frames: Frame) -> Hand:
    return Hand(None, LyingFrames(list(frames)), 1)  # type: ignore[arg-type]


async def test_a_box_that_floods_breaks_the_protocol() -> None:
    frame = {"t": "out", "n": 1, "action": None, "stream": "stdout", "text": "x" * 900_000}
    hand = lied_to(*[frame] * (FRAMES_UNREAD_BYTES // 900_000 + 2))
    with pytest.raises(ProtocolViolation):
        await hand.ping()
    with pytest.raises(ProtocolViolation):
        await hand.ping()


async def test_a_fenced_hand_says_so_to_everybody() -> None:
    hand = lied_to({"t": "refused", "code": "fenced", "message": "7 drives"})
    with pytest.raises(Fenced):
        await hand.next_frame()
    with pytest.raises(Fenced):
        await hand.ping()


@pytest.mark.parametrize(
    ("path", "good"),
    [
        ("a.txt", True),
        ("a b/ü/c-1.tar.gz", True),
        ("/etc/passwd", False),
        ("../x", False),
        ("a/../../x", False),
        ("a//b", False),
        ("./a", False),
        ("a\nb", False),
        ("a\x1b]52;c;x\x07", False),
        ("", False),
        ("x" * 300, False),
        ("a\u202eb", False),
    ],
)
def test_paths_from_a_box(path: str, good: bool) -> None:
    assert safe_path(path) is good


async def test_entries_that_lie_are_left_out() -> None:
    numbers = {"size": 1, "mtime_ns": 1, "ctime_ns": 1, "ino": 1, "mode": 0o644}
    entries: list[Any] = [
        {"path": "good", "kind": "file", **numbers},
        {"path": "../bad", "kind": "file", **numbers},
        {"path": "odd", "kind": "device", **numbers},
        {"path": "huge", "kind": "file", **numbers, "size": 1 << 80},
        {"path": "text", "kind": "file", **numbers, "size": "1"},
        {"path": 5, "kind": "file", **numbers},
        "nonsense",
    ]
    frame = {"t": "files", "id": "q1", "ok": True, "entries": entries, "more": None, "left_out": [{"path": "l"}, 3]}
    listing = await lied_to(frame).listing()
    assert [entry.path for entry in listing.entries] == ["good"]
    assert len(listing.left_out) == 6


async def test_a_listing_that_never_ends_is_given_up() -> None:
    parts = [{"t": "files", "id": f"q{n}", "ok": True, "entries": [], "more": 5} for n in (1, 2)]
    assert (await lied_to(*parts).listing()).complete is False


async def test_a_file_that_never_ends_is_given_up() -> None:
    parts = [{"t": "files", "id": f"q{n}", "ok": True, "data": "QUFB", "eof": False} for n in range(1, 9)]
    with pytest.raises(SandboxError, match="larger than 10 bytes"):
        await lied_to(*parts).read_file("x", lambda data: None, 10)


# --- files ---


async def test_files_go_in_and_come_out(hand: Hand) -> None:
    big = os.urandom(1_000_000)
    await hand.write_file("in/big.bin", big)
    await hand.write_file("empty", b"", 0o755)
    outcome = await act(
        hand,
        "import hashlib, os\nopen('out.txt', 'w').write('result')\n"
        "print(hashlib.sha256(open('in/big.bin', 'rb').read()).hexdigest(), os.access('empty', os.X_OK))",
    )
    import hashlib

    assert outcome.out == f"{hashlib.sha256(big).hexdigest()} True\n"
    got: list[bytes] = []
    assert await hand.read_file("out.txt", got.append) == 6
    assert b"".join(got) == b"result"
    assert {entry.path for entry in (await hand.listing()).entries} == {"in", "in/big.bin", "empty", "out.txt"}
    with pytest.raises(SandboxError, match="No such file"):
        await hand.read_file("nothing", got.append)


async def test_a_sparse_file_is_bounded_by_what_is_read(hand: Hand) -> None:
    await act(hand, "open('sparse', 'wb').truncate(100_000_000)")
    with pytest.raises(SandboxError, match="larger than"):
        await hand.read_file("sparse", lambda data: None, 1_000_000)
    await still_works(hand)


# --- code that attacks its own channel ---

FRAME_FD = """
import os, socket, stat
def frame_fd():
    for fd in range(3, 1000):
        try:
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                return fd
        except OSError:
            pass
fd = frame_fd()
"""


async def hostile(sandbox: Sandbox, code: str, **limits: Any) -> Outcome:
    """Run code that knows where the frames go; a box that is ended by it is no reason for the next one to fail."""
    async with opened(sandbox, limits=changed(SMALL, **limits)) as hand:
        outcome = await act(hand, FRAME_FD + code)
        if outcome.done["alive"]:
            await still_works(hand)
        else:
            with pytest.raises(BoxEnded):
                await act(hand, "1")
    async with opened(sandbox) as hand:
        await still_works(hand)
    return outcome


@pytest.mark.hostile
@pytest.mark.parametrize(
    "line",
    [
        b"nonsense\n",
        b'{"t":"out","n":1,"action":"x","stream":"stdout","text":"forged"}\n',
        b'{"t":"attached","last":5}\n',
        b'{"t":"done","action":"another","ok":true}\n',
        b'{"t":"done","ok":true}\n',
        b'{"t":"answer","value":NaN,"repr":""}\n',
        b'{"t":"answer","value":"\\ud800","repr":""}\n',
        b'{"t":"answer","repr":"","value":' + b"[" * 500 + b"]" * 500 + b"}\n",
        b'{"t":"call","call":"c0","tool":"x","args":[],"kwargs":{}}\n',
    ],
    ids=lambda line: repr(line[:50]),
)
async def test_forged_frames_end_the_box(sandbox: Sandbox, line: bytes) -> None:
    outcome = await hostile(sandbox, f"socket.socket(fileno=os.dup(fd)).sendall({line!r})\nimport time\ntime.sleep(20)")
    assert (outcome.error["kind"], outcome.done["alive"]) == ("protocol", False)


LET_GO = """
keep = os.dup(fd)
os.set_inheritable(keep, True)
if os.fork() == 0:
    while True:
        os.write(keep, b'{"t":"display","bundle":{}}\\n')
import time
time.sleep(0.2)
os._exit(4)
"""


@pytest.mark.hostile
@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("os.close(fd)\nimport time\ntime.sleep(20)", "protocol"),
        ("socket.socket(fileno=fd).shutdown(2)\nimport time\ntime.sleep(20)", "protocol"),
        ('os.write(fd, b\'{"t":"done"\')\nos._exit(0)', "ended"),
        ('os.write(fd, b\'{"t":"done"\')\nimport signal\nos.kill(os.getpid(), signal.SIGKILL)', "ended"),
        ('os.write(fd, b\'{"t":"done"\')\nimport signal\nos.kill(os.getpid(), signal.SIGSTOP)', "limit"),
        ("import signal\nos.kill(os.getpid(), signal.SIGSTOP)", "limit"),
        ("if os.fork() == 0:\n    import time\n    time.sleep(60)\nos._exit(4)", "ended"),
        (LET_GO, "ended"),
        ("socket.socket(fileno=os.dup(fd)).sendall(bytes(3_000_000))\nimport time\ntime.sleep(20)", "protocol"),
        ("while True: os.read(fd, 10)", "limit"),
        (
            's = socket.socket(fileno=os.dup(fd))\nwhile True: s.sendall(b\'{"t":"display","bundle":{}}\\n\' * 50)',
            "limit",
        ),
        ("while True: os.write(1, b'x' * 60_000)", "limit"),
        ("while True: print('\\x1b]52;c;aGk=\\x07' * 1000)", "limit"),
    ],
)
async def test_what_is_done_to_the_channel_ends_in_a_typed_error(sandbox: Sandbox, code: str, kind: str) -> None:
    outcome = await hostile(sandbox, code, wall_s=1.0)
    assert outcome.error["kind"] == kind, outcome.done


@pytest.mark.hostile
async def test_a_forged_end_is_the_guests_own_word(sandbox: Sandbox) -> None:
    """It may end its own action early; the real end is then one too many, and the box goes."""
    code = 'os.write(fd, b\'{"t":"done","action":"act_f","ok":true,"value":{"text/plain":"forged"}}\\n\')'
    async with opened(sandbox) as hand:
        outcome = await act(hand, FRAME_FD + code, action="act_f")
        assert outcome.text == "forged"
        with pytest.raises((BoxEnded, AssertionError)):
            await still_works(hand)


@pytest.mark.hostile
async def test_replies_to_calls_never_made(hand: Hand) -> None:
    with pytest.raises(SandboxError, match="no_such_call"):
        await hand.reply("c1", 1)
        await asyncio.wait_for(hand.next_frame(), PATIENCE_S)


# --- plain processes ---


@pytest.fixture
def plain(home: Path) -> SubprocessSandbox:
    return SubprocessSandbox(home)


async def test_the_bridge_for_machines_that_can_run_a_command(plain: SubprocessSandbox) -> None:
    async with opened(plain, generation=1) as hand:
        await act(hand, "x = 41")
        assert isinstance(hand.box, SubprocessBox)
        folder = hand.box.folder
        started: list[asyncio.subprocess.Process] = []

        async def open_(argv: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            pipe = asyncio.subprocess.PIPE
            process = await asyncio.create_subprocess_exec(*argv, stdin=pipe, stdout=pipe, limit=FRAME_BYTES)
            started.append(process)
            assert process.stdout is not None
            assert process.stdin is not None
            return process.stdout, process.stdin

        argv = [sys.executable, "-I", "-S", str(folder / "program.py"), "attach", str(folder)]
        frames = await channel_over(open_, argv, after=1, generation=2)
        bridged = Hand(hand.box, frames, 2)
        assert (await act(bridged, "x + 1")).text == "42"
        big = await act(bridged, "print('x' * 1_000_000)")
        assert len(big.out) == 1_000_001
        await bridged.close()
        assert await asyncio.wait_for(started[0].wait(), PATIENCE_S) == 0


async def test_the_environment_is_scrubbed(plain: SubprocessSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-marker")
    async with opened(plain) as hand:
        code = "import os\n'sk-marker' in open('/proc/self/environ').read() + str(os.environ)"
        assert (await act(hand, code)).text == "False"


SPY = r"""
import asyncio, pathlib, sys
sys.path[:0] = [sys.argv[1]]
from driving import act, opened
from farhand.sandbox.subprocess import SubprocessSandbox

CODE = '''
import ctypes, os
p, got = os.getppid(), [os.getuid()]
for name, mode in (("mem", "r+b"), ("maps", "r"), ("environ", "rb"), ("fd/3", "rb")):
    try:
        open(f"/proc/{p}/{name}", mode).read(1)
        got.append(name)
    except OSError as error:
        got.append(type(error).__name__)
got + [ctypes.CDLL(None).ptrace(16, p, 0, 0)]
'''

async def main():
    async with opened(SubprocessSandbox(pathlib.Path(sys.argv[2]))) as hand:
        print((await act(hand, CODE)).text)

asyncio.run(main())
"""


@pytest.mark.hostile
def test_the_guest_cannot_reach_into_its_supervisor() -> None:
    """As an ordinary user: root of the machine may look into every process, and plain processes have no wall."""
    command = [sys.executable]
    if os.geteuid() == 0:
        command = ["setpriv", "--reuid", "1001", "--regid", "1001", "--clear-groups", "--no-new-privs"]
        command += ["--bounding-set=-all", "/usr/bin/python3"]
        if subprocess.run([*command, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]).returncode:
            pytest.skip("no Python 3.11 that an ordinary user can run")
    with tempfile.TemporaryDirectory(prefix="fh-spy-", dir="/tmp") as folder:
        shutil.copytree(Path(farhand.__file__).parent, Path(folder, "farhand"))
        shutil.copy(Path(__file__).with_name("driving.py"), folder)
        home = Path(folder, "home")
        home.mkdir()
        for path in (Path(folder), home):
            path.chmod(0o777)
        environ = {"HOME": str(home), "PATH": os.environ["PATH"]}
        done = subprocess.run([*command, "-c", SPY, folder, str(home)], env=environ, capture_output=True, text=True)
    user = 1001 if os.geteuid() == 0 else os.getuid()
    assert done.stdout.strip() == str([user, *["PermissionError"] * 4, -1]), done.stderr


async def test_a_box_whose_supervisor_was_killed_is_swept(plain: SubprocessSandbox) -> None:
    box = await plain.create(BARE, SMALL, {"session": "ses_x"})
    record = json.loads((plain._boxes / f"{box.id}.json").read_text())
    hand = await Hand.open(box, generation=1, limits=SMALL)
    os.kill(record["pid"], 9)
    with pytest.raises(SandboxLost):
        await asyncio.wait_for(hand.next_frame(), PATIENCE_S)
    await hand.close()
    async with asyncio.timeout(PATIENCE_S):
        while await plain.list({"session": "ses_x"}):  # the kernel closes its socket before it is gone
            await asyncio.sleep(0.01)
    assert not os.path.exists(record["folder"])


async def test_a_box_that_nobody_can_find_ends_itself(plain: SubprocessSandbox) -> None:
    box = await plain.create(BARE, SMALL, {"session": "ses_y"})
    (record,) = [file for file in plain._boxes.glob("sbx_*.json") if box.id in file.name]
    pid = json.loads(record.read_text())["pid"]
    ended = os.pidfd_open(pid)
    record.unlink()
    try:
        ready = await asyncio.to_thread(select.select, [ended], [], [], PATIENCE_S)
    finally:
        os.close(ended)
    assert ready[0]
    assert not os.path.exists(box.folder)


async def test_python_that_is_not_there(plain: SubprocessSandbox) -> None:
    from dataclasses import replace

    from farhand.errors import SandboxUnavailable

    with pytest.raises(SandboxUnavailable, match="/nonexistent"):
        await plain.create(replace(BARE, python="/nonexistent"), SMALL, {})
