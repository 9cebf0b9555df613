"""The files of a tokenizer: which one a folder or a file holds, and the copy that a run keeps of its own."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
import uuid
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megatron_sp.config.schema import SENTENCEPIECE, WORDPIECE, DataConfig, default_type
from megatron_sp.data.tokenizers.tokenizer import FILE, MAX_BYTES, Tokenizer, read_bounded
from megatron_sp.utils.errors import CheckpointError, DataError
from megatron_sp.utils.files import fsync_dir, write_synced

FOLDER, SUMS = "tokenizer", "SHA256SUMS"
CONFIG = "tokenizer_config.json"
TOKENIZER_MODEL, _VOCAB, _MERGES, _PIECES = "tokenizer.model", "vocab.json", "merges.txt", "vocab.txt"
_TOKENIZERS = (FILE, TOKENIZER_MODEL, _VOCAB, _MERGES, _PIECES)  # files that are tokenizers, or parts of one
_BESIDE_FILE = (CONFIG, "special_tokens_map.json", "added_tokens.json")
_BESIDE = (*_BESIDE_FILE, "generation_config.json", "chat_template.jinja")
_NAMES = {*_TOKENIZERS, *_BESIDE}
_FIELDS_OF: dict[str, dict[str, str]] = {
    "HuggingFaceTokenizer": {"tokenizer_model": FILE},
    "GPT2BPETokenizer": {"vocab_file": _VOCAB, "merge_file": _MERGES},
    **{kind: {"tokenizer_model": TOKENIZER_MODEL} for kind in SENTENCEPIECE},
    **{kind: {"vocab_file": _PIECES} for kind in WORDPIECE},
}
"""By --tokenizer-type: the field of the configuration for each of its files."""
_PATHS = ("tokenizer_model", "vocab_file", "merge_file")
_FOLDER = re.compile(rf"{FOLDER}(-[0-9a-f]{{12}})?")
_MAX_CONFIG_BYTES = 4 << 20
_PART_OF_IT = "it is a part of the tokenizer"


# ---- which tokenizer a folder or a file holds ----


def name_files(data: DataConfig, names: Collection[str], folder: Path, config: Path | None = None) -> bool:
    """Set ``data`` to the tokenizer whose files, of these names, are or will be in a folder; False if there is none.

    Raises:
        DataError: ``config``, the tokenizer_config.json, is invalid, or has settings that a vocab.txt cannot say.
    """
    if FILE in names:
        kind = "HuggingFaceTokenizer"
    elif TOKENIZER_MODEL in names:
        kind = _kind_of_model(config)
    elif {_VOCAB, _MERGES} <= set(names):
        kind = "GPT2BPETokenizer"
    elif _PIECES in names:
        kind = _kind_of_pieces(config)
    else:
        return False
    _set(data, kind, {field: folder / name for field, name in _FIELDS_OF[kind].items()})
    return True


def name_path(data: DataConfig, path: Path) -> None:
    """Set ``data`` to the tokenizer at a path: a folder, or a file known by its suffix. Raises as ``name_files``."""
    config = (path if path.is_dir() else path.parent) / CONFIG
    existing = config if config.exists() else None
    if path.is_dir():
        if not name_files(data, {name for name in _TOKENIZERS if (path / name).exists()}, path, existing):
            none = f"none of {FILE}, {TOKENIZER_MODEL}, {_VOCAB} with {_MERGES}, or {_PIECES} is there"
            raise DataError(f"{path} holds no tokenizer: {none}")
    elif path.suffix == ".txt":
        _set(data, _kind_of_pieces(existing), {"vocab_file": path})
    else:
        kind = "HuggingFaceTokenizer" if path.suffix == ".json" else _kind_of_model(existing)
        _set(data, kind, {"tokenizer_model": path})


def _set(data: DataConfig, kind: str, paths: Mapping[str, Path]) -> None:
    data.tokenizer_type = kind  # type: ignore[assignment]
    for field in _PATHS:
        setattr(data, field, str(paths[field]) if field in paths else None)


def _kind_of_model(config: Path | None) -> str:
    # whether the texts of a .model file begin with BOS is what the tokenizer_config.json beside it says
    document = _read_config(config)
    if isinstance(document, dict):
        is_llama = str(document.get("tokenizer_class")).startswith("LlamaTokenizer")
        if document.get("add_bos_token", is_llama):
            return "Llama2Tokenizer"
    return "SentencePieceTokenizer"


def _kind_of_pieces(config: Path | None) -> str:
    # by ``do_lower_case`` of the tokenizer_config.json beside a vocab.txt; True without one, as in BERT's tokenizer
    if config is None:
        return "BertWordPieceLowerCase"
    document = _read_config(config)
    lowers = document.get("do_lower_case", True) if isinstance(document, dict) else None
    if not isinstance(lowers, bool):
        raise DataError(f"{config}: do_lower_case must be true or false, found {str(lowers)[:60]!r}")
    for name, allowed in (("tokenize_chinese_chars", (None, True)), ("strip_accents", (None, lowers))):
        if document.get(name) not in allowed:
            way = f"which a vocab.txt cannot say here: save the tokenizer as {FILE}, and give that"
            raise DataError(f"{config}: {name} is {document[name]!r}, {way}")
    return "BertWordPieceLowerCase" if lowers else "BertWordPieceCase"


def _read_config(config: Path | None) -> Any:
    if config is None:
        return None
    try:
        return json.loads(read_bounded(config, _MAX_CONFIG_BYTES, "it says how text becomes words").decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{config}: is not JSON ({error})") from None


# ---- the copy in a run ----
# ``RUN/tokenizer`` holds the files under the names that Hugging Face gives them, and SHA256SUMS, so that weights can be
# used from anywhere. A damaged copy is never used, and a copy is never overwritten: another tokenizer goes into
# ``RUN/tokenizer-`` plus the first digits of its digest, and older checkpoints still refer to the older one.


class Record(NamedTuple):
    """Record of a tokenizer in state.json."""

    type: str  # --tokenizer-type
    fingerprint: str | None  # fingerprint of the tokenizer; None if unknown
    folder: str | None  # name of the folder in the run; None if the tokenizer needs no files or they could not be kept
    files: dict[str, str]  # name -> SHA-256

    @classmethod
    def from_json(cls, value: Any) -> Record | None:
        """Parse the record of a checkpoint, if it has one. Raises CheckpointError: it is invalid."""
        if value is None:
            return None
        fields: list[Any] = [value.get(name) if isinstance(value, dict) else None for name in cls._fields]
        kind, fingerprint, folder, files = fields
        valid = isinstance(kind, str) and isinstance(fingerprint, str | None) and isinstance(files, dict)
        valid = valid and (folder is None or (isinstance(folder, str) and _FOLDER.fullmatch(folder) is not None))
        if valid:
            digests_valid = all(re.fullmatch("[0-9a-f]{64}", str(digest)) for digest in files.values())
            needed = set() if folder is None else set(_FIELDS_OF.get(kind, {}).values())
            valid = digests_valid and needed <= set(files) <= _NAMES
        if not valid:
            must = "must have type, fingerprint, folder and files with their SHA-256"
            raise CheckpointError(f"state.json: tokenizer {must}")
        return cls(*fields)


def own_files(data: DataConfig) -> dict[str, Path]:
    """Return the files of a tokenizer, if it needs any, by the names under which they are kept."""
    kind = data.tokenizer_type or default_type(data, None) or ""
    paths = {name: getattr(data, field) for field, name in _FIELDS_OF.get(kind, {}).items()}
    if not all(paths.values()):
        return {}
    files = {name: Path(path) for name, path in paths.items()}
    if kind == "HuggingFaceTokenizer":  # it may be named by its folder, and its file may have another name
        path = files[FILE]
        folder = path if path.is_dir() else path.parent
        beside = _BESIDE if path.is_dir() or path.name == FILE else _BESIDE_FILE
        files[FILE] = path / FILE if path.is_dir() else path
        files |= {name: folder / name for name in beside if (folder / name).is_file()}
    return files


def keep(run_dir: Path, data: DataConfig, tokenizer: Tokenizer) -> Record:
    """Copy a tokenizer's files into the run's folder, unless they are there; for one process. Raises OSError."""
    contents = {name: read_bounded(path, MAX_BYTES, _PART_OF_IT) for name, path in own_files(data).items()}
    kind = data.tokenizer_type or default_type(data, tokenizer.vocab_size) or ""
    digests = {name: _sha256(content) for name, content in contents.items()}
    return _write(run_dir, Record(kind, tokenizer.fingerprint(), None, digests), contents)


def record_of(folder: Path, kind: str, names: set[str]) -> Record:
    """Make the record of files that are already in a folder of a run."""
    files = {name: _sha256(_read_plain(folder / name)) for name in sorted(names & _NAMES)}
    return Record(kind, None, folder.name, files)


def copy(record: Record, step_dir: Path, run_dir: Path) -> Record:
    """Copy the tokenizer kept by a checkpoint's run to another run, if it is there. Raises as ``keep``."""
    folder = find(record, step_dir)
    if folder is None:
        return record
    return _write(run_dir, record, {name: _read_plain(folder / name) for name in record.files})


