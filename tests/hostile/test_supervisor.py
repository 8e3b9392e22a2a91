"""Guest code against the memory of whom it must not speak for: the supervisor beside it, the init above it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from driving import act, opened, still_works
from farhand.sandbox.subprocess import SubprocessBox, SubprocessSandbox

from .attack import Attacker

pytestmark = [pytest.mark.anyio, pytest.mark.hostile]

WRITE = """
import ctypes, os, signal
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
class Vector(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
def attempts(pid, place):
    data = ctypes.create_string_buffer(b"written by the guest")
    ours, theirs = Vector(ctypes.addressof(data), 8), Vector(place, 8)
    def memory(mode):
        with open(f"/proc/{pid}/mem", mode, 0) as file:
            file.seek(place)
            return file.write(b"written") if "+" in mode else file.read(8)
    def call(number, *arguments):
        ctypes.set_errno(0)
        plain = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
        if libc.syscall(ctypes.c_long(number), *plain) < 0:
            raise OSError(ctypes.get_errno(), "refused")
    ptrace, readv, writev = (101, 310, 311) if os.uname().machine == "x86_64" else (117, 270, 271)
    yield "read", lambda: memory("rb")
    yield "write", lambda: memory("r+b")
    yield "maps", lambda: open(f"/proc/{pid}/maps").read()
    yield "environ", lambda: open(f"/proc/{pid}/environ", "rb").read()
    yield "descriptor", lambda: os.open(f"/proc/{pid}/fd/1", os.O_RDWR)
    yield "folder", lambda: os.listdir(f"/proc/{pid}/cwd/")
    yield "vm_readv", lambda: call(readv, pid, ctypes.byref(ours), 1, ctypes.byref(theirs), 1, 0)
    yield "vm_writev", lambda: call(writev, pid, ctypes.byref(ours), 1, ctypes.byref(theirs), 1, 0)
    yield "attach", lambda: call(ptrace, 16, pid, 0, 0)
    yield "seize", lambda: call(ptrace, 0x4206, pid, 0, 0)
    yield "pidfd_getfd", lambda: call(438, os.pidfd_open(pid), 1, 0)
def tried(pid, place):
    done = []
    for name, attempt in attempts(pid, place):
        try:
            attempt()
            done.append(name)
        except OSError:
            pass
    return done
"""


async def test_the_supervisor_of_a_plain_box(home: Path) -> None:
    """Of one that runs as an ordinary user: a guest that is root can do anything in a box without a wall."""
    sandbox = SubprocessSandbox(home)
    drop = "" if os.geteuid() else "os.setgroups([]); os.setresgid(1001, 1001, 1001); os.setresuid(1001, 1001, 1001)\n"
    async with opened(sandbox) as hand:
        assert isinstance(hand.box, SubprocessBox)
        record = json.loads((home / "boxes" / f"{hand.box.id}.json").read_text())
        place = int(Path(f"/proc/{record['pid']}/maps").read_text().split("-")[0], 16) if os.geteuid() == 0 else 4096
        code = f"{WRITE}\n{drop}assert os.getppid() == {record['pid']}\ntried({record['pid']}, {place})"
        outcome = await act(hand, code)
        assert outcome.text == "[]", outcome.done
        await still_works(hand)


@pytest.mark.jail
async def test_init_and_whatever_else_there_might_be(attack: Attacker) -> None:
    status = await attack.sandbox.status()  # type: ignore[attr-defined]
    host = status["pid"] if status else 1
    fallout = await attack(f"{WRITE}\n[tried(pid, 4096) for pid in (1, {host}, {os.getpid()})]")
    assert fallout.text == "[[], [], []]"
