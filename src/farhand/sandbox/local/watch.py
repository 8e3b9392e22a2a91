"""What a box uses, read from outside: memory, processor time, processes, threads. And stopping all of it for a while.

Every process of a box descends from its worker or, as an orphan, from its init. The walk follows
/proc/PID/task/*/children; no process of the box takes part, so none can lie, but what lives shorter than the interval
between two looks may be missed.

Memory is anonymous and shared anonymous memory and page tables. The cheap sum over processes counts a page that
several share several times; only when that sum passes the bound are shares counted (smaps_rollup), in steps that end
as soon as the bound is certainly passed. Pages of files on the box's disk are the disk's, not the memory's. Sockets
count with what they can hold.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from farhand.errors import SandboxError
from farhand.limits import KIB
from farhand.sandbox.local.box import SOCKET_BYTES

PROCESSES_WALKED = 100_000
SUSPEND_S = 2.0
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
SOCKETS_FREE = 64
_EXACT_SHARE = 10
"""Counting shares again waits until ten times as long has passed as the last count took."""


@dataclass(frozen=True, slots=True)
class Usage:
    """`memory_bytes` is exact, or at least the bound, when `exact`; otherwise an upper estimate below it. `cpu_s`
    never falls, in hundredths. The worker counts among `processes` and `threads`, init does not."""

    memory_bytes: int
    exact: bool
    cpu_s: float
    processes: int
    threads: int


@dataclass(slots=True)
class Process:
    pid: int
    state: str
    started: int
    ticks: int
    reaped_ticks: int
    threads: int

    @property
    def lives(self) -> bool:
        """Not a corpse that waits to be buried. One whose first thread has ended looks like a corpse, and others run
        on."""
        return self.state not in "ZX" or self.threads > 1

    def one_of_its_threads(self) -> int:
        """The number of a thread that still has the process's memory."""
        if self.state not in "ZX":
            return self.pid
        return max(_threads(self.pid), default=self.pid)

    def stands_still(self) -> bool:
        if self.threads == 1:
            return self.state in "TtZX"
        states = [read_process(thread) for thread in _threads(self.pid)]
        return all(thread is None or thread.state in "TtZX" for thread in states)


def read_process(pid: int) -> Process | None:
    """None when there is none."""
    try:
        # The name, in parentheses, may hold anything, parentheses too.
        text = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    except OSError:
        return None
    times = [int(text[place]) for place in (11, 12, 13, 14)]
    return Process(pid, text[0].decode(), int(text[19]), times[0] + times[1], times[2] + times[3], int(text[17]))


def processes(roots: Sequence[int]) -> Iterator[Process]:
    """Every process of a box, corpses too, each once, as far as they hold still while one looks. `roots` are (init,
    worker); init, which is not the guest's, is left out."""
    init = roots[0]
    waiting, seen = list(roots), set(roots)
    while waiting and len(seen) < PROCESSES_WALKED:
        pid = waiting.pop()
        process = read_process(pid) if pid != init else None
        if process is None and pid != init:
            # Its children have gone to init by now, or will be seen the next time.
            continue
        if process is not None:
            yield process
        for child in _children(pid, process is not None and process.threads > 1):
            if child not in seen:
                seen.add(child)
                waiting.append(child)


def _threads(pid: int) -> list[int]:
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []


def _children(pid: int, threaded: bool) -> list[int]:
    found: list[int] = []
    try:
        for task in _threads(pid) if threaded else [pid]:
            found += map(int, _read(f"/proc/{pid}/task/{task}/children").split())
    except OSError:
        pass
    return found


