"""The contract of `store/port.py`, sentence by sentence, against every adapter.

What needs several processes, a disk or a broken file is in tests/test_sqlite.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from farhand.errors import Conflict, Fenced, Held, SessionNotFound, StoreError, UsageError
from farhand.event import (
    ANYONE,
    CANCEL_REQUESTED,
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
    NewEvent,
)
from farhand.limits import APPEND_EVENTS, EVENT_BYTES, READ_PAGE_EVENTS
from farhand.store.memory import MemoryStore
from farhand.store.port import EffectRow, SessionRow, Store
from farhand.store.sqlite import SqliteStore

pytestmark = pytest.mark.anyio

CREATED = NewEvent(SESSION_CREATED, {"agent": "app:agent"})


class Clock:
    """A clock that stands until it is moved."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["memory", "sqlite"])
async def store(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> AsyncIterator[Store]:
    made: MemoryStore | SqliteStore
    made = MemoryStore(clock=clock) if request.param == "memory" else SqliteStore(tmp_path / "record.db", clock=clock)
    async with made:
        yield made


def message(text: str = "hello", **more: object) -> NewEvent:
    return NewEvent(MESSAGE_RECEIVED, {"id": "msg_1", "role": "user", "text": text, **more})


def intended(effect: str, tool: str = "pay") -> NewEvent:
    return NewEvent(EFFECT_INTENDED, {"effect": effect, "tool": tool, "digest": f"d-{effect}"})


async def claimed(store: Store) -> tuple[str, int]:
    """A new session and the generation of its claim."""
    session_id = await store.create(CREATED)
    return session_id, await store.claim(session_id, "own_a", 15.0)


async def types(store: Store, session_id: str) -> list[str]:
    return [event.type for event in await store.read(session_id)]


async def row(store: Store, session_id: str) -> SessionRow:
    return next(one for one in await store.sessions() if one.session_id == session_id)


# Create.


async def test_create_writes_the_first_event(store: Store, clock: Clock) -> None:
    session_id = await store.create(NewEvent(SESSION_CREATED, {"agent": "a", "limits": {"steps": 3}}))
    assert session_id.startswith("ses_")
    (event,) = await store.read(session_id)
    assert event == Event(session_id, 1, SESSION_CREATED, 1, clock.now, {"agent": "a", "limits": {"steps": 3}})


async def test_create_takes_a_given_id_once(store: Store) -> None:
    assert await store.create(CREATED, "ses_mine") == "ses_mine"
    with pytest.raises(Conflict):
        await store.create(NewEvent(SESSION_CREATED, {"agent": "other"}), "ses_mine")
    assert [event.data["agent"] for event in await store.read("ses_mine")] == ["app:agent"]


async def test_ids_differ_and_later_ones_sort_later(store: Store) -> None:
    first = await store.create(CREATED)
    until = time.time() + 0.002
    while time.time() < until:
        pass
    second = await store.create(CREATED)
    assert first < second
    assert len(first) == len(second) == 24


@pytest.mark.parametrize("session_id", ["", "../up", "a/b", "x" * 65, "ses_\ud800", "ses_\x00", "sés"])
async def test_an_id_is_safe_as_a_folder_name(store: Store, session_id: str) -> None:
    with pytest.raises(UsageError):
        await store.create(CREATED, session_id)


async def test_create_takes_no_other_type(store: Store) -> None:
    with pytest.raises(UsageError):
        await store.create(message())


# Append.


async def test_append_numbers_without_gaps_and_returns_what_read_gives(store: Store) -> None:
    session_id, generation = await claimed(store)
    appended = await store.append(session_id, 2, generation, [intended("eff_1"), intended("eff_2")])
    more = await store.append(session_id, 4, generation, [NewEvent(EFFECT_SETTLED, {"effect": "eff_1", "t": (1, 2)})])
    assert [event.seq for event in appended + more] == [3, 4, 5]
    assert await store.read(session_id, 2) == appended + more
    assert more[0].data["t"] == [1, 2]


@pytest.mark.parametrize("kind", sorted(ANYONE))
async def test_anyone_appends_at_the_end_without_a_claim(store: Store, kind: str) -> None:
    session_id = await store.create(CREATED)
    (event,) = await store.append(session_id, None, None, [NewEvent(kind, {"effect": "eff_1"})])
    assert event.seq == 2
    generation = await store.claim(session_id, "own_a", 15.0)
    (event,) = await store.append(session_id, None, None, [NewEvent(kind, {})])
    assert event.seq == generation + 1


@pytest.mark.parametrize("kind", sorted(TYPES - ANYONE) + ["future.type"])
async def test_other_types_need_a_claim(store: Store, kind: str) -> None:
    session_id = await store.create(CREATED)
    with pytest.raises(UsageError):
        await store.append(session_id, None, None, [message(), NewEvent(kind, {})])
    assert await types(store, session_id) == [SESSION_CREATED]


async def test_without_a_claim_every_generation_is_fenced(store: Store) -> None:
    session_id = await store.create(CREATED)
    for generation in (-1, 0, 1, 2):
        with pytest.raises(Fenced):
            await store.append(session_id, 1, generation, [intended("eff_1")])
    assert await types(store, session_id) == [SESSION_CREATED]


async def test_a_message_in_between_is_a_conflict_and_success_after_reading(store: Store) -> None:
    session_id, generation = await claimed(store)
    await store.append(session_id, None, None, [message("wait")])
    with pytest.raises(Conflict):
        await store.append(session_id, 2, generation, [intended("eff_1")])
    assert await types(store, session_id) == [SESSION_CREATED, SESSION_CLAIMED, MESSAGE_RECEIVED]
    last = (await store.read(session_id, 2))[-1].seq
    (event,) = await store.append(session_id, last, generation, [intended("eff_1")])
    assert event.seq == 4


async def test_a_driver_that_lost_its_claim_is_fenced_everywhere(store: Store, clock: Clock) -> None:
    session_id, old = await claimed(store)
    clock.now += 15.0
    new = await store.claim(session_id, "own_b", 15.0)
    before = await store.read(session_id)
    # Also when it has read everything, and also when a conflict would be true as well.
    for after_seq in (old, new):
        with pytest.raises(Fenced):
            await store.append(session_id, after_seq, old, [intended("eff_1")])
    with pytest.raises(Fenced):
        await store.renew(session_id, old, 15.0)
    with pytest.raises(Fenced):
        await store.release(session_id, old, "idle")
    assert await store.read(session_id) == before
    await store.append(session_id, new, new, [intended("eff_1")])


async def test_a_released_claim_is_fenced_everywhere(store: Store) -> None:
    session_id, generation = await claimed(store)
    await store.release(session_id, generation, "idle")
    with pytest.raises(Fenced):
        await store.append(session_id, 3, generation, [intended("eff_1")])
    with pytest.raises(Fenced):
        await store.renew(session_id, generation, 15.0)
    with pytest.raises(Fenced):
        await store.release(session_id, generation, "idle")
    assert await types(store, session_id) == [SESSION_CREATED, SESSION_CLAIMED, SESSION_RELEASED]


async def test_a_claim_whose_lease_ran_out_goes_on_while_nobody_else_claims(store: Store, clock: Clock) -> None:
    session_id, generation = await claimed(store)
    clock.now += 3600.0
    await store.append(session_id, 2, generation, [intended("eff_1")])
    await store.renew(session_id, generation, 15.0)
    with pytest.raises(Held):
        await store.claim(session_id, "own_b", 15.0)


async def test_a_log_shorter_than_what_was_read_is_an_error_of_its_own(store: Store) -> None:
    session_id, generation = await claimed(store)
    with pytest.raises(StoreError) as caught:
        await store.append(session_id, 9, generation, [intended("eff_1")])
    assert not isinstance(caught.value, (Conflict, Fenced))
    assert caught.value.hint


@pytest.mark.parametrize(("after_seq", "generation"), [(2, None), (None, 2)])
async def test_after_seq_and_generation_go_together(store: Store, after_seq: int, generation: int) -> None:
    session_id, _ = await claimed(store)
    with pytest.raises(UsageError):
        await store.append(session_id, after_seq, generation, [message()])


@pytest.mark.parametrize("kind", [SESSION_CREATED, SESSION_CLAIMED, SESSION_RELEASED])
async def test_types_with_a_verb_of_their_own_are_not_appended(store: Store, kind: str) -> None:
    session_id, generation = await claimed(store)
    with pytest.raises(UsageError):
        await store.append(session_id, 2, generation, [NewEvent(kind, {"owner": "own_b"})])


async def test_one_bad_event_leaves_none_of_its_batch(store: Store) -> None:
    session_id, generation = await claimed(store)
    large = NewEvent(EFFECT_SETTLED, {"value": "x" * EVENT_BYTES})
    for events in ([intended("eff_1"), large], [large, intended("eff_1")]):
        with pytest.raises(UsageError, match="blob"):
            await store.append(session_id, 2, generation, events)
    assert await types(store, session_id) == [SESSION_CREATED, SESSION_CLAIMED]
    assert await store.open_effects(session_id) == []


async def test_the_size_limit_is_exact(store: Store) -> None:
    session_id = await store.create(CREATED)
    frame = len('{"text":""}')
    (event,) = await store.append(
        session_id, None, None, [NewEvent(MESSAGE_RECEIVED, {"text": "x" * (EVENT_BYTES - frame)})]
    )
    assert len((await store.read(session_id, 1))[0].data["text"]) == EVENT_BYTES - frame
    with pytest.raises(UsageError):
        await store.append(
            session_id, None, None, [NewEvent(MESSAGE_RECEIVED, {"text": "x" * (EVENT_BYTES - frame + 1)})]
        )
    # Every character counts as its ASCII form does.
    with pytest.raises(UsageError):
        await store.append(session_id, None, None, [NewEvent(MESSAGE_RECEIVED, {"text": "é" * (EVENT_BYTES // 6 + 1)})])
    assert event.seq == 2


@pytest.mark.parametrize(
    "data",
    [
        {"a": float("nan")},
        {"a": float("inf")},
        {"a": {1, 2}},
        {"a": b"x"},
        {("a",): 1},
        {"a": 10**5000},
    ],
)
async def test_what_is_no_json_is_refused(store: Store, data: dict[str, object]) -> None:
    session_id = await store.create(CREATED)
    with pytest.raises(UsageError):
        await store.append(session_id, None, None, [NewEvent(MESSAGE_RECEIVED, data)])


async def test_deep_nesting_is_refused_or_read_back(store: Store) -> None:
    session_id = await store.create(CREATED)
    deep: list[object] = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(UsageError):
        await store.append(session_id, None, None, [NewEvent(MESSAGE_RECEIVED, {"a": deep})])
    assert await types(store, session_id) == [SESSION_CREATED]


@pytest.mark.parametrize("kind", ["", "Message", "a b", "x" * 65, "é.x", "a\x00", "a\ud800", None, 7])
async def test_a_type_is_a_plain_name(store: Store, kind: str) -> None:
    session_id, generation = await claimed(store)
    with pytest.raises(UsageError):
        await store.append(session_id, 2, generation, [NewEvent(kind, {})])


async def test_text_comes_back_as_it_was(store: Store) -> None:
    session_id = await store.create(CREATED)
    data = {
        "text": "nul \x00 surrogates \ud800\udfff\udc00 emoji 😀 'quotes\"",
        "\x00key\ud800": [1, -1.5, 2**70, None, True],
    }
    (event,) = await store.append(session_id, None, None, [NewEvent(MESSAGE_RECEIVED, data)])
    assert (await store.read(session_id, 1))[0].data == event.data
    assert event.data["\x00key\ud800"] == [1, -1.5, 2**70, None, True]
    # Two halves that stand side by side are one character after the round trip; a lone one stays.
    assert event.data["text"].encode("utf-16", "surrogatepass") == data["text"].encode("utf-16", "surrogatepass")


async def test_unknown_types_are_kept(store: Store) -> None:
    session_id, generation = await claimed(store)
    await store.append(session_id, 2, generation, [NewEvent("hologram.rendered", {"x": [1, {"y": None}]})])
    event = (await store.read(session_id))[-1]
    assert (event.type, event.data) == ("hologram.rendered", {"x": [1, {"y": None}]})


async def test_the_log_does_not_change_with_the_data_given_or_taken(store: Store) -> None:
    session_id = await store.create(CREATED)
    data = {"list": [1]}
    (event,) = await store.append(session_id, None, None, [NewEvent(MESSAGE_RECEIVED, data)])
    data["list"].append(2)
    event.data["list"].append(3)
    (await store.read(session_id, 1))[0].data["list"].append(4)
    assert (await store.read(session_id, 1))[0].data == {"list": [1]}


async def test_an_append_of_nothing_checks_and_writes_nothing(store: Store) -> None:
    session_id, generation = await claimed(store)
    assert await store.append(session_id, 2, generation, []) == []
    with pytest.raises(Fenced):
        await store.append(session_id, 2, 1, [])
    assert len(await store.read(session_id)) == 2


async def test_a_batch_is_bounded(store: Store) -> None:
    session_id = await store.create(CREATED)
    assert len(await store.append(session_id, None, None, [message()] * APPEND_EVENTS)) == APPEND_EVENTS
    with pytest.raises(UsageError):
        await store.append(session_id, None, None, [message()] * (APPEND_EVENTS + 1))


async def test_concurrent_appends_are_ordered_and_one_refusal_does_not_undo_the_others(store: Store) -> None:
    session_id, generation = await claimed(store)

    async def receipt(number: int) -> list[Event]:
        """As a driver does it: on Conflict read on, append again."""
        last = 2
        while True:
            try:
                return await store.append(session_id, last, generation, [intended(f"eff_{number}")])
            except Conflict:
                last = (await store.read(session_id, last))[-1].seq

    messages = [store.append(session_id, None, None, [message(str(n)), message(str(n))]) for n in range(30)]
    done = await asyncio.gather(*messages, *(receipt(n) for n in range(10)))
    stored = await store.read(session_id)
    assert [event.seq for event in stored] == list(range(1, 2 + 60 + 10 + 1))
    assert sorted((e for batch in done for e in batch), key=lambda e: e.seq) == stored[2:]
    assert all(batch[-1].seq - batch[0].seq == len(batch) - 1 for batch in done)


async def test_a_cancelled_append_stands_whole_or_not_at_all(store: Store) -> None:
    session_id = await store.create(CREATED)
    task = asyncio.ensure_future(store.append(session_id, None, None, [message("1"), message("2")]))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await store.append(session_id, None, None, [message("3")])
    assert [event.seq for event in await store.read(session_id)] in ([1, 2], [1, 2, 3, 4])


# Claim.


async def test_claim_appends_the_event_whose_seq_is_the_generation(store: Store) -> None:
    session_id = await store.create(CREATED)
    generation = await store.claim(session_id, "own_a", 15.0)
    event = (await store.read(session_id))[-1]
    assert (event.seq, event.type, event.data) == (generation, SESSION_CLAIMED, {"owner": "own_a", "lease_s": 15.0})
    assert (await row(store, session_id)).generation == generation


async def test_held_names_the_owner_and_the_seconds_left(store: Store, clock: Clock) -> None:
    session_id, _ = await claimed(store)
    clock.now += 5.0
    for owner in ("own_b", "own_a"):  # the same process twice is two drivers
        with pytest.raises(Held) as caught:
            await store.claim(session_id, owner, 15.0)
        assert caught.value.owner == "own_a"
        assert caught.value.left_s == pytest.approx(10.0)
        assert "own_a" in caught.value.message
    assert len(await store.read(session_id)) == 2


async def test_a_lease_runs_out_to_the_moment(store: Store, clock: Clock) -> None:
    session_id, _ = await claimed(store)
    clock.now += 14.999
    with pytest.raises(Held):
        await store.claim(session_id, "own_b", 15.0)
    clock.now += 0.001
    assert await store.claim(session_id, "own_b", 15.0) == 3


async def test_renew_moves_the_lease_and_writes_no_event(store: Store, clock: Clock) -> None:
    session_id, generation = await claimed(store)
    clock.now += 10.0
    await store.renew(session_id, generation, 20.0)
    clock.now += 19.0
    with pytest.raises(Held) as caught:
        await store.claim(session_id, "own_b", 15.0)
    assert caught.value.left_s == pytest.approx(1.0)
    assert len(await store.read(session_id)) == 2


async def test_a_released_session_is_free_at_once(store: Store) -> None:
    session_id, generation = await claimed(store)
    await store.release(session_id, generation, "idle")
    event = (await store.read(session_id))[-1]
    assert (event.type, event.data) == (SESSION_RELEASED, {"reason": "idle"})
    assert await store.claim(session_id, "own_b", 15.0) == 4


async def test_a_gone_owner_is_no_obstacle(store: Store) -> None:
    session_id, old = await claimed(store)
    asked: list[str] = []

    def gone(owner: str) -> bool:
        asked.append(owner)
        return True

    new = await store.claim(session_id, "own_b", 15.0, gone)
    assert asked == ["own_a"]
    with pytest.raises(Fenced):
        await store.append(session_id, new, old, [intended("eff_1")])


async def test_gone_is_not_asked_without_need(store: Store) -> None:
    def never(owner: str) -> bool:
        raise AssertionError(owner)

    session_id = await store.create(CREATED)
    generation = await store.claim(session_id, "own_a", 15.0, never)
    await store.release(session_id, generation, "idle")
    await store.claim(session_id, "own_a", 15.0, never)


async def test_an_answer_that_cannot_be_given_claims_nothing(store: Store) -> None:
    def broken(owner: str) -> bool:
        raise OSError("no locks here")

    session_id, _ = await claimed(store)
    with pytest.raises(OSError, match="no locks"):
        await store.claim(session_id, "own_b", 15.0, broken)
    assert len(await store.read(session_id)) == 2


async def test_of_many_claims_at_once_one_succeeds(store: Store) -> None:
    session_id = await store.create(CREATED)
    attempts = (store.claim(session_id, f"own_{n}", 15.0) for n in range(20))
    outcomes = await asyncio.gather(*attempts, return_exceptions=True)
    assert sorted(type(outcome).__name__ for outcome in outcomes) == ["Held"] * 19 + ["int"]
    assert len(await store.read(session_id)) == 2


async def test_of_many_claims_on_a_gone_owner_one_succeeds(store: Store) -> None:
    session_id, _ = await claimed(store)
    attempts = (store.claim(session_id, f"own_{n}", 15.0, lambda owner: owner == "own_a") for n in range(20, 30))
    outcomes = await asyncio.gather(*attempts, return_exceptions=True)
    assert sorted(type(outcome).__name__ for outcome in outcomes) == ["Held"] * 9 + ["int"]


async def test_a_clock_set_back_keeps_a_session_closed_for_one_lease_only(store: Store, clock: Clock) -> None:
    session_id, generation = await claimed(store)
    clock.now -= 86_400.0
    with pytest.raises(Held) as caught:
        await store.claim(session_id, "own_b", 1.0)
    assert caught.value.left_s == pytest.approx(15.0)  # the length of the lease that stands, not of the one asked for
    clock.now += 14.0
    with pytest.raises(Held):
        await store.claim(session_id, "own_b", 15.0)
    clock.now += 1.0
    assert await store.claim(session_id, "own_b", 15.0) == generation + 1


async def test_a_clock_set_back_changes_no_order(store: Store, clock: Clock) -> None:
    session_id, generation = await claimed(store)
    clock.now -= 500.0
    await store.append(session_id, 2, generation, [intended("eff_1")])
    events = await store.read(session_id)
    assert [event.seq for event in events] == [1, 2, 3]
    assert events[2].time == events[1].time - 500.0
    with pytest.raises(Conflict):
        await store.append(session_id, 2, generation, [intended("eff_2")])


@pytest.mark.parametrize("owner", ["", "own a", "own_\n", "x" * 201, "own_é", None])
async def test_an_owner_is_a_plain_name(store: Store, owner: str) -> None:
    session_id = await store.create(CREATED)
    with pytest.raises(UsageError):
        await store.claim(session_id, owner, 15.0)


@pytest.mark.parametrize("lease_s", [0.0, -1.0, float("nan"), float("inf")])
async def test_a_lease_has_an_end(store: Store, lease_s: float) -> None:
    session_id, generation = await claimed(store)
    with pytest.raises(UsageError):
        await store.claim(session_id, "own_b", lease_s)
    with pytest.raises(UsageError):
        await store.renew(session_id, generation, lease_s)


# Read and wait.


@pytest.mark.parametrize("session_id", ["ses_none", "", "ses_\ud800", "a/b"])
async def test_a_session_that_does_not_exist(store: Store, session_id: str) -> None:
    calls: list[Callable[[], object]] = [
        lambda: store.append(session_id, None, None, [message()]),
        lambda: store.append(session_id, 1, 1, [message()]),
        lambda: store.read(session_id),
        lambda: store.read(session_id, 5),
        lambda: store.wait(session_id, 0, 0.01),
        lambda: store.claim(session_id, "own_a", 15.0),
        lambda: store.renew(session_id, 1, 15.0),
        lambda: store.release(session_id, 1, "idle"),
        lambda: store.open_effects(session_id),
    ]
    for call in calls:
        with pytest.raises(SessionNotFound):
            await call()  # type: ignore[misc]


async def test_reading_in_pages_gives_the_whole_once(store: Store) -> None:
    session_id = await store.create(CREATED)
    for _ in range(3):
        await store.append(session_id, None, None, [message()] * 400)
    whole = await store.read(session_id)
    assert [event.seq for event in whole] == list(range(1, 1202))
    paged: list[Event] = []
    while page := await store.read(session_id, paged[-1].seq if paged else 0, READ_PAGE_EVENTS):
        paged += page
        assert len(page) <= READ_PAGE_EVENTS
    assert paged == whole
    assert [event.seq for event in await store.read(session_id, 7, 2)] == [8, 9]
    assert await store.read(session_id, 1201) == []
    assert await store.read(session_id, 5000) == []
    assert await store.read(session_id, 0, 0) == []
    assert await store.read(session_id, -3, 1) == whole[:1]


async def test_wait_returns_at_once_when_there_is_more(store: Store) -> None:
    session_id, _ = await claimed(store)
    assert await store.wait(session_id, 1, 0.0)
    assert await store.wait(session_id, 0, 60.0)


async def test_wait_ends_with_its_time(store: Store) -> None:
    session_id, _ = await claimed(store)
    begun = time.monotonic()
    assert not await store.wait(session_id, 2, 0.05)
    assert 0.04 < time.monotonic() - begun < 5.0
    assert not await store.wait(session_id, 2, 0.0)


async def test_an_append_wakes_those_who_wait_for_that_log_and_seq(store: Store) -> None:
    session_id, other = await store.create(CREATED), await store.create(CREATED)
    near = [asyncio.ensure_future(store.wait(session_id, 1, 30.0)) for _ in range(5)]
    far = asyncio.ensure_future(store.wait(session_id, 2, 30.0))
    elsewhere = asyncio.ensure_future(store.wait(other, 1, 30.0))
    for _ in range(10):
        await store.read(session_id)  # meanwhile they come to wait; the test holds as well if they do not yet
    await store.append(session_id, None, None, [message()])
    begun = time.monotonic()
    assert await asyncio.gather(*near) == [True] * 5
    assert time.monotonic() - begun < 1.0
    assert not far.done()
    assert not elsewhere.done()
    await store.append(session_id, None, None, [message()])
    assert await far
    elsewhere.cancel()
    await asyncio.gather(elsewhere, return_exceptions=True)


async def test_wait_misses_nothing_that_comes_while_it_begins(store: Store) -> None:
    session_id = await store.create(CREATED)
    for last in range(1, 60):
        waiting = asyncio.ensure_future(store.wait(session_id, last, 30.0))
        await store.append(session_id, None, None, [message()])
        assert await waiting


async def test_close_ends_waiting_and_everything_else(store: Store) -> None:
    session_id = await store.create(CREATED)
    waiting = asyncio.ensure_future(store.wait(session_id, 1, 30.0))
    for _ in range(5):
        await store.read(session_id)
    await store.close()
    with pytest.raises(StoreError, match="closed"):
        await waiting
    for call in (store.read(session_id), store.append(session_id, None, None, [message()]), store.sessions()):
        with pytest.raises(StoreError, match="closed"):
            await call  # type: ignore[misc]
    await store.close()


# Derived rows.


async def test_status_follows_the_turn_and_the_claim(store: Store) -> None:
    session_id = await store.create(CREATED)
    seen = [(await row(store, session_id)).status]

    async def then(what: object) -> None:
        await what  # type: ignore[misc]
        seen.append((await row(store, session_id)).status)

    async def last() -> int:
        return (await row(store, session_id)).last_seq

    await then(store.append(session_id, None, None, [message()]))
    generation = await store.claim(session_id, "own_a", 15.0)
    await then(store.renew(session_id, generation, 15.0))
    await then(store.append(session_id, await last(), generation, [NewEvent(TURN_ANSWERED, {})]))
    await then(store.append(session_id, None, None, [message()]))
    await then(store.append(session_id, await last(), generation, [NewEvent(TURN_FAILED, {})]))
    await then(store.append(session_id, None, None, [message(), NewEvent(CANCEL_REQUESTED, {})]))
    await then(store.append(session_id, await last(), generation, [NewEvent(TURN_CANCELLED, {})]))
    await then(store.release(session_id, generation, "idle"))
    await then(store.append(session_id, None, None, [message()]))
    generation = await store.claim(session_id, "own_a", 15.0)
    await then(store.release(session_id, generation, "stopped"))
    assert seen[:4] == ["idle", "waiting", "running", "idle"]
    assert seen[4:8] == ["running", "failed", "running", "cancelled"]
    assert seen[8:] == ["cancelled", "waiting", "waiting"]


async def test_rows_count_tokens_and_take_title_and_agent(store: Store, clock: Clock) -> None:
    session_id, generation = await claimed(store)
    created_at = clock.now
    clock.now += 2.0
    usage = {"input_tokens": 100, "output_tokens": 7}
    replies = [
        NewEvent(MODEL_REPLIED, {"usage": usage}),
        NewEvent(MODEL_REPLIED, {}),
        NewEvent(MODEL_REPLIED, {"usage": usage}),
    ]
    await store.append(session_id, None, None, [message("First\nline " + "x" * 200), message("Second")])
    await store.append(session_id, 4, generation, replies)
    found = await row(store, session_id)
    assert (found.input_tokens, found.output_tokens, found.agent) == (200, 14, "app:agent")
    assert found.title == "First line " + "x" * 68 + "…"
    assert (found.created_at, found.updated_at, found.last_seq) == (created_at, clock.now, 7)
    named = await store.create(NewEvent(SESSION_CREATED, {"agent": "a", "title": "Given"}))
    await store.append(named, None, None, [message("First")])
    assert (await row(store, named)).title == "Given"


async def test_sessions_are_listed_newest_change_first(store: Store, clock: Clock) -> None:
    ids = []
    for _ in range(4):
        clock.now += 1.0
        ids.append(await store.create(CREATED))
    clock.now += 1.0
    await store.append(ids[1], None, None, [message()])
    assert [one.session_id for one in await store.sessions()] == [ids[1], ids[3], ids[2], ids[0]]
    assert [one.session_id for one in await store.sessions(2)] == [ids[1], ids[3]]
    assert [one.session_id for one in await store.sessions(status="waiting")] == [ids[1]]
    assert [one.session_id for one in await store.sessions(1, status="idle")] == [ids[3]]
    assert await store.sessions(0) == []


async def test_open_effects_are_those_without_a_known_outcome(store: Store) -> None:
    session_id, generation = await claimed(store)

    def settled(effect: str, outcome: str) -> NewEvent:
        return NewEvent(EFFECT_SETTLED, {"effect": effect, "outcome": outcome})

    names = ["eff_done", "eff_failed", "eff_never", "eff_unknown", "eff_open", "eff_late"]
    events = [intended(name) for name in names]
    outcomes = {"eff_done": "done", "eff_failed": "failed", "eff_never": "never_started"}
    events += [settled(name, outcome) for name, outcome in outcomes.items()]
    events += [settled("eff_unknown", "unknown"), settled("eff_late", "unknown"), settled("eff_stranger", "unknown")]
    await store.append(session_id, 2, generation, events)
    await store.append(session_id, None, None, [NewEvent(EFFECT_RECONCILED, {"effect": "eff_late", "outcome": "done"})])
    assert await store.open_effects(session_id) == [
        EffectRow(session_id, "eff_unknown", "pay", "d-eff_unknown", "unknown", 6),
        EffectRow(session_id, "eff_open", "pay", "d-eff_open", "intended", 7),
    ]
    other, _ = await claimed(store)
    assert await store.open_effects(other) == []


async def test_rebuild_makes_the_same_rows(store: Store, clock: Clock) -> None:
    for number in range(5):
        session_id, generation = await claimed(store)
        clock.now += 1.0
        await store.append(session_id, None, None, [message(f"title {number} \ud800")])
        reply = NewEvent(MODEL_REPLIED, {"usage": {"input_tokens": number, "output_tokens": 1}})
        events = [reply, intended("eff_1"), intended("eff_2"), intended("eff_3")]
        events.append(NewEvent(EFFECT_SETTLED, {"effect": "eff_2", "outcome": "unknown"}))
        events.append(NewEvent(EFFECT_SETTLED, {"effect": "eff_3", "outcome": "done"}))
        await store.append(session_id, 3, generation, events)
        if number % 2:
            await store.append(session_id, 9, generation, [NewEvent(TURN_ANSWERED, {})])
            await store.release(session_id, generation, "idle")
    sessions = await store.sessions()
    effects = {one.session_id: await store.open_effects(one.session_id) for one in sessions}
    clock.now += 100.0
    await store.rebuild()
    assert await store.sessions() == sessions
    assert {one.session_id: await store.open_effects(one.session_id) for one in sessions} == effects
    with pytest.raises(Held):  # a lease is no derived row: it stands
        clock.now -= 100.0
        await store.claim(next(one.session_id for one in sessions if one.generation), "own_b", 15.0)
