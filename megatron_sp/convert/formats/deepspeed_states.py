"""Contents of a ``*_model_states.pt`` file: weights of a model parallel rank, shapes for ZeRO's files, and settings of
the run.

Source: deepspeed 0.19.8, runtime/engine.py :: _common_checkpoint_state; Megatron-DeepSpeed, checkpointing.py ::
save_checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_sp.convert.archive.torch_files import Object, TensorRecord, TorchFile
from megatron_sp.utils.errors import CheckpointError

Shapes = dict[str, tuple[int, ...]]
_MAX_DEPTH = 16


@dataclass
class ModelStates:
    """Contents of one file."""

    path: Path
    # its weights by name; empty where pipeline stages store them in files of layers
    module: dict[str, TensorRecord] = field(default_factory=dict)
    # names and shapes of the trainable parameters in the order in which ZeRO flattens them, by group; empty without
    # ZeRO
    groups: list[Shapes] = field(default_factory=list)
    # those of parameters that are not trained; in stage 3 a part is one rank's
    frozen_shapes: Shapes = field(default_factory=dict)
    frozen_parts: dict[str, TensorRecord] = field(default_factory=dict)
    shared: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)  # all entries of the file

    @classmethod
    def of(cls, path: Path) -> ModelStates:
        tree = as_dict(TorchFile(path).tree, str(path))
        if "module" not in tree:
            raise CheckpointError(f"{path} has no entry 'module', which model states of DeepSpeed have: it is another"
                                  " kind of file")  # fmt: skip
        for name in ("ds_autoep_layers", "autoep_layers"):
            if tree.get(name):
                raise CheckpointError(f"{path} is of a mixture of experts ({name}), which cannot be converted: there is"
                                      " no such model here")  # fmt: skip
        found = cls(path, settings=tree)
        found.module = dict(_flattened(tree["module"], path)) if tree["module"] is not None else {}
        found.groups = _groups(tree.get("param_shapes"), path)
        found.frozen_shapes = _shapes(tree.get("frozen_param_shapes") or {}, path)
        found.frozen_parts = dict(_flattened(tree.get("frozen_param_fragments") or {}, path))
        found.shared = _shared(tree.get("shared_params"), path)
        return found

    @property
    def args(self) -> Object | None:
        """The arguments of the run, if Megatron stored them."""
        found = self.settings.get("args")
        return found if isinstance(found, Object) else None

    def count(self, *names: str) -> int:
        """Return the first of these entries that is a non-negative number, as an integer; 0 if none is."""
        for name in names:
            if (value := number(self.settings.get(name))) is not None and value >= 0:
                return int(value)
        return 0

    @property
    def universal_info(self) -> dict[str, Any]:
        """The model's description of its parameters for universal checkpoints."""
        found = self.settings.get("universal_checkpoint_info")
        return found if isinstance(found, dict) else {}

    @property
    def shapes(self) -> Shapes:
        return {name: shape for group in self.groups for name, shape in group.items()}


def as_dict(value: Any, where: str) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} must hold a dict, and holds {type(value).__name__}: it is another kind of file,"
                              " or damaged")  # fmt: skip
    return value


def number(value: Any) -> int | float | None:
    """Return a finite number, or the value of an enumeration's member; None: it is neither."""
    if isinstance(value, Object) and len(value.args) == 1:
        value = value.args[0]
    return value if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1 << 63 else None


def plain_name(name: str) -> str:
    return name.removeprefix("module.")


def _flattened(value: Any, path: Path, prefix: str = "", depth: int = 0) -> list[tuple[str, TensorRecord]]:
    found: list[tuple[str, TensorRecord]] = []
    if depth > _MAX_DEPTH:
        raise CheckpointError(f"{path}: its weights are nested more than {_MAX_DEPTH} deep: it is damaged")
    for key, item in as_dict(value, f"{path}, {prefix or 'module'}").items():
        if not isinstance(key, str):
            raise CheckpointError(f"{path}: {prefix or 'module'} has the key {str(key)[:100]!r}, which is not a name")
        if isinstance(item, TensorRecord):
            found.append((plain_name(prefix + key), item))
        elif isinstance(item, dict):
            found += _flattened(item, path, f"{prefix}{key}.", depth + 1)
        elif item is not None and not isinstance(item, bytes | Object):  # _extra_state of transformer_engine
            raise CheckpointError(f"{path}: {prefix}{key} is {type(item).__name__} where a tensor should be")
    return found


def _groups(value: Any, path: Path) -> list[Shapes]:
    if value is None:
        return []
    groups = value if isinstance(value, list) else [value]
    return [_shapes(group, path) for group in groups]


def _shapes(value: Any, path: Path) -> Shapes:
    found: Shapes = {}
    for name, shape in as_dict(value, f"{path}, param_shapes").items():
        sizes = tuple(shape) if isinstance(shape, tuple | list) else None
        if (
            not isinstance(name, str)
            or sizes is None
            or not all(isinstance(n, int) and 0 <= n < 1 << 40 for n in sizes)
        ):
            raise CheckpointError(f"{path}: param_shapes says {str(shape)[:100]!r} of {str(name)[:200]!r}, which is not"
                                  " a shape: it is damaged")  # fmt: skip
        found[plain_name(name)] = sizes
    return found


def _shared(value: Any, path: Path) -> dict[str, str]:
    pairs = as_dict(value, f"{path}, shared_params") if value is not None else {}
    if not all(isinstance(a, str) and isinstance(b, str) for a, b in pairs.items()):
        raise CheckpointError(f"{path}: shared_params must be names, it is damaged")
    return {plain_name(a): plain_name(b) for a, b in pairs.items()}
