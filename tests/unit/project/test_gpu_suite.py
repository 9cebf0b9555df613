"""What can be said of the GPU tests where there is no GPU: they import, nothing is collected, and `make test-gpu` says why."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from support.paths import ROOT

from megatron_sp.comm import groups
from megatron_sp.utils.errors import ConfigError
from megatron_sp.utils.launch import Launch

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@without_gpu
def test_the_modules_import_and_nothing_is_collected() -> None:
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "--collect-only", "tests/gpu"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 5 and "no tests" in done.stdout  # 5: nothing to run; a module that does not import is another code


@without_gpu
def test_make_says_that_there_is_no_gpu() -> None:
    done = subprocess.run(["make", "test-gpu", f"PYTHON={sys.executable}"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2 and "sees no GPU" in done.stderr
    assert "pytest" not in done.stdout


def of_gpu_tests(name: str) -> ModuleType:
    """Return a module of tests/gpu, which is on no path here."""
    spec = importlib.util.spec_from_file_location(f"gpu_suite_{name}", ROOT / f"tests/gpu/{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = sys.path.copy()
    spec.loader.exec_module(module)
    sys.path[:] = before
    return module


# as torch 2.11 and 2.13 say them
SAID = (
    "Warning: Profiler clears events at the end of each cycle. Only events from the current cycle will be reported. To keep events across"
    " cycles, set acc_events=True.",
    "Synchronization debug mode is a prototype feature and does not yet detect all synchronizing operations (Triggered internally at"
    " torch/csrc/cuda/Module.cpp:900.)",
    "Attempting to run cuBLAS, but there was no current CUDA context! Attempting to set the primary context... (Triggered internally at"
    " aten/src/ATen/cuda/CublasHandlePool.cpp:330.)",
    "Memory Efficient attention defaults to a non-deterministic algorithm. To explicitly enable determinism call"
    " torch.use_deterministic_algorithms(True, warn_only=False).",
)
WAIT = "called a synchronizing CUDA operation (Triggered internally at c10/cuda/CUDAFunctions.cpp:150.)"


@pytest.fixture
def rules() -> list[str]:
    """The filters that the hook gives to a test of the folder, and to no other."""
    conftest = of_gpu_tests("conftest")
    marks: dict[str, list[str]] = {"gpu": [], "unit": []}
    items = [
        SimpleNamespace(
            path=Path(ROOT / f"tests/{place}/test_x.py"), add_marker=lambda mark, place=place: marks[place].append(mark.args[0])
        )
        for place in marks
    ]
    conftest.pytest_collection_modifyitems(items)
    assert marks["unit"] == []
    return marks["gpu"]


def test_what_torch_says_of_itself_on_a_gpu_is_no_error_and_all_else_is(rules: list[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for rule in rules:
            action, message, category = rule.split(":")
            assert (action, category) == ("ignore", "UserWarning")
            warnings.filterwarnings("ignore", message, UserWarning)
        for message in SAID:
            warnings.warn(message, UserWarning, stacklevel=1)
        for message in (WAIT, "Memory Efficient attention", "a profiler clears events", "cuBLAS"):
            with pytest.raises(UserWarning, match=re.escape(message)):
                warnings.warn(message, UserWarning, stacklevel=1)


class _NCCLWorld:
    """As much of a default process group over eight GPUs as the choice of options looks at."""

    def size(self) -> int:
        return 8

    def _get_backend(self, device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(options=SimpleNamespace(_timeout=timedelta(minutes=3)))


@pytest.mark.parametrize("size, urgent, wanted", [(1, True, None), (4, True, True), (4, False, False), (8, True, True), (8, False, None)])
def test_options_of_nccl_groups(size: int, urgent: bool, wanted: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """tp and sp have a communicator and a stream of high priority of their own, even where they are everybody."""
    made = SimpleNamespace(Options=lambda is_high_priority_stream: SimpleNamespace(urgent=is_high_priority_stream))
    monkeypatch.setattr(dist, "ProcessGroupNCCL", made, raising=False)
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=_NCCLWorld()))
    monkeypatch.setattr(dist, "get_backend", lambda group: "nccl")
    options = groups._options(size, torch.device("cuda", 0), urgent)
    assert (None if options is None else options.urgent) == wanted
    assert options is None or options._timeout == timedelta(minutes=3)


class _Options:
    """As much of ``ProcessGroupNCCL.Options`` as is set; NCCL's configuration has these fields from torch 2.11 on."""

    def __init__(self, is_high_priority_stream: bool) -> None:
        self.urgent, self._timeout = is_high_priority_stream, timedelta(0)
        self.config = SimpleNamespace(max_ctas=-(2**31), cta_policy=-(2**31))


def test_ctas_of_sp_and_dp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each axis has its own; with a setting dp has a communicator of its own even where it is everybody."""
    made = SimpleNamespace(Options=_Options, NCCL_CTA_POLICY_EFFICIENCY=1)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", made, raising=False)
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=_NCCLWorld()))
    monkeypatch.setattr(dist, "get_backend", lambda group: "nccl")
    nccl, unset = groups.NcclOptions(sp_ctas=8, dp_ctas=4, cta_policy="efficiency"), -(2**31)
    found = {axis: groups._options(8, torch.device("cuda", 0), axis != "dp", nccl.of(axis)) for axis in ("tp", "sp", "cp", "dp")}
    fields = {axis: (options.urgent, options.config.max_ctas, options.config.cta_policy) for axis, options in found.items()}
    assert fields == {"tp": (True, unset, unset), "sp": (True, 8, 1), "cp": (True, 8, 1), "dp": (False, 4, 1)}
    assert groups.NcclOptions().of("dp") == {} and groups.NcclOptions(sp_ctas=3).of("dp") == {}


def test_settings_that_nccl_here_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(), raising=False)
    with pytest.raises(ConfigError, match=r"--nccl-cta-policy zero: torch .* an NCCL without NCCL_CTA_POLICY_ZERO; use default"):
        groups.NcclOptions(cta_policy="zero").of("sp")
    monkeypatch.setenv("NCCL_MIN_CTAS", "16")
    with pytest.raises(ConfigError, match=r"--nccl-dp-ctas \(8\) is less than NCCL_MIN_CTAS \(16\)"):
        groups.NcclOptions(dp_ctas=8).of("dp")
    assert groups.NcclOptions(dp_ctas=16).of("dp") == {"max_ctas": 16}


def test_they_are_found_out_before_the_ranks_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """On every rank alike, since the flags are."""
    from megatron_sp.config.flags.arguments import config_from_args
    from megatron_sp.training import setup

    flags = "--num-layers 1 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --vocab-size 9 --mock-data --lr 1 --train-iters 1 --bf16"
    config = config_from_args([*flags.split(), "--nccl-cta-policy", "efficiency"], world_size=2)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(), raising=False)
    monkeypatch.setattr(setup, "choose_device", lambda *_: torch.device("cuda", 0))
    monkeypatch.setattr(setup, "set_threads", lambda *_: 1)
    monkeypatch.setattr(setup, "init_process_group", lambda *_: pytest.fail("the ranks met"))
    with pytest.raises(ConfigError, match="--nccl-cta-policy efficiency: torch"):
        setup.join(config, Launch(0, 0, 2, 2, 0))
