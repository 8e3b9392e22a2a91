"""The harness's end of the protocol (docs/protocol.md): frames to bytes, bytes to checked frames, an attached
channel."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from types import NoneType
from typing import TypeAlias

from farhand.errors import Fenced, ProtocolViolation, SandboxError, SandboxLost
from farhand.limits import FRAME_BYTES
from farhand.sandbox.port import Attached, Frame
from farhand.sandbox.runner.frame import FrameError, dump_frame, parse_frame

VERSION = 1

STREAM = frozenset({"out", "display", "call", "answer", "done"})
ANSWERS = frozenset({"attached", "ready", "pong", "files", "saved", "refused"})

_REQUIRED: dict[str, dict[str, type | tuple[type, ...]]] = {
    "out": {"n": int, "action": (str, NoneType), "stream": str, "text": str},
    "display": {"n": int, "action": str, "bundle": dict},
    "call": {"n": int, "action": str, "call": str, "tool": str, "args": list, "kwargs": dict},
    "answer": {"n": int, "action": str, "repr": str, "problem": (str, NoneType)},
    "done": {
        "n": int,
        "action": str,
        "ok": bool,
        "alive": bool,
        "usage": dict,
        "output": dict,
        "value": (dict, NoneType),
        "error": (dict, NoneType),
        "lost": (list, NoneType),
    },
    "attached": {"last": int, "waiting": list, "ran": list, "ready": bool, "ended": bool},
    "ready": {"v": int},
    "pong": {},
    "files": {"ok": bool},
    "saved": {},
    "refused": {"code": str, "message": str},
}


def dump(frame: Frame) -> bytes:
    """One line. ProtocolViolation when it is larger than a frame may be or holds NaN."""
    try:
        return dump_frame(frame)
    except FrameError as error:
        raise ProtocolViolation(str(error)) from error


def load(line: bytes) -> Frame:
    """A checked frame of one line from a box. ProtocolViolation for anything else."""
    try:
        frame = parse_frame(line)
    except FrameError as error:
        raise ProtocolViolation(str(error)) from error
    kind = frame["t"]
    if kind not in _REQUIRED:
        raise ProtocolViolation(f"a frame of unknown type {kind[:80]!r}")
    for name, types in _REQUIRED[kind].items():
        value = frame.get(name)
        if not isinstance(value, types) or (types is int and isinstance(value, bool)):
            raise ProtocolViolation(f"a {kind} frame whose {name!r} is {type(value).__name__}")
    return frame


def attached(frame: Frame) -> Attached:
    """The state a channel starts from."""
    running = frame.get("running")
    return Attached(
        running=running if isinstance(running, str) else None,
        last=frame["last"],
        waiting=tuple(str(call) for call in frame["waiting"]),
        ran=tuple(str(action) for action in frame["ran"]),
        ready=frame["ready"],
        ended=frame["ended"],
    )


def attach_frame(after: int, generation: int) -> Frame:
    """The first frame on every connection."""
    return {"t": "attach", "v": VERSION, "gen": generation, "after": after}


FRAMES_AT_ONCE = 32
READ_BYTES = 256 * 1024


class _Frames:
    """What every attached channel does, over lines that a subclass reads and writes."""

    def __init__(self, after: int, generation: int) -> None:
        self._last, self._generation = after, generation
        self._state: Attached | None = None

    async def _read_line(self) -> bytes:
        raise NotImplementedError

    async def _write(self, data: bytes) -> None:
        raise NotImplementedError

    def _abort(self) -> None:
        raise NotImplementedError

    async def _attaching(self, sent: bool) -> None:
        """Send `attach`, unless that has been done, and take the answer."""
        try:
            if not sent:
                await self._write(dump(attach_frame(self._last, self._generation)))
            frame = load(await self._read_line())
            if frame["t"] == "refused" and frame["code"] == "fenced":
                raise Fenced(f"the box obeys a newer generation than {self._generation}: {frame['message'][:200]}")
            if frame["t"] == "refused":
                raise SandboxError(f"the box refused the channel: {frame['message'][:500]}")
            if frame["t"] != "attached":
                raise ProtocolViolation(f"a {frame['t']} frame where attached was due")
        except BaseException:
            self._abort()
            raise
        self._state = attached(frame)

    @property
    def attached(self) -> Attached:
        assert self._state is not None
        return self._state

    async def send(self, *frames: Frame) -> None:
        await self._write(b"".join(dump({**frame, "gen": self._generation}) for frame in frames))

    async def receive(self) -> Frame:
        frame = load(await self._read_line())
        if frame["t"] in STREAM:
            if frame["n"] != self._last + 1:
                raise ProtocolViolation(f"frame {frame['n']} after frame {self._last}")
            self._last = frame["n"]
        return frame

    async def close(self) -> None:
        """Let go at once: what the box has not read yet is dropped."""
        self._abort()


class StreamFrames(_Frames):
    """`Frames` over a pair of asyncio streams (made with `limit=FRAME_BYTES`). Use `StreamFrames.attach`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, after: int, generation: int) -> None:
        super().__init__(after, generation)
        self._reader, self._writer = reader, writer

    @classmethod
    async def attach(
        cls, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, after: int, generation: int
    ) -> StreamFrames:
        frames = cls(reader, writer, after, generation)
        await frames._attaching(sent=False)
        return frames

    async def _read_line(self) -> bytes:
        try:
            return await self._reader.readuntil(b"\n")
        except asyncio.IncompleteReadError as error:
            raise SandboxLost("the channel to the box ended") from error
        except asyncio.LimitOverrunError as error:
            raise ProtocolViolation(f"a frame larger than {FRAME_BYTES:,} bytes") from error
        except (ConnectionError, OSError) as error:
            raise SandboxLost("the channel to the box broke") from error

    async def _write(self, data: bytes) -> None:
        if self._writer.is_closing():
            raise SandboxLost("the channel to the box is closed")
        self._writer.write(data)
        try:
            await self._writer.drain()
        except (ConnectionError, OSError) as error:
            raise SandboxLost("the channel to the box broke") from error

    def _abort(self) -> None:
        self._writer.transport.abort()


