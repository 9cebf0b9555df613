"""Numbers that routers and the step exchange: loads, terms that keep them even, earlier choices."""

# The gradient of the balance and the z term (``ops/routing.py``) is added inside a layer's backward, to that of its
# logits: the terms need no graph, whatever stage a layer is in and whether it is recomputed. They are divided by the
# sequences and tokens of the step, so that no layout changes them.
#
#     sequence   c_e and q are those of a sequence; its ranks sum up c in the forward pass
#     global     c_e is that of the step, known before the first backward: with several micro-batches it counts first

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from megatron_sp.comm.collectives import all_reduce
from megatron_sp.ops.routing import RoutingSpec, balance_scores, count_chosen, margins
from megatron_sp.parallel.expert_exchange import Numbers
from megatron_sp.parallel.parallel_context import ExpertParallel

BalanceKind = Literal["none", "sequence", "global"]
Key = tuple[int, int]  # layer, slice of the sequence


@dataclass(frozen=True)
class BalanceSpec:
    """Coefficients of the terms."""

    kind: BalanceKind = "none"
    balance: float = 0.0
    z: float = 0.0  # coefficient of the z term


@dataclass(frozen=True)
class TermWeights:
    """Factors of the terms' gradients, fp64: coefficient, loss scale, one over global counts."""

    balance: Tensor  # for the sum over sequences; with ``global`` for c_e * q of the step, without E / k
    z: Tensor  # for the sum over tokens


