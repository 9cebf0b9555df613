"""tools/generate.py on real checkpoints: what it prints, what it reads, and how it ends."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import stored_models
from support.paths import ROOT

from megatron_sp.checkpoint.checkpointer import Checkpointer
from megatron_sp.checkpoint.pieces import GlobalTensor, Piece
from megatron_sp.commands import generate, serve
from megatron_sp.config.schema import Config, ModelConfig
from megatron_sp.inference.generation import Sampling, complete
from megatron_sp.inference.team import Team
from megatron_sp.models.gpt import GPTModel
from megatron_sp.utils.launch import Launch


@pytest.fixture
def byte_run(tmp_path: Path) -> tuple[Path, GPTModel]:
    return stored_models.byte_run(tmp_path)


def call(capsys: pytest.CaptureFixture[str], run: Path, *arguments: str) -> tuple[int, str, str]:
    code = generate.main(["--load", str(run), "--device", "cpu", *arguments])
    return code, *capsys.readouterr()


def expected(model: GPTModel, prompt: str, sampling: Sampling, count: int) -> str:
    ids = complete(model, [list(prompt.encode())], max_new_tokens=count, sampling=sampling, eod=256, vocab_size=257)[0][0]
    return prompt + bytes(i for i in ids if i != 256).decode("utf-8", errors="replace") + "\n"


def test_prints_what_the_model_generates(byte_run: tuple[Path, GPTModel], capsys: pytest.CaptureFixture[str]) -> None:
    run, model = byte_run
    code, out, err = call(capsys, run, "--prompt", "ab", "--max-new-tokens", "8", "--greedy")
    assert code == 0
    assert out == expected(model, "ab", Sampling(temperature=0), 8)
    assert "step-000002" in err and "8 tokens in" in err and "tokens/s" in err
    code, out, _ = call(capsys, run, "--prompt", "ab", "--max-new-tokens", "8", "--temperature", "0.7", "--top-k", "50", "--top-p", "0.9")
    assert out == expected(model, "ab", Sampling(0.7, 50, 0.9), 8)


def test_takes_the_step_that_is_asked_for(byte_run: tuple[Path, GPTModel], capsys: pytest.CaptureFixture[str]) -> None:
    run, model = byte_run
    first = GPTModel(model.config, model.kernels, seed=1, dtype=torch.float32)
    _, out, err = call(capsys, run, "--prompt", "ab", "--max-new-tokens", "8", "--greedy", "--ckpt-step", "1")
    assert out == expected(first, "ab", Sampling(temperature=0), 8) != expected(model, "ab", Sampling(temperature=0), 8)
    assert "step 1" in err


def test_several_prompts_and_samples_have_headings(
    byte_run: tuple[Path, GPTModel], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, _ = byte_run
    (tmp_path / "prompts.txt").write_text("ab\n\ncd\n")
    code, out, err = call(capsys, run, "--prompt-file", str(tmp_path / "prompts.txt"), "--max-new-tokens", "2", "--num-samples", "2")
    assert code == 0 and [f"--- {i} ---" in out for i in (1, 2, 3, 4, 5)] == [True] * 4 + [False]
    assert "8 tokens" in err


def test_together_prints_what_one_after_another_does(
    byte_run: tuple[Path, GPTModel], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts.txt").write_text("ab\nc\ndefg\n")
    words = ("--prompt-file", str(tmp_path / "prompts.txt"), "--num-samples", "2", "--stop", "a", "--dtype", "float64")
    code, alone, said = call(capsys, byte_run[0], *words)
    assert code == 0 and "at once" not in said
    for flags, rows in ((["--batch-generation"], 6), (["--batch-generation", "2"], 2)):  # no more rows than there are continuations
        code, out, err = call(capsys, byte_run[0], *words, *flags)
        assert (code, out) == (0, alone)
        assert f"up to {rows} at once: products of a batch round differently, so a token may differ" in err


def test_graphs_that_cannot_be_are_an_error(
    byte_run: tuple[Path, GPTModel], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = stored_models.byte_config()
    config.model.num_experts = 4
    stored_models.save(tmp_path / "experts", config, {1: GPTModel(config.model, config.kernels, seed=1, dtype=torch.float32)})
    ways_out = "or use --cuda-graphs auto or off"
    for tool, words in ((generate, ["--prompt", "a"]), (serve, [])):
        assert tool.main(["--load", str(byte_run[0]), "--device", "cpu", "--cuda-graphs", "on", *words]) == 2
        assert f"error: --cuda-graphs on cannot be: a CPU has no graphs; use a GPU, {ways_out}" in capsys.readouterr().err
        with monkeypatch.context() as patched:
            patched.setattr("torch.cuda.is_available", lambda: True)
            assert tool.main(["--load", str(tmp_path / "experts"), "--cuda-graphs", "on", *words]) == 2
        wanted = f"the host reads how many tokens each expert has (--num-experts); take a model without experts, {ways_out}"
        assert f"error: --cuda-graphs on cannot be: {wanted}" in capsys.readouterr().err


def test_reads_prompts_from_stdin_and_interactively(
    byte_run: tuple[Path, GPTModel], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, model = byte_run
    wanted = expected(model, "ab", Sampling(temperature=0), 3)
    monkeypatch.setattr("sys.stdin", io.StringIO("ab\n"))
    assert call(capsys, run, "--greedy", "--max-new-tokens", "3")[1] == wanted
    monkeypatch.setattr("sys.stdin", io.StringIO(f"\n{'x' * 25}\nab\n"))
    code, out, err = call(capsys, run, "--greedy", "--max-new-tokens", "3", "--interactive")
    assert (code, out) == (0, wanted)  # a prompt that is too long does not end the conversation
    assert "25 tokens" in err and err.count("> ") == 4


def test_says_that_the_context_is_full(byte_run: tuple[Path, GPTModel], capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = call(capsys, byte_run[0], "--prompt", "x" * 24, "--greedy")
    assert code == 0 and "context (24 positions" in err


def test_an_empty_prompt_starts_a_document(byte_run: tuple[Path, GPTModel], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, byte_run[0], "--prompt", "", "--max-new-tokens", "3", "--greedy")
    assert code == 0 and "tokens in" in err and out.endswith("\n")


@pytest.mark.parametrize(("arguments", "code", "message"), [
    (["--prompt", "x" * 25], 2, "shorten it by at least 1"),
    (["--prompt", "a", "--top-p", "0"], 2, "top_p (0.0) must be in (0, 1]"),
    (["--prompt", "a", "--max-new-tokens", "0"], 2, "--max-new-tokens (0)"),
    (["--prompt", "a", "--batch-generation", "0"], 2, "--batch-generation (0) must be at least 1"),
    (["--prompt", "a", "--num-threads", "-3"], 2, "--num-threads (-3) must be at least 1"),
    (["--prompt", "a", "--ckpt-step", "7"], 3, "step-000007"),
    (["--prompt-file", "/nowhere/prompts.txt"], 4, "/nowhere/prompts.txt cannot be read"),
    (["--prompt", "a", "--tokenizer-model", "/nowhere/spm.model"], 4, "/nowhere/spm.model"),
])  # fmt: skip
def test_mistakes_are_one_message_and_a_code(
    byte_run: tuple[Path, GPTModel], capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, message: str
) -> None:
    found, out, err = call(capsys, byte_run[0], *arguments)
    assert (found, out) == (code, "")
    assert message in err and "Traceback" not in err


def test_no_prompt_at_all_is_an_error(
    byte_run: tuple[Path, GPTModel], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("\n \n"))
    code, _, err = call(capsys, byte_run[0])
    assert code == 4 and "stdin holds no prompt" in err


def test_nothing_to_load_is_exit_code_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = call(capsys, tmp_path / "absent", "--prompt", "a")
    assert code == 3 and "there is no" in err


def test_a_damaged_shard_is_exit_code_3(byte_run: tuple[Path, GPTModel], capsys: pytest.CaptureFixture[str]) -> None:
    shard = next((byte_run[0] / "checkpoints" / "step-000002").glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    code, _, err = call(capsys, byte_run[0], "--prompt", "a")
    assert code == 3 and shard.name in err


def test_a_tokenizer_that_is_larger_than_the_model_is_exit_code_4(
    byte_run: tuple[Path, GPTModel], capsys: pytest.CaptureFixture[str]
) -> None:
    options = generate.parse(["--load", str(byte_run[0]), "--device", "cpu", "--prompt", "a"])
    model, tokenizer, _ = generate.load(options, Team(Launch(0, 0, 1, 1, 0), torch.device("cpu"), None))
    assert model.config.vocab_size == 259 and tokenizer.vocab_size == 257
    assert not any(p.requires_grad for p in model.parameters())
    assert torch.equal(model.embedding.word_embeddings.weight[259:], torch.zeros(384 - 259, 16))  # rows that pad the vocabulary
    config = Config()
    config.model = ModelConfig(num_layers=1, hidden_size=16, num_attention_heads=2, seq_length=24, vocab_size=100)
    config.data.tokenizer_type = "ByteTokenizer"
    small = GPTModel(config.model, config.kernels, seed=1, dtype=torch.float32)
    tensors = {}
    for name, parameter in small.named_parameters():
        valid = parameter.detach()[:100] if name == "embedding.word_embeddings.weight" else parameter.detach()
        tensors[name] = GlobalTensor(tuple(valid.shape), valid.dtype, [Piece((0,) * valid.ndim, valid)])
    checkpointer = Checkpointer(byte_run[0].parent / "small")
    checkpointer.prepare()
    checkpointer.save(1, tensors, {"config": config.to_dict()})
    code, _, err = call(capsys, byte_run[0].parent / "small", "--prompt", "a")
    assert code == 4 and "257 tokens" in err and "only 100" in err


def test_help_needs_no_torch() -> None:
    script = (
        "import sys, runpy; sys.argv = ['generate.py', '--help']; sys.path.insert(0, 'tools')\n"
        "try: runpy.run_path('tools/generate.py', run_name='__main__')\n"
        "except SystemExit as end: assert end.code == 0\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def test_closed_output_ends_quietly(byte_run: tuple[Path, GPTModel]) -> None:
    command = f"{sys.executable} tools/generate.py --load {byte_run[0]} --device cpu --num-threads 1 --prompt ab --num-samples 500"
    run = subprocess.run(["bash", "-c", f"set -o pipefail; {command} | head -1"], cwd=ROOT, capture_output=True, text=True)
    assert run.stdout == "--- 1 ---\n" and "Traceback" not in run.stderr and run.returncode == 141, json.dumps([run.returncode, run.stderr])


def test_output_that_cannot_show_a_letter_shows_a_question_mark(byte_run: tuple[Path, GPTModel]) -> None:
    command = [sys.executable, "tools/generate.py", "--load", str(byte_run[0]), "--device", "cpu", "--prompt", "h\u00e9", "--greedy"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, encoding="ascii", env=environment)
    assert run.returncode == 0 and run.stdout.startswith("h?"), json.dumps([run.returncode, run.stdout, run.stderr])
