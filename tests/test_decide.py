"""What is due next, for every shape of log that the loop or a crash can leave."""

from __future__ import annotations

from farhand import event as ev
from farhand.decide import Act, AskModel, CallTool, EndTurn, Settle, Stop, decide
from farhand.limits import MODEL_ATTEMPTS, REMINDERS, REPEATS
from session_log import Log

NOW = 1010.0


def one(log: Log, now: float = NOW):
    commands = decide(log.state, now)
    assert len(commands) == 1, commands
    return commands[0]


def running(**limits: object) -> tuple[Log, str]:
    """A log whose first action has started in a box."""
    log = Log(**limits).message().claimed().coded("pay(1)")
    act = one(log, 1004.0)
    assert isinstance(act, Act)
    return log.boxed().started(act.action, act.code), act.action


def test_nothing_is_due_without_a_message() -> None:
    assert decide(Log().state, NOW) == ()


def test_a_message_asks_the_model() -> None:
    assert one(Log().message().claimed()) == AskModel("ask:trn_2:1:1", 1, 1)


def test_the_same_state_gives_the_same_ids() -> None:
    log = Log().message().claimed()
    assert decide(log.state, NOW) == decide(log.state, NOW + 5)


def test_a_request_without_a_reply_is_asked_again_under_the_same_id() -> None:
    before = one(Log().message().claimed())
    assert one(Log().message().claimed().asked()) == before


def test_code_is_an_action_and_stays_one_command_until_it_finished() -> None:
    log = Log().message().claimed().coded("1+1")
    act = one(log)
    assert act == Act("act:act_2_1", "act_2_1", 1, "1+1")
    assert one(log.boxed().started("act_2_1")).id == act.id
    assert isinstance(one(log.finished("act_2_1")), AskModel)


def test_an_answer_ends_the_turn_only_when_the_action_finished_without_error() -> None:
    answer = {"value": 2, "text": "2"}
    log, action = running()
    assert one(log.finished(action, answer=answer)) == EndTurn("end:trn_2", "answered", answer=answer)
    log, action = running()
    log.finished(action, ok=False, answer=answer, error={"kind": "exception", "message": "x"})
    assert isinstance(one(log), AskModel)


def test_an_ended_turn_leaves_nothing_due() -> None:
    log, action = running()
    log.finished(action, answer={"value": 2, "text": "2"}).add(ev.TURN_ANSWERED, turn="trn_2", answer={})
    assert decide(log.state, NOW) == ()
    assert isinstance(one(log.message("and 2+2?")), AskModel)


def test_a_message_during_a_turn_joins_it() -> None:
    log, _ = running()
    log.message("hurry")
    assert len(log.state.turns) == 1
    assert isinstance(one(log), Act)


def test_an_intended_effect_of_this_generation_is_called() -> None:
    log, action = running()
    log.intended(action)
    act, call = decide(log.state, NOW)
    assert isinstance(act, Act)
    assert isinstance(call, CallTool)
    assert call.effect == "eff_1"
    assert not call.again


def test_an_interrupted_opaque_effect_is_never_called_again() -> None:
    log, action = running()
    log.intended(action).claimed()
    settle = decide(log.state, NOW)[1]
    assert isinstance(settle, Settle)
    assert settle.outcome == "unknown"


def test_an_interrupted_repeatable_effect_is_called_again() -> None:
    for effect_class in ("pure", "idempotent", "keyed"):
        log, action = running()
        log.intended(action, **{"class": effect_class}).claimed()
        call = decide(log.state, NOW)[1]
        assert isinstance(call, CallTool)
        assert call.again


def test_a_settled_effect_leaves_only_the_action() -> None:
    log, action = running()
    assert isinstance(one(log.intended(action).settled()), Act)


def test_an_effect_that_outlives_its_action_holds_the_turn_open() -> None:
    log, action = running()
    log.intended(action).finished(action, answer={"value": 1, "text": "1"})
    assert isinstance(one(log), CallTool)
    assert isinstance(one(log.settled()), EndTurn)


def test_a_cancel_stops_the_action_and_then_ends_the_turn() -> None:
    log, action = running()
    log.add(ev.CANCEL_REQUESTED, reason="enough")
    assert [type(command) for command in decide(log.state, NOW)] == [Act, Stop]
    log.finished(action, ok=False, error={"kind": "interrupted"}, lost=["x"])
    end = one(log)
    assert isinstance(end, EndTurn)
    assert end.status == "cancelled"
    assert end.error is not None
    assert end.error["lost"] == ["x"]


def test_a_cancel_while_the_model_is_asked_ends_the_turn() -> None:
    end = one(Log().message().claimed().asked().add(ev.CANCEL_REQUESTED, reason="no"))
    assert isinstance(end, EndTurn)
    assert end.status == "cancelled"


def test_a_retryable_failure_is_asked_again_a_bounded_number_of_times() -> None:
    log = Log().message().claimed()
    for attempt in range(1, MODEL_ATTEMPTS + 1):
        ask = one(log)
        assert isinstance(ask, AskModel)
        assert ask.attempt == attempt
        log.asked(attempt=attempt).add(ev.MODEL_FAILED, step=1, attempt=attempt, error={"code": "m", "retryable": True})
    end = one(log)
    assert isinstance(end, EndTurn)
    assert end.status == "failed"


def test_a_refusal_is_not_asked_again() -> None:
    log = Log().message().claimed().asked()
    log.add(ev.MODEL_FAILED, step=1, attempt=1, error={"code": "model_refused", "retryable": False})
    assert isinstance(one(log), EndTurn)


def test_replies_without_code_are_reminded_of_and_then_fail_the_turn() -> None:
    log = Log().message().claimed()
    for step in range(1, REMINDERS + 1):
        assert isinstance(one(log), AskModel)
        log.asked(step).replied("I think it is two.", step)
    end = one(log)
    assert isinstance(end, EndTurn)
    assert end.error is not None
    assert end.error["code"] == "no_code"


def test_the_same_code_again_is_not_run_more_than_the_bound() -> None:
    log = Log().message().claimed()
    ran = 0
    for step in range(1, 20):
        log.coded("poll()", step)
        command = one(log)
        if isinstance(command, EndTurn):
            assert command.error is not None
            assert command.error["code"] == "repeats"
            break
        if isinstance(command, Act):
            ran += 1
            log.boxed().started(command.action, command.code, step).finished(command.action)
    else:
        raise AssertionError("the turn never ended")
    assert ran == REPEATS - 1


def test_limits_of_the_turn_end_it_by_name() -> None:
    for limits, now in (({"steps": 1}, NOW), ({"tokens": 10}, NOW), ({"turn_s": 5}, NOW)):
        log, action = running(**limits)
        log.finished(action)
        end = one(log, now)
        assert isinstance(end, EndTurn)
        assert end.error is not None
        assert end.error["limit"] == next(iter(limits))


def test_the_end_of_the_turns_time_stops_a_running_action() -> None:
    log, _ = running(turn_s=5)
    assert isinstance(decide(log.state, NOW)[-1], Stop)
