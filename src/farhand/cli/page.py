"""A console written piece by piece: words wrap, blocks have a margin on every line, and the column is known."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, TextIO, TypeAlias

from rich.cells import cell_len, get_character_cell_size
from rich.console import Console
from rich.style import Style
from rich.syntax import Syntax

from farhand.cli.terminal import ERASE_LINE, can_erase, is_terminal, sanitise

Piece: TypeAlias = tuple[str, "str | Style | None"]

PROSE_COLUMNS: Final = 100
TAB: Final = 8
_TOKENS = re.compile(r"\n|[ \t]+|[^ \t\n]+")


def console_on(stream: TextIO) -> Console:
    """A console that takes text as it is: no markup, no emoji names, no guessing at what to colour."""
    return Console(file=stream, markup=False, emoji=False, highlight=False, soft_wrap=True)


class Page:
    """Nothing that a terminal obeys gets through. Text whose lines matter is sanitised before (`terminal.sanitise`)."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.unicode = (console.encoding or "").lower().startswith("utf")
        self._erases = is_terminal(console.file) and can_erase()
        self._column = 0
        self._blank = True
        self._word = ""
        self._space = ""
        self._prose_style: str | None = None

    @property
    def width(self) -> int:
        return max(self.console.width, 20)

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
        width = min(self.width, PROSE_COLUMNS)
        if self._column and self._column + cell_len(self._space) + cell_len(word) > width:
            self._newline()
            self._space = ""
        if self._space:
            self._put(self._space, style)
            self._space = ""
        self.block([(word, style)])

    def block(self, pieces: Iterable[Piece], margin: Piece = ("", None)) -> None:
        """Text cut at the width, with the margin before every line. A line may be continued by a later call."""
        for text, style in pieces:
            for number, line in enumerate(text.split("\n")):
                if number:
                    if not self._column and margin[0].strip():
                        self._put(margin[0].rstrip(), margin[1])
                    self._newline()
                self._run(line, style, margin)

    def _run(self, line: str, style: str | Style | None, margin: Piece) -> None:
        indent = cell_len(margin[0])
        for number, part in enumerate(line.split("\t")):
            if number:
                part = " " * (TAB - (max(self._column, indent) - indent) % TAB) + part
            while part:
                if not self._column:
                    self._put(*margin)
                fits = _fitting(part, max(self.width - self._column, 1))
                if not fits and self._column > indent:
                    self._newline()
                    continue
                fits = fits or 1
                self._put(part[:fits], style)
                part = part[fits:]
                if part:
                    self._newline()

    def line(self, *pieces: Piece, margin: Piece = ("", None)) -> None:
        """A line of its own, or several when it is too long."""
        self.end_line()
        self.block(pieces, margin)
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
            # Rich would take the control characters out.
            self.console.file.write(ERASE_LINE)
            self._column = 0
        else:
            self.end_line()

    def end_line(self) -> None:
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
        self.console.out("", highlight=False)
        self._blank = not self._column
        self._column = 0

    def _put(self, text: str, style: str | Style | None) -> None:
        if text:
            text = sanitise(text)
            self.console.out(text, style=style, end="", highlight=False)
            self._column += cell_len(text)
            self._blank = False


def _fitting(text: str, cells: int) -> int:
    """How many characters of the text go into so many cells."""
    if cell_len(text) <= cells:
        return len(text)
    used = 0
    for count, character in enumerate(text):
        used += get_character_cell_size(character)
        if used > cells:
            return count
    return len(text)


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
