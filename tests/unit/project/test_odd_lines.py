"""Odd command lines of every program: a message and an exit code, never a traceback, never a hang.

``OddLines(seed, folder)`` makes lines out of sound ones by a few mutations: values of other kinds, huge, negative, empty
or not numbers at all, names and files from elsewhere, flags twice, cut off, out of place. ``attempt`` runs one in a
forked child. Another seed: ``ODD_LINES_SEED=5 pytest -m long tests/unit/project/test_odd_lines.py``.
"""

from __future__ import annotations

import importlib
import os
import random
import re
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from support.paths import ROOT

from megatron_sp.commands import cli
from megatron_sp.commands.pretrain import parse_config
from megatron_sp.config.flags.foreign_flags import offered
from megatron_sp.data.writer import IndexedDatasetWriter
from megatron_sp.tasks.gpt import GPT
from megatron_sp.training.loop import pretrain
from megatron_sp.utils.entry_point import code_of

SEED = int(os.environ.get("ODD_LINES_SEED", "1"))
CODES = frozenset([0, 2, 3, 4, 5, 6, 7, 8, 75, 130])
PATIENCE = 300.0  # seconds after which a line counts as hanging; the slowest takes a few


class Line(NamedTuple):
    """A program and its words."""

    program: str
    words: list[str]

    def __str__(self) -> str:
        return f"{self.program} {shlex.join(word if len(word) < 80 else word[:40] + '...' for word in self.words)}"


class End(NamedTuple):
    """How a line ended: exit code (negative: a signal; None: it hung), and all that it said."""

    code: int | None
    text: str

    def is_wrong(self, line: Line) -> str:
        """What is wrong with it, or ""."""
        if self.code is None:
            return "it hangs"
        if "Traceback (most recent call last)" in self.text:
            return "a traceback"
        allowed = CODES | ({1} if "diff" in line.words else set())
        if self.code not in allowed:
            return f"exit code {self.code}"
        return "nothing is said" if self.code not in (0, 130) and not self.text.strip() else ""


# ---------------------------------------------------------------------------------------------------------------- programs

