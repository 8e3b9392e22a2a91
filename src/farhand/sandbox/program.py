"""The text a box gets: `value.py` and `runner.py` joined into one file that needs a Python and nothing else."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from farhand import value
from farhand.sandbox import runner

_JOINED = """\
import sys, types
def _module(name, text):
    module = sys.modules[name] = types.ModuleType(name)
    module.__file__ = "<" + name + ">"
    exec(compile(text, module.__file__, "exec", dont_inherit=True), module.__dict__)
    return module
_module("farhand_value", {value!r})
runner = _module("farhand_runner", {runner!r})
if __name__ == "__main__":
    sys.exit(runner.main(sys.argv[1:]))
"""


@cache
def program_text() -> str:
    """The program: `python -I -S FILE supervisor FOLDER`, or `attach FOLDER` (`runner.main`)."""
    return _JOINED.format(value=_source(value.__file__), runner=_source(runner.__file__))


def _source(path: str) -> str:
    return Path(path).read_text(encoding="utf-8")
