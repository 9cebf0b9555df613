"""The command megatron-sp: exit codes, messages, and that asking for help loads nothing heavy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.paths import ROOT

from megatron_sp import __version__
from megatron_sp.commands import cli
from megatron_sp.data.writer import IndexedDatasetWriter
from megatron_sp.utils.errors import EXIT_DATA


def make_data(prefix: Path) -> Path:
    with IndexedDatasetWriter(prefix, dtype=np.uint16) as writer:
        for document in ([5, 6, 7], [8, 90]):
            writer.add_document(np.array(document, np.uint16))
    return prefix


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    for words, expected in (
        (["--help"], "doctor"),
        (["data", "--help"], "verify"),
        (["doctor", "--help"], "--json"),
        (["--version"], __version__),
    ):
        with pytest.raises(SystemExit) as caught:
            cli.main(words)
        assert caught.value.code == 0 and expected in capsys.readouterr().out


def test_help_loads_nothing_heavy() -> None:
    program = (
        "import sys\nfrom megatron_sp.commands import cli\ntry:\n    cli.main(['--help'])\nfinally:\n"
        "    assert not {'torch', 'numpy', 'rich'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr


def test_verify_a_sound_data_set_by_prefix_or_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = make_data(tmp_path / "good")
    assert cli.main(["data", "verify", str(prefix), f"{prefix}.bin"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{prefix}: sound: 2 documents, 2 sequences, 5 tokens, ids 5 to 90; every byte is as {prefix}.sha256 says"
    assert lines[1].startswith(f"{prefix}.bin: sound")


def test_verify_says_what_a_data_set_of_sentences_offers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with IndexedDatasetWriter(tmp_path / "s", vocab_size=100) as writer:
        for lengths in ([3, 4], [5], [], [600, 1], [1, 1, 1]):
            writer.add_document([7] * sum(lengths), lengths)
    assert cli.main(["data", "verify", str(tmp_path / "s")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{tmp_path}/s: sound: 5 documents, 8 sequences, 616 tokens")
    assert lines[1:] == [
        f"{tmp_path}/s: sentences: 2.0 per document, at most 600 tokens; BERT takes samples from 2 documents, without the binary head from"
        " 3; 1 have a sentence above 512 tokens"
    ]


def test_verify_goes_on_after_a_damaged_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = make_data(tmp_path / "good"), make_data(tmp_path / "bad")
    with open(f"{bad}.bin", "r+b") as file:
        file.truncate(6)
    assert cli.main(["data", "verify", str(tmp_path / "none"), str(bad), str(good)]) == EXIT_DATA
    out, err = capsys.readouterr()
    assert len(err.splitlines()) == 2 and "none.idx does not exist" in err and "bad.bin" in err
    assert "good: sound" in out
    assert cli.main(["data", "verify", str(good), "--vocab-size", "90"]) == EXIT_DATA
    assert "90" in capsys.readouterr().err


def test_a_reported_error_is_printed_and_gives_the_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from megatron_sp.commands import doctor
    from megatron_sp.utils.errors import DiskError

    def broken(as_json: bool) -> int:
        raise DiskError("the disk is full")

    monkeypatch.setattr(doctor, "run", broken)
    assert cli.main(["doctor"]) == 6
    assert capsys.readouterr().err == "error: the disk is full\n"
