"""Summarize a run in a few lines: ``megatron-sp summarize runs/x``.

Reads metrics.jsonl. If the run was interrupted and resumed, the steps that were taken twice are compared bit for bit.
"""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

from megatron_sp.report.run_history import accuracies, are_equal, repetitions, starts_after_interruptions
from megatron_sp.utils.command_parser import CommandParser
from megatron_sp.utils.errors import EXIT_OK, ConfigError, DataError
from megatron_sp.utils.run_log import read_records


def summary(run: Path, records: list[dict[str, Any]], bytes_per_token: float | None) -> list[tuple[str, str]]:
    # rows of (name, value); with bytes_per_token (of the text) losses are told in bits per byte, too
    of_kind: dict[str | None, list[dict[str, Any]]] = {}
    for record in records:
        of_kind.setdefault(record.get("kind"), []).append(record)
    train, starts = of_kind.get("train"), of_kind.get("start")
    if not train:
        raise DataError(f"{run}/metrics.jsonl has no training step yet")
    rows = [("run folder", str(run)), ("steps", f"{train[-1]['step']}, {train[-1]['consumed_tokens']:,} tokens")]
    rows.append(("speed", f"{statistics.median(r['tokens_per_s'] for r in train):,.0f} tokens/s (median)"))
    if again := starts_after_interruptions(records):
        repeated = repetitions(records)
        twice, equal = len(repeated), sum(are_equal(taken) for taken in repeated.values())
        rows.append(("interruptions", f"{len(again)}, resumed at step {', '.join(str(s['step']) for s in again)}"))
        if twice:
            same = "all equal to the last bit" if equal == twice else f"{equal} of them equal to the last bit"
            rows.append(("logged steps taken twice", f"{twice}: loss, gradient norm and samples {same}"))
    for kind in ("valid", "test"):
        last = of_kind.get(kind, [{}])[-1]
        if not last:
            continue
        if last["loss"] is None:
            rows.append((f"{kind} loss", "none: no token has a loss"))
            continue
        loss, has_perplexity = float(last["loss"]), "perplexity" in last  # a classifier has none
        perplexity = f" (perplexity {math.exp(min(loss, 700)):.1f})" if has_perplexity else ""
        rows.append((f"{kind} loss", f"{loss:.4f}{perplexity}"))
        if has_perplexity and bytes_per_token:
            bits = loss / math.log(2) / bytes_per_token
            rows.append((f"{kind} bits per byte", f"{bits:.2f}, at {bytes_per_token:.2f} bytes for each token"))
        for name in accuracies(last):
            chance = ", where chance is 50 %" if name == "order_accuracy" else ""
            rows.append((f"{kind} {name.replace('_', ' ')}", f"{100 * float(last[name]):.1f} %{chance}"))
    vocab_size = starts[-1].get("config", {}).get("model", {}).get("vocab_size") if starts else None
    if vocab_size and any("perplexity" in r for r in of_kind.get("valid", [])):
        nothing = f"{math.log(vocab_size):.4f}, ln {vocab_size:,}: all tokens are as likely"
        rows.append(("loss of a model that knows nothing", nothing))
    for scores in of_kind.get("classification", [])[-1:]:
        quality = f"{100 * float(scores['accuracy']):.1f} % right, F1 {float(scores['f1']):.3f}"
        rows.append((f"{scores['examples']} classified", quality))
    return rows


def main(argv: list[str] | None = None, prog: str | None = None) -> int:
    """Print the summary of a run; return the exit code. Raises ReportedError."""
    parser = CommandParser(prog=prog, description="The result of a run in a few lines.")
    add = parser.add_argument
    # fmt: off
    add("run", type=Path, metavar="RUN", help="a run folder")
    add("--extra", action="append", default=[], metavar="NAME=VALUE", help="a further row; may be repeated")
    add("--bytes-per-token", type=float, metavar="X",
        help="of the text: adds bits per byte, which no tokenizer changes")
    # fmt: on
    args = parser.parse_args(argv)
    if args.bytes_per_token is not None and not 0 < args.bytes_per_token < math.inf:
        raise ConfigError(f"--bytes-per-token {args.bytes_per_token:g} must be a number above 0")
    records = read_records(args.run)[0]
    try:
        rows = summary(args.run, records, args.bytes_per_token)
    except (KeyError, TypeError, ValueError) as error:  # the program writes no such record: the file was changed
        what = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise DataError(
            f"{args.run}/metrics.jsonl holds a record that cannot be used ({what}): it is damaged, or was written by"
            " another program"
        ) from None
    rows += [(name, value) for name, _, value in (extra.partition("=") for extra in args.extra)]
    width = max(len(name) for name, _ in rows)
    print("", *(f"  {name:<{width}}  {value}" for name, value in rows), "", sep="\n")
    return EXIT_OK
