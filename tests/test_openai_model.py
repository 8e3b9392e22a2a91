"""The openai adapter against a server on this machine that speaks the wire, well and badly."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast

import pytest

from farhand.errors import (
    ModelError,
    ModelProtocolError,
    ModelRateLimited,
    ModelRefused,
    ModelUnavailable,
    UsageError,
)
from farhand.limits import MODEL_REPLY_BYTES
from farhand.model.openai import OPENAI_URL, OpenAIModel
from farhand.model.port import (
    GRAMMAR,
    STOP,
    Finished,
    Message,
    ModelEvent,
    ModelRequest,
    ReasoningDelta,
    TextDelta,
    ToolCall,
    ToolCallDelta,
    ToolSpec,
    Usage,
)

KEY = "sk-planted-0123456789"
Answer = Callable[[BaseHTTPRequestHandler], None]
pytestmark = pytest.mark.anyio


class Server:
    """Gives its answers in order, the last one again and again, and keeps what it was asked."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.asked: list[dict[str, Any]] = []
        self.closed = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.asked.append(body | {"path": self.path, "authorization": self.headers["Authorization"]})
                answer = outer.answers.pop(0) if len(outer.answers) > 1 else outer.answers[0]
                answer(self)

            def log_message(self, *args: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/v1"
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.http.shutdown()
    server.http.server_close()


@pytest.fixture
async def model(server: Server) -> AsyncGenerator[OpenAIModel, None]:
    model = OpenAIModel("small", base_url=server.url, api_key=KEY)
    yield model
    await model.close()


def piece(delta: dict[str, Any] | None = None, finish: str | None = None, **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return {"id": "c", "object": "chat.completion.chunk", "created": 0, "model": "small", "choices": [choice], **more}


def usage(input_tokens: int, output_tokens: int) -> dict[str, Any]:
    counts = {"prompt_tokens": input_tokens, "completion_tokens": output_tokens, "total_tokens": 0}
    return piece(usage=counts) | {"choices": []}


def stream(*pieces: dict[str, Any] | str, done: bool = True, cut: bool = False) -> Answer:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream")
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        lines = [one if isinstance(one, str) else json.dumps(one) for one in pieces] + ["[DONE]"] * done
        for line in lines:
            data = f"data: {line}\n\n".encode()
            handler.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        if cut:
            handler.wfile.flush()
            handler.close_connection = True
        else:
            handler.wfile.write(b"0\r\n\r\n")

    return answer


def status(code: int, message: str, error_code: str | None = None, **headers: str) -> Answer:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        body = json.dumps({"error": {"message": message, "code": error_code, "type": "x", "param": None}}).encode()
        handler.send_response(code)
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    return answer


HELLO = stream(piece({"role": "assistant", "content": ""}), piece({"content": "Hel"}), piece({"content": "lo"}, "stop"))


async def ask(model: OpenAIModel, **request: Any) -> list[ModelEvent]:
    request.setdefault("messages", (Message("user", "hi"),))
    return [event async for event in model.stream(ModelRequest(**request))]


async def test_text_streams_and_ends_once(server: Server, model: OpenAIModel) -> None:
    server.answers = [stream(piece({"content": "4"}), piece({"content": "2"}), piece({}, "stop"), usage(7, 2))]
    assert await ask(model) == [TextDelta("4"), TextDelta("2"), Usage(7, 2), Finished("stop")]
    assert server.asked[0]["path"] == "/v1/chat/completions"
    assert server.asked[0]["authorization"] == f"Bearer {KEY}"
    assert server.asked[0]["stream_options"] == {"include_usage": True}


async def test_an_empty_delta_after_the_finish_reason_changes_nothing(server: Server, model: OpenAIModel) -> None:
    server.answers = [stream(piece({"content": "a"}), piece({}, "length"), piece({}), piece(None), usage(1, 1))]
    assert await ask(model) == [TextDelta("a"), Usage(1, 1), Finished("length")]


async def test_usage_may_be_missing(server: Server, model: OpenAIModel) -> None:
    server.answers = [HELLO]
    assert await ask(model) == [TextDelta("Hel"), TextDelta("lo"), Finished("stop")]


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("stop", "stop"),
        ("length", "length"),
        ("tool_calls", "tool_calls"),
        ("content_filter", "refusal"),
        ("eos", "other"),
    ],
)
async def test_finish_reasons(server: Server, model: OpenAIModel, said: str, reason: str) -> None:
    server.answers = [stream(piece({"content": "a"}, said))]
    assert (await ask(model))[-1] == Finished(reason)


