"""Text to .bin/.idx: what a document is, the same bytes for any number of workers, and nothing half-written."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.paths import ROOT

from megatron_sp.commands import cli
from megatron_sp.config.schema import DataConfig
from megatron_sp.data import preprocess as module
from megatron_sp.data import text_input
from megatron_sp.data.indexed_dataset import IndexedDataset
from megatron_sp.data.preprocess import PreprocessOptions, PreprocessReport, preprocess, split_sentences
from megatron_sp.utils.errors import ConfigError, DataError, DiskError, ReportedError

BYTES = DataConfig(tokenizer_type="ByteTokenizer")
TOOL = ROOT / "tools" / "preprocess_data.py"


def jsonl(path: Path, texts: list[str], key: str = "text") -> str:
    path.write_text("".join(json.dumps({key: t}) + "\n" for t in texts))
    return str(path)


def documents(prefix: Path | str) -> list[str]:
    data = IndexedDataset(prefix)
    bounds = data.document_index.tolist()
    ids = [[t for i in range(a, b) for t in data.get(i).tolist()] for a, b in itertools.pairwise(bounds)]
    return [bytes(i for i in d if i < 256).decode() + "|" * (256 in d) for d in ids]


def run(tmp_path: Path, *inputs: str, **options: object) -> PreprocessReport:
    return preprocess(PreprocessOptions(inputs, str(tmp_path / "out"), **({"data": BYTES} | options)))  # type: ignore[arg-type]


def test_one_document_per_line(tmp_path: Path) -> None:
    report = run(
        tmp_path, jsonl(tmp_path / "a.jsonl", ["one", "two\nlines", "日本"]), jsonl(tmp_path / "b.json", ["last"]), append_eod=True
    )
    assert documents(tmp_path / "out_text_document") == ["one|", "two\nlines|", "日本|", "last|"]
    assert (report.num_documents, report.num_tokens, report.outputs) == (
        4, {"text": 3 + 9 + 6 + 4 + 4}, {"text": str(tmp_path / "out_text_document")},
    )  # fmt: skip
    assert report.num_input_bytes == sum((tmp_path / n).stat().st_size for n in ("a.jsonl", "b.json"))


def with_bos(tmp_path: Path) -> DataConfig:
    """A tokenizer.json of words whose template puts <s> before a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    made = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "a": 2, "b": 3, ".": 4}, unk_token="b"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_special_tokens(["<s>", "</s>"])
    made.post_processor = processors.TemplateProcessing(single=["<s>", "$A"], special_tokens=[("<s>", 0)])
    made.save(str(tmp_path / "tokenizer.json"))
    return DataConfig(tokenizer_model=str(tmp_path / "tokenizer.json"))


def test_documents_begin_with_bos_where_the_tokenizers_own_texts_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tokenizers")
    data, path = with_bos(tmp_path), jsonl(tmp_path / "a.jsonl", ["a b.", "", "b. a."])
    for options, first, last in (
        ({}, [0, 2, 3, 4], [0, 3, 4, 2, 4]),
        ({"append_eod": True, "workers": 2}, [0, 2, 3, 4, 1], [0, 3, 4, 2, 4, 1]),
        ({"bos": False}, [2, 3, 4], [3, 4, 2, 4]),
        ({"bos": True}, [0, 2, 3, 4], [0, 3, 4, 2, 4]),
    ):
        report = run(tmp_path, path, data=data, **options)
        made = IndexedDataset(tmp_path / "out_text_document")
        assert [made.get(i).tolist() for i in range(2)] == [first, last] and made.document_index.tolist() == [0, 1, 1, 2]
        assert report.begin == ((0,) if first[0] == 0 else ())
    run(tmp_path, path, data=data, split_sentences=True)
    assert IndexedDataset(tmp_path / "out_text_sentence").get(0)[0] != 0, "BERT's sentences have [CLS] in front, later"
    with pytest.raises(ConfigError, match="--bos is for GPT's documents"):
        run(tmp_path, path, data=data, split_sentences=True, bos=True)
    with pytest.raises(ConfigError, match="--bos: the tokenizer has no token that begins a text"):
        run(tmp_path, path, bos=True)
    for flags, says in (([], "every document begins with BOS, id 0 (--no-bos leaves it out)"), (["--no-bos"], "")):
        words = ["--input", path, "--output-prefix", str(tmp_path / "x"), "--tokenizer-model", str(data.tokenizer_model)]
        assert cli.main(["preprocess", *words, *flags]) == 0
        out = capsys.readouterr().out
        assert says in out and ("BOS" in out) == bool(says)