def find(record: Record, step_dir: Path) -> Path | None:
    """Return the folder of a checkpoint's tokenizer; None if there is none. Raises DataError: it is damaged."""
    if record.folder is None or not record.files:
        return None
    copies = (place / record.folder for place in _places(step_dir) if os.path.lexists(place / record.folder))
    copied = next(copies, None)
    if copied is not None and (problem := _problem(copied, record.files)) is not None:
        raise DataError(
            f"the run's own copy of its tokenizer is damaged: {problem}. Restore it, or delete the folder {copied} and"
            " name the tokenizer that the run was trained with (--tokenizer-model; in training that stores it again)"
        )
    return copied


def take(data: DataConfig, record: Record | None, step_dir: Path) -> None:
    """Set ``data`` to the tokenizer of a checkpoint: the run's own copy, else the files that the training used.

    Raises:
        DataError: the copy is damaged, or these files are missing or have changed.
    """
    folder = None if record is None else find(record, step_dir)
    if record is not None and folder is not None:
        name_kept(data, record, folder)
        return
    find_moved(data, step_dir)
    for name, path in own_files(data).items():
        wanted = None if record is None else record.files.get(name)
        if not path.exists():
            place = "" if path.is_absolute() else f" (in {Path.cwd()})"
            keeps = "none of its own" if record is None else f"one in {FOLDER}/, which is gone, too"
            raise DataError(
                f"the tokenizer that the training named is not there: {path}{place}; the run keeps {keeps}: give it"
                " with --tokenizer-model"
            )
        if wanted is None:
            continue
        actual = _sha256(read_bounded(path, MAX_BYTES, _PART_OF_IT))
        if actual != wanted:
            raise DataError(
                f"{path} is not the file of the tokenizer that the run was trained with: SHA-256 {actual}, it was"
                f" {wanted}, and the run's own copy is gone. Restore it, or give the right one with --tokenizer-model"
            )


