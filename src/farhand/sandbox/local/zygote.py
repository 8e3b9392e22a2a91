"""The host's handle on a zygote: start one for an environment, have it fork boxes, close it.

    zygote = Zygote.start(ZygoteSpec(worker=source))
    handles = zygote.create(BoxSpec(...))            # blocks for some milliseconds
    token = zygote.begin_create(BoxSpec(...))        # or: put `zygote.fileno()` into a selector
    for token, result in zygote.on_readable(): ...   # BoxHandles, or SandboxError

Start it from the main thread: the kernel ends a zygote, and with it all its boxes, when the *thread* that started it
ends.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from farhand.errors import SandboxError, SandboxUnavailable
from farhand.limits import GIB, MIB
from farhand.sandbox.local import root

START_S = 60.0
"""A zygote imports numpy, pandas and matplotlib in about a second; on a busy machine in several."""
CREATE_S = 15.0
CLOSE_S = 5.0
MESSAGE_BYTES = 64 * 1024
UID_BASE = 1_900_000_000
"""Above what other programs give to containers. Each zygote of a host should have its own `UIDS` from here on."""
UIDS = 2048
THREAD_STACK_BYTES = 2 * MIB
THREADS_ALLOWED_FOR = 32
MALLOC_ARENAS = 2
_HANDLES = 8
_MODULES = ("numbers", "syscall", "seccomp", "mount", "box", "init", "forker")

# Runs under `python -I -S -c`, so it is in every box's /proc/*/cmdline and holds nothing of the machine.
_LOADER = """\
import json, os, sys, types
def load():
    with open(int(sys.argv[2]), "rb") as source: plan = json.load(source)
    package = types.ModuleType("jail"); package.__path__ = []; sys.modules["jail"] = package
    for name, text in plan.pop("modules"):
        module = types.ModuleType("jail." + name); module.__package__ = "jail"; sys.modules["jail." + name] = module
        setattr(package, name, module); exec(compile(text, "<jail." + name + ">", "exec"), module.__dict__)
    for name in [name for name in sys.modules if name.partition(".")[0] == "jail"]: del sys.modules[name]
    return getattr(module, plan.pop("entry")), plan
