"""The doctor's report: what it finds on this machine, and what it says about machines that lack something."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import re
import sys
import types
from pathlib import Path

import pytest
import torch
from support.paths import ROOT

from megatron_sp.commands import doctor
from megatron_sp.commands.doctor import Finding, examine, run, version_numbers
from megatron_sp.ops import availability


def row(name: str) -> Finding:
    (found,) = (r for r in examine() if r.name == name)
    return found


@pytest.fixture(autouse=True)
def _forget() -> None:
    availability.installed.cache_clear()
    availability.find.cache_clear()


def test_this_machine_can_train(capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 0
    text = capsys.readouterr().out
    assert "megatron-sp doctor" in text and "Everything that training needs is installed." in text
    assert {r.name for r in examine()} >= {"Python", "torch", "backend gloo", "required packages", "kernel apex", "disk", "processors"}
    assert all(r.status in ("ok", "warn") for r in examine())
    assert all(r.remedy for r in examine() if r.status == "warn")


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(as_json=True) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [set(r) for r in rows] == [{"name", "status", "found", "remedy"}] * len(rows)


def test_the_versions_are_those_of_setup_py() -> None:
    text = (ROOT / "setup.py").read_text()
    block = text[text.index("install_requires=[") : text.index("extras_require=")]
    required = dict(re.findall(r'"([\w-]+)>=([\d.]+)"', block))
    assert required.pop("torch") == ".".join(map(str, doctor.OLDEST_TORCH))
    assert required == doctor.REQUIRED


@pytest.mark.parametrize(("version", "status"), [
    ("2.9.1", "lack"), ("2.10.0", "lack"), ("2.11.0a0+nv25", "ok"), ("2.13.0+cpu", "ok"), ("2.14.0", "warn"), ("3.0", "warn"),
    ("1.13", "lack"),
])  # fmt: skip
def test_torch_versions(monkeypatch: pytest.MonkeyPatch, version: str, status: str, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    assert row("torch").status == status
    assert run() == (status == "lack")
    assert ("1 required thing(s) lack" in capsys.readouterr().out) == (status == "lack")


def test_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # what an import then raises is ImportError
    assert row("torch").status == "lack" and "setup_env.sh" in row("torch").remedy
    assert not [r for r in examine() if "could not be examined" in r.found]


def test_old_and_missing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name == "einops":
            raise importlib.metadata.PackageNotFoundError(name)
        return "0.2.0" if name == "sentencepiece" else real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = row("required packages")
    assert (found.status, found.found) == ("lack", "einops absent, sentencepiece 0.2.0")
    assert found.remedy == "pip install 'einops>=0.8.2' 'sentencepiece>=0.2.1'"


def test_a_gpu_without_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    prop = types.SimpleNamespace(major=7, minor=5, name="Tesla T4", total_memory=16 * doctor.GIB)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: prop)
    found = row("GPU 1")
    assert found.status == "warn" and "Tesla T4, 16 GiB, capability 7.5" in found.found and "--fp16" in found.remedy


@pytest.mark.parametrize("variables, status, words", [
    ({}, "warn", "export PYTORCH_ALLOC_CONF=expandable_segments:True"),
    ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, "warn",
     "export PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:64,expandable_segments:True"),
    ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, "warn", "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"),
    ({"PYTORCH_CUDA_ALLOC_CONF": "a:1, expandable_segments:True"}, "ok", ""),
    ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, "ok", ""),
    ({"PYTORCH_ALLOC_CONF": "a:1", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, "warn",
     "export PYTORCH_ALLOC_CONF=a:1,expandable_segments:True"),
])  # fmt: skip
def test_the_allocator_of_a_gpu(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], status: str, words: str) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    assert not list(doctor._allocator()), "without a GPU it does not matter"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    (row,) = doctor._allocator()
    assert (row.name, row.status) == ("allocator", status) and row.remedy.endswith(words)


def test_a_gpu_that_this_torch_cannot_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.os.path, "exists", lambda path: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert row("devices").remedy == "install a CUDA build of torch"
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert "driver" in row("devices").remedy


def test_apex_of_pypi_is_told_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    make_package(tmp_path, "apex", "0.9.10.dev0")
    monkeypatch.syspath_prepend(tmp_path)
    found = row("kernel apex")
    assert found.status == "warn" and "PyPI's apex 0.9.10.dev0, not NVIDIA's" in found.found
    assert found.remedy == "pip uninstall apex"
    assert not any("pip install apex" in r.remedy for r in examine())


def test_apex_of_nvidia_is_looked_at_with_its_extensions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """apex itself is not run, and on a machine without a GPU its extensions are not either."""
    package = make_package(tmp_path, "apex", "0.1")
    (package / "normalization").mkdir()
    (package / "normalization" / "fused_layer_norm.py").write_text("")
    (tmp_path / "amp_C.py").write_text("raise OSError('undefined symbol: _ZN3c10')\n")
    monkeypatch.syspath_prepend(tmp_path)

    def look(gpu: bool) -> Finding:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
        availability.installed.cache_clear()
        (found,) = (r for r in doctor._kernels() if r.name == "kernel apex")
        return found

    found = look(gpu=False)
    assert (found.status, found.found) == ("warn", "apex was built without its extension fused_layer_norm_cuda")
    assert "with its C++ and CUDA extensions" in found.remedy
    (tmp_path / "fused_layer_norm_cuda.py").write_text("")
    importlib.invalidate_caches()
    assert look(gpu=False) == Finding("kernel apex", "ok", "0.1 (AdamW and norms, --fused-kernels)")
    assert look(gpu=True).found == "amp_C of apex is broken: OSError: undefined symbol: _ZN3c10"
    sys.modules.pop("fused_layer_norm_cuda", None)


def make_package(where: Path, name: str, version: str, init: str = "raise SystemExit('executed')\n") -> Path:
    (where / name).mkdir()
    (where / name / "__init__.py").write_text(init)
    info = where / f"{name.replace('_', '-')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n")
    return where / name


def test_a_folder_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**kwargs: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(doctor.tempfile, "TemporaryFile", full)
    assert row("disk").status == "warn" and "Read-only file system" in row("disk").found and "--save DIR" in row("disk").remedy


def test_little_of_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = types.SimpleNamespace(total=64 * 2**20, free=64 * 2**20)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage)
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda which: (256, 4096))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 10**6)
    monkeypatch.setenv("OMP_NUM_THREADS", "1000000")
    assert "--ipc=host" in row("shared memory").remedy and "--save" in row("disk").remedy
    assert "ulimit -n 4096" in row("open files").remedy and "OMP_NUM_THREADS=1000000" in row("processors").remedy


def test_a_look_that_fails_does_not_end_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(which: int) -> None:
        raise ValueError("no such limit")

    monkeypatch.setattr(doctor.resource, "getrlimit", broken)
    assert row("open files") == Finding("open files", "warn", "could not be examined: ValueError: no such limit")
    assert row("Python").status == "ok"


def test_plain_lines_where_rich_lacks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert run() == 0
    assert "ok   Python: 3." in capsys.readouterr().out


def test_numbers() -> None:
    assert version_numbers("2.13.0a0+cu1") == (2, 13, 0) and version_numbers("dev") == ()
    assert version_numbers("0.2.1") > version_numbers("0.2")
