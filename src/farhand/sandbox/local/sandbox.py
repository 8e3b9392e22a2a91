"""Boxes of the local jail, the harness's side. The host (host.py) holds them; this asks it, and starts it if needed."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from farhand.errors import EnvironmentFailed, SandboxLost, SandboxUnavailable
from farhand.home import farhand_home
from farhand.limits import Limits
from farhand.sandbox import port, protocol
from farhand.sandbox.environment import Built, Environment, build
from farhand.sandbox.local import lifecycle, request, root
from farhand.sandbox.local.lifecycle import Options
from farhand.sandbox.local.request import Outfit
from farhand.sandbox.protocol import SocketFrames

ANSWER_S = 90.0
"""A create waits for a zygote that imports everything on a busy machine; everything else takes milliseconds."""
ATTEMPTS = 3
"""At a host that ends just now because it was idle."""
BUSY_POLL_S = 0.005
CLAIMS_REMEMBERED = 10_000
PYTHON_S = 30.0
_PRELOAD = ("numpy", "pandas", "PIL.Image", "matplotlib.pyplot")
_PRELOAD_ALWAYS = (
    "json", "math", "random", "re", "datetime", "collections", "itertools", "functools", "statistics", "decimal",
    "fractions", "csv", "io", "pathlib", "string", "textwrap", "dataclasses", "typing", "enum", "hashlib", "base64",
    "heapq", "bisect", "operator", "copy", "uuid", "tempfile", "subprocess", "threading", "concurrent.futures",
)  # fmt: skip
_WHICH_PYTHON = """\
import json, os, sys, sysconfig
assert sys.version_info >= (3, 9), "boxes need Python 3.9 or newer, this is " + sys.version.split()[0]
version = sysconfig.get_python_version()
prefix = os.path.realpath(sys.base_prefix)
python = os.path.join(prefix, "bin", "python" + version)
python = python if os.path.exists(python) else os.path.realpath(sys.executable)
print(json.dumps([python, prefix, version, sys.version.split()[0]]))
"""


class LocalSandbox:
    """`Sandbox` of the local jail, for any number of event loops. `progress` is told of environments being built;
    `options` count for a host that this object starts."""

    name = "local"
    capabilities = frozenset({port.REATTACH, port.SUSPEND, port.THREADS, port.SUBPROCESS, port.FILES, port.WALL})

    def __init__(
        self,
        home: Path | None = None,
        *,
        progress: Callable[[str], None] = lambda line: None,
        options: Options = lifecycle.DEFAULTS,
    ) -> None:
        self.home = home or farhand_home()
        self._progress = progress
        self._options = options
        self._outfits: dict[Environment, Outfit] = {}
        self._claims: dict[str, int] = {}
        self._place: str | None = None

    async def create(self, environment: Environment, limits: Limits, labels: Mapping[str, str]) -> LocalBox:
        outfit = self._outfits.get(environment)
        if outfit is None or not _stands(outfit):
            outfit = await asyncio.to_thread(self._prepare, environment)
            self._outfits[environment] = outfit
        generation = int(labels["generation"]) if labels.get("generation", "").isdigit() else 0
        spec = request.spec_of(limits)
        asked = {
            "op": "create",
            "environment": outfit.text(),
            "limits": {name: getattr(spec, name) for name in request.LIMITS},
            "labels": dict(labels),
            "generation": generation if "generation" in labels else None,
            "attach": True,
        }
        # The first frame follows at once: when the box is there, it is attached.
        attach = protocol.dump(protocol.attach_frame(0, generation))
        try:
            answer, early = await self._ask(asked, start=True, then=attach)
        except SandboxUnavailable:
            await asyncio.to_thread(_name_what_is_missing)
            raise
        self.claim(labels.get("session"), generation)
        return LocalBox(self, answer["box"], generation, early)

    async def connect(self, box_id: str) -> port.Box:
        for box in await self.list({}):
            if box.id == box_id:
                return box
        raise SandboxLost(f"there is no box {box_id[:100]}")

    async def list(self, labels: Mapping[str, str]) -> list[port.Box]:
        try:
            answer = await self.ask({"op": "list", "labels": dict(labels)})
        except SandboxLost:
            return []
        return [LocalBox(self, found) for found in answer["boxes"]]

    async def close(self) -> None:
        """Nothing is held: boxes live on."""

    async def status(self) -> dict[str, Any] | None:
        """What the host says of itself; None when none runs."""
        try:
            return await self.ask({"op": "status"})
        except SandboxLost:
            return None

    async def stop(self, force: bool = False) -> bool:
        """End the host. False when none runs; SandboxError when it has boxes, unless `force` ends them too."""
        try:
            await self.ask({"op": "stop", "force": force})
        except SandboxLost:
            return False
        await asyncio.to_thread(lifecycle.await_end, self.home)
        return True

    # -- for boxes --

    def claim(self, session: str | None, generation: int) -> None:
        """Remember the claim last used for a session: it goes with what is asked of boxes that were only found."""
        if session is not None:
            if len(self._claims) >= CLAIMS_REMEMBERED:
                self._claims.clear()
            self._claims[session] = max(generation, self._claims.get(session, 0))

    def claimed(self, session: str | None) -> int | None:
        return None if session is None else self._claims.get(session)

    async def ask(self, asked: dict[str, Any]) -> dict[str, Any]:
        """The host's answer. SandboxLost when no host runs or it ends meanwhile."""
        answer, early = await self._ask(asked)
        early.close()
        return answer

    async def open(self, asked: dict[str, Any], after: int, generation: int) -> SocketFrames:
        """A channel that the host connects to a box."""
        _, early = await self._ask(asked, then=protocol.dump(protocol.attach_frame(after, generation)))
        return await early.frames(after, generation)

    async def _ask(self, asked: dict[str, Any], start: bool = False, then: bytes = b"") -> tuple[dict[str, Any], Early]:
        line = request.dump({"v": request.VERSION, **asked}) + then
        for attempt in range(ATTEMPTS):
            early = await self._connected(start)
            if early is None:
                break
            try:
                async with asyncio.timeout(ANSWER_S):
                    answer = await early.ask(line)
                return request.answer_of(answer), early
            except TimeoutError as error:
                early.close()
                raise SandboxLost(f"the host gave no answer within {ANSWER_S:.0f} s") from error
            except HostGone:
                # It ended before it answered, and nothing of its boxes is left: asking the next one does nothing twice.
                early.close()
                if not start or attempt == ATTEMPTS - 1:
                    raise
            except BaseException:
                early.close()
                raise
        raise HostGone("no host of the local jail runs")

    async def _connected(self, start: bool) -> Early | None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + ANSWER_S
        while True:
            try:
                found = self._find()
            except BlockingIOError:
                if loop.time() > deadline:
                    raise SandboxLost("the host takes no connections") from None
                await asyncio.sleep(BUSY_POLL_S)
                continue
            if found is None and start:
                return await asyncio.to_thread(self._start)
            return None if found is None else Early(found)

    def _find(self) -> socket.socket | None:
        found = None if self._place is None else lifecycle.connect(self._place)
        if found is None:
            self._place = lifecycle.place(self.home)
            found = None if self._place is None else lifecycle.connect(self._place)
        return found

    def _start(self) -> Early:
        # Wrapped in the thread that makes it: whoever asked may have given up meanwhile.
        return Early(lifecycle.start(self.home, self._options))

    def _prepare(self, environment: Environment) -> Outfit:
        """Find the interpreter and build the packages. Blocks."""
        if environment.network:
            raise SandboxUnavailable("boxes of the local jail have no network", hint="Give the agent a tool instead.")
        if environment.python is None:
            own, own_prefix, version = root.own_prefix()
            python, prefix, release = str(own), str(own_prefix), sys.version.split()[0]
        else:
            python, prefix, version, release = _which_python(environment.python)
        if not environment.packages:
            return Outfit(python, prefix, version, release, preload=_PRELOAD_ALWAYS)
        built = build(environment, self.home, self._progress)
        return Outfit(
            python,
            prefix,
            version,
            release,
            str(built.site.resolve()),
            str(built.mplconfig.resolve()) if built.mplconfig.is_dir() else None,
            _packages(built),
            (*_PRELOAD_ALWAYS, *(name for name in _PRELOAD if name.partition(".")[0] in built.modules)),
        )


