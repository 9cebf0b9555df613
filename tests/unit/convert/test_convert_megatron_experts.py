"""Megatron-core's checkpoints of mixtures of experts, against files that are made without the converter: one expert after another."""

from __future__ import annotations

import itertools
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support import megatron_files as theirs
from support.convert_models import MIXTRAL, QWEN3, Tensors, assert_equal, contents, random_model, run, stored, write_run
from support.megatron_files import Kind, Tree
from torch import Tensor
from torch.distributed import checkpoint as dcp

from megatron_sp.config.schema import ModelConfig
from megatron_sp.convert.model import Model, parameter_shapes
from megatron_sp.utils.errors import EXIT_CHECKPOINT, EXIT_CONFIG

BIG = {"num_layers": 4, "num_experts": 4, "moe_ffn_hidden_size": 12, "moe_router_load_balancing_type": "seq_aux_loss", "norm_epsilon": 1e-6}
SHAPES: dict[str, dict[str, Any]] = {
    "mixtral": {**MIXTRAL, **BIG},
    "deepseek": {
        **QWEN3, **BIG, "moe_layer_freq": "[0]*1+[1]*3", "moe_shared_expert_intermediate_size": 8, "moe_router_score_function": "sigmoid",
        "moe_router_pre_softmax": False, "moe_router_enable_expert_bias": True, "moe_router_topk_scaling_factor": 2.5,
        "moe_router_num_groups": 2, "moe_router_group_topk": 1, "moe_router_topk": 2, "untie_embeddings_and_output_weights": False,
    },
    "every-second": {**MIXTRAL, **BIG, "moe_layer_freq": "2", "moe_router_pre_softmax": True, "moe_router_topk": 1},
    "ungated": {**MIXTRAL, **BIG, "swiglu": False, "squared_relu": True, "moe_shared_expert_intermediate_size": 16},
    "biases": {**MIXTRAL, **BIG, "swiglu": False, "squared_relu": True, "disable_bias_linear": False, "num_query_groups": 4},
}  # fmt: skip


def model_of(shape: str) -> Model:
    config = ModelConfig(**SHAPES[shape])
    generator = torch.Generator().manual_seed(0)
    return Model(config, Tensors({n: torch.randn(s, generator=generator) for n, s in parameter_shapes(config).items()}))


def arguments(c: ModelConfig, **more: Any) -> dict[str, Any]:
    """What Megatron's arguments say of experts."""
    layers = [int(layer in c.expert_layers(c.num_layers or 0)) for layer in range(c.num_layers or 0)]
    return {
        "num_experts": c.num_experts, "moe_router_topk": c.moe_router_topk, "moe_ffn_hidden_size": c.moe_ffn_hidden_size,
        "moe_shared_expert_intermediate_size": c.moe_shared_expert_intermediate_size,
        "moe_layer_freq": int(c.moe_layer_freq) if c.moe_layer_freq.isdigit() else layers,
        "moe_router_score_function": c.moe_router_score_function, "moe_router_pre_softmax": c.moe_router_pre_softmax,
        "moe_router_topk_scaling_factor": c.moe_router_topk_scaling_factor, "moe_router_num_groups": c.moe_router_num_groups,
        "moe_router_group_topk": c.moe_router_group_topk, "moe_router_enable_expert_bias": c.moe_router_enable_expert_bias,
        "moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": c.moe_aux_loss_coeff, **more,
    }  # fmt: skip


def with_experts(
    tree: Tree, c: ModelConfig, tensors: dict[str, Tensor], kind: Kind, t: int, first: int, ep: int, e: int, grouped: bool
) -> Tree:
    """A stage's tree plus its experts."""
    each = (c.num_layers or 0) // kind.pp
    for layer in range(first, first + each):
        ours, name = f"decoder.layers.{layer}.", f"decoder.layers.{layer - first}."
        if f"{ours}mlp.router.weight" not in tensors:
            continue
        for end in ("weight", "bias"):
            if f"{name}mlp.linear_fc1.layer_norm_{end}" in tree:
                tree[f"{name}pre_mlp_layernorm.{end}"] = tree.pop(f"{name}mlp.linear_fc1.layer_norm_{end}")
        for part in ("weight", "expert_bias"):
            if f"{ours}mlp.router.{part}" in tensors:
                tree[f"{name}mlp.router.{part}"] = tensors[f"{ours}mlp.router.{part}"]
        for part in (f"linear_fc{i}.{end}" for i in (1, 2) for end in ("weight", "bias")):
            if f"{ours}mlp.shared_experts.{part}" in tensors:
                tree[f"{name}mlp.shared_experts.{part}"] = theirs.share(
                    part, tensors[f"{ours}mlp.shared_experts.{part}"], c, kind, t
                ).clone()
            if f"{ours}mlp.experts.{part}" not in tensors:
                continue
            own = tensors[f"{ours}mlp.experts.{part}"].chunk(ep)[e]
            for number, tensor in enumerate(own):
                theirs_name = f"{name}mlp.experts.{part}{number}" if grouped else f"{name}mlp.experts.local_experts.{number}.{part}"
                tree[theirs_name] = theirs.share(part, tensor, c, kind, t).clone()
    return tree


