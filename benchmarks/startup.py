"""How long one waits: for --help, for an import, and from the launch of a training to its first step.

    python benchmarks/startup.py [--json docs/benchmarks/startup.json]

Every figure is the wall time of a whole fresh process, interpreter included. The first step is that of a tiny model on
mock data, read from metrics.jsonl: its record's time minus the time of the launch.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from common import REPOSITORY, Stats, child_environment, print_table, write_json

TINY = """
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --vocab-size 512 --mock-data --micro-batch-size 2
    --lr 1e-3 --train-iters 2 --eval-iters 0 --log-interval 1 --device cpu --no-progress-bar
""".split()  # noqa: SIM905  a command line reads best as one
TARGETS = {"help": "< 1.5 s"}


def wall_time(command: list[str]) -> float:
    """Seconds that a command takes.

    Raises:
        RuntimeError: it failed; with the end of what it said.
    """
    start = time.perf_counter()
    run = subprocess.run(command, cwd=REPOSITORY, env=child_environment(1), capture_output=True, text=True)
    seconds = time.perf_counter() - start
    if run.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {run.returncode}:\n{run.stderr[-2000:]}")
    return seconds


def time_to_first_step(launcher: list[str]) -> float:
    """Seconds from the launch to the end of the first step."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.time()
        wall_time([*launcher, "pretrain_gpt.py", *TINY, "--save", folder])
        for line in (Path(folder) / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            if record["kind"] == "train":
                return float(record["time"]) - start
    raise RuntimeError("metrics.jsonl has no training record")


def cases() -> dict[str, tuple[str, Callable[[], float]]]:
    """name -> (label, measurement)."""
    python = sys.executable
    torchrun = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return {
        "interpreter": ("python -c pass (floor)", lambda: wall_time([python, "-c", "pass"])),
        "import_torch": ("import torch (floor)", lambda: wall_time([python, "-c", "import torch"])),
        "import_megatron_sp": ("import megatron_sp", lambda: wall_time([python, "-c", "import megatron_sp"])),
        "help": ("pretrain_gpt.py --help", lambda: wall_time([python, "pretrain_gpt.py", "--help"])),
        "first_step_1": ("launch to first step, 1 process", lambda: time_to_first_step([python])),
        "first_step_2": ("launch to first step, torchrun, 2 processes", lambda: time_to_first_step(torchrun)),
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rounds", type=int, default=7, help="measurements of each (default: 7), after one that warms the disk cache"
    )
    parser.add_argument("--only", nargs="+", choices=tuple(cases()), help="these cases alone")
    parser.add_argument("--smoke", action="store_true", help="one round, no training: does it run at all?")
    parser.add_argument("--json", help="write results there")
    options = parser.parse_args(argv)
    chosen = options.only or [
        name for name in cases() if not (options.smoke and name.startswith(("first_step", "import_torch")))
    ]
    rounds = 1 if options.smoke else options.rounds
    values: dict[str, list[float]] = {name: [] for name in chosen}
    try:
        for index in range(rounds if options.smoke else rounds + 1):
            for name in chosen:
                seconds = cases()[name][1]()
                if options.smoke or index:
                    values[name].append(seconds)
            print(f"round {index}/{rounds}", file=sys.stderr)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    results = {name: Stats.of(v) for name, v in values.items()}
    print_table("Start-up, wall time of a fresh process", ["", "median (min-max)", "target"],
                [[cases()[n][0], s.text("s", digits=2), TARGETS.get(n, "")] for n, s in results.items()])  # fmt: skip
    import torch

    write_json(options.json, "startup", {n: s.as_dict() for n, s in results.items()}, {"torch": torch.__version__})
    return 0


if __name__ == "__main__":
    from megatron_sp.utils.entry_point import run_program

    run_program(main)
