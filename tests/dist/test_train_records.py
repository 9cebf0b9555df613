"""What a run writes while it trains: records, validation, profile; and which samples each validation takes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from support.training import records, saved_steps, state, status, tensors, train, write_data

from megatron_sp.data.loader import BatchLoader
from megatron_sp.ops import availability

FIELDS = {
    "kind", "time", "step", "consumed_samples", "consumed_tokens", "loss", "loss_hex", "grad_norm", "grad_norm_hex", "lr",
    "global_batch_size", "loss_tokens", "samples_sha", "skipped_steps", "loss_scale", "step_s", "tokens_per_s", "tflops_causal",
    "tflops_full", "mfu", "peak", "memory_bytes",
}  # fmt: skip


def test_every_record_is_complete(tmp_path: Path) -> None:
    run = tmp_path / "run"
    flags = ("--save", run, "--log-interval", 2, "--eval-interval", 3, "--eval-iters", 1, "--train-iters", 5)
    train(tmp_path, *flags, ranks=2, fault="nan:at=loss:step=4").expect(0)
    train_records = records(run)
    assert [r["step"] for r in train_records] == [2, 4, 5], "the last step is always logged"
    for r in train_records:
        assert set(r) == FIELDS and r["consumed_samples"] == 4 * r["step"] and r["consumed_tokens"] == 128 * r["step"]
        assert float.fromhex(r["loss_hex"]) == float(r["loss"]) or r["loss"] == "nan"
        assert r["tokens_per_s"] > 0 and abs(r["tokens_per_s"] * r["step_s"] - 128) < 1e-6
        assert 0 < r["tflops_causal"] < r["tflops_full"] and r["mfu"] == r["tflops_causal"] / 1.0
    assert train_records[1]["loss"] == "nan" and train_records[1]["loss_hex"] == "nan"
    (start,) = records(run, "start")
    assert (start["step"], start["world_size"], start["attempt"]) == (0, 2, 0)
    assert start["config"] == state(run)["config"] and start["train_iters"] == 5
    where = start["environment"]
    assert where["versions"] == state(run)["versions"] and where["layout"] == state(run)["layout"]
    assert sum(where["hosts"].values()) == 2 and where["device"] and where["threads"] == 1 and where["attention"]
    weights = {n: t for n, t in tensors(run).items() if not n.startswith("optimizer.")}
    assert start["num_params"] == sum(t.numel() for t in weights.values()), "padding rows do not count"
    assert [(r["step"], r["saved"]) for r in records(run, "save")] == [(5, True)]
    assert [(r["kind"], r["step"]) for k in ("valid", "test") for r in records(run, k)] == [("valid", 3), ("valid", 5), ("test", 5)]
    for r in records(run, "valid"):
        assert math.isclose(r["perplexity"], math.exp(r["loss"])) and r["seconds"] > 0


@pytest.mark.often("0.000000001-1")
@pytest.mark.parametrize("peak, times", [("0.000000001", 1), ("1000000", 0)])
def test_an_impossible_share_of_the_peak_is_doubted_once(tmp_path: Path, peak: str, times: int) -> None:
    outcome = train(tmp_path, "--save", tmp_path / "run", "--peak-tflops", peak, "--log-interval", 1, "--train-iters", 3, ranks=2).expect(0)
    assert outcome.text.count("MFU above 100 % is impossible") == times and outcome.text.count("(MFU ") == 3
    assert all((r["mfu"] > 1) == bool(times) for r in records(tmp_path / "run"))


def test_norms_and_zeros(tmp_path: Path) -> None:
    """The embedding rows of ids that did not occur have no gradient, padding rows are not counted."""
    run = tmp_path / "run"
    data = ("--data-path", write_data(tmp_path / "d" / "x"), "--split", "1", "--vocab-size", 200)
    flags = ("--log-params-norm", "--log-num-zeros-in-grad", "--untie-embeddings-and-output-weights", "--save", run)
    train(tmp_path, *flags, "--train-iters", 1, data=data).expect(0)
    (r,) = records(run)
    weights = {n: t for n, t in tensors(run).items() if not n.startswith("optimizer.")}
    assert math.isclose(r["params_norm"], math.sqrt(sum(float(t.double().square().sum()) for t in weights.values())), rel_tol=1e-6)
    moments = [t for n, t in tensors(run).items() if n.startswith("optimizer.exp_avg.")]
    assert r["num_zeros_in_grad"] == sum(int((m == 0).sum()) for m in moments) and r["num_zeros_in_grad"] >= 140 * 32


def ids_of_validations(rank: int) -> None:
    """Write the first id of every batch of a loader that does not read ahead."""
    original = BatchLoader.step

    def step(self: BatchLoader, consumed_samples: int, num_microbatches: int) -> object:
        if self._pool is None:
            with open(f"ids{rank}.txt", "a") as file:
                file.write(f"{consumed_samples} ")
        return original(self, consumed_samples, num_microbatches)

    BatchLoader.step = step  # type: ignore[assignment, method-assign]


def test_each_validation_takes_the_samples_after_those_of_the_one_before(tmp_path: Path) -> None:
    run = tmp_path / "run"
    flags = ("--save", run, "--eval-interval", 2, "--eval-iters", 2, "--train-iters", 5)
    train(tmp_path, *flags, ranks=2, setup=ids_of_validations).expect(0)
    first = (tmp_path / "ids0.txt").read_text()
    assert first == "0 4 8 12 16 20 0 4 ", "steps 2, 4 and 5, then the test"
    assert (tmp_path / "ids1.txt").read_text() == first
    losses = [r["loss"] for r in records(run, "valid")]
    assert len(losses) == 3 and len(set(losses)) == 3


def test_each_of_several_validation_sets_has_its_own_losses(tmp_path: Path) -> None:
    a = write_data(tmp_path / "a" / "a")
    data = (
        "--vocab-size", 60, "--train-weighted-split-paths", f"T: 1 0:0.6 {a}",
        "--valid-weighted-split-paths", f"V1: 1 0.6:0.8 {a}", f"V2: 1 0.8:1 {a}",
    )  # fmt: skip
    common = ("--train-iters", 2, "--eval-interval", 1, "--eval-iters", 1)
    full = train(tmp_path, "--lr", 0, "--save", tmp_path / "full", *common, "--full-validation", data=data)
    full.expect(0, "--full-validation: V1 has 18 samples of a sequence, which are 4 batches of 4; the last 2 are left out")
    first, second = (r["loss/V2"] for r in records(tmp_path / "full", "valid"))
    assert first == second, "all of it each time"
    outcome = train(tmp_path, "--save", tmp_path / "both", *common, data=data).expect(0, "valid of V1 at step 1: lm loss")
    assert "valid of V2 at step 2: lm loss" in outcome.text
    both = records(tmp_path / "both", "valid")
    for number, name in enumerate(("V1", "V2")):
        run = tmp_path / name
        train(tmp_path, "--save", run, *common, data=(*data[:5], data[5 + number])).expect(0, "valid at step 1: lm loss")
        alone = records(run, "valid")
        assert [r[f"loss/{name}"] for r in both] == [r["loss"] for r in alone]
        assert [r[f"perplexity/{name}"] for r in both] == [r["perplexity"] for r in alone]
        assert ([r["loss_hex"] for r in both] == [r["loss_hex"] for r in alone]) == (name == "V1"), "reports go by the first"
    then = state(tmp_path / "both")["evaluation_data"]
    assert set(then) == {"valid V1", "valid V2"} and state(tmp_path / "V1")["evaluation_data"]["valid"] == then["valid V1"]


def test_a_validation_changes_nothing(tmp_path: Path) -> None:
    """Dropout is on: had validation used any random state or left the model in another mode, the losses would differ."""
    for name, flags in (("a", ()), ("b", ("--eval-interval", 1, "--eval-iters", 1))):
        train(tmp_path, "--save", tmp_path / name, "--train-iters", 3, *flags).expect(0)
    assert [r["loss_hex"] for r in records(tmp_path / "a")] == [r["loss_hex"] for r in records(tmp_path / "b")]


def test_no_share_for_validation_means_none(tmp_path: Path) -> None:
    data = ("--data-path", write_data(tmp_path / "d" / "x"), "--split", "1", "--vocab-size", 60)
    outcome = train(tmp_path, "--eval-interval", 2, "--eval-iters", 1, data=data).expect(0)
    assert "valid at" not in outcome.text and "test at" not in outcome.text


def test_train_samples(tmp_path: Path) -> None:
    run = tmp_path / "run"
    flags = ("--train-samples", 22, "--lr-decay-style", "linear", "--lr-warmup-samples", 8, "--eval-iters", 1)
    train(tmp_path, "--save", run, *flags, ranks=2).expect(0, "steps 0 to 5", "valid at step 5", "test at step 5")
    assert [r["lr"] for r in records(run)] == pytest.approx([0.0, 0.005, 0.01, 0.01 * 10 / 14, 0.01 * 6 / 14])
    assert state(run)["consumed_samples"] == 20


def test_data_that_evaluation_repeats_are_warned_of_and_a_dropped_batch_is_asked_for(tmp_path: Path) -> None:
    """22 samples are asked for as in Megatron, which may take one more epoch than the 20 of whole steps."""
    data = ("--data-path", write_data(tmp_path / "d" / "x"), "--split", "8,1,1", "--vocab-size", 60)

    def note(rank: int) -> None:
        from megatron_sp.training import run

        def build(*given: Any) -> run.RunData:
            data = original(*given)
            (tmp_path / "asked.txt").write_text(str(data.datasets.train._wanted))  # type: ignore[union-attr]
            return data

        original = run.build_data
        run.build_data = build

    outcome = train(tmp_path, "--train-samples", 22, "--eval-iters", 40, data=data, setup=note).expect(
        0, "valid at step 5", "test at step 5"
    )
    assert (tmp_path / "asked.txt").read_text() == "22"
    warned = [line for line in outcome.text.splitlines() if "is repeated" in line or " repeated " in line]
    for name, line in zip(("valid", "test"), warned, strict=True):
        assert f"warning: {tmp_path}/d/x: the {name} split has" in line


def test_missing_trackers_are_one_line(tmp_path: Path) -> None:
    def without(rank: int) -> None:
        def load(name: str) -> object:
            raise RuntimeError(f"{name} is not installed: pip install 'megatron_sp[log]'")

        availability.load = load  # type: ignore[assignment]

    outcome = train(tmp_path, "--tensorboard-dir", tmp_path / "tb", "--wandb-project", "p", ranks=2, setup=without).expect(0)
    lines = [line for line in outcome.text.splitlines() if line.startswith("warning: ")]
    assert len(lines) == 2 and "TensorBoard" in lines[0] and "megatron_sp[log]" in lines[0] and "W&B" in lines[1], outcome.text


def test_a_resumed_run_is_not_profiled_again(tmp_path: Path) -> None:
    run = tmp_path / "run"
    flags = ("--save", run, "--profile", "--profile-step-start", 1, "--profile-step-end", 2)
    train(tmp_path, *flags, "--exit-interval", 4).expect(0)
    names = {e.get("name", "") for e in json.loads((run / "profile-rank0.json").read_text())["traceEvents"]}
    assert "ProfilerStep#1" in names and "ProfilerStep#2" not in names
    (run / "profile-rank0.json").unlink()
    train(tmp_path, *flags, "--auto-resume").expect(0)
    assert not (run / "profile-rank0.json").exists(), "its steps are past"


def test_a_cut_off_record_does_not_swallow_the_next(tmp_path: Path) -> None:
    """A process that is killed while it writes leaves half a line."""
    run = tmp_path / "run"
    train(tmp_path, "--save", run, "--exit-interval", 2).expect(0)
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"kind": "train", "step": 3, "lo')
    train(tmp_path, "--save", run, "--auto-resume", "--exit-interval", 2).expect(0)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    kinds = []
    for line in lines:
        try:
            kinds.append(json.loads(line)["kind"])
        except ValueError:
            kinds.append("half")
    assert kinds == ["start", "train", "train", "save", "half", "start", "train", "train", "save"]


def test_ignored_flags_are_listed_once(tmp_path: Path) -> None:
    outcome = train(tmp_path, "--no-async-tensor-model-parallel-allreduce", "--train-iters", 1, ranks=2).expect(0)
    assert outcome.text.count("ignored: ") == 1


def test_the_status_tells_who_runs(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(tmp_path, "--save", run, "--save-interval", 4, "--no-async-save", ranks=2, fault="kill:at=step.forward:step=6")
    found = status(run)
    assert found["status"] == "running" and found["world_size"] == 2 and len(found["pids"]) == len(found["hosts"]) == 2
    assert found["saved_step"] == 4 and saved_steps(run) == [4]


RAN = {"predicted_bytes": 1024, "sent_bytes": 300, "can_hide_bytes": 150, "collectives": 11}


def quick_child(rank: int) -> None:
    """Training as short as this starts no child, and would not wait for it; what the child finds is another test's."""
    from megatron_sp.training import memory_estimate, report

    report._WORTH_S, plain = 0.0, memory_estimate.MemoryEstimate.has_run
    memory_estimate._PROGRAM = ("-c", f"print({json.dumps(RAN)!r})")  # type: ignore[assignment]

    def waits(self: memory_estimate.MemoryEstimate) -> bool:
        if self._child is not None:
            self._child.wait()
        return plain(self)

    memory_estimate.MemoryEstimate.has_run = waits  # type: ignore[method-assign]


