"""The text a box gets: `value.py` and the modules of `runner/` joined into one that needs a Python and nothing else."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from farhand import value
from farhand.sandbox import runner

MODULES = (
    "bounds",
    "frame",
    "field",
    "reactor",
    "workspace",
    "hands",
    "run",
    "spool",
    "pipe",
    "outbox",
    "link",
    "listing",
    "transfer",
    "supervisor",
    "channel",
    "tools",
    "imports",
    "text",
    "display",
    "output",
    "answer",
    "failure",
    "worker",
    "process",
    "box",
)
"""Of the runner, in order: each imports only what stands before it."""

# The modules find one another under the names that they have here. Afterwards those names are free again: guest code
# may import a farhand of its own. `farhand_value` stays, for pickles of its classes.
_JOINED = """\
import sys, types
def _module(name, file, text):
    module = types.ModuleType(name)
    module.__file__ = file
    exec(compile(text, file, "exec", dont_inherit=True), module.__dict__)
    return module
def _load(value, texts, package="farhand.sandbox.runner"):
    ours = lambda: [name for name in sys.modules if name.partition(".")[0] == "farhand"]
    others = {{name: sys.modules.pop(name) for name in ours()}}
    top = sys.modules["farhand"] = types.ModuleType("farhand")
    top.value = sys.modules["farhand_value"] = _module("farhand_value", "<farhand_value>", value)
    for name, text in texts:
        module = _module(package + "." + name, "<farhand_runner/" + name + ".py>", text)
        sys.modules[package + "." + name] = module
    box, worker = module, sys.modules[package + ".worker"]
    for name in ours():
        del sys.modules[name]
    sys.modules.update(others)
    return box.main, worker.worker_main, worker.practise
main, worker_main, practise = _load({value!r}, {texts!r})
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
"""


@cache
def program_text() -> str:
    """The program: `python -I -S FILE supervisor FOLDER`, or `attach FOLDER` (`runner/box.py`); a zygote calls its
    `practise` and `worker_main`."""
    folder = Path(runner.__file__).parent
    texts = [(name, _source(folder / f"{name}.py")) for name in MODULES]
    return _JOINED.format(value=_source(Path(value.__file__)), texts=texts)


def _source(path: Path) -> str:
    return path.read_text(encoding="utf-8")
