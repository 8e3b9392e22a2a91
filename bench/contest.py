"""Contestants take turns, so that a machine that gets slower or faster does so for all of them."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from bench.comparator import ComparatorMissing
from bench.figure import OURS, Promise, Series
from farhand.errors import FarhandError

Sample = Callable[[], Awaitable[float | Sequence[float]]]


@dataclass(slots=True)
class Contestant:
    """Something that gives a sample, or several, at a time. It takes part in every `every`-th round; its first sample,
    with cold caches, is not kept if it can be had again."""

    series: Series
    sample: Sample
    every: int = 1
    warm_up: bool = True

    async def take(self) -> None:
        try:
            got = await self.sample()
        except (ComparatorMissing, FarhandError, OSError) as problem:
            self.series.problem = f"{type(problem).__name__}: {problem}"[:500]
            return
        if self.warm_up:
            self.warm_up = False
            await self.take()
        else:
            self.series.samples += [got] if isinstance(got, float) else got


def contestant(
    name: str, sample: Sample, promise: Promise | None = None, *, every: int = 1, warm_up: bool = True
) -> Contestant:
    return Contestant(Series(name, promise), sample, every, warm_up)


def ours(sample: Sample, promise: Promise | None = None, which: str = "") -> Contestant:
    return contestant(f"{OURS}{', ' if which else ''}{which}", sample, promise)


class Control:
    """A byte to `cat` and back, timed once a round: on a busy machine it waits for a processor as everything does."""

    def __init__(self) -> None:
        self.samples: list[float] = []
        # In a session of its own, as the boxes are: the kernel shares processors among sessions.
        self._cat = subprocess.Popen(
            ["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, start_new_session=True
        )

    def sample(self) -> None:
        assert self._cat.stdin is not None
        assert self._cat.stdout is not None
        began = time.perf_counter()
        self._cat.stdin.write(b"x")
        self._cat.stdout.read(1)
        self.samples.append((time.perf_counter() - began) * 1000)

    def close(self) -> None:
        self._cat.communicate()


async def contest(rounds: int, contestants: Sequence[Contestant], control: Control) -> list[Series]:
    """Every contestant in every round, in an order that shifts by one each round. One that fails drops out."""
    for turn in range(rounds):
        control.sample()
        shift = turn % len(contestants)
        for one in [*contestants[shift:], *contestants[:shift]]:
            if not turn % one.every and not one.series.problem:
                await one.take()
    return [one.series for one in contestants]
