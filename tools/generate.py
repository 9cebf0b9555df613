#!/usr/bin/env python
"""Continue text with a trained model, in one process on a CPU or a GPU.

    python tools/generate.py --load runs/quickstart --prompt "The for statement"
    python tools/generate.py --load runs/quickstart --interactive

Model and tokenizer are those of the checkpoint; its weights are read, its optimizer state is not. Text goes to stdout as it is
generated, everything else to stderr. The same command gives the same text.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, cast

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_sp.utils.errors import ConfigError, DataError, ReportedError

if TYPE_CHECKING:
    import torch

    from megatron_sp.data.tokenizers import Tokenizer
    from megatron_sp.models.generation import NewToken, Sampling
    from megatron_sp.models.gpt import GPTModel

EXIT_INTERRUPTED = 130
INSTEAD = {
    "BERT": "which sees both sides of a word and cannot continue a text: tools/fill_mask.py has it guess words that you hide",
    "classifier": "which puts texts into classes and writes none: tools/finetune_classifier.py says how well",
}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    model = parser.add_argument_group("model")
    model.add_argument("--load", required=True, metavar="RUN", help="a run, its checkpoints folder, or one step folder")
    model.add_argument("--ckpt-step", type=int, metavar="N", help="this step instead of the newest")
    model.add_argument(
        "--tokenizer-model",
        metavar="FILE",
        help="SentencePiece model, tokenizer.json or its folder, if it is no longer where training found it",
    )
    model.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: a GPU if there is one")
    model.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16", "float64"), default="auto",
                       help="auto: the run's on a GPU, float32 on a CPU")  # fmt: skip
    model.add_argument("--num-threads", type=int, metavar="N", help="CPU threads (default: all cores)")
    prompts = parser.add_argument_group("prompts (one of these; default: one prompt a line from stdin)").add_mutually_exclusive_group()
    prompts.add_argument("--prompt", action="append", metavar="TEXT", help="may be given several times; empty: start a document")
    prompts.add_argument("--prompt-file", metavar="FILE", help="one prompt a line")
    prompts.add_argument("--interactive", action="store_true", help="ask for prompts until the end of input")
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--max-new-tokens", type=int, default=100, metavar="N", help="for each continuation (default: 100)")
    sampling.add_argument("--temperature", type=float, default=1.0, metavar="T", help="0: greedy (default: 1)")
    sampling.add_argument("--top-k", type=int, default=0, metavar="K", help="only the K most probable tokens; 0: all (default)")
    sampling.add_argument("--top-p", type=float, default=1.0, metavar="P",
                          help="only the smallest set of tokens that reaches probability P; 1: all (default)")  # fmt: skip
    sampling.add_argument("--greedy", action="store_true", help="same as --temperature 0")
    sampling.add_argument("--seed", type=int, default=1234, help="of the draws (default: 1234)")
    sampling.add_argument("--num-samples", type=int, default=1, metavar="N", help="continuations of each prompt (default: 1)")
    sampling.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end a continuation behind this; may be repeated")
    return parser.parse_args(argv)


def read_lines(path: str | None) -> list[str]:
    """Prompts, one a line, from a file or from stdin; empty lines are no prompts.

    Raises:
        DataError: the file cannot be read, or holds none.
    """
    name = path or "stdin"
    try:
        text = Path(path).read_text(encoding="utf-8") if path is not None else sys.stdin.read()
    except OSError as error:
        raise DataError(f"{name} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{name} is not UTF-8 text: byte {error.object[error.start]:#04x} at offset {error.start}") from None
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        raise DataError(f"{name} holds no prompt: write one on each line, or use --prompt TEXT")
    return lines


def ask_for_prompts() -> Iterator[str]:
    """Prompts typed at the terminal."""
    while True:
        print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            print(file=sys.stderr)
            return
        if line.strip():
            yield line.rstrip("\n")


def choose_device(choice: str) -> torch.device:
    """Raises ConfigError if a GPU was asked for and there is none."""
    import torch

    if choice == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no GPU (`megatron-sp doctor` says why); use --device cpu")
    return torch.device("cuda" if choice != "cpu" and torch.cuda.is_available() else "cpu")


def load(options: argparse.Namespace) -> tuple[GPTModel, Tokenizer, str]:
    """The model and tokenizer of a checkpoint, and a line about it.

    Raises:
        CheckpointError, ConfigError, DataError: what is wrong with either.
    """
    import torch

    from megatron_sp.models.gpt import GPTModel
    from megatron_sp.training.stored_model import find_stored

    device = choose_device(options.device)
    stored = find_stored(options.load, options.ckpt_step, "GPT", INSTEAD, _warn, options.tokenizer_model)
    dtype = options.dtype if options.dtype != "auto" else stored.config.precision.params_dtype if device.type == "cuda" else "float32"
    model = cast("GPTModel", stored.load(GPTModel, device, getattr(torch, dtype)))
    count = sum(p.numel() for p in model.parameters())
    return model, stored.tokenizer, f"{stored.folder}: {count:,} parameters in {dtype} on {device}, step {stored.step}"


def _warn(line: str) -> None:
    print(f"warning: {line}", file=sys.stderr)


class Printer:
    """Prints continuations as they come: each behind its prompt, with a heading when there are several."""

    def __init__(self, tokenizer: Tokenizer, eod: int | None, *, headings: bool) -> None:
        self.tokenizer, self.eod, self.headings = tokenizer, eod, headings
        self.num_sequences = 0

    def begin(self, text: str, ids: list[int]) -> None:
        """A continuation of the prompt ``text`` with tokens ``ids`` begins."""
        from megatron_sp.models.generation import TextStream

        self.num_sequences += 1
        if self.headings:
            print(f"--- {self.num_sequences} ---")
        print(text, end="", flush=True)
        self.stream = TextStream(self.tokenizer.decode, ids)

    def add(self, new: NewToken) -> None:
        """Show what this token completes."""
        text = "" if new.token == self.eod else self.stream.add(new.token)
        if new.finish:
            text += self.stream.flush() + "\n"
        print(text, end="", flush=True)


def continue_prompts(model: GPTModel, tokenizer: Tokenizer, texts: list[str], options: argparse.Namespace, sampling: Sampling) -> None:
    """Generate and print everything for these prompts, then the speed."""
    from megatron_sp.models.generation import generate

    ids = [tokenizer.encode(text) for text in texts]
    stop = [tokenizer.encode(text) for text in options.stop]
    eod = tokenizer.eod
    tokens = generate(
        model, ids, max_new_tokens=options.max_new_tokens, sampling=sampling, eod=eod, stop=stop,
        vocab_size=tokenizer.vocab_size, num_samples=options.num_samples,
    )  # fmt: skip
    printer = Printer(tokenizer, eod, headings=len(texts) * options.num_samples > 1)
    began, count, at_begin = time.perf_counter(), 0, True
    for new in tokens:
        if at_begin:
            printer.begin(texts[new.prompt], ids[new.prompt])
        printer.add(new)
        count, at_begin = count + 1, bool(new.finish)
        if new.finish == "context":
            limit = model.config.max_positions
            print(f"stopped at the end of the model's context ({limit} positions, max_position_embeddings)", file=sys.stderr)
    seconds = time.perf_counter() - began
    print(f"{count} tokens in {seconds:.2f} s: {count / seconds:.1f} tokens/s", file=sys.stderr)


def run(options: argparse.Namespace) -> None:
    """Everything behind the command line."""
    from megatron_sp.models.generation import Sampling

    sampling = Sampling(0.0 if options.greedy else options.temperature, options.top_k, options.top_p, options.seed)
    if options.num_threads is not None and options.num_threads < 1:
        raise ConfigError(f"--num-threads ({options.num_threads}) must be at least 1; leave it out to use all cores")
    if options.max_new_tokens < 1 or options.num_samples < 1:
        raise ConfigError(f"--max-new-tokens ({options.max_new_tokens}) and --num-samples ({options.num_samples}) must be at least 1")
    texts = options.prompt
    if texts is None and not options.interactive:
        texts = read_lines(options.prompt_file)
    import torch

    if options.num_threads:
        torch.set_num_threads(options.num_threads)
    model, tokenizer, description = load(options)
    print(description, file=sys.stderr)
    if texts is not None:
        continue_prompts(model, tokenizer, texts, options, sampling)
        return
    for text in ask_for_prompts():
        try:
            continue_prompts(model, tokenizer, [text], options, sampling)
        except ConfigError as error:  # a prompt that is too long is no reason to go
            print(f"error: {error}", file=sys.stderr)


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without the letter shows "?", it does not end the program
    try:
        run(options)
    except ReportedError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main())
