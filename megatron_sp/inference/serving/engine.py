"""Queue of requests and the thread that processes them, with continuous batching.

    waiting --(a free row: prefill of the prompt)--> running --(steps: one token each, in one batch)--> done

Requests join and leave between steps, so a short one never waits for a long one to end. While others run, at most one
prompt is prefilled between two steps; the samples of a prompt share its prefill. In a batch a sequence has the same
tokens as alone up to the rounding of batched products; with one row, exactly the same.

Rank 0 decides; before it calls its decoder it sends the call to the other ranks as JSON, and they do the same (``Slots``).
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
_STOP = "stop"


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
        """Add text; return (text that can be shown, whether a stop was found)."""
        whole = self._held + text
        starts = [at for at in (whole.find(stop) for stop in self._stops) if at >= 0]
        if starts:
            self._held = ""
            return whole[: min(starts)], True
        keep = max((k for stop in self._stops for k in range(1, len(stop)) if whole.endswith(stop[:k])), default=0)
        self._held = whole[len(whole) - keep :]
        return whole[: len(whole) - keep], False

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


class Sequence:
    """A choice during generation: call ``begin`` with the prompt's logits, then ``next`` with those after each generated token."""

    def __init__(self, job: Job, prompt: Prompt, index: int, sample: int, tokenizer: Tokenizer) -> None:
        self.job, self.spec, self.prompt, self.index, self.sample = job, job.spec, prompt, index, sample
        self._tokenizer, self.tokens, self.finished = tokenizer, list(prompt.ids), False
        self._stream, self._stop = TextStream(tokenizer.decode, prompt.ids), StopText(self.spec.stop)
        self._offset = len(prompt.text) if self.spec.echo else 0
        self._shows_prompt = self.spec.echo and self.spec.logprobs is not None
        self.wants_all_logits = self._shows_prompt and len(prompt.ids) > 1

    def begin(self, logits: Tensor) -> Piece:
        """Return the prompt, if it is echoed, and the first token; logits of all positions [s, v] or of the last [1, v]."""
        text, tokens = self.prompt.text if self.spec.echo else "", self._of_prompt(logits) if self._shows_prompt else []
        if self.spec.max_tokens == 0:
            self.finished = True
            return Piece(self.index, text, tokens, "length")
        piece = self.next(logits[-1])
        return Piece(self.index, text + piece.text, tokens + piece.tokens, piece.finish, piece.num_new)

    def next(self, logits: Tensor) -> Piece:
        """Choose the next token from its logits [v]. Raises NumericsError if they are not finite."""
        token = choose(logits, self.spec.sampling, self.sample, len(self.tokens))
        self.tokens.append(token)
        is_end = token == self._tokenizer.eod
        whole = "" if is_end else self._stream.add(token)
        text, stopped = self._stop.add(whole)
        tokens = [] if is_end or self.spec.logprobs is None else [self._describe(self.tokens, logits, self._offset)]
        self._offset += len(whole)
        at_limit = len(self.tokens) - len(self.prompt.ids) >= self.spec.max_tokens
        finish = "stop" if is_end or stopped else "length" if at_limit else None
        if finish is not None and not stopped:  # text that was held back, which may complete a stop
            last, stopped = self._stop.add(self._stream.flush())
            text += last + ("" if stopped else self._stop.flush())
            finish = "stop" if stopped else finish
        self.finished = finish is not None
        return Piece(self.index, text, tokens, finish, num_new=1)

    def _of_prompt(self, logits: Tensor) -> list[TokenInfo]:
        ids, offset, whole = self.prompt.ids, 0, TextStream(self._tokenizer.decode)
        infos = [TokenInfo(self._tokenizer.decode(ids[:1]), None, None, 0)]
        for at, token in enumerate(ids):
            if at:
                infos.append(self._describe(ids[: at + 1], logits[at - 1], offset))
            if at >= self.prompt.num_unwritten and (token != self._tokenizer.eod or self.prompt.has_ends):
                offset += len(whole.add(token))
        return infos

    def _describe(self, tokens: list[int], logits: Tensor, offset: int) -> TokenInfo:
        # the ``logprobs`` entry of the last token
        token, before = tokens[-1], tokens[-5:-1]
        logprobs = torch.log_softmax(logits.double(), dim=0)
        best = logprobs.topk(min(self.spec.logprobs or 0, logprobs.numel()))
        top: dict[str, float] = {}
        for i, value in zip(best.indices.tolist(), best.values.tolist(), strict=True):
            top.setdefault(self._text(before, i), value)  # of those that look alike (parts of characters) the likeliest
        text, own = self._text(before, token), float(logprobs[token])
        return TokenInfo(text, own, top | {text: own} if top else top, offset)

    def _text(self, before: list[int], token: int) -> str:
        """Return the text that a token adds after others (a SentencePiece token alone loses its space), or its own if it adds none."""
        known, both = self._tokenizer.decode(before), self._tokenizer.decode([*before, token])
        added = both[len(known) :] if both.startswith(known) else ""
        return added or self._tokenizer.decode([token])


