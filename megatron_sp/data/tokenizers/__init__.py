"""Text to token ids and back."""

from megatron_sp.data.tokenizers.build import build_tokenizer
from megatron_sp.data.tokenizers.simple import ByteTokenizer, NullTokenizer
from megatron_sp.data.tokenizers.spm import SentencePieceTokenizer
from megatron_sp.data.tokenizers.tokenizer import Tokenizer

__all__ = ["ByteTokenizer", "NullTokenizer", "SentencePieceTokenizer", "Tokenizer", "build_tokenizer"]
