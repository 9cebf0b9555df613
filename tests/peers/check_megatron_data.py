"""The order of samples against Megatron-core itself: random data sets, blends, splits, seeds and lengths.

Not part of the test run, for it needs megatron-core (``benchmarks/setup_peers.sh megatron``). On one CPU:

    PYTHONPATH=.:tests .venv-peers/bin/python -W ignore tests/peers/check_megatron_data.py [FIRST [COUNT]]

Cases FIRST to FIRST + COUNT (0 and 1000 if absent) of ``tests/support/megatron_order.py``, each in all its splits:
Megatron's builder and ours make the samples, which must be equal in tokens, labels, masks and positions, as many as the
run asks for, and so must be the plain loops that the default tests compare with. Then a batch of each training split at
some consumed count, dealt to some ranks. Splits that Megatron cannot build (it loops for ever on an empty one, and
stops where a data set of a blend without weights is shorter than a sample) must be refused by us. Before that, COUNT
blends of up to eight data sets and 5000 samples, where a last bit of a weight settles near-ties. Prints what differs
and a summary; ends with 1 if something does.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("PYTHONWARNINGS", "ignore")

import numpy as np
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.utils import Split, get_blend_from_list, normalize
from support.megatron_order import SPLITS, VOCAB, Case, Refused, order_of, random_case

from megatron_sp.data.blend import blending_weights, build_blending_indices, normalized
from megatron_sp.data.build import Datasets, build_datasets
from megatron_sp.data.loader import BatchLoader
from megatron_sp.data.tokenizers import NullTokenizer
from megatron_sp.utils.errors import DataError

EOD = VOCAB - 1


class PeerTokenizer:
    """What Megatron asks of one."""

    vocab_size, eod = VOCAB, EOD
    unique_identifiers = {"class": "Null"}


def theirs(case: Case, refused: set[int]) -> tuple[list[Any], set[int]]:
    """Megatron's data sets; those that it cannot build are left out.

    Returns:
        They, and which of them could not be built for its margin was too small: a few samples of a blend may take more
        than 0.5 % too many.
    """
    short: set[int] = set()
    while True:
        try:
            return _theirs(case, refused | short), short
        except IndexError as error:
            short.add(next(i for i, name in enumerate(SPLITS) if f"The {name} blend oversamples" in str(error)))


def _theirs(case: Case, refused: set[int]) -> list[Any]:
    data = case.data
    own = [getattr(data, f"{name}_data_path") for name in SPLITS]
    blends: dict[str, Any] = {"blend_per_split": [get_blend_from_list(list(words)) if words else None for words in own]}
    if data.data_path:
        blends = {"blend": get_blend_from_list(list(data.data_path)), "split": data.split}
    config = GPTDatasetConfig(
        random_seed=case.seed, sequence_length=case.seq_length, tokenizer=PeerTokenizer(), reset_position_ids=data.reset_position_ids,
        reset_attention_mask=False, eod_mask_loss=data.eod_mask_loss, create_attention_mask=False, **blends,
    )  # fmt: skip
    for split in refused:
        if config.blend_per_split is not None:
            config.blend_per_split[split] = None
        else:
            config.split_matrix[split] = None
    found: list[Any] = BlendedMegatronDatasetBuilder(GPTDataset, list(case.wanted), lambda: True, config).build()
    return found


def ours(case: Case, splits: set[int]) -> Datasets:
    wanted = tuple(n if k in splits else 0 for k, n in enumerate(case.wanted))
    with mock.patch("megatron_sp.data.build.check_document_ends", return_value=([], [])):  # these documents end with anything
        return build_datasets(
            case.data,
            seq_length=case.seq_length,
            seed=case.seed,
            tokenizer=NullTokenizer(VOCAB),
            num_samples=wanted,  # type: ignore[arg-type]
        )


def differs(case: Case, peer: Any, mine: Any, plain: list[np.ndarray]) -> str:
    """How far two data sets are not the same; nothing where they are."""
    wanted = min(case.wanted[0 if peer is None else peer.split.value if hasattr(peer, "split") else peer.index_split.value], len(peer))
    if len(mine) < wanted or len(plain) < wanted:
        return f"{len(mine)} samples, {wanted} are wanted"
    for i in range(wanted):
        a, b = peer[i], mine[i]
        names = {"tokens": "tokens", "labels": "labels", "loss_mask": "loss_mask"}
        if case.data.reset_position_ids:
            names["position_ids"] = "positions"
        for name, our_name in names.items():
            if not np.array_equal(a[name].numpy(), b[our_name]):
                return f"sample {i}: {name}"
        if not np.array_equal(plain[i][:-1], b["tokens"]) or not np.array_equal(plain[i][1:], b["labels"]):
            return f"sample {i}: the plain loops"
    return ""


def dealt_wrongly(case: Case, number: int, peer: Any, mine: Any) -> str:
    """Any consumed count, ranks and micro-batches: the next ids of the one order, in turns of micro-batches."""
    random = np.random.default_rng([number, 17])
    ranks, micro = int(random.integers(1, 4)), int(random.integers(1, 3))
    room = min(case.wanted[0], len(peer)) - ranks * micro
    if room < 0:
        return ""
    consumed, rank = int(random.integers(0, room + 1)), int(random.integers(0, ranks))
    with BatchLoader(mine, micro_batch_size=micro, dp_rank=rank, dp_size=ranks) as loader:
        tokens = loader.step(consumed, 1)[0]["tokens"].numpy()
    expected = [peer[consumed + rank * micro + k]["tokens"].numpy() for k in range(micro)]
    return "" if np.array_equal(tokens, expected) else f"batch after {consumed} samples, rank {rank} of {ranks}"


def check(number: int, folder: Path, counts: Counter[str]) -> bool:
    """One case; returns whether all is equal."""
    case = random_case(number, folder)
    case = replace(case, data=replace(case.data, eod_mask_loss=number % 2 == 0, reset_position_ids=number % 3 == 0))
    plain: dict[int, list[np.ndarray] | None] = {}
    refused: set[int] = set()
    for split in range(3):
        try:
            plain[split] = order_of(case, split)
        except Refused:
            refused.add(split)
            try:
                ours(case, {split})
            except DataError:
                counts["splits refused by us, which Megatron cannot build"] += 1
            else:
                print(f"case {number}, {SPLITS[split]}: Megatron cannot build it, we did", flush=True)
                return False
    (peers, short), mine = theirs(case, refused), ours(case, set(range(3)) - refused)
    counts["splits without Megatron's, whose margin is too small"] += len(short)
    for split, name in enumerate(SPLITS):
        own = getattr(mine, name)
        if split in refused | short:
            continue
        if (peers[split] is None) != (own is None):
            print(f"case {number}, {name}: {'ours' if own is None else 'theirs'} is absent", flush=True)
            return False
        if own is None:
            continue
        wrong = differs(case, peers[split], own, plain[split] or [])
        wrong = wrong or (dealt_wrongly(case, number, peers[split], own) if split == 0 else "")
        if wrong:
            print(f"case {number}, {name}: {wrong} differs ({case.data.data_path}, {case.data.split})", flush=True)
            return False
        counts["splits equal"] += 1
        counts["samples equal"] += min(case.wanted[split], len(peers[split]))
    return True


class Endless:
    """A data set of a blend that is never read."""

    index_split, unique_identifiers = Split.train, {"class": "Endless"}

    def __len__(self) -> int:
        return 1 << 40


def blends(first: int, count: int) -> int:
    """Blends alone, longer and of more data sets than files are made for; returns how many are equal."""
    equal = 0
    for number in range(first, first + count):
        random = np.random.default_rng([number, 18])
        k, size = int(random.integers(2, 9)), int(random.integers(1, 5000))
        weights = random.integers(1, 100, k) / 1.0 if number % 2 else random.random(k) + 1e-3
        by_size = number % 5 == 0  # without weights: the sizes, normalised by Megatron once
        given = [int(n) for n in 1 + 1000 * weights] if by_size else normalize(weights.tolist())
        config = GPTDatasetConfig(
            random_seed=1, sequence_length=8, tokenizer=PeerTokenizer(), reset_position_ids=False, reset_attention_mask=False,
            eod_mask_loss=False,
        )  # fmt: skip
        peer = BlendedDataset([Endless()] * k, given, size, config)
        sets, samples = build_blending_indices(normalized(given) if by_size else blending_weights(weights), size)
        same = np.array_equal(sets, peer.dataset_index) and np.array_equal(samples, peer.dataset_sample_index)
        equal += same
        if not same:
            print(f"blend {number} differs ({given}, {size} samples)", flush=True)
    return equal


def main(first: int, count: int) -> int:
    logging.disable(logging.WARNING)
    equal_blends = blends(first, count)
    print(f"blends {first} to {first + count - 1}: {equal_blends} of {count} equal", flush=True)
    counts: Counter[str] = Counter()
    equal = 0
    for number in range(first, first + count):
        with tempfile.TemporaryDirectory() as folder:
            equal += check(number, Path(folder), counts)
    print(f"cases {first} to {first + count - 1}: {equal} of {count} equal;", ", ".join(f"{n:,} {what}" for what, n in counts.items()))
    return 0 if equal == equal_blends == count else 1


if __name__ == "__main__":
    sys.exit(main(*(int(word) for word in (sys.argv[1:] + ["0", "1000"][len(sys.argv) - 1 :]))))
