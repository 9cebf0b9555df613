"""Which tokens Megatron's samples are, in plain loops, and random data sets and flags to compare with.

The rules are written out once more here, slowly and independently of the package's: streams are made of real tokens,
epochs are counted one by one, blends are walked sample by sample. ``tests/unit/data/test_megatron_order.py`` holds the
package to them; ``tests/peers/check_megatron_data.py`` holds both to megatron-core itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_sp.config.schema import DataConfig
from megatron_sp.data.writer import IndexedDatasetWriter

VOCAB = 997
SPLITS = ("train", "valid", "test")
Documents = list[np.ndarray]


class Refused(Exception):
    """There is no such order: Megatron would loop for ever or stop with an assertion, and we say why."""


@dataclass(frozen=True)
class Case:
    """Data sets and flags.

    Attributes:
        data: the flags; prefixes are those of ``files``.
        files: the tokens of each document, by prefix.
        wanted: samples of train, validation, test.
    """

    data: DataConfig
    files: dict[str, Documents]
    seq_length: int
    seed: int
    wanted: tuple[int, int, int]


def random_case(number: int, folder: Path) -> Case:
    """Case ``number``, the same at every call; its data sets are written to ``folder``."""
    random = np.random.default_rng([number, 16])
    prefixes = [str(folder / name) for name in "abcd"[: int(random.choice([1, 2, 3, 4], p=[0.3, 0.3, 0.2, 0.2]))]]
    files = {prefix: _documents(random) for prefix in prefixes}
    folder.mkdir(parents=True, exist_ok=True)
    for prefix, documents in files.items():
        with IndexedDatasetWriter(prefix, dtype=np.uint16) as writer:
            for tokens in documents:
                writer.add_document(tokens, [tokens.size])  # one sequence, also of none
    if random.random() < 0.2:
        data = DataConfig(**{f"{split}_data_path": _words(random, prefixes) for split in SPLITS})
    else:
        data = DataConfig(data_path=_words(random, prefixes), split=_split(random))
    seq_length = int(random.integers(2, 25))
    tokens = sum(sum(map(len, documents)) for documents in files.values())
    epochs = random.choice([0.05, 0.3, 0.9, 1.0, 1.1, 2.0, 3.7])
    train = max(1, int(epochs * tokens / seq_length))
    wanted = (train, int(random.integers(1, 40)), int(random.integers(1, 40)))
    return Case(data, files, seq_length, int(random.integers(1, 2**31)), wanted)


def _documents(random: np.random.Generator) -> Documents:
    longest = int(random.choice([3, 12, 60]))
    lengths = random.integers(0 if random.random() < 0.3 else 1, longest + 1, int(random.choice([3, 12, 50, 120])))
    return [random.integers(0, VOCAB, int(n)).astype(np.uint16) for n in lengths]


def _words(random: np.random.Generator, prefixes: list[str]) -> tuple[str, ...]:
    """What stands after --data-path."""
    count, kind = len(prefixes), int(random.integers(0, 6))
    if kind == 0:
        return tuple(prefixes)
    weights = {
        1: random.integers(1, 100, count),  # percents or counts
        2: np.round(random.dirichlet(np.ones(count)), 2) + 0.01,
        3: random.random(count) + 1e-3,
        4: 10 ** random.uniform(-3, 3, count),
        5: np.ones(count),
    }[kind]
    return tuple(word for weight, prefix in zip(weights.tolist(), prefixes, strict=True) for word in (str(weight), prefix))


def _split(random: np.random.Generator) -> str:
    given = ("969,30,1", "8,1,1", "90,5,5", "1,1,1", "99,1,0", "100", "0.7,0.2,0.1", "98,2", "949,50,1")
    if random.random() < 0.6:
        return str(random.choice(given))
    return ",".join(str(n) for n in random.integers(1, 40, 3))


def order_of(case: Case, split: int) -> list[np.ndarray] | None:
    """The samples of a split, each of seq_length + 1 tokens: all that Megatron has, at least ``case.wanted``; None: it has no share.

    Raises:
        Refused: see there.
    """
    own = getattr(case.data, f"{SPLITS[split]}_data_path")
    words, shares = case.data.data_path or own, _normalized([float(part) for part in case.data.split.split(",")])
    if not words or (not own and (split >= len(shares) or shares[split] == 0)):
        return None
    prefixes, weights = _parsed(words)
    parts = [_share(case.files[prefix], [0.0, 1.0] if own else [sum(shares[:split]), sum(shares[: split + 1])]) for prefix in prefixes]
    wanted = case.wanted[split]
    if len(prefixes) == 1 and (weights is None or own):
        return _single(parts[0], case, wanted)
    if weights is None:
        sets = [_single(part, case, None) for part in parts]
        sizes = [len(one) for one in sets]
        if 0 in sizes:
            raise Refused
        return _blended(sets, _normalized(sizes), min(wanted, sum(sizes)))
    weights = _normalized(weights)
    sets = [_single(part, case, math.ceil(math.ceil(wanted * weight) * 1.005)) for part, weight in zip(parts, weights, strict=True)]
    return _blended(sets, _normalized(weights), wanted)


def _parsed(words: tuple[str, ...]) -> tuple[list[str], list[float] | None]:
    try:
        if len(words) % 2 == 0:
            return list(words[1::2]), [float(word) for word in words[::2]]
    except ValueError:
        pass
    return list(words), None


def _normalized(weights: list[float] | list[int]) -> list[float]:
    whole = np.array(weights, np.float64)
    total = np.sum(whole)  # numpy adds pairwise: a plain sum may differ in the last bit
    return [float(weight / total) for weight in whole]


def _share(documents: Documents, edges: list[float]) -> Documents:
    first, last = (round(edge * float(len(documents))) for edge in edges)
    return documents[first:last]


def _single(documents: Documents, case: Case, wanted: int | None) -> list[np.ndarray]:
    """One data set: documents shuffled over epochs, cut, and the cuts shuffled."""
    length, tokens = case.seq_length, sum(map(len, documents))
    if tokens == 0:
        raise Refused
    epochs, apart = 1, False
    while wanted is not None and epochs * tokens < wanted * length + 1:
        epochs += 1
    count = (epochs * tokens - 1) // length
    before = ((epochs - 1) * tokens - 1) // length
    if wanted is not None and epochs > 1:
        apart = wanted - before < int(0.8 * ((tokens - 1) // length))
    random = np.random.RandomState(case.seed)
    order = np.array(list(range(len(documents))) * (epochs - apart))
    random.shuffle(order)
    if apart:
        last = np.arange(len(documents))
        random.shuffle(last)
        order = np.concatenate([order, last])
    stream = np.concatenate([documents[i] for i in order])
    cuts = [np.arange(before), np.arange(before, count)] if apart else [np.arange(count)]
    for part in cuts:
        random.shuffle(part)
    return [stream[i * length : (i + 1) * length + 1] for i in np.concatenate(cuts)]


def _blended(sets: list[list[np.ndarray]], weights: list[float], wanted: int) -> list[np.ndarray]:
    """Each sample from the set that lags furthest behind its weight."""
    taken, samples = [0] * len(sets), []
    for i in range(wanted):
        lags = [weight * max(float(i), 1.0) - count for weight, count in zip(weights, taken, strict=True)]
        chosen = lags.index(max(lags))
        samples.append(sets[chosen][taken[chosen]])
        taken[chosen] += 1
    return samples
