"""``--verify``: compare the logits of both sides of a conversion, and locate the first difference.

The error of an output is max|a - b| / max|a|. 16-bit weights are computed in fp32; where the conversion has rounded the
weights, those of the source are rounded too before computing, so that rounding cannot explain a difference.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from megatron_sp.config.schema import DataConfig
from megatron_sp.config.schema_model import is_expert_bias
from megatron_sp.convert import reference
from megatron_sp.convert.copies import widest
from megatron_sp.convert.formats.deepspeed_files import find
from megatron_sp.convert.formats.megatron_files import iteration_folder
from megatron_sp.convert.model import Format, Model, Options, build, stored_names
from megatron_sp.convert.reference import CLASSES, MASKED, NEXT, ORDER, OUTPUTS, Cast, Rows
from megatron_sp.data.tokenizers import Tokenizer, build_tokenizer
from megatron_sp.data.tokenizers.kept import CONFIG, name_files
from megatron_sp.models.bert import BertModel
from megatron_sp.models.classifier import BertClassifier
from megatron_sp.models.gpt import GPTModel
from megatron_sp.models.language_model import LanguageModel
from megatron_sp.ops import availability
from megatron_sp.ops.attention import AttentionMask
from megatron_sp.parallel.forward_context import ForwardContext
from megatron_sp.parallel.layers import shard_specs
from megatron_sp.utils.errors import EXIT_NUMERICS, EXIT_OK, CheckpointError, ConfigError

Computed = Iterator[tuple[str, Tensor]]


class Backend(Protocol):
    """One side of a comparison; both yield hidden states after the embedding and each layer, then the outputs."""

    @property
    def label(self) -> str:
        """Name of the implementation, for the report."""
        ...

    @property
    def dtype(self) -> torch.dtype | None:
        """Dtype of the weights it computes with; None if these are the weights that the conversion reads."""
        ...

    def compute(self, rows: Rows, cast: Cast) -> Computed:
        """Yield results by name, [b, s, ...] or [b, ...]; each weight is passed through ``cast`` when it is read."""
        ...


class Ours:
    """megatron_sp's own model with the weights that a format has read, which are loaded one block at a time."""

    dtype: torch.dtype | None = None

    def __init__(self, source: Model, label: str = "megatron_sp") -> None:
        self.source, self.label = source, label

    @torch.no_grad()  # a ``with`` inside the generator would leave autograd off in the caller between two results
    def compute(self, rows: Rows, cast: Cast) -> Computed:
        is_bert, seen = self.source.config.is_bert, list[Tensor]()
        dtype = cast(torch.zeros((), dtype=torch.float32)).dtype
        net = build(self.source.config, self.source.num_classes, dtype)
        self._fill(net, cast, seen)
        lengths = torch.tensor(rows.lengths) if is_bert else None
        context = ForwardContext(AttentionMask(causal=not is_bert, key_lengths=lengths))
        x = net.hidden(rows.tokens, context, types=rows.types if is_bert and self.source.config.token_types else None)
        yield "embedding", seen[0].transpose(0, 1)
        for layer, hidden in enumerate(seen[1:]):
            yield f"layer {layer}", hidden.transpose(0, 1)
        yield from _our_outputs(net, x)

    def _fill(self, net: LanguageModel, cast: Cast, seen: list[Tensor]) -> None:
        blocks = list(net.stack.layers)
        prefixes = [unit.name for unit in net.units() if unit.alike == "block"]
        for name in stored_names(net):
            if not name.startswith(tuple(f"{prefix}." for prefix in prefixes)):
                self._load(net, [name], cast)
        net.embedding.register_forward_hook(lambda module, inputs, x: seen.append(x))
        for prefix, block in zip(prefixes, blocks, strict=True):
            names = [f"{prefix}.{name}" for name in stored_names(block)]
            block.register_forward_pre_hook(lambda module, inputs, names=names: self._load(net, names, cast))
            block.register_forward_hook(lambda module, inputs, x, names=names: _forget(net, names))
            block.register_forward_hook(lambda module, inputs, x: seen.append(x))

    def _load(self, net: nn.Module, names: Iterable[str], cast: Cast) -> None:
        specs = shard_specs(net)
        for name in names:
            owner, _, leaf = name.rpartition(".")
            stored = self.source.store.read(name)
            if is_expert_bias(name):  # never rounded
                setattr(net.get_submodule(owner), leaf, stored.to(cast(torch.zeros((), dtype=torch.float32)).dtype))
                continue
            weight = cast(stored)
            parameter = net.get_parameter(name)
            if parameter.shape != specs[name].shape:  # padding rows of the vocabulary
                padded = torch.zeros(parameter.shape, dtype=weight.dtype)
                padded[: len(weight)] = weight
                weight = padded
            setattr(net.get_submodule(owner), leaf, nn.Parameter(weight, requires_grad=False))


