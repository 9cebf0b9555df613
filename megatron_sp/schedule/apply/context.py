"""Context parallelism for transformers models: each cp rank has its positions, and attention sends keys and values as the mask needs them.

transformers describes a mask by a function of two positions, from which it would make a tensor [b, 1, s, s]. Here the
function is recognised instead: causal, causal with a window, or bidirectional; with the padding mask and the packed
documents of the batch that gives the ``RowMask`` of the plan (``parallel/context_plan.py``). A mask of another form is
refused. Attention itself is ``parallel/context_parallel.py``, whatever implementation the model was given.

Sequences are cut before the model has said what its mask is, so they are dealt as for a causal one: two chunks for each
rank, or eight by the areas of packed documents. Other masks are right, too, with a few more pieces than they need.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megatron_sp.comm.groups import Group
from megatron_sp.ops.partial_attention import PieceKernel
from megatron_sp.ops.partial_attention_choice import piece_kernel
from megatron_sp.parallel.context_parallel import context_attention
from megatron_sp.parallel.context_plan import cut_row, plan_context
from megatron_sp.parallel.row_mask import RowMask
from megatron_sp.parallel.sequence_parallel import ContextParallel
from megatron_sp.schedule.core.sequences import Cut
from megatron_sp.utils.errors import ConfigError

_CHUNKS, _CHUNKS_OF_DOCUMENTS = 2, 8
_ROWS = 64  # of a mask of which all keys are looked at
_MASKS_KEPT = 256  # for recomputation; one for each kind of layer and pass

Ends = tuple[tuple[int, ...], ...]


class _NumberOfMask(Tensor):
    """Number of a mask, in place of the tensor that a model expects. It may be moved and cast; nobody can compute with it."""

    number: int
    # message for a model that wants to see its values or its shape, as those do that choose keys by themselves
    why_not: str

    @staticmethod
    def of(number: int, why_not: str) -> _NumberOfMask:
        made = torch.empty(()).as_subclass(_NumberOfMask)
        made.number, made.why_not = number, why_not
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        mask = args[0] if args and isinstance(args[0], _NumberOfMask) else None
        if mask is not None and func in _SAME_MASK:
            return mask
        if mask is not None and func in _PROPERTIES:
            return super().__torch_function__(func, types, args, kwargs or {})
        raise ConfigError(next(m.why_not for m in _tensors_in((args, kwargs or {})) if isinstance(m, _NumberOfMask)))


_SAME_MASK = (Tensor.to, Tensor.contiguous, Tensor.detach, Tensor.cpu, Tensor.cuda, Tensor.float, Tensor.bool)
_PROPERTIES = (
    *(
        getattr(Tensor, name).__get__
        for name in ("device", "dtype", "requires_grad", "grad_fn", "is_leaf", "ndim", "is_cuda", "layout")
    ),
    Tensor.dim,
)


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(each)


class Context:
    """How sequences are dealt to the cp ranks, and attention over them.

    Args:
        group: the cp ranks.
        args: of the directive, see ``ulysses_options.ContextOptions``.
        where: file and line that asked for it.
    """

    def __init__(self, group: Group, args: Mapping[str, Any], where: str) -> None:
        ahead = int(args.get("stages_ahead", 1))
        self.cp = ContextParallel(group, stages_ahead=ahead, keep_kv=bool(args.get("keep_kv", False)))
        self._chunks, self.where = args.get("chunks"), where
        self._documents: Ends | None = None  # of the current pass
        self._lengths: tuple[int, ...] | None = None
        self._masks: dict[int, RowMask] = {}
        self._num_masks = 0

    def multiple(self, packed: Tensor | None) -> int:
        """Return what a padded length is a multiple of, so that all cp ranks have as many positions."""
        return self.cp.size * self._num_chunks(packed)

    def _num_chunks(self, packed: Tensor | None) -> int:
        return self._chunks or (_CHUNKS if packed is None else _CHUNKS_OF_DOCUMENTS)

    def deal(self, cut: Cut, packed: Tensor | None = None, mask: Any = None) -> Cut:
        """Return the cut with the share of each cp rank, and remember what the rows of this pass are."""
        self._documents, self._lengths = None, (cut.length,)
        if packed is not None:
            self._documents = _ends_of(packed, cut.padded)
        elif mask is not None:
            self._lengths = self._real_tokens(mask)
        row = RowMask(cut.padded, documents=self._documents)
        return cut._replace(shares=cut_row(row, self.cp.size, self._num_chunks(packed)), cp_rank=self.cp.rank)

    def _real_tokens(self, mask: Any) -> tuple[int, ...]:
        # the number of tokens of each row from a padding mask [b, s]
        if not isinstance(mask, Tensor) or mask.ndim != 2:
            what = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
            raise ConfigError(
                f"attention_mask {what} is a mask of pairs, and context() needs one [b, s] of tokens: leave it out, or give"
                f" these ranks to sp ({self.where})"
            )
        real = mask.bool().cpu()
        counts = real.sum(1)
        wrong = (real != (torch.arange(real.shape[1]) < counts[:, None])).any(1).nonzero().flatten().tolist()
        if wrong:
            raise ConfigError(
                f"attention_mask: row {wrong[0]} has padding before or between its tokens, and context() knows padding after them: pad at"
                f" the end (padding_side='right'), or give these ranks to sp ({self.where})"
            )
        return tuple(counts.tolist())

    def _row_mask(self, length: int, causal: bool, window: int | None) -> RowMask:
        if self._documents is not None:
            return RowMask(length, causal, window, documents=self._documents)
        return RowMask(length, causal, window, lengths=self._lengths)

    # masks

    def mask(self, cut: Cut, function: Callable[..., Any], batch: int) -> Tensor:
        """Return what stands for a mask, which a model passes on to its attention, also when it recomputes."""
        causal, window = self._recognised(function, cut.length, batch)
        self._num_masks += 1
        self._masks[self._num_masks] = self._row_mask(cut.padded, causal, window)
        self._masks.pop(self._num_masks - _MASKS_KEPT, None)
        return _NumberOfMask.of(self._num_masks, self._not_known("is looked into by the model itself"))

    def _recognised(self, function: Callable[..., Any], length: int, batch: int) -> tuple[bool, int | None]:
        some = torch.linspace(0, length - 1, min(length, _ROWS)).long().unique()[:, None]
        every, keys = torch.arange(length)[:, None], torch.arange(length)
        seen = self._looked_at(function, torch.zeros(1, 1, 1, dtype=torch.long), some, keys[None])[0]
        causal = not bool((seen & (keys > some)).any())
        first = int(seen[-1].int().argmax())  # of the keys of the last query
        window = length - first if causal and first > 0 else None

        def expected(rows: Tensor, keys: Tensor) -> Tensor:
            return (
                (keys <= rows) & (keys > rows - (window or length))
                if causal
                else torch.ones_like(keys + rows, dtype=torch.bool)
            )

        back = window or 1
        beside = (0, 1, -1, -back + 1, -back, -back - 1)
        looked_at = torch.cat(
            [every + distance for distance in beside] + [torch.zeros_like(every), every * 0 + length - 1, every * 7919],
            1,
        )
        looked_at = torch.where(looked_at < 0, 0, looked_at % length)
        of_all = self._looked_at(function, torch.arange(batch)[:, None, None], every, looked_at)
        if not bool((seen == expected(some, keys)).all()) or not bool((of_all == expected(every, looked_at)).all()):
            raise ConfigError(self._not_known("is neither causal, nor causal with a window, nor bidirectional"))
        return causal, window

    def _looked_at(self, function: Callable[..., Any], sequences: Tensor, rows: Tensor, keys: Tensor) -> Tensor:
        # whether queries see keys, [sequences, rows, keys]
        try:
            seen = torch.as_tensor(function(sequences, torch.zeros_like(sequences), rows, keys)).cpu()
        except Exception as error:  # of a model's own, for tensors of its own
            raise ConfigError(f"{self._not_known('cannot be looked at')}: {type(error).__name__}: {error}") from error
        return seen.bool().expand(len(sequences), len(rows), keys.shape[-1])

    def _not_known(self, what: str) -> str:
        return f"a mask of the model {what}, and context() knows no others ({self.where}): give these ranks to sp"

    def _mask_of(self, name: str, module: nn.Module, cut: Cut, mask: Any, more: Mapping[str, Any]) -> RowMask:
        # the mask of a call of attention, from what the model was given by ``mask``, or from its flags if there is none
        if isinstance(mask, _NumberOfMask):
            return self._masks[mask.number]
        if isinstance(mask, Tensor) and mask.ndim == 4 and mask.shape[-2:] == (cut.length, cut.length):
            return self._of_dense(mask, cut)
        causal = more.get("is_causal")
        causal = getattr(module, "is_causal", None) if causal is None else causal
        if mask is not None or not isinstance(causal, bool) or more.get("sliding_window") is not None:
            raise ConfigError(f"{name}: {self._not_known('was not made by the functions of transformers')}")
        return self._row_mask(cut.padded, causal, None)

    def _of_dense(self, mask: Tensor, cut: Cut) -> RowMask:
        # the mask that a tensor [b, 1, s, s] means, as modules between ``enter`` and ``leave`` are given it
        seen = (mask if mask.dtype == torch.bool else mask >= 0)[:, 0].cpu()  # else 0 and a very small number
        rows, keys = torch.arange(cut.length)[:, None], torch.arange(cut.length)
        causal = not bool((seen & (keys > rows)).any())
        lengths = tuple((seen[:, -1].int() * (keys + 1)).amax(1).tolist())  # keys of the last query
        real = keys < torch.tensor(lengths)[:, None, None]
        if not bool((seen == (real & (keys <= rows) if causal else real.expand_as(seen))).all()):
            raise ConfigError(
                self._not_known("has a window or documents, or padding before the tokens, inside of enter= and leave=")
            )
        return RowMask(cut.padded, causal, lengths=lengths)

    # attention

    def attend(
        self, name: str, module: nn.Module, cut: Cut, q: Tensor, k: Tensor, v: Tensor, mask: Any, more: Mapping[str, Any]
    ) -> Tensor:  # fmt: skip
        """Compute the attention of this cp rank's positions over those of all."""
        self._require_plain(name, module, q, k, v, more)
        b, n, length, d = q.shape
        plan = plan_context(self._mask_of(name, module, cut, mask, more), cut.shares)
        scaling = more.get("scaling")
        if scaling is not None and not math.isclose(scaling, d**-0.5, rel_tol=1e-7):
            q = q * (scaling * d**0.5)  # the kernels divide by sqrt(d)
        groups = k.shape[1]
        by_position = (x.permute(2, 0, 1, 3) for x in (q, k, v))
        queries, keys, values = (x.reshape(length, b * groups, -1, d) for x in by_position)
        kv = torch.cat((keys, values), 2)
        found = context_attention(queries, kv, plan, self.cp, _kernel_for(queries), batch=b)
        return found.out.view(length, b, n, d).transpose(0, 1)

    def _require_plain(
        self, name: str, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, more: Mapping[str, Any]
    ) -> None:
        if k.shape[2] != q.shape[2] or v.shape[-1] != q.shape[-1]:
            raise ConfigError(
                f"{name}: queries {list(q.shape)}, keys {list(k.shape)} and values {list(v.shape)} are of two sequences, or of two widths,"
                f" which context() does not compute: give these ranks to sp ({self.where})"
            )
        if module.training and more.get("dropout"):
            raise ConfigError(
                f"{name} drops attention ({more['dropout']}), which under context() would depend on how sequences are cut: set the"
                f" configuration's attention dropout to 0, or give these ranks to sp ({self.where})"
            )
        if more.get("softcap") is not None:
            raise ConfigError(
                f"{name} caps its scores (softcap {more['softcap']}), which context() does not: give these ranks to sp ({self.where})"
            )
        if more.get("output_attentions"):
            raise ConfigError(
                f"{name} is asked for its attention weights, and nobody has them here: leave output_attentions out ({self.where})"
            )


def _kernel_for(x: Tensor) -> PieceKernel:
    try:
        return piece_kernel("sdpa", x)
    except ValueError:  # a GPU without a fused kernel for the dtype
        return piece_kernel("reference", x)


def _ends_of(packed: Tensor, padded: int) -> Ends:
    # the ends of the documents of each row from their numbers [b, s]; padding is a document of its own
    found = []
    for row in packed.cpu():
        ends = (row.diff().nonzero().flatten() + 1).tolist()
        found.append(tuple(dict.fromkeys((*ends, len(row), padded))))
    return tuple(found)
