"""GPT samples from files, blends and mock data, and what bad data get."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_sp.config.schema import DataConfig
from megatron_sp.data.blend import BlendedDataset, ChainedDataset
from megatron_sp.data.build import Datasets, Evaluation, build_datasets
from megatron_sp.data.gpt_dataset import GPTDataset, GPTOptions, MockGPTDataset
from megatron_sp.data.indexed_dataset import IndexedDataset
from megatron_sp.data.tokenizers import ByteTokenizer, NullTokenizer
from megatron_sp.data.writer import IndexedDatasetWriter
from megatron_sp.utils.errors import ConfigError, DataError

S = 8
EOD = 256


def corpus(folder: Path, name: str = "a", num_documents: int = 60, seed: int = 0, low: int = 1) -> str:
    random = np.random.RandomState(seed)
    with IndexedDatasetWriter(folder / name, vocab_size=257) as writer:
        for length in random.randint(low, 40, num_documents):
            writer.add_document(np.append(random.randint(0, 256, length), EOD))
    return str(folder / name)


def build(folder: Path, n: tuple[int, int, int] = (100, 5, 5), seed: int = 1234, **data: object) -> Datasets:
    config = DataConfig(**({"split": "8,1,1"} | data))  # type: ignore[arg-type]
    return build_datasets(config, seq_length=S, seed=seed, tokenizer=ByteTokenizer(), num_samples=n)


def everything(dataset: object) -> list[list[int]]:
    return [dataset[i]["tokens"].tolist() for i in range(len(dataset))]  # type: ignore[index, arg-type]


def test_samples_are_the_stream_of_shuffled_documents(tmp_path: Path) -> None:
    prefix = corpus(tmp_path, low=0)
    indexed = IndexedDataset(prefix)
    data = GPTDataset(indexed, (5, 40), GPTOptions(S, 3), num_samples=300, tokenizer=ByteTokenizer())
    stream = np.concatenate([indexed.get(i) for i in data.index.document.tolist()])
    assert data.num_epochs > 1 and set(data.index.document.tolist()) == set(range(5, 40))
    for i in range(len(data)):
        start = int(data.index.shuffle[i]) * S
        sample = data[i]
        assert sample["tokens"].tolist() == stream[start : start + S].tolist()
        assert sample["labels"].tolist() == stream[start + 1 : start + S + 1].tolist()
        assert sample["loss_mask"].tolist() == [1.0] * S
    assert (sample["tokens"].dtype, sample["labels"].dtype, sample["loss_mask"].dtype) == (np.int64, np.int64, np.float32)
    for i in (-1, len(data)):
        with pytest.raises(IndexError):
            data[i]


def test_splits_share_nothing_and_have_enough(tmp_path: Path) -> None:
    prefix = corpus(tmp_path, num_documents=200)
    sets = build(tmp_path, (500, 40, 30), data_path=(prefix,))
    used = [set(d.index.document.tolist()) for d in (sets.train, sets.valid, sets.test)]  # type: ignore[union-attr]
    assert [len(u) for u in used] == [160, 20, 20] and len(set.union(*used)) == 200
    assert [len(d) >= n for d, n in zip((sets.train, sets.valid, sets.test), (500, 40, 30), strict=True)] == [True] * 3  # type: ignore[arg-type]


def test_order_depends_on_the_seed_alone(tmp_path: Path) -> None:
    prefix = corpus(tmp_path)
    one = build(tmp_path, data_path=(prefix,))
    again = build(tmp_path, data_path=(prefix + ".bin",), data_cache_path=str(tmp_path / "other"))
    assert everything(one.train) == everything(again.train) and one.fingerprint == again.fingerprint
    other = build(tmp_path, data_path=(prefix,), seed=1)
    assert everything(one.train) != everything(other.train) and one.fingerprint != other.fingerprint


def test_loss_mask_of_document_ends(tmp_path: Path) -> None:
    prefix = corpus(tmp_path)
    plain, masked = (build(tmp_path, data_path=(prefix,), eod_mask_loss=flag) for flag in (False, True))
    assert plain.train and masked.train and plain.fingerprint != masked.fingerprint
    ends = 0
    for i in range(len(masked.train)):
        sample = masked.train[i]
        assert (sample["loss_mask"] == (sample["tokens"] != EOD)).all()
        ends += int((sample["tokens"] == EOD).sum())
    assert ends > 10


def test_none_where_nothing_is_wanted(tmp_path: Path) -> None:
    prefix = corpus(tmp_path)
    sets = build(tmp_path, (10, 0, 5), data_path=(prefix,))
    assert sets.train and sets.valid is None and sets.test
    sets = build(tmp_path, (10, 5, 5), data_path=(prefix,), split="9,1")
    assert sets.train and sets.valid and sets.test is None
    sets = build(tmp_path, (0, 0, 5), data_path=(prefix,))
    assert sets.train is None and sets.fingerprint == sets.test.fingerprint()  # type: ignore[union-attr]
    assert build(tmp_path, (0, 0, 0), data_path=(prefix,)).fingerprint == ""


def test_paths_for_each_split(tmp_path: Path) -> None:
    a, b = corpus(tmp_path, "a"), corpus(tmp_path, "b", 10, seed=1)
    sets = build(tmp_path, (20, 5, 5), train_data_path=(a,), valid_data_path=(b,))
    assert set(sets.train.index.document.tolist()) == set(range(60))  # type: ignore[union-attr]
    assert set(sets.valid.index.document.tolist()) == set(range(10)) and sets.test is None  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="exclude each other"):
        build(tmp_path, data_path=(a,), valid_data_path=(b,))
    with pytest.raises(ConfigError, match="there is no data"):
        build(tmp_path)


def test_weighted_blend(tmp_path: Path) -> None:
    a, b = corpus(tmp_path, "a"), corpus(tmp_path, "b", 30, seed=1)
    sets = build(tmp_path, (1000, 10, 0), data_path=("3", a, "7", b))
    assert sets.train is not None and len(sets.train) == 1000
    single = [
        GPTDataset(IndexedDataset(p), bounds, GPTOptions(S, 1234), num_samples=n, tokenizer=ByteTokenizer())
        for p, bounds, n in [(a, (0, 48), 302), (b, (0, 24), 704)]
    ]
    assert sets.train[0]["tokens"].tolist() == single[1][0]["tokens"].tolist()  # golden order of .3/.7: 1 0 1 1 0 1
    assert sets.train[1]["tokens"].tolist() == single[0][0]["tokens"].tolist()
    assert sets.train[5]["tokens"].tolist() == single[1][3]["tokens"].tolist()
    assert sets.fingerprint != build(tmp_path, (1000, 10, 0), data_path=("4", a, "6", b)).fingerprint
    for i in (-1, 1000):
        with pytest.raises(IndexError):
            sets.train[i]


def test_a_blend_cannot_ask_for_more_than_there_is(tmp_path: Path) -> None:
    part = GPTDataset(IndexedDataset(corpus(tmp_path)), (0, 60), GPTOptions(S, 1), num_samples=5, tokenizer=ByteTokenizer())
    n = len(part)
    everything(BlendedDataset([part], np.ones(1), np.zeros(n, np.int16), np.arange(n)))
    with pytest.raises(DataError, match=f"the blend needs {n + 1} samples of it, it has {n}"):
        BlendedDataset([part], np.ones(1), np.zeros(n + 1, np.int16), np.arange(n + 1))


def test_blend_by_size(tmp_path: Path) -> None:
    paths = (corpus(tmp_path, "a", 80), corpus(tmp_path, "b", 40, seed=1), corpus(tmp_path, "c", 40, seed=2))
    small = build(tmp_path, (50, 0, 0), data_path=paths)
    assert [d.num_epochs for d in small.train.datasets] == [1, 1, 1]  # type: ignore[union-attr]
    shares = np.bincount(small.train.sets) / 50  # type: ignore[union-attr]
    assert shares.tolist() == pytest.approx([0.5, 0.25, 0.25], abs=0.06)


def test_blends_by_size_go_on_behind_one_epoch(tmp_path: Path) -> None:
    """Megatron's end there: its order comes first, then the same data in others, and a longer run begins as a shorter one."""
    paths = (corpus(tmp_path, "a", 80), corpus(tmp_path, "b", 40, seed=1), corpus(tmp_path, "c", 40, seed=2))
    one, large, larger = (build(tmp_path, (n, 0, 0), data_path=paths) for n in (50, 2000, 3000))
    assert isinstance(large.train, ChainedDataset) and isinstance(one.train, BlendedDataset)
    epoch = sum(len(d) for d in one.train.datasets)
    samples = everything(large.train)
    assert 2 * epoch < len(samples) == 2000 < len(larger.train)  # type: ignore[arg-type]
    assert samples[:50] == everything(one.train) and samples == everything(larger.train)[:2000]
    assert one.fingerprint == large.fingerprint == larger.fingerprint
    first, second = samples[:epoch], samples[epoch : 2 * epoch]
    assert first != second and sum(sum(s) for s in first) == pytest.approx(sum(sum(s) for s in second), rel=0.01), "the same tokens"
    assert [large.train.where(i) for i in (0, epoch)] == [large.train.parts[part].where(0) for part in (0, 1)], "for messages"
    for i in (-1, 2000):
        with pytest.raises(IndexError):
            large.train[i]


