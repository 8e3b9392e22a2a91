"""One environment in the host: its warm zygote, and boxes made ahead of time."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from farhand.errors import FarhandError, SandboxError
from farhand.sandbox.local.cgroup import BoxCgroup, Cgroups
from farhand.sandbox.local.hosted import HostedBox, Log, new_box_id
from farhand.sandbox.local.request import Outfit
from farhand.sandbox.local.zygote import UID_BASE, UIDS, BoxHandles, BoxSpec, Zygote, ZygoteSpec
from farhand.sandbox.program import program_text
from farhand.sandbox.runner.reactor import READ, Reactor
from farhand.sandbox.runner.worker import PRELOAD

FORKS = 2000
"""Boxes of one zygote before a fresh one takes over: what is forked from one shares its addresses and its hash seed."""
REFILL_S = 0.02
"""After a box was handed over, before the next one is made: the first action shall have the processor."""
REFILL_LATEST_S = 2.0
"""Then the pool is filled although actions run."""
UID_RANGES = 1_000_000

Started = Callable[[Zygote | FarhandError], None]
Ready = Callable[[HostedBox | FarhandError], None]


class Starter:
    """Starts zygotes in a thread of its own: a start takes as long as the imports do, and boxes must not wait for that.

    The kernel ends a zygote when the thread that started it ends; this one lives as long as the process.
    """

    def __init__(self, reactor: Reactor) -> None:
        self._orders: queue.SimpleQueue[tuple[ZygoteSpec, Started]] = queue.SimpleQueue()
        self._results: deque[Callable[[], None]] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._ranges = int.from_bytes(os.urandom(4)) % UID_RANGES
        reactor.watch(self._wake, READ, self._deliver)
        threading.Thread(target=self._run, name="starter", daemon=True).start()

    def start(self, spec: ZygoteSpec, done: Started) -> None:
        """`done` is called in the reactor's thread."""
        self._orders.put((spec, done))

    def uid_base(self) -> int:
        """The first of a range of user ids that, as good as certainly, no other zygote of this machine has."""
        self._ranges = (self._ranges + 1) % UID_RANGES
        return UID_BASE + self._ranges * UIDS

    def _run(self) -> None:
        while True:
            spec, done = self._orders.get()
            result: Zygote | FarhandError
            try:
                result = Zygote.start(spec)
            except FarhandError as error:
                result = error
            except BaseException as error:
                result = SandboxError(f"the zygote could not be started: {type(error).__name__}: {error}")
            self._results.append(lambda done=done, result=result: done(result))  # type: ignore[misc]
            os.eventfd_write(self._wake, 1)

    def _deliver(self, mask: int) -> None:
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            return
        while self._results:
            self._results.popleft()()


@dataclass(slots=True)
class _Order:
    """Somebody waits for a box; without `ready` it is for the pool."""

    spec: BoxSpec
    ready: Ready | None
    box_id: str = field(default_factory=new_box_id)
    group: BoxCgroup | None = None
    again: bool = False


@dataclass(slots=True, eq=False)
class _Line:
    """A running zygote, what was asked of it, and how many of its boxes there are."""

    zygote: Zygote
    orders: dict[int, _Order] = field(default_factory=dict)
    boxes: int = 0
    forks: int = 0


