"""What a terminal may be shown of text that a box, a model or a tool wrote.

A terminal obeys control characters: escape sequences write the clipboard, set the title, move the cursor over what was
said before; bidirectional overrides show text in another order than it runs. Here each becomes a visible stand-in.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, Final, TextIO

_DIRECTIONS: Final = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_SEPARATORS: Final = (0x2028, 0x2029)
_TAGS: Final = range(0xE0000, 0xE0080)
"""Invisible copies of ASCII: a person does not see them, a model reads them."""


def _stand_ins() -> dict[int, str]:
    visible = {code: chr(0x2400 + code) for code in range(0x20) if code not in (0x09, 0x0A)}
    visible[0x7F] = "␡"
    visible |= {code: f"‹{code:02X}›" for code in range(0x80, 0xA0)}
    visible |= {code: f"‹U+{code:04X}›" for code in (*_DIRECTIONS, *_SEPARATORS, *_TAGS)}
    return visible


_VISIBLE: Final = _stand_ins()
_COLOUR: Final = re.compile(r"\x1b\[[0-9;:]*m")
_COLOUR_BEGUN: Final = re.compile(r"\x1b(\[[0-9;:]{0,64})?\Z")
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_ENDS: Final = re.compile(r"\r+\n")
ERASE_LINE: Final = "\r\x1b[K"
"""Ours, written only where a carriage return of the guest began its own unfinished line again."""


@dataclass(frozen=True, slots=True)
class Shown:
    """A piece that is fit for a terminal. With `over`, it takes the place of what stands of the unfinished line."""

    text: str
    over: bool = False


class GuestStream:
    """Makes a stream fit for a terminal piece by piece. Colours are dropped, everything else stays visible.

    With `bars` a carriage return begins a line again, as progress bars do: of each line the last state is kept.
    """

    def __init__(self, *, bars: bool = False) -> None:
        self._bars = bars
        self._held = ""

    def feed(self, piece: str) -> Shown:
        text = _COLOUR.sub("", self._held + piece)
        self._held = ""
        begun = _COLOUR_BEGUN.search(text)
        if begun is not None:
            self._held, text = begun.group(), text[: begun.start()]
        kept = text.rstrip("\r")
        if kept != text:
            # Whether a carriage return ends a line or starts it again is decided by what follows.
            self._held, text = ("\r" if self._bars else text[len(kept) :]) + self._held, kept
        return _show(text, self._bars)

    def flush(self) -> str:
        """What was held back for an end that did not come."""
        held, self._held = self._held, ""
        return _show(held.replace("\r", "") if self._bars else held, False).text


def sanitise(text: str) -> str:
    """Text without a control character other than newline and tab."""
    return _show(_COLOUR.sub("", text), False).text


def one_line(text: str, width: int) -> str:
    """The text sanitised, on one line of at most `width` characters, cut in the open."""
    line = " ".join(sanitise(text).split())
    return line if len(line) <= width else line[: max(width - 1, 0)] + "…"


def _show(text: str, bars: bool) -> Shown:
    text = _ENDS.sub("\n", text)
    over = False
    if bars and "\r" in text:
        lines = text.split("\n")
        over = "\r" in lines[0]
        text = "\n".join(_last_state(line) for line in lines)
    text = text.translate(_VISIBLE)
    return Shown(_SURROGATE.sub(lambda found: f"‹{ord(found.group()):X}›", text), over)


def _last_state(line: str) -> str:
    return next((state for state in reversed(line.split("\r")) if state), "")


def is_terminal(stream: IO[str]) -> bool:
    try:
        return stream.isatty()
    except ValueError:  # closed
        return False


def can_erase(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the terminal takes the one escape sequence we write ourselves outside of colours."""
    return environ.get("TERM", "") not in ("", "dumb", "unknown")


class _Line:
    """The last line of a place that is written to; two streams may share one."""

    open = False
    """Whether its end has not been written yet."""


class Output:
    """Standard output or error, for text of a guest: exact bytes into files and pipes, fit for a terminal on one.

    With `beside`, another stream that may lead to the same place: a line of ours then begins anew after either. Threads
    may write at once.
    """

    def __init__(self, stream: TextIO, beside: Output | None = None) -> None:
        self._stream = stream
        self._guest = GuestStream(bars=True) if is_terminal(stream) else None
        self._lock = threading.RLock()
        self._line: _Line = beside._line if beside is not None and same_place(stream, beside._stream) else _Line()

    def write(self, text: str) -> None:
        with self._lock:
            if self._guest is None:
                self._put(text)
                return
            shown = self._guest.feed(text)
            if shown.over:
                self._put(ERASE_LINE if can_erase() else "\n")
            self._put(shown.text)

    def line(self, text: str) -> None:
        """A line of ours with a guest's text in it; what stands open before it is finished first."""
        with self._lock:
            self.finish()
            if self._line.open:
                self._put("\n")
            self._put((sanitise(text) if self._guest is not None else text) + "\n")

    def finish(self) -> None:
        with self._lock:
            if self._guest is not None:
                self._put(self._guest.flush())

    def _put(self, text: str) -> None:
        if text:
            self._line.open = not text.endswith("\n")
            self._stream.write(text)
            self._stream.flush()


def same_place(one: IO[str], other: IO[str]) -> bool:
    """Whether both lead to one file, pipe or terminal."""
    try:
        return os.path.sameopenfile(one.fileno(), other.fileno())
    except (OSError, ValueError):  # no files, or closed
        return False


def width_of(stream: IO[str]) -> int:
    """The columns of the terminal that the stream leads to; COLUMNS has the last word."""
    chosen = os.environ.get("COLUMNS", "")
    if chosen.isascii() and chosen.isdigit() and int(chosen) > 0:
        return int(chosen)
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


def open_streams() -> None:
    """Text that the locale cannot write is written as an escape instead of an error."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")
