"""Actions of ``megatron-sp schedule``."""

from __future__ import annotations

import argparse
import json
from typing import Any

from torch import nn

from megatron_sp.commands.schedule import ranks, source
from megatron_sp.schedule import Mesh, Schedule, presets, schedule
from megatron_sp.schedule.core.directives import expand
from megatron_sp.schedule.report.show import as_record, explain
from megatron_sp.schedule.report.survey import survey
from megatron_sp.utils.errors import ConfigError


def run(args: argparse.Namespace) -> int:
    """Run an action; return the exit code."""
    if args.factory and (args.class_name or args.settings):
        raise ConfigError("--class and --set are about a config.json: with --factory your function decides")
    if args.action == "verify":
        return ranks.verify(args, prepare)
    s, _ = prepare(args, Mesh.sizes(args.tp, args.sp, args.dp, cp=args.cp), meta=True)
    {"check": _check, "show": _show, "explain": _explain}[args.action](s, args)
    return 0


def prepare(args: argparse.Namespace, mesh: Mesh, *, meta: bool) -> tuple[Schedule, source.Batch | None]:
    """Build the model and its schedule; return (schedule, batch if the factory returned one)."""
    batch: source.Batch | None = None
    if args.factory:
        model, batch = source.from_factory(args.factory)
    else:
        model = source.from_folder(args.model, args.class_name, args.settings, meta=meta)
    return _read(args, model, mesh), batch


def _read(args: argparse.Namespace, model: nn.Module, mesh: Mesh) -> Schedule:
    if args.plan == "auto":
        return presets.auto(model, mesh, seq=args.seq_parallel)
    if args.seq_parallel:
        raise ConfigError(f"--seq-parallel is for the preset (`auto`): {args.plan} says itself what is cut")
    return schedule(model, mesh).load(args.plan)


def _check(s: Schedule, args: argparse.Namespace) -> None:
    said = s.check()
    lines = len(s.directives)
    print(json.dumps({"ok": True, "lines": lines}) if args.json else f"{lines} lines on {type(s.model).__name__}, {s.mesh}: {said}")


def _show(s: Schedule, args: argparse.Namespace) -> None:
    price: Any = s.cost(*args.cost) if args.cost else None
    if args.html:
        s.picture(args.html)
    if args.save:
        s.save(args.save)
    if args.json:
        record = as_record(survey(s))
        print(json.dumps(record if price is None else {**record, "cost": price.record()}))
        return
    print(s.show(every=args.every))
    if price is not None:
        print(f"\n{price}")


def _explain(s: Schedule, args: argparse.Namespace) -> None:
    paths = expand(s.model, args.path)
    found = survey(s)
    if args.json:
        print(json.dumps({path: as_record(found, path) for path in paths}))
    else:
        print("\n".join(explain(found, path) for path in paths))
