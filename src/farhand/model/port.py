"""What a model is to the loop: text in, a stream of deltas out.

An adapter's `stream` is an async generator. It yields deltas in the order they come and exactly one `Finished`,
last; `Usage`
may come anywhere before it, or not at all. It raises `ModelError`s and nothing else, and closing the generator stops
the
request. Retries of one HTTP exchange are the adapter's; anything longer is the loop's. No key appears in an error or
repr.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol, TypeAlias

TOOLS = "tools"
"""Capability: takes native tool calls; the loop then offers one tool, `python`."""
STOP = "stop"
"""Capability: honours stop sequences."""
GRAMMAR = "grammar"
"""Capability: takes a GBNF grammar."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A native call. `arguments` is the JSON text as the model wrote it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """`role` is system, user, assistant or tool. `calls` only on assistant, `call_id` only on tool messages."""

    role: str
    text: str
    calls: tuple[ToolCall, ...] = ()
    call_id: str = ""


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A native tool offered to the model; `parameters` is a JSON schema as text."""

    name: str
    description: str
    parameters: str


@dataclass(frozen=True, slots=True)
class ModelRequest:
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    stop: tuple[str, ...] = ()
    max_output_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None
    grammar: str | None = None


@dataclass(frozen=True, slots=True)
class TextDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of call number `index`. `id` and `name` come whole in the first piece, `arguments` in parts."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Usage:
    input_tokens: int = 0
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Finished:
    """`reason` is stop, length, tool_calls, refusal or other."""

    reason: str


ModelEvent: TypeAlias = TextDelta | ReasoningDelta | ToolCallDelta | Usage | Finished


@dataclass(frozen=True, slots=True)
class Prompting:
    """How a model wants to be asked, where it differs from the default. `examples` are (question, code) pairs used
    instead of the
    long system prompt."""

    examples: tuple[tuple[str, str], ...] = ()
    grammar: str | None = None
    note: str = ""
    """Said to the person before the first answer."""


class Model(Protocol):
    name: str
    capabilities: frozenset[str]
    prompting: Prompting

    def stream(self, request: ModelRequest) -> AsyncIterator[ModelEvent]: ...

    async def close(self) -> None: ...


DEFAULT_PROMPTING = Prompting()
