"""Writer of classic Megatron checkpoints: one file per rank, its tensors sliced from ours when they are written."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_sp.config.schema import Config
from megatron_sp.convert.archive.torch_writer import LazyTensor, write_torch_file
from megatron_sp.convert.copies import Correspondence, LastRead, Scattered, TensorInfo
from megatron_sp.convert.formats.counters import megatron_scaler
from megatron_sp.convert.formats.megatron_args import namespace, note_of_activation, padded_size, require_fit
from megatron_sp.convert.formats.megatron_files import MODEL, TRACKER, rank_name
from megatron_sp.convert.formats.megatron_layout import (
    HEAD,
    LAST,
    Cut,
    Names,
    Shard,
    extra_states,
    is_decayed,
    position,
    registered,
    shard_copies,
    written,
)
from megatron_sp.convert.model import OPTIMIZER, Model, Options, Progress, parameter_shapes
from megatron_sp.utils.errors import ConfigError
from megatron_sp.utils.files import fsync_dir, write_synced

_LAYER = re.compile(r"(?:decoder|encoder)\.layers\.(\d+)\.")
_HALF = (torch.bfloat16, torch.float16)


class Plan(NamedTuple):
    """Plan of the files to be written."""

    cut: Cut
    places: list[Shard]
    tied_heads: set[str]
    weights: Scattered  # their tensors of the model, by rank and our names
    states: dict[str, Scattered]  # their tensors of the optimizer, by kind; empty without it


def size(plan: Plan) -> int:
    return sum(info.num_bytes for store in (plan.weights, *plan.states.values()) for info in store.tensors().values())


def write(model: Model, plan: Plan, path: Path, options: Options, progress: Progress) -> None:
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
    config = model.config
    require_fit(model, "Megatron", legacy=options.megatron_names == "legacy")
    require_layout(model, options)
    assert config.vocab_size
    rows = padded or padded_size(config.vocab_size, config.make_vocab_size_divisible_by, options.tp)
    cut = Cut(config, options.tp, "interleaved", rows, options.ep if ep is None else ep)
    places = _places(model, options)
    is_tied = config.is_bert or not config.untie_embeddings_and_output_weights
    heads = {place.prefix for place in places if is_tied and place.is_last and not place.is_first}
    shapes, source = parameter_shapes(config), LastRead(model.store)

    def scattered(ours: str, dtype: torch.dtype | None) -> Scattered:
        copies, filled = shard_copies(cut, shapes, places, ours=ours, tied_heads=heads)
        correspondence = Correspondence.of({ours + name: shape for name, shape in shapes.items()}, copies, filled)
        return Scattered(correspondence, source, dtype)

    weights = scattered("", options.dtype)
    states = {kind: scattered(ours, torch.float32) for kind, ours in _state_sources(model, options, weights).items()}
    return Plan(cut, places, heads, weights, states)


def _state_sources(model: Model, options: Options, weights: Scattered) -> dict[str, str]:
    if not options.optimizer or not model.has_optimizer:
        return {}
    kinds = {name.split(".")[1] for name in model.store.tensors() if name.startswith(OPTIMIZER)}
    if not {"exp_avg", "exp_avg_sq"} <= kinds:
        return {}  # the optimizer is not Adam
    if model.config.has_experts:
        raise ConfigError("the optimizer's state of a mixture of experts cannot be written for Megatron: give"
                          " --no-optimizer")  # fmt: skip
    require_state(model, options)
    is_half = any(info.dtype in _HALF for info in weights.tensors().values())
    sources = {kind: f"{OPTIMIZER}{kind}." for kind in ("exp_avg", "exp_avg_sq")}
    return {**sources, "master": f"{OPTIMIZER}master." if "master" in kinds else ""} if is_half else sources


def require_state(model: Model, options: Options) -> None:
    own = model.dtypes
    dtypes = {name: info.dtype for name, info in model.store.tensors().items() if name.startswith(OPTIMIZER)}
    has_master = any(name.startswith(f"{OPTIMIZER}master.") for name in dtypes)
    if has_master and options.dtype is not None and own != {options.dtype}:
        named, theirs = (str(dtype).removeprefix("torch.") for dtype in (options.dtype, max(own, key=str)))
        raise ConfigError(f"--dtype {named}: the optimizer's state is that of a {theirs} model, and its fp32 copies do"
                          f" not round to {named} weights made of {theirs} ones; leave --dtype out, or give"
                          " --no-optimizer")  # fmt: skip
    if torch.float64 in own | set(dtypes.values()) and options.dtype is None:
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


def _places(model: Model, options: Options) -> list[Shard]:
    assert model.config.num_layers
    layers = model.config.num_layers // options.pp
    places = []
    for p, e, t in itertools.product(range(options.pp), range(options.ep), range(options.tp)):
        prefix, ends = f"{rank_name(t, p, options.pp, e, options.ep)}/", (p == 0, p == options.pp - 1)
        places.append(Shard(prefix, t, p * layers, layers, *ends, e))
    return places


def _tree(model: Model, plan: Plan, place: Shard, options: Options, progress: Progress) -> dict[str, Any]:
    names = options.megatron_names
    of_place = {name: info for name, info in plan.weights.tensors().items() if name.startswith(place.prefix)}
    ordered = sorted(of_place, key=lambda name: _position(name, place, plan, names))
    flat = {_written(name, place, plan, names): lazy(plan.weights, name, progress) for name in ordered}
    args = namespace(
        model, tp=options.tp, pp=options.pp, ep=options.ep, padded_vocab_size=plan.cut.padded_vocab_size,
        legacy=names == "legacy", params_dtype=next(iter(of_place.values())).dtype, rank=plan.places.index(place),
    )  # fmt: skip
    tree: dict[str, Any] = {
        "args": args, "checkpoint_version": 3.0, "iteration": model.step, "num_floating_point_operations_so_far": 0,
        "model": nested(flat) if names == "legacy" else flat,
    }  # fmt: skip
    if names == "core":
        tree["model"] = {**flat, **dict.fromkeys(extra_states(flat))}
    if plan.states:
        listed = registered(list(flat))
        ours = {_written(name, place, plan, names): name for name in ordered}
        tree["optimizer"] = _optimizer(model, plan, [ours[name] for name in listed], place, progress)
        tree["opt_param_scheduler"] = scheduler(model)
    return tree


def _position(name: str, place: Shard, plan: Plan, names: Names) -> tuple[int, ...]:
    bare = name.removeprefix(place.prefix)
    return LAST if names == "legacy" and bare == HEAD and place.prefix in plan.tied_heads else position(bare, names)


def _written(name: str, place: Shard, plan: Plan, names: Names) -> str:
    bare = name.removeprefix(place.prefix)
    layer, separate = _LAYER.match(bare), False
    if layer is not None and plan.cut.config.has_experts:
        separate = place.first_layer + int(layer[1]) in plan.cut.config.expert_layers(plan.cut.config.num_layers or 0)
    return written(bare, names, tied_head=bare == HEAD and place.prefix in plan.tied_heads, separate_norm=separate)


def lazy(store: Scattered, name: str, progress: Progress) -> LazyTensor:
    """Return a tensor of the store that is computed when it is written."""
    info: TensorInfo = store.tensors()[name]

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


def _optimizer(model: Model, plan: Plan, names: list[str], place: Shard, progress: Progress) -> dict[str, Any]:
    shapes = {name: plan.weights.tensors()[name].shape for name in names}
    decays = [[n for n in names if is_decayed(n, shapes[n]) == decayed] for decayed in (True, False)]
    numbered = [name for group in decays for name in group]
    groups = _groups(model, decays)

    def state(name: str) -> dict[str, Any]:
        moments = {kind: lazy(plan.states[kind], name, progress) for kind in ("exp_avg", "exp_avg_sq")}
        return {"step": torch.tensor(float(model.updates)), **moments}

    inner = {"state": {number: state(name) for number, name in enumerate(numbered)}, "param_groups": groups}
    if "master" not in plan.states:
        return inner
    masters = [[lazy(plan.states["master"], name, progress) for name in group] for group in decays]
    scaler = megatron_scaler(model, training(model).precision)
    return {"optimizer": inner, "fp32_from_fp16_params": masters, **scaler}


def _groups(model: Model, decays: list[list[str]]) -> list[dict[str, Any]]:
    config, first = training(model).optimizer, 0
    groups = []
    for mult, group in zip((1.0, 0.0), decays, strict=True):
        groups.append({
            "params": list(range(first, first + len(group))), "wd_mult": mult, "lr_mult": 1.0,
            "is_expert_parallel": False, "is_decoupled_lr": False, "default_config": True, "lr": config.lr or 0.0,
            "max_lr": config.lr or 0.0, "min_lr": config.min_lr, "betas": (config.adam_beta1, config.adam_beta2),
            "eps": config.adam_eps, "weight_decay": config.weight_decay * mult, "bias_correction": True,
            "amsgrad": False, "step": model.updates,
        })  # fmt: skip
        first += len(group)
    return groups


def optimizer_groups(model: Model, plan: Plan) -> dict[str, Any]:
    """Return the state of the optimizer and its schedule without tensors."""
    shapes = {name: info.shape for name, info in plan.weights.tensors().items()}
    decays = [[n for n in shapes if is_decayed(n, shapes[n]) == decayed] for decayed in (True, False)]
    inner = {"state": {"common_step": model.updates}, "param_groups": _groups(model, decays)}
    outer = {"optimizer": inner, **megatron_scaler(model, training(model).precision)}
    is_half = "master" in plan.states
    return {"optimizer": outer if is_half else inner, "opt_param_scheduler": scheduler(model)}


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
