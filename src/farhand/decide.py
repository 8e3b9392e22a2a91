"""What a session needs next: `decide(state, now)`, a pure function of its log. That is all the recovery the loop has.

A command has a stable id: the same state gives the same commands, so the driver performs those that are not under way.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, TypeAlias

from farhand.action import reminder
from farhand.ledger import FAILED, UNKNOWN, may_run_again
from farhand.limits import MODEL_ATTEMPTS, MODEL_REQUESTS, REMINDERS, REPEATS, Limits
from farhand.state import Action, Effect, State, Step, Turn


@dataclass(frozen=True, slots=True)
class AskModel:
    """Ask the model for the reply of step `step`, for the `attempt`-th time."""

    id: str
    step: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Act:
    """Run an action, or attach to it where it runs already, and log what it does until it is finished."""

    id: str
    action: str
    step: int
    code: str


@dataclass(frozen=True, slots=True)
class CallTool:
    """Run the tool of an intended effect and settle it. `again`: it was intended under an older generation."""

    id: str
    effect: str
    again: bool = False


@dataclass(frozen=True, slots=True)
class Settle:
    """Settle an interrupted effect without running anything."""

    id: str
    effect: str
    outcome: str
    message: str


@dataclass(frozen=True, slots=True)
class Stop:
    """Interrupt the running action and its tools."""

    id: str
    action: str
    reason: str


@dataclass(frozen=True, slots=True)
class EndTurn:
    """`status` is answered, failed or cancelled."""

    id: str
    status: str
    answer: dict[str, Any] | None = None
    error: dict[str, Any] | None = None


Command: TypeAlias = AskModel | Act | CallTool | Settle | Stop | EndTurn


def limits_of(state: State) -> Limits:
    """The limits the session was created with; fields a later version added are left out."""
    return _limits(tuple((state.created.get("limits") or {}).items()))


@lru_cache(maxsize=64)
def _limits(given: tuple[tuple[str, Any], ...]) -> Limits:
    known = {field.name for field in fields(Limits)}
    return Limits(**{name: value for name, value in given if name in known})


def action_id(turn: Turn, step: Step) -> str:
    return f"act_{turn.id[4:]}_{step.number}"


def deadline(state: State) -> float | None:
    """When the open turn reaches its `turn_s`, by the store's clock; None while it has not begun."""
    if state.turn is None or state.turn.started_at is None:
        return None
    return state.turn.started_at + limits_of(state).turn_s


def decide(state: State, now: float) -> tuple[Command, ...]:
    """The commands that are due. `now` is seconds since the epoch. Empty when the session is idle."""
    strays = tuple(_of_stray(state, effect) for effect in state.strays()) if state.open else ()
    turn = state.turn
    if turn is None or strays:
        return strays
    until = deadline(state)
    step, over = turn.step, until is not None and now >= until
    action = step.action if step is not None else None
    if action is not None:
        due = _of_action(state, turn, action, over)
        if due:
            return due
    if turn.cancel is not None:
        lost = action.finish.lost if action is not None and action.finish is not None else []
        error = {"code": "interrupted", "message": turn.cancel, "lost": lost}
        return (EndTurn(f"end:{turn.id}", "cancelled", error=error),)
    if action is not None and (answer := _answer(action)) is not None:
        return (EndTurn(f"end:{turn.id}", "answered", answer=answer),)
    if over:
        return (_limit(turn, "turn_s", limits_of(state).turn_s, "second"),)
    return _next_step(state, turn, step)


def _of_action(state: State, turn: Turn, action: Action, over: bool) -> tuple[Command, ...]:
    """While an action runs, or calls of it are open."""
    commands: list[Command] = []
    due = [_of_effect(state, effect) for effect in action.effects.values() if effect.outcome is None]
    if action.finish is None:
        commands.append(Act(f"act:{action.id}", action.id, action.step, action.code))
    if (turn.cancel is not None or over) and (action.finish is None or due):
        commands.append(Stop(f"stop:{action.id}", action.id, turn.cancel or "the turn's time is over"))
    return (*commands, *due)


