"""The reference on files of Megatron: a wrong era gives other logits, --set counts. That it gives ours, tests of reading show."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from support.convert_models import BERT, LLAMA, SIZES, Tensors
from support.megatron_files import Kind, rank_trees, save

from megatron_sp.config.schema import ModelConfig
from megatron_sp.convert import reference as megatron
from megatron_sp.convert.model import Model, parameter_shapes
from megatron_sp.convert.reference import Rows
from megatron_sp.convert.verify import LIMITS, Result, Side, compare, our_side

SHAPES: dict[str, dict[str, Any]] = {
    "gpt": {**SIZES, "num_layers": 4, "gelu_approximate": "tanh"},
    "untied": {**SIZES, "num_layers": 4, "untie_embeddings_and_output_weights": True, "squared_relu": True, "apply_layernorm_1p": True},
    "llama": {**LLAMA, "num_layers": 4, "qk_layernorm": True, "rotary_percent": 0.5, "kv_channels": 8},
    "bert": {**BERT, "num_layers": 4, "norm_epsilon": 1e-5, "gelu_approximate": "none"},
}


def random_model(shape: str) -> Model:
    config = ModelConfig(**SHAPES[shape])
    draw = torch.Generator().manual_seed(3)
    tensors = {n: 0.4 * torch.randn(s, generator=draw, dtype=torch.float64) for n, s in parameter_shapes(config).items()}
    return Model(config, Tensors(tensors))


def computed(folder: Path, shape: str, kind: Kind, layout: str | None = None, **args: Any) -> list[Result]:
    """Our model against the reference on files that hold the same weights."""
    model = random_model(shape)
    save(folder, rank_trees(model.config, model.store.contents, kind, **args))  # type: ignore[attr-defined]
    return against_reference(model, folder / "iter_0000010", layout)


def against_reference(model: Model, folder: Path, layout: str | None, given: dict[str, Any] | None = None) -> list[Result]:
    tokens = torch.randint(37, (3, 16), generator=torch.Generator().manual_seed(4))
    rows = Rows(tokens, [16, 9, 1], (torch.arange(16) > 6).long().repeat(3, 1))
    reference = Side("reference", lambda rows, cast: megatron.open_folder(folder, cast, layout, 37, given).run(rows))

    def cast(t: torch.Tensor) -> torch.Tensor:
        return t.double()

    return compare((our_side(model), reference), (cast, cast), rows)


def worst(results: list[Result]) -> float:
    assert "logits" in results[-1].name
    return max(r.error for r in results)


def test_megatron_deepspeed_writes_its_norm_in_small_letters(tmp_path: Path) -> None:
    assert worst(computed(tmp_path, "llama", Kind("legacy", tp=2), normalization="rmsnorm")) <= LIMITS[torch.float64]


GIVEN: dict[str, dict[str, Any]] = {  # what files without arguments do not tell
    "gpt": {"num_attention_heads": 4},
    "untied": {"num_attention_heads": 4, "squared_relu": True, "apply_layernorm_1p": True},
    "llama": {
        "num_attention_heads": 4, "position_embedding_type": "rope", "rotary_base": 5000.0, "rotary_percent": 0.5, "norm_epsilon": 1e-6,
        "kv_channels": 8,
    },
}  # fmt: skip


@pytest.mark.parametrize("shape", GIVEN)
def test_settings_of_the_command_line_stand_for_arguments(tmp_path: Path, shape: str) -> None:
    model = random_model(shape)
    trees = rank_trees(model.config, model.store.contents, Kind("legacy", tp=2, version=3.0))  # type: ignore[attr-defined]
    for tree in trees.values():
        del tree["args"]
    save(tmp_path, trees)
    assert worst(against_reference(model, tmp_path / "iter_0000010", None, GIVEN[shape])) <= LIMITS[torch.float64]


@pytest.mark.parametrize(("shape", "given"), [
    ("llama", {"rotary_base": 6000.0}), ("llama", {"norm_epsilon": 1e-4}), ("llama", {"window_size": 4}),
    ("llama", {"position_embedding_type": "none"}), ("gpt", {"gelu_approximate": "none"}),
    ("llama", {"use_rope_scaling": True, "rope_scaling_original_length": 8, "rope_scaling_low_freq_factor": 1.0}),
])  # fmt: skip
def test_settings_of_the_command_line_win_over_arguments(tmp_path: Path, shape: str, given: dict[str, Any]) -> None:
    """Our model has them, and so has the reference; without them it has not."""
    model = random_model(shape)
    save(tmp_path, rank_trees(model.config, model.store.contents, Kind("core", tp=2)))  # type: ignore[attr-defined]
    changed, folder = replace(model, config=replace(model.config, **given)), tmp_path / "iter_0000010"
    assert worst(against_reference(changed, folder, None, given)) <= LIMITS[torch.float64]
    assert worst(against_reference(changed, folder, None)) > 1e-6


@pytest.mark.parametrize(("shape", "kind", "layout", "args"), [
    ("gpt", Kind("legacy", tp=2, version=1.0), "v0", {}),
    ("gpt", Kind("legacy", tp=2, version=3.0), "flat", {}),
    ("gpt", Kind("legacy", tp=2, version=None), "interleaved", {}),
    ("llama", Kind("legacy", order="flat"), "interleaved", {}),
    ("llama", Kind("core"), None, {"rotary_base": 5500}),
    ("llama", Kind("core"), None, {"norm_epsilon": 1e-4}),
    ("gpt", Kind("core"), None, {"bias_gelu_fusion": False}),
])  # fmt: skip
def test_a_wrong_era_or_argument_shows_in_the_first_layer(
    tmp_path: Path, shape: str, kind: Kind, layout: str | None, args: dict[str, Any]
) -> None:
    results = computed(tmp_path, shape, kind, layout, **args)
    assert results[0].error == 0 and results[1].name == "layer 0" and results[1].error > 1e-6 and results[-1].error > 1e-6


def test_files_without_arguments_are_not_computed(tmp_path: Path) -> None:
    model = random_model("gpt")
    trees = rank_trees(model.config, model.store.contents, replace(Kind(), tp=1))  # type: ignore[attr-defined]
    for tree in trees.values():
        del tree["args"]
    save(tmp_path, trees)
    with pytest.raises(megatron.Unsupported, match="do not hold the arguments"):
        megatron.open_folder(tmp_path / "iter_0000010", lambda t: t, None, 37)
    with pytest.raises(megatron.Unsupported, match="--set use-parallel-residual is not computed"):
        megatron.open_folder(tmp_path / "iter_0000010", lambda t: t, None, 37, {"use_parallel_residual": True})
    (tmp_path / "empty").mkdir()
    with pytest.raises(megatron.Unsupported, match="no mp_rank files"):
        megatron.open_folder(tmp_path / "empty", lambda t: t, None, 37)
