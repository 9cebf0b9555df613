"""The training that ``megatron-sp chaos`` brings along: a GPT of some ten thousand parameters on made-up tokens."""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn

from megatron_sp.commands.pretrain import parse_config
from megatron_sp.config.schema import Config
from megatron_sp.data.build import Datasets, build_datasets
from megatron_sp.data.tokenizers import Tokenizer, build_tokenizer
from megatron_sp.models.gpt import GPTModel
from megatron_sp.models.language_model import OnUnit
from megatron_sp.parallel.forward_context import ForwardContext, MicroBatch, UnitEvents
from megatron_sp.parallel.parallel_context import ParallelContext
from megatron_sp.training.loop import Task, pretrain
from megatron_sp.training.setup import dtype_of
from megatron_sp.training.step import Loss

FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 --mock-data --vocab-size 60 --device cpu"
    " --num-threads 1 --lr 1e-2 --lr-decay-style constant --eval-iters 0 --log-interval 1 --peak-tflops 1 --save-interval 3"
    " --distributed-timeout-minutes 0.15 --no-progress-bar"
)  # fmt: skip
STEPS = 40


def words(ranks: int) -> list[str]:
    """The command line; with an even number of ranks over two kinds of them."""
    layout = ["--zero-stage", "1", "--sequence-parallel-size", "2" if ranks % 4 == 0 else "1"]
    return [*FLAGS.split(), *layout, "--global-batch-size", str(4 * ranks), "--train-iters", str(STEPS)]


def train(rank: int, ranks: int, port: int, more: list[str]) -> None:
    """Be one rank of it; never returns."""
    torch.set_num_threads(1)  # before anything else: OpenMP with more threads hangs after a fork
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    for name in ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT", "MEGATRON_SP_FAULT"):
        os.environ.pop(name, None)
    pretrain(parse_config([*words(ranks), *more], prog="megatron-sp chaos"), TASK)


def _tokenizer(config: Config) -> Tokenizer:
    return build_tokenizer(config.data, config.model.vocab_size)


def _datasets(config: Config, tokenizer: Tokenizer, num_samples: tuple[int, int, int]) -> Datasets:
    assert config.model.seq_length
    return build_datasets(
        config.data, seq_length=config.model.seq_length, seed=config.batch.seed, tokenizer=tokenizer,
        vocab_size=config.model.vocab_size, num_samples=num_samples,
    )  # fmt: skip


def _model(config: Config, layout: ParallelContext, on_unit: OnUnit | None = None) -> nn.Module:
    return GPTModel(config.model, config.kernels, seed=config.batch.seed, dtype=dtype_of(config), layout=layout, on_unit=on_unit)


def _counts(batch: MicroBatch) -> list[Tensor]:
    return [batch["loss_mask"].sum()]


def _sums(model: nn.Module, batch: MicroBatch, context: ForwardContext, events: UnitEvents | None) -> list[Tensor]:
    loss, _ = model(batch["tokens"], batch["labels"], batch["loss_mask"], context, events)
    return [loss]


TASK = Task("chaos", _tokenizer, _datasets, _model, Loss(names=("lm loss",), counts=_counts, sums=_sums))
