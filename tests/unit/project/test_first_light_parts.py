"""What the parts of a first light say: a wrong kernel is called wrong, a missing one missing, and a clock's time is shown.

All of them together, by the script itself, are a long test; the fake device has those of a GPU
(tests/fake_gpu/test_first_light_parts.py).
"""

from __future__ import annotations

import dataclasses
import gc
import importlib.util
import math
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.paths import ROOT
from torch import Tensor

sys.path[:0] = [str(ROOT / "benchmarks")]

from first_light import prediction, steps_of  # noqa: E402
from first_light.measure import Stopwatch, error_of  # noqa: E402
from first_light.parts import attention, collectives, experts, gpu_tests, kernel_forms, kernels, memory_peak, steps, timeline  # noqa: E402
from first_light.plan import parts_for  # noqa: E402
from first_light.records import Context, NotThereError, Record  # noqa: E402
from first_light.report import read_report  # noqa: E402
from gpu import ulysses_replay  # noqa: E402

from megatron_sp.comm.recorder import Collective, CollectiveTimes, Span, StepTimes  # noqa: E402
from megatron_sp.ops.kernels import launch  # noqa: E402

CPU, SHAPE = torch.device("cpu"), kernel_forms.Shape("tiny", 24, 64, 96, 4, 100)


def record(part: Callable[[Context], None], **changes: Any) -> list[Record]:
    kept: list[Record] = []
    part(dataclasses.replace(Context("cpu", 0, True, kept.append), **changes))
    return kept


def of(records: list[Record], table: str) -> dict[str, Record]:
    return {record.row: record for record in records if record.table == table}


# ------------------------------------------------------------------------------------------------------- measuring


def test_a_stopwatch_shows_its_clock_and_not_what_comes_before() -> None:
    time = [0.0]

    def spend(seconds: float) -> None:
        time[0] += seconds

    watch = Stopwatch(CPU, rounds=3, now=lambda: time[0])
    found = watch.ms({"a": lambda: spend(0.002), "b": lambda: spend(0.5)}, {"a": lambda: spend(7), "b": lambda: None})
    assert found["a"].values == pytest.approx((2.0,) * 3) and found["b"].values == pytest.approx((500.0,) * 3)
    assert time[0] == pytest.approx(5 * (0.502 + 7)), "two calls for warming up"


def test_errors_are_relative_and_a_nan_is_the_largest() -> None:
    want = [torch.tensor([0.0, 4.0]), None]
    assert error_of([torch.tensor([1.0, 4.0]), torch.ones(1)], want) == 0.25
    assert error_of([torch.tensor([float("nan"), 4.0]), None], want) == float("inf")
    assert error_of([torch.ones(3), None], want) == float("inf")
    with pytest.raises(ValueError):
        error_of([torch.ones(2)], want)


def test_what_raises_is_a_record_and_what_is_not_there_another() -> None:
    def part(context: Context) -> None:
        context.attempt("t", "a", lambda: (_ for _ in ()).throw(RuntimeError("no\nkernel image")))
        context.attempt("t", "b", lambda: (_ for _ in ()).throw(NotThereError("not installed")))
        context.attempt("t", "d", lambda: torch.empty(2**48))
        assert context.attempt("t", "c", lambda: {"verdict": "ok", "n": 3}) == {"verdict": "ok", "n": 3}

    found = record(part)
    too_large = found.pop(2)
    assert too_large.verdict == "absent" and too_large.message.startswith("too little memory: RuntimeError: ")
    assert [(r.verdict, r.message, r.values) for r in found] == [
        ("failed", "RuntimeError: no kernel image", {}), ("absent", "not installed", {}), ("ok", "", {"n": 3}),
    ]  # fmt: skip


# --------------------------------------------------------------------------------------------------------- kernels


def chains(dtype: torch.dtype = torch.bfloat16) -> list[kernel_forms.Chain]:
    torch.manual_seed(0)
    return [make() for make in kernel_forms.chains(SHAPE, CPU, dtype)]


def test_our_kernels_compute_what_the_plain_functions_do() -> None:
    """In fp32 to its rounding, so the plain functions are the same functions and not nearly the same."""
    for chain in chains(torch.float32):
        want = kernels.reference(chain)
        found = kernels.errors(chain, chain.forms["torch"](), want, 3e-6)
        assert found["verdict"] == "ok", chain.name
        assert [None if t is None else t.dtype for t in want] == [torch.float64] * len(want)


