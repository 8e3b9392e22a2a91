"""Boxes without a wall: a supervisor and a worker as plain processes of this machine, for tests and trusted code.

Guest code runs as the user, with the user's files and network in reach; only the environment is scrubbed. What the
other providers do about time, memory, output and frames holds here too. A box outlives the harness: a small file in
`$FARHAND_HOME/boxes` names it by its labels. It ends itself when that file goes, or no harness asked for anything for
an hour.
"""

from __future__ import annotations

import asyncio
import builtins
import json
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from farhand.errors import SandboxLost, SandboxUnavailable
from farhand.home import farhand_home
from farhand.limits import BOX_END_S, BOX_START_S, Limits
from farhand.sandbox import port
from farhand.sandbox.environment import Built, Environment, build
from farhand.sandbox.program import program_text
from farhand.sandbox.protocol import SocketFrames
from farhand.sandbox.runner.process import descendants, end_tree

_ENVIRON = ("LANG", "LC_ALL", "LC_CTYPE", "TZ", "OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")
"""Variables of the harness that a box sees; everything else it does not."""
_PATH = "/usr/local/bin:/usr/bin:/bin"


class SubprocessSandbox:
    """`Sandbox` of plain processes. `progress` is told of environments being built."""

    name = "subprocess"
    capabilities = frozenset({port.REATTACH, port.SUSPEND, port.THREADS, port.SUBPROCESS, port.FILES})

    def __init__(self, home: Path | None = None, progress: Callable[[str], None] = lambda line: None) -> None:
        self._home = home or farhand_home()
        self._boxes = self._home / "boxes"
        self._progress = progress

    async def create(self, environment: Environment, limits: Limits, labels: Mapping[str, str]) -> SubprocessBox:
        return await asyncio.to_thread(self._create, environment, dict(labels))

    def _create(self, environment: Environment, labels: dict[str, str]) -> SubprocessBox:
        built = build(environment, self._home, self._progress) if environment.packages else None
        box_id = f"sbx_{secrets.token_hex(8)}"
        folder = _short_folder()
        try:
            self._lay(folder, box_id, environment, built)
            pid = _start(environment.python or sys.executable, folder, built)
            started = _start_time(pid)
            if started is None:
                raise SandboxUnavailable("the box ended as soon as it had started")
            record = {"id": box_id, "provider": self.name, "labels": labels, "pid": pid, "started": started}
            self._write({**record, "folder": str(folder), "created": time.time()})
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)  # a box without its record ends itself
            raise
        return SubprocessBox({**record, "folder": str(folder)}, self._file(box_id))

    def _lay(self, folder: Path, box_id: str, environment: Environment, built: Built | None) -> None:
        """What a box's folder holds before it starts."""
        (folder / "workspace").mkdir()
        (folder / "tmp").mkdir()
        if built is not None and built.mplconfig.is_dir():
            shutil.copytree(built.mplconfig, folder / "tmp" / "mplconfig")
        (folder / "program.py").write_text(program_text(), encoding="utf-8")
        config = {
            "path": [] if built is None else [str(built.site)],
            "packages": dict(_pinned(package) for package in environment.packages),
            "record": str(self._file(box_id)),
        }
        (folder / "box.json").write_text(json.dumps(config), encoding="utf-8")

    def _file(self, box_id: str) -> Path:
        return self._boxes / f"{box_id}.json"

    def _write(self, record: dict[str, Any]) -> None:
        self._boxes.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = self._file(record["id"])
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps(record), encoding="utf-8")
        partial.rename(file)

    async def connect(self, box_id: str) -> SubprocessBox:
        for box in await self.list({}):
            if box.id == box_id:
                return box
        raise SandboxLost(f"there is no box {box_id[:100]}")

    async def list(self, labels: Mapping[str, str]) -> builtins.list[SubprocessBox]:
        return await asyncio.to_thread(self._list, dict(labels))

    def _list(self, labels: dict[str, str]) -> builtins.list[SubprocessBox]:
        found = []
        for file in sorted(self._boxes.glob("sbx_*.json")):
            try:
                record = json.loads(file.read_text(encoding="utf-8"))
            except (OSError, ValueError):
                continue
            if record.get("provider") != self.name:
                continue
            box = SubprocessBox(record, file)
            if not box.alive:
                box.sweep()
            elif labels.items() <= box.labels.items():
                found.append(box)
        return found

    async def close(self) -> None:
        """Nothing is held: boxes live on."""