def _forget(net: nn.Module, names: Iterable[str]) -> None:
    for name in names:
        owner, _, leaf = name.rpartition(".")
        empty = getattr(net.get_submodule(owner), leaf).to("meta")
        empty = empty if is_expert_bias(name) else nn.Parameter(empty, requires_grad=False)
        setattr(net.get_submodule(owner), leaf, empty)


def _our_outputs(net: LanguageModel, x: Tensor) -> Computed:
    if isinstance(net, GPTModel):
        yield NEXT, net.logits(x).transpose(0, 1)
    elif isinstance(net, BertClassifier):
        yield CLASSES, net.classification_head(net.pooler(x[0]))
    elif isinstance(net, BertModel):
        yield MASKED, net.predictions(x).transpose(0, 1)
        if net.binary_head is not None:
            yield ORDER, net.binary_head(net.pooled(x))


class Reference:
    """A model of Megatron's computed from its files without the conversion's own code."""

    label = "the reference in plain torch"

    def __init__(self, open_files: Callable[[Cast], reference.Megatron], dtype: torch.dtype | None = None) -> None:
        self.open_files, self.dtype = open_files, dtype

    @torch.no_grad()
    def compute(self, rows: Rows, cast: Cast) -> Computed:
        yield from self.open_files(cast).run(rows)


class Transformers:
    """The transformers model of a folder, loaded from that folder only: no network, no code that comes with a model.

    The whole model is held in memory.
    """

    dtype: torch.dtype | None = None

    def __init__(self, folder: Path, document: dict[str, Any], tensors: Iterable[str]) -> None:
        self.folder = folder
        self.cls = class_of(document, set(tensors))
        self.label = f"transformers {availability.find('transformers').version}, {self.cls}"

    def compute(self, rows: Rows, cast: Cast) -> Computed:
        net = self._load(cast)
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
        if "Bert" in self.cls:
            inside = torch.arange(rows.tokens.shape[1]) < torch.tensor(rows.lengths)[:, None]
            more = {"token_type_ids": rows.types, "attention_mask": inside.long()}
        try:
            with torch.no_grad():
                outputs = net(input_ids=rows.tokens, **more)
        except Exception as error:  # of many types: config.json asks for something that this version does not compute
            raise CheckpointError(f"{self.label} cannot compute {self.folder}: {_short(error)}") from None
        yield "embedding", seen[0]
        yield from ((f"layer {i}", hidden) for i, hidden in enumerate(seen[1:]))
        yield from _their_outputs(self.cls, outputs)

    def _load(self, cast: Cast) -> Any:
        dtype = cast(torch.zeros((), dtype=torch.float32)).dtype
        with _offline():
            transformers = availability.load("transformers")
            try:
                net, report = getattr(transformers, self.cls).from_pretrained(
                    self.folder, local_files_only=True, trust_remote_code=False, use_safetensors=True, dtype=dtype,
                    attn_implementation="eager", output_loading_info=True,
                )  # fmt: skip
            except Exception as error:  # its versions raise many types: the folder is not one that they read
                raise CheckpointError(f"{self.label} cannot load {self.folder}: {_short(error)}") from None
        lacking = sorted(report["missing_keys"]) + sorted(str(name) for name in report.get("mismatched_keys", ()))
        if lacking:
            raise CheckpointError(f"{self.label} does not find {', '.join(lacking[:5])} in {self.folder}: that is not a"
                                  " whole model")  # fmt: skip
        for tensor in net.parameters():
            tensor.requires_grad_(False).copy_(cast(tensor))
        for module in net.modules():  # experts in a loop: the grouped products lack dtypes
            config: Any = module.__dict__.get("config")
            if getattr(config, "_experts_implementation", None) not in (None, "eager"):
                config._experts_implementation = "eager"
        return net.eval()


