"""What an idle box keeps in memory while many others live, and how that is read from /proc."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from bench import boxes
from bench.bench import Bench
from bench.comparator import ComparatorMissing, PlainWorker
from bench.figure import OURS, Figure, Promise, Series
from farhand.errors import FarhandError, SandboxError
from farhand.limits import MIB
from farhand.sandbox.environment import BARE, DEFAULT, Environment
from farhand.sandbox.hand import Hand

ONE = "1 + 1"
WORKERS = 50
KERNELS = 4


async def memory(bench: Bench) -> Figure:
    live = bench.rounds(200, 20)
    series = []
    for environment, which in ((DEFAULT, "default environment"), (BARE, "bare environment")):
        series += await _boxes(bench, environment, which, live)
    commands = bench.comparators
    series.append(_workers(f"plain subprocess ({WORKERS} live)", commands.plain_command))
    series.append(_workers(f"bwrap python3 ({WORKERS} live)", commands.bwrap_command))
    series.append(_driven(bench, "jupyter", f"Jupyter kernel ({KERNELS} live)", KERNELS))
    series.append(_driven(bench, "interpreter", "smolagents LocalPythonExecutor (200 objects in one process)", 200))
    how = (
        f"{live} boxes, each of which has run `1 + 1` and waits. PSS from /proc of all its processes (init and "
        "worker), a page that several map counted in parts; a sample is one box. `with zygote and host` is what both "
        "and all boxes have more than before the first box, by box. The others have run the same; smolagents has no "
        "process of its own, the figure is what its process grows by."
    )
    return Figure("memory", f"Memory of an idle box, {live} live", how, "MB PSS", series)


async def _boxes(bench: Bench, environment: Environment, which: str, live: int) -> list[Series]:
    each = Series(f"{OURS}, {which}", Promise(4.0))
    whole = Series(f"{OURS}, {which}, with zygote and host")
    hands: list[Hand] = []
    try:
        rig = await bench.rig()
        zygote, host = await rig.zygote(environment), int((await rig.status())["pid"])
        before = tree(zygote)
        parts = pss([*before, host])
        for _ in range(live):
            hands.append(await rig.open(environment))
            if await boxes.run(hands[-1], ONE) != "2":
                raise SandboxError("1 + 1 is not 2 in a box")
        groups = by_namespace(set(tree(zygote)) - set(before))
        if len(groups) != live:
            raise SandboxError(f"{len(groups)} boxes were found below the zygote, {live} are alive")
        each.samples = [pss(group) / MIB for group in groups]
        whole.samples = [(pss([*tree(zygote), host]) - parts) / MIB / live]
    except (FarhandError, OSError) as problem:
        each.problem = whole.problem = f"{type(problem).__name__}: {problem}"[:500]
    finally:
        for hand in hands:
            await boxes.close(hand)
    return [each, whole]


def _workers(name: str, command: object) -> Series:
    series = Series(name)
    workers: list[PlainWorker] = []
    try:
        assert callable(command)
        for _ in range(WORKERS):
            workers.append(PlainWorker(command()))
            workers[-1].run(ONE)
        series.samples = [pss(tree(worker.pid)) / MIB for worker in workers]
    except (ComparatorMissing, OSError) as problem:
        series.problem = str(problem)[:500]
    finally:
        for worker in workers:
            worker.close()
    return series


def _driven(bench: Bench, program: str, name: str, count: int) -> Series:
    """Each process of its own; for a driver that holds all in its own process, what it grows by."""
    series = Series(name)
    try:
        driver = bench.comparators.driver(program)
        driver.ask("run", code=ONE)
        before = pss([driver.pid])
        pids = driver.ask("hold", code=ONE, count=count)["pids"]
        if pids == [driver.pid]:
            series.samples = [(pss(pids) - before) / MIB / count]
        else:
            series.samples = [pss(tree(pid)) / MIB for pid in pids]
    except (ComparatorMissing, OSError) as problem:
        series.problem = str(problem)[:500]
    finally:
        bench.comparators.close()
    return series


def parents() -> dict[int, int]:
    """The parent of every process."""
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            found[int(entry)] = int(fields[1])
    return found


def tree(pid: int) -> list[int]:
    """A process and all below it."""
    children: dict[int, list[int]] = {}
    for child, parent in parents().items():
        children.setdefault(parent, []).append(child)
    found, waiting = [], [pid]
    while waiting:
        found.append(waiting.pop())
        waiting += children.get(found[-1], [])
    return found


def by_namespace(pids: Iterable[int]) -> list[list[int]]:
    """Processes that share a pid namespace, as those of one box do."""
    groups: dict[str, list[int]] = {}
    for pid in pids:
        groups.setdefault(os.readlink(f"/proc/{pid}/ns/pid"), []).append(pid)
    return list(groups.values())


def pss(pids: Iterable[int]) -> int:
    """Proportional set size in bytes: shared pages are divided among those who map them."""
    total = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1]) * 1024
    return total


def cpu_ms(pids: Iterable[int]) -> float:
    """Time on a processor, of the main threads, as the scheduler counts it."""
    return sum(int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) for pid in pids) / 1e6
