"""Summarize a run in a few lines: ``megatron-sp summarize runs/x``.

Reads metrics.jsonl. If the run was interrupted and resumed, the steps that were taken twice are compared bit for bit.
"""

from __future__ import annotations

import math
import statistics
import sys
from pathlib import Path
from typing import Any

from megatron_sp.report.run_history import accuracies, are_equal, repetitions, starts_after_interruptions
from megatron_sp.utils.command_parser import CommandParser
from megatron_sp.utils.errors import ConfigError, DataError, ReportedError
from megatron_sp.utils.run_log import read_records


def summary(run: Path, records: list[dict[str, Any]], bytes_per_token: float | None = None) -> list[tuple[str, str]]:
    """Return rows of (name, value).

    Args:
        bytes_per_token: of the text, for bits per byte; None: unknown.
    Raises:
        DataError: no training step has been logged.
    """
    train = [r for r in records if r.get("kind") == "train"]
    if not train:
        raise DataError(f"{run}/metrics.jsonl has no training step yet")
    starts = [r for r in records if r.get("kind") == "start"]
    rows = [("run folder", str(run)), ("steps", f"{train[-1]['step']}, {train[-1]['consumed_tokens']:,} tokens")]
    rows.append(("speed", f"{statistics.median(r['tokens_per_s'] for r in train):,.0f} tokens/s (median)"))
    again = starts_after_interruptions(records)
    if again:
        repeated = repetitions(records)
        twice, equal = len(repeated), sum(are_equal(taken) for taken in repeated.values())
        rows.append(("interruptions", f"{len(again)}, resumed at step {', '.join(str(s['step']) for s in again)}"))
        if twice:
            same = "all equal to the last bit" if equal == twice else f"{equal} of them equal to the last bit"
            rows.append(("logged steps taken twice", f"{twice}: loss, gradient norm and samples {same}"))
    for kind in ("valid", "test"):
        last = [r for r in records if r.get("kind") == kind]
        if last:
            if last[-1]["loss"] is None:
                rows.append((f"{kind} loss", "none: no token has a loss"))
                continue
            loss = float(last[-1]["loss"])
            perplexity = (
                f" (perplexity {math.exp(min(loss, 700)):.1f})" if "perplexity" in last[-1] else ""
            )  # a classifier has none
            rows.append((f"{kind} loss", f"{loss:.4f}{perplexity}"))
            if "perplexity" in last[-1] and bytes_per_token:
                bits = loss / math.log(2) / bytes_per_token
                rows.append((f"{kind} bits per byte", f"{bits:.2f}, at {bytes_per_token:.2f} bytes for each token"))
            for name in accuracies(last[-1]):
                chance = ", where chance is 50 %" if name == "order_accuracy" else ""
                rows.append((f"{kind} {name.replace('_', ' ')}", f"{100 * float(last[-1][name]):.1f} %{chance}"))
    vocab_size = starts[-1].get("config", {}).get("model", {}).get("vocab_size") if starts else None
    if vocab_size and any("perplexity" in r for r in records if r.get("kind") == "valid"):
        rows.append(
            (
                "loss of a model that knows nothing",
                f"{math.log(vocab_size):.4f}, ln {vocab_size:,}: all tokens are as likely",
            )
        )
    for found in [r for r in records if r.get("kind") == "classification"][-1:]:
        rows.append(
            (
                f"{found['examples']} classified",
                f"{100 * float(found['accuracy']):.1f} % right, F1 {float(found['f1']):.3f}",
            )
        )
    return rows


def _summary_of_sound_records(run: Path, bytes_per_token: float | None) -> list[tuple[str, str]]:
    records = read_records(run)[0]
    try:
        return summary(run, records, bytes_per_token)
    except (KeyError, TypeError, ValueError) as error:  # the program writes no such record: the file was changed
        what = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise DataError(
            f"{run}/metrics.jsonl holds a record that cannot be used ({what}): it is damaged, or was written by another program"
        ) from None


def main(argv: list[str] | None = None, prog: str | None = None) -> int:
    """Print the summary of a run; return the exit code."""
    parser = CommandParser(prog=prog, description="The result of a run in a few lines.")
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder")
    parser.add_argument(
        "--extra", action="append", default=[], metavar="NAME=VALUE", help="a further row; may be repeated"
    )
    parser.add_argument(
        "--bytes-per-token", type=float, metavar="X", help="of the text: adds bits per byte, which no tokenizer changes"
    )
    args = parser.parse_args(argv)
    try:
        if args.bytes_per_token is not None and not 0 < args.bytes_per_token < math.inf:
            raise ConfigError(f"--bytes-per-token {args.bytes_per_token:g} must be a number above 0")
        rows = _summary_of_sound_records(args.run, args.bytes_per_token)
    except ReportedError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    rows += [(n, v) for n, _, v in (extra.partition("=") for extra in args.extra)]
    width = max(len(name) for name, _ in rows)
    print()
    for name, value in rows:
        print(f"  {name:<{width}}  {value}")
    print()
    return 0
