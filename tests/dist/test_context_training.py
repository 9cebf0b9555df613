"""The training program with context parallelism: one line of losses, checkpoints into any layout, validation, evaluation."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from support import stored_models
from support.training import bert, records, run_once, state, trace, train, write_data

from megatron_sp.commands import evaluate
from megatron_sp.config.schema import Config, ModelConfig
from megatron_sp.data.writer import IndexedDatasetWriter
from megatron_sp.models.bert import BertModel

DOUBLE = ("--fp64", "--num-query-groups", 2, "--seq-length", 31, "--vocab-size", 61)
ULYSSES = ("--context-parallel-size", 4, "--cp-comm-type", "a2a+p2p", "--hierarchical-context-parallel-sizes", 2, 2)
LAYOUTS: dict[str, tuple[int, tuple[object, ...]]] = {
    "alone": (1, ()),
    "cp2": (2, ("--cp-size", 2)),
    "cp3 zero3": (3, ("--cp-size", 3, "--zero-stage", 3, "--cp-chunks", 1)),
    "sp2": (2, ("--sp-size", 2)),
    "sp2 cp2": (4, (*ULYSSES, "--sp-overlap-mode", "chunked", "--zero-stage", 1, "--delay-wgrad")),
    "tp2 cp2": (4, ("--tp-size", 2, "--sequence-parallel", "--cp-size", 2, "--check-collectives")),
    "cp3 kept": (3, ("--cp-size", 3, "--cp-keep-kv", "--cp-stages-ahead", "all", "--recompute-granularity", "full", "--delay-wgrad")),
    "cp2 dp2": (4, ("--cp-size", 2, "--recompute-granularity", "full")),
}
LONG = ("tp2 cp2", "cp2 dp2", "cp2", "cp3 zero3")


def losses(run: Path) -> list[float]:
    return [float.fromhex(entry[0]) for _, entry in sorted(trace(run).items())]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return run_once(tmp_path_factory, {name: (ranks, (*DOUBLE, *flags)) for name, (ranks, flags) in LAYOUTS.items()})


@pytest.mark.often("sp2 cp2")
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.long if n in LONG else ()) for n in LAYOUTS if "cp" in n])
def test_losses_and_gradient_norms_lie_on_one_line(name: str, runs: Callable[[str], Path]) -> None:
    got, want = trace(runs(name)), trace(runs("alone"))
    assert losses(runs(name)) == pytest.approx(losses(runs("alone")), rel=1e-10)
    assert [entry[2] for entry in got.values()] == [entry[2] for entry in want.values()], "the same samples"
    norms = [[float.fromhex(entry[1]) for entry in t.values()] for t in (got, want)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-8)
    assert [r["loss_tokens"] for r in records(runs(name))] == [r["loss_tokens"] for r in records(runs("alone"))], "counted once"


@pytest.mark.parametrize("writer, reader", [
    ("sp2 cp2", "cp3 zero3"), pytest.param("cp3 zero3", "alone", marks=pytest.mark.long),
    pytest.param("alone", "cp3 zero3", marks=pytest.mark.long),
    pytest.param("cp2", "sp2 cp2", marks=pytest.mark.long), pytest.param("tp2 cp2", "cp3 zero3", marks=pytest.mark.long),
])  # fmt: skip
def test_a_checkpoint_of_any_layout_goes_on_in_any_other(writer: str, reader: str, runs: Callable[[str], Path], tmp_path: Path) -> None:
    ranks, flags = LAYOUTS[reader]
    load = ("--load", runs(writer), "--ckpt-step", 3, "--save", tmp_path / "run")
    train(tmp_path, *DOUBLE, *flags, *load, ranks=ranks).expect(0, "(step 3")
    assert losses(tmp_path / "run") == pytest.approx(losses(runs("alone"))[3:], rel=1e-9)


def test_the_layout_is_said_and_stored(runs: Callable[[str], Path]) -> None:
    layout = state(runs("sp2 cp2"))["layout"]
    assert {axis: layout[axis] for axis in ("dp", "cp", "sp", "tp")} == {"dp": 1, "cp": 2, "sp": 2, "tp": 1}
    (start,) = records(runs("sp2 cp2"), "start")
    assert start["environment"]["layout"]["cp"] == 2 and start["config"]["parallel"]["context_parallel_size"] == 2


def test_auto_shares_the_ranks_and_keeps_its_choice(tmp_path: Path, runs: Callable[[str], Path]) -> None:
    flags = (*DOUBLE, "--cp-size", 4, "--cp-comm-type", "auto", "--sp-overlap-comm", "--save", tmp_path / "run", "--auto-resume")
    first = train(tmp_path, *flags, "--exit-interval", 3, "--check-collectives", ranks=4)
    first.expect(0, "--cp-comm-type auto: sp ", "(attention of one block: sp 1 x cp 4 ", ", sp 2 x cp 2 ")
    sizes = {axis: state(tmp_path / "run")["layout"][axis] for axis in ("sp", "cp")}
    assert f"--cp-comm-type auto: sp {sizes['sp']} x cp {sizes['cp']} (" in first.text
    again = train(tmp_path, *flags, ranks=4)
    again.expect(0, "resumed from", f"--cp-comm-type auto: sp {sizes['sp']} x cp {sizes['cp']}, as before the resume")
    assert losses(tmp_path / "run") == pytest.approx(losses(runs("alone")), rel=1e-10)
    (_, start) = records(tmp_path / "run", "start")
    parallel = start["config"]["parallel"]
    assert (parallel["sequence_parallel_size"], parallel["context_parallel_size"]) == (sizes["sp"], sizes["cp"])
    assert parallel["cp_comm_type"] is None


@pytest.mark.long
def test_what_was_timed_is_not_kept_for_another_cp(tmp_path: Path) -> None:
    flags = (*DOUBLE, "--save", tmp_path / "run", "--auto-resume", "--sp-size", 2, "--sp-overlap-comm")
    train(tmp_path, *flags, "--exit-interval", 3, ranks=2).expect(0, "--sp-overlap-mode auto: ")
    train(tmp_path, *flags, "--cp-size", 2, ranks=4).expect(0, "resumed from", "--sp-overlap-mode auto: ", "(dp 1, cp 2, sp 2: ")


@pytest.mark.parametrize("more", [("--cp-size", 2), pytest.param(("--sp-size", 2, "--cp-size", 2), marks=pytest.mark.long)])
def test_verify_parallelism_says_that_a_layout_is_right(more: tuple[object, ...], tmp_path: Path) -> None:
    out = train(tmp_path, *more, "--verify-parallelism", ranks=len(more))
    out.expect(0, "the layout equals one process", "cp 2, dp 1 against one process")


def test_packed_documents_with_windows(tmp_path: Path) -> None:
    """Another cut in each micro-batch, the same on all ranks of a replica."""
    data = ("--data-path", write_data(tmp_path / "data" / "x", longest=20), "--split", "8,1,1")
    flags = (*DOUBLE, "--reset-position-ids", "--reset-attention-mask", "--eod-mask-loss", "--window-size", 9, "--eval-interval", 3,
             "--eval-iters", 2, "--position-embedding-type", "rope", "--vocab-size", 60)  # fmt: skip
    for name, ranks, more in (("alone", 1, ()), ("cp3", 3, ("--cp-size", 3))):
        train(tmp_path, *flags, *more, "--save", tmp_path / name, ranks=ranks, data=data).expect(0)
    got, want = tmp_path / "cp3", tmp_path / "alone"
    assert losses(got) == pytest.approx(losses(want), rel=1e-10)
    assert [r["loss"] for r in records(got, "valid")] == pytest.approx([r["loss"] for r in records(want, "valid")], rel=1e-10)


def test_bert_and_what_validation_finds(tmp_path: Path) -> None:
    flags = ("--fp64", "--seq-length", 31, "--vocab-size", 61, "--eval-interval", 3, "--eval-iters", 2, "--train-iters", 3)
    for name, ranks, more in (("alone", 1, ()), ("cp2", 2, ("--cp-size", 2, "--cp-chunks", 3, "--zero-stage", 2))):
        train(tmp_path, *flags, *more, "--save", tmp_path / name, ranks=ranks, program=bert).expect(0)
    got, want = tmp_path / "cp2", tmp_path / "alone"
    assert losses(got) == pytest.approx(losses(want), rel=1e-10)
    for a, b in zip(records(got, "valid"), records(want, "valid"), strict=True):
        for key in ("loss", "order_loss", "lm_accuracy", "order_accuracy"):
            assert a[key] == pytest.approx(b[key], rel=1e-10), key


def other_documents(rank: int) -> None:
    """Rank 1 reads data in which documents are shorter."""
    from megatron_sp.data import gpt_dataset

    gpt_dataset._EOD_PROBABILITY = 0.1 if rank == 1 else 0.02


@pytest.mark.parametrize("flags, says", [
    (("--cp-size", 2), "ranks 0 to 1 (cp 2 * sp 1 * tp 1 = 2) share each sequence"),
    pytest.param(("--cp-size", 2, "--global-batch-size", 8, "--micro-batch-size", 1), "ranks 0 to 1 (cp 2 *", marks=pytest.mark.long),
])  # fmt: skip
def test_ranks_that_read_different_documents(flags: tuple[object, ...], says: str, tmp_path: Path) -> None:
    """All of them end with the reason, before anybody waits for rows that nobody sends."""
    ranks = 2 if len(flags) == 2 else 4
    ended = train(tmp_path, *DOUBLE, *flags, "--reset-attention-mask", "--save", tmp_path / "run", ranks=ranks, setup=other_documents)
    ended.expect(4, says, "see that all hosts have the same data files")


def evaluated(tmp_path: Path, ranks: int, *words: object) -> dict[str, float]:
    out = tmp_path / f"{ranks}.json"
    given = [str(word) for word in (*words, "--json", out, "--device", "cpu", "--batch-size", 3)]
    train(tmp_path, ranks=ranks, program=lambda _: sys.exit(evaluate.main(given))).expect(0)
    results: dict[str, float] = json.loads(out.read_text())["results"]
    return results


def test_evaluation(tmp_path: Path) -> None:
    run, _ = stored_models.byte_run(tmp_path)
    (tmp_path / "text.jsonl").write_text('{"text": "The quick brown fox jumps over the lazy dog, and back."}\n{"text": "a b c d"}\n')
    words = ["--load", run, "--text", tmp_path / "text.jsonl", "--stride", 7, "--seq-length", 15]
    assert evaluated(tmp_path, 2, *words, "--cp-size", 2) == pytest.approx(evaluated(tmp_path, 1, *words), rel=1e-5)
    config = Config()
    config.model = ModelConfig(
        model_family="bert", num_layers=1, hidden_size=16, num_attention_heads=4, seq_length=15, vocab_size=40, init_method_std=0.4
    )
    config.data.tokenizer_type = "NullTokenizer"
    stored_models.save(tmp_path / "bert", config, {1: BertModel(config.model, config.kernels, seed=3, dtype=torch.float32)})
    random = np.random.default_rng(0)
    with IndexedDatasetWriter(tmp_path / "data", dtype=np.uint16) as writer:
        for _ in range(6):
            sentences = [random.integers(0, 30, int(random.integers(3, 9))) for _ in range(4)]
            writer.add_document(np.concatenate(sentences), [len(sentence) for sentence in sentences])
    words = ["--load", tmp_path / "bert", "--data-path", tmp_path / "data"]
    assert evaluated(tmp_path, 3, *words, "--cp-size", 3) == pytest.approx(evaluated(tmp_path, 1, *words), rel=1e-5)
