"""Values of a checkpoint's tensors, read in blocks: ``ckpt show --values``, ``diff``, ``verify --deep``, ``merge``."""

from __future__ import annotations

import math
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_sp.checkpoint import load, stream
from megatron_sp.checkpoint import manifest as files
from megatron_sp.checkpoint.manifest import Manifest, read_manifest, read_state
from megatron_sp.checkpoint.pieces import tiling_problem
from megatron_sp.checkpoint.stream import NativeReader, TensorReader
from megatron_sp.commands.ckpt import folders
from megatron_sp.commands.ckpt.folders import WEIGHTS, Tensors, kind_of, plural, progress, warn
from megatron_sp.config.rules import normalize
from megatron_sp.config.schema import Config
from megatron_sp.data.tokenizers import kept
from megatron_sp.models.bert import BertModel
from megatron_sp.models.classifier import BertClassifier
from megatron_sp.models.experts import expert_biases, stored_dtype
from megatron_sp.models.gpt import GPTModel
from megatron_sp.parallel.layers import shard_specs
from megatron_sp.utils.errors import EXIT_OK, CheckpointError, ConfigError, DiskError, ReportedError
from megatron_sp.utils.format import format_bytes

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PART_BYTES = 8 << 20  # of values that are looked at together
_CLASSES = "classification_head.weight"
_WORDS = "embedding.word_embeddings.weight"


# --------------------------------------------------------------------------------------------------------- statistics


