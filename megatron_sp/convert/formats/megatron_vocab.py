"""Number of entries of a vocabulary that a file contains padded to a multiple required by the ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from megatron_sp.convert.families.settings import Settings
from megatron_sp.convert.options import Options
from megatron_sp.convert.tokenizer_files import MAX_BYTES, find_files
from megatron_sp.utils.errors import CheckpointError, ConfigError
from megatron_sp.utils.strict_json import parse_object, read_small_file

_MAX_VALUES = 4_000_000  # a large vocabulary has some 250,000 words, and twice as many merges of three values each


def padded_size(vocab_size: int, divisible_by: int, tp: int) -> int:
    """Return the number of rows of the table over all tp ranks."""
    unit = divisible_by * tp
    return (vocab_size + unit - 1) // unit * unit


def true_size(settings: Settings, padded: int, tp: int, options: Options) -> int:
    """Return the number of entries of the vocabulary: that of --vocab-size or --tokenizer, else that in the arguments.

    Raises:
        ConfigError: it is not specified, or does not fit the padded size.
    """
    if options.vocab_size is not None:
        return _fitting(options.vocab_size, padded, "--vocab-size")
    if options.tokenizer is not None and (counted := tokenizer_size(options.tokenizer)) is not None:
        return _fitting(counted, padded, f"--tokenizer {options.tokenizer}: its size")
    divisible_by = settings.count("make_vocab_size_divisible_by", None)
    said = settings.count("vocab_size", None)
    if said is not None:
        said += settings.get("tokenizer_type", str, "") == "NullTokenizer"  # its end-of-text token is not counted
        if (divisible_by is None and said <= padded) or (divisible_by is not None and padded_size(said, divisible_by, tp) == padded):
            return int(said)
    if divisible_by is not None and divisible_by * tp == 1:
        return padded
    raise ConfigError(
        f"{settings.where} has {padded} rows of the vocabulary, of which the last may only fill it up, and does not say how many are real:"
        f" give --vocab-size N (the tokenizer's size), or --tokenizer PATH, or --vocab-size {padded} to keep all"
    )


def _fitting(size: int, padded: int, what: str) -> int:
    if size > padded:
        raise ConfigError(f"{what} ({size}) must be at most the {padded} rows that the vocabulary has in the checkpoint")
    return size


def tokenizer_size(path: Path) -> int | None:
    """Return the number of entries in a tokenizer's files, or None if they do not specify it.

    Raises:
        CheckpointError: a file is not of the kind that its name indicates.
    """
    files = find_files(path)
    for name, count in _COUNTS.items():
        if name in files:
            try:
                return count(files[name])
            except (KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
                raise CheckpointError(f"{files[name]} cannot be read as a tokenizer: {str(error)[:200]}") from None
    return None


def _of_json(path: Path) -> int:
    document = parse_object(read_small_file(path, MAX_BYTES), str(path), _MAX_VALUES)
    words, added = document["model"]["vocab"], document.get("added_tokens") or []
    ids = list(words.values()) if isinstance(words, dict) else list(range(len(words)))
    return int(max([*ids, *(token["id"] for token in added)])) + 1


def _of_vocabulary(path: Path) -> int:
    return int(max(parse_object(read_small_file(path, MAX_BYTES), str(path), _MAX_VALUES).values())) + 1


def _of_lines(path: Path) -> int:
    return len(read_small_file(path, MAX_BYTES).decode("utf-8").splitlines())


def _of_sentencepiece(path: Path) -> int:
    import sentencepiece

    return int(sentencepiece.SentencePieceProcessor(model_proto=read_small_file(path, MAX_BYTES)).get_piece_size())


_COUNTS: dict[str, Callable[[Path], int]] = {
    "tokenizer.json": _of_json, "vocab.json": _of_vocabulary, "vocab.txt": _of_lines, "tokenizer.model": _of_sentencepiece,
}  # fmt: skip
