"""Queue of requests and the thread that processes them, with continuous batching.

    waiting --(a free row: prefill of the prompt)--> running --(steps: one token each, in one batch)--> done

Requests join and leave between steps, so a short one never waits for a long one to end. While others run, at most one
prompt is prefilled between two steps. In a batch a sequence has the tokens it has alone, up to rounding.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_sp.data.tokenizers import Tokenizer
from megatron_sp.inference.decoder import Decoder
from megatron_sp.inference.generation import TextStream, choose
from megatron_sp.inference.serving.request import ApiError, Completion, Prompt

_IDLE_S = 30.0  # interval of rank 0's messages to the other ranks while idle


@dataclass
class TokenInfo:
    """Entry of a token in ``logprobs``; parts of one character have the offset of that character."""

    text: str
    logprob: float | None  # None for the first token of a prompt
    top: dict[str, float] | None
    offset: int


@dataclass
class Piece:
    """New output of choice ``index``; the text may be empty, as what may be the beginning of a stop is held back."""

    index: int
    text: str
    tokens: list[TokenInfo] = field(default_factory=list)
    finish: str | None = None  # "stop" or "length" at the end
    num_new: int = 0  # generated tokens, including end-of-document


Event = Piece | ApiError


@dataclass(eq=False)
class Job:
    """A request in the engine."""

    spec: Completion
    emit: Callable[[Event], None]  # called in the engine's thread; not again after an ApiError
    deadline: float  # time.monotonic()
    cancelled: bool = False  # the client no longer waits; may be set at any time


class StopText:
    """Filter that passes text up to the first stop, and holds back what may be the beginning of one."""

    def __init__(self, stops: Several[str]) -> None:
        self._stops, self._held = stops, ""

    def add(self, text: str) -> tuple[str, bool]:
        # (text that can be shown, whether a stop was found)
        text, self._held = self._held + text, ""
        starts = [start for start in map(text.find, self._stops) if start >= 0]
        if starts:
            return text[: min(starts)], True
        keep = max((k for stop in self._stops for k in range(1, len(stop)) if text.endswith(stop[:k])), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


class Sequence:
    """A choice: ``begin`` with its prompt's logits, then ``next`` with those after each generated token."""

    def __init__(self, job: Job, prompt: Prompt, index: int, sample: int, tokenizer: Tokenizer) -> None:
        self.job, self.spec, self.prompt, self.index, self.sample = job, job.spec, prompt, index, sample
        self._tokenizer, self.tokens, self.finished = tokenizer, list(prompt.ids), False
        self._stream, self._stop = TextStream(tokenizer.decode, prompt.ids), StopText(self.spec.stop)
        self._offset = len(prompt.text) if self.spec.echo else 0
        self._shows_prompt = self.spec.echo and self.spec.logprobs is not None
        self.wants_all_logits = self._shows_prompt and len(prompt.ids) > 1

    def begin(self, logits: Tensor) -> Piece:
        # the prompt, if it is echoed, and the first token; logits of all positions [s, v] or the last [1, v]
        text = self.prompt.text if self.spec.echo else ""
        tokens = self._of_prompt(logits) if self._shows_prompt else []
        if self.spec.max_tokens == 0:
            self.finished = True
            return Piece(self.index, text, tokens, "length")
        piece = self.next(logits[-1])
        return Piece(self.index, text + piece.text, tokens + piece.tokens, piece.finish, piece.num_new)

    def next(self, logits: Tensor) -> Piece:
        # the next token, from its logits [v]
        token = choose(logits, self.spec.sampling, self.sample, len(self.tokens))
        self.tokens.append(token)
        is_end = token == self._tokenizer.eod
        new = "" if is_end else self._stream.add(token)
        text, stopped = self._stop.add(new)
        tokens = [] if is_end or self.spec.logprobs is None else [self._describe(self.tokens, logits, self._offset)]
        self._offset += len(new)
        at_limit = len(self.tokens) - len(self.prompt.ids) >= self.spec.max_tokens
        finish = "stop" if is_end or stopped else "length" if at_limit else None
        if finish is not None and not stopped:  # text that was held back, which may complete a stop
            last, stopped = self._stop.add(self._stream.flush())
            text += last + ("" if stopped else self._stop.flush())
            finish = "stop" if stopped else finish
        self.finished = finish is not None
        return Piece(self.index, text, tokens, finish, num_new=1)

    def _of_prompt(self, logits: Tensor) -> list[TokenInfo]:
        ids, offset, stream = self.prompt.ids, 0, TextStream(self._tokenizer.decode)
        infos = [TokenInfo(self._tokenizer.decode(ids[:1]), None, None, 0)]
        for place, token in enumerate(ids):
            if place:
                infos.append(self._describe(ids[: place + 1], logits[place - 1], offset))
            if place >= self.prompt.num_unwritten and (token != self._tokenizer.eod or self.prompt.has_ends):
                offset += len(stream.add(token))
        return infos

    def _describe(self, tokens: list[int], logits: Tensor, offset: int) -> TokenInfo:
        # the ``logprobs`` entry of the last token
        token, before = tokens[-1], tokens[-5:-1]
        known = self._tokenizer.decode(before)

        def text_of(token: int) -> str:
            # what it adds after others (a SentencePiece token alone loses its space), or its own text if it adds none
            both = self._tokenizer.decode([*before, token])
            return (both[len(known) :] if both.startswith(known) else "") or self._tokenizer.decode([token])

        logprobs = torch.log_softmax(logits.double(), dim=0)
        best = logprobs.topk(min(self.spec.logprobs or 0, logprobs.numel()))
        top: dict[str, float] = {}
        for i, value in zip(best.indices.tolist(), best.values.tolist(), strict=True):
            top.setdefault(text_of(i), value)  # of those that look alike (parts of characters) the likeliest
        text, own = text_of(token), float(logprobs[token])
        return TokenInfo(text, own, top | {text: own} if top else top, offset)


