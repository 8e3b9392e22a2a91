"""Bombs: of processes, threads, memory in all the forms it takes, descriptors. The limit is named, the box goes at
most, and its neighbour notices nothing."""

from __future__ import annotations

import time

import pytest

from driving import opened, still_works
from farhand import event as ev
from farhand.limits import MIB
from farhand.sandbox.local.sandbox import LocalSandbox

from .attack import Attacker, memory_grows_at_most

pytestmark = [pytest.mark.anyio, pytest.mark.jail, pytest.mark.hostile]

FILL = """
import mmap
def fill(block):
    for place in range(0, len(block), 4096): block[place] = 1
"""
SOCKETS = """
def hold_in(count, make):
    for _ in range(count):
        if os.fork() == 0:
            kept = []
            try:
                while True:
                    kept.append(make())
                    for each in kept[-1]:
                        each.setblocking(False)
                        each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 30)
                        try:
                            while True: each.send(bytes(65536))
                        except BlockingIOError: pass
            except OSError: time.sleep(60)
    time.sleep(60)
"""
CHILDREN = """
def children(make):
    for _ in range(40):
        if os.fork() == 0:
            block = make()
            fill(block)
            time.sleep(60)
    time.sleep(60)
"""
TABLES = """
block = mmap.mmap(-1, 1 << 40, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000, prot=mmap.PROT_READ)
sum(block[place] for place in range(0, 1 << 40, 2 << 20))
"""
DELETED = """
kept = []
while True:
    kept.append(open("/tmp/x", "wb", 0))
    kept[-1].write(b"x" * (1 << 20))
    os.unlink("/tmp/x")
"""
SPINNING = """
for _ in range(4):
    if os.fork() == 0:
        while True: pass
time.sleep(60)
"""
BOMBS = {
    "one allocation": ("bytearray(1 << 40)", "memory_bytes"),
    "a list that grows": ("x = [0]\nwhile True: x += x", "memory_bytes"),
    "private memory of children": (CHILDREN + "children(lambda: bytearray(60 << 20))", "memory_bytes"),
    "shared memory": ("kept = []\nwhile True: kept.append(mmap.mmap(-1, 8 << 20)); fill(kept[-1])", "memory_bytes"),
    "shared memory of children": (CHILDREN + "children(lambda: mmap.mmap(-1, 60 << 20))", "memory_bytes"),
    "page tables": (TABLES, "memory_bytes"),
    "sockets": (SOCKETS + "hold_in(4, lambda: socket.socketpair())", "memory_bytes"),
    "/dev/shm": ("with open('/dev/shm/x', 'wb') as file:\n    while True: file.write(b'x' * (1 << 20))", "disk_bytes"),
    "deleted files": (DELETED, "disk_bytes"),
    "threads": ("while True: threading.Thread(target=time.sleep, args=(60,)).start()", "processes"),
    "processes": ("while True:\n    if os.fork() == 0: time.sleep(60)", "processes"),
    "programs": ("import subprocess\nwhile True: subprocess.Popen(['/bin/sleep', '60'])", "processes"),
    "processor time of children": (SPINNING, "cpu_s"),
}


@pytest.mark.parametrize(("code", "limit"), BOMBS.values(), ids=BOMBS.keys())
async def test_bombs_meet_their_limit(attack: Attacker, local: LocalSandbox, code: str, limit: str) -> None:
    with memory_grows_at_most(32 * MIB):
        fallout = await attack(
            FILL + code, wall_s=20, cpu_s=1.5, memory_bytes=128 * MIB, disk_bytes=16 * MIB, processes=64
        )
    assert fallout.error["limit"] == limit
    assert limit in [event["limit"] for event in fallout.of(ev.LIMIT_REACHED)]
    async with opened(local) as neighbour:
        await still_works(neighbour)


async def test_buffers_of_connections(attack: Attacker) -> None:
    """A control group lets them have 32 MiB, then they wait; without one each connection counts as memory."""
    code = """
there = socket.create_server(('127.0.0.1', 4000), backlog=1000)
hold_in(4, lambda: (socket.create_connection(there.getsockname()), there.accept()[0]))
"""
    fallout = await attack(SOCKETS + code, wall_s=2, memory_bytes=128 * MIB)
    assert fallout.error["limit"] in ("memory_bytes", "wall_s")


FORMS_OF_FORKING = {
    "everybody forks": "os.fork()",
    "and ends at once": "os.fork() or os._exit(0)",
    "away from its parent": "os.fork() or (os.setsid(), os.fork())",
    "with threads": "threading.Thread(target=again).start()",
}


