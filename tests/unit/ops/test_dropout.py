"""Dropout by hash: the right share is kept, nothing is correlated with anything, and every slice and every repetition is the same.

Statistics are over fixed seeds, so they either pass or fail for good. A correlation of N independent elements has
standard deviation 1/sqrt(N); 5 of those is the bound, of everything that is compared.
"""

from __future__ import annotations

import math

import pytest
import torch
from support.errors import FP64, assert_law, law_error
from support.op_checks import gradients, leaves, randn
from torch import Tensor

from megatron_sp.ops.attention import head_row_keys
from megatron_sp.ops.dropout import DropoutKeys, fold32, hash_dropout, keep_mask

S, B, C = 64, 8, 256
RATES = (0.1, 0.5, 0.9)
PINNED_KEYS, PINNED_MASK = [[1676577131, -1817995804], [-1397727417, 1374029492]], [[1286887442, 1310208454], [2559395722, 2414640868]]


def rows(seed: int = 1234, step: int = 0, layer: int = 0, site: int = 0, first_sample: int = 0, first_position: int = 0) -> Tensor:
    keys = DropoutKeys.create(seed, step, torch.arange(first_sample, first_sample + B), torch.arange(first_position, first_position + S))
    return keys.row_keys(layer, site)


@pytest.mark.parametrize("seed", [0, 1234, 2**62])
@pytest.mark.parametrize("step", [0, 1, 10**9])
def test_the_step_may_be_a_tensor(seed: int, step: int) -> None:
    ids, positions = torch.tensor([0, 7, 2**33]), torch.arange(4)
    number, tensor = (DropoutKeys.create(seed, s, ids, positions).token_keys for s in (step, torch.tensor(step)))
    assert torch.equal(number, tensor)


def correlation(a: Tensor, b: Tensor, rate: float) -> float:
    """In standard deviations of independent masks."""
    kept = 1 - rate
    return float(((a.double() - kept) * (b.double() - kept)).sum() / (kept * rate) / math.sqrt(a.numel()))


@pytest.mark.parametrize("rate", [0.001, *RATES, 0.999])
def test_the_share_kept(rate: float) -> None:
    for seed in (0, 1, 2**31, 2**62):
        mask = keep_mask(rows(seed), C, rate)
        deviation = math.sqrt(rate * (1 - rate) / mask.numel())
        assert abs(float(mask.double().mean()) - (1 - rate)) < 5 * deviation


@pytest.mark.parametrize("rate", RATES)
def test_the_share_kept_of_every_row_and_every_channel(rate: float) -> None:
    mask = keep_mask(rows(), C, rate).double()
    for share, of in ((mask.mean(-1).flatten(), C), (mask.mean((0, 1)), S * B)):
        normal = (share - (1 - rate)) / math.sqrt(rate * (1 - rate) / of)
        assert float(normal.abs().max()) < 5
        assert float(normal.var()) == pytest.approx(1.0, abs=5 * math.sqrt(2 / normal.numel()))  # neither too even nor clustered


NEIGHBOURS: dict[str, dict[str, int]] = {
    "seed": {"seed": 1235}, "far seed": {"seed": 1234 + 2**32}, "step": {"step": 1}, "layer": {"layer": 1}, "embedding": {"layer": -1},
    "site": {"site": 1}, "sample": {"first_sample": 1}, "far sample": {"first_sample": 2**32}, "negative sample": {"first_sample": -B},
    "position": {"first_position": 1}, "far position": {"first_position": 2**32},
}  # fmt: skip


@pytest.mark.parametrize("what", NEIGHBOURS)
@pytest.mark.parametrize("rate", RATES)
def test_masks_of_other_keys_are_independent(what: str, rate: float) -> None:
    assert abs(correlation(keep_mask(rows(), C, rate), keep_mask(rows(**NEIGHBOURS[what]), C, rate), rate)) < 5


def test_no_two_row_keys_are_equal() -> None:
    """Across everything that has a name; 2^32 keys leave less than one collision among these 28 thousand to be expected."""
    keys = [rows(**other).flatten() for name, other in NEIGHBOURS.items() if name not in ("sample", "position", "negative sample")]
    # "sample" and "position" are shifts of the same rows and overlap on purpose
    everything = torch.cat(
        [rows().flatten(), *keys, *(rows(layer=layer, site=site).flatten() for layer in range(2, 18) for site in range(3))]
    )
    assert everything.unique().numel() >= everything.numel() - 2


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("distance", [1, 2, 3, 4, 8, 16, 64, 128])
def test_channels_and_rows_are_independent_of_their_neighbours(rate: float, distance: int) -> None:
    mask = keep_mask(rows(), C, rate)
    assert abs(correlation(mask[..., distance:], mask[..., :-distance], rate)) < 5
    if distance < S:
        assert abs(correlation(mask[distance:], mask[:-distance], rate)) < 5


@pytest.mark.parametrize("rate", RATES)
def test_no_pair_of_rows_or_channels_is_correlated(rate: float) -> None:
    """All pairs at once: the largest of N correlations grows like sqrt(2 ln N)."""
    mask = (keep_mask(rows(), C, rate).double() - (1 - rate)).view(S * B, C) / math.sqrt(rate * (1 - rate))
    for x in (mask, mask.t()):
        n = x.shape[0]
        pairs = (x @ x.t() / math.sqrt(x.shape[1]))[torch.triu(torch.ones(n, n, dtype=torch.bool), 1)]
        assert float(pairs.abs().max()) < math.sqrt(2 * math.log(pairs.numel())) + (
            3 if rate != 0.5 else 1.5
        )  # skewed masks have heavier tails
        assert float(pairs.var()) == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("rate", RATES)
