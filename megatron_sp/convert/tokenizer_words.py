"""Writer of ``tokenizer_config.json``, which transformers needs for a tokenizer that was given by the flags of a training.

Without it transformers uses the architecture's usual tokenizer: it would lowercase the text for a cased vocabulary, and
interpret a SentencePiece model like Llama's first one. Files of Hugging Face that come with their own are left
unchanged.

For a SentencePiece model an equivalent ``tokenizer.json`` is written if one exists. If none does (a unigram model,
NFKC), transformers is configured to compute ids with the sentencepiece library itself, from the .model file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_sp.config.schema import DataConfig
from megatron_sp.config.schema_data import SENTENCEPIECE, WORDPIECE
from megatron_sp.convert.model import Model
from megatron_sp.data.tokenizers import build_tokenizer
from megatron_sp.data.tokenizers.files import CONFIG, TOKENIZER_MODEL, name_files
from megatron_sp.data.tokenizers.hugging_face import FILE, GPT2BPETokenizer, HuggingFaceTokenizer
from megatron_sp.data.tokenizers.spm import SentencePieceTokenizer
from megatron_sp.data.tokenizers.spm_json import library_tokenizer, pieces_have_their_ids
from megatron_sp.data.tokenizers.wordpiece import UNKNOWN, BertWordPieceTokenizer
from megatron_sp.utils.errors import ReportedError
from megatron_sp.utils.files import write_synced

_BY_SENTENCEPIECE = "SentencePieceBackend"
"""The class of transformers that reads a .model file with the library that made it; of version 5."""
_NOT_BY_SENTENCEPIECE = ("mistral", "qwen2")
"""Models whose tokenizer transformers takes for one of the tokenizers library, whatever tokenizer_config.json says."""
_NO_JSON = f"this SentencePiece model is not BPE on unchanged text, of which alone a {FILE} gives the same ids"


def write(model: Model, folder: Path, model_type: str) -> list[str]:
    """Add ``tokenizer_config.json`` to a folder that contains the tokenizer's files already.

    Args:
        model_type: ``model_type`` of config.json.
    Returns:
        Notes for the user: if transformers may interpret the files differently, or needs the sentencepiece package for
        them.
    Raises:
        OSError.
    """
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
    bos = f"; it puts no {words['bos_token']} before a text, as this training did" if data.tokenizer_type == "Llama2Tokenizer" else ""
    return [f"{_NO_JSON}, so transformers is told to read {TOKENIZER_MODEL} by the sentencepiece package (in versions from 5 on){bos}"]


def _words(data: DataConfig, folder: Path, model_type: str) -> dict[str, Any] | str:
    """Return the entries, or why there are none; for a SentencePiece model also write an equivalent ``tokenizer.json``, if one exists."""
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
    if tokenizer.bos is not None:
        words["bos_token"] = tokenizer.piece(tokenizer.bos)
    if (made := library_tokenizer(tokenizer)) is not None:
        if tokenizer.begin:
            made.post_processor = _front(tokenizer)
        write_synced(folder / FILE, (made.to_str(pretty=True) + "\n").encode("utf-8"))
        return {**words, "split_special_tokens": True}  # a special token that is spelled out in a text is plain text
    if model_type in _NOT_BY_SENTENCEPIECE:
        return f"{_NO_JSON}, and of a {model_type} it reads nothing else: use the sentencepiece package on {TOKENIZER_MODEL}"
    if not pieces_have_their_ids(tokenizer):
        return f"{_NO_JSON}, and letters it has no piece for spell a special one: use the sentencepiece package on {TOKENIZER_MODEL}"
    unknown = tokenizer.piece(tokenizer.unknown)
    return {**words, "tokenizer_class": _BY_SENTENCEPIECE, "unk_token": unknown, "split_special_tokens": True}


def _front(tokenizer: SentencePieceTokenizer) -> Any:
    """Return a template of the tokenizers library that puts BOS before a text."""
    from tokenizers import processors

    pieces = [(tokenizer.piece(token), token) for token in tokenizer.begin]
    return processors.TemplateProcessing(single=[*(piece for piece, _ in pieces), "$A"], special_tokens=pieces)
