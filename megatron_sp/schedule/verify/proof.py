"""Proof of a schedule before its model is split for training: ``verify()``, once, on a small copy of the model.

A small model is its own copy. Of a large one of transformers, another is made from its configuration: with as many
heads, but narrow, and with four layers.
"""

from __future__ import annotations

import copy
import inspect
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from megatron_sp.schedule.apply.apply import apply, decide, for_copies
from megatron_sp.schedule.apply.hf_attention import is_hugging_face
from megatron_sp.schedule.apply.randomness import dropping
from megatron_sp.schedule.core.directives import Directive, Mesh
from megatron_sp.schedule.empty_weights import device_of
from megatron_sp.schedule.verify.copies import one_expert_at_a_time
from megatron_sp.schedule.verify.derive import Draws, as_said, is_open, random_lines, says_random, with_adjoints
from megatron_sp.schedule.verify.verify import LossOf, Verdict, verify
from megatron_sp.utils.errors import ConfigError, NumericsError, ReportedError

Lines = list[Directive]
_SMALL = 4_000_000  # parameters of models that are verified as they are
_LARGE = 30_000_000  # the same for want of a narrow copy
_HEAD_DIM = 16
_SEED = 1234
_WIDTHS = {  # entries of configurations, and how many heads' widths they are set to
    "intermediate_size": 2, "ffn_dim": 2, "encoder_ffn_dim": 2, "decoder_ffn_dim": 2, "d_ff": 2, "n_inner": 2,
    "moe_intermediate_size": 1, "shared_expert_intermediate_size": 1, "hidden_size": 1, "d_model": 1, "n_embd": 1,
    "word_embed_proj_dim": 1,
}  # fmt: skip
_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "num_decoder_layers", "encoder_layers", "decoder_layers")
_HEADS = ("num_attention_heads", "encoder_attention_heads", "num_heads", "n_head")
_INDEX = re.compile(r"(^|\.)\d+(?=\.|$)")


def measure(
    model: nn.Module, directives: list[Directive], mesh: Mesh, seq_dim: int, batch: Mapping[str, Any], *,
    dtype: torch.dtype = torch.float64, loss: LossOf | None = None,
) -> tuple[Verdict, list[Directive]]:  # fmt: skip
    """Verify as ``verify`` does; return the verdict, and the lines with measured adjoints and rng lines."""
    written = as_said(directives)
    verdict = verify(model, written, mesh, seq_dim, batch, dtype=dtype, loss=loss)
    if not verdict.ok:
        return verdict, directives
    lines = with_adjoints(written, verdict.adjoints)
    if next(dropping(model), None) is None or mesh.tp.size() == mesh.sp.size() == mesh.cp.size() == 1:
        return verdict, lines
    # dropout is on here, in training mode: the model may be evaluating now, and train later
    dropping_copy = copy.deepcopy(model).train().to(dtype)
    one_expert_at_a_time(dropping_copy)
    its_lines = for_copies([d for d in lines if d.do not in ("zero", "rng", "checkpoint")], copy.deepcopy)
    apply(dropping_copy, its_lines, mesh, seq_dim, rules=False)
    batch = {k: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in batch.items()}
    with torch.random.fork_rng(devices=[]), torch.no_grad(), Draws(dropping_copy, mesh) as found:
        torch.manual_seed(_SEED)  # what all ranks have is the same on them if they draw the same
        dropping_copy(**batch)
    return verdict, [*lines, *random_lines(model, lines, found)]


def prove(model: nn.Module, directives: Lines, mesh: Mesh, seq_dim: int, batch: Mapping[str, Any] | None) -> Lines:
    """Verify lines before they are applied; return them with what they leave open. Collective over the mesh.

    ``batch``: keyword arguments of the model (default: an example, if its configuration describes its inputs).

    Raises:
        ConfigError: the lines are impossible, the split model fails, or something is open and cannot be measured.
        NumericsError: the split model computes something else.
    """
    written = as_said(directives)
    decide(model, written, mesh, seq_dim)
    mixes_rows = any(d.args.get("over") == "dp" for d in written)
    splits = mixes_rows or max(mesh.tp.size(), mesh.sp.size(), mesh.cp.size()) > 1
    if not splits or mesh.is_imagined or all(d.do in ("zero", "checkpoint", "annotate") for d in written):
        return written
    reason = "lines about dp mix rows of different ranks, and verify() gives all of them the same"
    if not mixes_rows:
        reason = f"{type(model).__name__} is large, and no small copy of it can be made"
        for make, is_own in _candidates(model, written):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(_SEED)
                try:
                    small = _ready(make(), mesh)
                    its_lines = written if is_own else _lines_for(small, model, written)
                    decide(small, its_lines, mesh, seq_dim)
                    data = batch if batch is not None and is_own else example(small, mesh)
                except Exception as error:  # a configuration that cannot be so small, or lines about other layers
                    reason = str(error)
                    continue
                if data is None:
                    name = type(model).__name__
                    reason = f"it is not known what {name} takes: give apply() a batch, its keyword arguments"
                    continue
                device = next(small.parameters()).device
                data = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in data.items()}
                try:
                    verdict, lines = measure(small, its_lines, mesh, seq_dim, data)
                except ReportedError:
                    raise
                except Exception as error:
                    reason = f"the whole model does not run: {type(error).__name__}: {error}"
                    continue
            if not verdict.ok:
                raise NumericsError(str(verdict))
            return lines if is_own else _lines_from(lines, written)
    _require_said(model, written, mesh, reason)
    if mesh.tp.rank() == mesh.dp_sp.rank() == 0:
        said = "apply(verify=False) says that this is meant"
        warnings.warn(f"apply(): the lines are not verified ({reason}); {said}", stacklevel=4)
    return written


