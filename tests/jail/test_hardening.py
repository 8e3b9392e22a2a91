"""One test for each way out of a box that is known, tried from inside, as root's box and as an ordinary user's."""

from __future__ import annotations

import errno
import os
import platform
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .conftest import MARKER, Box, BoxError, Jail

pytestmark = [pytest.mark.jail, pytest.mark.hostile]

Eval = Callable[[str], Any]
Calls = Callable[..., dict[str, int]]


def refused(found: dict[str, int], number: int = errno.EPERM) -> None:
    """Every call was made and answered with this error."""
    assert found
    assert {name: errno.errorcode.get(code, code) for name, code in found.items() if code != number} == {}


def test_no_capabilities_and_no_way_to_gain_any(box_eval: Eval) -> None:
    status = box_eval("result = dict(line.split(':', 1) for line in open('/proc/self/status'))")
    found = {name: status[name].strip() for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")}
    assert found == dict.fromkeys(found, "0000000000000000")
    assert (status["NoNewPrivs"].strip(), status["Seccomp"].strip()) == ("1", "2")
    assert status["Groups"].split() in ([], ["65534"])
    assert status["Uid"].split() == ["1000"] * 4


def test_root_box_runs_as_nobody_of_the_machine(jail: Jail, box: Box) -> None:
    owner = box.do("owner")
    if jail.identity == "root":
        assert owner >= 1_900_000_000
    else:
        assert owner == os.stat(f"/proc/{jail.host}").st_uid != 0


def test_ptrace_and_reading_other_processes(calls: Calls) -> None:
    refused(
        calls(
            ptrace=[16, 1, 0, 0], process_vm_readv=[1, 0, 0, 0, 0, 0], process_vm_writev=[1, 0, 0, 0, 0, 0],
            pidfd_getfd=[0, 0, 0], kcmp=[1, 1, 0, 0, 0], process_madvise=[0, 0, 0, 0, 0],
        )
    )  # fmt: skip


def test_keyrings(calls: Calls, box_eval: Eval) -> None:
    refused(calls(keyctl=[0, -3, 1], add_key=[0, 0, 0, 0, 0], request_key=[0, 0, 0, 0]))
    assert box_eval("import os; result = os.path.exists('/proc/keys')") is False


def test_kernel_interfaces(calls: Calls) -> None:
    refused(
        calls(
            io_uring_setup=[1, 0], io_uring_enter=[0, 0, 0, 0, 0], io_uring_register=[0, 0, 0, 0], bpf=[0, 0, 0],
            perf_event_open=[0, 0, -1, -1, 0], userfaultfd=[0],
            kexec_load=[0, 0, 0, 0], kexec_file_load=[0, 0, 0, 0, 0],
            init_module=[0, 0, 0], finit_module=[0, 0, 0], delete_module=[0, 0], syslog=[10, 0, 0], reboot=[0, 0, 0, 0],
            acct=[0], swapon=[0, 0], swapoff=[0], quotactl=[0, 0, 0, 0], fanotify_init=[0, 0], modify_ldt=[0, 0, 0],
            memfd_secret=[0], memfd_create=[b"x", 0], personality=[0xFFFFFFFF], mbind=[0, 0, 0, 0, 0, 0],
            set_mempolicy=[0, 0, 0], get_mempolicy=[0, 0, 0, 0, 0], migrate_pages=[0, 0, 0, 0],
            move_pages=[0, 0, 0, 0, 0, 0], io_setup=[1, 0], seccomp=[1, 0, 0], iopl=[3], ioperm=[0, 1, 1],
            lookup_dcookie=[0, 0, 0], settimeofday=[0, 0], clock_settime=[0, 0], adjtimex=[0], sync=[], syncfs=[0],
            sethostname=[b"x", 1], vhangup=[], capset=[0, 0], setgroups=[0, 0], vmsplice=[0, 0, 0, 0], mlockall=[1],
        )
    )  # fmt: skip


def test_new_namespaces(calls: Calls, box_eval: Eval) -> None:
    refused(calls(unshare=[0x10000000], setns=[0, 0]))
    for flag in (0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000):
        refused(calls(clone=[flag | 17, 0, 0, 0, 0]))
    refused(calls(clone3=[0, 88]), errno.ENOSYS)
    program = "import threading; t = threading.Thread(target=print, args=(7,)); t.start(); t.join()"
    code = f"import subprocess, sys; result = subprocess.run([sys.executable, '-c', {program!r}], capture_output=True)"
    assert box_eval(code + "; result = result.stdout.decode()") == "7\n"


def test_mounts_and_roots(calls: Calls) -> None:
    refused(
        calls(
            mount=[b"none", b"/tmp", b"tmpfs", 0, 0], umount2=[b"/tmp", 2], pivot_root=[b".", b"."], chroot=[b"/tmp"],
            open_tree=[-100, b"/", 1], move_mount=[0, 0, 0, 0, 0], fsopen=[b"tmpfs", 0], fsconfig=[0, 0, 0, 0, 0],
            fsmount=[0, 0, 0], fspick=[0, 0, 0], mount_setattr=[0, 0, 0, 0, 0], name_to_handle_at=[0, 0, 0, 0, 0],
            open_by_handle_at=[0, 0, 0],
        )
    )  # fmt: skip


def test_unknown_calls_do_not_exist(box_eval: Eval) -> None:
    code = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
result = []
for number in (451, 453, 470, 999, 100000, 0x40000000 + 39, 0x7fffffff):
    ctypes.set_errno(0)
    result.append([libc.syscall(ctypes.c_long(number)), ctypes.get_errno()])
"""
    assert box_eval(code) == [[-1, errno.ENOSYS]] * 7


@pytest.mark.skipif(platform.machine() != "x86_64", reason="int 0x80 is an instruction of x86")
def test_calls_of_another_architecture_do_not_exist(box_eval: Eval) -> None:
    # getpid by int 0x80. Forked, so that a kernel without 32-bit calls ends a child and not the worker.
    code = """
import ctypes, mmap, os
page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page.write(b"\\xb8\\x14\\x00\\x00\\x00\\xcd\\x80\\xc3")
call = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
pid = os.fork()
if pid == 0:
    os._exit(7 if call() == -38 else 8)
result = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""
    assert box_eval(code) in (7, -11)


def test_network_of_the_machine(jail: Jail, box_eval: Eval) -> None:
    there = jail.do("listen")
    code = f"""
import socket
result = {{}}
def attempt(name, action):
    try:
        action()
        result[name] = "reached"
    except OSError as error:
        result[name] = error.errno
def connect(family, address):
    with socket.socket(family, socket.SOCK_STREAM) as s:
        s.settimeout(5)
        s.connect(address)
attempt("abstract", lambda: connect(socket.AF_UNIX, "\\0{there["abstract"]}"))
attempt("loopback", lambda: connect(socket.AF_INET, ("127.0.0.1", {there["port"]})))
attempt("internet", lambda: connect(socket.AF_INET, ("1.1.1.1", 53)))
attempt("internet6", lambda: connect(socket.AF_INET6, ("2606:4700:4700::1111", 53)))
attempt("metadata", lambda: connect(socket.AF_INET, ("169.254.169.254", 80)))
attempt("datagram", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("8.8.8.8", 53)))
"""
    unreachable = errno.ENETUNREACH
    assert box_eval(code) == {
        "abstract": errno.ECONNREFUSED, "loopback": errno.ECONNREFUSED, "internet": unreachable,
        "internet6": unreachable, "metadata": unreachable, "datagram": unreachable,
    }  # fmt: skip


def test_socket_families_and_protocols(box_eval: Eval) -> None:
    code = """
import socket
result = []
for family, kind, protocol in WANTED:
    try:
        socket.socket(family, kind, protocol).close()
        result.append(0)
    except OSError as error:
        result.append(error.errno)
"""
    families = [(16, 3, 0), (17, 3, 0), (40, 1, 0), (38, 5, 0), (15, 3, 2), (29, 3, 1), (21, 5, 0), (30, 1, 0)]
    assert box_eval(f"WANTED = {families}\n{code}") == [errno.EAFNOSUPPORT] * len(families)
    protocols = [(2, 1, 132), (2, 1, 262), (2, 6, 33), (2, 2, 136), (10, 1, 132)]
    assert box_eval(f"WANTED = {protocols}\n{code}") == [errno.EPROTONOSUPPORT] * len(protocols)
    raw = box_eval(f"WANTED = [(2, 3, 1), (2, 3, 255), (10, 3, 58)]\n{code}")
    assert 0 not in raw
    usable = [(1, 1, 0), (1, 2, 0), (2, 1, 6), (2, 2, 17), (10, 1, 0)]
    assert box_eval(f"WANTED = {usable}\n{code}") == [0] * len(usable)


def test_programs_for_the_kernel_through_sockets(calls: Calls, box_eval: Eval) -> None:
    box_eval("import socket; s = socket.socket(); number = s.fileno()")
    number = box_eval("result = number")
    for option in (26, 50, 51, 52):
        refused(calls(setsockopt=[number, 1, option, 0, 0]))


def test_loopback_works_inside(box_eval: Eval) -> None:
    code = """
import socket
server = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(server.getsockname())
peer, _ = server.accept()
client.sendall(b"hello")
result = peer.recv(10).decode()
"""
    assert box_eval(code) == "hello"


def test_shared_memory_and_queues_of_system_v_and_posix(calls: Calls) -> None:
    refused(
        calls(
            shmget=[0, 4096, 0o1600], shmat=[0, 0, 0], shmctl=[0, 0, 0], shmdt=[0], semget=[0, 1, 0o1600], semop=[0,
            0, 0], semctl=[0, 0, 0, 0], msgget=[0, 0o1600], msgsnd=[0, 0, 0, 0], msgrcv=[0, 0, 0, 0, 0], msgctl=[0, 0,
            0], mq_open=[b"x", 0o102, 0o600, 0], mq_unlink=[b"x"],
        )
    )  # fmt: skip


def test_proc_shows_the_box_alone(box_eval: Eval) -> None:
    assert box_eval("import os; result = sorted(os.listdir('/proc'))") == ["2", "self", "thread-self"]
    code = """
import os
result = []
for path in ("1/maps", "1/mem", "1/root", "1/environ", "1/status", "sys/kernel/core_pattern", "sysrq-trigger", "kcore",
             "kallsyms", "kmsg", "config.gz", "meminfo", "cpuinfo", "keys", "timer_list", "mounts"):
    if os.path.lexists("/proc/" + path):
        result.append(path)
"""
    assert box_eval(code) == []
    mine = box_eval("result = open('/proc/self/mountinfo').read()")
    assert "/workspace" in mine
    assert MARKER not in mine


def test_init_cannot_be_ended_or_looked_into_by_the_guest(box: Box) -> None:
    code = """
import os, signal
result = []
for number in (9, 15, 2, 19, 6):
    try:
        os.kill(1, number)
        result.append("sent")
    except OSError as error:
        result.append(error.errno)
for path in ("/proc/1/mem", "/proc/1/maps", "/proc/1/cmdline"):
    try:
        open(path, "rb").read(1)
        result.append("read")
    except OSError as error:
        result.append(error.errno)
"""
    found = box.eval(code)
    assert found[:5] in (["sent"] * 5, [errno.EPERM] * 5)
    assert found[5:] == [errno.ENOENT] * 3
    assert box.eval("result = 'alive'") == "alive"
    assert box.do("usage")["processes"] == 1


def test_devices_and_sys(box_eval: Eval, calls: Calls) -> None:
    names = ["fd", "full", "null", "random", "shm", "stderr", "stdin", "stdout", "urandom", "zero"]
    assert box_eval("import os; result = sorted(os.listdir('/dev'))") == names
    assert box_eval("result = os.path.exists('/sys')") is False
    assert box_eval("result = len(open('/dev/urandom', 'rb').read(5)) + open('/dev/null', 'w').write('x')") == 6
    for kind in (stat.S_IFBLK, stat.S_IFCHR):
        refused(calls(mknodat=[-100, b"/workspace/device", kind | 0o666, 0x103]))
    assert calls(mknodat=[-100, b"/workspace/fifo", stat.S_IFIFO | 0o600, 0]) == {"mknodat": 0}


def test_ioctls_that_are_not_listed(box_eval: Eval) -> None:
    code = """
import fcntl, os
result = []
for request in (0x5412, 0x541C, 0x40049409, 0x4B3A, 0x89A2, 0x5401):
    try:
        fcntl.ioctl(0, request, b"\\0" * 64)
        result.append(0)
    except OSError as error:
        result.append(error.errno)
"""
    assert box_eval(code) == [errno.EPERM, errno.EPERM, *[errno.ENOTTY] * 4]


def test_prctl_options_that_are_not_listed(calls: Calls) -> None:
    for option in (4, 8, 22, 24, 28, 31, 35, 36, 47, 59, 62):
        refused(calls(prctl=[option, 0, 0, 0, 0]))
    assert calls(prctl=[15, b"name", 0, 0, 0]) == {"prctl": 0}


def test_setuid_programs_are_inert(box_eval: Eval) -> None:
    code = """
import os, stat, subprocess
names = [os.path.join("/usr/bin", name) for name in os.listdir("/usr/bin")]
names = [name for name in names if os.path.isfile(name) and os.stat(name).st_mode & stat.S_ISUID]
flags = os.statvfs("/usr").f_flag
result = [bool(flags & os.ST_NOSUID), bool(os.statvfs("/workspace").f_flag & os.ST_NOSUID)]
if "/usr/bin/su" in names:
    su = subprocess.run(["/usr/bin/su", "-c", "id -u"], stdin=subprocess.DEVNULL, capture_output=True)
    result.append(b"0" not in su.stdout)
"""
    assert set(box_eval(code)) == {True}


def test_becoming_somebody_else(box_eval: Eval) -> None:
    code = """
import os
result = []
for action in (lambda: os.setuid(0), lambda: os.setgid(0), lambda: os.setresuid(0, 0, 0), lambda: os.setgroups([0]),
               lambda: os.chown("/workspace", 0, 0), lambda: os.setuid(1001)):
    try:
        action()
        result.append("done")
    except OSError as error:
        result.append(error.errno)
"""
    assert "done" not in box_eval(code)


def test_nothing_is_inherited(box_eval: Eval) -> None:
    code = """
import os, stat
result = {}
for name in os.listdir("/proc/self/fd"):
    try:
        result[name] = [os.readlink("/proc/self/fd/" + name).split(":")[0], stat.S_IFMT(os.fstat(int(name)).st_mode)]
    except OSError:
        pass
"""
    assert box_eval(code) == {
        "0": ["/dev/null", stat.S_IFCHR], "1": ["pipe", stat.S_IFIFO], "2": ["pipe", stat.S_IFIFO],
        "3": ["socket", stat.S_IFSOCK],
    }  # fmt: skip
    assert box_eval("import fcntl; result = fcntl.fcntl(3, fcntl.F_GETFD) & fcntl.FD_CLOEXEC") == 1
    # Descriptors of folders lead nowhere: the one a child could get from here is a socket.
    assert (
        box_eval("import subprocess; result = subprocess.run(['ls', '/proc/self/fd'], capture_output=True).returncode")
        == 0
    )


def test_environment_arguments_and_memory_hold_nothing_of_the_host(box_eval: Eval, source: Path) -> None:
    environ = box_eval("result = open('/proc/self/environ').read()")
    assert MARKER not in environ
    assert "FARHAND" not in environ
    arguments = box_eval("result = open('/proc/self/cmdline').read()")
    assert str(source) not in arguments + environ
    half = len(MARKER) // 2
    # The two halves are never put together in the box, so what is found was there before.
    code = f"""
first, second = {MARKER[:half][::-1]!r}[::-1].encode(), {MARKER[half:][::-1]!r}[::-1].encode()
result, searched = 0, 0
with open("/proc/self/mem", "rb", 0) as memory:
    for line in open("/proc/self/maps"):
        area, rights = line.split()[:2]
        if rights[0] != "r" or "[v" in line:
            continue
        start, end = (int(each, 16) for each in area.split("-"))
        memory.seek(start)
        try:
            data = memory.read(end - start)
        except OSError:
            continue
        searched += len(data)
        place = data.find(first)
        while place >= 0:
            after = place + len(first)
            result += data[after : after + len(second)] == second
            place = data.find(first, after)
result = [result, searched > 5_000_000]
"""
    assert box_eval(code) == [0, True]
    modules = box_eval("import sys; result = [name for name in sys.modules if 'farhand' in name or 'jail' in name]")
    assert modules == []


def test_the_machines_files(jail: Jail, box_eval: Eval) -> None:
    found = box_eval("import os; result = sorted(os.listdir('/'))")
    allowed = {".empty", "bin", "dev", "etc", "lib", "lib32", "lib64", "opt", "proc", "sbin", "tmp", "usr", "workspace"}
    prefix = box_eval("import sys; result = sys.base_prefix")
    assert set(found) - allowed <= {prefix.split("/")[1]}
    assert box_eval("result = [p for p in ('/etc/shadow', '/var', '/run', '/boot', '/mnt') if os.path.exists(p)]") == []
    code = """
import os
result = []
for path in ("/made", "/usr/made", "/etc/made", "/opt/made", "/dev/made", os.path.join(PREFIX, "made"), "/.empty/made"):
    try:
        open(path, "w").close()
        result.append(path)
    except OSError:
        pass
for path in ("/etc/passwd", "/usr/bin/env", "/etc/hosts"):
    try:
        open(path, "r+").close()
        result.append(path)
    except OSError:
        pass
"""
    assert box_eval(f"PREFIX = {prefix!r}\n{code}") == []


def test_fork_bomb(new_box: Callable[..., Box]) -> None:
    box, neighbour = new_box(processes=32), new_box(processes=32)
    code = """
import os, signal
pids = []
try:
    while True:
        pid = os.fork()
        if pid == 0:
            signal.pause()
        pids.append(pid)
except OSError as error:
    result = [len(pids), error.errno]
"""
    assert box.eval(code) == [31, errno.EAGAIN]
    assert neighbour.eval("import os; pid = os.fork() or os._exit(0); result = os.waitpid(pid, 0)[1]") == 0
    threads = (
        "import threading\ntry:\n    threading.Thread(target=print).start()\nexcept RuntimeError: result = 'refused'"
    )
    assert box.eval(threads) == "refused"
    assert box.eval("for pid in pids: os.kill(pid, 9), os.waitpid(pid, 0)\nresult = 'over'") == "over"


def test_one_large_allocation(new_box: Callable[..., Box]) -> None:
    box = new_box(memory_bytes=256 << 20)
    with pytest.raises(BoxError) as caught:
        box.eval("x = bytearray(400 << 20)")
    assert caught.value.kind == "MemoryError"
    assert box.eval("x = bytearray(200 << 20); result = len(x)") == 200 << 20


@pytest.mark.parametrize("kind", ["private", "shared"])
def test_memory_of_many_children(new_box: Callable[..., Box], kind: str) -> None:
    bound = 256 << 20
    box = new_box(memory_bytes=bound, disk_bytes=32 << 20)
    fill = "bytearray(200 << 20)" if kind == "private" else "__import__('mmap').mmap(-1, 200 << 20)"
    code = f"""
import os, time
for _ in range(31):
    if os.fork() == 0:
        block = {fill}
        for place in range(0, 200 << 20, 4096):
            block[place] = 1
        time.sleep(60)
time.sleep(60)
"""
    box.do("send", code=code)
    found = box.do("bomb", bound_bytes=bound)
    assert found["gone"] is True
    # The look that finds it ends counting as soon as the bound is passed: one child's memory more at most.
    assert bound < found["seen_bytes"] < bound + (200 << 20) + (32 << 20)


def test_memory_that_no_process_maps(calls: Calls) -> None:
    refused(calls(memfd_create=[b"x", 0], memfd_secret=[0]))
    assert calls(mmap=[0, 4096, 3, 0x40022, -1, 0]) == {"mmap": errno.ENOMEM}


def test_endless_loop_is_interrupted_and_killed(new_box: Callable[..., Box]) -> None:
    box = new_box()
    box.eval("kept = 41")
    box.do("send", code="import os\nos.write(1, b'running')\nwhile True: pass")
    assert box.do("stdout") == "running"
    box.do("interrupt")
    assert box.do("receive")["error"] == "KeyboardInterrupt"
    assert box.eval("result = kept + 1") == 42
    box.do("send", code="import signal\nsignal.signal(2, signal.SIG_IGN)\nwhile True: pass")
    assert box.do("kill") is True


def test_disk_fill(new_box: Callable[..., Box]) -> None:
    box = new_box(disk_bytes=8 << 20, disk_files=50)
    code = """
import os
result = []
try:
    with open(PATH, "wb", 0) as file:
        while True: file.write(b"x" * 65536)
except OSError as error:
    result = [error.errno, os.path.getsize(PATH)]
os.unlink(PATH)
"""
    for path in ("/workspace/large", "/tmp/large", "/dev/shm/large"):
        number, size = box.eval(f"PATH = {path!r}\n{code}")
        assert number in (errno.ENOSPC, errno.EFBIG)
        assert 7 << 20 <= size <= 8 << 20
    with pytest.raises(BoxError) as caught:
        box.eval("for number in range(100): open(f'/workspace/{number}', 'w').close()")
    assert caught.value.errno == errno.ENOSPC
    assert box.eval("result = len(os.listdir('/workspace'))") in range(45, 51)
    with pytest.raises(BoxError) as caught:
        box.eval("os.unlink('/workspace/1')\nwith open('/workspace/sparse', 'wb') as file: file.truncate(1 << 40)")
    assert caught.value.errno == errno.EFBIG


def test_disk_is_shared_between_workspace_and_tmp(new_box: Callable[..., Box]) -> None:
    box = new_box(disk_bytes=8 << 20)
    box.eval("open('/workspace/half', 'wb').write(b'x' * (5 << 20))")
    with pytest.raises(BoxError) as caught:
        box.eval(
            "open('/tmp/half', 'wb', 0).write(b'x' * (5 << 20)); open('/tmp/more', 'wb', 0).write(b'x' * (5 << 20))"
        )
    assert caught.value.errno == errno.ENOSPC


def test_output_flood_waits_at_the_pipe(new_box: Callable[..., Box]) -> None:
    box = new_box()
    box.do("send", code="import os\nwhile True: os.write(1, b'x' * 65536)")
    assert len(box.do("stdout")) <= 1 << 20
    box.do("interrupt")
    assert box.do("receive")["error"] == "KeyboardInterrupt"


def test_descriptors_are_bounded(box: Box) -> None:
    code = """
import os
held = []
try:
    while True: held.append(os.open("/dev/null", 0))
except OSError as error:
    result = [error.errno, len(held) < 256]
for each in held: os.close(each)
"""
    assert box.eval(code) == [errno.EMFILE, True]
    assert box.eval("import resource; result = resource.getrlimit(resource.RLIMIT_CORE)") == [0, 0]
    with pytest.raises(BoxError):
        box.eval("resource.setrlimit(resource.RLIMIT_NPROC, (1000, 1000))")
    with pytest.raises(BoxError) as caught:
        box.eval("import fcntl; fcntl.fcntl(1, 1031, 1 << 20)")
    assert caught.value.kind == "PermissionError"


def test_host_reads_files_beneath_the_folder_alone(jail: Jail, box: Box) -> None:
    code = """
import os
os.chdir("/workspace")
open("plain", "w").write("text")
os.symlink("/etc/passwd", "absolute")
os.symlink("../etc/passwd", "relative")
os.symlink("plain", "inside")
os.mkdir("folder"); os.symlink("/etc", "folder/etc")
os.mkfifo("fifo")
"""
    box.eval(code)
    assert box.do("open_beneath", path="plain") == "text"
    for path in ("absolute", "relative", "inside", "folder/etc/passwd"):
        assert box.do("open_beneath", path=path) == f"errno {errno.ELOOP}"
    for path in ("../etc/passwd", "/etc/passwd", "folder/../../etc/passwd"):
        assert box.do("open_beneath", path=path) == f"errno {errno.EXDEV}"
    # Does not wait for a writer.
    assert box.do("open_beneath", path="fifo") == ""
    assert box.do("kill") is True
    assert box.do("open_beneath", path="plain") == "text"


def test_neighbours(new_box: Callable[..., Box], jail: Jail) -> None:
    first, second = new_box(), new_box()
    first.eval("import socket; s = socket.socket(socket.AF_UNIX); s.bind('\\0here'); s.listen()")
    first.eval("t = socket.create_server(('127.0.0.1', 4000)); open('/tmp/mine', 'w').write('x')")
    code = """
import os, socket
result = []
for family, address in ((socket.AF_UNIX, "\\0here"), (socket.AF_INET, ("127.0.0.1", 4000))):
    try:
        socket.socket(family).connect(address)
        result.append("reached")
    except OSError as error:
        result.append(error.errno)
result.append(os.path.exists("/tmp/mine"))
found = 0
for pid in list(range(3, 3000)) + [HOST]:
    try:
        os.kill(pid, 0)
        found += 1
    except ProcessLookupError:
        pass
result.append(found)
"""
    expected = [errno.ECONNREFUSED, errno.ECONNREFUSED, False, 0]
    assert second.eval(f"HOST = {first.worker}\n{code}") == expected
    if jail.identity == "root":
        assert first.do("owner") != second.do("owner")


def test_randomness_is_not_shared(new_box: Callable[..., Box]) -> None:
    code = "import random, os, uuid, tempfile; result = [random.random(), os.urandom(8).hex(), uuid.uuid4().hex]"
    first, second = new_box().eval(code), new_box().eval(code)
    assert all(a != b for a, b in zip(first, second, strict=True))
