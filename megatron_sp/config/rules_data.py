"""Rules between the flags of data and tokenizers; used by ``config/rules.py``."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatron_sp.config.schema import Config
from megatron_sp.config.schema_data import SENTENCEPIECE, WORDPIECE


def data_violations(config: Config) -> Iterator[str]:
    """Yield a message for each violated rule about data."""
    data, vocab_size = config.data, config.model.vocab_size
    own_paths = [flag for flag in ("train", "valid", "test") if getattr(data, f"{flag}_data_path")]
    groups = [flag for flag in ("train", "valid", "test") if getattr(data, f"{flag}_weighted_split_paths")]
    sources = [flag for flag, given in (
        ("--mock-data", data.mock_data), ("--data-path", data.data_path),
        ("/".join(f"--{name}-data-path" for name in own_paths), own_paths),
        ("/".join(f"--{name}-weighted-split-paths" for name in groups), groups),
    ) if given]  # fmt: skip
    if not sources:
        yield "there is no data: give --data-path PREFIX, or --train-data-path, or --mock-data for synthetic tokens"
    if len(sources) > 1:
        yield f"{' and '.join(sources)} exclude each other: give one source of data"
    if own_paths and "train" not in own_paths and not config.batch.skip_train:
        yield f"--{own_paths[0]}-data-path needs --train-data-path too"
    for name in groups:
        yield from _groups(
            f"{name}_weighted_split_paths", getattr(data, f"{name}_weighted_split_paths"), several=name != "train"
        )
    if groups and "train" not in groups and not config.batch.skip_train:
        yield f"--{groups[0]}-weighted-split-paths needs --train-weighted-split-paths too"
    if data.full_validation:
        yield from _whole_sets(config)
    if data.multiple_validation_sets:
        yield from _single_sets(config)
    yield from _split(config)
    if data.tokenizer_type is None and config.knows_model:
        yield "the vocabulary is unknown: give --vocab-size N, or a tokenizer (--tokenizer-type ByteTokenizer needs no file)"
    of_a_file = (*SENTENCEPIECE, "HuggingFaceTokenizer")
    if data.tokenizer_type in of_a_file and not data.tokenizer_model:
        yield f"--tokenizer-type {data.tokenizer_type} needs --tokenizer-model FILE"
    if data.tokenizer_type == "GPT2BPETokenizer" and not (data.vocab_file and data.merge_file):
        yield "--tokenizer-type GPT2BPETokenizer needs --vocab-file FILE, its vocab.json, and --merge-file FILE, its merges.txt"
    if data.tokenizer_type == "NullTokenizer" and not vocab_size and config.knows_model:
        yield "--tokenizer-type NullTokenizer needs --vocab-size N"
    if data.tokenizer_type in WORDPIECE and not data.vocab_file:
        yield f"--tokenizer-type {data.tokenizer_type} needs --vocab-file FILE, BERT's vocab.txt"
    if data.eod_id is not None and vocab_size and data.eod_id >= vocab_size:
        yield f"eod_id ({data.eod_id}) must be below vocab_size ({vocab_size}): it is one of the ids"
    yield from _bert_data(config)


def _groups(name: str, texts: tuple[str, ...], *, several: bool) -> Iterator[str]:
    from megatron_sp.config.split_groups import read_groups

    try:
        groups = read_groups(texts)
    except ValueError as error:
        yield f"{name}: {error}"
        return
    if len(groups) > 1 and not several:
        yield f"{name} has {len(groups)} groups ({', '.join(group.name for group in groups[:4])}): training takes one; put all into it"


def _single_sets(config: Config) -> Iterator[str]:
    data = config.data
    if not (data.valid_data_path or data.test_data_path):
        yield "--multiple-validation-sets is about the sets of --valid-data-path and --test-data-path: give one of them, or leave it out"
    for name, words in (("--valid-data-path", data.valid_data_path), ("--test-data-path", data.test_data_path)):
        if numbers := [word for word in words if _is_number(word)]:
            yield f"{name} has weights ({numbers[0]}, ...), and with --multiple-validation-sets there is no blend: leave them out"


def _whole_sets(config: Config) -> Iterator[str]:
    data = config.data
    if data.mock_data:
        yield "--full-validation is about files, and the tokens of --mock-data have no end: leave it out"
    words = data.data_path or data.valid_data_path
    if (len(words) > 2 and _is_number(words[0])) or any("," in text for text in data.valid_weighted_split_paths):
        yield (
            "--full-validation reads all data of a set once, and a blend by weights does not: give --valid-data-path"
            " without weights, or each data set a group of its own"
        )


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _bert_data(config: Config) -> Iterator[str]:
    data = config.data
    if not config.model.is_bert:
        for name in ("mask_prob", "short_seq_prob", "bert_pack_sequences"):
            if getattr(data, name) != getattr(type(data), name):
                yield f"--{name.replace('_', '-')} is for BERT (pretrain_bert.py), and this is a GPT: leave it out"
        return
    if not 0 < data.mask_prob < 1:
        yield f"mask_prob ({data.mask_prob}) must be in (0, 1)"
    if data.short_seq_prob > 1:
        yield f"short_seq_prob ({data.short_seq_prob}) must be in [0, 1]"
    if data.bert_pack_sequences and config.model.has_order_head and config.knows_model:
        yield (
            "--bert-pack-sequences puts several samples into a row, which has no place for the order of two segments"
            " of each: add --bert-no-binary-head, or leave it out"
        )
    own_end = data.eod_id is not None and data.tokenizer_type != "NullTokenizer"
    for name in ("eod_mask_loss", "reset_position_ids", "reset_attention_mask", *(["eod_id"] if own_end else [])):
        if name == "eod_id" or getattr(data, name):
            yield f"--{name.replace('_', '-')} is about documents in GPT's stream of tokens; BERT's samples lie within one: leave it out"


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
