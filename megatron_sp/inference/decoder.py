"""Sequences that a model continues together, a token each in every step; on a GPU the step is captured in CUDA graphs.

    read (a prompt, into the next row) | again (the same, for another sample) | step (a token per row) | drop (a row)

Source: vLLM and gpt-fast (static cache, graphs by size).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_sp.models.gpt import GPTModel
from megatron_sp.ops.attention import AttentionMask
from megatron_sp.ops.cuda_graphs import Graph, GraphMaker, first_words
from megatron_sp.parallel.forward_context import Cache, ForwardContext
from megatron_sp.utils.errors import ConfigError

_LEAST_SPAN = 256


class KVCache:
    """Keys and values of up to ``max_rows`` sequences; never moves once allocated."""

    def __init__(self, num_layers: int, max_rows: int, max_length: int) -> None:
        self.max_rows, self.max_length = max_rows, max_length
        self._layers: list[tuple[Tensor, Tensor] | None] = [None] * num_layers

    def of_layer(self, layer: int, like: Tensor, groups: int) -> tuple[Tensor, Tensor]:
        """Return a layer's buffers, [max_length, max_rows, groups, 1, d]."""
        buffers = self._layers[layer]
        if buffers is None:
            shape = (self.max_length, self.max_rows, groups, 1, like.shape[-1])
            # zeros: a hidden position counts 0 times what is there, which must not be NaN
            buffers = self._layers[layer] = like.new_zeros(shape), like.new_zeros(shape)
        return buffers

    def buffers(self) -> list[Tensor]:
        return [buffer for pair in self._layers if pair is not None for buffer in pair]

    def copy(self, row: int, to: int, length: int) -> None:
        for buffer in self.buffers():
            buffer[:length, to] = buffer[:length, row]


class RowPass:
    """Appends positions to one row (a ``forward_context.Cache``)."""

    def __init__(self, cache: KVCache, row: int, start: int) -> None:
        self._cache, self._row, self._start = cache, row, start

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        start, end, row = self._start, self._start + k.shape[0], self._row  # k, v [s_new, m, 1, d]
        keys, values = self._cache.of_layer(layer, k, k.shape[1])
        keys[start:end, row], values[start:end, row] = k, v
        return (keys[:end, row], values[:end, row]) if start else (k, v)

    def positions(self, num_new: int, device: torch.device) -> Tensor:
        return torch.arange(self._start, self._start + num_new, device=device)  # [num_new]

    def mask(self, groups: int, window: int | None) -> AttentionMask:
        return AttentionMask(window=window)


class StepPass:
    """Appends one position to each of the first rows; its work depends on ``span`` alone."""

    def __init__(self, cache: KVCache, lengths: Tensor, span: int) -> None:
        # lengths: int64 [b] on the rows' device; span: number of keys that are read, more than the longest has
        self._cache, self._lengths, self._span = cache, lengths, span
        self._places = lengths * cache.max_rows + torch.arange(lengths.shape[0], device=lengths.device)
        self._dtype = torch.float32
        self._bias: Tensor | None = None

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        rows = self._lengths.shape[0]
        self._dtype, groups = k.dtype, k.shape[1] // rows  # k, v [1, b*m, 1, d]
        cached = []
        for kept, new in zip(self._cache.of_layer(layer, k, groups), (k, v), strict=True):
            kept.flatten(0, 1).index_copy_(0, self._places, new.view(rows, groups, *new.shape[2:]))
            cached.append(kept[: self._span, :rows].flatten(1, 2))  # a view
        return cached[0], cached[1]

    def positions(self, num_new: int, device: torch.device) -> Tensor:
        assert num_new == 1, "sequences of different lengths get one position at a time"
        return self._lengths[:, None]  # [b, 1]

    def mask(self, groups: int, window: int | None) -> AttentionMask:
        if self._bias is None:  # the layers share one
            key, last = torch.arange(self._span, device=self._lengths.device), self._lengths[:, None]
            hidden = key > last if window is None else (key > last) | (key <= last - window)
            bias = torch.zeros(hidden.shape, dtype=self._dtype, device=hidden.device)
            bias.masked_fill_(hidden, float("-inf"))
            self._bias = bias.repeat_interleave(groups, 0)[:, None, None]  # [b*m, 1, 1, span]
        return AttentionMask(causal=False, bias=self._bias)


@dataclass(frozen=True)
class Capture:
    new_maker: Callable[[], GraphMaker]  # makes a maker of graphs, with a pool of its own
    must: bool = False  # an error if a capture fails; else it is a line, and steps are eager
    of_all: Callable[[Any], list[Any]] = lambda value: [value]  # returns the values of all ranks on every rank
    tell: Callable[[str], None] = lambda line: None  # says a line to the user


