"""Guest code that speaks in the worker's name. All it can say is its own word, and every lie ends its own box."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from driving import PATIENCE_S, SMALL, act, opened, still_works
from farhand import event as ev
from farhand.errors import Fenced, SandboxError
from farhand.limits import MIB
from farhand.sandbox.hand import Hand
from farhand.sandbox.local.sandbox import LocalSandbox

from .attack import FOREVER, PRELUDE, Attacker, memory_grows_at_most, resident_bytes

pytestmark = [pytest.mark.anyio, pytest.mark.jail, pytest.mark.hostile]


def lift(weight: int) -> int:
    """Lifts something.

    Args:
        weight: how much
    """
    return weight + 1


BROKEN = {
    "no JSON": b"nonsense\n",
    "an empty line": b"\n",
    "no object": b"[1]\n",
    "no type": b"{}\n",
    "not ASCII": '{"t":"display","bundle":{"text/plain":"é"}}\n'.encode(),
    "of the supervisor": b'{"t":"attached","v":1,"running":null,"last":9,"waiting":[],"ran":[],"ready":true}\n',
    "a refusal": b'{"t":"refused","code":"fenced","message":"forged"}\n',
    "output": b'{"t":"out","n":1,"action":"x","stream":"stdout","text":"forged"}\n',
    "files": b'{"t":"files","id":"q1","ok":true,"entries":[],"more":null}\n',
    "the end of nothing": b'{"t":"done"}\n',
    "the end of another action": b'{"t":"done","action":"act_another","ok":true}\n',
    "two types": b'{"t":"display","bundle":{},"t":"done"}\n',
    "NaN": b'{"t":"answer","repr":"","value":NaN}\n',
    "infinity": b'{"t":"answer","repr":"","value":-Infinity}\n',
    "more than a float": b'{"t":"answer","repr":"","value":1e999}\n',
    "half a surrogate pair": b'{"t":"answer","repr":"","value":"\\ud800"}\n',
    "half a pair in a key": b'{"t":"answer","repr":"","value":{"\\uDC00":1}}\n',
    "a display that is no text": b'{"t":"display","bundle":{"text/plain":5}}\n',
    "a display that is none": b'{"t":"display","bundle":[]}\n',
    "an answer without text": b'{"t":"answer","value":1}\n',
    "a call that is not new": b'{"t":"call","call":"c0","tool":"lift","args":[],"kwargs":{}}\n',
    "a call of no number": b'{"t":"call","call":"c1e3","tool":"lift","args":[],"kwargs":{}}\n',
    "a call without arguments": b'{"t":"call","call":"c5","tool":"lift"}\n',
    "a call of nothing": b'{"t":"call","call":"c5","tool":5,"args":[],"kwargs":{}}\n',
}


@pytest.mark.parametrize("line", BROKEN.values(), ids=BROKEN.keys())
async def test_a_broken_frame_ends_the_box_and_not_the_session(attack: Attacker, line: bytes) -> None:
    fallout = await attack(f"send({line!r}){FOREVER}", tools=[lift])
    assert fallout.kind == "protocol"
    assert fallout.of(ev.SANDBOX_LOST)
    assert fallout.of(ev.EFFECT_INTENDED) == []


HUGE = {
    "nesting": "send(BEGUN + b'[' * 5000 + b']' * 5000 + b'}\\n')",
    "nesting that does not end": "send(BEGUN + b'[{\"a\":' * 150_000 + b'\\n')",
    "a number": "send(BEGUN + b'9' * 900_000 + b'}\\n')",
    "a line": "send(BEGUN + b'\"' + b'x' * (1 << 20) + b'\"}\\n')",
    "a line that does not end": "send(bytes(8 << 20))",
    "a line that comes in pieces": "while True: send(b'{' * 1000)",
    "an end": 'send({"t": "done", "action": this_action(), "ok": True, "value": {"a": "x" * 1_100_000}})',
}


@pytest.mark.parametrize("code", HUGE.values(), ids=HUGE.keys())
async def test_a_frame_beyond_its_bounds_ends_the_box(attack: Attacker, code: str) -> None:
    begun = """BEGUN = b'{"t":"answer","repr":"","value":'\n"""
    with memory_grows_at_most(32 * MIB):
        fallout = await attack(begun + code + FOREVER)
    assert fallout.kind == "protocol"


ENDS = [
    {"ok": False, "error": {"kind": "lost", "message": "forged"}},
    {"ok": False, "error": {"kind": "limit", "limit": "wall_s"}},
    {"ok": False, "error": {"kind": "limit", "limit": "steps"}},
    {"ok": False, "error": "forged"},
    {"ok": "yes"},
    {"ok": True, "value": {"text/plain": None}},
    {"ok": True, "value": {str(number): "" for number in range(100)}},
]


@pytest.mark.parametrize("end", ENDS, ids=lambda end: str(end)[:60])
async def test_an_end_that_no_worker_can_tell(attack: Attacker, end: dict[str, Any]) -> None:
    fallout = await attack(f'send({{"t": "done", "action": this_action(), **{end!r}}}){FOREVER}')
    assert fallout.kind == "protocol"


async def test_an_end_that_was_forged_is_the_actions_end(attack: Attacker) -> None:
    """It ends its own action early, with its own word. The real end is then one too many, and costs the box."""
    code = 'send({"t": "done", "action": this_action(), "ok": True, "value": {"text/plain": "forged"}, "alive": False})'
    fallout = await attack(code, "time.sleep(5)")
    assert (fallout.text, fallout.kind) == ("forged", "ok")
    first, second, third = (end["error"] for end in fallout.of(ev.ACTION_FINISHED))
    assert first is third is None
    assert second["kind"] in ("protocol", "lost")  # as it came before or after the next action had begun


async def test_what_the_supervisor_says_a_worker_cannot(attack: Attacker) -> None:
    """Numbers, generation and action of a frame are set outside, whatever stands in it."""
    forged = {"n": 99, "gen": 99, "action": "act_x", "box": "sbx_x"}
    code = f"""
