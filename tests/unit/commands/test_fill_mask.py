"""tools/fill_mask.py on real checkpoints: what it guesses, what always guessing one token would give, and what it cannot use."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from support.tiny import make_model

from megatron_sp.checkpoint.checkpointer import Checkpointer
from megatron_sp.checkpoint.pieces import GlobalTensor
from megatron_sp.comm.shard_spec import ShardSpec
from megatron_sp.commands import fill_mask, generate
from megatron_sp.config.schema import Config, ModelConfig
from megatron_sp.data.build import build_bert_datasets
from megatron_sp.data.tokenizers.hugging_face import BertWordPieceTokenizer
from megatron_sp.models.language_model import LanguageModel
from megatron_sp.ops.attention import AttentionMask
from megatron_sp.parallel.forward_context import ForwardContext
from megatron_sp.parallel.layers import shard_specs
from megatron_sp.utils.errors import ConfigError
from megatron_sp.utils.launch import Launch

WORDS = ["a", "b", "c", "d", "##e", "f", "g", "h"]


def save(folder: Path, config: Config, classes: int = 0) -> LanguageModel:
    """A checkpoint of a tiny model with its weights drawn."""
    model: LanguageModel = make_model(config.model, torch.float32, classes=classes)
    specs, checkpointer = shard_specs(model), Checkpointer(folder)
    checkpointer.prepare()
    tensors = {}
    for name, p in model.named_parameters():
        spec = specs[name]
        whole = p.detach()[: spec.shape[0]]
        tensors[name] = GlobalTensor.of_shard(ShardSpec.whole(tuple(spec.shape), 0, 1), whole)
    checkpointer.save(1, tensors, {"step": 1, "config": config.to_dict()})
    return model


def config_of(tmp_path: Path, family: str) -> Config:
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]) + "\n")
    config = Config()
    config.model = ModelConfig(
        model_family=family, num_layers=1, hidden_size=16, num_attention_heads=2, seq_length=12, vocab_size=13, init_method_std=0.5,
    )  # type: ignore[arg-type]  # fmt: skip
    config.data.vocab_file, config.data.mock_data = str(tmp_path / "vocab.txt"), True
    config.batch.train_iters, config.batch.eval_interval, config.batch.eval_iters, config.batch.global_batch_size = 6, 3, 2, 4
    return config


def call(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = fill_mask.main([*words, "--device", "cpu"])
    return code, *capsys.readouterr()


@torch.no_grad()
def test_guesses_are_the_models(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    model = save(tmp_path / "run", config_of(tmp_path, "bert"))
    ids = torch.tensor([[2, 5, 4, 8, 4, 3]])  # [CLS] a [MASK] d [MASK] [SEP]
    hidden = model.hidden(ids, ForwardContext(AttentionMask(causal=False)), types=torch.zeros_like(ids))
    shares = model.predictions(hidden)[:, 0].softmax(-1)  # type: ignore[operator]
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    code, out, _ = call(capsys, "--load", str(tmp_path / "run"), "--text", "a [MASK]d [MASK]", "--top", "2")
    lines = out.splitlines()
    assert code == 0 and lines[0] == "a [MASK]d [MASK]" and len(lines) == 3
    for place, line in zip((2, 4), lines[1:], strict=True):
        share, token = shares[place].topk(2)
        want = [f"{names[int(t)].removeprefix('##')} {100 * float(s):.0f} %" for s, t in zip(share, token, strict=True)]
        assert [part.strip().removeprefix("##") for part in line.split(",")] == want
    monkeypatch.setattr("sys.stdin", io.StringIO("\na [MASK]\n"))
    assert call(capsys, "--load", str(tmp_path / "run"))[1].startswith("a [MASK]\n")


def test_the_baseline_is_counted_in_the_runs_validation_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_of(tmp_path, "bert")
    save(tmp_path / "run", config)
    tokenizer = BertWordPieceTokenizer(tmp_path / "vocab.txt", lowercase=True)
    valid = build_bert_datasets(config.data, seq_length=12, seed=config.batch.seed, tokenizer=tokenizer, num_samples=(0, 24, 0)).valid
    assert valid is not None
    masked = [int(t) for i in range(3 * 2 * 4) for t, m in zip(valid[i]["labels"], valid[i]["loss_mask"], strict=True) if m > 0]
    most = max(set(masked), key=lambda token: (masked.count(token), -token))
    code, out, _ = call(capsys, "--load", str(tmp_path / "run"), "--baseline")
    assert code == 0 and out == f"{100 * masked.count(most) / len(masked):.1f} % of the masked tokens ('{tokenizer.decode([most])}')\n"


def test_mistakes_are_one_message_and_a_code(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "run", config_of(tmp_path, "bert"))
    run = ("--load", str(tmp_path / "run"))
    for words, code, says in (
        ((*run, "--text", "a b"), 2, "nothing is masked in 'a b'"),
        ((*run, "--text", "[MASK]" * 11), 2, "has 13 tokens, the model has 12 positions"),
        ((*run, "--text", "[MASK]", "--top", "0"), 2, "--top (0)"),
        ((*run, "--text", "[MASK]", "--tokenizer-model", "/nowhere/vocab.txt"), 4, "/nowhere/vocab.txt"),
        (("--load", str(tmp_path / "absent"), "--text", "[MASK]"), 3, "there is no"),
    ):
        found, out, err = call(capsys, *words)
        assert (found, out) == (code, "") and says in err and "Traceback" not in err, err
    monkeypatch.setattr("sys.stdin", io.StringIO(" \n"))
    assert call(capsys, *run)[0] == 4


def test_it_is_one_process() -> None:
    with pytest.raises(ConfigError, match="is one process, and 2 were started"):
        fill_mask.run(fill_mask.parse(["--load", "nowhere"]), Launch(0, 0, 2, 2, 0))


def test_each_tool_names_the_one_for_the_other_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "bert", config_of(tmp_path, "bert"))
    save(tmp_path / "gpt", config_of(tmp_path, "gpt"))
    save(tmp_path / "classifier", config_of(tmp_path, "bert"), classes=3)
    for run, says in (("gpt", "megatron-sp generate"), ("classifier", "give the BERT that it was made from")):
        code, _, err = call(capsys, "--load", str(tmp_path / run), "--text", "[MASK]")
        assert code == 3 and says in err
    for run, says in (("bert", "megatron-sp fill-mask"), ("classifier", "megatron-sp finetune")):
        code = generate.main(["--load", str(tmp_path / run), "--device", "cpu", "--prompt", "a"])
        out, err = capsys.readouterr()
        assert (code, out) == (3, "") and says in err and "Traceback" not in err
