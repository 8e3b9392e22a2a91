"""What a person at a terminal sees of a session: live, from events and deltas, or again, from the log alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from farhand import event as ev
from farhand.cli import display
from farhand.cli.advice import for_command_line
from farhand.cli.page import Highlighter, Page, Piece
from farhand.cli.speech import CODE, END, Speech
from farhand.cli.tally import answer_text, hidden, number, seconds_text, short_path, size_text
from farhand.cli.terminal import GuestStream, one_line, sanitise
from farhand.event import Event
from farhand.limits import TRANSCRIPT_OUTPUT_CHARS
from farhand.transcript import cut_middle

Keep = Callable[[str, int, bytes], "Path | None"]
"""Called with suffix, number within the session and bytes of a display; gives the file it is in."""

_CODE_MARGIN: Final = "    "
TOOL: Final = "tool"
"""The stream of what the person's own tools print."""
WAITING_S: Final = 1.5
"""A model that is silent for longer is said to be waited for."""


class Renderer:
    """Feed it everything in order: `text` and `reasoning` for deltas, `event` for events. Then `finish`.

    With `asked` the user's messages are shown too, with `answered` the answer. A value is cut at as many characters as
    the model is shown of it, unless it is to be `full`; with `answer_cut` the answer too. `displays` were shown before.
    """

    def __init__(
        self,
        page: Page,
        *,
        asked: bool = False,
        answered: bool = True,
        keep: Keep | None = None,
        full: bool = False,
        answer_cut: bool = False,
        displays: int = 0,
        answer_file: Callable[[Event], Path | None] = lambda event: None,
    ) -> None:
        self.page = page
        self._asked, self._answered, self._keep = asked, answered, keep
        self._full, self._answer_cut, self.was_cut = full, answer_cut, False
        self._answer_file, self._answer_path = answer_file, ""
        self._highlighter = Highlighter(page.console)
        # Two bars, so that the streams are told apart without colours too.
        bar, error_bar = ("│", "┆") if page.unicode else ("|", "!")
        self._out_margin: Piece = (f"  {bar} ", "dim")
        self._error_margin: Piece = (f"  {error_bar} ", "red")
        self._tool_margin: Piece = (f"  {'┊' if page.unicode else ':'} ", "cyan")
        self._arrow = "→" if page.unicode else "->"
        self._speech, self._words = Speech(), GuestStream()
        self._spoke = self._idle = False
        self._block: list[str] = []
        self._blocks: list[list[str]] = []
        self._outputs: dict[str, GuestStream] = {}
        self._stream = ""
        self._limits: set[Any] = set()
        self._reasoning = False
        self._calls: dict[str, str] = {}
        self._pending = ""
        self._displays = displays
        self._waiting: tuple[str, float] | None = None
        self._handlers: dict[str, Callable[[Mapping[str, Any]], None]] = {
            ev.MESSAGE_RECEIVED: self._message,
            ev.MODEL_REQUESTED: self._requested,
            ev.MODEL_REPLIED: self._replied,
            ev.MODEL_FAILED: self._model_failed,
            ev.ACTION_STARTED: self._started,
            ev.ACTION_WROTE: self._wrote,
            ev.ACTION_FINISHED: self._finished,
            ev.EFFECT_INTENDED: self._intended,
            ev.EFFECT_SETTLED: self._settled,
            ev.EFFECT_RECONCILED: self._reconciled,
            ev.SANDBOX_CREATED: self._box_created,
            ev.SANDBOX_LOST: self._box_lost,
            ev.LIMIT_REACHED: self._limit,
            ev.CANCEL_REQUESTED: self._cancelling,
            ev.TURN_ANSWERED: self._turn_answered,
            ev.TURN_FAILED: self._turn_failed,
            ev.TURN_CANCELLED: self._turn_cancelled,
        }

    def event(self, event: Event) -> None:
        self._waiting = None
        if event.type == ev.TURN_ANSWERED:
            path = self._answer_file(event)
            self._answer_path = short_path(path) if path is not None else ""
        handler = self._handlers.get(event.type)
        if handler is not None:
            handler(event.data)

    def tick(self, now: float) -> None:
        """Called every second or so: who is waited for, and how long (`now` on the clock of `waits`)."""
        if self._waiting is not None and now - self._waiting[1] >= WAITING_S:
            self.page.status(f"waiting for {self._waiting[0]}… {now - self._waiting[1]:.0f} s")

    def waits(self, model: str, since: float) -> None:
        """The model was asked and has not said anything yet."""
        self._waiting = (model, since)

    def tool_said(self, text: str) -> None:
        """What one of the person's own tools printed."""
        if self._stream != TOOL:
            self._close_speech()
        self._output(TOOL, text)

    def note(self, text: str) -> None:
        """A quiet line of ours."""
        self._close_output()
        self.page.end_line()
        self.page.prose(sanitise(text), "yellow")
        self.page.end_line()

    def finish(self) -> None:
        self._waiting = None
        self._close_speech()
        self._close_output()
        self.page.end_line()

    # What the model says.

    def reasoning(self, delta: str) -> None:
        self._reasoning, self._waiting = True, None
        self.page.prose(self._words.feed(delta).text, "dim italic")

    def text(self, delta: str) -> None:
        if self._reasoning:
            self._reasoning = False
            self.page.gap()
        self._spoke, self._waiting = True, None
        self._say(self._speech.feed(self._words.feed(delta).text))

    def _say(self, pieces: Any) -> None:
        for kind, text in pieces:
            if kind == CODE:
                self._code_line(text)
            elif kind == END:
                self._blocks.append(self._block)
                self._block = []
                self.page.gap()
            elif text.strip() or not self._blocks:
                self.page.prose(text)

    def _code_line(self, line: str) -> None:
        if not self._block:
            if not line.strip():
                return
            self.page.gap()
        self._block.append(line)
        self.page.line(*self._highlighter.last(self._block), margin=(_CODE_MARGIN, None), whole=True)
        if not line.strip():
            self.page.gap()

    def _close_speech(self) -> None:
        self._say(self._speech.feed(self._words.flush()))
        self._say(self._speech.finish())
        self._reasoning = False
        self.page.end_line()

    def _message(self, data: Mapping[str, Any]) -> None:
        if self._asked:
            self.page.gap()
            self.page.line(("You", "bold"))
            self.page.prose(sanitise(_text(data.get("text"))))
            self.page.gap()

    def _requested(self, data: Mapping[str, Any]) -> None:
        self._close_speech()
        self._close_output()
        if self._idle:
            self._aside("no code was run; the model is told so")
        self._spoke, self._blocks, self._idle = False, [], False
        self.page.gap()
        again = f", attempt {data['attempt']}" if number(data.get("attempt")) > 1 else ""
        self.page.line((f"step {data.get('step', '?')}{again}", "dim"))

    def _replied(self, data: Mapping[str, Any]) -> None:
        if not self._spoke:
            self.text(_text(data.get("text")))
        self._close_speech()
        self._spoke, self._idle = False, True

    def _model_failed(self, data: Mapping[str, Any]) -> None:
        self._close_speech()
        self._error("the model failed", data.get("error"))

    # What the code does.

    def _started(self, data: Mapping[str, Any]) -> None:
        self._close_speech()
        self._idle = False
        self._outputs, self._limits = {}, set()
        self._stream = ""
        code = sanitise(_text(data.get("code")))
        if _marks(code.split("\n")) not in self._shown_marks():
            self.page.gap()
            for pieces in self._highlighter.lines(code.strip("\n")):
                if any(text.strip() for text, _ in pieces):
                    self.page.line(*pieces, margin=(_CODE_MARGIN, None), whole=True)
                else:
                    self.page.gap()
        self._blocks = []
        self.page.gap()

    def _shown_marks(self) -> list[list[str]]:
        together = [line for block in self._blocks for line in block]
        return [_marks(lines) for lines in (*self._blocks, together)]

    def _wrote(self, data: Mapping[str, Any]) -> None:
        for chunk in data.get("chunks") or ():
            self._output(_text(chunk[0]), _text(chunk[1]))
        for bundle in data.get("displays") or ():
            self._display(bundle)
        cut = number(data.get("cut_bytes"))
        if cut:
            self._aside(f"{cut:,.0f} bytes of output are not kept")

    def _output(self, stream: str, text: str) -> None:
        if stream != self._stream:
            self._close_output()
        self._break_call()
        self._stream = stream
        shown = self._outputs.setdefault(stream, GuestStream(bars=True)).feed(text)
        if shown.over:
            self.page.begin_again()
        self.page.block([(shown.text, _STREAM_STYLES.get(stream))], self._margin(stream))

    def _margin(self, stream: str) -> Piece:
        return {"stderr": self._error_margin, TOOL: self._tool_margin}.get(stream, self._out_margin)

    def _close_output(self) -> None:
        self._break_call()
        stream = self._outputs.get(self._stream)
        if stream is not None:
            self.page.block([(stream.flush(), None)], self._margin(self._stream))
        self._stream = ""
        self.page.end_line()

    def _display(self, bundle: Any) -> None:
        self._close_output()
        if not isinstance(bundle, Mapping):
            return
        self._displays += 1
        found = display.figure(bundle) if self._keep is not None else None
        if found is not None and self._keep is not None:
            kind, suffix, content = found
            path = self._keep(suffix, self._displays, content)
            if path is not None:
                self.page.path(short_path(path), (f"  [{one_line(kind, 40)}] ", "cyan"))
                return
        plain = self._cut(_text(bundle.get("text/plain")))
        kinds = [kind for kind in bundle if kind != "text/plain"]
        if plain:
            self.page.line((sanitise(plain), "cyan"), margin=("  ", None))
        elif kinds:
            self.page.line(("  ", None), (f"[{one_line(', '.join(map(str, kinds)), 60)}]", "cyan"))

    def _cut(self, text: str) -> str:
        if self._full or len(text) <= TRANSCRIPT_OUTPUT_CHARS:
            return text
        self.was_cut = True
        return cut_middle(text, TRANSCRIPT_OUTPUT_CHARS)

    def _finished(self, data: Mapping[str, Any]) -> None:
        self._close_output()
        value = data.get("value")
        if isinstance(value, Mapping) and not data.get("answer"):
            self._value(value)
        error = data.get("error")
        if error:
            self._action_error(error)
        if data.get("lost"):
            self._aside(f"lost with the box: {_names(data['lost'])}")
        self._changed(data.get("files") or ())

    def _value(self, bundle: Mapping[str, Any]) -> None:
        rich = display.picture(bundle)
        if rich:
            self._display(bundle)
        plain = sanitise(self._cut(_text(bundle.get("text/plain"))))
        if plain and not rich:
            separator = "\n" if "\n" in plain else " "
            self.page.line(("=>" + separator, "bold"), (plain, None), margin=("  ", None))

    def _action_error(self, error: Any) -> None:
        if not isinstance(error, Mapping):
            return
        if error.get("kind") == "exit" and not error.get("traceback"):
            self.page.line((f"  the code ended with SystemExit({one_line(str(error.get('exit')), 60)})", "yellow"))
            return
        told = error.get("kind") == "limit" and error.get("limit") in self._limits
        text = _text(error.get("traceback"))
        if not text and not told:
            text = f"{error.get('type') or error.get('kind')}: {_text(error.get('message'))}"
        if text:
            self.page.line((sanitise(self._cut(text.rstrip("\n"))), "red"), margin=("  ", None))
        hint = sanitise(for_command_line(_text(error.get("hint"))))
        if hint and hint not in text:
            self.page.line((hint, "red"), margin=("  ", None))

    def _changed(self, files: Sequence[Any]) -> None:
        named = [entry for entry in files if isinstance(entry, Mapping) and not hidden(_text(entry.get("path")))]
        for entry in named[:10]:
            sign = "-" if entry.get("removed") else "+"
            size = "" if entry.get("removed") else f"  {size_text(entry.get('size'))}"
            name = one_line(_text(entry.get("path")), max(self.page.width - 20, 20))
            self.page.line((f"  {sign} {name}{size}", "dim"))
        more = len(files) - min(len(named), 10)
        if more:
            self.page.line((f"  and {more} more", "dim"))

    def _aside(self, text: str) -> None:
        self._close_output()
        self.page.line((sanitise(text), "yellow"), margin=("  ", None))

    # What leaves the box.

    def _intended(self, data: Mapping[str, Any]) -> None:
        self._close_output()
        call = self._call_text(data)
        self._calls[_text(data.get("effect"))] = call
        self.page.block([(f"  {self._arrow} ", "dim"), (call, "dim")])
        self._pending = _text(data.get("effect"))

    def _call_text(self, data: Mapping[str, Any]) -> str:
        tool = one_line(_text(data.get("tool")), 40)
        shown = ", ".join(_arguments(data))
        kind = f" [{one_line(_text(data['class']), 20)}]" if data.get("class") else ""
        return f"{tool}({one_line(shown, max(self.page.width - len(tool) - len(kind) - 30, 10))}){kind}"

    def _break_call(self) -> None:
        """Something else is said before the call has come back."""
        if self._pending:
            self._pending = ""
            self.page.end_line()

    def _settled(self, data: Mapping[str, Any]) -> None:
        effect = _text(data.get("effect"))
        call = self._calls.pop(effect, effect)
        if self._pending != effect:
            self._close_output()
            self.page.block([(f"  {self._arrow} ", "dim"), (call, "dim")])
        self._pending = ""
        outcome = _text(data.get("outcome"))
        seconds = data.get("seconds")
        took = f" {seconds_text(seconds)}" if isinstance(seconds, (int, float)) else ""
        # Whoever finds out what became of it needs its name.
        name = f"  {one_line(effect, 80)}" if outcome == "unknown" else ""
        self.page.block([(f"  {outcome.replace('_', ' ')}{took}{name}", _OUTCOME_STYLES.get(outcome, "yellow"))])
        self.page.end_line()
        error = data.get("error")
        if isinstance(error, Mapping):
            message = f"{error.get('type') or error.get('code') or 'error'}: {_text(error.get('message'))}"
            self.page.line((one_line(message, 300), "yellow"), margin=("      ", None))

    def _reconciled(self, data: Mapping[str, Any]) -> None:
        outcome = one_line(_text(data.get("outcome")), 40)
        self._aside(f"{one_line(_text(data.get('effect')), 60)} is now known to be: {outcome}")

    # The box, limits and the end of the turn.

    def _box_created(self, data: Mapping[str, Any]) -> None:
        if data.get("replaces"):
            self._aside("a new box stands in its place")

    def _box_lost(self, data: Mapping[str, Any]) -> None:
        lost = f", with: {_names(data['lost'])}" if data.get("lost") else ""
        how = "ended by its own code" if data.get("reason") == "ended" else "lost"
        self._aside(f"the box was {how}{lost}")

    def _limit(self, data: Mapping[str, Any]) -> None:
        self._close_speech()
        text = _text(data.get("text") or data.get("message")) or f"the limit {data.get('limit')} was reached"
        self._limits.add(data.get("limit"))
        self._aside(one_line(text, 500))

    def _cancelling(self, data: Mapping[str, Any]) -> None:
        self._close_speech()
        self._aside(f"stopping: {one_line(_text(data.get('reason')), 200) or 'asked to'}")

    def _turn_answered(self, data: Mapping[str, Any]) -> None:
        self.finish()
        if not self._answered:
            return
        self.page.gap()
        self.page.line(("Answer", "bold green"))
        if self._answer_path:
            self.page.path(self._answer_path)
            return
        text = answer_text(data)
        self.page.line((sanitise(self._cut(text) if self._answer_cut else text), "bold"))

    def _turn_failed(self, data: Mapping[str, Any]) -> None:
        self.finish()
        self.page.gap()
        self._error("No answer", data.get("error"))

    def _turn_cancelled(self, data: Mapping[str, Any]) -> None:
        self.finish()
        self.page.gap()
        reason = one_line(_text(data.get("reason")), 200)
        self.page.line(("Stopped" + (f": {reason}" if reason else ""), "bold yellow"))
        if data.get("lost"):
            self._aside(f"lost with the box: {_names(data['lost'])}")

    def _error(self, what: str, error: Any) -> None:
        error = error if isinstance(error, Mapping) else {}
        self.page.line((f"{what}: ", "bold red"), (sanitise(_text(error.get("message"))), "red"))
        if error.get("hint"):
            self.page.line((sanitise(for_command_line(_text(error["hint"]))), None), margin=("  ", None))


