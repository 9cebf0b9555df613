"""The same ids as the tokenizers of transformers have, made here from files that the test writes; nothing is downloaded."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from support import stored_models

from megatron_sp.commands.cli import main
from megatron_sp.config.schema import Config, DataConfig, ModelConfig
from megatron_sp.data.tokenizers import build_tokenizer
from megatron_sp.data.tokenizers.hugging_face import GPT2BPETokenizer, HuggingFaceTokenizer
from megatron_sp.data.tokenizers.kept import name_path
from megatron_sp.data.tokenizers.train import train_sentencepiece, train_wordpiece
from megatron_sp.inference.team import find_stored
from megatron_sp.models.gpt import GPTModel

transformers = pytest.importorskip("transformers", reason="transformers (Python >= 3.11) is not installed")
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers  # noqa: E402

TEXTS = [
    "", " ", "The quick brown fox jumps over the lazy dog.", "  two  spaces\n\nand lines\t",
    "na\u00efve \u00e9\u00e8 \u4e2d\u56fd \U0001f600",
    "don't 1992.5% x=y", "end<|endoftext|>begin", "</s> and <s>", "[MASK] the [SEP]", "UPPER lower", "\u0130stanbul \u00df", "a" * 300,
    "\r\n x", "\ud7ff\ufffd\u200d", "<0x0A>", "\u2581x",
]  # fmt: skip
CORPUS = ["The quick brown fox jumps over the lazy dog, and the dog sleeps.", "lower lowest new newer UPPER don't", "x = y + 1992.5"] * 4


def train_gpt2(folder: Path) -> Path:
    """vocab.json and merges.txt."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.model.save(str(folder))
    return folder


