"""apply() verifies its lines once, before it changes the model: on the model itself, or on a narrow copy of one that is large."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from support.schedule_toys import H, Toy, batch, toy, write
from torch import Tensor, nn

from megatron_sp.comm.groups import ParallelGroups
from megatron_sp.schedule import Mesh, Schedule, presets, schedule
from megatron_sp.schedule.verify import proof
from megatron_sp.schedule.verify.derive import is_open
from megatron_sp.utils.errors import ConfigError, NumericsError


def two_ranks() -> Mesh:
    return Mesh.of(ParallelGroups.create(torch.device("cpu"), tp_size=2))


def lines(s: Schedule) -> list[str]:
    return [str(d) for d in s.directives]


def open_toy(mesh: Mesh, *, dropout: float = 0.1) -> Schedule:
    """A region that is written out, whose last norm is after an all_gather at its input: usual would be another adjoint."""
    s = write(schedule(Toy(dropout=dropout), mesh), seq=True)
    s.directives = [d for d in s.directives if d.do != "sequence"]
    s["blocks.0"].sync("fwd_pre", "scatter")
    s["norm"].sync("fwd_pre", "all_gather")
    s["blocks.0.norm{1,2}"].sum_gradients()
    return s


class _Cross(nn.Module):
    """Its parent uses the weight of a layer inside, and it has two inputs, each of which meets a split layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.other, self.inside = nn.Linear(H, H), nn.Linear(H, H), nn.Module()
        self.inside.up, self.inside.gate, self.inside.down = nn.Linear(H, 8), nn.Linear(H, 8), nn.Linear(8, H)
        self.inside.forward = self.mix

    def mix(self, x: Tensor, y: Tensor) -> Tensor:
        up, gate, down = self.inside.up, self.inside.gate, self.inside.down
        return down(nn.functional.linear(x, up.weight, up.bias) * gate(y))  # type: ignore[arg-type, operator, no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(self.first(x), self.other(x))  # type: ignore[no-any-return]


def what_is_open_is_measured(mesh: Mesh) -> None:
    first, alone = open_toy(mesh), open_toy(mesh)
    first.verify(batch())
    first.apply()
    alone.apply(batch())
    assert lines(first) == lines(alone)
    assert "norm: sync(mode='fwd_pre', op='all_gather', grad='slice')" in lines(alone)
    assert "blocks.*.mlp: sync(mode='fwd_pre', op='all_gather', grad='reduce_scatter')" in lines(alone)
    assert "blocks.0.attention: rng(axis='tp')" in lines(alone)
    trusted = open_toy(mesh)
    trusted.apply(verify=False)
    assert not any("rng" in line or "grad=" in line for line in lines(trusted))
    again = open_toy(mesh)
    again.verify(batch())
    again["norm"].sum_gradients()  # used alike on all ranks: lines that change have not been verified
    with pytest.raises(NumericsError, match=r"norm.*2 times the reference"):
        again.apply(batch())
    assert again.applied is None


def adjoints_that_differ_need_a_line_each(mesh: Mesh) -> None:
    s = schedule(nn.Sequential(*(nn.Linear(8, 8) for _ in range(5))), mesh)
    s["{0,2}"].column()
    s["{1,3}"].sync("fwd_pre", "all_gather", axis=-1)
    s["3"].column(input="prepared", gather=True)
    with pytest.raises(ConfigError, match=r"needs grad='.*' at . and grad='.*' at .: write a line for each \(E10\)"):
        s.verify({"input": torch.randn(3, 8, generator=torch.Generator().manual_seed(1))})


def dropout_inside_stays_the_same(mesh: Mesh) -> None:
    """Behind the sum of the row layer, inside of a module that drops shares; a model that evaluates now may train later."""
    model = Toy(dropout=0.1).eval()
    model.blocks[0].attention.o = nn.Sequential(nn.Linear(H, H), nn.Dropout(0.1))  # type: ignore[union-attr,index]
    s = write(schedule(model, mesh))
    s.directives = [d for d in s.directives if d.on != "blocks.*.attention.o"]
    s["blocks.*.attention.o.0"].row()
    s.apply(batch())
    drawn = [str(d) for d in s.directives if d.do == "rng"]
    assert drawn == ["blocks.0.attention: rng(axis='tp')", "blocks.0.attention.o.1: rng(axis='same')"]
    assert not s.model.training
    said = write(schedule(Toy(dropout=0.1), mesh))
    said["blocks.0.attention"].rng("tp")
    said.apply(batch())
    assert len([d for d in said.directives if d.do == "rng"]) == 1


