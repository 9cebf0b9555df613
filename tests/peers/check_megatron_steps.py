"""Training against Megatron-core itself: the same losses, step by step.

Not part of the test run, for it needs megatron-core (``benchmarks/setup_peers.sh megatron``). On CPUs, with gloo:

    PYTHONPATH=.:tests .venv-peers/bin/python -W ignore tests/peers/check_megatron_steps.py

A GPT-2 and a Llama of random weights are trained for 20 steps by Megatron-core (its model, data sets, optimizer,
clipping and scheduler) and by ``pretrain_gpt.py``, from the same weights by conversion and the same blend of two data
sets, with one and with two tensor-parallel processes: fp32, two micro-batches a step, AdamW, gradients clipped in every
step, warm-up and a cosine, a ramp of the weight decay. Every loss and gradient norm is compared, and the learning rates
must be the same numbers. Prints a line for each model, ends with 1 if one differs.

Megatron-core asks for GPUs in two places of its optimizer: for the time of a step, ``device="cuda"`` is the CPU.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTHONWARNINGS", "ignore")  # of the ranks: Megatron misses its GPU libraries

import check_megatron as peer
import numpy as np
import torch
import torch.distributed as dist
from check_megatron_data import PeerTokenizer
from megatron.core import optimizer as peer_optimizer
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch.overrides import TorchFunctionMode

from megatron_sp.data.writer import IndexedDatasetWriter

ITERS, BATCH, MICRO, SEED, VOCAB = 20, 4, 2, 1234, 64  # Megatron's softmax has the rows that pad a vocabulary: here there are none
LR, MIN_LR, WARMUP, CLIP, BETA2 = 2e-3, 2e-4, 5, 0.5, 0.95
DECAY = (0.01, 0.1)
WEIGHTS = (30.0, 70.0)
MODELS = {"GPT-2": "fused GELU, tied", "without biases": "GELU without biases", "Llama": "Llama"}
LIMIT = 5e-6  # of losses and gradient norms, relative; fp32


class OnCpu(TorchFunctionMode):
    """What asks for a GPU gets the CPU, and a CPU's gradient passes for a GPU's."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        found = func(*args, **kwargs)
        return found.replace("torch.", "torch.cuda.") if func is torch.Tensor.type and isinstance(found, str) else found


def write_data(folder: Path) -> tuple[str, ...]:
    """Two data sets; returns the words of --data-path."""
    words: list[str] = []
    for name, weight in zip("ab", WEIGHTS, strict=True):
        random = np.random.default_rng(ord(name))
        with IndexedDatasetWriter(folder / name, dtype=np.uint16) as writer:
            for _ in range(30):
                start, step = random.integers(0, VOCAB, 2)
                writer.add_document((start + step * np.arange(int(random.integers(5, 60)))) % VOCAB)
        words += [str(weight), str(folder / name)]
    return tuple(words)


def batches(words: tuple[str, ...]) -> Any:
    """Megatron's samples of the run."""
    config = GPTDatasetConfig(
        random_seed=SEED, sequence_length=peer.POSITIONS, blend=(list(words[1::2]), list(map(float, words[::2]))), split="100,0,0",
        tokenizer=PeerTokenizer(), reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False,
    )  # fmt: skip
    return BlendedMegatronDatasetBuilder(GPTDataset, [ITERS * BATCH, 0, 0], lambda: True, config).build()[0]


def arguments(name: str, tp: int) -> Any:
    found = peer.arguments(name, peer.Ranks(tp, 1))
    found.vocab_size = VOCAB
    return found


