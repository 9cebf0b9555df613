"""The model with the sequences in progress, on every rank of a team.

Rank 0 decides; before it calls the model it sends the command to the other ranks as JSON, and they do the same. So the
scheduler and HTTP exist only once, and a model on several tp or sp ranks is served like any other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from megatron_sp.inference.decoder import Decoder

STOP = "stop"


class Slots:
    """A decoder on all ranks: what rank 0 calls here, the others do, too.

    Args:
        decoder: this rank's, with room for its sequences.
        tell: sends a command to the other ranks; None: there are none, or this is one of them.
    """

    def __init__(self, decoder: Decoder, tell: Callable[[list[Any]], None] | None = None) -> None:
        self.decoder, self.has_followers, self.max_rows = decoder, tell is not None, decoder.max_rows
        self._tell = tell or (lambda command: None)

    def read(self, tokens: list[int], keep: bool, everywhere: bool) -> Tensor:
        """See ``Decoder``."""
        self._tell(["read", tokens, keep, everywhere])
        return self.decoder.read(tokens, keep, everywhere)

    def again(self) -> None:
        """See ``Decoder``."""
        self._tell(["again"])
        self.decoder.again()

    def step(self, tokens: list[int]) -> Tensor:
        """See ``Decoder``."""
        self._tell(["step", tokens])
        return self.decoder.step(tokens)

    def drop(self, row: int) -> None:
        """See ``Decoder``."""
        self._tell(["drop", row])
        self.decoder.drop(row)

    def idle(self) -> None:
        """Send a no-op, so that the other ranks do not time out."""
        self._tell(["idle"])

    def stop(self) -> None:
        """End ``follow`` on the other ranks."""
        self._tell([STOP])

    def follow(self, hear: Callable[[], list[Any]]) -> None:
        """Execute the commands of rank 0 until it stops; for all other ranks."""
        while (command := hear())[0] != STOP:
            getattr(self, command[0])(*command[1:])
