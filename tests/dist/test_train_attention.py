"""Whole runs with FlashAttention's packages, played by stand-ins: the choice by timing, a resume, what is said and what is refused."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.flash_stand_in import FLASH2, FLASH3, FLASH4, UNDER_FLASH2, Install, Registry, install_flash
from support.training import MOCK, NO_DROPOUT, TINY, records, train

from megatron_sp.config.flags.arguments import config_from_args
from megatron_sp.config.schema import Config, ModelConfig
from megatron_sp.ops import attention_choice
from megatron_sp.training import kernel_selection
from megatron_sp.utils.errors import ConfigError
from megatron_sp.utils.launch import Launch

__all__ = ["install_flash"]
ALL = {"flash2": FLASH2, "flash3": FLASH3, "flash4": FLASH4}
FLAGS = (*NO_DROPOUT, "--device", "auto", "--bf16")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, int], float]:
    """Seconds of a kernel on a rank, in place of those that the clock would say; 1 unless a test says otherwise."""
    seconds: dict[tuple[str, int], float] = {}
    run, made = kernel_selection._Block.run, kernel_selection._Block.__init__

    def remember(self: Any, config: Any, groups: Any) -> None:
        made(self, config, groups)
        self.rank = groups.rank

    def timed(self: Any, name: str) -> float:
        run(self, name)
        return seconds.get((name, self.rank), 1.0)

    monkeypatch.setattr(kernel_selection._Block, "__init__", remember)
    monkeypatch.setattr(kernel_selection._Block, "run", timed)
    return seconds


def test_all_ranks_take_what_is_fastest_on_the_slowest_and_a_resume_keeps_it(
    install_flash: Install, clock: dict[tuple[str, int], float], tmp_path: Path
) -> None:
    install_flash(**ALL)
    clock.update({("flash4", 0): 0.1, ("flash4", 1): 2.0, ("flash3", 0): 0.5, ("flash3", 1): 0.25})
    run = tmp_path / "run"
    said = "attention: flash3 (the fastest: flash3 500 ms, flash2 1e+03 ms, sdpa 1e+03 ms, flash4 2e+03 ms; cudnn: torch has no cuDNN here)"
    layout = ("--sequence-parallel-size", 2)
    train(tmp_path, "--save", run, "--exit-interval", 1, *FLAGS, *layout, ranks=2).expect(0, said)
    start = records(run, "start")[0]
    assert start["attention"]["kernel"] == start["environment"]["attention"] == start["environment"]["layout"]["attention"] == "flash3"
    assert start["attention"]["ms"] == {"flash3": 500.0, "flash2": 1000.0, "sdpa": 1000.0, "flash4": 2000.0}

    clock.update({("flash2", 0): 0.01, ("flash2", 1): 0.01})
    train(tmp_path, "--save", run, "--auto-resume", "--exit-interval", 2, *FLAGS, *layout, ranks=2).expect(
        0, "attention: flash3 (as before the resume)"
    )
    other = ("--tensor-model-parallel-size", 2)
    train(tmp_path, "--save", run, "--auto-resume", *FLAGS, *other, ranks=2).expect(0, "attention: flash2 (the fastest: flash2 10 ms")


def test_a_resume_without_the_kernel_says_so(install_flash: Install, tmp_path: Path) -> None:
    run = tmp_path / "run"
    install_flash(**ALL)
    train(tmp_path, "--save", run, "--exit-interval", 2, *FLAGS, "--attention-backend", "flash4").expect(0, "flash4 (asked for)")
    install_flash((8, 0), **ALL)
    train(tmp_path, "--save", run, "--auto-resume", *FLAGS, "--attention-backend", "fused").expect(
        0, "attention: sdpa (asked for; flash4 before the resume)"
    )


def test_all_ranks_do_without_what_one_lacks(install_flash: Install, clock: dict[tuple[str, int], float], tmp_path: Path) -> None:
    install_flash(flash2=f"import os\nif os.environ['RANK'] == '1': raise OSError('no such symbol')\n{FLASH2}")
    outcome = train(tmp_path, "--train-iters", 1, *FLAGS, ranks=2)
    outcome.expect(
        0, "attention: sdpa (not used: flash2: rank 1: flash-attn is broken: OSError: no such symbol; flash4: flash-attn-4 is not"
    )


def test_a_kernel_that_fails_at_the_runs_size_is_left_out(install_flash: Install, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = "right = flash_attn_func\ndef flash_attn_func(q, *rest, **more):\n    assert q.shape[1] != 32, 'too little memory'\n"
    install_flash(flash2=f"{FLASH2}{text}    return right(q, *rest, **more)\n")
    outcome = train(tmp_path, "--save", tmp_path / "run", "--train-iters", 1, *FLAGS)
    assert KEPT not in outcome.text and "repeats attention" not in outcome.text, "nothing is recomputed"
    assert records(tmp_path / "run", "start")[0]["attention"]["recomputation"] is None
    assert "flash2: it fails at this size: AssertionError: too little memory" in outcome.text, outcome.text
    outcome.expect(0, "attention: sdpa (the fastest: sdpa ")


def test_a_rank_without_the_memory_to_try_them_ends_all(install_flash: Install, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The others do not wait for it."""
    install_flash(flash2=FLASH2)

    def made(self: Any, config: Any, groups: Any) -> None:
        if groups.rank == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")

    monkeypatch.setattr(kernel_selection._Block, "__init__", made)
    outcome = train(tmp_path, "--train-iters", 1, *FLAGS, ranks=2)
    assert outcome.codes == [1, 2] or outcome.codes == [2, 2], outcome
    assert "[rank 1] error: out of memory: CUDA out of memory. Tried to allocate 9 GiB" in outcome.text