def train(rank: int, ranks: peer.Ranks, store: str, name: str, folder: str, words: tuple[str, ...]) -> None:
    """Megatron's run; its first weights and what it logged are left in ``folder``."""
    logging.disable(logging.WARNING)
    peer.start(rank, ranks, store)
    a = arguments(name, ranks.tp)
    model = peer.model_of(a, seed=1).train()
    model.parallel_output, model.output_layer.gather_output = True, False  # the loss takes each rank's part of the vocabulary
    file = peer.iteration(folder, "megatron") / f"mp_rank_{rank:02d}" / "model_optim_rng.pt"
    file.parent.mkdir(parents=True)
    state = {"model": model.state_dict_for_save_checkpoint(), "args": a, "checkpoint_version": 3.0, "iteration": peer.STEP}
    torch.serialization.save(state, file)
    data = batches(words)
    mask = torch.triu(torch.ones(peer.POSITIONS, peer.POSITIONS, dtype=torch.bool), 1)[None, None]
    with OnCpu():
        optimizer, scheduler = updates(model)
    log = []
    for step in range(ITERS):
        optimizer.zero_grad()
        total = 0.0
        for first in range(step * BATCH, (step + 1) * BATCH, MICRO):
            samples = [data[i] for i in range(first, first + MICRO)]
            tokens, positions, labels, counted = (
                torch.stack([sample[key] for sample in samples]) for key in ("tokens", "position_ids", "labels", "loss_mask")
            )
            losses = model(tokens, positions, mask, labels=labels)
            loss = (losses * counted).sum() / counted.sum() / (BATCH // MICRO)
            loss.backward()
            total += float(loss.detach())
        lr = optimizer.param_groups[0]["lr"]
        with OnCpu():
            _, norm, _ = optimizer.step()
        log.append({"loss": total, "grad_norm": float(norm), "lr": lr})
        scheduler.step(BATCH)
    if rank == 0:
        (Path(folder) / "log.json").write_text(json.dumps(log))
        (Path(folder) / "megatron" / "latest_checkpointed_iteration.txt").write_text(str(peer.STEP))
    dist.barrier()


def updates(model: Any) -> tuple[Any, OptimizerParamScheduler]:
    """Megatron's optimizer of fp32 and its scheduler."""
    config = peer_optimizer.OptimizerConfig(
        optimizer="adam", lr=LR, min_lr=MIN_LR, weight_decay=DECAY[0], adam_beta1=0.9, adam_beta2=BETA2, adam_eps=1e-8, clip_grad=CLIP
    )
    groups = peer_optimizer._get_param_groups([model], config, None)
    optimizer = peer_optimizer._get_megatron_optimizer_based_on_param_groups(config, [model], groups)
    return optimizer, OptimizerParamScheduler(
        optimizer, init_lr=0.0, max_lr=LR, min_lr=MIN_LR, lr_warmup_steps=WARMUP * BATCH, lr_decay_steps=ITERS * BATCH,
        lr_decay_style="cosine", start_wd=DECAY[0], end_wd=DECAY[1], wd_incr_steps=ITERS * BATCH, wd_incr_style="linear",
    )  # fmt: skip


def ours(tp: int, folder: Path, words: tuple[str, ...]) -> list[dict[str, float]]:
    """The log of ``pretrain_gpt.py`` from the same weights."""
    peer.convert("--input", folder / "megatron", "--to", "megatron_sp", "--output", folder / "first")
    flags = [
        "--load", folder / "first", "--finetune", "--use-checkpoint-args", "--seq-length", peer.POSITIONS, "--attention-dropout", 0,
        "--hidden-dropout", 0, "--tensor-model-parallel-size", tp, "--data-path", *words, "--split", "100,0,0", "--vocab-size", VOCAB,
        "--micro-batch-size", MICRO, "--global-batch-size", BATCH, "--train-iters", ITERS, "--seed", SEED, "--lr", LR, "--min-lr", MIN_LR,
        "--lr-decay-style", "cosine", "--lr-warmup-iters", WARMUP, "--start-weight-decay", DECAY[0], "--end-weight-decay", DECAY[1],
        "--weight-decay-incr-style", "linear", "--clip-grad", CLIP, "--adam-beta2", BETA2, "--log-interval", 1, "--eval-iters", 0,
        "--num-threads", 1, "--device", "cpu", "--save", folder / "run",
    ]  # fmt: skip
    launcher = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(tp)]
    done = subprocess.run([*launcher, "pretrain_gpt.py", *map(str, flags)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    records = (json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines())
    return [record for record in records if record["kind"] == "train"]


def check(title: str, tp: int, folder: Path) -> bool:
    words = write_data(folder)
    peer.spawn(train, peer.Ranks(tp, 1), MODELS[title], str(folder), words)
    theirs, found = json.loads((folder / "log.json").read_text()), ours(tp, folder, words)
    assert len(found) == len(theirs) == ITERS, f"{len(found)} and {len(theirs)} steps"
    apart = {key: [abs(float(b[key]) - a[key]) / abs(a[key]) for a, b in zip(theirs, found, strict=True)] for key in ("loss", "grad_norm")}
    same_lr = [a["lr"] for a in theirs] == [b["lr"] for b in found]
    largest = max(abs(float(b["loss"]) - a["loss"]) for a, b in zip(theirs, found, strict=True))
    good = same_lr and max(*apart["loss"], *apart["grad_norm"]) <= LIMIT
    print(
        f"{title}, tp {tp}: loss {theirs[0]['loss']:.4f} to {theirs[-1]['loss']:.4f} in {ITERS} steps; largest difference {largest:.1e}"
        f" (relative {max(apart['loss']):.1e}), of gradient norms relative {max(apart['grad_norm']):.1e};"
        f" learning rates {'equal' if same_lr else 'DIFFER'}{'' if good else ': DIFFERS'}",
        flush=True,
    )
    return good


def main(chosen: list[str]) -> int:
    """Args: names of MODELS; all by default."""
    good = True
    for title in chosen or MODELS:
        for tp in (1, 2):
            with tempfile.TemporaryDirectory() as folder:
                good = check(title, tp, Path(folder)) and good
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
