"""Evaluate a trained model: on a data set, on texts, on last-word prediction, on multiple-choice questions.

    megatron-sp evaluate --load runs/quickstart/gpt --text book.txt
    megatron-sp evaluate --load runs/quickstart/gpt --data-path data/corpus_text_document --split 97,3,0 --part valid
    megatron-sp evaluate --load runs/quickstart/gpt --last-word lambada.jsonl --json lambada.json
    bash scripts/launch.sh 2 tools/evaluate.py --load runs/quickstart/gpt --choices questions.jsonl

A GPT supports all four. A BERT supports --data-path (its masked tokens) and --text (pseudo-perplexity). Processes
beyond tp * sp are further copies of the model and share the work. Results go to stdout, everything else to stderr;
docs/how-to/evaluate.md explains them.
"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any, cast

from megatron_sp import __version__
from megatron_sp.config.flags.inference_flags import add_model_flags
from megatron_sp.utils.command_parser import documented_parser
from megatron_sp.utils.entry_point import integer
from megatron_sp.utils.errors import ConfigError, DiskError
from megatron_sp.utils.files import require_place, write_output

if TYPE_CHECKING:
    from megatron_sp.config.schema import Config
    from megatron_sp.inference.evaluation import Reading
    from megatron_sp.utils.launch import Launch

TASKS = {"data_path": "of_data", "text": "of_text", "last_word": "of_last_words", "choices": "of_choices"}
INSTEAD = {name: "and this tool wants a GPT or a BERT" for name in ("GPT", "BERT")} | {
    "classifier": "which puts texts into classes: megatron-sp finetune says how well"
}


def main(argv: list[str] | None = None, prog: str | None = None) -> int:
    """Evaluate the model of a command line; return the exit code."""
    parser = documented_parser(prog, __doc__)
    add_model_flags(parser)
    # fmt: off
    tasks = parser.add_argument_group("what is evaluated (one of these)").add_mutually_exclusive_group(required=True)
    add = tasks.add_argument
    add("--data-path", metavar="PREFIX",
        help=".bin/.idx data: loss per token of the joined documents, or of BERT's masked tokens")
    add("--text", metavar="FILE",
        help="plain text, or .jsonl with a 'text' on each line: loss per token, bits per byte")
    add("--last-word", metavar="FILE", help=".jsonl with a 'text' on each line: is its last word found?")
    add("--choices", metavar="FILE", help=".jsonl with 'context', 'choices' and 'answer' (a number) on each line")
    add = parser.add_argument_group("how").add_argument
    add("--split", metavar="A,B,C",
        help="with --data-path: weights of training, validation and test (default: all is taken)")
    add("--part", choices=("train", "valid", "test"), default="valid",
        help="with --split: which of them (default: valid)")
    add("--seq-length", type=integer(), metavar="N", help="tokens that the model reads at once (default: the run's)")
    add("--stride", type=integer(), metavar="N",
        help="windows begin every N tokens and overlap; each scores what is new (default: no overlap)")
    add("--batch-size", type=integer(2**20), default=8, metavar="N", help="rows of a forward pass (default: 8)")
    add("--limit", type=integer(), metavar="N", help="only the first N documents, lines, or rows of BERT")
    add("--json", metavar="OUT", help="write the numbers, and where they come from, into this file too")
    # fmt: on
    options = parser.parse_args(argv)
    from megatron_sp.inference.team import run_tool

    return run_tool(lambda launch: _measure(options, launch))


def _reading(options: argparse.Namespace, config: Config) -> Reading:
    # window length, stride, batch size and limit; ConfigError: they do not fit the model or each other
    from megatron_sp.inference.evaluation import Reading

    limit = config.model.max_positions
    length = options.seq_length or config.model.seq_length or limit
    stride = length if options.stride is None else options.stride
    if not 2 <= length <= limit:
        raise ConfigError(f"--seq-length ({length}) must be 2 to {limit}: the model has that many positions")
    if not 1 <= stride <= length:
        rule = f"must be 1 to --seq-length ({length}), or tokens between two windows would not be scored"
        raise ConfigError(f"--stride ({stride}) {rule}")
    if options.batch_size < 1 or (options.limit is not None and options.limit < 1):
        raise ConfigError(f"--batch-size ({options.batch_size}) and --limit ({options.limit}) must be at least 1")
    if options.stride is not None and not (options.data_path or options.text):
        raise ConfigError("--stride needs --data-path or --text: it shifts windows over a text")
    if options.split is not None and options.data_path is None:
        raise ConfigError("--split needs --data-path: it selects a part of a data set")
    if config.model.is_bert and options.bos is not None:
        raise ConfigError("--bos and --no-bos are for models that continue text, and this is a BERT: leave it out")
    if config.model.is_bert and (options.last_word or options.choices or options.stride):
        reason = "need a model that continues text, and this is a BERT: use --data-path or --text"
        raise ConfigError(f"--last-word, --choices and --stride {reason}")
    if options.json is not None:
        require_place(options.json, "--json")
    return Reading(length, stride, options.batch_size, options.limit)


def _measure(options: argparse.Namespace, launch: Launch) -> None:
    from megatron_sp.inference import team as inference
    from megatron_sp.inference.evaluation import BertEvaluation, GPTEvaluation
    from megatron_sp.models.bert import BertModel
    from megatron_sp.models.gpt import GPTModel

    config = inference.stored_config(options)
    reading = _reading(options, config)
    inference.check_layout(options, launch.world_size, copies=True)
    team = inference.join(options, launch)
    task = next(name for name in TASKS if getattr(options, name) is not None)
    path = getattr(options, task)
    evaluation: Any
    if config.model.is_bert:
        loaded = inference.load(options, team, BertModel, "BERT", INSTEAD)
        stored, bert = loaded.stored, cast("BertModel", loaded.model)
        evaluation = BertEvaluation(bert, stored.tokenizer, stored.config, reading, team)
    else:
        loaded = inference.load(options, team, GPTModel, "GPT", INSTEAD)
        stored, gpt = loaded.stored, cast("GPTModel", loaded.model)
        evaluation = GPTEvaluation(gpt, stored.tokenizer, reading, team)
    team.say(loaded.description)
    part = (options.split, options.part) if task == "data_path" else ()
    numbers = getattr(evaluation, TASKS[task])(path, *part)
    with team.agree():  # a failure to write is every rank's
        if team.rank == 0:
            about = {
                "task": task, "file": path, "split": options.split, "part": options.part if options.split else None,
                "checkpoint": str(stored.folder), "step": stored.step, "dtype": options.dtype,
                "seq_length": reading.length, "stride": reading.stride, "batch_size": reading.batch_size,
                "limit": reading.limit, "tp": options.tp_size, "sp": options.sp_size, "cp": options.cp_size,
                "dp": team.dp_size, "version": __version__,
            }  # fmt: skip
            report(numbers, about, options.json)


def report(numbers: dict[str, float | int | None], about: dict[str, Any], output: str | None) -> None:
    """Print the results and write the file. Raises DiskError."""
    for name, value in numbers.items():
        if value is not None:
            text = f"{value:,}" if isinstance(value, int) else f"{value:.6g}"
            print(f"{name.replace('_', ' '):18} {text}")
    if output is None:
        return
    finite = {name: value if value is None or abs(value) < float("inf") else None for name, value in numbers.items()}
    try:
        write_output(output, json.dumps({"results": finite, **about}, indent=2) + "\n")
    except OSError as error:
        raise DiskError(f"--json {output} cannot be written: {error.strerror}") from None