_SHAPE = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --lr 1e-3 --train-iters 4 --device cpu --eval-iters 1"
_SOUND: dict[str, list[str]] = {
    "pretrain_gpt.py": [f"{_SHAPE} --mock-data --vocab-size 60 --dry-run",
        f"{_SHAPE} --data-path DATA --vocab-size 60 --split 90,5,5 --dry-run json --world-size 4 --tp-size 2 --sequence-parallel",
        f"{_SHAPE} --mock-data --tokenizer-type ByteTokenizer --bf16 --world-size 8 --sp-size 2 --zero-stage 3 --dry-run",
        f"{_SHAPE} --mock-data --vocab-size 60 --save OUT --load OUT --dry-run --config YAML",
        f"{_SHAPE} --mock-data --vocab-size 60 --deepspeed --deepspeed_config JSON --dry-run --fp16",
        f"{_SHAPE} --mock-data --vocab-size 60 --rampup-batch-size 2 2 8 --global-batch-size 8 --lr-decay-style cosine --print-config",
        "--preset gpt2-124m --mock-data --train-iters 5 --lr 1e-4 --dry-run --world-size 8 --seq-length 64",
        f"{_SHAPE} --mock-data --vocab-size 60 --load RUN --save OUT --use-checkpoint-args --dry-run"],
    "pretrain_bert.py": [f"{_SHAPE} --mock-data --vocab-size 60 --dry-run --world-size 2",
        f"{_SHAPE} --mock-data --vocab-file FILE --mask-prob 0.15 --short-seq-prob 0.1 --dry-run",
        f"{_SHAPE} --mock-data --vocab-size 60 --bert-no-binary-head --bert-pack-sequences --num-tokentypes 0 --dry-run"],
    "train": ["--mock-data --vocab-size 60 --save OUT --load OUT --save-interval 1 --micro-batch-size 2 --global-batch-size 4",
        "--data-path DATA --vocab-size 60 --split 1 --num-workers 1 --bf16 --recompute-granularity full --lr-decay-style cosine",
        "--mock-data --tokenizer-type ByteTokenizer --swiglu --normalization RMSNorm --position-embedding-type rope --num-query-groups 2",
        "--mock-data --vocab-size 60 --load RUN --save OUT --finetune --log-params-norm --optimizer sgd --clip-grad 0.5"],
    "megatron-sp": ["plan --gpus 2 --gpu h100-80g --tp-size 1 --micro-batch-size 1 --num-layers 4 --hidden-size 256 --num-attention-heads 4"
        " --seq-length 512 --vocab-size 100 --top 2",
        "plan --gpus 4 --nodes 2 --link ib-400g --gpu a100-80g --zero-stage 1 --micro-batch-size 1 --num-layers 4"
        " --hidden-size 256 --num-attention-heads 4 --seq-length 512" " --vocab-size 100 --json --global-batch-size 16",
        "data verify DATA --vocab-size 60", "data section-task --corpus JSONL --output OUT --classes 2 --valid 3",
        "presets --json", "ckpt ls RUN", "ckpt show RUN --json", "ckpt verify RUN", "ckpt diff RUN RUN",
        "ckpt prune RUN --keep-last 2 --dry-run", "convert --from auto --input RUN --output OUT --to hf",
        "convert --from hf --input DIR --output OUT --to megatron_sp --vocab-size 60",
        "schedule show auto --model DIR --cost 2 8", "schedule check FILE --model DIR", "ckpt merge RUN --output OUT"],
    "generate.py": ["--load RUN --prompt '1 2 3' --max-new-tokens 2 --temperature 0.5"
        " --top-k 3 --seed 3 --num-samples 1 --num-threads 1 --device cpu"],
    "evaluate.py": ["--load RUN --data-path DATA --seq-length 16 --stride 8 --limit 2 --device cpu",
        "--load RUN --text INTEGERS --limit 1 --batch-size 2 --num-threads 1 --device cpu"],
    "fill_mask.py": ["--load RUN --text [MASK] --top 3 --device cpu"],
    "serve.py": ["--load NOTHING --port 8000 --max-batch-size 2 --max-queue 3 --request-timeout 5"],
    "finetune_classifier.py": [f"--task tsv --train-data FILE --valid-data FILE --epochs 1 {_SHAPE} --vocab-size 60 --dry-run"],
    "report.py": ["RUN --output OUT.html"], "summarize_run.py": ["RUN"], "plot_metrics.py": ["RUN --output OUT.png"],
    "train_tokenizer.py": ["--input JSONL --output OUT --vocab-size 300 --sample-bytes 100000",
        "--input JSONL --output OUT --vocab-size 60 --type wordpiece"],
    "preprocess_data.py": ["--input JSONL --output-prefix OUT --tokenizer-type ByteTokenizer --append-eod --workers 1"],
}  # fmt: skip
MODULES = {
    "generate.py": "generate", "evaluate.py": "evaluate", "fill_mask.py": "fill_mask", "serve.py": "serve",
    "finetune_classifier.py": "finetune", "report.py": "report", "summarize_run.py": "summarize", "plot_metrics.py": "plot",
    "train_tokenizer.py": "tokenizer", "preprocess_data.py": "preprocess",
}  # fmt: skip
_WEIGHTS = {"pretrain_gpt.py": 40, "pretrain_bert.py": 10, "megatron-sp": 25, "train": 10}
_LAST = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --lr 1e-3 --train-iters 2 --eval-iters 1 --num-threads 1"
    " --device cpu --peak-tflops 1 --log-interval 1"
)
"""What a line that trains ends with, so that it ends."""


@cache
def main_of(program: str) -> Callable[[list[str]], Any]:
    """What takes the words of a program and returns or raises its exit code."""
    if program.startswith("pretrain_"):
        return lambda words: parse_config(words, prog=program, family=program[9:-3])
    if program == "train":
        return lambda words: pretrain(parse_config(words, prog=program, family="gpt"), GPT)
    if program == "megatron-sp":
        return cli.main
    module = importlib.import_module(f"megatron_sp.commands.{MODULES[program]}")
    return lambda words: code_of(lambda: module.main(words, program))


@cache
def flags_of(program: str) -> tuple[str, ...]:
    """Flags that it knows, and for a training some that it does not."""
    if program.startswith("pretrain_") or program in ("finetune_classifier.py", "train"):
        return tuple(f"--{name}" for name in offered() if name not in ("help", "verify-parallelism"))
    folders = {"megatron-sp": ("commands/ckpt", "convert", "commands/schedule", "planner")}.get(program, ())
    files = [path for folder in folders for path in (ROOT / "megatron_sp" / folder).glob("*.py")]
    if program != "megatron-sp":
        files = [ROOT / f"megatron_sp/commands/{MODULES[program]}.py", ROOT / "megatron_sp/config/flags/inference_flags.py"]
    found = {flag for path in files for flag in re.findall(r'"(--[a-z][a-z0-9-]+)"', path.read_text(encoding="utf-8"))}
    return tuple(sorted(found | {"--json", "--output", "--version"}))