class RouterStep:
    """Loads and terms of all routers in one step, on this rank."""

    def __init__(
        self, routing: RoutingSpec, spec: BalanceSpec, num_layers: int, ep: ExpertParallel, device: torch.device
    ) -> None:
        self.routing, self.spec, self.ep = routing, spec, ep
        # tokens of this rank that have chosen each expert
        self.loads = torch.zeros(num_layers, routing.num_experts, dtype=torch.int64, device=device)
        # of the balance and the z term, without the global counts
        self.sums = torch.zeros(2, dtype=torch.float64, device=device)
        self.known: Tensor | None = (
            None  # loads of the whole step, if the balance term is global and they are summed up
        )
        self.is_counting = False  # forward passes without gradients count for the passes to come
        self.watched: Watched | None = None  # what --verify-parallelism compares
        # of the terms' gradients; may wait for counts of the step
        self.weights: Callable[[], TermWeights] | None = None

    @property
    def counts_first(self) -> bool:
        return self.spec.kind == "global"

    def settle(self) -> None:
        """Sum up the loads for the global balance term. Collective."""
        if self.counts_first:
            self.known = all_reduce(self.loads.clone(), self.ep.tokens)

    def weights_from(self, sequences: Tensor, tokens: Tensor, scale: float = 1.0) -> TermWeights:
        """Return the terms' weights, from counts of the whole step."""
        by = tokens.square() if self.spec.kind == "global" else sequences
        return TermWeights(self.spec.balance * scale / by.clamp_min(1), self.spec.z * scale / tokens.clamp_min(1))

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Let forward passes without gradients count for those to come. Collective."""
        self.is_counting = True
        try:
            yield
        finally:
            self.is_counting = False
        self.settle()

    def counters(self) -> Tensor:
        """Return [sums of the terms, loads], fp64, to be summed over all ranks."""
        counters = torch.cat([self.sums, self.loads.flatten().double()])
        return counters if self.ep.counts else torch.zeros_like(counters)

    def loads_in(self, counters: Tensor) -> Tensor:  # fp64 [layers, E], from the sum of ``counters``
        return counters[-self.loads.numel() :].view(self.loads.shape)

    def micro_batch(self, batch: int, lengths: Tensor | int, replayed: Tensor | None = None) -> RouterPass:
        """Return the context of a micro-batch; ``replayed``: choices to be made."""
        router_pass = RouterPass(self, batch, lengths, replayed)
        if self.watched is not None and not self.is_counting:
            self.watched.passes.append(router_pass)
        return router_pass


@dataclass
class Watched:
    """Routing of a step."""

    margin: float = float("inf")  # the smallest margin of a choice (``ops/routing.py``)
    passes: list[RouterPass] = field(default_factory=list)  # of the micro-batches, with all their choices

    def choices(self) -> list[Tensor]:
        return [torch.stack([one.seen[layer] for layer in sorted(one.seen)]) for one in self.passes]


class FirstPass(NamedTuple):
    """Choices that a recomputation repeats: no rounding can send a token elsewhere."""

    chosen: Tensor  # int64 [tokens, k]
    numbers: Numbers


@dataclass
class RouterPass:
    """Routers in a micro-batch."""

    step: RouterStep
    batch: int
    lengths: Tensor | int
    replayed: Tensor | None = None  # choices to be made, of the whole sequences, [layers, s, b, k]
    rows: Tensor | None = None  # positions of this rank's rows, [positions], while choices are replayed
    seen: dict[int, Tensor] = field(default_factory=dict)  # choices of each layer, [s, b, k], if they are watched
    # first passes of layers that are computed again, by layer and slice
    first: dict[Key, FirstPass] = field(default_factory=dict)
    counts: dict[int, Tensor] = field(default_factory=dict)  # [b, E] of each layer, over the ranks of the sequence
    scores: dict[int, Tensor] = field(default_factory=dict)  # [b, E] of each layer, sums over this rank's tokens

    def given(self, layer: int) -> Tensor | None:
        # the choice that a layer is to make, int64 [tokens, k], if choices are replayed
        if self.replayed is None:
            return None
        assert self.rows is not None, "the model says which rows these are"
        return self.replayed[layer][self.rows].flatten(0, 1)

    def observe(self, layer: int, logits: Tensor, chosen: Tensor, bias: Tensor | None = None) -> None:
        """Count a layer's choices."""
        # collective over a sequence's ranks with a balance term of sequences
        step, spec = self.step, self.step.spec
        # the sequence of each row [positions, b]
        sequences = None if self.batch == 1 else torch.arange(len(chosen), device=chosen.device) % self.batch
        counts = count_chosen(chosen, step.routing.num_experts, sequences, self.batch)
        if step.known is None or step.is_counting:
            step.loads[layer] += counts.sum(0)
        if step.is_counting:
            return
        if step.watched is not None:
            if len(logits):
                step.watched.margin = min(step.watched.margin, float(margins(logits, step.routing, bias).min()))
            self.seen[layer] = chosen.view(-1, self.batch, chosen.shape[1])
        if spec.z:
            step.sums[1] += logits.logsumexp(1).double().square_().sum()
        if spec.kind == "none":
            return
        if spec.kind == "sequence":
            counts = all_reduce(counts, step.ep.sequence)
            self.counts[layer] = self.counts[layer] + counts if layer in self.counts else counts
        scores = balance_scores(logits, step.routing).double()
        by_row = scores.view(-1, self.batch, scores.shape[1]).sum(0)
        self.scores[layer] = self.scores[layer] + by_row if layer in self.scores else by_row

    def finish(self) -> None:
        """Add the balance term to the step's sum, at the end."""
        step = self.step
        for layer, scores in self.scores.items():
            factor, counts = self._factor_and_counts(layer)
            step.sums[0] += (factor * counts * scores).sum()
        self.scores.clear()

    def _factor_and_counts(self, layer: int) -> tuple[Tensor | float, Tensor]:
        # c, fp64 [b, E], and E / (k T^2) of each sequence [b, 1], or of all; with a global term [1, E] and E / k
        step = self.step
        share = step.routing.num_experts / step.routing.top_k
        if step.spec.kind == "global":
            assert step.known is not None, "settle() sums up the loads before they are used"
            return share, step.known[layer][None].double()
        counts = self.counts[layer].double()  # integers times a Python number would be fp32
        if isinstance(self.lengths, int):
            return share / max(1, self.lengths) ** 2, counts
        return share / self.lengths.double().clamp_min(1).square()[:, None], counts

    def gradients(self, layer: int, tokens: int, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
        # of a layer's balance scores, [tokens, E] or [1, E], and the weight of its z term, where there are terms
        step, spec = self.step, self.step.spec
        if step.weights is None or (spec.kind == "none" and not spec.z):
            return None, None
        weights, of_scores = step.weights(), None
        if spec.kind != "none":
            factor, counts = self._factor_and_counts(layer)
            of_scores = (weights.balance * factor * counts).to(dtype)
            if len(of_scores) > 1:  # one row for each sequence, which those of [positions, b] take in turn
                of_scores = of_scores.expand(tokens // self.batch, *of_scores.shape).reshape(tokens, of_scores.shape[1])
        return of_scores, weights.z.to(dtype) if spec.z else None
