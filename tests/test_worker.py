"""What code in a box sees and what its action ends with. Each test has a box of its own."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from driving import SMALL, Outcome, act, changed, opened, still_works
from farhand.limits import MIB, Limits
from farhand.sandbox.environment import DEFAULT, path_of
from farhand.sandbox.hand import Hand
from farhand.sandbox.port import Sandbox
from farhand.tool import Tool

pytestmark = pytest.mark.anyio


def double(x: int) -> int:
    """Doubles."""
    return x * 2


def fail(kind: str) -> None:
    """Raises."""
    raise {"ValueError": ValueError("no"), "KeyError": KeyError("k"), "FileNotFoundError": FileNotFoundError("f")}[kind]


async def later(x: int, *, by: float = 1.5) -> float:
    """Adds."""
    return x + by


TOOLS = [Tool.from_function(double), Tool.from_function(fail), Tool.from_function(later)]
ANSWERS = {"double": double, "fail": fail, "later": lambda x, by=1.5: x + by}


@pytest.fixture
async def hand(sandbox: Sandbox) -> AsyncIterator[Hand]:
    async with opened(sandbox, tools=TOOLS) as hand:
        yield hand


async def run(hand: Hand, code: str, **options: Any) -> Outcome:
    return await act(hand, code, answers=ANSWERS, **options)


# --- values and namespace ---


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("1 + 1", "2"),
        ("x = 3", None),
        ("None", None),
        ("'a' * 3", "'aaa'"),
        ("x = 1\nx", "1"),
        ("def f():\n    return 5\nf()", "5"),
        ("", None),
        ("# only a comment", None),
        ("if True:\n    7", None),
        ("x = 1; x + 1", "2"),
        ("import asyncio\nawait asyncio.sleep(0)\n3", "3"),
        ("import asyncio\nawait asyncio.sleep(0, 'slept')", "'slept'"),
        ("import asyncio\nasyncio.run(asyncio.sleep(0, 4))", "4"),
        ("[i async for i in agen()] if False else 1", "1"),
        ("__name__", "'__main__'"),
        ("import sys, __main__\n__main__ is sys.modules['__main__'] and vars(__main__) is globals()", "True"),
        ("from __future__ import annotations\ndef f(a: Nope): ...\nf.__annotations__['a']", "'Nope'"),
        ("import inspect\ndef f(): return 1\ninspect.getsource(f)", "'def f(): return 1\\n'"),
        ("import pickle\nclass A: pass\ntype(pickle.loads(pickle.dumps(A()))) is A", "True"),
        ("exit", "Use exit() or Ctrl-D (i.e. EOF) to exit"),
    ],
)
async def test_the_trailing_expression_is_the_value(hand: Hand, code: str, text: str | None) -> None:
    outcome = await run(hand, code)
    assert outcome.ok, outcome.error
    assert outcome.text == text


async def test_variables_live_on(hand: Hand) -> None:
    await run(hand, "import math\nx = [1]\ndef grow():\n    x.append(len(x))")
    await run(hand, "grow()\ny = math.floor(2.5)")
    assert (await run(hand, "x, y")).text == "([1, 1], 2)"


async def test_one_loop_is_kept_for_top_level_await(hand: Hand) -> None:
    await run(hand, "import asyncio\nqueue = asyncio.Queue()\nloop = asyncio.get_running_loop()\nawait queue.put(1)")
    outcome = await run(hand, "await queue.get(), loop is asyncio.get_running_loop()")
    assert outcome.text == "(1, True)"


# --- output ---


async def test_output_comes_in_order_before_the_end(hand: Hand) -> None:
    outcome = await run(hand, "print('a')\nx = double(1)\nprint('b', end='')\nfinal_answer(x)\nprint('c')")
    kinds = [frame["t"] for frame in outcome.frames if frame["t"] != "out"]
    assert kinds == ["call", "answer", "done"]
    before = dict.fromkeys(kinds, "")
    text = ""
    for frame in outcome.frames:
        text += frame.get("text", "")
        before[frame["t"]] = text
    assert before["call"] == "a\n"
    assert before["answer"].startswith("a\nb")
    assert before["done"] == "a\nbc\n"


async def test_both_streams_and_undecodable_bytes(hand: Hand) -> None:
    code = (
        "import sys, os\nprint('é🎉')\nprint('err', file=sys.stderr)\nos.write(1, b'\\xff\\xfe ok')\nprint('\\udc80')"
    )
    outcome = await run(hand, code)
    assert outcome.out == "é🎉\n\\xff\\xfe ok\\udc80\n"
    assert outcome.err == "err\n"


async def test_a_character_cut_in_two_arrives_whole(hand: Hand) -> None:
    code = "import os, time\nfor b in '🎉'.encode():\n    os.write(1, bytes([b]))\n    time.sleep(0.01)"
    assert (await run(hand, code)).out == "🎉"


async def test_output_beyond_its_limit_is_counted(sandbox: Sandbox) -> None:
    async with opened(sandbox, limits=changed(SMALL, output_bytes=1000)) as hand:
        outcome = await run(hand, "for i in range(10_000): print('x' * 99)")
        assert len(outcome.out) == 1000
        assert outcome.done["output"]["bytes"] == 1_000_000
        assert outcome.done["output"]["cut_bytes"] == 999_000
        assert (await run(hand, "print('y')")).out == "y\n"


async def test_a_child_writes_to_the_same_output(hand: Hand) -> None:
    outcome = await run(hand, "import subprocess, sys\nsubprocess.run([sys.executable, '-S', '-c', 'print(5)'])")
    assert outcome.out == "5\n"


# --- errors ---


async def test_a_traceback_names_the_line_of_the_action_and_nothing_of_ours(hand: Hand) -> None:
    await run(hand, "def inner(x):\n    return 1 / x", title="<action 1>")
    outcome = await run(hand, "y = 0\ninner(y)", title="<action 2>")
    error = outcome.error
    assert (error["kind"], error["type"], error["message"]) == ("exception", "ZeroDivisionError", "division by zero")
    lines = error["traceback"].splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert '  File "<action 2>", line 2, in <module>' in lines
    assert '  File "<action 1>", line 2, in inner' in lines
    assert "    return 1 / x" in lines
    assert "farhand" not in error["traceback"]


@pytest.mark.parametrize(
    ("code", "parts"),
    [
        (
            "try:\n    {}['a']\nexcept KeyError as e:\n    raise ValueError('v') from e",
            ["KeyError: 'a'", "direct cause"],
        ),
        ("try:\n    {}['a']\nexcept KeyError as e:\n    raise ValueError('v')", ["KeyError: 'a'", "During handling"]),
        ("raise ExceptionGroup('g', [ValueError('one'), TypeError('two')])", ["ValueError: one", "TypeError: two"]),
        ("e = ValueError('v')\ne.add_note('a note')\nraise e", ["ValueError: v", "a note"]),
        ("def f(n):\n    return f(n + 1)\nf(0)", ["RecursionError", "repeated"]),
        ("raise Exception('\\ud800 half')", ["\\ud800 half"]),
        ("class E(Exception):\n    def __str__(self): raise RuntimeError\nraise E()", ["E: <exception str() failed>"]),
        ("raise ValueError('x' * 10_000_000)", ["characters cut"]),
        ("fail('FileNotFoundError')", ["FileNotFoundError: f"]),
    ],
)
async def test_tracebacks_are_whole_and_bounded(hand: Hand, code: str, parts: list[str]) -> None:
    outcome = await run(hand, code)
    for part in parts:
        assert part in outcome.error["traceback"]
    assert len(outcome.error["traceback"]) < 40_000
    assert "farhand_runner" not in outcome.error["traceback"]
    await still_works(hand)


async def test_a_syntax_error_names_its_line(hand: Hand) -> None:
    outcome = await run(hand, "x = 1\ny = (2,\nz = 3", title="<action 7>")
    assert outcome.error["kind"] == "syntax"
    assert 'File "<action 7>", line' in outcome.error["traceback"]
    assert (await run(hand, "compile('1 +', 'f', 'eval')")).error["kind"] == "exception"


@pytest.mark.parametrize(
    ("code", "exit_code"), [("import sys\nsys.exit()", 0), ("exit(3)", 3), ("raise SystemExit('no')", 1), ("quit()", 0)]
)
async def test_system_exit_ends_the_action_with_its_code(hand: Hand, code: str, exit_code: int) -> None:
    outcome = await run(hand, code)
    assert (outcome.error["kind"], outcome.error["exit"], outcome.done["alive"]) == ("exit", exit_code, True)
    await still_works(hand)


async def test_input_has_nothing_to_read(hand: Hand) -> None:
    assert (await run(hand, "input('name? ')")).error["type"] == "EOFError"


async def test_a_failing_repr_is_the_actions_error(hand: Hand) -> None:
    outcome = await run(hand, "class A:\n    def __repr__(self): return 1 / 0\nA()")
    assert outcome.error["type"] == "ZeroDivisionError"
    assert "in __repr__" in outcome.error["traceback"]


# --- limits ---


@pytest.mark.parametrize(
    ("code", "limit"),
    [
        ("x = 'a' * 10**11", "memory_bytes"),
        ("import os\nraise OSError(28, os.strerror(28))", "disk_bytes"),
        ('raise RuntimeError("can\'t start new thread")', "processes"),
    ],
)
async def test_what_code_runs_into_is_named(hand: Hand, code: str, limit: str) -> None:
    outcome = await run(hand, f"kept = 1\n{code}")
    assert (outcome.error["kind"], outcome.error["limit"], outcome.done["alive"]) == ("limit", limit, True)
    assert f"`{limit}`" in outcome.error["message"]
    assert (await run(hand, "kept")).text == "1"


async def test_a_wall_limit_leaves_the_variables(sandbox: Sandbox) -> None:
    async with opened(sandbox, limits=changed(SMALL, wall_s=0.3)) as hand:
        outcome = await run(hand, "kept = 1\nwhile True: pass")
        assert (outcome.error["kind"], outcome.error["limit"], outcome.done["alive"]) == ("limit", "wall_s", True)
        assert 0.3 <= outcome.done["usage"]["wall_s"] < 1.0
        assert '"<action 1>", line 2' in outcome.error["traceback"]
        assert (await run(hand, "kept")).text == "1"


async def test_a_cpu_limit(sandbox: Sandbox) -> None:
    async with opened(sandbox, limits=changed(SMALL, cpu_s=0.3)) as hand:
        outcome = await run(hand, "while True: pass")
        assert (outcome.error["kind"], outcome.error["limit"]) == ("limit", "cpu_s")


async def test_code_that_swallows_everything_is_killed_and_its_names_are_said(sandbox: Sandbox) -> None:
    async with opened(sandbox, limits=changed(SMALL, wall_s=0.3)) as hand:
        await run(hand, "one = 1\ndef two(): ...\n_three = 3")
        code = "while True:\n    try:\n        while True:\n            pass\n    except BaseException:\n        pass"
        outcome = await run(hand, code)
        assert (outcome.error["kind"], outcome.error["limit"]) == ("limit", "wall_s")
        assert (outcome.done["alive"], outcome.done["lost"]) == (False, ["one", "two"])


async def test_memory_of_all_processes_counts_together(sandbox: Sandbox) -> None:
    async with opened(sandbox, limits=changed(SMALL, memory_bytes=200 * MIB)) as hand:
        code = """
