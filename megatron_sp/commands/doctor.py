"""``megatron-sp doctor``: check this machine for training, with a remedy for everything that is missing.

A row is *ok*, *warn* (training works, with limitations) or *lack* (training cannot work). The checks take about as long
as importing torch: optional packages are only looked up, not imported, except the kernels that a GPU would use.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

from megatron_sp.ops import availability
from megatron_sp.utils.errors import ConfigError
from megatron_sp.utils.import_checks import NEWEST_TESTED_TORCH, OLDEST_TORCH, numbers
from megatron_sp.utils.processes import num_cores

GIB = 1024**3
REQUIRED = {
    "numpy": "1.26", "einops": "0.8.2", "sentencepiece": "0.2.1", "tokenizers": "0.22", "safetensors": "0.5",
    "rich": "13.7", "pyyaml": "6.0",
}  # fmt: skip
"""Distributions that setup.py requires besides torch, with the oldest version."""
EXTRAS = {
    "plot": ("matplotlib",),
    "log": ("tensorboard", "wandb"),
    "hf": ("transformers",),
    "serve": ("starlette", "uvicorn"),
}


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    name: str
    status: str  # ok, warn, lack
    found: str
    remedy: str = ""


def run(as_json: bool = False) -> int:
    """Print the report. Returns 0, or 1 if something required is missing."""
    rows = examine()
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        _print_table(rows)
    return int(any(row.status == "lack" for row in rows))


def examine() -> list[Finding]:
    """Return all rows; a check that raises becomes a row instead of ending the report."""
    checks: tuple[Callable[[], Iterator[Finding]], ...] = (
        _python, _torch, _devices, _allocator, _backends, _required, _kernels, _extras, _disk, _shared_memory, _processors, _open_files,
    )  # fmt: skip
    rows: list[Finding] = []
    for check in checks:
        try:
            rows.extend(check())
        except Exception as error:
            name = check.__name__.strip("_").replace("_", " ")
            rows.append(Finding(name, "warn", f"could not be examined: {type(error).__name__}: {error}"))
    return rows


def _python() -> Iterator[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    good = sys.version_info >= (3, 10)
    yield Finding(
        "Python", "ok" if good else "lack", f"{version} at {sys.executable}", "" if good else "use Python 3.10 or later"
    )


def _torch() -> Iterator[Finding]:
    try:
        import torch
    except ImportError as error:
        yield Finding(
            "torch", "lack", f"cannot be imported: {error}", "bash scripts/setup_env.sh, or pip install torch"
        )
        return
    except ConfigError as error:  # less address space than it needs, or too old
        remedy = "" if "too old" in str(error) else "ulimit -v unlimited"
        yield Finding("torch", "lack", f"was not imported: {error}", remedy)
        return
    build = (
        f"CUDA {torch.version.cuda}"
        if torch.version.cuda
        else f"ROCm {torch.version.hip}"
        if torch.version.hip
        else "CPU only"
    )
    version, oldest, newest = numbers(torch.__version__)[:2], OLDEST_TORCH, NEWEST_TESTED_TORCH
    found = f"{torch.__version__} ({build})"
    if version < oldest:
        yield Finding(
            "torch", "lack", found, f"{_dotted(oldest)} is the oldest that this package runs on: pip install -U torch"
        )
    elif version > newest:
        yield Finding("torch", "warn", found, f"tested with {_dotted(oldest)} to {_dotted(newest)}")
    else:
        yield Finding("torch", "ok", found)


def _devices() -> Iterator[Finding]:
    torch = sys.modules.get("torch")
    if torch is None:
        return
    if not torch.cuda.is_available():
        if os.path.exists("/dev/nvidia0"):
            remedy = (
                "install a CUDA build of torch"
                if not torch.version.cuda
                else "the driver is too old for this torch, or not running: nvidia-smi"
            )
            yield Finding("devices", "warn", "a GPU that torch cannot use", remedy)
        else:
            yield Finding("devices", "ok", "CPU (no GPU: collectives run over gloo)")
        return
    for index in range(torch.cuda.device_count()):
        prop = torch.cuda.get_device_properties(index)
        capability = f"{prop.major}.{prop.minor}"
        no_bf16 = (prop.major, prop.minor) < (8, 0) and not torch.version.hip
        yield Finding(
            f"GPU {index}", "warn" if no_bf16 else "ok", f"{prop.name}, {prop.total_memory / GIB:.0f} GiB, capability {capability}",
            "bf16 is emulated before capability 8.0: train with --fp16" if no_bf16 else "",
        )  # fmt: skip


def _backends() -> Iterator[Finding]:
    torch = sys.modules.get("torch")
    if torch is None:
        return
    from megatron_sp.comm.devices import available_backends

    backends, on_gpu = available_backends(), torch.cuda.is_available()
    for name, there in backends.items():
        needed = name == "gloo" or on_gpu
        if there or needed:
            remedy = (
                "" if there else "this build of torch lacks it; several processes need it: install torch's own wheel"
            )
            yield Finding(f"backend {name}", "ok" if there else "warn", "available" if there else "absent", remedy)


def _allocator() -> Iterator[Finding]:
    # check whether torch's allocator may grow its segments on a GPU: else long sequences lose memory to holes
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return
    # the first is the name from torch 2.9 on; the second is still read
    name, text = next(
        ((n, os.environ[n]) for n in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF") if n in os.environ), ("", "")
    )
    settings = dict(part.split(":", 1) for part in text.replace(" ", "").split(",") if ":" in part)
    if settings.get("expandable_segments", "").lower() == "true":
        yield Finding("allocator", "ok", f"expandable segments ({name})")
        return
    setting = ",".join(
        [*(part for part in text.split(",") if part and "expandable_segments" not in part), "expandable_segments:True"]
    )
    yield Finding(
        "allocator", "warn", f"{name}={text}: segments of fixed size" if name else "segments of fixed size",
        "sequences of changing or great length lose less memory to holes with export"
        f" {name or 'PYTORCH_ALLOC_CONF'}={setting}",
    )  # fmt: skip


def _required() -> Iterator[Finding]:
    lacking, versions = [], []
    for name, oldest in REQUIRED.items():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            lacking.append((name, f"{name} absent", oldest))
            continue
        versions.append(f"{name} {version}")
        if numbers(version) < numbers(oldest):
            lacking.append((name, f"{name} {version}", oldest))
    if lacking:
        words = " ".join(f"'{name}>={oldest}'" for name, _, oldest in lacking)
        yield Finding("required packages", "lack", ", ".join(what for _, what, _ in lacking), f"pip install {words}")
    else:
        yield Finding("required packages", "ok", ", ".join(versions))


def _kernels() -> Iterator[Finding]:
    torch = sys.modules.get("torch")
    on_gpu = torch is not None and torch.cuda.is_available()
    look = availability.find if on_gpu else availability.installed
    uses = {
        "flash_attn": (
            "attention",
            "optional, for --attention-backend flash2: pip install --no-build-isolation flash-attn (needs nvcc)",
        ),
        "flash_attn_interface": (
            "attention, Hopper",
            "optional, for --attention-backend flash3: built from hopper/ of Dao-AILab/flash-attention on GitHub",
        ),
        "flash_attn.cute": (
            "attention, Hopper and Blackwell",
            "optional, for --attention-backend flash4: pip install --pre flash-attn-4",
        ),
        "apex": (
            "AdamW and norms, --fused-kernels",
            "optional; NVIDIA's is built from its repository, NVIDIA/apex on GitHub, with its C++ and CUDA extensions",
        ),
        "triton": ("norms and elementwise operations, --fused-kernels", "comes with torch's CUDA wheels for Linux"),
    }
    for name, (use, remedy) in uses.items():
        kernel = _apex(look) if name == "apex" else look(name)
        label = f"kernel {name.replace('_', '-')}"
        if kernel.available:
            yield Finding(label, "ok", f"{kernel.version or 'there'} ({use})")
        elif kernel.reason == availability.FOREIGN_APEX:
            yield Finding(
                label, "warn", f"PyPI's apex {kernel.version}, not NVIDIA's; it is not used", "pip uninstall apex"
            )
        elif kernel.version:
            yield Finding(label, "warn", kernel.reason, remedy)
        else:
            yield Finding(label, "ok", f"not installed: torch does this ({use})", remedy if on_gpu else "")


def _apex(look: Callable[[str], availability.Kernel]) -> availability.Kernel:
    # look for NVIDIA's apex with the extension modules that have its kernels; apex itself is not imported
    apex = availability.installed("apex")
    lacking = (
        [kernel.reason for name in availability.APEX_EXTENSIONS if not (kernel := look(name)).available]
        if apex.available
        else []
    )
    return availability.Kernel("apex", False, apex.version or "there", "; ".join(lacking)) if lacking else apex


def _extras() -> Iterator[Finding]:
    for extra, names in EXTRAS.items():
        kernels = [availability.installed(name) for name in names]
        absent = [kernel.name for kernel in kernels if not kernel.available]
        found = ", ".join(f"{k.name} {k.version}" if k.available else f"{k.name} absent" for k in kernels)
        yield Finding(f"extra {extra}", "ok", found, f"optional: pip install -e '.[{extra}]'" if absent else "")


def _disk() -> Iterator[Finding]:
    place = os.getcwd()
    free = shutil.disk_usage(place).free / GIB
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"x" * 4096)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        yield Finding(
            "disk",
            "warn",
            f"{place}: cannot be written: {error.strerror}",
            "start in a folder you may write to, or give --save DIR",
        )
        return
    low = free < 5
    yield Finding(
        "disk",
        "warn" if low else "ok",
        f"{free:.1f} GiB free in {place}",
        "checkpoints may not fit: --save on a larger disk" if low else "",
    )


def _shared_memory() -> Iterator[Finding]:
    place = "/dev/shm"
    if not os.path.isdir(place):  # macOS has none and needs none
        return
    usage = shutil.disk_usage(place)
    low = usage.free < GIB // 2
    remedy = "NCCL needs it between GPUs: docker run --ipc=host, or --shm-size=8g" if low else ""
    yield Finding(
        "shared memory",
        "warn" if low else "ok",
        f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free in {place}",
        remedy,
    )


def _processors() -> Iterator[Finding]:
    cores = num_cores()
    torch = sys.modules.get("torch")
    threads = torch.get_num_threads() if torch is not None else 0
    set_to = os.environ.get("OMP_NUM_THREADS")
    remedy = f"OMP_NUM_THREADS={set_to} asks for more threads than cores: unset it" if threads > cores else ""
    yield Finding("processors", "warn" if remedy else "ok", f"{cores} cores, {threads} torch threads", remedy)


def _open_files() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = soft != resource.RLIM_INFINITY and soft < 1024
    remedy = (
        f"blends of many data sets keep many files open: ulimit -n {min(65536, hard) if hard > 0 else 65536}"
        if low
        else ""
    )
    yield Finding(
        "open files",
        "warn" if low else "ok",
        "unlimited" if soft == resource.RLIM_INFINITY else f"{soft} per process",
        remedy,
    )


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _print_table(rows: list[Finding]) -> None:
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:  # rich itself may be missing
        for row in rows:
            print(f"{row.status:5}{row.name}: {row.found}" + (f"  -> {row.remedy}" if row.remedy else ""))
        return
    table = Table(title="megatron-sp doctor", title_justify="left")
    for column in ("", "what", "found", "remedy"):
        table.add_column(column, overflow="fold")
    colors = {"ok": "green", "warn": "yellow", "lack": "bold red"}
    for row in rows:
        table.add_row(Text(row.status, style=colors[row.status]), row.name, Text(row.found), Text(row.remedy))
    Console().print(table)
    lacking = sum(row.status == "lack" for row in rows)
    print(
        f"{lacking} required thing(s) lack; see the remedies above."
        if lacking
        else "Everything that training needs is installed."
    )