class Slots:
    """A decoder on all ranks: what rank 0 calls here, the others do in ``follow``.

    ``tell`` sends a command to the other ranks; None: there are none, or this is one of them.
    """

    def __init__(self, decoder: Decoder, tell: Callable[[list[Any]], None] | None = None) -> None:
        self.decoder, self.has_followers, self.tell = decoder, tell is not None, tell or (lambda command: None)

    def call(self, name: str, *args: Any) -> Any:
        self.tell([name, *args])
        return getattr(self.decoder, name)(*args)

    def follow(self, hear: Callable[[], list[Any]]) -> None:
        """Execute the commands of rank 0 until it stops."""
        while (command := hear())[0] != "stop":
            if command[0] != "idle":
                getattr(self.decoder, command[0])(*command[1:])


class Engine:
    """Processes requests in a thread of its own, from ``start`` to ``stop``; ``max_queue`` sequences may wait."""

    def __init__(self, slots: Slots, tokenizer: Tokenizer, max_queue: int, timeout_s: float) -> None:
        self._slots, self._tokenizer, self._timeout_s = slots, tokenizer, timeout_s
        self._max_rows = slots.decoder.max_rows
        self.capacity = self._max_rows + max_queue
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []  # sequence i is in row i
        self._reading: Job | None = None  # whose prompt the model has now
        self._shared: tuple[Sequence, Tensor] | None = None  # logits of the last prompt, if more samples wait for them
        self._changed = threading.Condition()
        self._stopping, self.broken = False, ""
        self._drain_until: float | None = None
        self._thread = threading.Thread(target=self._work, args=(torch.get_num_threads(),), name="engine", daemon=True)
        self.start = self._thread.start

    # from any thread

    def submit(self, spec: Completion, emit: Callable[[Event], None]) -> Job:
        """Queue a request. Raises ApiError if the queue is full, or the server is shutting down or broken."""
        job, new = Job(spec, emit, time.monotonic() + self._timeout_s), list[Sequence]()
        for prompt in spec.prompts:
            new += [Sequence(job, prompt, len(new) + sample, sample, self._tokenizer) for sample in range(spec.n)]
        with self._changed:
            if self.broken or self._stopping or self._drain_until is not None:
                raise _unavailable(self.broken)
            busy = len(self._waiting) + len(self._running)
            if busy + len(new) > self.capacity:
                places = f"{busy} of {self.capacity} places taken, this request needs {len(new)}"
                raise ApiError(429, f"the server has {places}: try again later", code="queue_full")
            self._waiting.extend(new)
            self._changed.notify()
        return job

    def cancel(self, job: Job) -> None:
        # its client no longer waits or has been answered
        job.cancelled = True
        with self._changed:
            self._changed.notify()

    def drain(self, grace_s: float) -> None:
        """Accept no more requests, and end present ones after ``grace_s``, which a second call may shorten."""
        # without the lock, as signal handlers call it
        until = time.monotonic() + grace_s
        self._drain_until = until if self._drain_until is None else min(until, self._drain_until)

    def stop(self) -> None:
        self._stopping = True
        with self._changed:
            self._changed.notify()
        self._thread.join()

    @property
    def counts(self) -> dict[str, int]:
        return {"running": len(self._running), "waiting": len(self._waiting)}

    # in the engine's thread

    def _work(self, num_threads: int) -> None:
        torch.set_num_threads(num_threads)  # OpenMP keeps the number for each thread
        try:
            while not self._stopping:
                with self._changed:
                    is_idle = not (self._waiting or self._running or self._stopping)
                    if is_idle and not self._changed.wait(_IDLE_S) and not self._stopping:
                        self._slots.tell(["idle"])  # so that the other ranks do not time out
                now = time.monotonic()
                drained = self._drain_until is not None and now > self._drain_until
                for job in self._jobs():
                    if job.cancelled or drained:
                        self._end(job, _unavailable())
                    elif now > job.deadline:
                        late = f"the request took longer than {self._timeout_s:g} s"
                        self._end(job, ApiError(504, late, code="timeout"))
                try:
                    self._read_prompts()
                    if self._running:
                        self._take_step()
                except Exception as error:
                    self._fail(error)
            for job in self._jobs():
                self._end(job, _unavailable())
        finally:
            if not self.broken:
                self._slots.tell(["stop"])

    def _jobs(self) -> set[Job]:
        with self._changed:
            return {sequence.job for sequence in (*self._waiting, *self._running)}

    def _end(self, job: Job, error: ApiError) -> None:
        with self._changed:
            self._waiting = deque(sequence for sequence in self._waiting if sequence.job is not job)
        for row in range(len(self._running) - 1, -1, -1):
            if self._running[row].job is job:
                self._drop(row)
        if self._shared is not None and self._shared[0].job is job:
            self._shared = None
        if not job.cancelled:
            job.emit(error)

    def _drop(self, row: int) -> None:
        self._slots.call("drop", row)
        last = self._running.pop()
        if row < len(self._running):
            self._running[row] = last

    def _read_prompts(self) -> None:
        while self._waiting and len(self._running) < self._max_rows:
            busy, sequence = bool(self._running), self._waiting[0]  # it keeps its place until it has a row
            job, needs_row = sequence.job, sequence.spec.max_tokens > 1
            self._reading, shared = job, self._shared
            if shared is not None and shared[0].prompt is sequence.prompt:
                logits, is_read = shared[1], True
                if needs_row:
                    self._slots.call("again")
            else:
                is_read = False
                logits = self._slots.call("read", sequence.prompt.ids, needs_row, sequence.wants_all_logits)
            self._shared = (sequence, logits) if sequence.sample + 1 < sequence.spec.n else None
            with self._changed:
                self._waiting.popleft()
                self._running += [sequence] if needs_row else []
            piece = sequence.begin(logits)
            if not job.cancelled:
                job.emit(piece)
            self._reading = None
            if sequence.finished and needs_row:
                self._drop(len(self._running) - 1)
            if busy and not is_read:
                return

    def _take_step(self) -> None:
        logits = self._slots.call("step", [sequence.tokens[-1] for sequence in self._running])
        for row in range(len(self._running) - 1, -1, -1):  # backwards: the last, which fills a freed row, is done
            sequence = self._running[row]
            piece = sequence.next(logits[row])
            if not sequence.job.cancelled:
                sequence.job.emit(piece)
            if sequence.finished:
                self._drop(row)

    def _fail(self, error: Exception) -> None:
        # a single process goes on; with other ranks, whose state is unknown, the engine stops
        message = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        print(f"error: {message}", file=sys.stderr, flush=True)
        if self._slots.has_followers:
            self.broken, self._stopping = f"the model failed: {message}", True
        jobs = {sequence.job for sequence in self._running}
        for job in jobs | ({self._reading} if self._reading is not None else set()):
            job.emit(ApiError(500, f"the model failed: {message}", code="model_error"))
            job.cancelled = True
        self._running.clear()
        self._reading = self._shared = None
        self._slots.decoder.clear()


def _unavailable(text: str = "") -> ApiError:
    return ApiError(503, text or "the server is shutting down", code="unavailable")
