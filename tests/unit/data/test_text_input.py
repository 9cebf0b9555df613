"""Input of preprocessing: packed and columnar files, standard input, and parts that together are the whole."""

from __future__ import annotations

import gzip
import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from megatron_sp.commands.cli import main
from megatron_sp.data.text_input import Part, check_inputs, read_chunks, read_texts
from megatron_sp.utils.errors import ConfigError, DataError

TEXTS = [f"{i} " + "ä" * (i * 7 % 23) for i in range(97)] + ["", "two\nlines"]
ROWS = "".join(json.dumps({"text": t, "n": i}) + "\n" for i, t in enumerate(TEXTS)).encode()


def parquet(path: Path, rows: int = 13) -> None:
    pq.write_table(pa.table({"n": range(len(TEXTS)), "text": TEXTS}), path, row_group_size=rows)


def arrow_file(path: Path) -> None:
    table = pa.table({"text": TEXTS})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=10)


def arrow_stream(path: Path, texts: list[str] = TEXTS) -> None:
    table = pa.table({"text": pa.array(texts).dictionary_encode()})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=10)


def saved_dataset(path: Path) -> None:
    """As ``datasets.Dataset.save_to_disk`` lays it out: two files, in an order that is not that of their names."""
    path.mkdir()
    arrow_stream(path / "b.arrow", TEXTS[:40])
    arrow_stream(path / "a.arrow", TEXTS[40:])
    (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "b.arrow"}, {"filename": "a.arrow"}], "_split": "train"}))


def zstd(path: Path) -> None:
    half = len(ROWS) // 2
    path.write_bytes(zstandard.compress(ROWS[:half]) + zstandard.compress(ROWS[half:]))  # two frames, as `cat a.zst b.zst` makes them


KINDS: dict[str, Callable[[Path], object]] = {
    "a.jsonl": lambda path: path.write_bytes(ROWS),
    "a.jsonl.gz": lambda path: path.write_bytes(gzip.compress(ROWS)),
    "a.jsonl.zst": zstd,
    "a.parquet": parquet,
    "file.arrow": arrow_file,
    "stream.arrow": arrow_stream,
    "saved": saved_dataset,
}


def texts(*paths: Path | str, **options: Any) -> list[str]:
    chunks = read_chunks([str(p) for p in paths], **options)
    return [json.loads(d)["text"] if c.is_json else d.decode() for c in chunks for d in c.documents]


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_file_holds_the_same_documents(name: str, tmp_path: Path) -> None:
    KINDS[name](tmp_path / name)
    check_inputs([str(tmp_path / name)], "auto", ("text",), Part())
    assert texts(tmp_path / name) == TEXTS
    assert [text for (text,) in read_texts([str(tmp_path / name)])] == TEXTS


def test_a_tokenizer_is_trained_on_what_preprocessing_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models = []
    for name, make in KINDS.items():
        make(tmp_path / name)
        assert main(["tokenizer", "--input", str(tmp_path / name), "--output", str(tmp_path / "m"), "--vocab-size", "300"]) == 0
        models.append((tmp_path / "m").read_bytes())
    assert models == models[:1] * len(KINDS)
    (tmp_path / "a.txt").write_text("one two\n\nthree")
    (tmp_path / "b.jsonl").write_text('{"a": "x y", "b": "z"}\nno\n')
    line = ["tokenizer", "--output", str(tmp_path / "v.txt"), "--type", "wordpiece"]
    for flags, pieces, code in (
        (["--input", str(tmp_path / "a.txt")], {"one", "two", "three"}, 0),
        (["--input", str(tmp_path / "b.jsonl"), "--json-keys", "a", "b", "--skip-bad-lines"], {"x", "y", "z"}, 0),
        (["--input", str(tmp_path / "b.jsonl"), "--json-key", "b"], set(), 4),
    ):
        assert main([*line, *flags]) == code
        assert not pieces or pieces <= set((tmp_path / "v.txt").read_text().split())
    assert f"{tmp_path / 'b.jsonl'}:2: not JSON" in capsys.readouterr().err


