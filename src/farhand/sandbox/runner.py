"""The program in a box: a supervisor that never runs guest code, and a worker that runs it (docs/protocol.md).

One file, standard library only, Python 3.9 and newer. It is sent into boxes as text, joined to `farhand_value`
(`sandbox/program.py`); the host of the local jail imports it and plays the supervisor outside the wall. It is long
because it travels alone; its parts in order: frames, reactor, files, supervisor, worker (channel, what the guest sees,
rich values, errors, running code), and the two roles in a box that has no host.

What a worker sends is guest-controlled. The supervisor never waits for it, never unpickles, and bounds what it keeps.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import ast
import base64
import builtins
import codecs
import errno
import fcntl
import functools
import gc
import heapq
import io
import itertools
import json
import linecache
import os
import re
import select
import signal
import socket
import stat
import sys
import termios
import threading
import time
import traceback
import types
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from importlib.machinery import PathFinder
from typing import Any, Callable, NamedTuple, NoReturn, Protocol

if "farhand_value" in sys.modules:
    value = sys.modules["farhand_value"]
else:
    from farhand import value

VERSION = 1
KIB = 1024
# The first four stand in limits.py too.
FRAME_BYTES = 1024 * KIB
SPOOL_BYTES = 4096 * KIB
OUT_CHUNK_BYTES = 32 * KIB
FILE_CHUNK_BYTES = 256 * KIB
CALLS_WAITING = 1000
WORKER_FRAME_BYTES = FRAME_BYTES - 4 * KIB  # leaves room for what the supervisor adds
DEPTH = 200
RAN_KEPT = 1000
NAMES_KEPT = 500
NAME_CHARS = 100
ANSWERS = 100
BUNDLE_TYPES = 20
READ_BYTES = 64 * KIB
LINES_PER_STEP = 200  # worker frames handled before other boxes get their turn
PIPE_SMALL_BYTES = 4 * KIB
PIPE_REST_S = 0.002
IDLE_OUT_BYTES = 64 * KIB  # written while no action runs; then the pipes are left full and the writer waits
DOWN_BYTES = 1024 * KIB  # unread by the worker: no more of its frames are taken
DOWN_LIMIT_BYTES = 16 * 1024 * KIB  # unread by the worker: no more of the harness's frames are taken
DOWN_STALL_S = 1.0  # and it reads nothing for that long: it is ended
ANSWERS_BYTES = 4096 * KIB  # unread by the harness
FILES_LISTED = 100_000
FOLDER_DEPTH = 100
LISTING_ENTRIES = 2000
LISTING_BYTES = 256 * KIB
LEFT_OUT_NAMED = 100
TICK_SAMPLED_S = 0.02
TICK_S = 0.1
IDLE_SHARE = 0.1  # of a processor: below it a box that waits for a reply runs no code
LIMIT_GRACE_S = 0.25
GRACE_MAX_S = 60.0
KILL_WAIT_S = 0.1
EOF_WAIT_S = 0.05
ATTACH_S = 10.0
CONNECTIONS = 8
TEXT_BYTES = 256 * KIB  # of a value's text
BUNDLE_BYTES = 640 * KIB
TRACEBACK_CHARS = 16 * KIB
MESSAGE_CHARS = 4 * KIB
REPR_CHARS = 16 * KIB
SOURCES_KEPT = 500
ORPHAN_S = 3600.0
REHEARSALS = 12
LOOK_S = 5.0  # between two looks at whether anybody can still want the box


# ---- frames ----


class FrameError(ValueError):
    """A line that is no frame of the protocol."""


_NOT_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"')


def _too_deep(line: bytes) -> bool:
    """Whether brackets nest deeper than DEPTH, before a parser recurses into them."""
    brackets = line.translate(None, _NOT_BRACKETS)
    if len(brackets) <= DEPTH:
        return False
    for _ in range(8):
        brackets = brackets.replace(b"[]", b"").replace(b"{}", b"")
        if not brackets:
            return False
    depth = 0
    for byte in _STRING.sub(b"", line).translate(None, _NOT_BRACKETS):
        depth += 1 if byte in b"[{" else -1
        if depth > DEPTH:
            return True
    return False


def _no_constant(text: str) -> NoReturn:
    raise FrameError(f"{text} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if number - number != 0.0:
        raise FrameError("a number beyond a float")
    return number


def _bounded_int(text: str) -> int:
    if len(text) > 4300:
        raise FrameError("an integer of too many digits")
    return int(text)


_PARSE: dict[str, Any] = {"parse_constant": _no_constant, "parse_float": _finite}
if not hasattr(sys, "get_int_max_str_digits"):
    _PARSE["parse_int"] = _bounded_int


_DECODE = json.JSONDecoder(**_PARSE).decode
_ENCODE = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


def _decode(text: str) -> Any:
    """Half a million nested lists fit a frame. They hold no cycles, and looking for some while they pile up would take
    ten times as long as all of the parsing."""
    if len(text) < 16 * KIB or not gc.isenabled():
        return _DECODE(text)
    gc.disable()
    try:
        return _DECODE(text)
    finally:
        gc.enable()


def parse_frame(line: bytes) -> dict[str, Any]:
    """The object of one line. FrameError when it is too large, no ASCII JSON, nested too deep, holds NaN, infinities or
    half a surrogate pair, or has no type."""
    if len(line) > FRAME_BYTES:
        raise FrameError(f"a frame larger than {FRAME_BYTES:,} bytes")
    if _too_deep(line):
        raise FrameError(f"a frame nested deeper than {DEPTH}")
    try:
        text = line.decode("ascii")
        frame = _decode(text)
        if "\\ud" in text or "\\uD" in text:
            json.dumps(frame, ensure_ascii=False).encode("utf-8")
    except FrameError:
        raise
    except UnicodeEncodeError:
        raise FrameError("half a surrogate pair in a text") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise FrameError(f"a line that is no frame: {str(error)[:200]}") from None
    if not isinstance(frame, dict) or not isinstance(frame.get("t"), str):
        raise FrameError("a line that is no object with a type")
    return frame


def dump_frame(frame: dict[str, Any], limit: int = FRAME_BYTES) -> bytes:
    """One line. FrameError when it is larger than `limit` or holds what is no JSON."""
    try:
        line = _ENCODE(frame).encode("ascii") + b"\n"
    except (ValueError, TypeError, RecursionError) as error:
        raise FrameError(f"this frame cannot be sent: {str(error)[:200]}") from None
    if len(line) > limit:
        raise FrameError(f"a {frame.get('t')} frame of {len(line):,} bytes; at most {limit:,} can be sent")
    return line


class Lines:
    """Bytes of a stream, taken out line by line."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._scanned = 0

    def feed(self, data: bytes) -> None:
        self._data += data

    def take(self) -> bytes | None:
        """The next whole line, or None. FrameError when a line does not end within a frame's size."""
        end = self._data.find(b"\n", self._scanned)
        if end < 0:
            self._scanned = len(self._data)
            if self._scanned >= FRAME_BYTES:
                raise FrameError("a line that does not end")
            return None
        line = bytes(self._data[: end + 1])
        del self._data[: end + 1]
        self._scanned = 0
        return line


def _text(frame: dict[str, Any], name: str, most: int = FRAME_BYTES) -> str:
    found = frame.get(name)
    if not isinstance(found, str) or len(found) > most:
        raise FrameError(f"a {frame['t']} frame whose {name!r} is no text of at most {most:,} characters")
    return found


def _whole(frame: dict[str, Any], name: str) -> int:
    found = frame.get(name)
    if type(found) is not int or not 0 <= found < 1 << 53:
        raise FrameError(f"a {frame['t']} frame whose {name!r} is no number")
    return found


# ---- reactor ----

READ = select.POLLIN
WRITE = select.POLLOUT


class Timer:
    """A callback that is due at a time of the monotonic clock."""

    __slots__ = ("callback", "due")

    def __init__(self, due: float, callback: Callable[[], None]) -> None:
        self.due = due
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self.callback = None


class Reactor:
    """One thread's loop over file descriptors and timers. Not thread-safe. A callback that raises ends `run`."""

    def __init__(self) -> None:
        self._poll = select.epoll()
        self._watched: dict[int, tuple[int, Callable[[int], None]]] = {}
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._soon: deque[Callable[[], None]] = deque()
        self._stopped = False

    def watch(self, fd: int, mask: int, callback: Callable[[int], None]) -> None:
        """Call `callback(ready mask)` when `fd` is ready. Mask 0 ends it; do that before the descriptor is closed.

        A peer that hung up counts as readable, or as writable for a descriptor that is watched for that alone.
        """
        known = self._watched.get(fd)
        if known is None:
            if mask:
                self._poll.register(fd, mask)
                self._watched[fd] = (mask, callback)
        elif not mask:
            del self._watched[fd]
            self._poll.unregister(fd)
        elif known[0] != mask or known[1] != callback:
            self._poll.modify(fd, mask)
            self._watched[fd] = (mask, callback)

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Timer:
        timer = Timer(time.monotonic() + delay_s, callback)
        heapq.heappush(self._timers, (timer.due, next(self._order), timer))
        return timer

    def call_soon(self, callback: Callable[[], None]) -> None:
        self._soon.append(callback)

    def run(self) -> None:
        self._stopped = False
        while not self._stopped:
            self.step()

    def stop(self) -> None:
        self._stopped = True

    def step(self, timeout_s: float | None = None) -> None:
        """Wait for the next thing that is due, at most `timeout_s`, and do all that is due now. Descriptors come before
        timers: what arrived while this process was stopped is seen before a deadline acts."""
        timers = self._timers
        while timers and timers[0][2].callback is None:
            heapq.heappop(timers)
        if self._soon:
            timeout_s = 0.0
        elif timers:
            until = max(0.0, timers[0][0] - time.monotonic())
            timeout_s = until if timeout_s is None else min(until, timeout_s)
        for fd, ready in self._poll.poll(timeout_s):
            watched = self._watched.get(fd)
            if watched is not None:
                mask, callback = watched
                callback(ready & mask or mask & READ or mask)
        for _ in range(len(self._soon)):
            self._soon.popleft()()
        now = time.monotonic()
        while timers and timers[0][0] <= now:
            due = heapq.heappop(timers)[2].callback
            if due is not None:
                due()

    def close(self) -> None:
        self._poll.close()


# ---- files ----


class Batch(NamedTuple):
    """A stretch of a listing: entries as in a `files` frame, and what is not listed with the reason."""

    entries: list[dict[str, Any]]
    left_out: list[dict[str, str]]


class Files(Protocol):
    """Access to a box's /workspace. Every method returns soon; OSError or FrameError says why something cannot be."""

    def walk(self) -> Generator[Batch, None, None]: ...

    def read(self, path: str, offset: int, size: int) -> tuple[bytes, bool]: ...

    def write(self, path: str, offset: int, data: bytes, mode: int, last: bool) -> None: ...


class _NoGuard:
    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


_KINDS = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "folder",
    stat.S_IFLNK: "link",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
}
_OPEN = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY


