"""Guest code that turns on its own worker: kills it, stops it, takes its descriptors, replaces what it is made of."""

from __future__ import annotations

import pytest

from driving import opened, still_works
from farhand import event as ev
from farhand.limits import MIB
from farhand.sandbox.local.sandbox import LocalSandbox

from .attack import FOREVER, Attacker, memory_grows_at_most

pytestmark = [pytest.mark.anyio, pytest.mark.jail, pytest.mark.hostile]

HALF = 'os.write(fd, b\'{"t":"done","action":"\')\n'
"""The beginning of a frame."""

ENDED = {
    "killed in the middle of a frame": HALF + "os.kill(os.getpid(), signal.SIGKILL)",
    "gone in the middle of a frame": HALF + "os._exit(0)",
    "gone by a thread": "threading.Thread(target=os._exit, args=(5,)).start()" + FOREVER,
    "its channel closed": "os.close(fd)\nchannel.close()\ntime.sleep(0.2)",
    "all descriptors closed": "os.closerange(0, 4096)",
    "a child that keeps the channel": """
kept = os.dup(fd)
os.set_inheritable(kept, True)
if os.fork() == 0:
    while True:
        os.write(kept, b'{"t":"display","bundle":{}}\\n')
time.sleep(0.1)
os._exit(4)
""",
    "a child that keeps the channel and says nothing": """
kept = os.dup(fd)
if os.fork() == 0:
    time.sleep(60)
os._exit(4)
""",
    "a child that keeps the pipes": "if os.fork() == 0:\n    while True: os.write(1, b'x' * 65536)\nos._exit(4)",
    "a signal of the kernel": "import ctypes\nctypes.string_at(0)",
}


@pytest.mark.parametrize("code", ENDED.values(), ids=ENDED.keys())
async def test_a_worker_that_ends_itself(attack: Attacker, code: str) -> None:
    fallout = await attack(code)
    assert fallout.kind in ("ended", "protocol")
    assert fallout.of(ev.SANDBOX_LOST)[0]["reason"] == "ended"


STOPPED = {
    "stopped": "os.kill(os.getpid(), signal.SIGSTOP)",
    "stopped in the middle of a frame": HALF + "os.kill(os.getpid(), signal.SIGSTOP)",
    "waiting for the supervisor": "while True: os.read(fd, 10)",
    "deaf": "signal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass",
    "deaf in all threads": "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\nwhile True: time.sleep(1)",
    "not to be interrupted": """
while True:
    try:
        while True: time.sleep(1)
    except BaseException: pass
""",
    "in C": "'a' * 30 + 'b' == __import__('re').match('(a*)*$', 'a' * 60 + 'b')",
    "stopped by its child": "parent = os.getpid()\nif os.fork() == 0: os.kill(parent, signal.SIGSTOP)\ntime.sleep(60)",
    "never at its end": "class Slow:\n    def __del__(self):\n        while True: pass\nslow = Slow()\ndel slow",
    "at a repr": "class Slow:\n    def __repr__(self):\n        while True: pass\nSlow()",
    "at the text of an error": """
class Slow(Exception):
    def __str__(self):
        while True:
            try: time.sleep(60)
            except BaseException: pass
raise Slow
""",
    "at a stream": """
class Slow:
    def write(self, text): pass
    def flush(self): time.sleep(60)
sys.stdout = Slow()
sys.stdout.flush()
""",
}


@pytest.mark.parametrize("code", STOPPED.values(), ids=STOPPED.keys())
async def test_a_worker_that_does_not_come_back(attack: Attacker, code: str) -> None:
    fallout = await attack(code, wall_s=0.5)
    assert fallout.error["limit"] == "wall_s"
    assert fallout.first["usage"]["elapsed_s"] < 5


async def test_signals_to_everybody_reach_the_box_alone(attack: Attacker) -> None:
    code = """
told = []
for pid in (1, -1):
    for number in (9, 15, 19, 2, 1):
        try:
            os.kill(pid, number)
            told.append("sent")
        except OSError as error:
            told.append(type(error).__name__)
set(told) <= {"sent", "PermissionError", "ProcessLookupError"}
"""
    fallout = await attack(code)
    assert fallout.text == "True"
    assert not fallout.of(ev.SANDBOX_LOST)


