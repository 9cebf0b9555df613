"""Calls of every function that the dry run knows, in every spelling: what ``support/schedule_rule_oracle.py`` holds against numbers.

A case names its rule, the dims of what it gets (letters are sizes, drawn for each trial, so that some are equal by
accident), and the call. ``f`` in a call is a spelling: of torch, of torch.nn.functional, a method, in place, an
operator. A spelling that does not take these arguments is left out, and a test asks that each spelling has a case.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import get_overridable_functions, resolve_name

from megatron_sp.schedule.check.call_values import plain
from support.schedule_rule_oracle import Case, Input

Call = Callable[..., Any]


@cache
def spellings() -> dict[str, dict[str, Call]]:
    """Of each plain name: the functions of torch that the follower sees under it, by their full names."""
    found: dict[str, dict[str, Call]] = defaultdict(dict)
    for functions in get_overridable_functions().values():
        for f in functions:
            name = getattr(f, "__name__", "")
            name = getattr(f.__self__, "__name__", "") if name == "__get__" else name
            found[plain(name)][resolve_name(f) or name] = f
    for name in ("rand_like", "randn_like"):
        found[name][f"torch.{name}"] = getattr(torch, name)
    for name in ("hardsigmoid", "hardswish", "logsigmoid"):
        f = getattr(F, name)
        found[plain(f.__name__)][f"torch.nn.functional.{name}"] = f
    for name in ("new_zeros", "new_ones", "new_full", "new_empty"):
        found[name][f"torch.Tensor.{name}"] = getattr(Tensor, name)
    for name in ("zeros", "ones", "full", "empty"):
        found[name][f"torch.{name}"] = getattr(torch, name)
    return found


CASES: list[Case] = []


def each(rules: str, inputs: str, *calls: Call, random: bool = False, first: bool = False, **least: int) -> None:
    """A case for every spelling of some rules, or the first alone."""
    for rule in rules.split():
        named = list(spellings()[rule].items())
        for name, f in named[:1] if first else named:
            for i, call in enumerate(calls):
                own(rule, f"{name} of {inputs}" + (f" {i}" if len(calls) > 1 else ""), inputs, _spelled(call, f), random=random, **least)


def _spelled(call: Call, f: Call) -> Call:
    return lambda c, *tensors: call(c, f, *tensors)


def of(rule: str, inputs: str, *calls: Call, random: bool = False, **least: int) -> None:
    """Cases of a rule that are written out."""
    for call in calls:
        own(rule, f"{inputs} {sum(c.rule == rule for c in CASES)}", inputs, call, random=random, **least)


def own(rule: str, label: str, inputs: str, call: Call, *, random: bool, **least: int) -> None:
    CASES.append(Case(rule, label, tuple(Input.of(text) for text in inputs.split(";")), call, least, random))


# element by element

_UNARY = """
    neg contiguous clone detach exp log log2 sqrt rsqrt reciprocal square abs sign sin cos tanh sigmoid gelu silu relu relu6 leaky_relu
    elu selu celu mish softplus softsign hardtanh hardswish hardsigmoid log_sigmoid erf expm1 log1p tan floor ceil round isnan isinf
    isfinite nan_to_num zeros_like ones_like erfc exp2 atan arctan asin arcsin acos arccos sinh cosh asinh acosh atanh
    arctanh sgn frac trunc fix
    logit sinc lgamma digamma positive absolute negative deg2rad rad2deg isposinf isneginf signbit i0 erfinv log10 hardshrink softshrink
    tanhshrink logical_not float double half bfloat16 long int bool data requires_grad_ zero angle conj conj_physical resolve_conj real
