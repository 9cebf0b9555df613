"""A run's own copy of its tokenizer: of every kind, found from anywhere, never written over, never used when it is not as it was."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_hugging_face_tokenizer import PIECES, byte_level, write
from test_tokenizers import TEXTS

from megatron_sp.config.schema import DataConfig
from megatron_sp.data.tokenizers import build_tokenizer, kept
from megatron_sp.data.tokenizers.train import train_sentencepiece
from megatron_sp.utils.errors import CheckpointError, DataError


def sentencepiece(folder: Path) -> DataConfig:
    train_sentencepiece(TEXTS[:40], folder / "any.name", 340)
    return DataConfig(tokenizer_model=str(folder / "any.name"))


def hugging_face(folder: Path) -> DataConfig:
    write(folder, byte_level(("<|endoftext|>", "<x>")), eos_token="<x>").joinpath("tokenizer.json").rename(folder / "mine.json")
    return DataConfig(tokenizer_model=str(folder / "mine.json"))


def hugging_face_folder(folder: Path) -> DataConfig:
    write(folder, byte_level(), eos_token="<|endoftext|>")
    (folder / "generation_config.json").write_text('{"eos_token_id": 8}')
    return DataConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder))


def gpt2(folder: Path) -> DataConfig:
    (folder / "v").write_text(json.dumps({piece: i for i, piece in enumerate(PIECES)}))
    (folder / "m").write_text("#version: 0.2\na b\n\u0120 a\n")
    return DataConfig(vocab_file=str(folder / "v"), merge_file=str(folder / "m"))


def wordpiece(folder: Path) -> DataConfig:
    (folder / "words.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "A", "b"]) + "\n")
    return DataConfig(tokenizer_type="BertWordPieceCase", vocab_file=str(folder / "words.txt"))


KINDS: dict[Callable[[Path], DataConfig], set[str]] = {
    sentencepiece: {"tokenizer.model"}, hugging_face: {"tokenizer.json", "tokenizer_config.json"},
    hugging_face_folder: {"tokenizer.json", "tokenizer_config.json", "generation_config.json"},
    gpt2: {"vocab.json", "merges.txt"}, wordpiece: {"vocab.txt"},
}  # fmt: skip


def step_of(run: Path) -> Path:
    return run / "checkpoints" / "step-000001"


def kept_in(tmp_path: Path, make: Callable[[Path], DataConfig] = wordpiece) -> tuple[Path, DataConfig, kept.Record]:
    """(run, the flags, what its checkpoint says)."""
    (tmp_path / "own").mkdir()
    data, run = make(tmp_path / "own"), tmp_path / "run"
    run.mkdir()
    record = kept.keep(run, data, build_tokenizer(data))
    read = kept.Record.from_json(json.loads(json.dumps(record._asdict())))
    assert read == record
    return run, data, record


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_every_kind_is_found_from_anywhere(make: Callable[[Path], DataConfig], tmp_path: Path) -> None:
    run, data, record = kept_in(tmp_path, make)
    assert record.folder == "tokenizer" and {p.name for p in (run / "tokenizer").iterdir()} == KINDS[make] | {"SHA256SUMS"}
    tokenizer = build_tokenizer(data)
    assert kept.keep(run, data, tokenizer) == record and [p.name for p in run.iterdir()] == ["tokenizer"], "once"
    shutil.rmtree(tmp_path / "own")
    shutil.move(run, tmp_path / "moved")
    for step in (step_of(tmp_path / "moved"), tmp_path / "moved" / "step-000001"):
        again = replace(data)
        kept.take(again, record, step)
        assert build_tokenizer(again).fingerprint() == tokenizer.fingerprint() and build_tokenizer(again).eod == tokenizer.eod
        assert str(tmp_path / "moved" / "tokenizer") in str(again)


@pytest.mark.parametrize("data, size", [(DataConfig(tokenizer_type="ByteTokenizer"), None), (DataConfig(), 60)])
def test_those_without_files(data: DataConfig, size: int | None, tmp_path: Path) -> None:
    record = kept.keep(tmp_path, data, build_tokenizer(data, size))
    assert record.type == ("NullTokenizer" if size else "ByteTokenizer") and record.folder is None and not record.files
    assert list(tmp_path.iterdir()) == []
    kept.take(data, record, step_of(tmp_path))


def damage(run: Path, how: str) -> None:
    file = run / "tokenizer" / "vocab.txt"
    if how == "changed":
        file.write_text(file.read_text().replace("b", "c"))
    elif how == "gone":
        file.unlink()
    elif how == "link":
        file.rename(run / "elsewhere")
        file.symlink_to(run / "elsewhere")
    elif how == "pipe":
        file.unlink()
        os.mkfifo(file)
    elif how == "linked folder":
        (run / "tokenizer").rename(run / "elsewhere")
        (run / "tokenizer").symlink_to(run / "elsewhere")


@pytest.mark.parametrize("how", ["changed", "gone", "link", "pipe", "linked folder"])
def test_a_damaged_copy_is_said_and_never_used(how: str, tmp_path: Path) -> None:
    run, data, record = kept_in(tmp_path)
    damage(run, how)
    with pytest.raises(DataError, match=r"own copy of its tokenizer is damaged: .*tokenizer.* delete the folder"):
        kept.take(replace(data), record, step_of(run))


def test_a_copy_is_never_written_over_and_never_through_a_link(tmp_path: Path) -> None:
    run, data, record = kept_in(tmp_path)
    before = (run / "tokenizer" / "vocab.txt").read_bytes()
    Path(data.vocab_file or "").write_text("[PAD]\n[UNK]\n[SEP]\nother\n")
    other = kept.keep(run, data, build_tokenizer(data))
    assert other.folder is not None and other.folder.startswith("tokenizer-") and (run / "tokenizer" / "vocab.txt").read_bytes() == before
    for one in (record, other):
        found = replace(data)
        kept.take(found, one, step_of(run))
        assert build_tokenizer(found).fingerprint() == one.fingerprint, "each checkpoint has its own"
    damage(run, "linked folder")
    assert kept.keep(run, data, build_tokenizer(data)) == other
    (run / str(other.folder) / "vocab.txt").write_text("[UNK]\n[SEP]\n")
    with pytest.raises(DataError, match="damaged"):
        kept.keep(run, data, build_tokenizer(data))


def test_without_the_copy_the_original_is_used_if_it_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, data, record = kept_in(tmp_path)
    shutil.rmtree(run / "tokenizer")
    kept.take(data, record, step_of(run))
    assert data.vocab_file == str(tmp_path / "own" / "words.txt")
    Path(data.vocab_file).write_text("[UNK]\n[SEP]\n")
    with pytest.raises(DataError, match=r"words\.txt is not the file of the tokenizer that the run was trained with: SHA-256"):
        kept.take(data, record, step_of(run))
    os.unlink(data.vocab_file)
    with pytest.raises(DataError, match=r"is not there: .*words\.txt; the run keeps one in tokenizer/, which is gone, too"):
        kept.take(data, record, step_of(run))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=rf"is not there: gone\.txt \(in {tmp_path}\); the run keeps none"):
        kept.take(replace(data, vocab_file="gone.txt"), None, step_of(run))


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, data: bytes) -> None:
        if path.name == kept.SUMS:
            raise OSError(28, "No space left on device")
        path.write_bytes(data)

    monkeypatch.setattr(kept, "write_synced", full)
    (tmp_path / "own").mkdir()
    data = gpt2(tmp_path / "own")
    with pytest.raises(OSError, match="No space"):
        kept.keep(tmp_path, data, build_tokenizer(data))
    assert [p.name for p in tmp_path.iterdir()] == ["own"]


GOOD = {"type": "BertWordPieceCase", "fingerprint": None, "folder": "tokenizer", "files": {"vocab.txt": "0" * 64}}


@pytest.mark.parametrize(
    "change",
    [{"folder": ".."}, {"folder": "tokenizer/../.."}, {"folder": 3}, {"files": {"../x": "0" * 64}}, {"files": {"vocab.txt": "0"}},
     {"files": {}}, {"files": None}, {"type": None}, {"fingerprint": 4}],
)  # fmt: skip
def test_what_is_no_record_is_refused(change: dict[str, Any]) -> None:
    assert kept.Record.from_json(GOOD) is not None and kept.Record.from_json(None) is None
    for value in ({**GOOD, **change}, [], "x", {}):
        with pytest.raises(CheckpointError, match=r"state\.json: tokenizer"):
            kept.Record.from_json(value)
