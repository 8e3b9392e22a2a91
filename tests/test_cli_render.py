from __future__ import annotations

import base64
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farhand import event as ev
from farhand.cli.advice import for_command_line
from farhand.cli.delivery import Delivered
from farhand.cli.display import Displays
from farhand.cli.page import Page, console_on
from farhand.cli.render import Renderer
from farhand.cli.summary import write_summary
from farhand.cli.tally import Tally, answer_text, seconds_text, size_text
from farhand.cli.terminal import ERASE_LINE
from farhand.event import Event


class Screen:
    """A page that is no terminal (so: no colours), of a given width; None: as a pipe has none."""

    def __init__(self, width: int | None = 80, **options: Any) -> None:
        self.file = io.StringIO()
        self.page = Page(console_on(self.file), width)
        self.renderer = Renderer(self.page, **options)
        self.tally = Tally()
        self._seq = 0

    def event(self, kind: str, **data: Any) -> None:
        self._seq += 1
        event = Event("ses_x", self._seq, kind, 1, 100.0 + self._seq, data)
        self.tally.event(event)
        self.renderer.event(event)

    def say(self, text: str, size: int = 3) -> None:
        for at in range(0, len(text), size):
            self.renderer.text(text[at : at + size])

    @property
    def text(self) -> str:
        self.renderer.finish()
        return self.file.getvalue()

    @property
    def lines(self) -> list[str]:
        return [line.rstrip() for line in self.text.splitlines()]


def action(screen: Screen, code: str = "x", **finished: Any) -> None:
    screen.event(ev.ACTION_STARTED, action="act_1", step=1, code=code)
    screen.event(ev.ACTION_FINISHED, action="act_1", **{"ok": True, "usage": {}, "output": {}, **finished})


def test_words_wrap_at_spaces_however_they_come() -> None:
    screen = Screen(40)
    screen.say("The quick brown fox jumps over the lazy dog and runs on.\n- a point\n", size=2)
    assert screen.lines == ["The quick brown fox jumps over the lazy", "dog and runs on.", "- a point"]


def test_words_are_not_spread_over_a_wide_terminal() -> None:
    screen = Screen(200)
    screen.say("word " * 60)
    assert max(map(len, screen.lines)) <= 100


def test_wide_characters_count_twice() -> None:
    screen = Screen(20)
    screen.say(" ".join(["漢" * 5] * 3))
    assert screen.lines == ["漢" * 5, "漢" * 5, "漢" * 5]


PATH = "/home/somebody/sessions/ses_0123456789abcdef/files/figure-1.png"


def test_a_path_is_never_broken() -> None:
    screen = Screen(24)
    screen.say(f"It is in {PATH} now, as you asked.\n")
    screen.event(ev.ACTION_WROTE, action="a", chunks=[["stdout", f"saved to {PATH[:30]}"]])
    screen.event(ev.ACTION_WROTE, action="a", chunks=[["stdout", f"{PATH[30:]} and more\n"]])
    assert sum(PATH in line for line in screen.lines) == 2
    assert screen.lines[0] == "It is in"


def test_nothing_is_broken_in_a_pipe() -> None:
    screen = Screen(None)
    screen.say("word " * 200 + "end\n")
    screen.event(ev.ACTION_WROTE, action="a", chunks=[["stdout", "x " * 500 + "\n"]])
    screen.event(ev.TURN_ANSWERED, turn="t", answer={"value": "y " * 500})
    assert screen.lines == [
        "word " * 200 + "end",
        f"  │ {'x ' * 500}".rstrip(),
        "",
        "Answer",
        ("y " * 500).rstrip(),
    ]


def test_code_is_left_to_the_terminal() -> None:
    line = "total = " + " + ".join(f"value_{n}" for n in range(20))
    screen = Screen(40)
    screen.say(f"```python\n{line}\n```\n")
    screen.event(ev.ACTION_STARTED, action="a", step=1, code=line)
    assert f"    {line}" in screen.lines


def test_streamed_code_is_shown_once() -> None:
    screen = Screen()
    screen.event(ev.MODEL_REQUESTED, step=1, attempt=1)
    screen.say("Let me see.\n```python\nfor x in y:\n    print(x)\n```\n")
    screen.event(ev.MODEL_REPLIED, step=1, text="…", usage={})
    screen.event(ev.ACTION_STARTED, action="a", step=1, code="for x in y:\n    print(x)\n")
    assert screen.lines == ["step 1", "Let me see.", "", "    for x in y:", "        print(x)", ""]


