"""The corpus of Python's own text, and the tools around it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_sp.commands import cli
from megatron_sp.data import corpus
from megatron_sp.data.corpus import gather, write_corpus
from megatron_sp.utils.errors import ConfigError, DataError

LONG = "x = 1  # a line that is repeated until the file is long enough\n" * 10


def library(folder: Path) -> Path:
    for name, text in {
        "a.py": LONG + "a", "b.py": LONG + "b", "copy_of_a.py": LONG + "a", "short.py": "x", "readme.txt": LONG,
        "pkg/c.py": LONG + "c\r\n", "test/t.py": LONG + "t", "pkg/tests/u.py": LONG + "u", "site-packages/v.py": LONG + "v",
        "_sysconfigdata_x.py": LONG + "w", "underline.py": LONG + "\u2581", "nul.py": LONG + "\0",
    }.items():  # fmt: skip
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text.encode())
    (folder / "latin.py").write_bytes(LONG.encode() + b"\xe9")
    return folder


def test_which_files_are_taken(tmp_path: Path) -> None:
    documents = gather(library(tmp_path))
    sources = {d.source: d.text for d in documents if d.source.startswith("lib/")}
    assert set(sources) == {"lib/a.py", "lib/b.py", "lib/pkg/c.py"}
    assert sources["lib/pkg/c.py"] == LONG + "c\n"
    assert len({d.text for d in documents}) == len(documents)
    assert any(d.source.startswith("topics/") for d in documents)


def test_order_depends_on_the_texts_alone(tmp_path: Path) -> None:
    one = [d.text for d in gather(library(tmp_path / "one"))]
    other = library(tmp_path / "two")
    (other / "a.py").rename(other / "z.py")
    assert [d.text for d in gather(other)] == one != sorted(one)


def test_this_python_has_enough_text_and_a_fair_end(tmp_path: Path) -> None:
    num_documents, num_bytes = write_corpus(tmp_path / "new" / "c.jsonl")
    lines = (tmp_path / "new" / "c.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert len(records) == num_documents > 300
    assert sum(len(r["text"].encode()) for r in records) == num_bytes > corpus.LEAST_BYTES
    tail = {r["source"].split("/")[0] for r in records[-num_documents // 20 :]}
    assert tail == {"topics", "lib"}, "the end is a mixture of both kinds"


def test_the_first_bytes_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole documents, from the beginning of the same order."""
    monkeypatch.setattr(corpus, "LEAST_BYTES", 100)
    everything = gather(library(tmp_path / "lib"))
    for wanted in range(1, 5):
        texts = [d.text for d in everything[: wanted + 1]]
        sizes = [len(text.encode()) for text in texts]
        for most in (sum(sizes[:-1]), sum(sizes) - 1):
            assert write_corpus(tmp_path / "c.jsonl", tmp_path / "lib", max_bytes=most) == (wanted, sum(sizes[:-1]))
            lines = (tmp_path / "c.jsonl").read_text().splitlines()
            assert [json.loads(line)["text"] for line in lines] == texts[:-1]
    assert write_corpus(tmp_path / "c.jsonl", tmp_path / "lib", max_bytes=10**9)[0] == len(everything)
    with pytest.raises(ConfigError, match=r"--max-bytes \(99\) must be at least 100"):
        write_corpus(tmp_path / "c.jsonl", tmp_path / "lib", max_bytes=99)


def test_too_little_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "_topics", lambda: iter(()))
    with pytest.raises(DataError, match=r"has only 0\.00 MB of source text, at least 1 MB are needed"):
        write_corpus(tmp_path / "c.jsonl", library(tmp_path / "lib"))
    assert not (tmp_path / "c.jsonl").exists()


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(corpus, "LEAST_BYTES", 1)
    monkeypatch.setattr(corpus, "gather", lambda _: [corpus.Document(text=LONG, source="lib/a.py")])
    (tmp_path / "file").write_text("")
    assert cli.main(["data", "corpus", "--output", str(tmp_path / "file" / "c.jsonl")]) == 6
    assert "c.jsonl: cannot be written" in capsys.readouterr().err
