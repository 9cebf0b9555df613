"""Presets beside their layouts (test_schedule_grid.py): files, what they refuse, transformers' own plans, dropout, every line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.paths import ROOT
from support.preset_models import FAMILIES, batch_of, make
from support.ranks import run_ranks

from megatron_sp.comm.groups import ParallelGroups
from megatron_sp.schedule import Mesh, Schedule, schedule
from megatron_sp.schedule.presets import auto, from_hf_plan
from megatron_sp.utils.errors import ConfigError, NumericsError


def mesh(sp: int = 1) -> Mesh:
    return Mesh.of(ParallelGroups.create(torch.device("cpu"), tp_size=dist.get_world_size() // sp, sp_size=sp))


# files


def round_trip(folder: Path) -> None:
    m = mesh()
    for name in ("bert", "gpt2", "llama", "t5"):  # tied with a bias, Conv1D in blocks, fewer heads than ranks, tied twice
        changes = {"num_key_value_heads": 1} if name == "llama" else {}
        s = auto(make(name, **changes), m)
        before = {key: t.clone() for key, t in s.model.state_dict().items()}
        names = [key for key, _ in s.model.named_parameters()]
        s.apply()
        assert s.applied is not None and [key for key, _ in s.model.named_parameters()] == names
        assert list(s.model.state_dict()) == list(before)
        s.applied.save_pretrained(folder / name)
        again = type(s.model).from_pretrained(folder / name)
        assert again.state_dict().keys() == before.keys()
        assert all(torch.equal(t, before[key]) for key, t in again.state_dict().items())
        with torch.no_grad():
            for p in s.model.parameters():
                p.zero_()
        s.applied.load_full(again.state_dict())
        assert all(torch.equal(t, before[key]) for key, t in s.applied.full_state_dict().items())


def test_save_pretrained_and_back_bit_for_bit(tmp_path: Path) -> None:
    run_ranks(round_trip, 2, tmp_path, tmp_path)


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


# what a preset does not cover


def test_models_that_presets_refuse() -> None:
    with pytest.raises(ConfigError, match=r"a bias of positions for each head, which Ulysses \(sp 2\) does not trade"):
        auto(make("t5"), sp=2)
    odd = make("vit", image_size=12)
    auto(odd, tp=2)
    with pytest.raises(ConfigError, match=r"9 patches and the class token are 10 tokens, which must be a multiple of tp \(4\)"):
        auto(odd, tp=4, seq=True)
    with pytest.raises(ConfigError, match=r"q_proj: num_attention_heads \(4\) must be multiples of tp \(3\): tp 2, 4 would work"):
        auto(make("llama", hidden_size=36, head_dim=6), tp=3).apply()


def uneven() -> None:
    model = auto(make("llama"), mesh(), seq=True).apply()
    with pytest.raises(ConfigError, match=r"scatter at model.layers.0: dim 1 of \[3, 7, 24\] must be a multiple .*pad the batch.*E12"):
        model(**{key: t[:, :7] for key, t in batch_of("llama").items()})


def test_a_length_that_ranks_cannot_share(tmp_path: Path) -> None:
    run_ranks(uneven, 2, tmp_path)


# transformers' own plans, and its own recomputation


def own_plans(names: list[str]) -> None:
    m = mesh()
    for name in names:
        from_hf_plan(make(name), m).verify(batch_of(name))
    few = make("qwen3", num_key_value_heads=1)
    from_hf_plan(few, m).verify(batch_of("qwen3"))


@pytest.mark.long
def test_plans_of_transformers_change_nothing(tmp_path: Path) -> None:
    run_ranks(own_plans, 2, tmp_path, ["llama", "qwen2", "qwen3", "gpt_neox", "llama-classifier"])


def drop(name: str, rate: float, seq: bool = True) -> dict[str, float]:
    """The changes of a configuration that make all its dropout this, but for what its preset refuses."""
    config = make(name).config.to_dict()
    never = ("layerdrop", *(["activation_dropout"] if name == "whisper" and not seq else []))
    return {key: rate for key, value in config.items() if "drop" in key and isinstance(value, float) and not any(n in key for n in never)}


def gradients(s: Schedule, name: str, *, theirs: bool) -> dict[str, torch.Tensor]:
    model: Any = s.apply().double()
    if theirs:
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()  # the older name warns
    torch.manual_seed(5)
    result = model(**{k: v.double() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in batch_of(name).items()})
    value = result.loss if result.get("loss") is not None else result[0].square().sum()
    alike = value.detach().clone().repeat(dist.get_world_size(), 1)
    dist.broadcast(alike[0], 0)
    assert abs(float(alike[0] - value)) <= 1e-12 * abs(float(value)), f"{name}: ranks disagree about the loss"
    value.backward()
    assert s.applied is not None
    s.applied.finish_backward()
    return {key: p.grad for key, p in model.named_parameters() if p.grad is not None}


def with_dropout(names: list[str], sp: int) -> None:
    m = mesh(sp)
    for name in names:
        for seq in (False, True) if sp == 1 else (False,):
            found = [  # each rank computes the whole loss, so that it shows where ranks differ
                gradients(auto(make(name, **drop(name, 0.3, seq)), m, seq=seq, recompute=ours, vocab=False), name, theirs=theirs)
                for ours, theirs in ((False, False), (True, False), (False, True))
            ]
            for other in found[1:]:
                assert found[0].keys() == other.keys()
                for key, grad in found[0].items():
                    torch.testing.assert_close(other[key], grad, rtol=1e-10, atol=1e-12, msg=f"{name}, {seq}: {key}")


@pytest.mark.long  # tests/dist/test_schedule_dropout.py is about the masks themselves
@pytest.mark.parametrize(("names", "sp"), [(FAMILIES, 1), (["bert", "gpt2", "opt", "bert-classifier"], 2)], ids=["tp", "sp"])
def test_dropout_is_alike_where_ranks_agree_and_in_recomputation(tmp_path: Path, names: list[str], sp: int) -> None:
    for name in names:
        make(name)
    run_ranks(with_dropout, 2, tmp_path, names, sp)


# every line of a preset is needed


def drop_each(name: str, seq: bool) -> None:
    m = mesh()
    whole = auto(make(name), m, seq=seq, vocab=False)
    for line in whole.directives:
        if seq and line.do == "sum_gradients":
            continue  # norms inside of heads stand in the region, which sums what is whole
        mutant = schedule(make(name), m)
        mutant.directives = [d for d in whole.directives if d is not line]
        try:
            mutant.verify(batch_of(name))
        except (NumericsError, ConfigError, RuntimeError, ValueError):
            continue
        raise AssertionError(f"{name}, seq={seq}: nobody misses {line}")


@pytest.mark.long
@pytest.mark.parametrize("seq", [False, True], ids=["tp", "tp_seq"])
def test_every_line_is_missed(tmp_path: Path, seq: bool) -> None:
    for name in FAMILIES:
        make(name)
        run_ranks(drop_each, 2, tmp_path, name, seq)