def test_code_that_differs_from_what_was_streamed_is_shown() -> None:
    screen = Screen()
    screen.say("```python\nx = 1\n```\n")
    screen.event(ev.ACTION_STARTED, action="a", step=1, code="y = 2")
    assert "    y = 2" in screen.lines


def test_a_reply_without_deltas_is_shown_from_its_event() -> None:
    screen = Screen()
    screen.event(ev.MODEL_REQUESTED, step=2, attempt=2)
    screen.event(ev.MODEL_REPLIED, step=2, text="I know.\n```python\nx\n```", usage={})
    assert screen.lines[:3] == ["step 2, attempt 2", "I know.", ""]
    assert "    x" in screen.lines


def test_a_reply_without_code_is_said_to_be_one() -> None:
    screen = Screen()
    for step in (1, 2):
        screen.event(ev.MODEL_REQUESTED, step=step, attempt=1)
        screen.event(ev.MODEL_REPLIED, step=step, text="Hm.", usage={})
    assert screen.text.count("no code was run") == 1


def test_streams_are_told_apart_without_colours() -> None:
    screen = Screen()
    screen.event(ev.ACTION_WROTE, action="a", chunks=[["stdout", "one\ntw"], ["stderr", "oh\n"], ["stdout", "o\n"]])
    assert screen.lines == ["  │ one", "  │ tw", "  ┆ oh", "  │ o"]


def test_an_output_line_goes_on_in_the_next_event() -> None:
    screen = Screen()
    screen.event(ev.ACTION_WROTE, action="a", chunks=[["stdout", "on"]])
    screen.event(ev.ACTION_WROTE, action="a", chunks=[["stdout", "e\n\ntwo\n"]], cut_bytes=1234)
    assert screen.lines == ["  │ one", "  │", "  │ two", "  1,234 bytes of output are not kept"]


def test_long_output_lines_keep_their_margin() -> None:
    screen = Screen(24)
    screen.event(ev.ACTION_WROTE, action="a", chunks=[["stdout", "abcd " * 9 + "\n"]])
    assert screen.lines == ["  │ abcd abcd abcd abcd", "  │ abcd abcd abcd abcd", "  │ abcd"]


def test_markup_of_a_guest_is_text() -> None:
    screen = Screen()
    screen.event(ev.ACTION_WROTE, action="a", chunks=[["stdout", "[bold]x[/bold] :smile: [/]\n"]])
    assert screen.lines == ["  │ [bold]x[/bold] :smile: [/]"]


def test_a_call_is_one_line() -> None:
    screen = Screen()
    screen.event(ev.EFFECT_INTENDED, effect="e", tool="search", arguments={"query": "cats", "n": 3})
    screen.event(ev.EFFECT_SETTLED, effect="e", outcome="done", seconds=0.512)
    assert screen.lines == ["  → search(query='cats', n=3)  done 0.51 s"]


def test_a_call_names_its_class_and_an_unknown_one_its_id() -> None:
    screen = Screen()
    call = {"effect": "eff_1", "tool": "pay", "arguments": {"to": "Ann"}, "class": "opaque", "digest": "0a"}
    screen.event(ev.EFFECT_INTENDED, **call)
    screen.event(ev.EFFECT_SETTLED, effect="eff_1", outcome="unknown", seconds=2)
    screen.event(ev.EFFECT_INTENDED, **{**call, "effect": "eff_2", "class": "idempotent"})
    screen.event(ev.EFFECT_SETTLED, effect="eff_2", outcome="done", seconds=2)
    assert screen.lines == [
        "  → pay(to='Ann') [opaque]  unknown 2.0 s  eff_1",
        "  → pay(to='Ann') [idempotent]  done 2.0 s",
    ]


def test_arguments_that_fit_no_signature_are_shown_as_they_were_written() -> None:
    screen = Screen()
    given = {"args": [3], "kwargs": {"on": True}}
    screen.event(ev.EFFECT_INTENDED, effect="e", tool="set_light", arguments=given, digest="refused:c1")
    screen.event(ev.EFFECT_SETTLED, effect="e", outcome="never_started", seconds=0)
    screen.event(ev.EFFECT_INTENDED, effect="f", tool="call", arguments=given, digest="0a")
    screen.event(ev.EFFECT_SETTLED, effect="f", outcome="done", seconds=0)
    assert screen.lines == [
        "  → set_light(3, on=True)  never started 0.00 s",
        "  → call(args=[3], kwargs={'on': True})  done 0.00 s",
    ]


