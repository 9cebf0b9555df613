"""Hugging Face's tokenizers: ``tokenizer.json``, GPT-2's ``vocab.json`` with ``merges.txt``, BERT's ``vocab.txt``.

Ids are those of the model's own tokenizer without special tokens added around the text; a special token spelled out in
the text is encoded as that token. No Python code that comes with a model is run.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_sp.data.tokenizers.tokenizer import (
    FILE,
    MAX_BYTES,
    checked_ids,
    first_line,
    import_tokenizers,
    read_bounded,
    well_formed,
)  # fmt: skip
from megatron_sp.utils.errors import DataError

_BESIDE = ("tokenizer_config.json", "special_tokens_map.json")
_MAX_BESIDE_BYTES = 4 << 20
_KNOWN = {
    "eos": ("<eod>", "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>", "<|im_end|>"),
    "cls": ("[CLS]", "<cls>"), "sep": ("[SEP]", "<sep>"), "mask": ("[MASK]", "<mask>", "<|mask|>"),
    "pad": ("[PAD]", "<pad>"),
}  # fmt: skip
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# how byte-level vocabularies write a space, a newline, a tab and a carriage return
_PLAIN = str.maketrans("\u0120\u010a\u0109\u010d", " \n\t\r")
_METASPACE = "\u2581"
_ANY_TEXT = "a"

CONTINUES = "##"
UNKNOWN = "[UNK]"
SPECIAL = ("[PAD]", UNKNOWN, "[CLS]", "[SEP]", "[MASK]")
_MAX_VOCAB_BYTES = 16 << 20  # a million pieces; each takes some hundred bytes here
_MAX_WORD_CHARACTERS = 100  # a longer word is [UNK], as in BERT's own tokenizer


class LibraryTokenizer:
    """Tokenizer object of the library; ``fingerprint`` is a hash of everything that determines what it encodes."""

    bos: int | None = None
    begin: tuple[int, ...] = ()

    def __init__(self, tokenizer: Any, vocab_size: int, fingerprint: str) -> None:
        self._tokenizer, self.vocab_size, self._fingerprint = tokenizer, vocab_size, fingerprint

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(well_formed(text), add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids, with special tokens by name; ids without an entry in the vocabulary give no text."""
        text: str = self._tokenizer.decode(checked_ids(ids, self.vocab_size), skip_special_tokens=False)
        return text

    def piece(self, token: int) -> str:
        return str(self._tokenizer.id_to_token(token))

    def fingerprint(self) -> str:
        return self._fingerprint


class _Wrapped(LibraryTokenizer):
    # A tokenizer of the library, with the special ids that the library does not know: those named (role -> token) in
    # the files beside it, else recognised by name. ``contents``: everything that determines what ``encode`` returns.

    def __init__(self, tokenizer: Any, named: Mapping[str, str], where: str, contents: bytes) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        ids: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
        if not ids:
            raise DataError(f"{where}: its vocabulary is empty")
        special: dict[str, int | None] = {}
        for role, known in _KNOWN.items():
            names = ([named[role]] if role in named else []) + list(known)
            special[role] = next((ids[name] for name in names if name in ids), None)
        self.cls, self.sep, self.mask, self.pad = (special[role] for role in ("cls", "sep", "mask", "pad"))
        if "eos" in named and named["eos"] not in ids:
            names_it = "which the file beside it names as eos_token: the files do not belong together"
            raise DataError(f"{where}: has no token {named['eos'][:100]!r}, {names_it}")
        eod = self.sep if special["eos"] is None else special["eos"]  # [SEP] in BERT's vocabularies
        if eod is None:
            none = f"no token can end a document: it has none of {', '.join(_KNOWN['eos'])}"
            way = "name one of its own as eos_token in a tokenizer_config.json beside it"
            raise DataError(f"{where}: {none}; {way}")
        self.eod: int = eod
        self.bos = ids.get(named.get("bos", ""))
        # what the file's own template puts before a text, as transformers does; not BERT's [CLS]
        encoding = tokenizer.encode(_ANY_TEXT, add_special_tokens=True)
        mask: list[int] = encoding.special_tokens_mask
        front = tuple(encoding.ids[: mask.index(0) if 0 in mask else 0])
        self.begin = () if front == (self.cls,) and self.cls != self.bos else front
        if self.bos is None and len(self.begin) == 1:
            self.bos = self.begin[0]
        fingerprint = hashlib.sha256(f"{type(self).__name__} {self.eod} ".encode() + contents).hexdigest()
        super().__init__(tokenizer, max(ids.values()) + 1, fingerprint)
        self._begins, self._before_word = _word_tables(tokenizer, ids, self.vocab_size)

    def starts_word(self, ids: np.ndarray) -> np.ndarray:
        """Return whether each piece begins with white space (or lacks "##") or follows it or a special token."""
        starts: np.ndarray = self._begins[ids]
        if self._before_word is not None:
            starts[:1] = True
            starts[1:] |= self._before_word[ids[:-1]]
        return starts