@pytest.mark.often("sdpa-fa4-FA4")
@pytest.mark.parametrize("fastest, impl", [("sdpa-fa4", "FA4"), ("sdpa", "None")])
def test_torchs_flash_kernel_is_the_chosen_one_in_the_end(
    install_flash: Install, clock: dict[tuple[str, int], float], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fastest: str, impl: str
) -> None:
    monkeypatch.setattr(attention_choice, "attention_of_torch", Registry(("FA4",), tmp_path / "impl"))
    install_flash(flash4="x = 1")
    clock[fastest, 0] = 0.1
    train(tmp_path, "--train-iters", 1, *FLAGS).expect(0, f"attention: {fastest} (the fastest: {fastest} 100 ms")
    assert (tmp_path / "impl").read_text() == impl


def test_a_named_kernel_that_is_not_there(install_flash: Install, tmp_path: Path) -> None:
    """Before any rank waits for another: every rank ends with the code of a wrong flag and says why, each in one line."""
    install_flash(flash2=FLASH2)
    outcome = train(tmp_path, "--save", tmp_path / "run", "--attention-backend", "flash3", *FLAGS, ranks=2)
    outcome.expect(
        2, "error: --attention-backend flash3 cannot be used: flash3: flash_attn_3 is not installed. Use --attention-backend auto."
    )
    assert outcome.text.count("error: ") == 2 and "Traceback" not in outcome.text and not (tmp_path / "run").exists()


def only(rank: int, module: str) -> str:
    """A package that only one rank can import."""
    return f"import os\nif os.environ['RANK'] != '{rank}': raise OSError('no such symbol')\n{module}"


@pytest.mark.parametrize(("rank", "local_rank", "by_rank_0"), [(0, 0, True), (1, 1, False), (8, 0, False)])
def test_every_rank_says_what_it_lacks(install_flash: Install, rank: int, local_rank: int, by_rank_0: bool) -> None:
    """The others may have it, and can say nothing."""
    install_flash(flash2="raise OSError('no such symbol')")
    config = Config(model=ModelConfig(hidden_size=32, num_attention_heads=4, num_layers=1, seq_length=16))
    config.kernels.attention_backend, config.precision.bf16 = "flash2", True
    with pytest.raises(ConfigError) as error:
        kernel_selection.require_attention(config, Launch(rank, local_rank, 16, 8, 0), torch.device("cpu"))
    assert error.value.on_all_ranks is by_rank_0


def test_a_named_kernel_is_not_replaced_by_plain_products(install_flash: Install, tmp_path: Path) -> None:
    """Each rank has a FlashAttention, and they have none in common."""
    install_flash(flash2=only(0, FLASH2), flash3=only(1, FLASH3))
    outcome = train(tmp_path, "--attention-backend", "flash", *FLAGS, ranks=2)
    outcome.expect(2, "error: --attention-backend flash cannot be used on all ranks: ", "Use --attention-backend auto.")


