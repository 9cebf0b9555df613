"""Continue text with a trained model, in one process or over several that share it, on CPUs or GPUs.

    megatron-sp generate --load runs/quickstart/gpt --prompt "The for statement"
    megatron-sp generate --load runs/quickstart/gpt --interactive
    bash scripts/launch.sh 2 tools/generate.py --load runs/quickstart/gpt --prompt "The for statement" --tensor-model-parallel-size 2

Model and tokenizer are those of the checkpoint; only its weights are read, not its optimizer state. Text goes to stdout
as it is generated, everything else to stderr. The same command gives the same text, and so do another layout, --batch-generation
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
    from megatron_sp.inference.generation import NewToken, Sampling
    from megatron_sp.inference.team import Team
    from megatron_sp.models.gpt import GPTModel
    from megatron_sp.utils.launch import Launch

INSTEAD = {
    "BERT": "which sees both sides of a word and cannot continue a text: use megatron-sp fill-mask to fill in masked words",
    "classifier": "which classifies texts and generates none: megatron-sp finetune reports how well",
}


def parse(argv: list[str] | None = None, prog: str | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = documented_parser(prog, __doc__)
    add_graph_flag(add_model_flags(parser))
    prompts = parser.add_argument_group(
        "prompts (one of these; default: one prompt a line from stdin)"
    ).add_mutually_exclusive_group()
    prompts.add_argument(
        "--prompt", action="append", metavar="TEXT", help="may be given several times; empty: start a document"
    )
    prompts.add_argument("--prompt-file", metavar="FILE", help="one prompt a line")
    prompts.add_argument("--interactive", action="store_true", help="ask for prompts until the end of input")
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument(
        "--max-new-tokens", type=integer(10**9), default=100, metavar="N", help="for each continuation (default: 100)"
    )
    sampling.add_argument("--temperature", type=float, default=1.0, metavar="T", help="0: greedy (default: 1)")
    sampling.add_argument(
        "--top-k", type=integer(), default=0, metavar="K", help="only the K most probable tokens; 0: all (default)"
    )
    sampling.add_argument("--top-p", type=float, default=1.0, metavar="P",
                          help="only the smallest set of tokens that reaches probability P; 1: all (default)")  # fmt: skip
    sampling.add_argument("--greedy", action="store_true", help="same as --temperature 0")
    sampling.add_argument("--seed", type=integer(2**63 - 1), default=1234, help="of the draws (default: 1234)")
    sampling.add_argument(
        "--num-samples", type=integer(10_000), default=1, metavar="N", help="continuations of each prompt (default: 1)"
    )
    sampling.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end a continuation after this; may be repeated"
    )
    sampling.add_argument(
        "--batch-generation", type=integer(2**16), nargs="?", const=8, default=1, metavar="N",
        help="generate up to N continuations at once (without N: 8); products of a batch round differently, so that a token may differ from"
        " the one generated alone (default: 1)",
    )  # fmt: skip
    return parser.parse_args(argv)


def read_lines(path: str | None) -> list[str]:
    """Read prompts from a file or from stdin, one on each line; blank lines are skipped.

    Raises:
        DataError: the file cannot be read, or has no prompt.
    """
    name = path or "stdin"
    try:
        text = Path(path).read_text(encoding="utf-8") if path is not None else sys.stdin.read()
    except OSError as error:
        raise DataError(f"{name} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise DataError(
            f"{name} is not UTF-8 text: byte {error.object[error.start]:#04x} at offset {error.start}"
        ) from None
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        raise DataError(f"{name} holds no prompt: write one on each line, or use --prompt TEXT")
    return lines


def ask_for_prompts() -> Iterator[str]:
    while True:
        print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            print(file=sys.stderr)
            return
        if line.strip():
            yield line.rstrip("\n")


def load(options: argparse.Namespace, team: Team) -> tuple[GPTModel, Tokenizer, str]:
    """Load model and tokenizer of a checkpoint; also return a line that describes it.

    Raises:
        CheckpointError, ConfigError, DataError: model or tokenizer cannot be loaded.
    """
    from megatron_sp.inference import team as inference
    from megatron_sp.models.gpt import GPTModel

    loaded = inference.load(options, team, GPTModel, "GPT", INSTEAD)
    return cast("GPTModel", loaded.model), loaded.stored.tokenizer, loaded.description


class Printer:
    """Printer of continuations as they are generated: each after its prompt, with a heading if there are several."""

    def __init__(self, tokenizer: Tokenizer, eod: int | None, *, headings: bool) -> None:
        self.tokenizer, self.eod, self.headings = tokenizer, eod, headings
        self.num_sequences = 0

    def begin(self, text: str, ids: list[int]) -> None:
        """Begin a continuation of the prompt ``text`` with tokens ``ids``."""
        from megatron_sp.inference.generation import TextStream

        self.num_sequences += 1
        if self.headings:
            print(f"--- {self.num_sequences} ---")
        print(text, end="", flush=True)
        self.stream = TextStream(self.tokenizer.decode, ids)

    def add(self, new: NewToken) -> None:
        """Print the text that this token completes."""
        text = "" if new.token == self.eod else self.stream.add(new.token)
        if new.finish:
            text += self.stream.flush() + "\n"
        print(text, end="", flush=True)


def continue_prompts(
    decoder: Decoder, tokenizer: Tokenizer, texts: list[str], options: argparse.Namespace, sampling: Sampling, team: Team
) -> None:  # fmt: skip
    # generate all continuations of these prompts, on every rank; rank 0 prints them, then the speed
    from megatron_sp.inference.generation import generate, one_after_another

    ids = [[*tokenizer.begin, *tokenizer.encode(text)] for text in texts]
    stop = [tokenizer.encode(text) for text in options.stop]
    eod = tokenizer.eod
    tokens = generate(
        decoder.model, ids, max_new_tokens=options.max_new_tokens, sampling=sampling, eod=eod, stop=stop,
        num_samples=options.num_samples, decoder=decoder,
    )  # fmt: skip
    printer = Printer(tokenizer, eod, headings=len(texts) * options.num_samples > 1) if team.rank == 0 else None
    began, count, at_begin = time.perf_counter(), 0, True
    for new in one_after_another(tokens, options.num_samples):
        if printer is not None and at_begin:
            printer.begin(texts[new.prompt], ids[new.prompt])
        if printer is not None:
            printer.add(new)
        count, at_begin = count + 1, bool(new.finish)
        if new.finish == "context":
            team.say(
                f"stopped at the end of the model's context ({decoder.model.config.max_positions} positions, max_position_embeddings)"
            )
    seconds = time.perf_counter() - began
    team.say(f"{count} tokens in {seconds:.2f} s: {count / seconds:.1f} tokens/s")


def run(options: argparse.Namespace, launch: Launch) -> None:
    """Run the tool with parsed options."""
    from megatron_sp.inference import team as inference
    from megatron_sp.inference.decoder import Decoder
    from megatron_sp.inference.generation import Sampling

    sampling = Sampling(0.0 if options.greedy else options.temperature, options.top_k, options.top_p, options.seed)
    if options.max_new_tokens < 1 or options.num_samples < 1:
        raise ConfigError(
            f"--max-new-tokens ({options.max_new_tokens}) and --num-samples ({options.num_samples}) must be at least 1"
        )
    if options.batch_generation < 1:
        raise ConfigError(
            f"--batch-generation ({options.batch_generation}) must be at least 1, which generates one after another"
        )
    inference.check_layout(options, launch.world_size, copies=False)
    inference.check_graphs(options)
    team = inference.join(options, launch)
    texts = options.prompt
    if texts is None and not options.interactive:
        texts = team.from_first(lambda: read_lines(options.prompt_file))
    model, tokenizer, description = load(options, team)
    team.say(description)
    rows = min(options.batch_generation, options.num_samples * (1 if texts is None else len(texts)))
    if rows > 1:
        team.say(
            f"up to {rows} at once: products of a batch round differently, so a token may differ from the one generated alone"
        )
    decoder = Decoder(model, rows, tokenizer.vocab_size, capture=inference.capture(options, team, model.config))
    if texts is not None:
        continue_prompts(decoder, tokenizer, texts, options, sampling, team)
        return
    asked = ask_for_prompts() if team.rank == 0 else iter(())
    while (text := team.broadcast(next(asked, None))) is not None:
        try:
            continue_prompts(decoder, tokenizer, [text], options, sampling, team)
        except ConfigError as error:  # a prompt that is too long does not end the session
            team.say(f"error: {error}")


def main(argv: list[str] | None = None, prog: str | None = None) -> int:
    """Run the tool; return the exit code."""
    options = parse(argv, prog)
    from megatron_sp.inference.team import run_tool

    return run_tool(lambda launch: run(options, launch))
