"""Train a tokenizer: ``megatron-sp tokenizer --input corpus.jsonl --output tokenizer.model``."""

from __future__ import annotations

import time
from pathlib import Path

from megatron_sp.utils.command_parser import CommandParser
from megatron_sp.utils.entry_point import integer
from megatron_sp.utils.errors import EXIT_OK, ConfigError
from megatron_sp.utils.files import require_place

_DESCRIPTION = """\
Train a lossless SentencePiece BPE model with byte fallback, or a WordPiece vocabulary, on what megatron-sp preprocess
reads: JSONL, plain text (.gz and .zst too), Parquet or Arrow."""


def main(argv: list[str] | None = None, prog: str | None = None) -> int:
    """Train the tokenizer of a command line; return the exit code. Raises ReportedError."""
    # imports numpy, which needs memory
    from megatron_sp.data.text_input import check_inputs, read_texts
    from megatron_sp.data.tokenizers.train import SAMPLE_BYTES, train_sentencepiece, train_wordpiece

    parser = CommandParser(prog=prog, description=_DESCRIPTION)
    add = parser.add_argument
    # fmt: off
    add("--input", nargs="+", required=True, metavar="FILE",
        help="files, folders of Dataset.save_to_disk, or - for standard input")
    add("--json-keys", "--json-key", nargs="+", default=["text"], metavar="KEY",
        help="texts of a JSON line, or columns (default: text)")
    add("--input-format", choices=("auto", "jsonl", "text"), default="auto",
        help="auto: JSONL if the name ends in .jsonl, .json or .ndjson (before .gz or .zst)")
    add("--skip-bad-lines", action="store_true", help="skip lines that cannot be read, instead of stopping")
    add("--type", choices=("sentencepiece", "wordpiece"), default="sentencepiece",
        help="wordpiece: BERT's, a vocab.txt for --vocab-file")
    add("--bert", action="store_true",
        help="SentencePiece with BERT's tokens [PAD], [CLS], [SEP], [MASK] (WordPiece always has them)")
    add("--cased", action="store_true", help="WordPiece for BertWordPieceCase instead of BertWordPieceLowerCase")
    add("--output", required=True, metavar="FILE", help="the .model or vocab.txt file to write")
    add("--vocab-size", type=integer(2**31 - 1), default=8000, metavar="N",
        help="ids, bytes and special tokens among them; of WordPiece at most so many (default: 8000)")
    add("--sample-bytes", type=integer(), default=SAMPLE_BYTES, metavar="N",
        help=f"text to train on, about; lines evenly spread over all of it (default: {SAMPLE_BYTES})")
    # fmt: on
    args = parser.parse_args(argv)
    began = time.monotonic()
    if Path(args.output).absolute().parent.is_dir():  # else it is made
        require_place(args.output, "--output", only_file=True)
    keys, size = tuple(args.json_keys), args.vocab_size
    check_inputs(args.input, args.input_format, keys)
    read = read_texts(args.input, input_format=args.input_format, keys=keys, skip_bad_lines=args.skip_bad_lines)
    texts = (text for document in read for text in document)
    if args.type == "wordpiece":
        report = train_wordpiece(texts, args.output, size, args.sample_bytes, lowercase=not args.cased)
    elif args.cased:
        raise ConfigError("--cased is for --type wordpiece: SentencePiece models here always keep case")
    else:
        report = train_sentencepiece(texts, args.output, size, args.sample_bytes, args.bert)
    of_all = f" of {report.num_text_bytes / 1e6:.1f}" if report.num_sampled_bytes < report.num_text_bytes else ""
    fewer = f" (the text has no more; --vocab-size is {size})" if report.vocab_size < size else ""
    print(
        f"{args.output}: {report.vocab_size} pieces{fewer} from {report.num_sampled_bytes / 1e6:.1f}{of_all} MB of text"
        f" in {time.monotonic() - began:.1f} s, {report.bytes_per_token:.2f} bytes per token"
    )
    return EXIT_OK
