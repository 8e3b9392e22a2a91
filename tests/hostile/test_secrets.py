"""Secrets planted wherever a harness holds some. None is in the box, nor in the processes that make boxes, nor in
what is written down."""

from __future__ import annotations

import os
import secrets
from functools import partial
from pathlib import Path

import pytest

from chat_server import serving
from driving import SMALL
from farhand import event as ev
from farhand import registry
from farhand.agent import CodeAgent
from farhand.sandbox.environment import BARE
from farhand.sandbox.local.sandbox import LocalSandbox
from farhand.tool import tool

from .attack import PRELUDE, Attacker

pytestmark = [pytest.mark.anyio, pytest.mark.jail, pytest.mark.hostile]

FIRST, SECOND = secrets.token_hex(6), secrets.token_hex(6)
"""Every marker begins with these two. They are put together nowhere but on this side."""


def marker() -> str:
    return FIRST + SECOND + secrets.token_hex(6)


SEARCH = f"""
import os, stat
first, second = {FIRST[::-1]!r}[::-1].encode(), {SECOND[::-1]!r}[::-1].encode()
found, searched = [], dict.fromkeys(("files", "memory", "proc"), 0)
def look(where, kind, data):
    searched[kind] += len(data)
    place = data.find(first)
    while place >= 0:
        after = place + len(first)
        if data[after : after + len(second)] == second:
            found.append(where)
        place = data.find(first, after)
def read(path, kind):
    try:
        with open(path, "rb", 0) as file:
            look(path, kind, file.read(16 << 20))
    except OSError:
        pass
for pid in os.listdir("/proc"):
    for name in ("environ", "cmdline", "maps", "mountinfo", "status", "stat", "comm", "cgroup", "limits"):
        read(f"/proc/{{pid}}/{{name}}", "proc")
look("environment", "proc", repr(os.environ).encode())
with open("/proc/self/mem", "rb", 0) as memory:
    for line in open("/proc/self/maps"):
        area, rights = line.split()[:2]
        start, end = (int(each, 16) for each in area.split("-"))
        if rights[0] != "r" or "[v" in line:
            continue
        for place in range(start, end, 16 << 20):
            try:
                memory.seek(place)
                look(line, "memory", memory.read(min(end - place, (16 << 20) + 64)))
            except OSError:
                pass
skipped = {{"/proc", os.path.realpath(sys.base_prefix) if "sys" in globals() else "/usr", "/usr", "/opt/site"}}
for root, folders, names in os.walk("/"):
    if root in skipped:
        folders.clear()
        continue
    for name in names:
        path = os.path.join(root, name)
        if stat.S_ISREG(os.lstat(path).st_mode):
            read(path, "files")
            look(path, "files", path.encode())
for path in {{"/usr", "/opt/site"}}:
    for root, folders, names in os.walk(path):
        folders[:] = [each for each in folders if not each.startswith("__pycache__")]
        for name in names:
            look(root, "files", name.encode())
assert searched["memory"] > 5_000_000 and searched["proc"] > 1000 and searched["files"] > 1000, searched
"""
"""Leaves in `found` where a marker stands: in what can be read of /proc, in memory, in files and their names. Contents
of the machine's own programs are left out."""


async def test_the_search_finds_what_is_there(attack: Attacker) -> None:
    plant = f"""
import sys
kept = {FIRST!r} + {"".join(reversed(SECOND))!r}[::-1]
os.environ["KEPT"] = kept
open("/tmp/kept", "w").write(kept)
open("/tmp/" + kept, "w").close()
"""
    found = (await attack(plant + SEARCH + "\n' '.join(found)")).text or ""
    for place in ("/tmp/kept", "/tmp/" + FIRST + SECOND, "environment", "[heap]"):
        assert place in found


class Key:
    """A client that holds its key."""

    def __init__(self, key: str) -> None:
        self.key = key

    def __repr__(self) -> str:
        return f"Key({self.key})"


