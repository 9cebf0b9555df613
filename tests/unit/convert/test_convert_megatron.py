"""Megatron's classic checkpoints, read and written: bit for bit, against files that are made without the converter."""

from __future__ import annotations

import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import megatron_files as theirs
from support.convert_models import BERT, GPT2, LLAMA, Tensors, assert_equal, contents, run, stored, write_run
from support.megatron_files import Kind
from torch import Tensor

from megatron_sp.config.schema import ModelConfig
from megatron_sp.convert.formats import FORMATS, detect
from megatron_sp.convert.formats.native import Native
from megatron_sp.convert.model import KINDS, Model, Options, parameter_shapes
from megatron_sp.utils.errors import EXIT_CHECKPOINT, EXIT_CONFIG

BIG = {"num_layers": 2, "ffn_hidden_size": 24}
LONG = pytest.mark.long
SHAPES: dict[str, dict[str, Any]] = {
    "gpt": {**GPT2, **BIG, "vocab_size": 131},
    "untied": {**GPT2, **BIG, "untie_embeddings_and_output_weights": True, "gelu_approximate": "none", "vocab_size": 131},
    "llama": {**LLAMA, **BIG},
    "groups": {
        **LLAMA, **BIG, "untie_embeddings_and_output_weights": False, "qk_layernorm": True, "kv_channels": 10, "add_qkv_bias": True,
        "apply_layernorm_1p": True, "num_attention_heads": 8, "num_query_groups": 4, "vocab_size": 300, "rotary_percent": 0.4,
    },
    "bert": {**BERT, **BIG, "bert_head_activation": "gelu", "vocab_size": 131},
    "bert-one-segment": {**BERT, **BIG, "bert_head_activation": "gelu", "bert_no_binary_head": True, "num_tokentypes": 0,
        "gelu_approximate": "none",
    },
}  # fmt: skip


def config_of(shape: str, **more: Any) -> ModelConfig:
    return ModelConfig(**{**SHAPES[shape], **more})


def random_tensors(config: ModelConfig, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in parameter_shapes(config).items()}


def with_optimizer(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """And state of Adam for them; the fp32 copies round to the weights."""
    generator = torch.Generator().manual_seed(1)
    found = dict(weights)
    for kind in KINDS:
        for name, tensor in weights.items():
            if kind != "master":
                found[f"optimizer.{kind}.{name}"] = torch.randn(tensor.shape, generator=generator)
            elif tensor.dtype.itemsize == 2:
                found[f"optimizer.{kind}.{name}"] = tensor.float() * (1 + 1e-4 * torch.rand(tensor.shape, generator=generator))
    return found


def to_native(source: Path, target: Path, *more: Any) -> dict[str, Tensor]:
    assert run("--input", source, "--to", "megatron_sp", "--output", target, *more) == 0
    return stored(target)


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        ("gpt", Kind("legacy", tp=2, version=0, old=True)), ("gpt", Kind("legacy", tp=4, version=1.0)),
        ("gpt", Kind("core", tp=2, pp=2, chunks=2)), ("groups", Kind("legacy", tp=2, order="flat")),
        ("groups", Kind("core", tp=4, pp=2, divisible_by=1)), ("bert", Kind("legacy", tp=2, pp=2)),
        *(
            pytest.param(*case, marks=LONG)
            for case in (
                ("untied", Kind("core-local", tp=1, pp=4)), ("llama", Kind("core", tp=2, pp=2)),
                ("llama", Kind("core", tp=1, pp=2, chunks=2)),
                ("bert", Kind("core", tp=2, pp=2, version=2.0)), ("bert-one-segment", Kind("legacy", tp=4)),
                ("untied", Kind("legacy", tp=2, pp=2, chunks=2, version=1.0)), ("groups", Kind("core-local", tp=2, pp=4)),
            )
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{value.names}-{value.tp}x{value.pp}x{value.chunks}-{value.row_order}",
)  # fmt: skip
def test_files_of_all_kinds_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str], shape: str, kind: Kind) -> None:
    """Bit for bit; and the reference computes the same logits from the files alone."""
    config = config_of(shape, num_layers=max(2, kind.pp * kind.chunks))
    tensors = random_tensors(config, torch.float64)
    source = theirs.save(tmp_path / "theirs", theirs.rank_trees(config, tensors, kind))
    more = ["--qkv-layout", kind.order] if kind.order else []
    assert_equal(to_native(source, tmp_path / "ours", "--verify", *more), tensors)
    told = capsys.readouterr().err
    assert "the reference in plain torch on" in told and ", in float64" in told


