"""The planner's search: what it tries, what fits, in which order, and what it says when nothing does."""

from __future__ import annotations

import copy
import json
import re
import shlex
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.rough_runs import without_runs

from megatron_sp.commands import cli
from megatron_sp.config.flags.arguments import config_from_args
from megatron_sp.config.rules import violations
from megatron_sp.estimate.suggestions import plan_of
from megatron_sp.ops import availability
from megatron_sp.planner import advice, fake_run, hardware, report
from megatron_sp.planner import search as planner_search
from megatron_sp.planner.advice import find_changes, least_memory
from megatron_sp.planner.command import read_model
from megatron_sp.planner.hardware import GPUS, LINKS
from megatron_sp.planner.machine import Machine, reserve
from megatron_sp.planner.parallel_plans import ParallelPlan, default_batch, frames, micro_batches, saves_no_less, savings
from megatron_sp.planner.search import Findings, num_groups, search

MODEL = (
    "--num-layers 8 --hidden-size 1024 --num-attention-heads 12 --kv-channels 64 --seq-length 16384 --vocab-size 32000"
    " --attention-dropout 0"
)
RUN = " --mock-data --lr 1e-4 --train-iters 10"
H100 = GPUS["h100-80g"]
PREDICT = fake_run.predict
NARROW = 3.6  # GiB: dp alone does not fit

pytestmark = pytest.mark.usefixtures("rough_runs")


def machine(gpus: int = 4, memory_gib: float = 0.0) -> Machine:
    return Machine(H100, gpus, 1, LINKS["nvlink4"], None, gpus, int(memory_gib * 2**30) or H100.memory_bytes)


def found_for(flags: str = "", memory_gib: float = 0.0, gpus: int = 4, few: int = 2) -> Findings:
    base, given, _ = read_model(f"{MODEL} --global-batch-size 8 {flags}".split(), gpus, False)
    return search(base, given, machine(gpus, memory_gib), finalists=few)


@pytest.fixture(scope="module")
def roomy() -> Findings:
    with without_runs():
        return found_for("--micro-batch-size 1", few=6)


@pytest.fixture(scope="module")
def narrow() -> Findings:
    with without_runs():
        return found_for("--micro-batch-size 1", NARROW, few=6)


def test_what_is_tried() -> None:
    base, given, _ = read_model(f"{MODEL} --global-batch-size 8".split(), 4, False)
    pairs = {(f.tp, f.sp) for f in frames(base, given, 4, 4)}
    assert pairs == {(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1)}
    assert {f.tp for f in frames(base, given, 4, 2)} == {1, 2}, "tp stays on a node"
    assert {(f.mode, f.chunks) for f in frames(base, given, 4, 4) if f.sp == 4 and f.tp == 1} == {
        ("none", 0),
        ("split-qkv", 0),
        ("chunked", 2),
    }
    assert {f.tp_seq for f in frames(base, given, 4, 4) if f.tp == 1} == {False}
    assert micro_batches(base, given, 1, 1) == [1, 2] and micro_batches(base, given, 1, 4) == [1, 2, 4, 8]
    assert micro_batches(base, given, 4, 1) == [1, 2], "they make up the global batch"
    assert savings(base, given, 1) == [(0, None), (0, "selective"), (0, "full")] and len(savings(base, given, 4)) == 12


def test_only_what_costs_time_too_is_passed_over() -> None:
    assert saves_no_less((1, None), (3, None)) and saves_no_less((1, None), (1, "full")) and saves_no_less((2, "selective"), (3, "full"))
    assert (
        not saves_no_less((3, None), (1, "full")) and not saves_no_less((1, "full"), (3, None)) and not saves_no_less((1, None), (1, None))
    )


def test_what_is_given_stays() -> None:
    flags = "--tp-size 2 --zero-stage 2 --micro-batch-size 1 --recompute-activations --sp-overlap-mode chunked"
    found = found_for(flags)
    assert {(c.layout.tp, c.layout.zero, c.layout.micro_batch, c.layout.recompute) for c in found.fitting} == {(2, 2, 1, "selective")}
    assert {(c.layout.sp, c.layout.mode, c.layout.chunks) for c in found.fitting} == {(1, "none", 0), (2, "chunked", 2)}
    assert {c.layout.zero for c in found_for("--use-distributed-optimizer").fitting} == {1}, "by another name too"


