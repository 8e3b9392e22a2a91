"""Where a home folder's host is found, and how one is started: at most one for each home folder and protocol version.

A host holds a lock on `$FARHAND_HOME/run/host-v1.lock` as long as it lives, and has written into it where its socket
is: beside the lock, or, where a socket cannot be (its path has room for 107 bytes, and not every file system takes
one), in a private folder under $XDG_RUNTIME_DIR or /tmp.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import select
import socket
import stat
import struct
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from farhand.errors import SandboxUnavailable
from farhand.sandbox.local.request import VERSION

IDLE_S = 120.0
"""Without boxes and connections, after that long a host ends."""
SWEEP_S = 600.0
"""A box that no harness is attached to is destroyed after that long."""
POOL_BOXES = 2
START_S = 20.0
STARTING_POLL_S = 0.01
SOCKET_PATH_BYTES = 107
BACKLOG = 1024
LOG_BYTES = 256 * 1024
"""Of the host's log; a host that finds a longer one starts it anew."""

# Started with -I -S: nothing of the harness's environment, and of its sys.path only the folder that holds this package.
_START = """\
import os, sys
if os.fork(): os._exit(0)
sys.path.append(sys.argv[1])
from farhand.sandbox.local.host import main
main(sys.argv[2:])
"""


@dataclass(frozen=True, slots=True)
class Options:
    """Settings of a host. They count when it is started; one that runs keeps its own."""

    idle_s: float = IDLE_S
    sweep_s: float = SWEEP_S
    pool: int = POOL_BOXES

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Options:
        return cls(**json.loads(text))


DEFAULTS = Options()


def run_folder(home: Path) -> Path:
    """`home/run`, private. SandboxUnavailable when it belongs to somebody else."""
    folder = home / "run"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _require_private(folder)
    return folder


def _require_private(folder: Path) -> None:
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise SandboxUnavailable(f"{folder} is no folder of this user", hint="Choose another FARHAND_HOME.")
    if found.st_mode & 0o077:
        os.chmod(folder, 0o700)


def lock_file(home: Path) -> Path:
    return run_folder(home) / f"host-v{VERSION}.lock"


def log_file(home: Path) -> Path:
    return run_folder(home) / "host.log"


# -- the host's side --


