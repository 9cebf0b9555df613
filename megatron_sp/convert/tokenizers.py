"""A tokenizer on its way through a conversion: its files, its special ids, and what transformers must be told of it.

Checkpoints that came from Hugging Face keep their own.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_sp.config.schema import SENTENCEPIECE, WORDPIECE, DataConfig
from megatron_sp.convert.model import Model
from megatron_sp.data.tokenizers import NullTokenizer, Tokenizer, build_tokenizer
from megatron_sp.data.tokenizers.hugging_face import (
    UNKNOWN,
    BertWordPieceTokenizer,
    GPT2BPETokenizer,
    HuggingFaceTokenizer,
)
from megatron_sp.data.tokenizers.kept import CONFIG, TOKENIZER_MODEL, name_files
from megatron_sp.data.tokenizers.spm import SentencePieceTokenizer, library_tokenizer, pieces_have_their_ids
from megatron_sp.data.tokenizers.tokenizer import FILE
from megatron_sp.utils.errors import CheckpointError, ReportedError
from megatron_sp.utils.files import fsync_dir, write_synced
from megatron_sp.utils.strict_json import open_regular

# Ids of the bos, eos and pad tokens go into config.json, and into generation_config.json for models that generate.
# Without them transformers uses those of the first model of the architecture: 50256 for every GPT-2, 2 for every Llama,
# whatever the tokenizer's are, and generate() may never stop. One that the tokenizer lacks is null.
GENERATION = "generation_config.json"
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def special_ids(model: Model, folder: Path) -> tuple[dict[str, int | None], list[str]]:
    """Return the ids of special tokens by their names in config.json, and what to tell the user."""
    tokenizer, why = _tokenizer(model, folder)
    if tokenizer is None:
        note = f"eos_token_id is null, so transformers' generate() never stops by itself: {why}"
        return dict.fromkeys(_IDS), [] if model.config.is_bert else [note]
    is_bert, vocab_size = model.config.is_bert, model.config.vocab_size or 0
    bos, eos = (None, None) if is_bert else (tokenizer.bos, tokenizer.eod)
    ids = dict(zip(_IDS, (bos, eos, tokenizer.pad), strict=True))
    beyond = [name for name, token in ids.items() if token is not None and token >= vocab_size]
    has = f"and the model's vocabulary has {vocab_size} entries"
    notes = [f"{name} is null: the tokenizer's is {ids[name]}, {has}" for name in beyond]
    return {name: None if name in beyond else token for name, token in ids.items()}, notes


def write_generation_config(ids: dict[str, int | None], folder: Path, vocab_size: int) -> list[str]:
    """Write generation_config.json unless the tokenizer came with one that fits; return notes."""
    path = folder / GENERATION
    notes = []
    if path.exists():
        if (beyond := _beyond(path, vocab_size)) is None:
            return []
        notes.append(f"{GENERATION} beside the tokenizer has {beyond}, and the model's vocabulary has {vocab_size}"
                     " entries: made anew")  # fmt: skip
        path.unlink()
    write_synced(path, (json.dumps(ids, indent=2) + "\n").encode("utf-8"))
    return notes


def _tokenizer(model: Model, folder: Path) -> tuple[Tokenizer | None, str]:
    data = DataConfig(eod_id=model.eod_id)
    try:
        if name_files(data, model.tokenizer, folder):
            if model.tokenizer_type in WORDPIECE and data.tokenizer_type in WORDPIECE:
                data.tokenizer_type = model.tokenizer_type  # type: ignore[assignment]
            return build_tokenizer(data), ""
    except ReportedError as error:
        return None, str(error)
    if model.tokenizer_type == "ByteTokenizer":
        return build_tokenizer(replace(data, tokenizer_type="ByteTokenizer")), ""
    if model.tokenizer_type == "NullTokenizer" and model.config.vocab_size:
        return NullTokenizer(model.config.vocab_size, model.eod_id), ""
    return None, "no tokenizer is known; --tokenizer names one"


def _beyond(path: Path, vocab_size: int) -> str | None:
    try:
        document: Any = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError, OSError):
        return "no JSON"
    for name in _IDS:
        value = document.get(name) if isinstance(document, dict) else "no object"
        for token in value if isinstance(value, list) else [value]:
            if token is not None and not (type(token) is int and 0 <= token < vocab_size):
                return f"{name} {str(token)[:40]}"
    return None


NAMES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "vocab.txt", "generation_config.json", "chat_template.jinja",
)  # fmt: skip
MAX_BYTES = 64 << 20
_SAYS_MORE = NAMES[2:5]  # they complete a file that is given alone


def find_files(path: Path) -> dict[str, Path]:
    """Return the files of a tokenizer in a folder, or a single file, by the names that they must have."""
    if path.is_dir():
        files = {name: path / name for name in NAMES if (path / name).exists() or (path / name).is_symlink()}
    elif path.suffix in (".model", ".json", ".txt"):
        files = {{".model": "tokenizer.model", ".json": "tokenizer.json", ".txt": "vocab.txt"}[path.suffix]: path}
        files |= {name: path.with_name(name) for name in _SAYS_MORE if path.with_name(name).is_file()}
    else:
        raise CheckpointError(f"{path} is not a tokenizer: give its folder, or a tokenizer.json, a SentencePiece .model"
                              " or a vocab.txt")  # fmt: skip
    _check(files)
    return files


def find_named(paths: list[Path]) -> dict[str, Path]:
    """Return the files of a training's tokenizer: a file, a folder, or GPT-2's two files with any names."""
    if len(paths) < 2:
        return find_files(paths[0]) if paths else {}
    files = {"merges.txt" if path.suffix == ".txt" else "vocab.json": path for path in paths}
    _check(files)
    return files


def _check(found: dict[str, Path]) -> None:
    for file in found.values():
        with open(open_regular(file), "rb"):
            if file.stat().st_size > MAX_BYTES:
                raise CheckpointError(f"{file} has {file.stat().st_size:,} bytes: more than the {MAX_BYTES:,} that such"
                                      " a file can have")  # fmt: skip


def copy_files(files: dict[str, Path], folder: Path) -> None:
    """Copy the files of a tokenizer into a folder."""
    for name, path in files.items():
        with open(open_regular(path), "rb") as source, open(folder / name, "xb") as target:
            shutil.copyfileobj(source, target)
            target.flush()
            os.fsync(target.fileno())
    fsync_dir(folder)


def enter_tokenizer(data: DataConfig, files: dict[str, Path], folder: Path) -> None:
    """Enter the tokenizer whose files will be in ``folder`` in a configuration."""
    name_files(data, files, folder, files.get(CONFIG))


# A tokenizer that was given by the flags of a training needs a tokenizer_config.json. Without it transformers uses the
# architecture's usual tokenizer: it would lowercase the text for a cased vocabulary, and interpret a SentencePiece
# model like Llama's first one. For a SentencePiece model an equivalent tokenizer.json is written if one exists. If none
# does (a unigram model, NFKC), transformers is configured to compute ids with the sentencepiece library itself.
_BY_SENTENCEPIECE = "SentencePieceBackend"
"""The class of transformers that reads a .model file with the library that made it; of version 5."""
_NOT_BY_SENTENCEPIECE = ("mistral", "qwen2")
"""Models whose tokenizer transformers takes for one of the tokenizers library, whatever tokenizer_config.json says."""
_USE_PACKAGE = f"use the sentencepiece package on {TOKENIZER_MODEL}"
_NO_JSON = f"this SentencePiece model is not BPE on unchanged text, of which alone a {FILE} gives the same ids"


def write_tokenizer_config(model: Model, folder: Path, model_type: str) -> list[str]:
    """Add ``tokenizer_config.json`` to a folder that contains the tokenizer's files already."""
    if CONFIG in model.tokenizer or "hf" in model.settings or not model.tokenizer:
        return []
    data = DataConfig(eod_id=model.eod_id)
    try:
        if not name_files(data, model.tokenizer, folder):
            return []
        if any(model.tokenizer_type in kinds and data.tokenizer_type in kinds for kinds in (WORDPIECE, SENTENCEPIECE)):
            data.tokenizer_type = model.tokenizer_type  # type: ignore[assignment]
        words = _words(data, folder, model_type)
    except ReportedError as error:
        return [f"transformers is told nothing of the tokenizer: {error}"]
    if isinstance(words, str):
        return [f"transformers may read {', '.join(model.tokenizer)} otherwise than this training did: {words}"]
    words |= {"model_max_length": model.config.max_positions, "clean_up_tokenization_spaces": False}
    write_synced(folder / CONFIG, (json.dumps(words, indent=2) + "\n").encode("utf-8"))
    if words["tokenizer_class"] != _BY_SENTENCEPIECE:
        return []
    note = (f"{_NO_JSON}, so transformers is told to read {TOKENIZER_MODEL} by the sentencepiece package (in versions"
            " from 5 on)")  # fmt: skip
    if data.tokenizer_type == "Llama2Tokenizer":
        note += f"; it puts no {words['bos_token']} before a text, as this training did"
    return [note]