def _read(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = os.read(descriptor, 65536)
        while len(data) % 4096 == 0 and (more := os.read(descriptor, 65536)):
            data += more
        return data
    finally:
        os.close(descriptor)


def _kilobytes(text: bytes, name: bytes) -> int:
    """The value of a line `name:  123 kB`, in bytes; 0 without such a line."""
    start = text.find(b"\n" + name + b":")
    if start < 0:
        return 0
    start += len(name) + 2
    return int(text[start : text.find(b"kB", start)]) * KIB


@dataclass(slots=True)
class _Resident:
    pid: int
    anonymous: int
    shared: int
    tables: int


def _resident(pid: int) -> _Resident:
    """Without looking at single pages."""
    try:
        text = _read(f"/proc/{pid}/status")
    except OSError:
        return _Resident(pid, 0, 0, 0)
    return _Resident(pid, _kilobytes(text, b"RssAnon"), _kilobytes(text, b"RssShmem"), _kilobytes(text, b"VmPTE"))


def _share(resident: _Resident) -> tuple[int, int]:
    """Anonymous and shared bytes, a page that n processes map counted as 1/n. What does not let itself be read counts
    whole."""
    try:
        text = _read(f"/proc/{resident.pid}/smaps_rollup")
    except ProcessLookupError:
        return 0, 0
    except OSError:
        return resident.anonymous, resident.shared
    return _kilobytes(text, b"Pss_Anon"), _kilobytes(text, b"Pss_Shmem")


def _socket_bytes(pid: int) -> int:
    """What the sockets of a box may hold in the kernel, where it counts as nobody's memory. The first few are free."""
    try:
        used = int(_read(f"/proc/{pid}/net/sockstat").split(None, 3)[2])
    except (OSError, ValueError, IndexError):
        return 0
    return max(0, used - SOCKETS_FREE) * SOCKET_BYTES


class Watch:
    """Looks at one box, `BoxHandles.roots`, as often as it is asked. `folder` is a descriptor of its disk,
    `memory_bytes` the bound."""

    def __init__(self, roots: Sequence[int], memory_bytes: int, folder: int | None = None) -> None:
        self._roots = roots
        self._bound = memory_bytes
        self._folder = folder
        self._seen: dict[tuple[int, int], Process] = {}
        self._init_told = 0
        self._untold = 0
        self._cpu_s = 0.0
        self._exact_at = 0.0
        self._exact_sum = 0
        self._exact_bytes = 0

    def usage(self) -> Usage:
        """About 60 µs and 50 µs for each process; more while shared pages have to be told apart."""
        found = list(processes(self._roots))
        self._count_cpu(found)
        living = [process for process in found if process.lives]
        threads = [process.one_of_its_threads() for process in living]
        memory, exact = self._memory([_resident(thread) for thread in threads])
        memory += _socket_bytes(threads[0]) if threads else 0
        return Usage(memory, exact, self._cpu_s, len(living), sum(process.threads for process in living))

    def _count_cpu(self, found: list[Process]) -> None:
        """A lower bound: the time of the living, what parents were told of children they buried, and what was seen of
        those of which nobody was told."""
        seen = {(process.pid, process.started): process for process in found}
        for pid, started in self._seen.keys() - seen.keys():
            missed = read_process(pid)
            if missed is not None and missed.started == started:
                seen[pid, started] = missed
        init = read_process(self._roots[0])
        init_told = init.reaped_ticks if init else self._init_told
        ended = sum(self._seen[key].ticks + self._seen[key].reaped_ticks for key in self._seen.keys() - seen.keys())
        told = init_told - self._init_told
        for key, process in seen.items():
            told += process.reaped_ticks - (self._seen[key].reaped_ticks if key in self._seen else 0)
        self._untold += max(0, ended - told)
        self._seen, self._init_told = seen, init_told
        total = sum(process.ticks + process.reaped_ticks for process in seen.values()) + init_told + self._untold
        self._cpu_s = max(self._cpu_s, total * _TICK_S)

    def disk_used_bytes(self) -> int:
        if self._folder is None:
            return 0
        state = os.fstatvfs(self._folder)
        return (state.f_blocks - state.f_bfree) * state.f_frsize

    def _memory(self, residents: list[_Resident]) -> tuple[int, bool]:
        tables = sum(each.tables for each in residents)
        anonymous = sum(each.anonymous for each in residents)
        shared = sum(each.shared for each in residents)
        total = anonymous + shared + tables
        if total <= self._bound:
            return total, False
        disk = self.disk_used_bytes() if shared else 0
        if len(residents) == 1:
            return anonymous + max(0, shared - disk) + tables, True
        now = time.monotonic()
        room = self._bound - self._exact_bytes
        if now < self._exact_at and total - self._exact_sum < room // 2:
            return self._exact_bytes, True
        self._exact_bytes = self._count_shares(residents, disk) + tables
        self._exact_sum = total
        self._exact_at = time.monotonic() + _EXACT_SHARE * (time.monotonic() - now)
        return self._exact_bytes, True

    def _count_shares(self, residents: list[_Resident], disk: int) -> int:
        """Ends as soon as the sum is above the bound: a count costs a few milliseconds for each gigabyte."""
        anonymous = shared = 0
        for each in sorted(residents, key=lambda resident: -resident.anonymous):
            more = _share(each)
            anonymous, shared = anonymous + more[0], shared + more[1]
            if anonymous + max(0, shared - disk) > self._bound:
                break
        return anonymous + max(0, shared - disk)


def suspend(roots: Sequence[int], timeout_s: float = SUSPEND_S) -> None:
    """Stop every process of the box, by signal, until `resume`. Returns when none runs; SandboxError when that takes
    too long.

    A process that was missed could start others, so looks are taken until one finds all stopped.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        running = [process for process in processes(roots) if not process.stands_still()]
        if not running:
            return
        if time.monotonic() > deadline:
            raise SandboxError(f"{len(running)} processes of the box did not stop within {timeout_s} s")
        for process in running:
            _signal(process, signal.SIGSTOP)


def resume(roots: Sequence[int]) -> None:
    """Let every stopped process run again."""
    for process in processes(roots):
        if process.lives:
            _signal(process, signal.SIGCONT)


def _signal(process: Process, number: signal.Signals) -> None:
    """To this process and no later one with its number."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except OSError:
        return
    try:
        now = read_process(process.pid)
        if now is not None and now.started == process.started:
            signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        pass
    finally:
        os.close(descriptor)
