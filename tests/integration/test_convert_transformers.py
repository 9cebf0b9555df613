"""Random models of transformers' own making, also with experts: here and back the same bits, and what is read computes the same."""

from __future__ import annotations

import json
import random
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.convert_models import Tensors
from torch import Tensor

from megatron_sp.commands.cli import main
from megatron_sp.config.schema import KernelConfig
from megatron_sp.config.schema_model import is_expert_bias
from megatron_sp.convert import verify as sides
from megatron_sp.convert.copies import Correspondence, Gathered
from megatron_sp.convert.families import FAMILIES
from megatron_sp.convert.formats import FORMATS
from megatron_sp.convert.formats.hugging_face import renamed
from megatron_sp.convert.model import Model, Options, parameter_shapes
from megatron_sp.convert.reference import Rows
from megatron_sp.convert.verify import transformers_side, verify
from megatron_sp.models.gpt import GPTModel
from megatron_sp.ops.attention import AttentionMask
from megatron_sp.parallel.forward_context import ForwardContext
from megatron_sp.schedule.verify.copies import Float64Mode, one_expert_at_a_time
from megatron_sp.utils.errors import EXIT_CHECKPOINT, EXIT_NUMERICS, EXIT_OK

transformers = pytest.importorskip("transformers", reason="transformers (Python >= 3.11) is not installed")

LLAMA3 = {"rope_type": "llama3", "rope_theta": 300.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 3.0,
          "original_max_position_embeddings": 24}  # fmt: skip


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here may ask for anything."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def made(kind: str, task: str = "ForCausalLM", **fields: Any) -> Any:
    return getattr(transformers, f"{kind}{task}")(getattr(transformers, f"{kind}Config")(**fields))


def gpt2(draw: random.Random) -> Any:
    heads = draw.choice([1, 2, 5])
    return made(
        "GPT2", "LMHeadModel",
        vocab_size=draw.randint(3, 90), n_positions=draw.randint(20, 70), n_embd=heads * draw.choice([4, 6]), n_layer=draw.randint(1, 3),
        n_head=heads, n_inner=draw.choice([None, 17]), activation_function=draw.choice(["gelu_new", "gelu"]),
        layer_norm_epsilon=draw.choice([1e-5, 1e-3]), tie_word_embeddings=draw.random() < 0.5, initializer_range=0.3,
    )  # fmt: skip


def llama_fields(draw: random.Random) -> dict[str, Any]:
    groups, each = draw.choice([1, 2, 3]), draw.choice([1, 2])
    rope = {"rope_type": "default", "rope_theta": draw.choice([100.0, 1e4, 5e5])}
    return {
        "vocab_size": draw.randint(3, 90), "hidden_size": 4 * groups * each, "num_hidden_layers": draw.randint(1, 3),
        "num_attention_heads": groups * each, "num_key_value_heads": groups, "intermediate_size": draw.randint(5, 40),
        "max_position_embeddings": 64, "rms_norm_eps": draw.choice([1e-5, 1e-6]), "initializer_range": 0.3, "head_dim": draw.choice([4, 6]),
        "tie_word_embeddings": draw.random() < 0.5, "rope_parameters": rope,
    }  # fmt: skip


def llama(draw: random.Random) -> Any:
    return made("Llama", **llama_fields(draw))


def bert_fields(draw: random.Random) -> dict[str, Any]:
    heads = draw.choice([1, 3])
    return {
        "vocab_size": draw.randint(3, 90), "hidden_size": heads * 4, "num_hidden_layers": draw.randint(1, 3), "num_attention_heads": heads,
        "intermediate_size": draw.randint(5, 40), "max_position_embeddings": draw.randint(20, 70), "type_vocab_size": draw.choice([1, 2]),
        "hidden_act": draw.choice(["gelu", "gelu_new"]), "layer_norm_eps": draw.choice([1e-12, 1e-5]), "initializer_range": 0.3,
    }  # fmt: skip


def bert(draw: random.Random) -> Any:
    return made("Bert", "ForPreTraining", **{**bert_fields(draw), "type_vocab_size": 2})  # the order head wants two


def bert_masked(draw: random.Random) -> Any:
    return made("Bert", "ForMaskedLM", **bert_fields(draw))


def bert_classifier(draw: random.Random) -> Any:
    return made("Bert", "ForSequenceClassification", **bert_fields(draw), num_labels=draw.choice([1, 2, 5]))


def megatron_bert(draw: random.Random) -> Any:
    return made("MegatronBert", "ForPreTraining", **{**bert_fields(draw), "type_vocab_size": 2})


