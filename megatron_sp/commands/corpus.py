"""Write a JSONL corpus from the text that comes with Python: ``megatron-sp data corpus --output corpus.jsonl``."""

from __future__ import annotations

import sys

from megatron_sp.data.corpus import WANTED_BYTES, write_corpus
from megatron_sp.utils.command_parser import CommandParser
from megatron_sp.utils.entry_point import integer
from megatron_sp.utils.errors import EXIT_OK, ReportedError


def main(argv: list[str] | None = None, prog: str | None = None) -> int:
    """Run the tool; return the exit code."""
    parser = CommandParser(
        prog=prog, description="Gather Python's language reference and standard library as JSONL, one document each."
    )
    parser.add_argument("--output", required=True, metavar="FILE", help="the JSONL file to write; keys: text, source")
    parser.add_argument(
        "--max-bytes",
        type=integer(),
        metavar="N",
        help="stop before the document that would make it more than N bytes of text (default: all there is)",
    )
    args = parser.parse_args(argv)
    try:
        num_documents, num_bytes = write_corpus(args.output, max_bytes=args.max_bytes)
    except ReportedError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(f"{args.output}: {num_documents} documents, {num_bytes / 1e6:.1f} MB of text")
    if args.max_bytes is None and num_bytes < WANTED_BYTES:
        print(
            f"note: {WANTED_BYTES / 1e6:.0f} MB were expected: this Python's standard library is not complete; going on with what there is"
        )
    return EXIT_OK
