from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from farhand import event as ev
from farhand import registry
from farhand.cli.main import cli
from farhand.event import NewEvent
from farhand.session import Session


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
