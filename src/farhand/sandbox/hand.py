"""The harness's end of one attached box: send work and files, take frames in order."""

from __future__ import annotations

import asyncio
import base64
import itertools
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from farhand.errors import Fenced, ProtocolViolation, SandboxError, SandboxLost
from farhand.limits import ACK_BYTES, ACK_LATEST_S, FILE_CHUNK_BYTES, FRAMES_UNREAD_BYTES, LISTED_FILES, Limits
from farhand.sandbox.port import Attached, Box, Frame, Frames
from farhand.sandbox.protocol import STREAM


class AlreadyRun(SandboxError):
    """The box was given this action before."""

    code = "already_run"


class BoxEnded(SandboxLost):
    """The box's worker is gone, and its variables with it; its files can still be read."""

    code = "box_ended"


@dataclass(frozen=True, slots=True)
class Entry:
    """A file or folder of the workspace, as the box lists it. `path` is relative and was checked by `listing`."""

    path: str
    kind: str
    size: int
    mtime_ns: int
    ctime_ns: int
    ino: int
    mode: int


@dataclass(frozen=True, slots=True)
class Listing:
    """`left_out` pairs what is not listed with the reason. `complete`: everything there is stands in one of the two."""

    entries: tuple[Entry, ...]
    left_out: tuple[tuple[str, str], ...]
    complete: bool


