"""Megatron's text for the layers of a pipeline's stages, such as ``Ett|(tttt|)*5,tt|tL``.

Stages are separated by ``|`` and listed in the order in which a sequence passes them: with P ranks the stages 0, P, 2 P, ...
are those of rank 0. ``E`` is the embedding, ``t`` a layer, ``L`` the head with its loss, ``m`` a head for further tokens;
``x*N`` and ``(...)*N`` repeat, commas mean nothing.
"""

from __future__ import annotations

import re
from functools import cache

from megatron_sp.utils.errors import ConfigError

_GROUP, _LETTER = re.compile(r"\(([^()]+)\)\*(\d+)"), re.compile(r"([^()*])\*(\d+)")
_LONGEST = 1 << 16  # letters, after repetition


@cache
def layers_of_layout(text: str) -> tuple[int, ...]:
    """Return the number of layers of each stage.

    Raises:
        ConfigError: it is no such text, or has stages that cannot be here; the message says which.
    """
    flag = f"--pipeline-model-parallel-layout {text[:80]}"
    stages = _repeated(re.sub(r"[\s,'\"]", "", text), flag).split("|")
    letters = "".join(stages)
    if wrong := sorted(set(letters) - set("EtLm")):
        raise ConfigError(
            f"{flag}: {wrong[0]!r} means nothing there: E is the embedding, t a layer, L the head, | ends a stage, t*3 and (tt|)*2 repeat"
        )
    if "m" in letters:
        raise ConfigError(f"{flag}: m is a head for further tokens (--mtp-num-layers), which is not there")
    if not re.fullmatch("Et*L", letters):
        raise ConfigError(f"{flag}: the embedding (E) comes once, first, and the head (L) once, last")
    counts = tuple(stage.count("t") for stage in stages)
    if 0 in counts:
        number = counts.index(0)
        what = {"E": "only the embedding", "L": "only the head"}.get(stages[number], "no layer")
        raise ConfigError(
            f"{flag}: stage {number + 1} of {len(stages)} has {what}, and each stage needs a layer here: put the embedding with the first"
            " layers (Et|...) and the head with the last ones (...|tL), or leave the flag out, and layers are dealt so that the head counts"
        )
    return counts


def _repeated(text: str, flag: str) -> str:
    """Write repetitions out."""
    for pattern in (_GROUP, _LETTER):
        length = len(text) + sum(len(match[1]) * min(int(match[2][:9]), _LONGEST) for match in pattern.finditer(text))
        if length > _LONGEST:
            raise ConfigError(f"{flag}: that is more than {_LONGEST} letters")
        text = pattern.sub(lambda match: match[1] * int(match[2]), text)
    return text
