"""A harness in a process of its own, to be stopped and killed: `harness_program.py FOLDER SANDBOX CODE [LEASE_S]`.

Prints the session's id as its first line. Its tool `note(text)` appends a line to FOLDER/notes and, when the text
begins with "wait", returns only once FOLDER/go exists. Exit code 7: fenced.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

from farhand.agent import CodeAgent
from farhand.errors import Fenced
from farhand.event import Event
from farhand.sandbox.environment import BARE
from farhand.testing import ScriptedModel, code
from farhand.tool import tool


def make_agent(folder: Path, sandbox: str, source: str, lease_s: float = 15.0, more: tuple[str, ...] = ()) -> CodeAgent:
    @tool
    def note(text: str) -> int:
        """Append a line; the number of lines then."""
        with (folder / "notes").open("a") as file:
            file.write(text + "\n")
        deadline = time.monotonic() + 60
        while text.startswith("wait") and not (folder / "go").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        return len((folder / "notes").read_text().splitlines())

    model = ScriptedModel([code(source), *(code(text) for text in more)])
    return CodeAgent(tools=[note], model=model, sandbox=sandbox, environment=BARE, lease_s=lease_s)


async def main(folder: Path, sandbox: str, source: str, lease_s: float) -> int:
    agent = make_agent(folder, sandbox, source, lease_s)
    told = False
    try:
        async for item in agent.stream("Go."):
            if isinstance(item, Event) and not told:
                print(item.session_id, flush=True)
                told = True
    except Fenced:
        return 7
    await agent.aclose()
    return 0


if __name__ == "__main__":
    lease = float(sys.argv[4]) if len(sys.argv) > 4 else 15.0
    sys.exit(asyncio.run(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], lease)))