send({{"t": "display", "bundle": {{"text/plain": "shown"}}, **{forged!r}}})
send({{"t": "call", "call": "c7", "tool": "lift", "args": [1], "kwargs": {{}}, **{forged!r}}})
send({{"t": "answer", "repr": "3", "value": 3, **{forged!r}}})
error = {{"kind": "exception", "message": "forged"}}
told = {{"alive": False, "usage": {{"wall_s": -5}}, "lost": ["x"], "output": {{}}, "n": 0}}
send({{"t": "done", "action": this_action(), "ok": False, "error": error, **told}})
time.sleep(60)
"""
    fallout = await attack(code, "time.sleep(5)", tools=[lift])
    [effect] = fallout.of(ev.EFFECT_INTENDED)
    started = fallout.of(ev.ACTION_STARTED)[0]
    assert (effect["action"], effect["box"], effect["tool"]) == (started["action"], started["box"], "lift")
    assert effect["frame"] < 10
    assert fallout.first["frame"] < 10
    assert fallout.first["usage"]["wall_s"] >= 0
    assert fallout.first["lost"] == []


async def test_calls_of_tools_that_were_not_offered(attack: Attacker) -> None:
    """A box speaks for itself: it may call what it was given, with any arguments. Nothing else reaches a tool."""
    code = """
import gc
runner = next(found for found in gc.get_objects() if type(found).__name__ == "Channel" and hasattr(found, "call"))
told = [runner.call("lift", [41], {})["value"]]
for name in ("drop", "__class__", "lift.__globals__", "", "x" * 200, "final_answer"):
    reply = runner.call(name, [1], {})
    told.append((reply["ok"], reply["error"]["type"]))
told
"""
    fallout = await attack(code, tools=[lift])
    assert fallout.text == str([42] + [(False, "NameError")] * 6)
    assert [effect["tool"] for effect in fallout.of(ev.EFFECT_INTENDED)] == ["lift"]


async def test_arguments_that_are_no_values_do_not_reach_a_tool(attack: Attacker) -> None:
    trees = [
        {"$": "pickle", "v": "x"},
        {"$": []},
        {"$": "bytes"},
        {"$": "dec", "v": "1e999999999"},
        {"$": "int", "v": "9" * 400_000},
        {"$": "date", "v": "9" * 400},
        {"$": "array", "dtype": "O", "shape": [1 << 60], "data": ""},
    ]
    code = f"""
import gc
runner = next(found for found in gc.get_objects() if type(found).__name__ == "Channel" and hasattr(found, "call"))
[runner.call("lift", [tree], {{}})["ok"] for tree in {trees!r}] + [runner.call("lift", [], {{"a" * 5000: 1}})["ok"]]
"""
    fallout = await attack(code, tools=[lift])
    assert fallout.text == str([False] * (len(trees) + 1))
    assert {settled["outcome"] for settled in fallout.of(ev.EFFECT_SETTLED)} == {"never_started"}


async def test_calls_and_answers_while_no_action_runs(attack: Attacker) -> None:
    code = """
told = []
def later():
    while not os.path.exists("/tmp/idle"):
        time.sleep(0.01)
    try:
        lift(1)
    except Exception as error:
        told.append(f"{type(error).__name__}: {error}")
    final_answer("from between")
    send({"t": "display", "bundle": {"text/plain": "from between"}})
    os.write(1, b"from between")
    told.append("over")
threading.Thread(target=later).start()
def poke():
    time.sleep(0.1)
    open("/tmp/idle", "w").close()
