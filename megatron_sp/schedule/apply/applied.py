"""Result of ``apply()``: a split model, with ways back to whole results, gradients and state dicts."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron_sp.comm.collectives import all_reduce
from megatron_sp.comm.shard_spec import ShardSpec
from megatron_sp.parallel.regions import gather_from
from megatron_sp.schedule.apply.edits import RegionLength
from megatron_sp.schedule.apply.plan import Split, names_of, put, replaced, take
from megatron_sp.schedule.apply.ulysses import Ulysses
from megatron_sp.schedule.apply.zero import ZeroTraining
from megatron_sp.schedule.core.directives import Directive, Mesh
from megatron_sp.schedule.core.hooks import HEADS, HIDDEN, change_records
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
    lines: list[Directive] = field(default_factory=list)  # all that were applied, including those that others imply

    def complete(self, result: Any) -> Any:
        """Return the model's result with all positions, where this rank has its own only. Collective over sp and tp.

        A loss of the whole result, the same on all ranks, has the right gradients; a loss of this rank's share is only
        a part of it, and cheaper. Raises ConfigError if a plain tuple (``return_dict=False``) holds shares of
        ``hidden_states`` or ``attentions``, which are gathered too.
        """
        if self.ulysses is not None:
            self.ulysses.complete_heads(result)
        tp, dim, length = self.mesh.tp, self.seq_dim, self.region.positions
        size, heads = tp.size(), getattr(getattr(self.model, "config", None), "num_attention_heads", None)

        def is_share(t: Any) -> bool:  # [b, s/tp, h] of a region, or [b, n/tp, s, s] of attention
            if not isinstance(t, Tensor) or t.ndim != 4:
                return isinstance(t, Tensor) and t.ndim == 3 and length > 0 and t.shape[dim] * size == length
            return t.shape[1] * size == heads and t.shape[2] == t.shape[3]

        for place, value in enumerate(result) if size > 1 and type(result) in (tuple, list) else ():
            shares = [t for t in value if is_share(t)] if isinstance(value, (tuple, list)) else []
            if shares:  # only names distinguish them from other records
                raise ConfigError(
                    f"result {place} is a plain tuple of records, of which this rank has shares"
                    f" ({list(shares[0].shape)}), and no name tells what they are: call the model with"
                    " return_dict=True, or without output_hidden_states and output_attentions"
                )
        if size > 1:

            def whole(t: Tensor, along: int, of_all: int | None) -> Tensor:
                return gather_from(t, tp, along, "slice") if t.shape[along] * size == of_all else t

            change_records(result, HEADS, lambda t: whole(t, 1, heads))
            change_records(result, HIDDEN, lambda t: whole(t, dim, length))
        return result if self.ulysses is None else self.ulysses.complete(result)

    def finish_backward(self) -> None:
        """Sum partial gradients over tp, and all over dp and sp, once after the last backward pass of a step.

        The loss is divided by the number of tokens of all ranks. The project's own loop and ZeRO do it themselves.
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
        spec = self.specs[name]
        for part in spec.sums:
            view = grad.narrow(spec.dim, part.start, part.length) if grad.ndim else grad
            places = view.new_zeros([part.num_slots, *view.shape])  # ranks that hold other rows leave zeros here
            places[part.slot] = view
            view.copy_(all_reduce(places, self.mesh.tp)[part.slot])

    def gradients(self) -> dict[str, Tensor]:
        """Return this rank's part of each gradient, after ``finish_backward``. Collective with ZeRO."""
        if self.zero is not None:
            return self.zero.gradients_of_all()
        return {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}

    def whole(self, name: str, local: Tensor) -> Tensor:
        """Gather a whole tensor from the tp ranks' parts of a parameter, or of its gradient. Collective."""
        spec = self.specs[name]
        whole = torch.zeros(spec.shape, dtype=local.dtype, device=local.device)
        if name not in self.splits:
            return whole.copy_(local)
        for offsets, piece in spec.pieces(local) if spec.counted else ():  # only one of several copies counts
            whole[tuple(slice(o, o + n) for o, n in zip(offsets, piece.shape, strict=True))] = piece
        return all_reduce(whole, self.mesh.tp)

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return the whole state dict, as before ``apply()``. Collective over tp; with ZeRO over all ranks."""
        names = {id(p): name for name, p in self.model.named_parameters()}
        state, gathered = {}, dict[int, Tensor]()  # tied parameters are gathered once
        sharded = {} if self.zero is None else self.zero.parameters()
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            if id(tensor) in names:
                if id(tensor) not in gathered:
                    first = names[id(tensor)]
                    gathered[id(tensor)] = self.whole(first, sharded.get(first, tensor.detach()))
                state[name] = gathered[id(tensor)]
            else:
                state[name] = self.whole(name, tensor.detach()) if name in self.splits else tensor.detach()
        return state

    def load_full(self, state: dict[str, Tensor]) -> None:
        """Load whole tensors; what is on the meta device is created here. Raises ConfigError: they do not fit."""
        if self.zero is not None:
            raise ConfigError("load weights before ZeRO takes the parameters: give them to the model before apply()")

        def part(name: str) -> Tensor:
            split = self.splits.get(name)
            return state[name] if split is None else take(state[name], self.specs[name], split, self.mesh.tp.size())

        names = names_of(self.model)
        for name, parameter in list(self.model.named_parameters()):
            shape = self.specs[name].shape
            if name not in state or tuple(state[name].shape) != shape:
                is_now = list(state[name].shape) if name in state else "missing"
                raise ConfigError(f"{name} must be {list(shape)}, and is {is_now}")
            if parameter.is_meta:
                new = replaced(parameter, part(name).detach().to(parameter.dtype).clone())
                for alias in names[id(parameter)]:
                    put(self.model, alias, new)
            else:
                with torch.no_grad():
                    parameter.copy_(part(name))
        for name, buffer in list(self.model.named_buffers()):
            if name not in state and buffer.is_meta:
                raise ConfigError(
                    f"{name} is a buffer on the meta device, and no state has it, so its numbers are lost: make the"
                    " model with its buffers (schedule.slapo.init_empty_weights() leaves them, torch.device('meta')"
                    " does not)"
                )
            if buffer.is_meta:
                put(self.model, name, part(name).to(buffer.dtype).clone())
            elif name in state:
                buffer.copy_(part(name))

    def save_pretrained(self, folder: str | Path, **more: Any) -> None:
        """Write the whole model for transformers' ``from_pretrained``. Collective over all ranks; rank 0 writes."""
        name, save = type(self.model).__name__, getattr(type(self.model), "save_pretrained", None)
        if save is None:
            instead = "it is not a model of transformers; save full_state_dict() instead"
            raise ConfigError(f"{name} has no save_pretrained: {instead}")
        state = self.full_state_dict()
        if self.mesh.tp.rank() == 0 and self.mesh.dp_sp.rank() == 0:
            save(
                self.model, folder, state_dict=dict(state), **more
            )  # which may remove entries from the dict it is given
        for group in (self.mesh.dp_sp, self.mesh.tp):  # no rank goes on before the files are written
            all_reduce(torch.zeros((), device=next(iter(state.values())).device), group)
