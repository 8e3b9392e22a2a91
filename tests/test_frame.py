"""Frames: lines that are one, lines that are none."""

from __future__ import annotations

import time

import pytest

from farhand.sandbox.runner.bounds import FRAME_BYTES
from farhand.sandbox.runner.frame import FrameError, Lines, dump_frame, parse_frame


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\n",
        b"null\n",
        b"5\n",
        b"[]\n",
        b"{}\n",
        b'{"t":5}\n',
        b'{"t":"x","a":NaN}\n',
        b'{"t":"x","a":-Infinity}\n',
        b'{"t":"x","a":1e999}\n',
        b'{"t":"x","a":' + b"9" * 400 + b".5}\n",
        b'{"t":"x","a":' + b"9" * 10_000 + b"}\n",
        b'{"t":"x","a":"\\ud800"}\n',
        b'{"t":"x","\\uDC00":1}\n',
        b'{"t":"x","a":' + b"[" * 200 + b"]" * 200 + b"}\n",
        b'{"t":"x","a":' + b"[" * 100_000 + b"\n",
        b'{"t":"x","a":' + b'{"a":' * 100_000 + b"\n",
        b'{"t":"x","a":"\xc3\xa9"}\n',
        b'{"t":"x"\n',
        b'{"t":"x"}{}\n',
        b'{"t":"x","a":"' + b"a" * FRAME_BYTES + b'"}\n',
    ],
)
def test_lines_that_are_no_frames(line: bytes) -> None:
    with pytest.raises(FrameError):
        parse_frame(line)


@pytest.mark.parametrize(
    "line",
    [
        b'{"t":"x","a":' + b"[" * 199 + b"]" * 199 + b"}\n",
        b'{"t":"x","a":"' + b"[" * 10_000 + b'"}\n',
        b'{"t":"x","a":"\\"' + b"[{" * 10_000 + b'\\\\"}\n',
        b'{"t":"x","a":"\\ud83d\\ude00"}\n',
        b'{"t":"x","a":1e308,"b":[[],[],{}]}\n',
        b'{"t":"x","a":[' + b"[]," * 100_000 + b"1]}\n",
    ],
)
def test_lines_that_are_frames(line: bytes) -> None:
    assert dump_frame(parse_frame(line))


def test_checking_the_worst_line_takes_no_longer_than_a_step_may() -> None:
    lines = [
        b'{"t":"x","a":[' + b"[]," * 340_000 + b"1]}\n",
        b'{"t":"x","a":"' + b'[\\"' * 340_000 + b'"}\n',
        b'{"t":"x","a":[' + b'"[",' * 250_000 + b"1]}\n",
    ]
    for line in lines:
        started = time.process_time()
        parse_frame(line)
        assert time.process_time() - started < 0.5


def test_a_frame_that_cannot_be_sent() -> None:
    for bad in ({"t": "x", "a": float("nan")}, {"t": "x", "a": {1, 2}}, {"t": "x", "a": "x" * FRAME_BYTES}):
        with pytest.raises(FrameError):
            dump_frame(bad)


def test_lines_are_found_whatever_the_pieces() -> None:
    for step in (1, 2, 7, 100):
        lines, text, found = Lines(), b"one\ntwo\n\nlast", []
        for start in range(0, len(text), step):
            lines.feed(text[start : start + step])
            while (line := lines.take()) is not None:
                found.append(line)
        assert found == [b"one\n", b"two\n", b"\n"]


# --- reactor ---
