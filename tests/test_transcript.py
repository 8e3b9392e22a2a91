"""The derived request: valid for both dialects whatever the log holds."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farhand import event as ev
from farhand.decide import Act, decide
from farhand.limits import TRANSCRIPT_OUTPUT_CHARS
from farhand.model.port import DEFAULT_PROMPTING, ModelRequest, Prompting
from farhand.transcript import cut_middle, request
from session_log import Log


def asked(log: Log, dialect: str = "fenced", prompting: Prompting = DEFAULT_PROMPTING) -> ModelRequest:
    return request(log.state, system="SYSTEM", dialect=dialect, prompting=prompting)


def call(code: str, identity: str = "k1") -> dict[str, str]:
    return {"id": identity, "name": "python", "arguments": json.dumps({"code": code})}


def valid(wanted: ModelRequest) -> None:
    """The providers' rules: a system message first, turns alternate, every call has its result right behind it."""
    messages = wanted.messages
    assert messages[0].role == "system"
    assert messages[1].role == "user"
    open_calls: list[str] = []
    for before, message in pairwise(messages):
        if message.role == "tool":
            assert message.call_id in open_calls
            open_calls.remove(message.call_id)
        else:
            assert not open_calls
            assert message.role != before.role
        if message.calls:
            open_calls = [item.id for item in message.calls]
        assert message.text or message.calls
    assert not open_calls
    assert messages[-1].role in ("user", "tool")


def test_the_first_request() -> None:
    wanted = asked(Log().message("What is 1+1?").claimed())
    assert [(m.role, m.text) for m in wanted.messages] == [("system", "SYSTEM"), ("user", "What is 1+1?")]
    assert wanted.tools == ()
    assert asked(Log().message(), "tool").tools[0].name == "python"


def test_output_value_error_and_effects_are_shown() -> None:
    log = Log().message().claimed().coded("pay(1)").boxed().started("act_2_1")
    log.add(ev.ACTION_WROTE, action="act_2_1", box="sbx_1", frame=1, chunks=[["stdout", "hello\n"]], cut_bytes=5)
    log.intended("act_2_1").settled(outcome="unknown", error={"type": "OSError", "message": "gone"})
    log.finished("act_2_1", ok=False, error={"kind": "exception", "type": "OSError", "message": "gone"}, lost=["x"])
    text = asked(log).messages[-1].text
    for expected in ("hello", "5 more bytes", "OSError: gone", "outcome of pay(…) (eff_1) is unknown", "lost: x"):
        assert expected in text


def test_an_answer_of_a_failed_action_is_said_to_be_dropped() -> None:
    log = Log().message().claimed().coded("x").boxed().started("act_2_1")
    log.add(ev.ACTION_WROTE, action="act_2_1", box="sbx_1", frame=1, answers=[{"value": 1, "repr": "1"}])
    log.finished("act_2_1", ok=False, error={"kind": "exception", "type": "E", "message": "m"})
    assert "the answer was not taken" in asked(log).messages[-1].text


def test_long_output_is_cut_in_the_middle_and_says_so() -> None:
    log = Log().message().claimed().coded("x").boxed().started("act_2_1")
    chunks = [["stdout", "a" * TRANSCRIPT_OUTPUT_CHARS], ["stdout", "z" * 10]]
    log.add(ev.ACTION_WROTE, action="act_2_1", box="sbx_1", frame=1, chunks=chunks).finished("act_2_1")
    text = asked(log).messages[-1].text
    assert "10 characters cut" in text
    assert text.count("z") >= 10
    assert cut_middle("abc", 3) == "abc"


def test_native_calls_each_get_one_result() -> None:
    calls = [call("1+1", "a"), {"id": "b", "name": "search", "arguments": "{}"}, call("2", "c")]
    log = Log().message().claimed().asked(dialect="tool").replied("", calls=calls)
    log.boxed().started("act_2_1").finished("act_2_1", value={"text/plain": "2"})
    wanted = asked(log, "tool")
    valid(wanted)
    results = [m.text for m in wanted.messages if m.role == "tool"]
    assert results[0] == "Value: 2"
    assert "no tool `search`" in results[1]
    assert "Not run" in results[2]


def test_a_message_that_came_meanwhile_follows_the_result() -> None:
    log = Log().message("one").claimed().coded("x").boxed().started("act_2_1").message("two").finished("act_2_1")
    wanted = asked(log)
    assert wanted.messages[-1].text.endswith("two")
    valid(wanted)


def test_small_models_get_examples_and_the_question_alone() -> None:
    prompting = Prompting(examples=(("1+2", "final_answer(1 + 2)"),), grammar="root ::= x")
    wanted = asked(Log().message("3+4").claimed(), prompting=prompting)
    assert [m.text for m in wanted.messages] == ["1+2", "final_answer(1 + 2)", "3+4"]
    assert wanted.grammar == "root ::= x"


MOVES = ("coded", "prose", "native", "two calls", "finish", "fail", "message", "cancel", "lost", "unknown", "claim")


def play(moves: list[str]) -> Log:
    """A log as the loop would write it, cut off anywhere: moves that do not fit are skipped."""
    log = Log().message().claimed()
    for move in moves:
        action = log.state.action
        turn = log.state.turn
        step = len(turn.steps) + 1 if turn else 1
        if move == "message":
            log.message("more")
        elif move == "claim":
            log.claimed()
        elif turn is None:
            continue
        elif action is None and move in ("coded", "prose", "native", "two calls"):
            reply(log, move, step)
        elif action is not None and move in ("finish", "fail", "lost"):
            log.finished(action.id, ok=move == "finish", error=None if move == "finish" else {"kind": move})
        elif action is not None and move == "unknown":
            log.intended(action.id, effect=f"eff_{log.state.seq}", call=f"c{log.state.seq}")
        elif move == "cancel" and action is None:
            log.add(ev.CANCEL_REQUESTED, reason="x").add(ev.TURN_CANCELLED, turn=turn.id, reason="x")
    if log.state.turn is None:
        log.message("again")
    return log


def reply(log: Log, move: str, step: int) -> None:
    calls = {"native": [call(f"x={step}")], "two calls": [call(f"x={step}", "a"), call("y", "b")]}.get(move, [])
    text = {"coded": f"```python\nx={step}\n```", "prose": "Hm."}.get(move, "")
    log.asked(step, dialect="tool" if calls else "fenced").replied(text, step, calls)
    for command in decide(log.state, 1000.0):
        if isinstance(command, Act):
            log.boxed(f"sbx_{step}").started(command.action, command.code, step, f"sbx_{step}")


@given(st.lists(st.sampled_from(MOVES), max_size=30))
def test_the_request_is_valid_after_any_history(moves: list[str]) -> None:
    log = play(moves)
    for dialect in ("fenced", "tool"):
        valid(asked(log, dialect))


@pytest.mark.parametrize("text", ["", "a", "a" * 1000])
def test_cut_middle_is_bounded(text: str) -> None:
    assert len(cut_middle(text, 100)) <= 100 + len("\n[… 1,000 characters cut …]\n")
