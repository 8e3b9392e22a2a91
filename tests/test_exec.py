"""Programs run cell by cell."""

from __future__ import annotations

import asyncio

import pytest

from farhand.errors import ToolFailed
from farhand.exec import CellEvent, run_cells, split_cells
from farhand.limits import Limits
from farhand.sandbox.port import Sandbox
from farhand.tool import Tool

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("source", "cells"),
    [
        ("", []),
        ("1", ["1"]),
        ("a\n#%%\nb\n", ["a\n", "b\n"]),
        ("#%% title\n\n#%%\na\n#%%", ["a\n"]),
        ("x = '''\n #%%\n'''", ["x = '''\n #%%\n'''"]),
        ("a\r\n#%%\r\nb", ["a\r\n", "b"]),
    ],
)
def test_cells(source: str, cells: list[str]) -> None:
    assert split_cells(source) == cells


async def test_a_failing_cell_does_not_end_the_program(sandbox: Sandbox) -> None:
    result = await run_cells(sandbox, "x = 1\n1 / 0\n#%%\nx + 1\n#%%\nimport sys\nsys.exit(0)")
    assert [cell.ok for cell in result.cells] == [False, True, True]
    assert '"<cell 1>", line 2' in (result.cells[0].error or {})["traceback"]
    assert result.cells[1].value == {"text/plain": "2"}
    assert result.exit_code == 1


async def test_a_new_box_takes_over_and_that_is_said(sandbox: Sandbox) -> None:
    events: list[CellEvent] = []
    source = "x = 1\nopen('kept', 'w').write('k')\n#%%\nimport os\nos._exit(3)\n#%%\nopen('kept').read()\n#%%\nx"
    result = await run_cells(sandbox, source, on_event=events.append)
    assert [cell.ok for cell in result.cells] == [True, False, True, False]
    assert result.cells[1].lost == ("x",)
    assert result.cells[2].value == {"text/plain": "'k'"}
    (note,) = [event for event in events if event.kind == "note"]
    assert (note.cell, note.text) == (
        2,
        "the box died with its variables; a new one takes over, its files are kept; lost names: x, os",
    )


async def test_a_limit_gives_exit_code_three(sandbox: Sandbox) -> None:
    result = await run_cells(sandbox, "while True: pass\n#%%\n1", limits=Limits(wall_s=0.3))
    assert (result.cells[0].limit, result.cells[1].ok, result.exit_code) == ("wall_s", True, 3)


def double(x: int) -> int:
    return 2 * x


async def slow(x: int) -> int:
    await asyncio.sleep(0.2)
    return x


def refuse() -> None:
    raise ToolFailed("nothing happened", hint="try later")


def hang() -> None:
    import threading

    threading.Event().wait(5)


async def test_tools_run_on_this_side(sandbox: Sandbox) -> None:
    tools = [Tool.from_function(double), Tool.from_function(slow), Tool.from_function(refuse)]
    tools.append(Tool.from_function(hang, timeout_s=0.2))
    source = """
import asyncio
final_answer(double(4))
async def both():
    return await asyncio.gather(*[slow(i) for i in range(20)])
print(asyncio.run(both())[-1])
for call in (lambda: double(), lambda: double("x"), refuse, hang):
    try:
        call()
    except Exception as e:
        print(type(e).__name__, str(e).splitlines()[0])
"""
    text: list[str] = []
    result = await run_cells(sandbox, source, tools=tools, on_event=lambda e: text.append(e.text))
    assert result.exit_code == 0, result.cells
    assert "".join(text).splitlines() == [
        "19",
        "ToolArgumentError double() missing a required argument: 'x'",
        "ToolArgumentError double() argument x must be int, not str ('x')",
        "ToolFailed nothing happened",
        "ToolTimedOut hang gave no result within 0.2 s",
    ]
    assert result.finals == ("8",)


async def test_more_calls_than_allowed(sandbox: Sandbox) -> None:
    limits = Limits(tool_calls=3)
    result = await run_cells(sandbox, "while True: double(1)", tools=[Tool.from_function(double)], limits=limits)
    assert (result.cells[0].limit, result.exit_code) == ("tool_calls", 3)


async def test_cuts_are_said(sandbox: Sandbox) -> None:
    events: list[CellEvent] = []
    await run_cells(sandbox, "print('x' * 5000)", limits=Limits(output_bytes=1000), on_event=events.append)
    assert [event.text for event in events if event.kind == "note"] == ["4,001 bytes of output were cut"]


async def test_secrets_in_a_tools_error_stay_out_of_the_box(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAYMENT_KEY", "sk-planted-0123456789")

    def leaks() -> None:
        """Fails with the key in its message."""
        raise RuntimeError("401 with sk-planted-0123456789")

    out: list[str] = []
    source = "try:\n    leaks()\nexcept Exception as error:\n    print(error)"
    await run_cells(sandbox, source, tools=[Tool.from_function(leaks)], on_event=lambda event: out.append(event.text))
    assert "401 with" in "".join(out)
    assert "planted" not in "".join(out)
