"""FlashAttention's packages behind one call: version 2 (``flash_attn``), 3 (``flash_attn_interface``) and 4 (``flash_attn.cute``).

    kernel    package         compute capability    dropout    no window       result
    flash2    flash-attn      8.0 and later         yes        (-1, -1)        out
    flash3    flash_attn_3    9.0                   no         (-1, -1)        out; early versions (out, log of sums)
    flash4    flash-attn-4    9.0, 10.x             no         (None, None)    (out, log of sums)

All take q [b, s, heads, d] and k, v [b, s, groups, d] with any strides but the last, align the causal mask at the last
query and the last key, count a window as keys before and after a query's own, and sum gradients with atomics unless
``deterministic`` is set. Arguments go by name: the order differs, and grows in the middle from version to version.

Source: Dao-AILab/flash-attention: flash_attn/flash_attn_interface.py, hopper/flash_attn_interface.py and
flash_attn/cute/interface.py (4.0.0b36); the capabilities of version 4 are those of torch/nn/attention/_fa4.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor

from megatron_sp.ops import availability

FlashName = Literal["flash2", "flash3", "flash4"]
FLASH_NAMES: tuple[FlashName, ...] = get_args(FlashName)


@dataclass(frozen=True)
class FlashPackage:
    """One of the packages.

    Attributes:
        title: name for people.
        package: name in ``availability``.
        majors: first numbers of the compute capabilities that it has kernels for.
        has_dropout: it can drop probabilities.
    """

    title: str
    package: str
    majors: tuple[int, ...]
    has_dropout: bool


PACKAGES: dict[FlashName, FlashPackage] = {
    "flash2": FlashPackage("FlashAttention 2", "flash_attn", (8, 9, 10, 11, 12), True),
    "flash3": FlashPackage("FlashAttention 3", "flash_attn_interface", (9,), False),
    "flash4": FlashPackage("FlashAttention 4", "flash_attn.cute", (9, 10), False),
}
MOST_HEAD_DIM = 256


def dense(name: FlashName, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window: int | None, dropout: float) -> Tensor:
    """Compute attention; with --deterministic-mode by the deterministic backward.

    Args:
        q: [b, s_q, heads, d], in bf16 or fp16.
        k, v: [b, s_k, groups, d].
        window: keys that a query attends to, itself included; None: all.
        dropout: rate of the probabilities; 0 for packages without.
    Returns:
        [b, s_q, heads, d].
    Raises:
        RuntimeError: the package is not available.
    """
    return _out(availability.load(PACKAGES[name].package).flash_attn_func(q, k, v, **_options(name, causal, window, dropout)))


def packed(
    name: FlashName, q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int, *, causal: bool, window: int | None, dropout: float
) -> Tensor:
    """Compute attention of documents one after another; arguments as of ``dense``.

    Args:
        q: [tokens, heads, d].
        k, v: [tokens, groups, d].
        ends: cumulative lengths, int32 [n + 1], from 0.
        longest: tokens of the longest document.
    Returns:
        [tokens, heads, d].
    """
    function = availability.load(PACKAGES[name].package).flash_attn_varlen_func
    lengths = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": longest, "max_seqlen_k": longest}
    return _out(function(q, k, v, **lengths, **_options(name, causal, window, dropout)))


def _options(name: FlashName, causal: bool, window: int | None, dropout: float) -> dict[str, Any]:
    found: dict[str, Any] = {"causal": causal, "deterministic": torch.are_deterministic_algorithms_enabled()}
    if window is not None:
        found["window_size"] = (window - 1, 0)
    if PACKAGES[name].has_dropout:
        found["dropout_p"] = dropout
    elif dropout > 0:
        raise RuntimeError(f"{PACKAGES[name].title} has no attention dropout")
    return found


def _out(result: Any) -> Tensor:
    return cast(Tensor, result[0] if isinstance(result, tuple) else result)