def test_context_parallelism_that_is_given_stays_and_takes_its_ranks() -> None:
    """dp = gpus / (tp * sp * cp) in every layout, whose flags say cp too; ZeRO's shards are those of dp, cp and sp."""
    found = found_for("--context-parallel-size 2 --micro-batch-size 1", gpus=8)
    assert found.candidates
    for each in found.fitting:
        parallel = each.config.parallel
        assert parallel.context_parallel_size == each.layout.cp == 2 and each.layout.dp(8) == parallel.dp_size(8)
        assert 8 == each.layout.dp(8) * parallel.replica_size and "cp 2" in each.layout.words(8)
        assert "--context-parallel-size 2" in each.layout.flags()
    flags = f"{MODEL} --mock-data --lr 1e-4 --train-iters 10 --zero-stage 3 --micro-batch-size 1 --attention-dropout 0"
    ulysses, context = (
        plan_of(config_from_args(f"{flags} {more}".split(), world_size=4), 4, "cuda") for more in ("--sp-size 4", "--sp-size 2 --cp-size 2")
    )
    of_zero = [[(line.name, line.num_bytes) for line in plan.stays if "param" in line.name] for plan in (ulysses, context)]
    assert of_zero[0] and of_zero[0] == of_zero[1]


def test_context_parallelism_is_tried_where_a_rank_has_enough_of_a_sequence() -> None:
    """At 4,096 positions of a sequence 4 ranks have 1,024 each, sp and cp together."""
    flags = f"{MODEL.replace('16384', '4096')} --global-batch-size 16 --cp-keep-kv"
    base, given, _ = read_model(flags.split(), 16, False)
    of_tp_1 = {(f.sp, f.cp) for f in frames(base, given, 16, 16) if f.tp == 1}
    assert {(sp, cp) for sp, cp in of_tp_1 if cp > 1} == {(1, 2), (1, 4), (2, 2)} and (4, 1) in of_tp_1 and (8, 1) in of_tp_1
    kept = {f.cp: f.apply(base).parallel.cp_keep_kv for f in frames(base, given, 16, 16)}
    assert kept == {1: False, 2: True, 4: True}, "a flag about exchanges is for those who have some"
    base, given, _ = read_model(f"{flags} --cp-size 8".split(), 16, False)
    assert {f.cp for f in frames(base, given, 16, 16)} == {8}
    base, given, _ = read_model(f"{flags} --cp-size 4 --cp-comm-type auto".split(), 16, False)
    tried = list(frames(base, given, 16, 16))
    assert {(f.sp, f.cp) for f in tried if f.tp == 1} == {(1, 4), (2, 2), (4, 1)}
    assert not any(f.apply(base).parallel.measures_split for f in tried), "each names its sizes"


def test_candidates_fit_keep_the_rules_and_are_in_order(roomy: Findings, narrow: Findings) -> None:
    for found, have in ((roomy, H100.memory_bytes), (narrow, NARROW * 2**30)):
        assert found.candidates and found.tried >= len(found.fitting) >= len(found.candidates)
        assert all(c.needs <= have and not violations(c.config, 4) for c in found.candidates)
        order = [(c.is_tight, -c.tokens_per_second) for c in found.candidates]
        assert order == sorted(order)
        best = found.best_of_each()
        assert best[0] is found.candidates[0] and len({c.layout.axes for c in best}) == len(best)
    pairs = {(1, 1, 1), (1, 2, 1), (1, 4, 1), (2, 1, 1), (2, 2, 1), (4, 1, 1)}
    assert {c.layout.axes[:3] for c in roomy.fitting} == pairs | {(1, 1, 2), (1, 1, 4), (1, 2, 2), (2, 1, 2)}
    assert {c.layout.pp for c in roomy.fitting} == {1}, "on one node"


