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
from typing import Any

from megatron_sp.ops import availability
from megatron_sp.utils.entry_point import NEWEST_TESTED_TORCH, OLDEST_TORCH, version_numbers
from megatron_sp.utils.errors import ConfigError
from megatron_sp.utils.host import num_cores

GIB = 1024**3
# distributions that setup.py requires besides torch, with the oldest version
REQUIRED = {
    "numpy": "1.26", "einops": "0.8.2", "sentencepiece": "0.2.1", "tokenizers": "0.22", "safetensors": "0.5",
    "rich": "13.7", "pyyaml": "6.0",
}  # fmt: skip
EXTRAS = {
    "plot": ("matplotlib",), "log": ("tensorboard", "wandb"), "hf": ("transformers",),
    "serve": ("starlette", "uvicorn"),
}  # fmt: skip
# fmt: off
KERNELS = {  # name: (what it is for, how to get it)
    "flash_attn": ("attention", "optional, for --attention-backend flash2: pip install --no-build-isolation flash-attn"
                   " (needs nvcc)"),
    "flash_attn_interface": ("attention, Hopper", "optional, for --attention-backend flash3: built from hopper/ of"
                             " Dao-AILab/flash-attention on GitHub"),
    "flash_attn.cute": ("attention, Hopper and Blackwell", "optional, for --attention-backend flash4: pip install --pre"
                        " flash-attn-4"),
    "apex": ("AdamW and norms, --fused-kernels", "optional; NVIDIA's is built from its repository, NVIDIA/apex on"
             " GitHub, with its C++ and CUDA extensions"),
    "triton": ("norms and elementwise operations, --fused-kernels", "comes with torch's CUDA wheels for Linux"),
}
# fmt: on


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
        _torch, _devices, _allocator, _backends, _required, _kernels, _extras, _disk, _shared_memory,
        _processors, _open_files,
    )  # fmt: skip
    good, version = sys.version_info >= (3, 10), ".".join(map(str, sys.version_info[:3]))
    remedy = "" if good else "use Python 3.10 or later"
    rows = [Finding("Python", "ok" if good else "lack", f"{version} at {sys.executable}", remedy)]
    for check in checks:
        try:
            rows.extend(check())
        except Exception as error:
            name = check.__name__.strip("_").replace("_", " ")
            rows.append(Finding(name, "warn", f"could not be examined: {type(error).__name__}: {error}"))
    return rows


def _noted(name: str, found: str, remedy: str) -> Finding:
    # a row that warns if there is a remedy
    return Finding(name, "warn" if remedy else "ok", found, remedy)


def _torch() -> Iterator[Finding]:
    try:
        import torch
    except ImportError as error:
        remedy = "bash scripts/setup_env.sh, or pip install torch"
        yield Finding("torch", "lack", f"cannot be imported: {error}", remedy)
        return
    except ConfigError as error:  # less address space than it needs, or too old
        remedy = "" if "too old" in str(error) else "ulimit -v unlimited"
        yield Finding("torch", "lack", f"was not imported: {error}", remedy)
        return
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    if torch.version.hip and not torch.version.cuda:
        build = f"ROCm {torch.version.hip}"
    version, found = version_numbers(torch.__version__)[:2], f"{torch.__version__} ({build})"
    oldest, newest = (".".join(map(str, limit)) for limit in (OLDEST_TORCH, NEWEST_TESTED_TORCH))
    if version < OLDEST_TORCH:
        remedy = f"{oldest} is the oldest that this package runs on: pip install -U torch"
        yield Finding("torch", "lack", found, remedy)
    else:
        yield _noted("torch", found, f"tested with {oldest} to {newest}" if version > NEWEST_TESTED_TORCH else "")


def _cuda() -> Any:
    # torch, if it was imported and has a GPU, else None
    torch = sys.modules.get("torch")
    return torch if torch is not None and torch.cuda.is_available() else None


def _devices() -> Iterator[Finding]:
    torch = sys.modules.get("torch")
    if torch is None:
        return
    if not torch.cuda.is_available():
        if os.path.exists("/dev/nvidia0"):
            remedy = "install a CUDA build of torch"
            if torch.version.cuda:
                remedy = "the driver is too old for this torch, or not running: nvidia-smi"
            yield Finding("devices", "warn", "a GPU that torch cannot use", remedy)
        else:
            yield Finding("devices", "ok", "CPU (no GPU: collectives run over gloo)")
        return
    for index in range(torch.cuda.device_count()):
        prop = torch.cuda.get_device_properties(index)
        found = f"{prop.name}, {prop.total_memory / GIB:.0f} GiB, capability {prop.major}.{prop.minor}"
        no_bf16 = (prop.major, prop.minor) < (8, 0) and not torch.version.hip
        remedy = "bf16 is emulated before capability 8.0: train with --fp16" if no_bf16 else ""
        yield _noted(f"GPU {index}", found, remedy)


def _backends() -> Iterator[Finding]:
    if "torch" not in sys.modules:
        return
    from megatron_sp.comm.devices import available_backends

    lack = "this build of torch lacks it; several processes need it: install torch's own wheel"
    for name, there in available_backends().items():
        if there or name == "gloo" or _cuda():
            yield _noted(f"backend {name}", "available" if there else "absent", "" if there else lack)


