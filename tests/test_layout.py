"""What may import what."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import farhand
from farhand.sandbox.program import MODULES, program_text

PACKAGE = Path(farhand.__file__).parent
ROOT = PACKAGE.parent.parent
EDGES = {"cli": {"click", "rich"}, "model": {"openai", "xllamacpp"}, "server": {"fastapi", "starlette", "uvicorn"}}
IN_THE_BOX = {"numpy", "pandas", "matplotlib", "PIL", "cloudpickle", "IPython"}
"""What value.py and the runner use where the environment has it; never at the top of the file."""
RUNNER = tuple(f"sandbox/runner/{name}.py" for name in MODULES)
SENT = ("value.py", *RUNNER, "model/local_server.py")
FILES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))


def imports(file: str, top_only: bool = False) -> Iterator[str]:
    tree = ast.parse((PACKAGE / file).read_text())
    for node in tree.body if top_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "farhand" if node.level else node.module or ""


@pytest.mark.parametrize("file", FILES)
def test_third_party_packages_stay_at_the_edges(file: str) -> None:
    allowed = EDGES.get(file.split("/", maxsplit=1)[0], set()) | (IN_THE_BOX if file in SENT else set())
    tops = {name.partition(".")[0] for name in imports(file)}
    assert tops - sys.stdlib_module_names - {"farhand"} <= allowed


@pytest.mark.parametrize("file", [file for file in SENT if file in FILES])
def test_what_is_sent_into_a_box_starts_with_the_standard_library_alone(file: str) -> None:
    tops = {name.partition(".")[0] for name in imports(file, top_only=True)}
    assert tops <= sys.stdlib_module_names | ({"farhand"} if file in RUNNER else set())


def test_the_runner_is_whole_and_in_order() -> None:
    """A module imports value.py and modules before it, at its top: later their names are gone."""
    package = "farhand.sandbox.runner"
    assert {path.stem for path in (PACKAGE / "sandbox/runner").glob("*.py")} == {*MODULES, "__init__"}
    known = {"farhand"}  # from farhand import value
    for name, file in zip(MODULES, RUNNER, strict=True):
        ours = [found for found in imports(file) if found.partition(".")[0] == "farhand"]
        assert set(ours) <= known, file
        assert ours == [found for found in imports(file, top_only=True) if found.partition(".")[0] == "farhand"], file
        known.add(f"{package}.{name}")


def test_the_text_of_a_box_leaves_no_names_behind() -> None:
    probe = (
        "import sys, types; sys.modules['farhand'] = own = types.ModuleType('farhand'); names = {}\n"
        "exec(compile(sys.stdin.read(), '<program>', 'exec'), names)\n"
        "assert sys.modules['farhand'] is own\n"
        "print(*sorted(name for name in sys.modules if 'farhand' in name))\n"
        "print(callable(names['worker_main']), callable(names['practise']), names['main'](['x']))"
    )
    command = [sys.executable, "-ISc", probe]
    done = subprocess.run(command, input=program_text(), capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["farhand", "farhand_value", "True", "True", "2"]


def test_import_directions() -> None:
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as main; main()", "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_importing_the_package_loads_nothing() -> None:
    probe = "import sys; before = set(sys.modules); import farhand; print(*sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) <= {"farhand", "__future__"}


@pytest.mark.parametrize("name", farhand.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(farhand, name).__name__ == name
    assert name in dir(farhand)


def test_the_decorator_keeps_its_name_beside_the_module() -> None:
    probe = "import farhand.tool, farhand; from farhand import tool; print(farhand.tool is tool, callable(tool))"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True"]


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nope'"):
        _ = farhand.nope
    assert farhand.__version__
