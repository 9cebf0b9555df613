"""``--verify``: compare the logits of both sides of a conversion, and locate the first difference.

The error of an output is max|a - b| / max|a|. 16-bit weights are computed in fp32; where the conversion has rounded the
weights, those of the source are rounded too before computing, so that rounding cannot explain a difference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_sp.config.schema import DataConfig
from megatron_sp.convert.backends import Backend, Transformers, backend_of
from megatron_sp.convert.copies import widest
from megatron_sp.convert.formats.format import Format
from megatron_sp.convert.model import Model
from megatron_sp.convert.options import Options
from megatron_sp.convert.reference import CLASSES, MASKED, NEXT, ORDER, OUTPUTS, Cast, Rows
from megatron_sp.data.tokenizers import Tokenizer, build_tokenizer
from megatron_sp.data.tokenizers.kept import CONFIG, name_files
from megatron_sp.utils.errors import EXIT_NUMERICS, EXIT_OK, ConfigError

LIMITS = {torch.float32: 2e-5, torch.float64: 1e-10}
"""Largest error of logits, relative to the largest logit, by what they are computed in."""
_SEED, _LENGTHS, _MAX_TEXT, _LONGEST = 1234, (48, 31, 7, 1), 64, 600
_TOPICS = ("for", "class", "lambda")
_MASK_EVERY = 7
_CHOICE = {NEXT: "next token", MASKED: "masked token", ORDER: "order", CLASSES: "class"}

Tell = Callable[[str], None]


def verify(
    source: Format, input: Path, target: Format, output: Path, options: Options, text: str | None, tell: Tell
) -> int:
    """Compare the input of a conversion with its output.

    Args:
        source, input: format and folder of the input.
        target, output: format and folder of the output.
        options: options of the conversion.
        text: text to compare on, besides random tokens; None: parts of Python's own documentation, if there is a
            tokenizer.
        tell: called with the results, line by line.
    Returns:
        EXIT_OK, or EXIT_NUMERICS if they differ.
    Raises:
        CheckpointError: one of them cannot be read, or transformers cannot load the output.
        ConfigError: text is given, but there is no tokenizer.
    """
    before = source.read(input, options)
    changes: dict[str, Any] = {"step": None, "output": None, "tokenizer": None, "qkv_layout": None}
    of_output = replace(options, vocab_size=before.config.vocab_size, **changes)
    after = target.read(output, of_output)
    first = backend_of(source.name, input, before, options, tell)
    sides = first, backend_of(target.name, output, after, of_output, tell)
    dtypes = _dtype_of(before), _dtype_of(after)
    is_rotary = before.config.position_embedding_type == "rope"
    is_narrow = is_rotary and any(isinstance(side, Transformers) for side in sides)  # their rotary positions are fp32
    compute = torch.float64 if dtypes == (torch.float64, torch.float64) and not is_narrow else torch.float32
    dtypes = _computed_with(sides[0], dtypes[0]), _computed_with(sides[1], dtypes[1])
    casts = _cast(*dtypes, compute, or_same=True), _cast(dtypes[1], dtypes[0], compute)
    tell(f"verify: {sides[0].label} on {input}, against {sides[1].label} on {output}, in"
         f" {_name(compute)}{_rounded(dtypes)}")  # fmt: skip
    same = True
    for what, rows in _samples(before, after, text, tell):
        same &= _tell_all(what, compare(sides, casts, rows), LIMITS[compute], tell)
    tell("verify: the same" if same else f"verify: NOT the same: do not use {output}")
    return EXIT_OK if same else EXIT_NUMERICS


class Result(NamedTuple):
    """Comparison of one result tensor."""

    name: str
    difference: float  # max|a - b|; NaN if one has a NaN where the other has none
    scale: float
    agreement: float  # fraction of positions with the same argmax; meaningless for hidden states
    blank: float = 0.0  # fraction of numbers that are NaN, or the same infinity, on both sides, and so are not compared

    @property
    def error(self) -> float:
        return self.difference / self.scale if self.scale else self.difference


def compare(sides: Sequence[Backend], casts: Sequence[Cast], rows: Rows) -> list[Result]:
    """Compare all results of both sides on the same tokens, in the order of computation."""
    ours, theirs = (side.compute(rows, cast) for side, cast in zip(sides, casts, strict=True))
    inside = torch.arange(rows.tokens.shape[1]) < torch.tensor(rows.lengths)[:, None]
    results = []
    for (name, a), (other, b) in zip(ours, theirs, strict=True):
        assert name == other, f"{sides[0].label} gives {name}, {sides[1].label} {other}"
        is_of_sequence = name in (ORDER, CLASSES)
        results.append(_compare(name, a, b) if is_of_sequence else _compare(name, a[inside], b[inside]))
    return results


def _compare(name: str, a: Tensor, b: Tensor) -> Result:
    common = min(a.shape[-1], b.shape[-1])
    a, b = a[..., :common].double(), b[..., :common].double()
    agreement = (a.argmax(-1) == b.argmax(-1)).double().mean().item()
    blank = a.isnan() & b.isnan() | a.isinf() & (a == b)
    a, b = a.masked_fill(blank, 0.0), b.masked_fill(blank, 0.0)
    return Result(name, (a - b).abs().max().item(), a.abs().max().item(), agreement, blank.double().mean().item())


def _tell_all(what: str, results: list[Result], limit: float, tell: Tell) -> bool:
    same = True
    for r in results:
        if r.name in OUTPUTS:
            good = r.error <= limit and r.blank < 1  # false for NaN
            same &= good
            if r.blank:
                tell(f"  {what}: {r.name}: {100 * r.blank:.2f} % of the numbers are not finite on either side, and are"
                     " not compared")  # fmt: skip
            tell(f"  {what}: {r.name}: max|difference| {r.difference:.2e}, {r.error:.1e} of the largest"
                 f" ({r.scale:.3g}); the same {_CHOICE[r.name]} at {100 * r.agreement:.2f} %:"
                 f" {'ok' if good else f'ABOVE the limit of {limit:g}'}")  # fmt: skip
    if not same:
        first = next((r for r in results if not r.error <= limit), None)
        if first is not None:
            size = f"max|difference| {first.difference:.2e}, {first.error:.1e} of the largest"
            tell(f"  {what}: the first difference is in: {first.name} ({size})")
    return same


def _dtype_of(model: Model) -> torch.dtype | None:
    return widest(model.dtypes) if len(model.dtypes) == 1 else None


def _computed_with(side: Backend, read: torch.dtype | None) -> torch.dtype | None:
    own = side.dtype
    return own if own is not None and read is not None and own.itemsize < read.itemsize else read


def _cast(own: torch.dtype | None, other: torch.dtype | None, compute: torch.dtype, *, or_same: bool = False) -> Cast:
    if own is None or other is None or other.itemsize > own.itemsize:
        return lambda t: t.to(compute)
    if other.itemsize == own.itemsize and not or_same:
        return lambda t: t.to(compute)
    return lambda t: t.to(other).to(compute)  # as the conversion has rounded the other side's weights


def _rounded(dtypes: tuple[torch.dtype | None, torch.dtype | None]) -> str:
    source, target = dtypes
    if source is None or target is None or source == target:
        return ""
    return f" (weights rounded to {_name(target if target.itemsize <= source.itemsize else source)})"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class _Limits(NamedTuple):
    vocab_size: int
    positions: int
    longest: int


def _samples(before: Model, after: Model, text: str | None, tell: Tell) -> list[tuple[str, Rows]]:
    configs = before.config, after.config
    positions = min(c.max_positions for c in configs)
    windows = [c.window_size for c in configs]
    beyond = max((window + 9 for window in windows if window), default=0)
    if beyond > min(_LONGEST, positions):
        tell(f"note: sequences of up to {_LENGTHS[0]} tokens: what lies after the window of {beyond - 9} is not"
             " compared")  # fmt: skip
        beyond = 0
    longest = min(positions, max(_LENGTHS[0], beyond))
    limits = _Limits(min(c.vocab_size or 1 for c in configs), positions, longest)
    samples = [("random tokens", _random_rows(limits, before))]
    if (ids := _text_ids(before, after, limits, text, tell)) is not None:
        samples.append(("text", _rows(ids, before)))
    return samples


def _random_rows(limits: _Limits, model: Model) -> Rows:
    draw = torch.Generator().manual_seed(_SEED)
    lengths = [limits.longest, *(min(length, limits.positions) for length in _LENGTHS[1:])]
    return _rows([torch.randint(limits.vocab_size, (length,), generator=draw).tolist() for length in lengths], model)


def _rows(ids: list[list[int]], model: Model) -> Rows:
    """Right-pad the sequences with token 0; for BERT the second half of each belongs to the second segment."""
    lengths = [len(row) for row in ids]
    tokens, types = torch.zeros(2, len(ids), max(lengths), dtype=torch.int64)
    for row, sequence in enumerate(ids):
        tokens[row, : len(sequence)] = torch.tensor(sequence)
        if model.config.is_bert and model.config.token_types > 1:
            types[row, (len(sequence) + 1) // 2 : len(sequence)] = 1
    return Rows(tokens, lengths, types)


def _text_ids(before: Model, after: Model, limits: _Limits, text: str | None, tell: Tell) -> list[list[int]] | None:
    tokenizer = _tokenizer(before) or _tokenizer(after)
    if tokenizer is None:
        if text is not None:
            raise ConfigError("--verify-text needs a tokenizer, and neither side has one: give --tokenizer PATH")
        return None
    if tokenizer.vocab_size > limits.vocab_size:
        tell(f"note: the tokenizer has {tokenizer.vocab_size} tokens, the model {limits.vocab_size}: no text is"
             " compared")  # fmt: skip
        return None
    most = min(_MAX_TEXT, limits.positions)
    texts = [text] if text else _documentation()
    rows = [_special(tokenizer, tokenizer.encode(one), most, before.config.is_bert) for one in texts]
    if rows and not any(rows):
        tell("note: the tokenizer has no token for the text: none is compared")
    return [ids for ids in rows if ids] or None


def _special(tokenizer: Tokenizer, ids: list[int], most: int, is_bert: bool) -> list[int]:
    if not is_bert or tokenizer.cls is None or tokenizer.sep is None:
        return ids[:most]
    ids = [tokenizer.cls, *ids[: most - 2], tokenizer.sep]
    if tokenizer.mask is not None:
        ids[3:-1:_MASK_EVERY] = [tokenizer.mask] * len(ids[3:-1:_MASK_EVERY])
    return ids


def _documentation() -> list[str]:
    try:
        from pydoc_data.topics import topics
    except ImportError:  # a stripped installation
        return []
    return [topics[name][:600] for name in _TOPICS if name in topics]


def _tokenizer(model: Model) -> Tokenizer | None:
    data = DataConfig()
    if not name_files(data, model.tokenizer, Path(), model.tokenizer.get(CONFIG)):
        return None
    for field in ("tokenizer_model", "vocab_file", "merge_file"):
        if named := getattr(data, field):
            setattr(data, field, str(model.tokenizer[Path(named).name]))
    return build_tokenizer(data)
