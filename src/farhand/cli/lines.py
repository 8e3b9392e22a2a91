"""Events as lines of JSON."""

from __future__ import annotations

import json
from typing import TextIO

from farhand.event import Event


def print_event(event: Event, stream: TextIO) -> None:
    """One line, flushed. Pure ASCII without control characters, so a terminal may be shown it as it is."""
    line = json.dumps(event.to_json(), separators=(",", ":")).replace("\x7f", "\\u007f")
    stream.write(line + "\n")
    stream.flush()
