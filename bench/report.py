"""The figures as text: a line each while the bench runs, and docs/benchmarks.md."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from bench.figure import Figure, Series, shown

_HEAD = """\
# Benchmarks

Written by `scripts/bench`; do not edit. A promised figure is kept when the p50 of this run keeps it: no sample is left
out, no run is picked. The contestants of a figure take turns within the run, so that their ratios hold although times
drift with the machine's load. The first sample of each, with cold caches, is not counted.
"""


def line(figure: Figure, series: Series) -> str:
    """One series for a person who waits."""
    name = f"  {series.contestant:<55}"
    if not series.samples or series.problem:
        return f"{name} {'MISSING: ' + series.problem if series.verdict == 'missing' else 'not measured'}"
    text = f"{name} n {series.n:>5}  min {_cell(series, 0)}  p50 {_cell(series, 0.5)}  p95 {_cell(series, 0.95)}"
    promise = f"  {promised(figure, series)}: {series.verdict.upper()}" if series.promise else ""
    return f"{text} {figure.unit}{promise}"


def _cell(series: Series, share: float) -> str:
    value = min(series.samples) if not share else series.p50 if share == 0.5 else series.quantile(share)
    return f"{shown(value):>8}"


def promised(figure: Figure, series: Series) -> str:
    if series.promise is None:
        return ""
    return f"{'≤' if series.promise.at_most else '≥'} {series.promise.bound:g} {figure.unit}"


def markdown(figures: Sequence[Figure], facts: Mapping[str, str]) -> str:
    parts = [_HEAD, "## The promised figures", *_promises(figures), "## The machine", *_machine(facts)]
    for figure in figures:
        parts += [f"## {figure.title}", f"`scripts/bench --only {figure.name}`. {figure.how}", *_table(figure)]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _promises(figures: Sequence[Figure]) -> list[str]:
    rows = ["| figure | promised | measured (p50) | n | verdict |", "|---|---|---|---|---|"]
    for figure in figures:
        for series in figure.series:
            if series.promise is not None:
                which = series.contestant.partition(", ")[2]
                title = figure.title + (f" ({which})" if which else "")
                measured = f"{shown(series.p50)} {figure.unit}" if series.samples else "–"
                verdict = series.verdict if series.verdict == "kept" else f"**{series.verdict}**"
                rows.append(f"| {title} | {promised(figure, series)} | {measured} | {series.n} | {verdict} |")
    problems = [f"- {problem}" for figure in figures for problem in figure.problems]
    found = ["\n".join(rows)]
    return [*found, "What fails this run:", "\n".join(problems)] if problems else found


def _machine(facts: Mapping[str, str]) -> list[str]:
    rows = ["| | |", "|---|---|", f"| date | {time.strftime('%Y-%m-%d', time.gmtime())} |"]
    return ["\n".join([*rows, *(f"| {name} | {_escaped(value)} |" for name, value in facts.items())])]


def _table(figure: Figure) -> list[str]:
    rows = [f"| {figure.unit} | n | min | p50 | p95 | p50 by the first row's |", "|---|---|---|---|---|---|"]
    for series in figure.series:
        if series.problem or not series.samples:
            rows.append(f"| {series.contestant} | {series.n} | missing: {_escaped(series.problem)} | | | |")
            continue
        ratio = figure.ratio(series)
        cells = [_cell(series, share).strip() for share in (0, 0.5, 0.95)]
        times = "" if ratio is None or series is figure.series[0] else f"{shown(ratio)} ×"
        rows.append(f"| {series.contestant} | {series.n} | {' | '.join(cells)} | {times} |")
    notes = [f"{series.contestant}: not counted is {_escaped(series.note)}" for series in figure.series if series.note]
    return ["\n".join(rows), *notes]


def _escaped(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