import os, time
for _ in range(8):
    if os.fork() == 0:
        held = b"x" * 60_000_000
        time.sleep(30)
time.sleep(30)
"""
        outcome = await run(hand, code)
        assert (outcome.error["kind"], outcome.error["limit"]) == ("limit", "memory_bytes")
        assert outcome.done["usage"]["peak_memory_bytes"] < 700 * MIB


async def test_waiting_for_a_tool_does_not_count(sandbox: Sandbox) -> None:
    async with opened(sandbox, limits=changed(SMALL, wall_s=0.4), tools=TOOLS) as hand:
        await hand.run("act_w", "double(4)", "<action 1>")
        call = await hand.next_frame()
        await asyncio.sleep(1.0)
        await hand.reply(call["call"], 8)
        done = await hand.next_frame()
        assert done["ok"], done["error"]
        assert done["usage"]["wall_s"] < 0.3
        assert done["usage"]["elapsed_s"] > 0.9


async def test_running_beside_a_waiting_call_counts(sandbox: Sandbox) -> None:
    async with opened(sandbox, limits=changed(SMALL, wall_s=0.4), tools=TOOLS) as hand:
        code = "import threading\nthreading.Thread(target=double, args=(1,), daemon=True).start()\nwhile True: pass"
        outcome = await act(hand, code)
        assert outcome.error["limit"] == "wall_s"


async def test_too_many_processes(sandbox: Sandbox) -> None:
    async with opened(sandbox, limits=changed(SMALL, processes=10)) as hand:
        code = "import threading, time\nfor _ in range(40): threading.Thread(target=time.sleep, args=(5,)).start()"
        code += "\ntime.sleep(5)"
        outcome = await run(hand, code)
        assert (outcome.error["kind"], outcome.error["limit"]) == ("limit", "processes")


async def test_thirty_two_threads_work_in_a_small_box(sandbox: Sandbox) -> None:
    async with opened(sandbox, limits=changed(SMALL, memory_bytes=256 * MIB)) as hand:
        code = """
