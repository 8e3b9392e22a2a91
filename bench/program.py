"""Twelve CPU-bound programs, in each contestant beside plain CPython in the same minute."""

from __future__ import annotations

import statistics
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import boxes
from bench.bench import Bench, Clock
from bench.comparator import ComparatorMissing, PlainWorker, split
from bench.contest import contest, contestant, ours
from bench.figure import Figure, Promise
from farhand.errors import SandboxError
from farhand.sandbox.environment import DEFAULT
from farhand.sandbox.hand import Hand

CASES = Path(__file__).parent.parent / "tests" / "cases" / "bench"
PROGRAMS = 12


@dataclass(frozen=True, slots=True)
class Program:
    """Code and the text of its value; `parts` is what a plain worker is given."""

    name: str
    code: str
    parts: tuple[str, str]
    expected: str


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


async def cpu(bench: Bench) -> Figure:
    rig, others, cases = await bench.rig(), bench.comparators, programs()
    plain = PlainWorker(others.plain_command())
    boxed: list[PlainWorker] = []

    async def in_bwrap(program: Program) -> tuple[float, str]:
        if not boxed:
            boxed.append(PlainWorker(others.bwrap_command()))
        return await _in_worker(boxed[0], program)

    def against(run: Run) -> Callable[[], Awaitable[float]]:
        return _Pairs(plain, run, cases).speed

    try:
        async with boxes.kept(rig, DEFAULT) as hand:
            some = _Pairs(
                plain, lambda program: _driven(bench, "interpreter", program), cases[: 4 if bench.quick else 12]
            )
            slow = contestant("smolagents LocalPythonExecutor", some.speed_of_those_that_run, every=1000, warm_up=False)
            contestants = [
                ours(against(lambda program: _in_box(hand, program)), Promise(0.97, at_most=False)),
                contestant("bwrap python3", against(in_bwrap), every=5),
                contestant("Jupyter kernel", against(lambda program: _driven(bench, "jupyter", program)), every=5),
                slow,
                contestant("plain subprocess", against(lambda program: _in_worker(plain, program)), every=5),
            ]
            series = await contest(bench.rounds(30, 5), contestants, bench.control)
            slow.series.note = "; ".join(some.refused)
    finally:
        for worker in (plain, *boxed):
            worker.close()
        others.close()
    how = (
        f"Speed as a share of plain CPython's: each of the {PROGRAMS} programs of `tests/cases/bench` runs in the "
        "contestant and in a plain worker right before or after, by turns. A sample is the geometric mean of the "
        "twelve ratios; time is from sending the code to having its value. `plain subprocess` is plain CPython against "
        "itself: what it is off 1 is noise. bwrap runs Debian's build of Python, the others that of the boxes."
    )
    return Figure("cpu", "CPU-bound code", how, "of CPython's speed", series)


class _Pairs:
    """One contestant against the plain worker."""

    def __init__(self, plain: PlainWorker, run: Run, cases: Sequence[Program]) -> None:
        self._plain, self._run, self._cases = plain, run, cases
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
        return (await _in_worker(self._plain, program))[0]


async def _in_box(hand: Hand, program: Program) -> tuple[float, str]:
    clock = Clock()
    value = await boxes.run(hand, program.code)
    return clock.ms(), value


async def _in_worker(worker: PlainWorker, program: Program) -> tuple[float, str]:
    clock = Clock()
    value = worker.run_split(*program.parts)
    return clock.ms(), value


async def _driven(bench: Bench, driver: str, program: Program) -> tuple[float, str]:
    answer = bench.comparators.driver(driver).ask("run", code=program.code)
    if "failed" in answer:
        raise ComparatorMissing(f"{program.name}: {answer['failed']}")
    return float(answer["seconds"]) * 1000, str(answer["text"])
