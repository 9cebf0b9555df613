"""Rules of data and tokenizers, and the groups of parts of data sets that --train/valid/test-weighted-split-paths name.

BigScience's Megatron-DeepSpeed writes a group as "NAME: WEIGHT BEGIN:END PREFIX, WEIGHT BEGIN:END PREFIX". BEGIN and
END are shares of a data set's documents (of its sequences for GPT), so that two groups can take different parts of one.
A group is blended by its weights; several for validation or test are evaluated one after the other.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

from megatron_sp.config.fields import flag_name
from megatron_sp.config.schema import FIELDS, SENTENCEPIECE, WORDPIECE, Config
from megatron_sp.utils.files import read_text

# a rule is a condition and a sentence
# fmt: off
_MOST_BYTES = 256 * 1024
_FORM = '"NAME: WEIGHT BEGIN:END PREFIX, WEIGHT BEGIN:END PREFIX"'
_PARTS = ("train", "valid", "test")


def data_violations(config: Config) -> Iterator[str]:
    """Yield a message for each violated rule about data."""
    data = config.data
    own_paths = [part for part in _PARTS if getattr(data, f"{part}_data_path")]
    groups = [part for part in _PARTS if getattr(data, f"{part}_weighted_split_paths")]
    sources = [flag for flag, given in (
        ("--mock-data", data.mock_data), ("--data-path", data.data_path),
        ("/".join(f"--{part}-data-path" for part in own_paths), own_paths),
        ("/".join(f"--{part}-weighted-split-paths" for part in groups), groups),
    ) if given]
    if not sources:
        yield "there is no data: give --data-path PREFIX, or --train-data-path, or --mock-data for synthetic tokens"
    if len(sources) > 1:
        yield f"{' and '.join(sources)} exclude each other: give one source of data"
    if own_paths and "train" not in own_paths and not config.batch.skip_train:
        yield f"--{own_paths[0]}-data-path needs --train-data-path too"
    for part in groups:
        name = f"{part}_weighted_split_paths"
        try:
            names = [group.name for group in read_groups(getattr(data, name))]
        except ValueError as error:
            yield f"{name}: {error}"
            continue
        if len(names) > 1 and part == "train":
            yield f"{name} has {len(names)} groups ({', '.join(names[:4])}): training takes one; put all into it"
    if groups and "train" not in groups and not config.batch.skip_train:
        yield f"--{groups[0]}-weighted-split-paths needs --train-weighted-split-paths too"
    yield from _validation(config)
    yield from _split(config)
    yield from _tokenizer(config)
    yield from _bert_data(config)


def _validation(config: Config) -> Iterator[str]:
    data = config.data
    if data.full_validation:
        if data.mock_data:
            yield "--full-validation is about files, and the tokens of --mock-data have no end: leave it out"
        words = data.data_path or data.valid_data_path
        if (len(words) > 2 and _is_number(words[0])) or any("," in text for text in data.valid_weighted_split_paths):
            yield ("--full-validation reads all data of a set once, and a blend by weights does not: give"
                " --valid-data-path without weights, or each data set a group of its own")
    if data.multiple_validation_sets:
        if not (data.valid_data_path or data.test_data_path):
            yield ("--multiple-validation-sets is about the sets of --valid-data-path and --test-data-path: give one of"
                " them, or leave it out")
        for name, words in (("--valid-data-path", data.valid_data_path), ("--test-data-path", data.test_data_path)):
            if numbers := [word for word in words if _is_number(word)]:
                blend = "and with --multiple-validation-sets there is no blend"
                yield f"{name} has weights ({numbers[0]}, ...), {blend}: leave them out"


def _is_number(word: str) -> bool:
    with suppress(ValueError):
        float(word)
        return True
    return False


def _split(config: Config) -> Iterator[str]:
    text = config.data.split
    try:
        parts = [float(part) for part in text.replace("/", ",").split(",")]
    except ValueError:
        yield f"split ('{text}') must be up to three numbers joined by commas, such as 969,30,1"
        return
    if len(parts) > 3:
        yield f"split ('{text}') has {len(parts)} numbers, but there are three parts: train, validation, test"
    elif not all(math.isfinite(part) and part >= 0 for part in parts) or sum(parts) <= 0:
        yield f"split ('{text}') must be numbers of at least 0 whose sum is above 0"
    elif parts[0] == 0 and config.data.data_path and not config.batch.skip_train:
        yield f"split ('{text}') leaves nothing to train on: its first number must be above 0"


def _tokenizer(config: Config) -> Iterator[str]:
    data, kind, vocab_size = config.data, config.data.tokenizer_type, config.model.vocab_size
    needs = f"--tokenizer-type {kind} needs"
    if kind is None and config.knows_model:
        yield ("the vocabulary is unknown: give --vocab-size N, or a tokenizer (--tokenizer-type ByteTokenizer needs no"
            " file)")
    if kind in (*SENTENCEPIECE, "HuggingFaceTokenizer") and not data.tokenizer_model:
        yield f"{needs} --tokenizer-model FILE"
    if kind == "GPT2BPETokenizer" and not (data.vocab_file and data.merge_file):
        yield f"{needs} --vocab-file FILE, its vocab.json, and --merge-file FILE, its merges.txt"
    if kind == "NullTokenizer" and not vocab_size and config.knows_model:
        yield f"{needs} --vocab-size N"
    if kind in WORDPIECE and not data.vocab_file:
        yield f"{needs} --vocab-file FILE, BERT's vocab.txt"
    if data.eod_id is not None and vocab_size and data.eod_id >= vocab_size:
        yield f"eod_id ({data.eod_id}) must be below vocab_size ({vocab_size}): it is one of the ids"


def _bert_data(config: Config) -> Iterator[str]:
    data = config.data
    if not config.model.is_bert:
        for name in ("mask_prob", "short_seq_prob", "bert_pack_sequences"):
            if getattr(data, name) != FIELDS["data", name].default:
                yield f"{flag_name(name)} is for BERT (pretrain_bert.py), and this is a GPT: leave it out"
        return
    if not 0 < data.mask_prob < 1:
        yield f"mask_prob ({data.mask_prob}) must be in (0, 1)"
    if data.short_seq_prob > 1:
        yield f"short_seq_prob ({data.short_seq_prob}) must be in [0, 1]"
    if data.bert_pack_sequences and config.model.has_order_head and config.knows_model:
        yield ("--bert-pack-sequences puts several samples into a row, which has no place for the order of two segments"
            " of each: add --bert-no-binary-head, or leave it out")
    of_documents = [
        name for name in ("eod_mask_loss", "reset_position_ids", "reset_attention_mask") if getattr(data, name)
    ]
    if data.eod_id is not None and data.tokenizer_type != "NullTokenizer":
        of_documents.append("eod_id")
    for name in of_documents:
        rule = "is about documents in GPT's stream of tokens; BERT's samples lie within one"
        yield f"{flag_name(name)} {rule}: leave it out"


# ----------------------------------------------------------------------------------------- groups of parts of data sets


class SplitGroup(NamedTuple):
    """A blend of parts of data sets; weights, ranges and prefixes belong together one by one."""

    name: str
    weights: tuple[float, ...]
    ranges: tuple[tuple[float, float], ...]
    prefixes: tuple[str, ...]


def read_groups(texts: tuple[str, ...]) -> tuple[SplitGroup, ...]:
    """Return the groups of a --train/valid/test-weighted-split-paths.

    Raises:
        ValueError: a text is not of that form, or two groups have one name.
    """
    groups = []
    for text in texts:
        name, colon, rest = text.strip().strip("\"'").partition(":")
        name = name.strip()
        if not colon or not rest.strip() or not re.fullmatch(r"[\w.-]+( [\w.-]+)*", name):
            raise ValueError(f"expected {_FORM} in quotes, got '{text[:60]}'")
        parts = [_part(part) for part in rest.split(",") if part.strip()]
        groups.append(SplitGroup(name, *zip(*parts, strict=True)))  # type: ignore[arg-type]
    names = [group.name for group in groups]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two groups have the name '{name}': give each its own, by which its loss is reported")
    return tuple(groups)


def _part(text: str) -> tuple[float, tuple[float, float], str]:
    words = text.split()
    if len(words) != 3:
        raise ValueError(f"expected WEIGHT BEGIN:END PREFIX between two commas, got '{' '.join(words)[:60]}'")
    weight, share, prefix = words
    begin, _, end = share.partition(":")
    try:
        numbers = float(weight), float(begin), float(end)
    except ValueError:
        form = f"WEIGHT BEGIN:END PREFIX in numbers, such as 0.3 0:0.95 {prefix[:40]}"
        raise ValueError(f"expected {form}, got '{text.strip()[:60]}'") from None
    if not 0 < numbers[0] < math.inf:
        raise ValueError(f"'{weight[:20]}' must be a weight above 0: leave out sets of weight 0")
    if not 0 <= numbers[1] < numbers[2] <= 1:
        rule = "BEGIN:END with 0 <= BEGIN < END <= 1: shares of a data set's documents"
        raise ValueError(f"'{share[:40]}' must be {rule}")
    return numbers[0], (numbers[1], numbers[2]), prefix


def read_group_file(path: str) -> tuple[str, ...]:
    """Return the texts of the groups in a file: all that is in double quotes, or each line.

    Raises:
        ConfigError: the file cannot be read.
    """
    text = read_text(path, path, _MOST_BYTES, "a file of groups")
    return tuple(re.findall(r'"([^"]*)"', text)) or tuple(line.strip() for line in text.splitlines() if line.strip())
