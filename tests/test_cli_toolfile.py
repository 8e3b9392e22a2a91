from __future__ import annotations

import sys
from pathlib import Path

import pytest

from farhand.cli.toolfile import load_tools
from farhand.errors import UsageError

DATACLASS = """
from __future__ import annotations
from dataclasses import dataclass

@dataclass
class A:
    x: int
"""


@pytest.fixture(autouse=True)
def same_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))


def tools_of(path: Path, text: str) -> list[str]:
    path.write_text(text)
    return sorted(tool.name for tool in load_tools(str(path)))


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("def f(x): return x\nTOOLS = {'g': f, 'final_answer': f}", ["g"]),
        ("from farhand import tool\n@tool\ndef f(x: int) -> int:\n    '''Doc.'''\n    return x\ndef h(): pass", ["f"]),
        (f"{DATACLASS}\ndef f(a: A) -> A: return a\nTOOLS = {{'f': f}}", ["f"]),
        ("import beside\nTOOLS = {'f': beside.f}", ["f"]),
    ],
)
def test_tools_of_a_file(text: str, names: list[str], tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("def f(): return 1")
    assert tools_of(tmp_path / "tools.py", text) == names


def test_no_file_no_tools() -> None:
    assert load_tools(None) == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = 1", "holds no tools"),
        ("def broken(:", "SyntaxError"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("raise RuntimeError('no key')", "RuntimeError: no key"),
        ("TOOLS = {'bad name': print}", "bad name"),
    ],
)
def test_a_file_that_cannot_be_used_says_why(text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=says):
        tools_of(tmp_path / "tools.py", text)


@pytest.mark.parametrize("name", ["none.py", "."])
def test_a_missing_file_is_named(name: str) -> None:
    with pytest.raises(UsageError, match="there is no such file"):
        load_tools(name)


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    path = tmp_path / "tools.txt"
    path.write_text("x")
    with pytest.raises(UsageError, match=r"must end in \.py"):
        load_tools(str(path))
