"""Checkpoints as Megatron-DeepSpeed writes them, made without the converter: flat buffers, partitions, layer files, universal folders.

Names are tables, rows go head by head, and what DeepSpeed does to its buffers is done here in the same steps: lay the
parameters of a group end to end, pad, cut. Classes of DeepSpeed that its files name are stand-ins of the same name.
"""

from __future__ import annotations

import enum
import math
import sys
import types
from argparse import Namespace
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_sp.config.schema import ModelConfig
from support import megatron_files

Tensors = dict[str, Tensor]
NESTED = (
    "language_model.embedding.word_embeddings.", "language_model.embedding.position_embeddings.", "language_model.encoder.",
    "language_model.embedding.tokentype_embeddings.", "language_model.pooler.", "language_model.output_layer.", "lm_head.", "binary_head.",
)  # fmt: skip


def _module(name: str, **members: Any) -> Any:
    found = types.ModuleType(name)
    for key, member in members.items():
        member.__module__, member.__qualname__ = name, key
        setattr(found, key, member)
    return found


class ZeroStageEnum(int, enum.Enum):
    def __reduce_ex__(self, _: object) -> tuple[type, tuple[int]]:
        return self.__class__, (int(self),)  # by value, in each version of Python; some of 3.11 store the name

    optimizer_states = 1
    gradients = 2
    weights = 3


class fragment_address:
    def __init__(self, numel: int, start: int) -> None:
        self.numel, self.start = numel, start


class SubparamShape:
    def __init__(self, patterns: list[str], shape: tuple[Any, ...], partition_dim: int) -> None:
        self.patterns, self.shape, self.partition_dim = patterns, shape, partition_dim


_PARENTS = ("deepspeed", "deepspeed.runtime", "deepspeed.runtime.zero", "deepspeed.utils", "deepspeed.checkpoint")
STAND_INS = [
    *(types.ModuleType(name) for name in _PARENTS),
    _module("deepspeed.runtime.zero.config", ZeroStageEnum=ZeroStageEnum),
    _module("deepspeed.utils.tensor_fragment", fragment_address=fragment_address),
    _module("deepspeed.checkpoint.universal_checkpoint", SubparamShape=SubparamShape),
]


@dataclass
class Save:
    """One way of saving.

    Attributes:
        zero: stage; 0: the model alone.
        pipeline: saved as layers; implied by several stages.
        order: of the rows of fused projections.
        filler: what is in rows that only pad the vocabulary.
        elastic: the old format of stages 1 and 2, a list without paddings.
        alignment: parameters of stages 1 and 2 start at multiples of this.
        sub_group: parameters in a group of stage 3.
        bf16_optimizer: the one without a stage, which leaves no shapes in the model states.
    """

    zero: int = 0
    dp: int = 1
    tp: int = 1
    pp: int = 1
    pipeline: bool = False
    order: str = "flat"
    dtype: torch.dtype = torch.bfloat16
    divisible_by: int = 16
    filler: float = 0.25
    elastic: bool = False
    round_robin: bool = False
    alignment: int = 1
    fragments: bool = True
    sub_group: int = 3
    bf16_optimizer: bool = False
    first_layer: int = 2
    step: int = 7
    args: dict[str, Any] = field(default_factory=dict)


