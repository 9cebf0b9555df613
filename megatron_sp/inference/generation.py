"""Text generation token by token, greedy or sampled, with a KV cache, reproducible to the token."""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron_sp.inference.decoder import Decoder
from megatron_sp.models.gpt import GPTModel
from megatron_sp.parallel.gather import agreed
from megatron_sp.utils.errors import ConfigError, NumericsError

FinishReason = Literal["", "eod", "stop", "max_new_tokens", "context"]


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters."""

    temperature: float = 1.0  # divides the logits; 0: greedy, always the most probable token (on ties the lowest id)
    top_k: int = 0  # keep only the k most probable tokens; 0: all
    top_p: float = 1.0  # keep the fewest most probable tokens (after top_k, renormalised) that reach this; 1: all
    seed: int = 1234  # seed of the draws

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ConfigError(f"temperature ({self.temperature}) must be a finite number >= 0; 0 means greedy")
        if self.top_k < 0:
            raise ConfigError(f"top_k ({self.top_k}) must be >= 0; 0 keeps all tokens")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p ({self.top_p}) must be in (0, 1]; 1 keeps all tokens")


@dataclass(frozen=True)
class NewToken:
    """One generated token."""

    prompt: int  # index of its prompt
    sample: int  # and of its sample
    position: int  # position in its sequence, prompt included
    token: int
    # why the sequence ends with this token; empty if it goes on. ``context``: max_position_embeddings is reached.
    finish: FinishReason


@dataclass
class _Sequence:
    prompt: int
    sample: int
    tokens: list[int]
    finish: FinishReason = ""


def candidates(logits: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Return ids int64 [c], most probable first, and probabilities fp64 [c] of the next token, from logits [v]."""
    wide = logits.detach().to("cpu", torch.float64)
    number = sampling.top_k if 0 < sampling.top_k < wide.numel() else wide.numel()
    ids = torch.arange(wide.numel())
    if number < wide.numel():
        # a sort of a whole vocabulary takes longer than the step of a small model: sort the k-th, its equals and above
        ids = (wide >= torch.topk(wide, number).values[-1]).nonzero()[:, 0]
    ordered, places = torch.sort(wide[ids], descending=True, stable=True)  # on ties the lower id first
    ordered, ids = ordered[:number], ids[places[:number]]
    # the maximum is subtracted before the division, so that no temperature overflows
    probs = torch.softmax((ordered - ordered[0]) / sampling.temperature, dim=0)
    if sampling.top_p < 1:
        reached_before = torch.cumsum(probs, dim=0) - probs
        number = max(1, int((reached_before < sampling.top_p).sum()))
        ids, probs = ids[:number], probs[:number] / probs[:number].sum()
    return ids, probs


def choose(logits: Tensor, sampling: Sampling, sample: int, position: int) -> int:
    """Choose the next token id from logits [v]. Raises NumericsError if they are not finite."""
    logits = logits.cpu()
    if not bool(torch.isfinite(logits).all()):
        problem = "the weights are damaged, or overflow"
        raise NumericsError(
            f"the logits at position {position} are not finite: {problem} in {logits.dtype}; try --dtype float32"
        )
    if sampling.temperature == 0:
        return int((logits == logits.max()).nonzero()[0, 0])
    # no random state: a sample is the same whatever else is generated, and in whatever order. (But products of a batch
    # round differently than those of a sequence alone.)
    ids, probs = candidates(logits, sampling)
    cumulative = torch.cumsum(probs, dim=0)
    index = int(torch.searchsorted(cumulative, uniform(sampling.seed, sample, position) * cumulative[-1], right=True))
    return int(ids[min(index, ids.numel() - 1)])


