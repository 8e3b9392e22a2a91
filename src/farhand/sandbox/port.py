"""What a provider of boxes is to the rest: a few verbs and one channel of frames (docs/protocol.md).

The contract, which `tests/contract/test_sandbox.py` holds against every adapter this machine can run:

*create* makes one box labelled with (session, generation, …) and returns when it can take a channel;
SandboxUnavailable names
the missing feature. *list* gives the living and the ended-but-kept boxes whose labels include all those given.
*connect* raises
SandboxLost for a box that is not there. *channel* attaches after frame `after`: frames with a higher number follow,
each once
and in order, also those sent while nobody was attached; a newer generation takes the channel over, an older one
raises Fenced. A harness that dies leaves its boxes (with REATTACH), to be found by label. *suspend* stops every
process of the box until
*resume*. *destroy* ends every process and frees memory and disk; doing it twice is no error. Everything a channel
delivers is guest-controlled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from farhand.limits import Limits
from farhand.sandbox.environment import Environment

REATTACH = "reattach"
SUSPEND = "suspend"
THREADS = "threads"
SUBPROCESS = "subprocess"
FILES = "files"
WALL = "wall"
"""The box keeps guest code from this machine's files, processes and network."""

Frame = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Attached:
    """State of the box at the moment of attaching. `last` is the newest frame number, `waiting` the calls without a
    reply,
    `ran` the actions it has been given, `ended` that its worker is gone."""

    running: str | None
    last: int
    waiting: tuple[str, ...]
    ran: tuple[str, ...]
    ready: bool
    ended: bool


class Frames(Protocol):
    """One attached channel. `send` adds the generation. `receive` gives the next frame; SandboxLost when the channel
    ended."""

    @property
    def attached(self) -> Attached: ...

    async def send(self, *frames: Frame) -> None: ...

    async def receive(self) -> Frame: ...

    async def close(self) -> None: ...


class Box(Protocol):
    @property
    def id(self) -> str: ...

    @property
    def labels(self) -> Mapping[str, str]: ...

    async def channel(self, after: int, generation: int) -> Frames: ...

    async def suspend(self) -> None: ...

    async def resume(self) -> None: ...

    async def destroy(self) -> None: ...


class Sandbox(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def capabilities(self) -> frozenset[str]: ...

    async def create(self, environment: Environment, limits: Limits, labels: Mapping[str, str]) -> Box: ...

    async def connect(self, box_id: str) -> Box: ...

    async def list(self, labels: Mapping[str, str]) -> Sequence[Box]: ...

    async def close(self) -> None:
        """Let go of connections. Boxes with REATTACH live on."""
        ...
