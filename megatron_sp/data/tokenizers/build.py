"""Construction of a tokenizer from the flags."""

from __future__ import annotations

import hashlib
from typing import Any

from megatron_sp.config.schema import DataConfig
from megatron_sp.config.schema_data import SENTENCEPIECE, WORDPIECE, default_type
from megatron_sp.data.tokenizers.simple import ByteTokenizer, NullTokenizer
from megatron_sp.data.tokenizers.tokenizer import Tokenizer
from megatron_sp.utils.errors import ConfigError


def build_tokenizer(data: DataConfig, vocab_size: int | None = None) -> Tokenizer:
    """Build the tokenizer of --tokenizer-type.

    Default with --tokenizer-model: HuggingFaceTokenizer if the file ends in .json, else SentencePieceTokenizer; with
    --merge-file: GPT2BPETokenizer; with --vocab-file alone: BertWordPieceLowerCase; with --vocab-size alone:
    NullTokenizer.

    Args:
        data: the flags.
        vocab_size: --vocab-size, entries of the model's vocabulary; it may exceed the tokenizer's, never the other way
            round.
    Raises:
        ConfigError: the flags do not determine a tokenizer, or ``vocab_size`` is too small for it.
        DataError: the tokenizer's file is missing or damaged.
    """
    kind = data.tokenizer_type or default_type(data, vocab_size)
    tokenizer: Tokenizer
    if kind is None:
        raise ConfigError(
            "there is no tokenizer: give --tokenizer-type (ByteTokenizer needs no file), --tokenizer-model FILE, --vocab-file FILE, or"
            " --vocab-size N for text that is integers"
        )
    if kind in SENTENCEPIECE:
        if not data.tokenizer_model:
            raise ConfigError(f"--tokenizer-type {kind} needs --tokenizer-model FILE")
        from megatron_sp.data.tokenizers.spm import Llama2Tokenizer, SentencePieceTokenizer

        tokenizer = (Llama2Tokenizer if kind == "Llama2Tokenizer" else SentencePieceTokenizer)(data.tokenizer_model)
    elif kind == "HuggingFaceTokenizer":
        if not data.tokenizer_model:
            raise ConfigError("--tokenizer-type HuggingFaceTokenizer needs --tokenizer-model FILE, a tokenizer.json")
        from megatron_sp.data.tokenizers.hugging_face import HuggingFaceTokenizer

        tokenizer = HuggingFaceTokenizer(data.tokenizer_model)
    elif kind == "GPT2BPETokenizer":
        if not data.vocab_file or not data.merge_file:
            raise ConfigError(
                "--tokenizer-type GPT2BPETokenizer needs --vocab-file FILE, a vocab.json, and --merge-file FILE, a merges.txt"
            )
        from megatron_sp.data.tokenizers.hugging_face import GPT2BPETokenizer

        tokenizer = GPT2BPETokenizer(data.vocab_file, data.merge_file)
    elif kind in WORDPIECE:
        if not data.vocab_file:
            raise ConfigError(f"--tokenizer-type {kind} needs --vocab-file FILE")
        from megatron_sp.data.tokenizers.wordpiece import BertWordPieceTokenizer

        tokenizer = BertWordPieceTokenizer(data.vocab_file, lowercase=kind == "BertWordPieceLowerCase")
    elif kind == "ByteTokenizer":
        tokenizer = ByteTokenizer()
    elif kind == "NullTokenizer":
        if not vocab_size:
            raise ConfigError("--tokenizer-type NullTokenizer needs --vocab-size N")
        tokenizer = NullTokenizer(vocab_size, data.eod_id)
    else:
        raise ConfigError(
            f"--tokenizer-type {kind} is not known: use {', '.join(SENTENCEPIECE)}, HuggingFaceTokenizer,"
            f" GPT2BPETokenizer, {', '.join(WORDPIECE)}, ByteTokenizer or NullTokenizer"
        )
    if data.eod_id is not None:
        _end_documents_with(tokenizer, data.eod_id)
    if vocab_size is not None and vocab_size < tokenizer.vocab_size:
        raise ConfigError(
            f"vocab_size ({vocab_size}) must be at least the tokenizer's ({tokenizer.vocab_size}): leave --vocab-size out to take the"
            " tokenizer's"
        )
    return tokenizer


def _end_documents_with(tokenizer: Any, eod: int) -> None:
    """Let another id end documents than the tokenizer's own: --eod-id. Raises ConfigError: it is not in the vocabulary."""
    if not 0 <= eod < tokenizer.vocab_size:
        raise ConfigError(f"eod_id ({eod}) must be an id of the vocabulary, 0 to {tokenizer.vocab_size - 1}")
    if eod != tokenizer.eod:
        own = tokenizer.fingerprint()
        tokenizer.eod = eod
        tokenizer.fingerprint = lambda: hashlib.sha256(f"{own} {eod}".encode()).hexdigest()
