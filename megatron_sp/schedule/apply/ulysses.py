"""Ulysses (DeepSpeed-Ulysses, arXiv:2309.14509) for foreign models: each rank has some positions, and in attention some heads.

With context parallelism around it (``context.py``), or alone, for then there is one rank of Ulysses: positions are
dealt to the cp ranks, and attention is computed over all of them.

Where the sequence is cut:

    root     the model's inputs are cut, so that a rank never has more than its positions of anything: input_ids, labels, token types; it
             gets global position ids, and the mask is made for the whole sequence. Transformers models, and others with ``inputs=``.
    region   ``enter=`` and ``leave=``: hidden states are cut before the first block and gathered after the last: everything else
             is computed as before, on every rank (classifiers, poolers).

Where positions are exchanged for heads: around the function that a transformers model looks up (``hf_attention.py``),
or around the modules named by ``core=``. Gradients of parameters are partial, to be summed over sp and cp as over dp;
nothing is averaged. In a region, parameters before it get the gradients of a rank's own positions, and those after it
1/(sp * cp) of theirs, which adds up to the same.

A loss that a transformers model computes itself becomes that of the whole sequence. For next-token losses, labels are
shifted before they are cut (a shard's last position would have no label) and passed as ``shift_labels``, with the
number of labels in the batch; means over labelled positions are weighted by the number of labels on each rank. Losses
of whole sequences need a region.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from megatron_sp.comm.groups import SINGLE_RANK, Group
from megatron_sp.parallel.regions import GatherGrad, gather_from, overridable, reduce_from
from megatron_sp.schedule.apply import early, hf_attention
from megatron_sp.schedule.apply.context import Context
from megatron_sp.schedule.apply.hf_attention import global_positions
from megatron_sp.schedule.apply.ulysses_options import LossKind
from megatron_sp.schedule.core.directives import expand
from megatron_sp.schedule.core.hooks import change_input, change_output, parameter_names
from megatron_sp.schedule.core.records import HEADS, HIDDEN, change_records, names_in
from megatron_sp.schedule.core.sequences import Cut, Heads
from megatron_sp.utils.errors import ConfigError

LAYOUTS = {"bshd": (1, 2), "bhsd": (2, 1), "sbhd": (0, 2)}  # (seq, head)
_IGNORED = -100
_INPUTS = {
    "input_ids": 0,
    "inputs_embeds": 0,
    "token_type_ids": 0,
    "position_ids": None,
    "labels": _IGNORED,
    "shift_labels": _IGNORED,
}
_OF_BLOCKS = ("position_embeddings", "position_ids", "cache_position")
_PER_HEAD = (
    "position_bias",
    "s_aux",
    "head_mask",
)  # arguments of an attention with a dim of heads, which are not exchanged


class Ulysses:
    """State shared by the passes of one model.

    Args:
        model: changed here.
        group: the sp ranks; a single one for a reference run, or with ``context``.
        multiple: whole lengths are padded to a multiple of this: sp, times tp where activations are cut over that too.
        seq_dim: of activations.
        args: of the directive, see ``ulysses_options.py``.
        where: file and line that asked for it.
        context: attention over the cp ranks; None: there is one.
    Raises:
        ConfigError: the model cannot be cut this way; the message gives alternatives.
    """

    def __init__(
        self, model: nn.Module, group: Group, multiple: int, seq_dim: int, args: Mapping[str, Any], where: str,
        context: Context | None = None,
    ) -> None:  # fmt: skip
        self.model, self.group, self.multiple, self.seq_dim, self.where = model, group, multiple, seq_dim, where
        self.context = context
        self.cp = SINGLE_RANK if context is None else context.cp.group
        self.pads = bool(args.get("pad", True))
        self.cut: Cut | None = None  # of the current pass, or of the last one
        self._attentions = 0  # calls of attention in this pass
        self._packed: Tensor | None = None
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._hugging_face = hf_attention.is_hugging_face(model)
        self.inputs = tuple(args.get("inputs") or ())
        self._take_attention(args)
        self._is_region = "enter" in args or "leave" in args
        if self._is_region:
            self._cut_region(args)
        else:
            self._cut_root(args)

    # heads

    def _take_attention(self, args: Mapping[str, Any]) -> None:
        self._early: early.EarlyExchanges | None = None
        if self.context is not None and ("core" in args or not self._hugging_face):
            raise ConfigError(
                f"context() computes attention itself, which it can for transformers' models alone: give the ranks of cp to sp, tp or dp"
                f" ({self.context.where})"
            )
        if "core" in args:
            for path in expand(self.model, args["core"]):
                self._wrap_core(path, args)
            if args.get("overlap_qkv"):
                raise ConfigError(f"overlap_qkv works with transformers' models, not with core= ({self.where})")
        elif self._hugging_face:
            self._require_one_sequence()
            hf_attention.take_over(self.model, self)
            if args.get("overlap_qkv"):
                self._early = early.EarlyExchanges(
                    self.model, self.group, self.where, only_looks=bool(args.get("only_looks"))
                )
        else:
            raise ConfigError(
                f"{type(self.model).__name__} is not a model of transformers, so specify where its attention is: core=, the modules that"
                f' get q, k and v, with q=, k=, v= (names of their inputs) and layout= "bshd", "bhsd" or "sbhd" ({self.where})'
            )

    def _require_one_sequence(self) -> None:
        name, instead = type(self.model).__name__, f"give the ranks of {self._axes} to tp or dp ({self.where})"
        config: Any = self.model.config
        if getattr(config, "is_encoder_decoder", False):
            raise ConfigError(
                f"{name} has an encoder and a decoder, two sequences of which each has its own length: {instead}"
            )
        if not hf_attention.looks_up_attention(self.model):
            raise ConfigError(
                f"{name} does not look its attention up in transformers' table but computes it itself, so no exchange can stand around it:"
                f" {instead}; or put modules that get q, k and v there with .replace() and name them with core="
            )

    def _refuse_neighbours(self, paths: list[str]) -> None:
        """Raise ConfigError if something beside attention mixes positions in a transformers model: a convolution, or a recurrent layer."""
        for path, module in (
            (p, m) for top in paths for p, m in self.model.get_submodule(top).named_modules(prefix=top)
        ):
            wide = isinstance(module, _ConvNd) and any(n > 1 for n in module.kernel_size)
            if self._hugging_face and (wide or isinstance(module, nn.RNNBase)):
                raise ConfigError(
                    f"{path} ({type(module).__name__}) of {type(self.model).__name__} goes from position to position outside of attention,"
                    f" and each rank has its own positions only: give the ranks of {self._axes} to tp or dp ({self.where})"
                )

    @property
    def _axes(self) -> str:
        return "sp" if self.context is None else "cp" if self.group.size() == 1 else "sp and cp"

    def _wrap_core(self, path: str, args: Mapping[str, Any]) -> None:
        module, layout = self.model.get_submodule(path), args.get("layout", "bshd")
        if layout not in LAYOUTS:
            raise ConfigError(f"layout must be one of {', '.join(LAYOUTS)}, not {layout!r} ({self.where})")
        heads, seen = Heads(self.group, *LAYOUTS[layout], path), {"queries": 0}
        seq, head = LAYOUTS[layout]

        def enter(x: Tensor, is_query: bool) -> Tensor:
            self._attentions += is_query
            seen["queries"] = x.shape[head] if is_query else seen["queries"]
            return heads.enter(heads.spread(x, seen["queries"]), self._current(path))

        def leave(y: Tensor) -> Tensor:
            if y.ndim == 4:
                return heads.leave(y, self._current(path), seq, head)
            last = y.unflatten(-1, (seen["queries"] // self.group.size(), -1))
            return heads.leave(last, self._current(path), 1 if layout != "sbhd" else 0, 2).flatten(-2)

        for name in "qkv":  # hooks run in this order: the first says how many query heads there are
            change_input(module, path, args.get(name, name), partial(enter, is_query=name == "q"), self.where)
        change_output(module, path, args.get("out"), leave, self.where)

    def attend(
        self, function: Callable[..., Any], module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, **more: Any
    ) -> Any:
        """Compute a transformers attention function on [b, n, s, d] with exchanges around it; see ``hf_attention.Exchanges``."""
        name = f"{self._paths.get(id(module), '')} ({type(module).__name__})".lstrip()
        cut = self._current(name)
        self._attentions += 1
        for of_heads in _PER_HEAD:
            if more.get(of_heads) is not None:
                raise ConfigError(
                    f"{name} gives its attention {of_heads}, which has heads of its own: Ulysses cannot split it ({self.where})"
                )
        if self.context is None and isinstance(mask, Tensor) and mask.shape[-1] != cut.length:
            raise ConfigError(
                f"{name} was given a mask {list(mask.shape)} for {cut.length} positions: give the model a mask of whole sequences"
                f" ({self.where})"
            )
        heads = Heads(self.group, 2, 1, name)
        if self._early is not None:
            self._early.require_same(module, q, k, v)
        if self._early is not None and self._early.handles(module):
            q, k, v = (heads.real(x, cut) for x in self._early.land(module))
        else:
            k, v = (heads.spread(x, q.shape[1]) for x in (k, v))
            q, k, v = (heads.enter(x, cut) for x in (q, k, v))
        if self.context is not None:
            return heads.leave(self.context.attend(name, module, cut, q, k, v, mask, more), cut, 1, 2), None
        if "position_ids" in more:
            more["position_ids"] = None
        with _grouped(module, q.shape[1], k.shape[1]) as repeat:
            out, weights = function(module, q, *(x.repeat_interleave(repeat, 1) for x in (k, v)), mask, **more)
        return heads.leave(out, cut, 1, 2), weights

    def mask(self, function: Callable[..., Any], **more: Any) -> Any:
        """Return a transformers mask of the whole sequence; see ``hf_attention.Exchanges``."""
        cut = self._current()
        if self.context is not None:
            return self.context.mask(cut, more["mask_function"], more["batch_size"])
        more.update(q_length=cut.length, kv_length=cut.length, q_offset=0, kv_offset=0)
        if self._packed is not None:
            documents, inside = self._packed, more["mask_function"]
            more["mask_function"] = lambda b, h, i, j: inside(b, h, i, j) & (documents[b, i] == documents[b, j])
            more["allow_is_causal_skip"] = more["allow_is_bidirectional_skip"] = False
        return function(**more)

    def _current(self, name: str = "attention") -> Cut:
        if self.cut is None and self._is_region:
            raise ConfigError(
                f"{name} runs before the module where sequences are cut: enter= must be the first block ({self.where}, E10)"
            )
        if self.cut is None:
            raise RuntimeError(f"{name} ran outside of the model's forward pass: call the model itself")
        return self.cut

    # region

    def _cut_region(self, args: Mapping[str, Any]) -> None:
        if "enter" not in args or "leave" not in args:
            said = next(f"{name}={args[name]!r}" for name in ("enter", "leave") if name in args)
            raise ConfigError(
                f"enter= and leave= belong together: the first block, and the norm after the last; there is only {said} ({self.where}, E13)"
            )
        dim = self.seq_dim

        def enter(x: Tensor) -> Tensor:
            self._begin(x.shape[dim], "the sequence")
            return self._current().take(
                x, dim
            )  # backward: each rank has its positions' gradient, and they are summed as parameters' are

        def leave(x: Tensor) -> Tensor:
            cut = self._current(last)
            if x.shape[dim] != cut.local:
                raise ConfigError(
                    f"{last} leaves {x.shape[dim]} positions of a rank's {cut.local}: leave= must be where enter='{first}' and what was cut"
                    f" inside of it end, sequence() for instance ({self.where}, E10)"
                )
            return cut.whole(x, dim, self.group, self.cp, "reduce_scatter")

        first, last = (expand(self.model, args[name])[0] for name in ("enter", "leave"))
        blocks = expand(self.model, f"{first.rpartition('.')[0]}.*" if "." in first else first)
        self._refuse_neighbours(blocks)
        for block in blocks:
            self.model.get_submodule(block).register_forward_pre_hook(self._cut_inputs_of_block, with_kwargs=True)
        # after the other hook: this one says how long the sequence is, and so has to run first
        change_input(self.model.get_submodule(first), first, args.get("arg"), enter, self.where, first=True)
        change_output(self.model.get_submodule(last), last, None, leave, self.where)
        if self._hugging_face:
            self.model.register_forward_pre_hook(_without_cache, with_kwargs=True)
        self.model.register_forward_hook(self._end_region, always_call=True)

    def _cut_inputs_of_block(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        cut = self._current(f"{self._paths.get(id(module), '')} ({type(module).__name__})")

        def taken(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(map(taken, value))
            is_whole = isinstance(value, Tensor) and value.ndim > 1 and value.shape[1] == cut.length
            return cut.take(value, 1, None) if is_whole else value

        names = parameter_names(module)
        args = tuple(taken(a) if i < len(names) and names[i] in _OF_BLOCKS else a for i, a in enumerate(args))
        return args, {name: taken(value) if name in _OF_BLOCKS else value for name, value in kwargs.items()}

    def _end_region(self, model: nn.Module, args: Any, result: Any) -> Any:
        if result is None:
            return None
        self._require_attention()

        def shared(t: Tensor) -> Tensor:
            if not t.requires_grad:
                return t
            mine = share_of_gradient(t, self.group)
            return mine if self.context is None else share_of_gradient(mine, self.cp)

        return map_tensors(result, shared)

    # root

    def _cut_root(self, args: Mapping[str, Any]) -> None:
        self._loss_kind: LossKind | None = None
        if self._hugging_face and not self.inputs:
            self._refuse_whole_sequences()
            self._refuse_neighbours([""])
            self._loss_kind = _loss_kind(self.model, args.get("loss"), self.where)
            self.model.register_forward_pre_hook(self._begin_hugging_face, with_kwargs=True)
        elif self.inputs:
            self._positions = args.get("positions")
            self.model.register_forward_pre_hook(self._begin_inputs, with_kwargs=True)
        else:
            raise ConfigError(
                f"specify where the sequence of {type(self.model).__name__} is cut: inputs=, names of the model's inputs that have"
                " positions (and positions=, where it takes their numbers), or enter= and leave=, the modules between which hidden states"
                f" are cut ({self.where})"
            )
        self.model.register_forward_hook(self._end_root, with_kwargs=True, always_call=True)

    def _refuse_whole_sequences(self) -> None:
        found = next(
            (
                n
                for n, m in self.model.named_modules()
                if n.rpartition(".")[2] in ("pooler", "score", "classifier", "qa_outputs")
            ),
            None,
        )
        if found is not None and "TokenClassification" not in type(self.model).__name__:
            raise ConfigError(
                f"{found} of {type(self.model).__name__} works on whole sequences, and each rank would have a part: cut them inside, with"
                f" enter= (the first block) and leave= (the norm or block after which they are whole again) ({self.where})"
            )

    def _begin_hugging_face(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        names = parameter_names(model)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        given = {name: value for name, value in given.items() if value is not None}
        first = given.get("input_ids", given.get("inputs_embeds"))
        if not isinstance(first, Tensor):
            raise ConfigError(
                "the model was called without input_ids and without inputs_embeds: there is nothing to cut over sp"
            )
        generating = [
            name for name in ("past_key_values", "logits_to_keep") if name in given and not _is_zero(given[name])
        ]
        if generating:
            raise ConfigError(
                f"{type(model).__name__} was given {', '.join(generating)}, as generate() does: it continues whole sequences, and each rank"
                f" has its own positions only; generate with the whole model (applied.save_pretrained), or one split over tp ({self.where})"
            )
        if given.get("output_router_logits", getattr(model.config, "output_router_logits", False)):
            raise ConfigError(
                f"{type(model).__name__} balances its experts by a loss over the whole sequence (output_router_logits), and each rank would"
                f" make one of its own positions: set output_router_logits to False ({self.where})"
            )
        self._packed = _documents(given.get("position_ids")) if _looks_for_documents(model, given) else None
        cut = self._begin(
            first.shape[1],
            "input_ids" if "input_ids" in given else "inputs_embeds",
            given.get("attention_mask"),
            first.shape[0],
        )
        said = "position_ids" in given
        given.setdefault("position_ids", global_positions(model, first, given.get("attention_mask")))
        if cut.padded != cut.length or said or self.context is not None:
            # else a jump in the positions is taken for a new document; all ones cost no mask
            given.setdefault("attention_mask", torch.ones(first.shape[:2], dtype=torch.long, device=first.device))
        if "use_cache" in names or "labels" in names:
            given["use_cache"] = False
        if not any(p.kind is p.VAR_KEYWORD for p in inspect.signature(model.forward).parameters.values()):
            given = {name: value for name, value in given.items() if name in names}
        self._prepare_loss(given)
        hf_attention.running(self)
        return (), {
            n: cut.take(v, 1, _INPUTS[n]) if n in _INPUTS and isinstance(v, Tensor) else v for n, v in given.items()
        }

    def _prepare_loss(self, given: dict[str, Any]) -> None:
        self._weight: Tensor | None = None
        labels = given.get("labels")
        if not isinstance(labels, Tensor):
            return
        if self._loss_kind == "next_token":
            given.setdefault("shift_labels", F.pad(labels, (0, 1), value=_IGNORED)[..., 1:])
            given.setdefault("num_items_in_batch", (given["shift_labels"] != _IGNORED).sum())
        elif self._loss_kind == "per_token":
            self._weight = share_of_labels(labels, self._current())
        else:
            raise ConfigError(
                f"it is not known how {type(self.model).__name__} makes a loss of labels: give loss='next_token' or loss='per_token' (a"
                f" mean over labelled positions), or cut sequences inside the model, with enter= and leave= ({self.where})"
            )

    def _begin_inputs(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        names = parameter_names(model)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        missing = [name for name in self.inputs if not isinstance(given.get(name), Tensor)]
        if missing:
            raise ConfigError(
                f"the model was called without {', '.join(missing)}, which are to be cut over sp ({self.where})"
            )
        first = given[self.inputs[0]]
        cut = self._begin(first.shape[self.seq_dim], self.inputs[0])
        if self._positions is not None and given.get(self._positions) is None:
            given[self._positions] = torch.arange(cut.length, device=first.device)
        at = given.get(self._positions) if self._positions is not None else None
        given.update({name: cut.take(given[name], self.seq_dim) for name in self.inputs})
        if isinstance(at, Tensor):
            given[str(self._positions)] = cut.take(at, at.ndim - 1, None)
        return (), given

    def _end_root(self, model: nn.Module, args: Any, kwargs: Any, result: Any) -> Any:
        hf_attention.running(None)
        if result is None:  # the forward pass has raised an exception
            return None
        self._require_attention()
        if self._loss_kind is None or not hasattr(result, "get") or result.get("loss") is None:
            return result
        loss = result["loss"]
        if self._weight is not None:  # the mean over no labels is NaN
            loss = weighed(loss, self._weight, cast("Tensor", result["logits"]))
        loss = reduce_from(loss, self.group)
        result["loss"] = loss if self.context is None else reduce_from(loss, self.cp)
        return result

    # both

    def _begin(self, length: int, what: str, mask: Any = None, rows: int = 1) -> Cut:
        # begin a pass over sequences of this length; ``mask``: padding mask [b, s], ``rows``: b
        self._attentions = 0
        multiple = self.multiple * (1 if self.context is None else self.context.multiple(self._packed))
        cut = Cut.of(length, self.group, multiple, pads=self.pads, what=what, where=self.where)
        if self.context is not None:
            packed = None if self._packed is None else self._packed.expand(rows, -1)
            cut = self.context.deal(cut, packed, mask)
        self.cut = cut
        return cut

    def _require_attention(self) -> None:
        if self._attentions == 0:
            raise ConfigError(
                f"no attention of {type(self.model).__name__} went through an exchange, so ranks would see their own positions only: name"
                f" the modules that compute it with core= ({self.where}, E10)"
            )

    def take(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return this rank's positions of a tensor that belongs to the inputs of the last pass, with zeros for padding."""
        return self._current().take(x, dim)

    def complete(self, result: Any) -> Any:
        """Return a result with all positions in each tensor that has this rank's along ``seq_dim``. Collective."""
        cut, dim = self._current(), self.seq_dim

        def whole(t: Tensor) -> Tensor:
            return cut.whole(t, dim, self.group, self.cp, "slice") if t.ndim > dim and t.shape[dim] == cut.local else t

        if (
            self._is_region
        ):  # only what was recorded inside is not whole; its gradients are divided where the model ends
            grad: GatherGrad = "reduce_scatter"
            change_records(
                result,
                HIDDEN,
                lambda t: cut.whole(t, dim, self.group, self.cp, grad) if t.shape[dim] == cut.local else t,
            )
            return result
        heads = {name: result[name] for name in names_in(result, HEADS)}
        for name in heads:
            result[name] = None  # whole already, and as long as it may happen to be
        made = map_tensors(result, whole)
        for name, value in heads.items():
            made[name] = value
        return made

    def complete_heads(self, result: Any) -> None:
        """Gather all heads of this tp rank into recorded attentions. Collective."""
        grad: GatherGrad = "reduce_scatter" if self._is_region else "slice"
        change_records(result, HEADS, lambda t: gather_from(t, self.group, 1, grad))


