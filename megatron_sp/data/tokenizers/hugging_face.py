"""Tokenizers in Hugging Face's file formats: ``tokenizer.json``, and GPT-2's ``vocab.json`` with ``merges.txt``.

The tokenizers library does the work; it is imported when the first tokenizer is created. Only local files are read,
nothing is downloaded, and no Python code that comes with a model is run. Ids are those of the model's own tokenizer
without special tokens added around the text; a special token spelled out in the text is encoded as that token. What the
template of a ``tokenizer.json`` puts before a text is ``begin``; what it puts behind one is left out. The end-of-
document token and BERT's special tokens are those named in ``tokenizer_config.json`` or ``special_tokens_map.json``
beside the file, else recognised by name.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from megatron_sp.data.tokenizers.tokenizer import FILE, MAX_BYTES, LibraryTokenizer, import_tokenizers, read_bounded
from megatron_sp.utils.errors import DataError

_BESIDE = ("tokenizer_config.json", "special_tokens_map.json")
_MAX_BESIDE_BYTES = 4 << 20
_KNOWN = {
    "eos": ("<eod>", "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>", "<|im_end|>"),
    "cls": ("[CLS]", "<cls>"), "sep": ("[SEP]", "<sep>"), "mask": ("[MASK]", "<mask>", "<|mask|>"), "pad": ("[PAD]", "<pad>"),
}  # fmt: skip
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACES_OF_BYTES = (
    "\u0120\u010a\u0109\u010d"  # how byte-level vocabularies write a space, a newline, a tab and a carriage return
)
_METASPACE = "\u2581"
_ANY_TEXT = "a"


class _Wrapped(LibraryTokenizer):
    """Common base of both kinds: a tokenizer of the library, plus the special ids that the library does not know.

    Args:
        tokenizer: tokenizer object of the library.
        named: role ("eos", "cls", ...) -> token, from the files beside it.
        where: the file, for messages.
        contents: everything that determines what ``encode`` returns.
    Raises:
        DataError: no token ends a document.
    """

    def __init__(self, tokenizer: Any, named: Mapping[str, str], where: str, contents: bytes) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        ids: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
        if not ids:
            raise DataError(f"{where}: its vocabulary is empty")
        self.cls, self.sep, self.mask, self.pad = (_find(role, named, ids) for role in ("cls", "sep", "mask", "pad"))
        self.eod = _find_eod(named, ids, self.sep, where)
        self.bos = ids.get(named.get("bos", ""))
        self.begin = self._template_front(tokenizer)
        if self.bos is None and len(self.begin) == 1:
            self.bos = self.begin[0]
        vocab_size, fingerprint = (
            max(ids.values()) + 1,
            hashlib.sha256(f"{type(self).__name__} {self.eod} ".encode() + contents),
        )
        super().__init__(tokenizer, vocab_size, fingerprint.hexdigest())
        self._begins, self._before_word = _word_tables(tokenizer, ids, vocab_size)

    def starts_word(self, ids: np.ndarray) -> np.ndarray:
        """Return whether each piece starts a word: it begins with white space (or lacks "##") or follows white space or a special token."""
        starts: np.ndarray = self._begins[ids]
        if self._before_word is not None:
            starts[:1] = True
            starts[1:] |= self._before_word[ids[:-1]]
        return starts

    def _template_front(self, tokenizer: Any) -> tuple[int, ...]:
        # the ids that the file's own template puts before a text, as transformers does; not BERT's [CLS]
        encoding = tokenizer.encode(_ANY_TEXT, add_special_tokens=True)
        mask: list[int] = encoding.special_tokens_mask
        front = tuple(encoding.ids[: mask.index(0) if 0 in mask else 0])
        return () if front == (self.cls,) and self.cls != self.bos else front


class HuggingFaceTokenizer(_Wrapped):
    """Tokenizer from a ``tokenizer.json``.

    Args:
        path: the file, or its folder.
    Raises:
        DataError: the file is missing, too large, not a tokenizer, or has no token that can end a document.
        ConfigError: the tokenizers package is not installed.
    """

    def __init__(self, path: str | Path) -> None:
        import_tokenizers()
        from tokenizers import Tokenizer

        file = Path(path) / FILE if Path(path).is_dir() else Path(path)
        contents = read_bounded(
            file, MAX_BYTES, "--tokenizer-model needs a tokenizer.json, or the folder that holds one"
        )
        try:
            tokenizer = Tokenizer.from_str(contents.decode("utf-8"))
        except Exception as error:  # the library raises plain Exception; a file that is not UTF-8 is not JSON either
            raise DataError(
                f"{file}: is not a tokenizer.json ({_short(error)}): give the file that the tokenizers library writes"
            ) from None
        super().__init__(tokenizer, _named_beside(file.parent), str(file), contents)


class GPT2BPETokenizer(_Wrapped):
    """GPT-2's byte-level BPE from ``vocab.json`` and ``merges.txt``; a document ends with <|endoftext|>.

    Raises:
        DataError: a file is missing, too large, or not of this kind; names the line.
        ConfigError: the tokenizers package is not installed.
    """

    def __init__(self, vocab_file: str | Path, merge_file: str | Path) -> None:
        import_tokenizers()
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

        data = read_bounded(Path(vocab_file), MAX_BYTES, "--vocab-file needs GPT-2's vocab.json")
        rules = read_bounded(Path(merge_file), MAX_BYTES, "--merge-file needs GPT-2's merges.txt")
        vocab = _vocabulary(data, vocab_file)
        try:
            model = models.BPE(vocab, _merges(rules, merge_file))
        except Exception as error:  # the library raises plain Exception
            raise DataError(f"{merge_file} does not belong to {vocab_file}: {_short(error)}") from None
        tokenizer = Tokenizer(model)
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        special = [piece for known in _KNOWN.values() for piece in known if piece in vocab]
        tokenizer.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in special])
        super().__init__(tokenizer, {}, str(vocab_file), data + b"\0" + rules)
        self.bos = self.eod


def _vocabulary(data: bytes, path: str | Path) -> dict[str, int]:
    try:
        vocab = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: is not JSON ({_short(error)}): --vocab-file needs GPT-2's vocab.json") from None
    if not isinstance(vocab, dict) or not all(type(i) is int and 0 <= i < 1 << 31 for i in vocab.values()):
        raise DataError(
            f"{path}: must be one JSON object of pieces and their ids: --vocab-file needs GPT-2's vocab.json"
        )
    if len(set(vocab.values())) != len(vocab):
        raise DataError(f"{path}: two pieces have the same id: --vocab-file needs GPT-2's vocab.json")
    return vocab


def _merges(data: bytes, path: str | Path) -> list[tuple[str, str]]:
    try:
        lines = data.decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is not UTF-8 ({error}): --merge-file needs GPT-2's merges.txt") from None
    merges = []
    for number, line in enumerate(lines, start=1):
        line = line.removesuffix("\r")
        if not line or (number == 1 and line.startswith("#version")):
            continue
        parts = line.split(" ")
        if len(parts) != 2 or not all(parts):
            raise DataError(f"{path}:{number}: expected two pieces with a space between them, found {line[:60]!r}")
        merges.append((parts[0], parts[1]))
    return merges


def _named_beside(folder: Path) -> dict[str, str]:
    # role -> token from the files beside a tokenizer.json; missing files are ignored
    named: dict[str, str] = {}
    for name in _BESIDE:
        if not (folder / name).exists():
            continue
        data = read_bounded(folder / name, _MAX_BESIDE_BYTES, "it says which tokens are special")
        try:
            document = json.loads(data.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise DataError(f"{folder / name}: is not JSON ({_short(error)})") from None
        for role in (*_KNOWN, "bos"):
            value = document.get(f"{role}_token") if isinstance(document, dict) else None
            value = value.get("content") if isinstance(value, dict) else value
            if isinstance(value, str):
                named.setdefault(role, value)
    return named


def _find(role: str, named: Mapping[str, str], ids: Mapping[str, int]) -> int | None:
    names = ([named[role]] if role in named else []) + list(_KNOWN[role])
    return next((ids[name] for name in names if name in ids), None)


def _find_eod(named: Mapping[str, str], ids: Mapping[str, int], sep: int | None, where: str) -> int:
    # the end-of-document id: that of the "eos" token, else of [SEP], as in BERT's vocabularies
    if "eos" in named and named["eos"] not in ids:
        raise DataError(
            f"{where}: has no token {named['eos'][:100]!r}, which the file beside it names as eos_token: the files do not belong together"
        )
    eod = _find("eos", named, ids)
    eod = sep if eod is None else eod
    if eod is None:
        raise DataError(
            f"{where}: no token can end a document: it has none of {', '.join(_KNOWN['eos'])}; name one of its own as eos_token in a"
            " tokenizer_config.json beside it"
        )
    return eod


def _word_tables(tokenizer: Any, ids: Mapping[str, int], size: int) -> tuple[np.ndarray, np.ndarray | None]:
    """bool [vocab_size] each: pieces that begin a word, and pieces after which one begins (None: the first table suffices)."""
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
        text = (
            piece.translate(_PLAIN)
            if in_bytes
            else _BYTE.sub(lambda match: chr(int(match[1], 16)), piece.replace(_METASPACE, " "))
        )
        begins[i], ends[i] = text[:1].isspace() or i in special, text[-1:].isspace() or i in special
    return begins, ends


_PLAIN = str.maketrans(_SPACES_OF_BYTES, " \n\t\r")


def _short(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
