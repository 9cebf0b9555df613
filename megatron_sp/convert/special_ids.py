"""Ids of the bos, eos and pad tokens for transformers: in config.json, and in generation_config.json for models that generate.

Without them transformers uses those of the first model of the architecture: 50256 for every GPT-2, 2 for every Llama,
whatever the tokenizer's are, and ``generate()`` may never stop. The tokenizer's ids are written; one that it lacks is
null. Checkpoints that came from Hugging Face keep their own.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_sp.config.schema import DataConfig
from megatron_sp.config.schema_data import WORDPIECE
from megatron_sp.convert.model import Model
from megatron_sp.data.tokenizers import NullTokenizer, Tokenizer, build_tokenizer
from megatron_sp.data.tokenizers.files import name_files
from megatron_sp.utils.errors import ReportedError
from megatron_sp.utils.files import write_synced

GENERATION = "generation_config.json"
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def of_model(model: Model, folder: Path) -> tuple[dict[str, int | None], list[str]]:
    """Return the entries, and notes for the user.

    Args:
        folder: contains the files of the model's tokenizer already.
    """
    tokenizer, why = _tokenizer(model, folder)
    if tokenizer is None:
        notes = [] if model.config.is_bert else [f"eos_token_id is null, so transformers' generate() never stops by itself: {why}"]
        return dict.fromkeys(_IDS), notes
    is_bert, vocab_size = model.config.is_bert, model.config.vocab_size or 0
    ids = dict(zip(_IDS, (None, None, tokenizer.pad) if is_bert else (tokenizer.bos, tokenizer.eod, tokenizer.pad), strict=True))
    beyond = [name for name, token in ids.items() if token is not None and token >= vocab_size]
    notes = [f"{name} is null: the tokenizer's is {ids[name]}, and the model's vocabulary has {vocab_size} entries" for name in beyond]
    return {name: None if name in beyond else token for name, token in ids.items()}, notes


def write_generation_config(ids: dict[str, int | None], folder: Path, vocab_size: int) -> list[str]:
    """Write generation_config.json unless the tokenizer came with one that fits the vocabulary; return user notes. Raises OSError."""
    path = folder / GENERATION
    notes = []
    if path.exists():
        if (beyond := _beyond(path, vocab_size)) is None:
            return []
        notes.append(f"{GENERATION} beside the tokenizer has {beyond}, and the model's vocabulary has {vocab_size} entries: made anew")
        path.unlink()
    write_synced(path, (json.dumps(ids, indent=2) + "\n").encode("utf-8"))
    return notes


def _tokenizer(model: Model, folder: Path) -> tuple[Tokenizer | None, str]:
    """Return the model's tokenizer, or None and the reason."""
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
    """Describe an entry of the file that is not an id of the vocabulary; None if there is none."""
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
