"""The programs of tests/cases in a box of every provider."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import resource
import time
from pathlib import Path
from types import ModuleType

import pytest

from farhand.exec import CellEvent, ProgramResult, run_cells
from farhand.limits import MIB, Limits
from farhand.sandbox.port import Sandbox
from farhand.tool import collect

pytestmark = pytest.mark.anyio
CASES = Path(__file__).parent / "cases"
SEMANTICS = [json.loads(line) for line in (CASES / "semantics.jsonl").read_text().splitlines()]


def programs(*folders: str) -> list[str]:
    return [f"{folder}/{path.stem}" for folder in folders for path in sorted((CASES / folder).glob("*.py"))]


def fixture() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tools_fixture", CASES / "tools_fixture.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TOOLS = collect(fixture())


async def shown(sandbox: Sandbox, source: str, limits: Limits | None = None) -> tuple[str, ProgramResult]:
    """What `farhand exec` prints on standard output."""
    text: list[str] = []

    def on_event(event: CellEvent) -> None:
        if event.kind == "out" and event.stream == "stdout":
            text.append(event.text)
        elif event.kind == "value":
            text.append(f"=> {event.text}\n")

    result = await run_cells(sandbox, source, tools=TOOLS, limits=limits, on_event=on_event)
    return "".join(text) + "".join(f"FINAL {final}\n" for final in result.finals), result


@pytest.mark.parametrize("name", programs("lang", "agent", "bench"))
async def test_the_result_is_cpythons(sandbox: Sandbox, name: str) -> None:
    text, result = await shown(sandbox, (CASES / f"{name}.py").read_text())
    assert text.strip() == (CASES / f"{name}.expected").read_text().strip(), result.cells
    assert result.exit_code == 0


@pytest.mark.parametrize("case", SEMANTICS, ids=lambda case: case["name"])
async def test_the_language_is_cpythons(sandbox: Sandbox, case: dict[str, str]) -> None:
    text, result = await shown(sandbox, case["code"])
    lines = [line for line in text.splitlines(keepends=True) if not line.startswith("=> ")]
    assert "".join(lines) == case["expected_stdout"], result.cells


@pytest.mark.parametrize("name", programs("limits"))
async def test_what_eats_time_memory_or_stack_is_contained(sandbox: Sandbox, name: str) -> None:
    limits = Limits(wall_s=2, memory_bytes=256 * MIB)
    started = time.monotonic()
    _, result = await shown(sandbox, f"{(CASES / f'{name}.py').read_text()}\n#%%\n1 + 1", limits)
    assert time.monotonic() - started < 4.5
    first, second = result.cells
    assert second.value == {"text/plain": "2"}
    error = first.error
    assert error is None or error["kind"] in ("limit", "exception", "ended"), error
    assert error is None or error["kind"] != "limit" or error["limit"] in ("wall_s", "cpu_s", "memory_bytes")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 600 * 1024


@pytest.mark.timing
async def test_the_harness_stays_calm_while_a_box_rages(sandbox: Sandbox) -> None:
    source = "#%%\n".join((CASES / f"limits/{name}.py").read_text() for name in ("l31_print_flood", "l39_dict_growth"))
    lateness = 0.0

    async def heartbeat() -> None:
        nonlocal lateness
        while True:
            due = time.monotonic() + 0.01
            await asyncio.sleep(0.01)
            lateness = max(lateness, time.monotonic() - due)

    beating = asyncio.create_task(heartbeat())
    await shown(sandbox, source, Limits(wall_s=2, memory_bytes=256 * MIB))
    beating.cancel()
    assert lateness < 0.1
