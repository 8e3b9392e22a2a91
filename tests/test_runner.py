"""The runner's supervisor against a worker that the test plays itself."""

from __future__ import annotations

import base64
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from farhand.sandbox.runner.bounds import FRAME_BYTES, SPOOL_BYTES
from farhand.sandbox.runner.frame import Lines, dump_frame
from farhand.sandbox.runner.hands import Usage
from farhand.sandbox.runner.reactor import Reactor
from farhand.sandbox.runner.supervisor import Supervisor
from farhand.sandbox.runner.workspace import DirectoryFiles

PATIENCE_S = 5.0


class ScriptedHands:
    """A port to no processes at all: what is asked of it is written down."""

    sampling = True

    def __init__(self, folder: Path) -> None:
        self.asked: list[str] = []
        self.limits: dict[str, Any] = {}
        self.now: Usage | None = Usage(1000, 0.0, 1)
        self.on_kill: Callable[[], None] = lambda: None
        self._fd = os.open(folder, os.O_RDONLY)

    def interrupt(self) -> None:
        self.asked.append("interrupt")

    def kill(self) -> None:
        self.asked.append("kill")
        self.on_kill()

    def usage(self) -> Usage | None:
        return self.now

    def apply(self, limits: dict[str, Any]) -> None:
        self.limits = limits

    def suspend(self) -> None:
        self.asked.append("suspend")

    def resume(self) -> None:
        self.asked.append("resume")

    def files(self) -> DirectoryFiles:
        return DirectoryFiles(self._fd)

    def close(self) -> None:
        os.close(self._fd)


