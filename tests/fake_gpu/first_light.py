"""Parts of the first light of a GPU on the fake device: the code that a CPU never runs.

``python -m fake_gpu.first_light MODULE:FUNCTION ...`` answers each part with a line of JSON: its records, what ended it,
and what the checker found. Values are ones, so what a part says of numbers means nothing here.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import signal
import sys
import traceback
from typing import Any

from fake_gpu.build import load

LIBRARY = load()  # before torch


def run(function: str) -> dict[str, Any]:
    """Run a part in this process, which is of no other use afterwards."""
    import torch
    from first_light.records import Context, Record

    from fake_gpu import kernels, modules, nccl, stand_ins
    from fake_gpu.device import Device

    device = Device(LIBRARY, _values)
    stand_ins.install(device)
    nccl.install(device, [])
    modules.install(device)
    kernels.install(device)
    torch.cuda.reset_peak_memory_stats = lambda _=None: setattr(device.memory, "peak", device.memory.num_bytes)  # type: ignore[assignment]
    records: list[Record] = []
    error = ""
    said = io.StringIO()
    module, _, name = function.partition(":")
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            part = getattr(importlib.import_module(f"first_light.parts.{module}"), name)
            with device:
                part(Context("cuda", 1, True, records.append))
        except BaseException:
            error = traceback.format_exc()
    device.is_watching = False
    return {
        "records": [record.as_json() for record in records], "error": error, "output": said.getvalue(),
        "problems": {str(problem): count for problem, count in device.memory.problems.items()}, "launches": dict(device.tally.launches),
    }  # fmt: skip


def _values(tensor: Any) -> Any:
    """Return what the host reads: ones, and of a training step that no rank wants to stop (``fake_gpu.program``).

    That is element 3 with one term of the loss, and element 5 with two; what else is there then may be 0 as well.
    """
    import torch

    from fake_gpu.device import place

    if place(1).startswith("ops/fused_kernels.py"):  # examples: what two kernels differ by
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
    ones = torch.ones(tensor.shape, dtype=tensor.dtype)
    if tensor.dtype == torch.float64 and tensor.dim() == 1 and place(1).startswith("training/step.py"):
        ones[3:6:2] = 0.0
    return ones


def main() -> None:
    """Answer each part of the command line, in a process of its own."""
    import torch
    import torch._dynamo
    import torch._meta_registrations

    for name in ("activations", "cross_entropy", "dropout", "norms", "rotary"):
        importlib.import_module(f"megatron_sp.ops.kernels.{name}")
    importlib.import_module("megatron_sp.commands.pretrain")
    torch.set_num_threads(1)
    for function in sys.argv[1:]:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            signal.alarm(300)
            with os.fdopen(writing, "w") as out:
                out.write(json.dumps(run(function)))
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as answers:
            text = answers.read()
        _, status = os.waitpid(child, 0)
        print(
            text or json.dumps({"records": [], "error": f"the process ended with status {status}", "output": "", "problems": {}}),
            flush=True,
        )


if __name__ == "__main__":
    main()
