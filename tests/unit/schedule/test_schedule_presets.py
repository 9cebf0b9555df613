"""Which preset a model gets, what is refused and why; with models that have no more than a family's names."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from megatron_sp.schedule import Mesh, Schedule, schedule
from megatron_sp.schedule.presets import Blocks, auto, families, from_hf_plan, register_preset
from megatron_sp.utils.errors import ConfigError


class Named(nn.Module):
    """Modules of these dotted names, and a configuration."""

    def __init__(self, modules: dict[str, nn.Module], plan: dict[str, str] | None = None, **config: Any) -> None:
        super().__init__()
        self.config, self._tp_plan = SimpleNamespace(to_dict=dict, **config), plan
        for path, module in modules.items():
            *parents, last = path.split(".")
            at: nn.Module = self
            for name in parents:
                if name not in at._modules:
                    at.add_module(name, nn.Module())
                at = at.get_submodule(name)
            at.add_module(last, module)

    def get_input_embeddings(self) -> nn.Module | None:
        return getattr(self, "words", None)

    def get_output_embeddings(self) -> nn.Module | None:
        return getattr(self, "head", None)


def lines(s: Schedule) -> list[tuple[str, str]]:
    return [(d.on, d.do) for d in s.directives]


def test_a_family_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = import_module("megatron_sp.schedule.presets.families")  # whose name is that of a function, too
    monkeypatch.setattr(registry, "_WRITERS", dict(registry._WRITERS))

    @register_preset("mine")
    def mine(s: Schedule, seq: bool) -> Blocks:
        s["blocks.*.up"].column()
        s["blocks.*.down"].row("reduce_scatter" if seq else "all_reduce")
        return Blocks("blocks.*", "blocks.0", "blocks.0")

    assert "mine" in families()
    model = Named(
        {"words": nn.Embedding(7, 4), "blocks.0.up": nn.Linear(4, 8), "blocks.0.down": nn.Linear(8, 4), "head": nn.Linear(4, 7)},
        model_type="mine",
    )
    s = auto(model, tp=2, recompute="keep_gathered")
    assert lines(s) == [
        ("blocks.*.up", "column"), ("blocks.*.down", "row"), ("words", "vocab_parallel"), ("head", "vocab_parallel"),
        ("blocks.*", "checkpoint"),
    ]  # fmt: skip
    assert s.directives[-1].args == {"policy": "keep_gathered"} and s.mesh.tp.size() == 2
    assert lines(auto(model, vocab=False)) == lines(s)[:2]
    assert lines(auto(model, sp=2, vocab=False))[-1] == ("", "ulysses")
    assert lines(auto(model, seq=True, vocab=False))[-1] == ("blocks.0", "sequence")
    model.head = None  # type: ignore[assignment]
    assert auto(model, sp=2).directives[-1].args.items() >= {"enter": "blocks.0", "leave": "blocks.0"}.items()
    assert lines(auto(model, sp=2, vocab=False, ulysses=False)) == lines(s)[:2]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, r"Named has no config.model_type, .* write its lines with schedule\(model, mesh\)"),
        ({"model_type": "bertt"}, r"no preset for 'bertt', only for bert, .*; did you mean bert or roberta\?: write"),
        ({"model_type": "phi3", "base_model_tp_plan": {"x": "colwise"}}, r"or take transformers' own plan with from_hf_plan\(model\)"),
        ({"model_type": "bert", "add_cross_attention": True}, r"Named has cross attention \(.*\), which the preset of bert does"),
    ],
)
def test_no_preset(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        auto(Named({}, **config), tp=2)


def test_sizes_that_are_not_those_of_the_mesh() -> None:
    with pytest.raises(ConfigError, match=r"tp \(4\) is not that of the mesh \(tp 2, sp 1, dp 1\): leave it out"):
        auto(Named({}, model_type="bert"), Mesh.sizes(tp=2), tp=4)


def test_plans() -> None:
    plan = {
        "self_attn.q_proj": "colwise", "self_attn.k_proj": "colwise", "self_attn.q_norm": "replicated_with_grad_allreduce",
        "self_attn.o_proj": "rowwise", "mlp.gate_up": "packed_colwise", "mlp.both": "rowwise_split_input", "mlp.all": "colwise_rep",
        "words": "embedding_rowwise", "kept": "replicate",
    }  # fmt: skip
    modules = {name: nn.Embedding(7, 4) if name == "words" else nn.Linear(4, 4) for name in plan}
    model = Named(modules, plan, num_attention_heads=4, num_key_value_heads=1, base_model_tp_plan={})
    head = nn.Linear(4, 7, bias=False)
    head.weight = model.words.weight
    model.head = head
    s = from_hf_plan(model, Mesh.sizes(tp=2))
    assert [(d.on, d.do, d.args) for d in s.directives] == [
        ("self_attn.q_proj", "column", {"input": "copy", "heads": 4}),
        ("self_attn", "set", {"attribute": "num_key_value_groups", "value": 2}),
        ("self_attn.k_proj", "column", {"input": "copy", "heads": 1, "replicas": True}),
        ("self_attn.q_norm", "sum_gradients", {}),
        ("self_attn.o_proj", "row", {"reduce": "all_reduce"}),
        ("mlp.gate_up", "column", {"input": "copy", "blocks": 2}),
        ("mlp.both", "sync", {"mode": "fwd_pre", "op": "scatter", "axis": -1}),
        ("mlp.both", "row", {"reduce": "all_reduce"}),
        ("mlp.all", "column", {"input": "copy", "gather": True}),
        ("words", "vocab_parallel", {}),
        ("head", "vocab_parallel", {}),  # tied, and not in the plan
    ]


def test_plans_that_are_refused() -> None:
    with pytest.raises(ConfigError, match="no tensor parallel plan for Named"):
        from_hf_plan(Named({}, base_model_tp_plan=None))
    plan = {"up": "colwise", "experts": "grouped_gemm", "router": "ep_dispatch_experts"}
    with pytest.raises(ConfigError, match=r"has 'grouped_gemm' at experts, 'ep_dispatch_experts' at router, which is not known here, only"):
        from_hf_plan(Named({name: nn.Linear(2, 2) for name in plan}, plan, base_model_tp_plan={}))


def test_plans_may_name_what_another_configuration_has() -> None:
    model = Named({"mlp.up": nn.Linear(4, 4)}, {"mlp.up": "colwise", "linear_attn.q": "grouped_gemm"}, base_model_tp_plan={})
    assert [d.on for d in from_hf_plan(model, Mesh.sizes(tp=2)).directives] == ["mlp.up"]
    with pytest.raises(ConfigError, match=r"the plan of Named names no module of it: linear_attn\.q; write the lines"):
        from_hf_plan(Named({}, {"linear_attn.q": "colwise"}, base_model_tp_plan={}))


def test_plans_of_experts() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers (Python >= 3.11) is not installed")
    sizes = {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 12}
    with torch.device("meta"):
        model = transformers.MixtralForCausalLM(transformers.MixtralConfig(vocab_size=12, num_local_experts=2, **sizes))
    lines = from_hf_plan(model, Mesh.sizes(tp=2)).directives
    experts = [d for d in lines if d.on.endswith("experts") and d.do == "sync"]
    assert [d.args.get("arg") for d in experts] == ["hidden_states", "top_k_weights", None]
    from_hf_plan(model, Mesh.sizes(tp=2)).check()


def of_transformers(name: str, **sizes: Any) -> Any:
    transformers = pytest.importorskip("transformers", reason="transformers (Python >= 3.11) is not installed")
    usual = {"vocab_size": 37, "hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4, "pad_token_id": 0}
    return getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**{**usual, **sizes}))


def test_a_family_without_a_preset_is_sent_to_none() -> None:
    """A name that transformers knows is no misspelling of another: Mamba was sent to Llama."""
    model = of_transformers("Mamba", state_size=4)
    with pytest.raises(ConfigError, match=r"no preset for 'mamba', only for [^;]*: write its lines with schedule\(model, mesh\)$"):
        auto(model, tp=2)
    with pytest.raises(ConfigError, match=r"no tensor parallel plan for MambaForCausalLM: nor is there a preset: write its lines"):
        from_hf_plan(model, Mesh.sizes(tp=2))
    model = of_transformers("OPT", ffn_dim=20, word_embed_proj_dim=24)
    with pytest.raises(ConfigError, match=r"no tensor parallel plan for OPTForCausalLM: take presets.auto\(model\), which knows it"):
        from_hf_plan(model, Mesh.sizes(tp=2))


def _attention(model: Any) -> Schedule:
    s = schedule(model, Mesh.sizes(tp=2))
    s["model.layers.*.self_attn"].sync("fwd_pre", "copy", arg="hidden_states")
    s["model.layers.*.self_attn.q_proj"].column(input="prepared", heads=4)
    s["model.layers.*.self_attn.{k,v}_proj"].column(input="prepared", heads=2)
    s["model.layers.*.self_attn.o_proj"].row()
    return s


def test_norms_with_a_row_for_each_head_are_split_as_the_heads_are() -> None:
    one_for_all = of_transformers("Cohere", num_key_value_heads=2, intermediate_size=20, use_qk_norm=True)
    s = _attention(one_for_all)
    s["model.layers.*.self_attn.{q,k}_norm"].column()
    with pytest.raises(ConfigError, match=r"q_norm is a CohereLayerNorm with a row for each head: it is split with .shard\('weight', 0\)"):
        s.check()
    s = _attention(one_for_all)
    s["model.layers.*.self_attn.{q,k}_norm"].shard("weight", 0)
    s.check()
