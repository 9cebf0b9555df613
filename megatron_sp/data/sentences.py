"""Sentence splitter for BERT's data: rules and short lists of abbreviations, without a model or a download.

A sentence ends at . ! ? or an ellipsis, including the closing quotes and brackets after it, if white space follows and
the next word does not begin with a lower-case letter; at the full stops of Chinese and Japanese, with or without space;
and at every blank line. A single line break counts as a space, since text is often wrapped. A full stop does not end a
sentence after an initial (J. Smith), a title (Dr. Smith), an abbreviation within a sentence (e.g. this), or the number
of a list item (1. First). After abbreviations that may end a sentence (U.S., Inc., Jr.), the sentence ends if the next
word is one that often begins a sentence. Such rules are sometimes wrong; a sentence that is a little too long or too short
does not harm training, and one above 512 tokens costs its document (``bert_index.py``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_CLOSING = "\"'”’»)\\]}›"
_OPENING = "\"'“‘„«([{‹¿¡-–—*• \t"
_ENDING = ".!?…؟۔।॥"
_MARK = re.compile(rf"(?<![{_ENDING}])(?P<mark>[{_ENDING}]+)[{_CLOSING}]*(?=\s)|[。！？｡]+[{_CLOSING}」』）]*")
_BLANK_LINES = re.compile(r"\n[^\S\n]*\n\s*|\r\n[^\S\n]*\r\n\s*|\f|\u2029")
_LONGEST_WORD = 64  # characters that are examined, so that a text without spaces takes no longer
_WORD = re.compile(r"[^\W_][\w'’-]*")
_INITIALS = re.compile(r"(?:[^\W\d_]\.)*[^\W\d_]\Z")


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_TITLES = _words(
    "mr mrs ms mx dr prof st gen sen rep gov capt cpt cmdr lt col maj sgt adm rev fr hon supt messrs mme mlle mt ft vs cf viz ca approx"
)
"""Never at the end: what they belong to follows."""
_BEFORE_NUMBERS = _words(
    "no nos nr fig figs eq eqs sec secs vol vols pp p ch chap art arts op ed eds para par tab ref refs jan feb mar apr jun jul aug sep sept"
    " oct nov dec"
)
"""Not at the end if a number follows."""
_PERHAPS = _words("inc ltd co corp bros llc plc jr sr esq dept univ assn al a.m p.m ph.d m.d b.a m.a b.sc m.sc d.c")
"""At the end if the next word often begins a sentence."""
_STARTERS = _words(
    "a an the this that these those he she it they we i you his her its their our my your there here in on at by for from with to of as if"
    " when while where what who why how which after before since until during but and or so yet however although though because then thus"
    " therefore meanwhile moreover furthermore also no not all some many most each every one two both another such now today"
)


def split_sentences(text: str) -> list[str]:
    """Return the sentences of a text in order, stripped; none is empty, and only white space is lost."""
    return [sentence for block in _BLANK_LINES.split(text) for sentence in _of_block(block)]


def _of_block(block: str) -> Iterator[str]:
    start = 0
    for match in _MARK.finditer(block):
        if match["mark"] is None or _ends(block, start, match):
            yield from _trimmed(block[start : match.end()])
            start = match.end()
    yield from _trimmed(block[start:])


def _trimmed(text: str) -> Iterator[str]:
    if trimmed := text.strip():
        yield trimmed


def _ends(block: str, start: int, match: re.Match[str]) -> bool:
    """Return whether the mark, followed by white space, ends the sentence that began at ``start``."""
    rest = block[match.end() : match.end() + 80].lstrip().lstrip(_OPENING)
    if rest[:1].islower():
        return False
    if match.group() != ".":
        return True
    before = block[max(start, match.start() - _LONGEST_WORD) : match.start()].lstrip()
    word = (before.split() or [""])[-1].lstrip(_OPENING)
    if word == before and word.isdigit():
        return False  # the number of a list item
    found = _WORD.match(rest)
    return _full_stop_ends(word, found.group() if found else rest[:1])


def _full_stop_ends(word: str, next_word: str) -> bool:
    """Return whether a full stop between these two words ends a sentence."""
    small = word.lower()
    if small in _TITLES:
        return False
    if small in _BEFORE_NUMBERS and next_word[:1].isdigit():
        return False
    if small in _PERHAPS or (_INITIALS.match(word) and "." in word):
        return next_word.lower() in _STARTERS
    return word == "I" or not _INITIALS.match(word)