main, plan = load(); main(int(sys.argv[1]), plan)
"""


@dataclass(frozen=True, slots=True)
class ZygoteSpec:
    """What all boxes of one environment share.

    `worker` is the source of a program that defines `worker_main(descriptor)`; a `practise()` beside it, if there is
    one, runs once in the zygote and must leave no trace. `python` is an interpreter's real path and `prefix` its
    prefix; None for the one that runs now. `site` holds the environment's packages, `mplconfig` a font cache for
    matplotlib. `preload` modules are imported once, in the zygote, inside the walls of its own namespaces. `environ` is
    added to the boxes' environment and visible to guest code.
    """

    worker: str
    python: Path | None = None
    prefix: Path | None = None
    version: str | None = None
    site: Path | None = None
    mplconfig: Path | None = None
    preload: tuple[str, ...] = ()
    environ: dict[str, str] = field(default_factory=dict)
    uid_base: int = UID_BASE
    uids: int = UIDS


@dataclass(frozen=True, slots=True)
class BoxSpec:
    """Bounds of one box. `processes` counts processes and threads, the worker's own too. `disk_bytes` and
    `disk_files` hold for /workspace and /tmp together, `disk_bytes` also for one file. Reaching one: MemoryError,
    EAGAIN, ENOSPC, EMFILE."""

    memory_bytes: int = 1 * GIB
    processes: int = 128
    disk_bytes: int = 256 * MIB
    disk_files: int = 10_000
    file_descriptors: int = 256

    def limits(self) -> dict[str, int]:
        return {
            "memory_bytes": self.memory_bytes,
            # Stacks of threads count as data; those of 32 shall not be taken from the memory.
            "thread_bytes": THREAD_STACK_BYTES * THREADS_ALLOWED_FOR,
            "processes": self.processes,
            "disk_bytes": self.disk_bytes,
            "disk_files": self.disk_files,
            "file_descriptors": self.file_descriptors,
        }


@dataclass(slots=True)
class BoxHandles:
    """A locked box. The caller owns the descriptors; `close` closes those that are left. None is inherited by children.

    `frames` is the host's end of the worker's stream socket, `stdout` and `stderr` are pipes to read. `status` gives
    one line of JSON, {exit, signal, peak_rss_bytes}, when the worker ends, and its end when the box is gone.
    `workspace` and `scratch` are O_PATH descriptors of /workspace and /tmp; they keep the files after the box's
    death.
    """

    init_pid: int
    worker_pid: int
    init_pidfd: int
    worker_pidfd: int
    frames: int
    stdout: int
    stderr: int
    status: int
    workspace: int
    scratch: int

    @property
    def roots(self) -> tuple[int, int]:
        """Every process of the box is one of these or below one of them."""
        return self.init_pid, self.worker_pid

    def interrupt(self) -> None:
        """SIGINT to the worker alone. ProcessLookupError when it has ended."""
        signal.pidfd_send_signal(self.worker_pidfd, signal.SIGINT)

    def kill(self) -> None:
        """End every process of the box. No error when it is gone already."""
        try:
            signal.pidfd_send_signal(self.init_pidfd, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def wait(self, timeout_s: float) -> bool:
        """True once every process of the box is gone. `init_pidfd` in a selector tells the same."""
        poll = select.poll()
        poll.register(self.init_pidfd, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))

    def close(self) -> None:
        for name in self.__slots__:
            if not name.endswith("_pid"):
                descriptor = getattr(self, name)
                setattr(self, name, -1)
                if descriptor >= 0:
                    os.close(descriptor)


Result = BoxHandles | SandboxError


class Zygote:
    """A running zygote. Not for several threads at once."""

    def __init__(self, process: subprocess.Popen[bytes], link: socket.socket) -> None:
        self._process = process
        self._link = link
        self._tokens = 0
        self._waiting: set[int] = set()
        self._arrived: list[tuple[int, Result]] = []
        self.loaded: tuple[str, ...] = ()
        self.failed: dict[str, str] = {}
        """Preloads whose import raised, with what."""
        self.threaded: tuple[str, ...] = ()
        """Preloads left out because their import starts threads or ends the process: boxes import them themselves."""

    @classmethod
    def start(cls, spec: ZygoteSpec, timeout_s: float = START_S) -> Zygote:
        """Blocks until the zygote is ready. SandboxUnavailable names the step that failed."""
        left_out: list[str] = []
        while True:
            preload = tuple(name for name in spec.preload if name not in left_out)
            zygote, importing = cls._spawn(spec, preload), ""
            try:
                importing = zygote._await_start(timeout_s)
            except BaseException:
                zygote.close()
                raise
            if not importing:
                zygote.threaded = tuple(left_out)
                return zygote
            zygote.close()
            left_out.append(importing)

    @classmethod
    def _spawn(cls, spec: ZygoteSpec, preload: Sequence[str]) -> Zygote:
        own, prefix, version = root.own_prefix()
        python = spec.python or own
        where = root.plan(python, spec.prefix or prefix, spec.version or version, spec.site, spec.mplconfig)
        privileged = os.geteuid() == 0
        plan = {
            "uid_base": spec.uid_base if privileged else 0,
            "uids": spec.uids,
            "malloc_arenas": MALLOC_ARENAS,
            "thread_stack_bytes": THREAD_STACK_BYTES,
            "binds": where.binds,
            "links": where.links,
            "files": where.files,
            "masked": where.masked,
            "seeds": _seeds(spec.mplconfig),
            "sys_path": [root.SITE] if spec.site else [],
            "preload": list(preload),
            "worker": spec.worker,
        }
        environ = {**_environ(python, spec), **spec.environ}
        return cls(*launch(python, environ, plan, "forker"))

    def _await_start(self, timeout_s: float) -> str:
        """ "" when it is ready, else the preload that has to be left out."""
        deadline, importing = time.monotonic() + timeout_s, ""
        while True:
            message, _ = self._receive(deadline - time.monotonic())
            if message is None:
                self._process.kill()
                if importing:
                    return importing
                raise SandboxUnavailable(f"the zygote ended or hung while starting (exit {self._process.wait()})")
            if "importing" in message:
                importing = message["importing"]
            elif message.get("ok"):
                self.loaded, self.failed = tuple(message["loaded"]), message["failed"]
                return ""
            else:
                step = message["error"]["step"]
                if step.startswith("preload "):
                    return importing
                raise SandboxUnavailable(
                    f"no jail can stand here: {message['error']['message']}",
                    hint="`farhand doctor` tries each wall and says what is missing.",
                )

    def fileno(self) -> int:
        return self._link.fileno()

    @property
    def pid(self) -> int:
        """Of the outermost process. Its end is the end of the zygote and of every box."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def begin_create(self, spec: BoxSpec, groups: Sequence[int] = ()) -> int:
        """Ask for a box; its token comes back from `on_readable`. `groups` are open cgroup.procs files (cgroup.py)."""
        self._tokens += 1
        request = json.dumps({"op": "create", "token": self._tokens, "limits": spec.limits()}).encode()
        try:
            socket.send_fds(self._link, [request], list(groups))
        except OSError as error:
            raise SandboxError(f"the zygote is gone: {error}") from error
        self._waiting.add(self._tokens)
        return self._tokens

    def on_readable(self) -> list[tuple[int, Result]]:
        """What has arrived, without waiting. When the zygote has ended, an error for every token still out."""
        while True:
            message, descriptors = self._receive(0)
            if message is None:
                break
            self._take(message, descriptors)
        arrived, self._arrived = self._arrived, []
        return arrived

    def create(self, spec: BoxSpec, groups: Sequence[int] = (), timeout_s: float = CREATE_S) -> BoxHandles:
        """A box, or SandboxError. Blocks for milliseconds, at most `timeout_s`."""
        token, deadline = self.begin_create(spec, groups), time.monotonic() + timeout_s
        while True:
            for index, (each, result) in enumerate(self._arrived):
                if each == token:
                    del self._arrived[index]
                    if isinstance(result, SandboxError):
                        raise result
                    return result
            message, descriptors = self._receive(deadline - time.monotonic())
            if message is not None:
                self._take(message, descriptors)
            elif token in self._waiting:
                self._waiting.discard(token)
                raise SandboxError(f"the zygote gave no box within {timeout_s:.0f} s")

    def ping(self, timeout_s: float = 1.0) -> int:
        """Boxes alive, as the zygote counts them. SandboxError when it does not answer."""
        self._tokens += 1
        try:
            self._link.send(json.dumps({"op": "ping", "token": self._tokens}).encode())
        except OSError as error:
            raise SandboxError(f"the zygote is gone: {error}") from error
        deadline = time.monotonic() + timeout_s
        while True:
            message, descriptors = self._receive(deadline - time.monotonic())
            if message is None:
                raise SandboxError(f"the zygote gave no answer within {timeout_s:.0f} s")
            if message.get("token") == self._tokens:
                return int(message["boxes"])
            self._take(message, descriptors)

    def close(self) -> None:
        """End the zygote and every box of it. Returns when they are gone. Doing it twice is no error."""
        for _, result in self._arrived:
            if isinstance(result, BoxHandles):
                result.close()
        self._arrived = []
        # It ends when the socket does, after its boxes; the outer process ends after it.
        self._link.close()
        try:
            self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _receive(self, timeout_s: float) -> tuple[dict[str, Any] | None, list[int]]:
        """One message, or None when none came in time or the zygote has ended."""
        poll = select.poll()
        poll.register(self._link, select.POLLIN)
        if not poll.poll(max(0.0, timeout_s) * 1000):
            return None, []
        try:
            data, descriptors, _, _ = socket.recv_fds(self._link, MESSAGE_BYTES, 16, socket.MSG_CMSG_CLOEXEC)
        except ConnectionResetError:
            data, descriptors = b"", []
        if not data:
            self._give_up()
            return None, []
        message: dict[str, Any] = json.loads(data)
        return message, descriptors

    def _give_up(self) -> None:
        for token in sorted(self._waiting):
            self._arrived.append((token, SandboxError("the zygote has ended")))
        self._waiting.clear()

    def _take(self, message: dict[str, Any], descriptors: list[int]) -> None:
        """Turn an answer into a result. One that nobody waits for any more is closed, which ends its box."""
        token = message.get("token")
        if token not in self._waiting:
            if message.get("ok") and len(descriptors) == _HANDLES:
                _handles(descriptors).kill()
            for each in descriptors:
                os.close(each)
            return
        self._waiting.discard(token)
        if message.get("ok") and len(descriptors) == _HANDLES:
            self._arrived.append((token, _handles(descriptors)))
            return
        for each in descriptors:
            os.close(each)
        error = message.get("error") or {}
        self._arrived.append((token, SandboxError(f"no box: {error.get('step')}: {error.get('message')}")))