def test_a_blend_of_one_asks_for_the_surplus_of_a_blend(tmp_path: Path) -> None:
    """--data-path 1.0 PREFIX: 0.5 % more samples, here one epoch more, which is shuffled apart."""
    prefix = corpus(tmp_path)
    n = len(build(tmp_path, (1, 0, 0), data_path=(prefix,)).train)  # type: ignore[arg-type]
    plain, weighted = (build(tmp_path, (n, 0, 0), data_path=words) for words in ((prefix,), ("1.0", prefix)))
    assert (plain.train.num_epochs, weighted.train.num_epochs) == (1, 2)  # type: ignore[union-attr]
    assert weighted.fingerprint == build(tmp_path, (n + 1, 0, 0), data_path=(prefix,)).fingerprint, "so it is no other data set"
    own = build(tmp_path, (n, 0, 0), train_data_path=("1.0", prefix))
    assert own.train.num_epochs == 1, "not where each split has paths of its own"  # type: ignore[union-attr]


def test_splits_that_are_repeated_are_warned_of(tmp_path: Path) -> None:
    prefix, other = corpus(tmp_path), corpus(tmp_path, "b", 60, seed=1)
    sets = build(tmp_path, (10, 5, 5), data_path=(prefix,))
    assert sets.warnings == ()
    sets = build(tmp_path, (5000, 500, 5), data_path=(prefix,))
    (warning,) = sets.warnings
    assert "the valid split has" in warning and f"repeated {sets.valid.num_epochs} times for the 500" in warning  # type: ignore[union-attr]
    sets = build(tmp_path, (10, 500, 500), data_path=("1", prefix, "1", other))
    assert [name for name in ("train", "valid", "test") for w in sets.warnings if f"the {name} split has" in w] == ["valid", "test"]
    assert all(warning.endswith(" (the blend repeats 2 of its data sets)") for warning in sets.warnings)


