"""Reading of small user-written text files, such as flags or schedules, with a size limit."""

from __future__ import annotations

from pathlib import Path

from megatron_sp.utils.errors import ConfigError


def read_text(path: str | Path, name: str, max_bytes: int, kind: str) -> str:
    """Read the text of a file.

    Args:
        name: name of the file in messages, with the flag that gave it.
        max_bytes: size limit.
        kind: the expected kind, such as "a file of flags".
    Raises:
        ConfigError: it cannot be read, is too large, or not UTF-8.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read: {error.strerror}") from None
    if len(data) > max_bytes:
        raise ConfigError(f"{name}: larger than {max_bytes} bytes; this is not {kind}")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise ConfigError(f"{name}: not UTF-8 text") from None
