"""The worker's end of the frames."""

from __future__ import annotations

import json
import os
import select
import socket
import threading
from collections import deque
from typing import Any, Callable

from farhand.sandbox.runner.bounds import READ_BYTES, WORKER_FRAME_BYTES
from farhand.sandbox.runner.frame import Lines, dump_frame

OPEN_GATE, _WAIT, SHUT = "open", "wait", "shut"
_loads = json.loads  # bound here because guest code may take it out of its module


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
        self.gate = SHUT
        self.pending = False
        self.interrupts = 0
        self.forked = False

    # -- interrupts --

    def on_sigint(self, signum: int, frame: Any) -> None:
        if self.forked:
            raise KeyboardInterrupt
        self.interrupts += 1
        if self.gate == SHUT:
            self.pending = True
            return
        self.gate = SHUT
        raise KeyboardInterrupt

    def _enter(self) -> str | None:
        if threading.get_ident() != self._main:
            return None
        gate, self.gate = self.gate, SHUT
        return gate

    def _leave(self, gate: str | None) -> None:
        if gate is None:
            return
        if self.pending and gate == OPEN_GATE:
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
        self.gate = SHUT

    def use(self, sock: socket.socket) -> socket.socket:
        """Frames go over `sock` from now on. Returns the socket before."""
        before, self._sock, self._fd = self._sock, sock, sock.fileno()
        return before

    def after_fork(self) -> None:
        if not self.forked:
            self.forked = True
            os.close(self._sock.detach())

    def require_own_process(self) -> None:
        if self.forked:
            raise RuntimeError("a forked process cannot call tools or answer: do it in the process that forked it")

    # -- sending --

    def send(self, frame: dict[str, Any], interruptible: bool = False) -> None:
        """Send a whole frame. FrameError when it is too large."""
        self.require_own_process()
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
        self.require_own_process()
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

        self.require_own_process()
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
