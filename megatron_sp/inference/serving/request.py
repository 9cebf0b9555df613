"""The body of ``POST /v1/completions``, with errors in the format of OpenAI's API. No field is silently ignored."""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from typing import Any

from megatron_sp.data.tokenizers import Tokenizer
from megatron_sp.inference.generation import Sampling
from megatron_sp.utils.errors import ReportedError

DEFAULT_MAX_TOKENS = 16
_MOST_SAMPLES, _MOST_STOPS = 128, 4
# default, least and greatest value; whose default is a float may be any number, the others are integers
_NUMBERS: dict[str, tuple[float | None, int, int]] = {
    "n": (1, 1, _MOST_SAMPLES), "best_of": (None, 1, _MOST_SAMPLES), "max_tokens": (None, 0, 2**31),
    "seed": (None, -(2**63), 2**63 - 1), "top_p": (1.0, 0, 1), "temperature": (1.0, 0, 100), "top_k": (0, 0, 2**31),
    "logprobs": (None, 0, 5),
}  # fmt: skip
_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "suffix": (None, ""), "presence_penalty": (None, 0), "frequency_penalty": (None, 0), "logit_bias": (None, {}),
}  # fmt: skip
_KNOWN = {
    "model", "prompt", "stream", "stream_options", "echo", "stop", "user", *_NUMBERS, *_WITHOUT_EFFECT,
}  # fmt: skip


class ApiError(Exception):
    """Error of a request, returned as an error object of OpenAI's API."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, Any]:
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True)
class Limits:
    """Limits of requests: context length, generated tokens of a choice, choices of one request over all its prompts."""

    max_positions: int
    max_tokens: int
    max_sequences: int


@dataclass(frozen=True)
class Prompt:
    """Token ids (at least one) and text of a prompt."""

    ids: list[int]
    text: str
    has_ends: bool = False  # the text includes end-of-document tokens
    num_unwritten: int = 0  # leading tokens that are not in the text: BOS


@dataclass(frozen=True)
class Completion:
    """A validated request."""

    prompts: list[Prompt]
    max_tokens: int
    sampling: Sampling
    n: int
    stop: list[str]
    logprobs: int | None  # alternatives to return with each token; None: no log-probabilities
    echo: bool
    stream: bool
    include_usage: bool


def parse_body(data: bytes, tokenizer: Tokenizer, model_name: str, limits: Limits) -> Completion:
    """Parse a request's JSON body. Raises ApiError if it is invalid."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object")
    for name in body:
        if name not in _KNOWN:
            raise ApiError(400, f"unknown field '{name[:64]}'; there are: {', '.join(sorted(_KNOWN))}", name[:64])
    for name, values in _WITHOUT_EFFECT.items():
        if body.get(name) not in values:
            raise ApiError(400, f"'{name}' is not supported: leave it out", name)
    require_model(body.get("model"), model_name)
    numbers: dict[str, Any] = {}
    for name, (default, low, high) in _NUMBERS.items():  # null counts as missing
        value, is_real = body.get(name), isinstance(default, float)
        kind = (int, float) if is_real else int
        if value is not None and (not isinstance(value, kind) or isinstance(value, bool) or not low <= value <= high):
            raise ApiError(
                400, f"'{name}' must be {'a number' if is_real else 'an integer'} from {low} to {high}", name
            )
        numbers[name] = default if value is None else float(value) if is_real else value
    for name in ("echo", "stream"):
        if not isinstance(body.get(name), bool | None):
            raise ApiError(400, f"'{name}' must be true or false", name)
    n, echo, stream = numbers["n"], bool(body.get("echo")), bool(body.get("stream"))
    if numbers["best_of"] not in (None, n):
        raise ApiError(400, f"'best_of' must be 'n' ({n}): choices are not ranked", "best_of")
    prompts = _prompts(body.get("prompt"), tokenizer)
    if len(prompts) * n > limits.max_sequences:
        choices = f"{len(prompts)} prompts * n ({n}) are more than the {limits.max_sequences} choices"
        raise ApiError(400, f"{choices} this server accepts at once", "n")
    max_tokens = _max_tokens(numbers["max_tokens"], prompts, limits, echo)
    seed = secrets.randbits(62) if numbers["seed"] is None else numbers["seed"]
    sampling = Sampling(numbers["temperature"], numbers["top_k"], max(numbers["top_p"], 1e-9), seed)
    stop = body.get("stop")
    stop = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or len(stop) > _MOST_STOPS or not all(isinstance(s, str) and s for s in stop):
        raise ApiError(400, f"'stop' must be a text, or a list of up to {_MOST_STOPS}, none of them empty", "stop")
    usage = {} if body.get("stream_options") is None else body["stream_options"]
    is_usage = isinstance(usage, dict) and not set(usage) - {"include_usage"}
    if not is_usage or not isinstance(usage.get("include_usage", False), bool):
        rule = "'stream_options' must be an object with the field 'include_usage', true or false"
        raise ApiError(400, rule, "stream_options")
    includes_usage = usage.get("include_usage", False)
    return Completion(prompts, max_tokens, sampling, n, stop, numbers["logprobs"], echo, stream, includes_usage)


