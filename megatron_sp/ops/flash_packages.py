"""FlashAttention's packages behind one call.

``forward_with_lse`` and ``backward_from_lse`` call what is under the public functions, and ``lse_lack`` says what is
not as it is known here.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple, cast, get_args

import torch
from torch import Tensor

from megatron_sp.ops import availability
from megatron_sp.ops.attention_kernels import same_widths

FlashName = Literal["flash2", "flash3", "flash4"]
FLASH_NAMES: tuple[FlashName, ...] = get_args(FlashName)


@dataclass(frozen=True)
class FlashPackage:
    title: str
    package: str  # name in ``availability``
    majors: tuple[int, ...]  # first numbers of the compute capabilities that it has kernels for
    has_dropout: bool
    module: str  # functions under the public ones
    forward: tuple[str, str]  # its function, and the one for packed sequences
    backward: tuple[str, str]
    lse: str  # the argument of backward
    no_window: int | None  # what stands for no window
    allocates: bool  # backward makes the gradients; else it writes into given ones


# All take q [b, s, heads, d] and k, v [b, s, groups, d] with any strides but the last, align the causal mask at the
# last query and key, and sum gradients with atomics unless ``deterministic`` is set. Arguments go by name: their order
# grows in the middle from version to version. Results are the output; or (output, log of sums) in version 4 and in
# early ones of 3. Lse are natural logarithms in fp32, [b, heads, s] or packed [heads, tokens]; a query without keys has
# +inf in version 2 and -inf in 3 and 4.
PACKAGES: dict[FlashName, FlashPackage] = {
    "flash2": FlashPackage(
        "FlashAttention 2", "flash_attn", (8, 9, 10, 11, 12), True, "flash_attn.flash_attn_interface",
        ("_flash_attn_forward", "_flash_attn_varlen_forward"), ("_flash_attn_backward", "_flash_attn_varlen_backward"),
        "softmax_lse", -1, False,
    ),
    "flash3": FlashPackage(
        "FlashAttention 3", "flash_attn_interface", (9,), False, "flash_attn_interface", ("_flash_attn_forward",) * 2,
        ("_flash_attn_backward",) * 2, "softmax_lse", -1, False,
    ),
    "flash4": FlashPackage(
        "FlashAttention 4", "flash_attn.cute", (9, 10, 11, 12), False, "flash_attn.cute.interface",
        ("_flash_attn_fwd",) * 2, ("_flash_attn_bwd",) * 2, "lse", None, True,
    ),
}  # fmt: skip
MOST_HEAD_DIM = 256


class Lengths(NamedTuple):
    # packed sequences: query i of sequence j is row ``ends_q[j] + i``, and its keys begin at row ``ends_k[j]``

    ends_q: Tensor  # cumulative lengths, int32 [n + 1], from 0
    ends_k: Tensor
    longest_q: int
    longest_k: int


class Pairs(NamedTuple):
    # mask of a call: which query attends to which key

    causal: bool  # up to its own position, aligned at the last query and the last key
    window: int | None = None  # keys that a query attends to, itself included
    lengths: Lengths | None = None  # None: there is one sequence in each row of the batch
    # instead of ``window``: keys before and behind a query's own, aligned as ``causal`` is; -1: all
    sides: tuple[int, int] = (-1, -1)

    def reach(self) -> tuple[int, int] | None:
        # keys before and behind a query's own, -1 for all of a side; None if there is no limit
        if self.window is not None:
            return self.window - 1, 0
        return None if self.sides == (-1, -1) else self.sides


_OTHER_NAMES = {"is_causal": "causal"}
# what is passed for arguments of no use here, where they have no default
_NEUTRAL: dict[str, Any] = dict.fromkeys(
    (
        "alibi_slopes", "block_table", "cu_seqlens_k", "cu_seqlens_k_new", "cu_seqlens_q", "k_descale", "k_new",
        "kv_batch_idx", "leftpad_k", "max_seqlen_k", "max_seqlen_q", "out", "out_", "page_table", "q_descale", "qv",
        "rng_state", "rotary_cos", "rotary_sin", "seqlens_rotary", "sequed_k", "sequed_q", "seqused_k", "seqused_q",
        "v_descale", "v_new",
    )
)  # fmt: skip
_NEUTRAL |= {"dropout_p": 0.0, "softcap": 0.0, "return_softmax": False, "num_splits": 1}


def attend(
    name: FlashName, q: Tensor, k: Tensor, v: Tensor, ends: Tensor | None = None, longest: int = 0, *, causal: bool,
    window: int | None, dropout: float,
) -> Tensor:  # fmt: skip
    """Compute attention [b, s_q, heads, d] in bf16 or fp16, or [tokens, heads, d] of documents one after another.

    ``ends`` of documents are int32 [n + 1], from 0; ``dropout`` is 0 for packages without.
    """
    flash, module = PACKAGES[name], availability.load(PACKAGES[name].package)
    options: dict[str, Any] = {"causal": causal, "deterministic": torch.are_deterministic_algorithms_enabled()}
    if ends is not None:
        options |= {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": longest, "max_seqlen_k": longest}
    if window is not None:
        options["window_size"] = (window - 1, 0)
    if flash.has_dropout:
        options["dropout_p"] = dropout
    elif dropout > 0:
        raise RuntimeError(f"{flash.title} has no attention dropout")
    d_v = v.shape[-1]
    if d_v != q.shape[-1]:  # the packages know heads of one width, but for some pairs of widths on some GPUs
        options["softmax_scale"] = 1 / math.sqrt(q.shape[-1])
        q, k, v = same_widths(q, k, v)
    result = (module.flash_attn_func if ends is None else module.flash_attn_varlen_func)(q, k, v, **options)
    out: Tensor = result[0] if isinstance(result, tuple) else result
    return out if d_v == out.shape[-1] else out[..., :d_v]


def forward_with_lse(
    name: FlashName, q: Tensor, k: Tensor, v: Tensor, pairs: Pairs, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute attention without autograd; return it and lse, fp32 [b, heads, s_q], packed [heads, tokens].

    Raises RuntimeError if the package is not as it is known here (``lse_lack``).
    """
    function = _function(name, "forward", packed=pairs.lengths is not None)
    arguments = _arguments(name, pairs, scale)
    out, lse = _call(function, {"q": q, "k": k, "v": v, "return_lse": True, **arguments})[:2]
    shape = (q.shape[1], q.shape[0]) if pairs.lengths is not None else (q.shape[0], q.shape[2], q.shape[1])
    if not isinstance(lse, Tensor) or lse.dtype != torch.float32 or tuple(lse.shape) != shape or out.shape != q.shape:
        raise RuntimeError(f"{PACKAGES[name].title} gives its results in another form than is known here")
    return out, lse


