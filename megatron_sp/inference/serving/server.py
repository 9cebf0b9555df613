"""The HTTP server: OpenAI's completions API as JSON or server-sent events, over the engine; socket and graceful shutdown.

A request is checked in a worker thread and queued; its output arrives through an asyncio queue of its own. A client
that disconnects cancels its request. Bodies must be ``application/json``: a browser page cannot send that to another
site without a CORS preflight, which this server rejects.

On SIGTERM and SIGINT no new requests are accepted, present ones have a grace period to finish, the rest then gets 503,
and the process exits with 0. A second SIGINT ends the grace period at once.
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
from megatron_sp.inference.serving.engine import Engine, Event, Job, Piece
from megatron_sp.inference.serving.request import ApiError, Completion, Limits, parse_body, require_model
from megatron_sp.ops import availability
from megatron_sp.utils.errors import ConfigError

_LOOK_S = 0.25  # interval at which a waiting request checks that its client is still connected
_BODY_TIMEOUT_S = 30.0
_LAST_WORDS_S = 5.0  # to write the 503s
_LOOPBACK_NAMES = ("127.0.0.1", "localhost", "::1")
_PATHS = "GET /health, GET /v1/models, GET /v1/models/NAME, POST /v1/completions"


@dataclass(frozen=True)
class Front:
    """Configuration of the HTTP interface."""

    engine: Engine
    tokenizer: Tokenizer
    model_name: str  # for clients
    limits: Limits
    max_body_bytes: int
    api_key: str | None  # bearer token that clients must send; None: no authentication
    loopback_only: (
        bool  # reject other names than the loopback's in the Host header: against DNS rebinding by a web page
    )


def build_app(front: Front) -> Any:
    starlette, route = availability.load("starlette"), availability.load("starlette", "starlette.routing").Route
    handlers = _Handlers(front)
    routes = [
        route("/health", handlers.health, methods=["GET"]),
        route("/v1/models", handlers.models, methods=["GET"]),
        route("/v1/models/{name:path}", handlers.model, methods=["GET"]),
        route("/v1/completions", handlers.completions, methods=["POST"]),
    ]
    failures = {404: handlers.no_such, 405: handlers.no_such, ApiError: handlers.refused}
    return starlette.Starlette(routes=routes, exception_handlers=failures)


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
        return self._json({"object": "list", "data": [self._model]})

    async def model(self, request: Any) -> Any:
        self._admit(request)
        require_model(request.path_params["name"], self.front.model_name)
        return self._json(self._model)

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
            return self._responses.StreamingResponse(
                stream, media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
            )
        try:
            await self._collect(events, request, answer)
        finally:
            front.engine.cancel(job)
        return self._json(answer.whole())

    async def _stream(self, job: Job, events: asyncio.Queue[Event], answer: _Answer) -> AsyncIterator[str]:
        # yield server-sent events; an error is sent as one of them
        try:
            while not answer.complete:
                chunk = answer.add(await events.get())
                if chunk is not None:
                    yield f"data: {json.dumps(chunk)}\n\n"
            if answer.spec.include_usage:
                yield f"data: {json.dumps(answer.object([], usage=True))}\n\n"
            yield "data: [DONE]\n\n"
        except ApiError as error:
            yield f"data: {json.dumps(error.body())}\n\n"
        finally:
            self.front.engine.cancel(job)  # the client may have gone

    async def _collect(self, events: asyncio.Queue[Event], request: Any, answer: _Answer) -> None:
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
        body = bytearray()

        async def read() -> None:
            async for part in request.stream():
                body.extend(part)
                if len(body) > self.front.max_body_bytes:
                    raise self._too_large()

        try:
            await asyncio.wait_for(read(), _BODY_TIMEOUT_S)
        except asyncio.TimeoutError:
            raise ApiError(408, f"the body did not arrive within {_BODY_TIMEOUT_S:g} s") from None
        except self._client_disconnect:
            raise ApiError(499, "the client has closed the connection") from None
        return bytes(body)

    def _admit(self, request: Any) -> None:
        if self.front.loopback_only and request.url.hostname not in _LOOPBACK_NAMES:
            raise ApiError(
                403, "this server answers to 127.0.0.1, localhost and ::1 only: start it with --host for others"
            )
        if self.front.api_key is not None:
            sent = request.headers.get("authorization", "")
            if not hmac.compare_digest(sent.encode(), f"Bearer {self.front.api_key}".encode()):
                text = "the API key is missing or wrong: send it as 'Authorization: Bearer KEY'"
                raise ApiError(401, text, code="invalid_api_key")

    async def refused(self, request: Any, error: Exception) -> Any:
        assert isinstance(error, ApiError)
        again = {"Retry-After": "1"}
        headers = {413: {"Connection": "close"}, 401: {"WWW-Authenticate": "Bearer"}, 429: again, 503: again}.get(
            error.status
        )
        return self._json(error.body(), status_code=error.status, headers=headers)

    async def no_such(self, request: Any, error: Any) -> Any:
        body = ApiError(error.status_code, f"there is no {request.method} {request.url.path}: {_PATHS}").body()
        return self._json(body, status_code=error.status_code, headers=error.headers)


class _Answer:
    """Collector of the pieces of a request's choices."""

    def __init__(self, spec: Completion, model_name: str) -> None:
        self.spec, self._num_new = spec, 0
        self._choices = [Piece(index, "") for index in range(len(spec.prompts) * spec.n)]
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": int(time.time()), "model": model_name,
        }  # fmt: skip

    @property
    def complete(self) -> bool:
        return all(choice.finish for choice in self._choices)

    def add(self, event: Event) -> dict[str, Any] | None:
        """Add a piece and return the chunk to send in a stream, or None if there is nothing to send; an ApiError is raised."""
        if isinstance(event, ApiError):
            raise event
        self._num_new += event.num_new
        choice = self._choices[event.index]
        choice.finish = event.finish or choice.finish
        if self.spec.stream:
            return self.object([event]) if event.text or event.tokens or event.finish else None
        choice.text += event.text
        choice.tokens += event.tokens
        return None

    def whole(self) -> dict[str, Any]:
        return self.object(self._choices, usage=True)

    def object(self, pieces: list[Piece], usage: bool = False) -> dict[str, Any]:
        # the JSON of pieces; without any, and with ``usage``, it is the last chunk of a stream with ``include_usage``
        choices = []
        for piece in pieces:
            lists = [(t.text, t.logprob, t.top, t.offset) for t in piece.tokens]
            names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
            logprobs = {name: [values[i] for values in lists] for i, name in enumerate(names)}
            choices.append({
                "text": piece.text, "index": piece.index, "logprobs": None if self.spec.logprobs is None else logprobs,
                "finish_reason": piece.finish,
            })  # fmt: skip
        read = sum(len(prompt.ids) for prompt in self.spec.prompts)
        counts = {"prompt_tokens": read, "completion_tokens": self._num_new, "total_tokens": read + self._num_new}
        return self._head | {"choices": choices} | ({"usage": counts} if usage else {})


