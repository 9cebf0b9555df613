"""A rank that dies in the middle of an exchange: under the real launcher the others name it and end with code 7, at once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.training import records, status
from test_torchrun import ROOT, gone, launch

pytestmark = pytest.mark.torchrun

# pretrain_gpt.py, but one rank starts a collective of a layer and is gone before it has ended
DYING = """
import os, runpy, signal, sys
sys.path.insert(0, {root!r})
import torch.distributed as dist

name, rank, number = os.environ["DIES_IN"].split(":")
original, calls = getattr(dist, name), 0

def dying(x, *args, **kwargs):
    global calls
    work = original(x, *args, **kwargs)
    calls += name == "all_to_all_single" or x.ndim == 3  # [s, b, h] is what layers reduce
    if calls == int(number):
        os.kill(os.getpid(), signal.SIGKILL)
    return work

if os.environ.get("RANK") == rank:
    setattr(dist, name, dying)
runpy.run_path({script!r}, run_name="__main__")
"""


LONG = pytest.mark.long
CASES = [
    pytest.param(("--sp-size", 2, "--sp-overlap-mode", "chunked"), "all_to_all_single:1:45", id="sp-chunked"),
    pytest.param(("--sp-size", 2), "all_to_all_single:0:45", id="sp", marks=LONG),
    pytest.param(("--tp-size", 2), "all_reduce:1:45", id="tp"),
    pytest.param(("--tp-size", 2, "--sequence-parallel"), "all_to_all_single:0:45", id="tp_seq", marks=LONG),
]


@pytest.mark.often("sp-chunked")
@pytest.mark.parametrize("flags, dies_in", CASES)
def test_a_rank_that_dies_mid_exchange(tmp_path: Path, flags: tuple[object, ...], dies_in: str) -> None:
    script, run = tmp_path / "dying.py", tmp_path / "run"
    script.write_text(DYING.format(root=str(ROOT), script=str(ROOT / "pretrain_gpt.py")))
    rank = int(dies_in.split(":")[1])
    code, text = launch(tmp_path, "--save", run, "--train-iters", 500, "--global-batch-size", 4, *flags, script=script, DIES_IN=dies_in)
    assert code == 7, text  # at once: the time-out is beyond what `launch` waits for
    report = status(run)
    assert (report["status"], report["exit_code"]) == ("failed", 7)
    named = rf"rank {rank} \(pid {report['pids'][rank]} on \S+\) died: a collective failed .* --auto-resume\."
    assert re.match(named, report["message"]) and re.search(rf"\[rank {1 - rank}\] error: {named}", text), text
    assert records(run), "it died while training"
    assert all(gone(pid) for pid in report["pids"]), "no orphan is left"
    assert "was never called on" not in text and "Traceback" not in text.split("torch/distributed")[0], text
