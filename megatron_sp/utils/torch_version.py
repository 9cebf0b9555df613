"""The oldest torch that this package runs on, and a message in place of the errors that an older one would end in.

2.10 brought what the code calls without asking: ``torch.addmm(..., out_dtype=, out=)``, with which 16-bit products are
added to fp32 gradients in place, and a ``weights_only`` reader that a crafted file cannot make run code
(CVE-2026-24747). 2.11 is the oldest that the tests are run on (``make test-oldest``).
"""

from __future__ import annotations

import importlib.metadata
import re

from megatron_sp.utils.errors import ConfigError

OLDEST_TORCH, NEWEST_TESTED_TORCH = (2, 11), (2, 13)


def numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: ``2.13.0a0+cu1`` gives (2, 13, 0)."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found.group().split(".")) if found else ()


def require_torch() -> None:
    """Check the installed torch without importing it; one that pip does not know, or whose version says nothing, is not checked.

    Raises:
        ConfigError: it is too old.
    """
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return
    found = numbers(version or "")[:2]  # None: the metadata is damaged
    if found and found < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        raise ConfigError(
            f"torch {version} is too old: this package needs {oldest} or later (torch.addmm with out_dtype and out, safe reading of"
            f" weights): pip install 'torch>={oldest}', or bash scripts/setup_env.sh in a folder without .venv"
        )
