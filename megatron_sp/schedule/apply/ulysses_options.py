"""Options of ``Schedule.ulysses`` and ``Schedule.context``, by topic; each is a keyword there, and a key of its line in a plan."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, Literal, TypedDict

from megatron_sp.utils.errors import ConfigError

LossKind = Literal["next_token", "per_token"]


class Region(TypedDict, total=False):
    """Options to cut hidden states between two modules, instead of the model's inputs."""

    enter: str  # the module whose input is cut
    leave: str  # the module whose output is whole again
    arg: str | int  # the input of ``enter`` that is cut (default: the first)


class Inputs(TypedDict, total=False):
    """Options to name the inputs that are cut, for a model that is not of transformers."""

    inputs: list[str]  # names of those that have positions, along ``seq_dim``
    positions: str  # the one that takes position ids


class Core(TypedDict, total=False):
    """Options to name the attention modules of a model that is not of transformers.

    Attributes:
        q, k, v: their inputs (default: by these names).
    """

    core: str  # glob of the modules that compute attention
    q: str | int
    k: str | int
    v: str | int
    out: str | int  # index or key of their output, if there are several
    layout: str  # of these tensors: bshd (default), bhsd or sbhd


class Options(Region, Inputs, Core, total=False):
    """All options of ``Schedule.ulysses``."""

    # start each of q's, k's and v's exchanges as soon as it has been projected (separate projections only)
    overlap_qkv: bool
    pad: bool  # pad lengths that the ranks cannot share evenly (default); else they are refused
    loss: LossKind  # how a transformers model makes its loss, if its class does not determine it


class ContextOptions(Region, total=False):
    """All options of ``Schedule.context``. Those that ``ulysses()`` has, too, are given there if there is such a line.

    Attributes:
        pad, loss: as for ``ulysses()``.
    """

    chunks: int  # chunks of a sequence that each rank is dealt (default: 2, with packed documents 8)
    stages_ahead: int  # exchanges of keys and values under way while those before are attended to (default: 1)
    keep_kv: bool  # keep the keys and values of other ranks for backward, instead of having them sent again
    pad: bool
    loss: LossKind


def require_known(options: Mapping[str, Any]) -> None:
    """Raise ConfigError for an unknown keyword of ulysses(); it suggests the nearest one."""
    _require_known("ulysses", options, list(Options.__annotations__))


def require_known_of_context(options: Mapping[str, Any]) -> None:
    """Raise ConfigError for an unknown keyword of context(), or a number below 1."""
    _require_known("context", options, list(ContextOptions.__annotations__))
    for name in ("chunks", "stages_ahead"):
        value = options.get(name, 1)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"context(): {name} must be a whole number of at least 1, not {value!r}")


def _require_known(method: str, options: Mapping[str, Any], known: list[str]) -> None:
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"{method}() knows no {name}=, only axis, {', '.join(known)}{hint}")


OF_CONTEXT = ("chunks", "stages_ahead", "keep_kv")
"""Options that context() alone has."""
