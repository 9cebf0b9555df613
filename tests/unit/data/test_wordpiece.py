"""BERT's WordPiece: recorded ids of Hugging Face's BertTokenizer, vocabularies that are none, training, and BERT's tokens elsewhere."""

from __future__ import annotations

import builtins
import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.paths import ROOT

from megatron_sp.config.schema import DataConfig
from megatron_sp.data.tokenizers import ByteTokenizer, NullTokenizer, build_tokenizer
from megatron_sp.data.tokenizers.hugging_face import BertWordPieceTokenizer
from megatron_sp.data.tokenizers.spm import SentencePieceTokenizer
from megatron_sp.data.tokenizers.tokenizer import Tokenizer, special_tokens
from megatron_sp.data.tokenizers.train import train_sentencepiece, train_wordpiece
from megatron_sp.utils.errors import ConfigError, DataError

TOOL = ROOT / "tools" / "train_tokenizer.py"
PIECES = """[PAD] [UNK] [CLS] [SEP] [MASK] the a b c d e ##a ##b ##c ##d ##e un ##want ##ed wa want hund ##ing , . ! ? ' " - ( ) $ % # cafe
café naive hello world He he He1 HELLO Hello ##o 中 国 1 2 9 ##1 ##2 ##9 ##s re ##re \u00e9 ##\u00e9 e\u0301 ß ss straße strasse i̇ i I İ [ ]
mask sep ##sep ##mask ##” ” … ..."""
VOCAB = PIECES.split()
GOLDEN = {  # BertTokenizer of transformers 5.23 with this vocabulary, add_special_tokens=False: lower case, cased
    "UNwanted, wanting": ([16, 17, 18, 23, 20, 22], [1, 23, 20, 22]),
    "Café naïve": ([35, 37], [1, 1]),
    'hello  world!\n\tHe said: "don\'t"': ([38, 39, 25, 41, 1, 1, 28, 1, 27, 1, 28], [38, 39, 25, 40, 1, 1, 28, 1, 27, 1, 28]),
    "中国 a中b": ([46, 47, 6, 46, 7], [46, 47, 6, 46, 7]),
    "1992.5%": ([48, 53, 53, 52, 24, 1, 33], [48, 53, 53, 52, 24, 1, 33]),
    "[MASK] the [SEP]x": ([4, 5, 3, 1], [4, 5, 3, 1]),
    "re-re": ([55, 29, 55], [55, 29, 55]),
    "He\u0000ll\u200do": ([38], [44]),
    "straße STRASSE İ": ([62, 63, 65], [62, 1, 67]),
    "a" * 101: ([1], [1]),
    "a" * 100: ([6] + [11] * 99, [6] + [11] * 99),
    "": ([], []),
    "   ": ([], []),
    "hello…world...": ([38, 76, 39, 24, 24, 24], [38, 76, 39, 24, 24, 24]),
    "\ud7ff\ufffd the": ([1, 5], [1, 5]),
    "e\u0301 \u00e9": ([10, 10], [59, 57]),
    "(b)$c": ([30, 7, 31, 32, 8], [30, 7, 31, 32, 8]),
    "#hello##world": ([34, 38, 34, 34, 39], [34, 38, 34, 34, 39]),
    "[mask][MASK]": ([68, 70, 69, 4], [68, 70, 69, 4]),
    "A\u3000B\u00a0C": ([6, 7, 8], [1, 1, 1]),
}
WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "theta", "kappa", "lambda", "Omega", "sigma"]
TEXTS = [f"The {a} of {b}s is un{b}ed.\n\nIs {a}{b} 3.5 {b}?" for a, b in itertools.permutations(WORDS, 2)]


def vocab_file(folder: Path, pieces: list[str], end: str = "\n") -> Path:
    path = folder / "vocab.txt"
    path.write_bytes("".join(piece + end for piece in pieces).encode())
    return path


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_ids_are_those_of_bert_tokenizer(end: str, tmp_path: Path) -> None:
    path = vocab_file(tmp_path, VOCAB, end)
    for lowercase in (True, False):
        tokenizer = BertWordPieceTokenizer(path, lowercase)
        assert {text: tokenizer.encode(text) for text in GOLDEN} == {text: ids[not lowercase] for text, ids in GOLDEN.items()}
    assert (tokenizer.vocab_size, tokenizer.pad, tokenizer.cls, tokenizer.sep, tokenizer.mask, tokenizer.eod) == (len(VOCAB), 0, 2, 3, 4, 3)
    assert tokenizer.decode([38, 39, 25, 16, 17, 18, 4]) == "hello world! unwanted [MASK]"
    with pytest.raises(DataError, match=f"token id {len(VOCAB)}: expected 0 to {len(VOCAB) - 1}"):
        tokenizer.decode([5, len(VOCAB)])
    assert tokenizer.starts_word(np.array([2, 16, 17, 18, 23, 3, 4])).tolist() == [True, True, False, False, True, True, True]


