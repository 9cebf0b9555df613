"""tools/finetune_classifier.py from a checkpoint to predictions: alike in all layouts, after interruption, with and without a pooler."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from support.paths import ROOT
from support.training import assert_same_run, bert, records, tensors, trace, train

from megatron_sp.commands import finetune
from megatron_sp.config.flags.arguments import config_from_args

WORDS = [f"w{i}" for i in range(40)]
STD = ("--init-method-std", 0.3)  # weights that make a difference, so that few steps do not end in one answer to everything
CLASSES = ("blue", "green", "red")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """vocab.txt, and two files of pairs whose class is that of the first text's words."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]) + "\n")
    g = torch.Generator().manual_seed(3)

    def line(i: int) -> str:
        number = i % len(CLASSES)
        first = [WORDS[number + 3 * int(k)] for k in torch.randint(0, 13, (6,), generator=g)]
        second = [WORDS[int(k)] for k in torch.randint(0, 40, (4,), generator=g)]
        return json.dumps({"text": " ".join(first), "other": " ".join(second), "label": CLASSES[number], "group": i // 2}) + "\n"

    (folder / "train.jsonl").write_text("".join(map(line, range(36))))
    (folder / "valid.jsonl").write_text("".join(map(line, range(11))))
    return folder


@pytest.fixture(scope="module")
def pretrained(files: Path) -> Path:
    train(
        files, "--save", files / "bert", "--train-iters", 2, *STD, data=("--mock-data", "--vocab-file", files / "vocab.txt"), program=bert
    ).expect(0)
    return files / "bert"


def tool(files: Path, *words: object) -> tuple[object, ...]:
    columns = ("--second-text", "other", "--group", "group")
    return ("--task", "jsonl", "--train-data", files / "train.jsonl", "--valid-data", files / "valid.jsonl", *columns, *words)


def run_tool(tmp_path: Path, files: Path, *words: object, **more: object) -> object:
    return train(tmp_path, *tool(files, *words), data=(), program=finetune.main, **more)  # type: ignore[arg-type]


def result(run: Path) -> dict[str, float]:
    assert "perplexity" not in records(run, "valid")[-1]
    record = records(run, "classification")[-1]
    labels, counts = record.pop("labels"), record.pop("confusion")
    pairs = {f"{true} as {said}": n for true, row in zip(labels, counts, strict=True) for said, n in zip(labels, row, strict=True)}
    assert sum(pairs.values()) == record["examples"]
    return {k: v for k, v in record.items() if k not in ("kind", "time")} | pairs


LAYOUTS: dict[str, tuple[int, tuple[object, ...]]] = {
    "alone": (1, ()),
    "sp2": (2, ("--sp-size", 2, "--sp-overlap-mode", "split-qkv")),
    "dp2 zero3": (2, ("--zero-stage", 3)),
    "tp2 seq": (2, ("--tp-size", 2, "--sequence-parallel")),
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, files: Path, pretrained: Path) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    run_tool(folder, files, *FLAGS, "--pretrained-checkpoint", pretrained, "--save", folder / "run").expect(0, "finetuning from")  # type: ignore[attr-defined]
    return folder / "run"


FLAGS = ("--fp64", "--train-iters", 8, "--global-batch-size", 12, "--lr", 5e-3, "--hidden-dropout", 0.05, *STD)


def test_predictions_scores_and_validation_agree(alone: Path, files: Path) -> None:
    rows = [line.split("\t") for line in (alone / "predictions.tsv").read_text().splitlines()]
    labels = [json.loads(line)["label"] for line in (files / "valid.jsonl").read_text().splitlines()]
    assert rows[0] == ["index", "predicted", "label"] and [row[2] for row in rows[1:]] == labels and len(rows) == 12
    right = [row[1] == row[2] for row in rows[1:]]
    found = result(alone)
    assert found["accuracy"] == pytest.approx(sum(right) / 11) == pytest.approx(records(alone, "valid")[-1]["accuracy"])
    groups = [all(right[i : i + 2]) for i in range(0, 11, 2)]
    assert found["exact_match"] == pytest.approx(sum(groups) / 6)
    assert len({row[1] for row in rows[1:]}) > 1, "not the same answer to everything"


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.long if i else ()) for i, name in enumerate(list(LAYOUTS)[1:])])
def test_a_layout_changes_nothing(name: str, alone: Path, files: Path, pretrained: Path, tmp_path: Path) -> None:
    ranks, layout = LAYOUTS[name]
    run = tmp_path / "run"
    run_tool(tmp_path, files, *FLAGS, *layout, "--pretrained-checkpoint", pretrained, "--save", run, ranks=ranks)
    assert [float.fromhex(e[0]) for e in trace(run).values()] == pytest.approx(
        [float.fromhex(e[0]) for e in trace(alone).values()], rel=1e-9
    )
    assert (run / "predictions.tsv").read_text() == (alone / "predictions.tsv").read_text()
    assert result(run) == pytest.approx(result(alone))


