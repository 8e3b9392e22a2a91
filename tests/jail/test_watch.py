"""What is seen of a box from outside: memory, shared or not, processor time, processes, threads."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from .conftest import Box

pytestmark = pytest.mark.jail

MIB = 1 << 20


def test_an_idle_box(box: Box) -> None:
    usage = box.do("usage")
    assert (usage["processes"], usage["threads"]) == (1, 1)
    assert 1 * MIB < usage["memory_bytes"] < 60 * MIB


def test_memory_of_one_process(new_box: Callable[..., Box]) -> None:
    box = new_box(memory_bytes=256 * MIB)
    before = box.do("usage")["memory_bytes"]
    box.eval("x = b'x' * (100 << 20)")
    assert 95 * MIB < box.do("usage")["memory_bytes"] - before < 110 * MIB
    box.eval("del x")
    assert box.do("usage")["memory_bytes"] - before < 10 * MIB


def test_pages_that_children_share_count_once(new_box: Callable[..., Box]) -> None:
    box = new_box(memory_bytes=256 * MIB)
    box.eval("import os, signal\nx = b'x' * (100 << 20)\nfor _ in range(8):\n    if os.fork() == 0: signal.pause()")
    usage = box.do("usage")
    assert usage["processes"] == 9
    assert usage["exact"] is True
    assert 100 * MIB < usage["memory_bytes"] < 200 * MIB


def test_files_on_disk_are_no_memory(new_box: Callable[..., Box]) -> None:
    box = new_box(memory_bytes=100 * MIB, disk_bytes=200 * MIB)
    code = """
import mmap
with open("/workspace/data", "wb") as file: file.write(b"x" * (150 << 20))
with open("/workspace/data", "r+b") as file: view = mmap.mmap(file.fileno(), 0)
result = sum(view[place] for place in range(0, len(view), 4096))
"""
    box.eval(code)
    assert box.do("usage")["memory_bytes"] < 60 * MIB


def test_shared_anonymous_memory_counts(new_box: Callable[..., Box]) -> None:
    box = new_box(memory_bytes=100 * MIB)
    box.eval("import mmap\nview = mmap.mmap(-1, 150 << 20)\nfor place in range(0, 150 << 20, 4096): view[place] = 1")
    usage = box.do("usage")
    assert usage["exact"] is True
    assert usage["memory_bytes"] > 150 * MIB


def test_page_tables_count(new_box: Callable[..., Box]) -> None:
    # Reading untouched memory maps the page of zeros: no resident page, but a table for every two megabytes.
    box = new_box(memory_bytes=64 * MIB)
    code = """
import mmap
view = mmap.mmap(-1, 1 << 36, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000, prot=mmap.PROT_READ)
result = sum(view[place] for place in range(0, 1 << 36, 2 << 20))
"""
    assert box.eval(code) == 0
    assert box.do("usage")["memory_bytes"] > 64 * MIB


def test_thirty_two_threads_under_256_mib(new_box: Callable[..., Box]) -> None:
    box = new_box(memory_bytes=256 * MIB)
    code = """
import threading
go = threading.Event()
threads = [threading.Thread(target=go.wait) for _ in range(32)]
for each in threads: each.start()
x = b"x" * (220 << 20)
"""
    box.eval(code)
    usage = box.do("usage")
    assert usage["threads"] == 33
    assert usage["memory_bytes"] < 256 * MIB
    box.eval("go.set()\nfor each in threads: each.join()")


def test_processor_time_of_those_that_ended(box: Box) -> None:
    burn = "end = time.process_time() + {0}\nwhile time.process_time() < end: pass"
    box.eval("import os, time\n" + burn.format(0.3))
    assert 0.25 < box.do("usage")["cpu_s"] < 1.0
    child = burn.format(0.3).replace("\n", "\n    ")
    box.eval(f"pid = os.fork()\nif pid == 0:\n    {child}\n    os._exit(0)\nos.waitpid(pid, 0)")
    assert 0.5 < box.do("usage")["cpu_s"] < 1.5
    # Buried by nobody who would be told: only what was seen while it lived can count.
    box.eval("import signal\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)")
    box.eval(f"pid = os.fork()\nif pid == 0:\n    {child}\n    signal.pause()")
    deadline = time.monotonic() + 20
    while box.do("usage")["cpu_s"] < 0.75 and time.monotonic() < deadline:
        pass
    box.eval("os.kill(pid, 9)")
    assert box.do("usage")["cpu_s"] >= 0.75


def test_a_process_whose_first_thread_has_ended_is_seen(new_box: Callable[..., Box]) -> None:
    box = new_box(memory_bytes=64 * MIB)
    code = """
import ctypes, os, threading, time
incoming, outgoing = os.pipe()
if os.fork() == 0:
    def work():
        block = bytearray(40 << 20)
        os.write(outgoing, b"x")
        while True: pass
    threading.Thread(target=work).start()
    time.sleep(0.1)
    # The first thread alone, and not the process; exit is call 60 or 93.
    ctypes.CDLL(None).syscall(93 if os.uname().machine == "aarch64" else 60, 0)
os.read(incoming, 1)
"""
    box.eval(code)
    deadline = time.monotonic() + 10
    while box.do("usage")["processes"] != 2 or box.do("usage")["threads"] < 3:
        assert time.monotonic() < deadline
    before = box.do("usage")
    assert before["memory_bytes"] > 40 * MIB
    while box.do("usage")["cpu_s"] <= before["cpu_s"]:
        assert time.monotonic() < deadline
    box.do("suspend")
    stopped = box.do("usage")["cpu_s"]
    assert box.do("usage")["cpu_s"] == stopped
    box.do("resume")


def test_a_name_with_parentheses(box: Box) -> None:
    box.eval("open('/proc/self/comm', 'w').write('a) R 1 (b')")
    assert box.do("usage")["processes"] == 1
