"""Actions of ``megatron-sp schedule`` but ``train``, and the model they are about.

The model is built from a config.json, which is data only, or by a function that the user names, which is code.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import json
import os
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch
import torch.multiprocessing as mp
from torch import nn

from megatron_sp.comm.groups import ParallelGroups, destroy_process_group, init_process_group
from megatron_sp.ops import availability
from megatron_sp.schedule import Mesh, Schedule, presets, schedule
from megatron_sp.schedule.core.directives import expand
from megatron_sp.schedule.report.show import as_record, explain
from megatron_sp.schedule.report.survey import survey
from megatron_sp.schedule.verify.proof import example
from megatron_sp.utils.errors import EXIT_OK, ConfigError, NumericsError, PeerError, ReportedError
from megatron_sp.utils.launch import Launch

MAX_CONFIG_BYTES = 4 * 1024 * 1024
_TIMEOUT = timedelta(minutes=10)
_GRACE_S = 20  # for other ranks to end, once the first has
Batch = dict[str, Any]


def run(args: argparse.Namespace) -> int:
    """Run an action; return the exit code."""
    if args.factory and (args.class_name or args.settings):
        raise ConfigError("--class and --set are about a config.json: with --factory your function decides")
    if args.action == "verify":
        return _verify(args)
    s, _ = _prepare(args, Mesh.sizes(args.tp, args.sp, args.dp, cp=args.cp), meta=True)
    if args.action == "check":
        verdict, lines = s.check(), len(s.directives)
        text = f"{lines} lines on {type(s.model).__name__}, {s.mesh}: {verdict}"
        print(json.dumps({"ok": True, "lines": lines}) if args.json else text)
    elif args.action == "show":
        _show(s, args)
    else:
        paths, surveyed = expand(s.model, args.path), survey(s)
        if args.json:
            print(json.dumps({path: as_record(surveyed, path) for path in paths}))
        else:
            print("\n".join(explain(surveyed, path) for path in paths))
    return EXIT_OK


def _prepare(args: argparse.Namespace, mesh: Mesh, *, meta: bool) -> tuple[Schedule, Batch | None]:
    # (schedule on its model, batch if the factory returned one)
    model, batch = _from_factory(args.factory) if args.factory else (_from_folder(args, meta=meta), None)
    if args.plan == "auto":
        return presets.auto(model, mesh, seq=args.seq_parallel), batch
    if args.seq_parallel:
        raise ConfigError(f"--seq-parallel is for the preset (`auto`): {args.plan} says itself what is cut")
    return schedule(model, mesh).load(args.plan), batch


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


# ------------------------------------------------------------------------------------------------------------- verify


def _verify(args: argparse.Namespace) -> int:
    # on the launcher's ranks, or on local processes that are started here
    size, launch = args.tp * args.sp * args.cp * args.dp, Launch.from_env()
    if launch.world_size > 1 or size == 1:
        if launch.world_size != size:
            sizes = f"tp {args.tp} * sp {args.sp}{f' * cp {args.cp}' if args.cp > 1 else ''} * dp {args.dp}"
            raise ConfigError(f"{launch.world_size} processes were started, and {sizes} is {size}")
        return _compare(args, launch)
    if not hasattr(os, "fork"):
        way = f"torchrun --nproc-per-node {size} -m megatron_sp schedule ..."
        raise ConfigError(f"this system cannot start {size} processes by itself: {way}")
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
        hint = f"is there memory for {size} processes with two models each?"
        raise PeerError(f"rank 0 was killed by signal {-(code or 0)}: {hint}")
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
    mesh, device = Mesh(), torch.device("cpu")
    try:
        if launch.world_size > 1:
            init_process_group(launch, device, "gloo", _TIMEOUT)
            sizes = {"tp_size": args.tp, "sp_size": args.sp, "cp_size": args.cp}
            mesh = Mesh.of(ParallelGroups.create(device, **sizes, timeout=_TIMEOUT))
        s, batch = _prepare(args, mesh, meta=False)
        name = type(s.model).__name__
        if batch is None:
            torch.manual_seed(args.seed)
            batch = example(s.model, rows=args.batch, tokens=args.seq)
        if batch is None:
            way = "give --factory a function that returns (model, batch)"
            raise ConfigError(f"it is not known what {name} takes: {way}")
        s.model.train()
        verdict = s.measure(batch)
    finally:
        destroy_process_group()
    if launch.rank == 0 and args.json:
        rows = [{"name": row.name, "kind": row.kind, "error": row.error} for row in verdict.rows]
        record = {"ok": verdict.ok, "tolerance": verdict.tolerance, "first": verdict.first, "comparisons": rows}
        print(json.dumps(record), flush=True)
    elif launch.rank == 0 and verdict.ok:
        print(f"{name} over {mesh}: {verdict}", flush=True)
    if not verdict.ok and not args.json:
        raise NumericsError(str(verdict))
    return EXIT_OK if verdict.ok else NumericsError.exit_code


# ----------------------------------------------------------------------------------------- the model of a config.json


def _from_folder(args: argparse.Namespace, *, meta: bool) -> nn.Module:
    # a model of transformers with random weights, or on the meta device, which takes no memory for them
    folder: str = args.model
    data = _read(folder)
    try:
        library = availability.load("transformers")
    except RuntimeError as error:
        way = "pip install -e '.[hf]', or take --factory"
        raise ConfigError(f"--model needs transformers, and {error}: {way}") from None
    model_type = data.get("model_type")
    if not isinstance(model_type, str) or model_type not in library.CONFIG_MAPPING:
        reason = "code that comes with a model is never run: take --factory"
        raise ConfigError(f"{folder}: model_type {model_type!r} is none of transformers' own; {reason}")
    clean = {key: value for key, value in data.items() if key not in ("auto_map", "quantization_config")}
    try:
        config = library.CONFIG_MAPPING[model_type].from_dict(clean)
    except Exception as error:  # transformers raises exception classes of its own for what it rejects
        raise ConfigError(f"{folder}: config.json is no {model_type}'s: {error}") from None
    _change(config, args.settings)
    name = args.class_name or next(iter(data.get("architectures") or []), None)
    cls: Any = getattr(library, name, None) if name and name.isidentifier() else None
    if not (inspect.isclass(cls) and issubclass(cls, library.PreTrainedModel)):
        what = f"{name!r} is not a model of transformers" if name else "config.json names no class (architectures)"
        raise ConfigError(f"{folder}: {what}: name one with --class, such as LlamaForCausalLM")
    build = cast("Callable[[Any], nn.Module]", cls)
    try:
        with torch.device("meta") if meta else nullcontext():
            return build(config)
    except (ValueError, TypeError, RuntimeError, AttributeError) as error:
        raise ConfigError(f"{folder}: {cls.__name__} cannot be made of its config.json: {error}") from None


def _read(folder: str) -> dict[str, Any]:
    path = Path(folder)
    path = path / "config.json" if path.is_dir() else path
    try:
        with open(path, "rb") as file:
            raw = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        text = f"--model {folder}: {path} cannot be read: {error.strerror}; it is a folder on this machine"
        raise ConfigError(text) from None
    try:
        data = json.loads(raw) if len(raw) <= MAX_CONFIG_BYTES else None
    except (ValueError, RecursionError):  # a deep nest of brackets is the second
        data = None
    if not isinstance(data, dict):
        raise ConfigError(f"{path} is not the config.json of a model: an object in JSON")
    return data


def _change(config: Any, settings: Sequence[str]) -> None:
    # override settings by KEY=VALUE, with VALUE in JSON or as a plain string
    for setting in settings:
        key, sign, value = setting.partition("=")
        if not sign or not hasattr(config, key) or key.startswith("_") or callable(getattr(config, key)):
            raise ConfigError(f"--set {setting}: want KEY=VALUE, with a KEY of config.json")
        try:
            parsed = json.loads(value)
        except ValueError:
            parsed = value
        try:
            setattr(config, key, parsed)
        except Exception as error:  # a property that refuses: whatever transformers raises there
            raise ConfigError(f"--set {setting}: {error}") from None


# ------------------------------------------------------------------------------------------ the model of a function


def _from_factory(name: str) -> tuple[nn.Module, Batch | None]:
    place, _, function = name.rpartition(":")
    if not place or not function.isidentifier():
        raise ConfigError(f"--factory {name}: want MODULE:FUNCTION or FILE.py:FUNCTION")
    make: Callable[[], Any] | None = getattr(_module(place, name), function, None)
    if not callable(make):
        raise ConfigError(f"--factory {name}: {place} has no function {function}")
    try:
        result = make()
    except ReportedError:
        raise
    except Exception as error:  # whatever the user's function may raise
        raise ConfigError(f"--factory {name}: the function fails at {_where(error)}") from error
    model, batch = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    if not isinstance(model, nn.Module) or not (batch is None or isinstance(batch, dict)):
        wanted = f"--factory {name} must return a model, or (model, dict of keyword arguments)"
        raise ConfigError(f"{wanted}, and returned {type(result).__name__}")
    return model, batch


def _module(place: str, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(place).stem, place) if place.endswith(".py") else None
    if place.endswith(".py") and not (spec and spec.loader and os.path.isfile(place)):
        raise ConfigError(f"--factory {name}: there is no file {place}")
    try:
        if spec is not None and spec.loader is not None:
            module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return module
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())  # as `python -m` does
        return importlib.import_module(place)
    except Exception as error:  # whatever a module of the user's may raise
        if isinstance(error, ModuleNotFoundError) and spec is None:
            text = f"--factory {name}: {error}; modules are looked for from here and among installed packages"
            raise ConfigError(text) from None
        raise ConfigError(f"--factory {name}: the file fails at {_where(error)}") from error


def _where(error: Exception) -> str:
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}: {type(error).__name__}: {error.msg}"
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.filename}:{frame.lineno}: {type(error).__name__}: {error}"