import threading
gate, seen = threading.Barrier(33), []
for n in range(32):
    threading.Thread(target=lambda: (gate.wait(), seen.append(1)), daemon=True).start()
gate.wait()
while len(seen) < 32: pass
len(seen)
"""
        assert (await run(hand, code)).text == "32"


async def test_more_tool_calls_than_allowed(sandbox: Sandbox) -> None:
    async with opened(sandbox, limits=changed(SMALL, tool_calls=3), tools=TOOLS) as hand:
        code = "n = 0\nwhile True:\n    double(n)\n    n += 1"
        outcome = await run(hand, code)
        assert (outcome.error["kind"], outcome.error["limit"]) == ("limit", "tool_calls")
        assert len(outcome.of("call")) == 4  # the one too many is for the loop to see
        assert (await run(hand, "double(2)")).text == "4"


# --- interrupts ---


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "import time\ntime.sleep(60)",
        "double(1)",
        "await later(1)",
        "import asyncio\nasyncio.run(later(1))",
        "import asyncio\nawait asyncio.gather(later(1), asyncio.sleep(60))",
        "import threading\nt = threading.Thread(target=double, args=(1,), daemon=True)\nt.start()\ndouble(2)",
        "import threading\nthreading.Event().wait()",
        "import subprocess\nsubprocess.run(['sleep', '60'])",
        "import re\nre.match(r'(a+)+$', 'a' * 30 + 'b')",
    ],
)
async def test_an_interrupt_leaves_the_variables(hand: Hand, code: str) -> None:
    await run(hand, "kept = 1")
    await hand.run("act_i", f"print('go', flush=True)\n{code}", "<action 1>")
    while (await hand.next_frame())["t"] != "out":
        pass
    await asyncio.sleep(0.05)  # into the call, not before it
    loop = asyncio.get_running_loop()
    told = loop.time()
    await hand.interrupt("act_i", "interrupt", 2.0)
    async for frame in hand.frames():
        done = frame
    assert (done["error"]["kind"], done["alive"]) == ("interrupted", True)
    assert loop.time() - told < 1.9
    assert (await run(hand, "kept, double(4)")).text == "(1, 8)"


async def test_an_interrupt_right_after_the_start_is_not_lost(hand: Hand) -> None:
    for n in range(20):
        await hand.run(f"act_{n}", "while True: pass", "<action 1>")
        await hand.interrupt(f"act_{n}", "interrupt", 5.0)
        async for frame in hand.frames():
            done = frame
        assert (done["error"]["kind"], done["alive"]) == ("interrupted", True)


async def test_an_interrupt_that_is_ignored_ends_the_worker_in_time(hand: Hand) -> None:
    await run(hand, "kept = 1")
    code = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nprint('go', flush=True)\nwhile True: pass"
    await hand.run("act_i", code, "<action 1>")
    await hand.next_frame()
    loop = asyncio.get_running_loop()
    told = loop.time()
    await hand.interrupt("act_i", "cancel", 0.12)
    async for frame in hand.frames():
        done = frame
    assert (done["error"]["kind"], done["alive"], done["lost"]) == ("cancelled", False, ["kept"])
    assert loop.time() - told < 1.0  # 250 ms on a machine that is not shared


async def test_a_late_interrupt_does_not_touch_the_next_action(hand: Hand) -> None:
    for _ in range(20):
        outcome = await run(hand, "x = 1")
        await hand.interrupt(outcome.done["action"], "interrupt", 1.0)
        assert (await run(hand, "sum(range(1000))")).text == "499500"


async def test_the_guests_own_keyboard_interrupt_is_an_exception(hand: Hand) -> None:
    outcome = await run(hand, "raise KeyboardInterrupt('mine')")
    assert (outcome.error["kind"], outcome.error["type"]) == ("exception", "KeyboardInterrupt")


# --- tools ---


async def test_tools_look_like_functions(hand: Hand) -> None:
    code = "import inspect as i\ndouble.__name__, double.__doc__, str(i.signature(later)), i.iscoroutinefunction(later)"
    expected = "('double', 'Doubles.', '(x: int, *, by: float = 1.5) -> float', True)"
    assert (await run(hand, code)).text == expected


async def test_calls_from_everywhere(hand: Hand) -> None:
    code = """
