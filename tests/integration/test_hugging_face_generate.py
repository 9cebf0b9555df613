"""transformers' generate() on what is exported here: it stops where a document ends, whatever tokenizer the run was trained with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch
from support import stored_models
from support.convert_models import BERT, GPT2, LLAMA
from test_hugging_face_tokenizers import CORPUS, gpt2_data, save_run, sentencepiece_data, train_llama

from megatron_sp.commands.cli import main
from megatron_sp.config.schema import Config, DataConfig, ModelConfig
from megatron_sp.data.tokenizers import build_tokenizer
from megatron_sp.inference.generation import TextStream
from megatron_sp.inference.team import find_stored
from megatron_sp.models.bert import BertModel
from megatron_sp.models.gpt import GPTModel

transformers = pytest.importorskip("transformers")

STOP = 3
"""Tokens that are made before the end of the text."""


def convert(source: Path, target: str, output: Path, *flags: str) -> None:
    assert main(["convert", "--input", str(source), "--to", target, "--output", str(output), *flags]) == 0


def continued(folder: Path, eod: int) -> list[int]:
    """What generate() adds, if the model wants the end of a document as its third token and on from there."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)

    def wanted(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        token = eod if ids.shape[1] >= 2 + STOP - 1 else (eod + 1) % scores.shape[1]
        return torch.full_like(scores, -torch.inf).index_fill_(1, torch.tensor([token]), 0.0)

    prompt = torch.tensor([[3, 4]])
    made = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False,
        logits_processor=transformers.LogitsProcessorList([wanted]),
    )  # fmt: skip
    found: list[int] = made[0, 2:].tolist()
    return found


def ids_of(folder: Path, file: str = "config.json") -> tuple[Any, ...]:
    document = json.loads((folder / file).read_text())
    return tuple(document[f"{role}_token_id"] for role in ("bos", "eos", "pad"))


def bytes_data(folder: Path) -> DataConfig:
    return DataConfig(tokenizer_type="ByteTokenizer")


def other_end_data(folder: Path) -> DataConfig:
    return DataConfig(tokenizer_type="ByteTokenizer", eod_id=10)


def numbers_data(folder: Path) -> DataConfig:
    return DataConfig(tokenizer_type="NullTokenizer")


def llama_data(folder: Path) -> DataConfig:
    return DataConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(train_llama(folder)))


CASES = [(sentencepiece_data, False), (gpt2_data, False), (llama_data, True), (bytes_data, True), (other_end_data, True)]
CASES.append(pytest.param(numbers_data, False, marks=pytest.mark.long))  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore")  # of transformers, about a pad token that is absent
@pytest.mark.parametrize(("make", "rotary"), CASES)
def test_generate_stops_at_the_end_of_a_document(make: Any, rotary: bool, tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    data = make(tmp_path / "files")
    tokenizer = build_tokenizer(data, 300 if make is numbers_data else None)
    save_run(tmp_path / "run", data, tokenizer.vocab_size, rotary=rotary)
    convert(tmp_path / "run", "hf", tmp_path / "hf")
    bos = tokenizer.eod if make is gpt2_data else getattr(tokenizer, "bos", None)
    assert (bos is not None) == (make in (gpt2_data, llama_data))
    assert ids_of(tmp_path / "hf") == ids_of(tmp_path / "hf", "generation_config.json") == (bos, tokenizer.eod, tokenizer.pad)
    made = continued(tmp_path / "hf", tokenizer.eod)
    assert len(made) == STOP and made[-1] == tokenizer.eod, "and then it stops"
    convert(tmp_path / "hf", "megatron_sp", tmp_path / "back")
    convert(tmp_path / "back", "hf", tmp_path / "again")
    for file in ("config.json", "generation_config.json"):
        assert (tmp_path / "again" / file).exists() == (tmp_path / "hf" / file).exists()
        assert ids_of(tmp_path / "again", file) == ids_of(tmp_path / "hf", file)


def begun_llama_data(folder: Path) -> DataConfig:
    """As Llama 3's: the template of tokenizer.json puts <s> before a text."""
    tokenizer = transformers.LlamaTokenizerFast.from_pretrained(train_llama(folder), local_files_only=True)
    tokenizer.add_bos_token = True
    tokenizer.save_pretrained(folder)
    return DataConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder / "tokenizer.json"))


