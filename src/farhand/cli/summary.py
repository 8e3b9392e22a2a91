"""What a turn leaves behind: its files, where they are, and what it cost."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from farhand.cli.delivery import Delivered
from farhand.cli.page import Page, Piece
from farhand.cli.tally import Tally, seconds_text, size_text
from farhand.cli.terminal import one_line, sanitise

FILES_SHOWN = 20


def write_summary(page: Page, tally: Tally, home: Path, delivered: Sequence[Delivered] = ()) -> None:
    if not tally.session_id:
        return
    page.gap()
    where = {one.path: one for one in delivered}
    if tally.files:
        _row(page, "files", (str(home / "sessions" / tally.session_id / "files"), None))
        for path, size in list(tally.files.items())[:FILES_SHOWN]:
            one = where.get(path)
            went, style = (f"  {one.text()}", "green" if one.target else "yellow") if one else ("", "")
            _row(page, "", (one_line(path, 60), None), (f"  {size_text(size)}", "dim"), (sanitise(went), style))
        if len(tally.files) > FILES_SHOWN:
            _row(page, "", (f"and {len(tally.files) - FILES_SHOWN} more", "dim"))
    steps = f"{tally.steps} step" + ("" if tally.steps == 1 else "s")
    tokens = f"{tally.input_tokens:,} tokens in, {tally.output_tokens:,} out"
    _row(page, "cost", (f"{tokens} · {steps} · {seconds_text(tally.seconds)}", None))
    _row(page, "session", (tally.session_id, None))


def _row(page: Page, name: str, *pieces: Piece) -> None:
    page.line(*pieces, margin=(f"{name:<9}", "dim"))
    # The margin of a wrapped line repeats the name; names are short and lines rarely wrap.