_CAUSAL = {
    "gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM", "gpt_neox": "GPTNeoXForCausalLM", "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM", "olmoe": "OlmoeForCausalLM",
}  # fmt: skip


def class_of(document: dict[str, Any], tensors: set[str]) -> str:
    """Return the name of the transformers class that computes all heads in the files."""
    kind = document.get("model_type")
    if kind not in ("bert", "megatron-bert"):
        return _CAUSAL[str(kind)]
    pretraining = "PreTraining" if "cls.seq_relationship.weight" in tensors else "MaskedLM"
    task = "SequenceClassification" if "classifier.weight" in tensors else pretraining
    return f"{'Bert' if kind == 'bert' else 'MegatronBert'}For{task}"


def _their_outputs(cls: str, found: Any) -> Computed:
    if cls.endswith("ForPreTraining"):
        yield MASKED, found.prediction_logits
        yield ORDER, found.seq_relationship_logits
    else:
        name = CLASSES if cls.endswith("SequenceClassification") else MASKED if cls.endswith("MaskedLM") else NEXT
        yield name, found.logits


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_DISABLE_TELEMETRY", "HF_HUB_DISABLE_PROGRESS_BARS")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, "1"))
    try:
        logging = availability.load("transformers").logging
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def backend_of(format_name: str, path: Path, read: Model, options: Options, tell: Callable[[str], None]) -> Backend:
    if format_name == "megatron_sp":
        return Ours(read)
    if format_name == "hf":
        why = _without_transformers(path, read)
        if not why:
            return cast("Backend", Transformers(path, read.settings["hf"], [fate.name for fate in read.fates]))
    else:
        try:
            is_deepspeed = format_name == "megatron-deepspeed"
            folder = find(path, options.step).path if is_deepspeed else iteration_folder(path, options.step)
            assert folder is not None, "it was read"
            known = (options.qkv_layout, read.config.vocab_size or 0, options.given, options.max_metadata_mb)
            model = reference.open_folder(folder, lambda t: t, *known)  # before anything is compared
            # DeepSpeed's optimizers keep fp32 copies of the weights; these are read, not the weights that its ranks
            # compute with
            return Reference(lambda cast: reference.open_folder(folder, cast, *known), model.dtype)
        except reference.Unsupported as error:
            why = str(error)
    tell(f"note: {path} is computed by megatron_sp on what it has read itself, without an independent reference: {why}")
    return Ours(read, f"megatron_sp, from {format_name}")


def _without_transformers(path: Path, read: Model) -> str:
    if not any(path.glob("*.safetensors")):
        return "transformers is asked to read safetensors alone"
    if not availability.installed("transformers").available:
        return "transformers is not installed (pip install transformers)"
    needed, available = 4 * sum(torch.Size(info.shape).numel() for info in read.weights().values()), _available_bytes()
    if available is not None and needed > 0.6 * available:
        return f"transformers would take {needed / 2**30:.1f} of the {available / 2**30:.1f} GiB that are free"
    return ""


def _available_bytes() -> int | None:
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * int(next(line.split()[1] for line in lines if line.startswith("MemAvailable:")))
    return None


