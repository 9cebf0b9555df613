"""The commands of the README do what it says: the quickstart, shortened, and the block on one's own text, with fewer steps."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from support.paths import ROOT
from support.training import gpt, train
from support.waiting import PATIENCE_S

from megatron_sp.utils.run_log import read_records

# the scripts use .venv of the repository; the tests may run with another interpreter
needs_venv = pytest.mark.skipif(
    not (ROOT / ".venv/bin/python").exists(), reason="bash scripts/setup_env.sh makes the .venv that scripts use"
)


def run(command: str, cwd: Path, **variables: str) -> str:
    """Run a command of the shell; its output, which is in the message if it fails."""
    result = subprocess.run(
        ["bash", "-c", command], cwd=cwd, env={**os.environ, **variables}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=2 * PATIENCE_S,
    )  # fmt: skip
    assert result.returncode == 0, f"{command}\n{result.stdout[-4000:]}"
    return result.stdout


@pytest.mark.torchrun
@pytest.mark.slow
@needs_venv
def test_quickstart_from_text_to_summary_and_again(tmp_path: Path) -> None:
    """From nothing, with a tenth of the text and few steps: what it learns is not to be seen here."""
    variables = {"QUICKSTART_OUT": str(tmp_path), "QUICKSTART_STEPS": "8", "QUICKSTART_BYTES": "1000000"}
    first = run("bash scripts/quickstart.sh", ROOT, **variables)
    records, notes = read_records(tmp_path / "gpt")
    starts = [r["step"] for r in records if r["kind"] == "start"]
    assert starts == [0, 4], "it was killed once, in step 5, and resumed"
    assert "Killed (SIGKILL) in step 5." in first
    assert [r["step"] for r in records if r["kind"] == "valid"][-1] == 8
    assert records[-1]["kind"] == "test" and not [n for n in notes if "not records" in n]
    assert json.loads((tmp_path / "gpt/run_status.json").read_text())["status"] == "done"
    assert "each sequence cut over 2 of them" in first, "two processes on a CPU"
    assert first.count("--sp-overlap-mode auto: ") == 1, "the choice of the first attempt is kept in the checkpoint"
    assert "</html>" in (tmp_path / "report.html").read_text()
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    for promised in ("tokens/s", "valid loss", "perplexity", "valid bits per byte", "knows nothing  6.9315, ln 1,024", "What next"):
        assert promised in first
    again = run("bash scripts/quickstart.sh", ROOT, **variables)
    assert "valid loss" in again and len(read_records(tmp_path / "gpt")[0]) <= len(records) + 3, "nothing was trained twice"


@pytest.mark.parametrize("words, variables, said", [
    ("", {"QUICKSTART_STEPS": "abc"}, "QUICKSTART_STEPS=abc must be a whole number, 1 or more"),
    ("", {"QUICKSTART_BYTES": "0"}, "QUICKSTART_BYTES=0 must be a whole number, 1 or more"),
    ("", {"QUICKSTART_STEP": "10"}, "QUICKSTART_STEP is unknown: there are QUICKSTART_STEPS, QUICKSTART_BYTES and QUICKSTART_OUT"),
    ("brt", {}, "unknown argument 'brt': expected gpt (the default) or bert"), ("gpt bert", {}, "one argument at most"),
])  # fmt: skip
def test_a_quickstart_that_cannot_be(words: str, variables: dict[str, str], said: str) -> None:
    """Before anything is installed or written."""
    done = subprocess.run(
        ["bash", "scripts/quickstart.sh", *words.split()], cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.startswith(f"error: {said}") and done.stderr.count("\n") == 1


def test_quickstart_help() -> None:
    done = subprocess.run(["bash", "scripts/quickstart.sh", "--help"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("From a clean clone") and done.stdout.rstrip().endswith("(runs/quickstart)")


@pytest.mark.long
@pytest.mark.torchrun
@pytest.mark.slow
@needs_venv
def test_quickstart_bert_from_text_to_summary(tmp_path: Path) -> None:
    """With a tenth of the text, a small vocabulary and few steps; that it learns is not to be seen here."""
    python = shlex.quote(str(ROOT / ".venv/bin/python"))
    corpus, vocab = (shlex.quote(str(tmp_path / name)) for name in ("corpus.jsonl", "vocab.txt"))
    run(f"{python} tools/make_corpus.py --output {corpus} --max-bytes 1500000", ROOT)
    lines = (tmp_path / "corpus.jsonl").read_text().splitlines(keepends=True)
    small = [line for line in lines if len(line) < 30_000]
    (tmp_path / "corpus.jsonl").write_text("".join(small[:150]))
    run(f"{python} tools/train_tokenizer.py --type wordpiece --vocab-size 600 --input {corpus} --output {vocab}", ROOT)
    variables = {"QUICKSTART_OUT": str(tmp_path), "QUICKSTART_STEPS": "8"}
    said = run("bash scripts/quickstart.sh bert", ROOT, **variables)
    records = read_records(tmp_path / "bert")[0]
    starts = [r["step"] for r in records if r["kind"] == "start"]
    assert starts == [0, 4], "it was killed once, in step 5, and resumed"
    assert "each sequence cut over 2 of them" in said
    for promised in ("valid lm accuracy", "always the most frequent token", "def __init__([MASK], name):"):
        assert promised in said, promised
    assert "</html>" in (tmp_path / "bert-report.html").read_text() and (tmp_path / "bert-loss.png").exists()
    assert not (tmp_path / "gpt").exists() and not (tmp_path / "killed").exists(), "the GPT's quickstart has its own places"


@pytest.mark.torchrun
@needs_venv
def test_training_on_own_text_as_the_readme_says(tmp_path: Path) -> None:
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    block = next(b for b in blocks if "corpus.jsonl" in b)
    shrunk = {
        "--vocab-size 1024": "--vocab-size 340", "--hidden-size 128": "--hidden-size 48", "--seq-length 256": "--seq-length 32",
        "--train-iters 1000": "--train-iters 4", "--log-interval 20": "--log-interval 1", "--save-interval 200": "--save-interval 2",
        "--eval-interval 200": "--eval-interval 2", "--eval-iters 4": "--eval-iters 1", "--prompt": "--max-new-tokens 5 --prompt",
    }  # fmt: skip
    for long, short in shrunk.items():
        assert long in block, f"the README no longer says {long}"
        block = block.replace(long, short)
    for name in (".venv", "tools", "scripts", "megatron_sp", "pretrain_gpt.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    words = [f"the {a} {b} of the {c}" for a in ("old", "new", "red") for b in ("house", "tree", "ship") for c in ("king", "sea", "town")]
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps({"text": ". ".join(words[i:] + words[:i])}) + "\n" for i in range(27)))
    (tmp_path / "data").mkdir()
    # launch.sh finds the repository by its own place, so the script is named by its path
    block = block.replace("pretrain_gpt.py", shlex.quote(str(ROOT / "pretrain_gpt.py")))
    output = run("set -e\n" + block, tmp_path)
    assert "step 4/4" in output and output.rstrip().splitlines()
    assert (tmp_path / "runs/mine/checkpoints/step-000004/MANIFEST.json").exists()


@pytest.mark.long
def test_the_layouts_of_the_page_have_the_same_losses(tmp_path: Path) -> None:
    """tp, sp, cp, tp and sp, and none: flags and numbers of processes are the block's, with a smaller model and without the launcher."""
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "docs/how-to/layouts.md").read_text(), flags=re.DOTALL)
    block = next(b for b in blocks if "runs/layout-both" in b)
    shrunk = {"--num-layers 4": "--num-layers 2", "--hidden-size 256": "--hidden-size 64", "--seq-length 512": "--seq-length 50",
              "--train-iters 20": "--train-iters 2", "--log-interval 5": "--log-interval 1"}  # fmt: skip
    for long, short in shrunk.items():
        assert long in block, f"the page no longer says {long}"
        block = block.replace(long, short)
    (flags,) = re.findall(r'^flags="(.*?)"', block, flags=re.DOTALL | re.MULTILINE)
    commands = re.findall(r"^bash scripts/launch.sh (\d+) pretrain_gpt.py \$flags (.*)$", block, flags=re.MULTILINE)
    said = ""
    for processes, own in commands:
        run_own = lambda words, own=own: gpt([*shlex.split(f"{flags} {own}"), "--device", "cpu", "--num-threads", "1"])
        said += train(tmp_path, ranks=int(processes), program=run_own).expect(0).text
    assert "sp 2" in said and "tp 2" in said and "cp 2" in said and len(commands) == block.count("scripts/launch.sh")
    losses = {
        name: [r["loss"] for r in read_records(tmp_path / f"runs/layout-{name}")[0] if r["kind"] == "train"]
        for name in ("dp", "sp", "cp", "tp", "both")
    }
    assert len(losses["dp"]) == 2
    for name, values in losses.items():
        assert values == pytest.approx(losses["dp"], rel=1e-5), name
