"""The command ``megatron-sp chaos``: its flags, and what it prints."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from megatron_sp.utils.command_parser import CommandParser
from megatron_sp.utils.errors import EXIT_CHECKPOINT, EXIT_OK, ConfigError

USAGE = (
    "megatron-sp chaos DIR [--faults N] [--seed N] [--ranks N] [--minutes N] [--patience SECONDS] [-- TRAINING COMMAND]"
)
TEXT = "Stress a training on this machine: it is killed, stopped, starved of disk and damaged, and must end with the same weights."
EPILOG = (
    "After -- comes the command of a training as you start it, such as: torchrun --nproc-per-node 2 pretrain_gpt.py"
    " FLAGS. It runs in the current folder, with --save DIR/... --auto-resume --resume-fallback added; it needs"
    " --save-interval, and a --train-iters that takes a minute or two. Without a command a tiny model is trained on"
    " made-up data. docs/how-to/chaos.md says what is done to it."
)


def main(argv: list[str], prog: str) -> int:
    """Run a campaign; return the exit code, 0 only if every run ended with the clean run's weights.

    Raises:
        ConfigError: flags or folder cannot be used, or the training fails even without a fault.
    """
    parser = CommandParser(prog=prog, usage=USAGE, epilog=EPILOG, description=TEXT)
    parser.add_argument(
        "folder",
        type=Path,
        metavar="DIR",
        help="folder for the runs, on the file system to test; new, empty, or from an earlier call",
    )
    parser.add_argument("--faults", type=int, default=100, metavar="N", help="how many (default: 100)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the faults and their order (default: 1)")
    parser.add_argument(
        "--ranks", type=int, default=2, metavar="N", help="processes of the built-in training (default: 2)"
    )
    parser.add_argument(
        "--minutes", type=float, default=120, metavar="N", help="start no new fault after this time (default: 120)"
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=120,
        metavar="SECONDS",
        help="longest wait for anything to happen (default: 120)",
    )
    args, words = parser.parse_known_args(argv)
    command = words[1:] if words[:1] == ["--"] else words
    if command and command[0].startswith("-"):
        raise ConfigError(f"unrecognized argument: {command[0]} (the training's command stands after --)")
    for name, low, high in (("faults", 1, 10**6), ("ranks", 1, 64), ("minutes", 0, 10**5), ("patience", 1, 10**5)):
        if not low <= getattr(args, name) <= high:  # not NaN either
            raise ConfigError(f"--{name} ({getattr(args, name)}) must be from {low} to {high}")
    if not sys.platform.startswith("linux"):
        raise ConfigError("chaos needs Linux: it looks at processes in /proc and limits them from outside")
    if any(word == "--save" or word.startswith("--save=") for word in command):
        raise ConfigError("leave --save out of the training's command: every run gets a folder of its own")
    from chaos.campaign import Campaign, claim

    claim(args.folder)
    if not command:
        import megatron_sp.tasks.gpt  # noqa: F401 - once, for all processes that are forked from this one
    began = time.monotonic()
    folder = args.folder.resolve()
    campaign = Campaign(
        folder, command, args.faults, args.seed, args.ranks, args.minutes, args.patience, say=lambda line: print(line, flush=True)
    )  # fmt: skip
    sound = False
    try:
        sound = campaign.run()
    except OSError as error:
        raise ConfigError(f"{error.filename or folder}: {error.strerror}") from None
    print(f"\n{campaign.table()}\n")
    for problem in campaign.problems:
        print(f"problem: {problem}")
    minutes = (time.monotonic() - began) / 60
    faults, runs, problems = (
        f"{number:,} {noun}{'' if number == 1 else 's'}"
        for number, noun in ((campaign.done, "fault"), (campaign.rounds, "run"), (len(campaign.problems), "problem"))
    )
    print(
        f"{faults} in {runs}, {minutes:.1f} min, seed {args.seed}: {campaign.equal} of {runs} ended with the clean"
        f" run's weights, bit for bit{f'; {problems}' if campaign.problems else ''}"
    )
    if not sound and not campaign.problems:
        print(f"--minutes {args.minutes:g} were over before all {args.faults} faults")
    return EXIT_OK if sound else EXIT_CHECKPOINT
