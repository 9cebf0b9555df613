"""Copy of a run's tokenizer in the run's folder, so that its weights can be used from anywhere without other files.

``RUN/tokenizer`` holds the files under the names that Hugging Face gives them, and SHA256SUMS. Every checkpoint's
state.json has a record under ``tokenizer``: its type, its fingerprint, the folder's name and the SHA-256 of each file;
a damaged copy is never used. A copy is never overwritten: if a run continues with another tokenizer, that one is kept
in ``RUN/tokenizer-`` plus the first digits of its digest, and older checkpoints still refer to the older one.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megatron_sp.config.schema import DataConfig
from megatron_sp.config.schema_data import SENTENCEPIECE, WORDPIECE, default_type
from megatron_sp.data.tokenizers.tokenizer import FILE, MAX_BYTES, Tokenizer, read_bounded
from megatron_sp.utils.errors import CheckpointError, DataError
from megatron_sp.utils.files import fsync_dir, write_synced

FOLDER, SUMS = "tokenizer", "SHA256SUMS"
_MODEL, _VOCAB, _MERGES, _PIECES = "tokenizer.model", "vocab.json", "merges.txt", "vocab.txt"
_BESIDE_FILE = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_BESIDE = (*_BESIDE_FILE, "generation_config.json", "chat_template.jinja")
_NAMES = {FILE, _MODEL, _VOCAB, _MERGES, _PIECES, *_BESIDE}
_FIELDS_OF = {
    "HuggingFaceTokenizer": {"tokenizer_model": FILE}, **{kind: {"tokenizer_model": _MODEL} for kind in SENTENCEPIECE},
    "GPT2BPETokenizer": {"vocab_file": _VOCAB, "merge_file": _MERGES}, **{kind: {"vocab_file": _PIECES} for kind in WORDPIECE},
}  # fmt: skip
_FOLDER = re.compile(rf"{FOLDER}(-[0-9a-f]{{12}})?")
_PATHS = ("tokenizer_model", "vocab_file", "merge_file")


class Record(NamedTuple):
    """Record of a tokenizer in state.json."""

    type: str  # --tokenizer-type
    fingerprint: str | None  # fingerprint of the tokenizer; None if unknown
    folder: str | None  # name of the folder in the run; None if the tokenizer needs no files or they could not be kept
    files: dict[str, str]  # name -> SHA-256

    @classmethod
    def from_json(cls, value: Any) -> Record | None:
        """Parse the record of a checkpoint; None if the checkpoint is older and has none.

        Raises:
            CheckpointError: the record is invalid.
        """
        if value is None:
            return None
        fields = {name: value.get(name) for name in cls._fields} if isinstance(value, dict) else {}
        kind, fingerprint, folder, files = (fields.get(name) for name in cls._fields)
        if (
            not isinstance(kind, str) or not isinstance(fingerprint, str | None) or not isinstance(files, dict)
            or not (folder is None or (isinstance(folder, str) and _FOLDER.fullmatch(folder)))
            or any(name not in _NAMES or not re.fullmatch("[0-9a-f]{64}", str(digest)) for name, digest in files.items())
            or (folder is not None and any(name not in files for name in _FIELDS_OF.get(kind, {}).values()))
        ):  # fmt: skip
            raise CheckpointError(
                "state.json: tokenizer must have type, fingerprint, folder and files with their SHA-256"
            )
        return cls(kind, fingerprint, folder, files)


def own_files(data: DataConfig) -> dict[str, Path]:
    """Return the files of a tokenizer by the names under which they are kept; empty for one that needs no files."""
    kind = data.tokenizer_type or default_type(data, None)
    if kind in SENTENCEPIECE and data.tokenizer_model:
        return {_MODEL: Path(data.tokenizer_model)}
    if kind == "GPT2BPETokenizer" and data.vocab_file and data.merge_file:
        return {_VOCAB: Path(data.vocab_file), _MERGES: Path(data.merge_file)}
    if kind in WORDPIECE and data.vocab_file:
        return {_PIECES: Path(data.vocab_file)}
    if kind != "HuggingFaceTokenizer" or not data.tokenizer_model:
        return {}
    path = Path(data.tokenizer_model)
    folder, beside = (path, _BESIDE) if path.is_dir() else (path.parent, _BESIDE if path.name == FILE else _BESIDE_FILE)
    return {FILE: path / FILE if path.is_dir() else path} | {
        name: folder / name for name in beside if (folder / name).is_file()
    }


def keep(run_dir: Path, data: DataConfig, tokenizer: Tokenizer) -> Record:
    """Copy the files of a run's tokenizer into the run's folder, unless they are there already; to be called by one process only.

    Raises:
        DataError: a file cannot be read.
        OSError: the folder cannot be written; no partial folder remains.
    """
    contents = {
        name: read_bounded(path, MAX_BYTES, "it is a part of the tokenizer") for name, path in own_files(data).items()
    }
    kind = data.tokenizer_type or default_type(data, tokenizer.vocab_size) or ""
    return _write(
        run_dir,
        Record(kind, tokenizer.fingerprint(), None, {n: _sha256(made) for n, made in contents.items()}),
        contents,
    )


def record_of(folder: Path, kind: str, names: set[str]) -> Record:
    """Make the record of files that are already in a folder of a run. Raises DataError: one is not a regular file."""
    files = {name: _sha256(_read_plain(folder / name)) for name in sorted(names & _NAMES)}
    return Record(kind, None, folder.name, files)


def copy(record: Record, step_dir: Path, run_dir: Path) -> Record:
    """Copy the tokenizer kept by a checkpoint's run to another run, if it is there; return its record. Raises as ``keep``."""
    folder = find(record, step_dir)
    if folder is None:
        return record
    return _write(run_dir, record, {name: _read_plain(folder / name) for name in record.files})


