"""What a supervisor can do to the processes of its box."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from farhand.sandbox.runner.workspace import Files


class Usage(NamedTuple):
    """What all processes of a box use: memory now, processor seconds since the box began, processes and threads."""

    memory_bytes: int
    cpu_s: float
    processes: int


class Hands(Protocol):
    """What a supervisor can do to the processes of its box. No method may wait for them."""

    @property
    def sampling(self) -> bool:
        """Whether memory and processes are bounded by `usage` alone: it is then read every 20 ms, else every 100 ms."""
        ...

    def interrupt(self) -> None:
        """SIGINT to the worker."""
        ...

    def kill(self) -> None:
        """SIGKILL to every process of the box. Whoever reaps the worker then calls `Supervisor.ended`."""
        ...

    def usage(self) -> Usage | None: ...

    def apply(self, limits: dict[str, Any]) -> None:
        """New limits from `hello`: memory_bytes, processes, … as far as this kind of box can set them from outside."""
        ...

    def suspend(self) -> None:
        """Stop every process of the box. Nothing happens to the supervisor."""
        ...

    def resume(self) -> None: ...

    def files(self) -> Files: ...