def trees_of(c: ModelConfig, tensors: dict[str, Tensor], kind: Kind, ep: int, *, grouped: bool, **args: Any) -> dict[str, Tree]:
    found = {}
    for p in range(kind.pp):
        for t in range(kind.tp):
            for e in range(ep):
                tree = with_experts(
                    theirs.model_tree(c, tensors, kind, t, p, 0), c, tensors, kind, t, p * (c.num_layers or 0) // kind.pp, ep, e, grouped
                )
                more = arguments(c, expert_model_parallel_size=ep, rank=(p * ep + e) * kind.tp + t, **args)
                name = f"mp_rank_{t:02}" + (f"_{p:03}" if kind.pp > 1 else "") + (f"_{e:03}" if ep > 1 else "")
                found[name] = {"args": theirs.arguments(c, kind, **more), "iteration": 10, "checkpoint_version": 3.0, "model": tree}
    return found


@pytest.mark.parametrize(
    ("shape", "kind", "ep", "grouped"),
    [
        ("mixtral", Kind(), 1, True), ("mixtral", Kind(tp=2), 2, False), ("deepseek", Kind(tp=2, pp=2), 2, True),
        ("deepseek", Kind(), 4, True), ("every-second", Kind(pp=2), 2, False),
        ("biases", Kind("core-local", tp=2), 2, False), ("biases", Kind(tp=2), 1, True),
    ],
    ids=str,
)  # fmt: skip
def test_folders_of_all_shares_are_read(tmp_path: Path, shape: str, kind: Kind, ep: int, grouped: bool) -> None:
    model = model_of(shape)
    source = theirs.save(tmp_path / "theirs", trees_of(model.config, contents(model), kind, ep, grouped=grouped))
    assert run("--input", source, "--to", "megatron_sp", "--output", tmp_path / "run", "--verify") == 0
    assert_equal(stored(tmp_path / "run"), contents(model))