async def test_planted_secrets_are_nowhere(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted = {name: marker() for name in ("OPENAI_API_KEY", "BANK_TOKEN", "DB_URL", "PLAIN")}
    monkeypatch.setenv("OPENAI_API_KEY", planted["OPENAI_API_KEY"])
    monkeypatch.setenv("BANK_TOKEN", planted["BANK_TOKEN"])
    monkeypatch.setenv("DATABASE", f"postgres://user:{planted['DB_URL']}@host/db")
    monkeypatch.setenv("PLAIN", planted["PLAIN"])
    held, filled, given, default = marker(), marker(), marker(), marker()
    client = Key(held)
    host_sandbox = LocalSandbox(own_home)

    @tool
    def pay(amount: int, api_key: str = default, bank: str = planted["BANK_TOKEN"], client: Key = client) -> str:
        """Pays.

        Args:
            amount: how much
            api_key: stays here
            bank: stays here
            client: stays here
        """
        if amount == 1:
            raise ValueError(f"401 for {planted['BANK_TOKEN']} at https://me:{given}@bank and {os.environ['DATABASE']}")
        if amount == 2:
            raise ConnectionError(planted["OPENAI_API_KEY"])
        return "paid" if api_key == default and client.key == held else "not with these"

    def ask(question: str, key: str) -> str:
        """Asks.

        Args:
            question: what
            key: stays here
        """
        return f"{len(key)}"

    calls = """
told = [pay(5)]
for amount in (1, 2):
    try: pay(amount)
    except Exception as error: told.append(repr(error))
told += [repr(pay.__signature__), pay.__doc__, ask("x")]
"""
    agent_code = f"```python\nimport sys\n{calls}\n{SEARCH}\nfound or told[0]\n```"
    answer = "```python\nfinal_answer([found, told[0], told[-1]])\n```"
    with serving(agent_code, answer) as server:
        model = registry.model(server.model, own_home)
        tools = [pay, tool(partial(ask, key=filled), name="ask", description="Asks.")]
        agent = CodeAgent(tools, model, host_sandbox, environment=BARE, limits=SMALL, home=own_home)
        result = await agent.run_async("search")
        status = await host_sandbox.status()
        assert status is not None
        everybody = below(status["pid"])
        read = {pid: marks_in(pid) for pid in everybody}
        await agent.aclose()
        asked = repr(server.asked)
    assert result.answer == [[], "paid", str(len(filled))]
    assert status["environments"][0]["zygote"] in everybody
    assert set(read.values()) <= {0, None}
    # Of root nothing is hidden; an ordinary user may not look into what is not dumpable.
    assert read[status["pid"]] == 0
    assert os.geteuid() != 0 or None not in read.values()
    assert FIRST + SECOND not in asked
    written = [path for path in own_home.rglob("*") if "environments" not in path.parts and path.is_file()]
    assert {"farhand.db", "host.log"} <= {path.name for path in written}
    for path in written:
        assert (FIRST + SECOND).encode() not in path.read_bytes(), path
    assert not any(FIRST + SECOND in repr(event) for event in result.events)
    assert "[secret]" in repr([event.data for event in result.events if event.type == ev.EFFECT_SETTLED])


def below(pid: int) -> list[int]:
    """A process and all that come from it, the host with its zygotes, inits and boxes."""
    found = [pid]
    for each in found:
        for task in os.listdir(f"/proc/{each}/task"):
            found += map(int, Path(f"/proc/{each}/task/{task}/children").read_text().split())
    return found


def marks_in(pid: int) -> int | None:
    """How many markers a process holds in memory, environment and arguments; None where it cannot be looked into."""
    mark, count, searched = (FIRST + SECOND).encode(), 0, 0
    try:
        for name in ("environ", "cmdline"):
            count += Path(f"/proc/{pid}/{name}").read_bytes().count(mark)
        with open(f"/proc/{pid}/mem", "rb", 0) as memory:
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                area, rights = line.split()[:2]
                if rights[0] != "r" or "[v" in line:
                    continue
                start, end = (int(each, 16) for each in area.split("-"))
                try:
                    memory.seek(start)
                    data = memory.read(end - start)
                except OSError:
                    continue
                searched += len(data)
                count += data.count(mark)
    except PermissionError:
        return None
    assert searched > 100_000
    return count


async def test_nothing_of_another_session_is_in_a_box(attack: Attacker) -> None:
    """Boxes of one zygote, one after another and side by side: memory, files, processes and sockets are their own."""
    mark = marker()
    leave = f"""
import sys
mark = {mark[: len(FIRST)]!r} + {mark[len(FIRST) :]!r}
kept = [mark * 1000 for _ in range(100)]
for path in ("/tmp/left", "/workspace/left", "/dev/shm/left", os.path.expanduser("~/left")):
    open(path, "w").write(mark)
os.environ["LEFT"] = mark
open_port = socket.create_server(("127.0.0.1", 4711))
abstract = socket.socket(socket.AF_UNIX); abstract.bind("\\0" + mark[:{len(FIRST)}]); abstract.listen()
if os.fork() == 0: time.sleep(60)
"""
    look = f"""
import sys
{SEARCH}
reached = []
for family, address in ((socket.AF_INET, ("127.0.0.1", 4711)), (socket.AF_UNIX, "\\0" + first.decode())):
    try: socket.socket(family).connect(address); reached.append(address)
    except OSError: pass
left = [each for each in os.listdir("/tmp") + os.listdir("/workspace") + os.listdir("/dev/shm") if "left" in each]
pids = [pid for pid in os.listdir("/proc") if pid.isdigit()]
[found, reached, left, pids == [str(os.getpid())], "LEFT" in os.environ]
"""
    holding = attack.agent(PRELUDE + leave, "final_answer(1 + 1)")
    assert (await holding.run_async("leave")).answer == 2
    beside = await attack(look)  # while the other one lives
    await holding.aclose()
    after = await attack(look)
    for fallout in (beside, after):
        assert fallout.text == "[[], [], [], True, False]"
    status = await attack.sandbox.status()  # type: ignore[attr-defined]
    assert {marks_in(pid) for pid in below(status["pid"])[1:]} <= {0, None}
