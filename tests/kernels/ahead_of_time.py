"""Compiles the kernels for GPUs that are not there: registers, spills, shared memory, and the width of memory accesses.

Triton's wheel has ptxas in it. ``python -m kernels.ahead_of_time [--write]`` prints the table of
docs/benchmarks/kernels_ahead_of_time.md, or writes it.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks" / "kernels_ahead_of_time.md"
CAPABILITIES = (80, 90, 100)
_TYPES = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.bool: "*i1", torch.int32: "*i32", torch.int64: "*i64",
}  # fmt: skip


@dataclass(frozen=True)
class Compiled:
    """One kernel compiled for one GPU."""

    case: str
    kernel: str
    capability: int
    warps: int
    registers: int
    spilled_bytes: int
    shared_bytes: int
    widest: int  # bits that a thread reads or writes at a time

    @property
    def row(self) -> str:
        """Row of the table."""
        cells = (self.case, f"`{self.kernel}`", f"sm_{self.capability}", self.warps, self.registers, self.spilled_bytes, self.shared_bytes)
        return "| " + " | ".join(str(cell) for cell in (*cells, self.widest)) + " |"


def compile_cases(names: Sequence[str], capabilities: Sequence[int] = CAPABILITIES) -> list[Compiled]:
    """Compile the kernels that some of ``cases.CASES`` launch; each kernel of a case once."""
    import triton

    from kernels.cases import CASES
    from megatron_sp.ops.kernels import launch

    triton.knobs.nvidia.dump_ptxas_log = triton.knobs.compilation.always_compile = True  # a cached kernel prints no log
    found = []
    for name in names:
        launches: list[launch.Launch] = []
        launch.launcher = launches.append
        CASES[name]()
        for each in launches:
            found += [_compile(name, each, capability) for capability in capabilities]
    return found


def _compile(case: str, launched: Any, capability: int) -> Compiled:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = launched.kernel.arg_names
    signature: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    hints: dict[tuple[int], Any] = {}
    for index, (name, value) in enumerate(zip(names, launched.arguments, strict=False)):
        if isinstance(value, torch.Tensor):
            signature[name], hints[index,] = _TYPES[value.dtype], [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif value == 1:  # as Triton specializes it
            signature[name], constants[index,] = "constexpr", 1
        else:
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0:
                hints[index,] = [["tt.divisibility", 16]]
    for name, value in launched.constants.items():
        signature[name], constants[names.index(name),] = "constexpr", value
    log = io.StringIO()
    with contextlib.redirect_stdout(log):
        compiled = triton.compile(
            ASTSource(launched.kernel, signature, constants, hints), target=GPUTarget("cuda", capability, 32),
            options=launched.options,
        )  # fmt: skip
    registers = re.search(r"Used (\d+) registers", log.getvalue())
    assert registers is not None, f"ptxas says nothing of registers: {log.getvalue()!r}"
    spilled = sum(int(n) for n in re.findall(r"(\d+) bytes spill", log.getvalue()))
    accesses = re.findall(r"(?:ld|st)\.global\S*?(?:\.v(\d))?\.b(\d+)", compiled.asm["ptx"])
    widest = max(int(count or 1) * int(bits) for count, bits in accesses)
    return Compiled(case, launched.name, capability, launched.warps, int(registers[1]), spilled, compiled.metadata.shared, widest)


def page(compiled: Sequence[Compiled], version: str) -> str:
    """Return docs/benchmarks/kernels_ahead_of_time.md."""
    return f"""# Triton kernels, compiled ahead of time

Written by `python -m kernels.ahead_of_time --write` (with `tests` on the path), Triton {version}, without a GPU.
What a GPU makes of it is not in here. A test requires what the table shows: nothing is spilled, and accesses are of 128
bits where rows are a multiple of 16 elements long.

| case | kernel | GPU | warps | registers | spilled, bytes | shared memory, bytes | widest access, bits |
|---|---|---|---|---|---|---|---|
""" + "".join(f"{each.row}\n" for each in compiled)


if __name__ == "__main__":
    import triton

    from kernels.cases import CASES

    text = page(compile_cases(list(CASES)), triton.__version__)
    if "--write" in sys.argv:
        PAGE.write_text(text)
    else:
        print(text)
