"""A run needs nothing but its folder: its tokenizer is kept, found again from anywhere, and noticed when it is another."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.ckpts import with_state
from support.training import bert, copy_run, state, train

from megatron_sp.commands import cli
from megatron_sp.inference.team import find_stored
from megatron_sp.utils.errors import DataError

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(40))]
INSTEAD = {"GPT": ".", "BERT": ".", "classifier": "."}
FLAGS = ("--mock-data", "--vocab-file", "vocab.txt", "--gelu-approximate", "none")  # one GELU everywhere: Hugging Face has a class for it
MORE = ("--auto-resume", "--train-iters", 3, "--override-opt-param-scheduler")


def write_vocab(folder: Path, words: list[str] = WORDS) -> None:
    (folder / "vocab.txt").write_text("\n".join(words) + "\n")


def run_in(folder: Path, *flags: object, data: tuple[object, ...] = FLAGS, **more: Any) -> Path:
    """Every path is relative, as users write them."""
    train(folder, "--save", "run", "--train-iters", 2, *flags, data=data, **more).expect(0)
    return folder / "run"


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT's folder of work: run and vocab.txt."""
    folder = tmp_path_factory.mktemp("work")
    write_vocab(folder)
    run_in(folder, program=bert, ranks=2)
    assert state(folder / "run")["tokenizer"]["folder"] == "tokenizer" and (folder / "run" / "tokenizer" / "vocab.txt").is_file()
    return folder


@pytest.fixture
def work(pretrained: Path, tmp_path: Path) -> Path:
    return copy_run(pretrained, tmp_path / "work")


def no_copy(run: Path) -> None:
    """As an older version left it."""
    shutil.rmtree(run / "tokenizer")
    with_state(run, lambda made: made.pop("tokenizer"))


