"""What ``Schedule.ulysses`` may be told, idea by idea; each is a keyword there, and a key of its line in a plan."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, Literal, TypedDict

from megatron_sp.utils.errors import ConfigError

LossKind = Literal["next_token", "per_token"]


class Region(TypedDict, total=False):
    """Cut hidden states between two modules, instead of the model's inputs.

    Attributes:
        enter: the module whose input is cut.
        leave: the module whose output is whole again.
        arg: of ``enter``: the input that is cut (default: the first).
    """

    enter: str
    leave: str
    arg: str | int


class Inputs(TypedDict, total=False):
    """Of a model that is not transformers': which of its inputs are cut.

    Attributes:
        inputs: names of those that have positions, along ``seq_dim``.
        positions: the one that takes the positions' numbers.
    """

    inputs: list[str]
    positions: str


class Core(TypedDict, total=False):
    """Of such a model: where its attention is.

    Attributes:
        core: glob of the modules that compute it.
        q, k, v: their inputs (default: by these names).
        out: their output, where they have several.
        layout: of these tensors: bshd (default), bhsd or sbhd.
    """

    core: str
    q: str | int
    k: str | int
    v: str | int
    out: str | int
    layout: str


class Options(Region, Inputs, Core, total=False):
    """All of it.

    Attributes:
        overlap_qkv: start each of q's, k's and v's exchanges as soon as it has been projected (separate projections only).
        pad: lengths that the ranks cannot share evenly are padded (default); else refused.
        loss: how a transformers model makes its loss, where its class does not say so.
    """

    overlap_qkv: bool
    pad: bool
    loss: LossKind


def require_known(options: Mapping[str, Any]) -> None:
    """Raises ConfigError: a keyword that there is not; with the nearest one."""
    known = list(Options.__annotations__)
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"ulysses() knows no {name}=, only axis, {', '.join(known)}{hint}")
