"""Command line of ``megatron-sp preprocess``."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from megatron_sp.config.schema import SENTENCEPIECE, WORDPIECE, DataConfig
from megatron_sp.utils.command_parser import CommandParser
from megatron_sp.utils.entry_point import integer
from megatron_sp.utils.errors import EXIT_INTERRUPTED, EXIT_OK

if TYPE_CHECKING:
    from megatron_sp.data.preprocess import PreprocessReport, Progress

_LINE_SECONDS = 10.0
_TOKENIZERS = (*SENTENCEPIECE, "HuggingFaceTokenizer", "GPT2BPETokenizer", *WORDPIECE, "ByteTokenizer", "NullTokenizer")
_DESCRIPTION = """\
Tokenize JSONL, plain text (.gz and .zst too), Parquet or Arrow into PREFIX_KEY_document.bin and .idx
(PREFIX_KEY_sentence with --split-sentences), the data set format of Megatron."""


def main(argv: list[str] | None = None, prog: str | None = None) -> int:
    """Tokenize the files of a command line; return the exit code. Raises ReportedError."""
    from megatron_sp.data.preprocess import PreprocessOptions, preprocess  # imports numpy, which needs memory
    from megatron_sp.data.text_input import Part

    parser = CommandParser(prog=prog, description=_DESCRIPTION)
    add = parser.add_argument  # flags have Megatron's names
    # fmt: off
    add("--input", nargs="+", required=True, metavar="FILE",
        help="files, folders of Dataset.save_to_disk, or - for standard input; their documents follow one another in"
        " order")
    add("--output-prefix", required=True, metavar="PREFIX", help="path of the output without _KEY_document.bin")
    add("--json-keys", nargs="+", default=["text"], metavar="KEY",
        help="texts of a JSON line, or columns, each a data set of its own (default: text)")
    add("--input-format", choices=("auto", "jsonl", "text"), default="auto",
        help="auto: JSONL if the name ends in .jsonl, .json or .ndjson (before .gz or .zst)")
    add("--text-unit", choices=("paragraph", "line", "file"), default="paragraph",
        help="what a document is in plain text; paragraphs have blank lines between them (default: paragraph)")
    add("--tokenizer-type", choices=_TOKENIZERS, default=None,
        help="default: with --tokenizer-model HuggingFaceTokenizer if that ends in .json, else"
        " SentencePieceTokenizer; with --merge-file GPT2BPETokenizer; with --vocab-file alone BertWordPieceLowerCase")
    add("--tokenizer-model", metavar="FILE", default=None,
        help="SentencePiece .model file, or tokenizer.json (or its folder)")
    add("--vocab-file", metavar="FILE", default=None,
        help="vocab.txt of BertWordPieceLowerCase and BertWordPieceCase, or GPT-2's vocab.json")
    add("--merge-file", metavar="FILE", default=None, help="GPT-2's merges.txt")
    add("--vocab-size", type=integer(2**31 - 1), default=None, metavar="N",
        help="integers of --tokenizer-type NullTokenizer, and one more id ends documents; otherwise all ids")
    add("--eod-id", type=integer(2**31 - 1), default=None, metavar="N",
        help="the id that ends documents (default: the tokenizer's own)")
    add("--append-eod", action="store_true", help="end every document with the end-of-document id (do this for GPT)")
    add("--bos", action=argparse.BooleanOptionalAction, default=None,
        help="begin every document with the tokenizer's BOS token, or not (default: as the tokenizer's own texts do:"
        " the template of a tokenizer.json, and Llama2Tokenizer always)")
    add("--split-sentences", action="store_true",
        help="one sequence for each sentence (do this for BERT), not one for each document")
    add("--workers", type=integer(1024), default=1, metavar="N",
        help="processes that tokenize; the output is the same for any number (default: 1)")
    add("--part", metavar="I/N", default="1/1",
        help="the I-th of N parts of the input, for array jobs: -I-of-N is added to the output's name, and"
        " `megatron-sp data merge` joins the parts (lines and row groups are dealt out, other files as a whole)")
    add("--skip-bad-lines", action="store_true", help="skip and count lines that cannot be read, instead of stopping")
    # fmt: on
    given = vars(parser.parse_args(argv))
    tokenizer = ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file", "eod_id")
    data = DataConfig(**{name: given.pop(name) for name in tokenizer})
    if given["vocab_size"] is not None and data.tokenizer_type == "NullTokenizer" and data.eod_id is None:
        given["vocab_size"] += 1  # as in training, and in Megatron
    part, inputs, keys = Part.parse(given.pop("part")), tuple(given.pop("input")), tuple(given.pop("json_keys"))
    options = PreprocessOptions(inputs=inputs, json_keys=keys, data=data, part=part, **given)
    try:
        with _shown() as progress:
            report = preprocess(options, progress)
    except KeyboardInterrupt:
        print("interrupted: nothing is written", file=sys.stderr)
        return EXIT_INTERRUPTED
    print(_summary(report, options.split_sentences))
    return EXIT_OK


def _summary(report: PreprocessReport, sentences: bool) -> str:
    lines = []
    for key, output in report.outputs.items():
        between = f" {report.num_sequences[key]} sentences," if sentences else ""
        lines.append(f"{output}.bin: {report.num_documents} documents,{between} {report.num_tokens[key]} tokens")
    if report.begin:
        lines.append(f"every document begins with BOS, id {' '.join(map(str, report.begin))} (--no-bos leaves it out)")
    if report.num_skipped:
        lines.append(f"warning: {report.num_skipped} bad lines were skipped")
    rate = report.num_input_bytes / 1e6 / max(report.seconds, 1e-9)
    lines.append(f"{report.num_input_bytes / 1e6:.1f} MB of input in {report.seconds:.1f} s, {rate:.1f} MB/s")
    return "\n".join(lines)


@contextmanager
def _shown() -> Iterator[Progress]:
    # a progress bar on a terminal, plain lines at intervals elsewhere, for logs
    if not sys.stderr.isatty():
        next_line = time.monotonic() + _LINE_SECONDS

        def print_line(report: PreprocessReport, bytes_read: int, bytes_total: int) -> None:
            nonlocal next_line
            if time.monotonic() >= next_line:
                next_line = time.monotonic() + _LINE_SECONDS
                print(_status(report, bytes_read, bytes_total), file=sys.stderr, flush=True)

        yield print_line
        return
    from rich import progress
    from rich.console import Console

    share, text = progress.TextColumn("{task.percentage:>3.0f}%"), progress.TextColumn("{task.description}")
    columns = (progress.BarColumn(), share, progress.TimeRemainingColumn(), text)
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("starting", total=None)

        def move(report: PreprocessReport, bytes_read: int, bytes_total: int) -> None:
            status = _status(report, bytes_read, bytes_total)
            bars.update(task, completed=bytes_read, total=bytes_total or None, description=status)

        yield move


def _status(report: PreprocessReport, bytes_read: int, bytes_total: int) -> str:
    rate = bytes_read / 1e6 / max(report.seconds, 1e-9)
    tokens = sum(report.num_tokens.values())
    total = f" of {bytes_total / 1e6:.1f}" if bytes_total else ""  # the size of standard input is unknown
    return f"{bytes_read / 1e6:.1f}{total} MB, {report.num_documents} documents, {tokens} tokens, {rate:.1f} MB/s"
