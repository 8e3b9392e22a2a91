"""A model's reply, told apart into words and code while it still comes.

Only for showing: what runs is decided by `farhand.action` on the whole reply, and shown again where it differs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

PROSE: Final = "prose"
"""A piece of the words, as it comes."""
CODE: Final = "code"
"""One whole line of code, without its end."""
END: Final = "end"
"""The code block is over."""

_FENCE, _TAG, _TAG_END = "```", "<code>", "</code>"
_PYTHON: Final = frozenset({"", "python", "py", "python3", "ipython"})


class Speech:
    def __init__(self) -> None:
        self._line = ""
        self._begun = False
        self._code = False
        self._other = False

    def feed(self, text: str) -> Iterator[tuple[str, str]]:
        """(kind, text) pairs. The start of a line is held until it is clear whether it opens a block."""
        for piece in text.splitlines(keepends=True) if "\r" not in text else _lines(text):
            self._line += piece
            ends = self._line.endswith("\n")
            if self._code:
                if ends:
                    yield from self._code_line(self._take().rstrip("\n"))
            elif self._begun or not _may_open(self._line, ends):
                yield PROSE, self._take()
                self._begun = not ends
            elif ends:
                yield from self._open(self._take())

    def finish(self) -> Iterator[tuple[str, str]]:
        """What was held, and the end of an open block; the next reply starts anew."""
        line = self._take()
        if self._code:
            if line.strip():
                yield from self._code_line(line)
            if self._code:
                yield END, ""
        elif line:
            yield PROSE, line
        self._begun = self._code = self._other = False

    def _take(self) -> str:
        line, self._line = self._line, ""
        return line

    def _open(self, line: str) -> Iterator[tuple[str, str]]:
        start = line.strip()
        if start.startswith(_TAG) and not self._other:
            self._code = True
            rest = start.removeprefix(_TAG)
            if rest:
                yield from self._code_line(rest)
        elif self._other or start.removeprefix(_FENCE).strip().lower() not in _PYTHON:
            # A block in another language is words; its last fence must not be taken for a first one.
            self._other = not self._other
            yield PROSE, line
        else:
            self._code = True

    def _code_line(self, line: str) -> Iterator[tuple[str, str]]:
        bare = line.strip()
        if bare.startswith(_FENCE):
            self._code = False
            yield END, ""
        elif bare.endswith(_TAG_END):
            self._code = False
            last = line.rstrip().removesuffix(_TAG_END)
            if last.strip():
                yield CODE, last
            yield END, ""
        else:
            yield CODE, line


def _lines(text: str) -> Iterator[str]:
    yield from text.replace("\r\n", "\n").splitlines(keepends=True)


def _may_open(line: str, whole: bool) -> bool:
    start = line.strip() if whole else line.lstrip()
    if start.startswith((_FENCE, _TAG)):
        return True
    return not whole and (_FENCE.startswith(start) or _TAG.startswith(start))
