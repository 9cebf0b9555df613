"""Environment variables of the scripts scripts/pretrain_*.sh, read and validated; ``recipe.py`` turns them into flags."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_sp.utils.errors import ConfigError  # noqa: E402

NAMES = (
    "NPROC_PER_NODE", "NNODES", "TP", "SP", "CP", "PP", "PP_SCHEDULE", "EP", "ZERO", "OVERLAP", "RECOMPUTE", "TRAIN_ITERS", "DATA_PATH",
    "TOKENIZER_MODEL", "VOCAB_FILE", "SAVE", "SMOKE", "DRY_RUN", "GPU_TYPE", "LINK_TYPE", "PRICE_PER_GPU_HOUR",
)  # fmt: skip
"""Variables of the scripts."""
LAUNCHER_NAMES = ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "JOIN_TIMEOUT", "RESTARTS", "JOB_ID", "PYTHON")
"""Further ones, of scripts/launch.sh."""
_COMMON = ("JOB_ID", "PYTHON")  # schedulers and shells have names like these


class RankCounts(NamedTuple):
    """Sizes of the axes, and the number of processes."""

    tp: int
    sp: int
    cp: int
    pp: int
    processes: int
    ep: int = 1


@dataclass(frozen=True)
class Variables:
    """Validated environment variables of a script."""

    nproc: int
    nnodes: int
    tp: int
    # sequence-parallel size; 0: the processes of a host that tp leaves, and cp * pp if larger than the number of hosts
    sp: int
    cp: int
    pp: int
    pp_schedule: str
    ep: int
    zero: int
    overlap: str
    recompute: str
    train_iters: int | None
    data_path: str
    tokenizer_model: str
    vocab_file: str
    save: str
    smoke: bool
    dry_run: bool
    gpu_type: str
    link_type: str
    price_per_gpu_hour: float | None

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Variables:
        """Read the variables from the environment.

        Raises:
            ConfigError: an invalid value, two that contradict each other, or a name that is almost one of ours.
        """
        mistyped = [f"{name} is unknown: did you mean {meant}?" for name, meant in misspelled(environ).items()]
        if mistyped:
            raise ConfigError("\n  ".join(mistyped))
        sp = environ.get("SP", "1")
        variables = cls(
            _whole(environ, "NPROC_PER_NODE", "1"), _whole(environ, "NNODES", "1"), _whole(environ, "TP", "1"),
            0 if sp == "host" else _whole(environ, "SP", "1", " (or 'host': all processes of a host that TP, CP and PP leave)"),
            _whole(environ, "CP", "1"), _whole(environ, "PP", "1"), environ.get("PP_SCHEDULE", ""), _whole(environ, "EP", "1"),
            _whole(environ, "ZERO", "0", low=0), environ.get("OVERLAP", "") or "none",
            environ.get("RECOMPUTE", "") or "none",
            _whole(environ, "TRAIN_ITERS", "1") if environ.get("TRAIN_ITERS") else None,
            environ.get("DATA_PATH", "") or "mock", environ.get("TOKENIZER_MODEL", ""), environ.get("VOCAB_FILE", ""),
            environ.get("SAVE", ""), _switch(environ, "SMOKE"), _switch(environ, "DRY_RUN"),
            environ.get("GPU_TYPE", ""), environ.get("LINK_TYPE", ""), _price(environ, "PRICE_PER_GPU_HOUR"),
        )  # fmt: skip
        if variables.smoke and variables.dry_run:
            raise ConfigError("SMOKE=1 trains a tiny model and DRY_RUN=1 plans the full one: give one of them")
        return variables

    @property
    def full_layout(self) -> RankCounts:
        """Full layout."""
        others_of_host = -(-self.cp * self.pp // self.nnodes)
        sp = self.sp or max(1, self.nproc // (self.tp * others_of_host))
        return RankCounts(self.tp, sp, self.cp, self.pp, self.nproc * self.nnodes, self.ep)

    @property
    def smoke_layout(self) -> RankCounts:
        """Layout of a smoke test: at most 2 ranks on each axis, with ZeRO or ep two processes with other tokens."""
        tp, sp, cp, pp = (min(size, 2) for size in self.full_layout[:4])
        ep = min(self.ep, 2)
        return RankCounts(tp, sp, cp, pp, max(tp * sp * cp * pp, pp * ep, 2 if self.zero else 1), ep)

    @property
    def layout(self) -> RankCounts:
        """Layout of this run: that of the smoke test with SMOKE=1, else the full one."""
        return self.smoke_layout if self.smoke else self.full_layout

    def text(self) -> str:
        """Return the variables of the layout as text for messages."""
        names = {"NPROC_PER_NODE": self.nproc, "NNODES": self.nnodes, "TP": self.tp, "SP": self.sp or "host"}
        names |= ({"CP": self.cp} if self.cp > 1 else {}) | ({"PP": self.pp} if self.pp > 1 else {})
        names |= {"PP_SCHEDULE": self.pp_schedule} if self.pp > 1 and self.pp_schedule else {}
        names |= ({"EP": self.ep} if self.ep > 1 else {}) | {"ZERO": self.zero}
        return " ".join(
            f"{name}={value}"
            for name, value in (names | {"OVERLAP": self.overlap, "RECOMPUTE": self.recompute}).items()
        )


def _whole(environ: Mapping[str, str], name: str, default: str, more: str = "", low: int = 1) -> int:
    text = environ.get(name, "") or default
    if not (text.isascii() and text.isdigit() and low <= int(text) < 10**9):
        raise ConfigError(f"{name}={text[:40]} must be a whole number, {low} or more{more}")
    return int(text)


def _price(environ: Mapping[str, str], name: str) -> float | None:
    text = environ.get(name, "")
    try:
        value = float(text) if text else None
    except ValueError:
        value = math.nan
    if value is not None and not 0 < value < 1e6:
        raise ConfigError(f"{name}={text[:40]} must be a number above 0, such as 2.5: what a GPU costs for an hour")
    return value


def misspelled(environ: Mapping[str, str], names: tuple[str, ...] = (*NAMES, *LAUNCHER_NAMES)) -> dict[str, str]:
    """Return the variables of an environment that are almost one of ours, each with the one that is meant.

    An environment has hundreds of variables that are none of our business. Counted are other capitals and underscores
    (``DRYRUN``, ``dry_run``), and in names of five letters or more one letter too many, too few, wrong or in its
    neighbour's place (``DRY_RNU``); not where both have the same value (``NODES=2 NNODES=2``).
    """
    plain = {_plain(name): name for name in names if name not in _COMMON}
    meant_by_name: dict[str, str] = {}
    for name, value in environ.items():
        if value and name not in names:
            meant = plain.get(_plain(name)) or next(
                (ours for key, ours in plain.items() if _is_slip(_plain(name), key)), None
            )
            meant_by_name |= {name: meant} if meant and environ.get(meant) != value else {}
    return meant_by_name


def _plain(name: str) -> str:
    return name.upper().replace("_", "").replace("-", "")


def _is_slip(typed: str, meant: str) -> bool:
    if len(meant) < 5 or abs(len(typed) - len(meant)) > 1:
        return False
    start = next(
        (i for i, pair in enumerate(zip(typed, meant, strict=False)) if pair[0] != pair[1]), min(len(typed), len(meant))
    )
    a, b = typed[start:], meant[start:]
    return a[1:] == b[1:] or a[1:] == b or a == b[1:] or (a[:2] == b[1::-1] and a[2:] == b[2:])


def _switch(environ: Mapping[str, str], name: str) -> bool:
    text = environ.get(name, "") or "0"
    if text not in ("0", "1"):
        raise ConfigError(f"{name}={text[:40]} must be 1 or 0")
    return text == "1"
