from __future__ import annotations

import io
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farhand.cli.terminal import ERASE_LINE, GuestStream, Output, one_line, sanitise

NASTY = st.text(
    alphabet=st.one_of(
        st.sampled_from("\x1b[]0;mKH\x07\r\n\t\x9b\x9d\u202e\u2066\u200f\u2028\U000e0041\ud800ab"),
        st.characters(exclude_categories=()),
    ),
    max_size=60,
)


def harmless(text: str) -> bool:
    """No character of which a terminal, or a reader's eye, makes something else than what is there."""
    bidi = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
    return not any(
        (unicodedata.category(one) in ("Cc", "Cs", "Zl", "Zp") and one not in "\n\t")
        or unicodedata.bidirectional(one) in bidi
        or one in "\u200e\u200f\u061c"
        or 0xE0000 <= ord(one) < 0xE0080
        for one in text
    )


@given(NASTY)
def test_nothing_a_terminal_obeys_survives(text: str) -> None:
    assert harmless(sanitise(text))
    assert harmless(one_line(text, 40))
    assert len(one_line(text, 40)) <= 40
    assert "\n" not in one_line(text, 40)


@given(st.lists(NASTY, max_size=6), st.booleans())
def test_nothing_survives_when_it_comes_in_pieces(pieces: list[str], bars: bool) -> None:
    stream = GuestStream(bars=bars)
    assert harmless("".join([stream.feed(piece).text for piece in pieces]) + stream.flush())


@given(NASTY, st.integers(0, 60))
def test_where_a_text_is_cut_makes_no_difference(text: str, at: int) -> None:
    stream = GuestStream()
    shown = stream.feed(text[:at]).text + stream.feed(text[at:]).text + stream.flush()
    whole = GuestStream()
    assert shown == whole.feed(text).text + whole.flush()


@given(st.text(alphabet=st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=80))
def test_plain_text_is_left_alone(text: str) -> None:
    assert sanitise(text + "\n\té 漢 🙂") == text + "\n\té 漢 🙂"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b]52;c;ZXZpbA==\x07", "␛]52;c;ZXZpbA==␇"),
        ("\x1b]0;title\x1b\\", "␛]0;title␛\\"),
        ("\x1b[2J\x1b[H", "␛[2J␛[H"),
        ("\x1b[?1049h", "␛[?1049h"),
        ("\x9b31m", "‹9B›31m"),
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("\x1b\x1b[0m[2J", "␛␛[2J".replace("␛␛", "␛", 1)),
        ("abc\u202edef", "abc‹U+202E›def"),
        ("a\0b\x08c\x7f", "a␀b␈c␡"),
        ("a\r\nb\rc", "a\nb␍c"),
        ("\ud83d", "‹D83D›"),
    ],
)
def test_what_stands_in_its_place(text: str, shown: str) -> None:
    assert sanitise(text) == shown


def test_a_progress_bar_shows_its_last_state() -> None:
    stream = GuestStream(bars=True)
    first = stream.feed("start\n10%\r20%\r30%")
    assert (first.text, first.over) == ("start\n30%", False)
    second = stream.feed("\r40%\r")
    assert (second.text, second.over) == ("40%", True)
    last = stream.feed("\ndone")
    assert (last.text, last.over) == ("\ndone", False)


def test_a_colour_cut_in_two_is_dropped_all_the_same() -> None:
    stream = GuestStream()
    assert stream.feed("a\x1b[3").text == "a"
    assert stream.feed("1mb").text == "b"
    assert stream.feed("\x1b").text == ""
    assert stream.flush() == "␛"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_output_into_a_pipe_is_exact() -> None:
    pipe = io.StringIO()
    output = Output(pipe)
    output.write("a\x1b[2J\rb\x9d")
    output.finish()
    assert pipe.getvalue() == "a\x1b[2J\rb\x9d"


def test_output_on_a_terminal_erases_only_the_unfinished_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    output = Output(terminal)
    output.write("one\n10%")
    output.write("\r20%\x1b]0;x\x07")
    assert terminal.getvalue() == f"one\n10%{ERASE_LINE}20%␛]0;x␇"


def test_output_on_a_dumb_terminal_begins_a_new_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    terminal = Terminal()
    output = Output(terminal)
    output.write("10%")
    output.write("\r20%")
    assert terminal.getvalue() == "10%\n20%"
