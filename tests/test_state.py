"""The fold: what a log says the session is."""

from __future__ import annotations

from farhand import event as ev
from farhand.event import Event
from farhand.state import apply, fold
from session_log import SESSION, Log


def busy() -> Log:
    log = Log().message().claimed().coded("pay(1)").boxed().started("act_2_1")
    log.add(ev.ACTION_WROTE, action="act_2_1", box="sbx_1", frame=3, chunks=[["stdout", "x"]])
    return log.intended("act_2_1", frame=4).settled()


def test_a_fold_of_the_log_is_the_state_that_grew_with_it() -> None:
    log = busy().finished("act_2_1", files=[{"path": "a.txt", "size": 1}])
    assert fold(SESSION, log.events) == log.state


def test_events_read_twice_change_nothing() -> None:
    log = busy()
    for event in log.events:
        apply(log.state, event)
    assert fold(SESSION, log.events) == log.state


def test_unknown_types_are_ignored() -> None:
    log = Log()
    apply(log.state, Event(SESSION, 2, "future.thing", 7, 0.0, {"a": 1}))
    assert log.state.seq == 2


def test_the_boxs_frame_is_the_newest_one_whose_content_is_in_the_log() -> None:
    log = busy()
    assert log.state.box is not None
    assert log.state.box.frame == 4
    log.add(ev.ACTION_WROTE, action="act_2_1", box="sbx_old", frame=99)
    assert log.state.box.frame == 4


def test_files_come_and_go() -> None:
    log = busy().finished("act_2_1", files=[{"path": "a", "size": 1}, {"path": "b", "size": 2}])
    log.coded("x", 2).started("act_2_2", step=2).finished("act_2_2", files=[{"path": "a", "removed": True}])
    assert list(log.state.files) == ["b"]


def test_a_lost_box_is_no_box() -> None:
    log = busy().add(ev.SANDBOX_LOST, box="sbx_1", reason="outside")
    assert log.state.box is None
    assert log.state.boxes_lost == 1


def test_a_reconciled_effect_is_told_in_the_open_turn() -> None:
    log = Log().message().claimed().coded("pay(1)").boxed().started("act_2_1").intended("act_2_1")
    log.settled(outcome="unknown").finished("act_2_1")
    assert log.state.unknown("pay", "d") is not None
    log.add(ev.EFFECT_RECONCILED, effect="eff_1", outcome="done", value=1, by="user:local")
    assert log.state.unknown("pay", "d") is None
    assert log.state.turn is not None
    assert "now known: done" in log.state.notes[0][1]


def test_tokens_add_up() -> None:
    log = Log().message().claimed().coded("x")
    assert log.state.turn is not None
    assert (log.state.turn.input_tokens, log.state.turn.output_tokens) == (7, 3)
