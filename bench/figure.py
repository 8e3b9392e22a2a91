"""What is measured: series of samples, what was promised of them, and the verdict."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

OURS = "Farhand"


@dataclass(frozen=True, slots=True)
class Promise:
    """A bound on the p50 of a series; `at_most` False turns it round."""

    bound: float
    at_most: bool = True

    def kept(self, p50: float) -> bool:
        return p50 <= self.bound if self.at_most else p50 >= self.bound


@dataclass(slots=True)
class Series:
    """Samples of one contestant, in the unit of its figure. `problem` says why there are none, or not all."""

    contestant: str
    promise: Promise | None = None
    required: bool = True
    """Whether the bench fails without it."""
    samples: list[float] = field(default_factory=list)
    problem: str = ""
    note: str = ""

    @property
    def ours(self) -> bool:
        return self.contestant.startswith(OURS)

    @property
    def n(self) -> int:
        return len(self.samples)

    def quantile(self, share: float) -> float:
        """The smallest sample that at least this share of the samples does not exceed."""
        return quantile(self.samples, share)

    @property
    def p50(self) -> float:
        return statistics.median(self.samples)

    @property
    def verdict(self) -> str:
        """`kept`, `missed`, `missing` for what gave no samples though the bench needs them, or ''."""
        if self.problem or not self.samples:
            return "missing" if self.required or self.promise is not None else ""
        if self.promise is None:
            return ""
        return "kept" if self.promise.kept(self.p50) else "missed"


@dataclass(slots=True)
class Figure:
    """One table of the report: what was measured how, and its series. The first series is what ratios are taken to."""

    name: str
    title: str
    how: str
    unit: str
    series: list[Series]

    def ratio(self, series: Series) -> float | None:
        """How many times the p50 of the first series this one's is."""
        first = self.series[0]
        if not first.samples or not series.samples or not first.p50:
            return None
        return series.p50 / first.p50

    @property
    def problems(self) -> list[str]:
        """A line for each promise that was missed and each series that is missing."""
        found = []
        for series in self.series:
            if series.verdict == "missing":
                found.append(f"{self.name}: {series.contestant} is missing: {series.problem or 'no samples'}")
            elif series.verdict == "missed":
                assert series.promise is not None
                bound = f"{'at most' if series.promise.at_most else 'at least'} {series.promise.bound:g} {self.unit}"
                found.append(f"{self.name}: {series.contestant} is at {shown(series.p50)}, promised is {bound}")
        return found


def quantile(samples: Sequence[float], share: float) -> float:
    if not samples:
        raise ValueError("no samples")
    ordered = sorted(samples)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def shown(number: float) -> str:
    """Three significant digits."""
    if number == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(number))))
    return f"{number:,.{min(digits, 4)}f}"


def exit_code(figures: Sequence[Figure]) -> int:
    """1 when a promise was missed or something that was to be measured is missing, or nothing was measured."""
    return 1 if not figures or any(figure.problems for figure in figures) else 0