def test_what_a_tool_prints_stands_apart() -> None:
    screen = Screen()
    screen.event(ev.EFFECT_INTENDED, effect="e", tool="search", arguments={})
    screen.renderer.tool_said("look")
    screen.renderer.tool_said("ing\n")
    screen.event(ev.EFFECT_SETTLED, effect="e", outcome="done", seconds=1)
    assert screen.lines == ["  → search()", "  ┊ looking", "  → search()  done 1.0 s"]


def test_calls_side_by_side_are_named_again_when_they_return() -> None:
    screen = Screen()
    for name in ("one", "two"):
        screen.event(ev.EFFECT_INTENDED, effect=name, tool=name, arguments={})
    for name in ("one", "two"):
        error = {"type": "OSError", "message": "gone\nfor ever"}
        screen.event(ev.EFFECT_SETTLED, effect=name, outcome="never_started", seconds=2.0, error=error)
    assert screen.lines == [
        "  → one()",
        "  → two()",
        "  → one()  never started 2.0 s",
        "      OSError: gone for ever",
        "  → two()  never started 2.0 s",
        "      OSError: gone for ever",
    ]


def test_arguments_are_cut_to_one_line() -> None:
    screen = Screen(60)
    screen.event(ev.EFFECT_INTENDED, effect="e", tool="send", arguments={"text": "a\n" * 500, "at": {"$": "date"}})
    screen.event(ev.EFFECT_SETTLED, effect="e", outcome="done", seconds=1)
    assert len(screen.lines) == 1
    assert len(screen.lines[0]) <= 60


def test_values_errors_files_and_losses() -> None:
    screen = Screen()
    traceback = 'Traceback (most recent call last):\n  File "<action 1>", line 1\nValueError: no\n'
    files = [{"path": "a.csv", "size": 1200}, {"path": "old", "removed": True}]
    error = {"kind": "exception", "type": "ValueError", "message": "no", "traceback": traceback, "hint": "try yes"}
    action(screen, value={"text/plain": "3"}, error=error, files=files, lost=["x", "y"])
    assert screen.lines[2:] == [
        "  => 3",
        "  Traceback (most recent call last):",
        '    File "<action 1>", line 1',
        "  ValueError: no",
        "  try yes",
        "  lost with the box: x, y",
        "  + a.csv  1.2 KB",
        "  - old",
    ]


def test_a_limit_is_named_once() -> None:
    screen = Screen()
    screen.event(ev.ACTION_STARTED, action="a", step=1, code="x")
    screen.event(ev.LIMIT_REACHED, limit="wall_s", allowed=2, action="a", message="the limit wall_s: 2 s")
    error = {"kind": "limit", "type": "LimitReached", "limit": "wall_s", "message": "the limit wall_s: 2 s"}
    screen.event(ev.ACTION_FINISHED, action="a", ok=False, error=error, usage={}, output={})
    assert screen.text.count("wall_s") == 1


def test_exits_and_lost_boxes() -> None:
    screen = Screen()
    action(screen, ok=False, error={"kind": "exit", "exit": 3, "message": ""})
    screen.event(ev.SANDBOX_LOST, box="sbx", reason="outside", lost=["df"])
    screen.event(ev.SANDBOX_CREATED, box="sbx_2", replaces="sbx")
    assert screen.lines[2:] == [
        "  the code ended with SystemExit(3)",
        "  the box was lost, with: df",
        "  a new box stands in its place",
    ]


def test_a_figure_is_named_with_its_file(tmp_path: Path) -> None:
    kept: list[tuple[str, int, bytes]] = []

    def keep(suffix: str, number: int, data: bytes) -> Path:
        kept.append((suffix, number, data))
        return tmp_path / f"figure-{number}.{suffix}"

    screen = Screen(400, keep=keep)
    png = base64.b64encode(b"PNG").decode()
    screen.event(ev.ACTION_WROTE, action="a", displays=[{"image/png": png, "text/plain": "<Figure>"}])
    screen.event(ev.ACTION_WROTE, action="a", displays=[{"text/plain": "a table"}, {"application/x\x1b": "?"}])
    assert screen.lines == [f"  [image/png] {tmp_path}/figure-1.png", "  a table", "  [application/x␛]"]
    assert kept == [("png", 1, b"PNG")]


