"""A worker for tests of the jail alone: a line of JSON with code comes in, a line with its `result` or its error goes
out.

Its source is given to the zygote. Code runs as `__main__`, its names live on.
"""

from __future__ import annotations

import json
import signal
import socket
import sys
import traceback
import types
from typing import Any


def practise() -> None:
    import colorsys  # noqa: F401


def worker_main(descriptor: int) -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    stream = socket.socket(fileno=descriptor).makefile("rwb", buffering=0)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    while True:
        try:
            line = stream.readline()
            if not line:
                return
            stream.write(json.dumps(answer(line, main.__dict__)).encode() + b"\n")
        except KeyboardInterrupt:
            stream.write(b'{"error": "KeyboardInterrupt", "text": ""}\n')


def answer(line: bytes, space: dict[str, Any]) -> dict[str, Any]:
    space.pop("result", None)
    try:
        exec(compile(json.loads(line)["code"], "<code>", "exec"), space)
        return {"result": json.loads(json.dumps(space.get("result")))}
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:
        return {"error": type(error).__name__, "text": traceback.format_exc(), "errno": getattr(error, "errno", None)}