@pytest.mark.parametrize("flags, sentence", [
    (("--attention-backend", "flash3", "--attention-dropout", 0.1, "--bf16", "--device", "auto"), "FlashAttention 3 has no attention"),
    (("--attention-backend", "cudnn", "--deterministic-mode", *FLAGS), "cudnn and --deterministic-mode exclude each other"),
    (("--attention-backend", "cudnn", "--window-size", 4, *FLAGS), "cudnn and --window-size exclude each other"),
    (("--attention-backend", "flash4", *NO_DROPOUT), "--attention-backend flash4 needs a GPU, but --device cpu was given"),
])  # fmt: skip
def test_flags_that_exclude_each_other(flags: tuple[Any, ...], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        config_from_args([*TINY, *MOCK, "--train-iters", "1", *map(str, flags)])


def test_the_losses_are_the_same(install_flash: Install, tmp_path: Path) -> None:
    install_flash(**ALL)
    losses = {}
    for backend in ("fused", "flash2", "flash3", "flash4"):
        run, said = tmp_path / backend, f"{'sdpa' if backend == 'fused' else backend} (asked"
        train(tmp_path, "--save", run, "--train-iters", 2, "--attention-backend", backend, *FLAGS).expect(0, said)
        losses[backend] = [r["loss"] for r in records(run)]
    for found in losses.values():
        assert found == pytest.approx(losses["fused"], rel=5e-3) and len(found) == 2


def test_deterministic_mode_reaches_the_kernel_and_fills_nothing(install_flash: Install, tmp_path: Path) -> None:
    """torch would fill every buffer that is not initialized: ours are written before they are read."""
    note = (
        "import torch\nright = flash_attn_func\n"
        "def flash_attn_func(*a, **more):\n"
        "    filled = torch.utils.deterministic.fill_uninitialized_memory\n"
        "    open('seen', 'a').write(f'{torch.are_deterministic_algorithms_enabled()} {more[\"deterministic\"]} {filled}\\n')\n"
        "    return right(*a, **more)\n"
    )
    install_flash(flash2=f"{FLASH2}{note}")
    train(tmp_path, "--train-iters", 1, *FLAGS, "--attention-backend", "flash2", "--deterministic-mode").expect(0)
    assert set((tmp_path / "seen").read_text().splitlines()) == {"True True False"}


@pytest.mark.parametrize("measure", [True, False], ids=["a model of ours", "a model of others"])
def test_only_models_of_ours_change_torchs_flash_kernel(install_flash: Install, monkeypatch: pytest.MonkeyPatch, measure: bool) -> None:
    """A model of others calls SDPA with shapes and dropout that nobody has tried FlashAttention 4 with."""
    registry = Registry(("FA4",))
    monkeypatch.setattr(attention_choice, "attention_of_torch", registry)
    monkeypatch.setattr(kernel_selection, "gather_json", lambda mine, group: [mine])
    monkeypatch.setattr(kernel_selection, "all_ranks_agree", lambda group: contextlib.nullcontext())
    monkeypatch.setattr(kernel_selection, "_timed", lambda names, *_: ({name: float(i) for i, name in enumerate(names)}, {}))
    install_flash(flash4="x = 1")
    shape = ModelConfig(hidden_size=32, num_attention_heads=4, num_layers=1, seq_length=16, vocab_size=20, attention_dropout=0.0)
    config = Config(model=shape)
    config.precision.bf16 = True
    groups: Any = SimpleNamespace(device=torch.device("cpu"), control=None)
    found = kernel_selection.choose_attention(config, groups, measure=measure)
    assert found.kernel.name == "sdpa-fa4" and registry.current == ("FA4" if measure else None)


# full recomputation

FULL = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", 1)
KEPT = "recomputation keeps attention's output and the log of its sums"
REPEATED = "recomputation repeats attention: "


@pytest.mark.often("flash2")
@pytest.mark.parametrize("name", ["flash2", "flash3", "flash4"])
def test_a_recomputation_keeps_attention_and_says_so(install_flash: Install, tmp_path: Path, name: str) -> None:
    """And losses are those of the run that repeats it: the same kernel computes both."""
    install_flash(**ALL)
    losses = []
    for flags, said in (((), KEPT), (("--recompute-attention", "full"), f"{REPEATED}asked for (--recompute-attention full)")):
        run = tmp_path / f"run{len(flags)}"
        train(tmp_path, "--save", run, "--train-iters", 2, *FLAGS, "--attention-backend", name, *FULL, *flags).expect(0, said)
        assert f"recomputation {records(run, 'start')[0]['attention']['recomputation']}" == said
        losses.append([record["loss"] for record in records(run, "train")])
    assert len(losses[0]) == 2 and losses[0] == pytest.approx(losses[1], rel=2e-3)


@pytest.mark.long
def test_all_ranks_repeat_attention_if_one_cannot_keep_it(install_flash: Install, tmp_path: Path) -> None:
    """With Ulysses one would exchange what the other does not."""
    under = f"import os\nif os.environ['RANK'] == '1': raise ImportError('no symbol of that name')\n{UNDER_FLASH2}"
    install_flash(flash2=FLASH2, under_flash2=under)
    lacks = "FlashAttention 2 lacks a function that gives or takes the log of the sums: no symbol of that name"
    flags = ("--train-iters", 10, *FLAGS, "--attention-backend", "flash2", *FULL, "--sequence-parallel-size", 2)
    predicted = []
    for name, more, said in (("lacks", (), f"rank 1: {lacks}"), ("asked", ("--recompute-attention", "full"), "asked for")):
        train(tmp_path, "--save", tmp_path / name, *flags, *more, ranks=2).expect(0, f"{REPEATED}{said}")
        predicted.append(records(tmp_path / name, "prediction")[0]["predicted_bytes"])
    assert predicted[0] == predicted[1], "the form knows it"


def test_a_script_with_use_flash_attn_trains_without_a_gpu(tmp_path: Path) -> None:
    said = train(tmp_path, "--use-flash-attn", "--bf16", "--device", "auto", "--attention-dropout", 0, "--train-iters", 1)
    said.expect(0, "ignored: --use-flash-attn (there is no GPU in this run: attention is torch's)", "attention: sdpa")
    train(tmp_path, "--attention-backend", "flash", "--bf16", "--device", "auto").expect(2, "flash")
