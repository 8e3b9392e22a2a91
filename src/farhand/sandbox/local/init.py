"""Init, the first process of every box, and the still process of which it is a copy.

Init runs no guest code. It is there so that the box has a first process the guest is not: the kernel gives it the
orphans and, when it ends, ends everything else. It holds nothing and can do nothing but wait.

A forked process keeps, for itself alone, every page that its original goes on to change. So inits are not copies of
the zygote, which is busy, nor big from the packages it loaded, but of a process made before that does nothing else;
it makes them as children of the zygote. An init costs about a third of a megabyte. Python 3.9 and newer.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
from typing import NoReturn

from . import seccomp, syscall

INIT_ID = 1
"""Its user and group in the zygote's user namespace, where there are several."""
_CLONE_PARENT = 0x8000


class Inits:
    """The zygote's hold on that process. Make it before anything large is loaded."""

    def __init__(self, own_ids: bool) -> None:
        give_up = [syscall.prepare("close_range", 3, 0xFFFFFFFF, 0)]
        if own_ids:
            give_up += [syscall.prepare(name, INIT_ID, INIT_ID, INIT_ID) for name in ("setresgid", "setresuid")]
        give_up += [
            syscall.prepare("prctl", syscall.PR_SET_DUMPABLE, 0, 0, 0, 0),
            syscall.no_capabilities(),
            seccomp.Filter(seccomp.program()).install,
        ]
        asked, self._ask = os.pipe()
        self._answer, answered = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                _make_inits(asked, answered, give_up)
            finally:
                os._exit(1)
        os.close(asked)
        os.close(answered)
        self._newest = f"/proc/{pid}/ns/pid_for_children"

    def new(self) -> tuple[int, int]:
        """The number of a new init, a child of the caller, and a descriptor of the pid namespace it is the first of."""
        os.write(self._ask, b"1")
        number = int(os.read(self._answer, 20) or -errno.ESRCH)
        if number < 0:
            raise OSError(-number, f"no init: {os.strerror(-number)}")
        # By way of its maker, which stays in this state until the next: init itself lets nobody look.
        return number, os.open(self._newest, os.O_RDONLY | os.O_CLOEXEC)


def _make_inits(asked: int, answered: int, give_up: list[syscall.Prepared]) -> NoReturn:
    lower, upper = sorted((asked, answered))
    os.closerange(3, lower)
    os.closerange(lower + 1, upper)
    syscall.close_above(upper + 1)
    own = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    syscall.lock_privileges()
    syscall.prctl(syscall.PR_SET_DUMPABLE, 1)
    signal.pthread_sigmask(signal.SIG_SETMASK, {signal.SIGCHLD})
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    waited_for = ctypes.create_string_buffer(128)
    syscall.plain.sigemptyset(waited_for)
    syscall.plain.sigaddset(waited_for, int(signal.SIGCHLD))
    heard = ctypes.byref(ctypes.c_int())
    apart = syscall.prepare("unshare", syscall.CLONE_NEWPID)
    back = syscall.prepare("setns", own, syscall.CLONE_NEWPID)
    fork = syscall.prepare("clone", _CLONE_PARENT | signal.SIGCHLD, None, None, None, None)
    # Looked up here, so that no init has to.
    syscall.plain.waitpid(-1, None, os.WNOHANG)
    assert syscall.plain.sigwait
    while os.read(asked, 1):
        back()
        number = apart()
        if number == 0:
            number = fork()
            if number == 0:
                _be_init(give_up, waited_for, heard)
        if number < 0:
            number = -ctypes.get_errno()
        os.write(answered, b"%d" % number)
    os._exit(0)


def _be_init(give_up: list[syscall.Prepared], waited_for: object, heard: object) -> NoReturn:
    """Bury orphans for ever."""
    try:
        syscall.perform(give_up)
        while True:
            while syscall.plain.waitpid(-1, None, os.WNOHANG) > 0:
                pass
            syscall.plain.sigwait(waited_for, heard)
    finally:
        os._exit(1)
