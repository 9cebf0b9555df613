"""The HTTP server: OpenAI's completions API as JSON or server-sent events, and the engine, on one event loop.

A client that disconnects cancels its request. On SIGTERM and SIGINT present requests have a grace period, the rest gets
503; a second SIGINT ends that period.
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
from megatron_sp.inference.serving.engine import Engine, Piece
from megatron_sp.inference.serving.request import ApiError, Limits, parse_body, require_model
from megatron_sp.ops import availability
from megatron_sp.utils.errors import ConfigError

_BODY_TIMEOUT_S = 30.0
_LAST_WORDS_S = 5.0  # to write the 503s
_LOOPBACK_NAMES = ("127.0.0.1", "localhost", "::1")
_PATHS = "GET /health, GET /v1/models, GET /v1/models/NAME, POST /v1/completions"
_AGAIN = {"Retry-After": "1"}
_HEADERS = {413: {"Connection": "close"}, 401: {"WWW-Authenticate": "Bearer"}, 429: _AGAIN, 503: _AGAIN}
_IS_GONE = "the client has closed the connection"


@dataclass
class Api:
    """The HTTP interface of an engine. Errors are objects of OpenAI's API."""

    engine: Engine
    tokenizer: Tokenizer
    model_name: str  # for clients
    limits: Limits
    max_body_bytes: int
    api_key: str | None  # bearer token that clients must send; None: no authentication
    # reject other names than the loopback's in the Host header: against DNS rebinding by a web page
    loopback_only: bool

    def __post_init__(self) -> None:
        self._responses = availability.load("starlette", "starlette.responses")
        self._json = self._responses.JSONResponse
        self._client_disconnect = availability.load("starlette", "starlette.requests").ClientDisconnect
        self._model = {"id": self.model_name, "object": "model", "created": int(time.time()), "owned_by": "local"}

    async def health(self, request: Any) -> Any:
        broken = self.engine.broken
        status = {"status": broken or "ok", "model": self.model_name, **self.engine.counts}
        return self._json(status, status_code=503 if broken else 200)

    async def models(self, request: Any) -> Any:
        self._admit(request)
        if (name := request.path_params.get("name")) is None:
            return self._json({"object": "list", "data": [self._model]})
        require_model(name, self.model_name)
        return self._json(self._model)

    async def completions(self, request: Any) -> Any:
        self._admit(request)
        body = await self._body(request)
        # in a thread, as encoding a long prompt takes a while
        spec = await asyncio.to_thread(parse_body, body, self.tokenizer, self.model_name, self.limits)
        job = self.engine.submit(spec)
        head = {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": int(time.time())}
        num_choices, num_read = len(spec.prompts) * spec.n, sum(len(prompt.ids) for prompt in spec.prompts)

        def answer(choices: list[Piece], *, usage: bool = False) -> dict[str, Any]:
            total = num_read + job.num_new
            counts = {"prompt_tokens": num_read, "completion_tokens": job.num_new, "total_tokens": total}
            return {**head, "model": self.model_name, "choices": choices} | ({"usage": counts} if usage else {})

        async def stream() -> AsyncIterator[str]:
            num_finished = 0
            try:
                while num_finished < num_choices:
                    piece = await job.next()
                    num_finished += piece["finish_reason"] is not None
                    if piece["text"] or piece["finish_reason"] or (piece["logprobs"] or {}).get("tokens"):
                        yield f"data: {json.dumps(answer([piece]))}\n\n"
                if spec.include_usage:
                    yield f"data: {json.dumps(answer([], usage=True))}\n\n"
                yield "data: [DONE]\n\n"
            except ApiError as error:  # too late for a status: an event, too
                yield f"data: {json.dumps(error.body())}\n\n"
            finally:
                job.cancelled = True  # the client may have gone

        async def watch() -> None:
            await request.receive()  # all of the body has been received: what comes now is the end of the connection
            job.events.put_nowait(ApiError(499, _IS_GONE))

        if spec.stream:
            kind, headers = "text/event-stream", {"Cache-Control": "no-cache"}
            return self._responses.StreamingResponse(stream(), media_type=kind, headers=headers)
        choices: dict[int, Piece] = {}
        watcher = asyncio.ensure_future(watch())
        try:
            while len(choices) < num_choices or not all(choice["finish_reason"] for choice in choices.values()):
                piece = await job.next()
                choice = choices.setdefault(piece["index"], piece)
                if choice is not piece:
                    choice["text"] += piece["text"]
                    choice["finish_reason"] = piece["finish_reason"]
                    for name, column in (piece["logprobs"] or {}).items():
                        choice["logprobs"][name] += column
        finally:
            watcher.cancel()
            job.cancelled = True
        return self._json(answer([choices[i] for i in range(num_choices)], usage=True))

    def _admit(self, request: Any) -> None:
        if self.loopback_only and request.url.hostname not in _LOOPBACK_NAMES:
            names = "127.0.0.1, localhost and ::1 only"
            raise ApiError(403, f"this server answers to {names}: start it with --host for others")
        sent = request.headers.get("authorization", "")
        if self.api_key is not None and not hmac.compare_digest(sent.encode(), f"Bearer {self.api_key}".encode()):
            text = "the API key is missing or wrong: send it as 'Authorization: Bearer KEY'"
            raise ApiError(401, text, code="invalid_api_key")

    async def _body(self, request: Any) -> bytes:
        body, most = bytearray(), self.max_body_bytes
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
            raise ApiError(499, _IS_GONE) from None
        return bytes(body)

    async def refused(self, request: Any, error: Any) -> Any:
        return self._json(error.body(), status_code=error.status, headers=_HEADERS.get(error.status))

    async def no_such(self, request: Any, error: Any) -> Any:
        body = ApiError(error.status_code, f"there is no {request.method} {request.url.path}: {_PATHS}").body()
        return self._json(body, status_code=error.status_code, headers=error.headers)


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


def serve(api: Api, door: socket.socket, grace_s: float, ready: Callable[[], None]) -> None:
    """Serve requests on a socket until a signal arrives or the engine breaks; return when all are finished.

    ``ready`` is called when the server accepts requests.
    """
    uvicorn: Any = availability.load("uvicorn")
    starlette, route = availability.load("starlette"), availability.load("starlette", "starlette.routing").Route
    paths = {"/health": api.health, "/v1/models": api.models, "/v1/models/{name:path}": api.models}
    routes = [route(path, handler, methods=["GET"]) for path, handler in paths.items()]
    routes.append(route("/v1/completions", api.completions, methods=["POST"]))
    failures = {404: api.no_such, 405: api.no_such, ApiError: api.refused}

    class Server(uvicorn.Server):  # type: ignore[misc, name-defined]
        def handle_exit(self, sig: int, frame: Any) -> None:
            going: bool = self.should_exit  # type: ignore[has-type]
            if going and sig == signal.SIGINT:
                self.force_exit = True
            api.engine.drain(0.0 if self.force_exit else grace_s)
            self.should_exit = True

        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets=sockets)
            ready()

    async def main() -> None:
        server = Server(config)
        work = asyncio.ensure_future(api.engine.run())
        work.add_done_callback(lambda _: setattr(server, "should_exit", True))  # without it there is nothing to serve
        try:
            await server.serve(sockets=[door])
        finally:
            api.engine.stop()
            await work

    config = uvicorn.Config(
        starlette.Starlette(routes=routes, exception_handlers=failures), log_level="warning", access_log=False,
        server_header=False, timeout_keep_alive=30, lifespan="off", ws="none",
        timeout_graceful_shutdown=int(grace_s + _LAST_WORDS_S) + 1,
    )  # fmt: skip
    asyncio.run(main())
