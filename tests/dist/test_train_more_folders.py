"""``megatron-sp schedule train --model FOLDER`` with families unlike Llama: names, layers, losses and masks of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.training import NO_DROPOUT, records, train

transformers = pytest.importorskip("transformers", reason="transformers (Python >= 3.11) is not installed")

from test_train_folders import built, by_command  # noqa: E402

from megatron_sp.commands.schedule.train import parse_external  # noqa: E402
from megatron_sp.tasks.external_weights import ModelFolder, whole_shape_of  # noqa: E402
from megatron_sp.utils.errors import ConfigError  # noqa: E402

TOKENS = {"vocab_size": 60, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
OLD = TOKENS | {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 64}
NEW = TOKENS | {
    "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24,
    "max_position_embeddings": 64,
}  # fmt: skip
NO_HEADS = TOKENS | {"num_hidden_layers": 2, "hidden_size": 32, "state_size": 8}
STATE_SPACES = {"mamba_d_state": 8, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}
FAMILIES: dict[str, dict[str, Any]] = {
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


def make(folder: Path, family: str, **more: Any) -> Any:
    """A folder of a small model."""
    torch.manual_seed(3)
    config = getattr(transformers, f"{family}Config")(**(FAMILIES[family] | more))
    model: Any = getattr(transformers, HEADS.get(family, f"{family}ForCausalLM"))(config)
    model.save_pretrained(folder)
    return model


LAYOUTS: dict[str, tuple[int, tuple[object, ...]]] = {
    "alone": (1, ()), "sp": (2, ("--sp-size", 2)), "cp": (2, ("--cp-size", 2)), "zero 3": (2, ("--zero-stage", 3)),
}  # fmt: skip
CASES = [
    pytest.param("GPT2", ("sp", "cp"), id="a padding token, and no mask"),
    pytest.param("GPTJ", ("sp", "cp"), id="a table of angles by position"),
    pytest.param("Jamba", ("zero 3",), id="layers of several classes"),
    pytest.param("XLM", ("zero 3",), id="results of blocks that are written into"),
    pytest.param("CTRL", ("sp", "cp"), id="a buffer that forward replaces", marks=pytest.mark.long),
    pytest.param("Dory", ("sp", "zero 3"), id="layers that run twice", marks=pytest.mark.long),
    pytest.param("Mpt", ("zero 3",), id="alibi", marks=pytest.mark.long), pytest.param("Mamba", ("zero 3",), id="no attention"),
]  # fmt: skip


@pytest.mark.often("a table of angles by position", "layers of several classes")
@pytest.mark.parametrize(("family", "layouts"), CASES)
def test_losses_are_those_of_one_process(family: str, layouts: tuple[str, ...], tmp_path: Path) -> None:
    make(tmp_path / "model", family)
    shape = whole_shape_of(str(tmp_path / "model"))  # in place of what the tests' runs have elsewhere
    own = ("--num-layers", shape["num_layers"], "--num-attention-heads", shape["num_attention_heads"])
    found = {}
    for name in ("alone", *layouts):
        ranks, more = LAYOUTS[name]
        flags = ("--model", tmp_path / "model", "--fp64", "--train-iters", 2, "--save", tmp_path / name, *own, *NO_DROPOUT, *more)
        micro = ("--micro-batch-size", 2 if name.startswith("zero") else 4)
        train(tmp_path, *flags, *micro, ranks=ranks, data=("--mock-data",), program=by_command).expect(0)
        found[name] = [(r["loss"], r["grad_norm"]) for r in records(tmp_path / name)]
    for name in layouts:
        for got, want in zip(found[name], found["alone"], strict=True):
            assert got == pytest.approx(want, rel=1e-5), name


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


def test_a_model_without_attention_is_refused_for_what_it_is(tmp_path: Path) -> None:
    """And not for a number of heads that it does not have."""
    make(tmp_path / "model", "Mamba")
    for axis in ("sp", "cp"):
        flags = ("--model", tmp_path / "model", "--num-attention-heads", 32, "--train-iters", 1, f"--{axis}-size", 2)
        said = ("MambaForCausalLM does not look its attention up", f"give the ranks of {axis} to tp or dp")
        train(tmp_path, *flags, ranks=2, data=("--mock-data",), program=by_command).expect(2, *said)


def test_dropout_of_a_class_that_declares_whole_numbers(tmp_path: Path) -> None:
    make(tmp_path, "Mpt", resid_pdrop=0.1, emb_pdrop=0.2)
    off: Any = built(tmp_path, "--hidden-dropout 0 --attention-dropout 0").model
    assert (off.config.resid_pdrop, off.config.emb_pdrop, off.config.attn_config.attn_pdrop) == (0, 0, 0)
    with pytest.raises(ConfigError, match=r"--attention-dropout \(0.1\): MptAttentionConfig rejects it: .*attn_pdrop"):
        built(tmp_path, "--attention-dropout 0.1")


LOSSES: dict[str, tuple[dict[str, Any], str]] = {
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


def test_a_model_that_looks_into_its_mask_is_refused_under_context_parallelism(tmp_path: Path) -> None:
    """Doge chooses keys by its mask, which context parallelism does not make."""
    make(tmp_path / "model", "Doge")
    flags = ("--model", tmp_path / "model", "--seq-length", 16, "--train-iters", 1, "--cp-size", 2)
    outcome = train(tmp_path, *flags, ranks=2, data=("--mock-data",), program=by_command)
    assert "Traceback" not in outcome.expect(2, "a mask of the model is looked into by the model itself", "give these ranks to sp").text


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
