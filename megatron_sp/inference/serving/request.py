"""Parsing and validation of the body of ``POST /v1/completions``, with errors in the format of OpenAI's API.

Unsupported fields are rejected, never silently ignored, unless they have a value without effect.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_sp.data.tokenizers import Tokenizer
from megatron_sp.inference.generation import Sampling
from megatron_sp.utils.errors import ReportedError

DEFAULT_MAX_TOKENS = 16
_MOST_SAMPLES, _MOST_STOPS, _MOST_LOGPROBS = 128, 4, 5
_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "suffix": (None, ""), "presence_penalty": (None, 0), "frequency_penalty": (None, 0), "logit_bias": (None, {}),
}  # fmt: skip
_KNOWN = {
    "model", "prompt", "max_tokens", "temperature", "top_p", "top_k", "n", "best_of", "stream", "stream_options", "logprobs", "echo",
    "stop", "seed", "user", *_WITHOUT_EFFECT,
}  # fmt: skip


class ApiError(Exception):
    """Error of a request, returned as an error object of OpenAI's API."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, Any]:
        """JSON of the answer, as OpenAI's API has it."""
        kind = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}.get(
            self.status, "invalid_request_error" if self.status < 500 else "server_error"
        )
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True)
class Limits:
    """Limits that a server imposes on requests.

    Attributes:
        max_positions: context length of the model.
        max_tokens: largest number of generated tokens of a choice.
        max_sequences: largest number of choices of one request over all its prompts: size of batch and queue together.
    """

    max_positions: int
    max_tokens: int
    max_sequences: int


@dataclass(frozen=True)
class Prompt:
    """A prompt.

    Attributes:
        ids: its token ids, at least one.
        text: its text, for ``echo``.
        has_ends: the text includes end-of-document tokens.
        num_unwritten: number of leading tokens that are not in the text: BOS.
    """

    ids: list[int]
    text: str
    has_ends: bool = False
    num_unwritten: int = 0


@dataclass(frozen=True)
class Completion:
    """A validated request; ``logprobs``: number of alternatives to return with each token, None: no log-probabilities."""

    prompts: list[Prompt]
    max_tokens: int
    sampling: Sampling
    n: int
    stop: list[str]
    logprobs: int | None
    echo: bool
    stream: bool
    include_usage: bool


def parse_body(data: bytes, tokenizer: Tokenizer, model_name: str, limits: Limits) -> Completion:
    """Parse a request's JSON body.

    Raises:
        ApiError: it is invalid.
    """
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
    fields = _Fields(body)
    n = fields.integer("n", 1, 1, _MOST_SAMPLES)
    if fields.integer("best_of", n, 1, _MOST_SAMPLES) != n:
        raise ApiError(400, f"'best_of' must be 'n' ({n}): choices are not ranked", "best_of")
    prompts = _prompts(body.get("prompt"), tokenizer)
    if len(prompts) * n > limits.max_sequences:
        raise ApiError(
            400, f"{len(prompts)} prompts * n ({n}) are more than the {limits.max_sequences} choices this server accepts at once", "n"
        )
    echo = fields.boolean("echo")
    max_tokens = _max_tokens(fields, prompts, limits, echo)
    return Completion(
        prompts, max_tokens, _sampling(fields), n, _stops(body.get("stop")), fields.optional_integer("logprobs", 0, _MOST_LOGPROBS), echo,
        fields.boolean("stream"), _include_usage(body.get("stream_options")),
    )  # fmt: skip


def require_model(asked: Any, model_name: str) -> None:
    """Raise ApiError if a client asks for another model than this one."""
    if asked is not None and asked != model_name:
        raise ApiError(404, f"there is no model {json.dumps(asked)[:100]}; this server has '{model_name}'", "model", "model_not_found")


class _Fields:
    """Typed access to the fields of the body; null counts as missing."""

    def __init__(self, body: dict[str, Any]) -> None:
        self.body = body

    def optional_integer(self, name: str, low: int, high: int) -> int | None:
        value = self.body.get(name)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise ApiError(400, f"'{name}' must be an integer from {low} to {high}", name)
        return value

    def integer(self, name: str, default: int, low: int, high: int) -> int:
        value = self.optional_integer(name, low, high)
        return default if value is None else value

    def number(self, name: str, default: float, low: float, high: float) -> float:
        value = self.body.get(name)
        if value is None:
            return default
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not low <= value <= high:
            raise ApiError(400, f"'{name}' must be a number from {low:g} to {high:g}", name)
        return float(value)

    def boolean(self, name: str) -> bool:
        value = self.body.get(name)
        if value is not None and not isinstance(value, bool):
            raise ApiError(400, f"'{name}' must be true or false", name)
        return bool(value)


