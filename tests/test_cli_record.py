from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from farhand import event as ev
from farhand import registry
from farhand.cli.main import cli
from farhand.cli.show import Outputs
from farhand.event import Event, NewEvent
from farhand.session import Session
from pseudo_terminal import PseudoTerminal


@pytest.fixture
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FARHAND_HOME", str(tmp_path))
    return tmp_path


def invoke(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(cli, list(arguments))
    return result.exit_code, result.stdout, result.stderr


def write(home: Path, *logs: tuple[str, list[NewEvent]]) -> list[str]:
    """Sessions with these titles and events; their ids."""

    async def work() -> list[str]:
        store, blobs = registry.store(home), registry.blobs(home)
        ids = []
        for title, events in logs:
            ids.append(await store.create(NewEvent(ev.SESSION_CREATED, {"title": title, "agent": ""})))
            session = Session(store, blobs, ids[-1])
            await session.catch_up()
            session.generation = await store.claim(ids[-1], "own_test", 15)
            await session.catch_up()
            await session.append(*events)
            await store.release(ids[-1], session.generation, "idle")
        await store.close()
        return ids

    return asyncio.run(work())


def turn(answer: str, **wrote: Any) -> list[NewEvent]:
    return [
        NewEvent(ev.MODEL_REQUESTED, {"step": 1, "attempt": 1, "model": "m"}),
        NewEvent(ev.MODEL_REPLIED, {"step": 1, "text": "I think.\n```python\nx = 1\n```", "calls": [], "usage": {}}),
        NewEvent(ev.ACTION_STARTED, {"action": "act_1", "step": 1, "code": "x = 1", "box": "sbx_1"}),
        NewEvent(ev.ACTION_WROTE, {"action": "act_1", "box": "sbx_1", "chunks": [["stdout", "out\n"]], **wrote}),
        NewEvent(ev.ACTION_FINISHED, {"action": "act_1", "ok": True, "usage": {}, "output": {}}),
        NewEvent(ev.TURN_ANSWERED, {"turn": "trn_2", "answer": {"value": answer, "text": repr(answer)}}),
    ]


def test_without_sessions_there_is_nothing_to_list(own_home: Path) -> None:
    code, out, err = invoke("sessions")
    assert (code, out) == (0, "")
    assert "farhand run" in err
    assert invoke("show", "last")[0] == 1


def test_sessions_are_listed_newest_first(own_home: Path) -> None:
    first, second = write(own_home, ("the first", []), ("the \x1b[2J second", []))
    code, out, _ = invoke("sessions")
    lines = out.splitlines()
    assert code == 0
    assert [line.split()[0] for line in lines] == [second, first]
    assert "the first" in lines[1]
    assert "\x1b" not in out
    assert len(invoke("sessions", "--limit", "1")[1].splitlines()) == 1
    rows = [json.loads(line) for line in invoke("sessions", "--json")[1].splitlines()]
    assert [row["session_id"] for row in rows] == [second, first]
    assert rows[1]["title"] == "the first"


def test_a_session_is_shown_again_from_its_log(own_home: Path) -> None:
    long = "line\n" * 3000
    (session,) = write(own_home, ("t", turn("forty two", displays=[{"text/plain": long}])))
    code, out, _ = invoke("show", session)
    assert code == 0
    for expected in ("step 1", "I think.", "    x = 1", "│ out", "Answer", "forty two", session, long.splitlines()[-1]):
        assert expected in out


def test_long_outputs_are_shown_by_head_and_tail_unless_all_is_asked_for(own_home: Path) -> None:
    lines = [[["stdout", "".join(f"line {n}\n" for n in range(at, at + 1000))]] for at in range(0, 9000, 1000)]
    wrote = [NewEvent(ev.ACTION_WROTE, {"action": "act_1", "box": "sbx_1", "chunks": chunks}) for chunks in lines]
    value = "[" + "1,\n " * 100_000 + "1]"
    events = turn("a" * 30_000)
    events[3:5] = [*wrote, NewEvent(ev.ACTION_FINISHED, {"action": "act_1", "value": {"text/plain": value}})]
    (session,) = write(own_home, ("t", events))
    code, out, _ = invoke("show", session)
    assert code == 0
    for expected in ("line 0\n", "line 8999\n", "characters cut", "=>", f"farhand show --full {session}"):
        assert expected in out
    assert out.count("characters cut …]") == 3
    assert "line 4500\n" not in out
    assert len(out) < 110_000
    whole = invoke("show", "--full", session)[1]
    assert "characters cut" not in whole
    assert "line 4500\n" in whole
    assert len(whole.splitlines()) > 109_000


def test_output_is_cut_wherever_its_pieces_end() -> None:
    text = "".join(chr(0x4E00 + n) for n in range(100))
    for size in (1, 7, 40, 100):
        outputs = Outputs(most=20)
        pieces = [
            Event("s", 1, ev.ACTION_WROTE, 1, 0.0, {"action": "a", "chunks": [["stdout", text[at : at + size]]]})
            for at in range(0, 100, size)
        ]
        for piece in pieces:
            outputs.count(piece)
        shown = "".join(chunk[1] for piece in pieces for chunk in outputs.cut(piece).data["chunks"])
        assert shown == f"{text[:10]}\n[… 80 characters cut …]\n{text[-10:]}", size


def test_sessions_say_how_the_last_turn_ended_and_fit_the_terminal(own_home: Path, tmp_path: Path) -> None:
    failed = NewEvent(ev.TURN_FAILED, {"turn": "trn_2", "error": {"code": "limit", "limit": "steps", "message": "m"}})
    write(own_home, ("new", []), ("good", turn("x")), ("bad " * 20, [failed]))
    lines = invoke("sessions")[1].splitlines()
    assert [" failed steps " in lines[0], " answered " in lines[1], " idle " in lines[2]] == [True, True, True]
    for columns in (80, 200):
        command = [sys.executable, "-m", "farhand", "sessions"]
        with PseudoTerminal(command, columns=columns, environ={"FARHAND_HOME": str(own_home)}) as terminal:
            assert terminal.finish() == 0
        assert max(map(len, terminal.text.splitlines())) <= columns
        assert ("tokens" in terminal.text) is (columns == 200)


def test_colours_can_be_asked_for(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (session,) = write(own_home, ("t", turn("a")))
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b" not in invoke("show", session)[1]
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[" in invoke("show", session)[1]


def test_show_as_json_gives_whole_events(own_home: Path) -> None:
    long = "x\x1b\x7f" * 8000
    (session,) = write(own_home, ("t", turn("a", displays=[{"text/plain": long}])))
    code, out, _ = invoke("show", session, "--json")
    events = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    (wrote,) = [event for event in events if event["type"] == ev.ACTION_WROTE]
    assert wrote["data"]["displays"] == [{"text/plain": long}]
    assert "\x1b" not in out
    assert "\x7f" not in out


def test_last_and_the_beginning_of_an_id_name_a_session(own_home: Path) -> None:
    first, second = write(own_home, ("one", turn("1")), ("two", turn("2")))
    assert second in invoke("show", "last")[1]
    different = next(n for n in range(len(first)) if first[n] != second[n]) + 1
    assert first in invoke("show", first[:different])[1]
    assert second in invoke("show", second.removeprefix("ses_"))[1]
    code, out, err = invoke("show", "ses_")
    assert (code, out) == (1, "")
    assert "begins 2 sessions" in err
    code, out, err = invoke("show", "nothing")
    assert (code, out) == (1, "")
    assert "farhand sessions" in err
