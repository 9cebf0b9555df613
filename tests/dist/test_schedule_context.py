"""Context parallelism for models that are not ours: loss, outputs and every gradient of the whole model, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.core_toys import Toy
from support.preset_models import SIZES, B, V, make, transformers
from support.ranks import run_ranks
from support.sent_bytes import Wire
from test_schedule_ulysses import EARLY, SP, Case, check, check_positions_and_windows, check_regions, hf_batch, refuse, run_cases
from torch import Tensor

from megatron_sp.comm.groups import ParallelGroups
from megatron_sp.parallel import context_parallel
from megatron_sp.parallel.row_mask import RowMask
from megatron_sp.schedule import Mesh, Schedule, presets, schedule
from megatron_sp.schedule.apply.context import Context
from megatron_sp.utils.errors import ConfigError


def mesh(tp: int = 1, sp: int = 1) -> Mesh:
    """All other ranks are cp's."""
    return Mesh.of(ParallelGroups.create(torch.device("cpu"), tp_size=tp, sp_size=sp, cp_size=dist.get_world_size() // (tp * sp)))


def cp(**options: Any) -> dict[str, dict[str, Any]]:
    return {"context": options}


TWO: list[Case] = [  # model, attention, tp, cp, tp_seq, length, padding mask, options of each line
    ("llama", "sdpa", 1, 2, False, 8, True, cp()), ("llama", "eager", 1, 2, False, 7, False, cp(chunks=1)),
    ("llama", "sdpa", 1, 2, False, 2, False, cp(chunks=3, keep_kv=True)), ("bert", "eager", 1, 2, False, 7, True, cp(stages_ahead=2)),
    ("bert", "sdpa", 1, 2, False, 5, False, cp(chunks=1)), ("gpt2", "sdpa", 1, 2, False, 8, False, cp()),
    ("gpt2", "eager", 1, 2, False, 7, True, cp()),
]  # fmt: skip
FOUR: list[Case] = [
    ("llama", "sdpa", 1, 2, False, 10, True, EARLY | cp()), ("llama", "sdpa", 2, 2, True, 7, True, cp()),
    ("llama", "sdpa", 1, 4, False, 10, True, cp()), ("bert", "sdpa", 1, 2, False, 7, True, SP | cp(keep_kv=True)),
    ("bert", "eager", 2, 2, True, 7, True, cp()), ("gpt2", "sdpa", 2, 2, False, 7, True, cp(chunks=1)),
]  # fmt: skip
EIGHT: list[Case] = [("llama", "sdpa", 2, 2, True, 13, True, EARLY | cp()), ("bert", "sdpa", 2, 2, True, 9, True, SP | cp())]


def test_around_ulysses_and_with_tensor_parallelism(tmp_path: Path) -> None:
    run_cases(tmp_path, 4, FOUR)


@pytest.mark.long
def test_with_all_three(tmp_path: Path) -> None:
    run_cases(tmp_path, 8, EIGHT)


# masks and families


def check_scaling() -> None:
    granite = transformers.GraniteConfig(**SIZES, num_key_value_heads=2, attention_multiplier=0.7)
    torch.manual_seed(0)
    schedule(transformers.GraniteForCausalLM(granite), mesh()).context().verify(hf_batch(9))


def check_presets_recomputation_and_dropout() -> None:
    s = presets.auto(make("llama"), mesh(), recompute=True)
    assert [d.do for d in s.directives if d.do in ("ulysses", "context")] == ["context"]
    s.verify(hf_batch(7))
    model = make("bert", hidden_dropout_prob=0.1)
    s = presets.auto(model, mesh())
    assert "sp" in {d.args["axis"] for d in s.directives if d.do == "rng"}
    s.apply(hf_batch(8))
    seen: list[Tensor] = []
    torch.manual_seed(5)
    model.bert.embeddings.dropout.register_forward_hook(lambda _, given, made: seen.append((made == 0) & (given[0] != 0)))
    model(**hf_batch(8))
    masks = [torch.empty_like(seen[0]) for _ in range(dist.get_world_size())]
    dist.all_gather(masks, seen[0])
    assert bool(seen[0].any()) and not torch.equal(masks[0], masks[1]), "each rank has other positions, and drops others"


@pytest.mark.long
def test_masks_on_three_and_four_ranks(tmp_path: Path) -> None:
    run_ranks(lambda: check_positions_and_windows(mesh(), "context"), 3, tmp_path)
    run_ranks(lambda: (check_scaling(), check_regions(mesh(), "context")), 4, tmp_path)


# what is sent, and steps of training


def check_bytes() -> None:
    """Two layers, forward, backward and gradients: a causal row of 16 dealt as a zigzag, and 3 documents that are whole on a rank."""
    model = make("llama").double()
    s = schedule(model, mesh())
    s.context()
    s.apply(verify=False)
    ids = torch.randint(1, V, (B, 16), generator=torch.Generator().manual_seed(3))
    row = B * 2 * 2 * (24 // 4) * 8  # k and v of 2 heads, fp64
    for positions, sent in ((None, (4, 8)), (torch.arange(16) % 4, (0, 0))):
        given = {} if positions is None else {"position_ids": positions.expand(B, -1)}
        with Wire(2) as wire:
            model(input_ids=ids, use_cache=False, **given)["logits"].sum().backward()
        mine, other = sent[dist.get_rank()], sent[1 - dist.get_rank()]
        assert wire.num_bytes["alltoall_base_"] == 2 * row * (2 * mine + other), (positions, wire.num_bytes)
        assert wire.calls.keys() <= {"alltoall_base_"}


def check_training() -> None:
    """Steps with ZeRO over cp: the losses of the whole model in one process."""

    def losses(s: Schedule) -> list[float]:
        s.zero(stage=3, optimizer={"lr": 1e-2, "adam_eps": 1e-3})
        s.apply(verify=False)
        assert s.applied is not None and s.applied.zero is not None
        found = []
        for step in range(3):
            given = hf_batch(7 + step)
            loss = s.model(**given)["loss"]
            s.applied.zero.backward(loss)
            s.applied.zero.step()
            found.append(float(loss))
        return found

    cut = schedule(make("llama").double(), mesh())
    cut.context()
    assert losses(cut) == pytest.approx(losses(schedule(make("llama").double(), Mesh())), rel=1e-6), (
        "of fp32, in which transformers computes it"
    )


# what is refused


def check_refused() -> None:
    s = schedule(make("llama"), mesh())
    refuse("no line cuts anything over cp (2)", s)
    refuse("context was asked for twice", schedule(make("llama"), mesh()).context().context())
    refuse("leave axis out, it is cp", schedule(make("llama"), mesh()).context(axis="dp"))
    refuse("leave axis out, it is sp", schedule(make("llama"), mesh()).context().ulysses(axis="cp"))
    refuse("loss of context()", schedule(make("llama"), mesh()).ulysses().context(loss="next_token"))
    refuse("must be a multiple of 4", schedule(make("llama"), mesh()).context(pad=False), hf_batch(7))
    for options in ({"chunks": 0}, {"stages_ahead": True}, {"chunks": 1.5}):
        with pytest.raises(ConfigError, match="must be a whole number of at least 1"):
            schedule(make("llama"), mesh()).context(**options)
    with pytest.raises(ConfigError, match="did you mean chunks"):
        schedule(make("llama"), mesh()).context(chunk=1)
    refuse("for transformers' models alone", schedule(Toy("bshd"), mesh()).context(), {"ids": torch.ones(B, 8, dtype=torch.long)})
    holes = hf_batch(8)
    holes["attention_mask"][0, 3] = 0
    refuse("row 0 has padding before or between its tokens", schedule(make("llama"), mesh()).context(), holes)
    in_front = {name: x.flip(1) for name, x in hf_batch(8).items()}
    refuse("row 1 has padding before or between its tokens", schedule(make("llama"), mesh()).context(), in_front)
    pairs = {**hf_batch(8), "attention_mask": torch.ones(B, 1, 8, 8)}
    refuse("is a mask of pairs", schedule(make("llama"), mesh()).context(), pairs)
    modern = transformers.ModernBertConfig(**SIZES, local_attention=4, global_attn_every_n_layers=2, pad_token_id=0)
    refuse("neither causal", schedule(transformers.ModernBertForMaskedLM(modern), mesh()).context(), hf_batch(12, padding=False))
    gemma = transformers.Gemma2Config(**SIZES, num_key_value_heads=2, head_dim=6, pad_token_id=0)
    refuse("caps its scores", schedule(transformers.Gemma2ForCausalLM(gemma), mesh()).context())
    s = schedule(make("llama", attention_dropout=0.5), mesh()).context()
    s.apply(verify=False)
    s.model.train()
    with pytest.raises(ConfigError, match=r"drops attention \(0.5\)"):
        s.model(**hf_batch(8))


def check_broken() -> None:
    """What makes the results wrong turns up."""
    for owner, name, instead, model in (
        (Context, "_row_mask", lambda _, length, causal, window: RowMask(length, causal, window), lambda: make("bert")),
        (Context, "recognise", lambda *_: (True, None), lambda: make("bert")),
        (context_parallel, "_add_arrived", lambda pass_, d_kv, returning: returning and returning[1].wait() is None, lambda: make("llama")),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, instead)
            assert not schedule(model(), mesh()).context().measure(hf_batch(8)).ok, name


# transformers takes seconds to import: each group of ranks does several things


def of_two_ranks() -> None:
    check(TWO)
    check_positions_and_windows(mesh(), "context")
    check_scaling()
    check_regions(mesh(), "context")


def more_of_two_ranks() -> None:
    check_presets_recomputation_and_dropout()
    check_bytes()
    check_training()
    check_refused()
    check_broken()


def test_models_masks_and_regions_on_two_ranks(tmp_path: Path) -> None:
    for name in ("llama", "bert", "gpt2", "roberta", "mistral"):
        make(name)  # imported once, before the fork
    getattr(transformers, "GraniteForCausalLM")  # noqa: B009
    run_ranks(of_two_ranks, 2, tmp_path)


@pytest.mark.long
def test_presets_bytes_training_and_what_is_refused(tmp_path: Path) -> None:
    for family in ("Llama", "Bert", "ModernBert", "Gemma2"):
        getattr(transformers, f"{family}Model")
    run_ranks(more_of_two_ranks, 2, tmp_path)
