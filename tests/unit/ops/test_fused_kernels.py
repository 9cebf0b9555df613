"""NVIDIA apex's kernels, played by a stand-in: when they are chosen, what is said, and that they compute what torch's compute."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support import apex_stand_in
from support.apex_stand_in import Install, install_apex
from support.errors import FP32, assert_law, law_error
from support.op_checks import Inputs, PoisonedSink, gradients, leaves, randn
from torch import Tensor, nn

from megatron_sp.config.schema import OptimizerConfig
from megatron_sp.ops import adamw as adamw_module
from megatron_sp.ops import availability, fused_kernels
from megatron_sp.ops.fused_kernels import FusedKernel, FusedKernels, KernelUse, choose_fused_kernels
from megatron_sp.ops.kernels import launch
from megatron_sp.ops.norm import NormSpec, norm, norm_backward, norm_forward
from megatron_sp.optim.flat import FlatUnit
from megatron_sp.optim.optimizer import FlatOptimizer

__all__ = ["install_apex"]
CPU = torch.device("cpu")
LAYER, RMS = NormSpec("LayerNorm", 1e-5), NormSpec("RMSNorm", 1e-5)
BF16, FP16 = torch.bfloat16, torch.float16


@pytest.fixture
def apex(install_apex: Install) -> Iterator[None]:
    """The whole stand-in."""
    install_apex()
    yield


def choose(asked: str = "auto", dtype: torch.dtype = torch.float32, norm: NormSpec | None = RMS, **more: Any) -> FusedKernels:
    return choose_fused_kernels(asked, KernelUse(more.pop("device", CPU), dtype, norm=norm, **more))


def names(kernels: FusedKernels) -> tuple[str, ...]:
    return tuple(kernel.name for kernel in (kernels.adamw, kernels.norm) if kernel is not None)


CHOICES = [
    # asked, dtype, norm, more, names of AdamW's and the norm's, part of the description
    ("auto", torch.float32, RMS, {}, ("apex", "apex"), "AdamW and RMSNorm by apex (found)"),
    ("auto", torch.float32, LAYER, {}, ("apex", "apex"), "AdamW and LayerNorm by apex (found)"),
    ("auto", BF16, RMS, {}, ("apex", "apex"), "by apex (found)"),
    ("auto", FP16, RMS, {}, ("apex", "apex"), "by apex (found)"),
    ("auto", BF16, LAYER, {}, ("apex", "torch"), "AdamW by apex (found), LayerNorm by torch (apex not used: torch's LayerNorm is one"),
    ("auto", BF16, dataclasses.replace(RMS, zero_centered=True), {}, ("apex", "torch"), "rounds 1 + weight"),
    ("auto", torch.float32, dataclasses.replace(RMS, zero_centered=True), {}, ("apex", "apex"), "found"),
    ("auto", torch.float64, RMS, {}, ("torch", "torch"), "it computes in fp32, not in float64"),
    ("auto", torch.float32, RMS, {"offload": True}, ("torch", "apex"), "with --offload-optimizer the update runs on the host"),
    ("auto", torch.float32, RMS, {"deterministic": True}, ("torch", "torch"), "for which torch vouches"),
    ("auto", torch.float32, RMS, {"device": torch.device("meta")}, ("torch", "torch"),
     "AdamW and RMSNorm by torch (apex not used: it needs a GPU)"),
    ("auto", torch.float32, None, {}, ("apex",), "AdamW by apex (found)"),
    ("auto", torch.float32, LAYER, {"adamw": False}, ("apex",), "LayerNorm by apex (found)"),
    ("auto", torch.float32, None, {"adamw": False}, (), ""),
    ("apex", BF16, LAYER, {}, ("apex", "apex"), "AdamW and LayerNorm by apex (asked for)"),
    ("apex", torch.float32, RMS, {"deterministic": True}, ("apex", "apex"), "asked for"),
    ("torch", torch.float32, RMS, {}, ("torch", "torch"), "AdamW, RMSNorm and elementwise operations by torch (asked for)"),
]  # fmt: skip


@pytest.mark.parametrize("asked, dtype, spec, more, chosen, said", CHOICES)
def test_the_choice(apex: None, asked: str, dtype: torch.dtype, spec: NormSpec | None, more: Any, chosen: Any, said: str) -> None:
    found = choose(asked, dtype, spec, **more)
    assert names(found) == chosen and said in found.describe()


@pytest.mark.parametrize("dtype, more, reason", [
    (torch.float64, {}, "AdamW: it computes in fp32, not in float64"), (torch.float32, {"device": torch.device("meta")}, "it needs a GPU"),
    (torch.float32, {"offload": True}, "the update runs on the host"),
])  # fmt: skip
def test_apex_demanded_where_it_cannot_run(apex: None, dtype: torch.dtype, more: Any, reason: str) -> None:
    with pytest.raises(RuntimeError, match=reason) as error:
        choose("apex", dtype, **more)
    assert "Use --fused-kernels auto" in str(error.value) and "pip install" not in str(error.value)


def test_torch_and_a_cpu_import_nothing_of_apex(install_apex: Install) -> None:
    install_apex(amp_C="raise SystemExit('executed')", fused_layer_norm_cuda="raise SystemExit('executed')")
    assert names(choose("torch")) == names(choose(device=torch.device("meta"))) == ("torch", "torch")


BROKEN = [
    ({"amp_C": None}, ("torch", "apex"), "AdamW by torch (apex not used: apex was built without its extension amp_C)"),
    ({"fused_layer_norm_cuda": None}, ("apex", "torch"), "apex was built without its extension fused_layer_norm_cuda"),
    ({"amp_C": "import libcudart_of_another_version"}, ("torch", "apex"), "amp_C of apex cannot be imported: No module named"),
    ({"amp_C": "raise OSError('undefined symbol: _ZN3c105')"}, ("torch", "apex"), "amp_C of apex is broken: OSError: undefined symbol"),
    ({"amp_C": ""}, ("torch", "apex"), "its AdamW fails here: AttributeError: module 'amp_C' has no attribute 'multi_tensor_adam'"),
    ({"amp_C": "def multi_tensor_adam(*a):\n raise RuntimeError('no kernel image is available\\nlong story')"}, ("torch", "apex"),
     "its AdamW fails here: RuntimeError: no kernel image is available)"),
    ({"amp_C": "def multi_tensor_adam(a, b, c): pass"}, ("torch", "apex"), "its AdamW fails here: TypeError"),
    ({"amp_C": "def multi_tensor_adam(*a): pass"}, ("torch", "apex"), "its AdamW is wrong here: an example differs from torch's result by"),
    ({"fused_layer_norm_cuda": "def rms_forward_affine(x, *a): return [x * float('nan'), x[..., 0].reshape(-1)]\n"
      "def rms_backward_affine(g, r, x, s, w, *a): return [x * 0, w * 0]"}, ("apex", "torch"), "its RMSNorm is wrong here"),
]  # fmt: skip


@pytest.mark.parametrize("extensions, chosen, said", BROKEN)
def test_a_broken_installation_is_told(install_apex: Install, extensions: Any, chosen: Any, said: str) -> None:
    install_apex(**extensions)
    found = choose()
    assert names(found) == chosen and said in found.describe()
    lacking = next(kernel for kernel in found.chosen if kernel.name == "torch")
    with pytest.raises(RuntimeError) as error:
        choose("apex")
    assert f"{lacking.op}: {lacking.reason.removeprefix('apex not used: ')}" in str(error.value)


def test_without_apex(monkeypatch: pytest.MonkeyPatch, install_apex: Install) -> None:
    apex_stand_in.forget()
    monkeypatch.setattr(adamw_module.availability.importlib.util, "find_spec", lambda name: None)
    assert choose().describe() == (
        "AdamW and RMSNorm by torch (apex not used: apex is not installed),"
        " elementwise operations by torch (Triton not used: it needs a GPU)"
    )


def test_all_ranks_take_torchs_where_one_must() -> None:
    found, lacks = FusedKernel("AdamW", "apex", "found"), FusedKernel("RMSNorm", "torch", "apex not used: it rounds")
    mine = FusedKernels(found, lacks)
    same = [("apex", "found"), ("torch", "apex not used: it rounds")]
    assert mine.agreed([same, same]) == mine
    other = [("torch", "apex not used: apex is not installed"), same[1]]
    assert mine.agreed([same, other]).describe() == (
        "AdamW by torch (rank 1: apex not used: apex is not installed), RMSNorm by torch (apex not used: it rounds)"
    )


def test_ranks_with_different_kernels_take_torchs() -> None:
    """Triton fails on rank 1 alone, which finds apex's norms."""
    of_ranks = [
        [("apex", "found"), ("triton", "found"), ("triton", "found")],
        [("apex", "found"), ("apex", "found"), ("torch", "Triton not used")],
    ]
    ops = ("AdamW", "RMSNorm", fused_kernels.ELEMENTWISE)
    for mine in of_ranks:
        kernels = FusedKernels(*(FusedKernel(op, *choice) for op, choice in zip(ops, mine, strict=True)))
        assert [kernel.name for kernel in kernels.agreed(of_ranks).chosen] == ["apex", "torch", "torch"]


