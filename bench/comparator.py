"""The others: how they are installed, started and talked to. One that is missing fails the bench.

Plain subprocess, `bwrap python3` of Debian, a Jupyter kernel and smolagents' LocalPythonExecutor. The last two live in
an environment that is built here with pip, below the cache folder.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import select
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from farhand.installer import PipFailed, run_pip
from farhand.sandbox.environment import DEFAULT

T = TypeVar("T")

PACKAGES = ("ipykernel==7.4.0", "jupyter_client==8.10.0", "smolagents==1.26.0", *DEFAULT.packages[:2])
DEBIAN_PYTHON = "/usr/bin/python3"
ANSWER_S = 300.0
INSTALL_S = 600.0
DRIVERS = Path(__file__).parent / "drivers"
APT = ("apt-get", "install", "-y", "-qq", "--no-install-recommends", "bubblewrap")


class ComparatorMissing(Exception):
    """A comparator cannot be had here, or it failed."""


def split(code: str) -> tuple[str, str]:
    """The statements, and the trailing expression or ''."""
    tree = ast.parse(code)
    if not tree.body or not isinstance(tree.body[-1], ast.Expr):
        return code, ""
    last = tree.body.pop()
    return ast.unparse(tree), ast.unparse(last)


class PlainWorker:
    """A process that runs `drivers/plain.py`."""

    def __init__(self, command: Sequence[str]) -> None:
        # A session of its own, as a box has: the kernel shares processors among sessions.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, cwd="/", start_new_session=True
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()

    @property
    def pid(self) -> int:
        return self._process.pid

    def run(self, code: str) -> str:
        """The repr of the trailing expression."""
        return self.run_split(*split(code))

    def run_split(self, body: str, expression: str, flood: int = 0) -> str:
        """The same for code that was split before; `flood` bytes that it writes are drained."""
        parts = body.encode(), expression.encode()
        _write(self._in, b"%d %d\n%b%b" % (len(parts[0]), len(parts[1]), *parts))
        while flood:
            data = self._read(min(flood, 1 << 20))
            flood -= len(data)
        data = self._read(1 << 16)
        while b"\n" not in data:
            data += self._read(1 << 16)
        size, _, shown = data.partition(b"\n")
        while len(shown) < int(size):
            shown += self._read(1 << 16)
        return shown.decode()

    def _read(self, most: int) -> bytes:
        data = os.read(self._out, most)
        if not data:
            raise ComparatorMissing(f"the worker ended with {self._process.wait()}")
        return data

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.kill()
        self._process.wait()


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


class Driver:
    """A program of `drivers/` in the comparators' environment, asked with lines of JSON. It times itself."""

    def __init__(self, python: Path, program: str, scratch: Path) -> None:
        environ = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
        environ |= {"HOME": str(scratch), "OPENBLAS_NUM_THREADS": "1", "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
        self._log = (scratch / f"{program}.log").open("w+b")
        self._process = subprocess.Popen(
            [str(python), "-P", str(DRIVERS / f"{program}.py")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, env=environ, cwd=scratch,
            start_new_session=True,
        )  # fmt: skip

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"op": op, **arguments}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise ComparatorMissing(self._last_words()) from None
        if not select.select([self._process.stdout], [], [], ANSWER_S)[0]:
            raise ComparatorMissing(f"no answer within {ANSWER_S:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise ComparatorMissing(self._last_words())
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _last_words(self) -> str:
        self._process.wait(ANSWER_S)
        self._log.seek(0)
        return self._log.read().decode(errors="replace").strip()[-500:] or "it ended without a word"

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()


class Comparators:
    """All of them; each is prepared when it is first asked for, and raises ComparatorMissing where it cannot be."""

    def __init__(self, cache: Path, scratch: Path, python: Path, site: Path, say: Callable[[str], None]) -> None:
        self._cache, self._scratch, self._say = cache, scratch, say
        self.python, self.site = python, site
        """The interpreter of the boxes, and the folder with their packages."""
        self._drivers: dict[str, Driver] = {}
        self._failed: dict[str, str] = {}

    def _once(self, name: str, make: Callable[[], T]) -> T:
        """What failed once is not tried again: a failed installation takes minutes."""
        if name in self._failed:
            raise ComparatorMissing(self._failed[name])
        try:
            return make()
        except ComparatorMissing as problem:
            self._failed[name] = str(problem)
            raise

    # --- a plain subprocess, and one in bubblewrap ---

    def plain_command(self) -> list[str]:
        return [str(self.python), "-I", "-S", "-c", (DRIVERS / "plain.py").read_text()]

    def bwrap_command(self) -> list[str]:
        """The same worker with Debian's Python in a sealed bubblewrap; the boxes' packages are in /site."""
        bwrap = self._once("bwrap", self._bwrap)
        shell = [bwrap, "--ro-bind", "/usr", "/usr", "--ro-bind", "/etc/ld.so.cache", "/etc/ld.so.cache"]
        for name in ("lib", "lib64", "bin"):
            shell += ["--symlink", f"usr/{name}", f"/{name}"]
        shell += ["--ro-bind", str(self.site), "/site", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
        shell += ["--unshare-all", "--unshare-user", "--disable-userns", "--uid", "65534", "--gid", "65534"]
        shell += ["--cap-drop", "ALL", "--die-with-parent", "--new-session", "--clearenv"]
        shell += ["--setenv", "OPENBLAS_NUM_THREADS", "1"]
        return [*shell, DEBIAN_PYTHON, "-I", "-S", "-c", (DRIVERS / "plain.py").read_text()]

    def _bwrap(self) -> str:
        if not Path(DEBIAN_PYTHON).exists():
            raise ComparatorMissing(f"there is no {DEBIAN_PYTHON}")
        if shutil.which("bwrap") is None:
            self._install_bwrap()
        found = shutil.which("bwrap")
        if found is None:
            raise ComparatorMissing("bwrap is not installed. Run:  sudo apt-get install -y bubblewrap")
        return found

    def _install_bwrap(self) -> None:
        if os.getuid() != 0 or shutil.which("apt-get") is None:
            return
        self._say("installing bubblewrap with apt-get")
        environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for command in (APT, ("apt-get", "update", "-qq"), APT):
            done = subprocess.run(command, env=environ, capture_output=True, timeout=INSTALL_S)
            if command is APT and done.returncode == 0:
                return

    # --- Jupyter and smolagents ---

    def environment_python(self) -> Path:
        return self._once("environment", lambda: self.environment) / "bin" / "python"

    def driver(self, program: str) -> Driver:
        """The running driver `jupyter` or `interpreter`."""
        if program not in self._drivers:
            self._drivers[program] = Driver(self.environment_python(), program, self._scratch)
        return self._drivers[program]

    @property
    def _place(self) -> Path:
        return self._cache / hashlib.sha256("\n".join([sys.version, *PACKAGES]).encode()).hexdigest()[:16]

    @cached_property
    def environment(self) -> Path:
        """The virtual environment with PACKAGES, built once and kept."""
        path = self._place
        if (path / "complete").exists():
            return path
        self._say(f"building an environment with {', '.join(PACKAGES)} in {path}")
        shutil.rmtree(path, ignore_errors=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            subprocess.run(
                [sys.executable, "-m", "venv", str(path)], check=True, capture_output=True, text=True, timeout=INSTALL_S
            )
            run_pip(str(path / "bin" / "python"), ["install", "--only-binary", ":all:", *PACKAGES], lambda line: None)
        except (PipFailed, OSError, subprocess.SubprocessError) as error:
            raise ComparatorMissing(f"the environment could not be built: {error}") from error
        (path / "complete").touch()
        return path

    def versions(self) -> dict[str, str]:
        """What stands here of each; '' for what is missing."""
        found = {"bwrap": _first_line(["bwrap", "--version"]), "Debian's python3": _first_line([DEBIAN_PYTHON, "-V"])}
        program = "import importlib.metadata as m, sys\nfor name in sys.argv[1:]: print(m.version(name))"
        names = [package.partition("==")[0] for package in PACKAGES]
        told: list[str] = []
        if (self._place / "complete").exists():
            command = [str(self._place / "bin" / "python"), "-c", program, *names]
            told = subprocess.run(command, capture_output=True, text=True).stdout.split()
        return {**found, **dict(zip(names, [*told, *[""] * len(names)], strict=False))}

    def close(self) -> None:
        while self._drivers:
            self._drivers.popitem()[1].close()


def _first_line(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip().partition("\n")[0]
    except OSError:
        return ""
