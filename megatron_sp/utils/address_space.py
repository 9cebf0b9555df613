"""Check for sufficient address space, without which torch and numpy fail with import errors, aborts in C++, or silently."""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec

from megatron_sp.utils.errors import ConfigError
from megatron_sp.utils.torch_version import require_torch

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