def require_model(asked: Any, model_name: str) -> None:
    """Raise ApiError if a client asks for another model than this one."""
    if asked is not None and asked != model_name:
        none = f"there is no model {json.dumps(asked)[:100]}; this server has '{model_name}'"
        raise ApiError(404, none, "model", "model_not_found")


def _max_tokens(asked: int | None, prompts: list[Prompt], limits: Limits, echo: bool) -> int:
    longest = max(len(prompt.ids) for prompt in prompts)
    room = limits.max_positions - longest
    if room < 0 or (asked or 0) > room:
        wanted = f"{longest} tokens" if asked is None else f"{longest} tokens and max_tokens ({asked})"
        context = f"the model's context of {limits.max_positions} positions"
        field = "prompt" if room < 0 else "max_tokens"
        message = f"the prompt's {wanted} do not fit into {context}: shorten one of them"
        raise ApiError(400, message, field, "context_length_exceeded")
    if asked is None:
        return min(DEFAULT_MAX_TOKENS, room, limits.max_tokens)
    if asked > limits.max_tokens:
        allowed = f"'max_tokens' ({asked}) is above what this server allows ({limits.max_tokens})"
        raise ApiError(400, allowed, "max_tokens")
    if asked == 0 and not echo:
        nothing = "'max_tokens' (0) generates nothing: that is for 'echo', which gives the prompt back"
        raise ApiError(400, nothing, "max_tokens")
    return asked


def _prompts(value: Any, tokenizer: Tokenizer) -> list[Prompt]:
    value = "" if value is None else value
    texts: list[Any] = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts:
        texts = [None]  # refused below
    if all(isinstance(text, str) for text in texts):
        try:
            encoded = [tokenizer.encode(text) for text in texts]
        except ReportedError as error:
            raise ApiError(400, f"the prompt cannot be read: {error}", "prompt") from None
        begin = list(tokenizer.begin)
        empty = Prompt(begin or [tokenizer.eod], "", num_unwritten=len(begin))
        return [
            Prompt([*begin, *ids], text, has_ends=True, num_unwritten=len(begin)) if ids else empty
            for text, ids in zip(texts, encoded, strict=True)
        ]
    lists = texts if all(isinstance(part, list) and part for part in texts) else [texts]
    if not all(isinstance(i, int) and not isinstance(i, bool) for ids in lists for i in ids):
        forms = "a text, a list of texts, a list of token ids, or a list of such lists"
        raise ApiError(400, f"'prompt' must be {forms}", "prompt")
    for i in (i for ids in lists for i in ids):
        if not 0 <= i < tokenizer.vocab_size:
            vocabulary = f"0 to {tokenizer.vocab_size - 1}"
            raise ApiError(400, f"token id {i} is outside the vocabulary, {vocabulary}", "prompt")
    return [Prompt(ids, tokenizer.decode([i for i in ids if i != tokenizer.eod])) for ids in lists]