def _of_effect(state: State, effect: Effect) -> Command:
    """Recovery's rows for an effect that is intended and not settled."""
    if effect.generation == state.generation:
        return CallTool(f"call:{effect.id}:{effect.seq}", effect.id)
    if may_run_again(effect):
        return CallTool(f"again:{effect.id}:{state.generation}", effect.id, again=True)
    message = f"{effect.tool} was under way when the process that ran it ended: whether it took effect is unknown"
    return Settle(f"settle:{effect.id}:{state.generation}", effect.id, UNKNOWN, message)


def _of_stray(state: State, effect: Effect) -> Settle:
    """Left open by a turn that ended: nobody waits for it, so nothing is started."""
    outcome = FAILED if may_run_again(effect) else UNKNOWN
    message = f"the turn ended while {effect.tool} was under way"
    return Settle(f"stray:{effect.id}:{state.generation}", effect.id, outcome, message)


def _answer(action: Action) -> dict[str, Any] | None:
    return action.finish.answer if action.finish is not None and action.finish.ok else None


def _next_step(state: State, turn: Turn, step: Step | None) -> tuple[Command, ...]:
    if step is None:
        return (_ask(turn, 1, 1),)
    if step.reply is None:
        return _after_failure(turn, step)
    if step.action is None and step.reply.parsed.kind == "code" and repeats(turn, step) < REPEATS:
        identity = action_id(turn, step)
        return (Act(f"act:{identity}", identity, step.number, step.reply.parsed.code),)
    useless = _useless(turn)
    if useless >= REMINDERS:
        return (_useless_end(turn, step, useless),)
    limits = limits_of(state)
    if step.number >= limits.steps:
        return (_limit(turn, "steps", limits.steps, "step"),)
    if turn.input_tokens + turn.output_tokens >= limits.tokens:
        return (_limit(turn, "tokens", limits.tokens, "token"),)
    return (_ask(turn, step.number + 1, 1),)


def _ask(turn: Turn, step: int, attempt: int) -> AskModel:
    return AskModel(f"ask:{turn.id}:{step}:{attempt}", step, attempt)


def _after_failure(turn: Turn, step: Step) -> tuple[Command, ...]:
    """The model gave no reply: ask again while that may help."""
    failures = step.failures
    if step.requested >= MODEL_REQUESTS:
        message = f"the model was asked {step.requested} times for one step and no reply was recorded"
        return (EndTurn(f"end:{turn.id}", "failed", error={"code": "model", "message": message}),)
    if not failures or (failures[-1].get("retryable") and len(failures) < MODEL_ATTEMPTS):
        return (_ask(turn, step.number, len(failures) + 1),)
    return (EndTurn(f"end:{turn.id}", "failed", error=dict(failures[-1])),)


def repeats(turn: Turn, step: Step) -> int:
    """How many of the newest actions in a row, this reply's included, have its code."""
    assert step.reply is not None
    count = 0
    for earlier in reversed(turn.steps):
        if earlier.reply is None or earlier.reply.parsed.code != step.reply.parsed.code:
            break
        count += 1
    return count


def _useless(turn: Turn) -> int:
    """How many of the newest replies in a row led to no action."""
    count = 0
    for step in reversed(turn.steps):
        if step.reply is None or step.action is not None:
            break
        count += 1
    return count


def _useless_end(turn: Turn, step: Step, useless: int) -> EndTurn:
    assert step.reply is not None
    if step.reply.parsed.kind == "code":
        error = {"code": "repeats", "message": f"the model sent the same code {repeats(turn, step)} times in a row"}
    else:
        told = reminder(step.reply.parsed, dialect="fenced").splitlines()[0]
        error = {"code": "no_code", "message": f"{useless} replies in a row had no usable code. Last reason: {told}"}
    error["hint"] = "A larger model, or a task split into smaller ones, usually helps."
    return EndTurn(f"end:{turn.id}", "failed", error=error)


def _limit(turn: Turn, name: str, allowed: float, unit: str) -> EndTurn:
    error = {
        "code": "limit",
        "limit": name,
        "allowed": allowed,
        "message": f"the limit `{name}` was reached: {allowed:,.15g} {unit}{'' if allowed == 1 else 's'}",
        "hint": f"Raise it with Limits({name}=…), or continue the session.",
    }
    return EndTurn(f"end:{turn.id}", "failed", error=error)