"""
each(_UNARY, "+: s h", lambda c, f, x: f(x))
each("exp neg contiguous clone double", "b n*d s", lambda c, f, x: f(x), first=True)
each("imag angle conj conj_physical resolve_conj real abs neg", "c: s h", lambda c, f, x: f(x))
each("invert bitwise_not neg abs double logical_not", "i: s h", lambda c, f, x: f(x))
each("invert bitwise_not logical_not", "m: s h", lambda c, f, x: f(x))
each("empty_like rand_like randn_like", "s h", lambda c, f, x: f(x), random=True)
each("full_like fill", "s h", lambda c, f, x: f(x, 2.0), lambda c, f, x: f(x, x.shape[-1]), lambda c, f, x: f(x, x.shape[0]))
each("threshold _threshold", "+: s h", lambda c, f, x: f(x, 0.4, 0.1), lambda c, f, x: f(x, 0.4, x.shape[-1]))
each("clamp clip", "+: s h", lambda c, f, x: f(x, 0.2, 0.6), lambda c, f, x: f(x, max=0.5), lambda c, f, x: f(x, None, 1 / x.shape[-1]))
each("clamp_min clamp_max", "+: s h", lambda c, f, x: f(x, 0.4), lambda c, f, x: f(x, 1 / x.shape[-1]))
each(
    "leaky_relu elu celu hardshrink softshrink softplus",
    "s h",
    lambda c, f, x: f(x, 0.3),
    lambda c, f, x: f(x, 1 / x.shape[-1]),
)
each("round", "s h", lambda c, f, x: f(x, decimals=1))
each("logit", "+: s h", lambda c, f, x: f(x, 0.2), lambda c, f, x: f(x, eps=1 / (2 + x.shape[-1])))
each("dropout alpha_dropout feature_alpha_dropout dropout1d dropout2d dropout3d", "b c s h", lambda c, f, x: f(x, 0.5, False))
each("dropout alpha_dropout feature_alpha_dropout dropout1d", "b c s", lambda c, f, x: f(x, 0.5, True), random=True)
of(
    "to",
    "s h",
    lambda c, x: x.to(torch.float32),
    lambda c, x: x.to(torch.int64),
    lambda c, x: x.to("cpu"),
    lambda c, x: x.to("cpu", torch.float16),
    lambda c, x: x.to(dtype=torch.float32),
    lambda c, x: x.to(torch.bool),
)
of("to", "s h; s h", lambda c, x, y: x.to(y), lambda c, x, y: x.to(y.float()))
of("to", "s 1; s h", lambda c, x, y: x.to(y))
of("type", "s h", lambda c, x: x.type(torch.float32), lambda c, x: x.type(torch.int32))
of("type_as", "s h; s h", lambda c, x, y: x.type_as(y), lambda c, x, y: x.type_as(y.float()))
of("type_as", "s h; i: s", lambda c, x, y: x.type_as(y))
of("type_as", "s 1; s h", lambda c, x, y: x.type_as(y))
of("requires_grad", "s h", lambda c, x: x * float(x.requires_grad))
of("contiguous", "s h", lambda c, x: x.t().contiguous(), lambda c, x: x.clone(memory_format=torch.contiguous_format))

_BINARY = """
    add sub rsub mul truediv div pow remainder maximum minimum eq ne lt le gt ge logical_and logical_or copysign fmod hypot
    atan2 arctan2 logaddexp logaddexp2 xlogy float_power multiply subtract divide true_divide ldexp isclose heaviside fmin fmax nextafter
    greater greater_equal less less_equal not_equal logical_xor floor_divide max min
    rmul rdiv rpow mod floordiv complex polar
"""
_TWO = lambda c, f, x, y: f(x, y)
each(_BINARY, "+: s h; +: s h", _TWO)
for _shapes in (
    "+: b s h; +: h",
    "+: h; +: b s h",
    "+: s h; +: s 1",
    "+: s 1; +: s h",
    "+: b s h; +: b 1 h",
    "+: s h; +:",
    "+:; +: s h",
    "+: 1 s h; +: b 1 h",
):
    each("add sub mul truediv pow maximum lt hypot", _shapes, _TWO, first=True)
each("add mul sub div truediv maximum", "s h; i: s h", _TWO)
each("and or xor bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift lshift rshift", "i: s h; i: s h", _TWO)
each("and or xor bitwise_and bitwise_or bitwise_xor logical_and logical_or", "m: s h; m: s h", _TWO)
each("add sub mul div truediv floordiv floor_divide", "i: s h; i: s h", _TWO)
_SCALAR = """
    add sub rsub mul rmul truediv div pow rpow remainder mod rdiv eq ne lt le gt ge fmod floor_divide floordiv float_power multiply subtract
    divide true_divide greater less greater_equal less_equal not_equal ldexp xlogy
