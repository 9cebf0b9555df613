"""``--verify``: compare the logits of both sides of a conversion, and locate the first difference.

A side is our own model, the class of transformers, or the reference for Megatron's files. The error of an output is
max|a - b| / max|a|. 16-bit weights are computed in fp32; where the conversion has rounded the weights, those of the
source are rounded too before computing, so that rounding cannot explain a difference.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron_sp.config.schema import DataConfig
from megatron_sp.config.schema_model import is_expert_bias
from megatron_sp.convert import reference
from megatron_sp.convert.copies import widest
from megatron_sp.convert.families import FAMILIES
from megatron_sp.convert.formats.deepspeed_files import find
from megatron_sp.convert.formats.megatron_files import iteration_folder
from megatron_sp.convert.model import Format, Model, Options, build, stored_names
from megatron_sp.convert.reference import CLASSES, MASKED, NEXT, ORDER, OUTPUTS, Cast, Rows
from megatron_sp.data.tokenizers import Tokenizer, build_tokenizer
from megatron_sp.data.tokenizers.kept import CONFIG, name_files
from megatron_sp.models.bert import BertModel
from megatron_sp.models.classifier import BertClassifier
from megatron_sp.models.gpt import GPTModel
from megatron_sp.ops import availability
from megatron_sp.ops.attention import AttentionMask
from megatron_sp.parallel.forward_context import ForwardContext
from megatron_sp.parallel.layers import shard_specs
from megatron_sp.utils.errors import EXIT_NUMERICS, EXIT_OK, CheckpointError, ConfigError
from megatron_sp.utils.host import host_memory_bytes

LIMITS = {torch.float32: 2e-5, torch.float64: 1e-10}
"""Largest error of logits, relative to the largest logit, by what they are computed in."""
_SEED, _LENGTHS, _MAX_TEXT, _LONGEST = 1234, (48, 31, 7, 1), 64, 600
_TOPICS = ("for", "class", "lambda")  # of Python's own documentation
_MASK_EVERY = 7
_CHOICE = {NEXT: "next token", MASKED: "masked token", ORDER: "order", CLASSES: "class"}

Tell = Callable[[str], None]
Computed = Iterator[tuple[str, Tensor]]


class Side(NamedTuple):
    """One side of a comparison."""

    label: str  # name of the implementation, for the report
    # yields hidden states after the embedding and each layer, then the outputs, by name: [b, s, ...] or [b, ...]; each
    # weight is passed through the ``Cast`` when it is read
    compute: Callable[[Rows, Cast], Computed]
    # dtype of the weights it computes with; None if these are the weights that the conversion reads
    dtype: torch.dtype | None = None
    is_transformers: bool = False


def our_side(source: Model, label: str = "megatron_sp") -> Side:
    """Return our own model with the weights that a format has read, which are loaded one block at a time."""
    return Side(label, lambda rows, cast: _compute_ours(source, rows, cast))


@torch.no_grad()  # a ``with`` inside the generator would leave autograd off in the caller between two results
def _compute_ours(source: Model, rows: Rows, cast: Cast) -> Computed:
    is_bert, seen = source.config.is_bert, list[Tensor]()
    dtype = cast(torch.zeros((), dtype=torch.float32)).dtype
    net = build(source.config, source.num_classes, dtype)
    specs = shard_specs(net)

    def put(name: str, tensor: Tensor) -> None:
        owner, _, leaf = name.rpartition(".")
        value = tensor if is_expert_bias(name) else nn.Parameter(tensor, requires_grad=False)
        setattr(net.get_submodule(owner), leaf, value)

    def load(names: Iterable[str]) -> None:
        for name in names:
            stored = source.store.read(name)
            if is_expert_bias(name):  # never rounded
                put(name, stored.to(dtype))
                continue
            weight, shape = cast(stored), net.get_parameter(name).shape
            if shape != specs[name].shape:  # padding rows of the vocabulary
                padded = torch.zeros(shape, dtype=weight.dtype)
                padded[: len(weight)] = weight
                weight = padded
            put(name, weight)

    def forget(names: Iterable[str]) -> None:
        for name in names:
            owner, _, leaf = name.rpartition(".")
            put(name, getattr(net.get_submodule(owner), leaf).to("meta"))

    blocks, prefixes = list(net.stack.layers), [unit.name for unit in net.units() if unit.alike == "block"]
    in_blocks = tuple(f"{prefix}." for prefix in prefixes)
    load(name for name in stored_names(net) if not name.startswith(in_blocks))
    net.embedding.register_forward_hook(lambda module, inputs, x: seen.append(x))
    for prefix, block in zip(prefixes, blocks, strict=True):
        names = [f"{prefix}.{name}" for name in stored_names(block)]
        block.register_forward_pre_hook(lambda module, inputs, names=names: load(names))
        block.register_forward_hook(lambda module, inputs, x, names=names: forget(names))
        block.register_forward_hook(lambda module, inputs, x: seen.append(x))
    lengths = torch.tensor(rows.lengths) if is_bert else None
    context = ForwardContext(AttentionMask(causal=not is_bert, key_lengths=lengths))
    x = net.hidden(rows.tokens, context, types=rows.types if is_bert and source.config.token_types else None)
    yield "embedding", seen[0].transpose(0, 1)
    for layer, hidden in enumerate(seen[1:]):
        yield f"layer {layer}", hidden.transpose(0, 1)
    if isinstance(net, GPTModel):
        yield NEXT, net.logits(x).transpose(0, 1)
    elif isinstance(net, BertClassifier):
        yield CLASSES, net.classification_head(net.pooler(x[0]))
    elif isinstance(net, BertModel):
        yield MASKED, net.predictions(x).transpose(0, 1)
        if net.binary_head is not None:
            yield ORDER, net.binary_head(net.pooled(x))


def transformers_side(folder: Path, document: dict[str, Any], tensors: set[str]) -> Side:
    """Return the transformers model of a folder, loaded from that folder only: no network, no code of a model's own.

    ``tensors`` are the names in the files: they tell the class that computes all heads. The whole model is in memory.
    """
    has_order, classifies = "cls.seq_relationship.weight" in tensors, "classifier.weight" in tensors
    cls = FAMILIES[document["model_type"]].architecture(classifies=classifies, has_order=has_order)
    label = f"transformers {availability.find('transformers').version}, {cls}"

    def compute(rows: Rows, cast: Cast) -> Computed:
        net = _load_transformers(folder, cls, label, cast)
        lists = (module for module in net.modules() if isinstance(module, nn.ModuleList))
        layers = next(blocks for blocks in lists if len(blocks) == net.config.num_hidden_layers)
        seen: list[Tensor] = []

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            seen.append(args[0] if args else kwargs["hidden_states"])

        def after(module: nn.Module, args: Any, out: Any) -> None:
            seen.append(out[0] if isinstance(out, tuple) else out)

        layers[0].register_forward_pre_hook(before, with_kwargs=True)
        for layer in layers:
            layer.register_forward_hook(after)
        more: dict[str, Any] = {}
        if "Bert" in cls:
            inside = torch.arange(rows.tokens.shape[1]) < torch.tensor(rows.lengths)[:, None]
            more = {"token_type_ids": rows.types, "attention_mask": inside.long()}
        try:
            with torch.no_grad():
                outputs = net(input_ids=rows.tokens, **more)
        except Exception as error:  # of many types: config.json asks for something that this version does not compute
            raise CheckpointError(f"{label} cannot compute {folder}: {_short(error)}") from None
        yield "embedding", seen[0]
        yield from ((f"layer {i}", hidden) for i, hidden in enumerate(seen[1:]))
        if cls.endswith("ForPreTraining"):
            yield MASKED, outputs.prediction_logits
            yield ORDER, outputs.seq_relationship_logits
        else:
            name = CLASSES if cls.endswith("SequenceClassification") else MASKED if cls.endswith("MaskedLM") else NEXT
            yield name, outputs.logits

    return Side(label, compute, is_transformers=True)


def _load_transformers(folder: Path, cls: str, label: str, cast: Cast) -> Any:
    dtype = cast(torch.zeros((), dtype=torch.float32)).dtype
    offline = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_DISABLE_TELEMETRY", "HF_HUB_DISABLE_PROGRESS_BARS")
    before = {name: os.environ.get(name) for name in offline}
    os.environ.update(dict.fromkeys(offline, "1"))
    try:
        transformers = availability.load("transformers")
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        try:
            net, report = getattr(transformers, cls).from_pretrained(
                folder, local_files_only=True, trust_remote_code=False, use_safetensors=True, dtype=dtype,
                attn_implementation="eager", output_loading_info=True,
            )  # fmt: skip
        except Exception as error:  # its versions raise many types: the folder is not one that they read
            raise CheckpointError(f"{label} cannot load {folder}: {_short(error)}") from None
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
    lacking = sorted(report["missing_keys"]) + sorted(str(name) for name in report.get("mismatched_keys", ()))
    if lacking:
        raise CheckpointError(f"{label} does not find {', '.join(lacking[:5])} in {folder}: that is not a whole model")
    for tensor in net.parameters():
        tensor.requires_grad_(False).copy_(cast(tensor))
    for module in net.modules():  # experts in a loop: the grouped products lack dtypes
        config: Any = module.__dict__.get("config")
        if getattr(config, "_experts_implementation", None) not in (None, "eager"):
            config._experts_implementation = "eager"
    return net.eval()


def _short(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


def side_of(format_name: str, path: Path, read: Model, options: Options, tell: Tell) -> Side:
    """Return the most independent implementation for a checkpoint that has been read, and tell if there is none."""
    if format_name == "megatron_sp":
        return our_side(read)
    if format_name == "hf":
        needed, free = 4 * sum(torch.Size(i.shape).numel() for i in read.weights().values()), host_memory_bytes()
        if not any(path.glob("*.safetensors")):
            why = "transformers is asked to read safetensors alone"
        elif not availability.installed("transformers").available:
            why = "transformers is not installed (pip install transformers)"
        elif free is not None and needed > 0.6 * free:
            why = f"transformers would take {needed / 2**30:.1f} of the {free / 2**30:.1f} GiB that are free"
        else:
            return transformers_side(path, read.settings["hf"], {fate.name for fate in read.fates})
    else:
        is_deepspeed = format_name == "megatron-deepspeed"
        folder = find(path, options.step).path if is_deepspeed else iteration_folder(path, options.step)
        assert folder is not None, "it was read"
        known = (options.qkv_layout, read.config.vocab_size or 0, options.given, options.max_metadata_mb)
        try:
            # before anything is compared, for it may be unsupported. DeepSpeed's optimizers keep fp32 copies of the
            # weights; what is read are these, and not the weights that its ranks compute with: so the dtype
            dtype = reference.open_folder(folder, lambda t: t, *known).dtype

            def compute(rows: Rows, cast: Cast) -> Computed:
                yield from reference.open_folder(folder, cast, *known).run(rows)

            return Side("the reference in plain torch", torch.no_grad()(compute), dtype)
        except reference.Unsupported as error:
            why = str(error)
    tell(f"note: {path} is computed by megatron_sp on what it has read itself, without an independent reference: {why}")
    return our_side(read, f"megatron_sp, from {format_name}")


def verify(
    source: Format, input: Path, target: Format, output: Path, options: Options, text: str | None, tell: Tell
) -> int:
    """Compare the input of a conversion, of the format ``source``, with its output; return EXIT_OK or EXIT_NUMERICS.

    Compared are random tokens and ``text``, or parts of Python's own documentation if it is None and there is a
    tokenizer. ``tell`` gets the results, line by line.
    """
    before = source.read(input, options)
    changes: dict[str, Any] = {"step": None, "output": None, "tokenizer": None, "qkv_layout": None}
    of_output = replace(options, vocab_size=before.config.vocab_size, **changes)
    after = target.read(output, of_output)
    first = side_of(source.name, input, before, options, tell)
    sides = first, side_of(target.name, output, after, of_output, tell)
    own = []  # dtypes of the weights of both sides; None: of several
    for side, model in zip(sides, (before, after), strict=True):
        read = widest(model.dtypes) if len(model.dtypes) == 1 else None
        narrower = side.dtype is not None and read is not None and side.dtype.itemsize < read.itemsize
        own.append(side.dtype if narrower else read)
    of_source, of_target = own
    # rotary positions of transformers are fp32
    is_narrow = before.config.position_embedding_type == "rope" and any(side.is_transformers for side in sides)
    is_wide = all(set(model.dtypes) == {torch.float64} for model in (before, after))
    compute = torch.float64 if is_wide and not is_narrow else torch.float32
    casts = _cast(of_source, of_target, compute, or_same=True), _cast(of_target, of_source, compute)
    rounded = ""
    if of_source is not None and of_target is not None and of_source != of_target:
        rounded = f" (weights rounded to {_name(of_target if of_target.itemsize <= of_source.itemsize else of_source)})"
    tell(f"verify: {sides[0].label} on {input}, against {sides[1].label} on {output}, in {_name(compute)}{rounded}")
    same = True
    for what, rows in _samples(before, after, text, tell):
        same &= tell_all(what, compare(sides, casts, rows), LIMITS[compute], tell)
    tell("verify: the same" if same else f"verify: NOT the same: do not use {output}")
    return EXIT_OK if same else EXIT_NUMERICS


def _cast(own: torch.dtype | None, other: torch.dtype | None, compute: torch.dtype, *, or_same: bool = False) -> Cast:
    if own and other and (other.itemsize < own.itemsize or (or_same and other.itemsize == own.itemsize)):
        return lambda t: t.to(other).to(compute)  # as the conversion has rounded the other side's weights
    return lambda t: t.to(compute)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Result(NamedTuple):
    """Comparison of one result tensor."""

    name: str
    difference: float  # max|a - b|; NaN if one has a NaN where the other has none
    scale: float
    agreement: float  # fraction of positions with the same argmax; meaningless for hidden states
    blank: float = 0.0  # fraction of numbers that are NaN, or the same infinity, on both sides, and so are not compared

    @property
    def error(self) -> float:
        return self.difference / self.scale if self.scale else self.difference

    @classmethod
    def of(cls, name: str, a: Tensor, b: Tensor) -> Result:
        """Compare two tensors in the part of the last dim that both have."""
        common = min(a.shape[-1], b.shape[-1])
        a, b = a[..., :common].double(), b[..., :common].double()
        agreement = (a.argmax(-1) == b.argmax(-1)).double().mean().item()
        blank = a.isnan() & b.isnan() | a.isinf() & (a == b)
        a, b = a.masked_fill(blank, 0.0), b.masked_fill(blank, 0.0)
        return cls(name, (a - b).abs().max().item(), a.abs().max().item(), agreement, blank.double().mean().item())


def compare(sides: Sequence[Side], casts: Sequence[Cast], rows: Rows) -> list[Result]:
    """Compare all results of both sides on the same tokens, in the order of computation."""
    first, second = (side.compute(rows, cast) for side, cast in zip(sides, casts, strict=True))
    inside = torch.arange(rows.tokens.shape[1]) < torch.tensor(rows.lengths)[:, None]
    results = []
    for (name, a), (other, b) in zip(first, second, strict=True):
        assert name == other, f"{sides[0].label} gives {name}, {sides[1].label} {other}"
        is_of_sequence = name in (ORDER, CLASSES)
        results.append(Result.of(name, a, b) if is_of_sequence else Result.of(name, a[inside], b[inside]))
    return results


def tell_all(what: str, results: list[Result], limit: float, tell: Tell) -> bool:
    """Tell the results of a comparison, and return whether all outputs are within the limit."""
    same = True
    for r in results:
        if r.name in OUTPUTS:
            good = r.error <= limit and r.blank < 1  # false for NaN
            same &= good
            if r.blank:
                tell(f"  {what}: {r.name}: {100 * r.blank:.2f} % of the numbers are not finite on either side, and are"
                     " not compared")  # fmt: skip
            tell(f"  {what}: {r.name}: max|difference| {r.difference:.2e}, {r.error:.1e} of the largest"
                 f" ({r.scale:.3g}); the same {_CHOICE[r.name]} at {100 * r.agreement:.2f} %:"
                 f" {'ok' if good else f'ABOVE the limit of {limit:g}'}")  # fmt: skip
    first = next((r for r in results if not r.error <= limit), None)
    if not same and first is not None:
        size = f"max|difference| {first.difference:.2e}, {first.error:.1e} of the largest"
        tell(f"  {what}: the first difference is in: {first.name} ({size})")
    return same


def _samples(before: Model, after: Model, text: str | None, tell: Tell) -> list[tuple[str, Rows]]:
    configs = before.config, after.config
    positions, vocab_size = min(c.max_positions for c in configs), min(c.vocab_size or 1 for c in configs)
    windows = [c.window_size for c in configs]
    beyond = max((window + 9 for window in windows if window), default=0)
    if beyond > min(_LONGEST, positions):
        tell(f"note: sequences of up to {_LENGTHS[0]} tokens: what lies after the window of {beyond - 9} is not"
             " compared")  # fmt: skip
        beyond = 0
    draw = torch.Generator().manual_seed(_SEED)
    lengths = [min(positions, length) for length in (max(_LENGTHS[0], beyond), *_LENGTHS[1:])]
    ids = [torch.randint(vocab_size, (length,), generator=draw).tolist() for length in lengths]
    samples = [("random tokens", _rows(ids, before))]
    if of_text := _text_ids(before, after, vocab_size, min(_MAX_TEXT, positions), text, tell):
        samples.append(("text", _rows(of_text, before)))
    return samples


def _rows(ids: list[list[int]], model: Model) -> Rows:
    """Right-pad the sequences with token 0; for BERT the second half of each belongs to the second segment."""
    lengths = [len(row) for row in ids]
    tokens, types = torch.zeros(2, len(ids), max(lengths), dtype=torch.int64)
    for row, sequence in enumerate(ids):
        tokens[row, : len(sequence)] = torch.tensor(sequence)
        if model.config.is_bert and model.config.token_types > 1:
            types[row, (len(sequence) + 1) // 2 : len(sequence)] = 1
    return Rows(tokens, lengths, types)


def _text_ids(before: Model, after: Model, vocab_size: int, most: int, text: str | None, tell: Tell) -> list[list[int]]:
    tokenizer = _tokenizer(before) or _tokenizer(after)
    if tokenizer is None:
        if text is not None:
            raise ConfigError("--verify-text needs a tokenizer, and neither side has one: give --tokenizer PATH")
        return []
    if tokenizer.vocab_size > vocab_size:
        tell(f"note: the tokenizer has {tokenizer.vocab_size} tokens, the model {vocab_size}: no text is"
             " compared")  # fmt: skip
        return []
    texts = [text] if text else []
    if not text:
        with contextlib.suppress(ImportError):  # a stripped installation
            from pydoc_data.topics import topics

            texts = [topics[name][:600] for name in _TOPICS if name in topics]
    rows = []
    for one in texts:
        ids = tokenizer.encode(one)
        if before.config.is_bert and tokenizer.cls is not None and tokenizer.sep is not None:
            ids = [tokenizer.cls, *ids[: most - 2], tokenizer.sep]
            if tokenizer.mask is not None:
                ids[3:-1:_MASK_EVERY] = [tokenizer.mask] * len(ids[3:-1:_MASK_EVERY])
        rows.append(ids[:most])
    if rows and not any(rows):
        tell("note: the tokenizer has no token for the text: none is compared")
    return [ids for ids in rows if ids]


def _tokenizer(model: Model) -> Tokenizer | None:
    data = DataConfig()
    if not name_files(data, model.tokenizer, Path(), model.tokenizer.get(CONFIG)):
        return None
    for field in ("tokenizer_model", "vocab_file", "merge_file"):
        if named := getattr(data, field):
            setattr(data, field, str(model.tokenizer[Path(named).name]))
    return build_tokenizer(data)
