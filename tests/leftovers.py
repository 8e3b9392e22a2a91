"""What a run of the jail could leave behind on this machine: processes, mounts, control groups, files."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

from farhand.sandbox.local.cgroup import Cgroups

BOUND_S = 10.0


def leftovers(home: Path) -> list[str]:
    """What is still there of `home`'s host and its boxes, and zygotes and groups whose host is gone. Empty is right."""
    deadline = time.monotonic() + BOUND_S
    while True:
        found = [*_processes(home), *_files(home), *_mounts(home), *_groups()]
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.05)


def hosts(home: Path) -> list[int]:
    """Pids of the hosts of `home`."""
    return [pid for pid, words in _commands() if str(home) in words and any("local.host" in word for word in words)]


def _commands() -> list[tuple[int, list[str]]]:
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                words = Path(f"/proc/{entry}/cmdline").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            found.append((int(entry), words))
    return found


def _processes(home: Path) -> list[str]:
    found = [f"host {pid}" for pid in hosts(home)]
    for pid, words in _commands():
        if any("plan.pop(" in word for word in words) and _parent(pid) == 1:
            found.append(f"zygote {pid} without a host")
    return found


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _files(home: Path) -> list[str]:
    name = f"farhand-{hashlib.sha256(os.fsencode(home.resolve())).hexdigest()[:16]}"
    places = [home / "run", Path(f"/tmp/{name}-{os.geteuid()}"), Path(os.environ.get("XDG_RUNTIME_DIR", "/tmp")) / name]
    return [str(path) for place in places for path in place.glob("*.sock")]


def _mounts(home: Path) -> list[str]:
    return [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(home) in line]


def _groups() -> list[str]:
    """A host that was killed leaves empty groups, which the next one removes: so does this."""
    groups = Cgroups.open()
    if groups is None:
        return []
    places = [hierarchy.folder.parent for hierarchy in groups._hierarchies]
    groups.close()
    found = [path for place in places for path in place.glob("farhand-*-*")]
    return [str(path) for path in found if path.exists() and not Path(f"/proc/{path.name.split('-')[1]}").exists()]
