"""The flags that scripts/quickstart.sh trains with, on CPUs and on GPUs: what it starts is replaced by what writes its words down."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from support.paths import ROOT

PYTHON = """#!/usr/bin/env bash
case "$*" in
*device_count*) echo "$GPUS" ;;
-c*) echo 1.0 ;;
esac
"""
LAUNCH = """#!/usr/bin/env bash
echo "NCCL_ALGO=${NCCL_ALGO:-} $*" >>"$WORDS"
echo SIGKILL >&2
"""


def trainings(folder: Path, gpus: int, family: str) -> list[str]:
    """Return the words of each training that the script starts."""
    for name, text in {".venv/bin/python": PYTHON, "scripts/launch.sh": LAUNCH, "scripts/setup_env.sh": "#!/usr/bin/env bash\n"}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    (folder / "scripts/quickstart.sh").write_text((ROOT / "scripts/quickstart.sh").read_text())
    (folder / "out").mkdir()
    (folder / "out/corpus.jsonl").write_text("{}\n")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("NCCL_", "QUICKSTART_"))}
    environment |= {"GPUS": str(gpus), "WORDS": str(folder / "words"), "QUICKSTART_OUT": str(folder / "out")}
    done = subprocess.run(["bash", str(folder / "scripts/quickstart.sh"), family], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return (folder / "words").read_text().splitlines()


@pytest.mark.parametrize("family", ["gpt", "bert"])
@pytest.mark.parametrize("gpus", [0, 1, 8])
def test_a_gpu_proves_its_resume_with_deterministic_kernels(tmp_path: Path, gpus: int, family: str) -> None:
    killed, resumed = trainings(tmp_path, gpus, family)
    for words in (killed, resumed):
        assert (" --deterministic-mode" in words) == (" --bf16" in words) == (gpus > 0)
        assert words.startswith(f"NCCL_ALGO={'Ring' if gpus else ''} {gpus or 2} pretrain_{family}.py ")
    assert killed == f"{resumed} --enable-fault-injection", "but for the fault it is the same command"
