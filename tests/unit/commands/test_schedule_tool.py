"""The command ``megatron-sp schedule``: models from a config.json or a function, all actions, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from megatron_sp.commands.cli import main
from megatron_sp.utils.errors import EXIT_CONFIG, EXIT_NUMERICS

PLAN = """schema: 1
lines:
  - {on: "0", do: column}
  - {on: "2", do: row, reduce: all_reduce}
"""
FACTORY = """
import torch
from torch import nn
def make():
    model = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4))
    return model, {"input": torch.linspace(-1, 1, 24).view(2, 3, 4)}
def nothing():
    return None
def fails():
    raise KeyError("mine")
"""


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("plan.yaml").write_text(PLAN)
    Path("wrong.yaml").write_text(PLAN.replace("do: column", "do: shard, tensor: weight, axis: 0"))
    Path("mine.py").write_text(FACTORY)
    Path("broken.py").write_text("def make(:\n")
    return tmp_path


def call(*words: str, factory: str = "mine.py:make") -> int:
    return main(["schedule", *words, "--factory", factory, "--tp", "2"])


def test_actions_on_a_model_of_ones_own(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("check", "plan.yaml") == 0
    assert "2 lines on Sequential, tp 2, sp 1, dp 1: the lines fit the model" in capsys.readouterr().out
    assert call("show", "plan.yaml", "--html", "page.html", "--save", "again.yaml") == 0
    assert "bias [6 -> 3]" in capsys.readouterr().out
    assert "Linear" in Path("page.html").read_text() and "do: row" in Path("again.yaml").read_text()
    assert call("explain", "plan.yaml", "2") == 0
    assert "row(reduce='all_reduce') at plan.yaml:4" in capsys.readouterr().out
    assert call("show", "plan.yaml", "--json") == 0
    assert json.loads(capsys.readouterr().out)["parameters"] == 58
    assert call("check", "wrong.yaml") == EXIT_CONFIG
    assert "wrong.yaml:3" in capsys.readouterr().err


def test_verify_starts_its_own_ranks(files: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert call("verify", "plan.yaml") == 0
    assert "Sequential over tp 2, sp 1, dp 1: equal: 6 comparisons" in capfd.readouterr().out
    assert call("verify", "wrong.yaml") == EXIT_CONFIG
    assert capfd.readouterr().err.count("error: ") == 1, "one rank says it"


@pytest.mark.long
def test_verify_finds_a_gradient_that_nobody_sums(files: Path) -> None:
    Path("mine.py").write_text(FACTORY.replace("Sequential(", "Sequential(nn.Linear(4, 4), "))
    Path("gap.yaml").write_text(PLAN.replace('"2"', '"3"').replace('"0", do: column', '"1", do: column, input: prepared'))
    assert call("verify", "gap.yaml", "--json") in (EXIT_CONFIG, EXIT_NUMERICS), "by its lines, or by its numbers"


def test_a_model_from_a_config(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers", reason="transformers (Python >= 3.11) is not installed")
    sizes = {"num_hidden_layers": 9, "hidden_size": 24, "num_attention_heads": 4, "intermediate_size": 20, "vocab_size": 37}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "auto_map": {"AutoModel": "evil.Evil"}, **sizes}
    Path("config.json").write_text(json.dumps(config))
    words = ["--model", str(files), "--tp", "2", "--set", "num_hidden_layers=2"]
    assert main(["schedule", "show", "auto", *words, "--save", "plan.yaml", "--cost", "2", "8"]) == 0
    out = capsys.readouterr().out
    assert "0-1  x 2" in out and "sent by a rank in a step" in out
    assert main(["schedule", "check", "plan.yaml", *words]) == 0
    for change, more, said in (
        ({"model_type": "mystery"}, [], "code that comes with a model is never run"),
        ({"architectures": ["os"]}, [], "is not a model of transformers"),
        ({"architectures": None}, [], "config.json names no class (architectures)"),
        ({}, ["--class", "AutoModel"], "is not a model of transformers"),
        ({}, ["--set", "hidden=3"], "with a KEY of config.json"),
        ({"model_type": "bert"}, ["--class", "BertModel"], "for models of type 'llama'"),
    ):  # type: tuple[dict[str, object], list[str], str]
        Path("config.json").write_text(json.dumps({**config, **change}))
        assert main(["schedule", "check", "plan.yaml", *words, *more]) == EXIT_CONFIG
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(("words", "said"), [
    (["--factory", "mine.py:absent"], "has no function absent"), (["--factory", "mine.py:nothing"], "returned NoneType"),
    (["--factory", "absent.py:make"], "there is no file absent.py"),
    (["--factory", "no_such_module:make"], "looked for from here"), (["--factory", "mine"], "want MODULE:FUNCTION"),
    (["--factory", "mine.py:fails"], "mine.py:fails: the function fails at "),
    (["--factory", "broken.py:make"], "broken.py:1: SyntaxError"),
    (["--factory", "mine.py:make", "--set", "a=1"], "with --factory your function decides"),
    (["--factory", "mine.py:make", "--seq-parallel"], "is for the preset"), (["--model", "absent"], "is a folder on this machine"),
    (["--model", "plan.yaml"], "is not the config.json of a model"),
])  # fmt: skip
def test_what_is_refused(files: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    assert main(["schedule", "check", "plan.yaml", *words]) == EXIT_CONFIG
    assert said in capsys.readouterr().err


LINE = "schema: 1\nlines:\n  - {%s}\n"


@pytest.mark.parametrize(("line", "said"), [
    ("on: '0', do: column, blocks: 1000000000000", "which cannot be 1000000000000 blocks"),
    ("on: '0', do: column, heads: 0", "heads must be a positive number, not 0"),
    ("on: '0', do: column, heads: -2", "heads must be a positive number, not -2"),
    ("on: '0', do: set, attribute: forward, value: 3", "'forward' is a method, a tensor or a module"),
    ("on: '0', do: set, attribute: weight, value: 3", "'weight' is a method, a tensor or a module"),
    ("on: '0', do: set, attribute: __class__, value: 3", "'__class__' is a method"),
    ("on: '0', do: set, attribute: in_features, value: 3, divide: tp", "wants a value, or divide=, and not both"),
    ("on: '0', do: sum_gradients, names: [nope]", "0 has no parameter 'nope'"),
    ("on: '0', do: annotate, parameter: weight, key: data, value: 3", "every tensor has an attribute 'data'"),
    ("on: '0', do: ulysses, axis: sp", "ulysses is about the model (Sequential) as a whole, but is written on '0'"),
    ("on: '', do: zero, stage: 1, optimizer: {lr: fast}", "lr of the optimizer must be a number from 0 on, not 'fast'"),
    ("on: '', do: zero, stage: 1, optimizer: {lr: .nan}", "lr of the optimizer must be a number from 0 on, not nan"),
    ("on: '', do: zero, stage: 1, micro_batches: 0", "micro_batches must be a positive number, not 0"),
])  # fmt: skip
def test_lines_that_cannot_be(files: Path, capsys: pytest.CaptureFixture[str], line: str, said: str) -> None:
    Path("plan.yaml").write_text(LINE % line)
    assert call("check", "plan.yaml") == EXIT_CONFIG
    err = capsys.readouterr().err
    assert said in err and err.startswith("error: ") and len(err.splitlines()) == 1


def test_a_batch_is_made_from_a_signature() -> None:
    from megatron_sp.schedule.verify.proof import example

    assert example(nn.Linear(1, 1)) is None

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = type("Config", (), {"vocab_size": 9, "pad_token_id": 0})

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            return input_ids

    batch = example(Words(), rows=3, tokens=8)
    assert batch["attention_mask"].sum(1).tolist() == [8, 5, 2] and (batch["input_ids"] * (1 - batch["attention_mask"])).sum() == 0
