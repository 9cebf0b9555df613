"""Merging of ``.bin``/``.idx`` data sets, and splitting of one into several with consecutive documents."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

from megatron_sp.data import digest_file
from megatron_sp.data.idx_format import resolve_prefix
from megatron_sp.data.indexed_dataset import IndexedDataset
from megatron_sp.data.writer import IndexedDatasetWriter, make_folder
from megatron_sp.utils.errors import ConfigError

_PART = re.compile(r"(.*)-(\d{5,6})-of-(\d{5,6})")


def merge_datasets(prefixes: Sequence[str], output: str) -> IndexedDataset:
    """Concatenate the documents of several data sets into a new one.

    Args:
        prefixes: with or without the suffix .bin, .idx or .sha256; a data set named by several of its files counts
            once.
        output: prefix of the new pair; its folder is created.
    Returns:
        The new data set, open.
    Raises:
        ConfigError: no data set is given, the output is one of the inputs, or of several parts (``--part``) one is
            missing or out of order.
        DataError: a data set is damaged, does not match its digests, or has tokens of another dtype.
        DiskError: the output cannot be written.
    """
    names = list(dict.fromkeys(_prefix(p) for p in prefixes))
    _require_all_parts(names)
    _require_other_place([output], names)
    sources = [_opened(name) for name in names]
    make_folder(output)
    with IndexedDatasetWriter(output, dtype=sources[0].dtype) as writer:
        for source in sources:
            writer.merge(source)
    return IndexedDataset(output)


def split_dataset(prefix: str, weights: Sequence[float], outputs: Sequence[str]) -> list[IndexedDataset]:
    """Split a data set into several with consecutive documents.

    Args:
        weights: relative numbers of documents, one for each output.
        outputs: prefixes of the new pairs.
    Returns:
        The new data sets, open.
    Raises:
        ConfigError: weights or outputs are invalid, or a part would have no document.
        DataError, DiskError: as for ``merge_datasets``.
    """
    if len(weights) != len(outputs):
        raise ConfigError(
            f"--weights has {len(weights)} numbers and --output {len(outputs)} names: one weight for each"
        )
    if not all(math.isfinite(w) and w > 0 for w in weights) or not math.isfinite(sum(weights)):
        raise ConfigError(f"--weights {','.join(f'{w:g}' for w in weights)}: weights are numbers above 0")
    if len(set(map(os.path.abspath, outputs))) < len(outputs):
        raise ConfigError(f"--output {' '.join(outputs)}: each name once")
    _require_other_place(outputs, [_prefix(prefix)])
    source = _opened(_prefix(prefix))
    count = len(source.document_index) - 1
    ends = [round(count * sum(weights[: i + 1]) / sum(weights)) for i in range(len(weights))]
    for output, (first, last) in zip(outputs, pairwise([0, *ends]), strict=True):
        if first == last:
            raise ConfigError(
                f"{source.prefix} has {count} documents: by these weights {output} would get none of them"
            )
    written = []
    for output, (first, last) in zip(outputs, pairwise([0, *ends]), strict=True):
        make_folder(output)
        with IndexedDatasetWriter(output, dtype=source.dtype) as writer:
            writer.merge(source, range(first, last))
        written.append(IndexedDataset(output))
    return written


def _prefix(name: str) -> str:
    return resolve_prefix(name.removesuffix(digest_file.SUFFIX))


def _opened(prefix: str) -> IndexedDataset:
    # open a data set and check its digests, if there are any. Raises DataError: it is damaged or does not match them
    source = IndexedDataset(prefix)
    if digest_file.read(prefix) is not None:
        digest_file.compare(prefix, {suffix: digest_file.sha256_of(prefix + suffix) for suffix in (".bin", ".idx")})
    return source


def _require_all_parts(names: list[str]) -> None:
    if not names:
        raise ConfigError("there is no data set to merge")
    for (name, count), numbers in _parts(names).items():
        missing = sorted(set(range(1, count + 1)) - set(numbers))
        if missing:
            shown = ", ".join(f"{name}-{i:05d}-of-{count:05d}" for i in missing[:4])
            raise ConfigError(
                f"{len(missing)} of the {count} parts of {name} are missing: {shown}{', ...' if len(missing) > 4 else ''}"
            )
        if numbers != sorted(numbers):
            raise ConfigError(
                f"the parts of {name} are not in order ({', '.join(map(str, numbers[:8]))}): give them in that of their numbers"
            )


def _parts(names: list[str]) -> dict[tuple[str, int], list[int]]:
    # (name, count) -> numbers of the parts among ``names``
    found: dict[tuple[str, int], list[int]] = {}
    for match in filter(None, map(_PART.fullmatch, names)):
        found.setdefault((match[1], int(match[3])), []).append(int(match[2]))
    return found


def _require_other_place(outputs: Sequence[str], inputs: Sequence[str]) -> None:
    there = {os.path.realpath(f"{name}.bin") for name in inputs}
    for output in outputs:
        if os.path.realpath(f"{output}.bin") in there:
            raise ConfigError(f"--output {output} is one of the inputs: choose another name")


def summary(dataset: IndexedDataset) -> str:
    """Return a one-line summary of a data set."""
    documents = len(dataset.document_index) - 1
    return f"{dataset.prefix}: {documents:,} documents, {len(dataset):,} sequences, {dataset.num_tokens:,} tokens"


def document_tokens(dataset: IndexedDataset, number: int) -> Iterator[list[int]]:
    """Yield the tokens of each sequence of a document. Raises ConfigError: there is no such document."""
    count = len(dataset.document_index) - 1
    if not 0 <= number < count:
        raise ConfigError(
            f"--document {number}: {dataset.prefix} has documents 0 to {count - 1}"
            if count
            else f"{dataset.prefix} is empty"
        )
    for i in range(int(dataset.document_index[number]), int(dataset.document_index[number + 1])):
        yield dataset.get(i).tolist()
