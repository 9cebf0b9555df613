"""Continuous batching, as a task of the server's event loop.

    waiting --(a free row: its prompt is read)--> running --(steps: one token each, in one batch)--> done

Requests join and leave between steps, so a short one never waits for a long one to end; while others run, at most one
prompt is read between two steps. In a batch a sequence has the tokens it has alone, up to rounding.
"""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from megatron_sp.data.tokenizers import Tokenizer
from megatron_sp.inference.decoder import Decoder
from megatron_sp.inference.generation import TextStream, choose
from megatron_sp.inference.serving.request import ApiError, Completion, Prompt

_IDLE_S = 30.0  # interval of rank 0's messages to the other ranks while idle
Piece = dict[str, Any]  # new output of a choice: an entry of ``choices`` in OpenAI's format


class Job:
    """A request in the engine, and its output."""

    def __init__(self, spec: Completion, timeout_s: float) -> None:
        self.spec, self.deadline = spec, time.monotonic() + timeout_s
        self.events: asyncio.Queue[Piece | ApiError] = asyncio.Queue()
        self.num_new = 0  # generated tokens, including end-of-document
        self.cancelled = False  # nobody waits for it any more; may be set at any time

    async def next(self) -> Piece:
        """Return the next piece of any choice. Raises ApiError if the request has failed."""
        event = await self.events.get()
        if isinstance(event, ApiError):
            raise event
        return event


class StopText:
    """Filter that passes text up to the first stop, and holds back what may be the beginning of one."""

    def __init__(self, stops: list[str]) -> None:
        self._stops, self._held = stops, ""

    def add(self, text: str, *, at_end: bool = False) -> tuple[str, bool]:
        """Return the text that can be shown, and whether a stop was found."""
        text, self._held = self._held + text, ""
        starts = [start for start in map(text.find, self._stops) if start >= 0]
        if starts:
            return text[: min(starts)], True
        keep = max((k for stop in self._stops for k in range(1, len(stop)) if text.endswith(stop[:k])), default=0)
        if at_end or not keep:
            return text, False
        self._held = text[-keep:]
        return text[:-keep], False


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
        """Return the prompt, if it is echoed, and the first token, from logits of all positions [s, v] or [1, v]."""
        text, rows = self.prompt.text if self.spec.echo else "", list[tuple[Any, ...]]()
        if self._shows_prompt:
            ids, offset, stream = self.prompt.ids, 0, TextStream(self._tokenizer.decode)
            for place, token in enumerate(ids):
                first = self._tokenizer.decode(ids[:1]), None, None, 0
                rows.append(self._describe(ids[: place + 1], logits[place - 1], offset) if place else first)
                if place >= self.prompt.num_unwritten and (token != self._tokenizer.eod or self.prompt.has_ends):
                    offset += len(stream.add(token))
        if self.spec.max_tokens == 0:
            self.finished = True
            return self._piece(text, rows, "length")
        return self.next(logits[-1], text, rows)

    def next(self, logits: Tensor, text: str = "", rows: list[tuple[Any, ...]] | None = None) -> Piece:
        """Return the next token, from its logits [v], after the text and the tokens of an echoed prompt."""
        token = choose(logits, self.spec.sampling, self.sample, len(self.tokens))
        self.tokens.append(token)
        self.job.num_new += 1
        rows, is_end = rows or [], token == self._tokenizer.eod
        if not is_end and self.spec.logprobs is not None:
            rows.append(self._describe(self.tokens, logits, self._offset))
        new = "" if is_end else self._stream.add(token)
        self._offset += len(new)
        shown, stopped = self._stop.add(new)
        at_limit = len(self.tokens) - len(self.prompt.ids) >= self.spec.max_tokens
        if (is_end or at_limit) and not stopped:  # the held back text may complete a stop
            last, stopped = self._stop.add(self._stream.flush(), at_end=True)
            shown += last
        self.finished = is_end or stopped or at_limit
        finish = "stop" if is_end or stopped else "length" if at_limit else None
        return self._piece(text + shown, rows, finish)

    def _piece(self, text: str, rows: list[tuple[Any, ...]], finish: str | None) -> Piece:
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        has_any = self.spec.logprobs is not None
        logprobs = {name: [row[i] for row in rows] for i, name in enumerate(names)} if has_any else None
        return {"text": text, "index": self.index, "logprobs": logprobs, "finish_reason": finish}

    def _describe(self, tokens: list[int], logits: Tensor, offset: int) -> tuple[Any, ...]:
        # the ``logprobs`` entries of the last token
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
        return text, own, top | {text: own} if top else top, offset


