"""A torch that is too old: one clear sentence before it is imported, by every program."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import ROOT
from support.training import MOCK, TINY

from megatron_sp.utils.entry_point import OLDEST_TORCH, require_torch, version_numbers
from megatron_sp.utils.errors import ConfigError


# None, "" and unknown: an installation whose metadata is damaged, or a build of somebody's own
@pytest.mark.parametrize("version, is_good", [
    ("2.10.0", False), ("2.9.1+cu128", False), ("1.13", False), ("2.11.0", True), ("2.11.0a0+nv26", True),
    ("2.13.0+cpu", True), ("3.0", True), (None, True), ("", True), ("unknown", True),
    (importlib.metadata.PackageNotFoundError("torch"), True),
])  # fmt: skip
def test_versions(monkeypatch: pytest.MonkeyPatch, version: str | Exception | None, is_good: bool) -> None:
    def installed(_: str) -> str | None:
        if isinstance(version, Exception):
            raise version
        return version

    monkeypatch.setattr(importlib.metadata, "version", installed)
    if is_good:
        require_torch()
        return
    with pytest.raises(ConfigError) as error:
        require_torch()
    rule = "is too old: this package needs 2.11 or later (torch.addmm with out_dtype and out"
    assert str(error.value).startswith(f"torch {version} {rule}")
    assert "pip install 'torch>=2.11'" in str(error.value)


def test_a_program_ends_with_that_sentence(tmp_path: Path) -> None:
    """As with an older one installed in front of ours; it is never imported."""
    info = tmp_path / "torch-2.9.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.9.0\n")
    (tmp_path / "torch.py").write_text("raise SystemExit('it was imported')\n")
    for words in (["pretrain", "gpt", *TINY, *MOCK, "--train-iters", "1"], ["generate", "--load", "x", "--prompt", "x"]):
        done = subprocess.run(
            [sys.executable, "-m", "megatron_sp", *words],
            capture_output=True,
            text=True,
            env={"PYTHONPATH": f"{tmp_path}:{ROOT}"},
            cwd=tmp_path,
        )
        assert done.returncode == 2, (words, done.stdout, done.stderr)
        assert "torch 2.9.0 is too old: this package needs 2.11 or later" in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_every_place_names_the_same_version() -> None:
    words = ".".join(map(str, OLDEST_TORCH))
    assert f'"torch>={words}"' in (ROOT / "setup.py").read_text()
    assert f"({words} or later)" in (ROOT / "README.md").read_text()
    lowest = re.search(r'TORCH_RANGE="\((\d+), (\d+)\) <=', (ROOT / "scripts" / "setup_env.sh").read_text())
    assert lowest and tuple(map(int, lowest.groups())) == OLDEST_TORCH
    assert version_numbers("2.13.0a0+cu1") == (2, 13, 0) and version_numbers("x") == ()
