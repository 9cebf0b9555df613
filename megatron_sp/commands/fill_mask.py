"""Predict masked words with a trained BERT, in one process on a CPU or a GPU.

    megatron-sp fill-mask --load runs/quickstart/bert --text "for line in [MASK]:"
    megatron-sp fill-mask --load runs/quickstart/bert --baseline

Each [MASK] is one token; without --text, texts are read from stdin, one on each line. Model and tokenizer are those of
the checkpoint. --baseline reports instead the accuracy of always predicting the most frequent token, on the run's own
validation data.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, cast

from megatron_sp.config.flags.inference_flags import add_checkpoint_flags
from megatron_sp.utils.command_parser import documented_parser
from megatron_sp.utils.entry_point import integer
from megatron_sp.utils.errors import ConfigError, DataError

if TYPE_CHECKING:
    from megatron_sp.inference.team import Stored
    from megatron_sp.models.bert import BertModel
    from megatron_sp.utils.launch import Launch

MASK = "[MASK]"
INSTEAD = {
    "GPT": "which sees only the text before a word: use megatron-sp generate to continue a text",
    "classifier": "which has no head for masked tokens: give the BERT that it was made from",
}


def main(argv: list[str] | None = None, prog: str | None = None) -> int:
    """Fill in the texts of a command line; return the exit code."""
    options = parse(argv, prog)
    from megatron_sp.inference.team import run_tool

    return run_tool(lambda launch: run(options, launch))


def parse(argv: list[str] | None = None, prog: str | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = documented_parser(prog, __doc__)
    add_checkpoint_flags(parser)
    add = parser.add_argument_group("texts").add_argument
    add("--text", action="append", metavar="TEXT", help=f"a text with {MASK} in it; may be given several times")
    add("--top", type=integer(10**6), default=5, metavar="N", help="guesses shown for each (default: 5)")
    add("--baseline", action="store_true", help="the share of the most frequent token, and nothing else")
    return parser.parse_args(argv)


def run(options: argparse.Namespace, launch: Launch) -> None:
    """Run the tool with parsed options. Raises ReportedError."""
    if options.top < 1:
        raise ConfigError(f"--top ({options.top}) must be at least 1")
    import torch

    from megatron_sp.inference.team import choose_device, find_stored
    from megatron_sp.models.bert import BertModel

    if launch.world_size > 1:
        reason = f"is one process, and {launch.world_size} were started: start it with python"
        raise ConfigError(f"megatron-sp fill-mask {reason}")

    def warn(line: str) -> None:
        print(f"warning: {line}", file=sys.stderr)

    device = choose_device(options.device, launch)
    stored = find_stored(options.load, options.ckpt_step, "BERT", INSTEAD, warn, options.tokenizer_model)
    if options.baseline:
        print(_baseline(stored))
        return
    texts = options.text or [line for line in sys.stdin.read().splitlines() if line.strip()]
    if not texts:
        way = f"use --text TEXT, or write one on each line of stdin, with {MASK} in place of a word"
        raise DataError(f"there is no text: {way}")
    model = cast("BertModel", stored.load(BertModel, device, torch.float32))
    for text in texts:
        _show(stored, model, text, options.top)


def _encode(stored: Stored, text: str) -> list[int]:
    # the token ids of [CLS], the text with its masks, [SEP]
    from megatron_sp.data.tokenizers.tokenizer import special_tokens

    special, parts = special_tokens(stored.tokenizer), text.split(MASK)
    if len(parts) < 2:
        raise ConfigError(f"nothing is masked in '{text}': write {MASK} in place of a word")
    ids = stored.tokenizer.encode(parts[0])
    for part in parts[1:]:
        ids += [special.mask, *stored.tokenizer.encode(part)]
    limit = stored.config.model.max_positions
    if len(ids) + 2 > limit:
        raise ConfigError(f"'{text[:40]}...' has {len(ids) + 2} tokens, the model has {limit} positions: shorten it")
    return [special.cls, *ids, special.sep]


def _show(stored: Stored, model: BertModel, text: str, top: int) -> None:
    # print the text and, for each of its masks, the most probable tokens
    import torch

    from megatron_sp.ops.attention import AttentionMask
    from megatron_sp.parallel.forward_context import ForwardContext

    ids = _encode(stored, text)
    tokens = torch.tensor([ids], device=next(model.parameters()).device)
    with torch.no_grad():
        hidden = model.hidden(tokens, ForwardContext(AttentionMask(causal=False)), types=torch.zeros_like(tokens))
        shares = model.predictions(hidden)[:, 0, : stored.tokenizer.vocab_size].float().softmax(-1)  # [s, v]
    print(text)
    for place in [i for i, token in enumerate(ids) if token == stored.tokenizer.mask]:
        best = shares[place].topk(min(top, shares.shape[1]))
        guesses = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        print("    " + ", ".join(f"{stored.tokenizer.decode([token])} {100 * share:.0f} %" for token, share in guesses))


def _baseline(stored: Stored) -> str:
    # the most frequent masked token of the run's validation data, and its share
    import numpy as np

    from megatron_sp.data.build import build_bert_datasets

    config = stored.config
    model, batch = config.model, config.batch
    passes = (batch.train_iters or 0) // (batch.eval_interval or sys.maxsize) + 1
    size = batch.eval_global_batch_size or batch.global_batch_size or batch.micro_batch_size
    wanted = passes * batch.eval_iters * size
    assert model.seq_length
    valid = build_bert_datasets(
        config.data, seq_length=model.seq_length, seed=batch.seed, tokenizer=stored.tokenizer,
        vocab_size=model.vocab_size, num_samples=(0, wanted, 0), binary_head=model.has_order_head,
    ).valid  # fmt: skip
    if valid is None or wanted == 0:
        raise DataError(f"{stored.folder} is of a run without validation data: there is nothing to count in")
    rows = (valid[i] for i in range(min(wanted, len(valid))))
    counts = np.bincount(np.concatenate([row["labels"][row["loss_mask"] > 0] for row in rows]))
    token = stored.tokenizer.decode([int(counts.argmax())])
    return f"{100 * counts.max() / counts.sum():.1f} % of the masked tokens ('{token}')"
