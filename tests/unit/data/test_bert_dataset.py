"""BERT samples from sentences: golden values, a literal transcription, packing, mock data, and what bad data get."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_sp.config.schema import DataConfig
from megatron_sp.data.bert_dataset import BERTDataset, BERTOptions, MockBERTDataset, pack
from megatron_sp.data.blend import BlendedDataset, ChainedDataset
from megatron_sp.data.build import Datasets, build_bert_datasets
from megatron_sp.data.dataset import Dataset, Sample
from megatron_sp.data.indexed_dataset import IndexedDataset
from megatron_sp.data.loader import BatchLoader
from megatron_sp.data.tokenizers import ByteTokenizer, NullTokenizer
from megatron_sp.data.writer import IndexedDatasetWriter
from megatron_sp.parallel.forward_context import micro_batch_context
from megatron_sp.tasks.bert import loss_counts
from megatron_sp.utils.errors import ConfigError, DataError

V = 100


class Words(NullTokenizer):
    """[PAD], [UNK], [CLS], [SEP], [MASK], then pieces of which every third continues a word."""

    def __init__(self) -> None:
        super().__init__(V)
        self.pad, self.cls, self.sep, self.mask = 0, 2, 3, 4

    def starts_word(self, ids: np.ndarray) -> np.ndarray:
        result: np.ndarray = (ids < 5) | ((ids - 5) % 3 != 0)
        return result


def write(prefix: Path, documents: Sequence[Sequence[int]], seed: int | None = None) -> str:
    """Documents of sentences of these lengths; tokens drawn, or counting up in sevens."""
    random, at = np.random.RandomState(seed or 0), 0
    with IndexedDatasetWriter(prefix, vocab_size=V) as writer:
        for lengths in documents:
            n = sum(lengths)
            tokens = 5 + 7 * np.arange(at, at + n) % 95 if seed is None else random.randint(5, V, n)
            writer.add_document(tokens, list(lengths))
            at += n
    return str(prefix)


def corpus(folder: Path, name: str = "a", num_documents: int = 60, seed: int = 1) -> str:
    random = np.random.RandomState(seed)
    return write(folder / name, [random.randint(0, 12, random.randint(0, 9)).tolist() for _ in range(num_documents)], seed)


def build(n: tuple[int, int, int] = (100, 5, 5), s: int = 24, seed: int = 1234, binary_head: bool = True, **data: object) -> Datasets:
    config = DataConfig(**({"split": "8,1,1"} | data))  # type: ignore[arg-type]
    return build_bert_datasets(config, seq_length=s, seed=seed, tokenizer=Words(), num_samples=n, binary_head=binary_head)


def same(a: Sample, b: Sample) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)


# Made by Megatron-LM's own data set (megatron-core 0.16.1) with this vocabulary: sequence length 20, seed 1234, masking
# probability 0.3, short sequence probability 0.3, four samples asked for. Rows of the index; text, types, labels and
# is_random of the first three.
DOCUMENTS = [[3, 5, 4], [2], [6, 1, 2, 7, 3], [], [30, 9, 4, 4]]
_ = -1
GOLDEN = {
    True: ([[4, 7, 8], [0, 3, 17], [7, 9, 17], [11, 13, 10], [9, 11, 17]], [
        ([2, 57, 64, 3, 8, 4, 22, 29, 36, 4, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0],
         [_, _, _, _, _, 15, _, _, _, 43, _, _, _, _, _, _, _, _, _, _], 1),
        ([2, 4, 12, 19, 26, 33, 40, 47, 4, 3, 79, 4, 75, 82, 3, 0, 0, 0, 0, 0], [*[0] * 10, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0],
         [_, 5, _, _, _, _, _, _, 54, _, 61, 68, _, _, _, _, _, _, _, _], 0),
        ([2, 25, 32, 39, 3, 71, 4, 4, 4, 99, 11, 4, 3, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0],
         [_, _, _, _, _, _, 78, 85, 92, _, _, 18, _, _, _, _, _, _, _, _], 1),
    ]),
    False: ([[3, 4, 8], [0, 3, 17], [4, 9, 17], [10, 13, 11], [9, 10, 10]], [
        ([2, 15, 96, 3, *[0] * 16], [0] * 20, [_, 89, *[_] * 18], 0),
        ([2, 5, 12, 19, 26, 33, 4, 4, 54, 61, 68, 4, 4, 3, 0, 0, 0, 0, 0, 0], [0] * 20,
         [_, _, _, _, _, _, 40, 47, _, _, _, 75, 82, _, _, _, _, _, _, _], 0),
        ([2, 4, 4, 36, 43, 50, 4, 64, 71, 78, 4, 92, 99, 11, 18, 25, 32, 39, 3, 0], [0] * 20,
         [_, 22, 29, _, _, _, 57, _, _, _, 85, 92, _, _, _, _, _, _, _, _], 0),
    ]),
}  # fmt: skip


@pytest.mark.parametrize("binary_head", GOLDEN)
def test_golden_values(binary_head: bool, tmp_path: Path) -> None:
    indexed = IndexedDataset(write(tmp_path / "a", DOCUMENTS))
    data = BERTDataset(indexed, (0, 5), BERTOptions(20, 1234, 0.3, 0.3, binary_head), num_samples=4, tokenizer=Words())
    rows, samples = GOLDEN[binary_head]
    assert data.index.tolist() == rows
    for i, (text, types, labels, swapped) in enumerate(samples):
        sample = data[i]
        masked = np.array(labels) >= 0
        assert (sample["tokens"].tolist(), sample["types"].tolist(), int(sample.get("order", 0))) == (text, types, swapped)
        assert ("order" in sample) == binary_head
        assert sample["loss_mask"].tolist() == masked.tolist()
        assert sample["labels"].tolist() == np.where(masked, labels, 0).tolist()
        assert int(sample["length"]) == text.index(0)


def joined(parts: Iterable[list[Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(parts))


def literal(sentences: list[list[int]], target: int, options: BERTOptions, i: int) -> Sample:
    """A sample by the definition, token by token."""
    random, tokenizer = np.random.RandomState((options.seed + i) % 2**32), Words()
    pivot, swapped = len(sentences), False
    if options.binary_head:
        pivot = random.randint(low=1, high=len(sentences)) if len(sentences) >= 3 else 1
        swapped = random.random() < 0.5
    a, b = (joined(part) for part in (sentences[:pivot], sentences[pivot:]))
    if swapped:
        a, b = b, a
    while len(a) + len(b) > target:
        longer = a if len(a) > len(b) else b
        del longer[0 if random.random() < 0.5 else -1]
    tokens = [2, *a, 3] + ([*b, 3] if b else [])
    types = [0] * (len(a) + 2) + [1] * (len(b) + 1 if b else 0)
    words: list[list[int]] = []
    for position, token in enumerate(tokens):
        if token not in (2, 3):
            if not tokenizer.starts_word(np.array([token]))[0] and words:
                words[-1].append(position)
            else:
                words.append([position])
    most = min(options.mask_prob * target, max(1, round(len(tokens) * options.mask_prob)))
    runs = [[joined(words[k : k + n]) for n in (1, 2, 3)] for k in range(len(words))]
    random.shuffle(runs)
    seen, labels = list(tokens), [0] * options.seq_length
    masked: set[int] = set()
    for run in runs:
        if len(masked) >= most:
            break
        n = random.choice([1, 2, 3], p=np.array([6, 3, 2]) / 11)
        while n > 0 and len(masked) + len(run[n - 1]) > most:
            n -= 1
        if n == 0 or masked & set(run[n - 1]):
            continue
        for position in run[n - 1]:
            masked.add(position)
            labels[position] = tokens[position]
            if random.random() < 0.8:
                seen[position] = 4
            elif random.random() >= 0.5:
                seen[position] = random.randint(0, V)
    rest = options.seq_length - len(tokens)
    sample = {
        "tokens": np.array(seen + [0] * rest), "types": np.array(types + [0] * rest), "labels": np.array(labels),
        "loss_mask": np.array([k in masked for k in range(options.seq_length)], np.float32), "length": np.array(len(tokens)),
    }  # fmt: skip
    return sample | {"order": np.array(int(swapped))} if options.binary_head else sample


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=8), min_size=1, max_size=6), st.integers(5, 60), st.booleans(),
    st.sampled_from([0.05, 0.15, 0.5, 0.9]), st.sampled_from([0.0, 0.1, 0.5]), st.sampled_from([1, 1234, 2**32 - 3]),
)  # fmt: skip
def test_samples_of_a_literal_transcription(
    tmp_path_factory: pytest.TempPathFactory, docs: list[list[int]], s: int, binary_head: bool, mask_prob: float, short: float, seed: int
) -> None:
    """Sentences without tokens, of one piece of a word, longer than the row; a seed whose sum with i wraps around."""
    docs = [*docs, [3, 2]]  # so that there always is a sample
    indexed = IndexedDataset(write(tmp_path_factory.mktemp("b") / "a", docs, seed=3))
    options = BERTOptions(s, seed, mask_prob, short, binary_head)
    data = BERTDataset(indexed, (0, len(docs)), options, num_samples=8, tokenizer=Words())
    for i in range(min(len(data), 12)):
        first, last, target = data.index[i].tolist()
        assert same(data[i], literal([indexed.get(k).tolist() for k in range(first, last)], target, options, i))


def test_splits_are_by_document_and_share_nothing(tmp_path: Path) -> None:
    prefix = corpus(tmp_path, num_documents=200)
    sets = build((300, 40, 40), data_path=(prefix,))
    bounds = IndexedDataset(prefix).document_index
    seen = []
    for dataset, (first, last) in zip((sets.train, sets.valid, sets.test), ((0, 160), (160, 180), (180, 200)), strict=True):
        assert isinstance(dataset, BERTDataset)
        rows = dataset.index.astype(np.int64)
        document = np.searchsorted(bounds, rows[:, 0], side="right") - 1
        assert (rows[:, 1] <= bounds[document + 1]).all(), "a sample lies within one document"
        assert document.min() >= first and document.max() < last
        seen.append(set(document.tolist()))
    assert not seen[0] & seen[1] and not seen[1] & seen[2] and len(sets.train) >= 300  # type: ignore[arg-type]
    assert isinstance(sets.train.index, np.memmap), "from the cache"  # type: ignore[union-attr]
    again = build((300, 40, 40), data_path=(prefix,))
    assert again.fingerprint == sets.fingerprint and same(again.train[7], sets.train[7])  # type: ignore[index]


def test_what_decides_the_samples_is_in_the_fingerprint(tmp_path: Path) -> None:
    a, b = corpus(tmp_path), corpus(tmp_path, "b", seed=2)
    one_head: dict[str, object] = {"binary_head": False}
    changes: list[dict[str, object]] = [
        {}, {"seed": 5}, {"s": 25}, {"mask_prob": 0.2}, {"short_seq_prob": 0.2}, one_head, one_head | {"bert_pack_sequences": True},
        {"data_path": (b,)}, {"split": "7,2,1"}, {"n": (1000, 5, 5)},
    ]  # fmt: skip
    prints = [build(**({"data_path": (a,)} | change)).fingerprint for change in changes]  # type: ignore[arg-type]
    assert len(set(prints)) == len(changes)
    assert build(data_path=(a,), n=(101, 5, 5)).fingerprint == prints[0], "the same epochs, the same samples"


def test_batches_are_the_same_for_any_number_of_ranks(tmp_path: Path) -> None:
    data = build(data_path=(corpus(tmp_path),)).train
    assert data is not None
    shapes = {"tokens": (4, 24), "types": (4, 24), "labels": (4, 24), "loss_mask": (4, 24), "length": (4,), "order": (4,)}
    with BatchLoader(data, micro_batch_size=4, num_workers=2) as loader:
        whole = loader.step(8, 2)
    for name, shape in shapes.items():
        assert whole[0][name].shape == shape
        assert whole[0][name].dtype == (torch.float32 if name == "loss_mask" else torch.int64)
    for rank in range(2):
        with BatchLoader(data, micro_batch_size=2, dp_rank=rank, dp_size=2) as loader:
            for mine, theirs in zip(loader.step(8, 2), whole, strict=True):
                assert all(torch.equal(mine[k], theirs[k][2 * rank : 2 * rank + 2]) for k in mine)


def test_blends_and_paths_of_their_own(tmp_path: Path) -> None:
    a, b = corpus(tmp_path), corpus(tmp_path, "b", seed=2)
    blend = build(data_path=("3", a, "1", b)).train
    assert isinstance(blend, BlendedDataset) and np.bincount(blend.sets).tolist() == [75, 25]
    assert same(blend[0], blend.datasets[0][0])
    by_size = build(train_data_path=(a, b, a), valid_data_path=(b,))
    assert isinstance(by_size.train, BlendedDataset) and by_size.test is None and isinstance(by_size.valid, BERTDataset)
    epoch = sum(len(d) for d in by_size.train.datasets)
    longer = build(train_data_path=(a, b, a), n=(2 * epoch + 7, 0, 0)).train
    assert isinstance(longer, ChainedDataset) and len(longer) == 2 * epoch + 7, "its passes need not be equally long"
    assert same(longer[99], by_size.train[99]) and not any(same(longer[0], longer[epoch + k]) for k in range(3))
    one_epoch = build(data_path=(a,), dataloader_type="cyclic", n=(5, 0, 0)).train
    assert isinstance(one_epoch, BERTDataset) and len(np.unique(one_epoch.index[:, 0])) == len(one_epoch)


def real_tokens(row: Sample) -> int:
    """Tokens before the padding, which in a packed row is the last document."""
    return int(row["length"]) if "length" in row else int((row["documents"] < row["documents"][-1] + (row["tokens"][-1] != 0)).sum())


def unpadded(sample: Sample) -> list[tuple[int, ...]]:
    n = real_tokens(sample)
    columns = [sample[k][:n].tolist() for k in ("tokens", "types", "labels", "loss_mask")]
    return list(zip(*columns, strict=True))


@pytest.mark.parametrize("num_samples", [None, 40, 300])
def test_packed_rows_are_the_samples_one_after_another(num_samples: int | None, tmp_path: Path) -> None:
    indexed, s = IndexedDataset(corpus(tmp_path)), 40
    options = BERTOptions(s, 3, short_seq_prob=0.3, binary_head=False, pack=True)
    packed = BERTDataset(indexed, (0, 60), options, num_samples=num_samples, tokenizer=Words())
    assert packed.rows is not None and len(packed) >= (num_samples or 1)
    plain = BERTDataset(indexed, (0, 60), options, num_samples=num_samples, tokenizer=Words())
    plain.index, plain.rows, plain._num_samples = packed.index, None, len(packed.index)
    for i in range(len(packed)):
        row, n = packed[i], real_tokens(packed[i])
        parts = [unpadded(plain[k]) for k in range(int(packed.rows[i]), int(packed.rows[i + 1]))]
        assert unpadded(row) == joined(parts) and parts
        assert row.keys() == {"tokens", "types", "labels", "loss_mask", "documents", "positions"}
        assert row["documents"].tolist() == [d for d, part in enumerate(parts) for _ in part] + [len(parts)] * (s - n)
        assert row["positions"].tolist() == [k for part in parts for k in range(len(part))] + list(range(s - n))
        assert (row["tokens"][n:] == 0).all() and (row["loss_mask"][n:] == 0).all()
        if i + 1 < len(packed):
            assert n + len(unpadded(plain[int(packed.rows[i + 1])])) > s, "the next one would have fitted"
    assert packed.rows[-1] == len(plain) and len(plain) > 1.3 * len(packed)


def test_packing_is_greedy() -> None:
    assert pack(np.array([3, 3, 4, 10, 1, 9, 9, 2]), 10).tolist() == [0, 3, 4, 6, 7, 8]
    assert pack(np.array([10]), 10).tolist() == [0, 1]


@pytest.mark.parametrize("options", [BERTOptions(40, 7), BERTOptions(40, 7, binary_head=False), BERTOptions(5, 7)])
def test_mock_samples(options: BERTOptions) -> None:
    data = MockBERTDataset(options, num_samples=80, tokenizer=NullTokenizer(300))
    again = MockBERTDataset(options, num_samples=90, tokenizer=NullTokenizer(300))
    samples = [data[i] for i in range(80)]
    assert all(same(a, again[i]) for i, a in enumerate(samples)) and data.fingerprint() == again.fingerprint()
    lengths = {int(x["length"]) for x in samples}
    for x in samples:
        n = int(x["length"])
        whole = np.where(x["loss_mask"] > 0, x["labels"], x["tokens"])
        assert whole[0] == 296 and (whole[:n] == 297).sum() == 1 + options.binary_head and (whole[n:] == 295).all()
        assert x["types"].max() == options.binary_head and x["loss_mask"].sum() >= (options.seq_length > 5)
        text = whole[:n][(whole[:n] < 295) & (x["types"][:n] == 0)]
        assert ((np.diff(text) % 295 >= 1) & (np.diff(text) % 295 <= 3)).all(), "a walk around the ring"
    if options.seq_length > 5:
        assert len(lengths) > 10 and max(lengths) == (40 if options.binary_head else 39)
    assert {int(x.get("order", 2)) for x in samples} == ({0, 1} if options.binary_head else {2})


def test_mock_splits_and_packing(tmp_path: Path) -> None:
    sets = build((150, 150, 0), mock_data=True)
    assert sets.train is not None and sets.valid is not None and sets.test is None
    pairs = [(a, b) for a, b in ((sets.train[i], sets.valid[i]) for i in range(150)) if a["length"] == b["length"]]
    assert len(pairs) > 5 and not any(same(a, b) for a, b in pairs) and sets.train.fingerprint() != sets.valid.fingerprint()
    options = BERTOptions(40, 7, binary_head=False, pack=True)
    packed: Dataset = MockBERTDataset(options, num_samples=50, tokenizer=Words())
    plain = MockBERTDataset(BERTOptions(40, 7, binary_head=False), num_samples=200, tokenizer=Words())
    rows = [packed[i] for i in range(50)]
    flat = itertools.chain.from_iterable(unpadded(plain[i]) for i in range(200))
    assert all(token == next(flat) for row in rows for token in unpadded(row))
    assert max(row["documents"].max() for row in rows) >= 2
    fewer = MockBERTDataset(options, num_samples=10, tokenizer=Words())
    assert all(same(fewer[i], rows[i]) for i in range(10))
    with pytest.raises(IndexError):
        packed[50]


def test_what_is_left_out_is_said(tmp_path: Path) -> None:
    """Documents of several sentences with a long one, at every sequence length; one sequence alone may be of any length."""
    prefix = write(tmp_path / "a", [[600, 5]] * 9 + [[5, 6], [600], []], seed=1)
    for s in (40, 2048):
        sets = build((20, 0, 0), data_path=(prefix,), split="1", s=s)
        assert [note for note in sets.notes if "9 of 12 documents are left out, which have a sentence above 512 tokens" in note] == [
            *sets.notes
        ]
        assert len(sets.notes) == 1 and f"{prefix} (train)" in sets.notes[0]
    assert build((20, 0, 0), data_path=(write(tmp_path / "b", [[5, 6], [600]], seed=1),), split="1", binary_head=False).notes == ()


MESSAGES: list[tuple[list[list[int]], dict[str, object], type[Exception], str]] = [
    ([[5]] * 9, {}, DataError, r"every document is one sequence.*--split-sentences.*--bert-no-binary-head"),
    ([], {}, DataError, r"the train split is empty \(0 of 0 documents\)"),
    ([[600, 5], [], [5]], {"split": "1"}, DataError, r"none of the 3 documents .* 2 have fewer than 2 sentence.*, 1 have one above 512"),
    (
        [[600, 5]] * 4, {"binary_head": False, "split": "1"}, DataError,
        r"0 have fewer than 1 sentence\(s\), 4 have one above 512 tokens. Put ends of sentences",
    ),
    ([[5, 5]] * 9, {"s": 4}, ConfigError, r"seq_length \(4\) must be at least 5 for BERT"),
    ([[5, 5]] * 9, {"bert_pack_sequences": True}, ConfigError, "add --bert-no-binary-head"),
    ([[5, 5]] * 9, {"data_path": ()}, ConfigError, "there is no data"),
]  # fmt: skip


@pytest.mark.parametrize("k", range(len(MESSAGES)))
def test_what_cannot_work(k: int, tmp_path: Path) -> None:
    documents, options, kind, message = MESSAGES[k]
    prefix = write(tmp_path / "a", documents, seed=1)
    with pytest.raises(kind, match=message):
        build(**({"data_path": (prefix,)} | options))  # type: ignore[arg-type]


def test_ids_beyond_the_vocabulary_are_named_when_they_are_read(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "a", vocab_size=200) as writer:
        for _ in range(3):
            writer.add_document([7, 8, 9, 99, 100, 9], [2, 4])
    config = DataConfig(data_path=(str(tmp_path / "a"),), split="1")
    data = build_bert_datasets(config, seq_length=20, seed=1, tokenizer=Words(), num_samples=(3, 0, 0)).train
    assert data is not None
    with pytest.raises(DataError, match=r"a\.bin: byte offset \d+: sequence [135], token 2 is 100: expected 0 to 99"):
        data[0]
    small = build_bert_datasets(config, seq_length=20, seed=1, tokenizer=Words(), num_samples=(3, 0, 0), vocab_size=99).train
    with pytest.raises(DataError, match="token 1 is 99: expected 0 to 98"):
        small[0]  # type: ignore[index]


def test_a_tokenizer_without_special_tokens_is_an_error(tmp_path: Path) -> None:
    for config in (DataConfig(data_path=(corpus(tmp_path),)), DataConfig(mock_data=True)):
        with pytest.raises(ConfigError, match=r"ByteTokenizer has no \[CLS\], \[SEP\], \[MASK\], \[PAD\]: take BertWordPieceLowerCase"):
            build_bert_datasets(config, seq_length=20, seed=1, tokenizer=ByteTokenizer(), num_samples=(3, 0, 0))


def test_text_that_is_mostly_cut_off_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    prefix = write(tmp_path / "a", [[200]] * 20, seed=1)
    with caplog.at_level(logging.WARNING):
        build((10, 0, 0), data_path=(prefix,), binary_head=False, short_seq_prob=0.0)
    assert "the samples of the train split take in 10 % of the text of their sentences" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        build(data_path=(corpus(tmp_path, "b"),))
    assert not caplog.text


@pytest.mark.parametrize(("binary_head", "packed"), [(True, False), (False, False), (False, True)])
def test_rows_fit_what_the_training_step_asks_for(binary_head: bool, packed: bool) -> None:
    """A term of the loss for each task, and padding told to attention in one way, never in two."""
    data = build(mock_data=True, binary_head=binary_head, bert_pack_sequences=packed).train
    assert data is not None
    with BatchLoader(data, micro_batch_size=3) as loader:
        batch = loader.step(0, 1)[0]
    assert len(loss_counts(batch)) == 1 + binary_head
    context = micro_batch_context(batch, seed=1, step=1, drops=True, kernel="reference", causal=False)
    assert (context.mask.documents is None) != packed and (context.mask.key_lengths is None) == packed
    if context.mask.documents is not None:
        assert all(ends[-1] == 24 for ends in context.mask.documents)
