"""What the host can do to the processes and files of one box of the jail."""

from __future__ import annotations

import os
import time
from typing import Any

from farhand.sandbox.local import syscall, watch
from farhand.sandbox.local.cgroup import BoxCgroup
from farhand.sandbox.local.zygote import BoxHandles, BoxSpec
from farhand.sandbox.runner.hands import Usage
from farhand.sandbox.runner.workspace import DirectoryFiles

LOOK_S = 0.002
"""Without a control group a look at a box walks over its processes: two looks are at least this far apart."""


class AsOwner:
    """A context in which this thread opens files as the box's own user: the kernel allows what the guest itself may do.

    For a host that is root, which has no power over an id that is not its own in the box's disk.
    """

    def __init__(self, owner: int) -> None:
        self._owner = owner

    def __enter__(self) -> None:
        syscall.call("setfsgid", self._owner)
        syscall.call("setfsuid", self._owner)

    def __exit__(self, *_: object) -> None:
        syscall.call("setfsuid", 0)
        syscall.call("setfsgid", 0)


class JailHands:
    """`Hands` of the host over one box. Without a group that counts memory, `usage` is what bounds it."""

    def __init__(self, handles: BoxHandles, spec: BoxSpec, group: BoxCgroup | None) -> None:
        self._handles = handles
        self._group = group
        self._bound = spec.memory_bytes
        # One process alone cannot fill the group: with what is left of it, the box is still this large.
        self._full_from = spec.memory_bytes // 4
        self._watch = watch.Watch(handles.roots, spec.memory_bytes, handles.scratch)
        self._looked = 0.0
        self._last: Usage | None = None
        self._frozen = False
        self._gone = False
        self.filled = False
        """The kernel has ended a process of the box because its group was full."""
        self.sampling = group is None or group.memory_bytes() is None
        if os.geteuid() == 0:
            owner = AsOwner(os.fstat(handles.workspace).st_uid)
            self._files = DirectoryFiles(handles.workspace, lambda: owner)
        else:
            self._files = DirectoryFiles(handles.workspace)

    def interrupt(self) -> None:
        try:
            self._handles.interrupt()
        except (ProcessLookupError, OSError):
            pass

    def kill(self) -> None:
        if not self._gone:
            self._handles.kill()

    def usage(self) -> Usage | None:
        if self._gone:
            return self._last
        if self.sampling or self._group is None:
            return self._look()
        cpu_s, memory = self._group.cpu_s(), self._group.memory_bytes()
        if cpu_s is None or memory is None:
            return self._look()
        if memory > self._full_from and not self.filled and self._group.oom_kills():
            # The kernel ends one process, perhaps a small one; what is left of the action could not know why.
            self.filled = True
            self.kill()
        self._last = Usage(max(0, memory - self._watch.disk_used_bytes()), cpu_s, 0)
        return self._last

    def _look(self) -> Usage:
        now = time.monotonic()
        if self._last is None or now - self._looked >= LOOK_S:
            seen = self._watch.usage()
            self._last = Usage(seen.memory_bytes, seen.cpu_s, seen.threads)
            self._looked = time.monotonic()
        return self._last

    def apply(self, limits: dict[str, Any]) -> None:
        """What the kernel bounds was set when the box was made; the supervisor compares `usage` with the new limits."""
        bound = int(limits.get("memory_bytes", self._bound))
        if bound != self._bound and not self._gone:
            self._bound = bound
            self._watch = watch.Watch(self._handles.roots, bound, self._handles.scratch)

    def suspend(self) -> None:
        if self._gone:
            return
        self._frozen = True
        try:
            if self._group is not None and self._group.can_freeze:
                self._group.freeze()
            else:
                watch.suspend(self._handles.roots)
        except BaseException:
            self.resume()
            raise

    def resume(self) -> None:
        if self._gone or not self._frozen:
            return
        self._frozen = False
        if self._group is not None and self._group.can_freeze:
            self._group.thaw()
        else:
            watch.resume(self._handles.roots)

    def files(self) -> DirectoryFiles:
        return self._files

    def gone(self) -> None:
        """No process is left. Files can still be read."""
        self._gone = True
