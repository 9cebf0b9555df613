"""Schedule of a model: what is split and where ranks communicate, written line by line and applied once.

    s = schedule(model, Mesh.of(groups))
    s["model.layers.*.self_attn"].sync("fwd_pre", "copy", arg="hidden_states")
    s["model.layers.*.self_attn.{q,k,v}_proj"].column()
    s["model.layers.*.self_attn.o_proj"].row()
    s.apply()

Nothing changes before ``apply()``; the order of the lines does not matter. Names of primitives: Slapo (ASPLOS 2024,
arXiv:2302.08005); hooks replace its tracer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatron_sp.schedule import plan_file
from megatron_sp.schedule.apply.apply import Applied, apply, decide
from megatron_sp.schedule.apply.ulysses import CONTEXT_OPTIONS, OPTIONS, require_known
from megatron_sp.schedule.core.directives import Directive, Mesh, caller, expand
from megatron_sp.schedule.core.hooks import Name
from megatron_sp.schedule.report import show as text
from megatron_sp.schedule.report.cost import Cost, cost
from megatron_sp.schedule.report.show import Difference, diff, write_picture
from megatron_sp.schedule.report.survey import survey
from megatron_sp.schedule.verify.derive import as_said
from megatron_sp.schedule.verify.proof import measure, prove
from megatron_sp.schedule.verify.verify import LossOf, Verdict
from megatron_sp.utils.errors import ConfigError, NumericsError

Batch = Mapping[str, Any]  # keyword arguments of a model


class Schedule:
    """Schedule of one model on one mesh; created by ``schedule()``."""

    def __init__(self, model: nn.Module, mesh: Mesh, seq_dim: int = 1) -> None:
        self.model, self.mesh, self.seq_dim = model, mesh, seq_dim
        self.directives: list[Directive] = []
        self.applied: Applied | None = None  # result of apply()
        self._verified: list[Directive] | None = None  # what verify() has found right, as it was written

    def __getitem__(self, glob: str) -> Selection:
        """Select the modules that a glob matches. Raises PathError: it matches none."""
        return Selection(self, glob)

    def add(self, on: str, do: str, **args: Any) -> None:
        """Add a line. Raises ConfigError: the schedule has been applied already (E15)."""
        if self.applied is not None:
            once = "a schedule is applied once, as a whole; write all lines first, then apply()"
            raise ConfigError(f"{do} on {on!r} comes after apply(): {once} (E15)")
        self.directives.append(Directive(on, do, {k: v for k, v in args.items() if v is not None}, caller()))

    def sequence(self, enter: str, leave: str, *, inside: str | None = None, arg: Name = None) -> Schedule:
        """Split activations along the sequence over tp, from the first block to the norm after the last.

        Gradients of whole parameters ``inside`` (a glob; default: all in one list with ``enter``, and ``leave``) are
        summed over tp. Source: Megatron-LM, arXiv:2205.05198.
        """
        self.add(enter, "sequence", leave=leave, inside=inside, arg=arg)
        return self

    def ulysses(self, axis: str = "sp", **options: Any) -> Schedule:
        """Split every sequence over ``axis``, and exchange it for heads around attention (arXiv:2309.14509).

        Models that are not of transformers need the ``ulysses.OPTIONS`` that name their modules and inputs.
        """
        require_known("ulysses", options, OPTIONS)
        self.add("", "ulysses", axis=axis, **{"overlap_qkv": False, "pad": True, **options})
        return self

    def context(self, axis: str = "cp", **options: Any) -> Schedule:
        """Deal sequences to the ranks of ``axis``, which send each other keys and values as the mask needs them.

        For transformers models, alone or around ``ulysses()``. Options: ``ulysses.CONTEXT_OPTIONS``.
        """
        require_known("context", options, CONTEXT_OPTIONS)
        self.add("", "context", axis=axis, **options)
        return self

    def zero(self, stage: int, optimizer: Any = None, *, micro_batches: int = 1, blocks: str | None = None) -> Schedule:
        """Shard optimizer state (1), also gradients (2), also parameters (3) over dp, cp and sp (arXiv:1910.02054).

        Training calls ``applied.zero.backward(loss)`` and ``applied.zero.step()``. ``optimizer``: an OptimizerConfig,
        or a dict of its fields; ``blocks``: glob of the modules that are units (default: ``zero.find_blocks``).
        """
        self.add("", "zero", stage=stage, optimizer=optimizer, micro_batches=micro_batches, blocks=blocks)
        return self

    def show(self, *, every: bool = False) -> str:
        """Return the model's tree with splits and collectives; ``every``: also modules that no line affects."""
        return text.show(survey(self), every=every)

    def explain(self, path: str) -> str:
        """Describe the modules that a glob matches, with the reason of each collective."""
        surveyed = survey(self)
        return "\n".join(text.explain(surveyed, match) for match in expand(self.model, path))

    def diff(self, other: Schedule) -> Difference:
        """Compare with another schedule; the result is false if there is no difference."""
        return diff(self, other)

    def cost(self, batch: int | Batch, seq: int | None = None) -> Cost:
        """Compute the bytes that a rank holds, and sends in a step of ``batch`` rows of ``seq`` tokens."""
        return cost(self, batch, seq)

    def picture(self, path: str | Path) -> None:
        """Write an HTML page with the model's tree in colours."""
        write_picture(survey(self), path)

    def save(self, path: str | Path) -> None:
        """Write the lines as YAML. Raises ConfigError: some need code."""
        plan_file.save(path, self.model, self.directives, self.seq_dim)

    def load(self, path: str | Path) -> Schedule:
        """Add the lines of a file. Raises ConfigError: they do not fit this model, or are invalid."""
        lines, seq_dim = plan_file.load(path, self.model)
        if self.directives and seq_dim != self.seq_dim:
            both = f"{path} has seq_dim {seq_dim}, and the lines that are here have {self.seq_dim}"
            raise ConfigError(f"{both}: load it first")
        self.seq_dim = seq_dim
        for line in lines:
            self.add(line.on, line.do, **line.args)
            self.directives[-1] = line
        return self

    def check(self, batch: Batch | None = None) -> str:
        """Look at the lines alone, without ranks. Raises ConfigError: ``apply()`` would refuse them."""
        if self.applied is not None:
            raise ConfigError("check() looks at the whole model, which is gone after apply(): call it before (E15)")
        decide(self.model, as_said(self.directives), self.mesh, self.seq_dim)
        return "the lines fit the model; whether it computes the same, verify(batch) measures, on ranks"

    def verify(self, batch: Batch, *, dtype: torch.dtype = torch.float64, loss: LossOf | None = None) -> Verdict:
        """Compare a step of the split model with one of the whole model, on copies. Collective over all ranks.

        What the lines leave open (adjoints, where dropout differs) is measured, and added to them.

        Args:
            batch: keyword arguments of the model, the same on every rank.
            loss: function of the model's result (default: its own loss).
        Raises:
            NumericsError: they differ; names the first module that does, and the missing sum.
            ConfigError: the lines are invalid, or the split model fails (DoesNotRun).
        """
        verdict = self.measure(batch, dtype=dtype, loss=loss)
        if not verdict.ok:
            raise NumericsError(str(verdict))
        return verdict

    def measure(self, batch: Batch, *, dtype: torch.dtype = torch.float64, loss: LossOf | None = None) -> Verdict:
        """Compare as ``verify()`` does, but return a verdict even if the results differ."""
        if self.applied is not None:
            why = "compares with the whole model, which is gone after apply()"
            raise ConfigError(f"verify() {why}: call it before (E15)")
        decide(self.model, as_said(self.directives), self.mesh, self.seq_dim)
        if self.mesh.is_imagined:
            raise ConfigError(
                f"verify() computes on ranks, and this mesh has sizes only ({self.mesh}): make it with Mesh.of(groups)"
                " in a job, or save() the lines for `megatron-sp schedule verify`, which starts its ranks itself"
            )
        where = (self.model, self.directives, self.mesh, self.seq_dim)
        verdict, self.directives = measure(*where, batch, dtype=dtype, loss=loss)
        if verdict.ok:
            self._verified = as_said(self.directives)
        return verdict

    def apply(self, batch: Batch | None = None, *, verify: bool = True) -> nn.Module:
        """Apply the lines to the model, and return it. Collective over all ranks of the mesh.

        Lines that ``verify()`` has not accepted are verified first, with ``batch`` or an example, on a small copy of a
        large model (``proof.py``). Without ``verify`` they are trusted: an open adjoint is reduce_scatter at an input
        and slice at an output, and dropout is the same on all ranks.

        Raises:
            NumericsError: the split model computes something else; says where, and what is missing.
            ConfigError: a line is invalid, something is open and cannot be measured, or this is a second call (E15).
        """
        if self.applied is not None:
            raise ConfigError("apply() was called twice: the model is split already (E15)")
        if verify and as_said(self.directives) != self._verified:
            self.directives = prove(self.model, self.directives, self.mesh, self.seq_dim, batch)
        self.applied = apply(self.model, self.directives, self.mesh, self.seq_dim)
        return self.model


