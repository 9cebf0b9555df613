"""Another number of ranks or another micro-batch size deals the same samples out differently and changes nothing but rounding."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from support.training import assert_same_tensors, records, saved_steps, state, tensors, train, write_data

FLAGS = ("--adam-eps", 1e-3, "--save-interval", 3, "--eval-interval", 3, "--eval-iters", 2, "--log-params-norm", "--log-num-zeros-in-grad")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[object, ...]:
    """Short documents whose ends carry no loss: ranks have unequal numbers of loss tokens."""
    prefix = write_data(tmp_path_factory.mktemp("data") / "x", num_documents=150, longest=40)
    return ("--data-path", prefix, "--split", "8,1,1", "--vocab-size", 60, "--eod-mask-loss")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, data: tuple[object, ...]) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    train(folder, "--save", folder / "run", "--micro-batch-size", 4, *FLAGS, data=data).expect(0)
    counts = [r["loss_tokens"] for r in records(folder / "run")]
    assert len(set(counts)) > 1 and max(counts) < 4 * 32
    return folder / "run"


def assert_close_runs(got: Path, want: Path, steps: list[int]) -> None:
    for kind in ("train", "valid"):
        pairs = [(a, b) for a in records(got, kind) for b in records(want, kind) if a["step"] == b["step"]]
        assert [a["step"] for a, _ in pairs] == (steps if kind == "train" else [s for s in steps if s % 3 == 0])
        for a, b in pairs:
            assert a.get("samples_sha") == b.get("samples_sha") and a.get("loss_tokens") == b.get("loss_tokens")
            # gradients of the biases of keys are rounding alone, and two ranks' parts may cancel exactly: 2 layers of
            # 32
            assert abs(a.get("num_zeros_in_grad", 0) - b.get("num_zeros_in_grad", 0)) <= 64
            for key in ("loss", "grad_norm", "params_norm"):
                assert abs(a.get(key, 0) - b.get(key, 0)) <= 1e-5 * max(1, abs(b.get(key, 0))), (a["step"], key)
    weights, reference = tensors(got), tensors(want)
    assert weights.keys() == reference.keys()
    for name, tensor in reference.items():
        assert (weights[name] - tensor).abs().max() <= 1e-5, name


@pytest.mark.often("1-1", "2-2", "4-1")
@pytest.mark.parametrize("ranks, micro", [(1, 1), (1, 2), (2, 2), (2, 1), (4, 1)])
def test_ranks_and_micro_batches(tmp_path: Path, alone: Path, data: tuple[object, ...], ranks: int, micro: int) -> None:
    run = tmp_path / "run"
    train(tmp_path, "--save", run, "--micro-batch-size", micro, *FLAGS, ranks=ranks, data=data).expect(0, f"(dp {ranks})")
    assert_close_runs(run, alone, [1, 2, 3, 4, 5, 6])
    assert {k: state(run)["layout"][k] for k in ("world_size", "dp", "sp", "tp")} == {"world_size": ranks, "dp": ranks, "sp": 1, "tp": 1}


@pytest.mark.often("1-4")
@pytest.mark.parametrize("before, after", [(2, 1), (1, 4)])
def test_resume_on_another_number_of_ranks(tmp_path: Path, alone: Path, data: tuple[object, ...], before: int, after: int) -> None:
    run = tmp_path / "run"
    flags = ("--save", run, "--micro-batch-size", 1, *FLAGS)
    train(tmp_path, *flags, "--exit-interval", 3, ranks=before, data=data).expect(0)
    assert saved_steps(run) == [3]
    train(tmp_path, *flags, "--auto-resume", ranks=after, data=data).expect(0, "(step 3, 12 samples)")
    assert_close_runs(run, alone, [1, 2, 3, 4, 5, 6])
    assert [r["samples_sha"] for r in records(run)] == [r["samples_sha"] for r in records(alone)]


def test_all_ranks_hold_the_same_weights(tmp_path: Path, data: tuple[object, ...]) -> None:
    """A checkpoint takes each tensor from one rank, so it alone would not show a rank that has drifted."""
    from megatron_sp.training import loop

    def keep_final_weights(rank: int) -> None:
        original = loop.train

        def then_keep(run: loop.Run, saves: object) -> int:
            code = original(run, saves)  # type: ignore[arg-type]
            kept = [u.master for u in run.state.units] + [s.exp_avg for s in run.parts.optimizer.states]
            save_file({str(i): tensor for i, tensor in enumerate(kept)}, f"weights-{rank}.safetensors")
            return code

        loop.train = then_keep  # type: ignore[assignment]

    train(tmp_path, *FLAGS[:2], "--micro-batch-size", 1, ranks=2, data=data, setup=keep_final_weights).expect(0)
    assert_same_tensors(*(load_file(tmp_path / f"weights-{rank}.safetensors") for rank in (0, 1)))


def test_batches_of_another_size_validate_the_same_samples(tmp_path: Path) -> None:
    losses = []
    for ranks, more in ((1, ("--eval-iters", 4)), (2, ("--eval-iters", 2, "--eval-global-batch-size", 8))):
        run = tmp_path / str(ranks)
        train(tmp_path, "--save", run, "--train-iters", 2, "--eval-interval", 1, *more, ranks=ranks).expect(0)
        losses.append([r["loss"] for kind in ("valid", "test") for r in records(run, kind)])
    assert len(losses[0]) == 3 and losses[0] == pytest.approx(losses[1], rel=1e-6) and losses[0][0] != losses[0][1]


def test_ramp_up_with_other_ranks(tmp_path: Path) -> None:
    """The batch grows with the samples consumed, whoever consumes them."""
    flags = ("--micro-batch-size", 1, "--global-batch-size", 8, "--rampup-batch-size", 4, 4, 10, "--adam-eps", 1e-3)
    flags = (*flags, "--lr-decay-style", "linear", "--lr-decay-iters", 10, "--lr-warmup-iters", 2)
    runs = []
    for ranks in (1, 4):
        runs.append(tmp_path / str(ranks))
        train(tmp_path, "--save", runs[-1], *flags, "--train-iters", 5, ranks=ranks).expect(0)
    a, b = ([(r["consumed_samples"], r["global_batch_size"], r["samples_sha"], r["lr"]) for r in records(run)] for run in runs)
    assert a == b and [x[:2] for x in a] == [(4, 4), (8, 4), (12, 4), (20, 8), (28, 8)]
    before = [0, 4, 8, 12, 20]  # consumed before each step, of 68 in 10 steps
    assert [x[3] for x in a] == pytest.approx([0.01 * n / 8 if n <= 8 else 0.01 * (68 - n) / 60 for n in before], rel=1e-12)
