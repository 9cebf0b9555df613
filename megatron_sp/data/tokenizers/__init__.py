"""Tokenizers, which convert text to token ids and back; those of files are imported when one is built."""

from __future__ import annotations

import hashlib
from typing import Any

from megatron_sp.config.schema import SENTENCEPIECE, WORDPIECE, DataConfig, default_type
from megatron_sp.data.tokenizers.tokenizer import ByteTokenizer, NullTokenizer, Tokenizer, choose_bos
from megatron_sp.utils.errors import ConfigError

__all__ = ["ByteTokenizer", "NullTokenizer", "Tokenizer", "build_tokenizer", "choose_bos"]


def build_tokenizer(data: DataConfig, vocab_size: int | None = None) -> Tokenizer:
    """Build the tokenizer of --tokenizer-type, or that of the files that are given (``default_type``).

    Raises:
        ConfigError: the flags name no tokenizer, or ``vocab_size``, the model's, is too small for it.
        DataError: its file is missing or damaged.
    """
    kind = data.tokenizer_type or default_type(data, vocab_size)
    needs = f"--tokenizer-type {kind} needs"
    tokenizer: Any
    if kind is None:
        raise ConfigError(
            "there is no tokenizer: give --tokenizer-type (ByteTokenizer needs no file), --tokenizer-model FILE,"
            " --vocab-file FILE, or --vocab-size N for text that is integers"
        )
    if kind in SENTENCEPIECE:
        if not data.tokenizer_model:
            raise ConfigError(f"{needs} --tokenizer-model FILE")
        from megatron_sp.data.tokenizers.spm import Llama2Tokenizer, SentencePieceTokenizer

        tokenizer = (Llama2Tokenizer if kind == "Llama2Tokenizer" else SentencePieceTokenizer)(data.tokenizer_model)
    elif kind == "HuggingFaceTokenizer":
        if not data.tokenizer_model:
            raise ConfigError(f"{needs} --tokenizer-model FILE, a tokenizer.json")
        from megatron_sp.data.tokenizers.hugging_face import HuggingFaceTokenizer

        tokenizer = HuggingFaceTokenizer(data.tokenizer_model)
    elif kind == "GPT2BPETokenizer":
        if not data.vocab_file or not data.merge_file:
            raise ConfigError(f"{needs} --vocab-file FILE, a vocab.json, and --merge-file FILE, a merges.txt")
        from megatron_sp.data.tokenizers.hugging_face import GPT2BPETokenizer

        tokenizer = GPT2BPETokenizer(data.vocab_file, data.merge_file)
    elif kind in WORDPIECE:
        if not data.vocab_file:
            raise ConfigError(f"{needs} --vocab-file FILE")
        from megatron_sp.data.tokenizers.hugging_face import BertWordPieceTokenizer

        tokenizer = BertWordPieceTokenizer(data.vocab_file, lowercase=kind == "BertWordPieceLowerCase")
    elif kind == "ByteTokenizer":
        tokenizer = ByteTokenizer()
    elif kind == "NullTokenizer":
        if not vocab_size:
            raise ConfigError(f"{needs} --vocab-size N")
        tokenizer = NullTokenizer(vocab_size, data.eod_id)
    else:
        known = f"{', '.join(SENTENCEPIECE)}, HuggingFaceTokenizer, GPT2BPETokenizer, {', '.join(WORDPIECE)}"
        raise ConfigError(f"--tokenizer-type {kind} is not known: use {known}, ByteTokenizer or NullTokenizer")
    eod, largest = data.eod_id, tokenizer.vocab_size - 1
    if eod is not None and not 0 <= eod <= largest:
        raise ConfigError(f"eod_id ({eod}) must be an id of the vocabulary, 0 to {largest}")
    if eod is not None and eod != tokenizer.eod:  # --eod-id: another id ends documents than the tokenizer's own
        fingerprint = hashlib.sha256(f"{tokenizer.fingerprint()} {eod}".encode()).hexdigest()
        tokenizer.eod, tokenizer.fingerprint = eod, lambda: fingerprint
    if vocab_size is not None and vocab_size <= largest:
        least = f"must be at least the tokenizer's ({largest + 1}): leave --vocab-size out to take the tokenizer's"
        raise ConfigError(f"vocab_size ({vocab_size}) {least}")
    built: Tokenizer = tokenizer
    return built