import asyncio, threading
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(8) as pool:
    threads = list(pool.map(double, range(20)))
async def many():
    blocking = [asyncio.to_thread(double, i) for i in range(5)]
    return await asyncio.gather(*[later(i) for i in range(20)], *blocking)
run = asyncio.run(many())
in_thread = []
def loop_in_thread():
    in_thread.append(asyncio.run(many()))
thread = threading.Thread(target=loop_in_thread)
thread.start()
here = [double(i) for i in range(5)]
thread.join()
threads == [2 * i for i in range(20)], run[:2], run[-1], in_thread[0] == run, here
"""
    outcome = await run(hand, code)
    assert outcome.text == "(True, [1.5, 2.5], 8, True, [0, 2, 4, 6, 8])", outcome.done
    assert len(outcome.of("call")) == 20 + 25 + 25 + 5
    top = await run(hand, "double(1), await asyncio.gather(*[later(i) for i in range(5)])")
    assert top.text == "(2, [1.5, 2.5, 3.5, 4.5, 5.5])"


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("try:\n    fail('ValueError')\nexcept ValueError as e:\n    got = str(e)\ngot", "'no'"),
        ("try:\n    fail('KeyError')\nexcept KeyError as e:\n    got = e.args\ngot", "('k',)"),
        (
            "try:\n    fail('FileNotFoundError')\nexcept OSError as e:\n    got = type(e).__name__\ngot",
            "'FileNotFoundError'",
        ),
    ],
)
async def test_errors_of_tools_are_the_builtin_ones(hand: Hand, code: str, text: str) -> None:
    assert (await run(hand, code)).text == text


@pytest.mark.parametrize("kind", ["ToolFailed", "OutcomeUnknown", "ToolTimedOut", "LimitReached", "ToolArgumentError"])
async def test_errors_of_farhand_can_be_caught_by_name(hand: Hand, kind: str) -> None:
    await hand.run("act_e", f"try:\n    double(1)\nexcept {kind} as e:\n    got = str(e)\ngot", "<action 1>")
    call = await hand.next_frame()
    await hand.reply_error(call["call"], kind, "because", "do this")
    done = await hand.next_frame()
    assert done["value"] == {"text/plain": "'because\\n  do this'"}


async def test_an_error_of_an_unknown_class_is_a_tool_error(hand: Hand) -> None:
    await hand.run("act_e", "double(1)", "<action 1>")
    call = await hand.next_frame()
    await hand.reply_error(call["call"], "MemoryError", "in the harness")
    done = await hand.next_frame()
    assert (done["error"]["kind"], done["error"]["message"]) == ("exception", "MemoryError: in the harness")


@pytest.mark.parametrize(
    ("code", "error", "part"),
    [
        ("double(object())", "UnportableValue", "argument 1 of double()"),
        ("double(x=open)", "UnportableValue", "x of double()"),
        ("double('x' * 2_000_000)", "ValueTooLarge", "file under /workspace"),
        ("double('x' * 400_000, 'x' * 400_000, 'x' * 400_000)", "ValueError", "too large together"),
    ],
)
async def test_arguments_that_cannot_leave_say_why(hand: Hand, code: str, error: str, part: str) -> None:
    outcome = await run(hand, code)
    assert outcome.error["type"] == error
    assert part in outcome.error["message"]
    assert outcome.of("call") == []


async def test_a_tool_named_like_a_builtin_leaves_libraries_alone(sandbox: Sandbox) -> None:
    async with opened(sandbox, tools=[Tool.from_function(double, name="sorted")]) as hand:
        code = "import collections\nsorted(4), collections.Counter('aab').most_common(1)"
        assert (await act(hand, code, answers={"sorted": double})).text == "(8, [('a', 2)])"


async def test_a_tool_that_was_hidden_comes_back(hand: Hand) -> None:
    await run(hand, "double = 5")
    assert (await run(hand, "del double\ndouble(4)")).text == "8"


async def test_no_call_while_no_action_runs(hand: Hand) -> None:
    code = """