class DirectoryFiles:
    """`Files` below an open folder that somebody hostile may be changing.

    Every component of a path is opened by itself, relative to the one before, without following links and without
    waiting; `..` is refused. So nothing outside is reached, whatever is renamed meanwhile, and a FIFO stops nobody.
    `guard` makes a context around the system calls (a host that is root takes on the box's user there).
    """

    def __init__(self, root_fd: int, guard: Callable[[], Any] = _NoGuard) -> None:
        self._root = root_fd
        self._guard = guard

    def _folder(self, parts: Sequence[str], make: bool = False) -> int:
        """An open descriptor of the folder; the caller closes it."""
        fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._root)
        for part in parts:
            try:
                if make:
                    try:
                        os.mkdir(part, 0o755, dir_fd=fd)
                    except FileExistsError:
                        pass
                inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | _OPEN, dir_fd=fd)
            finally:
                os.close(fd)
            fd = inner
        return fd

    def walk(self) -> Generator[Batch, None, None]:
        """All files and folders, in batches. Links, FIFOs and sockets are left out, and so is what lies too deep."""
        waiting: list[tuple[str, ...]] = [()]
        count = 0
        while waiting:
            parts = waiting.pop()
            try:
                with self._guard():
                    fd = self._folder(parts)
            except OSError as error:
                yield Batch([], [{"path": _shown("/".join(parts)), "reason": error.strerror or "cannot be opened"}])
                continue
            try:
                for batch in self._listed(fd, parts, waiting):
                    count += len(batch.entries)
                    if count > FILES_LISTED:
                        reason = f"more than {FILES_LISTED:,} files"
                        yield Batch([], [{"path": _shown("/".join(parts)), "reason": reason}])
                        return
                    yield batch
            finally:
                os.close(fd)

    def _listed(self, fd: int, parts: tuple[str, ...], waiting: list[tuple[str, ...]]) -> Iterator[Batch]:
        with self._guard():
            names = os.scandir(fd)
        with names:
            while True:
                batch = Batch([], [])
                with self._guard():
                    some = list(itertools.islice(names, 256))
                    for found in some:
                        self._add(found, parts, batch, waiting)
                if not some:
                    return
                yield batch

    def _add(
        self, found: os.DirEntry[str], parts: tuple[str, ...], batch: Batch, waiting: list[tuple[str, ...]]
    ) -> None:
        path = "/".join((*parts, found.name))
        try:
            path.encode("utf-8")
            status = found.stat(follow_symlinks=False)
        except UnicodeEncodeError:
            batch.left_out.append({"path": _shown(path), "reason": "its name is not UTF-8"})
            return
        except OSError:
            return  # it is gone again
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "other")
        if kind not in ("file", "folder"):
            reason = {"link": "a symbolic link", "fifo": "a FIFO", "socket": "a socket"}.get(kind, "no regular file")
            batch.left_out.append({"path": path, "reason": reason})
            return
        if kind == "folder":
            if len(parts) >= FOLDER_DEPTH:
                batch.left_out.append({"path": path, "reason": f"deeper than {FOLDER_DEPTH} folders"})
                return
            waiting.append((*parts, found.name))
        batch.entries.append(
            {
                "path": path,
                "kind": kind,
                "size": status.st_size,
                "mtime_ns": status.st_mtime_ns,
                "ctime_ns": status.st_ctime_ns,
                "ino": status.st_ino,
                "mode": stat.S_IMODE(status.st_mode) & 0o777,
            }
        )

    def read(self, path: str, offset: int, size: int) -> tuple[bytes, bool]:
        """At most `size` bytes from `offset`, and whether the file ends there."""
        *parts, name = _parts(path)
        with self._guard():
            folder = self._folder(parts)
            try:
                fd = _open_regular(name, os.O_RDONLY, folder)
            finally:
                os.close(folder)
            try:
                data = os.pread(fd, size, offset)
                return data, len(data) < size and not os.pread(fd, 1, offset + len(data))
            finally:
                os.close(fd)

    def write(self, path: str, offset: int, data: bytes, mode: int, last: bool) -> None:
        """A chunk of a file, in order from 0. The file appears under its name with the last chunk."""
        *parts, name = _parts(path)
        partial = _partial(name)
        with self._guard():
            folder = self._folder(parts, make=True)
            try:
                if offset == 0:
                    self._remove(partial, folder)
                    fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _OPEN, 0o600, dir_fd=folder)
                else:
                    fd = _open_regular(partial, os.O_WRONLY, folder)
                try:
                    _write_all(fd, data, offset)
                    if last:
                        os.fchmod(fd, mode & 0o777)
                finally:
                    os.close(fd)
                if last:
                    os.rename(partial, name, src_dir_fd=folder, dst_dir_fd=folder)
            finally:
                os.close(folder)

    def discard(self, path: str) -> None:
        """Remove the chunks of a file whose last one did not come."""
        *parts, name = _parts(path)
        self.remove("/".join((*parts, _partial(name))))

    def make_folder(self, path: str) -> None:
        with self._guard():
            os.close(self._folder(_parts(path), make=True))

    def remove(self, path: str) -> None:
        """Remove a file, link or empty folder; one that is not there is no error."""
        *parts, name = _parts(path)
        with self._guard():
            try:
                folder = self._folder(parts)
            except (FileNotFoundError, NotADirectoryError):
                return
            try:
                self._remove(name, folder)
            finally:
                os.close(folder)

    @staticmethod
    def _remove(name: str, folder: int) -> None:
        try:
            os.unlink(name, dir_fd=folder)
        except FileNotFoundError:
            pass
        except (IsADirectoryError, PermissionError):
            os.rmdir(name, dir_fd=folder)


def _parts(path: str) -> list[str]:
    """The components of a relative path. FrameError for one that is absolute, empty or climbs."""
    parts = path.split("/")
    if not path or len(path) > 4096 or len(parts) > FOLDER_DEPTH + 1:
        raise FrameError("a path that is empty or too long")
    if "\0" in path or any(part in ("", ".", "..") for part in parts):
        raise FrameError(f"{_shown(path)[:200]!r} is no path below the workspace")
    return parts


def _partial(name: str) -> str:
    return f".{name[:50]}.partial"


def _open_regular(name: str, flags: int, folder: int) -> int:
    fd = os.open(name, flags | _OPEN, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "no regular file")
    return fd


def _write_all(fd: int, data: bytes, offset: int) -> None:
    rest = memoryview(data)
    while rest:
        written = os.pwrite(fd, rest, offset)
        rest, offset = rest[written:], offset + written


def _shown(name: str) -> str:
    return name.encode("utf-8", "backslashreplace").decode("utf-8")


# ---- supervisor ----


class Usage(NamedTuple):
    """What all processes of a box use: memory now, processor seconds since the box began, processes and threads."""

    memory_bytes: int
    cpu_s: float
    processes: int


class Hands(Protocol):
    """What a supervisor can do to the processes of its box. No method may wait for them."""

    @property
    def sampling(self) -> bool:
        """Whether memory and processes are bounded by `usage` alone: it is then read every 20 ms, else every 100 ms."""
        ...

    def interrupt(self) -> None:
        """SIGINT to the worker."""
        ...

    def kill(self) -> None:
        """SIGKILL to every process of the box. Whoever reaps the worker then calls `Supervisor.ended`."""
        ...

    def usage(self) -> Usage | None: ...

    def apply(self, limits: dict[str, Any]) -> None:
        """New limits from `hello`: memory_bytes, processes, … as far as this kind of box can set them from outside."""
        ...

    def suspend(self) -> None:
        """Stop every process of the box. Nothing happens to the supervisor."""
        ...

    def resume(self) -> None: ...

    def files(self) -> Files: ...


class _Stop(NamedTuple):
    kind: str
    limit: str | None
    message: str


class _Run:
    """One action while it runs."""

    def __init__(self, action: str) -> None:
        self.action = action
        self.started = self.sampled = time.monotonic()
        self.wall_s = self.cpu_start = self.cpu_s = 0.0
        self.peak = 0
        self.out_bytes = self.out_cut = 0
        self.displays = self.displays_cut = self.answers = self.answers_cut = self.calls = 0
        self.stop: _Stop | None = None
        self.tick: Timer | None = None

    def begin(self, usage: Usage | None) -> None:
        if usage is not None:
            self.cpu_start = self.cpu_s = usage.cpu_s
            self.peak = usage.memory_bytes


class _Pipe:
    """One of the worker's two output pipes."""

    def __init__(self, fd: int, stream: str, relay: Callable[[_Pipe], None]) -> None:
        os.set_blocking(fd, False)
        self.ready: Callable[[int], None] = lambda mask: relay(self)
        self.fd = fd
        self.stream = stream
        self.decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        self.held: Timer | None = None


class _Spool:
    """Numbered frames that are not acknowledged yet."""

    def __init__(self) -> None:
        self.first, self.last, self.size = 1, 0, 0
        self._lines: dict[int, bytes] = {}

    @property
    def room(self) -> bool:
        return self.size < SPOOL_BYTES

    def add(self, frame: dict[str, Any]) -> None:
        line = dump_frame({**frame, "n": self.last + 1})
        self.last += 1
        self._lines[self.last] = line
        self.size += len(line)

    def drop(self, through: int) -> None:
        for n in range(self.first, min(through, self.last) + 1):
            self.size -= len(self._lines.pop(n))
            self.first = n + 1

    def batch(self, after: int) -> tuple[bytes, int]:
        """Lines from `after` on, about READ_BYTES of them, and the last one's number."""
        lines: list[bytes] = []
        size = 0
        while after < self.last and size < READ_BYTES:
            after += 1
            lines.append(self._lines[after])
            size += len(lines[-1])
        return b"".join(lines), after


