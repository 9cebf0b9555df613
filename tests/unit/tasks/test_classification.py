"""Labelled texts: every format of GLUE from literal files, JSONL, lines that are none, what a sample is, and scores against plain loops."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from megatron_sp.data.classification import GLUE, ClassificationDataset, Example, TextTable, check_labels, labels_of, read_examples, scores
from megatron_sp.data.tokenizers import ByteTokenizer
from megatron_sp.data.tokenizers.hugging_face import BertWordPieceTokenizer
from megatron_sp.utils.errors import ConfigError, DataError

FILES = {  # two examples of each, in the columns of the files as they are downloaded
    "cola": ("gj04\t1\t\tOur friends won't buy it.\ngj04\t0\t*\tThe car rode.\n", ("Our friends won't buy it.", None, "1")),
    "sst-2": ('sentence\tlabel\nhide "new secretions \t0\na gorgeous film \t1\n', ('hide "new secretions ', None, "0")),
    "mrpc": (
        "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\r\n1\t70\t71\tHe said.\tSaid he.\r\n0\t72\t73\tYes.\tNo.\r\n",
        ("He said.", "Said he.", "1"),
    ),
    "qqp": (
        "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n1\t2\t3\tHow?\tHow so?\t1\n4\t5\t6\tWho?\tWhen?\t0\n",
        ("How?", "How so?", "1"),
    ),
    "mnli": (
        "index\tpromptID\tgenre\tsentence1\tsentence2\tlabel1\tgold_label\n0\t1\tg\tIt rains.\tIt is wet.\tneutral\tentailment\n"
        "1\t1\tg\tA.\tB.\tneutral\tneutral\n",
        ("It rains.", "It is wet.", "entailment"),
    ),
    "qnli": (
        "index\tquestion\tsentence\tlabel\n0\tWhere?\tHere it is.\tentailment\n1\tWho?\tIn 1066.\tnot_entailment\n",
        ("Where?", "Here it is.", "entailment"),
    ),
    "rte": (
        "index\tsentence1\tsentence2\tlabel\n0\tNo one.\tSome.\tnot_entailment\n1\tAll.\tSome.\tentailment\n",
        ("No one.", "Some.", "not_entailment"),
    ),
    "wnli": ("index\tsentence1\tsentence2\tlabel\n0\tIt did.\tThe cat did.\t1\n1\tX.\tY.\t0", ("It did.", "The cat did.", "1")),
}


def write(folder: Path, text: str, name: str = "x.tsv") -> Path:
    (folder / name).write_bytes(text.encode())
    return folder / name


@pytest.mark.parametrize("task", list(GLUE))
def test_a_file_of_glue(task: str, tmp_path: Path) -> None:
    text, first = FILES[task]
    table = GLUE[task]
    found, skipped = read_examples(write(tmp_path, text), table)
    assert found[0] == Example(*first, None) and len(found) == 2 and skipped == 0
    labels = labels_of(table, found)
    assert labels == table.labels and {e.label for e in found} <= set(labels) and found[1].label != found[0].label


def test_columns_and_keys_of_ones_own(tmp_path: Path) -> None:
    table = TextTable("b", "a", "c", "g")
    tsv = write(tmp_path, 'a\tb\tc\tg\n1\tin "quotes\rand more\tyes\tq1\n\n2\ttwo\tno\tq1\n')
    jsonl = write(
        tmp_path, '{"a": 1, "b": "in \\"quotes\\rand more", "c": "yes", "g": "q1"}\n\n{"a":2,"b":"two","c":"no","g":"q1"}', "x.jsonl"
    )
    want = [Example('in "quotes\rand more', "1", "yes", "q1"), Example("two", "2", "no", "q1")]
    assert read_examples(tsv, table) == (want, 0) and read_examples(jsonl, table) == (want, 0)
    assert labels_of(table, want) == ("no", "yes"), "sorted"


@pytest.mark.parametrize(
    "name, text, says",
    [
        ("x.tsv", "text\tlabel\na\t1\nb\n", "x.tsv line 3 has 1 column, and 'label' is number 2"),
        ("x.tsv", "words\tlabel\na\t1\n", "x.tsv has no column 'text': its header has words, label"),
        ("x.tsv", "text\tlabel\n", "has no examples"),
        ("x.tsv", "", "has no column 'text': its first line is empty"),
        ("x.tsv", "text,label\na,1\n", "its header has text,label; it has no tab, and only tabs separate columns"),
        ("x.txt", '{"text": "a", "label": 1}\n', "has no column 'text': its first line looks like JSON"),
        ("x.tsv", "text\tlabel\na\t1\nb\t \r\n", "x.tsv line 3 has no label"),
        ("x.tsv", 'text\tlabel\n"a\tb"\t1\n', "x.tsv line 2 has 3 columns, and the header 2: tabs separate cells, inside quotes as well"),
        ("x.jsonl", '{"text": "a", "label": ""}\n', "line 1 has no label"),
        ("x.jsonl", '{"text": "a", "label": NaN}\n', "line 1 has no text or number under 'label'"),
        ("x.jsonl", '{"text": "\\ud800", "label": 1}\n', "line 1: the value of 'text' is not text"),
        ("x.jsonl", '{"text": "a", "label": 1}\nnot json\n', "line 2 is not JSON"),
        ("x.jsonl", '{"text": "a", "label": 1}\n[1]\n', "line 2 is not a JSON object"),
        ("x.jsonl", "[" * 100_000, "line 1 is not JSON"),
        ("x.jsonl", '{"text": "a", "label": 1}\n{"text": "a", "lab": 1}\n', "line 2 has no text or number under 'label': it has text, lab"),
        ("x.jsonl", '{"text": ["a"], "label": 1}\n', "line 1 has no text or number under 'text'"),
    ],
)  # fmt: skip
def test_what_is_no_example_is_named(name: str, text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        read_examples(write(tmp_path, text, name), TextTable())
    assert says in str(error.value)


def test_labels_have_no_white_space_around_them(tmp_path: Path) -> None:
    lines = write(tmp_path, "text\tlabel\na\tyes \nb\t  yes\r\nc\tno\n")
    assert [e.label for e in read_examples(lines, TextTable())[0]] == ["yes", "yes", "no"]
    lines = write(tmp_path, '{"text": "a", "label": "two\\n\\twords"}\n{"text": "b", "label": true}\n', "x.jsonl")
    assert [e.label for e in read_examples(lines, TextTable())[0]] == ["two words", "true"], "as JSON writes it"


def test_bad_lines_can_be_left_out(tmp_path: Path) -> None:
    text = FILES["qqp"][0] + "7\t8\t9\tbroken\n10\t11\t12\tWhy?\tWhy so?\tmaybe\n"
    path = write(tmp_path, text)
    with pytest.raises(DataError, match="line 4 has 4 columns"):
        read_examples(path, GLUE["qqp"])
    found, skipped = read_examples(path, GLUE["qqp"], skip_bad_lines=True)
    assert (len(found), skipped) == (2, 2)
    with pytest.raises(DataError, match="no examples: 1 bad lines were left out"):
        read_examples(write(tmp_path, "[]\n", "y.jsonl"), TextTable(), skip_bad_lines=True)
    with pytest.raises(DataError, match="no column"):  # not a matter of lines
        read_examples(path, TextTable(), skip_bad_lines=True)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no file"):
        read_examples(tmp_path / "absent.tsv", TextTable())
    (tmp_path / "x.tsv").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="cannot be read as UTF-8"):
        read_examples(tmp_path / "x.tsv", TextTable())
    with pytest.raises(DataError, match="cannot be read"):
        read_examples(tmp_path, TextTable())


def test_labels_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="line 2: the label '2' is none of 0, 1"):
        read_examples(write(tmp_path, "sentence\tlabel\nx\t2\n"), GLUE["sst-2"])
    one = [Example("a", None, "x", None)]
    with pytest.raises(DataError, match="one label, 'x': classification takes at least two"):
        labels_of(TextTable(), one)
    with pytest.raises(DataError, match="do not have: x; they have y, z"):
        check_labels(("y", "z"), one)


@pytest.fixture
def tokenizer(tmp_path: Path) -> BertWordPieceTokenizer:
    vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghij"]
    return BertWordPieceTokenizer(write(tmp_path, "\n".join(vocab) + "\n", "vocab.txt"), lowercase=True)


def words(dataset: ClassificationDataset, i: int) -> str:
    """The tokens as letters, with C, S and _ for the special ones."""
    return "".join("_?CSMabcdefghij"[t] for t in dataset[i]["tokens"])


def test_what_a_sample_is(tokenizer: BertWordPieceTokenizer) -> None:
    examples = [Example("a b", None, "yes", None), Example("a b", "c d e", "no", None)]
    dataset = ClassificationDataset(examples, ("no", "yes"), tokenizer, 9, multiple_of=4)
    assert [words(dataset, i) for i in range(2)] == ["CabS_____", "CabScdeS_"]
    assert dataset[1]["types"].tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 0]
    assert [int(dataset[i]["length"]) for i in range(2)] == [4, 8] and [int(dataset[i]["label"]) for i in range(2)] == [1, 0]
    assert len(dataset) == 4 and [float(dataset[i]["weight"]) for i in range(4)] == [1, 1, 0, 0], "filled up with what does not count"
    with pytest.raises(IndexError):
        dataset[4]
    dataset[0]["tokens"][:] = 0
    assert words(dataset, 0) == "CabS_____", "what a reader does to a sample is not kept"


@pytest.mark.parametrize(
    "first, second, want",
    [
        ("abcdefghij", None, "CabcdefghS"),
        ("abcdefghij", "a", "CabcdefSaS"),
        ("a", "abcdefghij", "CaSabcdefS"),
        ("abcdefghij", "jihgfedcba", "CabcdSjihS"),
        ("abcdefghij", "abc", "CabcdSabcS"),
        ("ab", "abcde", "CabSabcdeS"),
        ("", "", "CSS_______"),
    ],
)
def test_the_longer_text_is_cut(first: str, second: str | None, want: str, tokenizer: BertWordPieceTokenizer) -> None:
    spaced = Example(" ".join(first), None if second is None else " ".join(second), "x", None)
    assert words(ClassificationDataset([spaced], ("x", "y"), tokenizer, 10), 0) == want


def test_what_no_data_set_can_be_made_of(tokenizer: BertWordPieceTokenizer) -> None:
    one = [Example("a", None, "x", None)]
    with pytest.raises(ConfigError, match=r"--seq-length must be at least 8"):
        ClassificationDataset(one, ("x", "y"), tokenizer, 7)
    with pytest.raises(ConfigError, match=r"ByteTokenizer has no \[CLS\]"):
        ClassificationDataset(one, ("x", "y"), ByteTokenizer(), 9)
    with pytest.raises(DataError, match="do not have: x"):
        ClassificationDataset(one, ("y", "z"), tokenizer, 9)


def test_whatever_decides_the_samples_is_in_the_fingerprint(tokenizer: BertWordPieceTokenizer) -> None:
    a, b = Example("a", None, "x", None), Example("b", None, "y", None)
    base = ClassificationDataset([a, b], ("x", "y"), tokenizer, 9)
    others = [
        ClassificationDataset([b, a], ("x", "y"), tokenizer, 9),
        ClassificationDataset([a, b], ("y", "x"), tokenizer, 9),
        ClassificationDataset([a, b], ("x", "y"), tokenizer, 10),
    ]
    prints = [d.fingerprint() for d in (base, *others)]
    assert len(set(prints)) == 4 and prints[0] == ClassificationDataset([a, b], ("x", "y"), tokenizer, 9).fingerprint()


# ---- scores


def by_loops(predicted: list[int], true: list[int], num: int) -> dict[str, float]:
    """Accuracy, F1 and Matthews from their definitions, one pair of examples at a time (Gorodkin 2004, as a correlation of indicators)."""
    n = len(true)
    f1 = []
    for c in range(num):
        hit = sum(p == t == c for p, t in zip(predicted, true, strict=True))
        wrong = sum((p == c) != (t == c) for p, t in zip(predicted, true, strict=True))
        f1.append(2 * hit / (2 * hit + wrong) if hit + wrong else 0.0)

    def covariance(a: list[int], b: list[int]) -> float:
        return sum(
            ((x == c) - a.count(c) / n) * ((y == c) - b.count(c) / n) for c in range(num) for x, y in zip(a, b, strict=True)
        )  # fmt: skip

    spread = covariance(predicted, predicted) * covariance(true, true)
    return {
        "accuracy": sum(p == t for p, t in zip(predicted, true, strict=True)) / n,
        "f1": f1[1] if num == 2 else sum(f1) / num,
        "matthews": covariance(predicted, true) / math.sqrt(spread) if spread > 1e-12 else 0.0,
    }


@pytest.mark.parametrize("num", [2, 3, 5])
def test_scores_are_those_of_the_definitions(num: int) -> None:
    random = np.random.default_rng(num)
    for _ in range(20):
        true, predicted = random.integers(0, num, 17), random.integers(0, num, 17)
        predicted[:9] = true[:9]
        got = scores(predicted, true, [str(i) for i in range(num)])
        assert {k: got[k] for k in ("accuracy", "f1", "matthews")} == pytest.approx(by_loops(predicted.tolist(), true.tolist(), num))
        assert got["exact_match"] == got["accuracy"], "without groups each example is one"


def test_scores_where_one_is_not_defined() -> None:
    got = scores(np.zeros(3, int), np.array([0, 1, 0]), ("a", "b"))
    assert got["matthews"] == 0 and got["f1"] == 0 and got["accuracy"] == pytest.approx(2 / 3)


def test_examples_of_a_group_are_right_together() -> None:
    true, predicted = np.array([0, 1, 1, 0, 1]), np.array([0, 1, 0, 0, 1])
    got = scores(predicted, true, ("a", "b"), ["p", "p", "q", "q", None])
    assert got["accuracy"] == 0.8 and got["exact_match"] == pytest.approx(2 / 3), "p is right, q is not, the last one is by itself"