_STREAM_STYLES: Final = {"stderr": "red", TOOL: "cyan"}
_OUTCOME_STYLES: Final = {"done": "dim green", "failed": "red"}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else str(value)


def _names(names: Any, most: int = 12) -> str:
    names = [one_line(_text(name), 40) for name in names]
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _marks(lines: Sequence[str]) -> list[str]:
    """What makes two pieces of code the same to a reader."""
    return [line.strip() for line in lines if line.strip()]


def _arguments(data: Mapping[str, Any]) -> list[str]:
    """As the call was written: by name, or, where they could not be bound to names, as they came."""
    arguments = data.get("arguments")
    if not isinstance(arguments, Mapping):
        return []
    args, kwargs = arguments.get("args"), arguments.get("kwargs")
    if _text(data.get("digest")).startswith("refused:") and isinstance(args, list) and isinstance(kwargs, Mapping):
        return [_brief(value) for value in args] + [f"{name}={_brief(value)}" for name, value in kwargs.items()]
    return [f"{name}={_brief(value)}" for name, value in arguments.items()]


def _brief(value: Any) -> str:
    """A tagged value as Python would write it, where that is short; the tag's name else."""
    if isinstance(value, Mapping) and "$" in value:
        return f"<{_text(value['$'])}>"
    text = repr(value)
    return text if len(text) <= 60 else text[:59] + "…"
