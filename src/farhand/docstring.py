"""What a docstring says of each parameter."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from typing import Final

READ_CHARS: Final = 32_000
_GOOGLE: Final = re.compile(r"(Args|Arguments|Parameters|Params|Keyword Args|Keyword Arguments):[ ]*\Z")
_SECTION: Final = re.compile(r"[A-Z][A-Za-z ]{2,30}:[ ]*\Z")
_GOOGLE_ITEM: Final = re.compile(r"\*{0,2}(\w+)[ ]*(?:\([^)\n]{0,200}\))?[ ]*:(?:[ ]+(.*))?\Z")
_NUMPY_ITEM: Final = re.compile(r"\*{0,2}(\w+(?:,[ ]*\*{0,2}\w+)*)[ ]*(?::.*)?\Z")
_SPHINX_ITEM: Final = re.compile(
    r":(?:param|parameter|arg|argument|key|keyword)[ ]+(?:[^:\n]{0,200}?[ ])?\*{0,2}(\w+):(.*)\Z"
)


@dataclass(frozen=True, slots=True)
class Docstring:
    """A docstring, whole, and what it says of each parameter, in the Google, NumPy or Sphinx style."""

    text: str
    parameters: dict[str, str]

    @classmethod
    def parse(cls, text: str) -> Docstring:
        text = inspect.cleandoc(text)
        lines = text[:READ_CHARS].splitlines()
        found: dict[str, str] = {}
        for at, line in enumerate(lines):
            if _GOOGLE.match(line):
                found |= _entries(lines[at + 1 :], _GOOGLE_ITEM, indented=True)
            elif line.strip() in ("Parameters", "Other Parameters") and _underlined(lines, at):
                found |= _entries(lines[at + 2 :], _NUMPY_ITEM, indented=False)
            elif line.lstrip().startswith(":"):
                found |= _entries(lines[at : at + 1] + _continued(lines, at), _SPHINX_ITEM, indented=False)
        return cls(text, found)


def _underlined(lines: list[str], at: int) -> bool:
    return at + 1 < len(lines) and len(lines[at + 1]) >= 3 and set(lines[at + 1].strip()) == {"-"}


def _continued(lines: list[str], at: int) -> list[str]:
    """The lines after `at` that are indented deeper than it."""
    depth = _indent(lines[at])
    end = at + 1
    while end < len(lines) and lines[end].strip() and _indent(lines[end]) > depth:
        end += 1
    return lines[at + 1 : end]


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _entries(lines: list[str], form: re.Pattern[str], *, indented: bool) -> dict[str, str]:
    """name → description of the items at the depth of the first line, up to the end of their section."""
    depth = next((_indent(line) for line in lines if line.strip()), 0)
    found: dict[str, list[str]] = {}
    names: list[str] = []
    if indented and depth == 0:
        return {}
    for at, line in enumerate(lines):
        if not line.strip():
            continue
        here = _indent(line)
        if here < depth or (here == 0 and (_SECTION.match(line) or _underlined(lines, at))):
            break
        item = form.match(line.strip()) if here == depth else None
        if item is not None:
            names = [name.strip(" *") for name in item.group(1).split(",")]
            words = item.group(2) if item.re.groups > 1 else None
            found.update({name: [words.strip()] if words and words.strip() else [] for name in names})
        elif here == depth:
            break
        else:
            for name in names:
                found[name].append(line.strip())
    return {name: " ".join(words) for name, words in found.items()}