def test_a_split_is_too_small_where_one_validation_takes_more_than_it_has(tmp_path: Path) -> None:
    """That all validations of a run together do is no matter: each goes on where the last one ended."""
    prefix, other = corpus(tmp_path), corpus(tmp_path, "b", 60, seed=1)
    sets = build(tmp_path, (0, 1, 1), data_path=(prefix,))
    size = min(len(sets.valid), len(sets.test))  # type: ignore[arg-type]

    def told(at_once: int, *paths: str, by_default: bool = False) -> tuple[tuple[str, ...], tuple[str, ...]]:
        config = DataConfig(data_path=paths, split="8,1,1", data_cache_path=str(tmp_path / "cache"))
        made = build_datasets(
            config, seq_length=S, seed=5, tokenizer=ByteTokenizer(), num_samples=(10, 20 * at_once, at_once),
            evaluation=Evaluation(4, at_once, by_default),
        )  # fmt: skip
        return made.warnings, made.notes

    assert told(size, prefix) == told(size // 2, prefix) == told(size // 2, "1", prefix, "1", other) == ((), ())
    (first, second), notes = told(4 * size, prefix)
    assert "the valid split has" in first and "the test split has" in second and not notes
    assert first.endswith("; --eval-iters 1 takes no more than it has")
    assert told(4 * size, prefix, by_default=True) == ((), (first, second))
    assert len(told(8 * size, "1", prefix, "1", other)[0]) == 2 and "--eval-iters" not in told(9 * size, prefix)[0][0]


def test_blend_indices_are_cached(tmp_path: Path) -> None:
    a, b = corpus(tmp_path, "a"), corpus(tmp_path, "b", 30, seed=1)
    options = dict(data_path=("3", a, "7", b), data_cache_path=str(tmp_path / "cache"))
    first = everything(build(tmp_path, (100, 0, 0), **options).train)
    assert len(list((tmp_path / "cache").glob("blend-*-sample.npy"))) == 1
    assert everything(build(tmp_path, (100, 0, 0), **options).train) == first


def test_cyclic_trains_on_one_epoch(tmp_path: Path) -> None:
    prefix = corpus(tmp_path)
    sets = build(tmp_path, (10_000, 500, 0), data_path=(prefix,), dataloader_type="cyclic")
    assert sets.train.num_epochs == 1 and len(sets.train) < 10_000  # type: ignore[union-attr, arg-type]
    assert len(sets.valid) >= 500  # type: ignore[arg-type]


@pytest.mark.parametrize(("split", "message"), [
    ("969,30,1", r"a: the test split is empty \(0 of 60 sequences\): give it a larger share with --split \(or 0 to go without it\)"),
    ("58,1,1", r"a: the test split is empty \(1 of 60 sequences, none of which has a token\): give it a larger share"),
])  # fmt: skip
def test_empty_splits(split: str, message: str, tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "a", vocab_size=257) as writer:
        for i in range(60):
            writer.add_document([1] * 20 * (i < 59), [20 * (i < 59)])
    with pytest.raises(DataError, match=message):
        build(tmp_path, (1, 1, 1), data_path=(str(tmp_path / "a"),), split=split)


@pytest.mark.parametrize("words", [("a",), ("2", "a", "3", "b")])
def test_splits_shorter_than_a_sample_are_repeated(words: tuple[str, ...], tmp_path: Path) -> None:
    """As in Megatron, which says nothing; one data set of a blend may be short too."""
    for name in "ab":
        with IndexedDatasetWriter(tmp_path / name, vocab_size=257) as writer:
            writer.add_document(list(range(30)))
            writer.add_document([7, 8, 9])
    paths = tuple(str(tmp_path / word) if word in "ab" else word for word in words)
    sets = build(tmp_path, (4, 5, 0), data_path=paths, split="1,1")
    assert sets.valid is not None and everything(sets.valid)[:5] == [([7, 8, 9] * 6)[k : k + S] for k in _starts(sets.valid, 5)]
    (warning,) = sets.warnings
    assert "the valid split has 3 tokens, less than one sample of 8 (and one more): it is repeated" in warning
    with pytest.raises(
        DataError, match=r"the valid split has 3 tokens .*one sample needs seq_length \+ 1 = 9 .*without weights, give some"
    ):
        build(tmp_path, (4, 5, 0), data_path=(str(tmp_path / "a"), str(tmp_path / "b")), split="1,1")


def _starts(data: object, n: int) -> list[int]:
    """Where in the repeated three tokens each sample begins."""
    return [data[i]["tokens"][0] - 7 for i in range(n)]  # type: ignore[index]


def test_exactly_enough_tokens_for_one_sample(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "x", vocab_size=257) as writer:
        writer.add_document(list(range(S + 1)))
    data = GPTDataset(IndexedDataset(tmp_path / "x"), (0, 1), GPTOptions(S, 1), num_samples=1, tokenizer=ByteTokenizer())
    assert len(data) == 1 and data[0]["tokens"].tolist() == list(range(S)) and data[0]["labels"].tolist() == list(range(1, S + 1))
    with pytest.raises(DataError, match="has 9 tokens"):
        GPTDataset(IndexedDataset(tmp_path / "x"), (0, 1), GPTOptions(S + 1, 1), num_samples=None, tokenizer=ByteTokenizer())


def test_ids_outside_the_vocabulary(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "x", vocab_size=1000) as writer:
        writer.add_document([1] * 20)
        writer.add_document([1] * 5 + [300] + [1] * 20)
    indexed, options = IndexedDataset(tmp_path / "x"), GPTOptions(S, 1)
    data = GPTDataset(indexed, (0, 2), options, num_samples=20, tokenizer=ByteTokenizer())
    with pytest.raises(DataError, match=r"x\.bin: byte offset 50: sequence 1, token 5 is 300: expected 0 to 256"):
        everything(data)
    everything(GPTDataset(indexed, (0, 2), options, num_samples=20, tokenizer=ByteTokenizer(), vocab_size=301))


def test_the_bin_shrinks_while_training(tmp_path: Path) -> None:
    prefix = corpus(tmp_path)
    sets = build(tmp_path, data_path=(prefix,))
    os.truncate(prefix + ".bin", 100)
    with pytest.raises(DataError, match="has become shorter"):
        everything(sets.train)


def test_fingerprint_covers_what_decides_the_samples(tmp_path: Path) -> None:
    a, b = corpus(tmp_path, "a"), corpus(tmp_path, "b", seed=9)
    base = GPTOptions(S, seed=1)

    def fingerprint(prefix: str = a, bounds: tuple[int, int] = (0, 50), options: GPTOptions = base, **changes: Any) -> str:
        given = {"num_samples": 20, "tokenizer": ByteTokenizer(), **changes}
        return GPTDataset(IndexedDataset(prefix), bounds, options, **given).fingerprint()

    assert fingerprint() == fingerprint()
    assert fingerprint(num_samples=30) == fingerprint()  # a longer run inside one epoch has the same order
    others = [
        fingerprint(b), fingerprint(bounds=(0, 49)), fingerprint(num_samples=1000), fingerprint(tokenizer=NullTokenizer(257)),
        *(fingerprint(options=replace(base, **{name: value})) for name, value in (("seq_length", 9), ("seed", 2), ("eod_mask_loss", True))),
    ]  # fmt: skip
    assert len({fingerprint(), *others}) == 8


def test_mock_data_need_no_file_and_can_be_learned() -> None:
    tokenizer = NullTokenizer(1000)
    config = DataConfig(mock_data=True, eod_mask_loss=True)
    sets = build_datasets(config, seq_length=300, seed=7, tokenizer=tokenizer, num_samples=(200, 20, 0))
    assert sets.train and sets.valid and sets.test is None and len(sets.train) == 200
    sample = sets.train[5]
    assert sample["tokens"][1:].tolist() == sample["labels"][:-1].tolist()
    assert sets.train[5]["tokens"].tolist() == sample["tokens"].tolist() != sets.train[6]["tokens"].tolist()
    assert sets.valid[5]["tokens"].tolist() != sample["tokens"].tolist()
    tokens = np.concatenate([sets.train[i]["tokens"] for i in range(200)])
    labels = np.concatenate([sets.train[i]["labels"] for i in range(200)])
    assert tokens.min() == 0 and set(tokens[tokens > 511].tolist()) == {999} and len(set(tokens.tolist())) == 513
    steps = (labels - tokens)[(tokens != 999) & (labels != 999)] % 512
    entropy = -sum(p * math.log(p) for p in np.unique(steps, return_counts=True)[1] / steps.size)
    assert 1.1 < entropy < 1.3  # far below ln(1000) = 6.9
    assert (sample["loss_mask"] == (sample["tokens"] != 999)).all()
    with pytest.raises(IndexError):
        sets.train[200]


@pytest.mark.parametrize("vocab_size", [2, 3, 257, 512, 513, 70_000])
def test_mock_data_stay_inside_any_vocabulary(vocab_size: int) -> None:
    data = MockGPTDataset(GPTOptions(600, -5), num_samples=3, tokenizer=NullTokenizer(vocab_size))
    tokens = np.concatenate([data[i]["tokens"] for i in range(3)])
    assert tokens.min() >= 0 and tokens.max() < vocab_size
    other = MockGPTDataset(GPTOptions(600, -4), num_samples=3, tokenizer=NullTokenizer(vocab_size))
    assert data.fingerprint() != other.fingerprint()
