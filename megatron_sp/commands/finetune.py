"""Fine-tune a pretrained BERT to classify texts, on one process or many, and report its accuracy.

    megatron-sp finetune --task sst-2 --train-data SST-2/train.tsv --valid-data SST-2/dev.tsv \
        --pretrained-checkpoint runs/bert --epochs 3 --micro-batch-size 8 --global-batch-size 32 --lr 5e-5 --save runs/sst2
    bash scripts/launch.sh 2 tools/finetune_classifier.py --task jsonl --text text --label section ... --sequence-parallel-size 2

All flags of pretrain_bert.py work here too: layouts, ZeRO, precision, --auto-resume. Model and tokenizer are the
checkpoint's. At the end every validation example is classified: accuracy, exact match, F1 and Matthews' correlation go
to the log and to metrics.jsonl, the predictions to RUN/predictions.tsv.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from megatron_sp.commands.pretrain import parse_config
from megatron_sp.utils.command_parser import documented_parser
from megatron_sp.utils.errors import ConfigError, ReportedError
from megatron_sp.utils.launch import is_first_rank, launched_processes

if TYPE_CHECKING:  # imports numpy, which needs memory: run_program() explains if there is none
    from megatron_sp.data.classification import Example, TextTable

_COLUMNS = {"text": "first", "second-text": "second", "label": "label", "group": "group"}


def parse(argv: list[str] | None = None, prog: str | None = None) -> tuple[argparse.Namespace, list[str]]:
    """Parse this tool's own flags; also return the rest, which are flags of pretraining."""
    from megatron_sp.data.classification import GLUE

    parser = documented_parser(
        prog, __doc__, epilog="every flag of pretrain_bert.py can follow: see pretrain_bert.py --help"
    )
    parser.add_argument("--task", required=True, choices=[*GLUE, "tsv", "jsonl"],
                        help="one of GLUE's, as its files are; or any .tsv with a header, or .jsonl")  # fmt: skip
    parser.add_argument("--train-data", required=True, metavar="FILE")
    parser.add_argument("--valid-data", required=True, metavar="FILE")
    parser.add_argument("--text", metavar="NAME", help="tsv, jsonl: column of the text (default: text)")
    parser.add_argument(
        "--second-text", metavar="NAME", help="tsv, jsonl: column of the second text (default: there is none)"
    )
    parser.add_argument("--label", metavar="NAME", help="tsv, jsonl: column of the label (default: label)")
    parser.add_argument(
        "--group",
        metavar="NAME",
        help="column that groups examples which count as right only all together (exact match)",
    )
    parser.add_argument(
        "--pretrained-checkpoint", metavar="RUN", help="run, or step folder, to start from (default: random weights)"
    )
    parser.add_argument(
        "--epochs", type=float, default=3.0, metavar="N", help="passes over the training examples (default: 3)"
    )
    parser.add_argument(
        "--skip-bad-lines", action="store_true", help="skip and count lines that are not examples, instead of stopping"
    )
    return parser.parse_known_args(argv)


def table_of(options: argparse.Namespace) -> TextTable:
    """Return the columns of the examples' parts in the data files.

    Raises:
        ConfigError: --epochs is not a valid number of passes.
    """
    from megatron_sp.data.classification import GLUE, TextTable

    if not 0 < options.epochs < 1e6:
        raise ConfigError(f"--epochs ({options.epochs}) must be above 0: passes over the training examples")
    table = GLUE.get(options.task, TextTable())
    given = {field: getattr(options, flag.replace("-", "_")) for flag, field in _COLUMNS.items()}
    return replace(table, **{field: value for field, value in given.items() if value is not None})


def pretraining_flags(options: argparse.Namespace, rest: list[str], num_examples: int) -> list[str]:
    # the command line of the run; flags that the user has not given follow from the checkpoint or the data
    flags = [
        "--train-data-path",
        options.train_data,
        "--valid-data-path",
        options.valid_data,
        "--dataloader-type",
        "cyclic",
    ]
    if not _names(rest, "--train-iters", "--train-samples"):
        flags += ["--train-samples", str(max(1, round(options.epochs * num_examples)))]
    if options.pretrained_checkpoint is not None:
        flags += [
            "--load",
            options.pretrained_checkpoint,
            "--finetune",
            "--use-checkpoint-args",
            *stored_tokenizer(options, rest),
        ]
    return [*flags, *rest]


def _names(words: list[str], *flags: str) -> bool:
    return any(word.split("=")[0].replace("_", "-") in flags for word in words)


def stored_tokenizer(options: argparse.Namespace, rest: list[str]) -> list[str]:
    # the flags of the checkpoint's tokenizer; empty if the command line names one
    from megatron_sp.checkpoint.checkpointer import Checkpointer
    from megatron_sp.config.schema import DataConfig
    from megatron_sp.data.tokenizers import kept

    if _names(rest, "--tokenizer-type", "--tokenizer-model", "--vocab-file", "--merge-file"):
        return []
    reader = Checkpointer(None)
    folder = reader.find(options.pretrained_checkpoint)
    state = reader.read_state(folder)
    stored = state.get("config", {}).get("data", {})
    names = ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file")
    data = DataConfig(**{name: stored.get(name) for name in names})
    kept.take(data, kept.Record.from_json(state.get("tokenizer")), folder)
    found = [(f"--{name.replace('_', '-')}", getattr(data, name)) for name in names]
    return [word for flag, value in found if value is not None for word in (flag, str(value))]


def read(
    options: argparse.Namespace, table: TextTable, say: Callable[[str], None]
) -> tuple[list[Example], list[Example]]:
    """Read the training and the validation examples."""
    from megatron_sp.data.classification import read_examples

    found = []
    for path in (options.train_data, options.valid_data):
        examples, skipped = read_examples(path, table, skip_bad_lines=options.skip_bad_lines)
        if skipped:
            say(f"warning: {path}: {skipped} bad lines were left out")
        found.append(examples)
    return found[0], found[1]


def main(argv: list[str] | None = None, prog: str | None = None) -> None:
    """Train a classifier; flags of this command and of training may be mixed."""
    from megatron_sp.data.classification import check_labels, labels_of

    options, rest = parse(argv, prog)
    talks = is_first_rank()

    def say(line: str) -> None:
        if talks:
            print(line, file=sys.stderr)

    try:
        table = table_of(options)
        train, valid = read(options, table, say)
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
