"""Models without a network: a script, a function, or a recorded session."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from farhand.action import fence_code
from farhand.errors import ModelError
from farhand.event import MODEL_REPLIED, Event
from farhand.model.port import (
    DEFAULT_PROMPTING,
    STOP,
    TOOLS,
    Finished,
    ModelEvent,
    ModelRequest,
    Prompting,
    TextDelta,
    ToolCallDelta,
    Usage,
)


@dataclass(frozen=True, slots=True)
class Scripted:
    """One reply: text, native calls as (name, arguments JSON), how it ends."""

    text: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    finish: str = "stop"
    input_tokens: int = 10
    output_tokens: int = 5


Item: TypeAlias = str | Scripted | BaseException


def code(source: str, thought: str = "") -> Scripted:
    """A reply with one fenced block."""
    return Scripted(f"{thought}\n\n{fence_code(source)}".strip())


def tool_call(source: str, thought: str = "") -> Scripted:
    """A reply that calls the native tool `python`."""
    import json

    return Scripted(thought, (("python", json.dumps({"code": source})),), "tool_calls")


async def _replay(item: Item, chunk: int) -> AsyncIterator[ModelEvent]:
    if isinstance(item, BaseException):
        raise item
    reply = Scripted(item) if isinstance(item, str) else item
    for at in range(0, len(reply.text), chunk):
        yield TextDelta(reply.text[at : at + chunk])
    for index, (name, arguments) in enumerate(reply.calls):
        yield ToolCallDelta(index, f"call_{index}", name, arguments)
    yield Usage(reply.input_tokens, reply.output_tokens)
    yield Finished(reply.finish)


class ScriptedModel:
    """Gives the replies of a list, one per request, and keeps the requests in `.requests`.

    An item is a text, a `Scripted` (see `code`, `tool_call`) or an exception to raise. Asked more often than it has
    replies it raises ModelError. `hold`, if given, is awaited before each reply.
    """

    def __init__(
        self,
        replies: Iterable[Item],
        *,
        name: str = "scripted",
        native: bool = False,
        chunk: int = 16,
        hold: Callable[[int], Awaitable[None]] | None = None,
    ) -> None:
        self.name = name
        self.capabilities = frozenset({TOOLS, STOP} if native else {STOP})
        self.prompting: Prompting = DEFAULT_PROMPTING
        self.requests: list[ModelRequest] = []
        self._replies = list(replies)
        self._chunk, self._hold = chunk, hold

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelEvent]:
        index = len(self.requests)
        self.requests.append(request)
        if self._hold is not None:
            await self._hold(index)
        if index >= len(self._replies):
            raise ModelError(f"the script has {len(self._replies)} replies and was asked for one more")
        async for event in _replay(self._replies[index], self._chunk):
            yield event
            await asyncio.sleep(0)

    async def close(self) -> None:
        return None

    def assert_complete(self) -> None:
        """Every reply was asked for."""
        left = len(self._replies) - len(self.requests)
        if left > 0:
            raise AssertionError(f"{left} scripted replies were never asked for")


class FunctionModel:
    """Asks a function `(ModelRequest) -> str | Scripted`, sync or async, for each reply."""

    def __init__(
        self,
        function: Callable[[ModelRequest], Item | Awaitable[Item]],
        *,
        name: str = "function",
        native: bool = False,
    ) -> None:
        self.name = name
        self.capabilities = frozenset({TOOLS, STOP} if native else {STOP})
        self.prompting: Prompting = DEFAULT_PROMPTING
        self._function = function

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelEvent]:
        item = self._function(request)
        if inspect.isawaitable(item):
            item = await item
        async for event in _replay(item, 64):
            yield event

    async def close(self) -> None:
        return None


class ReplayModel(ScriptedModel):
    """Gives the replies of a recorded session again, in order."""

    def __init__(self, events: Sequence[Event], *, name: str = "replay") -> None:
        replies: list[Item] = []
        native = False
        for event in events:
            if event.type != MODEL_REPLIED:
                continue
            calls = tuple((call["name"], call["arguments"]) for call in event.data.get("calls") or ())
            native = native or bool(calls)
            usage = event.data.get("usage") or {}
            replies.append(
                Scripted(
                    event.data.get("text", ""),
                    calls,
                    event.data.get("finish", "stop"),
                    usage.get("input_tokens", 0),
                    usage.get("output_tokens", 0),
                )
            )
        super().__init__(replies, name=name, native=native)
