"""One action while it runs: its clock, its counters, the limit that it meets, its end."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from farhand.sandbox.runner.bounds import IDLE_SHARE, LIMIT_GRACE_S, TICK_S, TICK_SAMPLED_S
from farhand.sandbox.runner.hands import Usage
from farhand.sandbox.runner.reactor import Timer


class Stop(NamedTuple):
    """Why an action is stopped, as its end will say."""

    kind: str
    limit: str | None
    message: str


class Run:
    """One action while it runs."""

    def __init__(self, action: str) -> None:
        self.action = action
        self.started = self.sampled = time.monotonic()
        self.wall_s = self.cpu_start = self.cpu_s = 0.0
        self.peak = 0
        self.out_bytes = self.out_cut = 0
        self.displays = self.displays_cut = self.answers = self.answers_cut = self.calls = 0
        self.stop: Stop | None = None
        self.tick: Timer | None = None

    def begin(self, usage: Usage | None) -> None:
        if usage is not None:
            self.cpu_start = self.cpu_s = usage.cpu_s
            self.peak = usage.memory_bytes

    def interval(self, sampling: bool, limits: dict[str, Any]) -> float:
        """Seconds until the next look at it."""
        step = TICK_SAMPLED_S if sampling else TICK_S
        wall_s = limits.get("wall_s")
        if wall_s is None or self.stop is not None:
            return step
        return max(0.001, min(step, float(wall_s) - self.wall_s))

    def sample(self, now: float, usage: Usage | None, waits: bool, suspended: bool) -> None:
        """Add the time since the last sample to its clock, if code could run in it. `waits`: for a reply, all of it."""
        # A gap means that this process did not run, stopped or frozen with the box: it does not count in full.
        passed = min(now - self.sampled, 1.0)
        self.sampled = now
        used = passed
        if usage is not None:
            used = usage.cpu_s - self.cpu_s
            self.cpu_s = max(self.cpu_s, usage.cpu_s)
            self.peak = max(self.peak, usage.memory_bytes)
        if not suspended and not (waits and used < IDLE_SHARE * passed):
            self.wall_s += passed

    def met(self, limits: dict[str, Any], usage: Usage | None) -> tuple[Stop, float] | None:
        """The limit that it has reached, if any, and the grace before it is killed for that."""
        wall, cpu = limits.get("wall_s"), limits.get("cpu_s")
        if usage is not None:
            memory, processes = limits.get("memory_bytes"), limits.get("processes")
            if memory is not None and usage.memory_bytes > memory:
                text = f"the limit `memory_bytes` was reached: {memory:,} bytes for all processes of the action"
                return Stop("limit", "memory_bytes", text), 0.0
            if processes is not None and usage.processes > processes:
                text = f"the limit `processes` was reached: {processes} processes and threads together"
                return Stop("limit", "processes", text), 0.0
        if cpu is not None and self.cpu_s - self.cpu_start >= cpu:
            text = f"the limit `cpu_s` was reached: {cpu:g} s of processor time"
            return Stop("limit", "cpu_s", text), LIMIT_GRACE_S
        if wall is not None and self.wall_s >= wall:
            text = f"the limit `wall_s` was reached: the code may run for {wall:g} s"
            return Stop("limit", "wall_s", text), LIMIT_GRACE_S
        return None

    def done(self, shown: dict[str, str] | None, error: dict[str, Any] | None, idle_cut: int) -> dict[str, Any]:
        """What `done` says of it; `idle_cut` counts bytes that were cut before it began."""
        return {
            "t": "done",
            "action": self.action,
            "ok": error is None,
            "value": shown,
            "error": error,
            "usage": {
                "wall_s": round(self.wall_s, 6),
                "cpu_s": round(max(0.0, self.cpu_s - self.cpu_start), 6),
                "peak_memory_bytes": self.peak,
                "elapsed_s": round(time.monotonic() - self.started, 6),
            },
            "output": {
                "bytes": self.out_bytes,
                "cut_bytes": self.out_cut + idle_cut,
                "displays_cut": self.displays_cut,
                "answers_cut": self.answers_cut,
            },
        }
