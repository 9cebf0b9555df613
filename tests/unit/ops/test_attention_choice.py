"""Candidates for the attention kernel: what there is, what it can do, and that it is right here; packages played on the CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.flash_stand_in import FLASH2, FLASH3, FLASH4, UNDER_FLASH2, UNDER_FLASH4, Install, Registry, calls, install_flash
from support.op_checks import randn

from megatron_sp.ops import attention_choice, availability
from megatron_sp.ops.attention import AttentionMask, core_attention
from megatron_sp.ops.attention_choice import AttentionUse, choose_kernel, find_candidates, lack, why_repeated
from megatron_sp.ops.flash_packages import FLASH_NAMES, FlashName

__all__ = ["install_flash"]
USE = AttentionUse(torch.device("cpu"), torch.bfloat16, head_dim=16, queries_per_group=3)
ALL = {"flash2": FLASH2, "flash3": FLASH3, "flash4": FLASH4}
MASKS = {
    "causal": AttentionMask(), "all": AttentionMask(False), "window": AttentionMask(window=5),
    "documents": AttentionMask(documents=((7, 20), (20,))), "documents, window": AttentionMask(documents=((7, 20), (1, 20)), window=5),
    "documents, all": AttentionMask(False, documents=((7, 20), (20,))), "padding": AttentionMask(False, torch.tensor([20, 20, 7, 7])),
}  # fmt: skip


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", FLASH_NAMES)
def test_each_package_is_called_as_it_wants_to_be(install_flash: Install, name: FlashName, mask: str) -> None:
    """Layout, order and names of the arguments, what stands for no window, what comes back; forward and backward."""
    install_flash(**ALL)
    results = []
    grad = randn(20, 4, 3, 16, seed=4).bfloat16()
    for kernel in (name, "reference"):
        q, k, v = (randn(20, 4, n, 16, seed=i).bfloat16().requires_grad_() for i, n in enumerate((3, 1, 1)))
        out = core_attention(q, k, v, MASKS[mask], kernel=kernel)  # type: ignore[arg-type]
        results.append([out.detach(), *torch.autograd.grad(out, (q, k, v), grad)])
    for got, want in zip(*results, strict=True):
        assert float((got.float() - want.float()).abs().max() / want.float().abs().max()) < 0.03
    kind = "" if mask in ("causal", "all", "window") else " packed"
    assert {called for called, _ in calls} == ({f"{name}{kind}"} if mask != "padding" else {name}) or mask == "padding"


@pytest.mark.parametrize("mask", ["causal", "documents"])
@pytest.mark.parametrize("name", FLASH_NAMES)
def test_deterministic_mode_reaches_the_package(install_flash: Install, name: FlashName, mask: str) -> None:
    install_flash(**ALL)
    q, k, v = (randn(20, 2, 1, 16, seed=i).bfloat16() for i in range(3))
    for wanted in (False, True):
        torch.use_deterministic_algorithms(wanted)
        try:
            core_attention(q, k, v, MASKS[mask], kernel=name)
        finally:
            torch.use_deterministic_algorithms(False)
    assert [deterministic for _, deterministic in calls] == [False, True]


CAN = [
    # capability, use, what is left of auto
    ((9, 0), {}, ("flash4", "flash3", "flash2", "sdpa")), ((10, 0), {}, ("flash4", "flash2", "sdpa")), ((8, 0), {}, ("flash2", "sdpa")),
    ((12, 0), {}, ("flash4", "flash2", "sdpa")),
    ((7, 5), {}, ("sdpa",)), ((9, 0), {"dropout": 0.1}, ("flash2", "sdpa")), ((9, 0), {"dtype": torch.float32}, ("sdpa",)),
    ((9, 0), {"head_dim": 264}, ("sdpa",)), ((9, 0), {"head_dim": 12}, ("flash2", "sdpa")),
    ((9, 0), {"documents": True}, ("flash4", "flash3", "flash2", "sdpa")), ((9, 0), {"window": 9}, ("flash4", "flash3", "flash2", "sdpa")),
]  # fmt: skip


@pytest.mark.parametrize("capability, use, names", CAN)
def test_who_can_do_this(install_flash: Install, capability: tuple[int, int], use: dict[str, Any], names: tuple[str, ...]) -> None:
    install_flash(capability, **ALL)
    found = find_candidates("auto", replace(USE, **use))
    assert found.names == names
    assert all(found.lacks[name] for name in ("flash4", "flash3", "cudnn", "flash2") if name not in names)


def test_what_context_parallelism_asks_of_a_kernel(install_flash: Install) -> None:
    """A log-sum-exp, by which the results for parts of the keys are merged, and no dropout of its own; the plain kernel has both."""
    install_flash((9, 0), **ALL)
    use = replace(USE, context=True)
    found = find_candidates("auto", use)
    assert found.names == ("flash4", "flash3", "flash2"), "each has computed an example in two parts"
    assert "sdpa: it fails here: ValueError: no kernel for context parallelism" in found.reason, "torch's is not there on a CPU"
    assert lack("sdpa-fa3", use) == "it takes no keys in parts, as context parallelism has them"
    assert lack("sdpa", replace(use, dropout=0.1)) == "its dropout would depend on how context parallelism cuts the sequence"
    assert lack("sdpa", replace(use, head_dim=12)) == "in parts it takes heads up to 256 wide, in multiples of 8, not 12"
    plain = find_candidates("auto", replace(use, dtype=torch.float32))
    assert plain.names == ("reference",)
    assert "sdpa: it gives no log-sum-exp in float32, by which context parallelism merges parts" in plain.reason
    for more in ({"window": 5}, {"documents": True}, {"causal": False}):
        assert find_candidates("flash", replace(use, **more)).names == ("flash4", "flash3", "flash2")
    install_flash((9, 0), **ALL, under_flash2=UNDER_FLASH2.replace("as _flash_attn_varlen_backward", "as bwd"))
    assert "lacks a function that gives or takes the log of the sums" in lack("flash2", use)
    install_flash((7, 5), **ALL)
    assert lack("sdpa", use) == "torch's flash kernel needs compute capability 8.0"


def test_what_is_said_of_those_that_cannot(install_flash: Install) -> None:
    install_flash((8, 6), **ALL)
    assert lack("flash3", USE) == "it has no kernels for compute capability 8.6"
    assert lack("cudnn", USE) == "torch has no cuDNN here"
    assert lack("cudnn", replace(USE, deterministic=True)) == "SDPA refuses it with --deterministic-mode"
    assert lack("cudnn", replace(USE, window=4)) == "SDPA cannot give it windows"
    assert lack("flash2", replace(USE, dtype=torch.float32)) == "it needs bf16 or fp16, not float32"
    assert lack("flash2", replace(USE, head_dim=264)) == "it takes heads up to 256 wide, not 264"


def test_what_is_said_of_those_that_are_not_there(install_flash: Install) -> None:
    install_flash((9, 0))
    assert lack("flash4", USE) == "flash-attn-4 is not installed" and lack("flash3", USE) == "flash_attn_3 is not installed"
    assert lack("flash3", replace(USE, dropout=0.1)) == "it has no attention dropout"


@pytest.mark.parametrize("text, reason", [
    ("import no_such_library", "flash_attn_3 cannot be imported: No module named 'no_such_library'"),
    ("raise OSError('undefined symbol: _ZN3c104')", "flash_attn_3 is broken: OSError: undefined symbol: _ZN3c104"),
    ("x = 1", "it fails here: AttributeError: module 'flash_attn_interface' has no attribute 'flash_attn_func'"),
    (FLASH2.replace("import", "import calls,"), "it fails here: ImportError"),
    (f"{FLASH3}right = flash_attn_func\nflash_attn_func = lambda q, k, v, **more: right(q, k, v, **more | dict(causal=False))",
     "it is wrong here: an example differs from the plain kernel's result by"),
    (f"{FLASH3}right = flash_attn_func\nflash_attn_func = lambda q, k, v, **more: right(q, k, v, **more).detach()",
     "it fails here: RuntimeError: element 0 of tensors does not require grad"),
])  # fmt: skip
def test_a_broken_package_is_not_taken(install_flash: Install, text: str, reason: str) -> None:
    """The run goes on with the others; asked for, it is an error with the reason."""
    install_flash(flash3=text if "calls," not in text else "raise ImportError('it fails here: ImportError')", flash2=FLASH2)
    found = find_candidates("auto", USE)
    assert found.names == ("flash2", "sdpa") and reason in found.lacks["flash3"]
    with pytest.raises(RuntimeError, match=r"--attention-backend flash3 cannot be used: .*Use --attention-backend auto") as error:
        find_candidates("flash3", USE)
    assert reason in str(error.value)


def test_version_4_alone_is_found(install_flash: Install) -> None:
    """Its folder is no package then; looking for it runs no code of version 2 where that is there."""
    install_flash(flash4=FLASH4)
    assert availability.find("flash_attn.cute").available and not availability.find("flash_attn").available
    assert find_candidates("flash", USE).names == ("flash4",)
    install_flash(flash4=FLASH4, flash2="raise SystemExit('version 2 was imported')")
    assert availability.installed("flash_attn.cute").available


def test_flash_is_any_version_and_an_error_without_one(install_flash: Install) -> None:
    install_flash((8, 0))
    with pytest.raises(RuntimeError) as error:
        find_candidates("flash", USE)
    assert str(error.value) == (
        "--attention-backend flash cannot be used: flash4, flash3: it has no kernels for compute capability 8.0; flash2: flash-attn is not"
        " installed. Use --attention-backend auto."
    )
    install_flash(**ALL)
    assert find_candidates("flash", USE).names == ("flash4", "flash3", "flash2")


def test_through_torch_where_a_packages_own_function_fails(install_flash: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is put into torch's dispatcher for the example, and taken out again; once it is chosen it stays."""
    registry = Registry(("FA4",))
    monkeypatch.setattr(attention_choice, "attention_of_torch", registry)
    install_flash(flash3="x = 1", flash4="x = 1")
    found = find_candidates("auto", USE)
    assert found.names == ("sdpa-fa4", "sdpa") and registry.history == ["FA4", None]
    assert "does not expose FA3" in found.lacks["sdpa-fa3"] and "no attribute" in found.lacks["flash4"]
    attention_choice._trial.cache_clear()
    assert find_candidates("flash4", USE).names == ("sdpa-fa4",) and registry.current is None
    del registry.history[2:]
    attention_choice.activate("sdpa-fa4")
    attention_choice.activate("sdpa-fa4")
    assert registry.current == "FA4" and registry.history == ["FA4", None, "FA4"]
    attention_choice.activate("flash2")
    assert registry.current is None


