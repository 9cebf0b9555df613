"""Checkpoint formats, each a reader and a writer."""

from __future__ import annotations

from pathlib import Path

from megatron_sp.convert.formats.deepspeed import MegatronDeepSpeed
from megatron_sp.convert.formats.hugging_face import HuggingFace
from megatron_sp.convert.formats.megatron import Megatron
from megatron_sp.convert.formats.megatron_dist import MegatronDist
from megatron_sp.convert.formats.native import Native
from megatron_sp.convert.model import Format
from megatron_sp.utils.errors import CheckpointError

_ALL: tuple[Format, ...] = (Native(), HuggingFace(), Megatron(), MegatronDist(), MegatronDeepSpeed())
FORMATS: dict[str, Format] = {format.name: format for format in _ALL}


def detect(path: Path) -> Format:
    """Return the only format whose files are in a folder."""
    matching = [format for format in FORMATS.values() if format.recognises(path)]
    if len(matching) == 1:
        return matching[0]
    names = " and ".join(format.name for format in matching)
    what = f"looks like {names}" if matching else "holds no checkpoint that is known here"
    raise CheckpointError(f"{path} {what}: give --from with one of {', '.join(FORMATS)}")
