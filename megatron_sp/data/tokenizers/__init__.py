"""Tokenizers, which convert text to token ids and back."""

from megatron_sp.data.tokenizers.build import build_tokenizer
from megatron_sp.data.tokenizers.hugging_face import GPT2BPETokenizer, HuggingFaceTokenizer
from megatron_sp.data.tokenizers.simple import ByteTokenizer, NullTokenizer
from megatron_sp.data.tokenizers.spm import Llama2Tokenizer, SentencePieceTokenizer
from megatron_sp.data.tokenizers.tokenizer import Tokenizer, choose_bos
from megatron_sp.data.tokenizers.wordpiece import BertWordPieceTokenizer

__all__ = [
    "BertWordPieceTokenizer",
    "ByteTokenizer",
    "GPT2BPETokenizer",
    "HuggingFaceTokenizer",
    "Llama2Tokenizer",
    "NullTokenizer",
    "SentencePieceTokenizer",
    "Tokenizer",
    "build_tokenizer",
    "choose_bos",
]
