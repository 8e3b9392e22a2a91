"""CodeAgent over a real box: turns, sessions, effects, limits, interrupts."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from farhand import event as ev
from farhand.agent import CodeAgent
from farhand.errors import Interrupted, LimitReached, NestedLoopError, ToolFailed, TurnFailed, UsageError
from farhand.event import Event
from farhand.limits import REMINDERS, Limits
from farhand.model.port import Prompting
from farhand.sandbox.environment import BARE
from farhand.sandbox.port import Sandbox
from farhand.testing import FunctionModel, ReplayModel, ScriptedModel, code, tool_call
from farhand.tool import tool

PAID: list[int] = []


@tool
def pay(amount: int) -> str:
    """Pay.

    Args:
        amount: In cents.
    """
    PAID.append(amount)
    return f"paid {amount}"


@tool
def drop(amount: int) -> str:
    """Pays, then the connection is gone."""
    PAID.append(amount)
    raise ConnectionResetError("connection dropped")


@tool
async def slow(n: int) -> int:
    """Doubles, slowly."""
    await asyncio.sleep(0.01)
    return 2 * n


@pytest.fixture(autouse=True)
def nothing_paid() -> None:
    PAID.clear()


@pytest.fixture
def agents(sandbox: Sandbox, home: Path) -> Iterator[Any]:
    """Makes agents over each provider, and closes them."""
    made: list[CodeAgent] = []

    def make(model: Any, **options: Any) -> CodeAgent:
        defaults: dict[str, Any] = {"sandbox": sandbox.name, "environment": BARE, "home": home}
        agent = CodeAgent(model=model, **{**defaults, **options})
        made.append(agent)
        return agent

    yield make
    for agent in made:
        agent.close()


def types(events: tuple[Event, ...]) -> list[str]:
    return [event.type for event in events]


def test_an_answer_with_its_events_usage_files_and_session(agents: Any) -> None:
    script = [
        "Let me see.\n" + code("open('a.txt', 'w').write('x')\nprint('hello')\n6 * 7").text,
        code("final_answer({1, 2})"),
    ]
    result = agents(ScriptedModel(script)).run("Go.")
    assert result.answer == {1, 2}
    assert [path.read_text() for path in result.files] == ["x"]
    assert result.usage.steps == 2
    assert result.usage.input_tokens == 20
    assert result.session_id.startswith("ses_")
    finished = [event for event in result.events if event.type == ev.ACTION_FINISHED]
    assert finished[0].data["value"] == {"text/plain": "42"}


def test_the_native_dialect(agents: Any) -> None:
    model = ScriptedModel([tool_call("x = 1"), tool_call("final_answer(x + 1)")], native=True)
    assert agents(model).run("Go.").answer == 2
    assert model.requests[1].messages[-1].role == "tool"


def test_every_call_is_intended_before_and_settled_after(agents: Any) -> None:
    result = agents(ScriptedModel([code("final_answer(pay(5))")]), tools=[pay]).run("Go.")
    assert result.answer == "paid 5"
    order = [kind for kind in types(result.events) if kind.startswith("effect.") or kind == ev.ACTION_FINISHED]
    assert order == [ev.EFFECT_INTENDED, ev.EFFECT_SETTLED, ev.ACTION_FINISHED]


def test_parallel_calls_from_gather_and_from_threads(agents: Any) -> None:
    source = """
import asyncio
from concurrent.futures import ThreadPoolExecutor
a = await asyncio.gather(*[slow(n) for n in range(5)])
with ThreadPoolExecutor(5) as pool:
    b = list(pool.map(pay, range(5)))
final_answer([a, b])
"""
    result = agents(ScriptedModel([code(source)]), tools=[slow, pay]).run("Go.")
    assert result.answer == [[0, 2, 4, 6, 8], [f"paid {n}" for n in range(5)]]
    assert sorted(PAID) == list(range(5))


def test_a_retry_loop_around_a_dropped_connection_pays_once(agents: Any) -> None:
    source = """
