"""Every kind of model through every format and back: the same bits, whatever the ranks are cut into."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from support.convert_models import MODELS, assert_equal, contents, random_model, stored, write_run

from megatron_sp.commands.cli import main

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float16)
WAYS = [
    *(("megatron", "core", tp, pp) for tp, pp in ((1, 1), (2, 1), (1, 3), (2, 2), (4, 1))), ("megatron", "core-local", 2, 1),
    ("megatron", "legacy", 1, 1), ("megatron", "legacy", 2, 3), ("megatron-dist", "core", 1, 1), ("megatron-deepspeed", "", 1, 1),
    ("megatron-deepspeed", "", 2, 1),
]  # fmt: skip


def convert(*words: object) -> int:
    return main(["convert", *map(str, words)])


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(map(str, way)))
@pytest.mark.parametrize("name", MODELS)
def test_there_and_back(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, way: tuple[str, str, int, int]) -> None:
    """A format that cannot hold a model says so and writes nothing."""
    target, names, tp, pp = way
    model = random_model(name, DTYPES[(sorted(MODELS).index(name) + WAYS.index(way)) % len(DTYPES)])
    write_run(model, tmp_path / "run")
    more = (
        ["--megatron-names", names]
        if target == "megatron"
        else ["--deepspeed-qkv-layout", "flat"]
        if target == "megatron-deepspeed"
        else []
    )
    ranks = [*(["--target-tensor-parallel-size", tp] if tp > 1 else []), *(["--target-pipeline-parallel-size", pp] if pp > 1 else [])]
    code = convert("--input", tmp_path / "run", "--to", target, "--output", tmp_path / "there", *more, *ranks)
    if code:
        assert code in (2, 3) and not (tmp_path / "there").exists()
        reasons = r"cannot be written for it|must be a multiple of --target-|rotary frequencies of|which Megatron has not"
        assert re.search(reasons, capsys.readouterr().err)
        return
    asked = ["--vocab-size", model.config.vocab_size, *(["--qkv-layout", "flat"] if target == "megatron-deepspeed" else [])]
    assert convert("--input", tmp_path / "there", "--from", target, "--to", "megatron_sp", "--output", tmp_path / "back", *asked) == 0
    assert_equal(stored(tmp_path / "back"), contents(model))
