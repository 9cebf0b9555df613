"""Ulysses (arXiv:2309.14509) for foreign models: each rank has some positions, and in attention some heads.

Context parallelism (``context.py``) deals positions to the cp ranks around it, or alone: then Ulysses has one rank.

    root     the model's inputs are cut, so that a rank never has more than its positions of anything; it gets global
             position ids, and the mask of the whole sequence. Transformers models, and others with ``inputs=``.
    region   ``enter=`` and ``leave=``: hidden states are cut before the first block and gathered after the last.

Positions are exchanged for heads around the function that a transformers model looks up (``hf_attention.py``), or
around the modules named by ``core=``. Gradients of parameters are partial, to be summed over sp and cp as over dp; in a
region, parameters after it get 1/(sp * cp) of theirs, which adds up to the same.

A loss that a transformers model computes itself becomes that of the whole sequence: labels of next tokens are shifted
before they are cut, and means are weighted by the number of labels on each rank.
"""

from __future__ import annotations

import difflib
import inspect
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from megatron_sp.comm.groups import SINGLE_RANK, Group
from megatron_sp.parallel.mappings import GatherGrad, reduce_from
from megatron_sp.schedule.apply import hf_attention
from megatron_sp.schedule.apply.context import Context
from megatron_sp.schedule.apply.sequences import Cut, Heads, ShareOfGradient
from megatron_sp.schedule.core.directives import expand
from megatron_sp.schedule.core.hooks import (
    HEADS,
    HIDDEN,
    change_input,
    change_output,
    change_records,
    map_tensors,
    parameter_names,
    records_of,
)  # fmt: skip
from megatron_sp.utils.errors import ConfigError

# keywords of Schedule.ulysses() beside axis, and keys of its line in a plan, with their types
_NAME, _WORD, _NUMBER, _FLAG = (int, str), (str,), (int,), (bool,)
OPTIONS: dict[str, tuple[type, ...]] = {
    # hidden states are cut between two modules, instead of the model's inputs:
    "enter": _WORD,  # the module whose input is cut
    "leave": _WORD,  # the module whose output is whole again
    "arg": _NAME,  # the input of ``enter`` that is cut, by name or index (default: the first)
    # the inputs that are cut, of a model that is not of transformers:
    "inputs": (list,),  # names of those that have positions, along ``seq_dim``
    "positions": _WORD,  # the one that takes position ids
    # the attention of such a model:
    "core": _WORD,  # glob of the modules that compute attention
    "q": _NAME, "k": _NAME, "v": _NAME,  # their inputs (default: by these names)
    "out": _NAME,  # index or key of their output, if there are several
    "layout": _WORD,  # of these tensors: bshd (default), bhsd or sbhd
    # all models:
    "overlap_qkv": _FLAG,  # start each of q's, k's and v's exchanges as soon as it has been projected
    "pad": _FLAG,  # pad lengths that the ranks cannot share evenly (default); else they are refused
    "loss": _WORD,  # how a transformers model makes its loss, if its class does not tell: next_token or per_token
}  # fmt: skip
OF_CONTEXT: dict[str, tuple[type, ...]] = {
    "chunks": _NUMBER,  # chunks of a sequence that each rank is dealt (default: 2, with packed documents 8)
    "stages_ahead": _NUMBER,  # exchanges of keys and values under way while those before are attended to (default: 1)
    "keep_kv": _FLAG,  # keep the keys and values of other ranks for backward, instead of having them sent again
}
# of Schedule.context(); those that ulysses() has, too, are given there if there is such a line
CONTEXT_OPTIONS = {"enter": _WORD, "leave": _WORD, "arg": _NAME, **OF_CONTEXT, "pad": _FLAG, "loss": _WORD}

IGNORED = -100  # label of a position without a loss
LAYOUTS = {"bshd": (1, 2), "bhsd": (2, 1), "sbhd": (0, 2)}  # dims of (positions, heads)
# inputs that are cut, and what fills their padding; None: the last position
_INPUTS = {
    "input_ids": 0, "inputs_embeds": 0, "token_type_ids": 0, "position_ids": None, "labels": IGNORED,
    "shift_labels": IGNORED,
}  # fmt: skip
_OF_BLOCKS = ("position_embeddings", "position_ids", "cache_position")
_PER_HEAD = ("position_bias", "s_aux", "head_mask")  # arguments of an attention with a dim of heads, not exchanged
Hooked = tuple[Any, dict[str, Any]]  # args and kwargs from a hook before a forward