class Selection:
    """Modules to which lines are added; methods that add a line return the selection itself."""

    def __init__(self, owner: Schedule, glob: str) -> None:
        self.schedule, self.glob = owner, glob
        self.paths = expand(owner.model, glob)

    def __len__(self) -> int:
        return len(self.paths)

    def __iter__(self) -> Iterator[str]:
        return iter(self.paths)

    def __getitem__(self, glob: str) -> Selection:
        """Select modules inside these."""
        return self.schedule[f"{self.glob}.{glob}" if self.glob else glob]

    def shard(
        self, tensor: str, axis: int, *, blocks: Any = None, heads: int | None = None, replicas: bool | None = None
    ) -> Selection:
        """Split a parameter over tp along a dim.

        Args:
            blocks: number of equal parts along it, or their sizes: each is split, as in a fused q, k, v.
            heads: number of heads, between which the parts are split.
            replicas: with fewer heads than ranks, several ranks have the same head.
        """
        return self._add("shard", tensor=tensor, axis=axis, blocks=blocks, heads=heads, replicas=replicas)

    def column(
        self, *, input: str = "copy", blocks: Any = None, heads: int | None = None, replicas: bool | None = None,
        gather: bool | None = None,
    ) -> Selection:  # fmt: skip
        """Split a linear layer by its outputs, weight and bias; ``gather`` joins them. For the rest see ``shard``.

        ``input``: copy: the layer sums the gradient of its input over the ranks; prepared: a sync around it does.
        """
        return self._add("column", input=input, blocks=blocks, heads=heads, replicas=replicas, gather=gather)

    def row(
        self, reduce: str = "all_reduce", *, axis: int | None = None, blocks: Any = None, heads: int | None = None
    ) -> Selection:
        """Split a linear layer by its inputs; the ranks' results are summed, then the bias is added, once.

        ``reduce``: all_reduce, or reduce_scatter along ``axis`` of the result (default: the sequence).
        """
        return self._add("row", reduce=reduce, axis=axis, blocks=blocks, heads=heads)

    def sync(
        self, mode: str, sync_op_or_fn: Any, *, axis: int | None = None, arg: Name = None, out: Name = None,
        grad: str | None = None, over: str | None = None, layouts: str | None = None,
    ) -> Selection:  # fmt: skip
        """Add a collective where tensors enter or leave the modules.

        Args:
            mode: fwd_pre (an input), fwd_post (an output), bwd_post (the gradient of an input).
            sync_op_or_fn: all_gather, reduce_scatter, scatter, all_reduce, copy (nothing forward, all_reduce backward),
                or a function (tensor, group) -> tensor, which ``layouts`` describes: "S(1)->R".
            axis: dim of the activation.
            arg, out: the input or output, by name or index (default: the first).
            grad: adjoint of all_gather: reduce_scatter or slice (default: measured by ``verify()``).
            over: axis of the mesh (default: tp).
        """
        more = {"arg": arg, "out": out, "grad": grad, "over": over, "layouts": layouts}
        return self._add("sync", mode=mode, op=sync_op_or_fn, axis=axis, **more)

    def hook(self, mode: str, fn: Callable[..., Any]) -> Selection:
        """Register a hook of torch's (fwd_pre, fwd_post or bwd_post), unless tp is 1."""
        return self._add("hook", mode=mode, fn=fn)

    def vocab_parallel(self) -> Selection:
        """Split an embedding, or the output layer, along the vocabulary; tied ones are split together."""
        return self._add("vocab_parallel")

    def sum_gradients(self, *names: str) -> Selection:
        """Sum over tp the gradients of whole parameters that ranks use on a share of heads or positions."""
        return self._add("sum_gradients", names=list(names) or None)

    def checkpoint(self, policy: str | None = None) -> Selection:
        """Recompute the modules in backward; ``policy``: full, or keep_gathered: results of all-gathers are saved."""
        return self._add("checkpoint", policy=policy)

    def replace(self, new: Any) -> Selection:
        """Replace each module by another one, or by the result of a function of (path, module)."""
        return self._add("replace", new=new)

    def rng(self, axis: str = "tp") -> Selection:
        """Make random numbers inside differ between the ranks of an axis; "same": equal again, inside of that."""
        return self._add("rng", axis=axis)

    def set(self, attribute: str, value: Any = None, *, divide: str | None = None) -> Selection:
        """Set an attribute to a value or a function of its old value, or divide it by the size of an axis."""
        return self._add("set", attribute=attribute, value=value, divide=divide)

    def annotate(self, parameter: str, key: str, value: Any) -> Selection:
        """Attach a note to a parameter; whatever replaces the parameter keeps the note."""
        return self._add("annotate", parameter=parameter, key=key, value=value)

    def _add(self, do: str, **args: Any) -> Selection:
        self.schedule.add(self.glob, do, **args)
        return self


def load(path: str | Path, model: nn.Module, mesh: Mesh | None = None) -> Schedule:
    """Load the schedule of a model from a file. Raises ConfigError: see ``Schedule.load``."""
    return schedule(model, mesh).load(path)


def schedule(model: nn.Module, mesh: Mesh | None = None, *, seq_dim: int = 1) -> Schedule:
    """Create an empty schedule for a model, which may be on the meta device.

    Args:
        mesh: ``Mesh.of(groups)`` in a job, ``Mesh.sizes(tp=2)`` to show it without one; None: one rank.
        seq_dim: the dim of activations that runs over positions: 1 of [b, s, h].
    """
    return Schedule(model, mesh or Mesh(), seq_dim)
