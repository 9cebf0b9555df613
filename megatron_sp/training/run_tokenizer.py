"""Tokenizer of a run: copied into the run folder at its start, checked on a resume (``data/tokenizers/kept.py``)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_sp.config.schema import DataConfig, default_type
from megatron_sp.data.tokenizers import Tokenizer, kept
from megatron_sp.utils.errors import DataError


def find_tokenizer(
    data: DataConfig, stored: dict[str, Any], source: Path, *, goes_on: bool, is_adopted: bool,
    tell: Callable[[str], None],
) -> None:  # fmt: skip
    """Point the configuration to the run's own copy of the tokenizer, if it is adopted or its files are missing."""
    # when a run goes on, the flags should name its tokenizer, which ``require_same`` checks
    if not goes_on and not is_adopted:
        return
    record = kept.Record.from_json(stored.get("tokenizer"))
    if is_adopted:
        kept.take(data, record, source)
        return
    folder = None if record is None else kept.find(record, source)
    gone = [path for path in kept.own_files(data).values() if not path.exists()]
    if (
        record is not None
        and folder is not None
        and gone
        and (data.tokenizer_type or default_type(data, None)) == record.type
    ):
        kept.name_kept(data, record, folder)
        tell(f"{gone[0]} no longer exists: the run's own copy of its tokenizer is used, {folder}")


def require_same(
    tokenizer: Tokenizer, stored: dict[str, Any], source: Path, *, accept: bool, tell: Callable[[str], None]
) -> None:
    """Raise DataError, or report it, if a tokenizer is not the checkpoint's."""
    record = kept.Record.from_json(stored.get("tokenizer"))
    if record is None or record.fingerprint in (None, tokenizer.fingerprint()):
        return
    what = (
        f"the tokenizer is not the {record.type} that the checkpoint was trained with: its files, its type, its size or"
        " the id that ends documents differ"
    )
    if accept:
        tell(f"--accept-data-change: {what}")
        return
    folder, way = kept.find(record, source), ""
    if folder is not None:
        data = DataConfig()
        kept.name_kept(data, record, folder)
        named = {
            "--tokenizer-model": data.tokenizer_model,
            "--vocab-file": data.vocab_file,
            "--merge-file": data.merge_file,
        }
        flags = " ".join(f"{flag} {path}" for flag, path in named.items() if path)
        way = f"take the run's own copy (--tokenizer-type {record.type} {flags}), "
    raise DataError(
        f"{what}, so the same ids mean other text: {way}restore it, or add --accept-data-change to go on with this one"
    )


def keep_for_run(run_dir: Path, data: DataConfig, tokenizer: Tokenizer, tell: Callable[[str], None]) -> dict[str, Any]:
    """Copy a run's tokenizer into its folder, on one process; return its record."""
    # a full disk is a warning
    try:
        return kept.keep(run_dir, data, tokenizer)._asdict()
    except OSError as error:
        tell(
            f"warning: the tokenizer cannot be kept in {run_dir} ({error.strerror}): until a restart keeps it, whatever"
            " uses this run needs the files that the flags name"
        )
        kind = data.tokenizer_type or default_type(data, tokenizer.vocab_size) or ""
        return kept.Record(kind, tokenizer.fingerprint(), None, {})._asdict()
