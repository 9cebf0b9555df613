"""The command ``megatron-sp chaos``."""

from __future__ import annotations

import argparse
import sys
import time

from megatron_sp.commands.ckpt.text import plural
from megatron_sp.utils.errors import EXIT_CHECKPOINT, EXIT_OK, ConfigError


def run(args: argparse.Namespace, words: list[str]) -> int:
    """Run a campaign; return the exit code, 0 only if every run ended with the clean run's weights.

    Raises:
        ConfigError: flags or folder cannot be used, or the training fails even without a fault.
    """
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
    from megatron_sp.commands.chaos.campaign import Campaign, claim

    claim(args.folder)
    if not command:
        import megatron_sp.commands.chaos.tiny  # noqa: F401 - once, for all processes that are forked from this one
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
    problems = f"; {plural(len(campaign.problems), 'problem')}" if campaign.problems else ""
    print(
        f"{plural(campaign.done, 'fault')} in {plural(campaign.rounds, 'run')}, {minutes:.1f} min, seed {args.seed}: {campaign.equal} of"
        f" {plural(campaign.rounds, 'run')} ended with the clean run's weights, bit for bit{problems}"
    )
    if not sound and not campaign.problems:
        print(f"--minutes {args.minutes:g} were over before all {args.faults} faults")
    return EXIT_OK if sound else EXIT_CHECKPOINT
