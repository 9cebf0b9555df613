"""Cost of a schedule for one rank: bytes of its parameters, and bytes that it sends in one step, by collective.

Sizes come from one forward pass of the whole model without weight values (meta device); the traffic of Ulysses and of
recomputation comes from one of the split model (``traffic.py``). Sent bytes are those of ring algorithms over n ranks:
an all_reduce of w bytes sends 2 (n-1)/n w; an all_gather to w bytes, or a reduce_scatter from w bytes, sends (n-1)/n w.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megatron_sp.schedule.check.dry_run import inputs_of
from megatron_sp.schedule.check.follower import Follower
from megatron_sp.schedule.check.meta_copy import meta_copy
from megatron_sp.schedule.report.survey import Edge, survey, unapplied, without_numbers
from megatron_sp.schedule.report.traffic import again, sent
from megatron_sp.schedule.verify.diagnosis import tensors_of
from megatron_sp.utils.errors import ConfigError
from megatron_sp.utils.numbers import round_up

if TYPE_CHECKING:
    from megatron_sp.schedule.schedule import Schedule

_SHARE = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0}


@dataclass
class CollectiveCost:
    """Cost of the collectives at modules whose paths differ only in numbers.

    Attributes:
        path: path of the modules, with a star for each number.
        words: description of the collective.
        calls: number of modules.
        forward, backward: bytes that a rank sends in one step, at all of these modules together.
    """

    path: str
    words: str
    calls: int = 0
    forward: float = 0.0
    backward: float = 0.0


@dataclass
class Cost:
    """Cost of one rank.

    Attributes:
        places: the collectives, the most expensive first.
        parameters: bytes of its parameters; gradients take as much.
        whole_parameters: bytes of the whole model's parameters.
        gradients: bytes that it sends to sum gradients over tp, sp and dp, once per step.
        activations: bytes that the whole model saves for backward; a rank saves less.
        notes: remarks on what is not included.
    """

    places: list[CollectiveCost] = field(default_factory=list)
    parameters: int = 0
    whole_parameters: int = 0
    gradients: float = 0.0
    activations: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def sent(self) -> float:
        """Bytes sent in a step of one micro-batch."""
        return self.gradients + sum(p.forward + p.backward for p in self.places)

    def record(self) -> dict[str, Any]:
        """Return the cost as a JSON-serialisable dict."""
        return {**asdict(self), "sent": self.sent}

    def __str__(self) -> str:
        lines = [
            f"parameters of a rank: {show_bytes(self.parameters)} of {show_bytes(self.whole_parameters)}",
            f"activations of the whole model: {show_bytes(self.activations)}",
            f"sent by a rank in a step: {show_bytes(self.sent)}",
        ]
        for p in self.places:
            both = f"{show_bytes(p.forward)} forward, {show_bytes(p.backward)} backward"
            lines.append(f"  {both}: {p.path or 'the model'}{f' x {p.calls}' if p.calls > 1 else ''}, {p.words}")
        if self.gradients:
            lines.append(f"  {show_bytes(self.gradients)}: sums of gradients")
        return "\n".join([*lines, *self.notes])


def show_bytes(count: float) -> str:
    """Format a number of bytes, such as ``1.5 MiB``."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"


def cost(schedule: Schedule, batch: int | Mapping[str, Any], seq: int | None = None) -> Cost:
    """Compute the cost of a schedule.

    Args:
        batch: rows of a micro-batch, of ``seq`` token ids each; or keyword arguments of the model.
    Raises:
        ConfigError: the schedule has been applied, so the whole model's sizes are gone; or the model does not run
            without weight values.
    """
    if schedule.applied is not None:
        raise ConfigError("cost() looks at the whole model, which is gone after apply(): call it before (E15)")
    found, model = survey(schedule), without_numbers(schedule.model)
    for d in unapplied(schedule.directives):
        if d.do == "replace":
            raise ConfigError(f"cost() cannot tell the sizes after {d}: make the schedule of a model in which it is replaced already")
    edges = [(node.path, edge) for node in found.root.walk() for edge in node.edges]
    try:
        sizes, activations = _sizes(model, edges, _inputs(batch, seq), nullcontext())
    except ConfigError:  # it inspects its ids or masks, which have values in a dry run
        model = meta_copy(schedule.model)
        sizes, activations = _sizes(model, edges, inputs_of(_inputs(batch, seq, "cpu")), Follower(model).inside())
    made = Cost(activations=activations)
    shares = {d.args.get("axis", "sp") for d in schedule.directives if d.do == "ulysses"}
    for path, edge in edges:
        if edge.axis not in shares:
            _add(made, path, edge, sizes.get((path, edge.side, edge.tensor)), schedule, shares)
    if shares or any(d.do == "checkpoint" for d in schedule.directives):
        _add_run(made, schedule, shares, _inputs(batch, seq, "cpu"))
    made.places.sort(key=lambda p: -(p.forward + p.backward))
    _add_parameters(made, found, schedule)
    return made