def backward_from_lse(
    name: FlashName, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, pairs: Pairs,
    allocate: Callable[[], tuple[Tensor, Tensor, Tensor]], scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute the gradients of q, k and v from any out and lse, such as those over more keys than these.

    ``allocate`` makes tensors for them, of which only the last stride must be 1; version 4 makes its own.
    """
    flash, function = PACKAGES[name], _function(name, "backward", packed=pairs.lengths is not None)
    arguments: dict[str, Any] = {"dout": grad, "q": q, "k": k, "v": v, "out": out, flash.lse: lse.contiguous()}
    arguments |= _arguments(name, pairs, scale)
    arguments["deterministic"] = torch.are_deterministic_algorithms_enabled()
    if flash.allocates:
        return cast("tuple[Tensor, Tensor, Tensor]", tuple(_call(function, arguments)[:3]))
    grads = allocate()
    _call(function, {**arguments, **dict(zip(("dq", "dk", "dv"), grads, strict=True))})
    return grads


@cache
def lse_lack(name: FlashName) -> str:
    """Return why the package's lse cannot be used; empty if it can. That its results are right is not looked at."""
    flash = PACKAGES[name]
    lacks = availability.find(flash.package).reason
    if lacks:
        return lacks
    needed = ("q", "k", "v", "softmax_scale", "causal")
    of_backward = (*needed, "dout", "out", flash.lse, "deterministic", *(() if flash.allocates else ("dq", "dk", "dv")))
    try:
        found = [(_function(name, "forward", packed), needed) for packed in (False, True)]
        found += [(_function(name, "backward", packed), of_backward) for packed in (False, True)]
    except (ImportError, AttributeError) as error:
        return f"{flash.title} lacks a function that gives or takes the log of the sums: {error}"
    for function, names in found:
        parameters = _parameters(function)
        known = {_OTHER_NAMES.get(n, n) for n in parameters}
        has_window = "window_size" in known or {"window_size_left", "window_size_right"} <= known
        missing = [n for n in names if n not in known] + ([] if has_window else ["window_size"])
        given = {*names, *_NEUTRAL, "window_size", "window_size_left", "window_size_right", "return_lse"}
        unknown = [n for n, p in parameters.items() if p.default is p.empty and _OTHER_NAMES.get(n, n) not in given]
        if missing or unknown:
            what = f"has no argument {missing[0]}" if missing else f"wants an argument {unknown[0]}"
            return f"{getattr(function, '__name__', flash.forward[0])} of {flash.title} {what}"
    return ""


def _function(name: FlashName, direction: Literal["forward", "backward"], packed: bool) -> Callable[..., Any]:
    flash = PACKAGES[name]
    names: tuple[str, str] = getattr(flash, direction)
    return cast("Callable[..., Any]", getattr(availability.load(flash.package, flash.module), names[packed]))


def _arguments(name: FlashName, pairs: Pairs, scale: float) -> dict[str, Any]:
    none = PACKAGES[name].no_window
    left, right = (none if side == -1 else side for side in pairs.reach() or (-1, -1))
    found: dict[str, Any] = {"softmax_scale": scale, "causal": pairs.causal}
    found |= {"window_size": (left, right), "window_size_left": left, "window_size_right": right}
    if pairs.lengths is not None:
        names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
        found |= dict(zip(names, pairs.lengths, strict=True))
    return found


def _call(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    passed = {}
    for name, parameter in _parameters(function).items():
        wanted = _OTHER_NAMES.get(name, name)
        if wanted in arguments:
            passed[name] = arguments[wanted]
        elif parameter.default is parameter.empty:
            passed[name] = _NEUTRAL[name]
    return function(**passed)


@cache
def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(getattr(function, "_init_fn", function)).parameters