def test_the_answer_stands_apart() -> None:
    screen = Screen()
    action(screen, code="final_answer(3)", value={"text/plain": "3"}, answer={"value": 3, "text": "3"})
    screen.event(ev.TURN_ANSWERED, turn="t", answer={"value": 3, "text": "3"})
    assert screen.lines == ["    final_answer(3)", "", "Answer", "3"]


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ({"value": "it's", "text": '"it\'s"'}, "it's"),
        ({"value": [1], "text": "[1]"}, "[1]"),
        ({"value": {"$": "tuple", "v": [1]}, "text": "(1,)"}, "(1,)"),
        (None, ""),
    ],
)
def test_an_answer_that_is_text_is_given_as_it_is(answer: Any, text: str) -> None:
    assert answer_text({"answer": answer}) == text


def test_an_answer_that_is_a_picture_is_a_file(tmp_path: Path) -> None:
    displays = Displays(tmp_path)
    screen = Screen(400, answer_file=displays.keep_answer)
    value = {"$": "image", "format": "png", "data": base64.b64encode(b"PNG").decode()}
    screen.event(ev.TURN_ANSWERED, turn="t", answer={"value": value, "text": "<PIL.Image.Image at 0x7f>"})
    assert screen.lines == ["Answer", f"{tmp_path}/answer-1.png"]
    assert (tmp_path / "answer-1.png").read_bytes() == b"PNG"


def test_a_long_value_is_cut_as_the_model_sees_it() -> None:
    text = "[" + "1,\n " * 100_000 + "1]"
    screen = Screen()
    action(screen, value={"text/plain": text})
    assert "[… 380,003 characters cut …]" in screen.text
    assert len(screen.text) < 50_000
    assert screen.renderer.was_cut
    whole = Screen(full=True)
    action(whole, value={"text/plain": text})
    assert len(whole.lines) > 100_000


def test_hints_speak_of_options() -> None:
    screen = Screen(200)
    hint = "Raise it with Limits(steps=…), or continue the session."
    screen.event(ev.TURN_FAILED, turn="t", error={"message": "the limit `steps` was reached", "hint": hint})
    assert 'Raise it with --max-steps N, or go on with it: farhand run --session last "…".' in screen.text
    assert "Limits(" not in screen.text


@pytest.mark.parametrize(
    ("hint", "shown"),
    [
        ("Raise it with Limits(turn_s=…).", "Raise it with --timeout S."),
        ("Raise it with Limits(tokens=…).", "Raise it from Python with Limits(tokens=…)."),
        (
            "Set OPENAI_API_KEY, or pass base_url=... of a server that needs none.",
            "Set OPENAI_API_KEY, or choose a server: --model openai:NAME@URL.",
        ),
        ("List the packages that the code needs, for example ['scipy', 'sklearn'].", "Name each: --import scipy."),
        ("Choose another FARHAND_HOME.", "Choose another FARHAND_HOME."),
    ],
)
def test_advice_for_the_command_line(hint: str, shown: str) -> None:
    assert for_command_line(hint) == shown


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    @property
    def plain(self) -> str:
        return re.sub(r"\x1b\[[0-9;]*m", "", self.getvalue())


def test_a_silent_model_is_said_to_be_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    renderer = Renderer(Page(console_on(terminal), 80))
    renderer.event(Event("ses_x", 1, ev.MODEL_REQUESTED, 1, 0.0, {"step": 1, "attempt": 1}))
    renderer.waits("gpt-5", 100.0)
    renderer.tick(100.5)
    assert "waiting" not in terminal.getvalue()
    renderer.tick(112.2)
    assert terminal.plain.endswith("waiting for gpt-5… 12 s")
    renderer.text("Well.\n")
    renderer.tick(120.0)
    assert terminal.plain.endswith(f"12 s{ERASE_LINE}Well.\n")


def test_failures_and_stops_say_why() -> None:
    screen = Screen()
    screen.event(ev.MODEL_FAILED, step=1, attempt=1, error={"message": "503", "hint": "wait"})
    screen.event(ev.TURN_FAILED, turn="t", error={"code": "x", "message": "no code", "hint": "a larger model"})
    screen.event(ev.TURN_CANCELLED, turn="t", reason="the user", lost=["x"])
    text = screen.text
    for expected in ("the model failed: 503", "No answer: no code", "a larger model", "Stopped: the user", "box: x"):
        assert expected in text


def test_the_users_words_are_shown_only_when_asked_for() -> None:
    for asked in (False, True):
        screen = Screen(asked=asked)
        screen.event(ev.MESSAGE_RECEIVED, id="m", role="user", text="Why?")
        assert ("Why?" in screen.text) is asked