@pytest.mark.parametrize("target", ["megatron_sp", "megatron", pytest.param("megatron-dist", marks=pytest.mark.long)])
def test_biases_of_routers_are_never_rounded(tmp_path: Path, target: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A run keeps them in fp32, whatever its weights are in; and the run that is made of them is one in bf16."""
    model = model_of("deepseek")
    rounded = {name: t if name.endswith("expert_bias") else t.bfloat16() for name, t in contents(model).items()}
    source = write_run(model, tmp_path / "run")
    assert run("--input", source, "--to", target, "--output", tmp_path / "out", "--dtype", "bfloat16", "--verify") == 0
    found = tmp_path / "out"
    if target != "megatron_sp":
        assert run("--input", found, "--to", "megatron_sp", "--output", tmp_path / "again", "--dtype", "bfloat16") == 0
        found = tmp_path / "again"
        assert "parameters in bfloat16, without" in capsys.readouterr().err
    assert_equal(stored(found), rounded)
    state = json.loads((found / "checkpoints/step-000000/state.json").read_text())
    assert state["config"]["precision"]["bf16"] is (target != "megatron_sp")


ALWAYS = [("mixtral", "core", 2), ("mixtral", "core-local", 4)]
EVERY = itertools.product(("mixtral", "deepseek", "ungated"), ("core", "core-local"), (1, 2, 4))


@pytest.mark.parametrize(
    ("shape", "names", "ep"), [*ALWAYS, *(pytest.param(*case, marks=pytest.mark.long) for case in EVERY if case not in ALWAYS)]
)
def test_what_is_written_is_what_megatron_writes(tmp_path: Path, shape: str, names: str, ep: int) -> None:
    model = model_of(shape)
    source = write_run(model, tmp_path / "run")
    pp = 1 if ep == 4 else 2  # without stages a folder's second number is that of the share
    sizes = ["--target-tensor-parallel-size", 2, "--target-pipeline-parallel-size", pp, "--target-expert-parallel-size", ep]
    assert run("--input", source, "--to", "megatron", "--output", tmp_path / "theirs", "--megatron-names", names, *sizes, "--verify") == 0
    expected = trees_of(model.config, contents(model), Kind(names, tp=2, pp=pp), ep, grouped=names == "core")
    found = theirs.load(tmp_path / "theirs")
    assert found.keys() == expected.keys()
    for rank, tree in expected.items():
        assert_equal(theirs.flat(found[rank]["model"]), theirs.flat(tree["model"]))
        for name, value in arguments(model.config, expert_model_parallel_size=ep, rank=tree["args"].rank).items():
            assert getattr(found[rank]["args"], name) == value, name
    assert run("--input", tmp_path / "theirs", "--to", "megatron_sp", "--output", tmp_path / "again") == 0
    assert_equal(stored(tmp_path / "again"), contents(model))


@pytest.mark.parametrize(
    ("shape", "words", "expected"),
    [
        (None, ["--to", "megatron"], "--target-expert-parallel-size (3) is for models with experts, and this one has none"),
        ("mixtral", ["--to", "megatron"], "num_experts (4) must be a multiple of --target-expert-parallel-size (3): use a divisor"),
        ("mixtral", ["--to", "megatron-dist"], "--target-expert-parallel-size would change nothing for --to megatron-dist"),
    ],
)
def test_shares_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], shape: str | None, words: list[str], expected: str
) -> None:
    source = write_run(model_of(shape) if shape else random_model("llama"), tmp_path / "run")
    assert run("--input", source, *words, "--output", tmp_path / "theirs", "--target-expert-parallel-size", 3) == EXIT_CONFIG
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "theirs").exists()


@pytest.mark.parametrize("kind", ["megatron", "megatron-dist"])
def test_experts_with_biases_are_not_written(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    """Megatron's router has a bias then, which a strict loader would miss."""
    source = write_run(model_of("biases"), tmp_path / "run")
    assert run("--input", source, "--to", kind, "--output", tmp_path / "theirs") == EXIT_CHECKPOINT
    assert "experts with biases and a router without one, which Megatron has not: it cannot be written for it" in capsys.readouterr().err
    assert not (tmp_path / "theirs").exists()


def whole_tensors(c: ModelConfig, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """What a distributed checkpoint has: blocks stacked if all are alike, experts whole."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if "word_embeddings" in name or name.startswith("output_layer"):
            padded = torch.zeros(theirs.padded_rows(len(tensor), Kind()), *tensor.shape[1:])
            padded[: len(tensor)] = tensor
            found[name] = padded
            continue
        has = name.startswith("decoder.layers.") and int(name.split(".")[2]) in c.expert_layers(c.num_layers or 0)
        key = name.replace(".input_layernorm.", ".self_attention.linear_qkv.layer_norm_").replace("mlp.experts.", "mlp.experts.experts.")
        found[key if has else key.replace(".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_")] = tensor
    if c.moe_layer_freq != "1":
        return found
    layers = [[n for n in found if n.startswith(f"decoder.layers.{i}.")] for i in range(c.num_layers or 0)]
    stacked = {
        n.replace(".layers.0.", ".layers."): torch.stack([found[n.replace(".0.", f".{i}.", 1)] for i in range(len(layers))])
        for n in layers[0]
    }
    return {n: t for n, t in found.items() if not n.startswith("decoder.layers.")} | stacked


def eight_bit_states(c: ModelConfig) -> list[str]:
    """Keys that Megatron's default strictness asks for with Transformer Engine: each expert's, and the norm's, which is no part of one."""
    with_experts, n, e = c.expert_layers(c.num_layers or 0), c.num_layers, c.num_experts or 0
    found = []
    for i in with_experts:
        alike = c.moe_layer_freq == "1"
        layer, at, of = ("decoder.layers", f"{i}", f"{n}") if alike else (f"decoder.layers.{i}", "", "")
        found.append(f"{layer}.pre_mlp_layernorm._extra_state/shard_{at or 0}_{of or 1}")
        found += [
            f"{layer}.mlp.experts.experts.{m}._extra_state/shard_{f'{at}.' if alike else ''}{j}_{f'{of}.' if alike else ''}{e}"
            for m in ("linear_fc1", "linear_fc2")
            for j in range(e)
        ]
        if c.moe_shared_expert_intermediate_size:
            found += [f"{layer}.mlp.shared_experts.{m}._extra_state/shard_{at or 0}_{of or 1}" for m in ("linear_fc1", "linear_fc2")]
    return found


@pytest.mark.parametrize("shape", ["deepseek", "ungated", *(pytest.param(s, marks=pytest.mark.long) for s in ("mixtral", "every-second"))])
def test_distributed_checkpoints(tmp_path: Path, shape: str) -> None:
    """Read from torch's own writer; written so that torch's own reader finds the same."""
    model = model_of(shape)
    c, expected = model.config, whole_tensors(model.config, contents(model))
    folder = tmp_path / "theirs" / "iter_0000010"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(dict(expected), checkpoint_id=folder, no_dist=True)
    common = {"args": theirs.arguments(c, Kind(), **arguments(c)), "iteration": 10, "checkpoint_version": 3.0}
    theirs.write_file(common, folder / "common.pt")
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    assert run("--input", tmp_path / "theirs", "--to", "megatron_sp", "--output", tmp_path / "run", "--verify") == 0
    assert_equal(stored(tmp_path / "run"), contents(model))
    words = ["--target-tensor-parallel-size", 2, "--target-pipeline-parallel-size", 2, "--verify"]
    assert run("--input", tmp_path / "run", "--to", "megatron-dist", "--output", tmp_path / "back", *words) == 0
    (back,) = (tmp_path / "back").glob("iter_*")
    rows = theirs.padded_rows(c.vocab_size or 0, Kind(tp=2))
    there = {
        n: torch.zeros(rows, *t.shape[1:]) if "word_embeddings" in n or n.startswith("output") else torch.zeros_like(t)
        for n, t in expected.items()
    }
    empty = dict.fromkeys(eight_bit_states(c), "what is not there is an error")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(there | empty, checkpoint_id=back, no_dist=True)
    for name, tensor in expected.items():
        assert torch.equal(there[name][: len(tensor)], tensor), name


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"num_experts": 8}, "num_experts is '8', and so the model is a mixture of experts, and the tensors have 4"),
        ({"moe_shared_expert_gate": True}, "moe_shared_expert_gate is 'True', and so the model has a gate of the shared expert"),
        ({"moe_expert_capacity_factor": 1.0}, "drops tokens of experts that are full"),
        ({"moe_layer_freq": [1, 1, 0]}, "moe_layer_freq is [1, 1, 0]"),
        ({"moe_layer_freq": 2}, "does not fit the model that it claims to be"),
        ({"expert_tensor_parallel_size": 1}, "experts are split over 1 ranks (expert_tensor_parallel_size) and the rest over 2"),
        ({"moe_router_topk": 5}, "moe_router_topk (5) must be at most num_experts (4)"),
    ],
)
def test_what_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], args: dict[str, Any], words: str) -> None:
    model = model_of("mixtral")
    trees = trees_of(model.config, contents(model), Kind(tp=2), 2, grouped=True)
    for tree in trees.values():
        for name, value in args.items():
            setattr(tree["args"], name, value)
    source = theirs.save(tmp_path / "theirs", trees)
    assert run("--input", source, "--to", "megatron_sp", "--output", tmp_path / "run") == EXIT_CHECKPOINT
    assert words in capsys.readouterr().err