class _Connection:
    """One connected harness. It belongs to the supervisor once it has attached."""

    def __init__(self, supervisor: Supervisor, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._supervisor = supervisor
        self._reactor = supervisor.reactor
        self._sock = sock
        self._lines = Lines()
        self._out = memoryview(b"")
        self._answers: deque[bytes] = deque()
        self._answers_size = 0
        self._busy = False
        self.generation: int | None = None
        self.sent = 0
        self.closed = self._closing = False
        self._patience: Timer | None = self._reactor.call_later(ATTACH_S, self.close)
        self._mask()

    def attach(self, generation: int, after: int) -> None:
        self.generation, self.sent = generation, after
        if self._patience is not None:
            self._patience.cancel()

    def answer(self, frame: dict[str, Any]) -> None:
        if not self.closed:
            line = dump_frame(frame)
            self._answers.append(line)
            self._answers_size += len(line)
            self.flush()

    def flush(self) -> None:
        """Send what can be sent: answers first, then spooled frames."""
        try:
            while not self.closed and (self._out or self._refill()):
                self._out = self._out[self._sock.send(self._out) :]
        except BlockingIOError:
            pass
        except OSError:
            self.close()
        if self._closing and not self._out and not self._answers:
            self.close()
        self._mask()

    def _refill(self) -> bool:
        if self._answers:
            line = self._answers.popleft()
            self._answers_size -= len(line)
            self._out = memoryview(line)
        elif self.generation is not None and not self._closing:
            lines, self.sent = self._supervisor.spool.batch(self.sent)
            self._out = memoryview(lines)
        return bool(self._out)

    def _mask(self) -> None:
        if self.closed:
            return
        slow = self._answers_size > ANSWERS_BYTES or self._closing or self._busy or self._supervisor.congested
        self._reactor.watch(self._sock.fileno(), (0 if slow else READ) | (WRITE if self._out else 0), self._ready)

    def _ready(self, mask: int) -> None:
        if mask & WRITE:
            self.flush()
        if mask & READ and not self.closed:
            self._receive()

    def _receive(self) -> None:
        try:
            data = self._sock.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            return
        self._lines.feed(data)
        self._take()

    def _take(self) -> None:
        """Handle whole lines, as many as fit one step; the rest waits for the next, and nothing is read till then."""
        self._busy = False
        for _ in range(LINES_PER_STEP):
            if self.closed or self._closing:
                return
            try:
                line = self._lines.take()
                if line is None:
                    break
                self._supervisor.take(self, parse_frame(line))
            except (FrameError, TypeError, ValueError, KeyError) as error:
                self.refuse("malformed", str(error)[:MESSAGE_CHARS], {})
        else:
            self._busy = True
            self._reactor.call_soon(self._take)
        self._mask()

    def take_rest(self) -> None:
        """Look again whether frames may be read: the worker has taken some of what waited for it."""
        self._mask()

    def refuse(self, code: str, message: str, frame: dict[str, Any]) -> None:
        told = _only(frame, "id", "action", "call")
        self.answer({"t": "refused", "code": code, "message": message, "re": frame.get("t"), **told})
        if code in ("fenced", "malformed"):
            self._closing = True
            self.flush()

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        if self._patience is not None:
            self._patience.cancel()
        self._reactor.watch(self._sock.fileno(), 0, self._ready)
        self._sock.close()
        self._supervisor.disconnected(self)


class Supervisor:
    """One box's supervisor. Many can share a reactor. It owns the descriptors it is given and never waits for anything.

    `frame_sock` is one end of a stream socket pair to the worker, `stdout_fd` and `stderr_fd` are the read ends of its
    pipes. `packages` are the environment's, for `ready`, and so is `python`, its version: whoever knows it spares the
    harness the wait until the worker has heard hello. Whoever reaps the worker calls `ended`; `connect` hands over a
    harness's connection.
    """

    def __init__(
        self,
        reactor: Reactor,
        hands: Hands,
        frame_sock: socket.socket,
        stdout_fd: int,
        stderr_fd: int,
        packages: dict[str, str] | None = None,
        python: str = "",
    ) -> None:
        frame_sock.setblocking(False)
        self.reactor = reactor
        self.hands = hands
        self.spool = _Spool()
        self.generation = 0
        self.suspended = False
        self.used = time.monotonic()
        """When a harness last said something."""
        self._sock: socket.socket | None = frame_sock
        self._lines = Lines()
        self._pipes = [_Pipe(stdout_fd, "stdout", self._relay), _Pipe(stderr_fd, "stderr", self._relay)]
        self._packages = packages or {}
        self._python = python
        self._connections: list[_Connection] = []
        self._harness: _Connection | None = None
        self._limits: dict[str, Any] = {}
        self._tools: list[str] = []
        self._hello = self._ready = False
        self._ran: deque[str] = deque(maxlen=RAN_KEPT)
        self._run: _Run | None = None
        self._last_call = self._interrupts = 0
        self._waiting: dict[str, None] = {}
        self._down: deque[memoryview] = deque()
        self._down_size = 0
        self._stall: Timer | None = None
        self._idle_out = 0
        self._idle_cut = 0
        self._names: list[str] = []
        self._listing: _Listing | None = None
        self._busy = False
        self._broken: str | None = None
        self._end: str | None = None
        self._closed = False
        self._watch_worker()
        self._watch_pipes()

    # -- what the owner asks --

    @property
    def running(self) -> str | None:
        """The action that runs."""
        return self._run.action if self._run else None

    @property
    def connected(self) -> bool:
        return self._harness is not None

    @property
    def dead(self) -> str | None:
        """Why the worker is gone, if it is."""
        return self._end

    @property
    def congested(self) -> bool:
        return self._down_size > DOWN_LIMIT_BYTES

    def connect(self, sock: socket.socket, data: bytes = b"") -> None:
        """Take over a connected stream socket whose first frame is to be `attach`; `data` was read from it already."""
        if self._closed or len(self._connections) >= CONNECTIONS:
            sock.close()
            return
        connection = _Connection(self, sock)
        self._connections.append(connection)
        if data:
            connection._lines.feed(data)
            connection._take()

    def suspend(self) -> None:
        if not self.suspended:
            self._sample()
            self.suspended = True
            self.hands.suspend()

    def resume(self) -> None:
        if self.suspended:
            self.hands.resume()
            self.suspended = False
            if self._run is not None:
                self._run.sampled = time.monotonic()

    def ended(self, status: int, limit: str | None = None) -> None:
        """The worker's process is gone: exit code, or minus the signal. `limit` names the bound that ended it."""
        if self._end is not None:
            return
        if status < 0:
            text = f"the worker was ended by signal {-status} ({_signal_name(-status)})"
        else:
            text = f"the worker's process ended with exit code {status}"
        if self._broken is None:
            self._safely(self._take_last)
        self._end = self._broken or text
        self.hands.kill()
        self._waiting.clear()
        run = self._run
        if run is not None:
            self._finish_dead(run, status, limit, text)
        self._drop_worker()

    def close(self) -> None:
        """Let go of all descriptors. The box's processes are the owner's business."""
        self._closed = True
        self._cancel_run()
        for connection in list(self._connections):
            connection.close()
        self._drop_worker()
        if self._listing is not None:
            self._listing.cancelled = True

    # -- frames of the harness --

    def take(self, connection: _Connection, frame: dict[str, Any]) -> None:
        """One frame of a harness."""
        if connection.closed:
            return
        if frame["t"] == "attach":
            self._attach(connection, frame)
            return
        if connection.generation is None:
            connection.refuse("malformed", "the first frame has to be attach", frame)
            return
        generation = _whole(frame, "gen")
        if generation < self.generation:
            connection.refuse("fenced", f"generation {self.generation} drives this box", frame)
            return
        self.generation = generation
        self.used = time.monotonic()
        handler = _HANDLERS.get(frame["t"])
        if handler is None:
            connection.refuse("unsupported", f"no frame of the type {frame['t'][:80]!r} is known", frame)
        else:
            handler(self, connection, frame)

    def _attach(self, connection: _Connection, frame: dict[str, Any]) -> None:
        generation, after = _whole(frame, "gen"), _whole(frame, "after")
        if generation < self.generation:
            connection.refuse("fenced", f"generation {self.generation} drives this box", frame)
            return
        if not self.spool.first - 1 <= after <= self.spool.last:
            text = f"frames after {self.spool.first - 1} up to {self.spool.last} are kept; {after} is none of them"
            connection.refuse("malformed", text, frame)
            return
        self.generation = generation
        self.used = time.monotonic()
        older, self._harness = self._harness, connection
        if older is not None and older is not connection:
            older.close()
        connection.attach(generation, after)
        connection.answer(
            {
                "t": "attached",
                "v": VERSION,
                "running": self.running,
                "last": self.spool.last,
                "waiting": list(self._waiting),
                "ran": list(self._ran),
                "ready": self._ready,
                "ended": self._end is not None,
            }
        )

    def disconnected(self, connection: _Connection) -> None:
        if connection in self._connections:
            self._connections.remove(connection)
        if self._harness is connection:
            self._harness = None

    def _on_hello(self, connection: _Connection, frame: dict[str, Any]) -> None:
        if self._end is not None:
            connection.refuse("ended", self._end, frame)
            return
        if self._run is not None:
            connection.refuse("busy", f"action {self._run.action} runs", frame)
            return
        limits, tools = frame.get("limits"), frame.get("tools")
        if not isinstance(limits, dict) or not all(_positive(number) for number in limits.values()):
            raise FrameError("a hello frame whose limits are no numbers above 0")
        if not isinstance(tools, list) or not all(
            isinstance(t, dict) and isinstance(t.get("name"), str) for t in tools
        ):
            raise FrameError("a hello frame whose tools are no list of stubs")
        self._limits, self._tools = limits, [tool["name"] for tool in tools]
        self.hands.apply(limits)
        self._hello = True
        self._send_down({**frame, "gen": None})
        if self._python:
            self._answer_ready(self._python)

    def _on_run(self, connection: _Connection, frame: dict[str, Any]) -> None:
        action, code = _text(frame, "action", 200), _text(frame, "code")
        if action in self._ran:
            connection.refuse("already_run", f"action {action} was run before", frame)
        elif self._end is not None:
            connection.refuse("ended", self._end, frame)
        elif self._run is not None:
            connection.refuse("busy", f"action {self._run.action} runs", frame)
        elif not self._hello:
            connection.refuse("not_ready", "hello has to come first", frame)
        else:
            self._begin(action, code, str(frame.get("title") or f"<{action}>")[:200])

    def _begin(self, action: str, code: str, title: str) -> None:
        self._ran.append(action)
        self._run = run = _Run(action)
        self._idle_out = 0
        sent = self._interrupts
        self._send_down({"t": "run", "action": action, "code": code, "title": title, "interrupts": sent})
        run.begin(self.hands.usage())  # the worker starts meanwhile
        self._watch_pipes()
        run.tick = self.reactor.call_later(self._interval(), self._tick)

    def _on_reply(self, connection: _Connection, frame: dict[str, Any]) -> None:
        call = _text(frame, "call", 100)
        if call in self._waiting:
            del self._waiting[call]
            self._send_down(_only(frame, "t", "call", "ok", "value", "error"))
        elif not 0 < _call_number(call) <= self._last_call:
            connection.refuse("no_such_call", f"no call {call!r} was made", frame)

    def _on_ack(self, connection: _Connection, frame: dict[str, Any]) -> None:
        self.spool.drop(min(_whole(frame, "n"), connection.sent))
        if self.spool.room:
            self._watch_worker()
            if not self._busy:
                self._safely(self._take_lines)

    def _on_interrupt(self, connection: _Connection, frame: dict[str, Any]) -> None:
        run = self._run
        grace = frame.get("grace_s")
        if run is None or frame.get("action") != run.action:
            return
        kind = "cancelled" if frame.get("reason") == "cancel" else "interrupted"
        grace_s = min(float(grace), GRACE_MAX_S) if isinstance(grace, (int, float)) else 0.0
        self._stop_run(run, _Stop(kind, None, f"the action was {kind}"), grace_s)

    def _on_ping(self, connection: _Connection, frame: dict[str, Any]) -> None:
        connection.answer({"t": "pong", "id": frame.get("id")})

    def _on_unsupported(self, connection: _Connection, frame: dict[str, Any]) -> None:
        connection.refuse("unsupported", "this box cannot save or load variables", frame)

    def _on_put(self, connection: _Connection, frame: dict[str, Any]) -> None:
        reply: dict[str, Any] = {"t": "files", "id": frame.get("id"), "ok": True}
        try:
            data = base64.b64decode(_text(frame, "data"), validate=True)
            path, offset, mode = _text(frame, "path"), _whole(frame, "offset"), frame.get("mode")
            mode = mode if type(mode) is int else 0o644
            self.hands.files().write(path, offset, data, mode, frame.get("last") is True)
        except (OSError, ValueError) as error:
            reply.update(ok=False, error=_reason(error))
        connection.answer(reply)

    def _on_take(self, connection: _Connection, frame: dict[str, Any]) -> None:
        path, offset = frame.get("path"), _whole(frame, "offset") if frame.get("offset") else 0
        if path is None:
            self._list(connection, frame.get("id"), offset)
            return
        reply: dict[str, Any] = {"t": "files", "id": frame.get("id"), "ok": True}
        try:
            data, eof = self.hands.files().read(_text(frame, "path"), offset, FILE_CHUNK_BYTES)
            reply.update(data=base64.b64encode(data).decode("ascii"), eof=eof)
        except (OSError, ValueError) as error:
            reply.update(ok=False, error=_reason(error))
        connection.answer(reply)

    def _list(self, connection: _Connection, asked: Any, cursor: int) -> None:
        """One part of the listing. The walk is kept between two parts; a new listing ends an older one."""
        listing = self._listing
        if listing is None or cursor == 0 or listing.given != cursor or listing.asked is not None:
            if listing is not None:
                listing.cancelled = True
            if cursor:
                connection.answer({"t": "files", "id": asked, "ok": False, "error": "the listing was given up"})
                return
            listing = self._listing = _Listing(self)
        listing.ask(connection, asked)

    # -- frames of the worker --

    def _watch_worker(self) -> None:
        if self._sock is None:
            return
        hold = not self.spool.room or self._down_size > DOWN_BYTES or self._busy or self._broken is not None
        mask = (0 if hold else READ) | (WRITE if self._down else 0)
        self.reactor.watch(self._sock.fileno(), mask, self._worker_ready)

    def _worker_ready(self, mask: int) -> None:
        if mask & WRITE:
            self._flush_down()
        if mask & READ and self._sock is not None:
            self._safely(self._receive)

    def _receive(self) -> None:
        assert self._sock is not None
        try:
            data = self._sock.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.reactor.watch(self._sock.fileno(), 0, self._worker_ready)
            self._busy = True  # nothing more can come
            self.reactor.call_later(EOF_WAIT_S, self._after_eof)
            return
        self._lines.feed(data)
        self._take_lines()

    def _after_eof(self) -> None:
        if self._end is None and not self._closed:
            self._violate("the worker closed its channel")

    def _take_lines(self) -> None:
        """Handle whole lines while there is room for what they may bring, a step's worth at a time."""
        if self._broken is not None:
            return
        for _ in range(LINES_PER_STEP):
            if not self.spool.room or self._down_size > DOWN_BYTES:
                break
            line = self._lines.take()
            if line is None:
                break
            self._from_worker(line)
        else:
            self._busy = True
            self.reactor.call_soon(self._next_lines)
        self._watch_worker()

    def _next_lines(self) -> None:
        if self._end is None and not self._closed:
            self._busy = False
            self._safely(self._take_lines)
            self._watch_worker()

    def _take_last(self) -> None:
        """What a worker that is gone had sent: at most what its socket holds, and room is made for it."""
        sock = self._sock
        while sock is not None:
            line = self._lines.take()
            if line is not None:
                self._from_worker(line)
                continue
            try:
                data = sock.recv(READ_BYTES)
            except OSError:
                return
            if not data or self.spool.size > 2 * SPOOL_BYTES:
                return
            self._lines.feed(data)

    def _from_worker(self, line: bytes) -> None:
        if len(line) > WORKER_FRAME_BYTES:
            raise FrameError(f"a frame larger than {WORKER_FRAME_BYTES:,} bytes")
        frame = parse_frame(line)
        handler = _WORKER_HANDLERS.get(frame["t"])
        if handler is None:
            raise FrameError(f"a frame of unknown type {frame['t'][:80]!r}")
        handler(self, frame)

    def _worker_ready_frame(self, frame: dict[str, Any]) -> None:
        if not self._hello:
            raise FrameError("ready before hello")
        python = _text(frame, "python", 100)
        if not self._python:
            self._answer_ready(python)

    def _answer_ready(self, python: str) -> None:
        self._ready = True
        if self._harness is not None:
            self._harness.answer({"t": "ready", "v": VERSION, "python": python, "packages": self._packages})

    def _worker_display(self, frame: dict[str, Any]) -> None:
        run = self._run
        if run is None:
            return
        bundle = _bundle(frame, "bundle")
        run.displays += 1
        if run.displays > self._limit("displays", 20):
            run.displays_cut += 1
            return
        self._drain()
        self._emit({"t": "display", "action": run.action, "bundle": bundle})

    def _worker_call(self, frame: dict[str, Any]) -> None:
        call, tool = _text(frame, "call", 100), _text(frame, "tool", 200)
        number = _call_number(call)
        if number <= self._last_call:
            raise FrameError(f"a call whose id {call!r} is not new")
        args, kwargs = frame.get("args"), frame.get("kwargs")
        if not isinstance(args, list) or not isinstance(kwargs, dict):
            raise FrameError("a call without args and kwargs")
        self._last_call = number
        refusal = self._refusal(tool)
        if refusal is not None:
            self._send_down({"t": "reply", "call": call, "ok": False, "error": refusal})
            return
        assert self._run is not None
        self._run.calls += 1
        self._waiting[call] = None
        self._drain()
        action = self._run.action
        self._emit({"t": "call", "action": action, "call": call, "tool": tool, "args": args, "kwargs": kwargs})

    def _refusal(self, tool: str) -> dict[str, str] | None:
        """Why a call is answered here and not sent on, if it is."""
        run = self._run
        if run is None:
            return _refused("RuntimeError", "no action is running, so no tool can be called")
        if tool not in self._tools:
            return _refused("NameError", f"there is no tool {tool!r}")
        if len(self._waiting) >= CALLS_WAITING:
            return _refused("LimitReached", f"{CALLS_WAITING:,} calls wait already; gather fewer at a time")
        allowed = self._limit("tool_calls", 1_000_000)
        if run.calls > allowed:  # one more goes through, so that the loop sees that the limit was met
            return _refused("LimitReached", f"the limit `tool_calls` was reached: {allowed} calls in one action")
        return None

    def _worker_answer(self, frame: dict[str, Any]) -> None:
        run = self._run
        if run is None:
            return
        run.answers += 1
        if run.answers > ANSWERS:
            run.answers_cut += 1
            return
        shown, problem = _text(frame, "repr")[: 2 * REPR_CHARS], frame.get("problem")
        self._drain()
        self._emit(
            {
                "t": "answer",
                "action": run.action,
                "value": frame.get("value"),
                "repr": shown,
                "problem": problem[:MESSAGE_CHARS] if isinstance(problem, str) else None,
            }
        )

    def _worker_done(self, frame: dict[str, Any]) -> None:
        run = self._run
        if run is None or frame.get("action") != run.action:
            raise FrameError("the end of an action that does not run")
        names = frame.get("names")
        if isinstance(names, list):
            self._names = [name[:NAME_CHARS] for name in names[:NAMES_KEPT] if isinstance(name, str)]
        ok = frame.get("ok") is True
        error = None if ok else _checked_error(frame.get("error"))
        shown = _bundle(frame, "value") if frame.get("value") is not None else None
        stop = run.stop
        if stop is not None and (stop.kind == "limit" or not ok):
            told = error or {}
            error = _error(stop.kind, stop.message, limit=stop.limit, **_only(told, "type", "traceback"))
        elif error is not None and error["kind"] == "interrupted":
            error["kind"] = "exception"
        self._finish(run, shown if error is None else None, error, alive=True)

    # -- to the worker --

    def _send_down(self, frame: dict[str, Any]) -> None:
        if self._sock is None:
            return
        line = dump_frame({name: item for name, item in frame.items() if name != "gen"})
        self._down.append(memoryview(line))
        self._down_size += len(line)
        self._flush_down()

    def _flush_down(self) -> None:
        congested = self.congested
        try:
            while self._down and self._sock is not None:
                sent = self._sock.send(self._down[0])
                self._down_size -= sent
                if sent == len(self._down[0]):
                    self._down.popleft()
                else:
                    self._down[0] = self._down[0][sent:]
                if self._stall is not None:
                    self._stall.cancel()
                    self._stall = None
        except BlockingIOError:
            pass
        except OSError:
            self._down.clear()  # the worker is gone: `ended` follows
            self._down_size = 0
        if self.congested and self._stall is None:
            self._stall = self.reactor.call_later(DOWN_STALL_S, self._stalled)
        if congested and self._harness is not None:
            self._harness.take_rest()
        self._watch_worker()

    def _stalled(self) -> None:
        self._stall = None
        if self.congested and not self.suspended and self._end is None:
            self._violate("the worker does not read its replies")

    # -- output --

    def _watch_pipes(self) -> None:
        hold = self._run is None and self._idle_out >= IDLE_OUT_BYTES
        for pipe in self._pipes:
            if pipe.fd >= 0 and pipe.held is None:
                self.reactor.watch(pipe.fd, 0 if hold else READ, pipe.ready)

    def _relay(self, pipe: _Pipe) -> None:
        """Read once. After a small piece the pipe rests: a million short lines do not become as many frames."""
        size = self._read_pipe(pipe, READ_BYTES)
        if pipe.fd < 0:
            return
        if size < PIPE_SMALL_BYTES and self._run is not None:
            self.reactor.watch(pipe.fd, 0, pipe.ready)
            pipe.held = self.reactor.call_later(PIPE_REST_S, lambda: self._release(pipe))
        elif self._run is None and self._idle_out >= IDLE_OUT_BYTES:
            self._watch_pipes()

    def _release(self, pipe: _Pipe) -> None:
        pipe.held = None
        self._watch_pipes()

    def _read_pipe(self, pipe: _Pipe, most: int) -> int:
        try:
            data = os.read(pipe.fd, most)
        except BlockingIOError:
            return 0
        except OSError:
            data = b""
        if not data:
            self._close_pipe(pipe)
            return 0
        self._wrote(pipe, data)
        return len(data)

    def _close_pipe(self, pipe: _Pipe) -> None:
        if pipe.fd >= 0:
            self.reactor.watch(pipe.fd, 0, pipe.ready)
            os.close(pipe.fd)
            pipe.fd = -1

    def _wrote(self, pipe: _Pipe, data: bytes) -> None:
        """Send text on, as far as the action's limit and the spool allow; the rest is counted."""
        size = len(data)
        run = self._run
        if run is None:
            self._idle_out += size
            kept = size if self.spool.room else 0
            self._idle_cut += size - kept
        else:
            room = self._limit("output_bytes", SPOOL_BYTES) - (run.out_bytes - run.out_cut)
            kept = max(0, min(size, room)) if self.spool.room else 0
            if run.out_cut and kept:
                kept = 0  # one cut, at one place
            run.out_bytes += size
            run.out_cut += size - kept
        if kept:
            self._out(pipe, pipe.decoder.decode(data[:kept]))
        if kept < size:
            pipe.decoder.reset()

    def _out(self, pipe: _Pipe, text: str) -> None:
        for start in range(0, len(text), OUT_CHUNK_BYTES):
            piece = text[start : start + OUT_CHUNK_BYTES]
            self._emit({"t": "out", "action": self.running, "stream": pipe.stream, "text": piece})

    def _drain(self) -> None:
        """Relay what the pipes hold at this moment, so that it comes before the frame that follows."""
        for pipe in self._pipes:
            if pipe.fd < 0:
                continue
            held = bytearray(4)
            fcntl.ioctl(pipe.fd, termios.FIONREAD, held)
            waiting = int.from_bytes(held, sys.byteorder)
            while waiting > 0 and pipe.fd >= 0:
                size = self._read_pipe(pipe, min(waiting, READ_BYTES))
                if not size:
                    break
                waiting -= size

    # -- clocks and limits --

    def _limit(self, name: str, otherwise: int) -> int:
        return int(self._limits.get(name, otherwise))

    def _interval(self) -> float:
        run = self._run
        step = TICK_SAMPLED_S if self.hands.sampling else TICK_S
        wall_s = self._limits.get("wall_s")
        if run is None or wall_s is None or run.stop is not None:
            return step
        return max(0.001, min(step, float(wall_s) - run.wall_s))

    def _tick(self) -> None:
        run = self._run
        if run is None or self._end is not None:
            return
        usage = self._sample()
        if run.stop is None:
            self._check(run, usage)
        if self._run is run:
            run.tick = self.reactor.call_later(self._interval(), self._tick)

    def _sample(self) -> Usage | None:
        """Add the time since the last sample to the action's clock, if code could run in it."""
        run = self._run
        if run is None:
            return None
        now = time.monotonic()
        # A gap means that this process did not run, stopped or frozen with the box: it does not count in full.
        passed = min(now - run.sampled, 1.0)
        run.sampled = now
        usage = self.hands.usage()
        used = passed
        if usage is not None:
            used = usage.cpu_s - run.cpu_s
            run.cpu_s = max(run.cpu_s, usage.cpu_s)
            run.peak = max(run.peak, usage.memory_bytes)
        waits = bool(self._waiting) and not self._down
        if not self.suspended and not (waits and used < IDLE_SHARE * passed):
            run.wall_s += passed
        return usage

    def _check(self, run: _Run, usage: Usage | None) -> None:
        limits = self._limits
        wall, cpu = limits.get("wall_s"), limits.get("cpu_s")
        if usage is not None:
            memory, processes = limits.get("memory_bytes"), limits.get("processes")
            if memory is not None and usage.memory_bytes > memory:
                text = f"the limit `memory_bytes` was reached: {memory:,} bytes for all processes of the action"
                self._stop_run(run, _Stop("limit", "memory_bytes", text), 0.0)
                return
            if processes is not None and usage.processes > processes:
                text = f"the limit `processes` was reached: {processes} processes and threads together"
                self._stop_run(run, _Stop("limit", "processes", text), 0.0)
                return
        if cpu is not None and run.cpu_s - run.cpu_start >= cpu:
            text = f"the limit `cpu_s` was reached: {cpu:g} s of processor time"
            self._stop_run(run, _Stop("limit", "cpu_s", text), LIMIT_GRACE_S)
        elif wall is not None and run.wall_s >= wall:
            text = f"the limit `wall_s` was reached: the code may run for {wall:g} s"
            self._stop_run(run, _Stop("limit", "wall_s", text), LIMIT_GRACE_S)

    def _stop_run(self, run: _Run, stop: _Stop, grace_s: float) -> None:
        """SIGINT now, SIGKILL after the grace. The first reason stands."""
        first = run.stop is None
        if first:
            run.stop = stop
        if grace_s <= 0:
            self._kill(run)
            return
        if first:
            self._interrupts += 1
            self.hands.interrupt()
        self.reactor.call_later(grace_s, lambda: self._kill(run))

    def _kill(self, run: _Run | None) -> None:
        if self._end is None and not self._closed and self._run is run:
            self.hands.kill()
            self.reactor.call_later(KILL_WAIT_S, self._assume_ended)

    def _assume_ended(self) -> None:
        if self._end is None and not self._closed:
            self.ended(-signal.SIGKILL)

    def _violate(self, what: str) -> None:
        """The worker broke the protocol: its box ends."""
        if self._broken is None and self._end is None:
            self._broken = f"the box broke the protocol: {what}"
            if self._run is not None:
                self._run.stop = _Stop("protocol", None, self._broken)
            self._watch_worker()
            self._kill(self._run)

    def _safely(self, step: Callable[[], None]) -> None:
        """Whatever a worker's frames bring about ends this box and no other."""
        try:
            step()
        except FrameError as error:
            self._violate(str(error)[:MESSAGE_CHARS])
        except Exception as error:
            self._violate(f"{type(error).__name__}: {str(error)[:MESSAGE_CHARS]}")

    # -- ends --

    def _finish_dead(self, run: _Run, status: int, limit: str | None, text: str) -> None:
        if run.stop is not None:
            error = _error(run.stop.kind, run.stop.message, limit=run.stop.limit)
        elif limit is not None:
            allowed = self._limits.get(limit)
            most = f": {allowed:,}" if allowed is not None else ""
            error = _error("limit", f"the limit `{limit}` was reached{most}", limit=limit)
        else:
            error = _error("ended", text, exit=status)
        self._finish(run, None, error, alive=False)

    def _finish(self, run: _Run, shown: dict[str, str] | None, error: dict[str, Any] | None, alive: bool) -> None:
        self._drain()
        for pipe in self._pipes:
            rest = pipe.decoder.decode(b"", True)
            if rest and not run.out_cut:
                self._out(pipe, rest)
        self._sample()
        self._cancel_run()
        done = {
            "t": "done",
            "action": run.action,
            "ok": error is None,
            "value": shown,
            "error": error,
            "usage": {
                "wall_s": round(run.wall_s, 6),
                "cpu_s": round(max(0.0, run.cpu_s - run.cpu_start), 6),
                "peak_memory_bytes": run.peak,
                "elapsed_s": round(time.monotonic() - run.started, 6),
            },
            "output": {
                "bytes": run.out_bytes,
                "cut_bytes": run.out_cut + self._idle_cut,
                "displays_cut": run.displays_cut,
                "answers_cut": run.answers_cut,
            },
            "lost": [] if alive else self._names,
            "alive": alive,
        }
        self._idle_cut = self._idle_out = 0
        self._run = None
        self._emit(done)
        self._watch_pipes()

    def _cancel_run(self) -> None:
        if self._run is not None and self._run.tick is not None:
            self._run.tick.cancel()

    def _emit(self, frame: dict[str, Any]) -> None:
        self.spool.add(frame)
        if self._harness is not None:
            self._harness.flush()

    def _drop_worker(self) -> None:
        for pipe in self._pipes:
            if pipe.held is not None:
                pipe.held.cancel()
                pipe.held = None
            self._close_pipe(pipe)
        if self._sock is not None:
            self.reactor.watch(self._sock.fileno(), 0, self._worker_ready)
            self._sock.close()
            self._sock = None
        if self._stall is not None:
            self._stall.cancel()
        self._down.clear()
        self._down_size = 0
        if self._harness is not None:
            self._harness.take_rest()


_HANDLERS: dict[str, Callable[[Supervisor, _Connection, dict[str, Any]], None]] = {
    "hello": Supervisor._on_hello,
    "run": Supervisor._on_run,
    "reply": Supervisor._on_reply,
    "ack": Supervisor._on_ack,
    "interrupt": Supervisor._on_interrupt,
    "ping": Supervisor._on_ping,
    "put": Supervisor._on_put,
    "take": Supervisor._on_take,
    "save": Supervisor._on_unsupported,
    "load": Supervisor._on_unsupported,
}
_WORKER_HANDLERS: dict[str, Callable[[Supervisor, dict[str, Any]], None]] = {
    "ready": Supervisor._worker_ready_frame,
    "display": Supervisor._worker_display,
    "call": Supervisor._worker_call,
    "answer": Supervisor._worker_answer,
    "done": Supervisor._worker_done,
}


class _Listing:
    """A walk over the workspace, given out in parts that fit a frame; each step of the reactor takes one batch."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._walk = supervisor.hands.files().walk()
        self._entries: deque[dict[str, Any]] = deque()
        self._left_out: list[dict[str, str]] = []
        self._left_count = 0
        self._over = False
        self._connection: _Connection | None = None
        self.asked: Any = None
        self.given = 0
        self.cancelled = False

    def ask(self, connection: _Connection, asked: Any) -> None:
        self._connection, self.asked = connection, asked if asked is not None else ""
        self._step()

    def _step(self) -> None:
        connection = self._connection
        if self.cancelled or connection is None or connection.closed:
            self._walk.close()
            return
        try:
            if not self._over and len(self._entries) < LISTING_ENTRIES:
                self._add(next(self._walk))
                self._supervisor.reactor.call_soon(self._step)
                return
        except StopIteration:
            self._over = True
        except (OSError, FrameError) as error:
            connection.answer({"t": "files", "id": self.asked, "ok": False, "error": _reason(error)})
            self.asked, self.cancelled = None, True
            return
        self._give(connection)

    def _add(self, batch: Batch) -> None:
        self._entries.extend(batch.entries)
        for left in batch.left_out:
            self._left_count += 1
            if self._left_count <= LEFT_OUT_NAMED:
                self._left_out.append(left)

    def _give(self, connection: _Connection) -> None:
        part: list[dict[str, Any]] = []
        size = 0
        while self._entries and len(part) < LISTING_ENTRIES and size < LISTING_BYTES:
            part.append(self._entries.popleft())
            size += 200 + 6 * len(part[-1]["path"])
        self.given += len(part)
        more = self.given if self._entries or not self._over else None
        left_out, self._left_out = self._left_out, []
        if more is None and self._left_count > LEFT_OUT_NAMED:
            left_out.append({"path": "", "reason": f"{self._left_count - LEFT_OUT_NAMED:,} more are not named"})
        reply = {"t": "files", "id": self.asked, "ok": True, "entries": part, "more": more, "left_out": left_out}
        self.asked = None
        connection.answer(reply)


_CALL = re.compile(r"c[1-9][0-9]{0,14}\Z")


def _call_number(call: str) -> int:
    """The number in a call's id; 0 when it is none."""
    return int(call[1:]) if _CALL.match(call) else 0


def _positive(number: object) -> bool:
    return isinstance(number, (int, float)) and not isinstance(number, bool) and number > 0


def _refused(kind: str, message: str) -> dict[str, str]:
    return {"type": kind, "message": message, "hint": ""}


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) and error.strerror else str(error))[:500]