for attempt in range(3):
    try:
        drop(7)
    except OutcomeUnknown as error:
        print("unknown:", error)
        break
    except ConnectionError as error:
        print("original:", error)
"""
    model = ScriptedModel([code(source), code("drop(7)"), code("final_answer('told')")])
    result = agents(model, tools=[drop]).run("Pay.")
    assert PAID == [7]
    shown = model.requests[1].messages[-1].text
    assert "original: connection dropped" in shown
    assert "unknown:" in shown
    assert "It will not be started again" in shown
    outcomes = [event.data["outcome"] for event in result.events if event.type == ev.EFFECT_SETTLED]
    assert outcomes == ["unknown", "never_started", "never_started"]


def test_wrong_arguments_and_refusals_are_readable_and_kill_nothing(agents: Any) -> None:
    @tool
    def fails(x: int) -> int:
        """Fails."""
        raise ToolFailed("no such customer")

    @tool
    def huge() -> str:
        """Too large."""
        return "x" * 2_000_000

    @tool
    def leaves() -> None:
        """Ends the process, or tries to."""
        raise SystemExit(3)

    source = """
for call in (lambda: pay(), lambda: pay("many"), lambda: pay(1, 2, 3), lambda: fails(1), huge, leaves):
    try:
        print("returned", call())
    except BaseException as error:
        print(type(error).__name__, error)
final_answer("alive")
"""
    model = ScriptedModel([code(source)])
    result = agents(model, tools=[pay, fails, huge, leaves]).run("Go.")
    assert result.answer == "alive"
    assert PAID == []
    text = "".join(t for e in result.events if e.type == ev.ACTION_WROTE for _, t in e.data["chunks"])
    for expected in ("amount", "no such customer", "cannot be brought into the box", "RuntimeError"):
        assert expected in text
    assert "returned" not in text


def test_a_hanging_tool_ends_with_its_time(agents: Any) -> None:
    never = threading.Event()

    @tool(timeout_s=0.2)
    def hangs() -> None:
        """Never returns."""
        never.wait(30)

    result = agents(
        ScriptedModel([code("try:\n    hangs()\nexcept ToolTimedOut as error:\n    final_answer(str(error))")]),
        tools=[hangs],
    ).run("Go.")
    never.set()
    assert "0.2 s" in result.answer


def test_replies_without_code_fail_the_turn_with_the_reason(agents: Any) -> None:
    model = ScriptedModel(["I think so."] * REMINDERS)
    with pytest.raises(TurnFailed, match="no usable code") as caught:
        agents(model).run("Go.")
    assert caught.value.reason == "no_code"
    assert caught.value.result.usage.steps == REMINDERS
    assert "```python" in model.requests[1].messages[-1].text


def test_an_error_after_final_answer_drops_the_answer(agents: Any) -> None:
    model = ScriptedModel(
        [code("final_answer(1)\n1/0"), code("try:\n    final_answer(2)\nexcept BaseException:\n    pass")]
    )
    assert agents(model).run("Go.").answer == 2
    assert "the answer was not taken" in model.requests[1].messages[-1].text


def test_steps_are_limited_by_name(agents: Any) -> None:
    with pytest.raises(LimitReached) as caught:
        agents(FunctionModel(lambda request: code(f"x = {len(request.messages)}")), limits=Limits(steps=2)).run("Go.")
    assert caught.value.limit == "steps"
    assert ev.LIMIT_REACHED in types(caught.value.result.events)


def test_tool_calls_are_limited_by_name(agents: Any) -> None:
    source = """
refused = 0
for n in range(6):
    try:
        pay(n)
    except LimitReached:
        refused += 1