def _handles(descriptors: list[int]) -> BoxHandles:
    return BoxHandles(_pid_of(descriptors[0]), _pid_of(descriptors[1]), *descriptors)


def _pid_of(pidfd: int) -> int:
    """The process's number as this process sees it; -1 when it has ended."""
    with open(f"/proc/self/fdinfo/{pidfd}") as file:
        return next((int(line[4:]) for line in file if line.startswith("Pid:")), -1)


def launch(
    python: Path, environ: dict[str, str], plan: dict[str, Any], entry: str
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start `main(control, plan)` of the module `entry` in a fresh interpreter that knows nothing but the plan."""
    names = [*_MODULES, entry] if entry not in _MODULES else list(_MODULES)
    plan = {**plan, "modules": [(name, _source(name)) for name in names], "entry": "main", "host": os.getpid()}
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    program = os.memfd_create("plan", os.MFD_CLOEXEC)
    try:
        with open(program, "wb", closefd=False) as file:
            file.write(json.dumps(plan).encode())
        os.lseek(program, 0, os.SEEK_SET)
        process = subprocess.Popen(
            [str(python), "-I", "-S", "-c", _LOADER, str(theirs.fileno()), str(program)],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            cwd="/", env=environ, start_new_session=True, pass_fds=(theirs.fileno(), program),
        )  # fmt: skip
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
        os.close(program)
    return process, ours


def _source(name: str) -> str:
    return (files("farhand.sandbox.local") / f"{name}.py").read_text("utf-8")


def _seeds(mplconfig: Path | None) -> list[tuple[str, str]]:
    """Links in a box's writable MPLCONFIGDIR to the read-only font cache."""
    if mplconfig is None or not mplconfig.is_dir():
        return []
    return [(f"{root.MPLCONFIG_HOME}/{path.name}", f"{root.MPLCONFIG}/{path.name}") for path in _plain_files(mplconfig)]


def _plain_files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.iterdir()) if path.is_file() and not path.name.endswith(".lock"))


def _environ(python: Path, spec: ZygoteSpec) -> dict[str, str]:
    """The whole environment of guest code, and of the zygote, whose /proc/self/environ every box shows."""
    environ = {
        "PATH": f"{python.parent}:/usr/local/bin:/usr/bin:/bin",
        "HOME": root.HOME,
        "USER": root.USER,
        "LOGNAME": root.USER,
        "SHELL": "/bin/sh",
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONNOUSERSITE": "1",
        "MPLBACKEND": "Agg",
        "MPLCONFIGDIR": root.MPLCONFIG_HOME,
        "MALLOC_ARENA_MAX": str(MALLOC_ARENAS),
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }
    if spec.site:
        environ["PYTHONPATH"] = root.SITE
    return environ