def _only(found: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: found[name] for name in names if name in found}


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "?"


def _error(kind: str, message: str, **more: Any) -> dict[str, Any]:
    empty = {"kind": kind, "type": "", "message": message, "traceback": "", "hint": "", "limit": None, "exit": None}
    return {**empty, **more}


_WORKER_KINDS = frozenset(("exception", "exit", "syntax", "limit", "interrupted"))
_BOX_LIMITS = frozenset(("memory_bytes", "processes", "disk_bytes", "disk_files", "tool_calls"))


def _checked_error(found: Any) -> dict[str, Any]:
    """A worker's word on why an action failed, with every field of its type and size."""
    if not isinstance(found, dict) or found.get("kind") not in _WORKER_KINDS:
        raise FrameError("the end of an action without a known kind of error")
    error = _error(found["kind"], "")
    for name, most in (("type", 200), ("message", MESSAGE_CHARS), ("traceback", 2 * TRACEBACK_CHARS), ("hint", 2000)):
        text = found.get(name)
        if isinstance(text, str):
            error[name] = text[:most]
    if error["kind"] == "limit":
        if found.get("limit") not in _BOX_LIMITS:
            raise FrameError("a limit that no worker can meet")
        error["limit"] = found["limit"]
    if error["kind"] == "exit":
        code = found.get("exit")
        error["exit"] = code if type(code) is int and abs(code) < 1 << 31 else 1
    return error