SURVIVED = {
    "0 to 2 closed": "for each in (0, 1, 2): os.close(each)",
    "0 to 2 are something else": "null = os.open('/dev/null', os.O_RDWR)\nfor each in (0, 1, 2): os.dup2(null, each)",
    "no streams": "sys.stdout = sys.stderr = sys.__stdout__ = sys.__stderr__ = sys.stdin = None",
    "streams closed": "sys.stdout.close()\nsys.stderr.close()\nsys.stdin.close()",
    "no json": "json.dumps = json.loads = json.JSONEncoder = json.JSONDecoder = lambda *a, **k: '{}'",
    "no modules": "sys.modules.clear()",
    "no builtins": """
import builtins
for name in list(vars(builtins)):
    delattr(builtins, name)
""",
    "other builtins": """
import builtins
builtins.isinstance = builtins.len = builtins.repr = builtins.type = builtins.dict = lambda *a: 1 / 0
""",
    "other os and socket": "os.read = os.write = os.dup2 = os.fstat = socket.socket.send = socket.socket.recv = None",
    "other names": "globals().clear()",
    "no __main__": "del sys.modules['__main__']",
    "another import": "import builtins\nbuiltins.__import__ = lambda *a, **k: 1 / 0",
    "tracing": "sys.settrace(lambda *a: 1 / 0)",
    "profiling": "sys.setprofile(lambda *a: 1 / 0)",
    "no recursion": "sys.setrecursionlimit(50)",
    "another linecache": "import linecache\nlinecache.cache = linecache.getlines = None",
    "another traceback": "import traceback\ntraceback.TracebackException = None\nraise ValueError",
    "nowhere": "os.chdir('/tmp')\nsys.path[:] = []\nos.environ.clear()",
    "no folder to be in": "os.mkdir('/workspace/a')\nos.chdir('/workspace/a')\nos.rmdir('/workspace/a')",
    "fewer descriptors": "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (60, 60))",
    "no file": "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))",
    "a collector": "import gc\ngc.callbacks.append(lambda *a: 1 / 0)\ngc.set_threshold(1)",
    "hooks": "sys.excepthook = sys.displayhook = sys.unraisablehook = threading.excepthook = lambda *a: 1 / 0",
    "at exit": "import atexit\natexit.register(time.sleep, 60)\nraise SystemExit(3)",
    "at the end of its value": "class Last:\n    def __del__(self): raise SystemExit(7)\nLast()",
    "a fork that goes on": "os.fork()",
    "names without end": "globals().update((f'v{n}', n) for n in range(50_000))\nglobals()['x' * 1_000_000] = 1",
    "names that change": """
def change():
    number = 0
    while True:
        globals()[f"a{number % 100}"] = number
        globals().pop(f"a{number * 7 % 100}", None)
        number += 1
for _ in range(3): threading.Thread(target=change, daemon=True).start()
""",
}


@pytest.mark.parametrize("code", SURVIVED.values(), ids=SURVIVED.keys())
async def test_what_is_done_to_the_interpreter_does_not_last(attack: Attacker, code: str) -> None:
    await attack(code)


async def test_an_interrupt_as_soon_as_the_box_is_born(local: LocalSandbox) -> None:
    for number in range(40):
        async with opened(local) as hand:
            await hand.run(f"act_{number}", "while True: pass", "<action 1>")
            await hand.interrupt(f"act_{number}", "interrupt", 5.0)
            frames = [frame async for frame in hand.frames()]
            assert [(frame["error"]["kind"], frame["alive"]) for frame in frames] == [("interrupted", True)]
            await still_works(hand)


async def test_an_alarm_that_goes_off_later(attack: Attacker) -> None:
    """Code of an earlier action may speak for a later one; it costs that action at most."""
    code = "signal.signal(signal.SIGALRM, lambda *a: 1 / 0)\nsignal.setitimer(signal.ITIMER_REAL, 0.02)"
    fallout = await attack(code, "time.sleep(0.3)")
    assert fallout.of(ev.ACTION_FINISHED)[1]["error"]["kind"] in ("exception", "lost")


