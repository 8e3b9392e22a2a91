"""What a person sees of a box, a model and a tool on a real terminal: nothing there obeys what they wrote."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from chat_server import serving
from pseudo_terminal import PseudoTerminal

pytestmark = [pytest.mark.jail, pytest.mark.hostile]

FARHAND = [sys.executable, "-m", "farhand.cli.main"]
ATTACKS = {
    "clipboard": "\x1b]52;c;ZXZpbA==\x07",
    "title": "\x1b]0;evil\x1b\\",
    "clear": "\x1b[2J\x1b[H",
    "cursor": "\x1b[5A\x1b[1G",
    "screen": "\x1b[?1049h\x1b[?25l",
    "answer": "\x1b[6n\x1b[c\x05",
    "link": "\x1b]8;;http://evil\x1b\\here\x1b]8;;\x1b\\",
    "device": "\x1bP+q544e\x1b\\\x1b_evil\x1b\\\x1b^evil\x1b\\",
    "one byte": "\x9b2J\x9d0;evil\x9c\x90evil\x9c",
    "reset": "\x1bc\x1b(0\x0e",
    "hidden": "\x1b[8mevil",
    "back": "good\x08\x08\x08\x08evil\x7f",
    "bell": "\x07\x00\x0b\x0c",
    "bidi": "\u202eevil\u2066\u200f\u061c",
    "tags": "\U000e0065\U000e0076",
    "lines": "\u2028\u2029\x85",
}
ALL = "".join(ATTACKS.values())
OURS = re.compile(r"\x1b\[[0-9;]*m|\r\x1b\[K|\r\n")
"""Colours, and a line that begins again."""
FORBIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\U000e0000-\U000e007f]")


def obeyed(shown: str, ours: re.Pattern[str]) -> list[str]:
    return FORBIDDEN.findall(ours.sub("", shown))


def environ(home: Path) -> dict[str, str]:
    return {"FARHAND_HOME": str(home), "OPENAI_API_KEY": "sk-of-nobody", "LANG": "C.UTF-8"}


CELLS = f"""
text = {ALL!r}
import os, sys
print("out", text)
print("err", text, file=sys.stderr)
os.write(1, b"raw " + text.encode() + b"\\xff\\xfe\\n")
open("/workspace/name" + text.replace("/", ""), "w").close()
text
#%%
class Odd:
    def __repr__(self): return "repr " + text
Odd()
#%%
raise ValueError("error " + text)
#%%
for byte in ("cut " + text + "\\n").encode(): os.write(1, bytes([byte]))
#%%
raise type("Class" + text, (Exception,), {{"__module__": "m" + text}})("x")
#%%
raise SystemExit("exit " + text)
#%%
exec(compile("1 / 0", "file" + text, "exec"))
#%%
shout(text)
#%%
display(Odd())
final_answer("final " + text)
"""
TOOLS = """
def shout(text: str) -> str:
    \"\"\"Shouts.

    Args:
        text: what
    \"\"\"
    raise ValueError("tool " + text)
TOOLS = {"shout": shout}
"""


def test_a_program_of_cells(own_home: Path, tmp_path: Path) -> None:
    program, tools = tmp_path / "cells.py", tmp_path / "tools.py"
    program.write_text(CELLS)
    tools.write_text(TOOLS)
    command = [*FARHAND, "exec", "--tools", str(tools), str(program)]
    with PseudoTerminal(command, environ=environ(own_home), cwd=tmp_path, columns=200) as terminal:
        assert terminal.finish() == 1
        shown = terminal.output
    for word in ("out ", "err ", "raw ", "cut ", "=> ", "repr ", "error ", "exit ", "tool ", "FINAL "):
        assert word in shown
    assert obeyed(shown, re.compile(r"\r\x1b\[K|\r\n")) == []


MODEL = f"""I think. {ALL}

```python
text = {ALL!r}
print("out", text)
open("/workspace/name" + text.replace("/", "")[:40], "w").close()
open("/workspace/kept.txt", "w").write(text)
raise ValueError("error " + text)
```
"""
ONE_LINE = "".join(one for one in ALL if one not in "\0\x0b\x0c\x85\u2028\u2029")
ANSWER = f"""Now the answer. {ALL}

```python
# {ONE_LINE}
final_answer("final " + text)
```
"""


def test_an_agent_and_its_transcript(own_home: Path, tmp_path: Path) -> None:
    with serving(MODEL, ANSWER, ANSWER.replace("#", "x = 1 #")) as server:
        command = [*FARHAND, "run", "--model", server.model, f"Task {ALL.replace(chr(0), '')}"]
        with PseudoTerminal(command, environ=environ(own_home), cwd=tmp_path, columns=200) as terminal:
            code = terminal.finish()
            shown = terminal.output
    assert code == 0, shown
    for word in ("I think", "out ", "error ", "final "):
        assert word in shown
    assert "\x1b[8m" not in shown
    assert obeyed(shown, OURS) == []
    assert all(path.name.isprintable() for path in tmp_path.iterdir())
    for more in (["show", "last"], ["sessions"]):
        with PseudoTerminal([*FARHAND, *more], environ=environ(own_home), cwd=tmp_path, columns=200) as terminal:
            assert terminal.finish() == 0
            assert "Task" in terminal.output
            assert obeyed(terminal.output, OURS) == []


def test_an_error_of_the_model(own_home: Path, tmp_path: Path) -> None:
    name = "openai:" + ALL.replace("\0", "").replace("@", "")
    command = [*FARHAND, "run", "--model", f"{name}@http://127.0.0.1:9/v1", "Task"]
    with PseudoTerminal(command, environ=environ(own_home), cwd=tmp_path, columns=200) as terminal:
        assert terminal.finish() != 0
        assert obeyed(terminal.output, OURS) == []


def test_errors_of_usage(own_home: Path, tmp_path: Path) -> None:
    nasty = ALL.replace("\0", "")
    for arguments in (["exec", nasty], ["exec", "--sandbox", nasty, "x"], ["show", nasty], [nasty], [f"--{nasty}"]):
        with PseudoTerminal([*FARHAND, *arguments], environ=environ(own_home), cwd=tmp_path, columns=200) as terminal:
            assert terminal.finish() in (1, 2)
            assert obeyed(terminal.output, OURS) == [], arguments
