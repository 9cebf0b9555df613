"""The flags of ``megatron-sp convert``; this module imports nothing heavy."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_sp.utils.entry_point import integer

FORMAT_NAMES = ("megatron_sp", "hf", "megatron", "megatron-dist", "megatron-deepspeed")
DTYPES = ("float32", "bfloat16", "float16", "float64")
MAX_SHARD_SIZE = "5GB"

EPILOG = """\
examples:
  megatron-sp convert --input llama-3.2-1b --to megatron_sp --output runs/llama            \
Hugging Face's folder -> a run to train on
  megatron-sp convert --input runs/llama --to hf --output llama-tuned --verify             and back, compared by logits
  megatron-sp convert --input ckpt/iter_0005000 --to megatron_sp --output runs/gpt --vocab-size 50257
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``megatron-sp convert`` to a parser."""
    # fmt: off
    add = parser.add_argument_group("from and to").add_argument
    add("--from", dest="source", choices=("auto", *FORMAT_NAMES), default="auto",
        help="what --input is (default: look)")
    add("--input", type=Path, required=True, metavar="DIR",
        help="a run or step folder, a model's folder, a checkpoints folder")
    add("--to", dest="target", choices=FORMAT_NAMES, required=True, help="what to write")
    add("--output", type=Path, required=True, metavar="DIR",
        help="a folder that does not exist yet; appears when all is done")
    add("--step", type=integer(), metavar="N", help="of the checkpoint to read (default: the newest)")

    add = parser.add_argument_group("what files may not say").add_argument
    add("--qkv-layout", choices=("interleaved", "flat", "v0", "v1"), help="order of the rows of fused projections")
    add("--vocab-size", type=integer(2**31 - 1), metavar="N",
        help="entries of the vocabulary, without rows that only pad it")
    add("--set", action="append", default=[], metavar="NAME=VALUE",
        help="a setting of the model, by the name of its flag: rotary-base=500000")
    add("--tokenizer", type=Path, metavar="PATH", help="folder or file of the tokenizer (default: the source's own)")
    add("--max-metadata-mb", type=integer(), metavar="N",
        help="megatron-dist: largest .metadata to read, in MiB, which takes up to 32 times as much memory"
             " (default: 3; at most 1024)")

    add = parser.add_argument_group("what is written").add_argument
    add("--dtype", choices=DTYPES, help="of the weights (default: as they are)")
    add("--allow-non-finite", action="store_true",
        help="write tensors with NaN or infinities in them, too, with a note about each")
    add("--no-optimizer", action="store_true", help="leave the optimizer's state behind")
    add("--target-tensor-parallel-size", type=integer(2**16), default=1, metavar="N",
        help="ranks of tp to write files for (default: 1)")
    add("--target-pipeline-parallel-size", type=integer(2**16), default=1, metavar="N",
        help="stages to write files for (default: 1)")
    add("--target-expert-parallel-size", type=integer(2**16), default=1, metavar="N",
        help="shares of the experts to write files for, of megatron (default: 1)")
    add("--megatron-names", choices=("core", "core-local", "legacy"), default="core",
        help="of parameters for megatron: those of core with Transformer Engine (the default), of core's local layers,"
             " or of before 2024")
    add("--deepspeed-layout", choices=("module", "zero1", "universal"),
        help="megatron-deepspeed: weights alone, with the optimizer's state for one data parallel rank, or universal,"
             " for any number (default: zero1 with such a state, else module)")
    add("--deepspeed-qkv-layout", choices=("flat", "interleaved"), default="flat",
        help="megatron-deepspeed: order of q, k, v rows; flat for versions since December 2024 (default), else"
             " interleaved")
    add("--max-shard-size", default=MAX_SHARD_SIZE, metavar="SIZE",
        help=f"of a safetensors file for hf (default: {MAX_SHARD_SIZE})")

    add = parser.add_argument_group("checks").add_argument
    add("--verify", action="store_true",
        help="compare the logits of both sides afterwards; exit code 5 if they differ")
    add("--verify-text", metavar="TEXT", help="compare on this text too (needs a tokenizer)")
    add("--show-tensors", action="store_true", help="list what became of every tensor")
    add("--report", type=Path, metavar="FILE", help="write conversion.json there too")
    # fmt: on