def without_a_batch(mesh: Mesh) -> None:
    s = open_toy(mesh)
    with pytest.raises(ConfigError) as error:
        s.apply()
    words = ("it is not known what Toy takes: give apply() a batch", "all_gather at blocks.*.mlp (schedule_toys.py:",
             "all_gather at norm (test_schedule_proof.py:", "dropout at blocks.0.attention: use .rng('tp')")  # fmt: skip
    assert all(word in str(error.value) for word in words), error.value
    assert s.applied is None
    plain = write(schedule(Toy(), mesh))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plain.apply()
    assert mesh.tp.rank() or "the lines are not verified (it is not known what Toy takes" in str(caught[0].message)


def what_lines_do_not_show_is_measured(mesh: Mesh) -> None:
    data = {"x": torch.randn(2, H, generator=torch.Generator().manual_seed(1))}
    for copied, right in ((("x",), False), (("y",), False), (("x", "y"), True)):
        s = schedule(_Cross(), mesh)
        for name in copied:
            s["inside"].sync("fwd_pre", "copy", arg=name)
        s["inside.{up,gate}"].column(input="prepared")
        s["inside.down"].row()
        if right:
            s.apply(data)
            continue
        with pytest.raises(NumericsError, match=r"(inside|first|other): the gradients of its .*put.* sum to the reference"):
            s.apply(data)


def a_kernel_of_gpus(mesh: Mesh) -> None:
    """Attention that knows no float64, nor a CPU: the copies compute it otherwise, and the model keeps it."""
    transformers = pytest.importorskip("transformers", reason="transformers (Python >= 3.11) is not installed")
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1, "intermediate_size": 32, "vocab_size": 40}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    model.config._attn_implementation = "flash_attention_2"
    s = presets.auto(model, mesh)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        s.apply()
    assert model.config._attn_implementation == "flash_attention_2"


def lines_that_are_never_verified(mesh: Mesh) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        toy(seq=False).apply()  # on a mesh without a job
        schedule(Toy(), mesh)["blocks.0"].checkpoint().schedule.apply()  # nothing is split
    with pytest.raises(ConfigError, match=r"this mesh has sizes only \(tp 2, sp 1, dp 1\): make it with Mesh.of\(groups\) in a job"):
        toy(seq=False).verify(batch())


def all_of_a_toy() -> None:
    torch.manual_seed(0)
    mesh = two_ranks()
    what_is_open_is_measured(mesh)
    adjoints_that_differ_need_a_line_each(mesh)
    dropout_inside_stays_the_same(mesh)
    without_a_batch(mesh)
    what_lines_do_not_show_is_measured(mesh)
    lines_that_are_never_verified(mesh)
    a_kernel_of_gpus(mesh)


def test_of_small_models(tmp_path: Path) -> None:
    run_ranks(all_of_a_toy, 2, tmp_path)


# large models


