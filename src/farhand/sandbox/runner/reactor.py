"""One thread's loop over descriptors and timers."""

from __future__ import annotations

import heapq
import itertools
import select
import time
from collections import deque
from typing import Callable

READ = select.POLLIN
WRITE = select.POLLOUT
AWAKE_S = 0.0003
"""How long this thread looks again and again, after something came, before it sleeps."""


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
        self._awake = False
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
        found = self._wait(timeout_s)
        self._awake = bool(found)
        for fd, ready in found:
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

    def _wait(self, timeout_s: float | None) -> list[tuple[int, int]]:
        """What is ready. After something came, the next thing is waited for awake for a moment: the answer of a worker
        or a harness takes less time than being woken does."""
        poll = self._poll.poll
        if self._awake and timeout_s != 0.0:
            until = time.monotonic() + AWAKE_S
            while time.monotonic() < until:
                found = poll(0)
                if found:
                    return found
        return poll(timeout_s)

    def close(self) -> None:
        self._poll.close()
