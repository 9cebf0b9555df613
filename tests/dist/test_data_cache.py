"""The index cache and the sample order with several processes at once."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from support.ranks import run_ranks

from megatron_sp.config.schema import DataConfig
from megatron_sp.data import gpt_dataset, index_cache
from megatron_sp.data.build import build_datasets
from megatron_sp.data.loader import BatchLoader
from megatron_sp.data.tokenizers import ByteTokenizer
from megatron_sp.data.writer import IndexedDatasetWriter

S = 16


def corpus(folder: Path) -> str:
    random = np.random.RandomState(0)
    with IndexedDatasetWriter(folder / "a", vocab_size=257) as writer:
        for length in random.randint(1, 90, 300):
            writer.add_document(random.randint(0, 257, length))
    return str(folder / "a")


def build(prefix: str):  # type: ignore[no-untyped-def]
    return build_datasets(DataConfig(data_path=(prefix,)), seq_length=S, seed=1, tokenizer=ByteTokenizer(), num_samples=(2000, 5, 0))


def _all_at_once(prefix: str, log: str) -> None:
    real = gpt_dataset.build_gpt_index

    def counted(*args):  # type: ignore[no-untyped-def]
        with open(log, "a") as file:
            file.write("built\n")
        time.sleep(0.05)  # wide enough for the others to arrive
        return real(*args)

    gpt_dataset.build_gpt_index = counted  # type: ignore[assignment]
    dist.barrier()
    sets = build(prefix)
    assert isinstance(sets.train.index.sample, np.memmap)
    with BatchLoader(sets.train, micro_batch_size=2, dp_rank=dist.get_rank(), dp_size=dist.get_world_size(), num_workers=1) as loader:
        mine = torch.cat([b["tokens"] for step in range(5) for b in loader.step(step * 16, 16 // 2 // dist.get_world_size())])
    shares = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(shares, mine)
    want = {tuple(sets.train[i]["tokens"].tolist()) for i in range(80)}
    assert {tuple(row) for share in shares for row in share.tolist()} == want


def test_four_ranks_build_once_and_read_the_same_samples(tmp_path: Path) -> None:
    prefix, log = corpus(tmp_path), tmp_path / "log"
    run_ranks(_all_at_once, 4, tmp_path, prefix, str(log))
    assert log.read_text() == "built\n" * 2, "train and valid, each by whoever came first"
    assert not list((tmp_path / "index-cache").glob("*.tmp"))


def test_a_builder_that_is_killed_leaves_nothing_that_is_used(tmp_path: Path) -> None:
    """At each of its writes; whoever waits for it then builds, and later starts find a whole cache."""
    prefix = corpus(tmp_path)
    want = build(prefix)
    expected = [want.train[i]["tokens"].tolist() for i in range(50)]
    cache = tmp_path / "index-cache"
    for kill_at in range(4):
        for path in cache.iterdir():
            path.unlink()
        child = os.fork()
        if child == 0:
            calls = iter(range(99))
            real = os.fsync

            def fatal(fd: int, calls=calls, real=real, kill_at=kill_at) -> None:  # type: ignore[no-untyped-def]
                if next(calls) == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                real(fd)

            index_cache.os.fsync = fatal  # type: ignore[assignment]
            build(prefix)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), "the fault did not fire"
        sets = build(prefix)
        assert [sets.train[i]["tokens"].tolist() for i in range(50)] == expected
        assert isinstance(sets.train.index.sample, np.memmap)
