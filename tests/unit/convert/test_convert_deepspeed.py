"""Megatron-DeepSpeed's checkpoints, made by a generator of their own, come in bit for bit, and go out again."""

from __future__ import annotations

import shutil
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.convert_models import GPT2, MODELS, Tensors, assert_equal, contents, random_model, run, stored, write_run
from support.deepspeed_files import Save, SubparamShape, ZeroStageEnum, fragment_address, rank_tensors, save_tree, write, write_universal
from torch import Tensor

from megatron_sp.checkpoint.stream import NativeReader
from megatron_sp.config.schema import ModelConfig
from megatron_sp.convert.formats import FORMATS
from megatron_sp.convert.formats.deepspeed import MegatronDeepSpeed
from megatron_sp.convert.model import Model, Options
from megatron_sp.utils.errors import EXIT_CHECKPOINT, EXIT_CONFIG, CheckpointError, ConfigError

READER = MegatronDeepSpeed()


def parts(model: Model) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """Weights, and moments by kind."""
    everything = contents(model)
    weights = {n: t for n, t in everything.items() if not n.startswith("optimizer.")}
    kinds = ("exp_avg", "exp_avg_sq")
    return weights, {k: {n: everything[f"optimizer.{k}.{n}"] for n in weights} for k in kinds if model.kinds()}


ODD = {**GPT2, "num_layers": 1, "hidden_size": 15, "num_attention_heads": 3}  # parameters that no number of ranks divides


def made(name: str) -> Model:
    """One of ``MODELS`` or the odd one, with moments."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MODELS, "odd", (ODD, 0))
        return random_model(name, optimizer=True)


def saved(path: Path, name: str, how: Save) -> tuple[Path, Model]:
    """A checkpoint of one of ``MODELS``, and what must come out of it."""
    model = made(name)
    weights, moments = parts(model)
    write(path, model.config, weights, moments, how)
    if not how.zero and not how.bf16_optimizer:
        return path, replace(model, store=Tensors({n: t.to(how.dtype) for n, t in weights.items()}))
    return path, model


def options(how: Save, model: Model, **more: Any) -> Options:
    """For the optimizer's own weights, unless said otherwise."""
    return Options(**{"qkv_layout": how.order, "vocab_size": model.config.vocab_size, "dtype": torch.float32, **more})


def assert_read(path: Path, how: Save, expected: Model, **more: Any) -> Model:
    found = READER.read(path, options(how, expected, **more))
    assert_equal(contents(found), contents(expected))
    for field in ("num_layers", "hidden_size", "num_attention_heads", "num_groups", "ffn_size", "vocab_size", "swiglu", "normalization",
                  "position_embedding_type", "untie_embeddings_and_output_weights", "is_bert", "max_positions", "rotary_base"):  # fmt: skip
        assert getattr(found.config, field) == getattr(expected.config, field), field
    assert (found.step, found.consumed_samples) == (7, 70)
    return found


SAVES = {
    "module": ("gpt2", Save()), "module tp": ("llama", Save(tp=2, order="interleaved")),
    "bert tp": ("megatron-bert", Save(tp=4, dtype=torch.float16, zero=2, dp=3)),
    "zero 1": ("llama", Save(zero=1, dp=3, tp=2)), "zero 1 dp 1": ("gpt2-untied", Save(zero=1)),
    "zero 2 round robin": ("gpt2", Save(zero=2, dp=4, round_robin=True, order="interleaved")),
    "zero 2 aligned": ("odd", Save(zero=2, dp=3, alignment=8)),
    "zero 1 elastic": ("gpt2", Save(zero=1, dp=3, elastic=True, fragments=False)),
    "bf16 optimizer": ("llama", Save(bf16_optimizer=True, dp=2, tp=2)),
    "zero 3": ("odd", Save(zero=3, dp=4)),
    "zero 3 tp": ("llama", Save(zero=3, dp=3, tp=2, sub_group=50)),
    "pipeline": ("gpt2", Save(pp=3, tp=2)),
    "one stage": ("gpt2", Save(pipeline=True, zero=1, dp=2, first_layer=3)),
    "pipeline zero 1": ("llama", Save(pp=3, tp=2, zero=1, dp=2)),
    "pipeline tied zero 1": ("gpt2", Save(pp=3, zero=1, dp=2)), "fp32": ("gpt2", Save(dtype=torch.float32, zero=1, dp=2)),
}  # fmt: skip


