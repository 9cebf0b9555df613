"""Train a tokenizer: ``megatron-sp tokenizer --input corpus.jsonl --output tokenizer.model``."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from megatron_sp.utils.command_parser import CommandParser
from megatron_sp.utils.errors import EXIT_OK, ConfigError, ReportedError
from megatron_sp.utils.output_file import require_place
from megatron_sp.utils.program import integer


def main(argv: list[str] | None = None, prog: str | None = None) -> int:
    """Run the tool; return the exit code."""
    # imports numpy, which needs memory
    from megatron_sp.data.tokenizers.train import SAMPLE_BYTES, texts_of_jsonl, train_sentencepiece, train_wordpiece

    parser = CommandParser(
        prog=prog,
        description="Train a lossless SentencePiece BPE model with byte fallback, or a WordPiece vocabulary, on JSONL.",
    )
    add = parser.add_argument
    add("--input", nargs="+", required=True, metavar="FILE", help="JSONL files")
    add("--json-key", default="text", metavar="KEY", help="text of a line (default: text)")
    add("--type", choices=("sentencepiece", "wordpiece"), default="sentencepiece", help="wordpiece: BERT's, a vocab.txt for --vocab-file")
    add("--bert", action="store_true", help="SentencePiece with BERT's tokens [PAD], [CLS], [SEP], [MASK] (WordPiece always has them)")
    add("--cased", action="store_true", help="WordPiece for BertWordPieceCase instead of BertWordPieceLowerCase")
    add("--output", required=True, metavar="FILE", help="the .model or vocab.txt file to write")
    add("--vocab-size", type=integer(2**31 - 1), default=8000, metavar="N", help="ids, bytes and special tokens among them (default: 8000)")
    add("--sample-bytes", type=integer(), default=SAMPLE_BYTES, metavar="N", help=f"text to train on, about (default: {SAMPLE_BYTES})")
    args = parser.parse_args(argv)
    began = time.monotonic()
    try:
        if Path(args.output).absolute().parent.is_dir():  # else it is made
            require_place(args.output, "--output", only_file=True)
        texts = (text for path in args.input for text in texts_of_jsonl(path, args.json_key))
        if args.type == "wordpiece":
            report = train_wordpiece(texts, args.output, args.vocab_size, args.sample_bytes, lowercase=not args.cased)
        elif args.cased:
            raise ConfigError("--cased is for --type wordpiece: SentencePiece models here always keep case")
        else:
            report = train_sentencepiece(texts, args.output, args.vocab_size, args.sample_bytes, args.bert)
    except ReportedError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(
        f"{args.output}: {report.vocab_size} pieces from {report.num_sampled_bytes / 1e6:.1f} MB in {time.monotonic() - began:.1f} s,"
        f" {report.bytes_per_token:.2f} bytes per token"
    )
    return EXIT_OK
