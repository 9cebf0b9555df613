"""Tokenizers, which convert text to token ids and back; those of files are imported when one is built."""

from megatron_sp.data.tokenizers.tokenizer import ByteTokenizer, NullTokenizer, Tokenizer, build_tokenizer, choose_bos

__all__ = ["ByteTokenizer", "NullTokenizer", "Tokenizer", "build_tokenizer", "choose_bos"]
