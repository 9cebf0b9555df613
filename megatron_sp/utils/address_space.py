"""A message instead of what torch makes of too little address space: import errors, aborts in C++, or silence, none of them in words."""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec

from megatron_sp.utils.errors import ConfigError

TORCH_BYTES = 1300 << 20  # of a process that has imported torch for CPUs and started its threads, measured


def require_address_space() -> None:
    """Raises ConfigError where this process may not have what torch needs."""
    try:
        import resource
    except ImportError:  # no such limits here
        return
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY and limit < TORCH_BYTES:
        raise ConfigError(
            f"this process may have {limit / 2**20:.0f} MiB of address space (ulimit -v), and torch alone takes about"
            f" {TORCH_BYTES / 2**20:.0f}: raise the limit"
        )


class _BeforeTorch(MetaPathFinder):
    """Asked first where a module is; finds none, and looks at the limit before torch is loaded."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if fullname == "torch":
            require_address_space()
        return None


def watch_import_of_torch() -> None:
    """From here on, ``import torch`` raises ConfigError where there is too little address space; for programs, which then need no check."""
    if "torch" not in sys.modules and not any(isinstance(finder, _BeforeTorch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _BeforeTorch())