async def test_a_refusal_is_text_and_a_reason(server: Server, model: OpenAIModel) -> None:
    server.answers = [stream(piece({"refusal": "I will not."}), piece({}, "stop"))]
    assert await ask(model) == [TextDelta("I will not."), Finished("refusal")]


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
async def test_reasoning_is_kept_apart(server: Server, model: OpenAIModel, field: str) -> None:
    server.answers = [stream(piece({field: "so"}), piece({"content": "4"}, "stop"))]
    assert await ask(model) == [ReasoningDelta("so"), TextDelta("4"), Finished("stop")]


async def test_tool_calls_come_in_pieces(server: Server, model: OpenAIModel) -> None:
    def call(index: int | None, **more: Any) -> dict[str, Any]:
        return piece({"tool_calls": [{"index": index, "type": "function", **more}]})

    server.answers = [
        stream(
            call(0, id="c1", function={"name": "python", "arguments": ""}),
            call(0, function={"arguments": '{"code": '}),
            call(0, id="c1", function={"name": "python", "arguments": '"1"}'}),
            call(1, function={"name": "python", "arguments": "{}"}),
            piece({}, "tool_calls"),
        )
    ]
    assert await ask(model) == [
        ToolCallDelta(0, "c1", "python", ""),
        ToolCallDelta(0, arguments='{"code": '),
        ToolCallDelta(0, arguments='"1"}'),
        ToolCallDelta(1, "call_1", "python", "{}"),
        Finished("tool_calls"),
    ]


async def test_what_is_asked_for_reaches_the_wire(server: Server, model: OpenAIModel) -> None:
    server.answers = [HELLO]
    messages = (
        Message("system", "be short"),
        Message("assistant", "", calls=(ToolCall("c1", "python", '{"code": "1"}'),)),
        Message("tool", "1", call_id="c1"),
    )
    await ask(
        model,
        messages=messages,
        tools=(ToolSpec("python", "runs it", '{"type": "object"}'),),
        stop=("</code>",),
        max_output_tokens=9,
        temperature=0.0,
        seed=3,
        grammar="root ::= .",
    )
    asked = server.asked[0]
    assert asked["messages"] == [
        {"role": "system", "content": "be short"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "python", "arguments": '{"code": "1"}'}}
            ],
        },
        {"role": "tool", "content": "1", "tool_call_id": "c1"},
    ]
    assert asked["tools"][0]["function"] == {
        "name": "python",
        "description": "runs it",
        "parameters": {"type": "object"},
    }
    assert (asked["stop"], asked["max_tokens"], asked["temperature"], asked["seed"]) == (["</code>"], 9, 0.0, 3)
    assert "grammar" not in asked, "this model has no such capability"


async def test_a_grammar_goes_to_a_model_that_takes_one(server: Server) -> None:
    server.answers = [HELLO]
    model = OpenAIModel("small", base_url=server.url, capabilities=frozenset({STOP, GRAMMAR}))
    await ask(model, grammar="root ::= .")
    await model.close()
    assert server.asked[0]["grammar"] == "root ::= ."
    assert KEY not in server.asked[0]["authorization"]


async def test_a_parameter_that_is_refused_by_name_is_left_out(server: Server, model: OpenAIModel) -> None:
    server.answers = [
        status(400, "Unrecognized request argument supplied: stream_options"),
        status(400, "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."),
        status(422, "temperature: extra fields not permitted"),
        HELLO,
    ]
    assert (await ask(model, max_output_tokens=5, temperature=0.0))[-1] == Finished("stop")
    last = server.asked[-1]
    assert "stream_options" not in last
    assert "temperature" not in last
    assert (last["max_completion_tokens"], "max_tokens" in last) == (5, False)
    await ask(model, max_output_tokens=5, temperature=0.0)
    assert len(server.asked) == 5, "what was learnt is kept"


