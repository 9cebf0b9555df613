"""The planner's own flags; in a separate module, so that --help of other commands does not import the planner."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_sp.planner.hardware import CPU
from megatron_sp.utils.entry_point import integer

USAGE = "megatron-sp plan --gpus N --gpu NAME [--nodes N --link NAME] [options] FLAGS OF THE MODEL"
EPILOG = (
    "The model, its batch and its number format are described as for pretrain_gpt.py (--num-layers, --seq-length, ...)."
    " Flags of the layout that are given too (--tp-size, --zero-stage, --micro-batch-size, ...) are kept, the others"
    " are chosen."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the planner's flags; all other flags of the command describe the model, as for pretrain_gpt.py."""
    add = parser.add_argument
    add("--gpus", type=integer(), required=True, metavar="N", help="all of them, over all nodes (required)")
    kind = f"kind of GPU, such as h100-80g; {CPU}: processes of this machine, measured now"
    add("--gpu", required=True, metavar="NAME", help=kind)
    add("--nodes", type=integer(), metavar="N", help="hosts; GPUs are spread evenly (default: 8 GPUs each)")
    add("--link", metavar="NAME", help="between the nodes, such as ib-400g (required with more than one node)")
    inside = "between the GPUs of a node (default: the one the GPU is usually sold with)"
    add("--inside-link", metavar="NAME", help=inside)
    cards = "network cards of a node (default: one for each GPU; one of Ethernet up to 100g)"
    add("--cards", type=integer(), metavar="N", help=cards)
    reserved = "memory of a GPU for what is not tensors (default: worked out)"
    add("--reserve-gib", type=float, metavar="GIB", help=reserved)
    add("--top", type=integer(10**6), default=5, metavar="N", help="layouts to show (default: 5)")
    add("--json", action="store_true", help="print everything as JSON")
    picture = (
        "draw the memory bars (.png, .svg or .pdf; needs the extra 'plot'), and with cp > 1 in an .svg who sends which"
        " rows to whom"
    )
    add("--picture", type=Path, metavar="FILE", help=picture)
    documents = (
        "with cp > 1: lengths of the documents of a packed row, to show who sends which rows to whom (BERT: one, the"
        " real tokens)"
    )
    add("--documents", type=lengths_of, metavar="N,N,...", help=documents)


def lengths_of(text: str) -> tuple[int, ...]:
    """Return the lengths of documents from words such as ``300,500,224``; a converter for argparse.

    Raises:
        argparse.ArgumentTypeError: a word is not a positive number.
    """
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if not (word.isascii() and word.isdigit() and len(word) < 12 and int(word) > 0):
            word = word[:40] or "nothing"
            raise argparse.ArgumentTypeError(f"{word} is not a length: give numbers of tokens such as 300,500,224")
    return tuple(map(int, words))