def test_tools_find_it_when_the_run_was_moved_and_the_original_is_gone(work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.unlink(work / "vocab.txt")
    moved = shutil.move(work / "run", tmp_path / "moved")
    monkeypatch.chdir(tmp_path)
    stored = find_stored(moved, None, "BERT", INSTEAD, print)
    assert stored.tokenizer.encode("w3 w1") == [8, 6] and stored.config.data.vocab_file == f"{moved}/tokenizer/vocab.txt"
    from megatron_sp.commands import finetune as tool

    options, rest = tool.parse(["--task", "jsonl", "--train-data", "t", "--valid-data", "v", "--pretrained-checkpoint", str(moved)])
    assert tool._stored_tokenizer(options.pretrained_checkpoint, rest) == [
        "--tokenizer-type", "BertWordPieceLowerCase", "--vocab-file", f"{moved}/tokenizer/vocab.txt"
    ]  # fmt: skip


def test_an_old_run_goes_on_as_before_and_says_what_is_missing(work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_copy(work / "run")
    monkeypatch.chdir(work)
    assert find_stored("run", None, "BERT", INSTEAD, print).tokenizer.vocab_size == 45
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=rf"not there: vocab\.txt \(in {tmp_path}\); the run keeps none .*--tokenizer-model"):
        find_stored(work / "run", None, "BERT", INSTEAD, print)
    train(work, "--save", "run", *MORE, data=FLAGS, program=bert).expect(0, "(step 2")
    assert state(work / "run")["tokenizer"]["folder"] == "tokenizer", "from now on it has one"


def test_a_resume_goes_on_without_the_original(work: Path, pretrained: Path) -> None:
    os.unlink(work / "vocab.txt")
    said = train(work, "--save", "run", *MORE, data=FLAGS, program=bert, ranks=2).expect(
        0, "vocab.txt no longer exists: the run's own copy of its tokenizer is used"
    )
    assert said.text.count("own copy") == 1 and state(work / "run")["tokenizer"] == state(pretrained / "run")["tokenizer"]


def test_a_resume_notices_another_tokenizer(work: Path) -> None:
    write_vocab(work, [*WORDS[:5], *reversed(WORDS[5:])])
    again = ("--save", "run", *MORE)
    train(work, *again, data=FLAGS, program=bert, ranks=2).expect(
        4,
        "the tokenizer is not the BertWordPieceLowerCase that the checkpoint was trained with",
        "tokenizer/vocab.txt",
        "--accept-data-change",
    )
    before = state(work / "run")["tokenizer"]
    train(work, *again, "--accept-data-change", data=FLAGS, program=bert).expect(0, "--accept-data-change: the tokenizer is not")
    assert state(work / "run")["tokenizer"]["folder"].startswith("tokenizer-") and state(work / "run", 2)["tokenizer"] == before
    old, new = (find_stored(work / "run", step, "BERT", INSTEAD, print).tokenizer.encode("w0") for step in (2, 3))
    assert (old, new) == ([5], [44])


def test_a_damaged_copy_is_a_message(work: Path) -> None:
    write_vocab(work / "run" / "tokenizer", WORDS[:-1])
    accepts = (*MORE, "--accept-data-change")
    train(work, "--save", "run", *accepts, data=FLAGS, program=bert, ranks=2).expect(4, "own copy of its tokenizer is damaged")
    shutil.rmtree(work / "run" / "tokenizer")
    train(work, "--save", "run", *MORE, data=FLAGS, program=bert).expect(0)
    assert (work / "run" / "tokenizer" / "vocab.txt").read_text() == (work / "vocab.txt").read_text(), "kept anew, of the right one"


def test_conversions_and_merged_runs_have_it(work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    os.unlink(work / "vocab.txt")
    monkeypatch.chdir(tmp_path)
    run = str(work / "run")
    assert cli.main(["ckpt", "merge", run, "--output", "merged"]) == 0
    for source, target, output in (
        (run, "hf", "hf"),
        ("merged", "hf", "hf2"),
        ("hf", "megatron_sp", "again"),
        (run, "megatron_sp", "copy"),
    ):
        assert cli.main(["convert", "--input", str(source), "--to", target, "--output", output]) == 0
    assert (tmp_path / "hf" / "vocab.txt").read_bytes() == (tmp_path / "hf2" / "vocab.txt").read_bytes()
    for name in ("again", "copy", "merged"):
        shutil.move(name, f"moved-{name}")
        stored = find_stored(f"moved-{name}", None, "BERT", INSTEAD, print)
        assert stored.tokenizer.encode("w3") == [8] and f"moved-{name}/tokenizer" in str(stored.config.data.vocab_file)
    assert "no tokenizer" not in capsys.readouterr().err
    no_copy(work / "run")
    assert cli.main(["convert", "--input", run, "--to", "hf", "--output", "none"]) == 0
    assert "note: no tokenizer goes along: the tokenizer that the training named is not there: vocab.txt" in capsys.readouterr().err
    write_vocab(tmp_path / "moved-copy" / "tokenizer", WORDS[:-1])
    assert cli.main(["convert", "--input", "moved-copy", "--to", "hf", "--output", "damaged"]) == 4
    assert "damaged" in capsys.readouterr().err and not (tmp_path / "damaged").exists()


def test_finetuning_keeps_its_own(work: Path) -> None:
    write_vocab(work, [*WORDS[:5], *reversed(WORDS[5:])])
    train(work, "--load", "run", "--finetune", "--save", "new", "--train-iters", 1, data=FLAGS, program=bert).expect(0)
    assert json.dumps(state(work / "new")["tokenizer"]) != json.dumps(state(work / "run")["tokenizer"])
    assert (work / "new" / "tokenizer" / "vocab.txt").read_text() == (work / "vocab.txt").read_text()


@pytest.mark.often("finetune")
@pytest.mark.parametrize("weights_only", [True, False], ids=["finetune", "resume"])
def test_the_arguments_of_a_checkpoint_bring_its_tokenizer_from_anywhere(work: Path, tmp_path: Path, weights_only: bool) -> None:
    """The run's own copy, not what lies under the name that the training gave; where a flag names a tokenizer, that one."""
    os.unlink(work / "vocab.txt")
    other = tmp_path / "elsewhere"
    other.mkdir()
    write_vocab(other, [*WORDS[:5], *reversed(WORDS[5:])])
    load: tuple[object, ...] = ("--load", work / "run", "--use-checkpoint-args", "--override-opt-param-scheduler", "--train-iters", 3)
    load += ("--finetune",) if weights_only else ()
    train(other, *load, "--save", "new", data=("--mock-data",), program=bert).expect(0)
    made = state(other / "new")
    assert made["tokenizer"] == state(work / "run")["tokenizer"] and made["config"]["model"]["vocab_size"] == 45
    assert (other / "new" / "tokenizer" / "vocab.txt").read_bytes() == (work / "run" / "tokenizer" / "vocab.txt").read_bytes()
    if weights_only:
        train(other, *load, "--save", "own", data=FLAGS, program=bert).expect(0)
        assert state(other / "own")["tokenizer"] != made["tokenizer"]
    write_vocab(work / "run" / "tokenizer", WORDS[:-1])
    train(other, *load, "--save", "bad", data=("--mock-data",), program=bert, ranks=2).expect(4, "own copy of its tokenizer is damaged")


def full(rank: int) -> None:
    from megatron_sp.data.tokenizers import kept

    def write(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    kept.write_synced = write  # type: ignore[assignment]


@pytest.mark.parametrize("flags", [("--finetune", "--save", "new", "--train-iters", 1), ("--skip-train", "--eval-iters", 1)])
def test_a_tokenizer_that_is_adopted_is_the_runs_copy(work: Path, flags: tuple[object, ...]) -> None:
    """From a folder in which the training's path is nothing, or leads to another tokenizer."""
    elsewhere = work / "elsewhere"
    elsewhere.mkdir()
    if "--save" in flags:
        write_vocab(elsewhere, WORDS[::-1])
    adopted = ("--load", work / "run", "--use-checkpoint-args", *flags)
    train(elsewhere, *adopted, data=("--mock-data",), program=bert).expect(0)
    if "--save" in flags:
        assert state(elsewhere / "new")["tokenizer"] == state(work / "run")["tokenizer"]


def test_a_dry_run_finds_the_copy_as_the_run_does(work: Path) -> None:
    os.unlink(work / "vocab.txt")
    train(work, "--save", "run", *MORE, "--dry-run", data=FLAGS, program=bert).expect(0, "dry run: ")


def test_a_full_disk_is_a_warning(tmp_path: Path) -> None:
    write_vocab(tmp_path)
    said = train(tmp_path, "--save", "run", "--train-iters", 1, data=FLAGS, program=bert, setup=full, ranks=2).expect(0, "cannot be kept")
    assert said.text.count("cannot be kept") == 1 and state(tmp_path / "run")["tokenizer"]["folder"] is None
    assert not [p for p in (tmp_path / "run").iterdir() if "tokenizer" in p.name]
