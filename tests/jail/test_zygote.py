"""The zygote: starts, forks boxes, survives what it is asked, and takes everything with it when it ends."""

from __future__ import annotations

import json
import os
import random
import string
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from farhand.errors import SandboxUnavailable
from farhand.sandbox.local.zygote import Zygote, ZygoteSpec

from .conftest import Box, BoxError, Jail

pytestmark = pytest.mark.jail


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def processes_of(pid: int) -> set[int]:
    """`pid` and all below it, as the machine sees them."""
    found, waiting = {pid}, [pid]
    while waiting:
        each = waiting.pop()
        try:
            children = children_of(each)
        except OSError:
            continue
        found.update(children)
        waiting += children
    return found


def all_gone(pids: set[int], timeout_s: float = 10.0) -> bool:
    """Dead, or a corpse that waits for its parent."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if not any(_lives(pid) for pid in pids):
            return True
        time.sleep(0.005)
    return False


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_worker_stands_where_it_should(box: Box) -> None:
    found = box.eval(
        "import os, sys; result = [os.getpid(), os.getppid(), os.getcwd(), os.getuid(), os.uname().nodename]"
    )
    assert found == [2, 0, "/workspace", 1000, "box"]
    names = {"HOME", "LANG", "LOGNAME", "MALLOC_ARENA_MAX", "MKL_NUM_THREADS", "MPLBACKEND", "MPLCONFIGDIR", "PATH"}
    names |= {"OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "PYTHONDONTWRITEBYTECODE", "PYTHONNOUSERSITE", "SHELL", "USER"}
    assert box.eval("result = sorted(os.environ)") == sorted(names)
    assert box.eval("result = [open('/proc/self/comm').read() != '', sys.argv]") == [True, [""]]
    assert box.eval("import pwd, getpass; result = [pwd.getpwuid(1000).pw_name, getpass.getuser()]") == ["user", "user"]


def test_the_worker_practises_in_the_zygote(box: Box) -> None:
    assert box.eval("import sys; result = 'colorsys' in sys.modules") is True


def test_a_python_started_in_the_box_works(box: Box) -> None:
    program = "import ssl, sqlite3, hashlib, ctypes, multiprocessing, lzma; print(6 * 7)"
    code = f"""
import subprocess, sys
done = subprocess.run([sys.executable, "-c", {program!r}], capture_output=True, text=True)
result = [done.stdout, done.stderr, subprocess.run(["python3", "-c", "print(1)"], capture_output=True,
text=True).stdout]
"""
    assert box.eval(code) == ["42\n", "", "1\n"]


def test_multiprocessing_pools_and_shared_memory(box: Box) -> None:
    code = """
import multiprocessing as mp
from multiprocessing import shared_memory
with mp.get_context("fork").Pool(3) as pool:
    squares = pool.map(abs, [-1, -2, -3])
block = shared_memory.SharedMemory(create=True, size=1000)
block.buf[0] = 7
result = squares + [block.buf[0]]
block.close(); block.unlink()
"""
    assert box.eval(code) == [1, 2, 3, 7]


def test_end_of_the_worker_is_reported(new_box: Callable[..., Box]) -> None:
    for code, exit, signal in (("raise SystemExit(3)", 3, None), ("import os; os.kill(2, 11)", None, 11)):
        box = new_box()
        assert box.do("eval", code=code) is None
        status = json.loads(box.do("status"))
        assert (status["exit"], status["signal"]) == (exit, signal)
        assert status["peak_rss_bytes"] > 1 << 20
        assert box.do("wait") is True


def test_children_end_with_the_worker(new_box: Callable[..., Box]) -> None:
    box = new_box()
    box.eval("import os, signal\nfor _ in range(3):\n    if os.fork() == 0: os.setsid(); signal.pause()")
    pids = processes_of(box.init) | processes_of(box.worker)
    assert len(pids) == 5
    assert box.do("eval", code="os._exit(0)") is None
    assert box.do("wait") is True
    assert all_gone(pids)


def test_orphans_are_reaped(box: Box) -> None:
    code = """
import os, time
for _ in range(20):
    if os.fork() == 0:
        os.fork()
        os._exit(0)
    os.wait()
deadline = time.monotonic() + 10
while len([name for name in os.listdir("/proc") if name.isdigit()]) > 1 and time.monotonic() < deadline:
    time.sleep(0.001)