def _on_all_ranks(name: str) -> Callable[..., Any]:
    def call(self: Slots, *args: Any) -> Any:
        self._tell([name, *args])
        return getattr(self.decoder, name)(*args)

    return call


class Slots:
    """A decoder on all ranks: what rank 0 calls here (see ``Decoder``), the others do, too.

    Args:
        decoder: this rank's, with room for its sequences.
        tell: sends a command to the other ranks; None: there are none, or this is one of them.
    """

    def __init__(self, decoder: Decoder, tell: Callable[[list[Any]], None] | None = None) -> None:
        self.decoder, self.has_followers, self.max_rows = decoder, tell is not None, decoder.max_rows
        self._tell = tell or (lambda command: None)

    read, again, step, drop = (_on_all_ranks(name) for name in ("read", "again", "step", "drop"))

    def idle(self) -> None:
        """Send a no-op, so that the other ranks do not time out."""
        self._tell(["idle"])

    def stop(self) -> None:
        """End ``follow`` on the other ranks."""
        self._tell([_STOP])

    def follow(self, hear: Callable[[], list[Any]]) -> None:
        """Execute the commands of rank 0 until it stops; for all other ranks."""
        while (command := hear())[0] != _STOP:
            getattr(self, command[0])(*command[1:])


class Engine:
    """Engine that processes requests in a thread of its own, from ``start`` to ``stop``.

    Args:
        max_queue: number of sequences that may wait.
        timeout_s: time limit of a request, from its arrival to its last token.
    """

    def __init__(self, slots: Slots, tokenizer: Tokenizer, max_queue: int, timeout_s: float) -> None:
        self._slots, self._tokenizer, self._timeout_s = slots, tokenizer, timeout_s
        self.capacity = slots.max_rows + max_queue
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
        """Queue a request. Raises ApiError: 429 if the queue is full; 503 if the server is shutting down or broken."""
        job = Job(spec, emit, time.monotonic() + self._timeout_s)
        new = [
            Sequence(job, p, i * spec.n + s, s, self._tokenizer)
            for i, p in enumerate(spec.prompts)
            for s in range(spec.n)
        ]
        with self._changed:
            if self.broken or self._stopping or self._drain_until is not None:
                raise _unavailable(self.broken)
            busy = len(self._waiting) + len(self._running)
            if busy + len(new) > self.capacity:
                text = f"the server has {busy} of {self.capacity} places taken, this request needs {len(new)}: try again later"
                raise ApiError(429, text, code="queue_full")
            self._waiting.extend(new)
            self._changed.notify()
        return job

    def cancel(self, job: Job) -> None:
        """Cancel a request, as its client no longer waits or has been answered."""
        job.cancelled = True
        with self._changed:
            self._changed.notify()

    def drain(self, grace_s: float) -> None:
        """Accept no more requests; present ones get 503 after ``grace_s``. For signal handlers; a second call may shorten the time."""
        until = time.monotonic() + grace_s
        self._drain_until = until if self._drain_until is None else min(until, self._drain_until)

    def stop(self) -> None:
        """Stop the thread, and the other ranks."""
        self._stopping = True
        with self._changed:
            self._changed.notify()
        self._thread.join()

    @property
    def counts(self) -> dict[str, int]:
        """Number of running and waiting sequences."""
        return {"running": len(self._running), "waiting": len(self._waiting)}

    # in the engine's thread

    def _work(self, num_threads: int) -> None:
        torch.set_num_threads(num_threads)  # OpenMP keeps the number for each thread
        try:
            while not self._stopping:
                self._wait()
                self._end_late()
                try:
                    self._read_prompts()
                    self._take_step()
                except Exception as error:
                    self._fail(error)
            for job in self._jobs():
                self._end(job, _unavailable())
        finally:
            if not self.broken:
                self._slots.stop()

    def _wait(self) -> None:
        with self._changed:
            if (
                not (self._waiting or self._running or self._stopping)
                and not self._changed.wait(_IDLE_S)
                and not self._stopping
            ):
                self._slots.idle()

    def _jobs(self) -> set[Job]:
        with self._changed:
            return {sequence.job for sequence in (*self._waiting, *self._running)}

    def _end_late(self) -> None:
        # end requests that are cancelled or have exceeded their time limit or that of ``drain``
        now = time.monotonic()
        drained = self._drain_until is not None and now > self._drain_until
        for job in self._jobs():
            if job.cancelled or drained:
                self._end(job, _unavailable())
            elif now > job.deadline:
                self._end(job, ApiError(504, f"the request took longer than {self._timeout_s:g} s", code="timeout"))

    def _end(self, job: Job, error: ApiError) -> None:
        with self._changed:
            self._waiting = deque(sequence for sequence in self._waiting if sequence.job is not job)
        for row in range(len(self._running) - 1, -1, -1):
            if self._running[row].job is job:
                self._drop(row)
        if self._shared is not None and self._shared[0].job is job:
            self._shared = None
        self._emit(job, error)

    def _drop(self, row: int) -> None:
        self._slots.drop(row)
        last = self._running.pop()
        if row < len(self._running):
            self._running[row] = last

    def _read_prompts(self) -> None:
        while self._waiting and len(self._running) < self._slots.max_rows:
            busy, sequence = bool(self._running), self._waiting[0]  # it keeps its place until it has a row
            self._reading, needs_row = sequence.job, sequence.spec.max_tokens > 1
            is_read = self._shared is not None and self._shared[0].prompt is sequence.prompt
            if self._shared is None or not is_read:
                logits = self._slots.read(sequence.prompt.ids, needs_row, sequence.wants_all_logits)
            else:
                logits = self._shared[1]
                if needs_row:
                    self._slots.again()
            self._shared = (sequence, logits) if sequence.sample + 1 < sequence.spec.n else None
            with self._changed:
                self._waiting.popleft()
                self._running += [sequence] if needs_row else []
            self._emit(sequence.job, sequence.begin(logits))
            self._reading = None
            if sequence.finished and needs_row:
                self._drop(len(self._running) - 1)
            if busy and not is_read:
                return

    def _take_step(self) -> None:
        if not self._running:
            return
        logits = self._slots.step([sequence.tokens[-1] for sequence in self._running])
        for row in range(
            len(self._running) - 1, -1, -1
        ):  # backwards: a freed row is filled by the last, already handled
            sequence = self._running[row]
            self._emit(sequence.job, sequence.next(logits[row]))
            if sequence.finished:
                self._drop(row)

    def _emit(self, job: Job, event: Event) -> None:
        if not job.cancelled:
            job.emit(event)

    def _fail(self, error: Exception) -> None:
        """End running requests with an error. A single process goes on; with other ranks, whose state is unknown, the engine stops."""
        message = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        print(f"error: {message}", file=sys.stderr, flush=True)
        if self._slots.has_followers:
            self.broken, self._stopping = f"the model failed: {message}", True
        for job in {sequence.job for sequence in self._running} | (
            {self._reading} if self._reading is not None else set()
        ):
            job.emit(ApiError(500, f"the model failed: {message}", code="model_error"))
            job.cancelled = True
        self._running.clear()
        self._reading = self._shared = None
        self._slots.decoder.clear()


def _unavailable(text: str = "") -> ApiError:
    return ApiError(503, text or "the server is shutting down", code="unavailable")