@dataclass
class Values:
    """Statistics of a tensor; all except the counts are of finite values only."""

    count: int = 0
    nans: int = 0
    infinities: int = 0
    zeros: int = 0
    smallest: float = math.inf
    largest: float = -math.inf
    mean: float = 0.0
    norm: float = 0.0  # square root of the sum of squares
    _squares: float = 0.0  # of the distances from the mean
    _finite: int = 0

    @classmethod
    def of(cls, blocks: Iterable[Tensor], progress: Callable[[int], None] = lambda num_bytes: None) -> Values:
        """Compute the statistics of a tensor given in blocks; ``progress`` receives the bytes of each block."""
        values = cls()
        for block in blocks:
            for part in block.reshape(-1).split(max(1, PART_BYTES // block.element_size())):
                values._add(part.double())
            progress(block.numel() * block.element_size())
        return values

    def _add(self, x: Tensor) -> None:
        # sums are in fp64; means and squares of parts are combined as in Chan, Golub and LeVeque (1979)
        good = torch.isfinite(x)
        self.count += x.numel()
        if not bool(good.all()):
            self.nans += int(torch.isnan(x).sum())
            self.infinities += int(torch.isinf(x).sum())
            x = x[good]
        if not x.numel():
            return
        n, mean = x.numel(), float(x.mean())
        total = self._finite + n
        self._squares += float((x - mean).square().sum()) + (mean - self.mean) ** 2 * self._finite * n / total
        self.mean += (mean - self.mean) * n / total
        self._finite = total
        self.zeros += int((x == 0).sum())
        self.smallest, self.largest = min(self.smallest, float(x.min())), max(self.largest, float(x.max()))
        self.norm = math.hypot(self.norm, float(torch.linalg.vector_norm(x)))

    def to_dict(self) -> dict[str, Any]:
        """Return the statistics for JSON (``std`` is the population's), with None for those that are not finite."""
        std = math.sqrt(self._squares / self._finite) if self._finite else math.nan
        numbers = {"min": self.smallest, "max": self.largest, "mean": self.mean, "std": std, "norm": self.norm}
        counts = {"count": self.count, "zeros": self.zeros, "nan": self.nans, "infinite": self.infinities}
        return {name: x if self._finite and math.isfinite(x) else None for name, x in numbers.items()} | counts


def read_values(step_dir: Path, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return statistics of these tensors."""
    reader = NativeReader(step_dir, verified=True)
    with progress("reading tensors", sum(reader.tensors()[name].num_bytes for name in names)) as add:
        return {name: Values.of(reader.blocks(name), add).to_dict() for name in names}


@dataclass
class Distance:
    """Distance of values a from values b; NaN equals NaN."""

    max_abs: float = 0.0  # max|a-b|; inf if only one of the two is finite, or they are different infinities
    largest: float = 0.0  # max|b| over finite values
    beyond: int = 0  # number of values with |a-b| > atol + rtol*|b|
    count: int = 0

    @classmethod
    def of(
        cls, blocks: Iterable[tuple[Tensor, Tensor]], rtol: float, atol: float, progress: Callable[[int], None]
    ) -> Distance:
        """Compute the distance of two tensors, given in blocks of equal shapes; ``progress`` gets the first's bytes."""
        distance = cls()
        for a, b in blocks:
            step = max(1, PART_BYTES // max(a.element_size(), b.element_size()))
            for x, y in zip(a.reshape(-1).split(step), b.reshape(-1).split(step), strict=True):
                distance._add(x, y, rtol, atol)
            progress(a.numel() * a.element_size())
        return distance

    def _add(self, x: Tensor, y: Tensor, rtol: float, atol: float) -> None:
        self.count += x.numel()
        if not x.numel():
            return
        if x.dtype == y.dtype and torch.equal(x, y):  # the common case, and by far the fastest to detect
            finite = y[torch.isfinite(y)] if y.is_floating_point() else y
            self.largest = max(self.largest, float(finite.double().abs().max()) if finite.numel() else 0.0)
            return
        x, y = x.double(), y.double()
        same = (x == y) | (torch.isnan(x) & torch.isnan(y))
        distance = torch.where(same, 0.0, (x - y).abs()).nan_to_num(nan=math.inf, posinf=math.inf)
        size = torch.where(torch.isfinite(y), y.abs(), 0.0)
        self.max_abs, self.largest = max(self.max_abs, float(distance.max())), max(self.largest, float(size.max()))
        self.beyond += int((distance > atol + rtol * size).sum())

    def max_rel(self) -> float:
        """Return max|a-b| / max|b|."""
        if self.max_abs == 0.0:
            return 0.0
        return self.max_abs / self.largest if self.largest else math.inf


def distances(
    step_dirs: Sequence[Path], names: Sequence[str], rtol: float, atol: float
) -> Iterator[tuple[str, Distance]]:
    """Yield the distance of each of these tensors, which have the same shape in both checkpoints."""
    readers = [NativeReader(folder, verified=True) for folder in step_dirs]
    infos = [reader.tensors() for reader in readers]
    with progress("comparing", sum(infos[0][name].num_bytes for name in names)) as add:
        for name in names:
            sizes = [info[name].dtype.itemsize for info in infos]
            # blocks of as many values in both, whatever the dtypes
            limits = [stream.BLOCK_BYTES * size // max(sizes) for size in sizes]
            blocks = [reader.blocks(name, limit) for reader, limit in zip(readers, limits, strict=True)]
            yield name, Distance.of(zip(*blocks, strict=True), rtol, atol, add)


# ------------------------------------------------------------------------------------------------------ verify --deep


def deep_problems(step_dir: Path, listed: Manifest) -> list[str]:
    """Return what is wrong beyond the bytes: tensors are to be complete, finite, and of the configuration's shapes."""
    index: load.Index = defaultdict(list)
    problems, whole = [], set()
    for file in load.data_files(listed):
        try:
            rows = load.read_headers(step_dir, [file])
        except (CheckpointError, OSError) as error:
            problems.append(str(error))
            continue
        for row in rows:  # one by one: the index of a broken row is an error, and the others' are wanted
            try:
                for name, pieces in load.make_index(step_dir, listed, [row]).items():
                    index[name] += pieces
            except CheckpointError as error:
                problems.append(str(error))
    for name, (_, shape) in sorted(listed.tensors.items()):
        if problem := tiling_problem(shape, [piece.rect for piece in index.get(name, [])]):
            problems.append(f"{name} {list(shape)} is not stored completely and once: {problem}")
        else:
            whole.add(name)
    problems += _not_finite(TensorReader(step_dir, stream.tensor_infos(listed), index), whole)
    return [*problems, *_unpaired(listed.tensors), *_of_another_shape(step_dir, listed)]


def _not_finite(reader: TensorReader, names: set[str]) -> Iterator[str]:
    infos = reader.tensors()
    with progress("reading tensors", sum(infos[name].num_bytes for name in names)) as add:
        for name in sorted(names):
            try:
                values = Values.of(reader.blocks(name), add)
            except CheckpointError as error:
                yield str(error)
                continue
            if values.nans or values.infinities:
                counts = f"{values.nans:,} NaN and {values.infinities:,} infinite of {values.count:,}"
                yield f"{name} has values that are not finite: {counts}"


def _unpaired(tensors: Tensors) -> Iterator[str]:
    # optimizer state without its weight, of another shape, or incomplete
    weights, owned = folders.weights_of(tensors), defaultdict(set)
    for name, (_, shape) in sorted(tensors.items()):
        kind, weight = kind_of(name)
        if kind == WEIGHTS:
            continue
        owned[kind].add(weight)
        if weight not in weights:
            yield f"{name} is of a weight that is not there ({weight})"
        elif weights[weight][1] != shape:
            yield f"{name} has the shape {list(shape)}, its weight {list(weights[weight][1])}"
    stepped = set().union(*owned.values())
    rounded = {name for name in stepped if weights.get(name, ("", ()))[0] in ("F16", "BF16")}
    if rounded:  # these have master weights, and those alone
        owned.setdefault("master", set())
    for kind, names in sorted(owned.items()):
        for weight in sorted((rounded if kind == "master" else stepped) - names):
            yield f"optimizer.{kind}.{weight} is missing: other state of this weight is there"


def _of_another_shape(step_dir: Path, listed: Manifest) -> Iterator[str]:
    try:
        state = read_state(step_dir)
        expected = _expected_shapes(state.get("config"), listed.tensors)
    except (ReportedError, OSError) as error:
        yield f"the shapes of the configuration's model cannot be determined: {error}"
        return
    weights = folders.weights_of(listed.tensors)
    for name, shape in sorted(expected.items()):
        if name not in weights:
            yield f"{name} {list(shape)} is missing: the configuration's model has it"
        elif weights[name][1] != shape:
            yield f"{name} has the shape {list(weights[name][1])}, the configuration's model {list(shape)}"
    for name in sorted(set(weights) - set(expected)):
        yield f"{name} {list(weights[name][1])} is not in the configuration's model"
    has_optimizer = any(kind_of(name)[0] != WEIGHTS for name in listed.tensors)
    if state.get("has_optimizer") is not None and bool(state["has_optimizer"]) != has_optimizer:
        stored = "optimizer state" if has_optimizer else "no optimizer state"
        yield f"state.json says has_optimizer {state['has_optimizer']}, but the checkpoint has {stored}"


def _expected_shapes(stored_config: Any, tensors: Tensors) -> dict[str, tuple[int, ...]]:
    # the global shape of every parameter of a configuration's model, which is built without memory for it; the stored
    # tensors determine the number of classes, and the vocabulary size if the configuration does not
    config, _ = Config.from_dict(stored_config)
    normalize(config)
    shape = config.model
    if shape.vocab_size is None and _WORDS in tensors:
        shape.vocab_size = tensors[_WORDS][1][0]
    if not shape.num_layers or shape.num_layers > len(tensors):  # or a wrong number would build layers for hours
        raise ConfigError(f"the configuration has {shape.num_layers} layers, the checkpoint {len(tensors):,} tensors")
    make: Callable[..., torch.nn.Module] = BertModel if shape.is_bert else GPTModel
    if _CLASSES in tensors:
        make = partial(BertClassifier, num_classes=tensors[_CLASSES][1][0])
    unusable = (ValueError, TypeError, AssertionError, ArithmeticError, RuntimeError)
    try:
        with torch.device("meta"):
            model = make(shape, config.kernels, seed=0, dtype=torch.float32)
    except unusable as error:  # none of its numbers can be trusted
        raise ConfigError(f"no model can be built from the configuration: {error or type(error).__name__}") from None
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    shapes |= {name: tuple(spec.shape) for name, spec in shard_specs(model).items() if name in shapes}
    return shapes | {name: tuple(bias.shape) for name, bias in expert_biases(model).items()}


# -------------------------------------------------------------------------------------------------------------- merge


def merge(
    path: Path, ckpt_step: int | None, output: Path, *, weights_only: bool, dtype: str | None,
    allow_non_finite: bool = False,
) -> int:  # fmt: skip
    """Rewrite a checkpoint of many processes as one of a single process, tensor by tensor, in a new run folder."""
    if dtype is not None and not weights_only:
        raise ConfigError(
            f"--dtype {dtype} needs --weights-only: a run goes on from unrounded weights, so only weights for use,"
            " or to finetune, can be converted"
        )
    stream.require_no_checkpoint(output)  # before the source is read
    step_dir = folders.step_folder(path, ckpt_step)
    listed = read_manifest(step_dir)
    files.require_none(step_dir, folders.byte_problems(step_dir, listed))
    reader = NativeReader(step_dir, verified=True)
    finite = stream.FiniteTensors(allow=allow_non_finite)
    sources = _sources(reader, finite, weights_only, None if dtype is None else DTYPES[dtype])
    state = dict(reader.state)
    state["layout"] = {"world_size": 1, "dp": 1, "cp": 1, "sp": 1, "tp": 1, "tp_seq": False, "sp_overlap": None}
    state |= {"has_optimizer": False} if weights_only else {}
    is_new = not output.exists()
    try:
        with progress("merging", sum(stream.TensorInfo(s.shape, s.dtype).num_bytes for s in sources.values())) as add:
            if (tokenizer := kept.Record.from_json(state.get("tokenizer"))) is not None:
                try:
                    output.mkdir(parents=True, exist_ok=True)
                    state["tokenizer"] = kept.copy(tokenizer, step_dir, output)._asdict()
                except OSError as error:
                    raise DiskError(f"the tokenizer cannot be written into {output}: {error.strerror}") from None
            written = stream.write_checkpoint(output, listed.step, sources, state, progress=add)
    except BaseException:
        if is_new:  # the tokenizer is there before the tensors
            shutil.rmtree(output, ignore_errors=True)
        raise
    for note in finite.notes():
        warn(note)
    new = read_manifest(written)
    files.require_none(written, folders.byte_problems(written, new))
    processes = plural(listed.world_size, "process", "processes")
    was = f"{format_bytes(listed.num_bytes)} in {plural(len(listed.files), 'file')} of {processes}"
    size = f"{format_bytes(new.num_bytes)} in {plural(len(new.files), 'file')}, {plural(len(new.tensors), 'tensor')}"
    print(f"{written}: {size}, verified (was {was})")
    return EXIT_OK


def _sources(
    reader: NativeReader, finite: stream.FiniteTensors, weights_only: bool, dtype: torch.dtype | None
) -> dict[str, stream.Source]:
    def read(name: str, wanted: torch.dtype) -> Tensor:
        return finite.look(name, reader.read(name), wanted).to(wanted)

    tensors, sources = reader.tensors(), {}
    for name, (shape, stored) in tensors.items():
        if weights_only and kind_of(name)[0] != WEIGHTS:
            continue
        # weights of another dtype come from the master weights, to round only once
        wanted, master = stored_dtype(name, stored, dtype), f"optimizer.master.{name}"
        origin = master if wanted != stored and master in tensors else name
        sources[name] = stream.Source(shape, wanted, partial(read, origin, wanted))
    return sources