def test_ranks_that_are_missing_or_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = model_of("mixtral")
    trees = trees_of(model.config, contents(model), Kind(tp=2, pp=2), 2, grouped=True)
    one = dict(trees)
    del one["mp_rank_01_001_001"]
    source = theirs.save(tmp_path / "missing", one)
    assert run("--input", source, "--to", "megatron_sp", "--output", tmp_path / "run") == EXIT_CHECKPOINT
    assert "2 x 2 x 2 are expected (tp x pp x ep): mp_rank_01_001_001 missing" in capsys.readouterr().err
    name, drifted = "decoder.layers.0.mlp.router.weight", trees["mp_rank_00_001_001"]["model"]
    drifted[name] = drifted[name] + 1
    source = theirs.save(tmp_path / "drifted", trees)
    assert run("--input", source, "--to", "megatron_sp", "--output", tmp_path / "run") == EXIT_CHECKPOINT
    assert "must be the same on every rank that holds it" in capsys.readouterr().err


def test_the_optimizer_stays_behind_only_if_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = model_of("mixtral")
    trees = trees_of(model.config, contents(model), Kind(), 1, grouped=True)
    trees["mp_rank_00"]["optimizer"] = {"optimizer": {"state": {}, "param_groups": []}}
    source = theirs.save(tmp_path / "theirs", trees)
    assert run("--input", source, "--to", "megatron_sp", "--output", tmp_path / "run") == EXIT_CONFIG
    assert "the optimizer's state of a mixture of experts cannot be converted: give --no-optimizer" in capsys.readouterr().err
    assert run("--input", source, "--to", "megatron_sp", "--output", tmp_path / "run", "--no-optimizer") == 0
