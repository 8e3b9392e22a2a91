"""A session's state: a fold over its log, and nothing else. Pure.

`apply` changes a State in place, for one event at a time; `fold` makes one from a whole log. Events must come with
their
blobs resolved (`session.Session` does that). Unknown types are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from farhand import event as ev
from farhand.action import Parsed, parse, parse_call
from farhand.event import Event

FENCED, TOOL = "fenced", "tool"
PYTHON = "python"
"""Name of the one native tool of the `tool` dialect."""


@dataclass(slots=True)
class Effect:
    """One call that left the box. `outcome` is None until settled, then done, failed, unknown or never_started."""

    id: str
    action: str
    call: str
    tool: str
    effect_class: str
    arguments: Any
    digest: str
    n: int
    key: str
    attempt: int
    box: str
    generation: int
    seq: int
    outcome: str | None = None
    value: Any = None
    error: dict[str, Any] | None = None
    reconciled: bool = False


@dataclass(slots=True)
class Finish:
    """What `action.finished` says."""

    ok: bool
    value: dict[str, Any] | None
    answer: dict[str, Any] | None
    error: dict[str, Any] | None
    usage: dict[str, Any]
    output: dict[str, Any]
    lost: list[str]
    files: list[dict[str, Any]]
    left_out: list[list[str]]
    seq: int


@dataclass(slots=True)
class Action:
    """One piece of Python the model wrote. `chunks` is (stream, text), bounded like the log."""

    id: str
    step: int
    code: str
    box: str
    generation: int
    chunks: list[tuple[str, str]] = field(default_factory=list)
    cut_bytes: int = 0
    displays: list[dict[str, Any]] = field(default_factory=list)
    answers: list[dict[str, Any]] = field(default_factory=list)
    effects: dict[str, Effect] = field(default_factory=dict)
    limits: set[str] = field(default_factory=set)
    """Names of the limits it has reached."""
    finish: Finish | None = None

    def same(self, tool: str, digest: str) -> int:
        """How many calls with this name and these arguments the action has made."""
        return sum(1 for effect in self.effects.values() if effect.tool == tool and effect.digest == digest)


@dataclass(slots=True)
class Reply:
    text: str
    calls: list[dict[str, str]]
    finish: str
    parsed: Parsed


@dataclass(slots=True)
class Step:
    """One model call and its action. `failures` are model.failed events since the request."""

    number: int
    dialect: str = FENCED
    requested: int = 0
    seen: int = 0
    """Seq up to which the newest request was derived: what came later the reply does not know."""
    failures: list[dict[str, Any]] = field(default_factory=list)
    reply: Reply | None = None
    action: Action | None = None


@dataclass(slots=True)
class Turn:
    """From a user's message to an answer. `status` is open, answered, failed or cancelled.

    `started_at` is when the model was first asked; time in which nobody held the claim is added to it. `messages`
    are (seq, text).
    """

    id: str
    messages: list[tuple[int, str]]
    started_at: float | None = None
    steps: list[Step] = field(default_factory=list)
    status: str = "open"
    answer: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    input_tokens: int = 0
    output_tokens: int = 0
    cancel: str | None = None
    cancelled_at: int = 0
    lost: list[str] = field(default_factory=list)

    until: int | None = None
    """Seq of the event that ended it."""

    @property
    def step(self) -> Step | None:
        return self.steps[-1] if self.steps else None


@dataclass(slots=True)
class BoxState:
    """The session's box as the log knows it. `frame` is the last frame whose content is in the log."""

    id: str
    generation: int
    provider: str
    frame: int = 0


@dataclass(slots=True)
class State:
    session_id: str
    seq: int = 0
    time: float = 0.0
    created: dict[str, Any] = field(default_factory=dict)
    generation: int = 0
    owner: str = ""
    claimed: bool = False
    turns: list[Turn] = field(default_factory=list)
    box: BoxState | None = None
    boxes_lost: int = 0
    effects: dict[str, Effect] = field(default_factory=dict)
    open: dict[str, Effect] = field(default_factory=dict)
    """Effects that are intended and not settled."""
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: list[tuple[int, str]] = field(default_factory=list)
    """(seq, text) the model is told besides: a reconciled effect, a replaced box."""

    @property
    def turn(self) -> Turn | None:
        """The open turn."""
        return self.turns[-1] if self.turns and self.turns[-1].status == "open" else None

    @property
    def action(self) -> Action | None:
        """The action that has started and not finished."""
        step = self.turn.step if self.turn else None
        action = step.action if step else None
        return action if action is not None and action.finish is None else None

    def unknown(self, tool: str, digest: str) -> Effect | None:
        """The first effect with this name and these arguments of which nobody knows whether it happened."""
        for effect in self.effects.values():
            if effect.tool == tool and effect.digest == digest and self.in_doubt(effect):
                return effect
        return None

    def in_doubt(self, effect: Effect) -> bool:
        """Settled as unknown, or left open by a driver or a turn that is no more."""
        if effect.outcome is None:
            return effect.generation != self.generation or not self._belongs(effect)
        return effect.outcome == "unknown"

    def _belongs(self, effect: Effect) -> bool:
        """Whether the effect is of the open turn."""
        steps = self.turn.steps if self.turn is not None else []
        return any(step.action is not None and step.action.id == effect.action for step in steps)

    def strays(self) -> list[Effect]:
        """Open effects of turns that have ended."""
        return [effect for effect in self.open.values() if not self._belongs(effect)]


