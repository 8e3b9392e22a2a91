"""The code in a model's reply, in two dialects: a fenced block, or the arguments of the native tool `python`.

Parsing is pure and total: any text gives a `Parsed`, in time linear in its length.
"""

from __future__ import annotations

import ast
import json
import re
import textwrap
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Literal

Kind = Literal["code", "none", "empty", "unclosed", "cut_off", "other_language"]
Dialect = Literal["fenced", "tool"]

PARSE_CHARS: Final = 100_000  # handed to Python's parser for one reply; it takes about 0.3 s for them at worst
SCAN_FACTOR: Final = 3  # how often the reply's length may be read in search of closing fences
BLOCKS: Final = 200
NOTE_CHARS: Final = 200

_PYTHON: Final = frozenset({"python", "py", "python3", "py3", "ipython"})
_INVISIBLE: Final = "\ufeff\u200b\u200c\u200d\u2060"
_OPEN: Final = re.compile(
    r"(?P<indent>[ \t]*+(?:(?:[-*+]|[0-9]{1,3}[.)])[ \t]++)?)(?P<fence>`{3,}+|~{3,}+)(?P<info>[^`\n]*)\Z"
)
_CLOSE: Final = re.compile(r"[ \t]*+(`{3,}+|~{3,}+)[ \t]*+\Z")
_TAG: Final = re.compile(r"<code(?:[ ][^<>\n]{0,80})?>")
_TAG_END: Final = "</code>"
# A comment, a triple-quoted string or a plain one; an unterminated one reaches to where Python would give up.
_TOKEN: Final = re.compile(
    r"#[^\n]*+"
    r'|"""(?:[^"\\]++|\\[\s\S]|"(?!""))*+(?:""")?'
    r"|'''(?:[^'\\]++|\\[\s\S]|'(?!''))*+(?:''')?"
    r'|"(?:[^"\\\n]++|\\[\s\S])*+"?'
    r"|'(?:[^'\\\n]++|\\[\s\S])*+'?"
)


@dataclass(frozen=True, slots=True)
class Parsed:
    """What a reply asks to run. `code` is set for the kind `code` only; `prose` is what stands before it.

    `note` says what was found: for `code` what was tolerated, for every other kind what is wrong.
    """

    kind: Kind
    code: str = ""
    prose: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True)
class _Block:
    """One block of a reply; `start` is where it begins in the text."""

    language: str
    code: str
    closed: bool
    start: int
    end: int

    @property
    def is_python(self) -> bool:
        return self.language in _PYTHON


def parse(text: str, *, finish: str = "stop", stop: tuple[str, ...] = ()) -> Parsed:
    """The code of a reply in the fenced dialect.

    All blocks tagged as Python are one action, joined by a blank line. Blocks without a tag or of another language are
    output or data; the first of those without a tag counts as code only if no other does and it is valid Python.
    `finish` is why the model stopped ("stop", "length", …), `stop` the sequences it was told to stop at.
    """
    text = _without_thought(_plain(text))
    reader = _Reader(text, stop)
    blocks = reader.blocks()
    python = [block for block in blocks if block.is_python]
    bare = [block for block in blocks if not block.language]
    if python:
        return _join(reader, python, finish)
    for block in bare:
        if block.code.strip() and reader.is_python(block.code) and (block.closed or finish != "length"):
            return Parsed("code", _clean(block.code), _before(text, block), "the block has no language tag")
    prose = text.strip()
    if finish == "length":
        return Parsed(
            "cut_off", prose=prose, note="the reply was cut off at its length limit before any code was complete"
        )
    if bare and all(not block.code.strip() for block in bare):
        return Parsed("empty", prose=prose, note="the code block is empty")
    if bare:
        return Parsed("none", prose=prose, note="the block is not tagged as python and is not valid Python")
    if blocks:
        return Parsed(
            "other_language", prose=prose, note=f"the block is tagged {blocks[0].language[:40]!r}, not python"
        )
    return Parsed("none", prose=prose, note="the reply has no code block")