def _bundle(frame: dict[str, Any], name: str) -> dict[str, str]:
    found = frame.get(name)
    if not isinstance(found, dict) or len(found) > BUNDLE_TYPES:
        raise FrameError(f"a {frame['t']} frame whose {name!r} is no bundle")
    for kind, text in found.items():
        if not isinstance(text, str) or len(kind) > NAME_CHARS:
            raise FrameError(f"a {frame['t']} frame whose {name!r} holds what is no text")
    return found


# ---- worker: the channel ----

_OPEN_GATE, _WAIT, _SHUT = "open", "wait", "shut"


class _Waiter:
    """Somebody who waits for the answer to a call, or (without one) for the next frame that is no reply.

    A thread sleeps on `lock`; a coroutine has a future in `loop` instead.
    """

    __slots__ = ("done", "future", "lock", "loop", "reply")

    def __init__(self, loop: Any = None) -> None:
        self.done = False
        self.reply: dict[str, Any] = {}
        self.loop = loop
        self.future: Any = loop.create_future() if loop is not None else None
        self.lock = threading.Lock()
        self.lock.acquire()

    def wake(self) -> None:
        """Only while the channel's mutex is held."""
        if self.loop is None:
            if self.lock.locked():
                self.lock.release()
            return
        try:
            self.loop.call_soon_threadsafe(self._resolve)
        except RuntimeError:
            pass  # its loop is closed: nobody waits any more

    def _resolve(self) -> None:
        if self.done and not self.future.done():
            self.future.set_result(None)