@pytest.mark.parametrize("case", SAVES)
def test_reading(tmp_path: Path, case: str) -> None:
    name, how = SAVES[case]
    path, expected = saved(tmp_path, name, how)
    assert_read(path, how, expected)


@pytest.mark.long
@pytest.mark.parametrize("order", ["flat", "interleaved"])
@pytest.mark.parametrize(("zero", "pp"), [(0, 1), (0, 3), (1, 1), (1, 3), (2, 1), (2, 3), (3, 1)])  # DeepSpeed has no stages with ZeRO 3
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("dp", [1, 2, 3, 4])
def test_reading_every_layout(tmp_path: Path, zero: int, dp: int, tp: int, pp: int, order: str) -> None:
    name = ("llama-heads", "gpt2", "gpt2-untied")[(zero + dp + tp) % 3]
    how = Save(zero=zero, dp=dp, tp=tp, pp=pp, order=order)
    path, expected = saved(tmp_path, name, how)
    assert_read(path, how, expected)


UNIVERSALS = {
    "universal": ("gpt2", Save(zero=1), True),
    "universal tp flat": ("llama", Save(zero=1, tp=2), True),
    "universal tp interleaved": ("llama-tied", Save(zero=1, tp=2, order="interleaved"), True),
    "universal without patterns": ("llama", Save(zero=1, tp=2), False),
    "universal pipeline": ("gpt2", Save(zero=1, tp=2, pp=3, pipeline=True), True),
}


@pytest.mark.parametrize("case", UNIVERSALS)
def test_reading_universal_checkpoints(tmp_path: Path, case: str) -> None:
    name, how, patterns = UNIVERSALS[case]
    model = random_model(name, optimizer=True)
    write_universal(tmp_path, model.config, *parts(model), how, patterns=patterns)
    found = assert_read(tmp_path, how, model)
    assert [fate for fate in found.fates if not fate.went] == []


