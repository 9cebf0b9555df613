"""GPT samples: runs of ``seq_length`` tokens (plus one for the last label) from shuffled, concatenated documents."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from megatron_sp.data.dataset import CombinedDataset, RowDataset, RowSet, Sample, hash_of, make_sample
from megatron_sp.data.tokenizers.tokenizer import Tokenizer
from megatron_sp.utils.errors import ConfigError, DataError

if TYPE_CHECKING:
    from megatron_sp.data.index_cache import Expected
    from megatron_sp.data.indexed_dataset import IndexedDataset

_LAST_EPOCH_THRESHOLD = 0.80
_INT32_MAX, _UINT32_MAX = 2**31 - 1, 2**32 - 1
_CHUNK = 1 << 22

# Synthetic samples: a walk around a ring of ids, each the previous one plus a small step, short steps being more
# likely. The loss of a model that learns it falls from ln(vocabulary) to the entropy of the step, about 1.2 nats.
_RING = 512  # ids, at most: large enough to look like text, small enough to learn from few samples
_SPLITS = {"train": 0, "valid": 1, "test": 2}
_STEPS = np.array([1, 2, 3, 5])
_CUMULATIVE = np.array([0.5, 0.75, 0.875])  # of their probabilities 1/2, 1/4, 1/8, 1/8
_EOD_PROBABILITY = 1 / 512

# ---- the order of samples ----
# The shuffled sequences of a split are concatenated, over as many epochs as the samples need; this stream is cut every
# seq_length tokens, each sample taking one more token; then the samples are shuffled. Everything is drawn from one
# RandomState, whose streams numpy promises never to change, so the order is that of Megatron-LM's
# core/datasets/gpt_dataset.py and helpers.cpp. Their loop over the documents takes s + 1 tokens and steps back one; cut
# k is therefore the position of token k * s in the stream, found here by binary search over the cumulative lengths.


class GPTIndex(NamedTuple):
    """Sample i runs from cut ``shuffle[i]`` to the next, both included."""

    document: np.ndarray  # int32 [E * docs], order of the sequences in the stream
    sample: np.ndarray  # [n + 1, 2], position of each cut: (position in ``document``, token offset within it)
    shuffle: np.ndarray  # [n], order of the samples


@dataclass(frozen=True)
class EpochPlan:
    """Number of repetitions of a split, and the quantities that follow from it."""

    num_epochs: int  # E
    separate_last: bool  # the last epoch is shuffled separately, so that the earlier ones are used in full
    num_samples: int  # n, samples in all E epochs; at least the number requested
    num_samples_before_last: int  # samples in the first E - 1 epochs


def plan_epochs(tokens_per_epoch: int, seq_length: int, num_samples: int | None) -> EpochPlan:
    """Find the smallest number of epochs that yields ``num_samples`` samples (None: one epoch)."""
    if tokens_per_epoch < 1:
        raise ValueError("a split without tokens has no epochs")
    needed = 1 if num_samples is None else num_samples * seq_length + 1
    num_epochs = max(1, -(-needed // tokens_per_epoch))
    total = (num_epochs * tokens_per_epoch - 1) // seq_length
    before_last = ((num_epochs - 1) * tokens_per_epoch - 1) // seq_length
    separate = False
    if num_epochs > 1 and num_samples is not None:
        per_epoch = (tokens_per_epoch - 1) // seq_length
        separate = num_samples - before_last < int(_LAST_EPOCH_THRESHOLD * per_epoch)
    return EpochPlan(num_epochs, separate, total, max(before_last, 0))


def split_bounds(split: str, num_sequences: int) -> list[tuple[int, int]]:
    """Return the sequence ranges of train, validation and test by weights such as "969,30,1". Raises ConfigError."""
    try:
        weights = [float(part) for part in re.split("[,/]", split)]
    except ValueError:
        weights = []
    if not 1 <= len(weights) <= 3 or not all(0 <= w < float("inf") for w in weights) or sum(weights) <= 0:
        rule = "must be up to three numbers of at least 0, not all 0, joined by commas, such as 969,30,1"
        raise ConfigError(f"split ('{split}') {rule}")
    weights += [0.0] * (3 - len(weights))
    total = float(np.sum(np.array(weights)))
    edges = [0.0]
    for weight in weights:  # summed and rounded as Megatron-LM does: another order moves a bound by one
        edges.append(edges[-1] + weight / total)
    rounded = [round(edge * float(num_sequences)) for edge in edges]
    return [(rounded[k], rounded[k + 1]) for k in range(3)]


def build_gpt_index(lengths: np.ndarray, ids: np.ndarray, seq_length: int, plan: EpochPlan, seed: int) -> GPTIndex:
    """Build the index arrays of the sequences ``ids``; ``lengths``, int32 [N], are those of the whole data set."""
    random = np.random.RandomState(seed)
    document = np.tile(ids.astype(np.int32), plan.num_epochs - plan.separate_last)
    random.shuffle(document)
    if plan.separate_last:
        last = ids.astype(np.int32)
        random.shuffle(last)
        document = np.concatenate([document, last])
    sample = build_sample_index(lengths, document, seq_length, plan.num_samples)
    order = np.arange(plan.num_samples, dtype=shuffle_index_dtype(plan.num_samples))
    bound = plan.num_samples_before_last if plan.separate_last else plan.num_samples
    random.shuffle(order[:bound])  # the samples of a separate last epoch stay behind the others
    if bound < plan.num_samples:
        random.shuffle(order[bound:])
    return GPTIndex(document, sample, order)


def build_sample_index(lengths: np.ndarray, document: np.ndarray, seq_length: int, num_samples: int) -> np.ndarray:
    """Return the cuts of the stream, [n + 1, 2]."""
    cuts = np.empty((num_samples + 1, 2), sample_index_dtype(document.size))
    cuts[0] = 0  # even if the first sequence is empty
    ends = np.cumsum(lengths[document], dtype=np.int64)  # one past the last token of each entry, in the stream
    for start in range(1, num_samples + 1, _CHUNK):  # the temporaries are int64: keep them small beside the result
        stop = min(start + _CHUNK, num_samples + 1)
        token = np.arange(start, stop, dtype=np.int64) * seq_length
        # the first entry that ends after this token; empty ones never do
        position = np.searchsorted(ends, token, side="right")
        cuts[start:stop, 0] = position
        cuts[start:stop, 1] = token - (ends[position] - lengths[document[position]])
    return cuts


def sample_index_dtype(num_entries: int) -> np.dtype:
    return np.dtype(np.int32) if num_entries <= _INT32_MAX else np.dtype(np.int64)


def shuffle_index_dtype(num_samples: int) -> np.dtype:
    return np.dtype(np.uint32) if num_samples < _UINT32_MAX - 1 else np.dtype(np.int64)


# ---- the samples ----


@dataclass(frozen=True)
class GPTOptions:
    """Options that determine the GPT samples, besides the data and the tokenizer."""

    seq_length: int  # s, tokens per sample
    seed: int  # of the sample order
    eod_mask_loss: bool = False  # no loss where the input is the end-of-document token


class GPTDataset(RowSet):
    """GPT samples of one split of one data set: the sequences from ``bounds[0]`` to before ``bounds[1]``.

    Args:
        num_samples: at least so many; the split is repeated as often as needed. None: one epoch.
    Raises:
        DataError: the split is empty, or one epoch is shorter than a sample.
    """

    def __init__(
        self, indexed: IndexedDataset, bounds: tuple[int, int], options: GPTOptions, *, num_samples: int | None,
        tokenizer: Tokenizer, vocab_size: int | None = None, name: str = "train",
        cache_folder: str | Path | None = None,
    ) -> None:  # fmt: skip
        from megatron_sp.data.index_cache import cached_arrays

        self.indexed, self.seq_length = indexed, options.seq_length
        self._vocab_size = vocab_size or tokenizer.vocab_size
        self._masked_eod = tokenizer.eod if options.eod_mask_loss else None
        first, last = bounds
        lengths = indexed.sequence_lengths
        tokens = int(lengths[first:last].sum(dtype=np.int64))
        larger = "give it a larger share with --split"
        if not tokens:
            empty = f"{last - first} of {len(indexed)} sequences" + (", none of which has a token" * (last > first))
            way = f"{larger} (or 0 to go without it), or use more data"
            raise DataError(f"{indexed.prefix}: the {name} split is empty ({empty}): {way}")
        if num_samples is None and tokens < self.seq_length + 1:
            raise DataError(
                f"{indexed.prefix}: the {name} split has {tokens} tokens (sequences {first} to {last - 1} of"
                f" {len(indexed)}); one sample needs seq_length + 1 = {self.seq_length + 1} tokens: {larger}, use more"
                " data, or lower --seq-length; in a blend without weights, give some (--data-path WEIGHT PREFIX ...):"
                " it is repeated then"
            )
        self._name, self._tokens, self._wanted = name, tokens, num_samples or 0
        plan = plan_epochs(tokens, self.seq_length, num_samples)
        self.num_epochs = plan.num_epochs
        facts = {
            "kind": "GPT-1", "data": indexed.digest(), "bounds": [first, last], "seq_length": self.seq_length,
            "seed": options.seed, "epochs": plan.num_epochs, "last_epoch_apart": plan.separate_last,
        }  # fmt: skip
        fingerprint = hash_of(**facts, tokenizer=tokenizer.fingerprint(), masked_eod=self._masked_eod)
        super().__init__(plan.num_samples, fingerprint)
        num_entries = plan.num_epochs * (last - first)
        expected: Expected = {
            "document": ((num_entries,), np.dtype(np.int32)),
            "sample": ((plan.num_samples + 1, 2), sample_index_dtype(num_entries)),
            "shuffle": ((plan.num_samples,), shuffle_index_dtype(plan.num_samples)),
        }
        key = f"{os.path.basename(indexed.prefix)}-{name}-{hash_of(**facts)[:24]}"
        ids = np.arange(first, last)
        arrays = cached_arrays(
            cache_folder, key, expected,
            lambda: build_gpt_index(lengths, ids, self.seq_length, plan, options.seed)._asdict(),
        )  # fmt: skip
        self.index = GPTIndex(**arrays)

    def _cuts(self, i: int) -> list[list[int]]:
        # where sample i begins and where its last label is: [[position in the document index, token], the same]
        cut = int(self.index.shuffle[i])
        cuts: list[list[int]] = self.index.sample[cut : cut + 2].tolist()
        return cuts

    def _sample(self, i: int) -> Sample:
        (first, start), (last, end) = self._cuts(i)
        tokens = np.empty(self.seq_length + 1, np.int64)
        filled = 0
        for position in range(first, last + 1):
            sequence = int(self.index.document[position])
            offset = start if position == first else 0
            part = self.indexed.get(sequence, offset, end + 1 - offset if position == last else None)
            self.indexed.check_tokens(part, sequence, offset, self._vocab_size)
            tokens[filled : filled + part.size] = part
            filled += part.size
        assert filled == tokens.size, f"sample {i} has {filled} tokens, expected {tokens.size}"
        return make_sample(tokens, self._masked_eod)

    def document_lengths(self, i: int) -> np.ndarray:
        # those of ``PackedDataset`` where the last token of each document, and no other, is the end-of-document token
        (first, start), (last, end) = self._cuts(i)
        sequences = self.index.document[first : last + 1]
        lengths = self.indexed.sequence_lengths[sequences].astype(np.int64)
        lengths[-1] = end  # the token there is the last label, which is no input
        lengths[0] -= start
        bounds = self.indexed.document_index
        if len(self.indexed) != bounds.size - 1:  # sentences: only a document's last one ends with the token
            ends = bounds[np.searchsorted(bounds, sequences, side="right")] == sequences + 1
            lengths = np.add.reduceat(lengths, np.concatenate([[0], np.flatnonzero(ends[:-1]) + 1]))
        return lengths[lengths > 0]

    def where(self, i: int) -> str:
        (first, start), (last, _) = self._cuts(i)
        more = f" and the {last - first} that follow it in the shuffled order" if last > first else ""
        return f"{self.indexed.bin_path}, sequence {int(self.index.document[first])} from token {start}{more}"

    def repetition(self, at_once: int | None = None, eval_iters: int | None = None) -> str | None:
        """Describe a split that is repeated too soon; None if it is not."""
        # training: within a sample; elsewhere: within the ``at_once`` samples (None: all) that one validation, or the
        # test, reads in ``eval_iters`` steps
        per_epoch = (self._tokens - 1) // self.seq_length
        enough = per_epoch > 0 if self._name == "train" else at_once is not None and 0 < at_once <= per_epoch
        if self.num_epochs == 1 or enough:
            return None
        has = f"{per_epoch} samples" if per_epoch else "less than one sample"
        fewer = per_epoch * eval_iters // at_once if at_once and eval_iters else 0
        size = f"the {self._name} split has {self._tokens:,} tokens, {has} of {self.seq_length} (and one more)"
        repeated = f"it is repeated {self.num_epochs} times for the {self._wanted} that are asked for"
        way = f"; --eval-iters {fewer} takes no more than it has" if fewer else ""
        return f"{self.indexed.prefix}: {size}: {repeated}{way}"


class PackedDataset(CombinedDataset):
    """Samples of another data set with ``positions`` in their documents and numbers of ``documents``, int64 [s]."""

    def __init__(self, dataset: RowDataset, eod: int, *, positions: bool, documents: bool) -> None:
        super().__init__(len(dataset), dataset.fingerprint())  # the order of samples and their tokens are the same
        self.dataset, self.eod, self.positions, self.documents = dataset, eod, positions, documents

    def _place(self, i: int) -> tuple[RowDataset, int]:
        return self.dataset, i

    def _sample(self, i: int) -> Sample:
        sample = dict(self.dataset[i])
        number = document_numbers(sample["tokens"], self.eod)
        if self.documents:
            sample["documents"] = number
        if self.positions:
            starts = np.flatnonzero(np.diff(number, prepend=-1))
            sample["positions"] = np.arange(number.size, dtype=np.int64) - starts[number]
        return sample


def document_numbers(tokens: np.ndarray, eod: int) -> np.ndarray:
    """Return the number of each token's document within the sample, int64 [s], from 0."""
    # the token ``eod`` belongs to the document that it ends
    ended = np.cumsum(tokens == eod, dtype=np.int64)
    return np.concatenate([np.zeros(1, np.int64), ended[:-1]]) if tokens.size else ended