def ours_as_model(shape: str, dtype: torch.dtype = torch.float32, *, optimizer: bool = False, num_layers: int = 2) -> Model:
    config = config_of(shape, num_layers=num_layers)
    weights = random_tensors(config, dtype)
    return Model(config, Tensors(with_optimizer(weights) if optimizer else weights), step=10 if optimizer else 0, consumed_samples=640)


def equal_trees(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """The same names in the same order, nested alike, and the same bits."""
    a, b = theirs.flat(found), theirs.flat(expected)
    assert list(a) == list(b)
    assert_equal(a, b)


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        ("groups", Kind("core", tp=2)), ("bert", Kind("legacy", tp=2, pp=2)),
        *(
            pytest.param(*case, marks=LONG)
            for case in (
                ("gpt", Kind("legacy", tp=2, pp=2)), ("untied", Kind("core", tp=4)), ("llama", Kind("core-local", tp=2, pp=4)),
                ("bert", Kind("core", tp=1, pp=2)),
            )
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{value.names}-{value.tp}x{value.pp}",
)  # fmt: skip
def test_files_are_written_as_megatron_would(tmp_path: Path, shape: str, kind: Kind) -> None:
    model = ours_as_model(shape, torch.bfloat16, optimizer=True, num_layers=max(2, kind.pp))
    config, tensors = model.config, contents(model)
    weights = {name: t for name, t in tensors.items() if not name.startswith("optimizer.")}
    layout = ["--target-tensor-parallel-size", kind.tp, "--target-pipeline-parallel-size", kind.pp, "--megatron-names", kind.names]
    source = write_run(model, tmp_path / "run")
    assert run("--input", source, "--to", "megatron", "--output", tmp_path / "theirs", *layout) == 0
    found, expected = theirs.load(tmp_path / "theirs"), theirs.rank_trees(config, weights, kind)
    states = {kind_of: {n: tensors[f"optimizer.{kind_of}.{n}"] for n in weights} for kind_of in KINDS}
    of = {kind_of: theirs.rank_trees(config, one, kind) for kind_of, one in states.items()}
    assert found.keys() == expected.keys()
    for rank, tree in found.items():
        extra = [name for name in list(tree["model"]) if name.endswith("._extra_state") and tree["model"].pop(name) is None]
        assert len(extra) == (4 * (config.num_layers or 0) // kind.pp if kind.names == "core" else 0), "Transformer Engine's linear layers"
        equal_trees(tree["model"], expected[rank]["model"])
        said, wanted = vars(tree["args"]), vars(expected[rank]["args"])
        assert {name: said[name] for name in wanted if name not in ("num_query_groups", "data_parallel_size")}.items() <= wanted.items()
        optimizer = theirs.plain_optimizer([expected[rank]["model"]], {kind_of: [trees[rank]["model"]] for kind_of, trees in of.items()})
        assert_equal_states(tree["optimizer"], optimizer)
        assert tree["iteration"] == 10 and tree["checkpoint_version"] == 3.0
    assert_equal(to_native(tmp_path / "theirs", tmp_path / "again"), tensors)


def assert_equal_states(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["optimizer"]["state"].keys() == expected["optimizer"]["state"].keys()
    for number, state in expected["optimizer"]["state"].items():
        assert_equal({kind: found["optimizer"]["state"][number][kind] for kind in state}, state)
    for a, b in zip(found["fp32_from_fp16_params"], expected["fp32_from_fp16_params"], strict=True):
        assert_equal(dict(enumerate(a)), dict(enumerate(b)))  # type: ignore[arg-type]
    groups = [[group[name] for name in ("params", "wd_mult")] for group in found["optimizer"]["param_groups"]]
    assert groups == [[group[name] for name in ("params", "wd_mult")] for group in expected["optimizer"]["param_groups"]]


def save_with_optimizer(path: Path, shape: str, kind: Kind, *, dtype: torch.dtype = torch.bfloat16, **layout: Any) -> dict[str, Tensor]:
    """A checkpoint of Megatron's with the distributed optimizer; returns its tensors by our names."""
    config = config_of(shape, num_layers=max(2, kind.pp * kind.chunks))
    tensors = with_optimizer(random_tensors(config, dtype))
    weights = {name: t for name, t in tensors.items() if not name.startswith("optimizer.")}
    of = {k: theirs.rank_trees(config, {n: tensors.get(f"optimizer.{k}.{n}", weights[n]) for n in weights}, kind) for k in KINDS}
    trees = theirs.rank_trees(config, weights, kind)
    theirs.save(path, {rank: {**tree, "optimizer": {"optimizer": {"param_groups": [{"step": 10}]}}} for rank, tree in trees.items()})
    shared = kind.pp > 1 and not config.untie_embeddings_and_output_weights
    for rank in trees:
        models = {k: [model for key, model in of[k][rank].items() if key.startswith("model")] for k in KINDS}
        theirs.write_file(theirs.distributed_optimizer(models, shared, **layout), path / "iter_0000010" / rank / "distrib_optim.pt")
    return tensors


@pytest.mark.parametrize(
    ("shape", "kind", "layout"),
    [
        ("gpt", Kind("core", tp=1, pp=2, chunks=2), {}), ("bert", Kind("legacy", tp=1, pp=2), {}),
        pytest.param("llama", Kind("core-local", tp=2, pp=1), {"align": 1}, marks=LONG),
        pytest.param("gpt", Kind("core", tp=2, pp=2, chunks=2), {}, marks=LONG),
    ],
    ids=["core-1x2x2", "legacy-1x2", "core-local-2x1-unaligned", "core-2x2x2"],
)  # fmt: skip
def test_the_distributed_optimizer_is_read(tmp_path: Path, shape: str, kind: Kind, layout: dict[str, Any]) -> None:
    tensors = save_with_optimizer(tmp_path / "theirs", shape, kind, **layout)
    assert_equal(to_native(tmp_path / "theirs", tmp_path / "ours"), tensors)


def test_fp32_weights_are_their_own_copy(tmp_path: Path) -> None:
    tensors = save_with_optimizer(tmp_path / "theirs", "llama", Kind("core"), dtype=torch.float32)
    assert_equal(to_native(tmp_path / "theirs", tmp_path / "ours"), tensors)


def change(path: Path, rank: str = "mp_rank_00", **values: Any) -> None:
    """Entries of a rank's file; None: not there."""
    file = path / "iter_0000010" / rank / "model_optim_rng.pt"
    tree = {**theirs.read_file(file), **values}
    theirs.write_file({key: value for key, value in tree.items() if value is not None}, file)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tp ranks with the distributed optimizer, to be copied and damaged."""
    path = tmp_path_factory.mktemp("megatron") / "llama"
    save_with_optimizer(path, "llama", Kind("core", tp=2))
    return path


def copy_of(llama: Path, tmp_path: Path) -> Path:
    return shutil.copytree(llama, tmp_path / "theirs")


def arguments_of(llama: Path, **more: Any) -> Namespace:
    tree = theirs.read_file(llama / "iter_0000010" / "mp_rank_00" / "model_optim_rng.pt")
    return Namespace(**{**vars(tree["args"]), **more})


def refused(capsys: pytest.CaptureFixture[str], source: Path, code: int, *more: Any) -> str:
    """The message with which a conversion ends; nothing may be left."""
    target = source.parent / "refused"
    assert run("--input", source, "--to", "megatron_sp", "--output", target, *more) == code
    assert not target.exists() and not list(source.parent.glob(".refused*"))
    return " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("num_experts", 8, "num_experts is '8', and so the model is a mixture of experts"),
        ("multi_latent_attention", True, "has multi-latent attention"),
        ("attention_output_gate", True, "gates the output of attention"),
        ("position_embedding_type", "yarn", "position_embedding_type is 'yarn'"),
        ("num_layers", 5, "num_layers is 5, but 2 by the tensors that are there"),
        ("ffn_hidden_size", 23, "ffn_hidden_size is 23, but 24"), ("kv_channels", 7, "do not make up"),
        ("pipeline_model_parallel_size", 2, "2 x 1 ranks (tp x pp), and was written by 2 x 2"),
        ("num_attention_heads", "many", "num_attention_heads must be int"),
        ("num_query_groups", 4, "do not make up"), ("swiglu", False, "gated, and not by --swiglu"),
        ("untie_embeddings_and_output_weights", False, "output_layer.weight"),
    ],
)  # fmt: skip
def test_arguments_that_cannot_be_converted(
    tmp_path: Path, llama: Path, capsys: pytest.CaptureFixture[str], name: str, value: Any, message: str
) -> None:
    source = copy_of(llama, tmp_path)
    for rank in range(2):
        change(source, f"mp_rank_0{rank}", args=arguments_of(llama, **{name: value, "rank": rank}))
    assert message in refused(capsys, source, EXIT_CHECKPOINT, "--no-optimizer")


def test_what_files_do_not_say_is_asked_for(tmp_path: Path, llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = copy_of(llama, tmp_path)
    for rank in ("mp_rank_00", "mp_rank_01"):
        change(source, rank, args=None)
    said: list[Any] = ["--no-optimizer"]
    for needed, answer in (
        ("--vocab-size", ["--vocab-size", 37]), ("--set num-attention-heads=N", ["--set", "num-attention-heads=4"]),
        ("--set position-embedding-type=rope", ["--set", "position-embedding-type=rope"]),
        ("--set rotary-base=", ["--set", "rotary-base=5000", "--set", "norm-epsilon=1e-6"]),
    ):  # fmt: skip
        assert needed in refused(capsys, source, EXIT_CONFIG, *said)
        said += answer
    assert_equal(to_native(source, tmp_path / "ours", *said), random_tensors(config_of("llama"), torch.bfloat16))
    model = Native().read(tmp_path / "ours", Options()).config
    assert (model.num_attention_heads, model.num_groups, model.head_dim, model.rotary_base, model.norm_epsilon) == (4, 2, 6, 5000.0, 1e-6)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--vocab-size", 1000], "--vocab-size (1000) must be at most the 256 rows"),
        (["--set", "heads=4"], "--set heads=4: it must be NAME=VALUE"), (["--set", "num-layers=x"], "expected an integer, got 'x'"),
        (["--qkv-layout", "v0"], "knows no groups of heads"), (["--set", "num-attention-heads=0"], "must be at least 1"),
    ],
)  # fmt: skip
def test_flags_that_do_not_fit(tmp_path: Path, llama: Path, capsys: pytest.CaptureFixture[str], words: list[Any], message: str) -> None:
    source = copy_of(llama, tmp_path)
    change(source, args=Namespace())
    rest = ["--vocab-size", 37, "--set", "num-attention-heads=4", "--set", "position-embedding-type=rope", "--set", "rotary-base=5000"]
    assert message in refused(capsys, source, EXIT_CONFIG, *rest, *words)


def test_ranks_that_are_missing_or_differ(tmp_path: Path, llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = copy_of(llama, tmp_path)
    change(source, "mp_rank_01", iteration=20)
    assert "iteration is 20, and 10 in" in refused(capsys, source, EXIT_CHECKPOINT)
    args = theirs.read_file(llama / "iter_0000010" / "mp_rank_01" / "model_optim_rng.pt")["args"]
    change(source, "mp_rank_01", iteration=10, args=Namespace(**{**vars(args), "rotary_base": 7}))
    assert "rotary_base is 7, and 5000" in refused(capsys, source, EXIT_CHECKPOINT)
    change(source, "mp_rank_01", args=args, checkpoint_version=7.0)
    assert "checkpoint_version is 7.0, and 3.0" in refused(capsys, source, EXIT_CHECKPOINT)
    change(source, "mp_rank_00", checkpoint_version=7.0)
    assert "checkpoint_version is 7.0: only" in refused(capsys, source, EXIT_CHECKPOINT)
    for rank in ("mp_rank_00", "mp_rank_01"):
        change(source, rank, checkpoint_version=None)
    assert "give --qkv-layout interleaved" in refused(capsys, source, EXIT_CONFIG)
    tree = theirs.read_file(llama / "iter_0000010" / "mp_rank_01" / "model_optim_rng.pt")
    change(source, checkpoint_version=3.0)
    tree["model"]["decoder.final_layernorm.weight"][3] += 1
    change(source, "mp_rank_01", checkpoint_version=3.0, model=tree["model"])
    message = refused(capsys, source, EXIT_CHECKPOINT, "--no-optimizer")
    assert "final_layernorm.weight must be the same on every rank" in message
    change(source, "mp_rank_01", model={**tree["model"], "decoder.layers.0.adapter.weight": torch.ones(2)})
    assert "decoder.layers.0.adapter.weight has no place in this model" in refused(capsys, source, EXIT_CHECKPOINT, "--no-optimizer")
    shutil.rmtree(source / "iter_0000010" / "mp_rank_00")
    assert "mp_rank_00 missing" in refused(capsys, source, EXIT_CHECKPOINT, "--from", "megatron")


def test_exchanged_ranks(tmp_path: Path, llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = shutil.copytree(llama, tmp_path / "copy") / "iter_0000010"
    one, other = sorted(folder.iterdir())[:2]
    one.rename(folder / "aside")
    other.rename(one)
    (folder / "aside").rename(other)
    assert run("--input", tmp_path / "copy", "--to", "megatron_sp", "--output", tmp_path / "x") == EXIT_CHECKPOINT
    assert "mp_rank_00/model_optim_rng.pt was written by the global rank 1, and" in capsys.readouterr().err


def test_an_optimizer_in_another_order_is_not_guessed(tmp_path: Path, llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = copy_of(llama, tmp_path)
    file = source / "iter_0000010" / "mp_rank_01" / "distrib_optim.pt"
    tree = theirs.read_file(file)
    (rows,) = tree[0].values()
    whole = dict(rows)
    rows |= {kind: rows[kind].flip(0).clone() for kind in ("param", "exp_avg", "exp_avg_sq")}
    theirs.write_file(tree, file)
    assert "is not that weight: it is in an order" in refused(capsys, source, EXIT_CHECKPOINT)
    rows |= {kind: torch.cat([whole[kind], torch.zeros(5)]) for kind in ("param", "exp_avg", "exp_avg_sq")}
    theirs.write_file(tree, file)
    assert "no known way of laying them out" in refused(capsys, source, EXIT_CHECKPOINT)
    file.unlink()
    assert "has no state of the optimizer, and other ranks have" in refused(capsys, source, EXIT_CHECKPOINT)
    assert_equal(to_native(source, tmp_path / "ours", "--no-optimizer"), random_tensors(config_of("llama"), torch.bfloat16))


def test_any_folder_of_a_checkpoint_may_be_given(tmp_path: Path, llama: Path) -> None:
    for number, folder in enumerate((llama, llama / "iter_0000010", llama / "iter_0000010" / "mp_rank_01")):
        model = FORMATS["megatron"].read(folder, Options(optimizer=False))
        assert (model.step, model.consumed_samples, len(model.weights())) == (10, 640, 15), number


def test_a_release_and_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_of("gpt")
    tensors = random_tensors(config)
    trees = theirs.rank_trees(config, tensors, Kind("core"))
    theirs.save(tmp_path / "theirs", trees)
    theirs.save(tmp_path / "theirs", {"mp_rank_00": {**trees["mp_rank_00"], "iteration": 0}}, "release")
    assert detect(tmp_path / "theirs").read(tmp_path / "theirs", Options()).step == 0
    assert detect(tmp_path / "theirs").read(tmp_path / "theirs", Options(step=10)).step == 10
    assert "has no iteration 11: it has release, iter_0000010" in refused(capsys, tmp_path / "theirs", EXIT_CHECKPOINT, "--step", 11)
    (tmp_path / "theirs" / "latest_checkpointed_iteration.txt").write_text("ten")
    assert "must hold the number of an iteration" in refused(capsys, tmp_path / "theirs", EXIT_CHECKPOINT)


@pytest.mark.parametrize(
    ("shape", "more", "words", "message"),
    [
        ("bert", {"norm_placement": "post"}, [], "norms after attention and MLP"),
        (
            "bert", {"bert_head_activation": "gelu_tanh"}, [],
            "has not: versions before 2024 have it, as --openai-gelu; add --megatron-names legacy",
        ),
        (
            "bert",
            {"gelu_approximate": "none", "bert_head_activation": "gelu_tanh"},
            [], "than exact GELU, which Megatron has not: it cannot",
        ),
        ("gpt", {"disable_bias_linear": True, "gelu_approximate": "tanh"}, [], "the tanh approximation of GELU without biases"),
        ("gpt", {"num_layers": 3}, ["--target-pipeline-parallel-size", 2], "num_layers (3) must be a multiple of"),
        ("llama", {}, ["--target-tensor-parallel-size", 4], "num_query_groups (2) must be a multiple of"),
    ],
)  # fmt: skip
def test_models_that_megatron_does_not_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], shape: str, more: dict[str, Any], words: list[Any], message: str
) -> None:
    config = config_of(shape, **more)
    write_run(Model(config, Tensors(random_tensors(config))), tmp_path / "run")
    code = EXIT_CONFIG if words else EXIT_CHECKPOINT
    assert run("--input", tmp_path / "run", "--to", "megatron", "--output", tmp_path / "theirs", *words) == code
    assert message in " ".join(capsys.readouterr().err.split()) and not (tmp_path / "theirs").exists()


@pytest.mark.parametrize(("target", "more"), [("megatron", ("--megatron-names", "legacy")), ("megatron-deepspeed", ())])
def test_a_bert_with_one_gelu_is_one_of_the_older_versions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], target: str, more: tuple[str, ...]
) -> None:
    """The tanh approximation in the head as in the MLP is --openai-gelu."""
    config = config_of("bert", bert_head_activation="gelu_tanh")
    tensors = random_tensors(config)
    write_run(Model(config, Tensors(tensors)), tmp_path / "run")
    words = ("--to", target, "--output", tmp_path / "theirs", "--target-tensor-parallel-size", 2, "--verify", *more)
    assert run("--input", tmp_path / "run", *words) == 0
    told = capsys.readouterr().err
    assert "note: give Megatron --openai-gelu" in told and "verify: the same" in told
    order = ("--qkv-layout", "flat") if target == "megatron-deepspeed" else ()
    assert run("--input", tmp_path / "theirs", "--to", "megatron_sp", "--output", tmp_path / "ours", "--vocab-size", 131, *order) == 0
    assert_equal(stored(tmp_path / "ours"), tensors)
    assert Native().read(tmp_path / "ours", Options()).config.head_activation == "gelu_tanh"


@pytest.mark.parametrize(("more", "is_told"), [
    ({"gelu_approximate": "none"}, True), ({"gelu_approximate": "none", "disable_bias_linear": True}, False), ({}, False),
])  # fmt: skip
def test_the_exact_gelu_with_biases_needs_a_flag_of_megatron(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: dict[str, Any], is_told: bool
) -> None:
    config = config_of("gpt", **more)
    write_run(Model(config, Tensors(random_tensors(config))), tmp_path / "run")
    assert run("--input", tmp_path / "run", "--to", "megatron", "--output", tmp_path / "theirs") == 0
    assert ("note: give Megatron --no-bias-gelu-fusion" in capsys.readouterr().err) is is_told


def test_a_vocabulary_counted_by_its_tokenizer(tmp_path: Path, llama: Path) -> None:
    source = copy_of(llama, tmp_path)
    change(source, args=arguments_of(llama, vocab_size=None))
    (tmp_path / "vocab.txt").write_text("".join(f"w{i}\n" for i in range(37)))
    model = FORMATS["megatron"].read(source, Options(optimizer=False, tokenizer=tmp_path / "vocab.txt"))
    assert model.config.vocab_size == 37
    change(source, args=arguments_of(llama, vocab_size=36, tokenizer_type="NullTokenizer"))  # counts its end of text on top
    assert FORMATS["megatron"].read(source, Options(optimizer=False)).config.vocab_size == 37
