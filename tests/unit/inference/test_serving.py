"""Requests, stops, the queue and the batches of the server, without HTTP."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
import torch
from support import stored_models

from megatron_sp.data.tokenizers import ByteTokenizer
from megatron_sp.inference.decoder import Decoder
from megatron_sp.inference.generation import Sampling, complete
from megatron_sp.inference.serving.engine import Engine, Job, Piece, Sequence, StopText
from megatron_sp.inference.serving.request import ApiError, Completion, Limits, parse_body
from megatron_sp.inference.serving.server import is_loopback, open_socket, require_packages, warning_about
from megatron_sp.models.gpt import GPTModel
from megatron_sp.ops import availability
from megatron_sp.ops.attention import AttentionMask
from megatron_sp.parallel.forward_context import ForwardContext
from megatron_sp.utils.errors import ConfigError

TOKENIZER = ByteTokenizer()
# sampling may draw the end of the document at any step; the likeliest token of the model below never is it
ENDLESS: dict[str, Any] = {"prompt": "ab", "max_tokens": 4000, "temperature": 0}
LIMITS = Limits(max_positions=24, max_tokens=20, max_sequences=6)


def parse(**body: Any) -> Completion:
    return parse_body(json.dumps(body).encode(), TOKENIZER, "tiny", LIMITS)


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("ab", [[97, 98]]), (["a", "bc"], [[97], [98, 99]]), ([97, 98], [[97, 98]]), ([[97], [98, 256]], [[97], [98, 256]]),
        (None, [[256]]), ("", [[256]]),
    ],
)  # fmt: skip
def test_prompts_of_every_form(prompt: Any, ids: list[list[int]]) -> None:
    spec = parse(prompt=prompt, max_tokens=3)
    assert [p.ids for p in spec.prompts] == ids
    assert [p.text for p in spec.prompts] == [bytes(i for i in one if i < 256).decode() for one in ids]


def test_what_is_left_out_has_openais_defaults() -> None:
    spec = parse(prompt="ab")
    assert (spec.max_tokens, spec.n, spec.stop, spec.logprobs, spec.echo, spec.stream) == (16, 1, [], None, False, False)
    assert (spec.sampling.temperature, spec.sampling.top_p, spec.sampling.top_k) == (1.0, 1.0, 0)
    assert parse().sampling.seed != parse().sampling.seed  # of its own each time
    assert parse(prompt="x" * 20).max_tokens == 4  # what the context has room for
    assert parse(seed=-3, top_p=0, stop="a", user="me", logit_bias={}, best_of=None).sampling == Sampling(1.0, 0, 1e-9, -3)


@pytest.mark.parametrize(
    ("body", "status", "param", "message"),
    [
        ({"prompts": "a"}, 400, "prompts", "unknown field 'prompts'"),
        ({"model": "other"}, 404, "model", "this server has 'tiny'"),
        ({"prompt": 3}, 400, "prompt", "'prompt' must be a text"),
        ({"prompt": []}, 400, "prompt", "'prompt' must be a text"),
        ({"prompt": ["a", 3]}, 400, "prompt", "'prompt' must be a text"),
        ({"prompt": [True]}, 400, "prompt", "'prompt' must be a text"),
        ({"prompt": [257]}, 400, "prompt", "token id 257 is outside the vocabulary, 0 to 256"),
        ({"prompt": "x" * 25}, 400, "prompt", "25 tokens do not fit into the model's context of 24"),
        ({"prompt": "x" * 20, "max_tokens": 5}, 400, "max_tokens", "20 tokens and max_tokens (5) do not fit"),
        ({"max_tokens": 21}, 400, "max_tokens", "above what this server allows (20)"),
        ({"max_tokens": 0}, 400, "max_tokens", "generates nothing"),
        ({"max_tokens": 2.0}, 400, "max_tokens", "'max_tokens' must be an integer"),
        ({"n": 0}, 400, "n", "'n' must be an integer from 1 to 128"),
        ({"n": True}, 400, "n", "'n' must be an integer"),
        ({"n": 4, "prompt": ["a", "b"]}, 400, "n", "more than the 6 choices"),
        ({"best_of": 2}, 400, "best_of", "'best_of' must be 'n'"),
        ({"temperature": -0.1}, 400, "temperature", "'temperature' must be a number from 0 to 100"),
        ({"temperature": "1"}, 400, "temperature", "'temperature' must be a number"),
        ({"top_p": 1.5}, 400, "top_p", "'top_p' must be a number from 0 to 1"),
        ({"stop": ["a"] * 5}, 400, "stop", "a list of up to 4"),
        ({"stop": ""}, 400, "stop", "none of them empty"),
        ({"logprobs": 6}, 400, "logprobs", "from 0 to 5"),
        ({"stream": 1}, 400, "stream", "'stream' must be true or false"),
        ({"stream_options": {"x": 1}}, 400, "stream_options", "'include_usage'"),
        ({"suffix": "x"}, 400, "suffix", "'suffix' is not supported"),
        ({"presence_penalty": 0.5}, 400, "presence_penalty", "not supported"),
    ],
)
def test_what_cannot_be_done_is_said(body: dict[str, Any], status: int, param: str, message: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse(**body)
    error = caught.value.body()["error"]
    assert (caught.value.status, error["param"]) == (status, param) and message in error["message"]
    assert error["type"] == ("not_found_error" if status == 404 else "invalid_request_error")


@pytest.mark.parametrize("data", [b"", b"{", b"[1]", b"\xff", b"[" * 100_000, b'{"temperature": NaN}'])
def test_bodies_that_are_no_request(data: bytes) -> None:
    with pytest.raises(ApiError):
        parse_body(data, TOKENIZER, "tiny", LIMITS)


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_text_ends_at_the_first_stop_however_it_comes(size: int) -> None:
    for text, stops, want in [
        ("one two", ["e t"], "on"), ("aab", ["ab", "b"], "a"), ("xyzxyw", ["xyw"], "xyz"), ("one", ["only", "z"], "one"),
        ("xx##", ["###"], "xx##"),
    ]:  # fmt: skip
        filter_, shown, stopped = StopText(stops), "", False
        for at in range(0, len(text), size):
            new, stopped = filter_.add(text[at : at + size])
            shown += new
            assert want.startswith(shown)  # nothing has to be taken back
            if stopped:
                break
        assert (shown if stopped else shown + filter_.add("", at_end=True)[0]) == want


Choices = list[tuple[str, str]]  # (text, reason) of every choice


class Client:
    """A request of an engine whose turns are taken here, without an event loop."""

    def __init__(self, engine: Engine, **body: Any) -> None:
        self.spec = parse_body(json.dumps(body).encode(), TOKENIZER, "tiny", Limits(4096, 4096, engine.capacity))
        self.job, self.pieces = engine.submit(self.spec), list[Piece]()
        self.error: ApiError | None = None

    def choices(self) -> Choices:
        found = [("", "")] * (len(self.spec.prompts) * self.spec.n)
        for piece in self.pieces:
            text, reason = found[piece["index"]]
            found[piece["index"]] = text + piece["text"], reason + (piece["finish_reason"] or "")
        return found


def take_turns(engine: Engine, *clients: Client, turns: int = 10_000) -> list[Choices]:
    """Until nothing is left to do, or so many times."""
    while turns and any(engine.counts.values()):
        turns -= 1
        for job, event in engine.turn():
            client = next(client for client in clients if client.job is job)
            assert client.error is None, "an error is the last event"
            if isinstance(event, ApiError):
                client.error = event
            else:
                client.pieces.append(event)
    return [client.choices() for client in clients]


def ask(engine: Engine, **body: Any) -> Choices:
    return take_turns(engine, Client(engine, **body))[0]


@pytest.fixture(scope="module")
def model() -> GPTModel:
    config = stored_models.byte_config(4096)
    return GPTModel(config.model, config.kernels, seed=2, dtype=torch.float64).requires_grad_(False)


def new_engine(model: GPTModel, rows: int, max_queue: int, timeout_s: float = 1e6) -> Engine:
    decoder = Decoder(model, rows, TOKENIZER.vocab_size)
    decoder.reserve(model.config.max_positions)
    return Engine(decoder, TOKENIZER, max_queue, timeout_s)


@pytest.fixture
def engine(model: GPTModel) -> Engine:
    return new_engine(model, 3, 4)


def alone(model: GPTModel, prompt: str, count: int, sampling: Sampling, n: int = 1) -> list[str]:
    ids = complete(model, [list(prompt.encode())], max_new_tokens=count, sampling=sampling, eod=256, vocab_size=257, num_samples=n)[0]
    return [bytes(i for i in one if i < 256).decode("utf-8", "replace") for one in ids]


def test_in_company_as_alone(model: GPTModel, engine: Engine) -> None:
    """More than there are rows, of different lengths, some of several choices: each has the text it has by itself."""
    asked: list[tuple[str, int, dict[str, Any]]] = [
        ("ab", 30, {"temperature": 0}), ("", 1, {"seed": 3}), ("hello", 9, {"seed": 4, "n": 2}),
        ("x" * 40, 50, {"seed": 5, "top_p": 0.8}), ("q", 17, {"seed": 6, "temperature": 0.5}),
    ]  # fmt: skip
    clients = [Client(engine, prompt=p, max_tokens=k, **more) for p, k, more in asked]
    for choices, (prompt, count, more) in zip(take_turns(engine, *clients), asked, strict=True):
        sampling = Sampling(more.get("temperature", 1.0), 0, more.get("top_p", 1.0), more.get("seed", 0))
        assert not prompt or [text for text, _ in choices] == alone(model, prompt, count, sampling, more.get("n", 1))


def watch(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[list[Any]]:
    """The calls of the model, as they come."""
    calls = list[list[Any]]()
    monkeypatch.setattr(engine, "_tell", calls.append)
    return calls


def test_steps_go_on_while_prompts_are_read(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = watch(engine, monkeypatch)
    take_turns(engine, *(Client(engine, **ENDLESS) for _ in range(3)), turns=6)
    assert [name for name, *_ in calls] == ["read", "step", "read", "step", "read", "step"]


@pytest.mark.parametrize("body", [{"max_tokens": 9}, {"max_tokens": 1}, {"max_tokens": 3, "echo": True, "logprobs": 1}])
def test_a_prompt_is_read_once_for_all_its_samples(
    model: GPTModel, engine: Engine, monkeypatch: pytest.MonkeyPatch, body: dict[str, Any]
) -> None:
    """Also where they do not all have a row at once, and another prompt comes between them and its own."""
    calls = watch(engine, monkeypatch)
    found = ask(engine, prompt=["abc", "xyz"], n=3, seed=7, **body)
    assert [args[0] for name, *args in calls if name == "read"] == [list(b"abc"), list(b"xyz")] and engine._shared is None
    count = body["max_tokens"]
    want = [text for prompt in ("abc", "xyz") for text in alone(model, prompt, count, Sampling(seed=7), 3)]
    shown = ["abc"] * 3 + ["xyz"] * 3 if "echo" in body else [""] * 6
    assert [text for text, _ in found] == [a + b for a, b in zip(shown, want, strict=True)]


def test_a_stop_ends_a_choice_and_is_not_shown(model: GPTModel, engine: Engine) -> None:
    free = alone(model, "ab", 40, Sampling(seed=1))[0]
    stop = free[10:12]
    assert ask(engine, prompt="ab", max_tokens=40, seed=1, stop=[stop]) == [(free[: free.index(stop)], "stop")]
    assert ask(engine, prompt="ab", max_tokens=40, seed=1, echo=True) == [("ab" + free, "length")]


def columns(engine: Engine, **body: Any) -> tuple[list[str], list[float | None], list[dict[str, float] | None], list[int]]:
    take_turns(engine, client := Client(engine, **body))
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return tuple([value for piece in client.pieces for value in piece["logprobs"][name]] for name in names)  # type: ignore[return-value]


def test_probabilities_are_those_of_the_logits(model: GPTModel, engine: Engine) -> None:
    ids = [*b"abc", *complete(model, [list(b"abc")], max_new_tokens=3, sampling=Sampling(0.0), vocab_size=257)[0][0]]
    wanted = model.all_logits(torch.tensor([ids[:-1]]), ForwardContext(AttentionMask()))[:, 0, :257].log_softmax(-1)
    tokens, own, top, offsets = columns(engine, prompt="abc", max_tokens=3, temperature=0, logprobs=2, echo=True)
    assert own[0] is None and top[0] is None and len(tokens) == 6 and offsets[:3] == [0, 1, 2]
    assert own[1:] == pytest.approx([float(wanted[i, ids[i + 1]]) for i in range(5)], abs=1e-9)
    assert [max((best or {}).values()) for best in top[1:]] == pytest.approx(wanted.amax(1).tolist(), abs=1e-9)
    assert columns(engine, prompt="abc", max_tokens=0, logprobs=0, echo=True)[1] == own[:3]


def test_parts_of_a_character_have_its_place_and_the_likeliest_of_those_that_look_alike_counts(engine: Engine) -> None:
    tokens, _, _, offsets = columns(engine, prompt="a\u00e9\u65e5b", max_tokens=0, logprobs=0, echo=True)
    assert offsets == [0, 1, 1, 2, 2, 2, 3] and tokens == ["a", *["\ufffd"] * 5, "b"]
    spec = parse(prompt="ab", logprobs=3, temperature=0)
    logits = torch.zeros(257)
    logits[[0xE9, 0xE8, ord("q")]] = torch.tensor([5.0, 4.0, 3.0])
    wanted = logits.double().log_softmax(0)
    piece = Sequence(Job(spec, 0.0), spec.prompts[0], 0, 0, TOKENIZER).begin(logits[None])
    assert piece["logprobs"]["top_logprobs"] == [{"\ufffd": float(wanted[0xE9]), "q": float(wanted[ord("q")])}]


class Spelled(ByteTokenizer):
    """The end of a document is spelled out: of a text it is in what comes back; of token ids it is not."""

    def decode(self, ids: list[int]) -> str:  # type: ignore[override]
        return "".join("<eod>" if i == self.eod else chr(i) for i in ids)

    def encode(self, text: str) -> list[int]:
        return [self.eod, *super().encode(text.removeprefix("<eod>"))]


class Begun(ByteTokenizer):
    """BOS stands before a text and takes no room in it."""

    begin = (7,)


@pytest.mark.parametrize(("tokenizer", "prompt", "ids", "text", "offsets"), [
    (Spelled, "<eod>ab", [256, 97, 98], "<eod>ab", [0, 5, 6]), (Spelled, [256, 97, 98], [256, 97, 98], "ab", [0, 0, 1]),
    (Begun, "ab", [7, 97, 98], "ab", [0, 0, 1]), (Begun, [97, 98], [97, 98], "ab", [0, 1]), (Begun, "", [7], "", [0]),
])  # fmt: skip
def test_tokens_that_are_not_in_the_text(
    tokenizer: type[ByteTokenizer], prompt: Any, ids: list[int], text: str, offsets: list[int]
) -> None:
    body = json.dumps({"prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 0}).encode()
    spec = parse_body(body, tokenizer(), "m", LIMITS)
    assert (spec.prompts[0].ids, spec.prompts[0].text) == (ids, text)
    piece = Sequence(Job(spec, 0.0), spec.prompts[0], 0, 0, tokenizer()).begin(torch.zeros(3, 257))
    assert piece["logprobs"]["text_offset"] == offsets


def test_a_full_queue_refuses_and_cancelled_requests_make_room(engine: Engine) -> None:
    long = [Client(engine, **ENDLESS, n=5), Client(engine, **ENDLESS), Client(engine, **ENDLESS)]
    with pytest.raises(ApiError, match="7 of 7 places taken") as caught:
        Client(engine, prompt="ab")
    assert caught.value.status == 429
    take_turns(engine, *long, turns=3)
    assert engine.counts == {"running": 3, "waiting": 4} and engine._shared is not None
    for client in long:
        client.job.cancelled = True
    take_turns(engine, *long, turns=1)
    assert engine.counts == {"running": 0, "waiting": 0} and engine._shared is None
    assert ask(engine, prompt="ab", max_tokens=2)


def test_late_requests_end(model: GPTModel) -> None:
    engine = new_engine(model, 1, 1, timeout_s=1e-6)
    clients = [Client(engine, **ENDLESS) for _ in range(2)]
    take_turns(engine, *clients)
    assert [(client.error.status, str(client.error)) for client in clients if client.error] == [
        (504, "the request took longer than 1e-06 s")
    ] * 2


def test_going_down_finishes_what_it_can(model: GPTModel) -> None:
    engine = new_engine(model, 2, 1)

    async def serve() -> None:
        work = asyncio.ensure_future(engine.run())
        short, long = (engine.submit(parse_body(json.dumps(body).encode(), TOKENIZER, "", Limits(4096, 4096, 3))) for body in (
            {"prompt": "ab", "max_tokens": 20}, ENDLESS))  # fmt: skip
        await long.next()
        engine.drain(1e6)
        with pytest.raises(ApiError, match="shutting down"):
            Client(engine, prompt="ab")
        while (await short.next())["finish_reason"] is None:
            pass
        engine.drain(0.0)
        with pytest.raises(ApiError, match="shutting down") as caught:
            while True:
                await long.next()
        assert caught.value.status == 503
        engine.stop()
        await work

    asyncio.run(serve())


@pytest.mark.parametrize("has_followers", [False, True])
def test_a_failure_of_the_model_is_an_answer(model: GPTModel, engine: Engine, monkeypatch: pytest.MonkeyPatch, has_followers: bool) -> None:
    """And not the end, if there are no other ranks."""

    def broken(*_: Any) -> None:
        raise MemoryError("no room")

    nan = torch.full((1, 257), float("nan"))
    engine._has_followers = has_followers
    for method, act, max_tokens, text in (
        ("step", broken, 5, "MemoryError: no room"), ("read", broken, 5, "MemoryError: no room"),
        ("read", lambda *_: nan, 1, "not finite"),  # also for a request that never has a row
    ):  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setattr(engine._decoder, method, act)
            client = Client(engine, prompt="ab", max_tokens=max_tokens)
            take_turns(engine, client)
        assert client.error is not None and client.error.status == 500 and text in str(client.error)
        if has_followers:
            with pytest.raises(ApiError, match="the model failed: MemoryError: no room"):
                Client(engine, prompt="ab")
            return
    assert [text for text, _ in ask(engine, prompt="ab", max_tokens=5, temperature=0)] == alone(model, "ab", 5, Sampling(0.0))


def test_missing_packages_are_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(availability, "find", lambda name: availability.Kernel(name, False, reason=f"{name} is not installed"))
    with pytest.raises(ConfigError, match=r"starlette is not installed; uvicorn is not installed.* pip install starlette uvicorn"):
        require_packages()


def test_addresses() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "localhost", "::1")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "example.org")))
    assert warning_about("::1", has_key=False) is None
    assert "lets anybody, without a password," in str(warning_about("0.0.0.0", has_key=False))
    assert "lets whoever has the API key" in str(warning_about("10.0.0.1", has_key=True))
    with open_socket("127.0.0.1", 0) as taken:
        taken.listen()
        with pytest.raises(ConfigError, match="cannot be used: Address already in use; choose another port"):
            open_socket("127.0.0.1", taken.getsockname()[1])
