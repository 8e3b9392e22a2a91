"""The filter of system calls that every box runs under.

An allow-list. What is known to be dangerous answers EPERM, everything else ENOSYS, so that programs take the way they
take on an older kernel. Classic BPF, assembled here: a binary search over the call's number, so that a box pays about
eight comparisons where a list would cost two hundred. Runs in the zygote: Python 3.9 and newer.
"""

from __future__ import annotations

import ctypes
import errno
import struct

from . import syscall
from .numbers import AUDIT_ARCH, MACHINE, numbers

Instruction = tuple[int, int, int, int]
Block = list[Instruction]

ALLOWED = """
    read write readv writev pread64 pwrite64 preadv pwritev preadv2 pwritev2 open openat openat2 creat close
    close_range stat fstat lstat newfstatat statx statfs fstatfs access faccessat faccessat2 poll ppoll select
    pselect6 lseek mprotect munmap brk mremap msync mincore madvise mlock mlock2 munlock pkey_mprotect pkey_alloc
    pkey_free membarrier rt_sigaction rt_sigprocmask rt_sigreturn rt_sigpending rt_sigtimedwait rt_sigqueueinfo
    rt_tgsigqueueinfo rt_sigsuspend sigaltstack signalfd signalfd4 kill tkill tgkill pidfd_open pidfd_send_signal
    pause alarm pipe pipe2 dup dup2 dup3 flock fsync fdatasync truncate ftruncate fallocate fadvise64 readahead
    sendfile splice tee copy_file_range getdents getdents64 getcwd chdir fchdir rename renameat renameat2 mkdir
    mkdirat rmdir link linkat unlink unlinkat symlink symlinkat readlink readlinkat chmod fchmod fchmodat fchmodat2
    chown fchown lchown fchownat umask utime utimes futimesat utimensat getxattr lgetxattr fgetxattr listxattr
    llistxattr flistxattr setxattr lsetxattr fsetxattr removexattr lremovexattr fremovexattr connect accept accept4
    sendto recvfrom sendmsg recvmsg sendmmsg recvmmsg shutdown bind listen getsockname getpeername getsockopt
    epoll_create epoll_create1 epoll_wait epoll_pwait epoll_pwait2 epoll_ctl eventfd eventfd2 fork vfork execve
    execveat exit exit_group wait4 waitid set_tid_address gettid getpid getppid getpgrp getpgid setpgid getsid setsid
    getuid geteuid getgid getegid getresuid getresgid getgroups setuid setgid setreuid setregid setresuid setresgid
    setfsuid setfsgid capget uname getrlimit setrlimit prlimit64 getrusage sysinfo times getpriority setpriority
    sched_yield sched_setparam sched_getparam sched_setscheduler sched_getscheduler sched_get_priority_max
    sched_get_priority_min sched_rr_get_interval sched_setaffinity sched_getaffinity sched_setattr sched_getattr
    getcpu futex futex_waitv set_robust_list get_robust_list rseq restart_syscall arch_prctl getrandom time
    gettimeofday nanosleep clock_gettime clock_getres clock_nanosleep getitimer setitimer timer_create timer_settime
    timer_gettime timer_getoverrun timer_delete timerfd_create timerfd_settime timerfd_gettime
"""

REFUSED = """
    ptrace process_vm_readv process_vm_writev process_madvise process_mrelease pidfd_getfd kcmp add_key request_key
    keyctl io_uring_setup io_uring_enter io_uring_register io_setup io_destroy io_submit io_cancel io_getevents
    io_pgetevents bpf perf_event_open userfaultfd memfd_create memfd_secret kexec_load kexec_file_load create_module
    init_module finit_module delete_module get_kernel_syms query_module syslog reboot acct swapon swapoff quotactl
    quotactl_fd fanotify_init fanotify_mark modify_ldt iopl ioperm personality mbind set_mempolicy get_mempolicy
    migrate_pages move_pages set_mempolicy_home_node unshare setns mount umount2 pivot_root chroot open_tree
    move_mount fsopen fsconfig fsmount fspick mount_setattr name_to_handle_at open_by_handle_at lookup_dcookie
    nfsservctl sysfs uselib ustat _sysctl shmget shmat shmctl shmdt semget semop semtimedop semctl msgget msgsnd
    msgrcv msgctl mq_open mq_unlink mq_timedsend mq_timedreceive mq_notify mq_getsetattr seccomp capset setgroups
    sethostname setdomainname vhangup sync syncfs settimeofday clock_settime adjtimex clock_adjtime ioprio_set
    vmsplice remap_file_pages mlockall munlockall
"""
# clone3 hides its flags behind a pointer: ENOSYS, and libc falls back to clone. inotify counts against the user of the
# whole machine, so it is left out. sync and syncfs would write back the machine's disks.

