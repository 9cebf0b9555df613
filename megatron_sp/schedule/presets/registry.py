"""Registry of presets by model family, which transformers names in ``config.model_type``."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from megatron_sp.schedule.core.directives import Mesh
from megatron_sp.schedule.schedule import Schedule, schedule
from megatron_sp.utils.errors import ConfigError


class Around(NamedTuple):
    """Collectives around layers that are split by columns and then by rows."""

    enter: str  # operation for ``sync("fwd_pre", ...)`` before the first of them
    leave: str  # operation for ``row(...)`` at the last of them


class Blocks(NamedTuple):
    """Paths of a model's blocks, as a preset returns them."""

    glob: str
    first: str  # the block before which activations are split along the sequence, if they are
    last: str  # the module after which they are whole again: the norm after the blocks, or the last block


def around(seq: bool) -> Around:
    """Return the collectives for activations between the layers that are split along the sequence, or whole on every rank."""
    return Around("all_gather", "reduce_scatter") if seq else Around("copy", "all_reduce")


def config_of(s: Schedule) -> Any:
    """Return the model's configuration. Raises ConfigError: it has ``add_cross_attention``, which its preset does not cover."""
    config: Any = s.model.config
    if getattr(config, "add_cross_attention", False):
        raise ConfigError(
            f"{type(s.model).__name__} has cross attention (add_cross_attention), which the preset of {config.model_type} does not cover:"
            " write its lines with schedule(model, mesh)"
        )
    return config


def base_of(s: Schedule) -> str:
    """Return the prefix of the base model's modules: such as "model." in a model with a head, empty in the base model itself."""
    prefix = getattr(s.model, "base_model_prefix", "")
    return f"{prefix}." if prefix and isinstance(getattr(s.model, prefix, None), nn.Module) else ""


def module_or_none(s: Schedule, path: str) -> nn.Module | None:
    """Return the module at a path, or None."""
    try:
        return s.model.get_submodule(path)
    except AttributeError:
        return None