def _short(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


LIMITS = {torch.float32: 2e-5, torch.float64: 1e-10}
"""Largest error of logits, relative to the largest logit, by what they are computed in."""
_SEED, _LENGTHS, _MAX_TEXT, _LONGEST = 1234, (48, 31, 7, 1), 64, 600
_TOPICS = ("for", "class", "lambda")
_MASK_EVERY = 7
_CHOICE = {NEXT: "next token", MASKED: "masked token", ORDER: "order", CLASSES: "class"}

Tell = Callable[[str], None]


def verify(
    source: Format, input: Path, target: Format, output: Path, options: Options, text: str | None, tell: Tell
) -> int:
    """Compare the input of a conversion with its output.

    Args:
        source, input: format and folder of the input.
        target, output: format and folder of the output.
        options: options of the conversion.
        text: text to compare on, besides random tokens; None: parts of Python's own documentation, if there is a
            tokenizer.
        tell: called with the results, line by line.
    Returns:
        EXIT_OK, or EXIT_NUMERICS if they differ.
    Raises:
        CheckpointError: one of them cannot be read, or transformers cannot load the output.
        ConfigError: text is given, but there is no tokenizer.
    """
    before = source.read(input, options)
    changes: dict[str, Any] = {"step": None, "output": None, "tokenizer": None, "qkv_layout": None}
    of_output = replace(options, vocab_size=before.config.vocab_size, **changes)
    after = target.read(output, of_output)
    first = backend_of(source.name, input, before, options, tell)
    sides = first, backend_of(target.name, output, after, of_output, tell)
    dtypes = _dtype_of(before), _dtype_of(after)
    is_rotary = before.config.position_embedding_type == "rope"
    is_narrow = is_rotary and any(isinstance(side, Transformers) for side in sides)  # their rotary positions are fp32
    compute = torch.float64 if dtypes == (torch.float64, torch.float64) and not is_narrow else torch.float32
    dtypes = _computed_with(sides[0], dtypes[0]), _computed_with(sides[1], dtypes[1])
    casts = _cast(*dtypes, compute, or_same=True), _cast(dtypes[1], dtypes[0], compute)
    tell(f"verify: {sides[0].label} on {input}, against {sides[1].label} on {output}, in"
         f" {_name(compute)}{_rounded(dtypes)}")  # fmt: skip
    same = True
    for what, rows in _samples(before, after, text, tell):
        same &= _tell_all(what, compare(sides, casts, rows), LIMITS[compute], tell)
    tell("verify: the same" if same else f"verify: NOT the same: do not use {output}")
    return EXIT_OK if same else EXIT_NUMERICS


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


def compare(sides: Sequence[Backend], casts: Sequence[Cast], rows: Rows) -> list[Result]:
    """Compare all results of both sides on the same tokens, in the order of computation."""
    ours, theirs = (side.compute(rows, cast) for side, cast in zip(sides, casts, strict=True))
    inside = torch.arange(rows.tokens.shape[1]) < torch.tensor(rows.lengths)[:, None]
    results = []
    for (name, a), (other, b) in zip(ours, theirs, strict=True):
        assert name == other, f"{sides[0].label} gives {name}, {sides[1].label} {other}"
        is_of_sequence = name in (ORDER, CLASSES)
        results.append(_compare(name, a, b) if is_of_sequence else _compare(name, a[inside], b[inside]))
    return results


def _compare(name: str, a: Tensor, b: Tensor) -> Result:
    common = min(a.shape[-1], b.shape[-1])
    a, b = a[..., :common].double(), b[..., :common].double()
    agreement = (a.argmax(-1) == b.argmax(-1)).double().mean().item()
    blank = a.isnan() & b.isnan() | a.isinf() & (a == b)
    a, b = a.masked_fill(blank, 0.0), b.masked_fill(blank, 0.0)
    return Result(name, (a - b).abs().max().item(), a.abs().max().item(), agreement, blank.double().mean().item())


def _tell_all(what: str, results: list[Result], limit: float, tell: Tell) -> bool:
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
    if not same:
        first = next((r for r in results if not r.error <= limit), None)
        if first is not None:
            size = f"max|difference| {first.difference:.2e}, {first.error:.1e} of the largest"
            tell(f"  {what}: the first difference is in: {first.name} ({size})")
    return same


def _dtype_of(model: Model) -> torch.dtype | None:
    return widest(model.dtypes) if len(model.dtypes) == 1 else None


def _computed_with(side: Backend, read: torch.dtype | None) -> torch.dtype | None:
    own = side.dtype
    return own if own is not None and read is not None and own.itemsize < read.itemsize else read


def _cast(own: torch.dtype | None, other: torch.dtype | None, compute: torch.dtype, *, or_same: bool = False) -> Cast:
    if own is None or other is None or other.itemsize > own.itemsize:
        return lambda t: t.to(compute)
    if other.itemsize == own.itemsize and not or_same:
        return lambda t: t.to(compute)
    return lambda t: t.to(other).to(compute)  # as the conversion has rounded the other side's weights


def _rounded(dtypes: tuple[torch.dtype | None, torch.dtype | None]) -> str:
    source, target = dtypes
    if source is None or target is None or source == target:
        return ""
    return f" (weights rounded to {_name(target if target.itemsize <= source.itemsize else source)})"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class _Limits(NamedTuple):
    vocab_size: int
    positions: int
    longest: int


def _samples(before: Model, after: Model, text: str | None, tell: Tell) -> list[tuple[str, Rows]]:
    configs = before.config, after.config
    positions = min(c.max_positions for c in configs)
    windows = [c.window_size for c in configs]
    beyond = max((window + 9 for window in windows if window), default=0)
    if beyond > min(_LONGEST, positions):
        tell(f"note: sequences of up to {_LENGTHS[0]} tokens: what lies after the window of {beyond - 9} is not"
             " compared")  # fmt: skip
        beyond = 0
    longest = min(positions, max(_LENGTHS[0], beyond))
    limits = _Limits(min(c.vocab_size or 1 for c in configs), positions, longest)
    samples = [("random tokens", _random_rows(limits, before))]
    if (ids := _text_ids(before, after, limits, text, tell)) is not None:
        samples.append(("text", _rows(ids, before)))
    return samples


def _random_rows(limits: _Limits, model: Model) -> Rows:
    draw = torch.Generator().manual_seed(_SEED)
    lengths = [limits.longest, *(min(length, limits.positions) for length in _LENGTHS[1:])]
    return _rows([torch.randint(limits.vocab_size, (length,), generator=draw).tolist() for length in lengths], model)


def _rows(ids: list[list[int]], model: Model) -> Rows:
    """Right-pad the sequences with token 0; for BERT the second half of each belongs to the second segment."""
    lengths = [len(row) for row in ids]
    tokens, types = torch.zeros(2, len(ids), max(lengths), dtype=torch.int64)
    for row, sequence in enumerate(ids):
        tokens[row, : len(sequence)] = torch.tensor(sequence)
        if model.config.is_bert and model.config.token_types > 1:
            types[row, (len(sequence) + 1) // 2 : len(sequence)] = 1
    return Rows(tokens, lengths, types)


def _text_ids(before: Model, after: Model, limits: _Limits, text: str | None, tell: Tell) -> list[list[int]] | None:
    tokenizer = _tokenizer(before) or _tokenizer(after)
    if tokenizer is None:
        if text is not None:
            raise ConfigError("--verify-text needs a tokenizer, and neither side has one: give --tokenizer PATH")
        return None
    if tokenizer.vocab_size > limits.vocab_size:
        tell(f"note: the tokenizer has {tokenizer.vocab_size} tokens, the model {limits.vocab_size}: no text is"
             " compared")  # fmt: skip
        return None
    most = min(_MAX_TEXT, limits.positions)
    texts = [text] if text else _documentation()
    rows = [_special(tokenizer, tokenizer.encode(one), most, before.config.is_bert) for one in texts]
    if rows and not any(rows):
        tell("note: the tokenizer has no token for the text: none is compared")
    return [ids for ids in rows if ids] or None


def _special(tokenizer: Tokenizer, ids: list[int], most: int, is_bert: bool) -> list[int]:
    if not is_bert or tokenizer.cls is None or tokenizer.sep is None:
        return ids[:most]
    ids = [tokenizer.cls, *ids[: most - 2], tokenizer.sep]
    if tokenizer.mask is not None:
        ids[3:-1:_MASK_EVERY] = [tokenizer.mask] * len(ids[3:-1:_MASK_EVERY])
    return ids


def _documentation() -> list[str]:
    try:
        from pydoc_data.topics import topics
    except ImportError:  # a stripped installation
        return []
    return [topics[name][:600] for name in _TOPICS if name in topics]


def _tokenizer(model: Model) -> Tokenizer | None:
    data = DataConfig()
    if not name_files(data, model.tokenizer, Path(), model.tokenizer.get(CONFIG)):
        return None
    for field in ("tokenizer_model", "vocab_file", "merge_file"):
        if named := getattr(data, field):
            setattr(data, field, str(model.tokenizer[Path(named).name]))
    return build_tokenizer(data)
