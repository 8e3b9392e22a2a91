"""The processes of a box without a host, as its supervisor sees them."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from farhand.sandbox.runner.bounds import KIB
from farhand.sandbox.runner.hands import Usage
from farhand.sandbox.runner.workspace import DirectoryFiles


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