@pytest.mark.parametrize("half", ["forward", "backward"])
def test_a_kernel_that_is_wrong_is_called_so(half: str) -> None:
    for chain in chains():
        calls = chain.forms["torch"]()

        def broken(calls: kernel_forms.Calls = calls) -> list[Tensor | None]:
            first, *others = getattr(calls, half)()
            assert first is not None
            return [first * 1.2, *others]

        found = kernels.errors(chain, dataclasses.replace(calls, **{half: broken}), kernels.reference(chain), 0.03)
        assert found["verdict"] == "wrong", f"{chain.name}, {half}"


def test_a_mask_that_is_not_the_cpus_is_wrong_however_small_the_error() -> None:
    chain = next(chain for chain in chains() if chain.dropped is not None)
    assert chain.dropped is not None
    other = dataclasses.replace(chain, dropped=chain.dropped.roll(1, -1))
    found = kernels.errors(other, chain.forms["torch"](), kernels.reference(chain), 1e9)
    assert found["verdict"] == "wrong" and "differ from the CPU's" in found["mask"]


def test_forms_that_are_not_there_are_said_to_be() -> None:
    found = of(record(kernels.run), "what they compute")
    verdicts = {row.rpartition(": ")[2] for row in found}, {row: r.verdict for row, r in found.items() if row.endswith(": torch")}
    assert "it needs a GPU" in found["swiglu, tiny, bfloat16: triton"].message
    assert verdicts[0] == {"torch", "triton", "apex"} and set(verdicts[1].values()) == {"ok"} and len(verdicts[1]) == 3 * 7
    apex = found["RMSNorm, tiny, bfloat16: apex"]
    assert apex.verdict == "absent" and "it needs a GPU" in apex.message
    assert all(r.verdict in ("ok", "absent") for r in found.values())


def test_each_form_is_held_to_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's while its own halves are called, in any order, and nobody else's."""
    monkeypatch.setattr(kernel_forms, "require", lambda *_: None)
    seen: list[tuple[str, bool]] = []

    def make(kernel: str) -> kernel_forms.Calls:
        def call() -> list[Tensor | None]:
            seen.append((kernel, launch._in_use))
            return []

        call()
        return kernel_forms.Calls(call, call, call, call)

    forms = kernel_forms.forms_of(kernel_forms.Draw(CPU, torch.float32), make)
    both = [forms["triton"](), forms["torch"]()]
    for calls in (*both, *reversed(both)):
        for half in (calls.before_forward, calls.forward, calls.before_backward, calls.backward):
            half()
    assert len(seen) == 18 and all(in_use == (kernel == "triton") for kernel, in_use in seen) and not launch._in_use


def test_adamw_by_hand_is_torchs() -> None:
    found = of(record(kernels.adamw), "AdamW")
    assert found["1,024 elements: torch"].verdict == "ok" and found["1,024 elements: apex"].verdict == "absent"


# --------------------------------------------------------------------------------------------------------- experts


def test_experts_are_held_against_fp64_and_both_forms_are_timed() -> None:
    found = record(experts.run)
    checked, timed = of(found, "what they compute"), [r for r in found if r.table.startswith("how fast")]
    assert {row: r.verdict for row, r in checked.items()} == {
        "bfloat16: one after another": "ok", "bfloat16: as one": "ok", "float32: one after another": "ok", "float32: as one": "absent",
    }  # fmt: skip
    assert [(r.table, r.row, r.message) for r in timed] == [
        (f"how fast: {way}", f"tiny: {form}", choice)
        for way in ("forward", "backward")
        for form, choice in (("one after another", "a run's choice"), ("as one", ""))
    ]


@pytest.mark.parametrize("which", range(5))
def test_experts_that_are_wrong_are_called_so(monkeypatch: pytest.MonkeyPatch, which: int) -> None:
    """The results, and the gradients of x, the choices' weights and both parameters."""
    original = experts.Layer.results

    def broken(self: experts.Layer, grouped: bool) -> list[Tensor | None]:
        found = original(self, grouped)
        return [t * 1.2 if i == which and t is not None and t.dtype != torch.float64 else t for i, t in enumerate(found)]

    monkeypatch.setattr(experts.Layer, "results", broken)
    for grouped in experts.FORMS.values():
        assert experts.check(CPU, torch.bfloat16, grouped, 0.03)["verdict"] == "wrong"


# ----------------------------------------------------------------------------------------------------------- steps


