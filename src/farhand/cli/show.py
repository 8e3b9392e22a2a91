"""`farhand show`: a session's transcript again, from its log."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from farhand import event as ev
from farhand.cli import record
from farhand.cli.display import Displays
from farhand.cli.lines import print_event
from farhand.event import Event
from farhand.home import farhand_home
from farhand.limits import TRANSCRIPT_OUTPUT_CHARS
from farhand.store.port import Blobs, Store


def show(name: str, as_json: bool, full: bool = False) -> int:
    asyncio.run(_show(name, as_json, full))
    return 0


async def _show(name: str, as_json: bool, full: bool) -> None:
    async with record.opened() as (store, blobs):
        session_id = await record.find(store, name)
        if as_json:
            async for event in record.events(store, blobs, session_id):
                print_event(event, sys.stdout)
        else:
            await _render(store, blobs, session_id, full)


async def _render(store: Store, blobs: Blobs, session_id: str, full: bool) -> None:
    from farhand.cli.page import Page, console_on
    from farhand.cli.render import Renderer
    from farhand.cli.summary import write_summary
    from farhand.cli.tally import Tally

    page = Page(console_on(sys.stdout))
    displays = Displays(farhand_home() / "sessions" / session_id / "displays")
    renderer = Renderer(
        page, asked=True, keep=displays.keep, full=full, answer_cut=True, answer_file=displays.keep_answer
    )
    tally, outputs = Tally(), Outputs()
    if not full:
        async for event in record.events(store, blobs, session_id):
            outputs.count(event)
    async for event in record.events(store, blobs, session_id):
        tally.event(event)
        renderer.event(event if full else outputs.cut(event))
    renderer.finish()
    if outputs.was_cut or renderer.was_cut:
        renderer.note(f"Long texts are cut; all of it:  farhand show --full {session_id}")
    write_summary(page, tally, farhand_home())


class Outputs:
    """Of each action's output the head and the tail, as the model was shown it; the cut is announced."""

    def __init__(self, most: int = TRANSCRIPT_OUTPUT_CHARS) -> None:
        self._half = most // 2
        self._most = most
        self._whole: Counter[str] = Counter()
        self._passed: Counter[str] = Counter()
        self.was_cut = False

    def count(self, event: Event) -> None:
        """Every event comes here before the first is cut."""
        if event.type == ev.ACTION_WROTE:
            self._whole[_action(event)] += sum(len(text) for _, text in _chunks(event))

    def cut(self, event: Event) -> Event:
        action = _action(event)
        if event.type != ev.ACTION_WROTE or self._whole[action] <= self._most:
            return event
        chunks = [[stream, self._part(action, text)] for stream, text in _chunks(event)]
        return replace(event, data={**event.data, "chunks": [chunk for chunk in chunks if chunk[1]]})

    def _part(self, action: str, text: str) -> str:
        """What is shown of a text that stands here in the action's output."""
        start, whole = self._passed[action], self._whole[action]
        self._passed[action] += len(text)
        head_end, tail_start = self._half, whole - self._half
        head, tail = text[: max(head_end - start, 0)], text[max(tail_start - start, 0) :]
        if not start < head_end <= start + len(text):
            return head + tail
        self.was_cut = True
        return f"{head}\n[… {whole - 2 * self._half:,} characters cut …]\n{tail}"


def _action(event: Event) -> str:
    return str(event.data.get("action"))


def _chunks(event: Event) -> list[tuple[str, str]]:
    data: Mapping[str, Any] = event.data
    return [(str(chunk[0]), str(chunk[1])) for chunk in data.get("chunks") or ()]