_LD, _JMP, _JEQ, _JGE, _JSET, _AND, _RET = 0x20, 0x05, 0x15, 0x35, 0x45, 0x54, 0x06
_NUMBER, _ARCH = 0, 4
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000

_NEW_NAMESPACES = 0x7E020000
"""Every CLONE_NEW* that fits in clone's flags (the one for time does not)."""
_AF_UNIX, _AF_INET, _AF_INET6 = 1, 2, 10
_PROTOCOLS = (0, 6, 17)
"""Default, TCP and UDP. Others would make the kernel load modules."""
_IOCTLS = {
    "TCGETS": 0x5401, "TIOCGPGRP": 0x540F, "TIOCGWINSZ": 0x5413, "FIONREAD": 0x541B, "FIONBIO": 0x5421,
    "FIONCLEX": 0x5450, "FIOCLEX": 0x5451, "FIOASYNC": 0x5452, "SIOCGIFNAME": 0x8910, "SIOCGIFCONF": 0x8912,
    "SIOCGIFFLAGS": 0x8913, "SIOCGIFADDR": 0x8915, "SIOCGIFNETMASK": 0x891B, "SIOCGIFMTU": 0x8921,
    "SIOCGIFINDEX": 0x8933,
}  # fmt: skip
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C
_PRCTLS = {
    "SET_PDEATHSIG": 1, "GET_PDEATHSIG": 2, "GET_DUMPABLE": 3, "SET_NAME": 15, "GET_NAME": 16, "GET_SECCOMP": 21,
    "CAPBSET_READ": 23, "GET_SECUREBITS": 27, "SET_TIMERSLACK": 29, "GET_TIMERSLACK": 30, "SET_NO_NEW_PRIVS": 38,
    "GET_NO_NEW_PRIVS": 39, "GET_TID_ADDRESS": 40, "SET_THP_DISABLE": 41, "GET_THP_DISABLE": 42, "SET_VMA": 0x53564D41,
}  # fmt: skip
_SOCKET_FILTERS = (26, 50, 51, 52)
"""SO_ATTACH_FILTER, _BPF, _REUSEPORT_CBPF, _REUSEPORT_EBPF: programs for the kernel."""
_BUFFERS = (7, 8)
"""SO_SNDBUF and SO_RCVBUF: answered as if done. A box's sockets keep the sizes that `watch` counts with."""
_FILE_KINDS = (0, 0o100000, 0o010000, 0o140000)
"""What mknod may make: regular files, FIFOs, sockets."""
_MAP_HUGETLB = 0x40000
_F_SETPIPE_SZ = 1031


def _answer(number: int = 0) -> Instruction:
    return (_RET, 0, 0, _ERRNO | number if number else _ALLOW)


def _pretence() -> Instruction:
    """Success, and the call is not made."""
    return (_RET, 0, 0, _ERRNO)


def _argument(index: int) -> Instruction:
    """Load the low half of an argument: all of it where the kernel takes an int."""
    return (_LD, 0, 0, 16 + 8 * index)


def _one_of(values: tuple[int, ...], found: Block, otherwise: Block) -> Block:
    """Run `found` if the loaded word is one of `values`, else `otherwise`. Both end in a return."""
    block: Block = [(_JEQ, len(values) - place - 1 + len(otherwise), 0, each) for place, each in enumerate(values)]
    return block + otherwise + found


