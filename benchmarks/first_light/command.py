"""Measure this machine: kernels, training steps, memory, overlap and links, in the order of what tells most, within a time.

    bash scripts/first_light.sh                    an hour on this machine's GPUs
    bash scripts/first_light.sh --minutes 10       what tells most; the same command again goes on where this one stopped
    bash scripts/first_light.sh --device cpu       the same parts with tiny shapes, on a machine without a GPU: do they run?

Writes OUT/report.json after each part, and OUT/report.html, a page that needs nothing else. Exit codes: 0 all is done and
well; 1 something is wrong or has failed; 75 the time was up, or SIGTERM came, and the same command goes on; 130 Ctrl-C, likewise.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path

from common import git_revision

from first_light.page import write_page
from first_light.plan import PARTS, parts_for
from first_light.probe import probe
from first_light.report import LOGS, NAME, PAGE, Report, open_report, read_report
from first_light.runner import Machine, Runner
from megatron_sp.utils.command_parser import documented_parser
from megatron_sp.utils.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_PREEMPTED, ConfigError, LockError

BAD = 1


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = documented_parser("first_light.sh", __doc__)
    parser.add_argument(
        "--minutes", type=int, choices=(10, 30, 60), default=60, help="time for this call (default: 60)"
    )
    parser.add_argument(
        "--out", default="first_light", metavar="OUT", help="folder of the report (default: first_light)"
    )
    parser.add_argument(
        "--device", choices=("auto", "cuda", "cpu"), default="auto", help="auto: the GPUs, if there are any (default)"
    )
    parser.add_argument(
        "--parts", nargs="+", metavar="PART", help=f"these alone, of: {', '.join(part.name for part in PARTS)}"
    )
    parser.add_argument("--again", action="store_true", help="repeat what has failed; what is done and well is kept")
    parser.add_argument(
        "--page", action="store_true", help="write OUT/report.html from OUT/report.json again, and measure nothing"
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the parts that are not done; return the exit code."""
    options = parse(argv)
    folder = Path(options.out)
    if options.page:
        write_page(read_report(folder / NAME), folder / PAGE)
        print(f"written to {folder / PAGE}")
        return EXIT_OK
    _require_known(options.parts)
    machine, words = _machine(options.device)
    parts = parts_for(machine.device)
    if left_out := [name for name in options.parts or () if name not in [part.name for part in parts]]:
        raise ConfigError(
            f"--parts {left_out[0]} is for GPUs alone: on a CPU another part tries the same code, so leave it out"
        )
    report = open_report(folder, words)
    with _alone(folder):
        command = shlex.join(["bash", "scripts/first_light.sh", *(sys.argv[1:] if argv is None else argv)])
        date = datetime.now(timezone.utc).isoformat(timespec="seconds")
        report.calls.append({"date": date, "command": command, "minutes": options.minutes})
        report.write(folder)

        def keep() -> None:
            report.write(folder)
            write_page(report, folder / PAGE)

        runner = Runner(
            report,
            machine,
            keep,
            60.0 * options.minutes,
            folder / LOGS,
            again=options.again,
            say=lambda line: print(line, flush=True),
        )
        left = runner.run([part for part in parts if options.parts is None or part.name in options.parts])
        keep()
    return _end(report, left, runner.stopped, folder)


def _end(report: Report, left: list[str], stopped: int, folder: Path) -> int:
    for name, result in report.parts.items():
        if result.is_bad:
            bad = sum(record.is_bad for record in result.records)
            print(f"NOT WELL: {name}: {result.message or f'{bad} of {len(result.records)} records'}")
    if left:
        print(f"to be done: {', '.join(left)}; the same command goes on there")
    print(f"see {folder / PAGE}" + (f", and {folder / LOGS} for what they printed" if report.is_bad else ""))
    if stopped == signal.SIGINT:
        return EXIT_INTERRUPTED
    if report.is_bad:
        return BAD
    return EXIT_PREEMPTED if left else EXIT_OK


def _require_known(names: list[str] | None) -> None:
    known = [part.name for part in PARTS]
    unknown = [name for name in names or () if name not in known]
    if unknown:
        raise ConfigError(f"--parts {unknown[0]} is unknown: use some of {', '.join(known)}")


def _machine(device: str) -> tuple[Machine, dict[str, str]]:
    """Return what the parts run on, and the words for it in the report.

    Raises:
        ConfigError: cuda is asked for, and torch sees no GPU.
    """
    words = probe()
    count = int(words.pop("gpus"))
    if device == "cuda" and not count:
        raise ConfigError(
            "--device cuda, but torch sees no GPU here (`megatron-sp doctor` says why): use --device cpu for a trial without"
        )
    device = device if device != "auto" else "cuda" if count else "cpu"
    if device == "cpu":
        words = {name: words[name] for name in ("torch", "python", "megatron_sp")}
    return Machine(device, count if device == "cuda" else 0, git_revision()), {"device": device, **words}


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keep a second call out of the folder; the lock ends with the process."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LockError(
                f"another first_light.sh is writing into {folder}: wait for it, or choose another --out"
            ) from None
        except OSError:  # a file system without locks for folders
            pass
        yield
    finally:
        os.close(fd)