async def test_a_rate_limit_is_waited_out(server: Server, model: OpenAIModel) -> None:
    server.answers = [status(429, "slow down", Retry_After="0.01"), HELLO]
    assert (await ask(model))[-1] == Finished("stop")
    assert len(server.asked) == 2


async def test_a_rate_limit_that_stays_is_said(server: Server, model: OpenAIModel) -> None:
    server.answers = [
        status(429, "slow down", retry_after_ms="1"),
        status(429, "slow down", retry_after_ms="1"),
        status(429, "slow down", Retry_After="7"),
    ]
    with pytest.raises(ModelRateLimited, match="slow down") as caught:
        await ask(model)
    assert caught.value.retryable
    assert "7 s" in caught.value.hint
    assert len(server.asked) == 3, "one request and two repetitions"


async def test_a_server_that_fails_is_unavailable(server: Server, model: OpenAIModel) -> None:
    server.answers = [status(503, "overloaded", retry_after_ms="1")]
    with pytest.raises(ModelUnavailable, match="503: .*overloaded") as caught:
        await ask(model)
    assert caught.value.retryable


@pytest.mark.parametrize(
    ("code", "error_code", "hint"),
    [
        (401, "invalid_api_key", "OPENAI_API_KEY"),
        (403, None, "may not use"),
        (404, None, "named 'small'"),
        (400, None, ""),
    ]
    + [(429, "insufficient_quota", "no credit")],
)
async def test_refusals(server: Server, model: OpenAIModel, code: int, error_code: str | None, hint: str) -> None:
    server.answers = [status(code, f"no: Bearer {KEY}", error_code, retry_after_ms="1")]
    with pytest.raises(ModelRefused) as caught:
        await ask(model)
    assert not caught.value.retryable
    assert hint in caught.value.hint
    assert KEY not in f"{caught.value!s} {caught.value!r} {caught.value.__cause__!r}"
    assert caught.value.__suppress_context__, "the SDK's error holds the request and with it the key"


async def test_a_stream_cut_in_the_middle(server: Server, model: OpenAIModel) -> None:
    server.answers = [stream(piece({"content": "final_answer(1"}), done=False, cut=True)]
    got: list[ModelEvent] = []
    with pytest.raises(ModelUnavailable, match="broke") as caught:
        async for event in model.stream(ModelRequest((Message("user", "hi"),))):
            got.append(event)
    assert got == [TextDelta("final_answer(1")]
    assert caught.value.retryable


async def test_a_stream_that_ends_without_a_finish_reason(server: Server, model: OpenAIModel) -> None:
    server.answers = [stream(piece({"content": "final_answer(1"}))]
    with pytest.raises(ModelProtocolError, match="in the middle"):
        await ask(model)


async def test_a_cut_after_the_finish_reason_loses_only_the_usage(server: Server, model: OpenAIModel) -> None:
    server.answers = [stream(piece({"content": "a"}), piece({}, "stop"), done=False, cut=True)]
    assert await ask(model) == [TextDelta("a"), Finished("stop")]


async def test_an_error_inside_the_stream(server: Server, model: OpenAIModel) -> None:
    server.answers = [stream(piece({"content": "a"}), {"error": {"message": "out of memory", "code": 500}})]
    with pytest.raises(ModelUnavailable, match="out of memory"):
        await ask(model)


async def test_a_piece_that_is_no_json(server: Server, model: OpenAIModel) -> None:
    server.answers = [stream(piece({"content": "a"}), "{oops")]
    with pytest.raises(ModelProtocolError, match="no JSON"):
        await ask(model)


