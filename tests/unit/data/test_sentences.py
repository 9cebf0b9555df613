"""Where sentences end: a table, and that nothing of the text is lost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_sp.data.preprocess import split_sentences

CASES = [  # sentences, joined by | in place of the white space between them
    "One sentence.|Another one!|A third?|And no end",
    "He paid 3.50 for it, 1,000.75 in all.|It was version 2.0.1 of 10.0.0.1.",
    "Dr. Smith met Mr. and Mrs. Jones of St. Louis.|They left.",
    "J. R. R. Tolkien wrote it.|George W. Bush did not.|So do I.|Then we agree.",
    "In the U.S. Senate it failed.|He lives in the U.S.|He likes it.|At 5 p.m. Eastern it ends.|It was 5 p.m.|The bell rang.",
    "Use a tool, e.g. this one, i.e. the best.|See Fig. 3 and No. 7, vol. 2, pp. 4-5, Jan. 5.|No.|Never again.",
    "Apple Inc. Chairman Cook spoke.|He left Apple Inc.|It was late.|Smith et al. (2001) say so.|Apples, pears, etc.|Then more.",
    "John Smith, Ph.D. and M.D. of note, came.|Sammy Davis Jr. sang.",
    "Wait... what?|No way...|Yes.|And so on… it went…|Stop.",
    "\"Stop!\" he said.|\"Why?\" asked she.|\"Because I can.\"|She left (at last.)|'Good.'|“Fine.”|«Bon.»|(All of it.)|[Sic!]|So.",
    "“What now?” they asked.|“Go!”|“Now?”|He went.",
    "Really?!|Yes!!!|Hm... ok.",
    "1. First do this.|2. Then that.|It was 1999.|The end came in 2001.|2002 was better.",
    "A wrapped\nline. It\ngoes on.",
    "It is a.b.c and example.com/x.html?y=1 and file.Txt here.|Done.",
    "这是第一句。|这是第二句！|真的吗？|“好。”|最后",
    "これは文です。|次です。",
    "यह वाक्य है।|यह दूसरा है॥|अंत",
    "Это Москва.|Там живёт А. С. Пушкин.|Да. нет",
    "هل هذا سؤال؟|نعم۔|انتهى",
    "He said no. but meant yes. iPhones are not.|Apples are",
    "The U.N. and the E.U. met.|Mr. X came.",
    "- A dash.|- Another one.|* A star.",
    "Title\n\nText of one. more text|B",
    "The plan is B. Nobody knows.|Ends with initial J. Doe.",
]  # fmt: skip
EXPECTED = {
    "A wrapped\nline. It\ngoes on.": ["A wrapped\nline.", "It\ngoes on."],
    "Title\n\nText of one. more text|B": ["Title", "Text of one. more text B"],
}


@pytest.mark.parametrize("case", CASES)
def test_where_sentences_end(case: str) -> None:
    joint = "" if case[0] in "这こ" else " "
    expected = EXPECTED.get(case, case.split("|"))
    assert split_sentences(case.replace("|", joint)) == expected
    if joint and case not in EXPECTED:
        assert split_sentences("\n " + case.replace("|", "\n") + "  \n") == expected, "a line end is a space"
        assert split_sentences(case.replace("|", "\r\n \r\n")) == expected


def test_blank_lines_end_sentences() -> None:
    assert split_sentences("a heading\n\nsome text\n \t\nmore\n\n\n\nlast\fpage\u2029end") == [
        "a heading", "some text", "more", "last", "page", "end",
    ]  # fmt: skip
    assert split_sentences("") == split_sentences(" \n\n\t ") == [] and split_sentences(".") == ["."]


@settings(deadline=None, max_examples=200)
@given(st.text(st.sampled_from("aB1 .!?…\"')(\n。“”I\t-") | st.characters(), max_size=60))
def test_nothing_but_white_space_is_lost(text: str) -> None:
    sentences = split_sentences(text)
    assert "".join("".join(sentences).split()) == "".join(text.split())
    assert all(sentence and sentence == sentence.strip() for sentence in sentences)


def test_it_is_linear() -> None:
    """Text that makes patterns backtrack: a minute and more where one of them does."""
    for piece in (".", ". ", "a.", "\n ", "\r\n", '."', "。", "(" * 5):
        assert len("".join(split_sentences(piece * 40_000)).split()) <= 40_000