class SocketFrames(_Frames):
    """`Frames` over a connected stream socket, which it owns: read and written at once where the kernel lets it, which
    costs half of what asyncio's streams cost. `data` is what was read of the socket already."""

    def __init__(self, sock: socket.socket, after: int, generation: int, data: bytes = b"") -> None:
        super().__init__(after, generation)
        sock.setblocking(False)
        self._sock, self._data, self._searched = sock, bytearray(data), 0
        self._writing = asyncio.Lock()
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None
        self._watched = False
        self._taken = 0
        self._closed = False

    @classmethod
    async def attach(
        cls, sock: socket.socket, after: int, generation: int, data: bytes = b"", sent: bool = False
    ) -> SocketFrames:
        """`sent`: the frame `attach` has been sent on this socket already."""
        frames = cls(sock, after, generation, data)
        await frames._attaching(sent)
        return frames

    async def _read_line(self) -> bytes:
        self._taken += 1
        if self._taken % FRAMES_AT_ONCE == 0:
            await asyncio.sleep(0)  # a box that never pauses must not keep the loop
        while True:
            end = self._data.find(b"\n", self._searched)
            if end >= 0:
                line = bytes(self._data[: end + 1])
                del self._data[: end + 1]
                self._searched = 0
                return line
            self._searched = len(self._data)
            if self._searched > FRAME_BYTES:
                raise ProtocolViolation(f"a frame larger than {FRAME_BYTES:,} bytes")
            self._data += await self._more()

    async def _more(self) -> bytes:
        while True:
            self._require_open()
            try:
                data = self._sock.recv(READ_BYTES)
            except BlockingIOError:
                await self._until_readable()
                continue
            except OSError as error:
                raise SandboxLost("the channel to the box broke") from error
            if not data:
                raise SandboxLost("the channel to the box ended")
            return data

    async def _write(self, data: bytes) -> None:
        if self._writing.locked():  # frames stay whole and in order
            async with self._writing:
                await self._write_all(data)
        else:
            rest = self._try_write(data)
            if rest:
                async with self._writing:
                    await self._write_all(rest)

    async def _write_all(self, data: bytes) -> None:
        while data := self._try_write(data):
            await self._until_writable()

    def _try_write(self, data: bytes) -> bytes:
        """What the kernel did not take."""
        self._require_open()
        try:
            return data[self._sock.send(data) :]
        except BlockingIOError:
            return data
        except OSError as error:
            raise SandboxLost("the channel to the box broke") from error

    def _require_open(self) -> None:
        if self._closed:
            raise SandboxLost("the channel to the box is closed")

    async def _until_readable(self) -> None:
        """The socket stays watched from one wait to the next; it is let go of when something comes and nobody waits."""
        loop = asyncio.get_running_loop()
        self._reader = ready = loop.create_future()
        if not self._watched:
            self._watched = True
            loop.add_reader(self._sock.fileno(), self._readable, loop)
        try:
            await ready
        finally:
            self._reader = None

    def _readable(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._reader is not None:
            _set(self._reader)
        else:
            self._watched = False
            loop.remove_reader(self._sock.fileno())

    async def _until_writable(self) -> None:
        loop, fd = asyncio.get_running_loop(), self._sock.fileno()
        self._writer = ready = loop.create_future()
        loop.add_writer(fd, _set, ready)
        try:
            await ready
        finally:
            self._writer = None
            if not self._closed:
                loop.remove_writer(fd)

    def _abort(self) -> None:
        if self._closed:
            return
        self._closed = True
        loop, fd = asyncio.get_running_loop(), self._sock.fileno()
        loop.remove_reader(fd)
        loop.remove_writer(fd)
        self._sock.close()
        for waiting in (self._reader, self._writer):
            if waiting is not None:
                _set(waiting)


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


Open: TypeAlias = Callable[[Sequence[str]], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]
"""Runs a command in a box and gives its standard output and input; the reader's limit is FRAME_BYTES."""


async def channel_over(open_: Open, argv: Sequence[str], after: int, generation: int) -> StreamFrames:
    """A channel to a box that can run a command: `argv` is the program's `attach FOLDER`, a bridge to its socket."""
    reader, writer = await open_(argv)
    return await StreamFrames.attach(reader, writer, after, generation)
