"""``megatron-sp data``: make, verify, inspect, merge and split data sets (``.bin``/``.idx``, JSONL)."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

from megatron_sp.utils.entry_point import integer
from megatron_sp.utils.errors import EXIT_OK, ConfigError, ReportedError

CORPUS = "Gather Python's language reference and standard library as JSONL, one document each."
SECTION_TASK = """\
Write a task to fine-tune on: ``megatron-sp data section-task --corpus corpus.jsonl --output sections``.

The task is to classify a passage by the part of Python's own text that it comes from: one of eight, the language
reference and packages of the standard library. train.jsonl and valid.jsonl are for megatron-sp finetune --task jsonl;
all classes have equally many passages.
"""


def add_actions(parser: argparse.ArgumentParser) -> None:
    """Add a subcommand for each action."""
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)

    def action(name: str, run: Callable[[argparse.Namespace], int], text: str, **more: Any) -> Callable[..., Any]:
        more = {"description": text[0].upper() + text[1:] + ".", **more}
        command: argparse.ArgumentParser = actions.add_parser(name, help=text, **more)
        command.set_defaults(run=run)
        return command.add_argument

    prefix = "path without .bin or .idx"
    # fmt: off
    add = action("verify", _verify, "read a .bin/.idx pair once from end to end: header, sizes, offsets, documents,"
                 " every token, and every byte by PREFIX.sha256")
    add("prefix", nargs="+", metavar="PREFIX", help=prefix)
    add("--vocab-size", type=integer(2**31 - 1),
        help="token ids from here on are errors (default: only negative ids are)")
    add("--write-digest", action="store_true", help="write PREFIX.sha256 of the files as they are, if there is none")

    add = action("inspect", _inspect, "show a data set's sizes, and some documents as token ids or text")
    add("prefix", metavar="PREFIX", help=prefix)
    add("--document", type=integer(), nargs="+", default=[], metavar="N", help="documents to show, from 0 on")
    add("--tokens", type=integer(2**31 - 1), default=64, metavar="N", help="of each sequence, at most (default: 64)")
    add("--tokenizer-type", metavar="TYPE", help="show documents as text; as for megatron-sp preprocess")
    add("--tokenizer-model", metavar="FILE", help="SentencePiece .model, or tokenizer.json")
    add("--vocab-file", metavar="FILE", help="vocab.txt, or GPT-2's vocab.json")
    add("--merge-file", metavar="FILE", help="GPT-2's merges.txt")
    add("--json", action="store_true", help="print it as JSON")

    text = "join data sets, one after another, such as the parts that array jobs have made"
    add = action("merge", _merge_or_split, text)
    add("prefix", nargs="+", metavar="PREFIX", help="in order; names of their files will do: x-*-of-00008.idx")
    add("--output", required=True, metavar="PREFIX", help="the new data set")

    add = action("split", _merge_or_split, "cut a data set into several of consecutive documents")
    add("prefix", metavar="PREFIX", help=prefix)
    add("--weights", required=True, metavar="A,B,...", help="of the numbers of documents, such as 97,3")
    add("--output", required=True, nargs="+", metavar="PREFIX", help="the new data sets, one for each weight")

    add = action("corpus", _corpus, "write a JSONL corpus of the text that comes with Python", description=CORPUS)
    add("--output", required=True, metavar="FILE", help="the JSONL file to write; keys: text, source")
    add("--max-bytes", type=integer(), metavar="N",
        help="stop before the document that would make it more than N bytes of text (default: all there is)")

    add = action("section-task", _section_task, "make a classification task from such a corpus",
                 description=SECTION_TASK, formatter_class=argparse.RawDescriptionHelpFormatter)
    add("--corpus", required=True, metavar="FILE", help="what megatron-sp data corpus wrote")
    add("--output", required=True, metavar="FOLDER", help="for train.jsonl and valid.jsonl")
    add("--classes", type=integer(), default=8, metavar="N", help="the largest ones (default: 8)")
    add("--train", type=integer(), default=390, metavar="N",
        help="passages of each class to train on, if the smallest has so many (default: 390)")
    add("--valid", type=integer(), default=50, metavar="N",
        help="passages of each class to validate on (default: 50)")
    # fmt: on


def _verify(args: argparse.Namespace) -> int:
    import hashlib

    from megatron_sp.data import digest_file
    from megatron_sp.data.bert_index import sentence_summary
    from megatron_sp.data.indexed_dataset import IndexedDataset

    code = EXIT_OK
    for prefix in args.prefix:
        try:
            indexed = IndexedDataset(prefix)
            hasher = hashlib.sha256()  # fed with what ``verify`` reads anyway: one pass over the .bin file
            report = indexed.verify(args.vocab_size, hasher)
            digests = {".bin": hasher.hexdigest(), ".idx": digest_file.sha256_of(indexed.idx_path)}
            has_digest = digest_file.compare(indexed.prefix, digests)
            if args.write_digest and not has_digest:
                digest_file.write(indexed.prefix, digests)
        except ReportedError as error:  # the other data sets are read, too; the last error gives the exit code
            print(f"{prefix}: {error}", file=sys.stderr)
            code = error.exit_code
            continue
        named = indexed.prefix + digest_file.SUFFIX
        counts = f"{report.num_documents:,} documents, {report.num_sequences:,} sequences, {report.num_tokens:,} tokens"
        counts += f", ids {report.smallest} to {report.largest}" if report.num_tokens else ""
        print(f"{prefix}: sound: {counts}{f'; every byte is as {named} says' if has_digest else ''}")
        if not has_digest:
            hint = "--write-digest writes one, of the files as they are"
            note = f"there is no {named} to compare the bytes with: {hint}"
            if args.write_digest:
                note = f"{named} is written: it describes the files as they are now"
            print(f"{prefix}: {note}")
        if sentences := sentence_summary(indexed.document_index, indexed.sequence_lengths):
            print(f"{prefix}: {sentences}")
    return code


def _inspect(args: argparse.Namespace) -> int:
    import numpy as np

    from megatron_sp.config.schema import DataConfig
    from megatron_sp.data.indexed_dataset import IndexedDataset, document_tokens
    from megatron_sp.data.tokenizers import build_tokenizer

    dataset = IndexedDataset(args.prefix)
    sizes = np.diff(np.concatenate([[0], np.cumsum(dataset.sequence_lengths, dtype=np.int64)])[dataset.document_index])
    facts: dict[str, Any] = {"data_set": dataset.prefix, "dtype": dataset.dtype.name, "documents": int(sizes.size)}
    facts |= {"sequences": len(dataset), "tokens": int(dataset.num_tokens)}
    if sizes.size:
        facts |= {"empty_documents": int((sizes == 0).sum()), "shortest_document": int(sizes.min())}
        facts |= {"median_document": float(np.median(sizes)), "longest_document": int(sizes.max())}
    given = {name: getattr(args, name) for name in ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file")}
    tokenizer = build_tokenizer(DataConfig(**given), None) if any(given.values()) else None
    shown: list[dict[str, Any]] = []
    for number in args.document:
        sequences = []
        for ids in document_tokens(dataset, number):
            few: list[int] = ids[: max(0, args.tokens)]
            text = {} if tokenizer is None else {"text": tokenizer.decode(few)}
            sequences.append({"num_tokens": len(ids), "ids": few, **text})
        shown.append({"document": number, "sequences": sequences})
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


def _merge_or_split(args: argparse.Namespace) -> int:
    from megatron_sp.data.indexed_dataset import summary
    from megatron_sp.data.writer import merge_datasets, split_dataset

    if "weights" not in args:
        print(summary(merge_datasets(args.prefix, args.output)))
        return EXIT_OK
    try:
        weights = [float(word) for word in args.weights.split(",")]
    except ValueError:
        text = f"--weights {args.weights[:60]}: expected numbers with commas between them, such as 97,3"
        raise ConfigError(text) from None
    for report in split_dataset(args.prefix, weights, args.output):
        print(summary(report))
    return EXIT_OK


def _corpus(args: argparse.Namespace) -> int:
    from megatron_sp.data.corpus import WANTED_BYTES, write_corpus

    num_documents, num_bytes = write_corpus(args.output, max_bytes=args.max_bytes)
    print(f"{args.output}: {num_documents} documents, {num_bytes / 1e6:.1f} MB of text")
    if args.max_bytes is None and num_bytes < WANTED_BYTES:
        note = "this Python's standard library is not complete; going on with what there is"
        print(f"note: {WANTED_BYTES / 1e6:.0f} MB were expected: {note}")
    return EXIT_OK


def _section_task(args: argparse.Namespace) -> int:
    if min(args.train, args.valid) < 1 or args.classes < 2:
        raise ConfigError("there must be two classes at least, and a passage of each to train and to validate on")
    from megatron_sp.data.corpus import write_task  # imports numpy, which needs memory

    task = write_task(args.corpus, args.output, args.classes, args.train, args.valid)
    classes = ", ".join(sorted({section for section, _ in task.train}))
    print(f"{args.output}: {len(task.train)} passages to train on, {len(task.valid)} to validate on, from {classes}")
    return EXIT_OK