class Channel:
    """The worker's end of the frame stream, shared by all threads and event loops of the guest.

    Who waits reads: one of the waiting threads leads, takes bytes off the socket and wakes whom they are for; a loop
    whose coroutines wait reads when nobody leads. The main thread leads between actions. So no thread is needed for it.

    KeyboardInterrupt may only be raised where no byte can be lost by it. `gate` says so for the main thread: open in
    guest code, shut in here, wait around a system call that waits. Raising shuts it.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self._sock = sock
        self._fd = sock.fileno()
        self._main = threading.get_ident()
        self._lines = Lines()
        self._out = bytearray()
        self._mutex = threading.Lock()
        self._send_lock = threading.Lock()
        self._leader: _Waiter | None = None
        self._threads: dict[_Waiter, None] = {}
        self._calls: dict[str, _Waiter] = {}
        self._loops: dict[Any, int] = {}
        self._count = 0
        self._inbox: deque[dict[str, Any]] = deque()
        self._idle: _Waiter | None = None
        self.gate = _SHUT
        self.pending = False
        self.interrupts = 0
        self.forked = False

    # -- interrupts --

    def on_sigint(self, signum: int, frame: Any) -> None:
        if self.forked:
            raise KeyboardInterrupt
        self.interrupts += 1
        if self.gate == _SHUT:
            self.pending = True
            return
        self.gate = _SHUT
        raise KeyboardInterrupt

    def _enter(self) -> str | None:
        if threading.get_ident() != self._main:
            return None
        gate, self.gate = self.gate, _SHUT
        return gate

    def _leave(self, gate: str | None) -> None:
        if gate is None:
            return
        if self.pending and gate == _OPEN_GATE:
            self.pending = False
            raise KeyboardInterrupt
        self.gate = gate

    def _pause(self, wait: Callable[[], Any], interruptible: bool = True) -> None:
        """A system call that waits; in the main thread the one place where an interrupt may come up in here."""
        if threading.get_ident() != self._main or not interruptible:
            wait()
            return
        if self.pending and self._idle is None:
            self.pending = False
            raise KeyboardInterrupt
        if self._idle is None:
            self.gate = _WAIT
        wait()
        self.gate = _SHUT

    def _after_fork(self) -> None:
        if not self.forked:
            self.forked = True
            os.close(self._sock.detach())

    def _require_own_process(self) -> None:
        if self.forked:
            raise RuntimeError("a forked process cannot call tools or answer: do it in the process that forked it")

    # -- sending --

    def send(self, frame: dict[str, Any], interruptible: bool = False) -> None:
        """Send a whole frame. FrameError when it is too large."""
        self._require_own_process()
        line = dump_frame(frame, WORKER_FRAME_BYTES)
        gate = self._enter()
        try:
            with self._send_lock:
                self._out += line
                self._flush(interruptible)
        finally:
            self._leave(gate)

    def _send_call(self, tool: str, args: list[Any], kwargs: dict[str, Any], waiter: _Waiter) -> str:
        with self._send_lock:
            call = f"c{self._count + 1}"
            line = dump_frame(
                {"t": "call", "call": call, "tool": tool, "args": args, "kwargs": kwargs}, WORKER_FRAME_BYTES
            )
            self._count += 1
            with self._mutex:
                self._calls[call] = waiter
            self._out += line
            try:
                self._flush(True)
            except BaseException:
                self._calls.pop(call, None)
                raise
        return call

    def _flush(self, interruptible: bool) -> None:
        """Send what is left, and read meanwhile if nobody else does: the supervisor takes no frame before its replies
        are read. When interrupted the rest stays, and whoever sends next sends it first."""
        while self._out:
            try:
                sent = self._sock.send(self._out, socket.MSG_DONTWAIT)
                del self._out[:sent]
            except BlockingIOError:
                poll = select.poll()
                poll.register(self._fd, select.POLLIN | select.POLLOUT)
                self._pause(poll.poll, interruptible)
                self._read_if_free()
            except OSError:
                os._exit(0)  # the supervisor is gone

    # -- receiving --

    def _read_if_free(self) -> None:
        token = _Waiter()
        with self._mutex:
            if self._leader is not None:
                return
            self._leader = token
        try:
            self._read()
        finally:
            self._abdicate(token)

    def _read(self) -> None:
        try:
            data = self._sock.recv(READ_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            os._exit(0)  # the supervisor is gone, and the box with it
        self._lines.feed(data)
        line = self._lines.take()
        while line is not None:
            self._dispatch(_loads(line))
            line = self._lines.take()

    def _dispatch(self, frame: dict[str, Any]) -> None:
        with self._mutex:
            if frame["t"] == "reply":
                waiter = self._calls.pop(frame["call"], None)
                if waiter is None:
                    return
                waiter.reply = frame
            else:
                self._inbox.append(frame)
                waiter = self._idle
                if waiter is None:
                    return
            waiter.done = True
            waiter.wake()

    def _abdicate(self, waiter: _Waiter) -> None:
        """Stop leading; another waiting thread takes over."""
        with self._mutex:
            if self._leader is not waiter:
                return
            self._leader = next((other for other in self._threads if other is not waiter and not other.done), None)
            if self._leader is not None:
                self._leader.wake()

    def _wait(self, waiter: _Waiter) -> None:
        """Until the waiter is done: lead, or sleep until somebody wakes this thread."""
        with self._mutex:
            self._threads[waiter] = None
        try:
            while True:
                with self._mutex:
                    if waiter.done:
                        return
                    if self._leader is None:
                        self._leader = waiter
                    leads = self._leader is waiter
                if leads:
                    poll = select.poll()
                    poll.register(self._fd, select.POLLIN)
                    self._pause(poll.poll)
                    self._read()
                else:
                    self._pause(waiter.lock.acquire)
        finally:
            with self._mutex:
                self._threads.pop(waiter, None)
            self._abdicate(waiter)

    def next_frame(self) -> dict[str, Any]:
        """The next frame that is no reply. For the main thread between actions; nothing interrupts it."""
        waiter = _Waiter()
        with self._mutex:
            if self._inbox:
                return self._inbox.popleft()
            self._idle = waiter
        self._wait(waiter)
        with self._mutex:
            self._idle = None
            return self._inbox.popleft()

    # -- calls --

    def call(self, tool: str, args: list[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Make a call and block this thread until its reply."""
        self._require_own_process()
        gate = self._enter()
        call = ""
        try:
            waiter = _Waiter()
            call = self._send_call(tool, args, kwargs, waiter)
            self._wait(waiter)
        finally:
            self._calls.pop(call, None)
            self._leave(gate)
        return waiter.reply

    async def call_async(self, tool: str, args: list[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Make a call and wait for its reply in the running event loop."""
        import asyncio

        self._require_own_process()
        loop = asyncio.get_running_loop()
        call = ""
        gate = self._enter()
        try:
            waiter = _Waiter(loop)
            self._follow(loop)
            call = self._send_call(tool, args, kwargs, waiter)
        except BaseException:
            self._unfollow(loop)
            raise
        finally:
            self._leave(gate)
        try:
            await waiter.future
        finally:
            self._calls.pop(call, None)
            self._unfollow(loop)
        return waiter.reply

    def _follow(self, loop: Any) -> None:
        count = self._loops.get(loop, 0)
        self._loops[loop] = count + 1
        if not count:
            loop.add_reader(self._fd, self._loop_ready)

    def _unfollow(self, loop: Any) -> None:
        count = self._loops.get(loop, 0) - 1
        if count > 0:
            self._loops[loop] = count
            return
        self._loops.pop(loop, None)
        if not loop.is_closed():
            loop.remove_reader(self._fd)

    def _loop_ready(self) -> None:
        gate = self._enter()
        try:
            self._read_if_free()
        finally:
            self._leave(gate)


# ---- worker: what the guest sees ----


class ToolError(Exception):
    """A tool call did not give a value."""


class ToolFailed(ToolError):
    """The tool says that it failed and nothing happened."""


class ToolTimedOut(ToolError):
    """The tool gave no value in its time."""


class ToolArgumentError(ToolError, TypeError):
    """The arguments do not fit the tool's signature."""


class OutcomeUnknown(ToolError):
    """An earlier call with these arguments may or may not have taken effect."""


class LimitReached(Exception):
    """A bound of this agent was met."""


_OWN_ERRORS = (ToolError, ToolFailed, ToolTimedOut, ToolArgumentError, OutcomeUnknown, LimitReached)
for _class in _OWN_ERRORS:
    _class.__module__ = "builtins"  # tracebacks show the bare name
_UNSAFE_ERRORS = frozenset(
    ("StopIteration", "StopAsyncIteration", "MemoryError", "UnicodeDecodeError", "UnicodeEncodeError")
    + ("UnicodeTranslateError", "ExceptionGroup", "SyntaxError", "IndentationError", "TabError", "Exception")
)
_ERRORS: dict[str, Any] = {
    name: found
    for name, found in vars(builtins).items()
    if isinstance(found, type) and issubclass(found, Exception) and name not in _UNSAFE_ERRORS
}
_ERRORS.update((found.__name__, found) for found in _OWN_ERRORS)


def _raised(error: Any) -> Exception:
    """The exception of an error reply: the built-in class of that name, else ToolError."""
    told = error if isinstance(error, dict) else {}
    kind, message, hint = (str(told.get(name) or "") for name in ("type", "message", "hint"))
    cls = _ERRORS.get(kind)
    if kind == "KeyError":
        try:
            message = ast.literal_eval(message)  # str() of a KeyError is the repr of its key
        except (ValueError, SyntaxError):
            pass
    if cls is None:
        problem: Exception = ToolError(f"{kind}: {message}" if kind else message)
    else:
        problem = cls(message)
    if hint:
        if isinstance(problem, (ToolError, LimitReached)):
            problem.args = (f"{problem.args[0]}\n  {hint}",)
        else:
            problem.__notes__ = [hint]
    problem._farhand_tool = True  # type: ignore[attr-defined]
    return problem


class Tools:
    """The stubs of the harness's tools: functions with their signature and documentation."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._result_bytes = 512 * KIB
        self.names: list[str] = []

    def make(self, stubs: list[dict[str, Any]], result_bytes: int) -> dict[str, Any]:
        self._result_bytes = min(result_bytes, value.MAX_VALUE_BYTES)
        self.names = [stub["name"] for stub in stubs]
        return {stub["name"]: self._stub(stub) for stub in stubs}

    def _stub(self, told: dict[str, Any]) -> Any:
        name = told["name"]

        def blocking(*args: Any, **kwargs: Any) -> Any:
            return self._given(name, self._channel.call(name, *self._encoded(name, args, kwargs)))

        async def waiting(*args: Any, **kwargs: Any) -> Any:
            return self._given(name, await self._channel.call_async(name, *self._encoded(name, args, kwargs)))

        stub: Any = waiting if told.get("is_async") else blocking
        stub.__name__ = stub.__qualname__ = name
        stub.__doc__ = told.get("doc") or None
        stub.__module__ = "tools"
        stub.__signature__ = _signature(told)
        return stub

    def _encoded(self, name: str, args: Any, kwargs: Any) -> tuple[list[Any], dict[str, Any]]:
        most = self._result_bytes
        encoded = [
            value.encode(each, name=f"argument {i} of {name}()", max_bytes=most) for i, each in enumerate(args, 1)
        ]
        named = {key: value.encode(each, name=f"{key} of {name}()", max_bytes=most) for key, each in kwargs.items()}
        try:
            dump_frame({"t": "", "a": encoded, "k": named}, WORKER_FRAME_BYTES - 512)
        except FrameError:
            way = "write them to a file under /workspace and pass its path"
            raise ValueError(f"the arguments of {name}() are too large together; {way}") from None
        return encoded, named

    def _given(self, name: str, reply: dict[str, Any]) -> Any:
        if reply.get("ok") is not True:
            raise _raised(reply.get("error"))
        try:
            return value.decode(reply.get("value"), rich=True)
        except ValueError as error:
            raise ToolError(f"{name}() gave a value that cannot be built here: {error}") from None


class _Shown:
    """Stands for an annotation or a default of the other side: its repr is the text it had there."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def _signature(told: dict[str, Any]) -> Any:
    """A stub's `inspect.Signature`; None when what is told makes none."""
    import inspect

    def shown(text: Any) -> Any:
        return inspect.Parameter.empty if text is None else _Shown(str(text))

    try:
        parameters = [
            inspect.Parameter(
                each["name"],
                getattr(inspect.Parameter, each["kind"].upper()),
                default=shown(each.get("default")),
                annotation=shown(each.get("annotation")),
            )
            for each in told["params"]
        ]
        return inspect.Signature(parameters, return_annotation=shown(told.get("returns")))
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


class Imports:
    """`__import__` for guest code: names that are not listed raise ImportError. It guides; the wall protects."""

    def __init__(self) -> None:
        self.allowed: tuple[str, ...] | None = None
        self.folder = os.getcwd()
        self._original = builtins.__import__
        self._known: dict[str, bool] = {}

    def allow(self, names: list[str] | None) -> None:
        self._known.clear()
        if names is None or "*" in names:
            self.allowed = None
        else:
            self.allowed = tuple(sorted({name[:-2] if name.endswith(".*") else name for name in names}))

    def __call__(self, name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        if self.allowed is not None and level == 0 and globals is not None and globals.get("__name__") == "__main__":
            self._check(name, fromlist)
        return self._original(name, globals, locals, fromlist, level)

    def _check(self, name: str, fromlist: Any) -> None:
        if self._listed(name) or self._local(name):
            return
        if fromlist and all(self._listed(f"{name}.{part}") for part in fromlist):
            return
        assert self.allowed is not None
        some = ", ".join(self.allowed[:60]) + (f" and {len(self.allowed) - 60} more" if len(self.allowed) > 60 else "")
        raise ImportError(
            f"import of {name!r} is not authorized here; authorized are: {some or 'none'}. "
            f"Do without it, or ask the user to add it: additional_authorized_imports=[{name.split('.')[0]!r}]",
            name=name,
        )

    def _listed(self, name: str) -> bool:
        known = self._known.get(name)
        if known is None:
            parts = name.split(".")
            known = any(
                ".".join(parts[:end]) in ("__future__", "__main__", *(self.allowed or ()))
                for end in range(1, len(parts) + 1)
            )
            if len(self._known) < 10_000:
                self._known[name] = known
        return known

    def _local(self, name: str) -> bool:
        try:
            return PathFinder.find_spec(name.split(".")[0], [self.folder]) is not None
        except (ImportError, ValueError, OSError):
            return False


# ---- worker: rich values ----


def _json_size(text: str) -> int:
    return len(_dumps(text))


def _clean(text: str) -> str:
    """The text without half surrogate pairs."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _fitting(text: str, most: int) -> str:
    """The text, or its beginning and a word on how much is missing; `most` counts bytes of JSON."""
    text = str.__str__(text)
    whole = len(text)
    cut = _clean(text[:most])
    while _json_size(cut) > most:
        cut = cut[: max(0, int(len(cut) * 0.9 * most / _json_size(cut)))]
    return cut if len(cut) >= whole else f"{cut}… [{whole - len(cut):,} of {whole:,} characters cut]"


def _middle_cut(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n… [{len(text) - 2 * half:,} characters cut] …\n{text[-half:]}"


_REPRS = (
    ("text/html", "_repr_html_"),
    ("text/markdown", "_repr_markdown_"),
    ("image/svg+xml", "_repr_svg_"),
    ("image/png", "_repr_png_"),
    ("image/jpeg", "_repr_jpeg_"),
    ("text/latex", "_repr_latex_"),
)


def bundle_of(shown: Any) -> dict[str, str]:
    """A value as a MIME bundle that fits a frame. Raises what its repr raises; a failing rich form is left out."""
    bundle = {"text/plain": _fitting(repr(shown), TEXT_BYTES)}
    room = BUNDLE_BYTES - _json_size(bundle["text/plain"]) - 4 * KIB
    for kind, data in _rich_forms(shown):
        text = base64.b64encode(data).decode("ascii") if isinstance(data, bytes) else _clean(data)
        size = _json_size(text)
        if size > room and kind in ("image/png", "image/jpeg"):
            smaller = _smaller(data, room)
            if smaller:
                bundle["text/plain"] += f"\n[its {kind} form of {size:,} bytes is scaled down to fit]"
                kind, text, size = "image/png", smaller, _json_size(smaller)
        if not text or size > room or len(bundle) >= BUNDLE_TYPES:
            bundle["text/plain"] += f"\n[its {kind} form of {size:,} bytes is left out: too large]"
            continue
        if kind not in bundle:
            bundle[kind] = text
            room -= size
    return bundle


def _rich_forms(shown: Any) -> Iterator[tuple[str, Any]]:
    picture = _picture(shown)
    if picture is not None:
        yield "image/png", picture
        return
    if isinstance(shown, type):
        return
    for kind, data in _mimebundle(shown):
        if isinstance(kind, str) and isinstance(data, (str, bytes)) and kind != "text/plain":
            yield kind[:NAME_CHARS], data
    for kind, name in _REPRS:
        try:
            method = getattr(shown, name, None)
            data = method() if callable(method) else None
            data = data[0] if isinstance(data, tuple) else data
        except Exception:
            continue
        if isinstance(data, (str, bytes)) and data:
            yield kind, data


def _mimebundle(shown: Any) -> list[tuple[Any, Any]]:
    try:
        method = getattr(shown, "_repr_mimebundle_", None)
        found = method(include=None, exclude=None) if callable(method) else None
        found = found[0] if isinstance(found, tuple) else found
        return list(found.items()) if isinstance(found, dict) else []
    except Exception:
        return []


def _loaded(module: str, name: str) -> Any:
    return getattr(sys.modules.get(module), name, None) if module in sys.modules else None


def is_figure(shown: Any) -> bool:
    figure = _loaded("matplotlib.figure", "Figure")
    return isinstance(figure, type) and isinstance(shown, figure)


def _picture(shown: Any) -> bytes | None:
    """PNG of a matplotlib figure or a PIL image."""
    try:
        if is_figure(shown):
            return _png_of_figure(shown)
        image = _loaded("PIL.Image", "Image")
        if isinstance(image, type) and isinstance(shown, image):
            return _png_of_image(shown)
    except Exception:
        pass
    return None


def _png_of_figure(figure: Any) -> bytes:
    data = b""
    for dpi in (100, 60, 30):
        file = io.BytesIO()
        figure.savefig(file, format="png", dpi=dpi, bbox_inches="tight")
        data = file.getvalue()
        if len(data) * 4 // 3 < BUNDLE_BYTES // 2:
            break
    return data


def _png_of_image(image: Any) -> bytes:
    file = io.BytesIO()
    if image.mode not in ("1", "L", "LA", "P", "RGB", "RGBA", "I", "I;16"):
        image = image.convert("RGB")
    image.save(file, format="PNG")
    return file.getvalue()


def _smaller(data: Any, room: int) -> str:
    """An image scaled down until it fits, as base64; empty when it cannot be."""
    try:
        from PIL import Image

        image: Any = Image.open(io.BytesIO(data))
        for _ in range(8):
            image = image.resize((max(1, image.width // 2), max(1, image.height // 2)))
            text = base64.b64encode(_png_of_image(image)).decode("ascii")
            if len(text) + 2 <= room:
                return text
    except Exception:
        pass
    return ""


# ---- worker: errors ----

_OWN_FILES = frozenset((bundle_of.__code__.co_filename, value.encode.__code__.co_filename))
_NO_NETWORK = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN)


def _chain(problem: BaseException | None) -> Iterator[BaseException]:
    """An exception, its causes and contexts, and those that wrappers of connections carry in attributes."""
    waiting: list[Any] = [problem]
    seen: set[int] = set()
    while waiting and len(seen) < 50:
        found = waiting.pop()
        if not isinstance(found, BaseException) or id(found) in seen:
            continue
        seen.add(id(found))
        yield found
        waiting += [found.__cause__, found.__context__, getattr(found, "reason", None), *found.args[:3]]


def network_missing(problem: BaseException) -> bool:
    """Whether the failure is that of a connection, made in the box."""
    for found in _chain(problem):
        if getattr(found, "_farhand_tool", False):
            return False
        if isinstance(found, (socket.gaierror, ConnectionError)):
            return not isinstance(found, BrokenPipeError)
        if isinstance(found, OSError) and found.errno in _NO_NETWORK:
            return True
    return False


def _trimmed(report: Any) -> None:
    """Take our own frames out of a TracebackException and of all it is chained to."""
    waiting: list[Any] = [report]
    seen: set[int] = set()
    while waiting:
        found = waiting.pop()
        if found is None or id(found) in seen:
            continue
        seen.add(id(found))
        found.stack[:] = [frame for frame in found.stack if frame.filename not in _OWN_FILES]
        waiting += [found.__cause__, found.__context__, *(getattr(found, "exceptions", None) or ())]


def traceback_of(problem: BaseException) -> str:
    """The traceback as Python prints it, without our frames, bounded."""
    try:
        report = traceback.TracebackException(type(problem), problem, problem.__traceback__)
        _trimmed(report)
        text = "".join(report.format())
    except Exception:
        text = f"{type(problem).__name__}: (its traceback cannot be shown)\n"
    return _clean(_middle_cut(text, TRACEBACK_CHARS))


def _message(problem: BaseException) -> str:
    try:
        return _clean(_middle_cut(str(problem), MESSAGE_CHARS - 200))
    except Exception:
        return "(its text cannot be shown)"


def error_of(problem: BaseException, tools: Sequence[str]) -> dict[str, Any]:
    """Why an action failed, as `done` says it."""
    error = _error("exception", _message(problem), type=type(problem).__name__[:200])
    if isinstance(problem, SystemExit):
        code = problem.code
        error["kind"], error["exit"] = "exit", code if isinstance(code, int) else 0 if code is None else 1
        return error
    error["traceback"] = traceback_of(problem)
    if isinstance(problem, KeyboardInterrupt):
        error["kind"] = "interrupted"
    elif getattr(problem, "_farhand_tool", False):
        if isinstance(problem, LimitReached) and "`tool_calls`" in error["message"]:
            error.update(kind="limit", limit="tool_calls")
    elif isinstance(problem, MemoryError):
        _limit_met(error, "memory_bytes", "Work on less at a time; the variables are still there.")
    elif isinstance(problem, OSError) and problem.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        _limit_met(error, _full_disk(), "Remove files that are not needed any more.")
    elif _too_many(problem, error["message"], error["traceback"]):
        _limit_met(error, "processes", "Start fewer processes and threads at a time.")
    elif network_missing(problem):
        error["hint"] = _network_hint(tools)
    if error["hint"]:
        error["traceback"] += f"Hint: {error['hint']}\n"
    return error


def _too_many(problem: BaseException, message: str, trace: str) -> bool:
    """Whether a process or thread could not be started because there are as many as there may be."""
    if isinstance(problem, BlockingIOError):
        return problem.errno == errno.EAGAIN and "fork" in trace
    return isinstance(problem, RuntimeError) and message == "can't start new thread"


def _limit_met(error: dict[str, Any], limit: str, hint: str) -> None:
    error["message"] = f"the limit `{limit}` was reached: {error['message'] or error['type']}"
    error.update(kind="limit", limit=limit, hint=hint)


def _full_disk() -> str:
    try:
        return "disk_files" if os.statvfs(".").f_favail == 0 else "disk_bytes"
    except OSError:
        return "disk_bytes"


def _network_hint(tools: Sequence[str]) -> str:
    listed = ", ".join(sorted(tools)[:30])
    instead = f"Call a tool instead: {listed}." if listed else "No tool is available that could reach it."
    return f"There is no network in this box. {instead}"


# ---- worker: running code ----

_AWAIT = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
_SIGINT = int(signal.SIGINT)
# Bound here because guest code may take them out of their modules.
_ANYTHING = BaseException
_settrace, _setprofile = sys.settrace, sys.setprofile
_loads, _dumps = json.loads, json.dumps
_PLAIN = frozenset((int, float, str, bytes, bool))
_COROUTINE = 0x80  # inspect.CO_COROUTINE; importing inspect takes longer than all of this file
_FUTURES = 0x1FE0000


class _Answered:
    """Sends what `final_answer` and `display` are given."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.result_bytes = 512 * KIB
        self.answers = 0

    def final_answer(self, answer: Any = None) -> Any:
        """Give the answer to the user's task. Returns it; the code goes on."""
        self.channel._require_own_process()
        self.answers += 1
        if self.answers > ANSWERS + 1:
            return answer
        tree, problem = None, None
        try:
            tree = value.encode(answer, name="the answer", max_bytes=self.result_bytes)
        except (ValueError, TypeError) as error:
            problem = str(error)
        try:
            shown = _fitting(repr(answer), REPR_CHARS)
        except Exception as error:
            shown = f"<{type(answer).__name__} whose repr raised {type(error).__name__}>"
        _flush_output()
        self.channel.send({"t": "answer", "value": tree, "repr": shown, "problem": problem and _clean(problem)}, True)
        return answer

    def display(self, *shown: Any) -> None:
        """Show values as they would be shown at the end of the code."""
        _flush_output()
        for each in shown:
            self.channel.send({"t": "display", "bundle": bundle_of(each)}, True)


def _flush_output() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:
            pass


class Output:
    """The two output streams, put back before and after each action whatever the guest did to them."""

    def __init__(self) -> None:
        self._spare = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 100) for fd in (1, 2)]
        self._same = [self._identity(fd) for fd in (1, 2)]
        self._streams = [self._stream(fd) for fd in (1, 2)]
        self.restore()

    @staticmethod
    def _identity(fd: int) -> tuple[int, int] | None:
        try:
            status = os.fstat(fd)
            return status.st_dev, status.st_ino
        except OSError:
            return None

    @staticmethod
    def _stream(fd: int) -> io.TextIOWrapper:
        raw = io.FileIO(fd, "wb", closefd=False)
        name = "<stdout>" if fd == 1 else "<stderr>"
        raw.name = name
        return io.TextIOWrapper(io.BufferedWriter(raw), "utf-8", errors="backslashreplace", line_buffering=True)

    def restore(self) -> None:
        for index, fd in enumerate((1, 2)):
            if self._identity(fd) != self._same[index]:
                os.dup2(self._spare[index], fd)
            stream = self._streams[index]
            if stream.closed or stream.__dict__:  # an attribute that was set hides a method
                stream = self._streams[index] = self._stream(fd)
            if index == 0:
                sys.stdout = sys.__stdout__ = stream  # type: ignore[misc]
            else:
                sys.stderr = sys.__stderr__ = stream  # type: ignore[misc]
        if getattr(sys.stdin, "closed", True):
            sys.stdin = sys.__stdin__ = os.fdopen(os.open(os.devnull, os.O_RDONLY), encoding="utf-8")  # type: ignore[misc]


_quieted: list[bool] = []


class Worker:
    """Holds the namespace and runs the actions, one at a time, in the main thread."""

    def __init__(self, sock: socket.socket) -> None:
        self._output = Output()
        self._channel = Channel(sock)
        self._tools = Tools(self._channel)
        self._imports = Imports()
        self._answered = _Answered(self._channel)
        self._main = types.ModuleType("__main__")
        self._main.__dict__.update(__builtins__=builtins, __file__=None)
        del self._main.__dict__["__file__"]
        self._loop: Any = None
        self._titles: deque[str] = deque()
        self._told: list[str] | None = None
        self._sent = self._at_start = self._at_end = 0
        self._injected: dict[str, Any] = {}
        self._space = vars(builtins)
        self._builtins: dict[str, Any] = {}
        self._on_sigint = self._channel.on_sigint  # one object, so that it can be recognised
        self._hooks: tuple[Any, Any] = (sys.excepthook, sys.displayhook)
        self._prepare()

    def _prepare(self) -> None:
        sys.modules["__main__"] = self._main
        sys.argv = [""]
        if self._imports.folder not in sys.path:
            sys.path.insert(0, self._imports.folder)
        random = sys.modules.get("random")
        if random is not None:
            random.seed()
        numpy_random = sys.modules.get("numpy.random")
        if numpy_random is not None:
            # Without a number it goes a long way through NumPy, and copies a quarter of a megabyte of pages on it.
            numpy_random.seed(int.from_bytes(os.urandom(4), "little"))
        os.environ.setdefault("MPLBACKEND", "Agg")
        if not _quieted:  # a zygote has done it for all its workers
            import warnings

            _quieted.append(True)
            warnings.filterwarnings("ignore", message=".*is non-interactive, and thus cannot be shown")
        if not hasattr(builtins, "exit"):  # python -S
            import _sitebuiltins

            builtins.exit = _sitebuiltins.Quitter("exit", "Ctrl-D (i.e. EOF)")
            builtins.quit = _sitebuiltins.Quitter("quit", "Ctrl-D (i.e. EOF)")
            builtins.help = _sitebuiltins._Helper()
        builtins.__import__ = self._imports
        for found in _OWN_ERRORS:
            setattr(builtins, found.__name__, found)
        self._inject({"final_answer": self._answered.final_answer, "display": self._answered.display})

    def _inject(self, names: dict[str, Any]) -> None:
        """Put functions where all code of the box finds them, and assignments of guest code only hide them. A tool that
        has the name of a built-in function goes into the namespace instead: libraries need the real one."""
        for name in self._injected:
            if getattr(builtins, name, None) is self._injected[name]:
                delattr(builtins, name)
        own = set(vars(builtins)) - {"display"}
        self._injected = {name: found for name, found in names.items() if name not in own}
        self._main.__dict__.update((name, found) for name, found in names.items() if name in own)
        for name, found in self._injected.items():
            setattr(builtins, name, found)
        self._builtins = dict(vars(builtins))

    def rehearse(self, tools: list[dict[str, Any]]) -> None:
        """Do once what every action does, with nobody at the other end. A forked worker copies the pages that it writes
        to: it shall have done so before anybody waits for it."""
        channel, title = self._channel, "<rehearsal>"
        sock, fd = channel._sock, channel._fd
        ours, theirs = socket.socketpair()
        channel._sock, channel._fd = ours, ours.fileno()
        try:
            theirs.sendall(dump_frame({"t": "hello", "limits": {}, "tools": tools, "imports": None}))
            theirs.sendall(dump_frame({"t": "run", "action": "", "code": "x = 1\nx + 1", "title": title}))
            self._hello(channel.next_frame())
            self._act(channel.next_frame())
        finally:
            channel._sock, channel._fd = sock, fd
            ours.close()
            theirs.close()
        del self._main.__dict__["x"]
        linecache.cache.pop(title, None)
        self._titles.clear()
        self._told = None
        self._rehearsed = True

    def serve(self) -> None:
        """Until the supervisor is gone."""
        while True:
            frame = self._channel.next_frame()
            if frame["t"] == "hello":
                self._hello(frame)
            elif frame["t"] == "run":
                self._act(frame)

    def _hello(self, frame: dict[str, Any]) -> None:
        result_bytes = int(frame["limits"].get("result_bytes", 512 * KIB))
        self._answered.result_bytes = min(result_bytes, value.MAX_VALUE_BYTES)
        self._imports.allow(frame.get("imports"))
        own = {"final_answer": self._answered.final_answer, "display": self._answered.display}
        self._inject({**own, **self._tools.make(frame["tools"], result_bytes), "final_answer": own["final_answer"]})
        self._channel.send({"t": "ready", "python": sys.version.split()[0]})

    # -- one action --

    def _act(self, frame: dict[str, Any]) -> None:
        self._restore()
        self._drop_stale_interrupt(frame.get("interrupts", 0))
        self._answered.answers = 0
        result: Any = None
        problem: BaseException | None = None
        try:
            steps = self._guarded(lambda: self._compiled(frame["code"], frame["title"]))
        except _ANYTHING as error:
            problem = error.with_traceback(None)
            self._report(frame["action"], None, problem, isinstance(error, SyntaxError))
            return
        try:
            result = self._guarded(lambda: self._execute(steps))
        except _ANYTHING as error:
            problem = error
        if self._channel.forked:
            _end_fork(problem)
        self._report(frame["action"], result, problem)

    def _drop_stale_interrupt(self, sent: int) -> None:
        """Forget a SIGINT that was meant for the action before and came when it had ended; keep one for this action.

        `sent` counts what the supervisor had sent before it sent this action.
        """
        channel = self._channel
        missing = max(0, sent - self._sent - (self._at_end - self._at_start))
        late = min(missing, channel.interrupts - self._at_end)
        self._sent, self._at_start = sent, self._at_end + late
        if channel.interrupts == self._at_start:
            channel.pending = False

    def _guarded(self, step: Callable[[], Any], restore: bool = False) -> Any:
        """Run what may run guest code: interrupts may come up in it. What it set up to trace calls ends with it."""
        channel = self._channel
        try:
            channel.gate = _OPEN_GATE
            if channel.pending:
                channel.pending = False
                raise KeyboardInterrupt
            return step()
        finally:
            channel.gate = _SHUT
            try:
                _settrace(None)
                _setprofile(None)
            except _ANYTHING:  # raised by what was traced by; it is gone now
                _settrace(None)
                _setprofile(None)
            if restore:
                self._restore()

    def _compiled(self, code: str, title: str) -> list[tuple[types.CodeType, bool]]:
        """The code and its trailing expression, each with whether it is one."""
        self._remember_source(title, code)
        try:
            tree = ast.parse(code, title)
        except RecursionError:
            raise SyntaxError("the code is nested too deeply to be compiled") from None
        last = tree.body[-1] if tree.body else None
        steps = []
        flags = _AWAIT
        if isinstance(last, ast.Expr):
            del tree.body[-1]
        if tree.body:
            body = compile(tree, title, "exec", flags, dont_inherit=True)
            flags |= body.co_flags & _FUTURES
            steps.append((body, False))
        if isinstance(last, ast.Expr):
            expression = ast.Expression(last.value)
            steps.append((compile(expression, title, "eval", flags, dont_inherit=True), True))
        return steps

    def _remember_source(self, title: str, code: str) -> None:
        lines = code.splitlines(True)
        if lines and not lines[-1].endswith("\n"):
            lines[-1] += "\n"
        if type(linecache.cache) is not dict:
            linecache.cache = {}
        linecache.cache[title] = (len(code), None, lines, title)
        self._titles.append(title)
        if len(self._titles) > SOURCES_KEPT:
            linecache.cache.pop(self._titles.popleft(), None)

    def _execute(self, steps: list[tuple[types.CodeType, bool]]) -> Any:
        """Plain code runs outside any loop; code with a top-level await runs inside one, all of it."""
        if any(code.co_flags & _COROUTINE for code, _ in steps):
            return self._awaited(self._execute_inside(steps))
        result = None
        for code, is_value in steps:
            found = eval(code, self._main.__dict__)
            if is_value:
                result = found
        return result

    async def _execute_inside(self, steps: list[tuple[types.CodeType, bool]]) -> Any:
        result = None
        for code, is_value in steps:
            found = eval(code, self._main.__dict__)
            if code.co_flags & _COROUTINE:
                found = await found
            if is_value:
                result = found
        return result

    def _awaited(self, coroutine: Any) -> Any:
        """Run a top-level await in the loop that is kept for it."""
        import asyncio

        loop = self._loop
        if loop is None or loop.is_closed():
            loop = self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        task = loop.create_task(coroutine)
        try:
            return loop.run_until_complete(task)
        except BaseException:
            if not task.done():  # interrupted: nobody will wait for it again
                task.cancel()
                try:
                    loop.run_until_complete(task)
                except BaseException:
                    pass
            raise
        finally:
            asyncio.set_event_loop(None)

    def _restore(self) -> None:
        """Undo what guest code did to the interpreter that the next action, or our own code, could not bear."""
        if self._space != self._builtins:  # first: without them nothing below can run
            self._space.clear()
            self._space.update(self._builtins)
        if sys.getrecursionlimit() < 1000:
            sys.setrecursionlimit(1000)
        self._main.__dict__["__builtins__"] = builtins
        self._main.__dict__["__name__"] = "__main__"
        sys.modules["__main__"] = self._main
        sys.excepthook, sys.displayhook = self._hooks
        if self._rehearsed:
            self._hear()
        self._output.restore()

    def _hear(self) -> None:
        """Take interrupts."""
        # The functions of `signal` make enums of what they return, which takes longer than all the rest of `_restore`.
        if _signal.getsignal(_SIGINT) is not self._on_sigint:
            _signal.signal(_SIGINT, self._on_sigint)
        _signal.pthread_sigmask(signal.SIG_UNBLOCK, (_SIGINT,))

    # -- its end --

    def _report(self, action: str, result: Any, problem: BaseException | None, syntax: bool = False) -> None:
        shown: dict[str, str] | None = None
        error: dict[str, Any] | None = None
        self._restore()
        if problem is None and result is not None:
            try:
                shown = bundle_of(result) if type(result) in _PLAIN else self._guarded(lambda: bundle_of(result), True)
            except BaseException as failure:
                problem = failure
        if problem is not None:
            try:
                error = self._guarded(functools.partial(error_of, problem, self._tools.names), True)
                if syntax:
                    error["kind"] = "syntax"
            except BaseException as failure:
                kind = "interrupted" if isinstance(failure, KeyboardInterrupt) else "exception"
                error = _error(kind, "(its text cannot be shown)", type=type(problem).__name__[:200])
        if "matplotlib.pyplot" in sys.modules:
            try:
                self._guarded(lambda: self._show_figures(result if problem is None else None), True)
            except BaseException:
                pass
        if self._channel.forked:
            _end_fork(problem)
        result = problem = None
        _flush_output()
        frame: dict[str, Any] = {"t": "done", "action": action, "ok": error is None, "value": shown, "error": error}
        names = self._names()
        if names != self._told:
            frame["names"] = self._told = names
        self._channel.pending = False
        self._at_end = self._channel.interrupts
        self._channel.send(frame)

    def _show_figures(self, shown: Any) -> None:
        """Open figures of pyplot, which are then closed. One that is the action's value has been shown."""
        pyplot = sys.modules.get("matplotlib.pyplot")
        numbers = pyplot.get_fignums() if pyplot is not None else ()
        for number in numbers:
            assert pyplot is not None
            figure = pyplot.figure(number)
            try:
                if figure is not shown and figure.get_axes():
                    self._channel.send({"t": "display", "bundle": bundle_of(figure)}, True)
            finally:
                pyplot.close(figure)

    def _names(self) -> list[str]:
        names = []
        space: dict[Any, Any] = self._main.__dict__
        for name in space:
            if isinstance(name, str) and not name.startswith("_"):
                names.append(_clean(name[:NAME_CHARS]))
                if len(names) >= NAMES_KEPT:
                    break
        return names


def _end_fork(problem: BaseException | None) -> NoReturn:
    """A child that the guest forked has come to the end of the action's code: it ends like a program."""
    status = 0
    if isinstance(problem, SystemExit):
        status = problem.code if isinstance(problem.code, int) else 0 if problem.code is None else 1
    elif problem is not None:
        status = 1
        try:
            sys.stderr.write(traceback_of(problem))
        except BaseException:
            pass
    _flush_output()
    os._exit(status & 0xFF)


PRELOAD = ("asyncio", "inspect", "linecache", "traceback", "warnings", "random", "importlib.machinery", "_sitebuiltins")
"""What a worker comes to need; a zygote imports it before it forks."""


def practise() -> None:
    """In a zygote: run actions in workers that are then forgotten. What comes into being at its first use, or what the
    interpreter writes during the first dozen, is then shared by all workers instead of copied by each."""
    handler = signal.getsignal(signal.SIGINT)
    ours, theirs = socket.socketpair()
    for _ in range(REHEARSALS):
        _rehearse_once(ours)
    signal.signal(signal.SIGINT, handler)
    ours.close()
    theirs.close()


def _rehearse_once(sock: socket.socket) -> None:
    space, before = vars(builtins), dict(vars(builtins))
    kept = sys.modules["__main__"], sys.argv, sys.path[:], sys.stdin
    streams = sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__
    try:
        worker = Worker(sock)
        x = {"name": "x", "kind": "positional_or_keyword", "annotation": "int", "default": None}
        worker.rehearse([{"name": "rehearsal", "doc": "", "is_async": False, "params": [x], "returns": "int"}])
        for spare in worker._output._spare:
            os.close(spare)
    finally:
        for name in [name for name in space if name not in before]:
            del space[name]
        space.update(before)
        sys.modules["__main__"], sys.argv, sys.path[:], sys.stdin = kept
        sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__ = streams  # type: ignore[misc]


def worker_main(fd: int) -> NoReturn:
    """Be the worker whose channel is the stream socket `fd`. Descriptors 0 to 2 are in place. Ends the process."""
    # The first action may have been sent already, and an interrupt of it: that is heard once the rehearsal is over.
    _signal.pthread_sigmask(signal.SIG_BLOCK, (_SIGINT,))
    try:
        worker = Worker(socket.socket(fileno=fd))
        os.register_at_fork(after_in_child=worker._channel._after_fork)
        worker.rehearse([])
        worker._hear()
        while True:
            try:
                worker.serve()
            except KeyboardInterrupt:
                continue
    except _ANYTHING as problem:
        os.write(2, f"the worker failed: {traceback_of(problem)}".encode())
    finally:
        os._exit(1)


# ---- the roles in a box that has no host ----


def _children(pid: int) -> list[int]:
    found: list[int] = []
    try:
        with open(f"/proc/{pid}/task/{pid}/children", "rb", 0) as file:
            found += map(int, file.read().split())
        if os.stat(f"/proc/{pid}/task").st_nlink > 3:  # more threads than one, each with children of its own
            for task in os.listdir(f"/proc/{pid}/task"):
                if task != str(pid):
                    with open(f"/proc/{pid}/task/{task}/children", "rb", 0) as file:
                        found += map(int, file.read().split())
    except (OSError, ValueError):
        pass
    return found


def descendants(pid: int) -> list[int]:
    """All processes below `pid`, parents first. Those whose parent ended are found where a subreaper stands above."""
    found: list[int] = []
    waiting = _children(pid)
    while waiting and len(found) < 100_000:
        each = waiting.pop()
        found.append(each)
        waiting += _children(each)
    return found


def end_tree(pid: int) -> None:
    """SIGKILL to everything below `pid`, until nothing new appears. All are stopped first: none forks meanwhile."""
    ended: set[int] = set()
    for _ in range(20):
        found = [each for each in descendants(pid) if each not in ended]
        if not found:
            return
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for each in found:
                _send_signal(each, number)
        ended.update(found)


def _send_signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        pass


class ProcessHands:
    """`Hands` over a worker that is a child of this process, and everything below it."""

    sampling = True

    def __init__(self, worker: int, workspace: int) -> None:
        self._worker = worker
        self._files = DirectoryFiles(workspace)
        self._cpu: dict[int, float] = {}
        self._gone_s = 0.0
        self._page = os.sysconf("SC_PAGE_SIZE")
        self._memory_limit: float | None = None
        # Most boxes are one process with one thread: three kept files tell that, and its memory, in few calls.
        me = os.getpid()
        paths = (f"{me}/task/{me}/children", f"{worker}/task/{worker}/children", f"{worker}/statm")
        self._kept = [os.open(f"/proc/{path}", os.O_RDONLY | os.O_CLOEXEC) for path in paths]

    def interrupt(self) -> None:
        _send_signal(self._worker, signal.SIGINT)

    def kill(self) -> None:
        end_tree(os.getpid())

    def suspend(self) -> None:
        for pid in descendants(os.getpid()):
            _send_signal(pid, signal.SIGSTOP)

    def resume(self) -> None:
        for pid in descendants(os.getpid()):
            _send_signal(pid, signal.SIGCONT)

    def files(self) -> DirectoryFiles:
        return self._files

    def apply(self, limits: dict[str, Any]) -> None:
        """One allocation beyond the memory limit fails at once, which code can catch; the sum is watched by `usage`."""
        import resource

        self._memory_limit = limits.get("memory_bytes")
        bounds = []
        if self._memory_limit is not None:
            bounds.append((resource.RLIMIT_DATA, int(self._memory_limit) + 256 * 1024 * KIB))
        if limits.get("disk_bytes") is not None:
            bounds.append((resource.RLIMIT_FSIZE, int(limits["disk_bytes"])))
        for kind, bound in bounds:
            try:
                resource.prlimit(self._worker, kind, (bound, resource.prlimit(self._worker, kind)[1]))
            except (OSError, ValueError):
                pass

    def usage(self) -> Usage:
        alone = self._alone()
        if alone is not None and len(self._cpu) <= 1:
            return alone
        memory = processes = 0
        now: dict[int, float] = {}
        for pid in descendants(os.getpid()):
            try:
                now[pid] = _cpu_s(pid)
                with open(f"/proc/{pid}/statm", "rb", 0) as file:
                    memory += self._memory(file.read())
                processes += os.stat(f"/proc/{pid}/task").st_nlink - 2
            except (OSError, IndexError):
                continue
        self._gone_s += sum(used for pid, used in self._cpu.items() if pid not in now)
        self._cpu = now
        if self._memory_limit is not None and memory > self._memory_limit and len(now) > 1:
            memory = sum(self._proportional(pid) for pid in now)  # forks share pages, which were counted for each
        return Usage(memory, self._gone_s + sum(now.values()), processes)

    def _alone(self) -> Usage | None:
        """The worker's usage, if it has no other threads and no children, and nothing else was left behind."""
        mine, below, statm = self._kept
        try:
            if os.pread(mine, 64, 0).split() != [b"%d" % self._worker] or os.pread(below, 64, 0):
                return None
            if os.stat(f"/proc/{self._worker}/task").st_nlink != 3:
                return None
            self._cpu = {self._worker: _cpu_s(self._worker)}
            return Usage(self._memory(os.pread(statm, 100, 0)), self._gone_s + self._cpu[self._worker], 1)
        except (OSError, IndexError):
            return None

    def _memory(self, statm: bytes) -> int:
        sizes = statm.split()
        return (int(sizes[1]) - int(sizes[2])) * self._page

    @staticmethod
    def _proportional(pid: int) -> int:
        try:
            with open(f"/proc/{pid}/smaps_rollup") as file:
                for line in file:
                    if line.startswith("Pss:"):
                        return int(line.split()[1]) * KIB
        except (OSError, ValueError, IndexError):
            pass
        return 0


def _cpu_s(pid: int) -> float:
    """Processor seconds of all threads of a process, by its own clock (clock_getcpuclockid)."""
    return time.clock_gettime((~pid << 3) | 2)


_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 1, 4, 36


def _prctl(option: int, argument: int) -> None:
    import ctypes

    ctypes.CDLL(None, use_errno=True).prctl(option, argument, 0, 0, 0)


def _spawn_worker(config: dict[str, Any]) -> tuple[int, socket.socket, int, int]:
    """Fork the worker: its pid, our end of its channel, the read ends of its output pipes."""
    ours, theirs = socket.socketpair()
    out, err = os.pipe(), os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        theirs.close()
        os.close(out[1])
        os.close(err[1])
        return pid, ours, out[0], err[0]
    try:
        os.setsid()
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        null = os.open(os.devnull, os.O_RDONLY)
        fd = fcntl.fcntl(theirs.detach(), fcntl.F_DUPFD_CLOEXEC, 50)
        for target, source in enumerate((null, out[1], err[1])):
            os.dup2(source, target)
        os.closerange(3, fd)
        os.closerange(fd + 1, 4096)
        os.dup2(fd, 3, inheritable=False)
        os.close(fd)
        sys.path[:0] = config.get("path", [])
        worker_main(3)
    finally:
        os._exit(1)


class BoxServer:
    """The supervisor's role in a box without a host: one worker below it, one listening socket for harnesses.

    `config`: `path` for sys.path, `packages` for `ready`, `record` the file by which a harness finds it, `orphan_s`.
    """

    def __init__(self, folder: str, config: dict[str, Any]) -> None:
        self._folder = folder
        self._orphan_s = float(config.get("orphan_s", ORPHAN_S))
        self._record: str | None = config.get("record")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(os.path.join(folder, "socket"))
        self._listener.listen(16)
        self._listener.setblocking(False)
        os.chdir(os.path.join(folder, "workspace"))
        workspace = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self._worker, frames, out, err = _spawn_worker(config)
        _prctl(_PR_SET_DUMPABLE, 0)
        self._reactor = Reactor()
        hands = ProcessHands(self._worker, workspace)
        self._supervisor = Supervisor(self._reactor, hands, frames, out, err, config.get("packages"))
        self._wake, wakes = socket.socketpair()
        self._wake.setblocking(False)
        wakes.setblocking(False)
        self._wakes = wakes
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)

    def run(self) -> None:
        self._reactor.watch(self._listener.fileno(), READ, self._accept)
        self._reactor.watch(self._wake.fileno(), READ, self._reap)
        self._reactor.call_later(LOOK_S, self._look)
        try:
            self._reactor.run()
        finally:
            end_tree(os.getpid())

    def _accept(self, mask: int) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        self._supervisor.connect(sock)

    def _reap(self, mask: int) -> None:
        try:
            self._wake.recv(4096)
        except BlockingIOError:
            pass
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._worker:
                self._supervisor.ended(os.WEXITSTATUS(status) if os.WIFEXITED(status) else -os.WTERMSIG(status))

    def _look(self) -> None:
        """A box ends itself and leaves nothing when no harness can find it, or has asked for anything for long."""
        supervisor = self._supervisor
        idle = not supervisor.connected and time.monotonic() - supervisor.used > self._orphan_s
        if idle or (self._record is not None and not os.path.exists(self._record)):
            import shutil

            end_tree(os.getpid())
            shutil.rmtree(self._folder, ignore_errors=True)
            self._reactor.stop()
            return
        self._reactor.call_later(LOOK_S, self._look)


