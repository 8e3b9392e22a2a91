"""A box in the host's care: its processes, its supervisor, its labels, up to the last closed descriptor."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

from farhand.sandbox.local.cgroup import BoxCgroup
from farhand.sandbox.local.hands import JailHands
from farhand.sandbox.local.zygote import BoxHandles, BoxSpec
from farhand.sandbox.runner.reactor import READ, Reactor, Timer
from farhand.sandbox.runner.supervisor import Supervisor

STATUS_BYTES = 4096

Log = Callable[[str, BaseException], None]


def new_box_id() -> str:
    return f"sbx_{secrets.token_hex(8)}"


class BoxReactor(Reactor):
    """The host's reactor as one box's supervisor sees it: an exception in its callbacks ends that box, and no other."""

    def __init__(self, shared: Reactor, failed: Callable[[BaseException], None]) -> None:
        # Not the parent's: this one has no descriptors and timers of its own.
        self._shared = shared
        self._failed = failed
        self._known: dict[int, tuple[int, Callable[[int], None], Callable[[int], None]]] = {}

    def watch(self, fd: int, mask: int, callback: Callable[[int], None]) -> None:
        known = self._known.get(fd)
        if known is not None and known[1] == callback:
            if known[0] == mask:
                return
            guarded = known[2]
        else:
            guarded = self._guarded(callback)
        if mask:
            self._known[fd] = (mask, callback, guarded)
        else:
            self._known.pop(fd, None)
        self._shared.watch(fd, mask, guarded)

    def _guarded(self, callback: Callable[[int], None]) -> Callable[[int], None]:
        def guarded(ready: int) -> None:
            try:
                callback(ready)
            except Exception as error:
                self._failed(error)

        return guarded

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Timer:
        return self._shared.call_later(delay_s, lambda: self._guard(callback))

    def call_soon(self, callback: Callable[[], None]) -> None:
        self._shared.call_soon(lambda: self._guard(callback))

    def _guard(self, callback: Callable[[], None]) -> None:
        try:
            callback()
        except Exception as error:
            self._failed(error)


class HostedBox:
    """One box. It is kept with its frames and files after its worker has ended, until it is destroyed."""

    def __init__(
        self,
        reactor: Reactor,
        box_id: str,
        handles: BoxHandles,
        spec: BoxSpec,
        group: BoxCgroup | None,
        packages: dict[str, str],
        python: str,
        log: Log,
    ) -> None:
        self.id = box_id
        self.spec = spec
        self.labels: Mapping[str, str] = {}
        self.generation = 0
        """What the harness that made the box, or the latest that asked something of it, called its claim."""
        self.seen = time.monotonic()
        """When a harness was last known to be attached."""
        self.on_gone: Callable[[HostedBox], None] = lambda box: None
        self._handles = handles
        self._group = group
        self._log = log
        self._status = b""
        self._gone = self._destroyed = False
        self._waiting: list[Callable[[], None]] = []
        self.hands = JailHands(handles, spec, group)
        frames, stdout, stderr = handles.frames, handles.stdout, handles.stderr
        handles.frames = handles.stdout = handles.stderr = -1
        self._reactor = BoxReactor(reactor, self._failed)
        sock = socket.socket(fileno=frames)
        self.supervisor = Supervisor(self._reactor, self.hands, sock, stdout, stderr, packages, python)
        os.set_blocking(handles.status, False)
        self._reactor.watch(handles.status, READ, self._status_ready)
        self._reactor.watch(handles.init_pidfd, READ, self._init_ended)

    @property
    def session(self) -> str | None:
        return self.labels.get("session")

    @property
    def ended(self) -> bool:
        return self.supervisor.dead is not None

    @property
    def newest(self) -> int:
        """The highest generation this box has heard of."""
        return max(self.generation, self.supervisor.generation)

    def give(self, labels: Mapping[str, str], generation: int) -> None:
        """Hand the box over to a session."""
        self.labels, self.generation = labels, generation
        self.seen = time.monotonic()

    def describe(self) -> dict[str, Any]:
        return {"id": self.id, "labels": dict(self.labels), "ended": self.ended, "suspended": self.supervisor.suspended}

    def suspend(self) -> None:
        try:
            self.supervisor.suspend()
        except BaseException:
            self.supervisor.suspended = False
            raise

    def destroy(self, done: Callable[[], None] = lambda: None) -> None:
        """End every process and let go of disk and memory; `done` once nothing is left."""
        self._waiting.append(done)
        if not self._destroyed:
            self._destroyed = True
            self.supervisor.close()
            self.hands.kill()
        if self._gone:
            self._release()

    # -- how it ends --

    def _failed(self, error: BaseException) -> None:
        self._log(f"box {self.id} is given up", error)
        self.destroy()

    def _status_ready(self, mask: int) -> None:
        try:
            data = os.read(self._handles.status, STATUS_BYTES)
        except BlockingIOError:
            return
        self._status += data
        if data and b"\n" not in self._status:
            return
        self._reactor.watch(self._handles.status, 0, self._status_ready)
        self._worker_ended()

    def _worker_ended(self) -> None:
        if self._destroyed:
            return
        full = self.hands.filled or (self._group is not None and self._group.oom_kills() > 0)
        self.supervisor.ended(_exit_of(self._status), "memory_bytes" if full else None)

    def _init_ended(self, mask: int) -> None:
        """No process of the box is left: the kernel ends them all before it says so of the first."""
        handles = self._handles
        self._reactor.watch(handles.init_pidfd, 0, self._init_ended)
        self._status_ready(READ)
        self._reactor.watch(handles.status, 0, self._status_ready)
        self._worker_ended()
        self._gone = True
        self.hands.gone()
        if self._group is not None and not self._group.remove():
            self._log(f"the control group of {self.id} cannot be removed", OSError("it is not empty"))
        for name in ("init_pidfd", "worker_pidfd", "status"):
            os.close(getattr(handles, name))
            setattr(handles, name, -1)
        self.on_gone(self)
        if self._destroyed:
            self._release()

    def _release(self) -> None:
        self._handles.close()
        waiting, self._waiting = self._waiting, []
        for done in waiting:
            done()


def _exit_of(status: bytes) -> int:
    """Exit code of the worker, or minus its signal. Init's own word; without one the box was ended whole."""
    try:
        told = json.loads(status)
        if told.get("signal"):
            return -int(told["signal"])
        if told.get("exit") is not None:
            return int(told["exit"])
    except (ValueError, AttributeError, TypeError):
        pass
    return -signal.SIGKILL
