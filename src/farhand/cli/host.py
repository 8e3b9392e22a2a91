"""`farhand host`: the process that makes the boxes of the local jail, in the foreground as a unit of its own; what it
does; its end.

Without it the first box starts a host, which ends when it has had nothing to do for a while.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

import farhand
from farhand.home import farhand_home

_FOREGROUND = """\
import sys
sys.path.append(sys.argv[1])
from pathlib import Path
from farhand.errors import FarhandError
from farhand.sandbox.local.host import run
from farhand.sandbox.local.lifecycle import Options
said = []
def tell(word):
    said.append(word)
    word = "another host runs for this home already" if word == "held" else word
    print("farhand host:", word, file=sys.stderr, flush=True)
try:
    run(Path(sys.argv[2]), Options(idle_s=1e9), tell)
except FarhandError as error:
    sys.exit(f"farhand host: {error}")
sys.exit("held" in said)
"""


def run() -> NoReturn:
    """Becomes another program with nothing of this one's environment: no key of the person's is near the boxes."""
    package = Path(farhand.__file__).parent.parent
    command = [sys.executable, "-I", "-S", "-c", _FOREGROUND, str(package), str(farhand_home())]
    kept = {name: os.environ[name] for name in ("LANG", "PATH", "XDG_RUNTIME_DIR") if name in os.environ}
    os.execve(sys.executable, command, kept)


def status(as_json: bool) -> int:
    """Exit code 1 when no host runs."""
    from farhand.sandbox.local.sandbox import LocalSandbox

    found = asyncio.run(LocalSandbox(farhand_home()).status())
    if as_json:
        print(json.dumps(found))
    elif found is None:
        print("no host runs; the first box starts one", file=sys.stderr)
    else:
        for line in _lines(found):
            print(line)
    return 0 if found is not None else 1


def _lines(found: dict[str, Any]) -> list[str]:
    groups = ", ".join(found["groups"]) or "none"
    lines = [
        f"host {found['pid']}, up {found['seconds']:,.0f} s, control groups: {groups}",
        f"boxes {found['boxes']}, attached {found['attached']}, running an action {found['running']}",
    ]
    for each in found["environments"]:
        # The zygote: a process that has imported the packages, of which boxes are forks.
        made = f"boxes are made from process {each['zygote']}" if each["zygote"] else "its process is not started yet"
        packages = f"{each['packages']} package{'' if each['packages'] == 1 else 's'}"
        lines.append(f"  environment with {packages} ({each['python']}): {made}, {each['ready']} ready")
        lines += [f"    {name} cannot be imported: {why}" for name, why in each["failed"].items()]
    return lines


def stop(force: bool) -> int:
    """Returns once the host and, with `force`, its boxes are gone."""
    from farhand.sandbox.local.sandbox import LocalSandbox

    stopped = asyncio.run(LocalSandbox(farhand_home()).stop(force))
    print("the host has ended" if stopped else "no host runs", file=sys.stderr)
    return 0
