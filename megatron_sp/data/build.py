"""Construction of the train, validation and test data sets from the flags."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from megatron_sp.config.schema import DataConfig
from megatron_sp.data.dataset import Dataset, FileDataset, RowDataset, hash_of
from megatron_sp.data.gpt_dataset import (
    BlendedDataset,
    ChainedDataset,
    GPTDataset,
    GPTOptions,
    MockGPTDataset,
    PackedDataset,
)
from megatron_sp.data.tokenizers.tokenizer import Tokenizer
from megatron_sp.utils.errors import ConfigError, DataError

if TYPE_CHECKING:
    from megatron_sp.config.split_groups import SplitGroup
    from megatron_sp.data.blend import Blend
    from megatron_sp.data.indexed_dataset import IndexedDataset

SPLITS = ("train", "valid", "test")
_CACHE_FOLDER = "index-cache"


class NamedSet(NamedTuple):
    """A data set, with the name by which its loss is told from those of others; empty if it is the only one."""

    name: str
    dataset: Dataset


@dataclass(frozen=True)
class Datasets:
    """Data sets of a run, with warnings and notes about them; None where no samples are requested or the split has no share.

    ``fingerprint`` is that of the training data (without any, of the first data set present), for the checkpoint.
    ``named`` has all sets of "valid" and "test" where a split has several; ``valid`` and ``test`` are the first ones.
    """

    train: Dataset | None
    valid: Dataset | None
    test: Dataset | None
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    named: Mapping[str, tuple[NamedSet, ...]] = field(default_factory=dict)

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
            " ".join(filter(None, (split, name))): d.fingerprint()
            for split in ("valid", "test")
            for name, d in self.evaluated(split)
        }


class Evaluation(NamedTuple):
    """Use of validation and test data."""

    num_iters: int  # steps of one validation, and of the test
    num_samples: int  # samples of one validation, and of the test
    by_default: bool  # nobody has asked for so many steps: that a split has less is a note then, not a warning


def build_datasets(
    data: DataConfig,
    *,
    seq_length: int,
    seed: int,
    tokenizer: Tokenizer,
    num_samples: tuple[int, int, int],
    vocab_size: int | None = None,
    evaluation: Evaluation | None = None,
) -> Datasets:
    """Build the three data sets from the flags, each with at least the requested number of samples.

    The order of samples is that of megatron-core 0.16.1 and the same on every rank. All ranks may call this at once:
    see ``index_cache``.

    Args:
        seq_length: s, tokens per sample.
        seed: seed of the sample order.
        tokenizer: tokenizer of the data.
        num_samples: samples requested for training, validation and test; 0 builds none.
        vocab_size: entries of the model's vocabulary; ids not below this are errors (default: the tokenizer's).
        evaluation: how validation and test data are read; None: all samples at once.
    Raises:
        DataError: a file is missing or damaged, or a split is empty; or a flag goes by the ends of documents, and the
            data do not have them.
        ConfigError: no data is given, or a flag cannot be parsed.
    """
    options = GPTOptions(seq_length, seed, data.eod_mask_loss)
    repeated: dict[str, list[str]] = {}
    stretches: dict[tuple[str, tuple[int, int]], tuple[IndexedDataset, tuple[int, int], str]] = {}

    def from_file(
        indexed: IndexedDataset, bounds: tuple[int, int], num: int | None, name: str, folder: str, turn: int
    ) -> FileDataset:
        own = replace(options, seed=_seed_of(seed, turn))
        dataset = GPTDataset(
            indexed,
            bounds,
            own,
            num_samples=num,
            tokenizer=tokenizer,
            vocab_size=vocab_size,
            name=name,
            cache_folder=folder,
        )
        of_split = num_samples[SPLITS.index(name)]
        at_once = None if evaluation is None or num is None else -(-num * evaluation.num_samples // of_split)
        if (words := dataset.repetition(at_once, None if evaluation is None else evaluation.num_iters)) is not None:
            repeated.setdefault(name, []).append(words)
        stretches.setdefault((indexed.prefix, bounds), (indexed, bounds, name))
        return dataset

    def mock(name: str, num: int) -> RowDataset:
        return MockGPTDataset(options, num_samples=num, tokenizer=tokenizer, name=name)

    splits = _build(data, num_samples, mock, len, from_file)
    notes, warnings = _check_ends(data, tokenizer, stretches.values())
    splits = [[(name, _packed(dataset, data, tokenizer)) for name, dataset in sets] for sets in splits]
    for name, (first, *others) in repeated.items():
        words = first + (f" (the blend repeats {len(others) + 1} of its data sets)" if others else "")
        (notes if evaluation is not None and evaluation.by_default and name != "train" else warnings).append(words)
    return _gathered(splits, tuple(warnings), tuple(notes))


def build_bert_datasets(
    data: DataConfig,
    *,
    seq_length: int,
    seed: int,
    tokenizer: Tokenizer,
    num_samples: tuple[int, int, int],
    binary_head: bool = True,
    vocab_size: int | None = None,
) -> Datasets:
    """Build the data sets for BERT, as ``build_datasets`` does, from data with one sequence per sentence, split by documents.

    Args:
        seq_length: s, tokens per row, including special tokens.
        binary_head: two segments in a sample, which may be swapped; otherwise one.
    Raises:
        DataError: a file is missing or damaged, or no document yields a sample.
        ConfigError: no data is given, a flag cannot be parsed or does not fit the others, or the tokenizer lacks BERT's
            special tokens.
    """
    from megatron_sp.data.bert_dataset import BERTDataset, BERTOptions, MockBERTDataset
    from megatron_sp.data.bert_index import left_out

    options = BERTOptions(
        seq_length, seed, data.mask_prob, data.short_seq_prob, binary_head=binary_head, pack=data.bert_pack_sequences
    )
    notes: list[str] = []

    def from_file(
        indexed: IndexedDataset, bounds: tuple[int, int], num: int | None, name: str, folder: str, turn: int
    ) -> FileDataset:
        own = replace(options, seed=_seed_of(seed, turn))
        if words := left_out(
            indexed.document_index[bounds[0] : bounds[1] + 1], indexed.sequence_lengths, own.rule.min_sentences
        ):
            notes.append(f"{indexed.prefix} ({name}): {words}")
        return BERTDataset(
            indexed,
            bounds,
            own,
            num_samples=num,
            tokenizer=tokenizer,
            vocab_size=vocab_size,
            name=name,
            cache_folder=folder,
        )

    def mock(name: str, num: int) -> RowDataset:
        return MockBERTDataset(options, num_samples=num, tokenizer=tokenizer, name=name)

    splits = _build(data, num_samples, mock, lambda indexed: indexed.document_index.size - 1, from_file)
    return _gathered(splits, notes=tuple(dict.fromkeys(notes)))


def _check_ends(
    data: DataConfig, tokenizer: Tokenizer, stretches: Iterable[tuple[IndexedDataset, tuple[int, int], str]]
) -> tuple[list[str], list[str]]:
    flags = [name for name in ("reset_attention_mask", "reset_position_ids", "eod_mask_loss") if getattr(data, name)]
    spelled = [f"--{name.replace('_', '-')}" for name in flags]
    if flags and tokenizer.eod is None:
        raise ConfigError(
            f"{' and '.join(spelled)}: needs a token that ends documents, and this tokenizer has none: use another tokenizer, or leave it"
            " out"
        )
    if not flags:
        return [], []
    from megatron_sp.data.document_ends import Stretch, check_document_ends

    return check_document_ends([Stretch(*stretch) for stretch in stretches], tokenizer.eod, spelled)


def _packed(dataset: RowDataset, data: DataConfig, tokenizer: Tokenizer) -> RowDataset:
    if not (data.reset_position_ids or data.reset_attention_mask):
        return dataset
    return PackedDataset(dataset, tokenizer.eod, positions=data.reset_position_ids, documents=data.reset_attention_mask)


class _FromFile(Protocol):
    """Factory of the data set of one split of one file; ``num`` None: one epoch; each ``turn`` (from 0) has its own order."""

    def __call__(
        self, indexed: IndexedDataset, bounds: tuple[int, int], num: int | None, name: str, folder: str, turn: int
    ) -> FileDataset: ...


_Made = list[list[tuple[str, RowDataset]]]  # of each split, the sets with their names


def _gathered(made: _Made, warnings: tuple[str, ...] = (), notes: tuple[str, ...] = ()) -> Datasets:
    train, valid, test = (sets[0][1] if sets else None for sets in made)
    named = {
        split: tuple(NamedSet(*each) for each in sets)
        for split, sets in zip(SPLITS, made, strict=True)
        if len(sets) > 1
    }
    return Datasets(train, valid, test, warnings, notes, named)


def _build(
    data: DataConfig, num_samples: tuple[int, int, int], mock: Callable[[str, int], RowDataset], units: Callable[[IndexedDataset], int],
    from_file: _FromFile,
) -> _Made:  # fmt: skip
    # Build the three splits from the flags. mock: makes synthetic data of a split. units: number of units of a file
    # that --split divides. from_file: makes the data set of a range of these units.
    if data.mock_data:
        return [[("", mock(name, n))] if n else [] for name, n in zip(SPLITS, num_samples, strict=True)]
    builder = _Builder(data, units, from_file)
    return [builder.build(k, n) if n else [] for k, n in enumerate(num_samples)]


class _Builder:
    """Builder of the splits of one configuration; a file used by several splits is opened once."""

    def __init__(self, data: DataConfig, units: Callable[[IndexedDataset], int], from_file: _FromFile) -> None:
        self.data, self.units, self.from_file = data, units, from_file
        self._open: dict[str, IndexedDataset] = {}
        self.own_paths = (data.train_data_path, data.valid_data_path, data.test_data_path)
        texts = (data.train_weighted_split_paths, data.valid_weighted_split_paths, data.test_weighted_split_paths)
        self.groups: tuple[tuple[SplitGroup, ...], ...] = ((), (), ())
        if any(texts):
            from megatron_sp.config.split_groups import read_groups

            self.groups = tuple(map(read_groups, texts))
        if not data.data_path and not any(self.own_paths) and not any(texts):
            raise ConfigError(
                "there is no data: give --data-path PREFIX, or --train-data-path, or --mock-data for synthetic tokens"
            )
        if data.data_path and any(self.own_paths):
            raise ConfigError("--data-path and --train/valid/test-data-path exclude each other: give one or the other")

    def build(self, split: int, num_samples: int) -> list[tuple[str, RowDataset]]:
        # the data sets of one split and their names; none if it has no share of the data
        name = SPLITS[split]
        if self.groups[split]:
            return [(group.name, self._of_group(group, split, num_samples)) for group in self.groups[split]]
        paths = self.data.data_path or self.own_paths[split]
        if not paths or (self.data.data_path and _share(self.data.split, split) == 0):
            return []
        if self.data.multiple_validation_sets and name != "train" and not self.data.data_path:
            wanted = self._wanted(split, num_samples)
            return [
                (set_name, self._single(prefix, split, wanted))
                for set_name, prefix in zip(_names(paths), paths, strict=True)
            ]
        from megatron_sp.data.blend import normalized, parse_blend, samples_per_set

        blend = parse_blend(paths, "--data-path" if self.data.data_path else f"--{name}-data-path")
        if len(blend.prefixes) > 1:
            return [
                (
                    "",
                    self._by_weight(blend, split, num_samples)
                    if blend.weights
                    else self._by_size(blend, split, num_samples),
                )
            ]
        if (
            blend.weights and self.data.data_path
        ):  # a blend of one data set asks for a blend's surplus, which may take another epoch
            (num_samples,) = samples_per_set(normalized(blend.weights), num_samples)
        return [("", self._single(blend.prefixes[0], split, self._wanted(split, num_samples)))]

    def _is_read_once(self, split: int) -> bool:
        return self.data.full_validation and SPLITS[split] == "valid"

    def _wanted(self, split: int, num_samples: int) -> int | None:
        # how many samples the only data set of a split must have; None: one epoch
        reshuffled = self.data.dataloader_type == "cyclic" and SPLITS[split] == "train"  # by the sampler, in each epoch
        return None if reshuffled or self._is_read_once(split) else num_samples

    def _of_group(self, group: SplitGroup, split: int, num_samples: int) -> RowDataset:
        # a blend of parts of data sets; one alone asks for no surplus
        if len(group.prefixes) == 1:
            return self._single(group.prefixes[0], split, self._wanted(split, num_samples), share=group.ranges[0])
        from megatron_sp.data.blend import Blend

        blend = Blend(group.prefixes, group.weights)
        return self._by_weight(blend, split, num_samples, group.ranges)

    def _single(
        self, prefix: str, split: int, num_samples: int | None, turn: int = 0, share: tuple[float, float] | None = None
    ) -> FileDataset:  # fmt: skip
        from megatron_sp.data.gpt_index import split_bounds
        from megatron_sp.data.indexed_dataset import IndexedDataset

        if prefix not in self._open:
            self._open[prefix] = IndexedDataset(prefix)
        indexed = self._open[prefix]
        units = self.units(indexed)
        bounds = split_bounds(self.data.split, units)[split] if self.data.data_path else (0, units)
        if share is not None:
            bounds = round(share[0] * float(units)), round(share[1] * float(units))
            if bounds[0] == bounds[1]:
                raise DataError(
                    f"{indexed.prefix}: {share[0]:g}:{share[1]:g} of its {units} documents is none: give it a larger share"
                )
        folder = self.data.data_cache_path or os.path.join(os.path.dirname(indexed.prefix), _CACHE_FOLDER)
        return self.from_file(indexed, bounds, num_samples, SPLITS[split], folder, turn)

    def _by_weight(
        self, blend: Blend, split: int, num_samples: int, shares: Sequence[tuple[float, float] | None] = ()
    ) -> BlendedDataset:  # fmt: skip
        from megatron_sp.data.blend import blending_weights, normalized, samples_per_set

        assert blend.weights is not None
        wanted = samples_per_set(normalized(blend.weights), num_samples)
        parts = zip(blend.prefixes, wanted, shares or [None] * len(wanted), strict=True)
        datasets = [self._single(prefix, split, n, share=share) for prefix, n, share in parts]
        return self._mixed(datasets, blending_weights(blend.weights), num_samples)

    def _by_size(self, blend: Blend, split: int, num_samples: int) -> RowDataset:
        """Blend the sets in proportion to their sizes: one epoch of all, and more of them if needed, each in a new order.

        Megatron-core has only the first one and ends training there.
        """
        from megatron_sp.data.blend import normalized

        passes: list[BlendedDataset] = []
        once = self._is_read_once(split)
        while not passes or (num_samples > 0 and not once):
            datasets = [self._single(prefix, split, None, turn=len(passes)) for prefix in blend.prefixes]
            sizes = [len(d) for d in datasets]
            passes.append(
                self._mixed(datasets, normalized(sizes), sum(sizes) if once else min(num_samples, sum(sizes)))
            )
            num_samples -= sum(sizes)
        return passes[0] if len(passes) == 1 else ChainedDataset(passes)

    def _mixed(self, datasets: list[FileDataset], weights: np.ndarray, num_samples: int) -> BlendedDataset:
        sets, samples = self._blending_indices(weights, num_samples)
        return BlendedDataset(datasets, weights, sets, samples)

    def _blending_indices(self, weights: np.ndarray, num_samples: int) -> tuple[np.ndarray, np.ndarray]:
        from megatron_sp.data.blend import build_blending_indices
        from megatron_sp.data.index_cache import cached_arrays

        arrays = cached_arrays(
            self.data.data_cache_path,
            f"blend-{hash_of(kind='blend-1', weights=weights.tolist(), num_samples=num_samples)[:24]}",
            {"set": ((num_samples,), np.dtype(np.int16)), "sample": ((num_samples,), np.dtype(np.int64))},
            lambda: dict(zip(("set", "sample"), build_blending_indices(weights, num_samples), strict=True)),
        )
        return arrays["set"], arrays["sample"]


def _names(prefixes: tuple[str, ...]) -> list[str]:
    # short names of data sets: the last part of each prefix, with its folder where two are alike
    short = [os.path.basename(prefix.rstrip("/")) for prefix in prefixes]
    return [name if short.count(name) == 1 else prefix.strip("/") for name, prefix in zip(short, prefixes, strict=True)]


def _seed_of(seed: int, turn: int) -> int:
    # the seed of the order in one of several passes over the data; the first pass has the seed of the run
    return seed if turn == 0 else int(hash_of(seed=seed, turn=turn)[:7], 16) + 1


def _share(split: str, k: int) -> int:
    # 0 if the k-th part of --split has weight 0, else a positive number
    from megatron_sp.data.gpt_index import split_bounds

    first, last = split_bounds(split, 2**40)[k]  # with so many sequences only a weight of 0 gets none
    return last - first