def test_what_is_said_of_a_layout_is_what_its_run_says() -> None:
    """Memory and time are those of a run with its flags, and everything adds up."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatron_sp.planner.fake_run.predict", PREDICT)
        found = found_for("--micro-batch-size 1 --tp-size 2 --cp-size 1 --sp-size 2", few=1)
    (candidate,) = found.candidates
    flags = [*shlex.split(" ".join(candidate.layout.flags())), "--global-batch-size", "8", "--bf16"]
    config = config_from_args([*(MODEL + RUN).split(), *flags], world_size=4)
    run = PREDICT(config, 4, "cuda", machine())
    assert run.memory.peak == candidate.memory.peak == candidate.needs - candidate.reserve and run.time == candidate.time
    for part in ("parallel", "kernels"):
        assert getattr(config, part) == getattr(candidate.config, part), (part, flags)
    kinds = report.memory_by_kind(candidate)
    assert set(kinds) == set(report.KINDS) and all(kinds.values()) and sum(kinds.values()) == candidate.needs
    memory: Any = candidate.memory
    assert kinds["optimizer"] == sum(line.num_bytes for line in memory.stays if line.name in ("master weights", "optimizer state"))
    base, _, _ = read_model(f"{MODEL} --global-batch-size 8".split(), 4, False)
    record = report.as_dict(found, base, machine(), [], 1)["best"][0]
    parts = sum(value for name, value in record["seconds"].items() if name not in ("step", "of_it_recomputed"))
    assert record["seconds"]["step"] == pytest.approx(parts)
    assert record["tokens_per_second"] == pytest.approx(8 * 16384 / record["seconds"]["step"])
    text = report.text(found, base, machine(), [], 1)
    assert " hidden" in text and "exposed communication" in text and "all_to_all over nvlink4, 2 ranks (sp)" in text


def test_nothing_is_left_out_that_would_be_faster(narrow: Findings) -> None:
    """Every combination of ZeRO and recomputation that fits, the pruned ones too, is about as slow as the best of its split, or slower."""
    base, _, _ = read_model(f"{MODEL} --global-batch-size 8".split(), 4, False)
    where = machine(4, NARROW)
    best = {(c.layout.tp, c.layout.sp): c.tokens_per_second for c in narrow.best_of_each()}
    for stage in range(4):
        for recompute in (None, "selective", "full"):
            layout = ParallelPlan(tp=1, sp=4, mode="chunked", chunks=2, zero=stage, recompute=recompute)
            found = fake_run.predict(layout.apply(base), 4, "cuda", where)
            assert found.time is not None
            peak = found.memory.peak
            if peak + reserve(where, peak, num_groups(layout, 4)) <= where.memory_bytes:
                assert 8 * 16384 / found.time.seconds <= best[1, 4] * 1.02, layout


@pytest.mark.parametrize("memory_gib", [7.0, 0.0])
def test_short_sequences_do_not_try_every_micro_batch(memory_gib: float, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = "--seq-length 512 --global-batch-size 128 --tp-size 1 --sp-overlap-mode none"
    few = found_for(flags, memory_gib, gpus=2)
    monkeypatch.setattr(planner_search, "_SIZES", 99)
    every = found_for(flags, memory_gib, gpus=2)
    assert few.fitting[0].layout == every.fitting[0].layout and few.candidates[0].layout == every.candidates[0].layout
    assert few.rejected == every.rejected
    assert few.tried < every.tried
    sizes = Counter(replace(c.layout, micro_batch=0) for c in few.fitting)
    assert max(sizes.values()) == 3


@pytest.mark.long
def test_several_processes_find_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where they cannot be started, and this one has to run all."""
    small = MODEL.replace("16384", "1024").replace("--num-layers 8", "--num-layers 2")
    base, given, _ = read_model(f"{small} --global-batch-size 8 --tp-size 1 --cp-size 1 --sp-size 1".split(), 4, False)
    monkeypatch.setattr("megatron_sp.planner.fake_run.predict", PREDICT)
    one, two = (search(base, given, machine(), processes, 4) for processes in (1, 2))
    assert len(one.candidates) > 1 and one == two

    def cannot_start(*_: object, **__: object) -> None:
        raise OSError("no semaphores here")

    monkeypatch.setattr(planner_search, "ProcessPoolExecutor", cannot_start)
    assert search(base, given, machine(), 2, 4) == one


