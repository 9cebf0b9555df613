"""Command line of ``megatron-sp finetune``: the flags of a training follow from its own."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from megatron_sp.commands.pretrain import parse_config
from megatron_sp.utils.command_parser import documented_parser
from megatron_sp.utils.errors import ConfigError, ReportedError
from megatron_sp.utils.launch import is_first_rank, launched_processes

if TYPE_CHECKING:  # imports numpy, which needs memory: run_program() explains if there is none
    from megatron_sp.data.classification import TextTable

_DESCRIPTION = """\
Fine-tune a pretrained BERT to classify texts, on one process or many, and report its accuracy.

    megatron-sp finetune --task sst-2 --train-data SST-2/train.tsv --valid-data SST-2/dev.tsv \
        --pretrained-checkpoint runs/bert --epochs 3 --micro-batch-size 8 --global-batch-size 32 --lr 5e-5 --save \
runs/sst2
    bash scripts/launch.sh 2 tools/finetune_classifier.py --task jsonl --text text --label section ... \
--sequence-parallel-size 2

All flags of pretrain_bert.py work here too: layouts, ZeRO, precision, --auto-resume. Model and tokenizer are the
checkpoint's. At the end every validation example is classified: accuracy, exact match, F1 and Matthews' correlation go
to the log and to metrics.jsonl, the predictions to RUN/predictions.tsv.
"""
# flag: field of ``TextTable``
_COLUMNS = {"text": "first", "second_text": "second", "label": "label", "group": "group"}
_TOKENIZER = ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file")


def main(argv: list[str] | None = None, prog: str | None = None) -> None:
    """Train a classifier; flags of this command and of training may be mixed. Ends the process."""
    from megatron_sp.data.classification import check_labels, labels_of, read_examples

    options, rest = parse(argv, prog)
    talks = is_first_rank()

    def say(line: str) -> None:
        if talks:
            print(line, file=sys.stderr)

    try:
        table = _table(options)
        halves = []
        for path in (options.train_data, options.valid_data):
            examples, skipped = read_examples(path, table, skip_bad_lines=options.skip_bad_lines)
            if skipped:
                say(f"warning: {path}: {skipped} bad lines were left out")
            halves.append(examples)
        train, valid = halves
        check_labels(labels_of(table, train), valid)
        flags = pretraining_flags(options, rest, len(train))
    except ReportedError as error:
        say(f"error: {error}")
        raise SystemExit(error.exit_code) from None
    config = parse_config(flags, prog=prog, description="Fine-tune a classifier.", family="bert")
    from megatron_sp.tasks.classification import Classification
    from megatron_sp.training.loop import pretrain

    task = Classification(table, train, valid)
    task.fit(config, launched_processes())
    pretrain(config, task.task())


def parse(argv: list[str] | None = None, prog: str | None = None) -> tuple[argparse.Namespace, list[str]]:
    """Parse this tool's own flags; also return the rest, which are flags of pretraining."""
    from megatron_sp.data.classification import GLUE

    epilog = "every flag of pretrain_bert.py can follow: see pretrain_bert.py --help"
    parser = documented_parser(prog, _DESCRIPTION, epilog=epilog)
    add = parser.add_argument
    # fmt: off
    add("--task", required=True, choices=[*GLUE, "tsv", "jsonl"],
        help="one of GLUE's, as its files are; or any .tsv with a header, or .jsonl")
    add("--train-data", required=True, metavar="FILE")
    add("--valid-data", required=True, metavar="FILE")
    add("--text", metavar="NAME", help="tsv, jsonl: column of the text (default: text)")
    add("--second-text", metavar="NAME", help="tsv, jsonl: column of the second text (default: there is none)")
    add("--label", metavar="NAME", help="tsv, jsonl: column of the label (default: label)")
    add("--group", metavar="NAME",
        help="column that groups examples which count as right only all together (exact match)")
    add("--pretrained-checkpoint", metavar="RUN",
        help="run, or step folder, to start from (default: random weights)")
    add("--epochs", type=float, default=3.0, metavar="N", help="passes over the training examples (default: 3)")
    add("--skip-bad-lines", action="store_true",
        help="skip and count lines that are not examples, instead of stopping")
    # fmt: on
    return parser.parse_known_args(argv)


def _table(options: argparse.Namespace) -> TextTable:
    # the columns of the examples' parts in the data files
    from megatron_sp.data.classification import GLUE, TextTable

    if not 0 < options.epochs < 1e6:
        raise ConfigError(f"--epochs ({options.epochs}) must be above 0: passes over the training examples")
    given = {field: getattr(options, flag) for flag, field in _COLUMNS.items() if getattr(options, flag) is not None}
    return replace(GLUE.get(options.task, TextTable()), **given)


def pretraining_flags(options: argparse.Namespace, rest: list[str], num_examples: int) -> list[str]:
    """Return the command line of the run; what the user has not given follows from the checkpoint or the data."""
    flags = ["--train-data-path", options.train_data, "--valid-data-path", options.valid_data]
    flags += ["--dataloader-type", "cyclic"]
    if not _names(rest, "--train-iters", "--train-samples"):
        flags += ["--train-samples", str(max(1, round(options.epochs * num_examples)))]
    if options.pretrained_checkpoint is not None:
        flags += ["--load", options.pretrained_checkpoint, "--finetune", "--use-checkpoint-args"]
        flags += _stored_tokenizer(options.pretrained_checkpoint, rest)
    return [*flags, *rest]


def _names(words: list[str], *flags: str) -> bool:
    return any(word.split("=")[0].replace("_", "-") in flags for word in words)


def _stored_tokenizer(checkpoint: str, rest: list[str]) -> list[str]:
    # the flags of the checkpoint's tokenizer; empty if the command line names one
    from megatron_sp.checkpoint.checkpointer import Checkpointer
    from megatron_sp.config.schema import DataConfig
    from megatron_sp.data.tokenizers import kept

    flags = {name: f"--{name.replace('_', '-')}" for name in _TOKENIZER}
    if _names(rest, *flags.values()):
        return []
    reader = Checkpointer(None)
    folder = reader.find(checkpoint)
    state = reader.read_state(folder)
    stored = state.get("config", {}).get("data", {})
    data = DataConfig(**{name: stored.get(name) for name in _TOKENIZER})
    kept.take(data, kept.Record.from_json(state.get("tokenizer")), folder)  # the run's own copy of the files
    values = {flag: getattr(data, name) for name, flag in flags.items()}
    return [word for flag, value in values.items() if value is not None for word in (flag, str(value))]
