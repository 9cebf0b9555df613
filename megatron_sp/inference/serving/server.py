"""The HTTP server: OpenAI's completions API as JSON or server-sent events, over the engine.

A request is checked in a worker thread and queued; its output arrives through an asyncio queue of its own. A client
that disconnects cancels its request. On SIGTERM and SIGINT present requests have a grace period, the rest gets 503; a
second SIGINT ends that period.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import json
import signal
import socket
import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from megatron_sp.data.tokenizers import Tokenizer
from megatron_sp.inference.serving.engine import Engine, Event, Piece
from megatron_sp.inference.serving.request import ApiError, Completion, Limits, parse_body, require_model
from megatron_sp.ops import availability
from megatron_sp.utils.errors import ConfigError

_LOOK_S = 0.25  # interval at which a waiting request checks that its client is still connected
_BODY_TIMEOUT_S = 30.0
_LAST_WORDS_S = 5.0  # to write the 503s
_LOOPBACK_NAMES = ("127.0.0.1", "localhost", "::1")
_PATHS = "GET /health, GET /v1/models, GET /v1/models/NAME, POST /v1/completions"
_AGAIN = {"Retry-After": "1"}
_HEADERS = {413: {"Connection": "close"}, 401: {"WWW-Authenticate": "Bearer"}, 429: _AGAIN, 503: _AGAIN}


@dataclass(frozen=True)
class Front:
    """Configuration of the HTTP interface."""

    engine: Engine
    tokenizer: Tokenizer
    model_name: str  # for clients
    limits: Limits
    max_body_bytes: int
    api_key: str | None  # bearer token that clients must send; None: no authentication
    # reject other names than the loopback's in the Host header: against DNS rebinding by a web page
    loopback_only: bool


class _Handlers:
    def __init__(self, front: Front) -> None:
        self.front = front
        self._responses = availability.load("starlette", "starlette.responses")
        self._json = self._responses.JSONResponse
        self._client_disconnect = availability.load("starlette", "starlette.requests").ClientDisconnect
        self._model = {"id": front.model_name, "object": "model", "created": int(time.time()), "owned_by": "local"}

    async def health(self, request: Any) -> Any:
        engine = self.front.engine
        status = {"status": engine.broken or "ok", "model": self.front.model_name, **engine.counts}
        return self._json(status, status_code=503 if engine.broken else 200)

    async def models(self, request: Any) -> Any:
        self._admit(request)
        if (name := request.path_params.get("name")) is None:
            return self._json({"object": "list", "data": [self._model]})
        require_model(name, self.front.model_name)
        return self._json(self._model)

    async def completions(self, request: Any) -> Any:
        self._admit(request)
        data, front = await self._body(request), self.front
        spec = await asyncio.to_thread(parse_body, data, front.tokenizer, front.model_name, front.limits)
        events: asyncio.Queue[Event] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def emit(event: Event) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is waiting any more
                loop.call_soon_threadsafe(events.put_nowait, event)

        job = front.engine.submit(spec, emit)
        answer = _Answer(spec, front.model_name)

        async def stream() -> AsyncIterator[str]:
            try:
                while not answer.is_complete():
                    piece = answer.add(await events.get())
                    if piece.text or piece.tokens or piece.finish:
                        yield f"data: {json.dumps(answer.object([piece]))}\n\n"
                if spec.include_usage:
                    yield f"data: {json.dumps(answer.object([], usage=True))}\n\n"
                yield "data: [DONE]\n\n"
            except ApiError as error:  # too late for a status: an event, too
                yield f"data: {json.dumps(error.body())}\n\n"
            finally:
                front.engine.cancel(job)  # the client may have gone

        if spec.stream:
            kind, headers = "text/event-stream", {"Cache-Control": "no-cache"}
            return self._responses.StreamingResponse(stream(), media_type=kind, headers=headers)
        looked = time.monotonic()
        try:
            while not answer.is_complete():
                with contextlib.suppress(asyncio.TimeoutError):  # TimeoutError itself only from Python 3.11 on
                    answer.add(await asyncio.wait_for(events.get(), _LOOK_S))
                if time.monotonic() - looked > _LOOK_S:
                    looked = time.monotonic()
                    if await request.is_disconnected():
                        raise ApiError(499, "the client has closed the connection")
        finally:
            front.engine.cancel(job)
        return self._json(answer.object(answer.choices, usage=True))

    def _admit(self, request: Any) -> None:
        if self.front.loopback_only and request.url.hostname not in _LOOPBACK_NAMES:
            names = "127.0.0.1, localhost and ::1 only"
            raise ApiError(403, f"this server answers to {names}: start it with --host for others")
        if self.front.api_key is not None:
            sent = request.headers.get("authorization", "")
            if not hmac.compare_digest(sent.encode(), f"Bearer {self.front.api_key}".encode()):
                text = "the API key is missing or wrong: send it as 'Authorization: Bearer KEY'"
                raise ApiError(401, text, code="invalid_api_key")

    async def _body(self, request: Any) -> bytes:
        body, most = bytearray(), self.front.max_body_bytes
        too_large = ApiError(413, f"the body is larger than the {most} bytes this server accepts")
        if int(request.headers.get("content-length", 0)) > most:
            raise too_large  # already at the headers: a body that will be rejected need not be sent
        # a browser page cannot send this type to another site without a CORS preflight, which this server rejects
        if request.headers.get("content-type", "").split(";")[0].strip().lower() != "application/json":
            raise ApiError(415, "the body must be sent as Content-Type: application/json")

        async def read() -> None:
            async for part in request.stream():
                body.extend(part)
                if len(body) > most:
                    raise too_large

        try:
            await asyncio.wait_for(read(), _BODY_TIMEOUT_S)
        except asyncio.TimeoutError:
            raise ApiError(408, f"the body did not arrive within {_BODY_TIMEOUT_S:g} s") from None
        except self._client_disconnect:
            raise ApiError(499, "the client has closed the connection") from None
        return bytes(body)

    async def refused(self, request: Any, error: Exception) -> Any:
        assert isinstance(error, ApiError)
        return self._json(error.body(), status_code=error.status, headers=_HEADERS.get(error.status))

    async def no_such(self, request: Any, error: Any) -> Any:
        body = ApiError(error.status_code, f"there is no {request.method} {request.url.path}: {_PATHS}").body()
        return self._json(body, status_code=error.status_code, headers=error.headers)


class _Answer:
    # collects the pieces of a request's choices
    def __init__(self, spec: Completion, model_name: str) -> None:
        self.spec, self._num_new = spec, 0
        self.choices = [Piece(index, "") for index in range(len(spec.prompts) * spec.n)]
        identifier, created = f"cmpl-{uuid.uuid4().hex}", int(time.time())
        self._head = {"id": identifier, "object": "text_completion", "created": created, "model": model_name}

    def is_complete(self) -> bool:
        return all(choice.finish for choice in self.choices)

    def add(self, event: Event) -> Piece:
        if isinstance(event, ApiError):
            raise event
        self._num_new += event.num_new
        choice = self.choices[event.index]
        choice.finish = event.finish or choice.finish
        if not self.spec.stream:
            choice.text += event.text
            choice.tokens += event.tokens
        return event

    def object(self, pieces: list[Piece], usage: bool = False) -> dict[str, Any]:
        # the JSON of pieces; without any, and with ``usage``, it is the last chunk of a stream with ``include_usage``
        choices = []
        for piece in pieces:
            rows = [(t.text, t.logprob, t.top, t.offset) for t in piece.tokens]
            names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
            columns = {name: [row[i] for row in rows] for i, name in enumerate(names)}
            logprobs = None if self.spec.logprobs is None else columns
            choice = {"text": piece.text, "index": piece.index, "logprobs": logprobs, "finish_reason": piece.finish}
            choices.append(choice)
        read = sum(len(prompt.ids) for prompt in self.spec.prompts)
        counts = {"prompt_tokens": read, "completion_tokens": self._num_new, "total_tokens": read + self._num_new}
        return self._head | {"choices": choices} | ({"usage": counts} if usage else {})


def require_packages() -> None:
    """Raise ConfigError, with installation instructions, if starlette or uvicorn is not available."""
    lacking = [kernel.reason for name in ("starlette", "uvicorn") if not (kernel := availability.find(name)).available]
    if lacking:
        install = "Install them with: pip install starlette uvicorn"
        raise ConfigError(f"serving needs two small packages: {'; '.join(lacking)}. {install}")


def is_loopback(host: str) -> bool:
    """Return whether a host address is reachable only from this machine."""
    with contextlib.suppress(ValueError):
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    return False


def warning_about(host: str, *, has_key: bool) -> str | None:
    """Return a warning for an address that is reachable from other machines."""
    if is_loopback(host):
        return None
    who = "whoever has the API key" if has_key else "anybody, without a password,"
    risk = "on the network use this model, and nothing is encrypted (docs/how-to/serve.md)"
    return f"warning: --host {host} lets {who} {risk}"


def open_socket(host: str, port: int) -> socket.socket:
    """Return a socket that is bound but not yet listening. Raises ConfigError."""
    bound: socket.socket | None = None
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        if bound is not None:
            bound.close()
        reason = f"{error.strerror or error}; choose another port, or 0 for any"
        raise ConfigError(f"--host {host} --port {port} cannot be used: {reason}") from None
    return bound


def serve(front: Front, door: socket.socket, grace_s: float, ready: Callable[[], None]) -> None:
    """Serve requests on a socket until a signal arrives; return when all are finished, and stop the engine.

    ``ready`` is called when the server accepts requests.
    """
    uvicorn: Any = availability.load("uvicorn")
    starlette, route = availability.load("starlette"), availability.load("starlette", "starlette.routing").Route
    handlers = _Handlers(front)
    routes = [
        route("/health", handlers.health, methods=["GET"]),
        route("/v1/models", handlers.models, methods=["GET"]),
        route("/v1/models/{name:path}", handlers.models, methods=["GET"]),
        route("/v1/completions", handlers.completions, methods=["POST"]),
    ]
    failures = {404: handlers.no_such, 405: handlers.no_such, ApiError: handlers.refused}

    class Server(uvicorn.Server):  # type: ignore[misc, name-defined]
        def handle_exit(self, sig: int, frame: Any) -> None:
            going: bool = self.should_exit  # type: ignore[has-type]
            if going and sig == signal.SIGINT:
                self.force_exit = True
            front.engine.drain(0.0 if self.force_exit else grace_s)
            self.should_exit = True

        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets=sockets)
            ready()

        async def on_tick(self, counter: int) -> bool:
            return bool(await super().on_tick(counter)) or bool(front.engine.broken)

    config = uvicorn.Config(
        starlette.Starlette(routes=routes, exception_handlers=failures), log_level="warning", access_log=False,
        server_header=False, timeout_keep_alive=30, lifespan="off", ws="none",
        timeout_graceful_shutdown=int(grace_s + _LAST_WORDS_S) + 1,
    )  # fmt: skip
    try:
        Server(config).run(sockets=[door])
    finally:
        front.engine.stop()
