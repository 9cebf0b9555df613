"""Continue text with a trained model, in one process or over several that share it, on CPUs or GPUs.

    megatron-sp generate --load runs/quickstart/gpt --prompt "The for statement"
    megatron-sp generate --load runs/quickstart/gpt --interactive
    bash scripts/launch.sh 2 tools/generate.py --load runs/quickstart/gpt --prompt "The for statement" \
--tensor-model-parallel-size 2

Model and tokenizer are those of the checkpoint; only its weights are read, not its optimizer state. Text goes to stdout
as it is generated, everything else to stderr. The same command gives the same text, and so do another layout, \
--batch-generation
and --cuda-graphs, up to rounding.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, cast

from megatron_sp.config.flags.inference_flags import add_graph_flag, add_model_flags
from megatron_sp.utils.command_parser import documented_parser
from megatron_sp.utils.entry_point import integer
from megatron_sp.utils.errors import ConfigError, DataError

if TYPE_CHECKING:
    from megatron_sp.data.tokenizers import Tokenizer
    from megatron_sp.inference.decoder import Decoder
    from megatron_sp.inference.generation import Sampling
    from megatron_sp.inference.team import Team
    from megatron_sp.models.gpt import GPTModel
    from megatron_sp.utils.launch import Launch

INSTEAD = {
    "BERT": "which sees both sides of a word and cannot continue a text: use megatron-sp fill-mask to fill in masked"
    " words",
    "classifier": "which classifies texts and generates none: megatron-sp finetune reports how well",
}


def parse(argv: list[str] | None = None, prog: str | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = documented_parser(prog, __doc__)
    add_graph_flag(add_model_flags(parser))
    # fmt: off
    title = "prompts (one of these; default: one prompt a line from stdin)"
    add = parser.add_argument_group(title).add_mutually_exclusive_group().add_argument
    add("--prompt", action="append", metavar="TEXT", help="may be given several times; empty: start a document")
    add("--prompt-file", metavar="FILE", help="one prompt a line")
    add("--interactive", action="store_true", help="ask for prompts until the end of input")
    add = parser.add_argument_group("sampling").add_argument
    add("--max-new-tokens", type=integer(10**9), default=100, metavar="N",
        help="for each continuation (default: 100)")
    add("--temperature", type=float, default=1.0, metavar="T", help="0: greedy (default: 1)")
    add("--top-k", type=integer(), default=0, metavar="K", help="only the K most probable tokens; 0: all (default)")
    add("--top-p", type=float, default=1.0, metavar="P",
        help="only the smallest set of tokens that reaches probability P; 1: all (default)")
    add("--greedy", action="store_true", help="same as --temperature 0")
    add("--seed", type=integer(2**63 - 1), default=1234, help="of the draws (default: 1234)")
    add("--num-samples", type=integer(10_000), default=1, metavar="N",
        help="continuations of each prompt (default: 1)")
    add("--stop", action="append", default=[], metavar="TEXT", help="end a continuation after this; may be repeated")
    add("--batch-generation", type=integer(2**16), nargs="?", const=8, default=1, metavar="N",
        help="generate up to N continuations at once (without N: 8); products of a batch round differently, so that a"
        " token may differ from the one generated alone (default: 1)")
    # fmt: on
    return parser.parse_args(argv)


def main(argv: list[str] | None = None, prog: str | None = None) -> int:
    """Continue the prompts of a command line; return the exit code."""
    options = parse(argv, prog)
    from megatron_sp.inference.team import run_tool

    return run_tool(lambda launch: _run(options, launch))


def _run(options: argparse.Namespace, launch: Launch) -> None:
    from megatron_sp.inference import team as inference
    from megatron_sp.inference.decoder import Decoder
    from megatron_sp.inference.generation import Sampling

    sampling = Sampling(0.0 if options.greedy else options.temperature, options.top_k, options.top_p, options.seed)
    if options.max_new_tokens < 1 or options.num_samples < 1:
        counts = f"--max-new-tokens ({options.max_new_tokens}) and --num-samples ({options.num_samples})"
        raise ConfigError(f"{counts} must be at least 1")
    if options.batch_generation < 1:
        rule = "must be at least 1, which generates one after another"
        raise ConfigError(f"--batch-generation ({options.batch_generation}) {rule}")
    inference.check_layout(options, launch.world_size, copies=False)
    inference.check_graphs(options)
    team = inference.join(options, launch)
    texts = options.prompt
    if texts is None and not options.interactive:
        texts = team.from_first(lambda: _read_lines(options.prompt_file))
    model, tokenizer, description = load(options, team)
    team.say(description)
    rows = min(options.batch_generation, options.num_samples * (1 if texts is None else len(texts)))
    if rows > 1:
        note = "products of a batch round differently, so a token may differ from the one generated alone"
        team.say(f"up to {rows} at once: {note}")
    decoder = Decoder(model, rows, tokenizer.vocab_size, capture=inference.capture(options, team, model.config))
    if texts is not None:
        _continue(decoder, tokenizer, texts, options, sampling, team)
        return

    def ask() -> Iterator[str]:
        while True:
            print("> ", end="", file=sys.stderr, flush=True)
            line = sys.stdin.readline()
            if not line:
                print(file=sys.stderr)
                return
            if line.strip():
                yield line.rstrip("\n")

    asked = ask() if team.rank == 0 else iter(())
    while (text := team.broadcast(next(asked, None))) is not None:
        try:
            _continue(decoder, tokenizer, [text], options, sampling, team)
        except ConfigError as error:  # a prompt that is too long does not end the session
            team.say(f"error: {error}")


def _read_lines(path: str | None) -> list[str]:
    # prompts from a file or from stdin, one on each line; blank lines are skipped
    name = path or "stdin"
    try:
        text = Path(path).read_text(encoding="utf-8") if path is not None else sys.stdin.read()
    except OSError as error:
        raise DataError(f"{name} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        byte = f"byte {error.object[error.start]:#04x} at offset {error.start}"
        raise DataError(f"{name} is not UTF-8 text: {byte}") from None
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        raise DataError(f"{name} holds no prompt: write one on each line, or use --prompt TEXT")
    return lines


def load(options: argparse.Namespace, team: Team) -> tuple[GPTModel, Tokenizer, str]:
    """Load the model and the tokenizer of a checkpoint; also return a line that describes it."""
    from megatron_sp.inference import team as inference
    from megatron_sp.models.gpt import GPTModel

    loaded = inference.load(options, team, GPTModel, "GPT", INSTEAD)
    return cast("GPTModel", loaded.model), loaded.stored.tokenizer, loaded.description


def _continue(
    decoder: Decoder, tokenizer: Tokenizer, texts: list[str], options: argparse.Namespace, sampling: Sampling,
    team: Team,
) -> None:  # fmt: skip
    # generate all continuations of these prompts, on every rank; rank 0 prints them, each after its prompt (with a
    # heading if there are several), then the speed
    from megatron_sp.inference.generation import TextStream, generate, one_after_another

    ids = [[*tokenizer.begin, *tokenizer.encode(text)] for text in texts]
    limits = {"max_new_tokens": options.max_new_tokens, "num_samples": options.num_samples, "eod": tokenizer.eod}
    stop = [tokenizer.encode(text) for text in options.stop]
    tokens = generate(decoder.model, ids, sampling=sampling, stop=stop, decoder=decoder, **limits)
    num_samples, num_sequences, is_new, num_tokens = options.num_samples, 0, True, 0
    began = time.perf_counter()
    for new in one_after_another(tokens, num_samples):
        if team.rank == 0:
            if is_new:
                num_sequences += 1
                if len(texts) * num_samples > 1:
                    print(f"--- {num_sequences} ---")
                print(texts[new.prompt], end="", flush=True)
                stream = TextStream(tokenizer.decode, ids[new.prompt])
            text = "" if new.token == tokenizer.eod else stream.add(new.token)  # what this token completes
            print(text + (stream.flush() + "\n" if new.finish else ""), end="", flush=True)
        num_tokens, is_new = num_tokens + 1, bool(new.finish)
        if new.finish == "context":
            limit = f"{decoder.model.config.max_positions} positions, max_position_embeddings"
            team.say(f"stopped at the end of the model's context ({limit})")
    seconds = time.perf_counter() - began
    team.say(f"{num_tokens} tokens in {seconds:.2f} s: {num_tokens / seconds:.1f} tokens/s")
