"""Modules by glob."""

from __future__ import annotations

import pytest
from torch import nn

from megatron_sp.schedule import PathError
from megatron_sp.schedule.core.directives import expand


def block() -> nn.ModuleDict:
    return nn.ModuleDict({"q": nn.Linear(1, 1), "k": nn.Linear(1, 1), "mlp": nn.ModuleDict({"up": nn.Linear(1, 1)})})


def tree() -> nn.Module:
    return nn.ModuleDict({"model": nn.ModuleDict({"layers": nn.ModuleList([block(), block()]), "words": nn.Linear(1, 1)}), "head": block()})


@pytest.mark.parametrize(
    ("glob", "paths"),
    [
        ("", [""]),
        ("model.layers.*.{q,k}", ["model.layers.0.q", "model.layers.0.k", "model.layers.1.q", "model.layers.1.k"]),
        ("{model.words,head}", ["model.words", "head"]),
        ("{model.layers.*.q,head.{q,k}}", None),  # a brace in a brace
        ("model.{layers.1,words}", ["model.layers.1", "model.words"]),
        ("{model.layers.*,head}.mlp.u?", ["model.layers.0.mlp.up", "model.layers.1.mlp.up", "head.mlp.up"]),
        ("**.{up,words}", ["model.layers.0.mlp.up", "model.layers.1.mlp.up", "model.words", "head.mlp.up"]),
        ("model..words", None),
        ("model.words.", None),
    ],
)  # fmt: skip
def test_what_a_glob_names(glob: str, paths: list[str] | None) -> None:
    if paths is None:
        with pytest.raises(PathError, match="names no module"):
            expand(tree(), glob)
    else:
        assert expand(tree(), glob) == paths


def test_a_brace_of_nothing_is_told_with_what_is_there() -> None:
    with pytest.raises(PathError, match=r"no '\{model.wrods,haed\}', the model has model, head"):
        expand(tree(), "{model.wrods,haed}")
