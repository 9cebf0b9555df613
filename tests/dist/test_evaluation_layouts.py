"""tools/evaluate.py in layouts: the numbers of one process, printed once."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import stored_models
from support.training import train

from megatron_sp.commands import evaluate
from megatron_sp.config.schema import Config, ModelConfig
from megatron_sp.data.writer import IndexedDatasetWriter
from megatron_sp.models.bert import BertModel

LAYOUTS = {
    "tp": (2, "--tp-size", 2), "sp": (2, "--sp-size", 2), "dp": (2,),
    "tp, dp": (4, "--tp-size", 2), "tp, sp": (4, "--tp-size", 2, "--sp-size", 2), "dp 3": (3,),
}  # fmt: skip


def run_in(tmp_path: Path, layout: str, words: list[object]) -> dict[str, Any]:
    ranks, *flags = LAYOUTS.get(layout, (1,))
    out = tmp_path / f"{layout}.json"
    given = [str(word) for word in (*words, *flags, "--json", out, "--device", "cpu", "--batch-size", 3)]
    ended = train(tmp_path, ranks=int(str(ranks)), program=lambda _: sys.exit(evaluate.main(given))).expect(0)
    assert all("loss" not in text for text in ended.texts[1:])
    results: dict[str, Any] = json.loads(out.read_text())["results"]
    return results


def assert_same(got: dict[str, Any], want: dict[str, Any]) -> None:
    for name, value in want.items():
        assert got[name] == (value if not isinstance(value, float) else pytest.approx(value, rel=1e-5)), name


@pytest.mark.often("tp", "dp")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gpt(tmp_path: Path, layout: str) -> None:
    run, _ = stored_models.byte_run(tmp_path)
    texts = ["The quick brown fox jumps over the lazy dog, and back.", "naïve", "a b c d e f g h i j k l m n o p q r s t u v w x y z"]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    questions = [{"context": "a" * i, "choices": ["one", "twenty", "é"], "answer": i % 3} for i in range(5)]
    (tmp_path / "choices.jsonl").write_text("".join(json.dumps(q) + "\n" for q in questions))
    for words in (["--text", tmp_path / "text.jsonl", "--stride", 7, "--seq-length", 15], ["--choices", tmp_path / "choices.jsonl"]):
        words = ["--load", run, *words]
        assert_same(run_in(tmp_path, layout, words), run_in(tmp_path, "alone", words))


@pytest.mark.often("sp")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bert(tmp_path: Path, layout: str) -> None:
    config = Config()
    config.model = ModelConfig(
        model_family="bert", num_layers=1, hidden_size=16, num_attention_heads=4, seq_length=15, vocab_size=40, init_method_std=0.4
    )
    config.data.tokenizer_type = "NullTokenizer"
    stored_models.save(tmp_path / "run", config, {1: BertModel(config.model, config.kernels, seed=3, dtype=torch.float32)})
    random = np.random.default_rng(0)
    with IndexedDatasetWriter(tmp_path / "data", dtype=np.uint16) as writer:
        for _ in range(6):
            sentences = [random.integers(0, 30, int(random.integers(3, 9))) for _ in range(4)]
            writer.add_document(np.concatenate(sentences), [len(sentence) for sentence in sentences])
    words = ["--load", tmp_path / "run", "--data-path", tmp_path / "data"]
    assert_same(run_in(tmp_path, layout, words), run_in(tmp_path, "alone", words))


def test_a_file_that_is_bad_is_one_message(tmp_path: Path) -> None:
    run, _ = stored_models.byte_run(tmp_path)
    (tmp_path / "bad.jsonl").write_text('{"context": "a"}\n')
    given = ["--load", str(run), "--device", "cpu", "--choices", str(tmp_path / "bad.jsonl"), "--tp-size", "2"]
    ended = train(tmp_path, ranks=2, program=lambda _: sys.exit(evaluate.main(given))).expect(4, "line 1: 'choices'")
    assert ended.text.count("error:") == 1