@pytest.mark.parametrize("code", FORMS_OF_FORKING.values(), ids=FORMS_OF_FORKING.keys())
async def test_a_box_full_of_processes_ends_in_time(attack: Attacker, local: LocalSandbox, code: str) -> None:
    again = f"def again():\n    while True:\n        try: {code}\n        except (OSError, RuntimeError): pass\nagain()"
    began = time.monotonic()
    fallout = await attack(again, wall_s=1, processes=64)
    assert fallout.kind in ("limit", "ended")
    assert time.monotonic() - began < 15
    async with opened(local) as neighbour:
        await still_works(neighbour)


KERNEL = {
    "pipes": """
def hold():
    kept = []
    try:
        while True:
            ends = os.pipe(); kept.append(ends); os.set_blocking(ends[1], False)
            try:
                while True: os.write(ends[1], bytes(65536))
            except BlockingIOError: pass
    except OSError: time.sleep(60)
""",
    "descriptors on their way": """
def hold():
    pair, count = socket.socketpair(), 0
    pair[0].setblocking(False)
    try:
        while True:
            ends = os.pipe(); socket.send_fds(pair[0], [b"x"], ends); os.close(ends[0]); os.close(ends[1])
    except OSError: time.sleep(60)
""",
    "file locks": """
import fcntl
def hold():
    file = open("/tmp/lock", "w+b")
    for place in range(10_000): fcntl.lockf(file, fcntl.LOCK_SH, 1, 2 * place)
    time.sleep(60)
""",
}


@pytest.mark.parametrize("code", KERNEL.values(), ids=KERNEL.keys())
async def test_memory_of_the_kernel_goes_with_the_box(attack: Attacker, code: str) -> None:
    """Bounded by the number of descriptors and processes alone where no control group counts it (SECURITY.md)."""
    start = "\nfor _ in range(7):\n    if os.fork() == 0: hold()\ntime.sleep(0.5)\n'held'"
    fallout = await attack(code + start, processes=8, wall_s=20)
    assert fallout.text == "'held'"


async def test_sockets_hold_no_more_than_they_are_counted_with(attack: Attacker) -> None:
    """Where no control group counts their buffers, each counts with 256 KiB: so that is what it may hold."""
    code = """
def pending(pair):
    sent = 0
    for each in pair:
        each.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF): each.setsockopt(socket.SOL_SOCKET, option, 1 << 30)
        try:
            while True: sent += each.send(bytes(4096))
        except BlockingIOError: pass
    return sent
there = socket.create_server(("127.0.0.1", 4000))
connected = socket.create_connection(there.getsockname()), there.accept()[0]
[pending(pair) <= 2 * 256 * 1024 for pair in (socket.socketpair(), connected)]
"""
    assert (await attack(code)).text == "[True, True]"


async def test_queued_signals_are_bounded(attack: Attacker) -> None:
    """As an ordinary user's they would be taken from what all of that user's programs share."""
    code = """
import ctypes
libc, count = ctypes.CDLL(None), 0
made = ctypes.create_string_buffer(8)
while count < 10_000 and libc.timer_create(1, None, made) == 0: count += 1
count < 5000
"""
    assert (await attack(code)).text == "True"


async def test_no_limit_can_be_raised(attack: Attacker) -> None:
    code = """
import resource
told = []
for name in ("NPROC", "DATA", "FSIZE", "NOFILE", "STACK", "MEMLOCK", "CORE"):
    kind = getattr(resource, "RLIMIT_" + name)
    soft, hard = resource.getrlimit(kind)
    for new in ((hard + 1, hard + 1), (-1, -1)):
        try:
            resource.setrlimit(kind, new)
            if resource.getrlimit(kind) != (soft, hard): told.append(name)
        except (ValueError, OSError): pass
for action in (lambda: os.nice(-1), lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)),
               lambda: os.setpriority(os.PRIO_PROCESS, 0, -20)):
    try:
        action()
        told.append("priority")
    except OSError: pass
told
"""
    assert (await attack(code)).text == "[]"


async def test_a_limit_is_each_actions_own_and_not_the_sessions_end(attack: Attacker) -> None:
    agent = attack.agent(
        "while True: pass", "while 1: pass", "x = bytearray(1 << 40)", "final_answer(1 + 1)", wall_s=0.3
    )
    result = await agent.run_async("attack")
    await agent.aclose()
    assert result.answer == 2
    met = [event.data["limit"] for event in result.events if event.type == ev.LIMIT_REACHED]
    assert met == ["wall_s"] * 2 + ["memory_bytes"]