@pytest.mark.parametrize(("flags", "end"), [
    ("--tokenizer-type NullTokenizer", 9),
    ("", 8),
    ("--tokenizer-type NullTokenizer --eod-id 0", 0),
    ("--tokenizer-type ByteTokenizer --eod-id 32", 32),
])  # fmt: skip
def test_the_id_that_ends_documents(flags: str, end: int, tmp_path: Path) -> None:
    """Of a NullTokenizer by its name it is one more, as in Megatron."""
    size = [] if "Byte" in flags else ["--vocab-size", "9"]
    path = jsonl(tmp_path / "a.jsonl", ["7 8"])
    assert cli.main(["preprocess", "--input", path, "--output-prefix", str(tmp_path / "x"), "--append-eod", *size, *flags.split()]) == 0
    assert IndexedDataset(tmp_path / "x_text_document").get(0)[-1] == end


def test_empty_documents_have_no_sequence_and_no_eod(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "x"}\n\n{"text": ""}\n  \n{"text": "y"}')  # and no newline at the end
    report = run(tmp_path, str(path), append_eod=True)
    data = IndexedDataset(tmp_path / "out_text_document")
    assert documents(tmp_path / "out_text_document") == ["x|", "", "", "", "y|"]
    assert len(data) == 2 and data.document_index.tolist() == [0, 1, 1, 1, 1, 2] and report.num_documents == 5


def sequences(prefix: Path) -> list[list[str]]:
    data = IndexedDataset(prefix)
    return [
        [bytes(i if i < 256 else ord("|") for i in data.get(k).tolist()).decode() for k in range(a, b)]
        for a, b in itertools.pairwise(data.document_index.tolist())
    ]


def test_sentences_become_sequences(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", ["One. Two! 3.5 is three?", "", "A heading\n\nText", "  \n\n ", "Last."])
    report = run(tmp_path, path, split_sentences=True, append_eod=True)
    assert sequences(tmp_path / "out_text_sentence") == [
        ["One.", "Two!", "3.5 is three?|"], [], ["A heading", "Text|"], [], ["Last.|"],
    ]  # fmt: skip
    assert (report.num_documents, report.num_sequences) == (5, {"text": 6}) and not list(tmp_path.glob("*_document*"))
    run(tmp_path, path, split_sentences=True)
    assert sequences(tmp_path / "out_text_sentence")[0] == ["One.", "Two!", "3.5 is three?"]


def test_sentences_without_tokens_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "v.txt").write_text("[UNK]\n[SEP]\none\ntwo\n.\n")
    path = jsonl(tmp_path / "a.jsonl", ["One.\n\n\u200d\n\nTwo.", "\u200d"])
    report = run(tmp_path, path, split_sentences=True, append_eod=True, data=DataConfig(vocab_file=str(tmp_path / "v.txt")))
    data = IndexedDataset(tmp_path / "out_text_sentence")
    assert [data.get(k).tolist() for k in range(len(data))] == [[2, 4], [3, 4, 1]] and data.document_index.tolist() == [0, 2, 2]
    assert report.num_tokens == {"text": 5}


def test_keys_become_data_sets_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"title": "T", "body": "B", "n": 3}\n{"title": "", "body": "C"}\n')
    run(tmp_path, str(path), json_keys=("body", "title"))
    assert documents(tmp_path / "out_body_document") == ["B", "C"]
    assert documents(tmp_path / "out_title_document") == ["T", ""]


