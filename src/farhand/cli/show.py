"""`farhand show`: a session's transcript again, from its log."""

from __future__ import annotations

import asyncio
import sys

from farhand.cli import record
from farhand.cli.display import Displays
from farhand.cli.lines import print_event
from farhand.home import farhand_home


def show(name: str, as_json: bool) -> int:
    asyncio.run(_show(name, as_json))
    return 0


async def _show(name: str, as_json: bool) -> None:
    async with record.opened() as (store, blobs):
        session_id = await record.find(store, name)
        if as_json:
            async for event in record.events(store, blobs, session_id):
                print_event(event, sys.stdout)
            return
        from farhand.cli.page import Page, console_on
        from farhand.cli.render import Renderer
        from farhand.cli.summary import write_summary
        from farhand.cli.tally import Tally

        page = Page(console_on(sys.stdout))
        displays = Displays(farhand_home() / "sessions" / session_id / "displays")
        renderer = Renderer(page, asked=True, keep=displays.keep)
        tally = Tally()
        async for event in record.events(store, blobs, session_id):
            tally.event(event)
            renderer.event(event)
        renderer.finish()
        write_summary(page, tally, farhand_home())