class Pool:
    """Boxes of one environment. `busy` says whether an action runs anywhere in the host."""

    def __init__(
        self,
        reactor: Reactor,
        starter: Starter,
        outfit: Outfit,
        cgroups: Cgroups | None,
        size: int,
        busy: Callable[[], bool],
        log: Log,
    ) -> None:
        self.outfit = outfit
        self.used = time.monotonic()
        self._reactor, self._starter, self._cgroups, self._size = reactor, starter, cgroups, size
        self._busy, self._log = busy, log
        self._line: _Line | None = None
        self._retired: list[_Line] = []
        self._starting = self._refilling = False
        self._filling = 0
        self._wanted: deque[_Order] = deque()
        self._ready: deque[HostedBox] = deque()
        self._leaving: set[HostedBox] = set()
        self._closed = False

    @property
    def live(self) -> bool:
        """Whether boxes were handed over and still live, or somebody waits for one."""
        lines = [*self._retired, self._line] if self._line else self._retired
        pooled = len(self._ready) + len(self._leaving)
        return bool(self._wanted) or sum(line.boxes + len(line.orders) for line in lines) > pooled

    @property
    def holds(self) -> bool:
        """Whether any box of this environment has processes left."""
        return any(line.boxes for line in [*self._retired, *([self._line] if self._line else [])])

    def describe(self) -> dict[str, object]:
        line = self._line
        return {
            "python": self.outfit.python,
            "packages": len(self.outfit.packages),
            "zygote": line.zygote.pid if line else None,
            "preloaded": list(line.zygote.loaded) if line else [],
            "failed": dict(line.zygote.failed) if line else {},
            "ready": len(self._ready),
        }

    def take(self, spec: BoxSpec, ready: Ready) -> None:
        """Give a box to `ready`, at once when one waits."""
        self.used = time.monotonic()
        if spec == BoxSpec():
            while self._ready:
                box = self._ready.popleft()
                if not box.ended:
                    self._refill_later()
                    ready(box)
                    return
                self._drop(box)
        self._wanted.append(_Order(spec, ready))
        self._work()

    def warm(self) -> None:
        """Start the zygote and fill the pool, if that has not been done."""
        self._refill_later()

    def close(self) -> None:
        """End the zygotes, and with them every box."""
        self._closed = True
        error = SandboxError("the host is being stopped")
        lines = [*self._retired, *([self._line] if self._line else [])]
        for line in lines:
            self._reactor.watch(line.zygote.fileno(), 0, self._ignore)
            line.zygote.close()
        for order in [*self._wanted, *(order for line in lines for order in line.orders.values())]:
            self._fail(order, error)
        self._wanted.clear()
        self._line, self._retired = None, []

    def drop_ready(self) -> None:
        """Let the boxes go that nobody has taken."""
        while self._ready:
            self._drop(self._ready.popleft())

    def _drop(self, box: HostedBox) -> None:
        self._leaving.add(box)
        box.destroy(lambda: self._leaving.discard(box))

    # -- asking the zygote --

    def _work(self) -> None:
        """Send what is wanted to the zygote; start one first if there is none."""
        if self._closed or not self._wanted:
            return
        line = self._line
        if line is not None and line.forks >= FORKS:
            self._retire(line)
            line = None
        if line is None:
            if not self._starting:
                self._starting = True
                self._starter.start(self._spec(), self._started)
            return
        while self._wanted and self._line is line:
            self._ask(line, self._wanted.popleft())

    def _spec(self) -> ZygoteSpec:
        outfit = self.outfit
        return ZygoteSpec(
            worker=program_text(),
            python=Path(outfit.python),
            prefix=Path(outfit.prefix),
            version=outfit.version,
            site=Path(outfit.site) if outfit.site else None,
            mplconfig=Path(outfit.mplconfig) if outfit.mplconfig else None,
            preload=tuple(dict.fromkeys((*PRELOAD, *outfit.preload))),
            uid_base=self._starter.uid_base(),
        )

    def _started(self, result: Zygote | FarhandError) -> None:
        self._starting = False
        if isinstance(result, FarhandError):
            while self._wanted:
                self._fail(self._wanted.popleft(), result)
        elif self._closed:
            result.close()
        else:
            line = self._line = _Line(result)
            self._reactor.watch(result.fileno(), READ, lambda mask: self._arrived(line))
            self._work()

    def _ask(self, line: _Line, order: _Order) -> None:
        try:
            if self._cgroups is not None and order.group is None:
                spec = order.spec
                order.group = self._cgroups.create(order.box_id, spec.memory_bytes, spec.disk_bytes, spec.processes)
            procs = order.group.open_procs() if order.group else []
        except (FarhandError, OSError) as error:
            self._fail(order, error if isinstance(error, FarhandError) else SandboxError(f"no control group: {error}"))
            return
        try:
            token = line.zygote.begin_create(order.spec, procs)
        except FarhandError as error:
            self._again(order, error)
            self._lost(line)
            return
        finally:
            for descriptor in procs:
                os.close(descriptor)
        line.orders[token] = order
        line.forks += 1

    def _again(self, order: _Order, error: FarhandError) -> None:
        """The zygote may have died under it: once more, with the next one."""
        if order.again:
            self._fail(order, error)
        else:
            order.again = True
            self._wanted.append(order)

    def _arrived(self, line: _Line) -> None:
        for token, result in line.zygote.on_readable():
            order = line.orders.pop(token, None)
            if isinstance(result, BoxHandles):
                if order is not None:
                    self._stands(line, order, result)
                else:
                    result.kill()
                    result.close()
            elif order is not None:
                self._again(order, result)
        if not line.zygote.alive:
            self._lost(line)
        self._work()

    def _stands(self, line: _Line, order: _Order, handles: BoxHandles) -> None:
        packages = dict(self.outfit.packages)
        release = self.outfit.release
        box = HostedBox(self._reactor, order.box_id, handles, order.spec, order.group, packages, release, self._log)
        line.boxes += 1
        box.on_gone = lambda box: self._gone(line, box)
        if order.ready is None:
            self._filling -= 1
            self._ready.append(box)
            self._refill_later()
        else:
            self._refill_later()
            order.ready(box)

    def _fail(self, order: _Order, error: FarhandError) -> None:
        if order.group is not None:
            order.group.remove()
        if order.ready is not None:
            order.ready(error)
        else:
            self._filling -= 1
            if not self._closed:
                self._log("no box for the pool", error)

    def _gone(self, line: _Line, box: HostedBox) -> None:
        line.boxes -= 1
        if box in self._ready:
            self._ready.remove(box)
            self._drop(box)
        if line in self._retired and not line.boxes and not line.orders:
            self._end(line)

    def _retire(self, line: _Line) -> None:
        """A fresh zygote takes over; this one stays for the boxes it has."""
        self._line = None
        self._retired.append(line)
        if not line.boxes and not line.orders:
            self._end(line)

    def _lost(self, line: _Line) -> None:
        """The zygote has died, and the kernel ends its boxes with it."""
        if line is self._line:
            self._line = None
            self._log("a zygote has ended", SandboxError(f"zygote {line.zygote.pid}"))
        elif line in self._retired:
            self._retired.remove(line)
        else:
            return
        self._reactor.watch(line.zygote.fileno(), 0, self._ignore)
        for order in line.orders.values():
            self._again(order, SandboxError("the zygote has ended"))
        line.orders.clear()
        line.zygote.close()
        self._work()

    def _end(self, line: _Line) -> None:
        self._retired.remove(line)
        self._reactor.watch(line.zygote.fileno(), 0, self._ignore)
        line.zygote.close()

    def _ignore(self, mask: int) -> None:
        pass

    # -- filling --

    def _refill_later(self) -> None:
        if not self._refilling and not self._closed and len(self._ready) + self._filling < self._size:
            self._refilling = True
            latest = time.monotonic() + REFILL_LATEST_S
            self._reactor.call_later(REFILL_S, lambda: self._refill(latest))

    def _refill(self, latest: float) -> None:
        """One box at a time, and none while an action runs."""
        if self._busy() and time.monotonic() < latest:
            self._reactor.call_later(REFILL_S, lambda: self._refill(latest))
            return
        self._refilling = False
        if not self._closed and len(self._ready) + self._filling < self._size:
            self._filling += 1
            self._wanted.append(_Order(BoxSpec(), None))
            self._work()
