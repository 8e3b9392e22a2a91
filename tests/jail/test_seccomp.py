"""The filter's program, run by a small interpreter of its instructions: every call of both machines gets its
verdict."""

from __future__ import annotations

import errno
import struct

import pytest

from farhand.sandbox.local import seccomp
from farhand.sandbox.local.numbers import AUDIT_ARCH, numbers

MACHINES = sorted(AUDIT_ARCH)


def verdict(code: bytes, machine: str, number: int, *arguments: int) -> str:
    """What the kernel would answer."""
    whole = (*arguments, *[0] * (6 - len(arguments)))
    data = struct.pack("=IIQ6Q", number & 0xFFFFFFFF, AUDIT_ARCH[machine], 0, *[each & (1 << 64) - 1 for each in whole])
    place = value = 0
    for _ in range(len(code) // 8):
        kind, yes, no, word = struct.unpack_from("=HBBI", code, place * 8)
        place += 1
        if kind == 0x20:
            (value,) = struct.unpack_from("=I", data, word)
        elif kind == 0x54:
            value &= word
        elif kind == 0x05:
            place += word
        elif kind in (0x15, 0x35, 0x45):
            taken = {0x15: value == word, 0x35: value >= word, 0x45: bool(value & word)}[kind]
            place += yes if taken else no
        elif kind == 0x06:
            return "allow" if word == 0x7FFF0000 else errno.errorcode[word & 0xFFFF]
        else:
            raise AssertionError(f"instruction {kind:#x}")
    raise AssertionError("the program does not end")


@pytest.mark.parametrize("machine", MACHINES)
def test_every_call_gets_its_verdict(machine: str) -> None:
    code, table = seccomp.program(machine), numbers(machine)
    allowed, refused = set(seccomp.ALLOWED.split()), set(seccomp.REFUSED.split())
    assert allowed.isdisjoint(refused)
    looked_at = {"clone", "socket", "socketpair", "setsockopt", "ioctl", "prctl", "mknod", "mknodat", "mmap", "fcntl"}
    for name, number in table.items():
        if name not in looked_at:
            expected = "allow" if name in allowed else "EPERM" if name in refused else "ENOSYS"
            assert (name, verdict(code, machine, number)) == (name, expected)
    for number in set(range(2000)) - set(table.values()) | {0x40000000, 0x40000027, 0x7FFFFFFF, 0xFFFFFFFF}:
        assert verdict(code, machine, number) == "ENOSYS"


@pytest.mark.parametrize("machine", MACHINES)
def test_arguments(machine: str) -> None:
    code, table = seccomp.program(machine), numbers(machine)

    def of(name: str, *arguments: int) -> str:
        return verdict(code, machine, table[name], *arguments)

    assert of("clone", 0x3D0F00) == of("clone", 17) == of("clone", 0x4111) == "allow"
    for bit in (17, 25, 26, 27, 28, 29, 30):
        assert of("clone", 1 << bit | 17) == "EPERM"
    assert [of("socket", family, 1, 0) for family in (1, 2, 10)] == ["allow"] * 3
    assert {of("socket", family, 1, 0) for family in set(range(50)) - {1, 2, 10}} == {"EAFNOSUPPORT"}
    assert [of("socket", 2, 1, 6), of("socket", 10, 2, 17), of("socket", 1, 1, 99)] == ["allow"] * 3
    assert of("socket", 2, 1, 132) == of("socket", 10, 1, 262) == "EPROTONOSUPPORT"
    assert [of("socketpair", 1), of("socketpair", 2)] == ["allow", "EAFNOSUPPORT"]
    assert [of("setsockopt", 0, 1, 26), of("setsockopt", 0, 1, 2), of("setsockopt", 0, 0, 26)] == [
        "EPERM",
        "allow",
        "allow",
    ]
    assert [of("ioctl", 0, 0x5412), of("ioctl", 0, 0x5401), of("ioctl", 0, 0x1234)] == ["EPERM", "allow", "ENOTTY"]
    assert of("ioctl", 0, 1 << 32 | 0x5412) == "EPERM"
    assert [of("prctl", 15), of("prctl", 4), of("prctl", 22)] == ["allow", "EPERM", "EPERM"]
    assert [of("mknodat", 0, 0, kind) for kind in (0o644, 0o100644, 0o10644, 0o140644)] == ["allow"] * 4
    assert [of("mknodat", 0, 0, kind) for kind in (0o20666, 0o60666)] == ["EPERM"] * 2
    assert [of("mmap", 0, 1, 3, 0x22), of("mmap", 0, 1, 3, 0x40022)] == ["allow", "ENOMEM"]
    assert [of("fcntl", 0, 1), of("fcntl", 0, 1031)] == ["allow", "EPERM"]


def test_another_architecture() -> None:
    code = seccomp.program("x86_64")
    assert verdict(code, "aarch64", numbers("x86_64")["read"]) == "ENOSYS"


@pytest.mark.parametrize("machine", MACHINES)
def test_size(machine: str) -> None:
    assert len(seccomp.program(machine)) // 8 < 512
    assert set(seccomp.program(machine)[0::8]) <= {0x20, 0x54, 0x05, 0x15, 0x35, 0x45, 0x06}


def test_every_name_is_known() -> None:
    names = set((seccomp.ALLOWED + seccomp.REFUSED).split()) | set(seccomp._checks())
    assert names <= set(numbers("x86_64"))
    assert numbers("riscv64") == {}
