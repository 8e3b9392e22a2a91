"""`farhand sessions`: one line for each session, newest first."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
import time

from farhand.cli import record
from farhand.cli.terminal import is_terminal, one_line, width_of
from farhand.store.port import SessionRow

WIDE = 100
"""Columns from which there is room for the tokens."""


def sessions(as_json: bool, limit: int) -> int:
    found = asyncio.run(record.rows(limit))
    if as_json:
        for row, _ in found:
            print(json.dumps(dataclasses.asdict(row)))
        return 0
    if not found:
        print("no session yet: farhand run TASK makes one", file=sys.stderr)
        return 0
    width = width_of(sys.stdout) if is_terminal(sys.stdout) else None
    state_width = max(len(state) for _, state in found)
    for row, state in found:
        print(_line(row, state.ljust(state_width), width))
    return 0


def _line(row: SessionRow, state: str, width: int | None) -> str:
    """On a terminal one line, in a pipe everything."""
    wide = width is None or width >= WIDE
    when = time.strftime("%Y-%m-%d %H:%M" if wide else "%m-%d %H:%M", time.localtime(row.updated_at))
    tokens = f"{row.input_tokens + row.output_tokens:>9,} tokens  " if wide else ""
    head = f"{row.session_id}  {when}  {state}  {tokens}"
    return (head + one_line(row.title, max((width or 10_000) - len(head), 0))).rstrip()
