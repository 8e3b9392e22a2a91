"""What goes on while something is fetched or built."""

from __future__ import annotations

import sys

from farhand.cli.terminal import ERASE_LINE, can_erase, is_terminal, one_line


class Progress:
    """Lines on standard error. On a terminal each takes the last one's place; elsewhere they are said if `always`."""

    def __init__(self, *, always: bool = False) -> None:
        terminal = is_terminal(sys.stderr)
        self._over = terminal and can_erase()
        self._says = terminal or always
        self._stands = False

    def __call__(self, line: str) -> None:
        if self._over:
            self._stands = True
            print(ERASE_LINE + one_line(line, 76), end="", file=sys.stderr, flush=True)
        elif self._says:
            print(one_line(line, 200), file=sys.stderr, flush=True)

    def end(self) -> None:
        """It is over: nothing of it stays on the terminal."""
        if self._stands:
            print(ERASE_LINE, end="", file=sys.stderr, flush=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exc: object) -> None:
        self.end()
