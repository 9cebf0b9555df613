"""Construction of the train, validation and test data sets from the flags."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from megatron_sp.config.schema import DataConfig
from megatron_sp.data.dataset import Dataset, RowSet, hash_of
from megatron_sp.data.gpt_dataset import GPTDataset, GPTOptions, MockGPTDataset, PackedDataset, split_bounds
from megatron_sp.data.tokenizers.tokenizer import Tokenizer
from megatron_sp.utils.errors import ConfigError, DataError

if TYPE_CHECKING:
    from megatron_sp.config.rules_data import SplitGroup
    from megatron_sp.data.blend import BlendedDataset
    from megatron_sp.data.index_cache import Expected
    from megatron_sp.data.indexed_dataset import IndexedDataset

SPLITS = ("train", "valid", "test")
_CACHE_FOLDER = "index-cache"
_LOOKED_AT = 256  # documents of a run whose ends are looked at, over all its data sets
_AT_LEAST = 16  # of each data set
_EMPTY_IN_A_ROW = 64
_READ_TOKENS = 1 << 16  # of a document that does not end with the id
_NEARLY_ALL = 0.9


class NamedSet(NamedTuple):
    """A data set, with the name by which its loss is told from those of others; empty if it is the only one."""

    name: str
    dataset: Dataset


@dataclass(frozen=True)
class Datasets:
    """Data sets of a run; None where no samples are requested or the split has no share."""

    train: Dataset | None
    valid: Dataset | None
    test: Dataset | None
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    named: Mapping[str, tuple[NamedSet, ...]] = field(default_factory=dict)  # all sets of a split that has several

    def evaluated(self, split: str) -> tuple[NamedSet, ...]:
        """Return what an evaluation of "valid" or "test" goes through."""
        only = self.valid if split == "valid" else self.test
        return self.named.get(split) or (() if only is None else (NamedSet("", only),))

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the first data set that there is; empty without any."""
        present = [d for d in (self.train, self.valid, self.test) if d is not None]
        return present[0].fingerprint() if present else ""

    @property
    def evaluation_fingerprints(self) -> dict[str, str]:
        """Fingerprints of the validation and test data."""
        return {
            " ".join(filter(None, (split, name))): dataset.fingerprint()
            for split in ("valid", "test")
            for name, dataset in self.evaluated(split)
        }


class Evaluation(NamedTuple):
    """Use of validation and test data."""

    num_iters: int  # steps of one validation, and of the test
    num_samples: int  # samples of one validation, and of the test
    by_default: bool  # nobody has asked for so many steps: that a split has less is a note then, not a warning