def require_known(method: str, options: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Raise ConfigError for a keyword of ulysses() or context() that is unknown, or a number below 1."""
    for name, value in options.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"{method}() knows no {name}=, only axis, {', '.join(known)}{hint}")
        is_number = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        if known[name] is _NUMBER and not is_number:
            raise ConfigError(f"{method}(): {name} must be a whole number of at least 1, not {value!r}")


class Ulysses:
    """State shared by the passes of one model, whose attention and inputs, or blocks, get hooks.

    ``group``: the sp ranks; ``multiple``: whole lengths are padded to it; ``context``: attention over the cp ranks.
    """

    def __init__(
        self, model: nn.Module, group: Group, multiple: int, seq_dim: int, args: Mapping[str, Any], where: str,
        context: Context | None = None,
    ) -> None:  # fmt: skip
        self.model, self.group, self.multiple, self.seq_dim, self.where = model, group, multiple, seq_dim, where
        self.context, self.pads = context, bool(args.get("pad", True))
        self.cp = SINGLE_RANK if context is None else context.cp.group
        axes = "sp" if context is None else "cp" if group.size() == 1 else "sp and cp"
        self._instead = f"give the ranks of {axes} to tp or dp ({where})"
        self.cut: Cut | None = None  # of the current pass, or of the last one
        self._attentions = 0  # calls of attention in this pass
        self._packed: Tensor | None = None  # numbers of the documents, if several are packed into a sequence
        self._early: Mapping[nn.Module, hf_attention.EarlyExchange] = {}
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._hugging_face = hf_attention.is_hugging_face(model)
        self.inputs = tuple(args.get("inputs") or ())
        self._take_attention(args)
        self._is_region = "enter" in args or "leave" in args
        # in a region only what was recorded inside is not whole; its gradients are divided where the model ends
        self.grad_of_whole: GatherGrad = "reduce_scatter" if self._is_region else "slice"
        if self._is_region:
            self._cut_region(args)
        else:
            self._cut_root(args)

    # attention: positions are exchanged for heads

    def _take_attention(self, args: Mapping[str, Any]) -> None:
        name, where, early = type(self.model).__name__, self.where, args.get("overlap_qkv")
        if self.context is not None and ("core" in args or not self._hugging_face):
            raise ConfigError(
                "context() computes attention itself, which it can for transformers' models alone: give the ranks of"
                f" cp to sp, tp or dp ({self.context.where})"
            )
        if "core" in args:
            for path in expand(self.model, args["core"]):
                self._wrap_core(path, args)
            if early:
                raise ConfigError(f"overlap_qkv works with transformers' models, not with core= ({where})")
            return
        if not self._hugging_face:
            raise ConfigError(
                f"{name} is not a model of transformers, so specify where its attention is: core=, the modules that get"
                " q, k"
                f' and v, with q=, k=, v= (names of their inputs) and layout= "bshd", "bhsd" or "sbhd" ({where})'
            )
        if getattr(self.model.config, "is_encoder_decoder", False):
            why = "has an encoder and a decoder, two sequences of which each has its own length"
            raise ConfigError(f"{name} {why}: {self._instead}")
        files = {sys.modules.get(type(module).__module__) for module in self.model.modules()}
        if not any(hasattr(file, "ALL_ATTENTION_FUNCTIONS") for file in files):
            raise ConfigError(
                f"{name} does not look its attention up in transformers' table but computes it itself, so no exchange"
                f" can stand around it: {self._instead}; or put modules that get q, k and v there with .replace() and"
                " name them with core="
            )
        hf_attention.take_over(self.model, self)
        if early:
            self._early = hf_attention.early_exchanges(self.model, self.group, where, bool(args.get("only_looks")))

    def _wrap_core(self, path: str, args: Mapping[str, Any]) -> None:
        module, layout, queries = self.model.get_submodule(path), args.get("layout", "bshd"), 0
        if layout not in LAYOUTS:
            raise ConfigError(f"layout must be one of {', '.join(LAYOUTS)}, not {layout!r} ({self.where})")
        seq, head = LAYOUTS[layout]
        heads = Heads(self.group, seq, head, path)

        def enter(name: str, x: Tensor) -> Tensor:
            nonlocal queries
            if name == "q":
                self._attentions, queries = self._attentions + 1, x.shape[head]
            return heads.enter(heads.spread(x, queries), self._current(path))

        def leave(y: Tensor) -> Tensor:
            if y.ndim == 4:
                return heads.leave(y, self._current(path), seq, head)
            by_head = y.unflatten(-1, (queries // self.group.size(), -1))
            return heads.leave(by_head, self._current(path), 1 if layout != "sbhd" else 0, 2).flatten(-2)

        for name in "qkv":  # hooks run in this order: the first says how many query heads there are
            change_input(module, path, args.get(name, name), partial(enter, name), self.where)
        change_output(module, path, args.get("out"), leave, self.where)

    def attend(self, function: Any, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, **more: Any) -> Any:
        """Compute a transformers attention function on [b, n, s, d] with exchanges around it."""
        name = f"{self._paths.get(id(module), '')} ({type(module).__name__})".lstrip()
        cut = self._current(name)
        self._attentions += 1
        for per_head in _PER_HEAD:
            if more.get(per_head) is not None:
                why = "which has heads of its own: Ulysses cannot split it"
                raise ConfigError(f"{name} gives its attention {per_head}, {why} ({self.where})")
        if self.context is None and isinstance(mask, Tensor) and mask.shape[-1] != cut.length:
            what = f"was given a mask {list(mask.shape)} for {cut.length} positions"
            raise ConfigError(f"{name} {what}: give the model a mask of whole sequences ({self.where})")
        heads, early = Heads(self.group, 2, 1, name), self._early.get(module)
        if early is not None:
            q, k, v = (heads.real(x, cut) for x in early.land())
        else:
            k, v = (heads.spread(x, q.shape[1]) for x in (k, v))
            q, k, v = (heads.enter(x, cut) for x in (q, k, v))
        if self.context is not None:
            return heads.leave(self.context.attend(name, module, cut, q, k, v, mask, more), cut, 1, 2), None
        if "position_ids" in more:
            more["position_ids"] = None
        # query heads per key/value head of this rank, which a module without such a number expects to be one
        ratio, before = q.shape[1] // max(k.shape[1], 1), getattr(module, "num_key_value_groups", None)
        if before is None:
            k, v = (x.repeat_interleave(ratio, 1) for x in (k, v))
        else:
            module.num_key_value_groups = ratio  # type: ignore[assignment]
        try:
            out, weights = function(module, q, k, v, mask, **more)
        finally:
            if before is not None:
                module.num_key_value_groups = before
        return heads.leave(out, cut, 1, 2), weights

    def mask(self, function: Callable[..., Any], **more: Any) -> Any:
        """Return a transformers mask of the whole sequence."""
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
            why = "runs before the module where sequences are cut: enter= must be the first block"
            raise ConfigError(f"{name} {why} ({self.where}, E10)")
        if self.cut is None:
            raise RuntimeError(f"{name} ran outside of the model's forward pass: call the model itself")
        return self.cut

    def _begin(self, length: int, what: str, mask: Any = None, rows: int = 1) -> Cut:
        # begin a pass over sequences of this length; ``mask``: padding mask [b, s], ``rows``: b
        self._attentions, multiple = 0, self.multiple
        if self.context is not None:  # all cp ranks have as many positions
            multiple *= self.cp.size() * self.context.chunks(self._packed)
        cut = Cut.of(length, self.group, multiple, pads=self.pads, what=what, where=self.where)
        if self.context is not None:
            packed = None if self._packed is None else self._packed.expand(rows, -1)
            cut = self.context.deal(cut, packed, mask)
        self.cut = cut
        return cut

    def _require_attention(self) -> None:
        if self._attentions == 0:
            raise ConfigError(
                f"no attention of {type(self.model).__name__} went through an exchange, so ranks would see their own"
                f" positions only: name the modules that compute it with core= ({self.where}, E10)"
            )

    def _refuse_neighbours(self, paths: list[str]) -> None:
        # raise ConfigError if something beside attention mixes positions in a transformers model
        for top in paths if self._hugging_face else ():
            for path, module in self.model.get_submodule(top).named_modules(prefix=top):
                wide = isinstance(module, _ConvNd) and any(n > 1 for n in module.kernel_size)
                if wide or isinstance(module, nn.RNNBase):
                    raise ConfigError(
                        f"{path} ({type(module).__name__}) of {type(self.model).__name__} goes from position to"
                        f" position outside of attention, and each rank has its own positions only: {self._instead}"
                    )

    # region: sequences are cut between two modules

    def _cut_region(self, args: Mapping[str, Any]) -> None:
        if "enter" not in args or "leave" not in args:
            given = next(f"{name}={args[name]!r}" for name in ("enter", "leave") if name in args)
            what = "the first block, and the norm after the last"
            raise ConfigError(f"enter= and leave= belong together: {what}; there is only {given} ({self.where}, E13)")
        dim = self.seq_dim

        def enter(x: Tensor) -> Tensor:
            self._begin(x.shape[dim], "the sequence")
            # backward: each rank has its positions' gradient, and they are summed as parameters' are
            return self._current().take(x, dim)

        def leave(x: Tensor) -> Tensor:
            cut = self._current(last)
            if x.shape[dim] != cut.local:
                raise ConfigError(
                    f"{last} leaves {x.shape[dim]} positions of a rank's {cut.local}: leave= must be where"
                    f" enter='{first}' and what was cut inside of it end, sequence() for instance ({self.where}, E10)"
                )
            return cut.whole(x, dim, self.group, self.cp, "reduce_scatter")

        def end(model: nn.Module, _: Any, result: Any) -> Any:
            if result is None:  # the forward pass has raised an exception
                return None
            self._require_attention()
            ranks = self.group.size() * self.cp.size()
            return map_tensors(result, lambda t: ShareOfGradient.apply(t, ranks) if t.requires_grad else t)

        def without_cache(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hooked:
            # the key/value cache of transformers expects whole sequences
            names = parameter_names(model)
            takes_any = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(model.forward).parameters.values())
            if "use_cache" in names or (takes_any and getattr(model.config, "use_cache", False)):
                return (), {**dict(zip(names, args, strict=False)), **kwargs, "use_cache": False}
            return args, kwargs

        first, last = (expand(self.model, args[name])[0] for name in ("enter", "leave"))
        blocks = expand(self.model, f"{first.rpartition('.')[0]}.*" if "." in first else first)
        self._refuse_neighbours(blocks)
        for block in blocks:
            self.model.get_submodule(block).register_forward_pre_hook(self._cut_inputs_of_block, with_kwargs=True)
        # before the hook above: this one says how long the sequence is
        change_input(self.model.get_submodule(first), first, args.get("arg"), enter, self.where, first=True)
        change_output(self.model.get_submodule(last), last, None, leave, self.where)
        if self._hugging_face:
            self.model.register_forward_pre_hook(without_cache, with_kwargs=True)
        self.model.register_forward_hook(end, always_call=True)

    def _cut_inputs_of_block(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hooked:
        cut = self._current(f"{self._paths.get(id(module), '')} ({type(module).__name__})")

        def taken(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(map(taken, value))
            is_whole = isinstance(value, Tensor) and value.ndim > 1 and value.shape[1] == cut.length
            return cut.take(value, 1, None) if is_whole else value

        names = parameter_names(module)
        args = tuple(taken(a) if i < len(names) and names[i] in _OF_BLOCKS else a for i, a in enumerate(args))
        return args, {name: taken(value) if name in _OF_BLOCKS else value for name, value in kwargs.items()}

    # root: the model's inputs are cut

    def _cut_root(self, args: Mapping[str, Any]) -> None:
        model, name = self.model, type(self.model).__name__
        self._loss: str | None = None  # how the model makes its loss: next_token, per_token, or None: unknown
        if self.inputs:
            self._positions = args.get("positions")
            model.register_forward_pre_hook(self._begin_inputs, with_kwargs=True)
        elif not self._hugging_face:
            raise ConfigError(
                f"specify where the sequence of {name} is cut: inputs=, names of the model's inputs that have positions"
                " (and positions=, where it takes their numbers), or enter= and leave=, the modules between which"
                f" hidden states are cut ({self.where})"
            )
        else:
            of_sequences = ("pooler", "score", "classifier", "qa_outputs")
            head = next((n for n, _ in model.named_modules() if n.rpartition(".")[2] in of_sequences), None)
            if head is not None and "TokenClassification" not in name:
                raise ConfigError(
                    f"{head} of {name} works on whole sequences, and each rank would have a part: cut them inside, with"
                    " enter= (the first block) and leave= (the norm or block after which they are whole again)"
                    f" ({self.where})"
                )
            self._refuse_neighbours([""])
            self._loss, of_type = args.get("loss"), getattr(model, "loss_type", None)
            if self._loss not in (None, "next_token", "per_token"):
                raise ConfigError(f"loss must be next_token or per_token, not {self._loss!r} ({self.where})")
            if self._loss == "next_token" and of_type == "ForMaskedLM":
                why = "makes a mean over its labels, each of its own token, and not of the next: leave loss out"
                raise ConfigError(f"{name} {why} ({self.where}, E3)")
            if self._loss is None and (of_type == "ForCausalLM" or name.endswith(("ForCausalLM", "LMHeadModel"))):
                self._loss = "next_token"
            elif self._loss is None and of_type in ("ForMaskedLM", "ForTokenClassification"):
                self._loss = "per_token"
            model.register_forward_pre_hook(self._begin_hugging_face, with_kwargs=True)
        model.register_forward_hook(self._end_root, always_call=True)

    def _begin_hugging_face(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hooked:
        names, config, cls, where = parameter_names(model), model.config, type(model).__name__, self.where
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        given = {name: value for name, value in given.items() if value is not None}
        first = given.get("input_ids", given.get("inputs_embeds"))
        if not isinstance(first, Tensor):
            nothing = "there is nothing to cut over sp"
            raise ConfigError(f"the model was called without input_ids and without inputs_embeds: {nothing}")
        of_generate = {name: given.get(name, 0) for name in ("past_key_values", "logits_to_keep")}  # 0 keeps all
        if generating := [name for name, value in of_generate.items() if type(value) is not int or value != 0]:
            raise ConfigError(
                f"{cls} was given {', '.join(generating)}, as generate() does: it continues whole sequences, and each"
                " rank has its own positions only; generate with the whole model (applied.save_pretrained), or one"
                f" split over tp ({where})"
            )
        if given.get("output_router_logits", getattr(config, "output_router_logits", False)):
            raise ConfigError(
                f"{cls} balances its experts by a loss over the whole sequence (output_router_logits), and each rank"
                f" would make one of its own positions: set output_router_logits to False ({where})"
            )
        mask, positions = given.get("attention_mask"), given.get("position_ids")
        self._packed = None
        # transformers takes positions that restart for packed documents: without a mask, and without a cache
        caches = given.get("use_cache", getattr(config, "use_cache", False))
        # whether transformers recomputes; the older name is read only without the newer one, because it warns
        flags = [n for n in ("is_activation_checkpointing", "is_gradient_checkpointing") if hasattr(type(model), n)]
        caches = caches and not (flags and getattr(model, flags[0]))
        if mask is None and not caches and positions is not None and positions.shape[-1] > 1:
            starts = F.pad(positions.diff(dim=-1) != 1, (1, 0))
            self._packed = starts.cumsum(-1) if bool(starts.any()) else None
        what = "input_ids" if "input_ids" in given else "inputs_embeds"
        cut = self._begin(first.shape[1], what, mask, first.shape[0])
        if positions is None:
            given["position_ids"] = torch.arange(first.shape[1], device=first.device)[None]
            # RoBERTa counts from its padding index on, OPT by its mask
            counter: Any = next((m for m in model.modules() if hasattr(m, "create_position_ids_from_input_ids")), None)
            if counter is not None and first.ndim == 2:
                given["position_ids"] = counter.create_position_ids_from_input_ids(first, counter.padding_idx)
            elif getattr(config, "model_type", "") == "opt" and isinstance(mask, Tensor) and mask.ndim == 2:
                given["position_ids"] = mask.long().cumsum(1) * mask.long() - 1
        if cut.padded != cut.length or positions is not None or self.context is not None:
            # else a jump in the positions is taken for a new document; all ones cost no mask
            given.setdefault("attention_mask", torch.ones(first.shape[:2], dtype=torch.long, device=first.device))
        if "use_cache" in names or "labels" in names:
            given["use_cache"] = False
        if not any(p.kind is p.VAR_KEYWORD for p in inspect.signature(model.forward).parameters.values()):
            given = {name: value for name, value in given.items() if name in names}
        self._weight: Tensor | None = None  # of this rank's mean in that of all labels
        labels = given.get("labels")
        if isinstance(labels, Tensor) and self._loss == "next_token":
            given.setdefault("shift_labels", F.pad(labels, (0, 1), value=IGNORED)[..., 1:])
            given.setdefault("num_items_in_batch", (given["shift_labels"] != IGNORED).sum())
        elif isinstance(labels, Tensor) and self._loss == "per_token":
            self._weight = (cut.take(labels, 1, IGNORED) != IGNORED).sum().double() / (labels != IGNORED).sum()
        elif isinstance(labels, Tensor):
            raise ConfigError(
                f"it is not known how {cls} makes a loss of labels: give loss='next_token' or loss='per_token' (a mean"
                f" over labelled positions), or cut sequences inside the model, with enter= and leave= ({where})"
            )
        hf_attention.RUNNING.set(self)
        for name, fill in _INPUTS.items():
            if isinstance(given.get(name), Tensor):
                given[name] = cut.take(given[name], 1, fill)
        return (), given

    def _begin_inputs(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hooked:
        names = parameter_names(model)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        missing = [name for name in self.inputs if not isinstance(given.get(name), Tensor)]
        if missing:
            what = f"{', '.join(missing)}, which are to be cut over sp"
            raise ConfigError(f"the model was called without {what} ({self.where})")
        first, at = given[self.inputs[0]], self._positions
        cut = self._begin(first.shape[self.seq_dim], self.inputs[0])
        given.update({name: cut.take(given[name], self.seq_dim) for name in self.inputs})
        if at is not None:
            positions = torch.arange(cut.length, device=first.device) if given.get(at) is None else given[at]
            is_tensor = isinstance(positions, Tensor)
            given[at] = cut.take(positions, positions.ndim - 1, None) if is_tensor else positions
        return (), given

    def _end_root(self, model: nn.Module, args: Any, result: Any) -> Any:
        hf_attention.RUNNING.set(None)
        if result is None:  # the forward pass has raised an exception
            return None
        self._require_attention()
        if self._loss is None or not hasattr(result, "get") or result.get("loss") is None:
            return result
        loss = result["loss"]
        if self._weight is not None and bool(self._weight > 0):
            loss = loss * self._weight.to(loss.dtype)
        elif self._weight is not None:  # the mean over no labels is NaN
            loss = (result["logits"] * 0.0).sum().to(loss.dtype)
        loss = reduce_from(loss, self.group)
        result["loss"] = loss if self.context is None else reduce_from(loss, self.cp)
        return result

    # results

    def take(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return this rank's positions of a tensor of the last pass, with zeros for padding."""
        return self._current().take(x, dim)

    def complete(self, result: Any) -> Any:
        """Return a result with all positions in each tensor that has this rank's along ``seq_dim``. Collective."""
        cut, dim = self._current(), self.seq_dim

        def whole(t: Tensor) -> Tensor:
            is_share = t.ndim > dim and t.shape[dim] == cut.local
            return cut.whole(t, dim, self.group, self.cp, self.grad_of_whole) if is_share else t

        if self._is_region:
            change_records(result, HIDDEN, whole)
            return result
        heads = records_of(result, HEADS)  # whole already, and as long as it may happen to be
        for name in heads:  # transformers' results have no update()
            result[name] = None
        completed = map_tensors(result, whole)
        for name, value in heads.items():
            completed[name] = value
        return completed
