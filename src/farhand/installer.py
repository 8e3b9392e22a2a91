"""pip, whichever there is, for the packages of boxes and the small local model."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Sequence

from farhand.errors import FarhandError
from farhand.limits import ENVIRONMENT_BUILD_S, ENVIRONMENT_ERROR_LINES

Progress = Callable[[str], None]


class PipFailed(FarhandError):
    """pip could not install something. `package` names it when pip did."""

    code = "pip_failed"

    def __init__(self, message: str, *, hint: str = "", package: str = "") -> None:
        super().__init__(message, hint=hint)
        self.package = package


def run_pip(python: str, arguments: Sequence[str], progress: Progress) -> None:
    """Runs `pip ARGUMENTS` under an interpreter, tells `progress` what it fetches, and raises PipFailed. Blocks."""
    command = [*pip_command(python), *arguments, "--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environ |= {"PIP_USER": "0", "PIP_REQUIRE_VIRTUALENV": "0", "PYTHONNOUSERSITE": "1"}
    last: deque[str] = deque(maxlen=ENVIRONMENT_ERROR_LINES)
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environ,
        umask=0o022,
        text=True,
        errors="replace",
    ) as pip:
        assert pip.stdout is not None
        deadline = threading.Timer(ENVIRONMENT_BUILD_S, pip.kill)
        deadline.daemon = True
        deadline.start()
        try:
            for line in filter(None, map(str.strip, pip.stdout)):
                last.append(line)
                if line.startswith(("Collecting ", "Downloading ", "Installing ")):
                    progress(line)
        except BaseException:
            pip.kill()
            raise
        finally:
            deadline.cancel()
    if pip.returncode == -signal.SIGKILL:
        last.append(f"pip was killed; it has {ENVIRONMENT_BUILD_S:.0f} s")
    if pip.returncode:
        raise _failure(list(last))


def pip_command(python: str) -> list[str]:
    """A command that runs some pip under `python`: its own, the one ensurepip carries, or another Python's."""
    if _runs([python, "-m", "pip", "--version"]):
        return [python, "-m", "pip"]
    carried = "import ensurepip, glob, os; print(*glob.glob(os.path.join(ensurepip.__path__[0], '_bundled/pip-*.whl')))"
    wheel = subprocess.run([python, "-c", carried], capture_output=True, text=True).stdout.strip()
    if wheel and _runs([python, f"{wheel}/pip", "--version"]):
        return [python, f"{wheel}/pip"]
    for name in ("pip3", "pip"):
        other = shutil.which(name)
        if other and _runs([other, "--python", python, "--version"]):
            return [other, "--python", python]
    raise PipFailed(
        f"no pip was found that can install packages for {python}",
        hint=f"Run:  {python} -m ensurepip   (on Debian first:  apt-get install -y python3-venv python3-pip)",
    )


def _runs(command: list[str]) -> bool:
    quiet = subprocess.DEVNULL
    return subprocess.run(command, stdin=quiet, stdout=quiet, stderr=quiet).returncode == 0


def _failure(last: list[str]) -> PipFailed:
    text = "\n".join(last)
    named = re.search(r"No matching distribution found for (\S+)", text) or re.search(r"requirement (\S+)", text)
    if re.search(r"NewConnectionError|Name or service not known|name resolution|ConnectTimeout|unreachable", text):
        hint = "The package index cannot be reached: connect to the network, or set PIP_INDEX_URL to one that can."
    elif "externally-managed-environment" in text:
        hint = "This Python belongs to the system: install farhand into a virtual environment (python3 -m venv)."
    elif named:
        hint = "No wheel of that name and version fits this Python. Check the name, or list another version."
    else:
        hint = ""
    first = next((number for number, line in enumerate(last) if line.startswith("ERROR:")), 0)
    said = "\n".join(line for line in last[first:] if not line.startswith(("WARNING:", "[notice]")))
    return PipFailed(f"pip said:\n{said}", hint=hint, package=named.group(1) if named else "")
