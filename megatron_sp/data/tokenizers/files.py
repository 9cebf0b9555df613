"""Detection of the tokenizer in a folder of files, in terms of the flags."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from megatron_sp.config.schema import DataConfig
from megatron_sp.config.schema_data import SENTENCEPIECE
from megatron_sp.data.tokenizers.tokenizer import FILE, read_bounded
from megatron_sp.utils.errors import DataError

NAMES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "vocab.txt")
"""Of files that are tokenizers, or parts of one."""
CONFIG = "tokenizer_config.json"
TOKENIZER_MODEL = "tokenizer.model"
_MAX_CONFIG_BYTES = 4 << 20


def name_files(data: DataConfig, names: Collection[str], folder: Path, config: Path | None = None) -> bool:
    """Set a configuration to the tokenizer whose files are, or will be, in a folder.

    Args:
        data: its tokenizer_type and paths are set; unchanged if there is no tokenizer.
        names: names of the files.
        folder: folder of the paths to set.
        config: current path of tokenizer_config.json, if there is one.
    Returns:
        True if there is a tokenizer.
    Raises:
        DataError: tokenizer_config.json is invalid, or has settings that are not supported for a vocab.txt.
    """
    kind = ("HuggingFaceTokenizer" if FILE in names else _kind_of_model(config) if TOKENIZER_MODEL in names
            else "GPT2BPETokenizer" if {"vocab.json", "merges.txt"} <= set(names) else None)  # fmt: skip
    if kind is None and "vocab.txt" in names:
        kind = "BertWordPieceLowerCase" if _lowers_case(config) else "BertWordPieceCase"
    if kind is None:
        return False
    data.tokenizer_type = kind  # type: ignore[assignment]
    data.tokenizer_model = data.vocab_file = data.merge_file = None
    if kind == "HuggingFaceTokenizer":
        data.tokenizer_model = str(folder / FILE)
    elif kind in SENTENCEPIECE:
        data.tokenizer_model = str(folder / TOKENIZER_MODEL)
    elif kind == "GPT2BPETokenizer":
        data.vocab_file, data.merge_file = str(folder / "vocab.json"), str(folder / "merges.txt")
    else:
        data.vocab_file = str(folder / "vocab.txt")
    return True


def name_path(data: DataConfig, path: Path) -> None:
    """Set a configuration to the tokenizer at a path: a folder, or one file recognised by its suffix.

    Raises:
        DataError: the folder holds no tokenizer, or as for ``name_files``.
    """
    if path.is_dir():
        names = {name for name in NAMES if (path / name).exists()}
        if not name_files(data, names, path, path / CONFIG if (path / CONFIG).exists() else None):
            raise DataError(
                f"{path} holds no tokenizer: none of {', '.join(NAMES[:2])}, vocab.json with merges.txt, or vocab.txt is there"
            )
        return
    data.tokenizer_model = data.vocab_file = data.merge_file = None
    config = path.parent / CONFIG
    if path.suffix == ".txt":
        data.tokenizer_type = (
            "BertWordPieceLowerCase" if _lowers_case(config if config.exists() else None) else "BertWordPieceCase"
        )
        data.vocab_file = str(path)
        return
    data.tokenizer_model = str(path)
    if path.suffix == ".json":
        data.tokenizer_type = "HuggingFaceTokenizer"
    else:
        data.tokenizer_type = _kind_of_model(config if config.exists() else None)  # type: ignore[assignment]


def _kind_of_model(config: Path | None) -> str:
    """Return the type of tokenizer for a .model file: whether texts begin with BOS is what the tokenizer_config.json beside it says."""
    document = _read_config(config)
    if isinstance(document, dict) and document.get(
        "add_bos_token", str(document.get("tokenizer_class")).startswith("LlamaTokenizer")
    ):
        return "Llama2Tokenizer"
    return "SentencePieceTokenizer"


def _read_config(config: Path | None) -> Any:
    # the contents of a tokenizer_config.json; None without one
    if config is None:
        return None
    try:
        return json.loads(read_bounded(config, _MAX_CONFIG_BYTES, "it says how text becomes words").decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{config}: is not JSON ({error})") from None


def _lowers_case(config: Path | None) -> bool:
    # ``do_lower_case`` of the tokenizer_config.json beside a vocab.txt; True without one, as in BERT's tokenizer
    if config is None:
        return True
    document = _read_config(config)
    lowers = document.get("do_lower_case", True) if isinstance(document, dict) else None
    if not isinstance(lowers, bool):
        raise DataError(f"{config}: do_lower_case must be true or false, found {str(lowers)[:60]!r}")
    for name, allowed in (("tokenize_chinese_chars", (None, True)), ("strip_accents", (None, lowers))):
        if document.get(name) not in allowed:
            raise DataError(
                f"{config}: {name} is {document[name]!r}, which a vocab.txt cannot say here: save the tokenizer as {FILE}, and give that"
            )
    return lowers