def train_llama(folder: Path) -> Path:
    """A tokenizer.json as Llama 2's: pieces with U+2581 for the space, what has no piece spelled in bytes, <s> before a text."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=330, special_tokens=special[:3], show_progress=False))
    made = json.loads(tokenizer.to_str())
    vocab, merges = made["model"]["vocab"], [tuple(pair) for pair in made["model"]["merges"]]
    pieces = [*special, *(piece for piece in sorted(vocab, key=vocab.__getitem__) if piece not in special)]
    found = transformers.LlamaTokenizerFast(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges)
    found.save_pretrained(folder)
    return folder


def test_gpt2_has_the_ids_of_gpt2_tokenizer(tmp_path: Path) -> None:
    folder = train_gpt2(tmp_path)
    theirs = transformers.GPT2TokenizerFast.from_pretrained(folder, local_files_only=True)
    theirs.save_pretrained(tmp_path / "saved")
    data = DataConfig(vocab_file=str(folder / "vocab.json"), merge_file=str(folder / "merges.txt"))
    ours = build_tokenizer(data)
    as_json = HuggingFaceTokenizer(tmp_path / "saved")
    assert isinstance(ours, GPT2BPETokenizer) and ours.vocab_size == as_json.vocab_size == len(theirs) == 300
    assert ours.eod == as_json.eod == theirs.eos_token_id == 0
    assert len(theirs.encode(TEXTS[2])) < len(TEXTS[2])  # it knows words
    for text in TEXTS:
        ids = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text) == as_json.encode(text) == ids, text
        assert ours.decode(ids) == as_json.decode(ids) == theirs.decode(ids, clean_up_tokenization_spaces=False) == text


def test_bytes_and_pieces_with_a_mark_for_spaces_have_the_ids_of_llama_tokenizer(tmp_path: Path) -> None:
    folder = train_llama(tmp_path)
    theirs = transformers.LlamaTokenizerFast.from_pretrained(folder, local_files_only=True)
    ours = build_tokenizer(DataConfig(tokenizer_model=str(folder / "tokenizer.json")))
    assert isinstance(ours, HuggingFaceTokenizer) and ours.vocab_size == len(theirs)
    assert ours.eod == theirs.eos_token_id == 2
    assert any(i in range(3, 259) for i in theirs.encode(TEXTS[4])) and theirs.encode("the")[-1] > 258
    for text in TEXTS:
        ids = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text) == ids, text
        assert ours.decode(ids) == theirs.decode(ids, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("lowers", [True, False])
def test_a_folder_of_berts_has_the_ids_of_bert_tokenizer(lowers: bool, tmp_path: Path) -> None:
    """By tokenizer.json, and by vocab.txt with what tokenizer_config.json says of case."""
    pieces = [
        "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "quick", "lower", "UPPER", "upper", "##s", "dog", ".", "na", "##ive", "The",
    ]  # fmt: skip
    vocab = tmp_path / "vocab.txt"
    vocab.write_text("".join(f"{piece}\n" for piece in pieces))
    theirs = transformers.BertTokenizerFast(vocab={piece: i for i, piece in enumerate(pieces)}, do_lower_case=lowers)
    theirs.save_pretrained(tmp_path)
    by_json, by_text = DataConfig(), DataConfig()
    name_path(by_json, tmp_path)
    name_path(by_text, vocab)
    assert by_json.tokenizer_type == "HuggingFaceTokenizer"
    assert by_text.tokenizer_type == ("BertWordPieceLowerCase" if lowers else "BertWordPieceCase")
    tokenizers: list[Any] = [build_tokenizer(data) for data in (by_json, by_text)]
    for ours in tokenizers:
        assert (ours.pad, ours.cls, ours.sep, ours.mask, ours.eod) == (0, 2, 3, 4, 3)
        for text in TEXTS:
            assert ours.encode(text) == theirs.encode(text, add_special_tokens=False), text


def sentencepiece_data(folder: Path) -> DataConfig:
    train_sentencepiece(CORPUS, folder / "sp.model", 330)
    return DataConfig(tokenizer_type="SentencePieceTokenizer", tokenizer_model=str(folder / "sp.model"))


def bert_sentencepiece_data(folder: Path) -> DataConfig:
    train_sentencepiece(CORPUS, folder / "sp.model", 330, bert=True)
    return DataConfig(tokenizer_type="SentencePieceTokenizer", tokenizer_model=str(folder / "sp.model"))


def cased_data(folder: Path) -> DataConfig:
    train_wordpiece(CORPUS, folder / "cased.txt", 90, lowercase=False)
    return DataConfig(tokenizer_type="BertWordPieceCase", vocab_file=str(folder / "cased.txt"))


def uncased_data(folder: Path) -> DataConfig:
    train_wordpiece(CORPUS, folder / "lower.txt", 90)
    return DataConfig(tokenizer_type="BertWordPieceLowerCase", vocab_file=str(folder / "lower.txt"))


def gpt2_data(folder: Path) -> DataConfig:
    train_gpt2(folder)
    return DataConfig(tokenizer_type="GPT2BPETokenizer", vocab_file=str(folder / "vocab.json"), merge_file=str(folder / "merges.txt"))


def json_data(folder: Path) -> DataConfig:
    """A tokenizer.json by itself; with the files beside it there would be nothing to say."""
    (train_llama(folder) / "tokenizer_config.json").unlink()
    return DataConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder / "tokenizer.json"))


def save_run(folder: Path, data: DataConfig, vocab_size: int, *, rotary: bool, window: int | None = None) -> None:
    """Of a GPT-2 or, with rotary positions, of a Llama."""
    config = Config(data=data)
    rope = {"position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True, "disable_bias_linear": True} if rotary else {}
    shape = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "ffn_hidden_size": 12, "seq_length": 16}
    config.model = ModelConfig(**shape, vocab_size=vocab_size, window_size=window, **rope)
    stored_models.save(folder, config, {3: GPTModel(config.model, config.kernels, seed=1, dtype=torch.float32)})


MAKERS = (sentencepiece_data, cased_data, gpt2_data, bert_sentencepiece_data, uncased_data, json_data)
ALWAYS = ((sentencepiece_data, True), (cased_data, False), (gpt2_data, True))
REST = [pytest.param(make, rope, marks=pytest.mark.long) for make in MAKERS for rope in (True, False) if (make, rope) not in ALWAYS]


@pytest.mark.parametrize(("make", "rotary"), [*ALWAYS, *REST])
def test_what_a_run_was_trained_with_is_what_transformers_loads(tmp_path: Path, make: Any, *, rotary: bool) -> None:
    """Whichever tokenizer usually goes with the architecture; and what is made of that folder here is the same again."""
    (tmp_path / "files").mkdir()
    data = make(tmp_path / "files")
    ours = build_tokenizer(data)
    save_run(tmp_path / "run", data, ours.vocab_size, rotary=rotary)
    for source, target, output in (("run", "hf", "hf"), ("hf", "megatron_sp", "again")):
        assert main(["convert", "--input", str(tmp_path / source), "--to", target, "--output", str(tmp_path / output)]) == 0
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf", local_files_only=True)
    again = find_stored(tmp_path / "again", None, "GPT", {}, lambda line: None).tokenizer
    for text in [*TEXTS, *CORPUS]:
        assert theirs(text, add_special_tokens=False)["input_ids"] == ours.encode(text) == again.encode(text), text
    for role in ("cls", "sep", "mask", "pad"):
        assert getattr(theirs, f"{role}_token_id") == getattr(ours, role)
    assert again.eod == ours.eod and (make in (cased_data, uncased_data) or theirs.eos_token_id == ours.eod)
    assert theirs.decode(theirs("lower two", add_special_tokens=False)["input_ids"]) == "lower two"


def train_sentencepiece_model(path: Path, **rules: Any) -> DataConfig:
    sentencepiece = pytest.importorskip("sentencepiece")
    made = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(CORPUS), model_writer=made, vocab_size=50, minloglevel=2, **rules)
    path.write_bytes(made.getvalue())
    return DataConfig(tokenizer_type="SentencePieceTokenizer", tokenizer_model=str(path))


def convert(source: Path, target: str, output: Path) -> None:
    assert main(["convert", "--input", str(source), "--to", target, "--output", str(output)]) == 0


def random_texts(number: int) -> list[str]:
    """Letters of all planes, control characters, white space, marks that stand by themselves, and names of special pieces."""
    draw = random.Random(7)
    letters = (
        [*range(0x20, 0x7F)] * 8
        + [*range(0x350)] * 2
        + [*range(0x1100, 0x1200), *range(0x2000, 0x3400, 7), *range(0xF900, 0x10000, 7), 0x1F600]
    )
    known = ["</s>", "<unk>", "<0x41>", " ", "  ", "\u2581", "===", "dog lower "]
    return [
        "".join(draw.choice(known) if draw.random() < 0.2 else chr(draw.choice(letters)) for _ in range(draw.randrange(20)))
        for _ in range(number)
    ]


@pytest.mark.parametrize(
    ("rules", "rotary"), [({"model_type": "unigram"}, True), ({"model_type": "bpe", "normalization_rule_name": "nmt_nfkc"}, False)]
)
def test_a_model_without_a_tokenizer_json_is_read_by_its_own_library(tmp_path: Path, rules: Any, *, rotary: bool) -> None:
    """A unigram model, and one that changes text before: transformers has their ids, because it is told to use sentencepiece."""
    data = train_sentencepiece_model(tmp_path / "sp.model", **rules)
    save_run(tmp_path / "run", data, 50, rotary=rotary)
    convert(tmp_path / "run", "hf", tmp_path / "hf")
    theirs, ours = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf", local_files_only=True), build_tokenizer(data)
    assert len(theirs) == 50 and theirs.eos_token_id == ours.eod
    for text in [*TEXTS, *CORPUS, *random_texts(300)]:
        assert theirs(text)["input_ids"] == ours.encode(text), text
    assert theirs.decode(ours.encode("lower dog")) == "lower dog"
    convert(tmp_path / "hf", "megatron_sp", tmp_path / "again")
    assert find_stored(tmp_path / "again", None, "GPT", {}, lambda line: None).tokenizer.fingerprint() == ours.fingerprint()


def test_what_transformers_would_read_otherwise_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a Mistral it reads nothing but tokenizer.json; and where letters without a piece spell a special one it takes that."""
    data = train_sentencepiece_model(tmp_path / "sp.model", model_type="unigram")
    save_run(tmp_path / "run", data, 50, rotary=True, window=4)
    convert(tmp_path / "run", "hf", tmp_path / "hf")
    assert "note: transformers may read tokenizer.model otherwise than this training did: " in capsys.readouterr().err
    data = train_sentencepiece_model(tmp_path / "sp2.model", model_type="unigram", control_symbols="[\u4e2d]")
    save_run(tmp_path / "run2", data, 50, rotary=True)
    convert(tmp_path / "run2", "hf", tmp_path / "hf2")
    assert "letters it has no piece for spell a special one" in capsys.readouterr().err
    for folder in (tmp_path / "hf", tmp_path / "hf2"):
        written = {path.name for path in folder.iterdir()}
        assert "tokenizer.model" in written and not written & {"tokenizer.json", "tokenizer_config.json"}