@pytest.mark.parametrize("count", [1, 2, 3, 7, 200])
@pytest.mark.parametrize("unit", ["line", "paragraph", "file"])
def test_parts_are_the_whole_input_in_order(count: int, unit: str, tmp_path: Path) -> None:
    """Files of all kinds, an empty one, one without a newline at its end, and more parts than documents of some."""
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "plain.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\n\n\nthree\n" + b"x" * 900 + b"\nlast")
    paths = [tmp_path / "plain.txt"]
    for name, write in KINDS.items():
        write(tmp_path / name)
        paths += [tmp_path / name, tmp_path / "empty.txt"]
    whole = texts(*paths, text_unit=unit)
    parts = [texts(*paths, text_unit=unit, part=Part(i, count)) for i in range(1, count + 1)]
    assert [text for part in parts for text in part] == whole and len(whole) > len(KINDS) * len(TEXTS)
    if count in (2, 3, 7):
        assert all(parts)


def test_a_part_begins_where_a_line_does(tmp_path: Path) -> None:
    """Every bound of two parts, through the middle of lines and right at their ends."""
    path = tmp_path / "a.txt"
    path.write_bytes(b"a\nbb\n\nccc\n")
    for count in range(1, 40):
        found = [texts(path, text_unit="line", part=Part(i, count)) for i in range(1, count + 1)]
        assert [text for part in found for text in part] == ["a", "bb", "", "ccc"], count


def test_row_groups_are_dealt_out(tmp_path: Path) -> None:
    parquet(tmp_path / "a.parquet", rows=10)
    parts = [texts(tmp_path / "a.parquet", part=Part(i, 4)) for i in range(1, 5)]
    assert [len(p) for p in parts] == [30, 20, 30, 19] and [text for part in parts for text in part] == TEXTS


def test_lines_of_a_part_are_named_by_the_byte_that_it_begins_at(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(ROWS)
    (chunk,) = read_chunks([str(tmp_path / "a.jsonl")], part=Part(2, 2))
    assert chunk.path == f"{tmp_path}/a.jsonl (from byte {len(ROWS) // 2} on)" and chunk.lines[0] == 1


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(ROWS)))
    assert texts("-", input_format="jsonl") == TEXTS


def test_preprocessing_from_a_pipe_and_in_parts_is_the_whole(tmp_path: Path) -> None:
    """By the commands: a pipe, then three array jobs and a merge, give the bytes of one job on the file."""
    (tmp_path / "a.jsonl").write_bytes(ROWS)
    words = ["--tokenizer-type", "ByteTokenizer", "--append-eod"]
    assert main(["preprocess", "--input", str(tmp_path / "a.jsonl"), "--output-prefix", str(tmp_path / "one"), *words]) == 0
    command = [sys.executable, "-m", "megatron_sp", "preprocess", "--input", "-", "--input-format", "jsonl", "--output-prefix", "pipe"]
    done = subprocess.run([*command, *words, "--workers", "2"], input=ROWS, cwd=tmp_path, capture_output=True)
    assert done.returncode == 0, done.stderr
    for i in (1, 2, 3):
        part = ["preprocess", "--input", str(tmp_path / "a.jsonl"), "--output-prefix", str(tmp_path / "p"), *words, "--part", f"{i}/3"]
        assert main(part) == 0
    files = sorted(map(str, tmp_path.glob("p_text_document-*-of-00003.*")))
    assert len(files) == 9 and main(["data", "merge", *files, "--output", str(tmp_path / "merged")]) == 0
    want = [(tmp_path / f"one_text_document{suffix}").read_bytes() for suffix in (".bin", ".idx")]
    for name in ("pipe_text_document", "merged"):
        assert [(tmp_path / f"{name}{suffix}").read_bytes() for suffix in (".bin", ".idx")] == want, name


