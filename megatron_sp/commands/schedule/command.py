"""Actions of ``megatron-sp schedule``."""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import nn

from megatron_sp.comm.groups import ParallelGroups, destroy_process_group, init_process_group
from megatron_sp.commands.schedule import source
from megatron_sp.schedule import Mesh, Schedule, presets, schedule
from megatron_sp.schedule.core.directives import expand
from megatron_sp.schedule.report.show import as_record, explain
from megatron_sp.schedule.report.survey import survey
from megatron_sp.schedule.verify.proof import example
from megatron_sp.utils.errors import ConfigError, NumericsError, PeerError, ReportedError
from megatron_sp.utils.launch import Launch

_TIMEOUT = timedelta(minutes=10)
_GRACE_S = 20  # for other ranks to end, once the first has


def run(args: argparse.Namespace) -> int:
    """Run an action; return the exit code."""
    if args.factory and (args.class_name or args.settings):
        raise ConfigError("--class and --set are about a config.json: with --factory your function decides")
    if args.action == "verify":
        return verify(args)
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
    print(
        json.dumps({"ok": True, "lines": lines})
        if args.json
        else f"{lines} lines on {type(s.model).__name__}, {s.mesh}: {said}"
    )


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


def verify(args: argparse.Namespace) -> int:
    """Compare the scheduled model with the original, on the launcher's ranks or on local processes; return the exit code.

    Raises:
        ConfigError: the launcher has started a different number of processes than the layout needs.
        NumericsError: they differ; the message names the worst tensors and the first module that differs.
    """
    size, launch = args.tp * args.sp * args.cp * args.dp, Launch.from_env()
    if launch.world_size > 1 or size == 1:
        if launch.world_size != size:
            cp = f" * cp {args.cp}" if args.cp > 1 else ""
            raise ConfigError(
                f"{launch.world_size} processes were started, and tp {args.tp} * sp {args.sp}{cp} * dp {args.dp} is {size}"
            )
        return _compare(args, launch)
    if not hasattr(os, "fork"):
        raise ConfigError(
            f"this system cannot start {size} processes by itself: torchrun --nproc-per-node {size} -m megatron_sp schedule ..."
        )
    return _start(args, size)


def _start(args: argparse.Namespace, size: int) -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = mp.get_context("fork")  # torch is loaded already
    sys.stdout.flush()
    processes = [context.Process(target=_process, args=(rank, size, port, args), daemon=True) for rank in range(size)]
    for process in processes:
        process.start()
    processes[0].join()
    for process in processes[1:]:
        process.join(_GRACE_S)
        if process.exitcode is None:
            process.terminate()
    code = processes[0].exitcode
    if code is None or code < 0:
        raise PeerError(
            f"rank 0 was killed by signal {-(code or 0)}: is there memory for {size} processes with two models each?"
        )
    return code


def _process(rank: int, size: int, port: int, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)  # before anything else: OpenMP with more threads hangs after a fork
    try:
        sys.exit(_compare(args, Launch(rank, rank, size, size, 0, ("127.0.0.1", port))))
    except ReportedError as error:
        if rank == 0 or not error.on_all_ranks:
            print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def _compare(args: argparse.Namespace, launch: Launch) -> int:
    torch.manual_seed(args.seed)  # the same weights everywhere
    mesh = Mesh()
    try:
        if launch.world_size > 1:
            init_process_group(launch, torch.device("cpu"), "gloo", _TIMEOUT)
            groups = ParallelGroups.create(
                torch.device("cpu"), tp_size=args.tp, sp_size=args.sp, cp_size=args.cp, timeout=_TIMEOUT
            )
            mesh = Mesh.of(groups)
        s, batch = prepare(args, mesh, meta=False)
        if batch is None:
            torch.manual_seed(args.seed)
            batch = example(s.model, rows=args.batch, tokens=args.seq)
        if batch is None:
            name = type(s.model).__name__
            raise ConfigError(
                f"it is not known what {name} takes: give --factory a function that returns (model, batch)"
            )
        s.model.train()
        verdict = s.measure(batch)
    finally:
        destroy_process_group()
    if launch.rank == 0 and args.json:
        rows = [{"name": row.name, "kind": row.kind, "error": row.error} for row in verdict.rows]
        print(
            json.dumps({"ok": verdict.ok, "tolerance": verdict.tolerance, "first": verdict.first, "comparisons": rows}),
            flush=True,
        )
    elif launch.rank == 0 and verdict.ok:
        print(f"{type(s.model).__name__} over {mesh}: {verdict}", flush=True)
    if not verdict.ok and args.json:
        return NumericsError.exit_code
    if not verdict.ok:
        raise NumericsError(str(verdict))
    return 0
