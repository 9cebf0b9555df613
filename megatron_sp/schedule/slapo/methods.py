"""Slapo's extension points: how a class of modules is split (``register_shard_method``), and primitives (``register_primitive``).

    @register_shard_method(MyNorm)
    class Method(ShardMethod):
        @staticmethod
        def postproc(sch, param_name, sharded_size, axis):
            sch.mod.num_features = sharded_size

Splitting itself is the same for all classes; a method handles the consequences: attributes that hold sizes, and the
kind of the result. A class with a bias after a sum, or to be split by ``.column()`` and ``.row()``, is registered with
``schedule.register_shardable`` instead.
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
    """Default shard method, which does nothing more; ``build()`` calls preproc and postproc once for each split tensor."""

    @staticmethod
    def preproc(sch: SlapoSchedule, param_name: str, sharded_size: int, axis: int) -> None:
        """Run before the split, while the module is still whole."""

    @staticmethod
    def postproc(sch: SlapoSchedule, param_name: str, sharded_size: int, axis: int) -> None:
        """Run after the split, when ``sch.mod`` has this rank's share."""

    @staticmethod
    def infer_output_type(sch: SlapoSchedule, param_name: str, sharded_size: int, axis: int) -> tuple[str | None, int | None]:
        """Return ("partition", split axis of the result), ("partial", None) for a partial sum, or (None, None) if unknown."""
        return None, None

    @staticmethod
    def sync(sch: SlapoSchedule, mode: str, sync_op_or_fn: str | Callable[..., Any], **kwargs: Any) -> None:
        """Add the collective of ``sch.sync()``."""
        sch.put_sync(mode, sync_op_or_fn, **kwargs)


class Primitive:
    """Base class of user-defined primitives: ``sch.<name>(...)`` calls ``apply(sch, ...)``."""

    @staticmethod
    def name() -> str:
        """Name of the method on a schedule."""
        raise NotImplementedError

    @staticmethod
    def apply(sch: SlapoSchedule, *args: Any, **kwargs: Any) -> Any:
        """Carry the primitive out; the result is what the method returns."""
        raise NotImplementedError

    @staticmethod
    def init_metadata() -> Any:
        """Return the initial value of ``sch.metadata.primitives[name]``."""
        return None


def register_shard_method(module_cls: type[nn.Module] | None) -> Callable[[_M], _M]:
    """Decorate a ShardMethod with the class that it is for; None, for a class that could not be imported, does nothing.

    Raises:
        ConfigError: it is not a ShardMethod, or the class already has one or is known to ``register_shardable``.
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
    """Decorate a Primitive, to register it. Raises ConfigError: it is not a Primitive, or its name is taken."""

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
    """Return the method of the first registered class that the module is an instance of, else the default."""
    return next((method for cls, method in _METHODS.items() if isinstance(module, cls)), ShardMethod)


BUILT_IN = ("annotate", "checkpoint", "fork_rng", "replace", "replace_all", "shard", "sync")
