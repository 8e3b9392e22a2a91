"""From nothing to the value of `1 + 1`: new boxes, boxes from the pool, and what the others need."""

from __future__ import annotations

import asyncio

from bench import boxes
from bench.bench import NO_POOL, POOL, SITE, Bench, Clock
from bench.comparator import ComparatorMissing, PlainWorker
from bench.contest import Contestant, contest, contestant, ours
from bench.figure import Figure, Promise
from farhand.errors import SandboxError
from farhand.sandbox.environment import BARE, DEFAULT, Environment

ONE = "1 + 1"
SETTLED_S = 0.05
"""After the turn before: the kernel takes down its network namespace behind it (bwrap's, and our last box's), and a new
one waits for the same lock."""
READY_S = 0.05
"""How long a box waits in the pool at least: one that stands since this moment still sets itself up."""


async def first(bench: Bench) -> Figure:
    contestants = [
        ours(lambda: _ours(bench, BARE), Promise(10.0)),
        contestant("plain subprocess", lambda: _worker(bench.comparators.plain_command(), ONE)),
        contestant("bwrap python3", lambda: _worker(bench.comparators.bwrap_command(), ONE)),
        *_drivers(bench, ONE),
    ]
    series = await contest(bench.rounds(200, 20), contestants, bench.control)
    how = (
        "Host and zygote run, no box is ready. From asking for a box to the value: create, attach, hello, run; 50 ms "
        "after the turn before, whose network namespace the kernel takes down behind it. "
        "The others: a new process or kernel; smolagents makes an object in a process that has imported it, "
        "without any wall."
    )
    return Figure("first", "Nothing to the first `1 + 1`", how, "ms", series)


async def first_pandas(bench: Bench) -> Figure:
    imports = "import numpy, pandas"
    contestants = [
        ours(lambda: _ours(bench, DEFAULT), Promise(12.0)),
        contestant(
            "plain subprocess", lambda: _worker(bench.comparators.plain_command(), _from(bench, imports)), every=8
        ),
        contestant("bwrap python3", lambda: _worker(bench.comparators.bwrap_command(), _at(SITE, imports)), every=8),
        *_drivers(bench, f"{imports}\n{ONE}"),
    ]
    series = await contest(bench.rounds(200, 16), contestants, bench.control)
    how = (
        "The same in the default environment, with numpy and pandas loaded (and matplotlib and Pillow in the box). "
        "The others import them; smolagents' process has imported them before."
    )
    return Figure("first-pandas", "Nothing to the first `1 + 1`, numpy and pandas loaded", how, "ms", series)


async def pooled(bench: Bench) -> Figure:
    contestants = [
        ours(lambda: _pooled(bench, DEFAULT), Promise(1.0), "default environment"),
        ours(lambda: _pooled(bench, BARE), Promise(1.0), "bare environment"),
    ]
    series = await contest(bench.rounds(200, 20), contestants, bench.control)
    how = (
        f"The same with a box that has waited in the host's pool for {READY_S * 1000:.0f} ms or longer. "
        "None of the others keeps any."
    )
    return Figure("pooled", "The first `1 + 1` in a pooled box", how, "ms", series)


async def _ours(bench: Bench, environment: Environment) -> float:
    rig = await bench.rig(NO_POOL)
    await asyncio.sleep(SETTLED_S)
    return await _opened(rig, environment)


async def _pooled(bench: Bench, environment: Environment) -> float:
    rig = await bench.rig(POOL)
    await rig.pooled(environment)
    await asyncio.sleep(READY_S)
    return await _opened(rig, environment)


async def _opened(rig: boxes.Rig, environment: Environment) -> float:
    clock = Clock()
    hand = await rig.open(environment)
    try:
        value = await boxes.run(hand, ONE)
        took = clock.ms()
    finally:
        await boxes.close(hand)
    if value != "2":
        raise SandboxError(f"1 + 1 is {value} in a box")
    return took


async def _worker(command: list[str], code: str) -> float:
    clock = Clock()
    worker = PlainWorker(command)
    try:
        value = worker.run(code)
        took = clock.ms()
    finally:
        worker.close()
    if value != "2":
        raise ComparatorMissing(f"1 + 1 is {value}")
    return took


def _at(folder: str, imports: str) -> str:
    return f"import sys; sys.path.append({folder!r}); {imports}\n{ONE}"


def _from(bench: Bench, imports: str) -> str:
    return _at(str(bench.comparators.site), imports)


def _drivers(bench: Bench, code: str) -> list[Contestant]:
    async def jupyter() -> float:
        return float(bench.comparators.driver("jupyter").ask("first", code=code)["seconds"]) * 1000

    async def interpreter() -> float:
        driver = bench.comparators.driver("interpreter")
        driver.ask("prepare", code=code)
        return float(driver.ask("first", code=ONE)["seconds"]) * 1000

    return [
        contestant("Jupyter kernel", jupyter, every=20),
        contestant("smolagents LocalPythonExecutor", interpreter),
    ]