import threading
go, seen = threading.Event(), []
def work():
    go.wait()
    try:
        seen.append(double(1))
    except Exception as e:
        seen.append(str(e))
    told.set()
told = threading.Event()
threading.Thread(target=work, daemon=True).start()
threading.Timer(0.2, go.set).start()
"""
    outcome = await run(hand, code)
    assert outcome.ok
    await asyncio.sleep(0.5)
    assert (await run(hand, "told.wait(5)\nseen")).text == "['no action is running, so no tool can be called']"


async def test_final_answer_goes_on_and_cannot_be_swallowed(hand: Hand) -> None:
    code = "try:\n    x = final_answer({'a': (1, 2)})\nexcept BaseException:\n    pass\nx['a']"
    outcome = await run(hand, code)
    (answer,) = outcome.of("answer")
    assert (answer["repr"], answer["problem"], outcome.text) == ("{'a': (1, 2)}", None, "(1, 2)")
    assert answer["value"]


async def test_an_answer_that_cannot_travel_says_why(hand: Hand) -> None:
    (answer,) = (await run(hand, "final_answer(lambda: 1)")).of("answer")
    assert answer["value"] is None
    assert "the answer" in answer["problem"]


# --- imports ---


async def test_imports_are_guided(sandbox: Sandbox) -> None:
    async with opened(sandbox, imports=["math", "os.path", "xml.*"]) as hand:
        await act(hand, "open('mine.py', 'w').write('import json\\nx = json.dumps(1)')")
        assert (await act(hand, "import math, mine, xml.dom\nfrom os import path\nmine.x")).text == "'1'"
        outcome = await act(hand, "import requests")
        assert outcome.error["type"] == "ImportError"
        assert "additional_authorized_imports=['requests']" in outcome.error["message"]
        assert "math" in outcome.error["message"]
        assert (await act(hand, "import os")).error["type"] == "ImportError"
        assert (await act(hand, "try:\n    import csv\nexcept ImportError:\n    got = 1\ngot")).text == "1"


async def test_a_connection_error_names_the_tools(hand: Hand) -> None:
    for code in (
        "import socket\nsocket.create_connection(('127.0.0.1', 9), 1)",
        "import urllib.request\nurllib.request.urlopen('http://127.0.0.1:9/', timeout=1)",
        "import socket\ntry:\n    raise socket.gaierror(-3, 'T')\nexcept OSError as e:\n    raise RuntimeError from e",
    ):
        error = (await run(hand, code)).error
        assert error["hint"] == "There is no network in this box. Call a tool instead: double, fail, later."
        assert error["traceback"].endswith(f"Hint: {error['hint']}\n")


# --- rich values ---


RICH = """
class A:
    def __repr__(self): return 'A()'
    def _repr_html_(self): return '<b>'
    def _repr_png_(self): return b'png'
    def _repr_markdown_(self): raise ValueError
