"""The program of the zygote process: raises what all boxes of one environment share, then forks a box per request.

    host ── outer ── zygote (pid 1 of its namespace) ─┬─ the process that makes inits
                                                      ├─ init of a box, pid 1 of its namespace
                                                      ├─ worker of that box, pid 2 of the same
                                                      └─ …

The zygote reads requests from its control socket, one JSON object a message: `create`, `ping`, `exit`. A box answers
for itself on the same socket once it is locked (box.py); the zygote answers only when a box died before that. It
trusts the host alone, but no request can make it die. When the socket closes, it ends and the kernel ends every box
with it.

Loaded as text (zygote.py), so that no path and no variable of the host is left in it. Python 3.9 and newer.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import threading
import time
import types
from typing import Any, Callable

from . import box, init, mount, syscall

MESSAGE_BYTES = 64 * 1024
HOLES = 100
"""Of each size of object: more were not found to be left by imports."""
BIRTH_S = 10.0
"""A box that does not stand by then is killed and reported."""
FIRST_BOX_ID = 2
"""Of the ids in the zygote's user namespace: 0 is the zygote, 1 every init, each box has one of the rest."""
_NAMESPACES = (
    syscall.CLONE_NEWNS | syscall.CLONE_NEWPID | syscall.CLONE_NEWNET | syscall.CLONE_NEWIPC | syscall.CLONE_NEWUTS
)


class StartError(Exception):
    """A step of raising the walls failed."""

    def __init__(self, step: str, error: BaseException) -> None:
        super().__init__(f"{step}: {error}")
        self.step = step
        self.errno = getattr(error, "errno", 0) or 0


