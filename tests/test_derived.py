"""The rows derived from a log, event by event."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farhand.event import (
    EFFECT_INTENDED,
    EFFECT_RECONCILED,
    EFFECT_SETTLED,
    MESSAGE_RECEIVED,
    MODEL_REPLIED,
    SESSION_CLAIMED,
    SESSION_CREATED,
    SESSION_RELEASED,
    TURN_ANSWERED,
    TURN_CANCELLED,
    TURN_FAILED,
    TYPES,
    Event,
)
from farhand.limits import NAME_CHARS, TITLE_CHARS
from farhand.store.derived import change_effects, effect_change, session_after
from farhand.store.port import EffectRow, SessionRow


def log(*events: tuple[str, dict[str, Any]]) -> list[Event]:
    return [Event("ses_a", seq, kind, 1, 100.0 + seq, data) for seq, (kind, data) in enumerate(events, 1)]


def fold(*events: tuple[str, dict[str, Any]]) -> SessionRow:
    row = None
    for event in log((SESSION_CREATED, {}), *events):
        row = session_after(row, event)
    assert row is not None
    return row


def open_effects(*events: tuple[str, dict[str, Any]]) -> dict[str, EffectRow]:
    effects: dict[str, EffectRow] = {}
    for event in log(*events):
        effects = change_effects(effects, effect_change(event))
    return effects


MESSAGE = (MESSAGE_RECEIVED, {"text": "hello"})
CLAIM = (SESSION_CLAIMED, {})
RELEASE = (SESSION_RELEASED, {})


@pytest.mark.parametrize(
    ("events", "status"),
    [
        ([], "idle"),
        ([CLAIM], "idle"),
        ([MESSAGE], "waiting"),
        ([MESSAGE, MESSAGE], "waiting"),
        ([MESSAGE, CLAIM], "running"),
        ([CLAIM, MESSAGE], "running"),
        ([MESSAGE, CLAIM, MESSAGE], "running"),
        ([MESSAGE, CLAIM, RELEASE], "waiting"),
        ([MESSAGE, CLAIM, CLAIM], "running"),
        ([MESSAGE, CLAIM, (TURN_ANSWERED, {})], "idle"),
        ([MESSAGE, CLAIM, (TURN_FAILED, {})], "failed"),
        ([MESSAGE, CLAIM, (TURN_CANCELLED, {})], "cancelled"),
        ([MESSAGE, CLAIM, (TURN_FAILED, {}), RELEASE], "failed"),
        ([MESSAGE, CLAIM, (TURN_FAILED, {}), RELEASE, MESSAGE], "waiting"),
        ([MESSAGE, CLAIM, (TURN_FAILED, {}), MESSAGE], "running"),
        ([MESSAGE, CLAIM, ("future.type", {})], "running"),
    ],
)
def test_status(events: list[tuple[str, dict[str, Any]]], status: str) -> None:
    assert fold(*events).status == status


def test_generation_is_the_seq_of_the_standing_claim() -> None:
    assert fold().generation == 0
    assert fold(MESSAGE, CLAIM).generation == 3
    assert fold(MESSAGE, CLAIM, CLAIM).generation == 4
    assert fold(MESSAGE, CLAIM, RELEASE).generation == 0


@pytest.mark.parametrize(
    ("text", "title"),
    [
        ("Plain", "Plain"),
        ("  two\n\nlines\t", "two lines"),
        ("x" * TITLE_CHARS, "x" * TITLE_CHARS),
        ("x" * (TITLE_CHARS + 1), "x" * (TITLE_CHARS - 1) + "…"),
        ("\x1b]52;c;eA==\x07\u202eevil", "]52;c;eA== evil"),
        ("lone \ud800 half", "lone half"),
        (" \n ", ""),
        ({"sha256": "0", "bytes": 9}, ""),
        (None, ""),
    ],
)
def test_a_title_is_one_clean_line(text: Any, title: str) -> None:
    row = fold((MESSAGE_RECEIVED, {"text": text}))
    assert row.title == title
    row.title.encode("utf-8")


def test_the_first_message_with_text_names_a_session_without_a_title() -> None:
    assert fold((MESSAGE_RECEIVED, {"text": ""}), MESSAGE, (MESSAGE_RECEIVED, {"text": "later"})).title == "hello"


@pytest.mark.parametrize(
    "usage",
    [None, 7, [], {}, {"input_tokens": None}, {"input_tokens": -5}, {"input_tokens": True}, {"input_tokens": 2**70}],
)
def test_usage_that_is_none_counts_nothing(usage: Any) -> None:
    row = fold((MODEL_REPLIED, {"usage": usage}))
    assert (row.input_tokens, row.output_tokens) == (0, 0)


def test_usage_adds_up_within_what_a_database_holds() -> None:
    assert fold(*[(MODEL_REPLIED, {"usage": {"output_tokens": 3}})] * 4).output_tokens == 12
    assert fold(*[(MODEL_REPLIED, {"usage": {"output_tokens": 2**53}})] * 4).output_tokens == 2**53


INTENDED = (EFFECT_INTENDED, {"effect": "eff_1", "tool": "pay", "digest": "d"})


def settled(outcome: str) -> tuple[str, dict[str, Any]]:
    return EFFECT_SETTLED, {"effect": "eff_1", "outcome": outcome}


def reconciled(outcome: str) -> tuple[str, dict[str, Any]]:
    return EFFECT_RECONCILED, {"effect": "eff_1", "outcome": outcome}


@pytest.mark.parametrize(
    ("events", "outcome"),
    [
        ([INTENDED], "intended"),
        ([INTENDED, settled("unknown")], "unknown"),
        ([INTENDED, settled("done")], None),
        ([INTENDED, settled("failed")], None),
        ([INTENDED, settled("never_started")], None),
        ([INTENDED, settled("unknown"), reconciled("unknown")], "unknown"),
        ([INTENDED, settled("unknown"), reconciled("done")], None),
        ([INTENDED, reconciled("done"), settled("unknown")], None),
        ([INTENDED, settled("unknown"), INTENDED], "intended"),
        ([settled("unknown")], None),
        ([(EFFECT_INTENDED, {"tool": "pay"})], None),
        ([(EFFECT_INTENDED, {"effect": 7})], None),
    ],
)
def test_an_effect_is_open_until_its_outcome_is_known(events: list[Any], outcome: str | None) -> None:
    effects = open_effects(*events)
    assert [effect.outcome for effect in effects.values()] == ([] if outcome is None else [outcome])


def test_an_effect_row_names_tool_and_digest() -> None:
    assert open_effects(INTENDED) == {"eff_1": EffectRow("ses_a", "eff_1", "pay", "d", "intended", 1)}


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.sampled_from(["unknown", "done", "eff_1"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
FIELDS = st.sampled_from(["agent", "title", "text", "usage", "effect", "tool", "digest", "outcome", "owner"])


@given(
    st.lists(st.tuples(st.sampled_from(sorted(TYPES) + ["future.type"]), st.dictionaries(FIELDS, VALUES)), max_size=12)
)
def test_whatever_the_log_holds_the_rows_can_be_stored(events: list[tuple[str, dict[str, Any]]]) -> None:
    row = fold(*events)
    effects = open_effects(*events)
    assert row.last_seq == len(events) + 1
    for text in (row.title, row.agent, *(t for e in effects.values() for t in (e.effect_id, e.tool, e.digest))):
        assert len(text.encode("utf-8")) >= len(text)
        assert "\x00" not in text
        assert len(text) <= max(TITLE_CHARS, NAME_CHARS)
    assert 0 <= row.input_tokens <= 2**53
    assert row.status in {"idle", "waiting", "running", "failed", "cancelled"}
    json.dumps([row.title, row.agent])
