"""Files of the workspace on their way in and out: the frames `put` and `take`."""

from __future__ import annotations

import base64
from typing import Any

from farhand.sandbox.runner.bounds import FILE_CHUNK_BYTES
from farhand.sandbox.runner.field import reason_of, text_field, whole_field
from farhand.sandbox.runner.hands import Hands
from farhand.sandbox.runner.link import Connection
from farhand.sandbox.runner.listing import Listing
from farhand.sandbox.runner.reactor import Reactor


class Transfer:
    """Answers `put` and `take` of one box, whether an action runs or not."""

    def __init__(self, reactor: Reactor, hands: Hands) -> None:
        self._reactor = reactor
        self._hands = hands
        self._listing: Listing | None = None

    def put(self, connection: Connection, frame: dict[str, Any]) -> None:
        reply: dict[str, Any] = {"t": "files", "id": frame.get("id"), "ok": True}
        try:
            data = base64.b64decode(text_field(frame, "data"), validate=True)
            path, offset, mode = text_field(frame, "path"), whole_field(frame, "offset"), frame.get("mode")
            mode = mode if type(mode) is int else 0o644
            self._hands.files().write(path, offset, data, mode, frame.get("last") is True)
        except (OSError, ValueError) as error:
            reply.update(ok=False, error=reason_of(error))
        connection.answer(reply)

    def take(self, connection: Connection, frame: dict[str, Any]) -> None:
        path, offset = frame.get("path"), whole_field(frame, "offset") if frame.get("offset") else 0
        if path is None:
            self._list(connection, frame.get("id"), offset)
            return
        reply: dict[str, Any] = {"t": "files", "id": frame.get("id"), "ok": True}
        try:
            data, eof = self._hands.files().read(text_field(frame, "path"), offset, FILE_CHUNK_BYTES)
            reply.update(data=base64.b64encode(data).decode("ascii"), eof=eof)
        except (OSError, ValueError) as error:
            reply.update(ok=False, error=reason_of(error))
        connection.answer(reply)

    def _list(self, connection: Connection, asked: Any, cursor: int) -> None:
        """One part of the listing. The walk is kept between two parts; a new listing ends an older one."""
        listing = self._listing
        if listing is None or cursor == 0 or listing.given != cursor or listing.asked is not None:
            if listing is not None:
                listing.cancelled = True
            if cursor:
                connection.answer({"t": "files", "id": asked, "ok": False, "error": "the listing was given up"})
                return
            listing = self._listing = Listing(self._reactor, self._hands.files())
        listing.ask(connection, asked)

    def close(self) -> None:
        if self._listing is not None:
            self._listing.cancelled = True
