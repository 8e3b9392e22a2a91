"""Tool calls under the ledger, without a box: receipts, refusals, the lease, stopping."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from farhand import event as ev
from farhand import ledger, value
from farhand.call import Caller, error_of, intention, start_tool
from farhand.decide import Act, CallTool, decide
from farhand.errors import Fenced, ToolFailed
from farhand.event import NewEvent
from farhand.files.blobs import MemoryBlobs
from farhand.secret import MASK, redactor
from farhand.session import Session
from farhand.state import Effect
from farhand.store.memory import MemoryStore
from farhand.tool import Tool, ToolContext

pytestmark = pytest.mark.anyio


class Bench:
    """A session in memory with one running action, and a Caller over it."""

    def __init__(self, *tools: Tool) -> None:
        self.tools = {item.name: item for item in tools}
        self.holds = True
        self.delivered: list[Effect] = []
        self.renewed = 0

    async def start(self) -> Bench:
        store, blobs = MemoryStore(), MemoryBlobs()
        identity = await store.create(NewEvent(ev.SESSION_CREATED, {"limits": {"tool_calls": 50}}))
        self.session = Session(store, blobs, identity)
        await self.session.post(NewEvent(ev.MESSAGE_RECEIVED, {"role": "user", "text": "Go."}))
        self.session.generation = await store.claim(identity, "own_a", 15.0)
        await self.session.catch_up()
        for kind, data in (
            (ev.MODEL_REQUESTED, {"step": 1, "attempt": 1, "model": "m"}),
            (ev.MODEL_REPLIED, {"step": 1, "text": "```python\nx\n```", "calls": [], "finish": "stop"}),
        ):
            await self.session.append(NewEvent(kind, data))
        act = decide(self.session.state, 0)[0]
        assert isinstance(act, Act)
        created = {"box": "sbx_1", "provider": "none"}
        started = {"action": act.action, "step": 1, "code": "x", "box": "sbx_1"}
        await self.session.append(NewEvent(ev.SANDBOX_CREATED, created), NewEvent(ev.ACTION_STARTED, started))
        self.caller = Caller(
            self.session,
            self.tools,
            redactor({"A_KEY": "sk-very-secret"}),
            lambda: self.holds,
            self._renew,
            self._deliver,
        )
        return self

    async def _renew(self) -> None:
        self.renewed += 1

    async def _deliver(self, effect: Effect) -> None:
        self.delivered.append(effect)

    async def intend(self, name: str, *args: Any, call: str = "c1", **kwargs: Any) -> Effect:
        action = self.session.state.action
        assert action is not None
        trees = {name: value.encode(given) for name, given in kwargs.items()}
        frame = {
            "t": "call",
            "n": 1,
            "call": call,
            "tool": name,
            "args": [value.encode(a) for a in args],
            "kwargs": trees,
        }
        await self.session.append(*intention(self.session.state, action, self.tools, frame, "sbx_1"))
        return action.effects[call]

    async def call(self, name: str, *args: Any, call: str = "c1", **kwargs: Any) -> Effect:
        effect = await self.intend(name, *args, call=call, **kwargs)
        if effect.outcome is None:
            await self.caller.call(CallTool("x", effect.id))
        return effect


@pytest.mark.parametrize("size", [10, 1_000, 100_000])
async def test_a_settled_value_is_stored_whole(size: int) -> None:
    bench = await Bench(Tool.from_function(lambda: "x" * size, name="give")).start()
    effect = await bench.call("give")
    assert (effect.outcome, effect.value) == (ledger.DONE, "x" * size)
    assert bench.delivered == [effect]
    stored = await bench.session.store.read(bench.session.id)
    assert len(str(dict(stored[-1].data))) < 16 * 1024
    again = Session(bench.session.store, bench.session.blobs, bench.session.id)
    await again.catch_up()
    assert again.state.effects[effect.id].value == "x" * size


RECEIPTS = [
    ToolFailed("no"),
    ValueError("no"),
    TypeError("no"),
    KeyError("no"),
    FileNotFoundError("no"),
    PermissionError("no"),
]
NO_RECEIPTS = [ConnectionResetError("no"), TimeoutError("no"), RuntimeError("no"), OSError("no"), ArithmeticError("no")]


@pytest.mark.parametrize("error", [*RECEIPTS, *NO_RECEIPTS], ids=lambda error: type(error).__name__)
async def test_an_exception_is_a_receipt_only_if_it_says_that_nothing_happened(error: Exception) -> None:
    def fails() -> None:
        raise error

    for effect_class in ("opaque", "pure", "idempotent", "keyed"):
        bench = await Bench(Tool.from_function(fails, effect=effect_class)).start()
        effect = await bench.call("fails")
        certain = error in RECEIPTS or effect_class != "opaque"
        assert effect.outcome == (ledger.FAILED if certain else ledger.UNKNOWN)
        assert effect.error is not None
        assert effect.error["type"] == type(error).__name__


async def test_an_unknown_effect_blocks_its_own_repetition_and_nothing_else() -> None:
    calls: list[int] = []

    def pay(amount: int) -> None:
        calls.append(amount)
        raise ConnectionError("dropped")

    bench = await Bench(Tool.from_function(pay)).start()
    first = await bench.call("pay", 1)
    second = await bench.call("pay", amount=1, call="c2")  # the same bound arguments
    third = await bench.call("pay", 2, call="c3")
    assert calls == [1, 2]
    assert [effect.outcome for effect in (first, second, third)] == ["unknown", "never_started", "unknown"]
    assert second.error is not None
    assert first.id in second.error["message"]


async def test_the_lease_is_read_right_before_the_tool_starts() -> None:
    started = []
    for is_async in (False, True):

        async def go_async() -> None:
            started.append("async")

        def go() -> None:
            started.append("sync")

        bench = await Bench(Tool.from_function(go_async if is_async else go, name="go")).start()
        effect = await bench.intend("go")
        bench.holds = False
        with pytest.raises(Fenced):
            await bench.caller.call(CallTool("x", effect.id))
        assert bench.renewed == 1
        assert effect.outcome is None
    assert started == []


async def test_names_of_effects_are_stable_and_count_equal_calls() -> None:
    bench = await Bench(Tool.from_function(lambda a, b=2: a, name="f")).start()
    ids = [
        (await bench.call("f", 1, call="c1")).id,
        (await bench.call("f", 1, 2, call="c2")).id,
        (await bench.call("f", a=1, call="c3")).id,
        (await bench.call("f", 3, call="c4")).id,
    ]
    assert len(set(ids)) == 4
    digests = [bench.session.state.effects[identity].digest for identity in ids]
    assert digests[0] == digests[1] == digests[2] != digests[3]
    assert [bench.session.state.effects[identity].n for identity in ids] == [1, 2, 3, 1]


async def test_a_call_that_cannot_be_one_is_written_down_as_never_started() -> None:
    bench = await Bench(Tool.from_function(lambda a: a, name="f")).start()
    for index, (name, args) in enumerate([("nothing", []), ("f", []), ("f", [1, 2]), ("\ud800", [])]):
        effect = await bench.call(name, *args, call=f"c{index}")
        assert effect.outcome == ledger.NEVER
        assert effect.error is not None
    action = bench.session.state.action
    assert action is not None
    frame = {"n": 1, "call": "c9", "tool": "f", "args": [{"$": "no such tag"}], "kwargs": {}}
    events = intention(bench.session.state, action, bench.tools, frame, "sbx_1")
    assert [event.type for event in events] == [ev.EFFECT_INTENDED, ev.EFFECT_SETTLED]


async def test_secrets_are_masked_in_errors() -> None:
    def leaks() -> None:
        raise RuntimeError("401 for https://user:pass@host with sk-very-secret")

    effect = await (await Bench(Tool.from_function(leaks)).start()).call("leaks")
    assert effect.error is not None
    assert "sk-very-secret" not in effect.error["message"]
    assert "user:pass" not in effect.error["message"]
    assert MASK in effect.error["message"]


async def test_a_stop_ends_tools_also_those_that_do_not_listen() -> None:
    free = threading.Event()
    begun = threading.Event()

    def deaf() -> None:
        begun.set()
        free.wait(30)

    async def stubborn() -> None:
        while not free.is_set():
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                begun.set()

    for function in (deaf, stubborn):
        bench = await Bench(Tool.from_function(function, name="go")).start()
        effect = await bench.intend("go")
        work = asyncio.create_task(bench.caller.call(CallTool("x", effect.id)))
        await asyncio.sleep(0)
        while not bench.caller._running:
            await asyncio.sleep(0)
        bench.caller.stop(bench.session.state.turns[-1].id)
        await asyncio.wait_for(work, 5)
        assert effect.outcome == ledger.UNKNOWN
        after = await bench.call("go", call="c2")
        assert after.outcome == ledger.NEVER
    free.set()
    await asyncio.sleep(0.05)


async def test_a_context_is_injected() -> None:
    seen: list[ToolContext] = []

    def keyed(a: int, context: ToolContext) -> None:
        seen.append(context)

    bench = await Bench(Tool.from_function(keyed, effect="keyed")).start()
    effect = await bench.call("keyed", 1)
    assert seen[0].idempotency_key == effect.key == effect.id
    assert seen[0].session_id == bench.session.id


@pytest.mark.parametrize("problem", [SystemExit(1), KeyboardInterrupt(), GeneratorExit(), StopIteration(1)])
async def test_a_tool_ends_itself_and_not_the_harness(problem: BaseException) -> None:
    def sync_tool() -> None:
        raise problem

    async def async_tool() -> None:
        raise problem

    for function in (sync_tool, async_tool):
        with pytest.raises(RuntimeError):
            await start_tool(Tool.from_function(function), (), {})


def test_an_exception_without_a_text_is_shown_all_the_same() -> None:
    class Nasty(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert error_of(Nasty())["type"] == "Nasty"
    assert len(error_of(ValueError("x" * 100_000))["message"]) < 10_000
