"""From a model to its schedule, by the name that transformers gives its family in ``config.model_type``."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

from torch import nn

from megatron_sp.schedule.core.mesh import AXES, Mesh
from megatron_sp.schedule.presets.common import Blocks, drops, write_vocabulary
from megatron_sp.schedule.schedule import Schedule, schedule
from megatron_sp.utils.errors import ConfigError

Writer = Callable[[Schedule, bool], Blocks]
_WRITERS: dict[str, Writer] = {}


def register_preset(*model_types: str) -> Callable[[Writer], Writer]:
    """Decorator of a function that writes the lines of a family.

    The function gets the schedule, and whether activations between the layers are cut along the sequence over tp; the model is
    ``schedule.model``. It returns where the blocks are. The lines of word embeddings, of the layer over the vocabulary, of ``sequence()``
    and of recomputation are not its business.
    """

    def register(writer: Writer) -> Writer:
        _WRITERS.update(dict.fromkeys(model_types, writer))
        return writer

    return register


def families() -> list[str]:
    """All that are known."""
    return sorted(_WRITERS)


def auto(
    model: nn.Module, mesh: Mesh | None = None, *, tp: int | None = None, sp: int | None = None, seq: bool = False,
    ulysses: bool | None = None, vocab: bool = True, recompute: str | bool = False,
) -> Schedule:  # fmt: skip
    """The schedule of a model of a known family; not applied yet, and more lines may follow.

    Args:
        mesh: of the job. Without one ``tp`` and ``sp`` give sizes, for a schedule that is checked and shown without a job.
        tp, sp: ranks along these axes; beside a mesh they only have to agree with it.
        seq: cut activations between the layers along the sequence over tp (arXiv:2205.05198).
        ulysses: cut sequences over sp (default: where sp is more than 1).
        vocab: split the word embeddings, and the layer over the vocabulary.
        recompute: compute blocks again in backward; True, or the policy of ``.checkpoint()``.
    Raises:
        ConfigError: the family is not known, its model has something that the preset does not cover, or sizes do not fit the mesh.
    """
    s = schedule(model, _mesh(mesh, tp, sp))
    blocks = _writer(model)(s, seq)
    if vocab:
        write_vocabulary(s)
    if seq:
        s.sequence(blocks.first, blocks.last)
    if recompute:
        s[blocks.glob].checkpoint(None if recompute is True else recompute)
    if ulysses or (ulysses is None and s.mesh.sp.size() > 1):
        _write_ulysses(s, blocks)
    return s


def _write_ulysses(s: Schedule, blocks: Blocks) -> None:
    """With a layer over the vocabulary, inputs and labels are cut; anything else behind the blocks may look at the whole sequence."""
    model: Any = s.model
    cuts_inputs = model.get_output_embeddings() is not None
    if cuts_inputs:
        s.ulysses()
    else:
        s.ulysses(enter=blocks.first, leave=blocks.last)
    if drops(model.config):
        _differ_over_sp(s, blocks, everywhere=cuts_inputs)


def _differ_over_sp(s: Schedule, blocks: Blocks, *, everywhere: bool) -> None:
    """Dropout of other positions on each rank. Not around the whole model: which blocks layerdrop leaves out must be the same for all."""
    inside = tuple(f"{path}." for path in s[blocks.glob])
    s[blocks.glob].rng("sp")  # behind the lines of tp, so around them: what is alike for the ranks of tp still differs over sp
    for path, module in s.model.named_modules() if everywhere else ():
        if isinstance(module, nn.Dropout) and not path.startswith(inside):
            s[path].rng("sp")


def _mesh(mesh: Mesh | None, tp: int | None, sp: int | None) -> Mesh:
    if mesh is None:
        return Mesh.sizes(tp or 1, sp or 1)
    for axis, size in (("tp", tp), ("sp", sp)):
        if size is not None and size != mesh.group(axis).size():
            found = ", ".join(f"{a} {mesh.group(a).size()}" for a in AXES)
            raise ConfigError(f"{axis} ({size}) is not that of the mesh ({found}): leave it out, or make another mesh")
    return mesh


def _is_of_transformers(config: Any) -> bool:
    """Whether it is a family of theirs, whose name is no misspelling of another's."""
    return type(config).__module__.startswith("transformers.models.")


def _writer(model: nn.Module) -> Writer:
    config: Any = getattr(model, "config", None)
    name = getattr(config, "model_type", None)
    if name in _WRITERS:
        return _WRITERS[name]
    if name is None:
        raise ConfigError(
            f"{type(model).__name__} has no config.model_type, by which presets are found: write its lines with schedule(model, mesh)"
        )
    near = [] if _is_of_transformers(config) else difflib.get_close_matches(str(name), families(), 2)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    plan = ", or take transformers' own plan with from_hf_plan(model)" if getattr(config, "base_model_tp_plan", None) else ""
    raise ConfigError(
        f"there is no preset for {name!r}, only for {', '.join(families())}{hint}: write its lines with schedule(model, mesh){plan}"
    )