def _sampling(fields: _Fields) -> Sampling:
    seed = fields.optional_integer("seed", -(2**63), 2**63 - 1)
    top_p = fields.number("top_p", 1.0, 0.0, 1.0)
    return Sampling(
        fields.number("temperature", 1.0, 0.0, 100.0), fields.integer("top_k", 0, 0, 2**31), max(top_p, 1e-9),
        secrets.randbits(62) if seed is None else seed,
    )  # fmt: skip


def _max_tokens(fields: _Fields, prompts: list[Prompt], limits: Limits, echo: bool) -> int:
    asked = fields.optional_integer("max_tokens", 0, 2**31)
    longest = max(len(prompt.ids) for prompt in prompts)
    room = limits.max_positions - longest
    if room < 0 or (asked or 0) > room:
        wanted = f"{longest} tokens" if asked is None else f"{longest} tokens and max_tokens ({asked})"
        raise ApiError(
            400, f"the prompt's {wanted} do not fit into the model's context of {limits.max_positions} positions: shorten one of them",
            "prompt" if room < 0 else "max_tokens", "context_length_exceeded",
        )  # fmt: skip
    if asked is not None and asked > limits.max_tokens:
        raise ApiError(400, f"'max_tokens' ({asked}) is above what this server allows ({limits.max_tokens})", "max_tokens")
    if asked == 0 and not echo:
        raise ApiError(400, "'max_tokens' (0) generates nothing: that is for 'echo', which gives the prompt back", "max_tokens")
    return min(DEFAULT_MAX_TOKENS, room, limits.max_tokens) if asked is None else asked


def _stops(value: Any) -> list[str]:
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > _MOST_STOPS or not all(isinstance(s, str) and s for s in stops):
        raise ApiError(400, f"'stop' must be a text, or a list of up to {_MOST_STOPS}, none of them empty", "stop")
    return stops


def _include_usage(value: Any) -> bool:
    if value is None:
        return False
    if not isinstance(value, dict) or set(value) - {"include_usage"} or not isinstance(value.get("include_usage", False), bool):
        raise ApiError(400, "'stream_options' must be an object with the field 'include_usage', true or false", "stream_options")
    return bool(value.get("include_usage", False))


def _prompts(value: Any, tokenizer: Tokenizer) -> list[Prompt]:
    """Parse the prompt field: a text, a list of texts, token ids, or a list of lists of token ids."""
    if value is None or isinstance(value, str):
        return [_of_text(value or "", tokenizer)]
    if isinstance(value, list) and value:
        if all(isinstance(part, str) for part in value):
            return [_of_text(part, tokenizer) for part in value]
        of_ids: Callable[[Any], bool] = lambda part: isinstance(part, int) and not isinstance(part, bool)
        if all(map(of_ids, value)):
            return [_of_ids(value, tokenizer)]
        if all(isinstance(part, list) and part and all(map(of_ids, part)) for part in value):
            return [_of_ids(part, tokenizer) for part in value]
    raise ApiError(400, "'prompt' must be a text, a list of texts, a list of token ids, or a list of such lists", "prompt")


def _of_text(text: str, tokenizer: Tokenizer) -> Prompt:
    try:
        ids = tokenizer.encode(text)
    except ReportedError as error:
        raise ApiError(400, f"the prompt cannot be read: {error}", "prompt") from None
    if not ids:
        return Prompt(list(tokenizer.begin) or [tokenizer.eod], "", num_unwritten=len(tokenizer.begin))
    return Prompt([*tokenizer.begin, *ids], text, has_ends=True, num_unwritten=len(tokenizer.begin))


def _of_ids(ids: list[int], tokenizer: Tokenizer) -> Prompt:
    outside = next((i for i in ids if not 0 <= i < tokenizer.vocab_size), None)
    if outside is not None:
        raise ApiError(400, f"token id {outside} is outside the vocabulary, 0 to {tokenizer.vocab_size - 1}", "prompt")
    return Prompt(ids, tokenizer.decode([i for i in ids if i != tokenizer.eod]))
