"""What a person at a terminal sees of a session: live, from events and deltas, or again, from the log alone."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from farhand import event as ev
from farhand.cli.page import Highlighter, Page, Piece
from farhand.cli.speech import CODE, END, Speech
from farhand.cli.tally import answer_text, hidden, number, seconds_text, short_path, size_text
from farhand.cli.terminal import GuestStream, one_line, sanitise
from farhand.event import Event

Keep = Callable[[str, int, bytes], "Path | None"]
"""Called with suffix, number within the session and bytes of a display; gives the file it is in."""

_CODE_MARGIN: Final = "    "
_SUFFIXES: Final = {
    "image/png": "png",
    "image/jpeg": "jpg",
    "image/gif": "gif",
    "image/svg+xml": "svg",
    "text/html": "html",
}


class Renderer:
    """Feed it everything in order: `text` and `reasoning` for deltas, `event` for events. Then `finish`.

    With `asked` the user's messages are shown too, with `answered` the answer.
    """

    def __init__(self, page: Page, *, asked: bool = False, answered: bool = True, keep: Keep | None = None) -> None:
        self.page = page
        self._asked, self._answered, self._keep = asked, answered, keep
        self._highlighter = Highlighter(page.console)
        # Two bars, so that the streams are told apart without colours too.
        bar, error_bar = ("│", "┆") if page.unicode else ("|", "!")
        self._out_margin: Piece = (f"  {bar} ", "dim")
        self._error_margin: Piece = (f"  {error_bar} ", "red")
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
        self._displays = 0
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
        handler = self._handlers.get(event.type)
        if handler is not None:
            handler(event.data)

    def note(self, text: str) -> None:
        """A quiet line of ours."""
        self._close_output()
        self.page.end_line()
        self.page.prose(sanitise(text), "yellow")
        self.page.end_line()

    def finish(self) -> None:
        self._close_speech()
        self._close_output()
        self.page.end_line()

    # What the model says.

    def reasoning(self, delta: str) -> None:
        self._reasoning = True
        self.page.prose(self._words.feed(delta).text, "dim italic")

    def text(self, delta: str) -> None:
        if self._reasoning:
            self._reasoning = False
            self.page.gap()
        self._spoke = True
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
        self.page.line(*self._highlighter.last(self._block), margin=(_CODE_MARGIN, None))
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
                    self.page.line(*pieces, margin=(_CODE_MARGIN, None))
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
        self.page.block([(shown.text, "red" if stream == "stderr" else None)], self._margin(stream))

    def _margin(self, stream: str) -> Piece:
        return self._error_margin if stream == "stderr" else self._out_margin

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
        kinds = [kind for kind in bundle if kind != "text/plain"]
        for kind in kinds:
            path = self._save(kind, bundle[kind])
            if path is not None:
                self.page.path(short_path(path), (f"  [{one_line(kind, 40)}] ", "cyan"))
                return
        plain = _text(bundle.get("text/plain"))
        if plain:
            self.page.line((sanitise(plain), "cyan"), margin=("  ", None))
        elif kinds:
            self.page.line(("  ", None), (f"[{one_line(', '.join(map(str, kinds)), 60)}]", "cyan"))

    def _save(self, kind: str, content: Any) -> Path | None:
        if self._keep is None or kind not in _SUFFIXES or not isinstance(content, str):
            return None
        if kind.startswith("text/") or kind.endswith("xml"):
            return self._keep(_SUFFIXES[kind], self._displays, content.encode("utf-8", "backslashreplace"))
        try:
            return self._keep(_SUFFIXES[kind], self._displays, base64.b64decode(content))
        except (binascii.Error, ValueError):
            return None

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
        rich = [kind for kind in bundle if kind in _SUFFIXES and kind != "text/html"]
        if rich:
            self._display(bundle)
        plain = sanitise(_text(bundle.get("text/plain")))
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
            self.page.line((sanitise(text.rstrip("\n")), "red"), margin=("  ", None))
        hint = sanitise(_text(error.get("hint")))
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
        arguments = data.get("arguments")
        shown = ", ".join(f"{name}={_brief(value)}" for name, value in _bound(arguments))
        return f"{tool}({one_line(shown, max(self.page.width - len(tool) - 30, 10))})"

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
        self.page.block([(f"  {outcome.replace('_', ' ')}{took}", _OUTCOME_STYLES.get(outcome, "yellow"))])
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
        self.page.line((sanitise(answer_text(data)), "bold"))

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
            self.page.line((sanitise(_text(error["hint"])), None), margin=("  ", None))


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


def _bound(arguments: Any) -> list[tuple[str, Any]]:
    return list(arguments.items()) if isinstance(arguments, Mapping) else []


def _brief(value: Any) -> str:
    """A tagged value as Python would write it, where that is short; the tag's name else."""
    if isinstance(value, Mapping) and "$" in value:
        return f"<{_text(value['$'])}>"
    text = repr(value)
    return text if len(text) <= 60 else text[:59] + "…"
