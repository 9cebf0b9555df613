"""The task that is made from Python's own text: passages, classes of one size, and nothing that stands in both halves."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import pytest

from megatron_sp.commands.cli import main
from megatron_sp.data.corpus import LONGEST, SHORTEST, make_task, passages, section_of
from megatron_sp.utils.errors import DataError

LICENCE = "Everybody may do with this what they like, but for selling it as their own. " * 3 + "\n"


def document(seed: int, lines: int = 40) -> str:
    """Lines of words, with a licence in front that all documents have."""
    words = random.Random(seed)
    return LICENCE + "".join(" ".join(f"w{words.randrange(500)}" for _ in range(12)) + "\n" for _ in range(lines))


def corpus() -> list[tuple[str, str]]:
    found = [(f"lib/{name}/{i}.py", document(10 * n + i, 60 - 10 * n)) for n, name in enumerate(("email", "json", "xml")) for i in range(3)]
    return [*found, ("topics/for", document(100, 90)), ("lib/alone.py", document(200, 400))]


def test_sections_are_packages_and_the_reference() -> None:
    sources = ("lib/email/mime/text.py", "lib/email/charset.py", "topics/for", "lib/os.py")
    assert [section_of(source) for source in sources] == ["email", "email", "topics", None]


def test_passages_are_whole_lines_that_follow_one_another() -> None:
    text = document(1)
    found = list(passages(text))
    assert all(SHORTEST <= len(p) <= LONGEST for p in found)
    places = [text.index(p) for p in found]
    assert all(a + len(p) <= b for a, p, b in zip(places, found, places[1:], strict=False)), "in order, and none into the next"
    lines = set(text.splitlines())
    assert all(line in lines for p in found for line in p.splitlines())
    assert list(passages("short\n")) == [] and list(passages("x" * (LONGEST + 1) + "\n")) == [] and list(passages("")) == []


def test_classes_are_of_one_size_and_no_text_is_in_both_halves() -> None:
    task = make_task(corpus(), 3, 5, 2)
    for half, each in ((task.train, 5), (task.valid, 2)):
        labels = [label for label, _ in half]
        assert len(labels) == 3 * each and all(labels.count(label) == each for label in labels)
        assert labels != sorted(labels), "mixed"
    texts = [text for _, text in task.train + task.valid]
    assert len(set(texts)) == len(texts) and not any("Everybody may do" in text for text in texts), (
        "what stands in many files tells nothing"
    )
    assert make_task(list(reversed(corpus())), 3, 5, 2) == task, "the order of documents is of no matter"


def test_too_little_text_is_said() -> None:
    with pytest.raises(DataError, match=r"9 classes with 2 passages to validate on, .* there are .*email"):
        make_task(corpus(), 9, 5, 2)
    with pytest.raises(DataError, match="3 classes with 500"):
        make_task(corpus(), 3, 5, 500)


def test_all_classes_have_as_many_as_the_smallest_can_give() -> None:
    task = make_task(corpus(), 3, 10**6, 2)
    counts = Counter(label for label, _ in task.train)
    assert len(counts) == 3 and len(set(counts.values())) == 1 and counts.total() > 15
    assert Counter(label for label, _ in task.valid) == dict.fromkeys(counts, 2)


def test_the_tool(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "corpus.jsonl"
    file.write_text("".join(json.dumps({"text": text, "source": source}) + "\n" for source, text in corpus()))
    words = ["data", "section-task", "--corpus", str(file), "--output", str(tmp_path / "task")]
    words += ["--classes", "3", "--train", "5", "--valid", "2"]
    assert main(words) == 0 and "15 passages to train on, 6 to validate on" in capsys.readouterr().out
    first = [(tmp_path / f"task/{half}.jsonl").read_text() for half in ("train", "valid")]
    assert [len(text.splitlines()) for text in first] == [15, 6] and set(json.loads(first[1].splitlines()[0])) == {"label", "text"}
    assert main(words) == 0 and [(tmp_path / f"task/{half}.jsonl").read_text() for half in ("train", "valid")] == first
    assert main([*words[:-1], "2000"]) == 4 and "ask for fewer" in capsys.readouterr().err
    assert main([*words[:3], str(tmp_path / "absent"), *words[4:]]) == 4