class HostGone(SandboxLost):
    """No host runs, or it ended before it had answered."""

    code = "sandbox_lost"


class Early:
    """A connection to the host before it is a stream of an event loop; perhaps a channel already. One that
    is forgotten is closed."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock: socket.socket | None = sock
        self._data = b""

    async def ask(self, line: bytes) -> bytes:
        """Send a request and what follows it; the answer's line."""
        loop = asyncio.get_running_loop()
        assert self._sock is not None
        try:
            await loop.sock_sendall(self._sock, line)
            while b"\n" not in self._data:
                data = await loop.sock_recv(self._sock, 65536)
                if not data:
                    raise HostGone("the host of the local jail ended")
                self._data += data
        except OSError as error:
            raise HostGone("the host of the local jail ended") from error
        answer, _, self._data = self._data.partition(b"\n")
        return answer

    async def frames(self, after: int, generation: int) -> SocketFrames:
        """The channel that this connection has become; `attach` was sent with the request."""
        sock, self._sock = self._sock, None
        assert sock is not None
        return await SocketFrames.attach(sock, after, generation, self._data, sent=True)

    def close(self) -> None:
        sock, self._sock = self._sock, None
        if sock is not None:
            sock.close()

    def __del__(self) -> None:
        self.close()


class LocalBox:
    """One box of the local jail. `early` is a connection that is attached to it already, for the first `channel`."""

    def __init__(
        self, sandbox: LocalSandbox, found: dict[str, Any], generation: int | None = None, early: Early | None = None
    ) -> None:
        self._sandbox = sandbox
        self._id, self._labels = str(found["id"]), dict(found["labels"])
        self._generation = generation
        self._early = early

    @property
    def id(self) -> str:
        return self._id

    @property
    def labels(self) -> Mapping[str, str]:
        return self._labels

    async def channel(self, after: int, generation: int) -> SocketFrames:
        early, self._early = self._early, None
        if early is not None and (after, generation) == (0, self._generation):
            return await early.frames(after, generation)
        if early is not None:
            early.close()
        frames = await self._sandbox.open(self._asked("channel", generation), after, generation)
        self._generation = generation
        self._sandbox.claim(self._labels.get("session"), generation)
        return frames

    async def suspend(self) -> None:
        await self._sandbox.ask(self._asked("suspend"))

    async def resume(self) -> None:
        await self._sandbox.ask(self._asked("resume"))

    async def destroy(self) -> None:
        if self._early is not None:
            self._early.close()
            self._early = None
        try:
            await self._sandbox.ask(self._asked("destroy"))
        except SandboxLost:
            return  # with its host, every box is gone

    def _asked(self, operation: str, generation: int | None = None) -> dict[str, Any]:
        if generation is None:
            # Of the claims this process has had, the newest: only another process can know a newer one.
            known = (self._generation, self._sandbox.claimed(self._labels.get("session")))
            generation = max((each for each in known if each is not None), default=None)
        return {"op": operation, "box": self._id, "generation": generation}