def fold(session_id: str, events: Iterable[Event]) -> State:
    state = State(session_id)
    for event in events:
        apply(state, event)
    return state


def apply(state: State, event: Event) -> None:
    """Fold one event in. Events at or below `state.seq` are ignored, so a repeated read does no harm."""
    if event.seq <= state.seq:
        return
    state.seq = event.seq
    handler = _HANDLERS.get(event.type)
    if handler is not None:
        handler(state, event, dict(event.data))
    state.time = event.time


def _created(state: State, event: Event, data: dict[str, Any]) -> None:
    state.created = data


def _claimed(state: State, event: Event, data: dict[str, Any]) -> None:
    state.generation, state.owner, state.claimed = event.seq, str(data.get("owner", "")), True
    if state.turn is not None and state.turn.started_at is not None:
        state.turn.started_at += max(0.0, event.time - state.time)


def _released(state: State, event: Event, data: dict[str, Any]) -> None:
    state.claimed = False


def _message(state: State, event: Event, data: dict[str, Any]) -> None:
    turn = state.turn
    if turn is None:
        turn = Turn(id=f"trn_{event.seq}", messages=[])
        state.turns.append(turn)
    turn.messages.append((event.seq, str(data.get("text", ""))))


def _cancel(state: State, event: Event, data: dict[str, Any]) -> None:
    turn = state.turn
    if turn is not None and turn.cancel is None and data.get("turn") in (None, turn.id):
        turn.cancel, turn.cancelled_at = str(data.get("reason", "")) or "cancelled", event.seq


def _requested(state: State, event: Event, data: dict[str, Any]) -> None:
    turn = state.turn
    if turn is None:
        return
    number = int(data["step"])
    if turn.step is None or turn.step.number < number:
        turn.steps.append(Step(number))
    step = turn.steps[-1]
    step.requested += 1
    step.seen = int(data.get("seen", event.seq))
    if turn.started_at is None:
        turn.started_at = event.time
    step.dialect = str(data.get("dialect", FENCED))


def _replied(state: State, event: Event, data: dict[str, Any]) -> None:
    turn = state.turn
    if turn is None or turn.step is None:
        return
    usage = data.get("usage") or {}
    turn.input_tokens += int(usage.get("input_tokens", 0))
    turn.output_tokens += int(usage.get("output_tokens", 0))
    calls = [dict(call) for call in data.get("calls") or []]
    turn.step.reply = Reply(
        text=str(data.get("text", "")), calls=calls, finish=str(data.get("finish", "stop")), parsed=_parsed(data, calls)
    )


def _parsed(data: dict[str, Any], calls: list[dict[str, str]]) -> Parsed:
    """The first `python` call, else the text's code block."""
    for call in calls:
        if call.get("name") == PYTHON:
            return parse_call(call.get("arguments", ""))
    return parse(str(data.get("text", "")), finish=str(data.get("finish", "stop")))


def _failed(state: State, event: Event, data: dict[str, Any]) -> None:
    if state.turn is not None and state.turn.step is not None:
        state.turn.step.failures.append(dict(data.get("error") or {}))


def _action_started(state: State, event: Event, data: dict[str, Any]) -> None:
    turn = state.turn
    if turn is None or turn.step is None:
        return
    turn.step.action = Action(
        id=data["action"], step=turn.step.number, code=data["code"], box=data["box"], generation=state.generation
    )


def _advance(state: State, data: dict[str, Any]) -> None:
    frame = data.get("frame")
    if state.box is not None and state.box.id == data.get("box") and isinstance(frame, int):
        state.box.frame = max(state.box.frame, frame)


def _action_wrote(state: State, event: Event, data: dict[str, Any]) -> None:
    _advance(state, data)
    action = _find(state, data)
    if action is None:
        return
    for stream, text in data.get("chunks") or []:
        action.chunks.append((stream, text))
    action.cut_bytes += int(data.get("cut_bytes", 0))
    action.displays.extend(data.get("displays") or [])
    action.answers.extend(data.get("answers") or [])


def _action_finished(state: State, event: Event, data: dict[str, Any]) -> None:
    _advance(state, data)
    action = _find(state, data)
    if action is None:
        return
    action.finish = Finish(
        ok=bool(data["ok"]),
        value=data.get("value"),
        answer=data.get("answer"),
        error=data.get("error"),
        usage=data.get("usage") or {},
        output=data.get("output") or {},
        lost=list(data.get("lost") or []),
        files=list(data.get("files") or []),
        left_out=list(data.get("left_out") or []),
        seq=event.seq,
    )
    for entry in action.finish.files:
        if entry.get("removed"):
            state.files.pop(entry["path"], None)
        else:
            state.files[entry["path"]] = entry