def share_key_values(s: Schedule, attention: str, queries: int, key_values: int) -> None:
    """Let each rank's queries use one key/value head, if there are fewer such heads than ranks."""
    size = s.mesh.tp.size()
    if key_values < size and size % key_values == 0:
        s[attention].set("num_key_value_groups", queries // size)


def drops(config: Any) -> bool:
    """Return whether there is any dropout in the blocks."""
    inside = [
        value
        for name, value in config.to_dict().items()
        if "drop" in name and not name.startswith(("summary_", "classifier_"))
    ]
    return any(isinstance(value, float) and value > 0 for value in inside)


def differ(s: Schedule, blocks: str, *split: str, seq: bool) -> None:
    """Make dropout differ between tp ranks: in whole blocks if the sequence is split, otherwise only in the split modules."""
    if not drops(s.model.config):
        return
    for glob in [blocks] if seq else split:
        s[glob].rng("tp")


def write_vocabulary(s: Schedule) -> None:
    # split the word embeddings and the output layer along the vocabulary; tied ones together
    weights = {id(m.weight) for m in _vocabularies(s.model) if isinstance(m, (nn.Embedding, nn.Linear))}
    done = set()
    for path, module in s.model.named_modules():
        if isinstance(module, (nn.Embedding, nn.Linear)) and id(module.weight) in weights and id(module) not in done:
            done.add(id(module))
            s[path].vocab_parallel()


def _vocabularies(model: Any) -> list[Any]:
    # the word embeddings and the output layer; for a model of several models (CLIP), those of each
    try:
        return [model.get_input_embeddings(), model.get_output_embeddings()]
    except NotImplementedError:
        return [m for child in model.children() if hasattr(child, "get_input_embeddings") for m in _vocabularies(child)]


Writer = Callable[[Schedule, bool], Blocks]
_WRITERS: dict[str, Writer] = {}


def register_preset(*model_types: str) -> Callable[[Writer], Writer]:
    """Decorate a function that writes the lines of a family.

    The function takes the schedule, and whether activations between the layers are split along the sequence over tp;
    the model is ``schedule.model``. It returns the paths of the blocks. It does not write the lines of word embeddings,
    output layer, ``sequence()`` and recomputation, which ``auto`` adds.
    """

    def register(writer: Writer) -> Writer:
        _WRITERS.update(dict.fromkeys(model_types, writer))
        return writer

    return register


def families() -> list[str]:
    """Return the known families."""
    return sorted(_WRITERS)


def auto(
    model: nn.Module, mesh: Mesh | None = None, *, tp: int | None = None, sp: int | None = None, cp: int | None = None,
    seq: bool = False, ulysses: bool | None = None, context: bool | None = None, vocab: bool = True, recompute: str | bool = False,
) -> Schedule:  # fmt: skip
    """Make the schedule of a model of a known family; it is not yet applied, and lines may be added.

    Args:
        mesh: mesh of the job. Without one, ``tp``, ``sp`` and ``cp`` give the sizes of a schedule that is checked and
            shown without a job.
        tp, sp, cp: sizes of these axes; if there is a mesh, they must agree with it.
        seq: split activations between the layers along the sequence over tp (arXiv:2205.05198).
        ulysses: split sequences over sp (default: if sp is above 1).
        context: deal sequences to the ranks of cp (default: if cp is above 1).
        vocab: split the word embeddings and the output layer along the vocabulary.
        recompute: recompute blocks in backward; True, or the policy of ``.checkpoint()``.
    Raises:
        ConfigError: the family is unknown, the model has a feature that the preset does not cover, or sizes do not
            agree with the mesh.
    """
    s = schedule(model, _mesh(mesh, {"tp": tp, "sp": sp, "cp": cp}))
    blocks = _writer(model)(s, seq)
    if vocab:
        write_vocabulary(s)
    if seq:
        s.sequence(blocks.first, blocks.last)
    if recompute:
        s[blocks.glob].checkpoint(None if recompute is True else recompute)
    ulysses = ulysses if ulysses is not None else s.mesh.sp.size() > 1
    context = context if context is not None else s.mesh.cp.size() > 1
    if ulysses or context:
        _cut_sequences(s, blocks, ulysses=ulysses, context=context)
    return s


def _cut_sequences(s: Schedule, blocks: Blocks, *, ulysses: bool, context: bool) -> None:
    """Cut sequences from inputs to labels if there is an output layer, else in the blocks only, as other heads may use whole sequences."""
    model: Any = s.model
    cuts_inputs = model.get_output_embeddings() is not None
    region = {} if cuts_inputs else {"enter": blocks.first, "leave": blocks.last}
    if ulysses:
        s.ulysses(**region)
    if context:
        s.context(**({} if ulysses else region))
    if drops(model.config):
        _differ_over_sp(s, blocks, everywhere=cuts_inputs)


def _differ_over_sp(s: Schedule, blocks: Blocks, *, everywhere: bool) -> None:
    # make dropout differ over sp, but not around the whole model: layerdrop must skip the same blocks on all ranks
    inside = tuple(f"{path}." for path in s[blocks.glob])
    s[blocks.glob].rng(
        "sp"
    )  # after the lines of tp, so around them: what is alike for the ranks of tp still differs over sp
    for path, module in s.model.named_modules() if everywhere else ():
        if isinstance(module, nn.Dropout) and not path.startswith(inside):
            s[path].rng("sp")


def _mesh(mesh: Mesh | None, sizes: dict[str, int | None]) -> Mesh:
    if mesh is None:
        return Mesh.sizes(**{axis: size or 1 for axis, size in sizes.items()})
    for axis, size in sizes.items():
        if size is not None and size != mesh.group(axis).size():
            raise ConfigError(f"{axis} ({size}) is not that of the mesh ({mesh}): leave it out, or make another mesh")
    return mesh


def _is_of_transformers(config: Any) -> bool:
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
    plan = (
        ", or take transformers' own plan with from_hf_plan(model)"
        if getattr(config, "base_model_tp_plan", None)
        else ""
    )
    raise ConfigError(
        f"there is no preset for {name!r}, only for {', '.join(families())}{hint}: write its lines with schedule(model, mesh){plan}"
    )