class HuggingFaceTokenizer(_Wrapped):
    """Tokenizer from a ``tokenizer.json``, or the folder that holds one.

    Raises:
        DataError: the file is not a tokenizer, or has no token that can end a document.
    """

    def __init__(self, path: str | Path) -> None:
        import_tokenizers()
        from tokenizers import Tokenizer

        file = Path(path) / FILE if Path(path).is_dir() else Path(path)
        rule = "--tokenizer-model needs a tokenizer.json, or the folder that holds one"
        contents = read_bounded(file, MAX_BYTES, rule)
        try:
            tokenizer = Tokenizer.from_str(contents.decode("utf-8"))
        except Exception as error:  # the library raises plain Exception; a file that is not UTF-8 is not JSON either
            way = "give the file that the tokenizers library writes"
            raise DataError(f"{file}: is not a tokenizer.json ({first_line(error)}): {way}") from None
        named: dict[str, str] = {}
        for beside in (file.parent / name for name in _BESIDE):
            if not beside.exists():
                continue
            data = read_bounded(beside, _MAX_BESIDE_BYTES, "it says which tokens are special")
            try:
                document = json.loads(data.decode("utf-8"))
            except (ValueError, RecursionError) as error:
                raise DataError(f"{beside}: is not JSON ({first_line(error)})") from None
            for role in (*_KNOWN, "bos"):
                value = document.get(f"{role}_token") if isinstance(document, dict) else None
                value = value.get("content") if isinstance(value, dict) else value
                if isinstance(value, str):
                    named.setdefault(role, value)
        super().__init__(tokenizer, named, str(file), contents)


class GPT2BPETokenizer(_Wrapped):
    """GPT-2's byte-level BPE from ``vocab.json`` and ``merges.txt``; a document ends with <|endoftext|>."""

    def __init__(self, vocab_file: str | Path, merge_file: str | Path) -> None:
        import_tokenizers()
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

        needs_vocab = "--vocab-file needs GPT-2's vocab.json"
        needs_merges = "--merge-file needs GPT-2's merges.txt"
        data = read_bounded(Path(vocab_file), MAX_BYTES, needs_vocab)
        rules = read_bounded(Path(merge_file), MAX_BYTES, needs_merges)
        try:
            vocab = json.loads(data.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise DataError(f"{vocab_file}: is not JSON ({first_line(error)}): {needs_vocab}") from None
        if not isinstance(vocab, dict) or not all(type(i) is int and 0 <= i < 1 << 31 for i in vocab.values()):
            raise DataError(f"{vocab_file}: must be one JSON object of pieces and their ids: {needs_vocab}")
        if len(set(vocab.values())) != len(vocab):
            raise DataError(f"{vocab_file}: two pieces have the same id: {needs_vocab}")
        try:
            lines = rules.decode("utf-8").split("\n")
        except UnicodeDecodeError as error:
            raise DataError(f"{merge_file}: is not UTF-8 ({error}): {needs_merges}") from None
        merges = []
        for number, line in enumerate(lines, start=1):
            line = line.removesuffix("\r")
            if not line or (number == 1 and line.startswith("#version")):
                continue
            parts = line.split(" ")
            if len(parts) != 2 or not all(parts):
                expected = f"expected two pieces with a space between them, found {line[:60]!r}"
                raise DataError(f"{merge_file}:{number}: {expected}")
            merges.append((parts[0], parts[1]))
        try:
            tokenizer = Tokenizer(models.BPE(vocab, merges))
        except Exception as error:  # the library raises plain Exception
            raise DataError(f"{merge_file} does not belong to {vocab_file}: {first_line(error)}") from None
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        special = [piece for known in _KNOWN.values() for piece in known if piece in vocab]
        tokenizer.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in special])
        super().__init__(tokenizer, {}, str(vocab_file), data + b"\0" + rules)
        self.bos = self.eod


