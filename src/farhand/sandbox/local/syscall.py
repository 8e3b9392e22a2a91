"""Linux system calls through ctypes: those the standard library has no name for.

Runs inside the zygote and the boxes too, so: Python 3.9 and newer, nothing of ours but `numbers`.
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct
from typing import Any, Callable

from .numbers import numbers

Prepared = Callable[[], int]

NR = numbers()
_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
# This one keeps the interpreter's lock: nothing but the call itself happens.
plain = ctypes.PyDLL(None, use_errno=True)
plain.syscall.restype = ctypes.c_long

# Made once: ctypes makes a class for each size of buffer, which would cost every box a quarter of a megabyte.
_CAPABILITY_VERSION_3 = ctypes.create_string_buffer(struct.pack("=Ii", 0x20080522, 0))
_NO_CAPABILITIES = ctypes.create_string_buffer(24)

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2
AT_FDCWD = -100
AT_EMPTY_PATH, AT_RECURSIVE = 0x1000, 0x8000
OPEN_TREE_CLONE = 1
MOVE_MOUNT_F_EMPTY_PATH = 4
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV, MOUNT_ATTR_NOEXEC = 1, 2, 4, 8

PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 1, 4
PR_CAPBSET_DROP, PR_SET_SECUREBITS = 24, 28
PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 38, 47, 4
SECUREBITS_ALL_LOCKED = 0b11101111
"""NOROOT, NO_SETUID_FIXUP and NO_CAP_AMBIENT_RAISE set, and with KEEP_CAPS locked."""

RESOLVE_NO_MAGICLINKS, RESOLVE_NO_SYMLINKS, RESOLVE_BENEATH = 0x02, 0x04, 0x08

M_ARENA_MAX = -8


def call(name: str, *arguments: Any) -> int:
    """The system call `name`. Integers travel as long, bytes as a C string, None as NULL. OSError names the call."""
    converted = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    result: int = _libc.syscall(ctypes.c_long(NR[name]), *converted)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def prepare(name: str, *arguments: Any) -> Prepared:
    """The call, to be made later and more than once, with its arguments converted now. It returns a negative number
    for an error.

    In a fresh child every object that is touched is a page copied, and this touches few."""
    converted = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    return functools.partial(plain.syscall, ctypes.c_long(NR[name]), *converted)


def perform(calls: list[Prepared]) -> None:
    for each in calls:
        if each() < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    call("mount", source.encode(), target.encode(), kind.encode(), flags, options.encode() or None)


def bind(source: str, target: str) -> None:
    """With everything mounted below: a part of it alone could uncover what a mount hides, and is refused."""
    call("mount", source.encode(), target.encode(), None, MS_BIND | MS_REC, None)


def prctl(option: int, value: int = 0, third: int = 0) -> int:
    return call("prctl", option, value, third, 0, 0)


def unshare(flags: int) -> None:
    call("unshare", flags)


def setns(descriptor: int, kind: int) -> None:
    call("setns", descriptor, kind)


def open_tree(path: str) -> int:
    """A detached copy of the tree at `path`, to be moved into another mount namespace."""
    return call("open_tree", AT_FDCWD, path.encode(), OPEN_TREE_CLONE | os.O_CLOEXEC | AT_RECURSIVE)


def move_mount(tree: int, target: str) -> None:
    call("move_mount", tree, b"", AT_FDCWD, target.encode(), MOVE_MOUNT_F_EMPTY_PATH)


def restrict_mount(target: str, attributes: int) -> None:
    """Adds mount attributes to everything at and below `target`."""
    structure = ctypes.create_string_buffer(struct.pack("=QQQQ", attributes, 0, 0, 0))
    call("mount_setattr", AT_FDCWD, target.encode(), AT_RECURSIVE, structure, 32)


def pivot_root_here() -> None:
    """Make the working directory the root and let go of the old one."""
    call("pivot_root", b".", b".")
    call("umount2", b".", MNT_DETACH)


def close_above(first: int) -> None:
    """Close every descriptor from `first` on."""
    call("close_range", first, 0xFFFFFFFF, 0)


def plain_fork() -> int:
    """fork without what Python does around it, which touches half a megabyte of pages in the child. For a child that
    shares no lock with another thread, because there is none, and that runs next to nothing."""
    pid: int = plain.fork()
    if pid < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"fork: {os.strerror(number)}")
    return pid


def pidfd_open(pid: int) -> int:
    return call("pidfd_open", pid, 0)


def open_beneath(folder: int, path: str, flags: int, mode: int = 0) -> int:
    """Open `path` under the directory descriptor `folder`: ELOOP for any symlink, EXDEV for a way out."""
    resolve = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS
    how = ctypes.create_string_buffer(struct.pack("=QQQ", flags | os.O_CLOEXEC, mode, resolve))
    return call("openat2", folder, os.fsencode(path), how, 24)


def lock_privileges() -> None:
    """No program this process or a child executes gains anything, root means nothing, and the bounding set is empty.
    What the process holds now it keeps."""
    prctl(PR_SET_SECUREBITS, SECUREBITS_ALL_LOCKED)
    capability = 0
    # By the plain function: some forty calls in every box. It ends at the first number the kernel does not know.
    while plain.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) == 0:
        capability += 1
    if capability == 0:
        raise OSError(ctypes.get_errno(), "the bounding set cannot be dropped")
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    prctl(PR_SET_NO_NEW_PRIVS, 1)


def no_capabilities() -> Prepared:
    """Empties the effective, permitted and inheritable sets."""
    return prepare("capset", _CAPABILITY_VERSION_3, _NO_CAPABILITIES)


def limit_malloc_arenas(count: int) -> None:
    """glibc only; each arena reserves 64 MiB of addresses and keeps what its threads freed."""
    mallopt = getattr(_libc, "mallopt", None)
    if mallopt is not None:
        mallopt(M_ARENA_MAX, count)
