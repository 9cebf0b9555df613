"""BERT's WordPiece with a ``vocab.txt``, cased or not; based on the tokenizers library, which is imported on first use.

The ids are those of Hugging Face's BertTokenizer without special tokens added around the text: text is cleaned, Chinese
characters are separate words, lower-casing also removes accents, text is split at white space and punctuation, and each
word is split greedily into the longest pieces from the left, where pieces that continue a word begin with "##". A word
that cannot be split is [UNK]. A special token spelled out in the text is encoded as that token.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from megatron_sp.data.tokenizers.tokenizer import LibraryTokenizer, import_tokenizers, read_bounded
from megatron_sp.utils.errors import DataError

CONTINUES = "##"
UNKNOWN = "[UNK]"
SPECIAL = ("[PAD]", UNKNOWN, "[CLS]", "[SEP]", "[MASK]")
_MAX_BYTES = 16 << 20  # a million pieces; each takes some hundred bytes here
_MAX_WORD_CHARACTERS = 100  # a longer word is [UNK], as in BERT's own tokenizer


class BertWordPieceTokenizer(LibraryTokenizer):
    """Tokenizer from a WordPiece vocabulary; a document ends with [SEP], or with [UNK] if there is none.

    Decoding does not restore the original white space nor, with ``lowercase``, case and accents.

    Args:
        vocab_file: ``vocab.txt``, one piece per line; the line number from 0 is the id.
        lowercase: fold case and accents, as BertWordPieceLowerCase does.
    Raises:
        DataError: the file is missing, or is not a vocabulary (names the line).
        ConfigError: the tokenizers package is not installed.
    """

    def __init__(self, vocab_file: str | Path, lowercase: bool) -> None:
        contents, vocab = _read(Path(vocab_file))
        super().__init__(
            wordpiece_model(vocab, lowercase),
            len(vocab),
            hashlib.sha256(f"BertWordPiece {lowercase} ".encode() + contents).hexdigest(),
        )
        self.cls, self.sep, self.mask, self.pad = (vocab.get(token) for token in ("[CLS]", "[SEP]", "[MASK]", "[PAD]"))
        self.eod: int = vocab[UNKNOWN] if self.sep is None else self.sep
        self._starts = np.array([not piece.startswith(CONTINUES) for piece in vocab])

    def starts_word(self, ids: np.ndarray) -> np.ndarray:
        result: np.ndarray = self._starts[ids]
        return result


def wordpiece_model(vocab: dict[str, int], lowercase: bool) -> Any:
    """Return a tokenizer of the library with BERT's steps and this vocabulary."""
    import_tokenizers()
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    model = models.WordPiece(
        vocab, unk_token=UNKNOWN, max_input_chars_per_word=_MAX_WORD_CHARACTERS, continuing_subword_prefix=CONTINUES
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=True, strip_accents=None, lowercase=lowercase
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix=CONTINUES)
    tokenizer.add_special_tokens([token for token in SPECIAL if token in vocab])
    return tokenizer


def _read(path: Path) -> tuple[bytes, dict[str, int]]:
    contents = read_bounded(path, _MAX_BYTES, "--vocab-file needs BERT's vocab.txt")
    try:
        lines = contents.decode("utf-8").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: is not UTF-8 ({error}): --vocab-file needs BERT's vocab.txt, one piece per line"
        ) from error
    vocab: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        piece = line.removesuffix("\r")
        if not piece or piece in vocab:
            what = f"'{piece}' is on line {vocab[piece] + 1} already" if piece else "is empty"
            raise DataError(
                f"{path}:{number}: {what}: --vocab-file needs BERT's vocab.txt, one piece per line, each once"
            )
        vocab[piece] = len(vocab)
    if UNKNOWN not in vocab:
        raise DataError(
            f"{path}: has no line {UNKNOWN}, which stands for what no piece can spell: --vocab-file needs BERT's vocab.txt"
        )
    return contents, vocab
