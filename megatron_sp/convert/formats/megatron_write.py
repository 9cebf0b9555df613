"""Writer of classic Megatron checkpoints: one file per rank, its tensors sliced from ours when they are written."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_sp.config.schema import Config
from megatron_sp.convert.archive.torch_writer import LazyTensor, write_torch_file
from megatron_sp.convert.copies import Correspondence, LastRead, Scattered, Shape, TensorStore
from megatron_sp.convert.formats.counters import megatron_scaler
from megatron_sp.convert.formats.megatron_args import namespace, note_of_activation, padded_size, require_fit
from megatron_sp.convert.formats.megatron_files import MODEL, TRACKER, rank_name
from megatron_sp.convert.formats.megatron_layout import HEAD, LAST, Cut, Shard, extra_states, is_decayed, position

from megatron_sp.convert.formats.megatron_layout import registered, shard_copies, written  # isort: skip
from megatron_sp.convert.model import OPTIMIZER, Model, Options, Progress, parameter_shapes
from megatron_sp.utils.errors import ConfigError
from megatron_sp.utils.files import fsync_dir, write_synced

_LAYER = re.compile(r"(?:decoder|encoder)\.layers\.(\d+)\.")
_HALF = (torch.bfloat16, torch.float16)


class Plan(NamedTuple):
    """The files to be written."""

    cut: Cut
    places: list[Shard]
    tied_heads: set[str]
    weights: Scattered  # their tensors of the model, by rank and our names
    states: dict[str, Scattered]  # their tensors of the optimizer, by kind; empty without it


def size(plan: Plan) -> int:
    """Return the bytes of all tensors."""
    return sum(info.num_bytes for store in (plan.weights, *plan.states.values()) for info in store.tensors().values())


def write(model: Model, plan: Plan, path: Path, options: Options, progress: Progress) -> None:
    """Write the files of all ranks, and the tracker beside them."""
    note_of_activation(model, legacy=options.megatron_names == "legacy")
    folder = path / (f"iter_{model.step:07d}" if model.step else "release")
    folder.mkdir(parents=True)
    for place in plan.places:
        (rank := folder / place.prefix.rstrip("/")).mkdir()
        write_torch_file(rank / MODEL, _tree(model, plan, place, options, progress))
        fsync_dir(rank)
    write_synced(path / TRACKER, str(model.step or "release").encode())
    fsync_dir(folder)
    fsync_dir(path)


def make_plan(model: Model, options: Options, *, padded: int | None = None, ep: int | None = None) -> Plan:
    """Return what to write; ``padded`` rows of the vocabulary, and ``ep`` as in ``Cut``, instead of the options'."""
    config = model.config
    require_fit(model, "Megatron", legacy=options.megatron_names == "legacy")
    require_layout(model, options)
    assert config.vocab_size and config.num_layers
    rows = padded or padded_size(config.vocab_size, config.make_vocab_size_divisible_by, options.tp)
    cut = Cut(config, options.tp, "interleaved", rows, options.ep if ep is None else ep)
    layers, places = config.num_layers // options.pp, []
    for p, e, t in itertools.product(range(options.pp), range(options.ep), range(options.tp)):
        prefix = f"{rank_name(t, p, options.pp, e, options.ep)}/"
        places.append(Shard(prefix, t, p * layers, layers, p == 0, p == options.pp - 1, e))
    is_tied = config.is_bert or not config.untie_embeddings_and_output_weights
    heads = {place.prefix for place in places if is_tied and place.is_last and not place.is_first}
    shapes, store = parameter_shapes(config), LastRead(model.store)
    weights = scattered(store, shapes, cut, places, "", options.dtype, heads)
    sources: dict[str, str] = {}  # of each kind of the optimizer's tensors: what precedes our names
    if options.optimizer and {"exp_avg", "exp_avg_sq"} <= model.kinds():  # else it is not Adam's
        if config.has_experts:
            raise ConfigError("the optimizer's state of a mixture of experts cannot be written for Megatron: give"
                              " --no-optimizer")  # fmt: skip
        require_state(model, options)
        sources = {kind: f"{OPTIMIZER}{kind}." for kind in ("exp_avg", "exp_avg_sq")}
        if any(info.dtype in _HALF for info in weights.tensors().values()):
            sources["master"] = f"{OPTIMIZER}master." if "master" in model.kinds() else ""
    states = {kind: scattered(store, shapes, cut, places, ours, torch.float32, heads) for kind, ours in sources.items()}
    return Plan(cut, places, heads, weights, states)


