"""What a small program makes of what goes wrong, and the numbers that it takes."""

from __future__ import annotations

import argparse
import errno
import os
import resource
import subprocess
import sys

import pytest
import torch
from support.paths import ROOT

from megatron_sp.utils.entry_point import code_of, integer, is_out_of_memory
from megatron_sp.utils.errors import DataError


def ends(error: BaseException, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    def main() -> int:
        raise error

    code = code_of(main)
    return code, capsys.readouterr().err


def test_what_goes_wrong_is_one_message_and_a_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of(lambda: 7) == 7
    assert ends(DataError("no data"), capsys) == (4, "error: no data\n")
    assert ends(KeyboardInterrupt(), capsys) == (130, "\n")
    code, said = ends(MemoryError("Unable to allocate 7 TiB"), capsys)
    assert code == 2 and said.startswith("error: out of memory: Unable to allocate 7 TiB: ")
    assert ends(OSError(errno.EACCES, "Permission denied", "x"), capsys) == (6, "error: x: Permission denied\n")
    code, said = ends(OSError(errno.ENAMETOOLONG, "File name too long", "a" * 500), capsys)
    assert code == 2 and said.endswith("a...: File name too long\n") and len(said) < 120
    with pytest.raises(RuntimeError, match="a bug"):
        ends(RuntimeError("a bug"), capsys)


def test_real_failures_to_allocate_are_recognised() -> None:
    for allocate in (lambda: torch.empty(2**48), lambda: torch.empty(2**62, 4), lambda: bytearray(2**50)):
        with pytest.raises((RuntimeError, MemoryError)) as caught:
            allocate()
        assert is_out_of_memory(caught.value), caught.value
    assert is_out_of_memory(OSError(errno.ENOMEM, "Cannot allocate memory"))
    assert not is_out_of_memory(RuntimeError("of ours")) and not is_out_of_memory(ValueError("out of memory"))


def test_integers_of_the_command_line_are_bounded(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser(prog="tool")
    parser.add_argument("--n", type=integer(1024))
    assert parser.parse_args(["--n", "1024"]).n == 1024
    for text, says in (("1025", "argument --n: 1025 must be at most 1024"), ("x", "invalid int value: 'x'"), ("9" * 99, "999... must be")):
        with pytest.raises(SystemExit):
            parser.parse_args(["--n", text])
        assert says in capsys.readouterr().err


def with_little_address_space(*words: str, mib: int = 300) -> subprocess.CompletedProcess[str]:
    """A program with so little of it that importing torch ends in an ImportError; with a little more, in an abort."""
    return subprocess.run(
        [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False,
        env=os.environ | {"COLUMNS": "300"}, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (mib << 20, mib << 20)),
    )  # fmt: skip


@pytest.mark.parametrize("words", [("generate.py", "--load", "x", "--prompt", "a"), ("evaluate.py", "--load", "x", "--text", "y")])
def test_too_little_address_space_for_torch_is_said_before_it_is_imported(words: tuple[str, ...]) -> None:
    done = with_little_address_space(f"tools/{words[0]}", *words[1:])
    assert done.returncode == 2, done.stderr
    assert "300 MiB of address space (ulimit -v)" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("tool", ["preprocess_data", "train_tokenizer", "finetune_classifier"])
def test_too_little_address_space_for_numpy_is_said_before_it_is_imported(tool: str) -> None:
    done = with_little_address_space(f"tools/{tool}.py", "--help", mib=90)
    assert done.returncode == 2, done.stderr
    assert "90 MiB of address space (ulimit -v), and numpy alone" in done.stderr and done.stderr.count("\n") == 1


def test_the_launcher_of_several_hosts_says_that_torch_cannot_be_imported() -> None:
    done = with_little_address_space("scripts/torchrun.py", "--help")
    assert done.returncode != 0 and "Traceback" not in done.stderr
    assert "torch cannot be imported" in done.stderr or "OpenBLAS" in done.stderr, done.stderr


def test_doctor_says_that_torch_has_too_little_address_space() -> None:
    done = with_little_address_space("-c", "from megatron_sp.commands.cli import program; program()", "doctor")
    assert done.returncode == 1 and not done.stderr, done.stderr
    assert "lack" in done.stdout and "300 MiB of address space (ulimit -v)" in done.stdout and "ulimit -v unlimited" in done.stdout