def follow(decoder: Decoder, hear: Callable[[], list[Any]]) -> None:
    """Do what rank 0's engine does to its decoder, until it stops; for the other ranks."""
    while (command := hear())[0] != "stop":
        if command[0] != "idle":
            getattr(decoder, command[0])(*command[1:])


class Engine:
    """The queue of requests, of which ``max_queue`` sequences may wait, and what of it the model has in its rows.

    All methods but ``turn`` are called on the event loop. ``turn`` runs in a thread beside it, one at a time; the only
    thing that changes meanwhile is that ``submit`` appends to the queue and requests are marked as cancelled. ``tell``
    sends a command to the other ranks, which ``follow``; None: there are none.
    """

    def __init__(
        self, decoder: Decoder, tokenizer: Tokenizer, max_queue: int, timeout_s: float,
        tell: Callable[[list[Any]], None] | None = None,
    ) -> None:  # fmt: skip
        self._decoder, self._tokenizer, self._timeout_s = decoder, tokenizer, timeout_s
        self._has_followers, self._tell = tell is not None, tell or (lambda command: None)
        self.capacity = decoder.max_rows + max_queue
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []  # sequence i is in row i
        self._reading: Job | None = None  # whose prompt the model has now
        self._shared: tuple[Sequence, Tensor] | None = None  # logits of the last prompt, if more samples wait for them
        self._has_read = False  # in the last turn: the next is a step
        self._changed = asyncio.Event()
        self._stopping, self.broken, self._drain_until = False, "", math.inf

    def submit(self, spec: Completion) -> Job:
        """Queue a request. Raises ApiError if the queue is full, or the server is shutting down or broken."""
        job, new = Job(spec, self._timeout_s), list[Sequence]()
        for prompt in spec.prompts:
            new += [Sequence(job, prompt, len(new) + sample, sample, self._tokenizer) for sample in range(spec.n)]
        if self.broken or self._stopping or self._drain_until < math.inf:
            raise _unavailable(self.broken)
        busy = sum(self.counts.values())
        if busy + len(new) > self.capacity:
            places = f"{busy} of {self.capacity} places taken, this request needs {len(new)}"
            raise ApiError(429, f"the server has {places}: try again later", code="queue_full")
        self._waiting.extend(new)
        self._changed.set()
        return job

    def drain(self, grace_s: float) -> None:
        """Accept no more requests, and end present ones after ``grace_s``, which a second call may shorten."""
        self._drain_until = min(self._drain_until, time.monotonic() + grace_s)

    def stop(self) -> None:
        self._stopping = True
        self._changed.set()

    @property
    def counts(self) -> dict[str, int]:
        return {"running": len(self._running), "waiting": len(self._waiting)}

    async def run(self) -> None:
        """Process requests until ``stop``, or until the model fails and the state of other ranks is unknown."""
        loop, num_threads = asyncio.get_running_loop(), torch.get_num_threads()
        in_thread = loop.run_in_executor

        def take_turns() -> None:  # as long as there is something to do: a change of threads for each costs more
            while any(self.counts.values()) and not self._stopping:
                for job, event in self.turn():
                    loop.call_soon_threadsafe(job.events.put_nowait, event)

        # always the same thread: OpenMP keeps the number of threads, and CUDA the device, for each
        with ThreadPoolExecutor(1, "model", torch.set_num_threads, (num_threads,)) as thread:
            while not self._stopping:
                if not any(self.counts.values()):
                    self._changed.clear()
                    try:
                        await asyncio.wait_for(self._changed.wait(), _IDLE_S)
                    except asyncio.TimeoutError:  # TimeoutError itself only from Python 3.11 on
                        await in_thread(thread, self._tell, ["idle"])  # so that the other ranks do not time out
                await in_thread(thread, take_turns)
            for job in {sequence.job for sequence in (*self._waiting, *self._running)}:
                job.events.put_nowait(_unavailable())
            if not self.broken:
                await in_thread(thread, self._tell, ["stop"])

    def turn(self) -> list[tuple[Job, Piece | ApiError]]:
        """Let the model read a prompt, or take a step with all that run; return the new output."""
        events = self._end_jobs()
        may_read = len(self._waiting) > 0 and len(self._running) < self._decoder.max_rows
        self._has_read = may_read and not (self._has_read and self._running)
        try:
            if self._has_read:
                self._read_prompt(events)
            elif self._running:
                logits = self._call("step", [sequence.tokens[-1] for sequence in self._running])
                for row in range(
                    len(self._running) - 1, -1, -1
                ):  # backwards: the last, which fills a freed row, is done
                    sequence = self._running[row]
                    events.append((sequence.job, sequence.next(logits[row])))
                    if sequence.finished:
                        self._drop(row)
        except (
            Exception
        ) as error:  # a single process goes on; with other ranks, whose state is unknown, the engine stops
            message = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            print(f"error: {message}", file=sys.stderr, flush=True)
            if self._has_followers:
                self.broken, self._stopping = f"the model failed: {message}", True
            jobs = {sequence.job for sequence in self._running}
            for job in jobs | ({self._reading} if self._reading is not None else set()):
                events.append((job, ApiError(500, f"the model failed: {message}", code="model_error")))
                job.cancelled = True
            self._running.clear()
            self._reading = self._shared = None
            self._decoder.clear()
        return events

    def _end_jobs(self) -> list[tuple[Job, Piece | ApiError]]:
        # drop requests that are cancelled or late; ``list`` of a deque is safe while another thread appends to it
        events, now = list[tuple[Job, Piece | ApiError]](), time.monotonic()
        for job in {sequence.job for sequence in (*list(self._waiting), *self._running)}:
            if not job.cancelled and now <= min(self._drain_until, job.deadline):
                continue
            for sequence in list(self._waiting):
                if sequence.job is job:
                    self._waiting.remove(sequence)
            for row in range(len(self._running) - 1, -1, -1):
                if self._running[row].job is job:
                    self._drop(row)
            if self._shared is not None and self._shared[0].job is job:
                self._shared = None
            late = f"the request took longer than {self._timeout_s:g} s"
            if not job.cancelled:
                is_drained = now > self._drain_until
                events.append((job, _unavailable() if is_drained else ApiError(504, late, code="timeout")))
        return events

    def _call(self, name: str, *args: Any) -> Any:
        self._tell([name, *args])
        return getattr(self._decoder, name)(*args)

    def _drop(self, row: int) -> None:
        self._call("drop", row)
        last = self._running.pop()
        if row < len(self._running):
            self._running[row] = last

    def _read_prompt(self, events: list[tuple[Job, Piece | ApiError]]) -> None:
        # one prompt, for all its samples that find a row; they keep their places in the queue until then
        has_read = False
        while self._waiting and len(self._running) < self._decoder.max_rows:
            sequence = self._waiting[0]
            needs_row = sequence.spec.max_tokens > 1
            self._reading = sequence.job
            if self._shared is not None and self._shared[0].prompt is sequence.prompt:
                logits = self._shared[1]
                if needs_row:
                    self._call("again")
            elif not has_read:
                has_read = True
                logits = self._call("read", sequence.prompt.ids, needs_row, sequence.wants_all_logits)
            else:
                break
            self._shared = (sequence, logits) if sequence.sample + 1 < sequence.spec.n else None
            self._waiting.popleft()
            self._running += [sequence] if needs_row else []
            events.append((sequence.job, sequence.begin(logits)))
            if sequence.finished and needs_row:
                self._drop(len(self._running) - 1)
        self._reading = None


def _unavailable(text: str = "") -> ApiError:
    return ApiError(503, text or "the server is shutting down", code="unavailable")
