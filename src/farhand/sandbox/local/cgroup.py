"""Control groups for boxes, where the host may make them: version 1 hierarchies as root, version 2 where it is
delegated.

They are a second net under rlimits, the process limit of the user namespace and `watch`: the kernel itself ends what
passes memory *plus* disk (both are memory), and freezing a group stops it at once. The host opens a group's
cgroup.procs and sends the descriptor with the request, so that the box enters it before it has forked anything.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from pathlib import Path

from farhand.errors import SandboxError
from farhand.limits import MIB

CONTROLLERS = ("memory", "pids", "cpuacct")
"""Of version 1. Not its freezer: what it froze cannot be killed, so a box would outlive a host that was."""
OWN_BYTES = 16 * MIB
"""Added to a box's memory and disk: its init, the pages its worker copies of Python, kernel structures."""
OWN_PROCESSES = 2
SOCKETS_BYTES = 32 * MIB
"""Of buffers of TCP sockets, which version 1 does not count as memory."""
FREEZE_S = 2.0
REMOVE_S = 2.0
GROUPS_SWEPT = 10_000
_PREFIX = "farhand-"


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """A folder in which groups can be made, the controllers that count there, and where its whole tree is mounted."""

    folder: Path
    controllers: frozenset[str]
    unified: bool
    mounted: Path


class Cgroups:
    """The groups of one host process. `open` gives None where none can be made, and never raises."""

    def __init__(self, hierarchies: list[Hierarchy]) -> None:
        self._hierarchies = hierarchies
        self.controllers: frozenset[str] = frozenset().union(*(each.controllers for each in hierarchies))

    @classmethod
    def open(cls) -> Cgroups | None:
        """Removes what hosts left behind that were killed."""
        kept = _usable()
        if not kept:
            return None
        name = _own_name()
        made = []
        for hierarchy in kept:
            _sweep(hierarchy.mounted)
            folder = hierarchy.folder / name
            folder.mkdir(exist_ok=True)
            if hierarchy.unified:
                _enable(folder, hierarchy.controllers)
            made.append(replace(hierarchy, folder=folder))
        return cls(made)

    @staticmethod
    def usable() -> frozenset[str]:
        """The controllers `open` would find; leaves nothing behind."""
        return frozenset().union(*(each.controllers for each in _usable()))

    def create(self, box: str, memory_bytes: int, disk_bytes: int, processes: int) -> BoxCgroup:
        """A group for one box, with its limits. SandboxError when the kernel refuses."""
        group = BoxCgroup(box, [replace(each, folder=each.folder / box) for each in self._hierarchies])
        try:
            group.make(memory_bytes + disk_bytes + OWN_BYTES, processes + OWN_PROCESSES)
        except OSError as error:
            group.remove()
            raise SandboxError(f"no control group for {box}: {error}") from error
        return group

    def close(self) -> None:
        """Remove the host's own groups. Those of boxes must be gone."""
        for hierarchy in self._hierarchies:
            _remove(hierarchy.folder, REMOVE_S)


