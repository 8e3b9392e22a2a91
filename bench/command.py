"""What it costs to import Farhand, and to ask the command for help."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from bench.bench import Bench, Clock
from bench.comparator import ComparatorMissing
from bench.contest import contest, contestant, ours
from bench.figure import Figure, Promise

COMMAND = Path(sys.executable).parent / "farhand"


def cpu_ms(command: list[str]) -> float:
    """User and system time of a process, from its start to its end."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise ComparatorMissing(f"{command[-1]} ended with {process.returncode}")
    return (used.ru_utime + used.ru_stime) * 1000


def over_bare(python: str, code: str) -> float:
    """What code costs over a Python that does nothing, one right after the other."""
    bare = cpu_ms([python, "-P", "-c", "pass"])
    return cpu_ms([python, "-P", "-c", code]) - bare


async def imported(bench: Bench) -> Figure:
    async def other(package: str) -> float:
        return over_bare(str(bench.comparators.environment_python()), f"import {package}")

    async def mine(code: str) -> float:
        return over_bare(sys.executable, code)

    contestants = [
        ours(lambda: mine("import farhand"), Promise(60.0)),
        ours(lambda: mine("from farhand import CodeAgent"), which="`from farhand import CodeAgent`"),
        contestant("import smolagents", lambda: other("smolagents"), every=10),
        contestant("import jupyter_client", lambda: other("jupyter_client"), every=10),
    ]
    series = await contest(bench.rounds(50, 10), contestants, bench.control)
    how = "CPU time, user and system, of a new process that imports, less that of one that does nothing."
    return Figure("import", "`import farhand` over bare Python", how, "ms CPU", series)


async def helped(bench: Bench) -> Figure:
    async def wall() -> float:
        clock = Clock()
        cpu_ms([str(COMMAND), "--help"])
        return clock.ms()

    async def cpu() -> float:
        return cpu_ms([str(COMMAND), "--help"])

    async def bare() -> float:
        clock = Clock()
        cpu_ms([sys.executable, "-c", "pass"])
        return clock.ms()

    contestants = [
        ours(wall, Promise(150.0)),
        ours(cpu, which="CPU time alone"),
        contestant("the same Python, which does nothing", bare),
    ]
    series = await contest(bench.rounds(50, 10), contestants, bench.control)
    how = "From starting the command to its end, without a terminal."
    return Figure("help", "`farhand --help`", how, "ms", series)
