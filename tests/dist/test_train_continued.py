"""Runs that continue the weights of others: with other rotary positions, longer sequences, losses of experts, and BERTs of either kind."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from support.paths import ROOT
from support.training import NO_DROPOUT, bert, records, state, train, write_data

SHAPE = ("--hidden-size", 16, "--num-attention-heads", 2, "--position-embedding-type", "rope", "--vocab-size", 98)
RUN = (
    *NO_DROPOUT, "--lr", 0, "--train-iters", 1, "--init-method-std", 0.3, "--micro-batch-size", 1, "--lr-decay-style", "linear", *SHAPE,
)  # fmt: skip
EXPERTS = ("--num-experts", 4, "--moe-ffn-hidden-size", 16)


def one_step(run: Path, *flags: object) -> list[float]:
    """Take a step and return its loss and gradient norm."""
    train(run.parent, *RUN, "--save", run, *flags).expect(0)
    return [records(run)[0][name] for name in ("loss", "grad_norm")]


def test_other_rotary_positions_and_a_window_count(tmp_path: Path) -> None:
    assert one_step(tmp_path / "a") == pytest.approx([5.262240, 1.674559], rel=1e-6)
    more = ("--load", tmp_path / "a", "--finetune", "--rotary-base", 50, "--window-size", 4)
    for name, flags in (("b", more), ("c", (*more, "--use-checkpoint-args"))):
        assert one_step(tmp_path / name, *flags) == pytest.approx([5.240011, 1.613334], rel=1e-6)


@pytest.mark.long
def test_losses_of_experts_count_and_can_be_switched_off(tmp_path: Path) -> None:
    losses = ("--moe-aux-loss-coeff", 2, "--moe-z-loss-coeff", 1)
    without, want = one_step(tmp_path / "a", *EXPERTS), one_step(tmp_path / "b", *EXPERTS, *losses)
    load = ("--finetune", "--use-checkpoint-args", "--load")
    assert one_step(tmp_path / "c", *load, tmp_path / "a", *losses) == want != without
    off = ("--moe-aux-loss-coeff", 0, "--moe-z-loss-coeff", 0)
    assert one_step(tmp_path / "d", *load, tmp_path / "b") == want
    assert one_step(tmp_path / "e", *load, tmp_path / "b", *off) == without


@pytest.mark.long
def test_the_command_of_the_page_about_longer_sequences(tmp_path: Path) -> None:
    page = (ROOT / "docs/how-to/convert.md").read_text(encoding="utf-8").split("### Continue a model at a longer context")[1]
    launch, *words = page.split("```bash\nbash scripts/launch.sh 2 ")[1].split("```")[0].replace("\\\n", "").split()
    assert launch == "pretrain_gpt.py"
    small = {
        "16384": "64", "1000": "2", "runs/llama": tmp_path / "llama", "runs/llama-16k": tmp_path / "long",
        "data/corpus_text_document": write_data(tmp_path / "d" / "x"),
    }  # fmt: skip
    train(tmp_path, *RUN, "--save", tmp_path / "llama").expect(0)
    data = ("--vocab-size", 98, "--hidden-size", 16, "--num-attention-heads", 2)
    train(tmp_path, *(small.get(word, word) for word in shlex.split(" ".join(words))), ranks=2, data=data).expect(
        0, "changed since: model.seq_length: 32 -> 64", "changed since: model.rotary_base: 10000.0 -> 1000000.0"
    )
    assert state(tmp_path / "long")["config"]["model"]["max_position_embeddings"] is None


@pytest.mark.parametrize("head", [(), ("--bert-no-binary-head",)])
def test_a_bert_is_continued_as_it_was(head: tuple[str, ...], tmp_path: Path) -> None:
    """Which losses there are follows from the checkpoint."""
    shape = ("--train-iters", 1, "--vocab-size", 98)
    train(tmp_path, *shape, *head, "--save", tmp_path / "a", program=bert).expect(0)
    flags = ("--load", tmp_path / "a", "--finetune", "--use-checkpoint-args", "--save", tmp_path / "b")
    train(tmp_path, *shape, *flags, program=bert).expect(0)
    assert state(tmp_path / "b")["config"]["model"]["bert_no_binary_head"] is bool(head)