def test_bare_tensors_of_stage_3_have_their_shapes_from_the_model_states(tmp_path: Path) -> None:
    model = random_model("gpt2", optimizer=True)
    weights, moments = parts(model)
    write(tmp_path, model.config, weights, moments, Save(zero=3))
    step = tmp_path / "global_step7"
    (step / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink()
    for file, tensors in (("fp32", weights), ("exp_avg", moments["exp_avg"]), ("exp_avg_sq", moments["exp_avg_sq"])):
        for name, tensor in rank_tensors(tensors, model.config, Save(), 0).items():
            save_tree(step / "zero" / name / f"{file}.pt", tensor.flatten())
    assert_read(tmp_path, Save(), model)


LAYOUTS = {
    "module": ("gpt2", 1, "flat", False), "zero1": ("llama", 2, "flat", True), "universal": ("llama-tied", 2, "interleaved", True),
    "zero1 bert": ("megatron-bert", 2, "flat", True), "zero1 odd": ("gpt2-untied", 1, "interleaved", True),
}  # fmt: skip


@pytest.mark.parametrize("case", LAYOUTS)
def test_there_and_back(tmp_path: Path, case: str) -> None:
    name, tp, order, optimizer = LAYOUTS[case]
    model = random_model(name, optimizer=optimizer)
    model.config.bert_head_activation = "gelu" if model.config.is_bert else None  # the only one that Megatron has
    source = write_run(model, tmp_path / "run")
    layout = case.split()[0]
    words = ("--deepspeed-layout", layout, "--target-tensor-parallel-size", tp, "--deepspeed-qkv-layout", order)
    assert run("--input", source, "--to", "megatron-deepspeed", "--output", tmp_path / "ds", *words) == 0
    assert run("--input", tmp_path / "ds", "--to", "megatron_sp", "--output", tmp_path / "again", *vocabulary(model)) == 0
    assert_equal(stored(tmp_path / "again"), contents(model))


def vocabulary(model: Model) -> tuple[Any, ...]:
    return ("--vocab-size", model.config.vocab_size)


def test_sixteen_bits_there_and_back(tmp_path: Path) -> None:
    """A bf16 run has its wide weights beside the narrow ones, and both come back; --dtype float32 makes the wide ones the weights."""
    model = random_model("llama", torch.bfloat16, optimizer=True)
    tensors = contents(model)
    for name in list(tensors):
        if name.startswith("optimizer.master."):
            tensors[name.removeprefix("optimizer.master.")] = tensors[name].bfloat16()
    model = replace(model, store=Tensors(tensors))
    source = write_run(model, tmp_path / "run")
    assert run("--input", source, "--to", "megatron-deepspeed", "--output", tmp_path / "ds") == 0
    assert (tmp_path / "ds" / "global_step7" / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt").exists()
    back = ("--input", tmp_path / "ds", "--to", "megatron_sp", *vocabulary(model), "--output")
    assert run(*back, tmp_path / "again") == 0
    assert_equal(stored(tmp_path / "again"), tensors)
    (folder,) = (tmp_path / "again" / "checkpoints").glob("step-*")
    config = NativeReader(folder).state["config"]
    resolved = {"max_position_embeddings": 16, "kv_channels": 6, "gelu_approximate": "none"}
    assert config["precision"]["bf16"] and ModelConfig(**config["model"]) == replace(model.config, **resolved)
    assert run(*back, tmp_path / "wide", "--no-optimizer", "--dtype", "float32") == 0
    wide = {n.removeprefix("optimizer.master."): t for n, t in tensors.items() if n.startswith("optimizer.master.")}
    assert_equal(stored(tmp_path / "wide"), wide)


WAYS_WITH_STATE = {
    "deepspeed": ("megatron-deepspeed", "--target-tensor-parallel-size", 2),
    "universal": ("megatron-deepspeed", "--deepspeed-layout", "universal"),
    "megatron": ("megatron", "--target-tensor-parallel-size", 2), "torch_dist": ("megatron-dist",),
}  # fmt: skip


@pytest.mark.parametrize(
    "way", ["deepspeed", "torch_dist", *(pytest.param(way, marks=pytest.mark.long) for way in ("universal", "megatron"))]
)
def test_updates_and_the_loss_scale_there_and_back(tmp_path: Path, way: str) -> None:
    """A step that fp16 has skipped is none of Adam's, whose bias correction goes by its own."""
    model = random_model("llama", torch.float16, optimizer=True)
    tensors = contents(model)
    tensors |= {n: tensors[f"optimizer.master.{n}"].half() for n in model.weights()}
    scale = {"dynamic": True, "scale": 2.0**15, "good_steps": 3, "hysteresis_left": 1}
    model = replace(model, store=Tensors(tensors), num_updates=4, loss_scale=scale)
    source = write_run(model, tmp_path / "run")
    target, *words = WAYS_WITH_STATE[way]
    assert run("--input", source, "--to", target, "--output", tmp_path / "there", *words) == 0
    assert run("--input", tmp_path / "there", "--to", "megatron_sp", "--output", tmp_path / "again", *vocabulary(model)) == 0
    before, after = (NativeReader(next((folder / "checkpoints").glob("step-*"))).state for folder in (source, tmp_path / "again"))
    assert before["num_updates"] == 4 and before["loss_scaler"] == scale
    for name in ("num_updates", "loss_scaler", "consumed_samples"):
        assert after[name] == before[name], name


NARROW = {
    "zero 1": ("llama", Save(zero=1, dp=3, tp=2), False), "zero 3": ("odd", Save(zero=3, dp=4, dtype=torch.float16), False),
    "pipeline": ("gpt2", Save(pp=3, zero=1, dp=2), False), "universal": ("llama-tied", Save(zero=1, tp=2, order="interleaved"), True),
    "bf16 optimizer": ("llama", Save(bf16_optimizer=True, dp=2), False),
    "universal pipeline": ("gpt2", Save(zero=1, tp=2, pp=3, pipeline=True), True),  # has no weights but the optimizer's
}  # fmt: skip


@pytest.mark.parametrize("case", NARROW)
def test_weights_are_those_that_the_model_computes_with(tmp_path: Path, case: str) -> None:
    name, how, universal = NARROW[case]
    model = made(name)
    (write_universal if universal else write)(tmp_path, model.config, *parts(model), how)
    wide = {n: t for n, t in contents(model).items() if not n.startswith("optimizer.")}
    kept = {f"optimizer.master.{n}": t for n, t in wide.items()}
    expected = {**contents(model), **kept, **{n: t.to(how.dtype) for n, t in wide.items()}}
    assert_equal(contents(READER.read(tmp_path, options(how, model, dtype=None))), expected)


def loaded(path: Path) -> Any:
    """By torch's own safe loader."""
    known = [(cls, f"{cls.__module__}.{cls.__qualname__}") for cls in (fragment_address, SubparamShape, ZeroStageEnum)]
    with torch.serialization.safe_globals([*known, Namespace]):
        return torch.serialization.load(path, weights_only=True)


def flattened(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Leaves by their path; tensors, or what stands in their place."""
    if isinstance(tree, dict | list):
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        return {name: leaf for key, value in items for name, leaf in flattened(value, f"{prefix}/{key}").items()}
    return {prefix: vars(tree) if isinstance(tree, fragment_address) else tree}


def assert_same_trees(ours: Any, theirs: Any, *without: str) -> None:
    a, b = (flattened(tree) for tree in (ours, theirs))
    assert [name for name in a if not name.startswith(without)] == [name for name in b if not name.startswith(without)]
    for name, leaf in a.items():
        if not name.startswith(without):
            assert torch.equal(leaf, b[name]) if isinstance(leaf, Tensor) else leaf == b[name], name


@pytest.mark.parametrize(("name", "tp"), [("llama", 2), ("odd", 1)])
def test_what_is_written_is_what_the_generator_writes(tmp_path: Path, name: str, tp: int) -> None:
    """The order of the flat buffers, the shares of ranks, and where the file says that a parameter lies."""
    model = made(name)
    weights, moments = parts(model)
    write(tmp_path / "theirs", model.config, weights, moments, Save(zero=1, tp=tp, dtype=torch.float32, divisible_by=128, filler=0.0))
    source = write_run(model, tmp_path / "run")
    assert run("--input", source, "--to", "megatron-deepspeed", "--output", tmp_path / "ours", "--target-tensor-parallel-size", tp) == 0
    model_states, optimizer = ([loaded(tmp_path / side / "global_step7" / name) for side in ("ours", "theirs")] for name in
                               (f"mp_rank_0{tp - 1}_model_states.pt", f"zero_pp_rank_0_mp_rank_0{tp - 1}_optim_states.pt"))  # fmt: skip
    for entry in ("module", "param_shapes"):
        assert_same_trees(*(tree[entry] for tree in model_states))
    ours, theirs = (tree["optimizer_state_dict"] for tree in optimizer)
    for entry in ("single_partition_of_fp32_groups", "group_paddings", "partition_count", "param_slice_mappings"):
        assert_same_trees(ours[entry], theirs[entry])
    for group in range(2):
        for kind in moments:
            assert torch.equal(*(side["base_optimizer_state"]["state"][group][kind] for side in (ours, theirs)))


def test_a_universal_checkpoint_is_what_the_generator_writes(tmp_path: Path) -> None:
    model = random_model("llama", optimizer=True)
    write_universal(tmp_path / "theirs", model.config, *parts(model), Save(zero=1, tp=2))
    source = write_run(model, tmp_path / "run")
    words = ("--deepspeed-layout", "universal", "--target-tensor-parallel-size", 2)
    assert run("--input", source, "--to", "megatron-deepspeed", "--output", tmp_path / "ours", *words) == 0
    assert (tmp_path / "ours" / "latest_universal").read_text() == "global_step7_universal"
    ours, theirs = tmp_path / "ours" / "global_step7_universal" / "zero", tmp_path / "theirs" / "global_step7" / "zero"
    files = sorted(path.relative_to(theirs) for path in theirs.glob("*/*.pt") if path.name != "step.pt")
    assert sorted(path.relative_to(ours) for path in ours.glob("*/*.pt") if path.name != "step.pt") == files
    for file in files:
        a, b = loaded(ours / file), loaded(theirs / file)
        specs = [tree.pop("sub_param_shape", None) for tree in (a, b)]
        assert all(s is None for s in specs) or (specs[0].shape, specs[0].partition_dim) == (specs[1].shape, specs[1].partition_dim)
        assert a.keys() == b.keys() and {n: v for n, v in a.items() if n != "param"} == {n: v for n, v in b.items() if n != "param"}, file
        assert torch.equal(a["param"], b["param"]), file


@pytest.fixture(scope="module")
def zero_1(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint to be copied and damaged."""
    return saved(tmp_path_factory.mktemp("deepspeed"), "gpt2", Save(zero=1, dp=2))[0]


@pytest.fixture(scope="module")
def zero_3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("deepspeed"), "gpt2", Save(zero=3, dp=2))[0]


def edited(source: Path, target: Path, file: str, **entries: Any) -> Path:
    """A copy in which entries of a file are other ones; in an optimizer's file, of its state. None: gone."""
    shutil.copytree(source, target)
    path = target / "global_step7" / file
    tree = loaded(path)
    inside = tree["optimizer_state_dict"] if "optim" in file else tree
    for name, value in entries.items():
        inside[name] = value(inside[name]) if callable(value) else value
        if inside[name] is None:
            del inside[name]
    save_tree(path, tree)
    return target


MODEL, RANK_1 = "mp_rank_00_model_states.pt", "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"


def shorter(flats: list[Tensor]) -> list[Tensor]:
    return [flats[0][:-60], *flats[1:]]


def nudged(module: dict[str, Any]) -> dict[str, Any]:
    weight = module["language_model"]["encoder"]["layers.1.mlp.dense_4h_to_h.weight"]
    weight[0, 0] += 1
    return module


def without(module: dict[str, Any]) -> dict[str, Any]:
    del module["language_model"]["encoder"]["layers.1.mlp.dense_4h_to_h.weight"]
    return module


def momentum(state: dict[str, Any]) -> dict[str, Any]:
    for group in state["state"].values():
        group["momentum_buffer"] = group.pop("exp_avg")
        del group["exp_avg_sq"]
    return state


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "no module": (MODEL, {"module": None}, "has no entry 'module'"),
    "a tensor too few": (MODEL, {"param_shapes": lambda g: [dict(list(g[0].items())[:-1]), g[1]]}, "elements, its parameters need"),
    "other groups": (MODEL, {"param_shapes": lambda g: g[:1]}, "has 1 groups of parameters"),
    "no shape": (MODEL, {"param_shapes": lambda g: [{"a": (-1, 2)}, g[1]]}, "which is not a shape"),
    "other weights": (MODEL, {"module": nudged}, "are not those of the optimizer rounded to torch.bfloat16"),
    "experts": (MODEL, {"ds_autoep_layers": [{}]}, "mixture of experts"),
    "cut short": (RANK_1, {"single_partition_of_fp32_groups": shorter}, "ends before|elements, its parameters need"),
    "another step": (
        RANK_1,
        {"base_optimizer_state": lambda b: {**b, "state": {0: {**b["state"][0], "step": 8}, 1: b["state"][1]}}},
        "its step is 8",
    ),
    "another count": (RANK_1, {"partition_count": [3, 3]}, "its count is 3"),
    "no count": (RANK_1, {"partition_count": None}, "partition_count"),
    "another order": (MODEL, {"param_shapes": lambda g: [dict(reversed(g[0].items())), g[1]]}, "are not those of the optimizer rounded"),
    "another optimizer": (RANK_1, {"base_optimizer_state": momentum}, "momentum_buffer, and only Adam's exp_avg and exp_avg_sq"),
    "no weights": (RANK_1, {"single_partition_of_fp32_groups": None}, "has no fp32 weights"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(tmp_path: Path, zero_1: Path, case: str) -> None:
    file, entries, message = REFUSED[case]
    refused(edited(zero_1, tmp_path / "edited", file, **entries), message)


def refused(folder: Path, message: str, how: Options | None = None) -> None:
    with pytest.raises(CheckpointError, match=message):
        contents(READER.read(folder, how or options(Save(), random_model("gpt2"))))


def test_frozen_and_missing_weights(tmp_path: Path, zero_1: Path) -> None:
    """What ZeRO does not have is the model's own; what neither has is missing, by name."""
    folder = edited(zero_1, tmp_path / "edited", MODEL, module=without)
    contents(READER.read(folder, options(Save(), random_model("gpt2"))))  # the optimizer has it
    for path in (folder / "global_step7").glob("*optim*"):
        path.unlink()
    refused(folder, r"layers.1.mlp.linear_fc2.weight is missing")


FILES: dict[str, tuple[str, str, str]] = {
    "a partition": ("zero_1", "bf16_zero_pp_rank_1*", "is one of 2 files"),
    "the first partition": ("zero_1", "bf16_zero_pp_rank_0*", r"goes to 1, but \[0\] are missing"),
    "the model": ("zero_1", "mp_rank*", "no step folder"),
    "the optimizer of stage 3": ("zero_3", "*optim*", "where the weights are in the files"),
}


@pytest.mark.parametrize("case", FILES)
def test_missing_files(tmp_path: Path, request: pytest.FixtureRequest, case: str) -> None:
    source, pattern, message = FILES[case]
    shutil.copytree(request.getfixturevalue(source), tmp_path / "copy")
    for path in (tmp_path / "copy" / "global_step7").glob(pattern):
        path.unlink()
    refused(tmp_path / "copy" / "global_step7", message)


def exchange(folder: Path, one: str, other: str) -> None:
    a, b = (folder / "global_step7" / name for name in (one, other))
    a.rename(folder / "aside")
    b.rename(a)
    (folder / "aside").rename(b)


@pytest.mark.parametrize("optimizer", [True, False])
def test_exchanged_files_of_stage_3_are_told_by_their_padding(tmp_path: Path, optimizer: bool) -> None:
    path, expected = saved(tmp_path, "odd", Save(zero=3, dp=4))
    exchange(path, *(f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (1, 3)))
    message = r"rank_3\S* has moments where the data parallel rank 3 of 4 has nothing but padding, and \S*rank_1"
    refused(path, message, options(Save(), expected, optimizer=optimizer))


def test_an_optimizer_that_changes_padding_is_no_exchange(tmp_path: Path) -> None:
    path, expected = saved(tmp_path, "odd", Save(zero=3, dp=4))
    for file in path.glob("*/*optim_states.pt"):
        tree = loaded(file)
        for state in tree["optimizer_state_dict"]["optimizer_state_dict"]["state"].values():
            state["exp_avg_sq"] += state["exp_avg_sq"] == 0
        save_tree(file, tree)
    READER.read(path, options(Save(), expected))


def test_exchanged_model_states_of_stage_3_are_told_by_their_arguments(tmp_path: Path, zero_3: Path) -> None:
    shutil.copytree(zero_3, tmp_path / "copy")
    exchange(tmp_path / "copy", *(f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in (0, 1)))
    refused(tmp_path / "copy", r"was written by the global rank 1, and \S*rank_1\S* by 0")


def test_stages_of_different_saves(tmp_path: Path) -> None:
    """Stages have no weight in common that would differ: their counters and arguments do."""
    path, expected = saved(tmp_path, "gpt2", Save(pp=3))
    file = path / "global_step7" / "mp_rank_01_model_states.pt"
    tree = loaded(file)
    for name, value in (("global_steps", 9), ("args", Namespace(**{**vars(tree["args"]), "seed": 7, "consumed_train_samples": 90}))):
        save_tree(file, {**tree, name: value})
        message = r"mp_rank_01\S* (global_steps is 9, and 7|consumed_train_samples is 90, and 70) in"
        refused(path, message, options(Save(), expected))


@pytest.mark.parametrize("is_exchanged", [True, False])
def test_exchanged_files_of_stage_3_are_told_by_their_devices(tmp_path: Path, zero_3: Path, is_exchanged: bool) -> None:
    shutil.copytree(zero_3, tmp_path / "copy")
    for rank in range(2):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.serialization, "location_tag", lambda storage, rank=rank: f"cuda:{rank}")
            for file in (tmp_path / "copy" / "global_step7").glob(f"*zero_pp_rank_{rank}_*"):
                save_tree(file, loaded(file))
    if is_exchanged:
        exchange(tmp_path / "copy", *(f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1)))
        refused(tmp_path / "copy", r"rank_0\S* has tensors of cuda:1, and \S*rank_0\S* of cuda:0")
    else:
        READER.read(tmp_path / "copy", options(Save(), random_model("gpt2")))


def test_which_step(tmp_path: Path, zero_1: Path) -> None:
    shutil.copytree(zero_1, tmp_path / "copy")
    root, how = tmp_path / "copy", options(Save(), random_model("gpt2"))
    assert READER.recognises(root) and READER.recognises(root / "global_step7") and not READER.recognises(tmp_path)
    assert READER.read(root / "global_step7", how).step == READER.read(root, replace(how, step=7)).step == 7
    refused(root, "has no global_step8: there are global_step7", replace(how, step=8))
    for text, message in (("../x", "not a plain name"), ("global_step9", "which is not there")):
        (root / "latest").write_text(text)
        refused(root, message, how)
    (root / "latest").unlink()
    assert READER.read(root, how).step == 7  # latest_checkpointed_iteration.txt
    (root / "latest_checkpointed_iteration.txt").unlink()
    assert READER.read(root, how).step == 7  # the only one
    (root / "global_step7" / "layer_0_expert_0_mp_rank_00_model_states.pt").touch()
    refused(root, "mixtures of experts", how)


def test_what_the_files_do_not_say_is_asked_for(tmp_path: Path, zero_1: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ("--input", zero_1, "--to", "megatron_sp", "--output", tmp_path / "run")
    assert run(*command, "--vocab-size", 37) == EXIT_CONFIG
    assert "give --qkv-layout flat if" in capsys.readouterr().err
    assert run(*command, "--qkv-layout", "flat") == EXIT_CONFIG
    assert "--vocab-size N" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert run(*command, "--qkv-layout", "flat", "--vocab-size", 37) == 0


def test_one_group_of_heads_for_each_rank_has_one_order(tmp_path: Path) -> None:
    path, expected = saved(tmp_path, "llama", Save(tp=2))
    found = READER.read(path, Options(vocab_size=37))
    assert_equal(contents(found), contents(expected))


def test_layouts_that_cannot_be_written(tmp_path: Path) -> None:
    model = random_model("gpt2")
    for more, message in (
        ({"deepspeed_layout": "zero1"}, "the source has none: give --deepspeed-layout module"),
        ({"pp": 2}, "must be 1 for megatron-deepspeed"),
        ({"tp": 3}, r"must be a multiple of --target-tensor-parallel-size \(3\)"),
    ):
        with pytest.raises(ConfigError, match=message):
            READER.size(model, Options(**more))
    with pytest.raises(CheckpointError, match="norms after attention and MLP, which Megatron-DeepSpeed has not"):
        READER.size(random_model("bert"), Options())


@pytest.mark.parametrize("target", ["megatron", "megatron-dist", "megatron-deepspeed"])
def test_the_optimizer_s_state_is_that_of_weights_of_one_dtype(target: str) -> None:
    half, wide = random_model("llama", torch.bfloat16, optimizer=True), random_model("llama", torch.float64, optimizer=True)
    for dtype in (torch.float16, torch.float32):
        with pytest.raises(ConfigError, match="the optimizer's state is that of a bfloat16 model"):
            FORMATS[target].size(half, Options(dtype=dtype))
        FORMATS[target].size(half, Options(dtype=dtype, optimizer=False))
    with pytest.raises(ConfigError, match="in float64, and this format keeps the optimizer's state in float32"):
        FORMATS[target].size(wide, Options())
    for options in (Options(dtype=torch.float32), Options(optimizer=False)):
        FORMATS[target].size(wide, options)
    FORMATS[target].size(half, Options(dtype=torch.bfloat16))


@pytest.mark.parametrize("case", ["zero 1", "universal"])
def test_a_narrow_dtype_is_made_of_what_the_model_computes_with(tmp_path: Path, case: str) -> None:
    """The fp32 copies stay copies: Megatron's formats take the state where --dtype is the run's own, and no other way."""
    name, how, universal = NARROW[case]
    model = made(name)
    (write_universal if universal else write)(tmp_path, model.config, *parts(model), how)
    own = READER.read(tmp_path, options(how, model, dtype=how.dtype))
    assert_equal(contents(own), contents(READER.read(tmp_path, options(how, model, dtype=None))))
    other = READER.read(tmp_path, options(how, model, dtype=torch.float16))
    assert_equal(contents(other), contents(own))  # and rounded from there when it is written, as --verify does
    for target in ("megatron", "megatron-dist", "megatron-deepspeed"):
        FORMATS[target].size(own, Options(dtype=how.dtype))
        with pytest.raises(ConfigError, match="the optimizer's state is that of a bfloat16 model"):
            FORMATS[target].size(other, Options(dtype=torch.float16))


def test_a_wide_run_becomes_a_narrow_one(tmp_path: Path) -> None:
    """Its weights are the fp32 copies that 16-bit ones need beside them, whichever format they go into."""
    model, how = made("llama"), Save(zero=1, dp=2, dtype=torch.float32)
    write(tmp_path / "ds", model.config, *parts(model), how)
    read = READER.read(tmp_path / "ds", options(how, model, dtype=torch.bfloat16))
    for target in ("megatron", "megatron-dist", "megatron-deepspeed"):
        FORMATS[target].size(read, Options(dtype=torch.bfloat16))
    run_folder = tmp_path / "run"
    FORMATS["megatron_sp"].write(read, run_folder, Options(output=run_folder, dtype=torch.bfloat16), lambda num_bytes: None)
    wide = {n: t for n, t in contents(model).items() if not n.startswith("optimizer.")}
    kept = {f"optimizer.master.{n}": t for n, t in wide.items()}
    assert_equal(stored(run_folder), {**contents(model), **kept, **{n: t.bfloat16() for n, t in wide.items()}})


def test_a_pickle_that_runs_something_is_refused(tmp_path: Path, zero_1: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "touched",))

    folder = edited(zero_1, tmp_path / "edited", MODEL, lr_scheduler=Evil())
    assert run("--input", folder, "--to", "megatron_sp", "--output", tmp_path / "run", "--vocab-size", 37) == EXIT_CHECKPOINT
    assert not (tmp_path / "touched").exists() and not (tmp_path / "run").exists()


def test_every_tensor_has_a_fate(tmp_path: Path) -> None:
    path, expected = saved(tmp_path, "gpt2", Save(pp=3, zero=1, dp=2))
    fates = {fate.name: fate for fate in READER.read(path, options(Save(), expected)).fates}
    unused = [fate for fate in fates.values() if not fate.went]
    assert {fate.why for fate in unused} == {"the head's copy of it, which the model does not use"} and len(unused) == 2
    assert fates["mp_rank_00: 2.self_attention.query_key_value.weight"].went == "decoder.layers.0.self_attention.linear_qkv.weight"