class Hand:
    """One attached box. Whoever awaits something reads the channel; what is for others is kept for them.

    `frames()` is for one reader at a time. Frames that nobody takes stay in the channel: the box's spool bounds them.
    """

    def __init__(self, box: Box, frames: Frames, generation: int) -> None:
        self._box, self._frames = box, frames
        self.generation = generation
        self._stream: deque[tuple[Frame, int]] = deque()
        self._unread = 0
        self._acknowledged = self._received = 0
        self._ack_later: asyncio.TimerHandle | None = None
        self._ack_sending: asyncio.Task[None] | None = None
        self._answers: dict[str, Frame] = {}
        self._expected: set[str] = set()
        self._refused: deque[Frame] = deque()
        self._reading = False
        self._sleepers: list[asyncio.Future[None]] = []
        self._broken: Exception | None = None
        self._ids = itertools.count(1)
        self.ready: Frame = {}
        """The box's `ready` frame: python, packages. Empty until it has come; an earlier harness may have had it."""

    @classmethod
    async def open(
        cls,
        box: Box,
        *,
        generation: int,
        after: int = 0,
        limits: Limits,
        tools: Sequence[Mapping[str, Any]] = (),
        imports: Sequence[str] | None = None,
        session: str = "",
    ) -> Hand:
        """Attach, and say hello unless an action runs. `after` is the last frame that is in the log.

        The answer to hello is not awaited: frames keep their order, and a refusal comes out of what is asked next.
        """
        hand = cls(box, await box.channel(after, generation), generation)
        try:
            if hand.attached.running is None and not hand.attached.ended:
                await hand.hello(limits, tools, imports, session, wait=False)
        except BaseException:
            await hand.close()
            raise
        return hand

    @property
    def box(self) -> Box:
        return self._box

    @property
    def box_id(self) -> str:
        return self._box.id

    @property
    def attached(self) -> Attached:
        """The box's state when this hand attached."""
        return self._frames.attached

    async def hello(
        self,
        limits: Limits,
        tools: Sequence[Mapping[str, Any]],
        imports: Sequence[str] | None,
        session: str,
        wait: bool = True,
    ) -> None:
        """Set limits, tools and imports from the next action on."""
        if wait:
            self._expected.add("ready")
        listed = None if imports is None else list(imports)
        stubs = [dict(tool) for tool in tools]
        hello = {"t": "hello", "limits": asdict(limits), "imports": listed, "tools": stubs, "session": session}
        await self._send(hello)
        if wait:
            await self._answer("ready")

    async def run(self, action: str, code: str, title: str) -> None:
        """Start an action. A refusal comes out of `frames()`: AlreadyRun, BoxEnded or SandboxError."""
        await self._send({"t": "run", "action": action, "code": code, "title": title})

    async def frames(self) -> AsyncIterator[Frame]:
        """Frames of the stream, each once and in order, up to and including the `done` of the running action."""
        while True:
            frame = await self.next_frame()
            yield frame
            if frame["t"] == "done":
                return

    async def next_frame(self) -> Frame:
        await self._until(lambda: bool(self._stream or self._refused))
        if self._refused:
            raise _refusal(self._refused.popleft())
        frame, weight = self._stream.popleft()
        self._unread -= weight
        return frame

    async def reply(self, call: str, value: Any) -> None:
        """Answer a call with a tagged value. A second answer to one call is ignored by the box."""
        await self._send({"t": "reply", "call": call, "ok": True, "value": value})

    async def reply_error(self, call: str, type: str, message: str, hint: str = "") -> None:
        error = {"type": type, "message": message, "hint": hint}
        await self._send({"t": "reply", "call": call, "ok": False, "error": error})

    async def ack(self, n: int) -> None:
        """What the frames up to n say is in the log. Goes with the next frame that is sent, or alone when there is none
        for ACK_LATEST_S, or at once when much has come since the last."""
        self._acknowledged = n
        if self._received >= ACK_BYTES:
            await self._send()
        elif self._ack_later is None:
            self._ack_later = asyncio.get_running_loop().call_later(ACK_LATEST_S, self._send_ack)

    def _send_ack(self) -> None:
        self._ack_later = None
        if self._acknowledged and self._broken is None:
            self._ack_sending = asyncio.ensure_future(self._send_quietly())

    async def _send_quietly(self) -> None:
        try:
            await self._send()
        except (SandboxError, Fenced):
            return  # whoever reads finds out

    async def _send(self, *frames: Frame) -> None:
        """Send frames, and what is acknowledged behind them: the box has their work to do first."""
        if self._acknowledged:
            frames = (*frames, {"t": "ack", "n": self._acknowledged})
            self._acknowledged = self._received = 0
        if frames:
            await self._frames.send(*frames)

    async def interrupt(self, action: str, reason: str, grace_s: float) -> None:
        """SIGINT now, SIGKILL after the grace; `done` tells which it was. `reason` is "interrupt" or "cancel"."""
        await self._send({"t": "interrupt", "action": action, "reason": reason, "grace_s": grace_s})

    async def ping(self) -> None:
        await self._ask({"t": "ping"})

    async def listing(self) -> Listing:
        """The files of the workspace."""
        entries: list[Entry] = []
        left_out: list[tuple[str, str]] = []
        cursor = 0
        while True:
            frame = await self._ask({"t": "take", "path": None, "offset": cursor})
            if not frame["ok"]:
                raise SandboxError(f"the box cannot list its files: {str(frame.get('error'))[:500]}")
            for found in _dicts(frame.get("left_out")):
                left_out.append((str(found.get("path"))[:4096], str(found.get("reason"))[:200]))
            for found in _dicts(frame.get("entries")):
                entry = _entry(found)
                if entry is not None:
                    entries.append(entry)
                else:
                    left_out.append((_printable(found.get("path")), "its name cannot be kept"))
            more = frame.get("more")
            if more is None:
                return Listing(tuple(entries), tuple(left_out), True)
            if type(more) is not int or more <= cursor or len(entries) > LISTED_FILES:
                return Listing(tuple(entries), tuple(left_out), False)
            cursor = more

    async def read_file(self, path: str, sink: Callable[[bytes], None], most: int | None = None) -> int:
        """Give a file's content to `sink` in chunks; its length. SandboxError when it cannot be read or is too long."""
        offset = 0
        while True:
            frame = await self._ask({"t": "take", "path": path, "offset": offset})
            if not frame["ok"]:
                raise SandboxError(f"{path[:200]} cannot be read: {str(frame.get('error'))[:500]}")
            data = _decoded(frame.get("data"))
            offset += len(data)
            if most is not None and offset > most:
                raise SandboxError(f"{path[:200]} is larger than {most:,} bytes")
            sink(data)
            if frame.get("eof") is True:
                return offset
            if not data:
                raise ProtocolViolation("an empty chunk that is not the end of its file")

    async def write_file(self, path: str, data: bytes, mode: int = 0o644) -> None:
        """Write a whole file; it appears with its last chunk."""
        offset = 0
        while True:
            chunk = data[offset : offset + FILE_CHUNK_BYTES]
            offset += len(chunk)
            await self.write_chunk(path, offset - len(chunk), chunk, mode, offset >= len(data))
            if offset >= len(data):
                return

    async def write_chunk(self, path: str, offset: int, data: bytes, mode: int, last: bool) -> None:
        """One chunk of a file, in order from offset 0, of at most FILE_CHUNK_BYTES."""
        text = base64.b64encode(data).decode("ascii")
        put = {"t": "put", "path": path, "offset": offset, "data": text, "mode": mode, "last": last}
        frame = await self._ask(put)
        if not frame["ok"]:
            raise SandboxError(f"{path[:200]} cannot be written: {str(frame.get('error'))[:500]}")

    async def close(self) -> None:
        if self._ack_later is not None:
            self._ack_later.cancel()
        if self._broken is None:
            try:
                await self._send()
            except (SandboxError, Fenced):
                pass
            self._broken = SandboxLost("this hand is closed")
        self._wake()
        await self._frames.close()

    # --- who waits, reads ---

    async def _ask(self, frame: Frame) -> Frame:
        asked = f"q{next(self._ids)}"
        self._expected.add(asked)
        try:
            await self._send({**frame, "id": asked})
            return await self._answer(asked)
        finally:
            self._expected.discard(asked)

    async def _answer(self, asked: str) -> Frame:
        await self._until(lambda: asked in self._answers)
        self._expected.discard(asked)
        frame = self._answers.pop(asked)
        if frame["t"] == "refused":
            raise _refusal(frame)
        return frame

    async def _until(self, there: Callable[[], bool]) -> None:
        """Read, or sleep while somebody else reads, until `there()`."""
        while not there():
            if self._broken is not None:
                raise self._broken
            if self._reading:
                sleeper: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                self._sleepers.append(sleeper)
                await sleeper
                continue
            self._reading = True
            try:
                self._route(await self._frames.receive())
            except (SandboxError, Fenced) as error:
                self._broken = self._broken or error
                raise
            finally:
                self._reading = False
                self._wake()

    def _wake(self) -> None:
        sleepers, self._sleepers = self._sleepers, []
        for sleeper in sleepers:
            if not sleeper.done():
                sleeper.set_result(None)

    def _route(self, frame: Frame) -> None:
        kind = frame["t"]
        if kind in STREAM:
            weight = _weight(frame)
            self._unread += weight
            self._received += weight
            if self._unread > FRAMES_UNREAD_BYTES:
                raise ProtocolViolation("the box sent more frames than its spool may hold")
            self._stream.append((frame, weight))
            return
        asked = "ready" if kind == "ready" else frame.get("id")
        if kind == "ready":
            self.ready = frame
        if kind == "refused":
            if frame["code"] == "fenced":
                raise Fenced(f"the box obeys a newer generation: {frame['message'][:200]}")
            if frame.get("re") == "hello":
                asked = "ready"
        if isinstance(asked, str) and asked in self._expected:
            self._answers[asked] = frame
        elif kind == "refused":
            self._refused.append(frame)


