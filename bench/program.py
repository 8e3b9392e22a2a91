"""Twelve CPU-bound programs, in each contestant beside plain CPython in the same minute."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from bench import boxes, memory
from bench.bench import Bench, Clock
from bench.comparator import ComparatorMissing, PlainWorker, split
from bench.contest import contest, contestant, ours
from bench.figure import Figure, Promise
from farhand.errors import SandboxError
from farhand.sandbox.environment import DEFAULT
from farhand.sandbox.hand import Hand

LONG_MS = 100.0
"""A program repeats itself until plain CPython needs that long: sending it and its value shall not count."""
CASES = Path(__file__).parent.parent / "tests" / "cases" / "bench"
PROGRAMS = 12
ONCE = 1_000_000


@dataclass(frozen=True, slots=True)
class Program:
    """Code and the text of its value; `parts` is what a plain worker is given."""

    name: str
    code: str
    parts: tuple[str, str]
    expected: str

    def repeated(self, times: int) -> Program:
        """The same, so many times, and the last value."""
        statements, expression = self.parts
        once = textwrap.indent(f"{statements}\nvalue = {expression}", "    ")
        body = f"for _ in range({times}):\n{once}"
        return replace(self, code=f"{body}\nvalue", parts=(body, "value"))


def programs(folder: Path = CASES) -> list[Program]:
    found = []
    for path in sorted(folder.glob("*.py")):
        code = path.read_text()
        expected = path.with_suffix(".expected").read_text().strip().removeprefix("=> ")
        found.append(Program(path.stem, code, split(code), expected))
    if len(found) != PROGRAMS:
        raise SandboxError(f"{folder} holds {len(found)} programs, not {PROGRAMS}")
    return found


Run = Callable[[Program], Awaitable[tuple[float, str]]]
"""Runs a program: milliseconds, and the text of its value."""


_HOW = (
    f"Speed as a share of plain CPython's: each of the {PROGRAMS} programs of `tests/cases/bench` runs in the "
    "contestant and in a plain worker right before or after, by turns. A sample is the geometric mean of the ratios; "
    "time is from sending the code to having its value, and a program repeats itself until plain CPython takes "
    f"{LONG_MS:.0f} ms (in smolagents it runs once). `CPU time alone` is the same by the kernel's count, which a busy "
    "machine changes less. `plain subprocess` is plain CPython against itself: what it is off 1 is noise. bwrap runs "
    "Debian's build of Python, the others that of the boxes."
)


async def cpu(bench: Bench) -> Figure:
    rig, others = await bench.rig(), bench.comparators
    with ExitStack() as workers:
        plain = workers.enter_context(closing(PlainWorker(others.plain_command())))
        cases = programs()
        long = [await _long(plain, case) for case in cases]

        @cache
        def boxed() -> PlainWorker:
            return workers.enter_context(closing(PlainWorker(others.bwrap_command())))

        def against(run: Run, by: Run | None = None) -> Callable[[], Awaitable[float]]:
            return _Pairs(plain, run, long, by).speed

        few = cases[:4] if bench.quick else cases
        some = _Pairs(plain, lambda program: _driven(bench, "interpreter", program), few)
        zygote = await rig.zygote(DEFAULT)
        before = set(memory.tree(zygote))
        async with boxes.kept(rig, DEFAULT) as hand:
            pids = set(memory.tree(zygote)) - before
            contestants = [
                ours(against(lambda program: _in_box(hand, program)), Promise(0.97, at_most=False)),
                ours(
                    against(
                        lambda program: _cpu_in_box(hand, pids, program), lambda program: _cpu_in_worker(plain, program)
                    ),
                    which="CPU time alone",
                ),
                contestant("bwrap python3", against(lambda program: _in_worker(boxed(), program)), every=5),
                contestant("Jupyter kernel", against(lambda program: _driven(bench, "jupyter", program)), every=5),
                contestant("smolagents LocalPythonExecutor", some.speed_of_those_that_run, every=ONCE, warm_up=False),
                contestant("plain subprocess", against(lambda program: _in_worker(plain, program)), every=5),
            ]
            series = await contest(bench.rounds(20, 5), contestants, bench.control)
        contestants[4].series.note = "; ".join(some.refused)
    others.close()
    return Figure("cpu", "CPU-bound code", _HOW, "of CPython's speed", series)


async def _long(plain: PlainWorker, program: Program) -> Program:
    took = [(await _in_worker(plain, program))[0] for _ in range(3)]
    return program.repeated(math.ceil(LONG_MS / min(took)))


class _Pairs:
    """One contestant against the plain worker, which is timed with `by` if that is given."""

    def __init__(self, plain: PlainWorker, run: Run, cases: Sequence[Program], by: Run | None = None) -> None:
        self._run, self._cases = run, cases
        self._by = by or (lambda program: _in_worker(plain, program))
        self._first = False
        self.refused: list[str] = []

    async def speed(self) -> float:
        """The geometric mean, over the programs, of the plain worker's time by the contestant's."""
        self._first = not self._first  # the number of programs is even
        return statistics.geometric_mean([await self._ratio(program) for program in self._cases])

    async def speed_of_those_that_run(self) -> float:
        """The same where not every program can be run; `refused` names those that cannot, with the reason."""
        ratios = []
        self.refused.clear()
        for program in self._cases:
            try:
                ratios.append(await self._ratio(program))
            except ComparatorMissing as problem:
                self.refused.append(str(problem))
        if not ratios:
            raise ComparatorMissing("; ".join(self.refused))
        return statistics.geometric_mean(ratios)

    async def _ratio(self, program: Program) -> float:
        self._first = not self._first
        if self._first:
            mine = await self._checked(program)
            return await self._in_plain(program) / mine
        plain = await self._in_plain(program)
        return plain / await self._checked(program)

    async def _checked(self, program: Program) -> float:
        took, value = await self._run(program)
        if value != program.expected:
            raise ComparatorMissing(f"{program.name} gives {value[:200]}, not {program.expected}")
        return took

    async def _in_plain(self, program: Program) -> float:
        return (await self._by(program))[0]


async def _in_box(hand: Hand, program: Program) -> tuple[float, str]:
    clock = Clock()
    value = await boxes.run(hand, program.code)
    return clock.ms(), value


async def _cpu_in_box(hand: Hand, pids: Iterable[int], program: Program) -> tuple[float, str]:
    before = memory.cpu_ms(pids)
    value = await boxes.run(hand, program.code)
    return memory.cpu_ms(pids) - before, value


async def _cpu_in_worker(worker: PlainWorker, program: Program) -> tuple[float, str]:
    before = memory.cpu_ms([worker.pid])
    value = worker.run_split(*program.parts)
    return memory.cpu_ms([worker.pid]) - before, value


async def _in_worker(worker: PlainWorker, program: Program) -> tuple[float, str]:
    clock = Clock()
    value = worker.run_split(*program.parts)
    return clock.ms(), value


async def _driven(bench: Bench, driver: str, program: Program) -> tuple[float, str]:
    answer = bench.comparators.driver(driver).ask("run", code=program.code)
    if "failed" in answer:
        raise ComparatorMissing(f"{program.name}: {answer['failed']}")
    return float(answer["seconds"]) * 1000, str(answer["text"])
