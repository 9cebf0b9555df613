"""Rendezvous with a fresh key space in the store for every attempt of a job.

torchrun keeps one store for all attempts (pytorch #135712): gloo would find the addresses that dead processes of the
attempt before have left there, and hang. So each rank stores a new random token under its name, and rank 0 answers
every token it sees with a fresh prefix, under a key that contains the token.
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
        for rank in waiting:  # again and again: the token that was there may be that of an earlier attempt
            if store.check([f"hello/{rank}"]):
                store.set(f"answer/{store.get(f'hello/{rank}').decode()}", prefix)
        waiting = [rank for rank in waiting if not store.check([f"confirmed/{prefix}/{rank}"])]
        if waiting and time.monotonic() > deadline:
            late = f"ranks {waiting[:8]} of {world_size}"
            raise RuntimeError(f"timed out: {late} did not join within {timeout.total_seconds():.0f} s")
        time.sleep(_POLL_S if waiting else 0)
    return prefix


def _accept_prefix(store: dist.Store, rank: int) -> str:
    token = uuid.uuid4().hex
    store.set(f"hello/{rank}", token)
    prefix = store.get(f"answer/{token}").decode()  # waits
    store.set(f"confirmed/{prefix}/{rank}", "1")
    return prefix