def test_an_example_with_nan_differs() -> None:
    ones, nan = torch.ones(2), torch.tensor([1.0, torch.nan])
    for got in ([ones, nan], [nan, ones]):
        assert not fused_kernels._difference(got, [ones, ones]) <= 1.0


# ------------------------------------------------------------------------------------------------------------------------ AdamW

SHAPES = ((3, 5), (7,), (64, 64), (129,))
RATES, DECAY = (1e-2, 3e-2, 1e-3, 0.0, 5e-2), 0.1


def trained(kernel: Any, dtype: torch.dtype = torch.float32, **config: Any) -> tuple[FlatUnit, FlatOptimizer, list[Tensor]]:
    """A unit after five steps, and the changes of its master weights."""
    params = [nn.Parameter(randn(*shape, seed=i).to(dtype)) for i, shape in enumerate(SHAPES)]
    unit = FlatUnit("unit", [(f"p{i}", p) for i, p in enumerate(params)])
    optimizer = FlatOptimizer([unit], OptimizerConfig(clip_grad=0.0, **config), kernel=kernel)
    before = unit.master.clone()
    for step, rate in enumerate(RATES):
        for slot in unit.slots:
            slot.view(unit.grads).copy_(randn(*slot.shape, seed=100 + step))
        optimizer.step(rate, DECAY, 1.0)
    return unit, optimizer, [slot.view(unit.master - before) for slot in unit.slots]