def test_rejections_are_grouped_and_say_why(narrow: Findings) -> None:
    said = {each.who: each.why for each in narrow.rejected}
    assert re.fullmatch(r"needs \d+\.\d GiB of 3\.6 at least \(.*ZeRO 3, recompute full, micro-batch 1\)", said["tp 1, sp 1"])
    refused = found_for("--num-attention-heads 6 --num-query-groups 3")
    rules = " ".join(f"{each.who}: {each.why}" for each in refused.rejected)
    assert "num_attention_heads (6) must be a multiple of tensor_model_parallel_size (4)" in rules and "tp 4, sp 1" in rules
    assert all(each.needs == 0 for each in refused.rejected)


@pytest.mark.long
def test_the_base_is_not_changed_by_a_search() -> None:
    base, given, _ = read_model(f"{MODEL} --global-batch-size 8 --sp-overlap-comm --sp-size 2 --micro-batch-size 1".split(), 4, False)
    before = copy.deepcopy(base)
    search(base, given, machine(2), finalists=1)
    find_changes(base, given, machine(4, 1.0))
    assert base == before


# ---------------------------------------------------------------------------------------------------- the command


def says(capsys: pytest.CaptureFixture[str], flags: str, code: int = 0) -> str:
    assert cli.main(["plan", *flags.split()]) == code
    out = capsys.readouterr()
    return out.out if code == 0 else out.err


def test_the_report_has_everything(capsys: pytest.CaptureFixture[str]) -> None:
    text = says(capsys, f"--gpus 16 --gpu h100-80g --nodes 2 --link ib-400g {MODEL} --micro-batch-size 1 --tp-size 2 --top 2")
    for part in (
        "16 x h100-80g, 2 nodes with 8 each (nvlink4 inside, 8 cards of ib-400g a node)", "tokens/s", "per GPU", "1 in detail: ",
        "assumed, because nothing was given: --bf16 --global-batch-size 64", "  flags: ", "memory of a GPU: parameters", "worst in ",
        "not possible:", "and each needs one",
    ):  # fmt: skip
        assert part in text, f"{part!r} is missing in\n{text}"
    assert len(re.findall(r"^  \d \[.{50}\] ", text, flags=re.MULTILINE)) == 2


def test_the_flags_can_be_pasted(capsys: pytest.CaptureFixture[str]) -> None:
    record = json.loads(says(capsys, f"--gpus 8 --gpu a100-40g {MODEL} --json --top 5 --zero-stage 1 --micro-batch-size 1"))
    assert len(record["best"]) == len({tuple(b["layout"][axis] for axis in ("tp", "sp", "cp")) for b in record["best"]}) > 3
    for best in record["best"]:
        config = config_from_args([*(MODEL + RUN).split(), *best["flags"].split()], world_size=8)
        layout = best["layout"]
        assert config.parallel.dp_size(8) == layout["dp"] and config.parallel.tensor_model_parallel_size == layout["tp"]
        assert config.precision.bf16 and config.batch.global_batch_size == record["global_batch_size"] == 64
        assert best["needs"] == sum(best["memory"].values()) <= record["machine"]["memory_bytes"]


