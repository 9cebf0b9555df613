"""Schedules of models that are not ours: the same loss and gradients as the whole model, and what is said of lines that are wrong."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.paths import ROOT
from support.ranks import run_ranks

from megatron_sp.comm.groups import ParallelGroups
from megatron_sp.schedule import Mesh, Schedule, schedule

transformers = pytest.importorskip("transformers", reason="transformers (Python >= 3.11) is not installed")

V, S, B = 37, 8, 3
SIZES = {"num_hidden_layers": 2, "hidden_size": 24, "num_attention_heads": 4, "intermediate_size": 20, "max_position_embeddings": 16}


def llama() -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, vocab_size=V, num_key_value_heads=2, attention_dropout=0.0))


def gpt2() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2, n_embd=24, n_head=4, n_positions=16, vocab_size=V, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0
    )
    return transformers.GPT2LMHeadModel(config)


def bert() -> Any:
    torch.manual_seed(0)
    config = transformers.BertConfig(**SIZES, vocab_size=V, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return transformers.BertForMaskedLM(config)


def schedule_llama(s: Schedule, seq: bool) -> None:
    enter = ("all_gather", "reduce_scatter") if seq else ("copy", "all_reduce")
    s["model.layers.*.self_attn"].sync("fwd_pre", enter[0], arg="hidden_states")
    s["model.layers.*.self_attn.{q,k,v}_proj"].column(input="prepared")
    s["model.layers.*.self_attn.o_proj"].row(enter[1])
    s["model.layers.*.mlp"].sync("fwd_pre", enter[0])
    s["model.layers.*.mlp.{gate,up}_proj"].column(input="prepared")
    s["model.layers.*.mlp.down_proj"].row(enter[1])
    s["model.embed_tokens"].vocab_parallel()
    s["lm_head"].vocab_parallel()
    if seq:
        s.sequence("model.layers.0", "model.norm")


def schedule_gpt2(s: Schedule, seq: bool) -> None:
    enter = ("all_gather", "reduce_scatter") if seq else ("copy", "all_reduce")
    s["transformer.h.*.attn"].sync("fwd_pre", enter[0], arg="hidden_states").set("split_size", divide="tp")
    s["transformer.h.*.attn.c_attn"].column(input="prepared", blocks=3, heads=4)
    s["transformer.h.*.attn.c_proj"].row(enter[1])
    s["transformer.h.*.mlp"].sync("fwd_pre", enter[0])
    s["transformer.h.*.mlp.c_fc"].column(input="prepared")
    s["transformer.h.*.mlp.c_proj"].row(enter[1])
    s["transformer.wte"].vocab_parallel()
    s["lm_head"].vocab_parallel()
    if seq:
        s.sequence("transformer.h.0", "transformer.ln_f")


def schedule_bert(s: Schedule, seq: bool) -> None:
    enter = ("all_gather", "reduce_scatter") if seq else ("copy", "all_reduce")
    s["bert.encoder.layer.*.attention.self"].sync("fwd_pre", enter[0], arg="hidden_states")
    s["bert.encoder.layer.*.attention.self.{query,key,value}"].column(input="prepared")
    s["bert.encoder.layer.*.attention.output.dense"].row(enter[1])
    s["bert.encoder.layer.*.intermediate"].sync("fwd_pre", enter[0])
    s["bert.encoder.layer.*.intermediate.dense"].column(input="prepared")
    s["bert.encoder.layer.*.output.dense"].row(enter[1])
    s["bert.embeddings.word_embeddings"].vocab_parallel()
    s["cls.predictions.decoder"].vocab_parallel()
    if seq:
        s.sequence("bert.encoder.layer.0", "bert.encoder.layer.1")


MODELS: dict[str, tuple[Callable[[], Any], Callable[[Schedule, bool], None]]] = {
    "llama": (llama, schedule_llama), "gpt2": (gpt2, schedule_gpt2), "bert": (bert, schedule_bert),
}  # fmt: skip


def batch() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(1, V, (B, S), generator=g)
    mask = (torch.arange(S) < torch.tensor([S, 5, 3])[:, None]).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.where(mask.bool(), ids, -100)}


def check(name: str, seq: bool) -> None:
    make, write = MODELS[name]
    groups = ParallelGroups.create(torch.device("cpu"), tp_size=dist.get_world_size())
    s = schedule(make(), Mesh.of(groups))
    write(s, seq)
    s.verify(batch())
    before = {n: t.clone() for n, t in s.model.state_dict().items()}
    s.apply()
    assert s.applied is not None
    after = s.applied.full_state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[n], t) for n, t in before.items())
    s.applied.load_full({n: t + 1 for n, t in before.items()})
    assert all(torch.equal(t, before[n] + 1) for n, t in s.applied.full_state_dict().items())


@pytest.mark.parametrize("seq", [False, True], ids=["tp", "tp_seq"])
@pytest.mark.parametrize("name", ["llama", *(pytest.param(n, marks=pytest.mark.long) for n in MODELS if n != "llama")])  # all as presets
def test_the_split_model_is_the_whole_one(tmp_path: Path, name: str, seq: bool) -> None:
    run_ranks(check, 2, tmp_path, name, seq)


def first_block(text: str) -> None:
    torch.manual_seed(0)
    made: dict[str, Any] = {}
    exec(compile(text, "docs/how-to/schedule.md", "exec"), made)  # ours, from the repository
    assert made["s"].applied is not None and all(p.grad is not None for p in made["model"].parameters())


def test_the_page_for_newcomers_runs_as_it_is_written(tmp_path: Path) -> None:
    page = (ROOT / "docs/how-to/schedule.md").read_text()
    block = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)[0]
    assert 'dist.init_process_group("gloo")\n' in block
    run_ranks(first_block, 2, tmp_path, block.replace('dist.init_process_group("gloo")\n', ""))  # these ranks have done so
