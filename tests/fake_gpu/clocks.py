"""What happened before what, on streams and the host: vector clocks.

Every access to memory gets a number on its stream. A clock says, for each stream, up to which number everything is
complete before the clock's owner goes on. Work that is queued on a stream starts after all that the host has done
before, so the host has a clock, too. Source: Lamport 1978, Fidge 1988; torch.cuda._sanitizer does the same for real
streams.
"""

from __future__ import annotations

from collections import defaultdict

HOST = -1
DEFAULT = 0
Clock = dict[int, int]


def _merge(clock: Clock, other: Clock) -> None:
    for stream, number in other.items():
        if clock.get(stream, 0) < number:
            clock[stream] = number


class Clocks:
    """Clocks of streams, events and the host, which is stream ``HOST``."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = defaultdict(int)
        self._streams: dict[int, Clock] = {HOST: {}, DEFAULT: {}}
        self._events: dict[int, Clock] = {}

    def start(self, stream: int) -> int:
        """Queue work on a stream; return its number there. What the host does itself is work on ``HOST``."""
        clock = self._of(stream)
        self._numbers[stream] += 1
        clock[stream] = self._numbers[stream]
        return clock[stream]

    def record(self, event: int, stream: int) -> None:
        """Record an event: it is complete when the work queued on ``stream`` so far is."""
        self._events[event] = {**self._of(stream), **{k: max(v, self._of(stream).get(k, 0)) for k, v in self._streams[HOST].items()}}

    def has_recorded(self, event: int) -> bool:
        """True if the event was ever recorded."""
        return event in self._events

    def wait(self, stream: int, event: int) -> None:
        """Make later work on ``stream`` (or the host) wait for an event; one that was never recorded is complete."""
        _merge(self._of(stream), self._events.get(event, {}))

    def host_waits_for(self, stream: int) -> None:
        """The host waits for the work queued on ``stream`` so far."""
        _merge(self._streams[HOST], self._of(stream))

    def host_waits_for_all(self) -> None:
        """The host waits for the device."""
        for stream in list(self._streams):
            self.host_waits_for(stream)

    def is_before(self, by: int, number: int, stream: int) -> bool:
        """True if work ``number`` on stream ``by`` is complete before work that ``stream`` is given now starts."""
        return by == stream or self.seen(stream, by) >= number

    def seen(self, stream: int, of: int) -> int:
        """Return up to which number the work of stream ``of`` is complete before new work on ``stream`` starts."""
        return max(self._of(stream).get(of, 0), self._streams[HOST].get(of, 0) if stream != HOST else 0)

    def _of(self, stream: int) -> Clock:
        return self._streams.setdefault(stream, {})