def test_fingerprints(tmp_path: Path) -> None:
    path = vocab_file(tmp_path, VOCAB)
    prints = [BertWordPieceTokenizer(path, lower).fingerprint() for lower in (True, False, True)]
    (tmp_path / "b").mkdir()
    prints.append(BertWordPieceTokenizer(vocab_file(tmp_path / "b", [*VOCAB, "more"]), True).fingerprint())
    assert prints[0] == prints[2] and len(set(prints)) == 3


@pytest.mark.parametrize(("contents", "message"), [
    (b"[UNK]\na\nb\na\n", r"vocab\.txt:4: 'a' is on line 2 already"),
    (b"[UNK]\n\nb\n", r"vocab\.txt:2: is empty"),
    (b"", r"vocab\.txt: is empty"),
    (b"[CLS]\n[SEP]\na\n", r"vocab\.txt: has no line \[UNK\]"),
    (b"[UNK]\n\xff\n", r"vocab\.txt: is not UTF-8"),
    (None, r"vocab\.txt: cannot be read: No such file.*--vocab-file needs BERT's vocab\.txt"),
])  # fmt: skip
def test_files_that_are_no_vocabulary(contents: bytes | None, message: str, tmp_path: Path) -> None:
    if contents is not None:
        (tmp_path / "vocab.txt").write_bytes(contents)
    with pytest.raises(DataError, match=message):
        BertWordPieceTokenizer(tmp_path / "vocab.txt", True)


def test_a_vocabulary_without_mask(tmp_path: Path) -> None:
    tokenizer = BertWordPieceTokenizer(vocab_file(tmp_path, ["[UNK]", "[CLS]", "[PAD]", "a"]), True)
    with pytest.raises(ConfigError, match=r"BertWordPieceTokenizer has no \[SEP\], \[MASK\]: take BertWordPieceLowerCase with"):
        special_tokens(tokenizer)
    assert tokenizer.eod == 0


def test_flags(tmp_path: Path) -> None:
    path = str(vocab_file(tmp_path, VOCAB))
    for kind, ids in (("BertWordPieceLowerCase", [38]), ("BertWordPieceCase", [44]), (None, [38])):
        assert build_tokenizer(DataConfig(tokenizer_type=kind, vocab_file=path)).encode("Hello") == ids  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="--tokenizer-type BertWordPieceCase needs --vocab-file FILE"):
        build_tokenizer(DataConfig(tokenizer_type="BertWordPieceCase"))
    with pytest.raises(ConfigError, match=rf"vocab_size \(50\) must be at least the tokenizer's \({len(VOCAB)}\)"):
        build_tokenizer(DataConfig(vocab_file=path), 50)