def test_a_torch_that_cannot_change_its_kernel_back(install_flash: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_choice, "attention_of_torch", object())
    install_flash(flash4="x = 1")
    found = find_candidates("auto", USE)
    assert found.names == ("sdpa",) and "cannot take FA4 for its flash kernel" in found.lacks["sdpa-fa4"]


def test_torchs_own_registry_has_what_is_called() -> None:
    from torch.nn import attention

    assert {"FA3", "FA4"} <= set(attention.list_flash_attention_impls()) and attention.current_flash_attention_impl() is None
    assert callable(attention.activate_flash_attention_impl) and callable(attention.restore_flash_attention_impl)


def test_no_fused_kernel_is_said_with_its_cost(install_flash: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    """As bf16 on a GPU before Ampere."""
    install_flash((7, 0))
    monkeypatch.setattr(attention_choice, "example_error", lambda *_: 1 / 0)
    chosen = choose_kernel("auto", "cpu", torch.bfloat16, use=USE)
    assert chosen.name == "reference" and "ZeroDivisionError" in chosen.reason and chosen.reason.endswith("of tokens are in memory")


CHOICES = [
    # backend, dtype, dropout, on a GPU, kernel, part of the reason
    ("auto", torch.float32, 0.0, False, "sdpa", "flash-attn not used: it needs a GPU"),
    ("auto", torch.float32, 0.1, False, "reference", "dropout on CPU"), ("fused", torch.float32, 0.0, False, "sdpa", "asked for"),
    ("fused", torch.float32, 0.1, False, "sdpa", "on a CPU the scores of all pairs of tokens are in memory"),
    ("fused", torch.float32, 0.1, False, "sdpa", "attention dropout's masks depend on the layout"),
    ("local", torch.float32, 0.1, False, "reference", "asked for"), ("unfused", torch.float16, 0.0, True, "reference", "asked for"),
    ("auto", torch.bfloat16, 0.1, True, "flash2", "attention dropout's masks depend on the layout"),
    ("auto", torch.float32, 0.0, True, "sdpa", "not float32"), ("fused", torch.float16, 0.0, True, "sdpa", "asked for"),
    ("auto", torch.float64, 0.0, True, "reference", "no fused kernel computes in float64"),
    ("fused", torch.float64, 0.0, True, "reference", "the scores of all pairs of tokens are in memory"),
    ("flash2", torch.float16, 0.0, True, "flash2", "asked for"),
]  # fmt: skip


@pytest.mark.parametrize("backend, dtype, dropout, on_gpu, kernel, reason", CHOICES)
def test_the_choice_without_timing(
    install_flash: Install, monkeypatch: pytest.MonkeyPatch, backend: str, dtype: torch.dtype, dropout: float, on_gpu: bool, kernel: str,
    reason: str,
) -> None:  # fmt: skip
    install_flash((8, 0), **ALL)
    if not on_gpu:
        monkeypatch.setattr(availability, "GPU", "cuda")
    chosen = choose_kernel(backend, "cpu", dtype, dropout, replace(USE, dtype=dtype, dropout=dropout))
    assert chosen.name == kernel and reason in chosen.reason
    assert ("depend on the layout" in chosen.reason) == (dropout > 0 and kernel != "reference")


def test_a_named_kernel_without_a_gpu(install_flash: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install_flash(**ALL)
    monkeypatch.setattr(availability, "GPU", "cuda")
    with pytest.raises(RuntimeError, match="--attention-backend flash4 cannot be used: flash4: it needs a GPU"):
        find_candidates("flash4", USE)
    assert not calls, "nothing was run"


def test_the_example_is_what_the_run_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Width, groups, mask, window, documents; its error is of forward and backward."""
    seen: list[Any] = []

    def attend(q: Any, k: Any, v: Any, mask: AttentionMask, *, kernel: str, kept: Any) -> Any:
        assert kept is None
        seen.append((q.shape, k.shape, q.dtype, mask.causal, mask.window, mask.documents is not None))
        return core_attention(q, k, v, mask, kernel="reference") * (1.5 if kernel == "cudnn" else 1.0)

    monkeypatch.setattr(attention_choice, "core_attention", attend)
    use = replace(USE, window=900, documents=True)
    assert attention_choice.example_error("cudnn", use) == pytest.approx(0.5, abs=0.02)
    assert attention_choice.example_error("flash2", use) == 0.0
    s = seen[0][0][0]
    assert seen[0] == ((s, 2, 3, 16), (s, 2, 1, 16), torch.bfloat16, True, 17, True)


# results kept for a recomputation

FORWARD = "right = _flash_attn_fwd\ndef _flash_attn_fwd(q, k, v, **more):\n    out, lse = right(q, k, v, **more)\n    return {}\n"
TAKES = "_flash_attn_fwd.__signature__ = __import__('inspect').signature(right)\n"


@pytest.mark.parametrize("use", [{}, {"window": 5}, {"documents": True}, {"causal": False}, {"documents": True, "window": 5}])
@pytest.mark.parametrize("name", FLASH_NAMES)
def test_results_are_kept_if_the_example_is_right_with_them(install_flash: Install, name: FlashName, use: dict[str, Any]) -> None:
    install_flash(**ALL)
    assert why_repeated(name, replace(USE, **use)) == ""
    packed = " packed" if use.get("documents") else ""
    assert [called for called, _ in calls] == [f"{name}{packed} forward", f"{name}{packed} backward"], "the second pass computes nothing"


@pytest.mark.parametrize(("results", "reason"), [
    ("out, lse + 0.25", "it is wrong here: an example differs"),  # base 2 instead of e, another scale
    ("out, lse * 1.4426950408889634", "it is wrong here: an example differs"),
    ("out * 1.2, lse", "it is wrong here: an example differs"), ("out, lse.flip(1)", "it is wrong here: an example differs"),
    ("out, None", "it fails here: RuntimeError: FlashAttention 4 gives its results in another form"),
])  # fmt: skip
def test_results_that_backward_cannot_use_are_not_kept(install_flash: Install, results: str, reason: str) -> None:
    install_flash(flash4=FLASH4, under_flash4=UNDER_FLASH4 + FORWARD.format(results) + TAKES)
    assert reason in why_repeated("flash4", USE)
    assert lack("flash4", USE) == "", "it is used all the same"


def test_what_is_known_needs_no_example(install_flash: Install) -> None:
    install_flash(**ALL)
    assert "dropout" in why_repeated("flash2", replace(USE, dropout=0.1))
    assert "float32" in why_repeated("flash3", replace(USE, dtype=torch.float32))
    assert not calls