def test_a_tight_layout_is_not_the_first_and_what_it_would_bring_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    shape = "--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --vocab-size 50304 --seq-length 65536 --micro-batch-size 1"
    text = says(capsys, f"--gpus 8 --gpu h100-80g {shape} --sp-overlap-mode none --reserve-gib 4")
    assert re.search(r"tight: \d+\.\d% faster than 1, with [0-3]\.\d GiB left instead of \d+\.\d: --", text)
    rows = [line for line in text.splitlines() if re.match(r"[1-9]  ", line)]
    assert rows and "(tight)" not in rows[0], "what leaves under 5 % of the memory is not the first"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--gpus 8 --gpu h100", "--gpu h100 is unknown: did you mean h100-80g? Known are a100-40g"),
        ("--gpus 9 --gpu h200", "--gpus (9) must be a multiple of --nodes (2, so that none has more than 8 GPUs)"),
        ("--gpus 9 --gpu h200 --nodes 2", "--gpus (9) must be a multiple of --nodes (2): 9 = 4 * 2 + 1; use --nodes 1, 3"),
        ("--gpus 16 --gpu h200", "2 nodes need --link NAME"),
        ("--gpus 0 --gpu h200", "--gpus (0) must be at least 1"),
        ("--gpus 99999999 --gpu h200", "must be at most"),
        ("--gpus 8 --gpu h200 --top 0 --cards 0", "2 things are wrong"),
        ("--gpus 8 --gpu h200 --reserve-gib -1", "--reserve-gib (-1) must be at least 0"),
        ("--gpus 8 --gpu h200 --inside-link ib-400g", "--inside-link ib-400g does not join the GPUs of a node"),
        ("--gpus 2 --gpu cpu-core --link ib-400g", "leave --link out"),
        ("--gpus 8 --gpu h200 --node 2", "--node is unknown: did you mean --nodes?"),
        ("--gpus 8 --gpu h200 --num-layer 4", "--num-layer is unknown: did you mean --num-layers"),
        ("--gpus 8 --gpu h200 --hidden-size 1000 --kv-channels 0", "must be at least 1"),
        ("--gpus 8 --gpu h200 --dry-run", "--dry-run is for a run's own program"),
        ("--gpus 8 --gpu h200 --offload-optimizer", "--offload-optimizer: its copies are not part of the prediction"),
        ("--gpus 8 --gpu h200 --tp-size 3 --ffn-hidden-size 3072", "no layout is possible:\n  tp 3, sp 1"),
        ("--gpus 8 --gpu h200 --global-batch-size 3 --tp-size 1 --sp-size 1 --cp-size 1", "global_batch_size (3) must be a multiple of"),
        ("--gpus 8 --gpu h200 --picture nowhere/x.png", "there is no folder nowhere"),
        ("--gpus 8 --gpu h200 --picture x.txt", "must end in .png, .svg or .pdf"),
    ],
)
def test_bad_input_is_answered_in_a_sentence(flags: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    if "--picture" in flags and not availability.find("matplotlib").available:
        pytest.skip("matplotlib is not installed")
    text = says(capsys, f"{MODEL} {flags}", code=2)
    assert message in text and text.startswith("error: ") and "Traceback" not in text


BIG = "--num-layers 20 --hidden-size 16384 --num-attention-heads 64 --vocab-size 50304 --seq-length 8192"


def test_nothing_fits_says_by_how_much_and_what_would_help(capsys: pytest.CaptureFixture[str]) -> None:
    text = says(capsys, f"--gpus 8 --gpu a100-40g {BIG} --tp-size 8", code=2)
    first, *rest = text.splitlines()
    match = re.search(r"needs (\d+\.\d) GiB on each a100-40g, which has 39\.4 GiB: (\d+\.\d) GiB too much", first)
    assert match and float(match[1]) - float(match[2]) == pytest.approx(39.4, abs=0.11)
    assert len(rest) == 3 and all(line.endswith(("fits", "too much")) for line in rest) and rest[0].endswith("fits")
    gpus = next(line for line in rest if "--gpus" in line)
    assert "--gpus 32 --nodes 4" in gpus or "--gpus 64 --nodes 8" in gpus
    number, nodes = re.findall(r"--(?:gpus|nodes) (\d+)", gpus)
    fixed = "--tp-size 8 --sp-size 1 --zero-stage 3 --recompute-granularity full --micro-batch-size 1"
    assert says(capsys, f"--gpus {number} --nodes {nodes} --link ib-400g --gpu a100-40g {BIG} {fixed} --top 1")


@pytest.mark.parametrize("gpus", [1, 3, 8, 12, 96, 128, 384, 1024, 4096])
@pytest.mark.parametrize(("seq_length", "micro"), [(512, 1), (4096, 1), (4096, 4), (32768, 1), (131072, 1)])
def test_the_batch_that_is_assumed_has_about_a_million_tokens_whatever_the_gpus(gpus: int, seq_length: int, micro: int) -> None:
    """And its sequences can be dealt out: with enough heads, tp and sp leave few enough data-parallel ranks."""
    config = config_from_args(
        f"--num-layers 2 --hidden-size 8192 --num-attention-heads 1024 --kv-channels 64 --seq-length {seq_length} --mock-data --lr 1"
        f" --vocab-size 9 --train-iters 1 --micro-batch-size {micro}".split()
    )
    size = default_batch(config, gpus)
    assert size % micro == 0 and 0.7 * 2**20 <= size * seq_length <= 1.4 * 2**20
    assert any(size % (micro * (gpus // split)) == 0 for split in range(1, gpus + 1) if gpus % split == 0)
    config.model.num_attention_heads = 2  # then there is a sequence for each rank, however many tokens that are
    assert default_batch(config, gpus) % (micro * max(1, gpus // 2)) == 0


def test_changes_are_tried_together_where_none_suffices_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advice, "GPUS", {})  # a larger one would do
    base, given, _ = read_model(f"{MODEL} --fp16 --recompute-granularity full --zero-stage 0 --tp-size 1 --sp-size 1".split(), 4, False)
    found = find_changes(base, given, machine(4, 3.0))
    freed = "leave --tensor-model-parallel-size to the planner"
    assert [(change.what, change.fits) for change in found] == [(f"{freed} and --seq-length 8192", True), (freed, False)] + [
        (change.what, False) for change in found[2:]
    ]
    both = copy.deepcopy(base)
    both.model.seq_length, both.model.max_position_embeddings = 8192, None
    least = least_memory(both, given - {("parallel", "tensor_model_parallel_size")}, machine())
    assert least is not None and found[0].needs == least[0]


def test_a_share_of_the_peak_above_one_is_doubted(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    command = f"{MODEL} --gpus 8 --gpu h200 --top 1 --tp-size 1 --sp-size 1 --micro-batch-size 1"
    assert "MFU above 100 %" not in says(capsys, command)
    monkeypatch.setitem(hardware.GPUS, "h200", replace(hardware.GPUS["h200"], peak_tflops=100))
    assert "MFU above 100 %: the peak of h200" in says(capsys, command)


def test_activations_in_host_memory_cost_what_their_copies_take_longer() -> None:
    layout = "--tp-size 1 --sp-size 1 --zero-stage 3 --recompute-granularity full --micro-batch-size 1"
    base, _, _ = read_model(f"{MODEL} --global-batch-size 8 {layout}".split(), 4, False)
    base.kernels.recompute_granularity = base.kernels.recompute_method = base.kernels.recompute_num_layers = None
    moved = copy.deepcopy(base)
    moved.kernels.offload_activations = True
    here, fast, slow = (
        PREDICT(config, 4, "cuda", replace(machine(), gpu=replace(H100, host_gbs=gbs)))
        for config, gbs in ((base, 1.0), (moved, 1e9), (moved, 1e-3))
    )
    assert here.time and fast.time and slow.time and here.time.copies == fast.time.copies == 0 and slow.memory.peak < here.memory.peak
    assert slow.time.copies == pytest.approx(2 * (2 * slow.memory.host / 1e6), rel=0.01)  # two micro-batches, there and back, at 1e-3 GB/s
    assert slow.time.seconds == pytest.approx(fast.time.seconds + slow.time.copies)
    assert slow.time.bound.startswith("copies to host memory")


def test_a_fixed_field_that_hurts_is_named() -> None:
    flags = f"{MODEL} --global-batch-size 8 --recompute-granularity full --tp-size 1"
    base, given, _ = read_model(f"{flags} --zero-stage 0".split(), 4, False)
    least, free = (least_memory(base, fixed, machine()) for fixed in (given, given - {("parallel", "zero_stage")}))
    assert least is not None and free is not None and free[0] < 0.97 * least[0] and free[1].zero == 3
    changes = {change.what: change for change in find_changes(base, given, machine(4, (free[0] + 2**20) / 2**30))}
    change = changes["leave --zero-stage to the planner"]
    assert change.fits and change.needs == free[0]
    fits = [change.fits for change in find_changes(base, given, machine(4, 1.5))]
    assert True in fits and False in fits and fits == sorted(fits, reverse=True), "what suffices comes first"


def test_the_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if not availability.find("matplotlib").available:
        pytest.skip("matplotlib is not installed")
    path = tmp_path / "plan.png"
    says(capsys, f"--gpus 4 --gpu h200 {MODEL} --micro-batch-size 1 --zero-stage 1 --picture {path}")
    assert path.read_bytes()[:4] == b"\x89PNG" and path.stat().st_size > 10_000


# ---- pipelines


def nodes(count: int, per_node: int = 4, link: str = "ib-400g") -> Machine:
    return Machine(H100, count * per_node, count, LINKS["nvlink4"], LINKS[link], per_node, H100.memory_bytes)


def stages_found(flags: str = "", link: str = "ib-400g") -> Findings:
    base, given, _ = read_model(f"{MODEL} --global-batch-size 32 --micro-batch-size 1 {flags}".split(), 8, False)
    return search(base, given, nodes(2, link=link), finalists=6)


@pytest.fixture(scope="module")
def two_nodes() -> Findings:
    with without_runs():
        return stages_found("--tensor-model-parallel-size 2 --context-parallel-size 1")


def test_stages_are_of_whole_nodes_with_the_simplest_schedule_and_the_shortest(two_nodes: Findings) -> None:
    kinds = {(c.layout.pp, c.layout.schedule) for c in two_nodes.fitting}
    assert kinds > {(1, ""), (2, "1f1b")} and {pp for pp, _ in kinds} == {1, 2} and len(kinds) == 3
    of_stages = [c for c in two_nodes.candidates if c.layout.pp > 1]
    for c in of_stages:
        assert not violations(c.config, 8) and c.layout.dp(8) * c.layout.tp * c.layout.sp * c.layout.pp == 8
        assert "--pipeline-model-parallel-size 2 --pipeline-schedule " in " ".join(c.layout.flags())
    time = PREDICT(of_stages[0].config, 8, "cuda", of_stages[0].machine).time
    assert time is not None and time.bubble > 0 and any(exchange.flow.group == "pp" for exchange in time.exchanges)


def test_the_flags_of_a_pipeline_are_kept() -> None:
    found = stages_found("--pipeline-model-parallel-size 4 --pipeline-schedule zb1p")
    assert {(c.layout.pp, c.layout.schedule) for c in found.fitting} == {(4, "zb1p")}
    found = stages_found("--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --tensor-model-parallel-size 4")
    assert {c.layout.schedule for c in found.fitting} <= {"zb1p", "interleaved", "zbv"}  # those of two stages on each rank
    found = stages_found("--pipeline-model-parallel-size 2 --pipeline-slices 4 --tensor-model-parallel-size 4")
    assert {c.layout.schedule for c in found.fitting} == {"slices"}


@pytest.mark.long
def test_a_bubble_is_that_of_the_schedule(two_nodes: Findings) -> None:
    """Of 1F1B (p - 1) times the passes of a stage, and two messages; fewer with what is put off; more micro-batches have the same."""

    def bubble(flags: str) -> tuple[float, float]:
        sizes = "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --zero-stage 0 --vocab-size 500"
        base, given, _ = read_model(f"{MODEL} --micro-batch-size 1 {sizes} {flags}".split(), 8, False)
        layout = search(base, given, nodes(2), finalists=1).candidates[0]
        time = PREDICT(layout.config, 8, "cuda", nodes(2)).time
        assert time is not None
        return time.bubble, time.products + time.attention + time.memory

    plain, computed = bubble("--global-batch-size 8 --pipeline-schedule 1f1b --recompute-granularity full")
    messages = 2 * nodes(2).seconds("send", "pp", 2, 4, 1, 2 * 16384 * 1024)
    assert plain == pytest.approx(computed / 8 + messages, rel=0.1)  # but for the head and the sum of gradients
    more, _ = bubble("--global-batch-size 64 --pipeline-schedule 1f1b --recompute-granularity full")
    assert more == pytest.approx(plain, rel=0.05)
    late, _ = bubble("--global-batch-size 8 --pipeline-schedule zb1p --recompute-granularity full")
    assert late < 0.8 * plain


def test_between_nodes_messages_cross_and_stages_are_apart() -> None:
    machine = nodes(4)
    assert machine.crosses("pp", 4, 2) and machine.crosses("pp", 2, 2) and machine.ranks_on_node("pp", 8, 1) == 2
    assert machine.seconds("send", "pp", 4, 2, 1, 1e9) == pytest.approx(1e9 / (machine.between.gbs * 1e9), rel=0.05)  # type: ignore[union-attr]
    assert not nodes(1, 8).crosses("pp", 4, 2)
    assert machine.crosses("ends", 4, 2) and not nodes(1, 8).crosses("ends", 4, 2)


def test_a_report_says_the_stages(two_nodes: Findings) -> None:
    base, _, _ = read_model(f"{MODEL} --global-batch-size 32".split(), 8, False)
    text = report.text(two_nodes, base, nodes(2), [], 5)
    assert "the fastest for each tp, sp, cp and pp:" in text and "pp 2 " in text