def neox(draw: random.Random) -> Any:
    return made(
        "GPTNeoX", vocab_size=31, hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=20, initializer_range=0.3,
        max_position_embeddings=40, hidden_act="gelu", use_parallel_residual=draw.random() < 0.5, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": draw.choice([0.25, 0.5, 1.0])},
    )  # fmt: skip


def mistral(draw: random.Random) -> Any:
    return made("Mistral", **llama_fields(draw), sliding_window=5)


def qwen2(draw: random.Random, **window: Any) -> Any:
    fields = llama_fields(draw)
    return made("Qwen2", **{**fields, "head_dim": fields["hidden_size"] // fields["num_attention_heads"]}, **window)


def qwen2_window(draw: random.Random) -> Any:
    return qwen2(draw, use_sliding_window=True, sliding_window=4, max_window_layers=0)


def llama3(draw: random.Random) -> Any:
    return made("Llama", **{**llama_fields(draw), "rope_parameters": LLAMA3, "attention_bias": True, "mlp_bias": True})


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


EXPERTS = (mixtral, qwen3, qwen3_some, olmoe)
ROTARY = (llama, llama3, neox, mistral, qwen2, qwen2_window, *EXPERTS)  # whose positions transformers computes in fp32 alone
_LONG = [pytest.param(make, marks=pytest.mark.long) for make in (bert, bert_masked, megatron_bert, llama, *ROTARY[2:6])]
MAKERS = [gpt2, llama3, bert_classifier, *EXPERTS, *_LONG]


def saved(make: Any, seed: int, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """A model of a random configuration, no norm or bias of which is at one or zero."""
    torch.manual_seed(seed)
    net = make(random.Random(seed)).to(dtype)
    for p in net.parameters():
        if p.ndim == 1:
            p.data += 0.3 * torch.randn(p.shape, dtype=dtype)
    net.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize(
    "seed", [5, *(pytest.param(seed, marks=pytest.mark.long) for seed in (0, 1, 2, 3, 4, 6, 7))]
)  # 5: several key heads, each with several queries
def test_random_configurations_there_and_back(tmp_path: Path, make: Any, seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Here and back: transformers on theirs, our model, transformers on what we write; in fp64 for every second one."""
    dtype = torch.float64 if seed % 2 else torch.float32
    theirs = saved(make, seed, tmp_path / "theirs", dtype)
    computed = "float64" if dtype == torch.float64 and make not in ROTARY else "float32"
    assert_same_bits_there_and_back(theirs, tmp_path, computed, capsys)


def assert_same_bits_there_and_back(theirs: Path, tmp_path: Path, computed: str, capsys: pytest.CaptureFixture[str]) -> None:
    """And the same results by --verify on both ways, computed in this format of numbers."""
    run, back = tmp_path / "run", tmp_path / "back"
    for source, kind, target in ((theirs, "megatron_sp", run), (run, "hf", back)):
        code = main(["convert", "--input", str(source), "--to", kind, "--output", str(target), "--verify"])
        told = capsys.readouterr().err
        assert code == EXIT_OK, told
        assert "verify: the same" in told
        assert f"transformers {transformers.__version__}" in told
        assert f"in {computed}" in told
    first, second = (load_file(folder / "model.safetensors") for folder in (theirs, back))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    assert (back / "config.json").read_text() == (theirs / "config.json").read_text()


def rows_of(vocab_size: int, longest: int) -> Rows:
    lengths = [longest, 9, 1]
    tokens = torch.randint(vocab_size, (3, longest), generator=torch.Generator().manual_seed(5))
    return Rows(tokens, lengths, torch.zeros_like(tokens))


def test_a_folder_that_transformers_cannot_use_is_told(tmp_path: Path) -> None:
    """A tensor under a name that only we would look for is a model with random weights to them."""
    folder = saved(gpt2, 0, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["h.0.ln_1.weight"] = tensors.pop("transformer.h.0.ln_1.weight")
    save_file({"transformer.h.0.ln_9.weight" if n == "h.0.ln_1.weight" else n: t for n, t in tensors.items()}, folder / "model.safetensors")
    side = transformers_side(folder, {"model_type": "gpt2"}, set())
    with pytest.raises(sides.CheckpointError, match=r"does not find .*ln_1.weight"):
        list(side.compute(rows_of(3, 4), lambda t: t))


def test_code_that_comes_with_a_model_is_not_run(tmp_path: Path) -> None:
    folder = saved(gpt2, 0, tmp_path / "m")
    canary = tmp_path / "canary"
    (folder / "modeling_evil.py").write_text(f"open({str(canary)!r}, 'w').close()\nclass Evil: pass\n")
    document = json.loads((folder / "config.json").read_text())
    document["auto_map"] = {"AutoModelForCausalLM": "modeling_evil.Evil", "AutoConfig": "modeling_evil.Evil"}
    (folder / "config.json").write_text(json.dumps(document))
    code = main(["convert", "--input", str(folder), "--to", "megatron_sp", "--output", str(tmp_path / "run"), "--verify"])
    assert code == EXIT_OK and not canary.exists()


def test_a_mistake_is_found_by_transformers_too(tmp_path: Path) -> None:
    folder, run = saved(llama, 0, tmp_path / "m"), tmp_path / "run"
    assert main(["convert", "--input", str(folder), "--to", "megatron_sp", "--output", str(run)]) == EXIT_OK
    document = json.loads((folder / "config.json").read_text())
    document["rope_parameters"]["rope_theta"] *= 1.1
    (folder / "config.json").write_text(json.dumps(document))
    lines: list[str] = []
    assert verify(FORMATS["hf"], folder, FORMATS["megatron_sp"], run, Options(), None, lines.append) == EXIT_NUMERICS
    assert any("the first difference is in: layer 0" in line for line in lines)


def ours(model: Model) -> GPTModel:
    net = GPTModel(model.config, KernelConfig(), seed=0, dtype=torch.float64)
    with torch.no_grad():
        biases = [(name, bias) for name, bias in net.named_buffers() if is_expert_bias(name)]
        for name, p in [*net.named_parameters(), *biases]:
            found = model.store.read(name)
            assert found.shape == p.shape or name.startswith(("embedding", "output_layer"))
            p.zero_()[: len(found)].copy_(found)
    return net


@pytest.mark.parametrize("make", EXPERTS)
@pytest.mark.parametrize("seed", [5, 6, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2, 3, 4, 7, 8))])
def test_logits_and_every_gradient_are_those_of_transformers(tmp_path: Path, make: Any, seed: int) -> None:
    folder = saved(make, seed, tmp_path / "theirs", torch.float64)
    if seed % 2:  # as transformers stacks them in memory
        net = type(make(random.Random(seed))).from_pretrained(folder, dtype=torch.float64)
        tied = {"lm_head.weight"} if net.config.tie_word_embeddings else set()
        stacked = {name: t.contiguous() for name, t in net.state_dict().items() if name not in tied}
        save_file(stacked, folder / "model.safetensors")
        assert any("experts.gate_up_proj" in name for name in load_file(folder / "model.safetensors"))
    assert_same_gradients(folder, type(make(random.Random(seed))), seed)


def assert_same_gradients(folder: Path, kind: Any, seed: int) -> None:
    """Logits and every gradient, in fp64, of a folder that a class of transformers has written."""
    model = FORMATS["hf"].read(folder, Options())
    mine, config = ours(model), model.config
    words, generator = config.vocab_size or 0, torch.Generator().manual_seed(seed)
    tokens = torch.randint(words, (3, 13), generator=generator)
    weights = torch.randn(3, 13, words, generator=generator, dtype=torch.float64)
    logits = mine.logits(mine.hidden(tokens, ForwardContext(AttentionMask(causal=True, window=config.window_size))))
    logits = logits.transpose(0, 1)[..., :words]
    (logits * weights).sum().backward()
    with Float64Mode():
        net = kind.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
        one_expert_at_a_time(net)
        theirs = net(input_ids=tokens).logits
        (theirs * weights).sum().backward()
    assert_near(logits, theirs, "logits")
    grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in net.named_parameters()}
    grads |= {name: torch.zeros_like(b) for name, b in net.named_buffers() if "bias" in name}
    family = FAMILIES[json.loads((folder / "config.json").read_text())["model_type"]]
    correspondence = Correspondence.of(parameter_shapes(config), family.copies(config, 0))
    expected = Gathered(correspondence, renamed(Tensors(grads), family)[0])
    for name, p in mine.named_parameters():
        want = expected.read(name)
        assert_near(torch.zeros_like(want) if p.grad is None else p.grad[: len(want)], want, name)


def assert_near(found: Tensor, want: Tensor, name: str) -> None:
    error, size = (found - want).abs().max().item(), want.abs().max().item()
    assert error <= 1e-10 * max(size, 1e-3), (name, error, size)


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
