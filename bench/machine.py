"""The machine that the figures come from."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench.comparator import Comparators
from bench.figure import quantile, shown


def facts(folder: Path, comparators: Comparators) -> dict[str, str]:
    """Kernel, processor, memory, versions. `folder` is where the record was written."""
    others = ", ".join(f"{name} {version or 'missing'}" for name, version in comparators.versions().items())
    return {
        "kernel": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "CPU": f"{_cpu()}, {os.cpu_count()} cores",
        "memory": _memory(),
        "disk of the record": _filesystem(folder),
        "system": _system(),
        "user": "root" if os.geteuid() == 0 else "an ordinary user",
        "Python of harness and boxes": f"{platform.python_version()} ({sys.implementation.name})",
        "comparators": others,
    }


def load() -> str:
    return " ".join(f"{each:.2f}" for each in os.getloadavg())


def noise(samples: Sequence[float]) -> str:
    """How long a byte took to another process and back, over the run."""
    if not samples:
        return "not measured"
    least, p50, p95 = min(samples), quantile(samples, 0.5), quantile(samples, 0.95)
    return f"min {shown(least)}, p50 {shown(p50)}, p95 {shown(p95)} ms (n {len(samples)})"


class Pressure:
    """The share of a time in which some process of the machine waited for a processor, by the kernel's own count."""

    def __init__(self) -> None:
        self._began, self._before = time.monotonic(), self._total()

    def told(self) -> str:
        total = self._total()
        if total is None or self._before is None:
            return "the kernel does not say"
        share = (total - self._before) / 1e6 / max(1e-6, time.monotonic() - self._began)
        return f"{share:.0%} of the run"

    @staticmethod
    def _total() -> int | None:
        for line in _read("/proc/pressure/cpu").splitlines():
            if line.startswith("some "):
                return int(line.rpartition("total=")[2])
        return None


def _cpu() -> str:
    for line in _read("/proc/cpuinfo").splitlines():
        if line.startswith(("model name", "Model", "CPU part")):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def _memory() -> str:
    line = next((line for line in _read("/proc/meminfo").splitlines() if line.startswith("MemTotal")), "")
    return f"{int(line.split()[1]) / 1024 / 1024:.1f} GiB" if line else "unknown"


def _system() -> str:
    for line in _read("/etc/os-release").splitlines():
        if line.startswith("PRETTY_NAME="):
            return line.partition("=")[2].strip('"')
    return "unknown"


def _filesystem(folder: Path) -> str:
    """The type of the file system that holds a folder: the longest mount point above it."""
    best, kind = "", "unknown"
    place = str(folder.resolve())
    for line in _read("/proc/self/mounts").splitlines():
        _, point, type_ = line.split()[:3]
        above = point == "/" or place == point or place.startswith(point + "/")
        if above and len(point) >= len(best):
            best, kind = point, type_
    return kind


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