def _refusal(frame: Frame) -> Exception:
    code, message = frame["code"], frame["message"][:500]
    if code == "already_run":
        return AlreadyRun(message)
    if code == "ended":
        return BoxEnded(message)
    if code == "malformed":
        return ProtocolViolation(f"the box refused a {str(frame.get('re'))[:40]} frame: {message}")
    return SandboxError(f"the box refused a {str(frame.get('re'))[:40]} frame ({code[:40]}): {message}")


def _weight(frame: Frame) -> int:
    """About the bytes that a frame occupies."""
    size = 200
    for found in frame.values():
        if isinstance(found, str):
            size += len(found)
        elif isinstance(found, dict):
            size += sum(len(text) for text in found.values() if isinstance(text, str))
    return size


def _dicts(found: Any) -> list[dict[str, Any]]:
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def _entry(found: dict[str, Any]) -> Entry | None:
    """An entry whose path is safe to use below a folder and whose numbers are numbers; else None."""
    path, kind = found.get("path"), found.get("kind")
    numbers = [found.get(name) for name in ("size", "mtime_ns", "ctime_ns", "ino", "mode")]
    if not isinstance(path, str) or kind not in ("file", "folder") or not safe_path(path):
        return None
    whole = [number for number in numbers if isinstance(number, int) and -(1 << 63) <= number < 1 << 64]
    return Entry(path, kind, *whole) if len(whole) == len(numbers) else None


def safe_path(path: str) -> bool:
    """Whether a path from a box is relative, climbs nowhere, is UTF-8 and has no control characters."""
    if not path or len(path) > 4096 or not path.isprintable():
        return False
    return all(part not in ("", ".", "..") and len(part.encode("utf-8")) <= 255 for part in path.split("/"))


def _printable(path: Any) -> str:
    return ascii(path)[:500]


def _decoded(text: Any) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (ValueError, TypeError) as error:
        raise ProtocolViolation("a chunk of a file that is no base64") from error
