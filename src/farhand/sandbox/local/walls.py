"""Tries every wall of the jail for real, with the code that builds it, in processes made for that. `probe.py` starts
it and explains what it finds. One message: a list of [wall, "" or what went wrong, what was found].

Loaded as text, like the zygote. Python 3.9 and newer.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
from typing import Any, Callable

from . import box, forker, mount, seccomp, syscall

Finding = tuple[str, str, str]


def main(control: int, plan: dict[str, Any]) -> None:
    link = socket.socket(fileno=control)
    syscall.prctl(syscall.PR_SET_PDEATHSIG, signal.SIGKILL)
    findings = [_try(name, action) for name, action in _alone()]
    findings += _in_child(lambda report: _filter(report))
    findings += _in_child(lambda report: _namespaces(report, plan))
    link.send(json.dumps(findings).encode())
    os._exit(0)


def _try(name: str, action: Callable[[], Any]) -> Finding:
    try:
        found = action()
    except Exception as error:
        return name, f"{error}", ""
    return name, "", "" if found is None else str(found)


def _alone() -> list[tuple[str, Callable[[], Any]]]:
    """What needs no process of its own. None of it may write or change anything."""
    return [
        ("pidfd", lambda: os.close(syscall.pidfd_open(os.getpid()))),
        ("close_range", lambda: syscall.close_above(1000)),
        ("openat2", _openat2),
        ("children", lambda: os.close(os.open(f"/proc/self/task/{os.getpid()}/children", os.O_RDONLY))),
        ("landlock", lambda: f"ABI {syscall.call('landlock_create_ruleset', None, 0, 1)}"),
    ]


def _openat2() -> None:
    root = os.open("/", os.O_PATH)
    os.close(syscall.open_beneath(root, "usr", os.O_RDONLY))


def _in_child(action: Callable[[Callable[[Finding], None]], None]) -> list[Finding]:
    """What a forked child reports, up to its end."""
    incoming, outgoing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            action(lambda finding: _write(outgoing, finding))
        finally:
            os._exit(0)
    os.close(outgoing)
    with os.fdopen(incoming) as lines:
        findings = [tuple(json.loads(line)) for line in lines]
    os.waitpid(pid, 0)
    return findings


def _write(descriptor: int, finding: Finding) -> None:
    os.write(descriptor, json.dumps(finding).encode() + b"\n")


def _filter(report: Callable[[Finding], None]) -> None:
    report(_try("seccomp", _install_filter))


def _install_filter() -> None:
    syscall.prctl(syscall.PR_SET_NO_NEW_PRIVS, 1)
    syscall.perform([seccomp.Filter(seccomp.program()).install])
    try:
        syscall.unshare(syscall.CLONE_NEWUTS)
    except PermissionError:
        return
    raise RuntimeError("the filter was installed and does not filter")


def _namespaces(report: Callable[[Finding], None], plan: dict[str, Any]) -> None:
    """As in the zygote, one after the other: the first failure ends it, and what was not reported was not tried."""
    held: list[mount.Source] = []

    def step(name: str, action: Callable[[], Any]) -> None:
        finding = _try(name, action)
        report(finding)
        if finding[1]:
            os._exit(0)

    if plan["uid_base"]:
        step("open_tree", lambda: held.extend(mount.sources(plan["binds"])))
    step("user namespace", lambda: forker.enter_user_namespace(plan["uid_base"], plan["uids"]))
    for name, flag in (
        ("mount namespace", syscall.CLONE_NEWNS),
        ("pid namespace", syscall.CLONE_NEWPID),
        ("ipc namespace", syscall.CLONE_NEWIPC),
        ("uts namespace", syscall.CLONE_NEWUTS),
        ("network namespace", syscall.CLONE_NEWNET),
    ):
        step(name, lambda flag=flag: syscall.unshare(flag))  # type: ignore[misc]
    step("loopback", box.raise_loopback)
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
        return
    if not held:
        step("open_tree", lambda: held.extend(mount.sources(plan["binds"])))
    step("private root", lambda: mount.enter_private_root(plan, held))
    step("read-only root", _sealed)
    step("disk", lambda: _disk(2 if plan["uid_base"] else 0))
    step("proc", mount.add_proc)
    step("process limit", lambda: _process_limit(2 if plan["uid_base"] else 0))


def _sealed() -> None:
    mount.seal()
    try:
        os.mkdir("/made")
    except OSError:
        return
    raise RuntimeError("the root was made read-only and can be written")


def _disk(owner: int) -> None:
    mount.add_disk(1 << 20, 10, owner, [])
    with open("/tmp/full", "wb", 0) as file:
        try:
            for _ in range(40):
                file.write(b"x" * 65536)
        except OSError:
            return
    raise RuntimeError("a disk of 1 MiB took 2.5 MiB")


def _process_limit(owner: int) -> None:
    box.become_guest(owner)
    resource.setrlimit(resource.RLIMIT_NPROC, (2, 2))
    for count in range(3):
        try:
            if os.fork() == 0:
                signal.pause()
        except OSError:
            if count == 1:
                return
            raise RuntimeError(f"a limit of 2 processes held at {count + 1}") from None
    raise RuntimeError("RLIMIT_NPROC does not hold in a nested user namespace")