def large(name: str, **more: Any) -> Any:
    """A published size, without weights."""
    import transformers

    sizes: dict[str, dict[str, Any]] = {
        "Llama": {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336,
                  "vocab_size": 128256, "num_hidden_layers": 32},
        "Bert": {"hidden_size": 1024, "num_attention_heads": 16, "num_hidden_layers": 24, "intermediate_size": 4096},
        "GPT2": {"n_embd": 1536, "n_head": 24, "n_layer": 48},
        "Qwen3Moe": {"hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4, "num_hidden_layers": 48, "num_experts": 8,
                     "moe_intermediate_size": 768},
        "Gemma2": {"hidden_size": 2304, "num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 26},
    }  # fmt: skip
    head = {"Bert": "ForMaskedLM", "GPT2": "LMHeadModel"}.get(name, "ForCausalLM")
    with torch.device("meta"):
        return getattr(transformers, name + head)(getattr(transformers, f"{name}Config")(**{**sizes[name], **more}))


def of_published_sizes(cases: list[tuple[str, str, bool]]) -> None:
    mesh = two_ranks()
    over_sp = Mesh.of(ParallelGroups.create(torch.device("cpu"), sp_size=2))
    for name, axis, seq in cases:
        on = mesh if axis == "tp" else over_sp
        model = large(name)
        s = presets.auto(model, on, seq=seq) if name in ("Llama", "Bert", "GPT2") else presets.from_hf_plan(model, on)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = proof.prove(model, s.directives, on, s.seq_dim, None)
        assert not any(is_open(d) for d in found), name
        if name == "GPT2" and on is mesh:
            drawn = {(d.on, d.args["axis"]) for d in found if d.do == "rng"}
            assert ("transformer.h.*.attn", "tp") in drawn and ("transformer.h.*.attn.resid_dropout", "same") in drawn, drawn
    s = presets.auto(large("Llama"), mesh)
    s.directives = [d for d in s.directives if (d.on, d.do) != ("model.layers.*.mlp.{gate,up}_proj", "column")]
    s["model.layers.*.mlp"].sync("fwd_pre", "copy") if not any(d.on == "model.layers.*.mlp" for d in s.directives) else None
    s["model.layers.*.mlp.gate_proj"].column(input="prepared")
    s["model.layers.*.mlp.up_proj"].column()
    with pytest.raises((NumericsError, ConfigError), match=r"model.layers.\d.mlp"):
        s.apply()
    assert s.applied is None


PUBLISHED = [("Bert", "tp", True), ("GPT2", "tp", False), ("Llama", "tp", True), ("Llama", "sp", False), ("GPT2", "sp", False),
             ("Qwen3Moe", "tp", False), ("Gemma2", "tp", False)]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("cases", [PUBLISHED[:2], pytest.param(PUBLISHED[2:], marks=pytest.mark.long)], ids=["two", "more"])
def test_of_published_sizes(tmp_path: Path, cases: list[tuple[str, str, bool]]) -> None:
    pytest.importorskip("transformers", reason="transformers (Python >= 3.11) is not installed")
    for name in {"Llama", *(name for name, _, _ in cases)}:
        large(name)
    run_ranks(of_published_sizes, 2, tmp_path, cases)


def narrow_families(names: list[str]) -> None:
    """Every family that has a preset has a narrow copy, which stands for it over tp with the sequence cut, and over sp."""
    from support.preset_models import covers, make

    over_sp, wrong = Mesh.of(ParallelGroups.create(torch.device("cpu"), sp_size=2)), []
    over_tp = two_ranks()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(proof, "_SMALL", 0)
        patch.setattr(proof, "_candidates", lambda model, lines: [(lambda: proof.narrow(model, layers=4), False)])
        for name in names:
            for mesh, seq in ((over_tp, True), *([(over_sp, False)] if covers(name, sp=2) else [])):
                s = presets.auto(make(name), mesh, seq=seq)
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    try:
                        proof.prove(s.model, s.directives, mesh, s.seq_dim, None)
                    except Exception as error:
                        wrong.append(f"{name} over {mesh}: {type(error).__name__}: {error}")
                wrong += [f"{name} over {mesh}: {w.message}" for w in caught if "verified" in str(w.message)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("part", [0, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 2))])
def test_narrow_copies_of_families(tmp_path: Path, part: int) -> None:
    pytest.importorskip("transformers", reason="transformers (Python >= 3.11) is not installed")
    from support.preset_models import FAMILIES, make

    for name in FAMILIES[part::3]:
        make(name)
    run_ranks(narrow_families, 2, tmp_path, FAMILIES[part::3])


def test_narrow_models_have_as_many_heads_and_a_layer_of_each_kind() -> None:
    pytest.importorskip("transformers", reason="transformers (Python >= 3.11) is not installed")
    small = proof.narrow(large("Gemma2"), layers=2)
    config: Any = small.config
    assert (config.num_attention_heads, config.num_key_value_heads, config.num_hidden_layers) == (8, 4, 2)
    assert set(config.layer_types) == {"sliding_attention", "full_attention"} and sum(p.numel() for p in small.parameters()) < 500_000
    assert proof.narrow(large("Bert"), layers=None).config.num_hidden_layers == 24
    with pytest.raises(ConfigError, match="has 71,860,736 parameters, too many"):
        proof.narrow(large("Llama"), layers=None)