async def test_a_page_instead_of_a_reply(server: Server, model: OpenAIModel) -> None:
    def page(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", "text/html")
        handler.send_header("Content-Length", "15")
        handler.end_headers()
        handler.wfile.write(b"<html>hi</html>")

    server.answers = [page]
    with pytest.raises(ModelProtocolError) as caught:
        await ask(model)
    assert "usually ends in /v1" in caught.value.hint


async def test_a_reply_without_end_is_cut(server: Server, model: OpenAIModel) -> None:
    block = piece({"content": "x" * (MODEL_REPLY_BYTES // 2)})
    server.answers = [stream(block, block, block, block, piece({}, "stop"))]
    events = await ask(model)
    assert events[-1] == Finished("length")
    assert sum(len(event.text) for event in events if isinstance(event, TextDelta)) <= 2 * MODEL_REPLY_BYTES


async def test_nobody_listens(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    model = OpenAIModel("small", base_url=server.url, api_key=KEY)
    server.answers = [HELLO]
    assert (await ask(model))[-1] == Finished("stop"), "a proxy is not asked for this machine's own addresses"
    await model.close()
    dead = OpenAIModel("small", base_url="http://127.0.0.1:1/v1", api_key=KEY)
    with pytest.raises(ModelUnavailable) as caught:
        await ask(dead)
    await dead.close()
    assert "http://127.0.0.1:1/v1 up" in caught.value.hint


@pytest.mark.parametrize("how", ["cancel", "aclose"])
async def test_stopping_closes_the_stream(server: Server, model: OpenAIModel, how: str) -> None:
    gone = threading.Event()

    def stalled(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream")
        handler.end_headers()
        handler.wfile.write(b"data: " + json.dumps(piece({"content": "a"})).encode() + b"\n\n")
        if handler.connection.recv(1) == b"":
            gone.set()
        handler.close_connection = True

    server.answers = [stalled]
    events = cast(AsyncGenerator[ModelEvent, None], model.stream(ModelRequest((Message("user", "hi"),))))
    if how == "aclose":
        assert await anext(events) == TextDelta("a")
        await events.aclose()
    else:
        begun = asyncio.Event()

        async def read() -> None:
            async for _ in events:
                begun.set()

        task = asyncio.create_task(read())
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert await asyncio.to_thread(gone.wait, 10), "the server was not told"


async def test_the_key_is_in_no_text(server: Server, model: OpenAIModel) -> None:
    assert KEY not in repr(model)
    assert KEY not in str(model)
    secretive = OpenAIModel("m", base_url="http://user:hunter2@127.0.0.1:1/v1?token=hunter2", api_key=KEY)
    with pytest.raises(ModelError) as caught:
        await ask(secretive)
    await secretive.close()
    assert "hunter2" not in f"{caught.value} {secretive!r}"


def test_one_model_serves_several_loops(server: Server) -> None:
    server.answers = [HELLO]
    model = OpenAIModel("small", base_url=server.url, api_key=KEY)

    async def once() -> ModelEvent:
        try:
            return (await ask(model))[-1]
        finally:
            await model.close()

    assert [asyncio.run(once()) for _ in range(2)] == [Finished("stop")] * 2


def test_without_key_and_url_the_error_shows_the_ways_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError) as caught:
        OpenAIModel("gpt-x")
    assert "OPENAI_API_KEY" in caught.value.hint
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    assert OpenAIModel("gpt-x").base_url == OPENAI_URL


def test_a_key_goes_only_to_the_host_it_was_given_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-planted-openai")
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    assert OpenAIModel("m")._key == "sk-planted-openai"
    assert OpenAIModel("m", base_url="https://other.example/v1")._key == ""
    assert OpenAIModel("m", base_url="http://127.0.0.1:1/v1")._key == ""
    monkeypatch.setenv("FARHAND_API_KEY", "other-key-0123")
    assert OpenAIModel("m", base_url="https://other.example/v1")._key == "other-key-0123"
    monkeypatch.setenv("OPENAI_BASE_URL", "https://proxy.example/v1")
    assert OpenAIModel("m")._key == "sk-planted-openai"
    with pytest.raises(UsageError, match="plain http"):
        OpenAIModel("m", base_url="http://other.example/v1")
