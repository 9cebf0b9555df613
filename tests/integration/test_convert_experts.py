"""Random mixtures of experts of transformers' own making: logits and every gradient are theirs, from files of either kind, and back."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.convert_models import Tensors
from test_convert_transformers import llama_fields, made, no_network, saved  # noqa: F401
from torch import Tensor

from megatron_sp.commands.cli import main
from megatron_sp.config.schema import KernelConfig
from megatron_sp.convert.copies import Correspondence, Gathered
from megatron_sp.convert.families import FAMILIES
from megatron_sp.convert.formats import FORMATS
from megatron_sp.convert.formats.hugging_face import renamed
from megatron_sp.convert.model import Model, Options, parameter_shapes
from megatron_sp.models.gpt import GPTModel
from megatron_sp.ops.attention import AttentionMask
from megatron_sp.parallel.forward_context import ForwardContext
from megatron_sp.schedule.verify.copies import Float64Mode, one_expert_at_a_time
from megatron_sp.utils.errors import EXIT_CHECKPOINT, EXIT_OK

transformers = pytest.importorskip("transformers", reason="transformers (Python >= 3.11) is not installed")


def fields_of(draw: random.Random) -> dict[str, Any]:
    return {**llama_fields(draw), "num_hidden_layers": 3, "vocab_size": 41, "num_experts_per_tok": draw.choice([1, 2, 5])}


def mixtral(draw: random.Random) -> Any:
    return made("Mixtral", **fields_of(draw), num_local_experts=5, sliding_window=draw.choice([None, 5]))


def qwen3(draw: random.Random) -> Any:
    return made(
        "Qwen3Moe", **fields_of(draw), num_experts=5, moe_intermediate_size=7, norm_topk_prob=draw.random() < 0.5, mlp_only_layers=[],
        attention_bias=draw.random() < 0.5, use_sliding_window=draw.random() < 0.5, sliding_window=5,
    )  # fmt: skip


def qwen3_some(draw: random.Random) -> Any:
    layers: dict[str, Any] = draw.choice([{"decoder_sparse_step": 2}, {"mlp_only_layers": [0, 2]}])
    return made("Qwen3Moe", **fields_of(draw), num_experts=6, moe_intermediate_size=7, norm_topk_prob=True, **layers)


def olmoe(draw: random.Random) -> Any:
    fields = fields_of(draw)
    fields.pop("head_dim")
    return made("Olmoe", **fields, num_experts=5, norm_topk_prob=draw.random() < 0.3, pad_token_id=None, eos_token_id=None)


FAMILIES_OF_EXPERTS = [mixtral, qwen3, qwen3_some, olmoe]


def ours(model: Model) -> GPTModel:
    net = GPTModel(model.config, KernelConfig(), seed=0, dtype=torch.float64)
    with torch.no_grad():
        for name, p in net.named_parameters():
            found = model.store.read(name)
            assert found.shape == p.shape or name.startswith(("embedding", "output_layer"))
            p.zero_()[: len(found)].copy_(found)
    return net


@pytest.mark.parametrize("make", FAMILIES_OF_EXPERTS)
@pytest.mark.parametrize("seed", [1, 2, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(3, 9))])
def test_logits_and_every_gradient_are_those_of_transformers(tmp_path: Path, make: Any, seed: int) -> None:
    folder = saved(make, seed, tmp_path / "theirs", torch.float64)
    if seed % 2:  # as transformers stacks them in memory
        net = type(make(random.Random(seed))).from_pretrained(folder, dtype=torch.float64)
        tied = {"lm_head.weight"} if net.config.tie_word_embeddings else set()
        stacked = {name: t.contiguous() for name, t in net.state_dict().items() if name not in tied}
        save_file(stacked, folder / "model.safetensors")
        assert any("experts.gate_up_proj" in name for name in load_file(folder / "model.safetensors"))
    model = FORMATS["hf"].read(folder, Options())
    mine, config = ours(model), model.config
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(41, (3, 13), generator=generator)
    weights = torch.randn(3, 13, 41, generator=generator, dtype=torch.float64)
    logits = mine.logits(mine.hidden(tokens, ForwardContext(AttentionMask(causal=True)))).transpose(0, 1)[..., :41]
    (logits * weights).sum().backward()
    with Float64Mode():
        net = type(make(random.Random(seed))).from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
        one_expert_at_a_time(net)
        theirs = net(input_ids=tokens).logits
        (theirs * weights).sum().backward()
    assert_near(logits, theirs, "logits")
    grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in net.named_parameters()}
    family = FAMILIES[json.loads((folder / "config.json").read_text())["model_type"]]
    correspondence = Correspondence.of(parameter_shapes(config), family.copies(config, 0))
    expected = Gathered(correspondence, renamed(Tensors(grads), family)[0])
    for name, p in mine.named_parameters():
        want = expected.read(name)
        assert_near(torch.zeros_like(want) if p.grad is None else p.grad[: len(want)], want, name)


def assert_near(found: Tensor, want: Tensor, name: str) -> None:
    error, size = (found - want).abs().max().item(), want.abs().max().item()
    assert error <= 1e-10 * max(size, 1e-3), (name, error, size)


@pytest.mark.parametrize("make", FAMILIES_OF_EXPERTS)
@pytest.mark.parametrize("seed", [4, pytest.param(5, marks=pytest.mark.long)])
def test_there_and_back(tmp_path: Path, make: Any, seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Bit for bit, under the names that transformers writes, and --verify with transformers on both."""
    folder, run, back = saved(make, seed, tmp_path / "theirs"), tmp_path / "run", tmp_path / "back"
    for source, kind, target in ((folder, "megatron_sp", run), (run, "hf", back)):
        code = main(["convert", "--input", str(source), "--to", kind, "--output", str(target), "--verify"])
        told = capsys.readouterr().err
        assert code == EXIT_OK and "verify: the same" in told and f"transformers {transformers.__version__}" in told, told
    first, second = (load_file(f / "model.safetensors") for f in (folder, back))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    assert (back / "config.json").read_text() == (folder / "config.json").read_text()


@pytest.mark.parametrize(
    ("make", "config", "words"),
    [
        (olmoe, {"clip_qkv": 8.0}, "clip_qkv is '8.0', which limits queries, keys and values"),
        (mixtral, {"router_jitter_noise": 0.1}, "router_jitter_noise is '0.1'"),
        (mixtral, {"num_local_experts": 1}, "num_local_experts is 1: a mixture has at least 2 experts"),
        (mixtral, {"num_local_experts": 6}, "experts.5.w1.weight is missing"),
        (mixtral, {"num_experts_per_tok": 9}, "moe_router_topk (9) must be at most num_experts (5)"),
        (mixtral, {"router_aux_loss_coef": -1.0}, "router_aux_loss_coef must be at least 0"),
        (qwen3, {"mlp_only_layers": [0, 1, 2]}, "leave no layer with experts"),
        (qwen3, {"mlp_only_layers": [1]}, "model.layers.1.mlp.gate_proj.weight is missing"),
    ],
)
def test_what_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], make: Any, config: dict[str, Any], words: str) -> None:
    folder = saved(make, 0, tmp_path / "theirs")
    document = json.loads((folder / "config.json").read_text())
    if "num_local_experts" in config:
        document.pop("num_experts", None)
    (folder / "config.json").write_text(json.dumps({**document, **config}))
    assert main(["convert", "--input", str(folder), "--to", "megatron_sp", "--output", str(tmp_path / "run")]) == EXIT_CHECKPOINT
    assert words in capsys.readouterr().err
