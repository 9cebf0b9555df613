"""``megatron-sp data``: verify, inspect, merge and split ``.bin``/``.idx`` data sets."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron_sp.utils.entry_point import integer
from megatron_sp.utils.errors import EXIT_OK, ConfigError, ReportedError

if TYPE_CHECKING:
    from megatron_sp.data.indexed_dataset import IndexedDataset

_SHOWN_TOKENS = 64


def add_actions(parser: argparse.ArgumentParser, programs: Mapping[str, str]) -> None:
    """Add the subcommands; ``programs``: name and description of those with a command line of their own."""
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)

    def action(name: str, text: str) -> argparse.ArgumentParser:
        return actions.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")

    verify = action(
        "verify",
        "read a .bin/.idx pair once from end to end: header, sizes, offsets, documents, every token, and every byte by PREFIX.sha256",
    )
    verify.add_argument("prefix", nargs="+", metavar="PREFIX", help="path without .bin or .idx")
    verify.add_argument(
        "--vocab-size",
        type=integer(2**31 - 1),
        help="token ids from here on are errors (default: only negative ids are)",
    )
    verify.add_argument(
        "--write-digest", action="store_true", help="write PREFIX.sha256 of the files as they are, if there is none"
    )
    verify.set_defaults(run=_verify)

    inspect = action("inspect", "show a data set's sizes, and some documents as token ids or text")
    inspect.add_argument("prefix", metavar="PREFIX", help="path without .bin or .idx")
    inspect.add_argument(
        "--document", type=integer(), nargs="+", default=[], metavar="N", help="documents to show, from 0 on"
    )
    inspect.add_argument("--tokens", type=integer(2**31 - 1), default=_SHOWN_TOKENS, metavar="N",
                         help=f"of each sequence, at most (default: {_SHOWN_TOKENS})")  # fmt: skip
    inspect.add_argument(
        "--tokenizer-type", metavar="TYPE", help="show documents as text; as for megatron-sp preprocess"
    )
    for flag, text in (("--tokenizer-model", "SentencePiece .model, or tokenizer.json"),
                       ("--vocab-file", "vocab.txt, or GPT-2's vocab.json"), ("--merge-file", "GPT-2's merges.txt")):  # fmt: skip
        inspect.add_argument(flag, metavar="FILE", help=text)
    inspect.add_argument("--json", action="store_true", help="print it as JSON")
    inspect.set_defaults(run=_inspect)

    merge = action("merge", "join data sets, one after another, such as the parts that array jobs have made")
    merge.add_argument(
        "prefix", nargs="+", metavar="PREFIX", help="in order; names of their files will do: x-*-of-00008.idx"
    )
    merge.add_argument("--output", required=True, metavar="PREFIX", help="the new data set")
    merge.set_defaults(run=_merge)

    split = action("split", "cut a data set into several of consecutive documents")
    split.add_argument("prefix", metavar="PREFIX", help="path without .bin or .idx")
    split.add_argument("--weights", required=True, metavar="A,B,...", help="of the numbers of documents, such as 97,3")
    split.add_argument(
        "--output", required=True, nargs="+", metavar="PREFIX", help="the new data sets, one for each weight"
    )
    split.set_defaults(run=_split)
    for name, text in programs.items():
        actions.add_parser(name, help=text, add_help=False)


def _verify(args: argparse.Namespace) -> int:
    import hashlib

    from megatron_sp.data import digest_file
    from megatron_sp.data.bert_index import sentence_summary
    from megatron_sp.data.indexed_dataset import IndexedDataset

    code = 0
    for prefix in args.prefix:
        try:
            indexed = IndexedDataset(prefix)
            hasher = hashlib.sha256()
            report = indexed.verify(args.vocab_size, hasher)
            digests = {".bin": hasher.hexdigest(), ".idx": digest_file.sha256_of(indexed.idx_path)}
            has_digest = digest_file.compare(indexed.prefix, digests)
            if args.write_digest and not has_digest:
                digest_file.write(indexed.prefix, digests)
        except ReportedError as error:
            print(f"{prefix}: {error}", file=sys.stderr)
            code = error.exit_code
            continue
        ids = f", ids {report.smallest} to {report.largest}" if report.num_tokens else ""
        counts = (
            f"{report.num_documents:,} documents, {report.num_sequences:,} sequences, {report.num_tokens:,} tokens{ids}"
        )
        named = indexed.prefix + digest_file.SUFFIX
        print(f"{prefix}: sound: {counts}{f'; every byte is as {named} says' if has_digest else ''}")
        if not has_digest and args.write_digest:
            print(f"{prefix}: {named} is written: it describes the files as they are now")
        elif not has_digest:
            print(
                f"{prefix}: there is no {named} to compare the bytes with: --write-digest writes one, of the files as they are"
            )
        sentences = sentence_summary(indexed.document_index, indexed.sequence_lengths)
        if sentences:
            print(f"{prefix}: {sentences}")
    return code


def _inspect(args: argparse.Namespace) -> int:
    from megatron_sp.data.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(args.prefix)
    facts = _facts(dataset)
    shown = _documents(dataset, args)
    if args.json:
        print(json.dumps({**facts, "shown": shown}, indent=2, ensure_ascii=False))
        return EXIT_OK
    width = max(map(len, facts))
    for name, value in facts.items():
        print(f"{name.replace('_', ' '):<{width}}  {f'{value:,}' if isinstance(value, int) else value}")
    for document in shown:
        print(f"\ndocument {document['document']}")
        for sequence in document["sequences"]:
            print(f"  {sequence['num_tokens']:,} tokens: {sequence.get('text', sequence['ids'])}")
    return EXIT_OK


def _facts(dataset: IndexedDataset) -> dict[str, Any]:
    import numpy as np

    sizes = np.diff(np.concatenate([[0], np.cumsum(dataset.sequence_lengths, dtype=np.int64)])[dataset.document_index])
    lengths: dict[str, Any] = {}
    if sizes.size:
        lengths = {
            "empty_documents": int((sizes == 0).sum()), "shortest_document": int(sizes.min()),
            "median_document": float(np.median(sizes)), "longest_document": int(sizes.max()),
        }  # fmt: skip
    return {
        "data_set": dataset.prefix, "dtype": dataset.dtype.name, "documents": int(sizes.size), "sequences": len(dataset),
        "tokens": int(dataset.num_tokens), **lengths,
    }  # fmt: skip


def _documents(dataset: IndexedDataset, args: argparse.Namespace) -> list[dict[str, Any]]:
    from megatron_sp.config.schema import DataConfig
    from megatron_sp.data.indexed_dataset import document_tokens
    from megatron_sp.data.tokenizers import build_tokenizer

    data = DataConfig(
        tokenizer_type=args.tokenizer_type, tokenizer_model=args.tokenizer_model, vocab_file=args.vocab_file, merge_file=args.merge_file
    )  # fmt: skip
    named = any((args.tokenizer_type, args.tokenizer_model, args.vocab_file, args.merge_file))
    tokenizer = build_tokenizer(data, None) if named else None
    shown = []
    for number in args.document:
        sequences = []
        for ids in document_tokens(dataset, number):
            few: list[int] = ids[: max(0, args.tokens)]
            record: dict[str, Any] = {"num_tokens": len(ids), "ids": few}
            if tokenizer is not None:
                record["text"] = tokenizer.decode(few)
            sequences.append(record)
        shown.append({"document": number, "sequences": sequences})
    return shown


def _merge(args: argparse.Namespace) -> int:
    from megatron_sp.data.indexed_dataset import summary
    from megatron_sp.data.writer import merge_datasets

    print(summary(merge_datasets(args.prefix, args.output)))
    return EXIT_OK


def _split(args: argparse.Namespace) -> int:
    from megatron_sp.data.indexed_dataset import summary
    from megatron_sp.data.writer import split_dataset

    try:
        weights = [float(word) for word in args.weights.split(",")]
    except ValueError:
        raise ConfigError(
            f"--weights {args.weights[:60]}: expected numbers with commas between them, such as 97,3"
        ) from None
    for made in split_dataset(args.prefix, weights, args.output):
        print(summary(made))
    return EXIT_OK
