"""The host: one process of a user that plays the supervisor for all boxes of a home folder, outside their walls.

One thread and one reactor. Nothing here waits for a box, and nothing a box sends decides more than its own end.
Harnesses come and go; a box that no harness is attached to is swept after a while, and without boxes and connections
the host ends.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from farhand.errors import FarhandError, Fenced, ProtocolViolation, SandboxError, SandboxLost
from farhand.sandbox.local import lifecycle, request
from farhand.sandbox.local.cgroup import Cgroups
from farhand.sandbox.local.hosted import HostedBox
from farhand.sandbox.local.lifecycle import LOG_BYTES, Options
from farhand.sandbox.local.pool import Pool, Starter
from farhand.sandbox.local.request import Outfit, Request
from farhand.sandbox.runner.bounds import FRAME_BYTES, READ_BYTES
from farhand.sandbox.runner.reactor import READ, WRITE, Reactor

CALLERS = 4000
ACCEPTED_AT_ONCE = 64
PATIENCE_S = 60.0
"""For a connection that asks nothing."""
LOOK_S = 5.0
"""Between two looks for what has to be swept; shorter when the bounds are."""
ENVIRONMENT_IDLE_S = 600.0
"""A zygote that nobody wanted a box of is ended after that long."""
SESSIONS_REMEMBERED = 10_000
STOP_S = 5.0
_held: list[IO[str]] = []


class Caller:
    """One connection of a harness, until it becomes a box's channel."""

    def __init__(self, host: Host, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._host = host
        self._reactor = host.reactor
        self._sock = sock
        self._data = bytearray()
        self._out = memoryview(b"")
        self._pending = self._last = False
        self.closed = False
        self.heard = time.monotonic()

    def begin(self) -> None:
        """Who connects usually asks at once: its request is taken without another turn of the reactor."""
        self._mask()
        self._ready(READ)

    @property
    def idle(self) -> bool:
        return not self._pending and not self._out

    def _mask(self) -> None:
        if not self.closed:
            full = len(self._data) > request.REQUEST_BYTES + FRAME_BYTES
            mask = (0 if full or self._last else READ) | (WRITE if self._out else 0)
            self._reactor.watch(self._sock.fileno(), mask, self._ready)

    def _ready(self, mask: int) -> None:
        try:
            if mask & WRITE:
                self._flush()
            if mask & READ and not self.closed:
                self._receive()
        except Exception as error:
            self._host.log("a request failed", error)
            self.answer(request.failure(error))
            self.finish()

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
        self.heard = time.monotonic()
        self._data += data
        self._next()

    def _next(self) -> None:
        """Take the next request, one at a time."""
        while not self._pending and not self.closed and not self._last:
            end = self._data.find(b"\n")
            if end < 0 and len(self._data) > request.REQUEST_BYTES:
                self.answer(request.failure(ProtocolViolation("a request that does not end")))
                self.finish()
            if end < 0:
                break
            line = bytes(self._data[: end + 1])
            del self._data[: end + 1]
            self._pending = True
            try:
                self._host.perform(self, request.parse(line))
            except FarhandError as error:
                self.answer(request.failure(error))
                if isinstance(error, ProtocolViolation):
                    self.finish()
        self._mask()

    def answer(self, message: dict[str, Any]) -> None:
        self._pending = False
        if not self.closed:
            self._out = memoryview(bytes(self._out) + request.dump(message))
            self._flush()
            self._reactor.call_soon(self._go_on)

    def _go_on(self) -> None:
        if not self.closed:
            self._next()

    def fail(self, error: Exception) -> None:
        self.answer(request.failure(error))

    def finish(self) -> None:
        """Close once everything is sent."""
        self._last = True
        self._flush()

    def _flush(self) -> None:
        try:
            while self._out and not self.closed:
                self._out = self._out[self._sock.send(self._out) :]
        except BlockingIOError:
            pass
        except OSError:
            self.close()
        if self._last and not self._out:
            self.close()
        self._mask()

    def become_channel(self, box: HostedBox, message: dict[str, Any]) -> None:
        """Answer, and let the box's supervisor have the connection with what was read of it already."""
        try:
            line = request.dump(message)
            whole = not self._out and self._sock.send(line) == len(line)
        except OSError:
            whole = False
        if not whole:
            self.close()
            return
        self._leave()
        box.supervisor.connect(self._sock, bytes(self._data))

    def close(self) -> None:
        if not self.closed:
            self._leave()
            self._sock.close()

    def _leave(self) -> None:
        self.closed = True
        self._reactor.watch(self._sock.fileno(), 0, self._ready)
        self._host.left(self)


class Host:
    """Serves one listening socket until it is told to stop or has been idle for long enough."""

    def __init__(self, listening: socket.socket, options: Options) -> None:
        self.reactor = Reactor()
        self.options = options
        self._listening = listening
        self._cgroups = Cgroups.open()
        self._starter = Starter(self.reactor)
        self._pools: dict[Outfit, Pool] = {}
        self._boxes: dict[str, HostedBox] = {}
        self._callers: set[Caller] = set()
        self._claims: OrderedDict[str, int] = OrderedDict()
        self._since = self._started = time.monotonic()
        self._logged = 0
        self._operations: dict[str, Callable[[Caller, Request], None]] = {
            "create": self._create,
            "list": self._list,
            "channel": self._channel,
            "suspend": self._suspend,
            "resume": self._resume,
            "destroy": self._destroy,
            "status": self._status,
            "stop": self._stop,
        }

    def serve(self) -> None:
        self.reactor.watch(self._listening.fileno(), READ, self._accept)
        self._look()
        self.reactor.run()

    def stop(self) -> None:
        self.reactor.stop()

    def close(self) -> None:
        """End every box and every zygote; leave no control group."""
        self.reactor.watch(self._listening.fileno(), 0, self._accept)
        self._listening.close()
        for caller in list(self._callers):
            caller.close()
        for box in list(self._boxes.values()):
            box.destroy()
        for pool in self._pools.values():
            pool.drop_ready()
        deadline = time.monotonic() + STOP_S
        while any(pool.holds for pool in self._pools.values()) and time.monotonic() < deadline:
            self.reactor.step(0.1)
        for pool in self._pools.values():
            pool.close()
        if self._cgroups is not None:
            self._cgroups.close()

    def log(self, what: str, error: BaseException) -> None:
        """To standard error, bounded: it is a file in the home folder."""
        text = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {os.getpid()} {what}: {error}\n"
        if not isinstance(error, FarhandError):
            text += "".join(traceback.format_exception(error))
        if self._logged < LOG_BYTES:
            self._logged += len(text)
            sys.stderr.write(text[:LOG_BYTES])
            sys.stderr.flush()

    # -- connections --

    def _accept(self, mask: int) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                sock, _ = self._listening.accept()
            except BlockingIOError:
                return
            except OSError as error:
                self.log("a connection was not accepted", error)
                return
            if lifecycle.peer_uid(sock) != os.geteuid() or len(self._callers) >= CALLERS:
                sock.close()
            else:
                caller = Caller(self, sock)
                self._callers.add(caller)
                caller.begin()

    def left(self, caller: Caller) -> None:
        self._callers.discard(caller)

    def perform(self, caller: Caller, asked: Request) -> None:
        """Raises what the answer shall say, or answers now or later."""
        self._operations[asked.operation](caller, asked)

    # -- operations --

    def _create(self, caller: Caller, asked: Request) -> None:
        assert asked.outfit is not None
        labels = dict(asked.labels)
        self._require_newest(labels.get("session"), asked.generation)
        pool = self._pools.get(asked.outfit)
        if pool is None:
            pool = Pool(
                self.reactor, self._starter, asked.outfit, self._cgroups, self.options.pool, self._busy, self.log
            )
            self._pools[asked.outfit] = pool
        pool.take(asked.spec, lambda result: self._created(caller, asked, result))

    def _created(self, caller: Caller, asked: Request, box: HostedBox | FarhandError) -> None:
        if isinstance(box, FarhandError):
            caller.fail(box)
            return
        try:
            self._require_newest(dict(asked.labels).get("session"), asked.generation)
        except Fenced as error:
            caller.fail(error)
            box.destroy()
            return
        if caller.closed:
            box.destroy()  # whoever asked has gone without knowing its name
            return
        box.give(dict(asked.labels), asked.generation or 0)
        self._boxes[box.id] = box
        answer = {"ok": True, "box": box.describe()}
        if asked.attach:
            caller.become_channel(box, answer)
        else:
            caller.answer(answer)

    def _list(self, caller: Caller, asked: Request) -> None:
        wanted = set(asked.labels)
        boxes = [box.describe() for box in self._boxes.values() if wanted <= set(box.labels.items())]
        caller.answer({"ok": True, "boxes": boxes})

    def _channel(self, caller: Caller, asked: Request) -> None:
        box = self._found(asked)
        caller.become_channel(box, {"ok": True, "box": box.describe()})

    def _suspend(self, caller: Caller, asked: Request) -> None:
        self._found(asked).suspend()
        caller.answer({"ok": True})

    def _resume(self, caller: Caller, asked: Request) -> None:
        self._found(asked).supervisor.resume()
        caller.answer({"ok": True})

    def _destroy(self, caller: Caller, asked: Request) -> None:
        box = self._boxes.get(asked.box)
        if box is None:
            caller.answer({"ok": True})
            return
        self._require_newest(box.session, asked.generation)
        del self._boxes[box.id]
        box.destroy(lambda: caller.answer({"ok": True}))

    def _status(self, caller: Caller, asked: Request) -> None:
        caller.answer(
            {
                "ok": True,
                "pid": os.getpid(),
                "seconds": round(time.monotonic() - self._started, 1),
                "boxes": len(self._boxes),
                "attached": sum(box.supervisor.connected for box in self._boxes.values()),
                "running": sum(box.supervisor.running is not None for box in self._boxes.values()),
                "groups": sorted(self._cgroups.controllers) if self._cgroups else [],
                "environments": [pool.describe() for pool in self._pools.values()],
            }
        )

    def _stop(self, caller: Caller, asked: Request) -> None:
        if self._boxes and not asked.force:
            raise SandboxError(f"{len(self._boxes)} boxes are alive", hint="--force ends them.")
        caller.answer({"ok": True})
        self.stop()

    def _found(self, asked: Request) -> HostedBox:
        box = self._boxes.get(asked.box)
        if box is None:
            raise SandboxLost(f"there is no box {asked.box[:100]}")
        self._require_newest(box.session, asked.generation)
        return box

    def _require_newest(self, session: str | None, generation: int | None) -> None:
        """Fenced, if a request speaks for an older claim of its session than one heard of. Remembers newer ones."""
        if session is None or generation is None:
            return
        newest = max(
            [self._claims.get(session, 0)] + [box.newest for box in self._boxes.values() if box.session == session]
        )
        if generation < newest:
            raise Fenced(f"generation {newest} drives the session {session[:100]}, this was asked by {generation}")
        self._claims[session] = generation
        self._claims.move_to_end(session)
        if len(self._claims) > SESSIONS_REMEMBERED:
            self._claims.popitem(last=False)

    def _busy(self) -> bool:
        return any(box.supervisor.running is not None for box in self._boxes.values())

    # -- sweeping --

    def _look(self) -> None:
        """Every few seconds: what nobody wants any more goes."""
        now = time.monotonic()
        for box in list(self._boxes.values()):
            if box.supervisor.connected:
                box.seen = now
            elif now - box.seen > self.options.sweep_s:
                del self._boxes[box.id]
                box.destroy()
        for caller in list(self._callers):
            if caller.idle and now - caller.heard > PATIENCE_S:
                caller.close()
        for outfit, pool in list(self._pools.items()):
            if pool.live:
                pool.used = now
            elif now - pool.used > ENVIRONMENT_IDLE_S:
                del self._pools[outfit]
                pool.close()
        if self._boxes or self._callers:
            self._since = now
        elif now - self._since >= self.options.idle_s:
            self.stop()
        least = min(LOOK_S, self.options.sweep_s / 4, self.options.idle_s / 4)
        self.reactor.call_later(max(0.01, least), self._look)


def main(arguments: list[str]) -> None:
    """What `lifecycle` starts: home folder, options, and the descriptor to say "ready", "held" or the reason on."""
    home, options, told = Path(arguments[0]), Options.from_text(arguments[1]), int(arguments[2])
    os.set_inheritable(told, False)

    def tell(word: str) -> None:
        os.write(told, word.encode()[:4000])
        os.close(told)

    try:
        run(home, options, tell)
    except FarhandError as error:
        tell(error.message)
        os._exit(1)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def run(home: Path, options: Options, tell: Callable[[str], None]) -> None:
    """Be the host of `home`, in the main thread. `tell` is called once, with "ready" or "held"."""
    os.umask(0o022)  # boxes inherit it; what is private here is made so by name
    lock = lifecycle.hold(home)
    if lock is None:
        tell("held")
        return
    # Held until the process ends: who gets it next finds nothing of this host.
    _held.append(lock)
    _trim_log(home)
    _raise_file_limit()
    listening, path = lifecycle.listen(home, lock)
    try:
        _serve(Host(listening, options), tell)
    finally:
        lifecycle.forget(path, lock)


def _serve(host: Host, tell: Callable[[str], None]) -> None:
    wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    host.reactor.watch(wake, READ, lambda mask: host.stop())
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: os.eventfd_write(wake, 1))
    try:
        tell("ready")
        host.serve()
    except BaseException as error:
        host.log("the host ends", error)
        raise
    finally:
        host.close()


def _trim_log(home: Path) -> None:
    log = lifecycle.log_file(home)
    if log.exists() and log.stat().st_size > LOG_BYTES:
        os.truncate(log, 0)


def _raise_file_limit() -> None:
    """Every box takes nine descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    main(sys.argv[1:])
