"""Preprocessing as a Slurm array: the commands of the how-to, with a stand-in for sbatch that plays the tasks one by one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import ROOT
from support.waiting import PATIENCE_S

SCRIPT = ROOT / "scripts/slurm_preprocess.sbatch"
# a job is its number; an array runs the script for each task with Slurm's variables, --wrap a line of the shell
SBATCH = """#!/usr/bin/env bash
set -euo pipefail
array="" wrap="" after=""
while [ $# -gt 0 ]; do
    case "$1" in
        --parsable) ;;
        --array=*) array="${1#--array=}" ;;
        --dependency=afterok:*) after="${1#--dependency=afterok:}" ;;
        --wrap) wrap="$2"; shift ;;
        *) break ;;
    esac
    shift
done
id=$(($(cat jobs 2>/dev/null || echo 100) + 1)); echo "$id" >jobs
[ -z "$after" ] || [ "$(cat "state-$after")" = COMPLETED ] || { echo "job $after has failed" >&2; exit 1; }
echo COMPLETED >"state-$id"
export SLURM_SUBMIT_DIR="$PWD" SLURM_JOB_ID="$id" SLURM_CPUS_PER_TASK=1
if [ -n "$wrap" ]; then bash -c "$wrap" >"job-$id.out" 2>&1 || echo FAILED >"state-$id"
else
    tasks=($(python3 -c "
import sys
for part in sys.argv[1].split(','):
    first, _, last = part.partition('-')
    print(*range(int(first), int(last or first) + 1))" "$array"))
    export SLURM_ARRAY_TASK_COUNT=${#tasks[@]} SLURM_ARRAY_TASK_MIN=${tasks[0]} SLURM_ARRAY_TASK_MAX=${tasks[-1]}
    for task in "${tasks[@]}"; do
        SLURM_ARRAY_TASK_ID=$task bash "$@" >"job-$id-$task.out" 2>&1 || echo FAILED >"state-$id"
    done
fi
echo "$id"
"""


@pytest.mark.slow
def test_an_array_and_the_merge_after_it(tmp_path: Path) -> None:
    """The page's commands with three parts and a tokenizer of bytes: a task fails, is repeated alone, and the result is that of one job."""
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "docs/how-to/launching/slurm.md").read_text(), flags=re.DOTALL)
    (block,) = [b for b in blocks if "--array" in b]
    shrunk = {
        "1-64": "1-3", "00064": "00003", "SentencePieceTokenizer --tokenizer-model tokenizer.model": "ByteTokenizer",
        "scripts/slurm": f"{ROOT}/scripts/slurm",
    }  # fmt: skip
    for long, short in shrunk.items():
        assert long in block, f"the page no longer says {long}"
        block = block.replace(long, short)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/sbatch").write_text(SBATCH)
    (tmp_path / "bin/sbatch").chmod(0o755)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/megatron-sp").write_text(f'#!/usr/bin/env bash\nexec {sys.executable} -m megatron_sp "$@"\n')
    (tmp_path / ".venv/bin/megatron-sp").chmod(0o755)
    (tmp_path / "corpus").mkdir()
    for name, first in (("a", 0), ("b", 5)):
        (tmp_path / f"corpus/{name}.jsonl").write_text("".join(f'{{"text": "document {i}"}}\n' for i in range(first, first + 5)))
    environment = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}

    def run(command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)

    (tmp_path / "parts").mkdir()
    (tmp_path / "parts/corpus_text_document-00002-of-00003.bin").mkdir()  # where a file is to be: that task fails
    first = run(block)
    assert "job 101 has failed" in first.stderr and not any((tmp_path / "data").iterdir())
    (tmp_path / "parts/corpus_text_document-00002-of-00003.bin").rmdir()
    array, merge = block.split("sbatch --dependency")
    again = run(array.replace("array=$(", "array=$(PARTS=3 ").replace("=1-3", "=2") + "sbatch --dependency" + merge)
    said = "".join(f.read_text() for f in sorted(tmp_path.glob("job-*.out")))
    assert again.returncode == 0 and (tmp_path / "state-104").read_text() == "COMPLETED\n", again.stderr + said
    flags = "--output-prefix whole --tokenizer-type ByteTokenizer --append-eod"
    whole = run(f"{sys.executable} -m megatron_sp preprocess --input corpus/*.jsonl {flags}")
    assert whole.returncode == 0, whole.stderr
    for kind in ("bin", "idx"):
        assert (tmp_path / f"data/corpus_text_document.{kind}").read_bytes() == (tmp_path / f"whole_text_document.{kind}").read_bytes()


TASK = {"SLURM_ARRAY_TASK_ID": "2", "SLURM_ARRAY_TASK_COUNT": "2", "SLURM_ARRAY_TASK_MIN": "2", "SLURM_ARRAY_TASK_MAX": "3"}


@pytest.mark.parametrize("variables, words, message", [
    ({}, ["--input", "x"], "this is no array job: sbatch --array=1-64"),
    (TASK, ["--input", "x"], "the array is 2-3 with 2 task(s): give --array=1-N, or to repeat some of N parts PARTS=N"),
    ({**TASK, "PARTS": "1"}, ["--input", "x"], "task 2 is none of 1-1 (PARTS=1)"),
    ({**TASK, "PARTS": "3"}, ["--input", "x", "--part", "1/3"], "--part is this script's"),
    ({**TASK, "PARTS": "3"}, [], "no flags"),
])  # fmt: skip
def test_an_array_that_cannot_work_is_refused(tmp_path: Path, variables: dict[str, str], words: list[str], message: str) -> None:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_") and k != "PARTS"}
    environment = {**clean, "SLURM_SUBMIT_DIR": str(tmp_path), **variables}
    done = subprocess.run(["bash", str(SCRIPT), *words], env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 2 and message in done.stderr and not done.stdout, done.stderr
