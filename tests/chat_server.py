"""A model's server on this machine that streams replies from a list over Chat Completions."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class ChatServer:
    """Gives its replies in order, in pieces of some characters; when none is left it holds the request, silently."""

    def __init__(self, replies: Sequence[str]) -> None:
        self.replies = list(replies)
        self.asked: list[dict[str, Any]] = []
        self.holding, self.let_go = threading.Event(), threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                outer.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.send_header("Connection", "close")
                self.end_headers()
                self.close_connection = True
                if not outer.replies:
                    outer.holding.set()
                    outer.let_go.wait(60)
                    return
                for line in _stream(outer.replies.pop(0)):
                    self.wfile.write(f"data: {line}\n\n".encode())
                    self.wfile.flush()

            def log_message(self, *args: object) -> None:
                return

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.model = f"openai:fake@http://127.0.0.1:{self._http.server_address[1]}/v1"
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def close(self) -> None:
        self.let_go.set()
        self._http.shutdown()
        self._http.server_close()


@contextmanager
def serving(*replies: str) -> Iterator[ChatServer]:
    server = ChatServer(replies)
    try:
        yield server
    finally:
        server.close()


def _stream(reply: str) -> Iterator[str]:
    for at in range(0, len(reply), 7):
        yield _piece({"choices": [_choice({"content": reply[at : at + 7]}, None)]})
    yield _piece({"choices": [_choice({}, "stop")]})
    usage = {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120}
    yield _piece({"choices": [], "usage": usage})
    yield "[DONE]"


def _choice(delta: dict[str, str], finish: str | None) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "finish_reason": finish}


def _piece(fields: dict[str, Any]) -> str:
    return json.dumps({"id": "c", "object": "chat.completion.chunk", "created": 0, "model": "fake", **fields})
