"""What every figure is measured with: hosts, comparators, a scratch folder, and how often."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from bench.boxes import Rig
from bench.comparator import Comparators
from bench.contest import Control
from farhand.home import farhand_home
from farhand.sandbox.environment import DEFAULT, build
from farhand.sandbox.local import root

NO_POOL = 0
POOL = 2
SITE = "/site"
"""Where the boxes' packages are in bubblewrap."""


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/farhand`, else `~/.cache/farhand`: on a disk, unlike perhaps /tmp."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    folder = Path(cache) if os.path.isabs(cache) else Path.home() / ".cache"
    return folder / "farhand"


@dataclass(slots=True)
class Bench:
    """One run. Hosts are started when a figure first needs them, and stopped when the run is over."""

    scratch: Path
    comparators: Comparators
    quick: bool
    say: Callable[[str], None]
    control: Control = field(default_factory=Control)
    facts: dict[str, str] = field(default_factory=dict)
    """What figures found out about the machine: pragmas, control groups."""
    rigs: dict[int, Rig] = field(default_factory=dict)

    def rounds(self, many: int, few: int) -> int:
        return few if self.quick else many

    async def rig(self, pool: int = NO_POOL) -> Rig:
        """A warm host that keeps so many boxes of each environment ready."""
        if pool not in self.rigs:
            rig = self.rigs[pool] = Rig(self.scratch, f"pool-{pool}", pool)
            await rig.warm()
            groups = (await rig.status())["groups"]
            self.facts["control groups of boxes"] = ", ".join(groups) or "none"
        return self.rigs[pool]


@asynccontextmanager
async def opened(quick: bool, say: Callable[[str], None]) -> AsyncIterator[Bench]:
    """A bench whose processes and files are gone afterwards."""
    cache = cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="bench-", dir=cache))
    site = build(DEFAULT, farhand_home(), say).site
    comparators = Comparators(cache / "bench", scratch, root.own_prefix()[0], site, say)
    bench = Bench(scratch, comparators, quick, say)
    try:
        yield bench
    finally:
        bench.control.close()
        comparators.close()
        for rig in bench.rigs.values():
            await rig.close()
        shutil.rmtree(scratch, ignore_errors=True)


class Clock:
    """Milliseconds since it was made."""

    def __init__(self) -> None:
        self._began = time.perf_counter()

    def ms(self) -> float:
        return (time.perf_counter() - self._began) * 1000