def test_the_summary_says_where_files_are_and_what_it_cost() -> None:
    screen = Screen()
    screen.event(ev.MESSAGE_RECEIVED, text="go")
    screen.event(ev.MODEL_REPLIED, step=1, text="", usage={"input_tokens": 1000, "output_tokens": 20})
    action(screen, files=[{"path": "a.csv", "size": 10}, {"path": "b.csv", "size": 10}, {"path": "c", "size": 1}])
    action(screen, files=[{"path": "c", "removed": True}])
    screen.event(ev.TURN_ANSWERED, turn="t", answer={"value": "x"})
    went = [Delivered("a.csv", "./a.csv"), Delivered("b.csv", None, "no")]
    write_summary(screen.page, screen.tally, Path("/h"), went)
    assert screen.lines[-5:] == [
        "files    /h/sessions/ses_x/files",
        "         a.csv  10 B  → ./a.csv",
        "         b.csv  10 B  not copied: no",
        "cost     1,000 tokens in, 20 out · 1 step · 6.0 s",
        "session  ses_x",
    ]


@pytest.mark.parametrize(("size", "text"), [(999, "999 B"), (1200, "1.2 KB"), (5e8, "500 MB"), (None, "0 B")])
def test_sizes(size: Any, text: str) -> None:
    assert size_text(size) == text


@pytest.mark.parametrize(("seconds", "text"), [(0.123, "0.12 s"), (3.21, "3.2 s"), (125, "2 min 5 s")])
def test_seconds(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


# Nothing that a guest can put into an event may reach the terminal as it is, or break the page.

KEYS = ["kind", "traceback", "text/plain", "image/png", "\x1b", "$"]
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet="\x1b]52;c\x07\r\n\t\u202e[/b]a", max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=3),
    max_leaves=6,
)
TEXTS = st.text(alphabet="\x1b]52;c\x07\r\n\t\u202e[/b]a```", max_size=40)


def shown(feed: Callable[[Screen], None]) -> str:
    screen = Screen(30)
    feed(screen)
    return screen.text


def clean(text: str) -> bool:
    return not any(one in text for one in "\x1b\x07\r\u202e")


@given(TEXTS, TEXTS, TEXTS)
@settings(max_examples=60)
def test_no_guest_text_reaches_the_terminal_unchanged(first: str, second: str, third: str) -> None:
    def feed(screen: Screen) -> None:
        screen.renderer.reasoning(third)
        screen.renderer.text(first)
        screen.renderer.text(second)
        screen.event(ev.ACTION_STARTED, action=first, step=1, code=second)
        screen.event(ev.EFFECT_INTENDED, effect=first, tool=second, arguments={first: second, third: [first]})
        screen.event(ev.ACTION_WROTE, action=first, chunks=[["stdout", first], ["stderr", second], [third, first]])
        screen.event(ev.ACTION_WROTE, action=first, displays=[{"text/plain": first}, {first: second}])
        screen.event(ev.EFFECT_SETTLED, effect=first, outcome=third, error={"type": first, "message": second})
        error = {"kind": first, "type": second, "message": third, "traceback": first, "hint": second, "limit": third}
        files = [{"path": second, "size": 3}]
        finished = {"value": {"text/plain": first}, "error": error, "lost": [first, second], "files": files}
        screen.event(ev.ACTION_FINISHED, action=first, ok=False, usage={}, output={}, **finished)
        screen.event(ev.LIMIT_REACHED, limit=first, text=second)
        screen.event(ev.SANDBOX_LOST, box="b", reason=first, lost=[second])
        screen.event(ev.TURN_ANSWERED, turn="t", answer={"value": first})
        screen.event(ev.TURN_FAILED, turn="t", error={"message": second, "hint": third})
        write_summary(screen.page, screen.tally, Path("/h"))

    assert clean(shown(feed))


@given(JUNK, JUNK, st.lists(JUNK, max_size=3))
@settings(max_examples=60)
def test_what_a_box_makes_up_does_not_break_the_page(value: Any, error: Any, listed: list[Any]) -> None:
    def feed(screen: Screen) -> None:
        screen.event(ev.ACTION_STARTED, action="a", step=1, code="x")
        screen.event(ev.ACTION_WROTE, action="a", displays=listed)
        action(screen, value=value, error=error, lost=listed)

    assert clean(shown(feed))