def _inputs(batch: int | Mapping[str, Any], seq: int | None, device: str = "meta") -> dict[str, Any]:
    if isinstance(batch, int):
        if seq is None or batch < 1 or seq < 1:
            raise ConfigError(f"cost() wants rows and tokens, such as cost(4, 2048), and got batch {batch}, seq {seq}")
        return {"input_ids": torch.zeros(batch, seq, dtype=torch.long, device=device)}
    return {key: v.to(device) if isinstance(v, Tensor) else v for key, v in batch.items()}


def _sizes(
    model: nn.Module, edges: list[tuple[str, Edge]], batch: dict[str, Any], inside: AbstractContextManager[None]
) -> tuple[dict[tuple[str, str, str], int], int]:
    """Return (bytes of the tensor at each edge, bytes saved for backward). Raises ConfigError: the model does not run this way."""
    found: dict[tuple[str, str, str], int] = {}
    for path, edge in edges:
        module = model.get_submodule(path)
        if edge.side == "in":
            module.register_forward_pre_hook(_input_hook(found, path, edge.tensor), with_kwargs=True)
        else:
            module.register_forward_hook(_output_hook(found, path, edge.tensor))
    parameters = {p.untyped_storage()._cdata for p in model.parameters()}
    kept: dict[int, tuple[Tensor, int]] = {}

    def keep(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage._cdata not in parameters:
            kept.setdefault(storage._cdata, (t, storage.nbytes()))
        return t

    try:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t), inside:
            model(**batch)
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        raise ConfigError(f"the model does not run without weight values: {error}; give cost() its keyword arguments as batch") from None
    return found, sum(size for _, size in kept.values())


def _input_hook(found: dict[tuple[str, str, str], int], path: str, name: str) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        names = list(inspect.signature(module.forward).parameters)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        tensor = given.get(name, args[0] if args else next(iter(kwargs.values()), None))
        if isinstance(tensor, Tensor):
            found[path, "in", name] = tensor.nbytes

    return hook


def _output_hook(found: dict[tuple[str, str, str], int], path: str, name: str) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        tensors = tensors_of(result)
        if tensors:
            found[path, "out", name] = tensors.get(name, next(iter(tensors.values()))).nbytes

    return hook


def _add(made: Cost, path: str, edge: Edge, size: int | None, schedule: Schedule, shares: set[str]) -> None:
    words = f"{edge.side} {edge.tensor}".strip() + f": {edge.words}"
    place = _place(made, path, words)
    if size is None:
        made.notes.append(f"not in here: {path}, {words}, which was not called")
        return
    n = schedule.mesh.group(edge.axis).size()
    if edge.directive.do == "vocab_parallel" and edge.forward == "all_gather":  # padded words have logits, too
        head: Any = schedule.model.get_submodule(path)
        words_of_all = head.weight.shape[0]
        size = size // words_of_all * round_up(words_of_all, n)
    for axis in shares - {edge.axis}:
        size //= schedule.mesh.group(axis).size()
    place.forward += _SHARE.get(edge.forward, 0.0) * (n - 1) / n * size
    place.backward += _SHARE.get(edge.backward, 0.0) * (n - 1) / n * size


def _place(made: Cost, path: str, words: str) -> CollectiveCost:
    """Return the entry of modules whose paths differ only in numbers, and count one more of them."""
    star = re.sub(r"(?<![^.])\d+(?![^.])", "*", path)
    place = next((p for p in made.places if (p.path, p.words) == (star, words)), None)
    if place is None:
        made.places.append(place := CollectiveCost(star, words))
    place.calls += 1
    return place


_WORDS = {"all_to_all": "positions and heads traded", "gather_from": "positions made whole", "reduce_from": "parts of the loss summed"}


def _add_run(made: Cost, schedule: Schedule, axes: set[str], batch: dict[str, Any]) -> None:
    """Add costs that only a run of the split model shows: exchanges of Ulysses, and exchanges that recomputation repeats."""
    found = sent(schedule.model, schedule.directives, schedule.mesh, schedule.seq_dim, batch)
    for each in found:
        if each.axis in axes and each.forward + each.backward:
            place = _place(made, each.path, f"{_WORDS.get(each.name, each.name)} over {each.axis}")
            place.forward += each.forward
            place.backward += each.backward
    for path, size in again(found):
        _place(made, path, "computed again, and sent again").backward += size


def _add_parameters(made: Cost, found: Any, schedule: Schedule) -> None:
    sizes = {name: p.element_size() for name, p in schedule.model.named_parameters()}
    n, copies = schedule.mesh.tp.size(), schedule.mesh.dp_sp.size()
    for node in found.root.walk():
        for part in node.parts:
            each = sizes.get(f"{node.path}.{part.name}".lstrip("."))
            if each is None:  # another name of a tied parameter
                continue
            local, whole = (each * torch.Size(shape).numel() for shape in (part.local, part.shape))
            made.parameters += local
            made.whole_parameters += whole
            made.gradients += 2 * local * ((n - 1) / n * part.summed + (copies - 1) / copies)
