"""The wheel, installed into an empty environment away from the checkout: it trains, generates, converts and serves by itself."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import site
import subprocess
import sys
import sysconfig
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.paths import ROOT
from support.waiting import PATIENCE_S, wait_until

import megatron_sp

TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 --lr 1e-3 --lr-decay-style constant"
    " --device cpu --num-threads 1 --peak-tflops 1 --eval-iters 1 --log-interval 1 --tokenizer-type ByteTokenizer"
    " --data-path corpus_text_document --split 90,10,0 --save run"
)
# several commands, one after the other, in one interpreter: each would spend most of its time on importing torch
COMMANDS = "import json, sys; from megatron_sp.commands.cli import main; sys.exit(any(main(words) for words in json.loads(sys.argv[1])))"

pytestmark = [pytest.mark.torchrun, pytest.mark.slow]


class Installed:
    """An environment that has the wheel and what it depends on, and nothing of the checkout."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.python, self.command = folder / "away", folder / "env/bin/python", folder / "env/bin/megatron-sp"
        self.folder.mkdir()

    def environment(self) -> dict[str, str]:
        return {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")} | {"OMP_NUM_THREADS": "1"}

    def run(self, *words: object) -> str:
        done = subprocess.run(
            list(map(str, words)), cwd=self.folder, env=self.environment(), capture_output=True, text=True, timeout=2 * PATIENCE_S
        )
        assert done.returncode == 0, f"{words}\n{done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def tools(self, *lines: str) -> str:
        return self.run(self.python, "-c", COMMANDS, json.dumps([line.split() for line in lines]))


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # a build leaves files beside the sources
    source.mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "megatron_sp", source / "megatron_sp", ignore=shutil.ignore_patterns("__pycache__"))
    env, pip = folder / "env", [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    for words in (
        [*pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, source],
        [sys.executable, "-m", "venv", "--without-pip", env],
    ):
        done = subprocess.run(list(map(str, words)), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    assert wheel.name.startswith(f"megatron_sp-{megatron_sp.__version__}-py3")
    done = subprocess.run(
        [*pip, f"--python={env}/bin/python", "install", "--quiet", "--no-deps", "--no-index", str(wheel)], capture_output=True
    )
    assert done.returncode == 0, done.stderr
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(env), "platbase": str(env)}))
    # what it depends on is that of this environment, by its folder alone: the .pth file there that leads to the
    # checkout does not count
    (packages / "others.pth").write_text("\n".join({sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *_torch_folder()}))
    return Installed(folder)


def _torch_folder() -> set[str]:
    import torch

    folder = str(Path(torch.__file__).parents[1])
    return {folder} if folder in [*site.getsitepackages(), *sys.path] else set()


def test_it_is_the_wheel_and_not_the_checkout(installed: Installed) -> None:
    where = installed.run(installed.python, "-c", "import megatron_sp; print(megatron_sp.__file__)")
    assert str(installed.folder.parent / "env") in where
    assert installed.run(installed.command, "--version").strip() == f"megatron-sp {megatron_sp.__version__}"


@pytest.fixture(scope="module")
def trained(installed: Installed) -> Installed:
    """A GPT on text, two processes: data, tokenizer-free, all by subcommands."""
    installed.run(installed.command, "data", "corpus", "--output", "all.jsonl", "--max-bytes", 1_000_000)
    lines = (installed.folder / "all.jsonl").read_text().splitlines(keepends=True)
    (installed.folder / "corpus.jsonl").write_text("".join(line for line in lines if len(line) < 5000))
    said = installed.tools(
        "preprocess --input corpus.jsonl --output-prefix corpus --tokenizer-type ByteTokenizer --append-eod",
        "data verify corpus_text_document",
    )
    assert "sound:" in said
    flags = [*TINY.split(), "--train-iters", 4, "--save-interval", 2]
    torchrun = [installed.python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "-m", "megatron_sp"]
    said = installed.run(*torchrun, "pretrain", "gpt", *flags, "--sequence-parallel-size", 2, "--sp-overlap-comm", "--zero-stage", 1)
    assert "step 4/4" in said
    assert json.loads((installed.folder / "run/run_status.json").read_text())["status"] == "done"
    return installed


def test_it_trains_and_resumes_alone(trained: Installed) -> None:
    words = [*TINY.split(), "--train-iters", 5, "--auto-resume", "--override-opt-param-scheduler"]
    assert "step 5/5" in trained.run(trained.command, "pretrain", "gpt", *words)


def test_it_generates_evaluates_and_converts(trained: Installed) -> None:
    load = "--load run --device cpu --num-threads 1"
    said = trained.tools(
        f"generate {load} --prompt def --max-new-tokens 4 --greedy", f"evaluate {load} --data-path corpus_text_document --limit 2",
        "convert --from megatron_sp --input run --to hf --output exported", "ckpt verify run", "report run -o report.html", "summarize run",
    )  # fmt: skip
    assert all(word in said for word in ("def", "perplexity", "checkpoints", "steps"))
    assert (trained.folder / "exported/config.json").is_file() and "</html>" in (trained.folder / "report.html").read_text()


@contextlib.contextmanager
def served(installed: Installed) -> Iterator[int]:
    output = installed.folder / "serve.txt"
    words = [str(installed.command), "serve", "--load", "run", "--device", "cpu", "--port", "0", "--num-threads", "1"]
    with open(output, "w") as file:
        process = subprocess.Popen(words, cwd=installed.folder, env=installed.environment(), stdout=file, stderr=subprocess.STDOUT)

    def port() -> int:
        found = re.search(r"serving '\w+' at http://127\.0\.0\.1:(\d+)/", output.read_text())
        return int(found.group(1)) if found else 0

    try:
        wait_until(lambda: port() or process.poll() is not None)
        assert port(), output.read_text()
        yield port()
    finally:
        process.send_signal(signal.SIGTERM)
        code = process.wait(PATIENCE_S)
    assert code == 0, output.read_text()


def test_it_serves(trained: Installed) -> None:
    pytest.importorskip("starlette")
    with served(trained) as port:
        body = json.dumps({"prompt": "def", "max_tokens": 3}).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"})
        answer = json.loads(urllib.request.urlopen(request, timeout=PATIENCE_S).read())
    assert 1 <= answer["usage"]["completion_tokens"] <= 3  # what is drawn may be the end of a document
