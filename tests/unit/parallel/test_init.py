"""Initial weights: a function of seed and name alone."""

from __future__ import annotations

import math

import pytest
import torch
from support import tiny

from megatron_sp.parallel.layers import draw_normal, output_std

PINNED = [0.1485742, -0.624848, 0.7518615, -0.5949003]


def test_the_same_name_and_seed_give_the_same_weight_whatever_was_drawn_before() -> None:
    first = draw_normal((20, 30), 0.02, 1, "a.weight")
    torch.manual_seed(99)
    draw_normal((3,), 1.0, 5, "b.weight")
    assert torch.equal(draw_normal((20, 30), 0.02, 1, "a.weight"), first)


def test_another_name_or_seed_gives_another_weight() -> None:
    draws = [draw_normal((100, 100), 1.0, seed, name).flatten() for seed in (0, 1, 2**40) for name in ("a.weight", "b.weight", "a.bias")]
    for i, a in enumerate(draws):
        for b in draws[:i]:
            assert abs(float((a * b).mean())) < 5 / math.sqrt(a.numel())


def test_no_seed_is_mistaken_for_part_of_a_name() -> None:
    assert not torch.equal(draw_normal((9,), 1.0, 1, "1/x"), draw_normal((9,), 1.0, 11, "/x"))


def test_torchs_generator_is_left_alone() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    tiny.make_model(tiny.BASE)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_distribution() -> None:
    x = draw_normal((300, 400), 0.02, 1, "a.weight").double()
    assert float(x.mean()) == pytest.approx(0.0, abs=5 * 0.02 / math.sqrt(x.numel()))
    assert float(x.std()) == pytest.approx(0.02, rel=5 / math.sqrt(2 * x.numel()))
    assert float((x / 0.02).pow(4).mean()) == pytest.approx(3.0, abs=0.1)


def test_weights_of_a_layer_do_not_depend_on_the_rest_of_the_model() -> None:
    """More layers change the projections into the residual stream alone, and those by their standard deviation alone."""
    small, large = (dict(tiny.make_model(tiny.shape(num_layers=n), perturb=False).named_parameters()) for n in (2, 8))
    for name, p in small.items():
        factor = 2.0 if name.endswith(("linear_proj.weight", "linear_fc2.weight")) else 1.0
        assert torch.allclose(p, large[name] * factor, rtol=1e-6), name


def test_standard_deviations() -> None:
    config = tiny.shape(
        hidden_size=64, ffn_hidden_size=200, kv_channels=16, init_method_std=0.05, max_position_embeddings=300,
        untie_embeddings_and_output_weights=True,
    )  # fmt: skip
    for name, p in tiny.make_model(config, perturb=False).named_parameters():
        if p.ndim == 1:
            assert (p == (1 if name.endswith("layernorm.weight") else 0)).all(), name
            continue
        want = 0.05 / math.sqrt(2 * 3) if name.endswith(("linear_proj.weight", "linear_fc2.weight")) else 0.05
        drawn = p.detach()[:37] if name in ("embedding.word_embeddings.weight", "output_layer.weight") else p.detach()
        assert float(drawn.std()) == pytest.approx(want, rel=5 / math.sqrt(2 * drawn.numel())), name
    assert output_std(0.02, 8) == 0.005


def test_zero_centered_norms_start_at_zero() -> None:
    model = tiny.make_model(tiny.shape(apply_layernorm_1p=True), perturb=False)
    assert not model.decoder.final_layernorm.weight.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_every_dtype_starts_from_the_same_fp32_numbers(dtype: torch.dtype) -> None:
    wide = dict(tiny.make_model(tiny.BASE, torch.float32, perturb=False).named_parameters())
    for name, p in tiny.make_model(tiny.BASE, dtype, perturb=False).named_parameters():
        assert torch.equal(p, wide[name].to(dtype)), name


def test_the_draw_is_pinned() -> None:
    """Two versions of the package that draw differently could not share a run's first checkpoint in a comparison."""
    assert draw_normal((4,), 1.0, 1234, "decoder.layers.0.mlp.linear_fc1.weight").tolist() == pytest.approx(PINNED, rel=1e-6)