def scattered(
    store: TensorStore, shapes: Mapping[str, Shape], cut: Cut, places: list[Shard], ours: str,
    dtype: torch.dtype | None, tied_heads: Collection[str] = ()
) -> Scattered:  # fmt: skip
    """Return the tensors of these places, by their prefixes and our names; ``ours`` precedes the names in the store."""
    copies, filled = shard_copies(cut, shapes, places, ours=ours, tied_heads=tied_heads)
    correspondence = Correspondence.of({ours + name: shape for name, shape in shapes.items()}, copies, filled)
    return Scattered(correspondence, store, dtype)


def require_state(model: Model, options: Options) -> None:
    """Refuse to write an optimizer's state that does not fit the weights' dtype, or the format's float32."""
    own = model.dtypes
    dtypes = {info.dtype for name, info in model.store.tensors().items() if name.startswith(OPTIMIZER)}
    if "master" in model.kinds() and options.dtype is not None and own != {options.dtype}:
        named, stored = (str(dtype).removeprefix("torch.") for dtype in (options.dtype, max(own, key=str)))
        raise ConfigError(f"--dtype {named}: the optimizer's state is that of a {stored} model, and its fp32 copies do"
                          f" not round to {named} weights made of {stored} ones; leave --dtype out, or give"
                          " --no-optimizer")  # fmt: skip
    if torch.float64 in own | dtypes and options.dtype is None:
        raise ConfigError("the run is in float64, and this format keeps the optimizer's state in float32: give --dtype"
                          " float32 to round everything, or --no-optimizer")  # fmt: skip


def require_layout(model: Model, options: Options) -> None:
    """Check that the model can be split over the ranks."""
    c = model.config
    widths = {"num_query_groups": c.num_groups, "num_attention_heads": c.num_attention_heads,
              "ffn_hidden_size": c.ffn_size}  # fmt: skip
    if c.has_experts:
        widths["moe_ffn_hidden_size"] = c.expert_ffn_size
        widths["moe_shared_expert_intermediate_size"] = c.shared_expert_size
    for what, count in widths.items():
        if (count or 0) % options.tp:
            raise ConfigError(f"{what} ({count}) must be a multiple of --target-tensor-parallel-size ({options.tp}):"
                              " use a divisor")  # fmt: skip
    if (c.num_layers or 0) % options.pp:
        raise ConfigError(f"num_layers ({c.num_layers}) must be a multiple of --target-pipeline-parallel-size"
                          f" ({options.pp}): use a divisor")  # fmt: skip
    if options.ep > 1 and not c.has_experts:
        raise ConfigError(f"--target-expert-parallel-size ({options.ep}) is for models with experts, and this one has"
                          " none: leave it out")  # fmt: skip
    if (c.num_experts or 0) % options.ep:
        raise ConfigError(f"num_experts ({c.num_experts}) must be a multiple of --target-expert-parallel-size"
                          f" ({options.ep}): use a divisor")  # fmt: skip


def _tree(model: Model, plan: Plan, place: Shard, options: Options, progress: Progress) -> dict[str, Any]:
    names, config, entries = options.megatron_names, plan.cut.config, []
    with_experts = set(config.expert_layers(config.num_layers or 0)) if config.has_experts else set[int]()
    for name in plan.weights.tensors():
        if not name.startswith(place.prefix):
            continue
        bare = name.removeprefix(place.prefix)
        layer, is_copy = _LAYER.match(bare), bare == HEAD and place.prefix in plan.tied_heads
        separate = layer is not None and place.first_layer + int(layer[1]) in with_experts
        order = LAST if names == "legacy" and is_copy else position(bare, names)
        entries.append((order, written(bare, names, tied_head=is_copy, separate_norm=separate), name))
    ours = {in_file: name for _, in_file, name in sorted(entries, key=lambda entry: entry[0])}
    flat = {in_file: lazy(plan.weights, name, progress) for in_file, name in ours.items()}
    args = namespace(
        model, tp=options.tp, pp=options.pp, ep=options.ep, padded_vocab_size=plan.cut.padded_vocab_size,
        legacy=names == "legacy", params_dtype=next(iter(flat.values())).dtype, rank=plan.places.index(place),
    )  # fmt: skip
    tree: dict[str, Any] = {
        "args": args, "checkpoint_version": 3.0, "iteration": model.step, "num_floating_point_operations_so_far": 0,
        "model": nested(flat) if names == "legacy" else flat,
    }  # fmt: skip
    if names == "core":
        tree["model"] = {**flat, **dict.fromkeys(extra_states(flat))}
    if plan.states:
        in_order = [ours[in_file] for in_file in registered(list(flat))]
        decays = _by_decay({name: plan.weights.tensors()[name].shape for name in in_order})
        state = {}
        for number, name in enumerate(itertools.chain(*decays)):
            moments = {kind: lazy(plan.states[kind], name, progress) for kind in ("exp_avg", "exp_avg_sq")}
            state[number] = {"step": torch.tensor(float(model.updates)), **moments}
        optimizer = {"state": state, "param_groups": _groups(model, decays)}
        if "master" in plan.states:
            masters = [[lazy(plan.states["master"], name, progress) for name in group] for group in decays]
            scaler = megatron_scaler(model, training(model).precision)
            optimizer = {"optimizer": optimizer, "fp32_from_fp16_params": masters, **scaler}
        tree |= {"optimizer": optimizer, "opt_param_scheduler": scheduler(model)}
    return tree


