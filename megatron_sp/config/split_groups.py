"""Groups of parts of data sets, as BigScience's Megatron-DeepSpeed writes them: "NAME: WEIGHT BEGIN:END PREFIX, WEIGHT
BEGIN:END PREFIX".

BEGIN and END are shares of a data set's documents (of its sequences for GPT), so that two groups can take different
parts of one. A group is blended by its weights; several for validation or test are evaluated one after the other.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from megatron_sp.utils.files import read_text

_MOST_BYTES = 256 * 1024
_FORM = '"NAME: WEIGHT BEGIN:END PREFIX, WEIGHT BEGIN:END PREFIX"'


class SplitGroup(NamedTuple):
    """A blend of parts of data sets; weights, ranges and prefixes belong together one by one."""

    name: str
    weights: tuple[float, ...]
    ranges: tuple[tuple[float, float], ...]
    prefixes: tuple[str, ...]


def read_groups(texts: tuple[str, ...]) -> tuple[SplitGroup, ...]:
    """Return the groups of a --train/valid/test-weighted-split-paths.

    Raises:
        ValueError: a text is not of that form, or two groups have one name.
    """
    groups = tuple(map(_group, texts))
    names = [group.name for group in groups]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"two groups have the name '{twice}': give each its own, by which its loss is reported")
    return groups


def _group(text: str) -> SplitGroup:
    name, colon, rest = text.strip().strip("\"'").partition(":")
    name = name.strip()
    if not colon or not rest.strip() or not re.fullmatch(r"[\w.-]+( [\w.-]+)*", name):
        raise ValueError(f"expected {_FORM} in quotes, got '{text[:60]}'")
    parts = [_part(part) for part in rest.split(",") if part.strip()]
    return SplitGroup(name, *zip(*parts, strict=True))  # type: ignore[arg-type]


def _part(text: str) -> tuple[float, tuple[float, float], str]:
    words = text.split()
    if len(words) != 3:
        raise ValueError(f"expected WEIGHT BEGIN:END PREFIX between two commas, got '{' '.join(words)[:60]}'")
    weight, share, prefix = words
    begin, _, end = share.partition(":")
    try:
        numbers = float(weight), float(begin), float(end)
    except ValueError:
        raise ValueError(
            f"expected WEIGHT BEGIN:END PREFIX in numbers, such as 0.3 0:0.95 {prefix[:40]}, got '{text.strip()[:60]}'"
        ) from None
    if not 0 < numbers[0] < math.inf:
        raise ValueError(f"'{weight[:20]}' must be a weight above 0: leave out sets of weight 0")
    if not 0 <= numbers[1] < numbers[2] <= 1:
        raise ValueError(
            f"'{share[:40]}' must be BEGIN:END with 0 <= BEGIN < END <= 1: shares of a data set's documents"
        )
    return numbers[0], (numbers[1], numbers[2]), prefix


def read_group_file(path: str) -> tuple[str, ...]:
    """Return the texts of the groups in a file: all that is in double quotes, or each line.

    Raises:
        ConfigError: the file cannot be read.
    """
    text = read_text(path, path, _MOST_BYTES, "a file of groups")
    return tuple(re.findall(r'"([^"]*)"', text)) or tuple(line.strip() for line in text.splitlines() if line.strip())
