"""What transformers must be told of a tokenizer that was named by the flags of a training: ``tokenizer_config.json``.

Without it transformers takes the tokenizer that usually goes with the architecture: it would fold the case of a cased vocabulary, and
read a SentencePiece model as Llama's first one. Files of Hugging Face that come with theirs are left as they are.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_sp.config import WORDPIECE, DataConfig
from megatron_sp.convert.model import Model
from megatron_sp.data.tokenizers import build_tokenizer
from megatron_sp.data.tokenizers.files import CONFIG, name_files
from megatron_sp.data.tokenizers.hugging_face import FILE, GPT2BPETokenizer, HuggingFaceTokenizer
from megatron_sp.data.tokenizers.spm import SentencePieceTokenizer
from megatron_sp.data.tokenizers.spm_json import library_tokenizer
from megatron_sp.data.tokenizers.wordpiece import UNKNOWN, BertWordPieceTokenizer
from megatron_sp.utils.errors import ReportedError
from megatron_sp.utils.files import write_synced


def write(model: Model, folder: Path) -> str | None:
    """Add to a folder that holds the tokenizer's files already.

    Returns:
        What the user should know, if transformers may read the files otherwise than they are meant.
    Raises:
        OSError.
    """
    if CONFIG in model.tokenizer or "hf" in model.settings or not model.tokenizer:
        return None
    data = DataConfig()
    try:
        if not name_files(data, model.tokenizer, folder):
            return None
        if model.tokenizer_type in WORDPIECE and data.tokenizer_type in WORDPIECE:
            data.tokenizer_type = model.tokenizer_type  # type: ignore[assignment]
        words = _words(data, folder)
    except ReportedError as error:
        return f"transformers is told nothing of the tokenizer: {error}"
    if words is None:
        return (
            f"transformers may read {', '.join(model.tokenizer)} otherwise than this training did: a SentencePiece model that is not BPE on"
            f" unchanged text has no {FILE} that would be the same"
        )
    words |= {"model_max_length": model.config.max_positions, "clean_up_tokenization_spaces": False}
    write_synced(folder / CONFIG, (json.dumps(words, indent=2) + "\n").encode("utf-8"))
    return None


def _words(data: DataConfig, folder: Path) -> dict[str, Any] | None:
    """The entries; of a SentencePiece model ``tokenizer.json`` is written, too. None: it cannot be."""
    tokenizer = build_tokenizer(data)
    assert isinstance(tokenizer, (BertWordPieceTokenizer, GPT2BPETokenizer, HuggingFaceTokenizer, SentencePieceTokenizer))
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
    if (made := library_tokenizer(tokenizer)) is None:
        return None
    write_synced(folder / FILE, (made.to_str(pretty=True) + "\n").encode("utf-8"))
    return {**words, "split_special_tokens": True}  # one that is written out in a text is text