def step(name: str, action: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return action(*arguments)
    except (OSError, KeyError, ValueError) as error:
        raise StartError(name, error) from error


def main(control: int, plan: dict[str, Any]) -> None:
    """Never returns. `plan` comes from zygote.py."""
    link = socket.socket(fileno=control)
    try:
        syscall.prctl(syscall.PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != plan["host"]:
            os._exit(1)
        _become_zygote(link, plan)
        zygote = Zygote(link, plan, step("inits", init.Inits, bool(plan["uid_base"])))
        answer = {"ok": True, "proc": zygote.proc, **zygote.load()}
        link.send(json.dumps(answer).encode())
    except BaseException as error:
        _report(link, error)
        os._exit(1)
    zygote.serve()


def _report(link: socket.socket, error: BaseException) -> None:
    name = error.step if isinstance(error, StartError) else type(error).__name__
    body = {
        "ok": False,
        "error": {"step": name, "message": str(error)[:2000], "errno": getattr(error, "errno", 0) or 0},
    }
    try:
        link.send(json.dumps(body).encode())
    except OSError:
        pass


def _become_zygote(link: socket.socket, plan: dict[str, Any]) -> None:
    """Enter the namespaces. Returns in the forked child that is pid 1; the outer process waits for it and ends."""
    syscall.limit_malloc_arenas(plan["malloc_arenas"])
    base = plan["uid_base"]
    # As root before the user namespace, which may not even look into /root; otherwise after, where mounting is allowed.
    held = step("open_tree", mount.sources, plan["binds"]) if base else []
    enter_user_namespace(base, plan["uids"])
    step("namespaces", syscall.unshare, _NAMESPACES)
    pid = os.fork()
    if pid:
        link.close()
        os.waitpid(pid, 0)
        os._exit(0)
    # A change of identity has cleared it, and this is another process anyway.
    syscall.prctl(syscall.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != 0:
        os._exit(1)
    os.setsid()
    held = held or step("open_tree", mount.sources, plan["binds"])
    step("private root", mount.enter_private_root, plan, held)


def enter_user_namespace(base: int, count: int) -> None:
    """As root map `count` ids from `base` on, which belong to nobody; otherwise only our own. Ends as root of the new
    one."""
    uid, gid = os.geteuid(), os.getegid()
    if not base:
        step("user namespace", syscall.unshare, syscall.CLONE_NEWUSER)
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
            step("id map", box.write_file, f"/proc/self/{name}", text)
        return
    ready, done = os.pipe(), os.pipe()
    helper = os.fork()
    if helper == 0:
        # Only a process outside may map more than its own id.
        os.close(ready[1])
        os.read(ready[0], 1)
        status = 0
        try:
            for name in ("uid_map", "gid_map"):
                box.write_file(f"/proc/{os.getppid()}/{name}", f"0 {base} {count}")
        except OSError as error:
            status = error.errno or 1
        os._exit(status)
    os.close(ready[0])
    step("user namespace", syscall.unshare, syscall.CLONE_NEWUSER)
    os.close(ready[1])
    status = os.waitstatus_to_exitcode(os.waitpid(helper, 0)[1])
    for each in done:
        os.close(each)
    if status:
        raise StartError("id map", OSError(status, os.strerror(status)))
    os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)


class Zygote:
    """Pid 1 of the outer pid namespace: the loop that forks boxes."""

    def __init__(self, link: socket.socket, plan: dict[str, Any], inits: init.Inits) -> None:
        self._link = link
        self._plan = plan
        self._inits = inits
        self.proc = "pid"
        self._own_pids = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        self._free = list(range(FIRST_BOX_ID, plan["uids"])) if plan["uid_base"] else []
        self._inits_alive: dict[int, Child] = {}
        self._workers_alive: dict[int, Child] = {}
        self._unborn: list[Child] = []
        self._epoll = select.epoll()

    def load(self) -> dict[str, Any]:
        """Import what boxes shall find imported, and the worker's program; then close the root."""
        sys.path[:0] = self._plan["sys_path"]
        sys.dont_write_bytecode = True
        sys.argv = [""]
        threading.stack_size(self._plan["thread_stack_bytes"])
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        # Init keeps it so: as pid 1 it hears nothing from its box that it does not handle, but Python handles this one.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        loaded, failed = [], {}
        for name in self._plan["preload"]:
            # The host reads the last one when an import kills or hangs the zygote.
            self._link.send(json.dumps({"importing": name}).encode())
            try:
                importlib.import_module(name)
            except BaseException as error:
                failed[name] = f"{type(error).__name__}: {error}"[:500]
                continue
            if len(os.listdir("/proc/self/task")) > 1:
                raise StartError(f"preload {name}", RuntimeError("the import starts threads"))
            loaded.append(name)
        self._birth = box.Birth(self._link, self._plan, _load_worker(self._plan["worker"]))
        step("seal", mount.seal)
        # Boxes, too, start from here; what the zygote itself may do stays.
        step("privileges", syscall.lock_privileges)
        step("rehearsal", box.rehearse)
        _clean_main()
        gc.collect()
        _fill_holes()
        gc.freeze()
        return {"loaded": loaded, "failed": failed}

    def serve(self) -> None:
        """Never returns, and no request ends it but `exit`."""
        self._epoll.register(self._link.fileno(), select.EPOLLIN)
        while True:
            ready = {descriptor for descriptor, _ in self._epoll.poll(self._patience())}
            # The dead first, so that what they held is free for the request. Workers before inits: the kernel lets an
            # init end only when the zygote has buried what it forked into that namespace.
            for descriptor in ready & self._workers_alive.keys():
                self._bury_worker(self._workers_alive[descriptor])
            for descriptor in ready & self._inits_alive.keys():
                self._bury(self._inits_alive[descriptor])
            if self._link.fileno() in ready:
                self._read_request()
            self._look_after_births()

    def _patience(self) -> float:
        due = [child.due_at for child in self._unborn]
        return max(0.05, min(due) - time.monotonic()) if due else -1

    def _look_after_births(self) -> None:
        now = time.monotonic()
        self._unborn = [child for child in self._unborn if not child.has_stood()]
        for child in self._unborn:
            if child.due_at <= now:
                child.overdue()

    def _read_request(self) -> None:
        message, descriptors, flags, _ = socket.recv_fds(self._link, MESSAGE_BYTES, 16, socket.MSG_CMSG_CLOEXEC)
        if not message and not descriptors and self._hung_up():
            os._exit(0)
        request: Any = {}
        try:
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                raise ValueError("the request is too long")
            request = json.loads(message)
            self._perform(request, descriptors)
        except Exception as error:
            token = request.get("token") if isinstance(request, dict) else None
            self.answer({"token": token if isinstance(token, int) else None}, error)
        finally:
            for each in descriptors:
                os.close(each)

    def _hung_up(self) -> bool:
        """Tells the end of the socket from an empty message."""
        poll = select.poll()
        poll.register(self._link, 0)
        return bool(poll.poll(0))

    def _perform(self, request: dict[str, Any], descriptors: list[int]) -> None:
        operation = request["op"]
        if operation == "create":
            self._create(box.Order.from_request(request, descriptors))
        elif operation == "ping":
            self.answer({"token": request.get("token"), "boxes": len(self._inits_alive)})
        elif operation == "exit":
            os._exit(0)
        else:
            raise ValueError(f"unknown operation {operation!r}"[:200])

    def answer(self, body: dict[str, Any], error: BaseException | None = None) -> None:
        body["ok"] = error is None
        if error is not None:
            body["error"] = box.describe(error, "zygote")
        try:
            self._link.send(json.dumps(body).encode())
        except BrokenPipeError:
            os._exit(0)
        except OSError:
            pass

    def _create(self, order: box.Order) -> None:
        if self._plan["uid_base"] and not self._free:
            raise RuntimeError(f"all {self._plan['uids'] - FIRST_BOX_ID} user ids are in use")
        ends = box.Ends()
        self._birth.owner = owner = self._free.pop() if self._free else 0
        child = Child(order.token, owner, ends)
        try:
            child.init, space = self._inits.new()
            try:
                child.init_pidfd = syscall.pidfd_open(child.init)
                syscall.setns(space, syscall.CLONE_NEWPID)
            finally:
                os.close(space)
            try:
                pid = os.fork()
                if pid == 0:
                    try:
                        box.work(order, self._birth, ends)
                    finally:
                        # Whatever went wrong: a child must never go on as the zygote.
                        os._exit(1)
            finally:
                syscall.setns(self._own_pids, syscall.CLONE_NEWPID)
            child.add_worker(pid)
        except OSError:
            child.abandon()
            ends.close()
            self._give_back(owner)
            raise
        ends.close(but=(ends.stood, ends.status))
        self._inits_alive[child.init_pidfd] = self._workers_alive[child.worker_pidfd] = child
        for descriptor in (child.init_pidfd, child.worker_pidfd):
            self._epoll.register(descriptor, select.EPOLLIN)
        self._unborn.append(child)

    def _bury_worker(self, child: Child) -> None:
        """Say how the worker ended, and end what is left of its box."""
        pid, status, usage = os.wait4(child.worker, os.WNOHANG)
        if pid == 0:
            return
        self._epoll.unregister(child.worker_pidfd)
        del self._workers_alive[child.worker_pidfd]
        os.close(child.worker_pidfd)
        child.tell(os.waitstatus_to_exitcode(status), usage.ru_maxrss * 1024)
        signal.pidfd_send_signal(child.init_pidfd, signal.SIGKILL)

    def _bury(self, child: Child) -> None:
        """The init of a box has ended, and the kernel has ended every process of it before saying so."""
        if os.waitpid(child.init, os.WNOHANG)[0] == 0:
            return
        self._epoll.unregister(child.init_pidfd)
        del self._inits_alive[child.init_pidfd]
        os.close(child.init_pidfd)
        self._give_back(child.owner)
        if not child.has_stood():
            self.answer({"token": child.token}, RuntimeError(child.reason))
            child.close()
        self._unborn = [each for each in self._unborn if each is not child]

    def _give_back(self, owner: int) -> None:
        # To the far end: an id rests as long as possible.
        if owner:
            self._free.insert(0, owner)


class Child:
    """A box as the zygote sees it: its two processes, the id it runs under, and whether it has answered for itself."""

    def __init__(self, token: int, owner: int, ends: box.Ends) -> None:
        self.token, self.owner = token, owner
        self.init = self.worker = self.init_pidfd = self.worker_pidfd = -1
        self.due_at = time.monotonic() + BIRTH_S
        self.reason = "the box died before it stood"
        self._stood, self._status = ends.stood, ends.status
        os.set_blocking(ends.stood, False)

    def add_worker(self, pid: int) -> None:
        self.worker = pid
        self.worker_pidfd = syscall.pidfd_open(pid)

    def abandon(self) -> None:
        """End what there is of a box that could not be made."""
        for pid in (self.worker, self.init):
            if pid > 0:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        for descriptor in (self.init_pidfd, self.worker_pidfd):
            if descriptor >= 0:
                os.close(descriptor)

    def tell(self, code: int, peak_rss_bytes: int) -> None:
        """The end of the worker, as a line of JSON, to the host if it still listens. The pipe's end says the box is
        gone."""
        end = {"exit": code if code >= 0 else None, "signal": -code if code < 0 else None}
        try:
            os.write(self._status, json.dumps({**end, "peak_rss_bytes": peak_rss_bytes}).encode() + b"\n")
        except OSError:
            pass
        os.close(self._status)

    def has_stood(self) -> bool:
        """Whether the box has answered the host itself."""
        if self._stood >= 0:
            try:
                answered = os.read(self._stood, 1)
            except BlockingIOError:
                return False
            if not answered:
                return False
            self.close()
        return True

    def overdue(self) -> None:
        self.reason = f"the box did not stand within {BIRTH_S:.0f} s"
        self.due_at = time.monotonic() + BIRTH_S
        signal.pidfd_send_signal(self.init_pidfd, signal.SIGKILL)

    def close(self) -> None:
        if self._stood >= 0:
            os.close(self._stood)
            self._stood = -1


def _load_worker(source: str) -> box.WorkerMain:
    """Run the worker's program up to its definitions, so that no box has to, and let it practise: what it does for
    the first time there (imports, caches, specialised code) is then shared by all boxes, about 0.7 MB of each."""
    module = types.ModuleType("__worker__")
    exec(compile(source, "<worker>", "exec"), module.__dict__)
    practise = module.__dict__.get("practise")
    if practise is not None:
        practise()
    found: box.WorkerMain = module.__dict__["worker_main"]
    return found


_filling: list[Any] = []


def _fill_holes() -> None:
    """Take the places that were freed between objects that live. A box that put its own objects there would copy a page
    for each; so it gets pages of its own, one after the other: 0.3 MB fewer."""
    empty = sys.getsizeof(b"")
    for size in range(48, 513, 16):
        _filling.extend(bytes(size - empty) for _ in range(HOLES))
    for number in range(HOLES):
        _filling.extend(([], {}, number + 0.5, number + 1_000_000))


def _clean_main() -> None:
    """What stands in `__main__` is the loader of this program, of no use to the code in a box."""
    names: tuple[str, ...] = tuple(sys.modules["__main__"].__dict__)
    for name in names:
        if not name.startswith("__"):
            del sys.modules["__main__"].__dict__[name]