def _candidates(model: nn.Module, lines: list[Directive]) -> Iterator[tuple[Callable[[], nn.Module], bool]]:
    # functions that make a small model, and whether it is a copy of the model itself
    size = sum(p.numel() for p in model.parameters())
    itself = (lambda: copy.deepcopy(model)), True
    if size <= _SMALL:
        yield itself
        return
    # lines about sizes that a narrow copy does not have
    with_blocks = any(isinstance(d.args.get("blocks"), (list, tuple)) for d in lines)
    fixed = with_blocks or any(d.do == "set" and isinstance(d.args.get("value"), int) for d in lines)
    if is_hugging_face(model) and not fixed:
        yield (lambda: narrow(model, layers=4)), False  # where layers differ, one in four is often of another kind
        yield (lambda: narrow(model, layers=None)), False
    if size <= _LARGE:
        yield itself


def _ready(model: nn.Module, mesh: Mesh) -> nn.Module:
    # on the device of the ranks' groups, all parameters a little changed: biases of 0 would hide mistakes
    group = next((g for g in (mesh.tp, mesh.sp, mesh.cp) if g.size() > 1), mesh.world)
    for module in model.modules():
        config: Any = module.__dict__.get("config")
        if getattr(config, "_attn_implementation", "sdpa") not in ("sdpa", "eager", None):
            config._attn_implementation = "sdpa"  # kernels of GPUs know no float64
        for name, p in module._parameters.items():
            if p is not None and p.is_meta:
                zeros = torch.zeros_like(p, device="cpu")
                module._parameters[name] = nn.Parameter(zeros, requires_grad=p.requires_grad)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, dtype=torch.float32).mul_(0.05).to(p))
    return model.to(device_of(group))


# lines for a model with fewer layers, and back


def _lines_for(small: nn.Module, model: nn.Module, lines: list[Directive]) -> list[Directive]:
    # those about its first layers, and about the last one, by their numbers
    sizes = {path: len(m) for path, m in small.named_modules() if isinstance(m, nn.ModuleList)}
    large = {path: len(m) for path, m in model.named_modules() if isinstance(m, nn.ModuleList)}
    shorter = {path: size for path, size in large.items() if sizes.get(path, size) != size}

    def moved(text: str) -> str:
        for path, size in shorter.items():
            if (match := re.match(rf"{re.escape(path)}\.(\d+)(?=\.|$)", text)) is not None:
                last, number = sizes[path] - 1, int(match[1])
                if last <= number < size - 1:
                    raise KeyError(text)
                text = f"{path}.{min(number, last)}{text[match.end() :]}"
        return text

    moved_lines = []
    for line in lines:
        with suppress(KeyError):
            args = {name: moved(v) if isinstance(v, str) else v for name, v in line.args.items()}
            moved_lines.append(replace(line, on=moved(line.on), args=args))
    return moved_lines


def _lines_from(measured: list[Directive], written: list[Directive]) -> list[Directive]:
    grads = {(_INDEX.sub(r"\1*", d.on), d.where): d.args["grad"] for d in measured if "grad" in d.derived}
    adjoints = {i: grads.get((_INDEX.sub(r"\1*", d.on), d.where), "") for i, d in enumerate(written) if is_open(d)}
    drawn = [replace(d, on=_INDEX.sub(r"\1*", d.on)) for d in measured if d.do == "rng" and d.derived]
    return [*with_adjoints(written, adjoints), *{(d.on, d.args["axis"]): d for d in drawn}.values()]


# small models of transformers, and their inputs


