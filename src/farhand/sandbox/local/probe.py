"""Can a jail stand here? Tries each wall and names what is missing, why, and what the person can do."""

from __future__ import annotations

import json
import os
import select
import signal
from dataclasses import dataclass
from pathlib import Path

from farhand.errors import SandboxUnavailable
from farhand.sandbox.local import root
from farhand.sandbox.local.cgroup import Cgroups
from farhand.sandbox.local.numbers import AUDIT_ARCH, MACHINE
from farhand.sandbox.local.zygote import UID_BASE, UIDS, launch

PROBE_S = 10.0

_USER_NAMESPACE = "user namespace"
_NEEDED = {
    "machine": "the system-call filter is written for x86_64 and aarch64",
    "pidfd": "boxes are signalled and awaited without mistaking a later process for them (Linux 5.3)",
    "close_range": "nothing of the host stays open in a box (Linux 5.9)",
    "openat2": "files of a box are read without following its links (Linux 5.6)",
    "children": "the processes of a box are found from outside (CONFIG_PROC_CHILDREN)",
    "seccomp": "system calls are an allow-list",
    _USER_NAMESPACE: "everything below is built without privileges",
    "mount namespace": "a root of its own",
    "pid namespace": "no other process in sight; ends with its first process",
    "ipc namespace": "no shared memory with others",
    "uts namespace": "a host name of its own",
    "network namespace": "no network",
    "loopback": "127.0.0.1 inside a box",
    "open_tree": "folders of the machine are shown read-only (Linux 5.2)",
    "private root": "of the machine only /usr and the Python are seen (Linux 5.12)",
    "read-only root": "nothing but /workspace and /tmp can be written",
    "disk": "a bounded disk in memory",
    "proc": "a /proc of its own",
    "process limit": "processes are counted for each box (Linux 5.14)",
}
_WELCOME = {
    "landlock": "not used yet; reported only",
    "memory group": "the kernel bounds a box's memory; else the host looks every few milliseconds",
    "pids group": "a second bound on processes",
    "freezer group": "suspends at once; else by signals",
}


@dataclass(frozen=True, slots=True)
class Wall:
    """One wall: what it is for, whether it stands, and `detail`: what was found, or why it does not stand."""

    name: str
    purpose: str
    needed: bool
    stands: bool
    detail: str
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    walls: tuple[Wall, ...]
    kernel: str
    privileged: bool
    """As root each box has a user id of its own; otherwise all have ours and are kept apart by their namespaces
    alone."""

    @property
    def missing(self) -> tuple[Wall, ...]:
        return tuple(wall for wall in self.walls if wall.needed and not wall.stands)

    def require(self) -> None:
        """SandboxUnavailable, naming the first wall that is missing, unless a jail can stand."""
        for wall in self.missing:
            raise SandboxUnavailable(f"no jail can stand here: missing {wall.name} ({wall.detail})", hint=wall.hint)


def probe() -> Report:
    """Starts a Python of its own and takes about a tenth of a second. Never raises for a wall that is missing."""
    walls = [_wall("machine", MACHINE in AUDIT_ARCH, MACHINE)]
    found, why = _try_walls() if MACHINE in AUDIT_ARCH else ({}, "not tried on this machine")
    for name in [name for name in _NEEDED if name != "machine"] + ["landlock"]:
        problem, detail = found.get(name, (why, ""))
        walls.append(_wall(name, not problem, problem or detail))
    controllers = Cgroups.usable()
    for name in ("memory", "pids", "freezer"):
        walls.append(
            _wall(f"{name} group", name in controllers, "" if name in controllers else "none can be made here")
        )
    return Report(tuple(walls), os.uname().release, os.geteuid() == 0)


def _wall(name: str, stands: bool, detail: str) -> Wall:
    needed = name in _NEEDED
    return Wall(name, (_NEEDED if needed else _WELCOME)[name], needed, stands, detail, "" if stands else _hint(name))


def _try_walls() -> tuple[dict[str, tuple[str, str]], str]:
    """Wall to (problem, detail), and what to say of those that were not tried."""
    python, prefix, version = root.own_prefix()
    where = root.plan(python, prefix, version)
    plan = {
        "uid_base": UID_BASE if os.geteuid() == 0 else 0,
        "uids": UIDS,
        "binds": where.binds,
        "links": where.links,
        "files": where.files,
        "masked": where.masked,
    }
    process, link = launch(python, {"LANG": "C.UTF-8"}, plan, "walls")
    try:
        poll = select.poll()
        poll.register(link, select.POLLIN)
        data = link.recv(1 << 16) if poll.poll(PROBE_S * 1000) else b""
    finally:
        link.close()
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait()
    if not data:
        return {}, "the trial ended without a word"
    return {
        name: (problem, detail) for name, problem, detail in json.loads(data)
    }, "not tried, because of what is above"


def _hint(name: str) -> str:
    if name not in (_USER_NAMESPACE, "mount namespace", "private root", "proc", "network namespace", "pid namespace"):
        return {"process limit": "Linux 5.14 or newer is needed.", "machine": "Use another sandbox."}.get(name, "")
    for path, bad, advice in (
        ("/proc/sys/user/max_user_namespaces", "0", "sysctl -w user.max_user_namespaces=10000"),
        ("/proc/sys/kernel/unprivileged_userns_clone", "0", "sysctl -w kernel.unprivileged_userns_clone=1"),
        (
            "/proc/sys/kernel/apparmor_restrict_unprivileged_userns",
            "1",
            "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0, or an AppArmor profile with userns for it",
        ),
    ):
        try:
            if Path(path).read_text().strip() == bad:
                return f"{path} is {bad}. As root: {advice}"
        except OSError:
            continue
    return (
        "A container's own filter usually refuses this. Run its engine with a seccomp profile that allows unshare and "
        "mount, or run Farhand outside it, or choose another sandbox."
    )
