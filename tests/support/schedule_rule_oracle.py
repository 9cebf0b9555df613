"""What a rule of the dry run claims, held against numbers: a function is computed whole and on ranks that are played one after the other.

    draw   how an input lies over the ranks, drawn for each tensor (``Draw``)
    claim       the placements that ``Follower`` gives the results, or its refusal
    proof       the same function of each rank's real numbers: the results must be the claimed shares, sums or copies of the whole's, and
                gradients, of a random weight of each result, must arrive at the inputs as their letters say (``placements.py``)

A claim that numbers contradict is a wrong rule. A refusal is never wrong, so what is accepted is counted, too
(``schedule_rule_cases.py``).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import lcm
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_sp.comm.groups import SINGLE_RANK, Group
from megatron_sp.schedule.check.call_values import Seen
from megatron_sp.schedule.check.follower import Axis, Follower
from megatron_sp.schedule.core.mesh import imagined
from megatron_sp.schedule.core.placement_steps import tensors_in
from megatron_sp.schedule.core.placements import Choice, Placement, PlacementError

TOLERANCE = {
    torch.float64: 1e-8,
    torch.complex128: 1e-8,
    torch.float32: 1e-4,
    torch.complex64: 1e-4,
    torch.float16: 2e-2,
    torch.bfloat16: 1e-1,
}


@dataclass(frozen=True)
class Draw:
    """How an input lies over the ranks.

    Attributes:
        letter: I, R, S, P, U of ``placements``; N: whole and without a gradient; ?: whole, and still open whether I or
            R; A: a share of what is filled with one value.
        dim: that is cut.
        style: of S: "" each rank has a run, "outer" of two equal parts, "blocks" of two unequal ones, "copies": two
            ranks have the same.
    """

    letter: str
    dim: int = 0
    style: str = ""

    def __str__(self) -> str:
        return f"{self.letter}({self.dim}{', ' if self.style else ''}{self.style})" if self.letter in "SA" else self.letter

    def multiple(self, ranks: int) -> int:
        """Of what the cut dim must be a multiple."""
        return {"": ranks, "outer": 2 * ranks, "blocks": 3 * ranks, "copies": ranks // 2}[self.style]

    def placement(self, whole: Sequence[int], ranks: int) -> Placement:
        if self.letter not in "SA":
            return Placement("?", choice=Choice("here")) if self.letter == "?" else Placement("I" if self.letter == "N" else self.letter)
        each = whole[self.dim] // ranks
        blocks = (each // 3, each - each // 3) if self.style == "blocks" else ()
        outer, copies = 2 if self.style == "outer" else 1, 2 if self.style == "copies" else 1
        return Placement("S", self.dim, outer, blocks, copies, as_needed=self.letter == "A")


@dataclass(frozen=True)
class Input:
    """A tensor that a case wants.

    Attributes:
        dims: of each the letters whose product it is; none: a dim of one.
        kind: f: numbers with a gradient; +: between 0.1 and 0.9, with one; c: complex; m: a mask; i: whole numbers.
        below: of i: of whose size they are less.
    """

    dims: tuple[tuple[str, ...], ...]
    kind: str = "f"
    below: str = ""

    @classmethod
    def of(cls, text: str) -> Input:
        kind, _, dims = text.rpartition(":")
        name, _, below = (kind.strip() or "f").partition("<")
        return cls(tuple(tuple(d.split("*")) if d != "1" else () for d in dims.split()), name, below)

    @property
    def differentiable(self) -> bool:
        return self.kind in "f+c"

    @cached_property
    def draws(self) -> list[Draw]:
        found = [Draw(p) for p in ("INR?PU" if self.differentiable else "NU" if self.kind == "m" else "NPU")]
        for dim, letters in enumerate(self.dims):
            if letters:
                found += [Draw("S", dim, style) for style in ("", "outer", "blocks", "copies")]
                found.append(Draw("A", dim))
        return found

    def along(self, letter: str, style: str = "") -> list[Draw]:
        """Cuts along the dims that a letter leads."""
        return [Draw("S", dim, style) for dim, letters in enumerate(self.dims) if letters and letters[0] == letter]


@dataclass(frozen=True)
class Case:
    """A call of functions that a rule is about.

    Attributes:
        rule: its name in the table.
        label: tells it from the rule's others.
        inputs: the tensors that it gets.
        call: of the sizes and these tensors.
        least: sizes that letters have at least.
        random: results are random numbers, so that only their shapes can be compared.
        even: letters whose sizes ranks can share, also where nothing is cut.
    """

    rule: str
    label: str
    inputs: tuple[Input, ...]
    call: Callable[..., Any]
    least: dict[str, int] = field(default_factory=dict, hash=False)
    random: bool = False
    even: str = ""

    def __str__(self) -> str:
        return f"{self.rule}[{self.label}]"

    @property
    def letters(self) -> list[str]:
        return sorted({letter for x in self.inputs for dim in x.dims for letter in dim})


class Sizes:
    """Of each letter, as a module has them written down: ``divided`` ones are those of a rank."""

    def __init__(self, sizes: dict[str, int], divided: str = "", ranks: int = 1, group: Group = SINGLE_RANK) -> None:
        self._sizes, self._divided, self._ranks, self._group, self.read = sizes, divided, ranks, group, set[str]()

    @property
    def group(self) -> Group:
        """Of exchanges."""
        return self._group

    def __getattr__(self, letter: str) -> int:
        if letter not in self._sizes:
            raise AttributeError(letter)
        self.read.add(letter)
        return self._sizes[letter] // (self._ranks if letter == self._divided else 1)


class Wrong(AssertionError):
    """Numbers contradict a rule."""


@dataclass
class Verdict:
    """Of one trial: "refused" (why), "proven" (what was claimed), or "none" (the call itself fails)."""

    what: str
    words: str = ""
    placements: list[Placement] = field(default_factory=list)


class _Called(nn.Module):
    def __init__(self, case: Case, sizes: Sizes) -> None:
        super().__init__()
        self.case, self.sizes = case, sizes

    def forward(self, *tensors: Tensor) -> Any:
        return self.case.call(self.sizes, *tensors)


@dataclass
class Trial:
    """One case with draws.

    Attributes:
        draws: of each input.
        ranks, axis: over which they lie.
        seed: of sizes and numbers.
        divided: a letter whose size the split model has divided, as ``.set(divide=)`` does.
        told: the dry run knows which step of the whole model it is held against.
    """

    case: Case
    draws: tuple[Draw, ...]
    ranks: int = 2
    axis: str = "tp"
    seed: int = 0
    divided: str = ""
    told: bool = True

    def __str__(self) -> str:
        told = ", ".join(map(str, self.draws))
        more = f", {self.divided} divided" if self.divided else ""
        return f"{self.case}({told}) over {self.ranks} of {self.axis}{more}{'' if self.told else ', untold'}, seed {self.seed}"

    @cached_property
    def sizes(self) -> dict[str, int]:
        rng = random.Random(f"{self.case} {self.seed} sizes")
        multiples: dict[str, int] = {}
        for x, p in zip(self.case.inputs, self.draws, strict=True):
            if p.letter in "SA":
                multiples[x.dims[p.dim][0]] = lcm(multiples.get(x.dims[p.dim][0], 1), p.multiple(self.ranks))
        made = {}
        for letter in self.case.letters:
            multiple, least = multiples.get(letter, 1), self.case.least.get(letter, 1)
            multiple = lcm(multiple, self.ranks) if letter in self.case.even else multiple
            n = rng.choice((1, 2, 3) if multiple > 1 else (1, 2, 3, 4, 5, 6)) * multiple
            made[letter] = n if n >= least else -(-least // multiple) * multiple
        return made

    def shape(self, x: Input) -> list[int]:
        shape = []
        for letters in x.dims:
            n = 1
            for letter in letters:
                n *= self.sizes[letter]
            shape.append(n)
        return shape

    @cached_property
    def placements(self) -> list[Placement]:
        return [p.placement(self.shape(x), self.ranks) for x, p in zip(self.case.inputs, self.draws, strict=True)]

    @cached_property
    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(random.Random(f"{self}").randrange(2**31))

    def numbers(self, x: Input, p: Draw) -> Tensor:
        """Of a whole input."""
        shape, g = self.shape(x), self.generator
        if p.letter in "UA":
            one = {"m": torch.tensor(True), "i": torch.tensor(0 if x.below else 2)}.get(x.kind, torch.tensor(0.5, dtype=torch.float64))
            return one.to(torch.complex128 if x.kind == "c" else one.dtype).expand(shape).clone()
        if x.kind == "m":
            made = torch.rand(shape, generator=g) < 0.5
            return made if made.any() or not made.numel() else ~made
        if x.kind == "i":
            return torch.randint(0, self.sizes[x.below], shape, generator=g) if x.below else torch.randint(1, 5, shape, generator=g)
        if x.kind == "+":
            return torch.rand(shape, generator=g, dtype=torch.float64) * 0.8 + 0.1
        return torch.randn(shape, generator=g, dtype=torch.complex128 if x.kind == "c" else torch.float64)

    @cached_property
    def wholes(self) -> list[Tensor]:
        return [self.numbers(x, p) for x, p in zip(self.case.inputs, self.draws, strict=True)]

    def on_ranks(self, whole: Tensor, placement: Placement) -> list[Tensor]:
        """An input as ranks have it."""
        if placement.kind != "P":
            return [taken(whole, placement, self.ranks, rank) for rank in range(self.ranks)]
        return self.parts(whole)

    def parts(self, whole: Tensor) -> list[Tensor]:
        """Of a sum."""
        if whole.dtype in (torch.float64, torch.complex128):
            made = [torch.randn(whole.shape, generator=self.generator, dtype=whole.dtype) for _ in range(self.ranks - 1)]
        else:
            made = [torch.randint(0, 3, whole.shape, generator=self.generator).to(whole.dtype) for _ in range(self.ranks - 1)]
        return [*made, whole - sum(made)] if made else [whole]

    # the claim

    def follow(self) -> tuple[list[Placement], Any]:
        """What the dry run says. Raises PlacementError: it refuses."""
        whole = Follower(_Called(self.case, Sizes(self.sizes)))
        without = [_without_numbers(t, x) for t, x in zip(self.wholes, self.case.inputs, strict=True)]
        with whole.inside():
            whole.model(*without)
        expected: dict[str, list[Seen]] | None = whole.record if self.told else None
        group = imagined(self.ranks)
        model = _Called(self.case, Sizes(self.sizes, self.divided, self.ranks, group))
        split = Follower(model, Axis(self.axis, group), {}, expected)
        tensors = []
        for x, p, t, placement in zip(self.case.inputs, self.draws, self.wholes, self.placements, strict=True):
            share = self.on_ranks(t, placement)[0]
            made = _without_numbers(share, x)
            made = made.requires_grad_().clone() if x.differentiable and p.letter in "IR?PS" else made
            split.known[made] = placement
            tensors.append(made)
        with split.inside():
            result = model(*tensors)
        return [split.look(t).placement for t in tensors_in(result)], result

    # the proof

    def compute(self, tensors: Sequence[Tensor], divided: str, group: Group = SINGLE_RANK) -> tuple[list[Tensor], list[Tensor]]:
        """(leaves, results)"""
        leaves = [
            t.detach().clone().requires_grad_(x.differentiable and p.letter in "IR?PS")
            for t, x, p in zip(tensors, self.case.inputs, self.draws, strict=True)
        ]
        sizes = Sizes(self.sizes, divided, self.ranks, group)
        result = self.case.call(sizes, *[t.clone() for t in leaves])
        return leaves, list(tensors_in(result))

    def run(self) -> Verdict:
        """Raises Wrong: what the dry run claims is not so."""
        if self.divided and self.sizes[self.divided] % self.ranks:
            return Verdict("none", "a size that cannot be divided")
        try:
            leaves, wholes = self.compute(self.wholes, "")
        except Exception as error:
            return Verdict("none", f"{type(error).__name__}: {error}")
        try:
            claims, _ = self.follow()
        except PlacementError as error:
            if "split model cannot be run" in str(error) and not isinstance(error.__cause__, (RuntimeError, PlacementError)):
                raise Wrong(f"{self}: a rule breaks: {error}") from error
            return Verdict("refused", str(error))
        try:
            self.prove(leaves, wholes, claims)
        except Wrong:
            if self.axis == "dp" and self._counts_rows():
                return Verdict("none", "a number of rows, which over dp is a rank's own")
            raise
        return Verdict("proven", placements=claims)

    def _counts_rows(self) -> bool:
        try:
            replace(self, axis="tp").follow()
        except PlacementError as error:
            return "computes with" in str(error)
        return False

    def prove(self, leaves: list[Tensor], wholes: list[Tensor], claims: list[Placement]) -> None:
        shares = [self.on_ranks(t, placement) for t, placement in zip(self.wholes, self.placements, strict=True)]
        ranks = []
        for rank in range(self.ranks):
            try:
                ranks.append(self.compute([s[rank] for s in shares], self.divided))
            except Exception as error:
                raise Wrong(f"{self}: claims {_told(claims)}, and a rank says {type(error).__name__}: {error}") from error
        if any(len(r[1]) != len(wholes) for r in ranks) or len(claims) != len(wholes):
            raise Wrong(f"{self}: claims {_told(claims)}, of {len(wholes)} results")
        for i, (whole, claim) in enumerate(zip(wholes, claims, strict=True)):
            if why := self.contradicts(whole, [r[1][i] for r in ranks], claim):
                raise Wrong(f"{self}: claims {_told(claims)}, and result {i} {why}")
        for letter in ("I", "R") if any(c.kind == "?" for c in [*claims, *self.placements]) else ("",):
            if why := self.wrong_gradients(leaves, wholes, ranks, claims, letter):
                raise Wrong(f"{self}: claims {_told(claims)}{f' (open: {letter})' if letter else ''}, and {why}")

    def run_together(self, group: Group) -> Verdict:
        """``run`` of exchanges, on real ranks: every rank of the group calls it, and raises Wrong alike."""
        leaves, wholes = self.compute(self.wholes, "")
        try:
            claims, _ = self.follow()
        except (PlacementError, ValueError) as error:
            return Verdict("refused", str(error))
        shares = [self.on_ranks(t, placement) for t, placement in zip(self.wholes, self.placements, strict=True)]
        own, results = self.compute([s[group.rank()] for s in shares], self.divided, group)
        expected, pieces = self.weigh(leaves, wholes, claims, "R")
        grads = _gradients(results, pieces[group.rank()], own)
        every = list(zip(_of_all(results), _of_all(grads), strict=True))
        for i, (whole, claim) in enumerate(zip(wholes, claims, strict=True)):
            if why := self.contradicts(whole, [r[0][i] for r in every], claim):
                raise Wrong(f"{self}: claims {_told(claims)}, and result {i} {why}")
        if why := self.compare(expected, [r[1] for r in every], wholes, "R"):
            raise Wrong(f"{self}: claims {_told(claims)}, and {why}")
        return Verdict("proven", placements=claims)

    def contradicts(self, whole: Tensor, ranks: list[Tensor], claim: Placement) -> str:
        """Why the results of ranks are not what is claimed of them, or ""."""
        if self.case.random:
            if claim.kind == "U":
                return ""
            expected = [taken(whole, claim, self.ranks, r).shape for r in range(self.ranks)]
            return "" if [t.shape for t in ranks] == expected else f"has {[list(t.shape) for t in ranks]} of {list(whole.shape)}"
        if claim.kind == "U":
            alike = all(close(whole.flatten()[0].expand(t.shape), t) for t in (*ranks, whole) if t.numel())
            return "" if alike else "has more than one value"
        if claim.kind == "P":
            summed: Any = sum(t.to(torch.int64) if t.dtype is torch.bool else t for t in ranks)
            return "" if close(whole, summed / self.ranks if claim.mean else summed) else "is not the sum of the ranks' results"
        cuts = [claim]
        if claim.as_needed and self.case.rule != "own_exchange" and ranks[0].shape[claim.dim] % 2 == 0:
            cuts.append(Placement("S", claim.dim, 2, copies=claim.copies))  # whatever it meets may be cut so
        for cut in cuts:
            for rank, t in enumerate(ranks):
                try:
                    expected_share = taken(whole, cut, self.ranks, rank)
                except (RuntimeError, IndexError):
                    return f"of {list(whole.shape)} cannot be cut so"
                if not close(expected_share, t):
                    return f"of rank {rank}, {list(t.shape)}, is not that of the whole, {list(expected_share.shape)}"
        return ""

    def wrong_gradients(self, leaves: list[Tensor], wholes: list[Tensor], ranks: list[Any], claims: list[Placement], open_as: str) -> str:
        """How the gradients of inputs differ from what their letters say, or ""."""
        try:
            expected, pieces = self.weigh(leaves, wholes, claims, open_as)
        except RuntimeError as error:
            if "derivative" in str(error):  # torch has none
                return ""
            raise
        return self.compare(
            expected, [_gradients(results, pieces[rank], own) for rank, (own, results) in enumerate(ranks)], wholes, open_as
        )

    def weigh(self, leaves: list[Tensor], wholes: list[Tensor], claims: list[Placement], open_as: str) -> tuple[Any, list[Any]]:
        """(gradients of the whole inputs, for each rank the weights of its results)"""
        asked = [t.requires_grad and not self.case.random for t in wholes]
        weights = [
            torch.randn(t.shape, generator=self.generator, dtype=torch.float64).to(t.dtype) if a else None
            for t, a in zip(wholes, asked, strict=True)
        ]
        on_ranks = [
            [None] * self.ranks if w is None else self.weights_on_ranks(w, c, open_as) for w, c in zip(weights, claims, strict=True)
        ]
        return _gradients(wholes, weights, leaves), [[w[rank] for w in on_ranks] for rank in range(self.ranks)]

    def compare(self, expected: list[Any], found: list[Any], wholes: list[Tensor], open_as: str) -> str:
        least = max((TOLERANCE[t.dtype] for t in wholes if t.requires_grad), default=0.0)
        for j, (placement, whole) in enumerate(zip(self.placements, expected, strict=True)):
            kind, mine = placement.kind if placement.kind != "?" else open_as, [f[j] for f in found]
            if whole is None:
                continue
            if kind == "R":
                mine = [sum(mine[1:], mine[0])]
            for rank, g in enumerate(mine):
                if kind == "S" and placement.copies > 1:
                    g = mine[rank - rank % placement.copies] + mine[rank - rank % placement.copies + 1]
                if not close(taken(whole, placement, self.ranks, rank) if kind == "S" else whole, g, least):
                    return f"the gradient of input {j} ({kind}) is not what that says"
        return ""

    def weights_on_ranks(self, weight: Tensor, claim: Placement, open_as: str) -> list[Tensor]:
        kind = claim.kind if claim.kind != "?" else open_as
        weight = weight if kind == "S" else taken(weight, claim, self.ranks, 0)
        if kind == "R":
            return self.parts(weight) if weight.dtype in (torch.float64, torch.complex128) else [weight / self.ranks] * self.ranks
        if kind == "P" and claim.mean:
            return [weight / self.ranks] * self.ranks
        if kind != "S":
            return [weight] * self.ranks
        return [taken(weight, claim, self.ranks, rank) / claim.copies for rank in range(self.ranks)]


def taken(whole: Tensor, placement: Placement, ranks: int, rank: int) -> Tensor:
    """A rank's share of the whole, by the definition of ``Placement``."""
    if placement.shuffled > 1:
        return whole.unflatten(0, (placement.shuffled, ranks, -1)).transpose(0, 1).flatten(0, 2)
    if placement.kind != "S":
        return whole
    slots, slot, dim = ranks // placement.copies, rank // placement.copies, placement.dim
    if placement.blocks:
        parts = whole.split([n * slots for n in placement.blocks], dim)
        return torch.cat([part.narrow(dim, slot * n, n) for part, n in zip(parts, placement.blocks, strict=True)], dim)
    if whole.shape[dim] % (placement.outer * slots):
        raise IndexError(f"{list(whole.shape)} cannot be cut as {placement}")
    return (
        whole.unflatten(dim, (placement.outer, slots, -1) if whole.shape[dim] else (placement.outer, slots, 0))
        .select(dim + 1, slot)
        .flatten(dim, dim + 1)
    )