class MockGPTDataset(RowSet):
    """Data set of ``num_samples`` synthetic samples; each depends on (seed, split, index) alone."""

    def __init__(self, options: GPTOptions, *, num_samples: int, tokenizer: Tokenizer, name: str = "train") -> None:
        fingerprint = hash_of(
            kind="mock-1", seed=options.seed, split=name, seq_length=options.seq_length,
            tokenizer=tokenizer.fingerprint(), mask_eod=options.eod_mask_loss,
        )  # fmt: skip
        super().__init__(num_samples, fingerprint)
        self.seq_length = options.seq_length
        self._key = np.array([options.seed & (2**64 - 1), _SPLITS[name]], np.uint64)
        self._eod, self._mask_eod = tokenizer.eod, options.eod_mask_loss
        ids = [i for i in range(min(tokenizer.vocab_size, _RING + 1)) if i != tokenizer.eod]
        self._ring = np.array(ids[:_RING], np.int64)

    def _sample(self, i: int) -> Sample:
        # the index in the counter's highest word leaves each sample 2**192 numbers of its own
        random = np.random.Generator(np.random.Philox(key=self._key, counter=[0, 0, 0, i]))
        uniform = random.random((2, self.seq_length + 1))
        steps = _STEPS[np.searchsorted(_CUMULATIVE, uniform[0], side="right")]
        start = int(random.random() * self._ring.size)
        tokens = self._ring[(start + np.cumsum(steps)) % self._ring.size]
        tokens[uniform[1] < _EOD_PROBABILITY] = self._eod
        return make_sample(tokens, self._eod if self._mask_eod else None)

    def document_lengths(self, i: int) -> np.ndarray:
        if self._eod is None:
            return np.array([self.seq_length])
        return np.bincount(document_numbers(self[i]["tokens"], self._eod))  # here the sample has to be drawn for it
