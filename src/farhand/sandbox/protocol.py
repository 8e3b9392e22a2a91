"""The harness's end of the protocol (docs/protocol.md): frames to bytes, bytes to checked frames, an attached
channel."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from types import NoneType
from typing import Any, TypeAlias

from farhand.errors import Fenced, ProtocolViolation, SandboxError, SandboxLost
from farhand.limits import FRAME_BYTES
from farhand.sandbox.port import Attached, Frame
from farhand.sandbox.runner import FrameError, dump_frame, parse_frame

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


class StreamFrames:
    """`Frames` over a pair of asyncio streams (made with `limit=FRAME_BYTES`). Use `StreamFrames.attach`."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, generation: int, state: Attached
    ) -> None:
        self._reader, self._writer, self._generation, self._state = reader, writer, generation, state
        self._last = 0

    @classmethod
    async def attach(
        cls, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, after: int, generation: int
    ) -> StreamFrames:
        writer.write(dump(attach_frame(after, generation)))
        return await cls.attaching(reader, writer, after, generation)

    @classmethod
    async def attaching(
        cls, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, after: int, generation: int
    ) -> StreamFrames:
        """The same when the frame `attach` has been sent already."""
        try:
            await writer.drain()
            frame = await _next(reader)
        except (ConnectionError, OSError) as error:
            writer.close()
            raise SandboxLost("the channel to the box broke") from error
        except BaseException:
            writer.close()
            raise
        if frame["t"] == "refused":
            writer.close()
            if frame["code"] == "fenced":
                raise Fenced(f"the box obeys a newer generation than {generation}: {frame['message'][:200]}")
            raise SandboxError(f"the box refused the channel: {frame['message'][:500]}")
        if frame["t"] != "attached":
            raise ProtocolViolation(f"a {frame['t']} frame where attached was due")
        frames = cls(reader, writer, generation, attached(frame))
        frames._last = after
        return frames

    @property
    def attached(self) -> Attached:
        return self._state

    async def send(self, frame: Frame) -> None:
        if self._writer.is_closing():
            raise SandboxLost("the channel to the box is closed")
        self._writer.write(dump({**frame, "gen": self._generation}))
        try:
            await self._writer.drain()
        except (ConnectionError, OSError) as error:
            raise SandboxLost("the channel to the box broke") from error

    async def receive(self) -> Frame:
        frame = await _next(self._reader)
        if frame["t"] in STREAM:
            if frame["n"] != self._last + 1:
                raise ProtocolViolation(f"frame {frame['n']} after frame {self._last}")
            self._last = frame["n"]
        return frame

    async def close(self) -> None:
        """Let go at once: what the box has not read yet is dropped."""
        self._writer.transport.abort()


async def _next(reader: asyncio.StreamReader) -> dict[str, Any]:
    try:
        line = await reader.readuntil(b"\n")
    except asyncio.IncompleteReadError as error:
        raise SandboxLost("the channel to the box ended") from error
    except asyncio.LimitOverrunError as error:
        raise ProtocolViolation(f"a frame larger than {FRAME_BYTES:,} bytes") from error
    except (ConnectionError, OSError) as error:
        raise SandboxLost("the channel to the box broke") from error
    return load(line)


Open: TypeAlias = Callable[[Sequence[str]], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]
"""Runs a command in a box and gives its standard output and input; the reader's limit is FRAME_BYTES."""


async def channel_over(open_: Open, argv: Sequence[str], after: int, generation: int) -> StreamFrames:
    """A channel to a box that can run a command: `argv` is the program's `attach FOLDER`, a bridge to its socket."""
    reader, writer = await open_(argv)
    return await StreamFrames.attach(reader, writer, after, generation)
