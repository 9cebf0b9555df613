"""Builds ``guard.cpp`` against the torch that is installed, and loads it: before ``import torch``, or it comes too late.

The library is kept in the cache folder under a name made of the sources and of torch's version, so it is built once.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from importlib.metadata import version
from pathlib import Path

SOURCE = Path(__file__).with_name("guard.cpp")


def torch_folder() -> Path:
    """Return the folder of the torch package, which is not imported."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None, "torch is not installed"
    return Path(spec.origin).parent


def build(cache: Path | None = None) -> Path:
    """Compile the library unless it is there, and return its path; safe if several processes do so at once.

    Raises:
        RuntimeError: there is no g++, or it fails; the message has its output.
    """
    folder = torch_folder()
    key = hashlib.sha256(SOURCE.read_bytes() + version("torch").encode() + str(folder).encode()).hexdigest()[:16]
    cache = cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron_sp_fake_gpu"
    library = cache / f"guard-{key}.so"
    if library.exists():
        return library
    compiler = shutil.which("g++")
    if compiler is None:
        raise RuntimeError("the fake GPU needs a C++ compiler, and there is no g++: apt-get install g++")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        made = Path(scratch) / library.name
        command = [
            compiler, "-std=c++20", "-O0", "-shared", "-fPIC", f"-I{folder}/include", str(SOURCE), f"-L{folder}/lib", "-lc10",
            "-ltorch_cpu", f"-Wl,-rpath,{folder}/lib", "-o", str(made),
        ]  # fmt: skip
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}\n{result.stderr[-4000:]}")
        made.replace(library)
    return library


def load() -> ctypes.CDLL:
    """Load the library, built if need be, into this process, which must not have imported torch yet.

    Raises:
        RuntimeError: torch is imported already, or the library cannot be built.
    """
    import sys

    if "torch" in sys.modules:
        raise RuntimeError("torch is imported already: its choice of device hooks is made")
    library = ctypes.CDLL(str(build()), ctypes.RTLD_GLOBAL)
    library.stream_get.restype = library.engine_log_take.restype = ctypes.c_int64
    library.stream_set.argtypes = [ctypes.c_int64]
    library.engine_log_take.argtypes = [ctypes.POINTER(ctypes.c_int64), ctypes.c_int64]
    return library
