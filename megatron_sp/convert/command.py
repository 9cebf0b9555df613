"""Command ``megatron-sp convert``: checks the flags, runs the steps in order and prints the messages."""

from __future__ import annotations

import argparse
import glob
import json
import re
import shutil
import signal
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from megatron_sp import __version__
from megatron_sp.checkpoint.stream import FiniteTensors
from megatron_sp.config.schema_model import is_expert_bias
from megatron_sp.convert.archive.dist_folder import MAX_METADATA_BYTES
from megatron_sp.convert.arguments import MAX_SHARD_SIZE
from megatron_sp.convert.copies import Store
from megatron_sp.convert.formats import FORMATS, detect
from megatron_sp.convert.formats.native import ForeignModel
from megatron_sp.convert.model import OPTIMIZER, Model, Options, Progress, Writer, parse_settings
from megatron_sp.models.experts import stored_dtype
from megatron_sp.utils.entry_point import is_out_of_memory
from megatron_sp.utils.errors import EXIT_OK, CheckpointError, ConfigError, DiskError
from megatron_sp.utils.files import free_bytes, fsync_dir, require_place, write_output, write_synced
from megatron_sp.utils.format import format_parameters

REPORT = "conversion.json"
_SPACE_FACTOR = 1.05
_MAX_METADATA_MB = 1024
_SECONDS = 10.0  # between two lines of progress
_RANKS = ("megatron", "megatron-dist", "megatron-deepspeed")  # formats with a file per rank
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "": 1, "B": 1}


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    try:
        return _run(args)
    except CheckpointError as error:
        message = str(error)
        if not any(str(path) in message for path in (args.input, args.output)):
            message = f"{args.input}: {message}"
        lines = (line if line.isprintable() else _plain(line) for line in message.splitlines())  # some is from files
        raise CheckpointError("\n".join(lines)) from None
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise CheckpointError(f"{args.input} needs more memory than there is: for its largest tensor and about as much"
                              " again. Use a machine with more") from None  # fmt: skip
    except OSError as error:  # errors of writing have been converted to ReportedError
        raise CheckpointError(f"{error.filename or args.input} cannot be read: {error.strerror or error}") from None


def _run(args: argparse.Namespace) -> int:
    options = _options(args)
    require_absent(args.output)
    if args.report is not None:
        require_place(args.report, "--report")
    if not args.input.is_dir():
        raise CheckpointError(f"--input {args.input} is {'a file' if args.input.exists() else 'not there'}: give the"
                              " folder of a checkpoint")  # fmt: skip
    source = FORMATS[args.source] if args.source != "auto" else detect(args.input)
    target = FORMATS[args.target]
    _require_use(args, source.name)
    if source.name == "megatron_sp" and (foreign := ForeignModel.read(args.input, options)) is not None:
        return _export(foreign, args, options)
    model = source.read(args.input, options)
    has_optimizer = bool(model.kinds())
    _tell(f"{args.input}: {source.name}, {_describe(model)}")
    num_told = len(model.notes)
    for note in (*model.notes, *_about_widening(model, options, args)):
        _tell(f"note: {note}")
    if has_optimizer and options.optimizer and not target.holds_optimizer:
        _tell(f"note: the optimizer's state is left out: {target.name} cannot hold it")
    finite = FiniteTensors(allow=args.allow_non_finite)
    source_store = model.store

    def look(name: str) -> torch.Tensor:
        tensor = source_store.read(name)
        wanted = None if name.startswith(OPTIMIZER) else options.dtype
        return finite.look(name, tensor, stored_dtype(name, tensor.dtype, wanted))

    model.store = Store(source_store.tensors(), look)
    report = {
        "from": source.name, "input": str(args.input), "to": args.target, "step": model.step,
        "megatron_sp": __version__,
        "tensors": [{"source": fate.name, "to": fate.went, "note": fate.why} for fate in model.fates],
    }  # fmt: skip
    started = time.perf_counter()
    with progress_bar(target.size(model, options)) as advance:
        convert(model, target, args.output, options, advance, report, _tell)
    seconds, num_bytes = time.perf_counter() - started, target.size(model, options)
    _tell(f"{args.output}: {target.name}, {num_bytes / 1e6:,.1f} MB in {seconds:.1f} s,"
          f" {num_bytes / 1e6 / max(seconds, 1e-9):,.0f} MB/s")  # fmt: skip
    for note in (*model.notes[num_told:], *finite.notes()):  # the writer's notes
        _tell(f"note: {note}")
    for fate in model.fates if args.show_tensors else ():
        print(f"{_plain(fate.name)} -> {fate.went or 'dropped'}{': ' + fate.why if fate.why else ''}")
    dropped = Counter(fate.why for fate in model.fates if not fate.went and not args.show_tensors)
    for why, count in dropped.items():
        _tell(f"dropped {count} tensor{'s' if count > 1 else ''}: {why}")
    if args.report is not None:
        try:
            write_output(args.report, json.dumps(report, indent=1) + "\n")
        except OSError as error:
            raise DiskError(f"--report {args.report} was not written, --output was:"
                            f" {error.strerror or error}") from None  # fmt: skip
    if not args.verify and args.verify_text is None:
        return EXIT_OK
    from megatron_sp.convert.verify import verify

    return verify(source, args.input, target, args.output, options, args.verify_text, _tell)


