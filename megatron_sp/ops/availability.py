"""Optional packages: which are available, in which version, or why not. The only module that tries to import them.

PyPI's package ``apex`` is unrelated to NVIDIA's: they are distinguished by their files.
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


# (the name that pip knows, what is imported); where FlashAttention 4 (``flash_attn.cute``) is alone, ``flash_attn`` is
# just a folder
_OPTIONAL = {
    "flash_attn": ("flash-attn", "flash_attn"),
    "flash_attn_interface": ("flash_attn_3", "flash_attn_interface"),
    "flash_attn.cute": ("flash-attn-4", "flash_attn.cute"),
    "apex": ("apex", "apex"),
    "amp_C": ("apex", "amp_C"),
    "fused_layer_norm_cuda": ("apex", "fused_layer_norm_cuda"),
    "triton": ("triton", "triton"),
    "tensorboard": ("tensorboard", "torch.utils.tensorboard"),
    "wandb": ("wandb", "wandb"),
    "matplotlib": ("matplotlib", "matplotlib"),
    "transformers": ("transformers", "transformers"),
    "starlette": ("starlette", "starlette.applications"),
    "uvicorn": ("uvicorn", "uvicorn"),
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
    """Return whether a package is installed, with its version, without running any of its code."""
    distribution, _ = _OPTIONAL[name]
    if name in APEX_EXTENSIONS:  # modules beside the package, which a build without CUDA lacks
        apex = installed("apex")
        if apex.available and importlib.util.find_spec(name) is None:
            return Kernel(name, False, apex.version, f"apex was built without its extension {name}")
        return Kernel(name, apex.available, apex.version, apex.reason)
    top, _, inside = name.partition(".")
    spec = importlib.util.find_spec(top)  # of a module inside a package it would run the package's code
    locations = [] if spec is None else spec.submodule_search_locations or []
    is_there = spec is not None and bool(spec.origin)  # without an origin it is just a folder of that name on the path
    if inside:
        is_there = any((Path(place, inside) / "__init__.py").is_file() for place in locations)
    if not is_there:
        return Kernel(name, False, reason=f"{distribution} is not installed")
    try:
        version = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        version = ""
    if name == "apex" and not any((Path(place) / file).is_file() for place in locations for file in _APEX_FILES):
        return Kernel(name, False, version, FOREIGN_APEX)
    return Kernel(name, True, version)


@cache
def find(name: str) -> Kernel:
    """Return whether a package can be imported."""
    kernel = installed(name)
    if not kernel.available:
        return kernel
    distribution, module = _OPTIONAL[name]
    what = f"{name} of apex" if name in APEX_EXTENSIONS else distribution
    try:
        importlib.import_module(module)
    except ImportError as error:
        return Kernel(name, False, kernel.version, f"{what} cannot be imported: {error}")
    except Exception as error:  # a broken extension can raise anything; the run goes on without it and says why
        return Kernel(name, False, kernel.version, f"{what} is broken: {type(error).__name__}: {error}")
    return kernel


def load(name: str, module: str | None = None) -> ModuleType:
    """Import a package's module; a RuntimeError says why it cannot be."""
    kernel = find(name)
    if not kernel.available:
        raise RuntimeError(kernel.reason)
    return importlib.import_module(module or _OPTIONAL[name][1])
