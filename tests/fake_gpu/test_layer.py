"""A layer and a step take no more launches and bytes than its budget, so that a slow pass cannot come back unseen."""

from __future__ import annotations

import pytest

from fake_gpu.layer import CASES, PAGE, STEPS, layer, page, step

QUICK = ("Llama 7B, 4K", "Llama 7B, 4K, dropout 0.1", "Llama 1B, 64K, sp 8")


def require_within_budget(name: str, *, fused: bool) -> None:
    found, budget = layer(CASES[name], fused=fused), CASES[name].fused if fused else CASES[name].plain
    places = "\n".join(f"{num_bytes / 1e6:9.1f} MB {place}" for place, num_bytes in found.places.most_common(20))
    assert found.launches["rest"] <= budget.launches, f"{found.launches['rest']} launches, {budget.launches} are allowed:\n{places}"
    assert found.gigabytes <= budget.gigabytes, f"{found.gigabytes:.3f} GB, {budget.gigabytes} are allowed:\n{places}"


@pytest.mark.often("Llama 7B, 4K")
@pytest.mark.parametrize("name", QUICK)
def test_a_layer_within_its_budget(name: str) -> None:
    require_within_budget(name, fused=True)


@pytest.mark.long
def test_dropout_costs_little() -> None:
    without, with_dropout = (layer(CASES[name], fused=True) for name in QUICK[:2])
    assert with_dropout.gigabytes <= 1.12 * without.gigabytes


@pytest.mark.often("GPT-2 124M, dropout 0.1")
@pytest.mark.parametrize("name", STEPS)
def test_a_step_within_its_budget(name: str) -> None:
    flags, budget = STEPS[name]
    found = step(flags)
    assert found.total() <= budget, f"{found.total()} launches, {budget} are allowed: {dict(found)}"


@pytest.mark.long
@pytest.mark.parametrize("name, fused", [(name, fused) for name in CASES for fused in (True, False) if name not in QUICK or not fused])
def test_other_layers_within_their_budgets(name: str, fused: bool) -> None:
    require_within_budget(name, fused=fused)


@pytest.mark.long
def test_the_page_is_what_is_counted() -> None:
    assert page() == PAGE.read_text(), "write it again: see its first line"
