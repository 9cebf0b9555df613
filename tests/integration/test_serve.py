"""tools/serve.py over HTTP: a real server on a free port, clients beside it, an orderly end."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from support import stored_models
from support.training import Outcome, train
from support.waiting import NEVER_MINUTES, PATIENCE_S, wait_until

from megatron_sp.commands import serve
from megatron_sp.inference.generation import Sampling, complete
from megatron_sp.inference.team import find_stored
from megatron_sp.models.gpt import GPTModel

for name in ("starlette.applications", "starlette.responses", "uvicorn.loops.auto", "uvicorn.protocols.http.auto", "uvicorn.lifespan.off"):
    pytest.importorskip(name, reason="starlette or uvicorn is not installed (extra 'serve')")  # imported here, no server does it again


class Server:
    """A running server, on as many ranks as its layout has."""

    def __init__(self, folder: Path, run: Path, *words: str, ranks: int = 1) -> None:
        self.folder, self.outcome = folder, None
        self._started, self._end = threading.Event(), threading.Event()
        given = ["--load", str(run), "--device", "cpu", "--port", "0", *words]

        def program(_: list[str]) -> None:
            sys.exit(serve.main(given))

        def during(pids: list[int]) -> None:
            self.pids = pids
            wait_until(lambda: self.port or not any(map(_lives, pids)))
            self._started.set()
            self._end.wait(60 * NEVER_MINUTES)
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)

        self._thread = threading.Thread(target=self._run, args=(ranks, program, during))
        self._thread.start()
        assert self._started.wait(PATIENCE_S), self.output

    def _run(self, ranks: int, program: Any, during: Any) -> None:
        self.outcome: Outcome | None = train(self.folder, ranks=ranks, program=program, during=during)

    @property
    def output(self) -> str:
        return "".join(path.read_text() for path in sorted(self.folder.glob("rank*.txt")))

    @property
    def port(self) -> int:
        found = re.search(r"serving '\w+' at http://127\.0\.0\.1:(\d+)/", self.output)
        return int(found.group(1)) if found else 0

    def ask(self, body: Any, path: str = "/v1/completions", method: str = "POST", **headers: str) -> tuple[int, Any]:
        """(status, parsed answer)."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request(method, path, data, {"Content-Type": "application/json", **headers})
        response = connection.getresponse()
        return response.status, json.loads(response.read())

    def stream(self, body: dict[str, Any], **headers: str) -> Iterator[Any]:
        """The events of a stream; closing it closes the connection."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        try:
            data = json.dumps({**body, "stream": True})
            connection.request("POST", "/v1/completions", data, {"Content-Type": "application/json", **headers})
            response = connection.getresponse()
            assert (response.status, response.getheader("content-type")) == (200, "text/event-stream; charset=utf-8")
            while line := response.readline():
                if line.startswith(b"data: "):
                    yield line[6:].strip().decode() if line.startswith(b"data: [") else json.loads(line[6:])
        finally:
            response.close()
            connection.close()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> Outcome:
        self._end.set()
        self._thread.join(PATIENCE_S)
        assert self.outcome is not None, self.output
        return self.outcome


def _lives(pid: int) -> bool:
    with contextlib.suppress(OSError):
        os.kill(pid, 0)
        return True
    return False


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, GPTModel]:
    return stored_models.byte_run(tmp_path_factory.mktemp("stored"), 4096)


@pytest.fixture(scope="module")
def server(stored: tuple[Path, GPTModel], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(tmp_path_factory.mktemp("server"), stored[0], "--max-batch-size", "3", "--max-queue", "2", "--max-body-bytes", "60000")
    yield made
    made.stop().expect(0, "stopped")


def alone(model: GPTModel, prompt: str, count: int, sampling: Sampling) -> str:
    ids = complete(model, [list(prompt.encode())], max_new_tokens=count, sampling=sampling, eod=256, vocab_size=257)[0][0]
    return bytes(i for i in ids if i < 256).decode("utf-8", "replace")


def test_what_a_pipeline_has_trained(tmp_path: Path) -> None:
    """By two processes that share its layers."""
    flags = ("--pp-size", 2, "--micro-batch-size", 1, "--train-iters", 2, "--init-method-std", 0.2, "--save", tmp_path / "run")
    data = ("--mock-data", "--tokenizer-type", "ByteTokenizer", "--max-position-embeddings", 64)
    train(tmp_path, *flags, ranks=2, data=data).expect(0)
    model = find_stored(tmp_path / "run", None, "GPT", {}, print).load(GPTModel, torch.device("cpu"), torch.float32)
    with Server(tmp_path / "server", tmp_path / "run", "--tp-size", "2", ranks=2) as server:
        status, answer = server.ask({"prompt": "ab", "max_tokens": 9, "temperature": 0})
        assert status == 200 and answer["choices"][0]["text"] == alone(cast("GPTModel", model), "ab", 9, Sampling(0.0))


def test_answers_what_the_model_generates(server: Server, stored: tuple[Path, GPTModel]) -> None:
    status, answer = server.ask({"model": "run", "prompt": ["ab", "hello"], "max_tokens": 9, "temperature": 0, "n": 1})
    want = [alone(stored[1], prompt, 9, Sampling(0.0)) for prompt in ("ab", "hello")]
    assert status == 200 and [c["text"] for c in answer["choices"]] == want
    assert [c["index"] for c in answer["choices"]] == [0, 1] and answer["object"] == "text_completion"
    assert answer["usage"]["prompt_tokens"] == 7 and answer["usage"]["completion_tokens"] <= 18
    status, answer = server.ask({"prompt": [97, 98], "max_tokens": 12, "seed": 8, "top_p": 0.9, "echo": True, "logprobs": 1})
    assert answer["choices"][0]["text"] == "ab" + alone(stored[1], "ab", 12, Sampling(1.0, 0, 0.9, 8))
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"][0] is None and len(logprobs["tokens"]) == len(logprobs["text_offset"]) >= 3


def test_a_stream_has_the_same_text_and_ends_with_done(server: Server) -> None:
    body = {"prompt": "ab", "max_tokens": 25, "seed": 5, "n": 2, "stop": ["\n", "e"]}
    whole = server.ask(body)[1]
    events = list(server.stream({**body, "stream_options": {"include_usage": True}}))
    assert events[-1] == "[DONE]" and events[-2]["usage"] == whole["usage"] and events[-2]["choices"] == []
    for choice in whole["choices"]:
        mine = [c for event in events[:-2] for c in event["choices"] if c["index"] == choice["index"]]
        assert "".join(c["text"] for c in mine) == choice["text"]
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == [choice["finish_reason"]]
    assert len({event["id"] for event in events[:-1]}) == 1


def test_clients_at_the_same_time_get_their_own_text(server: Server, stored: tuple[Path, GPTModel]) -> None:
    answers: dict[int, Any] = {}

    def ask(seed: int) -> None:
        answers[seed] = server.ask({"prompt": "x" * seed, "max_tokens": 10 * seed, "seed": seed})

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for seed in range(1, 5):
        assert answers[seed][0] == 200
        assert answers[seed][1]["choices"][0]["text"] == alone(stored[1], "x" * seed, 10 * seed, Sampling(seed=seed))


def test_a_full_server_says_429_and_a_client_that_goes_makes_room(server: Server) -> None:
    body = {"prompt": "ab", "max_tokens": 4000, "n": 5, "logit_bias": {}}
    first = server.stream(body)
    next(first)
    status, answer = server.ask({"prompt": "ab"})
    assert status == 429 and answer["error"]["type"] == "rate_limit_error" and "5 of 5 places" in answer["error"]["message"]
    wait_until(lambda: server.ask(None, "/health", "GET")[1]["running"] == 3)
    first.close()
    wait_until(lambda: server.ask(None, "/health", "GET")[1]["running"] == 0)
    # the same for a client that waits for the whole answer
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    wait_until(lambda: server.ask(None, "/health", "GET")[1]["running"] == 3)
    connection.close()
    wait_until(lambda: server.ask(None, "/health", "GET")[1]["running"] == 0)
    assert server.ask({"prompt": "ab", "max_tokens": 2})[0] == 200


@pytest.mark.parametrize(
    ("body", "path", "method", "headers", "status", "message"),
    [
        ({"prompt": "ab", "max_tokens": 5000}, "/v1/completions", "POST", {}, 400, "do not fit into the model's context of 4096"),
        (b"{", "/v1/completions", "POST", {}, 400, "the body is not JSON"),
        (b" " * 60001, "/v1/completions", "POST", {}, 413, "larger than the 60000 bytes"),
        ({"prompt": "ab"}, "/v1/completions", "POST", {"Content-Type": "text/plain"}, 415, "application/json"),
        ({"prompt": "ab"}, "/v1/completions", "POST", {"Host": "evil.example"}, 403, "127.0.0.1, localhost"),
        ({"model": "gpt-4"}, "/v1/completions", "POST", {}, 404, "there is no model"),
        ({}, "/v1/chat/completions", "POST", {}, 404, "there is no POST /v1/chat/completions"),
        ({}, "/v1/completions", "GET", {}, 405, "there is no GET /v1/completions"),
    ],
)
def test_errors_are_objects(server: Server, body: Any, path: str, method: str, headers: Any, status: int, message: str) -> None:
    found, answer = server.ask(body, path, method, **headers)
    assert found == status and message in answer["error"]["message"] and set(answer["error"]) == {"message", "type", "param", "code"}


def test_a_client_that_leaves_within_its_request_is_no_fault_of_ours(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as half:
        half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{")
        assert server.ask({"prompt": "ab", "max_tokens": 1})[0] == 200  # it has begun on the other by now
    assert server.ask({"prompt": "ab", "max_tokens": 1})[0] == 200
    assert "Traceback" not in server.output


def test_models_and_health(server: Server) -> None:
    status, models = server.ask(None, "/v1/models", "GET")
    assert status == 200 and [m["id"] for m in models["data"]] == ["run"]
    assert server.ask(None, "/v1/models/run", "GET") == (200, models["data"][0])
    status, answer = server.ask(None, "/v1/models/gpt%2F4", "GET")
    assert status == 404 and answer["error"]["code"] == "model_not_found" and 'there is no model "gpt/4"' in answer["error"]["message"]
    status, health = server.ask(None, "/health", "GET")
    assert status == 200 and health["status"] == "ok"


def test_sigterm_lets_what_is_there_finish(stored: tuple[Path, GPTModel], tmp_path: Path) -> None:
    with Server(tmp_path, stored[0], "--api-key", "secret", "--shutdown-timeout", "600") as server:
        status, answer = server.ask({"prompt": "ab"})
        assert status == 401 and answer["error"]["code"] == "invalid_api_key"
        assert server.ask({"prompt": "ab"}, Authorization="Bearer secre")[0] == 401
        stream, port = server.stream({"prompt": "ab", "max_tokens": 80, "seed": 1}, Authorization="Bearer secret"), server.port
        text = next(stream)["choices"][0]["text"]
        stopper = threading.Thread(target=server.stop)
        stopper.start()
        events = list(stream)
        assert events[-1] == "[DONE]"
        assert text + "".join(event["choices"][0]["text"] for event in events[:-1]) == alone(stored[1], "ab", 80, Sampling(seed=1))
        stopper.join(PATIENCE_S)
        server.stop().expect(0, "stopped")
        with pytest.raises(ConnectionRefusedError):
            http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S).request("GET", "/health")


@pytest.mark.parametrize("layout", ["--tp-size", pytest.param("--sp-size", marks=pytest.mark.long)])
def test_ranks_that_share_the_model(stored: tuple[Path, GPTModel], tmp_path: Path, layout: str) -> None:
    with Server(tmp_path, stored[0], layout, "2", ranks=2) as server:
        body = {"prompt": ["ab", "q"], "max_tokens": 15, "seed": 3, "n": 2, "echo": True, "logprobs": 0}
        status, answer = server.ask(body)
        assert status == 200
        for i, prompt in enumerate(("ab", "q")):
            assert answer["choices"][2 * i]["text"] == prompt + alone(stored[1], prompt, 15, Sampling(seed=3))
        server.stop().expect(0, "stopped")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--max-batch-size", "0"], "--max-batch-size (0) must be at least 1"),
        (["--request-timeout", "0"], "--request-timeout (0.0) must be a number of seconds"),
        (["--port", "70000"], "--port (70000) must be at most 65535"),
        (["--host", "256.1.1.1"], "--host 256.1.1.1 --port 8000 cannot be used"),
    ],
)
def test_mistakes_are_one_message(
    stored: tuple[Path, GPTModel], capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert serve.main(["--load", str(stored[0]), "--device", "cpu", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_body_that_is_too_large_is_refused_at_its_header(server: Server) -> None:
    """Not a byte of it is sent."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 999999999999\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as sender:
        sender.sendall(head)
        answer = b""
        while part := sender.recv(1 << 16):  # until the server closes it
            answer += part
    assert answer.startswith(b"HTTP/1.1 413 ") and b"larger than the 60000 bytes" in answer
