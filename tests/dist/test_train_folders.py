"""``megatron-sp schedule train --model FOLDER`` against transformers' own model of that folder: nothing of it is rounded or dropped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.training import assert_same_run, records, state, tensors, train
from torch import nn

transformers = pytest.importorskip("transformers", reason="transformers (Python >= 3.11) is not installed")

from megatron_sp.commands import cli  # noqa: E402
from megatron_sp.commands.schedule.train import parse_external  # noqa: E402
from megatron_sp.convert.formats.native import without_code  # noqa: E402
from megatron_sp.parallel.parallel_context import ParallelContext  # noqa: E402
from megatron_sp.schedule.verify.copies import drops  # noqa: E402
from megatron_sp.tasks.external_task import ExternalModel, count_products, external_task  # noqa: E402
from megatron_sp.tasks.external_weights import ModelFolder  # noqa: E402
from megatron_sp.utils.errors import ConfigError  # noqa: E402

SHAPE = {
    "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 24, "max_position_embeddings": 64,
    "vocab_size": 60, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "head_dim": 8,
}  # fmt: skip
MIXTURE = SHAPE | {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "tie_word_embeddings": False}
FAMILIES: dict[str, dict[str, Any]] = {
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

OFTEN = ("Llama", "Gemma2", "Afmoe", "Dots1")  # dense, casts to fp32, mask by name, router in fp32


def make(folder: Path, family: str, seed: int = 3, **more: Any) -> nn.Module:
    """A folder of a small model; every number of its state says something."""
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**(FAMILIES[family] | more))
    model: nn.Module = getattr(transformers, f"{family}ForCausalLM")(config)
    for name, buffer in model.named_buffers():
        if name in model.state_dict() and buffer.is_floating_point():
            buffer.copy_(0.5 + torch.rand_like(buffer))
    model.save_pretrained(folder)
    return model


def of_transformers(folder: Path, dtype: torch.dtype, **more: Any) -> nn.Module:
    model: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **more)
    return model.train()


def by_command(words: list[str]) -> None:
    raise SystemExit(cli.main(["schedule", "train", "auto", *words]))


FLAGS = "--lr 1e-2 --train-iters 2 --seq-length 16 --mock-data --micro-batch-size 2 --global-batch-size 4 --device cpu"


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
        pytest.param(family, precision, marks=() if precision == "bf16" or family in OFTEN else pytest.mark.long)
        for family in FAMILIES for precision in ("bf16", "fp16", "fp64")
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


def test_frequencies_are_not_rounded_where_the_model_is(tmp_path: Path) -> None:
    """Also of a model that a function builds in fp32: 16 bits of a frequency are wrong by several turns after some thousand tokens."""
    make(tmp_path, "Llama")
    model = built(tmp_path, "--bf16").model
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32 and model.lm_head.weight.dtype == torch.bfloat16  # type: ignore[union-attr]
    for weights in tmp_path.glob("*.safetensors"):
        weights.unlink()
    model = built(tmp_path, "--bf16").model
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32 and model.lm_head.weight.dtype == torch.bfloat16  # type: ignore[union-attr]


LAYOUTS: dict[str, tuple[int, tuple[object, ...]]] = {
    "alone": (1, ()), "sp": (2, ("--sp-size", 2)), "cp": (2, ("--cp-size", 2)), "tp": (2, ("--tp-size", 2)),
    "zero 3": (2, ("--zero-stage", 3)), "zero 1": (2, ("--zero-stage", 1)),
}  # fmt: skip
CASES = [
    ("Llama", ("sp", "cp", "tp", "zero 3")), ("Gemma2", ("sp", "zero 3")), ("Afmoe", ("sp", "zero 3")), ("Dots1", ("zero 1", "zero 3")),
    ("Mixtral", ("sp", "zero 3")), ("Qwen3", ("cp", "tp")),
]  # fmt: skip
OTHERS = [("Starcoder2", ("sp", "cp", "zero 3")), ("SeedOss", ("sp", "cp", "zero 3")), ("Olmo2", ("sp", "cp", "zero 3")),
          ("Phi3", ("sp", "zero 3")), ("Cohere2", ("sp", "cp", "zero 3")), ("Glm4Moe", ("sp", "zero 3")),
          ("Ernie4_5_Moe", ("sp", "zero 3"))]  # fmt: skip


@pytest.mark.often("Llama", "Mixtral")
@pytest.mark.parametrize(
    ("family", "layouts"),
    [*(pytest.param(*case, id=case[0]) for case in CASES), *(pytest.param(*case, id=case[0], marks=pytest.mark.long) for case in OTHERS)],
)
def test_losses_are_those_of_transformers_in_every_layout(family: str, layouts: tuple[str, ...], tmp_path: Path) -> None:
    """fp64: the mean loss of the first batch, and that of the second after an update."""
    make(tmp_path / "model", family)
    found = {}
    for name in ("alone", *layouts):
        ranks, more = LAYOUTS[name]
        flags = ("--model", tmp_path / "model", "--fp64", "--train-iters", 2, "--seq-length", 32, "--save", tmp_path / name, *more)
        micro = () if name.startswith("zero") else ("--micro-batch-size", 4)
        train(tmp_path, *flags, *micro, ranks=ranks, data=("--mock-data",), program=by_command).expect(0)
        found[name] = [(r["loss"], r["grad_norm"]) for r in records(tmp_path / name)]
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


@pytest.mark.parametrize("family", [pytest.param(f, marks=() if f in OFTEN else pytest.mark.long) for f in FAMILIES])
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


@pytest.mark.parametrize("family", ["Gemma2", "Mixtral", "Dots1", "Afmoe"])
def test_verify_parallelism_knows_what_they_cast(family: str, tmp_path: Path) -> None:
    """Norms of Gemma compute in fp32 whatever the model is in, and the grouped product of experts does not exist in fp64."""
    make(tmp_path / "model", family)
    layout = ("--zero-stage", 1) if family == "Dots1" else ("--sp-size", 2)
    flags = ("--model", tmp_path / "model", "--verify-parallelism", "--seq-length", 32, *layout)
    train(tmp_path, *flags, ranks=2, data=("--mock-data",), program=by_command).expect(0, "the layout equals one process")


@pytest.mark.long
def test_16_bit_mixtures_with_fp32_routers_go_on_with_the_same_bits(tmp_path: Path) -> None:
    make(tmp_path / "model", "Dots1")
    flags = ("--model", tmp_path / "model", "--bf16", "--zero-stage", 3, "--train-iters", 4, "--seq-length", 32)
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    train(tmp_path, *flags, "--save", whole, ranks=2, data=("--mock-data",), program=by_command).expect(0)
    for more in (("--exit-interval", 2), ("--auto-resume",)):
        train(tmp_path, *flags, "--save", halves, *more, ranks=2, data=("--mock-data",), program=by_command).expect(0)
    assert_same_run(halves, whole)
    kept = tensors(whole)
    gate, bias = "model.layers.1.mlp.gate.weight", "model.layers.1.mlp.gate.e_score_correction_bias"
    assert kept[gate].dtype == torch.float32 and kept[bias].dtype == torch.float32 and kept["lm_head.weight"].dtype == torch.bfloat16
    assert len(kept[bias].unique()) == 4, "a bias was rounded"
    # the same steps without ZeRO
    train(tmp_path, *flags, "--zero-stage", 0, "--save", tmp_path / "plain", ranks=2, data=("--mock-data",), program=by_command).expect(0)
    assert [r["loss"] for r in records(tmp_path / "plain")] == [r["loss"] for r in records(whole)]


CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}}, "rope_parameters.rope_theta: 10000.0 in the checkpoint, 77.0 here"),
    ({"rms_norm_eps": 1e-3}, "rms_norm_eps: 1e-06 in the checkpoint, 0.001 here"), ({"hidden_act": "gelu"}, "hidden_act: silu in the ch"),
]  # fmt: skip


def test_another_model_of_the_same_shapes_is_refused(tmp_path: Path) -> None:
    make(tmp_path / "model", "Llama")
    flags = ("--train-iters", 2, "--save", tmp_path / "run", "--seq-length", 16)
    train(tmp_path, "--model", tmp_path / "model", *flags, data=("--mock-data",), program=by_command).expect(0)
    for number, (change, said) in enumerate(CHANGES):
        make(tmp_path / f"other{number}", "Llama", **change)
        words = ("--model", tmp_path / f"other{number}", *flags, "--auto-resume", "--train-iters", 3, "--override-opt-param-scheduler")
        train(tmp_path, *words, data=("--mock-data",), program=by_command).expect(3, "the checkpoint is of another model", said)
    config = json.loads((tmp_path / "model/config.json").read_text())
    (tmp_path / "mistral").mkdir()
    (tmp_path / "mistral/config.json").write_text(json.dumps(config | {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}))
    words = ("--model", tmp_path / "mistral", *flags, "--auto-resume", "--train-iters", 3, "--override-opt-param-scheduler")
    train(tmp_path, *words, data=("--mock-data",), program=by_command).expect(3, "class: LlamaForCausalLM in the checkpoint, Mistral")
    # a new run may see further; the same folder goes on
    finetuned = ("--load", tmp_path / "run", "--finetune", "--save", tmp_path / "tuned", "--train-iters", 1, "--seq-length", 16)
    train(tmp_path, "--model", tmp_path / "other0", *finetuned, data=("--mock-data",), program=by_command).expect(0, "finetuning from")
    last = ("--auto-resume", "--train-iters", 3, "--override-opt-param-scheduler")
    train(tmp_path, "--model", tmp_path / "model", *flags, *last, data=("--mock-data",), program=by_command).expect(0, "step 3/3")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--num-layers", 7), "--num-layers (7): "), (("--rotary-base", 50), "--rotary-base is for megatron_sp's own models"),
        (("--window-size", 4), "--window-size is for"), (("--num-experts", 4), "--num-experts is for"), (("--swiglu",), "--swiglu is for"),
        (("--preset", "llama-1b"), "--preset llama-1b: the model is that of --model"),
        (("--hidden-dropout", 0.1), "--hidden-dropout (0.1): LlamaConfig"),
    ],
)  # fmt: skip
def test_flags_of_a_shape_beside_a_folder(flags: tuple[object, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path / "model", "Llama")
    try:
        built(tmp_path / "model", " ".join(map(str, flags)))
        pytest.fail("nothing was refused")
    except (ConfigError, SystemExit) as error:
        assert said in str(error) + capsys.readouterr().err


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


def test_a_loss_for_even_loads_is_refused(tmp_path: Path) -> None:
    make(tmp_path / "model", "Mixtral", output_router_logits=True, router_aux_loss_coef=0.5)
    train(tmp_path, "--model", tmp_path / "model", "--seq-length", 16, data=("--mock-data",), program=by_command).expect(
        2, "output_router_logits, router_aux_loss_coef 0.5", "set output_router_logits to false"
    )


PLANS = {
    "of another model": ("model_type: gpt2", "{on: transformer.h.*, do: checkpoint}", 2, "gpt2"),
    "of a module that does not exist": ("model_type: llama", "{on: model.layers.*.nowhere, do: checkpoint}", 2, "nowhere"),
    "right": ("model_type: llama", "{on: model.layers.*, do: checkpoint}", 0, "step 1/1"),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_is_read_on_every_layout(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "model", "Llama")
    kind, line, code, said = PLANS[name]
    plan = tmp_path / "plan.yaml"
    plan.write_text(f"schema: 1\n{kind}\nseq_dim: 1\nlines:\n  - {line}\n")

    def with_plan(words: list[str]) -> None:
        raise SystemExit(cli.main(["schedule", "train", str(plan), *words]))

    layouts = ((1, ()), (2, ("--sp-size", 2)), (2, ("--zero-stage", 1)), (2, ("--cp-size", 2)))
    for ranks, more in layouts if code == 0 else layouts[:2]:
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
    flags = ("--model", tmp_path / "model", "--save", tmp_path / "run", "--seq-length", 16, "--train-iters", 1)
    train(tmp_path, *flags, data=("--mock-data",), program=by_command).expect(0)
    (start,) = records(tmp_path / "run", "start")
    assert start["num_params"] == sum(p.numel() for p in model.parameters())


def test_what_was_trained_is_exported_and_is_the_same_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for family in ("Llama", "Dots1"):
        folder, run, out = (tmp_path / f"{family}-{what}" for what in ("model", "run", "out"))
        make(folder, family)
        train(tmp_path, "--model", folder, "--save", run, "--seq-length", 16, "--train-iters", 2, "--bf16", data=("--mock-data",),
              program=by_command).expect(0)  # fmt: skip
        assert cli.main(["convert", "--input", str(run), "--to", "hf", "--output", str(out)]) == 0
        exported, kept = of_transformers(out, torch.bfloat16), tensors(run)
        assert type(exported).__name__ == f"{family}ForCausalLM" and state(run)["foreign_model"]["class"] == f"{family}ForCausalLM"
        held = exported.state_dict()
        for name, value in kept.items():
            if not name.startswith("optimizer."):
                assert torch.equal(held[name], value), name
        assert cli.main(["convert", "--input", str(run), "--to", "megatron", "--output", str(tmp_path / "x")]) == 3
        assert "write it with --to hf" in capsys.readouterr().err
        assert cli.main(["evaluate", "--load", str(run), "--text", str(folder / "config.json")]) == 3
        assert "of transformers" in capsys.readouterr().err


def test_nothing_in_a_stored_configuration_fetches_or_runs_code() -> None:
    inner = {"hidden_size": 8, "_attn_implementation": "kernels-community/x", "auto_map": {"AutoModel": "x.Y"}}
    config = {**inner, "text_config": inner, "quantization_config": {"quant_method": "x"}, "_experts_implementation": "x/y"}
    assert without_code(config) == {"hidden_size": 8, "text_config": {"hidden_size": 8}}


def test_one_class_without_a_kernel_has_our_message(tmp_path: Path) -> None:
    make(tmp_path / "model", "Gemma2")
    flags = ("--model", tmp_path / "model", "--seq-length", 16, "--train-iters", 1)
    train(tmp_path, *flags, data=("--mock-data",), program=by_command).expect(0)
    train(tmp_path, *flags, "--attention-backend", "fused", data=("--mock-data",), program=by_command).expect(2, "has no such attention")