CAUSES = """
problem = None
for number in range(1000):
    try: raise ValueError(number) from problem
    except ValueError as error: problem = error
raise problem
"""
REPORTS = {
    "a repr that raises": ("class Odd:\n    def __repr__(self): raise OSError('no')\nOdd()", "exception"),
    "a repr that exits": ("class Odd:\n    def __repr__(self): raise SystemExit(3)\nOdd()", "exit"),
    "a repr that is no text": ("class Odd:\n    def __repr__(self): return 5\nOdd()", "exception"),
    "a repr of 300 MB": ("class Odd:\n    def __repr__(self): return 'x' * (300 << 20)\nOdd()", "ok"),
    "a repr of a gigabyte": ("class Odd:\n    def __repr__(self): return 'x' * (1 << 30)\nOdd()", "limit"),
    "an error of 100 MB": ("raise ValueError('x' * (100 << 20))", "exception"),
    "an error of half pairs": ("raise ValueError('\\ud800' * 1000)", "exception"),
    "an error without text": ("class Odd(Exception):\n    def __str__(self): raise self\nraise Odd", "exception"),
    "a class of a long name": ("raise type('E' * 1_000_000, (Exception,), {})('x')", "exception"),
    "a class that lies": (
        "class Odd(BaseException):\n    __name__ = 5\n    __cause__ = 5\n    args = 'x'\nraise Odd",
        "exception",
    ),
    "a thousand causes": (CAUSES, "exception"),
    "a cause of itself": ("a, b = ValueError(), ValueError()\na.__cause__, b.__cause__ = b, a\nraise a", "exception"),
    "a group of 20,000": ("raise ExceptionGroup('x', [ValueError(n) for n in range(20_000)])", "exception"),
    "frames without end": ("def f(n): return f(n + 1)\nf(0)", "exception"),
    "a syntax of 900 brackets": ("eval('(' * 900 + ')' * 900)", "exception"),
    "a stack without end": ("sys.setrecursionlimit(10**9)\ndef f(n): return f(n + 1)\nf(0)", None),
}  # fmt: skip


@pytest.mark.parametrize(("code", "kind"), REPORTS.values(), ids=REPORTS.keys())
async def test_what_is_reported_is_bounded(attack: Attacker, code: str, kind: str | None) -> None:
    with memory_grows_at_most(48 * MIB):
        fallout = await attack(code, wall_s=10)
    assert kind is None or fallout.kind == kind
    assert len(str(fallout.first)) < 400_000
    if fallout.kind != "ok":
        assert len(fallout.error["message"]) <= 4096
        assert len(fallout.error["type"]) <= 200
        assert len(fallout.error["traceback"]) <= 40_000


AFTER = {
    "a child that computes": "if os.fork() == 0:\n    while True: pass",
    "threads that compute": """
def spin():
    while True: pass
for _ in range(3): threading.Thread(target=spin, daemon=True).start()
""",
    "a child that writes for ever": "if os.fork() == 0:\n    while True: os.write(1, b'still here\\n' * 1000)",
    "a thread that writes for ever": """
def write():
    while True: print("still here", flush=True)
threading.Thread(target=write, daemon=True).start()
""",
    "a child that writes frames": """
if os.fork() == 0:
    while True: send({"t": "display", "bundle": {"text/plain": "x"}})
""",
    "a child that forks": """
if os.fork() == 0:
    while True:
        try: os.fork() or os._exit(0)
        except OSError: pass
""",
    "children without a parent": """
for _ in range(50):
    if os.fork() == 0: os.setsid(); os.fork(); time.sleep(60)
""",
}


@pytest.mark.parametrize("code", AFTER.values(), ids=AFTER.keys())
async def test_what_goes_on_after_the_action(attack: Attacker, code: str) -> None:
    """It lasts as long as its box, which works on; and what it writes between two actions is bounded."""
    with memory_grows_at_most(48 * MIB):
        fallout = await attack(code, "time.sleep(0.3)\n'worked'", output_bytes=MIB, wall_s=10)
    assert fallout.kind == "ok"
    assert fallout.of(ev.ACTION_FINISHED)[1]["value"] == {"text/plain": "'worked'"}
    assert len(fallout.output) < MIB