def serve_box(folder: str) -> None:
    """Start the supervisor of the box in `folder` (box.json, workspace), detached; its pid goes to stdout."""
    with open(os.path.join(folder, "box.json"), encoding="utf-8") as file:
        config = json.load(file)
    if os.fork():
        os._exit(0)
    os.setsid()
    told = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.set_inheritable(told, False)
    server = BoxServer(folder, config)
    os.write(told, f"{os.getpid()}\n".encode("ascii"))
    os.close(told)
    server.run()


def attach_box(folder: str) -> None:
    """Bridge stdin and stdout to the box's socket, for machines that can only run a command in a box."""
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(os.path.join(folder, "socket"))

    def upward() -> None:
        data = os.read(0, READ_BYTES)
        while data:
            sock.sendall(data)
            data = os.read(0, READ_BYTES)
        sock.shutdown(socket.SHUT_WR)

    threading.Thread(target=upward, daemon=True).start()
    data = sock.recv(READ_BYTES)
    while data:
        _write_fully(1, data)
        data = sock.recv(READ_BYTES)


def _write_fully(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]


def main(argv: Sequence[str]) -> int:
    """`supervisor FOLDER` or `attach FOLDER`."""
    roles = {"supervisor": serve_box, "attach": attach_box}
    if len(argv) != 2 or argv[0] not in roles:
        sys.stderr.write("usage: supervisor FOLDER | attach FOLDER\n")
        return 2
    roles[argv[0]](argv[1])
    return 0