def uniform(seed: int, sample: int, position: int) -> float:
    # a hash of the arguments, in [0, 1)
    digest = hashlib.blake2b(f"{seed}/{sample}/{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2**53


def generate(
    model: GPTModel, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, sampling: Sampling | None = None,
    eod: int | None = None, stop: Sequence[Sequence[int]] = (), vocab_size: int | None = None, num_samples: int = 1,
    decoder: Decoder | None = None,
) -> Iterator[NewToken]:  # fmt: skip
    """Yield each token of the prompts' continuations as soon as it is known. Collective over tp and sp.

    Args:
        prompts: token ids; an empty one starts from ``eod``, which also ends a sequence and is yielded.
        stop: token sequences that end a sequence once generated.
        vocab_size: only ids below this are generated.
        decoder: in place of one of a single row and this vocabulary; tokens of its rows come in turn.
    """
    limit, vocab = model.config.max_positions, model.config.vocab_size or 0
    starts = [[int(token) for token in prompt] or ([] if eod is None else [eod]) for prompt in prompts]
    for index, tokens in enumerate(starts):
        if not tokens:
            why = "is empty and the tokenizer has no end-of-document token to start from"
            raise ConfigError(f"prompt {index} {why}: give some text")
        if len(tokens) > limit:
            raise ConfigError(
                f"prompt {index} has {len(tokens)} tokens, the model's context (max_position_embeddings) is {limit}:"
                f" shorten it by at least {len(tokens) - limit}"
            )
        outside = [token for token in tokens if not 0 <= token < vocab]
        if outside:
            vocabulary = f"the model's vocabulary is 0 to {vocab - 1}"
            raise ConfigError(f"prompt {index} has the token id {outside[0]}, {vocabulary}: use its tokenizer")
    if max_new_tokens < 1 or num_samples < 1:
        raise ConfigError(f"max_new_tokens ({max_new_tokens}) and num_samples ({num_samples}) must be at least 1")
    stops = [list(ids) for ids in stop if len(ids)]
    device = model.embedding.word_embeddings.weight.device

    def pick(logits: Tensor, sequences: list[_Sequence]) -> list[int]:
        by = sampling or Sampling()
        chosen = [choose(row, by, s.sample, len(s.tokens)) for row, s in zip(logits, sequences, strict=True)]
        return agreed(chosen, model.layout, device)  # ranks may round differently

    def ending(tokens: list[int], num_new: int) -> FinishReason:
        # why a sequence ends with these tokens, of which the last ``num_new`` are new; "" if it goes on
        if eod is not None and tokens[-1] == eod:
            return "eod"
        if any(len(ids) <= num_new and tokens[-len(ids) :] == ids for ids in stops):
            return "stop"
        if num_new >= max_new_tokens:
            return "max_new_tokens"
        # the token after the last position can be predicted, but not fed back
        return "context" if len(tokens) > limit else ""

    longest = max((min(len(start) + max_new_tokens, limit) for start in starts), default=0)
    return _generate(decoder or Decoder(model, 1, vocab_size), pick, ending, starts, longest, num_samples)


def _generate(
    decoder: Decoder, pick: Callable[[Tensor, list[_Sequence]], list[int]],
    ending: Callable[[list[int], int], FinishReason], starts: list[list[int]], longest: int, num_samples: int,
) -> Iterator[NewToken]:  # fmt: skip
    waiting = deque((prompt, sample) for prompt in range(len(starts)) for sample in range(num_samples))
    running: list[_Sequence] = []
    decoder.reserve(longest)
    logits_of_prompt = torch.empty(0)
    while waiting or running:
        if waiting and len(running) < decoder.max_rows:
            prompt, sample = waiting.popleft()
            if sample == 0:
                logits_of_prompt = decoder.read(starts[prompt])
            else:
                decoder.again()  # the samples of a prompt share its prefill
            logits, extended = logits_of_prompt, [_Sequence(prompt, sample, list(starts[prompt]))]
            running += extended
        else:
            logits, extended = decoder.step([sequence.tokens[-1] for sequence in running]), list(running)
        for sequence, token in zip(extended, pick(logits, extended), strict=True):
            position = len(sequence.tokens)
            sequence.tokens.append(token)
            sequence.finish = ending(sequence.tokens, len(sequence.tokens) - len(starts[sequence.prompt]))
            yield NewToken(sequence.prompt, sequence.sample, position, token, sequence.finish)
        for row in range(len(running) - 1, -1, -1):  # backwards: the last, which takes a row, has been looked at
            if running[row].finish:
                decoder.drop(row)
                running[row] = running[-1]
                del running[-1]


def complete(
    model: GPTModel, prompts: Sequence[Sequence[int]], *, num_samples: int = 1, **options: object
) -> list[list[list[int]]]:
    """Call ``generate`` and return the new token ids as ``[prompt][sample]``."""
    results: list[list[list[int]]] = [[[] for _ in range(num_samples)] for _ in prompts]
    for new in generate(model, prompts, num_samples=num_samples, **options):  # type: ignore[arg-type]
        results[new.prompt][new.sample].append(new.token)
    return results


def one_after_another(tokens: Iterable[NewToken], num_samples: int) -> Iterator[NewToken]:
    """Yield tokens sequence by sequence; those of later ones wait for their turn."""
    turn, waiting = 0, defaultdict[int, list[NewToken]](list)
    for new in tokens:
        waiting[new.prompt * num_samples + new.sample].append(new)
        while ready := waiting.pop(turn, []):
            yield from ready
            turn += bool(ready[-1].finish)


class TextStream:
    """Incremental detokenizer that holds back incomplete characters."""

    # A character may be spread over several tokens (bytes of UTF-8), and a SentencePiece piece may or may not begin
    # with a space, depending on what precedes it. So the text is the difference of two decodings of a window that
    # begins at an earlier character boundary.

    def __init__(self, decode: Callable[[list[int]], str], context: Sequence[int] = ()) -> None:
        self._decode = decode
        self._ids = list(context)
        self._window = max(0, len(self._ids) - 8)  # a few tokens are enough to tell how the next one joins on
        self._read = len(self._ids)

    def add(self, token: int) -> str:
        """Return the text that a token completes."""
        self._ids.append(token)
        new = self._unread_text()
        if new.endswith("\ufffd"):
            return ""
        if new:
            self._window, self._read = self._read, len(self._ids)
        return new

    def flush(self) -> str:
        new = self._unread_text()
        self._window, self._read = self._read, len(self._ids)
        return new

    def _unread_text(self) -> str:
        # only a context can end within a character (``add`` reads no further then); the next token may complete it
        known = self._decode(self._ids[self._window : self._read]).rstrip("\ufffd")
        return self._decode(self._ids[self._window :])[len(known) :]
