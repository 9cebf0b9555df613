"""State of one choice of a request during generation: its tokens, its text up to a stop, and log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_sp.data.tokenizers import Tokenizer
from megatron_sp.inference.generation import TextStream, choose
from megatron_sp.inference.serving.request import Completion, Prompt


@dataclass
class TokenInfo:
    """Entry of a token in ``logprobs``: its text, log-probability (None for the first of a prompt), top alternatives, text offset.

    Tokens that are parts of one character have the offset of that character.
    """

    text: str
    logprob: float | None
    top: dict[str, float] | None
    offset: int


@dataclass
class Piece:
    """New output of a choice.

    Attributes:
        index: index of the choice.
        text: new text; may be empty, as text that may be the beginning of a stop is held back.
        tokens: ``logprobs`` entries of the new tokens.
        finish: "stop" or "length" at the end; else None.
        num_new: number of newly generated tokens, including end-of-document.
    """

    index: int
    text: str
    tokens: list[TokenInfo] = field(default_factory=list)
    finish: str | None = None
    num_new: int = 0


class StopText:
    """Filter that passes text up to the first stop, and holds back what may be the beginning of one."""

    def __init__(self, stops: Several[str]) -> None:
        self._stops, self._held = stops, ""

    def add(self, text: str) -> tuple[str, bool]:
        """Add text; return (text that can be shown, whether a stop was found)."""
        whole = self._held + text
        found = [at for at in (whole.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self._held = ""
            return whole[: min(found)], True
        keep = max((k for stop in self._stops for k in range(1, len(stop)) if whole.endswith(stop[:k])), default=0)
        self._held = whole[len(whole) - keep :]
        return whole[: len(whole) - keep], False

    def flush(self) -> str:
        """Return the text that was held back, at the end."""
        held, self._held = self._held, ""
        return held


class Sequence:
    """A choice during generation: call ``begin`` with the prompt's logits, then ``next`` with those after each generated token."""

    def __init__(self, spec: Completion, prompt: Prompt, index: int, sample: int, tokenizer: Tokenizer) -> None:
        self.spec, self.prompt, self.index, self.sample, self._tokenizer = spec, prompt, index, sample, tokenizer
        self.tokens = list(prompt.ids)
        self._stream = TextStream(tokenizer.decode, prompt.ids)
        self._stop = StopText(spec.stop)
        self._offset = len(prompt.text) if spec.echo else 0
        self.finished = False

    @property
    def wants_all_logits(self) -> bool:
        """True if the logits of all positions of the prompt are needed."""
        return self.spec.echo and self.spec.logprobs is not None and len(self.prompt.ids) > 1

    def begin(self, logits: Tensor) -> Piece:
        """Return the prompt, if it is echoed, and the first token.

        Args:
            logits: those of all positions of the prompt [s, v], or only of the last [1, v].
        """
        first = Piece(self.index, self.prompt.text if self.spec.echo else "")
        if self.spec.echo and self.spec.logprobs is not None:
            first.tokens = self._of_prompt(logits)
        if self.spec.max_tokens == 0:
            first.finish, self.finished = "length", True
            return first
        piece = self.next(logits[-1])
        return Piece(self.index, first.text + piece.text, first.tokens + piece.tokens, piece.finish, piece.num_new)

    def next(self, logits: Tensor) -> Piece:
        """Choose the next token from its logits [v].

        Raises:
            NumericsError: the logits are not finite.
        """
        token = choose(logits, self.spec.sampling, self.sample, len(self.tokens))
        self.tokens.append(token)
        is_end = token == self._tokenizer.eod
        whole = "" if is_end else self._stream.add(token)
        text, stopped = self._stop.add(whole)
        tokens = [] if is_end or self.spec.logprobs is None else [self._describe(self.tokens, logits, self._offset)]
        self._offset += len(whole)
        piece = Piece(self.index, text, tokens, num_new=1)
        if is_end or stopped:
            piece.finish = "stop"
        elif len(self.tokens) - len(self.prompt.ids) >= self.spec.max_tokens:
            piece.finish = "length"
        if piece.finish is not None:
            self.finished = True
            if not stopped:
                last, stopped = self._stop.add(self._stream.flush())
                piece.text += last + ("" if stopped else self._stop.flush())
                piece.finish = "stop" if stopped else piece.finish
        return piece

    def _of_prompt(self, logits: Tensor) -> list[TokenInfo]:
        found, offset, whole = [], 0, TextStream(self._tokenizer.decode)
        for at, token in enumerate(self.prompt.ids):
            if at == 0:
                info = TokenInfo(self._tokenizer.decode([token]), None, None, 0)
            else:
                info = self._describe(self.prompt.ids[: at + 1], logits[at - 1], offset)
            found.append(info)
            if at >= self.prompt.num_unwritten and (token != self._tokenizer.eod or self.prompt.has_ends):
                offset += len(whole.add(token))
        return found

    def _describe(self, tokens: list[int], logits: Tensor, offset: int) -> TokenInfo:
        """Return the ``logprobs`` entry of the last token."""
        token, before = tokens[-1], tokens[-5:-1]
        told = torch.log_softmax(logits.double(), dim=0)
        best = told.topk(min(self.spec.logprobs or 0, told.numel()))
        top: dict[str, float] = {}
        for i, value in zip(best.indices.tolist(), best.values.tolist(), strict=True):
            top.setdefault(self._text(before, i), value)  # of those that look alike (parts of characters) the likeliest
        text = self._text(before, token)
        return TokenInfo(text, float(told[token]), top | {text: float(told[token])} if top else top, offset)

    def _text(self, before: list[int], token: int) -> str:
        """Return the text that a token adds after others (a SentencePiece token alone loses its space), or its own if it adds none."""
        known, both = self._tokenizer.decode(before), self._tokenizer.decode([*before, token])
        added = both[len(known) :] if both.startswith(known) else ""
        return added or self._tokenizer.decode([token])


def logprobs_of(tokens: list[TokenInfo]) -> dict[str, Any]:
    """Return OpenAI's ``logprobs`` object of parallel lists."""
    return {
        "tokens": [t.text for t in tokens], "token_logprobs": [t.logprob for t in tokens], "top_logprobs": [t.top for t in tokens],
        "text_offset": [t.offset for t in tokens],
    }  # fmt: skip
