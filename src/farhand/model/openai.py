"""Chat Completions at any base URL, through the openai SDK: OpenAI, llama.cpp, vLLM, Ollama, OpenRouter and others.

The SDK repeats a request that failed before its first byte, twice, heeding Retry-After; nothing else here repeats one.
A parameter that a server refuses by name is left out from then on.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import re
import sys
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from farhand.errors import (
    ModelError,
    ModelProtocolError,
    ModelRateLimited,
    ModelRefused,
    ModelUnavailable,
    UsageError,
)
from farhand.limits import MODEL_CONNECT_S, MODEL_ERROR_CHARS, MODEL_REPLY_BYTES, MODEL_SILENCE_S
from farhand.model.port import (
    DEFAULT_PROMPTING,
    GRAMMAR,
    STOP,
    TOOLS,
    Finished,
    Message,
    ModelEvent,
    ModelRequest,
    Prompting,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    Usage,
)

if TYPE_CHECKING:
    import openai
    from openai.types.chat import ChatCompletionChunk
    from openai.types.chat.chat_completion_chunk import ChoiceDelta

OPENAI_URL = "https://api.openai.com/v1"
SDK_RETRIES = 2
OPTIONAL = ("stream_options", "max_completion_tokens", "max_tokens", "temperature", "seed", "stop")
"""Parameters that some server refuses and a request can do without, or say otherwise."""
FINISH = {
    "stop": "stop",
    "length": "length",
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
    "content_filter": "refusal",
}


LOOPBACK = ("127.0.0.1", "localhost", "::1")


def _key_for(host: str) -> str:
    """The key in the environment that was given for this host."""
    known = {urlsplit(url).hostname for url in (os.environ.get("OPENAI_BASE_URL") or OPENAI_URL, OPENAI_URL)}
    return os.environ.get("OPENAI_API_KEY" if host in known else "FARHAND_API_KEY") or ""


class OpenAIModel:
    """One model at one base URL, by default OPENAI_BASE_URL's.

    `api_key` defaults to OPENAI_API_KEY where the host is that of OPENAI_BASE_URL or OpenAI's own, else to
    FARHAND_API_KEY: a key goes to no host it was not given for. Over plain http it goes to this machine only.
    """

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        capabilities: frozenset[str] = frozenset({TOOLS, STOP}),
        prompting: Prompting = DEFAULT_PROMPTING,
        name: str | None = None,
    ) -> None:
        self.model = model
        self.name = name or model
        self.base_url = base_url or os.environ.get("OPENAI_BASE_URL") or OPENAI_URL
        self.capabilities = capabilities
        self.prompting = prompting
        self._host = urlsplit(self.base_url).hostname or ""
        self._key = api_key or _key_for(self._host)
        if self._key and urlsplit(self.base_url).scheme != "https" and self._host not in LOOPBACK:
            raise UsageError(
                f"the key for {self._host} would go over plain http",
                hint="Use an https URL, or unset the key if that server needs none.",
            )
        if not self._key and self.base_url == OPENAI_URL:
            raise UsageError(
                f"the model {model!r} needs an API key",
                hint="Set OPENAI_API_KEY, or pass base_url=... of a server that needs none.",
            )
        self._refused: set[str] = set()
        self._client: openai.AsyncOpenAI | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def __repr__(self) -> str:
        return f"OpenAIModel({self.model!r}, host={self._host!r})"

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelEvent]:
        openai = await _sdk()
        reply = _Reply()
        stream = None
        try:
            stream = await self._send(request)
            async for chunk in stream:
                for event in reply.take(chunk):
                    yield event
                if reply.size_bytes > MODEL_REPLY_BYTES:
                    reply.finish = "length"
                    break
        except openai.OpenAIError as error:
            # A connection that drops after the finish reason took nothing but the usage with it.
            if reply.finish is None:
                # No `from`: the SDK's error holds the request with its key.
                raise self._explained(error) from None
        except (json.JSONDecodeError, UnicodeDecodeError):
            raise ModelProtocolError(f"{self._host} sent a piece of the reply that is no JSON") from None
        finally:
            if stream is not None:
                await stream.close()
        if reply.finish is None:
            raise self._cut(reply)
        if reply.usage is not None:
            yield reply.usage
        yield Finished(reply.finish)

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None and self._loop is asyncio.get_running_loop():
            await client.close()

    async def _send(self, request: ModelRequest) -> openai.AsyncStream[ChatCompletionChunk]:
        openai = await _sdk()
        client = self._connected(openai)
        while True:
            body = self._body(request)
            try:
                # The SDK's overloads cannot see into a dictionary.
                return await client.chat.completions.create(stream=True, **body)  # type: ignore[no-any-return]
            except (openai.BadRequestError, openai.UnprocessableEntityError) as error:
                named = next((name for name in OPTIONAL if name in body and name in str(error)), None)
                if named is None:
                    raise
                self._refused.add(named)

    def _connected(self, openai: Any) -> openai.AsyncOpenAI:
        """The client of the running loop. Connections belong to the loop that opened them."""
        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:
            timeout = openai.Timeout(MODEL_SILENCE_S, connect=MODEL_CONNECT_S)
            # A proxy of the environment does not serve this machine's own addresses.
            direct = self._host in ("127.0.0.1", "localhost", "::1")
            self._loop = loop
            self._client = openai.AsyncOpenAI(
                api_key=self._key or "none",
                base_url=self.base_url,
                max_retries=SDK_RETRIES,
                timeout=timeout,
                http_client=openai.DefaultAsyncHttpxClient(trust_env=False, timeout=timeout) if direct else None,
            )
        assert self._client is not None
        return self._client

    def _body(self, request: ModelRequest) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.model, "messages": [_message(message) for message in request.messages]}
        limit = "max_completion_tokens" if self.base_url == OPENAI_URL else "max_tokens"
        if limit in self._refused:
            limit = "max_tokens" if limit == "max_completion_tokens" else "max_completion_tokens"
        optional = {
            "stream_options": {"include_usage": True},
            limit: request.max_output_tokens,
            "temperature": request.temperature,
            "seed": request.seed,
            "stop": list(request.stop) or None,
        }
        body |= {name: value for name, value in optional.items() if value is not None and name not in self._refused}
        if request.tools:
            body["tools"] = [_tool(tool.name, tool.description, tool.parameters) for tool in request.tools]
        if request.grammar is not None and GRAMMAR in self.capabilities:
            body["extra_body"] = {"grammar": request.grammar}
        return body

    def _cut(self, reply: _Reply) -> ModelProtocolError:
        if reply.pieces:
            return ModelProtocolError(f"{self._host} ended the reply of {self.model!r} in the middle")
        return ModelProtocolError(
            f"{self._host} sent no reply of {self.model!r}",
            hint=f"Is {self._shown_url} the address of a Chat Completions server? It usually ends in /v1.",
        )

    @property
    def _shown_url(self) -> str:
        parts = urlsplit(self.base_url)
        port = f":{parts.port}" if parts.port else ""
        return f"{parts.scheme}://{self._host}{port}{parts.path}"

    def _explained(self, error: openai.OpenAIError) -> ModelError:
        import openai

        said = self._redacted(getattr(error, "message", "") or str(error))
        match error:
            case openai.APITimeoutError():
                return ModelUnavailable(f"{self._host} did not answer in time")
            case openai.APIConnectionError():
                cause = self._redacted(str(error.__cause__ or said))
                return ModelUnavailable(
                    f"no connection to {self._host}, or it broke: {cause}",
                    hint=f"Is {self._shown_url} up and reachable?",
                )
            case openai.APIStatusError():
                return self._refusal(error, said)
            case openai.APIResponseValidationError():
                return ModelProtocolError(f"{self._host} sent a reply of another form: {said}")
            case openai.APIError():
                return ModelUnavailable(f"{self._host} broke the reply off with an error: {said}")
        return ModelProtocolError(f"{self._host}: {said}")

    def _refusal(self, error: openai.APIStatusError, said: str) -> ModelError:
        status = error.status_code
        if status == 429 and error.code == "insufficient_quota":
            return ModelRefused(f"{self._host}: {said}", hint="The account behind the key has no credit left.")
        if status == 429:
            wait = error.response.headers.get("retry-after", "")
            hint = f"The server asks to wait {wait} s." if wait.isdigit() else "Wait a little, then try again."
            return ModelRateLimited(f"{self._host} limits the rate: {said}", hint=hint)
        if status in (408, 409) or status >= 500:
            return ModelUnavailable(f"{self._host} failed with status {status}: {said}")
        hints = {
            401: "The API key is missing or wrong: check OPENAI_API_KEY.",
            403: "The API key may not use this model.",
            404: f"Does {self._shown_url} know a model named {self.model!r}?",
        }
        return ModelRefused(f"{self._host} refused the request ({status}): {said}", hint=hints.get(status, ""))

    def _redacted(self, text: str) -> str:
        if self._key:
            text = text.replace(self._key, "***")
        text = re.sub(r"\b(sk-|Bearer )[\w*.-]+", r"\1***", text)
        return text if len(text) <= MODEL_ERROR_CHARS else text[:MODEL_ERROR_CHARS] + f"... ({len(text)} characters)"


class _Reply:
    """One reply as its pieces come in."""

    def __init__(self) -> None:
        self.finish: str | None = None
        self.usage: Usage | None = None
        self.size_bytes = 0
        self.pieces = 0
        self._calls: set[int] = set()
        self._refusal = False

    def take(self, chunk: ChatCompletionChunk) -> list[ModelEvent]:
        if chunk.usage is not None:
            self.usage = Usage(chunk.usage.prompt_tokens or 0, chunk.usage.completion_tokens or 0)
        events: list[ModelEvent] = []
        for choice in (chunk.choices or ())[:1]:
            self.pieces += 1
            if getattr(choice, "delta", None):  # some servers send null in the last piece
                events += self._delta(choice.delta)
            if choice.finish_reason:
                self.finish = "refusal" if self._refusal else FINISH.get(choice.finish_reason, "other")
        return events

    def _delta(self, delta: ChoiceDelta) -> list[ModelEvent]:
        events: list[ModelEvent] = []
        # Not part of OpenAI's wire: llama.cpp, vLLM and DeepSeek say the first, Ollama and OpenRouter the second.
        reasoning = getattr(delta, "reasoning_content", None) or getattr(delta, "reasoning", None)
        if isinstance(reasoning, str):
            events.append(ReasoningDelta(reasoning))
        self._refusal = self._refusal or bool(delta.refusal)
        text = (delta.content or "") + (delta.refusal or "")
        if text:
            events.append(TextDelta(text))
        for position, call in enumerate(delta.tool_calls or ()):
            index = position if getattr(call, "index", None) is None else call.index
            function = call.function
            arguments = (function.arguments if function else "") or ""
            if index in self._calls:
                piece = ToolCallDelta(index, arguments=arguments)
            else:
                self._calls.add(index)
                piece = ToolCallDelta(
                    index, call.id or f"call_{index}", (function.name if function else "") or "", arguments
                )
            events.append(piece)
        self.size_bytes += sum(len(getattr(event, "text", "") or getattr(event, "arguments", "")) for event in events)
        return events


def _message(message: Message) -> dict[str, Any]:
    body: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.calls:
        body["content"] = message.text or None
        body["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.calls
        ]
    if message.role == "tool":
        body["tool_call_id"] = message.call_id
    return body


def _tool(name: str, description: str, parameters: str) -> dict[str, Any]:
    function = {"name": name, "description": description, "parameters": json.loads(parameters)}
    return {"type": "function", "function": function}


async def _sdk() -> Any:
    """The SDK, imported in a thread the first time: half a second in which the loop goes on."""
    try:
        if "openai" in sys.modules:
            return importlib.import_module("openai")
        return await asyncio.to_thread(importlib.import_module, "openai")
    except ImportError as error:
        raise ModelError("the openai package is missing", hint="Install it:  pip install 'openai>=3.51,<4'") from error