def _of_all(tensors: Sequence[Tensor | None]) -> list[list[Tensor | None]]:
    """Of each rank: its tensors, which are as large on all. Collective."""
    found: list[list[Tensor | None]] = [[] for _ in range(dist.get_world_size())]
    for t in tensors:
        copies = [None if t is None else torch.empty_like(t, memory_format=torch.contiguous_format) for _ in found]
        if t is not None:
            dist.all_gather(copies, t.detach().contiguous())
        for mine, copy in zip(found, copies, strict=True):
            mine.append(copy)
    return found


def close(expected: Tensor, found: Tensor, least: float = 0) -> bool:
    if expected.shape != found.shape:
        return False
    if not (expected.is_floating_point() or expected.is_complex()):
        return torch.equal(expected.to(torch.int64), found.to(torch.int64))
    tolerance = max(least, *(TOLERANCE[t.dtype] for t in (expected, found) if t.dtype in TOLERANCE))
    return torch.allclose(expected.to(torch.complex128), found.to(torch.complex128), tolerance, tolerance, equal_nan=True)


def _gradients(results: list[Tensor], weights: list[Any], leaves: list[Tensor]) -> list[Tensor | None]:
    asked = [t for t in leaves if t.requires_grad]
    pairs = [(t, w) for t, w in zip(results, weights, strict=True) if w is not None and t.requires_grad]
    if not asked or all(w is None for w in weights):
        return [None] * len(leaves)
    grads = (
        torch.autograd.grad([t for t, _ in pairs], asked, [w for _, w in pairs], allow_unused=True, retain_graph=True)
        if pairs
        else [None] * len(asked)
    )
    made = iter(grads)
    found = ((t, next(made)) if t.requires_grad else (t, None) for t in leaves)
    return [None if not t.requires_grad else torch.zeros_like(t) if g is None else g for t, g in found]