def test_a_part_without_documents_is_an_empty_data_set(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(ROWS))
    for i in (1, 2):
        words = ["--input", str(tmp_path / "a.jsonl.gz"), "--output-prefix", str(tmp_path / "p"), "--tokenizer-type", "ByteTokenizer"]
        assert main(["preprocess", *words, "--part", f"{i}/2"]) == 0
    parts = [str(tmp_path / f"p_text_document-0000{i}-of-00002") for i in (1, 2)]
    assert Path(parts[1] + ".bin").stat().st_size == 0 and main(["data", "merge", *parts, "--output", str(tmp_path / "all")]) == 0


@pytest.mark.parametrize("text", ["", "1", "0/3", "4/3", "-1/3", "1/0", "a/b", "1/2/3", "1 /3", "9999999/9999999"])
def test_parts_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="must be I/N with I from 1 to N"):
        Part.parse(text)


def test_columns_that_are_missing_or_hold_no_text(tmp_path: Path) -> None:
    parquet(tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet: no column 'body'; it has 'n', 'text'"):
        texts(tmp_path / "a.parquet", keys=("body",))
    with pytest.raises(DataError, match=r"column 'n' holds int64, expected text"):
        texts(tmp_path / "a.parquet", keys=("n",))


def test_a_row_without_text_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pq.write_table(pa.table({"text": ["a", None, "c"]}), tmp_path / "a.parquet")
    words = ["preprocess", "--input", str(tmp_path / "a.parquet"), "--output-prefix", str(tmp_path / "p"), "--tokenizer-type"]
    words.append("ByteTokenizer")
    assert main(words) == 4 and "a.parquet:2: 'text' is NoneType, expected a string" in capsys.readouterr().err
    assert main([*words, "--skip-bad-lines"]) == 0 and "1 bad lines were skipped" in capsys.readouterr().out


@pytest.mark.parametrize("name", [name for name in KINDS if name not in ("a.jsonl", "saved")])
@pytest.mark.parametrize("damage", ["cut", "noise"])
def test_damaged_files(name: str, damage: str, tmp_path: Path) -> None:
    path = tmp_path / name
    KINDS[name](path)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2] if damage == "cut" else b"noise" * 50)
    with pytest.raises(DataError, match=r"cannot be read"):
        texts(path)


def test_folders(tmp_path: Path) -> None:
    for folder, message in (
        ("none", r"no such input file"), ("plain", r"a folder without a data set that can be read"),
        ("several", r"holds several data sets: name one of them, .*train"), ("strange", r"does not name the Arrow files of a data set"),
        ("outside", r"does not name the Arrow files"), ("indexed", r"call flatten_indices"),
    ):  # fmt: skip
        path = tmp_path / folder
        if folder != "none":
            path.mkdir()
        states = {"strange": "{}", "outside": '{"_data_files": [{"filename": "../a.arrow"}]}',
                  "indexed": '{"_data_files": [], "_indices_data_files": [{"filename": "i.arrow"}]}'}  # fmt: skip
        if folder in states:
            (path / "state.json").write_text(states[folder])
        if folder == "several":
            (path / "dataset_dict.json").write_text('{"splits": ["train"]}')
            (path / "train").mkdir()
            (path / "train/state.json").write_text("{}")
        with pytest.raises(DataError, match=message):
            check_inputs([str(path)], "auto", ("text",), Part())


def test_what_cannot_be_is_said_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"--input - is standard input, .*add --input-format"):
        check_inputs(["-"], "auto", ("text",), Part())
    with pytest.raises(ConfigError, match="cannot be read in parts"):
        check_inputs(["-"], "text", ("text",), Part(1, 2))
    zstd(tmp_path / "a.jsonl.zst")
    parquet(tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match="has columns"):
        check_inputs([str(tmp_path / "a.parquet")], "text", ("text",), Part())
    for module, name in (("zstandard", "a.jsonl.zst"), ("pyarrow.ipc", "a.parquet")):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(ConfigError, match="needs the package ({0}): pip install {0}".format(module.partition(".")[0])):
            check_inputs([str(tmp_path / name)], "auto", ("text",), Part())
