"""HTTP interface of the engine: OpenAI's completions API, as JSON or server-sent events.

A request is checked in a worker thread and queued; its output arrives through an asyncio queue of its own. A client
that disconnects cancels its request. Bodies must be ``application/json``: a browser page cannot send that to another
site without a CORS preflight, which this server rejects.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from megatron_sp.data.tokenizers import Tokenizer
from megatron_sp.inference.serving.engine import Engine, Event, Job
from megatron_sp.inference.serving.request import ApiError, Completion, Limits, parse_body, require_model
from megatron_sp.inference.serving.sequence import Piece, TokenInfo, logprobs_of
from megatron_sp.ops import availability

_LOOK_S = 0.25  # interval at which a waiting request checks that its client is still connected
_BODY_TIMEOUT_S = 30.0
_LOOPBACK_NAMES = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class Front:
    """Configuration of the HTTP interface.

    Attributes:
        model_name: the model's name for clients.
        limits: limits of requests.
        max_body_bytes: size limit of a request's body.
        api_key: bearer token that clients must send; None: no authentication.
        loopback_only: reject other names than the loopback's in the Host header (against DNS rebinding by a web page).
    """

    engine: Engine
    tokenizer: Tokenizer
    model_name: str
    limits: Limits
    max_body_bytes: int
    api_key: str | None
    loopback_only: bool


def build_app(front: Front) -> Any:
    """Build the ASGI application. Raises RuntimeError if starlette is not available."""
    starlette = availability.load("starlette")
    routing, responses = availability.load("starlette", "starlette.routing"), availability.load("starlette", "starlette.responses")
    handlers = _Handlers(front, responses)
    routes = [
        routing.Route("/health", handlers.health, methods=["GET"]),
        routing.Route("/v1/models", handlers.models, methods=["GET"]),
        routing.Route("/v1/models/{name:path}", handlers.model, methods=["GET"]),
        routing.Route("/v1/completions", handlers.completions, methods=["POST"]),
    ]
    return starlette.Starlette(routes=routes, exception_handlers={404: handlers.no_such, 405: handlers.no_such, ApiError: handlers.refused})


class _Handlers:
    def __init__(self, front: Front, responses: Any) -> None:
        self.front, self.responses, self.began = front, responses, int(time.time())
        self._client_disconnect = availability.load("starlette", "starlette.requests").ClientDisconnect

    async def health(self, request: Any) -> Any:
        engine = self.front.engine
        status = {"status": engine.broken or "ok", "model": self.front.model_name, **engine.counts}
        return self.responses.JSONResponse(status, status_code=503 if engine.broken else 200)

    async def models(self, request: Any) -> Any:
        self._admit(request)
        return self.responses.JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Any) -> Any:
        self._admit(request)
        require_model(request.path_params["name"], self.front.model_name)
        return self.responses.JSONResponse(self._model())

    async def completions(self, request: Any) -> Any:
        self._admit(request)
        if int(request.headers.get("content-length", 0)) > self.front.max_body_bytes:
            raise self._too_large()  # already at the headers: a body that will be rejected need not be sent
        if request.headers.get("content-type", "").split(";")[0].strip().lower() != "application/json":
            raise ApiError(415, "the body must be sent as Content-Type: application/json")
        data, front = await self._body(request), self.front
        spec = await asyncio.to_thread(parse_body, data, front.tokenizer, front.model_name, front.limits)
        events: asyncio.Queue[Event] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def emit(event: Event) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is waiting any more
                loop.call_soon_threadsafe(events.put_nowait, event)

        job = front.engine.submit(spec, emit)
        answer = _Answer(spec, front.model_name)
        if spec.stream:
            stream = self._stream(job, events, answer)
            return self.responses.StreamingResponse(stream, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        try:
            await self._collect(events, request, answer)
        finally:
            front.engine.cancel(job)
        return self.responses.JSONResponse(answer.whole())

    async def _stream(self, job: Job, events: asyncio.Queue[Event], answer: _Answer) -> AsyncIterator[str]:
        """Yield server-sent events; an error is sent as one of them."""
        try:
            while not answer.complete:
                chunk = answer.add(await events.get())
                if chunk is not None:
                    yield f"data: {json.dumps(chunk)}\n\n"
            if answer.spec.include_usage:
                yield f"data: {json.dumps(answer.usage_chunk())}\n\n"
            yield "data: [DONE]\n\n"
        except ApiError as error:
            yield f"data: {json.dumps(error.body())}\n\n"
        finally:
            self.front.engine.cancel(job)  # the client may have gone

    async def _collect(self, events: asyncio.Queue[Event], request: Any, answer: _Answer) -> None:
        """Wait for all pieces, checking regularly whether the client is still connected."""
        looked = time.monotonic()
        while not answer.complete:
            with contextlib.suppress(asyncio.TimeoutError):  # TimeoutError itself only from Python 3.11 on
                answer.add(await asyncio.wait_for(events.get(), _LOOK_S))
            if time.monotonic() - looked > _LOOK_S:
                looked = time.monotonic()
                if await request.is_disconnected():
                    raise ApiError(499, "the client has closed the connection")

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than the {self.front.max_body_bytes} bytes this server accepts")

    async def _body(self, request: Any) -> bytes:
        parts, size = [], 0

        async def read() -> None:
            nonlocal size
            async for part in request.stream():
                size += len(part)
                if size > self.front.max_body_bytes:
                    raise self._too_large()
                parts.append(part)

        try:
            await asyncio.wait_for(read(), _BODY_TIMEOUT_S)
        except asyncio.TimeoutError:
            raise ApiError(408, f"the body did not arrive within {_BODY_TIMEOUT_S:g} s") from None
        except self._client_disconnect:
            raise ApiError(499, "the client has closed the connection") from None
        return b"".join(parts)

    def _model(self) -> dict[str, Any]:
        return {"id": self.front.model_name, "object": "model", "created": self.began, "owned_by": "local"}

    def _admit(self, request: Any) -> None:
        """Raise ApiError if the request's host or API key is not accepted."""
        if self.front.loopback_only and request.url.hostname not in _LOOPBACK_NAMES:
            raise ApiError(403, "this server answers to 127.0.0.1, localhost and ::1 only: start it with --host for others")
        if self.front.api_key is not None:
            sent = request.headers.get("authorization", "")
            if not hmac.compare_digest(sent.encode(), f"Bearer {self.front.api_key}".encode()):
                raise ApiError(401, "the API key is missing or wrong: send it as 'Authorization: Bearer KEY'", code="invalid_api_key")

    async def refused(self, request: Any, error: Exception) -> Any:
        assert isinstance(error, ApiError)
        headers = {413: {"Connection": "close"}, 401: {"WWW-Authenticate": "Bearer"}}.get(error.status)
        headers = {"Retry-After": "1"} if error.status in (429, 503) else headers
        return self.responses.JSONResponse(error.body(), status_code=error.status, headers=headers)

    async def no_such(self, request: Any, error: Any) -> Any:
        paths = "GET /health, GET /v1/models, GET /v1/models/NAME, POST /v1/completions"
        text = f"there is no {request.method} {request.url.path}: {paths}"
        return self.responses.JSONResponse(ApiError(error.status_code, text).body(), status_code=error.status_code, headers=error.headers)