class BoxCgroup:
    """The groups of one box, one folder for each hierarchy."""

    def __init__(self, box: str, hierarchies: list[Hierarchy]) -> None:
        self.box = box
        self._hierarchies = hierarchies
        self._by_controller = {name: each for each in reversed(hierarchies) for name in each.controllers}
        self._open: dict[str, int] = {}

    def make(self, memory_bytes: int, processes: int) -> None:
        for hierarchy in self._hierarchies:
            hierarchy.folder.mkdir()
            for name, value in _limits(hierarchy, memory_bytes, processes):
                path = hierarchy.folder / name
                if path.exists():
                    path.write_text(value)

    def open_procs(self) -> list[int]:
        """Descriptors to send with the request for a box; the caller closes them."""
        opened: list[int] = []
        try:
            for hierarchy in self._hierarchies:
                # A process of one thread may enter as a thread: that spares it a lock of all processes, and 15 ms.
                file = "cgroup.procs" if hierarchy.unified else "tasks"
                opened.append(os.open(hierarchy.folder / file, os.O_WRONLY | os.O_CLOEXEC))
        except BaseException:
            for each in opened:
                os.close(each)
            raise
        return opened

    @property
    def can_freeze(self) -> bool:
        return self._with("freezer") is not None

    def cpu_s(self) -> float | None:
        """Processor seconds of everything that ever ran in the box; None where nothing counts them."""
        hierarchy = self._with("cpuacct")
        if hierarchy is None:
            return None
        if hierarchy.unified:
            return _number(self._read(hierarchy, "cpu.stat"), "usage_usec") / 1e6
        return int(self._read(hierarchy, "cpuacct.usage")) / 1e9

    def memory_bytes(self) -> int | None:
        """Memory and disk together, as the kernel counts them."""
        hierarchy = self._with("memory")
        if hierarchy is None:
            return None
        return int(self._read(hierarchy, "memory.current" if hierarchy.unified else "memory.usage_in_bytes"))

    def oom_kills(self) -> int:
        """How many processes the kernel has ended because the group was full."""
        hierarchy = self._with("memory")
        if hierarchy is None:
            return 0
        name = "memory.events" if hierarchy.unified else "memory.oom_control"
        return _number(self._read(hierarchy, name), "oom_kill")

    def _read(self, hierarchy: Hierarchy, name: str) -> str:
        """By a descriptor that is kept: two counters are read for every action."""
        descriptor = self._open.get(name)
        if descriptor is None:
            descriptor = self._open[name] = os.open(hierarchy.folder / name, os.O_RDONLY | os.O_CLOEXEC)
        return os.pread(descriptor, 4096, 0).decode("ascii")

    def freeze(self) -> None:
        """Returns when every process of the box stands still."""
        self._freeze(True)

    def thaw(self) -> None:
        """Let it run again. A frozen box can be killed without."""
        self._freeze(False)

    def _freeze(self, frozen: bool) -> None:
        hierarchy = self._with("freezer")
        if hierarchy is None:
            raise SandboxError("no control group can freeze boxes here")
        (hierarchy.folder / "cgroup.freeze").write_text("1" if frozen else "0")
        deadline = time.monotonic() + FREEZE_S
        while (_number(self._read(hierarchy, "cgroup.events"), "frozen") == 1) != frozen:
            if time.monotonic() > deadline:
                raise SandboxError(f"the box did not {'freeze' if frozen else 'thaw'} within {FREEZE_S} s")
            time.sleep(0.0001)

    def remove(self) -> bool:
        """True when nothing is left. The box must be dead: its group empties a moment after."""
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()
        removed = [_remove(hierarchy.folder, REMOVE_S) for hierarchy in self._hierarchies]
        return all(removed)

    def _with(self, controller: str) -> Hierarchy | None:
        return self._by_controller.get(controller)


def _limits(hierarchy: Hierarchy, memory_bytes: int, processes: int) -> list[tuple[str, str]]:
    values: list[tuple[str, str]] = []
    if "memory" in hierarchy.controllers:
        if hierarchy.unified:
            values += [("memory.max", str(memory_bytes)), ("memory.swap.max", "0"), ("memory.oom.group", "1")]
        else:
            # The second bounds memory and swap together; it must not be below the first.
            values += [(f"memory.{name}limit_in_bytes", str(memory_bytes)) for name in ("", "memsw.")]
            values.append(("memory.kmem.tcp.limit_in_bytes", str(SOCKETS_BYTES)))
    if "pids" in hierarchy.controllers:
        values.append(("pids.max", str(processes)))
    return values


def _usable() -> list[Hierarchy]:
    """Tried for real: a hierarchy counts when a group with its limits can be made and removed again. Each controller
    once. One that could only freeze is left out: entering a group of version 2 takes 10 ms and more, and signals
    suspend too.
    """
    kept: list[Hierarchy] = []
    taken: frozenset[str] = frozenset()
    try:
        for hierarchy in _candidates():
            new = hierarchy.controllers - taken
            if new - {"freezer"} and _works(hierarchy):
                taken |= new
                kept.append(replace(hierarchy, controllers=new))
    except (OSError, ValueError):
        return []
    return kept


