"""`farhand sessions`: one line for each session, newest first."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import shutil
import sys
import time

from farhand.cli import record
from farhand.cli.terminal import is_terminal, one_line
from farhand.store.port import SessionRow


def sessions(as_json: bool, limit: int) -> int:
    found = asyncio.run(record.rows(limit))
    if as_json:
        for row in found:
            print(json.dumps(dataclasses.asdict(row)))
        return 0
    if not found:
        print("no session yet: farhand run TASK makes one", file=sys.stderr)
        return 0
    width = shutil.get_terminal_size().columns if is_terminal(sys.stdout) else 10_000
    for row in found:
        print(_line(row, width))
    return 0


def _line(row: SessionRow, width: int) -> str:
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(row.updated_at))
    tokens = f"{row.input_tokens + row.output_tokens:,}"
    head = f"{row.session_id:<30}  {when}  {row.status:<9}  {tokens:>9} tokens  "
    return head + one_line(row.title, max(width - len(head), 20))