def save_tree(path: Path, tree: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    before = {m.__name__: sys.modules.get(m.__name__) for m in STAND_INS}
    try:
        sys.modules.update({m.__name__: m for m in STAND_INS})
        torch.serialization.save(tree, path)
    finally:
        for name, module in before.items():
            sys.modules.pop(name)
            if module is not None:
                sys.modules[name] = module


def arguments(c: ModelConfig, how: Save) -> Namespace:
    """What Megatron-DeepSpeed has on its command line for such a model."""
    values = {
        "num_layers": c.num_layers, "hidden_size": c.hidden_size, "ffn_hidden_size": c.ffn_size,
        "num_attention_heads": c.num_attention_heads,
        "num_key_value_heads": c.num_groups, "kv_channels": c.head_dim, "seq_length": c.seq_length,
        "max_position_embeddings": c.max_positions, "add_position_embedding": c.position_embedding_type == "learned_absolute",
        "use_rotary_position_embeddings": c.position_embedding_type == "rope", "rope_theta": c.rotary_base, "rotary_percent": 1.0,
        "normalization": c.normalization.lower(), "layernorm_epsilon": c.norm_epsilon, "apply_layernorm_1p": False, "swiglu": c.swiglu,
        "add_bias_linear": not c.disable_bias_linear, "untie_embeddings_and_output_weights": c.untie_embeddings_and_output_weights,
        "bias_gelu_fusion": True, "openai_gelu": False, "attention_dropout": c.attention_dropout, "hidden_dropout": c.hidden_dropout,
        "init_method_std": c.init_method_std, "tensor_model_parallel_size": how.tp, "pipeline_model_parallel_size": how.pp,
        "num_experts": [1], "make_vocab_size_divisible_by": how.divisible_by, "consumed_train_samples": 70, "deepspeed": True,
        "bf16": how.dtype == torch.bfloat16, "fp16": how.dtype == torch.float16,
        "params_dtype": how.dtype, "topk": None,
    }  # fmt: skip
    return Namespace(**{**values, **how.args})


def share(name: str, full: Tensor, c: ModelConfig, how: Save, rank: int) -> Tensor:
    """A rank's part of a parameter, by our name."""
    kind = megatron_files.Kind("legacy", how.tp, order=how.order, divisible_by=how.divisible_by, filler=how.filler)
    return megatron_files.share(name, full, c, kind, rank).clone()


def theirs(name: str) -> str:
    """Megatron's name."""
    if name.startswith("embedding."):
        return "language_model." + name
    if ".layers." in name:
        _, _, number, rest = name.split(".", 3)
        return f"language_model.encoder.layers.{number}.{dict(megatron_files.LAYER['legacy'])[rest]}"
    heads = {ours: other.replace("/", ".") for ours, other in megatron_files.HEADS["legacy"]}
    return heads.get(name) or f"language_model.encoder.{name.partition('.')[2]}"


def rank_tensors(tensors: Tensors, c: ModelConfig, how: Save, rank: int) -> Tensors:
    return {theirs(name): share(name, full, c, how, rank) for name, full in tensors.items()}


def stage_names(names: list[str], c: ModelConfig, how: Save, stage: int) -> dict[str, str]:
    """Of a stage: the pipeline's name -> Megatron's. A tied embedding is in the first and in the last stage."""
    each = (c.num_layers or 0) // how.pp
    found: dict[str, str] = {}
    tied = not c.untie_embeddings_and_output_weights
    last = how.first_layer + (c.num_layers or 0)
    for name in names:
        rest = name.removeprefix("language_model.")
        if rest.startswith("embedding.") and (stage == 0 or (tied and stage == how.pp - 1)):
            inner = rest.removeprefix("embedding.")
            found[f"tied_modules.embed.{inner}" if tied else f"1.{inner}"] = name
        elif rest.startswith("encoder.layers."):
            _, _, number, inner = rest.split(".", 3)
            if int(number) // each == stage:
                found[f"{how.first_layer + int(number)}.{inner}"] = name
        elif stage == how.pp - 1 and rest.startswith("encoder.final_layernorm."):
            found[f"{last}.{rest.rsplit('.', 1)[1]}"] = name
        elif stage == how.pp - 1 and rest.startswith("output_layer."):
            found[f"{last + 1}.lm_head.weight"] = name
    return found


def write(folder: Path, c: ModelConfig, master: Tensors, moments: dict[str, Tensors], how: Save) -> Path:
    """A whole checkpoint.

    Args:
        folder: the root; global_stepN and latest are made in it.
        master: all parameters in fp32 by our names, in order.
        moments: exp_avg and exp_avg_sq by our names.
    """
    step = folder / f"global_step{how.step}"
    for rank in range(how.tp):
        kinds = {kind: rank_tensors(tensors, c, how, rank) for kind, tensors in {"master": master, **moments}.items()}
        names = list(kinds["master"])
        if how.pp > 1 or how.pipeline:
            write_layers(step, c, kinds["master"], how, rank)
        for stage in range(how.pp):
            here = stage_names(names, c, how, stage) if how.pp > 1 or how.pipeline else {name: name for name in names}
            mine = {kind: {new: tensors[old].clone() for new, old in here.items()} for kind, tensors in kinds.items()}
            if stage and (unused := "tied_modules.embed.position_embeddings.weight") in here:
                for kind in mine:
                    mine[kind][unused].fill_(9)
            write_rank(step, c, mine, how, stage * how.tp + rank)
    (folder / "latest").write_text(step.name)
    (folder / "latest_checkpointed_iteration.txt").write_text(str(how.step))
    return folder


def write_layers(step: Path, c: ModelConfig, tensors: Tensors, how: Save, rank: int) -> None:
    """Each layer's own file; with a tied embedding the last one is a copy of the first, whose positions nobody uses."""
    layers: dict[int, Tensors] = {}
    names = list(tensors)
    for stage in range(how.pp):
        for new, old in stage_names(names, c, how, stage).items():
            number, _, inner = new.removeprefix("tied_modules.").partition(".")
            if number == "embed":
                if stage == 0:
                    layers.setdefault(1, {})[inner] = tensors[old]
                if stage == how.pp - 1:
                    used = inner.startswith("word") or how.pp == 1
                    layers.setdefault(how.first_layer + (c.num_layers or 0) + 1, {})[inner] = tensors[old] if used else tensors[old] + 1
            else:
                layers.setdefault(int(number), {})[inner] = tensors[old]
    for number, contents in layers.items():
        tree = OrderedDict((name, t.to(how.dtype)) for name, t in contents.items())
        save_tree(step / f"layer_{number:02d}-model_{rank:02d}-model_states.pt", tree)


def groups_of(tensors: Tensors) -> list[list[str]]:
    """With weight decay, and without."""
    return [[n for n, t in tensors.items() if (t.ndim > 1) == decayed] for decayed in (True, False)]


def write_rank(step: Path, c: ModelConfig, kinds: dict[str, Tensors], how: Save, mp: int) -> None:
    """The files of one model parallel rank."""
    master = kinds["master"]
    groups = groups_of(master)
    if how.round_robin:
        groups = [[n for start in range(how.dp) for n in group[start :: how.dp]] for group in groups]
    if how.zero == 3:
        groups = [group[i : i + how.sub_group] for group in groups for i in range(0, len(group), how.sub_group)]
    states = model_states(c, master, groups, how)
    if how.zero == 3:
        states["module"] = {name: torch.empty(0, dtype=how.dtype) for name in master}
        for dp in range(how.dp):
            states["args"] = Namespace(**{**vars(states["args"]), "rank": mp + dp * how.tp})
            save_tree(step / f"zero_pp_rank_{dp}_mp_rank_{mp:02d}_model_states.pt", states)
    else:
        save_tree(step / f"mp_rank_{mp:02d}_model_states.pt", states)
    if how.zero or how.bf16_optimizer:
        prefix = "bf16_" if how.dtype == torch.bfloat16 else ""
        for dp in range(how.dp):
            tree = zero_3(kinds, groups, how, dp) if how.zero == 3 else zero_12(kinds, groups, how, dp)
            save_tree(step / f"{prefix}zero_pp_rank_{dp}_mp_rank_{mp:02d}_optim_states.pt", {"optimizer_state_dict": tree, "ds_config": {}})


def model_states(c: ModelConfig, master: Tensors, groups: list[list[str]], how: Save) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for name, t in master.items():
        prefix = next((p for p in NESTED if name.startswith(p)), "")
        at = nested
        for key in prefix.rstrip(".").split(".") if prefix else []:
            at = at.setdefault(key, {})
        at[name.removeprefix(prefix)] = t.to(how.dtype)
    shapes = [OrderedDict((n, master[n].shape) for n in group) for group in groups]
    return {
        "module": None if how.pp > 1 or how.pipeline else nested, "buffer_names": [], "param_shapes": shapes if how.zero else None,
        "shared_params": {}, "frozen_param_shapes": None, "frozen_param_fragments": None, "optimizer": None, "lr_scheduler": None,
        "global_steps": how.step, "skipped_steps": 0, "global_samples": 70, "dp_world_size": how.dp, "mp_world_size": how.tp,
        "ds_version": "0.16.4", "args": arguments(c, how), "checkpoint_version": 3.0, "iteration": how.step,
    }  # fmt: skip


def laid_out(tensors: Tensors, group: list[str], how: Save) -> tuple[Tensor, list[int], dict[str, tuple[int, int]]]:
    """The flat vector without its end's padding, the paddings after parameters, and (start, count) of each."""
    pieces, paddings, places, at = [], [], {}, 0
    for i, name in enumerate(group):
        t = tensors[name].reshape(-1)
        places[name] = (at, t.numel())
        at += t.numel()
        padding = 0 if i == len(group) - 1 else -at % how.alignment
        pieces += [t, torch.zeros(padding)]
        paddings.append(padding)
        at += padding
    return torch.cat(pieces), paddings, places


def zero_12(kinds: dict[str, Tensors], groups: list[list[str]], how: Save, dp: int) -> dict[str, Any]:
    """Stages 1 and 2."""
    partitions: dict[str, list[Tensor]] = {kind: [] for kind in kinds}
    lean: dict[str, list[Tensor]] = {kind: [] for kind in kinds}
    group_paddings, fragments, all_paddings = [], [], []
    for group in groups:
        for kind, tensors in kinds.items():
            flat, paddings, places = laid_out(tensors, group, how)
            unit = 2 * how.dp
            whole = torch.cat([flat, torch.zeros(-flat.numel() % unit)])
            size = whole.numel() // how.dp
            padding = max(0, min(size, (dp + 1) * size - flat.numel()))
            partitions[kind].append(whole[dp * size : (dp + 1) * size].clone())
            lean[kind].append(partitions[kind][-1][: size - padding])
        group_paddings.append(padding)
        all_paddings.append(paddings)
        here = OrderedDict()
        for name, (start, count) in places.items():
            first, end = max(start, dp * size), min(start + count, (dp + 1) * size)
            if first < end:
                here[name] = fragment_address(end - first, first - dp * size)
        fragments.append(here)
    moments = [kind for kind in kinds if kind != "master"]
    settings = [{"lr": 0.1, "betas": (0.9, 0.95), "step": how.step, "params": [i]} for i in range(len(groups))]
    if how.elastic:
        base: Any = [{"step": how.step, **{kind: lean[kind][i] for kind in moments}} for i in range(len(groups))]
    else:
        state = {i: {"step": torch.tensor(float(how.step)), **{k: partitions[k][i] for k in moments}} for i in range(len(groups))}
        base = {"state": state, "param_groups": settings}
    found = {
        "overflow": False, "clip_grad": 1.0, "base_optimizer_state": base, "partition_count": [how.dp] * len(groups),
        "single_partition_of_fp32_groups": partitions["master"] if how.bf16_optimizer else lean["master"],
        "group_paddings": group_paddings, "ds_version": "0.16.4",
    }  # fmt: skip
    if not how.bf16_optimizer:
        found["zero_stage"] = ZeroStageEnum(how.zero)
    if how.elastic:
        found["base_optimizer_state_step"] = how.step
    if how.fragments:
        found["param_slice_mappings"] = fragments
    if how.alignment > 1:
        found["param_alignment_paddings"] = all_paddings
    return found


def zero_3(kinds: dict[str, Tensors], groups: list[list[str]], how: Save, dp: int) -> dict[str, Any]:
    """Stage 3: a part of each parameter."""
    flats: dict[str, list[Tensor]] = {kind: [] for kind in kinds}
    for group in groups:
        for kind, tensors in kinds.items():
            parts = []
            for name in group:
                t = tensors[name].reshape(-1)
                size = math.ceil(t.numel() / how.dp)
                filler = 5.0 if kind == "master" else 0.0  # gradients of padding are none, so moments of it stay as they began
                parts.append(torch.cat([t, torch.full((size * how.dp - t.numel(),), filler)])[dp * size : (dp + 1) * size])
            flats[kind].append(torch.cat(parts))
    state = {i: {"step": how.step, **{k: flats[k][i] for k in kinds if k != "master"}} for i in range(len(groups))}
    return {
        "zero_stage": ZeroStageEnum(3), "partition_count": how.dp, "overflow": False, "fp32_flat_groups": flats["master"],
        "optimizer_state_dict": {"state": state, "param_groups": [{"params": list(state)}]},
    }  # fmt: skip


def write_universal(
    folder: Path, c: ModelConfig, master: Tensors, moments: dict[str, Tensors], how: Save, *, patterns: bool = True
) -> Path:
    """As ds_to_universal.py leaves it.

    Args:
        patterns: the model named its parameters' kinds; without, everything is put end to end along dim 0.
    """
    write(folder, c, master, moments, how)
    step = folder / f"global_step{how.step}"
    for path in [*step.glob("layer_*"), *step.glob("*_optim_states.pt")]:
        path.unlink()
    everything = [
        {kind: rank_tensors(tensors, c, how, rank) for kind, tensors in {"master": master, **moments}.items()} for rank in range(how.tp)
    ]
    names = list(everything[0]["master"])
    renamed = {old: new for s in reversed(range(how.pp)) for new, old in stage_names(names, c, how, s).items()} if how.pipeline else {}
    for name in names:
        inside = step / "zero" / renamed.get(name, name)
        for kind, file in (("master", "fp32"), ("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq")):
            if kind in everything[0]:
                parts = [rank[kind][name] for rank in everything]
                save_tree(inside / f"{file}.pt", merged(name, parts, c, how, patterns))
        save_tree(inside / "step.pt", torch.tensor(float(how.step)))
    (folder / "latest").rename(folder / "latest_universal")
    return folder


def merged(name: str, parts: list[Tensor], c: ModelConfig, how: Save, patterns: bool) -> dict[str, Any]:
    """The entry of one parameter."""
    if not patterns:
        return {"cat_dim": 0, "param": torch.cat(parts)}
    if "word_embeddings" in name or "output_layer" in name or name == "lm_head.bias":
        return {"cat_dim": 0, "vocab_tensor": True, "param": torch.cat(parts)[: c.vocab_size]}
    if name.endswith(("attention.dense.weight", "4h_to_h.weight")):
        return {"cat_dim": 1, "param": torch.cat(parts, dim=1)}
    if "h_to_4h" in name and c.swiglu:
        halves = [part.chunk(2) for part in parts]
        return {"cat_dim": 0, "param_n_sub_params": 2, "param": torch.cat([h[i] for i in range(2) for h in halves])}
    if "query_key_value" in name and how.order == "flat":
        rows = (c.num_attention_heads or 0) * c.head_dim, c.num_groups * c.head_dim, c.num_groups * c.head_dim
        split = [part.split([r // how.tp for r in rows]) for part in parts]
        spec = SubparamShape([name], (rows, c.hidden_size) if parts[0].ndim > 1 else (rows,), 0)
        return {"sub_param_shape": spec, "param": torch.cat([s[i] for i in range(3) for s in split])}
    if "query_key_value" in name or "h_to_4h" in name:
        return {"cat_dim": 0, "param": torch.cat(parts)}
    return {"param": parts[0]}