def _stands(outfit: Outfit) -> bool:
    return outfit.site is None or os.path.isdir(outfit.site)


def _packages(built: Built) -> tuple[tuple[str, str], ...]:
    """Names and versions, read off the folders that pip leaves beside each package."""
    found: Iterable[re.Match[str] | None] = (
        re.fullmatch(r"(.+?)-([^-]+)\.dist-info", entry.name) for entry in sorted(built.site.iterdir())
    )
    return tuple((match[1].replace("_", "-"), match[2]) for match in found if match)


def _which_python(python: str) -> tuple[str, str, str, str]:
    """(real path, prefix, version, release) of another interpreter."""
    try:
        done = subprocess.run(
            [python, "-I", "-S", "-c", _WHICH_PYTHON],
            env={"LANG": "C.UTF-8"}, cwd="/", stdin=subprocess.DEVNULL, capture_output=True, text=True,
            errors="replace", timeout=PYTHON_S, check=False,
        )  # fmt: skip
        if done.returncode == 0:
            path, prefix, version, release = json.loads(done.stdout)
            return str(path), str(prefix), str(version), str(release)
        problem = (done.stderr.strip().splitlines() or ["it failed"])[-1][:500]
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        problem = str(error)
    raise EnvironmentFailed(f"{python} cannot be the Python of a box: {problem}")


def _name_what_is_missing() -> None:
    """SandboxUnavailable naming the first wall that cannot stand here, if one cannot."""
    from farhand.sandbox.local.probe import probe

    probe().require()