def _checks() -> dict[str, Block]:
    allow, refuse = [_answer()], [_answer(errno.EPERM)]
    family = _answer(errno.EAFNOSUPPORT)
    protocol = [_argument(2), *_one_of(_PROTOCOLS, allow, [_answer(errno.EPROTONOSUPPORT)])]
    internet = _one_of((_AF_INET, _AF_INET6), protocol, [family])
    kind = [(_AND, 0, 0, 0o170000), *_one_of(_FILE_KINDS, allow, refuse)]
    option = [_argument(2), *_one_of(_SOCKET_FILTERS, refuse, _one_of(_BUFFERS, [_pretence()], allow))]
    return {
        "clone": [_argument(0), (_JSET, 0, 1, _NEW_NAMESPACES), *refuse, *allow],
        "socket": [_argument(0), *_one_of((_AF_UNIX,), allow, internet)],
        "socketpair": [_argument(0), *_one_of((_AF_UNIX,), allow, [family])],
        "setsockopt": [_argument(1), *_one_of((1,), option, allow)],
        "ioctl": [
            _argument(1),
            *_one_of(tuple(_IOCTLS.values()), allow, _one_of((_TIOCSTI, _TIOCLINUX), refuse, [_answer(errno.ENOTTY)])),
        ],
        "prctl": [_argument(0), *_one_of(tuple(_PRCTLS.values()), allow, refuse)],
        "mknod": [_argument(1), *kind],
        "mknodat": [_argument(2), *kind],
        "mmap": [_argument(3), (_JSET, 0, 1, _MAP_HUGETLB), _answer(errno.ENOMEM), *allow],
        "fcntl": [_argument(1), *_one_of((_F_SETPIPE_SZ,), refuse, allow)],
    }


def _ranges(machine: str) -> list[tuple[int, Block]]:
    """First number and verdict of each run of numbers with one verdict, from 0 up."""
    table = numbers(machine)
    verdicts: dict[int, Block] = {table[name]: [_answer()] for name in ALLOWED.split() if name in table}
    verdicts.update({table[name]: [_answer(errno.EPERM)] for name in REFUSED.split() if name in table})
    verdicts.update({table[name]: block for name, block in _checks().items() if name in table})
    unknown = [_answer(errno.ENOSYS)]
    ranges: list[tuple[int, Block]] = []
    for number in range(max(verdicts) + 2):
        block = verdicts.get(number, unknown)
        if not ranges or ranges[-1][1] != block:
            ranges.append((number, block))
    return ranges


def _search(ranges: list[tuple[int, Block]]) -> Block:
    if len(ranges) == 1:
        return ranges[0][1]
    middle = len(ranges) // 2
    low, high = _search(ranges[:middle]), _search(ranges[middle:])
    # A conditional jump reaches 255 instructions, an unconditional one any distance.
    return [(_JGE, 0, 1, ranges[middle][0]), (_JMP, 0, 0, len(low)), *low, *high]


def program(machine: str = MACHINE) -> bytes:
    """The filter for `machine`. x32 calls have numbers above every known one: ENOSYS. Another architecture (int
    0x80): ENOSYS."""
    start: Block = [(_LD, 0, 0, _ARCH), (_JEQ, 1, 0, AUDIT_ARCH[machine]), _answer(errno.ENOSYS), (_LD, 0, 0, _NUMBER)]
    return b"".join(struct.pack("=HBBI", *each) for each in start + _search(_ranges(machine)))


class Filter:
    """A filter ready to be installed; the zygote holds one and every box inherits it."""

    def __init__(self, code: bytes) -> None:
        self._code = ctypes.create_string_buffer(code, len(code))
        header = struct.pack("=HxxxxxxQ", len(code) // 8, ctypes.addressof(self._code))
        self._call = syscall.prepare("seccomp", 1, 0, ctypes.create_string_buffer(header, len(header)))

    def install(self) -> int:
        """For the thread that calls and all that come from it, for good. Needs no-new-privileges. Negative for an
        error."""
        return self._call()