# ------------------------------------------------------------------------------------------------------------------ values

_NUMBERS = (
    "0", "-1", "1", "2", "3", "7", "1e300", "-1e300", "1e-300", "nan", "inf", "-inf", "1e20", "99999999999", "2147483648", "1000000",
    "18446744073709551616", "9" * 30, "9" * 5000, "0x10", "1_000", "1__0", "\u0663", "\u00bd", "1.5", ".5", "1e", "--", "-", "+7", "1e999",
)  # fmt: skip
_TEXTS = (
    "", " ", "\t", "a" * 300, "x/" * 3000, "\u4e2d\u6587" * 90, "\x1b[31m", "\U0001f600", "true", "None", "1,2", "1 2", "'99,1,0'", "$HOME",
    "..", "~", "*", "a\nb", "\udcff", "%s%n", "{}", "[1]", "flash", "adam", "RMSNorm", "rope", "none", "auto", "0.5 x 0.5 y", "1.0", "a=b",
)  # fmt: skip
_TREES: tuple[Any, ...] = (
    "", "{}", "[]", "null", "3", '"text"', "{" * 200, "[" * 5000, "a: b: c", "- a\n- b", "lr: [1, {a: 2}]",
    "lr: !!python/object:os.system x", "a: &a [1]\nb: [*a, *a]", "lr: 1e400\nnum-layers: .inf", "num_layers: -5",
    "model:\n  num_layers: {}\n", "config: config.yaml", '{"zero_optimization": []}', '{"train_batch_size": 1e400}',
    '{"fp16": {"enabled": "yes"}}', '{"a": 1, "a": 2}', '{"bf16": NaN}', '{"zero_optimization": {"stage": 99999999999999999999}}',
    '{"optimizer": {"type": "Adam", "params": {"lr": "x"}}}', "\ufeff{}", "\x00", '{"train_micro_batch_size_per_gpu": -1}',
    '{"fp16": {"enabled": true, "initial_scale_power": 1e9}}', '{"scheduler": {"type": "WarmupLR"}}',
    '{"gradient_accumulation_steps": 1e18}', '{"gradient_clipping": -1e300}', 'save: "a\\0b"', "data-path: []", "seed: 1.0", "lr: ~",
    b"\xff\xfe",
)  # fmt: skip


class OddLines:
    """An endless supply, the same for the same seed; ``folder`` gets the files, ``run`` is one with a checkpoint."""

    def __init__(self, seed: int, folder: Path, run: Path | None = None) -> None:
        self._random = random.Random(seed)
        self.folder = folder
        self._trees: list[str] = []
        self._count = 0
        for number, tree in enumerate(_TREES):
            path = folder / f"tree{number}"
            path.write_bytes(tree if isinstance(tree, bytes) else tree.encode("utf-8", "surrogatepass"))
            self._trees.append(str(path))
        (folder / "dir").mkdir()
        (folder / "empty").mkdir()
        (folder / "lines.jsonl").write_text('{"text": "some words of a text"}\n' * 50)
        (folder / "file.txt").write_text("label\ttext\na\tsome words\nb\tother words\n")
        (folder / "integers.txt").write_text("1 2 3 4 5 6 7 8 9 10\n" * 9)
        (folder / "ok.yaml").write_text("lr: 1e-3\nseed: 3\n")
        (folder / "ok.json").write_text('{"train_micro_batch_size_per_gpu": 1}')
        _write_data(folder / "data")
        self._paths = {
            "DATA": "data", "YAML": "ok.yaml", "JSON": "ok.json", "FILE": "file.txt", "DIR": "dir", "JSONL": "lines.jsonl", "OUT": "out",
            "NOTHING": "nothing", "INTEGERS": "integers.txt",
        }  # fmt: skip
        self._paths = {name: str(folder / path) for name, path in self._paths.items()}
        self._paths["RUN"] = str(run or folder / "empty")

    def __iter__(self) -> Iterator[Line]:
        while True:
            yield self._line()

    def _line(self) -> Line:
        pick = self._random
        self._count += 1
        self._paths["OUT"] = str(self.folder / f"out{self._count}")
        program = pick.choices(list(_SOUND), [_WEIGHTS.get(name, 4) for name in _SOUND])[0]
        words = [self._placed(word) for word in shlex.split(pick.choice(_SOUND[program]))]
        for _ in range(pick.choice((1, 1, 2, 2, 3, 4))):
            words = self._mutated(program, words)
        if program == "train":
            return Line(program, [*words, *_LAST.split()])
        is_safe = program.startswith("pretrain_") or program == "finetune_classifier.py"
        return Line(program, [*words, "--dry-run"] if is_safe and pick.random() < 0.7 else words)

    def _placed(self, word: str) -> str:
        for name, path in self._paths.items():
            word = re.sub(rf"\b{name}\b", path, word)
        return word

    def _mutated(self, program: str, words: list[str]) -> list[str]:
        pick, words = self._random, list(words)
        places = [i for i, word in enumerate(words) if not word.startswith("--")]
        kind = pick.choices(("value", "flag", "twice", "cut", "drop", "swap", "stray", "glued"), (40, 30, 5, 5, 8, 4, 4, 4))[0]
        if kind == "value" and places:
            words[pick.choice(places)] = self._value()
        elif kind == "flag":
            words.append(pick.choice(flags_of(program)))
            words += [] if pick.random() < 0.25 else [self._value() for _ in range(pick.choice((1, 1, 1, 2)))]
        elif kind == "twice" and words:
            words += words[pick.randrange(len(words)) :][:2]
        elif kind == "cut" and words:
            words = words[: pick.randrange(len(words))]
        elif kind == "drop" and words:
            del words[pick.randrange(len(words))]
        elif kind == "swap" and len(words) > 1:
            i, j = pick.sample(range(len(words)), 2)
            words[i], words[j] = words[j], words[i]
        elif kind == "glued":
            words.append(f"{pick.choice(flags_of(program))}={self._value()}")
        else:
            words.insert(pick.randrange(len(words) + 1), self._value())
        return words

    def _value(self) -> str:
        pick = self._random
        pool = pick.choices((_NUMBERS, _TEXTS, self._trees, tuple(self._paths.values())), (50, 25, 12, 13))[0]
        return pick.choice(pool)


