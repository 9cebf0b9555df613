"""Everything that is wrong with a command line in one answer, without what only follows from a value that could not be read."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_sp.config.flags.arguments import config_from_args
from megatron_sp.utils.errors import ConfigError

SOUND = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --mock-data --vocab-size 100 --train-iters 10 --lr 1e-3"
_ODD_WIDTH = "hidden_size (65) must be a multiple of num_attention_heads (4)"


def wrong(words: str, world_size: int = 1, family: str | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        config_from_args(words.split(), world_size=world_size, family=family)
    text = str(caught.value)
    return [text] if "\n" not in text else [line.strip().partition(". ")[2] for line in text.splitlines()[1:]]


@pytest.mark.parametrize(("words", "expected"), [
    # what can be read is checked as ever
    (f"{SOUND} --hidden-size 65 --foo-bar 3 --min-lr 5", ["--foo-bar is unknown", _ODD_WIDTH, "min_lr (5.0) must be at most lr"]),
    (f"{SOUND} --mtp-num-layers 2 --bf16 --fp16", ["--mtp-num-layers 2 is not supported", "--bf16 and --fp16 exclude each other"]),
    (f"{SOUND} --lr -1 --hidden-size 65", ["--lr (-1) must be at least 0", _ODD_WIDTH]),
    # no rule speaks of a value that could not be read, was mistyped or is out of range
    (f"{SOUND} --num-layers abc --recompute-granularity full --recompute-num-layers 9", ["--num-layers: expected an integer"]),
    (f"{SOUND.replace('--num-layers 2', '--num-layers abc')} --min-lr 5", ["--num-layers: expected an integer", "min_lr (5.0)"]),
    (SOUND.replace("--num-layers 2", "--num-layesr 2"), ["--num-layesr is unknown: did you mean --num-layers?"]),
    ("--num-layers x --num-attention-heads 4 --seq-length 8 --mock-data --vocab-size 9 --train-iters 1 --lr 1", [
        "--num-layers: expected an integer", "--hidden-size is required"]),
    (f"{SOUND} --micro-batch-size 0 --global-batch-size 7", ["--micro-batch-size (0) must be at least 1"]),
    (f"{SOUND} --tensor-model-parallel-size two --hidden-size 65", ["--tensor-model-parallel-size: expected", _ODD_WIDTH]),
    (f"{SOUND.replace('--lr 1e-3', '--lr-decay-style round')}", ["--lr-decay-style: expected one of", "--lr is required to train"]),
    (SOUND.replace("--num-layers 2", "--encoder-num-layers x"), ["--encoder-num-layers: expected an integer"]),
    (SOUND.replace("--lr 1e-3", "-lr 1e-3"), ["unexpected '-lr': a flag begins with --, as in --lr"]),
    (SOUND.replace("--train-iters 10", "--train-tokens x"), ["--train-tokens: expected an integer"]),
    (SOUND.replace("--train-iters 10", "--train-tokens 999").replace("32", "x"), ["--seq-length: expected an integer"]),
    (SOUND.replace("--mock-data", "--data-args-path x"), ["--data-args-path x is not supported"]),  # it names the flags for data
    ("--preset nonsense --mock-data --lr 1 --train-iters 1", ["--preset: 'nonsense' is not a preset"]),
    (f"{SOUND} --dry-run --world-size many --tp-size 2", ["--world-size: expected an integer"]),
    (f"{SOUND} --bf16 --lr 1 --attention-backend flash2 --deepspeed_config /nowhere.json --hidden-size 65", [
        "--deepspeed_config /nowhere.json", _ODD_WIDTH]),
    (f"{SOUND} --attention-backend flash2 --deepspeed_config /nowhere.json", ["--deepspeed_config /nowhere.json"]),  # it may say bf16
    (f"{SOUND} --config /nowhere.yaml --foo-bar 3", ["--config /nowhere.yaml", "--foo-bar is unknown"]),
])  # fmt: skip
def test_all_that_is_wrong_and_nothing_else(words: str, expected: list[str]) -> None:
    found = wrong(words)
    assert len(found) == len(expected) and all(part in text for part, text in zip(expected, found, strict=True)), found


def test_mistyped_sizes_of_a_layout_are_no_sizes_of_1() -> None:
    assert wrong(f"{SOUND} --tensor-model-paralel-size 2 --global-batch-size 4", world_size=8) == [
        "--tensor-model-paralel-size is unknown: did you mean --tensor-model-parallel-size?"
    ]


def test_the_program_s_family_and_the_rules_are_one_answer() -> None:
    first, second = wrong(f"{SOUND} --model-family bert --min-lr 5", family="gpt")
    assert "use pretrain_bert.py" in first and "min_lr" in second


def test_a_mistyped_name_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("num_layesr: 3\n")
    text = wrong(f"{SOUND.replace('--num-layers 2', '')} --config {tmp_path / 'run.yaml'}")
    assert text == ["run.yaml line 1: num_layesr is unknown: did you mean num-layers?"]
