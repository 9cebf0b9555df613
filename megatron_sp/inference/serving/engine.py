"""Queue of requests and the thread that processes them, with continuous batching.

    waiting --(a free row: prefill of the prompt)--> running --(steps: one token each, in one batch)--> done

Requests join and leave between steps, so a short one never waits for a long one to end. While others run, at most one
prompt is prefilled between two steps; the samples of a prompt share its prefill. In a batch a sequence has the same
tokens as alone up to the rounding of batched products; with one row, exactly the same.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_sp.data.tokenizers import Tokenizer
from megatron_sp.inference.serving.request import ApiError, Completion
from megatron_sp.inference.serving.sequence import Piece, Sequence
from megatron_sp.inference.serving.slots import Slots

Event = Piece | ApiError
_IDLE_S = 30.0  # interval of rank 0's messages to the other ranks while idle


@dataclass(eq=False)
class Job:
    """A request in the engine.

    Attributes:
        emit: called in the engine's thread with each piece; after an ``ApiError`` it is not called again.
        deadline: in the time of time.monotonic().
        cancelled: the client is no longer waiting; may be set at any time.
    """

    spec: Completion
    emit: Callable[[Event], None]
    deadline: float
    cancelled: bool = False


class _Entry(NamedTuple):
    job: Job
    sequence: Sequence


class Engine:
    """Engine that processes requests in a thread of its own, from ``start`` to ``stop``.

    Args:
        slots: the model with its running sequences.
        tokenizer: the model's tokenizer.
        max_queue: number of sequences that may wait.
        timeout_s: time limit of a request, from its arrival to its last token.
    """

    def __init__(self, slots: Slots, tokenizer: Tokenizer, max_queue: int, timeout_s: float) -> None:
        self._slots, self._tokenizer, self._timeout_s = slots, tokenizer, timeout_s
        self.capacity = slots.max_rows + max_queue
        self._waiting: deque[_Entry] = deque()
        self._running: list[_Entry] = []  # entry i is row i
        self._reading: Job | None = None  # whose prompt the model has now
        self._shared: tuple[_Entry, Tensor] | None = None  # logits of the prompt that was read last, if more samples wait for them
        self._changed = threading.Condition()
        self._stopping = False
        self._drain_until: float | None = None
        self.broken: str = ""
        self._thread = threading.Thread(target=self._work, args=(torch.get_num_threads(),), name="engine", daemon=True)

    # from any thread

    def start(self) -> None:
        """Start the engine's thread."""
        self._thread.start()

    def submit(self, spec: Completion, emit: Callable[[Event], None]) -> Job:
        """Queue a request.

        Raises:
            ApiError: 429 if the queue is full; 503 if the server is shutting down or broken.
        """
        job = Job(spec, emit, time.monotonic() + self._timeout_s)
        entries = [
            _Entry(job, Sequence(spec, prompt, i * spec.n + sample, sample, self._tokenizer))
            for i, prompt in enumerate(spec.prompts) for sample in range(spec.n)
        ]  # fmt: skip
        with self._changed:
            if self.broken or self._stopping or self._drain_until is not None:
                raise ApiError(503, self.broken or "the server is shutting down", code="unavailable")
            busy = len(self._waiting) + len(self._running)
            if busy + len(entries) > self.capacity:
                raise ApiError(
                    429, f"the server has {busy} of {self.capacity} places taken, this request needs {len(entries)}: try again later",
                    code="queue_full",
                )  # fmt: skip
            self._waiting.extend(entries)
            self._changed.notify()
        return job

    def cancel(self, job: Job) -> None:
        """Cancel a request, as its client no longer waits or has been answered."""
        job.cancelled = True
        with self._changed:
            self._changed.notify()

    def drain(self, grace_s: float) -> None:
        """Accept no more requests; present ones have this long to finish, then they get 503. May be called from a signal handler,
        and again to shorten the time."""
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
                self._let_go()
                try:
                    self._read_prompts()
                    self._take_step()
                except Exception as error:
                    self._fail(error)
            self._end_all(ApiError(503, "the server is shutting down", code="unavailable"))
        finally:
            if not self.broken:
                self._slots.stop()

    def _wait(self) -> None:
        with self._changed:
            if not (self._waiting or self._running or self._stopping) and not self._changed.wait(_IDLE_S) and not self._stopping:
                self._slots.idle()

    def _let_go(self) -> None:
        """End requests that are cancelled or have exceeded their time limit or that of ``drain``."""
        now = time.monotonic()
        drained = self._drain_until is not None and now > self._drain_until
        with self._changed:
            jobs = {entry.job for entry in (*self._waiting, *self._running)}
        for job in jobs:
            if job.cancelled:
                self._end(job, None)
            elif drained:
                self._end(job, ApiError(503, "the server is shutting down", code="unavailable"))
            elif now > job.deadline:
                self._end(job, ApiError(504, f"the request took longer than {self._timeout_s:g} s", code="timeout"))

    def _end(self, job: Job, error: ApiError | None) -> None:
        with self._changed:
            self._waiting = deque(entry for entry in self._waiting if entry.job is not job)
        for row in range(len(self._running) - 1, -1, -1):
            if self._running[row].job is job:
                self._drop(row)
        if self._shared is not None and self._shared[0].job is job:
            self._shared = None
        if error is not None:
            job.emit(error)

    def _drop(self, row: int) -> None:
        self._slots.drop(row)
        last = self._running.pop()
        if row < len(self._running):
            self._running[row] = last

    def _read_prompts(self) -> None:
        while self._waiting and len(self._running) < self._slots.max_rows:
            busy = bool(self._running)
            entry = self._waiting[0]  # it keeps its place until it has a row
            sequence, self._reading, stays = entry.sequence, entry.job, entry.sequence.spec.max_tokens > 1
            is_read = self._shared is not None and self._shared[0].sequence.prompt is sequence.prompt
            logits = self._logits_of(entry, stays)
            with self._changed:
                self._waiting.popleft()
                self._running += [entry] if stays else []
            self._emit(entry, sequence.begin(logits))
            self._reading = None
            if sequence.finished and stays:
                self._drop(len(self._running) - 1)
            if busy and not is_read:
                return

    def _logits_of(self, entry: _Entry, stays: bool) -> Tensor:
        """Return the logits of a prompt, which is prefilled for its first sample; ``stays``: give it a row."""
        sequence, shared = entry.sequence, self._shared
        if shared is None or shared[0].sequence.prompt is not sequence.prompt:
            logits = self._slots.read(sequence.prompt.ids, stays, sequence.wants_all_logits)
        else:
            logits = shared[1]
            if stays:
                self._slots.again()
        self._shared = (entry, logits) if sequence.sample + 1 < sequence.spec.n else None
        return logits

    def _take_step(self) -> None:
        if not self._running:
            return
        logits = self._slots.step([entry.sequence.tokens[-1] for entry in self._running])
        for row in range(
            len(self._running) - 1, -1, -1
        ):  # backwards: a freed row is filled by the last one, which has been handled already
            entry = self._running[row]
            self._emit(entry, entry.sequence.next(logits[row]))
            if entry.sequence.finished:
                self._drop(row)

    def _emit(self, entry: _Entry, piece: Piece) -> None:
        if not entry.job.cancelled:
            entry.job.emit(piece)

    def _fail(self, error: Exception) -> None:
        """End running requests with an error. A single process goes on; with other ranks, whose state is unknown, the engine stops."""
        message = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        print(f"error: {message}", file=sys.stderr, flush=True)
        if self._slots.has_followers:
            self.broken, self._stopping = f"the model failed: {message}", True
        for job in {entry.job for entry in self._running} | ({self._reading} if self._reading is not None else set()):
            job.emit(ApiError(500, f"the model failed: {message}", code="model_error"))
            job.cancelled = True
        self._running.clear()
        self._reading = self._shared = None
        self._slots.decoder.clear()

    def _end_all(self, error: ApiError) -> None:
        for job in {entry.job for entry in (*self._waiting, *self._running)}:
            if not job.cancelled:
                job.emit(error)
        self._waiting.clear()
        self._running.clear()
