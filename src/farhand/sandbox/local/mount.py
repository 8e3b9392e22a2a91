"""The mounts of the jail: the shared private root, made once in the zygote, and what each box adds to its copy.

Runs in the zygote: Python 3.9 and newer.
"""

from __future__ import annotations

import os
from typing import Any

from . import syscall
from .syscall import MS_NODEV, MS_NOEXEC, MS_NOSUID, MS_PRIVATE, MS_RDONLY, MS_REC, MS_REMOUNT

_STAGE = "/tmp"
"""Where the new root is put together. Any folder does: it is covered in this mount namespace only."""
_DEVICES = ("null", "zero", "full", "random", "urandom")
_DEVICE_LINKS = (
    ("fd", "/proc/self/fd"), ("stdin", "/proc/self/fd/0"), ("stdout", "/proc/self/fd/1"),
    ("stderr", "/proc/self/fd/2"), ("shm", "/tmp/.shm"),
)  # fmt: skip
_FOLDERS = ("/proc", "/dev", "/tmp", "/workspace", "/.empty")
_READ_ONLY = syscall.MOUNT_ATTR_RDONLY | syscall.MOUNT_ATTR_NOSUID
_OWN_INODES = 4
"""The root of a box's disk and the three folders in it that are not the guest's."""


class Source:
    """A file or folder of the machine, held as a detached tree, so that neither its parents' modes nor a mount above
    matter later."""

    def __init__(self, path: str, target: str) -> None:
        self.target = target
        self._folder = os.path.isdir(path)
        self._tree = syscall.open_tree(path)

    def attach(self, root: str) -> None:
        make_place(root + self.target, self._folder)
        syscall.move_mount(self._tree, root + self.target)
        os.close(self._tree)


def make_place(target: str, folder: bool) -> None:
    os.makedirs(target if folder else os.path.dirname(target), mode=0o755, exist_ok=True)
    if not folder and not os.path.exists(target):
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))


def sources(binds: list[tuple[str, str]]) -> list[Source]:
    """Sorted by target, so that one inside another comes later. Needs the right to mount."""
    devices = [(f"/dev/{name}", f"/dev/{name}") for name in _DEVICES]
    return [Source(path, target) for path, target in sorted(binds, key=lambda each: each[1]) + devices]


def enter_private_root(plan: dict[str, Any], trees: list[Source]) -> None:
    """Build the read-only root and make it this process's own. /tmp stays writable until `seal`."""
    syscall.mount("none", "/", "", MS_REC | MS_PRIVATE)
    syscall.mount("root", _STAGE, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,nr_inodes=500,mode=755")
    for folder in _FOLDERS:
        os.mkdir(_STAGE + folder, 0o755)
    for tree in trees:
        tree.attach(_STAGE)
        device = tree.target.startswith("/dev/")
        flags = _READ_ONLY | (syscall.MOUNT_ATTR_NOEXEC if device else syscall.MOUNT_ATTR_NODEV)
        syscall.restrict_mount(_STAGE + tree.target, flags)
    for path, text in plan["links"]:
        make_place(_STAGE + os.path.dirname(path), True)
        os.symlink(text, _STAGE + path)
    for name, text in _DEVICE_LINKS:
        os.symlink(text, f"{_STAGE}/dev/{name}")
    for path, text in plan["files"].items():
        make_place(_STAGE + path, False)
        with open(_STAGE + path, "wb") as file:
            file.write(text.encode())
    for folder in plan["masked"]:
        if os.path.isdir(_STAGE + folder):
            syscall.bind(_STAGE + "/.empty", _STAGE + folder)
            syscall.restrict_mount(_STAGE + folder, _READ_ONLY | syscall.MOUNT_ATTR_NODEV)
    # Before the old root goes: without one whole proc in sight the kernel refuses another.
    syscall.mount("proc", _STAGE + "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    os.chdir(_STAGE)
    syscall.pivot_root_here()
    syscall.mount("tmp", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, "size=64m,mode=777")
    os.chdir("/")


def seal() -> None:
    """The root becomes read-only. What is mounted below keeps its own flags; /tmp is covered by each box's own."""
    syscall.mount("none", "/", "", MS_REMOUNT | syscall.MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)


def add_disk(size_bytes: int, files: int, owner: int, seeds: list[tuple[str, str]]) -> None:
    """One sized tmpfs for /workspace and /tmp together, so that one number bounds all a box can store."""
    options = f"size={size_bytes},nr_inodes={files + _OWN_INODES + len(seeds) * 2},mode=755"
    syscall.mount("disk", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, options)
    for name, mode in (("workspace", 0o755), ("tmp", 0o777), ("tmp/.shm", 0o777)):
        path = f"/tmp/{name}"
        os.mkdir(path)
        os.chmod(path, mode)
        os.chown(path, owner, owner)
    for link, text in seeds:
        place = "/tmp" + link
        os.makedirs(os.path.dirname(place), exist_ok=True)
        os.symlink(text, place)
        os.chown(os.path.dirname(place), owner, owner)
    syscall.bind("/tmp/workspace", "/workspace")
    syscall.bind("/tmp/tmp", "/tmp")


def add_proc() -> str:
    """A proc for this pid namespace that shows a process to nobody but itself; "full" where the kernel cannot hide
    the rest.

    subset=pid leaves out what tells of the machine: /proc/cpuinfo, meminfo, kallsyms, sys, config.gz.
    """
    flags = MS_NOSUID | MS_NODEV | MS_NOEXEC
    try:
        syscall.mount("proc", "/proc", "proc", flags, "hidepid=2,subset=pid")
    except OSError:
        syscall.mount("proc", "/proc", "proc", flags, "hidepid=2")
        return "full"
    return "pid"
