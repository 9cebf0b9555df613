"""Values that are not finite never reach the weights, and every rank decides alike."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.training import assert_same_tensors, records, saved_steps, state, status, tensors, train

EACH = ("--save-interval", 1, "--keep-every", 1)


@pytest.mark.often("0-loss", "1-grad")
@pytest.mark.parametrize("what", ["loss", "grad"])
@pytest.mark.parametrize("rank", [0, 1])
def test_one_bad_step_on_one_rank(tmp_path: Path, what: str, rank: int) -> None:
    run = tmp_path / "run"
    outcome = train(tmp_path, "--save", run, *EACH, ranks=2, fault=f"nan:rank={rank}:at={what}:step=3").expect(0)
    assert_same_tensors(tensors(run, 3), tensors(run, 2))
    assert all(torch.isfinite(t).all() for t in tensors(run).values())
    assert not torch.equal(tensors(run, 4)["decoder.final_layernorm.weight"], tensors(run, 3)["decoder.final_layernorm.weight"])
    bad = records(run)[2]
    assert bad["grad_norm"] == "nan" and bad["skipped_steps"] == 1 and (bad["loss"] == "nan") == (what == "loss")
    assert [r["skipped_steps"] for r in records(run)] == [0, 0, 1, 1, 1, 1]
    assert (state(run)["step"], state(run)["num_updates"], state(run)["bad_steps"], state(run)["skipped_steps"]) == (6, 5, 0, 1)
    assert outcome.text.count("warning: step 3 is not finite") == 1
    dump = json.loads((run / "nonfinite-step-000003.json").read_text())
    assert dump["sample_ids"] == [8, 9, 10, 11] and dump["step"] == 3 and dump["grad_norm"] == "nan"
    norms = dump["layer_grad_norms"]
    assert len(norms) == len([n for n in tensors(run) if not n.startswith("optimizer.")])
    if what == "grad":
        assert [n for n, v in norms.items() if v == "nan"] == ["embedding.word_embeddings.weight"], "the dump points at the place"


def test_too_many_in_a_row(tmp_path: Path) -> None:
    run = tmp_path / "run"
    faults = ";".join(f"nan:rank=1:at=loss:step={s}" for s in (2, 4, 5, 6))
    outcome = train(tmp_path, "--save", run, *EACH, "--max-bad-steps", 2, "--train-iters", 9, ranks=2, fault=faults)
    outcome.expect(5, "error: 3 non-finite steps in a row (--max-bad-steps 2): stopped at step 6", "nonfinite-step-000006.json")
    assert outcome.text.count("error: ") == 1, "said once"
    assert saved_steps(run) == [1, 2, 3, 4, 5] and (status(run)["status"], status(run)["exit_code"]) == ("failed", 5)
    assert_same_tensors(tensors(run), tensors(run, 3))
    assert state(run)["bad_steps"] == 2, "a resumed run counts on"
    assert (run / "nonfinite-step-000006.json").exists() and not (run / "LOCK").exists()
    again = ("--save", run, "--auto-resume", "--max-bad-steps", 2, "--train-iters", 9)
    train(tmp_path, *again, ranks=2, fault="nan:at=loss:step=6").expect(5, "3 non-finite steps in a row")
    train(tmp_path, *again, ranks=2).expect(0)


def test_overflow_of_a_high_loss_scale_is_ordinary(tmp_path: Path) -> None:
    run = tmp_path / "run"
    flags = ("--fp16", "--initial-loss-scale", 2.0**28, "--hysteresis", 1, "--max-bad-steps", 0, "--loss-scale-window", 1000)
    decay = ("--lr-warmup-iters", 4, "--weight-decay-incr-style", "linear", "--start-weight-decay", 0.0, "--end-weight-decay", 0.1)
    outcome = train(tmp_path, "--save", run, *flags, *decay, "--train-iters", 16, ranks=2).expect(0)
    skipped = records(run)[-1]["skipped_steps"]
    assert 5 < skipped < 16 and "is not finite" not in outcome.text and not list(run.glob("nonfinite-*"))
    assert [r["loss_scale"] for r in records(run)] == [2.0 ** (28 - r["skipped_steps"]) for r in records(run)]
    assert state(run)["num_updates"] == 16 - skipped and state(run)["bad_steps"] == 0
    assert state(run)["scheduled_samples"] == 4 * (16 - skipped) and state(run)["consumed_samples"] == 64
    done = [0, *(r["step"] - r["skipped_steps"] for r in records(run))]  # updates before each step: a skipped one leaves the schedule
    assert [r["lr"] for r in records(run)] == pytest.approx([0.01 * min(n, 4) / 4 for n in done[:-1]])


@pytest.mark.parametrize(("flags", "fault", "bad", "step"), [
    (("--initial-loss-scale", 2.0**60, "--min-loss-scale", 2.0**59, "--hysteresis", 1, "--max-bad-steps", 1), "", 2, 3),
    (("--loss-scale", 2.0**60, "--max-bad-steps", 0), "", 1, 1),
    # a lower loss scale would not help, so it is counted although the scale could still go down
    (("--initial-loss-scale", 2.0**10, "--max-bad-steps", 0), "nan:at=loss:step=2", 1, 2),
], ids=["at the lowest scale", "at a fixed scale", "in the loss"])  # fmt: skip
def test_an_overflow_that_is_a_bad_step(tmp_path: Path, flags: tuple[object, ...], fault: str, bad: int, step: int) -> None:
    train(tmp_path, "--fp16", *flags, fault=fault).expect(5, f"{bad} non-finite steps in a row", f"stopped at step {step}")


def test_an_update_that_overflows_ends_the_run_and_is_never_saved(tmp_path: Path) -> None:
    """Its gradients were finite, so no step was skipped; with or without --save, on every rank."""
    run = tmp_path / "run"
    outcome = train(tmp_path, "--save", run, *EACH, "--lr", 1e300, "--train-iters", 3, ranks=2)
    outcome.expect(5, "error: the weights are not finite after step ", "Lower --lr")
    assert saved_steps(run) == [] and status(run)["exit_code"] == 5
    train(tmp_path, "--lr", 1e300, "--train-iters", 1).expect(5, "the weights are not finite after step 1")


def test_weights_that_only_the_loss_cannot_bear_end_the_run_too(tmp_path: Path) -> None:
    train(tmp_path, "--lr", 1e30, "--train-iters", 3).expect(5, "the run ends at step 3 with 2 non-finite steps in a row")
    train(tmp_path, "--lr", 1e30, "--train-iters", 1, "--eval-iters", 1).expect(5, "at step 1: the mean loss is nan")
    train(tmp_path, "--train-iters", 3, fault="nan:at=loss:step=3").expect(0)  # one step can be a sample's fault
