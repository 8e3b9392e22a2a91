"""A tool call through the real loop, with both of its events on the disk."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from bench.bench import Bench, Clock
from bench.comparator import ComparatorMissing
from bench.contest import contest, contestant, ours
from bench.figure import Figure, Promise
from farhand.agent import CodeAgent
from farhand.errors import SandboxError
from farhand.event import EFFECT_INTENDED, EFFECT_SETTLED
from farhand.sandbox.environment import DEFAULT
from farhand.store.sqlite import SqliteStore
from farhand.testing.models import ScriptedModel, code
from farhand.tool import tool

PRAGMAS = ("journal_mode", "synchronous", "wal_autocheckpoint", "page_size")
SYNCHRONOUS = {0: "OFF", 1: "NORMAL", 2: "FULL", 3: "EXTRA"}


@tool
def ping(n: int) -> int:
    """Give the number back."""
    return n


@tool
async def ping_async(n: int) -> int:
    """Give the number back, from a coroutine."""
    return n


def calling(name: str, calls: int, end: str) -> str:
    """Code that takes the time of each of so many calls."""
    return (
        "import time\ntook = []\n"
        f"for n in range({calls}):\n"
        "    began = time.perf_counter()\n"
        f"    {name}(n)\n"
        "    took.append(time.perf_counter() - began)\n"
        f"{end}"
    )


async def call(bench: Bench) -> Figure:
    calls = bench.rounds(200, 40)
    rig = await bench.rig()
    home = bench.scratch / "record"
    home.mkdir()
    store = SqliteStore(home / "farhand.db")
    floor = _Floor(home / "floor.db")

    async def through_loop(name: str) -> list[float]:
        source = calling(name, calls, "final_answer(took)")
        agent = CodeAgent(
            [ping, ping_async], ScriptedModel([code(source)]), rig.sandbox, home=home, store=store, environment=DEFAULT
        )
        result = await agent.run_async("time the tool calls")
        await agent._let_go(result.session_id)  # the store is shared, so the agent is not closed
        written = [event.type for event in result.events]
        if (written.count(EFFECT_INTENDED), written.count(EFFECT_SETTLED)) != (calls, calls):
            raise SandboxError("the record does not hold the two events of each call")
        return [seconds * 1000 for seconds in result.answer]

    async def interpreted() -> list[float]:
        answer = bench.comparators.driver("interpreter").ask("run", code=_called("ping", calls))
        if "failed" in answer:
            raise ComparatorMissing(answer["failed"])
        return [float(answer["seconds"]) * 1000 / calls]

    async def bare_commits() -> list[float]:
        return [floor.two_commits() for _ in range(calls)]

    contestants = [
        ours(lambda: through_loop("ping"), Promise(1.5)),
        ours(lambda: through_loop("await ping_async"), which="a tool that is a coroutine"),
        contestant("two bare commits of SQLite, without any call", bare_commits),
        contestant("smolagents LocalPythonExecutor, nothing recorded", interpreted),
    ]
    try:
        series = await contest(bench.rounds(8, 2), contestants, bench.control)
        bench.facts["SQLite"] = f"{sqlite3.sqlite_version}; {await pragmas(store)}"
    finally:
        floor.close()
        await store.close()
        bench.comparators.close()
    how = (
        f"One action makes {calls} calls of a tool that gives its argument back; the code in the box takes the time of "
        "each. The real loop runs, with a scripted model: `effect.intended` is committed before the tool starts, "
        "`effect.settled` before the value is delivered, both at synchronous=FULL. A plain subprocess and a Jupyter "
        "kernel have no tools."
    )
    return Figure("call", "A tool call", how, "ms", series)


def _called(name: str, calls: int) -> str:
    return f"for n in range({calls}):\n    {name}(n)\n"


async def pragmas(store: SqliteStore) -> str:
    """Those of the connection that writes the record, read from it."""
    found = await store._writer.submit(lambda open_: {name: open_.db.pragma(name) for name in PRAGMAS})
    if found["synchronous"] != 2:
        raise SandboxError(f"the record is written at synchronous={found['synchronous']}")
    found["synchronous"] = SYNCHRONOUS[found["synchronous"]]
    return ", ".join(f"{name}={value}" for name, value in found.items())


class _Floor:
    """What the disk takes for two commits, in a file beside the record with the same pragmas."""

    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(path, isolation_level=None)
        for pragma in ("journal_mode = WAL", "synchronous = FULL", "wal_autocheckpoint = 0"):
            self._db.execute(f"PRAGMA {pragma}")
        self._db.execute("CREATE TABLE event (seq INTEGER PRIMARY KEY, data TEXT)")

    def two_commits(self) -> float:
        clock = Clock()
        for _ in range(2):
            self._db.execute("INSERT INTO event (data) VALUES (?)", ("x" * 600,))
        return clock.ms()

    def close(self) -> None:
        self._db.close()
