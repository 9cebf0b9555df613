"""Context parallelism for transformers models: each rank has some positions, and attention sends keys and values.

transformers describes a mask by a function of two positions, which is recognised here: causal, causal with a window, or
bidirectional; with padding and packed documents that gives the ``RowMask`` of the plan. Other masks are refused.
Sequences are cut before the model has said what its mask is, so they are dealt as for a causal one: two chunks for each
rank, or eight by the areas of packed documents. Attention itself is ``parallel/context_parallel.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megatron_sp.comm.groups import Group
from megatron_sp.ops.gpu_partial_attention import piece_kernel
from megatron_sp.parallel.context_parallel import context_attention
from megatron_sp.parallel.context_plan import cut_row, plan_context
from megatron_sp.parallel.parallel_context import ContextParallel
from megatron_sp.parallel.row_mask import RowMask
from megatron_sp.schedule.apply.sequences import Cut
from megatron_sp.schedule.core.hooks import tensors_of
from megatron_sp.utils.errors import ConfigError

_CHUNKS, _CHUNKS_OF_DOCUMENTS = 2, 8
_ROWS = 64  # of a mask of which all keys are looked at
_MASKS_KEPT = 256  # for recomputation; one for each kind of layer and pass


class _MaskNumber(Tensor):
    """Number of a mask, in place of the tensor that a model expects; it may be moved and cast."""

    number: int
    why_not: str  # message for a model that wants to see values or shape, as those do that choose keys by themselves

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and isinstance(args[0], _MaskNumber):
            if func in _SAME_MASK:
                return args[0]
            if func in _PROPERTIES:
                return super().__torch_function__(func, types, args, kwargs or {})
        operands = tensors_of([*args, kwargs or {}]).values()
        raise ConfigError(next(x.why_not for x in operands if isinstance(x, _MaskNumber)))


_SAME_MASK = (Tensor.to, Tensor.contiguous, Tensor.detach, Tensor.cpu, Tensor.cuda, Tensor.float, Tensor.bool)
_READ = ("device", "dtype", "requires_grad", "grad_fn", "is_leaf", "ndim", "is_cuda", "layout")
_PROPERTIES = (*(getattr(Tensor, name).__get__ for name in _READ), Tensor.dim)


class Context:
    """How sequences are dealt to the cp ranks, and attention over them."""

    def __init__(self, group: Group, args: Mapping[str, Any], where: str) -> None:
        ahead = int(args.get("stages_ahead", 1))
        self.cp = ContextParallel(group, stages_ahead=ahead, keep_kv=bool(args.get("keep_kv", False)))
        self._chunks, self.where = args.get("chunks"), where
        self._documents: tuple[tuple[int, ...], ...] | None = None  # where those of each row end, in the current pass
        self._lengths: tuple[int, ...] | None = None  # without documents: the number of tokens of each row
        self._masks: dict[int, RowMask] = {}
        self._num_masks = 0

    def chunks(self, packed: Tensor | None) -> int:
        return self._chunks or (_CHUNKS if packed is None else _CHUNKS_OF_DOCUMENTS)

    def deal(self, cut: Cut, packed: Tensor | None = None, mask: Any = None) -> Cut:
        # the cut with each cp rank's share; ``packed``: numbers of the documents, ``mask``: of padding, both [b, s]
        self._documents, self._lengths = None, (cut.length,)
        if packed is not None:
            ends_of_rows = []
            for row in packed.cpu():  # padding is a document of its own
                ends = (row.diff().nonzero().flatten() + 1).tolist()
                ends_of_rows.append(tuple(dict.fromkeys((*ends, len(row), cut.padded))))
            self._documents = tuple(ends_of_rows)
        elif mask is not None:
            instead = f"or give these ranks to sp ({self.where})"
            if not isinstance(mask, Tensor) or mask.ndim != 2:
                what = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
                needs = "is a mask of pairs, and context() needs one [b, s] of tokens"
                raise ConfigError(f"attention_mask {what} {needs}: leave it out, {instead}")
            real = mask.bool().cpu()
            counts = real.sum(1)
            wrong = (real != (torch.arange(real.shape[1]) < counts[:, None])).any(1).nonzero().flatten().tolist()
            if wrong:
                knows = "and context() knows padding after them: pad at the end (padding_side='right')"
                what = f"row {wrong[0]} has padding before or between its tokens, {knows}"
                raise ConfigError(f"attention_mask: {what}, {instead}")
            self._lengths = tuple(counts.tolist())
        row = RowMask(cut.padded, documents=self._documents)
        return cut._replace(shares=cut_row(row, self.cp.size, self.chunks(packed)), cp_rank=self.cp.rank)

    def _row_mask(self, length: int, causal: bool, window: int | None) -> RowMask:
        if self._documents is not None:
            return RowMask(length, causal, window, documents=self._documents)
        return RowMask(length, causal, window, lengths=self._lengths)

    def _unknown(self, what: str) -> str:
        return f"a mask of the model {what}, and context() knows no others ({self.where}): give these ranks to sp"

    def mask(self, cut: Cut, function: Callable[..., Any], batch: int) -> Tensor:
        # what stands for a mask, which a model passes on to its attention, also when it recomputes
        causal, window = self.recognise(function, cut.length, batch)
        self._num_masks += 1
        self._masks[self._num_masks] = self._row_mask(cut.padded, causal, window)
        self._masks.pop(self._num_masks - _MASKS_KEPT, None)
        stand_in = torch.empty(()).as_subclass(_MaskNumber)
        stand_in.number, stand_in.why_not = self._num_masks, self._unknown("is looked into by the model itself")
        return stand_in

    def recognise(self, function: Callable[..., Any], length: int, batch: int) -> tuple[bool, int | None]:
        """Return (causal, window) of a mask function of transformers. Raises ConfigError: it is something else."""

        def seen_by(sequences: Tensor, rows: Tensor, keys: Tensor) -> Tensor:  # [sequences, rows, keys]
            try:
                seen = torch.as_tensor(function(sequences, torch.zeros_like(sequences), rows, keys)).cpu()
            except Exception as error:  # of a model's own, for tensors of its own
                raise ConfigError(f"{self._unknown('cannot be looked at')}: {type(error).__name__}: {error}") from error
            return seen.bool().expand(len(sequences), len(rows), keys.shape[-1])

        some = torch.linspace(0, length - 1, min(length, _ROWS)).long().unique()[:, None]
        every, keys = torch.arange(length)[:, None], torch.arange(length)
        # all keys of some rows are looked at, and of every row of every sequence those beside the edges that the mask
        # should have, the first, the last and a random one
        seen = seen_by(torch.zeros(1, 1, 1, dtype=torch.long), some, keys[None])[0]
        causal = not bool((seen & (keys > some)).any())
        first = int(seen[-1].int().argmax())  # of the keys of the last query
        window = length - first if causal and first > 0 else None

        def expected(rows: Tensor, keys: Tensor) -> Tensor:
            in_window = (keys <= rows) & (keys > rows - (window or length))
            return in_window if causal else torch.ones_like(keys + rows, dtype=torch.bool)

        back = window or 1
        beside = [every + distance for distance in (0, 1, -1, -back + 1, -back, -back - 1)]
        near = torch.cat([*beside, torch.zeros_like(every), every * 0 + length - 1, every * 7919], 1)
        near = torch.where(near < 0, 0, near % length)
        of_all = seen_by(torch.arange(batch)[:, None, None], every, near)
        if not bool((seen == expected(some, keys)).all()) or not bool((of_all == expected(every, near)).all()):
            raise ConfigError(self._unknown("is neither causal, nor causal with a window, nor bidirectional"))
        return causal, window

    def _mask_of(self, name: str, module: nn.Module, cut: Cut, mask: Any, more: Mapping[str, Any]) -> RowMask:
        # the mask of a call of attention, from what the model was given by ``mask``, or from its flags if there is none
        if isinstance(mask, _MaskNumber):
            return self._masks[mask.number]
        if isinstance(mask, Tensor) and mask.ndim == 4 and mask.shape[-2:] == (cut.length, cut.length):
            # a tensor [b, 1, s, s], as modules between ``enter`` and ``leave`` are given it
            seen = (mask if mask.dtype == torch.bool else mask >= 0)[:, 0].cpu()  # else 0 and a very small number
            rows, keys = torch.arange(cut.length)[:, None], torch.arange(cut.length)
            causal = not bool((seen & (keys > rows)).any())
            lengths = tuple((seen[:, -1].int() * (keys + 1)).amax(1).tolist())  # keys of the last query
            real = keys < torch.tensor(lengths)[:, None, None]
            if not bool((seen == (real & (keys <= rows) if causal else real.expand_as(seen))).all()):
                what = "has a window or documents, or padding before the tokens, inside of enter= and leave="
                raise ConfigError(self._unknown(what))
            return RowMask(cut.padded, causal, lengths=lengths)
        flag = more.get("is_causal")
        flag = getattr(module, "is_causal", None) if flag is None else flag
        if mask is not None or not isinstance(flag, bool) or more.get("sliding_window") is not None:
            raise ConfigError(f"{name}: {self._unknown('was not made by the functions of transformers')}")
        return self._row_mask(cut.padded, flag, None)

    def attend(
        self, name: str, module: nn.Module, cut: Cut, q: Tensor, k: Tensor, v: Tensor, mask: Any,
        more: Mapping[str, Any],
    ) -> Tensor:  # fmt: skip
        """Attend with this rank's positions to those of all: [b, n, s/cp, d] -> [b, s/cp, n, d]."""
        b, n, length, d = q.shape
        instead = f"give these ranks to sp ({self.where})"
        if k.shape[2] != length or v.shape[-1] != d:
            shapes = f"queries {list(q.shape)}, keys {list(k.shape)} and values {list(v.shape)}"
            why = "are of two sequences, or of two widths, which context() does not compute"
            raise ConfigError(f"{name}: {shapes} {why}: {instead}")
        if module.training and more.get("dropout"):
            raise ConfigError(
                f"{name} drops attention ({more['dropout']}), which under context() would depend on how sequences are"
                f" cut: set the configuration's attention dropout to 0, or {instead}"
            )
        if (cap := more.get("softcap")) is not None:
            raise ConfigError(f"{name} caps its scores (softcap {cap}), which context() does not: {instead}")
        if more.get("output_attentions"):
            why = "is asked for its attention weights, and nobody has them here: leave output_attentions out"
            raise ConfigError(f"{name} {why} ({self.where})")
        plan = plan_context(self._mask_of(name, module, cut, mask, more), cut.shares)
        scaling = more.get("scaling")
        if scaling is not None and not math.isclose(scaling, d**-0.5, rel_tol=1e-7):
            q = q * (scaling * d**0.5)  # the kernels divide by sqrt(d)
        groups = k.shape[1]
        by_position = (x.permute(2, 0, 1, 3) for x in (q, k, v))
        queries, keys, values = (x.reshape(length, b * groups, -1, d) for x in by_position)
        try:
            kernel = piece_kernel("sdpa", queries)
        except ValueError:  # a GPU without a fused kernel for the dtype
            kernel = piece_kernel("reference", queries)
        attended = context_attention(queries, torch.cat((keys, values), 2), plan, self.cp, kernel, batch=b)
        return attended.out.view(length, b, n, d).transpose(0, 1)