def test_after_ten_steps_the_log_shows_predicted_beside_measured(tmp_path: Path) -> None:
    run = tmp_path / "run"
    outcome = train(tmp_path, "--save", run, "--train-iters", 11, "--zero-stage", 1, "--log-interval", 100, ranks=2, setup=quick_child)
    outcome.expect(0, "memory: predicted ", "resident (the whole process", "can run under computation")
    assert outcome.text.count("memory: predicted") == 1, "rank 0 says it once"
    (record,) = records(run, "prediction")
    assert record["step"] == 10 and record["predicted_bytes"] < record["measured_bytes"] and record["step_s"] > 0
    assert record | RAN == record


def too_little(rank: int) -> None:
    from megatron_sp.training import memory_estimate as foresight

    foresight.host_memory_bytes = lambda: 2**20  # type: ignore[assignment]


def test_too_little_memory_is_a_warning_with_remedies_before_the_first_step(tmp_path: Path) -> None:
    outcome = train(tmp_path, "--train-iters", 1, "--allow-oom", ranks=2, setup=too_little)
    outcome.expect(0, "warning: a rank is predicted to need", "--micro-batch-size 1: predicted ", "step 1/1")
    text = outcome.texts[0]
    assert text.index("warning: a rank") < text.index("parameters in") and text.count(": predicted ") == 3
    assert "warning: a rank" not in outcome.texts[1]


def test_a_run_that_takes_the_machine_down_is_refused_with_the_numbers(tmp_path: Path) -> None:
    outcome = train(tmp_path, "--seq-length", 30_000_000, "--hidden-size", 8192, "--train-iters", 1, ranks=2)
    outcome.expect(2, "a rank is predicted to need ", "iB and there are ", "available to 2 processes", "--allow-oom: start all the same")
    assert outcome.texts[1] == "" and "Traceback" not in outcome.text
