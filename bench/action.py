"""One more `1 + 1` in a box that runs already, and output drained from one."""

from __future__ import annotations

from bench import boxes
from bench.bench import Bench, Clock
from bench.comparator import ComparatorMissing, PlainWorker
from bench.contest import contest, contestant, ours
from bench.figure import Figure, Promise
from farhand.errors import SandboxError
from farhand.limits import MIB
from farhand.sandbox.environment import BARE, DEFAULT
from farhand.sandbox.hand import Hand

ONE = "1 + 1"
IN_A_ROW = 20
"""Warm actions that follow one another before the next contestant's turn."""


async def warm(bench: Bench) -> Figure:
    rig, others = await bench.rig(), bench.comparators
    async with boxes.kept(rig, DEFAULT) as full, boxes.kept(rig, BARE) as bare:
        workers = _Workers(bench)
        contestants = [
            ours(lambda: _act(full), Promise(0.3), "default environment"),
            ours(lambda: _act(bare), Promise(0.3), "bare environment"),
            contestant("plain subprocess", lambda: _answer(workers, "plain")),
            contestant("bwrap python3", lambda: _answer(workers, "bwrap")),
            contestant("Jupyter kernel", lambda: _driven(bench, "jupyter"), every=10),
            contestant("smolagents LocalPythonExecutor", lambda: _driven(bench, "interpreter")),
        ]
        try:
            series = await contest(bench.rounds(100, 20), contestants, bench.control)
        finally:
            workers.close()
    others.close()
    how = (
        "`1 + 1` sent to a box that has run code before, through a Hand over LocalSandbox, to its `done`, with the "
        f"acknowledgement; nothing is logged. Each contestant does {IN_A_ROW} in a row. The others: the same worker, "
        "kernel or executor again."
    )
    return Figure("warm", "A warm action", how, "ms", series)


async def pipe(bench: Bench) -> Figure:
    megabytes = bench.rounds(64, 16)
    rig = await bench.rig()
    async with boxes.kept(rig, DEFAULT) as hand:
        workers = _Workers(bench)
        contestants = [
            ours(lambda: _flood(hand, megabytes), Promise(50.0, at_most=False)),
            contestant("plain subprocess", lambda: _drained(workers, "plain", megabytes)),
            contestant("bwrap python3", lambda: _drained(workers, "bwrap", megabytes)),
            contestant("Jupyter kernel", lambda: _printed(bench), every=4),
        ]
        try:
            series = await contest(bench.rounds(20, 4), contestants, bench.control)
        finally:
            workers.close()
    bench.comparators.close()
    how = (
        f"Code writes {megabytes} MiB to its standard output in pieces of 64 KiB, from `run` to `done`. What is beyond "
        "`output_bytes` is drained and counted. The others: a reader of the pipe that throws away what it reads; "
        "Jupyter turns 4 MiB into messages. smolagents has no pipe."
    )
    return Figure("pipe", "Output drained at the runner's pipe", how, "MB/s", series)


class _Workers:
    """Plain workers that are kept, started when they are needed."""

    def __init__(self, bench: Bench) -> None:
        self._comparators = bench.comparators
        self._running: dict[str, PlainWorker] = {}

    def get(self, name: str) -> PlainWorker:
        if name not in self._running:
            others = self._comparators
            command = others.plain_command() if name == "plain" else others.bwrap_command()
            self._running[name] = PlainWorker(command)
        return self._running[name]

    def close(self) -> None:
        for worker in self._running.values():
            worker.close()


async def _act(hand: Hand) -> list[float]:
    took = []
    for _ in range(IN_A_ROW):
        clock = Clock()
        value = await boxes.run(hand, ONE)
        took.append(clock.ms())
        if value != "2":
            raise SandboxError(f"1 + 1 is {value} in a box")
    return took


async def _answer(workers: _Workers, name: str) -> list[float]:
    worker, took = workers.get(name), []
    for _ in range(IN_A_ROW):
        clock = Clock()
        worker.run_split("", ONE)
        took.append(clock.ms())
    return took


async def _driven(bench: Bench, program: str) -> list[float]:
    driver = bench.comparators.driver(program)
    return [float(driver.ask("run", code=ONE)["seconds"]) * 1000 for _ in range(IN_A_ROW)]


def _writing(megabytes: int) -> str:
    return f"import os\nfor _ in range({megabytes * 16}): os.write(1, b'x' * 65535 + b'\\n')"


async def _flood(hand: Hand, megabytes: int) -> float:
    clock = Clock()
    done = await boxes.run_to_done(hand, _writing(megabytes))
    rate = megabytes * MIB / clock.ms() / 1000
    counted = done["output"]["bytes"]
    if counted != megabytes * MIB:
        raise SandboxError(f"the box counted {counted} bytes of {megabytes * MIB}")
    return rate


async def _drained(workers: _Workers, name: str, megabytes: int) -> float:
    worker = workers.get(name)
    clock = Clock()
    worker.run_split(_writing(megabytes), "", flood=megabytes * MIB)
    return megabytes * MIB / clock.ms() / 1000


async def _printed(bench: Bench) -> float:
    code = "import sys\nfor _ in range(64): sys.stdout.write('x' * 65535 + '\\n'); sys.stdout.flush()"
    answer = bench.comparators.driver("jupyter").ask("run", code=code)
    if answer["written"] != 4 * MIB:
        raise ComparatorMissing(f"{answer['written']} characters came of {4 * MIB}")
    return 4 * MIB / float(answer["seconds"]) / 1e6