def _find(state: State, data: dict[str, Any]) -> Action | None:
    for turn in reversed(state.turns):
        for step in reversed(turn.steps):
            if step.action is not None and step.action.id == data.get("action"):
                return step.action
    return None


def _effect_intended(state: State, event: Event, data: dict[str, Any]) -> None:
    _advance(state, data)
    effect = state.effects.get(data["effect"])
    if effect is not None:
        effect.generation, effect.seq, effect.call, effect.outcome = state.generation, event.seq, data["call"], None
        effect.attempt = int(data.get("attempt", 1))
        state.open[effect.id] = effect
        return
    effect = Effect(
        id=data["effect"],
        action=data["action"],
        call=data["call"],
        tool=data["tool"],
        effect_class=data["class"],
        arguments=data.get("arguments"),
        digest=data["digest"],
        n=int(data["n"]),
        key=data["key"],
        attempt=int(data.get("attempt", 1)),
        box=data.get("box", ""),
        generation=state.generation,
        seq=event.seq,
    )
    state.effects[effect.id] = state.open[effect.id] = effect
    action = _find(state, data)
    if action is not None:
        action.effects[effect.call] = effect


def _effect_settled(state: State, event: Event, data: dict[str, Any]) -> None:
    effect = state.effects.get(data["effect"])
    if effect is None:
        return
    state.open.pop(effect.id, None)
    if not effect.reconciled:
        effect.outcome, effect.value, effect.error = data["outcome"], data.get("value"), data.get("error")


def _effect_reconciled(state: State, event: Event, data: dict[str, Any]) -> None:
    effect = state.effects.get(str(data.get("effect")))
    if effect is None:
        return
    effect.outcome, effect.value, effect.reconciled = str(data.get("outcome")), data.get("value"), True
    state.open.pop(effect.id, None)
    text = f"The call {effect.tool} ({effect.id}), whose outcome was unknown, is now known: {effect.outcome}."
    state.notes.append((event.seq, text))


def _box_created(state: State, event: Event, data: dict[str, Any]) -> None:
    state.box = BoxState(id=data["box"], generation=state.generation, provider=data.get("provider", ""))


def _box_gone(state: State, event: Event, data: dict[str, Any]) -> None:
    if state.box is None or state.box.id != data.get("box"):
        return
    state.box = None
    if event.type != ev.SANDBOX_LOST:
        return
    state.boxes_lost += 1
    if data.get("reason") == "outside":
        text = "The sandbox was lost and is replaced: variables and imports are gone, saved files are back."
        state.notes.append((event.seq, text))


def _limit_reached(state: State, event: Event, data: dict[str, Any]) -> None:
    action = _find(state, data)
    if action is not None:
        action.limits.add(str(data.get("limit")))


def _turn_ended(state: State, event: Event, data: dict[str, Any]) -> None:
    turn = state.turn
    if turn is None:
        return
    turn.until = event.seq
    turn.status = {ev.TURN_ANSWERED: "answered", ev.TURN_FAILED: "failed"}.get(event.type, "cancelled")
    turn.answer, turn.error, turn.lost = data.get("answer"), data.get("error"), list(data.get("lost") or [])
    _reopen(state, turn)


def _reopen(state: State, turn: Turn) -> None:
    """Messages that came too late for the ended turn to know of them are a turn of their own."""
    seen = turn.step.seen if turn.step is not None else 0
    if turn.status == "cancelled":
        seen = max(seen, turn.cancelled_at)
    late = [message for message in turn.messages if message[0] > max(seen, turn.messages[0][0])]
    if not late:
        return
    turn.messages = [message for message in turn.messages if message not in late]
    state.turns.append(Turn(id=f"trn_{late[0][0]}", messages=late))


_HANDLERS: dict[str, Callable[[State, Event, dict[str, Any]], None]] = {
    ev.SESSION_CREATED: _created,
    ev.SESSION_CLAIMED: _claimed,
    ev.SESSION_RELEASED: _released,
    ev.MESSAGE_RECEIVED: _message,
    ev.CANCEL_REQUESTED: _cancel,
    ev.MODEL_REQUESTED: _requested,
    ev.MODEL_REPLIED: _replied,
    ev.MODEL_FAILED: _failed,
    ev.ACTION_STARTED: _action_started,
    ev.ACTION_WROTE: _action_wrote,
    ev.ACTION_FINISHED: _action_finished,
    ev.EFFECT_INTENDED: _effect_intended,
    ev.EFFECT_SETTLED: _effect_settled,
    ev.EFFECT_RECONCILED: _effect_reconciled,
    ev.SANDBOX_CREATED: _box_created,
    ev.SANDBOX_LOST: _box_gone,
    ev.SANDBOX_DESTROYED: _box_gone,
    ev.LIMIT_REACHED: _limit_reached,
    ev.TURN_ANSWERED: _turn_ended,
    ev.TURN_FAILED: _turn_ended,
    ev.TURN_CANCELLED: _turn_ended,
}