result = [name for name in os.listdir("/proc") if name.isdigit()]
"""
    assert box.eval(code) == ["2"]


def test_boxes_asked_for_at_once(new_jail: Callable[..., Jail]) -> None:
    jail = new_jail()
    made = jail.do("create_many", zygote=jail.zygote["zygote"], count=20)
    assert len(made) == 20
    assert {jail.do("eval", box=box, code="result = 1")["result"] for box in made} == {1}
    assert jail.do("ping", zygote=jail.zygote["zygote"]) == 20


def test_nothing_piles_up_in_the_zygote(new_jail: Callable[..., Jail]) -> None:
    jail = new_jail()
    zygote = children_of(jail.zygote["pid"])[0]
    jail.box().close()
    assert jail.do("ping", zygote=jail.zygote["zygote"]) == 0
    before = jail.do("descriptors", pid=zygote)
    owners = set()
    for _ in range(15):
        box = jail.box()
        owners.add(box.do("owner"))
        box.close()
    assert jail.do("ping", zygote=jail.zygote["zygote"]) == 0
    assert jail.do("descriptors", pid=zygote) == before
    # An id rests before it is used again.
    assert len(owners) == (15 if jail.identity == "root" else 1)


def test_user_ids_run_out_and_come_back(new_jail: Callable[..., Jail]) -> None:
    jail = new_jail(uids=4)
    first, _second = jail.box(), jail.box()
    if jail.identity != "root":
        # All boxes have the user's own id.
        assert jail.box().do("owner") == first.do("owner")
        return
    with pytest.raises(BoxError, match="user ids are in use"):
        jail.box()
    first.close()
    assert jail.do("ping", zygote=jail.zygote["zygote"]) == 1
    assert jail.box().eval("result = 1") == 1


@pytest.mark.parametrize("field", ["memory_bytes", "processes", "disk_bytes", "disk_files", "file_descriptors"])
def test_a_box_that_cannot_be_made_is_an_error_and_the_next_works(jail: Jail, field: str) -> None:
    for value in (0, -1, 1 << 60, 1.5, "x", None, True):
        with pytest.raises(BoxError) as caught:
            jail.box(**{field: value})
        assert caught.value.kind == "SandboxError"
        assert field in str(caught.value)
    box = jail.box()
    assert box.eval("result = 1") == 1
    box.close()


def test_a_box_that_fails_halfway_says_at_which_step(jail: Jail) -> None:
    # A control group that takes nobody.
    with pytest.raises(BoxError, match="no box: groups: .*No space left"):
        jail.do("create_in", zygote=jail.zygote["zygote"], group="/dev/full")
    box = jail.box()
    assert box.eval("result = 1") == 1
    box.close()


def test_no_descriptors_left_in_the_zygote(new_jail: Callable[..., Jail]) -> None:
    jail = new_jail()
    zygote = children_of(jail.zygote["pid"])[0]
    before = jail.do("limit_descriptors", pid=zygote, count=10)
    with pytest.raises(BoxError, match="Too many open files"):
        jail.box()
    jail.do("limit_descriptors", pid=zygote, count=before)
    assert jail.box().eval("result = 1") == 1


def test_malformed_requests(new_jail: Callable[..., Jail]) -> None:
    jail = new_jail()
    chance = random.Random(7)
    zygote = jail.zygote["zygote"]
    messages = [
        "", "{", "[]", "null", "1", '"create"', "{}", '{"op": null}', '{"op": "create"}', '{"op": "fly"}', "\ud800",
        '{"op": "create", "token": "x"}', '{"op": "create", "token": 1, "limits": []}', "[" * 30000, "x" * 70000,
        '{"op": ["create"]}', '{"op": "create", "token": 1, "limits": {"memory_bytes": NaN}}', "\0\0\0",
    ]  # fmt: skip
    messages += ["".join(chance.choices(string.printable, k=chance.randrange(1, 200))) for _ in range(100)]
    for message in messages:
        jail.do("raw", zygote=zygote, message=message, descriptors=chance.randrange(4))
        assert jail.do("ping", zygote=zygote) == 0
    jail.do("raw", zygote=zygote, message='{"op": "ping"}', descriptors=100)
    assert jail.do("ping", zygote=zygote) == 0
    assert jail.box().eval("result = 1") == 1


def test_death_of_the_maker_of_inits(new_jail: Callable[..., Jail]) -> None:
    jail = new_jail()
    box = jail.box()
    zygote = children_of(jail.zygote["pid"])[0]
    maker = min(children_of(zygote))
    os.kill(maker, 9)
    for _ in range(2):
        with pytest.raises(BoxError, match="no box"):
            jail.box()
    assert box.eval("result = 1") == 1
    assert jail.do("ping", zygote=jail.zygote["zygote"]) == 1


@pytest.mark.parametrize("victim", ["outer", "zygote"])
def test_death_of_the_zygote(new_jail: Callable[..., Jail], victim: str) -> None:
    jail = new_jail()
    box = jail.box()
    box.eval("import os, signal\nif os.fork() == 0: signal.pause()")
    pids = processes_of(jail.zygote["pid"])
    # The outer process, the zygote, the maker of inits; an init, a worker and its child.
    assert len(pids) == 6
    os.kill(jail.zygote["pid"] if victim == "outer" else children_of(jail.zygote["pid"])[0], 9)
    assert all_gone(pids)
    assert box.do("wait") is True
    with pytest.raises(BoxError, match="zygote"):
        jail.box()
    again = jail.start()
    assert jail.do("create", zygote=again["zygote"])["box"]


def test_death_of_the_host(new_jail: Callable[..., Jail]) -> None:
    jail = new_jail()
    jail.box().eval("import os, signal\nsignal.signal(15, signal.SIG_IGN)\nif os.fork() == 0: signal.pause()")
    suspended = jail.box()
    suspended.do("suspend")
    pids = processes_of(jail.host)
    assert len(pids) == 9
    jail.kill_host()
    assert all_gone(pids)


def test_closing_ends_everything_before_it_returns(new_jail: Callable[..., Jail]) -> None:
    jail = new_jail()
    jail.box()
    jail.box()
    pids = processes_of(jail.zygote["pid"])
    assert len(pids) == 7
    jail.do("close_zygote", zygote=jail.zygote["zygote"])
    assert all_gone(pids, 0.01)


def test_mounts_of_the_machine_are_untouched(new_jail: Callable[..., Jail]) -> None:
    before = Path("/proc/self/mountinfo").read_text()
    jail = new_jail()
    jail.box()
    assert Path("/proc/self/mountinfo").read_text() == before
    jail.close()
    assert Path("/proc/self/mountinfo").read_text() == before


@pytest.fixture
def site() -> Any:
    import shutil
    import tempfile

    folder = Path(tempfile.mkdtemp(prefix="fh-site-", dir="/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def test_preloads(new_jail: Callable[..., Jail], site: Path) -> None:
    (site / "calm.py").write_text("import os, sys\nWHERE = __file__\nLOADED_IN = os.getpid()\n")
    (site / "raising.py").write_text("raise ValueError('no')\n")
    (site / "threaded.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    (site / "deadly.py").write_text("import os\nos._exit(3)\n")
    (site / "curious.py").write_text("import os\nSEEN = sorted(os.listdir('/')), os.path.exists('/etc/shadow')\n")
    wanted = ["calm", "raising", "threaded", "deadly", "curious"]
    jail = new_jail(site=str(site), preload=wanted)
    assert jail.zygote["loaded"] == ["calm", "curious"]
    assert list(jail.zygote["failed"]) == ["raising"]
    assert jail.zygote["threaded"] == ["threaded", "deadly"]
    box = jail.box()
    assert box.eval("import calm; result = [calm.WHERE, calm.LOADED_IN]") == ["/opt/site/calm.py", 1]
    # Its code ran behind the walls already.
    assert box.eval("import curious; result = curious.SEEN[1]") is False
    assert box.eval("import threaded; result = threaded.threading.active_count()") == 2
    run = "subprocess.run([sys.executable, '-c', 'import calm; print(calm.WHERE)'], capture_output=True, text=True)"
    assert box.eval(f"import subprocess, sys; result = {run}.stdout") == "/opt/site/calm.py\n"


def test_font_cache_is_linked_into_a_writable_folder(new_jail: Callable[..., Jail], site: Path) -> None:
    (site / "fontlist-v1.json").write_text("{}")
    box = new_jail(mplconfig=str(site)).box()
    assert box.eval("import os; result = open(os.environ['MPLCONFIGDIR'] + '/fontlist-v1.json').read()") == "{}"
    box.eval("open(os.environ['MPLCONFIGDIR'] + '/new', 'w').close()")


def test_suspend_and_resume(new_box: Callable[..., Box]) -> None:
    box = new_box()
    box.eval("import os, threading, time\nfor _ in range(3):\n    if os.fork() == 0:\n        while True: pass")
    box.eval("count = 0\ndef work():\n    global count\n    while True: count += 1")
    box.eval("threading.Thread(target=work, daemon=True).start()")
    states = box.do("suspend")
    assert states == ["T"] * 4
    before = box.do("usage")["cpu_s"]
    box.do("send", code="result = 5")
    with pytest.raises(BoxError, match="did not answer"):
        box.do("receive", timeout_s=0.2)
    assert box.do("usage")["cpu_s"] == before
    box.do("resume")
    assert box.do("receive") == {"result": 5}


def test_a_python_that_is_not_there_is_named() -> None:
    with pytest.raises((SandboxUnavailable, OSError)):
        Zygote.start(ZygoteSpec(worker="", python=Path("/usr/bin/no-python"), prefix=Path("/usr"), version="3.11"))
    with pytest.raises(SandboxUnavailable, match="prefix"):
        Zygote.start(ZygoteSpec(worker="", python=Path("/bin/x"), prefix=Path("/"), version="3.11"))


def test_a_worker_that_cannot_be_compiled_is_an_error_at_the_start() -> None:
    for worker in ("def worker_main(", "x = 1", "raise ValueError('no')"):
        with pytest.raises(SandboxUnavailable):
            Zygote.start(ZygoteSpec(worker=worker))