@pytest.mark.parametrize("beta1, beta2, eps", [(0.9, 0.999, 1e-8), (0.8, 0.95, 1e-3), (0.0, 0.9, 1e-8)])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_adamw_is_torchs(apex: None, dtype: torch.dtype, beta1: float, beta2: float, eps: float) -> None:
    """Equal but for 1 - beta2 in fp32, which apex has only to 2^-24 / (1 - beta2), and for rounding of the weights in every step."""
    numbers = {"adam_beta1": beta1, "adam_beta2": beta2, "adam_eps": eps}
    got, want = trained("apex", dtype, **numbers), trained("torch", dtype, **numbers)
    decayed = got[0].num_decayed
    assert apex_stand_in.decays == [DECAY, 0.0] * len(RATES)
    assert apex_stand_in.sizes == [[decayed], [got[0].numel - decayed]] * len(RATES) and 4096 + 15 <= decayed < 4096 + 15 + 128
    inexact = 2**-24 / (1 - beta2)
    for slot, change, wanted in zip(got[0].slots, got[2], want[2], strict=True):
        rounding = 2 * len(RATES) * 2**-24 * slot.view(got[0].master).abs().max() / wanted.abs().max()
        assert law_error(change, wanted) <= inexact + rounding, slot.name
    for name in ("exp_avg", "exp_avg_sq"):
        assert law_error(getattr(got[1].states[0], name), getattr(want[1].states[0], name)) <= inexact + len(RATES) * 2**-23


