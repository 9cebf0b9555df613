"""The schedule of a model: what is to be split, where ranks talk, written down line by line and applied once.

    s = schedule(model, Mesh.of(groups))
    s["model.layers.*.self_attn"].sync("fwd_pre", "copy", arg="hidden_states")
    s["model.layers.*.self_attn.{q,k,v}_proj"].column()
    s["model.layers.*.self_attn.o_proj"].row()
    s.apply()

Nothing changes before ``apply()``; the order of the lines does not matter. Names, hooks, tied weights and the state dict stay those of the
model. Source: Slapo (Chen et al., ASPLOS 2024, arXiv:2302.08005), whose primitives have these names; hooks take the place of its tracer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatron_sp.schedule import plan_file
from megatron_sp.schedule.apply.applied import Applied
from megatron_sp.schedule.apply.apply import apply
from megatron_sp.schedule.apply.ulysses_options import require_known
from megatron_sp.schedule.check.check import Report, check
from megatron_sp.schedule.check.decision import decide
from megatron_sp.schedule.check.derive import as_said, complete, explained, open_gathers, with_derived
from megatron_sp.schedule.core.directives import Directive, caller
from megatron_sp.schedule.core.mesh import Mesh
from megatron_sp.schedule.core.paths import expand
from megatron_sp.schedule.core.placements import NotFollowed, PlacementError
from megatron_sp.schedule.report import show as text
from megatron_sp.schedule.report.compare import Difference, diff
from megatron_sp.schedule.report.cost import Cost, cost
from megatron_sp.schedule.report.picture import write_picture
from megatron_sp.schedule.report.survey import survey
from megatron_sp.schedule.verify.verify import LossOf, Verdict, verify
from megatron_sp.utils.errors import ConfigError, NumericsError


class Schedule:
    """Of one model on one mesh; ``schedule()`` makes it.

    Attributes:
        model: not changed before ``apply()``.
        mesh: the axes.
        seq_dim: the dim of activations that runs over positions.
        directives: all lines.
        applied: what ``apply()`` made, or None.
    """

    def __init__(self, model: nn.Module, mesh: Mesh, seq_dim: int = 1) -> None:
        self.model, self.mesh, self.seq_dim = model, mesh, seq_dim
        self.directives: list[Directive] = []
        self.applied: Applied | None = None
        self._checked: list[Directive] | None = None  # what a dry run has completed
        self._verified: list[Directive] | None = None  # what verify() has found right, as it was written
        self._batch: Mapping[str, Any] | None = None  # the last that somebody gave, for dry runs to come

    def __getitem__(self, glob: str) -> Selection:
        """The modules that a glob names. Raises PathError: none."""
        return Selection(self, glob)

    def add(self, on: str, do: str, **args: Any) -> None:
        """Write a line down.

        Raises:
            ConfigError: the schedule has been applied already (E15).
        """
        if self.applied is not None:
            raise ConfigError(
                f"{do} on {on!r} comes after apply(): a schedule is applied once, as a whole; write all lines first, then apply() (E15)"
            )
        self.directives.append(Directive(on, do, {k: v for k, v in args.items() if v is not None}, caller()))

    def sequence(self, enter: str, leave: str, *, inside: str | None = None, arg: str | int | None = None) -> Schedule:
        """Cut activations along the sequence over tp between two places (Megatron's sequence parallel, arXiv:2205.05198).

        Args:
            enter: the module whose input is cut: the first block.
            leave: the module whose output is made whole again: the norm behind the last block, or that block.
            inside: glob of the modules between them (default: all that stand in one list with ``enter``, and ``leave``); parameters in
                there that are not split are used on a share of the positions each, so their gradients are summed over tp.
            arg: of ``enter``: the input that is cut (default: the first).
        """
        self.add(enter, "sequence", leave=leave, inside=inside, arg=arg)
        return self

    def ulysses(self, axis: str = "sp", **options: Any) -> Schedule:
        """Cut every sequence over ``axis``, and trade it for heads around attention (DeepSpeed-Ulysses, arXiv:2309.14509).

        A model of transformers needs nothing else. See ``ulysses.py`` for what is cut and what becomes of the loss.

        Args:
            axis: of the mesh.
            options: how, and where in a model that is not transformers': ``ulysses_options.Options`` has them, idea by idea.
        Raises:
            ConfigError: an option that there is not.
        """
        require_known(options)
        self.add("", "ulysses", axis=axis, **{"overlap_qkv": False, "pad": True, **options})
        return self

    def zero(self, stage: int, optimizer: Any = None, *, micro_batches: int = 1, blocks: str | None = None) -> Schedule:
        """Share optimizer state, gradients, parameters over dp and sp (ZeRO, arXiv:1910.02054) behind everything else.

        ``applied.zero`` is then what a training loop calls: ``backward(loss)`` for each micro-batch, and ``step()``.

        Args:
            stage: 1: optimizer state; 2: gradients too; 3: parameters too; 0: nothing, every rank has everything.
            optimizer: an OptimizerConfig, or a dict of its fields.
            micro_batches: of a step.
            blocks: glob of the modules that are units of their own (default: the items of the outermost lists of modules of one class).
        """
        self.add("", "zero", stage=stage, optimizer=optimizer, micro_batches=micro_batches, blocks=blocks)
        return self

    def show(self, *, every: bool = False) -> str:
        """The model's tree: what is split and how, where ranks talk; modules that are alike once.

        Args:
            every: also modules of which there is nothing to say.
        """
        return text.show(survey(self), every=every)

    def explain(self, path: str) -> str:
        """Of each module that a glob names: its share of each parameter, and why each collective is there."""
        found = survey(self)
        return "\n".join(text.explain(found, each) for each in expand(self.model, path))

    def diff(self, other: Schedule) -> Difference:
        """What another schedule does otherwise: false, and "no difference", where it does not."""
        return diff(self, other)

    def cost(self, batch: int | Mapping[str, Any], seq: int | None = None) -> Cost:
        """Bytes that a rank holds, and sends in a step.

        Args:
            batch: rows of a micro-batch, of ``seq`` tokens each; or keyword arguments of the model.
        """
        return cost(self, batch, seq)

    def picture(self, path: str | Path) -> None:
        """Write a page of HTML with the model's tree in colours; it opens anywhere and runs nothing."""
        write_picture(survey(self), path)

    def save(self, path: str | Path) -> None:
        """Write the lines as YAML. Raises ConfigError: some need code; names them."""
        plan_file.save(path, self.model, self.directives, self.seq_dim)

    def load(self, path: str | Path) -> Schedule:
        """Add the lines of a file. Raises ConfigError: it does not fit this model, or a line cannot be."""
        lines, seq_dim = plan_file.load(path, self.model)
        if self.directives and seq_dim != self.seq_dim:
            raise ConfigError(f"{path} has seq_dim {seq_dim}, and the lines that are here have {self.seq_dim}: load it first")
        self.seq_dim = seq_dim
        for line in lines:
            self.add(line.on, line.do, **line.args)
            self.directives[-1] = line
        return self

    def remember(self, batch: Mapping[str, Any] | None) -> None:
        """Keyword arguments of the model for the dry runs to come, where none are given there."""
        self._batch = batch

    def check(self, batch: Mapping[str, Any] | None = None) -> Report:
        """Look for mistakes without ranks, a GPU, or the model's numbers; see ``check.py``. Adjoints that it works out are kept.

        Args:
            batch: keyword arguments of the model, of any size that fits (default: token ids, where the model's configuration tells of
                them).
        Returns:
            How tensors lie at the edges of all modules, and warnings.
        Raises:
            PlacementError: a sum that is missing or made twice, shares that do not fit; names modules and lines.
            ConfigError: what ``apply`` says; or ``apply`` has been called (E15).
        """
        if self.applied is not None:
            raise ConfigError("check() looks at the whole model, which is gone after apply(): call it before (E15)")
        said = as_said(self.directives)
        self._batch = batch if batch is not None else self._batch
        try:
            report = check(self.model, said, self.mesh, self.seq_dim, self._batch)
        except PlacementError as error:
            if said != self._verified or self._speaks_of_dp():
                raise
            return Report(
                warnings=[f"verify() has measured that these lines are right, and is believed: {error}"], dry=False, why_not=str(error)
            )
        self.directives = with_derived(said, report)
        self._checked = list(self.directives) if report.dry else None
        return report

    def verify(self, batch: Mapping[str, Any], *, dtype: torch.dtype = torch.float64, loss: LossOf | None = None) -> Verdict:
        """Compare a step of the split model with one of the whole model, on copies; see ``verify.py``.

        Args:
            batch: keyword arguments of the model, the same on every rank.
            dtype: in which both compute.
            loss: of the model's result (default: its own).
        Raises:
            NumericsError: they differ; names the worst tensors, the first module that differs, and what ``check()`` says of it.
            ConfigError: lines that cannot be, as ``check()`` and ``apply()`` refuse them; DoesNotRun: the split model fails, and
                ``check()`` does not know why.
        """
        verdict = self.measure(batch, dtype=dtype, loss=loss)
        if not verdict.ok:
            raise NumericsError(str(verdict))
        return verdict

    def measure(self, batch: Mapping[str, Any], *, dtype: torch.dtype = torch.float64, loss: LossOf | None = None) -> Verdict:
        """``verify()``, but that numbers that differ are returned; ``verdict.ok`` tells."""
        if self.applied is not None:
            raise ConfigError("verify() compares with the whole model, which is gone after apply(): call it before (E15)")
        with suppress(NotFollowed):
            decide(self.model, as_said(self.directives), self.mesh, self.seq_dim)
        if any(open_gathers(self.directives, self.mesh)):
            with suppress(ConfigError):  # whatever is wrong is measured here
                self._complete(batch, guess=True)
        asked = (self.model, self.directives, self.mesh, self.seq_dim, batch)
        verdict = explained(partial(verify, *asked, dtype=dtype, loss=loss), *asked)
        if verdict.ok:
            self._verified = as_said(self.directives)
        return verdict

    def apply(self, batch: Mapping[str, Any] | None = None, *, guess: bool = False) -> nn.Module:
        """Change the model as the lines say. What they leave open (adjoints, where dropout differs) is worked out as ``check()`` does, and
        what that refuses is refused, unless ``verify()`` has found the same lines right. Where there is no batch, or the dry run does not
        know a function, and nothing is open, a warning says so.

        Args:
            batch: as of ``check`` (default: that of the last ``check`` or ``verify``).
            guess: take what is open and cannot be worked out to be usual: an all_gather at an input has reduce_scatter, one at an output
                has slice, and dropout is the same on all ranks; where nothing is open, believe the lines without a dry run.
        Returns:
            The model.
        Raises:
            PlacementError: what ``check`` finds wrong.
            ConfigError: a line that cannot be, something that is open and cannot be worked out, or a second call (E15).
        """
        if self.applied is not None:
            raise ConfigError("apply() was called twice: the model is split already (E15)")
        if self.directives != self._checked:
            self._complete(self._batch if batch is None else batch, guess=guess)
        self.applied = apply(self.model, self.directives, self.mesh, self.seq_dim)
        self._batch = None
        return self.model

    def _speaks_of_dp(self) -> bool:
        """Whether a line does: ``verify()`` gives all ranks of dp the same rows."""
        return self.mesh.dp.size() > 1 and any(d.args.get("over") == "dp" for d in self.directives)

    def _complete(self, batch: Mapping[str, Any] | None, *, guess: bool) -> None:
        self._batch = batch
        verified = self._verified is not None and as_said(self.directives) == self._verified
        self.directives = complete(self.model, self.directives, self.mesh, self.seq_dim, batch, guess=guess, verified=verified)


class Selection:
    """Some modules of a model, to say something of them; every method returns the selection itself."""

    def __init__(self, owner: Schedule, glob: str) -> None:
        self.schedule, self.glob = owner, glob
        self.paths = expand(owner.model, glob)

    def __len__(self) -> int:
        return len(self.paths)

    def __iter__(self) -> Iterator[str]:
        return iter(self.paths)

    def __getitem__(self, glob: str) -> Selection:
        """Modules inside these."""
        return self.schedule[f"{self.glob}.{glob}" if self.glob else glob]

    @property
    def mod(self) -> nn.Module:
        """The only module. Raises ConfigError: there are several."""
        if len(self.paths) != 1:
            raise ConfigError(f"{self.glob!r} names {len(self.paths)} modules, and one is wanted: {', '.join(self.paths[:4])}, ...")
        return self.schedule.model.get_submodule(self.paths[0])

    def shard(
        self, tensor: str, axis: int, *, blocks: Any = None, heads: int | None = None, replicas: bool | None = None,
    ) -> Selection:  # fmt: skip
        """Split a parameter over tp along a dim.

        Args:
            tensor: its name in the module.
            axis: of the parameter.
            blocks: it consists of so many equal parts, or of parts of these sizes, along that dim, each of which is split: a fused q, k, v.
            heads: the parts are cut between heads only, of which there are so many.
            replicas: where there are fewer heads than ranks, several ranks have the same head, and its gradient is summed among them.
        """
        return self._add("shard", tensor=tensor, axis=axis, blocks=blocks, heads=heads, replicas=replicas)

    def column(
        self, *, input: str = "copy", blocks: Any = None, heads: int | None = None, replicas: bool | None = None,
        gather: bool | None = None,
    ) -> Selection:  # fmt: skip
        """Split a linear layer by its outputs, weight and bias.

        Args:
            input: copy: the layer itself sums the gradient of its input over the ranks, under the gradient of its weight; prepared: a sync
                at a module around it does (one for q, k and v together).
            blocks, heads, replicas: as ``shard`` has them.
            gather: make the result whole again.
        """
        return self._add("column", input=input, blocks=blocks, heads=heads, replicas=replicas, gather=gather)

    def row(self, reduce: str = "all_reduce", *, axis: int | None = None, blocks: Any = None, heads: int | None = None) -> Selection:
        """Split a linear layer by its inputs; the ranks' results are summed, then the bias is added, once.

        Args:
            reduce: all_reduce, or reduce_scatter along ``axis``.
            axis: of the result (default: the sequence).
            blocks, heads: as ``shard`` has them.
        """
        return self._add("row", reduce=reduce, axis=axis, blocks=blocks, heads=heads)

    def sync(
        self, mode: str, sync_op_or_fn: Any, *, axis: int | None = None, arg: str | int | None = None, out: int | str | None = None,
        grad: str | None = None, over: str | None = None, layouts: str | None = None,
    ) -> Selection:  # fmt: skip
        """Have the ranks talk where tensors enter or leave the modules.

        Args:
            mode: fwd_pre (an input), fwd_post (an output), bwd_post (the gradient of an input).
            sync_op_or_fn: all_gather, reduce_scatter, scatter, all_reduce, copy (nothing forward, all_reduce backward), or a function
                (tensor, group) -> tensor, with ``layouts`` "S(1)->R" that says what it does.
            axis: of the activation.
            arg: which input, by name or place (default: the first).
            out: which output, by place or key (default: the only one, or the first).
            grad: of all_gather: reduce_scatter or slice (default: worked out).
            over: the axis of the mesh (default: tp).
        """
        return self._add("sync", mode=mode, op=sync_op_or_fn, axis=axis, arg=arg, out=out, grad=grad, over=over, layouts=layouts)

    def hook(self, mode: str, fn: Callable[..., Any]) -> Selection:
        """Register a hook of torch's own, where a ``sync`` of one tensor does not do; not where one rank has everything.

        Args:
            mode: fwd_pre: fn(module, inputs); fwd_post: fn(module, inputs, output); bwd_post: fn(module, grad_inputs, grad_outputs).
        """
        return self._add("hook", mode=mode, fn=fn)

    def vocab_parallel(self, *, gather: bool | None = None) -> Selection:
        """Split an embedding, or the output layer over the vocabulary, by words; tied ones are split together."""
        return self._add("vocab_parallel", gather=gather)

    def sum_gradients(self, *names: str) -> Selection:
        """Parameters that every tp rank has whole and uses on a share of heads or positions: their gradients are summed over tp."""
        return self._add("sum_gradients", names=list(names) or None)

    def checkpoint(self, policy: str | None = None) -> Selection:
        """Compute the inside of the modules again in backward instead of keeping it.

        Args:
            policy: full, or keep_gathered: what all-gathers inside bring is kept, so that they send nothing a second time (default: full).
        """
        return self._add("checkpoint", policy=policy)

    def replace(self, new: Any) -> Selection:
        """Put another module there, or what a function of (path, module) makes."""
        return self._add("replace", new=new)

    def rng(self, axis: str = "tp") -> Selection:
        """Random numbers inside differ between the ranks of an axis: dropout of what is split.

        Args:
            axis: of the mesh; "same": inside of modules where they differ, these have the same on all ranks again.
        """
        return self._add("rng", axis=axis)

    def set(self, attribute: str, value: Any = None, *, divide: str | None = None) -> Selection:
        """Give an attribute a value, or what a function of the old one makes, or divide it by the size of an axis."""
        return self._add("set", attribute=attribute, value=value, divide=divide)

    def annotate(self, parameter: str, key: str, value: Any) -> Selection:
        """Put a note on a parameter, which stays on whatever takes its place."""
        return self._add("annotate", parameter=parameter, key=key, value=value)

    def _add(self, do: str, **args: Any) -> Selection:
        self.schedule.add(self.glob, do, **args)
        return self


def load(path: str | Path, model: nn.Module, mesh: Mesh | None = None) -> Schedule:
    """The schedule in a file, of a model. Raises ConfigError: see ``Schedule.load``."""
    return schedule(model, mesh).load(path)


def schedule(model: nn.Module, mesh: Mesh | None = None, *, seq_dim: int = 1) -> Schedule:
    """Begin the schedule of a model.

    Args:
        model: may be on the meta device, to be checked only.
        mesh: ``Mesh.of(groups)`` in a job, ``Mesh.sizes(tp=2)`` to check without one; None: one rank.
        seq_dim: the dim of activations that runs over positions: 1 of [b, s, h].
    """
    return Schedule(model, mesh or Mesh(), seq_dim)