def test_a_step_is_compared_with_the_cpus() -> None:
    context = Context("cpu", 0, True, lambda _: None)
    references: dict[tuple[str, str, str], steps_of.Steps] = {}
    found = steps.compare(context, "Llama", steps.MODES["fp16"], references)
    assert found["verdict"] == "ok" and 0 < found["gradient error"] < 0.01 and found["dtype"] == "fp16"
    assert [dtype for _, _, dtype in references] == ["fp32", "fp16"] and "the CPU's fp16: loss error " in found["message"]
    want = next(iter(references.values()))
    assert len(want.losses) == 2 and len(want.grads) > 10
    same = steps.errors(want, want, "fp32")
    assert same["verdict"] == "ok" and same["loss error"] == same["gradient error"] == 0.0
    name = min(want.grads)
    for field, value in (
        ("losses", [[want.losses[0][0] * 1.001], want.losses[1]]),
        ("grad_norms", [want.grad_norms[0], want.grad_norms[1] * 1.001]),
        ("losses", [[float("nan")], want.losses[1]]),
        ("grads", want.grads | {name: want.grads[name] * 1.001}),
        ("grads", {}),
    ):
        assert steps.errors(dataclasses.replace(want, **{field: value}), want, "fp32")["verdict"] == "wrong", field
    noise = {n: g + 0.05 * g.abs().max() * torch.randn_like(g).sign() for n, g in want.grads.items()}
    own = {"loss error": 1e-3, "norm error": 0.5, "gradient error": 0.03, "cosine": 0.99999}
    noisy = steps.errors(dataclasses.replace(want, grads=noise), want, "bf16", own)
    assert noisy["verdict"] == "wrong" and noisy["gradient error"] < 0.06, "no element is far off, and yet they point elsewhere"


def test_16_bits_are_held_to_what_the_cpus_are_off() -> None:
    """BERT's second loss after a step of SGD was 0.0257 off in bf16 on an H200, and is as far off on a CPU."""
    want = steps_of.Steps([[7.0], [7.0]], [1.0, 1.0], {"w": torch.ones(9, dtype=torch.float64)})
    got, own = dataclasses.replace(want, losses=[[7.0], [7.0 * 1.0257]]), {name: 0.0 for name in steps._NAMES} | {"cosine": 1.0}
    for of_the_cpu, verdict in ((0.0256, "ok"), (0.005, "wrong")):
        assert steps.errors(got, want, "bf16", own | {"loss error": of_the_cpu})["verdict"] == verdict
    assert steps.errors(got, want, "bf16")["verdict"] == "wrong", "without the CPU's there are a few roundings"
    assert steps.errors(dataclasses.replace(want, losses=[[7.0], [7.0 * 1.001]]), want, "bf16")["verdict"] == "ok"


def test_every_mode_is_a_run_that_is_accepted() -> None:
    from megatron_sp.commands.pretrain import parse_config

    for name, mode in steps.MODES.items():
        for family in mode.families:
            task, shape = steps.FAMILIES[family]
            words = f"{steps._FULL} {steps._REST} {shape} {mode.maths} {mode.how} --device cpu".split()
            assert parse_config(words, prog="test", family=task).batch.train_iters == 2, name
    assert {"bf16", "fp16", "fp32"} <= {steps.dtype_of(mode.how) for mode in steps.MODES.values()}


# ----------------------------------------------------------------------------------------- predictions and memory


@pytest.mark.parametrize(("name", "gib", "expected"), [
    ("NVIDIA A100-SXM4-80GB", 79, "a100-80g"), ("NVIDIA A100-PCIE-40GB", 39, "a100-40g"), ("NVIDIA H100 80GB HBM3", 79, "h100-80g"),
    ("NVIDIA H200", 139, "h200"), ("NVIDIA B200", 178, "b200"), ("NVIDIA L40S", 44, "l40s"),
])  # fmt: skip
def test_a_gpu_is_known_by_its_name(name: str, gib: int, expected: str) -> None:
    assert prediction.gpu_of(name, gib << 30).name == expected


def test_an_unknown_gpu_has_no_prediction() -> None:
    with pytest.raises(NotThereError, match="the planner does not know GeForce"):
        prediction.gpu_of("GeForce", 8 << 30)


