"""Output on its way into the log: bounded, in order, acknowledged only after it stands there."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farhand import event as ev
from farhand.event import NewEvent
from farhand.files.blobs import MemoryBlobs
from farhand.limits import WROTE_KEPT_BYTES
from farhand.record import HEAD_BYTES, TAIL_BYTES, Recorder
from farhand.session import Session
from farhand.store.memory import MemoryStore

pytestmark = pytest.mark.anyio


class Acks:
    """The box's end: notes what is acknowledged, and what the log said at that moment."""

    box_id = "sbx_1"

    def __init__(self, session: Session) -> None:
        self._session = session
        self.seen: list[tuple[int, int]] = []

    async def ack(self, n: int) -> None:
        events = await self._session.store.read(self._session.id)
        frames = [event.data["frame"] for event in events if event.type == ev.ACTION_WROTE]
        self.seen.append((n, max(frames, default=0)))


async def start() -> tuple[Session, Acks, Recorder]:
    store = MemoryStore()
    identity = await store.create(NewEvent(ev.SESSION_CREATED, {}))
    session = Session(store, MemoryBlobs(), identity)
    session.generation = await store.claim(identity, "own_a", 15.0)
    await session.catch_up()
    acks = Acks(session)
    return session, acks, Recorder(session, "act_1", acks)  # type: ignore[arg-type]


def out(n: int, text: str, stream: str = "stdout") -> dict[str, Any]:
    return {"t": "out", "n": n, "stream": stream, "text": text}


async def wrote(session: Session) -> list[dict[str, Any]]:
    other = Session(session.store, session.blobs, session.id)
    events: list[dict[str, Any]] = []
    other.listen(lambda event: events.append(dict(event.data)) if event.type == ev.ACTION_WROTE else None)
    await other.catch_up()
    return events


def text_of(events: list[dict[str, Any]]) -> str:
    return "".join(text for event in events for _, text in event["chunks"])


async def test_a_frame_is_acknowledged_only_after_it_is_in_the_log() -> None:
    _, acks, recorder = await start()
    for n in range(1, 50):
        await recorder.add(out(n, "x" * 5000))
        if n % 10 == 0:
            await recorder.before_call()
    await recorder.finish()
    await recorder.close()
    assert acks.seen
    assert all(acked <= logged for acked, logged in acks.seen)


async def test_small_output_is_kept_whole_and_in_order() -> None:
    session, _, recorder = await start()
    for n, (stream, text) in enumerate([("stdout", "a"), ("stderr", "b"), ("stdout", "c"), ("stdout", "d")], 1):
        await recorder.add(out(n, text, stream))
    await recorder.finish()
    await recorder.close()
    events = await wrote(session)
    assert [chunk for event in events for chunk in event["chunks"]] == [
        ["stdout", "a"],
        ["stderr", "b"],
        ["stdout", "cd"],
    ]


async def test_much_output_keeps_head_and_tail_and_counts_the_rest() -> None:
    session, _, recorder = await start()
    lines = [f"{n:07}\n" * 1000 for n in range(200)]
    for n, line in enumerate(lines, 1):
        await recorder.add(out(n, line))
    await recorder.finish()
    await recorder.close()
    events = await wrote(session)
    text = text_of(events)
    cut = sum(event["cut_bytes"] for event in events)
    assert text.startswith(lines[0])
    assert text.endswith(lines[-1])
    assert f"[… {cut:,} characters of output cut …]" in text
    assert cut + len(text.replace(f"\n[… {cut:,} characters of output cut …]\n", "")) == sum(map(len, lines))
    assert len(text) <= WROTE_KEPT_BYTES


async def test_an_answer_after_a_flood_is_kept_with_the_tail_before_it() -> None:
    session, acks, recorder = await start()
    for n in range(1, 41):
        await recorder.add(out(n, f"{n:04}" * 2000))
    await recorder.add({"t": "display", "n": 41, "bundle": {"text/plain": "p"}})
    await recorder.add({"t": "answer", "n": 42, "value": 1, "repr": "1", "problem": None})
    await recorder.finish()
    await recorder.close()
    events = await wrote(session)
    assert [answer["value"] for event in events for answer in event["answers"]] == [1]
    assert len([display for event in events for display in event["displays"]]) == 1
    assert "0040" in text_of(events)
    assert acks.seen[-1][0] == 42


async def test_output_is_written_while_the_action_runs() -> None:
    session, acks, recorder = await start()
    await recorder.add(out(1, "hello"))
    async with asyncio.timeout(5):
        while not acks.seen:
            await asyncio.sleep(0.01)
    assert text_of(await wrote(session)) == "hello"
    await recorder.close()


FRAMES = st.lists(
    st.one_of(
        st.tuples(st.just("out"), st.integers(1, 40_000)),
        st.tuples(st.sampled_from(["answer", "call"]), st.just(0)),
    ),
    max_size=60,
)


@given(FRAMES)
def test_nothing_is_lost_uncounted_whatever_comes(frames: list[tuple[str, int]]) -> None:
    async def play() -> None:
        session, acks, recorder = await start()
        total = answers = 0
        for n, (kind, size) in enumerate(frames, 1):
            if kind == "out":
                total += size
                await recorder.add(out(n, "x" * size))
            elif kind == "answer":
                answers += 1
                await recorder.add({"t": "answer", "n": n, "value": n, "repr": str(n)})
            else:
                await recorder.before_call()
        await recorder.finish()
        await recorder.close()
        events = await wrote(session)
        kept = text_of(events).count("x")
        assert kept + sum(event["cut_bytes"] for event in events) == total
        assert sum(len(event["answers"]) for event in events) == answers
        assert kept <= max(WROTE_KEPT_BYTES, HEAD_BYTES + TAIL_BYTES) + 40_000
        numbers = [event["frame"] for event in events]
        assert numbers == sorted(numbers)
        assert all(acked <= logged for acked, logged in acks.seen)

    asyncio.run(play())