def _candidates() -> list[Hierarchy]:
    """Where groups could be made, version 1 first: where both are mounted the controllers are there."""
    own = _own_groups()
    found: list[Hierarchy] = []
    unified: list[Hierarchy] = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        mount_root, place = before.split(" ")[3:5]
        if kind == "cgroup":
            held = frozenset(options.rpartition(" ")[2].split(",")) & frozenset(CONTROLLERS)
            if held:
                folder = _below(place, mount_root, own.get(min(held), "/"))
                found.append(Hierarchy(folder, held, False, Path(place)))
        elif kind == "cgroup2":
            folder = _below(place, mount_root, own.get("", "/"))
            unified.append(Hierarchy(folder, _controllers(folder), True, Path(place)))
    return found + unified


def _below(place: str, mount_root: str, group: str) -> Path:
    """The folder of `group`, in a hierarchy whose part below `mount_root` is mounted at `place`."""
    inside = group[len(mount_root.rstrip("/")) :] if group.startswith(mount_root.rstrip("/")) else "/"
    return Path(place + "/" + inside.lstrip("/"))


def _own_groups() -> dict[str, str]:
    """Controller to our own group in its hierarchy; "" for version 2."""
    groups: dict[str, str] = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, names, group = line.split(":", 2)
        groups.update(dict.fromkeys(names.split(","), group))
    return groups


def _controllers(folder: Path) -> frozenset[str]:
    """What a version 2 group can hand to its children. Freezing and processor time need no controller."""
    try:
        offered = set((folder / "cgroup.controllers").read_text().split())
    except OSError:
        return frozenset()
    return frozenset(offered & {"memory", "pids"}) | {"freezer", "cpuacct"}


def _enable(folder: Path, controllers: frozenset[str]) -> None:
    wanted = sorted(controllers & {"memory", "pids"})
    if wanted:
        (folder / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in wanted))


def _works(hierarchy: Hierarchy) -> bool:
    """Make a group with limits and one below it, then remove both."""
    trial = hierarchy.folder / f"{_own_name()}.trial"
    try:
        if hierarchy.unified:
            # A group with processes of its own cannot hand controllers on, unless it is the root or has done so
            # already.
            _enable(hierarchy.folder, hierarchy.controllers)
        trial.mkdir(exist_ok=True)
        for name, value in _limits(hierarchy, 64 * MIB, 8):
            if not any(part in name for part in ("memsw", "swap", "kmem")):
                (trial / name).write_text(value)
        with open(trial / "cgroup.procs", "w"):
            return True
    except OSError:
        return False
    finally:
        _remove(trial, 0)


def _sweep(mounted: Path) -> None:
    """Remove what hosts left behind that were killed, wherever in the tree they had been started."""
    for count, (place, folders, _) in enumerate(os.walk(mounted)):
        if count >= GROUPS_SWEPT:
            return
        for name in [name for name in folders if name.startswith(_PREFIX)]:
            folders.remove(name)
            pid, _, started = name[len(_PREFIX) :].partition("-")
            if pid.isdigit() and str(_started(int(pid))) != started.partition(".")[0]:
                old = Path(place, name)
                for group in sorted(old.glob("*/")):
                    _remove(group, 0)
                _remove(old, 0)


def _remove(folder: Path, timeout_s: float) -> bool:
    """rmdir, again while a dead process is still being taken out of the group."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            folder.rmdir()
        except FileNotFoundError:
            return True
        except OSError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.001)
        else:
            return True


def _own_name() -> str:
    """Tells a later host whether we still live."""
    return f"{_PREFIX}{os.getpid()}-{_started(os.getpid())}"


def _started(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, IndexError):
        return 0


def _number(text: str, name: str) -> int:
    return next((int(line.split()[1]) for line in text.splitlines() if line.startswith(name + " ")), 0)