def build_datasets(
    data: DataConfig, *, seq_length: int, seed: int, tokenizer: Tokenizer, num_samples: tuple[int, int, int],
    vocab_size: int | None = None, evaluation: Evaluation | None = None,
) -> Datasets:  # fmt: skip
    """Build the three data sets of a GPT, in the order of megatron-core 0.16.1; all ranks may call this at once.

    Args:
        num_samples: at least so many for training, validation and test; 0 builds none.
        vocab_size: ids not below this are errors (default: the tokenizer's).
        evaluation: how validation and test data are read; None: all samples at once.
    Raises:
        DataError: a file is missing or damaged, a split is empty, or documents do not end as a flag takes them to end.
        ConfigError: no data is given, or a flag cannot be parsed.
    """
    options = GPTOptions(seq_length, seed, data.eod_mask_loss)
    repeated: dict[str, list[str]] = {}
    reads: dict[tuple[str, tuple[int, int]], _Read] = {}

    def from_file(read: _Read, num: int | None, folder: str, order_seed: int) -> RowSet:
        dataset = GPTDataset(
            read.indexed, read.bounds, replace(options, seed=order_seed), num_samples=num, tokenizer=tokenizer,
            vocab_size=vocab_size, name=read.split, cache_folder=folder,
        )  # fmt: skip
        at_once = eval_iters = None
        if evaluation is not None:
            eval_iters = evaluation.num_iters
            if num is not None:
                at_once = -(-num * evaluation.num_samples // num_samples[SPLITS.index(read.split)])
        if (words := dataset.repetition(at_once, eval_iters)) is not None:
            repeated.setdefault(read.split, []).append(words)
        reads.setdefault((read.indexed.prefix, read.bounds), read)
        return dataset

    mock = partial(MockGPTDataset, options, tokenizer=tokenizer)
    splits = _Builder(data, len, from_file, mock, seed).build_all(num_samples)
    by_ends = [name for name in ("reset_attention_mask", "reset_position_ids", "eod_mask_loss") if getattr(data, name)]
    notes: list[str] = []
    warnings: list[str] = []
    if by_ends:
        flags = [f"--{name.replace('_', '-')}" for name in by_ends]
        if tokenizer.eod is None:
            needs = "needs a token that ends documents, and this tokenizer has none"
            raise ConfigError(f"{' and '.join(flags)}: {needs}: use another tokenizer, or leave it out")
        if reads:
            notes, warnings = check_document_ends(list(reads.values()), tokenizer.eod, flags)
    positions, documents = data.reset_position_ids, data.reset_attention_mask
    if positions or documents:
        splits = [
            [(n, PackedDataset(d, tokenizer.eod, positions=positions, documents=documents)) for n, d in sets]
            for sets in splits
        ]  # fmt: skip
    for name, (first, *others) in repeated.items():
        words = first + (f" (the blend repeats {len(others) + 1} of its data sets)" if others else "")
        (notes if evaluation is not None and evaluation.by_default and name != "train" else warnings).append(words)
    return _gathered(splits, tuple(warnings), tuple(notes))


def build_bert_datasets(
    data: DataConfig, *, seq_length: int, seed: int, tokenizer: Tokenizer, num_samples: tuple[int, int, int],
    binary_head: bool = True, vocab_size: int | None = None,
) -> Datasets:  # fmt: skip
    """Build the data sets for BERT, from data with one sequence per sentence, split by documents.

    Args:
        binary_head: two segments in a sample, which may be swapped; otherwise one.
    Raises:
        DataError: a file is missing or damaged, or no document yields a sample.
        ConfigError: as for ``build_datasets``, or the tokenizer lacks BERT's special tokens.
    """
    from megatron_sp.data.bert_dataset import BERTDataset, BERTOptions, MockBERTDataset
    from megatron_sp.data.bert_index import left_out

    pack = data.bert_pack_sequences
    options = BERTOptions(seq_length, seed, data.mask_prob, data.short_seq_prob, binary_head=binary_head, pack=pack)
    notes: list[str] = []

    def from_file(read: _Read, num: int | None, folder: str, order_seed: int) -> RowSet:
        indexed, (first, last) = read.indexed, read.bounds
        min_sentences = options.rule.min_sentences
        if words := left_out(indexed.document_index[first : last + 1], indexed.sequence_lengths, min_sentences):
            notes.append(f"{indexed.prefix} ({read.split}): {words}")
        return BERTDataset(
            indexed, read.bounds, replace(options, seed=order_seed), num_samples=num, tokenizer=tokenizer,
            vocab_size=vocab_size, name=read.split, cache_folder=folder,
        )  # fmt: skip

    mock = partial(MockBERTDataset, options, tokenizer=tokenizer)
    builder = _Builder(data, lambda indexed: indexed.document_index.size - 1, from_file, mock, seed)
    return _gathered(builder.build_all(num_samples), notes=tuple(dict.fromkeys(notes)))


_Sets = list[tuple[str, RowSet]]  # the data sets of a split, with their names


def _gathered(splits: list[_Sets], warnings: tuple[str, ...] = (), notes: tuple[str, ...] = ()) -> Datasets:
    train, valid, test = (sets[0][1] if sets else None for sets in splits)
    several = [(split, sets) for split, sets in zip(SPLITS, splits, strict=True) if len(sets) > 1]
    named = {split: tuple(NamedSet(*named_set) for named_set in sets) for split, sets in several}
    return Datasets(train, valid, test, warnings, notes, named)


class _Read(NamedTuple):
    """Sequences of a file that a split reads, or documents for BERT, from ``bounds[0]`` to before ``bounds[1]``."""

    indexed: IndexedDataset
    bounds: tuple[int, int]
    split: str


@dataclass
class _Builder:
    """Builder of the splits of one configuration; a file used by several splits is opened once."""

    data: DataConfig
    num_units: Callable[[IndexedDataset], int]  # how many units of a file --split divides
    from_file: Callable[[_Read, int | None, str, int], RowSet]  # (what, samples or None: one epoch, cache, seed)
    mock: Callable[..., RowSet]  # (num_samples=, name=)
    seed: int
    opened: dict[str, IndexedDataset] = field(default_factory=dict)

    def build_all(self, num_samples: tuple[int, int, int]) -> list[_Sets]:
        data = self.data
        if data.mock_data:
            return [
                [("", self.mock(num_samples=n, name=s))] if n else [] for s, n in zip(SPLITS, num_samples, strict=True)
            ]
        self.own_paths = (data.train_data_path, data.valid_data_path, data.test_data_path)
        weighted = (data.train_weighted_split_paths, data.valid_weighted_split_paths, data.test_weighted_split_paths)
        if not data.data_path and not any(self.own_paths) and not any(weighted):
            flags = "--data-path PREFIX, or --train-data-path, or --mock-data for synthetic tokens"
            raise ConfigError(f"there is no data: give {flags}")
        if data.data_path and any(self.own_paths):
            raise ConfigError("--data-path and --train/valid/test-data-path exclude each other: give one or the other")
        groups: list[tuple[SplitGroup, ...]] = [(), (), ()]
        if any(weighted):
            from megatron_sp.config.rules_data import read_groups

            groups = [read_groups(words) for words in weighted]
        splits: list[_Sets] = []
        for split, num in enumerate(num_samples):
            sets: _Sets = []
            for group in groups[split] if num else ():  # blends of parts of data sets; one alone asks for no surplus
                dataset: RowSet
                if len(group.prefixes) > 1:
                    dataset = self._by_weight(group.prefixes, group.weights, split, num, group.ranges)
                else:
                    dataset = self._single(group.prefixes[0], split, self._wanted(split, num), share=group.ranges[0])
                sets.append((group.name, dataset))
            splits.append(self._build(split, num) if num and not groups[split] else sets)
        return splits

    def _build(self, split: int, num_samples: int) -> _Sets:
        data, name = self.data, SPLITS[split]
        paths = data.data_path or self.own_paths[split]
        first, last = split_bounds(data.split, 2**40)[split]  # with so many sequences only a weight of 0 gets none
        if not paths or (data.data_path and first == last):
            return []
        if data.multiple_validation_sets and name != "train" and not data.data_path:
            wanted = self._wanted(split, num_samples)
            short = [os.path.basename(path.rstrip("/")) for path in paths]  # with their folders where two are alike
            names = [s if short.count(s) == 1 else path.strip("/") for s, path in zip(short, paths, strict=True)]
            return [(n, self._single(path, split, wanted)) for n, path in zip(names, paths, strict=True)]
        from megatron_sp.data.blend import normalized, parse_blend, samples_per_set

        blend = parse_blend(paths, "--data-path" if data.data_path else f"--{name}-data-path")
        if len(blend.prefixes) > 1 and blend.weights:
            return [("", self._by_weight(blend.prefixes, blend.weights, split, num_samples))]
        if len(blend.prefixes) > 1:
            return [("", self._by_size(blend.prefixes, split, num_samples))]
        if blend.weights and data.data_path:  # it asks for a blend's surplus, which may take another epoch
            (num_samples,) = samples_per_set(normalized(blend.weights), num_samples)
        return [("", self._single(blend.prefixes[0], split, self._wanted(split, num_samples)))]

    def _wanted(self, split: int, num_samples: int) -> int | None:
        # how many samples the only data set of a split must have; None: one epoch
        reshuffled = self.data.dataloader_type == "cyclic" and SPLITS[split] == "train"  # by the sampler, in each epoch
        return None if reshuffled or (self.data.full_validation and SPLITS[split] == "valid") else num_samples

    def _single(
        self, prefix: str, split: int, num_samples: int | None, turn: int = 0, share: tuple[float, float] | None = None
    ) -> RowSet:
        from megatron_sp.data.indexed_dataset import IndexedDataset

        if prefix not in self.opened:
            self.opened[prefix] = IndexedDataset(prefix)
        indexed = self.opened[prefix]
        units = self.num_units(indexed)
        bounds = split_bounds(self.data.split, units)[split] if self.data.data_path else (0, units)
        if share is not None:
            bounds = round(share[0] * float(units)), round(share[1] * float(units))
            if bounds[0] == bounds[1]:
                none = f"{share[0]:g}:{share[1]:g} of its {units} documents is none"
                raise DataError(f"{indexed.prefix}: {none}: give it a larger share")
        folder = self.data.data_cache_path or os.path.join(os.path.dirname(indexed.prefix), _CACHE_FOLDER)
        # the first of several passes over the data has the seed of the run, a later one has its own
        seed = int(hash_of(seed=self.seed, turn=turn)[:7], 16) + 1 if turn else self.seed
        return self.from_file(_Read(indexed, bounds, SPLITS[split]), num_samples, folder, seed)

    def _by_weight(
        self, prefixes: Sequence[str], weights: Sequence[float], split: int, num_samples: int,
        shares: Sequence[tuple[float, float] | None] = (),
    ) -> BlendedDataset:  # fmt: skip
        from megatron_sp.data.blend import blending_weights, normalized, samples_per_set

        wanted = samples_per_set(normalized(weights), num_samples)
        parts = zip(prefixes, wanted, shares or [None] * len(wanted), strict=True)
        datasets = [self._single(prefix, split, n, share=share) for prefix, n, share in parts]
        return self._mixed(datasets, blending_weights(weights), num_samples)

    def _by_size(self, prefixes: Sequence[str], split: int, num_samples: int) -> RowSet:
        # In proportion to the sizes of the sets: one epoch of all, and more of them if needed, each in a new order.
        # Megatron-core has only the first one and ends training there.
        from megatron_sp.data.blend import ChainedDataset, normalized

        passes: list[BlendedDataset] = []
        once = self.data.full_validation and SPLITS[split] == "valid"
        while not passes or (num_samples > 0 and not once):
            datasets = [self._single(prefix, split, None, turn=len(passes)) for prefix in prefixes]
            sizes = [len(dataset) for dataset in datasets]
            total = sum(sizes)
            passes.append(self._mixed(datasets, normalized(sizes), total if once else min(num_samples, total)))
            num_samples -= total
        return passes[0] if len(passes) == 1 else ChainedDataset(passes)

    def _mixed(self, datasets: list[RowSet], weights: np.ndarray, num_samples: int) -> BlendedDataset:
        from megatron_sp.data.blend import BlendedDataset, build_blending_indices
        from megatron_sp.data.index_cache import cached_arrays

        key = f"blend-{hash_of(kind='blend-1', weights=weights.tolist(), num_samples=num_samples)[:24]}"
        shape = (num_samples,)
        expected: Expected = {"set": (shape, np.dtype(np.int16)), "sample": (shape, np.dtype(np.int64))}
        arrays = cached_arrays(
            self.data.data_cache_path, key, expected,
            lambda: dict(zip(("set", "sample"), build_blending_indices(weights, num_samples), strict=True)),
        )  # fmt: skip
        return BlendedDataset(datasets, weights, arrays["set"], arrays["sample"])


# ---- the ends of documents ----
# --reset-attention-mask, --reset-position-ids and --eod-mask-loss find documents by the end-of-document id among the
# tokens. On data without it they would do nothing, and nobody would know. So the last tokens of some documents of every
# data set are read, evenly spread over its split: the same on every rank, and few enough that nothing waits for them.


class _Ends(NamedTuple):
    """Ends of some documents of a data set."""

    num_fitting: int  # documents that end with the id
    num_others: int
    another_id: int | None  # that seems to end documents here
    are_pieces: bool  # of documents, cut to one length or joined, so that the id is inside them
    words: str


def check_document_ends(reads: Sequence[_Read], eod: int, flags: Sequence[str]) -> tuple[list[str], list[str]]:
    """Look at the ends of some documents of a run's data; return notes and warnings about data that fit in part.

    Raises:
        DataError: most documents of a data set do not end with the id, and nothing says that they are pieces, or
            joined.
    """
    count = max(_AT_LEAST, _LOOKED_AT // max(1, len(reads)))
    misfits = [ends for read in reads if (ends := _look(read, eod, count)).num_others]
    unexplained = [ends for ends in misfits if not ends.are_pieces]
    wrong = [ends for ends in unexplained if ends.num_fitting < ends.num_others]
    several = len(flags) > 1
    about = f"{' and '.join(flags)} {'go' if several else 'goes'} by the end-of-document id, {eod}"
    if wrong:
        more = f" (and {len(wrong) - 1} more of {len(reads)} data sets)" if wrong[1:] else ""
        end_id = "ID" if wrong[0].another_id is None else wrong[0].another_id
        raise DataError(
            f"{about}. {wrong[0].words}{more}: across them nothing would be reset or masked. Tokenize again with"
            " megatron-sp preprocess --append-eod; or, if another id ends documents in these data, name it: --eod-id"
            f" {end_id}; or leave {'the flags' if several else 'the flag'} out"
        )
    pieces = "taken for pieces of documents, with the id inside"
    notes = [f"{about}. {ends.words}: {pieces}" for ends in misfits if ends.are_pieces]
    run_on = "such documents run into the next one, if they are not pieces of one (megatron-sp preprocess --append-eod"
    warnings = [f"{about}. {ends.words}: {run_on} puts the id at each end)" for ends in unexplained]
    return notes[:1], warnings[:1]


def _look(read: _Read, eod: int, count: int) -> _Ends:
    indexed, fitting = read.indexed, 0
    last, lengths, inside = (Counter[int]() for _ in range(3))  # ids and lengths of the documents that do not fit
    for document, sequence in _last_sequences(indexed, read.bounds, count):
        length = int(indexed.sequence_lengths[sequence])
        token = int(indexed.get(sequence, length - 1)[0])
        if token == eod:
            fitting += 1
            continue
        last[token] += 1
        begin, end = indexed.document_index[document : document + 2].tolist()
        lengths[int(indexed.sequence_lengths[begin:end].sum(dtype=np.int64))] += 1
        tokens, counts = np.unique(indexed.get(sequence, max(0, length - _READ_TOKENS))[:-1], return_counts=True)
        inside.update(dict(zip(tokens.tolist(), counts.tolist(), strict=True)))
    if not last:
        return _Ends(fitting, 0, None, False, "")
    others = last.total()
    (token, times) = last.most_common(1)[0]
    common = token if others > 1 and times >= _NEARLY_ALL * others else None
    are_pieces = False
    if common is None and (fitting or inside[eod]):
        are_pieces = (others > 1 and len(lengths) == 1) or inside[eod] >= others
    another_id = common if common is not None and inside[common] < others else None
    looked_at = "1 document" if fitting + others == 1 else f"{fitting + others} documents"
    ends = f"{times} end with {token}" if times > 1 else f"one ends with {token}"
    words = f"{indexed.prefix} ({read.split}): of {looked_at} looked at {fitting or 'none'} end with it, {ends}"
    return _Ends(fitting, others, another_id, are_pieces, words)


def _last_sequences(indexed: IndexedDataset, bounds: tuple[int, int], count: int) -> Iterator[tuple[int, int]]:
    # yield some documents that end within bounds, evenly spread, each with its last sequence that has a token
    ends, lengths = indexed.document_index[1:], indexed.sequence_lengths
    first, last = (int(np.searchsorted(ends, bound, side="right")) for bound in bounds)
    count = min(count, last - first)
    for k in range(count):
        start, stop = (first + (last - first) * at // count for at in (k, k + 1))
        for document in range(start, min(stop, start + _EMPTY_IN_A_ROW)):
            sequence = int(ends[document]) - 1
            begin = int(indexed.document_index[document])
            while sequence >= begin and lengths[sequence] == 0:
                sequence -= 1
            if sequence >= begin:
                yield document, sequence
                break
