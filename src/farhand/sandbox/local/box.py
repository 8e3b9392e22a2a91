"""What happens in a box between the fork of its worker and the first frame.

The zygote forks the worker into the pid namespace of an init (init.py). The worker makes the box's other namespaces,
its disk and proc, gives up everything, answers the host with the box's descriptors and calls the worker's program.
Python 3.9 and newer.
"""

from __future__ import annotations

import fcntl
import json
import os
import resource
import signal
import socket
import struct
import sys
from typing import Any, Callable, NoReturn

from . import mount, seccomp, syscall

WorkerMain = Callable[[int], Any]

GUEST_ID = 1000
FRAMES = 3
"""The worker's descriptor of the frame socket; above it nothing is open."""
SOCKET_BYTES = 256 * 1024
"""Both directions of a socket together, as `watch` counts it."""
_SIGNALS_PENDING = 4096
"""Queued signals and timers; as an ordinary user's box they would use up what all of that user's programs share."""
_STACK_BYTES = 8 * 1024 * 1024
_BIRTH_FAILED = 97
_OWN_NAMESPACES = syscall.CLONE_NEWNS | syscall.CLONE_NEWIPC | syscall.CLONE_NEWUTS | syscall.CLONE_NEWNET


class Order:
    """A checked request for a box."""

    LEAST = {  # noqa: RUF012
        "memory_bytes": 1 << 20,
        "thread_bytes": 1,
        "processes": 1,
        "disk_bytes": 4096,
        "disk_files": 1,
        "file_descriptors": 16,
    }
    MOST = 1 << 50

    def __init__(self, token: int, limits: dict[str, int], groups: list[int]) -> None:
        self.token = token
        self.limits = limits
        self.groups = groups

    @classmethod
    def from_request(cls, request: dict[str, Any], groups: list[int]) -> Order:
        """`groups` are the open cgroup.procs files the box shall enter. ValueError names what is wrong."""
        token, limits = request.get("token"), request.get("limits")
        if not isinstance(token, int) or not isinstance(limits, dict):
            raise ValueError("create needs a token and limits")
        for name, least in cls.LEAST.items():
            value = limits.get(name)
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= cls.MOST:
                raise ValueError(f"create needs the limit {name}, a whole number from {least} on")
        return cls(token, {name: limits[name] for name in cls.LEAST}, groups)


class Birth:
    """What a new box has from the zygote, prepared there for all."""

    def __init__(self, link: socket.socket, plan: dict[str, Any], worker_main: WorkerMain) -> None:
        self.link = link
        self.plan = plan
        self.worker_main = worker_main
        self.owner = 0
        self.worker_gives_up = [syscall.no_capabilities(), seccomp.Filter(seccomp.program()).install]

    def answer(self, ends: Ends, body: dict[str, Any], descriptors: list[int] | None = None) -> None:
        """Once for each box. The zygote hears of it by a byte, so that it need not answer itself."""
        os.write(ends.standing, b"1")
        socket.send_fds(self.link, [json.dumps(body).encode()], descriptors or [])


class Ends:
    """Both ends of a box's channels, made in the zygote, which keeps none."""

    def __init__(self) -> None:
        self._all: list[int] = []
        try:
            frames = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            self.frames, self.outer_frames = self._keep(frames[0].detach(), frames[1].detach())
            self.outer_stdout, self.stdout = self._keep(*os.pipe())
            self.outer_stderr, self.stderr = self._keep(*os.pipe())
            self.outer_status, self.status = self._keep(*os.pipe())
            self.stood, self.standing = self._keep(*os.pipe())
        except OSError:
            self.close()
            raise

    def _keep(self, first: int, second: int) -> tuple[int, int]:
        self._all += [first, second]
        return first, second

    def outer(self) -> list[int]:
        """What goes to the host, after the pidfds and before the folders."""
        return [self.outer_frames, self.outer_stdout, self.outer_stderr, self.outer_status]

    def close(self, but: tuple[int, ...] = ()) -> None:
        for each in self._all:
            if each not in but:
                os.close(each)


