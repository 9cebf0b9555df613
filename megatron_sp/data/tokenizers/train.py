"""Training of tokenizers: a SentencePiece model that reproduces its input text exactly, or BERT's WordPiece."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from megatron_sp.data.tokenizers.hugging_face import CONTINUES, SPECIAL, BertWordPieceTokenizer, wordpiece_model
from megatron_sp.data.tokenizers.spm import SentencePieceTokenizer
from megatron_sp.data.tokenizers.tokenizer import Tokenizer, import_tokenizers, well_formed
from megatron_sp.utils.errors import ConfigError, DataError, DiskError
from megatron_sp.utils.files import atomic_replace, file_place

SAMPLE_BYTES = 8_000_000
"""Text that is enough to learn pieces from; more costs time and changes little."""

_MAX_LINE_BYTES = 8192
_MIN_HELD_BYTES = 64_000_000
_MIN_VOCAB_SIZE = 300  # 256 bytes, <unk>, <eod>, the newline, and some letters
_MIN_WORDPIECES = 30  # five special tokens and some letters
_MAX_ALPHABET = 1000  # rarer characters are [UNK], as in BERT's own vocabulary
_BERT_PIECES = ("[PAD]", "[CLS]", "[SEP]", "[MASK]")


class TrainReport(NamedTuple):
    """Result of training."""

    vocab_size: int
    num_sampled_bytes: int  # of the text trained on
    num_text_bytes: int  # of all text
    bytes_per_token: float  # on a part of the text trained on


def train_sentencepiece(
    texts: Iterable[str], model: str | Path, vocab_size: int, sample_bytes: int = SAMPLE_BYTES, bert: bool = False
) -> TrainReport:
    """Train a SentencePiece model on ``texts`` and write it to ``model``, atomically; with BERT's tokens if ``bert``.

    Args:
        vocab_size: number of ids, including the 256 bytes and the end-of-document token (``<eod>``).
        sample_bytes: approximate amount of text to train on.
    Raises:
        ConfigError: ``vocab_size`` is too small, or sentencepiece is not installed.
        DataError: there is too little text for so many pieces, or it has more characters than pieces.
        DiskError: the file cannot be written.
    """
    if vocab_size < _MIN_VOCAB_SIZE:
        least = f"must be at least {_MIN_VOCAB_SIZE}: the 256 bytes alone take most of that"
        raise ConfigError(f"vocab_size ({vocab_size}) {least}")
    try:
        import sentencepiece
    except ImportError as error:
        needed = "the sentencepiece package is needed to train a tokenizer: pip install 'sentencepiece>=0.2.1'"
        raise ConfigError(needed) from error
    lines, num_text_bytes = _sample(texts, sample_bytes)
    buffer = io.BytesIO()
    # No normalisation, spaces are neither added in front nor removed, and text without a piece is spelled in bytes: it
    # reproduces its input. BPE trains in seconds where the unigram model takes a minute, and compresses as well. One
    # thread, and lines in order, so the same text gives the same model, byte for byte. With BERT's special tokens,
    # which no text can spell, a space in front gives a word the same pieces at the beginning of a sentence as in it.
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines), model_writer=buffer, model_type="bpe", vocab_size=vocab_size,
            normalization_rule_name="identity", add_dummy_prefix=bert, remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True, user_defined_symbols=["\n"], byte_fallback=True,
            character_coverage=0.9999, split_digits=True, unk_id=0, eos_id=1, eos_piece="<eod>", bos_id=-1, pad_id=-1,
            control_symbols=list(_BERT_PIECES) if bert else [], shuffle_input_sentence=False, num_threads=1,
            max_sentence_length=_MAX_LINE_BYTES, minloglevel=2,
        )  # fmt: skip
    except Exception as error:  # its errors are RuntimeError, OSError or its own, by version
        raise _misfit(error, vocab_size, _size_of(lines), num_text_bytes) from error
    _write(Path(model), buffer.getvalue())
    return _report(SentencePieceTokenizer(model), lines, num_text_bytes)


def train_wordpiece(
    texts: Iterable[str], vocab_file: str | Path, vocab_size: int, sample_bytes: int = SAMPLE_BYTES,
    lowercase: bool = True,
) -> TrainReport:  # fmt: skip
    """Train WordPiece on ``texts`` and write ``vocab_file``, atomically; little text gives fewer ids.

    Raises:
        ConfigError: ``vocab_size`` is too small, or the tokenizers package is not installed.
        DataError: there is no text. DiskError: the file cannot be written.
    """
    if vocab_size < _MIN_WORDPIECES:
        least = f"must be at least {_MIN_WORDPIECES}: five special tokens and some letters"
        raise ConfigError(f"vocab_size ({vocab_size}) {least}")
    import_tokenizers()
    from tokenizers import trainers

    lines, num_text_bytes = _sample(texts, sample_bytes)
    tokenizer = wordpiece_model({token: i for i, token in enumerate(SPECIAL)}, lowercase)
    words = Counter[str]()
    for line in lines:
        normal = tokenizer.normalizer.normalize_str(line)
        words.update(word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(normal))
    letters = Counter[str]()
    for word, times in words.items():
        for letter in word:
            letters[letter] += times
    most = min(_MAX_ALPHABET, vocab_size // 3)
    alphabet = sorted(sorted(letters, key=lambda letter: (-letters[letter], letter))[:most])
    inner = {letter for word in words for letter in word[1:]}
    # Given as special, these get their ids in this order; the trainer itself would number them by chance, and break
    # ties by number.
    first = [*SPECIAL, *(CONTINUES + letter for letter in alphabet if letter in inner)]
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size, special_tokens=first, initial_alphabet=alphabet, limit_alphabet=len(alphabet),
        continuing_subword_prefix=CONTINUES, show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(iter(lines), trainer)
    ids: dict[str, int] = tokenizer.get_vocab()
    _write(Path(vocab_file), "".join(f"{piece}\n" for piece in sorted(ids, key=ids.__getitem__)).encode())
    return _report(BertWordPieceTokenizer(vocab_file, lowercase), lines, num_text_bytes)


def _sample(texts: Iterable[str], sample_bytes: int) -> tuple[list[str], int]:
    # The lines of all texts, or evenly spaced ones if they exceed ``sample_bytes``, and the bytes of all lines. Of more
    # text than fits into memory every second line that is held is dropped, and of what follows only every second one is
    # held, as often as need be.
    held: list[str] = []
    total = held_bytes = 0
    stride, most = 1, max(_MIN_HELD_BYTES, 2 * sample_bytes)
    lines = (line for text in texts for line in well_formed(text).split("\n") if 0 < len(line) <= _MAX_LINE_BYTES // 4)
    for number, line in enumerate(lines):
        size = len(line.encode())
        total += size
        if number % stride == 0:
            held.append(line)
            held_bytes += size
        if held_bytes > most:
            held, stride = held[::2], 2 * stride
            held_bytes = _size_of(held)
    if not held:
        raise DataError("there is no text to train a tokenizer on")
    count = len(held) if held_bytes <= sample_bytes else max(1, len(held) * sample_bytes // held_bytes)
    return [held[k * len(held) // count] for k in range(count)], total


def _report(tokenizer: Tokenizer, lines: list[str], num_text_bytes: int) -> TrainReport:
    probe = "\n".join(lines[:: max(1, len(lines) // 5000)])
    bytes_per_token = len(probe.encode()) / len(tokenizer.encode(probe))
    return TrainReport(tokenizer.vocab_size, _size_of(lines), num_text_bytes, bytes_per_token)


def _size_of(lines: list[str]) -> int:
    return sum(len(line.encode()) for line in lines)


def _misfit(error: Exception, vocab_size: int, size: int, num_text_bytes: int) -> DataError:
    text = f"{size:,} bytes of text"
    if size < num_text_bytes:
        text += f" (of {num_text_bytes:,}; --sample-bytes takes more)"
    if match := re.search(r"too high \(\d+\).*<= (\d+)", str(error)):
        return DataError(
            f"--vocab-size {vocab_size} is too large for {text}: that has at most {match[1]} pieces; give --vocab-size"
            f" {match[1]} or less, or more text"
        )
    if match := re.search(r"smaller than required_chars\. \d+ vs (\d+)", str(error)):
        return DataError(
            f"--vocab-size {vocab_size} is too small for {text}: its characters, the 256 bytes and the special tokens"
            f" are {match[1]} pieces already; give --vocab-size {match[1]} or more, better some thousands more"
        )
    return DataError(f"cannot train {vocab_size} pieces on {text}: {error}")


def _write(path: Path, contents: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_replace(file_place(path), contents, keep_mode=True)  # it is read again
    except OSError as error:
        raise DiskError(f"{path}: cannot be written: {error.strerror}") from error