class SubprocessBox:
    """One box: the supervisor's process, everything below it, and a folder."""

    def __init__(self, record: dict[str, Any], file: Path) -> None:
        self._record, self._file = record, file
        self._folder = Path(record["folder"])
        self._pid: int = record["pid"]

    @property
    def id(self) -> str:
        return str(self._record["id"])

    @property
    def labels(self) -> Mapping[str, str]:
        labels: dict[str, str] = self._record["labels"]
        return labels

    @property
    def folder(self) -> Path:
        return self._folder

    @property
    def alive(self) -> bool:
        return bool(_start_time(self._pid) == self._record["started"])

    async def channel(self, after: int, generation: int) -> SocketFrames:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            await asyncio.get_running_loop().sock_connect(sock, str(self._folder / "socket"))
        except OSError as error:
            sock.close()
            raise SandboxLost(f"the box {self.id} is gone") from error
        except BaseException:
            sock.close()
            raise
        return await SocketFrames.attach(sock, after, generation)

    async def suspend(self) -> None:
        """The supervisor is stopped first and continued last: its clock does not count what it does not see."""
        if not self.alive:
            raise SandboxLost(f"the box {self.id} is gone")
        for pid in [self._pid, *descendants(self._pid)]:
            _signal(pid, signal.SIGSTOP)

    async def resume(self) -> None:
        if not self.alive:
            raise SandboxLost(f"the box {self.id} is gone")
        for pid in [*descendants(self._pid)[::-1], self._pid]:
            _signal(pid, signal.SIGCONT)

    async def destroy(self) -> None:
        await asyncio.to_thread(self._destroy)

    def _destroy(self) -> None:
        if self.alive:
            _signal(self._pid, signal.SIGSTOP)  # it would reap what is killed, and start nothing new
            below = descendants(self._pid)
            with _awaited([self._pid, *below]):
                end_tree(self._pid)
                _signal(self._pid, signal.SIGKILL)
                _end_sessions({self._pid, *below})
        self.sweep()

    def sweep(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        self._file.unlink(missing_ok=True)


def _short_folder() -> Path:
    """A private folder whose socket's path fits the 107 bytes that a unix socket's name may have."""
    folder = Path(tempfile.mkdtemp(prefix="farhand-box-"))
    if len(str(folder)) > 90:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="farhand-box-", dir="/tmp"))
    return folder


def _pinned(requirement: str) -> tuple[str, str]:
    name, _, version = requirement.partition("==")
    return name, version


def _start(python: str, folder: Path, built: Built | None) -> int:
    """Start the supervisor, which detaches itself, and return its pid."""
    scratch = folder / "tmp"
    environ = {name: os.environ[name] for name in _ENVIRON if name in os.environ}
    environ |= {"PATH": _PATH, "HOME": str(scratch), "TMPDIR": str(scratch), "MPLCONFIGDIR": str(scratch / "mplconfig")}
    environ |= {"OPENBLAS_NUM_THREADS": "1", "MPLBACKEND": "Agg", "PYTHONDONTWRITEBYTECODE": "1"}
    if built is not None:
        environ["PYTHONPATH"] = str(built.site)  # for what the box's code starts; the box itself is isolated
    try:
        done = subprocess.run(
            [python, "-I", "-S", str(folder / "program.py"), "supervisor", str(folder)],
            env=environ, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, timeout=BOX_START_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SandboxUnavailable(f"a box could not be started with {python}: {error}") from error
    if not done.stdout.strip().isdigit():
        raise SandboxUnavailable(f"a box could not be started with {python}:\n{done.stderr.decode()[-2000:]}")
    return int(done.stdout)


def _start_time(pid: int) -> str | None:
    """When a process began, in ticks since the machine's start; None when it is gone. With the pid it is a name."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return None if fields[0] in "ZX" else fields[19]


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        pass


def _end_sessions(sessions: set[int]) -> None:
    """Kill what left the box's tree but not its sessions."""
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                session = os.getsid(int(entry))
            except OSError:
                continue
            if session in sessions:
                _signal(int(entry), signal.SIGKILL)


@contextmanager
def _awaited(pids: Sequence[int]) -> Iterator[None]:
    """Leaves only when the processes have ended, or BOX_END_S after they were told to."""
    descriptors = []
    for pid in pids:
        try:
            descriptors.append(os.pidfd_open(pid))
        except OSError:
            continue  # it is gone
    try:
        yield
        deadline = time.monotonic() + BOX_END_S
        for fd in descriptors:
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
    finally:
        for fd in descriptors:
            os.close(fd)
