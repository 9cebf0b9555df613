"""Ulysses for models that are not ours: loss, outputs and every gradient of the whole model, and what is said of what cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.core_toys import Toy
from support.preset_models import SIZES, B, V, make, plain, transformers
from support.ranks import run_ranks
from torch import Tensor

from megatron_sp.comm.groups import ParallelGroups
from megatron_sp.parallel.mappings import AsyncAllToAll
from megatron_sp.schedule import Mesh, Schedule, schedule
from megatron_sp.utils.errors import ConfigError, NumericsError


def hf_batch(length: int, padding: bool = True) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(1, V, (B, length), generator=g)
    if not padding:
        return {"input_ids": ids, "labels": ids}
    mask = (torch.arange(length) < torch.tensor([length, 5, 2])[:, None]).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.where(mask.bool(), ids, -100)}


def mesh(tp: int = 1, cp: int = 1) -> Mesh:
    """All other ranks are sp's."""
    return Mesh.of(ParallelGroups.create(torch.device("cpu"), tp_size=tp, cp_size=cp, sp_size=dist.get_world_size() // (tp * cp)))


# model, attention, tp, cp, tp_seq, length, padding mask, options of each line
Case = tuple[str, str, int, int, bool, int, bool, dict[str, dict[str, Any]]]
SP: dict[str, dict[str, Any]] = {"ulysses": {}}
EARLY: dict[str, dict[str, Any]] = {"ulysses": {"overlap_qkv": True}}


def check(cases: list[Case]) -> None:
    for case in cases:
        name, kind, tp, cp, seq, length, padding, lines = case
        s = plain(name, mesh(tp, cp), seq=seq, attn_implementation=kind)
        for do, options in lines.items():
            getattr(s, do)(**options)
        try:
            s.verify(hf_batch(length, padding))
        except Exception as error:
            raise AssertionError(f"{case}: {error}") from error


def run_cases(tmp_path: Path, ranks: int, cases: list[Case]) -> None:
    for name, *_ in cases:
        make(name)  # its module is imported once, before the fork
    run_ranks(check, ranks, tmp_path, cases)


TWO: list[Case] = [
    ("llama", "sdpa", 1, 1, False, 8, True, SP), ("llama", "eager", 1, 1, False, 7, False, SP),
    ("llama", "sdpa", 1, 1, False, 7, True, EARLY), ("bert", "eager", 1, 1, False, 7, True, SP),
    ("bert", "sdpa", 1, 1, False, 7, True, EARLY), ("gpt2", "sdpa", 1, 1, False, 8, False, SP),
    ("gpt2", "eager", 1, 1, False, 7, True, SP),
]  # fmt: skip
FOUR: list[Case] = [
    ("llama", "sdpa", 2, 1, True, 7, True, EARLY), ("bert", "eager", 2, 1, True, 7, True, EARLY),
    ("gpt2", "sdpa", 2, 1, False, 7, True, SP),
    ("llama", "sdpa", 1, 1, False, 10, True, EARLY),  # two key/value heads for four ranks
]  # fmt: skip


def test_on_two_ranks(tmp_path: Path) -> None:
    run_cases(tmp_path, 2, TWO)


def test_with_tensor_parallelism_and_few_key_value_heads(tmp_path: Path) -> None:
    run_cases(tmp_path, 4, FOUR)


# models that are not transformers', and sequences that are cut inside


def check_toys() -> None:
    ids = torch.randint(0, V, (B, 7), generator=torch.Generator().manual_seed(2))
    for layout in ("bshd", "sbhd", "bhsd"):
        given = {"ids": ids.t().contiguous() if layout == "sbhd" else ids}
        core: dict[str, Any] = {"core": "blocks.*.core", "q": "query", "layout": layout}
        s = schedule(Toy(layout), mesh(), seq_dim=0 if layout == "sbhd" else 1)
        s.ulysses(inputs=["ids"], positions="at", **core).verify(given)
        s = schedule(Toy(layout, pools=True), mesh(), seq_dim=0 if layout == "sbhd" else 1)
        s.ulysses(enter="blocks.0", leave="norm", **core).verify(given)


def check_regions(on: Mesh, do: str) -> None:
    s = schedule(make("llama"), on)
    getattr(s, do)(enter="model.layers.0", leave="model.norm").verify(hf_batch(7))
    for kind in ("sdpa", "eager"):
        s = schedule(make("bert-classifier", num_labels=3, attn_implementation=kind), on)
        more = {"overlap_qkv": True} if do == "ulysses" else {}
        getattr(s, do)(enter="bert.encoder.layer.0", leave="bert.encoder.layer.1", **more)
        s.verify({**hf_batch(7), "labels": torch.tensor([0, 2, 1])})


def check_positions_and_windows(on: Mesh, do: str) -> None:
    """Families whose positions or masks are their own: RoBERTa's count past padding, Mistral's windows, packed documents."""

    def verify(name: str, given: dict[str, Any], options: dict[str, Any] | None = None, **changes: Any) -> None:
        getattr(schedule(make(name, **changes), on), do)(**(options or {})).verify(given)

    given = hf_batch(7)
    given["input_ids"] = torch.where(given["attention_mask"].bool(), given["input_ids"].clamp(min=2), 1)
    verify("roberta", given, {"overlap_qkv": True} if do == "ulysses" else {}, pad_token_id=1)
    for window in (3,) if do == "ulysses" else (1, 3, 100):
        verify("mistral", hf_batch(8 if do == "ulysses" else 13), num_key_value_heads=1, sliding_window=window)
    few = hf_batch(8)
    few["labels"][:, 1:] = -100  # one rank has none
    verify("bert", few)
    packed = {**hf_batch(8, padding=False), "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0]]).repeat(B, 1)}
    verify("llama", packed)
    packed["position_ids"][1] = torch.arange(8)
    verify("llama", {**packed, "use_cache": False}, {} if do == "ulysses" else {"chunks": 2})
    if do == "context":
        verify("llama", {**packed, "position_ids": packed["position_ids"][:1]}, {"chunks": 1})


def check_rest() -> None:
    check_toys()
    check_regions(mesh(), "ulysses")
    check_positions_and_windows(mesh(), "ulysses")
    check_refused()
    check_others_are_left_alone()
    check_order()


REFUSED = ("Lfm2ForCausalLM", "BloomForCausalLM", "BartForConditionalGeneration", "MixtralForCausalLM", "SmolLM3ForCausalLM",
           "PhiForCausalLM", "OPTForCausalLM")  # fmt: skip


def refuse(part: str, s: Schedule, batch: dict[str, Tensor] | None = None) -> None:
    with pytest.raises((ConfigError, NumericsError)) as caught:
        s.verify(hf_batch(8) if batch is None else batch)
    assert part in str(caught.value), str(caught.value)


def check_refused() -> None:
    on = mesh()
    refuse("input_ids has 7 positions, which must be a multiple of 2", schedule(make("bert"), on).ulysses(pad=False), hf_batch(7))
    refuse("has no separate projections of q, k and v", schedule(make("gpt2"), on).ulysses(overlap_qkv=True))
    refuse("is not a model of transformers", schedule(Toy(), on).ulysses(enter="blocks.0", leave="norm"), {"ids": torch.ones(B, 8).long()})
    core = {"core": "blocks.*.core", "q": "query"}
    refuse("specify where the sequence of Toy is cut", schedule(Toy(), on).ulysses(**core), {"ids": torch.ones(B, 8).long()})
    refuse("layout must be one of", schedule(Toy(), on).ulysses(**{**core, "layout": "hsbd"}))
    refuse("enter= and leave= belong together", schedule(make("bert"), on).ulysses(enter="bert.encoder.layer.0"))
    idle = schedule(Toy(), on).ulysses(core="idle", q="input", k="input", v="input", inputs=["ids"])
    refuse("went through an exchange", idle, {"ids": torch.ones(B, 8).long()})
    refuse("ulysses was asked for twice", schedule(make("bert"), on).ulysses().ulysses())
    odd = transformers.BertConfig(**{**SIZES, "num_attention_heads": 3})
    refuse("has 3 query heads on this rank", schedule(transformers.BertForMaskedLM(odd), on).ulysses())
    refuse("pooler of BertModel works on whole", schedule(transformers.BertModel(odd), on).ulysses())
    tiny = {"vocab_size": V, "num_hidden_layers": 2, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    convolved = transformers.Lfm2Config(**tiny, num_key_value_heads=2, layer_types=["conv", "full_attention"])
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "vocab_size": V}
    both = transformers.BartConfig(**sizes, d_model=8, encoder_ffn_dim=8, decoder_ffn_dim=8, max_position_embeddings=8)
    balanced = transformers.MixtralConfig(**tiny, num_key_value_heads=2, num_local_experts=2, output_router_logits=True)
    bloom = transformers.BloomConfig(vocab_size=V, hidden_size=8, n_layer=1, n_head=2)
    for model, part in (
        (transformers.Lfm2ForCausalLM(convolved), "layers.0.conv.conv (Conv1d) of Lfm2ForCausalLM goes from position to position"),
        (transformers.BloomForCausalLM(bloom), "BloomForCausalLM does not look its attention up in transformers' table"),
        (transformers.BartForConditionalGeneration(both), "has an encoder and a decoder, two sequences"),
        (transformers.MixtralForCausalLM(balanced), "balances its experts by a loss over the whole sequence"),
    ):
        refuse(part, schedule(model, on).ulysses())
    ids = hf_batch(8)["input_ids"]
    refuse("was given logits_to_keep, as generate() does", schedule(make("llama"), on).ulysses(), {"input_ids": ids, "logits_to_keep": 1})
    refuse("stage must be 0, 1, 2 or 3", schedule(make("bert"), on).zero(4))
    refuse("the optimizer has no rate", schedule(make("bert"), on).zero(1, {"rate": 1.0}))
    qwen = transformers.Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=6)
    refuse("has q_norm, k_norm between", schedule(transformers.Qwen3ForCausalLM(qwen), on).ulysses(overlap_qkv=True))
    clipped = transformers.OlmoConfig(**SIZES, num_key_value_heads=2, clip_qkv=8.0)  # nothing is so large yet
    refuse("clips q, k and v (clip_qkv 8.0)", schedule(transformers.OlmoForCausalLM(clipped), on).ulysses(overlap_qkv=True))
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    some = transformers.SmolLM3Config(**{**SIZES, "num_hidden_layers": 4}, num_key_value_heads=2, **ends)
    part = transformers.PhiConfig(**{**SIZES, "hidden_size": 32}, **ends)
    for model, said in (
        (make("opt"), "leave overlap_qkv out if these do more (test_sch"),  # scales its queries
        (transformers.SmolLM3ForCausalLM(some), "the first module that differs is model.layers.3.self_attn"),  # does not rotate there
        (transformers.PhiForCausalLM(part), "it is not known how model.layers.0.self_attn (PhiAttention) rotates its heads"),
    ):
        refuse(said, schedule(model, on).ulysses(overlap_qkv=True))


def check_others_are_left_alone() -> None:
    """A model without a schedule computes what it did, bit for bit, beside one with."""
    model, split = (make("llama") for _ in range(2))
    before = model(**hf_batch(8)).logits
    schedule(split, mesh()).ulysses().apply()
    split(**hf_batch(8))
    assert torch.equal(model(**hf_batch(8)).logits, before)


def check_order() -> None:
    """q leaves before k is projected; the gradients of v, k and q leave before the first is waited for; v's is used under the others."""
    log: list[str] = []
    model = make("llama")
    schedule(model, mesh()).ulysses(overlap_qkv=True).apply()
    start, end = AsyncAllToAll._start, AsyncAllToAll._end
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AsyncAllToAll, "_start", lambda self, way, x: (log.append("start"), start(self, way, x))[1])
        patch.setattr(AsyncAllToAll, "_end", lambda self, way, x: (log.append("end"), end(self, way, x))[1])
        for part in "qkv":
            projection = model.model.layers[0].self_attn.get_submodule(f"{part}_proj")
            projection.register_forward_pre_hook(lambda *_, part=part: log.append(part))
            projection.weight.register_post_accumulate_grad_hook(lambda _, part=part: log.append(f"d{part}"))
        loss = model(**hf_batch(8)).loss
        assert log[:9] == ["q", "start", "k", "start", "v", "start", "end", "end", "end"]
        log.clear()
        loss.backward()
    assert log[6:] == ["start", "start", "start", "end", "dv", "end", "dk", "end", "dq"]


@pytest.mark.long
def test_other_models_regions_and_what_is_refused(tmp_path: Path) -> None:
    of_text = ("RobertaForMaskedLM", "MistralForCausalLM", "Qwen3ForCausalLM", "OlmoForCausalLM")
    for name in (*of_text, "BertForSequenceClassification", *REFUSED):
        getattr(transformers, name)  # imported before ranks are forked
    run_ranks(check_rest, 2, tmp_path)
