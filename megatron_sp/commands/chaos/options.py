"""The flags of ``megatron-sp chaos``."""

from __future__ import annotations

import argparse
from pathlib import Path

USAGE = "megatron-sp chaos DIR [--faults N] [--seed N] [--ranks N] [--minutes N] [--patience SECONDS] [-- TRAINING COMMAND]"
EPILOG = (
    "After -- comes the command of a training as you start it, such as: torchrun --nproc-per-node 2 pretrain_gpt.py FLAGS. It runs in the"
    " current folder, with --save DIR/... --auto-resume --resume-fallback added; it needs --save-interval, and a --train-iters that takes a"
    " minute or two. Without a command a tiny model is trained on made-up data. docs/how-to/chaos.md says what is done to it."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add all flags; the arguments that argparse does not know are the training's command."""
    parser.add_argument(
        "folder", type=Path, metavar="DIR", help="folder for the runs, on the file system to test; new, empty, or from an earlier call"
    )
    parser.add_argument("--faults", type=int, default=100, metavar="N", help="how many (default: 100)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the faults and their order (default: 1)")
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="processes of the built-in training (default: 2)")
    parser.add_argument("--minutes", type=float, default=120, metavar="N", help="start no new fault after this time (default: 120)")
    parser.add_argument("--patience", type=float, default=120, metavar="SECONDS", help="longest wait for anything to happen (default: 120)")