def test_attention_heads_queries_and_keys_are_independent(rate: float) -> None:
    groups, r = 4, 3
    keys = head_row_keys(rows(), groups, r).view(B, groups * r, S)
    assert keys.unique().numel() >= keys.numel() - 1
    mask = keep_mask(keys, S, rate)  # [b, n, s, s]
    assert abs(float(mask.double().mean()) - (1 - rate)) < 5 * math.sqrt(rate * (1 - rate) / mask.numel())
    for dim in (1, 2, 3):
        for distance in (1, 2, 3, 5, 8, 11):
            ahead, behind = mask.narrow(dim, distance, mask.shape[dim] - distance), mask.narrow(dim, 0, mask.shape[dim] - distance)
            assert abs(correlation(ahead, behind, rate)) < 5, (dim, distance)


def test_bits_of_a_row_key_spread(rate: float = 0.5) -> None:
    """Flipping any one bit of a row key makes an unrelated row; keys that differ in one bit do occur among millions.

    The top bits travel the shortest way through the hash, so the bound is looser than for well-mixed keys: 10 % of
    correlation.
    """
    keys = fold32(torch.randint(-(2**62), 2**62, (512,), generator=torch.Generator().manual_seed(0)) * 2)
    mask = keep_mask(keys, C, rate)
    worst = {
        bit: correlation(mask, keep_mask(keys ^ (1 << bit if bit < 31 else -(2**31)), C, rate), rate) / math.sqrt(mask.numel())
        for bit in range(32)
    }
    assert max(abs(v) for v in worst.values()) < 0.4, worst


@pytest.mark.parametrize("rate", RATES)
def test_any_slice_of_tokens_or_channels_gets_its_slice_of_the_mask(rate: float) -> None:
    sample_ids, positions = torch.tensor([5, -3, 2**40, 0]), torch.arange(100, 108)
    whole = keep_mask(DropoutKeys.create(7, 3, sample_ids, positions).row_keys(2, 1), 10, rate)
    for s, b, c in (
        (slice(2, 5), slice(1, 3), slice(4, 9)),
        (slice(7, 8), slice(0, 1), slice(9, 10)),
        (slice(0, 8), slice(3, 4), slice(0, 10)),
    ):
        part = DropoutKeys.create(7, 3, sample_ids[b], positions[s]).row_keys(2, 1)
        assert torch.equal(keep_mask(part, c.stop - c.start, rate, c.start), whole[s, b, c])


def test_the_mask_is_a_fixed_function() -> None:
    """Checkpoints of a run with dropout resume bit-exactly only while this stays: change the hash, change the format version."""
    keys = DropoutKeys.create(1234, 3, torch.tensor([0, 2**33]), torch.tensor([0, 1]))
    assert keys.row_keys(0, 1).tolist() == PINNED_KEYS
    packed = (keep_mask(keys.row_keys(0, 1), 32, 0.5).long() << torch.arange(32)).sum(-1)
    assert packed.tolist() == PINNED_MASK


def naive(x: Tensor, keys: Tensor, rate: float, first_channel: int, residual: Tensor | None) -> Tensor:
    y = x * keep_mask(keys, x.shape[-1], rate, first_channel) / (1 - rate)
    return y if residual is None else residual + y


@pytest.mark.parametrize("rate", [0.0, *RATES])
@pytest.mark.parametrize("first_channel", [0, 11])
@pytest.mark.parametrize("with_residual", [True, False])
@pytest.mark.parametrize("frozen", [(), ("x",), ("residual",)])
def test_the_op_is_mask_times_scale(rate: float, first_channel: int, with_residual: bool, frozen: tuple[str, ...]) -> None:
    tensors = {"x": randn(8, 3, 5)} | ({"residual": randn(8, 3, 5, seed=1)} if with_residual else {})
    frozen = frozen if with_residual else ()
    keys, grad = rows()[:8, :3], randn(8, 3, 5, seed=2)
    want = gradients(lambda i: naive(i["x"], keys, rate, first_channel, i.get("residual")), leaves(frozen, **tensors), grad)
    got = gradients(
        lambda i: hash_dropout(i["x"] * 1, rate, keys, first_channel=first_channel, residual=i.get("residual")),
        leaves(frozen, **tensors),
        grad,
    )
    assert_law(got, want, FP64)


def test_strides_and_keys_that_broadcast() -> None:
    x, grad, keys = randn(5, 3, 8).permute(2, 1, 0), randn(3, 8, 5, seed=2).transpose(0, 1), rows()[:8, :1]
    want = gradients(lambda i: naive(i["x"], keys, 0.5, 0, None), leaves(x=x), grad)
    assert_law(gradients(lambda i: hash_dropout(i["x"], 0.5, keys), leaves(x=x), grad), want, FP64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_the_same_elements(dtype: torch.dtype) -> None:
    x, keys = randn(8, 3, 64), rows()[:8, :3]
    got = hash_dropout(x.to(dtype), 0.1, keys)
    assert torch.equal(got != 0, keep_mask(keys, 64, 0.1))
    assert law_error(got, hash_dropout(x.to(dtype).double(), 0.1, keys)) <= torch.finfo(dtype).eps


@pytest.mark.parametrize("rate, kept", [(1e-12, 1.0), (1 - 1e-12, 0.0)])
def test_rates_beyond_the_resolution_of_the_hash(rate: float, kept: float) -> None:
    assert abs(float(keep_mask(rows(), C, rate).double().mean()) - kept) < 1e-6
