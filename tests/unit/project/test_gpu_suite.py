"""What can be said of the GPU tests where there is no GPU: they import, nothing is collected, and `make test-gpu` says why."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from support.paths import ROOT

from megatron_sp.comm import groups

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
    options = groups._options(size, torch.device("cuda", 0), urgent=urgent)
    assert (None if options is None else options.urgent) == wanted
    assert options is None or options._timeout == timedelta(minutes=3)
