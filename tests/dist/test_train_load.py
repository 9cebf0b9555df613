"""What may be loaded into what, and what is said when it may not: refused before a model is built, with exit codes 2 and 3."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from support.training import (
    assert_same_run,
    assert_same_tensors,
    copy_run,
    records,
    saved_steps,
    state,
    status,
    tensors,
    train,
    write_data,
)  # fmt: skip

from megatron_sp.training import run as parts


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps with checkpoints of steps 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("old")
    train(folder, "--save", folder / "old", "--save-interval", 2, "--keep-every", 2).expect(0)
    return folder / "old"


@pytest.fixture
def run(old: Path, tmp_path: Path) -> Path:
    return copy_run(old, tmp_path / "run")


def no_model(rank: int) -> None:
    def build(*_: object) -> NoReturn:
        raise AssertionError("the model was built")

    parts.build_model = build


MORE = ("--train-iters", 8, "--override-opt-param-scheduler")


def test_load_of_nothing_is_an_error_and_never_a_fresh_start(tmp_path: Path, old: Path) -> None:
    """One letter too many: the nearest name is said, by rank 0 alone, before anything is built."""
    wrong = old.with_name("oldd")
    outcome = train(tmp_path, "--load", wrong, ranks=2, setup=no_model).expect(3, f"error: there is no {wrong}", "nearest: old")
    assert outcome.texts[1] == ""
    train(tmp_path, "--load", wrong, "--save", tmp_path / "x", "--auto-resume", setup=no_model).expect(3)
    assert status(tmp_path / "x")["exit_code"] == 3


def test_a_script_that_names_one_folder_to_load_and_save_starts_afresh_and_resumes(tmp_path: Path, old: Path) -> None:
    """As most launch scripts do: the first time there is nothing, with a line saying so, then what was saved."""
    run, flags = tmp_path / "run", ("--save-interval", 2, "--keep-every", 2, "--exit-interval", 4)
    first = train(tmp_path, "--load", run, "--save", run, *flags).expect(0, f"{run} has no checkpoint yet: starting from scratch")
    assert first.text.count("starting from scratch") == 1 and saved_steps(run) == [2, 4]
    again = train(tmp_path, "--load", run / "checkpoints", "--save", run, *flags).expect(0, "resumed from", "(step 4, 16 samples)")
    assert "starting from scratch" not in again.text
    assert_same_run(run, old)


def test_steps_that_were_set_aside_are_no_empty_folder(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "checkpoints" / "step-000004.abandoned-1234abcd").mkdir(parents=True)
    train(tmp_path, "--load", run, "--save", run, setup=no_model).expect(3, "has no checkpoint", "step-000004.abandoned-1234abcd")


def test_what_is_missing_is_an_error_where_it_was_not_meant_to_be_missing(tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    pair = ("--load", run, "--save", run)
    train(tmp_path, *pair, "--exit-on-missing-checkpoint", setup=no_model).expect(3, "has no checkpoint")
    train(tmp_path, *pair, "--ckpt-step", 4, setup=no_model).expect(3, "has no checkpoint")
    train(tmp_path, *pair, "--skip-train", "--eval-iters", 1, setup=no_model).expect(3, "has no checkpoint")
    train(tmp_path, "--load", other, "--save", run, setup=no_model).expect(3, f"there is no {other}")
    left = tmp_path / "left"
    (left / "checkpoints").mkdir(parents=True)
    (left / "checkpoints" / "latest").write_text("100")
    train(tmp_path, "--load", left, "--save", left, setup=no_model).expect(3, "has no checkpoint")
    foreign = tmp_path / "megatrons"
    (foreign / "iter_0000010" / "mp_rank_00").mkdir(parents=True)
    train(tmp_path, "--load", foreign, "--save", foreign, ranks=2, setup=no_model).expect(3, f"  megatron-sp convert --input {foreign} ")
    assert [path.name for path in foreign.rglob("*")] == ["iter_0000010", "mp_rank_00"]  # and nothing is left there
    (tmp_path / "file").write_text("x")
    train(tmp_path, "--load", tmp_path / "file", "--save", run, setup=no_model).expect(3, "is a file")


def test_a_folder_with_checkpoints_is_not_written_into_by_another_run(run: Path, tmp_path: Path) -> None:
    before = tensors(run)
    train(tmp_path, "--save", run, setup=no_model).expect(3, "already holds checkpoints", "--auto-resume", "choose another --save")
    other = copy_run(run, tmp_path / "other")
    train(tmp_path, "--save", run, "--load", other, setup=no_model).expect(3, "already holds checkpoints")
    assert_same_tensors(tensors(run), before)


@pytest.mark.parametrize("part", ["", "checkpoints/step-000006"])
def test_load_of_ones_own_folder_goes_on(run: Path, tmp_path: Path, part: str) -> None:
    train(tmp_path, "--save", run, "--load", run / part, *MORE).expect(0, "(step 6, 24 samples)")
    assert saved_steps(run)[-1] == 8


def test_auto_resume_prefers_its_own_checkpoints_to_those_of_load(run: Path, old: Path, tmp_path: Path) -> None:
    new = tmp_path / "new"
    flags = ("--save", new, "--load", run, "--ckpt-step", 2, "--auto-resume")
    train(tmp_path, *flags, "--exit-interval", 4).expect(0, "(step 2, 8 samples)")
    train(tmp_path, *flags).expect(0, "(step 4, 16 samples)")
    assert_same_tensors(tensors(new), tensors(old))


def test_another_model_is_refused_with_a_table(old: Path, tmp_path: Path) -> None:
    changed = ("--num-layers", 3, "--seq-length", 48, "--untie-embeddings-and-output-weights")
    data = ("--mock-data", "--vocab-size", 70)
    train(tmp_path, "--load", old, *changed, ranks=2, data=data, setup=no_model).expect(
        3, "the checkpoint is of another model", "num_layers: 2 in the checkpoint, 3 here", "vocab_size: 60 in the checkpoint, 70 here",
        "max_position_embeddings: 32 in the checkpoint, 48 here", "untie_embeddings_and_output_weights: False in the checkpoint, True here",
        "--use-checkpoint-args",
    )  # fmt: skip


def test_use_checkpoint_args(old: Path, tmp_path: Path) -> None:
    """The shape comes from the checkpoint, and no flag may say another one; what belongs to training stays ours."""
    run = tmp_path / "run"
    flags = ("--load", old, "--save", run, "--hidden-dropout", 0.3, "--use-checkpoint-args", *MORE)
    other = ("--num-layers", 3, "--hidden-size", 64)
    train(tmp_path, *flags, *other, ranks=2, data=("--mock-data", "--vocab-size", 70), setup=no_model).expect(
        2, "num_layers: 2 in the checkpoint, 3 here", "hidden_size: 32 in the checkpoint, 64 here",
        "vocab_size: 60 in the checkpoint, 70 here", "leave these flags out",
    )  # fmt: skip
    train(tmp_path, *flags).expect(0, "changed since: model.hidden_dropout: 0.1 -> 0.3")
    config = state(run)["config"]["model"]
    assert [config[k] for k in ("num_layers", "hidden_size", "num_attention_heads", "vocab_size", "hidden_dropout")] == [2, 32, 4, 60, 0.3]
    assert {k: t.shape for k, t in tensors(run).items()} == {k: t.shape for k, t in tensors(old).items()}


def test_another_schedule_is_refused_until_one_is_chosen(old: Path, tmp_path: Path) -> None:
    flags = ("--load", old, "--ckpt-step", 4, "--lr", 0.5)
    train(tmp_path, *flags, ranks=2).expect(2, "schedule", "peak: 0.01 in the checkpoint, 0.5 here", "--use-checkpoint-opt-param-scheduler")
    for flag, lr in (("--override-opt-param-scheduler", 0.5), ("--use-checkpoint-opt-param-scheduler", 0.01)):
        said = train(tmp_path, *flags, flag, "--save", tmp_path / flag).expect(0, "changed since: optimizer.lr: 0.01 -> 0.5").text
        assert ("0.5 (not taken: --use-checkpoint-opt-param-scheduler keeps the former)" in said) == flag.startswith("--use")
        assert [r["lr"] for r in records(tmp_path / flag)] == [lr, lr]
    assert_same_tensors(tensors(tmp_path / "--use-checkpoint-opt-param-scheduler"), tensors(old))


@pytest.mark.often("data", "seed")
@pytest.mark.parametrize("change", ["seed", "data", "split", "tokenizer"])
def test_other_data_is_refused_until_accepted(tmp_path: Path, change: str) -> None:
    prefix = write_data(tmp_path / "d" / "x")
    flags = {"--data-path": prefix, "--split": "9,1", "--vocab-size": 60, "--seed": 5}
    other = dict(flags)
    if change == "seed":
        other["--seed"] = 6
    elif change == "split":
        other["--split"] = "8,2"
    elif change == "data":
        other["--data-path"] = write_data(tmp_path / "e" / "x", seed=1)
    elif change == "tokenizer":
        other |= {"--tokenizer-type": "ByteTokenizer", "--vocab-size": 300}
        flags["--vocab-size"] = 300

    def words(given: dict[str, object]) -> list[object]:
        return [word for pair in given.items() for word in pair]

    train(tmp_path, "--save", tmp_path / "a", data=words(flags)).expect(0)
    again = ("--load", tmp_path / "a", *MORE)
    what = "the tokenizer is not the NullTokenizer" if change == "tokenizer" else "the training data is not what"
    train(tmp_path, *again, data=words(other), ranks=2).expect(4, what, "--accept-data-change")
    train(tmp_path, *again, "--accept-data-change", data=words(other)).expect(0, "(step 6, 24 samples)")
    train(tmp_path, *again, data=words(flags)).expect(0)


def test_finetune_takes_the_weights_and_begins_anew(old: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    flags = ("--load", old, "--save", run, "--finetune", "--lr", 0.5, "--seed", 77, "--exit-interval", 1)
    train(tmp_path, *flags, ranks=2).expect(0, "finetuning from", "steps 0 to 6")
    assert [(r["step"], r["consumed_samples"], r["lr"]) for r in records(run)] == [(1, 4, 0.5)]
    assert state(run)["num_updates"] == 1
    first = float(records(run)[0]["loss"])
    assert abs(first - float(records(old)[-1]["loss"])) < 0.3 < float(records(old)[0]["loss"]) - first, "it starts where the other ended"
    train(tmp_path, *flags, "--auto-resume").expect(0, "resumed from", "(step 1, 4 samples)")


def test_no_load_optim_keeps_the_place_but_not_the_moments(old: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(tmp_path, "--load", old, "--ckpt-step", 4, "--save", run, "--no-load-optim").expect(0, "(step 4, 16 samples)")
    assert state(run)["num_updates"] == 2 and [r["samples_sha"] for r in records(run)] == [r["samples_sha"] for r in records(old)[4:]]
    assert records(run)[0]["loss_hex"] == records(old)[4]["loss_hex"], "the weights are those of step 4"
    assert not torch.equal(tensors(run)["decoder.final_layernorm.weight"], tensors(old)["decoder.final_layernorm.weight"])


def test_weights_alone_cannot_resume(tmp_path: Path, old: Path) -> None:
    bare = tmp_path / "bare"
    train(tmp_path, "--save", bare, "--no-save-optim", "--exit-interval", 4).expect(0)
    assert not [name for name in tensors(bare) if name.startswith("optimizer.")]
    train(tmp_path, "--save", bare, "--auto-resume", ranks=2).expect(3, "no optimizer state", "--no-load-optim", "--finetune")
    train(tmp_path, "--load", bare, "--save", tmp_path / "a", "--no-load-optim").expect(0, "(step 4, 16 samples)")
    train(tmp_path, "--load", bare, "--save", tmp_path / "b", "--finetune").expect(0, "steps 0 to 6")


def test_ckpt_step_takes_the_run_back(run: Path, old: Path, tmp_path: Path) -> None:
    train(tmp_path, "--save", run, "--load", run, "--ckpt-step", 3).expect(3, "has no step-000003", "it has the steps 2, 4, 6")
    flags = ("--save", run, "--auto-resume", "--ckpt-step", 2, "--save-interval", 1, "--keep-every", 1)
    outcome = train(tmp_path, *flags).expect(0, "(step 2, 8 samples)")
    assert_same_run(run, old)
    assert saved_steps(run) == [2, 3, 4, 5, 6] and "step-000004.abandoned-" in outcome.text, "the other line is set aside, and that is said"


@pytest.mark.parametrize(("what", "how"), [("rank00000-00000.safetensors", "flip"), ("state.json", "delete")])
def test_a_damaged_checkpoint_is_never_loaded(run: Path, old: Path, tmp_path: Path, what: str, how: str) -> None:
    path = run / "checkpoints" / "step-000006" / what
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data) if how == "flip" else path.unlink()
    flags = ("--save", run, "--auto-resume")
    outcome = train(tmp_path, *flags, ranks=2, setup=no_model).expect(3, what, "step-000006", "--resume-fallback")
    assert outcome.texts[1] == "" and status(run)["exit_code"] == 3
    if how == "flip":
        train(tmp_path, *flags, "--resume-fallback").expect(0, "(step 4, 16 samples)", what)
        assert_same_tensors(tensors(run), tensors(old))


def test_an_extra_file_and_a_wrong_hint_are_mentioned_and_ignored(run: Path, tmp_path: Path) -> None:
    (run / "checkpoints" / "latest").write_bytes(b"../../etc")
    (run / "checkpoints" / "step-000006" / "notes.txt").write_text("mine")
    train(tmp_path, "--save", run, "--auto-resume", *MORE).expect(0, "notes.txt", "latest", "(step 6, 24 samples)")


def test_every_checkpoint_damaged(run: Path, tmp_path: Path) -> None:
    for folder in (run / "checkpoints").glob("step-*"):
        os.truncate(folder / "MANIFEST.json", 10)
    train(tmp_path, "--save", run, "--auto-resume", "--resume-fallback").expect(3, "no sound checkpoint", "3 tried")
    shutil.rmtree(run / "checkpoints")
    train(tmp_path, "--load", run).expect(3, "has no checkpoint")


# --skip-train


def test_skip_train_validates_a_checkpoint(tmp_path: Path, old: Path) -> None:
    """No learning rate, no optimizer, no training data needed; the same batches as the first validation of the run."""
    train(tmp_path, "--save", tmp_path / "a", "--eval-iters", 3).expect(0)
    want = [(r["kind"], r["step"], r["loss_hex"]) for kind in ("valid", "test") for r in records(tmp_path / "a", kind)]
    assert len(want) == 2
    for more in ((), ("--eval-interval", 2, "--train-iters", 20)):
        run = tmp_path / f"b{len(more)}"
        outcome = train(tmp_path, "--load", tmp_path / "a", "--save", run, "--skip-train", "--eval-iters", 3, *more, ranks=2).expect(0)
        got = [(r["kind"], r["step"], r["loss_hex"]) for kind in ("valid", "test") for r in records(run, kind)]
        assert [g[:2] for g in got] == [w[:2] for w in want] and saved_steps(run) == []
        for g, w in zip(got, want, strict=True):
            assert abs(float.fromhex(g[2]) - float.fromhex(w[2])) < 1e-5, outcome.text


def test_skip_train_needs_no_learning_rate_and_no_optimizer_state(tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    data = ("--data-path", write_data(tmp_path / "d" / "x"), "--split", "8,1,1", "--vocab-size", 60)
    train(tmp_path, "--save", bare, "--no-save-optim", data=data).expect(0)
    valid = ("--valid-data-path", tmp_path / "d" / "x", "--vocab-size", 60)
    train(tmp_path, "--load", bare, "--skip-train", "--eval-iters", 2, "--lr", 0.7, data=valid).expect(0, "valid at step 6: lm loss")


@pytest.mark.often("2-32")
@pytest.mark.parametrize("size, consumed", [(2, 24 + 4 * 2), (8, 24 + 4 * 8)])
def test_another_batch_size_goes_on_to_the_last_step(old: Path, tmp_path: Path, size: int, consumed: int) -> None:
    """What the first part consumed stays consumed: with smaller batches the data do not end before the run."""
    run = tmp_path / "run"
    flags = ("--micro-batch-size", 2, "--global-batch-size", size, "--train-iters", 10, "--override-opt-param-scheduler")
    train(tmp_path, "--load", old, "--save", run, *flags).expect(0, "steps 6 to 10")
    assert (state(run)["step"], state(run)["consumed_samples"]) == (10, consumed)


@pytest.mark.often("8-4")
@pytest.mark.parametrize("size, steps", [(2, 16), (8, 4)])
def test_train_samples_counts_those_of_another_batch_size(tmp_path: Path, size: int, steps: int) -> None:
    """Neither more samples than asked for, nor fewer, when the batch size changes half-way."""
    run = tmp_path / "run"
    flags = ("--save", run, "--train-samples", 56)
    train(tmp_path, *flags, "--exit-interval", 6).expect(0)
    train(tmp_path, *flags, "--auto-resume", "--global-batch-size", size).expect(0, f"steps 6 to {6 + steps}")
    assert (state(run)["step"], state(run)["consumed_samples"]) == (6 + steps, 56)


def test_a_run_made_shorter_than_its_checkpoint_is_validated_and_done(old: Path, tmp_path: Path) -> None:
    flags = ("--eval-iters", 1, "--eval-interval", 1, "--train-iters", 3, "--override-opt-param-scheduler")
    train(tmp_path, "--load", old, "--save", tmp_path / "run", *flags).expect(0, "valid at step 6", "test at step 6")
