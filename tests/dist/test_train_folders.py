"""``megatron-sp schedule train --model FOLDER`` against transformers' own model of that folder: nothing of it is rounded or dropped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.training import NO_DROPOUT, Outcome, assert_same_run, records, state, tensors, train
from torch import nn

transformers = pytest.importorskip("transformers", reason="transformers (Python >= 3.11) is not installed")

from megatron_sp.commands import cli  # noqa: E402
from megatron_sp.commands.schedule.train import parse_external  # noqa: E402
from megatron_sp.convert.formats.native import without_code  # noqa: E402
from megatron_sp.parallel.parallel_context import ParallelContext  # noqa: E402
from megatron_sp.schedule.verify.copies import drops  # noqa: E402
from megatron_sp.tasks.external_task import ExternalModel, count_products, external_task  # noqa: E402
from megatron_sp.tasks.external_weights import ModelFolder, whole_shape_of  # noqa: E402
from megatron_sp.utils.errors import ConfigError  # noqa: E402

SHAPE = {
    "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 24, "max_position_embeddings": 64,
    "vocab_size": 60, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "head_dim": 8,
}  # fmt: skip
MIXTURE = SHAPE | {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "tie_word_embeddings": False}
LIKE_LLAMA: dict[str, dict[str, Any]] = {
    "Llama": SHAPE, "Gemma2": SHAPE | {"sliding_window": 8, "query_pre_attn_scalar": 8}, "Afmoe": MIXTURE | {
        "num_experts": 4, "num_dense_layers": 1, "sliding_window": 8, "num_shared_experts": 1, "global_attn_every_n_layers": 2,
    },
    "Dots1": MIXTURE | {
        "n_routed_experts": 4, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "num_key_value_heads": 4,
    },
    "Glm4Moe": MIXTURE | {"n_routed_experts": 4, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "n_shared_experts": 1},
    "Mixtral": SHAPE | {"num_local_experts": 4, "num_experts_per_tok": 2}, "Qwen3": SHAPE,
    "Starcoder2": SHAPE,
    "SeedOss": SHAPE | {"attention_dropout": 0.0, "residual_dropout": 0.0}, "Olmo2": SHAPE,
    "Phi3": SHAPE | {"pad_token_id": 0}, "Cohere2": SHAPE | {"sliding_window": 8},
    "Ernie4_5_Moe": MIXTURE | {"moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 0, "moe_num_shared_experts": 1},
}  # fmt: skip

TOKENS = {"vocab_size": 60, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
OLD = TOKENS | {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 64}
NEW = TOKENS | {
    "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24,
    "max_position_embeddings": 64,
}  # fmt: skip
NO_HEADS = TOKENS | {"num_hidden_layers": 2, "hidden_size": 32, "state_size": 8}
STATE_SPACES = {"mamba_d_state": 8, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}
UNLIKE_LLAMA: dict[str, dict[str, Any]] = {
    "GPT2": OLD, "GPTJ": OLD | {"rotary_dim": 4}, "CTRL": OLD | {"dff": 24, "n_ctx": 64},
    "GPTNeo": TOKENS | {
        "num_layers": 2, "hidden_size": 32, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 8,
        "max_position_embeddings": 64,
    },
    "Mpt": TOKENS | {"n_layers": 2, "d_model": 32, "n_heads": 4, "max_seq_len": 64}, "Mamba": NO_HEADS,
    "XLM": {
        "vocab_size": 60, "emb_dim": 32, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 64, "bos_index": 1, "eos_index": 2,
        "pad_index": 0, "pad_token_id": 0, "mask_token_id": 3, "bos_token_id": 1, "causal": True,
    },
    "Jamba": NEW | {
        "num_hidden_layers": 4, "num_experts": 4, "attn_layer_offset": 1, "attn_layer_period": 2, "mamba_d_state": 8, "mamba_dt_rank": 2,
        "use_mamba_kernels": False,
    },
    "Bamba": NEW | STATE_SPACES | {"attn_layer_indices": [1]}, "Doge": NEW,
    "Dory": NEW | {"head_dim": 8, "sliding_window": 8, "n_input_layers": 1, "n_output_layers": 1},
    "JetMoe": NEW | {"kv_channels": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Dbrx": TOKENS | {
        "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64, "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2, "moe_loss_weight": 0.05},
    },
}  # fmt: skip
HEADS = {"GPT2": "GPT2LMHeadModel", "CTRL": "CTRLLMHeadModel", "XLM": "XLMWithLMHeadModel"}


OFTEN = ("Llama", "Gemma2", "Afmoe", "Dots1")  # dense, casts to fp32, mask by name, router in fp32


def make(folder: Path, family: str, **more: Any) -> Any:
    """A folder of a small model; every number of its state says something."""
    torch.manual_seed(3)
    config = getattr(transformers, f"{family}Config")(**((LIKE_LLAMA | UNLIKE_LLAMA)[family] | more))
    model: Any = getattr(transformers, HEADS.get(family, f"{family}ForCausalLM"))(config)
    for name, buffer in model.named_buffers():
        if family in LIKE_LLAMA and name in model.state_dict() and buffer.is_floating_point():
            buffer.copy_(0.5 + torch.rand_like(buffer))
    model.save_pretrained(folder)
    return model


def of_transformers(folder: Path, dtype: torch.dtype, **more: Any) -> nn.Module:
    model: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **more)
    return model.train()


def by_command(words: list[str]) -> None:
    raise SystemExit(cli.main(["schedule", "train", "auto", *words]))


FLAGS = "--lr 1e-2 --train-iters 2 --seq-length 16 --mock-data --micro-batch-size 2 --global-batch-size 4 --device cpu"


def run(tmp_path: Path, *flags: object, model: object = "model", ranks: int = 1) -> Outcome:
    """Train the model of a folder by the command."""
    words = ("--model", tmp_path / str(model), *flags)
    return train(tmp_path, *words, ranks=ranks, data=("--mock-data",), program=by_command)


def built(folder: Path, more: str = "") -> ExternalModel:
    """The model as the training loop gets it."""
    config, _ = parse_external(f"--model {folder} {FLAGS} {more}".split(), description="", family="gpt")
    build = ModelFolder(str(folder), "AutoModelForCausalLM")
    task = external_task("test", build, lambda s, seq: None)
    build.prepare(config)
    model = task.build_model(config, ParallelContext())
    assert isinstance(model, ExternalModel)
    return model


@pytest.mark.parametrize(
    ("family", "precision"),
    [
        pytest.param(family, precision, marks=() if precision != "fp64" and family in OFTEN else pytest.mark.long)
        for family in LIKE_LLAMA for precision in ("bf16", "fp16", "fp64")
    ],
)  # fmt: skip
def test_parameters_and_buffers_are_those_of_transformers(family: str, precision: str, tmp_path: Path) -> None:
    make(tmp_path, family)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}[precision]
    mine, theirs = built(tmp_path, f"--{precision}").model, of_transformers(tmp_path, dtype)
    for kind in ("named_parameters", "named_buffers"):
        got, want = dict(getattr(mine, kind)()), dict(getattr(theirs, kind)())
        assert {n: t.dtype for n, t in got.items()} == {n: t.dtype for n, t in want.items()}
        assert all(torch.equal(got[name], want[name]) for name in want)


def test_frequencies_are_not_rounded_where_a_model_begins_with_random_weights(tmp_path: Path) -> None:
    """It is built in fp32: 16 bits of a frequency are wrong by several turns after some thousand tokens."""
    make(tmp_path, "Llama")
    for weights in tmp_path.glob("*.safetensors"):
        weights.unlink()
    model: Any = built(tmp_path, "--bf16").model
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32 and model.lm_head.weight.dtype == torch.bfloat16


LAYOUTS: dict[str, tuple[int, tuple[object, ...]]] = {
    "alone": (1, ()), "sp": (2, ("--sp-size", 2)), "cp": (2, ("--cp-size", 2)), "tp": (2, ("--tp-size", 2)),
    "zero 3": (2, ("--zero-stage", 3)), "zero 1": (2, ("--zero-stage", 1)),
}  # fmt: skip
CASES = [  # family, layouts, why it is one of them
    ("Llama", ("sp", "cp", "tp", "zero 3"), "dense"), ("Mixtral", ("sp", "zero 3"), "experts"), ("Gemma2", ("sp", "zero 3"), "casts"),
    ("GPTJ", ("sp", "cp"), "a table of angles by position"), ("Jamba", ("zero 3",), "layers of several classes"),
    ("Afmoe", ("sp", "zero 3"), ""), ("Dots1", ("zero 1", "zero 3"), ""), ("Qwen3", ("cp", "tp"), ""),
    ("Starcoder2", ("sp", "cp", "zero 3"), ""), ("SeedOss", ("sp", "cp", "zero 3"), ""), ("Olmo2", ("sp", "cp", "zero 3"), ""),
    ("Phi3", ("sp", "zero 3"), ""), ("Cohere2", ("sp", "cp", "zero 3"), ""), ("Glm4Moe", ("sp", "zero 3"), ""),
    ("Ernie4_5_Moe", ("sp", "zero 3"), ""), ("GPT2", ("sp", "cp"), "a padding token, and no mask"),
    ("XLM", ("zero 3",), "results of blocks that are written into"), ("CTRL", ("sp", "cp"), "a buffer that forward replaces"),
    ("Dory", ("sp", "zero 3"), "layers that run twice"), ("Mpt", ("zero 3",), "alibi"), ("Mamba", ("zero 3",), "no attention"),
]  # fmt: skip


@pytest.mark.often("Llama", "Mixtral", "Gemma2", "GPTJ", "Jamba")
@pytest.mark.parametrize(("family", "layouts"), [pytest.param(*case[:2], id=case[0]) for case in CASES])
def test_losses_are_those_of_transformers_in_every_layout(family: str, layouts: tuple[str, ...], tmp_path: Path) -> None:
    """fp64: the mean loss of the first batch, and that of the second after an update."""
    make(tmp_path / "model", family)
    own: tuple[object, ...] = ()
    if family in UNLIKE_LLAMA:  # in place of what the tests' runs have elsewhere
        shape = whole_shape_of(str(tmp_path / "model"))
        own = ("--num-layers", shape["num_layers"], "--num-attention-heads", shape["num_attention_heads"], *NO_DROPOUT)
    found = {}
    for name in ("alone", *layouts):
        ranks, more = LAYOUTS[name]
        micro = ("--micro-batch-size", 2 if name.startswith("zero") else 4)
        flags = ("--fp64", "--train-iters", 2, "--seq-length", 32, "--save", tmp_path / name, *own, *micro, *more)
        run(tmp_path, *flags, ranks=ranks).expect(0)
        found[name] = [(r["loss"], r["grad_norm"]) for r in records(tmp_path / name)]
    if family in LIKE_LLAMA:
        exact = of_transformers(tmp_path / "model", torch.float64, attn_implementation="eager", experts_implementation="eager")
        batch = first_batch(tmp_path / "model")
        loss = exact(input_ids=batch["tokens"], labels=None)["logits"]
        mean = nn.functional.cross_entropy(loss.double().flatten(0, 1), batch["labels"].flatten())
        assert found["alone"][0][0] == pytest.approx(float(mean), rel=1e-6)  # transformers' model casts to fp32 inside
    for name in layouts:
        for got, want in zip(found[name], found["alone"], strict=True):
            assert got == pytest.approx(want, rel=1e-5), name


def first_batch(folder: Path) -> dict[str, torch.Tensor]:
    """The samples of the first step."""
    from megatron_sp.data.loader import BatchLoader
    from megatron_sp.tasks import gpt

    words = f"--model {folder} --lr 1e-2 --train-iters 2 --seq-length 32 --mock-data --micro-batch-size 4 --global-batch-size 4"
    config, _ = parse_external([*words.split(), "--device", "cpu"], description="", family="gpt")
    data = gpt.dataset_provider(config, gpt.tokenizer_provider(config), (8, 0, 0)).train
    assert data is not None
    with BatchLoader(
        data, micro_batch_size=4, dp_rank=0, dp_size=1, order=config.data.dataloader_type, seed=config.batch.seed, deal_rows=None
    ) as loader:
        (batch,) = loader.step(0, 1)
    return dict(batch)


@pytest.mark.parametrize("family", [pytest.param(f, marks=() if f in OFTEN else pytest.mark.long) for f in LIKE_LLAMA])
def test_every_gradient_is_that_of_transformers(family: str, tmp_path: Path) -> None:
    make(tmp_path, family)
    mine = built(tmp_path, "--fp64 --attention-backend unfused")
    theirs = of_transformers(tmp_path, torch.float64, attn_implementation="eager", experts_implementation="eager")
    tokens = torch.randint(3, 60, (2, 17), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(2, 16, dtype=torch.float64)
    loss, _ = mine({"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "loss_mask": mask}, None)
    loss.backward()  # type: ignore[no-untyped-call]
    logits = theirs(input_ids=tokens[:, :-1])["logits"]  # its own loss is computed in fp32
    nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum").backward()
    wanted = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    assert len(wanted) > 10
    for name, parameter in mine.model.named_parameters():
        if name in wanted:
            torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-9, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}")
    assert float(loss.detach()) > 0


@pytest.mark.often("Gemma2", "Dots1")
@pytest.mark.parametrize("family", ["Gemma2", "Mixtral", "Dots1", "Afmoe"])
def test_verify_parallelism_knows_what_they_cast(family: str, tmp_path: Path) -> None:
    """Norms of Gemma compute in fp32 whatever the model is in, and the grouped product of experts does not exist in fp64."""
    make(tmp_path / "model", family)
    layout = ("--zero-stage", 1) if family == "Dots1" else ("--sp-size", 2)
    run(tmp_path, "--verify-parallelism", "--seq-length", 32, *layout, ranks=2).expect(0, "the layout equals one process")


@pytest.mark.long
def test_16_bit_mixtures_with_fp32_routers_go_on_with_the_same_bits(tmp_path: Path) -> None:
    make(tmp_path / "model", "Dots1")
    flags = ("--bf16", "--zero-stage", 3, "--train-iters", 4, "--seq-length", 32)
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    run(tmp_path, *flags, "--save", whole, ranks=2).expect(0)
    for more in (("--exit-interval", 2), ("--auto-resume",)):
        run(tmp_path, *flags, "--save", halves, *more, ranks=2).expect(0)
    assert_same_run(halves, whole)
    kept = tensors(whole)
    gate, bias = "model.layers.1.mlp.gate.weight", "model.layers.1.mlp.gate.e_score_correction_bias"
    assert kept[gate].dtype == torch.float32 and kept[bias].dtype == torch.float32 and kept["lm_head.weight"].dtype == torch.bfloat16
    assert len(kept[bias].unique()) == 4, "a bias was rounded"
    # the same steps without ZeRO
    run(tmp_path, *flags, "--zero-stage", 0, "--save", tmp_path / "plain", ranks=2).expect(0)
    assert [r["loss"] for r in records(tmp_path / "plain")] == [r["loss"] for r in records(whole)]


CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}}, "rope_parameters.rope_theta: 10000.0 in the checkpoint, 77.0 here"),
    ({"rms_norm_eps": 1e-3}, "rms_norm_eps: 1e-06 in the checkpoint, 0.001 here"), ({"hidden_act": "gelu"}, "hidden_act: silu in the ch"),
]  # fmt: skip


def test_another_model_of_the_same_shapes_is_refused(tmp_path: Path) -> None:
    make(tmp_path / "model", "Llama")
    flags = ("--save", tmp_path / "run", "--seq-length", 16)
    on = (*flags, "--auto-resume", "--train-iters", 3, "--override-opt-param-scheduler")
    run(tmp_path, *flags, "--train-iters", 2).expect(0)
    for number, (change, said) in enumerate(CHANGES):
        make(tmp_path / f"other{number}", "Llama", **change)
        run(tmp_path, *on, model=f"other{number}").expect(3, "the checkpoint is of another model", said)
    config = json.loads((tmp_path / "model/config.json").read_text())
    (tmp_path / "mistral").mkdir()
    (tmp_path / "mistral/config.json").write_text(json.dumps(config | {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}))
    run(tmp_path, *on, model="mistral").expect(3, "class: LlamaForCausalLM in the checkpoint, Mistral")
    # a new run may see further; the same folder goes on
    finetuned = ("--load", tmp_path / "run", "--finetune", "--save", tmp_path / "tuned", "--train-iters", 1, "--seq-length", 16)
    run(tmp_path, *finetuned, model="other0").expect(0, "finetuning from")
    run(tmp_path, *on).expect(0, "step 3/3")


def test_flags_of_a_shape_beside_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path / "model", "Llama")
    for flags, said in (
        ("--num-layers 7", "--num-layers (7): "), ("--rotary-base 50", "--rotary-base is for megatron_sp's own models"),
        ("--window-size 4", "--window-size is for"), ("--num-experts 4", "--num-experts is for"), ("--swiglu", "--swiglu is for"),
        ("--preset llama-1b", "--preset llama-1b: the model is that of --model"),
    ):  # fmt: skip
        with pytest.raises(SystemExit, match="2"):
            parse_external(f"--model {tmp_path / 'model'} {FLAGS} {flags}".split(), description="", family="gpt")
        assert said in capsys.readouterr().err
    run(tmp_path, "--hidden-dropout", 0.1, "--seq-length", 16, "--train-iters", 1).expect(2, "--hidden-dropout (0.1): LlamaConfig")


def test_dropout_is_the_models_own_unless_a_flag_says_otherwise(tmp_path: Path) -> None:
    rates = {"attention_dropout": 0.2, "resid_pdrop": 0.1, "embd_pdrop": 0.3, "n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 64}
    transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**{k.replace("attention_dropout", "attn_pdrop"): v for k, v in rates.items()}, vocab_size=60)
    ).save_pretrained(tmp_path / "gpt2")
    own, off = built(tmp_path / "gpt2").model.config, built(tmp_path / "gpt2", "--hidden-dropout 0 --attention-dropout 0").model.config
    assert (own.attn_pdrop, own.resid_pdrop, own.embd_pdrop) == (0.2, 0.1, 0.3)  # type: ignore[union-attr]
    assert (off.attn_pdrop, off.resid_pdrop, off.embd_pdrop) == (0, 0, 0)  # type: ignore[union-attr]
    make(tmp_path / "llama", "Llama")
    assert built(tmp_path / "llama").model.config.attention_dropout == 0.0  # type: ignore[union-attr]
    config = json.loads((tmp_path / "llama/config.json").read_text())
    (tmp_path / "llama/config.json").write_text(json.dumps(config | {"layerdrop": 0.1}))
    with pytest.raises(ValueError, match=r"layerdrop \(0.1\) is a dropout that no flag here means"):
        built(tmp_path / "llama")


RATES: dict[str, tuple[str, str, dict[str, Any], dict[str, float]]] = {
    "OPT": ("OPT", "CausalLM", {"ffn_dim": 24, "word_embed_proj_dim": 32}, {"dropout": 0.1, "attention_dropout": 0.2}),
    "StarCoder 2": (
        "Starcoder2", "CausalLM", SHAPE, {"residual_dropout": 0.1, "embedding_dropout": 0.2, "attention_dropout": 0.3},
    ),
    "Seed-OSS": ("SeedOss", "CausalLM", SHAPE, {"residual_dropout": 0.1, "attention_dropout": 0.3}),
    "ModernBERT": (
        "ModernBert", "MaskedLM", {"local_attention": 8}, {"attention_dropout": 0.1, "embedding_dropout": 0.2, "mlp_dropout": 0.3},
    ),
}  # fmt: skip


@pytest.mark.often("OPT", "ModernBERT")
@pytest.mark.parametrize("name", RATES)
def test_all_dropout_is_off_with_rates_of_0(name: str, tmp_path: Path) -> None:
    family, task, shape, rates = RATES[name]
    small = {k: SHAPE[k] for k in ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size", "max_position_embeddings")}
    small |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = getattr(transformers, f"{family}Config")(**(small | shape | rates))
    getattr(transformers, f"{family}For{task}")(config).save_pretrained(tmp_path)
    for more, is_on in (("", True), ("--hidden-dropout 0 --attention-dropout 0", False)):
        words = f"--model {tmp_path} {FLAGS} {more}".split()
        masked = task == "MaskedLM"
        settings, _ = parse_external(
            [*words, *(["--bert-no-binary-head"] if masked else [])], description="", family="bert" if masked else "gpt"
        )
        build = ModelFolder(str(tmp_path), f"AutoModelFor{task}")
        build.prepare(settings)
        model = build(settings).train()
        assert drops(model) == is_on
        assert is_on == all(getattr(model.config, key) == rate for key, rate in rates.items())  # type: ignore[union-attr]


def test_parameters_of_another_dtype_are_waited_for_before_a_pass(tmp_path: Path) -> None:
    """They are gathered while the update goes on, and nothing else would wait for them."""
    make(tmp_path, "Dots1")
    model, seen = built(tmp_path, "--bf16"), list[int]()

    class Events:
        def before_use(self, unit: int) -> None:
            seen.append(unit)

        def backward_done(self, unit: int) -> None: ...

    tokens = torch.ones(1, 8, dtype=torch.int64)
    model({"tokens": tokens, "labels": tokens, "loss_mask": torch.ones(1, 8)}, Events())
    last = model.units()[-1]
    assert last.name == "other dtype" and {p.dtype for p in last.module.parameters()} == {torch.float32}
    assert seen[:2] == [0, len(model.units()) - 1]


def test_dropout_of_a_class_that_declares_whole_numbers(tmp_path: Path) -> None:
    make(tmp_path, "Mpt", resid_pdrop=0.1, emb_pdrop=0.2)
    off: Any = built(tmp_path, "--hidden-dropout 0 --attention-dropout 0").model
    assert (off.config.resid_pdrop, off.config.emb_pdrop, off.config.attn_config.attn_pdrop) == (0, 0, 0)
    with pytest.raises(ConfigError, match=r"--attention-dropout \(0.1\): MptAttentionConfig rejects it: .*attn_pdrop"):
        built(tmp_path, "--attention-dropout 0.1")


LOSSES: dict[str, tuple[dict[str, Any], str]] = {
    "Mixtral": (
        {"output_router_logits": True, "router_aux_loss_coef": 0.5},
        "output_router_logits, router_aux_loss_coef 0.5.*set output_router_logits to false",
    ),
    "JetMoe": ({"output_router_logits": True, "aux_loss_coef": 0.25}, r"output_router_logits, aux_loss_coef 0.25"),
    "Dbrx": ({"output_router_logits": True}, r"output_router_logits, moe_loss_weight 0.05"),
    "Bamba": ({"z_loss_coefficient": 0.1}, r"z_loss_coefficient 0.1.*set z_loss_coefficient to 0"),
}


@pytest.mark.parametrize("family", LOSSES)
def test_what_a_class_adds_to_the_loss_is_refused(family: str, tmp_path: Path) -> None:
    entries, said = LOSSES[family]
    make(tmp_path, family, **entries)
    with pytest.raises(ConfigError, match=said):
        built(tmp_path)


PLANS = {
    "of another model": ("model_type: gpt2", "{on: transformer.h.*, do: checkpoint}", 2, "gpt2"),
    "of a module that does not exist": ("model_type: llama", "{on: model.layers.*.nowhere, do: checkpoint}", 2, "nowhere"),
    "right": ("model_type: llama", "{on: model.layers.*, do: checkpoint}", 0, "step 1/1"),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_is_read_on_every_layout(name: str, tmp_path: Path) -> None:
    make(tmp_path / "model", "Llama")
    kind, line, code, said = PLANS[name]
    plan = tmp_path / "plan.yaml"
    plan.write_text(f"schema: 1\n{kind}\nseq_dim: 1\nlines:\n  - {line}\n")

    def with_plan(words: list[str]) -> None:
        raise SystemExit(cli.main(["schedule", "train", str(plan), *words]))

    for layout in ("alone", "sp", "zero 1", "cp") if code == 0 else ("alone", "sp"):
        ranks, more = LAYOUTS[layout]
        flags = ("--model", tmp_path / "model", "--seq-length", 16, "--train-iters", 1, *more)
        train(tmp_path, *flags, ranks=ranks, data=("--mock-data",), program=with_plan).expect(code, said)


def test_figures_are_of_the_folders_model(tmp_path: Path) -> None:
    model = make(tmp_path / "model", "Mixtral", tie_word_embeddings=False)
    mine = built(tmp_path / "model")
    experts = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
    others = sum(p.numel() for n, p in model.named_parameters() if p.ndim > 1 and ".experts." not in n and "embed_tokens" not in n)
    assert count_products(model) == others + experts / 2
    ernie = make(tmp_path / "ernie", "Ernie4_5_Moe", num_experts_per_tok=1)  # another name for its moe_k
    of_experts = sum(p.numel() for n, p in ernie.named_parameters() if ".experts." in n)
    all_of = sum(p.numel() for n, p in ernie.named_parameters() if p.ndim > 1 and "embed_tokens" not in n)
    assert count_products(ernie) == all_of - of_experts * 3 / 4
    config, _ = parse_external(f"--model {tmp_path / 'model'} {FLAGS}".split(), description="", family="gpt")
    scores = 4 * 2 * 16 * 32
    assert mine.flops_per_token(config.model) == (3 * (2 * (others + experts / 2) + scores / 2), 3 * (2 * (others + experts / 2) + scores))
    run(tmp_path, "--save", tmp_path / "run", "--seq-length", 16, "--train-iters", 1).expect(0)
    (start,) = records(tmp_path / "run", "start")
    assert start["num_params"] == sum(p.numel() for p in model.parameters())


def test_what_was_trained_is_exported_and_is_the_same_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for family in ("Llama", "Dots1"):
        folder, kept_in, out = (tmp_path / f"{family}-{what}" for what in ("model", "run", "out"))
        make(folder, family)
        run(tmp_path, "--save", kept_in, "--seq-length", 16, "--train-iters", 2, "--bf16", model=folder).expect(0)
        assert cli.main(["convert", "--input", str(kept_in), "--to", "hf", "--output", str(out)]) == 0
        exported, kept = of_transformers(out, torch.bfloat16), tensors(kept_in)
        assert type(exported).__name__ == f"{family}ForCausalLM" and state(kept_in)["foreign_model"]["class"] == f"{family}ForCausalLM"
        held = exported.state_dict()
        for name, value in kept.items():
            if not name.startswith("optimizer."):
                assert torch.equal(held[name], value), name
        assert cli.main(["convert", "--input", str(kept_in), "--to", "megatron", "--output", str(tmp_path / "x")]) == 3
        assert "write it with --to hf" in capsys.readouterr().err
        assert cli.main(["evaluate", "--load", str(kept_in), "--text", str(folder / "config.json")]) == 3
        assert "of transformers" in capsys.readouterr().err


def test_nothing_in_a_stored_configuration_fetches_or_runs_code() -> None:
    inner = {"hidden_size": 8, "_attn_implementation": "kernels-community/x", "auto_map": {"AutoModel": "x.Y"}}
    config = {**inner, "text_config": inner, "quantization_config": {"quant_method": "x"}, "_experts_implementation": "x/y"}
    assert without_code(config) == {"hidden_size": 8, "text_config": {"hidden_size": 8}}


def test_what_a_class_lacks_has_our_message(tmp_path: Path) -> None:
    """A kernel; attention, and not a number of heads that it does not have; a mask that context parallelism does not make."""
    flags = ("--seq-length", 16, "--train-iters", 1)
    for family in ("Gemma2", "Mamba", "Doge"):
        make(tmp_path / family, family)
    run(tmp_path, *flags, model="Gemma2").expect(0)
    run(tmp_path, *flags, "--attention-backend", "fused", model="Gemma2").expect(2, "has no such attention")
    for axis in ("sp", "cp"):
        said = ("MambaForCausalLM does not look its attention up", f"give the ranks of {axis} to tp or dp")
        run(tmp_path, "--num-attention-heads", 32, "--train-iters", 1, f"--{axis}-size", 2, model="Mamba", ranks=2).expect(2, *said)
    outcome = run(tmp_path, *flags, "--cp-size", 2, model="Doge", ranks=2)
    assert "Traceback" not in outcome.expect(2, "a mask of the model is looked into by the model itself", "give these ranks to sp").text


@pytest.mark.parametrize("family", ["GPTNeo", "Mpt", "Mamba", "Dory"])
def test_a_shape_is_found_whatever_its_entries_are_called(family: str, tmp_path: Path) -> None:
    """Dory's file has four, attention and MLP of each layer."""
    model = make(tmp_path, family)
    mine = built(tmp_path)
    assert len(mine.blocks) == 2 and mine.model.config.hidden_size == 32  # type: ignore[union-attr]
    words = f"--model {tmp_path} --lr 1 --train-iters 1 --seq-length 16 --mock-data --device cpu".split()
    config, _ = parse_external(words, description="", family="gpt")
    ModelFolder(str(tmp_path), "AutoModelForCausalLM").prepare(config)
    assert (config.model.num_layers, config.model.hidden_size) == (2, 32)
    causal, full = mine.flops_per_token(config.model)
    attention = 3 * 4 * 2 * 16 * 32 if hasattr(model.config, "num_attention_heads") else 0
    assert full - causal == pytest.approx(attention / 2)
    with pytest.raises(SystemExit, match="2"):
        parse_external([*words, "--num-layers", "7"], description="", family="gpt")


def test_weights_that_are_not_safetensors_are_not_passed_over(tmp_path: Path) -> None:
    """Such a folder was trained from random weights, without a word."""
    make(tmp_path, "GPT2")
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"its weights \(pytorch_model.bin\) are not safetensors.*save_pretrained"):
        built(tmp_path)
    (tmp_path / "pytorch_model.bin").unlink()
    assert built(tmp_path).blocks, "random weights, for there are none"


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a word for a number": ({"rms_norm_eps": "small"}, "rms_norm_eps"),
    "layers that nobody knows": ({"layer_types": ["a", "b"]}, "layer_types"),
    "angles that nobody knows": ({"rope_parameters": {"rope_type": "yarnn", "rope_theta": 1e4}}, "yarnn"),
    "an activation that nobody knows": ({"hidden_act": "gelo"}, "gelo"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_transformers_rejects_is_told_in_a_line(name: str, tmp_path: Path) -> None:
    entries, said = WRONG[name]
    transformers.LlamaConfig(**NEW).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | entries))
    with pytest.raises(ConfigError, match=said) as caught:
        built(tmp_path)
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)
