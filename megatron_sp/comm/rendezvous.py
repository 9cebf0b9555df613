"""Rendezvous with a fresh key space in the store for every attempt of a job.

torchrun keeps one store for all attempts of a job (torch 2.5 and later share it with the workers, pytorch #135712).
gloo then finds the addresses that the dead processes of the previous attempt have left there, connects to them, and
hangs until its timeout. ``TORCHELASTIC_RESTART_COUNT`` does not identify an attempt: every agent counts only its own
restarts.

So the ranks of an attempt agree on a fresh prefix. Each rank stores a new random token under its name. Rank 0 answers
every token it sees with the prefix, under a key that contains the token, so an answer cannot come from an earlier
attempt. As a token it saw may have been an old one, it repeats this until all ranks have confirmed.
"""

from __future__ import annotations

import os
import time
import uuid
from datetime import timedelta

import torch.distributed as dist

from megatron_sp.utils.launch import Address

_SPACE = "megatron_sp"
_POLL_S = 0.02


def fresh_store(address: Address, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """Return the store at an address, the launcher's or rank 0's, under a prefix that no earlier attempt has used.

    Raises:
        RuntimeError: not all ranks joined within ``timeout``.
    """
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = dist.TCPStore(
        *address, world_size,
        is_master=rank == 0 and not shared, timeout=timeout, multi_tenant=True,
        # torch counts arrivals over all attempts: after an attempt of another size the count may never be a multiple of
        # this one's
        wait_for_workers=False,
    )  # fmt: skip
    space = dist.PrefixStore(_SPACE, store)
    prefix = _offer_prefix(space, world_size, timeout) if rank == 0 else _accept_prefix(space, rank)
    return dist.PrefixStore(prefix, store)


def _offer_prefix(store: dist.Store, world_size: int, timeout: timedelta) -> str:
    prefix = uuid.uuid4().hex
    waiting = list(range(1, world_size))
    deadline = time.monotonic() + timeout.total_seconds()
    while waiting:
        for rank in waiting:
            if store.check([_hello(rank)]):
                store.set(_answer(store.get(_hello(rank)).decode()), prefix)
        waiting = [rank for rank in waiting if not store.check([_confirmed(prefix, rank)])]
        if waiting and time.monotonic() > deadline:
            raise RuntimeError(f"timed out: ranks {waiting[:8]} of {world_size} did not join within {timeout.total_seconds():.0f} s")
        time.sleep(_POLL_S if waiting else 0)
    return prefix


def _accept_prefix(store: dist.Store, rank: int) -> str:
    token = uuid.uuid4().hex
    store.set(_hello(rank), token)
    prefix = store.get(_answer(token)).decode()  # waits
    store.set(_confirmed(prefix, rank), "1")
    return prefix


def _hello(rank: int) -> str:
    return f"hello/{rank}"


def _answer(token: str) -> str:
    return f"answer/{token}"


def _confirmed(prefix: str, rank: int) -> str:
    return f"confirmed/{prefix}/{rank}"