def _allocator() -> Iterator[Finding]:
    # whether torch's allocator may grow its segments on a GPU: else long sequences lose memory to holes
    if not _cuda():
        return
    # the first is the name from torch 2.9 on; the second is still read
    names = [name for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF") if name in os.environ]
    name = names[0] if names else ""
    text = os.environ.get(name, "")
    settings = dict(part.split(":", 1) for part in text.replace(" ", "").split(",") if ":" in part)
    if settings.get("expandable_segments", "").lower() == "true":
        yield Finding("allocator", "ok", f"expandable segments ({name})")
        return
    others = [part for part in text.split(",") if part and "expandable_segments" not in part]
    setting = f"{name or 'PYTORCH_ALLOC_CONF'}={','.join([*others, 'expandable_segments:True'])}"
    found = f"{name}={text}: segments of fixed size" if name else "segments of fixed size"
    remedy = f"sequences of changing or great length lose less memory to holes with export {setting}"
    yield Finding("allocator", "warn", found, remedy)


def _required() -> Iterator[Finding]:
    lacking, found, wanted = [], [], []
    for name, oldest in REQUIRED.items():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            version = ""
        found.append(f"{name} {version or 'absent'}")
        if not version or version_numbers(version) < version_numbers(oldest):
            lacking.append(found[-1])
            wanted.append(f"'{name}>={oldest}'")
    remedy = f"pip install {' '.join(wanted)}" if lacking else ""
    yield Finding("required packages", "lack" if lacking else "ok", ", ".join(lacking or found), remedy)


def _kernels() -> Iterator[Finding]:
    look = availability.find if _cuda() else availability.installed  # only what a GPU would use is imported
    for name, (use, remedy) in KERNELS.items():
        kernel = _apex(look) if name == "apex" else look(name)
        label = f"kernel {name.replace('_', '-')}"
        if kernel.available:
            yield Finding(label, "ok", f"{kernel.version or 'there'} ({use})")
        elif kernel.reason == availability.FOREIGN_APEX:
            found = f"PyPI's apex {kernel.version}, not NVIDIA's; it is not used"
            yield Finding(label, "warn", found, "pip uninstall apex")
        elif kernel.version:
            yield Finding(label, "warn", kernel.reason, remedy)
        else:
            yield Finding(label, "ok", f"not installed: torch does this ({use})", remedy if _cuda() else "")


def _apex(look: Callable[[str], availability.Kernel]) -> availability.Kernel:
    # NVIDIA's apex with the extension modules that have its kernels; apex itself is not imported
    apex = availability.installed("apex")
    extensions = [look(name) for name in availability.APEX_EXTENSIONS] if apex.available else []
    lacking = [extension.reason for extension in extensions if not extension.available]
    return availability.Kernel("apex", False, apex.version or "there", "; ".join(lacking)) if lacking else apex


def _extras() -> Iterator[Finding]:
    for extra, names in EXTRAS.items():
        kernels = [availability.installed(name) for name in names]
        found = ", ".join(f"{kernel.name} {kernel.version if kernel.available else 'absent'}" for kernel in kernels)
        is_whole = all(kernel.available for kernel in kernels)
        yield Finding(f"extra {extra}", "ok", found, "" if is_whole else f"optional: pip install -e '.[{extra}]'")


def _disk() -> Iterator[Finding]:
    place = os.getcwd()
    free = shutil.disk_usage(place).free / GIB
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"x" * 4096)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        remedy = "start in a folder you may write to, or give --save DIR"
        yield Finding("disk", "warn", f"{place}: cannot be written: {error.strerror}", remedy)
        return
    remedy = "checkpoints may not fit: --save on a larger disk" if free < 5 else ""
    yield _noted("disk", f"{free:.1f} GiB free in {place}", remedy)


def _shared_memory() -> Iterator[Finding]:
    place = "/dev/shm"
    if os.path.isdir(place):  # macOS has none and needs none
        usage = shutil.disk_usage(place)
        remedy = "NCCL needs it between GPUs: docker run --ipc=host, or --shm-size=8g" if usage.free < GIB // 2 else ""
        found = f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free in {place}"
        yield _noted("shared memory", found, remedy)


def _processors() -> Iterator[Finding]:
    cores, torch = num_cores(), sys.modules.get("torch")
    threads = torch.get_num_threads() if torch is not None else 0
    set_to = os.environ.get("OMP_NUM_THREADS")
    remedy = f"OMP_NUM_THREADS={set_to} asks for more threads than cores: unset it" if threads > cores else ""
    yield _noted("processors", f"{cores} cores, {threads} torch threads", remedy)


def _open_files() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        yield Finding("open files", "ok", "unlimited")
        return
    most = min(65536, hard) if hard > 0 else 65536
    remedy = f"blends of many data sets keep many files open: ulimit -n {most}" if soft < 1024 else ""
    yield _noted("open files", f"{soft} per process", remedy)


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
    some = f"{lacking} required thing(s) lack; see the remedies above."
    print(some if lacking else "Everything that training needs is installed.")