def require_packages() -> None:
    """Raise ConfigError, with installation instructions, if starlette or uvicorn is not available."""
    lacking = [kernel.reason for name in ("starlette", "uvicorn") if not (kernel := availability.find(name)).available]
    if lacking:
        raise ConfigError(
            f"serving needs two small packages: {'; '.join(lacking)}. Install them with: pip install starlette uvicorn"
        )


def is_loopback(host: str) -> bool:
    """Return whether a host address is reachable only from this machine."""
    with contextlib.suppress(ValueError):
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    return False


def warning_about(host: str, *, has_key: bool) -> str | None:
    """Return a warning for an address that is reachable from other machines; None for a loopback address."""
    if is_loopback(host):
        return None
    who = "whoever has the API key" if has_key else "anybody, without a password,"
    return f"warning: --host {host} lets {who} on the network use this model, and nothing is encrypted (docs/how-to/serve.md)"


def open_socket(host: str, port: int) -> socket.socket:
    """Return a socket that is bound but not yet listening. Raises ConfigError: no such address, or the port is in use."""
    bound: socket.socket | None = None
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        if bound is not None:
            bound.close()
        reason = error.strerror or error
        raise ConfigError(
            f"--host {host} --port {port} cannot be used: {reason}; choose another port, or 0 for any"
        ) from None
    return bound


def serve(front: Front, door: socket.socket, grace_s: float, ready: Callable[[], None]) -> None:
    """Serve requests until a signal arrives; return when all are finished.

    Args:
        front: its engine must have been started; it is stopped at the end.
        door: a socket from ``open_socket``.
        grace_s: grace period for requests to finish.
        ready: called when the server accepts requests.
    """
    uvicorn: Any = availability.load("uvicorn")

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
        build_app(front), log_level="warning", access_log=False, server_header=False, timeout_keep_alive=30, lifespan="off",
        timeout_graceful_shutdown=int(grace_s + _LAST_WORDS_S) + 1, ws="none",
    )  # fmt: skip
    try:
        Server(config).run(sockets=[door])
    finally:
        front.engine.stop()
