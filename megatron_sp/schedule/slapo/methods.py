"""What Slapo lets a user add: how a class of modules is split (``register_shard_method``), and primitives (``register_primitive``).

    @register_shard_method(MyNorm)
    class Method(ShardMethod):
        @staticmethod
        def postproc(sch, param_name, sharded_size, axis):
            sch.mod.num_features = sharded_size

Splitting itself is the same for all classes; a method follows up: attributes that hold sizes, and what has become of the result. A class
that has a bias behind a sum, or is split by ``.column()`` and ``.row()``, is taught with ``schedule.register_shardable`` instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

from megatron_sp.schedule.core.kinds import knows
from megatron_sp.utils.errors import ConfigError

if TYPE_CHECKING:
    from megatron_sp.schedule.slapo.schedule import SlapoSchedule

PRIMITIVES: dict[str, type[Primitive]] = {}
_METHODS: dict[type[nn.Module], type[ShardMethod]] = {}
_M = TypeVar("_M", bound="type[ShardMethod]")
_P = TypeVar("_P", bound="type[Primitive]")


class ShardMethod:
    """Of a class that is not registered: nothing more is done. ``build()`` calls preproc and postproc once for each split tensor."""

    @staticmethod
    def preproc(sch: SlapoSchedule, param_name: str, sharded_size: int, axis: int) -> None:
        """In front of the splitting, when the module still is whole."""

    @staticmethod
    def postproc(sch: SlapoSchedule, param_name: str, sharded_size: int, axis: int) -> None:
        """Behind it: ``sch.mod`` has this rank's part."""

    @staticmethod
    def infer_output_type(sch: SlapoSchedule, param_name: str, sharded_size: int, axis: int) -> tuple[str | None, int | None]:
        """("partition", axis of the result that is split), ("partial", None): a part of a sum, or (None, None): it is not known."""
        return None, None

    @staticmethod
    def sync(sch: SlapoSchedule, mode: str, sync_op_or_fn: str | Callable[..., Any], **kwargs: Any) -> None:
        """What ``sch.sync()`` does."""
        sch.put_sync(mode, sync_op_or_fn, **kwargs)


class Primitive:
    """A primitive of one's own: ``sch.<name>(...)`` calls ``apply(sch, ...)``."""

    @staticmethod
    def name() -> str:
        raise NotImplementedError

    @staticmethod
    def apply(sch: SlapoSchedule, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    @staticmethod
    def is_verifiable() -> bool:
        """Slapo asks; here everything is verified."""
        return False

    @staticmethod
    def init_metadata() -> Any:
        """What ``sch.metadata.primitives[name]`` is at the beginning."""
        return None


def register_shard_method(module_cls: type[nn.Module] | None) -> Callable[[_M], _M]:
    """Decorate a ShardMethod with the class that it is for; None, of a class that could not be imported, does nothing.

    Raises:
        ConfigError: it is no ShardMethod, or the class has one already, or is known to the table of ``register_shardable``.
    """

    def decorate(method: _M) -> _M:
        if module_cls is None:
            return method
        if not issubclass(method, ShardMethod):
            raise ConfigError(f"{method.__name__} for {module_cls.__name__} must be a subclass of ShardMethod")
        if module_cls in _METHODS or knows(module_cls):
            raise ConfigError(
                f"{module_cls.__name__} has a way to be split already: register a subclass of it, or use register_shardable()"
            )
        _METHODS[module_cls] = method
        return method

    return decorate


def register_primitive() -> Callable[[_P], _P]:
    """Decorate a Primitive. Raises ConfigError: it is none, or there is one of that name."""

    def decorate(primitive: _P) -> _P:
        if not issubclass(primitive, Primitive):
            raise ConfigError(f"{primitive.__name__} must be a subclass of Primitive")
        name = primitive.name()
        if name in PRIMITIVES or name in BUILT_IN:
            raise ConfigError(f"there is a primitive {name!r} already: give yours another name")
        PRIMITIVES[name] = primitive
        return primitive

    return decorate


def method_of(module: nn.Module) -> type[ShardMethod]:
    """Of the first registered class that the module is one of."""
    return next((method for cls, method in _METHODS.items() if isinstance(module, cls)), ShardMethod)


BUILT_IN = ("annotate", "checkpoint", "fork_rng", "replace", "replace_all", "shard", "sync")
