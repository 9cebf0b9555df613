"""What lies in a clone besides the project is not checked: users' scripts and corpora, and what README's commands make."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from support.paths import FILES, FOLDERS, ROOT, project_files, tracked_names

needs_git = pytest.mark.skipif(tracked_names(ROOT) is None, reason="not a clone")


def names(root: Path, *patterns: str) -> list[str]:
    return [str(path.relative_to(root)) for path in project_files(*patterns, root=root)]


@pytest.fixture(params=["git", "archive"])
def clone(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A small project, as a clone and as an unpacked archive (in a repository of something else), with files of its user's."""
    for name in ("setup.py", "tests/dist/test_a.py", "docs/page.md", "scripts/gone.py"):
        (tmp_path / "clone" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "clone" / name).touch()
    root = tmp_path / "clone"
    subprocess.run(["git", "init", "-q", "."], cwd=root if request.param == "git" else tmp_path, check=True)
    if request.param == "git":
        subprocess.run(["git", "add", "."], cwd=root, check=True)
    (root / "scripts/gone.py").unlink()
    for name in ("mine.py", "notes.md", "corpus.txt", "first_light/x.py", "tests/__pycache__/x.py"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).touch()
    return root


def test_only_the_projects_own_files_count(clone: Path) -> None:
    assert names(clone, "*.py") == ["setup.py", "tests/dist/test_a.py"]
    assert names(clone, "*") == ["docs/page.md", "setup.py", "tests/dist/test_a.py"]


@needs_git
def test_the_list_for_archives_has_all_that_git_has() -> None:
    tracked = tracked_names(ROOT) or []
    assert {name.split("/")[0] for name in tracked} == {*FILES, *FOLDERS}


@needs_git
@pytest.mark.parametrize("name", ["corpus.jsonl", "vocab.txt", "tokenizer.model", "data/corpus.bin", "runs/x", "first_light/x"])
def test_git_ignores_what_the_pages_make(name: str) -> None:
    assert subprocess.run(["git", "check-ignore", "-q", name], cwd=ROOT).returncode == 0


def test_a_folder_in_the_root_does_not_change_the_order_of_imports(tmp_path: Path) -> None:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "first_light").mkdir()
    (tmp_path / "x.py").write_text("import first_light\nimport torch\n\nimport megatron_sp\n\nprint(first_light, torch, megatron_sp)\n")
    ruff = pytest.importorskip("ruff").find_ruff_bin()
    done = subprocess.run([ruff, "check", "--no-cache", "x.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