def test_killed_and_resumed_it_is_equal_to_the_last_bit(alone: Path, files: Path, pretrained: Path, tmp_path: Path) -> None:
    save = ("--save", tmp_path / "run", "--save-interval", 4, "--no-async-save", "--auto-resume")
    flags = (*FLAGS, "--pretrained-checkpoint", pretrained, *save)
    run_tool(tmp_path, files, *flags, fault="kill:rank=0:at=step.backward:step=7")
    run_tool(tmp_path, files, *flags).expect(0, "resumed from", "(step 4")  # type: ignore[attr-defined]
    assert_same_run(tmp_path / "run", alone)
    assert (tmp_path / "run/predictions.tsv").read_text() == (alone / "predictions.tsv").read_text()


@pytest.mark.parametrize("pooler", [True, False])
def test_what_comes_from_the_checkpoint_and_what_is_new(pooler: bool, files: Path, pretrained: Path, tmp_path: Path) -> None:
    source = pretrained
    if not pooler:
        source = tmp_path / "bert"
        data = ("--mock-data", "--vocab-file", files / "vocab.txt", "--bert-no-binary-head")
        train(tmp_path, "--save", source, "--train-iters", 1, data=data, program=bert).expect(0)
    still = ("--lr", 0, "--train-iters", 1, "--save", tmp_path / "run", "--pretrained-checkpoint", source)
    run_tool(tmp_path, files, *still).expect(0)  # type: ignore[attr-defined]
    before, after = tensors(source), tensors(tmp_path / "run")
    new = {name for name in after if not name.startswith("optimizer.") and name not in before}
    assert new == {"classification_head.weight", "classification_head.bias"} | (
        set() if pooler else {"pooler.dense.weight", "pooler.dense.bias"}
    )
    assert after["classification_head.weight"].shape == (3, 32)
    kept = [name for name in after if name in before and not name.startswith("optimizer.")]
    assert len(kept) > 20 and all(torch.equal(after[name], before[name]) for name in kept)


def test_a_shorter_sequence_than_the_checkpoints(files: Path, pretrained: Path, tmp_path: Path) -> None:
    flags = ("--seq-length", 16, "--train-iters", 1, "--pretrained-checkpoint", pretrained, "--save", tmp_path / "run")
    run_tool(tmp_path, files, *flags).expect(0, "x 16 tokens")  # type: ignore[attr-defined]


def test_mistakes_are_one_message(files: Path, pretrained: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": "w1", "other": "w2", "label": "red", "group": 1}\n{"text": "w1"}\n')
    (tmp_path / "new.jsonl").write_text('{"text": "w1", "other": "w2", "label": "mauve", "group": 1}\n')
    for words, code, says in (
        (("--train-data", tmp_path / "bad.jsonl"), 4, "bad.jsonl line 2 has no text or number under 'other'"),
        (("--train-data", tmp_path / "bad.jsonl", "--skip-bad-lines"), 4, "one label, 'red'"),
        (("--valid-data", tmp_path / "new.jsonl"), 4, "do not have: mauve; they have blue, green, red"),
        (("--pretrained-checkpoint", tmp_path / "absent"), 3, "there is no"),
        (("--epochs", 0), 2, "--epochs (0.0) must be above 0"),
        (("--lr", 1e-3, "--num-layrs", 2), 2, "num-layers"),
    ):
        with pytest.raises(SystemExit) as end:
            finetune.main([str(word) for word in tool(files, *words)])
        said = capfd.readouterr().err
        assert end.value.code == code and says in said and "Traceback" not in said, said


def test_the_command_line_of_the_run(files: Path, pretrained: Path) -> None:
    options, rest = finetune.parse([str(w) for w in tool(files, "--pretrained-checkpoint", pretrained, "--epochs", 2.5, "--lr", 1)])
    flags = finetune.pretraining_flags(options, rest, 36)
    assert flags[flags.index("--train-samples") + 1] == "90" and flags[-2:] == ["--lr", "1"]
    assert flags[flags.index("--vocab-file") + 1] == str(pretrained / "tokenizer" / "vocab.txt"), "the checkpoint's tokenizer"
    flags = finetune.pretraining_flags(options, ["--train_iters=5", "--vocab-file", "mine.txt"], 36)
    assert "--train-samples" not in flags and flags.count("--vocab-file") == 1


def commands(file: str, program: str) -> list[list[str]]:
    """The words after a program in every block of commands of a page."""
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / file).read_text(), flags=re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines() if f"{program} " in line]
    return [shlex.split(line.split(f"{program} ")[1]) for line in lines]


def test_the_commands_of_the_pages_are_understood(
    files: Path, pretrained: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(files)
    (files / "SST-2").mkdir()
    for name in ("train", "dev"):
        (files / f"SST-2/{name}.tsv").write_text("sentence\tlabel\nw1 w2\t0\nw3\t1\n")
    found = commands("docs/tutorials/bert.md", "tools/finetune_classifier.py")
    assert len(found) == 3
    for words in found:
        words[words.index("--pretrained-checkpoint") + 1] = str(pretrained)
        words = [word.replace("runs/quickstart/sections/", "") for word in words]
        monkeypatch.setenv("WORLD_SIZE", "2" if "--sequence-parallel-size" in words else "1")
        with pytest.raises(SystemExit) as end:
            finetune.main([*words, "--print-config"])
        said = capfd.readouterr()
        assert end.value.code == 0 and "train_samples: " in said.out, said.err
    pages = commands("docs/tutorials/bert.md", "pretrain_bert.py")
    assert len(pages) == 1
    assert config_from_args(pages[0], world_size=2, family="bert").data.bert_pack_sequences
