"""Flags of data sets and tokenizers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from megatron_sp.config.conditions import FILES, SPLITS, tokenizers
from megatron_sp.utils.flag_field import flag

WORDPIECE = ("BertWordPieceLowerCase", "BertWordPieceCase")
"""Kinds of tokenizer that read --vocab-file."""
SENTENCEPIECE = ("SentencePieceTokenizer", "Llama2Tokenizer")
"""Kinds of tokenizer that read a SentencePiece model."""


def default_type(data: DataConfig, vocab_size: int | None) -> Any:
    """Return the --tokenizer-type that other flags imply."""
    if data.tokenizer_model:
        return "HuggingFaceTokenizer" if data.tokenizer_model.endswith(".json") else "SentencePieceTokenizer"
    if data.merge_file:
        return "GPT2BPETokenizer"
    return "BertWordPieceLowerCase" if data.vocab_file else "NullTokenizer" if vocab_size else None


@dataclass
class DataConfig:
    """Data sets and tokenizer."""

    data_path: tuple[str, ...] = flag(
        (), "prefix of a .bin/.idx pair, or WEIGHT PREFIX [WEIGHT PREFIX ...] for a blend", path=True
    )
    split: str = flag("969,30,1", "shares of --data-path for train, validation, test", only=SPLITS)
    train_data_path: tuple[str, ...] = flag((), "as --data-path, for training alone (replaces --split)", path=True)
    valid_data_path: tuple[str, ...] = flag((), "as --data-path, for validation alone", path=True)
    test_data_path: tuple[str, ...] = flag((), "as --data-path, for the test alone", path=True)
    train_weighted_split_paths: tuple[str, ...] = flag(
        (), '"NAME: WEIGHT BEGIN:END PREFIX, ...": a blend of parts of data sets for training, instead of the others'
    )
    valid_weighted_split_paths: tuple[str, ...] = flag(
        (), "the same for validation; each of several groups is evaluated"
    )
    test_weighted_split_paths: tuple[str, ...] = flag((), "the same for the test")
    multiple_validation_sets: bool = flag(
        False, "evaluate each set of --valid-data-path and --test-data-path by itself, not their blend"
    )
    full_validation: bool = flag(
        False, "a validation goes through the whole of its data, however many batches --eval-iters says"
    )
    data_cache_path: str | None = flag(
        None, "folder of the index cache (default: beside the data)", path=True, only=FILES
    )
    mock_data: bool = flag(False, "synthetic data, no files (needs --vocab-size or a tokenizer)")
    tokenizer_type: (
        Literal[
            "SentencePieceTokenizer", "Llama2Tokenizer", "HuggingFaceTokenizer", "GPT2BPETokenizer",
            "BertWordPieceLowerCase",
            "BertWordPieceCase", "ByteTokenizer", "NullTokenizer",
        ] | None
    ) = flag(
        None,
        "kind of tokenizer (default: with --tokenizer-model HuggingFaceTokenizer if that ends in .json, else SentencePiece;"
        " GPT2BPETokenizer with --merge-file, BertWordPieceLowerCase with --vocab-file alone, else Null with --vocab-size)",
    )  # fmt: skip
    tokenizer_model: str | None = flag(
        None,
        "SentencePiece model file (Llama2Tokenizer: one with BOS); of HuggingFaceTokenizer tokenizer.json, or the folder that holds it",
        path=True,
        only=tokenizers(*SENTENCEPIECE, "HuggingFaceTokenizer"),
    )
    eod_id: int | None = flag(
        None,
        "the id that ends a document (default: the tokenizer's own; of NullTokenizer the last one)",
        aliases=("null-tokenizer-eod-id",),
        low=0,
    )
    vocab_file: str | None = flag(
        None,
        "vocab.txt of BertWordPieceLowerCase and BertWordPieceCase, one piece per line; vocab.json of GPT2BPETokenizer",
        path=True,
        only=tokenizers("GPT2BPETokenizer", *WORDPIECE),
    )
    merge_file: str | None = flag(
        None, "merges.txt of GPT2BPETokenizer", path=True, only=tokenizers("GPT2BPETokenizer")
    )
    num_workers: int = flag(
        2, "0: read in the training thread; else read ahead in the background", unit="threads", low=0, high=1024
    )
    dataloader_type: Literal["single", "cyclic"] = flag(
        "single", "single: in the data set's order; cyclic: reshuffled every epoch"
    )
    eod_mask_loss: bool = flag(False, "no loss on end-of-document tokens")
    reset_position_ids: bool = flag(False, "positions start again after each end-of-document token")
    reset_attention_mask: bool = flag(False, "tokens attend within their own document only")
    mask_prob: float = flag(0.15, "BERT: share of the tokens that have to be guessed, in (0, 1)")
    short_seq_prob: float = flag(0.1, "BERT: share of samples that are shorter than there is room, in [0, 1]", low=0)
    bert_pack_sequences: bool = flag(
        False,
        "BERT: several samples in one row, as many as fit, each attending to itself alone (needs --bert-no-binary-head)",
    )
