"""`scripts/bench [--only NAME]… [--quick]`: measure, say the verdicts, write docs/benchmarks.md."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from bench import action, call, command, first, machine, memory, program, report
from bench.bench import Bench, cache_folder, opened
from bench.comparator import ComparatorMissing
from bench.figure import OURS, Figure, Promise, Series, exit_code
from farhand.errors import FarhandError

Measure = Callable[[Bench], Awaitable[Figure]]

DOCUMENT = Path(__file__).parent.parent / "docs" / "benchmarks.md"
MEASURES: dict[str, Measure] = {
    "first": first.first,
    "first-pandas": first.first_pandas,
    "pooled": first.pooled,
    "warm": action.warm,
    "cpu": program.cpu,
    "call": call.call,
    "memory": memory.memory,
    "pipe": action.pipe,
    "import": command.imported,
    "help": command.helped,
}


def say(text: str) -> None:
    print(text, flush=True)


async def figure_of(name: str, measure: Measure, bench: Bench) -> Figure:
    """One figure. What stops it as a whole counts as a promise that was not kept."""
    try:
        return await measure(bench)
    except (FarhandError, ComparatorMissing, OSError, TimeoutError) as problem:
        text = f"{type(problem).__name__}: {problem}"[:500]
        return Figure(name, name, "", "", [Series(OURS, Promise(0.0), problem=text)])


async def run(measures: Mapping[str, Measure], quick: bool) -> tuple[list[Figure], dict[str, str]]:
    """Measure the figures in order; with them, what the machine is."""
    before, pressure, figures = machine.load(), machine.Pressure(), []
    async with opened(quick, lambda text: say(f"bench: {text}")) as bench:
        for name, measure in measures.items():
            figure = await figure_of(name, measure, bench)
            figures.append(figure)
            say(f"{figure.name}: {figure.title}")
            for series in figure.series:
                say(report.line(figure, series))
        facts = machine.facts(cache_folder(), bench.comparators) | bench.facts
        facts["load average"] = f"{before} before, {machine.load()} after"
        facts["somebody waited for a processor"] = pressure.told()
        facts["a byte to another process and back"] = machine.noise(bench.control.samples)
    return figures, facts


def main(arguments: Sequence[str], measures: Mapping[str, Measure] = MEASURES, document: Path = DOCUMENT) -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench", description=(__doc__ or "").partition(": ")[2])
    parser.add_argument("--only", action="append", choices=measures, metavar="NAME", help=", ".join(measures))
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    asked = parser.parse_args(arguments)
    chosen = {name: measure for name, measure in measures.items() if not asked.only or name in asked.only}
    figures, facts = asyncio.run(run(chosen, asked.quick))
    for name, value in facts.items():
        say(f"{name}: {value}")
    if asked.only or asked.quick:
        say("nothing was written: docs/benchmarks.md takes a whole run, without --only and --quick")
    else:
        document.write_text(report.markdown(figures, facts), encoding="utf-8")
        say(f"written: {document}")
    for problem in (problem for figure in figures for problem in figure.problems):
        say(f"FAILED: {problem}")
    return exit_code(figures)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