def find(record: Record, step_dir: Path) -> Path | None:
    """Return the folder of a checkpoint's tokenizer, verified byte by byte; None if there is none.

    Raises:
        DataError: the copy is damaged.
    """
    if record.folder is None or not record.files:
        return None
    copied = next(
        (place / record.folder for place in _places(step_dir) if os.path.lexists(place / record.folder)), None
    )
    if copied is not None and (problem := _problem(copied, record.files)) is not None:
        raise DataError(
            f"the run's own copy of its tokenizer is damaged: {problem}. Restore it, or delete the folder {copied} and name the tokenizer"
            " that the run was trained with (--tokenizer-model; in training that stores it again)"
        )
    return copied


def take(data: DataConfig, record: Record | None, step_dir: Path) -> None:
    """Set a configuration to the tokenizer of a checkpoint: the run's own copy, else the files that the training used.

    Args:
        data: the configuration of the training; modified in place.
        step_dir: folder of the checkpoint: RUN/checkpoints/step-N, or a step folder that was moved out of its run.
    Raises:
        DataError: the copy is damaged; or there is none, and the files that the training used are missing or have
            changed.
    """
    folder = None if record is None else find(record, step_dir)
    if record is not None and folder is not None:
        name_kept(data, record, folder)
        return
    find_moved(data, step_dir)
    files = own_files(data)
    for name, path in files.items():
        wanted = None if record is None else record.files.get(name)
        if not path.exists():
            raise DataError(
                f"the tokenizer that the training named is not there: {path}{'' if path.is_absolute() else f' (in {Path.cwd()})'}; the run"
                f" keeps {'none of its own' if record is None else f'one in {FOLDER}/, which is gone, too'}: give it with --tokenizer-model"
            )
        if wanted is not None and wanted != (
            now := _sha256(read_bounded(path, MAX_BYTES, "it is a part of the tokenizer"))
        ):
            raise DataError(
                f"{path} is not the file of the tokenizer that the run was trained with: SHA-256 {now}, it was {wanted}, and the run's own"
                " copy is gone. Restore it, or give the right one with --tokenizer-model"
            )


def name_kept(data: DataConfig, record: Record, folder: Path) -> None:
    """Set the tokenizer paths of a configuration to the kept files."""
    data.tokenizer_type = record.type  # type: ignore[assignment]
    data.tokenizer_model = data.vocab_file = data.merge_file = None
    for field, name in _FIELDS_OF.get(record.type, {}).items():
        setattr(data, field, str(folder / name))


def find_moved(data: DataConfig, step_dir: Path) -> None:
    """Redirect tokenizer paths that no longer exist to files of the same name in the run, if there are any."""
    run = _places(step_dir)[0]
    for field in _PATHS:
        named = getattr(data, field)
        if named and not Path(named).exists():
            places = (run / FOLDER / Path(named).name, run / Path(named).name)
            setattr(data, field, next((str(place) for place in places if place.is_file()), named))


def _places(step_dir: Path) -> list[Path]:
    above = step_dir.absolute().parent
    return [above.parent if above.name == "checkpoints" else above, step_dir.absolute()]


def _write(run_dir: Path, record: Record, contents: Mapping[str, bytes]) -> Record:
    if not contents:
        return record._replace(folder=None)
    digest = _sha256("".join(f"{name} {record.files[name]}\n" for name in sorted(record.files)).encode())
    for folder in (FOLDER, f"{FOLDER}-{digest[:12]}"):
        if not os.path.lexists(run_dir / folder):
            _write_folder(run_dir / folder, record.files, contents)
        if _problem(run_dir / folder, record.files) is None:
            return record._replace(folder=folder)
    raise DataError(
        f"the run's own copy of its tokenizer is damaged: {_problem(run_dir / folder, record.files)}: delete {run_dir / folder}"
    )


def _write_folder(folder: Path, digests: Mapping[str, str], contents: Mapping[str, bytes]) -> None:
    staging = folder.with_name(f".{folder.name}.part-{uuid.uuid4().hex[:12]}")
    try:
        staging.mkdir()
        for name, made in contents.items():
            write_synced(staging / name, made)
        write_synced(staging / SUMS, "".join(f"{digest}  {name}\n" for name, digest in digests.items()).encode())
        fsync_dir(staging)
        staging.rename(folder)
        fsync_dir(folder.parent)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _problem(folder: Path, digests: Mapping[str, str]) -> str | None:
    """Return why a folder does not hold these files, or has extra ones that would affect its tokenizer.json; None if it is intact."""
    if folder.is_symlink() or not folder.is_dir():
        return f"{folder} is not a folder"
    more = [name for name in _BESIDE_FILE if FILE in digests and name not in digests and os.path.lexists(folder / name)]
    if more:
        return f"{folder / more[0]} does not belong to it"
    for name, wanted in digests.items():
        try:
            found = _sha256(_read_plain(folder / name))
        except DataError as error:
            return str(error)
        if found != wanted:
            return f"{folder / name} has SHA-256 {found}, it had {wanted}"
    return None


def _read_plain(path: Path) -> bytes:
    # read a regular file. Raises DataError: it is anything else, such as a symbolic link, or cannot be read
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise DataError(f"{path} is not a plain file")
            return file.read(MAX_BYTES + 1)
    except OSError as error:
        raise DataError(
            f"{path} cannot be read{' (a symbolic link)' if path.is_symlink() else f': {error.strerror}'}"
        ) from None


def _sha256(contents: bytes) -> str:
    return hashlib.sha256(contents).hexdigest()