def _about_widening(model: Model, options: Options, args: argparse.Namespace) -> Iterator[str]:
    # 16-bit weights do not become more exact in float32
    narrow = {info.dtype for info in model.weights().values() if info.dtype.itemsize == 2}
    if options.dtype != torch.float32 or not narrow:
        return
    note = (f"the weights are in {str(narrow.pop()).removeprefix('torch.')}, and float32 has the same numbers in more"
            " bytes")  # fmt: skip
    if "master" in model.kinds():
        step = "" if args.step is None else f"/checkpoints/step-{args.step:06d}"
        note += ("; the optimizer's master copies have more of them: megatron-sp ckpt merge --weights-only --dtype fp32"
                 f" {args.input}{step} --output DIR makes a run of these, to be converted instead")  # fmt: skip
    yield note


def _export(model: ForeignModel, args: argparse.Namespace, options: Options) -> int:
    _tell(f"{args.input}: {model.describe()}")
    if args.target != "hf":
        raise CheckpointError(f"{args.input} is of a model of transformers, under its own names: write it with --to hf,"
                              f" and convert that folder to {args.target} if its family is one that can"
                              " be")  # fmt: skip
    if args.verify or args.verify_text is not None:
        raise ConfigError("--verify compares with this project's own models, and the run is of one of transformers:"
                          " leave it out")  # fmt: skip
    for note in model.notes:
        _tell(f"note: {note}")
    report = {"from": "megatron_sp", "input": str(args.input), "to": args.target, "megatron_sp": __version__}
    with progress_bar(model.size(None, options)) as advance:
        convert(model, model, args.output, options, advance, report, _tell)
    _tell(f"{args.output}: {args.target}")
    return EXIT_OK


def _describe(model: Model) -> str:
    count = sum(torch.Size(info.shape).numel() for name, info in model.weights().items() if not is_expert_bias(name))
    dtypes = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in model.dtypes))
    kind = "classifier" if model.num_classes else "BERT" if model.config.is_bert else "GPT"
    step, state = f", step {model.step}" if model.step else "", "with" if model.kinds() else "without"
    return f"{kind} of {format_parameters(count)} parameters in {dtypes}{step}, {state} optimizer state"


def _options(args: argparse.Namespace) -> Options:
    for flag, value in (("--vocab-size", args.vocab_size),
                        ("--target-tensor-parallel-size", args.target_tensor_parallel_size),
                        ("--target-pipeline-parallel-size", args.target_pipeline_parallel_size),
                        ("--target-expert-parallel-size", args.target_expert_parallel_size)):  # fmt: skip
        if value is not None and value < 1:
            raise ConfigError(f"{flag} ({value}) must be at least 1")
    if args.max_metadata_mb is not None and not 1 <= args.max_metadata_mb <= _MAX_METADATA_MB:
        raise ConfigError(f"--max-metadata-mb ({args.max_metadata_mb}) must be from 1 to {_MAX_METADATA_MB}")
    if args.step is not None and args.step < 0:
        raise ConfigError(f"--step ({args.step}) must be at least 0")
    size = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", args.max_shard_size)  # 5GB, or a plain number
    max_shard_bytes = float(size[1]) * _UNITS.get(size[2].upper(), 0) if size else 0
    if max_shard_bytes < 1:
        raise ConfigError(f"--max-shard-size ({args.max_shard_size[:40]}) must be a size: 5GB, 500MB, 1GiB")
    return Options(
        step=args.step, qkv_layout=args.qkv_layout, vocab_size=args.vocab_size, tokenizer=args.tokenizer,
        optimizer=not args.no_optimizer, dtype=getattr(torch, args.dtype) if args.dtype else None,
        tp=args.target_tensor_parallel_size, pp=args.target_pipeline_parallel_size, ep=args.target_expert_parallel_size,
        max_shard_bytes=int(max_shard_bytes), given=parse_settings(args.set), megatron_names=args.megatron_names,
        deepspeed_layout=args.deepspeed_layout, deepspeed_qkv_layout=args.deepspeed_qkv_layout,
        max_metadata_mb=args.max_metadata_mb or MAX_METADATA_BYTES >> 20,
    )  # fmt: skip


