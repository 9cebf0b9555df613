"""Tokenizers: ids, round trips, files that are none, and a trained model that loses nothing."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_sp.config.schema import DataConfig
from megatron_sp.data.tokenizers import ByteTokenizer, NullTokenizer, build_tokenizer, train
from megatron_sp.data.tokenizers.kept import name_path
from megatron_sp.data.tokenizers.spm import SentencePieceTokenizer
from megatron_sp.data.tokenizers.tokenizer import well_formed
from megatron_sp.data.tokenizers.train import train_sentencepiece
from megatron_sp.utils.errors import ConfigError, DataError, DiskError

NAMES = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "theta", "kappa", "lambda", "omega", "sigma"]
TEXTS = [
    f"def {a}_{b}(value, other):\n    if value > {i}:\n\t\treturn  {a} * {b}  \n\n\nprint({b}_{a}(1, 2))\n# naïve café, {a} and {b}\r\n"
    for i, (a, b) in enumerate(itertools.permutations(NAMES, 2))
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("spm") / "t.model"
    train_sentencepiece(TEXTS, path, 400)
    return path


@settings(deadline=None)
@given(st.text())
@example("\x00\U0001f389\n")
def test_bytes_round_trip(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids == list(text.encode()) and tokenizer.decode(ids) == text
    assert all(0 <= i < 256 for i in ids) and tokenizer.vocab_size == 257 and tokenizer.eod == 256


def test_bytes_that_are_no_text() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode([0xE6, 0x97, 65, 256, 66]) == "\ufffdAB"
    with pytest.raises(DataError, match="token id 257: expected 0 to 256"):
        tokenizer.decode([65, 257])
    with pytest.raises(DataError, match="token id -1"):
        tokenizer.decode([-1])


def test_lone_surrogates_become_replacement_characters() -> None:
    assert well_formed("a\ud800b") == "a\ufffdb"
    assert well_formed("\ud83c\udf89") == "\U0001f389"
    assert ByteTokenizer().encode("\udfff") == list("\ufffd".encode())


def test_null() -> None:
    tokenizer = NullTokenizer(100)
    assert tokenizer.encode(" 5 6\n99\t0 ") == [5, 6, 99, 0] and tokenizer.encode("") == []
    assert tokenizer.decode([5, 6]) == "5 6" and tokenizer.eod == 99 and tokenizer.vocab_size == 100
    with pytest.raises(DataError, match="token id 100: expected 0 to 99"):
        tokenizer.encode("1 100")
    with pytest.raises(DataError, match="reads integers with spaces between them, not text"):
        tokenizer.encode("hello")
    with pytest.raises(ConfigError, match="at least 2"):
        NullTokenizer(1)


def test_a_trained_model_gives_back_every_text(model: Path) -> None:
    tokenizer = SentencePieceTokenizer(model)
    assert tokenizer.vocab_size == 400 and tokenizer.eod == 1
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text and len(ids) < len(text) / 1.5
        assert 0 < min(ids) and max(ids) < 400 and tokenizer.eod not in ids


@pytest.fixture(scope="module")
def trained(model: Path) -> SentencePieceTokenizer:
    return SentencePieceTokenizer(model)


@settings(deadline=None, max_examples=200)
@given(text=st.text(st.characters(codec="utf-8", exclude_characters="\x00\u2581")) | st.text(" \n\t\r_ab"))
@example(text="  \n\n  \t\r\n ")
@example(text="日本語 \U0001f389\u00a0\u3000<eod></s><unk><0x41>")
def test_a_trained_model_is_lossless(text: str, trained: SentencePieceTokenizer) -> None:
    ids = trained.encode(text)
    assert trained.decode(ids) == text
    assert not {0, 1} & set(ids), "text never becomes <unk> or the end of a document"


def test_pieces_do_not_depend_on_what_is_before_the_line(trained: SentencePieceTokenizer) -> None:
    (newline,) = trained.encode("\n")
    line = trained.encode("alpha beta")
    assert trained.encode("alpha beta\nalpha beta\n") == [*line, newline, *line, newline]  # no space is put before a text
    assert trained._processor.IdToPiece(newline) == "\n"  # a piece of its own, not the byte


def test_decoding_generated_ids(trained: SentencePieceTokenizer) -> None:
    ids = trained.encode("x = 1\n")
    assert trained.decode([*ids, trained.eod]) == "x = 1\n"
    assert isinstance(trained.decode(list(range(trained.vocab_size))), str)
    for bad in (400, -1):
        with pytest.raises(DataError, match=f"token id {bad}: expected 0 to 399"):
            trained.decode([*ids, bad])


def test_training_is_deterministic_and_atomic(model: Path, tmp_path: Path) -> None:
    report = train_sentencepiece(iter(TEXTS), tmp_path / "new" / "t.model", 400)
    assert (tmp_path / "new" / "t.model").read_bytes() == model.read_bytes()
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["t.model"]
    assert report.vocab_size == 400 and report.bytes_per_token > 1.5
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskError, match="cannot be written"):
        train_sentencepiece(TEXTS, tmp_path / "file" / "t.model", 400)


def test_training_takes_a_sample(tmp_path: Path) -> None:
    whole = train_sentencepiece(TEXTS, tmp_path / "a.model", 320)
    part = train_sentencepiece(TEXTS, tmp_path / "b.model", 320, sample_bytes=whole.num_sampled_bytes // 3)
    assert part.num_sampled_bytes == pytest.approx(whole.num_sampled_bytes / 3, rel=0.05)


def test_what_cannot_be_trained(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least 300"):
        train_sentencepiece(TEXTS, tmp_path / "t", 299)
    with pytest.raises(DataError, match="no text"):
        train_sentencepiece(["\n\n", ""], tmp_path / "t", 400)
    assert list(tmp_path.iterdir()) == []


def test_a_vocabulary_that_does_not_fit_the_text_says_which_does(tmp_path: Path) -> None:
    """Of one that was too small it said to take a smaller one."""
    many = ["".join(chr(0x4E00 + (7 * i + k) % 500) for k in range(50)) for i in range(80)]
    for texts, size, says in ((TEXTS[:3], 8000, "is too large for"), (many, 301, "is too small for")):
        with pytest.raises(DataError, match=rf"--vocab-size {size} {says} [0-9,]+ bytes of text: .*; give --vocab-size \d+ or") as caught:
            train_sentencepiece(texts, tmp_path / "t", size)
        fits = int(str(caught.value).split("; give --vocab-size ")[1].split()[0])
        assert train_sentencepiece(texts, tmp_path / "t", fits).vocab_size == fits
        with pytest.raises(DataError, match=says):
            train_sentencepiece(texts, tmp_path / "t", fits + (1 if size == 8000 else -1))
    with pytest.raises(DataError, match=r"bytes of text \(of [0-9,]+; --sample-bytes takes more\): that has at most"):
        train_sentencepiece(TEXTS, tmp_path / "t", 8000, sample_bytes=1000)


def test_more_text_than_is_held_gives_lines_from_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [f"line {i:04}" for i in range(1000)]
    whole, total = train._sample(["\n".join(lines)], 900)
    assert (len(whole), total) == (100, 9000) and whole[:2] == ["line 0000", "line 0010"]
    monkeypatch.setattr(train, "_MIN_HELD_BYTES", 0)
    part, total = train._sample(("\n".join(lines[at : at + 7]) for at in range(0, 1000, 7)), 900)
    numbers = [int(line.split()[1]) for line in part]
    assert total == 9000 and 80 <= len(part) <= 100 and numbers[0] == 0 and numbers[-1] > 950
    assert max(b - a for a, b in itertools.pairwise(numbers)) <= 2 * min(b - a for a, b in itertools.pairwise(numbers))


def test_files_that_are_no_model(model: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read: No such file"):
        SentencePieceTokenizer(tmp_path / "none.model")
    for contents, message in [
        (b"", "is empty"),
        (b"hello world", "not a SentencePiece model"),
        (model.read_bytes()[:1000], "SentencePiece"),
    ]:
        (tmp_path / "bad.model").write_bytes(contents)
        with pytest.raises(DataError, match=message):
            SentencePieceTokenizer(tmp_path / "bad.model")


def train_plain(path: Path, **options: object) -> Path:
    import sentencepiece

    with open(path, "wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(t.replace("\n", " ") for t in TEXTS), model_writer=file, vocab_size=120, model_type="bpe",
            minloglevel=2, **options,
        )  # fmt: skip
    return path


def test_which_id_ends_a_document(tmp_path: Path) -> None:
    assert SentencePieceTokenizer(train_plain(tmp_path / "a")).eod == 2  # </s>, as SentencePiece has it
    with_eod = SentencePieceTokenizer(train_plain(tmp_path / "b", user_defined_symbols=["<eod>"]))
    assert with_eod.eod == 3
    with pytest.raises(DataError, match="neither an end-of-sentence id nor a piece <eod>"):
        SentencePieceTokenizer(train_plain(tmp_path / "c", eos_id=-1))


def test_texts_of_llama_2_begin_with_bos(model: Path, tmp_path: Path) -> None:
    with_bos = train_plain(tmp_path / "bos.model")
    plain, llama = (build_tokenizer(DataConfig(tokenizer_type=f"{kind}Tokenizer", tokenizer_model=str(with_bos)))
                    for kind in ("SentencePiece", "Llama2"))  # type: ignore[arg-type]  # fmt: skip
    assert (plain.bos, plain.begin, llama.begin) == (1, (), (1,))
    assert plain.fingerprint() == llama.fingerprint() and plain.encode("a b") == llama.encode("a b")
    with pytest.raises(DataError, match="has no id that begins a text, which Llama2Tokenizer needs"):
        build_tokenizer(DataConfig(tokenizer_type="Llama2Tokenizer", tokenizer_model=str(model)))
    for config, kind in (
        ({}, "SentencePiece"), ({"add_bos_token": True}, "Llama2"), ({"tokenizer_class": "LlamaTokenizer"}, "Llama2"),
        ({"tokenizer_class": "LlamaTokenizer", "add_bos_token": False}, "SentencePiece"),
    ):  # fmt: skip
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        data = DataConfig()
        name_path(data, with_bos)
        assert data.tokenizer_type == f"{kind}Tokenizer"


def test_build(model: Path) -> None:
    assert isinstance(build_tokenizer(DataConfig(tokenizer_type="ByteTokenizer")), ByteTokenizer)
    assert isinstance(build_tokenizer(DataConfig(tokenizer_model=str(model))), SentencePieceTokenizer)
    null = build_tokenizer(DataConfig(), 50)
    assert isinstance(null, NullTokenizer) and null.vocab_size == 50
    assert build_tokenizer(DataConfig(tokenizer_type="ByteTokenizer"), 320).vocab_size == 257


@pytest.mark.parametrize(("options", "vocab_size", "message"), [
    ({}, None, "there is no tokenizer"),
    ({"tokenizer_type": "NullTokenizer"}, None, "needs --vocab-size"),
    ({"tokenizer_type": "SentencePieceTokenizer"}, None, "needs --tokenizer-model"),
    ({"tokenizer_type": "TikTokenizer"}, None, "is not known: use SentencePieceTokenizer"),
    ({"tokenizer_type": "HuggingFaceTokenizer"}, None, "needs --tokenizer-model FILE, a tokenizer.json"),
    ({"merge_file": "m"}, None, "needs --vocab-file FILE, a vocab.json, and --merge-file FILE"),
    ({"tokenizer_type": "ByteTokenizer"}, 256, r"vocab_size \(256\) must be at least the tokenizer's \(257\)"),
])  # fmt: skip
def test_flags_that_make_no_tokenizer(options: dict[str, str], vocab_size: int | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_tokenizer(DataConfig(**options), vocab_size)  # type: ignore[arg-type]


def test_fingerprints(model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.model"
    train_sentencepiece(TEXTS[:100], other, 400)
    tokenizers = [ByteTokenizer(), NullTokenizer(257), NullTokenizer(258), SentencePieceTokenizer(model), SentencePieceTokenizer(other)]
    assert len({t.fingerprint() for t in tokenizers}) == 5
    assert SentencePieceTokenizer(str(model)).fingerprint() == tokenizers[3].fingerprint()
