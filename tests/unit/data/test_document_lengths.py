"""Documents of a row: those that its tokens show, and as the index has them, without a look at a token."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_sp.config.schema import DataConfig
from megatron_sp.data.blend import BlendedDataset, ChainedDataset
from megatron_sp.data.build import Datasets, build_bert_datasets, build_datasets
from megatron_sp.data.dataset import RowDataset, Sample, make_sample
from megatron_sp.data.gpt_dataset import PackedDataset, document_numbers
from megatron_sp.data.indexed_dataset import IndexedDataset
from megatron_sp.data.tokenizers import ByteTokenizer, NullTokenizer
from megatron_sp.data.writer import IndexedDatasetWriter
from megatron_sp.ops.attention import document_ends

S, EOD = 31, 256
PACKED = {"reset_attention_mask": True}


class Words(NullTokenizer):
    """[PAD], [UNK], [CLS], [SEP], [MASK], then whole words."""

    def __init__(self) -> None:
        super().__init__(100)
        self.pad, self.cls, self.sep, self.mask = 0, 2, 3, 4

    def starts_word(self, ids: np.ndarray) -> np.ndarray:
        return np.ones(ids.shape, bool)


def corpus(folder: Path, name: str = "a", seed: int = 0, sentences: int = 1, longest: int = 40, ends: bool = True) -> str:
    """Documents of 1 to ``longest`` tokens, in up to ``sentences`` sequences, some of them empty, the last of them not."""
    random = np.random.RandomState(seed)
    with IndexedDatasetWriter(folder / name, vocab_size=257) as writer:
        for length in random.randint(1, longest + 1, 90):
            cuts = np.sort(random.randint(0, length, random.randint(0, sentences)))
            tokens = random.randint(5, 99, length)
            tokens[-1] = EOD if ends else 5
            writer.add_document(tokens, np.diff([0, *cuts, length]).tolist())
    return str(folder / name)


def build(n: int = 150, **data: object) -> Datasets:
    config = DataConfig(**({"split": "1,0,0"} | PACKED | data))  # type: ignore[arg-type]
    return build_datasets(config, seq_length=S, seed=7, tokenizer=ByteTokenizer(), num_samples=(n, 0, 0))


def build_bert(**data: object) -> Datasets:
    config = DataConfig(**({"split": "1,0,0"} | data))  # type: ignore[arg-type]
    binary_head = not data.get("bert_pack_sequences")
    return build_bert_datasets(config, seq_length=S, seed=7, tokenizer=Words(), num_samples=(60, 0, 0), binary_head=binary_head)


def assert_those_of_the_tokens(dataset: object, several: int = 2) -> None:
    """The lengths are those of the runs of ``documents``, and some row has at least ``several``."""
    seen = 0
    for i in range(len(dataset)):  # type: ignore[arg-type]
        numbers, lengths = dataset[i]["documents"], dataset.document_lengths(i)  # type: ignore[index, attr-defined]
        starts = np.flatnonzero(np.diff(numbers, prepend=-1))
        assert lengths.tolist() == np.diff([*starts, numbers.size]).tolist(), f"row {i}"
        assert lengths.dtype == np.int64
        seen = max(seen, lengths.size)
    assert seen >= several


@pytest.mark.parametrize("sentences, longest", [(1, 40), (1, 3), (1, 200), (5, 40)])
def test_rows_of_a_file(sentences: int, longest: int, tmp_path: Path) -> None:
    data = build(data_path=(corpus(tmp_path, sentences=sentences, longest=longest),))
    assert_those_of_the_tokens(data.train, 20 if longest == 3 else 2)


def test_blends_and_several_passes(tmp_path: Path) -> None:
    a, b = corpus(tmp_path), corpus(tmp_path, "b", seed=1, longest=90)
    by_weight, by_size = build(data_path=("0.3", a, "0.7", b)).train, build(700, data_path=(a, b)).train
    assert isinstance(by_weight.dataset, BlendedDataset) and isinstance(by_size.dataset, ChainedDataset)  # type: ignore[union-attr]
    assert_those_of_the_tokens(by_weight)
    assert_those_of_the_tokens(by_size)


def test_synthetic_rows() -> None:
    assert_those_of_the_tokens(build(mock_data=True).train)
    without_end = ByteTokenizer()
    without_end.eod = None  # type: ignore[assignment]
    config = DataConfig(mock_data=True)
    data = build_datasets(config, seq_length=S, seed=7, tokenizer=without_end, num_samples=(1, 0, 0)).train
    assert data.document_lengths(0).tolist() == [S]  # type: ignore[union-attr]


def test_rows_of_bert(tmp_path: Path) -> None:
    """Every sample is a document, and so is the padding; rows that are not packed are one."""
    path = (corpus(tmp_path, sentences=6, longest=30, ends=False),)
    for source in ({"mock_data": True}, {"data_path": path}):
        assert_those_of_the_tokens(build_bert(bert_pack_sequences=True, **source).train)
        plain = build_bert(**source).train
        assert plain.document_lengths(3).tolist() == [S]  # type: ignore[union-attr]


def test_no_token_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = corpus(tmp_path)
    dataset: RowDataset = build(data_path=(path,)).train  # type: ignore[assignment]
    packed: RowDataset = build_bert(data_path=(path,), bert_pack_sequences=True).train  # type: ignore[assignment]
    monkeypatch.setattr(IndexedDataset, "get", None)
    monkeypatch.setattr(IndexedDataset, "get_range", None)
    assert dataset.document_lengths(0).sum() == packed.document_lengths(0).sum() == S


class Stretches:
    """Samples from given stretches of tokens."""

    def __init__(self, *stretches: list[int]) -> None:
        self.stretches = [np.array(s, np.int64) for s in stretches]

    def __len__(self) -> int:
        return len(self.stretches)

    def __getitem__(self, i: int) -> Sample:
        return make_sample(self.stretches[i], None)

    def fingerprint(self) -> str:
        return "x"


@pytest.mark.parametrize("tokens, numbers, positions", [
    ([1, 2, 3], [0, 0, 0], [0, 1, 2]),
    ([1, EOD, 2, 3], [0, 0, 1, 1], [0, 1, 0, 1]),
    ([EOD, 1, 2], [0, 1, 1], [0, 0, 1]),
    ([1, 2, EOD], [0, 0, 0], [0, 1, 2]),
    ([1, EOD, EOD, 4, EOD, 5], [0, 0, 1, 2, 2, 3], [0, 1, 0, 0, 1, 0]),
    ([EOD], [0], [0]),
])  # fmt: skip
def test_the_end_of_document_token_belongs_to_the_document_it_ends(tokens: list[int], numbers: list[int], positions: list[int]) -> None:
    data = PackedDataset(Stretches([*tokens, 0]), EOD, positions=True, documents=True)
    sample = data[0]
    assert sample["tokens"].tolist() == tokens and sample["documents"].tolist() == numbers and sample["positions"].tolist() == positions
    assert len(data) == 1 and data.fingerprint() == "x" and sample["positions"].dtype == np.int64


def test_only_what_is_asked_for_is_added() -> None:
    plain = {"tokens", "labels", "loss_mask"}
    assert set(PackedDataset(Stretches([1, 2]), EOD, positions=True, documents=False)[0]) == plain | {"positions"}
    assert set(PackedDataset(Stretches([1, 2]), EOD, positions=False, documents=True)[0]) == plain | {"documents"}


def test_ends_of_documents() -> None:
    rows = [[1, EOD, 2, 3], [EOD, 1, 2, EOD], [1, 2, 3, 4]]
    numbers = torch.from_numpy(np.stack([document_numbers(np.array(row), EOD) for row in rows]))
    assert document_ends(numbers) == ((2, 4), (1, 4), (4,))
    assert document_ends(numbers[2:]) is None, "one document in each sequence is nothing special"
    assert document_ends(torch.tensor([[5, 5, 0, 0, 5]])) == ((2, 4, 5),), "numbers may come again"
