"""A message instead of what torch and numpy make of too little address space: import errors, aborts in C++, or silence."""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec

from megatron_sp.utils.errors import ConfigError

# Of a process that has imported it, measured: torch for CPUs, with its threads; numpy with a single one for linear algebra.
NEEDED = {"torch": 1300 << 20, "numpy": 105 << 20}


def require_address_space(package: str = "torch") -> None:
    """Raises ConfigError where this process may not have what a package needs."""
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
    """Asked first where a module is; finds none, and looks at the limit before one of those packages is loaded."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if fullname in NEEDED:
            require_address_space(fullname)
        return None


def watch_imports() -> None:
    """From here on, importing torch or numpy raises ConfigError where there is too little address space; programs then need no check."""
    if not any(isinstance(finder, _BeforeImports) for finder in sys.meta_path):
        sys.meta_path.insert(0, _BeforeImports())
