from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farhand.cli.speech import CODE, END, PROSE, Speech


def told_apart(*deltas: str) -> tuple[str, list[str]]:
    """The words, and the blocks of code."""
    speech = Speech()
    words, blocks, block = "", [], []
    pieces = [piece for delta in deltas for piece in speech.feed(delta)] + list(speech.finish())
    for kind, text in pieces:
        if kind == PROSE:
            words += text
        elif kind == CODE:
            block.append(text)
        elif kind == END:
            blocks.append("\n".join(block))
            block = []
    assert not block, "a block was left open"
    return words, blocks


REPLY = "First I look.\n\n```python\nx = 1\n\nprint(x)\n```\nThat is all.\n"


@given(st.lists(st.integers(0, len(REPLY)), max_size=12))
def test_however_a_reply_is_cut_it_is_told_apart_the_same(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(REPLY)]
    deltas = [REPLY[a:b] for a, b in itertools.pairwise(edges)]
    assert told_apart(*deltas) == ("First I look.\n\nThat is all.\n", ["x = 1\n\nprint(x)"])


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("only words", ("only words", [])),
        ("```py\nx\n```", ("", ["x"])),
        ("```\nx\n```", ("", ["x"])),
        ("```python\nx = 1", ("", ["x = 1"])),
        ("```json\n{}\n```\nso\n```python\nx\n```", ("```json\n{}\n```\nso\n", ["x"])),
        ("<code>\nx\n</code>", ("", ["x"])),
        ("<code>x = 1\ny</code>\nso", ("so", ["x = 1\ny"])),
        ("a `b` c\n``not a fence\n", ("a `b` c\n``not a fence\n", [])),
        ("```python\r\nx\r\n```\r\n", ("", ["x"])),
        ("  ```python\n  x\n  ```\n", ("", ["  x"])),
        ("```python\na\n```\nand\n```python\nb\n```", ("and\n", ["a", "b"])),
    ],
)
def test_replies(reply: str, expected: tuple[str, list[str]]) -> None:
    assert told_apart(reply) == expected
    assert told_apart(*reply.replace("\r\n", "\n")) == expected


def test_words_come_at_once_and_a_possible_fence_waits() -> None:
    speech = Speech()
    assert list(speech.feed("Hel")) == [(PROSE, "Hel")]
    assert list(speech.feed("lo\n``")) == [(PROSE, "lo\n")]
    assert list(speech.feed("`pyth")) == []
    assert list(speech.feed("on\nx = 1\ny")) == [(CODE, "x = 1")]
    assert list(speech.finish()) == [(CODE, "y"), (END, "")]
    assert list(speech.feed("next")) == [(PROSE, "next")]