def test_very_long_tensors_go_in_pieces(apex: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Older builds index with 32 bits."""
    whole = trained("apex")[0].master
    assert apex_stand_in.sizes[0] == [4112]
    apex_stand_in.sizes.clear()
    monkeypatch.setattr(adamw_module, "_LARGEST", 1000)
    assert torch.equal(trained("apex")[0].master, whole)
    assert apex_stand_in.sizes[0] == [1000, 1000, 1000, 1000, 112]


def test_other_dtypes_are_never_given_to_apex(apex: None) -> None:
    """It would read them as fp32, or as what the first tensor is."""
    with pytest.raises(AssertionError, match="apex reads all tensors in the type of the first"):
        trained("apex", torch.float64)
    assert not apex_stand_in.calls


# ------------------------------------------------------------------------------------------------------------------------ norms


def tensors(kind: str, shape: tuple[int, ...] = (8, 3, 6), dtype: torch.dtype = torch.float32) -> Inputs:
    made = {"x": randn(*shape) * 0.3 + 0.5, "weight": randn(shape[-1], seed=1)}
    made |= {"bias": randn(shape[-1], seed=2)} if kind == "LayerNorm" else {}
    return {name: t.to(dtype) for name, t in made.items()}


def normed(inputs: Inputs, spec: NormSpec, main_grad: Any = None) -> Tensor:
    return norm(inputs["x"], inputs["weight"], inputs.get("bias"), spec, main_grad=main_grad)


# 16 bits: apex rounds 1 + weight, and LayerNorm's result three times, torch once more: five times half an eps, 2^-8 or
# 2^-11
NORM_CASES = [(torch.float32, FP32), (BF16, 5 * 2**-8), (FP16, 5 * 2**-11)]


@pytest.mark.parametrize("spec", [LAYER, RMS], ids=lambda spec: spec.kind)
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("eps", [1e-5, 0.3])
@pytest.mark.parametrize("dtype, tolerance", NORM_CASES)
def test_norms_are_torchs(apex: None, spec: NormSpec, zero_centered: bool, eps: float, dtype: torch.dtype, tolerance: float) -> None:
    spec = dataclasses.replace(spec, zero_centered=zero_centered, eps=eps)
    inputs, grad = tensors(spec.kind, dtype=dtype), randn(8, 3, 6, seed=3).to(dtype)
    want = gradients(lambda i: normed(i, spec), leaves(**inputs), grad)
    assert not apex_stand_in.calls
    got = gradients(lambda i: normed(i, dataclasses.replace(spec, kernel="apex")), leaves(**inputs), grad)
    assert [call.removeprefix("rms_") for call in apex_stand_in.calls] == ["forward_affine", "backward_affine"]
    assert all(t is not None and t.dtype == dtype for t in got.values())
    assert_law(got, want, tolerance)


@pytest.mark.parametrize("spec", [LAYER, RMS], ids=lambda spec: spec.kind)
@pytest.mark.parametrize("frozen", [(), ("x",), ("weight",), ("bias",), ("weight", "bias")])
def test_main_grad_frozen_inputs_and_strides(apex: None, spec: NormSpec, frozen: tuple[str, ...]) -> None:
    inputs, grad = tensors(spec.kind), randn(6, 8, 3, seed=3).float().permute(1, 2, 0)
    inputs["x"] = (randn(3, 6, 8).float() * 0.3 + 0.5).permute(2, 0, 1)
    frozen = tuple(name for name in frozen if name in inputs)
    found = []
    for kernel in ("torch", "apex"):
        given = leaves(frozen, **inputs)
        held = [name for name in given if name not in (*frozen, "x")]
        sink = PoisonedSink(*(given[name] for name in held))
        results = gradients(lambda i, k=kernel, s=sink: normed(i, dataclasses.replace(spec, kernel=k), s), given, grad)  # type: ignore[misc]
        found.append(results | {name: sink.of(given[name]) for name in held})
    assert_law(found[1], found[0], FP32)
    assert len(apex_stand_in.calls) == 2


@pytest.mark.parametrize("spec", [LAYER, RMS], ids=lambda spec: spec.kind)
def test_only_what_is_needed_is_returned_and_another_gradient_is_added(apex: None, spec: NormSpec) -> None:
    given, spec = tensors(spec.kind), dataclasses.replace(spec, kernel="apex")
    x, weight, bias, grad, add = given["x"], given["weight"], given.get("bias"), torch.ones(8, 3, 6), randn(8, 3, 6, seed=9).float()
    stats = norm_forward(x, weight, bias, spec)[1]
    for need in itertools.product((True, False), repeat=3):
        found = norm_backward(grad, x, weight, bias, stats, spec, need)
        assert [g is not None for g in found] == [need[0], need[1], need[2] and bias is not None]
    alone, _, _ = norm_backward(grad, x, weight, bias, stats, spec, (True, False, False))
    both, _, _ = norm_backward(grad, x, weight, bias, stats, spec, (True, False, False), add)
    assert alone is not None and both is not None and torch.equal(both, alone + add)


def test_the_result_can_be_changed_in_place(apex: None) -> None:
    """As the rotation of queries and keys does."""
    for spec in (LAYER, RMS):
        given = leaves(**tensors(spec.kind))
        normed(given, dataclasses.replace(spec, kernel="apex")).mul_(2.0).sum().backward()
        assert given["x"].grad is not None


def test_what_apex_cannot_take_is_torchs(apex: None, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = dataclasses.replace(RMS, kernel="apex")
    for x, dtype in ((torch.empty(0, 3, 6), torch.float32), (torch.ones(2, 3, 6), torch.float64)):
        given = leaves(**tensors("RMSNorm", dtype=dtype) | {"x": x.to(dtype)})
        gradients(lambda i: normed(i, spec), given, torch.ones(x.shape, dtype=dtype))
    monkeypatch.setattr(adamw_module.availability, "APEX_DEVICE", "cuda")
    normed(leaves(**tensors("RMSNorm")), spec)
    assert not apex_stand_in.calls


# ------------------------------------------------------------------------------------------------------------------------ Triton

GPU = torch.device("cuda")


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Play an installation of Triton on a GPU of some capability; nothing is launched unless a launcher is given."""

    def install(
        version: str = "3.7.1", lack: str = "", broken: str = "", capability: tuple[int, int] = (9, 0), launcher: Any = None
    ) -> None:  # fmt: skip
        fused_kernels._trial.cache_clear()
        monkeypatch.setattr(availability, "installed", lambda name: availability.Kernel(name, not lack, version, lack))
        monkeypatch.setattr(availability, "find", lambda name: availability.Kernel(name, not (lack or broken), version, lack or broken))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        if launcher is None:
            monkeypatch.setattr(fused_kernels, "_triton_example", lambda use: 0.0)
        else:
            monkeypatch.setattr(launch, "DEVICE", "cpu")
            monkeypatch.setattr(launch, "launcher", launcher)

    return install


def no_compiler(launched: Any) -> None:
    raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.\nand more")


def leaves_memory_as_it_is(launched: Any) -> None:
    for tensor in launched.writes:
        tensor.zero_()


LACKS = [
    ({"lack": "triton is not installed"}, GPU, "triton is not installed"),
    ({"version": "2.1.0"}, GPU, "Triton 2.1.0 is older than 3.6"),
    ({"version": "3.5.1"}, GPU, "Triton 3.5.1 is older than 3.6"),
    ({"capability": (7, 5)}, GPU, "it needs a GPU of compute capability 8.0 or later, and this one has 7.5"),
    ({"broken": "triton cannot be imported: libcuda.so.1 is missing"}, GPU, "triton cannot be imported: libcuda.so.1 is missing"),
    ({}, CPU, "it needs a GPU"),
    ({"launcher": no_compiler}, CPU, "a kernel of it fails here: RuntimeError: Failed to find C compiler. Please specify via CC"),
    ({"launcher": leaves_memory_as_it_is}, CPU, "a kernel of it is wrong here: an example differs from torch's result by"),
]  # fmt: skip


@pytest.mark.parametrize(("installation", "device", "reason"), LACKS, ids=lambda value: value if isinstance(value, str) else "")
def test_without_triton_torch_computes_and_says_why(triton: Any, installation: Any, device: torch.device, reason: str) -> None:
    triton(**installation)
    found = choose_fused_kernels("auto", KernelUse(device, torch.float32, adamw=False, norm=RMS))
    assert found.elementwise is not None and found.elementwise.name == "torch"
    assert f"elementwise operations by torch (Triton not used: {reason}" in found.describe() and "\n" not in found.describe()
    with pytest.raises(RuntimeError) as error:
        choose_fused_kernels("triton", KernelUse(device, torch.float32, adamw=False, norm=RMS))
    said = str(error.value)
    assert said.startswith(f"--fused-kernels triton cannot be used: {reason}") and "Use --fused-kernels auto" in said and "\n" not in said


@pytest.mark.parametrize(("version", "capability"), [("3.6.0", (8, 0)), ("3.7.1+git", (9, 0)), ("4.0.0", (10, 0)), ("3.10.0", (12, 0))])
def test_triton_is_taken_where_it_is_there(triton: Any, version: str, capability: tuple[int, int]) -> None:
    triton(version, capability=capability)
    found = choose_fused_kernels("auto", KernelUse(GPU, BF16, norm=LAYER, adamw=False))
    assert found.describe() == "LayerNorm and elementwise operations by triton (found)"
    asked = choose_fused_kernels("triton", KernelUse(GPU, BF16, norm=RMS, deterministic=True, offload=True))
    assert asked.describe() == "AdamW by torch (asked for), RMSNorm and elementwise operations by triton (asked for)"


def test_an_external_model_has_no_operations_of_ours(triton: Any) -> None:
    triton()
    assert choose_fused_kernels("auto", KernelUse(GPU, BF16)).elementwise is None
    with pytest.raises(RuntimeError, match="triton cannot be used: the model is not ours"):
        choose_fused_kernels("triton", KernelUse(GPU, BF16))


def test_triton_does_not_compute_in_fp64(triton: Any) -> None:
    triton()
    assert "it computes in fp32, not in float64" in choose_fused_kernels("auto", KernelUse(GPU, torch.float64, norm=RMS)).describe()


def test_nothing_of_triton_is_looked_at_where_torch_is_asked_for(triton: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    triton()
    monkeypatch.setattr(availability, "installed", lambda name: pytest.fail(f"{name} was looked for"))
    assert names(choose_fused_kernels("torch", KernelUse(GPU, BF16, norm=RMS))) == ("torch", "torch")