def narrow(model: nn.Module, layers: int | None) -> nn.Module:
    """Return a model of the same class of transformers, with random weights, as many heads, and narrow.

    ``layers``: how many, at least one of each kind; None: as many as the model has.
    """
    config, cls = copy.deepcopy(model.config), type(model)
    parts = [config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", None) or ())]
    for part in {id(part): part for part in parts if part is not None}.values():
        _make_narrow(part, layers)
    with torch.device("meta"):
        size = sum(p.numel() for p in cls(config).parameters())  # type: ignore[call-arg]
    if size > _LARGE:
        raise ConfigError(f"a narrow copy of {cls.__name__} has {size:,} parameters, too many to compute with")
    small: nn.Module = cls(config)  # type: ignore[call-arg]
    return small.train(model.training)


def _make_narrow(config: Any, layers: int | None) -> None:
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if isinstance(number := getattr(config, name, None), int) and number > 8:
            setattr(config, name, 8)
            config.num_experts_per_tok = min(2, getattr(config, "num_experts_per_tok", 2))
    heads = next((n for name in _HEADS if isinstance(n := getattr(config, name, None), int)), None)
    if heads is not None:
        widths = {name: times * heads * _HEAD_DIM for name, times in _WIDTHS.items()}
        widths |= {name: _HEAD_DIM for name in ("head_dim", "d_kv") if name in config.to_dict()}
        for name, width in widths.items():
            if isinstance(getattr(config, name, None), int):
                setattr(config, name, width)
    if isinstance(words := getattr(config, "vocab_size", None), int) and words > 512:
        config.vocab_size = 512
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            if isinstance(token := getattr(config, name, None), int) and token >= 512:
                setattr(config, name, 0)
    if layers is None:
        return
    kinds = list(dict.fromkeys(getattr(config, "layer_types", None) or ()))
    count = max(layers, len(kinds))
    if kinds:
        config.layer_types = (kinds * count)[:count]
    for name in _LAYERS:
        if isinstance(number := getattr(config, name, None), int):
            setattr(config, name, min(number, count))


def example(
    model: nn.Module, mesh: Mesh | None = None, *, rows: int = 2, tokens: int | None = None
) -> dict[str, Any] | None:
    """Return a random batch for a model of transformers (token ids, images, audio), or None if its inputs are unknown.

    ``tokens``: in a row (default: some that the ranks of the mesh can share).
    """
    ranks = 1 if mesh is None else mesh.tp.size() * mesh.sp.size() * mesh.cp.size()
    tokens = tokens or max(8, 2 * ranks)
    names, config = inspect.signature(model.forward).parameters, getattr(model, "config", None)
    batch: dict[str, Any] = {}
    sizes = [getattr(c, "vocab_size", None) for c in (config, getattr(config, "text_config", None))]
    words = next((size for size in sizes if isinstance(size, int)), None)
    if "input_ids" in names and words is not None:
        batch["input_ids"] = ids = torch.randint(min(3, words - 1), words, (rows, tokens))
        if "attention_mask" in names:
            lengths = torch.tensor([max(1, tokens - 3 * row) for row in range(rows)])
            batch["attention_mask"] = mask = (torch.arange(tokens) < lengths[:, None]).long()
            batch["input_ids"] = ids = torch.where(mask.bool(), ids, getattr(config, "pad_token_id", None) or 0)
        if "labels" in names and type(model).__name__.endswith(("LMHeadModel", "ForCausalLM", "ForMaskedLM")):
            batch["labels"] = torch.where(mask.bool(), ids, -100) if "attention_mask" in batch else ids
    mels, positions = (getattr(config, name, None) for name in ("num_mel_bins", "max_source_positions"))
    if "input_features" in names and isinstance(mels, int) and isinstance(positions, int):
        batch["input_features"] = torch.randn(rows, mels, 2 * positions)
    if "decoder_input_ids" in names and batch and words is not None:
        batch["decoder_input_ids"] = torch.randint(min(3, words - 1), words, (rows, tokens))
    vision = getattr(config, "vision_config", None) or config
    size: Any = getattr(vision, "image_size", None)
    channels: Any = getattr(vision, "num_channels", None)
    sides = list(size) if isinstance(size, (tuple, list)) else [size, size]
    if "pixel_values" in names and len(sides) == 2 and all(isinstance(n, int) for n in (*sides, channels)):
        batch["pixel_values"] = torch.randn(rows, channels, *sides)
    return batch or None


# what cannot be measured


def _require_said(model: nn.Module, written: list[Directive], mesh: Mesh, reason: str) -> None:
    open_points = [
        f"all_gather at {d.on or 'the model'} ({d.where}): give grad='reduce_scatter' if the ranks use the result"
        " differently (a split layer), or grad='slice' if alike"
        for d in written
        if is_open(d) and mesh.group(d.args.get("over", "tp")).size() > 1
    ]
    cuts = any(d.do in ("ulysses", "context") or d.args.get("over") == "sp" for d in written)
    cuts = cuts and max(mesh.sp.size(), mesh.cp.size()) > 1
    for path in dropping(model):
        place = f"dropout at {path or 'the model'}"
        if mesh.tp.size() > 1 and not says_random(model, written, path, "tp"):
            open_points.append(f"{place}: use .rng('tp') if it works on what is split there, else .rng('same')")
        if cuts and not says_random(model, written, path, "sp"):
            open_points.append(f"{place}: use .rng('sp'), for each rank has other positions there")
    if open_points:
        more = [f"... and {len(open_points) - 6} more"] if len(open_points) > 6 else []
        listed = "\n  ".join([*open_points[:6], *more])
        raise ConfigError(
            f"the schedule leaves open what verify() would measure, and it cannot ({reason}):\n  {listed}\nor let"
            " apply(verify=False) assume what is usual"
        )
