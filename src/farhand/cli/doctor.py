"""`farhand doctor`: which walls stand here, what each does not protect against, and what is set up."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import textwrap
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from farhand import registry
from farhand.cli.terminal import is_terminal, sanitise, width_of
from farhand.errors import FarhandError, UsageError
from farhand.home import farhand_home
from farhand.sandbox.environment import DEFAULT, path_of
from farhand.sandbox.local.probe import Report, Wall, probe

_COLUMN: Final = re.compile(r" *\S+(?: \S+){0,3} {2,}(?=\S)")
_JAIL_OPEN: Final = (
    "a defect of the Linux kernel, which all boxes and this machine share",
    "what can be learned from timing, caches and the load of the machine",
    "what your own tools do with arguments that the code chose",
)
_JAIL_OPEN_USER: Final = (
    "a box that breaks out of its namespaces is your user: run as root, each box has a user id of its own",
)
_JAIL_OPEN_UNGROUPED: Final = (
    "memory for some milliseconds: without control groups it is measured from outside, and the box stopped after",
)
_SUBPROCESS_OPEN: Final = (
    "anything: the code runs as you, with your files and your network. For trusted code and tests",
)


@dataclass(frozen=True, slots=True)
class Provider:
    """A sandbox: whether it can be used here, and what it does not protect against."""

    name: str
    stands: bool
    detail: str
    open_to: tuple[str, ...]
    walls: tuple[Wall, ...] = ()


@dataclass(frozen=True, slots=True)
class Part:
    """Something that is set up or not. `needed` parts make `doctor` fail when they are not well."""

    name: str
    well: bool
    detail: str
    hint: str = ""
    needed: bool = False


@dataclass(frozen=True, slots=True)
class Findings:
    home: str
    sandboxes: tuple[Provider, ...]
    parts: tuple[Part, ...] = field(default=())

    @property
    def well(self) -> bool:
        return self.sandboxes[0].stands and all(part.well for part in self.parts if part.needed)


def doctor(as_json: bool) -> int:
    home = farhand_home()
    findings = Findings(str(home), (jail(probe()), _subprocess()), (_environment(home), _model(home), _store(home)))
    if as_json:
        print(json.dumps({"well": findings.well, **asdict(findings)}))
    else:
        _print(findings)
    return 0 if findings.well else 1


def jail(report: Report) -> Provider:
    """What the probe found, in a person's words."""
    user = "root: each box has a user id of its own" if report.privileged else "an ordinary user"
    detail = f"Linux {report.kernel}, as {user}"
    if report.missing:
        first = report.missing[0]
        detail = f"missing {first.name}: {first.detail}"
    open_to: tuple[str, ...] = _JAIL_OPEN
    if not report.privileged:
        open_to += _JAIL_OPEN_USER
    if any(wall.name == "memory group" and not wall.stands for wall in report.walls):
        open_to += _JAIL_OPEN_UNGROUPED
    return Provider("local", not report.missing, detail, open_to, report.walls)


def _subprocess() -> Provider:
    return Provider("subprocess", True, "no wall at all", _SUBPROCESS_OPEN)


def _environment(home: Path) -> Part:
    path = path_of(DEFAULT, home)
    if (path / "environment.json").is_file():
        return Part("environment", True, f"{', '.join(DEFAULT.packages)} in {path}")
    return Part("environment", False, "not built yet: the first run does it", "farhand setup environment")


def _model(home: Path) -> Part:
    try:
        return Part("model", True, registry.choose_model(None, os.environ, home))
    except UsageError as error:
        return Part("model", False, error.message, error.hint)


def _store(home: Path) -> Part:
    async def count() -> int:
        store = registry.store(home)
        try:
            return len(await store.sessions(1000))
        finally:
            await store.close()

    try:
        number = asyncio.run(count())
    except (FarhandError, OSError) as error:
        return Part("record", False, str(error), needed=True)
    most = "1,000 or more" if number == 1000 else f"{number:,}"
    return Part("record", True, f"{most} session{'' if number == 1 else 's'} in {home / 'farhand.db'}", needed=True)


def _print(findings: Findings) -> None:
    say = _Marks()
    for provider in findings.sandboxes:
        say.mark(
            provider.stands and bool(provider.walls),
            f"sandbox {provider.name}: {provider.detail}",
            welcome=not provider.walls,
        )
        for wall in provider.walls:
            text = f"{wall.name}: {wall.purpose}" + (f" ({wall.detail})" if wall.detail else "")
            say.mark(wall.stands, text, indent=4, welcome=not wall.needed)
            if wall.hint:
                say.line(wall.hint, indent=8)
        say.line("does not protect against:", indent=4)
        for text in provider.open_to:
            say.line(f"- {text}", indent=6, hanging=2)
    for part in findings.parts:
        say.mark(part.well, f"{part.name}: {part.detail}", welcome=not part.needed)
        if part.hint:
            say.line(part.hint, indent=4)
    say.line(f"home: {findings.home}")


class _Marks:
    """Lines that begin with how it stands. The marks are words where the output cannot show signs."""

    def __init__(self) -> None:
        self._terminal = is_terminal(sys.stdout)
        signs = (sys.stdout.encoding or "").lower().startswith("utf")
        self._yes, self._no, self._optional = ("✓", "✗", "–") if signs else ("ok", "NO", "--")

    def mark(self, good: bool, text: str, *, indent: int = 0, welcome: bool = False) -> None:
        sign = self._yes if good else self._optional if welcome else self._no
        self.line(f"{sign} {text}", indent=indent, hanging=len(sign) + 1)

    def line(self, text: str, *, indent: int = 0, hanging: int = 0) -> None:
        text = sanitise(text) if self._terminal else text
        for line in text.split("\n"):
            # What follows two spaces inside a line is a column of its own.
            column = _COLUMN.match(line)
            further = hanging + (len(column[0]) if column is not None else 0)
            print("\n".join(self._wrapped(line, " " * indent, " " * (indent + further))))

    def _wrapped(self, line: str, first: str, later: str) -> list[str]:
        """On a terminal, lines that fit; broken at spaces alone, so that paths stay whole."""
        if not self._terminal:
            return [first + line]
        return textwrap.wrap(
            line,
            max(width_of(sys.stdout), 40),
            initial_indent=first,
            subsequent_indent=later,
            break_long_words=False,
            break_on_hyphens=False,
        ) or [""]