def _require_use(args: argparse.Namespace, source: str) -> None:
    """Refuse flags that have no effect for these formats: the user expects an effect and would notice too late."""
    read = {
        "--set": (bool(args.set), _RANKS), "--vocab-size": (args.vocab_size is not None, _RANKS),
        "--qkv-layout": (args.qkv_layout is not None, _RANKS),
        "--max-metadata-mb": (args.max_metadata_mb is not None, ("megatron-dist",)),
    }  # fmt: skip
    write = {
        "--target-tensor-parallel-size": (args.target_tensor_parallel_size > 1, _RANKS),
        "--target-pipeline-parallel-size": (args.target_pipeline_parallel_size > 1, _RANKS),
        "--target-expert-parallel-size": (args.target_expert_parallel_size > 1, ("megatron",)),
        "--megatron-names": (args.megatron_names != "core", ("megatron",)),
        "--deepspeed-layout": (args.deepspeed_layout is not None, ("megatron-deepspeed",)),
        "--deepspeed-qkv-layout": (args.deepspeed_qkv_layout != "flat", ("megatron-deepspeed",)),
        "--max-shard-size": (args.max_shard_size != MAX_SHARD_SIZE, ("hf",)),
    }
    for what, name, flags in (("--from", source, read), ("--to", args.target, write)):
        useless = [flag for flag, (is_given, formats) in flags.items() if is_given and name not in formats]
        if useless:
            users = flags[useless[0]][1]
            raise ConfigError(f"{', '.join(useless)} would change nothing for {what} {name}: {useless[0]} is for"
                              f" {', '.join(users)}; leave it out")  # fmt: skip


def _plain(name: str) -> str:
    return name if name.isascii() and name.isprintable() else name.encode("unicode_escape").decode("ascii")


def _tell(line: str) -> None:
    print(line, file=sys.stderr)


def convert(
    model: Any, target: Writer, output: Path, options: Options, progress: Progress, report: dict[str, Any],
    tell: Callable[[str], None],
) -> None:  # fmt: skip
    """Write ``output`` with a report, completely or not at all: it appears by one rename once everything is on disk.

    Raises CheckpointError if it exists or the target cannot store the model, DiskError if it cannot be written, and
    KeyboardInterrupt after a signal. Nothing is left behind then, not even new parent folders.
    """
    require_absent(output)
    options.output = output.absolute()
    needed = int(_SPACE_FACTOR * target.size(model, options))
    new_folders = [folder for folder in output.absolute().parents if not folder.exists()]  # deepest first
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        if (free := free_bytes(output.parent)) < needed:
            raise DiskError(f"{output.parent} has {free / 1e6:,.1f} MB free, {needed / 1e6:,.1f} MB are needed: nothing"
                            " was written")  # fmt: skip
        for path in sorted(output.parent.glob(f".{glob.escape(output.name)}.part-*")):
            tell(f"note: {path} is left over from a conversion that was cut off, or another one is writing it now: if"
                 " not, delete it")  # fmt: skip
        staging = output.parent / f".{output.name}.part-{uuid.uuid4().hex[:12]}"
        with _removed_unless_done(staging):
            target.write(model, staging, options, progress)
            write_synced(staging / REPORT, (json.dumps(report, indent=1) + "\n").encode("utf-8"))
            fsync_dir(staging)
            require_absent(output)
            staging.rename(output)
            fsync_dir(output.parent)
    except OSError as error:
        raise DiskError(f"{output} was not written: {error.strerror or error} ({error.filename or output})") from None
    except DiskError as error:  # the writer knows only its temporary folder
        raise DiskError(str(error) if str(output) in str(error) else f"{output} was not written: {error}") from None
    except KeyboardInterrupt:
        if not output.exists():
            tell(f"{output} was not written: a signal stopped the conversion, and nothing of it is left")
        raise
    finally:
        if not output.exists():
            with suppress(OSError):  # another program has put something there in the meantime
                for folder in new_folders:
                    folder.rmdir()


def require_absent(output: Path) -> None:
    """Refuse to write over something."""
    try:
        is_there = output.exists() or output.is_symlink()
    except OSError as error:
        raise DiskError(f"--output {str(output)[:300]} cannot be written: {error.strerror or error}") from None
    if is_there:
        raise CheckpointError(f"--output {output} is there already: nothing is ever written over, name a folder that"
                              " does not exist")  # fmt: skip


@contextmanager
def _removed_unless_done(staging: Path) -> Iterator[None]:
    # after SIGKILL it remains, under a name that nothing reads
    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop) if threading.current_thread() is threading.main_thread() else None
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)
        if staging.exists():
            shutil.rmtree(staging, ignore_errors=True)


@contextmanager
def progress_bar(total: int) -> Iterator[Progress]:
    """Yield what counts the bytes that have been written: it draws a bar, or prints a line now and then."""
    if sys.stderr.isatty():
        from rich import progress
        from rich.console import Console

        columns = (progress.BarColumn(), progress.DownloadColumn(), progress.TransferSpeedColumn())
        with progress.Progress(*columns, progress.TimeRemainingColumn(), console=Console(stderr=True)) as bar:
            task = bar.add_task("", total=max(1, total))
            yield lambda num_bytes: bar.advance(task, num_bytes)
        return
    done, last = 0, time.monotonic()

    def advance(num_bytes: int) -> None:
        nonlocal done, last
        done += num_bytes
        if time.monotonic() - last >= _SECONDS:
            last = time.monotonic()
            print(f"{100 * done / max(1, total):.0f} % of {max(1, total) / 1e6:,.0f} MB", file=sys.stderr, flush=True)

    yield advance