def parse_call(arguments_json: str) -> Parsed:
    """The code in the arguments of a call of the native tool `python`, `{"code": "…"}`.

    What models send instead is taken where the intention is clear: a trailing comma, raw line ends or unescaped quotes
    inside the text, the code without any JSON around it, a fence inside the JSON.
    """
    text = _plain(arguments_json).strip().lstrip(_INVISIBLE)
    if not text or text == "{}":
        return Parsed("empty", note="the call has no code")
    found = _read_arguments(text)
    if isinstance(found, str):
        return _call_code(found, "")
    if found is not None:
        return found
    if _CODE_KEY.match(text):
        return _mend(text)
    if text[0] not in '{["' and _Reader(text).is_python(text):
        return _call_code(text, "the arguments were the code itself, not JSON")
    fenced = parse(text)
    if fenced.kind == "code" and "```" in text:
        return Parsed("code", fenced.code, note="the arguments were a code block, not JSON")
    return Parsed("none", note="the arguments are not a JSON object with the key `code`")


def reminder(parsed: Parsed, *, dialect: Dialect) -> str:
    """What the model is told when its reply could not be run; the first line is the reason. Empty for `code`."""
    if parsed.kind == "code":
        return ""
    reasons: dict[str, str] = {
        "none": "Your reply contains no code that can be run",
        "empty": "Your reply contains no code: the block is empty",
        "unclosed": "Your code block is not complete, so nothing was run",
        "cut_off": "Your reply was cut off at its length limit, so nothing was run",
        "other_language": "Only Python can be run here",
    }
    reason = reasons[parsed.kind]
    if parsed.note and parsed.kind in ("none", "unclosed", "other_language"):
        reason += f": {parsed.note[:NOTE_CHARS]}"
    ways = [reason + "."]
    if parsed.kind == "cut_off":
        ways.append("Write a shorter reply: less prose, and the work split over several steps.")
    if dialect == "tool":
        ways.append('Call the tool `python` with {"code": "..."}.')
    else:
        ways.append("Write the code as one block:\n\n```python\n# your code\n```\n")
    ways.append("When you know the answer, call final_answer(answer) in the code.")
    return "\n".join(ways)


