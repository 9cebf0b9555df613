"""Check, before the first step, that documents end as the flags that go by the end-of-document id take them to end.

--reset-attention-mask, --reset-position-ids and --eod-mask-loss find documents by that id among the tokens. On data
without it they would do nothing, and nobody would know. So the last tokens of some documents of every data set are
read, evenly spread over its split: the same on every rank, and few enough that nothing waits for them. Data whose
documents were cut to one length, or joined to long runs, rarely end with the id, and have it inside: that is said and
accepted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from megatron_sp.data.indexed_dataset import IndexedDataset
from megatron_sp.utils.errors import DataError

_LOOKED_AT = 256  # documents of a run, over all its data sets
_AT_LEAST = 16  # of each data set
_EMPTY_IN_A_ROW = 64
_READ_TOKENS = 1 << 16  # of a document that does not end with the id
_NEARLY_ALL = 0.9


class Stretch(NamedTuple):
    """Part of a data set that a run reads: sequences from ``bounds[0]`` to before ``bounds[1]``."""

    indexed: IndexedDataset
    bounds: tuple[int, int]
    name: str


@dataclass
class _Ends:
    """Documents looked at: how many end with the id, and of the others their last ids, their lengths, and the ids inside them."""

    stretch: Stretch
    eod: int
    fit: int = 0
    last: Counter[int] = field(default_factory=Counter)
    lengths: Counter[int] = field(default_factory=Counter)
    inside: Counter[int] = field(default_factory=Counter)

    @property
    def others(self) -> int:
        return self.last.total()

    @property
    def common_last(self) -> int | None:
        (token, times) = self.last.most_common(1)[0]
        return token if self.others > 1 and times >= _NEARLY_ALL * self.others else None

    @property
    def another_id(self) -> int | None:
        # id that seems to end documents here: nearly all of the others end with it, and few have it inside
        token = self.common_last
        return None if token is None or self.inside[token] >= self.others else token

    def words(self) -> str:
        looked_at = self.fit + self.others
        some = "1 document" if looked_at == 1 else f"{looked_at} documents"
        token, times = self.last.most_common(1)[0]
        ends = f"{times} end with {token}" if times > 1 else f"one ends with {token}"
        return f"{self.stretch.indexed.prefix} ({self.stretch.name}): of {some} looked at {self.fit or 'none'} end with it, {ends}"


def check_document_ends(stretches: Sequence[Stretch], eod: int, flags: Sequence[str]) -> tuple[list[str], list[str]]:
    """Look at the ends of some documents of a run's data.

    Returns:
        Notes and warnings about data that fit in part, at most one of each.
    Raises:
        DataError: most documents of a data set do not end with the id, and nothing says that they are pieces, or
            joined.
    """
    count = max(_AT_LEAST, _LOOKED_AT // max(1, len(stretches)))
    misfits = [ends for stretch in stretches if (ends := _look(stretch, eod, count)).others]
    whole = [ends for ends in misfits if not _are_pieces(ends)]
    wrong = [ends for ends in whole if ends.fit < ends.others]
    about = f"{' and '.join(flags)} {'go' if len(flags) > 1 else 'goes'} by the end-of-document id, {eod}"
    if wrong:
        more = f" (and {len(wrong) - 1} more of {len(stretches)} data sets)" if wrong[1:] else ""
        end_id = wrong[0].another_id
        raise DataError(
            f"{about}. {wrong[0].words()}{more}: across them nothing would be reset or masked. Tokenize again with megatron-sp preprocess"
            f" --append-eod; or, if another id ends documents in these data, name it: --eod-id {'ID' if end_id is None else end_id}; or"
            f" leave {'the flags' if len(flags) > 1 else 'the flag'} out"
        )
    notes = [
        f"{about}. {ends.words()}: taken for pieces of documents, with the id inside"
        for ends in misfits
        if _are_pieces(ends)
    ]
    warnings = [
        f"{about}. {ends.words()}: such documents run into the next one, if they are not pieces of one (megatron-sp preprocess"
        " --append-eod puts the id at each end)"
        for ends in whole
    ]
    return notes[:1], warnings[:1]


def _are_pieces(ends: _Ends) -> bool:
    inside = ends.inside[ends.eod]
    if ends.common_last is not None or not (ends.fit or inside):
        return False
    return (ends.others > 1 and len(ends.lengths) == 1) or inside >= ends.others


def _look(stretch: Stretch, eod: int, count: int) -> _Ends:
    seen, indexed = _Ends(stretch, eod), stretch.indexed
    for document, sequence in _last_sequences(indexed, stretch.bounds, count):
        length = int(indexed.sequence_lengths[sequence])
        start = max(0, length - _READ_TOKENS)
        token = int(indexed.get(sequence, length - 1)[0])
        if token == eod:
            seen.fit += 1
            continue
        seen.last[token] += 1
        first, last = indexed.document_index[document : document + 2].tolist()
        seen.lengths[int(indexed.sequence_lengths[first:last].sum(dtype=np.int64))] += 1
        tokens, counts = np.unique(indexed.get(sequence, start)[:-1], return_counts=True)
        seen.inside.update(dict(zip(tokens.tolist(), counts.tolist(), strict=True)))
    return seen


def _last_sequences(indexed: IndexedDataset, bounds: tuple[int, int], count: int) -> Iterator[tuple[int, int]]:
    # yield some documents that end within bounds, evenly spread, each with its last sequence that has a token
    ends, lengths = indexed.document_index[1:], indexed.sequence_lengths
    first, last = (int(np.searchsorted(ends, bound, side="right")) for bound in bounds)
    for k in range(min(count, last - first)):
        start, stop = (first + (last - first) * at // min(count, last - first) for at in (k, k + 1))
        for document in range(start, min(stop, start + _EMPTY_IN_A_ROW)):
            sequence = int(ends[document]) - 1
            begin = int(indexed.document_index[document])
            while sequence >= begin and lengths[sequence] == 0:
                sequence -= 1
            if sequence >= begin:
                yield document, sequence
                break