def hold(home: Path) -> IO[str] | None:
    """The lock that makes this process the host of `home`; None when another one is. Keep the file open."""
    descriptor = os.open(lock_file(home), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    file = os.fdopen(descriptor, "r+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file


def listen(home: Path, lock: IO[str]) -> tuple[socket.socket, Path]:
    """A listening socket for the host, whose place stands in the lock file. What lies at its place is a dead host's."""
    problem: OSError | None = None
    for folder in _places(home):
        path = folder / f"host-v{VERSION}.sock"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _require_private(folder)
            listening = _bind(path)
        except (OSError, SandboxUnavailable) as error:
            problem = error if isinstance(error, OSError) else problem
            continue
        lock.seek(0)
        lock.truncate()
        json.dump({"v": VERSION, "pid": os.getpid(), "socket": str(path)}, lock)
        lock.flush()
        return listening, path
    raise SandboxUnavailable(
        f"no folder takes the host's socket: {problem}", hint="Set XDG_RUNTIME_DIR to a local folder."
    )


def _places(home: Path) -> list[Path]:
    name = f"farhand-{hashlib.sha256(os.fsencode(home.resolve())).hexdigest()[:16]}"
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    places = [run_folder(home)]
    if os.path.isabs(runtime):
        places.append(Path(runtime) / name)
    return places + [Path("/tmp") / f"{name}-{os.geteuid()}"]


def _bind(path: Path) -> socket.socket:
    if len(os.fsencode(path)) > SOCKET_PATH_BYTES:
        raise OSError(errno.ENAMETOOLONG, f"{path} is too long for a socket")
    path.unlink(missing_ok=True)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        listening.bind(str(path))
        path.chmod(0o600)
        listening.listen(BACKLOG)
    except BaseException:
        listening.close()
        raise
    return listening


def forget(path: Path, lock: IO[str]) -> None:
    """Nobody shall find this host any more."""
    lock.seek(0)
    lock.truncate()
    path.unlink(missing_ok=True)
    if path.parent.name != "run":
        try:
            path.parent.rmdir()
        except OSError:
            pass


# -- the harness's side --


def find(home: Path) -> socket.socket | None:
    """A connection to the host of `home`, if one runs. BlockingIOError when it has too many to answer first."""
    path = place(home)
    return None if path is None else connect(path)


def place(home: Path) -> str | None:
    """Where the socket of the host of `home` is, if one runs or ran."""
    try:
        path = Path(json.loads(lock_file(home).read_text())["socket"])
        _require_private(path.parent)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return str(path)


def connect(path: str) -> socket.socket | None:
    """A connection to the host at `path`, which was found in a private folder; None when it is gone. BlockingIOError as
    above."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    sock.setblocking(False)
    try:
        sock.connect(path)
        if peer_uid(sock) != os.geteuid():
            raise SandboxUnavailable(f"the host at {path} belongs to another user")
    except (ConnectionError, FileNotFoundError):
        sock.close()
        return None
    except BaseException:
        sock.close()
        raise
    return sock


def peer_uid(sock: socket.socket) -> int:
    """Who is at the other end, by the kernel's word."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])


def start(home: Path, options: Options = DEFAULTS) -> socket.socket:
    """A connection to the host of `home`, which is started if none runs. Blocks, START_S at most."""
    deadline = time.monotonic() + START_S
    with open(run_folder(home) / f"host-v{VERSION}.start", "w") as turn:
        while True:
            found = _find(home)
            if found is not None:
                return found
            if time.monotonic() > deadline:
                raise SandboxUnavailable(
                    f"the host did not start within {START_S:.0f} s{_last_words(home)}", hint=f"See {log_file(home)}."
                )
            # One harness starts it; the others look until it is there.
            try:
                fcntl.flock(turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(STARTING_POLL_S)
                continue
            try:
                found = _find(home)
                if found is not None:
                    return found
                if not _spawn(home, options, deadline - time.monotonic()):
                    time.sleep(STARTING_POLL_S)
            finally:
                fcntl.flock(turn, fcntl.LOCK_UN)


def _find(home: Path) -> socket.socket | None:
    try:
        return find(home)
    except BlockingIOError:
        return None


def _spawn(home: Path, options: Options, timeout_s: float) -> bool:
    """Start a host. True once it listens; False when another one holds the lock. SandboxUnavailable says why not."""
    if not sys.executable:
        raise SandboxUnavailable("this program does not know its Python interpreter, which the host needs")
    package = Path(__file__).resolve().parents[3]
    ready, told = os.pipe()
    try:
        with open(log_file(home), "a") as log:
            launcher = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _START, str(package), str(home), options.to_text(), str(told)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", env=_environ(),
                start_new_session=True, pass_fds=(told,),
            )  # fmt: skip
        os.close(told)
        told = -1
        launcher.wait()
        word = _read_word(ready, timeout_s)
    finally:
        os.close(ready)
        if told >= 0:
            os.close(told)
    if word in ("ready", "held"):
        return word == "ready"
    raise SandboxUnavailable(f"the host could not start{': ' + word if word else _last_words(home)}")


def _environ() -> dict[str, str]:
    """All that a host sees of the harness's environment."""
    environ = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"}
    environ |= {name: os.environ[name] for name in ("XDG_RUNTIME_DIR", "HOME") if name in os.environ}
    return environ


def _read_word(ready: int, timeout_s: float) -> str:
    """What the host says when it stands, or cannot; "" when it ended without a word or takes too long."""
    deadline, word = time.monotonic() + timeout_s, b""
    poll = select.poll()
    poll.register(ready, select.POLLIN)
    while poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        data = os.read(ready, 4096)
        if not data:
            break
        word += data
    return word.decode(errors="replace")


def _last_words(home: Path) -> str:
    try:
        lines = log_file(home).read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return f": {lines[-1][:500]}" if lines else ""


def await_end(home: Path, timeout_s: float = START_S) -> None:
    """Returns when no host holds the lock of `home`; SandboxUnavailable when one still does after the time."""
    deadline = time.monotonic() + timeout_s
    while True:
        lock = hold(home)
        if lock is not None:
            lock.close()
            return
        if time.monotonic() > deadline:
            raise SandboxUnavailable(f"the host of {home} does not end", hint=f"See {log_file(home)}.")
        time.sleep(STARTING_POLL_S)
