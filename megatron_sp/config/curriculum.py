"""Length of the sequences in each step, by the formulas of DeepSpeed's ``curriculum_scheduler.py``.

What lies beyond the length of a sample is not read again; validation and test see whole samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_sp.config.schema import Config

# a rule is a condition and a sentence
# fmt: off
_FORMS = {
    "fixed_linear": "fixed_linear SHORTEST LONGEST STEPS MULTIPLE",
    "fixed_root": "fixed_root SHORTEST LONGEST STEPS MULTIPLE DEGREE",
    "fixed_discrete": "fixed_discrete LENGTH:LAST_STEP LENGTH:LAST_STEP ... LENGTH",
}


@dataclass(frozen=True)
class Curriculum:
    """A curriculum."""

    shortest: int  # length at the beginning
    longest: int  # length at the end
    steps: int = 1  # steps from one to the other
    multiple: int = 1  # a length is rounded down to a multiple of this
    degree: float = 1.0  # of the root along which the length grows; 1: a straight line
    # instead of all that, pairs of a length and the last step with it; the length of ``longest`` follows
    stages: tuple[tuple[int, int], ...] = ()

    def length(self, step: int) -> int:
        """Return the length in step number ``step``, from 1."""
        if self.stages or self.shortest == self.longest:
            return next((length for length, last in self.stages if step <= last), self.longest)
        grown = (step / self.steps) ** (1.0 / self.degree)
        length = math.floor(grown * (self.longest - self.shortest) + self.shortest)
        length -= length % self.multiple
        return min(max(length, -(-self.shortest // self.multiple) * self.multiple), self.longest)


def read_curriculum(words: tuple[str, ...]) -> Curriculum:
    """Return the curriculum of --seq-length-curriculum.

    Raises:
        ValueError: the words do not say one; the message has the form and the values.
    """
    kind, *values = " ".join(words).split() or [""]
    if kind not in _FORMS:
        raise ValueError(f"expected {', '.join(_FORMS)} and numbers, got '{kind[:40]}'")
    if kind == "fixed_discrete":
        return _in_stages(values)
    if len(values) != (5 if kind == "fixed_root" else 4):
        raise ValueError(f"expected {_FORMS[kind]}, got {len(values)} numbers: {' '.join(values)[:60]}")
    shortest, longest, steps, multiple = (_whole(word) for word in values[:4])
    degree = 1.0
    if kind == "fixed_root":
        try:
            degree = float(values[4])
        except ValueError:
            degree = 0.0
        if not 0.1 <= degree < math.inf:
            raise ValueError(f"the degree of the root must be a number of at least 0.1, got '{values[4][:40]}'")
    if shortest > longest:
        raise ValueError(f"the shortest length ({shortest}) must be at most the longest ({longest})")
    if multiple > longest:
        raise ValueError(f"lengths are multiples of {multiple}, and the longest is {longest}: take a smaller step")
    return Curriculum(shortest, longest, steps, multiple, degree)


def _in_stages(values: list[str]) -> Curriculum:
    if len(values) < 2:
        raise ValueError(f"expected {_FORMS['fixed_discrete']}, got '{' '.join(values)[:60]}'")
    stages = []
    for word in values[:-1]:
        length, _, last = word.partition(":")
        stages.append((_whole(length), _whole(last)))
    longest = _whole(values[-1])
    lengths, lasts = [*(length for length, _ in stages), longest], [last for _, last in stages]
    if lengths != sorted(lengths) or lasts != sorted(set(lasts)):
        listed = [", ".join(map(str, row[:8])) + (", ..." if len(row) > 8 else "") for row in (lengths, lasts)]
        raise ValueError(f"lengths ({listed[0]}) must grow, and so must the last steps with them ({listed[1]})")
    return Curriculum(lengths[0], longest, stages=tuple(stages))


def _whole(word: str) -> int:
    if not word.isdecimal() or not 1 <= int(word) <= 10**12:
        raise ValueError(f"expected a whole number of at least 1, got '{word[:40]}'")
    return int(word)


def curriculum_violations(config: Config) -> Iterator[str]:
    """Yield a message for each violated rule of --seq-length-curriculum, which is given."""
    try:
        first = read_curriculum(config.batch.seq_length_curriculum or ()).length(1)
    except ValueError as error:
        yield f"seq_length_curriculum: {error}"
        return
    if config.model.is_bert:
        yield ("--seq-length-curriculum cuts off GPT's samples, which are tokens of a stream; those of BERT are whole:"
            " leave it out")
    chunks, slices = config.kernels.mlp_chunks, config.parallel.num_pipeline_slices
    positions = -(-first // config.parallel.num_shards)
    if chunks > positions:
        yield (f"mlp_chunks ({chunks}) must be at most the positions of a rank ({positions} of the first {first} tokens"
            f" of --seq-length-curriculum): use --mlp-chunks {positions} or less, or begin with longer sequences")
    if slices > first:
        yield (f"pipeline_slices ({slices}) must be at most the first length of --seq-length-curriculum ({first}): use"
            f" --pipeline-slices {first} or less, or begin with longer sequences")
