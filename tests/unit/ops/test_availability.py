"""Optional packages: present, absent, broken, and the wrong one of two with the same name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_sp.ops import availability
from megatron_sp.ops.availability import FOREIGN_APEX, find, installed, load


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    import sys

    for name in ("flash_attn", "apex"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    installed.cache_clear()
    find.cache_clear()
    yield
    for name in ("flash_attn", "apex"):
        sys.modules.pop(name, None)
    installed.cache_clear()
    find.cache_clear()


def package(where: Path, name: str, init: str, version: str = "") -> Path:
    (where / name).mkdir()
    (where / name / "__init__.py").write_text(init)
    if version:
        info = where / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n")
    return where / name


def test_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(availability.importlib.util, "find_spec", lambda name: None)
    for kernel in (installed("flash_attn"), find("flash_attn")):
        assert (kernel.available, kernel.version, kernel.reason) == (False, "", "flash-attn is not installed")
    with pytest.raises(RuntimeError, match="flash-attn is not installed"):
        load("flash_attn")


def test_a_folder_of_that_name_is_no_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "flash_attn").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert installed("flash_attn").reason == "flash-attn is not installed"


def test_present(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package(tmp_path, "flash_attn", "flash_attn_func = 7\n", "2.8.3")
    monkeypatch.syspath_prepend(tmp_path)
    assert find("flash_attn") == installed("flash_attn") == availability.Kernel("flash_attn", True, "2.8.3", "")
    assert load("flash_attn").flash_attn_func == 7


@pytest.mark.parametrize(("init", "reason"), [
    ("import no_such_library", "flash-attn cannot be imported: No module named 'no_such_library'"),
    ("1 / 0", "flash-attn is broken: ZeroDivisionError: division by zero"),
])  # fmt: skip
def test_installed_but_unusable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, init: str, reason: str) -> None:
    package(tmp_path, "flash_attn", init, "2.8.3")
    monkeypatch.syspath_prepend(tmp_path)
    assert installed("flash_attn").available  # looking runs nothing
    assert (find("flash_attn").available, find("flash_attn").reason) == (False, reason)


def test_the_answer_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package(tmp_path, "flash_attn", f"open({str(tmp_path / 'count')!r}, 'a').write('x')\nraise ValueError")
    monkeypatch.syspath_prepend(tmp_path)
    assert find("flash_attn") is find("flash_attn")
    assert (tmp_path / "count").read_text() == "x"


def test_foreign_apex_is_not_executed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package(tmp_path, "apex", f"open({str(tmp_path / 'ran')!r}, 'w')\n", "0.9.10")
    monkeypatch.syspath_prepend(tmp_path)
    assert (find("apex").available, find("apex").version, find("apex").reason) == (False, "0.9.10", FOREIGN_APEX)
    assert not (tmp_path / "ran").exists()


def test_nvidia_apex(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    root = package(tmp_path, "apex", "")
    (root / "normalization").mkdir()
    (root / "normalization" / "fused_layer_norm.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    assert find("apex") == availability.Kernel("apex", True)