def _word_tables(tokenizer: Any, ids: Mapping[str, int], size: int) -> tuple[np.ndarray, np.ndarray | None]:
    # bool [vocab_size] each: pieces that begin a word, and pieces after which one begins (None: the first suffices)
    from tokenizers import models

    if isinstance(tokenizer.model, models.WordPiece):
        prefix, begins = tokenizer.model.continuing_subword_prefix, np.ones(size, bool)
        begins[[i for piece, i in ids.items() if piece.startswith(prefix)]] = False
        return begins, None
    in_bytes = "ByteLevel" in str(tokenizer.pre_tokenizer) or "ByteLevel" in str(tokenizer.decoder)
    if not in_bytes and not any(piece.startswith(_METASPACE) for piece in ids):
        return np.ones(size, bool), None  # a vocabulary of whole words
    special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    begins, ends = np.zeros(size, bool), np.zeros(size, bool)
    for piece, i in ids.items():
        if in_bytes:
            text = piece.translate(_PLAIN)
        else:
            text = _BYTE.sub(lambda match: chr(int(match[1], 16)), piece.replace(_METASPACE, " "))
        begins[i], ends[i] = text[:1].isspace() or i in special, text[-1:].isspace() or i in special
    return begins, ends


class BertWordPieceTokenizer(LibraryTokenizer):
    """BERT's WordPiece from a ``vocab.txt``, one piece per line; a document ends with [SEP], or [UNK] without one.

    Decoding does not restore the original white space nor, with ``lowercase``, case and accents.
    """

    def __init__(self, vocab_file: str | Path, lowercase: bool) -> None:
        needs = "--vocab-file needs BERT's vocab.txt"
        path = Path(vocab_file)
        contents = read_bounded(path, _MAX_VOCAB_BYTES, needs)
        try:
            lines = contents.decode("utf-8").removesuffix("\n").split("\n")
        except UnicodeDecodeError as error:
            raise DataError(f"{path}: is not UTF-8 ({error}): {needs}, one piece per line") from error
        vocab: dict[str, int] = {}
        for number, line in enumerate(lines, start=1):
            piece = line.removesuffix("\r")
            if not piece or piece in vocab:
                what = f"'{piece}' is on line {vocab[piece] + 1} already" if piece else "is empty"
                raise DataError(f"{path}:{number}: {what}: {needs}, one piece per line, each once")
            vocab[piece] = len(vocab)
        if UNKNOWN not in vocab:
            raise DataError(f"{path}: has no line {UNKNOWN}, which stands for what no piece can spell: {needs}")
        fingerprint = hashlib.sha256(f"BertWordPiece {lowercase} ".encode() + contents).hexdigest()
        super().__init__(wordpiece_model(vocab, lowercase), len(vocab), fingerprint)
        self.cls, self.sep, self.mask, self.pad = (vocab.get(token) for token in ("[CLS]", "[SEP]", "[MASK]", "[PAD]"))
        self.eod: int = vocab[UNKNOWN] if self.sep is None else self.sep
        self._starts = np.array([not piece.startswith(CONTINUES) for piece in vocab])

    def starts_word(self, ids: np.ndarray) -> np.ndarray:
        starts: np.ndarray = self._starts[ids]
        return starts


def wordpiece_model(vocab: dict[str, int], lowercase: bool) -> Any:
    """Return a tokenizer of the library with BERT's steps and this vocabulary."""
    import_tokenizers()
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    tokenizer = Tokenizer(
        models.WordPiece(
            vocab, unk_token=UNKNOWN, max_input_chars_per_word=_MAX_WORD_CHARACTERS, continuing_subword_prefix=CONTINUES
        )
    )
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=True, strip_accents=None, lowercase=lowercase
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix=CONTINUES)
    tokenizer.add_special_tokens([token for token in SPECIAL if token in vocab])
    return tokenizer
