"""``megatron-sp doctor``, and how the GPUs stand: nothing is changed."""

from __future__ import annotations

import shutil
import subprocess

from first_light.records import Context, Verdict
from megatron_sp.commands.doctor import examine

_VERDICTS: dict[str, Verdict] = {"ok": "ok", "warn": "measured", "lack": "failed"}
_ASKED = "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit,temperature.gpu,mig.mode.current,ecc.mode.current,memory.used"


def run(context: Context) -> None:
    """Record what doctor says, and what nvidia-smi says of clocks, power and MIG."""
    for finding in examine():
        remedy = f"; {finding.remedy}" if finding.remedy else ""
        context.record("doctor", finding.name, _VERDICTS[finding.status], f"{finding.found}{remedy}")
    if context.device == "cuda":
        context.attempt("nvidia-smi", "all GPUs", _smi)


def _smi() -> dict[str, str]:
    if shutil.which("nvidia-smi") is None:
        return {"verdict": "absent", "message": "nvidia-smi is not on the path"}
    command = ["nvidia-smi", f"--query-gpu={_ASKED}", "--format=csv"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=30, stdin=subprocess.DEVNULL)
    return {"message": "; ".join((run.stdout or run.stderr).strip().splitlines())}
