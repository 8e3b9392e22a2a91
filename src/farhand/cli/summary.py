"""What a turn leaves behind: its files, where they are, and what it cost."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from farhand.cli.delivery import Delivered
from farhand.cli.page import Page, Piece
from farhand.cli.tally import Tally, hidden, seconds_text, short_path, size_text
from farhand.cli.terminal import one_line, sanitise

FILES_SHOWN = 20


def write_summary(page: Page, tally: Tally, home: Path, delivered: Sequence[Delivered] = ()) -> None:
    if not tally.session_id:
        return
    page.gap()
    where = {one.path: one for one in delivered}
    if tally.files:
        page.path(short_path(home / "sessions" / tally.session_id / "files"), ("files    ", "dim"))
        named = {path: size for path, size in tally.files.items() if not hidden(path)}
        for path, size in list(named.items())[:FILES_SHOWN]:
            one = where.get(path)
            went, style = (f"  {one.text()}", "green" if one.target else "yellow") if one else ("", "")
            _row(page, "", (one_line(path, 60), None), (f"  {size_text(size)}", "dim"), (sanitise(went), style))
        more = len(tally.files) - min(len(named), FILES_SHOWN)
        if more:
            _row(page, "", (f"and {more} more", "dim"))
    steps = f"{tally.steps} step" + ("" if tally.steps == 1 else "s")
    tokens = f"{tally.input_tokens:,} tokens in, {tally.output_tokens:,} out"
    _row(page, "cost", (f"{tokens} · {steps} · {seconds_text(tally.seconds)}", None))
    _row(page, "session", (tally.session_id, None))


def _row(page: Page, name: str, *pieces: Piece) -> None:
    page.row((f"{name:<9}", "dim"), *pieces)