def llama_2_data(folder: Path) -> DataConfig:
    """A SentencePiece model with <s>, as Megatron's Llama2Tokenizer reads it."""
    with open(folder / "llama.model", "wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(CORPUS), model_writer=file, vocab_size=300, model_type="bpe", byte_fallback=True, minloglevel=2,
            normalization_rule_name="identity", remove_extra_whitespaces=False, hard_vocab_limit=False,
        )  # fmt: skip
    return DataConfig(tokenizer_type="Llama2Tokenizer", tokenizer_model=str(folder / "llama.model"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [begun_llama_data, llama_2_data, sentencepiece_data])
def test_greedy_text_is_that_of_transformers(make: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before a text stands what the tokenizer's own do begin with; nothing did here."""
    (tmp_path / "files").mkdir()
    data = make(tmp_path / "files")
    tokenizer = build_tokenizer(data)
    config = Config(data=data, model=ModelConfig(**LLAMA, init_method_std=0.5))
    config.model.vocab_size = tokenizer.vocab_size
    stored_models.save(tmp_path / "run", config, {3: GPTModel(config.model, config.kernels, seed=1, dtype=torch.float32)})
    convert(tmp_path / "run", "hf", tmp_path / "hf")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf", local_files_only=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", local_files_only=True)
    prompt = theirs("The dog", return_tensors="pt", return_token_type_ids=False)
    assert prompt.input_ids[0].tolist() == [*tokenizer.begin, *tokenizer.encode("The dog")]
    assert (prompt.input_ids[0, 0] == 1) == (len(tokenizer.begin) == 1) == (make is not sentencepiece_data)
    new = model.generate(**prompt, max_new_tokens=8, do_sample=False)[0, prompt.input_ids.shape[1] :].tolist()
    convert(tmp_path / "hf", "megatron_sp", tmp_path / "back")
    for run in ("run", "back"):
        flags = ["--load", str(tmp_path / run), "--prompt", "The dog", "--greedy", "--max-new-tokens", "8"]
        capsys.readouterr()
        assert main(["generate", *flags]) == 0
        mine = capsys.readouterr().out
        stored = find_stored(tmp_path / run, None, "GPT", {}, print)
        stream = TextStream(stored.tokenizer.decode, prompt.input_ids[0].tolist())
        assert mine == "The dog" + "".join(stream.add(token) for token in new if token != tokenizer.eod) + stream.flush() + "\n"
    assert main(["generate", *flags, "--no-bos"]) == 0
    assert (capsys.readouterr().out == mine) == (make is sentencepiece_data)


def test_a_model_without_a_tokenizer_has_none_of_them_and_it_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, shape in (("gpt2", GPT2), ("llama", LLAMA), ("bert", BERT)):
        config = Config(model=ModelConfig(**shape))
        model = (BertModel if name == "bert" else GPTModel)(config.model, config.kernels, seed=1, dtype=torch.float32)
        stored_models.save(tmp_path / name, config, {1: model})
        convert(tmp_path / name, "hf", tmp_path / f"{name}-hf")
        assert ids_of(tmp_path / f"{name}-hf") == (None, None, None)
        assert ("eos_token_id is null, so transformers' generate() never stops by itself" in capsys.readouterr().err) == (name != "bert")
    assert not (tmp_path / "bert-hf" / "generation_config.json").exists()


def test_what_says_more_than_the_vocabulary_has_is_made_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder of a tokenizer brings its model's generation_config.json along, which may be of another vocabulary."""
    (tmp_path / "files").mkdir()
    data = llama_data(tmp_path / "files")
    for eos, kept in ((2, True), ([2, 5], True), (128009, False), ([2, "x"], False)):
        (tmp_path / "files" / "generation_config.json").write_text(json.dumps({"eos_token_id": eos, "temperature": 0.6}))
        run, hf = tmp_path / f"run{eos}", tmp_path / f"hf{eos}"
        save_run(run, data, build_tokenizer(data).vocab_size, rotary=True)
        convert(run, "hf", hf)
        made = json.loads((hf / "generation_config.json").read_text())
        assert ("temperature" in made) == kept and made["eos_token_id"] == (eos if kept else 2)
        assert ("made anew" in capsys.readouterr().err) != kept


def test_a_tokenizer_that_is_larger_than_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = Config(data=DataConfig(tokenizer_type="ByteTokenizer"))
    config.model = ModelConfig(**{**GPT2, "vocab_size": 200})
    stored_models.save(tmp_path / "run", config, {1: GPTModel(config.model, config.kernels, seed=1, dtype=torch.float32)})
    convert(tmp_path / "run", "hf", tmp_path / "hf")
    assert ids_of(tmp_path / "hf") == (None, None, None) and "eos_token_id is null: the tokenizer's is 256" in capsys.readouterr().err
