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


def mesh(tp: int) -> Mesh:
    return Mesh.of(ParallelGroups.create(torch.device("cpu"), tp_size=tp, sp_size=dist.get_world_size() // tp))


def check_hugging_face(cases: list[tuple[str, str, int, bool, int, bool, bool]]) -> None:
    for name, kind, tp, seq, length, padding, overlap in cases:
        s = plain(name, mesh(tp), seq=seq, attn_implementation=kind).ulysses(overlap_qkv=overlap)
        try:
            s.verify(hf_batch(length, padding))
        except Exception as error:
            raise AssertionError(f"{(name, kind, tp, seq, length, padding, overlap)}: {error}") from error


TWO = [
    # model, attention, tp, tp_seq, length, padding mask, overlap
    ("llama", "sdpa", 1, False, 8, True, False),
    ("llama", "eager", 1, False, 7, False, False),
    ("llama", "sdpa", 1, False, 7, True, True),
    ("bert", "eager", 1, False, 7, True, False),
    ("bert", "sdpa", 1, False, 7, True, True),
    ("gpt2", "sdpa", 1, False, 8, False, False),
    ("gpt2", "eager", 1, False, 7, True, False),
]
FOUR = [
    ("llama", "sdpa", 2, True, 7, True, True),
    ("llama", "sdpa", 1, False, 10, True, True),  # two key/value heads for four ranks
    ("bert", "eager", 2, True, 7, True, True),
    ("gpt2", "sdpa", 2, False, 7, True, False),
]


def test_on_two_ranks(tmp_path: Path) -> None:
    run_ranks(check_hugging_face, 2, tmp_path, TWO)


def test_with_tensor_parallelism_and_few_key_value_heads(tmp_path: Path) -> None:
    run_ranks(check_hugging_face, 4, tmp_path, FOUR)


# models that are not transformers', and sequences that are cut inside


def check_toys() -> None:
    ids = torch.randint(0, V, (B, 7), generator=torch.Generator().manual_seed(2))
    for layout in ("bshd", "sbhd", "bhsd"):
        given = {"ids": ids.t().contiguous() if layout == "sbhd" else ids}
        core: dict[str, Any] = {"core": "blocks.*.core", "q": "query", "layout": layout}
        s = schedule(Toy(layout), mesh(1), seq_dim=0 if layout == "sbhd" else 1)
        s.ulysses(inputs=["ids"], positions="at", **core).verify(given)
        s = schedule(Toy(layout, pools=True), mesh(1), seq_dim=0 if layout == "sbhd" else 1)
        s.ulysses(enter="blocks.0", leave="norm", **core).verify(given)


def check_regions() -> None:
    s = schedule(make("llama"), mesh(1))
    s.ulysses(enter="model.layers.0", leave="model.norm").verify(hf_batch(7))
    config = transformers.BertConfig(**SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=3)
    torch.manual_seed(0)
    s = schedule(transformers.BertForSequenceClassification(config), mesh(1))
    s.ulysses(enter="bert.encoder.layer.0", leave="bert.encoder.layer.1", overlap_qkv=True)
    s.verify({**hf_batch(7), "labels": torch.tensor([0, 2, 1])})


def check_positions_and_windows() -> None:
    """Families whose positions or masks are their own: RoBERTa's count past padding, Mistral's windows, packed documents."""
    torch.manual_seed(0)
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    roberta = transformers.RobertaForMaskedLM(transformers.RobertaConfig(**SIZES, **no_dropout, pad_token_id=1))
    given = hf_batch(7)
    given["input_ids"] = torch.where(given["attention_mask"].bool(), given["input_ids"].clamp(min=2), 1)
    schedule(roberta, mesh(1)).ulysses(overlap_qkv=True).verify(given)
    mistral = transformers.MistralConfig(**SIZES, num_key_value_heads=1, sliding_window=3)
    schedule(transformers.MistralForCausalLM(mistral), mesh(1)).ulysses().verify(hf_batch(8))
    few = hf_batch(8)
    few["labels"][:, 3:] = -100  # the second rank has none
    schedule(make("bert"), mesh(1)).ulysses().verify(few)
    packed = {**hf_batch(8, padding=False), "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0]]).repeat(B, 1)}
    schedule(make("llama"), mesh(1)).ulysses().verify(packed)
    schedule(make("llama"), mesh(1)).ulysses().verify({**packed, "use_cache": False})


def check_rest() -> None:
    check_toys()
    check_regions()
    check_positions_and_windows()
    check_refused()
    check_others_are_left_alone()
    check_order()


REFUSED = ("Lfm2ForCausalLM", "BloomForCausalLM", "BartForConditionalGeneration", "MixtralForCausalLM")


def refuse(part: str, s: Schedule, batch: dict[str, Tensor] | None = None) -> None:
    with pytest.raises((ConfigError, NumericsError)) as caught:
        s.verify(hf_batch(8) if batch is None else batch)
    assert part in str(caught.value), str(caught.value)


def check_refused() -> None:
    on = mesh(1)
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
    refuse("does this to its queries", schedule(transformers.OlmoForCausalLM(clipped), on).ulysses(overlap_qkv=True))


def check_others_are_left_alone() -> None:
    """A model without a schedule computes what it did, bit for bit, beside one with."""
    model, split = (make("llama") for _ in range(2))
    before = model(**hf_batch(8)).logits
    schedule(split, mesh(1)).ulysses().apply()
    split(**hf_batch(8))
    assert torch.equal(model(**hf_batch(8)).logits, before)


def check_order() -> None:
    """q leaves before k is projected; the gradients of v, k and q leave before the first is waited for; v's is used under the others."""
    log: list[str] = []
    model = make("llama")
    schedule(model, mesh(1)).ulysses(overlap_qkv=True).apply()
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


def test_other_models_regions_and_what_is_refused(tmp_path: Path) -> None:
    of_text = ("RobertaForMaskedLM", "MistralForCausalLM", "Qwen3ForCausalLM", "OlmoForCausalLM")
    for name in (*of_text, "BertForSequenceClassification", *REFUSED):
        getattr(transformers, name)  # imported before ranks are forked
    run_ranks(check_rest, 2, tmp_path)