"""
each(_SCALAR, "+: s h", lambda c, f, x: f(x, 2.0), lambda c, f, x: f(x, x.shape[-1]), lambda c, f, x: f(x, 1 / x.shape[0]))
each("add sub subtract", "s h; s h", lambda c, f, x, y: f(x, y, alpha=2), lambda c, f, x, y: f(x, y, alpha=x.shape[-1]))
each("div divide", "s h", lambda c, f, x: f(x, 2, rounding_mode="floor"), lambda c, f, x: f(x, 3, rounding_mode="trunc"))
each("div divide", "s h; s h", lambda c, f, x, y: f(x, y, rounding_mode="floor"))
each("pow", "+: s h", lambda c, f, x: f(2.0, x))
each("and or xor bitwise_and bitwise_left_shift", "i: s h", lambda c, f, x: f(x, 2), lambda c, f, x: f(x, x.shape[-1]))
each("isclose", "s h; s h", lambda c, f, x, y: f(x, y, 0.5, 0.5), lambda c, f, x, y: f(x, y, atol=x.shape[-1]))
each("add", "s h", lambda c, f, x: f(x, x), lambda c, f, x: f(x, x.mean(0)))
each("where", "m: s h; s h; s h", lambda c, f, m, x, y: f(m, x, y) if f is torch.where else f(x, m, y))
each("where", "m: s h; s h", lambda c, f, m, x: torch.where(m, x, 0.0), lambda c, f, m, x: x.where(m, x.shape[-1]), first=True)
each("where", "m: s 1; s h; h", lambda c, f, m, x, y: torch.where(m, x, y), first=True)
of("where", "s h", lambda c, x: torch.where(x > 0, x, -x), lambda c, x: torch.where(x == x))
each("masked_fill", "s h; m: s h", lambda c, f, x, m: f(x, m, 2.0), lambda c, f, x, m: f(x, m, x.shape[-1]))
each("masked_fill", "s h; m: s 1", lambda c, f, x, m: f(x, m, -1.0), first=True)
each("masked_fill", "s h; m: s h; ", lambda c, f, x, m, v: f(x, m, v))
each("masked_fill", "b s h; m: s h", lambda c, f, x, m: f(x, m, float("-inf")), first=True)
each("lerp", "s h; s h", lambda c, f, x, y: f(x, y, 0.3), lambda c, f, x, y: f(x, y, 1 / x.shape[-1]))
each("lerp", "s h; s h; s h", lambda c, f, x, y, w: f(x, y, w))
each(
    "addcmul addcdiv",
    "s h; s h; +: s h",
    lambda c, f, x, y, z: f(x, y, z),
    lambda c, f, x, y, z: f(x, y, z, value=2),
    lambda c, f, x, y, z: f(x, y, z, value=x.shape[-1]),
)
each("clamp", "s h; s h; s h", lambda c, f, x, y, z: f(x, y, z), lambda c, f, x, y, z: f(x, max=z, min=y))
each("clamp_min clamp_max", "s h; h", _TWO)
each("bucketize", "s h; h", lambda c, f, x, y: f(x, y))  # sorted by nobody, so that they may come cut
each("bucketize", "s h; k", lambda c, f, x, y: f(x, y.sort()[0]))
each("bucketize", "s h; h", lambda c, f, x, y: f(x, y.sort()[0]), lambda c, f, x, y: f(x, torch.tensor([-1.0, 1.0], dtype=x.dtype)))
each("prelu", "b h; h", _TWO)
for _shapes in ("b h s; h", "b h s; 1", "b h s u; h", "h; 1", "b h h; h", "b h s; "):
    each("prelu", _shapes, _TWO, first=True)
of("copy", "s h; s h", lambda c, x, y: x.copy_(y), lambda c, x, y: torch.zeros_like(x).copy_(y))
of("copy", "s h; h", lambda c, x, y: x.copy_(y), lambda c, x, y: torch.zeros(x.shape, dtype=x.dtype).copy_(y))
of("copy", "s h; h", lambda c, x, y: torch.zeros(c.s, c.h, dtype=y.dtype).copy_(y))
of("fill", "s h; ", lambda c, x, y: x.fill_(y))
of("complex", "s h; h", lambda c, x, y: torch.complex(x, y.expand_as(x)))


# moves

each(
    "reshape view",
    "b s n*d",
    *[
        lambda c, f, x: f(x, (c.b, c.s, c.n, c.d)),
        lambda c, f, x: f(x, c.b, c.s, -1, c.d),
        lambda c, f, x: f(x, (c.b, c.s, c.n, -1)),
        lambda c, f, x: f(x, [*x.shape[:-1], -1, c.d]),
        lambda c, f, x: f(x, (-1, x.shape[-1])),
        lambda c, f, x: f(x, (x.shape[0], -1)),
        lambda c, f, x: f(x, (-1,)),
        lambda c, f, x: f(x, (c.b * c.s, c.n * c.d)),
        lambda c, f, x: f(x, (c.b, -1)),
        lambda c, f, x: f(x, (c.b, c.s, c.d, c.n)),
        lambda c, f, x: f(x, (1, c.b, 1, c.s, -1)),
        lambda c, f, x: f(x, tuple(x.shape)),
        lambda c, f, x: f(x, (c.s, c.b, -1)),
        lambda c, f, x: f(x, (c.n, c.d, -1)),
        lambda c, f, x: f(x, (x.shape[0], x.shape[1], 1, -1)),
        lambda c, f, x: f(x, (*x.shape, 1)),
        lambda c, f, x: f(x, (c.b * c.s * c.n, c.d)),
    ],
)
each(
    "reshape view",
    "b*s h",
    lambda c, f, x: f(x, (c.b, c.s, c.h)),
    lambda c, f, x: f(x, (c.b, -1, c.h)),
    lambda c, f, x: f(x, (-1, c.s, c.h)),
)
each(
    "reshape view",
    "b s n d",
    lambda c, f, x: f(x, (c.b, c.s, -1)),
    lambda c, f, x: f(x, (c.b, c.s, c.n * c.d)),
    lambda c, f, x: f(x, (-1, c.n, c.d)),
)
each(
    "reshape view",
    "s q*n*d",
    lambda c, f, x: f(x, (c.s, c.q, c.n, c.d)),
    lambda c, f, x: f(x, (c.s, c.q, -1, c.d)),
    lambda c, f, x: f(x, (c.s, c.n, c.q * c.d)),
)
each("reshape", "s h", lambda c, f, x: f(x, shape=(c.s, c.h, 1)), lambda c, f, x: f(x, shape=(-1,)))
of(
    "view",
    "s h",
    lambda c, x: x.view(torch.int64),
    lambda c, x: x.view(-1, c.h),
    lambda c, x: x.view(size=(-1,)) if False else x.view(1, -1),
)
each(
    "flatten",
    "b s n d",
    lambda c, f, x: f(x),
    lambda c, f, x: f(x, 1),
    lambda c, f, x: f(x, -2),
    lambda c, f, x: f(x, 0, 1),
    lambda c, f, x: f(x, start_dim=2, end_dim=3),
    lambda c, f, x: f(x, 1, -2),
    lambda c, f, x: f(x, end_dim=-2),
)
_UNFLATTEN = (
    lambda c, f, x: f(x, -1, (c.n, c.d)),
    lambda c, f, x: f(x, 2, (-1, c.d)),
    lambda c, f, x: f(x, dim=-1, sizes=(c.n, -1)),
    lambda c, f, x: f(x, 1, (1, -1)),
)
each("unflatten", "b s n*d", *_UNFLATTEN)
of("unflatten", "b s n*d", lambda c, x: x.unflatten(-1, (c.n, c.d)), lambda c, x: x.unflatten(2, (-1, c.d)))
each("view_as reshape_as", "b s n*d; b s n d", _TWO)
each("view_as reshape_as", "b n*d; n*d b", _TWO)
each("transpose swapaxes swapdims", "b s h", lambda c, f, x: f(x, 1, 2), lambda c, f, x: f(x, -1, 0), lambda c, f, x: f(x, 0, -2))
each("transpose", "b s h", lambda c, f, x: f(x, dim0=0, dim1=2), lambda c, f, x: f(x, dim1=-1, dim0=-2))
each("swapaxes", "b s h", lambda c, f, x: f(x, axis0=0, axis1=2))
each("t T", "s h", lambda c, f, x: f(x))
each("t", "h", lambda c, f, x: f(x))
of("T", "b s h", lambda c, x: x.permute(2, 1, 0))
each("mT mH adjoint", "b s h", lambda c, f, x: f(x))
each("H mH adjoint", "c: s h", lambda c, f, x: f(x))
each("permute", "b s h", lambda c, f, x: f(x, (2, 0, 1)), lambda c, f, x: f(x, dims=(-1, 0, -2)), lambda c, f, x: f(x, 1, 2, 0))
each(
    "movedim moveaxis",
    "b s h",
    lambda c, f, x: f(x, 0, 2),
    lambda c, f, x: f(x, -1, 0),
    lambda c, f, x: f(x, (0, 1), (1, 2)),
    lambda c, f, x: f(x, source=1, destination=-1),
)
each("unsqueeze", "s h", *[lambda c, f, x, d=d: f(x, d) for d in (0, 1, 2, -1, -2, -3)], lambda c, f, x: f(x, dim=1))
each(
    "squeeze",
    "1 s 1 h",
    lambda c, f, x: f(x),
    lambda c, f, x: f(x, 0),
    lambda c, f, x: f(x, -2),
    lambda c, f, x: f(x, (0, 2)),
    lambda c, f, x: f(x, dim=2),
    lambda c, f, x: f(x, 3),
    lambda c, f, x: f(x, (1, 0)),
)
each(
    "expand",
    "s 1 h",
    lambda c, f, x: f(x, c.s, 3, c.h),
    lambda c, f, x: f(x, -1, 3, -1),
    lambda c, f, x: f(x, 2, -1, 3, -1),
    lambda c, f, x: f(x, (4, *x.shape)),
    lambda c, f, x: f(x, -1, c.h, -1),
    lambda c, f, x: f(x, -1, x.shape[-1], -1),
)
each("broadcast_to", "s 1 h", lambda c, f, x: f(x, (c.s, 3, c.h)), lambda c, f, x: f(x, (2, x.shape[0], c.s, x.shape[2])))
each("expand_as", "s 1; s h", _TWO)
each("expand_as", "h; s h", _TWO)
each("expand_as", "s 1; b s h", _TWO)
each("broadcast_tensors", "s 1; s h", lambda c, f, x, y: f(x, y))
each("broadcast_tensors", "s 1; h", lambda c, f, x, y: f(x, y))
each(
    "repeat",
    "s h",
    lambda c, f, x: f(x, 2, 1),
    lambda c, f, x: f(x, 1, 3),
    lambda c, f, x: f(x, (2, 1, 1)),
    lambda c, f, x: f(x, 2, 3),
    lambda c, f, x: f(x, 1, x.shape[-1]),
)
each(
    "tile",
    "s h",
    lambda c, f, x: f(x, (2,)),
    lambda c, f, x: f(x, (2, 1)),
    lambda c, f, x: f(x, (2, 1, 1)),
    lambda c, f, x: f(x, dims=(3, 1)),
)
each("repeat", "s 1", lambda c, f, x: f(x, 1, c.s), lambda c, f, x: f(x, c.s, 1))
of("repeat", "s 1; s h", lambda c, x, y: x.repeat(1, y.shape[1]) * y, lambda c, x, y: x.repeat(1, y.shape[0]))
each(
    "repeat_interleave",
    "b n d",
    lambda c, f, x: f(x, 2, 1),
    lambda c, f, x: f(x, 3, dim=-1),
    lambda c, f, x: f(x, repeats=2, dim=0),
    lambda c, f, x: f(x, 2),
    lambda c, f, x: f(x, torch.tensor(2), 1),
    lambda c, f, x: f(x, torch.arange(1, c.n + 1), 1),
    lambda c, f, x: f(x, c.n, 1),
    lambda c, f, x: f(x, x.shape[1], 2),
)
each("flip", "b s h", lambda c, f, x: f(x, (0,)), lambda c, f, x: f(x, [-1]), lambda c, f, x: f(x, dims=(1, 2)), lambda c, f, x: f(x, (1,)))
of("flip", "b s h", lambda c, x: x.flip(1), lambda c, x: x.flip(0, -1))
each(
    "roll",
    "b s h",
    lambda c, f, x: f(x, 1, 1),
    lambda c, f, x: f(x, (1, 2), (0, -1)),
    lambda c, f, x: f(x, 1),
    lambda c, f, x: f(x, shifts=1, dims=-1),
    lambda c, f, x: f(x, x.shape[-1] // 2, 1),
)
each(
    "tril triu", "b s h", lambda c, f, x: f(x), lambda c, f, x: f(x, 1), lambda c, f, x: f(x, diagonal=-1), lambda c, f, x: f(x, x.shape[0])
)
each("tril triu", "s h", lambda c, f, x: f(x))
each("view_as_real", "c: s h", lambda c, f, x: f(x))
each("view_as_complex", "s h", lambda c, f, x: f(torch.stack((x, x), -1)), lambda c, f, x: f(x.unsqueeze(-1).repeat(1, 1, 2)))
each("view_as_complex", "s h k", lambda c, f, x: f(x[..., :2]), lambda c, f, x: f(x.reshape(c.s, -1, 2)), h=2, k=2)
each(
    "unfold",
    "b s h",
    lambda c, f, x: f(x, 1, 2, 1),
    lambda c, f, x: f(x, -1, 2, 2),
    lambda c, f, x: f(x, dimension=0, size=1, step=1),
    s=2,
    h=2,
)
of("unfold", "b c s u", lambda c, x: F.unfold(x, 2), s=2, u=2)
each(
    "pad",
    "b s h",
    lambda c, f, x: f(x, (0, 1)),
    lambda c, f, x: f(x, (0, 0, 1, -1)),
    lambda c, f, x: f(x, [0, 0, 0, 0, 2, 0]),
    lambda c, f, x: f(x, (1, 1), "constant", 2.0),
    lambda c, f, x: f(x, (0, 0, 1, 1), value=1.0),
    lambda c, f, x: f(x, pad=(1, 0), mode="reflect"),
    lambda c, f, x: f(x, (1, 1), mode="circular"),
    lambda c, f, x: f(x, (0, 0)),
    lambda c, f, x: f(x, (0, x.shape[0])),
    lambda c, f, x: f(x, (0, x.shape[2], 0, 0)),
    s=2,
    h=2,
)


# parts

_SPLITS = (
    lambda c, f, x: f(x, x.shape[-1] // 2, -1),
    lambda c, f, x: f(x, [c.h, c.h], -1),
    lambda c, f, x: f(x, [c.h // 2, c.h, c.h - c.h // 2], -1),
    lambda c, f, x: f(x, c.h, dim=-1),
    lambda c, f, x: f(x, [1, c.b - 1]),
    lambda c, f, x: f(x, 2, 1),
    lambda c, f, x: f(x, [x.shape[-1] // 3, x.shape[-1] - x.shape[-1] // 3], 2),
    lambda c, f, x: f(x, x.shape[-1], -1),
    lambda c, f, x: f(x, [x.shape[-1]], -1),
    lambda c, f, x: f(x, 1, -1),
)
each("split split_with_sizes unsafe_split", "b s w*h", *_SPLITS, lambda c, f, x: f(x, split_size_or_sections=2, dim=1), w=2)
each(
    "split",
    "b s h",
    lambda c, f, x: f(x, c.h // 2, -1),
    lambda c, f, x: f(x, x.shape[-1] // 2, dim=-1),
    lambda c, f, x: f(x, x.shape[-1] // 4, dim=-1),
    h=4,
)
each(
    "chunk unsafe_chunk tensor_split",
    "b s h",
    lambda c, f, x: f(x, 2, -1),
    lambda c, f, x: f(x, 2),
    lambda c, f, x: f(x, 3, dim=1),
    lambda c, f, x: f(x, 3, 2),
    lambda c, f, x: f(x, 1, -1),
    lambda c, f, x: f(x, 4, -1),
    h=4,
)
each(
    "tensor_split",
    "b s h",
    lambda c, f, x: f(x, (1, 2), -1),
    lambda c, f, x: f(x, [1], dim=0),
    lambda c, f, x: f(x, [x.shape[-1] // 2], -1),
)
each("chunk", "s h", lambda c, f, x: f(x, chunks=2, dim=-1))
each("vsplit hsplit dsplit", "b s h", lambda c, f, x: f(x, 2), lambda c, f, x: f(x, [1]), lambda c, f, x: f(x, 1))
each("hsplit", "h", lambda c, f, x: f(x, 2), lambda c, f, x: f(x, [1]))
each("unbind", "b s h", lambda c, f, x: f(x), lambda c, f, x: f(x, 1), lambda c, f, x: f(x, dim=-1))
each("select", "b s h", lambda c, f, x: f(x, 1, 0), lambda c, f, x: f(x, dim=-1, index=0), lambda c, f, x: f(x, 0, -1))
each(
    "narrow",
    "b s h",
    lambda c, f, x: f(x, 1, 0, 1),
    lambda c, f, x: f(x, -1, 1, x.shape[-1] - 1),
    lambda c, f, x: f(x, dim=2, start=0, length=x.shape[-1]),
    lambda c, f, x: f(x, 2, 0, x.shape[2] // 2),
)
each("glu", "b s h", lambda c, f, x: f(x), lambda c, f, x: f(x, 1), lambda c, f, x: f(x, dim=-3), b=2, s=2, h=2)
of("glu", "b s w*h", lambda c, x: F.glu(x), w=2)


# joined

_JOIN = (lambda c, f, x, y: f([x, y], -1), lambda c, f, x, y: f((x, y)), lambda c, f, x, y: f([x, y], dim=1))
each("cat concat concatenate stack", "b s h; b s h", *_JOIN, lambda c, f, x, y: f(tensors=[x, y], dim=2), lambda c, f, x, y: f([x], -1))
each("cat concat concatenate stack", "b s h; b s h", lambda c, f, x, y: f((x, y), axis=-1), lambda c, f, x, y: f([x, x], axis=0))
each("cat concat concatenate", "b s h; b s g", lambda c, f, x, y: f((x, y), -1), first=True)
each("cat concat concatenate", "b s h; b t h", lambda c, f, x, y: f((x, y), 1), first=True)
of(
    "cat",
    "s h",
    lambda c, x: torch.cat([torch.zeros(0, dtype=x.dtype), x], -1),
    lambda c, x: torch.cat([torch.zeros_like(x), x]),
    lambda c, x: torch.cat([x, torch.zeros(x.shape[0], 1, dtype=x.dtype)], -1),
    lambda c, x: torch.cat([x, torch.zeros(1, x.shape[1], dtype=x.dtype)]),
)
of("stack", "b s h; b s h", lambda c, x, y: torch.stack([x, y], 3), lambda c, x, y: torch.stack([x, y], -2))
each("vstack hstack dstack row_stack", "b s h; b s h", lambda c, f, x, y: f([x, y]))
each("vstack hstack dstack row_stack", "h; h", lambda c, f, x, y: f((x, y)))
each("vstack hstack dstack row_stack", "s h; s h", lambda c, f, x, y: f((x, y)))
each("vstack row_stack", "s h; h", lambda c, f, x, y: f((x, y)), first=True)


def tested(rule: str) -> list[Case]:
    return [case for case in CASES if case.rule == rule]


def half(x: Tensor) -> int:
    return x.shape[-1] // 2
