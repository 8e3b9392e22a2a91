"""Boxes of the jail as root and as an ordinary user. Each test that takes `jail` runs as both, where both can be
had."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import farhand
from farhand.sandbox.local import lifecycle
from farhand.sandbox.local.lifecycle import DEFAULTS, Options
from farhand.sandbox.local.sandbox import LocalSandbox
from leftovers import leftovers

HERE = Path(__file__).parent
USER = 1001
MARKER = secrets.token_hex(16)
"""A secret in the host's environment. No box may hold it."""


class BoxError(Exception):
    """Code in a box raised; `kind` is the exception's class."""

    def __init__(self, kind: str, text: str, errno: int | None) -> None:
        super().__init__(text)
        self.kind = kind
        self.errno = errno


class Box:
    def __init__(self, jail: Jail, box: int, init: int, worker: int) -> None:
        self.jail, self.number, self.init, self.worker = jail, box, init, worker

    def do(self, what: str, **more: Any) -> Any:
        return self.jail.do(what, box=self.number, **more)

    def eval(self, code: str) -> Any:
        """Runs code; the value of its variable `result`. BoxError when it raises."""
        return value_of(self.do("eval", code=code))

    def close(self) -> None:
        self.do("close_box")


def value_of(answer: dict[str, Any] | None) -> Any:
    assert answer is not None, "the worker has ended"
    if "error" in answer:
        raise BoxError(answer["error"], answer["text"], answer.get("errno"))
    return answer["result"]


class Jail:
    """A host process of its own and one zygote in it."""

    def __init__(self, identity: str, source: Path, **spec: Any) -> None:
        self.identity = identity
        environ = {"PATH": os.environ["PATH"], "FARHAND_TEST_SECRET": MARKER}
        self._process = subprocess.Popen(
            [*command(identity), "-I", str(source / "driver.py"), str(source), str(source / "worker.py")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/", env=environ,
        )  # fmt: skip
        self.host = self._process.pid
        self.zygote = self.start(**spec)

    def start(self, **spec: Any) -> dict[str, Any]:
        started: dict[str, Any] = self.do("start", **spec)
        return started

    def do(self, what: str, **more: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": what, **more}) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline() or '{"error": "EOF", "text": "the host has ended"}')
        if "error" in answer:
            raise BoxError(answer["error"], answer["text"], None)
        return answer["value"]

    def box(self, **spec: Any) -> Box:
        return Box(self, **self.do("create", zygote=self.zygote["zygote"], **spec))

    def kill_host(self) -> None:
        self._process.kill()
        self.close()

    def close(self) -> None:
        """The host ends when its input does, after its boxes and zygotes."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            pass
        self._process.wait(30)
        self._process.stdout.close()


def command(identity: str) -> list[str]:
    """A Python of this identity. An ordinary user cannot use one in root's home, and holds no capability at all."""
    if identity == "root" or os.geteuid() != 0:
        return [sys.executable]
    user = str(USER)
    drop = ["--clear-groups", "--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"]
    return ["setpriv", "--reuid", user, "--regid", user, *drop, "/usr/bin/python3"]


def missing_identity(identity: str) -> str:
    if identity == "root":
        return "" if os.geteuid() == 0 else "only root can be root"
    if os.geteuid() != 0:
        return ""
    if not shutil.which("setpriv"):
        return "setpriv is missing"
    version = subprocess.run(
        ["/usr/bin/python3", "-c", "import sys; print(sys.version_info >= (3, 11))"], capture_output=True, text=True
    )
    return "" if version.stdout.strip() == "True" else "/usr/bin/python3 is older than 3.11"


@pytest.fixture(scope="session")
def source() -> Iterator[Path]:
    """The package and the driver where every user can read them."""
    with tempfile.TemporaryDirectory(prefix="fh-jail-", dir="/tmp") as name:
        folder = Path(name)
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(Path(farhand.__file__).parent, folder / "farhand", ignore=ignore)
        for file in ("driver.py", "worker.py"):
            shutil.copy(HERE / file, folder / file)
        for path in [folder, *folder.rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o644)
        yield folder


@pytest.fixture(scope="session", params=["root", "user"])
def identity(request: pytest.FixtureRequest) -> str:
    missing = missing_identity(request.param)
    if missing:
        pytest.skip(missing)
    return str(request.param)


@pytest.fixture(scope="session")
def jail(identity: str, source: Path) -> Iterator[Jail]:
    """One for all tests; what a test does to its zygote or host it does to one from `new_jail`."""
    jail = Jail(identity, source)
    yield jail
    jail.close()


@pytest.fixture
def new_jail(identity: str, source: Path) -> Iterator[Callable[..., Jail]]:
    made: list[Jail] = []

    def new(**spec: Any) -> Jail:
        made.append(Jail(identity, source, **spec))
        return made[-1]

    yield new
    for jail in made:
        jail.close()


@pytest.fixture
def new_box(jail: Jail) -> Iterator[Callable[..., Box]]:
    made: list[Box] = []

    def new(**spec: Any) -> Box:
        made.append(jail.box(**spec))
        return made[-1]

    yield new
    for box in made:
        box.close()


@pytest.fixture
def box(new_box: Callable[..., Box]) -> Box:
    return new_box()


@pytest.fixture
def box_eval(box: Box) -> Callable[[str], Any]:
    """How code runs in a box: gives the value of its `result`, raises BoxError. The one thing that knows the worker."""
    return box.eval


@pytest.fixture
def calls(box_eval: Callable[[str], Any]) -> Callable[..., dict[str, int]]:
    """Makes raw system calls in a box: name to errno, 0 for success."""
    box_eval(_CALLS)

    def run(**arguments: list[Any]) -> dict[str, int]:
        found: dict[str, int] = box_eval(f"result = make_calls({arguments!r})")
        return found

    return run


_CALLS = f"""
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
NUMBERS = {__import__("farhand.sandbox.local.numbers", fromlist=["numbers"]).numbers()!r}
def make_calls(wanted):
    found = {{}}
    for name, arguments in wanted.items():
        number = NUMBERS.get(name, None)
        if number is None:
            continue
        plain = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
        ctypes.set_errno(0)
        found[name] = ctypes.get_errno() if libc.syscall(ctypes.c_long(number), *plain) < 0 else 0
    return found
"""


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left() -> Iterator[None]:
    """After all tests of the jail: no zygote without a host, no group of a host that is gone."""
    yield
    assert leftovers(Path("/nonexistent")) == []


class NewLocal:
    """Makes providers of the local jail with a home folder, and so a host, of their own."""

    def __init__(self, home: Path) -> None:
        self.home = home

    def __call__(self, options: Options = DEFAULTS, below: str = "") -> LocalSandbox:
        home = self.home / below if below else self.home
        home.mkdir(exist_ok=True)
        self.home = home
        return LocalSandbox(home, options=options)


@pytest.fixture
def new_local(home: Path) -> Iterator[NewLocal]:
    """Nothing may be left of it when the test is over."""
    place = tempfile.gettempdir()  # a socket's path has room for 107 bytes
    top = Path(tempfile.mkdtemp(prefix="fh-", dir=place if len(place) <= 40 else "/tmp"))
    (top / "environments").symlink_to(home / "environments")
    made = NewLocal(top)
    yield made
    asyncio.run(LocalSandbox(made.home).stop(force=True))
    log = lifecycle.log_file(made.home)
    if log.exists() and "Traceback" in log.read_text():
        pytest.fail(f"the host's log:\n{log.read_text()}")
    left = leftovers(made.home)
    shutil.rmtree(top)
    assert left == []