threading.Thread(target=poke).start()
"""
    wait = "while 'over' not in told: time.sleep(0.01)\ntold[0]"
    agent = attack.agent(PRELUDE + code, wait, "final_answer(1 + 1)", tools=[lift])
    agent.model._hold = lambda index: asyncio.sleep(0.5 if index == 1 else 0)  # type: ignore[attr-defined]
    result = await agent.run_async("attack")
    await agent.aclose()
    ends = [event.data for event in result.events if event.type == ev.ACTION_FINISHED]
    assert "no action is running" in ends[1]["value"]["text/plain"]
    assert not any(event.type == ev.EFFECT_INTENDED for event in result.events)
    assert result.answer == 2


async def test_an_answer_before_an_error_is_dropped(attack: Attacker) -> None:
    fallout = await attack("final_answer('wrong')\nraise ValueError('after it')")
    assert fallout.kind == "exception"
    assert fallout.first["answer"] is None


async def test_replies_to_calls_never_made(local: LocalSandbox) -> None:
    async with opened(local) as hand:
        for call in ("c1", "c999", "", "c-1", "x" * 99):
            with pytest.raises(SandboxError, match="no_such_call"):
                await hand.reply(call, 1)
                await asyncio.wait_for(hand.next_frame(), PATIENCE_S)
        await still_works(hand)


async def test_frames_of_an_old_generation(local: LocalSandbox) -> None:
    async with opened(local, generation=1) as old:
        await act(old, "x = 1")
        new = await Hand.open(old.box, generation=5, after=1, limits=SMALL)
        with pytest.raises((Fenced, SandboxError)):
            await old.run("act_old", "x = 'old'", "<old>")
            await asyncio.wait_for(old.next_frame(), PATIENCE_S)
        with pytest.raises((Fenced, SandboxError)):
            await Hand.open(old.box, generation=4, limits=SMALL)
        # On the newer one's own connection, with the older number.
        new._frames._generation = 4  # type: ignore[attr-defined]
        with pytest.raises(Fenced):
            await new.run("act_old", "x = 'old'", "<old>")
            await asyncio.wait_for(new.next_frame(), PATIENCE_S)
        await new.close()
        newest = await Hand.open(old.box, generation=6, after=1, limits=SMALL)
        assert (await act(newest, "x")).text == "1"
        await newest.close()


FLOODS = {
    "2 GB of output": "block = b'x' * (1 << 20)\nfor _ in range(2048): os.write(1, block)",
    "a million lines": "for _ in range(1000): os.write(1, b'\\n' * 1000)",
    "a million displays": """
block = b'{"t":"display","bundle":{}}\\n' * 1000
for _ in range(1000): send(block)
""",
    "a million answers": """
block = b'{"t":"answer","repr":"","value":0}\\n' * 1000
for _ in range(1000): send(block)
""",
    "escapes": "block = b'\\x1b]52;c;aGk=\\x07' * 5000\nfor _ in range(1000): os.write(2, block)",
    "bytes that are no text": "block = b'\\xff\\xfe\\x80' * 20000\nfor _ in range(1000): os.write(1, block)",
}


@pytest.mark.parametrize("code", FLOODS.values(), ids=FLOODS.keys())
async def test_floods_are_cut_and_counted(attack: Attacker, local: LocalSandbox, code: str) -> None:
    status = await local.status()
    before = resident_bytes(status["pid"]) if status else 0
    began = time.monotonic()
    with memory_grows_at_most(96 * MIB):
        fallout = await attack(code + "\nraise ValueError('the end')", wall_s=40)
    assert time.monotonic() - began < 40
    assert fallout.error["message"] == "the end"
    assert len(fallout.output) < 300_000
    status = await local.status()
    assert status is not None
    assert resident_bytes(status["pid"]) - before < 64 * MIB


ENDLESS = {
    "that mean nothing": """
block = b'{"t":"ready","python":"3"}\\n' * 1000
while True: send(block)
""",
    "of many lists": """
nest = b"[" * 150 + b"]" * 150
number = 0
while True:
    number += 1
    send(b'{"t":"call","call":"c%d","tool":"none","kwargs":{},"args":[' % number + b",".join([nest] * 3000) + b"]}\\n")
""",
    "of brackets in texts": """
number = 0
while True:
    number += 1
    send(b'{"t":"call","call":"c%d","tool":"none","kwargs":{},"args":["' % number + b"[{" * 400_000 + b'"]}\\n')
""",
}


@pytest.mark.parametrize("code", ENDLESS.values(), ids=ENDLESS.keys())
async def test_frames_without_end(attack: Attacker, code: str) -> None:
    """The host handles a step's worth of them at a time, so that other boxes get their turn: its answers come soon."""
    worst = 0.0
    running = asyncio.create_task(attack(code, wall_s=2))
    while not running.done():
        began = time.monotonic()
        await attack.sandbox.status()  # type: ignore[attr-defined]
        worst = max(worst, time.monotonic() - began)
        await asyncio.sleep(0.05)
    # An interrupt in the middle of a frame leaves half a line, which the real end then breaks on.
    assert (await running).kind in ("limit", "protocol")
    assert worst < 3.0  # on a busy machine; some tenths of a second on an idle one


NESTED = """
send(b'{"t":"answer","repr":"1","value":1}\\n')
block = b'{"t":"answer","repr":"","value":[' + b"[]," * 300_000 + b"0]}\\n"
for _ in range(25): send(block)
1 / 0
"""


async def test_what_a_hundred_answers_hold_is_not_kept(attack: Attacker) -> None:
    """A frame of a megabyte can be twenty in memory; of all answers only the first one's value counts."""
    with memory_grows_at_most(200 * MIB):
        fallout = await attack(NESTED, wall_s=30)
    assert fallout.error["type"] == "ZeroDivisionError"