def test_memory_is_held_against_the_form(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = {name: memory_peak.form(name, memory_peak._TINY, 2, "cpu", "torch") for name in ("GPT", "Llama")}
    monkeypatch.setattr(memory_peak, "form", lambda name, *_: plans[name])  # each is a run of its own
    for factor, verdict in ((1.0, "ok"), (1.2, "wrong"), (0.8, "wrong")):
        peak = int(plans["GPT"].peak * factor)
        monkeypatch.setattr(memory_peak.memory, "run", lambda *_, peak=peak: [{"peak": peak, "resident": 1}])
        found = of(record(memory_peak.run), "bytes of a step")["GPT, kernels of torch"]
        assert found.verdict == verdict and found.values["measured / form"] == pytest.approx(factor, rel=1e-3)


def test_a_layout_is_measured_when_the_model_before_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though its reference cycles are not collected yet."""
    models: list[weakref.ref[torch.nn.Module]] = []

    def measured(*_: Any) -> list[dict[str, int]]:
        assert not models or models[-1]() is None
        model = torch.nn.Linear(1, 1)
        model.itself = [model]  # type: ignore[assignment]
        models.append(weakref.ref(model))
        return [{"peak": 1, "resident": 1}]

    form = SimpleNamespace(peak=1000, resident=1, worst=SimpleNamespace(phase="forward", name="norm"))
    monkeypatch.setattr(memory_peak, "form", lambda *_: form)
    monkeypatch.setattr(memory_peak.memory, "run", measured)
    gc.disable()
    try:
        assert {r.verdict for r in record(memory_peak.run)} == {"wrong"} and len(models) == 2
    finally:
        gc.enable()


def test_a_device_of_a_part_has_its_number() -> None:
    """NCCL's groups are made for one."""
    assert Context("cuda", 1, True, lambda _: None).torch_device == torch.device("cuda", 0)
    assert Context("cpu", 0, True, lambda _: None).torch_device == CPU


def test_where_nothing_is_exchanged_what_arrives_is_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that nobody has written is zeros, or not finite, and a GPU is faster with either."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)  # what nobody has written is NaN
    try:
        replay = ulysses_replay.Replay(ulysses_replay.SHAPES["smoke"], CPU, ulysses_replay.MODES["none"], copies=False)
        losses = []
        for _ in range(2):
            replay.engine.draw()
            losses.append(float(replay.once()))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(math.isfinite(loss) for loss in losses) and replay.engine.num_exchanges == len(replay.engine._arrived) == 8
    assert all(torch.isfinite(unit.grads).all() for unit in replay.gradients.units)
    replay.engine.draw()
    assert all(0.8 < float(arrived.float().std()) < 1.2 for arrived in replay.engine._arrived)


# -------------------------------------------------------------------------------------------------- the other parts


def test_a_time_line_has_the_sums_of_its_step_and_two_layers() -> None:
    what = Collective("sp", "all_to_all", (4,), (4,), "bfloat16")
    spans = [Span("projection", layer, "forward", 4.0 * layer, 4.0 * layer + 3) for layer in range(4)]
    spans += [Span("wait", layer, "forward", 4.0 * layer + 3, 4.0 * layer + 4) for layer in range(4)]
    flights = [CollectiveTimes(what, "qkv", layer, "forward", 4.0 * layer + 2, 4.0 * layer + 4, 1.0) for layer in range(4)]
    found = timeline.line(StepTimes(16.0, sorted(spans, key=lambda s: s.begin), flights), 8000.0)
    assert found["step_ms"] == 16000 and found["exposed_ms"] == 4000 and found["exchange_ms"] == 8000 and found["exchanges"] == 4
    assert found["of the step_share"] == 0.25 and found["hidden_share"] == 0.5
    assert ("forward: computes", "projection", 0.0, 3000.0) in found["spans"] and ("forward: waits", "wait", 3000.0, 4000.0) in found[
        "spans"
    ]
    assert ("forward: exchanges 1", "qkv", 2000.0, 4000.0) in found["spans"] and len(found["spans"]) == 6, "layers 1 and 2"


@pytest.mark.parametrize(("kernel", "kind"), [
    ("void flash_fwd_kernel<...>", "attention"), ("nvjet_hsh_192x128", "matrix products"), ("sm90_xmma_gemm_bf16", "matrix products"),
    ("Memcpy DtoD (Device -> Device)", "copies"), ("void at::native::vectorized_elementwise_kernel<4>", "elementwise"),
    ("triton_poi_fused_0", "elementwise"), ("void at::native::reduce_kernel<512>", "reductions"), ("spin", "other"),
])  # fmt: skip
def test_kernels_are_sorted_by_their_names(kernel: str, kind: str) -> None:
    assert timeline.kind_of(kernel) == kind


def test_the_profile_counts_operations_on_a_cpu() -> None:
    found = timeline.kernels_of(lambda: torch.ones(8, 8) @ torch.ones(8, 8), CPU)
    assert found["aten::mm"][1] == 1 and found["aten::mm"][0] > 0


def test_attention_kernels_that_are_wrong_or_left_out_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(shape: Any, kinds: Any, device: Any, dtype: Any, rounds: int, reasons: dict[str, str]) -> dict[str, Any]:
        reasons.update({"flex": f"{shape}: wrong by 0.500", "varlen": "ImportError: no"})
        rates = {f"{way}_{what}": 1.0 for way in ("forward", "backward") for what in ("tflops",)}
        return {"flash": rates | {f"{way}_seconds": {"median": 0.002} for way in ("forward", "backward")}}

    monkeypatch.setattr(attention.attention_kernels, "measure", measured)
    found = {r.row.rpartition(": ")[2]: r for r in record(attention.run)}
    assert found["flash"].values["forward_ms"] == 2.0 and found["flash"].verdict == "ok"
    assert (found["flex"].verdict, found["varlen"].verdict) == ("wrong", "absent")


def test_the_tests_of_a_gpu_are_counted(tmp_path: Path) -> None:
    report = tmp_path / "junit.xml"
    report.write_text(
        '<testsuites><testsuite><testcase classname="a" name="x"/><testcase classname="a" name="y"><failure message="assert 1 == 2\n b"/>'
        '</testcase><testcase classname="b" name="z"><skipped message="no apex"/></testcase></testsuite></testsuites>'
    )
    found = {r.row: r for r in record(lambda context: gpu_tests.tell(context, report))}
    assert (found["a::y"].verdict, found["a::y"].message) == ("failed", "assert 1 == 2 b") and found["b::z"].verdict == "absent"
    assert found["tests/gpu"].values == {"passed": 1, "failed": 1, "skipped": 1} and found["tests/gpu"].verdict == "failed"
    report.write_text("<testsuites><testsuite/></testsuites>")
    assert [r.verdict for r in record(lambda context: gpu_tests.tell(context, report))] == ["failed"], "nothing has been tested"


@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 8])
def test_layouts_of_all_gpus_are_accepted(ranks: int) -> None:
    from megatron_sp.config.flags.arguments import config_from_args

    for flags in collectives.layouts(ranks).values():
        assert config_from_args(collectives.words_of(flags, ranks, "cpu"), world_size=ranks).parallel.verify_parallelism


