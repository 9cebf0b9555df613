"""From flags to a tokenizer."""

from __future__ import annotations

from megatron_sp.config import WORDPIECE, DataConfig, default_type
from megatron_sp.data.tokenizers.simple import ByteTokenizer, NullTokenizer
from megatron_sp.data.tokenizers.spm import SentencePieceTokenizer
from megatron_sp.data.tokenizers.tokenizer import Tokenizer
from megatron_sp.data.tokenizers.wordpiece import BertWordPieceTokenizer
from megatron_sp.utils.errors import ConfigError


def build_tokenizer(data: DataConfig, vocab_size: int | None = None) -> Tokenizer:
    """The tokenizer of --tokenizer-type.

    Default: SentencePiece with --tokenizer-model, BertWordPieceLowerCase with --vocab-file, else Null with --vocab-size.

    Args:
        data: the flags.
        vocab_size: --vocab-size, entries of the model's vocabulary; it may exceed the tokenizer's, never the other way round.
    Raises:
        ConfigError: flags that do not determine a tokenizer, or a vocabulary that is too small for it.
        DataError: the tokenizer's file is absent or damaged.
    """
    kind = data.tokenizer_type or default_type(data.tokenizer_model, data.vocab_file, vocab_size)
    tokenizer: Tokenizer
    if kind is None:
        raise ConfigError(
            "there is no tokenizer: give --tokenizer-type (ByteTokenizer needs no file), --tokenizer-model FILE, --vocab-file FILE, or"
            " --vocab-size N for text that is integers"
        )
    if kind == "SentencePieceTokenizer":
        if not data.tokenizer_model:
            raise ConfigError("--tokenizer-type SentencePieceTokenizer needs --tokenizer-model FILE")
        tokenizer = SentencePieceTokenizer(data.tokenizer_model)
    elif kind in WORDPIECE:
        if not data.vocab_file:
            raise ConfigError(f"--tokenizer-type {kind} needs --vocab-file FILE")
        tokenizer = BertWordPieceTokenizer(data.vocab_file, lowercase=kind == "BertWordPieceLowerCase")
    elif kind == "ByteTokenizer":
        tokenizer = ByteTokenizer()
    elif kind == "NullTokenizer":
        if not vocab_size:
            raise ConfigError("--tokenizer-type NullTokenizer needs --vocab-size N")
        tokenizer = NullTokenizer(vocab_size)
    else:
        raise ConfigError(
            f"--tokenizer-type {kind} is not known: use SentencePieceTokenizer, {', '.join(WORDPIECE)}, ByteTokenizer or NullTokenizer"
        )
    if vocab_size is not None and vocab_size < tokenizer.vocab_size:
        raise ConfigError(
            f"vocab_size ({vocab_size}) must be at least the tokenizer's ({tokenizer.vocab_size}): leave --vocab-size out to take the"
            " tokenizer's"
        )
    return tokenizer