def fence_code(code: str) -> str:
    """The code as a block from which `parse` reads exactly it, with a fence longer than any inside.

    Exactly: but for carriage returns, and invisible marks before the first character, which `parse` removes.
    """
    longest = max((len(run) for run in re.findall("`+", code)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}python\n{code}\n{fence}"


# ---- the fenced dialect ----


def _plain(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _clean(code: str) -> str:
    """Without the byte order mark and zero-width characters that some models put before the first word."""
    return code.lstrip(_INVISIBLE)


def _without_thought(text: str) -> str:
    """The reply proper, behind a leading `<think>…</think>`, whose code was not meant to run."""
    if not text.lstrip().startswith("<think>"):
        return text
    return text.partition("</think>")[2]


def _before(text: str, block: _Block) -> str:
    return text[: block.start].strip()


def _join(reader: _Reader, blocks: list[_Block], finish: str) -> Parsed:
    """The Python blocks of a reply as one action. Only the last block can be open."""
    prose = _before(reader.text, blocks[0])
    codes = [_clean(block.code) for block in blocks]
    notes = []
    if not blocks[-1].closed:
        if finish == "length":
            return Parsed("cut_off", prose=prose, note="the reply was cut off inside its code block")
        whole = reader.without_half_stop(codes[-1])
        if whole is None:
            return Parsed("unclosed", prose=prose, note="the block has no end, and what is there is not valid Python")
        codes[-1] = whole
        notes.append("the end of the block was missing")
    codes = [code for code in codes if code.strip()]
    if not codes:
        return Parsed("empty", prose=prose, note="the code block is empty")
    if len(codes) > 1:
        notes.append(f"{len(codes)} blocks were joined")
    if reader.blocks_left == 0:
        notes.append(f"only the first {BLOCKS} blocks were read")
    return Parsed("code", "\n\n".join(codes), prose, "; ".join(notes))


class _Reader:
    """Finds the blocks of one text. What it may read again and parse is bounded, whatever the text is."""

    def __init__(self, text: str, stop: Iterable[str] = ()) -> None:
        self.text = text
        self.stop = tuple(stop)
        self.lines = text.split("\n")
        self.blocks_left = BLOCKS
        self._offsets: list[int] = []
        self._scan_left = SCAN_FACTOR * len(text) + 10_000
        self._parse_left = PARSE_CHARS

    def blocks(self) -> list[_Block]:
        at = 0
        for line in self.lines:
            self._offsets.append(at)
            at += len(line) + 1
        found: list[_Block] = []
        number = 0
        while number < len(self.lines) and self.blocks_left:
            block = self._block(number)
            if block is None:
                number += 1
                continue
            found.append(block)
            self.blocks_left -= 1
            while number < len(self.lines) and self._offsets[number] < block.end:
                number += 1
        return found

    def is_python(self, code: str) -> bool:
        """Whether Python can parse it. False also for what is too much to try."""
        self._parse_left -= len(code) + 50
        if self._parse_left < 0:
            return False
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                ast.parse(code)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return False
        return True

    def without_half_stop(self, code: str) -> str | None:
        """The code of a block without an end, if it is valid; the half of an end mark is taken off."""
        code = code.rstrip("\n")
        for mark in self.stop:
            for size in range(min(len(mark), len(code)), 2, -1):
                if len(mark[:size].strip()) > 2 and code.endswith(mark[:size]):
                    code = code[:-size].rstrip("\n")
                    break
        if self.is_python(code):
            return code
        for mark in (*self.stop, _TAG_END, "```", "~~~"):
            for size in range(min(len(mark), len(code)), 0, -1):
                if mark[:size].strip() and code.endswith(mark[:size]):
                    shorter = code[:-size].rstrip()
                    if self.is_python(shorter):
                        return shorter
                    break
        return None

    def _block(self, number: int) -> _Block | None:
        """The block that begins on this line, if one does."""
        line = self.lines[number]
        if "```" not in line and "~~~" not in line:
            tag = _TAG.search(line) if "<code" in line else None
            if tag is None or line[: tag.start()].endswith("`"):
                return None
            return self._tagged(self._offsets[number] + tag.start(), self._offsets[number] + tag.end())
        opened = _OPEN.match(line)
        if opened is not None:
            indent = len(opened["indent"])
            return self._fenced(number, self._offsets[number], opened["fence"], _language(opened["info"]), indent)
        return self._one_line(number) or self._late(number)

    def _one_line(self, number: int) -> _Block | None:
        """```` ```python print(1)``` ````"""
        body = self.lines[number].strip()
        words = body.strip("`").split(None, 1)
        if not (body.startswith("```") and body.endswith("```") and len(words) == 2 and words[0].lower() in _PYTHON):
            return None
        start = self._offsets[number]
        return _Block("python", words[1].rstrip(), True, start, start + len(self.lines[number]))

    def _late(self, number: int) -> _Block | None:
        """A fence that opens at the end of a line of prose; it needs its tag."""
        line = self.lines[number].rstrip().lower()
        for language in _PYTHON:
            if line.endswith("```" + language):
                before = line.removesuffix(language).rstrip("`")
                fence = "`" * (len(line) - len(language) - len(before))
                return self._fenced(number, self._offsets[number] + len(before), fence, language, 0)
        return None

    def _fenced(self, number: int, opened: int, fence: str, language: str, indent: int) -> _Block:
        if number + 1 >= len(self.lines):
            return _Block(language, "", False, opened, len(self.text) + 1)
        start = self._offsets[number + 1]
        end = self._end(start, self._closing_lines(number + 1, fence), language)
        if end is not None:
            code = self.text[start : max(start, end - 1)]
            after = self.text.find("\n", end)
            return _Block(
                language, self._undent(code, indent), True, opened, len(self.text) + 1 if after < 0 else after
            )
        for at in range(number + 1, len(self.lines)):
            line = self.lines[at].rstrip()
            if line.strip() == _TAG_END or line.endswith(fence):
                code = self.text[start : self._offsets[at]] + line.removesuffix(_TAG_END).rstrip(fence[0])
                whole = self._undent(code.rstrip(), indent)
                if self.is_python(whole):
                    return _Block(language, whole, True, opened, self._offsets[at] + len(self.lines[at]))
                break
        return _Block(language, self._undent(self.text[start:], indent), False, opened, len(self.text) + 1)

    def _tagged(self, opened: int, start: int) -> _Block:
        """A `<code>` block; a fence line ends it too when its own end is missing."""
        end = self._end(start, self._closing_tags(start), "python")
        closed = end is not None
        if end is None:
            number = self.text.count("\n", 0, start) + 1
            end = next(self._closing_lines(number, "```"), None)
            closed = end is not None and self.is_python(self.text[start:end].strip("\n"))
        stop = end if end is not None and closed else len(self.text)
        code = self.text[start:stop].removeprefix("\n").removesuffix("\n")
        if code.lstrip().startswith(("```", "~~~")):
            inner = _Reader(code.strip(), self.stop)
            inner._parse_left = self._parse_left
            parts = [block for block in inner.blocks() if block.is_python or not block.language]
            self._parse_left = inner._parse_left
            if parts:
                code = "\n\n".join(part.code for part in parts)
        after = self.text.find("\n", stop)
        return _Block("python", self._even(code), closed, opened, len(self.text) + 1 if after < 0 else after)

    def _undent(self, code: str, indent: int) -> str:
        """The code of a block that is itself indented, as in a list."""
        if not indent:
            return code
        lines = code.split("\n")
        return self._even("\n".join(line[min(indent, len(line) - len(line.lstrip(" \t"))) :] for line in lines))

    def _even(self, code: str) -> str:
        even = textwrap.dedent(code)
        return even if even != code and not self.is_python(code) and self.is_python(even) else code

    def _closing_lines(self, number: int, fence: str) -> Iterator[int]:
        """Offsets of the lines that can close a fence."""
        for at in range(number, len(self.lines)):
            line = self.lines[at]
            self._scan_left -= 4
            if self._scan_left <= 0:
                return
            closing = _CLOSE.match(line) if fence in line else None
            if closing is not None and closing[1][0] == fence[0] and len(closing[1]) >= len(fence):
                yield self._offsets[at]

    def _closing_tags(self, start: int) -> Iterator[int]:
        at = self.text.find(_TAG_END, start)
        while at >= 0:
            yield at
            at = self.text.find(_TAG_END, at + 1)

    def _end(self, start: int, candidates: Iterator[int], language: str) -> int | None:
        """Which candidate ends the block: the first outside the strings of its code, else the first."""
        first = next(candidates, None)
        if first is None or (language and language not in _PYTHON) or self._scan_left <= 0:
            return first
        end = self._outside(start, first, candidates)
        if end is None or end == first or self.is_python(self.text[start:end].strip("\n")):
            return first if end is None else end
        return first

    def _outside(self, start: int, candidate: int, more: Iterator[int]) -> int | None:
        """The first candidate that no string of the code covers; None when there is none, or the search is too long."""
        at = start
        while True:
            token = _TOKEN.search(self.text, at, candidate)
            if token is None:
                return candidate
            self._scan_left -= token.end() - at + 8
            at = token.end()
            if at < candidate:
                continue
            whole = _TOKEN.match(self.text, token.start())  # it may reach beyond the candidate
            at = whole.end() if whole is not None else at
            if at <= candidate or self.text[token.start()] == "#":
                return candidate  # behind a comment stands `</code>` only
            self._scan_left -= at - token.start()
            while candidate < at:
                following = next(more, None) if self._scan_left > 0 and at < len(self.text) else None
                if following is None:
                    return None
                candidate = following


def _language(info: str) -> str:
    """The language of a fence's info string: `python title="x"`, `{.python}`, `Python3`."""
    words = info.strip().strip("{}").replace(",", " ").split()
    return words[0].lstrip(".").lower() if words else ""


# ---- the tool dialect ----

_CODE_KEY: Final = re.compile(r"\{\s*[\"']code[\"']\s*:\s*[\"']")
_TRAILING_COMMA: Final = re.compile(r",\s*\}\s*\Z")
_ESCAPE: Final = re.compile(r"\\(?:u([0-9a-fA-F]{4})|([\s\S]))")
_ESCAPES: Final = {"n": "\n", "t": "\t", "r": "\n", "b": "\b", "f": "\f", '"': '"', "'": "'", "\\": "\\", "/": "/"}


def _read_arguments(text: str) -> str | Parsed | None:
    """The code in proper JSON, or nearly proper; None when it is no JSON at all."""
    try:
        tree = json.loads(_TRAILING_COMMA.sub("}", text), strict=False)
    except (ValueError, RecursionError):
        return None
    if isinstance(tree, str):
        return tree
    if not isinstance(tree, dict):
        return Parsed("none", note="the arguments are not a JSON object with the key `code`")
    code = tree.get("code")
    if code is None:
        texts = [item for item in tree.values() if isinstance(item, str)]
        code = texts[0] if len(texts) == 1 == len(tree) else None
    if isinstance(code, list) and all(isinstance(line, str) for line in code):
        code = "\n".join(line.rstrip("\n") for line in code)
    if isinstance(code, str):
        return code
    return Parsed("none", note="the arguments have no text under the key `code`")


def _mend(text: str) -> Parsed:
    """Code in an object that is broken: not ended, or with quotes in it that are not escaped."""
    opened = _CODE_KEY.match(text)
    assert opened is not None
    quote, body = opened[0][-1], text[opened.end() :]
    ended = re.match(rf"(?:[^{quote}\\]++|\\[\s\S])*+{quote}", body)
    if ended is None:
        return Parsed("cut_off", note="the arguments of the call were cut off inside the code")
    rest = body[ended.end() :].strip()
    if rest in ("", "}", ",", ",}"):
        return _call_code(_unescape(ended[0][:-1]), "the arguments were not quite JSON")
    last = body.rstrip().removesuffix("}").rstrip()
    code = _unescape(last.removesuffix(quote))
    if last.endswith(quote) and _Reader(code).is_python(code):
        return _call_code(code, "the quotes in the code were not escaped")
    return Parsed("none", note="the arguments are not JSON: quotes inside the code must be escaped")


def _unescape(text: str) -> str:
    def one(match: re.Match[str]) -> str:
        if match[1]:
            return chr(int(match[1], 16))
        return _ESCAPES.get(match[2], match[0])

    # The two halves of a character beyond U+FFFF become one.
    return _ESCAPE.sub(one, text).encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")


def _call_code(code: str, note: str) -> Parsed:
    code = _clean(_plain(code))
    if code.strip().startswith(("```", "<code>")):
        fenced = parse(code)
        if fenced.kind == "code":
            return Parsed("code", fenced.code, note=note or "the code was inside a fence")
    if not code.strip():
        return Parsed("empty", note="the call has no code")
    return Parsed("code", code, note=note)


BOUND_NAMES = 500
"""At most so many names are given by `bound_names`."""


def bound_names(code: str) -> tuple[str, ...]:
    """The names that the code binds at its top level, in order: what is lost with a box that dies in it. Total."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            waiting: list[ast.AST] = list(reversed(ast.parse(code).body))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ()
    names: dict[str, None] = {}
    while waiting and len(names) < BOUND_NAMES:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names[node.name] = None
            continue
        if isinstance(node, ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names[node.id] = None
        elif isinstance(node, ast.alias):
            names[(node.asname or node.name).partition(".")[0]] = None
        waiting.extend(reversed(list(ast.iter_child_nodes(node))))
    names.pop("*", None)
    return tuple(names)
