"""A run's tokenizer over its life: kept when it begins, the same on every resume, or a message (``data/tokenizers/kept.py``)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_sp.config.schema import DataConfig, default_type
from megatron_sp.data.tokenizers import Tokenizer, kept
from megatron_sp.utils.errors import DataError


def find_tokenizer(
    data: DataConfig, stored: dict[str, Any], source: Path, *, goes_on: bool, is_adopted: bool, tell: Callable[[str], None]
) -> None:
    """Check the run's own copy, and use it where the tokenizer is the checkpoint's: its first files may be gone, or elsewhere.

    Args:
        data: the flags; paths are changed in place.
        stored: state.json of the checkpoint ``source``.
        goes_on: not its weights alone are taken: the flags should name its tokenizer, and ``require_same`` will look.
        is_adopted: no flag has named a tokenizer, so it is the checkpoint's (``adopt_checkpoint_args``).
        tell: given what the user should know.
    Raises:
        DataError: the copy is damaged, or nothing of an adopted tokenizer is left.
        CheckpointError: state.json says no sense of it.
    """
    if not goes_on and not is_adopted:
        return
    record = kept.Record.from_json(stored.get("tokenizer"))
    if is_adopted:
        kept.take(data, record, source)
        return
    folder = None if record is None else kept.find(record, source)
    gone = [path for path in kept.own_files(data).values() if not path.exists()]
    if record is not None and folder is not None and gone and (data.tokenizer_type or default_type(data, None)) == record.type:
        kept.name_kept(data, record, folder)
        tell(f"{gone[0]} is not there any more: the run's own copy of its tokenizer is used, {folder}")


def require_same(tokenizer: Tokenizer, stored: dict[str, Any], source: Path, *, accept: bool, tell: Callable[[str], None]) -> None:
    """See that a tokenizer is the checkpoint's.

    Args:
        accept: it may be another, which is told.
    Raises:
        DataError: it is another.
    """
    record = kept.Record.from_json(stored.get("tokenizer"))
    if record is None or record.fingerprint in (None, tokenizer.fingerprint()):
        return
    what = f"the tokenizer is not the {record.type} that the checkpoint was trained with: its files, its kind or its size are others"
    if accept:
        tell(f"--accept-data-change: {what}")
        return
    folder, way = kept.find(record, source), ""
    if folder is not None:
        data = DataConfig()
        kept.name_kept(data, record, folder)
        named = {"--tokenizer-model": data.tokenizer_model, "--vocab-file": data.vocab_file, "--merge-file": data.merge_file}
        flags = " ".join(f"{flag} {path}" for flag, path in named.items() if path)
        way = f"take the run's own copy (--tokenizer-type {record.type} {flags}), "
    raise DataError(f"{what}, so the same ids mean other text: {way}restore it, or add --accept-data-change to go on with this one")


def keep_for_run(run_dir: Path, data: DataConfig, tokenizer: Tokenizer, tell: Callable[[str], None]) -> dict[str, Any]:
    """Keep a run's tokenizer in its folder, and say what state.json is to say of it. For one process; a full disk is a warning.

    Raises:
        DataError: a copy that is there is damaged.
    """
    try:
        return kept.keep(run_dir, data, tokenizer)._asdict()
    except OSError as error:
        tell(
            f"warning: the tokenizer cannot be kept in {run_dir} ({error.strerror}): until a restart keeps it, whatever uses this run needs"
            " the files that the flags name"
        )
        kind = data.tokenizer_type or default_type(data, tokenizer.vocab_size) or ""
        return kept.Record(kind, tokenizer.fingerprint(), None, {})._asdict()