class _grouped:
    """Context of an attention with this rank's number of query heads per key/value head, set on the module or, if it has none, returned."""

    def __init__(self, module: nn.Module, queries: int, keys: int) -> None:
        self.module, self.ratio = module, queries // max(keys, 1)
        self.before = getattr(module, "num_key_value_groups", None)

    def __enter__(self) -> int:
        if self.before is None:
            return self.ratio
        self.module.num_key_value_groups = self.ratio  # type: ignore[assignment]
        return 1

    def __exit__(self, *_: object) -> None:
        if self.before is not None:
            self.module.num_key_value_groups = self.before


@overridable
def share_of_labels(labels: Tensor, cut: Cut) -> Tensor:
    """Return the fraction of all labels [b, s] that are on this rank's positions."""
    mine = (cut.take(labels, 1, _IGNORED) != _IGNORED).sum()
    return mine.double() / (labels != _IGNORED).sum()


@overridable
def weighed(loss: Tensor, weight: Tensor, logits: Tensor) -> Tensor:
    """Return the share of a rank in the mean over all labels, from the mean over its own; 0 without labels, whose mean is NaN."""
    return loss * weight.to(loss.dtype) if int(weight > 0) else (logits * 0.0).sum().to(loss.dtype)


@overridable
def share_of_gradient(x: Tensor, group: Group) -> Tensor:
    """Return ``x``; in backward, this rank's share of the gradient of what all ranks of a group compute alike."""
    made: Tensor = _ShareOfGradient.apply(x, group.size())
    return made