A()
"""
BUNDLED = """
class A:
    def __repr__(self): return 'A()'
    def _repr_mimebundle_(self, include, exclude):
        return {'application/json': '{}', 'text/plain': 'no', 'x': 5}
A()
"""


@pytest.mark.parametrize(
    ("code", "bundle"),
    [
        (RICH, {"text/plain": "A()", "text/html": "<b>", "image/png": "cG5n"}),
        (BUNDLED, {"text/plain": "A()", "application/json": "{}"}),
        ("class A:\n    def _repr_html_(self): return '<b>'\nA", {"text/plain": "<class '__main__.A'>"}),
    ],
)
async def test_rich_forms(hand: Hand, code: str, bundle: dict[str, str]) -> None:
    assert (await run(hand, code)).done["value"] == bundle


async def test_a_huge_value_is_cut_and_says_so(hand: Hand) -> None:
    for code in ("'x' * 3_000_000", "'\\U0001f389' * 300_000", "'\\x00' * 300_000"):
        text = (await run(hand, code)).text
        assert text is not None
        assert "characters cut]" in text
    code = "class A:\n    def __repr__(self): return 'A()'\n    def _repr_html_(self): return 'x' * 2_000_000\nA()"
    assert (await run(hand, code)).done["value"] == {
        "text/plain": "A()\n[its text/html form of 2,000,002 bytes is left out: too large]"
    }


@pytest.fixture
async def rich(sandbox: Sandbox, home: Path) -> AsyncIterator[Hand]:
    if not path_of(DEFAULT, home).is_dir():
        pytest.skip("the default environment is not built: scripts/setup does that")
    async with opened(sandbox, environment=DEFAULT, limits=Limits()) as hand:
        yield hand


async def test_figures_are_shown_once(rich: Hand) -> None:
    outcome = await act(rich, "import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()")
    (display,) = outcome.of("display")
    assert base64.b64decode(display["bundle"]["image/png"]).startswith(b"\x89PNG")
    assert (outcome.err, outcome.done["value"]) == ("", None)
    outcome = await act(rich, "fig, ax = plt.subplots()\nax.plot([1, 2])\nfig")
    assert outcome.of("display") == []
    assert set(outcome.done["value"]) == {"text/plain", "image/png"}
    outcome = await act(rich, "plt.plot([1])\n1 / 0")
    assert len(outcome.of("display")) == 1
    assert outcome.error["type"] == "ZeroDivisionError"
    assert (await act(rich, "plt.get_fignums()")).text == "[]"


async def test_tables_and_pictures(rich: Hand) -> None:
    table = await act(rich, "import pandas\npandas.DataFrame({'a': [1]})")
    assert set(table.done["value"]) == {"text/plain", "text/html"}
    picture = await act(rich, "from PIL import Image\nImage.new('RGB', (5, 4))")
    assert set(picture.done["value"]) == {"text/plain", "image/png"}
    code = "import numpy\nImage.fromarray(numpy.random.default_rng(1).integers(0, 255, (1200, 1200, 3), 'uint8'))"
    big = await act(rich, code)
    assert "scaled down to fit]" in (big.text or "")
    assert len(big.done["value"]["image/png"]) < 700_000
    answer = await act(rich, "final_answer(pandas.DataFrame({'a': [1]}))")
    assert answer.of("answer")[0]["problem"] is None


async def test_code_the_box_starts_has_the_packages_too(rich: Hand) -> None:
    code = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'import numpy; print(numpy.__name__)'])"
    assert (await act(rich, code)).out == "numpy\n"


async def test_the_workspace_starts_empty(rich: Hand) -> None:
    assert (await act(rich, "import os, matplotlib.pyplot\nos.listdir()")).text == "[]"


async def test_display_shows_at_once_within_its_limit(sandbox: Sandbox) -> None:
    async with opened(sandbox, limits=changed(SMALL, displays=3)) as hand:
        outcome = await act(hand, "for i in range(5): display(i)")
        assert [frame["bundle"]["text/plain"] for frame in outcome.of("display")] == ["0", "1", "2"]
        assert outcome.done["output"]["displays_cut"] == 2


# --- what a guest can do to its interpreter ---


@pytest.mark.parametrize(
    "code",
    [
        "import sys, io\nsys.stdout = io.StringIO()",
        "import sys\nsys.stdout.close()\nsys.stderr.close()",
        "import sys\nsys.stdout = None\nsys.stderr = 5",
        "import os\nos.close(1)\nos.close(2)\nos.close(0)",
        "import os\nos.dup2(os.open('/dev/null', os.O_RDWR), 1)",
        "import builtins\nbuiltins.print = None\nbuiltins.len = 5\ndel builtins.isinstance",
        "import builtins\nbuiltins.__dict__.clear()",
        "len = dict = type = 5\n__builtins__ = None",
        "del __builtins__",
        "__name__ = 5\ndel __name__",
        "globals().clear()",
        "globals()[5] = 6\nglobals()[()] = 6",
        "import sys\nsys.settrace(lambda *a: 1 / 0)",
        "import sys\nsys.setprofile(lambda *a: 1 / 0)",
        "import sys\nsys.setrecursionlimit(60)",
        "import sys\nsys.excepthook = sys.displayhook = None",
        "import sys\nsys.modules.clear()",
        "import sys\ndel sys.modules['__main__']",
        "import sys\nsys.path.clear()\nsys.meta_path.clear()",
        "import signal\nsignal.signal(signal.SIGINT, signal.SIG_DFL)",
        "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})",
        "import threading, sys\nt = threading.Thread(target=sys.exit)\nt.start()\nt.join()",
        "import atexit, os\natexit.register(os._exit, 5)",
        "import gc\ngc.disable()",
        "import os\nos.chdir('/')",
        "import json, socket, time\njson.dumps = socket.socket = time.monotonic = None",
        "import locale\nlocale.setlocale(locale.LC_ALL, 'C')",
        "import os\nos.environ.clear()",
        "import os\npid = os.fork()\nif pid == 0:\n    x = 1\nelse:\n    os.waitpid(pid, 0)",
        "import os\nif os.fork() == 0:\n    raise ValueError('in the child')",
        "import multiprocessing\nwith multiprocessing.get_context('fork').Pool(2) as pool:\n    pool.map(abs, [1, -2])",
        "import asyncio\nasyncio.set_event_loop_policy(None)\nasyncio.get_event_loop_policy().new_event_loop().close()",
        "class A:\n    def __del__(self): raise SystemExit\nA()",
        "import sys\nsys.stdout.write = None",
        "import warnings\nwarnings.simplefilter('error')",
        "import linecache\nlinecache.cache = None",
    ],
)
async def test_the_next_action_works_whatever_was_done(hand: Hand, code: str) -> None:
    await run(hand, code)
    outcome = await run(hand, "print('out')\nsum([1, 1])")
    assert (outcome.ok, outcome.text, outcome.out) == (True, "2", "out\n"), outcome.done
    failing = await run(hand, "1 / 0")
    assert failing.error["type"] == "ZeroDivisionError"
    assert (await run(hand, "double(2)")).text == "4"


async def test_a_fork_cannot_call_tools(hand: Hand) -> None:
    code = """
import os
pid = os.fork()
if pid == 0:
    try:
        double(1)
    except RuntimeError as e:
        print(e)
    os._exit(0)
os.waitpid(pid, 0)
double(2)
"""
    outcome = await run(hand, code)
    assert outcome.text == "4"
    assert "a forked process cannot call tools" in outcome.out


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [
        ("import os\nos._exit(7)", 7),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", -9),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", -11),
        ("import os, threading\nthreading.Thread(target=os._exit, args=(2,)).start()\nthreading.Event().wait()", 2),
        ("import os\nos.execv('/bin/false', ['false'])", 1),
    ],
)
async def test_the_end_of_the_worker_is_reported(hand: Hand, code: str, exit_code: int) -> None:
    await run(hand, "kept = 1")
    outcome = await run(hand, f"print('before', flush=True)\n{code}")
    assert (outcome.error["kind"], outcome.error["exit"]) == ("ended", exit_code)
    assert (outcome.done["alive"], outcome.done["lost"], outcome.out) == (False, ["kept"], "before\n")
