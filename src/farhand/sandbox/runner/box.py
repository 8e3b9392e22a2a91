"""The roles in a box that has no host: the supervisor over one worker, and the bridge to its socket."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from farhand.sandbox.runner.bounds import LOOK_S, ORPHAN_S, READ_BYTES
from farhand.sandbox.runner.process import ProcessHands, end_tree
from farhand.sandbox.runner.reactor import READ, Reactor
from farhand.sandbox.runner.supervisor import Supervisor
from farhand.sandbox.runner.worker import worker_main

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 1, 4, 36


def _prctl(option: int, argument: int) -> None:
    import ctypes

    ctypes.CDLL(None, use_errno=True).prctl(option, argument, 0, 0, 0)


def _spawn_worker(config: dict[str, Any]) -> tuple[int, socket.socket, int, int]:
    """Fork the worker: its pid, our end of its channel, the read ends of its output pipes."""
    ours, theirs = socket.socketpair()
    out, err = os.pipe(), os.pipe()
    parent = os.getpid()
    # An interrupt may come before the worker can hear it: `worker_main` lets it in.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    pid = os.fork()
    if pid:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
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