class _ShareOfGradient(torch.autograd.Function):
    """Identity in forward; in backward, one rank's share of the gradient of what all ranks compute alike."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad / ctx.ranks, None


def _without_cache(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    # disable the key/value cache of a transformers model, whose blocks have a rank's positions only
    place = next((i for i, name in enumerate(parameter_names(model)) if name == "use_cache"), None)
    if place is not None and place < len(args):
        return (*args[:place], False, *args[place + 1 :]), kwargs
    takes_any = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(model.forward).parameters.values())
    caches = getattr(getattr(model, "config", None), "use_cache", False)
    return args, {**kwargs, "use_cache": False} if place is not None or (caches and takes_any) else kwargs


def _loss_kind(model: nn.Module, said: LossKind | None, where: str) -> LossKind | None:
    # how the model makes its loss; None: unknown
    if said not in (None, "next_token", "per_token"):
        raise ConfigError(f"loss must be next_token or per_token, not {said!r} ({where})")
    name, of_type = type(model).__name__, getattr(model, "loss_type", None)
    if said == "next_token" and of_type == "ForMaskedLM":
        raise ConfigError(
            f"{name} makes a mean over its labels, each of its own token, and not of the next: leave loss out ({where}, E3)"
        )
    if said is not None:
        return said
    if of_type == "ForCausalLM" or name.endswith(("ForCausalLM", "LMHeadModel")):
        return "next_token"
    return "per_token" if of_type in ("ForMaskedLM", "ForTokenClassification") else None


def _looks_for_documents(model: nn.Module, given: Mapping[str, Any]) -> bool:
    # whether transformers would take positions that restart for packed documents: without a mask, and without a cache
    caches = given.get("use_cache", getattr(getattr(model, "config", None), "use_cache", False))
    return "attention_mask" not in given and (not caches or _recomputes(model))


def _recomputes(model: nn.Module) -> bool:
    """Return whether transformers recomputes activations; the older name is read only if there is no newer one, because it warns."""
    names = [n for n in ("is_activation_checkpointing", "is_gradient_checkpointing") if hasattr(type(model), n)]
    return bool(names) and bool(getattr(model, names[0]))


def _documents(positions: Tensor | None) -> Tensor | None:
    # document numbers [b, s] from positions that restart, or None if they do not
    if positions is None or positions.shape[-1] < 2:
        return None
    starts = F.pad(positions.diff(dim=-1) != 1, (1, 0))
    return starts.cumsum(-1) if bool(starts.any()) else None


def _is_zero(value: Any) -> bool:
    return isinstance(value, int) and value == 0


def map_tensors(result: Any, change: Callable[[Tensor], Tensor]) -> Any:
    # apply ``change`` to the floating point tensors of a nested result
    if isinstance(result, Tensor):
        return change(result) if result.is_floating_point() else result
    if isinstance(result, dict):
        for key in list(result):
            if (value := map_tensors(result[key], change)) is not result[key]:
                result[key] = value
        return result
    if isinstance(result, (tuple, list)):
        made = [map_tensors(value, change) for value in result]
        return type(result)(made) if type(result) in (tuple, list) else type(result)(*made)
    return result
