"""GPT samples: runs of ``seq_length`` tokens (plus one for the last label) from shuffled, concatenated documents.

``gpt_index`` determines the tokens of sample i; they depend on the document lengths, the seed, the sequence length and
the number of epochs, never on the rank. This module reads the tokens and checks them against the vocabulary.

A sample may hold the end of one document and the beginning of others. With --reset-position-ids and
--reset-attention-mask, positions restart after each end-of-document token, and tokens attend only within their own
document. The order of samples and their tokens do not change, so neither does the fingerprint.

``MockGPTDataset`` makes samples for --mock-data: a sample is a walk around a ring of ids, each the previous one plus a
small step, and short steps are more likely than long ones. The loss of a model that learns the rule falls from
ln(vocabulary) to the entropy of the step, about 1.2 nats. Occasionally the end-of-document id takes the place of an id.
Sample i depends on (seed, split, i) alone.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megatron_sp.data.dataset import FileDataset, RowDataset, Sample, hash_of, make_sample
from megatron_sp.data.tokenizers.tokenizer import Tokenizer
from megatron_sp.utils.errors import DataError

if TYPE_CHECKING:
    from megatron_sp.data.indexed_dataset import IndexedDataset

_RING = 512  # ids of synthetic samples, at most: large enough to look like text, small enough to learn from few samples
_SPLITS = {"train": 0, "valid": 1, "test": 2}
_STEPS = np.array([1, 2, 3, 5])
_CUMULATIVE = np.array([0.5, 0.75, 0.875])  # of their probabilities 1/2, 1/4, 1/8, 1/8
_EOD_PROBABILITY = 1 / 512


@dataclass(frozen=True)
class GPTOptions:
    """Options that determine the GPT samples, besides the data and the tokenizer."""

    seq_length: int  # s, tokens per sample
    seed: int  # seed of the sample order
    eod_mask_loss: bool = False  # no loss where the input is ``eod``


class GPTDataset:
    """GPT samples of one split of one data set.

    Args:
        indexed: the tokens.
        bounds: first sequence of the split and the one after its last.
        options: sequence length, seed and loss mask.
        num_samples: minimum number of samples; the split is repeated as often as needed, even within a sample. None:
            one epoch.
        tokenizer: provides ``eod`` and the fingerprint.
        vocab_size: ids not below this are errors (default: the tokenizer's).
        name: name of the split, for messages.
        cache_folder: folder for the index arrays; None keeps them in memory.
    Raises:
        DataError: the split is empty, or ``num_samples`` is None and one epoch is shorter than a sample.
    """

    def __init__(
        self, indexed: IndexedDataset, bounds: tuple[int, int], options: GPTOptions, *, num_samples: int | None, tokenizer: Tokenizer,
        vocab_size: int | None = None, name: str = "train", cache_folder: str | Path | None = None,
    ) -> None:  # fmt: skip
        from megatron_sp.data.gpt_index import (
            GPTIndex,
            build_gpt_index,
            plan_epochs,
            sample_index_dtype,
            shuffle_index_dtype,
        )
        from megatron_sp.data.index_cache import cached_arrays

        seq_length, seed = options.seq_length, options.seed
        self.indexed, self.seq_length = indexed, seq_length
        self._vocab_size = vocab_size or tokenizer.vocab_size
        self._masked_eod = tokenizer.eod if options.eod_mask_loss else None
        first, last = bounds
        lengths = indexed.sequence_lengths
        tokens_per_epoch = int(lengths[first:last].sum(dtype=np.int64))
        if tokens_per_epoch < (seq_length + 1 if num_samples is None else 1):
            raise DataError(_too_short(indexed, bounds, name, tokens_per_epoch, seq_length))
        self._name, self._tokens, self._wanted = name, tokens_per_epoch, num_samples or 0
        self._plan = plan = plan_epochs(tokens_per_epoch, seq_length, num_samples)
        self._facts = {
            "kind": "GPT-1", "data": indexed.digest(), "bounds": [first, last], "seq_length": seq_length, "seed": seed,
            "epochs": plan.num_epochs, "last_epoch_apart": plan.separate_last,
        }  # fmt: skip
        self._fingerprint = hash_of(**self._facts, tokenizer=tokenizer.fingerprint(), masked_eod=self._masked_eod)
        num_entries = plan.num_epochs * (last - first)
        expected = {
            "document": ((num_entries,), np.dtype(np.int32)),
            "sample": ((plan.num_samples + 1, 2), sample_index_dtype(num_entries)),
            "shuffle": ((plan.num_samples,), shuffle_index_dtype(plan.num_samples)),
        }
        arrays = cached_arrays(
            cache_folder,
            f"{os.path.basename(indexed.prefix)}-{name}-{hash_of(**self._facts)[:24]}",
            expected,
            lambda: build_gpt_index(lengths, np.arange(first, last), seq_length, plan, seed)._asdict(),
        )
        self.index = GPTIndex(**arrays)

    def __len__(self) -> int:
        return self._plan.num_samples

    def __getitem__(self, i: int) -> Sample:
        """Return sample ``i`` in the shuffled order.

        Raises:
            IndexError: no such sample.
            DataError: a token is outside the vocabulary, or the ``.bin`` has become shorter.
        """
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)}")
        return make_sample(self._read(int(self.index.shuffle[i])), self._masked_eod)

    def document_lengths(self, i: int) -> np.ndarray:
        """Return the tokens of each document in sample ``i``, int64, as the index of the data set has them.

        These are the documents of ``packing`` where the last token of each, and no other, is the end-of-document token.
        """
        cut = int(self.index.shuffle[i])
        (first, start), (last, end) = self.index.sample[cut : cut + 2].tolist()
        sequences = self.index.document[first : last + 1]
        lengths = self.indexed.sequence_lengths[sequences].astype(np.int64)
        lengths[-1] = end  # the token there is the last label, which is no input
        lengths[0] -= start
        if (
            len(self.indexed) != self.indexed.document_index.size - 1
        ):  # sentences: only a document's last one ends with the token
            bounds = self.indexed.document_index
            ends = bounds[np.searchsorted(bounds, sequences, side="right")] == sequences + 1
            lengths = np.add.reduceat(lengths, np.concatenate([[0], np.flatnonzero(ends[:-1]) + 1]))
        return lengths[lengths > 0]

    def fingerprint(self) -> str:
        return self._fingerprint

    def where(self, i: int) -> str:
        cut = int(self.index.shuffle[i])
        (first, start), (last, _) = self.index.sample[cut : cut + 2].tolist()
        more = f" and the {last - first} that follow it in the shuffled order" if last > first else ""
        return f"{self.indexed.bin_path}, sequence {int(self.index.document[first])} from token {start}{more}"

    @property
    def num_epochs(self) -> int:
        """Number of times that the split is repeated to provide the samples."""
        return self._plan.num_epochs

    def repetition(self, at_once: int | None = None, eval_iters: int | None = None) -> str | None:
        """Return words about a split that is repeated: for training within a sample, elsewhere for what is read at once; else None.

        Args:
            at_once: samples that one validation, or the test, reads of this data set; None: all of them.
            eval_iters: steps in which it does, to say how many would do.
        """
        per_epoch = (self._tokens - 1) // self.seq_length
        enough = per_epoch > 0 if self._name == "train" else at_once is not None and 0 < at_once <= per_epoch
        if self.num_epochs == 1 or enough:
            return None
        has = f"{per_epoch} samples" if per_epoch else "less than one sample"
        fewer = per_epoch * eval_iters // at_once if at_once and eval_iters else 0
        return (
            f"{self.indexed.prefix}: the {self._name} split has {self._tokens:,} tokens, {has} of {self.seq_length} (and one more): it is"
            f" repeated {self.num_epochs} times for the {self._wanted} that are asked for"
            + (f"; --eval-iters {fewer} takes no more than it has" if fewer else "")
        )

    def _read(self, cut: int) -> np.ndarray:
        # read the tokens from one cut to the next, both ends included, int64 [s + 1]
        (first, start), (last, end) = self.index.sample[cut : cut + 2].tolist()
        stretch = np.empty(self.seq_length + 1, np.int64)
        filled = 0
        for position in range(first, last + 1):
            sequence = int(self.index.document[position])
            offset = start if position == first else 0
            stop = end + 1 if position == last else None
            tokens = self.indexed.get(sequence, offset, None if stop is None else stop - offset)
            self.indexed.check_tokens(tokens, sequence, offset, self._vocab_size)
            stretch[filled : filled + tokens.size] = tokens
            filled += tokens.size
        assert filled == stretch.size, f"sample at cut {cut} has {filled} tokens, expected {stretch.size}"
        return stretch


class BlendedDataset:
    """Blend of several data sets; sample i is sample ``samples[i]`` of set ``sets[i]``.

    Args:
        datasets: the data sets to blend; their own order and fingerprints do not change.
        weights: normalised; part of the fingerprint.
        sets: int16 [n]. samples: int64 [n].
    Raises:
        DataError: the blend needs more samples of a set than it has.
    """

    def __init__(
        self, datasets: Sequence[FileDataset], weights: np.ndarray, sets: np.ndarray, samples: np.ndarray
    ) -> None:
        self.datasets, self.sets, self.samples = datasets, sets, samples
        self._fingerprint = hash_of(kind="blend-1", weights=weights.tolist(), sets=[d.fingerprint() for d in datasets])
        for d, count in enumerate(np.bincount(sets, minlength=len(datasets)).tolist()):
            if count > len(datasets[d]):
                raise DataError(
                    f"{datasets[d].indexed.prefix}: the blend needs {count} samples of it, it has {len(datasets[d])}"
                )

    def __len__(self) -> int:
        return len(self.sets)

    def __getitem__(self, i: int) -> Sample:
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)}")
        return self.datasets[int(self.sets[i])][int(self.samples[i])]

    def document_lengths(self, i: int) -> np.ndarray:
        return self.datasets[int(self.sets[i])].document_lengths(int(self.samples[i]))

    def fingerprint(self) -> str:
        return self._fingerprint

    def where(self, i: int) -> str:
        return self.datasets[int(self.sets[i])].where(int(self.samples[i]))


class ChainedDataset:
    """Concatenation of several data sets: passes over the same data, each in its own order.

    Its fingerprint is that of the first pass, which determines the later ones: a longer run begins like a shorter one.
    """

    def __init__(self, parts: Sequence[RowDataset]) -> None:
        self.parts = parts
        self._ends = np.cumsum([len(part) for part in parts])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, i: int) -> Sample:
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)}")
        part, place = self._place(i)
        return self.parts[part][place]

    def document_lengths(self, i: int) -> np.ndarray:
        part, place = self._place(i)
        return self.parts[part].document_lengths(place)

    def fingerprint(self) -> str:
        return self.parts[0].fingerprint()

    def where(self, i: int) -> str:
        part, place = self._place(i)
        return self.parts[part].where(place)

    def _place(self, i: int) -> tuple[int, int]:
        # (part, index in that part) of sample ``i``
        part = int(np.searchsorted(self._ends, i, side="right"))
        return part, i - (int(self._ends[part - 1]) if part else 0)


def _too_short(indexed: IndexedDataset, bounds: tuple[int, int], name: str, tokens: int, seq_length: int) -> str:
    first, last = bounds
    if not tokens:
        what = f"{last - first} of {len(indexed)} sequences" + (", none of which has a token" if last > first else "")
        return (
            f"{indexed.prefix}: the {name} split is empty ({what}): give it a larger share with --split (or 0 to go without it), or use"
            " more data"
        )
    return (
        f"{indexed.prefix}: the {name} split has {tokens} tokens (sequences {first} to {last - 1} of {len(indexed)}); one sample needs"
        f" seq_length + 1 = {seq_length + 1} tokens: give it a larger share with --split, use more data, or lower --seq-length; in a blend"
        " without weights, give some (--data-path WEIGHT PREFIX ...): it is repeated then"
    )


class PackedDataset:
    """Data set that adds ``positions`` and ``documents``, both int64 [s] and optional, to the samples of another one.

    Args:
        dataset: the underlying data set.
        eod: the end-of-document token; it belongs to the document that it ends.
        positions: add the position of each token within its document.
        documents: add the number of each token's document, from 0.
    """

    def __init__(self, dataset: RowDataset, eod: int, *, positions: bool, documents: bool) -> None:
        self.dataset, self.eod, self.positions, self.documents = dataset, eod, positions, documents

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, i: int) -> Sample:
        sample = dict(self.dataset[i])
        number = document_numbers(sample["tokens"], self.eod)
        if self.documents:
            sample["documents"] = number
        if self.positions:
            at = np.arange(number.size, dtype=np.int64)
            starts = np.flatnonzero(np.diff(number, prepend=-1))
            sample["positions"] = at - starts[number]
        return sample

    def document_lengths(self, i: int) -> np.ndarray:
        return self.dataset.document_lengths(i)

    def fingerprint(self) -> str:
        return self.dataset.fingerprint()

    def where(self, i: int) -> str:
        return self.dataset.where(i)


def document_numbers(tokens: np.ndarray, eod: int) -> np.ndarray:
    # the document number of each token within the sample, int64 [s]
    ended = np.cumsum(tokens == eod, dtype=np.int64)
    return np.concatenate([np.zeros(1, np.int64), ended[:-1]]) if tokens.size else ended


class MockGPTDataset:
    """Data set of ``num_samples`` synthetic samples of one split; the arguments are those of ``GPTDataset``."""

    def __init__(self, options: GPTOptions, *, num_samples: int, tokenizer: Tokenizer, name: str = "train") -> None:
        self.seq_length, self._num_samples = options.seq_length, num_samples
        self._key = np.array([options.seed & (2**64 - 1), _SPLITS[name]], np.uint64)
        self._eod, self._mask_eod = tokenizer.eod, options.eod_mask_loss
        others = [i for i in range(min(tokenizer.vocab_size, _RING + 1)) if i != tokenizer.eod][:_RING]
        self._ring = np.array(others, np.int64)
        self._fingerprint = hash_of(
            kind="mock-1", seed=options.seed, split=name, seq_length=options.seq_length, tokenizer=tokenizer.fingerprint(),
            mask_eod=options.eod_mask_loss,
        )  # fmt: skip

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, i: int) -> Sample:
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)}")
        random = np.random.Generator(
            np.random.Philox(key=self._key, counter=[0, 0, 0, i])
        )  # 2**192 numbers for each sample
        uniform = random.random((2, self.seq_length + 1))
        steps = _STEPS[np.searchsorted(_CUMULATIVE, uniform[0], side="right")]
        start = int(random.random() * self._ring.size)
        stretch = self._ring[(start + np.cumsum(steps)) % self._ring.size]
        stretch[uniform[1] < _EOD_PROBABILITY] = self._eod
        return make_sample(stretch, self._eod if self._mask_eod else None)

    def document_lengths(self, i: int) -> np.ndarray:
        """Return the tokens of each document in sample ``i``, int64; here the sample has to be drawn for it."""
        return (
            np.bincount(document_numbers(self[i]["tokens"], self._eod))
            if self._eod is not None
            else np.array([self.seq_length])
        )

    def fingerprint(self) -> str:
        return self._fingerprint

    def where(self, i: int) -> str:
        return "the synthetic samples of --mock-data"