final_answer(refused)
"""
    result = agents(ScriptedModel([code(source)]), tools=[pay], limits=Limits(tool_calls=4)).run("Go.")
    assert result.answer == 2
    assert PAID == [0, 1, 2, 3]
    assert [event.data["limit"] for event in result.events if event.type == ev.LIMIT_REACHED] == ["tool_calls"]


def test_variables_live_on_through_a_session_and_files_come_back(agents: Any) -> None:
    model = ScriptedModel([code("x = 41\nfinal_answer(x)"), code("final_answer(x + 1)")])
    agent = agents(model)
    first = agent.run("Set x.")
    assert agent.run("Add one.", session=first.session_id).answer == 42
    other = agents(ScriptedModel([code("final_answer('x' in globals())")]), home=agent.home)
    assert other.run("x?").answer is False


def test_a_box_that_died_is_replaced_and_the_model_is_told(agents: Any) -> None:
    model = ScriptedModel(
        [
            code("kept = 1\nopen('a.txt', 'w').write('kept')"),
            code("import os\nos._exit(9)"),
            code("final_answer((open('a.txt').read(), 'kept' in globals()))"),
        ]
    )
    result = agents(model).run("Go.")
    assert result.answer == ("kept", False)
    shown = model.requests[2].messages[-1].text
    assert "names are lost: " in shown
    assert "kept" in shown
    assert ev.SANDBOX_LOST in types(result.events)


def test_a_synchronous_call_inside_a_loop_names_the_other(agents: Any) -> None:
    agent = agents(ScriptedModel([code("final_answer(1)"), code("final_answer(2)")]))

    async def inside() -> Any:
        with pytest.raises(NestedLoopError, match="run_async"):
            agent.run("Go.")
        return (await agent.run_async("Go.")).answer

    assert asyncio.run(inside()) == 1
    assert agent.run("Again.").answer == 2


def test_concurrent_runs_of_one_agent_are_apart(agents: Any) -> None:
    agent = agents(FunctionModel(lambda request: code(f"final_answer({request.messages[-1].text})")))

    async def many() -> list[Any]:
        results = await asyncio.gather(*[agent.run_async(f"{n}") for n in range(6)])
        answers = [result.answer for result in results]
        await agent.aclose()
        return answers

    assert asyncio.run(many()) == list(range(6))


@pytest.mark.parametrize("source", ["while True: pass", "import time\ntime.sleep(60)", "slow_tool()"])
def test_an_interrupt_stops_the_turn_and_the_session_goes_on(agents: Any, source: str) -> None:
    running = threading.Event()
    never = threading.Event()

    @tool
    def mark() -> None:
        """Says that the code runs."""
        running.set()

    @tool
    def slow_tool() -> None:
        """Waits."""
        never.wait(60)

    model = ScriptedModel([code(f"kept = 1\nmark()\n{source}"), code("final_answer('kept' in globals())")])
    agent = agents(model, tools=[mark, slow_tool])
    stopped: list[float] = []

    def stop() -> None:
        assert running.wait(30)
        stopped.append(time.monotonic())
        agent.interrupt()

    thread = threading.Thread(target=stop)
    thread.start()
    with pytest.raises(Interrupted) as caught:
        agent.run("Go.")
    assert time.monotonic() - stopped[0] < 5
    thread.join()
    never.set()
    assert agent.run("And now?", session=caught.value.result.session_id).answer is True


def test_closing_the_stream_early_stops_the_turn(agents: Any) -> None:
    agent = agents(ScriptedModel([code("import time\ntime.sleep(60)"), code("final_answer(1)")]))

    async def early() -> str:
        source = agent.stream("Go.")
        async for item in source:
            if isinstance(item, Event) and item.type == ev.ACTION_STARTED:
                break
        await source.aclose()
        session_id = str(item.session_id)
        answer = (await agent.run_async("Now?", session=session_id)).answer
        await agent.aclose()
        return str(answer)

    assert asyncio.run(early()) == "1"


def test_a_recorded_session_can_be_replayed(agents: Any) -> None:
    result = agents(ScriptedModel([code("x = 2"), code("final_answer(x * 21)")])).run("Go.")
    assert agents(ReplayModel(result.events)).run("Again.").answer == 42


def test_bad_calls_say_what_to_do(agents: Any) -> None:
    agent = agents(ScriptedModel([]))
    with pytest.raises(UsageError, match="empty"):
        agent.run("  ")
    with pytest.raises(UsageError, match="list of names"):
        CodeAgent(additional_authorized_imports="numpy")  # type: ignore[arg-type]
    for options, message in (
        ({"sandbox": "nowhere"}, "no sandbox is called"),
        ({"model": "gpt-5"}, "Did you mean openai:gpt-5"),
        ({"model": "openai:m@nonsense"}, "no URL"),
        ({"model": "openai:@http://127.0.0.1/v1"}, "names no model"),
        ({"model": "local:big"}, "takes no name"),
        ({"limits": 5}, "Limits"),
        ({"tools": "two"}, "list of functions"),
        ({"tools": pay}, "list of functions"),
    ):
        with pytest.raises(UsageError, match=message):
            CodeAgent(**options)  # type: ignore[arg-type]


def test_given_files_are_in_the_box_in_the_first_turn_and_in_a_later_one(agents: Any, tmp_path: Path) -> None:
    (tmp_path / "sales.csv").write_text("a\n1\n")
    (tmp_path / "more.csv").write_text("b\n")
    script = [
        code("kept = 1\nfinal_answer(open('sales.csv').read())"),
        code("final_answer((kept, open('more.csv').read()))"),
    ]
    agent = agents(ScriptedModel(script))
    first = agent.run("Read.", files=[tmp_path / "sales.csv"])
    assert first.answer == "a\n1\n"
    assert agent.run("More.", session=first.session_id, files=[str(tmp_path / "more.csv")]).answer == (1, "b\n")
    for wrong in ([tmp_path], [tmp_path / "nothing"], [tmp_path / "more.csv"] * 2, "more.csv"):
        with pytest.raises(UsageError):
            agent.run("Wrong.", files=wrong)


def test_a_stream_that_is_left_with_break_is_stopped_when_the_agent_closes(agents: Any) -> None:
    agent = agents(ScriptedModel([code("import time\ntime.sleep(60)")]))

    async def leave() -> list[str]:
        async with agent:
            async for item in agent.stream("Go."):
                if isinstance(item, Event) and item.type == ev.ACTION_STARTED:
                    break
        again = CodeAgent(model=ScriptedModel([]), sandbox=agent.sandbox.name, environment=BARE, home=agent.home)
        rows = [row.status for row in await again.store.sessions() if row.session_id == item.session_id]
        await again.aclose()
        return rows

    assert asyncio.run(leave()) == ["cancelled"]


def test_turns_of_one_session_wait_for_one_another(agents: Any) -> None:
    agent = agents(FunctionModel(lambda request: code("n = globals().get('n', 0) + 1\nfinal_answer(n)")))

    async def many() -> list[Any]:
        first = await agent.run_async("Go.")
        rest = await asyncio.gather(*[agent.run_async("Again.", session=first.session_id) for _ in range(3)])
        await agent.aclose()
        return sorted(result.answer for result in rest)

    assert asyncio.run(many()) == [2, 3, 4]


def test_a_failure_has_no_error_before_it_that_is_none(agents: Any) -> None:
    with pytest.raises(TurnFailed) as caught:
        agents(ScriptedModel([])).run("Go.")
    assert caught.value.__context__ is None


def test_a_model_too_small_for_tools_refuses_them(agents: Any) -> None:
    model = ScriptedModel([code("final_answer(1)")])
    model.prompting = Prompting(examples=(("1+1", "final_answer(2)"),))
    with pytest.raises(UsageError, match="too small for tools"):
        agents(model, tools=[pay]).run("Go.")
