"""Optional packages: which are available, in which version, or why not. The only module that tries to import them.

``installed`` only looks at files and metadata and runs no foreign code; ``find`` imports. A missing package is normal
and raises ImportError; any other exception means a broken installation, and its text is kept as the reason.

PyPI's package ``apex`` is unrelated to NVIDIA's, which is installed from its repository: they are distinguished by
their files, before any of their code is executed. The kernels of NVIDIA's are extension modules beside it, which a
build without CUDA lacks.

FlashAttention 4 is ``flash_attn.cute``; where it is alone, ``flash_attn`` is just a folder.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType


@dataclass(frozen=True)
class Kernel:
    """Availability of one optional package; ``reason`` is empty if it is available."""

    name: str
    available: bool
    version: str = ""
    reason: str = ""


@dataclass(frozen=True)
class _Optional:
    distribution: str  # the name that pip knows
    module: str  # what is imported


_OPTIONAL = {
    "flash_attn": _Optional("flash-attn", "flash_attn"),
    "flash_attn_interface": _Optional("flash_attn_3", "flash_attn_interface"),
    "flash_attn.cute": _Optional("flash-attn-4", "flash_attn.cute"),
    "apex": _Optional("apex", "apex"),
    "amp_C": _Optional("apex", "amp_C"),
    "fused_layer_norm_cuda": _Optional("apex", "fused_layer_norm_cuda"),
    "triton": _Optional("triton", "triton"),
    "tensorboard": _Optional("tensorboard", "torch.utils.tensorboard"),
    "wandb": _Optional("wandb", "wandb"),
    "matplotlib": _Optional("matplotlib", "matplotlib"),
    "transformers": _Optional("transformers", "transformers"),
    "starlette": _Optional("starlette", "starlette.applications"),
    "uvicorn": _Optional("uvicorn", "uvicorn"),
}
APEX_EXTENSIONS = ("amp_C", "fused_layer_norm_cuda")
"""Extension modules of NVIDIA's apex with its fused Adam and its fused norms."""
APEX_DEVICE = "cuda"
"""Type of the device that they run on; tests with a stand-in for them set it to the CPU."""
GPU = "cuda"
"""Type of the device that attention kernels run on; tests with stand-ins for them set it to the CPU."""
_APEX_FILES = ("optimizers/fused_adam.py", "normalization/fused_layer_norm.py")
FOREIGN_APEX = "the installed 'apex' is not NVIDIA's but another package of that name (remove it: pip uninstall apex)"


@cache
def installed(name: str) -> Kernel:
    """Return whether a package is installed, with its version, without running any of its code.

    Args:
        name: a package in this module's table, such as ``flash_attn``.
    """
    entry = _OPTIONAL[name]
    if name in APEX_EXTENSIONS:
        return _apex_extension(name)
    top, _, inside = name.partition(".")
    spec = importlib.util.find_spec(top)  # of a module inside a package it would run the package's code
    locations = [] if spec is None else spec.submodule_search_locations or []
    is_there = any((Path(place, inside) / "__init__.py").is_file() for place in locations) if inside else spec and spec.origin
    if spec is None or not is_there:  # without an origin it is just a folder of that name on the path
        return Kernel(name, False, reason=f"{entry.distribution} is not installed")
    version = _version(entry.distribution)
    if name == "apex" and not _is_nvidia_apex(spec.submodule_search_locations):
        return Kernel(name, False, version, FOREIGN_APEX)
    return Kernel(name, True, version)


@cache
def find(name: str) -> Kernel:
    """Return whether a package can be imported, with its version; the result of the first call is cached."""
    kernel = installed(name)
    if not kernel.available:
        return kernel
    what = f"{name} of apex" if name in APEX_EXTENSIONS else _OPTIONAL[name].distribution
    try:
        importlib.import_module(_OPTIONAL[name].module)
    except ImportError as error:
        return Kernel(name, False, kernel.version, f"{what} cannot be imported: {error}")
    except Exception as error:  # a broken extension can raise anything; the run goes on without it and says why
        return Kernel(name, False, kernel.version, f"{what} is broken: {type(error).__name__}: {error}")
    return kernel


def load(name: str, module: str | None = None) -> ModuleType:
    """Import and return the package's module in the table, or another module of the package.

    Raises:
        RuntimeError: the package is not available; the message is the reason.
    """
    kernel = find(name)
    if not kernel.available:
        raise RuntimeError(kernel.reason)
    return importlib.import_module(module or _OPTIONAL[name].module)


def _apex_extension(name: str) -> Kernel:
    apex = installed("apex")
    if not apex.available:
        return Kernel(name, False, apex.version, apex.reason)
    if importlib.util.find_spec(name) is None:
        return Kernel(name, False, apex.version, f"apex was built without its extension {name}")
    return Kernel(name, True, apex.version)


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _is_nvidia_apex(locations: list[str] | None) -> bool:
    return any((Path(place) / file).is_file() for place in locations or [] for file in _APEX_FILES)