def _words(data: DataConfig, folder: Path, model_type: str) -> dict[str, Any] | str:
    tokenizer = build_tokenizer(data)
    known = BertWordPieceTokenizer, GPT2BPETokenizer, HuggingFaceTokenizer, SentencePieceTokenizer
    assert isinstance(tokenizer, known)
    ids = {role: getattr(tokenizer, role) for role in ("cls", "sep", "mask", "pad")}
    roles = {f"{role}_token": tokenizer.piece(token) for role, token in ids.items() if token is not None}
    end = tokenizer.piece(tokenizer.eod)
    if isinstance(tokenizer, BertWordPieceTokenizer):
        lowers = data.tokenizer_type == "BertWordPieceLowerCase"
        return {"tokenizer_class": "BertTokenizer", "do_lower_case": lowers, "unk_token": UNKNOWN, **roles}
    if isinstance(tokenizer, GPT2BPETokenizer):
        named = {f"{role}_token": end for role in ("bos", "eos", "unk")}
        return {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": False, **named, **roles}
    words = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, **roles}
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return words
    if tokenizer.bos is not None:
        words["bos_token"] = tokenizer.piece(tokenizer.bos)
    if (library := library_tokenizer(tokenizer)) is not None:
        if tokenizer.begin:
            from tokenizers import processors

            pieces = [(tokenizer.piece(token), token) for token in tokenizer.begin]  # before a text
            single = [*(piece for piece, _ in pieces), "$A"]
            template = processors.TemplateProcessing(single=single, special_tokens=pieces)
            library.post_processor = template
        write_synced(folder / FILE, (library.to_str(pretty=True) + "\n").encode("utf-8"))
        return {**words, "split_special_tokens": True}  # a special token that is spelled out in a text is plain text
    if model_type in _NOT_BY_SENTENCEPIECE:
        return f"{_NO_JSON}, and of a {model_type} it reads nothing else: {_USE_PACKAGE}"
    if not pieces_have_their_ids(tokenizer):
        return f"{_NO_JSON}, and letters it has no piece for spell a special one: {_USE_PACKAGE}"
    unknown = tokenizer.piece(tokenizer.unknown)
    return {**words, "tokenizer_class": _BY_SENTENCEPIECE, "unk_token": unknown, "split_special_tokens": True}
