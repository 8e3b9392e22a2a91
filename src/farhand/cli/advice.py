"""Hints of errors, in the words of the command line: what they say of Python becomes an option."""

from __future__ import annotations

import re
from typing import Final

_OPTIONS: Final = {"steps": "--max-steps N", "turn_s": "--timeout S"}
"""Of `farhand run`, for the limits of a turn."""
_CHANGES: Final = (
    (re.compile(r"pass base_url=\.\.\. of a server that needs none"), "choose a server: --model openai:NAME@URL"),
    (re.compile(r"List the packages that the code needs, for example \[.*?\]\."), "Name each: --import scipy."),
    (re.compile(r"\bcontinue the session\b"), 'go on with it: farhand run --session last "…"'),
)
_RAISE: Final = re.compile(r"Raise it with Limits\((\w+)=…\)")


def for_command_line(hint: str) -> str:
    """The hint as a person can follow it who calls `farhand`."""
    hint = _RAISE.sub(_raise, hint)
    for pattern, words in _CHANGES:
        hint = pattern.sub(words, hint)
    return hint


def _raise(found: re.Match[str]) -> str:
    option = _OPTIONS.get(found[1])
    return f"Raise it with {option}" if option else f"Raise it from Python with Limits({found[1]}=…)"
