"""Flags that go by the end-of-document id, on data that have it at the ends of documents, elsewhere, or nowhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest

from megatron_sp.config.schema import DataConfig
from megatron_sp.data.build import Datasets, build_datasets
from megatron_sp.data.indexed_dataset import IndexedDataset
from megatron_sp.data.tokenizers import ByteTokenizer, Tokenizer, build_tokenizer
from megatron_sp.data.writer import IndexedDatasetWriter
from megatron_sp.utils.errors import ConfigError, DataError

EOD = 256
FLAGS = ("reset_attention_mask", "reset_position_ids", "eod_mask_loss")


def write(folder: Path, documents: Iterable[Sequence[int]], name: str = "a", sentences: int = 1) -> str:
    with IndexedDatasetWriter(folder / name, vocab_size=257) as writer:
        for tokens in documents:
            cuts = np.linspace(0, len(tokens), sentences + 1).astype(int)
            writer.add_document(np.array(tokens, np.int64), np.diff(cuts).tolist() if len(tokens) else [])
    return str(folder / name)


def texts(n: int, end: int | None, seed: int = 0, longest: int = 30) -> list[list[int]]:
    """Documents of 2 to ``longest`` tokens, all with the same last id, or with any."""
    random = np.random.RandomState(seed)
    made = [random.randint(0, 250, random.randint(2, longest + 1)).tolist() for _ in range(n)]
    return made if end is None else [[*tokens[:-1], end] for tokens in made]


def cut(tokens: Sequence[int], length: int) -> list[Sequence[int]]:
    return [tokens[at : at + length] for at in range(0, len(tokens) // length * length, length)]


def joined(documents: Iterable[Sequence[int]]) -> list[int]:
    return [token for tokens in documents for token in tokens]


def build(*paths: str, flag: str = FLAGS[0], tokenizer: Tokenizer | None = None, split: str = "8,1,1") -> Datasets:
    data = DataConfig(data_path=paths, split=split, **{flag: True})  # type: ignore[arg-type]
    return build_datasets(data, seq_length=16, seed=1, tokenizer=tokenizer or ByteTokenizer(), num_samples=(20, 2, 2))


@pytest.mark.often("reset_attention_mask")
@pytest.mark.parametrize("flag", FLAGS)
def test_data_without_ends_are_an_error(flag: str, tmp_path: Path) -> None:
    """The flag did nothing, and said nothing."""
    spelled = f"--{flag.replace('_', '-')}"
    for name, documents in {
        "none": texts(400, None),
        "another": texts(400, 7),
        "equal": [[1, 2, 3, 4]] * 400,
        "one": texts(1, None),
    }.items():
        path = write(tmp_path, documents, name)
        with pytest.raises(DataError, match=rf"^{spelled} goes by the end-of-document id, 256\. .*{name} \(train\): .* looked at none end"):
            build(path, flag=flag, split="8,1,1" if len(documents) > 1 else "1")
    with pytest.raises(DataError, match=r"85 end with 7 .*--append-eod; .*--eod-id 7; or leave"):
        build(str(tmp_path / "another"), flag=flag)
    build(write(tmp_path, texts(400, EOD), "right"), flag=flag)
    with pytest.raises(DataError, match=r"85 end with 7 .*--eod-id ID; or leave"):  # which stands inside, too: it is a letter
        build(write(tmp_path, [[7, 8, 7, 9, 7]] * 400, "letters"), flag=flag)


def test_what_fits_is_read_in_silence(tmp_path: Path) -> None:
    with_empty = [tokens for some in texts(60, EOD) for tokens in ([], some, [], [])]
    for name, path in {
        "documents": write(tmp_path, texts(300, EOD), "documents"),
        "sentences": write(tmp_path, [[*tokens, EOD] for tokens in texts(300, 9)], "sentences", sentences=2),
        "empty": write(tmp_path, with_empty, "empty"),
        "ends": write(tmp_path, [[EOD]] * 50, "ends"),
    }.items():
        made = build(path, split="1")
        assert made.warnings == made.notes == (), name


def test_every_data_set_and_split_is_looked_at(tmp_path: Path) -> None:
    right, wrong = write(tmp_path, texts(200, EOD), "right"), write(tmp_path, texts(200, 7), "wrong")
    for paths in ((right, right, wrong), ("1", right, "0.01", wrong)):
        with pytest.raises(DataError, match=r"wrong \(train\): of .*\(and 2 more of 6 data sets\)"):
            build(*paths)
    half = write(tmp_path, texts(160, EOD) + texts(40, 7, seed=1), "half")
    with pytest.raises(DataError, match=r"half \(valid\): of 20 documents"):
        build(half)
    data = DataConfig(train_data_path=(right,), valid_data_path=(wrong,), eod_mask_loss=True)
    with pytest.raises(DataError, match=r"wrong \(valid\)"):
        build_datasets(data, seq_length=16, seed=1, tokenizer=ByteTokenizer(), num_samples=(20, 2, 0))


def test_pieces_and_joined_documents_are_a_note_and_some_without_an_end_a_warning(tmp_path: Path) -> None:
    stream = joined(texts(2000, EOD))
    for name, documents in {
        "pieces": cut(stream, 8),
        "rows": cut(stream, 64),
        "shards": [stream[: 900 + 7 * k] for k in range(20)],
    }.items():
        made = build(write(tmp_path, documents, name), split="1")
        assert made.warnings == () and len(made.notes) == 1 and "taken for pieces" in made.notes[0], name
    some = build(write(tmp_path, texts(300, EOD)[:200] + texts(100, None), "some"), split="1")
    assert some.notes == () and len(some.warnings) == 1 and "run into the next one" in some.warnings[0]
    with pytest.raises(DataError, match="looked at none end"):  # the id is a letter, as it would be with a wrong --eod-id
        build(write(tmp_path, [[EOD, 1, EOD, 9][-k:] for k in (2, 3, 4)] * 100, "letters"), split="1")
    few = texts(30, EOD) + texts(300, None)
    with pytest.raises(DataError, match="documents looked at"):
        build(write(tmp_path, few, "few"), split="1")


def test_few_tokens_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, reads = write(tmp_path, texts(3000, EOD)), []
    plain = IndexedDataset.get
    monkeypatch.setattr(IndexedDataset, "get", lambda self, *place: reads.append(place) or plain(self, *place))
    build(*[path] * 3)
    assert 200 < len(reads) <= 256


def test_another_id_can_end_documents(tmp_path: Path) -> None:
    path = write(tmp_path, texts(100, 7))
    tokenizer = build_tokenizer(DataConfig(tokenizer_type="ByteTokenizer", eod_id=7))
    assert tokenizer.eod == 7 and tokenizer.fingerprint() != ByteTokenizer().fingerprint() and ByteTokenizer.eod == EOD
    sample = build(path, tokenizer=tokenizer).train[0]  # type: ignore[index]
    assert sample["documents"].max() == (sample["tokens"][:-1] == 7).sum() > 0
    same = build_tokenizer(DataConfig(tokenizer_type="ByteTokenizer", eod_id=EOD))
    assert same.fingerprint() == ByteTokenizer().fingerprint()
    with pytest.raises(ConfigError, match=r"eod_id \(257\) must be an id of the vocabulary, 0 to 256"):
        build_tokenizer(DataConfig(tokenizer_type="ByteTokenizer", eod_id=257))


def test_no_token_that_ends_documents(tmp_path: Path) -> None:
    tokenizer = ByteTokenizer()
    tokenizer.eod = None  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="--eod-mask-loss: needs a token that ends documents"):
        build(write(tmp_path, texts(9, EOD)), flag="eod_mask_loss", tokenizer=tokenizer)