def _write_data(prefix: Path) -> None:
    with IndexedDatasetWriter(prefix, dtype=np.uint16) as writer:
        for length in (40, 7, 90):
            writer.add_document(np.arange(length) % 60)


# ------------------------------------------------------------------------------------------------------------------ trying


def load_everything() -> None:
    """What programs import when they need it, once, so that no child does it again."""
    import megatron_sp.commands.ckpt.tensors
    import megatron_sp.convert.command
    import megatron_sp.inference.team
    import megatron_sp.planner.command
    import megatron_sp.report  # noqa: F401

    torch.set_num_threads(1)
    for program in _SOUND:
        main_of(program)


def attempt(line: Line, folder: Path) -> End:
    """Run a line in a forked child, in a folder of its own."""
    main = main_of(line.program)
    log = folder / "said"
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        _in_child(main, line, folder, log)
    deadline = time.monotonic() + PATIENCE
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        if time.monotonic() > deadline:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return End(None, log.read_text(errors="replace"))
        time.sleep(0.002)
    return End(os.waitstatus_to_exitcode(status), log.read_text(errors="replace"))


def _in_child(main: Callable[[list[str]], Any], line: Line, folder: Path, log: Path) -> None:
    """As the interpreter would end the program; never returns."""
    code = 1
    try:
        os.setsid()
        (folder / "here").mkdir(exist_ok=True)
        os.chdir(folder / "here")
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "PYTEST_CURRENT_TEST"):
            os.environ.pop(name, None)
        os.environ["COLUMNS"] = "100"
        with open(os.devnull, "rb") as nothing, open(log, "wb") as said:
            os.dup2(nothing.fileno(), 0)
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
        sys.stdin, sys.stdout = open(0), open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", closefd=False, errors="backslashreplace")  # noqa: SIM115
        sys.argv = [line.program, *line.words]
        result = main(list(line.words))
        code = result if isinstance(result, int) else 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code & 255)


def wrong_of(number: int, folder: Path, run: Path | None = None) -> list[str]:
    load_everything()
    lines = zip(range(number), OddLines(SEED, folder, run), strict=False)
    ends = [(line, attempt(line, folder)) for _, line in lines]
    return [f"{end.is_wrong(line)}: {line}\n{end.text[-600:]}" for line, end in ends if end.is_wrong(line)]


def test_thirty_lines(tmp_path: Path) -> None:
    assert wrong_of(30, tmp_path) == []


@pytest.mark.long
def test_a_thousand_lines_with_a_run_to_look_at(tmp_path: Path) -> None:
    run, words = tmp_path / "run", "--mock-data --vocab-size 60 --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32"
    made = attempt(Line("train", [*words.split(), "--train-iters", "2", "--lr", "1", "--device", "cpu", "--save", str(run)]), tmp_path)
    assert made.code == 0, made.text
    assert wrong_of(1000, tmp_path, run) == []