def name_kept(data: DataConfig, record: Record, folder: Path) -> None:
    """Set the tokenizer paths of a configuration to the kept files."""
    _set(data, record.type, {field: folder / name for field, name in _FIELDS_OF.get(record.type, {}).items()})


def find_moved(data: DataConfig, step_dir: Path) -> None:
    """Redirect tokenizer paths that no longer exist to files of the same name in the run."""
    run = _places(step_dir)[0]
    for field in _PATHS:
        named = getattr(data, field)
        if named and not Path(named).exists():
            places = (run / FOLDER / Path(named).name, run / Path(named).name)
            setattr(data, field, next((str(place) for place in places if place.is_file()), named))


def _places(step_dir: Path) -> list[Path]:
    # where the copy may be: in the run, or in a step folder that was moved out of it
    above = step_dir.absolute().parent
    return [above.parent if above.name == "checkpoints" else above, step_dir.absolute()]


def _write(run_dir: Path, record: Record, contents: Mapping[str, bytes]) -> Record:
    if not contents:
        return record._replace(folder=None)
    digest = _sha256("".join(f"{name} {record.files[name]}\n" for name in sorted(record.files)).encode())
    problem = None
    for folder in (run_dir / FOLDER, run_dir / f"{FOLDER}-{digest[:12]}"):
        if not os.path.lexists(folder):
            staging = folder.with_name(f".{folder.name}.part-{uuid.uuid4().hex[:12]}")
            try:  # all files are on the disk before the folder has its name
                staging.mkdir()
                for name, content in contents.items():
                    write_synced(staging / name, content)
                sums = "".join(f"{digest}  {name}\n" for name, digest in record.files.items())
                write_synced(staging / SUMS, sums.encode())
                fsync_dir(staging)
                staging.rename(folder)
                fsync_dir(run_dir)
            finally:
                shutil.rmtree(staging, ignore_errors=True)
        problem = _problem(folder, record.files)
        if problem is None:
            return record._replace(folder=folder.name)
    raise DataError(f"the run's own copy of its tokenizer is damaged: {problem}: delete {folder}")


def _problem(folder: Path, digests: Mapping[str, str]) -> str | None:
    # why a folder does not hold these files, or has more that would affect its tokenizer.json; None if it is intact
    if folder.is_symlink() or not folder.is_dir():
        return f"{folder} is not a folder"
    for name in _BESIDE_FILE:
        if FILE in digests and name not in digests and os.path.lexists(folder / name):
            return f"{folder / name} does not belong to it"
    for name, wanted in digests.items():
        try:
            actual = _sha256(_read_plain(folder / name))
        except DataError as error:
            return str(error)
        if actual != wanted:
            return f"{folder / name} has SHA-256 {actual}, it had {wanted}"
    return None


def _read_plain(path: Path) -> bytes:
    # read a regular file; anything else, such as a symbolic link, is not opened
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise DataError(f"{path} is not a plain file")
            return file.read(MAX_BYTES + 1)
    except OSError as error:
        why = " (a symbolic link)" if path.is_symlink() else f": {error.strerror}"
        raise DataError(f"{path} cannot be read{why}") from None


def _sha256(contents: bytes) -> str:
    return hashlib.sha256(contents).hexdigest()