def write_file(path: str, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def read_file(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, 4096)
    finally:
        os.close(descriptor)


def describe(error: BaseException, step: str) -> dict[str, Any]:
    return {
        "step": step,
        "message": f"{type(error).__name__}: {error}"[:2000],
        "errno": getattr(error, "errno", 0) or 0,
    }


def work(order: Order, birth: Birth, ends: Ends) -> NoReturn:
    """The worker, up to the call of its program. It answers the host when nothing is left to give up."""
    step = "groups"
    try:
        for group in order.groups:
            os.write(group, b"0")
        step = "namespaces"
        syscall.unshare(_OWN_NAMESPACES)
        step = "network"
        raise_loopback()
        bound_sockets()
        syscall.call("sethostname", b"box", 3)
        step = "disk"
        mount.add_disk(order.limits["disk_bytes"], order.limits["disk_files"], birth.owner, birth.plan["seeds"])
        step = "proc"
        mount.add_proc()
        step = "descriptors"
        flags = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
        folders = [os.open("/workspace", flags), os.open("/tmp", flags)]
        pidfds = [syscall.pidfd_open(1), syscall.pidfd_open(os.getpid())]
        os.dup2(ends.stdout, 1)
        os.dup2(ends.stderr, 2)
        os.setsid()
        step = "identity"
        become_guest(birth.owner)
        step = "limits"
        set_limits(order.limits)
        step = "capabilities"
        syscall.lock_privileges()
        syscall.perform(birth.worker_gives_up)
        step = "program"
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # From the answer on there may be interrupts. The worker's program hears them when it is ready to.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        os.chdir("/workspace")
        birth.answer(ends, {"token": order.token, "ok": True}, [*pidfds, *ends.outer(), *folders])
    except BaseException as error:
        birth.answer(ends, {"token": order.token, "ok": False, "error": describe(error, step)})
        os._exit(_BIRTH_FAILED)
    worker_main = birth.worker_main
    birth.link.detach()
    os.dup2(ends.frames, FRAMES)
    syscall.close_above(FRAMES + 1)
    os.set_inheritable(FRAMES, False)
    _run(worker_main)


def _run(worker_main: WorkerMain) -> NoReturn:
    try:
        worker_main(FRAMES)
    except SystemExit as end:
        os._exit(end.code if isinstance(end.code, int) else 1)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    os._exit(0)


def raise_loopback() -> None:
    """127.0.0.1 works inside the box, and nothing else is reachable."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        # SIOCSIFFLAGS with IFF_UP and IFF_RUNNING.
        fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh14x", b"lo", 0x41))


def bound_sockets() -> None:
    """A TCP connection would let its buffers grow to 10 MB and more, which no limit of the box counts."""
    for name in ("tcp_rmem", "tcp_wmem"):
        try:
            write_file(f"/proc/sys/net/ipv4/{name}", f"4096 16384 {SOCKET_BYTES // 2}")
        except OSError:
            return  # a kernel that keeps them for the machine: its administrator bounds them


def become_guest(owner: int) -> None:
    """Take the box's own id and a user namespace that owns nothing: full power in it gives none over mounts or
    network, and RLIMIT_NPROC counts the processes of this box alone."""
    if owner:
        os.setresgid(owner, owner, owner)
        os.setresuid(owner, owner, owner)
    # The change has made /proc/self unwritable. The host, too, must be able to look at this process.
    syscall.prctl(syscall.PR_SET_DUMPABLE, 1)
    syscall.unshare(syscall.CLONE_NEWUSER)
    write_file("/proc/self/setgroups", "deny")
    write_file("/proc/self/uid_map", f"{GUEST_ID} {owner} 1")
    write_file("/proc/self/gid_map", f"{GUEST_ID} {owner} 1")


def set_limits(limits: dict[str, int]) -> None:
    """RLIMIT_DATA, not AS: libraries reserve addresses they never use, and what they write to is what counts."""
    data = int(read_file("/proc/self/statm").split()[5]) * resource.getpagesize()
    for name, value in (
        (resource.RLIMIT_DATA, data + limits["memory_bytes"] + limits["thread_bytes"]),
        (resource.RLIMIT_NPROC, limits["processes"]),
        (resource.RLIMIT_FSIZE, limits["disk_bytes"]),
        (resource.RLIMIT_NOFILE, limits["file_descriptors"]),
        (resource.RLIMIT_STACK, _STACK_BYTES),
        (resource.RLIMIT_MEMLOCK, 64 * 1024),
        (resource.RLIMIT_SIGPENDING, _SIGNALS_PENDING),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(name)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(name, (value, value))


def rehearse() -> None:
    """Do in the zygote, harmlessly, what each box will do: what Python and the linker set up at a first time is then
    shared."""
    raise_loopback()
    read_file("/proc/self/statm")
    write_file("/dev/null", "x")
    describe(OSError(1, "x"), "x")
    ends = Ends()
    first, second = socket.socketpair()
    with first, second:
        socket.send_fds(first, [json.dumps({"token": 1, "ok": True}).encode()], ends.outer())
    os.dup2(ends.status, ends.standing)
    os.close(syscall.pidfd_open(os.getpid()))
    syscall.prctl(3)
    syscall.plain.prctl(3, 0, 0, 0, 0)
    syscall.perform([syscall.prepare("prctl", 3, 0, 0, 0, 0)])
    resource.setrlimit(resource.RLIMIT_CORE, resource.getrlimit(resource.RLIMIT_CORE))
    ends.close()
