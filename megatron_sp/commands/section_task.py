"""Write a task to fine-tune on: ``megatron-sp data section-task --corpus corpus.jsonl --output sections``.

The task is to classify a passage by the part of Python's own text that it comes from: one of eight, the language
reference and packages of the standard library. train.jsonl and valid.jsonl are for megatron-sp finetune --task jsonl;
all classes have equally many passages.
"""

from __future__ import annotations

import sys

from megatron_sp.utils.command_parser import documented_parser
from megatron_sp.utils.entry_point import integer
from megatron_sp.utils.errors import EXIT_OK, ReportedError


def main(argv: list[str] | None = None, prog: str | None = None) -> int:
    """Run the tool; return the exit code."""
    parser = documented_parser(prog, __doc__)
    add = parser.add_argument
    add("--corpus", required=True, metavar="FILE", help="what megatron-sp data corpus wrote")
    add("--output", required=True, metavar="FOLDER", help="for train.jsonl and valid.jsonl")
    add("--classes", type=integer(), default=8, metavar="N", help="the largest ones (default: 8)")
    add(
        "--train",
        type=integer(),
        default=390,
        metavar="N",
        help="passages of each class to train on, if the smallest has so many (default: 390)",
    )
    add("--valid", type=integer(), default=50, metavar="N", help="passages of each class to validate on (default: 50)")
    args = parser.parse_args(argv)
    if min(args.train, args.valid) < 1 or args.classes < 2:
        parser.error("there must be two classes at least, and a passage of each to train and to validate on")
    from megatron_sp.data.corpus import write_task  # imports numpy, which needs memory

    try:
        task = write_task(args.corpus, args.output, args.classes, args.train, args.valid)
    except ReportedError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    classes = sorted({section for section, _ in task.train})
    print(
        f"{args.output}: {len(task.train)} passages to train on, {len(task.valid)} to validate on, from {', '.join(classes)}"
    )
    return EXIT_OK
