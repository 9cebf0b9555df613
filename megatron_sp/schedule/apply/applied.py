"""Result of ``apply()``: a split model, with ways back to whole results, gradients and state dicts."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron_sp.comm.collectives import all_reduce
from megatron_sp.comm.shard_spec import ShardSpec
from megatron_sp.parallel.regions import gather_from
from megatron_sp.schedule.apply.guards import original
from megatron_sp.schedule.apply.splits import Split, names_of, put, replaced, take
from megatron_sp.schedule.apply.ulysses import Ulysses
from megatron_sp.schedule.apply.zero import ZeroTraining
from megatron_sp.schedule.core.directives import Directive
from megatron_sp.schedule.core.mesh import Mesh
from megatron_sp.schedule.core.records import HEADS, HIDDEN, RegionLength, change_records, require_named
from megatron_sp.utils.errors import ConfigError


@dataclass
class Applied:
    """A model to which a schedule has been applied."""

    model: nn.Module
    mesh: Mesh  # over which it is split
    # where each parameter lies in the whole one, by its first name; with ``sums`` if its gradient is summed over tp
    specs: dict[str, ShardSpec]
    splits: dict[str, Split] = field(default_factory=dict)  # by name, under all names of split parameters
    ulysses: Ulysses | None = None  # how sequences are cut over sp; None: they are not
    zero: ZeroTraining | None = None  # owner of parameters, gradients and optimizer state; None: the modules own them
    seq_dim: int = 1  # the dim of activations that runs over positions
    region: RegionLength = field(default_factory=RegionLength)  # length of the sequence that was cut over tp
    # all lines that were applied, including those that others imply
    lines: list[Directive] = field(default_factory=list)

    def complete(self, result: Any) -> Any:
        """Return the model's result with all positions, where this rank has computed only its own. Collective over sp and tp.

        ``hidden_states`` and ``attentions`` of a transformers result are gathered too, if they were requested. A loss
        of the whole result, the same on all ranks, has the right gradients; a loss of this rank's share is only a part
        of it, and cheaper.

        Raises:
            ConfigError: a plain tuple (``return_dict=False``) holds shares of these.
        """
        if self.ulysses is not None:
            self.ulysses.complete_heads(result)
        tp = self.mesh.tp
        if tp.size() > 1:
            heads = getattr(getattr(self.model, "config", None), "num_attention_heads", None)
            require_named(result, partial(self._is_record_share, heads))
            change_records(
                result, HEADS, lambda t: gather_from(t, tp, 1, "slice") if t.shape[1] * tp.size() == heads else t
            )
            dim, length = self.seq_dim, self.region.positions
            change_records(
                result, HIDDEN, lambda t: gather_from(t, tp, dim, "slice") if t.shape[dim] * tp.size() == length else t
            )
        return result if self.ulysses is None else self.ulysses.complete(result)

    def _is_record_share(self, heads: int | None, t: Tensor) -> bool:
        # whether a tensor looks like [b, s/tp, h] of a region, or [b, n/tp, s, s] of attention
        size, length = self.mesh.tp.size(), self.region.positions
        cut = t.ndim == 3 and length > 0 and t.shape[self.seq_dim] * size == length
        return cut or (t.ndim == 4 and t.shape[1] * size == heads and t.shape[2] == t.shape[3])

    def finish_backward(self) -> None:
        """Sum partial gradients: over tp for parameters used on a share of positions or heads, over dp and sp for all.

        For custom training loops, once after the last backward pass of a step; the loss is divided by the number of
        tokens of all ranks. The project's own loop and ZeRO do it themselves.
        """
        if self.zero is not None:
            self.zero.finish()
            return
        for name, parameter in self.model.named_parameters():
            if parameter.grad is None:
                continue
            self.sum_parts(name, parameter.grad)
            for group in self.mesh.replicas:
                all_reduce(parameter.grad, group)

    def sum_parts(self, name: str, grad: Tensor) -> None:
        """Sum the gradient of one parameter over tp, in place."""
        for part in self.specs[name].sums:
            view = grad.narrow(self.specs[name].dim, part.start, part.length) if grad.ndim else grad
            places = view.new_zeros([part.num_slots, *view.shape])  # ranks that hold other rows leave zeros here
            places[part.slot] = view
            view.copy_(all_reduce(places, self.mesh.tp)[part.slot])

    def gradients(self) -> dict[str, Tensor]:
        """Return this rank's part of each existing gradient, after ``finish_backward``. Collective with ZeRO."""
        if self.zero is not None:
            return self.zero.gradients_of_all()
        return {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}

    def whole(self, name: str, local: Tensor) -> Tensor:
        """Gather a whole tensor from all tp ranks' parts of a parameter, or of a tensor laid out like it. Collective over tp."""
        spec = self.specs[name]
        made = torch.zeros(spec.shape, dtype=local.dtype, device=local.device)
        if name in self.splits:
            for offsets, piece in spec.pieces(local) if spec.counted else ():  # only one of several copies counts
                made[tuple(slice(o, o + n) for o, n in zip(offsets, piece.shape, strict=True))] = piece
            return all_reduce(made, self.mesh.tp)
        return made.copy_(local)

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return the whole state dict, as before ``apply()``, on every rank. Collective over tp; with ZeRO over all ranks."""
        names = {id(p): name for name, p in self.model.named_parameters()}
        found, made = {}, dict[int, Tensor]()
        sharded = {} if self.zero is None else self.zero.parameters()
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            if id(tensor) in names:
                if id(tensor) not in made:
                    first = names[id(tensor)]
                    made[id(tensor)] = self.whole(first, sharded.get(first, tensor.detach()))
                found[name] = made[id(tensor)]
            else:
                found[name] = self.whole(name, tensor.detach()) if name in self.splits else tensor.detach()
        return found

    def load_full(self, state: dict[str, Tensor]) -> None:
        """Load whole tensors, such as ``full_state_dict`` returns. What is on the meta device is created here, at this rank's size.

        Raises:
            ConfigError: a tensor is missing, or has another shape; a buffer on the meta device is missing; ZeRO has
                taken the parameters.
        """
        if self.zero is not None:
            raise ConfigError("load weights before ZeRO takes the parameters: give them to the model before apply()")
        names = names_of(self.model)
        for name, parameter in list(self.model.named_parameters()):
            if name not in state or tuple(state[name].shape) != self.specs[name].shape:
                found = list(state[name].shape) if name in state else "missing"
                raise ConfigError(f"{name} must be {list(self.specs[name].shape)}, and is {found}")
            part = self._part(name, state[name])
            if parameter.is_meta:
                new = replaced(parameter, part.detach().to(parameter.dtype).clone())
                for alias in names[id(parameter)]:
                    put(self.model, alias, new)
                continue
            with torch.no_grad():
                parameter.copy_(part)
        for name, buffer in list(self.model.named_buffers()):
            if buffer.is_meta:
                self._fill(name, buffer, state)
            elif name in state:
                buffer.copy_(self._part(name, state[name]))

    def _fill(self, name: str, buffer: Tensor, state: dict[str, Tensor]) -> None:
        """Fill a buffer that was created on the meta device. Raises ConfigError if the state does not have it: its values are unknown."""
        if name not in state:
            raise ConfigError(
                f"{name} is a buffer on the meta device, and no state has it, so its numbers are lost: make the model with its buffers"
                " (schedule.slapo.init_empty_weights() leaves them, torch.device('meta') does not)"
            )
        path, _, last = name.rpartition(".")
        self.model.get_submodule(path)._buffers[last] = self._part(name, state[name]).to(buffer.dtype).clone()

    def _part(self, name: str, whole: Tensor) -> Tensor:
        split = self.splits.get(name)
        return whole if split is None else take(whole, self.specs[name], split, self.mesh.tp.size())

    def save_pretrained(self, folder: str | Path, **more: Any) -> None:
        """Write the whole model as transformers does, for its ``from_pretrained``. Collective over all ranks; rank 0 writes.

        Args:
            more: passed to the model's own ``save_pretrained``.
        Raises:
            ConfigError: the model has no ``save_pretrained``.
        """
        save = original(self.model, "save_pretrained")
        if save is None:
            raise ConfigError(
                f"{type(self.model).__name__} has no save_pretrained: it is not a model of transformers; save full_state_dict() instead"
            )
        state = self.full_state_dict()
        if self.mesh.tp.rank() == 0 and self.mesh.dp_sp.rank() == 0:
            save(folder, state_dict=dict(state), **more)  # save_pretrained may remove entries from the dict it is given
        for group in (self.mesh.dp_sp, self.mesh.tp):  # no rank goes on before the files are written
            all_reduce(torch.zeros((), device=next(iter(state.values())).device), group)
