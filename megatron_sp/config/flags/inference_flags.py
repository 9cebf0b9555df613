"""Flags shared by the tools that use a model without training it: checkpoint, device and layout."""

from __future__ import annotations

import argparse

from megatron_sp.utils.entry_point import integer

# fmt: off
_LAYOUT = (
    ("--tensor-model-parallel-size", "--tp-size", "processes that share each layer's weights (default: 1)"),
    ("--sequence-parallel-size", "--sp-size",
     "processes that share each sequence and, at attention, its heads (default: 1)"),
    ("--context-parallel-size", "--cp-size",
     "processes that share each sequence and exchange keys and values; for evaluation (default: 1)"),
    ("--pipeline-model-parallel-size", "--pp-size",
     "1: pipelines are for training, and their checkpoints load without one (default: 1)"),
)


def add_checkpoint_flags(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add the group "model" to a tool's parser, with the checkpoint and the device; return the group."""
    model = parser.add_argument_group("model")
    model.add_argument("--load", required=True, metavar="RUN", help="a run, its checkpoints folder, or one step folder")
    model.add_argument("--ckpt-step", type=integer(), metavar="N", help="this step instead of the newest")
    model.add_argument("--tokenizer-model", metavar="FILE", help="SentencePiece model, tokenizer.json or its folder, or"
        " vocab.txt, if it is no longer where training found it")
    model.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: a GPU if there is one")
    return model


def add_graph_flag(model: argparse._ArgumentGroup) -> None:
    """Add --cuda-graphs for tools that generate, to the group "model"."""
    model.add_argument("--cuda-graphs", choices=("auto", "on", "off"), default="auto", help="launch the step of a token"
        " from CUDA graphs; auto: on a GPU, if that gives the bits of an eager step; on: an error if it cannot be"
        " (default: auto)")


def add_model_flags(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add the groups "model" and "layout" for tools that run on several processes; return the first."""
    model = add_checkpoint_flags(parser)
    model.add_argument("--bos", action=argparse.BooleanOptionalAction, default=None,
        help="texts begin with the tokenizer's BOS token, or not (default: as the tokenizer's own do)")
    model.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16", "float64"), default="auto",
        help="auto: the run's on a GPU, float32 on a CPU")
    model.add_argument("--num-threads", type=integer(1024), metavar="N",
        help="CPU threads of each process (default: its share of the cores)")
    layout = parser.add_argument_group("layout (with torchrun or scripts/launch.sh)")
    for name, short, text in _LAYOUT:
        dest = short.removeprefix("--").replace("-", "_")
        layout.add_argument(name, short, type=integer(2**16), default=1, metavar="N", dest=dest, help=text)
    return model
# fmt: on
