"""A console written piece by piece: words wrap, blocks have a margin on every line, and the column is known.

Lines break where a space was and nowhere else: what is longer than a line, a path or an id, is left to the terminal,
which keeps it whole for who copies it. Into a pipe nothing is broken.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, TextIO, TypeAlias

from rich.cells import cell_len
from rich.console import Console
from rich.style import Style
from rich.syntax import Syntax

from farhand.cli.terminal import ERASE_LINE, can_erase, is_terminal, one_line, sanitise, width_of

Piece: TypeAlias = tuple[str, "str | Style | None"]

PROSE_COLUMNS: Final = 100
TAB: Final = 8
UNBROKEN: Final = 1_000_000
"""The width of what is no terminal."""
_TOKENS = re.compile(r"\n|[ \t]+|[^ \t\n]+")
_SPACED = re.compile(r" +|[^ ]+")


def console_on(stream: TextIO) -> Console:
    """A console that takes text as it is: no markup, no emoji names, no guessing at what to colour."""
    return Console(file=stream, markup=False, emoji=False, highlight=False, soft_wrap=True)


class Page:
    """Nothing that a terminal obeys gets through. Text whose lines matter is sanitised before (`terminal.sanitise`).

    `width` is the terminal's own if it is not given.
    """

    def __init__(self, console: Console, width: int | None = None) -> None:
        self.console = console
        self._width = width
        self._terminal = is_terminal(console.file)
        self.unicode = (console.encoding or "").lower().startswith("utf")
        self._erases = self._terminal and can_erase()
        self._status = False
        self._column = 0
        self._spaced = True
        """Whether a line may be broken here: it is empty, or a space was written last."""
        self._blank = True
        self._word = ""
        self._space = ""
        self._prose_style: str | None = None

    @property
    def width(self) -> int:
        if self._width is not None:
            return max(self._width, 20)
        return max(width_of(self.console.file), 20) if self._terminal else UNBROKEN

    def prose(self, text: str, style: str | None = None) -> None:
        """Words, wrapped at spaces. The last word is held until it is whole: `end_line` writes it."""
        for token in _TOKENS.findall(text):
            if token == "\n":
                self._say_word(style)
                self._space = ""
                self._newline()
            elif token[0] in " \t":
                self._say_word(style)
                self._space += token.expandtabs(4)
            else:
                self._word += token
        self._prose_style = style

    def _say_word(self, style: str | None) -> None:
        word, self._word = self._word, ""
        if not word:
            return
        width = self.width if self.width == UNBROKEN else min(self.width, PROSE_COLUMNS)
        if self._column and self._column + cell_len(self._space) + cell_len(word) > width:
            self._newline()
            self._space = ""
        if self._space:
            self._put(self._space, style)
            self._space = ""
        self.block([(word, style)])

    def block(self, pieces: Iterable[Piece], margin: Piece = ("", None), *, whole: bool = False) -> None:
        """Text with the margin before every line. A line may be continued by a later call.

        Lines longer than the width are broken at spaces, or left to the terminal if they are to stay `whole`.
        """
        for text, style in pieces:
            for number, line in enumerate(text.split("\n")):
                if number:
                    if not self._column and margin[0].strip():
                        self._put(margin[0].rstrip(), margin[1])
                    self._newline()
                if line:
                    self._run(self._untabbed(line, margin), style, margin, whole)

    def _untabbed(self, line: str, margin: Piece) -> str:
        indent = cell_len(margin[0])
        first, *others = line.split("\t")
        shown, column = [first], max(self._column, indent) - indent + cell_len(first)
        for part in others:
            space = TAB - column % TAB
            shown += [" " * space, part]
            column += space + cell_len(part)
        return "".join(shown)

    def _run(self, line: str, style: str | Style | None, margin: Piece, whole: bool) -> None:
        if not self._column:
            self._put(*margin)
        width, used = self.width, self._column
        if whole or used + cell_len(line) <= width:
            self._put(line, style)
            return
        part, spaced = "", self._spaced
        for token in _SPACED.findall(line):
            length = cell_len(token)
            # A word that began in an earlier piece goes on where it is.
            if used + length > width and used > cell_len(margin[0]) and (spaced or token[0] == " "):
                self._put(part, style)
                self._newline()
                self._put(*margin)
                part, used = "", self._column
                if token[0] == " ":
                    spaced = True
                    continue
            part += token
            used = (used + length) % width if used + length > width else used + length
            spaced = token[0] == " "
        self._put(part, style)

    def line(self, *pieces: Piece, margin: Piece = ("", None), whole: bool = False) -> None:
        """A line of its own, or several when it is too long."""
        self.end_line()
        self.block(pieces, margin, whole=whole)
        self.end_line()

    def row(self, head: Piece, *pieces: Piece) -> None:
        """A line with a head; what does not fit goes on below the pieces."""
        self.end_line()
        self._put(*head)
        self.block(pieces, (" " * cell_len(head[0]), None))
        self.end_line()

    def path(self, text: str, *before: Piece) -> None:
        """A path on a line of its own, not cut: the terminal's own wrapping leaves it whole for who copies it."""
        self.end_line()
        for piece in (*before, (text, None)):
            self._put(*piece)
        self.end_line()

    def begin_again(self) -> None:
        """The unfinished line is replaced by what comes next (a progress bar)."""
        self._say_word(None)
        if self._column and self._erases:
            self._erase()
        else:
            self.end_line()

    def status(self, text: str) -> None:
        """A line for the time being: it takes the last one's place and goes when anything else is written."""
        if self._erases and (self._status or not (self._column or self._word)):
            self._erase()
            self.console.out(one_line(text, self.width - 1), style="dim", end="", highlight=False)
            self._status = True

    def _erase(self) -> None:
        # Rich would take the control characters out.
        self.console.file.write(ERASE_LINE)
        self._column, self._status = 0, False

    def clear_status(self) -> None:
        if self._status:
            self._erase()
            self.console.file.flush()

    def end_line(self) -> None:
        self.clear_status()
        self._say_word(self._prose_style)
        self._space = ""
        if self._column:
            self._newline()

    def gap(self) -> None:
        """One blank line, unless one stands here already."""
        self.end_line()
        if not self._blank:
            self._newline()

    def _newline(self) -> None:
        if self._status:
            self._erase()
        self.console.out("", highlight=False)
        self._blank = not self._column
        self._column = 0
        self._spaced = True

    def _put(self, text: str, style: str | Style | None) -> None:
        if text:
            if self._status:
                self._erase()
            text = sanitise(text)
            self.console.out(text, style=style, end="", highlight=False)
            self._column += cell_len(text)
            if self._column > self.width:
                self._column = (self._column - 1) % self.width + 1
            self._spaced = text.endswith(" ")
            self._blank = False


class Highlighter:
    """Python in the terminal's own colours."""

    LINES: Final = 300
    """Streamed code is coloured anew with every line, for the sake of strings over several lines; up to here."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._syntax = Syntax("", "python", theme="ansi_dark", background_color="default")

    def lines(self, code: str) -> list[list[Piece]]:
        """The pieces of each line."""
        text = self._syntax.highlight(code)
        text.rstrip()
        return [
            [(segment.text, segment.style) for segment in line.render(self._console) if segment.text != "\n"]
            for line in text.split("\n", allow_blank=True)
        ]

    def last(self, lines: list[str]) -> list[Piece]:
        """The pieces of the last of these lines."""
        if len(lines) > self.LINES or not lines[-1].strip():
            return [(lines[-1], None)]
        return self.lines("\n".join(lines))[-1]