def test_without_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] == "tokenizers":
            raise ImportError("No module named 'tokenizers'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"the tokenizers package is needed for WordPiece .*pip install 'tokenizers>=0\.22'"):
        BertWordPieceTokenizer(vocab_file(tmp_path, VOCAB), True)
    with pytest.raises(ConfigError, match="the tokenizers package is needed"):
        train_wordpiece(TEXTS, tmp_path / "v.txt", 200)


def test_the_library_is_imported_late() -> None:
    code = "import sys, megatron_sp.data.build, megatron_sp.commands.preprocess; assert 'tokenizers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=TOOL.parents[1])


def test_training_makes_the_same_vocabulary_every_time(tmp_path: Path) -> None:
    reports = [train_wordpiece(TEXTS, tmp_path / name, 200) for name in ("a.txt", "b.txt")]
    assert (tmp_path / "a.txt").read_bytes() == (tmp_path / "b.txt").read_bytes() and reports[0] == reports[1]
    pieces = (tmp_path / "a.txt").read_text().split("\n")[:-1]
    assert pieces[:5] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"] and len(pieces) == reports[0].vocab_size <= 200
    assert "alpha" in pieces and any(piece.startswith("##") for piece in pieces) and not any(c.isupper() for p in pieces[5:] for c in p)
    tokenizer = BertWordPieceTokenizer(tmp_path / "a.txt", True)
    assert 1 not in tokenizer.encode(TEXTS[3]) and special_tokens(tokenizer) == (2, 3, 4, 0)
    train_wordpiece(TEXTS, tmp_path / "c.txt", 200, lowercase=False)
    assert "Omega" in (tmp_path / "c.txt").read_text()
    with pytest.raises(ConfigError, match=r"vocab_size \(20\) must be at least 30"):
        train_wordpiece(TEXTS, tmp_path / "d.txt", 20)
    with pytest.raises(DataError, match="no text"):
        train_wordpiece([""], tmp_path / "d.txt", 100)


def test_sentencepiece_with_berts_tokens(tmp_path: Path) -> None:
    train_sentencepiece(TEXTS, tmp_path / "t.model", 420, bert=True)
    tokenizer = SentencePieceTokenizer(tmp_path / "t.model")
    special = special_tokens(tokenizer)
    assert len({*special, tokenizer.eod}) == 5
    assert not {*special} & {*tokenizer.encode("[CLS] a [MASK] b [SEP] [PAD]")}, "text cannot spell them"
    assert tokenizer.decode(tokenizer.encode("The alpha")) == "The alpha"
    alpha, other = tokenizer.encode("alpha"), tokenizer.encode("of alpha")
    assert other[-len(alpha) :] == alpha, "a word is the same at the beginning of a sentence"
    ids = np.array([special.cls, *tokenizer.encode("unsigmaed kappa\nzeta"), special.sep, *tokenizer.encode("beta"), special.mask])
    starts = tokenizer.starts_word(ids)
    spelled = [tokenizer.decode(part.tolist()).strip() for part in np.split(ids, np.flatnonzero(starts)[1:])]
    assert [word for word in spelled if word] == ["unsigmaed", "kappa", "zeta", "beta"]
    assert starts[0] and starts[-1] and starts.sum() == 8  # [CLS], three words, the line end, [SEP], a word, [MASK]
    assert not tokenizer.starts_word(np.array([special.cls])).flags.writeable or tokenizer.starts_word(ids).tolist() == starts.tolist()


def test_sentencepiece_models_of_others(tmp_path: Path) -> None:
    import sentencepiece

    with open(tmp_path / "t.model", "wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(TEXTS), model_writer=file, vocab_size=70, user_defined_symbols=["<mask>", "<sep>"], pad_id=3,
            control_symbols=["<cls>"], minloglevel=2,
        )  # fmt: skip
    assert special_tokens(SentencePieceTokenizer(tmp_path / "t.model")) == (4, 6, 5, 3)
    train_sentencepiece(TEXTS, tmp_path / "plain.model", 400)
    with pytest.raises(ConfigError, match=r"SentencePieceTokenizer has no \[CLS\], .*megatron-sp tokenizer --bert"):
        special_tokens(SentencePieceTokenizer(tmp_path / "plain.model"))


def test_tokenizers_without_a_file() -> None:
    tokenizers: list[Tokenizer] = [NullTokenizer(50), ByteTokenizer(), NullTokenizer(5)]
    assert special_tokens(tokenizers[0]) == (46, 47, 48, 45) and tokenizers[0].eod == 49
    assert all(t.starts_word(np.array([1, 2, 3])).tolist() == [True] * 3 for t in tokenizers)
    for tokenizer in tokenizers[1:]:
        with pytest.raises(ConfigError, match="has no"):
            special_tokens(tokenizer)


def test_the_tool(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "{w} {v} word"}}\n' for w, v in itertools.permutations(WORDS, 2)))

    def tool(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(TOOL), "--input", str(tmp_path / "a.jsonl"), "--output", str(tmp_path / "out"), *words]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    assert "out: 60 pieces" in tool("--type", "wordpiece", "--vocab-size", "60").stdout
    assert BertWordPieceTokenizer(tmp_path / "out", True).vocab_size == 60
    refused = tool("--cased")
    assert refused.returncode == 2 and "--cased is for --type wordpiece" in refused.stderr
