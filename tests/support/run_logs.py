"""Logs of runs that never took place, written as training writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_sp.config.schema import Config


class LogWriter:
    """Writes a run folder; its clock stands still unless told to go on."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.time = folder, 1_700_000_000.0

    def write(self, kind: str, step: int, *, after: float = 0.0, **values: Any) -> None:
        """A record ``after`` seconds later."""
        self.time += after
        with open(self.folder / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps({"kind": kind, "time": self.time, "step": step, **values}) + "\n")

    def start(self, step: int, *, took: float = 2.0, **values: Any) -> None:
        self.write("start", step, after=took, attempt=0, world_size=2, num_params=1000, launch_to_ready_s=took, **values)

    def steps(self, first: int, last: int, *, step_s: float = 1.0, **values: Any) -> None:
        """A training record for each step."""
        for step in range(first, last + 1):
            loss = values.get("loss", 10.0 / step)
            self.write("train", step, after=step_s, **{
                "consumed_tokens": 64 * step, "loss": loss, "loss_hex": f"{loss}", "grad_norm": 0.5, "grad_norm_hex": "g",
                "samples_sha": f"s{step}", "lr": 1e-3, "skipped_steps": 0, "loss_scale": 1.0, "step_s": step_s, "tokens_per_s": 64 / step_s,
                "mfu": 0.25, "peak": "h100-bf16", "memory_bytes": 2**30, "global_batch_size": 4, **values,
            })  # fmt: skip

    def status(self, status: str, **values: Any) -> None:
        record = {"status": status, "exit_code": 0, "message": "", "time": self.time, **values}
        (self.folder / "run_status.json").write_text(json.dumps(record))


EVIL = "</script><img src=x onerror=alert(1)><b title='\"&"


def evil_run(folder: Path) -> Path:
    """A run that has markup wherever a run can have text."""
    config = Config()
    config.data.data_path = (EVIL,)
    config.checkpoint.save = EVIL
    log = LogWriter(folder)
    log.start(
        0, config=config.to_dict(), environment={EVIL: EVIL, "versions": {EVIL: EVIL}, "hosts": {EVIL: 1}, "device": EVIL, "layout": EVIL}
    )
    log.steps(1, 3, peak=EVIL, loss_scale=EVIL)
    log.write("valid", 3, loss=EVIL, seconds=EVIL)
    log.start(2, config={"model": EVIL}, environment=EVIL)
    log.steps(3, 3, samples_sha=EVIL, loss_hex=EVIL)
    log.status("failed", message=EVIL, exit_code=EVIL)
    rows = [{"axis": EVIL, "layer": EVIL, "direction": EVIL, "number": EVIL, "exchange": EVIL}]
    (folder / "overlap-trace.json").write_text(json.dumps({"otherData": {"step_seconds": EVIL, "rows": rows}}))
    (folder / "nonfinite-step-1.json").write_text("[" * 100_000)
    return folder