@pytest.mark.parametrize(("unit", "expected"), [
    ("paragraph", ["one\ntwo", "three", "four"]),
    ("line", ["one", "two", "", "three", " ", "", "four"]),
    ("file", ["one\ntwo\n\nthree\n \n\nfour\n"]),
])  # fmt: skip
def test_plain_text(unit: str, expected: list[str], tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n\nthree\n \n\nfour\n")
    run(tmp_path, str(tmp_path / "a.txt"), text_unit=unit)
    assert documents(tmp_path / "out_text_document") == expected


def test_line_ends_and_byte_order_marks(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n\r\nthree")
    run(tmp_path, str(tmp_path / "a.txt"))
    assert documents(tmp_path / "out_text_document") == ["one\r\ntwo", "three"]
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "one"}\r\n{"text": "two"}\r\n')
    run(tmp_path, str(tmp_path / "a.jsonl"))
    assert documents(tmp_path / "out_text_document") == ["one", "two"]


def test_gzip_and_given_format(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.write('{"text": "zipped"}\n')
    (tmp_path / "data").write_text('{"text": "json by flag"}\n')
    run(tmp_path, str(tmp_path / "a.jsonl.gz"), str(tmp_path / "data"), input_format="jsonl")
    assert documents(tmp_path / "out_text_document") == ["zipped", "json by flag"]
    run(tmp_path, str(tmp_path / "data"))
    assert documents(tmp_path / "out_text_document") == ['{"text": "json by flag"}']
    run(tmp_path, str(tmp_path / "a.jsonl.gz"))
    assert documents(tmp_path / "out_text_document") == ["zipped"]
    whole = (tmp_path / "a.jsonl.gz").read_bytes()
    for damaged in (whole[:-9], b"not gzip"):
        (tmp_path / "b.jsonl.gz").write_bytes(damaged)
        with pytest.raises(DataError, match=r"b\.jsonl\.gz: cannot be read"):
            run(tmp_path, str(tmp_path / "b.jsonl.gz"))


def test_the_same_bytes_for_any_number_of_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of sentences: a chunk then has several sequences in a document."""
    monkeypatch.setattr(text_input, "_CHUNK_BYTES", 2000)
    texts = [[f"No {k} {i}. " + f"It is {i}. " * (i % 7) for i in range(100)] for k in range(2)]
    paths = [jsonl(tmp_path / f"{k}.jsonl", texts[k]) for k in range(2)]
    outputs = []
    for workers in (1, 2):
        run(tmp_path, *paths, workers=workers, append_eod=True, split_sentences=True)
        outputs.append([(tmp_path / f"out_text_sentence{s}").read_bytes() for s in (".bin", ".idx")])
    assert outputs[0] == outputs[1]
    made = sequences(tmp_path / "out_text_sentence")
    assert [len(d) for d in made] == [i % 7 + 1 for i in range(100)] * 2
    assert [d[0].split(".")[0] for d in made] == [f"No {k} {i}" for k in range(2) for i in range(100)]


BAD = {
    "json": ('{"text": "a"', r"a\.jsonl:3: not JSON: .*--skip-bad-lines"),
    "no object": ('["a"]', r"a\.jsonl:3: expected a JSON object with text, found list"),
    "no key": ('{"txt": "a", "id": 1}', r"a\.jsonl:3: no key 'text'; this line has 'id', 'txt'"),
    "no string": ('{"text": null}', r"a\.jsonl:3: 'text' is NoneType, expected a string"),
    "no utf-8": (b'{"text": "\xff"}', r"a\.jsonl:3: 'utf-8' codec can't decode byte 0xff"),
    "deep": ('{"text": ' + "[" * 100_000, r"a\.jsonl:3: "),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_lines(name: str, tmp_path: Path) -> None:
    line, message = BAD[name]
    raw = line if isinstance(line, bytes) else line.encode()
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "one"}\n\n' + raw + b'\n{"text": "two"}\n')
    with pytest.raises(DataError, match=message):
        run(tmp_path, str(tmp_path / "a.jsonl"))
    assert [p.name for p in tmp_path.iterdir()] == ["a.jsonl"], "nothing is left of the output"
    report = run(tmp_path, str(tmp_path / "a.jsonl"), skip_bad_lines=True)
    assert report.num_skipped == 1 and documents(tmp_path / "out_text_document") == ["one", "", "two"]


def test_a_bad_paragraph_is_named_by_its_first_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\n\n\ntwo\nthree\n\xff\n\nfour\n")
    with pytest.raises(DataError, match=r"a\.txt:4: 'utf-8' codec"):
        run(tmp_path, str(tmp_path / "a.txt"))


def test_a_line_that_is_bad_under_one_key_is_left_out_of_all(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": "1", "b": "2"}\n{"a": "3"}\n{"a": "4", "b": "x"}\n{"a": "5", "b": "6"}\n')
    run(tmp_path, str(tmp_path / "a.jsonl"), json_keys=("a", "b"), skip_bad_lines=True, data=DataConfig(), vocab_size=10)
    data = [IndexedDataset(tmp_path / f"out_{k}_document") for k in "ab"]
    assert [[int(t) for i in range(len(d)) for t in d.get(i)] for d in data] == [[1, 5], [2, 6]]


def test_a_bad_line_in_a_worker(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{\n')
    with pytest.raises(DataError, match=r"a\.jsonl:2: not JSON"):
        run(tmp_path, str(tmp_path / "a.jsonl"), workers=2)


def _die(_: object) -> None:
    os._exit(9)


def test_a_worker_that_dies_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_encode_in_worker", _die)
    with pytest.raises(DataError, match=r"a worker process died .*nothing is written; try fewer --workers"):
        run(tmp_path, jsonl(tmp_path / "a.jsonl", ["x"] * 10), workers=2)
    assert [p.name for p in tmp_path.iterdir()] == ["a.jsonl"]


def test_mistakes_are_found_before_the_work(tmp_path: Path) -> None:
    good = jsonl(tmp_path / "a.jsonl", ["x"])
    (tmp_path / "t.txt").write_text("x")
    cases: list[tuple[tuple[str, ...], dict[str, object], type[ReportedError], str]] = [
        ((good, str(tmp_path / "none")), {}, DataError, "none: no such input file"),
        ((), {}, ConfigError, "at least one --input"),
        ((good,), {"workers": 0}, ConfigError, "--workers 1 or more"),
        ((good,), {"json_keys": ("a", "a")}, ConfigError, "each key once"),
        ((str(tmp_path / "t.txt"),), {"json_keys": ("body",)}, ConfigError, "plain text, which has no keys"),
        ((good,), {"data": DataConfig()}, ConfigError, "there is no tokenizer"),
        ((good,), {"data": DataConfig(tokenizer_model="none.model")}, DataError, "none.model: cannot be read"),
    ]
    for inputs, options, kind, message in cases:
        with pytest.raises(kind, match=message):
            run(tmp_path, *inputs, **options)
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskError, match="cannot be made"):
        preprocess(PreprocessOptions((good,), str(tmp_path / "file" / "out"), BYTES))
    with pytest.raises(DataError, match="no text under text"):
        run(tmp_path, jsonl(tmp_path / "e.jsonl", ["", ""]))
    assert not list(tmp_path.glob("out*"))


def test_output_folder_is_made(tmp_path: Path) -> None:
    preprocess(PreprocessOptions((jsonl(tmp_path / "a.jsonl", ["x"]),), str(tmp_path / "new" / "deep" / "out"), BYTES))
    assert documents(tmp_path / "new" / "deep" / "out_text_document") == ["x"]


def test_progress_ends_with_all_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_input, "_CHUNK_BYTES", 100)
    seen: list[tuple[int, int, int]] = []

    def look(report: PreprocessReport, bytes_read: int, bytes_total: int) -> None:
        seen.append((report.num_documents, bytes_read, bytes_total))

    path = jsonl(tmp_path / "a.jsonl", ["x" * 30] * 50)
    preprocess(PreprocessOptions((path,), str(tmp_path / "out"), BYTES), look)
    assert seen[-1] == (50, os.path.getsize(path), os.path.getsize(path)) and len(seen) > 10 and seen == sorted(seen)


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = jsonl(tmp_path / "a.jsonl", ["hello", "world"])
    flags = ["--input", path, "--output-prefix", str(tmp_path / "o"), "--tokenizer-type", "ByteTokenizer"]
    assert cli.main(["preprocess", *flags, "--append-eod"]) == 0
    out = capsys.readouterr().out
    assert "o_text_document.bin: 2 documents, 12 tokens" in out and "MB/s" in out
    assert cli.main(["preprocess", *flags, "--split-sentences"]) == 0
    assert "o_text_sentence.bin: 2 documents, 2 sentences, 10 tokens" in capsys.readouterr().out
    assert cli.main(["preprocess", *flags, "--json-keys", "nope"]) == 4
    assert "error: " in capsys.readouterr().err
    assert cli.main(["preprocess", *flags, "--json-keys", "nope", "--skip-bad-lines"]) == 4  # everything is bad
    assert cli.main(["preprocess", *flags[:2], "--output-prefix", str(tmp_path / "o")]) == 2
    with pytest.raises(SystemExit) as info:
        cli.main(["preprocess", "--input", path])
    assert info.value.code == 2


def test_the_tool_runs_without_torch_and_killed_leaves_nothing_whole(tmp_path: Path) -> None:
    code = (
        f"import sys, runpy; sys.argv = ['x', '--help']; sys.path.insert(0, {str(TOOL.parent)!r})\n"
        f"try: runpy.run_path({str(TOOL)!r}, run_name='__main__')\n"
        "except SystemExit: pass\nassert 'torch' not in sys.modules"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--append-eod" in shown.stdout
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"text": "x"}\n' * 100)
    words = ["--input", str(lines), "--output-prefix", str(tmp_path / "o"), "--tokenizer-type", "ByteTokenizer"]
    code = (
        "import os, runpy, signal, sys\nos.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"  # all is written, under no name yet
        f"sys.argv[1:] = {words!r}; sys.path.insert(0, {str(TOOL.parent)!r})\nrunpy.run_path({str(TOOL)!r}, run_name='__main__')"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == -signal.SIGKILL
    assert list(tmp_path.glob("o_text_document.bin.part-*"))
    with pytest.raises(DataError, match="does not exist"):
        IndexedDataset(tmp_path / "o_text_document")


CASES = [  # sentences, joined by | in place of the white space between them
    "One sentence.|Another one!|A third?|And no end",
    "He paid 3.50 for it, 1,000.75 in all.|It was version 2.0.1 of 10.0.0.1.",
    "Dr. Smith met Mr. and Mrs. Jones of St. Louis.|They left.",
    "J. R. R. Tolkien wrote it.|George W. Bush did not.|So do I.|Then we agree.",
    "In the U.S. Senate it failed.|He lives in the U.S.|He likes it.|At 5 p.m. Eastern it ends.|It was 5 p.m.|The bell rang.",
    "Use a tool, e.g. this one, i.e. the best.|See Fig. 3 and No. 7, vol. 2, pp. 4-5, Jan. 5.|No.|Never again.",
    "Apple Inc. Chairman Cook spoke.|He left Apple Inc.|It was late.|Smith et al. (2001) say so.|Apples, pears, etc.|Then more.",
    "John Smith, Ph.D. and M.D. of note, came.|Sammy Davis Jr. sang.",
    "Wait... what?|No way...|Yes.|And so on… it went…|Stop.",
    "\"Stop!\" he said.|\"Why?\" asked she.|\"Because I can.\"|She left (at last.)|'Good.'|“Fine.”|«Bon.»|(All of it.)|[Sic!]|So.",
    "“What now?” they asked.|“Go!”|“Now?”|He went.",
    "Really?!|Yes!!!|Hm... ok.",
    "1. First do this.|2. Then that.|It was 1999.|The end came in 2001.|2002 was better.",
    "A wrapped\nline. It\ngoes on.",
    "It is a.b.c and example.com/x.html?y=1 and file.Txt here.|Done.",
    "这是第一句。|这是第二句！|真的吗？|“好。”|最后",
    "これは文です。|次です。",
    "यह वाक्य है।|यह दूसरा है॥|अंत",
    "Это Москва.|Там живёт А. С. Пушкин.|Да. нет",
    "هل هذا سؤال؟|نعم۔|انتهى",
    "He said no. but meant yes. iPhones are not.|Apples are",
    "The U.N. and the E.U. met.|Mr. X came.",
    "- A dash.|- Another one.|* A star.",
    "Title\n\nText of one. more text|B",
    "The plan is B. Nobody knows.|Ends with initial J. Doe.",
]  # fmt: skip
EXPECTED = {
    "A wrapped\nline. It\ngoes on.": ["A wrapped\nline.", "It\ngoes on."],
    "Title\n\nText of one. more text|B": ["Title", "Text of one. more text B"],
}


@pytest.mark.parametrize("case", CASES)
def test_where_sentences_end(case: str) -> None:
    joint = "" if case[0] in "这こ" else " "
    expected = EXPECTED.get(case, case.split("|"))
    assert split_sentences(case.replace("|", joint)) == expected
    if joint and case not in EXPECTED:
        assert split_sentences("\n " + case.replace("|", "\n") + "  \n") == expected, "a line end is a space"
        assert split_sentences(case.replace("|", "\r\n \r\n")) == expected


def test_blank_lines_end_sentences() -> None:
    assert split_sentences("a heading\n\nsome text\n \t\nmore\n\n\n\nlast\fpage\u2029end") == [
        "a heading", "some text", "more", "last", "page", "end",
    ]  # fmt: skip
    assert split_sentences("") == split_sentences(" \n\n\t ") == [] and split_sentences(".") == ["."]


@settings(deadline=None, max_examples=200)
@given(st.text(st.sampled_from("aB1 .!?…\"')(\n。“”I\t-") | st.characters(), max_size=60))
def test_nothing_but_white_space_is_lost(text: str) -> None:
    sentences = split_sentences(text)
    assert "".join("".join(sentences).split()) == "".join(text.split())
    assert all(sentence and sentence == sentence.strip() for sentence in sentences)


def test_it_is_linear() -> None:
    """Text that makes patterns backtrack: a minute and more where one of them does."""
    for piece in (".", ". ", "a.", "\n ", "\r\n", '."', "。", "(" * 5):
        assert len("".join(split_sentences(piece * 40_000)).split()) <= 40_000
