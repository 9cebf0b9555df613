"""Check for sufficient address space, without which torch and numpy fail with import errors, aborts in C++, or silently.

It also refuses a torch that is too old. 2.10 brought what the code calls without asking: ``torch.addmm(..., out_dtype=,
out=)``, with which 16-bit products are added to fp32 gradients in place, and a ``weights_only`` reader that a crafted
file cannot make run code (CVE-2026-24747). 2.11 is the oldest that the tests are run on (``make test-oldest``).
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec

from megatron_sp.utils.errors import ConfigError

OLDEST_TORCH, NEWEST_TESTED_TORCH = (2, 11), (2, 13)
# Measured in a process that has imported it: torch for CPUs, with its threads; numpy with a single one for linear
# algebra.
NEEDED = {"torch": 1300 << 20, "numpy": 105 << 20}


def require_address_space(package: str = "torch") -> None:
    """Raise ConfigError if the process's address space limit is too low for a package."""
    try:
        import resource
    except ImportError:  # no such limits here
        return
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY and limit < NEEDED[package]:
        raise ConfigError(
            f"this process may have {limit / 2**20:.0f} MiB of address space (ulimit -v), and {package} alone takes about"
            f" {NEEDED[package] / 2**20:.0f}: raise the limit"
        )


class _BeforeImports(MetaPathFinder):
    """Import finder that finds nothing, but checks the limit before torch or numpy is imported, and torch's version."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if fullname in NEEDED:
            require_address_space(fullname)
        if fullname == "torch":
            require_torch()
        return None


def watch_imports() -> None:
    """Make importing torch or numpy raise ConfigError if there is too little address space or torch is too old: programs need no check."""
    if not any(isinstance(finder, _BeforeImports) for finder in sys.meta_path):
        sys.meta_path.insert(0, _BeforeImports())


def numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: ``2.13.0a0+cu1`` gives (2, 13, 0)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def require_torch() -> None:
    """Check the installed torch without importing it; one that pip does not know, or whose version says nothing, is not checked.

    Raises:
        ConfigError: it is too old.
    """
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return
    installed = numbers(version or "")[:2]  # None: the metadata is damaged
    if installed and installed < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        raise ConfigError(
            f"torch {version} is too old: this package needs {oldest} or later (torch.addmm with out_dtype and out, safe reading of"
            f" weights): pip install 'torch>={oldest}', or bash scripts/setup_env.sh in a folder without .venv"
        )