def test_one_gpu_has_no_links() -> None:
    assert [(r.verdict, r.message) for r in record(collectives.run, device="cuda", num_gpus=1)] == [("absent", "this machine has one GPU")]


@pytest.mark.long
def test_everything_runs_on_a_cpu(tmp_path: Path) -> None:
    """The script itself, from end to end: tiny shapes, every part, all well."""
    words = ["bash", str(ROOT / "scripts/first_light.sh"), "--device", "cpu", "--minutes", "10", "--out", str(tmp_path / "out")]
    environment = {"PYTHON": sys.executable, "PATH": "/usr/local/bin:/usr/bin:/bin", "TMPDIR": str(tmp_path)}
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    report = read_report(tmp_path / "out/report.json")
    assert list(report.parts) == [part.name for part in parts_for("cpu")] and not report.is_bad
    assert all(result.status == "done" and result.records for result in report.parts.values())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"], "no temporary folder is left"
    spans = [record.spans for record in report.parts["timeline"].records if record.spans]
    assert len(spans) >= 3 and "<svg" in (tmp_path / "out/report.html").read_text()


@pytest.mark.long
def test_the_script_says_what_is_wrong_in_one_line(tmp_path: Path) -> None:
    script = ["bash", str(ROOT / "scripts/first_light.sh")]
    environment = {"PYTHON": sys.executable, "PATH": "/usr/local/bin:/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([*script, "--device", "cuda"], cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert (
        done.returncode == 2 and done.stderr.startswith("error: --device cuda, but torch sees no GPU here") and done.stderr.count("\n") == 1
    )
    assert list(tmp_path.iterdir()) == []


def test_liger_is_found_by_its_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the package: the chain's inputs come first, then what the table says."""
    chain = chains()[0]
    if importlib.util.find_spec("liger_kernel") is None:
        with pytest.raises(NotThereError, match="Liger is not installed"):
            kernel_forms.of_liger(chain)
    seen: list[Any] = []

    class Functions:
        @staticmethod
        def liger_rms_norm(x: Tensor, weight: Tensor, *more: Any) -> Tensor:
            seen.append(more)
            return chain.plain(x, weight)

    monkeypatch.setattr(kernel_forms.importlib, "import_module", lambda name: Functions)
    found = kernels.errors(chain, kernel_forms.of_liger(chain), kernels.reference(chain), 0.03)
    assert found["verdict"] == "ok" and seen[0] == (kernel_forms.EPS, 0.0, "llama", False)