def _without_numbers(t: Tensor, x: Input) -> Tensor:
    return t.to("meta") if x.differentiable else t.clone()


def _told(claims: list[Placement]) -> str:
    return ", ".join(map(str, claims)) or "nothing"


def written_sizes(case: Case) -> list[str]:
    """Letters whose sizes a case reads, with "" for none: which of them may have been divided."""
    trial = Trial(case, tuple(Draw("N") for _ in case.inputs))
    sizes = Sizes(trial.sizes)
    with suppress(Exception):
        case.call(sizes, *trial.wholes)
    return ["", *sorted(sizes.read)]


def core(case: Case) -> Iterator[tuple[Draw, ...]]:
    """Placements that every case goes through: each input alone, all alike, all but one."""
    seen = set()
    for made in _core(case):
        if made not in seen:
            seen.add(made)
            yield made


def _core(case: Case) -> Iterator[tuple[Draw, ...]]:
    inputs = case.inputs

    def rest(letter: str, x: Input) -> Draw:
        return Draw(letter if x.differentiable else "N")

    for i, x in enumerate(inputs):
        for p in x.draws:
            if p.style != "copies":
                for other in "NR":
                    yield tuple(p if j == i else rest(other, y) for j, y in enumerate(inputs))
    if len(inputs) == 1:
        return
    for letter in case.letters:
        for styles in (("", ""), ("outer", "outer"), ("blocks", "blocks"), ("outer", ""), ("", "outer"), ("", "blocks")):
            for other in "NRI":
                cuts = [next(iter(x.along(letter, styles[i > 0])), rest(other, x)) for i, x in enumerate(inputs)]
                if any(p.letter == "S" for p in cuts):
                    yield tuple(cuts)
    for letters in ("IR", "RI", "PP", "PR", "RP", "?R", "?I", "UU", "??", "II", "RR"):
        yield tuple(rest(letters[i > 0], x) for i, x in enumerate(inputs))


def drawn(case: Case, seed: int, count: int) -> Iterator[Trial]:
    """Trials with draws that fit together more often than chance would have it, over any axis and number of ranks."""
    rng = random.Random(f"{case} {seed}")
    written = written_sizes(case)
    for i in range(count):
        letter, style = rng.choice(case.letters or [""]), rng.choice(("", "", "outer", "blocks", "copies"))
        rest = rng.choice(("N", "R", ""))
        letters = [rest or rng.choice("NNRI?U") for _ in case.inputs]
        draws = [
            next(iter(x.along(letter, style)), Draw(p if x.differentiable or p == "U" else "N"))
            for x, p in zip(case.inputs, letters, strict=True)
        ]
        while rng.random() < 0.3:
            j = rng.randrange(len(draws)) if draws else 0
            if draws:
                draws[j] = rng.choice(case.inputs[j].draws)
        copies = any(p.style == "copies" for p in draws)
        axis, ranks = rng.choice(("tp", "tp", "sp", "dp")), rng.choice((2, 4) if copies else (2, 2, 3))
        divided = rng.choice([*written, letter]) if letter in written else rng.choice(written)
        yield Trial(case, tuple(draws), ranks, axis, seed * 1000 + i, divided)
