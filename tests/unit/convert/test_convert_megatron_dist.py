"""Megatron-core's distributed checkpoints, read and written, against folders that torch.distributed.checkpoint itself writes and loads."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support import megatron_files as theirs
from support.convert_models import Tensors, assert_equal, contents, stored, write_run
from support.megatron_files import Kind
from test_convert_megatron import config_of, random_tensors, refused, run, to_native, with_optimizer
from torch import Tensor
from torch.distributed import checkpoint as dcp

from megatron_sp.config.schema import ModelConfig
from megatron_sp.convert.model import Model
from megatron_sp.utils.errors import EXIT_CHECKPOINT, EXIT_CONFIG

FOLDER = "iter_0000010"


def folder_of(path: Path, config: ModelConfig, tensors: dict[str, Tensor], **args: Any) -> Path:
    """A folder of torch's own writer with Megatron's other files."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(tensors, checkpoint_id=path / FOLDER, no_dist=True)
    common = {"args": theirs.arguments(config, Kind(), **args), "iteration": 10, "checkpoint_version": 3.0}
    theirs.write_file(common, path / FOLDER / "common.pt")
    (path / FOLDER / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    (path / "latest_checkpointed_iteration.txt").write_text("10")
    return path


def keys_of(config: ModelConfig, weights: dict[str, Tensor]) -> dict[str, list[str]]:
    """Keys of the format, with our names of the blocks that are stacked there, or of the tensor."""
    found: dict[str, list[str]] = {}
    stack = "encoder" if config.is_bert else "decoder"
    for ours in weights:
        rest = ours.removeprefix(f"{stack}.layers.").partition(".")[2]
        if ours.startswith(f"{stack}.layers."):
            found.setdefault(f"{stack}.layers.{dict(theirs.LAYER['core'])[rest]}", []).append(ours)
        else:
            found[dict(theirs.HEADS["core"]).get(ours, ours)] = [ours]
    return found


def padded(name: str, tensor: Tensor, kind: Kind) -> Tensor:
    if "word_embeddings" not in name and not name.startswith("output_layer"):
        return tensor
    made = torch.zeros(theirs.padded_rows(len(tensor), kind), *tensor.shape[1:], dtype=tensor.dtype)
    made[: len(tensor)] = tensor
    return made


def global_tensors(config: ModelConfig, weights: dict[str, Tensor], kind: Kind, *, stacked: bool, prefix: str = "") -> dict[str, Tensor]:
    """What the folder has: every tensor whole, blocks stacked or each with its number."""
    found: dict[str, Tensor] = {}
    for key, names in keys_of(config, weights).items():
        if ".layers." not in key:
            found[prefix + key] = padded(names[0], weights[names[0]], kind)
        elif stacked:
            found[prefix + key] = torch.stack([weights[name] for name in names])
        else:
            found |= {prefix + key.replace(".layers.", f".layers.{i}."): weights[name] for i, name in enumerate(names)}
    return found


def with_states(config: ModelConfig, tensors: dict[str, Tensor], kind: Kind, main: str, *, stacked: bool) -> dict[str, Tensor]:
    weights = {name: t for name, t in tensors.items() if not name.startswith("optimizer.")}
    found = global_tensors(config, weights, kind, stacked=stacked)
    for ours, key in (("master", main), ("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq")):
        states = {name: tensors[f"optimizer.{ours}.{name}"] for name in weights}
        found |= global_tensors(config, states, kind, stacked=stacked, prefix=f"optimizer.state.{key}.")
    return found


@pytest.mark.parametrize(
    ("shape", "stacked", "main"),
    [("gpt", True, "param"), ("llama", False, "fp32_param"), pytest.param("bert", True, "fp32_param", marks=pytest.mark.long)],
)
def test_folders_of_torch_are_read(tmp_path: Path, shape: str, stacked: bool, main: str) -> None:
    config, kind = config_of(shape), Kind(tp=2)
    tensors = with_optimizer(random_tensors(config, torch.bfloat16))
    stored_there = with_states(config, tensors, kind, main, stacked=stacked)
    source = folder_of(tmp_path / "theirs", config, stored_there, tensor_model_parallel_size=2)
    assert_equal(to_native(source, tmp_path / "ours", "--verify"), tensors)


@pytest.mark.parametrize(
    ("shape", "tp", "pp"),
    [("llama", 2, 2), *(pytest.param(*case, marks=pytest.mark.long) for case in (("gpt", 2, 2), ("groups", 4, 1), ("bert", 2, 2)))],
)
def test_torch_loads_what_is_written(tmp_path: Path, shape: str, tp: int, pp: int) -> None:
    config, kind = config_of(shape), Kind(tp=tp)
    tensors = with_optimizer(random_tensors(config, torch.bfloat16))
    source = write_run(Model(config, Tensors(tensors), step=10), tmp_path / "run")
    layout = ["--target-tensor-parallel-size", tp, "--target-pipeline-parallel-size", pp]
    assert run("--input", source, "--to", "megatron-dist", "--output", tmp_path / "theirs", *layout) == 0
    expected = with_states(config, tensors, kind, "fp32_param", stacked=True)
    found: dict[str, Any] = {name: torch.full_like(t, float("nan")) for name, t in expected.items()}
    stack, layers = "encoder" if config.is_bert else "decoder", config.num_layers
    modules = (
        "self_attention.linear_qkv", "self_attention.linear_proj", "self_attention.core_attention", "mlp.linear_fc1", "mlp.linear_fc2",
    )  # fmt: skip
    empty = {f"{stack}.layers.{m}._extra_state/shard_{i}_{layers}" for m in modules for i in range(layers or 0)}
    empty |= {f"{stack}.final_layernorm._extra_state/shard_0_1"}
    found |= dict.fromkeys(empty, "what is not there is an error")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(found, checkpoint_id=tmp_path / "theirs" / FOLDER, no_dist=True)
    assert all(found.pop(name) == [None] for name in empty), "Transformer Engine's state, as where there are no 8-bit numbers"
    assert_equal(found, expected)
    assert len(list((tmp_path / "theirs" / FOLDER).glob("*.distcp"))) == tp * pp
    common = theirs.read_file(tmp_path / "theirs" / FOLDER / "common.pt")
    assert common["args"].tensor_model_parallel_size == tp and common["optimizer"]["optimizer"]["state"] == {"common_step": 10}
    assert_equal(to_native(tmp_path / "theirs", tmp_path / "again"), tensors)


def test_pairs_of_neighbours_are_read_alike_from_both_formats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--rotary-interleaved: channels in another order, in weights as in states (which have their weights' values here)."""
    config, kind = config_of("llama", kv_channels=8, rotary_percent=0.5, qk_layernorm=True), Kind("core", tp=2)
    weights = random_tensors(config)
    tensors = weights | {
        f"optimizer.{state}.{name}": tensor for name, tensor in weights.items() for state in ("master", "exp_avg", "exp_avg_sq")
    }
    there = with_states(config, tensors, kind, "fp32_param", stacked=False)
    source = folder_of(tmp_path / "dist", config, there, tensor_model_parallel_size=2, rotary_interleaved=True)
    ranks = theirs.save(tmp_path / "ranks", theirs.rank_trees(config, weights, kind, rotary_interleaved=True))
    found, of_ranks = to_native(source, tmp_path / "ours", "--verify"), to_native(ranks, tmp_path / "again", "--verify")
    assert_equal({name: found[name] for name in weights}, of_ranks)
    for name in weights:
        assert torch.equal(found[f"optimizer.exp_avg.{name}"], found[name]), name
    changed = {name.split(".", 3)[-1] for name in weights if not torch.equal(found[name], weights[name])}
    assert changed == {f"self_attention.{part}.weight" for part in ("linear_qkv", "q_layernorm", "k_layernorm")}
    theirs_first, ours_first = (t["decoder.layers.0.self_attention.q_layernorm.weight"].tolist() for t in (weights, found))
    assert ours_first == [theirs_first[channel] for channel in (0, 2, 1, 3, 4, 5, 6, 7)]
    rows = {name: flattened(t, (2, 1)[: t.ndim]) if name.startswith("optimizer.") else t for name, t in there.items()}
    shares = folder_of(tmp_path / "rows", config, rows, tensor_model_parallel_size=2, rotary_interleaved=True)
    assert run("--input", shares, "--to", "megatron_sp", "--output", tmp_path / "no") == EXIT_CONFIG
    assert "give --no-optimizer" in capsys.readouterr().err


def flattened(tensor: Tensor, parts: tuple[int, ...]) -> Tensor:
    """Each part of a tensor as a row, as fully_sharded_model_space has it."""
    made = torch.empty(*parts, tensor.numel() // torch.Size(parts).numel(), dtype=tensor.dtype)
    sizes = [size // count for size, count in zip(tensor.shape, parts, strict=True)]
    for i in range(parts[0]):
        for j in range(parts[1] if len(parts) > 1 else 1):
            part = tensor[i * sizes[0] : (i + 1) * sizes[0]]
            if len(parts) > 1:
                part = part[:, j * sizes[1] : (j + 1) * sizes[1]]
            made[(i, j)[: len(parts)]] = part.reshape(-1)
    return made


def test_shares_in_rows_and_halves_with_keys_of_their_own(tmp_path: Path) -> None:
    config, kind = config_of("llama"), Kind(tp=2)
    tensors = with_optimizer(random_tensors(config, torch.bfloat16))
    found = with_states(config, tensors, kind, "fp32_param", stacked=False)
    for name, tensor in list(found.items()):
        if name.startswith("optimizer."):
            columns = name.endswith(("linear_proj.weight", "linear_fc2.weight"))
            rows = 4 if "fc1.weight" in name else 2 if tensor.ndim > 1 and not columns else 1
            found[name] = flattened(tensor, (rows, 2 if columns else 1)[: tensor.ndim])
        elif "linear_fc1.weight" in name:
            del found[name]
            found |= {f"{name}_{half}": part.clone() for half, part in zip("wv", tensor.chunk(2), strict=True)}
    source = folder_of(tmp_path / "theirs", config, found, tensor_model_parallel_size=2)
    assert_equal(to_native(source, tmp_path / "ours"), tensors)


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, config = tmp_path_factory.mktemp("dist") / "gpt", config_of("gpt")
    return folder_of(path, config, global_tensors(config, random_tensors(config), Kind(), stacked=True))


def test_backends_and_states_that_are_not_read(tmp_path: Path, gpt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = shutil.copytree(gpt, tmp_path / "theirs")
    (source / FOLDER / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    assert 'the backend is "zarr": only torch_dist' in refused(capsys, source, EXIT_CHECKPOINT)
    config, weights = config_of("gpt"), random_tensors(config_of("gpt"))
    tensors = global_tensors(config, weights, Kind(), stacked=True)
    buffer = {"optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(bf16, fp32).bucket_idx_0.exp_avg": torch.ones(8)}
    source = folder_of(tmp_path / "buffers", config, {**tensors, **buffer})
    assert "dp_reshardable" in (message := refused(capsys, source, EXIT_CHECKPOINT)) and "--no-optimizer" in message
    assert_equal(to_native(source, tmp_path / "ours", "--no-optimizer"), weights)
    source = folder_of(tmp_path / "fsdp", config, tensors, ckpt_format="fsdp_dtensor")
    assert "fsdp_dtensor" in refused(capsys, source, EXIT_CHECKPOINT)
    source = folder_of(tmp_path / "experts", config, tensors, num_experts=4)
    assert "num_experts is '4'" in refused(capsys, source, EXIT_CHECKPOINT)
    source = folder_of(tmp_path / "unknown", config, {**tensors, "decoder.layers.adapter.weight": torch.ones(4, 2)})
    assert "decoder.layers.adapter.weight[0] has no place in this model" in refused(capsys, source, EXIT_CHECKPOINT)


def test_large_metadata_is_read_when_it_may_be(tmp_path: Path, gpt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = shutil.copytree(gpt, tmp_path / "source")
    (metadata,) = source.glob("*/.metadata")
    whole, unused = metadata.read_bytes(), 4 << 20
    metadata.write_bytes(whole[:2] + b"X" + unused.to_bytes(4, "little") + bytes(unused) + b"0" + whole[2:])
    message = refused(capsys, source, EXIT_CHECKPOINT)
    assert "more than the 3,145,728 that are read, for that takes up to 0.1 GiB" in message
    assert "give --max-metadata-mb 5" in message
    for words, said in (
        (["--max-metadata-mb", 1025], "must be from 1 to 1024"),
        (["--from", "hf", "--max-metadata-mb", 9], "nothing for --from hf"),
    ):
        assert said in refused(capsys, source, EXIT_CONFIG, *words)
    assert run("--input", source, "--to", "megatron_sp", "--output", tmp_path / "out", "--max-metadata-mb", 5, "--vocab-size", 37) == 0


def test_between_the_formats_of_megatron(tmp_path: Path, gpt: Path) -> None:
    classic = ["--to", "megatron", "--output", tmp_path / "classic", "--target-tensor-parallel-size", 2, "--megatron-names", "legacy"]
    assert run("--input", gpt, *classic) == 0
    assert run("--input", tmp_path / "classic", "--to", "megatron-dist", "--output", tmp_path / "dist") == 0
    assert run("--input", tmp_path / "dist", "--to", "hf", "--output", tmp_path / "hf") == 0
    assert run("--input", tmp_path / "hf", "--to", "megatron", "--output", tmp_path / "last") == 0
    assert_equal(to_native(tmp_path / "last", tmp_path / "ours"), random_tensors(config_of("gpt")))


def test_every_tensor_of_the_folder_has_a_fate(tmp_path: Path, gpt: Path) -> None:
    assert run("--input", gpt, "--to", "megatron_sp", "--output", tmp_path / "ours") == 0
    report = json.loads((tmp_path / "ours" / "conversion.json").read_text())
    keys = set(keys_of(config_of("gpt"), contents(Model(config_of("gpt"), Tensors(random_tensors(config_of("gpt")))))))
    assert {row["source"].partition("[")[0] for row in report["tensors"]} == keys
    assert stored(tmp_path / "ours").keys() == {row["to"] for row in report["tensors"]}
