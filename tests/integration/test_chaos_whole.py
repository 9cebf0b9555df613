"""``megatron-sp chaos`` from end to end, on the built-in training."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long


def test_some_faults_of_every_kind(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "megatron_sp", "chaos", str(tmp_path / "here"), "--faults", "25", "--seed", "11"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "here" / "chaos.json").read_text())
    assert record["faults"] == 25 and record["problems"] == [] and record["equal"] == record["rounds"] > 1
    assert sum(kind["times"] for kind in record["kinds"].values()) == 25 and len(record["kinds"]) > 5
    assert "runs ended with the clean run's weights, bit for bit" in done.stdout and done.stderr == ""
    assert sorted(p.name for p in (tmp_path / "here").iterdir()) == ["chaos.json", "clean", "output"]


def test_other_weights_are_found_and_the_exit_code_says_so(tmp_path: Path) -> None:
    """A training that does not come back as it was: it forgets, at every start, which seed it had."""
    script = tmp_path / "forgetful.py"
    script.write_text(
        "import sys, time\n"
        "from megatron_sp.commands.cli import load_chaos\n"
        "load_chaos()\n"
        "from chaos.jobs import train_tiny\n"
        "import os\n"
        "os.environ.pop('RANK', None)\n"
        "seed = str(time.time_ns() % 1000 + 1)\n"
        "train_tiny(0, 1, int(os.environ['PORT']), [*sys.argv[1:], '--seed', seed, '--accept-data-change'])\n"
    )
    import os
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "megatron_sp", "chaos", str(tmp_path / "here"), "--faults", "2", "--", sys.executable, str(script)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=3600, env={**os.environ, "PORT": str(port)})
    assert done.returncode == 3, done.stdout + done.stderr
    assert "differs from the clean run" in done.stdout and "0 of 1 run ended with" in done.stdout
