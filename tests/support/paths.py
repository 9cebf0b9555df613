"""Places in the repository, and the files that belong to it: ``python tests/support/paths.py '*.py'`` lists them for xargs -0.

What users keep in their clone is none of the checks' business: a script of their own, a corpus with typing errors, what README's commands
make. git knows which files are the project's. Where it cannot say (an unpacked archive), they are the files in the project's folders.
"""

from __future__ import annotations

import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (".ci", "benchmarks", "docs", "examples", "megatron_sp", "scripts", "tests", "tools")
FILES = (
    ".gitignore", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile", "README.md", "mkdocs.yml", "pretrain_bert.py",
    "pretrain_gpt.py", "pyproject.toml", "setup.py",
)  # fmt: skip


def project_files(*patterns: str, root: Path = ROOT) -> list[Path]:
    """Return the project's files whose names match one of the patterns, sorted."""
    names = tracked_names(root)
    if names is None:
        found = [path for folder in FOLDERS for path in (root / folder).rglob("*") if path.parent.name != "__pycache__"]
        names = [str(path.relative_to(root)) for path in (*found, *(root / name for name in FILES))]
    paths = (root / name for name in names if any(fnmatch(Path(name).name, pattern) for pattern in patterns))
    return sorted(path for path in paths if path.is_file())


def tracked_names(root: Path) -> list[str] | None:
    """Return the names of the files that git tracks under ``root``; None if the project is not git's here."""
    try:
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    names = listed.stdout.split("\0")
    return names[:-1] if "setup.py" in names else None  # without it this lies in a repository of something else


if __name__ == "__main__":
    sys.stdout.write("".join(f"{path.relative_to(ROOT)}\0" for path in project_files(*sys.argv[1:])))
