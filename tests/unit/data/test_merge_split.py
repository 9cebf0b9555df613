"""Joining data sets and cutting one: the documents stay what they are, and nothing damaged is passed on."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from megatron_sp.commands.cli import main
from megatron_sp.data.indexed_dataset import IndexedDataset
from megatron_sp.data.writer import IndexedDatasetWriter, merge_datasets, split_dataset
from megatron_sp.utils.errors import ConfigError, DataError

DOCUMENTS = [[[1, 2], [3]], [], [[4]], [[5, 6, 7], [8], [9, 10]], [[11]]]


def write(prefix: Path, documents: list[list[list[int]]], dtype: type = np.uint16) -> str:
    with IndexedDatasetWriter(prefix, dtype=dtype) as writer:
        for document in documents:
            writer.add_document([t for s in document for t in s], [len(s) for s in document])
    return str(prefix)


def documents(prefix: Path | str) -> list[list[list[int]]]:
    data = IndexedDataset(prefix)
    bounds = data.document_index.tolist()
    return [[data.get(i).tolist() for i in range(a, b)] for a, b in pairwise(bounds)]


def test_merged_and_split_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = [write(tmp_path / name, DOCUMENTS[a:b]) for name, a, b in (("a", 0, 2), ("b", 2, 2), ("c", 2, 5))]
    assert main(["data", "merge", *parts, "--output", str(tmp_path / "new/folder/all")]) == 0
    assert documents(tmp_path / "new/folder/all") == DOCUMENTS and "5 documents, 7 sequences, 11 tokens" in capsys.readouterr().out
    whole = write(tmp_path / "whole", DOCUMENTS)
    for suffix in (".bin", ".idx"):
        assert Path(whole + suffix).read_bytes() == (tmp_path / f"new/folder/all{suffix}").read_bytes()
    outputs = [str(tmp_path / f"s{i}/part") for i in range(3)]
    assert main(["data", "split", whole, "--weights", "2,1,2", "--output", *outputs]) == 0
    assert [documents(o) for o in outputs] == [DOCUMENTS[:2], DOCUMENTS[2:3], DOCUMENTS[3:]]
    merge_datasets(outputs, str(tmp_path / "again"))
    assert Path(whole + ".bin").read_bytes() == (tmp_path / "again.bin").read_bytes()
    assert main(["data", "verify", *outputs]) == 0


def test_a_range_of_a_large_data_set_is_copied_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_sp.data.writer._COPY_BYTES", 6)
    whole = write(tmp_path / "whole", DOCUMENTS)
    split_dataset(whole, [1, 4], [str(tmp_path / "x"), str(tmp_path / "y")])
    assert documents(tmp_path / "y") == DOCUMENTS[1:]


def test_what_is_damaged_is_not_passed_on(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", DOCUMENTS), write(tmp_path / "b", DOCUMENTS)
    data = bytearray(Path(b + ".bin").read_bytes())
    data[3] ^= 1
    Path(b + ".bin").write_bytes(data)
    with pytest.raises(DataError, match="is not what was written"):
        merge_datasets([a, b], str(tmp_path / "all"))
    with pytest.raises(DataError, match="is not what was written"):
        split_dataset(b, [1, 1], [str(tmp_path / "x"), str(tmp_path / "y")])
    assert not list(tmp_path.glob("all*")) and not list(tmp_path.glob("x*"))


def test_refused(tmp_path: Path) -> None:
    a, wide = write(tmp_path / "a", DOCUMENTS), write(tmp_path / "wide", DOCUMENTS, np.int32)
    out = str(tmp_path / "out")
    (tmp_path / "link.bin").symlink_to(tmp_path / "a.bin")
    for prefixes, output, message in (
        ([a, wide], out, "only data sets of one dtype"), ([a, a + ".idx"], a, "is one of the inputs"),
        ([a], str(tmp_path / "link"), "is one of the inputs"),
        ([str(tmp_path / "none")], out, "none"),
    ):  # fmt: skip
        with pytest.raises((ConfigError, DataError), match=message):
            merge_datasets(prefixes, output)
    for weights, outputs, message in (
        ([1.0], [out, out + "2"], "1 numbers and --output 2 names"), ([1.0, 0.0], [out, out + "2"], "numbers above 0"),
        ([1.0, float("nan")], [out, out + "2"], "above 0"),
        ([1e308, 1e308], [out, out + "2"], "above 0"), ([1.0, 1e-9], [out, out + "2"], "would get none"),
        ([1.0, 1.0], [out, out], "each name once"),
        ([1.0, 1.0], [out, a], "is one of the inputs"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            split_dataset(a, weights, outputs)
    assert main(["data", "split", a, "--weights", "one", "--output", out]) == 2


def test_parts_are_all_there_and_in_order(tmp_path: Path) -> None:
    parts = [write(tmp_path / f"p-{i:05d}-of-00003", DOCUMENTS[i : i + 1]) for i in (1, 2, 3)]
    merge_datasets([part + suffix for part in parts for suffix in (".bin", ".idx", ".sha256")], str(tmp_path / "all"))
    assert documents(tmp_path / "all") == DOCUMENTS[1:4]
    with pytest.raises(ConfigError, match=r"1 of the 3 parts of .*p are missing: .*p-00002-of-00003"):
        merge_datasets([parts[0], parts[2]], str(tmp_path / "some"))
    with pytest.raises(ConfigError, match=r"not in order \(2, 1, 3\)"):
        merge_datasets([parts[1], parts[0], parts[2]], str(tmp_path / "some"))


def test_inspect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = write(tmp_path / "a", [[list(b"one"), list(b"two")], []], np.uint16)
    assert main(["data", "inspect", prefix, "--document", "0", "1", "--tokenizer-type", "ByteTokenizer", "--tokens", "2"]) == 0
    said = capsys.readouterr().out
    assert "documents          2" in said and "3 tokens: tw" in said and "empty documents    1" in said
    assert main(["data", "inspect", prefix, "--document", "0", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["shown"][0]["sequences"][1] == {"num_tokens": 3, "ids": list(b"two")} and record["longest_document"] == 6
    assert main(["data", "inspect", prefix, "--document", "2"]) == 2
    assert "has documents 0 to 1" in capsys.readouterr().err
    empty = write(tmp_path / "e", [])
    assert main(["data", "inspect", empty]) == 0 and main(["data", "inspect", empty, "--document", "0"]) == 2