class _Answer:
    """Collector of the pieces of a request's choices."""

    def __init__(self, spec: Completion, model_name: str) -> None:
        self.spec = spec
        number = len(spec.prompts) * spec.n
        self._texts, self._finish = [""] * number, [""] * number
        self._tokens: list[list[TokenInfo]] = [[] for _ in range(number)]
        self._num_new = 0
        self._head = {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": int(time.time()), "model": model_name}

    @property
    def complete(self) -> bool:
        return all(self._finish)

    def add(self, event: Event) -> dict[str, Any] | None:
        """Add a piece; for a stream return the chunk to send, or None if there is nothing to send.

        Raises:
            ApiError: the event is one.
        """
        if isinstance(event, ApiError):
            raise event
        self._num_new += event.num_new
        if event.finish is not None:
            self._finish[event.index] = event.finish
        if self.spec.stream:
            return self._head | {"choices": [self._choice(event)]} if event.text or event.tokens or event.finish else None
        self._texts[event.index] += event.text
        self._tokens[event.index] += event.tokens
        return None

    def whole(self) -> dict[str, Any]:
        pieces = [Piece(i, t, k, f) for i, (t, k, f) in enumerate(zip(self._texts, self._tokens, self._finish, strict=True))]
        return self._head | {"choices": [self._choice(piece) for piece in pieces], "usage": self._usage()}

    def usage_chunk(self) -> dict[str, Any]:
        """Return the last chunk of a stream with ``include_usage``."""
        return self._head | {"choices": [], "usage": self._usage()}

    def _choice(self, piece: Piece) -> dict[str, Any]:
        logprobs = None if self.spec.logprobs is None else logprobs_of(piece.tokens)
        return {"text": piece.text, "index": piece.index, "logprobs": logprobs, "finish_reason": piece.finish}

    def _usage(self) -> dict[str, int]:
        read = sum(len(prompt.ids) for prompt in self.spec.prompts)
        return {"prompt_tokens": read, "completion_tokens": self._num_new, "total_tokens": read + self._num_new}
