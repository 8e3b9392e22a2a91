"""Building logs by hand, for tests of what is pure."""

from __future__ import annotations

from typing import Any

from farhand import event as ev
from farhand.event import Event
from farhand.state import State, apply

SESSION = "ses_test"


class Log:
    """A log that grows by one event a call; `state` is its fold."""

    def __init__(self, **limits: Any) -> None:
        self.state = State(SESSION)
        self.events: list[Event] = []
        self.add(ev.SESSION_CREATED, limits=limits, tools=[])

    def add(self, kind: str, **data: Any) -> Log:
        event = Event(SESSION, self.state.seq + 1, kind, 1, 1000.0 + self.state.seq, data)
        self.events.append(event)
        apply(self.state, event)
        return self

    def claimed(self) -> Log:
        return self.add(ev.SESSION_CLAIMED, owner="own_1", lease_s=15)

    def message(self, text: str = "What is 1+1?") -> Log:
        return self.add(ev.MESSAGE_RECEIVED, role="user", text=text)

    def asked(self, step: int = 1, attempt: int = 1, dialect: str = "fenced") -> Log:
        return self.add(ev.MODEL_REQUESTED, step=step, attempt=attempt, model="m", dialect=dialect)

    def replied(self, text: str, step: int = 1, calls: list[dict[str, str]] | None = None, finish: str = "stop") -> Log:
        usage = {"input_tokens": 7, "output_tokens": 3}
        return self.add(ev.MODEL_REPLIED, step=step, text=text, calls=calls or [], finish=finish, usage=usage)

    def coded(self, code: str, step: int = 1) -> Log:
        return self.asked(step).replied(f"```python\n{code}\n```", step)

    def boxed(self, box: str = "sbx_1") -> Log:
        return self.add(ev.SANDBOX_CREATED, box=box, provider="fake")

    def started(self, action: str, code: str = "1+1", step: int = 1, box: str = "sbx_1") -> Log:
        return self.add(ev.ACTION_STARTED, action=action, step=step, code=code, box=box)

    def intended(self, action: str, effect: str = "eff_1", call: str = "c1", **more: Any) -> Log:
        data = {"tool": "pay", "class": "opaque", "digest": "d", "n": 1, "key": effect, "frame": 1, "box": "sbx_1"}
        return self.add(ev.EFFECT_INTENDED, effect=effect, action=action, call=call, **{**data, **more})

    def settled(self, effect: str = "eff_1", outcome: str = "done", **more: Any) -> Log:
        return self.add(ev.EFFECT_SETTLED, effect=effect, call="c1", outcome=outcome, **more)

    def finished(self, action: str, ok: bool = True, answer: Any = None, **more: Any) -> Log:
        data = {"box": "sbx_1", "frame": 9, "ok": ok, "answer": answer, "usage": {}, "output": {}}
        return self.add(ev.ACTION_FINISHED, action=action, **{**data, **more})
