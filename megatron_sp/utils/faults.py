"""Faults at named points of a run, by which tests verify recovery."""

from __future__ import annotations

import errno
import os
import re
import signal
import time
from dataclasses import dataclass

from megatron_sp.utils.errors import ConfigError

# One or more faults separated by ``;``, each ``KIND:key=value:...``, for example
# ``kill:rank=1:at=save.shard:step=7:attempt=0``; an omitted key matches everything. Rejected unless
# --enable-fault-injection is given, so that an inherited environment cannot affect production runs.
FAULT_VARIABLE = "MEGATRON_SP_FAULT"
_SIGNALS = {"kill": signal.SIGKILL, "sigterm": signal.SIGTERM, "stop": signal.SIGSTOP}
# hang: this thread goes no further, others do; full: the disk is full at that point of a save; nan: the code at that
# point calls ``poisons()`` and makes a value NaN itself
_KINDS = (*_SIGNALS, "hang", "full", "nan")
_POINTS = (
    "step.forward", "step.backward", "optim.step",
    "save.begin", "save.copy", "save.hash", "save.write", "save.shard", "save.manifest", "save.rename", "save.prune",
    "valid.batch", "valid.record", "test.batch", "test.record", "loss", "grad",
)  # fmt: skip
# every action of a pipeline is a point, reached before its input has arrived: pipeline.B1.2 is B of stage 1 and
# micro-batch 2, and pipeline.B1.2.3 that of the micro-batch's slice 3
_ACTION = re.compile(r"pipeline\.[FBW]\d+\.\d+(\.\d+)?")


@dataclass(frozen=True)
class _Fault:
    kind: str
    at: str
    rank: int | None = None
    step: int | None = None
    attempt: int | None = None  # torchrun's restart count


@dataclass(frozen=True)
class FaultPlan:
    """Faults to inject on one rank in one attempt; empty in every real run."""

    faults: tuple[_Fault, ...] = ()

    @classmethod
    def from_env(cls, enabled: bool, rank: int, attempt: int = 0) -> FaultPlan:
        """Read the plan for this rank. Raises ConfigError: it is not enabled, or unreadable."""
        text = os.environ.get(FAULT_VARIABLE, "")
        if not text:
            return cls()
        if not enabled:
            raise ConfigError(
                f"{FAULT_VARIABLE} is set ({text}) but --enable-fault-injection was not given: unset the variable"
            )
        faults = (_parse(part) for part in text.split(";") if part)
        return cls(tuple(f for f in faults if f.rank in (None, rank) and f.attempt in (None, attempt)))

    def at(self, point: str, step: int) -> None:
        """Trigger the faults planned for this point and step."""
        for fault in self.faults:
            if fault.at == point and fault.step in (None, step):
                if fault.kind in _SIGNALS:
                    os.kill(os.getpid(), _SIGNALS[fault.kind])
                elif fault.kind == "hang":
                    _hang()
                elif fault.kind == "full":
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def poisons(self, point: str, step: int) -> bool:
        """Return whether to make the value at this point NaN."""
        return any(f.at == point and f.kind == "nan" and f.step in (None, step) for f in self.faults)


def _hang() -> None:
    while True:
        time.sleep(3600)


def _parse(text: str) -> _Fault:
    kind, *rest = text.split(":")
    fields = dict(part.partition("=")[::2] for part in rest)
    numbers = {"rank", "step", "attempt"}
    bad = [k for k, v in fields.items() if k not in numbers | {"at"} or (k in numbers and not v.isdigit())]
    point = fields.get("at", "")
    if kind not in _KINDS or not (point in _POINTS or _ACTION.fullmatch(point)) or bad:
        raise ConfigError(
            f"{FAULT_VARIABLE}: cannot read '{text}': expected KIND:at=POINT[:rank=N][:step=N][:attempt=N] with KIND"
            f" one of {', '.join(_KINDS)} and POINT one of {', '.join(_POINTS)}, or an action of a pipeline, such as"
            " pipeline.B1.2 (stage 1, micro-batch 2)"
        )
    return _Fault(kind, point, **{k: int(v) for k, v in fields.items() if k in numbers})  # type: ignore[arg-type]


NO_FAULTS = FaultPlan()
