"""The tutorials do what they say: every file of a page is written and every command run, in order, in an empty folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.pages import first_missing, run_page, steps_of
from support.paths import ROOT
from support.warm_python import WarmPython

# those that tell where the repository is; those of bert.md are tested in dist/test_finetune_classifier.py
PAGES = sorted(page for page in (ROOT / "docs/tutorials").glob("*.md") if "export MEGATRON_SP=" in page.read_text())
LONGEST = 170  # lines

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def variables(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """What a reader has who has followed the first lines of a page: the environment, and MEGATRON_SP, where the repository is."""
    with WarmPython(tmp_path_factory.mktemp("bin")) as warm:
        python = str(warm.folder / "python")
        yield {
            "PATH": f"{warm.folder}:{os.environ['PATH']}", "MEGATRON_SP": str(ROOT), "PYTHON": python, "PYTHON_EXEC": python,
            "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
        }  # fmt: skip


@pytest.mark.often("add_a_model")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_page_does_what_it_says(tmp_path: Path, variables: dict[str, str], page: Path) -> None:
    assert len(page.read_text(encoding="utf-8").splitlines()) <= LONGEST
    assert run_page(page, tmp_path, variables)


@pytest.mark.long
@pytest.mark.skipif(not (ROOT / ".venv/bin/megatron-sp").exists(), reason="bash scripts/setup_env.sh makes the .venv that readers have")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_page_with_the_interpreter_of_a_reader(tmp_path: Path, page: Path) -> None:
    """Nothing stands in for python here: what each program imports, it imports itself."""
    path = f"{ROOT / '.venv/bin'}:{os.environ['PATH']}"
    assert run_page(page, tmp_path, {"PATH": path, "MEGATRON_SP": str(ROOT), "CUDA_VISIBLE_DEVICES": ""})


def test_a_page_that_is_wrong_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text('```python title="a.py"\nprint(1)\n```\n```bash\necho loss 1.25; echo end\n```\n```text\nloss 1...\n...\nend\n```\n')
    assert [step.title for step in steps_of(page)] == ["a.py", ""] and run_page(page, tmp_path, {}) == ["loss 1.25\nend\n"]
    page.write_text("```bash\necho loss 1.25\n```\n\n```text\nloss 2...\n```\n")
    with pytest.raises(AssertionError, match=r"not printed: loss 2\.\.\."):
        run_page(page, tmp_path, {})
    page.write_text("```bash\nfalse\necho on\n```\n")
    with pytest.raises(AssertionError, match="exit code 1"):
        run_page(page, tmp_path, {})
    page.write_text("```console\n$ ls\n```\n```text\nwho printed this?\n```\n")
    with pytest.raises(ValueError, match="no commands before this output"):
        steps_of(page)
    assert first_missing(["a", "b"], "b\na\n") == "b", "in this order"