def lazy(store: Scattered, name: str, progress: Progress) -> LazyTensor:
    """Return a tensor of the store that is computed when it is written."""
    info = store.tensors()[name]

    def make() -> Tensor:
        tensor = store.read(name)
        progress(info.num_bytes)
        return tensor

    return LazyTensor(info.shape, info.dtype, make)


_LEGACY_PARTS = (
    "language_model.embedding.word_embeddings.", "language_model.embedding.position_embeddings.",
    "language_model.embedding.tokentype_embeddings.", "language_model.encoder.", "language_model.pooler.",
    "language_model.output_layer.", "word_embeddings_for_head.", "lm_head.", "binary_head.",
)  # fmt: skip


def nested(flat: Mapping[str, LazyTensor]) -> dict[str, Any]:
    """Return the nested dicts of legacy files; keys of the innermost dict are the rest of the names, with dots."""
    tree: dict[str, Any] = {}
    for name, tensor in flat.items():
        prefix = next(part for part in _LEGACY_PARTS if name.startswith(part))
        node = tree
        for key in prefix.rstrip(".").split("."):
            node = node.setdefault(key, {})
        node[name.removeprefix(prefix)] = tensor
    return tree


def _by_decay(shapes: Mapping[str, Shape]) -> list[list[str]]:
    return [[name for name in shapes if is_decayed(name, shapes[name]) == decayed] for decayed in (True, False)]


def _groups(model: Model, decays: list[list[str]]) -> list[dict[str, Any]]:
    o, first, groups = training(model).optimizer, 0, []
    for mult, group in zip((1.0, 0.0), decays, strict=True):
        groups.append({
            "params": list(range(first, first + len(group))), **adam_settings(model, mult), "is_expert_parallel": False,
            "is_decoupled_lr": False, "default_config": True, "max_lr": o.lr or 0.0, "min_lr": o.min_lr,
            "amsgrad": False,
        })  # fmt: skip
        first += len(group)
    return groups


def adam_settings(model: Model, wd_mult: float) -> dict[str, Any]:
    """Return the settings of a group of parameters, as Megatron and DeepSpeed have them."""
    o = training(model).optimizer
    return {
        "wd_mult": wd_mult, "lr_mult": 1.0, "lr": o.lr or 0.0, "betas": (o.adam_beta1, o.adam_beta2),
        "eps": o.adam_eps, "weight_decay": o.weight_decay * wd_mult, "bias_correction": True, "step": model.updates,
    }  # fmt: skip


def optimizer_groups(model: Model, plan: Plan) -> dict[str, Any]:
    """Return the state of the optimizer and its schedule without tensors."""
    decays = _by_decay({name: info.shape for name, info in plan.weights.tensors().items()})
    inner = {"state": {"common_step": model.updates}, "param_groups": _groups(model, decays)}
    outer = {"optimizer": inner, **megatron_scaler(model, training(model).precision)}
    return {"optimizer": outer if "master" in plan.states else inner, "opt_param_scheduler": scheduler(model)}


def training(model: Model) -> Config:
    """Return the configuration of the run that the model is from, as far as it is known."""
    native = model.settings.get("native")
    if isinstance(native, dict) and isinstance(native.get("config"), dict):
        return Config.from_dict(native["config"])[0]
    return Config(model=model.config)


def scheduler(model: Model) -> dict[str, Any]:
    """Return the state of ``OptimizerParamScheduler``, which counts samples."""
    config = training(model)
    o, samples = config.optimizer, config.batch.global_batch_size or 1
    steps = max(1, (o.lr_decay_iters or config.batch.train_iters or 1) * samples)
    return {
        "max_lr": o.lr or 0.0, "min_lr": o.min_lr, "lr_warmup_steps": o.lr_warmup_iters * samples,
        "num_steps": model.scheduled, "lr_decay_style": o.lr_decay_style, "lr_decay_steps": steps,
        "start_wd": o.weight_decay, "end_wd": o.weight_decay, "wd_incr_style": "constant", "wd_incr_steps": steps,
    }  # fmt: skip