class Decoder:
    """Up to ``max_rows`` sequences in rows without gaps. Returns logits on the CPU. Collective over tp and sp."""

    def __init__(
        self, model: GPTModel, max_rows: int = 1, vocab_size: int | None = None, *, capture: Capture | None = None
    ) -> None:
        self.model, self.max_rows, self.vocab_size = model, max_rows, vocab_size
        self._capture = capture
        self._device = model.embedding.word_embeddings.weight.device
        self._has_told = False
        self.lengths: list[int] = []
        self._prompt = 0, 0  # row and length of the prompt that was read last
        self._allocate(0)

    def _allocate(self, length: int) -> None:
        self._cache = KVCache(len(self.model.stack.layers), self.max_rows, length)
        self._steps: dict[tuple[int, int], _CapturedStep | None] = {}  # by number of rows and span
        self._maker = None if self._capture is None else self._capture.new_maker()

    def reserve(self, length: int) -> None:
        """Drop all sequences, and make room for ``length`` positions."""
        self.lengths, self._prompt = [], (0, 0)
        length = length if self._maker is None else _span(length)
        if length > self._cache.max_length:
            self._allocate(length)
        if self._maker is not None and not self._steps:
            # a trial before any prompt, so that no token depends on what it finds
            self.lengths = [0]
            self.step([0])
            self.lengths = []
            if not any(self._steps.values()):
                self._capture = self._maker = None

    def clear(self) -> None:
        self.lengths = []  # what it has left need not be numbers
        for buffer in self._cache.buffers():
            buffer.zero_()

    def read(self, tokens: list[int], keep: bool = True, everywhere: bool = False) -> Tensor:
        """Prefill a prompt, with ``keep`` into the next row; return logits [s, v] (``everywhere``) or [1, v]."""
        ids = torch.tensor([tokens], dtype=torch.int64, device=self._device)
        context = self._context(RowPass(self._cache, len(self.lengths), 0) if keep else None)
        logits = self.model.all_logits(ids, context)[:, 0] if everywhere else self.model.next_logits(ids, context)
        if keep:
            assert len(self.lengths) < self.max_rows, "there is no room for another sequence"
            self._prompt = len(self.lengths), len(tokens)
            self.lengths.append(len(tokens))
        return logits[:, : self.vocab_size].cpu()

    def again(self) -> None:
        """Put the last prompt into another row."""
        row, length = self._prompt
        if row != len(self.lengths):
            self._cache.copy(row, len(self.lengths), length)
        self.lengths.append(length)

    def drop(self, row: int) -> None:
        """Drop a row; the last takes its number."""
        last = len(self.lengths) - 1
        if row != last:  # behind the row of the prompt that was read last are samples of the same: it stays there
            self._cache.copy(last, row, self.lengths[last])
        self.lengths[row] = self.lengths[last]
        del self.lengths[last]

    def step(self, tokens: list[int]) -> Tensor:
        """Append a token to each row; return the logits after them, [rows, v]."""
        given, longest = torch.tensor([tokens, self.lengths]), max(self.lengths) + 1
        if self._maker is not None:
            shape = len(tokens), _span(longest)
            if (captured := self._steps.get(shape)) is not None:
                logits = captured.replay(given)[:, : self.vocab_size].cpu()
            else:
                logits = self._run(given.to(self._device), shape[1])[:, : self.vocab_size].cpu()
                if shape not in self._steps:
                    self._steps[shape] = self._try(given, shape[1], logits)
        elif len(tokens) > 1:
            logits = self._run(given.to(self._device), longest)[:, : self.vocab_size].cpu()
        else:  # without a mask
            context = self._context(RowPass(self._cache, 0, self.lengths[0]))
            logits = self.model.next_logits(given[:1].to(self._device), context)[:, : self.vocab_size].cpu()
        self.lengths = [length + 1 for length in self.lengths]
        return logits

    def _context(self, cache: Cache | None) -> ForwardContext:
        return ForwardContext(AttentionMask(), cache=cache)

    def _run(self, given: Tensor, span: int) -> Tensor:
        # logits [b, v] after tokens given[0] at positions given[1]; what is captured reads nothing else of the host's
        return self.model.next_logits(given[0][:, None], self._context(StepPass(self._cache, given[1], span)))

    def _try(self, given: Tensor, span: int, wanted: Tensor) -> _CapturedStep | None:
        # capture a step that has just run eagerly; None if that fails, or gives other bits, on some rank. Collective
        assert self._capture is not None and self._maker is not None
        captured, problem = None, ""
        try:
            captured = _CapturedStep(self._maker, lambda given: self._run(given, span), given.to(self._device))
        except RuntimeError as error:
            problem = f"the capture failed: {first_words(error)}"
        problem = next(filter(None, self._capture.of_all(problem)), "")
        if captured is not None and not problem and not self._capture.must:
            replayed = captured.replay(given)[:, : self.vocab_size].cpu()  # the same token to the same place
            differs = not torch.equal(replayed.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8))
            bits = "a replay has other bits than an eager step" if differs else ""
            problem = next(filter(None, self._capture.of_all(bits)), "")
        if problem and self._capture.must:
            raise ConfigError(f"--cuda-graphs on cannot be: {problem}; use --cuda-graphs auto or off")
        if problem or not self._has_told:
            outcome = f"not used, {problem}" if problem else "used (the bits of an eager step)"
            self._capture.tell(f"captured steps: {outcome}")
        self._has_told = True
        return None if problem else captured


class _CapturedStep:
    def __init__(self, maker: GraphMaker, run: Callable[[Tensor], Tensor], given: Tensor) -> None:
        self._given = given

        def record() -> None:
            self._logits = run(given)

        self._graph: Graph = maker.capture(record)

    def replay(self, given: Tensor) -> Tensor:
        # the logits [b, v], which are overwritten by the next replay of any graph, as all share one pool
        self._given.copy_(given)
        self._graph.replay()
        return self._logits


def _span(length: int) -> int:
    # the number of keys that a captured step reads for sequences of this length: at most a quarter more
    step = max(_LEAST_SPAN, (1 << (length - 1).bit_length()) // 8)
    return -(-length // step) * step