class Peer:
    """One end of a socket that speaks frames."""

    def __init__(self, rig: Rig, sock: socket.socket) -> None:
        self._rig, self.sock = rig, sock
        self._lines = Lines()
        sock.setblocking(False)

    def send(self, *frames: dict[str, Any]) -> None:
        for frame in frames:
            self.raw(dump_frame(frame))

    def raw(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[self.sock.send(rest) :]
            except BlockingIOError:
                self._rig.reactor.step(0.01)

    def take(self) -> dict[str, Any]:
        """The next frame; the reactor runs until it is there."""
        frame = self.poll(PATIENCE_S)
        assert frame is not None, "no frame came"
        return frame

    def poll(self, patience_s: float = 0.05) -> dict[str, Any] | None:
        until = time.monotonic() + patience_s
        while True:
            line = self._lines.take()
            if line is not None:
                found: dict[str, Any] = json.loads(line)
                return found
            try:
                data = self.sock.recv(65536)
                if not data:
                    return {"t": "closed"}
                self._lines.feed(data)
                continue
            except BlockingIOError:
                pass
            except ConnectionResetError:
                return {"t": "closed"}
            if time.monotonic() > until:
                return None
            self._rig.reactor.step(0.01)


class Rig:
    """A supervisor, the worker's end of its channel and pipes, and a harness."""

    def __init__(self, folder: Path) -> None:
        self.reactor = Reactor()
        self.hands = ScriptedHands(folder)
        ours, theirs = socket.socketpair()
        out, err = os.pipe(), os.pipe()
        self.stdout, self.stderr = out[1], err[1]
        self.worker = Peer(self, theirs)
        self.supervisor = Supervisor(self.reactor, self.hands, ours, out[0], err[0], {"numpy": "1"})
        self.peers = [self.worker]

    def connect(self, generation: int = 1, after: int = 0) -> Peer:
        peer = self.connection()
        peer.send({"t": "attach", "v": 1, "gen": generation, "after": after})
        return peer

    def connection(self) -> Peer:
        ours, theirs = socket.socketpair()
        self.supervisor.connect(ours)
        peer = Peer(self, theirs)
        self.peers.append(peer)
        return peer

    def ready(self, **limits: Any) -> Peer:
        """A harness that has said hello."""
        peer = self.connect()
        assert peer.take()["t"] == "attached"
        tools = [{"name": "tool", "params": []}]
        peer.send({"t": "hello", "gen": 1, "limits": {"wall_s": 30, **limits}, "imports": None, "tools": tools})
        assert self.worker.take()["t"] == "hello"
        self.worker.send({"t": "ready", "python": "3.11"})
        assert peer.take() == {"t": "ready", "v": 1, "python": "3.11", "packages": {"numpy": "1"}}
        return peer

    def running(self, **limits: Any) -> Peer:
        peer = self.ready(**limits)
        self.run(peer, "a1")
        return peer

    def run(self, peer: Peer, action: str) -> None:
        peer.send({"t": "run", "gen": 1, "action": action, "code": "1", "title": "<t>"})
        sent = self.worker.take()
        assert {**sent, "interrupts": 0} == {"t": "run", "action": action, "code": "1", "title": "<t>", "interrupts": 0}

    def close(self) -> None:
        self.supervisor.close()
        self.reactor.close()
        self.hands.close()
        for peer in self.peers:
            peer.sock.close()
        os.close(self.stdout)
        os.close(self.stderr)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.close()


def call(number: int, **more: Any) -> dict[str, Any]:
    return {"t": "call", "call": f"c{number}", "tool": "tool", "args": [], "kwargs": {}, **more}


def done(action: str = "a1", **more: Any) -> dict[str, Any]:
    return {"t": "done", "action": action, "ok": True, "value": None, "error": None, **more}


ERROR = {"kind": "exception", "type": "E", "message": "m", "traceback": "t", "hint": ""}


def test_frames_are_numbered_and_the_action_is_the_supervisors_word(rig: Rig) -> None:
    peer = rig.running()
    rig.worker.send(call(1, action="forged", n=77))
    os.write(rig.stdout, b"text")
    first = peer.take()
    assert (first["t"], first["n"], first["action"]) == ("call", 1, "a1") or first["t"] == "out"
    rig.worker.send({"t": "answer", "value": 1, "repr": "1", "problem": None}, done(value={"text/plain": "5"}))
    frames = [first]
    while frames[-1]["t"] != "done":
        frames.append(peer.take())
    assert [frame["n"] for frame in frames] == [1, 2, 3, 4]
    assert {frame["action"] for frame in frames} == {"a1"}
    assert frames[-1]["value"] == {"text/plain": "5"}


def test_what_was_written_before_comes_before(rig: Rig) -> None:
    peer = rig.running()
    os.write(rig.stdout, b"o" * 50_000)
    os.write(rig.stderr, b"e" * 50_000)
    rig.worker.send(done())
    frames = [peer.take()]
    while frames[-1]["t"] != "done":
        frames.append(peer.take())
    assert sum(len(frame["text"]) for frame in frames[:-1]) == 100_000
    assert frames[-1]["output"]["bytes"] == 100_000
    assert all(len(frame["text"]) <= 32 * 1024 for frame in frames[:-1])


def test_attach_again_after_a_frame(rig: Rig) -> None:
    peer = rig.running()
    rig.worker.send(call(1), call(2), call(3))
    assert [peer.take()["n"] for _ in range(3)] == [1, 2, 3]
    peer.send({"t": "ack", "gen": 1, "n": 1}, {"t": "ping", "gen": 1, "id": "p"})
    assert peer.take() == {"t": "pong", "id": "p"}
    again = rig.connect(generation=2, after=2)
    state = again.take()
    assert state["running"] == "a1"
    assert (state["last"], state["waiting"], state["ran"], state["ready"]) == (3, ["c1", "c2", "c3"], ["a1"], True)
    assert again.take()["n"] == 3
    assert again.poll() is None
    assert peer.take()["t"] == "closed"
    lost = rig.connect(generation=2, after=0)
    assert lost.take()["code"] == "malformed"
    assert lost.take()["t"] == "closed"
    assert rig.supervisor.connected


def test_an_older_generation_is_fenced(rig: Rig) -> None:
    newer = rig.connect(generation=5)
    newer.take()
    older = rig.connect(generation=4)
    assert older.take()["code"] == "fenced"
    assert older.take()["t"] == "closed"
    newer.send({"t": "ping", "gen": 4, "id": "x"})
    assert newer.take()["code"] == "fenced"
    assert newer.take()["t"] == "closed"


@pytest.mark.parametrize(
    "frame",
    [
        {"t": "ping", "gen": 1},
        {"t": "attach"},
        {"t": "attach", "gen": -1, "after": 0},
        {"t": "attach", "gen": True, "after": 0},
        {"t": "attach", "gen": 1, "after": 10},
        {"t": "attach", "gen": 1.5, "after": 0},
    ],
)
def test_a_first_frame_that_does_not_attach(rig: Rig, frame: dict[str, Any]) -> None:
    peer = rig.connection()
    peer.send(frame)
    assert peer.take()["code"] == "malformed"
    assert peer.take()["t"] == "closed"


def test_refusals(rig: Rig) -> None:
    peer = rig.connect()
    peer.take()
    run = {"t": "run", "gen": 1, "action": "a1", "code": "", "title": ""}
    peer.send(run)
    assert (peer.take()["code"], rig.worker.poll()) == ("not_ready", None)
    peer = rig.running()
    peer.send(run)
    assert peer.take()["code"] == "already_run"
    peer.send({**run, "action": "a2"})
    refused = peer.take()
    assert (refused["code"], refused["re"], refused["action"]) == ("busy", "run", "a2")
    peer.send({"t": "save", "gen": 1, "id": "s"})
    assert peer.take()["code"] == "unsupported"
    peer.send({"t": "reply", "gen": 1, "call": "c1", "ok": True, "value": 1})
    assert peer.take()["code"] == "no_such_call"
    peer.send({"t": "whatever", "gen": 1})
    assert peer.take()["code"] == "unsupported"
    rig.supervisor.ended(0)
    assert peer.take()["t"] == "done"
    peer.send({**run, "action": "a3"})
    assert peer.take()["code"] == "ended"


def test_a_reply_counts_once(rig: Rig) -> None:
    peer = rig.running()
    rig.worker.send(call(1))
    peer.take()
    peer.send(*[{"t": "reply", "gen": 1, "call": "c1", "ok": True, "value": n} for n in (1, 2)])
    assert rig.worker.take() == {"t": "reply", "call": "c1", "ok": True, "value": 1}
    assert rig.worker.poll() is None
    assert peer.poll() is None


BAD_FRAMES: list[bytes | dict[str, Any]] = [
    b"nonsense\n",
    b'{"t":"call","call":"c1","tool":"tool","args":[NaN],"kwargs":{}}\n',
    b'{"t":"call","call":"c1","tool":"tool","args":["\\ud800"],"kwargs":{}}\n',
    b'{"t":"call","call":"c1","tool":"tool","args":' + b"[" * 300 + b"]" * 300 + b',"kwargs":{}}\n',
    b"x" * (2 * FRAME_BYTES),
    b'{"t":"answer","value":1e999,"repr":"1"}\n',
    b'{"t":"answer","value":[' + b"1e15," * 190_000 + b'1],"repr":"1"}\n',
    {"t": "out", "text": "forged", "stream": "stdout"},
    {"t": "attached"},
    {"t": "done"},
    done("a2"),
    done(value=[]),
    done(value={"text/plain": 5}),
    done(value={f"x/{n}": "" for n in range(100)}),
    done(ok=False),
    done(ok=False, error={"kind": "protocol"}),
    done(ok=False, error={"kind": "limit", "limit": "wall_s"}),
    call(0),
    call(-1),
    call(10**20),
    {**call(1), "call": "c²"},
    {**call(1), "call": "c01"},
    {**call(1), "call": 1},
    {**call(1), "args": {}},
    {**call(1), "kwargs": []},
    {**call(1), "tool": None},
    {"t": "answer"},
    {"t": "display"},
    {"t": "display", "bundle": {"text/plain": None}},
    {"t": "ready"},
]


@pytest.mark.parametrize("frame", BAD_FRAMES, ids=lambda frame: repr(frame)[:60])
def test_a_worker_that_breaks_the_protocol_is_ended(rig: Rig, frame: bytes | dict[str, Any]) -> None:
    peer = rig.running()
    rig.hands.on_kill = lambda: rig.reactor.call_soon(lambda: rig.supervisor.ended(-9))
    if isinstance(frame, bytes):
        try:
            rig.worker.raw(frame)
        except (BrokenPipeError, ConnectionResetError):
            pass
    else:
        rig.worker.send(frame)
    end = peer.take()
    assert (end["t"], end["ok"], end["alive"], end["error"]["kind"]) == ("done", False, False, "protocol")
    assert "kill" in rig.hands.asked
    peer.send({"t": "run", "gen": 1, "action": "a2", "code": "", "title": ""})
    assert peer.take()["code"] == "ended"


def test_a_call_that_was_made_before_is_a_violation(rig: Rig) -> None:
    peer = rig.running()
    rig.worker.send(call(2), call(2))
    assert peer.take()["call"] == "c2"
    assert peer.take()["error"]["kind"] == "protocol"


def test_calls_that_are_answered_here(rig: Rig) -> None:
    peer = rig.ready()
    rig.worker.send(call(1))
    assert "no action is running" in rig.worker.take()["error"]["message"]
    rig.run(peer, "a1")
    rig.worker.send(call(2, tool="other"))
    assert "no tool" in rig.worker.take()["error"]["message"]
    rig.worker.send(*[call(3 + n) for n in range(1001)])
    reply = rig.worker.take()
    assert (reply["call"], reply["error"]["type"]) == ("c1003", "LimitReached")
    assert peer.poll() is not None


def test_displays_and_answers_are_bounded(rig: Rig) -> None:
    peer = rig.running(displays=2)
    for n in range(5):
        rig.worker.send({"t": "display", "bundle": {"text/plain": str(n)}})
    for n in range(150):
        rig.worker.send({"t": "answer", "value": n, "repr": str(n), "problem": None})
    rig.worker.send(done())
    frames = [peer.take()]
    while frames[-1]["t"] != "done":
        frames.append(peer.take())
    assert [frame["t"] for frame in frames] == ["display"] * 2 + ["answer"] * 100 + ["done"]
    assert frames[-1]["output"]["displays_cut"] == 3
    assert frames[-1]["output"]["answers_cut"] == 50


def test_a_full_spool_cuts_output_and_holds_calls_back(rig: Rig) -> None:
    peer = rig.running(output_bytes=100_000_000)
    for _ in range(200):
        os.write(rig.stdout, b"x" * 60_000)
        while not _drained(rig):
            rig.reactor.step(0.01)
    assert SPOOL_BYTES <= rig.supervisor.spool.size < SPOOL_BYTES + 200_000
    rig.worker.send(call(1), done())
    for _ in range(10):
        rig.reactor.step(0.01)
    assert rig.supervisor.spool.size < SPOOL_BYTES + 200_000
    got = 0
    while True:
        frame = peer.take()
        if frame["t"] != "out":
            break
        got += len(frame["text"])
        peer.send({"t": "ack", "gen": 1, "n": frame["n"]})
    assert frame["t"] == "call"
    end = peer.take()
    assert end["output"] == {"bytes": 12_000_000, "cut_bytes": 12_000_000 - got, "displays_cut": 0, "answers_cut": 0}
    assert 3_000_000 < got < 5_000_000


def _drained(rig: Rig) -> bool:
    import fcntl
    import termios

    held = bytearray(4)
    fcntl.ioctl(rig.stdout, termios.FIONREAD, held)
    return held == b"\0\0\0\0"


def test_two_gigabytes_of_output_leave_no_trace_in_memory(rig: Rig) -> None:
    rig.running(output_bytes=1000)
    block = b"x" * 65536
    os.set_blocking(rig.stdout, False)
    written, started = 0, time.monotonic()
    while written < 200_000_000:
        try:
            written += os.write(rig.stdout, block)
        except BlockingIOError:
            rig.reactor.step(0.01)
    while not _drained(rig):
        rig.reactor.step(0.01)
    assert written / (time.monotonic() - started) > 50_000_000
    assert rig.supervisor.spool.size < 5000


def test_between_actions_the_pipes_are_left_full(rig: Rig) -> None:
    peer = rig.ready()
    os.set_blocking(rig.stdout, False)
    written = 0
    for _ in range(100):
        try:
            written += os.write(rig.stdout, b"x" * 4096)
        except BlockingIOError:
            break
        rig.reactor.step(0.0)
    assert written < 300_000
    first = peer.take()
    assert (first["t"], first["action"]) == ("out", None)


def test_a_million_tiny_frames_end_in_one_done(rig: Rig) -> None:
    peer = rig.running()
    rig.hands.on_kill = lambda: rig.reactor.call_soon(lambda: rig.supervisor.ended(-9))
    tiny = dump_frame({"t": "display", "bundle": {}}) * 10_000
    for _ in range(100):
        rig.worker.raw(tiny)
    rig.worker.send(done())
    frames = [peer.take()]
    while frames[-1]["t"] != "done":
        frames.append(peer.take())
    assert len(frames) == 21
    assert frames[-1]["output"]["displays_cut"] == 1_000_000 - 20


def test_a_worker_that_does_not_read_its_replies_is_ended(rig: Rig) -> None:
    peer = rig.running()
    rig.worker.send(*[call(n) for n in range(1, 41)])
    for n in range(1, 41):
        peer.take()
        peer.send({"t": "reply", "gen": 1, "call": f"c{n}", "ok": True, "value": "x" * 900_000})
    end = peer.take()
    assert end["error"]["kind"] == "protocol"
    assert "replies" in end["error"]["message"]


def test_the_worker_ends_while_a_call_waits(rig: Rig) -> None:
    peer = rig.running()
    rig.worker.send(call(1))
    rig.worker.sock.close()
    rig.supervisor.ended(3)
    assert peer.take()["t"] == "call"
    end = peer.take()
    assert (end["error"]["kind"], end["error"]["exit"], end["alive"]) == ("ended", 3, False)
    peer.send({"t": "reply", "gen": 1, "call": "c1", "ok": True, "value": 1})
    assert peer.poll() is None


def test_a_limit_the_host_names_ends_the_action(rig: Rig) -> None:
    peer = rig.running(memory_bytes=1000)
    rig.supervisor.ended(-9, "memory_bytes")
    error = peer.take()["error"]
    assert (error["kind"], error["limit"]) == ("limit", "memory_bytes")


def test_a_closed_channel_is_a_violation(rig: Rig) -> None:
    peer = rig.running()
    rig.worker.sock.shutdown(socket.SHUT_RDWR)
    assert peer.take()["error"]["kind"] == "protocol"


@pytest.mark.parametrize("half", [b'{"t":"done","acti', b"x" * 500_000])
def test_half_a_frame_is_bounded_by_the_deadline(rig: Rig, half: bytes) -> None:
    peer = rig.running(wall_s=0.2)
    rig.worker.raw(half)
    end = peer.take()
    assert (end["error"]["limit"], end["alive"]) == ("wall_s", False)
    assert rig.hands.asked[:2] == ["interrupt", "kill"]


def test_the_clock_stands_while_a_call_waits_and_while_suspended(rig: Rig) -> None:
    peer = rig.running(wall_s=0.2)
    rig.worker.send(call(1))
    peer.take()
    assert peer.poll(0.5) is None
    rig.supervisor.suspend()
    peer.send({"t": "reply", "gen": 1, "call": "c1", "ok": True, "value": 1})
    assert peer.poll(0.5) is None
    rig.supervisor.resume()
    assert rig.hands.asked == ["suspend", "resume"]
    started = time.monotonic()
    assert peer.take()["error"]["limit"] == "wall_s"
    assert time.monotonic() - started > 0.1


@pytest.mark.parametrize(
    ("usage", "limit"),
    [(Usage(5000, 0.0, 1), "memory_bytes"), (Usage(1, 9.0, 1), "cpu_s"), (Usage(1, 0.0, 50), "processes")],
)
def test_limits_that_are_sampled(rig: Rig, usage: Usage, limit: str) -> None:
    peer = rig.running(memory_bytes=4000, cpu_s=5, processes=10)
    rig.hands.now = usage
    end = peer.take()
    assert (end["error"]["kind"], end["error"]["limit"]) == ("limit", limit)


def test_an_interrupt_is_a_signal_and_then_a_kill(rig: Rig) -> None:
    peer = rig.running()
    peer.send({"t": "interrupt", "gen": 1, "action": "other", "reason": "interrupt", "grace_s": 0.1})
    assert peer.poll() is None
    started = time.monotonic()
    peer.send({"t": "interrupt", "gen": 1, "action": "a1", "reason": "cancel", "grace_s": 0.1})
    end = peer.take()
    assert rig.hands.asked[:2] == ["interrupt", "kill"]
    assert 0.1 <= time.monotonic() - started < 0.5
    assert (end["error"]["kind"], end["alive"]) == ("cancelled", False)


def test_an_interrupted_worker_lives_on(rig: Rig) -> None:
    peer = rig.running()
    peer.send({"t": "interrupt", "gen": 1, "action": "a1", "reason": "interrupt", "grace_s": 5})
    peer.send({"t": "ping", "gen": 1, "id": "p"})
    assert peer.take()["t"] == "pong"
    rig.worker.send(done(ok=False, error={**ERROR, "kind": "interrupted", "type": "KeyboardInterrupt"}))
    end = peer.take()
    assert (end["error"]["kind"], end["error"]["traceback"], end["alive"]) == ("interrupted", "t", True)
    rig.run(peer, "a2")
    rig.worker.send(done("a2", ok=False, error={**ERROR, "kind": "interrupted"}))
    assert peer.take()["error"]["kind"] == "exception"


def test_names_are_said_when_the_worker_is_lost(rig: Rig) -> None:
    peer = rig.running()
    rig.worker.send(done(names=["a", "b" * 1000, 5, *(f"n{n}" for n in range(1000))]))
    assert peer.take()["lost"] == []
    rig.run(peer, "a2")
    rig.supervisor.ended(-11)
    lost = peer.take()["lost"]
    assert lost[:3] == ["a", "b" * 100, "n0"]
    assert len(lost) < 500


def test_files_are_put_listed_and_taken(rig: Rig, tmp_path: Path) -> None:
    peer = rig.ready()
    put = {"t": "put", "gen": 1, "path": "a/b.txt", "mode": 0o640}
    data = base64.b64encode(b"one").decode()
    peer.send({**put, "id": "1", "offset": 0, "data": data, "last": False})
    assert peer.take() == {"t": "files", "id": "1", "ok": True}
    assert not (tmp_path / "a/b.txt").exists()
    peer.send({**put, "id": "2", "offset": 3, "data": data, "last": True})
    assert peer.take()["ok"]
    assert (tmp_path / "a/b.txt").read_bytes() == b"oneone"
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("/etc/passwd")
    peer.send({"t": "take", "gen": 1, "id": "3", "path": None})
    listing = peer.take()
    assert {(entry["path"], entry["kind"], entry["mode"]) for entry in listing["entries"]} == {
        ("a", "folder", 0o755),
        ("a/b.txt", "file", 0o640),
    }
    assert {(left["path"], left["reason"]) for left in listing["left_out"]} == {
        ("fifo", "a FIFO"),
        ("link", "a symbolic link"),
    }
    peer.send({"t": "take", "gen": 1, "id": "4", "path": "a/b.txt", "offset": 2})
    assert peer.take() == {"t": "files", "id": "4", "ok": True, "data": base64.b64encode(b"eone").decode(), "eof": True}


@pytest.mark.parametrize("path", ["fifo", "link", "../x", "/etc/passwd", "", "a//b", ".", "folder", "linked/x", "a\0b"])
def test_what_is_no_file_is_refused_at_once(rig: Rig, tmp_path: Path, path: str) -> None:
    peer = rig.ready()
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("/etc/passwd")
    (tmp_path / "linked").symlink_to("/tmp")
    (tmp_path / "folder").mkdir()
    peer.send({"t": "take", "gen": 1, "id": "1", "path": path, "offset": 0})
    reply = peer.take()
    assert (reply["t"], reply.get("ok", False)) == ("files", False)


def test_a_long_listing_comes_in_parts(rig: Rig, tmp_path: Path) -> None:
    peer = rig.ready()
    for n in range(4500):
        (tmp_path / f"f{n}").touch()
    seen: set[str] = set()
    cursor, parts = 0, 0
    while True:
        peer.send({"t": "take", "gen": 1, "id": "x", "path": None, "offset": cursor})
        part = peer.take()
        seen |= {entry["path"] for entry in part["entries"]}
        parts += 1
        if part["more"] is None:
            break
        cursor = part["more"]
    assert (len(seen), parts >= 3) == (4500, True)
    peer.send({"t": "take", "gen": 1, "id": "x", "path": None, "offset": 17})
    assert peer.take()["ok"] is False
