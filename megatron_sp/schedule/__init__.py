"""Make any PyTorch model tensor-, sequence- and Ulysses-parallel without rewriting it (docs/how-to/schedule.md)."""

from megatron_sp.schedule.core.directives import Mesh, PathError
from megatron_sp.schedule.core.kinds import Kind, register_shardable
from megatron_sp.schedule.schedule import Schedule, Selection, load, schedule

__all__ = ["Kind", "Mesh", "PathError", "Schedule", "Selection", "load", "register_shardable", "schedule"]
